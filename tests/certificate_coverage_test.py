"""The coverage experiment: scenarios are what they say, and the verdict follows the rates."""

import copy
import json
import types

import numpy as np
import pytest

from experiments import certificate_coverage as cc
from experiments.laboratory import known_pairs
from experiments.reports import coverage_report
from trm_jax.types import InputError


@pytest.fixture(scope='module')
def made():
  return {it.name: it for it in known_pairs.scenarios(1)}


@pytest.mark.slow
def test_scenarios_are_what_they_say(made):
  for it in made.values():
    assert it.mass.sum() == pytest.approx(1) and it.new_mass.sum() == pytest.approx(1)
    reward = it.rows['reward']
    assert it.gain == pytest.approx(((it.new_mass - it.mass) * reward).sum(), abs=1e-12)
    seen = it.mass > 0
    weight = np.exp(np.where(it.rows['valid'], it.rows['log_ratio'], 0).sum(-1))[seen]
    np.testing.assert_allclose(weight * it.mass[seen], it.new_mass[seen], rtol=1e-9)
    kl = (it.mass[:, None] * np.where(it.rows['valid'], it.rows['kl'], 0)).sum()
    assert it.seq_kl == pytest.approx(kl, rel=1e-9)
    # E W^2 is that of the budget's definition: each chi2 stands at its own prefix.
    steps = (it.mass[:, None] * it.rows['chi2'] * _before(it) ** 2).sum()
    assert 1 + steps == pytest.approx((it.mass[seen] * weight**2).sum(), rel=1e-9)
  assert made['clean step'].seq_kl == pytest.approx(0.01, rel=1e-3)
  assert made['clean step'].correlation > 0.95 > 0.5 > made['noisy step'].correlation > 0
  assert made['step backwards'].gain < 0 and made['no effect'].gain == 0
  for share in (3e-3, 3e-4):
    it = made[f'rare disaster, {share:g}']
    assert -share < it.gain < 0
    inside = (
      np.arange(it.mass.size) // known_pairs.VOCAB ** (known_pairs.HORIZON - 1)
      == known_pairs.BRANCH
    )
    assert it.mass[inside].sum() == pytest.approx(share, rel=1e-6)


def _before(it):
  log_ratio = np.where(it.mass[:, None] > 0, it.rows['log_ratio'], 0)
  return np.exp(np.cumsum(log_ratio, -1) - log_ratio)


@pytest.mark.slow
def test_limits_reject_nothing_and_a_tenth(made):
  it = made['noisy step']
  none, mean_limit = cc.limits_of(it)
  seen = it.mass > 0
  assert (it.rows['kl'][seen] <= none.max_kl).all() and none.max_tv <= 1
  assert (it.rows['chi2'][seen].sum(-1) <= none.budget).all()
  mean = it.rows['kl'].sum(-1) / it.rows['valid'].sum(-1)
  assert 0.08 < it.mass[mean > mean_limit].sum() <= 0.1


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
  args = cc.CertificateCoverage(
    directory=tmp_path, repeats=12, sizes=(256,), only=('disaster, 0.0003',)
  )
  cc.main(args)
  summary = json.loads((tmp_path / 'summary.json').read_text())
  (it,) = summary['scenarios'].values()
  found = it['sizes']['256']
  assert all(
    found[name]['coverage'] == 1 and found[name]['false'] == 0 for name in coverage_report.EXACT
  )
  assert found['importance sampling, CLT']['coverage'] < 0.5
  assert summary['misuse']['fitted on the same rows']['8192']['false, misused'] > 0.8
  assert (tmp_path / 'figure.png').stat().st_size > 10_000
  text = capsys.readouterr().out
  assert 'Finite-sample certificates: all hold' in text
  assert 'importance sampling, CLT fails' in text

  broken = json.loads(json.dumps(summary))
  broken['scenarios'][it_name(summary)]['sizes']['256']['centred']['coverage'] = 0.5
  assert 'BROKEN: centred' in coverage_report.verdict(broken)
  ahead = copy.deepcopy(summary)
  ahead['scenarios'][it_name(summary)]['sizes']['256']['prefix, L2']['fires'] = 1.0
  assert 'Fires more often than importance sampling: prefix, L2' in coverage_report.verdict(ahead)


def it_name(summary):
  return next(iter(summary['scenarios']))


@pytest.mark.parametrize(
  'change, word',
  [
    (dict(repeats=1), 'repeats=1'),
    (dict(sizes=(100,)), 'sizes='),
    (dict(sizes=()), 'sizes='),
    (dict(alpha=1.5), 'alpha=1.5'),
  ],
)
def test_bad_input(change, word):
  with pytest.raises(InputError, match=word):
    cc.CertificateCoverage(**change)


def test_a_scenario_that_is_none(monkeypatch):
  monkeypatch.setattr(known_pairs, 'scenarios', lambda seed: [types.SimpleNamespace(name='small')])
  with pytest.raises(InputError, match='is part of no name of a scenario: small'):
    cc.summarise(cc.CertificateCoverage(only=('nothing',)))


def test_the_published_table_is_that_of_its_summary():
  summary = json.loads((cc.RESULTS / 'summary.json').read_text())
  shown = coverage_report
  parts = shown.coverage_table, shown.firing_table, shown.misuse_table, shown.verdict
  table = (cc.RESULTS / 'table.md').read_text()
  assert table == '\n\n'.join(part(summary) for part in parts) + '\n'
