"""What a training step reports: scalars from the per-token statistics of a whole batch.

Rows of all updates are pooled. Divergences are those of *all* rows, rejected ones included: what
the mask hides must stay visible. Ratio and effective sample size speak of the kept rows. Values
that are not finite are counted (`nonfinite_rows`), not averaged.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import certificate, importance
from trm_jax.method import Scored
from trm_jax.types import Rollout


def _mean(x, where):
  """Mean over `where`; NaN where there is nothing to average."""
  return jnp.where(where, x, 0).sum() / jnp.where(where.any(), where.sum(), jnp.nan)


def _quantile(x, where, q):
  """Linear quantiles of x over `where`; NaN for none."""
  return jnp.nanquantile(jnp.where(where, x, jnp.nan), q)


def by_length_quartile(
  keep: Bool[Array, 'B'], lengths: Int[Array, 'B']
) -> dict[str, Float[Array, '']]:
  """Share of rows kept in each quartile of response length; NaN for an empty quartile."""
  edges = jnp.quantile(lengths.astype(jnp.float32), jnp.array([0.25, 0.5, 0.75]))
  quartile = (lengths[:, None] > edges[None]).sum(-1)
  return {f'acceptance/length_q{i + 1}': _mean(keep, quartile == i) for i in range(4)}


def summarise(
  scored: Scored, keep: Bool[Array, 'B'], missing: Bool[Array, 'B T'], *, samples: int, fresh: int
) -> dict[str, Float[Array, '']]:
  """Scalars of one step from replicated arrays; float32, no gradient.

  The first `fresh` rows, of the first epoch, were not yet trained on when they were scored: the
  certificate is theirs (prequential), of the policy before each update against the rollout.
  """
  d, valid = scored.divergences, scored.valid
  lengths = valid.sum(-1)
  finite = jnp.isfinite(d.kl) & jnp.isfinite(d.log_ratio)
  token = valid & finite
  kept_token = token & keep[:, None]
  broken = scored.engine > 0
  found = {
    'reward': scored.reward.mean(),
    'reward/kept': _mean(scored.reward, keep),
    'reward/rejected': _mean(scored.reward, ~keep),
    'acceptance': keep.mean(),
    'acceptance/engine0': _mean(keep, ~broken),
    'acceptance/engine1': _mean(keep, broken),
    'length': lengths.mean(),
    'entropy': _mean(d.entropy, token),
    'ratio/max': jnp.exp(jnp.where(kept_token, d.log_ratio, -jnp.inf).max()),
    'ess': importance.effective_sample_size(d.log_ratio, kept_token, keep),
    'kl/engine0': _mean(d.kl, token & ~broken[:, None]),
    'kl/engine1': _mean(d.kl, token & broken[:, None]),
    'missing_tokens': (missing & valid).sum(),
    'nonfinite_rows': (valid & ~finite).any(-1).sum(),
  }
  for name in ('kl', 'tv'):
    x = getattr(d, name)
    median, p90 = _quantile(x, token, jnp.array([0.5, 0.9]))
    found |= {
      f'{name}/mean': _mean(x, token),
      f'{name}/median': median,
      f'{name}/p90': p90,
      f'{name}/max': jnp.where(token, x, 0).max(),
    }
  found |= by_length_quartile(keep, lengths)
  found |= certificate.monitor(
    jnp.where(missing, jnp.nan, d.log_ratio)[:fresh],
    valid[:fresh],
    scored.reward[:fresh],
    samples=samples,
  )
  return jax.tree.map(lambda x: jax.lax.stop_gradient(x).astype(jnp.float32), found)


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
