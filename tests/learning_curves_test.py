"""Learning curves of all tasks: numbers, verdict and figure from made-up metrics."""

import dataclasses
import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from experiments import learning_curves
from experiments.laboratory import arms
from experiments.reports import report
from trm_jax import training
from trm_jax.types import InputError

E = learning_curves
CONFIG = dataclasses.replace(E.LearningCurves().config, steps=9)


def metrics_of(start, end, seeds=(100, 101, 102), late=True):
  """Sampled accuracy from start to end, in a line or, if not late, at once; greedy .1 above."""
  found = {}
  for i, seed in enumerate(seeds):
    rows = []
    for step in (0, 3, 6, 9):
      way = step / 9 if late or not step else 1.0
      x = start + (end - start) * way + 0.01 * i * (step > 0)
      rows.append({'step': step, 'accuracy/sampled': x, 'accuracy/greedy': x + 0.1})
    found[E.ARM.name, seed] = rows
  return found


def summary_of(ends, **more):
  found = {name: metrics_of(0.1, ends.get(name, 0.6), **more) for name in E.TASKS}
  return E.summarise(found, {name: 60.0 * (i + 1) for i, name in enumerate(E.TASKS)}, CONFIG)


def test_numbers_by_hand():
  summary = summary_of({'moves': 0.3})
  found = summary['tasks']['moves']
  assert found['start']['sampled'] == {'mean': pytest.approx(0.1), 'se': pytest.approx(0)}
  assert found['end']['greedy']['mean'] == pytest.approx(0.41)
  assert found['gain']['mean'] == pytest.approx(0.21)
  assert found['gain']['se'] == pytest.approx(0.01 / np.sqrt(3))
  assert found['gain']['p_holm'] >= found['gain']['p']
  assert found['gain_of_last_third']['mean'] == pytest.approx(0.2 / 3)
  assert found['core_minutes'] == pytest.approx(4 / 3)
  assert found['curves']['sampled']['step'] == [0, 3, 6, 9]
  assert summary['tasks']['sorting']['tokens'] == 16 and found['tokens'] == 31
  assert '--seeds 3 --steps 9 --publish' in summary['command']


def test_it_says_what_the_numbers_say():
  lines = E.verdict(summary_of({})).splitlines()
  assert 'NO' not in lines[0] and lines[0].count('yes') == len(E.TASKS)
  assert lines[2].endswith(': none.') and 'moves +0.167' in lines[3]
  lines = E.verdict(summary_of({'moves': 0.15}, late=False)).splitlines()
  assert 'moves is learned: NO' in lines[0] and 'moves (+0.060' in lines[2]
  assert lines[3].endswith(': none.')


def test_table_and_figure(tmp_path):
  summary = json.loads(report.write_json(tmp_path / 'x.json', summary_of({})).read_text())
  lines = E.show_table(summary).splitlines()
  assert len(lines) == 2 + len(E.TASKS)
  cells = [x.strip() for x in lines[-1].split('|')]
  assert cells[1:5] == ['moves', '31', '0.100 ± 0.000', '0.610 ± 0.006']
  assert cells[-2] == '1.3'
  image = matplotlib.image.imread(E.draw_figure(summary, tmp_path / 'figure.png'))
  assert image.shape[1] > 3 * image.shape[0] and image.std() > 0.05


def test_a_single_seed_learns_nothing_and_is_drawn(tmp_path):
  summary = summary_of({}, seeds=(100,))
  assert not any(E.learned(x) for x in summary['tasks'].values())
  assert '(p -)' in E.verdict(summary)
  assert E.draw_figure(summary, tmp_path / 'figure.png').exists()


def test_a_single_task_is_refused():
  with pytest.raises(InputError, match='task=trm_jax.tasks.moves has no effect'):
    learning_curves.LearningCurves(config=training.Config(task='trm_jax.tasks.moves'))


def test_every_task_has_its_configuration():
  config = E.config_of('addition', training.Config(steps=7))
  assert (config.task, config.steps) == ('trm_jax.tasks.addition', 7)
  assert config.warm_start.steps == 1500
  assert E.config_of('moves', training.Config()).warm_start == training.WarmStart()


def test_cost_is_counted_over_interruptions(tmp_path, monkeypatch):
  clock, stopped = [0.0], []

  def work(config, chosen, *, seeds, directory, workers):
    clock[0] += 5
    if directory.name == 'addition' and not stopped:
      stopped.append(directory)
      raise KeyboardInterrupt
    return {(chosen[0].name, 100): directory.name}

  monkeypatch.setattr(arms, 'run_all', work)
  monkeypatch.setattr(E, '_used', lambda: clock[0])
  args = E.LearningCurves(directory=tmp_path, seeds=1)
  with pytest.raises(KeyboardInterrupt):
    E.run(args)
  found, seconds = E.run(args)
  assert list(found) == list(E.TASKS) and found['moves'] == {(E.ARM.name, 100): 'moves'}
  assert seconds == {'sorting': 10, 'addition': 10, 'chain_sum': 5, 'moves': 5}


def test_what_is_used_is_counted():
  # The child's own processor time, not only what it took to start it.
  code = 'import time; sum(range(5_000_000)); print(time.process_time())'
  before = E._used()
  child = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True)
  assert E._used() - before >= float(child.stdout)


def test_published_results_are_the_experiments():
  summary = json.loads((learning_curves.RESULTS / 'summary.json').read_text())
  assert summary['steps'] == 80 and len(summary['seeds']) >= 5
  assert list(summary['tasks']) == list(learning_curves.TASKS)
  table = (learning_curves.RESULTS / 'table.md').read_text()
  assert table == f'{learning_curves.show_table(summary)}\n\n{learning_curves.verdict(summary)}\n'
