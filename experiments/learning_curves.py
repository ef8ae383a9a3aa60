"""Does the small policy learn the tasks that ship with this project?

Each task with the default model, batch and optimizer of the other experiments, without any mismatch
or mask: what an experiment on that task can at best show. Sorting is the reference.

Claim under test: RL raises the sampled accuracy of every task, by .1 or more, with the one learning
rate that was chosen on sorting.
Falsified if: some task gains less than .1, or its gain over seeds is not separated from 0 after
Holm's correction over the tasks.
Honest caveat: a demonstrator of two minds precedes RL, so a gain is the choice of one of two known
ways, not the discovery of one. One model, one learning rate, so many steps: what is not learned
here may be learned elsewhere.

Tried before, on one seed that is none of these (7): addition with the default warm start of 500
steps went from .135 to .314 sampled in 80 RL steps (greedy .71), and to .363 in 120; with 1500 from
.340 to .904 (greedy 1.0). It lacked ability, not preference: the longer warm start is its setting
here. The other tasks have the default; nothing else was tried.

    python -m experiments.learning_curves                                    # a look: 2 seeds
    python -m experiments.learning_curves --seeds 5 --publish
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from typing import Annotated, Any

import matplotlib.pyplot as plt
import tyro

from experiments.laboratory import arms, grid
from experiments.reports import figures, report
from trm_jax import tasks, training
from trm_jax.training import command
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError

# What each task changes of the configuration; carries are learned late.
TASKS: dict[str, dict[str, Any]] = {
  'sorting': {},
  'addition': dict(warm_start=training.WarmStart(steps=1500)),
  'chain_sum': {},
  'moves': {},
}
ARM = arms.Arm(name='no mismatch', method=MethodWords(anchor='recomputed'))
# Gains below this are not called learning.
LEAST = 0.1
ACCURACIES = ('sampled', 'greedy')
RESULTS = pathlib.Path(__file__).parent / 'results' / 'learning_curves'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningCurves:
  """Every task without mismatch: accuracy over RL steps, start, end and cost of a run.

  Ends with a table, a figure of one panel a task and a verdict.
  """

  # Experiment directory: a folder a task, summary.json, figure.png, table.md.
  directory: pathlib.Path = pathlib.Path('runs/learning_curves')
  # Continue where it was interrupted; finished runs are only read.
  resume: bool = False
  # Independent repetitions: warm start, data order and sampling.
  seeds: int = 2
  # Worker processes; None = one per core on a CPU, one in all on an accelerator.
  workers: int | None = None
  # Copy summary, table and figure to experiments/results/learning_curves.
  publish: bool = False
  config: Annotated[training.Config, tyro.conf.arg(name='')] = training.Config(
    steps=80, seed=100, eval_every=10, save_every=100
  )

  def __post_init__(self):
    if self.config.task != training.Config().task:
      raise InputError(
        f'task={self.config.task} has no effect: every task runs. For one alone use'
        ' python -m experiments.train_policy --task.'
      )


def config_of(name: str, config: training.Config) -> training.Config:
  """The configuration of a task."""
  return dataclasses.replace(config, task=f'trm_jax.tasks.{name}', **TASKS[name])


def _used() -> float:
  """CPU seconds of this process and of the workers it has waited for."""
  return sum(os.times()[:4])


@contextlib.contextmanager
def counted(path: pathlib.Path):
  """Adds the CPU seconds of what it encloses to {'seconds': s} in a file, also when interrupted."""
  before = _used()
  try:
    yield
  finally:
    spent = json.loads(path.read_text())['seconds'] if path.exists() else 0
    report.write_json(path, {'seconds': spent + _used() - before})


def run(args: LearningCurves) -> tuple[dict[str, report.Metrics], dict[str, float]]:
  """(metrics, CPU seconds) of every task, in turn."""
  found, seconds = {}, {}
  for name in TASKS:
    path = args.directory / f'{name}_cpu.json'
    with counted(path):
      found[name] = arms.run_all(
        config_of(name, args.config),
        (ARM,),
        seeds=args.seeds,
        directory=args.directory / name,
        workers=args.workers,
      )
    seconds[name] = json.loads(path.read_text())['seconds']
  return found, seconds


def _before_last_third(rows) -> float:
  """Sampled accuracy when the last third of the steps began."""
  begin = rows[-1]['step'] * 2 / 3
  return report.last([row for row in rows if row['step'] <= begin], 'accuracy/sampled')


def summarise(
  found: dict[str, report.Metrics], seconds: dict[str, float], config: training.Config
) -> dict:
  """All numbers of the table, the figure and the verdict."""
  tables, p = {}, []
  for name, metrics in found.items():
    runs = [metrics[key] for key in sorted(metrics)]
    ends = {a: [report.last(rows, f'accuracy/{a}') for rows in runs] for a in ACCURACIES}
    starts = {a: [rows[0][f'accuracy/{a}'] for rows in runs] for a in ACCURACIES}
    gains = [y - x for x, y in zip(starts['sampled'], ends['sampled'], strict=True)]
    p.append(grid.paired_p(gains))
    late = [end - _before_last_third(rows) for end, rows in zip(ends['sampled'], runs, strict=True)]
    tables[name] = {
      'tokens': tasks.load(f'trm_jax.tasks.{name}').response_length,
      'changes': {k: str(v) for k, v in TASKS[name].items()},
      'start': {a: report.mean_error(starts[a]) for a in ACCURACIES},
      'end': {a: report.mean_error(ends[a]) for a in ACCURACIES},
      'by_seed': ends['sampled'],
      'gain': report.mean_error(gains),
      'gain_of_last_third': report.mean_error(late),
      'core_minutes': seconds[name] / 60 / len(runs),
      'curves': {a: report.curve(metrics, ARM.name, f'accuracy/{a}') for a in ACCURACIES},
    }
  for table, x, corrected in zip(tables.values(), p, grid.holm(p), strict=True):
    table['gain'] |= {'p': x, 'p_holm': corrected}
  seeds = sorted({seed for metrics in found.values() for _, seed in metrics})
  line = f'python -m experiments.learning_curves --seeds {len(seeds)} --steps {config.steps}'
  return {
    'command': f'{line} --publish',
    'config': dataclasses.asdict(config),
    'seeds': seeds,
    'steps': config.steps,
    'tasks': tables,
  }


def show_table(summary: dict) -> str:
  """Start, end and cost of every task."""
  rows = []
  for name, found in summary['tasks'].items():
    pairs = [report.shown(found[end][a]) for a in ACCURACIES for end in ('start', 'end')]
    gain = found['gain']
    rows.append(
      [
        name,
        f'{found["tokens"]}',
        *pairs,
        report.shown(gain, sign=True),
        grid.shown_p(gain['p_holm']),
        f'{found["core_minutes"]:.1f}',
      ]
    )
  accuracy = [f'{a}, {end}' for a in ACCURACIES for end in ('start', 'end')]
  p = f'p, Holm over {len(rows)}'
  header = ['task', 'T', *accuracy, 'gain, sampled', p, 'core-minutes a run']
  return report.table(header, rows)


def learned(found: dict) -> bool:
  """Whether a task was learned: a gain of LEAST or more, separated from 0."""
  return grid.above(found['gain']) and found['gain']['mean'] >= LEAST


def verdict(summary: dict) -> str:
  """What the numbers say."""
  found = summary['tasks']
  end = lambda name, a: found[name]['end'][a]['mean']
  rising = [
    f'{name} {report.shown(x["gain_of_last_third"], sign=True)}'
    for name, x in found.items()
    if x['gain_of_last_third']['mean'] > 2 * (x['gain_of_last_third']['se'] or 0)
  ]
  wide = [n for n in found if end(n, 'greedy') - end(n, 'sampled') > 0.3]
  missed = [f'{n} ({grid.quoted(found[n]["gain"])})' for n in found if not learned(found[n])]
  listed = lambda parts: ', '.join(parts) or 'none'
  lines = [
    grid.claims({f'{name} is learned': learned(x) for name, x in found.items()}),
    f'{len(summary["seeds"])} seeds, {summary["steps"]} steps; sampled accuracy ends at '
    + listed(f'{n} {end(n, "sampled"):.2f}' for n in found),
    f'Not learned here, of gain: {listed(missed)}',
    f'Still rising over the last third of the steps, so not the last word: {listed(rising)}',
    f'Right when greedy, still unfocused when sampled (a gap above .3): {listed(wide)}',
    'The warm start shows the right way in 40 % of its rows: RL here learns to prefer, not to find',
  ]
  return '\n'.join(f'- {line}.' for line in lines)


def draw_figure(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """One panel a task: sampled and greedy accuracy over RL steps, with standard errors."""
  tables = summary['tasks']
  figure, axes = plt.subplots(
    1, len(tables), figsize=(3.6 * len(tables), 3.6), squeeze=False, sharey=True
  )
  for axis, (name, found) in zip(axes[0], tables.items(), strict=True):
    for accuracy, colour in zip(ACCURACIES, (4, 0), strict=True):
      figures.band(axis, found['curves'][accuracy], figures.COLOURS[colour], accuracy)
    axis.set(title=f'{name}, up to {found["tokens"]} tokens', xlabel='RL step', ylim=(0, 1.02))
    axis.grid(alpha=0.2)
  axes[0, 0].set_ylabel('accuracy, held-out prompts')
  axes[0, 0].legend(fontsize=8, loc='lower right')
  return figures.save(figure, path)


def main(args: LearningCurves) -> None:
  """Runs what is missing, then reports."""
  command.check_directory(args)
  summary = summarise(*run(args), args.config)
  to = RESULTS if args.publish else None
  parts = [show_table(summary), verdict(summary)]
  report.write(args.directory, summary, parts, draw_figure, publish_to=to)


if __name__ == '__main__':
  command.run(LearningCurves, main)
