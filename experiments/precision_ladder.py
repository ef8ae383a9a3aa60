"""What does one mantissa bit of the rollout engine buy, and when does the exponent's range matter?

Weights, activations, cache, scores or probabilities of the engine are rounded to m mantissa bits,
each alone; then all matrices and activations to real formats of 8 and 16 bits, to other splits of
the same bits, and to formats whose range has been moved by powers of two, as if the model's numbers
were larger or smaller. A format is traced: one compiled program.

Claims under test: (1) rounding errors halve with each bit and KL is quadratic in them, so KL falls
4-fold a bit: slope of log2 KL -2 for every component; (2) while numbers are in range, float16 beats
bfloat16 by its three bits, 64-fold in KL; (3) stochastic rounding, of twice the variance, costs
twice the KL of nearest.
Falsified if: (1) a slope is off by more than .25 and two standard errors; (2) the ratio is not
within a factor of 2 of 64; (3) it is not within a factor of 1.5 of 2. The verdict says which.
Honest caveat: a toy policy whose numbers all lie within a few powers of two: range is tested by
moving the format. Sums are float32 everywhere, which real kernels may not grant. Stochastic
rounding is tested on weights alone. The published factor of float16 over bfloat16 is 24
(arXiv 2510.26788, offline, sequence level).

    python -m experiments.precision_ladder --publish              # 5 seeds, minutes
    python -m experiments.precision_ladder --mesh 8,1 --prompts 512 --samples 16 \\
        --policy.width 1024 --policy.layers 16 ... --distributed  # a pod
"""

import dataclasses
import math
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np

from experiments.laboratory import sweep
from experiments.reports import precision_report as pr
from experiments.reports import report
from trm_jax import masks, measurements, policy, training
from trm_jax.measurements import router_statistics
from trm_jax.mesh import sharding
from trm_jax.training import command
from trm_jax.types import InputError

COMPONENTS = ('weights', 'activations', 'kv', 'logits', 'softmax')
# What a format of the whole engine rounds.
INSIDE = ('weights', 'activations', 'kv')
NAMED = {
  'bfloat16': 'e8m7',
  'float16': 'e5m10',
  'float8_e4m3fn': 'e4m3',
  'float8_e5m2': 'e5m2',
  'int8': 'int8',
}
# Exponent bits of all splits of 8 and of 16 bits.
SPLITS = {8: (2, 3, 4, 5, 6), 16: (3, 4, 5, 6, 8)}
MOVED = ('float16', 'bfloat16', 'float8_e4m3fn')
LARGEST = float(np.finfo(np.float32).max)


class Grid(typing.NamedTuple):
  """A format as numbers: [] each, or one for each component; traced.

  Attributes:
    mantissa: bits; 23 or more = not rounded.
    lowest: exponent of the smallest normal number; below it steps stay equal.
    top: the largest number.
    levels: the largest integer of an integer format scaled to its largest entry, 0 = a float.
    dither: 1 = stochastic rounding.
  """

  mantissa: typing.Any
  lowest: typing.Any
  top: typing.Any
  levels: typing.Any
  dither: typing.Any


OFF = Grid(23.0, -126.0, math.inf, 0.0, 0.0)


def grid(name: str, *, move: int = 0, dither: bool = False) -> Grid:
  """int8, e4m3 (the one without infinities) or eXmY as IEEE 754 has it, e5m10 = float16.

  `move`: numbers are 2^move times as large when they are rounded.
  """
  if name == 'int8':
    return OFF._replace(mantissa=0.0, levels=127.0, dither=float(dither))
  exponent, mantissa = (int(x) for x in name[1:].split('m'))
  bias = 2 ** (exponent - 1) - 1
  top = 448.0 if name == 'e4m3' else (2 - 2.0**-mantissa) * 2.0**bias
  return Grid(
    float(mantissa), 1.0 - bias - move, min(top * 2.0**-move, LARGEST), 0.0, float(dither)
  )


