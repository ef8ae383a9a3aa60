"""Did the policy improve? Proofs from rollouts alone, by importance sampling.

Each certificate is a lower confidence bound of J(policy) - J(rollout) from the rows of one batch:
log-ratios and rewards. The unit is the prompt: the `samples` rows of one
prompt adjoin, share its difficulty and are averaged before anything is concluded.

| certificate     | mean of                         | on rows of   |
| --------------- | ------------------------------- | ------------ |
| `improvement`   | R (W - 1)                       | the rollout  |
| `harm`          | (1 - R)(W - 1), the alarm       | the rollout  |
| `retrospective` | (1 - R)(W' - 1), W' = old / new | the new policy |

W = prod_t ratio_t. They need log-ratios and rewards, nothing else: no divergence, no limit, no
bound. `surrogate_certificate` has those that go by way of the surrogate and its error bound; these
fire wherever those do. A mask has no place in a certificate: every rejected row costs its reward.

What voids all of them:
- Rows that the policy was fitted on. Minibatch j may certify the policy before its update
  (prequential: what training logs), the next batch the step before (`retrospective`).
- Rows chosen by their reward: dynamic sampling, retries, best of n. Keep the unfiltered rows.
- Wrong log-probs: `log_ratio` must hold the probabilities the tokens were really drawn with.
- A claim a step: divide alpha (`confidence.spent`).
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trm_jax import bounds, confidence
from trm_jax.confidence import Real
from trm_jax.importance import LOG_RATIO_CAP
from trm_jax.types import InputError

UP, DOWN = 'J(policy) > J(rollout)', 'J(policy) < J(rollout)'
EXACT, ASYMPTOTIC = 'finite-sample', 'asymptotic'


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
  """One claim about the two policies and what the rows say about it; in units of the reward.

  Attributes:
    claim: what would be certified.
    guarantee: 'finite-sample' (a proof, for any number of prompts) or 'asymptotic' (none).
    alpha: chance to certify a false claim.
    estimate: mean of the certificate's variable over prompts, an estimate of a lower bound of the
      change in the claim's direction.
    lower: the bound that holds with probability 1 - alpha.
    possible: whether some other reward would have been certified on these rows.
    log_evalue: log of an e-value against "not the claim"; those of fresh batches add up. NaN where
      the bound does not come from one.
    terms: what makes up `estimate`; they sum to it.
  """

  claim: str = dataclasses.field(metadata=dict(static=True))
  guarantee: str = dataclasses.field(metadata=dict(static=True))
  alpha: Float[Array, '']
  estimate: Float[Array, '']
  lower: Float[Array, '']
  possible: Bool[Array, '']
  log_evalue: Float[Array, '']
  terms: dict[str, Float[Array, '']]

  @property
  def verdict(self) -> str:
    """In plain words, and never more than was proven; concrete certificates only."""
    if self.guarantee == EXACT and self.lower > 0:
      return f'certified: {self.claim} by at least {float(self.lower):.3g}'
    if not self.possible:
      return f'vacuous: no reward could certify {self.claim} on these rows'
    if self.lower > 0:
      return f'not certified: {self.claim} looks likely ({ASYMPTOTIC}), which proves nothing'
    return f'not certified: {self.claim}'


def unit_reward(
  reward: Float[Array, 'B'], *, low: float = 0.0, high: float = 1.0
) -> Float[Array, 'B']:
  """(reward - low) / (high - low) in [0, 1]; InputError for a concrete reward outside."""
  width = bounds.width(low, high)
  if not isinstance(reward, jax.core.Tracer):
    seen = np.asarray(reward)
    wrong = (seen < low) | (seen > high)
    if wrong.any():
      raise InputError(
        f'reward={seen[wrong].flat[0]} lies outside [{low}, {high}]: give the range of rewards as'
        ' low and high.'
      )
  return (reward - low) / width


def by_prompt(x: Float[Array, 'B'], samples: int) -> Float[Array, 'N']:
  """Mean over the `samples` adjoining rows of each prompt: the independent units."""
  if samples < 1 or x.size == 0 or x.size % samples:
    raise InputError(
      f'samples={samples} does not divide the {x.size} rows into prompts: pass whole groups.'
    )
  return x.reshape(-1, samples).mean(-1)


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
  *,
  claim: str = UP,
  low: Real = -1.0,
  samples: int,
  alpha: Real,
  width: float,
  bound: Callable[[Float[Array, 'N']], Float[Array, '']] | None = None,
  less: Real | None = None,
  guarantee: str = EXACT,
) -> Certificate:
  """A certificate from rows: `terms` sum to the variable, `best` is it under the kindest reward.

  `low` is below every possible value and stands for rows that are missing; `less` is subtracted.
  The bound is `confidence.betting`, unless another is given.
  """
  confidence.check_alpha(alpha)
  bets = bound is None
  bound = bound or (lambda x: confidence.betting(x, alpha=alpha, low=low))
  terms = {name: jnp.where(missing, 0, rows) for name, rows in terms.items()}
  terms['missing'] = jnp.where(missing, low, jnp.zeros_like(best))
  x = by_prompt(sum(terms.values()), samples)
  found = {name: by_prompt(rows, samples).mean() * width for name, rows in terms.items()}
  if less is not None:
    found['less'] = -less * jnp.asarray(width, x.dtype)
  less = 0.0 if less is None else less
  return Certificate(
    claim=claim,
    guarantee=guarantee,
    alpha=jnp.asarray(alpha, x.dtype),
    estimate=(x.mean() - less) * width,
    lower=(bound(x) - less) * width,
    possible=bound(by_prompt(jnp.where(missing, low, best), samples)) > less,
    log_evalue=confidence.log_evalue(x, low=low) if bets else jnp.full_like(x[0], jnp.nan),
    terms=found,
  )


# Importance sampling: every term observed, no divergence, no limit, no full support.


def _weighted(log_ratio, valid, r, *, cap, **settings) -> Certificate:
  """The mean of r (m - 1)."""
  excess = jnp.expm1(log_weight(log_ratio, valid, cap=cap))
  terms = dict(gained=r * jnp.maximum(excess, 0), lost=r * jnp.minimum(excess, 0))
  return conclude(terms, jnp.maximum(excess, 0), jnp.isnan(r), **settings)


def improvement(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  *,
  samples: int = 1,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
  cap: float = LOG_RATIO_CAP,
) -> Certificate:
  """J(policy) - J(rollout) >= E_roll[R (m - 1)] for every 0 <= m <= W; here m = min(W, e^cap).

  Equal for m = W where the rollout has the policy's support. R in [0, 1] after rescaling from
  [low, high]; the result is in the reward's own units. Bounded below by -1, so that betting is
  exact with unbounded weights. log_ratio = policy - rollout, of rows drawn by the rollout; a NaN
  log_ratio or reward counts as the worst it can be. Raises InputError for a concrete reward outside
  [low, high] and rows that `samples` does not divide.
  """
  r = unit_reward(reward, low=low, high=high)
  settings = dict(samples=samples, alpha=alpha, width=bounds.width(low, high), cap=cap)
  return _weighted(log_ratio, valid, r, claim=UP, **settings)


def harm(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  *,
  samples: int = 1,
  alpha: Real = 0.05,
  low: float = 0.0,
  high: float = 1.0,
  cap: float = LOG_RATIO_CAP,
) -> Certificate:
  """The alarm: J(rollout) - J(policy) >= E_roll[(1 - R)(m - 1)]; roll back where it is certified.

  `improvement` of 1 - R, with its arguments and errors; `lower` is that of the fall.
  """
  r = unit_reward(reward, low=low, high=high)
  settings = dict(samples=samples, alpha=alpha, width=bounds.width(low, high), cap=cap)
  return _weighted(log_ratio, valid, 1 - r, claim=DOWN, **settings)


def retrospective(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  **settings,
) -> Certificate:
  """J(new) - J(old) >= E_new[(1 - R)(m - 1)] for 0 <= m <= old / new, on rows of the *new* policy.

  log_ratio = old - new. The rollouts of step k + 1 are drawn after the policy is fixed, so that
  they certify step k with no data of its own; the cost is one scoring pass under the old weights.
  Arguments and errors of `improvement`.
  """
  found = harm(log_ratio, valid, reward, **settings)
  return dataclasses.replace(found, claim='J(new) > J(old)')


def monitor(
  log_ratio: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  reward: Float[Array, 'B'],
  *,
  samples: int,
  alpha: Real = 0.05,
  backwards: bool = False,
) -> dict[str, Float[Array, '']]:
  """Scalars to log each step: estimate, bounds and e-values of `improvement` and `harm`.

  With `backwards` those of `retrospective` and of its opposite, from log_ratio = old - new. For R
  in [0, 1]; NaN for a batch with a reward outside. `correlation` is that of R and W: a certificate
  fires where it exceeds about z / sqrt(rows), whatever the size of the step. `square` is the mean
  of x^2 over prompts, which `confidence.cumulative` needs beside the estimate.
  """
  outside = ((reward < 0) | (reward > 1)).any()
  r = jnp.clip(reward, 0, 1)
  up, down = (harm, improvement) if backwards else (improvement, harm)
  up, down = (make(log_ratio, valid, r, samples=samples, alpha=alpha) for make in (up, down))
  excess = jnp.expm1(log_weight(log_ratio, valid))
  x = by_prompt((1 - r if backwards else r) * excess, samples)
  spread = r.std() * excess.std()
  covariance = ((r - r.mean()) * (excess - excess.mean())).mean()
  found = {
    'estimate': up.estimate,
    'square': (x**2).mean(),
    'lower': up.lower,
    'log_evalue': up.log_evalue,
    'harm': down.lower,
    'harm_log_evalue': down.log_evalue,
    'correlation': jnp.where(spread > 0, covariance / spread, 0),
  }
  folder = 'retrospective' if backwards else 'certificate'
  return {f'{folder}/{name}': jnp.where(outside, jnp.nan, x) for name, x in found.items()}
