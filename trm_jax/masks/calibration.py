"""Limits of the trust region from a noise-floor batch: rows of one policy scored by both engines.

Without any drift, divergences are what the engines' arithmetic makes them. A limit is set so that
about `target` of such rows is accepted, at one length or at every length:

| function              | limit                          | accepts `target` of          |
| --------------------- | ------------------------------ | ---------------------------- |
| `conformal`           | k-th smallest statistic        | rows like these, exactly     |
| `max_limit`           | (1 - p)^T = target             | rows of T independent tokens |
| `conformal_max_limit` | p = level / T, level from rows | their mix of lengths, nearly |

    limit = calibration.conformal(masks.mean_over_tokens(kl, valid), target=0.9)
    tail = calibration.tail(kl, valid)
    limit = calibration.max_limit(tail, T=lengths, target=0.9)  # one for each length
    keep = masks.max_kl(limit)(divergences, valid)

`follow` lets a limit go with past batches instead. The calibration rows must not be the ones that
are judged: then the limit is a constant to them. A limit that depends on the realised length is not
known to a context before the end; certificates take the limit of the longest response. No gradient
flows.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import extremes
from trm_jax.types import InputError

# Below so many exceedances a power law through that many of the largest values takes over.
FEWEST = 20


def _check(target) -> None:
  if not 0 < target < 1:
    raise InputError(f'target={target} must lie strictly between 0 and 1: the share to accept.')


def conformal(statistic: Float[Array, 'm'], *, target: float) -> Float[Array, '']:
  """The k-th smallest of m statistics, k = ceil((m + 1) target); inf where k > m. Float32.

  A fresh row, exchangeable with these, is within the limit with probability >= target, and given
  this batch with one drawn from Beta(k, m + 1 - k). NaN counts as the largest. Split conformal
  prediction. Raises InputError for a target outside (0, 1).

  >>> float(trm.conformal(jnp.arange(1., 10.), target=.8))  # of 9 rows of noise, the 8th
  8.0
  """
  _check(target)
  m = statistic.shape[0]
  k = math.ceil((m + 1) * target - 1e-9)  # 100 * 0.07 is 7.000000000000001
  if k > m:
    return jnp.float32(jnp.inf)
  known = jax.lax.stop_gradient(statistic).astype(jnp.float32)
  return jnp.sort(jnp.where(jnp.isnan(known), jnp.inf, known))[k - 1]


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
  """How often a token exceeds a value: the sample's own share, beyond it Hill's power law.

      P(x > limit) = share of the sample,   or   K/n (u / limit)^a below K = 20 exceedances

  with u the 21st largest value and 1/a the mean of log(x / u) over the 20 above it. Where the true
  tail is lighter than any power law, limits are too high on average: they accept more.

  Attributes:
    values: valid values of all rows, largest first, then -inf.
    count: how many are valid.
  """

  values: Float[Array, 'n']
  count: Int[Array, '']

  def _power(self):
    """(u, 1/a); 1/a is inf where fewer than 21 values are positive: nothing is known then."""
    top = self.values[: FEWEST + 1]
    u = top[-1]
    known = (u > 0) & (u < jnp.inf)
    slope = jnp.log(top[:-1] / jnp.where(known, u, 1)).mean()
    return jnp.where(known, u, 1), jnp.where(known, slope, jnp.inf)

  def limit(self, p: Float[Array, '*s']) -> Float[Array, '*s']:
    """The value that a token exceeds with probability p; inf where the sample cannot say."""
    expected = self.count.astype(p.dtype) * p
    at = jnp.clip(expected.astype(jnp.int32), 0, jnp.maximum(self.count - 1, 0))
    u, slope = self._power()
    # Nothing is exceeded with probability 0, also where ties leave no slope.
    beyond = jnp.where(expected > 0, u * jnp.power(FEWEST / expected, slope), jnp.inf)
    return jnp.where(expected >= FEWEST, self.values[at], jnp.maximum(beyond, 0))

  def exceedance(self, x: Float[Array, '*s']) -> Float[Array, '*s']:
    """The probability in [0, 1] that a token exceeds x >= 0."""
    above = jnp.searchsorted(-self.values, -x.ravel()).reshape(x.shape)
    u, slope = self._power()
    over = jnp.log(extremes.at_least(x, u) / u)
    beyond = FEWEST * jnp.exp(-jnp.where(over > 0, over / slope, 0))
    return jnp.where(above >= FEWEST, above.astype(x.dtype), beyond) / self.count.astype(x.dtype)


def tail(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Tail:
  """The tail of a nonnegative statistic (KL, TV, ...) of all valid tokens; NaN counts as inf."""
  x = jax.lax.stop_gradient(x).astype(jnp.float32)
  values = jnp.where(valid, jnp.where(jnp.isnan(x), jnp.inf, x), -jnp.inf).ravel()
  values = jnp.pad(values, (0, max(FEWEST + 1 - values.size, 0)), constant_values=-jnp.inf)
  return Tail(-jnp.sort(-values), valid.sum())


def _lengths(T) -> Array:
  return jnp.maximum(jnp.asarray(T, jnp.float32), 1)


def max_limit(sample: Tail, *, T: int | Int[Array, '*s'], target: float) -> Float[Array, '*s']:
  """Limit on max_t x_t that `target` of the rows of T such tokens meet: (1 - p)^T = target.

  T is one length or an array of them (an empty row counts as 1). Exact for independent tokens;
  where the tokens of a row rise and fall together more rows pass. Raises InputError for a target
  outside (0, 1).

  >>> noise, valid = jnp.linspace(0, 1, 4000).reshape(40, 100), jnp.ones((40, 100), bool)
  >>> tail = trm.masks.calibration.tail(noise, valid)
  >>> f'{trm.max_limit(tail, T=4, target=.5):.2f}'  # .84^4 = .5
  '0.84'
  """
  _check(target)
  return sample.limit(-jnp.expm1(math.log(target) / _lengths(T)))


def conformal_max_limit(
  sample: Tail,
  largest: Float[Array, 'm'],
  lengths: Int[Array, 'm'],
  *,
  T: int | Int[Array, '*s'],
  target: float,
) -> Float[Array, '*s']:
  """Limit on max_t x_t at length T whose level was set by whole rows, not by independence.

  Accepted are rows with T P(x > max_t x_t) >= level: the number of larger values that a row of this
  length should hold. The level is `conformal` on m rows, with maxima `largest` and `lengths`, other
  than those of `sample`; acceptance is `target` over their mix of lengths, not at each of them, and
  less by up to a step of the tail's sample (.02 of rows with 40 values), which cannot tell apart
  what lies between two of them. NaN counts as the largest.
  """
  largest = jnp.where(jnp.isnan(largest), jnp.inf, largest)
  level = -conformal(-_lengths(lengths) * sample.exceedance(largest), target=target)
  return sample.limit(jnp.maximum(level, 0) / _lengths(T))


def follow(
  limit: Float[Array, ''],
  statistic: Float[Array, 'B'],
  *,
  target: float,
  rate: float = 0.1,
  usable: Bool[Array, 'B'] | None = None,
) -> Float[Array, '']:
  """The limit for the next batch: a geometric moving average of this batch's `target` quantile.

      log limit' = (1 - rate) log limit + rate log quantile(statistic, target)

  Uses past batches only, so that a row's own value never sets the limit it is judged by. `target`
  in (0, 1) is the share to accept of the `usable` rows (default: all). Rows that cannot be judged
  count as the largest; where those reach the quantile, or no row is usable, the limit stays.
  Returns f32 > 0.
  """
  usable = jnp.ones(statistic.shape, bool) if usable is None else usable
  judged = usable & ~jnp.isnan(statistic)
  ranked = jnp.sort(jnp.where(judged, jax.lax.stop_gradient(statistic), jnp.inf))
  last = jnp.maximum(usable.sum() - 1, 0)
  now = ranked[jnp.floor(target * last.astype(jnp.float32)).astype(jnp.int32)]
  tiny = jnp.finfo(jnp.float32).tiny  # identical policies have statistic 0
  moved = jnp.exp((1 - rate) * jnp.log(limit) + rate * jnp.log(jnp.maximum(now, tiny)))
  return jnp.where(jnp.isfinite(now), moved, limit).astype(jnp.float32)
