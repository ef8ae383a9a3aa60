"""Staleness: the engine samples from weights of an earlier RL step.

Three ways to be old. `steps` = the weights of k RL steps (weight syncs) ago, which the engine
*reports*. `switch` = weights are synced during a response (partial rollouts, in-flight updates):
its first tokens are k versions old, the last ones may be fresh, each reported. `stuck` = a replica
that missed every weight sync: it stays at step 0 and reports the current one.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from trm_jax import policy
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staleness:
  """Age of the engine's weights."""

  # RL steps (weight syncs) behind the trainer; 0 = fresh.
  steps: int = 0
  # Weights are synced every so many tokens of a response: it starts with those of `steps` ago and
  # moves on by one version each time, up to fresh ones. Keys and values of earlier tokens stay as
  # the older weights made them. None = one version a response.
  switch: int | None = None
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
    if self.switch is not None and self.switch < 1:
      raise InputError(
        f'staleness.switch={self.switch} must be at least 1 token; leave it out for one version a'
        ' response.'
      )
    if self.switch is not None and not self.steps:
      raise InputError(
        f'staleness.switch={self.switch} needs staleness.steps >= 1: from fresh weights there is no'
        ' version to move on to.'
      )

  def ages(self, length: int) -> tuple[int, ...]:
    """Versions behind in the order in which they draw a response of so many tokens."""
    if self.switch is None:
      return (self.steps,)
    return tuple(range(self.steps, max(self.steps - -(-length // self.switch), -1), -1))


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


def reported_version(
  staleness: Staleness, version: Int[Array, ''], length: int, strength=1.0
) -> Int[Array, 'T']:
  """RL step of the weights that the engine says drew each token; a stuck replica: the current."""
  ages = np.asarray(staleness.ages(length), np.int32)
  turn = np.arange(length) // (staleness.switch or length)
  behind = jnp.where(strength > 0, ages[np.minimum(turn, len(ages) - 1)], 0)
  return jnp.maximum(version - behind, 0).astype(jnp.int32)


def of_version(
  fn: Callable[[policy.Params], Float[Array, 'B T']],
  reported: Int[Array, 'B T'],
  current: Float[Array, 'B T'],
  *,
  version: Int[Array, ''],
  history: policy.Params,
  ages: tuple[int, ...],
) -> Float[Array, 'B T']:
  """`fn` of the weights that drew each token, by its `reported` version; one call for each age.

  `current` is `fn` of the weights of now, `version`. `history` as in `weights`.
  """
  weights = current
  for age in ages:
    if age:
      old = fn(jax.tree.map(lambda h, a=age: h[a - 1], history))
      aged = (reported == jnp.maximum(version - age, 0)) & (reported != version)
      weights = jnp.where(aged, old, weights)
  return weights
