"""How does mismatch grow with the age of the rollout's weights, and what is left of the batch?

A policy is trained by RL on a healthy engine; its last parameters then judge rollouts of its own
parameters k optimizer steps ago, k = 0, 1, 2, 4, .. 64: one training run for each seed, its
snapshots kept. Numerics are the same on both sides, so all mismatch is drift.

Claim under test: training has a direction, so drift adds up: KL grows like k^2 and |log-ratio| and
TV like k, not like the k and k^(1/2) of a random walk; and at a fixed limit TRM-max loses long
responses first.
Falsified if: the exponent of KL is nearer to 1 than to 2, or rejected rows are no longer than the
others. The verdict says which.
Honest caveat: one task and one learning rate; exponents at small k see the optimizer's momentum,
those at large k the path of learning. Ages are in optimizer steps; a larger learning rate ages
faster.

    python -m experiments.staleness_sweep --publish               # 5 seeds, minutes
    python -m experiments.staleness_sweep --mesh 8,1 --prompts 512 --samples 16 \\
        --policy.width 1024 --policy.layers 16 ... --distributed  # a pod
"""

import dataclasses
import math
import pathlib
from typing import Annotated

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro

from experiments.laboratory import sweep
from experiments.reports import figures, report
from trm_jax import masks, measurements, policy, training
from trm_jax.mesh import sharding
from trm_jax.training import command
from trm_jax.types import InputError

# Below this KL, nats, is the rounding of decode against the full pass.
FLOOR = 1e-9
# Ages below and above which exponents are fitted apart.
BEND = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessSweep(sweep.Trained):
  """KL, TV, acceptance and effective sample size against the age of the rollout's weights.

  Ends with tables, a figure and a verdict. An interrupted run goes on with --resume.
  """

  directory: pathlib.Path = pathlib.Path('runs/staleness_sweep')
  # Optimizer steps behind; 0 is the floor of numerics.
  ages: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64)
  # Limits of TRM-max, nats, rising.
  limits: tuple[float, ...] = (0.01, 0.05, 0.2, 1.0)
  # Steps must reach back as far as the oldest weights.
  config: Annotated[training.Config, tyro.conf.arg(name='')] = dataclasses.replace(
    sweep.CONFIG, steps=72, prompts=32, warm_start=training.WarmStart(steps=200, batch=64)
  )

  def __post_init__(self):
    super().__post_init__()
    if sorted(set(self.ages)) != list(self.ages) or len(self.ages) < 3 or self.ages[0] != 0:
      raise InputError(f'ages={self.ages} must rise from 0 and name 3 or more, e.g. 0 1 8.')
    if self.ages[-1] > self.config.steps:
      raise InputError(
        f'ages={self.ages} look back further than steps={self.config.steps} RL steps; raise steps.'
      )
    if sorted(set(self.limits)) != list(self.limits) or not self.limits or self.limits[0] <= 0:
      raise InputError(f'limits={self.limits} must rise from above 0, e.g. .05 .2.')
    if self.config.epochs * self.config.minibatches > 1:
      raise InputError(
        f'epochs={self.config.epochs} and minibatches={self.config.minibatches} must be 1 here, as'
        ' ages count optimizer steps.'
      )


