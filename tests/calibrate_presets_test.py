"""experiments.calibrate_presets: the mix, the closed form and the verdict."""

import copy
import json

import numpy as np
import pytest
import scipy.stats

from experiments import calibrate_presets as cp
from trm_jax.mismatch import heavy_tail, presets
from trm_jax.types import InputError


def test_sampled_tokens_fall_into_the_published_bins():
  c, weight = cp.confidences(50)
  assert weight.min() > 0 and weight.sum() == pytest.approx(1)
  shares = np.bincount(np.searchsorted(heavy_tail.EDGES, c), weight * c, 5)
  shares[0] += (weight * (1 - c)).sum()  # the other tokens of all contexts are rare ones
  np.testing.assert_allclose(shares, cp.SHARES, rtol=1e-12)


def test_closed_form_is_the_sum_over_a_vocabulary():
  """Against softmaxes over 40 tokens, whose likeliest one is shifted."""
  c, weight = cp.confidences(6)
  draws, scale = 40, 1.5
  unit = 1.4826 * scipy.stats.t.ppf(0.75, 3)
  noise = scipy.stats.t.ppf((np.arange(draws) + 0.5) / draws, 3) / unit
  law = 1 / np.arange(1, 40)
  total = dict.fromkeys(('mean_kl', 'mean_tv', 'mean_abs_log_ratio'), 0.0)
  for confidence, w in zip(c, weight, strict=True):
    p = np.concatenate([[confidence], (1 - confidence) * law / law.sum()])
    bin_ = sum(confidence > edge for edge in (0.5, 0.9, 0.99, 0.999))
    for x in noise:
      shift = np.clip(scale * (0.156, 0.175, 0.186, 0.203, 0.237)[bin_] * x, -0.4, 0.4)
      q = p * np.exp(np.where(np.arange(40) == 0, shift, 0))
      q /= q.sum()
      log_ratio = np.log(p) - np.log(q)
      total['mean_kl'] += w / draws * -(q * log_ratio).sum()
      total['mean_tv'] += w / draws * np.abs(p - q).sum() / 2
      total['mean_abs_log_ratio'] += w / draws * (q * np.abs(log_ratio)).sum()
  engine = heavy_tail.HeavyTail(scale=scale, limit=0.4)
  found = cp.closed_form(engine, points=6, draws=draws)
  assert found == pytest.approx(total | {'spread': scale}, rel=1e-9)


def test_the_fit_inverts_the_closed_form():
  engine = heavy_tail.HeavyTail(scale=0.7)
  preset = presets.Preset(
    engine=presets.named('fp16').engine,
    statistic='mean_kl',
    published=cp.closed_form(engine, points=8, draws=100)['mean_kl'],
  )
  assert cp.fit(preset, points=8, draws=100) == pytest.approx(0.7, rel=2e-5)


@pytest.mark.slow
def test_a_run_reproduces_the_closed_form_and_judges_itself(tmp_path):
  names = ('fp16', 'moe_vllm_bf16')
  args = cp.CalibratePresets(directory=tmp_path / 'run', names=names, vocabulary=1024, contexts=512)
  cp.main(args)
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert (tmp_path / 'run' / 'figure.png').stat().st_size > 10_000
  for found in summary['presets'].values():
    seen, exact = found['at_vocabulary'], found['closed_form']
    for name in ('mean_kl', 'mean_tv', 'mean_abs_log_ratio'):
      assert abs(seen[name]['mean'] - exact[name]) < 5 * seen[name]['se']
    np.testing.assert_allclose(seen['table']['share'], cp.SHARES, atol=0.07)
  assert cp.verdict(summary).startswith('All 2 presets return their number')
  worse = copy.deepcopy(summary)
  worse['presets']['fp16']['error'] = 0.1
  assert cp.verdict(worse).startswith('Off by more than the stated error: fp16.')
  text = (tmp_path / 'run' / 'table.md').read_text()
  assert '| fp16' in text and '| > .999' in text


def test_settings_that_cannot_be_are_refused():
  for bad, said in (
    ({'vocabulary': 10}, 'vocabulary=10 must be at least 1024'),
    ({'contexts': 100}, 'contexts=100 must be a positive multiple of 128'),
    ({'names': ('fp16',)}, "must hold 'moe_vllm_bf16'"),
    ({'names': ('moe_vllm_bf16', 'stale_1')}, "names holds 'stale_1', a mechanism"),
    ({'zipf': 1.5}, r'zipf=1.5 must lie in \(0, 1\]'),
  ):
    with pytest.raises(InputError, match=said):
      cp.CalibratePresets(**bad)
