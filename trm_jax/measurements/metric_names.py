"""The mismatch metrics that other systems log, under their names and in their arithmetic.

For comparing dashboards: a number here is what verl, TRL or tunix would have logged for the same
log-probs (versions of August 2026; one device, one micro-batch). Theirs become NaN with the first
missing log-prob; here such tokens are left out, of rows too, and half precision is raised first.
`measurements` has the same quantities by their own definitions, and exact ones beside them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.divergences import ratios
from trm_jax.divergences.ratios import LOG_RATIO_CAP
from trm_jax.measurements import batch


def _parts(policy_logp, rollout_logp, valid):
  """(policy, rollout, log-ratio, mask) without NaN and gradient; 0 outside the mask."""
  there = valid & ~jnp.isnan(rollout_logp) & ~jnp.isnan(policy_logp)
  clean = lambda x: jnp.where(there, jax.lax.stop_gradient(ratios.raised(x)), 0)
  policy, rollout = clean(policy_logp), clean(rollout_logp)
  return policy, rollout, policy - rollout, there


def _mean(x, where, axis=None):
  """verl's masked mean: its 1e-8 in the denominator makes an empty mean 0."""
  return jnp.where(where, x, 0).sum(axis) / (where.sum(axis) + 1e-8)


def _capped(x):
  return jnp.clip(x, -LOG_RATIO_CAP, LOG_RATIO_CAP)


def verl(
  policy_logp: Float[Array, 'B T'],
  rollout_logp: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  threshold: float = 2.0,
) -> dict[str, Float[Array, '']]:
  """verl: `rollout_corr/*` off-policy metrics, token weights, and `training/*` agreement.

  `kl` is the mean of -log_ratio (either sign), `k3_kl` is not clamped, chi2 are clamped at e^20,
  perplexities are means over rows, empty ones included; `rollout_is_mean`, `max` and `min` are of
  weights before truncation at `threshold`. Agreement: |p - q| of the sampled token.
  """
  policy, rollout, log_ratio, there = _parts(policy_logp, rollout_logp, valid)
  by_policy, by_rollout = _mean(policy, there, -1), _mean(rollout, there, -1)
  gap = by_rollout - by_policy
  weight = jnp.exp(_capped(log_ratio))
  total = _capped(jnp.where(there, log_ratio, 0).sum(-1))
  away = jnp.abs(jnp.exp(policy) - jnp.exp(rollout))
  corr = {
    'training_ppl': jnp.exp(-by_policy).mean(),
    'training_log_ppl': -by_policy.mean(),
    'rollout_ppl': jnp.exp(-by_rollout).mean(),
    'rollout_log_ppl': -by_rollout.mean(),
    'kl': _mean(-log_ratio, there),
    'k3_kl': _mean(ratios.k3(log_ratio), there),
    'log_ppl_diff': gap.mean(),
    'log_ppl_abs_diff': jnp.abs(gap).mean(),
    'log_ppl_diff_max': gap.max(),
    'log_ppl_diff_min': gap.min(),
    'ppl_ratio': jnp.exp(gap).mean(),
    'chi2_token': _mean(weight**2, there) - 1,
    'chi2_seq': jnp.exp(2 * total).mean() - 1,
    'rollout_is_mean': _mean(weight, there),
    'rollout_is_max': jnp.where(there, weight, -jnp.inf).max(),
    'rollout_is_min': jnp.where(there, weight, jnp.inf).min(),
    'rollout_is_ratio_fraction_high': _mean(weight > threshold, there),
    'rollout_is_ratio_fraction_low': _mean(weight < 1 / threshold, there),
  }
  middle = _mean(away, there)
  spread = jnp.where(there, jnp.square(away - middle), 0).sum() / jnp.maximum(there.sum() - 1, 1)
  agreement = {
    'rollout_probs_diff_max': jnp.where(there, away, 0).max(),
    'rollout_probs_diff_mean': middle,
    'rollout_probs_diff_std': jnp.sqrt(spread),
    'rollout_actor_probs_pearson_corr': batch.correlation(policy, log_ratio, there),
  }
  named = {f'rollout_corr/{name}': x for name, x in corr.items()}
  return named | {f'training/{name}': x for name, x in agreement.items()}


def trl(
  policy_logp: Float[Array, 'B T'],
  rollout_logp: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  clip_max: float = 3.0,
) -> dict[str, Float[Array, '']]:
  """TRL: `sampling/*`; ratios are of whole rows and 0 above `clip_max` (its `sequence_mask`)."""
  _, _, log_ratio, there = _parts(policy_logp, rollout_logp, valid)
  away = jnp.abs(log_ratio)
  ratio = jnp.exp(log_ratio.sum(-1))
  ratio = jnp.where(ratio > clip_max, 0, ratio)
  return {
    'sampling/sampling_logp_difference/mean': jnp.where(there, away, 0).sum()
    / jnp.maximum(there.sum(), 1),
    'sampling/sampling_logp_difference/max': jnp.where(there, away, 0).max(),
    'sampling/importance_sampling_ratio/min': ratio.min(),
    'sampling/importance_sampling_ratio/mean': ratio.mean(),
    'sampling/importance_sampling_ratio/max': ratio.max(),
  }


def tunix(
  policy_logp: Float[Array, 'B T'],
  rollout_logp: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  threshold: float = 2.0,
) -> dict[str, Float[Array, '']]:
  """tunix: `sampler_trainer/*` and, of token weights truncated at `threshold`, `sampler_is/*`."""
  policy, rollout, log_ratio, there = _parts(policy_logp, rollout_logp, valid)
  mean = lambda x: jnp.where(there, x, 0).sum() / jnp.maximum(there.sum(), 1)
  largest = lambda x: jnp.where(there, x, 0).max()
  logp, prob = jnp.abs(log_ratio), jnp.abs(jnp.exp(policy) - jnp.exp(rollout))
  ratio = jnp.exp(_capped(log_ratio))
  weight = jnp.minimum(ratio, threshold)
  # Its Pearson correlation has a floor below the product of the variances.
  p, q = jnp.exp(policy), jnp.exp(rollout)
  p, q = jnp.where(there, p - mean(p), 0), jnp.where(there, q - mean(q), 0)
  pearson = mean(p * q) / jnp.sqrt(jnp.maximum(mean(p * p) * mean(q * q), 1e-12))
  return {
    'sampler_trainer/logp_diff_mean': mean(logp),
    'sampler_trainer/logp_diff_max': largest(logp),
    'sampler_trainer/prob_diff_mean': mean(prob),
    'sampler_trainer/prob_diff_max': largest(prob),
    'sampler_trainer/probs_pearson_corr': pearson,
    'sampler_is/weight_mean': mean(weight),
    'sampler_is/weight_max': largest(weight),
    'sampler_is/weight_min': jnp.where(there, weight, jnp.inf).min(),
    'sampler_is/frac_clipped_at_threshold': mean(ratio > threshold),
  }
