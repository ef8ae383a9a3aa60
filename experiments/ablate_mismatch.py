"""Which source of rollout/trainer mismatch does the harm, and how much of it is interaction?

Every combination of the sources is switched on, 2^n cells, with the same policy, prompts, seeds and
random streams; one compiled program serves all cells, strengths are traced. Responses are split
among the sources by Shapley's shares, with errors over seeds. Two policies are measured: one that
was warm-started on a task and trained for some RL steps (KL, TV, acceptance, as a trainer sees
them), and one small enough to enumerate (the true error of the surrogate and bias of its gradient).

Claim under test: the source that moves the rollout's distribution the most is the one that harms
the gradient the most, so that KL alone finds the culprit.
Falsified if: the true harm of the enumerated policy names another source. The verdict says so.
Honest caveat: strengths decide. The defaults take each source at a published size where there is
one, on toy policies; what is general is the instrument. Set `--engine.*` to your own engine.

    python -m experiments.ablate_mismatch                                  # minutes
    python -m experiments.ablate_mismatch --sources precision routing --engine.precision.kv int8
    python -m experiments.ablate_mismatch --mesh 8,1 --prompts 512 --samples 16 \\
        --policy.width 1024 --policy.layers 16 --policy.experts 64 ... --distributed    # a pod
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import P

from experiments import ablation_report, command, report, small_world
from trm_jax import (
  attention,
  linear_head,
  loop,
  policy,
  processes,
  recording,
  sampling,
  sharding,
  tasks,
  train,
  trust_region,
  update,
)
from trm_jax.mismatch import attribution, measurements, router_statistics
from trm_jax.mismatch import decoding as dc
from trm_jax.mismatch import fleet as fl
from trm_jax.mismatch import heavy_tail as ht
from trm_jax.mismatch import precision as pr
from trm_jax.mismatch import routing as rt
from trm_jax.mismatch import staleness as st
from trm_jax.sharding import DATA, MODEL
from trm_jax.types import InputError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'ablate_mismatch'
# Below this mean KL, nats, is the rounding of decode against the full pass; log KL starts here.
FLOOR = 1e-6
# Each at a published size: float8 weights; 10 % of routers flipped (arXiv 2510.11370); 8 steps
# behind; nucleus .99; the log-odds noise of an MoE under vLLM (arXiv 2609.32444).
ENGINE = fl.Engine(
  precision=pr.Precision(weights='float8_e4m3fn', kv='float8_e4m3fn'),
  routing=rt.Routing(flips=(0.1,)),
  staleness=st.Staleness(steps=8),
  decoding=dc.Decoding(top_p=0.99),
  heavy_tail=ht.HeavyTail(scale=1.0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateMismatch:
  """Full factorial over sources of mismatch; Shapley shares of KL, acceptance and true harm.

  The engine is described by --engine.*, and --sources says which of its sources are switched; the
  others stay off. Ends with tables, a figure and a verdict. An interrupted run goes on with
  --resume: finished cells are read, not repeated.
  """

  # Receives summary.json, table.md, figure.png; cells/ holds one file for each seed and cell.
  directory: pathlib.Path = pathlib.Path('runs/ablate_mismatch')
  # Continue where it was interrupted; seeds may be added.
  resume: bool = False
  # Copy summary, table and figure to experiments/results/ablate_mismatch.
  publish: bool = False
  # Independent repetitions: warm start, RL steps, prompts, random streams; from `seed` on.
  seeds: int = 4
  # Sources to switch: fields of the engine.
  sources: tuple[str, ...] = ('precision', 'routing', 'staleness', 'decoding', 'heavy_tail')
  # Run only the half of the cells with an even number of sources on; needs 5 sources or more, and
  # is right if no three of them interact.
  half: bool = False
  # The limit of TRM-max, nats.
  limit: float = 0.05
  engine: fl.Engine = ENGINE
  # `steps` are RL steps on a healthy engine after the warm start; staleness looks back into them.
  config: Annotated[train.Config, tyro.conf.arg(name='')] = train.Config(
    steps=12,
    prompts=48,
    samples=4,
    policy=policy.PolicyConfig(experts_per_token=2, normalize_gates=True),
    optimizer=train.Optimizer(warmup=4),
    warm_start=train.WarmStart(steps=200, batch=64),
  )
  hosts: Annotated[processes.Hosts, tyro.conf.arg(name='')] = processes.Hosts()

  def __post_init__(self):
    known = [field.name for field in dataclasses.fields(fl.Engine)]
    for name in self.sources:
      if name not in known:
        raise InputError(f'sources names {name!r}, which is not one of {", ".join(known)}.')
      if getattr(self.engine, name) == getattr(fl.Engine(), name):
        raise InputError(
          f'sources names {name!r}, but engine.{name} is healthy: configure it by'
          f' --engine.{name}.* or leave it out.'
        )
    if len(set(self.sources)) != len(self.sources) or len(self.sources) < 2:
      raise InputError(f'sources={self.sources} must name two or more sources, each once.')
    attribution.half(len(self.sources)) if self.half else attribution.full(len(self.sources))
    if self.seeds < 2:
      raise InputError(f'seeds={self.seeds} gives no error bar: use at least 2.')
    if not 0 < self.limit < math.inf:
      raise InputError(f'limit={self.limit} must be > 0 and finite.')
    if self.config.fleet != fl.Fleet():
      raise InputError('fleet has no effect here: describe the engine by --engine.* instead.')
    if self.served.staleness.steps > self.config.steps:
      raise InputError(
        f'engine.staleness.steps={self.served.staleness.steps} looks back further than'
        f' steps={self.config.steps} RL steps; raise steps.'
      )
    if self.served.staleness.stuck and not self.config.steps:
      raise InputError('engine.staleness.stuck needs RL steps to miss: set steps to 1 or more.')
    if self.served.routing.capacity is not None:
      raise InputError(
        f'engine.routing.capacity={self.served.routing.capacity} lets rows affect each other, which'
        ' the enumerated policy cannot have; leave it out.'
      )
    fl.Fleet(engine=self.served).check(self.config.policy, self.config.samples)

  @property
  def served(self) -> fl.Engine:
    """The engine with every source off that is not among `sources`."""
    return fl.Engine(**{name: getattr(self.engine, name) for name in self.sources})

  @property
  def design(self) -> np.ndarray:
    """Cells x sources, True = on."""
    count = len(self.sources)
    return attribution.half(count) if self.half else attribution.full(count)

  @property
  def age(self) -> int:
    """How many RL steps the stale weights are behind."""
    return self.config.steps if self.served.staleness.stuck else self.served.staleness.steps

  def about(self) -> dict[str, Any]:
    """What a resumed run must agree on."""
    config = dataclasses.asdict(self.config)
    config = {k: v for k, v in config.items() if k not in ('mesh', 'data_dir', 'seed')}
    own = dict(sources=list(self.sources), engine=dataclasses.asdict(self.served))
    return own | dict(limit=self.limit, half=self.half, config=config)


def drift(program: train.Program, directory: pathlib.Path, params, age: int):
  """(parameters after config.steps RL steps on a healthy engine, those `age` steps before).

  Saved when done; computed again from the warm start if it was interrupted.
  """
  config = program.config
  with (
    jax.set_mesh(program.mesh),
    recording.open_run(directory, loop.settings(program, age=age), resume=True, keep=1) as record,
  ):
    found = record.restore(loop._abstract({'now': params, 'old': params}))
    if found:
      return found[1]['now'], found[1]['old']
    state = program.start(params, jax.random.fold_in(jax.random.key(config.seed), 2))
    data = loop.prompts(program, 'train', config.prompts, seed=config.seed + 1)
    old = params
    arm = update.Arm(jnp.int32(0), jnp.float32(1))
    for step in range(config.steps):
      if step == config.steps - age:
        old = jax.tree.map(jnp.copy, state.params)  # a step donates its state
      state, _, _ = program.step(state, arm, *loop.rows(next(data)))
    now = state.params
    old = now if age == 0 else old
    record.save(config.steps, {'now': now, 'old': old}, {})
    return now, old


def _statistics(head, hidden, rollout, temperature: float):
  """Exact statistics of the pair; rows over data, vocabulary over model."""

  def block(head, hidden, tokens, logits, *, axis_name=None):
    return linear_head.statistics(
      hidden,
      head,
      tokens,
      rollout_logits=logits,
      temperature=temperature,
      full=True,
      axis_name=axis_name,
    )

  if not sharding.active():
    return block(head, hidden, rollout.tokens, rollout.logits)
  specs = (P(MODEL, None), P(DATA), P(DATA), P(DATA, None, MODEL))
  args = (head, hidden, rollout.tokens, rollout.logits)
  args = [jax.reshard(x, spec) for x, spec in zip(args, specs, strict=True)]
  over = functools.partial(block, axis_name=MODEL)
  return sharding.over_mesh(over, in_specs=specs, out_specs=P(DATA))(*args)


def cell_program(args: AblateMismatch, program: train.Program):
  """(params, old, strengths, prompts, starts, key) -> responses and measurements; compiled once."""
  config, engine = program.config, args.served
  team = fl.Fleet(engine=engine)
  length = config.response_length or program.task.response_length
  attend = getattr(attention, config.attention)

  @jax.jit
  def cell(params, old, strength, prompts, starts, key):
    history = None
    if engine.staleness.steps:
      history = jax.tree.map(lambda x: jnp.stack([x] * engine.staleness.steps), old)
    rollout = fl.generate(
      team,
      params,
      config.policy,
      prompts,
      starts,
      key,
      samples=config.samples,
      length=length,
      eos=program.task.eos,
      pad=program.task.pad,
      version=jnp.int32(config.steps),
      first=old,
      history=history,
      strength=strength,
      temperature=config.temperature,
      score=config.score,
      attention=attend,
    )
    reward = program.task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
    hidden, aux = sampling.score(params, config.policy, rollout, attention=attend)
    found = _statistics(
      sharding.reshard(policy.head(params), MODEL), hidden, rollout, config.temperature
    )
    everywhere = sharding.reshard(
      (found.divergences(rollout.logp), found.policy_logp, rollout.valid, reward)
    )
    d, policy_logp, valid, reward = everywhere
    keep = trust_region.max_kl(d, valid, limit=args.limit)
    groups = reward.reshape(-1, config.samples)
    advantage = (groups - groups.mean(-1, keepdims=True)).reshape(-1)
    seen = measurements.measure(
      d,
      valid,
      policy_logp=policy_logp,
      advantage=advantage,
      positions=tuple(float(length * i // 4) for i in (1, 2, 3)),
      lengths=tuple(float(length * i // 4) for i in (1, 2, 3)),
    )
    if aux.routes is not None:
      routes = sharding.reshard((rollout.routes, aux.routes, router_statistics.fed_slots(rollout)))
      seen['flips'] = router_statistics.flips(*routes)
    responses = {
      'kl': seen['kl'].mean,
      'log_kl': jnp.log10(jnp.maximum(seen['kl'].mean, FLOOR)),
      'max_kl': seen['kl'].largest,
      'tv': seen['tv'].mean,
      'log_ratio': seen['abs_log_ratio'].mean,
      'rejected': 1 - keep.mean(),
      'reward': reward.mean(),
    }
    return responses, seen

  return cell


def name_of(seed: int, on) -> str:
  """File of a cell: seed0_10010.json, one digit a source in the order of --sources."""
  return f'seed{seed}_{"".join(str(int(x)) for x in on)}.json'


def read(path: pathlib.Path) -> dict[str, Any]:
  """A finished cell, NaN and infinities restored."""
  special = {None: math.nan, 'inf': math.inf, '-inf': -math.inf}
  found = json.loads(path.read_text())
  found['responses'] = {k: special.get(v, v) for k, v in found['responses'].items()}
  return found


def measure(args: AblateMismatch) -> dict[tuple[int, int], dict[str, Any]]:
  """Every (seed, cell), measured or read; progress with rate and time left."""
  config = args.config
  seeds = range(config.seed, config.seed + args.seeds)
  programs = train.build(config)
  processes.in_turn(lambda: tasks.prepare(programs.task, config.data_dir), 'prepared')
  small = small_world.config_of(config.policy)
  with jax.set_mesh(programs.mesh):
    record = recording.open_run(args.directory / 'cells', args.about(), resume=True)
  names = {(s, c): record.path / name_of(s, on) for s in seeds for c, on in enumerate(args.design)}
  done = {at for at, path in names.items() if path.exists()}
  processes.sync('cells')  # nobody writes before everybody has looked
  label = f'{len(args.design)} cells x {args.seeds} seeds'
  display = recording.Progress(len(names), label, start=len(done))
  display = display if jax.process_index() == 0 else loop.Silent()
  cell, count = cell_program(args, programs), len(done)
  judge = small_world.judge(small, args.served)
  with processes.stops() as look:
    for seed in seeds:
      missing = [(c, on) for c, on in enumerate(args.design) if (seed, c) not in done]
      if not missing:
        continue
      program = dataclasses.replace(programs, config=dataclasses.replace(config, seed=seed))
      folder = args.directory / f'seed{seed}'
      start = loop.warm_start(program, folder / 'warm_start')
      now, old = drift(program, folder / 'rl', start, args.age)
      pair = small_world.train(small, seed, args.age)
      key = jax.random.fold_in(jax.random.key(seed), 4)
      with jax.set_mesh(program.mesh):
        rows = loop.rows(next(loop.prompts(program, 'test', config.prompts, seed=seed)))
      for _, on in missing:
        strength = {n: jnp.float32(x) for n, x in zip(args.sources, on, strict=True)}
        with jax.set_mesh(program.mesh):
          responses, seen = jax.device_get(cell(now, old, strength, *rows, key))
          stop = look()
        responses |= {f'true_{k}': v for k, v in judge(pair, strength, key, args.limit).items()}
        value = {
          'seed': seed,
          'on': [n for n, x in zip(args.sources, on, strict=True) if x],
          'responses': {k: float(v) for k, v in responses.items()},
          'measured': measurements.plain(seen),
        }
        record.write_json(name_of(seed, on), value)
        count += 1
        display.update(count, seed=seed, on='+'.join(value['on']) or 'nothing')
        if stop and count < len(names):
          raise loop.Interrupted(count, stop)
  display.close()
  processes.sync('measured')
  return {at: read(path) for at, path in names.items()}


def main(args: AblateMismatch) -> None:
  """Measures what is missing, then attributes and reports."""
  about = dataclasses.asdict(dataclasses.replace(args, hosts=processes.Hosts()))
  processes.join(args.hosts, about, devices=math.prod(sharding.parse_mesh(args.config.mesh)))
  command.check_directory(args.directory, resume=args.resume)
  found = measure(args)
  if jax.process_index() != 0:
    return
  summary = ablation_report.summarise(args.sources, args.design, found)
  summary |= {'options': args.about() | {'seeds': args.seeds, 'floor': FLOOR}}
  parts = [f(summary) for f in ablation_report.PARTS]
  to = RESULTS if args.publish else None
  report.write(args.directory, summary, parts, ablation_report.draw, publish_to=to)


if __name__ == '__main__':
  command.run(AblateMismatch, main)
