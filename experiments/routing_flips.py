"""How often does router noise send a token to other experts, and how much of the harm is that?

Noise of several sizes is added to the router's scores of the rollout engine: in all layers, or in
one layer at a time. The trainer scores the rollout with its own routes, with the rollout's experts
replayed (arXiv 2510.11370), and with their weights replayed as well. Shapes are experts:top-k, one
program and one set of policies each; sizes of the noise are traced.

Claims under test: (1) flips are near-ties: their rate grows in proportion to the noise while it is
small; (2) other experts, not other weights of the same experts, make the mismatch: replaying the
experts removes more than half of the mean KL; (3) a flip in the first layer harms more than one in
the last, for it is carried on.
Falsified if: (1) the exponent of the flip rate below 10 % is not within .25 of 1; (2) in some shape
half of the KL or more is left; (3) KL for each flip in the first layer is no larger, at two
standard errors. The verdict says which.
Honest caveat: toy policies after a supervised warm start, no RL; their routers are less sharp than
those of large models, and normal noise of one size stands for whatever kernels do. Replaying the
weights removes this noise by construction: that curve is a check, not a finding.

    python -m experiments.routing_flips --publish                        # 5 seeds, minutes
    python -m experiments.routing_flips --shapes 128:8 64:8 128:4 --policy.layers 16 \\
        --policy.width 1024 ... --mesh 8,1 --prompts 512 --samples 16 --distributed   # a pod
"""

import dataclasses
import math
import pathlib
import re
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.laboratory import sweep
from experiments.reports import report
from experiments.reports import routing_report as rr
from trm_jax import masks, measurements, policy, training
from trm_jax.measurements import router_statistics
from trm_jax.mesh import sharding
from trm_jax.mismatch import routing
from trm_jax.rollouts import scoring
from trm_jax.training import command
from trm_jax.types import InputError

