"""Certified bounds of KL and TV from a rollout engine that stored its K likeliest tokens only.

Known: the policy q in full; of the rollout p the K largest log-probs and the mass `tail` of the
rest. An unstored token has at most the smallest stored probability, `cap`, so the truth lies in

    { p' : 0 <= p'_i <= cap,  sum of p'_i = tail }        over the tokens that were not stored

and the bounds are the extremes of KL(rollout || policy) and TV over this set: the record allows no
tighter ones. The minimum fills q up to one level, p' = min(cap, c q); the maximum, of a convex
function, is at a vertex: `cap` where q is smallest, the rest on the next token. Both are evaluated
as Lagrange bounds, which hold at *any* level: one off by rounding loosens a bound, never breaks it.
What rounding can do to the record itself is added on top (`_ROUNDING`).

    kl, tv = brackets.bounds(policy_logits, brackets.top_k(rollout_logits, 64))
    kl.upper <= 0.2   # certainly inside;   kl.lower > 0.2: certainly outside; neither: ask for more

An engine that samples from top-k or top-p stores its whole support: tail is 0 and both bounds are
the exact value. No gradient flows. With `axis_name` the last axis is this device's block of the
vocabulary and ids are global; devices exchange numbers per row and per stored token only.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from trm_jax import extremes
from trm_jax.divergences.full_logits import check_vocab_size
from trm_jax.divergences.passes import terms, vocabulary
from trm_jax.types import Bracket, InputError, TopK

# A log-probability l is taken to be right to _ROUNDING * (3 + |l|), the tail to the same relative
# accuracy: twice the worst case of float32 temperature, centring, normaliser and exponential.
_ROUNDING = 2.0**-21
_SECOND_ORDER = 2.0**-36  # what the squares of such errors can add to a sum
_MASS = 1e-4  # a record whose mass is further from 1 is not rounded but wrong
_SMALLEST_CAP = -87.0  # log; exp of it is still a normal float32


def _known(x) -> bool:
  return not isinstance(x, jax.core.Tracer) and getattr(x, 'is_fully_addressable', True)


def _check_logits(name, logits, temperature):
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise InputError(f'{name} has dtype {logits.dtype}: pass floating-point scores.')
  if _known(temperature) and not np.all(np.asarray(temperature) > 0):
    raise InputError(f'temperature={temperature} must be > 0.')


def _check_top(top, logits, size):
  ids, logp, tail = top.ids, top.logp, top.tail
  if ids.shape != logp.shape:
    raise InputError(
      f'top.ids has shape {ids.shape} and top.logp {logp.shape}: give one log-prob for each id.'
    )
  if not logp.shape[:-1] == tail.shape == logits.shape[:-1]:
    shapes = f'policy_logits {logits.shape}, top.logp {logp.shape} and top.tail {tail.shape}'
    raise InputError(f'{shapes} differ in their leading shapes: pass the same positions.')
  if not 1 <= ids.shape[-1] <= size:
    raise InputError(f'top.ids holds K={ids.shape[-1]} tokens: store 1 to {size}, the vocabulary.')
  for name, x in (('logp', logp), ('tail', tail)):
    if x.dtype != jnp.float32:
      raise InputError(
        f'top.{name} has dtype {x.dtype}: store float32, which the certified margin assumes.'
      )
  if _known(tail):
    tail = np.asarray(tail)
    for value in tail[(tail < 0) | (tail > 1)][:1]:
      raise InputError(
        f'top.tail={value} must lie in [0, 1]: pass the sum of the probabilities not stored.'
      )


def _outside(ids, stored, size, axis_name):
  """[*b, V]: which entries of this device's block are not stored."""
  local = ids - (0 if axis_name is None else size * jax.lax.axis_index(axis_name))
  local = jnp.where(stored & (local >= 0) & (local < size), local, size)  # size: dropped
  everyone = jnp.ones((*ids.shape[:-1], size), bool)
  return jnp.put_along_axis(everyone, local, False, -1, inplace=False, mode='drop')


