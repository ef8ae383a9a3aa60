"""A method evaluated on a scored minibatch: mask, advantages, surrogate, penalty."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import masks
from trm_jax.divergences.ratios import raised
from trm_jax.objectives import segments, surrogates
from trm_jax.objectives.advantages import OfScored
from trm_jax.objectives.method import Method
from trm_jax.objectives.scored import Advantages, Bounds, Scored
from trm_jax.types import Bracket, Divergences, Mean


def keep(
  method: Method,
  scored: Scored,
  *,
  limit: Float[Array, ''],
  key: Key[Array, ''],
  axis_name: str | None = None,
) -> Bool[Array, 'B'] | Bool[Array, 'B T']:
  """Rows, or with scope='prefix' tokens, inside the trust region.

  `limit` is the followed limit of the first mask. A row that is not usable keeps nothing. Slots of
  a row after its last token are kept where that is: a row is kept whole where all its slots are.
  Rows that are segments of a trajectory are judged as one row.
  """
  if scored.trajectory is not None:
    whole = segments.joined(scored)
    kept = keep(method, whole, limit=limit, key=key, axis_name=axis_name)
    return segments.apart(kept, scored.trajectory)
  criteria = method.masks
  if method.follow is not None:
    criteria = (dataclasses.replace(criteria[0], limit=limit), *criteria[1:])
  region = masks.all_of(*criteria)
  prefixes = method.scope == 'prefix'
  usable = scored.usable[:, None] if prefixes else scored.usable
  judged = scored.divergences
  if method.judge == 'anchor':
    log_ratio = raised(scored.recomputed_logp) - raised(scored.rollout_logp)
    judged = dataclasses.replace(judged, kl=None, tv=None, chi2=None, log_ratio=log_ratio)
  inside = (region.prefix if prefixes else region)(judged, scored.valid) & usable
  if method.control == 'none':
    return inside
  lengths = scored.valid.sum(-1) if method.control == 'length_matched' else None
  deal = masks.permuted_prefixes if prefixes else masks.permuted
  return deal(inside, key, usable=scored.usable, lengths=lengths, axis_name=axis_name) & usable


def bounded(
  method: Method, scored: Scored, lower: Divergences, *, limit: Float[Array, '']
) -> Scored:
  """`scored`, whose divergences are upper bounds, with both bounds and judged on the method's.

  `lower` holds the lower bounds. `limit` as for `keep`.
  """
  upper = scored.divergences
  plain = dataclasses.replace(method, control='none')
  whole = {}
  for name, seen in (('upper', upper), ('lower', lower)):
    kept = keep(
      plain, dataclasses.replace(scored, divergences=seen), limit=limit, key=jax.random.key(0)
    )
    whole[name] = kept if kept.ndim == 1 else kept.all(-1)
  bounds = Bounds(Bracket(lower.kl, upper.kl), Bracket(lower.tv, upper.tv), **whole)
  judged = upper if method.bound == 'upper' else lower
  return dataclasses.replace(scored, divergences=judged, bounds=bounds)


def per_token(method: Method, scored: Scored, advantages: Advantages) -> Float[Array, 'B T']:
  """The method's objective per token, to be maximised; gradient to `scored.logp`.

  Parts that look at the whole batch, or draw, take `axis_name` and `key` from `scored`.
  """
  value = method.surrogate(scored, advantages)
  for weight in method.weights:
    value = surrogates.weighed(value, weight(scored))
  for gate in method.gates:
    value = jnp.where(gate(scored, advantages), value, 0)
  return value


def _advantages(method, scored, kept, samples):
  rows = masks.rows_kept(kept, scored.valid)
  how = dict(pool=method.baseline_pool)
  how |= dict(group_size=samples) if scored.groups is None else dict(groups=scored.groups)
  if isinstance(method.advantage, OfScored):
    return method.advantage(scored, rows, **how)
  return method.advantage(scored.reward, rows, exists=scored.valid.any(-1), **how)


def objective(
  method: Method,
  scored: Scored,
  *,
  samples: int | None = None,
  limit: Float[Array, ''],
  key: Key[Array, ''],
  axis_name: str | None = None,
) -> tuple[Mean, Bool[Array, 'B'] | Bool[Array, 'B T'], Advantages]:
  """(surrogate as local total and count, what `keep` keeps, advantages). Gradient to `scored.logp`.

  Rows are this device's; groups of `samples` rows, or of one id in `scored.groups`, are whole, and
  so are trajectories, which count as one row each. A constant length is the slots of a row. The
  mean is not yet summed over `axis_name`.
  """
  trajectory, slots = scored.trajectory, scored.valid.shape[-1]
  if trajectory is not None:
    scored = segments.joined(scored)
  # The control draws from the key itself.
  scored = dataclasses.replace(scored, key=jax.random.fold_in(key, 1), axis_name=axis_name)
  kept = keep(method, scored, limit=limit, key=key, axis_name=axis_name)
  advantages = _advantages(method, scored, kept, samples)
  mean = surrogates.aggregate(
    per_token(method, scored, advantages),
    scored.valid,
    kept,
    reduce_tokens=method.reduce_tokens,
    normalize_by=method.normalize_by,
    constant=slots,
  )
  if trajectory is not None:
    kept, advantages = (segments.apart(x, trajectory) for x in (kept, advantages))
  return mean, kept, advantages


def penalty(
  method: Method,
  kl: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  kept: Bool[Array, 'B'] | Bool[Array, 'B T'],
  trajectory: Int[Array, 'B'] | None = None,
) -> Mean:
  """KL(policy || reference) as local total and count, over all tokens or the kept ones.

  Rows of one id in `trajectory` count as one row, as in `objective`.
  """
  slots = valid.shape[-1]
  if trajectory is not None:
    kl, valid = segments.together(kl, trajectory), segments.valid_together(valid, trajectory)
    kept = kept if kept.ndim == 1 else segments.together(kept, trajectory)
  rows = kept if method.kl_scope == 'kept' else jnp.ones_like(kept)
  by = method.normalize_by
  if method.kl_scope == 'all':
    by = 'tokens' if 'tokens' in by else 'total'
  return surrogates.aggregate(
    kl,
    valid,
    rows,
    reduce_tokens=method.reduce_tokens,
    normalize_by=by,
    constant=slots,
  )
