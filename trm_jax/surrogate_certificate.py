"""Certificates by way of the surrogate: L' less its error bound, nothing assumed beyond the rows.

The paper's guarantee asks for a bound on the divergence of *all* reachable contexts, which no batch
can show. Here the policy is patched instead: pi'' = pi_theta as long as every context so far is
good, pi_roll after the first bad one. It obeys the limits by construction and equals pi_theta on
the rows that are kept, so that every bound of `bounds` and `sharp_bounds` holds for it with means
over the rows.

| certificate   | mean of                                          | needs                        |
| ------------- | ------------------------------------------------ | ---------------------------- |
| `first_order` | M R S - (1 - M) R - penalty                      | limits                       |
| `prefix`      | R S'' - penalty, less the chance to leave        | limits with a budget         |
| `centred`     | (R - b)(W'' - 1), less the chance to leave       | the same and full support    |
| `plug_in`     | M R S - (1 - M) R, less a bound from the rows    | limits; asymptotic, no proof |

S = sum_t (ratio_t - 1), W = prod_t ratio_t, two dashes for pi''. They show what a threshold is
worth and which term eats the gain; `certificate.improvement` proves more with less. What voids
those voids these as well, and so does a limit chosen on the same rows.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import bounds, confidence, sharp_bounds
from trm_jax.certificate import ASYMPTOTIC, Certificate, by_prompt, conclude, unit_reward
from trm_jax.confidence import Real
from trm_jax.importance import LOG_RATIO_CAP
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What makes a context good; a prefix is good while all its contexts are. inf = not asked.

  Attributes:
    max_kl, max_tv, max_chi2: limits on each context.
    budget: limit on the sum of chi2 up to and including the context.
    band: limit on |prod_{s<t} ratio_s - 1|, the tokens before it.
  """

  max_kl: float = math.inf
  max_tv: float = math.inf
  max_chi2: float = math.inf
  budget: float = math.inf
  band: float = math.inf

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if not getattr(self, field.name) > 0:
        raise InputError(f'{field.name}={getattr(self, field.name)} must be > 0; inf = no limit.')

  @property
  def epsilon(self) -> float:
    """Largest TV of a good context: min(max_tv, sqrt(max_kl / 2), sqrt(chi2) / 2), at most 1."""
    chi2 = min(self.max_chi2, self.budget)
    return min(1.0, self.max_tv, math.sqrt(self.max_kl / 2), math.sqrt(chi2) / 2)

  def future_tv(self, T: int) -> Float[Array, 'T']:
    """w_t: largest TV of the two futures after good contexts, [T], decreasing to 0."""
    # The TV of futures is symmetric, so that KL(policy || rollout) <= log(1 + chi2) serves as well.
    delta = min(self.max_kl, math.log1p(self.max_chi2))
    weights = bounds.future_weights(T=T, epsilon=self.epsilon, delta=delta)
    whole = math.sqrt(math.expm1(min(self.budget, math.log(5)))) / 2
    return jnp.minimum(weights, whole)


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['good', 'missing', 'excess', 'kl', 'tv', 'chi2', 'weight', 'first', 'second'],
  meta_fields=['limits'],
)
@dataclasses.dataclass(frozen=True)
class Patched:
  """The policy that is pi_theta after good prefixes and pi_roll elsewhere; made by `patch`.

  Attributes:
    good: G_t, the prefix up to and including c_t is good. Its last column says which rows are kept.
    missing: rows with a log_ratio or divergence that is not a number.
    excess: G_t (ratio_t - 1).
    kl, tv, chi2: G_t times the divergence of the context; chi2 None where it was not given.
    weight: W'' = prod_t ratio_t over good contexts.
    first: S'' = sum_t excess_t.
    second: Q = sum_t G_t (prod_{s<t} ratio_s - 1)^2 chi2_t, whose mean is E[(W'' - 1 - S'')^2].
  """

  good: Bool[Array, 'B T']
  missing: Bool[Array, 'B']
  excess: Float[Array, 'B T']
  kl: Float[Array, 'B T']
  tv: Float[Array, 'B T']
  chi2: Float[Array, 'B T'] | None
  weight: Float[Array, 'B']
  first: Float[Array, 'B']
  second: Float[Array, 'B'] | None
  limits: Limits

  @property
  def kept(self) -> Bool[Array, 'B']:
    """Rows good to their end."""
    return self.good[:, -1]


