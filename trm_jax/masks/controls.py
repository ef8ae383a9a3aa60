"""The control of every mask: the same number of rows or tokens, chosen at random."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from trm_jax.types import InputError

# A length-matched control draws among at least so many rows on average.
SMALLEST_BLOCK = 8


def permuted(
  keep: Bool[Array, 'B'] | Int[Array, 'B'],
  key: Key[Array, ''],
  *,
  usable: Bool[Array, 'B'] | None = None,
  lengths: Int[Array, 'B'] | None = None,
  axis_name: str | None = None,
) -> Bool[Array, 'B'] | Int[Array, 'B']:
  """The control: the same number of rows kept, chosen at random over the whole (global) batch.

  Chosen among the `usable` rows; `keep` is 0 on the others and stays so. With `lengths`, the number
  kept of each length stays as well: `keep` is permuted among rows of equal length, neighbouring
  lengths sharing a block where their rows are few. `key` must be the same on every device of
  `axis_name`; the masks are then one permutation. Raises InputError where the rows differ.

  >>> keep = jnp.arange(8) < 3
  >>> int(trm.permuted(keep, jax.random.key(0)).sum())
  3
  """
  for name, x in (('usable', usable), ('lengths', lengths)):
    if x is not None and x.shape != keep.shape:
      raise InputError(f'{name} has shape {x.shape} and keep {keep.shape}: give one value per row.')
  rank, size = 0, keep.shape[0]
  flags = keep.astype(jnp.int32)
  apart = jnp.zeros_like(flags) if usable is None else 1 - usable.astype(jnp.int32)
  if axis_name is not None:
    # all-reduce of B flags: a whole-batch permutation cannot be local, and an exact rate must be.
    rank, total = jax.lax.axis_index(axis_name), size * jax.lax.axis_size(axis_name)
    everyone = lambda x: jax.lax.psum(
      jax.lax.dynamic_update_slice(jnp.zeros(total, jnp.int32), x, (rank * size,)), axis_name
    )
    flags, apart = everyone(flags), everyone(apart)
    lengths = None if lengths is None else everyone(lengths.astype(jnp.int32))
  if lengths is None:
    order = jax.random.permutation(key, flags.shape[0])
    _, drawn = jax.lax.sort((apart[order], flags[order]), num_keys=1)  # stable: usable rows first
    _, rows = jax.lax.sort((apart, jnp.arange(flags.shape[0])), num_keys=1)
    _, flags = jax.lax.sort((rows, drawn), num_keys=1)
  else:
    flags = _permuted_by_length(flags, apart, lengths, key)
  flags = jax.lax.dynamic_slice(flags, (rank * size,), (size,))
  return flags > 0 if keep.dtype == bool else flags


def permuted_prefixes(
  keep: Bool[Array, 'B T'],
  key: Key[Array, ''],
  *,
  usable: Bool[Array, 'B'] | None = None,
  lengths: Int[Array, 'B'] | None = None,
  axis_name: str | None = None,
) -> Bool[Array, 'B T']:
  """The control of prefix masks: the slots at which rows are cut, dealt out anew as by `permuted`.

  Where all rows are of one length, or dealt among equal `lengths`, as many tokens stay at every
  position; else a cut may lie beyond the end of its new row, which then stays whole.
  """
  cuts = permuted(keep.sum(-1), key, usable=usable, lengths=lengths, axis_name=axis_name)
  return jnp.arange(keep.shape[-1])[None] < cuts[:, None]


def _permuted_by_length(flags, apart, lengths, key):
  """Flags [B] permuted inside blocks of the rows sorted by length.

  Equal lengths share a block; a block holds all lengths that begin in the same SMALLEST_BLOCK
  sorted rows. Rows set `apart` are a block of their own.
  """
  rows = jnp.arange(flags.shape[0])
  apart, lengths, flags, order = jax.lax.sort((apart, lengths, flags, rows), num_keys=2)
  changes = jnp.concatenate([jnp.ones(1, bool), lengths[1:] != lengths[:-1]])
  block = jax.lax.cummax(jnp.where(changes, rows, 0)) // SMALLEST_BLOCK
  block = jnp.where(apart > 0, flags.shape[0], block)
  draw = jax.random.bits(key, flags.shape)
  _, _, flags = jax.lax.sort((block, draw, flags), num_keys=2)
  return jax.lax.sort((order, flags), num_keys=1)[1]
