"""Reductions over a vocabulary that may be split across devices: the only vocabulary collectives.

With `axis_name=None` the last axis is the whole vocabulary. Otherwise it is this device's
contiguous block of it, blocks ordered by device, and each function adds one all-reduce of [B, T].

Entries from `vocab_size` on pad the vocabulary: they have no mass, whatever they hold.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def maximum(x: Float[Array, '*b V'], axis_name: str | None = None) -> Float[Array, '*b']:
  """Largest entry over the vocabulary; carries no gradient (it only centres).

  It may lose a NaN, which the sum of the exponentials then brings back.
  """
  top = jax.lax.stop_gradient(x).max(-1)
  return top if axis_name is None else jax.lax.pmax(top, axis_name)


def total(x: Float[Array, '*b V'], axis_name: str | None = None) -> Float[Array, '*b']:
  """Sum over the vocabulary."""
  return add_up(x.sum(-1), axis_name)


def add_up(tree, axis_name: str | None = None):
  """Trees of arrays of one shape summed over devices, in one all-reduce."""
  if axis_name is None:
    return tree
  parts, shape = jax.tree.flatten(tree)
  return jax.tree.unflatten(shape, list(jax.lax.psum(jnp.stack(parts), axis_name)))


def real_entries(
  size: int, vocab_size: int | None, axis_name: str | None = None
) -> int | Int[Array, '']:
  """How many of this device's `size` entries are tokens; the others pad the vocabulary."""
  if vocab_size is None:
    return size
  if axis_name is None:
    return min(vocab_size, size)
  return jnp.clip(vocab_size - size * jax.lax.axis_index(axis_name), 0, size)


def without_padding(
  x: Float[Array, '*b V'], vocab_size: int | None, axis_name: str | None = None
) -> Float[Array, '*b W']:
  """Logits without the entries that pad the vocabulary: cut off; of a device's block, made -inf."""
  if vocab_size is None:
    return x
  if axis_name is None:
    return x[..., :vocab_size]
  return only(x, real_entries(x.shape[-1], vocab_size, axis_name))


def only(x: Float[Array, '*b V'], count: int | Int[Array, '']) -> Float[Array, '*b V']:
  """The first `count` logits; the others are -inf."""
  if isinstance(count, int) and count >= x.shape[-1]:
    return x
  entry = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  return jnp.where(entry < count, x, -jnp.inf)


def known(
  tokens: Int[Array, '*b'], size: int, vocab_size: int | None = None, axis_name: str | None = None
) -> Bool[Array, '*b']:
  """Which tokens the vocabulary has; `size` is that of this device's block. -100 is none."""
  whole = size if axis_name is None else size * jax.lax.axis_size(axis_name)
  return (tokens >= 0) & (tokens < (whole if vocab_size is None else vocab_size))


def pick(
  x: Float[Array, '*b V'],
  tokens: Int[Array, '*b'],
  axis_name: str | None = None,
  *,
  vocab_size: int | None = None,
) -> Float[Array, '*b']:
  """x at each position's token; one device holds it, the others add 0. NaN where none has it."""
  return add_up(held(x, tokens, axis_name, vocab_size=vocab_size), axis_name)


def held(
  x: Float[Array, '*b V'],
  tokens: Int[Array, '*b'],
  axis_name: str | None = None,
  *,
  vocab_size: int | None = None,
) -> Float[Array, '*b']:
  """`pick` before its all-reduce: x at the tokens that this device holds, 0 at those of others.

  NaN at tokens outside the vocabulary: they are missing, and have no log-prob.
  """
  size = x.shape[-1]
  local, here = place(tokens, size, axis_name)
  value = jnp.where(here, jnp.take_along_axis(x, local[..., None], -1)[..., 0], 0)
  return jnp.where(known(tokens, size, vocab_size, axis_name), value, jnp.nan)


def place(
  tokens: Int[Array, '*b'], size: int, axis_name: str | None = None
) -> tuple[Int[Array, '*b'], Bool[Array, '*b']]:
  """(index of each token in this device's block of `size` entries, whether it is there at all).

  The index is inside the block in any case.
  """
  offset = 0 if axis_name is None else size * jax.lax.axis_index(axis_name)
  local = tokens - offset
  return jnp.clip(local, 0, size - 1), (local >= 0) & (local < size)


def log_probs(
  logits: Float[Array, '*b V'],
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b V']:
  """Log of softmax(logits / temperature), float32; a row of -inf alone stays -inf.

  Centred before the division and before the sum: a large offset would cost all digits.
  """
  x = logits.astype(jnp.float32)
  top = maximum(x, axis_name)
  x = (x - jnp.where(jnp.isfinite(top), top, 0)[..., None]) / temperature
  return x - jnp.log(total(jnp.exp(x), axis_name))[..., None]
