"""Does TRM-max need the exact KL, or would an estimate of it keep the same sequences?

Contexts of a realistic vocabulary meet an engine with published noise. In each the exact KL stands
beside what cheaper records give: k1, k2, k3 of the sampled token; the KL of its two outcomes (that
token, or any other); certified bounds from the K likeliest tokens. Rows of 64 to 8192 contexts are
then kept or rejected by the largest value: with every estimator at the same nominal limit, and each
at the limit that keeps the same share of rows, set on other rows.

Claims under test: (1) at the same nominal limit the sampled estimators wrongly accept more than a
fifth of the rows that exact KL rejects; (2) setting their limits for the same acceptance does not
mend it: which rows are kept still differs, for more than a fifth of the rejected ones; (3) bounds
from 64 tokens decide more than 99 % of the rows, and never wrongly.
Falsified if: (1, 2) k2 or k3 stays below a fifth at every length of some noise under which exact
KL rejects any row; (3) fewer rows are decided or one is decided wrongly. The verdict says which.
Honest caveat: contexts are independent draws from one bank for each seed, so long rows of a seed
share contexts and differ less than real ones; limits are calibrated for rows of an eighth of the
bank at most. The presets shift the likeliest token alone, which
suits two outcomes and K = 1; the third noise disturbs every score alike and does not.

    python -m experiments.estimators --publish                   # 5 seeds, minutes
    python -m experiments.estimators --vocabulary 151936 --contexts 65536 --rows 4000   # larger
"""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from experiments import calibrate_presets, command, figures, report, sweep
from trm_jax import brackets, divergences
from trm_jax.mismatch import heavy_tail, presets
from trm_jax.types import InputError

KEEP = (1, 4, 16, 64)
SAMPLED = ('k1', 'k2', 'k3', 'binary')
ESTIMATORS = (*SAMPLED, *(f'{side} K={k}' for k in KEEP for side in ('lower', 'upper')))
EVERY = 'every score'
# Limits are calibrated for rows of at most this part of the bank.
SHARED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimators(sweep.Cells):
  """False accepts and rejects of cheaper TRM-max criteria against the exact one, by length.

  Ends with tables, a figure and a verdict. An interrupted run goes on with --resume.
  """

  directory: pathlib.Path = pathlib.Path('runs/estimators')
  # Engines with published noise ...
  names: tuple[presets.Name, ...] = ('moe_vllm_bf16', 'dense_vllm_bf16')
  # ... and one with normal noise of this standard deviation on every score, nats.
  every_score: float = 0.1
  # Size of the vocabulary V.
  vocabulary: int = 4096
  # Contexts in the bank of a seed; a multiple of 128.
  contexts: int = 8192
  # Rows that are judged, and as many to set limits.
  rows: int = 1000
  # Contexts of a row, rising.
  lengths: tuple[int, ...] = (64, 256, 1024, 4096, 8192)
  # The nominal limit of TRM-max, nats.
  limit: float = 0.05
  # Share of the rows that calibrated limits keep, exact KL's as well.
  target: float = 0.7
  # The first seed.
  seed: int = 0

  def __post_init__(self):
    super().__post_init__()
    for name in self.names:
      if not presets.named(name).statistic:
        raise InputError(f'names: {name!r} is a mechanism, with no noise of its own to draw.')
    _ = self.mix  # refuses sizes that cannot be
    if self.vocabulary <= max(KEEP):
      raise InputError(f'vocabulary={self.vocabulary} must be above {max(KEEP)}.')
    if sorted(set(self.lengths)) != list(self.lengths) or not self.lengths or self.lengths[0] < 1:
      raise InputError(f'lengths={self.lengths} must rise, e.g. 64 1024.')
    if self.rows < 20:
      raise InputError(f'rows={self.rows} must be at least 20.')
    for name in ('limit', 'every_score'):
      if not 0 < getattr(self, name) < math.inf:
        raise InputError(f'{name}={getattr(self, name)} must be > 0 and finite.')
    if not 0 < self.target < 1:
      raise InputError(f'target={self.target} must lie strictly between 0 and 1.')

  @property
  def mix(self) -> calibrate_presets.CalibratePresets:
    """The published mix of confidences."""
    return calibrate_presets.CalibratePresets(vocabulary=self.vocabulary, contexts=self.contexts)

  @property
  def noises(self) -> tuple[str, ...]:
    """Names of all noises."""
    return (*self.names, EVERY)


