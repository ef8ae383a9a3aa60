"""Did the policy improve? Proofs from rollouts alone, by importance sampling.

Each certificate is a lower confidence bound of J(policy) - J(rollout) from the rows of one batch:
log-ratios and rewards. The unit is the prompt: the `samples` rows of one prompt adjoin, share its
difficulty and are averaged before anything is concluded.

| certificate          | mean of                         | on rows of     |
| -------------------- | ------------------------------- | -------------- |
| `improvement`        | R (W - 1)                       | the rollout    |
| `harm`               | (1 - R)(W - 1), the alarm       | the rollout    |
| `retrospective`      | (1 - R)(W' - 1), W' = old / new | the new policy |
| `retrospective_harm` | R (W' - 1), the alarm           | the new policy |

W = prod_t ratio_t. They need log-ratios and rewards, nothing else: no divergence, no limit, no
bound. `certificates.surrogate` has those that go by way of the surrogate and its error bound; in
`experiments.certificate_coverage` none of them fires more often. A mask has no place in a
certificate: every rejected row costs its reward. A row without tokens does not exist.

What voids all of them:
- Rows that the policy was fitted on. Minibatch j may certify the policy before its update
  (prequential: what training logs), the next batch the step before (`retrospective`).
- Rows chosen by their reward: dynamic sampling, retries, best of n. Keep the unfiltered rows; a
  row that was lost counts as the worst: give it a NaN reward and its first slot as valid.
- Wrong log-probs: `log_ratio` must hold the probabilities the tokens were really drawn with. A mean
  of W above 1 is impossible otherwise and is reported as `void`; errors that lower W stay unseen.
- Prompts that are not independent: J is that of the distribution they are drawn from, which a fixed
  list without replacement is not; nor may one row change another (expert capacity).
- Claims in great number: alpha is per claim, per step and per direction (`confidence.spent`).
"""

import dataclasses
import decimal
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trm_jax import bounds
from trm_jax.certificates import confidence
from trm_jax.certificates.confidence import Real
from trm_jax.divergences.ratios import LOG_RATIO_CAP
from trm_jax.types import InputError

UP, DOWN = 'J(policy) > J(rollout)', 'J(policy) < J(rollout)'


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
  """One claim about the two policies and what the rows say about it; in units of the reward.

  A proof for any number of prompts, as far as nothing voids it (see the head of this module).

  Attributes:
    claim: what would be certified.
    alpha: chance to certify a false claim.
    estimate: mean of the certificate's variable over prompts, an estimate of a lower bound of the
      change in the claim's direction.
    lower: the bound that holds with probability 1 - alpha.
    square: mean of the variable's square over prompts, in units of the squared reward, for
      `over_steps`; NaN where that does not hold: the variable may fall below -1 of the unit reward.
    log_evalue: log of an e-value against "not the claim"; those of fresh batches add up. NaN where
      the bound does not come from one.
    possible: whether some other reward would have been certified on these rows.
    void: the mean of W is above 1 with the same confidence: the log-probs are wrong.
    terms: what makes up `estimate`; they sum to it.
  """

  claim: str = dataclasses.field(metadata=dict(static=True))
  alpha: Float[Array, '']
  estimate: Float[Array, '']
  lower: Float[Array, '']
  square: Float[Array, '']
  log_evalue: Float[Array, '']
  possible: Bool[Array, '']
  void: Bool[Array, '']
  terms: dict[str, Float[Array, '']]

  @property
  def verdict(self) -> str:
    """In plain words, and never more than was proven; concrete certificates only."""
    if self.void:
      return 'void: the mean weight is above 1, so that the log-probs cannot be right'
    if self.lower > 0:
      level, least = _level(float(self.alpha)), _down(float(self.lower))
      return f'certified ({level} %): {self.claim} by at least {least}'
    if not self.possible:
      return f'vacuous: no reward could certify {self.claim} on these rows'
    return f'not certified: {self.claim}'


