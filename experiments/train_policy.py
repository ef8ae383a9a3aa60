"""One training run: every knob on the command line.

    python -m experiments.train_policy --directory runs/first
    python -m experiments.train_policy --directory runs/trm --method.max-kl 0.2 \\
        --fleet.broken.staleness.stuck --fleet.broken-samples 4
    python -m experiments.train_policy --directory runs/trm ... --resume
    python -m experiments.train_policy --directory /shared/trm ... --distributed   # on every host

Writes a figure into the directory, and into its folders warm_start and rl config.json,
metrics.jsonl, TensorBoard events and checkpoints.
Your own task: --task my_package.my_task, a module that defines TASK (see trm_jax/tasks/task.py).
"""

import dataclasses
import math
import pathlib
import sys
from typing import Annotated

import jax
import tyro

from experiments.reports import figures, report
from trm_jax import checkpoints, policy, tasks, training
from trm_jax.checkpoints import config_json
from trm_jax.mesh import sharding
from trm_jax.rollouts import stores
from trm_jax.runs import processes
from trm_jax.training import command, loop, timing
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPolicy:
  """One run of reinforcement learning under simulated rollout/trainer mismatch.

  The default is the healthy baseline on sorting: no mismatch, no mask. Common choices:

  PPO-clip: --method.surrogate clip. TIS: --method.anchor recomputed --method.weight tis.
  TRM-Max: --method.max-kl 0.2. A stuck replica for half of the samples:
  --fleet.broken.staleness.stuck --fleet.broken-samples 4. Low-precision rollouts:
  --fleet.engine.precision.weights float8_e5m2. Stale ones: --fleet.engine.staleness.steps 8.
  Long responses, large vocabularies: --store hidden (as exact) or --store topk (certified bounds).
  """

  # Run directory; made if it does not exist. Several hosts need one that all of them see.
  directory: pathlib.Path
  # Continue the run in the directory from its last checkpoint.
  resume: bool = False
  # Start from published weights: the folder of a checkpoint (trm_jax.checkpoints), which brings the
  # architecture of the policy (not how it is computed: --policy.dtype, --policy.remat,
  # --policy.expert-compute); there is no warm start then.
  weights: pathlib.Path | None = None
  # Trace the steps START:STOP into DIRECTORY/rl/profile, for xprof or TensorBoard, e.g. 3:5.
  profile: str | None = None
  # Measure rollout, statistics and update by themselves, before the first step.
  time_parts: bool = False
  # Folder that keeps compiled programs, so that the next start finds them there.
  compilation_cache: pathlib.Path | None = None
  config: Annotated[training.Config, tyro.conf.arg(name='')] = training.Config()
  hosts: Annotated[processes.Hosts, tyro.conf.arg(name='')] = processes.Hosts()


def _described(config: training.Config, folder: pathlib.Path) -> training.Config:
  """The configuration with a checkpoint's architecture and without a warm start."""
  how = {name: getattr(config.policy, name) for name in ('dtype', 'remat', 'expert_compute')}
  if config.policy != dataclasses.replace(policy.PolicyConfig(), **how):
    raise InputError(
      f'weights={folder} brings the architecture itself: leave out --policy.* other than dtype,'
      ' remat and expert-compute.'
    )
  found, size = config_json.read(folder / 'config.json')
  task = tasks.load(config.task)
  if size != task.vocab_size:
    raise InputError(
      f'weights={folder} has a vocabulary of {size}, task={config.task} one of {task.vocab_size};'
      ' use a task of its tokenizer (trm_jax/tasks/reasoning.py).'
    )
  served = config_json.positions(folder / 'config.json')
  length = task.prompt_length + (config.response_length or task.response_length)
  if served is not None and length > served:
    raise InputError(
      f'weights={folder} serve {served} positions (max_position_embeddings), but prompts of'
      f' {task.prompt_length} and responses of {length - task.prompt_length} tokens need {length}:'
      ' lower response_length, or take weights of a longer context.'
    )
  off = dataclasses.replace(config.warm_start, steps=0)
  return dataclasses.replace(config, policy=dataclasses.replace(found, **how), warm_start=off)


def main(args: TrainPolicy) -> None:
  """Warm start, RL, figure."""
  profile = timing.steps(args.profile) if args.profile is not None else None
  timing.check_steps(profile, args.config.steps)
  if args.compilation_cache is not None:
    command.cache(args.compilation_cache)
  about = dataclasses.asdict(dataclasses.replace(args, hosts=processes.Hosts()))
  processes.join(args.hosts, about, devices=math.prod(sharding.parse_mesh(args.config.mesh)))
  config = args.config if args.weights is None else _described(args.config, args.weights)
  program = training.build(config)
  slots = config.response_length or program.task.response_length
  stored = stores.describe(
    config.store,
    tokens=config.prompts * config.samples * slots,
    vocab=program.task.vocab_size,
    width=config.policy.width,
    top=config.top,
  )
  if jax.process_index() == 0:
    print(stored, file=sys.stderr)
  processes.in_turn(lambda: tasks.prepare(program.task, args.config.data_dir), 'prepared')
  directory = args.directory
  command.check_directory(args)
  if args.weights is None:
    params = loop.warm_start(program, directory / 'warm_start')
  else:
    with jax.set_mesh(program.mesh):
      params = checkpoints.load(args.weights)[1]
  metrics = loop.run(
    program,
    directory / 'rl',
    params,
    resume=args.resume,
    profile=profile,
    time_parts=args.time_parts,
  )
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
