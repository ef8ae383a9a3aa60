"""One quantity over a batch: its distribution, its tail, and both by groups of tokens.

| function            | what                                                              |
| ------------------- | ----------------------------------------------------------------- |
| `distribution`      | mean, quantiles, largest, exceedance rates                        |
| `tail`              | Hill's tail index with its standard error                         |
| `by_group`          | any of these by position, length, entropy, sign of the advantage  |

Missing is not zero: NaN on a valid token is left out and counted. Infinite is a violation: it stays
in counts, quantiles, largest and exceedance, and is left out of the mean alone, beside which its
number stands. What padding holds never matters. An empty selection gives NaN, never 0. Float32,
no gradient; under a mesh give replicated arrays.
"""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import extremes
from trm_jax.types import InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


class Distribution(typing.NamedTuple):
  """Of the selected values that are there; scalars, [q] and [m], with a leading axis by group.

  Attributes:
    count: how many there are, infinite ones included.
    missing: selected, but NaN.
    infinite: +inf or -inf.
    mean: over the finite ones.
    quantiles: at the levels asked for, linear between neighbours.
    largest: the maximum, inf if there is one.
    exceed: share above each threshold.
  """

  count: Int[Array, '*g']
  missing: Int[Array, '*g']
  infinite: Int[Array, '*g']
  mean: Float[Array, '*g']
  quantiles: Float[Array, '*g q']
  largest: Float[Array, '*g']
  exceed: Float[Array, '*g m']


class Tail(typing.NamedTuple):
  """P(x > u s) ~ s^-index beyond the k+1-th largest value u; see `tail`."""

  index: Float[Array, '*g']
  error: Float[Array, '*g']
  k: Int[Array, '*g']
  above: Float[Array, '*g']


def over(total, count):
  """total / count, and NaN where there is nothing."""
  return total / jnp.where(count > 0, count, jnp.nan)


def quantiles(
  x: Float[Array, '*s'], where: Bool[Array, '*s'], q: Float[Array, 'Q']
) -> Float[Array, 'Q']:
  """Linear quantiles of what is no NaN of x over `where`, as numpy's nanquantile; NaN for none.

  Order statistics bit by bit, 32 counts over x: a sort of all tokens of a large batch is most of
  what the compiler for TPUs spends on a training step.
  """
  where = where & ~jnp.isnan(x)
  last = jnp.maximum(where.sum() - 1, 0)
  place = q.astype(jnp.float32) * last
  low = jnp.floor(place)
  ranks = jnp.concatenate([low, jnp.minimum(low + 1, last)]).astype(jnp.int32)
  # Unsigned integers in the order of the floats: negative ones upside down, below the others.
  sign = jnp.uint32(1 << 31)
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  order = jnp.where(where, jnp.where(bits >= sign, ~bits, bits | sign), jnp.uint32(2**32 - 1))

  def bit(i, keys):  # the largest number with at most `rank` numbers below it
    higher = keys | (sign >> i.astype(jnp.uint32))
    below = (order.reshape(1, -1) < higher[:, None]).sum(-1)
    return jnp.where(below <= ranks, higher, keys)

  keys = jax.lax.fori_loop(0, 32, bit, jnp.zeros(ranks.shape, jnp.uint32))
  values = jax.lax.bitcast_convert_type(jnp.where(keys >= sign, keys ^ sign, ~keys), jnp.float32)
  below, above = jnp.split(values, 2)
  weight = place - low
  # Between infinities, and between equal values, there is nothing to mix.
  level = (weight == 0) | (below == above) | jnp.isinf(below)
  mixed = jnp.where(level, below, below * (1 - weight) + above * jnp.where(level, 0, weight))
  return jnp.where(where.any(), mixed, jnp.nan)


