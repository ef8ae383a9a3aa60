"""Tables, verdict and figure of `token_level_failure`, from its summary alone."""

import math
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.reports import figures, report, tightness_report

METHODS = ('no clip', 'PPO-clip', 'no leak', 'TRM-max')
KINDS = ('sparse', 'subtree', 'dense')
MASKS = ('none', 'random', 'token', 'prefix', 'sequence', 'sequence mean')
FRACTIONS = (0.3, 0.5, 0.7, 0.9)
SHOWN = 0.7
AVERAGE = 1e-3  # the paper's limit of TRM-Avg, nats
SIGNED = ('no mismatch', 'weak', 'strong', 'cancelling')
CRITERIA = ('signed mean', 'mean k3', 'max k2', 'mean KL', 'max KL', 'random')


def clip_table(summary: dict) -> str:
  rows = []
  for strength, r in summary['clip'].items():
    cells = [
      strength,
      *(tightness_report.shown(r[k]) for k in ('mean_kl', 'leak', 'leak_high', 'leak_gradient')),
    ]
    cells += [
      tightness_report.number(r['largest_ratio_of_all']),
      tightness_report.shown(r['square']),
    ]
    rows.append(
      [
        *cells,
        *(tightness_report.shown(r[name]['bias']) for name in METHODS),
        tightness_report.shown(r['accepted']),
      ]
    )
  header = ['mismatch', 'KL of responses', 'leak', 'of it ratio > 1.2', 'gradient leaked']
  header += ['largest leaking ratio', 'mean square weight', *(f'bias, {m}' for m in METHODS)]
  return report.table([*header, 'TRM keeps'], rows)


def below(rollouts: float | None) -> str:
  """A number of rollouts; None is any number."""
  return 'any number' if rollouts is None else tightness_report.number(rollouts)


def mask_table(summary: dict, fraction: float = SHOWN) -> str:
  rows = []
  for kind, found in summary['masks'].items():
    for name, by_fraction in found['masks'].items():
      r = by_fraction[f'{fraction:g}']
      cells = [
        kind,
        name,
        *(tightness_report.shown(r[k]) for k in ('bias', 'cosine', 'error', 'noise', 'pull')),
      ]
      rows.append([*cells, '' if name == 'none' else below(r['pays_below'])])
  header = ['mismatch', f'mask, {fraction:.0%} of tokens kept', 'gradient bias', 'cosine']
  header += ['abs(Error_M)', 'noise of one rollout', 'pull on the worst token']
  return report.table([*header, 'pays below N rollouts'], rows)


def average_table(summary: dict) -> str:
  found = summary['averages']
  names = ('sequence_kl', 'max_kl', 'harm', 'harm_of_visit', 'b_star', 'pinsker_marginal')
  rows = [
    [share, *(tightness_report.shown(r[k]) for k in names)]
    for share, r in found['by_share'].items()
  ]
  header = ['share of the rare prefix', 'KL of responses', 'largest KL', 'worst abs(Error)']
  first = report.table([*header, 'per visit', 'B*/2', 'PM-KL/2'], rows)
  rows = [
    [total, tightness_report.shown(r['mean']), tightness_report.shown(r['max'])]
    for total, r in found['dilution'].items()
  ]
  header = ['length of response', f'harm kept by mean KL <= {AVERAGE:g}', 'by max KL']
  return first + '\n\n' + report.table(header, rows)


def signed_table(summary: dict) -> str:
  rows = []
  for kind, r in summary['signed'].items():
    cells = [
      kind,
      *(tightness_report.shown(r[k]) for k in ('accepted', 'accepted_by_max', 'beyond')),
    ]
    cells += [tightness_report.shown(r['mean_largest_kl'])]
    rows.append([*cells, *(tightness_report.shown(r['left'][k]) for k in CRITERIA)])
  header = ['mismatch', 'signed mean accepts', 'max KL accepts', 'accepted beyond the limit']
  header += ['their largest KL', *(f'error left, {k}' for k in CRITERIA)]
  return report.table(header, rows)


def sides(gap: dict[str, float]) -> str:
  """Which of two is smaller, two standard errors apart."""
  if gap['se'] is None or math.isnan(gap['se']) or abs(gap['mean']) <= 2 * gap['se']:
    return 'no different from'
  return 'less than' if gap['mean'] < 0 else 'MORE than'


