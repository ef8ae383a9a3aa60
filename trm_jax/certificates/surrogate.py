"""Certificates by way of the surrogate: L' less its error bound, nothing assumed beyond the rows.

The paper's guarantee asks for a bound on the divergence of *all* reachable contexts, which no batch
can show. Here the policy is patched where a prefix leaves the region (`patching`), and every bound
of `bounds` holds for the patched one with means over the rows.

| certificate   | mean of                                   | needs                |
| ------------- | ----------------------------------------- | -------------------- |
| `first_order` | M R S - (1 - M) R - penalty               | limits               |
| `prefix`      | R S'' - penalty, less the chance to leave | limits with a budget |

S = sum_t (ratio_t - 1), W = prod_t ratio_t, two dashes for pi''. They show what a threshold is
worth and which term eats the gain; `certificates.improvement` needs less and fired more often. What
voids those voids these as well, and so does a limit chosen on the same rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import bounds
from trm_jax.bounds import sharp
from trm_jax.certificates import confidence, patching
from trm_jax.certificates.confidence import Real
from trm_jax.certificates.importance import Certificate, by_prompt, conclude, unit_reward
from trm_jax.certificates.patching import Patched
from trm_jax.types import InputError


def _reward(patched, reward, low, high) -> Float[Array, 'B']:
  """The unit reward; what stands beside a row that does not exist never matters."""
  return unit_reward(jnp.where(patched.exists, reward, low), low=low, high=high)


def _surrogate(patched, reward, penalty, inside, **settings) -> Certificate:
  """R S'' of the rows `inside`, less the reward of the others and the penalty."""
  penalty = penalty(patched)
  low, high, drop = (settings.pop(name) for name in ('low', 'high', 'drop'))
  r = _reward(patched, reward, low, high)
  inside = inside & (patched.first >= -drop)
  terms = dict(
    surrogate=jnp.where(inside, r * patched.first, 0),
    rejected=jnp.where(inside, 0, -r),
    penalty=-penalty.rows,
  )
  certificate = conclude(
    terms,
    jnp.where(inside, jnp.maximum(patched.first, 0), 0) - penalty.rows,
    patched.missing | jnp.isnan(r),
    jnp.where(patched.missing, -1, patched.weight - 1),
    patched.exists,
    floor=-max(drop, 1.0) - penalty.most,
    width=bounds.width(low, high),
    **settings,
  )
  # Rows may fall below -1, which `over_steps` excludes.
  return dataclasses.replace(certificate, square=jnp.full_like(certificate.square, jnp.nan))


def first_order(
  patched: Patched,
  reward: Float[Array, 'B'],
  penalty: Callable[[Patched], patching.Penalty],
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
  `certificates.improvement`.

  >>> log_ratio = jnp.full((400, 1), .2).at[::2].set(-.25)
  >>> kl, valid = jnp.full((400, 1), .02), jnp.ones((400, 1), bool)
  >>> limits = trm.Limits(max_kl=.5)
  >>> patched = trm.patch(log_ratio, valid, kl=kl, tv=kl / 2, limits=limits)
  >>> trm.first_order(patched, (log_ratio[:, 0] > 0) * 1., trm.tv_penalty, samples=1).verdict
  'certified (95 %): J(policy) > J(rollout) by at least 0.0901'
  """
  kept = patched.kept if keep is None else patched.kept & keep
  settings = dict(samples=samples, alpha=alpha, low=low, high=high, drop=drop)
  return _surrogate(patched, reward, penalty, kept, **settings)


def leaving(patched: Patched, *, samples: int, alpha: Real) -> Float[Array, '']:
  """Upper bound of the probability that the policy leaves the region, from rows of the rollout.

      E_roll[(1 - M) W''] <= r + sqrt(r (e^budget - 1)),   r = E_roll[1 - M]

  With probability 1 - alpha. Raises InputError without a budget.
  """
  budget = patched.limits.budget
  if budget == math.inf:
    raise InputError(
      'limits.budget=inf certifies nothing: set the largest sum of chi2, as in patching.Limits.'
    )
  exists = patched.exists
  units = by_prompt(exists.astype(patched.first.dtype), samples) > 0
  stayed = -(~patched.kept | patched.missing).astype(patched.first.dtype)
  r = -confidence.betting(by_prompt(stayed, samples, exists), alpha=alpha, low=-1.0, exists=units)
  return jnp.minimum(r + jnp.sqrt(r * math.expm1(min(budget, 80.0))), 1)


