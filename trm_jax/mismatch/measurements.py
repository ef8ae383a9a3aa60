"""What a batch of rollouts says about the mismatch: distributions, tails, tables by group.

    found = measurements.measure(divergences, valid, policy_logp=logp)   # one jitted function
    measurements.plain(found)                                            # nested dicts for JSON

| function            | what                                                              |
| ------------------- | ----------------------------------------------------------------- |
| `distribution`      | mean, quantiles, largest, exceedance rates                        |
| `tail`              | Hill's tail index with its standard error                         |
| `log_odds_shift`    | logit p - logit q of the sampled token, p policy, q rollout       |
| `confidence_table`  | its median, robust sigma, q05 and q95 by confidence               |
| `by_group`          | any of these by position, length, entropy, sign of the advantage  |
| `sequences`         | effective sample size, chi2, cancellation, of whole rows          |
| `correlation`       | Pearson's, of the probabilities on both sides                     |

Missing is not zero: NaN on a valid token is left out and counted. Infinite is a violation: it stays
in counts, quantiles, largest and exceedance, and is left out of the mean alone, beside which its
number stands. What padding holds never matters. An empty selection gives NaN, never 0. Float32,
no gradient; under a mesh give replicated arrays.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trm_jax import divergences as dv
from trm_jax.mismatch import heavy_tail
from trm_jax.types import Divergences, InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
# Exceedance of KL (nats) and of |log-ratio|: limits in use (trust regions, IcePop, vetoes).
KL_LIMITS = (1e-3, 1e-2, 0.05, 0.2, 1.0)
LOG_RATIO_LIMITS = (0.01, 0.05, 0.2, 0.7, 3.5)
ENTROPY = (0.01, 0.1, 0.5, 1.0)
# A normal distribution's standard deviation over its median absolute deviation.
ROBUST = 1.4826


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


class ShiftTable(typing.NamedTuple):
  """By confidence bin [bins]: shifts of log-odds, nats, and the robust sigma of log_ratio.

  `share` is of all tokens whose shift is known; `unresolved` are tokens of which float32 does not
  know the odds, a probability of exactly 1.
  """

  share: Float[Array, 'b']
  count: Int[Array, 'b']
  median: Float[Array, 'b']
  sigma: Float[Array, 'b']
  q05: Float[Array, 'b']
  q95: Float[Array, 'b']
  sigma_log_ratio: Float[Array, 'b']
  unresolved: Int[Array, '']


class Sequences(typing.NamedTuple):
  """Of whole rows; W = product of ratios. Rows with a missing token are counted, not judged.

  Attributes:
    count, missing: rows judged, and rows without a W (a token missing, or 0 * inf).
    ess: (sum W)^2 / (n sum W^2) in (0, 1].
    chi2: mean W^2 - 1, sampled, in [-1, inf].
    log_weight: distribution of log W.
    cancellation: distribution over rows of 1 - |sum log_ratio| / sum |log_ratio| in [0, 1]: what a
      signed mean does not see. Rows without any mismatch or with an infinite one have none.
  """

  count: Int[Array, '']
  missing: Int[Array, '']
  ess: Float[Array, '']
  chi2: Float[Array, '']
  log_weight: Distribution
  cancellation: Distribution


def _over(total, count):
  """total / count, and NaN where there is nothing."""
  return total / jnp.where(count > 0, count, jnp.nan)


def _ranked(x, there, levels):
  """Linear quantiles of x where `there`; infinite neighbours are not mixed into NaN."""
  count = there.sum()
  values = jnp.sort(jnp.where(there, x, jnp.inf).reshape(-1))
  place = jnp.asarray(levels, jnp.float32) * (count - 1).astype(jnp.float32)
  below = jnp.clip(jnp.floor(place), 0).astype(jnp.int32)
  weight = place - below
  low, high = values[below], values[jnp.minimum(below + 1, jnp.maximum(count - 1, 0))]
  level = (weight == 0) | (low == high) | (low == -jnp.inf)
  mixed = low + weight * (jnp.where(level, 0, high) - jnp.where(level, 0, low))
  return jnp.where(count > 0, jnp.where(level, low, mixed), jnp.nan)


def distribution(
  x: Float[Array, '*s'],
  where: Bool[Array, '*s'],
  *,
  thresholds: tuple[float, ...] | Float[Array, 'm'] = (),
  quantiles: tuple[float, ...] = QUANTILES,
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
    mean=_over(jnp.where(finite, x, 0).sum(), finite.sum()),
    quantiles=_ranked(x, there, quantiles),
    largest=jnp.where(count > 0, jnp.where(there, x, -jnp.inf).max(), jnp.nan),
    exceed=_over(above, count),
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


# Confidence.


def _log_complement(logp):
  """log(1 - e^logp); -inf at 0."""
  return jnp.log(-jnp.expm1(jnp.minimum(logp, 0)))


def log_odds_shift(
  policy_logp: Float[Array, '*s'], log_ratio: Float[Array, '*s']
) -> Float[Array, '*s']:
  """logit p - logit q of the sampled token in nats, p the policy's probability, q the rollout's.

  NaN where log_ratio is missing or one of the two is 1 in float32, whose odds are then unknown. The
  ratio is p + (1 - p) e^shift (arXiv 2609.32444).
  """
  p, q = policy_logp, policy_logp - log_ratio
  known = (p < 0) & (q < 0)
  complements = _log_complement(jnp.where(known, p, -1)) - _log_complement(jnp.where(known, q, -1))
  return jnp.where(known, log_ratio - complements, jnp.nan)


def confidence_table(
  policy_logp: Float[Array, '*s'],
  log_ratio: Float[Array, '*s'],
  valid: Bool[Array, '*s'],
  *,
  edges: tuple[float, ...] = heavy_tail.EDGES,
) -> ShiftTable:
  """The table of arXiv 2609.32444 from this batch: shifts of log-odds by the policy's confidence.

  Bins p <= .5, .5-.9, .9-.99, .99-.999, > .999 of the sampled token. Comparable with
  `heavy_tail.SIGMA`, whose sigma is of the likeliest token.
  """
  shift = log_odds_shift(policy_logp, log_ratio)
  group = bins(jnp.exp(policy_logp), edges)
  there = valid & ~jnp.isnan(shift)

  both = jnp.stack([shift, log_ratio])

  def one(where):
    ranked = jax.vmap(lambda x: _ranked(x, where, (0.05, 0.5, 0.95)))(both)
    off = lambda x, at: _ranked(jnp.abs(x - at), where, (0.5,))[0] * ROBUST
    sigma = jax.vmap(off)(both, ranked[:, 1])
    q05, median, q95 = ranked[0]
    return where.sum(), median, sigma[0], q05, q95, sigma[1]

  count, median, sigma, q05, q95, of_ratio = by_group(one, there, group, len(edges) + 1)
  return ShiftTable(
    share=_over(count, there.sum()),
    count=count,
    median=median,
    sigma=sigma,
    q05=q05,
    q95=q95,
    sigma_log_ratio=of_ratio,
    unresolved=(valid & jnp.isnan(shift) & ~jnp.isnan(log_ratio)).sum(),
  )


# Rows.


def sequences(log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Sequences:
  """Statistics of the rows' importance weights; see `Sequences`. Empty rows have W = 1."""
  log_ratio = jax.lax.stop_gradient(log_ratio).astype(jnp.float32)
  log_w = jnp.where(valid, log_ratio, 0).sum(-1)
  absolute = jnp.abs(jnp.where(valid, log_ratio, 0)).sum(-1)
  there = ~jnp.isnan(log_w)
  rows = jnp.ones_like(there)
  top = jnp.where(there, log_w, -jnp.inf).max()
  # The largest has weight 1 even where it is infinite.
  scaled = jnp.where(log_w == top, 1, jnp.exp(jnp.where(log_w == top, 0, log_w - top)))
  scaled = jnp.where(there, scaled, 0)
  count = there.sum()
  ess = jnp.square(scaled.sum()) / (jnp.where(count > 0, count, jnp.nan) * (scaled**2).sum())
  mixed = (absolute > 0) & (absolute < jnp.inf)
  cancelled = 1 - jnp.abs(log_w) / jnp.where(mixed, absolute, 1)
  both = jnp.stack([log_w, jnp.maximum(cancelled, 0)])
  spread = jax.vmap(distribution)(both, jnp.stack([rows, there & mixed]))
  log_weight, cancellation = (jax.tree.map(lambda x, i=i: x[i], spread) for i in range(2))
  return Sequences(
    count=count,
    missing=(~there).sum(),
    ess=jnp.where(top > -jnp.inf, ess, jnp.nan),
    chi2=_over(jnp.where(there, jnp.expm1(2 * log_w), 0).sum(), count),
    log_weight=log_weight,
    cancellation=cancellation,
  )


