"""Reductions over a vocabulary that may be split across devices: the only vocabulary collectives.

With `axis_name=None` the last axis is the whole vocabulary. Otherwise it is this device's
contiguous block of it, blocks ordered by device, and each function adds one all-reduce of [B, T].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def maximum(x: Float[Array, '*b V'], axis_name: str | None = None) -> Float[Array, '*b']:
  """Largest entry over the vocabulary; carries no gradient (it only centres)."""
  top = jax.lax.stop_gradient(x).max(-1)
  return top if axis_name is None else jax.lax.pmax(top, axis_name)


def total(x: Float[Array, '*b V'], axis_name: str | None = None) -> Float[Array, '*b']:
  """Sum over the vocabulary."""
  s = x.sum(-1)
  return s if axis_name is None else jax.lax.psum(s, axis_name)


def pick(
  x: Float[Array, '*b V'], tokens: Int[Array, '*b'], axis_name: str | None = None
) -> Float[Array, '*b']:
  """x at each position's token; one device holds it, the others add 0.

  Tokens outside the vocabulary give 0 (padding may hold anything).
  """
  value = held(x, tokens, axis_name)
  return value if axis_name is None else jax.lax.psum(value, axis_name)


def held(
  x: Float[Array, '*b V'], tokens: Int[Array, '*b'], axis_name: str | None = None
) -> Float[Array, '*b']:
  """`pick` before its all-reduce: x at the tokens that this device holds, 0 at the others."""
  local, here = place(tokens, x.shape[-1], axis_name)
  return jnp.where(here, jnp.take_along_axis(x, local[..., None], -1)[..., 0], 0)


def place(
  tokens: Int[Array, '*b'], size: int, axis_name: str | None = None
) -> tuple[Int[Array, '*b'], Bool[Array, '*b']]:
  """(index of each token in this device's block of `size` entries, whether it is there at all).

  The index is inside the block in any case.
  """
  offset = 0 if axis_name is None else size * jax.lax.axis_index(axis_name)
  local = tokens - offset
  return jnp.clip(local, 0, size - 1), (local >= 0) & (local < size)


def centred(
  logits: Float[Array, '*b V'], axis_name: str | None = None
) -> tuple[Float[Array, '*b V'], Float[Array, '*b']]:
  """(logits - max, log of the sum of their exponentials), both float32.

  Never form logsumexp ~ 1e4 and subtract: the difference would lose all digits.
  """
  x = logits.astype(jnp.float32)
  top = maximum(x, axis_name)
  # A row of -inf alone has no distribution; keep it -inf instead of nan.
  x = x - jnp.where(jnp.isfinite(top), top, 0)[..., None]
  return x, jnp.log(total(jnp.exp(x), axis_name))
