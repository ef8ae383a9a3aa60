"""What do sampling filters do that the trainer does not know of, and what mends it?

The engine divides by a temperature and cuts by top-k, top-p or min-p; the trainer scores with
neither. Its log-ratios are taken against log-probs of after the processors (processed), of before
them (raw, the classic bug), or over the engine's support alone (support replay, for filters). A
policy trained by RL says what a trainer sees; one small enough to enumerate, what it does to the
gradient. Filters are traced: one compiled program.

Claims under test: (1) raw log-probs hide every filter: mean |log-ratio| is rounding while exact KL
is not; (2) replaying the support removes the KL of pure filters and at least half of the bias of
the surrogate's gradient; (3) order matters: top-p before or after the temperature gives KL that
differ at two standard errors.
Falsified if: (1) raw log-ratios exceed 1e-3 nats; (2) KL is left, or more than half of the bias for
most filters; (3) they do not differ. The verdict says which.
Honest caveat: 16 and 5 tokens of vocabulary; a filter cuts less of a large one. The replayed
surrogate is that of the truncated policy: where filters cut for good, its optimum is another.

Infinities: KL(rollout || policy) stays finite, at most -log(kept mass) for pure filters, because
the engine draws nothing that the policy could not. KL(policy || rollout) and chi2 are infinite on
every token whose support was cut: a chi2 budget rejects those rows at any limit.

    python -m experiments.decoding_filters --publish              # 5 seeds, minutes
    python -m experiments.decoding_filters --mesh 8,1 --prompts 512 --samples 16 \\
        --policy.width 1024 --policy.layers 16 ... --distributed  # a pod
"""

import dataclasses
import functools
import math
import pathlib
import typing

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from experiments import command, figures, report, small_world, sweep
from trm_jax import (
  attention,
  enumeration,
  oracle,
  policy,
  sampling,
  sharding,
  train,
  trust_region,
)
from trm_jax import divergences as dv
from trm_jax.mismatch import decoding, measurements
from trm_jax.types import InputError

SIDES = {'processed': 'processed', 'raw': 'raw', 'replay': 'support replayed'}
KINDS = {'top_k': 'top-k', 'top_p': 'top-p', 'min_p': 'min-p', 'temperature': 'temperature'}
# Below this mean |log-ratio| or KL, nats, is rounding.
ROUNDING = 1e-3


class Filter(typing.NamedTuple):
  """Processors as numbers, traced; the defaults do nothing.

  Attributes:
    temperature: divides the scores.
    k, p, min_p: as `decoding.Decoding`; k = 0, p = 1 and min_p = 0 cut nothing.
    late: 1 = the temperature divides after the filters have cut.
  """

  temperature: typing.Any = 1.0
  k: typing.Any = 0.0
  p: typing.Any = 1.0
  min_p: typing.Any = 0.0
  late: typing.Any = 0.0

  @property
  def pure(self) -> bool:
    """Cuts and does nothing else."""
    return self.temperature == 1


