"""Engine noise without drift, the rules that judge it, and the limits they set from it.

A rule is a statistic of `trust_region` and a way of `calibration` to set its limit at each length.
In three of the four noises the KL of a token is drawn; its sampled log-ratio is then -KL +- sqrt(2
KL) and its chi2 is 2 KL, right to second order. The fourth has exact divergences of softmax
policies, which checks that.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trm_jax import bounds, divergences, masks
from trm_jax.bounds import sharp
from trm_jax.masks import calibration
from trm_jax.types import Divergences, InputError

NOISES = ('lognormal', 'Pareto', 'row-correlated', 'softmax')
# LN-TRM's weights: the limits of the paper's comparison table.
WEIGHTS = dict(epsilon=5e-3, delta=1e-4)
# KL of the one bad token, nats: four steps a decade.
BAD = tuple(10 ** (k / 4 - 5) for k in range(21))
# Every KL times this: a policy that has moved everywhere.
DRIFT = 2.0
# Rows that get a bad token.
FEW = 128
# Tokens in memory at once.
SLOTS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Noise, lengths and sample sizes."""

  # Independent repetitions of calibration and test.
  seeds: int = 5
  # Rows of each length, once for calibration and once for the test.
  rows: int = 1000
  # Response lengths, tokens.
  lengths: tuple[int, ...] = (128, 512, 2048, 8192)
  # The length at which rules with a single limit are calibrated.
  anchor: int = 512
  # Share of noise-floor rows to accept.
  target: float = 0.9
  # Median KL of a token, nats.
  median: float = 1e-6
  # Spread of log KL (lognormal).
  sigma: float = 2.0
  # Exponent of the tail (Pareto).
  tail: float = 1.5
  # Contexts of the softmax policy, and its vocabulary.
  contexts: int = 131_072
  vocabulary: int = 512

  def __post_init__(self):
    for name in ('seeds', 'rows', 'contexts', 'vocabulary'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be at least 1.')
    if sorted(set(self.lengths)) != list(self.lengths) or not self.lengths or self.lengths[0] < 1:
      raise InputError(f'lengths={self.lengths} must rise, e.g. 128 512 2048.')
    if self.anchor not in self.lengths:
      raise InputError(f'anchor={self.anchor} must be one of lengths={self.lengths}.')
    if not 0 < self.target < 1:
      raise InputError(f'target={self.target} must lie strictly between 0 and 1.')
    fewest = math.ceil(self.target / (1 - self.target) - 1e-9)
    if self.rows < max(fewest, calibration.FEWEST + 1):
      raise InputError(
        f'rows={self.rows} are too few to set limits for target={self.target}: give at least'
        f' {max(fewest, calibration.FEWEST + 1)}.'
      )
    for name in ('median', 'sigma', 'tail'):
      if not getattr(self, name) > 0:
        raise InputError(f'{name}={getattr(self, name)} must be > 0.')


# Noise.


def of_kl(key, kl) -> Divergences:
  """Statistics whose token KL is `kl`, to second order: log ratio -KL +- sqrt(2 KL), chi2 2 KL."""
  root = jnp.sqrt(2 * kl)
  sign = jax.random.rademacher(key, kl.shape, kl.dtype)
  return Divergences(kl, root / 2, sign * root - kl, jnp.zeros_like(kl), 2 * kl)


def softmax_table(args: Setting, key) -> Divergences:
  """Exact statistics [contexts] of random softmax policies; their logits are noisy in the rollout.

  The scale of the noise is the one whose KL is about `median` where no token dominates.
  """
  size = max(1, SLOTS // args.vocabulary)
  scale = math.sqrt(2 * args.median)

  def block(key):
    keys = jax.random.split(key, 3)
    policy = 2 * jax.random.normal(keys[0], (size, args.vocabulary))
    rollout = policy + scale * jax.random.normal(keys[1], policy.shape)
    tokens = jax.random.categorical(keys[2], rollout)
    return divergences.statistics(policy, rollout, tokens, full=True).divergences()

  found = jax.lax.map(block, jax.random.split(key, -(-args.contexts // size)))
  return jax.tree.map(lambda x: x.reshape(-1)[: args.contexts], found)


def draw(noise: str, args: Setting, table, key, shape, factor) -> Divergences:
  """Divergences [rows, T] of noise alone, every KL times `factor` (drawn noises only)."""
  keys = jax.random.split(key, 3)
  if noise == 'softmax':
    at = jax.random.randint(keys[0], shape, 0, args.contexts)
    return jax.tree.map(lambda x: x[at], table)
  if noise == 'Pareto':
    spread = jax.random.pareto(keys[0], args.tail, shape) / 2 ** (1 / args.tail)
  else:
    z = jax.random.normal(keys[0], shape)
    if noise == 'row-correlated':
      z = (z + jax.random.normal(keys[1], (shape[0], 1))) / math.sqrt(2)
    spread = jnp.exp(args.sigma * z)
  return of_kl(keys[2], factor * args.median * spread)


def with_bad_token(d: Divergences, key, kl) -> Divergences:
  """One token of each row, anywhere, has this KL instead."""
  keys = jax.random.split(key, 2)
  place = jax.random.randint(keys[0], (d.kl.shape[0], 1), 0, d.kl.shape[1])
  there = jnp.arange(d.kl.shape[1])[None] == place
  bad = of_kl(keys[1], jnp.full_like(d.kl, kl))
  return jax.tree.map(lambda old, new: jnp.where(there, new, old), d, bad)


# Rules.

STATISTICS = {
  'max': lambda d, valid: masks.max_over_tokens(d.kl, valid),
  'mean': lambda d, valid: masks.mean_over_tokens(d.kl, valid),
  'LN-TRM': lambda d, valid: masks.future_deviation(d.log_ratio, valid, **WEIGHTS),
  'SER': lambda d, valid: masks.mean_over_tokens(masks.deviation(d.log_ratio), valid),
  'budget': lambda d, valid: masks.sum_over_tokens(d.chi2, valid),
}


class Floor(typing.NamedTuple):
  """What a rule may look at to set its limit: noise-floor rows, none of them in the test."""

  statistics: dict[int, dict[str, jax.Array]]
  tail: calibration.Tail


def one_limit(name, floor: Floor, args: Setting):
  limit = calibration.conformal(floor.statistics[args.anchor][name], target=args.target)
  return jnp.full(len(args.lengths), limit)


def by_length(name, floor: Floor, args: Setting):
  found = (floor.statistics[T][name] for T in args.lengths)
  return jnp.stack([calibration.conformal(x, target=args.target) for x in found])


def independent(name, floor: Floor, args: Setting):
  del name
  return calibration.max_limit(floor.tail, T=jnp.array(args.lengths), target=args.target)


def level_of_rows(name, floor: Floor, args: Setting):
  largest = jnp.concatenate([floor.statistics[T][name] for T in args.lengths])
  lengths = jnp.array(args.lengths)
  return calibration.conformal_max_limit(
    floor.tail, largest, jnp.repeat(lengths, args.rows), T=lengths, target=args.target
  )


# What a limit proves about |Error|: half of the paper's constants, as rewards lie in [0, 1].
PROOFS = {
  'max': lambda T, limit: bounds.pinsker_marginal_kl(T=T, delta=limit) / 2,
  'LN-TRM': lambda T, limit: limit * bounds.future_weights(T=T, **WEIGHTS).sum(),
  'SER': lambda T, limit: T * limit,
  'budget': lambda T, limit: sharp.budget_l2(limit),
}


class Rule(typing.NamedTuple):
  """A statistic and how its limits [lengths] are set from the noise floor."""

  statistic: str
  limits: Callable


RULES = {
  'max': Rule('max', one_limit),
  'mean': Rule('mean', one_limit),
  'LN-TRM': Rule('LN-TRM', one_limit),
  'SER': Rule('SER', one_limit),
  'budget': Rule('budget', one_limit),
  'max, (1-p)^T': Rule('max', independent),
  'max, conformal': Rule('max', level_of_rows),
  'budget by length': Rule('budget', by_length),
}
CALIBRATED = ('max, (1-p)^T', 'max, conformal', 'budget by length')


# Measurement.


def chosen(noise, args: Setting, table, key, shape, factor) -> Divergences:
  """`draw` for the number of a noise, which may be traced: one program serves all of them."""

  def branch(name):
    found = lambda t, k, f: draw(name, args, t, k, shape=shape, factor=f)
    # Of some noises alone; no rule reads it.
    return lambda t, k, f: dataclasses.replace(found(t, k, f), square=None)

  return jax.lax.switch(noise, [branch(name) for name in NOISES], table, key, factor)


@functools.cache
def program(args: Setting, rows: int, T: int):
  """(noise, table, key, factor, KL of a bad token or NaN) -> statistics by name; compiled once."""
  size = min(rows, max(1, SLOTS // T))

  @jax.jit
  def run(noise, table, key, factor, bad):
    def block(key):
      keys = jax.random.split(key, 2)
      d = chosen(noise, args, table, keys[0], (size, T), factor)
      worse = with_bad_token(d, keys[1], bad)
      d = jax.tree.map(lambda old, new: jnp.where(jnp.isnan(bad), old, new), d, worse)
      valid = jnp.ones((size, T), bool)
      return {name: statistic(d, valid) for name, statistic in STATISTICS.items()}

    found = jax.lax.map(block, jax.random.split(key, -(-rows // size)))
    return jax.tree.map(lambda x: x.reshape(-1)[:rows], found)

  return lambda noise, table, key, factor=1.0, bad=math.nan: run(
    noise, table, key, jnp.float32(factor), jnp.float32(bad)
  )


@functools.partial(jax.jit, static_argnums=0)
def settle(args: Setting, floor: Floor) -> dict:
  """By rule: its limits [lengths], and what each of them proves where there is a proof."""
  rules = {}
  for name, (statistic, limits_of) in RULES.items():
    limits = limits_of(statistic, floor, args)
    rules[name] = dict(limit=limits)
    if statistic in PROOFS:
      each = zip(args.lengths, limits, strict=True)
      rules[name]['proves'] = jnp.stack([PROOFS[statistic](T, x) for T, x in each])
  return rules


def measure(noise: str, args: Setting, seed: int, whole, few) -> dict:
  """Limits, acceptance and what slips through, by rule; one number for each length.

  `whole` and `few` are the programs of each length, for all rows and for some.
  """
  number = NOISES.index(noise)
  key = jax.random.fold_in(jax.random.key(seed), number)
  at = lambda purpose, T: jax.random.fold_in(jax.random.fold_in(key, purpose), T)
  table, check = Divergences(*[jnp.zeros(args.contexts)] * 5), {}
  if noise == 'softmax':
    table = jax.jit(softmax_table, static_argnums=0)(args, at(0, 0))
    check = agreement(table)
  over = lambda programs, purpose, *more: {
    T: f(number, table, at(purpose, T), *more) for T, f in programs.items()
  }
  tokens = jax.jit(chosen, static_argnums=(1, 4))(
    number, args, table, at(1, 0), (args.rows, args.anchor), 1.0
  ).kl
  floor = Floor(over(whole, 2), calibration.tail(tokens, jnp.ones(tokens.shape, bool)))
  kinds = {'kept': over(whole, 3)}
  if noise == NOISES[0]:
    kinds |= {'drift': over(whole, 3, DRIFT), 'few': over(few, 4)}
    kinds |= {kl: over(few, 4, 1.0, kl) for kl in BAD}
  rules = {}
  for name, found in settle(args, floor).items():
    limits = np.asarray(found['limit'])
    inside = {
      kind: [
        np.asarray(x[RULES[name].statistic]) <= limit
        for x, limit in zip(seen.values(), limits, strict=True)
      ]
      for kind, seen in kinds.items()
    }
    rules[name] = {k: np.asarray(x, np.float64).tolist() for k, x in found.items()}
    rules[name] |= {
      k: [float(x.mean()) for x in inside[k]] for k in ('kept', 'drift') if k in inside
    }
    if 'few' in inside:
      # Of the rows kept without the bad token, the share still kept with it.
      still = lambda kl, inside=inside: [
        (x & y).sum() / y.sum() if y.any() else math.nan
        for x, y in zip(inside[kl], inside['few'], strict=True)
      ]
      rules[name]['bad'] = [still(kl) for kl in BAD]
  return dict(rules=rules, check=check)


def agreement(table: Divergences) -> dict:
  """How exact divergences compare with what the drawn noises assume: 1 in both if they agree."""
  kl, chi2, log_ratio = (np.asarray(x, np.float64) for x in (table.kl, table.chi2, table.log_ratio))
  return {
    'chi2 / (2 KL)': float(np.median(chi2 / (2 * kl))),
    'log-ratio^2 / (2 KL)': float((log_ratio**2).mean() / (2 * kl).mean()),
    'largest KL / median': float(kl.max() / np.median(kl)),
  }
