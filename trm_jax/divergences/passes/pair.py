"""One pass over a pair of logit arrays: normalisers, picked log-probs and all divergence sums.

    sums    local maximum m, sum exp(x - m), sum exp(x - m) (x - m)       first look at a block
    merge   the same over all devices: 2 all-reduces, 7 floats a position
    terms   local sums of `terms.pointwise`, which need both normalisers  second look
            and their all-reduce, 2 floats (5 if full)

TV needs both normalisers before its first summand, so two looks are the least. On one device both
happen while the block is in fast memory, and the logits are read once. The form is chosen when the
program is lowered: blocks of rows on a CPU, a Pallas kernel on a TPU, plain XLA elsewhere and for
small arrays. What is best on one is worst on the other: the barriers that spare a CPU the second
computation of each exponential would send them to a TPU's main memory and back.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax.divergences.passes import blocks, kernels, terms, vocabulary
from trm_jax.divergences.passes.lanes import Sums
from trm_jax.types import InputError

# Smaller arrays are worth neither a loop nor a kernel.
SMALL = 2**20


class Side(NamedTuple):
  """One distribution: log-probs are (logit - top) / temperature - log_sum."""

  top: Float[Array, '*b']
  log_sum: Float[Array, '*b']
  entropy: Float[Array, '*b'] | None
  logp: Float[Array, '*b'] | None


def _over(x, temperature):
  return x if temperature is None else x / temperature


def below_top(x, top, temperature):
  """(x - top) / temperature of float32 logits: centred first, so that large logits keep digits."""
  return _over(x - terms.finite(top)[..., None], temperature)


def log_probs(x, side: Side, temperature):
  """Log-probs of float32 logits x."""
  return below_top(x, side.top, temperature) - side.log_sum[..., None]


def _float32(store, *logits):
  """The logits in float32, stored if `store`: else every loop over a block converts them again."""
  x = [logit.astype(jnp.float32) for logit in logits]
  return jax.lax.optimization_barrier(x) if store and logits[0].dtype != jnp.float32 else x


def sums(
  logits, temperature, *, entropy=True, store=False, vocab_size=None, axis_name=None
) -> Sums:
  """Local sums of one side [*b, V] -> [*b], float32, in plain XLA. `store`: see `fused`."""
  (x,) = _float32(store, vocabulary.without_padding(logits, vocab_size, axis_name))
  top = x.max(-1)
  x = below_top(x, top, temperature)
  w = jnp.exp(x)
  if store and entropy:
    w = jax.lax.optimization_barrier(w)
  return Sums(top, w.sum(-1), terms.weighted(w, x).sum(-1) if entropy else None)


def side(sums: Sums, temperature) -> Side:
  """The distribution that sums over the whole vocabulary describe; NaN where it has no mass."""
  log_sum = jnp.log(sums.total)
  entropy = None if sums.weighted is None else log_sum - sums.weighted / sums.total
  logp = None
  if sums.picked is not None:
    logp = _over(sums.picked - sums.top, temperature) - log_sum
  return Side(sums.top, log_sum, entropy, logp)


def log_odds(b, a, policy: Side, rollout: Side, temperature):
  """log q - log p of float32 logits b, a."""
  sides = policy.top, policy.log_sum, rollout.top, rollout.log_sum
  inverse = 1 if temperature is None else 1 / temperature
  return terms.log_odds(b, a, *(x[..., None] for x in terms.odds(*sides, inverse)), inverse)


def _terms(b, a, v, w, policy, rollout, temperature, full, store) -> terms.Terms:
  """Summed over the block; b, a are float32 logits and v, w their exponentials."""
  weight = lambda side: jnp.exp(-side.log_sum)[..., None]
  d = log_odds(b, a, policy, rollout, temperature)
  q, p = v * weight(policy), w * weight(rollout)
  if not (full and store):
    summands = terms.pointwise(d, b, a, q, p, log_probs(b, policy, temperature) if full else None)
    return terms.Terms(*(None if x is None else x.sum(-1) for x in summands))
  # Five sums are five loops: what each of them needs is computed once.
  d, e = jax.lax.optimization_barrier((d, terms.excess(d)))
  kl, tv = terms.core(d, e, a, q, p)
  # A division instead of an exponential, unless p has lost its digits and q^2/p has not: then inf.
  power = jnp.where(p < 1e-35, jnp.where(d > 20, jnp.inf, 0), q * (q / p))
  chi2 = terms.chi2(d, e, b, q, p, power).sum(-1)

  def exact():
    q, p = v * weight(policy), w * weight(rollout)
    power = jnp.exp(log_probs(b, policy, temperature) + d)
    return terms.chi2(d, e, b, q, p, power).sum(-1)

  return terms.Terms(
    kl.sum(-1),
    tv.sum(-1),
    terms.reverse(d, e, b, q, p).sum(-1),
    jax.lax.cond((chi2 == jnp.inf).any(), exact, lambda: chi2),
    jnp.square(v).sum(-1) * jnp.square(weight(policy)[..., 0]),
  )


def terms_given(
  policy_logits,
  rollout_logits,
  policy,
  rollout,
  temperature,
  *,
  full=False,
  store=False,
  vocab_size=None,
  axis_name=None,
) -> terms.Terms:
  """Local divergence sums where both sides are normalised already, in plain XLA."""
  real = functools.partial(vocabulary.without_padding, vocab_size=vocab_size, axis_name=axis_name)
  b, a = _float32(store, real(policy_logits), real(rollout_logits))
  v = jnp.exp(below_top(b, policy.top, temperature))
  w = jnp.exp(below_top(a, rollout.top, temperature))
  if store:
    v, w = jax.lax.optimization_barrier((v, w))
  return _terms(b, a, v, w, policy, rollout, temperature, full, store)


def fused(policy_logits, rollout_logits, temperature, *, full=False, store=False, vocab_size=None):
  """(policy sums, rollout sums, divergence sums) of a block that holds the whole vocabulary.

  `store` keeps each intermediate array that several loops read instead of recomputing it.
  """
  real = functools.partial(vocabulary.without_padding, vocab_size=vocab_size)
  b, a = _float32(store, real(policy_logits), real(rollout_logits))
  top_q, top_p = b.max(-1), a.max(-1)
  x = below_top(b, top_q, temperature)
  v, w = jnp.exp(x), jnp.exp(below_top(a, top_p, temperature))
  if store:
    v, w = jax.lax.optimization_barrier((v, w))
  policy = Sums(top_q, v.sum(-1), terms.weighted(v, x).sum(-1))
  rollout = Sums(top_p, w.sum(-1))
  sides = side(policy, temperature), side(rollout, temperature)
  return policy, rollout, _terms(b, a, v, w, *sides, temperature, full, store)


def _chosen(plain, kernel, logits, *others):
  """plain(logits, *others) in the form that suits the backend and the size of the logits."""
  if logits.size < SMALL:
    return plain(logits, *others)
  spec = jax.typeof(logits).sharding.spec
  if any(axis is not None for axis in spec):
    raise InputError(
      f'logits of shape {logits.shape} are split over devices as {spec}: their rows are read in'
      ' blocks, which must be local; call this inside shard_map (see sharding.over_vocabulary).'
    )
  rows = blocks.rows_of(logits.shape[-1])
  by_rows = lambda *trees: blocks.by_rows(functools.partial(plain, store=True), *trees, rows=rows)
  choose = functools.partial(jax.lax.platform_dependent, cpu=by_rows, tpu=kernel, default=plain)
  return blocks.flat(choose, logits.ndim - 1)(logits, *others)


def local_sums(logits, temperature, *, entropy=True, vocab_size=None, axis_name=None) -> Sums:
  """`sums`, chosen by backend and size."""
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  plain = lambda x, **store: sums(x, temperature, entropy=entropy, **place, **store)
  real = vocabulary.real_entries(logits.shape[-1], vocab_size, axis_name)
  kernel = lambda x: kernels.sums(x, temperature, weighted=entropy, real=real)
  return _chosen(plain, kernel, logits)


def local_terms(
  policy_logits,
  rollout_logits,
  policy,
  rollout,
  temperature,
  *,
  full=False,
  vocab_size=None,
  axis_name=None,
):
  """`terms_given`, chosen by backend and size."""
  policy, rollout = (Side(s.top, s.log_sum, None, None) for s in (policy, rollout))
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  plain = lambda *xs, **store: terms_given(*xs, temperature, full=full, **place, **store)
  real = vocabulary.real_entries(policy_logits.shape[-1], vocab_size, axis_name)

  def kernel(b, a, policy, rollout):
    sides = policy.top, policy.log_sum, rollout.top, rollout.log_sum
    return kernels.terms_given(b, a, *sides, temperature, full=full, real=real)

  return _chosen(plain, kernel, policy_logits, rollout_logits, policy, rollout)


def merge(sides: tuple[Sums, ...], temperature, axis_name: str | None) -> tuple[Sums, ...]:
  """Sums over all blocks of the vocabulary: one pmax and one psum for all sides together."""
  if axis_name is None:
    return sides
  tops = jax.lax.pmax(jnp.stack([s.top for s in sides]), axis_name)
  local = []
  for block, top in zip(sides, tops, strict=True):
    # A block without mass adds nothing, however far below the top it is.
    empty = block.top == -jnp.inf
    gap = _over(jnp.where(empty, 0, block.top - top), temperature)
    scale = jnp.where(empty, 0, jnp.exp(gap))
    weighted = block.weighted
    if weighted is not None:
      weighted = scale * (weighted + block.total * gap)
    local.append(Sums(top, scale * block.total, weighted, block.picked))
  whole = vocabulary.add_up([s._replace(top=None) for s in local], axis_name)
  return tuple(s._replace(top=top) for s, top in zip(whole, tops, strict=True))


def pick(logits, tokens, axis_name, vocab_size=None):
  """float32 logit of each position's token on the device that holds it, 0 on the others.

  NaN where the vocabulary has no such token.
  """
  return vocabulary.held(logits, tokens, axis_name, vocab_size=vocab_size).astype(jnp.float32)


def one(logits, tokens, temperature, axis_name, *, entropy=True, vocab_size=None) -> Side:
  """One distribution: 2 all-reduces."""
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  sums = local_sums(logits, temperature, entropy=entropy, **place)
  if tokens is not None:
    sums = sums._replace(picked=pick(logits, tokens, **place))
  (sums,) = merge((sums,), temperature, axis_name)
  return side(sums, temperature)


def compare(
  policy_logits,
  rollout_logits,
  tokens,
  temperature,
  axis_name,
  *,
  full=False,
  vocab_size=None,
):
  """(policy side, rollout side, divergence sums over the whole vocabulary)."""
  totals, place = None, dict(vocab_size=vocab_size, axis_name=axis_name)
  if axis_name is None:
    options = dict(full=full, vocab_size=vocab_size)
    plain = lambda *xs, **store: fused(*xs, temperature, **options, **store)
    kernel = lambda *xs: kernels.fused(*xs, temperature, **options)
    policy, rollout, totals = _chosen(plain, kernel, policy_logits, rollout_logits)
  else:
    policy = local_sums(policy_logits, temperature, **place)
    rollout = local_sums(rollout_logits, temperature, entropy=False, **place)
  if tokens is not None:
    policy = policy._replace(picked=pick(policy_logits, tokens, **place))
    rollout = rollout._replace(picked=pick(rollout_logits, tokens, **place))
  policy, rollout = (side(s, temperature) for s in merge((policy, rollout), temperature, axis_name))
  if totals is None:
    sides = policy, rollout, temperature
    totals = local_terms(policy_logits, rollout_logits, *sides, full=full, **place)
    totals = vocabulary.add_up(totals, axis_name)
  return policy, rollout, terms.sound(totals, policy.log_sum, rollout.log_sum)


# Gradients, in closed form: elementwise in the logits, which is all that XLA needs to fuse them.


def seed(*like: Array) -> Array:
  """Zeros [*b], one for each position and device, whose cotangents `shared` sums over devices.

  `like` are local arrays [*b] or scalars that differ between devices.
  """
  return sum(jnp.where(False, x.astype(jnp.float32), 0) for x in like)


def shared(value: Array, seed: Array, logits: Array, axis_name: str | None) -> Array:
  """`value`, which all devices hold, with its cotangents summed over devices where that is due.

  Under `shard_map` a value that is equal on all devices has one cotangent. `pmap` and `vmap` know
  no such values: each device has a cotangent of its own, and their sum counts, as in the transpose
  of `psum`. It stands out here and not in a backward rule, where `vmap` forbids collectives.
  """
  if axis_name is None or axis_name in blocks.varying(logits):
    return value
  return jax.lax.stop_gradient(value) + jax.lax.psum(seed, axis_name)


def score_gradient(logits, tokens, temperature, side: Side, to_logp, to_entropy, axis_name):
  """Cotangent of the logits, given those of the log-probs of `tokens` and of the entropy.

  to_logp (1[v = token] - q) - to_entropy q (log q + H),   0 where both are 0, whatever q holds
  """
  log_q = log_probs(logits.astype(jnp.float32), side, temperature)
  q = jnp.exp(log_q)
  g, live = 0.0, False
  if to_logp is not None:
    local, here = vocabulary.place(tokens, logits.shape[-1], axis_name)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    hit = (index == local[..., None]) & here[..., None]
    g, live = jnp.where(hit, to_logp[..., None], 0) - to_logp[..., None] * q, to_logp != 0
  if to_entropy is not None:
    slope = terms.weighted(q, log_q) + q * side.entropy[..., None]
    g, live = g - to_entropy[..., None] * slope, live | (to_entropy != 0)
  g = jnp.where(live[..., None], g, 0)
  return (g if temperature is None else g / temperature).astype(logits.dtype)


def _slopes(policy_logits, rollout_logits, temperature, policy, rollout):
  """(q, p, d, sign(q - p)) at every entry."""
  b, a = policy_logits.astype(jnp.float32), rollout_logits.astype(jnp.float32)
  q, p = (jnp.exp(log_probs(x, s, temperature)) for x, s in ((b, policy), (a, rollout)))
  d = log_odds(b, a, policy, rollout, temperature)
  return q, p, d, jnp.where(q == p, 0, jnp.sign(d))


def mean_signs(policy_logits, rollout_logits, temperature, policy, rollout, axis_name):
  """(E_q sign, E_p sign) over the whole vocabulary: what the gradient of TV needs beforehand."""
  q, p, _, sign = _slopes(policy_logits, rollout_logits, temperature, policy, rollout)
  return tuple(vocabulary.total(jnp.stack([q * sign, p * sign]), axis_name))


def divergence_gradients(policy_logits, rollout_logits, temperature, sides, kl, means, g):
  """Cotangents of both logits, given g = those of KL(rollout || policy) and TV.

      d KL = q - p  and  p (-d - KL);   d TV = q (sign - E_q sign) / 2  and  p (E_p sign - sign) / 2

  with sign = sign(q - p) and `means` from `mean_signs`. Entries without a finite derivative get 0.
  """
  to_kl, to_tv = (x[..., None] for x in g)
  mean_q, mean_p = (x[..., None] for x in means)
  q, p, d, sign = _slopes(policy_logits, rollout_logits, temperature, *sides)
  pull = p * (-d - kl[..., None])
  to_policy = to_kl * (q - p) + to_tv * 0.5 * q * (sign - mean_q)
  to_rollout = to_kl * jnp.where(jnp.isfinite(pull), pull, 0) + to_tv * 0.5 * p * (mean_p - sign)
  live = (to_kl != 0) | (to_tv != 0)
  scale = lambda x: x if temperature is None else x / temperature
  return (
    scale(jnp.where(live, to_policy, 0)).astype(policy_logits.dtype),
    scale(jnp.where(live, to_rollout, 0)).astype(rollout_logits.dtype),
  )
