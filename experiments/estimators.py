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
import numpy as np

from experiments.laboratory import sweep
from experiments.laboratory.confidences import ROWS, SLOTS, Mix, contexts
from experiments.reports import estimators_report as er
from trm_jax import divergences
from trm_jax.divergences import brackets
from trm_jax.mismatch import heavy_tail, presets
from trm_jax.training import command
from trm_jax.types import InputError

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
        raise InputError(
          f'names holds {name!r}, a mechanism with no noise of its own to draw: leave it out.'
        )
    _ = self.mix  # refuses sizes that cannot be
    if self.vocabulary <= max(er.KEEP):
      raise InputError(f'vocabulary={self.vocabulary} must be above {max(er.KEEP)}.')
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
  def mix(self) -> Mix:
    """The published mix of confidences."""
    return Mix(vocabulary=self.vocabulary, contexts=self.contexts)

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
    rollout = heavy_tail.shift_hooks(presets.named(preset).engine.heavy_tail).logits(scores, keys)
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
  for k in er.KEEP:
    bounds, _ = brackets.bounds(scores, brackets.top_k(rollout, k))
    values |= {f'lower K={k}': bounds.lower, f'upper K={k}': bounds.upper}
  return values


def bank(args: Estimators, noise: str, seed: int) -> dict[str, np.ndarray]:
  """{estimator: [contexts]} of one seed."""
  rng, key = np.random.default_rng(seed), jax.random.key(seed)
  size = ROWS * SLOTS
  preset = None if noise == EVERY else noise
  parts = []
  for number in range(args.contexts // size):
    scores = contexts(args.mix, number, rng)
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
  names = ['exact', *er.ESTIMATORS]
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
      str(k): float((at(f'lower K={k}') == at(f'upper K={k}')).mean()) for k in er.KEEP
    }
    here['wrong'] = {
      str(k): float(((at(f'upper K={k}') & ~keep[0]) | (~at(f'lower K={k}') & keep[0])).mean())
      for k in er.KEEP
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
            for key in er.RATES
          }
          for name in ('exact', *er.ESTIMATORS)
        }
        for how in ('nominal', 'calibrated')
      }
      for key in ('decided', 'wrong'):
        rows[length][key] = {
          str(k): at(lambda c, t=length, y=key, k=k: c['rows'][t][y][str(k)]) for k in er.KEEP
        }
    noises[noise] = {
      'rows': rows,
      'tokens': {
        name: {key: at(lambda c, n=name, k=key: c['tokens'][n][k]) for key in ('mean', 'error')}
        for name in ('exact', *er.ESTIMATORS)
      },
      'largest': at(lambda c: c['largest']),
    }
  own = ('limit', 'target', 'vocabulary', 'contexts', 'rows')
  about = {name: getattr(args, name) for name in own}
  return about | {'lengths': list(args.lengths), 'noises': noises}


def _known(found: list[dict], of) -> dict[str, float]:
  """Mean and error over the seeds in which there is anything to speak of."""
  return sweep.known([of(cell) for cell in found])


def main(args: Estimators) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, er.PARTS, er.draw, name='estimators')


if __name__ == '__main__':
  command.run(Estimators, main)
