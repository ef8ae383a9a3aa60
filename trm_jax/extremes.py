"""Maxima and minima that never lose a NaN, which stands for a missing value.

XLA's CPU compiler drops NaN in reductions by `max` and `min` (`where=`, `pmax` and `pmin` too) from
4096 elements on, and in `jnp.maximum` and `jnp.minimum` where they are fused into a sum. `jnp.clip`
with both ends, comparisons, `where`, sums, sorts and `argmax` keep it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def largest(
  x: Float[Array, '...'],
  axis: int | tuple[int, ...] | None = -1,
  *,
  where: Bool[Array, '...'] | None = None,
) -> Float[Array, '...']:
  """Maximum over `axis` of the entries of `where`: NaN if one is NaN, -inf if there is none."""
  x = x if where is None else jnp.where(where, x, -jnp.inf)
  return jnp.where(jnp.isnan(x).any(axis), jnp.nan, x.max(axis, initial=-jnp.inf))


def smallest(
  x: Float[Array, '...'],
  axis: int | tuple[int, ...] | None = -1,
  *,
  where: Bool[Array, '...'] | None = None,
) -> Float[Array, '...']:
  """Minimum over `axis` of the entries of `where`: NaN if one is NaN, inf if there is none."""
  return -largest(-x, axis, where=where)


def at_least(x: Float[Array, '...'], low: int | float | Float[Array, '...']) -> Float[Array, '...']:
  """max(x, low) for each entry: NaN where either is; at x = low the gradient goes to x."""
  return jnp.where((x < low) | jnp.isnan(low), low, x)


def at_most(x: Float[Array, '...'], high: int | float | Float[Array, '...']) -> Float[Array, '...']:
  """min(x, high) for each entry: NaN where either is; at x = high the gradient goes to x."""
  return jnp.where((x > high) | jnp.isnan(high), high, x)
