"""Digests of trees: what a checkpoint was, whatever mesh it is read on.

A digest is a sum of all words, each times an odd number that tells its place, modulo 2^64: a
flipped bit always changes it, and each process can add up the part it holds.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def leaves(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by the name of their place, as in `['a'].b`."""
  return {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def records(tree: Any) -> dict[str, list]:
  """{leaf: [shape, dtype, digest]}, the same for any mesh; called by all processes.

  Digests are 16 hexadecimal digits of arrays (typed PRNG keys too) and Python numbers.
  """
  recorded = leaves(tree)
  sums = np.array([_part(leaf) for leaf in recorded.values()], np.uint64).view(np.uint32)
  if jax.process_count() > 1:  # jax gathers no 64 bits
    parts = np.asarray(multihost_utils.process_allgather(sums)).view(np.uint64)
    sums = parts.sum(0, dtype=np.uint64)
  sums = sums.view(np.uint64)
  return {
    name: [list(np.shape(leaf)), str(getattr(leaf, 'dtype', type(leaf).__name__)), f'{total:016x}']
    for (name, leaf), total in zip(recorded.items(), sums.tolist(), strict=True)
  }


def digest(tree: Any) -> str:
  """16 hexadecimal digits of all of `records`; called by all processes."""
  return hashlib.sha256(json.dumps(records(tree), sort_keys=True).encode()).hexdigest()[:16]


def _part(leaf: Any) -> int:
  """What this process adds to the digest of a leaf: the shards of which it holds the first copy."""
  if isinstance(leaf, jax.Array):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    shards = [(s.index, s.data) for s in leaf.addressable_shards if s.replica_id == 0]
  else:
    shards = [((slice(None),) * np.ndim(leaf), leaf)] if jax.process_index() == 0 else []
  shape, total = np.shape(leaf) or (1,), 0
  strides = np.cumprod((1, *shape[:0:-1]))[::-1]
  for index, data in shards:
    words = np.ascontiguousarray(data)
    words = words.view(f'u{words.dtype.itemsize}')
    along = [
      np.arange(n)[i] * k for i, n, k in zip(index or [slice(1)], shape, strides, strict=True)
    ]
    within = np.zeros((), int) if len(shape) == 1 else sum(np.ix_(*along[1:]))
    rows = max(1, 2**22 // within.size)  # at a time, for the memory of their places
    for row in range(0, len(words), rows):
      places = np.expand_dims(along[0][row : row + rows], (*range(1, len(shape)),)) + within
      total += int((words[row : row + rows] * (2 * places + 1).astype(np.uint64)).sum())
  return total % 2**64
