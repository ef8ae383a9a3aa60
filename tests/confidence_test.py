"""Confidence bounds: published figures, definitions solved by another route, and coverage."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from trm_jax.certificates import confidence
from trm_jax.types import InputError

SMALL = jnp.array([0.05, -0.02, 0.11, 0, -0.01, 0.07, 0.03, 0.02] * 16)
ALPHA = 0.05


def test_worked_example():
  near = dict(abs=2e-6)
  assert float(SMALL.mean()) == pytest.approx(0.031250, **near)
  assert float(confidence.betting(SMALL, alpha=ALPHA)) == pytest.approx(-0.014502, **near)
  assert float(confidence.log_evalue(SMALL)) == pytest.approx(1.577416, **near)
  assert float(confidence.normal(SMALL, alpha=ALPHA)) == pytest.approx(0.025257, **near)
  bernstein = confidence.empirical_bernstein(SMALL, alpha=ALPHA, low=-1, high=1)
  assert float(bernstein) == pytest.approx(-0.114196, **near)
  # Hoeffding's inequality on [-1, 1] is shown in the same place, as what not to use.
  hoeffding = SMALL.mean() - 2 * math.sqrt(math.log(1 / ALPHA) / (2 * SMALL.size))
  assert float(hoeffding) == pytest.approx(-0.185102, **near)


def log_evalue(x, mean, low):
  """By products of factors, where the package sums logarithms."""
  found = []
  for g in range(10):
    bet = 0.9 / 2**g
    found.append(np.prod([1 + bet * (value - mean) / (mean - low) for value in x]))
  return math.log(sum(found) / 10)


@pytest.mark.parametrize('seed', range(4))
def test_betting_solves_its_equation(seed):
  rng = np.random.default_rng(seed)
  low = [-1.0, -2.5, 0.0, -1.0][seed]
  x = low + rng.gamma(0.5, size=60) * (1 + seed)
  with jax.enable_x64(True):
    value = log_evalue(x, 0.7, low)
    assert float(confidence.log_evalue(jnp.asarray(x), mean=0.7, low=low)) == pytest.approx(value)
    found = float(confidence.betting(jnp.asarray(x), alpha=0.1, low=low))
  want = optimize.brentq(
    lambda m: log_evalue(x, m, low) - math.log(10), low + 1e-3, x.mean(), xtol=1e-12
  )
  assert found == pytest.approx(want, abs=1e-8)
  single = confidence.betting(jnp.asarray(x, jnp.float32), alpha=0.1, low=low)
  assert single.dtype == jnp.float32 and float(single) == pytest.approx(want, abs=1e-5)


def test_betting_stays_between_the_end_and_the_mean():
  for x in ([-1.0, -1.0], [0.0], [3.0], [0.0, 1e6], [-1.0, 5.0, 0.1]):
    x = jnp.array(x)
    assert -1 <= float(confidence.betting(x, alpha=ALPHA)) <= float(x.mean())
  # 5.9 full rewards are needed before anything can be certified.
  assert float(confidence.betting(jnp.full(59, 0.1), alpha=ALPHA)) < 0
  assert float(confidence.betting(jnp.full(62, 0.1), alpha=ALPHA)) > 0


@pytest.mark.parametrize('seed', range(3))
def test_catoni_solves_its_equation(seed):
  x, variance = np.random.default_rng(seed).standard_t(3, size=[5, 200, 40][seed]), 3.0
  tail, n = math.log(1 / ALPHA), x.size
  rate = math.sqrt(2 * tail / (n * variance))

  def excess(m):
    u = rate * (x - m)
    phi = np.where(u > 0, np.log(1 + u + u**2 / 2), -np.log(1 - u + u**2 / 2))
    return phi.sum() - n * rate**2 * variance / 2 - tail

  want = optimize.brentq(excess, -1e4, 1e4)
  with jax.enable_x64(True):
    found = confidence.catoni(jnp.asarray(x), alpha=ALPHA, variance=variance)
  assert float(found) == pytest.approx(want, abs=1e-8)


def bounded(rng, shape):
  """Mean 0 in [-1, 1]: mostly a small gain, rarely a loss of everything."""
  q = 0.02
  return np.where(rng.random(shape) < q, -1.0, q / (1 - q))


def weights(rng, shape):
  """R (W - 1) for a lognormal W with mean 1: mean 0, >= -1, no upper end."""
  return np.exp(rng.standard_normal(shape) - 0.5) - 1


def coin(rng, shape):
  return rng.choice([-1.0, 1.0], shape)


BOUNDS = {
  'betting': (lambda x: confidence.betting(x, alpha=0.1), (bounded, weights, coin)),
  'empirical_bernstein': (
    lambda x: confidence.empirical_bernstein(x, alpha=0.1, low=-1, high=1),
    (bounded, coin),
  ),
  'catoni': (
    lambda x: confidence.catoni(x, alpha=0.1, variance=math.e - 1),
    (bounded, weights, coin),
  ),
}


@pytest.mark.parametrize('name', BOUNDS)
def test_coverage(name):
  bound, laws = BOUNDS[name]
  rng, repeats = np.random.default_rng(5), 1000
  each = jax.jit(jax.vmap(bound))
  for law in laws:
    lower = each(jnp.asarray(law(rng, (repeats, 64)), jnp.float32))
    wrong = float((lower > 0).mean())
    assert wrong <= 0.1 + 3 * math.sqrt(0.09 / repeats), (law.__name__, wrong)
    assert float(lower.mean()) > -1.5  # it says something


def test_the_normal_bound_fails_on_rare_disasters():
  x = jnp.asarray(bounded(np.random.default_rng(0), (1000, 16)), jnp.float32)
  wrong = (jax.vmap(lambda row: confidence.normal(row, alpha=ALPHA))(x) > 0).mean()
  assert float(wrong) > 0.65  # 0.98^16 = 0.72 of the batches hold no disaster
  fine = jnp.asarray(coin(np.random.default_rng(0), (1000, 64)), jnp.float32)
  wrong = (jax.vmap(lambda row: confidence.normal(row, alpha=ALPHA))(fine) > 0).mean()
  assert 0.02 < float(wrong) < 0.08


def test_cumulative_by_hand_and_at_all_times():
  found = confidence.cumulative(2.0, 0.5, alpha=ALPHA, bet=0.5)
  want = 2 - (math.log(20) + (math.log(2) - 0.5) * 0.5) / 0.5
  assert float(found) == pytest.approx(want)
  rng, repeats = np.random.default_rng(1), 2000
  means = 0.05 * np.sin(np.arange(200) / 9)  # they move, and the last look is not the only one
  x = weights(rng, (repeats, 200)) * 0.3 + means
  total, squares = np.cumsum(x, -1), np.cumsum(x**2, -1)
  lower = confidence.cumulative(total, squares, alpha=0.1, bet=0.2)
  wrong = (np.asarray(lower) > np.cumsum(means)).any(-1).mean()
  assert wrong <= 0.1 + 3 * math.sqrt(0.09 / repeats)


@pytest.mark.parametrize('size', [pytest.param(40, marks=pytest.mark.slow), 5000])
@pytest.mark.parametrize('name', [*BOUNDS, 'normal'])
def test_a_unit_that_is_no_number_leaves_no_bound(name, size, optimised):
  """Not even among thousands, where XLA's maximum and minimum on CPUs drop NaN."""
  bound = BOUNDS.get(name, [lambda x: confidence.normal(x, alpha=0.1)])[0]
  x = jnp.asarray(coin(np.random.default_rng(0), size), jnp.float32)
  for run in (bound, jax.jit(bound, compiler_options=optimised)):
    assert np.isfinite(run(x))
    for bad in (math.nan, math.inf):
      assert np.isnan(run(x.at[size // 2].set(bad)))


@pytest.mark.slow
def test_units_that_do_not_exist_count_nowhere():
  x = jnp.asarray(weights(np.random.default_rng(3), 50), jnp.float32)
  exists = jnp.arange(50) < 20
  for content in (9.0, math.nan):
    dirty = jnp.where(exists, x, content)
    for low in (-1.0, -2.0):
      for f in (
        confidence.log_evalue,
        lambda x, low, **exists: confidence.betting(x, alpha=0.1, low=low, **exists),
      ):
        np.testing.assert_allclose(f(dirty, low=low, exists=exists), f(x[:20], low=low), rtol=1e-5)
  none = confidence.betting(x, alpha=0.1, low=-1.0, exists=jnp.zeros(50, bool))
  assert float(none) == -1


def test_alpha_is_spent_once():
  assert confidence.spent(0.05, 1) == pytest.approx(0.05 * 6 / math.pi**2)
  assert sum(confidence.spent(0.05, k) for k in range(1, 20_000)) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(
  'call, word',
  [
    (lambda: confidence.betting(SMALL, alpha=0), 'alpha=0'),
    (lambda: confidence.betting(SMALL, alpha=1.0), 'alpha=1.0'),
    (lambda: confidence.normal(SMALL, alpha=math.nan), 'alpha=nan'),
    (lambda: confidence.catoni(SMALL, alpha=2, variance=1), 'alpha=2'),
    (lambda: confidence.catoni(SMALL, alpha=0.1, variance=0), 'variance=0'),
    (lambda: confidence.catoni(SMALL, alpha=0.1, variance=math.inf), 'variance=inf'),
    (lambda: confidence.empirical_bernstein(SMALL, alpha=-1, low=0, high=1), 'alpha=-1'),
    (lambda: confidence.cumulative(1.0, 1.0, alpha=0.05, bet=1.0), 'bet=1.0'),
    (lambda: confidence.spent(0.05, 0), 'claim=0'),
  ],
)
def test_bad_input(call, word):
  with pytest.raises(InputError, match=word):
    call()
