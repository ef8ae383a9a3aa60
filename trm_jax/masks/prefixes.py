"""Prefixes: a row counts up to its first context outside the trust region, and no further."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from trm_jax.masks import row_statistics
from trm_jax.types import Divergences


def prefix(inside: Bool[Array, 'B T'], valid: Bool[Array, 'B T']) -> Bool[Array, 'B T']:
  """Tokens before which, and at which, every valid token of the row is `inside`.

  Never rises along a row. A function of the contexts up to t alone if `inside` is one, as exact
  KL, TV and chi2 at a context are and the ratio of the token sampled there is not: then the policy
  patched by the rollout after the first bad context obeys the limit everywhere, and certificates
  need no assumption about contexts that were not visited.

  >>> inside = jnp.array([[True, False, True]])
  >>> trm.prefix(inside, jnp.ones((1, 3), bool))
  Array([[ True, False, False]], dtype=bool)
  """
  inside = row_statistics.tokens(inside.astype(jnp.float32), valid)
  return jnp.cumsum(valid & (inside == 0), -1) == 0


def rows_kept(
  keep: Bool[Array, 'B'] | Bool[Array, 'B T'], valid: Bool[Array, 'B T']
) -> Bool[Array, 'B']:
  """Rows that take part: those of a sequence mask, or the rows of which a token is kept."""
  return keep if keep.ndim == 1 else (keep & valid).any(-1)


def spent(x: Array, valid: Bool[Array, 'B T']) -> Array:
  """sum_{s <= t} of x over the valid tokens up to t, [B, T]."""
  return jnp.cumsum(jnp.where(valid, row_statistics.tokens(x, valid), 0), -1)


def chi2_spent(divergences: Divergences, valid: Bool[Array, 'B T']) -> Array:
  """sum_{s <= t} chi2(c_s), [B, T]."""
  return spent(row_statistics.chi2_of(divergences), valid)