def verdict(summary: dict) -> str:
  """What the numbers say."""
  clip, found = summary['clip'], summary['masks']
  strong, bias = clip[max(clip, key=float)], lambda r, name: r[name]['bias']['mean']
  leaks = strong['leak']['mean'] > 0
  helps = bias(strong, 'no leak') > bias(strong, 'PPO-clip')
  lines = [
    '1. PPO-clip '
    + (
      f'leaks: at the strongest mismatch {strong["leak"]["mean"]:.0%} of its gradient weight lies'
      f' outside [0.8, 1.2], with ratios up to {strong["largest_ratio_of_all"]:.3g} (only ratio >'
      ' 1.2 with A < 0 is unbounded; ratio < 0.8 with A > 0 weighs less than 0.8).'
      if leaks
      else 'does NOT leak.'
    )
    + f' Gradient bias relative to the true gradient: PPO-clip {bias(strong, "PPO-clip"):.2f}, no'
    f' clip {bias(strong, "no clip"):.2f}, clip without the leak {bias(strong, "no leak"):.2f},'
    f' TRM-max {bias(strong, "TRM-max"):.2f} (keeps {strong["accepted"]["mean"]:.0%}). '
    + (
      'The leak is not what biases PPO-clip: removing it makes the bias larger.'
      if helps
      else 'Removing the leak makes the bias smaller.'
    )
  ]
  for kind in KINDS:
    r = found[kind]
    at = lambda name, r=r: r['masks'][name][f'{SHOWN:g}']['bias']['mean']
    lines.append(
      f'2. {kind}: at {SHOWN:.0%} of tokens kept the gradient bias is {at("none"):.2f} without a'
      f' mask, {at("token"):.2f} token mask, {at("prefix"):.2f} prefix, {at("sequence"):.2f}'
      f' sequence, {at("random"):.2f} random. Over all shares the sequence mask leaves'
      f' {sides(r["sequence_minus_token"])} the token mask'
      f' ({report.shown(r["sequence_minus_token"], sign=True)}), the prefix mask'
      f' {sides(r["prefix_minus_token"])} the token mask, and the sequence mask'
      f' {sides(r["sequence_minus_random"])} a random one.'
    )
  each = {
    kind: {m: found[kind]['masks'][m][f'{SHOWN:g}'] for m in MASKS if m != 'random'}
    for kind in KINDS
  }
  best = [min(row, key=lambda m, row=row: row[m]['bias']['mean']) for row in each.values()]
  pays = [below(row['sequence']['pays_below']) for row in each.values()]
  lines.append(
    f'2. Smallest bias: {", ".join(f"{k} {m}" for k, m in zip(KINDS, best, strict=True))}. '
    + (
      'In expectation no mask beats none: masks pay by less noise alone, the sequence mask below'
      f' {", ".join(pays)} rollouts.'
      if set(best) == {'none'}
      else 'Some mask lowers the bias itself.'
    )
  )
  pulls = [
    found[kind]['masks'][name][f'{SHOWN:g}']['pull']['mean']
    for kind in KINDS
    for name in ('token', 'prefix', 'sequence')
  ]
  lines.append(
    f'2. The masked gradient moves the worst token at most {max(pulls):.2g} times as fast as the'
    ' unmasked one: no mask repairs the largest divergence, token or sequence alike.'
  )
  rows = summary['averages']['by_share']
  first, last = rows[max(rows, key=float)], rows[min(rows, key=float)]
  fades = last['harm']['mean'] < 1e-3 * first['harm']['mean']
  steady = last['harm_of_visit']['mean'] > 0.5 * first['harm_of_visit']['mean']
  lines.append(
    f'3. KL of responses falls from {tightness_report.number(first["sequence_kl"]["mean"])} to'
    f' {tightness_report.number(last["sequence_kl"]["mean"])} while the largest KL stays'
    f' {last["max_kl"]["mean"]:.3g}. The worst error over the batch'
    + (' fades with it' if fades else ' does NOT fade with it')
    + f' (to {tightness_report.number(last["harm"]["mean"])}); of a response that visits the prefix'
    f' it {"stays" if steady else "does NOT stay"} {last["harm_of_visit"]["mean"]:.2g}. '
    + 'So an average hides the harm of a response, not that of the batch; only bounds on the max'
    f' ({tightness_report.number(last["pinsker_marginal"]["mean"])}, PM-KL/2) do not see it fade.'
  )
  dilution = summary['averages']['dilution']
  ends = dilution[min(dilution, key=int)], dilution[max(dilution, key=int)]
  lines.append(
    f'3. Padded with agreeing tokens to {max(dilution, key=int)} the same responses keep'
    f' {ends[1]["mean"]["mean"]:.0%} of their harm under mean KL <= {AVERAGE:g}'
    f' ({ends[0]["mean"]["mean"]:.0%} unpadded), {ends[1]["max"]["mean"]:.0%} under max KL.'
  )
  for kind in SIGNED[1:]:
    r = summary['signed'][kind]
    left = {k: x['mean'] for k, x in r['left'].items()}
    lines.append(
      f'4. {kind}: a signed mean within {summary["options"]["geometric"]:.0%} accepts'
      f' {r["accepted"]["mean"]:.0%} of responses, {r["beyond"]["mean"]:.0%} of them with a token'
      f' beyond {summary["options"]["max_kl"]:g} nats (their largest KL'
      f' {r["mean_largest_kl"]["mean"]:.2g} on average, all responses'
      f' {r["mean_largest_kl_all"]["mean"]:.2g}). Error left at that share: signed mean'
      f' {left["signed mean"]:.2f}, max KL {left["max KL"]:.2f}, random {left["random"]:.2f}'
      f' ({"worse" if left["signed mean"] > left["max KL"] else "NOT worse"} than max KL).'
    )
  return '\n'.join(lines)


