"""Masks over a longer horizon: what is kept, numbers, verdict and figure from made-up data."""

import dataclasses
import json

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from experiments import long_horizon
from experiments.laboratory import grid
from experiments.reports import long_horizon_report as shown
from experiments.reports import report
from trm_jax.types import Divergences

E = long_horizon
CONFIG = dataclasses.replace(E.LongHorizon().config, steps=9)
LIMITS = {'max': 0.1, 'mean': 0.02, 'budget': 0.5}


def divergences_of(kl):
  kl = jnp.asarray(kl, jnp.float32)
  return Divergences(kl=kl, tv=kl, log_ratio=kl, entropy=kl + 1, chi2=3 * kl)


# Rows of 4, 4, 2 and 2 tokens.
KL = np.array([[0.0, 0.2, 0, 0], [0.04, 0, 0, 0], [0.3, 0, 9, 9], [0, 0.05, 9, 9]])
VALID = jnp.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]], bool)


def test_what_the_rules_keep_by_hand():
  kept = lambda rule: np.asarray(
    E._kept(divergences_of(KL), VALID, LIMITS[E.RULES[rule][0]], rule) & VALID
  ).sum(1)
  np.testing.assert_array_equal(kept('max'), [0, 4, 0, 2])
  np.testing.assert_array_equal(kept('mean'), [0, 4, 0, 0])
  np.testing.assert_array_equal(kept('budget'), [0, 4, 0, 2])
  np.testing.assert_array_equal(kept('prefix max'), [1, 4, 0, 2])
  np.testing.assert_array_equal(kept('prefix budget'), [1, 4, 0, 2])


@pytest.mark.slow
def test_shares_by_hand():
  kept = E._kept(divergences_of(KL), VALID, 0.1, 'prefix max')
  found = E.shares(kept, VALID)
  assert (found['rows'], found['tokens']) == (0.5, pytest.approx(7 / 12))
  assert found['position_q1'] == 0.75 and found['position_q4'] == 0.5


@pytest.mark.slow
def test_limits_are_those_of_the_first_batch_alone():
  """More rows than conformal needs; the second batch is louder, the third silent."""
  rng = np.random.default_rng(0)
  valid = jnp.ones((20, 6), bool)
  batches = [
    (divergences_of(scale * rng.exponential(size=(20, 6))), valid) for scale in (0.1, 1.0, 0)
  ]
  found = E.judged(batches, None)
  largest = np.sort(np.asarray(batches[0][0].kl).max(1))
  assert found['limits']['max'] == pytest.approx(largest[16])  # ceil(21 x .8) = 17th
  np.testing.assert_equal(found['rules']['max'], found['rules']['max, by T'])
  assert 0.5 <= found['rules']['max']['rows'] < 0.6  # all silent rows, hardly any loud one
  tight = E.judged(batches, dict.fromkeys(LIMITS, 1e-09))
  assert tight['rules']['max']['rows'] == 0.5
  np.testing.assert_equal(tight['rules']['max, by T'], found['rules']['max, by T'])


def test_settings_share_fixed_limits():
  by_T = {T: {name: x * T for name, x in LIMITS.items()} for T in E.HORIZONS}
  for setting in E.settings_of(LIMITS, by_T):
    methods = {a.name: a.method for a in setting.arms}
    assert methods['max'].limits == methods[E.RANDOM].limits == {'max_kl': 0.1}
    assert methods['prefix budget'].limits == {'chi2_budget': 0.5}
    assert methods['prefix budget'].scope == 'prefix' and methods[E.RANDOM].match_length
    assert [a.strength for a in setting.arms].count(0.0) == 1
  own = {a.name: a.method for a in setting.arms}
  assert own['max, by T'].max_kl == pytest.approx(0.1 * E.TRAINED[-1])
  assert E.geometric([{'max': 0.1}, {'max': 0.4}]) == {'max': 0.2}


def test_a_longer_horizon_changes_the_task_and_the_warm_start_alone():
  for T in E.HORIZONS:
    config = E.config_of(T, CONFIG, steps=0)
    assert config.fleet == E.NOISE and config.steps == 0
    assert config.task.startswith('trm_jax.tasks.moves')


def metrics_of(finals, seeds):
  """The same metrics for each seed, but for final accuracies a hundredth apart."""
  found = {}
  for place, (name, final) in enumerate(finals.items()):
    for i, seed in enumerate(seeds):
      end = final + 0.01 * i + 0.001 * ((place * i) % 3)
      rows = [{'step': 0, 'accuracy/sampled': 0.1, 'accuracy/greedy': 0.2}]
      for step in range(1, 10):
        rows.append({'step': step, 'acceptance': 0.9, 'kl/p90': 0.1})
        rows[-1] |= {f'acceptance/length_q{q}': 0.9 for q in range(1, 5)}
      found[name, seed] = [
        *rows[:-1],
        rows[-1] | {f'accuracy/{a}': end for a in ('sampled', 'greedy')},
      ]
  return found


