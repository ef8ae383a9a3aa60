"""Every error bound of the paper, one function each; `sharp` has better ones and a table.

    Error = J(policy) - J(rollout) - L',   L' = E_rollout[R sum_t (ratio_t - 1)],   |Error| <= bound

| argument | meaning                                                               | range    |
| -------- | --------------------------------------------------------------------- | -------- |
| T        | longest response: a static int; shorter ones count 0 after their end  | >= 1     |
| epsilon  | largest token TV over all reachable contexts (eq. 6)                  | [0, 1]   |
| delta    | largest token KL(rollout || policy) there, nats (eq. 6)               | [0, inf] |
| d_bar    | mean TV at each position under the rollout, over all rows [T] (eq. 8) | [0, 1]   |
| seq_tv   | TV of the two distributions over whole responses (eq. 7)              | [0, 1]   |
| seq_kl   | KL of the same, nats: sum over t of the mean token KL (eq. 7)         | [0, inf] |
| budget   | sum_t chi2(c_t) never exceeds it on any response                      | [0, inf] |

`epsilon_t` and `delta_t` [T] are epsilon and delta at each position. Functions are for R in [0, 1].
The paper's constants (4, and 2 in Lemma 3.1) hold for |R| <= 1 as well; for R in [0, 1] half of
them is enough (`to_range`). Scalars in, scalars out (`jax.vmap` for batches): float32, or float64
where given under x64. Finite, with finite gradients, up to T = 10^6; the gradient of sqrt at 0 is
taken as 0. `InputError` for a concrete value that is NaN, out of range or of the wrong length;
traced values are not looked at, but NaN gives NaN. All bounds need a policy without tokens that the
rollout never samples (top-p, top-k). arXiv 2512.23075, sections 2-3 and appendix D.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from trm_jax.types import InputError

Real = Float[Array, ''] | float | int
Reals = Float[Array, '_T']
LARGEST = dict(epsilon=1, epsilon_t=1, d_bar=1, seq_tv=1, p=1)
OVER_POSITIONS = ('epsilon_t', 'delta_t', 'd_bar')
SIX = (
  'pinsker_marginal_kl',
  'pinsker_marginal_tv',
  'mixed_kl',
  'mixed_tv',
  'coupling',
  'adaptive',
)


def horizon(T) -> int:
  """T as an int >= 1."""
  if isinstance(T, jax.core.Tracer) or not hasattr(T, '__index__') or operator.index(T) < 1:
    raise InputError(
      f'T={T} must be a static int >= 1: the number of slots of the longest response.'
    )
  return operator.index(T)


def real(name: str, value, length: int | None = None) -> Array:
  """`value` as a float array of at least 32 bits; looks at it where it is concrete."""
  shape = np.shape(value)
  if name in OVER_POSITIONS and (len(shape) != 1 or length not in (None, *shape)):
    raise InputError(
      f'{name} has shape {shape} and must be one value per position, ({length or "T"},); pad the'
      ' positions after the end with 0.'
    )
  if name not in OVER_POSITIONS and shape:
    raise InputError(f'{name} has shape {shape} and must be a scalar; use jax.vmap for a batch.')
  if not isinstance(value, jax.core.Tracer):
    seen, most = np.asarray(value, np.float64), LARGEST.get(name, math.inf)
    # NaN is wrong as well; a mean of ones may exceed 1 by its rounding.
    wrong = ~((seen >= 0) & (seen <= most + 1e-6))
    if wrong.any():
      raise InputError(
        f'{name}={seen[wrong].flat[0]} must lie in [0, {most}]: the head of bounds/paper.py says'
        ' what each argument measures.'
      )
  value = jnp.asarray(value)
  if not jnp.issubdtype(value.dtype, jnp.floating) or jnp.finfo(value.dtype).bits < 32:
    value = value.astype(jnp.result_type(float))
  return value


def least(a, b) -> Array:
  """The smaller one, element by element; NaN where either is, which XLA's on CPUs may drop."""
  return jnp.where((a < b) | (a != a), a, b)


