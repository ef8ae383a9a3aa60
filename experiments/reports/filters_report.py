"""Tables, verdict and figure of the decoding filters, from the summary alone."""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.reports import figures, report

SIDES = {'processed': 'processed', 'raw': 'raw', 'replay': 'support replayed'}
KINDS = {'top_k': 'top-k', 'top_p': 'top-p', 'min_p': 'min-p', 'temperature': 'temperature'}
# Below this mean |log-ratio| or KL, nats, is rounding.
ROUNDING = 1e-3


def table_of_filters(summary: dict) -> str:
  """What a trainer sees."""
  rows = []
  for name, found in summary['filters'].items():
    row = [
      name.replace('_', ' '),
      report.brief(found['kl']['processed']),
      report.brief(found['kl']['replay']),
    ]
    row += [report.brief(found['abs_log_ratio'][side]) for side in SIDES]
    row += [report.brief(found['tv']), report.brief(found['ess'])]
    row += [report.brief(found['kept'][side]) for side in ('processed', 'replay')]
    row += [report.brief(found['kept_k2'][side]) for side in ('processed', 'raw')]
    rows.append([*row, report.brief(found['chi2_infinite'])])
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
      report.brief(found['true_kl']),
      *(report.brief(found['bias'][side]) for side in (*SIDES, 'trm')),
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
    f' an exact KL of {report.brief(kl)}. Claim that they hide every filter:'
    f' {"yes" if hides else "NO"}'
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
    + ', '.join(f'{report.brief(x)} at temperature {t}' for t, x in gaps.items())
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
  return figures.save(figure, path)
