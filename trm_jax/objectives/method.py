"""A method is a value: surrogate x weights x trust region x advantages x switches.

    Method()                                             the ratio, no mask
    Method(surrogate=part(parts.clip, clip_high=.3))        PPO's clip
    Method(masks=(masks.max_kl(0.2),))                   TRM-Max

The parts are functions (or `types.part`s of them) and are independent: any surrogate goes with any
weight and any mask. `catalogue` holds the published ones by name, `loss` evaluates a method.

With scope='prefix' a row may be kept in part, up to its first context outside. Then

| what                      | counts                                                              |
| ------------------------- | ------------------------------------------------------------------- |
| surrogate, penalty 'kept' | the kept tokens; the others add exactly 0 to value and gradient     |
| reduce_tokens='mean'      | divides by all tokens of the row, kept or not                       |
| normalize_by='total'      | divides by all rows: unbiased for the objective of the kept tokens  |
| 'accepted', and the pool  | rows that keep a token (of the baseline: by their whole reward)     |
| follow                    | rows that are kept to their end                                     |
| control                   | where rows are cut is dealt out anew (`permuted_prefixes`)          |
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array, Bool, Float

from trm_jax.masks import Criterion
from trm_jax.objectives import advantages, parts
from trm_jax.objectives.scored import Advantages, Scored
from trm_jax.objectives.surrogates import NormalizeBy, ReduceTokens
from trm_jax.objectives.weights import Missing
from trm_jax.types import InputError, check_words

# (scored, advantages [B] or [B, T]) -> the objective of each token [B, T], to be maximised.
# Gradient to `scored.logp`.
Surrogate = Callable[[Scored, Advantages], Float[Array, 'B T']]
# scored -> a factor of each token [B, T], detached.
Weight = Callable[[Scored], Float[Array, 'B T']]
# (scored, advantages) -> tokens that count, detached: what depends on the sign of A.
Gate = Callable[[Scored, Advantages], Bool[Array, 'B T']]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follow:
  """Lets the limit of the first mask follow past batches, so that a share of rows is accepted.

  Attributes:
    target: share to accept, strictly between 0 and 1.
    rate: how much of the way (of log limit) the limit goes with each batch, in (0, 1].
    floor: the limit never falls below this, e.g. while weights hardly move.
  """

  target: float
  rate: float = 0.1
  floor: float = 0.0

  def __post_init__(self):
    if not 0 < self.target < 1:
      raise InputError(f'target={self.target} must lie strictly between 0 and 1.')
    if not 0 < self.rate <= 1:
      raise InputError(f'rate={self.rate} must lie in (0, 1].')
    if not self.floor >= 0:
      raise InputError(f'floor={self.floor} must be >= 0.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """What the gradient is made of. The default is the paper's surrogate without any mask.

  Attributes:
    surrogate: the objective per token.
    weights: factors of it.
    gates: tokens that count, given the advantages; a closed one adds exactly 0 and stays in every
      denominator.
    masks: criteria that rows must meet, all of them.
    judge: whose log-ratio against the rollout the masks judge: the policy's at each update, or the
      anchor's (recomputed at the start of the batch, so that a row is judged once).
    scope: judge whole sequences, or keep each one up to its first context outside.
    bound: which end of a certified bracket criteria judge where the rollout stored its likeliest
      tokens: upper = what is kept is inside; lower = what is rejected is outside.
    follow: the first mask's limit is only its first value and then follows past batches.
    control: keep as many rows as the masks would, chosen at random (among rows of nearly equal
      length: length_matched).
    advantage: (reward [B], kept rows [B], group_size= or groups=, pool=, exists=) -> [B] or [B, T],
      or an `advantages.OfScored`, which reads the whole minibatch.
    baseline_pool: which rows shape the baseline: all, or the accepted ones (with or without the row
      itself).
    reduce_tokens, normalize_by: see `surrogates.aggregate`.
    kl_coefficient: weight of KL(policy || policy at RL step 0) in the loss; 0 = not computed.
    kl_scope: whether that penalty covers all rows or the kept ones.
    missing: a log-prob the engine did not report (NaN): see `weights.resolve_missing`.

  >>> method = trm.Method(masks=(trm.max_kl(.2), trm.mean_kl(.01)), normalize_by='accepted')
  >>> [mask.name for mask in method.masks]
  ['max_kl', 'mean_kl']
  """

  surrogate: Surrogate = parts.ratio
  weights: tuple[Weight, ...] = ()
  gates: tuple[Gate, ...] = ()
  masks: tuple[Criterion, ...] = ()
  judge: Literal['policy', 'anchor'] = 'policy'
  scope: Literal['sequence', 'prefix'] = 'sequence'
  bound: Literal['upper', 'lower'] = 'upper'
  follow: Follow | None = None
  control: Literal['none', 'random', 'length_matched'] = 'none'
  advantage: Callable = advantages.group_relative
  baseline_pool: Literal['all', 'accepted', 'loo_accepted'] = 'all'
  reduce_tokens: ReduceTokens = 'sum'
  normalize_by: NormalizeBy = 'total'
  kl_coefficient: float = 0.0
  kl_scope: Literal['all', 'kept'] = 'all'
  missing: Missing = 'reject'

  def __post_init__(self):
    check_words(self, 'method.')
    for criterion in self.masks:
      # A limit may be traced; one that is a number is looked at before any compute.
      if isinstance(criterion.limit, int | float) and not criterion.limit > 0:
        raise InputError(
          f'method.{criterion.name}={criterion.limit} must be > 0: a limit of 0 rejects everything;'
          ' leave it out for no limit.'
        )
      if self.judge == 'anchor' and criterion.reads != 'sampled':
        raise InputError(
          f"method.judge='anchor' knows sampled log-probs alone, but {criterion.name}="
          f'{criterion.limit} reads divergences of the policy: judge the policy, or use a criterion'
          ' on the sampled log-ratio.'
        )
      if self.scope == 'prefix' and criterion.along is None:
        raise InputError(
          f'method.{criterion.name}={criterion.limit} speaks of whole sequences and has no form for'
          " method.scope='prefix'; use max_kl, max_tv, chi2_budget, or scope 'sequence'."
        )
    if self.scope == 'prefix' and not self.masks:
      raise InputError(
        "method.scope='prefix' keeps sequences up to the first context outside a limit, but none"
        ' is set: add one, e.g. method.max_kl.'
      )
    if self.control != 'none' and not self.masks:
      raise InputError(
        'method.random_mask keeps as many rows as a trust region would, but no limit is set: add'
        ' one, e.g. method.max_kl.'
      )
    if self.follow is not None and not self.masks:
      raise InputError(
        f'method.accept={self.follow.target} needs method.max_kl as the first value of the limit:'
        ' set it, e.g. to 0.05.'
      )
    advantage = getattr(self.advantage, 'function', self.advantage)
    if advantage is advantages.group_relative and self.baseline_pool == 'loo_accepted':
      raise InputError(
        "method.baseline_pool='loo_accepted' with method.advantage='group_relative' divides by the"
        " deviation of the other rows, which may be 0; use advantage 'centred' or 'leave_one_out'."
      )
    if not 0 <= self.kl_coefficient < math.inf:
      raise InputError(f'method.kl_coefficient={self.kl_coefficient} must be >= 0 and finite.')

  @property
  def limit(self) -> float:
    """The limit of the first mask, the one that may follow; NaN without a mask."""
    return self.masks[0].limit if self.masks else math.nan

  @property
  def reads_exact(self) -> bool:
    """Whether a mask or the advantage reads what only the whole vocabulary can tell."""
    of_scored = isinstance(self.advantage, advantages.OfScored) and self.advantage.reads == 'exact'
    return of_scored or any(criterion.reads == 'exact' for criterion in self.masks)
