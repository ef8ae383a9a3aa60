"""How far two next-token distributions are apart, per position, exact over the vocabulary.

| function                  | quantity                                                       |
| ------------------------- | -------------------------------------------------------------- |
| `statistics`              | KL, TV, entropy, both log-probs (and more) from one read        |
| `kl`, `total_variation`   | KL(rollout || policy), the paper's direction; 1/2 sum |q - p|   |
| `entropy`, `logp`         | of one distribution                                            |

Arguments come as (policy, rollout), logits of any float dtype; everything is float32 from centred
logits. Temperature divides the logits of *both* sides. With `axis_name` the last axis is this
device's contiguous block of the vocabulary (inside `shard_map`, `pmap` or `vmap`).

Entries from `vocab_size` on, a static number, pad the vocabulary: they have no mass, whatever they
hold, and no gradient. Both sides may pad to different sizes, unless the vocabulary is split. Tokens
outside the vocabulary have no log-prob but NaN, which means missing; -100 is such a token.

Large arrays are read a block of rows at a time (CPU) or by one kernel (TPU), and no temporary has
the size of the logits. Their rows must be local: where arrays are split over a mesh, call these
inside `shard_map` (`sharding.over_vocabulary`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax import extremes
from trm_jax.divergences.passes import blocks, pair, terms, vocabulary
from trm_jax.types import InputError, Statistics


def check_logits(temperature, tokens=None, *, vocab_size=None, axis_name=None, **logits) -> None:
  """Raises InputError unless the named logits are float arrays [*b, V] of one shape, V >= 1.

  A `vocab_size` must lie in 1..V, and V may then differ unless it is split. `tokens`, where given,
  must be integers [*b]; a temperature known at trace time must be > 0.
  """
  devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
  first, expected = next(iter(logits.items()))
  for name, x in logits.items():
    if not hasattr(x, 'dtype'):
      raise InputError(f'{name} has type {type(x).__name__}: pass a jax or NumPy array.')
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise InputError(
        f'{name} has dtype {x.dtype}, but logits are real: pass float32 or bfloat16.'
      )
    if x.ndim < 1 or x.shape[-1] < 1:
      raise InputError(f'{name} has shape {x.shape}: its last axis must be a vocabulary of >= 1.')
    check_vocab_size(vocab_size, x.shape[-1] * devices, name)
    if (vocab_size is None or axis_name) and x.shape[-1] != expected.shape[-1]:
      raise InputError(
        f'{name} scores {x.shape[-1]} tokens and {first} {expected.shape[-1]}: both must score the'
        ' same vocabulary; give vocab_size if they are padded, or extend the shorter one by -inf.'
      )
    if x.shape[:-1] != expected.shape[:-1]:
      raise InputError(f'{name} has shape {x.shape} and {first} {expected.shape}; make them equal.')
  if tokens is not None:
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise InputError(f'tokens has dtype {tokens.dtype}: pass integer token ids.')
    if tokens.shape != expected.shape[:-1]:
      raise InputError(
        f'tokens has shape {tokens.shape}, but {first} {expected.shape} holds positions'
        f' {expected.shape[:-1]}; logits[:, t] must score tokens[:, t].'
      )
  if jnp.ndim(temperature):
    raise InputError(f'temperature has shape {temperature.shape}: pass one number for all rows.')
  if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
    raise InputError(f'temperature={temperature} must be > 0.')


def check_vocab_size(vocab_size, width, name) -> None:
  """Raises InputError unless `vocab_size`, where given, lies in 1..width."""
  if vocab_size is not None and not 1 <= vocab_size <= width:
    raise InputError(
      f'vocab_size={vocab_size} must be 1 to {width}, the entries of {name}: give the number of'
      ' tokens, padding left out.'
    )


def static(temperature):
  """None for a temperature that is known to be 1: the division is then left out."""
  if isinstance(temperature, int | float) and temperature == 1:
    return None
  return jnp.asarray(temperature, jnp.float32)


def statistics(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b W'],
  tokens: Int[Array, '*b'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  full: bool = False,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Statistics:
  """Everything the trainer asks of a pair of policies, per position, from one read of the logits.

  KL(rollout || policy) in [0, inf], TV in [0, 1], the policy's entropy in [0, log V] and the
  log-probs of `tokens` on both sides; nats, float32. `full` adds KL(policy || rollout), chi^2 =
  sum policy^2 / rollout - 1 and sum policy^2. inf is a violation: mass where the other side has
  none. NaN logits, and positions of -inf alone, give NaN there and nowhere else. A token outside
  the vocabulary, such as -100, has NaN log-probs.

  Gradients: policy_logp and entropy to `policy_logits`; nothing else carries any. With `axis_name`:
  3 all-reduces of 9 floats a position in all (12 if full). arXiv 2512.23075, eq. 4 and 5. Raises
  InputError for shapes or dtypes that do not fit.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> found = trm.statistics(policy, rollout, jnp.array(0), full=True)
  >>> f'{found.kl:.4f} {found.tv:.4f} {found.chi2:.4f}'
  '0.0227 0.1000 0.0518'
  """
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  logits = dict(policy_logits=policy_logits, rollout_logits=rollout_logits)
  check_logits(temperature, tokens, **place, **logits)
  rollout_logits = jax.lax.stop_gradient(rollout_logits)
  values, seeds = _statistics(
    policy_logits, rollout_logits, tokens, static(temperature), full, vocab_size, axis_name
  )
  return with_gradient(values, seeds, policy_logits, axis_name)


def with_gradient(values: Statistics, seeds, logits, axis_name) -> Statistics:
  """The statistics with the gradients of log-prob and entropy flowing as `pair.shared` says."""
  logp, entropy = (
    pair.shared(value, seed, logits, axis_name)
    for value, seed in zip((values.policy_logp, values.entropy), seeds, strict=True)
  )
  return dataclasses.replace(values, policy_logp=logp, entropy=entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _statistics(policy_logits, rollout_logits, tokens, temperature, *static):
  return _statistics_forward(policy_logits, rollout_logits, tokens, temperature, *static)[0]


def _statistics_forward(
  policy_logits, rollout_logits, tokens, temperature, full, vocab_size, axis_name
):
  sides = policy_logits, rollout_logits, tokens, temperature, axis_name
  policy, rollout, totals = pair.compare(*sides, full=full, vocab_size=vocab_size)
  seed = pair.seed(policy_logits[..., 0])
  return (gather(policy, rollout, totals), (seed, seed)), (
    policy_logits,
    tokens,
    temperature,
    policy,
  )


def gather(policy: pair.Side, rollout: pair.Side, totals: terms.Terms) -> Statistics:
  """Statistics from the normalised sides and the divergence sums."""
  return Statistics(
    kl=totals.kl,
    tv=_half(totals.tv),
    entropy=policy.entropy,
    policy_logp=policy.logp,
    rollout_logp=rollout.logp,
    reverse_kl=totals.reverse_kl,
    chi2=totals.chi2,
    square=totals.square,
  )


def _half(total):
  # Rounding reaches 1 + 1e-7 where the supports are disjoint.
  return extremes.at_most(0.5 * total, 1)


def _statistics_backward(full, vocab_size, axis_name, residuals, g):
  del full
  to_values, (to_logp, to_entropy) = g
  to = to_logp + to_values.policy_logp, to_entropy + to_values.entropy
  return _to_logits(*residuals, *to, vocab_size, axis_name), None, None, None


def _to_logits(logits, tokens, temperature, side, to_logp, to_entropy, vocab_size, axis_name):
  """`pair.score_gradient` of the logits without padding, and 0 for the padding."""
  (logits,), to_padded = _unpadded(vocab_size, axis_name, logits)
  slope = pair.score_gradient(logits, tokens, temperature, side, to_logp, to_entropy, axis_name)
  return to_padded((slope,))[0]


def _unpadded(vocab_size, axis_name, *logits):
  """(logits without padding, function from their cotangents to those of the padded logits)."""
  real = lambda x: vocabulary.without_padding(x, vocab_size, axis_name)
  unpadded, back = jax.vjp(lambda *xs: [real(x) for x in xs], *logits)
  return unpadded, lambda slopes: back(list(slopes))


_statistics.defvjp(_statistics_forward, _statistics_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _kl_and_tv(policy_logits, rollout_logits, temperature, vocab_size, axis_name):
  sides = policy_logits, rollout_logits, None, temperature, axis_name
  *_, totals = pair.compare(*sides, vocab_size=vocab_size)
  seed = pair.seed(policy_logits[..., 0], rollout_logits[..., 0])
  return (totals.kl, _half(totals.tv)), (seed, seed)


def _kl_and_tv_forward(policy_logits, rollout_logits, temperature, vocab_size, axis_name):
  place = vocab_size, axis_name
  out = _kl_and_tv(policy_logits, rollout_logits, temperature, *place)
  sides = tuple(
    pair.one(x, None, temperature, axis_name, entropy=False, vocab_size=vocab_size)
    for x in (policy_logits, rollout_logits)
  )
  logits, _ = _unpadded(*place, policy_logits, rollout_logits)
  means = pair.mean_signs(*logits, temperature, *sides, axis_name)
  return out, (policy_logits, rollout_logits, temperature, sides, out[0][0], means)


def _kl_and_tv_backward(vocab_size, axis_name, residuals, g):
  values, seeds = g
  total = [value + seed for value, seed in zip(values, seeds, strict=True)]
  logits, to_padded = _unpadded(vocab_size, axis_name, *residuals[:2])
  return *to_padded(pair.divergence_gradients(*logits, *residuals[2:], total)), None


_kl_and_tv.defvjp(_kl_and_tv_forward, _kl_and_tv_backward)


def _differentiable(index, policy_logits, rollout_logits, temperature, vocab_size, axis_name):
  policy_logits, rollout_logits = blocks.match_varying(policy_logits, rollout_logits)
  sides = policy_logits, rollout_logits, static(temperature)
  values, seeds = _kl_and_tv(*sides, vocab_size, axis_name)
  return pair.shared(values[index], seeds[index], policy_logits, axis_name)


def kl(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b W'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """KL(rollout || policy) per position in nats, in [0, inf].

      sum_v p(v) (exp(d) - 1 - d) + sum_{p(v)=0} q(v),   d = log q - log p

  with p the rollout and q the policy: every term is >= 0 and an error of the normalisers enters
  squared, so the result is never negative and exact down to 1e-11. inf where the policy gives 0 to
  a token the rollout can sample; finite where only the policy has mass. NaN logits give NaN.
  float32 for any input dtype. Gradients flow into both. arXiv 2512.23075, eq. 5.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> f'{trm.kl(policy, rollout):.4f} {trm.kl(rollout, policy):.4f}'  # not symmetric
  '0.0227 0.0241'
  """
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  check_logits(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits, **place)
  return _differentiable(0, policy_logits, rollout_logits, temperature, **place)


def total_variation(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b W'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Total variation per position, in [0, 1]: 1/2 sum_v |q(v) - p(v)|.

  Exact over the vocabulary, float32, symmetric; gradients flow into both. arXiv 2512.23075, eq. 4.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> f'{trm.total_variation(policy, rollout):.4f}'
  '0.1000'
  """
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  check_logits(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits, **place)
  return _differentiable(1, policy_logits, rollout_logits, temperature, **place)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _score(logits, tokens, temperature, vocab_size, axis_name, entropy):
  return _score_forward(logits, tokens, temperature, vocab_size, axis_name, entropy)[0]