def rounded(x, to: Grid, *, noise=None, axis=-1):
  """x in the format and back; with dither, up or down by chance, as `noise` in [0, 1) says."""
  integer = to.levels > 0
  scale = jnp.abs(x).max(axis, keepdims=True) / jnp.maximum(to.levels, 1)
  scale = jnp.where(scale > 0, scale, 1)
  top = jnp.where(integer, scale * to.levels, to.top)
  exponent = jnp.maximum(jnp.frexp(x)[1] - 1, to.lowest.astype(jnp.int32))
  step = jnp.maximum(exponent - to.mantissa.astype(jnp.int32), -126)
  unit = jnp.where(integer, scale, jnp.ldexp(jnp.float32(1), step))
  place = x / unit
  level = jnp.round(place)
  if noise is not None:
    level = jnp.where(to.dither > 0, jnp.floor(place + noise), level)
  return jnp.where(to.mantissa >= 23, x, jnp.clip(level * unit, -top, top))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionLadder(sweep.Trained):
  """KL against mantissa bits, component by component; real formats; range; rounding mode.

  Ends with tables, a figure and a verdict. An interrupted run goes on with --resume.
  """

  directory: pathlib.Path = pathlib.Path('runs/precision_ladder')
  # Mantissa bits, rising.
  bits: tuple[int, ...] = (1, 2, 3, 5, 7, 9)
  # Powers of two by which numbers are larger than they are; 0 is also measured.
  moves: tuple[int, ...] = (-24, -16, -8, 8, 16)
  # Limit of TRM-max, nats.
  limit: float = 0.05

  def __post_init__(self):
    super().__post_init__()
    if sorted(set(self.bits)) != list(self.bits) or len(self.bits) < 3:
      raise InputError(f'bits={self.bits} must rise and name 3 or more, e.g. 1 3 5.')
    if not (1 <= self.bits[0] and self.bits[-1] <= 22):
      raise InputError(f'bits={self.bits} must lie in 1..22: it is simulated in float32.')
    if not all(-60 <= move <= 60 and move for move in self.moves):
      raise InputError(f'moves={self.moves} must lie in -60..60 and not name 0.')
    if not 0 < self.limit < math.inf:
      raise InputError(f'limit={self.limit} must be > 0 and finite.')

  def dials(self) -> dict[str, dict[str, Grid]]:
    """Formats by component, by the name of the cell."""
    inside = lambda to: dict.fromkeys(INSIDE, to)
    found = {'off': {}}
    for m in self.bits:
      found |= {f'{c}_m{m}': {c: grid(f'e8m{m}')} for c in COMPONENTS}
      found[f'dithered_m{m}'] = {'weights': grid(f'e8m{m}', dither=True)}
    for name, bits in NAMED.items():
      found[name] = inside(grid(bits))
    for total, exponents in SPLITS.items():
      names = [f'e{e}m{total - 1 - e}' for e in exponents]
      found |= {f'split{total}_{name}': inside(grid(name)) for name in names}
    for name in MOVED:
      found |= {f'{name}_move{m}': inside(grid(NAMED[name], move=m)) for m in self.moves}
    return found


def stacked(dial: dict[str, Grid]) -> Grid:
  """One array entry for each component."""
  each = [dial.get(name, OFF) for name in COMPONENTS]
  return Grid(*(jnp.asarray(x, jnp.float32) for x in zip(*each, strict=True)))


def hooks(dial: Grid, temperature: float) -> policy.Hooks:
  """The engine's hooks; weights are rounded by `engine_weights`."""
  of = lambda name: jax.tree.map(lambda x: x[COMPONENTS.index(name)], dial)

  def scores(x, keys):
    del keys
    x = rounded(x, of('logits'))
    p = rounded(jax.nn.softmax(x / temperature), of('softmax'))
    # Probabilities all of which vanish would leave nothing to draw from.
    some = (p > 0).any(-1, keepdims=True) & (of('softmax').mantissa < 23)
    return jnp.where(some, temperature * jnp.log(p), x)

  return policy.Hooks(
    activation=lambda x: rounded(x, of('activations')),
    kv=lambda x: rounded(x, of('kv')),
    logits=scores,
  )


def engine_weights(params: policy.Params, dial: Grid, key) -> policy.Params:
  """Matrices rounded, one scale a matrix where integers want one; norm scales as they are."""
  to = jax.tree.map(lambda x: x[COMPONENTS.index('weights')], dial)
  leaves, tree = jax.tree_util.tree_flatten_with_path(params)

  def one(index, path, leaf):
    if 'scale' in jax.tree_util.keystr(path[-1:]):
      return leaf
    noise = jax.random.uniform(jax.random.fold_in(key, index), leaf.shape)
    return rounded(leaf, to, noise=noise, axis=(-2, -1))

  return jax.tree_util.tree_unflatten(tree, [one(i, *x) for i, x in enumerate(leaves)])


def cell_program(args: PrecisionLadder, program: training.Program):
  """(params, dial, prompts, starts, key) -> divergences of the rounded engine."""
  config = args.config

  @jax.jit
  def cell(params, dial, prompts, starts, key):
    weights = engine_weights(params, dial, jax.random.fold_in(key, 1))
    rounding = hooks(dial, config.temperature)
    rollout = sweep.roll_out(program, weights, prompts, starts, key, hooks=rounding)
    d, _, aux = sweep.compare(config, params, rollout)
    valid = sharding.reshard(rollout.valid)
    mean = lambda x: jnp.where(valid, x, 0).sum() / valid.sum()
    flipped = valid & False
    if rollout.routes is not None:
      routes = sharding.reshard((rollout.routes, aux.routes, router_statistics.fed_slots(rollout)))
      used, own, fed = routes
      differs = (jnp.sort(used, -1) != jnp.sort(own, -1)).any((-1, -2)) & fed
      # A token sees what earlier ones became: at its own slot or before.
      flipped = valid & (jnp.cumsum(differs, -1) > 0)[:, -valid.shape[1] :]
    same = valid & ~flipped
    return {
      'flipped': mean(flipped),
      'kl_same': jnp.where(same, d.kl, 0).sum() / jnp.where(same.any(), same.sum(), jnp.nan),
      'kl': measurements.distribution(d.kl, valid, thresholds=measurements.KL_LIMITS),
      'tail': measurements.tail(d.kl, valid),
      'tv': mean(d.tv),
      'log_ratio': mean(jnp.abs(d.log_ratio)),
      'kept': masks.max_kl(limit=args.limit)(d, valid).mean(),
    }

  return cell


