"""Gates: which tokens count, given the advantages (of rows or tokens) -> [B, T] bool.

A token that a gate closes adds exactly 0 to value and gradient; denominators stay as they are. p is
the policy's probability of the sampled token, q the rollout's, d = log p - log q. A token whose
statistic is NaN is closed; an advantage that is NaN closes nothing, so that it shows. No gradient.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.divergences.ratios import raised
from trm_jax.masks import row_statistics
from trm_jax.objectives.scored import Advantages, Anchor, Scored
from trm_jax.objectives.surrogates import by_token


def counted(scored: Scored) -> Bool[Array, 'B T']:
  """Tokens that statistics of the whole batch count: the valid ones of usable rows."""
  return scored.valid & scored.usable[:, None]


def _logs(scored: Scored, anchor: Anchor):
  logp = jax.lax.stop_gradient(raised(scored.logp))
  return logp, jax.lax.stop_gradient(raised(scored.anchor_logp(anchor)))


def _outward(d, advantages):
  """Whether a step along A moves the ratio further from 1."""
  a = by_token(advantages)
  return ((a > 0) & (d > 0)) | ((a < 0) & (d < 0))


def binary_kl(log_a: Float[Array, 'B T'], log_b: Float[Array, 'B T']) -> Float[Array, 'B T']:
  """KL of (a, 1 - a) from (b, 1 - b) in nats, in [0, inf]: a lower bound of the whole KL."""
  a, b = (jnp.where(jnp.exp(x) > 1, 1, jnp.exp(x)) for x in (log_a, log_b))
  here = jnp.where(a > 0, a * (log_a - log_b), 0)
  rest = jnp.where(a < 1, (1 - a) * (jnp.log1p(-a) - jnp.log1p(-b)), 0)
  return jnp.where(jnp.isnan(log_a) | jnp.isnan(log_b), jnp.nan, here + rest)


def dppo_tv(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.15,
) -> Bool[Array, 'B T']:
  """Closed where A > 0 and p - q > limit, or A < 0 and p - q < -limit. arXiv 2602.04879.

  DPPO with the binary TV (.15); prime-rl's +-.2 is the same with limit .2 (there A = 0 belongs to
  the low branch, where the gradient is 0 anyway).
  """
  logp, log_q = _logs(scored, anchor)
  gap = jnp.exp(logp) - jnp.exp(log_q)
  closed = _outward(gap, advantages) & ~(jnp.abs(gap) <= limit)
  return ~closed & ~jnp.isnan(gap)


def dppo_kl(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.05,
) -> Bool[Array, 'B T']:
  """Closed where binary KL(q || p) > limit nats and A moves p away from q. arXiv 2602.04879."""
  logp, log_q = _logs(scored, anchor)
  kl = binary_kl(log_q, logp)
  return ~(_outward(logp - log_q, advantages) & (kl > limit)) & ~jnp.isnan(kl)


def dppo_exact(
  scored: Scored, advantages: Advantages, *, limit: float = 0.15
) -> Bool[Array, 'B T']:
  """DPPO on the TV of all tokens (or a bound of it, see `Method.bound`) in place of the binary one.

  With likeliest tokens stored and bound='lower' this is DPPO's top-K TV up to how the remaining
  tokens are lumped. Needs `divergences.tv`. arXiv 2602.04879.
  """
  logp, log_q = _logs(scored, 'rollout')
  tv = row_statistics.tokens(scored.divergences.tv, scored.valid)
  return ~(_outward(logp - log_q, advantages) & (tv > limit)) & ~jnp.isnan(tv)


def probability_gap(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.1,
) -> Bool[Array, 'B T']:
  """|p - q| <= limit, whatever the sign of A: prime-rl's ipo (.1)."""
  del advantages
  logp, log_q = _logs(scored, anchor)
  return jnp.abs(jnp.exp(logp) - jnp.exp(log_q)) <= limit


