"""Which sequences stay inside the trust region: criteria on per-token statistics -> keep [B].

A criterion is a function of (divergences, valid) with its limit bound by `functools.partial`:

    criterion = functools.partial(trust_region.max_kl, limit=0.2)
    keep = trust_region.all_of(criterion, other)(divergences, valid)

Every statistic is taken over the original `valid` tokens, so criteria commute under AND. A sequence
without valid tokens is kept (it has nothing to reject); NaN or inf on a valid token rejects; what
padding holds never matters. No gradient flows through a mask. arXiv 2512.23075, sections 4-5.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from trm_jax import divergences as dv
from trm_jax.types import Divergences, InputError

Criterion = Callable[[Divergences, Bool[Array, 'B T']], Bool[Array, 'B']]


def max_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Largest value over the valid tokens of each row; 0 for an empty row; NaN if one is NaN."""
  x = jax.lax.stop_gradient(x)
  return jnp.where(valid.any(-1), jnp.where(valid, x, -jnp.inf).max(-1), 0)


def mean_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Mean over the valid tokens of each row (its true length); 0 for an empty row."""
  x = jax.lax.stop_gradient(x)
  return jnp.where(valid, x, 0).sum(-1) / jnp.maximum(valid.sum(-1), 1).astype(x.dtype)


def _within(statistic: Float[Array, 'B'], limit) -> Bool[Array, 'B']:
  if isinstance(limit, int | float) and not limit > 0:
    raise InputError(f'limit={limit} must be > 0: nothing else lies inside the trust region.')
  # NaN compares False: a row that cannot be judged is rejected; an infinite one is at any limit.
  return (statistic <= limit) & (statistic < jnp.inf)


def keep_all(divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B']:
  """No trust region: every row."""
  del divergences
  return valid.any(-1) | True


def max_kl(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """TRM-Max: max_t KL(rollout || policy) <= limit (nats); the only length-invariant certificate."""
  return _within(max_over_tokens(divergences.kl, valid), limit)


def mean_kl(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """TRM-Avg: mean_t KL(rollout || policy) <= limit (nats), over the row's true length."""
  return _within(mean_over_tokens(divergences.kl, valid), limit)


def max_tv(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """max_t TV <= limit in [0, 1]; bounds the paper's epsilon directly on visited contexts."""
  return _within(max_over_tokens(divergences.tv, valid), limit)


def max_k2(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """max_t k2 <= limit, i.e. |log_ratio| <= sqrt(2 limit): sampled, certifies nothing."""
  return _within(max_over_tokens(dv.k2(divergences.log_ratio), valid), limit)


def mean_k3(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """mean_t k3(log_ratio) <= limit: sampled estimate of TRM-Avg, certifies nothing."""
  return _within(mean_over_tokens(dv.k3(divergences.log_ratio), valid), limit)


def all_of(*criteria: Criterion) -> Criterion:
  """The intersection of trust regions; with none given, every row. Order does not matter."""

  def keep(divergences, valid):
    kept = keep_all(divergences, valid)
    for criterion in criteria:
      kept = kept & criterion(divergences, valid)
    return kept

  return keep


def combined(
  divergences: Divergences, valid: Bool[Array, 'B T'], *, max_limit, mean_limit
) -> Bool[Array, 'B']:
  """TRM-Combined: TRM-Max and TRM-Avg at once (the paper's third criterion)."""
  return max_kl(divergences, valid, limit=max_limit) & mean_kl(divergences, valid, limit=mean_limit)


def permuted(
  keep: Bool[Array, 'B'], key: Key[Array, ''], *, axis_name: str | None = None
) -> Bool[Array, 'B']:
  """The control: the same number of rows kept, chosen at random over the whole (global) batch.

  `key` must be the same on every device of `axis_name`; the masks are then one permutation.
  """
  if axis_name is None:
    return jax.random.permutation(key, keep)
  # all-reduce of B flags: a whole-batch permutation cannot be local, and an exact rate must be.
  rank, size = jax.lax.axis_index(axis_name), keep.shape[0]
  total = size * jax.lax.axis_size(axis_name)
  everyone = jax.lax.dynamic_update_slice(jnp.zeros(total, jnp.int32), keep * 1, (rank * size,))
  everyone = jax.random.permutation(key, jax.lax.psum(everyone, axis_name))
  return jax.lax.dynamic_slice(everyone, (rank * size,), (size,)) > 0


def follow(
  limit: Float[Array, ''], statistic: Float[Array, 'B'], *, target: float, rate: float = 0.1
) -> Float[Array, '']:
  """The limit for the next batch: a geometric moving average of this batch's `target` quantile.

      log limit' = (1 - rate) log limit + rate log quantile(statistic, target)

  Uses past batches only, so that a row's own value never sets the limit it is judged by. `target`
  in (0, 1) is the share to accept. Rows that cannot be judged count as the largest; where those
  reach the quantile the limit stays. Returns f32 > 0.
  """
  worst = jnp.where(jnp.isnan(statistic), jnp.inf, jax.lax.stop_gradient(statistic))
  now = jnp.quantile(worst, target, method='lower')
  tiny = jnp.finfo(jnp.float32).tiny  # identical policies have statistic 0
  moved = jnp.exp((1 - rate) * jnp.log(limit) + rate * jnp.log(jnp.maximum(now, tiny)))
  return jnp.where(jnp.isfinite(now), moved, limit).astype(jnp.float32)
