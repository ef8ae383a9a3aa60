"""Two next-token distributions -> numbers per token, exact over the vocabulary where possible.

Exported here: everything from logits (`full_logits`, `alpha_divergences`) and from the ratio of the
sampled token (`ratios`). `linear_head` does the same from hidden states and output heads, without
[B, T, V]; `brackets` from the likeliest tokens an engine stored. `passes`, private, reads the
vocabulary.
"""

from trm_jax.divergences.alpha_divergences import jensen_shannon, renyi
from trm_jax.divergences.full_logits import (
  check_logits,
  entropy,
  kl,
  logp,
  statistics,
  total_variation,
)
from trm_jax.divergences.ratios import (
  LOG_RATIO_CAP,
  k1,
  k2,
  k3,
  ratio,
)

__all__ = [
  'LOG_RATIO_CAP',
  'check_logits',
  'entropy',
  'jensen_shannon',
  'k1',
  'k2',
  'k3',
  'kl',
  'logp',
  'ratio',
  'renyi',
  'statistics',
  'total_variation',
]