def cell_program(args: StalenessSweep, program: training.Program):
  """(params, old, prompts, starts, key) -> what rollouts of the old weights look like."""
  length = args.config.response_length or program.task.response_length
  edges = tuple(float(length * i // 4) for i in (1, 2, 3))

  @jax.jit
  def cell(params, old, prompts, starts, key):
    rollout = sweep.roll_out(program, old, prompts, starts, key, hooks=policy.Hooks())
    d, policy_logp, _ = sweep.compare(args.config, params, rollout)
    reward = program.task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
    valid, reward = sharding.reshard((rollout.valid, reward))
    keep = jnp.stack([masks.max_kl(limit=limit)(d, valid) for limit in args.limits])
    lengths = valid.sum(-1)
    # The longest quarter of the rows, ties in the order of the batch.
    long = jnp.argsort(jnp.argsort(lengths)) >= lengths.size * 3 // 4
    share = lambda x, of: (x & of).sum(-1) / jnp.maximum(of.sum(-1), 1)
    return measurements.measure(d, valid, policy_logp=policy_logp, lengths=edges) | {
      'kept': keep.mean(-1),
      'kept_long': share(keep, long[None]),
      'kept_short': share(keep, ~long[None]),
      'rejected_long': jnp.where(keep.all(-1), jnp.nan, share(long[None], ~keep)),
      'reward': reward.mean(),
      'length': lengths.mean(),
    }

  return cell


def measure(args: StalenessSweep) -> dict:
  """Every (seed, age)."""
  program = sweep.build(args)
  cell = cell_program(args, program)

  def prepare(seed):
    held, rows, key = sweep.trained(args, program, seed, args.ages)
    old = dict(zip(args.ages, held, strict=True))

    def one(name):
      with jax.set_mesh(program.mesh):
        return measurements.plain(jax.device_get(cell(old[0], old[int(name)], *rows, key)))

    return one

  names = [str(age) for age in args.ages]
  return sweep.measure(args, names, args.each_seed, prepare, mesh=program.mesh)


# What the cells say.

CURVES = {
  'kl': ('mean KL, nats', lambda c: c['kl']['mean']),
  'tv': ('mean TV', lambda c: c['tv']['mean']),
  'log_ratio': ('mean |log-ratio|, nats', lambda c: c['abs_log_ratio']['mean']),
  'chi2': ('mean chi2', lambda c: c['chi2']['mean']),
}


def summarise(args: StalenessSweep, cells: dict) -> dict:
  """Curves by age, growth exponents, acceptance."""
  seeds = sorted({seed for seed, _ in cells})
  late = [age for age in args.ages if age > 0]
  spans = {
    'all': late,
    'early': [a for a in late if a <= BEND],
    'late': [a for a in late if a >= BEND],
  }
  by_age = lambda of: [sweep.over_seeds(cells, str(age), of) for age in args.ages]
  exponents = {}
  for name, (_, of) in CURVES.items():
    exponents[name] = {}
    for span, ages in spans.items():
      slopes = [
        sweep.line(np.log(ages), np.log([max(of(cells[s, str(a)]), FLOOR) for a in ages]))
        for s in seeds
      ]
      exponents[name][span] = sweep.known(slopes)
  curves = {name: by_age(of) for name, (_, of) in CURVES.items()}
  curves |= {
    'largest': by_age(lambda c: c['kl']['largest']),
    'p99': by_age(lambda c: c['kl']['quantiles'][measurements.QUANTILES.index(0.99)]),
    'ess': by_age(lambda c: c['sequences']['ess']),
    'reward': by_age(lambda c: c['reward']),
  }
  kept = {
    key: [by_age(lambda c, i=i, key=key: c[key][i]) for i in range(len(args.limits))]
    for key in ('kept', 'kept_long', 'kept_short')
  }
  # A limit under which no row is rejected in most seeds says nothing about whom it rejects.
  share = [
    [_known(cells, seeds, age, lambda c, i=i: c['rejected_long'][i]) for age in args.ages]
    for i in range(len(args.limits))
  ]
  gap = lambda c, i: c['kept_short'][i] - c['kept_long'][i]
  limits = range(len(args.limits))
  gaps = [by_age(lambda c, i=i: gap(c, i)) for i in limits]
  whole = [np.mean([[gap(cells[s, str(a)], i) for a in late] for i in limits]) for s in seeds]
  return {
    'ages': list(args.ages),
    'limits': list(args.limits),
    'curves': curves,
    'exponents': exponents,
    'acceptance': kept,
    'rejected_long': share,
    'gap': gaps,
    'mean_gap': report.mean_error([float(x) for x in whole]),
  }


def _known(cells, seeds, age, of) -> dict[str, float]:
  """Mean and error over the seeds that have the number, if these are most of them."""
  values = [x for x in (of(cells[s, str(age)]) for s in seeds) if math.isfinite(x)]
  return sweep.known(values if 2 * len(values) > len(seeds) else [])


def _shown(x: dict[str, float], digits: int = 2) -> str:
  if not math.isfinite(x['mean']):
    return '-'
  error = '' if math.isnan(x['se']) else f' ± {x["se"]:.1g}'
  return f'{x["mean"]:.{digits}g}{error}'


def table_by_age(summary: dict) -> str:
  """Divergence and acceptance at each age."""
  rows = []
  for i, age in enumerate(summary['ages']):
    of = lambda name, i=i: _shown(summary['curves'][name][i])
    row = [str(age), *(of(n) for n in ('kl', 'p99', 'largest', 'tv', 'log_ratio', 'ess'))]
    row += [_shown(x[i]) for x in summary['acceptance']['kept']]
    rows.append(row)
  head = ['steps behind', 'mean KL', 'p99 KL', 'largest KL', 'mean TV', 'mean |log-ratio|', 'ESS']
  head += [f'TRM-max keeps at {x:g}' for x in summary['limits']]
  return report.table(head, rows)


def table_of_exponents(summary: dict) -> str:
  """Growth exponents, all ages and both ends."""
  rows = [
    [CURVES[name][0], *(_shown(found[span], 3) for span in ('all', 'early', 'late'))]
    for name, found in summary['exponents'].items()
  ]
  head = ['grows like k to the', 'all k', f'k <= {BEND}', f'k >= {BEND}']
  return report.table(head, rows)


def table_of_lengths(summary: dict) -> str:
  """Share of the rejected rows that are of the longest quarter; .25 if length did not matter."""
  rows = []
  for i, limit in enumerate(summary['limits']):
    rows.append([f'{limit:g}', *(_shown(x) for x in summary['rejected_long'][i][1:])])
  head = ['limit, nats', *(f'k = {age}' for age in summary['ages'][1:])]
  text = 'Of the rows TRM-max rejects, the share from the longest quarter (.25 = blind to length):'
  return f'{text}\n\n{report.table(head, rows)}'


def _half(summary: dict, i: int) -> str:
  """The first age at which a limit keeps less than half."""
  for age, x in zip(summary['ages'], summary['acceptance']['kept'][i], strict=True):
    if x['mean'] < 0.5:
      return f'k = {age}'
  return f'no k up to {summary["ages"][-1]}'


def verdict(summary: dict) -> str:
  """Whether drift adds up, and whom TRM-max rejects."""
  whole = {name: found['all'] for name, found in summary['exponents'].items()}
  kl = whole['kl']
  clear = abs(kl['mean'] - 1.5) > 2 * kl['se']
  adds = kl['mean'] > 1.5
  what = 'drift adds up (nearer to 2)' if adds else 'drift diffuses (nearer to 1)'
  lines = [
    f'KL grows like k to the {_shown(kl, 3)}: {what if clear else "neither 1 nor 2 is ruled out"}.'
    f' Claim that it adds up: {"yes" if clear and adds else "NO"}'
  ]
  halves = whole['log_ratio']['mean'] / kl['mean']
  lines.append(
    f'|log-ratio| grows like k to the {_shown(whole["log_ratio"], 3)} and TV like'
    f' {_shown(whole["tv"], 3)}: {halves:.2f} of the exponent of KL, where small shifts of a'
    f' smooth policy make it one half'
  )
  early, late = (summary['exponents']['kl'][span] for span in ('early', 'late'))
  names = {True: 'adds up', False: 'does not add up'}
  said = [
    f'{_shown(x, 3)} ({names[abs(x["mean"] - 2) <= max(0.25, 2 * x["se"])]})' for x in (early, late)
  ]
  lines.append(f'Up to {BEND} steps the exponent of KL is {said[0]}, from there {said[1]}')
  gap = summary['mean_gap']
  longer = gap['mean'] > 2 * gap['se']
  lines.append(
    f'TRM-max keeps {100 * gap["mean"]:.1f} ± {100 * gap["se"]:.1f} points less of the longest'
    f' quarter of the rows than of the others, mean over ages and limits. Claim that long responses'
    f' go first: {"yes" if longer else "NO"}'
  )
  falls = ', '.join(
    f'{limit:g} nats at {_half(summary, i)}' for i, limit in enumerate(summary['limits'])
  )
  lines.append(f'Where TRM loses: a fixed limit keeps less than half of the rows from: {falls}')
  lines.append(
    f'{summary["seeds"]} seeds, one training run each; sequence-level ESS is'
    f' {_shown(summary["curves"]["ess"][-1])} at {summary["ages"][-1]} steps'
  )
  return '\n'.join(f'- {text}.' for text in lines)


PARTS = (table_by_age, table_of_exponents, table_of_lengths, verdict)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Growth of the divergences; what each limit keeps; whom it rejects."""
  figure, axes = plt.subplots(1, 3, figsize=(15, 4.6))
  ages = summary['ages'][1:]
  looks = {'kl': ('mean KL', 1, 'o'), 'log_ratio': ('mean |log-ratio|', 5, 's')}
  looks['tv'] = ('mean TV', 4, '^')
  for name, (label, colour, marker) in looks.items():
    found = summary['curves'][name]
    early, late = (summary['exponents'][name][span] for span in ('early', 'late'))
    axes[0].errorbar(
      ages,
      [x['mean'] for x in found[1:]],
      yerr=[x['se'] for x in found[1:]],
      fmt=f'{marker}-',
      color=figures.COLOURS[colour],
      label=f'{label}: k^{early["mean"]:.2f}, from {BEND} on k^{late["mean"]:.2f}',
      markersize=5,
    )
  first = summary['curves']['kl'][1]['mean']
  for power, style in ((1, ':'), (2, '--')):
    label = {1: 'k (random walk)', 2: 'k² (adds up)'}[power]
    curve = [first * age**power for age in ages]
    axes[0].plot(ages, curve, style, color='black', linewidth=0.9, label=label)
  axes[0].axvline(BEND, color='black', linewidth=0.6, alpha=0.4)
  top = max(x['mean'] for name in looks for x in summary['curves'][name])
  axes[0].set(xscale='log', yscale='log', xlabel='optimizer steps behind, k', ylim=(None, 4 * top))
  axes[0].set_title('Drift of the policy away from its rollouts', fontsize=10)
  axes[0].legend(fontsize=8, loc='upper left')
  for i, limit in enumerate(summary['limits']):
    colour = figures.COLOURS[(0, 5, 4, 2, 1, 3)[i % 6]]
    kept = summary['acceptance']['kept'][i][1:]
    axes[1].errorbar(
      ages,
      [x['mean'] for x in kept],
      yerr=[x['se'] for x in kept],
      fmt='o-',
      color=colour,
      label=f'TRM-max, {limit:g} nats',
      markersize=4,
    )
    gap = summary['gap'][i][1:]
    axes[2].errorbar(
      ages,
      [100 * x['mean'] for x in gap],
      yerr=[100 * x['se'] for x in gap],
      fmt='o-',
      color=colour,
      label=f'{limit:g} nats',
      markersize=4,
    )
  ess = summary['curves']['ess'][1:]
  axes[1].plot(ages, [x['mean'] for x in ess], 'k--', linewidth=1.2, label='ESS of sequences')
  axes[1].set(xscale='log', ylim=(-0.02, 1.02), xlabel='optimizer steps behind, k')
  axes[1].set_title('Share of rows kept', fontsize=10)
  axes[1].legend(fontsize=8)
  axes[2].axhline(0, color='black', linewidth=0.9, linestyle=':', label='blind to length')
  axes[2].set(xscale='log', xlabel='optimizer steps behind, k', ylabel='points')
  axes[2].set_title('Share kept: other rows minus the longest quarter', fontsize=10)
  axes[2].legend(fontsize=8)
  for axis in axes:
    axis.set_xticks(ages, [str(age) for age in ages])
    axis.minorticks_off()
    axis.grid(alpha=0.2)
  return figures.save(figure, path)


def main(args: StalenessSweep) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, PARTS, draw, name='staleness_sweep')


if __name__ == '__main__':
  command.run(StalenessSweep, main)
