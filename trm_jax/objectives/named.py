"""A row of the catalogue of methods."""

import dataclasses
from collections.abc import Callable

from trm_jax.objectives.method import Method

VERL = 'verl rollout_correction'


@dataclasses.dataclass(frozen=True)
class Named:
  """A row of the catalogue.

  Attributes:
    make: () -> the method, with its authors' defaults.
    formula: in one line, r = policy / anchor, w = anchor / rollout per token.
    acts_on: token, sequence or prefix.
    source: the paper.
    default: the authors' settings where the formula does not show them.
  """

  make: Callable[[], Method]
  formula: str
  acts_on: str
  source: str
  default: str = ''
