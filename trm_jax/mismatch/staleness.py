"""Staleness: the engine samples from weights of an earlier RL step.

Two ways to be old. `steps` = the weights of k RL steps (weight syncs) ago, which the engine
*reports*. `stuck` = a replica that missed every weight sync: it stays at step 0 and reports the
current one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from trm_jax import policy
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staleness:
  """Age of the engine's weights."""

  # RL steps (weight syncs) behind the trainer; 0 = fresh.
  steps: int = 0
  # A stuck replica: weights of RL step 0 for the whole run, reported as current.
  stuck: bool = False

  def __post_init__(self):
    if self.steps < 0:
      raise InputError(f'staleness.steps={self.steps} must be >= 0.')
    if self.steps and self.stuck:
      raise InputError(
        f'staleness.steps={self.steps} contradicts staleness.stuck: a stuck replica stays at step'
        ' 0; set one of them.'
      )


def start_history(params: policy.Params, steps: int) -> policy.Params | None:
  """The last `steps` parameter versions, newest first, all equal to `params` at the start."""
  if steps == 0:
    return None
  return jax.tree.map(lambda p: jnp.stack([p] * steps), params)


def push(history: policy.Params | None, params: policy.Params) -> policy.Params | None:
  """History with `params` as the newest version, the oldest dropped."""
  if history is None:
    return None
  return jax.tree.map(lambda h, p: jnp.concatenate([p[None], h[:-1]]), history, params)


def weights(
  staleness: Staleness,
  current: policy.Params,
  *,
  first: policy.Params | None,
  history: policy.Params | None,
  strength=1.0,
) -> policy.Params:
  """The engine's weights: current, `first` (RL step 0) if stuck, or those of `steps` ago.

  Where strength is 0 the engine is healthy. `history[k-1]` are the weights k versions ago. Raises
  InputError where the weights asked for were not given.
  """
  if staleness.stuck:
    if first is None:
      raise InputError('first=None, but a stuck engine needs the weights of RL step 0.')
    old = first
  elif staleness.steps:
    held = 0 if history is None else len(jax.tree.leaves(history)[0])
    if held < staleness.steps:
      raise InputError(
        f'history holds {held} versions, fewer than staleness.steps={staleness.steps}; start it'
        ' with start_history(params, steps).'
      )
    old = jax.tree.map(lambda h: h[staleness.steps - 1], history)
  else:
    return current
  return jax.tree.map(lambda o, c: jnp.where(strength > 0, o, c), old, current)


def reported_version(staleness: Staleness, version: Int[Array, ''], strength=1.0) -> Int[Array, '']:
  """The RL step the engine says its weights have; a stuck replica says the current one."""
  behind = jnp.where(strength > 0, staleness.steps, 0)
  return jnp.maximum(version - behind, 0).astype(jnp.int32)
