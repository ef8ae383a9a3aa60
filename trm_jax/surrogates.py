"""Objectives per token, and the one place where tokens and rows become a loss.

| surrogate   | per token, to be maximised                                             |
| ----------- | ---------------------------------------------------------------------- |
| `ratio_pg`  | ratio * A, unclipped: the paper's surrogate (Algorithm 1)              |
| `ppo_clip`  | min(ratio * A, clip(ratio) * A)                                        |
| `decoupled` | ppo_clip on the drift ratio times the truncated, detached engine ratio |

`anchor_logp` is the denominator of the ratio: rollout log-probs (what the engine reports) or log-
probs recomputed by the trainer. The two differ exactly by the mismatch. Any surrogate goes with any
mask: `aggregate` drops rejected rows with `where`, so they add exactly 0 to value and gradient
whatever they hold.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import importance
from trm_jax.types import InputError, Mean

ReduceTokens = Literal['sum', 'mean', 'constant']
NormalizeBy = Literal['total', 'accepted']


def _weigh(value, advantages):
  """value(A) per token. An A that is not finite shows in the value and has no gradient, so that
  the zero cotangent of a rejected row stays zero: 0 * NaN would not."""
  a = advantages[:, None]
  known = jnp.isfinite(a)
  return jnp.where(known, value(jnp.where(known, a, 0)), a)


def _check(advantages, **per_token) -> None:
  """Raises InputError unless the named arrays are [B, T], all of one shape, and advantages [B]."""
  first, expected = next((name, x.shape) for name, x in per_token.items())
  for name, x in per_token.items():
    if x.shape != expected:
      raise InputError(
        f'{name} has shape {x.shape} and {first} {expected}: give both one value per token, [B, T].'
      )
  if advantages.shape != expected[:1]:
    raise InputError(
      f'advantages has shape {advantages.shape}, but {first} is {expected}: give one for each row,'
      f' {expected[:1]}.'
    )


def ratio_pg(
  logp: Float[Array, 'B T'],
  anchor_logp: Float[Array, 'B T'],
  advantages: Float[Array, 'B'],
  valid: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """ratio * A per token; gradient ratio * A * grad logp. arXiv 2512.23075, eq. 2, Alg. 1."""
  _check(advantages, logp=logp, anchor_logp=anchor_logp, valid=valid)
  r = importance.ratio(logp - anchor_logp, valid)
  return _weigh(lambda a: r * a, advantages)


def ppo_clip(
  logp: Float[Array, 'B T'],
  anchor_logp: Float[Array, 'B T'],
  advantages: Float[Array, 'B'],
  valid: Bool[Array, 'B T'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Float[Array, 'B T']:
  """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A): the clip acts outward only.

  Gradient to logp; exactly 0 where the clip is active. PPO, arXiv 1707.06347, eq. 7.
  """
  _check(advantages, logp=logp, anchor_logp=anchor_logp, valid=valid)
  r = importance.ratio(logp - anchor_logp, valid)
  clipped = jnp.clip(r, 1 - clip_low, 1 + clip_high)
  return _weigh(lambda a: jnp.minimum(r * a, clipped * a), advantages)


def decoupled(
  logp: Float[Array, 'B T'],
  anchor_logp: Float[Array, 'B T'],
  rollout_logp: Float[Array, 'B T'],
  advantages: Float[Array, 'B'],
  valid: Bool[Array, 'B T'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  max_ratio: float = 2.0,
) -> Float[Array, 'B T']:
  """Drift and engine noise apart: ppo_clip(policy / anchor) * min(anchor / rollout, max_ratio).

  `anchor_logp` uses the trainer's numerics at the weights the rollout used: the first factor then
  measures drift alone (clipped outward), the second engine noise alone (truncated, detached).
  """
  weight = importance.truncated(anchor_logp - rollout_logp, valid, max_ratio=max_ratio)
  return weight * ppo_clip(
    logp, anchor_logp, advantages, valid, clip_low=clip_low, clip_high=clip_high
  )


def aggregate(
  per_token: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  keep: Bool[Array, 'B'] | Bool[Array, 'B T'],
  *,
  reduce_tokens: ReduceTokens = 'sum',
  normalize_by: NormalizeBy = 'total',
  constant: int | float | None = None,
  axis_name: str | None = None,
) -> Mean:
  """Per-token values -> one mean over sequences, still undivided.

  Within a row the valid, kept tokens are summed (`sum`, TRM's own), averaged over the row's valid
  tokens (`mean`) or summed and divided by `constant`. Over rows the count is all rows (`total`,
  TRM's own: the estimator stays unbiased for the masked objective) or the rows that keep a token
  (`accepted`). `keep` is [B] for sequence criteria or [B, T]. Rejected entries add exactly 0.
  """
  if reduce_tokens not in ('sum', 'mean', 'constant'):
    raise InputError(f"reduce_tokens={reduce_tokens!r} is not 'sum', 'mean' or 'constant'.")
  if normalize_by not in ('total', 'accepted'):
    raise InputError(f"normalize_by={normalize_by!r} is not 'total' or 'accepted'.")
  if valid.shape != per_token.shape or keep.shape not in (valid.shape, valid.shape[:1]):
    raise InputError(
      f'per_token has shape {per_token.shape}, valid {valid.shape} and keep {keep.shape}: make them'
      ' [B, T], [B, T] and [B] or [B, T].'
    )
  if keep.ndim == 1:
    keep = jnp.broadcast_to(keep[:, None], valid.shape)
  rows = jnp.where(valid & keep, per_token, 0).sum(-1)
  if reduce_tokens == 'mean':
    rows = rows / jnp.maximum(valid.sum(-1), 1).astype(rows.dtype)
  elif reduce_tokens == 'constant':
    if constant is None or not constant > 0:
      raise InputError(
        f"constant={constant} must be > 0 with reduce_tokens='constant', e.g. the longest response."
      )
    rows = rows / constant
  kept = (valid & keep).any(-1)
  counted = jnp.ones_like(rows) if normalize_by == 'total' else kept.astype(rows.dtype)
  return Mean(rows.sum(), counted.sum()).over(axis_name)
