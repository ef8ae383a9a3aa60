"""Measurements of a batch: against NumPy in float64, by hand, and under what must not matter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import measurements
from trm_jax.divergences import ratios
from trm_jax.measurements import metric_names, router_statistics
from trm_jax.mismatch import heavy_tail
from trm_jax.types import Divergences, InputError, Rollout

B, T = 7, 12
EDGES = (2.0, 5.0)

measure = jax.jit(functools.partial(measurements.measure, positions=EDGES, lengths=(4.0,), k=3))
distribution = jax.jit(functools.partial(measurements.distribution, thresholds=(0.0, 0.5)))
tail = jax.jit(measurements.tail, static_argnames='k')


@functools.cache
def batch(seed=0):
  """(divergences, valid, policy_logp, advantage): rows of length 0..12, float32 noise."""
  rng = np.random.default_rng(seed)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  lengths = np.array([0, 1, 3, 5, 8, 12, 12])
  valid = np.arange(T) < lengths[:, None]
  policy = -np.exp(rng.normal(-2, 2, (B, T)))
  # The rollout's probability stays below 1.
  log_ratio = np.maximum(0.3 * rng.standard_t(3, (B, T)), 0.5 * policy)
  d = Divergences(
    kl=f32(rng.pareto(1.5, (B, T)) * 1e-2),
    tv=f32(rng.uniform(0, 0.2, (B, T))),
    log_ratio=f32(log_ratio),
    entropy=f32(rng.uniform(0, 2, (B, T))),
    chi2=f32(rng.uniform(0, 0.2, (B, T))),
  )
  return d, jnp.asarray(valid), f32(policy), f32([0, 1, -1, 2, -2, 1, -1])


@functools.cache
def measured():
  d, valid, logp, advantage = batch()
  return measurements.plain(measure(d, valid, policy_logp=logp, advantage=advantage))


def f64(x):
  return np.asarray(x, np.float64)


# Distributions.


def against(found, x, thresholds=None):
  """Compares a plain distribution with NumPy on the selected values."""
  if not len(x):
    assert found['count'] == 0 and np.isnan(found['mean']) and np.isnan(found['largest'])
    assert np.isnan(found['quantiles']).all()
    return
  assert found['count'] == len(x) and found['missing'] == found['infinite'] == 0
  np.testing.assert_allclose(found['mean'], x.mean(), rtol=2e-5, atol=1e-7)
  want = np.quantile(x, measurements.QUANTILES)
  np.testing.assert_allclose(found['quantiles'], want, rtol=2e-5, atol=1e-7)
  np.testing.assert_allclose(found['largest'], x.max(), rtol=1e-6)
  if thresholds:
    np.testing.assert_allclose(found['exceed'], [(x > t).mean() for t in thresholds], rtol=1e-6)


@pytest.mark.slow
def test_whole_batch_and_every_group_agree_with_numpy():
  d, valid, logp, advantage = batch()
  found, valid = measured(), np.asarray(valid)
  place, length = valid.cumsum(-1), valid.sum(-1, keepdims=True) + np.zeros((B, T))
  sign = np.sign(f64(advantage))[:, None] + 1 + np.zeros((B, T))
  groups = {
    'position': np.digitize(place, EDGES, right=True),
    'length': np.digitize(length, (4,), right=True),
    'entropy': np.digitize(f64(d.entropy), measurements.ENTROPY, right=True),
    'confidence': np.digitize(np.exp(f64(logp)), heavy_tail.EDGES, right=True),
    'advantage': sign,
  }
  values = {
    'log_ratio': f64(d.log_ratio),
    'abs_log_ratio': abs(f64(d.log_ratio)),
    'kl': f64(d.kl),
    'tv': f64(d.tv),
    'chi2': f64(d.chi2),
    'k3': np.expm1(f64(d.log_ratio)) - f64(d.log_ratio),
  }
  assert set(found['by']) == set(groups)
  for name, x in values.items():
    limits = measurements.LOG_RATIO_LIMITS if 'log' in name else measurements.KL_LIMITS
    against(found[name], x[valid], limits)
    for kind, group in groups.items():
      table = found['by'][kind][name]
      for g in range(len(table['count'])):
        against({k: np.array(v)[g] for k, v in table.items()}, x[valid & (group == g)])
  for kind in groups:  # every token is in one bin of each table
    assert sum(found['by'][kind]['kl']['count']) == valid.sum()


def test_quantiles_exceedance_and_largest_by_hand():
  x = jnp.array([3.0, jnp.nan, -1.0, 1.0, 99.0, jnp.inf])
  where = jnp.array([True, True, True, True, False, True])
  found = measurements.plain(distribution(x, where))
  assert (found['count'], found['missing'], found['infinite']) == (4, 1, 1)
  assert found['mean'] == 1.0 and found['largest'] == np.inf
  assert found['exceed'] == [0.75, 0.75]
  # -1, 1, 3, inf: the median is 2, the 95th percentile lies on the way to infinity.
  np.testing.assert_allclose(found['quantiles'][2], 2.0)
  assert found['quantiles'][4] == np.inf
  both = distribution(jnp.array([-jnp.inf, jnp.inf, 0, 0, 0, 0]), jnp.arange(6) < 2)
  assert not np.isnan(both.quantiles).any() and both.infinite == 2 and np.isnan(both.mean)
  none = measurements.plain(distribution(x, jnp.zeros(6, bool)))
  assert none['count'] == 0 and np.isnan([none['mean'], none['largest'], *none['exceed']]).all()


def test_padding_missing_and_infinite_values():
  """Padding changes nothing; NaN leaves its token out; inf reaches counts, largest, exceedance."""
  d, valid, logp, advantage = batch()
  junk = lambda x: jnp.where(valid, x, jnp.nan)
  other = lambda x: jnp.where(valid, x, jnp.inf)
  for spoil in (junk, other):
    spoiled = jax.tree.map(spoil, d)
    found = measure(spoiled, valid, policy_logp=spoil(logp), advantage=advantage)
    jax.tree.map(np.testing.assert_array_equal, measurements.plain(found), measured())
  # Rows and slots in another order are the same batch, places in the row apart.
  rows = jnp.array([3, 1, 0, 2, 6, 4, 5])
  moved = jax.tree.map(lambda x: x[rows], (d, valid, logp, advantage))
  found = measurements.plain(measure(moved[0], moved[1], policy_logp=moved[2], advantage=moved[3]))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, found, measured())
  lost = dataclasses.replace(d, log_ratio=d.log_ratio.at[3, 2].set(jnp.nan))
  found = measurements.plain(measure(lost, valid, policy_logp=logp, advantage=advantage))
  keep = np.array(valid)
  keep[3, 2] = False
  assert found['log_ratio']['missing'] == 1 and found['kl'] == measured()['kl']
  np.testing.assert_allclose(found['log_ratio']['mean'], f64(d.log_ratio)[keep].mean(), rtol=1e-4)
  assert found['sequences']['missing'] == 1 and found['sequences']['count'] == B - 2
  broken = dataclasses.replace(d, kl=d.kl.at[3, 2].set(jnp.inf))
  found = measurements.plain(measure(broken, valid, policy_logp=logp, advantage=advantage))['kl']
  assert found['largest'] == np.inf and found['infinite'] == 1
  np.testing.assert_allclose(found['mean'], f64(d.kl)[keep].mean(), rtol=1e-5)
  np.testing.assert_allclose(found['exceed'][-1], (f64(broken.kl)[valid] > 1).mean(), rtol=1e-6)


# Tails.


def test_hill_by_hand_and_on_a_pareto_sample():
  # The two largest of 1, 2, 4, 8 lie log 4 and log 2 above the third: index 1 / (1.5 log 2).
  x, every = jnp.array([1.0, 8.0, jnp.nan, 4.0, 2.0]), jnp.ones(5, bool)
  found = tail(x, every, k=2)
  np.testing.assert_allclose(found.index, 1 / (1.5 * np.log(2)), rtol=1e-6)
  np.testing.assert_allclose(found.error, found.index / np.sqrt(2), rtol=1e-6)
  assert found.above == 2 and found.k == 2
  default = tail(x, every)  # floor(sqrt(4)) of the four that are there
  np.testing.assert_array_equal(np.array(default), np.array(found))
  assert tail(x.at[2].set(jnp.inf), every, k=2).index == 0
  assert np.isnan(tail(x, every, k=4).index) and np.isnan(tail(0 * x, every, k=2).index)
  assert tail(jnp.ones(5), every, k=2).index == np.inf
  rng = np.random.default_rng(0)
  for true in (0.8, 3.0):
    sample = jnp.asarray(1 + rng.pareto(true, 200_000), jnp.float32)
    found = tail(sample, jnp.ones(sample.shape, bool), k=2000)
    assert abs(found.index - true) < 4 * found.error, true
  with pytest.raises(InputError, match='k=0'):
    measurements.tail(x, every, k=0)


# Confidence.


def test_the_shift_of_log_odds_is_what_was_planted():
  rng = np.random.default_rng(1)
  odds = rng.normal(0, 4, 4000)
  shift = 0.2 * rng.standard_t(3, 4000)
  logp = lambda z: -np.log1p(np.exp(-z))
  policy = jnp.asarray(logp(odds), jnp.float32)
  ratio = jnp.asarray(logp(odds) - logp(odds - shift), jnp.float32)
  found = measurements.log_odds_shift(policy, ratio)
  sure = odds > 8  # float32 knows log-probs near 0 to 1e-7 at best, the odds less
  np.testing.assert_allclose(found[~sure], shift[~sure], atol=2e-3)
  # ratio = p + (1 - p) e^shift, the identity of the paper
  p = np.exp(logp(odds))
  np.testing.assert_allclose(np.exp(f64(ratio)), p + (1 - p) * np.exp(shift), rtol=1e-5)
  table = measurements.plain(measurements.confidence_table(policy, ratio, jnp.ones(4000, bool)))
  for g in range(5):
    x = shift[np.digitize(np.exp(f64(policy)), heavy_tail.EDGES, right=True) == g]
    assert table['count'][g] == len(x)
    np.testing.assert_allclose(table['share'][g], len(x) / 4000, rtol=1e-5)
    np.testing.assert_allclose(table['median'][g], np.median(x), atol=1e-3)
    sigma = 1.4826 * np.median(abs(x - np.median(x)))
    np.testing.assert_allclose(table['sigma'][g], sigma, rtol=0.02)
    np.testing.assert_allclose(table['q05'][g], np.quantile(x, 0.05), rtol=0.02, atol=1e-3)
  assert table['sigma_log_ratio'][0] > 5 * table['sigma_log_ratio'][2]
  certain = jnp.array([0.0, -1e-3, -1.0])
  found = measurements.confidence_table(certain, jnp.array([0.0, -1e-3, jnp.nan]), certain <= 0)
  assert found.unresolved == 2 and found.count.sum() == 0


# Rows.


@pytest.mark.slow
def test_sequences_against_float64_and_by_hand():
  d, valid, _, _ = batch()
  found, x = measured()['sequences'], np.where(valid, f64(d.log_ratio), 0)
  x = x[np.asarray(valid).any(-1)]  # the row without tokens does not exist
  w = np.exp(x.sum(-1))
  assert found['count'] == B - 1
  np.testing.assert_allclose(found['ess'], w.sum() ** 2 / ((B - 1) * (w**2).sum()), rtol=1e-5)
  own = ratios.effective_sample_size(d.log_ratio, valid)
  np.testing.assert_allclose(found['ess'], own, rtol=1e-6)
  np.testing.assert_allclose(found['chi2'], (w**2).mean() - 1, rtol=1e-4)
  against(found['log_weight'], x.sum(-1))
  mixed = abs(x).sum(-1) > 0
  against(found['cancellation'], (1 - abs(x.sum(-1)) / np.where(mixed, abs(x).sum(-1), 1))[mixed])
  # Ratios 10 and 1/10 cancel altogether, 2 and 2 not at all; a row that agrees has no say.
  rows = jnp.log(jnp.array([[10.0, 0.1], [2.0, 2.0], [1.0, 1.0]]))
  found = measurements.sequences(rows, jnp.ones((3, 2), bool))
  assert found.cancellation.count == 2
  np.testing.assert_allclose(found.cancellation.mean, 0.5, atol=1e-6)
  np.testing.assert_allclose(found.chi2, (1 + 16 + 1) / 3 - 1, rtol=1e-5)


@pytest.mark.slow
def test_segments_of_a_trajectory_are_one_sequence():
  # Ids 7, -2, 7, and a row without tokens: W = 2 * 1/2 and 3, in either order of the rows.
  x = jnp.log(jnp.array([[2.0, 9.0], [1.5, 2.0], [0.5, 9.0], [9.0, 9.0]]))
  valid = jnp.array([[True, False], [True, True], [True, False], [False, False]])
  ids = jnp.array([7, -2, 7, 5])
  for rows in ([0, 1, 2, 3], [3, 2, 1, 0]):
    found = measurements.sequences(x[jnp.array(rows)], valid[jnp.array(rows)], ids[jnp.array(rows)])
    assert found.count == 2 and found.missing == 0
    np.testing.assert_allclose(found.ess, 16 / (2 * 10), rtol=1e-6)
    np.testing.assert_allclose(found.chi2, (1 + 9) / 2 - 1, rtol=1e-6)
    # 2 and 1/2 cancel altogether, 1.5 and 2 not at all.
    np.testing.assert_allclose(found.cancellation.mean, 0.5, atol=1e-6)
  lost = measurements.sequences(x.at[2, 0].set(jnp.nan), valid, ids)
  assert lost.count == 1 and lost.missing == 1 and lost.ess == 1


@pytest.mark.slow
def test_half_precision_is_raised_first():
  d, valid, logp, advantage = batch()
  half = lambda x: x.astype(jnp.bfloat16)
  stored = jax.tree.map(half, (d, logp))
  want = jax.tree.map(lambda x: x.astype(jnp.float32), stored)
  run = lambda d, logp: measurements.plain(measure(d, valid, policy_logp=logp, advantage=advantage))
  jax.tree.map(np.testing.assert_array_equal, run(*stored), run(*want))
  for names in (metric_names.verl, metric_names.trl, metric_names.tunix):
    low, high = (names(p, p - d.log_ratio, valid) for d, p in (stored, want))
    for name, x in low.items():
      assert x.dtype == jnp.float32, name
  # 301 equal tokens: a sum in bfloat16 stops at 256.
  p = jnp.full((1, 301), -1.0, jnp.bfloat16)
  found = metric_names.tunix(p, p - 1, jnp.ones(p.shape, bool))
  np.testing.assert_allclose(found['sampler_trainer/logp_diff_mean'], 1, rtol=1e-6)


def test_sequences_with_infinite_and_missing_weights():
  valid = jnp.ones((3, 2), bool)
  inf, nan = jnp.inf, jnp.nan
  found = measurements.sequences(jnp.array([[inf, 0.0], [0.0, 0.0], [-inf, 0.0]]), valid)
  np.testing.assert_allclose(found.ess, 1 / 3, rtol=1e-6)
  assert found.chi2 == inf and found.log_weight.infinite == 2
  found = measurements.sequences(jnp.array([[nan, 0.0], [0.0, 0.0], [inf, -inf]]), valid)
  assert found.missing == 2 and found.count == 1 and found.ess == 1 and found.chi2 == 0
  found = measurements.sequences(jnp.full((3, 2), -inf), valid)
  assert np.isnan(found.ess) and found.chi2 == -1


def test_correlation_is_pearsons_of_the_probabilities():
  d, valid, logp, _ = batch()
  p, ratio = np.exp(f64(logp)[valid]), f64(d.log_ratio)[valid]
  want = np.corrcoef(p, np.exp(f64(logp)[valid] - ratio))[0, 1]
  np.testing.assert_allclose(measured()['correlation'], want, rtol=1e-5)
  assert np.isnan(measurements.correlation(logp, d.log_ratio, jnp.zeros_like(valid)))


# Other systems' names.


def test_names_of_other_systems_by_hand():
  """Two rows: ratios 2 and 1/2 of the first, 4 of the second; a token that is lost, and padding."""
  rollout = np.log([[0.25, 0.5, 0.3], [0.2, 0.1, 0.9]])
  policy = np.log([[0.5, 0.25, 0.3], [0.8, 0.1, 0.9]])
  rollout[0, 2] = rollout[1, 2] = np.nan
  valid = jnp.array([[True, True, True], [True, False, False]])
  call = lambda f: {
    k: float(v) for k, v in f(jnp.float32(policy), jnp.float32(rollout), valid).items()
  }
  log2 = np.log(2)
  verl = call(metric_names.verl)
  want = {
    'rollout_corr/kl': -2 * log2 / 3,
    'rollout_corr/k3_kl': ((2 - 1) + (0.5 - 1) + (4 - 1) - 2 * log2) / 3,
    'rollout_corr/training_ppl': (8**0.5 + 1 / 0.8) / 2,
    'rollout_corr/rollout_ppl': (8**0.5 + 5) / 2,
    'rollout_corr/log_ppl_diff': (0 - 2 * log2) / 2,
    'rollout_corr/log_ppl_abs_diff': log2,
    'rollout_corr/log_ppl_diff_min': -2 * log2,
    'rollout_corr/ppl_ratio': (1 + 0.25) / 2,
    'rollout_corr/chi2_token': (4 + 0.25 + 16) / 3 - 1,
    'rollout_corr/chi2_seq': (1 + 16) / 2 - 1,
    'rollout_corr/rollout_is_mean': 6.5 / 3,
    'rollout_corr/rollout_is_min': 0.5,
    'rollout_corr/rollout_is_ratio_fraction_high': 1 / 3,
    'training/rollout_probs_diff_mean': 1.1 / 3,
    'training/rollout_probs_diff_max': 0.6,
    'training/rollout_probs_diff_std': np.std([0.25, 0.25, 0.6], ddof=1),
    'training/rollout_actor_probs_pearson_corr': np.corrcoef([0.25, 0.5, 0.2], [0.5, 0.25, 0.8])[
      0, 1
    ],
  }
  for name, value in want.items():
    np.testing.assert_allclose(verl[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
  trl = call(metric_names.trl)
  # The second row's ratio 4 is above 3 and becomes 0.
  want = [4 * log2 / 3, 2 * log2, 0, 0.5, 1]
  np.testing.assert_allclose(list(trl.values()), want, rtol=1e-4, atol=1e-6)
  tunix = call(metric_names.tunix)
  want = [4 * log2 / 3, 2 * log2, 1.1 / 3, 0.6, verl['training/rollout_actor_probs_pearson_corr']]
  want += [(2 + 0.5 + 2) / 3, 2, 0.5, 1 / 3]
  np.testing.assert_allclose(list(tunix.values()), want, rtol=1e-4, atol=1e-6)


# Routers.


@pytest.mark.slow
def test_flips_margins_and_load_by_hand():
  # Two tokens, two layers, two of four experts each; the third token is not fed.
  routes = jnp.array([[[[0, 1], [2, 3]], [[0, 1], [0, 2]], [[0, 1], [0, 1]]]])
  other = jnp.array([[[[1, 0], [2, 1]], [[0, 1], [1, 3]], [[2, 3], [2, 3]]]])
  fed = jnp.array([[True, True, False]])
  found = router_statistics.flips(routes, other, fed)
  np.testing.assert_allclose(found.by_layer, [0, 1])
  np.testing.assert_allclose(found.replaced, [0, 3 / 4])
  np.testing.assert_allclose([found.any_layer, found.layers], [1, 1])
  load = router_statistics.load(routes, fed, 4)
  np.testing.assert_allclose(load, [[0.5, 0.5, 0, 0], [0.25, 0, 0.5, 0.25]])
  scores = jnp.array([[[[3.0, 1, 0, -1]], [[5, 4, 4.5, 4.45]], [[9, 0, 0, 0]]]])
  found = router_statistics.margins(scores, fed, experts_per_token=2, thresholds=(0.1,))
  np.testing.assert_allclose(found.quantiles[0, 2], (1 + 0.05) / 2, rtol=1e-5)
  np.testing.assert_allclose(found.exceed, [[0.5]])
  for k in (0, 4):
    with pytest.raises(InputError, match=f'experts_per_token={k}'):
      router_statistics.margins(scores, fed, experts_per_token=k)


def test_slots_that_are_fed():
  """The prompt's real slots and every response token but the last."""
  rows = jnp.zeros(2, jnp.int32)
  valid = jnp.array([[True, True, False], [True, True, True]])
  tokens = jnp.zeros((2, 3), jnp.int32)
  rollout = Rollout(
    jnp.zeros((2, 2), jnp.int32),
    jnp.array([1, 0], jnp.int32),
    tokens,
    valid,
    None,
    None,
    0.0 * tokens,
    None,
    tokens,
    rows,
    0.0 * rows,
  )
  want = [[False, True, True, False], [True, True, True, True]]
  np.testing.assert_array_equal(router_statistics.fed_slots(rollout), want)
