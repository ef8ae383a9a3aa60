"""Published surrogates beside the ratio and PPO's clip; per token, to be maximised.

Each is (scored, advantages, *, anchor, ...) -> [B, T], float32, with the gradient to `scored.logp`
alone. r = exp(logp - anchor) in [e^-20, e^20]. `score` functions, whose published form is a
detached weight c times A log p, have the value c A: the gradient is that of c A log p, and at equal
policies the value is that of the ratio. An advantage that is not finite shows, without gradient.
Where a sum or a product of ratios is taken, log-ratios are not clamped before it, as some
implementations do with +-20: only what is exponentiated is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.divergences.ratios import LOG_RATIO_CAP, raised, ratio
from trm_jax.objectives import gates
from trm_jax.objectives.scored import Advantages, Anchor, Scored
from trm_jax.objectives.surrogates import _weigh, by_token, weighed

_sg = jax.lax.stop_gradient


def _log_ratio(scored: Scored, anchor: Anchor):
  d = raised(scored.logp) - _sg(raised(scored.anchor_logp(anchor)))
  return jnp.where(scored.valid, d, 0)


def _row_mean(d, scored: Scored):
  return d.sum(-1, keepdims=True) / jnp.clip(scored.valid.sum(-1, keepdims=True), 1, None)


def _score(scored: Scored, weight=1.0):
  """`weight`, detached, with the gradient of weight * logp; without one where it is not finite."""
  d = jnp.where(scored.valid, raised(scored.logp), 0)
  one = 1 + jnp.where(jnp.isfinite(d), d - _sg(d), 0)
  return weighed(one, jnp.broadcast_to(weight, one.shape))


def dual_clip(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  bound: float = 3.0,
) -> Float[Array, 'B T']:
  """PPO's clip, and for A < 0 at least bound * A: dual clip (c = 3). arXiv 1912.09729; verl."""
  r = ratio(_log_ratio(scored, anchor), scored.valid)
  clipped = jnp.clip(r, 1 - clip_low, 1 + clip_high)

  def value(a):
    inner = jnp.minimum(r * a, clipped * a)
    return jnp.where((a < 0) & (inner < bound * a), bound * a, inner)

  return _weigh(value, advantages)


def delta_clip(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  delta: float = 4.0,
) -> Float[Array, 'B T']:
  """min(min(r, delta) A, clip(r) A): TRL's two-sided clip.

  TRL has no default delta; it should exceed 1 + clip_high, and 4 is ours. For A < 0 the loss stops
  growing at r = delta, as with the dual clip at c = delta.
  """
  r = ratio(_log_ratio(scored, anchor), scored.valid)
  capped = jnp.where(r > delta, delta, r)
  clipped = jnp.clip(r, 1 - clip_low, 1 + clip_high)
  return _weigh(lambda a: jnp.minimum(capped * a, clipped * a), advantages)


def gspo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
) -> Float[Array, 'B T']:
  """PPO's clip on s = exp(mean_t d_t) of the row; gradient of s A log p_t per token: GSPO-token.

  arXiv 2507.18071, (3e-4, 4e-4); with reduce_tokens='mean' its gradient is that of GSPO.
  """
  s = jnp.broadcast_to(_sg(_row_mean(_log_ratio(scored, anchor), scored)), scored.valid.shape)
  s = _score(scored, ratio(s, scored.valid))
  clipped = jnp.clip(s, 1 - clip_low, 1 + clip_high)
  return _weigh(lambda a: jnp.minimum(s * a, clipped * a), advantages)


def gmpo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  clip: float = 0.4,
) -> Float[Array, 'B T']:
  """exp(mean_t d'_t) A on each token: GMPO. d' = min(d, clip) for A > 0, max(d, -clip) for A < 0.

  arXiv 2507.20673, clip (e^-.4, e^.4), in log space and outward only. Use reduce_tokens='mean'.
  Uncertain: the authors' code was not read. Weights multiply tokens here; verl takes their
  geometric mean over the row.
  """
  d = _log_ratio(scored, anchor)
  a = by_token(advantages)
  outside = ((a > 0) & (d > clip)) | ((a < 0) & (d < -clip))
  d = jnp.where(outside, jnp.sign(a) * clip, d)
  r = ratio(jnp.broadcast_to(_row_mean(d, scored), d.shape), scored.valid)
  return _weigh(lambda a: r * a, advantages)


def reinforce(scored: Scored, advantages: Advantages) -> Float[Array, 'B T']:
  """A log p, to be weighted: the `score` form, so value A. Williams 1992; verl's bypass_pg."""
  score = _score(scored)
  return _weigh(lambda a: score * a, advantages)


