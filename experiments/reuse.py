"""How often may a rollout be reused: does the trust region need a clip inside it?

1, 4 and 8 optimizer steps on each rollout (1 x 1, 2 x 2, 2 x 4 epochs x minibatches), whose engine
computes in float8_e4m3fn. TRM's mask drops rows whose largest KL exceeds a limit, judged afresh at
every step, but nothing inside the region limits the step. PPO's clip does, token by token.

Claims under test: with 8 updates TRM alone ends below the clip, and TRM on top of the clip or of
decoupled does not end below it without the mask; with one update TRM alone does no harm either.
Falsified by: TRM alone as good as the clip at 8 updates, or a mask that costs on top of the clip or
of decoupled after Holm's correction over all effects. "No harm" is only ever not refuted: see the
standard errors.
Chosen before any result: the limit, .3 nats, keeps 90 % of the rows of one update under this
engine's noise alone (one run of another seed, looked at for acceptance only); one learning rate;
no arm was tuned. The control reuses rollouts of a healthy engine, with the clip. Seeds: 100 and up.

    python -m experiments.reuse                                              # a look: 2 seeds
    python -m experiments.reuse --seeds 5 --steps 80 --publish
"""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from experiments.laboratory import grid
from experiments.laboratory.arms import Arm
from experiments.reports import report
from trm_jax import training
from trm_jax.mismatch import fleet, precision
from trm_jax.training import command
from trm_jax.training.words import MethodWords

LIMIT = 0.3
CONTROL, CLIP, TRM, BOTH = 'no mismatch', 'clip', 'TRM', 'clip + TRM'
DECOUPLED, DECOUPLED_TRM = 'decoupled', 'decoupled + TRM'
SPLIT = dict(surrogate='decoupled', anchor='version')
ARMS = (
  Arm(name=CONTROL, method=MethodWords(surrogate='clip', anchor='recomputed'), strength=0.0),
  Arm(name=CLIP, method=MethodWords(surrogate='clip')),
  Arm(name=TRM, method=MethodWords(max_kl=LIMIT)),
  Arm(name=BOTH, method=MethodWords(surrogate='clip', max_kl=LIMIT)),
  Arm(name=DECOUPLED, method=MethodWords(**SPLIT)),
  Arm(name=DECOUPLED_TRM, method=MethodWords(**SPLIT, max_kl=LIMIT)),
)
# Updates a rollout: (epochs, minibatches).
UPDATES = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
NAMES = {count: f'{count} update{"s" * (count > 1)}' for count in UPDATES}
ONCE, MOST = NAMES[1], NAMES[8]
E4M3 = 'float8_e4m3fn'
ENGINE = fleet.Engine(precision=precision.Precision(weights=E4M3, activations=E4M3, kv=E4M3))
SETTINGS = tuple(
  grid.Setting(name=NAMES[count], changes=dict(epochs=epochs, minibatches=minibatches), arms=ARMS)
  for count, (epochs, minibatches) in UPDATES.items()
)
EFFECTS = tuple(
  grid.Effect(name, *pair)
  for name in NAMES.values()
  for pair in ((TRM, CLIP), (BOTH, CLIP), (DECOUPLED_TRM, DECOUPLED), (DECOUPLED, CLIP))
)
RESULTS = pathlib.Path(__file__).parent / 'results' / 'reuse'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse(grid.Options):
  """Clip, TRM-max, decoupled, and TRM-max on top of the two, at 1, 4 and 8 updates a rollout.

  Ends with tables, effects paired by seed and corrected for their number, a figure, a verdict.
  """

  # Experiment directory: warm starts, a run directory per setting, seed and arm, summary.json,
  # figure.png, table.md.
  directory: pathlib.Path = pathlib.Path('runs/reuse')
  config: Annotated[training.Config, tyro.conf.arg(name='')] = training.Config(
    steps=20, seed=100, save_every=100, fleet=fleet.Fleet(engine=ENGINE)
  )


def summarise(found: dict[str, report.Metrics], config: training.Config) -> dict:
  """All numbers of the tables, the figure and the verdict."""
  summary = grid.summarise(found, SETTINGS, EFFECTS)
  seeds = len(summary['seeds'])
  line = f'python -m experiments.reuse --seeds {seeds} --steps {config.steps} --publish'
  about = {'command': line, 'config': dataclasses.asdict(config), 'steps': config.steps}
  return about | {'limit': LIMIT} | summary


def verdict(summary: dict) -> str:
  """What the numbers say, and what they do not."""
  of = lambda *names: grid.effect(summary, *names)
  score = lambda *names: grid.score(summary, *names)
  composed = {
    f'{name}, on {below}': of(name, above, below)
    for name in NAMES.values()
    for above, below in ((BOTH, CLIP), (DECOUPLED_TRM, DECOUPLED))
  }
  stated = {
    f'{MOST}: TRM alone ends below the clip': grid.below(of(MOST, TRM, CLIP)),
    f'{ONCE}: it does not': not grid.below(of(ONCE, TRM, CLIP)),
    'on top of the clip or of decoupled the mask costs nothing seen': not any(
      map(grid.below, composed.values())
    ),
  }
  lines = [
    grid.claims(stated),
    f'{len(summary["seeds"])} seeds, {summary["steps"]} rollouts; start'
    f' {summary["start_accuracy"]["mean"]:.3f}; p corrected over {len(summary["effects"])} effects',
  ]
  for name in NAMES.values():
    table = summary['settings'][name]
    lines.append(
      f'{name}: '
      + ', '.join(f'{arm} {score(name, arm):.3f}' for arm in table)
      + f'; TRM alone minus clip {grid.quoted(of(name, TRM, CLIP))}, keeping'
      f' {table[TRM]["kept"]["mean"]:.2f} of the rows'
    )
  gains = {name: score(MOST, name) - score(ONCE, name) for name in summary['settings'][MOST]}
  lines += [
    f'Reuse itself ({MOST} minus {ONCE}, not tested): '
    + ', '.join(f'{name} {gain:+.3f}' for name, gain in gains.items()),
    'The mask on top of another surrogate: '
    + ', '.join(f'{name} {grid.quoted(e)}' for name, e in composed.items())
    + '; it helps, after the correction, in: '
    + (', '.join(n for n, e in composed.items() if grid.above(e)) or 'none')
    + '; it costs in: '
    + (', '.join(n for n, e in composed.items() if grid.below(e)) or 'none'),
    'More updates also mean more optimizer steps at the same rate: what is compared are arms at one'
    ' number of updates',
  ]
  return '\n'.join(f'- {line}.' for line in lines)


def looks(name: str) -> tuple[int, str]:
  """Colour of the surrogate, line of the mask."""
  return {
    CONTROL: (0, '-'),
    CLIP: (1, '-'),
    TRM: (3, '--'),
    BOTH: (1, '--'),
    DECOUPLED: (4, '-'),
    DECOUPLED_TRM: (4, '--'),
  }[name]


def draw_figure(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """A column for each number of updates."""
  return grid.draw(summary, path, control=CONTROL, looks=looks)


def main(args: Reuse) -> None:
  """Runs what is missing, then reports."""
  grid.main(args, SETTINGS, summarise, verdict, draw_figure, results=RESULTS)


if __name__ == '__main__':
  command.run(Reuse, main)
