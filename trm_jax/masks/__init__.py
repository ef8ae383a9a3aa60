"""The trust region: criteria on divergences -> which rows, or tokens of rows, are kept.

Exported here: `criteria` (values; a new one is a function and a row of its table), the
`row_statistics` they compare, `prefixes`, and random `controls`. `calibration` sets limits that
accept a wanted share at every length.
"""

from trm_jax.masks.bands import (
  carm,
  geometric_band,
  mean_k2,
  mean_ratio_error,
  sum_band,
  sum_k2,
  token_veto,
)
from trm_jax.masks.calibration import follow
from trm_jax.masks.controls import permuted, permuted_prefixes
from trm_jax.masks.criteria import (
  CRITERIA,
  AllOf,
  Criterion,
  all_of,
  chi2_budget,
  combined,
  keep_all,
  length_neutral,
  max_k2,
  max_kl,
  max_tv,
  mean_deviation,
  mean_k3,
  mean_kl,
  within,
)
from trm_jax.masks.prefixes import prefix, rows_kept
from trm_jax.masks.row_statistics import (
  chi2_of,
  deviation,
  future_deviation,
  max_over_tokens,
  mean_over_tokens,
  sum_over_tokens,
)

__all__ = [
  'CRITERIA',
  'AllOf',
  'Criterion',
  'all_of',
  'carm',
  'chi2_budget',
  'chi2_of',
  'combined',
  'deviation',
  'follow',
  'future_deviation',
  'geometric_band',
  'keep_all',
  'length_neutral',
  'max_k2',
  'max_kl',
  'max_over_tokens',
  'max_tv',
  'mean_deviation',
  'mean_k2',
  'mean_k3',
  'mean_kl',
  'mean_over_tokens',
  'mean_ratio_error',
  'permuted',
  'permuted_prefixes',
  'prefix',
  'rows_kept',
  'sum_band',
  'sum_k2',
  'sum_over_tokens',
  'token_veto',
  'within',
]
