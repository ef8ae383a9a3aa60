"""What a batch, a run or a dump shows of its mismatch.

Exported here: distributions, tails and groups (`distributions`), all of a batch at once (`batch`).
`metrics`: the scalars of a training step; `metric_names`: the same under other systems' names;
`router_statistics`: routers; `attribution`: which source does the harm.
"""

from trm_jax.measurements.batch import (
  ENTROPY,
  KL_LIMITS,
  LOG_RATIO_LIMITS,
  ROBUST,
  Sequences,
  ShiftTable,
  confidence_table,
  correlation,
  log_odds_shift,
  measure,
  plain,
  sequences,
)
from trm_jax.measurements.distributions import (
  QUANTILES,
  Distribution,
  Tail,
  bins,
  by_group,
  distribution,
  length_bins,
  position_bins,
  quantiles,
  sign_bins,
  tail,
)

__all__ = [
  'ENTROPY',
  'KL_LIMITS',
  'LOG_RATIO_LIMITS',
  'QUANTILES',
  'ROBUST',
  'Distribution',
  'Sequences',
  'ShiftTable',
  'Tail',
  'bins',
  'by_group',
  'confidence_table',
  'correlation',
  'distribution',
  'length_bins',
  'log_odds_shift',
  'measure',
  'plain',
  'position_bins',
  'quantiles',
  'sequences',
  'sign_bins',
  'tail',
]
