"""A method = trust region x surrogate x advantages x switches, as one setting.

`Method` is the command line's view; `objective` turns it into the pure function that training
differentiates. The masking and the surrogate are independent: any surrogate goes with any mask.

    mismatch ignored   anchor='recomputed'
    PPO-clip           surrogate='clip'
    TIS                anchor='recomputed', weight='tis'
    TRM-Max            max_kl=0.2
    TRM-Combined       max_kl=0.1, mean_kl=0.002
    prefix TRM         max_kl=0.2, scope='prefix'
    decoupled          surrogate='decoupled', anchor='version'

With scope='prefix' a row may be kept in part, up to its first context outside. Then

| what                      | counts                                                              |
| ------------------------- | ------------------------------------------------------------------- |
| surrogate, penalty 'kept' | the kept tokens; the others add exactly 0 to value and gradient     |
| reduce_tokens='mean'      | divides by all tokens of the row, kept or not                       |
| normalize_by='total'      | divides by all rows: unbiased for the objective of the kept tokens  |
| 'accepted', and the pool  | rows that keep a token (of the baseline: by their whole reward)     |
| accept                    | rows that are kept to their end                                     |
| random_mask               | where rows are cut is dealt out anew (`permuted_prefixes`)          |
"""

import dataclasses
import functools
import math
import typing
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import advantages as adv
from trm_jax import importance, surrogates, trust_region
from trm_jax.types import Bracket, Divergences, InputError, Mean, check_words

