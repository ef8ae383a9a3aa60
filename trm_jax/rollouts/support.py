"""The trainer's tool against filters of an engine: its policy over the tokens they let pass."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def replay_support(
  policy_logits: Float[Array, '*b V'], rollout_logits: Float[Array, '*b V']
) -> Float[Array, '*b V']:
  """The trainer's scores on the tokens the engine could have drawn, -inf elsewhere.

  Softmax of the result is the policy conditioned on the engine's support, so log-ratios compare
  like with like. Gradients flow to the kept `policy_logits`.
  """
  return jnp.where(rollout_logits > -jnp.inf, policy_logits, -jnp.inf)
