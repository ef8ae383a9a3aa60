"""Which sequences stay inside the trust region: criteria on per-token statistics -> keep [B].

A criterion is a function of (divergences, valid) with its limit bound by `functools.partial`:

    criterion = functools.partial(trust_region.max_kl, limit=0.2)
    keep = trust_region.all_of(criterion, other)(divergences, valid)

| criterion        | statistic of a row         | longer noisy rows  | certifies               |
| ---------------- | -------------------------- | ------------------ | ----------------------- |
| `max_kl`         | max_t KL                   | rejects more       | delta where it went     |
| `max_tv`         | max_t TV                   | rejects more       | epsilon where it went   |
| `mean_kl`        | mean_t KL                  | rejects less       | no single token         |
| `chi2_budget`    | sum_t chi2                 | rejects more       | an error free of T      |
| `length_neutral` | weighted mean of deviation | rejects less       | E[W], given both limits |
| `mean_deviation` | mean_t deviation           | rejects less       | the linear bound        |
| `max_k2`         | max_t k2                   | rejects more       | nothing                 |
| `mean_k3`        | mean_t k3                  | rejects less       | nothing                 |

deviation = |ratio - 1| of the sampled token. `trm_jax.calibration` sets limits that accept the same
share at every length. `prefix_*` keep tokens [B, T] before the first context outside: `max_kl`,
`max_tv` and `chi2_budget` have such a form, the others speak of whole rows or of sampled tokens.

Every statistic is taken over the original `valid` tokens, so criteria commute under AND. A sequence
without valid tokens is kept (it has nothing to reject); NaN or inf on a valid token rejects; what
padding holds never matters. No gradient flows through a mask. arXiv 2512.23075, sections 4-5.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import bounds
from trm_jax import divergences as dv
from trm_jax.types import Divergences, InputError

# A length-matched control draws among at least so many rows on average.
FEWEST = 8

Criterion = Callable[[Divergences, Bool[Array, 'B T']], Bool[Array, 'B']]


def _tokens(x: Array | None, valid: Array) -> Array:
  """x [B, T] without its gradient; InputError where it is None or `valid` has another shape."""
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
  return jax.lax.stop_gradient(x)


def max_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Largest value over the valid tokens of each row; 0 for an empty row; NaN if one is NaN."""
  x = _tokens(x, valid)
  return jnp.where(valid.any(-1), jnp.where(valid, x, -jnp.inf).max(-1), 0)


def mean_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Mean over the valid tokens of each row (its true length); 0 for an empty row."""
  x = _tokens(x, valid)
  return jnp.where(valid, x, 0).sum(-1) / jnp.maximum(valid.sum(-1), 1).astype(x.dtype)


def sum_over_tokens(x: Float[Array, 'B T'], valid: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Sum over the valid tokens of each row; 0 for an empty row."""
  return jnp.where(valid, _tokens(x, valid), 0).sum(-1)


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


def _within(statistic: Float[Array, '*s'], limit) -> Bool[Array, '*s']:
  if isinstance(limit, int | float) and not limit > 0:
    raise InputError(f'limit={limit} must be > 0: nothing else lies inside the trust region.')
  # NaN compares False: a row that cannot be judged is rejected; an infinite one is at any limit.
  return (statistic <= limit) & (statistic < jnp.inf)


def keep_all(divergences: Divergences, valid: Bool[Array, 'B T']) -> Bool[Array, 'B']:
  """No trust region: every row."""
  del divergences
  return valid.any(-1) | True


