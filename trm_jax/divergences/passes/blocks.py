"""Work on an array too large for its temporaries: a few rows at a time, or a few columns."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Entries of one block: 1 MiB of float32, which stays in a core's cache between two passes.
BLOCK = 2**18


def rows_of(vocab_size: int, entries: int | None = None) -> int:
  """Rows of a block of about `entries` numbers (BLOCK)."""
  return -(-(entries or BLOCK) // vocab_size)


def by_rows(fn: Callable, *trees, rows: int):
  """fn over blocks of `rows` rows of trees of arrays [N, ...]; its outputs [rows, ...] joined.

  `fn` treats rows independently. The last block overlaps the one before it where `rows` does not
  divide N, so nothing is padded or copied. Differentiable; wrap `fn` in `jax.checkpoint` to keep
  its temporaries out of the backward pass. Inside `shard_map` the rows are this device's; outside
  they must not be sharded (the loop runs over the sharded axis).
  """
  count = jax.tree.leaves(trees)[0].shape[0]
  if count <= rows:
    return fn(*trees)
  blocks = -(-count // rows)
  starts = jnp.minimum(jnp.arange(blocks) * rows, count - rows)

  def one(start):
    return fn(*jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, rows), trees))

  def join(x):
    head = x[:-1].reshape((blocks - 1) * rows, *x.shape[2:])
    return jnp.concatenate([head, x[-1, blocks * rows - count :]])

  return jax.tree.map(join, jax.lax.map(one, starts))


def flat(fn: Callable, dims: int):
  """`fn` of trees of arrays [N, ...] as a function of trees [*b, ...] with `dims` leading axes."""

  def of_positions(*trees):
    shape = jax.tree.leaves(trees)[0].shape[:dims]
    rows = jax.tree.map(lambda x: x.reshape(math.prod(shape), *x.shape[dims:]), trees)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), fn(*rows))

  return of_positions


def varying(x: Array) -> frozenset[str]:
  """Mesh axes over which `x` differs between devices, by its type; empty outside `shard_map`."""
  kind = jax.typeof(x)
  # jax < 0.12 calls it vma. Neither name: fail here rather than sum a gradient twice.
  return kind.vma if hasattr(kind, 'vma') else kind.manual_axis_type.varying


def match_varying(*arrays: Array | None) -> list[Array | None]:
  """The arrays, all marked as differing over the axes of any: their cotangents are then summed.

  A `custom_vjp` inside `shard_map` must return cotangents of its operands' types; with equal types
  it needs no collective of its own, since the transpose of the mark is the sum over devices.
  """
  present = [x for x in arrays if x is not None]
  union = frozenset().union(*map(varying, present))

  def mark(x):
    missing = tuple(union - varying(x)) if x is not None else ()
    return jax.lax.pcast(x, missing, to='varying') if missing else x

  return [mark(x) for x in arrays]


def zeros(like: Array, dtype) -> Array:
  """Zeros of an array's shape that differ between devices where it does: the start of a loop."""
  axes = tuple(varying(like))
  x = jnp.zeros(like.shape, dtype)
  return jax.lax.pcast(x, axes, to='varying') if axes else x