def draw_figure(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Leak and bias; averages; signed means; masks by kind of mismatch."""
  figure, axes = plt.subplots(2, 3, figsize=(15, 8.6))
  colours = figures.COLOURS

  def line(axis, x, values, colour, label, **style):
    mean = np.array([v['mean'] for v in values])
    error = np.array([v['se'] or 0 for v in values])
    axis.errorbar(x, mean, yerr=error, color=colour, label=label, linewidth=1.7, **style)

  axis, clip = axes[0, 0], summary['clip']
  x = [k for k in clip if float(k) > 0]
  at = [float(k) for k in x]
  for n, name in zip((0, 1, 2, 4), METHODS, strict=True):
    line(axis, at, [clip[k][name]['bias'] for k in x], colours[n], f'bias, {name}')
  line(axis, at, [clip[k]['leak'] for k in x], 'black', 'leak: weight outside', linestyle=':')
  axis.set(title='1. PPO-clip leaks', xlabel='mismatch, logits', xscale='log', ylim=(0, 1.1))

  axis, rows = axes[0, 1], summary['averages']['by_share']
  at = [float(k) for k in rows]
  for key, colour, label in (
    ('max_kl', colours[1], 'largest KL of a token'),
    ('sequence_kl', colours[5], 'KL of responses'),
    ('harm', 'black', 'worst |Error|'),
    ('harm_of_visit', colours[4], '... per visit of the prefix'),
    ('pinsker_marginal', colours[2], 'PM-KL/2'),
  ):
    style = '--' if key == 'max_kl' else '-'
    values = [r[key] for r in rows.values()]
    line(axis, at, values, colour, label, marker='.', linestyle=style, zorder=3 - (style == '-'))
  axis.set(title='3. The average fades, the harm of a visit does not', xscale='log', yscale='log')
  axis.set_xlabel('probability of the rare prefix')

  axis, kinds = axes[0, 2], SIGNED[1:]
  shown_here = ('signed mean', 'max k2', 'max KL', 'random')
  for n, name in enumerate(shown_here):
    values = [summary['signed'][kind]['left'][name] for kind in kinds]
    place = np.arange(len(kinds)) + 0.2 * (n - 1.5)
    axis.bar(
      place,
      [v['mean'] for v in values],
      0.18,
      yerr=[v['se'] or 0 for v in values],
      color=colours[(1, 2, 4, 6)[n]],
      label=name,
    )
  beyond = [summary['signed'][kind]['beyond']['mean'] for kind in kinds]
  axis.plot(range(len(kinds)), beyond, 'kD', markersize=5, label='of its accepted: beyond max KL')
  axis.set(title='4. Error left, same share accepted', xticks=range(len(kinds)))
  axis.set_xticklabels(kinds)
  axis.set_ylim(0, 1.4)

  for axis, kind in zip(axes[1], KINDS, strict=True):
    for n, name in zip((0, 6, 1, 5, 4, 3), MASKS, strict=True):
      values = [summary['masks'][kind]['masks'][name][f'{f:g}']['bias'] for f in FRACTIONS]
      line(axis, FRACTIONS, values, colours[n], name, marker='.')
    axis.set(title=f'2. Masks, {kind} mismatch', xlabel='share of tokens kept')
    axis.set_ylim(bottom=0)
  axes[1, 0].set_ylabel('gradient bias / true gradient')
  for axis in axes.flat:
    axis.grid(alpha=0.2)
    axis.legend(fontsize=7)
  return figures.save(figure, path)
