"""Metrics of a step against NumPy, and what they do with nothing, NaN and inf."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra.numpy import arrays

from trm_jax.measurements import distributions, metrics
from trm_jax.objectives.method import Scored
from trm_jax.types import Divergences

B, T = 12, 6
summarise = functools.partial(metrics.summarise, samples=4, fresh=8)


def case(seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, T + 1, B)
  valid = np.arange(T)[None] < lengths[:, None]
  arrays = {
    'kl': rng.exponential(0.1, (B, T)),
    'tv': rng.uniform(0, 1, (B, T)),
    'log_ratio': rng.normal(0, 0.3, (B, T)),
    'entropy': rng.uniform(0, 2, (B, T)),
  }
  keep, reward = rng.random(B) < 0.6, rng.integers(0, 2, B)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  zeros = jnp.zeros((B, T), jnp.float32)
  scored = Scored(
    logp=zeros,
    rollout_logp=zeros,
    recomputed_logp=zeros,
    version_logp=zeros,
    divergences=Divergences(**{k: f32(v) for k, v in arrays.items()}),
    usable=jnp.ones(B, bool),
    valid=jnp.asarray(valid),
    reward=f32(reward),
    engine=jnp.asarray(np.arange(B) % 2, jnp.int32),
  )
  return (
    scored,
    jnp.asarray(keep),
    arrays | {'valid': valid, 'keep': keep, 'reward': reward, 'lengths': lengths},
  )


@pytest.mark.slow
def test_against_numpy():
  scored, keep, a = case()
  got = summarise(scored, keep, jnp.zeros((B, T), bool))
  token, odd = a['valid'], np.arange(B) % 2 == 1
  log_w = np.where(token, a['log_ratio'], 0).sum(-1)[a['keep']]
  w, total = np.exp(log_w), np.where(token, a['log_ratio'], 0).sum(-1)
  want = {
    'reward': a['reward'].mean(),
    'reward/kept': a['reward'][a['keep']].mean(),
    'reward/rejected': a['reward'][~a['keep']].mean(),
    'acceptance': a['keep'].mean(),
    'acceptance/engine1': a['keep'][odd].mean(),
    'kl/mean': a['kl'][token].mean(),
    'kl/median': np.median(a['kl'][token]),
    'kl/p90': np.quantile(a['kl'][token], 0.9),
    'kl/max': a['kl'][token].max(),
    'kl/engine0': a['kl'][~odd][token[~odd]].mean(),
    'kl/engine1': a['kl'][odd][token[odd]].mean(),
    'tv/mean': a['tv'][token].mean(),
    'tv/max': a['tv'][token].max(),
    'entropy': a['entropy'][token].mean(),
    'ratio/max': np.exp(a['log_ratio'][token & a['keep'][:, None]].max()),
    'ess': w.sum() ** 2 / (len(w) * (w**2).sum()),
    'length': a['lengths'].mean(),
    # The first 8 rows only, and the prompt as the unit.
    'certificate/estimate': (a['reward'] * (np.exp(total) - 1))[:8].mean(),
    'certificate/square': (
      (a['reward'] * (np.exp(total) - 1))[:8].reshape(2, 4).mean(-1) ** 2
    ).mean(),
  }
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=2e-5, err_msg=name)


LEVELS = np.array([0, 0.25, 0.5, 0.9, 1], np.float32)
quantiles = jax.jit(distributions.quantiles)


@hypothesis.given(
  arrays(
    np.float32,
    (3, 4),
    # Few values, so that many are equal; tiny, negative, endless and missing ones.
    elements=st.sampled_from([0, -0.0, 1, 1, -2.5, 3e38, -3e38, 1e-45, -1e-40, np.inf, np.nan]),
  ),
  arrays(bool, (3, 4)),
)
def test_quantiles_are_numpys(x, where):
  got = quantiles(x, where, LEVELS)
  kept = x[where & ~np.isnan(x)].astype(np.float64)
  if not kept.size:
    assert np.isnan(got).all()
    return
  # Neighbours in order, since interpolating with inf is a matter of taste.
  place = LEVELS.astype(np.float64) * (kept.size - 1)
  for value, p in zip(np.asarray(got, np.float64), place, strict=True):
    low, high = np.sort(kept)[[int(np.floor(p)), int(np.ceil(p))]]
    want = low if low == high else low + (high - low) * (p - np.floor(p))
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-37)


def test_quantiles_of_many_values_are_exact_order_statistics():
  x = np.random.default_rng(0).normal(size=(100, 101)).astype(np.float32)
  where = np.random.default_rng(1).random(x.shape) < 0.7
  got = quantiles(x, where, LEVELS)
  np.testing.assert_allclose(got, np.quantile(x[where], LEVELS), rtol=1e-5)
  np.testing.assert_array_equal(got[jnp.array([0, -1])], [x[where].min(), x[where].max()])


def test_acceptance_by_length_quartile_by_hand():
  # Quartile edges of 1..8 are 2.75, 4.5, 6.25: two rows each.
  keep = jnp.array([True, False, True, True, False, False, True, True])
  got = metrics.by_length_quartile(keep, jnp.arange(1, 9))
  assert [float(got[f'acceptance/length_q{i}']) for i in range(1, 5)] == [0.5, 1.0, 0.0, 1.0]


@pytest.mark.slow
def test_rows_without_tokens_do_not_exist():
  """Two empty rows more, of any reward, engine and mask, change no number but that of none."""
  scored, keep, _ = case()
  pad = lambda x, value: jnp.concatenate([x, jnp.full((2, *x.shape[1:]), value, x.dtype)])
  more = jax.tree.map(lambda x: pad(x, 1), scored)
  more = dataclasses.replace(more, valid=pad(scored.valid, False), reward=pad(scored.reward, 7))
  none = lambda s: jnp.zeros(s.valid.shape, bool)
  per_token = jnp.asarray(np.random.default_rng(1).random((B, T)) < 0.7)
  for mask in (keep, per_token):
    want = summarise(scored, mask, none(scored))
    for value in (False, True):
      got = summarise(more, pad(mask, value), none(more))
      for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_segments_of_a_trajectory_have_one_weight():
  scored, _, a = case()
  ids = jnp.arange(B) // 2 * 100
  every = jnp.ones(B, bool)
  got = summarise(scored, every, jnp.zeros((B, T), bool), trajectory=ids)['ess']
  w = np.exp(np.where(a['valid'], a['log_ratio'], 0).sum(-1).reshape(-1, 2).sum(-1))
  np.testing.assert_allclose(got, w.sum() ** 2 / (len(w) * (w**2).sum()), rtol=1e-5)


def test_alarms_about_the_reports():
  """Right ones; those with the sign turned, shifted by a token, of other rows, or missing."""
  rollout = 1.5 * jax.random.normal(jax.random.key(0), (B, T, 12))
  policy = rollout + 0.2 * jax.random.normal(jax.random.key(1), rollout.shape)
  tokens = jax.random.categorical(jax.random.key(2), rollout)
  pick = lambda x: jnp.take_along_axis(jax.nn.log_softmax(x), tokens[..., None], -1)[..., 0]
  scored, keep, _ = case()
  scored = dataclasses.replace(scored, logp=pick(policy), valid=jnp.ones((B, T), bool))

  def told(reports, missing=None):
    missing = jnp.zeros((B, T), bool) if missing is None else missing
    found = summarise(dataclasses.replace(scored, rollout_logp=reports), keep, missing)
    return [float(found[f'report/{n}']) for n in ('impossible', 'ratio_mean', 'correlation')]

  right = pick(rollout)
  impossible, mean, agreement = told(right)
  p, q = np.exp(scored.logp), np.exp(right)
  np.testing.assert_allclose(
    [mean, agreement], [(p / q).mean(), np.corrcoef(p.flat, q.flat)[0, 1]], rtol=1e-4
  )
  assert impossible == 0 and abs(mean - 1) < 0.1 and agreement > 0.95
  assert told(-right)[0] == 1
  for wrong in (jnp.roll(right, 1, axis=1), right[::-1]):
    assert told(wrong)[1] > 2 and told(wrong)[2] < 0.5
  lost = jnp.zeros((B, T), bool).at[0].set(True)
  garbage = right.at[0].set(9.0)  # what a missing report was filled with says nothing of the others
  assert told(garbage, lost)[0] == 0
  np.testing.assert_allclose(told(garbage)[0], 1 / B, rtol=1e-6)
  assert 'report/contradicted' not in summarise(scored, keep, lost)
  for reports, least, most in (
    (right, 0, 0),
    (right + 0.09, 0, 0),
    (jnp.roll(right, 1, 1), 0.5, 1),
  ):
    stored = dataclasses.replace(scored, rollout_logp=reports, stored_logp=right)
    assert least <= summarise(stored, keep, lost)['report/contradicted'] <= most
  np.testing.assert_allclose(told(right.at[2, 0].set(-jnp.inf))[0], 1 / (B * T), rtol=1e-6)


@pytest.mark.slow
def test_capped_ratios_are_counted():
  scored, keep, a = case()
  kept, rejected = (int(np.flatnonzero(k)[0]) for k in (a['keep'], ~a['keep']))
  none = jnp.zeros((B, T), bool)
  plain = summarise(scored, keep, none)
  assert plain['ratio/capped'] == 0
  token = a['valid'] & a['keep'][:, None]
  np.testing.assert_allclose(
    plain['log_ratio/largest'], abs(a['log_ratio'])[token].max(), rtol=1e-6
  )

  def at(row, value):
    d = scored.divergences
    d = dataclasses.replace(d, log_ratio=d.log_ratio.at[row, 0].set(value))
    return summarise(dataclasses.replace(scored, divergences=d), keep, none)

  for value in (58.0, -58.0, jnp.inf):
    got = at(kept, value)
    np.testing.assert_allclose(got['ratio/capped'], 1 / token.sum(), rtol=1e-6)
    assert got['log_ratio/largest'] == abs(value)
  assert at(kept, 19.0)['ratio/capped'] == 0
  assert at(rejected, 58.0)['ratio/capped'] == 0
  lost = summarise(scored, keep & False, none)
  assert np.isnan(lost['ratio/capped']) and np.isnan(lost['log_ratio/largest'])


def test_nothing_to_average_is_nan_and_violations_are_counted():
  scored, _, _ = case()
  none = jnp.zeros(B, bool)
  got = summarise(scored, none, jnp.zeros((B, T), bool))
  assert np.isnan(got['reward/kept']) and np.isnan(got['ess'])
  assert got['acceptance'] == 0 and got['ratio/max'] == 0
  d = scored.divergences
  d = dataclasses.replace(d, kl=d.kl.at[0, 0].set(jnp.inf).at[3, 0].set(jnp.nan))
  missing = jnp.zeros((B, T), bool).at[3, 0].set(True).at[2, T - 1].set(True)
  scored = dataclasses.replace(scored, divergences=d, valid=scored.valid.at[2, T - 1].set(False))
  got = summarise(scored, ~none, missing)
  assert got['nonfinite_rows'] == 2
  assert got['missing_tokens'] == 1  # the one in padding does not count
  assert np.isfinite(got['kl/mean']) and np.isfinite(got['kl/max'])


def test_acceptance_of_prefixes_by_position():
  scored, keep, a = case()
  cut = np.random.default_rng(5).integers(0, T + 1, B)
  mask = (np.arange(T)[None] < cut[:, None]) | (cut >= a['lengths'])[:, None]
  got = summarise(scored, jnp.asarray(mask), jnp.zeros((B, T), bool))
  lengths, token = a['lengths'], a['valid']
  assert (cut >= lengths).any() and (cut < lengths).any()
  np.testing.assert_allclose(got['acceptance'], (cut >= lengths).mean(), rtol=1e-6)
  np.testing.assert_allclose(got['acceptance/tokens'], mask[token].mean(), rtol=1e-6)
  quarter = 4 * np.arange(T)[None] // lengths[:, None]
  for i in range(4):
    want = mask[token & (quarter == i)].mean()
    np.testing.assert_allclose(got[f'acceptance/position_q{i + 1}'], want, rtol=1e-6)
  # Weights of the policy patched where rows leave, over the rows that keep a token.
  w = np.exp(np.where(token & mask, a['log_ratio'], 0).sum(-1))[(token & mask).any(-1)]
  np.testing.assert_allclose(got['ess'], w.sum() ** 2 / (len(w) * (w**2).sum()), rtol=1e-5)
  # A mask of whole rows is the same in either form.
  rows, tokens = (
    summarise(scored, k, jnp.zeros((B, T), bool))
    for k in (keep, jnp.broadcast_to(keep[:, None], (B, T)))
  )
  for name in rows:
    np.testing.assert_array_equal(rows[name], tokens[name], name)


def test_a_cut_beyond_the_end_leaves_a_row_whole():
  scored, _, a = case()
  got = summarise(scored, scored.valid, jnp.zeros((B, T), bool))
  assert got['acceptance'] == got['acceptance/tokens'] == 1 and (a['lengths'] < T).any()
  np.testing.assert_allclose(got['reward/kept'], a['reward'].mean(), rtol=1e-6)


def test_a_missing_log_prob_counts_as_no_weight():
  scored, keep, a = case()
  row = int(np.flatnonzero(a['reward'][:8])[0])
  missing = jnp.zeros((B, T), bool).at[row, 0].set(True)
  plain, got = (summarise(scored, keep, m) for m in (0 * missing > 0, missing))
  w = np.exp(np.where(a['valid'], a['log_ratio'], 0).sum(-1))[row]
  difference = got['certificate/estimate'] - plain['certificate/estimate']
  np.testing.assert_allclose(difference, -w / 8, rtol=1e-4)