def _level(alpha: float) -> str:
  """1 - alpha in percent, rounded down: three digits of alpha are told, so that 100 never is."""
  share = decimal.Decimal(f'{100 * alpha:.6g}')  # six digits: 0.05 in float32 is 0.0500000007
  share = share.quantize(decimal.Decimal(1).scaleb(share.adjusted() - 2), decimal.ROUND_CEILING)
  return f'{(100 - share).normalize():f}'


def _down(x: float) -> str:
  """x > 0 to three digits, rounded down."""
  unit = 10.0 ** (math.floor(math.log10(x)) - 2)
  return f'{math.floor(x / unit) * unit:.3g}'


def unit_reward(
  reward: Float[Array, 'B'], *, low: float = 0.0, high: float = 1.0
) -> Float[Array, 'B']:
  """(reward - low) / (high - low) in [0, 1], or NaN.

  A reward outside raises InputError; where it is traced it becomes NaN, which counts as missing.
  """
  width = bounds.width(low, high)
  outside = (reward < low) | (reward > high)
  if not isinstance(outside, jax.core.Tracer) and outside.any():
    raise InputError(
      f'reward={np.asarray(reward)[outside][0]} lies outside [{low}, {high}]: give the range of'
      ' rewards as low and high.'
    )
  return jnp.where(outside, jnp.nan, (reward - low) / width)


def by_prompt(
  x: Float[Array, 'B'], samples: int, exists: Bool[Array, 'B'] | None = None
) -> Float[Array, 'N']:
  """Mean over the `samples` adjoining rows of each prompt that exist: the independent units.

  0 for a prompt of which no row exists; such a unit is none.
  """
  if samples < 1 or x.size == 0 or x.size % samples:
    raise InputError(
      f'samples={samples} does not divide the {x.size} rows into prompts: pass whole groups.'
    )
  exists = jnp.ones_like(x, bool) if exists is None else exists
  count = exists.reshape(-1, samples).sum(-1)
  total = jnp.where(exists, x, 0).reshape(-1, samples).sum(-1)
  return total / jnp.maximum(count, 1).astype(x.dtype)


def log_weight(
  log_ratio: Float[Array, 'B T'], valid: Bool[Array, 'B T'], *, cap: float = LOG_RATIO_CAP
) -> Float[Array, 'B']:
  """log W = sum_t log_ratio, at most `cap`; -inf where a valid log_ratio is not finite.

  Any smaller W is legal, so that rows that cannot be judged count as W = 0 and need no care.
  """
  usable = jnp.isfinite(jnp.where(valid, log_ratio, 0)).all(-1)
  total = jnp.where(valid & usable[:, None], log_ratio, 0).sum(-1)
  return jnp.where(usable, jnp.minimum(total, cap), -jnp.inf)


def conclude(
  terms: dict[str, Float[Array, 'B']],
  best: Float[Array, 'B'],
  missing: Bool[Array, 'B'],
  excess: Float[Array, 'B'],
  exists: Bool[Array, 'B'],
  *,
  claim: str = UP,
  floor: Real = -1.0,
  samples: int,
  alpha: Real,
  width: float,
  less: Real | None = None,
) -> Certificate:
  """A certificate from rows: `terms` sum to the variable, `best` is it under the kindest reward.

  `floor` is below every possible value and stands for rows that are `missing`; `less` is subtracted
  from the mean; `excess` is W - 1 or less. Rows that do not exist count nowhere.
  """
  units = by_prompt(exists.astype(best.dtype), samples) > 0
  each = lambda rows: by_prompt(rows, samples, exists)
  mean = lambda x: x.sum() / jnp.maximum(units.sum(), 1).astype(x.dtype)
  bound = lambda x, low: confidence.betting(x, alpha=alpha, low=low, exists=units)
  terms = {name: jnp.where(missing, 0, rows) for name, rows in terms.items()}
  terms['missing'] = jnp.where(missing, floor, jnp.zeros_like(best))
  x = each(sum(terms.values()))
  means = {name: mean(each(rows)) * width for name, rows in terms.items()}
  if less is not None:
    means['less'] = -less * jnp.asarray(width, x.dtype)
  less = 0.0 if less is None else less
  lower = bound(x, floor)
  return Certificate(
    claim=claim,
    alpha=jnp.asarray(alpha, x.dtype),
    estimate=(mean(x) - less) * width,
    lower=(lower - less) * width,
    square=mean(x**2) * width**2,
    log_evalue=confidence.log_evalue(x, low=floor, exists=units),
    # What is certified was possible, whatever the last digit of the other bound.
    possible=jnp.maximum(bound(each(jnp.where(missing, floor, best)), floor), lower) > less,
    void=bound(each(excess), -1.0) > 0,
    terms=means,
  )