CONFIG = training.Config(
  steps=0,
  prompts=24,
  samples=4,
  policy=policy.PolicyConfig(
    width=32, layers=6, heads=4, kv_heads=4, head_width=8, mlp_width=32, normalize_gates=False
  ),
  warm_start=training.WarmStart(steps=50, batch=32),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingFlips(sweep.Trained):
  """Router flips and their KL against noise, top-k, experts and depth, with and without replay.

  Ends with tables, a figure and a verdict. An interrupted run goes on with --resume.
  """

  directory: pathlib.Path = pathlib.Path('runs/routing_flips')
  # Standard deviations of the noise on the router's scores, logit units, rising.
  sizes: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
  # Which of them is also put into one layer at a time.
  alone: float = 0.1
  # Policies as experts:top-k; the first one is also disturbed layer by layer. They replace
  # --policy.experts and --policy.experts-per-token; gates are normalised where top-k > 1.
  shapes: tuple[str, ...] = ('8:2', '8:1', '8:4', '16:2')
  # Limit of TRM-max, nats.
  limit: float = 0.05
  config: Annotated[training.Config, tyro.conf.arg(name='')] = CONFIG

  def __post_init__(self):
    super().__post_init__()
    sizes = self.sizes
    if sorted(set(sizes)) != list(sizes) or len(sizes) < 3 or sizes[0] <= 0:
      raise InputError(f'sizes={sizes} must rise from above 0 and name 3 or more.')
    if not self.alone > 0:
      raise InputError(f'alone={self.alone} must be > 0.')
    if not 0 < self.limit < math.inf:
      raise InputError(f'limit={self.limit} must be > 0 and finite.')
    if len(set(self.shapes)) != len(self.shapes) or not self.shapes:
      raise InputError(f'shapes={self.shapes} must name one or more, each once.')
    for shape in self.shapes:
      found = re.fullmatch(r'(\d+):(\d+)', shape)
      if not found or not 1 <= int(found[2]) < int(found[1]):
        raise InputError(
          f'shapes holds {shape!r}, which is not EXPERTS:TOP_K with 1 <= TOP_K < EXPERTS, e.g. 8:2.'
        )

  def of_shape(self, shape: str) -> training.Config:
    """The config of one shape."""
    experts, chosen = map(int, shape.split(':'))
    changed = dataclasses.replace(
      self.config.policy, experts=experts, experts_per_token=chosen, normalize_gates=chosen > 1
    )
    return dataclasses.replace(self.config, policy=changed)

  def dials(self, shape: str) -> dict[str, np.ndarray]:
    """Noise in each layer, by the name of the cell."""
    layers = self.config.policy.layers
    found = {f'all{size:g}': np.full(layers, size, np.float32) for size in self.sizes}
    if shape == self.shapes[0]:
      found |= {f'layer{n}': np.float32(self.alone) * np.eye(layers)[n] for n in range(layers)}
    return found


def cell_program(args: RoutingFlips, program: training.Program):
  """(params, noise of each layer, prompts, starts, key) -> flips, margins, KL of every trainer."""
  config = program.config
  samples = dict(samples=config.samples)

  @jax.jit
  def cell(params, sizes, prompts, starts, key):
    def disturb(scores, layer, noise_keys):
      noise = routing.router_hook(routing.Routing(jitter=1.0), sizes[layer])
      return noise(scores, layer, noise_keys)

    hooks = policy.Hooks(router=disturb)
    rollout = sweep.roll_out(program, params, prompts, starts, key, hooks=hooks)
    # A rollout holds its routes but not their weights.
    _, engine = scoring.rescore(params, config.policy, rollout, key, hooks=hooks, **samples)
    replayed = routing.replay(rollout.routes, engine.gates)
    valid = sharding.reshard(rollout.valid)

    def side(given):
      """The trainer that is given nothing, the experts, or the experts and their weights."""
      choose, weigh = given
      hooks = policy.Hooks(
        routes=lambda p, own, *at: jnp.where(choose, replayed.routes(p, own, *at), own),
        gates=lambda own, *at: jnp.where(weigh, replayed.gates(own, *at), own),
      )
      d, _, aux = sweep.compare(config, params, rollout, hooks=hooks)
      seen = {
        'kl': measurements.distribution(d.kl, valid, thresholds=measurements.KL_LIMITS),
        'tail': measurements.tail(d.kl, valid),
        'log_ratio': jnp.abs(jnp.where(valid, d.log_ratio, 0)).sum() / valid.sum(),
        'kept': masks.max_kl(limit=args.limit)(d, valid).mean(),
      }
      return seen, sharding.reshard((d.kl, aux.routes, aux.router_logits))

    given = jnp.array([[False, False], [True, False], [True, True]])
    seen, arrays = jax.lax.map(side, given)
    found = {name: jax.tree.map(lambda x, i=i: x[i], seen) for i, name in enumerate(rr.SIDES)}
    own, routes, scores = (x[0] for x in arrays)
    used, fed = sharding.reshard((rollout.routes, router_statistics.fed_slots(rollout)))
    differs = (jnp.sort(used, -1) != jnp.sort(routes, -1)).any((-1, -2))
    first = prompts.shape[1] - 1
    here = valid & differs[:, first : first + valid.shape[1]]
    kl = jnp.where(valid, own, 0)
    mean = lambda where: (
      jnp.where(where, kl, 0).sum() / jnp.where(where.any(), where.sum(), jnp.nan)
    )
    return found | {
      'flips': router_statistics.flips(used, routes, fed),
      'margins': router_statistics.margins(
        scores,
        fed,
        experts_per_token=config.policy.experts_per_token,
        thresholds=rr.MARGINS,
      ),
      'kl_flipped': mean(here),
      'kl_others': mean(valid & ~here),
      'flipped_here': here.sum() / valid.sum(),
    }

  return cell


def measure(args: RoutingFlips) -> dict:
  """Every (seed, shape and noise); shapes one after the other, each with its own program."""
  names, ready = [f'{s.replace(":", "k")}_{d}' for s in args.shapes for d in args.dials(s)], {}

  def policies(seed, shape):
    if ready.get('at') != (seed, shape):
      if shape not in ready:
        one = dataclasses.replace(args, config=args.of_shape(shape))
        program = sweep.build(one)
        ready[shape] = one, program, cell_program(one, program)
      one, program, _ = ready[shape]
      one = dataclasses.replace(one, directory=args.directory / shape.replace(':', 'k'))
      ready['at'], ready['held'] = (seed, shape), sweep.trained(one, program, seed)
    return *ready[shape][1:], ready['held']

  def prepare(seed):
    def one(name):
      start, dial = name.split('_')
      shape = start.replace('k', ':')
      program, cell, ((params,), rows, key) = policies(seed, shape)
      with jax.set_mesh(program.mesh):
        found = cell(params, jnp.asarray(args.dials(shape)[dial], jnp.float32), *rows, key)
        return measurements.plain(jax.device_get(found))

    return one

  mesh = sharding.make_mesh(*sharding.parse_mesh(args.config.mesh))
  return sweep.measure(args, names, args.each_seed, prepare, mesh=mesh)


# What the cells say.


def _kl(side):
  return lambda c: c[side]['kl']['mean']


def _rate(c):
  """Share of routers that differ, over layers."""
  return float(np.mean(c['flips']['by_layer']))


def summarise(args: RoutingFlips, cells: dict) -> dict:
  """Flips and KL by shape, noise and layer."""
  seeds = sorted({seed for seed, _ in cells})
  shapes = {}
  for shape in args.shapes:
    start = shape.replace(':', 'k')
    names = [f'{start}_all{size:g}' for size in args.sizes]
    by_size = lambda of, names=names: [sweep.over_seeds(cells, name, of) for name in names]

    def powers(of, names=names):
      """Exponent of growth where few routers flip, and some do."""
      slopes = []
      for s in seeds:
        rates = np.array([_rate(cells[s, name]) for name in names])
        good = (rates > 0) & (rates < 0.1)
        y = np.array([of(cells[s, name]) for name in names])[good]
        slopes.append(sweep.line(np.log(args.sizes)[good], np.log(y)))
      return sweep.known(slopes)

    shapes[shape] = {
      'rate': by_size(_rate),
      'any_layer': by_size(lambda c: c['flips']['any_layer']),
      'exponent': powers(_rate),
      'kl': {side: by_size(_kl(side)) for side in rr.SIDES},
      'kl_exponents': {side: powers(_kl(side)) for side in ('own', 'experts')},
      'p99': by_size(lambda c: c['own']['kl']['quantiles'][measurements.QUANTILES.index(0.99)]),
      'largest': by_size(lambda c: c['own']['kl']['largest']),
      'tail': by_size(lambda c: c['own']['tail']['index']),
      'log_ratio': by_size(lambda c: c['own']['log_ratio']),
      'kept': {side: by_size(lambda c, side=side: c[side]['kept']) for side in rr.SIDES},
      'left': by_size(lambda c: c['experts']['kl']['mean'] / c['own']['kl']['mean']),
      'flipped_times': by_size(lambda c: c['kl_flipped'] / c['kl_others']),
      'margins': [
        sweep.over_seeds(
          cells, names[0], lambda c, i=i: 1 - float(np.mean(c['margins']['exceed'], 0)[i])
        )
        for i in range(len(rr.MARGINS))
      ],
    }
  base = args.shapes[0].replace(':', 'k')
  layers = range(args.config.policy.layers)
  at = lambda of: [
    sweep.over_seeds(cells, f'{base}_layer{n}', lambda c, n=n: of(c, n)) for n in layers
  ]
  per_flip = lambda c, n: max(c['own']['kl']['mean'], 1e-13) / max(c['flips']['by_layer'][n], 1e-9)
  lead = report.mean_error(
    [
      math.log(per_flip(cells[s, f'{base}_layer0'], 0))
      - math.log(per_flip(cells[s, f'{base}_layer{layers[-1]}'], layers[-1]))
      for s in seeds
    ]
  )
  return {
    'sizes': list(args.sizes),
    'alone': args.alone,
    'limit': args.limit,
    'shapes': shapes,
    'depth': {
      'own_layer': at(lambda c, n: c['flips']['by_layer'][n]),
      'elsewhere': at(
        lambda c, n: float(np.sum(c['flips']['by_layer']) - c['flips']['by_layer'][n])
      ),
      'kl': at(lambda c, n: c['own']['kl']['mean']),
      'left': at(lambda c, n: c['experts']['kl']['mean'] / c['own']['kl']['mean']),
      'per_flip': at(per_flip),
      'log_lead': lead,
    },
  }


def main(args: RoutingFlips) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, rr.PARTS, rr.draw, name='routing_flips')


if __name__ == '__main__':
  command.run(RoutingFlips, main)