def two_outcomes(policy_logp, rollout_logp):
  """KL(rollout || policy) between 'this token' and 'any other', nats; a lower bound of the KL."""
  rest = lambda logp: jnp.log(-jnp.expm1(jnp.minimum(logp, -1e-7)))
  q, other = jnp.exp(rollout_logp), jnp.exp(rest(rollout_logp))
  found = q * (rollout_logp - policy_logp) + other * (rest(rollout_logp) - rest(policy_logp))
  return jnp.maximum(found, 0)


@functools.partial(jax.jit, static_argnames=('preset', 'scale'))
def estimates(scores, key, *, preset: str | None, scale: float):
  """{estimator: [..]} of contexts with these policy scores, beside the exact KL; one token each."""
  noise, draw = jax.random.split(key)
  if preset is None:
    rollout = scores + scale * jax.random.normal(noise, scores.shape)
  else:
    keys = jax.random.split(noise, scores.shape[:-1])
    rollout = heavy_tail.hooks(presets.named(preset).engine.heavy_tail).logits(scores, keys)
  tokens = jax.random.categorical(draw, rollout)
  found = divergences.statistics(scores, rollout, tokens)
  log_ratio = found.policy_logp - found.rollout_logp
  values = {
    'exact': found.kl,
    'k1': -log_ratio,
    'k2': divergences.k2(log_ratio),
    'k3': divergences.k3(log_ratio),
    'binary': two_outcomes(found.policy_logp, found.rollout_logp),
  }
  for k in KEEP:
    bounds, _ = brackets.bounds(scores, brackets.top_k(rollout, k))
    values |= {f'lower K={k}': bounds.lower, f'upper K={k}': bounds.upper}
  return values


