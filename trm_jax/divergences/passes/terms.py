"""The summands of every divergence, one vocabulary entry at a time: the formulas and nothing else.

Shared by the XLA forms (`divergences`, `linear_head`) and the TPU kernels, so that each formula
stands once. Notation of this file, for one position:

    b, a    policy and rollout logits (only their -inf matter here)
    q, p    their probabilities
    d       log q - log p, from `log_odds`

Every summand is >= 0 (Bregman form: sum p (exp(d) - 1 - d) is KL because both sides sum to 1), so
nothing cancels between entries, an error e of the normalisers enters as e^2, and identical inputs
give exactly 0. Entries with |d| < 0.35 take a series, the others the closed form.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Below this |log q/p| the closed forms cancel; seven series terms are exact to float32 there.
SERIES_BELOW = 0.35
# exp overflows float32 above; p <= exp(-88) q leaves no digit of p * d behind.
_LARGE = 88.0
# Maxima this far apart mean that one side is shifted: beyond, the shift itself would be rounded.
APART = 2.0


class Terms(NamedTuple):
  """Summands, or sums over the vocabulary, of one pair of distributions.

  Attributes:
    kl: KL(rollout || policy).
    tv: sum |q - p|, twice the total variation.
    reverse_kl: KL(policy || rollout); None in the core set, as the rest.
    chi2: sum q^2 / p - 1.
    square: sum q^2, the probability that two draws of the policy agree.
  """

  kl: Float[Array, '*s']
  tv: Float[Array, '*s']
  reverse_kl: Float[Array, '*s'] | None = None
  chi2: Float[Array, '*s'] | None = None
  square: Float[Array, '*s'] | None = None


def _excess(s):
  """exp(s) - 1 - s for |s| < SERIES_BELOW."""
  return s * s * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s * (1 / 120 + s * (1 / 720 + s / 5040)))))


def bregman(d: Float[Array, '*s']) -> Float[Array, '*s']:
  """exp(d) - 1 - d >= 0, without cancellation at small d; the gradient is as exact."""
  small = jnp.abs(d) < SERIES_BELOW
  far = jnp.where(small, 1, d)
  return jnp.where(small, _excess(jnp.where(small, d, 0)), jnp.expm1(far) - far)


def finite(top):
  """What to subtract from logits: a row of -inf alone stays -inf instead of becoming NaN."""
  return jnp.where(top == -jnp.inf, 0, top)


def odds(top_q, log_sq, top_p, log_sp, inverse):
  """(pivot_q, pivot_p, shift) that make up d = log q - log p; see `log_odds`.

  `top` are largest logits, `log_s` the logs of the sums of exp((logit - top) inverse), `inverse` is
  1 / temperature. b - a is exact where the two are close, which differences of centred logits are
  not: pivots 0. But where one side is shifted by a constant, centring first loses nothing and b - a
  would.
  """
  apart = top_q - top_p
  shifted = ~(jnp.abs(apart) < APART)
  pivots = (jnp.where(shifted, finite(top), 0) for top in (top_q, top_p))
  return *pivots, jnp.where(shifted, 0, apart) * inverse + (log_sq - log_sp)


def log_odds(b, a, pivot_q, pivot_p, shift, inverse):
  """log q - log p of float32 logits b, a; exactly 0 for identical inputs."""
  return ((b - pivot_q) - (a - pivot_p)) * inverse - shift


def excess(d: Float[Array, '*s']) -> Float[Array, '*s']:
  """exp(d) - 1 - d where |d| < SERIES_BELOW, else 0."""
  return _excess(jnp.where(jnp.abs(d) < SERIES_BELOW, d, 0))


def pointwise(d, b, a, q, p, log_q=None) -> Terms:
  """Summands of all divergences at every entry; arrays of one shape. `log_q` asks for the full set.

  -inf logits are probability 0: KL is inf where only the policy has none (a violation) and q where
  only the rollout has none; entries that neither side has add 0. NaN stays NaN, also that of a side
  without any mass (hence q + p where one of the two is 0).
  """
  e = excess(d)
  kl, tv = core(d, e, a, q, p)
  if log_q is None:
    return Terms(kl, tv)
  # q^2/p as one exponential: p may underflow where q^2/p does not.
  return Terms(kl, tv, reverse(d, e, b, q, p), chi2(d, e, b, q, p, jnp.exp(log_q + d)), q * q)


def sound(totals, log_sum_q, log_sum_p):
  """The sums, NaN in every one of a position without a distribution on either side.

  Maxima of summands may have dropped it: see `extremes`.
  """
  has = jnp.isfinite(log_sum_q) & jnp.isfinite(log_sum_p) & ~jnp.isnan(totals.tv)
  return jax.tree.map(lambda x: jnp.where(has, x, jnp.nan), totals)


def core(d, e, a, q, p):
  """Summands of KL(rollout || policy) and of 2 TV; e = excess(d)."""
  small = jnp.abs(d) < SERIES_BELOW
  # p d = 0 where p underflows, but a policy of exactly 0 is infinitely far.
  far = jnp.where(d == -jnp.inf, jnp.inf, q - p - p * jnp.minimum(d, _LARGE))
  kl = jnp.where(a != -jnp.inf, jnp.where(small, p * e, jnp.maximum(far, 0)), q + p)
  rise = d + e  # q/p - 1
  return kl, jnp.where(small, p * jnp.abs(rise), jnp.abs(q - p))


def reverse(d, e, b, q, p):
  """Summand of KL(policy || rollout)."""
  far = jnp.where(d == jnp.inf, jnp.inf, p - q + q * jnp.maximum(d, -_LARGE))
  near = p * (d * (d + e) - e)  # q phi(-d) in terms of phi(d), with q = p (1 + d + e)
  near = jnp.where(jnp.abs(d) < SERIES_BELOW, near, jnp.maximum(far, 0))
  return jnp.where(b != -jnp.inf, near, p + q)


def chi2(d, e, b, q, p, power):
  """Summand of sum (q - p)^2 / p, with power = q^2 / p."""
  rise = d + e
  near = jnp.where(jnp.abs(d) < SERIES_BELOW, p * rise * rise, jnp.maximum(power - 2 * q + p, 0))
  return jnp.where(b != -jnp.inf, near, p + q)


def weighted(v: Float[Array, '*s'], b: Float[Array, '*s']) -> Float[Array, '*s']:
  """v * b with 0 * -inf = 0: the summand of sum exp(b) b, from which the entropy follows."""
  return jnp.where(b == -jnp.inf, 0, v * b)