LIMITS = (
  'max_kl',
  'mean_kl',
  'max_tv',
  'max_k2',
  'mean_k3',
  'length_neutral',
  'mean_deviation',
  'chi2_budget',
)
# Limits that are functions of the contexts up to a token, which can cut a row there.
PREFIX_LIMITS = ('max_kl', 'max_tv', 'chi2_budget')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """What the gradient is made of. The default is the paper's surrogate without any mask."""

  # Objective per token: ratio (unclipped), clip (PPO), or decoupled (clip on drift x engine ratio).
  surrogate: Literal['ratio', 'clip', 'decoupled'] = 'ratio'
  # Denominator of the ratio: what the engine reports (rollout), the trainer's own log-probs at the
  # start of the batch (recomputed: ignores the mismatch), or its log-probs under the weights the
  # engine says it used (version).
  anchor: Literal['rollout', 'recomputed', 'version'] = 'rollout'
  # Weight against what the engine reports: none, or tis = min(anchor / rollout, max_ratio).
  weight: Literal['none', 'tis'] = 'none'
  # Truncation of the engine ratio (tis and decoupled).
  max_ratio: float = 2.0
  # PPO's clip range: 1 - clip_low .. 1 + clip_high (clip and decoupled).
  clip_low: float = 0.2
  clip_high: float = 0.2
  # Trust region: keep a sequence while its largest token KL(rollout || policy) is at most this
  # (nats; TRM-Max). Limits that are set are AND-ed; None = not used.
  max_kl: float | None = None
  # ... while its mean token KL is at most this (nats; TRM-Avg).
  mean_kl: float | None = None
  # ... while its largest token total variation is at most this (0..1).
  max_tv: float | None = None
  # ... while its largest sampled log_ratio^2 / 2 is at most this (no certificate).
  max_k2: float | None = None
  # ... while its mean sampled k3 is at most this (no certificate).
  mean_k3: float | None = None
  # ... while its mean |ratio - 1|, weighted by what the rest of the response can still change, is
  # at most this (LN-TRM).
  length_neutral: float | None = None
  # Limits on token KL (nats) and token TV behind the weights of length_neutral.
  length_neutral_delta: float = 1e-4
  length_neutral_epsilon: float = 5e-3
  # ... while its mean |ratio - 1| is at most this (SER; the paper: 0.03 to 0.1).
  mean_deviation: float | None = None
  # ... while the sum of its tokens' chi2(policy || rollout) is at most this; costs exact chi2.
  chi2_budget: float | None = None
  # Judge whole sequences, or keep each one up to its first context outside (max_kl, max_tv and
  # chi2_budget only).
  scope: Literal['sequence', 'prefix'] = 'sequence'
  # Which end of a certified bracket limits judge where the rollout stored its likeliest tokens
  # (store='topk'): upper = what is kept is inside; lower = what is rejected is outside.
  bound: Literal['upper', 'lower'] = 'upper'
  # Let the max_kl limit follow past batches so that about this share is accepted (0..1); max_kl is
  # then its first value. None = fixed.
  accept: float | None = None
  # How much of the way (of log limit) it goes with each batch: more where divergences change fast.
  accept_rate: float = 0.1
  # ... and it never falls below this many nats, e.g. while weights hardly move.
  accept_floor: float = 0.0
  # Control: keep as many sequences as the trust region would, chosen at random.
  random_mask: bool = False
  # The control keeps as many rows of each length, too: chosen among rows of (nearly) equal length.
  match_length: bool = False
  # Reward minus the group's mean (centred), divided by its deviation too (group_relative), or minus
  # the mean of the others (leave_one_out).
  advantage: Literal['centred', 'group_relative', 'leave_one_out'] = 'group_relative'
  # Which rows shape the baseline: all, or only accepted ones (with or without the row itself;
  # leave_one_out is always without).
  baseline_pool: Literal['all', 'accepted', 'loo_accepted'] = 'all'
  # Tokens of a row: sum (TRM), mean, or sum divided by the response length T (constant).
  reduce_tokens: surrogates.ReduceTokens = 'sum'
  # Divide by all sequences (total, TRM: unbiased) or by the accepted ones.
  normalize_by: surrogates.NormalizeBy = 'total'
  # Weight of KL(policy || policy at RL step 0), exact, added to the loss. 0 = off, not computed.
  kl_coefficient: float = 0.0
  # Whether that penalty covers all rows or only the kept ones.
  kl_scope: Literal['all', 'kept'] = 'all'
  # A log-prob the engine did not report (NaN): reject the row, read it as agreement, or stop.
  missing: importance.Missing = 'reject'

  def __post_init__(self):
    check_words(self, 'method.')
    for name in LIMITS:
      limit = getattr(self, name)
      if limit is not None and not limit > 0:
        raise InputError(
          f'method.{name}={limit} must be > 0: a limit of 0 rejects everything; leave it out for no'
          ' limit.'
        )
    if self.accept is not None and not 0 < self.accept < 1:
      raise InputError(f'method.accept={self.accept} must lie strictly between 0 and 1.')
    if not 0 < self.accept_rate <= 1:
      raise InputError(f'method.accept_rate={self.accept_rate} must lie in (0, 1].')
    if not self.accept_floor >= 0:
      raise InputError(f'method.accept_floor={self.accept_floor} must be >= 0.')
    if self.accept is not None and self.max_kl is None:
      raise InputError(
        f'method.accept={self.accept} needs method.max_kl as the first value of the limit: set it,'
        ' e.g. to 0.05.'
      )
    if self.random_mask and not self.limits:
      raise InputError(
        'method.random_mask keeps as many rows as a trust region would, but no limit is set: add'
        ' one, e.g. method.max_kl.'
      )
    if self.scope == 'prefix':
      for name, limit in self.limits.items():
        if name not in PREFIX_LIMITS:
          raise InputError(
            f'method.{name}={limit} speaks of whole sequences and has no form for method.scope='
            f"'prefix'; use {', '.join(PREFIX_LIMITS)}, or scope 'sequence'."
          )
      if not self.limits:
        raise InputError(
          "method.scope='prefix' keeps sequences up to the first context outside a limit, but none"
          ' is set: add one, e.g. method.max_kl.'
        )
    if self.match_length and not self.random_mask:
      raise InputError('method.match_length says how method.random_mask chooses: set that as well.')
    if self.weight == 'tis' and (self.anchor == 'rollout' or self.surrogate == 'decoupled'):
      raise InputError(
        f"method.weight='tis' weights anchor / rollout, which method.anchor={self.anchor!r} with"
        f' method.surrogate={self.surrogate!r} already holds; use it with anchor recomputed or'
        ' version and surrogate ratio or clip.'
      )
    if self.surrogate == 'decoupled' and self.anchor == 'rollout':
      raise InputError(
        "method.surrogate='decoupled' splits the ratio at the trainer's own log-probs; set"
        " method.anchor to 'version' or 'recomputed'."
      )
    if self.advantage == 'group_relative' and self.baseline_pool == 'loo_accepted':
      raise InputError(
        "method.baseline_pool='loo_accepted' with method.advantage='group_relative' divides by the"
        " deviation of the other rows, which may be 0; use advantage 'centred' or 'leave_one_out'."
      )
    for name in ('max_ratio', 'clip_high', 'length_neutral_delta', 'length_neutral_epsilon'):
      if not getattr(self, name) > 0:
        raise InputError(f'method.{name}={getattr(self, name)} must be > 0.')
    if self.length_neutral_epsilon > 1:
      raise InputError(
        f'method.length_neutral_epsilon={self.length_neutral_epsilon} is a total variation: at most'
        ' 1.'
      )
    if not 0 <= self.clip_low <= 1:
      raise InputError(f'method.clip_low={self.clip_low} must lie in 0..1.')
    if not 0 <= self.kl_coefficient < math.inf:
      raise InputError(f'method.kl_coefficient={self.kl_coefficient} must be >= 0 and finite.')

  @property
  def limits(self) -> dict[str, float]:
    """The limits that are set."""
    return {n: getattr(self, n) for n in LIMITS if getattr(self, n) is not None}


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
  """What a record of the likeliest tokens leaves open.

  Attributes:
    kl, tv: certified bounds per token.
    upper, lower: rows that are inside to their end, judged on either bound: surely inside, and not
      surely outside.
  """

  kl: Bracket
  tv: Bracket
  upper: Bool[Array, 'B']
  lower: Bool[Array, 'B']


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
  """A minibatch after the forward pass: all that a method may look at.

  Attributes:
    logp: policy log-prob of each sampled token; the only field that carries a gradient.
    rollout_logp: as reported by the engine, missing values resolved.
    recomputed_logp: trainer's numerics, weights at the start of the batch.
    version_logp: trainer's numerics, weights the engine says it used.
    divergences: statistics of (policy, rollout) that criteria read, detached.
    usable: rows whose log-probs allow a judgement at all.
    valid, reward, engine: as in `Rollout`.
    bounds: both bounds, where `divergences` holds one of them; else None.
  """

  logp: Float[Array, 'B T']
  rollout_logp: Float[Array, 'B T']
  recomputed_logp: Float[Array, 'B T']
  version_logp: Float[Array, 'B T']
  divergences: Divergences
  usable: Bool[Array, 'B']
  valid: Bool[Array, 'B T']
  reward: Float[Array, 'B']
  engine: Int[Array, 'B']
  bounds: Bounds | None = None


