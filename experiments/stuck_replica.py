"""Does Trust Region Masking survive a rollout replica that missed its weight syncs?

Half of the samples of each prompt come from an engine whose weights stay at RL step 0 for the
whole run, and which does not know it. Six arms share warm start, prompts and random streams.

Claim under test: masking whole sequences by exact KL reaches what training without mismatch
reaches, ignoring the mismatch does not, and *which* rows are dropped matters (random mask at the
same rate).
Falsified if: TRM is no better than the random mask, or ignoring the mismatch does no harm.
Honest caveat: sequence-separable mismatch is the mask's natural ground; see the printed verdict.

    make demo                                                # 3 seeds, 80 steps
    python -m experiments.stuck_replica --publish            # 5 seeds, 200 steps: the README
"""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from experiments.laboratory import arms
from experiments.reports import figures, report
from trm_jax import training
from trm_jax.mismatch import fleet, staleness
from trm_jax.training import command
from trm_jax.training.words import MethodWords

ARMS = (
  arms.Arm(name='no mismatch', method=MethodWords(anchor='recomputed'), strength=0.0),
  arms.Arm(name='mismatch ignored', method=MethodWords(anchor='recomputed')),
  arms.Arm(name='PPO-clip', method=MethodWords(surrogate='clip')),
  arms.Arm(name='TIS', method=MethodWords(anchor='recomputed', weight='tis')),
  arms.Arm(name='TRM-max', method=MethodWords(max_kl=0.2)),
  arms.Arm(name='random mask', method=MethodWords(max_kl=0.2, random_mask=True)),
)
TRM = 'TRM-max'
STUCK = fleet.Fleet(
  broken=fleet.Engine(staleness=staleness.Staleness(stuck=True)), broken_samples=4
)
RESULTS = pathlib.Path(__file__).parent / 'results' / 'stuck_replica'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StuckReplica:
  """Six arms on the sorting task while 4 of the 8 samples of each prompt come from a stuck replica.

  Arms: no mismatch; mismatch ignored (log-probs recomputed by the trainer); PPO-clip against the
  rollout's log-probs; TIS (ratio truncated at 2); TRM-max (limit 0.2 nats); random mask at TRM's
  rate. Ends with a table, paired differences, a figure and a verdict.
  """

  # Experiment directory: one run directory per seed and arm, summary.json, figure.png, table.md.
  directory: pathlib.Path = pathlib.Path('runs/stuck_replica')
  # Continue where it was interrupted; finished runs are only read.
  resume: bool = False
  # Independent repetitions: warm start, data order and sampling.
  seeds: int = 5
  # Worker processes; None = one per core on a CPU, one in all on an accelerator.
  workers: int | None = None
  # Copy summary, table and figure to experiments/results/stuck_replica.
  publish: bool = False
  config: Annotated[training.Config, tyro.conf.arg(name='')] = training.Config(
    steps=200, fleet=STUCK, eval_every=10, save_every=50
  )


def summarise(metrics: report.Metrics, config: training.Config) -> dict:
  """All numbers of the table, the figure and the verdict."""
  seeds = sorted({seed for _, seed in metrics})
  share = 1 - config.fleet.broken_samples / config.samples
  final = {
    arm.name: {s: report.last(metrics[arm.name, s], 'accuracy/sampled') for s in seeds}
    for arm in ARMS
  }
  tail = lambda name, key: [report.tail_mean(metrics[name, s], key) for s in seeds]
  found = {}
  for arm in ARMS:
    name = arm.name
    found[name] = {
      'strength': arm.strength,
      'accuracy_sampled': report.mean_error(final[name].values()),
      'accuracy_greedy': report.mean_error(
        [report.last(metrics[name, s], 'accuracy/greedy') for s in seeds]
      ),
      'by_seed': list(final[name].values()),
      'acceptance_last_third': report.mean_error(tail(name, 'acceptance')),
      'paired_trm_minus': report.paired(final, TRM, name),
      'curves': {
        key: report.curve(metrics, name, key)
        for key in ('accuracy/sampled', 'kl/engine1', 'acceptance')
      },
    }
  return {
    'command': (
      f'python -m experiments.stuck_replica --seeds {len(seeds)} --steps {config.steps} --publish'
    ),
    'config': dataclasses.asdict(config),
    'seeds': seeds,
    'steps': config.steps,
    'clean_share': share,
    'start_accuracy': report.mean_error([metrics[TRM, s][0]['accuracy/sampled'] for s in seeds]),
    'trm_acceptance_by_length': [
      report.known_mean_error(tail(TRM, f'acceptance/length_q{i}')) for i in range(1, 5)
    ],
    'arms': found,
  }


