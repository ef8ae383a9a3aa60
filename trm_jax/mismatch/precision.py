"""Precision: the engine stores weights, activations or the KV cache in fewer bits.

Real dtype casts, rounded to nearest even and clipped to the format's finite range (e4m3 turns
overflow into NaN otherwise). The gradient passes straight through.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax import policy
from trm_jax.types import InputError

FORMATS = ('bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
  """Formats of the engine; None keeps the trainer's."""

  # Format of every matrix (norm scales stay float32), e.g. float8_e5m2.
  weights: str | None = None
  # Format of the input of every matmul.
  activations: str | None = None
  # Format of keys and values as they enter the cache.
  kv: str | None = None

  def __post_init__(self):
    for name in ('weights', 'activations', 'kv'):
      value = getattr(self, name)
      if value is not None and value not in FORMATS:
        raise InputError(f'precision.{name}={value!r} is not one of {", ".join(FORMATS)}.')


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cast(x, dtype):
  top = float(jnp.finfo(dtype).max)
  # Clipped in float32: in x's own format the bound itself might round up and overflow.
  return jnp.clip(x.astype(jnp.float32), -top, top).astype(dtype).astype(x.dtype)


@_cast.defjvp
def _straight_through(dtype, primals, tangents):
  return _cast(*primals, dtype), tangents[0]


def round_to(x: Float[Array, '*s'], dtype: str) -> Float[Array, '*s']:
  """x rounded to `dtype` and back, |x| clipped to its largest finite value; NaN stays NaN.

  The result has x's dtype. Its gradient is 1 everywhere, beyond the range too.
  """
  return _cast(x, dtype)


def round_weights(params: policy.Params, precision: Precision, strength=1.0) -> policy.Params:
  """Parameters as the engine holds them: matrices rounded where strength > 0, scales untouched."""
  if precision.weights is None:
    return params

  def one(path, leaf):
    if 'scale' in jax.tree_util.keystr(path[-1:]):
      return leaf
    return jnp.where(strength > 0, round_to(leaf, precision.weights), leaf)

  return jax.tree_util.tree_map_with_path(one, params)


def hooks(precision: Precision, strength=1.0) -> policy.Hooks:
  """Hooks that round activations and the KV cache where strength > 0 (it may be traced)."""

  def rounding(dtype):
    return None if dtype is None else lambda x: jnp.where(strength > 0, round_to(x, dtype), x)

  return policy.Hooks(activation=rounding(precision.activations), kv=rounding(precision.kv))
