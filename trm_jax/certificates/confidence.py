"""Lower confidence bounds of a mean, from samples that may be as skewed as importance weights.

| function              | needs             | holds                                           |
| --------------------- | ----------------- | ----------------------------------------------- |
| `betting`             | x >= low          | for every sample size; x may be unbounded above |
| `empirical_bernstein` | low <= x <= high  | for every sample size                           |
| `catoni`              | Var x <= variance | for every sample size; x unbounded both ways    |
| `cumulative`          | x >= -1, adapted  | at all times at once; means may move            |
| `normal`              | nothing           | asymptotically only: rare disasters escape it   |

`x` [N] holds one value per independent unit; the first two of them take `exists` [N], and units
that do not exist count nowhere. P(mean < bound) <= alpha. NaN, and no bound at all, where a unit is
not finite. Pure functions of arrays, float32 or float64 as given. InputError for a concrete alpha
outside (0, 1).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trm_jax.types import InputError

Real = Array | np.ndarray | float | int
# Mixed with equal weight, so that no bet is tuned on the data: no step beyond twice the best one.
BETS = tuple(0.9 * 2.0**-g for g in range(10))


def check_alpha(alpha) -> None:
  """Refuses an error probability that is none."""
  if not isinstance(alpha, jax.core.Tracer) and not 0 < float(alpha) < 1:
    raise InputError(f'alpha={alpha} must lie strictly between 0 and 1, e.g. 0.05.')


def _known(x: Array, bound: Array) -> Array:
  """`bound`, or NaN where a unit is not finite; a maximum over them may drop NaN (XLA, CPU)."""
  return jnp.where(jnp.isfinite(x).all(-1), bound, jnp.nan)


def log_evalue(
  x: Float[Array, 'N'],
  *,
  mean: Real = 0.0,
  low: Real = -1.0,
  exists: Bool[Array, 'N'] | None = None,
) -> Float[Array, '']:
  """log of an e-value against "E x <= mean", for x >= low, low < mean; in (-inf, inf).

      log mean_g prod_i (1 + bet_g (x_i - mean) / (mean - low))

  Under the null every factor has expectation <= 1, so that P(sup_n e >= 1 / alpha) <= alpha (Ville)
  and the data may be looked at as often as one likes. The order of x does not matter.
  """
  bets = jnp.asarray(BETS, x.dtype)[:, None]
  step = (x - mean) / (mean - low)
  step = step if exists is None else jnp.where(exists, step, 0)
  growth = jnp.log1p(bets * step[None]).sum(-1)
  return jax.nn.logsumexp(growth) - math.log(len(BETS))


def betting(
  x: Float[Array, 'N'],
  *,
  alpha: Real,
  low: Real = -1.0,
  exists: Bool[Array, 'N'] | None = None,
) -> Float[Array, '']:
  """The smallest mean that the bets of `log_evalue` do not reject; in [low, mean of x].

  Exact for every N and without an upper bound on x, hence the default for importance weights. It
  cannot exceed 0 before sum x reaches about (log(1/alpha) + log 10) / 0.9, 5.9 at alpha = 0.05.

  >>> f'{trm.betting(jnp.tile(jnp.array([1., .2]), 100), alpha=.05):.2f}'  # their mean is .6
  '0.51'
  """
  check_alpha(alpha)
  return _betting(x, alpha, low, jnp.ones_like(x, bool) if exists is None else exists)


@jax.jit
def _betting(x, alpha, low, exists):
  x = jnp.where(exists, x, 0)
  wanted = -jnp.log(jnp.asarray(alpha, x.dtype))

  def halve(_, ends):
    below, above = ends
    middle = 0.5 * (below + above)
    rejected = log_evalue(x, mean=middle, low=low, exists=exists) >= wanted
    return jnp.where(rejected, middle, below), jnp.where(rejected, above, middle)

  mean = x.sum() / jnp.maximum(exists.sum(), 1).astype(x.dtype)
  ends = jnp.asarray(low, x.dtype), jnp.maximum(mean, low)
  steps = 60 if x.dtype == jnp.float64 else 30
  return _known(x, jax.lax.fori_loop(0, steps, halve, ends)[0])


def empirical_bernstein(
  x: Float[Array, 'N'], *, alpha: Real, low: Real, high: Real
) -> Float[Array, '']:
  """mean - sqrt(2 s^2 log(2/alpha) / N) - 7 (high - low) log(2/alpha) / (3 (N - 1)).

  Needs N >= 2; s^2 is the unbiased variance. Maurer and Pontil (2009), theorem 4.
  """
  check_alpha(alpha)
  n, tail = x.size, jnp.log(2 / jnp.asarray(alpha, x.dtype))
  range_term = 7 * (high - low) * tail / (3 * (n - 1))
  return _known(x, x.mean() - jnp.sqrt(2 * x.var(ddof=1) * tail / n) - range_term)


def catoni(x: Float[Array, 'N'], *, alpha: Real, variance: Real) -> Float[Array, '']:
  """Catoni's bound for a mean whose variance is known to be at most `variance` > 0.

      sum_i phi(l (x_i - m)) = N l^2 variance / 2 + log(1/alpha),   phi(u) = log(1 + u + u^2 / 2)

  with phi odd and l = sqrt(2 log(1/alpha) / (N variance)). The best exact bound where a budget on
  chi2 is enforced. Catoni (2012).
  """
  check_alpha(alpha)
  if not isinstance(variance, jax.core.Tracer) and not 0 < variance < math.inf:
    raise InputError(f'variance={variance} must be > 0 and finite: the largest that x can have.')
  return _catoni(x, alpha, variance)


@jax.jit
def _catoni(x, alpha, variance):
  n, tail = x.size, -jnp.log(jnp.asarray(alpha, x.dtype))
  rate = jnp.sqrt(2 * tail / (n * variance))
  phi = lambda u: jnp.sign(u) * jnp.log1p(jnp.abs(u) + u**2 / 2)

  def halve(_, ends):
    below, above = ends
    middle = 0.5 * (below + above)
    rejected = phi(rate * (x - middle)).sum() >= n * rate**2 * variance / 2 + tail
    return jnp.where(rejected, middle, below), jnp.where(rejected, above, middle)

  # phi(u) >= e - 1 ~ 1.72 gives a mean of phi above 2 tail / N, so this far below all is rejected.
  reach = jnp.expm1(2 * tail / n) + 1
  ends = x.min() - 2 * reach / rate, x.max()
  steps = 80 if x.dtype == jnp.float64 else 40
  return _known(x, jax.lax.fori_loop(0, steps, halve, ends)[0])


def cumulative(total: Real, squares: Real, *, alpha: Real, bet: float = 0.1) -> Array:
  """Lower bound of sum_i E[x_i | past], at all times at once, from sum_i x_i and sum_i x_i^2.

      total - (log(1/alpha) + (-log(1 - bet) - bet) squares) / bet

  For x_i >= -1 that are adapted, with means that may move: minibatches of an epoch, steps of a run.
  `bet` in (0, 1) is chosen beforehand; the best is about sqrt(2 log(1/alpha) / squares). Fan,
  Grama and Liu (2015).
  """
  check_alpha(alpha)
  if not 0 < bet < 1:
    raise InputError(f'bet={bet} must lie strictly between 0 and 1; choose it before the data.')
  tail = -jnp.log(jnp.asarray(alpha))
  return total - (tail + (-math.log1p(-bet) - bet) * squares) / bet


def normal(x: Float[Array, 'N'], *, alpha: Real) -> Float[Array, '']:
  """mean - z_alpha s / sqrt(N): asymptotic only. It proves nothing, however large the lead."""
  check_alpha(alpha)
  z = jax.scipy.stats.norm.ppf(1 - jnp.asarray(alpha, x.dtype))
  return _known(x, x.mean() - z * x.std(ddof=1) / math.sqrt(x.size))


def spent(alpha: Real, claim: int) -> float:
  """The share of `alpha` for claim number 1, 2, ..: 6 alpha / (pi claim)^2, alpha over all."""
  check_alpha(alpha)
  if claim < 1:
    raise InputError(f'claim={claim} must be >= 1: claims are counted from 1.')
  return 6 * alpha / (math.pi * claim) ** 2