def root(x: Array) -> Array:
  """sqrt with gradient 0 at 0."""
  return jnp.where(x <= 0, 0, jnp.sqrt(jnp.where(x <= 0, 1, x)))


def tv_of_kl(x: Array) -> Array:
  """min(1, sqrt(x / 2)), element by element."""
  # Beyond 2 nats the cap is reached; an infinite KL then needs no care elsewhere.
  return root(least(x, 2.0) / 2)


def before(T: int, like: Array) -> Array:
  """t - 1 for t = 1..T: how many tokens come before."""
  return jnp.arange(T, dtype=like.dtype)


def after(T: int, like: Array) -> Array:
  """T - t for t = 1..T: how many tokens come after."""
  return before(T, like)[::-1]


# What the bounds are made of.


def pinsker(delta: Real) -> Float[Array, '']:
  """Largest TV that a KL of `delta` nats allows: min(1, sqrt(delta / 2)) in [0, 1]."""
  return tv_of_kl(real('delta', delta))


def spread(count: Array, delta: Real) -> Array:
  """min(1, sqrt(count delta / 2)); 0 where count is 0, even for an infinite delta."""
  return least(1, jnp.sqrt(count) * pinsker(delta))


def advantage_limit(*, epsilon: Real, delta: Real) -> Float[Array, '']:
  """Lemma 3.1: max_t ||g_t|| <= 2 min(1, epsilon, sqrt(delta / 2)), g_t = E_policy[A_t | c_t]."""
  return 2 * least(real('epsilon', epsilon), pinsker(delta))


def visitation_tv(
  *, T: int, epsilon: Real, delta: Real, seq_tv: Real = 1.0, seq_kl: Real = math.inf
) -> Float[Array, 'T']:
  """Lemma 3.2 (eq. 10): largest TV of the two visitation distributions of contexts c_t, [T].

  min(1, (t-1) epsilon, sqrt((t-1) delta / 2), seq_tv, sqrt(seq_kl / 2))
  """
  epsilon = real('epsilon', epsilon)
  k = before(horizon(T), epsilon)
  whole = least(real('seq_tv', seq_tv), pinsker(real('seq_kl', seq_kl)))
  return least(least(k * epsilon, spread(k, delta)), whole)


def future_weights(*, T: int, epsilon: Real, delta: Real) -> Float[Array, 'T']:
  """w_t = min(1, (T-t) epsilon, sqrt((T-t) delta / 2)): largest TV of the two futures, [T].

  LN-TRM's weights; their sum is its Z(T), 0 at T = 1 (section 6). w_T = 0: the last token has no
  future. T is the longest response, not the realised length, which a context does not know.
  """
  epsilon = real('epsilon', epsilon)
  r = after(horizon(T), epsilon)
  return least(r * epsilon, spread(r, delta))


def sequence_tv(*, d_bar: Reals, seq_kl: Real) -> Float[Array, '']:
  """Largest TV over whole responses: min(1, sum_t d_bar_t, sqrt(seq_kl / 2)) in [0, 1]."""
  total = real('d_bar', d_bar).sum()
  return least(total, pinsker(real('seq_kl', seq_kl)))


def worst_d_bar(*, T: int, epsilon: Real, delta: Real) -> Float[Array, 'T']:
  """The largest d_bar there can be: min(1, epsilon, sqrt(delta / 2)) at each position, [T]."""
  return jnp.full(horizon(T), advantage_limit(epsilon=epsilon, delta=delta) / 2)


def to_range(bound: Real, *, low: float, high: float) -> Float[Array, '']:
  """A bound with the paper's constants, for R in [low, high]: bound (high - low) / 2.

  For R in [0, 1] this halves it: L' does not change when a constant is added to R.
  """
  return real('bound', bound) * (width(low, high) / 2)


def width(low: float, high: float) -> float:
  if not -math.inf < low < high < math.inf:
    raise InputError(
      f'The reward range low, high = [{low}, {high}] must be finite with low < high.'
    )
  return high - low


# The bounds of the paper.


