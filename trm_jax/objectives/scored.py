"""A minibatch after the forward pass: all that a method may look at."""

import dataclasses
import typing
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax.types import Bracket, Divergences, InputError

# One advantage a row, or one a token.
Advantages = Float[Array, 'B'] | Float[Array, 'B T']

# Whose log-probs a ratio is taken against: what the engine reports (rollout), the trainer's own at
# the start of the batch (recomputed: ignores the mismatch), or the trainer's own under the weights
# the engine says it used (version).
Anchor = Literal['rollout', 'recomputed', 'version']


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
  """What a record of the likeliest tokens leaves open.

  Attributes:
    kl, tv: certified bounds per token.
    upper, lower: rows that are inside to their end, judged on either bound: surely inside, and not
      surely outside.
  """

  kl: Bracket
  tv: Bracket
  upper: Bool[Array, 'B']
  lower: Bool[Array, 'B']


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
  """A minibatch after the forward pass: all that a method may look at.

  Attributes:
    logp: policy log-prob of each sampled token; the only field that carries a gradient.
    rollout_logp: as reported by the engine, missing values resolved.
    recomputed_logp: trainer's numerics, weights at the start of the batch.
    version_logp: trainer's numerics, weights the engine says it used.
    divergences: statistics of (policy, rollout) that criteria read, detached.
    usable: rows whose log-probs allow a judgement at all.
    valid, reward, engine: as in `Rollout`.
    bounds: both bounds, where `divergences` holds one of them; else None.
    groups: id of the prompt of each row, any integers; None where groups are adjoining rows.
    trajectory: id of the trajectory that each row is a segment of, see `segments`; None where
      every row is one.
    key: of this evaluation, the same on all devices, for parts that draw; set by `loss.objective`.
    stored_logp: rollout's log-prob of each token by what was stored beside the report; only the
      alarm about reports looks at it. None where nothing was.
    axis_name: mesh axis whose devices hold the other rows of the batch, for parts that look at
      all of it; set by `loss.objective`.
  """

  logp: Float[Array, 'B T']
  rollout_logp: Float[Array, 'B T']
  recomputed_logp: Float[Array, 'B T']
  version_logp: Float[Array, 'B T']
  divergences: Divergences
  usable: Bool[Array, 'B']
  valid: Bool[Array, 'B T']
  reward: Float[Array, 'B']
  engine: Int[Array, 'B']
  bounds: Bounds | None = None
  groups: Int[Array, 'B'] | None = None
  trajectory: Int[Array, 'B'] | None = None
  key: Key[Array, ''] | None = None
  stored_logp: Float[Array, 'B T'] | None = None
  axis_name: str | tuple[str, ...] | None = dataclasses.field(
    default=None, metadata=dict(static=True)
  )

  def anchor_logp(self, anchor: Anchor) -> Float[Array, 'B T']:
    """The log-probs that a ratio is taken against; no gradient."""
    anchors = {
      'rollout': self.rollout_logp,
      'recomputed': self.recomputed_logp,
      'version': self.version_logp,
    }[anchor]
    return jax.lax.stop_gradient(anchors)

  def everywhere(self, x: Array) -> Array:
    """[B, ...] of this device -> [devices * B, ...] of the whole batch, on every device."""
    if self.axis_name is None:
      return x
    return jax.lax.all_gather(x, self.axis_name, axis=0, tiled=True)

  def here(self, x: Array) -> Array:
    """The inverse of `everywhere`: this device's rows of what speaks of the whole batch."""
    if self.axis_name is None:
      return x
    rows = self.valid.shape[0]
    at = jax.lax.axis_index(self.axis_name) * rows
    return jax.lax.dynamic_slice_in_dim(x, at, rows, axis=0)

  def mean(self, x: Float[Array, '*s'], where: Bool[Array, '*s']) -> Float[Array, '']:
    """Mean over the whole batch of the entries of `where`, float32; 0 where there is none."""
    total, count = jnp.where(where, x, 0).sum(), where.sum().astype(jnp.float32)
    if self.axis_name is not None:
      total, count = jax.lax.psum((total, count), self.axis_name)
    return total / jnp.where(count > 0, count, 1)

  def uniform(self) -> Float[Array, 'B T']:
    """A number in [0, 1) for each token, the same whatever the number of devices."""
    if self.key is None:
      raise InputError(
        'This part of the method draws random numbers, but scored.key is None: pass a key to'
        ' loss.objective, or set it in Scored.'
      )
    rows, slots = self.valid.shape
    devices = 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)
    return self.here(jax.random.uniform(self.key, (devices * rows, slots)))
