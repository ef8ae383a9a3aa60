"""What the sweeps share: a policy in training, what its rollouts say, one file for each cell.

A sweep is a dial, its settings and some seeds. Each (seed, setting) is a cell: measured by one
compiled program in which the dial is traced, written whole or not at all, read on resuming.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import P

from experiments.reports import report
from trm_jax import policy, tasks, training
from trm_jax.divergences import linear_head
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.mismatch import fleet
from trm_jax.policy import attention
from trm_jax.rollouts import sampling, scoring
from trm_jax.rollouts.sampling import Request
from trm_jax.runs import processes, recording
from trm_jax.training import command, loop, update
from trm_jax.types import Divergences, InputError, Rollout

RESULTS = pathlib.Path(__file__).parent / 'results'
# What may differ when a sweep is continued.
_FREE = ('directory', 'resume', 'publish', 'seeds', 'hosts')
# `steps` are RL steps on a healthy engine after the warm start.
CONFIG = training.Config(
  steps=12,
  prompts=24,
  samples=4,
  policy=policy.PolicyConfig(experts_per_token=2, normalize_gates=True),
  optimizer=training.Optimizer(warmup=4),
  warm_start=training.WarmStart(steps=120, batch=64),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
  """Where a sweep is kept and how often it is repeated."""

  # Receives summary.json, table.md, figure.png; cells/ holds one file for each seed and setting.
  directory: pathlib.Path = pathlib.Path('runs/sweep')
  # Continue where it was interrupted; seeds may be added.
  resume: bool = False
  # Copy summary, table and figure to the folder of committed results.
  publish: bool = False
  # Independent repetitions.
  seeds: int = 5

  def __post_init__(self):
    if self.seeds < 2:
      raise InputError(f'seeds={self.seeds} gives no error bar: use at least 2.')

  def about(self) -> dict[str, Any]:
    """What a continued sweep must agree on."""
    return {k: v for k, v in dataclasses.asdict(self).items() if k not in _FREE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Cells):
  """A sweep whose policies were trained: warm start, then RL steps, for every seed anew."""

  config: Annotated[training.Config, tyro.conf.arg(name='')] = CONFIG
  hosts: Annotated[processes.Hosts, tyro.conf.arg(name='')] = processes.Hosts()

  def __post_init__(self):
    super().__post_init__()
    if self.config.fleet != fleet.Fleet():
      raise InputError(
        'fleet has no effect here, as the sweep itself says what the engine does: leave out'
        ' --fleet.*.'
      )

  def about(self) -> dict[str, Any]:
    """What a continued sweep must agree on."""
    found = super().about()
    free = ('mesh', 'data_dir', 'seed')
    return found | {'config': {k: v for k, v in found['config'].items() if k not in free}}

  @property
  def each_seed(self) -> range:
    """Seeds of the weights, the data and the rollouts."""
    return range(self.config.seed, self.config.seed + self.seeds)


# Cells.


def read(path: pathlib.Path) -> Any:
  """A finished cell, NaN and infinities restored."""
  special = {'inf': math.inf, '-inf': -math.inf, None: math.nan}

  def restore(x):
    if isinstance(x, dict):
      return {k: restore(v) for k, v in x.items()}
    if isinstance(x, list):
      return [restore(v) for v in x]
    return special.get(x, x)

  return restore(json.loads(path.read_text()))


def measure(
  args: Cells,
  names: Sequence[str],
  seeds: range,
  prepare: Callable[[int], Callable[[str], dict]],
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> dict[tuple[int, str], dict]:
  """{(seed, name): cell}: prepare(seed)(name) where there is no file yet.

  Progress with rate and time left. Raises InputError if the directory holds another sweep,
  `loop.Interrupted` on a signal, after which finished cells are kept.
  """
  within = contextlib.nullcontext if mesh is None else functools.partial(jax.set_mesh, mesh)
  with within():
    record = recording.open_run(args.directory / 'cells', args.about(), resume=True)
  paths = {(s, name): record.path / f'seed{s}_{name}.json' for s in seeds for name in names}
  done = {at for at, path in paths.items() if path.exists()}
  processes.sync('cells')  # nobody writes before everybody has looked
  label, count = f'{len(names)} cells x {len(seeds)} seeds', len(done)
  display = recording.Progress(len(paths), label, start=count)
  display = display if jax.process_index() == 0 else loop.Silent()
  with record, processes.stops() as look:
    for seed in seeds:
      missing = [name for name in names if (seed, name) not in done]
      if not missing:
        continue
      one = prepare(seed)
      for name in missing:
        record.write_json(paths[seed, name].name, one(name))
        with within():
          stop = look()
        count += 1
        display.update(count, seed=seed, cell=name)
        if stop and count < len(paths):
          raise loop.Interrupted(count, stop)
  display.close()
  processes.sync('measured')
  return {at: read(path) for at, path in paths.items()}


def main(
  args: Trained | Cells,
  measure: Callable[[Any], dict],
  summarise: Callable[[Any, dict], dict],
  parts: Sequence[Callable[[dict], str]],
  draw: Callable[[dict, pathlib.Path], pathlib.Path],
  *,
  name: str,
) -> None:
  """Measures what is missing, then writes, prints and draws; `name` is the folder of results."""
  if isinstance(args, Trained):
    about = dataclasses.asdict(dataclasses.replace(args, hosts=processes.Hosts()))
    devices = math.prod(sharding.parse_mesh(args.config.mesh))
    processes.join(args.hosts, about, devices=devices)
    sharding.simulate_devices(devices)  # before the look at the directory uses any
  command.check_directory(args)
  cells = measure(args)
  if jax.process_index() != 0:
    return
  summary = {'command': f'python -m experiments.{name} --publish', 'seeds': args.seeds}
  summary |= summarise(args, cells)
  to = RESULTS / name if args.publish else None
  report.write(args.directory, summary, [f(summary) for f in parts], draw, publish_to=to)


def over_seeds(cells: dict, name: str, of: Callable[[dict], float]) -> dict[str, float]:
  """Mean and standard error over seeds of a number of one setting's cells; infinite ones stay."""
  values = [of(cell) for (_, at), cell in sorted(cells.items()) if at == name]
  if not np.isfinite(values).all():
    return {'mean': float(np.mean(values)), 'se': math.nan}
  return report.mean_error(values)


