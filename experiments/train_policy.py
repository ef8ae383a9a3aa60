"""One training run: every knob on the command line.

    python -m experiments.train_policy --directory runs/first
    python -m experiments.train_policy --directory runs/trm --method.max-kl 0.2 \\
        --fleet.broken.staleness.stuck --fleet.broken-samples 4
    python -m experiments.train_policy --directory runs/trm ... --resume
    python -m experiments.train_policy --directory /shared/trm ... --distributed   # on every host

Writes config.json, metrics.jsonl, tensorboard events, checkpoints and a figure into the directory.
Your own task: --task my_package.my_task, a module that defines TASK (see trm_jax/tasks/task.py).
"""

import dataclasses
import math
import pathlib
from typing import Annotated

import jax
import tyro

from experiments import command, figures, report
from trm_jax import loop, processes, sharding, tasks, train


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPolicy:
  """One run of reinforcement learning under simulated rollout/trainer mismatch.

  The default is the healthy baseline on sorting: no mismatch, no mask. Common choices:

  PPO-clip: --method.surrogate clip. TIS: --method.anchor recomputed --method.weight tis.
  TRM-Max: --method.max-kl 0.2. A stuck replica for half of the samples:
  --fleet.broken.staleness.stuck --fleet.broken-samples 4. Low-precision rollouts:
  --fleet.engine.precision.weights float8_e5m2. Stale ones: --fleet.engine.staleness.steps 8.
  """

  # Run directory; made if it does not exist. Several hosts need one that all of them see.
  directory: pathlib.Path
  # Continue the run in the directory from its last checkpoint.
  resume: bool = False
  config: Annotated[train.Config, tyro.conf.arg(name='')] = train.Config()
  hosts: Annotated[processes.Hosts, tyro.conf.arg(name='')] = processes.Hosts()


def main(args: TrainPolicy) -> None:
  """Warm start, RL, figure."""
  about = dataclasses.asdict(dataclasses.replace(args, hosts=processes.Hosts()))
  processes.join(args.hosts, about, devices=math.prod(sharding.parse_mesh(args.config.mesh)))
  program = train.build(args.config)
  processes.in_turn(lambda: tasks.prepare(program.task, args.config.data_dir), 'prepared')
  directory = args.directory
  command.check_directory(directory, resume=args.resume)
  params = loop.warm_start(program, directory / 'warm_start')
  metrics = loop.run(program, directory / 'rl', params, resume=args.resume)
  if jax.process_index() != 0:
    return
  figure = figures.run(metrics, directory / 'figure.png', title=str(directory))
  sampled, greedy = (report.last(metrics, f'accuracy/{n}') for n in ('sampled', 'greedy'))
  print(
    f'{metrics[-1]["step"]} steps: accuracy {sampled:.3f} sampled, {greedy:.3f} greedy'
    f' (start {metrics[0]["accuracy/sampled"]:.3f}, {metrics[0]["accuracy/greedy"]:.3f});'
    f' figure {figure}'
  )


if __name__ == '__main__':
  command.run(TrainPolicy, main)
