"""Experiments: what a command line refuses, and numbers that follow from recorded metrics alone."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import matplotlib.image
import pytest

from experiments import learning_curves, stuck_replica, train_policy
from experiments.laboratory import arms
from experiments.reports import figures, report
from trm_jax import policy, tasks, training
from trm_jax.checkpoints import config_json
from trm_jax.runs import processes
from trm_jax.training import command
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError

ROOT = pathlib.Path(__file__).parents[1]


def run_command(monkeypatch, capsys, *arguments):
  """(exit code, stderr + stdout) of experiments.train_policy with a `main` that must not start."""
  monkeypatch.setattr(sys, 'argv', ['train_policy', *arguments])
  with pytest.raises(SystemExit) as stop:
    command.run(train_policy.TrainPolicy, train_policy.main)
  out = capsys.readouterr()
  return stop.value.code, out.err + out.out


@pytest.mark.parametrize(
  'arguments, word',
  [
    (['--method.max-kl', '0'], 'max_kl=0'),
    (['--samples', '1'], 'samples=1'),
    (['--method.weight', 'tis'], 'anchor'),
    (['--response-length', '4'], 'response_length=4'),
    (['--task', 'nowhere'], 'nowhere'),
    (['--mesh', 'x'], 'mesh'),
    (['--fleet.broken-samples', '9'], 'broken_samples=9'),
    (['--fleet.broken.staleness.stuck'], 'broken_samples'),
    (['--no-such-flag', '1'], 'no-such-flag'),
    (['--steps', 'many'], 'many'),
    (['--fleet.engine.precision.weights', 'int3'], 'int3'),
  ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(
  monkeypatch, capsys, tmp_path, arguments, word
):
  directory = tmp_path / 'run'
  code, text = run_command(monkeypatch, capsys, '--directory', str(directory), *arguments)
  assert code == 2
  assert word in text and 'Traceback' not in text
  assert not directory.exists()


def test_directories_that_cannot_be_used(monkeypatch, capsys, tmp_path):
  file = tmp_path / 'file'
  file.write_text('mine')
  code, text = run_command(monkeypatch, capsys, '--directory', str(file / 'run'))
  assert code == 2 and str(file / 'run') in text and 'Traceback' not in text
  code, text = run_command(monkeypatch, capsys, '--directory', str(tmp_path))
  assert code == 2 and '--resume' in text
  assert file.read_text() == 'mine' and os.listdir(tmp_path) == ['file']


def test_a_directory_belongs_to_one_experiment(tmp_path):
  mine = stuck_replica.StuckReplica(directory=tmp_path / 'a', resume=True)
  command.check_directory(mine)
  command.check_directory(mine)
  (tmp_path / 'a' / 'summary.json').write_text('mine')
  other = learning_curves.LearningCurves(directory=tmp_path / 'a', resume=True)
  with pytest.raises(InputError, match="belongs to the experiment 'StuckReplica'"):
    command.check_directory(other)
  with pytest.raises(InputError, match='already holds'):
    command.check_directory(dataclasses.replace(mine, resume=False))
  assert (tmp_path / 'a' / 'summary.json').read_text() == 'mine'


def test_a_directory_that_holds_nothing_yet_is_taken_again(monkeypatch, tmp_path):
  """As bad input leaves it; and no device is asked for, since some may yet have to be simulated."""
  monkeypatch.setattr(processes, 'sync', lambda name: pytest.fail('devices were asked for'))
  args = stuck_replica.StuckReplica(directory=tmp_path)
  command.check_directory(args)
  command.check_directory(args)
  assert [p.name for p in tmp_path.iterdir()] == [command.OWNER]


def test_help_teaches(monkeypatch, capsys):
  code, text = run_command(monkeypatch, capsys, '--help')
  text = ' '.join(text.replace('│', ' ').split())
  assert code == 0
  for words in ('TRM-Max', 'stuck replica', '--method.max-kl', 'Samples per prompt G'):
    assert words in text


@pytest.mark.slow
def test_one_run_from_the_command_line_interrupted_and_resumed(tmp_path):
  """The program itself, killed without warning in mid-run; then --resume finishes it."""
  directory = tmp_path / 'run'
  words = (
    '--steps 5 --prompts 4 --samples 2 --eval-prompts 8 --save-every 1 --warm-start.steps 2'
    ' --warm-start.batch 8 --policy.width 16 --policy.layers 1 --policy.mlp-width 16'
    ' --policy.heads 2 --policy.kv-heads 2 --policy.experts 0'
  ).split()
  line = [sys.executable, '-m', 'experiments.train_policy', '--directory', str(directory)]
  line += ['--data-dir', str(tmp_path / 'data'), *words]
  environment = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    # The second start need not compile again.
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'cache'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  process = subprocess.Popen(
    line, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  metrics = directory / 'rl' / 'metrics.jsonl'
  while process.poll() is None and not (metrics.exists() and len(metrics.read_text()) > 10):
    try:
      process.wait(0.05)
    except subprocess.TimeoutExpired:
      pass
  process.kill()
  process.wait()
  done = subprocess.run(
    [*line, '--resume'], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  rows = [json.loads(text) for text in metrics.read_text().splitlines()]
  assert [row['step'] for row in rows] == list(range(6))
  assert 'steps/s' in done.stderr and 'accuracy' in done.stdout
  assert (directory / 'figure.png').stat().st_size > 10_000
  config = json.loads((directory / 'rl' / 'config.json').read_text())
  assert config['config']['samples'] == 2 and config['versions']['jax']
  assert list((directory / 'rl' / 'tensorboard').iterdir())


@pytest.mark.parametrize(
  'names, labels',
  [
    (['kl/mean'], ['mean']),
    (['kl/upper/mean', 'kl/lower/mean'], ['mean, at most', 'mean, at least']),
    ([], []),
  ],
)
def test_a_figure_of_a_run_shows_what_is_known_of_the_kl(monkeypatch, tmp_path, names, labels):
  monkeypatch.setattr(figures, 'save', lambda figure, path: figure)
  rows = [{'step': i, 'acceptance': 1.0, **dict.fromkeys(names, 0.1 * i)} for i in range(3)]
  axis = figures.run(rows, tmp_path / 'a.png', title='').axes[1]
  assert [line.get_label() for line in axis.lines] == labels
  assert [text.get_text()[:7] for text in axis.texts] == ([] if names else ['unknown'])


def test_weights_bring_the_architecture_and_not_how_it_is_computed(monkeypatch):
  folder = ROOT / 'tests' / 'golden' / 'qwen3_moe'
  found, size = config_json.read(folder / 'config.json')
  task = types.SimpleNamespace(vocab_size=size, prompt_length=8, response_length=8)
  monkeypatch.setattr(tasks, 'load', lambda name: task)
  given = lambda **how: training.Config(policy=dataclasses.replace(policy.PolicyConfig(), **how))
  how = dict(dtype='bfloat16', remat=True, expert_compute='ragged')
  made = train_policy._described(given(**how), folder)
  assert made.policy == dataclasses.replace(found, **how) and made.warm_start.steps == 0
  with pytest.raises(InputError, match='leave out --policy'):
    train_policy._described(given(width=96), folder)
  served = config_json.positions(folder / 'config.json')
  task.response_length = served - 8
  assert train_policy._described(given(), folder).policy.layers == found.layers
  task.response_length = served - 7
  with pytest.raises(InputError, match=f'serve {served} positions.*need {served + 1}: lower'):
    train_policy._described(given(), folder)


def fake_metrics(seeds=(0, 1, 2), steps=9):
  """Arms with known finals: clean .6, ignored .2, clip .55, tis .5, trm .6, random .4, by seed."""
  finals = dict(
    zip([a.name for a in stuck_replica.ARMS], [0.6, 0.2, 0.55, 0.5, 0.6, 0.3], strict=True)
  )
  found = {}
  for name, final in finals.items():
    for seed in seeds:
      rows = []
      for step in range(steps + 1):
        row = {'step': step}
        if step % 3 == 0:
          row |= {'accuracy/sampled': 0.1 + (final - 0.1) * step / steps + 0.01 * seed}
          row |= {'accuracy/greedy': 0.9}
        if step:
          kept = 0.5 if name in ('TRM-max', 'random mask') and step > 3 else 1.0
          row |= {
            'acceptance': kept,
            'kl/engine1': 0.1 * step if name != 'no mismatch' else math.nan,
          }
          row |= {f'acceptance/length_q{i}': kept for i in range(1, 5)}
        rows.append(row)
      found[name, seed] = rows
  return found


@pytest.fixture
def summary():
  config = dataclasses.replace(stuck_replica.StuckReplica().config, steps=9)
  return stuck_replica.summarise(fake_metrics(), config)


def test_summary_numbers(summary):
  trm = summary['arms']['TRM-max']
  assert trm['accuracy_sampled']['mean'] == pytest.approx(0.61)  # .60 .61 .62
  assert trm['accuracy_sampled']['se'] == pytest.approx(0.01 / math.sqrt(3))
  gap = summary['arms']['mismatch ignored']['paired_trm_minus']
  assert gap['mean'] == pytest.approx(0.4) and gap['se'] == pytest.approx(0, abs=1e-9)
  assert trm['acceptance_last_third']['mean'] == 0.5
  assert summary['arms']['PPO-clip']['acceptance_last_third']['mean'] == 1.0
  assert summary['clean_share'] == 0.5 and summary['start_accuracy']['mean'] == pytest.approx(0.11)
  assert trm['curves']['accuracy/sampled']['step'] == [0, 3, 6, 9]
  assert summary['arms']['no mismatch']['curves']['kl/engine1']['step'] == []


def test_verdict_is_plain_about_what_it_does_not_show(summary):
  text = stuck_replica.verdict(summary)
  assert 'suits TRM by construction' in text
  assert 'did not collapse: PPO-clip 0.560' in text and 'TIS 0.510' in text
  assert 'Collapsed (less than half of the clean gain): random mask' in text
  assert 'mismatch ignored' not in text.split('did not collapse')[1]
  # TRM no better than the random mask must read as such.
  worse = json.loads(json.dumps(summary))
  worse['arms']['random mask']['paired_trm_minus'] = {'mean': -0.2, 'se': 0.01}
  assert '-0.200 ± 0.010' in stuck_replica.verdict(worse)


def test_table_and_figure(summary, tmp_path):
  lines = stuck_replica.show_table(summary).splitlines()
  assert len(lines) == 8 and len({len(x) for x in lines}) == 1
  assert '+0.400 ± 0.000' in lines[3]
  path = figures.stuck_replica(summary, tmp_path / 'figure.png')
  image = matplotlib.image.imread(path)
  assert image.shape[1] > 1000 and image.std() > 0.05  # something was drawn
  assert os.listdir(tmp_path) == ['figure.png']


def test_published_numbers_are_what_the_readme_says():
  """README quotes the table of the committed summary, which holds >= 5 seeds of 200 steps."""
  found = json.loads((stuck_replica.RESULTS / 'summary.json').read_text())
  assert len(found['seeds']) >= 5 and found['steps'] == 200
  table = stuck_replica.show_table(found)
  readme = (ROOT / 'README.md').read_text()
  for line in table.splitlines()[2:]:
    assert ' '.join(line.split()) in ' '.join(readme.split()), line


def test_report_helpers(tmp_path):
  assert report.shown({'mean': 0.5, 'se': 0.02}, sign=True) == '+0.500 ± 0.020'
  assert report.shown({'mean': 0.5, 'se': math.nan}) == '0.500'
  assert report.mean_error([1.0, 3.0]) == {'mean': 2.0, 'se': 1.0}
  assert math.isnan(report.mean_error([1.0])['se'])
  rows = [{'step': s, 'x': float(s)} for s in range(10)]
  assert report.tail_mean(rows, 'x') == 8.0  # 7, 8, 9
  assert report.last([{'x': 1.0}, {'y': 2.0}], 'x') == 1.0
  path = report.write_json(tmp_path / 'a' / 's.json', {'x': [math.nan, 1.0]})
  assert json.loads(path.read_text()) == {'x': [None, 1.0]}


def test_arms_refuse_bad_counts(tmp_path):
  for counts, word in ((dict(seeds=0), 'seeds=0'), (dict(seeds=1, workers=0), 'workers=0')):
    with pytest.raises(InputError, match=word):
      arms.run_all(training.Config(), stuck_replica.ARMS, directory=tmp_path, **counts)
  config = training.Config(method=MethodWords(max_kl=0.3))
  with pytest.raises(InputError, match=r'^method.max_kl=0.3 has no effect here.*--method\.\*\.$'):
    arms.run_all(config, stuck_replica.ARMS, directory=tmp_path, seeds=1)


@pytest.mark.slow
def test_whole_experiment_small(monkeypatch, tmp_path, capsys):
  """All six arms in this process, then a second call that only reads and reports the same."""
  line = [*f'stuck --directory {tmp_path / "e"} --workers 1 --seeds 1 --steps 2'.split()]
  line += f'--data-dir {tmp_path / "data"} --warm-start.steps 2 --warm-start.batch 8'.split()
  line += '--eval-prompts 8 --prompts 4 --policy.layers 1 --policy.experts 0'.split()
  monkeypatch.setattr(sys, 'argv', line)
  command.run(stuck_replica.StuckReplica, stuck_replica.main)
  assert 'suits TRM by construction' in capsys.readouterr().out
  summary = (tmp_path / 'e' / 'summary.json').read_bytes()
  assert (tmp_path / 'e' / 'figure.png').exists() and (tmp_path / 'e' / 'table.md').exists()
  monkeypatch.setattr(sys, 'argv', [*line, '--resume'])
  command.run(stuck_replica.StuckReplica, stuck_replica.main)
  assert (tmp_path / 'e' / 'summary.json').read_bytes() == summary


@pytest.mark.slow
def test_worker_processes_do_what_one_process_does(tmp_path):
  """Two seeds over two worker processes, then a second call that only reads."""
  line = [sys.executable, '-m', 'experiments.stuck_replica', '--directory', str(tmp_path / 'e')]
  line += ['--data-dir', str(tmp_path / 'data')]
  line += ('--seeds 2 --steps 3 --warm-start.steps 3 --eval-prompts 16 --policy.layers 1').split()
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  go = lambda *more: subprocess.run(
    [*line, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
  )
  first = go()
  assert first.returncode == 0, first.stderr
  assert 'suits TRM by construction' in first.stdout
  summary = (tmp_path / 'e' / 'summary.json').read_bytes()
  again = go('--resume')
  assert again.returncode == 0, again.stderr
  assert (tmp_path / 'e' / 'summary.json').read_bytes() == summary
