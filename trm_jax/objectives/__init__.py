"""What the gradient is made of: a `Method` is a value that composes functions.

`advantages`, `weights` and `surrogates` hold the functions, `scored` what they may look at,
`method` the value, `loss` its evaluation, `catalogue` the published methods by name. A new method
is a function and a row of one of the `published_` tables.
"""

from trm_jax.objectives.catalogue import METHODS, methods
from trm_jax.objectives.loss import bounded, keep, objective, penalty, per_token
from trm_jax.objectives.method import Follow, Method
from trm_jax.objectives.named import Named
from trm_jax.objectives.scored import Bounds, Scored

__all__ = [
  'METHODS',
  'Bounds',
  'Follow',
  'Method',
  'Named',
  'Scored',
  'bounded',
  'keep',
  'methods',
  'objective',
  'penalty',
  'per_token',
]
