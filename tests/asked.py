"""Options of a rollout by name, sorted into what to draw, what to keep and the rest."""

import dataclasses

from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record


def asked(**options):
  """(request, record, the options that belong to neither)."""
  taken = []
  for kind in (Request, Record):
    names = {field.name for field in dataclasses.fields(kind)}
    taken.append(kind(**{k: v for k, v in options.items() if k in names}))
    options = {k: v for k, v in options.items() if k not in names}
  return *taken, options
