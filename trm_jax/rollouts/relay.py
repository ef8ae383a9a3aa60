"""A relay of weights: an engine whose parameters change while a response is being generated.

Its forward passes share one KV cache, so keys and values of earlier tokens stay as the weights of
their time made them. That is what engines with in-flight weight updates do.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from trm_jax import policy
from trm_jax.policy.attention import Attention, plain


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relay:
  """Versions of the weights in the order of their turns; the last one stays to the end.

  Attributes:
    versions: parameters with a leading axis; the first reads the prompt.
    every: tokens that a version draws.
  """

  versions: policy.Params
  every: int = dataclasses.field(metadata={'static': True})

  def at(self, t: int | Int[Array, '']) -> policy.Params:
    """The weights that draw the token of response slot t, which may be traced."""
    count = len(jax.tree.leaves(self.versions)[0])
    turn = jnp.minimum(t // self.every, count - 1)
    pick = lambda x: jax.lax.dynamic_index_in_dim(x, turn, 0, keepdims=False)
    return jax.tree.map(pick, self.versions)

  def turns(self, length: int) -> list[tuple[policy.Params, int, int]]:
    """(weights, first, end) of each run of response slots that one version draws."""
    count = len(jax.tree.leaves(self.versions)[0])
    starts = [t for t in range(0, count * self.every, self.every) if t < length]
    ends = [*starts[1:], length]
    return [(self.at(first), first, end) for first, end in zip(starts, ends, strict=True)]


Weights = policy.Params | Relay


def at(weights: Weights, t: int | Int[Array, '']) -> policy.Params:
  """The parameters that draw the token of response slot t."""
  return weights.at(t) if isinstance(weights, Relay) else weights


def vocabulary(weights: Weights) -> int:
  """How many tokens the policy knows."""
  params = weights.versions if isinstance(weights, Relay) else weights
  return params['embed'].shape[-2]


def apply(
  relay: Relay,
  config: policy.PolicyConfig,
  tokens: Int[Array, 'B L'],
  *,
  width: int,
  start: Int[Array, 'B'],
  noise_keys: Key[Array, 'B L'] | None = None,
  attention: Attention = plain,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
) -> tuple[Float[Array, 'B L D'], policy.Aux]:
  """`policy.apply` teacher-forced, the first `width` slots being the prompt: one pass a version.

  Each reads the cache that those before it left.
  """
  length = tokens.shape[1] - width + 1
  cache = policy.init_cache(config, tokens.shape[0], tokens.shape[1])
  outputs = []
  for params, first, end in relay.turns(length):
    # A token is scored by the pass over the slot before it; the first version reads the prompt.
    slots = slice(width - 1 + first if first else 0, width - 1 + end)
    hidden, cache, aux = policy.apply(
      params,
      config,
      tokens[:, slots],
      start=start,
      slot=slots.start,
      cache=cache,
      noise_keys=None if noise_keys is None else noise_keys[:, slots],
      attention=attention,
      hooks=hooks,
    )
    outputs.append((hidden, aux))
  return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *outputs)


def logits(weights: Weights, hidden: Float[Array, 'B T D']) -> Float[Array, 'B T V']:
  """`policy.logits` of all response slots, each under the weights of its turn."""
  if not isinstance(weights, Relay):
    return policy.logits(weights, hidden)
  parts = [policy.logits(p, hidden[:, a:b]) for p, a, b in weights.turns(hidden.shape[1])]
  return jnp.concatenate(parts, 1)
