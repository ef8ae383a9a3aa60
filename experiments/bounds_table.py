"""What do the paper's error bounds say, from 10 to 10^6 tokens, and how much sharper can they be?

Recomputes the paper's comparison table and its quoted figures, sets ours beside them, and says of
each bound whether any policy could ever be certified with it.

Claim under test: every printed figure is right to its last digit.
Falsified if: one of them is not; the table of quoted figures says which.
Honest caveat: bounds are statements about the largest divergence over all reachable contexts. No
batch of rollouts shows that number, so nothing here certifies a training run.

    python -m experiments.bounds_table                       # 4096 tokens, the paper's settings
    python -m experiments.bounds_table --delta 0.05          # the limit of the paper's experiments
"""

import dataclasses
import functools
import math
import pathlib

import jax
import matplotlib.pyplot as plt

from experiments.reports import figures, report
from trm_jax import bounds
from trm_jax.bounds import sharp
from trm_jax.training import command

RESULTS = pathlib.Path(__file__).parent / 'results' / 'bounds_table'
LENGTHS = (10, 30, 100, 300, 1000, 4096, 10_000, 30_000, 100_000, 300_000, 1_000_000)
PAPER = dict(T=4096, delta=1e-4, seq_kl=0.01)
WITH_TV = dict(epsilon=5e-3, seq_tv=0.05)
# Printed by the paper for PAPER: with KL alone, and with TV beside it.
PRINTED = {
  'classical_kl': ('1677', None),
  'classical_tv': ('1677', '839'),
  'coupling': ('113.84', '79.9'),
  'pinsker_marginal_kl': ('35.0', '35.0'),
  'pinsker_marginal_tv': ('35.0', '24.7'),
  'mixed_kl': ('8.192', '8.192'),
  'mixed_tv': ('8.192', '4.096'),
  'adaptive': ('35.0', '24.7'),
  'b_star': ('8.2', '4.1'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundsTable:
  """The paper's bounds and ours in three tables and a figure; takes seconds.

  Tables: all bounds at one length (the paper's table, printed and computed, where the setting is
  the paper's); all lengths from 10 to 10^6 tokens; every figure the paper quotes.
  """

  # Receives summary.json, table.md and figure.png.
  directory: pathlib.Path = pathlib.Path('runs/bounds_table')
  # Write into the directory though it holds results.
  resume: bool = False
  # Longest response of the first table.
  length: int = PAPER['T']
  # Largest KL of a token over all contexts, nats.
  delta: float = PAPER['delta']
  # KL of whole responses, nats; at most length * delta is used.
  seq_kl: float = PAPER['seq_kl']
  # Second setting: largest TV of a token.
  epsilon: float = WITH_TV['epsilon']
  # Second setting: TV of whole responses.
  seq_tv: float = WITH_TV['seq_tv']
  # Range of the reward.
  low: float = 0.0
  high: float = 1.0
  # Copy summary, table and figure to experiments/results/bounds_table.
  publish: bool = False

  def __post_init__(self):
    bounds.horizon(self.length)
    bounds.width(self.low, self.high)
    for name in ('delta', 'seq_kl', 'epsilon', 'seq_tv'):
      bounds.real(name, getattr(self, name))


@functools.partial(jax.jit, static_argnames=('T', 'low', 'high'))
def tabulate(T: int, low: float, high: float, **known) -> sharp.Table:
  """One compiled program per length."""
  return sharp.tabulate(T=T, low=low, high=high, **known)


def row(table: sharp.Table) -> dict:
  """A table of bounds in numbers for JSON, the paper's order first; no budget, no such bound."""
  names = sorted(table.values, key=lambda name: (*PRINTED, *table.values).index(name))
  if table.sharp['budget'] > 1e30:
    names.remove('budget')
  values, vacuous, above = table.values, table.vacuous, table.above_range
  return {
    'values': {name: float(values[name]) for name in names},
    'active': table.active,
    'active_tight': table.active_tight,
    'largest_surrogate': float(table.largest_surrogate),
    'vacuous': {name: bool(vacuous[name]) for name in names},
    'above_range': {name: bool(above[name]) for name in names},
  }


def quoted() -> list[dict]:
  """Every figure the paper quotes about its bounds, printed and computed.

  `verdict`: right to the last digit printed, cut (the last digit is cut off, not rounded) or wrong.
  """
  T, pinsker = PAPER['T'], math.sqrt(PAPER['delta'] / 2)
  marginal = lambda delta: bounds.pinsker_marginal_kl(T=T, delta=delta)
  closed = lambda delta: 4 / 3 * T**1.5 * bounds.real('delta', delta)
  z = lambda epsilon: bounds.future_weights(T=T, epsilon=epsilon, delta=1e-4).sum()
  found = [
    ('sum of Coupling over positions', '4024', bounds.coupling(T=T, epsilon=pinsker) / 4 / pinsker),
    ('4 T epsilon', '115.85', 4 * T * bounds.real('epsilon', pinsker)),
    ('last position before the cap', '142', bounds.last_uncapped(epsilon=pinsker)),
    ('crossover, KL only', '1', bounds.crossover(epsilon=pinsker, delta=1e-4)),
    ('crossover, epsilon 0.005', '2', bounds.crossover(epsilon=5e-3, delta=1e-4)),
    ('PM-KL, closed', '34.953', closed(1e-4)),
    ('PM-KL and Adaptive, KL only, in the table', '35.0', marginal(1e-4)),
    ('Z(4096), KL only', '1235.5309', z(pinsker)),
    ('Z(4096), epsilon 0.005', '1235.5289', z(5e-3)),
    ('PM-KL, delta 1', '11581.6', marginal(1.0)),
    ('PM-KL without caps, delta 1', '3.495e5', closed(1.0)),
    ('linear, delta 1', '11585', 4 * T * bounds.pinsker(1.0)),
    ('Mixed-KL, delta 1, sequence KL 1', '8192', bounds.mixed_kl(T=T, delta=1.0, seq_kl=1.0)),
    ('PM-KL, delta 0.01', '1139.5', marginal(0.01)),
    ('PM-KL, delta 0.05 (experiments)', '2582', marginal(0.05)),
    ('Coupling, delta 0.05', '2588', bounds.coupling(T=T, epsilon=math.sqrt(0.025))),
    ('PM-KL, delta 0.1 (experiments)', '3657', marginal(0.1)),
  ]
  for p, kept in [
    (1e-3, {256: '0.774', 1024: '0.359', 4096: '0.0166', 8192: '2.8e-4'}),
    (1e-4, {256: '0.975', 1024: '0.903', 4096: '0.664', 8192: '0.441', 16384: '0.194'}),
  ]:
    for length, printed in kept.items():
      name = f'kept by a max criterion, p {p:g}, T {length}'
      found.append((name, printed, bounds.acceptance(T=length, p=p)))
  return [
    dict(figure=name, printed=printed, computed=float(x), verdict=judge(printed, float(x)))
    for name, printed, x in found
  ]


def judge(printed: str, computed: float) -> str:
  """'right' within half a unit of the last printed digit, 'cut' within a whole one, or 'wrong'."""
  mantissa, _, exponent = printed.partition('e')
  unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition('.')[2]))
  off, rounding = computed - float(printed), 1e-6 * abs(computed)
  if abs(off) <= unit / 2 + rounding:
    return 'right'
  return 'cut' if 0 <= off < unit else 'wrong'


