"""Reduction order: the same sums, added up in another order.

Float addition is not associative, so kernels that split or reorder a sum (split-K matmuls, flash
decoding, another number of devices) give other last bits. Nothing is approximated here: in exact
arithmetic the engine is the trainer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.policy.attention import Attention, blockwise
from trm_jax.types import InputError

# Which axis of a layer's matrix runs over the residual stream and which over the inner width.
_RESIDUAL = {'q': -2, 'k': -2, 'v': -2, 'o': -1, 'router': -2, 'gate': -2, 'up': -2, 'down': -1}
_INNER = {'gate': -1, 'up': -1, 'down': -2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
  """Order of the engine's sums; the default is the trainer's."""

  # Add up matmuls and norms in another order: residual stream and inner widths are permuted.
  permute: bool = False
  # Split attention over blocks of so many keys, each with a softmax denominator of its own.
  attention_block: int | None = None

  def __post_init__(self):
    if self.attention_block is not None and self.attention_block < 1:
      raise InputError(
        f'reduction.attention_block={self.attention_block} must be at least 1; leave it out for the'
        " trainer's own attention."
      )


def _take(leaf, order, axis):
  """leaf[..., order, ...], laid out over the mesh as before."""
  if not sharding.active():
    return jnp.take(leaf, order, axis)
  layout = jax.typeof(leaf).sharding.spec
  return jax.reshard(jnp.take(sharding.reshard(leaf), order, axis), layout)


def permute(
  params: policy.Params, reduction: Reduction, config: policy.PolicyConfig, strength=1.0
) -> policy.Params:
  """Parameters of the same function, its hidden widths permuted where strength > 0.

  Residual stream, inner MLP width and the width of the values are each permuted once and for all,
  so that every matmul, norm and output score adds the same terms in another order.
  """
  if not reduction.permute:
    return params
  draw = np.random.default_rng(0)
  stream, inner = draw.permutation(config.width), draw.permutation(config.mlp_width)
  value = draw.permutation(config.head_width)
  columns = lambda heads: (np.arange(heads)[:, None] * config.head_width + value[None]).ravel()

  def one(path, leaf):
    names = [entry.key for entry in path]
    orders = []
    if names[0] != 'layers' or names[-1] in ('attention_scale', 'mlp_scale'):
      orders = [(stream, -1)]  # embedding, head and the scales of the stream
    else:
      name = next((n for n in names if n in _RESIDUAL), None)
      if name is not None:
        orders = [(stream, _RESIDUAL[name])]
      if name in _INNER:
        orders.append((inner, _INNER[name]))
      if name == 'v':
        orders.append((columns(config.kv_heads), -1))
      if name == 'o':
        orders.append((columns(config.heads), -2))
    moved = functools.reduce(lambda x, order: _take(x, *order), orders, leaf)
    return jnp.where(strength > 0, moved, leaf)

  return jax.tree_util.tree_map_with_path(one, params)


def attention(reduction: Reduction, own: Attention, strength=1.0) -> Attention:
  """The engine's attention: `own`, or split over blocks of keys where strength > 0."""
  if reduction.attention_block is None:
    return own
  split = functools.partial(blockwise, block=reduction.attention_block)

  def either(*args, **kwargs):
    return jnp.where(strength > 0, split(*args, **kwargs), own(*args, **kwargs))

  return either
