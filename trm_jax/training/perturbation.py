"""Adaptive layerwise perturbation: the policy in the ratio has learned noise in every layer.

    x_n <- x_n + sigma_n z,   z normal for each token, sigma_n learned with the policy

x_n is the input of layer n, in the trainer's pass over the rollout alone: engines, evaluation and
recomputed log-probs know no noise. The ratio is then perturbed policy / rollout, and so are the
divergences that masks judge. ALP, arXiv 2603.19470; its scales begin at 1e-6 to 1e-4 and learn at
5e-4. Uncertain: what keeps a scale from vanishing is not known to us; nothing does here.

The scales live in the parameters under `SIGMA`, so that checkpoints, optimizer and gradients have
them; without the setting there is no such leaf and the pass is the plain one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from trm_jax import policy
from trm_jax.rollouts import streams
from trm_jax.types import Rollout

SIGMA = 'perturbation'


def added(params: policy.Params, layers: int, scale: float) -> policy.Params:
  """The parameters with one scale for each layer; unchanged for a scale of 0."""
  return params | {SIGMA: jnp.full(layers, scale, jnp.float32)} if scale else params


def removed(params: policy.Params) -> policy.Params:
  """The policy alone, as `checkpoints.save` takes it."""
  return {name: leaf for name, leaf in params.items() if name != SIGMA}


def optimizer(
  plain: optax.GradientTransformation, learning_rate: float
) -> optax.GradientTransformation:
  """`plain` for the policy, Adam of another rate for the scales."""

  def labels(params):
    named = lambda name: 'scales' if name == SIGMA else 'policy'
    return {n: jax.tree.map(lambda _, n=n: named(n), leaf) for n, leaf in params.items()}

  return optax.partition({'policy': plain, 'scales': optax.adam(learning_rate)}, labels)


def keys(key: Key[Array, ''], rollout: Rollout, samples: int) -> Key[Array, 'B Lm1']:
  """Noise keys of every slot that a pass over the rollout feeds, by row and slot alone."""
  rows, length = rollout.prompts.shape[0], rollout.prompts.shape[1] + rollout.tokens.shape[1] - 1
  _, of_rows = streams.row_keys(key, rows // samples, samples)
  return streams.noise_keys(of_rows.reshape(-1), 0, length)


def perturbed(hooks: policy.Hooks, params: policy.Params) -> policy.Hooks:
  """`hooks` with the noise of `params`; the gradient reaches the scales."""
  sigma = params[SIGMA]

  def hidden(x: Float[Array, 'B T D'], layer, noise_keys):
    draw = lambda key: jax.random.normal(jax.random.fold_in(key, layer), x.shape[-1:])
    noise = streams.each(draw, noise_keys)
    return x + (sigma[layer] * noise).astype(x.dtype)

  return dataclasses.replace(hooks, hidden=hidden)
