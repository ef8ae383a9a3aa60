"""Routing: the engine sends a token to other experts than the trainer does.

    scores' = scores + strength * jitter * bernoulli(rate) * noise     near-ties flip
    forced flips: with probability `flips` the last chosen expert gives way to the runner-up
    capacity:     an expert that more tokens choose than it takes drops the surplus at random

Each token and layer draws from its own key, so the same noise can be replayed in a full pass. The
mitigation is `replay`: the trainer computes with the experts that the rollout used (arXiv
2510.11370), and their weights too if those are given.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax import policy
from trm_jax.mismatch import precision
from trm_jax.rollouts.streams import each
from trm_jax.types import InputError

# Streams of one token's key; a layer takes the stream of its number beyond these.
_FLIP, _CAPACITY = 2_000_000, 3_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """What happens between the router's scores and the experts; the default is nothing."""

  # Size of the noise added to each expert's score (logit units): the standard deviation of normal
  # noise, the bound of uniform noise; 0 is off.
  jitter: float = 0.0
  # Uniform noise of size eta flips nothing where the top-k margin is 2 eta or more.
  noise: Literal['normal', 'uniform'] = 'normal'
  # Share of (token, layer) pairs that jitter disturbs: 1 = constant noise, .05 = glitches.
  rate: float = 1.0
  # Share of tokens whose last chosen expert is swapped for the runner-up: one number for all
  # layers or one for each, e.g. .1. Published for 30B-A3B: about 10 % of routers differ.
  flips: tuple[float, ...] = ()
  # Format of the router's scores, e.g. bfloat16; ties go to the expert of lower number.
  dtype: str | None = None
  # Tokens an expert takes, in units of its even share of the tokens at one position of the batch;
  # 1.25 is common in training, below 1 drops some always. Rows of a batch then affect each other.
  capacity: float | None = None

  def __post_init__(self):
    if not self.jitter >= 0:
      raise InputError(f'routing.jitter={self.jitter} must be >= 0.')
    if not 0 < self.rate <= 1:
      raise InputError(f'routing.rate={self.rate} must lie in (0, 1]; for no noise set jitter=0.')
    if self.noise not in ('normal', 'uniform'):
      raise InputError(f'routing.noise={self.noise!r} is not normal or uniform.')
    if not all(0 <= rate <= 1 for rate in self.flips):
      raise InputError(f'routing.flips={self.flips} must hold shares in [0, 1].')
    if self.dtype == 'int8':
      raise InputError("routing.dtype='int8' has no fixed grid; use a float format such as e4m3.")
    precision.check_format('routing.dtype', self.dtype)
    if self.capacity is not None and not self.capacity > 0:
      raise InputError(
        f'routing.capacity={self.capacity} must be > 0; leave it out to drop nothing.'
      )

  def check(self, config: policy.PolicyConfig) -> None:
    """Raises InputError where a policy of this shape has no such routing."""
    changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
    if not config.experts and changed:
      raise InputError(
        f'routing.{changed[0]}={getattr(self, changed[0])} needs experts, but policy.experts=0 is a'
        ' dense model; leave it out.'
      )
    if any(self.flips) and config.experts_per_token == config.experts:
      raise InputError(
        f'routing.flips={self.flips} has no expert to flip to: policy.experts_per_token'
        f'={config.experts} uses all of them; use fewer, or leave routing.flips out.'
      )
    if config.experts and len(self.flips) not in (0, 1, config.layers):
      raise InputError(
        f'routing.flips holds {len(self.flips)} shares, but policy.layers={config.layers}: give 1,'
        ' or one for each layer.'
      )


def router_hook(routing: Routing, strength=1.0):
  """The router hook of `policy.Hooks`, or None when off. `strength` may be traced."""
  if routing.jitter == 0 and routing.dtype is None:
    return None
  draws = {
    'normal': jax.random.normal,
    'uniform': lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1),
  }[routing.noise]

  def noise(key, layer, experts):
    draw, gate = jax.random.split(jax.random.fold_in(key, layer))
    hit = jax.random.bernoulli(gate, routing.rate)
    return jnp.where(hit, draws(draw, (experts,)), 0)

  def disturb(scores, layer, noise_keys):
    if routing.jitter:
      drawn = each(lambda k: noise(k, layer, scores.shape[-1]), noise_keys)
      scores = scores + strength * routing.jitter * drawn
    if routing.dtype is not None:
      scores = jnp.where(strength > 0, precision.round_to(scores, routing.dtype), scores)
    return scores

  return disturb


