"""Settings x arms: effects paired by seed, Holm's correction, tables; one tiny grid that runs."""

import dataclasses
import json
import math

import matplotlib.image
import numpy as np
import pytest

from experiments import dense_precision, drift_or_noise, reuse
from experiments.laboratory import arms, grid
from experiments.laboratory.arms import Arm
from trm_jax import training
from trm_jax.policy.decoder import PolicyConfig
from trm_jax.training.words import MethodWords

EXPERIMENTS = pytest.mark.parametrize('experiment', [drift_or_noise, dense_precision, reuse])


def test_holm_by_hand():
  # Sorted .01 .02 .03 .04: times 4 3 2 1 = .04 .06 .06 .04, then never falling.
  np.testing.assert_allclose(grid.holm([0.02, 0.01, 0.04, 0.03]), [0.06, 0.04, 0.06, 0.06])
  np.testing.assert_allclose(grid.holm([0.4, 0.9, 0.001]), [0.8, 0.9, 0.003])
  assert grid.holm([0.5, 0.6])[0] == 1.0
  found = grid.holm([0.02, math.nan])
  assert found[0] == 0.04 and math.isnan(found[1])


def test_paired_p_by_hand():
  # t = 3, one degree of freedom: p = 1 - 2 / pi * atan 3.
  np.testing.assert_allclose(grid.paired_p([1.0, 2.0]), 1 - 2 / math.pi * math.atan(3), rtol=1e-9)
  assert math.isnan(grid.paired_p([1.0]))
  assert grid.paired_p([0.0, 0.0]) == 1 and grid.paired_p([0.1, 0.1]) == 0


def metrics_of(finals, seeds=(100, 101, 102), steps=9):
  """Metrics whose final accuracy is `finals[arm]`, one hundredth more with each seed and a jitter
  of a thousandth that differs between arms."""
  found = {}
  for place, (name, final) in enumerate(finals.items()):
    for i, seed in enumerate(seeds):
      end = final + 0.01 * i + 0.001 * ((place * i) % 3)
      rows = [{'step': 0, 'accuracy/sampled': 0.1, 'accuracy/greedy': 0.2}]
      for step in range(1, steps + 1):
        row = {'step': step, 'acceptance': 0.75, 'kl/p90': 0.3}
        row |= {f'acceptance/length_q{q}': 1 - q / 10 for q in range(1, 5)}
        row['acceptance/length_q3'] = math.nan  # no row of this length
        if step % 3 == 0:
          row['accuracy/sampled'] = 0.1 + (end - 0.1) * step / steps
          row['accuracy/greedy'] = end + 0.1
        rows.append(row)
      found[name, seed] = rows
  return found


def summary_of(experiment, finals=None):
  """Summary of synthetic metrics: .5 for every arm that `finals[setting, arm]` does not name."""
  finals = finals or {}
  found = {
    s.name: metrics_of({a.name: finals.get((s.name, a.name), 0.5) for a in s.arms})
    for s in experiment.SETTINGS
  }
  return experiment.summarise(found, dataclasses.replace(training.Config(), steps=9))


def claim(experiment, finals=None):
  return experiment.verdict(summary_of(experiment, finals)).splitlines()[0]


def test_drift_or_noise_says_what_the_numbers_say():
  e = drift_or_noise
  as_claimed = {
    (e.NOISE, 'clip'): 0.2,
    (e.DRIFT, 'TIS'): 0.3,
    (e.BOTH, 'clip'): 0.3,
    (e.BOTH, 'TIS'): 0.3,
    (e.DRIFT, 'TIS + TRM'): 0.45,
    (e.DRIFT, 'TIS + random'): 0.3,
  }
  assert 'NO' not in claim(e, as_claimed)
  # The mirror image: each claim falls.
  other = {
    (e.NOISE, 'TIS'): 0.2,
    (e.DRIFT, 'clip'): 0.3,
    (e.BOTH, 'decoupled'): 0.3,
    (e.NOISE, 'TIS + TRM'): 0.6,
    (e.NOISE, 'TIS + random'): 0.3,
  }
  assert 'yes' not in claim(e, other)
  text = e.verdict(summary_of(e, as_claimed))
  lines = {line.split(': ')[0]: line for line in text.splitlines()}
  assert lines['- A mask costs, after the correction, in'].endswith(': none.')
  assert 'stale 8: TIS' in lines['- A mask helps, after the correction, in']
  # Nothing separated: only what is "not seen" stands.
  assert claim(e).count('yes') == 2 and claim(e).count('NO') == 5


def test_drift_or_noise_runs_each_identity_once():
  """Where decoupled is another surrogate by identity it is not run; all others are."""
  names = {s.name: [a.name for a in s.arms] for s in drift_or_noise.SETTINGS}
  assert [len(x) for x in names.values()] == [1, 6, 6, 9]
  randoms = [a for s in drift_or_noise.SETTINGS for a in s.arms if a.name.endswith('random')]
  assert len(randoms) == 7 and all(a.method.match_length for a in randoms)


def test_dense_precision_says_what_the_numbers_say():
  e = dense_precision
  as_claimed = {('e5m2', e.CLIP): 0.2, ('e5m2', e.TIGHT): 0.2}
  summary = summary_of(e, as_claimed)
  summary['settings']['e5m2'][e.TIGHT]['kept']['mean'] = 0.2
  assert 'NO' not in e.verdict(summary).splitlines()[0]
  other = {('e5m2', e.TIS): 0.2, ('e5m2', e.RATIO): 0.2, ('e5m2', e.WIDE): 0.2}
  summary = summary_of(e, other | {('int8', e.CLIP): 0.2})
  summary['settings']['int8'][e.TIGHT]['kept']['mean'] = 0.2
  assert 'yes' not in e.verdict(summary).splitlines()[0]


