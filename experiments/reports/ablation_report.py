"""What the cells of `ablate_mismatch` say: shares of the sources, tables, verdict, figure."""

import math
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.reports import figures, report
from trm_jax.measurements import attribution
from trm_jax.mismatch import heavy_tail

# Labels of the responses; those of the enumerated policy start with `true`.
RESPONSES = {
  'kl': 'mean KL, nats',
  'log_kl': 'log10 mean KL',
  'max_kl': 'largest KL, nats',
  'tv': 'mean TV',
  'log_ratio': 'mean |log-ratio|, nats',
  'rejected': 'share TRM-max rejects',
  'true_kl': 'enumerated: mean KL, nats',
  'true_error': 'enumerated: surrogate error',
  'true_bias': 'enumerated: gradient bias, relative',
  'true_bias_trm': 'enumerated: the same under TRM-max',
}
SEEN, TRUE_KL, TRUE, MASKED = 'kl', 'true_kl', 'true_bias', 'true_bias_trm'
# What the two heat maps show.
MAPS = {
  SEEN: 'What a trainer sees: mean KL, nats',
  TRUE: 'The truth: relative bias of the gradient',
}


def _value(found, errors, name: str, *at) -> dict[str, float]:
  return {
    'mean': float(getattr(found, name)[at]),
    'se': float(getattr(errors, name)[at]),
  }


def _ranking(by_seed: np.ndarray, sources) -> dict:
  """The source with the largest mean share, and its paired lead over the next."""
  order = np.argsort(-by_seed.mean(0))
  lead = by_seed[:, order[0]] - by_seed[:, order[1]]
  return dict(first=sources[order[0]], second=sources[order[1]], lead=report.mean_error(lead))


def summarise(sources, design: np.ndarray, cells: dict[tuple[int, int], dict]) -> dict:
  """All numbers of the tables, the figure and the verdict."""
  seeds = sorted({seed for seed, _ in cells})
  at = lambda name: np.array(
    [[cells[s, c]['responses'][name] for s in seeds] for c in range(len(design))]
  )
  responses, left_out = {}, []
  for name in RESPONSES:
    values = at(name)
    if not np.isfinite(values).all():
      left_out.append(name)
      continue
    found, errors = attribution.bootstrap(design, values)
    each = np.stack([attribution.attribute(design, x).shapley for x in values.T])
    by_source = {
      source: {
        k: _value(found, errors, k, i) for k in ('shapley', 'share', 'alone', 'last', 'main')
      }
      for i, source in enumerate(sources)
    }
    pairs = {
      f'{a} x {b}': _value(found, errors, 'pairs', i, j)
      for i, a in enumerate(sources)
      for j, b in enumerate(sources)
      if i < j
    }
    whole = {k: _value(found, errors, k) for k in ('total', 'mixed', 'synergy')}
    responses[name] = whole | dict(
      sources=by_source,
      pairs=pairs,
      ranking=_ranking(each, sources),
      cells=[report.mean_error(x) for x in values],
    )
  number = {tuple(on): c for c, on in enumerate(design.tolist())}
  single = {}
  for i, source in enumerate(sources):
    only = tuple(k == i for k in range(len(sources)))
    if only in number:
      single[source] = _profile([cells[s, number[only]]['measured'] for s in seeds])
  every = number.get(tuple([True] * len(sources)))
  if every is not None:
    single['all'] = _profile([cells[s, every]['measured'] for s in seeds])
  return {
    'command': 'python -m experiments.ablate_mismatch --publish',
    'sources': list(sources),
    'seeds': seeds,
    'design': design.astype(int).tolist(),
    'responses': responses,
    'left_out': left_out,
    'objective': report.mean_error(at('true_objective')[0]),
    'profiles': single,
  }


def _profile(measured: list[dict]) -> dict:
  """The shape of a mismatch, averaged over seeds: tail, weights, shifts by confidence."""

  def mean(of):
    values = [v for v in (of(m) for m in measured) if v is not None and math.isfinite(v)]
    return report.mean_error(values) if values else dict(mean=math.nan, se=math.nan)

  found = {
    'tail index of KL': mean(lambda m: m['tail']['kl']['index']),
    'ESS': mean(lambda m: m['sequences']['ess']),
    'cancellation': mean(lambda m: m['sequences']['cancellation']['mean']),
    'Pearson': mean(lambda m: m['correlation']),
  }
  if 'flips' in measured[0]:
    found['router flips'] = mean(lambda m: float(np.mean(m['flips']['by_layer'])))
    found['tokens with a flip'] = mean(lambda m: m['flips']['any_layer'])
  found['sigma of the shift'] = [
    mean(lambda m, b=b: m['shift']['sigma'][b]) for b in range(len(heavy_tail.EDGES) + 1)
  ]
  return found


