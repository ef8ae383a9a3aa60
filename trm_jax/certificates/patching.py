"""The policy patched where a prefix leaves the region, and what the surrogate may be wrong by.

A prefix is good while every context so far obeys the limits. pi'' = pi_theta after good prefixes
and pi_roll elsewhere obeys the limits by construction and equals pi_theta on the rows that are good
to their end: bounds that need a limit on *all* contexts hold for it, with means over the rows in
place of maxima that no batch can show.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import bounds
from trm_jax.bounds import sharp
from trm_jax.certificates import confidence
from trm_jax.divergences.ratios import LOG_RATIO_CAP
from trm_jax.masks import prefixes
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What makes a context good; a prefix is good while all its contexts are. inf = not asked.

  Attributes:
    max_kl, max_tv, max_chi2: limits on each context.
    budget: limit on the sum of chi2 up to and including the context.
    band: limit on |prod_{s<t} ratio_s - 1|, the tokens before it.

  >>> limits = trm.Limits(max_kl=1e-3, budget=.1)
  >>> limits.max_kl
  0.001
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
  data_fields=[
    'exists',
    'good',
    'missing',
    'excess',
    'kl',
    'tv',
    'chi2',
    'weight',
    'first',
    'second',
  ],
  meta_fields=['limits', 'horizon'],
)
@dataclasses.dataclass(frozen=True)
class Patched:
  """The policy that is pi_theta after good prefixes and pi_roll elsewhere; made by `patch`.

  Attributes:
    exists: rows with a token; the others count nowhere.
    good: G_t, the prefix up to and including c_t is good. Its last column says which rows are kept.
    missing: rows with a log_ratio or divergence that is not a number, or a ratio that overflows: no
      rollout draws what it gives no mass. A log_ratio of -inf is a ratio of 0.
    excess: G_t (ratio_t - 1).
    kl, tv, chi2: G_t times the divergence of the context; chi2 None where it was not given.
    weight: W'' = prod_t ratio_t over good contexts, at most e^20.
    first: S'' = sum_t excess_t.
    second: Q = sum_t G_t (prod_{s<t} ratio_s - 1)^2 chi2_t, whose mean is E[(W'' - 1 - S'')^2]; inf
      with a chi2 of inf, where the rollout lacks support and Q says nothing.
    horizon: longest response there can be.
  """

  exists: Bool[Array, 'B']
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
  horizon: int

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
  horizon: int | None = None,
) -> Patched:
  """Judges every prefix by `limits`. Divergences are exact, over the full vocabulary.

  `horizon` is the longest response there can be, by default the T slots: give it where batches are
  trimmed to their longest row, since a penalty must not depend on the rows.

  Limits must be chosen before the rows are seen: a quantile of the batch itself voids everything
  that follows. Raises InputError for a limit on a chi2 that is not given, and a horizon below T.

  >>> log_ratio = kl = jnp.array([[.01, .02], [.01, .90]])
  >>> limits = trm.Limits(max_kl=.5)
  >>> patched = trm.patch(log_ratio, kl < 1, kl=kl, tv=kl / 2, limits=limits)
  >>> patched.good
  Array([[ True,  True],
         [ True, False]], dtype=bool)
  """
  if chi2 is None and min(limits.max_chi2, limits.budget) < math.inf:
    raise InputError(
      f'chi2=None, but limits.max_chi2={limits.max_chi2} and limits.budget={limits.budget} are'
      ' judged by it: pass chi2 [B, T], or leave these limits at inf.'
    )
  horizon = valid.shape[1] if horizon is None else bounds.horizon(horizon)
  if horizon < valid.shape[1]:
    raise InputError(
      f'horizon={horizon} is shorter than the {valid.shape[1]} slots of a row: give the longest'
      ' response.'
    )
  inside = lambda x: jnp.where(valid, x, 0)
  log_ratio, kl, tv = inside(log_ratio), inside(kl), inside(tv)
  # A ratio that overflows would be infinite evidence; the rollout does not draw such a token.
  unknown = jnp.isnan(kl) | jnp.isnan(tv) | jnp.isnan(log_ratio) | jnp.isinf(jnp.exp(log_ratio))
  missing = unknown.any(-1)
  good = (kl <= limits.max_kl) & (tv <= limits.max_tv)
  if chi2 is not None:
    chi2 = inside(chi2)
    missing = missing | jnp.isnan(chi2).any(-1)
    spent = prefixes.spent(chi2, valid)
    good = good & (chi2 <= limits.max_chi2) & (spent <= limits.budget)
  log_ratio = jnp.where(missing[:, None], 0, log_ratio)
  before = jnp.expm1(jnp.pad(jnp.cumsum(log_ratio, -1), ((0, 0), (1, 0)))[:, :-1])
  good = prefixes.prefix(good & (jnp.abs(before) <= limits.band), valid)
  part = lambda x: jnp.where(good & valid, x, 0)
  excess = part(jnp.expm1(log_ratio))
  second = None
  if chi2 is not None:
    # No 0 times inf: where the rollout lacks support there is no bound.
    finite = jnp.where(jnp.isinf(chi2), 0, chi2)
    second = part(jnp.where(jnp.isinf(chi2), jnp.inf, before**2 * finite)).sum(-1)
  return Patched(
    exists=valid.any(-1),
    good=good,
    missing=missing,
    excess=excess,
    kl=part(kl),
    tv=part(tv),
    chi2=None if chi2 is None else part(chi2),
    weight=jnp.exp(jnp.minimum(part(log_ratio).sum(-1), LOG_RATIO_CAP)),
    first=excess.sum(-1),
    second=second,
    limits=limits,
    horizon=horizon,
  )


class Penalty(typing.NamedTuple):
  """What the surrogate may be wrong by: the mean of `rows` [B], of which none exceeds `most`."""

  rows: Float[Array, 'B']
  most: confidence.Real


def tv_penalty(patched: Patched) -> Penalty:
  """2 sum_t G_t TV(c_t) w_t: whose mean bounds |Delta| by the TV of each context and its future.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> patched = trm.patch(kl, kl < 1, kl=kl, tv=kl / 2, limits=trm.Limits(max_kl=.5))
  >>> np.asarray(trm.tv_penalty(patched).rows).round(4)
  array([0.005, 0.005], dtype=float32)
  """
  limits, steps = patched.limits, patched.tv.shape[1]
  weights = limits.future_tv(patched.horizon).astype(patched.tv.dtype)
  rows = 2 * (patched.tv * weights[None, :steps]).sum(-1)
  return Penalty(rows, 2 * limits.epsilon * weights.sum())


def l2_penalty(patched: Patched, *, scale: float | None = None) -> Penalty:
  """Q / (2 scale) + scale / 8: linear in the response's chi2, without T^1.5.

  Its mean is smallest, sqrt(E Q) / 2, at scale = 2 sqrt(E Q), which an earlier batch may tell; by
  default the largest that the budget allows. Without a band Q has no upper limit and the constant
  `sharp.budget_l2` is taken. Raises InputError without a budget, and for scale <= 0.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> patched = trm.patch(kl, kl < 1, kl=kl, tv=kl / 2, chi2=kl, limits=trm.Limits(budget=.5))
  >>> np.asarray(trm.l2_penalty(patched).rows).round(4)
  array([0.1928, 0.1928], dtype=float32)
  """
  limits = patched.limits
  if limits.budget == math.inf:
    raise InputError('limits.budget=inf has no l2_penalty: set the largest sum of chi2.')
  whole = sharp.budget_l2(limits.budget).astype(patched.first.dtype)
  if limits.band == math.inf:
    return Penalty(jnp.full_like(patched.first, whole), whole)
  if scale is not None and not scale > 0:
    raise InputError(f'scale={scale} must be > 0.')
  scale = 4 * whole if scale is None else scale
  penalty = lambda q: q / (2 * scale) + scale / 8
  return Penalty(penalty(patched.second), penalty(limits.band**2 * limits.budget))
