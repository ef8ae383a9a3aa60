"""trm_jax.masks.calibration: limits from noise-floor rows accept the target share of fresh ones."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import scipy.stats

from trm_jax import masks
from trm_jax.masks import calibration
from trm_jax.types import Divergences, InputError

TARGET = 0.8


@functools.partial(jax.jit, static_argnames=('rows', 'T', 'shared'))
def lognormal(seed, rows, T, shared=0.0):
  """Token KL of noise alone; `shared` is the share of the variance that a row has in common."""
  token, row = jax.random.split(jax.random.key(seed))
  z = math.sqrt(1 - shared) * jax.random.normal(token, (rows, T))
  return 1e-6 * jnp.exp(2 * (z + math.sqrt(shared) * jax.random.normal(row, (rows, 1))))


def pareto(seed, rows, T):
  return 1e-6 * jax.random.pareto(jax.random.key(seed), 1.5, (rows, T))


def exponential(seed, rows, T):
  return 1e-6 * jax.random.exponential(jax.random.key(seed), (rows, T))


def beyond(noise, limit):
  """The true probability that a token of independent noise exceeds the limit."""
  x = oracles.f64(limit) / 1e-6
  if noise is pareto:
    return np.minimum(1, x**-1.5)
  return np.exp(-x) if noise is exponential else scipy.stats.norm.sf(np.log(x) / 2)


def rows_of(kl):
  """What criteria read, for a log-ratio of either sign that has this KL to second order."""
  sign = jnp.where(jnp.arange(kl.shape[1]) % 2, 1, -1)[None]
  d = Divergences(kl, jnp.sqrt(kl / 2), sign * jnp.sqrt(2 * kl) - kl, kl, 2 * kl)
  return d, jnp.ones(kl.shape, bool)


# Conformal limits.


def test_conformal_by_hand():
  x = jnp.array([3.0, 1, 2, 5, 4, 9, 7, 8, 6])
  # k = ceil(10 target)
  for target, want in [(0.1, 1), (0.11, 2), (0.5, 5), (0.9, 9), (0.91, math.inf)]:
    assert calibration.conformal(x, target=target) == want
  # 100 * 0.07 is 7.000000000000001, and still the seventh.
  assert calibration.conformal(jnp.arange(1.0, 100), target=0.07) == 7
  assert calibration.conformal(x.at[0].set(jnp.nan), target=0.9) == jnp.inf
  assert calibration.conformal(x.at[0].set(jnp.nan), target=0.8) == 9
  np.testing.assert_array_equal(
    jax.grad(lambda x: calibration.conformal(x, target=0.5))(x), jnp.zeros(9)
  )


def test_conformal_accepts_exactly_k_of_m_plus_1():
  # m = 9, target .75: k = 8, so 80 % of fresh values; 20000 draws have a standard error of .003.
  draws = jax.random.exponential(jax.random.key(0), (20_000, 10))
  limits = jax.vmap(lambda x: calibration.conformal(x, target=0.75))(draws[:, :9])
  np.testing.assert_allclose((draws[:, 9] <= limits).mean(), 0.8, atol=0.015)


WEIGHTS = dict(epsilon=5e-3, delta=1e-4)
STATISTICS = [
  (masks.max_kl, lambda d, v: masks.max_over_tokens(d.kl, v)),
  (masks.mean_kl, lambda d, v: masks.mean_over_tokens(d.kl, v)),
  (masks.mean_deviation, lambda d, v: masks.mean_over_tokens(masks.deviation(d.log_ratio), v)),
  (masks.chi2_budget, lambda d, v: masks.sum_over_tokens(d.chi2, v)),
  (
    functools.partial(masks.length_neutral, **WEIGHTS),
    lambda d, v: masks.future_deviation(d.log_ratio, v, **WEIGHTS),
  ),
]


@pytest.mark.parametrize(
  'criterion, statistic',
  [
    STATISTICS[1],
    *(pytest.param(*s, marks=pytest.mark.slow) for s in STATISTICS if s != STATISTICS[1]),
  ],
)
def test_calibrated_criteria_accept_the_target_of_fresh_rows(criterion, statistic):
  limit = calibration.conformal(statistic(*rows_of(pareto(0, 2000, 64))), target=TARGET)
  fresh = criterion(limit=limit)(*rows_of(pareto(1, 2000, 64)))
  # Standard errors: .009 of the limit, .009 of the fresh rows.
  np.testing.assert_allclose(fresh.mean(), TARGET, atol=0.05)


# Tails.


def tail_oracle(x, p):
  """The value exceeded with probability p, in float64."""
  x = np.sort(np.asarray(x, np.float64).ravel())[::-1]
  expected = len(x) * p
  if expected >= 20:
    return x[int(expected)]
  return x[20] * (20 / expected) ** np.log(x[:20] / x[20]).mean()


def test_both_parts_of_the_tail_by_hand():
  # 1..100: 30 values exceed 70; u = 80 with 20 above it.
  x = jnp.arange(1.0, 101).reshape(10, 10)
  found = calibration.tail(x, jnp.ones((10, 10), bool))
  assert found.limit(jnp.float32(0.3001)) == 70 and found.exceedance(jnp.float32(70)) == 0.3
  np.testing.assert_allclose(found.limit(jnp.float32(0.19999)), 80, rtol=1e-4)
  slope = np.log(np.arange(81, 101) / 80).mean()
  np.testing.assert_allclose(found.limit(jnp.float32(0.02)), 80 * 10**slope, rtol=1e-5)
  np.testing.assert_allclose(found.exceedance(jnp.float32(80 * 10**slope)), 0.02, rtol=1e-4)
  assert found.exceedance(jnp.float32(0)) == 1 and found.exceedance(jnp.float32(jnp.inf)) == 0
  ties = calibration.tail(jnp.ones((10, 10)), jnp.ones((10, 10), bool))
  assert found.limit(jnp.float32(0)) == ties.limit(jnp.float32(0)) == jnp.inf


@pytest.mark.slow
def test_tail_matches_the_oracle_ignores_padding_and_is_undone_by_exceedance():
  x = lognormal(0, 40, 50)
  valid = jax.random.bernoulli(jax.random.key(1), 0.6, x.shape)
  found = calibration.tail(jnp.where(valid, x, jnp.nan), valid)
  assert found.count == valid.sum()
  p = jnp.float32(10) ** (jnp.arange(40) / 6 - 6.51)
  limits = found.limit(p)
  own = np.asarray(x)[np.asarray(valid)]
  np.testing.assert_allclose(limits, [tail_oracle(own, q) for q in np.asarray(p)], rtol=1e-4)
  assert (limits[1:] <= limits[:-1]).all()
  share = found.exceedance(limits)
  assert (share[1:] >= share[:-1]).all() and (share <= 1).all()
  # The sample's own share moves in steps of 1 / n.
  n, p = len(own), np.asarray(p)
  np.testing.assert_allclose(share, p, rtol=1e-3, atol=1 / n)
  np.testing.assert_allclose(share[n * p < 20], p[n * p < 20], rtol=1e-3)


@pytest.mark.parametrize('x', [jnp.ones((2, 10)), jnp.zeros((8, 8)), jnp.full((8, 8), jnp.nan)])
def test_a_sample_that_says_nothing_about_the_tail_rejects_nothing(x):
  valid = jnp.ones(x.shape, bool)
  assert calibration.max_limit(calibration.tail(x, valid), T=10**6, target=0.9) == jnp.inf
  assert calibration.tail(x, valid).exceedance(jnp.float32(5)) > 0


# Limits that follow the length.


@pytest.mark.parametrize('noise', [lognormal, pareto, exponential])
def test_max_limit_accepts_the_target_at_every_length(noise):
  # Calibrated on 128000 tokens, so that rows of 2048 expect 14 exceedances: Hill's part.
  kl = noise(0, 2000, 64)
  found = calibration.tail(kl, jnp.ones(kl.shape, bool))
  lengths = np.array([1, 16, 128, 512, 2048])
  limits = calibration.max_limit(found, T=jnp.asarray(lengths), target=TARGET)
  kept = (1 - beyond(noise, limits)) ** lengths
  np.testing.assert_allclose(kept, TARGET, atol=0.05)
  assert calibration.max_limit(found, T=128, target=TARGET) == limits[2]
  # With one limit for all lengths: .8^(T / 128).
  kept = (1 - beyond(noise, limits[2])) ** lengths
  np.testing.assert_allclose(kept, TARGET ** (lengths / 128), atol=0.05)
  fresh = masks.max_kl(limit=limits[2])(*rows_of(noise(1, 2000, 128)))
  np.testing.assert_allclose(fresh.mean(), TARGET, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize('noise, least, most', [(pareto, 0.74, 0.84), (exponential, 0.8, 0.95)])
def test_max_limit_beyond_the_sample(noise, least, most):
  # 4096 tokens for rows of 2048: half an exceedance, all of it power law. One such limit accepts
  # .5 to .9; the median is right for a power law, and a little high for lighter tails.
  tail = lambda x: calibration.tail(x[None], jnp.ones((1, 4096), bool))
  limits = jax.vmap(lambda x: calibration.max_limit(tail(x), T=2048, target=TARGET))(
    noise(0, 200, 4096)
  )
  assert least < np.median((1 - beyond(noise, limits)) ** 2048) < most


@pytest.mark.slow
def test_a_limit_for_each_row():
  kl = lognormal(0, 2000, 64)
  lengths = jnp.arange(2000) % 65
  valid = jnp.arange(64)[None] < lengths[:, None]
  limits = calibration.max_limit(calibration.tail(kl, valid), T=lengths, target=TARGET)
  assert limits.shape == (2000,) and (limits[2:65] >= limits[1:64]).all()
  d, _ = rows_of(lognormal(1, 2000, 64))
  kept = masks.max_kl(limit=limits)(d, valid)
  for short in (True, False):
    group = (lengths > 0) & ((lengths <= 32) == short)
    np.testing.assert_allclose(kept[group].mean(), TARGET, atol=0.05)
  assert kept[lengths == 0].all()


def test_row_correlated_noise_needs_the_level_of_rows():
  lengths = (16, 256)
  draw = lambda seed, T: lognormal(seed, 1000, T, shared=0.5)
  found = calibration.tail(draw(0, 64), jnp.ones((1000, 64), bool))
  largest = jnp.concatenate([draw(T, T).max(-1) for T in lengths])
  row_lengths = jnp.repeat(jnp.array(lengths), 1000)
  by_rows = calibration.conformal_max_limit(
    found, largest, row_lengths, T=jnp.array(lengths), target=TARGET
  )
  per_token = calibration.max_limit(found, T=jnp.array(lengths), target=TARGET)
  kept = np.array(
    [
      [(draw(T + 1, T).max(-1) <= limit).mean() for T, limit in zip(lengths, limits, strict=True)]
      for limits in (by_rows, per_token)
    ]
  )
  np.testing.assert_allclose(kept[0].mean(), TARGET, atol=0.05)
  # Tokens that rise together: independence accepts too much, the more the longer.
  assert kept[1, 1] > kept[1, 0] + 0.03 and kept[1].mean() > TARGET + 0.03


def test_conformal_max_limit_matches_independence_where_it_holds():
  kl = lognormal(0, 2000, 64)
  found = calibration.tail(kl, jnp.ones(kl.shape, bool))
  rows = lognormal(1, 2000, 128).max(-1)
  lengths = jnp.full(2000, 128)
  got = calibration.conformal_max_limit(found, rows, lengths, T=128, target=TARGET)
  fresh = lognormal(2, 2000, 128).max(-1)
  np.testing.assert_allclose((fresh <= got).mean(), TARGET, atol=0.05)
  # A row that cannot be judged is the largest.
  broken = [
    calibration.conformal_max_limit(found, rows.at[:100].set(x), lengths, T=128, target=TARGET)
    for x in (jnp.nan, jnp.inf)
  ]
  assert broken[0] == broken[1] > got
  # Too few rows to say: nothing is rejected.
  assert calibration.conformal_max_limit(found, rows[:3], lengths[:3], T=9, target=0.9) == jnp.inf


@pytest.mark.parametrize('target', [0.0, 1.0, -0.1, 1.5, math.nan])
def test_targets_outside_the_unit_interval_are_refused(target):
  with pytest.raises(InputError, match=f'target={target}'):
    calibration.conformal(jnp.ones(3), target=target)
  with pytest.raises(InputError, match=f'target={target}'):
    calibration.max_limit(
      calibration.tail(jnp.ones((1, 3)), jnp.ones((1, 3), bool)), T=3, target=target
    )
