"""Sharper error bounds than the paper's, and the table that sets all of them side by side.

| bound       | what it adds to the paper's                                               |
| ----------- | ------------------------------------------------------------------------- |
| `product`   | the futures' couplings must all hold; limits may differ by position       |
| `marginal`  | Lemmas 3.1 and 3.2 at each t, so below Mixed, Pinsker-Marginal, Coupling   |
| `budget_l2` | a chi-square budget on the response: linear in it, without T              |
| `trivial`   | the two terms of Error apart                                              |

Arguments, units, dtypes and errors are those of `trm_jax.bounds`. `tabulate` and `b_star_tight`
take the range of the reward and half of the paper's constants.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.bounds import paper


def _later(x: Array) -> Array:
  """sum over j > t of x_j, at each t."""
  return jnp.append(jnp.cumsum(x[:0:-1])[::-1], jnp.zeros(1, x.dtype))


def _earlier(x: Array) -> Array:
  """sum over s < t of x_s, at each t."""
  return _later(x[::-1])[::-1]


# Sharper bounds: positions, the product of survivals, and a chi-square budget.


def position_wise(*, d_bar: paper.Reals, epsilon_t: paper.Reals) -> Float[Array, '']:
  """4 sum_t d_bar_t min(1, sum_{j>t} epsilon_j): limits may differ by position.

  Printed without the cap in arXiv 2606.10968; eq. 19 where all epsilon_t are equal.
  """
  d_bar = paper.real('d_bar', d_bar)
  later = _later(paper.real('epsilon_t', epsilon_t, d_bar.size))
  return 4 * (d_bar * paper.least(1, later)).sum()


def _meeting(epsilon_t: Array) -> Array:
  """1 - prod_{j>t} (1 - epsilon_j)."""
  tiny = jnp.finfo(epsilon_t.dtype).eps
  return -jnp.expm1(_later(jnp.log1p(-paper.least(epsilon_t, 1 - tiny))))


def product(
  *, d_bar: paper.Reals, epsilon_t: paper.Reals, delta_t: paper.Reals | None = None
) -> Float[Array, '']:
  """4 sum_t d_bar_t min(1 - prod_{j>t} (1 - epsilon_j), sqrt(sum_{j>t} delta_j / 2)).

  The couplings of the two futures must all hold; never above `position_wise` or eq. 18-20. The
  product form is arXiv 2606.10968's, with `delta_t` None.
  """
  d_bar = paper.real('d_bar', d_bar)
  weights = _meeting(paper.real('epsilon_t', epsilon_t, d_bar.size))
  if delta_t is not None:
    later = _later(paper.real('delta_t', delta_t, d_bar.size))
    weights = paper.least(weights, paper.tv_of_kl(later))
  return 4 * (d_bar * weights).sum()


def prefix_budget(*, epsilon_t: paper.Reals, d_limit: paper.Real) -> Float[Array, '']:
  """4 d_limit sum_t (t-1) epsilon_t, where sum_{s<=t} d_bar_s <= t d_limit for every t.

  2 T (T-1) epsilon d_limit for equal epsilon_t (prefix form of arXiv 2606.10968).
  """
  epsilon_t, d_limit = paper.real('epsilon_t', epsilon_t), paper.real('d_limit', d_limit)
  return 4 * d_limit * (paper.before(epsilon_t.size, epsilon_t) * epsilon_t).sum()


def pointwise_ratio(*, T: int, tau: paper.Real) -> Float[Array, '']:
  """sum_t (e^tau - 1) min(2, e^((T-t) tau) - 1): the accepted part where all |log_ratio| <= tau.

  Needs no bound outside the accepted responses, and R in [0, 1]; exponential in tau (App.
  G). From tau = 60 on the value stays at 2.3e26 (T - 1).
  """
  tau = paper.least(paper.real('tau', tau), 60)
  capped = paper.least(paper.after(paper.horizon(T), tau) * tau, math.log(3))
  return jnp.expm1(tau) * jnp.expm1(capped).sum()


def l2(second_moment: paper.Real, *, sd: float = 0.5) -> Float[Array, '']:
  """sd(R) sqrt(E[Y^2]), Y = prod_t ratio_t - 1 - sum_t (ratio_t - 1); sd <= 1/2 for R in [0, 1]."""
  return sd * paper.root(paper.real('second_moment', second_moment))


def budget_l2(budget: paper.Real) -> Float[Array, '']:
  """sqrt(e^X - 1 - X) / 2 ~ X / sqrt(8), X = `budget`: no T in it, linear in the sequence's chi2.

  The rate T^1.5 of Pinsker-Marginal is an artefact: X ~ 2 T delta gives 0.7 T delta. Needs an exact
  budget on every response, which a KL limit alone is not (see `chi2_limit`). From X = 160 on the
  value stays at 2.8e34, far above any error.
  """
  x = paper.least(paper.real('budget', budget), 160)
  near, far = jnp.where(x < 1, x, 1), jnp.where(x < 1, 1, x)
  series = 1.0  # 2 (e^x - 1 - x) / x^2: the difference itself would cancel for small x
  for k in range(18, 2, -1):
    series = 1 + near / k * series
  small = near * jnp.sqrt(series / 2)
  large = jnp.exp(far / 2) * jnp.sqrt(1 - (1 + far) * jnp.exp(-far))
  return 0.5 * jnp.where(x < 1, small, large)


def chi2_limit(*, kl: paper.Real, max_ratio: paper.Real) -> Float[Array, '']:
  """2 max(1, max_ratio) kl >= chi2 of a context whose ratios over the vocabulary <= max_ratio.

  0 at kl = 0, where the two policies are equal; without gradient where it is infinite.
  """
  kl, largest = paper.real('kl', kl), paper.real('max_ratio', max_ratio)
  largest = jnp.where(largest < 1, 1, largest)
  known = (kl == 0) | ((kl < jnp.inf) & (largest < jnp.inf))
  limit = 2 * jnp.where(known & (kl > 0), largest, 1) * jnp.where(known, kl, 0)
  return jnp.where(known, limit, jax.lax.stop_gradient(kl + largest))  # inf or NaN


def trivial(*, d_bar: paper.Reals, seq_tv: paper.Real) -> Float[Array, '']:
  """sum_t d_bar_t + seq_tv >= |L'| + |J(policy) - J(rollout)|: nothing is said about contexts."""
  return paper.real('d_bar', d_bar).sum() + paper.real('seq_tv', seq_tv)