def patch(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  kl: Float[Array, 'B T'],
  tv: Float[Array, 'B T'],
  chi2: Float[Array, 'B T'] | None = None,
  limits: Limits,
) -> Patched:
  """Judges every prefix by `limits`. Divergences are exact, over the full vocabulary.

  Limits must be chosen before the rows are seen: a quantile of the batch itself voids everything
  that follows. Raises InputError for a limit on a chi2 that is not given.
  """
  if chi2 is None and min(limits.max_chi2, limits.budget) < math.inf:
    raise InputError('limits hold max_chi2 or budget, but chi2 is not given: pass it, [B, T].')
  inside = lambda x: jnp.where(valid, x, 0)
  log_ratio, kl, tv = inside(log_ratio), inside(kl), inside(tv)
  missing = ~jnp.isfinite(log_ratio).all(-1) | jnp.isnan(kl + tv).any(-1)
  good = (kl <= limits.max_kl) & (tv <= limits.max_tv)
  if chi2 is not None:
    chi2 = inside(chi2)
    missing = missing | jnp.isnan(chi2).any(-1)
    good = good & (chi2 <= limits.max_chi2) & (jnp.cumsum(chi2, -1) <= limits.budget)
  log_ratio = jnp.where(missing[:, None], 0, log_ratio)
  before = jnp.expm1(jnp.cumsum(log_ratio, -1) - log_ratio)
  good = jnp.cumprod(good & (jnp.abs(before) <= limits.band), -1) > 0
  part = lambda x: jnp.where(good, x, 0)
  excess = part(jnp.expm1(log_ratio))
  return Patched(
    good=good,
    missing=missing,
    excess=excess,
    kl=part(kl),
    tv=part(tv),
    chi2=None if chi2 is None else part(chi2),
    weight=jnp.exp(jnp.minimum(part(log_ratio).sum(-1), LOG_RATIO_CAP)),
    first=excess.sum(-1),
    second=None if chi2 is None else part(before**2 * chi2).sum(-1),
    limits=limits,
  )


class Penalty(typing.NamedTuple):
  """What the surrogate may be wrong by: the mean of `rows` [B], of which none exceeds `most`."""

  rows: Float[Array, 'B']
  most: Real


def tv_penalty(patched: Patched) -> Penalty:
  """2 sum_t G_t TV(c_t) w_t: whose mean bounds |Delta| by the TV of each context and its future."""
  limits, steps = patched.limits, patched.tv.shape[1]
  weights = limits.future_tv(steps).astype(patched.tv.dtype)
  return Penalty(2 * (patched.tv * weights[None]).sum(-1), 2 * limits.epsilon * weights.sum())


def l2_penalty(patched: Patched, *, scale: float | None = None) -> Penalty:
  """Q / (2 scale) + scale / 8: linear in the response's chi2, without T^1.5.

  Its mean is smallest, sqrt(E Q) / 2, at scale = 2 sqrt(E Q), which an earlier batch may tell; by
  default the largest that the budget allows. Without a band Q has no upper limit and the constant
  `sharp_bounds.budget_l2` is taken. Raises InputError without a budget, and for scale <= 0.
  """
  limits = patched.limits
  if limits.budget == math.inf:
    raise InputError('l2_penalty needs limits with a finite budget: the largest sum of chi2.')
  whole = sharp_bounds.budget_l2(limits.budget).astype(patched.first.dtype)
  if limits.band == math.inf:
    return Penalty(jnp.full_like(patched.first, whole), whole)
  if scale is not None and not scale > 0:
    raise InputError(f'scale={scale} must be > 0.')
  scale = 4 * whole if scale is None else scale
  penalty = lambda q: q / (2 * scale) + scale / 8
  return Penalty(penalty(patched.second), penalty(limits.band**2 * limits.budget))


def _surrogate(patched, reward, penalty, inside, missing, **settings) -> Certificate:
  """R S'' of the rows `inside`, less the reward of the others and the penalty."""
  low, high, drop = (settings.pop(name) for name in ('low', 'high', 'drop'))
  r = unit_reward(reward, low=low, high=high)
  inside = inside & (patched.first >= -drop)
  terms = dict(
    surrogate=jnp.where(inside, r * patched.first, 0),
    rejected=jnp.where(inside, 0, -r),
    penalty=-penalty.rows,
  )
  return conclude(
    terms,
    jnp.where(inside, jnp.maximum(patched.first, 0), 0) - penalty.rows,
    missing | jnp.isnan(r),
    low=-max(drop, 1.0) - penalty.most,
    width=bounds.width(low, high),
    **settings,
  )