def top_k(
  rollout_logits: Num[Array, '*b V'],
  k: int,
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
) -> TopK:
  """The K likeliest tokens with log-probs in nats and the mass of the others, in [0, 1].

  The tail is the sum of the other probabilities: accurate when tiny, 0 only where no other token
  has any (never by underflow). Entries from `vocab_size` on are padding. float32; no gradient.
  Raises InputError on integer logits, k or vocab_size outside 1..V or temperature <= 0.

  >>> top = trm.top_k(jnp.log(jnp.array([.7, .2, .1])), 2)
  >>> f'{top.ids} and {top.tail:.1f} for the others'
  '[0 1] and 0.1 for the others'
  """
  _check_logits('rollout_logits', rollout_logits, temperature)
  check_vocab_size(vocab_size, rollout_logits.shape[-1], 'rollout_logits')
  rollout_logits = vocabulary.without_padding(rollout_logits, vocab_size)
  size = rollout_logits.shape[-1]
  if not 1 <= k <= size:
    raise InputError(f'k={k} must be 1 to {size}, the size of the vocabulary.')
  log_p = vocabulary.log_probs(jax.lax.stop_gradient(rollout_logits), temperature)
  logp, ids = jax.lax.top_k(log_p, k)
  others = _outside(ids, ids >= 0, size, None) & (log_p > -jnp.inf)
  mass = jnp.clip(jnp.where(others, jnp.exp(log_p), 0).sum(-1), jnp.finfo(jnp.float32).tiny, 1)
  return TopK(ids=ids, logp=logp, tail=jnp.where(others.any(-1), mass, 0))


def _term(p, q, d):
  """q - p - p d >= 0 with d = log q/p: one token's share of the KL, free of cancellation."""
  small = jnp.abs(d) < terms.SERIES_BELOW
  below = p * jnp.where(small, terms.excess(d), jnp.expm1(jnp.minimum(d, 1)) - d)
  return jnp.where(d > 1, q - p * (1 + d), below)  # p may underflow where exp(d) overflows


def _last(holds, low, high):
  """Largest float32 in [low, high] where `holds`, a condition that is true up to some point.

  Halves the interval of ordered bit patterns: exact after 32 steps at any scale, infinities too.
  """
  ordered = lambda bits: bits ^ ((bits >> 31) & 0x7FFFFFFF)
  to_bits = lambda x: ordered(jax.lax.bitcast_convert_type(x, jnp.int32))
  to_float = lambda bits: jax.lax.bitcast_convert_type(ordered(bits), jnp.float32)

  def halve(_, ends):
    low, high = ends
    middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
    good = holds(to_float(middle))
    return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

  return to_float(jax.lax.fori_loop(0, 32, halve, (to_bits(low), to_bits(high)))[0])


def _stored_part(log_p, log_q, on):
  """Sums over the stored tokens: KL and its margin, twice TV and its margin."""
  gap = on & (log_q == -jnp.inf)
  log_p, log_q = jnp.where(on, log_p, 0), jnp.where(on & ~gap, log_q, 0)
  p, q = jnp.where(on, jnp.exp(log_p), 0), jnp.where(on & ~gap, jnp.exp(log_q), 0)
  d = jnp.where(gap, 0, log_q - log_p)
  near = ~gap & (jnp.abs(d) < terms.SERIES_BELOW)
  apart = jnp.where(near, p * jnp.abs(jnp.expm1(jnp.minimum(d, 1))), jnp.abs(q - p))
  weight_p, weight_q = 3 + jnp.abs(log_p), 3 + jnp.abs(log_q)
  # To first order: dKL / dlog p = -p d and dKL / dlog q = q - p, so close policies lose little.
  kl_margin = _ROUNDING * (p * jnp.abs(d) * weight_p + apart * weight_q).sum(-1)
  tv_margin = _ROUNDING * (p * weight_p + q * weight_q).sum(-1)
  kl = jnp.where(gap, jnp.inf, _term(p, q, d)).sum(-1)
  return (kl, kl_margin), (apart.sum(-1), tv_margin)


