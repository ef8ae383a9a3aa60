"""What token-level trust regions and averages miss; where masking sequences does no better.

Four demonstrations on random worlds small enough to enumerate; every number is an exact expectation
over the rollout, so that no sampling hides or makes an effect:

1. PPO-clip leaks: its gradient outside the region [0.8, 1.2] of ratios is not zero.
2. Masks at the same share of kept tokens: the bias they leave in the gradient.
3. An average is not enough: KL of responses -> 0 while the largest KL of a token stays 1.
4. Signed means cancel: a mean log-ratio near 0 goes with large divergences of tokens.

Claim under test: each of the four failures is there, and its size.
Falsified if: the leak is zero, the rare context does no harm, or signed means reject what max KL
rejects; the verdict is computed from the numbers.
Honest caveat: masking a sequence leaves the largest divergence as it is too, and every mask biases
the gradient by what it rejects: item 2 compares, it does not assume a winner. Random tabular worlds
of 5 tokens say which effects exist, not how large they are in training.

    python -m experiments.token_level_failure                # 5 seeds of 60 worlds, about a minute
"""

import dataclasses
import pathlib

import jax
import numpy as np

from experiments.laboratory.token_failures import (
  averages,
  cancelling,
  clipping,
  diluted,
  every_mask,
  moved,
  rare,
  signed,
)
from experiments.reports import failure_report, report
from trm_jax.exact import enumeration as en
from trm_jax.runs import progress
from trm_jax.training import command
from trm_jax.types import InputError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'token_level_failure'
STRENGTHS = (0.0, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0)
RARE = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
TOTALS = (5, 50, 500, 5000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLevelFailure:
  """PPO-clip's leak, token against sequence masks, averages, signed means: exact, on random worlds.

  Ends with a table for each of the four, a figure and a verdict that also says where masking whole
  sequences is no better. Takes about a minute on one core.
  """

  # Receives summary.json, table.md and figure.png.
  directory: pathlib.Path = pathlib.Path('runs/token_level_failure')
  # Write into the directory though it holds results.
  resume: bool = False
  # Independent batches of worlds; errors are standard errors over them.
  seeds: int = 5
  # Random worlds of each batch, for every setting of every demonstration.
  worlds: int = 60
  # Limit of TRM-Max, nats.
  max_kl: float = 0.05
  # Signed mean: exp(mean log-ratio) must lie within 1 -/+ this.
  geometric: float = 0.05
  # Copy summary, table and figure to experiments/results/token_level_failure.
  publish: bool = False

  def __post_init__(self):
    for name in ('seeds', 'worlds'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be at least 1.')
    for name in ('max_kl', 'geometric'):
      if not 0 < getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must lie in (0, 1).')


# Running.


def seeds_of(args: TokenLevelFailure, make, measure) -> dict:
  """measure over `worlds` worlds for each seed: leaves [seeds, worlds, ...]."""
  found = [measure(make(np.random.default_rng(seed), args.worlds)) for seed in range(args.seeds)]
  return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *found)


def mean_of(x: np.ndarray, over: np.ndarray | None = None) -> dict[str, float]:
  """Mean over worlds (a ratio of means with `over`), with its standard error over seeds."""
  values = x.mean(1) if over is None else x.mean(1) / over.mean(1)
  return report.mean_error(values.tolist())


def run_clip(args: TokenLevelFailure, tick) -> dict:
  measure = jax.jit(jax.vmap(lambda w: clipping(w, args.max_kl)))
  out = {}
  for strength in STRENGTHS:
    make = lambda rng, n, s=strength: moved(rng, n, 'dense', s)
    found = seeds_of(args, make, measure)
    row = {k: mean_of(x) for k, x in found.items() if k not in ('methods', 'truth')}
    row['largest_ratio_of_all'] = float(found['largest_ratio'].max())
    for name, x in found['methods'].items():
      row[name] = {'bias': mean_of(x['bias'], found['truth']), 'cosine': mean_of(x['cosine'])}
    out[f'{strength:g}'] = row
    tick()
  return out


def run_masks(args: TokenLevelFailure, tick) -> dict:
  measure = jax.jit(jax.vmap(every_mask))
  out = {}
  for kind in ('no mismatch', *failure_report.KINDS):
    make = lambda rng, n, k=kind: (
      moved(rng, n, k) if k in failure_report.KINDS else moved(rng, n, 'dense', strength=0.0)
    )
    found = seeds_of(args, make, measure)
    every = {}
    for m, name in enumerate(failure_report.MASKS):
      every[name] = {}
      for f, fraction in enumerate(failure_report.FRACTIONS):
        at = {k: x[:, :, m, f] for k, x in found.items()}
        none = {k: x[:, :, 0, f] for k, x in found.items()}
        worse = (at['bias'] ** 2).mean() - (none['bias'] ** 2).mean()
        saved = none['variance'].mean() - at['variance'].mean()
        every[name][f'{fraction:g}'] = {
          'bias': mean_of(at['bias'], at['truth']),
          'cosine': mean_of(at['cosine']),
          'error': mean_of(at['error']),
          'error_centred': mean_of(at['error_centred']),
          'noise': mean_of(np.sqrt(at['variance']), at['truth']),
          'pull': mean_of(at['pull'], np.maximum(none['pull'], 1e-300)),
          # Rollouts up to which less noise outweighs more bias; null: any number.
          'pays_below': 0.0 if saved <= 0 else None if worse <= 0 else float(saved / worse),
        }
    against = lambda a, b, x=found: mean_of(
      x['bias'][:, :, failure_report.MASKS.index(a)].mean(-1)
      - x['bias'][:, :, failure_report.MASKS.index(b)].mean(-1),
      x['truth'][:, :, 0, 0],
    )
    out[kind] = {
      'masks': every,
      'sequence_minus_token': against('sequence', 'token'),
      'prefix_minus_token': against('prefix', 'token'),
      'sequence_minus_random': against('sequence', 'random'),
    }
    tick()
  return out


def run_averages(args: TokenLevelFailure, tick) -> dict:
  measure = jax.jit(jax.vmap(averages))
  few = dataclasses.replace(args, worlds=max(args.worlds // 3, 1))
  by_share = {}
  for share in RARE:
    found = seeds_of(few, lambda rng, n, s=share: rare(rng, n, s), measure)
    by_share[f'{share:g}'] = {k: mean_of(x) for k, x in found.items()}
  tick()
  dilution = {}
  for total in TOTALS:
    at = jax.jit(jax.vmap(lambda w, n=total: diluted(w, n, args.max_kl)))
    found = seeds_of(dataclasses.replace(few, worlds=2), lambda rng, n: rare(rng, n, 0.1), at)
    dilution[str(total)] = {k: mean_of(x) for k, x in found.items()}
  tick()
  return {'by_share': by_share, 'dilution': dilution}


def run_signed(args: TokenLevelFailure, tick) -> dict:
  measure = jax.jit(jax.vmap(lambda w: cancelling(w, args.max_kl, args.geometric)))
  out = {}
  for kind in failure_report.SIGNED:
    found = seeds_of(args, lambda rng, n, k=kind: signed(rng, n, k), measure)
    out[kind] = jax.tree.map(lambda x: np.nan_to_num(x), found)
    nested = {k: {n: mean_of(x) for n, x in out[kind][k].items()} for k in ('left', 'largest_kl')}
    out[kind] = {k: mean_of(x) for k, x in out[kind].items() if k not in nested} | nested
    tick()
  return out


def summarise(args: TokenLevelFailure) -> dict:
  """All numbers of the tables and the figure."""
  bar = progress.Progress(
    len(STRENGTHS) + len(failure_report.KINDS) + 1 + 2 + len(failure_report.SIGNED), 'settings'
  )
  done = iter(range(1, 1000))
  tick = lambda: bar.update(next(done))
  with en.float64():
    found = {
      'clip': run_clip(args, tick),
      'masks': run_masks(args, tick),
      'averages': run_averages(args, tick),
      'signed': run_signed(args, tick),
    }
  bar.close()
  options = {k: getattr(args, k) for k in ('seeds', 'worlds', 'max_kl', 'geometric')}
  return {
    'command': 'python -m experiments.token_level_failure --publish',
    'options': options,
    **found,
  }


# What is said.


def main(args: TokenLevelFailure) -> None:
  """Computes, prints, draws."""
  command.check_directory(args)
  summary = summarise(args)
  parts = (
    failure_report.clip_table,
    failure_report.mask_table,
    failure_report.average_table,
    failure_report.signed_table,
    failure_report.verdict,
  )
  to = RESULTS if args.publish else None
  report.write(
    args.directory, summary, [f(summary) for f in parts], failure_report.draw_figure, publish_to=to
  )


if __name__ == '__main__':
  command.run(TokenLevelFailure, main)