def _claim(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  share: Callable[[Float[Array, 'B']], Float[Array, 'B']],
  claim: str,
  *,
  samples: int,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
  cap: float = LOG_RATIO_CAP,
) -> Certificate:
  """The mean of share(R) (m - 1): what all four certificates are."""
  confidence.check_alpha(alpha)
  if not (log_ratio.shape == valid.shape and reward.shape == valid.shape[:1]):
    raise InputError(
      f'log_ratio has shape {log_ratio.shape}, valid {valid.shape} and reward {reward.shape}: make'
      ' them [B, T], [B, T] and [B].'
    )
  exists = valid.any(-1)
  r = share(unit_reward(jnp.where(exists, reward, low), low=low, high=high))
  excess = jnp.expm1(log_weight(log_ratio, valid, cap=cap))
  gain = jnp.maximum(excess, 0)
  terms = dict(gained=r * gain, lost=r * jnp.minimum(excess, 0))
  settings = dict(claim=claim, samples=samples, alpha=alpha, width=bounds.width(low, high))
  return conclude(terms, gain, jnp.isnan(r), excess, exists, **settings)


_reward = lambda r: r
_missed = lambda r: 1 - r


def improvement(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  *,
  samples: int,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
  cap: float = LOG_RATIO_CAP,
) -> Certificate:
  """J(policy) - J(rollout) >= E_roll[R (m - 1)] for every 0 <= m <= W; here m = min(W, e^cap).

  Equal for m = W where the rollout has the policy's support. Bounded below by -1, so that betting
  is exact with unbounded weights.

  Args:
    log_ratio: policy - rollout, of rows drawn by the rollout; NaN counts as the worst it can be.
    valid: the policy's own tokens; a row without any does not exist.
    reward: in [low, high]; NaN counts as the worst it can be.
    samples: rows of each prompt, which adjoin: prompts are the independent units.
    alpha: chance to certify what is false.
    low, high: range of the reward, in whose units the result is.
    cap: largest log W.

  Raises InputError for a reward outside [low, high] and rows that `samples` does not divide.

  >>> log_ratio = jnp.full((400, 1), .2)  # of 400 prompts, one row each
  >>> log_ratio = log_ratio.at[::2].set(-.25)
  >>> valid, reward = jnp.ones((400, 1), bool), (log_ratio[:, 0] > 0) * 1.
  >>> trm.improvement(log_ratio, valid, reward, samples=1).verdict
  'certified (95 %): J(policy) > J(rollout) by at least 0.0901'
  """
  settings = dict(samples=samples, alpha=alpha, low=low, high=high, cap=cap)
  return _claim(log_ratio, valid, reward, _reward, UP, **settings)


def harm(log_ratio, valid, reward, **settings) -> Certificate:
  """The alarm: J(rollout) - J(policy) >= E_roll[(1 - R)(m - 1)]; roll back where it is certified.

  `improvement` of 1 - R, with its arguments and errors; `lower` is that of the fall.

  >>> log_ratio = jnp.full((400, 1), .2)  # of 400 prompts, one row each
  >>> log_ratio = log_ratio.at[::2].set(-.25)
  >>> valid, reward = jnp.ones((400, 1), bool), (log_ratio[:, 0] > 0) * 1.
  >>> trm.harm(log_ratio, valid, 1 - reward, samples=1).verdict
  'certified (95 %): J(policy) < J(rollout) by at least 0.0901'
  """
  return _claim(log_ratio, valid, reward, _missed, DOWN, **settings)


