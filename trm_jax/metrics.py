"""What a training step reports: scalars from the per-token statistics of a whole batch.

Rows of all updates are pooled. Divergences are those of *all* rows, rejected ones included: what
the mask hides must stay visible. Ratio and effective sample size speak of the kept rows, or, under
a prefix mask, of the kept tokens. Values that are not finite are counted (`nonfinite_rows`), not
averaged.

`acceptance` is the share of rows that are kept whole, `acceptance/tokens` of valid tokens that are
kept, and `acceptance/position_q1` to `_q4` the same by quarters of each row, first to last.

`kl/*` and `tv/*` are exact. From a record of the likeliest tokens they are `kl/upper/*` and
`kl/lower/*` instead, with `acceptance/upper` and `acceptance/lower` judged on either; from sampled
log-probs alone there are none.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import certificate, importance, method
from trm_jax.method import Scored
from trm_jax.types import Rollout


def _mean(x, where):
  """Mean over `where`; NaN where there is nothing to average."""
  return jnp.where(where, x, 0).sum() / jnp.where(where.any(), where.sum(), jnp.nan)


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

  def bit(i, found):  # the largest number with at most `rank` numbers below it
    higher = found | (sign >> i.astype(jnp.uint32))
    below = (order.reshape(1, -1) < higher[:, None]).sum(-1)
    return jnp.where(below <= ranks, higher, found)

  found = jax.lax.fori_loop(0, 32, bit, jnp.zeros(ranks.shape, jnp.uint32))
  values = jax.lax.bitcast_convert_type(jnp.where(found >= sign, found ^ sign, ~found), jnp.float32)
  below, above = jnp.split(values, 2)
  weight = place - low
  mixed = jnp.where(weight > 0, below * (1 - weight) + above * weight, below)  # inf * 0 is NaN
  return jnp.where(where.any(), mixed, jnp.nan)


def by_length_quartile(
  keep: Bool[Array, 'B'], lengths: Int[Array, 'B']
) -> dict[str, Float[Array, '']]:
  """Share of rows kept in each quartile of response length; NaN for an empty quartile."""
  edges = jnp.quantile(lengths.astype(jnp.float32), jnp.array([0.25, 0.5, 0.75]))
  quartile = (lengths[:, None] > edges[None]).sum(-1)
  return {f'acceptance/length_q{i + 1}': _mean(keep, quartile == i) for i in range(4)}


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


def summarise(
  scored: Scored,
  keep: Bool[Array, 'B'] | Bool[Array, 'B T'],
  missing: Bool[Array, 'B T'],
  *,
  samples: int,
  fresh: int,
) -> dict[str, Float[Array, '']]:
  """Scalars of one step from replicated arrays; float32, no gradient.

  The first `fresh` rows, of the first epoch, were not yet trained on when they were scored: the
  certificate is theirs (prequential), of the policy before each update against the rollout.
  """
  d, valid = scored.divergences, scored.valid
  lengths = valid.sum(-1)
  apart = _measures(scored)
  finite = jnp.isfinite(d.log_ratio)
  for name, x in apart.items():
    finite = finite & jnp.isfinite(x) if name.startswith('kl') else finite
  token = valid & finite
  kept = jnp.broadcast_to(keep if keep.ndim == 2 else keep[:, None], valid.shape)
  kept_token, part = token & kept, method.rows_kept(keep, valid)
  keep = keep if keep.ndim == 1 else (keep | ~valid).all(-1)  # cuts may lie beyond the end
  broken = scored.engine > 0
  found = {
    'reward': scored.reward.mean(),
    'reward/kept': _mean(scored.reward, keep),
    'reward/rejected': _mean(scored.reward, ~keep),
    'acceptance': keep.mean(),
    'acceptance/tokens': _mean(kept, valid),
    'acceptance/engine0': _mean(keep, ~broken),
    'acceptance/engine1': _mean(keep, broken),
    'length': lengths.mean(),
    'entropy': _mean(d.entropy, token),
    'ratio/max': jnp.exp(jnp.where(kept_token, d.log_ratio, -jnp.inf).max()),
    'ess': importance.effective_sample_size(d.log_ratio, kept_token, part),
    'missing_tokens': (missing & valid).sum(),
    'nonfinite_rows': (valid & ~finite).any(-1).sum(),
  }
  if scored.bounds is not None:
    for name in ('upper', 'lower'):
      found[f'acceptance/{name}'] = getattr(scored.bounds, name).mean()
  for name, x in apart.items():
    median, p90 = quantiles(x, token, jnp.array([0.5, 0.9]))
    found |= {
      f'{name}/mean': _mean(x, token),
      f'{name}/median': median,
      f'{name}/p90': p90,
      f'{name}/max': jnp.where(token, x, 0).max(),
    }
    if name.startswith('kl'):
      found |= {
        f'{name}/engine0': _mean(x, token & ~broken[:, None]),
        f'{name}/engine1': _mean(x, token & broken[:, None]),
      }
  found |= by_length_quartile(keep, lengths) | by_position_quartile(kept, valid)
  found |= certificate.monitor(
    jnp.where(missing, jnp.nan, d.log_ratio)[:fresh],
    valid[:fresh],
    scored.reward[:fresh],
    samples=samples,
  )
  return jax.tree.map(lambda x: jax.lax.stop_gradient(x).astype(jnp.float32), found)


def ages(
  version: Int[Array, 'B T'], valid: Bool[Array, 'B T'], step: Int[Array, '']
) -> dict[str, Float[Array, '']]:
  """RL steps between the weights that drew the tokens, as engines report them, and `step`."""
  age = jnp.where(valid, step - version, 0).astype(jnp.float32)
  return {'age/mean': _mean(age, valid), 'age/max': age.max()}


def route_flips(
  rollout: Rollout, routes: Int[Array, 'B Lm1 N K'] | None
) -> Float[Array, ''] | None:
  """Share of (token, layer) pairs that the trainer sends to other experts than the engine did."""
  if routes is None:
    return None
  width, lengths = rollout.prompts.shape[1], rollout.valid.sum(-1)
  slots = jnp.arange(routes.shape[1])[None]
  fed = (slots >= rollout.start[:, None]) & (slots < width - 1 + lengths[:, None])
  differs = (jnp.sort(routes, -1) != jnp.sort(rollout.routes, -1)).any(-1)
  hits = jnp.where(fed[..., None], differs, False)
  return hits.sum() / jnp.maximum(fed.sum() * routes.shape[2], 1)