def marginal(
  *,
  T: int,
  epsilon: paper.Real,
  delta: paper.Real,
  d_bar: paper.Reals,
  seq_kl: paper.Real,
  seq_tv: paper.Real,
) -> Float[Array, '']:
  """2 sum_t ||g_t|| TV(contexts c_t) with Lemmas 3.1 and 3.2 taken at each t, not on the whole.

  Never above eq. 12, 13 and 15-17. The TV of contexts is at most sum_{s<t} d_bar_s as well.
  """
  contexts = paper.visitation_tv(T=T, epsilon=epsilon, delta=delta, seq_tv=seq_tv, seq_kl=seq_kl)
  contexts = paper.least(contexts, _earlier(paper.real('d_bar', d_bar, T)))
  return 2 * paper.advantage_limit(epsilon=epsilon, delta=delta) * contexts.sum()


def b_star_tight(
  *,
  T: int,
  epsilon: paper.Real,
  delta: paper.Real,
  d_bar: paper.Reals,
  seq_kl: paper.Real,
  seq_tv: paper.Real,
  budget: paper.Real | None = None,
  low: float = 0.0,
  high: float = 1.0,
) -> Float[Array, '']:
  """The smallest of `trivial`, `marginal`, `product` and `budget_l2`, for R in [low, high].

  Half of the paper's constants, and every argument first sharpened by the others (Pinsker, chain
  rule). At most (high - low) / 2 of `b_star`.

  >>> settings = dict(T=64, epsilon=.007, delta=1e-4)
  >>> d_bar = trm.bounds.worst_d_bar(**settings)
  >>> f'{trm.b_star_tight(**settings, d_bar=d_bar, seq_kl=.0064, seq_tv=.06):.3f}'
  '0.033'
  """
  by_name = _sharp(T, epsilon, delta, d_bar, seq_kl, seq_tv, budget)
  return paper.smallest(by_name, by_name) * paper.width(low, high)


def _sharp(T, epsilon, delta, d_bar, seq_kl, seq_tv, budget):
  """Our bounds by name, for R in [0, 1]."""
  limit = paper.advantage_limit(epsilon=epsilon, delta=delta) / 2
  d_bar = paper.least(paper.real('d_bar', d_bar, paper.horizon(T)), limit)
  seq_kl = paper.least(paper.real('seq_kl', seq_kl), T * paper.real('delta', delta))
  seq_tv = paper.least(paper.real('seq_tv', seq_tv), paper.sequence_tv(d_bar=d_bar, seq_kl=seq_kl))
  by_name = {}
  if budget is not None:
    # E (prod_t ratio_t)^2 <= e^X and TV <= chi / 2, which is 1 at X = log 5.
    square = jnp.expm1(paper.least(paper.real('budget', budget), math.log(5)))
    seq_tv = paper.least(seq_tv, paper.root(square) / 2)
    by_name = dict(budget=budget_l2(budget))
  known = dict(T=T, epsilon=limit, delta=delta, d_bar=d_bar, seq_kl=seq_kl, seq_tv=seq_tv)
  each = jnp.full_like(d_bar, 1)
  return by_name | dict(
    trivial=trivial(d_bar=d_bar, seq_tv=seq_tv),
    marginal=paper.to_range(marginal(**known), low=0.0, high=1.0),
    product=paper.to_range(
      product(d_bar=d_bar, epsilon_t=limit * each, delta_t=delta * each), low=0.0, high=1.0
    ),
  )