def summarise(args: BoundsTable) -> dict:
  """All numbers of the tables and the figure."""
  # One compiled program per length: the same arguments in every setting.
  pinsker = float(bounds.pinsker(args.delta))
  lengths = {}
  for T in sorted({*LENGTHS, args.length}):
    seq_kl = min(args.seq_kl, T * args.delta)
    seq_tv = min(float(bounds.pinsker(seq_kl)), T * pinsker)
    kl = dict(epsilon=pinsker, delta=args.delta, seq_kl=seq_kl, seq_tv=seq_tv, budget=math.inf)
    settings = {
      'kl': kl,
      'kl_tv': kl | dict(epsilon=args.epsilon, seq_tv=args.seq_tv),
      # Every token at its limit, and the budget that the sequence KL alone would need.
      'budget_tokens': kl | dict(budget=2 * T * args.delta),
      'budget_sequence': kl | dict(budget=2 * seq_kl),
    }
    lengths[T] = {
      name: row(tabulate(T, args.low, args.high, **known)) for name, known in settings.items()
    }
  options = {k: getattr(args, k) for k in ('length', 'delta', 'seq_kl', 'epsilon', 'seq_tv')}
  default = BoundsTable()
  return {
    'command': 'python -m experiments.bounds_table --publish',
    'options': options | dict(low=args.low, high=args.high),
    'papers_setting': all(getattr(default, k) == v for k, v in options.items())
    and (args.low, args.high) == (0.0, 1.0),
    'lengths': lengths,
    'quoted': quoted(),
  }


