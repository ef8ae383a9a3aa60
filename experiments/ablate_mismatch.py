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
import math
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.laboratory import small_world, sweep
from experiments.reports import ablation_report
from trm_jax import masks, measurements, policy, training
from trm_jax.measurements import attribution, router_statistics
from trm_jax.mesh import sharding
from trm_jax.mismatch import fleet
from trm_jax.mismatch.decoding import Decoding
from trm_jax.mismatch.heavy_tail import HeavyTail
from trm_jax.mismatch.precision import Precision
from trm_jax.mismatch.routing import Routing
from trm_jax.mismatch.staleness import Staleness
from trm_jax.policy import attention
from trm_jax.rollouts.stores import Record
from trm_jax.training import command
from trm_jax.types import InputError

# Below this mean KL, nats, is the rounding of decode against the full pass; log KL starts here.
FLOOR = 1e-6
# Each at a published size: float8 weights; 10 % of routers flipped (arXiv 2510.11370); 8 steps
# behind; nucleus .99; the log-odds noise of an MoE under vLLM (arXiv 2609.32444).
ENGINE = fleet.Engine(
  precision=Precision(weights='float8_e4m3fn', kv='float8_e4m3fn'),
  routing=Routing(flips=(0.1,)),
  staleness=Staleness(steps=8),
  decoding=Decoding(top_p=0.99),
  heavy_tail=HeavyTail(scale=1.0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateMismatch(sweep.Trained):
  """Full factorial over sources of mismatch; Shapley shares of KL, acceptance and true harm.

  The engine is described by --engine.*, and --sources says which of its sources are switched; the
  others stay off. Ends with tables, a figure and a verdict. An interrupted run goes on with
  --resume: finished cells are read, not repeated.
  """

  directory: pathlib.Path = pathlib.Path('runs/ablate_mismatch')
  # Independent repetitions: warm start, RL steps, prompts, random streams; from `seed` on.
  seeds: int = 4
  # Sources to switch: fields of the engine.
  sources: tuple[str, ...] = ('precision', 'routing', 'staleness', 'decoding', 'heavy_tail')
  # Run only the half of the cells with an even number of sources on; needs 5 sources or more, and
  # is right if no three of them interact.
  half: bool = False
  # The limit of TRM-max, nats.
  limit: float = 0.05
  engine: fleet.Engine = ENGINE
  # `steps` are RL steps on a healthy engine after the warm start; staleness looks back into them.
  config: Annotated[training.Config, tyro.conf.arg(name='')] = training.Config(
    steps=12,
    prompts=48,
    samples=4,
    policy=policy.PolicyConfig(experts_per_token=2, normalize_gates=True),
    optimizer=training.Optimizer(warmup=4),
    warm_start=training.WarmStart(steps=200, batch=64),
  )

  def __post_init__(self):
    known = [field.name for field in dataclasses.fields(fleet.Engine)]
    for name in self.sources:
      if name not in known:
        raise InputError(f'sources names {name!r}, which is not one of {", ".join(known)}.')
      if getattr(self.engine, name) == getattr(fleet.Engine(), name):
        raise InputError(
          f'sources names {name!r}, but engine.{name} is healthy: configure it by'
          f' --engine.{name}.* or leave it out.'
        )
    if len(set(self.sources)) != len(self.sources) or len(self.sources) < 2:
      raise InputError(f'sources={self.sources} must name two or more sources, each once.')
    if self.half and len(self.sources) < 5:
      raise InputError(
        f'half needs 5 sources or more to tell pairs apart, but sources={self.sources}: leave out'
        ' --half.'
      )
    attribution.full(len(self.sources))
    if not 0 < self.limit < math.inf:
      raise InputError(f'limit={self.limit} must be > 0 and finite.')
    if self.config.fleet != fleet.Fleet():
      raise InputError('fleet has no effect here: pass --engine.* in place of --fleet.*.')
    super().__post_init__()
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
    self.served.routing.check(self.config.policy)
    self.served.reporting.check(self.config.samples)

  @property
  def served(self) -> fleet.Engine:
    """The engine with every source off that is not among `sources`."""
    return fleet.Engine(**{name: getattr(self.engine, name) for name in self.sources})

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


def cell_program(args: AblateMismatch, program: training.Program):
  """(params, old, strengths, prompts, starts, key) -> responses and measurements; compiled once."""
  config, engine = program.config, args.served
  team = fleet.Fleet(engine=engine)
  length = config.response_length or program.task.response_length
  attend = getattr(attention, config.attention)

  @jax.jit
  def cell(params, old, strength, prompts, starts, key):
    history = None
    if engine.staleness.steps:
      history = jax.tree.map(lambda x: jnp.stack([x] * engine.staleness.steps), old)
    rollout = fleet.generate(
      team,
      params,
      config.policy,
      prompts,
      starts,
      key,
      sweep.request(program),
      Record(score=config.score),
      version=jnp.int32(config.steps),
      first=old,
      history=history,
      strength=strength,
      attention=attend,
    )
    reward = program.task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
    d, policy_logp, aux = sweep.compare(config, params, rollout)
    valid, reward = sharding.reshard((rollout.valid, reward))
    keep = masks.max_kl(limit=args.limit)(d, valid)
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


def measure(args: AblateMismatch) -> dict[tuple[int, int], dict[str, Any]]:
  """Every (seed, cell), measured or read; a cell's file has one digit a source, as in --sources."""
  program = sweep.build(args)
  cell = cell_program(args, program)
  small = small_world.config_of(args.config.policy)
  judge = small_world.judge(small, args.served)
  names = {''.join(str(int(x)) for x in on): on for on in args.design}

  def prepare(seed):
    (now, old), rows, key = sweep.trained(args, program, seed, (0, args.age))
    pair = small_world.train(small, seed, args.age)

    def one(name):
      on = names[name]
      strength = {n: jnp.float32(x) for n, x in zip(args.sources, on, strict=True)}
      with jax.set_mesh(program.mesh):
        responses, seen = jax.device_get(cell(now, old, strength, *rows, key))
      responses |= {f'true_{k}': v for k, v in judge(pair, strength, key, args.limit).items()}
      return {
        'seed': seed,
        'on': [n for n, x in zip(args.sources, on, strict=True) if x],
        'responses': {k: float(v) for k, v in responses.items()},
        'measured': measurements.plain(seen),
      }

    return one

  found = sweep.measure(args, list(names), args.each_seed, prepare, mesh=program.mesh)
  return {(s, c): found[s, name] for s in args.each_seed for c, name in enumerate(names)}


def summarise(args: AblateMismatch, cells: dict) -> dict:
  """All numbers, with what they are of."""
  found = ablation_report.summarise(args.sources, args.design, cells)
  return found | {'options': args.about() | {'seeds': args.seeds, 'floor': FLOOR}}


def main(args: AblateMismatch) -> None:
  """Measures what is missing, then attributes and reports."""
  parts, draw = ablation_report.PARTS, ablation_report.draw
  sweep.main(args, measure, summarise, parts, draw, name='ablate_mismatch')


if __name__ == '__main__':
  command.run(AblateMismatch, main)