# All of them side by side.


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """Every bound for one setting, in units of the reward.

  Attributes:
    T: longest response.
    low, high: range of the reward.
    paper: by name; the printed ones times high - low, as for a reward rescaled to [0, 1].
    sharp: ours by name, for the range as it is.
    largest_surrogate: no L' can exceed it: (high - low) min(sum_t d_bar_t, sqrt(budget) / 2).
  """

  T: int = dataclasses.field(metadata=dict(static=True))
  low: float = dataclasses.field(metadata=dict(static=True))
  high: float = dataclasses.field(metadata=dict(static=True))
  paper: dict[str, Float[Array, '']]
  sharp: dict[str, Float[Array, '']]
  largest_surrogate: Float[Array, '']

  @property
  def b_star(self) -> Float[Array, '']:
    """The smallest of the paper's six."""
    return paper.smallest(self.paper, paper.SIX)

  @property
  def b_star_tight(self) -> Float[Array, '']:
    """The smallest of ours."""
    return paper.smallest(self.sharp, self.sharp)

  @property
  def active(self) -> str:
    """Which of the paper's six is B*; concrete tables only."""
    return min(paper.SIX, key=lambda name: float(self.paper[name]))

  @property
  def active_tight(self) -> str:
    """Which of ours is the smallest; concrete tables only."""
    return min(self.sharp, key=lambda name: float(self.sharp[name]))

  @property
  def values(self) -> dict[str, Float[Array, '']]:
    """All bounds by name, the two minima among them."""
    return self.paper | dict(b_star=self.b_star) | self.sharp | dict(b_star_tight=self.b_star_tight)

  @property
  def vacuous(self) -> dict[str, Bool[Array, '']]:
    """By name: no policy can ever be certified, since L' - bound <= 0 for all of them."""
    return {name: value >= self.largest_surrogate for name, value in self.values.items()}

  @property
  def above_range(self) -> dict[str, Bool[Array, '']]:
    """By name: the bound is no smaller than the whole range of the reward."""
    return {name: value >= self.high - self.low for name, value in self.values.items()}


def tabulate(
  *,
  T: int,
  delta: paper.Real,
  epsilon: paper.Real | None = None,
  d_bar: paper.Reals | None = None,
  seq_kl: paper.Real | None = None,
  seq_tv: paper.Real | None = None,
  budget: paper.Real | None = None,
  low: float = 0.0,
  high: float = 1.0,
) -> Table:
  """All bounds for one setting; what is not given is the worst that the rest allows.

  epsilon: Pinsker; d_bar: `worst_d_bar`; seq_kl: T delta; seq_tv: `sequence_tv`; no budget: no
  `budget` bound. Pass delta=math.inf where only TV is known.

  >>> table = trm.tabulate_bounds(T=64, delta=1e-4)
  >>> sorted(table.paper)[:3]
  ['adaptive', 'adaptive_kl', 'adaptive_tv']
  """
  width, T = paper.width(low, high), paper.horizon(T)
  epsilon = paper.pinsker(delta) if epsilon is None else paper.real('epsilon', epsilon)
  if d_bar is None:
    d_bar = paper.worst_d_bar(T=T, epsilon=epsilon, delta=delta)
  d_bar = paper.real('d_bar', d_bar, T)
  seq_kl = T * paper.real('delta', delta) if seq_kl is None else paper.real('seq_kl', seq_kl)
  seq_tv = paper.sequence_tv(d_bar=d_bar, seq_kl=seq_kl) if seq_tv is None else seq_tv
  printed = paper.printed(T, epsilon, delta, d_bar, seq_kl, seq_tv)
  sharp = _sharp(T, epsilon, delta, d_bar, seq_kl, seq_tv, budget)
  largest = d_bar.sum()
  if budget is not None:
    largest = paper.least(largest, paper.root(paper.real('budget', budget)) / 2)
  return Table(
    T=T,
    low=low,
    high=high,
    paper={name: value * width for name, value in printed.items()},
    sharp={name: value * width for name, value in sharp.items()},
    largest_surrogate=largest * width,
  )