def shown(x: float) -> str:
  """Four digits; a dash where nothing is said."""
  return '-' if not math.isfinite(x) else f'{x:.4g}' if x < 1e5 else f'{x:.2e}'


def bounds_at(summary: dict) -> str:
  """All bounds at one length, printed and computed."""
  found = summary['lengths'][summary['options']['length']]
  kl, tv, budget = found['kl'], found['kl_tv'], found['budget_tokens']

  def fires(side, name):
    if side['vacuous'][name]:
      return 'never'
    return 'can fire, above the reward range' if side['above_range'][name] else 'can fire'

  rows = []
  for name in kl['values']:
    printed = PRINTED.get(name, (None, None)) if summary['papers_setting'] else (None, None)
    cells = [f'**{name}**' if name.startswith('b_star') else name]
    for side, given in zip((kl, tv), printed, strict=True):
      cells += [given or '', shown(side['values'][name]), fires(side, name)]
    rows.append(cells)
  for name in ('budget', 'b_star_tight'):
    label = f'**{name}**, tokens within 2 delta of chi2'
    rows.append([label, '', shown(budget['values'][name]), fires(budget, name), '', '', ''])
  header = ['bound', 'KL only: paper', 'computed', 'certificate']
  return report.table(header + ['KL and TV: paper', 'computed', 'certificate'], rows)


def over_lengths(summary: dict) -> str:
  """The paper's bounds and ours from the shortest to the longest response."""
  rows = []
  for T, found in summary['lengths'].items():
    kl = found['kl']
    names = ('classical_kl', 'coupling', 'pinsker_marginal_kl', 'mixed_kl')
    cells = [f'{T}', *(shown(kl['values'][name]) for name in names)]
    cells += [f'{shown(kl["values"]["b_star"])} ({kl["active"]})']
    cells += [f'{shown(kl["values"]["b_star_tight"])} ({kl["active_tight"]})']
    for side in ('budget_tokens', 'budget_sequence'):
      cells += [f'{shown(found[side]["values"]["b_star_tight"])} ({found[side]["active_tight"]})']
    rows.append([*cells, shown(kl['largest_surrogate'])])
  header = ['T', 'Classical', 'Coupling', 'PM-KL', 'Mixed-KL', 'B*', 'ours']
  header += ['ours, chi2 budget 2 T delta', 'ours, budget 2 seq. KL', "largest L'"]
  return report.table(header, rows)


def figures_quoted(summary: dict) -> str:
  """Printed against computed."""
  rows = [
    [q['figure'], q['printed'], f'{q["computed"]:.8g}', q['verdict']] for q in summary['quoted']
  ]
  return report.table(['figure', 'paper', 'computed', 'verdict'], rows)


