"""Precision: the engine holds weights, activations, cache, attention or scores in fewer bits.

| format                  | what it is                                                      |
| ----------------------- | --------------------------------------------------------------- |
| bfloat16 .. float8_e5m2 | the real dtype's cast: nearest even, subnormals kept            |
| eXmY, e.g. e5m7         | X exponent and Y mantissa bits; subnormals are flushed to 0     |
| int8                    | 255 levels up to the largest entry: of a matrix, or of a vector |
| int8_channel            | the same with one scale per output channel; weights only        |

All are clipped to the format's finite range (a cast to e4m3 turns overflow into NaN otherwise).
The gradient passes straight through.
"""

import dataclasses
import functools
import re
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from trm_jax import policy
from trm_jax.policy.attention import Attention
from trm_jax.rollouts.streams import each
from trm_jax.types import InputError

FORMATS = ('bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2')
Rounding = Literal['nearest', 'stochastic']
# Streams of a token's key.
_INSIDE, _SCORES = 1_000_000, 4_000_000


class _Grid(NamedTuple):
  """A float format: exponent of its smallest normal number, mantissa bits, largest number."""

  lowest: int
  mantissa: int
  top: float
  subnormals: bool


def _bits(name: str) -> tuple[int, int] | None:
  match = re.fullmatch(r'e(\d+)m(\d+)', name)
  return match and (int(match[1]), int(match[2]))


def _grid(name: str) -> _Grid:
  bits = _bits(name)
  if bits is None:
    info = jnp.finfo(name)
    return _Grid(int(info.minexp), int(info.nmant), float(info.max), True)
  exponent, mantissa = bits
  bias = 2 ** (exponent - 1) - 1
  return _Grid(1 - bias, mantissa, (2 - 2.0**-mantissa) * 2.0**bias, False)


