"""Tables, verdict and figure of the estimators, from the summary alone."""

import math
import pathlib

import matplotlib.pyplot as plt

from experiments.reports import figures, report

KEEP = (1, 4, 16, 64)
SAMPLED = ('k1', 'k2', 'k3', 'binary')
ESTIMATORS = (
  *SAMPLED,
  *(f'{side} K={k}' for k in KEEP for side in ('lower', 'upper')),
)
RATES = ('kept', 'false_accept', 'false_reject')


def table_of_tokens(summary: dict) -> str:
  """The estimators token by token."""
  head = ['mean, nats (RMS error / mean KL)', *summary['noises']]
  rows = []
  for name in ('exact', *ESTIMATORS):
    row = [name]
    for found in summary['noises'].values():
      x = found['tokens'][name]
      row.append(f'{report.brief(x["mean"])} ({x["error"]["mean"]:.2g})')
    rows.append(row)
  return report.table(head, rows)


def table_of_rows(summary: dict, how: str) -> str:
  """False accepts / false rejects in percent, by noise and length."""
  parts = []
  for noise, found in summary['noises'].items():
    rows = []
    for name in ('exact', *ESTIMATORS):
      row = [name]
      for length in map(str, summary['lengths']):
        x = found['rows'][length][how][name]
        percent = lambda key, x=x: (
          '-' if math.isnan(x[key]['mean']) else f'{100 * x[key]["mean"]:.0f}'
        )
        row.append(' / '.join(percent(key) for key in RATES))
      rows.append(row)
    head = [noise, *(f'T = {length}' for length in summary['lengths'])]
    parts.append(report.table(head, rows))
  says = {
    'nominal': f'At the limit {summary["limit"]:g} nats for all',
    'calibrated': f'At limits that keep {100 * summary["target"]:.0f} % with each estimator',
  }
  title = f'{says[how]}: kept / false accepts / false rejects, %:'
  return '\n\n'.join([title, *parts])


def table_at_nominal(summary: dict) -> str:
  """Rates at one limit for all."""
  return table_of_rows(summary, 'nominal')


def table_at_calibrated(summary: dict) -> str:
  """Rates at limits of the same acceptance."""
  return table_of_rows(summary, 'calibrated')


def _worst(summary: dict, how: str, name: str, what: str = 'false_accept') -> dict[str, float]:
  """The largest mean rate of wrong decisions over lengths, by noise."""
  return {
    noise: max(
      (
        x
        for length in map(str, summary['lengths'])
        if math.isfinite(x := found['rows'][length][how][name][what]['mean'])
      ),
      default=math.nan,
    )
    for noise, found in summary['noises'].items()
  }


def _percents(by_noise: dict[str, float]) -> str:
  """'36 / 38 / - %'."""
  return ' / '.join('-' if math.isnan(x) else f'{100 * x:.0f}' for x in by_noise.values()) + ' %'


