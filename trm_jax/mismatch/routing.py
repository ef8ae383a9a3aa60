"""Routing: router scores jitter, and near-ties send a token to another expert.

    scores' = scores + strength * jitter * bernoulli(rate) * normal

Each token and layer draws from its own key, so the same noise can be replayed in a full pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """Jitter on the router's scores; 0 is off."""

  # Standard deviation of the noise added to each expert's score (logit units).
  jitter: float = 0.0
  # Share of (token, layer) pairs that are disturbed at all: 1 = constant noise, .05 = glitches.
  rate: float = 1.0

  def __post_init__(self):
    if not self.jitter >= 0:
      raise InputError(f'routing.jitter={self.jitter} must be >= 0.')
    if not 0 < self.rate <= 1:
      raise InputError(f'routing.rate={self.rate} must lie in (0, 1]; for no noise set jitter=0.')


def hook(routing: Routing, strength=1.0):
  """The router hook of `policy.Hooks`, or None when off. `strength` may be traced."""
  if routing.jitter == 0:
    return None

  def noise(key, layer, experts):
    draw, gate = jax.random.split(jax.random.fold_in(key, layer))
    hit = jax.random.bernoulli(gate, routing.rate)
    return jnp.where(hit, jax.random.normal(draw, (experts,)), 0)

  def disturb(scores, layer, noise_keys):
    draw = jax.vmap(jax.vmap(lambda k: noise(k, layer, scores.shape[-1])))
    return scores + strength * routing.jitter * draw(noise_keys)

  return disturb


def flip_rate(
  routes: Int[Array, 'B L N K'], other: Int[Array, 'B L N K'], valid: Bool[Array, 'B L']
) -> Float[Array, 'N']:
  """Share of valid tokens whose set of experts differs, per layer, in [0, 1]; no gradient."""
  differs = (jnp.sort(routes, -1) != jnp.sort(other, -1)).any(-1)
  hits = jnp.where(valid[..., None], differs, False)
  return hits.sum((0, 1)) / jnp.maximum(valid.sum(), 1)
