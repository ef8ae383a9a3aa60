"""Random streams of a rollout: a key for each prompt, each sample and each slot.

A key is made of the numbers of what it is for (prompt in the batch, sample, stream, slot), so that
what one row draws depends on no other row and not on the layout of the batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA


def fold(keys, data):
  """fold_in over arrays of keys and integers of one shape."""
  fold = jax.random.fold_in
  for _ in range(keys.ndim):
    fold = jax.vmap(fold)
  return fold(keys, data)


def each(fn, *arrays):
  """`fn` of every token's entry of arrays [B, T, ..], keys for example."""
  return jax.vmap(jax.vmap(fn))(*arrays)


def _counter(shape, axis):
  return sharding.reshard(jax.lax.broadcasted_iota(jnp.int32, shape, axis), DATA)


def row_keys(
  key: Key[Array, ''], prompts: int, samples: int, first_sample: int = 0
) -> tuple[Key[Array, 'p'], Key[Array, 'p G']]:
  """One key for each prompt (its number in the batch), and one for each of its samples."""
  per_prompt = fold(jnp.broadcast_to(key, (prompts,)), jnp.arange(prompts))
  per_prompt = sharding.reshard(per_prompt, DATA)
  shape = (prompts, samples)
  wide = jnp.broadcast_to(per_prompt[:, None], shape)
  return fold(per_prompt, _counter((prompts,), 0) * 0), fold(
    wide, 1 + first_sample + _counter(shape, 1)
  )


def noise_keys(keys, first_slot, count):
  """Noise keys [B, count] of slots first_slot.. of each row."""
  shape = (*keys.shape, count)
  return fold(jnp.broadcast_to(keys[:, None], shape), first_slot + _counter(shape, 1))


def token_keys(
  keys: Key[Array, 'B'], length: int, *, stream: int, first: int | Int[Array, ''] = 0
) -> Key[Array, 'B T']:
  """A key for each of `length` response slots from `first` on, from the rows' own keys.

  Streams in use: 0 the forward pass, 1 the draws, 2 the scores, 3 what is reported.
  """
  return noise_keys(fold(keys, stream + _counter(keys.shape, 0) * 0), first, length)