def prefix(
  patched: Patched,
  reward: Float[Array, 'B'],
  penalty: Callable[[Patched], patching.Penalty],
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
  with a budget. R, samples, alpha and errors as in `certificates.improvement`.
  """
  settings = dict(samples=samples, alpha=alpha / 2, low=low, high=high, drop=drop)
  everywhere = jnp.ones_like(patched.kept)
  less = leaving(patched, samples=samples, alpha=alpha / 2)
  certificate = _surrogate(patched, reward, penalty, everywhere, less=less, **settings)
  # No e-value speaks of the two halves together.
  none = jnp.full_like(certificate.log_evalue, jnp.nan)
  return dataclasses.replace(certificate, alpha=2 * certificate.alpha, log_evalue=none)


def _later(x: Float[Array, 'B T']) -> Float[Array, 'B T']:
  """sum over j > t of x_j."""
  return jnp.pad(jnp.cumsum(x[:, ::-1], -1)[:, ::-1], ((0, 0), (0, 1)))[:, 1:]


def _l2(patched, r, second, samples) -> Float[Array, '']:
  """sd sqrt(E[Q]); inf where that is, whatever the deviation."""
  sd = jnp.asarray(0.5, second.dtype)
  if samples > 1:
    kept = jnp.where(patched.kept, r, 0)
    off = kept - jnp.repeat(by_prompt(kept, samples, patched.exists), samples)
    count = patched.exists.reshape(-1, samples).sum(-1)
    within = jnp.where(patched.exists, off**2, 0).reshape(-1, samples).sum(-1)
    within = within / jnp.maximum(count - 1, 1).astype(second.dtype)
    known = count > 1
    variance = jnp.where(known, within, 0).sum() / known.sum().astype(second.dtype)
    sd = jnp.fmin(sd, jnp.sqrt(variance))  # NaN: a missing reward, or no prompt with two rows
  bound = sharp.l2(jnp.where(jnp.isinf(second), 0, second)) * 2 * sd
  return jnp.where(jnp.isinf(second), jnp.inf, bound)


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
  `certificates.improvement` does.
  """
  limits, after = patched.limits, patched.horizon - patched.tv.shape[1]
  r, width = _reward(patched, reward, low, high), bounds.width(low, high)
  by_prompt(r, samples)  # refuses what `samples` does not divide
  # Rows that do not exist hold zeros; they must not be counted either.
  rows = jnp.maximum(patched.exists.sum(), 1).astype(r.dtype)
  mean = lambda x: x.sum(0) / rows
  d_bar, seq_kl = jnp.pad(mean(patched.tv), (0, after)), mean(patched.kl.sum(-1))
  step = jnp.pad(jnp.abs(patched.excess), ((0, 0), (0, after)))
  tv, kl = (jnp.pad(x, ((0, 0), (0, after))) for x in (patched.tv, patched.kl))
  weights = limits.future_tv(patched.horizon).astype(d_bar.dtype)
  positions = dict(
    per_position=2 * d_bar * weights,
    future_tv=mean(step * _later(tv)),
    jensen_pinsker=bounds.root(d_bar * mean(step * _later(kl))),
  )
  # 0 times an infinite KL is NaN: no bound from there.
  positions = {name: jnp.where(jnp.isnan(x), jnp.inf, x) for name, x in positions.items()}
  known = dict(
    T=patched.horizon, epsilon=limits.epsilon, delta=limits.max_kl, d_bar=d_bar, seq_kl=seq_kl
  )
  seq_tv = bounds.sequence_tv(d_bar=d_bar, seq_kl=seq_kl)
  by_name = dict(b_star=bounds.b_star(**known, seq_tv=seq_tv) / 2)
  by_name |= {name: value.sum() for name, value in positions.items()}
  by_name['smallest'] = functools.reduce(jnp.minimum, positions.values()).sum()
  if patched.second is not None:
    by_name['l2'] = _l2(patched, r, mean(patched.second), samples)
  if limits.budget < math.inf:
    by_name['l2_budget'] = sharp.budget_l2(limits.budget)
  return {name: value * width for name, value in by_name.items()}
