"""The trust region: criteria on per-token statistics say which sequences stay inside.

A criterion is a value: a statistic of a row and the limit it must not exceed.

    criterion = masks.max_kl(limit=0.2)
    keep = criterion(divergences, valid)                          # rows, [B]
    keep = criterion.prefix(divergences, valid)                   # tokens up to the first outside
    keep = masks.all_of(criterion, masks.mean_kl(limit=0.01))(divergences, valid)

| criterion        | statistic of a row         | longer noisy rows  | certifies               |
| ---------------- | -------------------------- | ------------------ | ----------------------- |
| `max_kl`         | max_t KL                   | rejects more       | delta where it went     |
| `max_tv`         | max_t TV                   | rejects more       | epsilon where it went   |
| `mean_kl`        | mean_t KL                  | rejects less       | no single token         |
| `chi2_budget`    | sum_t chi2                 | rejects more       | an error free of T      |
| `length_neutral` | weighted mean of deviation | rejects less       | E[W], given both limits |
| `mean_deviation` | mean_t deviation           | rejects less       | the linear bound        |
| `max_k2`         | max_t k2                   | rejects more       | nothing                 |
| `mean_k3`        | mean_t k3                  | rejects less       | nothing                 |

deviation = |ratio - 1| of the sampled token. To add one: write a function that returns its
`Criterion`, and a row of `CRITERIA` that gives it a word on the command line.

Every statistic is taken over the original `valid` tokens, so criteria commute under AND. A sequence
without valid tokens is kept (it has nothing to reject); NaN or inf on a valid token rejects; what
padding holds never matters. No gradient flows through a mask. arXiv 2512.23075, sections 4-5.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.divergences import ratios
from trm_jax.masks import prefixes
from trm_jax.masks import row_statistics as rs
from trm_jax.types import Divergences, InputError, part

# What a rollout must have kept for a criterion to be judged: the sampled log-probs, the likeliest
# tokens (a certified bound is judged), or everything.
Reads = Literal['sampled', 'bracket', 'exact']
RowStatistic = Callable[[Divergences, Bool[Array, 'B T']], Float[Array, 'B']]
TokenStatistic = Callable[[Divergences, Bool[Array, 'B T']], Float[Array, 'B T']]


def within(statistic: Float[Array, '*s'], limit) -> Bool[Array, '*s']:
  """statistic <= limit; False for NaN, and for inf at any limit. InputError for a limit <= 0."""
  if isinstance(limit, int | float) and not limit > 0:
    raise InputError(f'limit={limit} must be > 0: nothing else lies inside the trust region.')
  # NaN compares False: a row that cannot be judged is rejected; an infinite one is at any limit.
  return (statistic <= limit) & (statistic < jnp.inf)


@dataclasses.dataclass(frozen=True)
class Criterion:
  """Rows whose statistic does not exceed a limit.

  Attributes:
    name: what errors and metrics call it.
    limit: the largest value inside, > 0; may be traced, and one for each row.
    statistic: (divergences, valid) -> [B].
    reads: the least a rollout must have kept for it.
    along: (divergences, valid) -> [B, T], where the criterion is a function of the contexts up to a
      token, so that a row can be cut there: rows are kept while it is <= limit. Else None.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> mine = trm.Criterion('second', .5, lambda d, valid: d.kl[:, 1])
  >>> mine(found, valid)
  Array([ True, False], dtype=bool)
  """

  name: str
  limit: Any
  statistic: RowStatistic
  reads: Reads = 'sampled'
  along: TokenStatistic | None = None

  def __call__(self, divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B']:
    """Which rows are inside, [B]."""
    return within(self.statistic(divergences, valid), self.limit)

  def prefix(self, divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B T']:
    """Which tokens stand before the first context outside, [B, T]; InputError without this form."""
    if self.along is None:
      raise InputError(
        f'{self.name}={self.limit} speaks of whole sequences or of sampled tokens and cannot cut a'
        ' row; use max_kl, max_tv or chi2_budget, or whole sequences.'
      )
    return prefixes.prefix(within(self.along(divergences, valid), self.limit), valid)


@dataclasses.dataclass(frozen=True)
class AllOf:
  """The intersection of trust regions; with none given, every row. Order does not matter."""

  criteria: tuple = ()

  def __call__(self, divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B']:
    """Which rows every criterion keeps, [B]."""
    kept = [criterion(divergences, valid) for criterion in self.criteria]
    return functools.reduce(jnp.logical_and, kept, keep_all(divergences, valid))

  def prefix(self, divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B T']:
    """Which tokens every criterion keeps in its prefix form, [B, T]."""
    kept = [criterion.prefix(divergences, valid) for criterion in self.criteria]
    return functools.reduce(jnp.logical_and, kept, jnp.ones_like(valid))


def all_of(*criteria: Callable) -> AllOf:
  """The intersection of criteria (or of other functions of divergences and valid).

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.all_of(trm.max_kl(.5), trm.max_k2(.1))(found, valid)
  Array([ True, False], dtype=bool)
  """
  return AllOf(criteria)


def keep_all(divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B']:
  """No trust region: every row."""
  del divergences
  return valid.any(-1) | True


def max_kl(limit) -> Criterion:
  """TRM-Max: max_t KL(rollout || policy) <= limit (nats): one limit for every length.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.max_kl(.5)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return Criterion('max_kl', limit, _max_kl, 'bracket', _kl)