def summary_of(kept=None, finals=None, seeds=(100, 101, 102)):
  """.8 kept and .5 reached by all that `kept[rule, T]` and `finals[T, arm]` do not name."""
  kept, finals = kept or {}, finals or {}

  def at(T, rule):
    whole = kept.get((rule, T), 0.8)
    more = 0.1 if 'prefix' in rule and T > 31 else 0
    found = {'rows': whole, 'tokens': whole + more}
    found |= {
      f'{w}_q{i}': whole + more - 0.02 * i for w in ('length', 'position') for i in range(1, 5)
    }
    return found

  accepted = {
    T: {
      seed: {
        'limits': {name: x * T for name, x in LIMITS.items()},
        'rules': {rule: at(T, rule) for rule in shown.LOOKS},
        'length': T * 0.8,
        'mean_kl': 0.001,
        'entropy': float('nan') if seed == 100 and T > 31 else 0.5,
      }
      for seed in seeds
    }
    for T in E.HORIZONS
  }
  settings = E.settings_of(LIMITS, dict.fromkeys(E.HORIZONS, LIMITS))
  trained = {
    s.name: metrics_of({a.name: finals.get((s.name, a.name), 0.5) for a in s.arms}, seeds)
    for s in settings
  }
  return E.summarise(accepted, trained, settings, CONFIG)


LAST = f'T = {E.TRAINED[-1]}'
AS_CLAIMED = (
  {(rule, T): 0.3 for rule in ('max', 'budget') for T in E.HORIZONS if T > 31},
  {(LAST, 'max'): 0.3},
)


def test_it_says_what_the_numbers_say():
  first = lambda *parts: shown.verdict(summary_of(*parts)).splitlines()[0]
  assert 'NO' not in first(*AS_CLAIMED)
  # The mirror image: the mean falls, limits by T miss, prefix forms keep less.
  other = {('mean', T): 0.3 for T in E.HORIZONS if T > 31}
  other |= {('mean, by T', T): 0.3 for T in E.HORIZONS}
  other |= {(f'prefix {rule}', T): 0.3 for rule in ('max', 'budget') for T in E.HORIZONS if T > 31}
  stated = first(other, {(LAST, 'max'): 0.7})
  assert stated.count('NO') == 7 and '... and fewer late ones: yes' in stated
  text = shown.verdict(summary_of(*AS_CLAIMED))
  assert f'{LAST}: separated are' in text and 'max minus no mask -0.2' in text
  assert 'T = 31: separated are no effects' in text


def test_tables_and_figure(tmp_path):
  path = report.write_json(tmp_path / 'summary.json', summary_of(*AS_CLAIMED))
  summary = json.loads(path.read_text())
  assert summary['kept']['64']['entropy']['mean'] == 0.5  # what is not known is left out
  lines = shown.table_of_kept(summary).splitlines()
  assert len(lines) == 2 + len(E.HORIZONS) * len(shown.LOOKS)
  assert len(shown.table_of_noise(summary).splitlines()) == 2 + len(E.HORIZONS)
  assert len(grid.table_of_effects(summary).splitlines()) == 2 + len(E.EFFECTS)
  assert len(shown.parts(summary)) == 5
  image = matplotlib.image.imread(shown.draw(summary, tmp_path / 'figure.png'))
  assert image.shape[1] > 1000 and image.std() > 0.05


def test_a_single_seed_separates_nothing_and_is_drawn(tmp_path):
  summary = summary_of(*AS_CLAIMED, seeds=(101,))
  assert not any(grid.separated(e) for e in summary['effects'])
  assert 'costs accuracy: NO' in shown.verdict(summary)
  assert shown.draw(summary, tmp_path / 'figure.png').exists()


def test_effects_name_arms_that_exist():
  settings = {
    s.name: {a.name for a in s.arms}
    for s in E.settings_of(LIMITS, dict.fromkeys(E.HORIZONS, LIMITS))
  }
  assert len(set(E.EFFECTS)) == len(E.EFFECTS)
  assert all({e.arm, e.other} <= settings[e.setting] for e in E.EFFECTS)


def test_published_results_are_the_experiments():
  summary = json.loads((E.RESULTS / 'summary.json').read_text())
  assert summary['target'] == E.TARGET and len(summary['seeds']) >= 5
  assert list(summary['kept']) == [str(T) for T in E.HORIZONS]
  asked = [dataclasses.asdict(e) for e in E.EFFECTS]
  assert [{k: e[k] for k in asked[0]} for e in summary['effects']] == asked
  table = (E.RESULTS / 'table.md').read_text()
  assert table == '\n\n'.join(shown.parts(summary)) + '\n'
