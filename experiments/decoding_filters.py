"""What do sampling filters do that the trainer does not know of, and what mends it?

The engine divides by a temperature and cuts by top-k, top-p or min-p; the trainer scores with
neither. Its log-ratios are taken against log-probs of after the processors (processed), of before
them (raw, the classic bug), or over the engine's support alone (support replay, for filters). A
policy trained by RL says what a trainer sees; one small enough to enumerate, what it does to the
gradient. Filters are traced: one compiled program.

Claims under test: (1) raw log-probs hide every filter: mean |log-ratio| is rounding while exact KL
is not; (2) replaying the support removes the KL of pure filters and at least half of the bias of
the surrogate's gradient; (3) order matters: top-p before or after the temperature gives KL that
differ at two standard errors.
Falsified if: (1) raw log-ratios exceed 1e-3 nats; (2) KL is left, or more than half of the bias for
most filters; (3) they do not differ. The verdict says which.
Honest caveat: 16 and 5 tokens of vocabulary; a filter cuts less of a large one. The replayed
surrogate is that of the truncated policy: where filters cut for good, its optimum is another.

Infinities: KL(rollout || policy) stays finite, at most -log(kept mass) for pure filters, because
the engine draws nothing that the policy could not. KL(policy || rollout) and chi2 are infinite on
every token whose support was cut: a chi2 budget rejects those rows at any limit.

    python -m experiments.decoding_filters --publish              # 5 seeds, minutes
    python -m experiments.decoding_filters --mesh 8,1 --prompts 512 --samples 16 \\
        --policy.width 1024 --policy.layers 16 ... --distributed  # a pod
"""

import dataclasses
import functools
import math
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np

from experiments.laboratory import small_world, sweep
from experiments.reports import filters_report as fr
from experiments.reports import report
from trm_jax import divergences, masks, measurements, policy, training
from trm_jax.exact import enumeration, oracle
from trm_jax.mesh import sharding
from trm_jax.mismatch import decoding
from trm_jax.policy import attention
from trm_jax.rollouts import scoring, support
from trm_jax.training import command
from trm_jax.types import InputError


class Filter(typing.NamedTuple):
  """Processors as numbers, traced; the defaults do nothing.

  Attributes:
    temperature: divides the scores.
    k, p, min_p: as `decoding.Decoding`; k = 0, p = 1 and min_p = 0 cut nothing.
    late: 1 = the temperature divides after the filters have cut.
  """

  temperature: typing.Any = 1.0
  k: typing.Any = 0.0
  p: typing.Any = 1.0
  min_p: typing.Any = 0.0
  late: typing.Any = 0.0

  @property
  def pure(self) -> bool:
    """Cuts and does nothing else."""
    return self.temperature == 1