def test_reuse_says_what_the_numbers_say():
  e = reuse
  assert 'NO' not in claim(e, {(e.MOST, e.TRM): 0.1})
  other = {(e.ONCE, e.TRM): 0.1, (e.MOST, e.BOTH): 0.4}
  assert 'yes' not in claim(e, other)
  assert 'it costs in: 8 updates, on clip' in e.verdict(summary_of(e, other))


@EXPERIMENTS
def test_effects_name_arms_that_exist_and_are_paired(experiment):
  summary = summary_of(experiment)
  assert len(summary['effects']) == len(experiment.EFFECTS) == len(set(experiment.EFFECTS))
  by_seed = lambda setting, arm: summary['settings'][setting][arm]['by_seed']
  for e, found in zip(experiment.EFFECTS, summary['effects'], strict=True):
    gaps = np.subtract(by_seed(e.setting, e.arm), by_seed(e.second, e.other))
    np.testing.assert_allclose(found['mean'], gaps.mean(), atol=1e-12)
  assert summary['seeds'] == [100, 101, 102]
  assert summary['start_accuracy']['mean'] == pytest.approx(0.1)
  corrected = grid.holm([e['p'] for e in summary['effects']])
  assert corrected == [e['p_holm'] for e in summary['effects']]


@EXPERIMENTS
def test_tables(experiment):
  summary = json.loads(json.dumps(summary_of(experiment)).replace('NaN', 'null'))
  lines = grid.table_of_arms(summary).splitlines()
  assert len(lines) == 2 + sum(len(s.arms) for s in experiment.SETTINGS)
  cells = [x.strip() for x in lines[2].split('|')]
  assert cells[3:8] == ['0.510 ± 0.006', '0.610 ± 0.006', '0.750', '0.900', '0.600']
  lines = grid.table_of_effects(summary).splitlines()
  assert len(lines) == 2 + len(experiment.EFFECTS) and f'Holm over {len(lines) - 2}' in lines[0]


@pytest.mark.slow
@EXPERIMENTS
def test_a_single_seed_separates_nothing_and_is_drawn(experiment, tmp_path):
  found = {
    s.name: metrics_of({a.name: 0.5 for a in s.arms}, seeds=(100,)) for s in experiment.SETTINGS
  }
  summary = experiment.summarise(found, training.Config())
  assert not any(grid.separated(e) for e in summary['effects'])
  assert '(p -)' in experiment.verdict(summary)
  image = matplotlib.image.imread(experiment.draw_figure(summary, tmp_path / 'figure.png'))
  assert image.shape[1] > 1000 and image.std() > 0.05


def test_each_setting_changes_the_configuration_and_shares_warm_starts(monkeypatch, tmp_path):
  asked = []
  monkeypatch.setattr(arms, 'run_all', lambda *a, **k: asked.append((a, k)) or {'metrics': a[1]})
  config = training.Config(steps=7)
  found = grid.run(config, reuse.SETTINGS, seeds=3, directory=tmp_path, workers=2)
  assert found == {s.name: {'metrics': s.arms} for s in reuse.SETTINGS}
  for (setting, _), (count, parts) in zip(asked, reuse.UPDATES.items(), strict=True):
    assert (setting[0].steps, setting[0].epochs, setting[0].minibatches) == (7, *parts)
    assert math.prod(parts) == count
  assert {str(k['warm_starts']) for _, k in asked} == {str(tmp_path / 'warm_start')}
  assert [k['directory'].name for _, k in asked] == ['1_update', '4_updates', '8_updates']
  assert all((k['seeds'], k['workers']) == (3, 2) for _, k in asked)


@pytest.mark.slow
def test_settings_run_in_turn(tmp_path):
  arm = Arm(name='a', method=MethodWords())
  settings = (
    grid.Setting(name='plain', arms=(arm,)),
    grid.Setting(name='with change', arms=(arm,), changes=dict(seed=1)),
  )
  config = training.Config(
    steps=1,
    prompts=4,
    samples=2,
    eval_prompts=8,
    data_dir=str(tmp_path / 'data'),
    policy=PolicyConfig(layers=1, experts=0, width=16, mlp_width=16, heads=2, kv_heads=2),
    warm_start=training.WarmStart(steps=1, batch=8),
  )
  run = lambda: grid.run(config, settings, seeds=2, directory=tmp_path / 'e', workers=1)
  found = run()
  assert set(found['plain']) == {('a', 0), ('a', 1)}
  assert set(found['with change']) == {('a', 1), ('a', 2)}
  end = [found[name]['a', 1][1]['reward'] for name in ('plain', 'with change')]
  assert end[0] == end[1]
  folders = lambda *names: {p.name for p in (tmp_path / 'e').joinpath(*names).iterdir()}
  assert folders() == {'warm_start', 'plain', 'with_change'}
  assert folders('warm_start') == {'seed0', 'seed1', 'seed2'}
  assert run() == found  # only read


@pytest.mark.parametrize('experiment', [drift_or_noise, dense_precision, reuse])
def test_published_results_are_the_experiments(experiment):
  summary = json.loads((experiment.RESULTS / 'summary.json').read_text())
  assert summary['steps'] == 80 and len(summary['seeds']) >= 5
  named = {s.name: [a.name for a in s.arms] for s in experiment.SETTINGS}
  assert {k: list(v) for k, v in summary['settings'].items()} == named
  asked = [dataclasses.asdict(e) for e in experiment.EFFECTS]
  assert [{k: e[k] for k in asked[0]} for e in summary['effects']] == asked
  parts = (grid.table_of_arms, grid.table_of_effects, experiment.verdict)
  table = (experiment.RESULTS / 'table.md').read_text()
  assert table == '\n\n'.join(f(summary) for f in parts) + '\n'