def _least_gain(gain, rest, slack, cap):
  """Smallest `gain` within `slack` of rest, for a concave gain that is 0 at 0 and at cap."""
  low, high = rest - slack, rest + slack
  return jnp.where((low > 0) & (high < cap), jnp.minimum(gain(low), gain(high)), 0)


def _tail_part(log_q, outside, tail, log_cap, n, supported, axis_name):
  """Extremes over the n unstored tokens, `supported` of them by the policy, for a tail > 0.

  Returns (KL, twice TV), each as low, high, margin of low, margin of high.
  """
  total = lambda x: vocabulary.total(jnp.where(outside, x.astype(jnp.float32), 0), axis_name)
  largest = lambda x: vocabulary.maximum(jnp.where(outside, x, -jnp.inf), axis_name)
  q, cap, tall = jnp.exp(log_q), jnp.exp(log_cap), log_cap[..., None]
  error = _ROUNDING * tail * (3 + jnp.log(n) - jnp.log(tail))  # mean of |log p'| <= log(n / tail)
  least, most = -largest(jnp.where(log_q > -jnp.inf, -log_q, -jnp.inf)), largest(log_q)
  weight = 3 + jnp.where(log_q > -jnp.inf, jnp.abs(log_q), 0)
  mass, spread = total(q), _ROUNDING * total(q * weight)

  # Minimum: KL >= min over the box of KL - level (sum p' - tail), at any level.
  filled = jnp.minimum(tail, supported * cap)
  under = lambda x: total(jnp.exp(jnp.minimum(log_q - x[..., None], 0)))
  full = _last(lambda x: cap * under(x) >= filled, least, jnp.maximum(most, 0) + 128)
  level = log_cap - full  # tokens above `full` are at the cap
  x = jnp.exp(jnp.minimum(tall, log_q + level[..., None]))
  d = jnp.maximum(log_q - tall, -level[..., None])
  kl_low = total(_term(x, q, d)) + level * (tail - total(x))
  kl_low = jnp.where(tail - error > supported * cap, jnp.inf, kl_low)
  kl_low_margin = _ROUNDING * total(jnp.abs(q - x) * weight) + error * jnp.abs(level)
  shares = jnp.exp(jnp.minimum(log_q - tall, 0))  # min(q, cap) / cap
  tv_low = mass - tail + 2 * jnp.maximum(tail - cap * total(shares), 0)

  # Maximum: both terms lie below their chords over [0, cap], and chords add up to most on the
  # tokens below `edge`, the smallest q with room left. Any edge gives a bound, this one the least.
  bottom = jnp.where(supported < n, -jnp.inf, least)
  edge = _last(lambda x: total(log_q < x[..., None]) <= tail / cap, bottom, most)
  below, at_edge = log_q < edge[..., None], jnp.exp(jnp.minimum(edge - log_cap, 0))
  depth = cap * total(jnp.where(below, edge[..., None] - log_q, 0))
  swing = cap * total(jnp.where(below, at_edge[..., None] - shares, 0))
  # The one token that is neither empty nor at the cap lies on the curve, not on its chord.
  rest = tail - cap * jnp.floor(tail / cap)
  kl_gain = _least_gain(lambda f: f * (log_cap - jnp.log(f)), rest, 2 * error, cap)
  tv_gain = _least_gain(lambda f: jnp.minimum(cap * at_edge, f) - f * at_edge, rest, 2 * error, cap)
  slope = log_cap - edge - 1
  kl_high = mass + tail * slope + depth - kl_gain
  sizes = 3 * depth + tail * (3 + jnp.abs(edge) + jnp.abs(log_cap))
  kl_high_margin = error * jnp.abs(slope) + spread + _ROUNDING * sizes
  tv_high = mass + tail - 2 * (tail * at_edge - swing + tv_gain)
  tv_margin = spread + error
  return (kl_low, kl_high, kl_low_margin, kl_high_margin), (tv_low, tv_high, tv_margin, tv_margin)


