"""The length-bias experiment: its noise, its rules, and what it says of recorded numbers."""

import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import oracles
import pytest

from experiments import length_bias
from experiments.laboratory import noise_floor
from experiments.reports import report
from trm_jax import masks
from trm_jax.training import command
from trm_jax.types import InputError


def drawn(noise, shape=(400, 200), table=None, **options):
  args = noise_floor.Setting(**options)
  return noise_floor.draw(noise, args, table, jax.random.key(0), shape, 1.0)


# Noise.


def test_lognormal_and_correlated_noise_have_the_stated_spread():
  for noise, within in (('lognormal', 1.0), ('row-correlated', 0.5)):
    log = np.log(drawn(noise).kl) - math.log(1e-6)
    # 80000 tokens; of the correlated ones 400 rows: standard error .07 of the mean.
    np.testing.assert_allclose(log.mean(), 0, atol=0.3)
    np.testing.assert_allclose(log.var(), 4, rtol=0.15)
    np.testing.assert_allclose(log.var(1).mean(), 4 * within, rtol=0.05)


def test_pareto_noise_has_the_stated_tail():
  kl = np.asarray(drawn('Pareto').kl) / 1e-6
  np.testing.assert_allclose(np.median(kl), 1, rtol=0.02)
  # P(x > 10 m) = (10 * 2^(2/3))^-1.5 = 1.58 %
  np.testing.assert_allclose((kl > 10).mean(), 0.5 * 10**-1.5, rtol=0.1)


def test_drawn_log_ratios_agree_with_their_kl_to_second_order():
  d = noise_floor.of_kl(jax.random.key(0), jnp.full((100_000,), 0.01))
  ratio = np.exp(oracles.f64(d.log_ratio))
  # E[ratio] = 1, E[k3] = KL, E[(ratio - 1)^2] = chi2 = 2 KL, E|ratio - 1| = 2 TV.
  np.testing.assert_allclose(ratio.mean(), 1, atol=3e-3)
  np.testing.assert_allclose(oracles.k3(d.log_ratio).mean(), 0.01, rtol=0.03)
  np.testing.assert_allclose(((ratio - 1) ** 2).mean(), d.chi2[0], rtol=0.03)
  np.testing.assert_allclose(abs(ratio - 1).mean(), 2 * d.tv[0], rtol=0.01)


def test_one_bad_token_a_row():
  d = drawn('lognormal', (300, 5))
  worse = noise_floor.with_bad_token(d, jax.random.key(1), 0.5)
  moved = np.asarray(worse.kl != d.kl)
  assert (moved.sum(-1) == 1).all() and (moved.sum(0) > 30).all()
  np.testing.assert_array_equal(worse.kl[moved], 0.5)
  np.testing.assert_array_equal(worse.chi2[moved], 1.0)
  assert set(np.round(np.asarray(worse.log_ratio)[moved], 5)) == {-1.5, 0.5}


# Rules.


def test_statistics_are_those_of_the_criteria():
  d = drawn('lognormal', (64, 12), median=0.01)
  valid = jnp.ones((64, 12), bool)
  criteria = {
    'max': masks.max_kl,
    'mean': masks.mean_kl,
    'LN-TRM': functools.partial(masks.length_neutral, **noise_floor.WEIGHTS),
    'SER': masks.mean_deviation,
    'budget': masks.chi2_budget,
  }
  for name, statistic in noise_floor.STATISTICS.items():
    found = statistic(d, valid)
    limit = jnp.median(found)
    np.testing.assert_array_equal(criteria[name](limit=limit)(d, valid), found <= limit)


def test_proofs_are_half_of_the_papers_constants():
  # T = 4096: 35.0 / 2 at delta 1e-4; a budget of 2 T delta gives .3352; Z(4096) = 1235.5289.
  proofs = {name: float(f(4096, 1e-4)) for name, f in noise_floor.PROOFS.items()}
  np.testing.assert_allclose(proofs['max'], 34.946 / 2, rtol=1e-4)
  np.testing.assert_allclose(noise_floor.PROOFS['budget'](4096, 0.8192), 0.3352, rtol=1e-3)
  np.testing.assert_allclose(proofs['LN-TRM'], 0.12355289, rtol=1e-5)
  assert proofs['SER'] == 0.4096


def test_slips_through_by_hand():
  shares = np.ones(len(noise_floor.BAD))
  shares[9:] = 0  # 1 at 10^-3, 0 at 10^-2.75
  np.testing.assert_allclose(length_bias.slips_through(shares), 10**-2.875, rtol=1e-6)
  assert length_bias.slips_through(np.ones(21)) == 1
  assert length_bias.slips_through(np.zeros(21)) == 1e-5
  assert length_bias.slips_through(np.full(21, math.nan)) is None


@pytest.mark.parametrize(
  'bad, word',
  [
    (dict(seeds=0), 'seeds=0'),
    (dict(rows=9), 'rows=9'),
    (dict(rows=50, target=0.99), 'at least 99'),
    (dict(lengths=(512, 128)), 'lengths'),
    (dict(lengths=()), 'lengths'),
    (dict(anchor=100), 'anchor=100'),
    (dict(target=1.0), 'target=1.0'),
    (dict(sigma=0.0), 'sigma=0.0'),
  ],
)
def test_settings_that_mean_nothing_are_refused(bad, word):
  with pytest.raises(InputError, match=word):
    length_bias.LengthBias(**bad)


