"""Certificates by way of the surrogate: L' less its error bound, nothing assumed beyond the rows.

The paper's guarantee asks for a bound on the divergence of *all* reachable contexts, which no batch
can show. Here the policy is patched where a prefix leaves the region (`prefixes`), and every bound
of `bounds` and `sharp_bounds` holds for the patched one with means over the rows.

| certificate   | mean of                                          | needs                        |
| ------------- | ------------------------------------------------ | ---------------------------- |
| `first_order` | M R S - (1 - M) R - penalty                      | limits                       |
| `prefix`      | R S'' - penalty, less the chance to leave        | limits with a budget         |
| `centred`     | (R - b)(W'' - 1), less the chance to leave       | the same and full support    |
| `plug_in`     | M R S - (1 - M) R, less a bound from the rows    | limits; asymptotic, no proof |

S = sum_t (ratio_t - 1), W = prod_t ratio_t, two dashes for pi''. They show what a threshold is
worth and which term eats the gain; `certificate.improvement` needs less and fired more often. What
voids those voids these as well, and so does a limit chosen on the same rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import bounds, confidence, prefixes, sharp_bounds
from trm_jax.certificate import ASYMPTOTIC, Certificate, by_prompt, conclude, unit_reward
from trm_jax.confidence import Real
from trm_jax.prefixes import Patched
from trm_jax.types import InputError


def _excess(patched: Patched) -> Float[Array, 'B']:
  """W'' - 1, or less."""
  return jnp.where(patched.missing, -1, patched.weight - 1)


def _surrogate(patched, reward, penalty, inside, **settings) -> Certificate:
  """R S'' of the rows `inside`, less the reward of the others and the penalty."""
  penalty = penalty(patched)
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
    patched.missing | jnp.isnan(r),
    _excess(patched),
    floor=-max(drop, 1.0) - penalty.most,
    width=bounds.width(low, high),
    **settings,
  )


def first_order(
  patched: Patched,
  reward: Float[Array, 'B'],
  penalty: Callable[[Patched], prefixes.Penalty],
  *,
  samples: int,
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
  return _surrogate(patched, reward, penalty, kept, **settings)


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
    raise InputError(
      'limits.budget=inf certifies nothing: set the largest sum of chi2, as in prefixes.Limits.'
    )
  left = by_prompt((~patched.kept | patched.missing).astype(patched.first.dtype), samples)
  r = -confidence.betting(-left, alpha=alpha, low=-1.0)
  return jnp.minimum(r + jnp.sqrt(r * math.expm1(min(budget, 80.0))), 1)


def prefix(
  patched: Patched,
  reward: Float[Array, 'B'],
  penalty: Callable[[Patched], prefixes.Penalty],
  *,
  samples: int,
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
  found = _surrogate(patched, reward, penalty, everywhere, less=less, **settings)
  return _both_halves(found)


def centred(
  patched: Patched,
  reward: Float[Array, 'B'],
  *,
  baseline: float = 0.5,
  samples: int,
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
  if patched.limits.budget > 10:
    raise InputError(
      f'budget={patched.limits.budget} must be at most 10: the variance grows like its exponential.'
    )
  r = unit_reward(reward, low=low, high=high)
  variance = max(baseline, 1 - baseline) ** 2 * math.expm1(patched.limits.budget)
  excess = patched.weight - 1
  found = conclude(
    dict(gained=(r - baseline) * excess),
    jnp.maximum(-baseline * excess, (1 - baseline) * excess),
    patched.missing | jnp.isnan(r),
    _excess(patched),
    floor=-jnp.inf,  # the variable has no lower end: one missing row and nothing is certified
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
  samples: int,
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
  limits, after = patched.limits, patched.horizon - patched.tv.shape[1]
  r, width = unit_reward(reward, low=low, high=high), bounds.width(low, high)
  by_prompt(r, samples)  # refuses what `samples` does not divide
  d_bar, seq_kl = jnp.pad(patched.tv.mean(0), (0, after)), patched.kl.sum(-1).mean()
  step = jnp.pad(jnp.abs(patched.excess), ((0, 0), (0, after)))
  tv, kl = (jnp.pad(x, ((0, 0), (0, after))) for x in (patched.tv, patched.kl))
  weights = limits.future_tv(patched.horizon).astype(d_bar.dtype)
  positions = dict(
    per_position=2 * d_bar * weights,
    future_tv=(step * _later(tv)).mean(0),
    jensen_pinsker=bounds.root(d_bar * (step * _later(kl)).mean(0)),
  )
  # 0 times an infinite KL is NaN: no bound from there.
  positions = {name: jnp.where(jnp.isnan(x), jnp.inf, x) for name, x in positions.items()}
  known = dict(
    T=patched.horizon, epsilon=limits.epsilon, delta=limits.max_kl, d_bar=d_bar, seq_kl=seq_kl
  )
  seq_tv = bounds.sequence_tv(d_bar=d_bar, seq_kl=seq_kl)
  found = dict(b_star=bounds.b_star(**known, seq_tv=seq_tv) / 2)
  found |= {name: value.sum() for name, value in positions.items()}
  found['smallest'] = functools.reduce(jnp.minimum, positions.values()).sum()
  if patched.chi2 is not None:
    sd = jnp.asarray(0.5, d_bar.dtype)
    if samples > 1:
      within = jnp.where(patched.kept, r, 0).reshape(-1, samples).var(-1, ddof=1)
      sd = jnp.fmin(sd, jnp.sqrt(within.mean()))  # NaN: a missing reward
    found['l2'] = sharp_bounds.l2(patched.second.mean()) * 2 * sd
  if limits.budget < math.inf:
    found['l2_budget'] = sharp_bounds.budget_l2(limits.budget)
  return {name: value * width for name, value in found.items()}


def plug_in(
  patched: Patched,
  reward: Float[Array, 'B'],
  *,
  samples: int,
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
    _excess(patched),
    samples=samples,
    alpha=alpha,
    width=width,
    bound=lambda x: confidence.normal(x, alpha=alpha),
    less=functools.reduce(jnp.minimum, less.values()) / width,
    guarantee=ASYMPTOTIC,
  )
