"""How far two next-token distributions are apart, per position, exact over the vocabulary.

| function                 | quantity                              |
| ------------------------ | ------------------------------------- |
| `kl`                     | KL(rollout || policy), the direction of the paper |
| `total_variation`        | 1/2 sum |policy - rollout|            |
| `entropy`                | entropy of one distribution           |
| `logp`                   | log-probability of the tokens         |
| `k1`, `k2`, `k3`         | one-sample estimators from log_ratio  |
| `statistics`             | all of them in one pass               |

Arguments come as (policy, rollout). Temperature divides the logits of *both* sides. Everything is
computed in float32 from centred logits. Gradients flow; callers that build masks stop them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax import vocab
from trm_jax.types import Divergences

# Below this |log q/p| the closed forms cancel; seven series terms are exact to float32 there.
_SERIES_BELOW = 0.35


def _bregman(d: Float[Array, '*s']) -> Float[Array, '*s']:
  """exp(d) - 1 - d >= 0 without cancellation for small d."""
  small = jnp.abs(d) < _SERIES_BELOW
  s = jnp.where(small, d, 0)
  series = s * s * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s * (1 / 120 + s * (1 / 720 + s / 5040)))))
  return jnp.where(small, series, jnp.expm1(jnp.where(small, 0, d)) - jnp.where(small, 0, d))


def _pair(policy_logits, rollout_logits, temperature, axis_name):
  """Centred log-probs of both sides and d = log policy - log rollout, guarded where rollout = 0."""
  b, log_sq = vocab.centred(policy_logits.astype(jnp.float32) / temperature, axis_name)
  a, log_sp = vocab.centred(rollout_logits.astype(jnp.float32) / temperature, axis_name)
  log_q, log_p = b - log_sq[..., None], a - log_sp[..., None]
  on = a > -jnp.inf  # the rollout's support; nan compares False and is handled by the caller
  # d from the centred logits, not from log_q - log_p: identical inputs then give exactly 0.
  d = jnp.where(on, b, 0) - jnp.where(on, a, 0) - (log_sq - log_sp)[..., None]
  return log_q, log_p, jnp.where(on, d, 0), on


def kl(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b V'],
  *,
  temperature: float = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """KL(rollout || policy) per position in nats, in [0, inf].

      sum_v p(v) (exp(d) - 1 - d) + sum_{p(v)=0} q(v),   d = log q - log p

  with p the rollout and q the policy: every term is >= 0 and an error of the normalisers enters
  squared, so the result is never negative and exact down to 1e-11. inf where the policy gives 0 to
  a token the rollout can sample; finite where only the policy has mass. NaN logits give NaN.
  float32 for any input dtype. Gradients flow into both. arXiv 2512.23075, eq. 5.
  """
  log_q, log_p, d, on = _pair(policy_logits, rollout_logits, temperature, axis_name)
  return _kl(log_q, log_p, d, on, axis_name)


def _kl(log_q, log_p, d, on, axis_name):
  gap = d == -jnp.inf
  p, above = jnp.exp(log_p), d > 1
  below = p * _bregman(jnp.where(gap | above, 0, d))
  # Above, p underflows where exp(d) overflows; q - p - p d has no such product and no cancellation.
  inside = jnp.where(above, jnp.exp(log_q) - p * (1 + jnp.where(above, d, 0)), below)
  terms = jnp.where(on, jnp.where(gap, jnp.inf, inside), jnp.exp(log_q))
  return vocab.total(jnp.where(jnp.isnan(log_p) | jnp.isnan(log_q), jnp.nan, terms), axis_name)


def total_variation(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b V'],
  *,
  temperature: float = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Total variation per position, in [0, 1]: 1/2 sum_v |q(v) - p(v)|.

  Exact over the vocabulary, float32, symmetric; gradients flow into both. arXiv 2512.23075, eq. 4.
  """
  log_q, log_p, d, on = _pair(policy_logits, rollout_logits, temperature, axis_name)
  return _tv(log_q, log_p, d, on, axis_name)


def _tv(log_q, log_p, d, on, axis_name):
  small = on & (jnp.abs(d) < _SERIES_BELOW)
  near = jnp.exp(log_p) * jnp.abs(jnp.expm1(jnp.where(small, d, 0)))
  far = jnp.abs(jnp.exp(log_q) - jnp.exp(log_p))
  half = 0.5 * vocab.total(jnp.where(small, near, far), axis_name)
  return jnp.minimum(half, 1)  # rounding reaches 1 + 1e-7 where the supports are disjoint


def entropy(
  logits: Float[Array, '*b V'], *, temperature: float = 1.0, axis_name: str | None = None
) -> Float[Array, '*b']:
  """Entropy per position in nats, in [0, log V]; float32; gradient flows."""
  x, log_s = vocab.centred(logits.astype(jnp.float32) / temperature, axis_name)
  return _entropy(x - log_s[..., None], axis_name)


def _entropy(log_q, axis_name):
  safe = jnp.where(log_q == -jnp.inf, 0, log_q)  # 0 log 0 = 0, in the gradient too
  return -vocab.total(jnp.exp(log_q) * safe, axis_name)


def logp(
  logits: Float[Array, '*b V'],
  tokens: Int[Array, '*b'],
  *,
  temperature: float = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Log-probability of each token in nats, in [-inf, 0]; float32; gradient flows."""
  x, log_s = vocab.centred(logits.astype(jnp.float32) / temperature, axis_name)
  return vocab.pick(x, tokens, axis_name) - log_s


def k1(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """-log_ratio: unbiased for KL(rollout || policy) under rollout samples; any sign."""
  return -log_ratio


def k2(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """log_ratio^2 / 2 >= 0: biased, symmetric in the direction."""
  return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Float[Array, '*s']) -> Float[Array, '*s']:
  """exp(log_ratio) - 1 - log_ratio >= 0: unbiased for KL(rollout || policy) under rollout samples.

  Stable for tiny ratios (no cancellation); inf where the ratio overflows float32.
  """
  finite = jnp.where(log_ratio == jnp.inf, 0, log_ratio)  # expm1(inf) - inf would read as missing
  return jnp.where(log_ratio == jnp.inf, jnp.inf, _bregman(finite))


def statistics(
  policy_logits: Float[Array, 'B T V'],
  rollout_logits: Float[Array, 'B T V'],
  tokens: Int[Array, 'B T'],
  rollout_logp: Float[Array, 'B T'],
  *,
  temperature: float = 1.0,
  axis_name: str | None = None,
) -> tuple[Divergences, Float[Array, 'B T']]:
  """(KL, TV, log_ratio, entropy) per token and the policy's log-prob of the sampled tokens.

  `rollout_logp` is the engine's own report, so that a wrong report shows in log_ratio beside an
  exact KL of zero. Gradients flow; stop them before building a mask.
  """
  log_q, log_p, d, on = _pair(policy_logits, rollout_logits, temperature, axis_name)
  policy_logp = vocab.pick(log_q, tokens, axis_name)
  found = Divergences(
    kl=_kl(log_q, log_p, d, on, axis_name),
    tv=_tv(log_q, log_p, d, on, axis_name),
    log_ratio=policy_logp - rollout_logp,
    entropy=_entropy(log_q, axis_name),
  )
  return found, policy_logp
