"""Criteria on the sampled log-ratio alone: bands, vetoes and means of it, as peers reject rows.

Write d_t = logp_policy - logp_rollout, or with `Method.judge='anchor'` logp_recomputed -
logp_rollout. All read `divergences.log_ratio` in nats, certify nothing, keep a row without tokens
and reject one whose valid tokens hold NaN or an infinite d. A band low <= x <= high of ratios is
judged as log x / log high (or log x / log low, below 1), which must not exceed 1.

Two departures from peers, on purpose: d is not clamped to +-20 before it is summed (verl clamps, so
that an outlier counts less than it is), and NaN is not read as agreement (NeMo-RL reads it so).
"""

import math

import jax.numpy as jnp

from trm_jax.masks import row_statistics as rs
from trm_jax.masks.criteria import Criterion
from trm_jax.types import InputError, part


def _check(name, low, high) -> None:
  if low is not None and not 0 < low < 1:
    raise InputError(f'{name} has low={low}, which must lie strictly between 0 and 1, or be None.')
  if high is not None and not 1 < high < math.inf:
    raise InputError(f'{name} has high={high}, which must be > 1 and finite, or be None.')
  if low is None and high is None:
    raise InputError(f'{name} has neither low nor high: give at least one of them.')


def sum_band(*, low: float | None = 0.5, high: float | None = 2.0) -> Criterion:
  """low <= prod_t ratio_t <= high, a factor without unit: a band on the ratio of whole sequences.

  verl's seq_sum_k1 (.5, 2; theirs bounds rollout / policy: low and high change places, inverted),
  TRL's sequence_mask (None, 3). Raises InputError unless 0 < low < 1 < high.
  """
  _check('sum_band', low, high)
  return Criterion('sum_band', 1.0, part(_sum_band, low=low, high=high))


def geometric_band(*, low: float | None = 0.999, high: float | None = 1.001) -> Criterion:
  """low <= (prod_t ratio_t)^(1/T) <= high: a band on the mean of d, where signs cancel.

  verl's seq_mean_k1 ("Geo-RS": .999, 1.001). Raises InputError unless 0 < low < 1 < high.
  """
  _check('geometric_band', low, high)
  return Criterion('geometric_band', 1.0, part(_mean_band, low=low, high=high))


def token_veto(*, low: float | None = 1e-4, high: float | None = None) -> Criterion:
  """low <= min_t ratio_t and max_t ratio_t <= high: one token outside rejects its row.

  slime's rs_veto_threshold (1e-4, None). Raises InputError unless 0 < low < 1 < high.
  """
  _check('token_veto', low, high)
  return Criterion('token_veto', 1.0, part(_veto, low=low, high=high))


def mean_ratio_error(limit: float = 1.5) -> Criterion:
  """mean_t e^|d_t| <= limit, >= 1 always: NeMo-RL's seq_logprob_error_threshold (1.5)."""
  return Criterion('mean_ratio_error', limit, _mean_ratio_error)


def carm(epsilon: float = 0.001) -> Criterion:
  """mean_t |d_t| <= log(1 + epsilon), in nats: signs cannot cancel. arXiv 2610.02039.

  The authors' epsilon is not known to us; the default is the one of verl's geometric band.
  """
  return Criterion('carm', math.log1p(epsilon), _mean_absolute)


def mean_k2(limit) -> Criterion:
  """mean_t d_t^2 / 2 <= limit (verl's seq_mean_k2)."""
  return Criterion('mean_k2', limit, _mean_k2)


def sum_k2(limit) -> Criterion:
  """sum_t d_t^2 / 2 <= limit (verl's seq_sum_k2)."""
  return Criterion('sum_k2', limit, _sum_k2)


def _excess(d, low, high):
  """d as a share of the band's end on its side, 0 where that side is open; inf for infinite d."""
  above = jnp.zeros_like(d) if high is None else d / jnp.float32(math.log(high))
  below = jnp.zeros_like(d) if low is None else d / jnp.float32(math.log(low))
  share = jnp.where(d >= 0, above, below)
  return jnp.where(jnp.isnan(d), jnp.nan, jnp.where(jnp.isinf(d), jnp.inf, share))


def _violated(d):
  """d [B, T], so that an infinite value of either sign is +inf in a row's sum."""
  return jnp.where(jnp.isinf(d), jnp.inf, d)


# By name, so that criteria made alike are equal.
_sum_band = lambda d, valid, *, low, high: _excess(
  rs.sum_over_tokens(_violated(d.log_ratio), valid), low, high
)
_mean_band = lambda d, valid, *, low, high: _excess(
  rs.mean_over_tokens(_violated(d.log_ratio), valid), low, high
)
_veto = lambda d, valid, *, low, high: rs.max_over_tokens(
  _excess(rs.tokens(d.log_ratio, valid), low, high), valid
)
_mean_ratio_error = lambda d, valid: rs.mean_over_tokens(
  jnp.exp(jnp.abs(rs.tokens(d.log_ratio, valid))), valid
)
_mean_absolute = lambda d, valid: rs.mean_over_tokens(jnp.abs(rs.tokens(d.log_ratio, valid)), valid)
_k2 = lambda d, valid: jnp.square(rs.tokens(d.log_ratio, valid)) / 2
_mean_k2 = lambda d, valid: rs.mean_over_tokens(_k2(d, valid), valid)
_sum_k2 = lambda d, valid: rs.sum_over_tokens(_k2(d, valid), valid)