def known(values: Sequence[float]) -> dict[str, float]:
  """Mean and standard error of the values that are finite; NaN where there are none."""
  values = [float(x) for x in values if math.isfinite(x)]
  return report.mean_error(values) if values else {'mean': math.nan, 'se': math.nan}


def line(x: Sequence[float], y: Sequence[float]) -> float:
  """Slope of the least-squares line through the points that are finite; NaN with fewer than 2."""
  x, y = np.asarray(x, float), np.asarray(y, float)
  good = np.isfinite(x) & np.isfinite(y)
  return float(np.polyfit(x[good], y[good], 1)[0]) if good.sum() > 1 else math.nan


# A policy in training.


def build(args: Trained) -> training.Program:
  """The compiled parts of training, the task's data at hand."""
  program = training.build(args.config)
  processes.in_turn(lambda: tasks.prepare(program.task, args.config.data_dir), 'prepared')
  return program


def snapshots(
  program: training.Program, directory: pathlib.Path, params, ages: Sequence[int]
) -> list[policy.Params]:
  """Parameters `age` steps before the end of config.steps RL steps on a healthy engine, each age.

  Saved when done; computed again from the warm start if it was interrupted.
  """
  config = program.config
  with (
    jax.set_mesh(program.mesh),
    recording.open_run(
      directory, loop.settings(program, ages=list(ages)), resume=True, keep=1
    ) as record,
  ):
    found = record.restore(loop.abstract([params] * len(ages)))
    if found:
      return found[1]
    state = program.start(params, jax.random.fold_in(jax.random.key(config.seed), 2))
    data = loop.prompts(program, 'train', config.prompts, seed=config.seed + 1)
    arm = update.Arm(jnp.int32(0), jnp.float32(1))
    wanted, kept = {config.steps - age for age in ages}, {}
    for step in range(config.steps + 1):
      if step in wanted:
        kept[step] = jax.tree.map(jnp.copy, state.params)  # a step donates its state
      if step < config.steps:
        state, _, _ = program.step(state, arm, *loop.rows(next(data)))
    kept = [kept[config.steps - age] for age in ages]
    record.save(config.steps, kept, {})
    return kept


def trained(
  args: Trained, program: training.Program, seed: int, ages: Sequence[int] = (0,)
) -> tuple[list[policy.Params], tuple[jax.Array, jax.Array], jax.Array]:
  """(parameters of each age, held-out prompts, a key) of one seed."""
  program = dataclasses.replace(program, config=dataclasses.replace(args.config, seed=seed))
  folder = args.directory / f'seed{seed}'
  start = loop.warm_start(program, folder / 'warm_start')
  held = snapshots(program, folder / 'rl', start, ages)
  with jax.set_mesh(program.mesh):
    rows = loop.rows(next(loop.prompts(program, 'test', args.config.prompts, seed=seed)))
  return held, rows, jax.random.fold_in(jax.random.key(seed), 4)


# What its rollouts say; for use inside a compiled cell.


def request(program: training.Program) -> Request:
  """What the program's own rollouts draw."""
  config, task = program.config, program.task
  return Request(
    samples=config.samples,
    length=config.response_length or task.response_length,
    eos=task.eos,
    pad=task.pad,
    temperature=config.temperature,
  )


def roll_out(
  program: training.Program, weights, prompts, starts, key, *, hooks: policy.Hooks
) -> Rollout:
  """Rollout of one engine with these weights and hooks, at the sizes of the program."""
  config = program.config
  return sampling.generate(
    weights,
    config.policy,
    prompts,
    starts,
    key,
    request(program),
    hooks=hooks,
    attention=getattr(attention, config.attention),
  )


def compare(
  config: training.Config,
  params,
  rollout: Rollout,
  *,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
) -> tuple[Divergences, jax.Array, policy.Aux]:
  """(exact divergences, the policy's log-probs, its routes) of a trainer with these hooks.

  Rows over data and vocabulary over model inside, replicated results.
  """
  attend = getattr(attention, config.attention)
  hidden, aux = scoring.score(params, config.policy, rollout, attention=attend, hooks=hooks)
  head = sharding.reshard(policy.head(params), MODEL)

  def block(head, hidden, tokens, logits, *, axis_name=None):
    return linear_head.statistics(
      hidden,
      head,
      tokens,
      rollout_logits=logits,
      temperature=config.temperature,
      full=True,
      axis_name=axis_name,
    )

  operands = (head, hidden, rollout.tokens, rollout.logits)
  if sharding.active():
    specs = (P(MODEL, None), P(DATA), P(DATA), P(DATA, None, MODEL))
    operands = [jax.reshard(x, spec) for x, spec in zip(operands, specs, strict=True)]
    over = functools.partial(block, axis_name=MODEL)
    found = sharding.over_mesh(over, in_specs=specs, out_specs=P(DATA))(*operands)
  else:
    found = block(*operands)
  return *sharding.reshard((found.divergences(rollout.logp), found.policy_logp)), aux