# Tables.


def _number(x: dict[str, float], *, percent: bool = False) -> str:
  """'1.2e-03 ± 4e-04', or in percent '46 ± 5'."""
  if math.isnan(x['mean']):
    return '-'
  if percent:
    return f'{100 * x["mean"]:.0f} ± {100 * x["se"]:.0f}'
  return f'{x["mean"]:.2g} ± {x["se"]:.1g}'


def _plain(x: dict[str, float]) -> str:
  return '-' if math.isnan(x['mean']) else f'{x["mean"]:.3g}'


def table_of_shares(summary: dict) -> str:
  """Shapley shares in percent of what all sources do together."""
  sources = summary['sources']
  rows = []
  for name, found in summary['responses'].items():
    shares = [_number(found['sources'][s]['share'], percent=True) for s in sources]
    mixed = _number(found['mixed'], percent=True)
    rows.append([RESPONSES[name], _number(found['total']), *shares, mixed])
  header = ['response', 'all on minus all off', *(f'{s}, %' for s in sources), 'interactions, %']
  return report.table(header, rows)


def table_of_sources(summary: dict) -> str:
  """Each source alone, and what curing it alone would bring."""
  shown = [n for n in (SEEN, 'rejected', TRUE, MASKED) if n in summary['responses']]
  rows = []
  for source in summary['sources']:
    row = [source]
    for name in shown:
      found = summary['responses'][name]['sources'][source]
      row += [_number(found['alone']), _number(found['last'])]
    rows.append(row)
  header = ['source']
  for name in shown:
    label = RESPONSES[name]
    header += [f'{label}: alone', 'cured last']
  return report.table(header, rows)


def table_of_shapes(summary: dict) -> str:
  """What each source's mismatch looks like to a monitor."""
  profiles = summary['profiles']
  names = [n for n in next(iter(profiles.values())) if n != 'sigma of the shift']
  edges = heavy_tail.EDGES
  bins = [f'p <= {edges[0]:g}', *(f'> {e:g}' for e in edges)]
  rows = [
    [
      source,
      *(_plain(found[n]) for n in names),
      ' / '.join(_plain(x) for x in found['sigma of the shift']),
    ]
    for source, found in profiles.items()
  ]
  return report.table(['only', *names, f'sigma of the log-odds shift, {" / ".join(bins)}'], rows)


# Verdict.


def _lead(found: dict) -> str:
  """'decoding (61 ± 4 % of it), ahead of staleness by ..., separated'."""
  ranking = found['ranking']
  first, lead = ranking['first'], ranking['lead']
  share = _number(found['sources'][first]['share'], percent=True)
  clear = 'separated' if abs(lead['mean']) > 2 * lead['se'] else 'NOT separated'
  return (
    f'{first} with {share} %, ahead of {ranking["second"]} by {_number(lead)} ({clear} at 2 s.e.)'
  )


def verdict(summary: dict) -> str:
  """What the numbers say."""
  responses, sources = summary['responses'], summary['sources']
  lines = []
  if TRUE in responses:
    lines.append(f'Most harmful, by the true gradient bias: {_lead(responses[TRUE])}')
  if TRUE in responses and TRUE_KL in responses:
    same = responses[TRUE]['ranking']['first'] == responses[TRUE_KL]['ranking']['first']
    lines.append(
      f'Mean KL of the same policy names {_lead(responses[TRUE_KL])}. Claim that KL finds the'
      f' culprit: {"yes" if same else "NO"}'
    )
  if SEEN in responses:
    lines.append(f'Mean KL of the trained policy names {_lead(responses[SEEN])}')
  if 'log_kl' in responses and SEEN in responses:
    lines.append(
      'Interactions make'
      f' {_number(responses[SEEN]["mixed"], percent=True)} % of the variance of mean KL over the'
      f' cells and {_number(responses["log_kl"]["mixed"], percent=True)} % of that of log KL: logs'
      ' of a sum saturate, whichever source comes first'
    )
    largest = max(responses[SEEN]['pairs'].items(), key=lambda x: abs(x[1]['mean']))
    lines.append(f'Largest pair in mean KL: {largest[0]}, {_number(largest[1])} nats')
  if 'rejected' in responses:
    lines.append(
      f'TRM-max at {summary["options"]["limit"]:g} nats rejects'
      f' {_number(responses["rejected"]["total"], percent=True)} % more of the rows with all on:'
      f' {_lead(responses["rejected"])}'
    )
  if TRUE in responses and MASKED in responses:
    worse = [
      s
      for s in sources
      if responses[MASKED]['sources'][s]['alone']['mean']
      > responses[TRUE]['sources'][s]['alone']['mean']
    ]
    raw, masked = (responses[n]['cells'][-1] for n in (TRUE, MASKED))
    lines.append(
      f'Where TRM loses: in expectation its gradient is farther from the true one than without a'
      f' mask under {", ".join(worse) or "no source"} alone (all on: {_number(masked)} with,'
      f' {_number(raw)} without)'
    )
  if summary['left_out']:
    lines.append('Not finite in some cell, left out: ' + ', '.join(summary['left_out']))
  lines.append(
    f'{len(summary["seeds"])} seeds, {len(summary["design"])} cells each; shares are of these'
    ' strengths, not of the sources as such'
  )
  return '\n'.join(f'- {line}.' for line in lines)