def verdict(summary: dict) -> str:
  """What the numbers say."""
  found = summary['lengths'][summary['options']['length']]
  kl, budget = found['kl'], found['budget_tokens']
  best, ours = kl['values']['b_star'], kl['values']['b_star_tight']
  with_budget = budget['values']['b_star_tight']
  wrong = [q['figure'] for q in summary['quoted'] if q['verdict'] == 'wrong']
  cut = [q['figure'] for q in summary['quoted'] if q['verdict'] == 'cut']
  never = [name for name in bounds.SIX if kl['vacuous'][name]]
  width = summary['options']['high'] - summary['options']['low']
  lines = [
    f'Quoted figures: {len(summary["quoted"])}, wrong: {", ".join(wrong) or "none"}; last digit cut'
    f' instead of rounded: {", ".join(cut) or "none"}.',
    f'T = {summary["options"]["length"]}, KL only: B* = {shown(best)} ({kl["active"]}), ours'
    f' {shown(ours)} ({best / ours:.2g} times smaller), with a chi-square budget'
    f' {shown(with_budget)} ({best / with_budget:.2g} times smaller). The reward spans {width:g},'
    f" and no L' exceeds {shown(kl['largest_surrogate'])}.",
    'Of the six, these can never certify anything here: ' + (', '.join(never) or 'none') + '.',
    'The chi-square columns assume more than the others: a limit on the chi-square of every'
    ' response, which a KL limit does not give.',
  ]
  return '\n'.join(lines)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Bounds against length; what can be certified with them."""
  figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), sharey=True)
  lengths = list(summary['lengths'])
  side = lambda key, name: [summary['lengths'][T][key]['values'][name] for T in lengths]
  names = [('classical_kl', 'Classical'), ('coupling', 'Coupling')]
  names += [('pinsker_marginal_kl', 'Pinsker-Marginal KL'), ('mixed_kl', 'Mixed KL')]
  for colour, (name, label) in zip(figures.COLOURS, names, strict=False):
    axes[0].plot(lengths, side('kl', name), color=colour, label=label, linewidth=1.4)
  for axis in axes:
    axis.plot(lengths, side('kl', 'b_star'), color='black', label='B*', linewidth=2.2)
  for colour, (key, label) in zip(
    figures.COLOURS[4:],
    [
      ('kl', 'ours'),
      ('budget_tokens', 'ours, chi2 budget 2 T delta'),
      ('budget_sequence', 'ours, chi2 budget 2 seq. KL'),
    ],
    strict=False,
  ):
    axes[1].plot(lengths, side(key, 'b_star_tight'), color=colour, label=label, linewidth=1.8)
  width = summary['options']['high'] - summary['options']['low']
  largest = [summary['lengths'][T]['kl']['largest_surrogate'] for T in lengths]
  for axis, title in zip(axes, ("The paper's bounds, KL only", 'B* and ours'), strict=True):
    axis.fill_between(lengths, largest, 1e9, color='0.9', label="above every L': never fires")
    axis.axhline(width, color='black', linestyle=':', linewidth=1, label='range of the reward')
    axis.set(title=title, xlabel='longest response T, tokens', xscale='log', yscale='log')
    axis.set_ylim(1e-5, 1e6)
    axis.legend(fontsize=7, loc='upper left')
    axis.grid(alpha=0.2)
  axes[0].set_ylabel(f'bound on |Error|, delta = {summary["options"]["delta"]:g} nats')
  return figures.save(figure, path)


def main(args: BoundsTable) -> None:
  """Computes, prints, draws."""
  command.check_directory(args)
  summary = summarise(args)
  parts = (bounds_at, over_lengths, figures_quoted, verdict)
  to = RESULTS if args.publish else None
  report.write(args.directory, summary, [f(summary) for f in parts], draw, publish_to=to)


if __name__ == '__main__':
  command.run(BoundsTable, main)
