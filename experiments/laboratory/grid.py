"""Settings x arms x seeds: several mismatches, several methods under each.

Prompts, warm starts and random streams of a seed are the same in all of them. An effect is a
difference of two arms, of one setting or of two, paired by seed. Which effects are tested is said
before anything runs; p values are those of Student's paired test, and Holm's correction covers all
effects of an experiment at once.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import scipy.stats

from experiments.laboratory import arms
from experiments.reports import figures, report
from trm_jax import training
from trm_jax.training import command

# An effect is called separated below this corrected p.
LEVEL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How a grid is run; each experiment adds its directory and configuration."""

  # Continue where it was interrupted; finished runs are only read.
  resume: bool = False
  # Independent repetitions: warm start, data order and sampling.
  seeds: int = 2
  # Worker processes; None = one per core on a CPU, one in all on an accelerator.
  workers: int | None = None
  # Copy summary, table and figure to the folder experiments/results.
  publish: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One mismatch, or one way to train: what it changes of the configuration, and its arms."""

  name: str
  arms: tuple[arms.Arm, ...]
  changes: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Effect:
  """The difference arm - other in `setting`; `other` may be an arm of another setting."""

  setting: str
  arm: str
  other: str
  other_setting: str | None = None

  @property
  def second(self) -> str:
    """The setting of `other`."""
    return self.other_setting or self.setting


def run(
  config: training.Config,
  settings: Sequence[Setting],
  *,
  seeds: int,
  directory: pathlib.Path,
  workers: int | None = None,
) -> dict[str, report.Metrics]:
  """Metrics of every setting, in turn; all share the warm starts in directory/warm_start."""
  return {
    setting.name: arms.run_all(
      dataclasses.replace(config, **setting.changes),
      setting.arms,
      seeds=seeds,
      directory=directory / setting.name.replace(' ', '_'),
      workers=workers,
      warm_starts=directory / 'warm_start',
    )
    for setting in settings
  }


# Numbers.


def paired_p(differences: Sequence[float]) -> float:
  """Two-sided p of Student's paired test on differences; NaN for fewer than two."""
  if len(differences) < 2:
    return math.nan
  if len(set(differences)) == 1:
    return 1.0 if differences[0] == 0 else 0.0
  return float(scipy.stats.ttest_1samp(differences, 0).pvalue)


def holm(p: Sequence[float]) -> list[float]:
  """Holm's step-down: p values corrected so that the chance of any false one is the level.

  The k-th smallest of m becomes the largest of (m - j + 1) p_(j), j <= k, and at most 1. Valid for
  any dependence. NaN stays NaN and counts among the m.
  """
  out, largest = [math.nan] * len(p), 0.0
  order = sorted((x, i) for i, x in enumerate(p) if not math.isnan(x))
  for rank, (x, i) in enumerate(order):
    largest = max(largest, min(1.0, (len(p) - rank) * x))
    out[i] = largest
  return out


def summarise(
  found: dict[str, report.Metrics], settings: Sequence[Setting], effects: Sequence[Effect]
) -> dict:
  """Accuracies, acceptance and all effects with their p; arms as lists over sorted seeds."""
  seeds = sorted({seed for metrics in found.values() for _, seed in metrics})
  final, tables = {}, {}
  for setting in settings:
    metrics, table = found[setting.name], {}
    for arm in setting.arms:
      runs = [metrics[arm.name, s] for s in seeds]
      last = lambda key, runs=runs: [report.last(rows, key) for rows in runs]
      tail = lambda key, runs=runs: report.known_mean_error(
        [report.tail_mean(r, key) for r in runs]
      )
      final[setting.name, arm.name] = last('accuracy/sampled')
      table[arm.name] = {
        'accuracy_sampled': report.mean_error(last('accuracy/sampled')),
        'accuracy_greedy': report.mean_error(last('accuracy/greedy')),
        'by_seed': last('accuracy/sampled'),
        'kept': tail('acceptance'),
        'kept_by_length': [tail(f'acceptance/length_q{i}') for i in range(1, 5)],
        'kl_p90': tail('kl/p90'),
        'curve': report.curve(metrics, arm.name, 'accuracy/sampled'),
        'kept_curve': report.curve(metrics, arm.name, 'acceptance'),
      }
    tables[setting.name] = table
  first = settings[0]
  start = [found[first.name][first.arms[0].name, s][0]['accuracy/sampled'] for s in seeds]
  differences = [
    [x - y for x, y in zip(final[e.setting, e.arm], final[e.second, e.other], strict=True)]
    for e in effects
  ]
  p = [paired_p(d) for d in differences]
  return {
    'seeds': seeds,
    'start_accuracy': report.mean_error(start),
    'settings': tables,
    'effects': [
      dataclasses.asdict(e) | report.mean_error(d) | {'p': x, 'p_holm': corrected}
      for e, d, x, corrected in zip(effects, differences, p, holm(p), strict=True)
    ],
  }


def score(summary: dict, setting: str, arm: str) -> float:
  """Mean final accuracy of an arm."""
  return summary['settings'][setting][arm]['accuracy_sampled']['mean']


def effect(summary: dict, setting: str, arm: str, other: str) -> dict:
  """The tested effect arm - other of a setting."""
  return next(
    e for e in summary['effects'] if (e['setting'], e['arm'], e['other']) == (setting, arm, other)
  )


def separated(found: dict) -> bool:
  """Whether an effect differs from 0 after the correction."""
  return found['p_holm'] is not None and found['p_holm'] < LEVEL


def above(found: dict) -> bool:
  """Whether arm is better than other after the correction."""
  return separated(found) and found['mean'] > 0


