"""trm_jax.mismatch.reporting: each bug of log-prob storage by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trm_jax import types
from trm_jax.mismatch import reporting

PROMPTS, SAMPLES, LENGTH = 50, 3, 40
ROWS = PROMPTS * SAMPLES
Reporting = reporting.Reporting
ENDS = np.random.default_rng(0).integers(1, LENGTH + 1, ROWS)
VALID = np.arange(LENGTH)[None] < ENDS[:, None]
LOGP = np.where(VALID, -np.random.default_rng(1).exponential(2, VALID.shape), 0).astype(np.float32)


def report(strength=1.0, *, seed=0, **dials):
  key = jax.random.key(seed)
  out = reporting.report(
    Reporting(**dials),
    jnp.asarray(LOGP),
    jnp.asarray(VALID),
    token_keys=jax.random.split(key, VALID.shape),
    prompt_keys=jax.random.split(jax.random.fold_in(key, 1), PROMPTS),
    strength=strength,
  )
  out = np.asarray(out)
  assert (out[~VALID] == 0).all()
  return out


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_cast(dtype):
  want = LOGP.astype({'bfloat16': ml_dtypes.bfloat16, 'float16': np.float16}[dtype])
  np.testing.assert_array_equal(report(dtype=dtype), want.astype(np.float32))


def test_missing_at_its_rate():
  lost = np.isnan(report(missing=0.2))
  count = VALID.sum()
  assert abs(lost.sum() / count - 0.2) < 4 * np.sqrt(0.16 / count) and not lost[~VALID].any()
  kept = report(missing=0.2)[VALID & ~lost]
  np.testing.assert_array_equal(kept, LOGP[VALID & ~lost])
  np.testing.assert_array_equal(np.isnan(report(missing=0.2)), lost)  # same key, same tokens
  assert (np.isnan(report(missing=0.2, seed=1)) != lost).any()


def test_shift_by_one():
  late = np.where(VALID, np.pad(LOGP, ((0, 0), (1, 0)))[:, :-1], 0)
  early = np.where(VALID, np.pad(LOGP, ((0, 0), (0, 1)))[:, 1:], 0)
  np.testing.assert_array_equal(report(shift=1), late)
  np.testing.assert_array_equal(report(shift=-1), early)
  assert (report(shift=1)[:, 0] == 0).all()


def test_scrambled_prompts_hold_their_neighbours_log_probs():
  out = report(scrambled=0.4).reshape(PROMPTS, SAMPLES, LENGTH)
  grouped, valid = LOGP.reshape(out.shape), VALID.reshape(out.shape)
  moved = np.where(valid, np.roll(grouped, 1, 1), 0)
  hit = (out != grouped).any((1, 2))
  np.testing.assert_array_equal(out[hit], moved[hit])
  assert abs(hit.mean() - 0.4) < 4 * np.sqrt(0.24 / PROMPTS)
  np.testing.assert_array_equal(report(scrambled=1.0).reshape(out.shape), moved)


def test_error_grows_with_every_dial_and_off_is_off():
  def size(strength=1.0, **dials):
    return np.abs(np.nan_to_num(report(strength, **dials), nan=9.0) - LOGP)[VALID].mean()

  for ladder in (
    [dict(dtype='float16'), dict(dtype='bfloat16')],
    [dict(missing=m) for m in (0.05, 0.2, 0.9)],
    [dict(scrambled=s) for s in (0.1, 0.5, 1.0)],
    [dict(strength=s, missing=0.9, scrambled=0.9) for s in (0.1, 0.5, 1.0)],
  ):
    found = [size(**dials) for dials in ladder]
    assert found[0] > 0 and sorted(found) == found and len(set(found)) == len(found)
  everything = dict(dtype='bfloat16', missing=0.5, shift=1, scrambled=0.5)
  np.testing.assert_array_equal(report(jnp.float32(0), **everything), LOGP)
  np.testing.assert_array_equal(report(), LOGP)


@pytest.mark.parametrize(
  'bad, match',
  [
    (dict(dtype='float8_e5m2'), "reporting.dtype='float8_e5m2' is not bfloat16 or float16"),
    (dict(missing=-0.1), 'reporting.missing=-0.1'),
    (dict(scrambled=1.5), 'reporting.scrambled=1.5'),
  ],
)
def test_bad_dials(bad, match):
  with pytest.raises(types.InputError, match=match):
    Reporting(**bad)


def test_bugs_that_need_more():
  with pytest.raises(types.InputError, match='scrambled=0.5 needs .* 2 or more samples .* not 1'):
    Reporting(scrambled=0.5).check(1)
  with pytest.raises(types.InputError, match='shift=-40 must be smaller than the 40 slots'):
    report(shift=-40)
