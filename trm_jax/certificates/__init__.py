"""Proofs of improvement or harm from samples alone.

Exported here: certificates by importance sampling (`importance`). `surrogate`: from the surrogate
and a bound; `patching`: the policy a mask stands for; `confidence`: the tail bounds they rest on.
"""

from trm_jax.certificates.importance import (
  Certificate,
  by_prompt,
  conclude,
  harm,
  improvement,
  log_weight,
  monitor,
  over_steps,
  retrospective,
  retrospective_harm,
  unit_reward,
)

__all__ = [
  'Certificate',
  'by_prompt',
  'conclude',
  'harm',
  'improvement',
  'log_weight',
  'monitor',
  'over_steps',
  'retrospective',
  'retrospective_harm',
  'unit_reward',
]
