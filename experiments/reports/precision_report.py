"""Tables, verdict and figure of the precision ladder, from the summary alone."""

import math
import pathlib

import matplotlib.pyplot as plt

from experiments.reports import figures, report

# Where slopes are fitted: above this multiple of the floor, and below where KL saturates.
CLEAR, SATURATED = 30, 0.1


def table_of_ladders(summary: dict) -> str:
  """Mean KL against mantissa bits and the slope."""
  rows = [
    [
      name,
      *(report.brief(x) for x in found['kl']),
      *(report.brief(found[key], 3) for key in ('slope', 'same_slope')),
    ]
    for name, found in summary['ladders'].items()
  ]
  rows.append(['weights, stochastic', *(report.brief(x) for x in summary['dithered']), '', ''])
  head = [
    'mean KL, nats',
    *(f'm = {m}' for m in summary['bits']),
    'log2 KL a bit',
    'without router flips',
  ]
  return report.table(head, rows)


def table_of_formats(summary: dict) -> str:
  """Real formats of weights, activations and cache together."""
  names = ('kl', 'same', 'flipped', 'largest', 'tail', 'tv', 'log_ratio', 'kept')
  rows = [
    [name, *(report.brief(found[key]) for key in names)]
    for name, found in summary['formats'].items()
  ]
  head = [
    'weights, activations, cache',
    'mean KL',
    'without router flips',
    'tokens after a flip',
    'largest KL',
    'tail index',
    'mean TV',
  ]
  head += ['mean |log-ratio|', f'TRM-max at {summary["limit"]:g} keeps']
  splits = '; '.join(
    f'{total} bits: ' + ', '.join(f'{n} {report.brief(x)}' for n, x in found.items())
    for total, found in summary['splits'].items()
  )
  return f'{report.table(head, rows)}\n\nThe same bits split otherwise, mean KL. {splits}.'


def table_of_moves(summary: dict) -> str:
  """Mean KL where all numbers are 2^n times as large."""
  rows = [[name, *(report.brief(x, 1) for x in found)] for name, found in summary['moved'].items()]
  return report.table(['mean KL, numbers times', *(f'2^{m}' for m in summary['moves'])], rows)


def _in_range(summary: dict) -> tuple[list[int], list[int]]:
  """(moves at which float16 beats bfloat16, those at which it loses)."""
  pairs = zip(
    summary['moves'], summary['moved']['float16'], summary['moved']['bfloat16'], strict=True
  )
  wins, losses = [], []
  for move, half, brain in pairs:
    (wins if half['mean'] < brain['mean'] else losses).append(move)
  return wins, losses


def verdict(summary: dict) -> str:
  """Slopes, float16, rounding."""
  slopes = {name: found['slope'] for name, found in summary['ladders'].items()}
  off = [
    name
    for name, x in slopes.items()
    if not abs(x['mean'] + 2) <= max(0.25, 2 * (0 if math.isnan(x['se']) else x['se']))
  ]
  lines = [
    'log2 KL a mantissa bit: '
    + ', '.join(f'{name} {report.brief(x, 3)}' for name, x in slopes.items())
    + f'. Claim of -2: {"yes" if not off else "NO for " + ", ".join(off)}'
  ]
  ratio = summary['fp16_over_bf16']
  factor = math.exp(ratio['mean'])
  lines.append(
    f'In range bfloat16 has {factor:.0f} times the KL of float16 (log factor'
    f' {report.brief(ratio, 3)}). Claim of 64 = 4^3:'
    f' {"yes" if 32 <= factor <= 128 else "NO"} (published at another level: 24)'
  )
  typical = {name: found['same_slope'] for name, found in summary['ladders'].items()}
  middle = math.exp(summary['fp16_over_bf16_same']['mean'])
  flipped = summary['formats']['float16']['flipped']
  lines.append(
    'Looked at once the means were seen: tokens before which no router chose another expert have '
    + ', '.join(f'{name} {report.brief(x, 3)}' for name, x in typical.items())
    + f' a bit and a factor of {middle:.0f} between the two formats. The mean over all tokens is of'
    f' the few others: under float16 {100 * flipped["mean"]:.2g} % of the tokens'
  )
  wins, losses = _in_range(summary)
  lines.append(
    f'float16 beats bfloat16 with numbers times 2^{min(wins, default=0)} to'
    f' 2^{max(wins, default=0)}, and loses at'
    f' {", ".join(f"2^{m}" for m in losses) or "no size tested"}: out of its range'
  )
  eight = {
    n: x for n, x in summary['formats'].items() if n in ('float8_e4m3fn', 'float8_e5m2', 'int8')
  }
  best = min(eight, key=lambda n: eight[n]['kl']['mean'])
  lines.append(
    f'Of 8 bits {best} is nearest: '
    + ', '.join(f'{n} {report.brief(x["kl"])}' for n, x in eight.items())
    + ' nats'
  )
  dither = summary['dither_factor']
  lines.append(
    f'Stochastic rounding of the weights has {dither:.2f} times the KL of nearest. Claim of 2:'
    f' {"yes" if 2 / 1.5 <= dither <= 3 else "NO"}'
  )
  worst = max(eight, key=lambda n: eight[n]['kl']['mean'])
  kept = {n: 100 * eight[n]['kept']['mean'] for n in (worst, best)}
  lines.append(
    f'Where TRM loses: under {worst} TRM-max at {summary["limit"]:g} nats keeps {kept[worst]:.0f} %'
    f' of the rows, under {best} of the same 8 bits {kept[best]:.0f} %: the choice of a format does'
    ' what no mask can'
  )
  lines.append(
    f'{summary["seeds"]} seeds; KL without rounding {summary["floor"]["mean"]:.1g} nats, slopes are'
    f' fitted from {CLEAR} times that to {SATURATED}'
  )
  return '\n'.join(f'- {text}.' for text in lines)