def show_table(summary: dict) -> str:
  """The result as a markdown table."""
  rows = []
  for name, arm in summary['arms'].items():
    gap = '' if name == TRM else report.shown(arm['paired_trm_minus'], sign=True)
    rows.append(
      [
        name,
        report.shown(arm['accuracy_sampled']),
        report.shown(arm['accuracy_greedy']),
        f'{arm["acceptance_last_third"]["mean"]:.3f}',
        gap,
      ]
    )
  header = ['arm', 'accuracy, sampled', 'greedy', 'kept (last third)', 'TRM-max minus arm, paired']
  return report.table(header, rows)


def verdict(summary: dict) -> str:
  """What the numbers say, and what they do not."""
  found, start = summary['arms'], summary['start_accuracy']['mean']
  score = lambda name: found[name]['accuracy_sampled']['mean']
  gain = score('no mismatch') - start
  collapsed = lambda name: score(name) - start < gain / 2
  gap = lambda name: found[name]['paired_trm_minus']

  def separated(name):
    return abs(gap(name)['mean']) > 2 * gap(name)['se']

  lines = [
    f'{len(summary["seeds"])} seeds, {summary["steps"]} steps; start {start:.3f}, without mismatch'
    f' {score("no mismatch"):.3f}.',
    f'Ignoring the mismatch ends at {score("mismatch ignored"):.3f}'
    f' ({"collapsed" if collapsed("mismatch ignored") else "did not collapse"}); TRM-max at'
    f' {score(TRM):.3f}, {report.shown(gap("no mismatch"), sign=True)} against no mismatch, keeping'
    f' {found[TRM]["acceptance_last_third"]["mean"]:.3f} of the rows (healthy share'
    f' {summary["clean_share"]}).',
    f'Which rows are dropped matters: TRM-max minus random mask at its rate is'
    f' {report.shown(gap("random mask"), sign=True)}.',
  ]
  others = [n for n in found if n not in (TRM, 'no mismatch', 'mismatch ignored')]
  alive = [n for n in others if not collapsed(n)]
  if alive:
    lines.append(
      'Baselines that did not collapse: '
      + '; '.join(
        f'{n} {score(n):.3f} (TRM-max {report.shown(gap(n), sign=True)},'
        f' {"separated" if separated(n) else "not separated"} at 2 s.e.)'
        for n in alive
      )
      + '.'
    )
  dead = [n for n in others if collapsed(n)]
  if dead:
    lines.append('Collapsed (less than half of the clean gain): ' + ', '.join(dead) + '.')
  lines.append(
    'This setting suits TRM by construction: the mismatch sits in whole sequences of one engine, so'
    ' dropping sequences loses nothing that was right. It says nothing about noise spread evenly'
    ' over all tokens, nor about rollouts that are reused.'
  )
  return '\n'.join(lines)


def main(args: StuckReplica) -> None:
  """Runs what is missing, then reports."""
  command.check_directory(args)
  metrics = arms.run_all(
    args.config, ARMS, seeds=args.seeds, directory=args.directory, workers=args.workers
  )
  summary = summarise(metrics, args.config)
  to = RESULTS if args.publish else None
  parts = [show_table(summary), verdict(summary)]
  report.write(args.directory, summary, parts, figures.stuck_replica, publish_to=to)


if __name__ == '__main__':
  command.run(StuckReplica, main)
