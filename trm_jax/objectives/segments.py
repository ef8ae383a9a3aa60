"""Rows that are segments of one trajectory: laid side by side, so that a method sees one long row.

A turn of an agent, or a part of a long response, may be a row of its own. Rows of one id belong
together, in their order in the batch, all on one device. The first of them then stands for the
trajectory: it holds the tokens of all, its reward and its group are the trajectory's, and the other
rows are empty. Weights, masks, statistics and denominators of a method follow without knowing.

Arrays become [B, B T]: B times the memory of a number per token, and never of scores.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from trm_jax.objectives.scored import Scored
from trm_jax.types import InputError


def first_rows(trajectory: Int[Array, 'B']) -> Int[Array, 'B']:
  """For each row, the first row of the same id."""
  return (trajectory[:, None] == trajectory[None, :]).argmax(-1)


def _mine(trajectory):
  """[first row, row]: whether the row belongs to the trajectory that stands there."""
  return first_rows(trajectory)[None, :] == jnp.arange(trajectory.shape[0])[:, None]


def together(x: Array, trajectory: Int[Array, 'B']) -> Array:
  """[B, T] -> [B, B T]: in each row all rows' numbers; `valid_together` says which are its own."""
  rows, slots = x.shape
  return jnp.broadcast_to(x[None], (trajectory.shape[0], rows, slots)).reshape(-1, rows * slots)


def valid_together(valid: Bool[Array, 'B T'], trajectory: Int[Array, 'B']) -> Bool[Array, 'B BT']:
  """The tokens of each trajectory, in its first row; no token in the other rows."""
  return (_mine(trajectory)[:, :, None] & valid[None]).reshape(valid.shape[0], -1)


def joined(scored: Scored) -> Scored:
  """One row for each trajectory, in the place of its first row. A trajectory is usable if all its
  rows are. Raises InputError without `groups`: rows that adjoin are no samples of a prompt here.
  """
  if scored.groups is None:
    raise InputError(
      'scored.trajectory is given without scored.groups: rows of a trajectory adjoin too, so say'
      ' which prompt each row belongs to.'
    )
  trajectory = scored.trajectory
  spread = lambda x: together(x, trajectory)
  mine = _mine(trajectory)
  usable = jnp.where(mine, scored.usable[None, :], True).all(-1) & mine.any(-1)
  logs = {n: spread(getattr(scored, n)) for n in ('logp', 'rollout_logp', 'recomputed_logp')}
  return dataclasses.replace(
    scored,
    **logs,
    version_logp=spread(scored.version_logp),
    divergences=jax.tree.map(spread, scored.divergences),
    usable=usable,
    valid=valid_together(scored.valid, trajectory),
    bounds=None,
    trajectory=None,
  )


def apart(x: Array, trajectory: Int[Array, 'B']) -> Array:
  """What was found for trajectories, given to their rows: [B] -> [B], or [B, B T] -> [B, T]."""
  rows, first = trajectory.shape[0], first_rows(trajectory)
  if x.ndim == 1:
    return x[first]
  return x.reshape(rows, rows, -1)[first, jnp.arange(rows)]