PARTS = (table_of_shares, table_of_sources, table_of_shapes, verdict)


# Figure.


def _heat(axis, summary: dict, name: str):
  """Cells as a map: some sources down, the others across."""
  sources, design = summary['sources'], np.array(summary['design'], bool)
  down = len(sources) // 2
  grid = np.full((2**down, 2 ** (len(sources) - down)), math.nan)
  weights = lambda n: 1 << np.arange(n)
  for on, value in zip(design, summary['responses'][name]['cells'], strict=True):
    grid[on[:down] @ weights(down), on[down:] @ weights(len(sources) - down)] = value['mean']
  image = axis.imshow(grid, cmap='magma_r', aspect='auto')
  names = lambda few: [
    '\n'.join(s for i, s in enumerate(few) if c >> i & 1) or 'none' for c in range(2 ** len(few))
  ]
  axis.set_xticks(range(grid.shape[1]), names(sources[down:]), fontsize=7, rotation=0)
  axis.set_yticks(range(grid.shape[0]), names(sources[:down]), fontsize=7)
  low, high = np.nanmin(grid), np.nanmax(grid)
  for (row, column), value in np.ndenumerate(grid):
    if not math.isnan(value):
      dark = value > low + 0.55 * (high - low)
      style = dict(ha='center', va='center', fontsize=7, color='white' if dark else 'black')
      axis.text(column, row, f'{value:.2g}', **style)
  axis.set_title(f'{MAPS[name]}, every combination of sources', fontsize=10)
  plt.colorbar(image, ax=axis, fraction=0.03, pad=0.01)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Left: the cells, by what a trainer sees and by the truth. Right: shares of every response."""
  sources, responses = summary['sources'], summary['responses']
  figure = plt.figure(figsize=(15, 7.6))
  layout = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
  for row, name in enumerate(n for n in MAPS if n in responses):
    _heat(figure.add_subplot(layout[row, 0]), summary, name)
  axis = figure.add_subplot(layout[:, 1])
  height = 0.8 / len(sources)
  for i, source in enumerate(sources):
    values = [found['sources'][source]['share'] for found in responses.values()]
    axis.barh(
      [r + (i - (len(sources) - 1) / 2) * height for r in range(len(responses))],
      [100 * v['mean'] for v in values],
      height,
      xerr=[100 * v['se'] for v in values],
      color=figures.COLOURS[i % len(figures.COLOURS)],
      label=source,
      error_kw=dict(linewidth=0.8),
    )
  labels = [
    f'{RESPONSES[name]}\n{_number(found["total"])};'
    f' interactions {100 * found["mixed"]["mean"]:.0f} %'
    for name, found in responses.items()
  ]
  axis.set_yticks(range(len(responses)), labels, fontsize=8)
  axis.invert_yaxis()
  low, high = axis.get_xlim()
  axis.set_xlim(max(low, -60), min(high, 130))
  axis.axvline(0, color='black', linewidth=0.8)
  axis.set_xlabel('Shapley share of what all sources do together, % (bars: 1 s.e. over seeds)')
  first = responses[TRUE]['ranking']['first'] if TRUE in responses else '-'
  axis.set_title(f'Whose doing is it? True harm names {first}', fontsize=10)
  axis.legend(fontsize=9, loc='lower right')
  axis.grid(axis='x', alpha=0.2)
  return figures.save(figure, path)