def measure(args: PrecisionLadder) -> dict:
  """Every (seed, format)."""
  program, dials = sweep.build(args), args.dials()
  cell = cell_program(args, program)

  def prepare(seed):
    (params,), rows, key = sweep.trained(args, program, seed)

    def one(name):
      with jax.set_mesh(program.mesh):
        return measurements.plain(jax.device_get(cell(params, stacked(dials[name]), *rows, key)))

    return one

  return sweep.measure(args, list(dials), args.each_seed, prepare, mesh=program.mesh)


# What the cells say.


def _kl(c):
  return c['kl']['mean']


def _same(c):
  """Mean KL of tokens before which, and at which, both sides chose the same experts."""
  return c['kl_same']


def summarise(args: PrecisionLadder, cells: dict) -> dict:
  """Ladders with slopes, formats, splits, moves, dither."""
  seeds = sorted({seed for seed, _ in cells})
  at = lambda name, of=_kl: sweep.over_seeds(cells, name, of)
  floor = at('off')
  lowest = pr.CLEAR * max(floor['mean'], 1e-13)

  def slope(component, of):
    slopes = []
    for s in seeds:
      kl = np.array([of(cells[s, f'{component}_m{m}']) for m in args.bits])
      good = (kl > lowest) & (kl < pr.SATURATED)
      slopes.append(sweep.line(np.array(args.bits)[good], np.log2(kl[good])))
    return sweep.known(slopes)

  ladders = {
    component: {
      'kl': [at(f'{component}_m{m}') for m in args.bits],
      'same': [at(f'{component}_m{m}', _same) for m in args.bits],
      'slope': slope(component, _kl),
      'same_slope': slope(component, _same),
    }
    for component in COMPONENTS
  }
  ratio = lambda a, b, of=_kl: sweep.known(
    [math.log(max(of(cells[s, a]), 1e-13) / max(of(cells[s, b]), 1e-13)) for s in seeds]
  )
  dithered = [
    report.mean_error(
      [math.log(_kl(cells[s, f'dithered_m{m}']) / _kl(cells[s, f'weights_m{m}'])) for s in seeds]
    )
    for m in args.bits
  ]
  # Where both are small and clear of the floor.
  good = [
    d['mean']
    for d, x in zip(dithered, ladders['weights']['kl'], strict=True)
    if lowest < x['mean'] < pr.SATURATED
  ]
  moves = sorted({*args.moves, 0})
  name_of = lambda name, move: name if move == 0 else f'{name}_move{move}'
  return {
    'bits': list(args.bits),
    'limit': args.limit,
    'floor': floor,
    'ladders': ladders,
    'formats': {
      name: {
        'kl': at(name),
        'same': at(name, _same),
        'flipped': at(name, lambda c: c['flipped']),
        'largest': at(name, lambda c: c['kl']['largest']),
        'tv': at(name, lambda c: c['tv']),
        'log_ratio': at(name, lambda c: c['log_ratio']),
        'tail': at(name, lambda c: c['tail']['index']),
        'kept': at(name, lambda c: c['kept']),
      }
      for name in NAMED
    },
    'fp16_over_bf16': ratio('bfloat16', 'float16'),
    'fp16_over_bf16_same': ratio('bfloat16', 'float16', _same),
    'splits': {
      str(total): {
        f'e{e}m{total - 1 - e}': at(f'split{total}_e{e}m{total - 1 - e}') for e in exponents
      }
      for total, exponents in SPLITS.items()
    },
    'split_same': {
      str(total): [at(f'split{total}_e{e}m{total - 1 - e}', _same) for e in exponents]
      for total, exponents in SPLITS.items()
    },
    'moves': moves,
    'moved': {name: [at(name_of(name, move)) for move in moves] for name in MOVED},
    'dithered': [at(f'dithered_m{m}') for m in args.bits],
    'dither_log_ratio': dithered,
    'dither_factor': float(np.exp(np.mean(good))) if good else math.nan,
  }


def main(args: PrecisionLadder) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, pr.PARTS, pr.draw, name='precision_ladder')


if __name__ == '__main__':
  command.run(PrecisionLadder, main)