def distribution(
  x: Float[Array, '*s'],
  where: Bool[Array, '*s'],
  *,
  thresholds: tuple[float, ...] | Float[Array, 'm'] = (),
  levels: tuple[float, ...] = QUANTILES,
) -> Distribution:
  """How the selected values are distributed; see `Distribution`. Values of any sign."""
  x = jax.lax.stop_gradient(x).astype(jnp.float32)
  there = where & ~jnp.isnan(x)
  finite = there & ~jnp.isinf(x)
  count = there.sum()
  limits = jnp.asarray(thresholds, jnp.float32)
  above = jax.vmap(lambda limit: (there & (x > limit)).sum())(limits)
  return Distribution(
    count=count,
    missing=(where & jnp.isnan(x)).sum(),
    infinite=(there & jnp.isinf(x)).sum(),
    mean=over(jnp.where(finite, x, 0).sum(), finite.sum()),
    quantiles=quantiles(x, there, jnp.asarray(levels)),
    largest=jnp.where(count > 0, extremes.largest(x, None, where=there), jnp.nan),
    exceed=over(above, count),
  )


def tail(x: Float[Array, '*s'], where: Bool[Array, '*s'], *, k: int | None = None) -> Tail:
  """Hill's index, 1 / mean log(x / u) over the k largest with u the next; error index / sqrt k.

  k = floor(sqrt(count)) unless given. Of KL an index <= 1 means that its mean does not settle, <= 2
  its variance. The error holds for independent tokens: tokens of one row are not, so it is a lower
  bound. Index 0 where one of the k is infinite, inf where they are all equal; NaN where fewer than
  k + 1 values are positive. Lighter tails than power laws give an index that grows with the sample.
  Raises InputError for k < 1. Hill 1975.
  """
  if k is not None and k < 1:
    raise InputError(f'k={k} must be at least 1: the number of largest values that make the tail.')
  x = jax.lax.stop_gradient(x).astype(jnp.float32)
  there = where & ~jnp.isnan(x)
  count = there.sum()
  values = -jnp.sort(-jnp.where(there, x, -jnp.inf).reshape(-1))
  # The root of a square is exact.
  used = jnp.floor(jnp.sqrt(count.astype(jnp.float32))).astype(jnp.int32) if k is None else k
  used = jnp.asarray(used, jnp.int32)
  u = values[jnp.minimum(used, values.size - 1)]
  known = (used >= 1) & (used < count) & (u > 0)
  inside = (jnp.arange(values.size) < used) & known
  logs = jnp.where(inside, jnp.log(jnp.where(inside, values, 1)), 0).sum()
  mean = logs / jnp.maximum(used, 1) - jnp.log(jnp.where(known, u, 1))
  mean = jnp.where(u == jnp.inf, jnp.inf, jnp.maximum(mean, 0))
  index = jnp.where(known, 1 / mean, jnp.nan)
  return Tail(index, index / jnp.sqrt(used.astype(jnp.float32)), used, u)


# Groups: an integer for every token; edges belong to the bin below.


def bins(x: Float[Array, '*s'], edges: tuple[float, ...]) -> Int[Array, '*s']:
  """0..len(edges): how many edges lie below x. NaN falls into 0, where it is counted missing."""
  return sum((x > edge).astype(jnp.int32) for edge in edges) + jnp.zeros(x.shape, jnp.int32)


def position_bins(valid: Bool[Array, 'B T'], edges: tuple[float, ...]) -> Int[Array, 'B T']:
  """Bins of the token's place among the valid ones of its row, 1, 2, .."""
  return bins(jnp.cumsum(valid, -1).astype(jnp.float32), edges)


def length_bins(valid: Bool[Array, 'B T'], edges: tuple[float, ...]) -> Int[Array, 'B T']:
  """Bins of the row's length."""
  lengths = valid.sum(-1, keepdims=True).astype(jnp.float32)
  return jnp.broadcast_to(bins(lengths, edges), valid.shape)


def sign_bins(advantage: Float[Array, 'B'], valid: Bool[Array, 'B T']) -> Int[Array, 'B T']:
  """0, 1, 2 for a negative, zero and positive advantage of the row."""
  sign = jnp.sign(advantage).astype(jnp.int32) + 1
  return jnp.broadcast_to(sign[:, None], valid.shape)


def by_group(fn, where: Bool[Array, '*s'], group: Int[Array, '*s'], groups: int):
  """fn(where & (group == g)) for each of the groups, stacked on a leading axis."""
  return jax.lax.map(lambda g: fn(where & (group == g)), jnp.arange(groups))
