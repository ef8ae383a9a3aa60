"""Objectives per token, and the one place where tokens and rows become a loss.

| surrogate   | per token, to be maximised                                             |
| ----------- | ---------------------------------------------------------------------- |
| `ratio_pg`  | ratio * A, unclipped: the paper's surrogate (Algorithm 1)              |
| `ppo_clip`  | min(ratio * A, clip(ratio) * A)                                        |
| `decoupled` | ppo_clip on the drift ratio times the truncated, detached engine ratio |

`anchor_logp` is the denominator of the ratio: rollout log-probs (what the engine reports) or log-
probs recomputed by the trainer. The two differ exactly by the mismatch. Advantages are one a row or
one a token. Any surrogate goes with any mask: `aggregate` drops rejected rows with `where`, so they
add exactly 0 to value and gradient whatever they hold.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.divergences import ratios
from trm_jax.objectives import weights
from trm_jax.objectives.scored import Advantages
from trm_jax.types import InputError, Mean

ReduceTokens = Literal['sum', 'mean', 'constant']
NormalizeBy = Literal['total', 'accepted', 'tokens', 'accepted_tokens']


def weighed(value: Float[Array, 'B T'], weight: Float[Array, 'B T']) -> Float[Array, 'B T']:
  """value * weight; a weight that is not finite shows, without gradient, as in `_weigh`."""
  known = jnp.isfinite(weight)
  return jnp.where(known, jnp.where(known, weight, 1) * value, weight)


def by_token(advantages: Advantages) -> Float[Array, 'B T'] | Float[Array, 'B 1']:
  """Advantages of rows as a column beside their tokens; those of tokens as they are."""
  return advantages[:, None] if advantages.ndim == 1 else advantages


def _weigh(value, advantages):
  """value(A) per token. An A that is not finite shows in the value and has no gradient, so that
  the zero cotangent of a rejected row stays zero: 0 * NaN would not."""
  a = by_token(_float32(advantages))
  known = jnp.isfinite(a)
  return jnp.where(known, value(jnp.where(known, a, 0)), a)


def _float32(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _check(advantages, **per_token) -> None:
  """Raises InputError unless the named arrays have one shape [B, T], advantages [B] or [B, T]."""
  first, expected = next((name, x.shape) for name, x in per_token.items())
  for name, x in per_token.items():
    if x.shape != expected:
      raise InputError(
        f'{name} has shape {x.shape} and {first} {expected}: give both one value per token, [B, T].'
      )
  if advantages.shape not in (expected[:1], expected):
    raise InputError(
      f'advantages has shape {advantages.shape}, but {first} is {expected}: give one for each row,'
      f' {expected[:1]}, or one for each token, {expected}.'
    )


def ratio_pg(
  logp: Float[Array, 'B T'],
  anchor_logp: Float[Array, 'B T'],
  advantages: Advantages,
  valid: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """ratio * A per token; gradient ratio * A * grad logp. arXiv 2512.23075, eq. 2, Alg. 1.

  >>> logp, anchor = jnp.log(jnp.array([[.6, .3]])), jnp.log(jnp.array([[.5, .5]]))
  >>> valid, advantages = jnp.ones((1, 2), bool), jnp.array([1.])
  >>> np.asarray(trm.ratio_pg(logp, anchor, advantages, valid)).round(3)
  array([[1.2, 0.6]], dtype=float32)
  """
  _check(advantages, logp=logp, anchor_logp=anchor_logp, valid=valid)
  r = ratios.ratio(_float32(logp) - _float32(anchor_logp), valid)
  return _weigh(lambda a: r * a, advantages)


def ppo_clip(
  logp: Float[Array, 'B T'],
  anchor_logp: Float[Array, 'B T'],
  advantages: Advantages,
  valid: Bool[Array, 'B T'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Float[Array, 'B T']:
  """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A): the clip acts outward only.

  Gradient to logp; exactly 0 where the clip is active. PPO, arXiv 1707.06347, eq. 7.

  >>> logp, anchor = jnp.log(jnp.array([[.6, .3]])), jnp.log(jnp.array([[.5, .5]]))
  >>> valid, advantages = jnp.ones((1, 2), bool), jnp.array([1.])
  >>> np.asarray(trm.ppo_clip(logp, anchor, advantages, valid, clip_high=.1)).round(3)
  array([[1.1, 0.6]], dtype=float32)
  """
  _check(advantages, logp=logp, anchor_logp=anchor_logp, valid=valid)
  r = ratios.ratio(_float32(logp) - _float32(anchor_logp), valid)
  clipped = jnp.clip(r, 1 - clip_low, 1 + clip_high)
  return _weigh(lambda a: jnp.minimum(r * a, clipped * a), advantages)


def decoupled(
  logp: Float[Array, 'B T'],
  anchor_logp: Float[Array, 'B T'],
  rollout_logp: Float[Array, 'B T'],
  advantages: Advantages,
  valid: Bool[Array, 'B T'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  max_ratio: float = 2.0,
) -> Float[Array, 'B T']:
  """Drift and engine noise apart: ppo_clip(policy / anchor) * min(anchor / rollout, max_ratio).

  `anchor_logp` uses the trainer's numerics at the weights the rollout used: the first factor then
  measures drift alone (clipped outward), the second engine noise alone (truncated, detached).

  >>> logp, anchor = jnp.log(jnp.array([[.6, .3]])), jnp.log(jnp.array([[.5, .5]]))
  >>> valid, advantages = jnp.ones((1, 2), bool), jnp.array([1.])
  >>> rollout_logp = jnp.log(jnp.array([[.25, .5]]))
  >>> np.asarray(trm.decoupled(logp, anchor, rollout_logp, advantages, valid)).round(3)
  array([[2.4, 0.6]], dtype=float32)
  """
  drift = ppo_clip(logp, anchor_logp, advantages, valid, clip_low=clip_low, clip_high=clip_high)
  log_ratio = _float32(anchor_logp) - _float32(rollout_logp)
  return weighed(drift, weights.truncated(log_ratio, valid, max_ratio=max_ratio))


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
  tokens (`mean`) or summed and divided by `constant`. Over rows the count is all rows that have a
  token (`total`, TRM's own: the estimator stays unbiased for the masked objective) or the rows that
  keep one (`accepted`); or it is a count of tokens, of all (`tokens`, DAPO's token-mean with
  reduce_tokens='sum') or of the kept ones (`accepted_tokens`). `keep` is [B] for sequence criteria
  or [B, T]. Rejected entries add exactly 0. Sums and counts are float32 whatever per_token is.

  >>> per_token, valid = jnp.ones((3, 4)), jnp.ones((3, 4), bool)
  >>> loss = trm.aggregate(per_token, valid, keep=jnp.array([True, False, True]))
  >>> float(loss.total), float(loss.count)
  (8.0, 3.0)
  """
  if reduce_tokens not in ('sum', 'mean', 'constant'):
    raise InputError(f"reduce_tokens={reduce_tokens!r} is not 'sum', 'mean' or 'constant'.")
  if normalize_by not in ('total', 'accepted', 'tokens', 'accepted_tokens'):
    raise InputError(
      f"normalize_by={normalize_by!r} is not 'total', 'accepted', 'tokens' or 'accepted_tokens'."
    )
  if valid.shape != per_token.shape or keep.shape not in (valid.shape, valid.shape[:1]):
    raise InputError(
      f'per_token has shape {per_token.shape}, valid {valid.shape} and keep {keep.shape}: make them'
      ' [B, T], [B, T] and [B] or [B, T].'
    )
  if keep.ndim == 1:
    keep = jnp.broadcast_to(keep[:, None], valid.shape)
  rows = jnp.where(valid & keep, _float32(per_token), 0).sum(-1)
  if reduce_tokens == 'mean':
    rows = rows / jnp.maximum(valid.sum(-1), 1).astype(rows.dtype)
  elif reduce_tokens == 'constant':
    if constant is None or not constant > 0:
      raise InputError(
        f"constant={constant} must be > 0 with reduce_tokens='constant', e.g. the longest response."
      )
    rows = rows / constant
  counted = valid & keep if 'accepted' in normalize_by else valid
  if 'tokens' not in normalize_by:
    counted = counted.any(-1)
  return Mean(rows.sum(), counted.astype(rows.dtype).sum()).over(axis_name)