def first_order(
  patched: Patched,
  reward: Float[Array, 'B'],
  penalty: Penalty,
  *,
  samples: int = 1,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
  drop: float = 1.0,
  keep: Bool[Array, 'B'] | None = None,
) -> Certificate:
  """J(policy) - J(rollout) >= E_roll[M R S - (1 - M) R - penalty], M = kept rows with S >= -drop.

  The masked surrogate L'_M minus what rejection and the second order may cost. Any further mask is
  legal: `drop`, which bounds the variable from below, and `keep`, be it a mean, sampled or random
  criterion (on its own statistics of each row). R, samples, alpha and errors as in
  `certificate.improvement`.
  """
  kept = patched.kept if keep is None else patched.kept & keep
  settings = dict(samples=samples, alpha=alpha, low=low, high=high, drop=drop)
  return _surrogate(patched, reward, penalty, kept, patched.missing, **settings)


def _both_halves(found: Certificate) -> Certificate:
  """The certificate whose two parts have half of alpha each; no e-value speaks of their sum."""
  none = jnp.full_like(found.log_evalue, jnp.nan)
  return dataclasses.replace(found, alpha=2 * found.alpha, log_evalue=none)


def _leaving(patched: Patched, samples: int, alpha) -> Float[Array, '']:
  """Upper bound of the probability that the policy leaves the region, from rows of the rollout.

  E_roll[(1 - M) W''] <= r + sqrt(r (e^budget - 1)),   r = E_roll[1 - M]
  """
  budget = patched.limits.budget
  if budget == math.inf:
    raise InputError('This certificate needs limits with a finite budget: the largest sum of chi2.')
  left = by_prompt((~patched.kept | patched.missing).astype(patched.first.dtype), samples)
  r = -confidence.betting(-left, alpha=alpha, low=-1.0)
  return jnp.minimum(r + jnp.sqrt(r * math.expm1(min(budget, LOG_RATIO_CAP))), 1)


def prefix(
  patched: Patched,
  reward: Float[Array, 'B'],
  penalty: Penalty,
  *,
  samples: int = 1,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
  drop: float = 1.0,
) -> Certificate:
  """The prefix form: a row counts up to the point where it leaves, none is thrown away whole.

      J(policy) - J(rollout) >= E_roll[f S'' - (R - f) - penalty] - P_policy(leave)

  with f = R where S'' >= -drop and else 0. alpha is shared equally by the two parts. Needs limits
  with a budget. R, samples, alpha and errors as in `certificate.improvement`.
  """
  settings = dict(samples=samples, alpha=alpha / 2, low=low, high=high, drop=drop)
  everywhere = jnp.ones_like(patched.kept)
  less = _leaving(patched, samples, alpha / 2)
  found = _surrogate(patched, reward, penalty, everywhere, patched.missing, less=less, **settings)
  return _both_halves(found)


def centred(
  patched: Patched,
  reward: Float[Array, 'B'],
  *,
  baseline: float = 0.5,
  samples: int = 1,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
) -> Certificate:
  """J(policy) - J(rollout) >= E_roll[(R - b)(W'' - 1)] - P_policy(leave), by Catoni's bound.

  Centring takes the share b^2 of the variance away; the patched weight has mean 1, and the budget
  bounds its variance: max(b, 1-b)^2 (e^budget - 1). `baseline` b in [0, 1] of the rescaled reward,
  chosen beforehand. Needs a budget and the policy's support. Rows as in `improvement`.
  """
  if not 0 <= baseline <= 1:
    raise InputError(f'baseline={baseline} must lie in [0, 1]: it is compared to the unit reward.')
  less = _leaving(patched, samples, alpha / 2)
  r = unit_reward(reward, low=low, high=high)
  variance = max(baseline, 1 - baseline) ** 2 * math.expm1(min(patched.limits.budget, 20.0))
  excess = patched.weight - 1
  found = conclude(
    dict(gained=(r - baseline) * excess),
    jnp.maximum(-baseline * excess, (1 - baseline) * excess),
    patched.missing | jnp.isnan(r),
    low=-jnp.inf,  # the variable has no lower end: one missing row and nothing is certified
    samples=samples,
    alpha=alpha / 2,
    width=bounds.width(low, high),
    bound=lambda x: confidence.catoni(x, alpha=alpha / 2, variance=variance),
    less=less,
  )
  lower = jnp.where(jnp.isnan(found.lower), -jnp.inf, found.lower)
  return _both_halves(dataclasses.replace(found, lower=lower))