def retrospective(log_ratio, valid, reward, **settings) -> Certificate:
  """J(new) - J(old) >= E_new[(1 - R)(m - 1)] for 0 <= m <= old / new, on rows of the *new* policy.

  log_ratio = old - new. The rollouts of step k + 1 are drawn after the policy is fixed, so that
  they certify step k with no data of its own; the cost is one scoring pass under the old weights.
  Other arguments and errors as for `improvement`.
  """
  return _claim(log_ratio, valid, reward, _missed, 'J(new) > J(old)', **settings)


def retrospective_harm(log_ratio, valid, reward, **settings) -> Certificate:
  """The alarm of `retrospective`: J(old) - J(new) >= E_new[R (m - 1)]; its arguments and errors."""
  return _claim(log_ratio, valid, reward, _reward, 'J(new) < J(old)', **settings)


def over_steps(
  estimate: Float[Array, 'K'],
  square: Float[Array, 'K'],
  *,
  prompts: int,
  low: float,
  high: float,
  alpha: Real = 0.05,
  bet: float = 0.1,
) -> Float[Array, '']:
  """Lower bound of the mean gain of K steps, at all times at once, in units of the reward.

  From the `estimate` and `square` of K certificates of `prompts` prompts each, where one step is
  too small to certify and twenty may not be. low, high: the range of the reward that those were
  made with, 0 and 1 for what `monitor` logs; nothing here would show a wrong one, hence no default.
  `bet` is chosen beforehand (`confidence.cumulative`). NaN for certificates by way of the
  surrogate, for which this does not hold.
  """
  width = bounds.width(low, high)
  total, squares = prompts * estimate.sum() / width, prompts * square.sum() / width**2
  bound = confidence.cumulative(total, squares, alpha=alpha, bet=bet)
  return bound * width / (prompts * estimate.size)


def monitor(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  *,
  samples: int,
  alpha: Real = 0.05,
  backwards: bool = False,
) -> dict[str, Float[Array, '']]:
  """Scalars to log each step: bounds and e-values of `improvement` and of `harm`.

  With `backwards` those of `retrospective` and `retrospective_harm`, from log_ratio = old - new.
  For R in [0, 1]; a reward outside counts as missing. `correlation` is that of R and W: a
  certificate fires where it exceeds about z / sqrt(rows), whatever the size of the step. `void` is
  1 where the log-probs cannot be right; `square` serves `over_steps`. With several minibatches an
  epoch the claims are about the average of the policies before each update.

  >>> log_ratio = jnp.full((400, 1), .2)  # of 400 prompts, one row each
  >>> log_ratio = log_ratio.at[::2].set(-.25)
  >>> valid, reward = jnp.ones((400, 1), bool), (log_ratio[:, 0] > 0) * 1.
  >>> logged = trm.monitor(log_ratio, valid, reward, samples=1)
  >>> f"{logged['certificate/estimate']:.3f} {logged['certificate/lower']:.4f}"
  '0.111 0.0901'
  """
  up, down = (retrospective, retrospective_harm) if backwards else (improvement, harm)
  r = jnp.where((reward < 0) | (reward > 1), jnp.nan, reward)
  up, down = (make(log_ratio, valid, r, samples=samples, alpha=alpha) for make in (up, down))
  excess = jnp.expm1(log_weight(log_ratio, valid))
  known = ~jnp.isnan(r) & valid.any(-1)
  count = jnp.maximum(known.sum(), 1).astype(r.dtype)
  mean = lambda x: jnp.where(known, x, 0).sum() / count
  r, excess = r - mean(r), excess - mean(excess)
  spread = jnp.sqrt(mean(r**2) * mean(excess**2))
  scalars = {
    'estimate': up.estimate,
    'square': up.square,
    'lower': up.lower,
    'log_evalue': up.log_evalue,
    'harm_lower': down.lower,
    'harm_log_evalue': down.log_evalue,
    'correlation': jnp.where(spread > 0, mean(r * excess) / spread, 0),
    'void': up.void.astype(excess.dtype),
  }
  folder = 'retrospective' if backwards else 'certificate'
  return {f'{folder}/{name}': x for name, x in scalars.items()}
