"""Jensen-Shannon and Renyi divergences, per position, exact over the vocabulary.

Arguments as in `full_logits`: (policy, rollout), logits of any float dtype. Both are read in blocks
of rows on a CPU; their gradients recompute each block.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax import extremes
from trm_jax.divergences.full_logits import check_logits, static
from trm_jax.divergences.passes import blocks, pair, terms, vocabulary
from trm_jax.types import InputError

# tanh(d / 2) is 1 to float32 above; log1p(-1) is never formed below.
_FLAT = 15.0


def _reduced(reduce, policy_logits, rollout_logits, temperature, vocab_size, axis_name):
  """reduce(d, log q, log p) of whole positions; autodiff recomputes each block.

  Entries that neither side has get d = 0, so that no inf - inf arises, in a gradient either.
  """

  def normalised(logits):
    x = vocabulary.without_padding(logits, vocab_size, axis_name).astype(jnp.float32)
    top = vocabulary.maximum(x, axis_name)
    total = vocabulary.total(jnp.exp(pair.below_top(x, top, temperature)), axis_name)
    return x, pair.Side(top, jnp.log(total), None, None)

  def block(policy_logits, rollout_logits):
    (b, policy), (a, rollout) = normalised(policy_logits), normalised(rollout_logits)
    neither = (b == -jnp.inf) & (a == -jnp.inf)
    none = lambda x: jnp.where(neither, 0, x)
    d = none(pair.log_odds(none(b), none(a), policy, rollout, temperature))
    logs = (pair.log_probs(x, s, temperature) for x, s in ((b, policy), (a, rollout)))
    return reduce(d, *logs)

  if axis_name is not None or policy_logits.size < pair.SMALL:
    return block(policy_logits, rollout_logits)
  rows = blocks.rows_of(policy_logits.shape[-1])
  by_rows = lambda *x: blocks.by_rows(jax.checkpoint(block), *x, rows=rows)
  choose = functools.partial(jax.lax.platform_dependent, cpu=by_rows, default=block)
  return blocks.flat(choose, policy_logits.ndim - 1)(policy_logits, rollout_logits)


def jensen_shannon(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b W'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Jensen-Shannon divergence per position in nats, in [0, log 2]; symmetric.

      1/2 KL(p || m) + 1/2 KL(q || m),   m = (p + q) / 2

  as a sum of terms >= 0 in h = (q - p) / (q + p). Finite for any pair of distributions; float32;
  gradients flow into both.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> f'{trm.jensen_shannon(policy, rollout):.4f}'
  '0.0058'
  """
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  check_logits(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits, **place)

  def reduce(d, log_q, log_p):
    h = jnp.tanh(jnp.clip(d, -_FLAT, _FLAT) / 2)
    h2 = h * h
    series = h2 * (1 / 2 + h2 * (1 / 12 + h2 * (1 / 30 + h2 / 56)))
    small = h2 < 0.02
    x = jnp.where(small, 0.5, h)
    exact = 0.5 * ((1 + x) * jnp.log1p(x) + (1 - x) * jnp.log1p(-x))
    mass = jnp.exp(log_p) + jnp.exp(log_q)
    return vocabulary.total(0.5 * mass * jnp.where(small, series, exact), axis_name)

  divergence = _reduced(reduce, policy_logits, rollout_logits, static(temperature), **place)
  return extremes.at_most(divergence, jnp.log(2.0).astype(divergence.dtype))


def renyi(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b W'],
  *,
  alpha: float,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Renyi divergence D_alpha(rollout || policy) per position in nats, in [0, inf].

      log(sum p^alpha q^(1 - alpha)) / (alpha - 1)

  KL(rollout || policy) in the limit alpha -> 1, log(1 + chi^2) for alpha = 2 and rollout and policy
  exchanged. inf where the supports are disjoint, and for alpha > 1 where the policy gives 0 to a
  token the rollout can sample. float32; gradients flow into both. Raises InputError unless
  0 < alpha and alpha != 1.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> f'{trm.renyi(policy, rollout, alpha=2.):.4f}'
  '0.0424'
  """
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  check_logits(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits, **place)
  if not 0 < alpha or alpha == 1:
    raise InputError(f'alpha={alpha} must be positive and not 1; for 1 use kl.')
  kappa = 1 - alpha

  def reduce(d, log_q, log_p):
    """Sum of p^alpha q^kappa: its logarithm, and its excess over 1 (summands of one sign)."""
    small = (jnp.abs(d) < terms.SERIES_BELOW) & (jnp.abs(kappa * d) < terms.SERIES_BELOW)
    s = jnp.where(small, d, 0)
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    near = p * (terms.bregman(kappa * s) - kappa * terms.bregman(s))
    has = log_p != -jnp.inf
    log_power = jnp.where(has, log_p + kappa * jnp.where(has, d, 0), -jnp.inf)
    top = vocabulary.maximum(log_power, axis_name)
    finite = jnp.where(jnp.isfinite(top), top, 0)
    sum_of = vocabulary.total(jnp.exp(log_power - finite[..., None]), axis_name)
    # Larger powers only occur where the logarithm is taken instead.
    power = p * jnp.exp(jnp.minimum(kappa * jnp.where(has, d, 0), 60))
    far = power - p - kappa * (q - p)
    return jnp.log(sum_of) + finite, vocabulary.total(jnp.where(small, near, far), axis_name)

  log_sum, excess = _reduced(reduce, policy_logits, rollout_logits, static(temperature), **place)
  # Near 1 the excess has all digits, elsewhere the sum itself.
  near = jnp.abs(log_sum) < 0.5
  log = jnp.where(near, jnp.log1p(jnp.where(near, excess, 0)), log_sum)
  return extremes.at_least(log / -kappa, 0)