def filtered(scores, by: Filter):
  """Scores the engine draws from: `decoding.process` at temperature 1 with traced settings."""
  seen = jnp.where(by.late > 0, scores, scores / by.temperature)
  ranked = jnp.flip(jnp.sort(seen, -1), -1)
  last = jnp.clip(by.k.astype(jnp.int32), 1, scores.shape[-1]) - 1
  seen = jnp.where((by.k > 0) & (seen < jnp.take(ranked, last, -1)[..., None]), -jnp.inf, seen)
  seen = decoding.keep_top_p(seen, by.p)
  seen = jnp.where(by.min_p > 0, decoding.keep_min_p(seen, by.min_p), seen)
  return jnp.where(seen > -jnp.inf, scores / by.temperature, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingFilters(sweep.Trained):
  """KL, log-ratios, acceptance and gradient bias under filters; raw, processed, replayed.

  Ends with tables, a figure and a verdict. An interrupted run goes on with --resume.
  """

  directory: pathlib.Path = pathlib.Path('runs/decoding_filters')
  # Settings of each filter, alone.
  top_k: tuple[int, ...] = (2, 3, 4)
  top_p: tuple[float, ...] = (0.6, 0.8, 0.9, 0.95, 0.99)
  min_p: tuple[float, ...] = (0.02, 0.05, 0.1, 0.3)
  temperatures: tuple[float, ...] = (0.6, 0.8, 0.9, 1.1, 1.25, 1.5)
  # Top-p whose order with each temperature is compared.
  ordered_p: float = 0.9
  ordered_temperature: tuple[float, ...] = (0.6, 1.5)
  # Limit of TRM-max, nats.
  limit: float = 0.05

  def __post_init__(self):
    super().__post_init__()
    for name in KINDS:
      for value in self.settings(name):
        if name == 'temperature' and value == 1:
          raise InputError('temperature=1 is no filter; leave it out.')
        decoding.Decoding(**{name: value})
    decoding.Decoding(top_p=self.ordered_p)
    for value in self.ordered_temperature:
      decoding.Decoding(temperature=value)
    if not any(getattr(self, name) for name in ('top_k', 'top_p', 'min_p')):
      raise InputError('top_k, top_p and min_p are all empty: name a setting of one of them.')
    if not 0 < self.limit < math.inf:
      raise InputError(f'limit={self.limit} must be > 0 and finite.')
    if self.config.temperature != 1:
      raise InputError(
        f'temperature of training={self.config.temperature} must be 1 here: the sweep moves the'
        " engine's."
      )

  def settings(self, kind: str) -> tuple[float, ...]:
    """The settings of one kind of filter."""
    return self.temperatures if kind == 'temperature' else getattr(self, kind)

  def dials(self) -> dict[str, Filter]:
    """Filters by the name of the cell."""
    short = dict(top_k='k', top_p='p', min_p='min_p', temperature='temperature')
    found = {'none': Filter()}
    for kind in KINDS:
      found |= {f'{kind}_{x:g}': Filter(**{short[kind]: float(x)}) for x in self.settings(kind)}
    for t in self.ordered_temperature:
      for late in (0.0, 1.0):
        name = f'order_{t:g}_{"late" if late else "early"}'
        found[name] = Filter(temperature=t, p=self.ordered_p, late=late)
    return found


def cell_program(args: DecodingFilters, program: train.Program):
  """(params, filter, prompts, starts, key) -> what a trainer sees, by side."""
  config = args.config
  attend = getattr(attention, config.attention)

  def replayed(scores, logits, tokens):
    return dv.statistics(decoding.replay_support(scores, logits), logits, tokens).divergences()

  @jax.jit
  def cell(params, by, prompts, starts, key):
    hooks = policy.Hooks(
      decode=lambda scores: filtered(scores, by), reported=lambda own, drawn: own
    )
    rollout = sweep.roll_out(program, params, prompts, starts, key, hooks=hooks)
    raw, policy_logp, _ = sweep.compare(config, params, rollout)
    drawn = sampling.token_logp(rollout.logits, rollout.tokens, rollout.valid)
    hidden, _ = sampling.score(params, config.policy, rollout, attention=attend)
    scores = policy.logits(params, hidden)
    scores, logits, tokens = sharding.reshard((scores, rollout.logits, rollout.tokens))
    replay = replayed(scores, logits, tokens)
    drawn, valid = sharding.reshard((drawn, rollout.valid))
    processed = dataclasses.replace(raw, log_ratio=policy_logp - drawn)
    mean = lambda x: jnp.where(valid, x, 0).sum() / valid.sum()
    found = {}
    for side, d in (('processed', processed), ('raw', raw), ('replay', replay)):
      found[side] = {
        'kl': measurements.distribution(d.kl, valid, thresholds=(args.limit,)),
        'tv': mean(d.tv),
        'abs_log_ratio': mean(jnp.abs(d.log_ratio)),
        'log_ratio': mean(d.log_ratio),
        'ess': measurements.sequences(d.log_ratio, valid).ess,
        'kept': trust_region.max_kl(d, valid, limit=args.limit).mean(),
        'kept_k2': trust_region.max_k2(d, valid, limit=args.limit).mean(),
      }
    cut = (logits == -jnp.inf).any(-1)
    return found | {'cut': mean(cut), 'chi2_infinite': mean(jnp.isinf(processed.chi2))}

  return cell


def true_bias(config, pair: small_world.Pair, by: Filter, limit: float) -> dict[str, float]:
  """Relative bias of the surrogate's gradient by side, exact, of the enumerated policy."""
  table, served = _tables(config)(pair.params, by)
  with enumeration.float64():
    shared = dict(horizon=small_world.HORIZON, reward=pair.reward)
    world = enumeration.world(table, served, **shared)
    found = jax.tree.map(np.asarray, small_world.truth(world, limit))
    own = jnp.where(jnp.isinf(served), -jnp.inf, table)
    replay = small_world.truth(enumeration.world(own, served, **shared), limit)
    slopes = {
      'processed': found['surrogate'],
      'raw': np.asarray(_raw_slope(world)),
      'replay': np.asarray(replay['surrogate']),
      'trm': found['masked'],
    }
  true = found['true']
  sizes = small_world.lengths(config)(pair.params, [true, *(x - true for x in slopes.values())])
  return {name: size / sizes[0] for name, size in zip(slopes, sizes[1:], strict=True)} | {
    'kl': float(found['kl']),
    'trm_kept': float(found['kept']),
  }


@functools.cache
def _tables(config):
  """(params, filter) -> logits of (the policy, its filtered engine); compiled once."""

  @jax.jit
  def run(params, by):
    own = small_world.table(params, config)
    return own, filtered(own, by)

  return run


@jax.jit
def _raw_slope(world: enumeration.World):
  """Gradient by logits of the surrogate whose ratios are against the policy's own log-probs."""
  served = enumeration.tree(world).rollout
  weight = enumeration.descend(world.prompts, served)[1]
  weight = weight * (world.reward - (weight * world.reward).sum())

  def surrogate(w):
    p = jax.nn.softmax(w.policy)
    ratio = p / jax.lax.stop_gradient(jnp.where(p > 0, p, 1))
    zero = jnp.zeros_like(world.prompts)
    return (weight * enumeration.descend(zero, ratio, jnp.add)[1]).sum()

  return oracle.gradient(surrogate, world)


def measure(args: DecodingFilters) -> dict:
  """Every (seed, filter)."""
  program, dials = sweep.build(args), args.dials()
  cell, small = cell_program(args, program), small_world.config_of(args.config.policy)

  def prepare(seed):
    (params,), rows, key = sweep.trained(args, program, seed)
    pair = small_world.train(small, seed, 0)

    def one(name):
      by = Filter(*(jnp.float32(x) for x in dials[name]))
      with jax.set_mesh(program.mesh):
        found = measurements.plain(jax.device_get(cell(params, by, *rows, key)))
      return found | {'true': true_bias(small, pair, by, args.limit)}

    return one

  return sweep.measure(args, list(dials), args.each_seed, prepare, mesh=program.mesh)


# What the cells say.


def summarise(args: DecodingFilters, cells: dict) -> dict:
  """Every filter, and the order of processors."""
  seeds = sorted({seed for seed, _ in cells})
  filters = {}
  for name, by in args.dials().items():
    at = lambda of, name=name: sweep.over_seeds(cells, name, of)
    filters[name] = {
      'pure': by.pure and name != 'none',
      'kl': {s: at(lambda c, s=s: c[s]['kl']['mean']) for s in SIDES},
      'abs_log_ratio': {s: at(lambda c, s=s: c[s]['abs_log_ratio']) for s in SIDES},
      'tv': at(lambda c: c['processed']['tv']),
      'kept': {s: at(lambda c, s=s: c[s]['kept']) for s in SIDES},
      'kept_k2': {s: at(lambda c, s=s: c[s]['kept_k2']) for s in SIDES},
      'ess': at(lambda c: c['processed']['ess']),
      'chi2_infinite': at(lambda c: c['chi2_infinite']),
      'true_kl': at(lambda c: c['true']['kl']),
      'bias': {s: at(lambda c, s=s: c['true'][s]) for s in (*SIDES, 'trm')},
    }
  order = {}
  for t in args.ordered_temperature:
    early, late = f'order_{t:g}_early', f'order_{t:g}_late'
    gap = [cells[s, late]['processed']['kl']['mean'] for s in seeds]
    gap = np.array(gap) - [cells[s, early]['processed']['kl']['mean'] for s in seeds]
    order[f'{t:g}'] = {
      'early': filters[early]['kl']['processed'],
      'late': filters[late]['kl']['processed'],
      'gap': report.mean_error(gap.tolist()),
      'bias_early': filters[early]['bias']['processed'],
      'bias_late': filters[late]['bias']['processed'],
    }
  return {
    'limit': args.limit,
    'ordered_p': args.ordered_p,
    'settings': {kind: list(args.settings(kind)) for kind in KINDS},
    'filters': filters,
    'order': order,
  }


def _shown(x: dict[str, float], digits: int = 2) -> str:
  if math.isnan(x['mean']):
    return '-'
  error = '' if math.isnan(x['se']) else f' ± {x["se"]:.1g}'
  return f'{x["mean"]:.{digits}g}{error}'


def table_of_filters(summary: dict) -> str:
  """What a trainer sees."""
  rows = []
  for name, found in summary['filters'].items():
    row = [name.replace('_', ' '), _shown(found['kl']['processed']), _shown(found['kl']['replay'])]
    row += [_shown(found['abs_log_ratio'][side]) for side in SIDES]
    row += [_shown(found['tv']), _shown(found['ess'])]
    row += [_shown(found['kept'][side]) for side in ('processed', 'replay')]
    row += [_shown(found['kept_k2'][side]) for side in ('processed', 'raw')]
    rows.append([*row, _shown(found['chi2_infinite'])])
  head = ['filter', 'mean KL', 'with support replay']
  head += [f'mean |log-ratio|, {label}' for label in SIDES.values()]
  head += ['mean TV', 'ESS', f'TRM-max at {summary["limit"]:g} keeps', 'with support replay']
  head += ['max k2 keeps, processed', 'raw', 'tokens of infinite chi2']
  return report.table(head, rows)


def table_of_bias(summary: dict) -> str:
  """Relative bias of the gradient."""
  rows = [
    [
      name.replace('_', ' '),
      _shown(found['true_kl']),
      *(_shown(found['bias'][side]) for side in (*SIDES, 'trm')),
    ]
    for name, found in summary['filters'].items()
  ]
  head = ['enumerated policy', 'mean KL', *(f'bias, {label}' for label in SIDES.values())]
  return report.table([*head, 'bias, processed, TRM-max'], rows)


def _halved(summary: dict) -> tuple[list[str], list[str]]:
  """(pure filters whose bias support replay at least halves, the others); only those with any."""
  halved, not_halved = [], []
  for name, found in summary['filters'].items():
    before, after = found['bias']['processed']['mean'], found['bias']['replay']['mean']
    if found['pure'] and before > 1e-3:
      (halved if after <= before / 2 else not_halved).append(name)
  return halved, not_halved


def verdict(summary: dict) -> str:
  """Raw log-probs, replay, order."""
  filters = summary['filters']
  raw = max(f['abs_log_ratio']['raw']['mean'] for f in filters.values())
  worst = max(filters, key=lambda n: filters[n]['kl']['processed']['mean'])
  kl = filters[worst]['kl']['processed']
  hides = raw < ROUNDING < kl['mean']
  lines = [
    f'Raw log-probs: mean |log-ratio| at most {raw:.1g} nats, while {worst.replace("_", " ")} has'
    f' an exact KL of {_shown(kl)}. Claim that they hide every filter: {"yes" if hides else "NO"}'
  ]
  pure = {n: f for n, f in filters.items() if f['pure']}
  left = max(f['kl']['replay']['mean'] for f in pure.values())
  halved, others = _halved(summary)
  mended = left < ROUNDING and len(halved) > len(others)
  lines.append(
    f'Support replay leaves a KL of at most {left:.1g} nats under pure filters; it halves the bias'
    f' of the gradient, or better, for {len(halved)} of {len(halved) + len(others)} of them. Claim'
    f' that it mends them: {"yes" if mended else "NO"}'
  )
  means = lambda side: float(np.mean([f['bias'][side]['mean'] for f in pure.values()]))
  lines.append(
    f'Relative bias of the gradient, mean over pure filters: processed {means("processed"):.2g},'
    f' raw {means("raw"):.2g}, support replayed {means("replay"):.2g}; the replayed one is unbiased'
    ' for the truncated policy instead, by construction'
  )
  gaps = {t: found['gap'] for t, found in summary['order'].items()}
  clear = [t for t, x in gaps.items() if abs(x['mean']) > 2 * x['se']]
  lines.append(
    f'KL with the temperature after top-p {summary["ordered_p"]:g}, minus before: '
    + ', '.join(f'{_shown(x)} at temperature {t}' for t, x in gaps.items())
    + f'. Claim that order matters: {"yes" if len(clear) == len(gaps) else "NO"}'
  )
  behind = [
    n.replace('_', ' ')
    for n, f in pure.items()
    if f['bias']['trm']['mean'] > f['bias']['processed']['mean'] + 2 * f['bias']['trm']['se']
  ]
  some = min(pure.values(), key=lambda f: f['kept']['processed']['mean'])
  lines.append(
    'Where TRM loses: its expected gradient is farther from the true one than without a mask under'
    f' {", ".join(behind) or "no filter"}; it keeps as little as'
    f' {100 * some["kept"]["processed"]["mean"]:.0f} % of the rows, and with support replay'
    f' {100 * some["kept"]["replay"]["mean"]:.0f} %'
  )
  lines.append(
    'KL(rollout || policy) is finite everywhere; chi2 and KL(policy || rollout) are infinite where'
    ' the support was cut'
  )
  lines.append(f'{summary["seeds"]} seeds')
  return '\n'.join(f'- {text}.' for text in lines)


PARTS = (table_of_filters, table_of_bias, verdict)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """What a trainer sees by side; what it does to the gradient; order."""
  figure, axes = plt.subplots(1, 3, figsize=(18, 5.6), width_ratios=(1.2, 1.2, 0.7))
  names = [f'{kind}_{x:g}' for kind, settings in summary['settings'].items() for x in settings]
  filters = summary['filters']
  rows = np.arange(len(names))
  labels = [f'{KINDS[n.rpartition("_")[0]]} {n.rpartition("_")[2]}' for n in names]
  floor = 1e-8
  looks = (
    ('exact KL', [filters[n]['kl']['processed'] for n in names], 1, 'o'),
    ('|log-ratio|, processed', [filters[n]['abs_log_ratio']['processed'] for n in names], 2, 's'),
    ('|log-ratio|, raw', [filters[n]['abs_log_ratio']['raw'] for n in names], 0, 'x'),
    ('KL, support replayed', [filters[n]['kl']['replay'] for n in names], 4, '^'),
  )
  for label, values, colour, marker in looks:
    at = [max(x['mean'], floor) for x in values]
    style = dict(color=figures.COLOURS[colour], label=label, markersize=6)
    if label == 'exact KL':  # lies under the others where they are right
      style |= dict(markersize=11, markerfacecolor='none')
    axes[0].plot(at, rows, marker, **style)
  axes[0].set(xscale='log', xlabel=f'nats ({floor:g} and less at the left)')
  axes[0].set_title('What a trainer sees: raw log-probs see nothing', fontsize=10)
  sides = (('processed', 'processed', 2), ('raw', 'raw', 0), ('replay', 'support replayed', 4))
  for i, (side, label, colour) in enumerate(sides):
    values = [filters[n]['bias'][side] for n in names]
    axes[1].barh(
      rows + 0.27 * (i - 1),
      [x['mean'] for x in values],
      0.27,
      xerr=[x['se'] for x in values],
      color=figures.COLOURS[colour],
      label=label,
      error_kw=dict(linewidth=0.8),
    )
  axes[1].set(xlabel='|bias| / |true gradient|')
  halved, others = _halved(summary)
  axes[1].set_title(
    f'The gradient, exact: replay halves the bias of {len(halved)} of {len(halved) + len(others)}'
    ' pure filters',
    fontsize=10,
  )
  for axis in axes[:2]:
    axis.set_yticks(rows, labels, fontsize=9)
    axis.invert_yaxis()
    axis.legend(fontsize=8)
  order = summary['order']
  place = np.arange(len(order))
  for i, (when, label) in enumerate((('early', 'temperature first'), ('late', 'top-p first'))):
    values = [found[when] for found in order.values()]
    axes[2].bar(
      place + 0.36 * (i - 0.5),
      [x['mean'] for x in values],
      0.36,
      yerr=[x['se'] for x in values],
      color=figures.COLOURS[(5, 3)[i]],
      label=label,
    )
  axes[2].set_xticks(place, [f'temperature {t}' for t in order])
  axes[2].set(ylabel='mean KL, nats')
  axes[2].set_title(f'Order of processors, top-p {summary["ordered_p"]:g}', fontsize=10)
  axes[2].legend(fontsize=8)
  for axis in axes:
    axis.grid(alpha=0.2)
  return figures._save(figure, path)


def main(args: DecodingFilters) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, PARTS, draw, name='decoding_filters')


if __name__ == '__main__':
  command.run(DecodingFilters, main)