def _score_forward(logits, tokens, temperature, vocab_size, axis_name, entropy):
  side = pair.one(logits, tokens, temperature, axis_name, entropy=entropy, vocab_size=vocab_size)
  value = side.entropy if entropy else side.logp
  return (value, pair.seed(logits[..., 0])), (logits, tokens, temperature, side)


def _score_backward(vocab_size, axis_name, entropy, residuals, g):
  g = sum(g)
  to = (None, g) if entropy else (g, None)
  return _to_logits(*residuals, *to, vocab_size, axis_name), None, None


_score.defvjp(_score_forward, _score_backward)


def entropy(
  logits: Float[Array, '*b V'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Entropy per position in nats, in [0, log V]; float32; gradient flows.

  >>> f'{trm.entropy(jnp.zeros(4)):.4f}'  # log 4
  '1.3863'
  """
  check_logits(temperature, logits=logits, vocab_size=vocab_size, axis_name=axis_name)
  value, seed = _score(logits, None, static(temperature), vocab_size, axis_name, True)
  return pair.shared(value, seed, logits, axis_name)


def logp(
  logits: Float[Array, '*b V'],
  tokens: Int[Array, '*b'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Log-probability of each token in nats, in [-inf, 0]; float32; gradient flows.

  NaN, which means missing, for a token outside the vocabulary, such as -100.

  >>> f'{trm.logp(jnp.zeros(4), jnp.array(2)):.4f}'  # log 1/4
  '-1.3863'
  >>> f'{trm.logp(jnp.zeros(4), jnp.array(-100))}'  # no such token: missing
  'nan'
  """
  check_logits(temperature, tokens, logits=logits, vocab_size=vocab_size, axis_name=axis_name)
  value, seed = _score(logits, tokens, static(temperature), vocab_size, axis_name, False)
  return pair.shared(value, seed, logits, axis_name)
