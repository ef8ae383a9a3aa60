"""What the log-probs of sampled tokens tell: ratios, estimates of KL(rollout || policy), weights.

log_ratio = logp_policy - logp_rollout,   ratio = exp(log_ratio),   W = product over a trajectory

Low precision is raised to float32 before anything else; NaN, a missing log-prob, stays NaN.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import extremes
from trm_jax.divergences.passes import terms
from trm_jax.types import InputError

# exp(20) = 5e8: beyond that a ratio says "different", and float32 products overflow. Applied inside
# the exponential only, never before a criterion sees the log-ratio.
LOG_RATIO_CAP = 20.0


def raised(x: Float[Array, '*s']) -> Float[Array, '*s']:
  """x in at least float32: half precision rounds log-probs by more than whole mismatches."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def ratio(log_ratio: Float[Array, '*s'], valid: Bool[Array, '*s']) -> Float[Array, '*s']:
  """exp(log_ratio) in [e^-20, e^20] on valid tokens and 1 elsewhere; at least float32.

  NaN (missing) stays NaN, without gradient, until `resolve_missing` decides about it; the gradient
  is finite always, and 0 beyond the cap.

  >>> np.asarray(trm.ratio(jnp.array([0., jnp.log(2), 99.]), jnp.array([True, True, False])))
  array([1., 2., 1.], dtype=float32)
  """
  log_ratio = raised(log_ratio)
  missing = valid & jnp.isnan(log_ratio)
  safe = jnp.where(valid & ~missing, log_ratio, 0)
  capped = jnp.exp(jnp.clip(safe, -LOG_RATIO_CAP, LOG_RATIO_CAP))
  return jnp.where(missing, jnp.nan, capped)


def k1(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """-log_ratio: unbiased for KL(rollout || policy) under rollout samples; any sign.

  >>> np.asarray(trm.k1(jnp.array([.1, -.1])))
  array([-0.1,  0.1], dtype=float32)
  """
  return -raised(log_ratio)


def k2(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """log_ratio^2 / 2 >= 0: biased, symmetric in the direction.

  >>> np.asarray(trm.k2(jnp.array([.1, -.1]))).round(4)
  array([0.005, 0.005], dtype=float32)
  """
  return 0.5 * jnp.square(raised(log_ratio))


def k3(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """exp(log_ratio) - 1 - log_ratio >= 0: unbiased for KL(rollout || policy) under rollout samples.

  Stable for tiny ratios (no cancellation); inf where the ratio overflows float32.

  >>> np.asarray(trm.k3(jnp.array([.1, -.1]))).round(4)
  array([0.0052, 0.0048], dtype=float32)
  """
  log_ratio = raised(log_ratio)
  finite = jnp.where(log_ratio == jnp.inf, 0, log_ratio)  # expm1(inf) - inf would read as missing
  return jnp.where(log_ratio == jnp.inf, jnp.inf, terms.bregman(finite))


def over_trajectories(
  x: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  rows: Bool[Array, 'B'] | None = None,
  trajectory: Int[Array, 'B'] | None = None,
) -> tuple[Float[Array, 'B'], Bool[Array, 'B']]:
  """(sums of x over the valid tokens of each trajectory, where they stand), float32, no gradient.

  A trajectory is a row, or all rows of one id in `trajectory`, any integers: its sum then stands at
  the first of them. Over `rows` (default all); a row without valid tokens does not exist. NaN stays
  NaN. Raises InputError where shapes differ.
  """
  for name, given in (('rows', rows), ('trajectory', trajectory)):
    if given is not None and given.shape != x.shape[:1]:
      raise InputError(
        f'{name} has shape {given.shape}, but there are {len(x)} rows: give one each.'
      )
  if valid.shape != x.shape:
    raise InputError(f'valid has shape {valid.shape}, but x {x.shape}: give one value per token.')
  sums = jnp.where(valid, jax.lax.stop_gradient(x).astype(jnp.float32), 0).sum(-1)
  there = valid.any(-1) if rows is None else valid.any(-1) & rows
  if trajectory is None:
    return sums, there
  same = (trajectory[:, None] == trajectory[None, :]) & there[None, :]
  first = same.argmax(-1) == jnp.arange(len(x))
  return jnp.where(same, sums[None, :], 0).sum(-1), there & first


def effective_sample_size(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  rows: Bool[Array, 'B'] | None = None,
  trajectory: Int[Array, 'B'] | None = None,
) -> Float[Array, '']:
  """Effective share of the n trajectories, in (0, 1]: (sum W)^2 / (n sum W^2).

  Arguments and InputError as in `over_trajectories`. From W / max W, so it neither overflows nor
  depends on a clamp; infinite W share all the weight. NaN for no trajectory, where a log-ratio is
  missing, and where every W is 0. Kong 1992.

  >>> log_ratio = jnp.log(jnp.array([[1.], [1.], [2.]]))
  >>> f'{trm.effective_sample_size(log_ratio, jnp.ones((3, 1), bool)):.4f}'  # 16 / (3 * 6)
  '0.8889'
  """
  return share_of(*over_trajectories(log_ratio, valid, rows, trajectory))


def share_of(log_w: Float[Array, 'B'], there: Bool[Array, 'B']) -> Float[Array, '']:
  """`effective_sample_size` of the log-weights that are there."""
  top = extremes.largest(log_w, where=there)
  level = log_w == top  # inf - inf is no number
  w = jnp.where(there, jnp.where(level, 1, jnp.exp(jnp.where(level, 0, log_w - top))), 0)
  share = jnp.square(w.sum()) / (there.sum().astype(w.dtype) * jnp.square(w).sum())
  return jnp.where(top > -jnp.inf, extremes.at_most(share, 1), jnp.nan)
