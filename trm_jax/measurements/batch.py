"""What a batch of rollouts says about the mismatch: every distribution, confidence, whole rows.

    report = measurements.measure(divergences, valid, policy_logp=logp)  # one jitted function
    measurements.plain(report)                                           # nested dicts for JSON

| function            | what                                                              |
| ------------------- | ----------------------------------------------------------------- |
| `log_odds_shift`    | logit p - logit q of the sampled token, p policy, q rollout       |
| `confidence_table`  | its median, robust sigma, q05 and q95 by confidence               |
| `sequences`         | effective sample size, chi2, cancellation, of trajectories        |
| `correlation`       | Pearson's, of the probabilities on both sides                     |
| `measure`           | all of this, and the distributions of every divergence            |

Missing and infinite values as in `distributions`.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trm_jax import extremes
from trm_jax.divergences import ratios
from trm_jax.measurements.distributions import (
  Distribution,
  bins,
  by_group,
  distribution,
  length_bins,
  over,
  position_bins,
  quantiles,
  sign_bins,
  tail,
)
from trm_jax.mismatch import heavy_tail
from trm_jax.types import Divergences

# Exceedance of KL (nats) and of |log-ratio|: limits in use (trust regions, IcePop, vetoes).
KL_LIMITS = (1e-3, 1e-2, 0.05, 0.2, 1.0)
LOG_RATIO_LIMITS = (0.01, 0.05, 0.2, 0.7, 3.5)
ENTROPY = (0.01, 0.1, 0.5, 1.0)
# A normal distribution's standard deviation over its median absolute deviation.
ROBUST = 1.4826


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
  """Of whole trajectories; W = product of ratios. One with a missing token is counted, not judged.

  Attributes:
    count, missing: how many are judged, and how many have no W (a token missing, or 0 * inf).
    ess: (sum W)^2 / (n sum W^2) in (0, 1].
    chi2: mean W^2 - 1, sampled, in [-1, inf].
    log_weight: distribution of log W.
    cancellation: distribution of 1 - |sum log_ratio| / sum |log_ratio| in [0, 1]: what a
      signed mean does not see. Without any mismatch or with an infinite one there is none.
  """

  count: Int[Array, '']
  missing: Int[Array, '']
  ess: Float[Array, '']
  chi2: Float[Array, '']
  log_weight: Distribution
  cancellation: Distribution


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
  policy_logp, log_ratio = ratios.raised(policy_logp), ratios.raised(log_ratio)
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
  policy_logp, log_ratio = ratios.raised(policy_logp), ratios.raised(log_ratio)
  shift = log_odds_shift(policy_logp, log_ratio)
  group = bins(jnp.exp(policy_logp), edges)
  there = valid & ~jnp.isnan(shift)

  both = jnp.stack([shift, log_ratio])

  def one(where):
    ranked = jax.vmap(lambda x: quantiles(x, where, jnp.array([0.05, 0.5, 0.95])))(both)
    off = lambda x, at: quantiles(jnp.abs(x - at), where, jnp.array([0.5]))[0] * ROBUST
    sigma = jax.vmap(off)(both, ranked[:, 1])
    q05, median, q95 = ranked[0]
    return where.sum(), median, sigma[0], q05, q95, sigma[1]

  count, median, sigma, q05, q95, of_ratio = by_group(one, there, group, len(edges) + 1)
  return ShiftTable(
    share=over(count, there.sum()),
    count=count,
    median=median,
    sigma=sigma,
    q05=q05,
    q95=q95,
    sigma_log_ratio=of_ratio,
    unresolved=(valid & jnp.isnan(shift) & ~jnp.isnan(log_ratio)).sum(),
  )


# Rows.


def sequences(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  trajectory: Int[Array, 'B'] | None = None,
) -> Sequences:
  """Statistics of the trajectories' importance weights; see `Sequences`.

  A trajectory is a row, or all rows of one id in `trajectory`; rows without tokens do not exist.
  """
  log_w, rows = ratios.over_trajectories(log_ratio, valid, trajectory=trajectory)
  absolute, _ = ratios.over_trajectories(jnp.abs(log_ratio), valid, trajectory=trajectory)
  there = rows & ~jnp.isnan(log_w)
  count = there.sum()
  mixed = (absolute > 0) & (absolute < jnp.inf)
  cancelled = 1 - jnp.abs(log_w) / jnp.where(mixed, absolute, 1)
  both = jnp.stack([log_w, extremes.at_least(cancelled, 0)])
  spread = jax.vmap(distribution)(both, jnp.stack([rows, there & mixed]))
  log_weight, cancellation = (jax.tree.map(lambda x, i=i: x[i], spread) for i in range(2))
  return Sequences(
    count=count,
    missing=(rows & ~there).sum(),
    ess=ratios.share_of(log_w, there),
    chi2=over(jnp.where(there, jnp.expm1(2 * log_w), 0).sum(), count),
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
  policy_logp, log_ratio = ratios.raised(policy_logp), ratios.raised(log_ratio)
  there = valid & ~jnp.isnan(log_ratio) & ~jnp.isnan(policy_logp)
  p = jnp.where(there, jnp.exp(policy_logp), 0)
  q = jnp.where(there, jnp.exp(policy_logp - log_ratio), 0)
  less_mean = lambda x: jnp.where(there, x - over(x.sum(), there.sum()), 0)
  p, q = less_mean(p), less_mean(q)
  spread = (p * p).sum() * (q * q).sum()
  return jnp.where(spread > 0, (p * q).sum() / jnp.sqrt(spread), jnp.nan)


def measure(
  divergences: Divergences,
  valid: Bool[Array, 'B T'],
  *,
  policy_logp: Float[Array, 'B T'] | None = None,
  advantage: Float[Array, 'B'] | None = None,
  trajectory: Int[Array, 'B'] | None = None,
  positions: tuple[float, ...] = (),
  lengths: tuple[float, ...] = (),
  k: int | None = None,
) -> dict[str, typing.Any]:
  """Everything above of one batch, as a nested dict of arrays; for `jax.jit`.

  `policy_logp` (of the sampled token) adds what depends on confidence, `advantage` what depends on
  its sign, edges in tokens the tables by `positions` and `lengths`. Rows of one id in `trajectory`
  make one sequence. Groups are stacked.
  """
  divergences = jax.tree.map(ratios.raised, divergences)
  policy_logp = None if policy_logp is None else ratios.raised(policy_logp)
  magnitude = jnp.abs(divergences.log_ratio)
  values = {
    'log_ratio': (divergences.log_ratio, LOG_RATIO_LIMITS),
    'abs_log_ratio': (magnitude, LOG_RATIO_LIMITS),
    'kl': (divergences.kl, KL_LIMITS),
    'tv': (divergences.tv, KL_LIMITS),
    'k3': (ratios.k3(divergences.log_ratio), KL_LIMITS),
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
  report = select(0) | {
    'tail': {name: jax.tree.map(lambda leaf, i=i: leaf[i], tails) for i, name in enumerate(heavy)},
    'sequences': sequences(divergences.log_ratio, valid, trajectory),
    'by': {
      name: select(np.flatnonzero(np.array(kind) == i + 1))
      for i, (name, (_, count)) in enumerate(groups.items())
    },
  }
  if policy_logp is not None:
    report['shift'] = confidence_table(policy_logp, divergences.log_ratio, valid)
    report['correlation'] = correlation(policy_logp, divergences.log_ratio, valid)
  return report


def plain(tree: typing.Any) -> typing.Any:
  """Nested dicts of Python numbers and lists from what these functions return."""
  if hasattr(tree, '_asdict'):
    tree = tree._asdict()
  if isinstance(tree, dict):
    return {name: plain(value) for name, value in tree.items()}
  return np.asarray(tree).tolist()