def bounds(
  policy_logits: Num[Array, '*b V'],
  top: TopK,
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> tuple[Bracket, Bracket]:
  """(KL, TV) brackets per position: KL(rollout || policy) in nats, in [0, inf], and TV in [0, 1].

  The extremes over all rollouts that fit the record, widened by what float32 can do to it: about
  1e-6 for TV, less for a small KL. Where tail is 0 both bounds are the exact value as float32 gives
  it. lower is inf where the policy gives 0 to a stored token or has no room for the tail; upper as
  soon as it gives 0 to a token that may hold some of it. NaN where the record is no distribution:
  mass not 1 to 1e-4, more tail than fits under the smallest stored probability, repeated ids.
  `temperature` divides the policy's logits only; its entries from `vocab_size` on pad the
  vocabulary. float32, no gradient. Raises InputError on shapes or dtypes that do not fit,
  temperature <= 0, a known tail outside [0, 1]. arXiv 2512.23075, eq. 5.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> kl, tv = trm.brackets(policy, trm.top_k(rollout, 2))
  >>> f'{kl.lower:.4f} <= {kl.upper:.4f}'  # of three tokens, two tell all
  '0.0227 <= 0.0227'
  """
  _check_logits('policy_logits', policy_logits, temperature)
  width = policy_logits.shape[-1] * (1 if axis_name is None else jax.lax.axis_size(axis_name))
  check_vocab_size(vocab_size, width, 'policy_logits')
  width = width if vocab_size is None else vocab_size
  _check_top(top, policy_logits, width)
  policy_logits, top = jax.lax.stop_gradient((policy_logits, top))
  policy_logits = vocabulary.without_padding(policy_logits, vocab_size, axis_name)
  size = policy_logits.shape[-1]
  log_q, log_p = vocabulary.log_probs(policy_logits, temperature, axis_name), top.logp
  on, some = log_p > -jnp.inf, top.tail > 0
  real = jnp.arange(size) < vocabulary.real_entries(size, vocab_size, axis_name)
  outside = _outside(top.ids, on, size, axis_name) & jnp.broadcast_to(real, log_q.shape)
  here = jax.vmap(lambda ids: vocabulary.pick(log_q, ids, axis_name), -1, -1)(top.ids)
  log_cap = jnp.where(on, log_p, jnp.inf).min(-1)
  log_cap = jnp.maximum(log_cap + 2 * _ROUNDING * (3 + jnp.abs(log_cap)), _SMALLEST_CAP)
  n, supported, mass = (
    vocabulary.total(jnp.where(outside, x.astype(jnp.float32), 0), axis_name)
    for x in (outside, log_q > -jnp.inf, jnp.exp(log_q))
  )
  room = jnp.where(on.all(-1), n * jnp.exp(log_cap) * (1 + _MASS), 0)
  fits = (jnp.abs(jnp.exp(log_p).sum(-1) + top.tail - 1) <= _MASS) & (top.tail <= room)
  fits &= (n == (width - on.sum(-1)).astype(jnp.float32)) & ~jnp.isnan(mass)

  def bracket(stored, low, high, low_margin, high_margin):
    known, margin = stored
    widen = lambda x, tail_margin: jnp.where(
      x < jnp.inf, margin + tail_margin + 2 * _ROUNDING * jnp.abs(x) + _SECOND_ORDER, 0
    )
    low, high = known + low, known + high
    low = extremes.at_least(low - widen(low, low_margin), 0)
    high = high + widen(high, high_margin)
    low, high = (jnp.where(fits, jnp.where(some, x, known + mass), jnp.nan) for x in (low, high))
    return Bracket(low, extremes.at_least(high, low))

  kl, twice_tv = map(
    lambda stored, tail: bracket(stored, *tail),
    _stored_part(log_p, here, on),
    _tail_part(log_q, outside, jnp.where(some, top.tail, 1), log_cap, n, supported, axis_name),
  )
  return kl, jax.tree.map(lambda x: extremes.at_most(x / 2, 1), twice_tv)
