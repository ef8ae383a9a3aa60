"""trm_jax.mismatch.heavy_tail: shifts of log-odds against the published table and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from trm_jax import divergences, policy, types
from trm_jax.mismatch import heavy_tail

HeavyTail = heavy_tail.HeavyTail
V, ROWS, LENGTH = 7, 40, 100
KEYS = jax.random.split(jax.random.key(5), (ROWS, LENGTH))
# Confidence in the middle of each published bin, one row in five each.
CONFIDENCE = np.resize(np.array([0.4, 0.7, 0.95, 0.995, 0.9995]), ROWS)


def scores():
  """Rows of fixed confidence in token 3, the rest spread unevenly."""
  rest = np.random.default_rng(0).uniform(0.5, 1, (ROWS, LENGTH, V - 1))
  rest *= (1 - CONFIDENCE)[:, None, None] / rest.sum(-1, keepdims=True)
  p = np.insert(rest, 3, CONFIDENCE[:, None], -1)
  return jnp.asarray(np.log(p).astype(np.float32))


@functools.cache
def disturbed(strength=1.0, **dials):
  hooks = heavy_tail.shift_hooks(HeavyTail(**dials), jnp.float32(strength))
  return np.asarray(hooks.logits(scores(), KEYS))


def shifts(out):
  return (out - np.asarray(scores()))[..., 3]


def robust(x):
  return 1.4826 * np.median(np.abs(x - np.median(x)), -1)


def test_draws_are_student_t():
  keys = jax.random.split(jax.random.key(1), 8000)
  for dof in (2.5, 3.0, 30.0):
    draw = np.asarray(jax.vmap(lambda k, d=dof: heavy_tail.student_t(k, d, 1e6))(keys))
    unit = 1.4826 * scipy.stats.t.ppf(0.75, dof)
    assert scipy.stats.kstest(draw * unit, scipy.stats.t(dof).cdf).pvalue > 1e-3
    assert abs(robust(draw) - 1) < 0.05
    np.testing.assert_array_equal(
      jax.vmap(lambda k, d=dof: heavy_tail.student_t(k, d, 2.0))(keys), np.clip(draw, -2, 2)
    )


@pytest.mark.slow
def test_the_published_spread_by_confidence():
  published = [0.156, 0.175, 0.186, 0.203, 0.237]
  for scale in (1.0, 0.3):
    found = shifts(disturbed(scale=scale))
    for confidence, sigma in zip(np.unique(CONFIDENCE), published, strict=True):
      rows = found[confidence == CONFIDENCE].ravel()  # 800: the error of a MAD is about 5 %
      assert abs(robust(rows) / (scale * sigma) - 1) < 0.2
      # Heavier than normal: q95 / spread is 1.64 for a normal and about 2.1 in the table.
  everything = (
    shifts(disturbed(scale=1.0)) / np.asarray(heavy_tail.sigma(jnp.asarray(CONFIDENCE)))[:, None]
  )
  assert 1.9 < np.quantile(everything, 0.95) / robust(everything.ravel()) < 2.3
  np.testing.assert_allclose(heavy_tail.sigma(jnp.unique(CONFIDENCE)), published, rtol=1e-6)


@pytest.mark.slow
def test_only_the_likeliest_token_moves_and_strength_scales_it():
  full, half = disturbed(scale=1.0), disturbed(0.5, scale=1.0)
  others = [v for v in range(V) if v != 3]
  np.testing.assert_array_equal(full[..., others], scores()[..., others])
  np.testing.assert_allclose(shifts(half), shifts(full) / 2, rtol=0, atol=2e-6)
  np.testing.assert_array_equal(disturbed(0.0, scale=1.0, spikes=0.5), scores())
  # At temperature 2 scores move twice as far: log-odds are those of the distribution drawn from.
  even = jnp.zeros((ROWS, LENGTH, V)).at[..., 3].set(0.01)  # one bin at either temperature
  at = lambda t: heavy_tail.shift_hooks(HeavyTail(scale=1.0), temperature=t)
  cold, hot = (at(t).logits(even, KEYS) for t in (1.0, 2.0))
  np.testing.assert_allclose((hot - even) / 2, cold - even, rtol=0, atol=2e-6)
  tight = shifts(disturbed(scale=3.0, limit=0.6))
  assert np.abs(tight).max() <= 0.6 + 1e-5 and (np.abs(tight) > 0.599).mean() > 0.05


@pytest.mark.slow
def test_kl_grows_with_every_dial():
  def mean_kl(**dials):
    return float(divergences.kl(scores(), jnp.asarray(disturbed(**dials))).mean())

  for ladder in (
    [dict(scale=s) for s in (0.06, 0.3, 1.0)],
    [dict(spikes=s) for s in (0.01, 0.1, 0.5)],
    [dict(scale=1.0, spikes=s) for s in (0.0, 0.1)],
  ):
    found = [mean_kl(**dials) for dials in ladder]
    assert found[0] > 0 and sorted(found) == found and len(set(found)) == len(found)


def test_spikes_hit_at_their_rate_both_ways():
  found = shifts(disturbed(spikes=0.1, spike=2.0))
  hit = np.abs(found) > 1
  np.testing.assert_allclose(np.abs(found[hit]), 2, rtol=0, atol=1e-5)
  assert (found[~hit] == 0).all()
  assert abs(hit.mean() - 0.1) < 4 * np.sqrt(0.09 / hit.size)
  assert abs((found[hit] > 0).mean() - 0.5) < 4 * np.sqrt(0.25 / hit.sum())


def test_outlier_prompts_are_fixed_by_their_text():
  source = HeavyTail(outliers=0.2)
  text = np.random.default_rng(0).integers(0, 50, (3000, 6)).astype(np.int32)
  start = np.random.default_rng(1).integers(0, 3, 3000).astype(np.int32)

  def outliers(source, text, start):
    found = heavy_tail.outlier_prompts(source, jnp.asarray(text), jnp.asarray(start))
    return np.asarray(found)

  which = outliers(source, text, start)
  assert abs(which.mean() - 0.2) < 4 * np.sqrt(0.16 / 3000)
  # What stands in the padding, its width and the place in the batch do not matter.
  junk = np.where(np.arange(6)[None] < start[:, None], 49, text)
  wide = np.pad(junk, ((0, 0), (2, 0)))
  np.testing.assert_array_equal(outliers(source, wide, start + 2), which)
  np.testing.assert_array_equal(outliers(source, text[::-1], start[::-1]), which[::-1])
  more = outliers(HeavyTail(outliers=0.5), text, start)
  assert (more | ~which).all() and more.mean() > 0.45
  # One other token is another prompt; a prompt is not the one with a 0 before it.
  other = text.copy()
  other[:, -1] += 1
  assert (outliers(source, other, start) != which).any()
  longer = outliers(source, wide, start * 0 + 1)
  assert (longer != which).any()


def test_outlier_rows_are_wrong_throughout():
  outlier = jnp.arange(ROWS) % 2 == 0
  hooks = heavy_tail.shift_hooks(HeavyTail(outliers=0.1, outlier_shift=4.6), outlier=outlier)
  found = shifts(np.asarray(hooks.logits(scores(), KEYS)))
  np.testing.assert_allclose(found[::2], -4.6, rtol=0, atol=1e-5)
  assert (found[1::2] == 0).all()


def test_off_and_errors():
  assert heavy_tail.shift_hooks(HeavyTail(), jnp.float32(1)) == policy.Hooks()
  with pytest.raises(types.InputError, match='outliers=0.1 needs `outlier`'):
    heavy_tail.shift_hooks(HeavyTail(outliers=0.1))
  for name, bad in (
    ('scale', -1.0),
    ('spike', float('nan')),
    ('dof', 0.0),
    ('limit', -2.0),
    ('spikes', 1.5),
    ('outliers', -0.1),
    ('outlier_shift', float('inf')),
  ):
    with pytest.raises(types.InputError, match=f'heavy_tail.{name}={bad}'):
      HeavyTail(**{name: bad})
