"""How far two next-token distributions are apart, per position, exact over the vocabulary.

| function                  | quantity                                                       |
| ------------------------- | -------------------------------------------------------------- |
| `statistics`              | KL, TV, entropy, both log-probs (and more) from one read        |
| `kl`, `total_variation`   | KL(rollout || policy), the paper's direction; 1/2 sum |q - p|   |
| `jensen_shannon`, `renyi` | JS divergence; D_alpha(rollout || policy)                      |
| `entropy`, `logp`         | of one distribution                                            |
| `k1`, `k2`, `k3`          | one-sample estimators from log_ratio                           |

Arguments come as (policy, rollout), logits of any float dtype; everything is float32 from centred
logits. Temperature divides the logits of *both* sides. With `axis_name` the last axis is this
device's contiguous block of the vocabulary (inside `shard_map`, `pmap` or `vmap`).

Large arrays are read a block of rows at a time (CPU) or by one kernel (TPU), and no temporary has
the size of the logits. Their rows must be local: where arrays are split over a mesh, call these
inside `shard_map` (`sharding.over_vocabulary`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax import blocks, pair, terms, vocab
from trm_jax.types import InputError, Statistics


def check(temperature, tokens=None, **logits) -> None:
  """Raises InputError unless the named logits are float arrays [*b, V] of one shape, V >= 1.

  `tokens`, where given, must be integers [*b]; a temperature known at trace time must be > 0.
  """
  first, expected = next(iter(logits.items()))
  for name, x in logits.items():
    if not hasattr(x, 'dtype'):
      raise InputError(f'{name} has type {type(x).__name__}: pass a jax or NumPy array.')
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise InputError(
        f'{name} has dtype {x.dtype}, but logits are real: pass float32 or bfloat16.'
      )
    if x.ndim < 1 or x.shape[-1] < 1:
      raise InputError(f'{name} has shape {x.shape}: its last axis must be a vocabulary of >= 1.')
    if x.shape[-1] != expected.shape[-1]:
      raise InputError(
        f'{name} scores {x.shape[-1]} tokens and {first} {expected.shape[-1]}: both must score the'
        ' same vocabulary; extend the shorter one by -inf.'
      )
    if x.shape != expected.shape:
      raise InputError(f'{name} has shape {x.shape} and {first} {expected.shape}; make them equal.')
  if tokens is not None:
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise InputError(f'tokens has dtype {tokens.dtype}: pass integer token ids.')
    if tokens.shape != expected.shape[:-1]:
      raise InputError(
        f'tokens has shape {tokens.shape}, but {first} {expected.shape} holds positions'
        f' {expected.shape[:-1]}; logits[:, t] must score tokens[:, t].'
      )
  if jnp.ndim(temperature):
    raise InputError(f'temperature has shape {temperature.shape}: pass one number for all rows.')
  if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
    raise InputError(f'temperature={temperature} must be > 0.')


def static(temperature):
  """None for a temperature that is known to be 1: the division is then left out."""
  if isinstance(temperature, int | float) and temperature == 1:
    return None
  return jnp.asarray(temperature, jnp.float32)


def statistics(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b V'],
  tokens: Int[Array, '*b'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  full: bool = False,
  axis_name: str | None = None,
) -> Statistics:
  """Everything the trainer asks of a pair of policies, per position, from one read of the logits.

  KL(rollout || policy) in [0, inf], TV in [0, 1], the policy's entropy in [0, log V] and the
  log-probs of `tokens` on both sides; nats, float32. `full` adds KL(policy || rollout), chi^2 =
  sum policy^2 / rollout - 1 and sum policy^2. inf is a violation: mass where the other side has
  none. NaN logits, and positions of -inf alone, give NaN there and nowhere else.

  Gradients: policy_logp and entropy to `policy_logits`; nothing else carries any. With `axis_name`:
  3 all-reduces of 9 floats a position in all (12 if full). arXiv 2512.23075, eq. 4 and 5. Raises
  InputError for shapes or dtypes that do not fit.
  """
  check(temperature, tokens, policy_logits=policy_logits, rollout_logits=rollout_logits)
  rollout_logits = jax.lax.stop_gradient(rollout_logits)
  found, seeds = _statistics(
    policy_logits, rollout_logits, tokens, static(temperature), full, axis_name
  )
  return with_gradient(found, seeds, policy_logits, axis_name)


def with_gradient(found: Statistics, seeds, logits, axis_name) -> Statistics:
  """The statistics with the gradients of log-prob and entropy flowing as `pair.shared` says."""
  logp, entropy = (
    pair.shared(value, seed, logits, axis_name)
    for value, seed in zip((found.policy_logp, found.entropy), seeds, strict=True)
  )
  return dataclasses.replace(found, policy_logp=logp, entropy=entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _statistics(policy_logits, rollout_logits, tokens, temperature, full, axis_name):
  args = policy_logits, rollout_logits, tokens, temperature
  return _statistics_forward(*args, full, axis_name)[0]


def _statistics_forward(policy_logits, rollout_logits, tokens, temperature, full, axis_name):
  policy, rollout, found = pair.compare(
    policy_logits, rollout_logits, tokens, temperature, axis_name, full=full
  )
  seed = pair.seed(policy_logits[..., 0])
  return (gather(policy, rollout, found), (seed, seed)), (
    policy_logits,
    tokens,
    temperature,
    policy,
  )


def gather(policy: pair.Side, rollout: pair.Side, found: terms.Terms) -> Statistics:
  """Statistics from the normalised sides and the divergence sums."""
  return Statistics(
    kl=found.kl,
    tv=_half(found.tv),
    entropy=policy.entropy,
    policy_logp=policy.logp,
    rollout_logp=rollout.logp,
    reverse_kl=found.reverse_kl,
    chi2=found.chi2,
    square=found.square,
  )


def _half(total):
  return jnp.minimum(0.5 * total, 1)  # rounding reaches 1 + 1e-7 where the supports are disjoint


def _statistics_backward(full, axis_name, residuals, g):
  del full
  found, (to_logp, to_entropy) = g
  to_logp, to_entropy = to_logp + found.policy_logp, to_entropy + found.entropy
  return pair.score_gradient(*residuals, to_logp, to_entropy, axis_name), None, None, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _kl_and_tv(policy_logits, rollout_logits, temperature, axis_name):
  *sides, found = pair.compare(policy_logits, rollout_logits, None, temperature, axis_name)
  seed = pair.seed(policy_logits[..., 0], rollout_logits[..., 0])
  return (found.kl, _half(found.tv)), (seed, seed)


def _kl_and_tv_forward(policy_logits, rollout_logits, temperature, axis_name):
  out = _kl_and_tv(policy_logits, rollout_logits, temperature, axis_name)
  sides = tuple(
    pair.one(x, None, temperature, axis_name, entropy=False)
    for x in (policy_logits, rollout_logits)
  )
  means = pair.mean_signs(policy_logits, rollout_logits, temperature, *sides, axis_name)
  return out, (policy_logits, rollout_logits, temperature, sides, out[0][0], means)


def _kl_and_tv_backward(axis_name, residuals, g):
  del axis_name
  values, seeds = g
  total = [value + seed for value, seed in zip(values, seeds, strict=True)]
  return *pair.divergence_gradients(*residuals, total), None


_kl_and_tv.defvjp(_kl_and_tv_forward, _kl_and_tv_backward)


def _differentiable(index, policy_logits, rollout_logits, temperature, axis_name):
  policy_logits, rollout_logits = blocks.match_varying(policy_logits, rollout_logits)
  values, seeds = _kl_and_tv(policy_logits, rollout_logits, static(temperature), axis_name)
  return pair.shared(values[index], seeds[index], policy_logits, axis_name)


def kl(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b V'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """KL(rollout || policy) per position in nats, in [0, inf].

      sum_v p(v) (exp(d) - 1 - d) + sum_{p(v)=0} q(v),   d = log q - log p

  with p the rollout and q the policy: every term is >= 0 and an error of the normalisers enters
  squared, so the result is never negative and exact down to 1e-11. inf where the policy gives 0 to
  a token the rollout can sample; finite where only the policy has mass. NaN logits give NaN.
  float32 for any input dtype. Gradients flow into both. arXiv 2512.23075, eq. 5.
  """
  check(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits)
  return _differentiable(0, policy_logits, rollout_logits, temperature, axis_name)


def total_variation(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b V'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Total variation per position, in [0, 1]: 1/2 sum_v |q(v) - p(v)|.

  Exact over the vocabulary, float32, symmetric; gradients flow into both. arXiv 2512.23075, eq. 4.
  """
  check(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits)
  return _differentiable(1, policy_logits, rollout_logits, temperature, axis_name)


