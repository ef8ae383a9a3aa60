"""Tables, verdict and figure of the routing flips, from the summary alone."""

import math
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.reports import figures, report

# The trainer's routes: its own, the rollout's experts, the rollout's experts and weights.
SIDES = {
  'own': 'own routes',
  'experts': 'experts replayed',
  'weights': 'experts and weights replayed',
}
MARGINS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def table_by_size(summary: dict) -> str:
  """The first shape against noise."""
  shape, found = next(iter(summary['shapes'].items()))
  rows = []
  for i, size in enumerate(summary['sizes']):
    row = [f'{size:g}', report.brief(found['rate'][i]), report.brief(found['any_layer'][i])]
    row += [report.brief(found['kl'][side][i]) for side in SIDES]
    row += [report.brief(found[name][i]) for name in ('p99', 'largest', 'tail', 'flipped_times')]
    row += [report.brief(found['kept'][side][i]) for side in ('own', 'experts')]
    rows.append(row)
  head = ['noise, logits', 'routers that differ', 'tokens with a flip']
  head += [f'mean KL, {label}' for label in SIDES.values()]
  head += ['p99', 'largest', 'tail index', 'KL of flipped tokens / others']
  head += [f'TRM-max at {summary["limit"]:g} keeps', 'the same, experts replayed']
  return f'{shape} (experts:top-k), noise in all layers:\n\n{report.table(head, rows)}'


def _near(found: dict) -> int:
  """The size whose flip rate is nearest to the published 10 %."""
  return int(np.argmin([abs(math.log(max(x['mean'], 1e-9) / 0.1)) for x in found['rate']]))


def table_by_shape(summary: dict) -> str:
  """Every shape at the noise whose flip rate is nearest to 10 %, the published one."""
  rows = []
  for shape, found in summary['shapes'].items():
    i = _near(found)
    row = [shape, report.brief(found['exponent'], 3), f'{summary["sizes"][i]:g}']
    row += [report.brief(found[name][i]) for name in ('rate', 'any_layer')]
    row += [report.brief(found['kl']['own'][i]), report.brief(found['left'][i])]
    row += [report.brief(found[name][i]) for name in ('tail', 'largest')]
    rows.append(row)
  head = ['experts:top-k', 'flip rate grows like noise to the', 'at noise', 'routers that differ']
  head += [
    'tokens with a flip',
    'mean KL',
    'left with experts replayed',
    'tail index',
    'largest KL',
  ]
  return report.table(head, rows)


def table_by_layer(summary: dict) -> str:
  """Noise in one layer alone."""
  depth = summary['depth']
  names = ('own_layer', 'elsewhere', 'kl', 'per_flip', 'left')
  rows = [
    [str(n), *(report.brief(depth[name][n]) for name in names)] for n in range(len(depth['kl']))
  ]
  head = ['layer with noise', 'its routers that differ', 'flips it causes elsewhere, a token']
  head += ['mean KL', 'KL for each flip', 'left with experts replayed']
  shape = next(iter(summary['shapes']))
  return f'{shape}, noise {summary["alone"]:g} in one layer:\n\n{report.table(head, rows)}'


def verdict(summary: dict) -> str:
  """Near-ties, replay, depth."""
  shapes = summary['shapes']
  off = [s for s, f in shapes.items() if not abs(f['exponent']['mean'] - 1) <= 0.25]
  some = '; '.join(f'{s}: {report.brief(f["exponent"], 3)}' for s, f in shapes.items())
  lines = [
    f'Flip rate grows like the noise to the {some}. Claim that flips are near-ties:'
    f' {"yes" if not off else "NO for " + ", ".join(off)}'
  ]
  worst = {
    s: max(f['left'], key=lambda x: x['mean'] if math.isfinite(x['mean']) else -1)
    for s, f in shapes.items()
  }
  failing = [s for s, x in worst.items() if x['mean'] >= 0.5]
  left = {s: f['left'][_near(f)]['mean'] for s, f in shapes.items()}
  lines.append(
    f'Near 10 % of flips, replayed experts leave {100 * min(left.values()):.0f} to'
    f' {100 * max(left.values()):.0f} % of the mean KL (published: about half); over all noises at'
    f' most {100 * max(x["mean"] for x in worst.values()):.0f} %. Claim that other experts make the'
    f' mismatch: {"yes" if not failing else "NO for " + ", ".join(failing)}'
  )
  lead = summary['depth']['log_lead']
  if lead['mean'] > 2 * lead['se']:
    says = 'yes'
  else:
    says = 'NO, the last' if lead['mean'] < -2 * lead['se'] else 'not separated'
  lines.append(
    f'A flip in the first layer harms {math.exp(lead["mean"]):.2f} times as much as one in the last'
    f' (log factor {report.brief(lead)}). Claim that the first harms more: {says}'
  )
  base = next(iter(shapes.values()))
  i = _near(base)
  lines.append(
    f'At {100 * base["rate"][i]["mean"]:.0f} % of routers'
    f' {100 * base["any_layer"][i]["mean"]:.0f} % of the tokens have a flip in some of'
    f' {len(summary["depth"]["kl"])} layers; mean KL {report.brief(base["kl"]["own"][i])} nats,'
    f' tail index {report.brief(base["tail"][i])}'
  )
  own, replayed = (base['kl_exponents'][side] for side in ('own', 'experts'))
  lines.append(
    f'Below 10 % of flips mean KL grows like the noise to the {report.brief(own, 3)} with own'
    f' routes, as the number of flips does, and to the {report.brief(replayed, 3)} with'
    ' experts replayed'
  )
  kept, after = (base['kept'][side][i] for side in ('own', 'experts'))
  lines.append(
    f'Where TRM loses: there TRM-max at {summary["limit"]:g} nats keeps'
    f' {100 * kept["mean"]:.0f} % of the rows, and {100 * after["mean"]:.0f} % once experts are'
    ' replayed: mending the mismatch keeps what a mask would throw away'
  )
  lines.append(f'{summary["seeds"]} seeds, policies after the warm start alone')
  return '\n'.join(f'- {text}.' for text in lines)