def mean_kl(limit) -> Criterion:
  """TRM-Avg: mean_t KL(rollout || policy) <= limit (nats), over the row's true length.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.mean_kl(.1)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return Criterion('mean_kl', limit, _mean_kl, 'bracket')


def max_tv(limit) -> Criterion:
  """max_t TV <= limit in [0, 1]; bounds the paper's epsilon directly on visited contexts.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.max_tv(.2)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return Criterion('max_tv', limit, _max_tv, 'bracket', _tv)


def max_k2(limit) -> Criterion:
  """max_t k2 <= limit, i.e. |log_ratio| <= sqrt(2 limit): sampled, certifies nothing.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.max_k2(.1)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return Criterion('max_k2', limit, _max_k2)


def mean_k3(limit) -> Criterion:
  """mean_t k3(log_ratio) <= limit: sampled estimate of TRM-Avg, certifies nothing.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.mean_k3(.1)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return Criterion('mean_k3', limit, _mean_k3)


def length_neutral(limit, *, epsilon=5e-3, delta=1e-4, horizon: int | None = None) -> Criterion:
  """LN-TRM: mean |ratio - 1|, weighted by what the rest of the response can still change.

  `future_deviation` <= limit (sampled). With `horizon`, the longest response there can be, and
  where epsilon (token TV) and delta (token KL in nats) hold in all contexts, |Error| <= 2 E[W], and
  a row kept has W <= limit Z. The realised length that is taken by default, as in the paper, is not
  known at the token: no proof. The last token has weight 0: rows of one token are kept. arXiv
  2512.23075, length-bias appendix.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.length_neutral(.1)(found, valid)
  Array([ True,  True], dtype=bool)
  """
  settings = dict(epsilon=epsilon, delta=delta, horizon=horizon)
  return Criterion('length_neutral', limit, part(_future_deviation, **settings))


def mean_deviation(limit) -> Criterion:
  """SER: mean_t |ratio_t - 1| <= limit, over the row's true length (sampled; the paper: .03 to .1).

  A token that the policy has dropped (ratio -> 0) adds at most 1. |Error| <= 2 T E[mean deviation],
  the linear bound. arXiv 2512.23075, length-bias appendix.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.mean_deviation(.1)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return Criterion('mean_deviation', limit, _mean_deviation)


def chi2_budget(limit) -> Criterion:
  """sum_t chi2(policy || rollout) <= limit: what a response may spend; costs exact chi2.

  Delta of the policy patched by its prefix form is at most `sharp.budget_l2(limit)` ~ 0.35 limit,
  whatever T is; what leaves the budget costs its reward besides. Identical noise spends T times as
  much: let the limit grow with T.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.chi2_budget(.5).prefix(found, valid)  # tokens up to the first outside
  Array([[ True,  True],
         [ True, False]], dtype=bool)
  """
  return Criterion('chi2_budget', limit, _sum_chi2, 'exact', prefixes.chi2_spent)


def combined(*, max_limit, mean_limit) -> AllOf:
  """TRM-Combined: TRM-Max and TRM-Avg at once (the paper's third criterion).

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> valid = jnp.ones((2, 2), bool)
  >>> trm.combined(max_limit=.5, mean_limit=.1)(found, valid)
  Array([ True, False], dtype=bool)
  """
  return all_of(max_kl(max_limit), mean_kl(mean_limit))


# Statistics, by name, so that criteria made alike are equal.
_kl = lambda d, valid: rs.tokens(d.kl, valid)
_tv = lambda d, valid: rs.tokens(d.tv, valid)
_max_kl = lambda d, valid: rs.max_over_tokens(d.kl, valid)
_max_tv = lambda d, valid: rs.max_over_tokens(d.tv, valid)
_mean_kl = lambda d, valid: rs.mean_over_tokens(d.kl, valid)
_max_k2 = lambda d, valid: rs.max_over_tokens(ratios.k2(rs.tokens(d.log_ratio, valid)), valid)
_mean_k3 = lambda d, valid: rs.mean_over_tokens(ratios.k3(rs.tokens(d.log_ratio, valid)), valid)
_mean_deviation = lambda d, valid: rs.mean_over_tokens(
  rs.deviation(rs.tokens(d.log_ratio, valid)), valid
)
_sum_chi2 = lambda d, valid: rs.sum_over_tokens(rs.chi2_of(d), valid)


def _future_deviation(divergences, valid, **settings):
  return rs.future_deviation(divergences.log_ratio, valid, **settings)


# Words of the command line, `--method.max-kl 0.2`: a function of a limit (and of other numbers, by
# keyword) for each.
CRITERIA: dict[str, Callable[..., Criterion]] = dict(
  max_kl=max_kl,
  mean_kl=mean_kl,
  max_tv=max_tv,
  max_k2=max_k2,
  mean_k3=mean_k3,
  length_neutral=length_neutral,
  mean_deviation=mean_deviation,
  chi2_budget=chi2_budget,
)
