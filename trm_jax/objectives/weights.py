"""Ratio corrections: how much a token sampled by the rollout counts for the policy.

    log_ratio = logp_policy - logp_rollout,   ratio = exp(log_ratio)

Weights are detached from the gradient and 1 outside `valid`. NaN means that the engine reported no
log-prob for the token; `resolve_missing` decides once, before anything else, what becomes of it.
Until then NaN stays NaN, in the weight of the token or of the whole row.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import extremes
from trm_jax.divergences.ratios import LOG_RATIO_CAP, ratio
from trm_jax.types import InputError

Missing = Literal['reject', 'neutral', 'error']
# Log-probs are at most 0, but for rounding in whatever precision the engine computes them.
ROUNDING = 1e-3


def truncated(
  log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T'], *, max_ratio: float = 2.0
) -> Float[Array, 'B T']:
  """Truncated importance sampling (TIS) per token: min(ratio, max_ratio), detached.

  >>> valid = jnp.ones((1, 2), bool)
  >>> np.asarray(trm.truncated(jnp.log(jnp.array([[.5, 8.]])), valid, max_ratio=2.))
  array([[0.5, 2. ]], dtype=float32)
  """
  weight = extremes.at_most(ratio(log_ratio, valid), max_ratio)
  return jax.lax.stop_gradient(jnp.where(valid, weight, 1))


def sequence_truncated(
  log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T'], *, max_ratio: float = 2.0
) -> Float[Array, 'B T']:
  """TIS per sequence: min(product of ratios, max_ratio) on each of its tokens, detached."""
  log_ratio = log_ratio.astype(jnp.promote_types(log_ratio.dtype, jnp.float32))
  log_product = jnp.where(valid, log_ratio, 0).sum(-1, keepdims=True)
  product = extremes.at_most(ratio(log_product, jnp.ones_like(log_product, bool)), max_ratio)
  return jax.lax.stop_gradient(jnp.where(valid, product, 1))


def resolve_missing(
  rollout_logp: Float[Array, 'B T'],
  policy_logp: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  missing: Missing = 'reject',
  trainer_logp: Float[Array, 'B T'] | None = None,
) -> tuple[Float[Array, 'B T'], Bool[Array, 'B']]:
  """(rollout log-probs without NaN on valid tokens, rows that may be used).

  `reject` drops a row with a missing log-prob, `neutral` reads the engine as agreeing there with
  the trainer's numerics at the weights it drew with (`trainer_logp`; default: the policy's, the
  same in the first update), `error` is raised by the training loop before the batch is used and
  acts as `reject` here. A report that cannot be is a real violation and always drops the row: a
  log-prob above 0 (beyond rounding, 1e-3) or of -inf for a token that was drawn, a log-ratio that
  is infinite or above 20 nats, where the ratio is capped and its gradient gone. No gradient flows
  into the filled values. Raises InputError for any other word.

  >>> policy_logp, valid = jnp.full((2, 2), -1.), jnp.ones((2, 2), bool)
  >>> rollout_logp = jnp.array([[-1., -1.1], [-1., jnp.nan]])
  >>> filled, usable = trm.resolve_missing(rollout_logp, policy_logp, valid)
  >>> usable
  Array([ True, False], dtype=bool)
  """
  if missing not in ('reject', 'neutral', 'error'):
    raise InputError(f"missing={missing!r} is not 'reject', 'neutral' or 'error'.")
  rollout_logp, policy_logp = (
    x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (rollout_logp, policy_logp)
  )
  absent = jnp.isnan(rollout_logp)
  agreeing = policy_logp if trainer_logp is None else trainer_logp
  filled = jnp.where(absent, jax.lax.stop_gradient(agreeing), rollout_logp)
  log_ratio = jax.lax.stop_gradient(policy_logp) - filled
  bad = valid & ~(jnp.isfinite(log_ratio) & (log_ratio <= LOG_RATIO_CAP))
  bad = bad | (valid & (filled > ROUNDING))
  if missing != 'neutral':
    bad = bad | (valid & absent)
  return filled, ~bad.any(-1)