def _later(x: Float[Array, 'B T']) -> Float[Array, 'B T']:
  """sum over j > t of x_j."""
  return jnp.cumsum(x[:, ::-1], -1)[:, ::-1] - x


def error_bounds(
  patched: Patched,
  reward: Float[Array, 'B'],
  *,
  samples: int = 1,
  low: float = 0.0,
  high: float = 1.0,
) -> dict[str, Float[Array, '']]:
  """Bounds of |Delta_M| of the patched policy with means over the rows for expectations.

  | name             | formula                                                                     |
  | ---------------- | --------------------------------------------------------------------------- |
  | `b_star`         | half of the paper's B* (eq. 21) at the limits                               |
  | `per_position`   | 2 sum_t d_t w_t, d_t = E[G_t TV(c_t)]                                       |
  | `future_tv`      | sum_t E[|excess_t| sum_{j>t} G_j TV(c_j)]                                   |
  | `jensen_pinsker` | sum_t sqrt(d_t E[|excess_t| sum_{j>t} G_j KL(c_j)])                         |
  | `smallest`       | the smallest of the last three at each t                                    |
  | `l2`             | sd sqrt(E[Q]), sd of M R within a prompt, 1/2 where samples = 1; needs chi2 |
  | `l2_budget`      | sqrt(e^X - 1 - X) / 2, X the budget; needs one                              |

  Estimates, not proofs: for a proof take a `Penalty`. In units of the reward. Raises InputError as
  `certificate.improvement` does.
  """
  limits, steps = patched.limits, patched.tv.shape[1]
  r, width = unit_reward(reward, low=low, high=high), bounds.width(low, high)
  d_bar, seq_kl = patched.tv.mean(0), patched.kl.sum(-1).mean()
  step = jnp.abs(patched.excess)
  weights = limits.future_tv(steps).astype(d_bar.dtype)
  positions = dict(
    per_position=2 * d_bar * weights,
    future_tv=(step * _later(patched.tv)).mean(0),
    jensen_pinsker=bounds.root(d_bar * (step * _later(patched.kl)).mean(0)),
  )
  # 0 times an infinite KL is NaN: no bound from there.
  positions = {name: jnp.where(jnp.isnan(x), jnp.inf, x) for name, x in positions.items()}
  known = dict(T=steps, epsilon=limits.epsilon, delta=limits.max_kl, d_bar=d_bar, seq_kl=seq_kl)
  seq_tv = bounds.sequence_tv(d_bar=d_bar, seq_kl=seq_kl)
  found = dict(b_star=bounds.b_star(**known, seq_tv=seq_tv) / 2)
  found |= {name: value.sum() for name, value in positions.items()}
  found['smallest'] = functools.reduce(jnp.minimum, positions.values()).sum()
  if patched.chi2 is not None:
    sd = jnp.asarray(0.5, d_bar.dtype)
    if samples > 1:
      within = jnp.where(patched.kept, r, 0).reshape(-1, samples).var(-1, ddof=1)
      sd = jnp.minimum(sd, jnp.sqrt(within.mean()))
    found['l2'] = sharp_bounds.l2(patched.second.mean()) * 2 * sd
  if limits.budget < math.inf:
    found['l2_budget'] = sharp_bounds.budget_l2(limits.budget)
  return {name: value * width for name, value in found.items()}


def plug_in(
  patched: Patched,
  reward: Float[Array, 'B'],
  *,
  samples: int = 1,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
) -> Certificate:
  """E_roll[M R S - (1 - M) R] less the smallest of `error_bounds`, by the central limit theorem.

  Asymptotic in both parts: its verdict never says 'certified'. Arguments and errors as there.
  """
  r, width = unit_reward(reward, low=low, high=high), bounds.width(low, high)
  less = error_bounds(patched, reward, samples=samples, low=low, high=high)
  return conclude(
    dict(
      surrogate=jnp.where(patched.kept, r * patched.first, 0),
      rejected=jnp.where(patched.kept, 0, -r),
    ),
    jnp.where(patched.kept, jnp.maximum(patched.first, 0), 0),
    patched.missing | jnp.isnan(r),
    samples=samples,
    alpha=alpha,
    width=width,
    bound=lambda x: confidence.normal(x, alpha=alpha),
    less=functools.reduce(jnp.minimum, less.values()) / width,
    guarantee=ASYMPTOTIC,
  )
