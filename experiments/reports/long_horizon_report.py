"""Tables, verdict and figure of experiments.long_horizon, from its summary alone."""

import pathlib

import matplotlib.pyplot as plt

from experiments.laboratory import grid
from experiments.reports import figures, report

RULES = ('max', 'mean', 'budget', 'prefix max', 'prefix budget')
BY_T = ('max, by T', 'mean, by T', 'budget, by T')
QUARTERS = range(1, 5)
# Colour and line of each rule.
LOOKS = {
  'max': (1, '-'),
  'mean': (0, '-'),
  'budget': (4, '-'),
  'prefix max': (1, ':'),
  'prefix budget': (4, ':'),
  'max, by T': (1, '--'),
  'mean, by T': (0, '--'),
  'budget, by T': (4, '--'),
}


def _share(summary, T, rule, what) -> float:
  x = summary['kept'][str(T)]['rules'][rule][what]['mean']
  return float('nan') if x is None else x


def table_of_kept(summary: dict) -> str:
  """Rows and tokens kept at every T, before RL."""
  rows = []
  for T, found in summary['kept'].items():
    for rule in (*RULES, *BY_T):
      x = found['rules'][rule]
      ends = [f'length_q{i}' for i in (1, 4)] + [f'position_q{i}' for i in (1, 4)]
      shares = [report.shown(x[k]) for k in ('rows', 'tokens')]
      rows.append([T, rule, *shares, *(grid.shown_share(x[k]) for k in ends)])
  header = ['T', 'rule', 'rows kept', 'tokens kept', 'rows: shortest quarter', '... longest']
  return report.table([*header, 'tokens: first quarter of a row', '... last'], rows)


def table_of_noise(summary: dict) -> str:
  """What the noise is at every T, and the limits that accept the target there."""
  rows = [
    [
      T,
      f'{found["length"]["mean"]:.0f}',
      f'{found["entropy"]["mean"]:.3f}',
      f'{found["mean_kl"]["mean"]:.2e}',
      *(f'{found["limits"][name]["mean"]:.2g}' for name in ('max', 'mean', 'budget')),
    ]
    for T, found in summary['kept'].items()
  ]
  limits = [f'limit by T: {name}' for name in ('max KL', 'mean KL', 'chi2 budget')]
  return report.table(['T', 'mean length', 'entropy, nats', 'mean KL, nats', *limits], rows)


def claims(summary: dict) -> dict[str, bool]:
  """The claims and whether the numbers bear them out."""
  Ts = [int(T) for T in summary['kept']]
  first, last = min(Ts), max(Ts)
  loss = lambda rule: _share(summary, first, rule, 'rows') - _share(summary, last, rule, 'rows')
  off = {r: max(abs(_share(summary, T, r, 'rows') - summary['target']) for T in Ts) for r in BY_T}
  tokens = lambda rule: _share(summary, last, rule, 'tokens')
  late = lambda rule: (
    _share(summary, last, rule, 'position_q1') - _share(summary, last, rule, 'position_q4')
  )
  trained = list(summary['settings'])[-1]
  of = lambda *pair: grid.effect(summary, trained, *pair)
  return {
    'a fixed limit on the maximum loses rows with T': loss('max') >= 0.1,
    'a fixed budget loses rows with T': loss('budget') >= 0.1,
    'a fixed limit on the mean does not': abs(loss('mean')) <= 0.1,
    'limits by T keep their share': all(x <= 0.1 for x in off.values()),
    'prefix forms keep more tokens': all(
      tokens(f'prefix {rule}') > tokens(rule) for rule in ('max', 'budget')
    ),
    '... and fewer late ones': all(late(r) > 0 for r in RULES[3:]),
    f'at {trained} the fixed maximum costs accuracy': grid.below(of('max', 'no mask')),
    '... which a limit by T gives back': grid.above(of('max, by T', 'max')),
  }