def cispo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  low: float = 0.0,
  high: float = 5.0,
) -> Float[Array, 'B T']:
  """sg(clip(r, low, high)) A log p: CISPO, in `score` form. arXiv 2506.13585.

  No lower end in the paper. `high` is the cap itself, as in TRL; elsewhere it is 1 + epsilon_high.
  The paper does not print its epsilon_high; 5 is uncertain and stands here for "large".
  """
  r = _sg(ratio(_log_ratio(scored, anchor), scored.valid))
  weight = _score(scored, jnp.clip(r, low, high))
  return _weigh(lambda a: weight * a, advantages)


def sapo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  positive: float = 1.0,
  negative: float = 1.05,
) -> Float[Array, 'B T']:
  """(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: SAPO. arXiv 2511.20347; TRL (1, 1.05).

  At r = 1 the gradient is that of the ratio; the value is 2 A / tau, not A. A = 0 takes `negative`.
  """
  r = ratio(_log_ratio(scored, anchor), scored.valid)
  soft = lambda tau: 4 / tau * jax.nn.sigmoid(tau * (r - 1))
  return _weigh(lambda a: jnp.where(a > 0, soft(positive), soft(negative)) * a, advantages)


def vespo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  positive: tuple[float, float] = (2.0, 3.0),
  negative: tuple[float, float] = (3.0, 2.0),
) -> Float[Array, 'B T']:
  """sg(phi(W)) A log p, phi = exp(lam + k log W - lam W), W = prod_t r_t: VESPO, `score` form.

  (k, lam) by the sign of A: (2, 3) and (3, 2), TRL; log W is clipped to [log 1e-8, 20]. phi(1) = 1.
  The paper itself was not read: this is TRL's form. A = 0 takes `negative`.
  """
  log_w = jnp.clip(_sg(_log_ratio(scored, anchor).sum(-1, keepdims=True)), jnp.log(1e-8), 20.0)
  phi = lambda k, lam: jnp.exp(lam + k * log_w - lam * jnp.exp(log_w))
  of = lambda pair: _score(scored, phi(*pair))
  return _weigh(lambda a: jnp.where(a > 0, of(positive), of(negative)) * a, advantages)


def topr(
  scored: Scored, advantages: Advantages, *, anchor: Anchor = 'rollout'
) -> Float[Array, 'B T']:
  """A log p for A > 0, sg(min(W, 1)) A log p else, W = prod_t r_t: TOPR, `score` form.

  arXiv 2503.14286.
  """
  log_w = _sg(_log_ratio(scored, anchor).sum(-1, keepdims=True))
  w = jnp.exp(jnp.where(log_w > 0, 0, log_w))
  return _weigh(lambda a: jnp.where(a > 0, _score(scored), _score(scored, w)) * a, advantages)


def ctpo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  clip_low: float = 0.025,
  clip_high: float = 0.05,
  bound: float = 0.05,
) -> Float[Array, 'B T']:
  """PPO's clip on C_t = prod_{j<=t} r_j, in [e^(-clip_low sqrt t), e^(clip_high sqrt t)]: CTPO.

  For A < 0 at least e^(bound sqrt t) A, as with the dual clip; t counts the row's valid tokens from
  1. Gradient of C_t A log p_t to each token's own logp alone. arXiv 2605.07331 and the authors'
  code, whose settings these are. Use normalize_by='tokens'.
  """
  d, valid = _sg(_log_ratio(scored, anchor)), scored.valid
  c = _score(scored, ratio(jnp.cumsum(d, -1), valid))
  wide = jnp.sqrt(jnp.clip(jnp.cumsum(valid, -1), 1, None).astype(c.dtype))
  clipped = jnp.clip(c, jnp.exp(-clip_low * wide), jnp.exp(clip_high * wide))
  least = jnp.exp(bound * wide)

  def value(a):
    inner = jnp.minimum(c * a, clipped * a)
    return jnp.where((a < 0) & (inner < least * a), least * a, inner)

  return _weigh(value, advantages)


def minpro(
  scored: Scored, advantages: Advantages, *, anchor: Anchor = 'rollout'
) -> Float[Array, 'B T']:
  """sg(m_t r_t) A log p, m_t = min_{j<t} r_j (1 for the first token): MinPRO, `score` form.

  The smallest ratio of the preceding tokens stands for their product. arXiv 2601.22718. Uncertain:
  the abstract alone was read, so whether the authors take the minimum with 1, or clip the product,
  is not known; neither is done here.
  """
  d = _sg(_log_ratio(scored, anchor))
  seen = jnp.where(scored.valid, d, jnp.inf)
  missing = jnp.cumsum(jnp.isnan(seen), -1) > 0
  # The running minimum of what came before; XLA's drops NaN, which is put back.
  least = -jax.lax.cummax(-jnp.where(jnp.isnan(seen), jnp.inf, seen), axis=1)
  least = jnp.where(missing, jnp.nan, least)
  before = jnp.concatenate([jnp.zeros_like(least[:, :1]), least[:, :-1]], -1)
  d = d + jnp.where(jnp.cumsum(scored.valid, -1) > 1, before, 0)
  weight = _score(scored, ratio(d, scored.valid))
  return _weigh(lambda a: weight * a, advantages)