def verdict(summary: dict) -> str:
  """Sampled estimators, calibration, brackets."""
  lines = []
  claims = {
    'nominal': 'at the same nominal limit',
    'calibrated': 'at limits of the same acceptance',
  }
  for how, where in claims.items():
    worst = {name: _worst(summary, how, name) for name in ('k2', 'k3')}
    rates = [x for by_noise in worst.values() for x in by_noise.values() if math.isfinite(x)]
    holds = bool(rates) and min(rates) > 0.2
    shown = ', '.join(f'{name} {_percents(by_noise)}' for name, by_noise in worst.items())
    lines.append(
      f'False accepts {where}, worst length, by noise ({", ".join(summary["noises"])}): {shown}.'
      f' Claim of more than a fifth: {"yes" if holds else "NO"}'
    )
  rejects = [f'{n} {_percents(_worst(summary, "nominal", n, "false_reject"))}' for n in SAMPLED]
  lines.append(f'False rejects at the same nominal limit, likewise: {", ".join(rejects)}')
  every = [
    found['rows'][str(t)] for found in summary['noises'].values() for t in summary['lengths']
  ]
  for k in KEEP:
    decided = min(row['decided'][str(k)]['mean'] for row in every)
    wrong = max(row['wrong'][str(k)]['mean'] for row in every)
    text = (
      f'Bounds from {k} tokens decide at least {100 * decided:.1f} % of the rows, and'
      f' {"none" if wrong == 0 else f"{100 * wrong:.2g} %"} wrongly'
    )
    if k == KEEP[-1]:
      text += f'. Claim of 99 %: {"yes" if decided > 0.99 and wrong == 0 else "NO"}'
    lines.append(text)
  most = KEEP[-1]
  upper = [
    found['tokens'][f'upper K={most}']['mean']['mean'] for found in summary['noises'].values()
  ]
  lower = [
    row['nominal'][f'lower K={most}'][key]['mean']
    for row in every
    for key in ('false_accept', 'false_reject')
  ]
  wrong = max(x for x in lower if math.isfinite(x))
  lines.append(
    f'The upper bound from {most} tokens is {min(upper):.2g} to {max(upper):.2g} nats on average:'
    ' nothing is known of how the rest is shared out. The lower bound alone decides wrongly for'
    f' {100 * wrong:.2g} % of the rows that exact KL rejects, or keeps, at most'
  )
  binary = _worst(summary, 'nominal', 'binary')
  lines.append(
    'Two outcomes of the sampled token never reject wrongly, being a lower bound, and accept'
    f' wrongly up to {_percents(binary)} (worst length, by noise)'
  )
  last, first = str(summary['lengths'][-1]), str(summary['lengths'][0])
  kept = {
    noise: [100 * found['rows'][t]['nominal']['exact']['kept']['mean'] for t in (first, last)]
    for noise, found in summary['noises'].items()
  }
  lines.append(
    f'Where TRM loses: exact or not, {summary["limit"]:g} nats keeps '
    + '; '.join(
      f'{a:.0f} % at T = {first} and {b:.0f} % at {last} ({n})' for n, (a, b) in kept.items()
    )
  )
  lines.append(f'{summary["seeds"]} seeds, V = {summary["vocabulary"]}')
  return '\n'.join(f'- {text}.' for text in lines)


PARTS = (table_of_tokens, table_at_nominal, table_at_calibrated, verdict)
SHOWN = {'k1': (0, ':'), 'k2': (1, '-'), 'k3': (2, '--'), 'binary': (3, '-')}
SHOWN |= {'lower K=1': (5, '--'), 'lower K=64': (4, '-'), 'upper K=64': (4, ':')}
PANELS = (
  ('nominal', 'false_accept', 'wrongly accepted, % of rows exact KL rejects'),
  ('nominal', 'false_reject', 'wrongly rejected, % of rows exact KL keeps'),
  ('calibrated', 'false_accept', 'wrongly accepted, % of rows exact KL rejects'),
)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Wrong decisions by length; a column a noise; one limit for all above, calibrated ones below."""
  noises, lengths = summary['noises'], summary['lengths']
  shape = (len(PANELS), len(noises))
  size = (5.2 * shape[1], 3.9 * shape[0])
  figure, axes = plt.subplots(*shape, figsize=size, sharex=True, sharey=True, squeeze=False)
  titles = {
    'nominal': f'limit {summary["limit"]:g} nats for all',
    'calibrated': f'each keeps {100 * summary["target"]:.0f} %',
  }
  for row, (how, what, label) in enumerate(PANELS):
    for axis, (noise, found) in zip(axes[row], noises.items(), strict=True):
      for name, (colour, style) in SHOWN.items():
        values = [found['rows'][str(t)][how][name][what] for t in lengths]
        axis.errorbar(
          lengths,
          [100 * x['mean'] for x in values],
          yerr=[100 * (0 if math.isnan(x['se']) else x['se']) for x in values],
          fmt=f'o{style}',
          color=figures.COLOURS[colour],
          label=name,
          markersize=4,
        )
      exact = [100 * found['rows'][str(t)][how]['exact']['kept']['mean'] for t in lengths]
      axis.plot(lengths, exact, 'k-.', linewidth=1, label='kept by exact KL')
      axis.set_title(f'{noise}: {titles[how]}', fontsize=10)
      axis.set(xscale='log', ylim=(-3, 103))
      axis.grid(alpha=0.2)
    axes[row, 0].set_ylabel(label, fontsize=9)
  for axis in axes[-1]:
    axis.set_xlabel('tokens of a row, T')
    axis.set_xticks(lengths, [str(t) for t in lengths])
    axis.minorticks_off()
  axes[0, -1].legend(fontsize=8, loc='center right')
  return figures.save(figure, path)