def verdict(summary: dict) -> str:
  """What the numbers say."""
  Ts = list(summary['kept'])
  across = lambda rule, what='rows': ' / '.join(f'{_share(summary, T, rule, what):.2f}' for T in Ts)
  grown = lambda name: ' / '.join(f'{summary["kept"][T]["limits"][name]["mean"]:.2g}' for T in Ts)
  lines = [
    grid.claims(claims(summary)),
    f'{len(summary["seeds"])} seeds; rows kept at T = {" / ".join(Ts)} before RL, limits fixed at'
    f' the shortest: ' + ', '.join(f'{rule} {across(rule)}' for rule in RULES[:3]),
    'Tokens kept: ' + ', '.join(f'{rule} {across(rule, "tokens")}' for rule in RULES),
    'Tokens kept by prefix max in the last quarter of a row: '
    + across('prefix max', 'position_q4')
    + ', by prefix budget '
    + across('prefix budget', 'position_q4'),
    f'Limits that keep {summary["target"]:g} at their own T: max KL {grown("max")} nats, mean KL'
    f' {grown("mean")}, chi2 budget {grown("budget")}; they keep '
    + ', '.join(f'{rule} {across(rule)}' for rule in BY_T),
  ]
  for name, table in summary['settings'].items():
    start = summary['start'][name]['mean']
    harm = grid.effect(summary, name, 'no mask', 'no mismatch')
    gap = table['no mismatch']['accuracy_sampled']['mean'] - start
    tested = [e for e in summary['effects'] if e['setting'] == name]
    found = [f'{e["arm"]} minus {e["other"]} {grid.quoted(e)}' for e in tested if grid.separated(e)]
    kept = table['max']['kept']
    lines += [
      f'{name}, {summary["steps"]} steps: start {start:.3f}, without mismatch +{gap:.3f}; the noise'
      f' without a mask {grid.quoted(harm)}',
      f'{name}: separated are ' + (', '.join(found) or 'no effects'),
      f'{name}: in the last third of training the fixed maximum keeps {grid.shown_share(kept)} of'
      f' the rows ({_share(summary, name.split()[-1], "max", "rows"):.3f} before RL)',
    ]
  return '\n'.join(f'- {line}.' for line in lines)


def parts(summary: dict) -> list[str]:
  """Everything that is printed, in order."""
  tables = table_of_noise(summary), table_of_kept(summary)
  return [*tables, grid.table_of_arms(summary), grid.table_of_effects(summary), verdict(summary)]


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """What is kept against T, length and position; accuracy of every arm."""
  Ts, settings = [int(T) for T in summary['kept']], summary['settings']
  figure, axes = plt.subplots(2, 3, figsize=(14, 8))
  for rule, (colour, line) in LOOKS.items():
    style = dict(color=figures.COLOURS[colour], linestyle=line, marker='o', markersize=3)
    over = lambda what, rule=rule: [_share(summary, T, rule, what) for T in Ts]
    if 'prefix' not in rule:
      axes[0, 0].plot(Ts, over('rows'), label=rule, **style)
    if 'by T' in rule:
      continue
    axes[0, 1].plot(Ts, over('tokens'), label=rule, **style)
    for axis, what in ((axes[0, 2], 'position'), (axes[1, 0], 'length')):
      if what == 'position' or 'prefix' not in rule:
        at = [_share(summary, Ts[-1], rule, f'{what}_q{i}') for i in QUARTERS]
        axis.plot(QUARTERS, at, label=rule, **style)
  axes[0, 0].axhline(summary['target'], color='black', linewidth=0.8)
  axes[0, 0].set(title='Rows kept, noise alone', ylabel='share of rows')
  axes[0, 1].set(title=f'Tokens kept, limits of T = {Ts[0]}', ylabel='share of tokens')
  for axis in axes[0, :2]:
    axis.set(xlabel='response slots T', xscale='log')
    axis.set_xticks(Ts, [f'{T}' for T in Ts])
    axis.minorticks_off()
  axes[0, 2].set(title=f'Tokens kept at T = {Ts[-1]}', xlabel='quarter of a row')
  axes[1, 0].set(title=f'Rows kept at T = {Ts[-1]}', xlabel='quartile of response length')
  for axis in (axes[0, 2], axes[1, 0]):
    axis.set_xticks(QUARTERS)
  for axis in (*axes[0], axes[1, 0]):
    axis.set_ylim(-0.03, 1.03)
    axis.legend(fontsize=7)
    axis.grid(alpha=0.2)
  for axis, (name, table) in zip(axes[1, 1:], settings.items(), strict=True):
    for place, (arm, found) in enumerate(table.items()):
      colour = figures.COLOURS[LOOKS.get(arm, (5, ''))[0]]
      seen, mean = found['by_seed'], found['accuracy_sampled']
      axis.plot(seen, [-place] * len(seen), 'o', markersize=3, alpha=0.35, color=colour)
      error = mean['se'] or 0
      error = 0 if error != error else error
      axis.errorbar(mean['mean'], -place, xerr=error, marker='D', capsize=3, color=colour)
    axis.axvline(summary['start'][name]['mean'], color='black', linestyle=':', linewidth=1)
    axis.set_yticks([-i for i in range(len(table))], list(table), fontsize=8)
    axis.set(title=f'RL at {name}', xlabel='final accuracy, sampled (dotted: start)')
    axis.grid(alpha=0.2)
  return figures.save(figure, path)