def sis(
  scored: Scored, advantages: Advantages, *, anchor: Anchor = 'rollout', bound: float = 1.0
) -> Float[Array, 'B T']:
  """sg(c) A log p, c = 1 with probability min(1, r / bound), else r: SIS, `score` form.

  A rejection test for each token: one that passes counts as drawn by the policy. Draws from
  `scored.key`, the same numbers on any number of devices. arXiv 2607.04728. Uncertain: the constant
  of the test (1 here); the abstract alone was read.
  """
  r = _sg(ratio(_log_ratio(scored, anchor), scored.valid))
  passed = scored.uniform() < r / bound
  weight = _score(scored, jnp.where(passed, 1, r))
  return _weigh(lambda a: weight * a, advantages)


def kl_cov(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  share: float = 2e-4,
  penalty: float = 1.0,
) -> Float[Array, 'B T']:
  """r A, and r A - penalty |log r| on the `share` of tokens with the largest covariance: KL-Cov.

  covariance_t = (A_t - mean A)(log p_t - mean log p), means and ranks over all usable tokens of the
  batch, on all devices; at least one token is taken. arXiv 2505.22617, verl (2e-4, 1). An advantage
  that is not finite counts as 0 in the covariance.
  """
  d = _log_ratio(scored, anchor)
  # No slope where d is 0, and none that is NaN where it is not finite.
  r, finite = ratio(d, scored.valid), jnp.isfinite(d)
  near = jnp.where(finite, d, 0)
  drift = jnp.where(finite, near * _sg(jnp.sign(near)), _sg(jnp.abs(d)))
  cov, counted = gates.covariance(scored, advantages)
  every, all_counted = scored.everywhere(cov), scored.everywhere(counted)
  size = jnp.clip(jnp.floor(all_counted.sum() * share), 1, None).astype(jnp.int32)
  order = jnp.argsort(-jnp.where(all_counted, every, -jnp.inf).reshape(-1))
  rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(every.shape)
  taken = scored.here(rank < size) & counted
  return _weigh(lambda a: r * a, advantages) - jnp.where(taken, penalty * drift, 0)


def drpo(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  limit: float = 0.15,
) -> Float[Array, 'B T']:
  """r A - |A| (p - q)^2 / (2 limit q): DRPO, DPPO's mask made smooth.

  Gradient r A (1 - sign(A) (p - q) / limit) grad log p: 0 at the boundary of `gates.dppo_tv`, and
  back towards q beyond it. arXiv 2606.09821. Uncertain: "an advantage-weighted quadratic
  regularizer on the shift of the token's probability with DPPO's region" is what its abstract says,
  and (p - q)^2 / q, whose mean over the rollout is sum_v (p_v - q_v)^2, is the form that gives it.
  """
  d = _log_ratio(scored, anchor)
  r = ratio(d, scored.valid)
  q = jnp.where(scored.valid, jnp.exp(_sg(raised(scored.anchor_logp(anchor)))), 0)
  drift = q * jnp.square(r - 1) / (2 * limit)
  return _weigh(lambda a: r * a - drift * jnp.abs(a), advantages)


def penalized(
  scored: Scored,
  advantages: Advantages,
  *,
  gate: Callable[[Scored, Advantages], Bool[Array, 'B T']],
  anchor: Anchor = 'rollout',
  penalty: float = 1e-3,
) -> Float[Array, 'B T']:
  """r A where the gate is open, minus penalty (log r)^2 on all tokens, closed ones too: prime-rl.

  Its default and ipo losses, penalty ("kl_tau") 1e-3. A log-ratio beyond +-20 nats has no gradient,
  in either term; there theirs is unbounded and 0 * inf may be NaN.
  """
  d = _log_ratio(scored, anchor)
  r = ratio(d, scored.valid)
  near = jnp.where(jnp.abs(d) <= LOG_RATIO_CAP, d, _sg(jnp.clip(d, -LOG_RATIO_CAP, LOG_RATIO_CAP)))
  value = jnp.where(gate(scored, advantages), _weigh(lambda a: r * a, advantages), 0)
  return value - penalty * jnp.square(near)
