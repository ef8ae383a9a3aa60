"""What a training step reports: scalars from the per-token statistics of a whole batch.

Rows of all updates are pooled. Divergences are those of *all* rows, rejected ones included: what
the mask hides must stay visible. Ratio and effective sample size speak of the kept rows, or, under
a prefix mask, of the kept tokens. Values that are not finite are counted (`nonfinite_rows`), not
averaged. Rows without valid tokens do not exist: they are in no share, mean or count.

`ratio/capped` is the share of kept tokens whose ratio is cut off at e^20 in the loss, which has no
gradient there; `log_ratio/largest` is the largest |log-ratio| of kept tokens before the cut, inf if
one is infinite.

Four are alarms about what the engine reports, of all rows and all reports that are there.
`report/impossible` is the share of log-probs above 0 or of -inf: such rows are dropped, and a sign
or a shape is wrong. `report/ratio_mean` is the mean of policy / rollout over the tokens: its
expectation is 1 for every policy where the reports are right. `report/correlation` of the two
probabilities is near 1 unless reports belong to other tokens, or to another temperature.
`report/contradicted` is the share of tokens whose reported log-prob is more than .1 nats away from
that of the stored scores: another temperature, other filters, or a report that is shifted.

`acceptance` is the share of rows that are kept whole, `acceptance/tokens` of valid tokens that are
kept, and `acceptance/position_q1` to `_q4` the same by quarters of each row, first to last.

`kl/*` and `tv/*` are exact. From a record of the likeliest tokens they are `kl/upper/*` and
`kl/lower/*` instead, with `acceptance/upper` and `acceptance/lower` judged on either; from sampled
log-probs alone there are none.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import certificates, extremes, masks
from trm_jax.divergences import ratios
from trm_jax.measurements import batch, distributions, router_statistics
from trm_jax.mismatch import routing
from trm_jax.objectives import weights
from trm_jax.objectives.scored import Scored
from trm_jax.types import Rollout

# Rounding of log-probs to bfloat16 stays below; an engine's own scores are what it reports from.
CONTRADICTION = 0.1


def _mean(x, where):
  """Mean over `where`; NaN where there is nothing to average."""
  return jnp.where(where, x, 0).sum() / jnp.where(where.any(), where.sum(), jnp.nan)


def by_length_quartile(
  keep: Bool[Array, 'B'], lengths: Int[Array, 'B']
) -> dict[str, Float[Array, '']]:
  """Share of rows kept in each quartile of response length, those of length 0 left out.

  NaN for an empty quartile.
  """
  exists = lengths > 0
  levels = jnp.array([0.25, 0.5, 0.75])
  edges = distributions.quantiles(lengths.astype(jnp.float32), exists, levels)
  quartile = (lengths[:, None] > edges[None]).sum(-1)
  return {f'acceptance/length_q{i + 1}': _mean(keep, exists & (quartile == i)) for i in range(4)}


def by_position_quartile(
  keep: Bool[Array, 'B T'], valid: Bool[Array, 'B T']
) -> dict[str, Float[Array, '']]:
  """Share of valid tokens kept in each quarter of their rows; NaN for an empty quarter."""
  place, length = jnp.cumsum(valid, -1) - 1, valid.sum(-1, keepdims=True)
  quarter = 4 * place // jnp.maximum(length, 1)
  return {f'acceptance/position_q{i + 1}': _mean(keep, valid & (quarter == i)) for i in range(4)}


def _measures(scored: Scored) -> dict[str, Float[Array, 'B T']]:
  """KL and TV under names that say what they are: exact, bounds, or (sampled stores) nothing."""
  d, bounds = scored.divergences, scored.bounds
  if bounds is not None:
    ends = ('upper', 'lower')
    return {f'{n}/{end}': getattr(getattr(bounds, n), end) for n in ('kl', 'tv') for end in ends}
  return {} if d.kl is None else {'kl': d.kl, 'tv': d.tv}


def _reports(scored: Scored, there: Bool[Array, 'B T']) -> dict[str, Float[Array, '']]:
  """Alarms about the reported log-probs `there`."""
  reported, logp = ratios.raised(scored.rollout_logp), ratios.raised(scored.logp)
  impossible = there & ((reported > weights.ROUNDING) | (reported == -jnp.inf))
  log_ratio = logp - reported
  known = there & ~impossible & ~jnp.isnan(log_ratio)
  alarms = {}
  if scored.stored_logp is not None:
    gap = jnp.abs(ratios.raised(scored.stored_logp) - reported)
    alarms['report/contradicted'] = _mean(~(gap <= CONTRADICTION), there)
  return alarms | {
    'report/impossible': _mean(impossible, there),
    'report/ratio_mean': _mean(ratios.ratio(log_ratio, known), known),
    'report/correlation': batch.correlation(logp, log_ratio, known),
  }


def summarise(
  scored: Scored,
  keep: Bool[Array, 'B'] | Bool[Array, 'B T'],
  missing: Bool[Array, 'B T'],
  *,
  samples: int,
  fresh: int,
  trajectory: Int[Array, 'B'] | None = None,
) -> dict[str, Float[Array, '']]:
  """Scalars of one step from replicated arrays; float32, no gradient.

  The first `fresh` rows, of the first epoch, were not yet trained on when they were scored: the
  certificate is theirs (prequential), of the policy before each update against the rollout. Rows of
  one id in `trajectory` are one unit of the effective sample size.
  """
  d, valid = jax.tree.map(ratios.raised, scored.divergences), scored.valid
  reward = ratios.raised(scored.reward)
  lengths, exists = valid.sum(-1), valid.any(-1)
  apart = _measures(scored)
  finite = jnp.isfinite(d.log_ratio)
  for name, x in apart.items():
    finite = finite & jnp.isfinite(x) if name.startswith('kl') else finite
  token = valid & finite
  kept = jnp.broadcast_to(keep if keep.ndim == 2 else keep[:, None], valid.shape)
  kept_token, part = token & kept, masks.rows_kept(keep, valid)
  keep = keep if keep.ndim == 1 else (keep | ~valid).all(-1)  # cuts may lie beyond the end
  keep, rejected = keep & exists, ~keep & exists
  broken = scored.engine > 0
  judged = valid & kept & ~jnp.isnan(d.log_ratio)
  size = jnp.abs(d.log_ratio)
  scalars = {
    'reward': _mean(reward, exists),
    'reward/kept': _mean(reward, keep),
    'reward/rejected': _mean(reward, rejected),
    'acceptance': _mean(keep, exists),
    'acceptance/tokens': _mean(kept, valid),
    'acceptance/engine0': _mean(keep, exists & ~broken),
    'acceptance/engine1': _mean(keep, exists & broken),
    'length': _mean(lengths, exists),
    'entropy': _mean(d.entropy, token),
    'ratio/max': jnp.exp(jnp.where(kept_token, d.log_ratio, -jnp.inf).max()),
    'ratio/capped': _mean(size > ratios.LOG_RATIO_CAP, judged),
    'log_ratio/largest': jnp.where(
      judged.any(), extremes.largest(size, None, where=judged), jnp.nan
    ),
    'ess': ratios.effective_sample_size(d.log_ratio, kept_token, part, trajectory),
    'missing_tokens': (missing & valid).sum(),
    **_reports(scored, valid & ~missing),
    'nonfinite_rows': (valid & ~finite).any(-1).sum(),
  }
  if scored.bounds is not None:
    for name in ('upper', 'lower'):
      scalars[f'acceptance/{name}'] = _mean(getattr(scored.bounds, name), exists)
  for name, x in apart.items():
    median, p90 = distributions.quantiles(x, token, jnp.array([0.5, 0.9]))
    scalars |= {
      f'{name}/mean': _mean(x, token),
      f'{name}/median': median,
      f'{name}/p90': p90,
      f'{name}/max': jnp.where(token, x, 0).max(),
    }
    if name.startswith('kl'):
      scalars |= {
        f'{name}/engine0': _mean(x, token & ~broken[:, None]),
        f'{name}/engine1': _mean(x, token & broken[:, None]),
      }
  scalars |= by_length_quartile(keep, lengths) | by_position_quartile(kept, valid)
  scalars |= certificates.monitor(
    jnp.where(missing, jnp.nan, d.log_ratio)[:fresh],
    valid[:fresh],
    scored.reward[:fresh],
    samples=samples,
  )
  return jax.tree.map(lambda x: jax.lax.stop_gradient(x).astype(jnp.float32), scalars)


def ages(
  version: Int[Array, 'B T'], valid: Bool[Array, 'B T'], step: Int[Array, '']
) -> dict[str, Float[Array, '']]:
  """RL steps between the weights that drew the tokens, as engines report them, and `step`.

  A version that `step` has not reached yet, or below 0, cannot be: `age/impossible` is the share of
  tokens that report one, and their age counts nowhere else.
  """
  possible = valid & (version >= 0) & (version <= step)
  age = jnp.where(possible, step - version, 0).astype(jnp.float32)
  least = jnp.where(possible, age, jnp.inf).min()
  return {
    'age/mean': _mean(age, possible),
    'age/max': age.max(),
    'age/min': jnp.where(possible.any(), least, 0),
    'age/impossible': _mean((valid & ~possible).astype(jnp.float32), valid),
  }


def route_flips(
  rollout: Rollout, routes: Int[Array, 'B Lm1 N K'] | None
) -> Float[Array, ''] | None:
  """Share of (token, layer) pairs that the trainer sends to other experts than the engine did."""
  if routes is None:
    return None
  fed = router_statistics.fed_slots(rollout)
  return routing.flip_rate(routes, rollout.routes, fed).mean()