def opsm(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 1e-4,
) -> Bool[Array, 'B T']:
  """Tokens with A < 0 in rows with mean_t -d_t > limit nats are closed: DeepSeek-V3.2's mask.

  TRL's off_policy_mask_threshold, slime's OPSM. Published limits go from 1e-4 to .2.
  """
  logp, anchor_logp = _logs(scored, anchor)
  d = jnp.where(scored.valid, anchor_logp - logp, 0)
  mean = d.sum(-1) / jnp.clip(scored.valid.sum(-1), 1, None)
  mean = jnp.broadcast_to(mean[:, None], scored.valid.shape)
  return ~((by_token(advantages) < 0) & (mean > limit)) & ~jnp.isnan(mean)


def m2po(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.04,
  of: Literal['policy', 'recomputed', 'version'] = 'policy',
) -> Bool[Array, 'B T']:
  """The largest d^2 of the batch are closed until the mean of the rest is <= limit (.04).

  d is that `of` the policy of this update against `anchor`; AReaL takes the recomputed log-probs,
  and divides by what stays open. arXiv 2510.01161. The batch is all usable rows, on all devices.
  All tokens are candidates here; who closes only those whose clip would be active keeps more.
  """
  del advantages
  logp, anchor_logp = _logs(scored, anchor)
  if of != 'policy':
    logp = raised(scored.anchor_logp(of))
  square = jnp.where(counted(scored), jnp.square(logp - anchor_logp), jnp.inf)
  square = scored.everywhere(jnp.where(jnp.isnan(square), jnp.inf, square))
  order = jnp.argsort(square.reshape(-1))
  mean = jnp.cumsum(square.reshape(-1)[order]) / (1 + jnp.arange(square.size))
  kept = jnp.zeros(square.size, bool).at[order].set(mean <= limit).reshape(square.shape)
  return scored.here(kept) | ~scored.valid


def cppo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.15,
  budget: float = 0.015,
  last_weight: float = 0.8,
) -> Bool[Array, 'B T']:
  """Early tokens weigh more, and every prefix has a budget: CPPO. arXiv 2606.10968.

  With D_t = |p - q|, w_t = 1 - (1 - last_weight)(t - 1)/(T - 1), S_t = sum_{j<=t} w_j D_j and W_t =
  sum_{j<=t} w_j over the row's valid tokens, a token that A moves outward is open where w_t D_t <=
  limit and S_t <= limit + budget W_{t-1}; the others are open. Authors: .15 (dense; .20 mixture of
  experts), .015, .8. T is the realised length; a row of one token has w_1 = 1.
  """
  logp, log_q = _logs(scored, anchor)
  valid = scored.valid
  gap = jnp.exp(logp) - jnp.exp(log_q)
  place = jnp.where(valid, jnp.cumsum(valid, -1) - 1, 0)
  last = jnp.clip(valid.sum(-1, keepdims=True) - 1, 1, None)
  w = jnp.where(valid, 1 - (1 - last_weight) * place / last, 0).astype(gap.dtype)
  cost = jnp.where(valid, w * jnp.abs(gap), 0)
  before = jnp.cumsum(w, -1) - w
  inside = (cost <= limit) & (jnp.cumsum(cost, -1) <= limit + budget * before)
  return (inside | ~_outward(gap, advantages)) & ~jnp.isnan(gap)


def clip_band(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'recomputed',
  clip_low: float = 0.2,
  clip_high: float = 0.28,
) -> Bool[Array, 'B T']:
  """Closed where PPO's clip is active: A > 0, r > 1 + clip_high, or A < 0, r < 1 - clip_low.

  MiniRL's token mask: r against the trainer's own log-probs, beside a truncated weight against the
  rollout's. arXiv 2512.01374; (.2, .28) uncertain.
  """
  logp, anchor_logp = _logs(scored, anchor)
  d, a = logp - anchor_logp, by_token(advantages)
  closed = ((a > 0) & (d > jnp.log1p(clip_high))) | ((a < 0) & (jnp.exp(d) < 1 - clip_low))
  return ~closed & ~jnp.isnan(d)