# The whole.


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The command with tiny settings: its directory and what it printed."""
  directory = tmp_path_factory.mktemp('length_bias') / 'run'
  line = f'length_bias --directory {directory} --seeds 2 --rows 60 --lengths 4 32 --anchor 4'
  line += ' --contexts 300 --vocabulary 8'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, 'argv', line.split())
    command.run(length_bias.LengthBias, length_bias.main)
  return directory


@pytest.mark.slow
def test_whole_experiment_small(run):
  summary = json.loads((run / 'summary.json').read_text())
  assert set(summary['noises']) == set(noise_floor.NOISES)
  rules = summary['noises']['lognormal']['rules']
  mean = lambda name, key: [x['mean'] for x in rules[name][key]]
  # Rows of 32 tokens under the limit of 4: about .9^8 of them, two seeds of 60 rows.
  assert mean('max', 'kept')[1] < 0.7 < mean('max', 'kept')[0]
  assert mean('budget by length', 'kept')[1] > 0.7 and mean('max, (1-p)^T', 'kept')[1] > 0.7
  assert mean('budget by length', 'proves')[1] < mean('max, (1-p)^T', 'proves')[1]
  assert rules['mean'].get('proves') is None and rules['LN-TRM']['proves']
  limits = mean('max, (1-p)^T', 'limit')
  assert limits[1] > 1.5 * limits[0] and len(set(mean('max', 'limit'))) == 1
  # A larger bad token is needed in a longer row wherever tokens are averaged.
  assert rules['SER']['slips_through'][1] > rules['SER']['slips_through'][0]
  assert mean('mean', 'drift')[0] < mean('mean', 'kept')[0]
  # Exact divergences of the softmax policies agree with what is drawn elsewhere.
  check = {k: x['mean'] for k, x in summary['noises']['softmax']['check'].items()}
  np.testing.assert_allclose(check['chi2 / (2 KL)'], 1, atol=0.01)
  np.testing.assert_allclose(check['log-ratio^2 / (2 KL)'], 1, atol=0.25)
  softmax = summary['noises']['softmax']['rules']['mean']['limit'][0]['mean']
  assert 2e-7 < softmax < 2e-6
  image = matplotlib.image.imread(run / 'figure.png')
  assert image.shape[1] > 1000 and image.std() > 0.05
  text = (run / 'table.md').read_text()
  assert 'Claim: one limit on the maximum loses more than 0.1: yes' in text
  with pytest.raises(InputError, match='already holds'):
    length_bias.main(length_bias.LengthBias(directory=run))


@pytest.mark.slow
def test_tables_and_verdict_follow_from_the_summary(run):
  summary = json.loads((run / 'summary.json').read_text())
  parts = (length_bias.table_of_acceptance, length_bias.table_of_prices, length_bias.verdict)
  assert (run / 'table.md').read_text() == '\n\n'.join(f(summary) for f in parts) + '\n'
  # Numbers that say otherwise change the verdict.
  rules = summary['noises']['lognormal']['rules']
  rules['max']['kept'] = [{'mean': 0.9, 'se': 0.0}] * 2
  rules['budget by length']['proves'] = rules['max, (1-p)^T']['proves']
  rules['max, conformal']['kept'] = [{'mean': 0.5, 'se': 0.0}] * 2
  claim = length_bias.verdict(summary).splitlines()[0]
  assert claim.count('NO') == 3 and 'yes' not in claim


def test_published_results_are_the_experiments():
  summary = json.loads((length_bias.RESULTS / 'summary.json').read_text())
  options = {k: summary['options'][k] for k in ('seeds', 'rows', 'anchor', 'target')}
  default = length_bias.LengthBias()
  assert options == {k: getattr(default, k) for k in options} and options['seeds'] >= 5
  parts = (length_bias.table_of_acceptance, length_bias.table_of_prices, length_bias.verdict)
  table = (length_bias.RESULTS / 'table.md').read_text()
  assert table == '\n\n'.join(f(summary) for f in parts) + '\n'
  # What theory says: under one limit .9^(T / 512) of independent tokens.
  for noise in ('lognormal', 'Pareto', 'softmax'):
    kept = [x['mean'] for x in summary['noises'][noise]['rules']['max']['kept']]
    np.testing.assert_allclose(kept, 0.9 ** (np.array([128, 512, 2048, 8192]) / 512), atol=0.06)
    for rule in ('mean', 'LN-TRM', 'SER'):  # means concentrate: not about constant, as printed
      kept = [x['mean'] for x in summary['noises'][noise]['rules'][rule]['kept']]
      assert kept[0] < 0.88 and kept[-1] > 0.96, (noise, rule)
  assert report.shown(summary['noises']['softmax']['check']['chi2 / (2 KL)']).startswith('1.000')