def bank(args: Estimators, noise: str, seed: int) -> dict[str, np.ndarray]:
  """{estimator: [contexts]} of one seed."""
  rng, key = np.random.default_rng(seed), jax.random.key(seed)
  size = calibrate_presets.ROWS * calibrate_presets.SLOTS
  preset = None if noise == EVERY else noise
  parts = []
  for number in range(args.contexts // size):
    scores = calibrate_presets._contexts(args.mix, number, rng)
    at = jax.random.fold_in(key, number)
    parts.append(estimates(scores, at, preset=preset, scale=args.every_score))
  parts = jax.device_get(parts)
  return {name: np.concatenate([p[name].ravel() for p in parts]) for name in parts[0]}


def largest(values: np.ndarray, rng, rows: int, lengths) -> np.ndarray:
  """[lengths, estimators, rows]: the largest of each estimator [estimators, contexts] in each row.

  Shorter rows are the beginnings of longer ones.
  """
  found = np.empty((len(lengths), len(values), rows), np.float32)
  for row in range(rows):
    chosen = values[:, rng.integers(values.shape[1], size=lengths[-1])]
    running, start = np.full(len(values), -np.inf), 0
    for i, length in enumerate(lengths):
      running = np.maximum(running, chosen[:, start:length].max(-1))
      found[i, :, row], start = running, length
  return found


def rates(keep: np.ndarray, exact: np.ndarray) -> dict[str, float]:
  """Of rows that exact KL rejects, the share accepted; of those it keeps, the share rejected."""
  over = lambda x, of: float((x & of).sum() / of.sum()) if of.any() else math.nan
  return {
    'kept': float(keep.mean()),
    'false_accept': over(keep, ~exact),
    'false_reject': over(~keep, exact),
  }


def judge(args: Estimators, values: dict[str, np.ndarray], seed: int) -> dict:
  """Rates by length and estimator, at the nominal limit and at calibrated ones."""
  rng = np.random.default_rng(10_000 + seed)
  names = ['exact', *ESTIMATORS]
  stacked = np.stack([values[name] for name in names])
  judged, setting = (largest(stacked, rng, args.rows, args.lengths) for _ in range(2))
  found = {}
  for i, length in enumerate(args.lengths):
    limits = np.quantile(setting[i], args.target, axis=-1)[:, None]
    here = {}
    for how, limit in (('nominal', args.limit), ('calibrated', limits)):
      keep = judged[i] <= limit
      here[how] = {name: rates(keep[n], keep[0]) for n, name in enumerate(names)}
    keep = judged[i] <= args.limit
    at = lambda name, keep=keep: keep[names.index(name)]
    here['decided'] = {
      str(k): float((at(f'lower K={k}') == at(f'upper K={k}')).mean()) for k in KEEP
    }
    here['wrong'] = {
      str(k): float(((at(f'upper K={k}') & ~keep[0]) | (~at(f'lower K={k}') & keep[0])).mean())
      for k in KEEP
    }
    found[str(length)] = here
  kl = values['exact']
  token = {
    name: {
      'mean': float(x.mean()),
      'error': float(np.sqrt(np.mean((x - kl) ** 2)) / kl.mean()),
    }
    for name, x in values.items()
  }
  return {'rows': found, 'tokens': token, 'largest': float(kl.max())}


def measure(args: Estimators) -> dict:
  """Every (seed, noise)."""

  def prepare(seed):
    return lambda name: judge(args, bank(args, _noise(name), seed), seed)

  names = [_file(noise) for noise in args.noises]
  return sweep.measure(args, names, range(args.seed, args.seed + args.seeds), prepare)


def _file(noise: str) -> str:
  return noise.replace(' ', '-')


def _noise(name: str) -> str:
  return name.replace('-', ' ')


# What the cells say.

RATES = ('kept', 'false_accept', 'false_reject')


def summarise(args: Estimators, cells: dict) -> dict:
  """Rates by noise, length and estimator."""
  noises = {}
  # In longer rows the bank's one largest value decides, and no limit keeps the target.
  longest = args.contexts // SHARED
  known = lambda x, length, how: math.nan if how == 'calibrated' and length > longest else x
  for noise in args.noises:
    at = lambda of, noise=noise: _known([c for (_, n), c in cells.items() if n == _file(noise)], of)
    rows = {}
    for length in map(str, args.lengths):
      rows[length] = {
        how: {
          name: {
            key: at(
              lambda c, t=length, h=how, n=name, k=key: known(c['rows'][t][h][n][k], int(t), h)
            )
            for key in RATES
          }
          for name in ('exact', *ESTIMATORS)
        }
        for how in ('nominal', 'calibrated')
      }
      for key in ('decided', 'wrong'):
        rows[length][key] = {
          str(k): at(lambda c, t=length, y=key, k=k: c['rows'][t][y][str(k)]) for k in KEEP
        }
    noises[noise] = {
      'rows': rows,
      'tokens': {
        name: {key: at(lambda c, n=name, k=key: c['tokens'][n][k]) for key in ('mean', 'error')}
        for name in ('exact', *ESTIMATORS)
      },
      'largest': at(lambda c: c['largest']),
    }
  own = ('limit', 'target', 'vocabulary', 'contexts', 'rows')
  about = {name: getattr(args, name) for name in own}
  return about | {'lengths': list(args.lengths), 'noises': noises}


def _known(found: list[dict], of) -> dict[str, float]:
  """Mean and error over the seeds in which there is anything to speak of."""
  return sweep.known([of(cell) for cell in found])


def _shown(x: dict[str, float], digits: int = 2) -> str:
  if math.isnan(x['mean']):
    return '-'
  error = '' if math.isnan(x['se']) else f' ± {x["se"]:.1g}'
  return f'{x["mean"]:.{digits}g}{error}'


def table_of_tokens(summary: dict) -> str:
  """The estimators token by token."""
  head = ['mean, nats (RMS error / mean KL)', *summary['noises']]
  rows = []
  for name in ('exact', *ESTIMATORS):
    row = [name]
    for found in summary['noises'].values():
      x = found['tokens'][name]
      row.append(f'{_shown(x["mean"])} ({x["error"]["mean"]:.2g})')
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
  return figures._save(figure, path)


def main(args: Estimators) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, PARTS, draw, name='estimators')


if __name__ == '__main__':
  command.run(Estimators, main)
