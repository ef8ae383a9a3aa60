"""Do the presets of the mismatch simulator reproduce the magnitudes they are named after?

Synthetic contexts at a realistic vocabulary: the likeliest token's confidence is mixed so that
sampled tokens fall into the published bins of confidence (arXiv 2609.32444), the others follow a
Zipf law. Each fitted preset's dial is found again by bisection in closed form (two outcomes decide
everything: the likeliest token, or any other), and the preset itself then runs at the vocabulary.

Claim under test: one dial a preset returns the number it was fitted to within the stated error. The
table of spreads by confidence is shown beside the published one; below .5 it comes out too narrow.
Falsified if: a fitted preset is off by more than its stated error in closed form, or by more than
that and four standard errors at the vocabulary. The verdict says which.
Honest caveat: one number is fitted; everything else of an engine (which tokens are hit, how shifts
cluster along a response, how they grow over training) is not. The rows 'not fitted' show how far
other published numbers of similar stacks are. Within a bin, log-odds are taken as uniform.

    python -m experiments.calibrate_presets                  # a minute or two
    python -m experiments.calibrate_presets --vocabulary 151936 --contexts 65536
"""

import dataclasses
import functools
import math
import pathlib
import typing

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.stats

from experiments.laboratory.confidences import ROWS, SHARES, SLOTS, Mix, confidences, contexts
from experiments.reports import figures, report
from trm_jax import divergences, measurements
from trm_jax.mismatch import heavy_tail, presets
from trm_jax.runs.progress import Progress
from trm_jax.training import command
from trm_jax.types import InputError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'calibrate_presets'
# Published shares of sampled tokens by the probability of the token, and of their log-odds shifts
# the robust standard deviation and the 5 % and 95 % quantiles.
BINS = ('< .5', '.5-.9', '.9-.99', '.99-.999', '> .999')
Q05 = (-0.375, -0.376, -0.453, -0.492, -0.504)
Q95 = (0.259, 0.355, 0.420, 0.472, 0.501)
# Published numbers of similar stacks that nothing was fitted to: (preset, statistic, value, where).
OTHERS = (
  ('dense_vllm_bf16', 'mean_kl', 6.4e-4, 'Qwen3-8B, SGLang (arXiv 2510.11370)'),
  ('dense_vllm_bf16', 'mean_tv', 3.7e-3, 'Qwen3-8B, tolerance set by the DC authors'),
  ('moe_vllm_bf16', 'mean_kl', 1.535e-3, 'Qwen3-30B-A3B, SGLang (arXiv 2510.11370)'),
  ('moe_vllm_bf16', 'mean_tv', 5.0e-3, 'Qwen3-30B-A3B, tolerance set by the DC authors'),
  ('moe_replayed', 'mean_kl', 5e-4, 'Qwen3-30B-A3B, vLLM (prime-rl#2808)'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibratePresets:
  """Fits every calibrated preset again and runs it at a realistic vocabulary."""

  # Receives summary.json, table.md and figure.png.
  directory: pathlib.Path = pathlib.Path('runs/calibrate_presets')
  # Which of the fitted presets to look at.
  names: tuple[presets.Name, ...] = tuple(
    name for name in typing.get_args(presets.Name) if presets.named(name).statistic
  )
  # Size of the vocabulary V.
  vocabulary: int = 32_768
  # Contexts each preset is run on; a multiple of 128.
  contexts: int = 8192
  # Exponent of the Zipf law of all tokens but the likeliest.
  zipf: float = 1.0
  # Seed of the shifts.
  seed: int = 0
  # Write into a directory that already holds results.
  resume: bool = False
  # Copy summary, table and figure to experiments/results/calibrate_presets.
  publish: bool = False

  def __post_init__(self):
    for name in self.names:
      if not presets.named(name).statistic:
        raise InputError(
          f'names holds {name!r}, a mechanism with no published number to fit: leave it out.'
        )
    if 'moe_vllm_bf16' not in self.names:
      raise InputError(f"names={self.names} must hold 'moe_vllm_bf16', whose table is shown.")
    _ = self.mix  # refuses sizes that cannot be

  @property
  def mix(self) -> Mix:
    """The contexts that presets are run on."""
    return Mix(vocabulary=self.vocabulary, contexts=self.contexts, zipf=self.zipf)


@functools.cache
def _draws(dof: float, count: int) -> np.ndarray:
  """Quantiles of a Student-t whose robust standard deviation is 1."""
  unit = measurements.ROBUST * scipy.stats.t.ppf(0.75, dof)
  return scipy.stats.t.ppf((np.arange(count) + 0.5) / count, dof) / unit


def closed_form(engine: heavy_tail.HeavyTail, *, points: int = 60, draws: int = 4000) -> dict:
  """Exact means over the mix of a constant shift of the likeliest token's log-odds; float64.

  KL(rollout || policy) and TV over the two outcomes are those over the vocabulary, because the
  other tokens keep their proportions.
  """
  c, weight = confidences(points)
  sigma = np.asarray(heavy_tail.SIGMA)[np.searchsorted(heavy_tail.EDGES, c)]
  shift = engine.scale * sigma[:, None] * _draws(engine.dof, draws)[None]
  shift = np.clip(shift, -engine.limit, engine.limit)
  odds = np.log(c)[:, None] - np.log1p(-c)[:, None]
  log_q, log_rest = -np.logaddexp(0, -(odds + shift)), -np.logaddexp(0, odds + shift)
  ratio, ratio_rest = np.log(c)[:, None] - log_q, np.log1p(-c)[:, None] - log_rest
  q, rest = np.exp(log_q), np.exp(log_rest)
  over = lambda x: float(weight @ x.mean(1))
  return {
    'mean_kl': over(-(q * ratio + rest * ratio_rest)),
    'mean_tv': over(np.abs(q - c[:, None])),
    'mean_abs_log_ratio': over(q * np.abs(ratio) + rest * np.abs(ratio_rest)),
    'spread': engine.scale,
  }


def fit(preset: presets.Preset, *, points: int = 60, draws: int = 4000) -> float:
  """The scale at which closed form gives the published value; it grows with the scale."""
  low, high = 1e-3, 30.0
  engine = preset.engine.heavy_tail
  for _ in range(20):  # to a relative 1e-5
    scale = math.sqrt(low * high)
    engine = dataclasses.replace(engine, scale=scale)
    value = closed_form(engine, points=points, draws=draws)[preset.statistic]
    low, high = (scale, high) if value < preset.published else (low, scale)
  return math.sqrt(low * high)


@functools.partial(jax.jit, static_argnames='engine')
def _run(scores, key, engine):
  """(kl, tv, log_ratio, policy log-prob) [ROWS, SLOTS] of one call, tokens drawn by the engine."""
  noise, draw = jax.random.split(key)
  keys = jax.random.split(noise, (ROWS, SLOTS))
  shifted = heavy_tail.shift_hooks(engine).logits(scores, keys)
  tokens = jax.random.categorical(draw, shifted)
  found = divergences.statistics(scores, shifted, tokens)
  return found.kl, found.tv, found.policy_logp - found.rollout_logp, found.policy_logp


def run(args: CalibratePresets, preset: presets.Preset, progress, done: int) -> dict:
  """What the preset does at the vocabulary: means with errors, table by confidence, exceedance."""
  rng, key = np.random.default_rng(args.seed), jax.random.key(args.seed)
  parts = []
  for number in range(args.contexts // (ROWS * SLOTS)):
    scores = contexts(args.mix, number, rng)
    parts.append(_run(scores, jax.random.fold_in(key, number), preset.engine.heavy_tail))
    progress.update(done + number + 1)
  kl, tv, log_ratio, logp = (np.concatenate([np.ravel(p[i]) for p in parts]) for i in range(4))
  shape = lambda x: jnp.asarray(x)[None]
  table = measurements.confidence_table(shape(logp), shape(log_ratio), shape(logp) < jnp.inf)
  share = np.asarray(table.share)[1:]
  ratios = np.asarray(table.sigma)[1:] / np.asarray(heavy_tail.SIGMA)[1:]
  spread = float((share * ratios).sum() / share.sum())
  # Error of a median absolute deviation of a Student-t with 3 degrees of freedom: 1.24 / sqrt(n).
  found = {'spread': {'mean': spread, 'se': 1.24 * spread / math.sqrt(args.contexts * share.sum())}}
  for name, x in (('mean_kl', kl), ('mean_tv', tv), ('mean_abs_log_ratio', np.abs(log_ratio))):
    found[name] = {'mean': float(x.mean()), 'se': float(x.std(ddof=1) / math.sqrt(x.size))}
  levels = np.geomspace(1e-4, 5, 48)
  found['exceed'] = [float((np.abs(log_ratio) > level).mean()) for level in levels]
  found['levels'] = levels.tolist()
  found['max_kl'] = float(kl.max())
  found['table'] = {
    name: np.asarray(getattr(table, name)).tolist()
    for name in ('share', 'median', 'sigma', 'q05', 'q95')
  }
  return found


def summarise(args: CalibratePresets) -> dict:
  """Fits and runs every preset that has a magnitude."""
  names = args.names
  calls = args.contexts // (ROWS * SLOTS)
  progress = Progress(calls * len(names), 'calibrate_presets')
  found = {}
  for index, name in enumerate(names):
    preset = presets.named(name)
    here = closed_form(preset.engine.heavy_tail)
    found[name] = {
      'scale': preset.engine.heavy_tail.scale,
      'fitted_scale': fit(preset),
      'statistic': preset.statistic,
      'published': preset.published,
      'stated_error': preset.error,
      'closed_form': here,
      'error': here[preset.statistic] / preset.published - 1,
      'at_vocabulary': run(args, preset, progress, index * calls),
    }
  progress.close()
  about = f'--vocabulary {args.vocabulary} --contexts {args.contexts}'
  return {
    'command': f'python -m experiments.calibrate_presets {about} --publish',
    'vocabulary': args.vocabulary,
    'contexts': args.contexts,
    'presets': found,
  }


def table_of_fits(summary: dict) -> str:
  """Every fitted preset with what it reproduces."""
  rows = []
  for name, p in summary['presets'].items():
    seen = p['at_vocabulary'][p['statistic']]
    rows.append(
      [
        name,
        f'{p["scale"]:g}',
        f'{p["fitted_scale"]:.3f}',
        p['statistic'].replace('_', ' '),
        f'{p["published"]:.3g}',
        f'{p["closed_form"][p["statistic"]]:.3g} ({p["error"]:+.1%})',
        f'{seen["mean"]:.3g} ± {seen["se"]:.1g}',
        f'{p["at_vocabulary"]["max_kl"]:.2g}',
      ]
    )
  head = ['preset', 'scale', 'fitted again', 'statistic', 'published', 'exact on the mix (error)']
  head += [f'at V = {summary["vocabulary"]}', 'largest KL']
  return report.table(head, rows)


def table_of_spreads(summary: dict) -> str:
  """The published table of an MoE beside the preset's, by the probability of the sampled token."""
  found = summary['presets']['moe_vllm_bf16']['at_vocabulary']['table']
  published = {'share': SHARES, 'sigma': heavy_tail.SIGMA, 'q05': Q05, 'q95': Q95}
  rows = []
  for i, label in enumerate(BINS):
    pairs = (f'{published[k][i]:.3g} / {found[k][i]:.3g}' for k in published)
    rows.append([label, *pairs])
  head = ['token probability', 'share', 'robust sigma', '5 %', '95 %']
  return 'Log-odds shifts of sampled tokens, published / `moe_vllm_bf16`:\n\n' + report.table(
    head, rows
  )


def _others(summary: dict):
  return [row for row in OTHERS if row[0] in summary['presets']]


def table_of_others(summary: dict) -> str:
  """Published numbers that nothing was fitted to."""
  rows = []
  for name, statistic, value, where in _others(summary):
    here = summary['presets'][name]['closed_form'][statistic]
    rows.append(
      [
        name,
        statistic.replace('_', ' '),
        f'{value:.3g}',
        f'{here:.3g}',
        f'{here / value:.2f}',
        where,
      ]
    )
  head = ['preset', 'not fitted', 'published', 'here', 'ratio', 'measured on']
  return report.table(head, rows)


def verdict(summary: dict) -> str:
  """Whether every preset does what it says."""
  off = []
  for name, p in summary['presets'].items():
    seen = p['at_vocabulary'][p['statistic']]
    far = abs(seen['mean'] - p['published']) - 4 * seen['se']
    if abs(p['error']) > p['stated_error'] or far > p['stated_error'] * p['published']:
      off.append(name)
  worst = max(summary['presets'].items(), key=lambda item: abs(item[1]['error']))
  ratios = [
    summary['presets'][name]['closed_form'][statistic] / value
    for name, statistic, value, _ in _others(summary)
  ]
  spread = f'Numbers that nothing was fitted to are met within factors {min(ratios):.2f} to'
  spread += f' {max(ratios):.2f}.'
  if off:
    return f'Off by more than the stated error: {", ".join(off)}. {spread}'
  return (
    f'All {len(summary["presets"])} presets return their number within the stated error; the worst'
    f' is {worst[0]} ({worst[1]["error"]:+.1%}). {spread}'
  )


def draw_figure(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Spread by confidence, exceedance of |log-ratio|, and published against reproduced."""
  figure, axes = plt.subplots(1, 3, figsize=(14, 4))
  moe = summary['presets']['moe_vllm_bf16']['at_vocabulary']['table']
  place = np.arange(len(BINS))
  grey, red, green = figures.COLOURS[0], figures.COLOURS[1], figures.COLOURS[4]
  for key, marker, published in (('sigma', 'o', heavy_tail.SIGMA), ('q95', '^', Q95)):
    label = {'sigma': 'robust sigma', 'q95': '95 % quantile'}[key]
    axes[0].plot(place, published, marker, color=grey, label=f'{label}, published')
    axes[0].plot(place, moe[key], '-', color=red, label=f'{label}, moe_vllm_bf16')
  axes[0].set(title='Log-odds shift of an MoE', xlabel='probability of the sampled token')
  axes[0].set(ylabel='nats', ylim=(0, None))
  axes[0].set_xticks(place, BINS)
  axes[0].legend(fontsize=8)
  names = list(summary['presets'])
  for index, name in enumerate(names):
    seen = summary['presets'][name]['at_vocabulary']
    positive = [max(x, 1e-9) for x in seen['exceed']]
    colour = figures.COLOURS[index % len(figures.COLOURS)]
    axes[1].loglog(seen['levels'], positive, color=colour, label=name, linewidth=1.4)
  axes[1].set(title='Share of tokens beyond', xlabel='|log-ratio|, nats', ylim=(1e-4, 1))
  axes[1].legend(fontsize=7)
  errors = [summary['presets'][n]['error'] for n in names]
  seen = [summary['presets'][n]['at_vocabulary'] for n in names]
  kind = [summary['presets'][n]['statistic'] for n in names]
  published = [summary['presets'][n]['published'] for n in names]
  at = [s[k]['mean'] / p - 1 for s, k, p in zip(seen, kind, published, strict=True)]
  error = [s[k]['se'] / p for s, k, p in zip(seen, kind, published, strict=True)]
  rows = np.arange(len(names))
  axes[2].errorbar(
    at, rows, xerr=error, fmt='o', color=red, label=f'at V = {summary["vocabulary"]}'
  )
  axes[2].plot(errors, rows, 'x', color=green, label='exact on the mix')
  stated = max(p['stated_error'] for p in summary['presets'].values())
  axes[2].axvspan(-stated, stated, color=grey, alpha=0.15, label='stated error')
  axes[2].set_yticks(rows, names)
  axes[2].set(title='Reproduced / published - 1')
  axes[2].legend(fontsize=8)
  return figures.save(figure, path)


def main(args: CalibratePresets) -> None:
  """Fits, runs, prints, draws."""
  command.check_directory(args)
  summary = summarise(args)
  parts = (table_of_fits, table_of_spreads, table_of_others, verdict)
  to = RESULTS if args.publish else None
  report.write(args.directory, summary, [f(summary) for f in parts], draw_figure, publish_to=to)


if __name__ == '__main__':
  command.run(CalibratePresets, main)