def check_format(argument: str, value: str | None, *, channels: bool = False) -> None:
  """Raises InputError unless `value` is None or a format that `argument` can have."""
  if value is None or value in FORMATS or value == 'int8':
    return
  if value == 'int8_channel':
    if channels:
      return
    raise InputError(f"{argument}='int8_channel' is for weights; use 'int8', one scale a vector.")
  bits = _bits(value)
  if bits is None:
    raise InputError(
      f'{argument}={value!r} is not one of {", ".join(FORMATS)}, int8'
      f'{", int8_channel" if channels else ""} or eXmY such as e5m7.'
    )
  if not (2 <= bits[0] <= 8 and 1 <= bits[1] <= 23):
    raise InputError(
      f'{argument}={value!r} must have 2 to 8 exponent and 1 to 23 mantissa bits: it is simulated'
      ' in float32.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
  """Formats: bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, eXmY; None = the trainer's."""

  # Format of every matrix (norm scales stay float32): float8_e5m2 loses most, bfloat16 least;
  # int8 has one scale a matrix, int8_channel one an output channel.
  weights: str | None = None
  # Format of the input of every matmul; int8 has one scale a token.
  activations: str | None = None
  # Format of keys and values as they enter the cache; int8 has one scale a head.
  kv: str | None = None
  # Format of the exponentials inside attention's softmax, before they are summed; small ones may
  # vanish. int8 has one scale a query.
  attention: str | None = None
  # Format of the scores over the vocabulary, e.g. bfloat16: an output head that is not float32.
  logits: str | None = None
  # Format of the probabilities a token is drawn from; small ones may vanish.
  softmax: str | None = None
  # To the nearest value, or up or down by chance so that the mean is kept.
  rounding: Rounding = 'nearest'

  def __post_init__(self):
    names = ('weights', 'activations', 'kv', 'attention', 'logits', 'softmax')
    for name in names:
      check_format(f'precision.{name}', getattr(self, name), channels=name == 'weights')
    if self.rounding not in ('nearest', 'stochastic'):
      raise InputError(f'precision.rounding={self.rounding!r} is not nearest or stochastic.')
    if self.rounding == 'stochastic' and not any(getattr(self, name) for name in names):
      raise InputError("precision.rounding='stochastic' rounds nothing: set a format as well.")
    if self.rounding == 'stochastic' and self.attention is not None:
      raise InputError(
        f'precision.attention={self.attention!r} rounds to nearest only; leave precision.rounding'
        ' as it is or precision.attention out.'
      )


def _nearest(x, name):
  grid = _grid(name)
  # Clipped in float32: in x's own format the bound itself might round up and overflow.
  x = jnp.clip(x, -grid.top, grid.top)
  if _bits(name) is None:
    return x.astype(name).astype(jnp.float32)
  return jax.lax.reduce_precision(x, *_bits(name))


def _dithered(x, noise, name):
  """x to one of its two neighbours in the format, the upper one where noise says so."""
  grid = _grid(name)
  x = jnp.clip(x, -grid.top, grid.top)
  exponent = jnp.frexp(x)[1] - 1
  step = jnp.maximum(exponent, grid.lowest) - grid.mantissa
  if not grid.subnormals:  # between 0 and the smallest normal number there is nothing
    step = jnp.where(exponent < grid.lowest, grid.lowest, step)
  unit = jnp.ldexp(jnp.float32(1), jnp.maximum(step, -126))
  return jnp.clip(jnp.floor(x / unit + noise) * unit, -grid.top, grid.top)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _round(x, noise, name, axis):
  x32 = x.astype(jnp.float32)
  if name.startswith('int8'):
    scale = jnp.abs(x32).max(axis, keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1)
    level = jnp.round(x32 / scale) if noise is None else jnp.floor(x32 / scale + noise)
    level = jnp.clip(level, -127, 127).astype(jnp.int8)
    out = jnp.where(jnp.isnan(x32), x32, level.astype(jnp.float32) * scale)
  else:
    out = _nearest(x32, name) if noise is None else _dithered(x32, noise, name)
  return out.astype(x.dtype)


@_round.defjvp
def _straight_through(name, axis, primals, tangents):
  return _round(*primals, name, axis), tangents[0]


def round_to(
  x: Float[Array, '*s'],
  dtype: str,
  *,
  noise: Float[Array, '*s'] | None = None,
  axis: int | tuple[int, ...] = -1,
) -> Float[Array, '*s']:
  """x rounded to `dtype` and back, |x| clipped to its largest finite value; NaN stays NaN.

  With `noise`, uniform in [0, 1), rounding is stochastic: up where noise >= 1 - (share of the way
  to the upper neighbour), so that the mean over noise is x. int8 shares one scale along `axis`. The
  result has x's dtype. Its gradient is 1 everywhere, beyond the range too.
  """
  return _round(x, noise, dtype, axis)


def round_weights(
  params: policy.Params,
  precision: Precision,
  strength=1.0,
  key: Key[Array, ''] | None = None,
) -> policy.Params:
  """Parameters as the engine holds them: matrices rounded where strength > 0, scales untouched.

  Stochastic rounding draws from `key`; raises InputError where it is None.
  """
  if precision.weights is None:
    return params
  stochastic = precision.rounding == 'stochastic'
  if stochastic and key is None:
    raise InputError('key=None, but stochastic rounding of weights needs one.')
  leaves, tree = jax.tree_util.tree_flatten_with_path(params)

  def one(index, path, leaf):
    name = jax.tree_util.keystr(path[-1:])
    if 'scale' in name:
      return leaf
    # A matrix is the last two axes (layers and experts before); its inputs are summed over.
    inputs = -1 if 'embed' in name or 'head' in name else -2
    axis = inputs if precision.weights == 'int8_channel' else (-2, -1)
    noise = jax.random.uniform(jax.random.fold_in(key, index), leaf.shape) if stochastic else None
    rounded = round_to(leaf, precision.weights, noise=noise, axis=axis)
    return jnp.where(strength > 0, rounded, leaf)

  rounded = [one(index, path, leaf) for index, (path, leaf) in enumerate(leaves)]
  return jax.tree_util.tree_unflatten(tree, rounded)


def _uniform(keys, shape):
  return each(lambda k: jax.random.uniform(k, shape), keys)


def rounding_hooks(precision: Precision, strength=1.0, *, temperature: float = 1.0) -> policy.Hooks:
  """Hooks that round activations, the KV cache and scores where strength > 0 (it may be traced).

  The probabilities that `softmax` rounds are those of scores / `temperature`.
  """
  stochastic = precision.rounding == 'stochastic'

  def rounding(name, keys=None):
    """x -> x rounded, with noise of its own for each token where there are keys."""
    if name is None:
      return None

    def to(x):
      noise = None if keys is None else _uniform(keys, x.shape[2:])
      return jnp.where(strength > 0, round_to(x, name, noise=noise), x)

    return to

  def bind(hooks, layer, keys, real):
    """Activations and cache draw apart; sites of a layer that have one shape share their noise."""
    of = lambda stream: each(lambda k: jax.random.fold_in(k, _INSIDE + 2 * layer + stream), keys)
    return dataclasses.replace(
      hooks,
      activation=rounding(precision.activations, of(0)),
      kv=rounding(precision.kv, of(1)),
    )

  def scores(x, keys):
    keyed = lambda stream: (
      # A key's first streams are those of its `split`, from which `heavy_tail` draws.
      each(lambda k: jax.random.fold_in(k, _SCORES + stream), keys) if stochastic else None
    )
    if precision.logits is not None:
      x = rounding(precision.logits, keyed(0))(x)
    if precision.softmax is not None:
      p = rounding(precision.softmax, keyed(1))(jax.nn.softmax(x / temperature))
      p = jnp.where((p > 0).any(-1, keepdims=True), temperature * jnp.log(p), x)
      x = jnp.where(strength > 0, p, x)
    return x

  inside = precision.activations is not None or precision.kv is not None
  plain = inside and not stochastic
  return policy.Hooks(
    activation=rounding(precision.activations) if plain else None,
    kv=rounding(precision.kv) if plain else None,
    bind=bind if inside and stochastic else None,
    logits=None if precision.logits is None and precision.softmax is None else scores,
  )


def attention(precision: Precision, own: Attention, strength=1.0) -> Attention:
  """The engine's attention: `own`, its exponentials rounded where strength > 0 (may be traced).

  Weights are e / sum(e) of e = round(exp(score - largest)); the largest is 1 in every format, so
  they always add up to 1.
  """
  if precision.attention is None:
    return own
  rounding = functools.partial(round_to, dtype=precision.attention)

  def either(*args, **kwargs):
    rounded = own(*args, exponentials=rounding, **kwargs)
    return jnp.where(strength > 0, rounded, own(*args, **kwargs))

  return either