def keep(
  method: Method,
  scored: Scored,
  *,
  limit: Float[Array, ''],
  key: Key[Array, ''],
  axis_name: str | None = None,
) -> Bool[Array, 'B'] | Bool[Array, 'B T']:
  """Rows, or with scope='prefix' tokens, inside the trust region.

  `limit` is the followed max_kl limit. A row that is not usable keeps nothing. Slots of a row after
  its last token are kept where that is: a row is kept whole where all its slots are.
  """
  limits = method.limits
  if method.accept is not None:
    limits['max_kl'] = limit
  if method.scope == 'prefix':
    return _keep_prefixes(method, limits, scored, key, axis_name)
  weights = dict(epsilon=method.length_neutral_epsilon, delta=method.length_neutral_delta)
  criteria = [
    functools.partial(
      getattr(trust_region, name), limit=value, **(weights if name == 'length_neutral' else {})
    )
    for name, value in limits.items()
  ]
  inside = trust_region.all_of(*criteria)(scored.divergences, scored.valid)
  if method.random_mask:
    lengths = scored.valid.sum(-1) if method.match_length else None
    among = dict(usable=scored.usable, lengths=lengths, axis_name=axis_name)
    inside = trust_region.permuted(inside & scored.usable, key, **among)
  return inside & scored.usable


def _keep_prefixes(method, limits, scored, key, axis_name):
  masks = [
    getattr(trust_region, f'prefix_{name}')(scored.divergences, scored.valid, limit=value)
    for name, value in limits.items()
  ]
  inside = functools.reduce(jnp.logical_and, masks) & scored.usable[:, None]
  if method.random_mask:
    lengths = scored.valid.sum(-1) if method.match_length else None
    among = dict(usable=scored.usable, lengths=lengths, axis_name=axis_name)
    inside = trust_region.permuted_prefixes(inside, key, **among)
  return inside & scored.usable[:, None]