def estr(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 1.0,
  epsilon: float = 1e-3,
) -> Bool[Array, 'B T']:
  """d^2 / (H + epsilon) <= limit, H the entropy in nats: ESTR. arXiv 2607.22186.

  The paper's H is that of the rollout, which no store keeps; here it is the policy's at the same
  context. Uncertain: limit and epsilon, which are ours.
  """
  del advantages
  logp, anchor_logp = _logs(scored, anchor)
  entropy = jax.lax.stop_gradient(raised(scored.divergences.entropy))
  return jnp.square(logp - anchor_logp) <= limit * (entropy + epsilon)


def vaco(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.05,
) -> Bool[Array, 'B T']:
  """In rows with mean_t |r - 1| / 2 > limit, tokens that A moves outward are closed: VACO.

  The mean is the row's TV as its samples estimate it. arXiv 2603.01365. open-instruct leaves the
  half out and judges the trainer's recomputed log-probs against the rollout's. Uncertain: the
  limit, which is ours.
  """
  logp, anchor_logp = _logs(scored, anchor)
  d = logp - anchor_logp
  tv = row_statistics.mean_over_tokens(row_statistics.deviation(d) / 2, scored.valid)[:, None]
  return ~(_outward(d, advantages) & (tv > limit)) & ~jnp.isnan(tv)


def negative_suffix(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  low: float = 0.2,
  high: float = 5.0,
) -> Bool[Array, 'B T']:
  """Where A < 0, closed from the first token of the row with a ratio outside low..high on.

  mu-GRPO's veto for stale rollouts: what follows such a token is a context that the policy would
  hardly reach, and to push it down destabilises. A missing ratio is one outside. arXiv 2605.17570.
  Uncertain: the trigger and its numbers, which are ours; the abstract alone was read.
  """
  logp, anchor_logp = _logs(scored, anchor)
  d = logp - anchor_logp
  inside = (d >= jnp.log(low)) & (d <= jnp.log(high))
  out = jnp.cumsum(scored.valid & ~inside, -1) > 0
  return ~(out & (by_token(advantages) < 0)) & ~jnp.isnan(d)


def covariance(
  scored: Scored, advantages: Advantages
) -> tuple[Float[Array, 'B T'], Bool[Array, 'B T']]:
  """((A - mean A)(log p - mean log p), tokens that are counted), means over the whole batch."""
  there = counted(scored)
  a = jnp.broadcast_to(by_token(advantages), there.shape).astype(jnp.float32)
  a = jnp.where(jnp.isfinite(a), a, 0)
  logp = jax.lax.stop_gradient(raised(scored.logp))
  return (a - scored.mean(a, there)) * (logp - scored.mean(logp, there)), there


def clip_cov(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  share: float = 2e-4,
  low: float = 1.0,
  high: float = 5.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Bool[Array, 'B T']:
  """Closes `share` of all tokens, drawn from those with low < covariance < high: Clip-Cov.

  Of the candidates that PPO's clip leaves open (and at least one, where there is any); draws from
  `scored.key`. It acts against a loss of entropy, so it closes tokens at equal policies too. arXiv
  2505.22617, verl (2e-4, 1, 5). `clip_low` and `clip_high` are those of the clip beside it.
  """
  cov, there = covariance(scored, advantages)
  open_ = clip_band(scored, advantages, anchor=anchor, clip_low=clip_low, clip_high=clip_high)
  candidate = scored.everywhere(there & open_ & (low < cov) & (cov < high))
  count = jnp.floor(scored.everywhere(there).sum() * share)
  size = jnp.clip(count, 1, None).astype(jnp.int32)
  lot = jnp.where(candidate, scored.everywhere(scored.uniform()), jnp.inf)
  order = jnp.argsort(lot.reshape(-1))
  rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(lot.shape)
  return ~scored.here(candidate & (rank < size))