def filtered(scores, by: Filter):
  """Scores the engine draws from: `decoding.process` at temperature 1 with traced settings."""
  seen = jnp.where(by.late > 0, scores, scores / by.temperature)
  ranked = jnp.flip(jnp.sort(seen, -1), -1)
  last = jnp.clip(by.k.astype(jnp.int32), 1, scores.shape[-1]) - 1
  seen = jnp.where((by.k > 0) & (seen < jnp.take(ranked, last, -1)[..., None]), -jnp.inf, seen)
  seen = decoding.keep_top_p(seen, by.p)
  seen = jnp.where(by.min_p > 0, decoding.keep_min_p(seen, by.min_p), seen)
  return jnp.where(seen > -jnp.inf, scores / by.temperature, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingFilters(sweep.Trained):
  """KL, log-ratios, acceptance and gradient bias under filters; raw, processed, replayed.

  Ends with tables, a figure and a verdict. An interrupted run goes on with --resume.
  """

  directory: pathlib.Path = pathlib.Path('runs/decoding_filters')
  # Settings of each filter, alone.
  top_k: tuple[int, ...] = (2, 3, 4)
  top_p: tuple[float, ...] = (0.6, 0.8, 0.9, 0.95, 0.99)
  min_p: tuple[float, ...] = (0.02, 0.05, 0.1, 0.3)
  temperatures: tuple[float, ...] = (0.6, 0.8, 0.9, 1.1, 1.25, 1.5)
  # Top-p whose order with each temperature is compared.
  ordered_p: float = 0.9
  ordered_temperature: tuple[float, ...] = (0.6, 1.5)
  # Limit of TRM-max, nats.
  limit: float = 0.05

  def __post_init__(self):
    super().__post_init__()
    for name in fr.KINDS:
      for value in self.settings(name):
        if name == 'temperature' and value == 1:
          raise InputError(
            f'temperatures={self.temperatures} holds 1, which is no filter; leave it out.'
          )
        decoding.Decoding(**{name: value})
    decoding.Decoding(top_p=self.ordered_p)
    for value in self.ordered_temperature:
      decoding.Decoding(temperature=value)
    if not any(getattr(self, name) for name in ('top_k', 'top_p', 'min_p')):
      raise InputError('top_k, top_p and min_p are all empty: name a setting of one of them.')
    if not 0 < self.limit < math.inf:
      raise InputError(f'limit={self.limit} must be > 0 and finite.')
    if self.config.temperature != 1:
      raise InputError(
        f'temperature={self.config.temperature} must be 1 here, as the sweep moves that of the'
        ' engine: use --temperatures.'
      )

  def settings(self, kind: str) -> tuple[float, ...]:
    """The settings of one kind of filter."""
    return self.temperatures if kind == 'temperature' else getattr(self, kind)

  def dials(self) -> dict[str, Filter]:
    """Filters by the name of the cell."""
    short = dict(top_k='k', top_p='p', min_p='min_p', temperature='temperature')
    found = {'none': Filter()}
    for kind in fr.KINDS:
      found |= {f'{kind}_{x:g}': Filter(**{short[kind]: float(x)}) for x in self.settings(kind)}
    for t in self.ordered_temperature:
      for late in (0.0, 1.0):
        name = f'order_{t:g}_{"late" if late else "early"}'
        found[name] = Filter(temperature=t, p=self.ordered_p, late=late)
    return found


def cell_program(args: DecodingFilters, program: training.Program):
  """(params, filter, prompts, starts, key) -> what a trainer sees, by side."""
  config = args.config
  attend = getattr(attention, config.attention)

  def replayed(scores, logits, tokens):
    return divergences.statistics(
      support.replay_support(scores, logits), logits, tokens
    ).divergences()

  @jax.jit
  def cell(params, by, prompts, starts, key):
    hooks = policy.Hooks(
      decode=lambda scores: filtered(scores, by), reported=lambda own, drawn: own
    )
    rollout = sweep.roll_out(program, params, prompts, starts, key, hooks=hooks)
    raw, policy_logp, _ = sweep.compare(config, params, rollout)
    drawn = scoring.token_logp(rollout.logits, rollout.tokens, rollout.valid)
    hidden, _ = scoring.score(params, config.policy, rollout, attention=attend)
    scores = policy.logits(params, hidden)
    scores, logits, tokens = sharding.reshard((scores, rollout.logits, rollout.tokens))
    replay = replayed(scores, logits, tokens)
    drawn, valid = sharding.reshard((drawn, rollout.valid))
    processed = dataclasses.replace(raw, log_ratio=policy_logp - drawn)
    mean = lambda x: jnp.where(valid, x, 0).sum() / valid.sum()
    found = {}
    for side, d in (('processed', processed), ('raw', raw), ('replay', replay)):
      found[side] = {
        'kl': measurements.distribution(d.kl, valid, thresholds=(args.limit,)),
        'tv': mean(d.tv),
        'abs_log_ratio': mean(jnp.abs(d.log_ratio)),
        'log_ratio': mean(d.log_ratio),
        'ess': measurements.sequences(d.log_ratio, valid).ess,
        'kept': masks.max_kl(limit=args.limit)(d, valid).mean(),
        'kept_k2': masks.max_k2(limit=args.limit)(d, valid).mean(),
      }
    cut = (logits == -jnp.inf).any(-1)
    return found | {'cut': mean(cut), 'chi2_infinite': mean(jnp.isinf(processed.chi2))}

  return cell


def true_bias(config, pair: small_world.Pair, by: Filter, limit: float) -> dict[str, float]:
  """Relative bias of the surrogate's gradient by side, exact, of the enumerated policy."""
  table, served = _tables(config)(pair.params, by)
  with enumeration.float64():
    shared = dict(horizon=small_world.HORIZON, reward=pair.reward)
    world = enumeration.world(table, served, **shared)
    found = jax.tree.map(np.asarray, small_world.truth(world, limit))
    own = jnp.where(jnp.isinf(served), -jnp.inf, table)
    replay = small_world.truth(enumeration.world(own, served, **shared), limit)
    slopes = {
      'processed': found['surrogate'],
      'raw': np.asarray(_raw_slope(world)),
      'replay': np.asarray(replay['surrogate']),
      'trm': found['masked'],
    }
  true = found['true']
  sizes = small_world.lengths(config)(pair.params, [true, *(x - true for x in slopes.values())])
  return {name: size / sizes[0] for name, size in zip(slopes, sizes[1:], strict=True)} | {
    'kl': float(found['kl']),
    'trm_kept': float(found['kept']),
  }


@functools.cache
def _tables(config):
  """(params, filter) -> logits of (the policy, its filtered engine); compiled once."""

  @jax.jit
  def run(params, by):
    own = small_world.table(params, config)
    return own, filtered(own, by)

  return run


@jax.jit
def _raw_slope(world: enumeration.World):
  """Gradient by logits of the surrogate whose ratios are against the policy's own log-probs."""
  served = enumeration.tree(world).rollout
  weight = enumeration.descend(world.prompts, served)[1]
  weight = weight * (world.reward - (weight * world.reward).sum())

  def surrogate(w):
    p = jax.nn.softmax(w.policy)
    ratio = p / jax.lax.stop_gradient(jnp.where(p > 0, p, 1))
    zero = jnp.zeros_like(world.prompts)
    return (weight * enumeration.descend(zero, ratio, jnp.add)[1]).sum()

  return oracle.gradient(surrogate, world)


def measure(args: DecodingFilters) -> dict:
  """Every (seed, filter)."""
  program, dials = sweep.build(args), args.dials()
  cell, small = cell_program(args, program), small_world.config_of(args.config.policy)

  def prepare(seed):
    (params,), rows, key = sweep.trained(args, program, seed)
    pair = small_world.train(small, seed, 0)

    def one(name):
      by = Filter(*(jnp.float32(x) for x in dials[name]))
      with jax.set_mesh(program.mesh):
        found = measurements.plain(jax.device_get(cell(params, by, *rows, key)))
      return found | {'true': true_bias(small, pair, by, args.limit)}

    return one

  return sweep.measure(args, list(dials), args.each_seed, prepare, mesh=program.mesh)


# What the cells say.


def summarise(args: DecodingFilters, cells: dict) -> dict:
  """Every filter, and the order of processors."""
  seeds = sorted({seed for seed, _ in cells})
  filters = {}
  for name, by in args.dials().items():
    at = lambda of, name=name: sweep.over_seeds(cells, name, of)
    filters[name] = {
      'pure': by.pure and name != 'none',
      'kl': {s: at(lambda c, s=s: c[s]['kl']['mean']) for s in fr.SIDES},
      'abs_log_ratio': {s: at(lambda c, s=s: c[s]['abs_log_ratio']) for s in fr.SIDES},
      'tv': at(lambda c: c['processed']['tv']),
      'kept': {s: at(lambda c, s=s: c[s]['kept']) for s in fr.SIDES},
      'kept_k2': {s: at(lambda c, s=s: c[s]['kept_k2']) for s in fr.SIDES},
      'ess': at(lambda c: c['processed']['ess']),
      'chi2_infinite': at(lambda c: c['chi2_infinite']),
      'true_kl': at(lambda c: c['true']['kl']),
      'bias': {s: at(lambda c, s=s: c['true'][s]) for s in (*fr.SIDES, 'trm')},
    }
  order = {}
  for t in args.ordered_temperature:
    early, late = f'order_{t:g}_early', f'order_{t:g}_late'
    gap = [cells[s, late]['processed']['kl']['mean'] for s in seeds]
    gap = np.array(gap) - [cells[s, early]['processed']['kl']['mean'] for s in seeds]
    order[f'{t:g}'] = {
      'early': filters[early]['kl']['processed'],
      'late': filters[late]['kl']['processed'],
      'gap': report.mean_error(gap.tolist()),
      'bias_early': filters[early]['bias']['processed'],
      'bias_late': filters[late]['bias']['processed'],
    }
  return {
    'limit': args.limit,
    'ordered_p': args.ordered_p,
    'settings': {kind: list(args.settings(kind)) for kind in fr.KINDS},
    'filters': filters,
    'order': order,
  }


def main(args: DecodingFilters) -> None:
  """Measures what is missing, then reports."""
  sweep.main(args, measure, summarise, fr.PARTS, fr.draw, name='decoding_filters')


if __name__ == '__main__':
  command.run(DecodingFilters, main)
