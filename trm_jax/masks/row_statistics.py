"""From numbers per token to one number per row: the statistics that criteria compare with a limit.

All are taken over the row's `valid` tokens, in float32 (or float64) and without gradient. A row
without tokens has 0. NaN on a valid token makes its row NaN: such a row cannot be judged.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax import bounds, extremes
from trm_jax.types import Divergences, InputError


def tokens(x: Array | None, valid: Array) -> Array:
  """x [B, T], at least float32, without its gradient; InputError for None or another shape."""
  if x is None:
    raise InputError(
      'This criterion reads the exact KL or TV, but divergences hold sampled log-probs alone: use'
      ' max_k2, mean_k3, length_neutral or mean_deviation.'
    )
  if x.shape != valid.shape:
    raise InputError(
      f'valid has shape {valid.shape}, but there are tokens of shape {x.shape}: pass one flag for'
      ' each token.'
    )
  return jax.lax.stop_gradient(x).astype(jnp.promote_types(x.dtype, jnp.float32))


def max_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Largest value over the valid tokens of each row; 0 for an empty row; NaN if one is NaN."""
  x = tokens(x, valid)
  return jnp.where(valid.any(-1), extremes.largest(x, where=valid), 0)


def mean_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Mean over the valid tokens of each row (its true length); 0 for an empty row."""
  x = tokens(x, valid)
  return jnp.where(valid, x, 0).sum(-1) / jnp.maximum(valid.sum(-1), 1).astype(x.dtype)


def sum_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Sum over the valid tokens of each row; 0 for an empty row."""
  return jnp.where(valid, tokens(x, valid), 0).sum(-1)


def deviation(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """|ratio - 1| in [0, inf]; inf for an infinite log_ratio of either sign, NaN where missing."""
  return jnp.where(jnp.isinf(log_ratio), jnp.inf, jnp.abs(jnp.expm1(log_ratio)))


def future_deviation(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  epsilon,
  delta,
  horizon: int | None = None,
) -> Float[Array, 'B']:
  """Mean deviation of each row, weighted by what the future of a token can still change.

      W / Z,   W = sum_t |ratio_t - 1| w_t,   w_t = min(1, (T-t) epsilon, sqrt((T-t) delta/2))

  Z = sum_t w_t, and W where Z = 0. T is the row's own length (the paper), or `horizon`, a static
  int >= the slots: contexts do not know how long their row becomes, so only a fixed T makes w_t a
  constant, as a certificate needs. epsilon and delta as in `bounds.future_weights`. Raises
  InputError for a weight of 0 everywhere or a horizon that is too short.
  """
  for name, value in (('epsilon', epsilon), ('delta', delta)):
    if isinstance(value, int | float) and not value > 0:
      raise InputError(f'{name}={value} must be > 0: otherwise no token has any weight.')
  if horizon is not None and bounds.horizon(horizon) < valid.shape[-1]:
    raise InputError(
      f'horizon={horizon} is shorter than the {valid.shape[-1]} slots of a row: give the longest'
      ' response.'
    )
  # Tokens of others (tools) have ratio 1 and KL 0, so they are no part of any future.
  log_ratio = tokens(log_ratio, valid)
  place = jnp.cumsum(valid, -1).astype(log_ratio.dtype)
  after = (place[:, -1:] if horizon is None else horizon) - place
  epsilon = bounds.real('epsilon', epsilon).astype(log_ratio.dtype)
  weights = jnp.minimum(after * epsilon, bounds.spread(after, delta).astype(log_ratio.dtype))
  total = sum_over_tokens(weights, valid)
  if horizon is not None:
    total = bounds.future_weights(T=horizon, epsilon=epsilon, delta=delta).sum()
  # A broken ratio on the last token is NaN here: 0 * inf.
  weighted = sum_over_tokens(deviation(log_ratio) * weights, valid)
  return weighted / jnp.where(total > 0, total, 1)


def chi2_of(divergences: Divergences) -> Float[Array, 'B T']:
  """The exact chi2 of each context; InputError where the statistics do not hold it."""
  if divergences.chi2 is None:
    raise InputError(
      'divergences.chi2 is None: pass full=True to divergences.statistics or'
      ' linear_head.statistics.'
    )
  return divergences.chi2