def bounded(
  method: Method, scored: Scored, lower: Divergences, *, limit: Float[Array, '']
) -> Scored:
  """`scored`, whose divergences are upper bounds, with both bounds and judged on the method's.

  `lower` holds the lower bounds. `limit` as for `keep`.
  """
  upper = scored.divergences
  plain = dataclasses.replace(method, random_mask=False, match_length=False)
  whole = {}
  for name, seen in (('upper', upper), ('lower', lower)):
    kept = keep(
      plain, dataclasses.replace(scored, divergences=seen), limit=limit, key=jax.random.key(0)
    )
    whole[name] = kept if kept.ndim == 1 else kept.all(-1)
  bounds = Bounds(Bracket(lower.kl, upper.kl), Bracket(lower.tv, upper.tv), **whole)
  judged = upper if method.bound == 'upper' else lower
  return dataclasses.replace(scored, divergences=judged, bounds=bounds)


def rows_kept(
  kept: Bool[Array, 'B'] | Bool[Array, 'B T'], valid: Bool[Array, 'B T']
) -> Bool[Array, 'B']:
  """Rows that take part: those of a sequence mask, or the rows of which a token is kept."""
  return kept if kept.ndim == 1 else (kept & valid).any(-1)


def per_token(method: Method, scored: Scored, advantages: Float[Array, 'B']) -> Float[Array, 'B T']:
  """The method's objective per token, to be maximised; gradient to `scored.logp`."""
  anchor = {
    'rollout': scored.rollout_logp,
    'recomputed': scored.recomputed_logp,
    'version': scored.version_logp,
  }[method.anchor]
  clip = dict(clip_low=method.clip_low, clip_high=method.clip_high)
  if method.surrogate == 'ratio':
    value = surrogates.ratio_pg(scored.logp, anchor, advantages, scored.valid)
  elif method.surrogate == 'clip':
    value = surrogates.ppo_clip(scored.logp, anchor, advantages, scored.valid, **clip)
  else:
    value = surrogates.decoupled(
      scored.logp,
      anchor,
      scored.rollout_logp,
      advantages,
      scored.valid,
      max_ratio=method.max_ratio,
      **clip,
    )
  if method.weight == 'tis':
    gap = anchor - scored.rollout_logp
    value = value * importance.truncated(gap, scored.valid, max_ratio=method.max_ratio)
  return value


def objective(
  method: Method,
  scored: Scored,
  *,
  samples: int,
  limit: Float[Array, ''],
  key: Key[Array, ''],
  axis_name: str | None = None,
) -> tuple[Mean, Bool[Array, 'B'] | Bool[Array, 'B T'], Float[Array, 'B']]:
  """(surrogate as local total and count, what `keep` keeps, advantages). Gradient to `scored.logp`.

  Rows are this device's; groups of `samples` rows are whole. The mean is not yet summed over
  `axis_name`.
  """
  kept = keep(method, scored, limit=limit, key=key, axis_name=axis_name)
  advantages = getattr(adv, method.advantage)(
    scored.reward,
    rows_kept(kept, scored.valid),
    group_size=samples,
    pool=method.baseline_pool,
  )
  mean = surrogates.aggregate(
    per_token(method, scored, advantages),
    scored.valid,
    kept,
    reduce_tokens=method.reduce_tokens,
    normalize_by=method.normalize_by,
    constant=scored.valid.shape[-1],
  )
  return mean, kept, advantages


def penalty(
  method: Method,
  kl: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  kept: Bool[Array, 'B'] | Bool[Array, 'B T'],
) -> Mean:
  """KL(policy || reference) as local total and count, over all tokens or the kept ones."""
  rows = kept if method.kl_scope == 'kept' else jnp.ones_like(kept)
  by = method.normalize_by if method.kl_scope == 'kept' else 'total'
  return surrogates.aggregate(
    kl,
    valid,
    rows,
    reduce_tokens=method.reduce_tokens,
    normalize_by=by,
    constant=valid.shape[-1],
  )