def routing_hooks(routing: Routing, strength=1.0) -> policy.Hooks:
  """All hooks of this source; jitter and the share of flips grow with strength (the share up to
  1), formats and drops act where it is > 0. It may be traced."""

  def flip(probabilities, routes, layer, noise_keys):
    _, ranked = jax.lax.top_k(probabilities, routes.shape[-1] + 1)
    swapped = jnp.concatenate([ranked[..., :-2], ranked[..., -1:]], -1)
    rates = jnp.asarray(routing.flips, jnp.float32)
    rate = jnp.clip(strength, 0, 1) * (rates[layer] if len(routing.flips) > 1 else rates[0])
    hit = each(
      lambda k: jax.random.bernoulli(jax.random.fold_in(k, _FLIP + layer), rate), noise_keys
    )
    return jnp.where(hit[..., None], swapped, routes)

  def drop(weights, routes, probabilities, layer, noise_keys, *, real):
    chosen = routes.shape[-1]
    experts = probabilities.shape[-1]
    one_hot = routes[..., None] == jnp.arange(experts)[None, None, None]
    # Share of the rows that have a token at this slot which chose each expert, [1, T, E].
    rows = jnp.maximum(real.sum(0, keepdims=True), 1)[..., None]
    load = (one_hot.any(-2) & real[..., None]).sum(0, keepdims=True) / rows
    share = routing.capacity * chosen / experts
    keep = jnp.minimum(1, share / jnp.maximum(load, share))
    keep = jnp.where(one_hot, keep[:, :, None], 0).sum(-1)
    draw = each(
      lambda k: jax.random.uniform(jax.random.fold_in(k, _CAPACITY + layer), (chosen,)), noise_keys
    )
    return jnp.where((strength > 0) & (draw >= keep), 0, weights)

  def bind(hooks, layer, noise_keys, real):
    return dataclasses.replace(hooks, gates=functools.partial(drop, real=real))

  return policy.Hooks(
    router=router_hook(routing, strength),
    routes=flip if any(routing.flips) else None,
    bind=bind if routing.capacity is not None else None,
  )


def replay(
  routes: Int[Array, 'B L N K'], weights: Float[Array, 'B L N K'] | None = None
) -> policy.Hooks:
  """Hooks by which the trainer's full pass (`scoring.score`) uses a rollout's experts.

  `routes` are the rollout's. Their weights are the trainer's own router probabilities, so the
  router still learns; with `weights` (`scoring.rescore(..)[1].gates` of the engine) the values are
  the engine's and only the gradient is the trainer's own; those not finite are the trainer's.
  Where the ids of a token are no K different experts, the trainer routes it by itself
  (`impossible_routes` counts them). Raises InputError for routes of another number of slots or
  experts than the pass has.
  """
  of = lambda x, layer: jax.lax.dynamic_index_in_dim(x, layer, 2, keepdims=False)

  def chosen(probabilities, own, layer, noise_keys):
    given = of(routes, layer)
    if given.shape != own.shape:
      raise InputError(
        f'routes {given.shape[1:]} must hold {own.shape[1:]}, slots and experts a token: those of a'
        ' rollout of the same prompts, responses and policy.'
      )
    return jnp.where(_possible(given, probabilities.shape[-1])[..., None], given, own)

  def weigh(own, used, probabilities, layer, noise_keys):
    still = jax.lax.stop_gradient(own)
    given = jax.lax.stop_gradient(of(weights, layer))
    replayed = _possible(of(routes, layer), probabilities.shape[-1])[..., None]
    # A NaN in padding would reach real tokens: attention weighs it with 0.
    return jnp.where(replayed & jnp.isfinite(given), given, still) + (own - still)

  return policy.Hooks(routes=chosen, gates=None if weights is None else weigh)


def _possible(routes: Int[Array, '*b K'], experts: int) -> Bool[Array, '*b']:
  """Whether ids are those of K different experts."""
  ranked = jnp.sort(routes, -1)
  inside = ((routes >= 0) & (routes < experts)).all(-1)
  return inside & (ranked[..., 1:] != ranked[..., :-1]).all(-1)


def impossible_routes(
  routes: Int[Array, 'B L N K'], fed: Bool[Array, 'B L'], *, experts: int
) -> Float[Array, '']:
  """Share of (token, layer) pairs in [0, 1] whose ids are no K different experts of `experts`."""
  wrong = ~_possible(routes, experts) & fed[..., None]
  return wrong.sum() / jnp.maximum(fed.sum() * routes.shape[2], 1)


def flip_rate(
  routes: Int[Array, 'B L N K'], other: Int[Array, 'B L N K'], valid: Bool[Array, 'B L']
) -> Float[Array, 'N']:
  """Share of valid tokens whose set of experts differs, per layer, in [0, 1]; no gradient."""
  differs = (jnp.sort(routes, -1) != jnp.sort(other, -1)).any(-1)
  hits = jnp.where(valid[..., None], differs, False)
  return hits.sum((0, 1)) / jnp.maximum(valid.sum(), 1)