PARTS = (table_of_ladders, table_of_formats, table_of_moves, verdict)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Ladders, splits of the same bits, range, rounding mode."""
  figure, axes = plt.subplots(1, 3, figsize=(16, 4.8))
  bits, colours = summary['bits'], [figures.COLOURS[i] for i in (1, 2, 3, 5, 4)]
  for colour, (name, found) in zip(colours, summary['ladders'].items(), strict=True):
    axes[0].errorbar(
      bits,
      [x['mean'] for x in found['kl']],
      yerr=[x['se'] for x in found['kl']],
      fmt='o-',
      color=colour,
      markersize=4,
      label=f'{name}: {found["slope"]["mean"]:.2f} a bit'
      f' (same experts {found["same_slope"]["mean"]:.2f})',
    )
    axes[0].plot(bits, [x['mean'] for x in found['same']], ':', color=colour, linewidth=1.2)
  dithered = [x['mean'] for x in summary['dithered']]
  label = f'weights, stochastic: x {summary["dither_factor"]:.2f}'
  axes[0].plot(bits, dithered, 's--', color=colours[0], markersize=4, label=label)
  start = summary['ladders']['weights']['kl'][0]['mean']
  guide = [5 * start * 4.0 ** (bits[0] - m) for m in bits]
  axes[0].plot(bits, guide, 'k--', linewidth=1.2, label='4-fold a bit')
  axes[0].set(yscale='log', xlabel='mantissa bits', ylim=(1e-11, 3))
  axes[0].set_ylabel('mean KL, nats (dotted: same experts)')
  axes[0].set_title('What a bit buys, one component at a time', fontsize=10)
  axes[0].legend(fontsize=8, loc='lower left')
  for (total, found), colour in zip(summary['splits'].items(), (1, 5), strict=True):
    x = [int(name[1:].split('m')[0]) for name in found]
    y = [value['mean'] for value in found.values()]
    se = [value['se'] for value in found.values()]
    axes[1].errorbar(
      x, y, yerr=se, fmt='o-', color=figures.COLOURS[colour], label=f'{total} bits', markersize=5
    )
    for a, b, name in zip(x, y, found, strict=True):
      known = {'e5m10': 'float16', 'e8m7': 'bfloat16', 'e4m3': 'e4m3fn', 'e5m2': 'e5m2'}
      place = dict(textcoords='offset points', xytext=(4, 6), fontsize=8)
      axes[1].annotate(known.get(name, name), (a, b), **place)
    middle = [value['mean'] for value in summary['split_same'][total]]
    axes[1].plot(x, middle, ':', color=figures.COLOURS[colour], label=f'{total} bits, same experts')
  axes[1].axhline(
    summary['formats']['int8']['kl']['mean'], color=figures.COLOURS[4], linestyle='--', label='int8'
  )
  axes[1].set(yscale='log', xlabel='exponent bits', ylabel='mean KL, nats')
  axes[1].set_ylim(1e-8, 1)
  axes[1].set_title('The same bits: more range or more mantissa', fontsize=10)
  axes[1].legend(fontsize=8)
  for (name, found), colour in zip(summary['moved'].items(), (5, 0, 2), strict=True):
    axes[2].plot(
      summary['moves'],
      [x['mean'] for x in found],
      'o-',
      color=figures.COLOURS[colour],
      label=name,
      markersize=4,
    )
  axes[2].set(yscale='log', xlabel='numbers of the model times 2^n', ylabel='mean KL, nats')
  axes[2].set_title('Range: where float16 loses to bfloat16', fontsize=10)
  axes[2].legend(fontsize=8)
  for axis in axes:
    axis.grid(alpha=0.2)
  return figures.save(figure, path)
