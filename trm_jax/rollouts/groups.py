"""Rows of a rollout: the samples of one prompt adjoin, each engine's share in its place."""

import itertools

import jax
import jax.numpy as jnp


def repeat(x, samples: int, axis: int = 0):
  """Each prompt's entry once per sample, in place: [.., p, ..] -> [.., p * G, ..]."""
  shape = (*x.shape[: axis + 1], samples, *x.shape[axis + 1 :])
  wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
  return wide.reshape(*x.shape[:axis], x.shape[axis] * samples, *x.shape[axis + 1 :])


def blanked(where, x):
  """x with 0 in the rows (or slots) of `where`."""
  return jnp.where(jnp.expand_dims(where, tuple(range(where.ndim, x.ndim))), 0, x)


def side_by_side(parts: list, prompts: int):
  """Joins trees of rows of the same prompts so that all samples of a prompt adjoin."""

  def join(*leaves):
    grouped = [x.reshape(prompts, -1, *x.shape[1:]) for x in leaves]
    joined = jnp.concatenate(grouped, 1)
    return joined.reshape(-1, *joined.shape[2:])

  return parts[0] if len(parts) == 1 else jax.tree.map(join, *parts)


def apart(tree, shares: tuple[int, ...]) -> list:
  """The inverse of `side_by_side`: each engine's rows, of which every prompt has `shares`."""
  ends = list(itertools.accumulate(shares))

  def part(x, end, count):
    x = x.reshape(-1, ends[-1], *x.shape[1:])[:, end - count : end]
    return x.reshape(-1, *x.shape[2:])

  if len(shares) == 1:
    return [tree]
  return [
    jax.tree.map(lambda x, e=end, c=count: part(x, e, c), tree)
    for end, count in zip(ends, shares, strict=True)
  ]
