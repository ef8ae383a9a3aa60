"""Ratio corrections: how much a token sampled by the rollout counts for the policy.

    log_ratio = logp_policy - logp_rollout,   ratio = exp(log_ratio)

Weights are detached from the gradient and 1 outside `valid`. NaN means that the engine reported no
log-prob for the token; `resolve_missing` decides once, before anything else, what becomes of it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.types import InputError

# exp(20) = 5e8: beyond that a ratio says "different", and float32 products overflow. Applied inside
# the exponential only, never before a criterion sees the log-ratio.
LOG_RATIO_CAP = 20.0

Missing = Literal['reject', 'neutral', 'error']


def ratio(log_ratio: Float[Array, '*s'], valid: Bool[Array, '*s']) -> Float[Array, '*s']:
  """exp(log_ratio) in (0, e^20] on valid tokens and 1 elsewhere; differentiable, finite always."""
  safe = jnp.where(valid & ~jnp.isnan(log_ratio), log_ratio, 0)
  return jnp.exp(jnp.clip(safe, -LOG_RATIO_CAP, LOG_RATIO_CAP))


def none(log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B T']:
  """No correction: weight 1."""
  del valid
  return jnp.ones_like(log_ratio)


def truncated(
  log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T'], *, max_ratio: float = 2.0
) -> Float[Array, 'B T']:
  """Truncated importance sampling (TIS) per token: min(ratio, max_ratio), detached."""
  weight = jnp.minimum(ratio(log_ratio, valid), max_ratio)
  return jax.lax.stop_gradient(jnp.where(valid, weight, 1))


def sequence_truncated(
  log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T'], *, max_ratio: float = 2.0
) -> Float[Array, 'B T']:
  """TIS per sequence: min(product of ratios, max_ratio) on each of its tokens, detached."""
  log_product = jnp.where(valid, log_ratio, 0).sum(-1, keepdims=True)
  product = jnp.minimum(ratio(log_product, jnp.ones_like(log_product, bool)), max_ratio)
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
  acts as `reject` here. An infinite log-ratio on a valid token is a real violation and always drops
  the row. No gradient flows into the filled values. Raises InputError for any other word.
  """
  if missing not in ('reject', 'neutral', 'error'):
    raise InputError(f"missing={missing!r} is not 'reject', 'neutral' or 'error'.")
  absent = jnp.isnan(rollout_logp)
  agreeing = policy_logp if trainer_logp is None else trainer_logp
  filled = jnp.where(absent, jax.lax.stop_gradient(agreeing), rollout_logp)
  log_ratio = jax.lax.stop_gradient(policy_logp) - filled
  bad = valid & ~jnp.isfinite(log_ratio)
  if missing != 'neutral':
    bad = bad | (valid & absent)
  return filled, ~bad.any(-1)


def effective_sample_size(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  rows: Bool[Array, 'B'] | None = None,
) -> Float[Array, '']:
  """Effective share of sequences, in (0, 1]: (sum W)^2 / (B sum W^2), W = product of ratios.

  Over `rows` (default all); NaN for none, and where one of their valid log_ratio is not finite.
  From W / max W, so it neither overflows nor depends on a clamp; empty rows count as W = 1.
  Raises InputError where shapes differ.
  """
  if valid.shape != log_ratio.shape or (rows is not None and rows.shape != log_ratio.shape[:1]):
    raise InputError(
      f'log_ratio has shape {log_ratio.shape}, valid {valid.shape}'
      + ('' if rows is None else f' and rows {rows.shape}')
      + ': give one value per token, [B, T], and rows [B].'
    )
  log_w = jax.lax.stop_gradient(jnp.where(valid, log_ratio, 0)).astype(jnp.float32).sum(-1)
  rows = jnp.ones_like(log_w, bool) if rows is None else rows
  w = jnp.where(rows, jnp.exp(log_w - jnp.where(rows, log_w, -jnp.inf).max()), 0)
  return jnp.square(w.sum()) / (rows.sum().astype(w.dtype) * jnp.square(w).sum())