def below(found: dict) -> bool:
  """Whether arm is worse than other after the correction."""
  return separated(found) and found['mean'] < 0


def quoted(found: dict) -> str:
  """'+0.100 ± 0.020 (p 0.003)'."""
  return f'{report.shown(found, sign=True)} (p {shown_p(found["p_holm"])})'


def claims(stated: dict[str, bool]) -> str:
  """'Claim: x: yes; y: NO'."""
  return 'Claim: ' + '; '.join(f'{x}: {"yes" if held else "NO"}' for x, held in stated.items())


# Tables and figure.


def shown_p(p: float | None) -> str:
  """Two digits; '< 0.001'; a dash where there are too few seeds."""
  if p is None or math.isnan(p):
    return '-'
  return '< 0.001' if p < 0.001 else f'{p:.2g}'


def shown_share(x: dict[str, float]) -> str:
  """Mean of a share, three digits; a dash where no row could be counted."""
  return '-' if x['mean'] is None or math.isnan(x['mean']) else f'{x["mean"]:.3f}'


def table_of_arms(summary: dict) -> str:
  """Accuracy and acceptance of every arm of every setting."""
  rows = []
  for setting, table in summary['settings'].items():
    for name, arm in table.items():
      kept = [arm['kept'], arm['kept_by_length'][0], arm['kept_by_length'][3]]
      rows.append(
        [
          setting,
          name,
          report.shown(arm['accuracy_sampled']),
          report.shown(arm['accuracy_greedy']),
          *map(shown_share, kept),
        ]
      )
  header = ['setting', 'arm', 'accuracy, sampled', 'greedy', 'kept (last third)']
  return report.table([*header, '... shortest quarter', '... longest'], rows)


def table_of_effects(summary: dict) -> str:
  """Every tested effect, paired by seed, and its p before and after Holm's correction."""
  rows = []
  for e in summary['effects']:
    other = e['other']
    if e['other_setting']:
      other += f' ({e["other_setting"]})' if other != e['other_setting'] else ''
    rows.append(
      [
        e['setting'],
        f'{e["arm"]} minus {other}',
        report.shown(e, sign=True),
        shown_p(e['p']),
        shown_p(e['p_holm']),
      ]
    )
  header = ['setting', 'effect on accuracy, sampled', 'paired', 'p']
  return report.table([*header, f'p, Holm over {len(rows)}'], rows)


def draw(summary: dict, path: pathlib.Path, *, control: str, looks) -> pathlib.Path:
  """A column for each setting: final accuracy of every seed, curves, share kept.

  `looks` gives colour index and line style of an arm's name; the first arm of setting `control`
  is the grey band of every column.
  """
  tables = {k: v for k, v in summary['settings'].items() if k != control}
  # Settings may bring a control of their own.
  healthy = summary['settings'].get(control)
  figure, axes = plt.subplots(
    3, len(tables), figsize=(4.6 * len(tables), 10), squeeze=False, sharex='row'
  )
  for column, (setting, table) in enumerate(tables.items()):
    top, middle, low = axes[:, column]
    for place, (name, arm) in enumerate(table.items()):
      colour, line = looks(name)
      style = dict(color=figures.COLOURS[colour])
      seen, mean = arm['by_seed'], arm['accuracy_sampled']
      top.plot(seen, np.full(len(seen), -place), 'o', markersize=3, alpha=0.35, **style)
      error = mean['se'] or 0
      top.errorbar(
        mean['mean'], -place, xerr=0 if error != error else error, marker='D', capsize=3, **style
      )
      curve = arm['curve']
      middle.plot(curve['step'], curve['mean'], line, label=name, **style)
      curve = arm['kept_curve']
      low.plot(curve['step'], curve['mean'], line, label=name, linewidth=1, **style)
    if healthy:
      name, arm = next(iter(healthy.items()))
      mean, error = arm['accuracy_sampled']['mean'], arm['accuracy_sampled']['se'] or 0
      error = 0 if error != error else error
      top.axvspan(mean - error, mean + error, color='black', alpha=0.15)
      middle.plot(arm['curve']['step'], arm['curve']['mean'], color='black', label=name)
    top.axvline(summary['start_accuracy']['mean'], color='black', linestyle=':', linewidth=1)
    top.set_yticks([-i for i in range(len(table))], list(table), fontsize=8)
    top.set(title=setting, xlabel='final accuracy, sampled (dotted: start)', xlim=(0, 1))
    middle.set(xlabel='RL step', ylabel='accuracy, sampled', ylim=(0, 1))
    low.set(xlabel='RL step', ylabel='share of rows kept', ylim=(-0.03, 1.03))
    middle.legend(fontsize=6, loc='upper left')
    for axis in (top, middle, low):
      axis.grid(alpha=0.2)
  return figures.save(figure, path)


def main(
  args: Options,
  settings: Sequence[Setting],
  summarise: Callable[[dict[str, report.Metrics], training.Config], dict],
  verdict: Callable[[dict], str],
  draw: Callable[[dict, pathlib.Path], pathlib.Path],
  *,
  results: pathlib.Path,
) -> None:
  """Runs what is missing, then writes, prints and draws; `results` is where it is published."""
  command.check_directory(args)
  found = run(
    args.config, settings, seeds=args.seeds, directory=args.directory, workers=args.workers
  )
  summary = summarise(found, args.config)
  parts = [table_of_arms(summary), table_of_effects(summary), verdict(summary)]
  to = results if args.publish else None
  report.write(args.directory, summary, parts, draw, publish_to=to)
