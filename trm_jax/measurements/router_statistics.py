"""What the routers of both sides did: flips by layer, tokens touched, margins, load.

    flips = router_statistics.flips(rollout.routes, aux.routes, fed_slots(rollout))

`aux` is what `scoring.score` returns for the trainer's own pass. arXiv 2510.11370 reports about
10 % of routers and 94 % of tokens with a flip somewhere, for 48 layers.
"""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.measurements import distributions
from trm_jax.mismatch import routing
from trm_jax.types import InputError, Rollout


class Flips(typing.NamedTuple):
  """Shares in [0, 1] of the tokens that both sides routed.

  Attributes:
    by_layer: tokens whose set of experts differs, per layer.
    replaced: experts of a token that the other side did not use, per layer.
    any_layer: tokens with a flip in at least one layer.
    layers: how many layers of a token flip, on average (not a share).
  """

  by_layer: Float[Array, 'N']
  replaced: Float[Array, 'N']
  any_layer: Float[Array, '']
  layers: Float[Array, '']


def fed_slots(rollout: Rollout) -> Bool[Array, 'B L']:
  """Slots whose forward pass is part of the rollout: prompt and response, tool text included, up
  to its last token, which nothing is drawn after."""
  width, length = rollout.prompts.shape[1], rollout.tokens.shape[1]
  context = rollout.context
  prompt = jnp.arange(width)[None] >= rollout.start[:, None]
  there = jnp.concatenate([prompt, context[:, :-1]], 1)
  last = jnp.where(context, jnp.arange(1, length + 1)[None], 0).max(-1, keepdims=True)
  return there & (jnp.arange(width + length - 1)[None] < width - 1 + last)


def flips(
  routes: Int[Array, 'B L N K'], other: Int[Array, 'B L N K'], fed: Bool[Array, 'B L']
) -> Flips:
  """How often the two sides' experts differ; sets are compared, so their order does not matter."""
  differs = (jnp.sort(routes, -1) != jnp.sort(other, -1)).any(-1) & fed[..., None]
  absent = ~(routes[..., :, None] == other[..., None, :]).any(-1) & fed[..., None, None]
  tokens = jnp.maximum(fed.sum(), 1)
  return Flips(
    by_layer=routing.flip_rate(routes, other, fed),
    replaced=absent.sum((0, 1, 3)) / (tokens * routes.shape[-1]),
    any_layer=differs.any(-1).sum() / tokens,
    layers=differs.sum() / tokens,
  )


def margins(
  router_logits: Float[Array, 'B L N E'],
  fed: Bool[Array, 'B L'],
  *,
  experts_per_token: int,
  thresholds: tuple[float, ...] = (0.01, 0.1, 1.0),
) -> distributions.Distribution:
  """Score of the last chosen expert minus that of the runner-up, per layer, in logit units, >= 0.

  Uniform noise of size eta on every score flips nothing where the margin is 2 eta or more. Layers
  are the leading axis; 1 - `exceed` is the share of near-ties. Raises InputError where all experts
  are chosen: then there is no runner-up.
  """
  if not 1 <= experts_per_token < router_logits.shape[-1]:
    raise InputError(
      f'experts_per_token={experts_per_token} must lie in 1..{router_logits.shape[-1] - 1}: of'
      f' {router_logits.shape[-1]} experts one must be left over.'
    )
  ranked = jax.lax.top_k(jax.lax.stop_gradient(router_logits), experts_per_token + 1)[0]
  gap = jnp.moveaxis(ranked[..., -2] - ranked[..., -1], 2, 0)
  return jax.lax.map(lambda x: distributions.distribution(x, fed, thresholds=thresholds), gap)


def load(
  routes: Int[Array, 'B L N K'], fed: Bool[Array, 'B L'], experts: int
) -> Float[Array, 'N E']:
  """Share of the routed tokens' places that each expert takes, per layer; rows sum to 1."""
  chosen = routes[..., None] == jnp.arange(experts)[None, None, None, None]
  hits = (chosen & fed[..., None, None, None]).sum((0, 1, 3))
  return hits / jnp.maximum(hits.sum(-1, keepdims=True), 1)