def correlation(
  policy_logp: Float[Array, '*s'], log_ratio: Float[Array, '*s'], valid: Bool[Array, '*s']
) -> Float[Array, '']:
  """Pearson's correlation of the sampled token's probabilities on both sides, in [-1, 1].

  NaN where one side does not vary. 1 for identical policies, and hardly less for bad ones: most
  tokens are sure on both sides.
  """
  there = valid & ~jnp.isnan(log_ratio)
  p = jnp.where(there, jnp.exp(policy_logp), 0)
  q = jnp.where(there, jnp.exp(policy_logp - log_ratio), 0)
  centred = lambda x: jnp.where(there, x - _over(x.sum(), there.sum()), 0)
  p, q = centred(p), centred(q)
  spread = (p * p).sum() * (q * q).sum()
  return jnp.where(spread > 0, (p * q).sum() / jnp.sqrt(spread), jnp.nan)


def measure(
  divergences: Divergences,
  valid: Bool[Array, 'B T'],
  *,
  policy_logp: Float[Array, 'B T'] | None = None,
  advantage: Float[Array, 'B'] | None = None,
  positions: tuple[float, ...] = (),
  lengths: tuple[float, ...] = (),
  k: int | None = None,
) -> dict[str, typing.Any]:
  """Everything above of one batch, as a nested dict of arrays; for `jax.jit`.

  `policy_logp` (of the sampled token) adds what depends on confidence, `advantage` what depends on
  its sign, edges in tokens the tables by `positions` and `lengths`. Groups are stacked.
  """
  magnitude = jnp.abs(divergences.log_ratio)
  values = {
    'log_ratio': (divergences.log_ratio, LOG_RATIO_LIMITS),
    'abs_log_ratio': (magnitude, LOG_RATIO_LIMITS),
    'kl': (divergences.kl, KL_LIMITS),
    'tv': (divergences.tv, KL_LIMITS),
    'k3': (dv.k3(divergences.log_ratio), KL_LIMITS),
  }
  if divergences.chi2 is not None:
    values['chi2'] = (divergences.chi2, KL_LIMITS)
  groups = {'entropy': (bins(divergences.entropy, ENTROPY), len(ENTROPY) + 1)}
  if positions:
    groups['position'] = (position_bins(valid, positions), len(positions) + 1)
  if lengths:
    groups['length'] = (length_bins(valid, lengths), len(lengths) + 1)
  if policy_logp is not None:
    edges = heavy_tail.EDGES
    groups['confidence'] = (bins(jnp.exp(policy_logp), edges), len(edges) + 1)
  if advantage is not None:
    groups['advantage'] = (sign_bins(advantage, valid), 3)
  # One loop over all selections and one sort within: sorts are what takes long to compile.
  number = jnp.stack([valid * 0] + [group for group, _ in groups.values()])
  kind = [0] + [i + 1 for i, (_, count) in enumerate(groups.values()) for _ in range(count)]
  wanted = [0] + [g for _, count in groups.values() for g in range(count)]
  x, limits = (jnp.stack([jnp.asarray(v[i]) for v in values.values()]) for i in range(2))

  def one(at):
    where = valid & (number[at[0]] == at[1])
    return jax.vmap(lambda x, limits: distribution(x, where, thresholds=limits))(x, limits)

  every = jax.lax.map(one, (jnp.array(kind), jnp.array(wanted)))
  select = lambda rows: {
    name: jax.tree.map(lambda leaf, i=i: leaf[rows, i], every) for i, name in enumerate(values)
  }
  heavy = ('kl', 'tv', 'abs_log_ratio')
  tails = jax.vmap(lambda x: tail(x, valid, k=k))(jnp.stack([values[n][0] for n in heavy]))
  found = select(0) | {
    'tail': {name: jax.tree.map(lambda leaf, i=i: leaf[i], tails) for i, name in enumerate(heavy)},
    'sequences': sequences(divergences.log_ratio, valid),
    'by': {
      name: select(np.flatnonzero(np.array(kind) == i + 1))
      for i, (name, (_, count)) in enumerate(groups.items())
    },
  }
  if policy_logp is not None:
    found['shift'] = confidence_table(policy_logp, divergences.log_ratio, valid)
    found['correlation'] = correlation(policy_logp, divergences.log_ratio, valid)
  return found


def plain(tree: typing.Any) -> typing.Any:
  """Nested dicts of Python numbers and lists from what these functions return."""
  if hasattr(tree, '_asdict'):
    tree = tree._asdict()
  if isinstance(tree, dict):
    return {name: plain(value) for name, value in tree.items()}
  return np.asarray(tree).tolist()