def max_kl(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """TRM-Max: max_t KL(rollout || policy) <= limit (nats): one limit for every length."""
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


def length_neutral(
  divergences: Divergences,
  valid: Bool[Array, 'B T'],
  *,
  limit,
  epsilon,
  delta,
  horizon: int | None = None,
) -> Bool[Array, 'B']:
  """LN-TRM: `future_deviation` <= limit, a weighted mean of |ratio - 1| (sampled).

  With `horizon`, the longest response there can be, and where epsilon and delta hold in all
  contexts, |Error| <= 2 E[W], and a row kept has W <= limit Z. The realised length that is taken by
  default, as in the paper, is not known at the token: no proof, and no counterexample. The last
  token has weight 0: rows of one token are kept. arXiv 2512.23075, length-bias appendix.
  """
  found = future_deviation(
    divergences.log_ratio, valid, epsilon=epsilon, delta=delta, horizon=horizon
  )
  return _within(found, limit)


def mean_deviation(
  divergences: Divergences, valid: Bool[Array, 'B T'], *, limit
) -> Bool[Array, 'B']:
  """SER: mean_t |ratio_t - 1| <= limit, over the row's true length (sampled; the paper: 0.03..0.1).

  A token that the policy has dropped (ratio -> 0) adds at most 1. |Error| <= 2 T E[mean deviation],
  the linear bound. arXiv 2512.23075, length-bias appendix.
  """
  return _within(mean_over_tokens(deviation(divergences.log_ratio), valid), limit)


def chi2_budget(divergences: Divergences, valid: Bool[Array, 'B T'], *, limit) -> Bool[Array, 'B']:
  """sum_t chi2(policy || rollout) <= limit: what the response as a whole may spend.

  Delta of the policy patched by `prefix_chi2_budget` is at most `sharp_bounds.budget_l2(limit)` ~
  0.35 limit, whatever T is; what leaves the budget costs its reward besides. Identical noise spends
  T times as much: let the limit grow with T. Needs exact chi2.
  """
  return _within(sum_over_tokens(chi2_of(divergences), valid), limit)


def prefix(inside: Bool[Array, 'B T'], valid: Bool[Array, 'B T']) -> Bool[Array, 'B T']:
  """Tokens before which, and at which, every valid token of the row is `inside`.

  Never rises along a row. A function of the contexts up to t alone if `inside` is one, as exact
  KL, TV and chi2 at a context are and the ratio of the token sampled there is not: then the policy
  patched by the rollout after the first bad context obeys the limit everywhere, and certificates
  need no assumption about contexts that were not visited.
  """
  inside = _tokens(inside, valid)
  return jnp.cumsum(valid & ~inside, -1) == 0


def prefix_max_kl(
  divergences: Divergences, valid: Bool[Array, 'B T'], *, limit
) -> Bool[Array, 'B T']:
  """`max_kl` token by token: up to the first context whose KL exceeds the limit (nats)."""
  return prefix(_within(_tokens(divergences.kl, valid), limit), valid)


def prefix_max_tv(
  divergences: Divergences, valid: Bool[Array, 'B T'], *, limit
) -> Bool[Array, 'B T']:
  """`max_tv` token by token: up to the first context whose TV exceeds the limit in [0, 1]."""
  return prefix(_within(_tokens(divergences.tv, valid), limit), valid)


def prefix_chi2_budget(
  divergences: Divergences, valid: Bool[Array, 'B T'], *, limit
) -> Bool[Array, 'B T']:
  """`chi2_budget` token by token: while sum_{s<=t} chi2(c_s) <= limit."""
  chi2 = _tokens(chi2_of(divergences), valid)
  return prefix(_within(jnp.cumsum(jnp.where(valid, chi2, 0), -1), limit), valid)


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
  keep: Bool[Array, 'B'] | Int[Array, 'B'],
  key: Key[Array, ''],
  *,
  usable: Bool[Array, 'B'] | None = None,
  lengths: Int[Array, 'B'] | None = None,
  axis_name: str | None = None,
) -> Bool[Array, 'B'] | Int[Array, 'B']:
  """The control: the same number of rows kept, chosen at random over the whole (global) batch.

  Chosen among the `usable` rows; `keep` is 0 on the others and stays so. With `lengths`, the number
  kept of each length stays as well: `keep` is permuted among rows of equal length, neighbouring
  lengths sharing a block where their rows are few. `key` must be the same on every device of
  `axis_name`; the masks are then one permutation. Raises InputError where the rows differ.
  """
  for name, x in (('usable', usable), ('lengths', lengths)):
    if x is not None and x.shape != keep.shape:
      raise InputError(f'{name} has shape {x.shape} and keep {keep.shape}: give one value per row.')
  rank, size = 0, keep.shape[0]
  flags = keep.astype(jnp.int32)
  apart = jnp.zeros_like(flags) if usable is None else 1 - usable.astype(jnp.int32)
  if axis_name is not None:
    # all-reduce of B flags: a whole-batch permutation cannot be local, and an exact rate must be.
    rank, total = jax.lax.axis_index(axis_name), size * jax.lax.axis_size(axis_name)
    everyone = lambda x: jax.lax.psum(
      jax.lax.dynamic_update_slice(jnp.zeros(total, jnp.int32), x, (rank * size,)), axis_name
    )
    flags, apart = everyone(flags), everyone(apart)
    lengths = None if lengths is None else everyone(lengths.astype(jnp.int32))
  if lengths is None:
    order = jax.random.permutation(key, flags.shape[0])
    _, drawn = jax.lax.sort((apart[order], flags[order]), num_keys=1)  # stable: usable rows first
    _, rows = jax.lax.sort((apart, jnp.arange(flags.shape[0])), num_keys=1)
    _, flags = jax.lax.sort((rows, drawn), num_keys=1)
  else:
    flags = _permuted_by_length(flags, apart, lengths, key)
  flags = jax.lax.dynamic_slice(flags, (rank * size,), (size,))
  return flags > 0 if keep.dtype == bool else flags


