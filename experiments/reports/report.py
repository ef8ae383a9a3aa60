"""From the metrics of arms x seeds to numbers one may quote: mean, standard error, paired gaps."""

import json
import math
import pathlib
import shutil
import statistics
from collections.abc import Callable, Sequence

Metrics = dict[tuple[str, int], list[dict[str, float]]]


def mean_error(values: Sequence[float]) -> dict[str, float]:
  """Mean and standard error of independent values; the error is NaN for a single one."""
  values = list(values)
  error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
  return {'mean': statistics.fmean(values), 'se': error}


def known_mean_error(values: Sequence[float]) -> dict[str, float]:
  """`mean_error` of the values that are there: no row may have been of some length."""
  values = [x for x in values if not math.isnan(x)]
  return mean_error(values) if values else {'mean': math.nan, 'se': math.nan}


def shown(value: dict[str, float], sign: bool = False) -> str:
  """'0.603 ± 0.021' from a mean and its error; the mean alone where one seed gives no error."""
  mean, error = f'{value["mean"]:{"+" if sign else ""}.3f}', value['se']
  return mean if error is None or math.isnan(error) else f'{mean} ± {error:.3f}'


def brief(value: dict[str, float], digits: int = 2) -> str:
  """'0.0084 ± 0.0006' in significant digits; the mean alone without an error, '-' for NaN."""
  if math.isnan(value['mean']):
    return '-'
  error = '' if math.isnan(value['se']) else f' ± {value["se"]:.1g}'
  return f'{value["mean"]:.{digits}g}{error}'


def last(metrics: list[dict[str, float]], name: str) -> float:
  """The last recorded value of a metric."""
  return next(row[name] for row in reversed(metrics) if name in row)


def tail_mean(metrics: list[dict[str, float]], name: str, share: float = 1 / 3) -> float:
  """Mean of a metric over the last `share` of the steps."""
  end = metrics[-1]['step']
  tail = [row[name] for row in metrics if name in row and row['step'] > end * (1 - share)]
  tail = [x for x in tail if not math.isnan(x)]
  return statistics.fmean(tail) if tail else math.nan


def curve(metrics: Metrics, arm: str, name: str) -> dict[str, list[float]]:
  """Mean over seeds of a metric at each step where it was recorded, with its standard error."""
  runs = [rows for (a, _), rows in metrics.items() if a == arm]
  steps = [row['step'] for row in runs[0] if name in row]
  points = {s: [] for s in steps}
  for rows in runs:
    for row in rows:
      if name in row and row['step'] in points and not math.isnan(row[name]):
        points[row['step']].append(row[name])
  kept = [s for s in steps if points[s]]
  stats = [mean_error(points[s]) for s in kept]
  return {
    'step': kept,
    'mean': [round(x['mean'], 5) for x in stats],
    'se': [round(x['se'], 5) for x in stats],
  }


def paired(values: dict[str, dict[int, float]], arm: str, other: str) -> dict[str, float]:
  """Mean and standard error over seeds of arm - other."""
  return mean_error([values[arm][s] - values[other][s] for s in sorted(values[arm])])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A markdown table with aligned columns."""
  cells = [list(header), *[list(r) for r in rows]]
  widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
  line = lambda r: '| ' + ' | '.join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + ' |'
  rule = '|' + '|'.join('-' * (w + 2) for w in widths) + '|'
  return '\n'.join([line(cells[0]), rule, *[line(r) for r in cells[1:]]])


def write_json(path: pathlib.Path, value: dict | list) -> pathlib.Path:
  """Strict JSON (NaN as null), written whole or not at all."""

  def strict(x):
    if isinstance(x, dict):
      return {k: strict(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
      return [strict(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x

  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix('.tmp')
  partial.write_text(json.dumps(strict(value), indent=1, allow_nan=False) + '\n')
  partial.replace(path)
  return path


def write(
  directory: pathlib.Path,
  summary: dict,
  parts: Sequence[str],
  draw: Callable[[dict, pathlib.Path], pathlib.Path],
  *,
  publish_to: pathlib.Path | None,
) -> None:
  """Writes summary.json, table.md (`parts`, printed too) and figure.png; copies them if asked."""
  write_json(directory / 'summary.json', summary)
  text = '\n\n'.join(parts)
  (directory / 'table.md').write_text(f'{text}\n')
  figure = draw(summary, directory / 'figure.png')
  print(f'\n{text}\n\nFigure: {figure}')
  if publish_to:
    publish(directory, publish_to)


def publish(directory: pathlib.Path, results: pathlib.Path) -> None:
  """Copies summary, table and figure of a run to the folder that is committed."""
  results.mkdir(parents=True, exist_ok=True)
  for name in ('summary.json', 'table.md', 'figure.png'):
    shutil.copyfile(directory / name, results / name)
  print(f'Published to {results}')