PARTS = (table_by_size, table_by_shape, table_by_layer, verdict)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Flip rates; KL with and without replay; what a flip costs by layer."""
  figure, axes = plt.subplots(1, 4, figsize=(19, 4.5))
  sizes, shapes = summary['sizes'], summary['shapes']
  colours = [figures.COLOURS[i] for i in (4, 5, 1, 2, 3, 0, 6)]
  for colour, (shape, found) in zip(colours, shapes.items(), strict=False):
    label = f'{shape}: noise^{found["exponent"]["mean"]:.2f}'
    style = dict(color=colour, markersize=4)
    rates = [x['mean'] for x in found['rate']]
    axes[0].plot(sizes, rates, 'o-', label=label, **style)
    ties = [x['mean'] for x in found['margins']]
    axes[1].plot(MARGINS, ties, 'o-', label=shape, **style)
  axes[0].axhline(0.1, color='black', linewidth=0.9, linestyle=':')
  axes[0].text(sizes[0], 0.112, 'published for a 30B MoE', fontsize=8)
  axes[0].set(xscale='log', yscale='log', xlabel='noise on router scores, logits')
  axes[0].set_title('Routers that differ (experts:top-k)', fontsize=10)
  axes[0].legend(fontsize=8)
  axes[1].set(xscale='log', yscale='log', xlabel='margin, logits', ylim=(None, 1.3))
  axes[1].set_title('Share of routers with a smaller top-k margin', fontsize=10)
  axes[1].legend(fontsize=8)
  for colour, (shape, found) in zip(colours, shapes.items(), strict=False):
    for side, style in (('own', '-'), ('experts', '--')):
      curve = [x['mean'] for x in found['kl'][side]]
      label = f'{shape}: {SIDES[side]}' if colour == colours[0] else None
      axes[2].plot(sizes, curve, f'o{style}', color=colour, label=label, markersize=4)
  base, first = next(iter(shapes.items()))
  axes[2].set(xscale='log', yscale='log', xlabel='noise on router scores, logits')
  left = [100 * found['left'][_near(found)]['mean'] for found in shapes.values()]
  axes[2].set_title(
    f'Mean KL: replay leaves {min(left):.0f} to {max(left):.0f} % near 10 % flips', fontsize=10
  )
  axes[2].legend(fontsize=8)
  depth = summary['depth']
  layers = np.arange(len(depth['kl']))
  axes[3].bar(
    layers,
    [x['mean'] for x in depth['per_flip']],
    yerr=[x['se'] for x in depth['per_flip']],
    color=figures.COLOURS[1],
    width=0.6,
  )
  for n, x in enumerate(depth['elsewhere']):
    height = depth['per_flip'][n]['mean'] + depth['per_flip'][n]['se']
    axes[3].annotate(f'{x["mean"]:.2g}', (n, 1.02 * height), ha='center', fontsize=8)
  axes[3].set_xticks(layers)
  axes[3].margins(y=0.12)
  axes[3].set(xlabel='the one layer with noise', ylabel='nats')
  axes[3].set_title(
    f'Mean KL for each flip there ({base}); above: flips it causes later', fontsize=9
  )
  for axis in axes:
    axis.grid(alpha=0.2)
  return figures.save(figure, path)