def _reduced(reduce, policy_logits, rollout_logits, temperature, axis_name):
  """reduce(d, log q, log p) of whole positions; autodiff recomputes each block.

  Entries that neither side has get d = 0, so that no inf - inf arises, in a gradient either.
  """

  def normalised(logits):
    x = logits.astype(jnp.float32)
    top = vocab.maximum(x, axis_name)
    total = vocab.total(jnp.exp(pair.centred(x, top, temperature)), axis_name)
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
  rollout_logits: Float[Array, '*b V'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Jensen-Shannon divergence per position in nats, in [0, log 2]; symmetric.

      1/2 KL(p || m) + 1/2 KL(q || m),   m = (p + q) / 2

  as a sum of terms >= 0 in h = (q - p) / (q + p). Finite for any pair of distributions; float32;
  gradients flow into both.
  """
  check(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits)

  def reduce(d, log_q, log_p):
    h = jnp.tanh(jnp.clip(d, -_FLAT, _FLAT) / 2)
    h2 = h * h
    series = h2 * (1 / 2 + h2 * (1 / 12 + h2 * (1 / 30 + h2 / 56)))
    small = h2 < 0.02
    x = jnp.where(small, 0.5, h)
    exact = 0.5 * ((1 + x) * jnp.log1p(x) + (1 - x) * jnp.log1p(-x))
    mass = jnp.exp(log_p) + jnp.exp(log_q)
    return vocab.total(0.5 * mass * jnp.where(small, series, exact), axis_name)

  found = _reduced(reduce, policy_logits, rollout_logits, static(temperature), axis_name)
  return jnp.minimum(found, jnp.log(2.0).astype(found.dtype))


# tanh(d / 2) is 1 to float32 above; log1p(-1) is never formed below.
_FLAT = 15.0


def renyi(
  policy_logits: Float[Array, '*b V'],
  rollout_logits: Float[Array, '*b V'],
  *,
  alpha: float,
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Renyi divergence D_alpha(rollout || policy) per position in nats, in [0, inf].

      log(sum p^alpha q^(1 - alpha)) / (alpha - 1)

  KL(rollout || policy) in the limit alpha -> 1, log(1 + chi^2) for alpha = 2 and rollout and policy
  exchanged. inf where the supports are disjoint, and for alpha > 1 where the policy gives 0 to a
  token the rollout can sample. float32; gradients flow into both. Raises InputError unless
  0 < alpha and alpha != 1.
  """
  check(temperature, policy_logits=policy_logits, rollout_logits=rollout_logits)
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
    top = vocab.maximum(log_power, axis_name)
    finite = jnp.where(jnp.isfinite(top), top, 0)
    sum_of = vocab.total(jnp.exp(log_power - finite[..., None]), axis_name)
    # Larger powers only occur where the logarithm is taken instead.
    power = p * jnp.exp(jnp.minimum(kappa * jnp.where(has, d, 0), 60))
    far = power - p - kappa * (q - p)
    return jnp.log(sum_of) + finite, vocab.total(jnp.where(small, near, far), axis_name)

  log_sum, excess = _reduced(reduce, policy_logits, rollout_logits, static(temperature), axis_name)
  # Near 1 the excess has all digits, elsewhere the sum itself.
  near = jnp.abs(log_sum) < 0.5
  log = jnp.where(near, jnp.log1p(jnp.where(near, excess, 0)), log_sum)
  return jnp.maximum(log / -kappa, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _score(logits, tokens, temperature, axis_name, entropy):
  return _score_forward(logits, tokens, temperature, axis_name, entropy)[0]


def _score_forward(logits, tokens, temperature, axis_name, entropy):
  found = pair.one(logits, tokens, temperature, axis_name, entropy=entropy)
  value = found.entropy if entropy else found.logp
  return (value, pair.seed(logits[..., 0])), (logits, tokens, temperature, found)


def _score_backward(axis_name, entropy, residuals, g):
  g = sum(g)
  to = (None, g) if entropy else (g, None)
  return pair.score_gradient(*residuals, *to, axis_name), None, None


_score.defvjp(_score_forward, _score_backward)


def entropy(
  logits: Float[Array, '*b V'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Entropy per position in nats, in [0, log V]; float32; gradient flows."""
  check(temperature, logits=logits)
  value, seed = _score(logits, None, static(temperature), axis_name, True)
  return pair.shared(value, seed, logits, axis_name)


def logp(
  logits: Float[Array, '*b V'],
  tokens: Int[Array, '*b'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """Log-probability of each token in nats, in [-inf, 0]; float32; gradient flows."""
  check(temperature, tokens, logits=logits)
  value, seed = _score(logits, tokens, static(temperature), axis_name, False)
  return pair.shared(value, seed, logits, axis_name)


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
  return jnp.where(log_ratio == jnp.inf, jnp.inf, terms.bregman(finite))