def permuted_prefixes(
  keep: Bool[Array, 'B T'],
  key: Key[Array, ''],
  *,
  usable: Bool[Array, 'B'] | None = None,
  lengths: Int[Array, 'B'] | None = None,
  axis_name: str | None = None,
) -> Bool[Array, 'B T']:
  """The control of prefix masks: the slots at which rows are cut, dealt out anew as by `permuted`.

  Where all rows are of one length, or dealt among equal `lengths`, as many tokens stay at every
  position; else a cut may lie beyond the end of its new row, which then stays whole.
  """
  cuts = permuted(keep.sum(-1), key, usable=usable, lengths=lengths, axis_name=axis_name)
  return jnp.arange(keep.shape[-1])[None] < cuts[:, None]


def _permuted_by_length(flags, apart, lengths, key):
  """Flags [B] permuted inside blocks of the rows sorted by length.

  Equal lengths share a block; a block holds all lengths that begin in the same FEWEST sorted rows.
  Rows set `apart` are a block of their own.
  """
  rows = jnp.arange(flags.shape[0])
  apart, lengths, flags, order = jax.lax.sort((apart, lengths, flags, rows), num_keys=2)
  changes = jnp.concatenate([jnp.ones(1, bool), lengths[1:] != lengths[:-1]])
  block = jax.lax.cummax(jnp.where(changes, rows, 0)) // FEWEST
  block = jnp.where(apart > 0, flags.shape[0], block)
  draw = jax.random.bits(key, flags.shape)
  _, _, flags = jax.lax.sort((block, draw, flags), num_keys=2)
  return jax.lax.sort((order, flags), num_keys=1)[1]


def follow(
  limit: Float[Array, ''],
  statistic: Float[Array, 'B'],
  *,
  target: float,
  rate: float = 0.1,
  usable: Bool[Array, 'B'] | None = None,
) -> Float[Array, '']:
  """The limit for the next batch: a geometric moving average of this batch's `target` quantile.

      log limit' = (1 - rate) log limit + rate log quantile(statistic, target)

  Uses past batches only, so that a row's own value never sets the limit it is judged by. `target`
  in (0, 1) is the share to accept of the `usable` rows (default: all). Rows that cannot be judged
  count as the largest; where those reach the quantile, or no row is usable, the limit stays.
  Returns f32 > 0.
  """
  usable = jnp.ones(statistic.shape, bool) if usable is None else usable
  judged = usable & ~jnp.isnan(statistic)
  ranked = jnp.sort(jnp.where(judged, jax.lax.stop_gradient(statistic), jnp.inf))
  last = jnp.maximum(usable.sum() - 1, 0)
  now = ranked[jnp.floor(target * last.astype(jnp.float32)).astype(jnp.int32)]
  tiny = jnp.finfo(jnp.float32).tiny  # identical policies have statistic 0
  moved = jnp.exp((1 - rate) * jnp.log(limit) + rate * jnp.log(jnp.maximum(now, tiny)))
  return jnp.where(jnp.isfinite(now), moved, limit).astype(jnp.float32)