def classical_tv(*, T: int, epsilon: Real) -> Float[Array, '']:
  """2 T (T-1) epsilon^2, nowhere capped (eq. 11).

  >>> f'{trm.classical_tv(T=4096, epsilon=.001):.1f}'
  '33.5'
  """
  return 2.0 * horizon(T) * (T - 1) * real('epsilon', epsilon) ** 2


def classical_kl(*, T: int, delta: Real) -> Float[Array, '']:
  """T (T-1) delta, nowhere capped (eq. 11).

  >>> f'{trm.classical_kl(T=4096, delta=1e-4):.1f}'  # T (T - 1) delta
  '1677.3'
  """
  delta, pairs = real('delta', delta), float(horizon(T) * (T - 1))
  return pairs * delta if pairs else jnp.zeros_like(delta)  # one token has no error, at any delta


def coupling(*, T: int, epsilon: Real) -> Float[Array, '']:
  """4 min(1, epsilon) sum_t min(1, (t-1) epsilon) (eq. 17).

  >>> f'{trm.coupling(T=4096, epsilon=.001):.1f}'
  '14.4'
  """
  epsilon = least(1, real('epsilon', epsilon))
  return 4 * epsilon * least(1, before(horizon(T), epsilon) * epsilon).sum()


def pinsker_marginal_kl(*, T: int, delta: Real) -> Float[Array, '']:
  """4 min(1, sqrt(delta/2)) sum_t min(1, sqrt((t-1) delta / 2)) (eq. 12).

  >>> f'{trm.pinsker_marginal_kl(T=4096, delta=1e-4):.1f}'  # grows with T^1.5
  '34.9'
  """
  first = pinsker(delta)
  return 4 * first * spread(before(horizon(T), first), delta).sum()


def pinsker_marginal_tv(*, T: int, epsilon: Real, delta: Real) -> Float[Array, '']:
  """4 min(1, epsilon) sum_t min(1, sqrt((t-1) delta / 2)) (eq. 13).

  >>> f'{trm.pinsker_marginal_tv(T=4096, epsilon=.007, delta=1e-4):.1f}'
  '34.6'
  """
  epsilon = least(1, real('epsilon', epsilon))
  return 4 * epsilon * spread(before(horizon(T), epsilon), delta).sum()


def mixed_kl(*, T: int, delta: Real, seq_kl: Real) -> Float[Array, '']:
  """4 T min(1, sqrt(delta/2)) min(1, sqrt(seq_kl/2)) (eq. 15).

  >>> f'{trm.mixed_kl(T=4096, delta=1e-4, seq_kl=.01):.1f}'
  '8.2'
  """
  return 4.0 * horizon(T) * pinsker(delta) * pinsker(real('seq_kl', seq_kl))


def mixed_tv(*, T: int, epsilon: Real, seq_tv: Real) -> Float[Array, '']:
  """4 T min(1, epsilon) min(1, seq_tv) (eq. 16).

  >>> f'{trm.mixed_tv(T=4096, epsilon=.001, seq_tv=.05):.2f}'
  '0.82'
  """
  epsilon, seq_tv = real('epsilon', epsilon), real('seq_tv', seq_tv)
  return 4.0 * horizon(T) * least(1, epsilon) * least(1, seq_tv)


def adaptive_kl(*, d_bar: Reals, delta: Real) -> Float[Array, '']:
  """4 sum_t d_bar_t min(1, sqrt((T-t) delta / 2)) (eq. 18)."""
  d_bar = real('d_bar', d_bar)
  return 4 * (d_bar * spread(after(d_bar.size, d_bar), delta)).sum()


def adaptive_tv(*, d_bar: Reals, epsilon: Real) -> Float[Array, '']:
  """4 sum_t d_bar_t min(1, (T-t) epsilon) (eq. 19)."""
  d_bar, epsilon = real('d_bar', d_bar), real('epsilon', epsilon)
  return 4 * (d_bar * least(1, after(d_bar.size, d_bar) * epsilon)).sum()


