"""Where a rollout engine may differ from the trainer: the hooks of `policy` and `sampling`.

A hook that is None is not traced at all. Keys are one a token, [B, T], each used by one stream.
"""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array

Hook = Callable[..., Array] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
  """What a rollout engine does differently. None costs nothing: the hook is not traced.

  Attributes:
    activation: applied to the input of every matmul of a layer.
    kv: applied to keys and values as they enter the cache.
    bind: (hooks, layer, noise keys, real [B,T]) -> the hooks of this layer, for what needs those;
      `real` are the slots that are not left padding.
    hidden: (input of a layer [B,T,D], layer, noise keys) -> disturbed input.
    router: (router scores [B,T,E], layer, noise keys) -> disturbed scores.
    routes: (router probabilities [B,T,E], top-k experts [B,T,K], layer, noise keys) -> experts.
    gates: (weights [B,T,K], experts [B,T,K], probabilities, layer, noise keys) -> weights.
    logits: (scores [B,T,V], noise keys) -> the engine's own scores.
    decode: the engine's own scores -> the scores tokens are drawn from.
    reported: (own scores, scores drawn from) -> the scores that reported log-probs are read from.
  """

  activation: Hook = None
  kv: Hook = None
  bind: Callable[..., 'Hooks'] | None = None
  hidden: Hook = None
  router: Hook = None
  routes: Hook = None
  gates: Hook = None
  logits: Hook = None
  decode: Hook = None
  reported: Hook = None

  @property
  def keyed(self) -> bool:
    """Whether the forward pass needs noise keys."""
    keyed = (self.bind, self.hidden, self.router, self.routes, self.gates)
    return any(hook is not None for hook in keyed)