def adaptive(*, d_bar: Reals, epsilon: Real, delta: Real) -> Float[Array, '']:
  """4 sum_t d_bar_t w_t, w = `future_weights`: the paper's hybrid (eq. 20).

  >>> settings = dict(T=64, epsilon=.007, delta=1e-4)
  >>> d_bar = trm.bounds.worst_d_bar(**settings)
  >>> f'{trm.adaptive(d_bar=d_bar, epsilon=.007, delta=1e-4):.3f}'
  '0.067'
  """
  d_bar = real('d_bar', d_bar)
  return 4 * (d_bar * future_weights(T=d_bar.size, epsilon=epsilon, delta=delta)).sum()


def linear(*, d_bar: Reals) -> Float[Array, '']:
  """4 sum_t d_bar_t <= 4 T epsilon: every future at its cap. SER bounds this one."""
  return 4 * real('d_bar', d_bar).sum()


def b_star(
  *, T: int, epsilon: Real, delta: Real, d_bar: Reals, seq_kl: Real, seq_tv: Real
) -> Float[Array, '']:
  """B*, the smallest of the paper's six bounds, as printed (eq. 21).

  >>> settings = dict(T=64, epsilon=.007, delta=1e-4)
  >>> d_bar = trm.bounds.worst_d_bar(**settings)
  >>> f'{trm.b_star(**settings, d_bar=d_bar, seq_kl=.0064, seq_tv=.06):.3f}'
  '0.067'
  """
  return smallest(printed(T, epsilon, delta, d_bar, seq_kl, seq_tv), SIX)


def smallest(by_name, names) -> Array:
  """The smallest of the named bounds; NaN where one is."""
  return functools.reduce(least, [by_name[name] for name in names])


def printed(T, epsilon, delta, d_bar, seq_kl, seq_tv) -> dict[str, Array]:
  """All bounds of the paper by name, as printed."""
  d_bar = real('d_bar', d_bar, horizon(T))
  return dict(
    classical_tv=classical_tv(T=T, epsilon=epsilon),
    classical_kl=classical_kl(T=T, delta=delta),
    linear=linear(d_bar=d_bar),
    pinsker_marginal_kl=pinsker_marginal_kl(T=T, delta=delta),
    pinsker_marginal_tv=pinsker_marginal_tv(T=T, epsilon=epsilon, delta=delta),
    mixed_kl=mixed_kl(T=T, delta=delta, seq_kl=seq_kl),
    mixed_tv=mixed_tv(T=T, epsilon=epsilon, seq_tv=seq_tv),
    coupling=coupling(T=T, epsilon=epsilon),
    adaptive_kl=adaptive_kl(d_bar=d_bar, delta=delta),
    adaptive_tv=adaptive_tv(d_bar=d_bar, epsilon=epsilon),
    adaptive=adaptive(d_bar=d_bar, epsilon=epsilon, delta=delta),
  )


# Where one bound takes over from another.


def crossover(*, epsilon: Real, delta: Real) -> Float[Array, '']:
  """T - t up to which (T-t) epsilon <= sqrt((T-t) delta / 2): delta / (2 epsilon^2); inf at 0.

  A position, without gradient.
  """
  epsilon, delta = jax.lax.stop_gradient((real('epsilon', epsilon), real('delta', delta)))
  known = jnp.where(epsilon > 0, epsilon, 1)
  return jnp.where(epsilon > 0, delta / 2 / known / known, jnp.inf)


def last_uncapped(*, epsilon: Real) -> Float[Array, '']:
  """floor(1 / epsilon) + 1: the last t with (t-1) epsilon <= 1; printed as the first capped one.

  A position, without gradient; inf at 0.
  """
  return jnp.floor(1 / jax.lax.stop_gradient(real('epsilon', epsilon))) + 1


def acceptance(*, T: int, p: Real) -> Float[Array, '']:
  """(1 - p)^T: share kept by a max criterion that a token violates with probability p (App.)."""
  p = real('p', p)
  return jnp.exp(horizon(T) * jnp.log1p(-least(p, 1 - jnp.finfo(p.dtype).eps)))
