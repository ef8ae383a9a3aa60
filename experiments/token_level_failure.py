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
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from experiments import bound_tightness as tight
from experiments import command, failure_report, report
from trm_jax import enumeration as en
from trm_jax import oracle, progress, sharp_bounds, surrogates, trust_region
from trm_jax.types import Divergences, InputError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'token_level_failure'
PROMPTS, VOCAB, HORIZON, EOS = 2, 3, 5, 0
STRENGTHS = (0.0, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0)
CLIP = 0.2
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


# Worlds.


def rewards(rng: np.random.Generator, batch: int, prompts: int, vocab: int, horizon: int):
  """Rewards in (0, 1) that depend on each token and a little on the whole."""
  tokens = np.indices((vocab,) * horizon).reshape(horizon, -1)
  worth = rng.normal(size=(batch, prompts, horizon, vocab))
  total = sum(worth[:, :, t][:, :, tokens[t]] for t in range(horizon))
  noise = 0.5 * rng.normal(size=total.shape)
  return 1 / (1 + np.exp(-1.5 * (total / math.sqrt(horizon) + noise)))


def moved(rng: np.random.Generator, batch: int, kind: str, strength: float = 0.7) -> en.World:
  """Worlds whose policies differ everywhere (dense), after a few prefixes (sparse), or after a
  first token (subtree)."""
  size = (batch, PROMPTS, en.size(vocab=VOCAB, horizon=HORIZON), VOCAB)
  rollout, noise = rng.normal(size=size), rng.normal(size=size)
  if kind == 'sparse':
    scale = np.where(rng.random(size[:3]) < 0.15, 2.0, 0.05)[..., None]
  elif kind == 'subtree':
    first = np.concatenate(
      [[-1]] + [np.arange(VOCAB**t) // VOCAB ** (t - 1) for t in range(1, HORIZON)]
    )
    bad = rng.integers(1, VOCAB, size=(batch, PROMPTS, 1))
    scale = np.where(first[None, None] == bad, 2.0, 0.05)[..., None]
  else:
    scale = strength * np.exp(0.5 * rng.normal(size=size[:3]))[..., None]
  return en.world(
    rollout + scale * noise,
    rollout,
    horizon=HORIZON,
    reward=rewards(rng, batch, PROMPTS, VOCAB, HORIZON),
    eos=EOS,
  )


def shifted(logits: np.ndarray, direction: np.ndarray, kl: float) -> np.ndarray:
  """Logits at exactly KL(softmax(logits) || shifted) = kl, along a direction; one context."""
  log_p = logits - np.logaddexp.reduce(logits)

  def gap(s):
    moved = logits + s * direction
    return (np.exp(log_p) * (log_p - moved + np.logaddexp.reduce(moved))).sum() - kl

  high = 1.0
  while gap(high) < 0:
    high *= 2
  return logits + scipy.optimize.brentq(gap, 0, high, xtol=1e-14) * direction


def rare(rng: np.random.Generator, batch: int, share: float) -> en.World:
  """Both policies write token 0 first with probability `share`; only then do they differ, by KL 1
  after every prefix."""
  size = en.size(vocab=VOCAB, horizon=HORIZON)
  rollout = rng.normal(size=(batch, 1, size, VOCAB))
  rollout[:, 0, 0] = np.log([share, (1 - share) / 2, (1 - share) / 2])
  policy = rollout.copy()
  start = 1
  for t in range(1, HORIZON):
    for n in range(batch):
      for c in range(start, start + VOCAB ** (t - 1)):
        policy[n, 0, c] = shifted(rollout[n, 0, c], rng.normal(size=VOCAB), 1.0)
    start += VOCAB**t
  reward = rng.random((batch, 1, VOCAB**HORIZON))
  return en.world(policy, rollout, horizon=HORIZON, reward=reward)


def signed(rng: np.random.Generator, batch: int, kind: str) -> en.World:
  """Random mismatch, or binary tokens whose two log-ratios are +a and -a.

  Cancelling: a = 2 after one first token (KL 1.5 everywhere), a = 0.1 after the other.
  """
  if kind != 'cancelling':
    strength = {'no mismatch': 0.0, 'weak': 0.3, 'strong': 1.5}[kind]
    return moved(rng, batch, 'dense', strength)
  horizon = 7
  size = en.size(vocab=2, horizon=horizon)
  half = np.concatenate([[0.0]] + [np.arange(2**t) >= 2 ** (t - 1) for t in range(1, horizon)])
  a = np.where(half, 2.0, 0.1) * rng.choice([-1, 1], size=(batch, 1, size))
  a[:, :, 0] = 0
  # Rollout sigmoid(-a) and sigmoid(a), the policy the other way round.
  logits = np.stack([np.zeros_like(a), a], -1)
  reward = rng.random((batch, 1, 2**horizon))
  return en.world(logits[..., ::-1], logits, horizon=horizon, reward=reward)


def baseline(world: en.World) -> jax.Array:
  """E_roll[R | prompt], [X]."""
  mass = en.descend(world.prompts, en.tree(world).rollout)[1]
  return (mass * world.reward).sum(-1) / world.prompts


def compare(g: jax.Array, truth: jax.Array) -> dict[str, jax.Array]:
  """Length of g - truth and the cosine between them."""
  dot, length = (g * truth).sum(), lambda x: jnp.sqrt((x**2).sum())
  norm = length(g) * length(truth)
  cosine = jnp.where(norm > 0, dot / jnp.where(norm > 0, norm, 1), 0)
  return {'bias': length(g - truth), 'cosine': cosine, 'norm': length(g)}


# 1. PPO-clip.


def clipping(world: en.World, limit: float) -> dict:
  """Exact gradients of E_roll of each surrogate, and what comes from outside the clip range."""
  rows = en.rows(world)
  ratios = lambda table: en.rows(dataclasses.replace(world, policy=table)).divergences.log_ratio
  log_ratio, pull = jax.vjp(ratios, world.policy)
  advantages = rows.reward - jnp.repeat(baseline(world), world.reward.shape[1])
  anchor = jnp.zeros_like(log_ratio)
  clipped = lambda logp: jnp.where(
    rows.valid,
    surrogates.ppo_clip(logp, anchor, advantages, rows.valid, clip_low=CLIP, clip_high=CLIP),
    0,
  ).sum()
  ratio = jnp.exp(log_ratio)
  outside = (ratio > 1 + CLIP) | (ratio < 1 - CLIP)
  keep = trust_region.max_kl(rows.divergences, rows.valid, limit=limit)
  plain = jnp.where(rows.valid, ratio * advantages[:, None], 0)
  clip = jax.grad(clipped)(log_ratio)
  weights = {
    'no clip': plain,
    'PPO-clip': clip,
    'no leak': jnp.where(outside, 0, clip),
    'TRM-max': jnp.where(keep[:, None], plain, 0),
  }
  mass = rows.rollout_mass[:, None]
  stacked = jnp.stack([mass * w for w in weights.values()])
  (gradients,) = jax.vmap(pull)(stacked)
  truth = oracle.gradient(oracle.policy_objective, world)
  leak = jnp.where(outside, jnp.abs(clip), 0) * mass
  active = outside & (clip != 0) & (mass > 0)
  square = lambda w: (mass * w**2).sum()
  found = {name: compare(gradients[n], truth) for n, name in enumerate(failure_report.METHODS)}
  return {
    'methods': found,
    'truth': jnp.sqrt((truth**2).sum()),
    'leak': leak.sum() / (jnp.abs(clip) * mass).sum(),
    'leak_high': jnp.where(ratio > 1 + CLIP, leak, 0).sum() / (jnp.abs(clip) * mass).sum(),
    'leak_gradient': compare(gradients[1] - gradients[2], truth)['norm']
    / found['PPO-clip']['norm'],
    'leaks': active.any().astype(float),
    'largest_ratio': jnp.where(active, ratio, 1).max(),
    'square': square(clip) / square(jnp.where(rows.valid, advantages[:, None], 0)),
    'accepted': (rows.rollout_mass * keep).sum(),
    'mean_kl': oracle.divergences(world).sequence_kl,
  }


# 2. Masks.


def kept_share(statistic: jax.Array, mass: jax.Array, share) -> jax.Array:
  """Weights in [0, 1] that keep exactly `share` of the mass, smallest statistic first.

  Equal statistics share what is left: the weight is the probability to be kept.
  """
  # Identical policies differ by rounding alone: no reason to prefer one token to another.
  flat = jnp.where(statistic < 1e-13, 0, statistic).reshape(-1)
  order = jnp.argsort(flat)
  total = jnp.append(jnp.zeros(1), jnp.cumsum(mass.reshape(-1)[order]))
  edge = lambda side: total[jnp.searchsorted(flat[order], flat, side=side)]
  below, upto = edge('left'), edge('right')
  left = (share * total[-1] - below) / jnp.maximum(upto - below, 1e-300)
  return jnp.clip(left, 0, 1).reshape(statistic.shape)


def statistics(world: en.World) -> dict[str, tuple[jax.Array, jax.Array]]:
  """(what a mask ranks by, tokens that it keeps or drops) of each mask."""
  c, found = en.contexts(world), en.tree(world)
  steps = jnp.broadcast_to(c.kl[..., None], world.policy.shape)
  zero = jnp.zeros_like(world.prompts)
  before, largest = en.descend(zero, steps, jnp.maximum)
  alive = jnp.broadcast_to(found.alive[None, :, None], steps.shape).astype(steps.dtype)
  length = en.descend(zero, alive, jnp.add)[1]
  total = en.descend(zero, steps, jnp.add)[1]
  tokens = c.rollout_visits * alive[..., 0]
  responses = en.descend(world.prompts, found.rollout)[1] * length
  return {
    'token': (c.kl, tokens),
    'prefix': (jnp.maximum(before, c.kl), tokens),
    'sequence': (largest, responses),
    'sequence mean': (total / jnp.maximum(length, 1), responses),
  }


def judge(world: en.World, keep: jax.Array) -> dict[str, jax.Array]:
  """What a mask leaves: gradient bias, error, noise of one rollout, pull on the worst context."""
  b = baseline(world)
  truth = oracle.gradient(oracle.policy_objective, world)
  g = oracle.gradient(lambda w: oracle.surrogate(w, keep, baseline=b), world)
  p, q, _, excess, alive = en.tree(world)
  step = (1 + excess) ** 2 * (1 - 2 * q + (q**2).sum(-1, keepdims=True)) * alive[None, :, None]
  whole = keep.shape == world.reward.shape
  # Kept with probability `keep`.
  weight = jnp.ones_like(q) if whole else jnp.broadcast_to(keep, q.shape)
  path = en.descend(jnp.zeros_like(world.prompts), step * weight, jnp.add)[1]
  mass = en.descend(world.prompts, p)[1] * (world.reward - b[:, None]) ** 2
  square = ((mass * keep if whole else mass) * path).sum()
  c = en.contexts(world)
  x, at = jnp.unravel_index(jnp.where(c.reachable, c.kl, -1).argmax(), c.kl.shape)
  found = compare(g, truth)
  centred = oracle.policy_objective(world) - oracle.rollout_objective(world)
  return found | {
    'error': jnp.abs(oracle.error(world, keep)),
    'error_centred': jnp.abs(centred - oracle.surrogate(world, keep, baseline=b)),
    'variance': square - (g**2).sum(),
    'pull': jnp.abs(((q - p)[x, at] * g[x, at]).sum()),
    'truth': jnp.sqrt((truth**2).sum()),
  }


def masks(world: en.World, fractions=failure_report.FRACTIONS) -> dict:
  """Every mask at every share of kept tokens: fields [masks, fractions]."""
  found = statistics(world)
  ones = jnp.ones_like(found['token'][0])
  by_token, by_sequence = [[ones] * len(fractions), [f * ones for f in fractions]], []
  for name, target in zip(
    failure_report.MASKS[2:], [by_token] * 2 + [by_sequence] * 2, strict=True
  ):
    target.append([kept_share(*found[name], f) for f in fractions])
  stack = lambda x: jnp.stack([jnp.stack(y) for y in x])
  every = jax.vmap(jax.vmap(lambda keep: judge(world, keep)))
  parts = every(stack(by_token)[..., None]), every(stack(by_sequence))
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


# 3. and 4. Averages and signed means.


def remaining(parts: jax.Array, keep: jax.Array) -> jax.Array:
  """Largest |Delta_M| over all rewards in [0, 1] of what a mask keeps."""
  up, down = jnp.maximum(parts, 0), jnp.maximum(-parts, 0)
  return jnp.maximum((up * keep).sum(), (down * keep).sum())


def averages(world: en.World) -> dict:
  """Both sides of Proposition 3.10, and the harm of the rare prefix."""
  d = oracle.divergences(world)
  table = sharp_bounds.tabulate(
    T=HORIZON, delta=d.max_kl, epsilon=d.max_tv, d_bar=d.mean_tv, seq_kl=d.sequence_kl,
    seq_tv=d.sequence_tv,
  )  # fmt: skip
  harm = remaining(tight.second_order(world), jnp.ones_like(world.reward))
  rate = en.tree(world).rollout[0, 0, 0]
  return {
    'sequence_kl': d.sequence_kl,
    'max_kl': d.max_kl,
    'harm': harm,
    'harm_of_visit': harm / rate,
    'b_star': table.b_star / 2,
    'pinsker_marginal': table.paper['pinsker_marginal_kl'] / 2,
  }


def diluted(world: en.World, total: int, limit: float) -> dict:
  """The same responses with tokens on which the policies agree, `total` in all: who is kept?"""
  rows = en.rows(world)
  extra = total - HORIZON
  wide = jnp.pad(rows.divergences.kl, ((0, 0), (0, extra)))
  valid = jnp.pad(rows.valid, ((0, 0), (0, extra)), constant_values=True)
  padded = Divergences(kl=wide, tv=wide, log_ratio=wide, entropy=wide)
  harm = tight.second_order(world).reshape(-1)
  whole = remaining(harm, jnp.ones_like(harm))
  keeps = {
    'mean': trust_region.mean_kl(padded, valid, limit=failure_report.AVERAGE),
    'max': trust_region.max_kl(padded, valid, limit=limit),
  }
  return {name: remaining(harm, keep) / whole for name, keep in keeps.items()}


def cancelling(world: en.World, limit: float, geometric: float) -> dict:
  """What a signed mean accepts, and criteria at that same share of accepted responses."""
  rows = en.rows(world)
  d, valid, mass = rows.divergences, rows.valid, rows.rollout_mass
  mean, most = trust_region.mean_over_tokens, trust_region.max_over_tokens
  signed_mean = mean(d.log_ratio, valid)
  largest = most(d.kl, valid)
  statistic = {
    'signed mean': jnp.abs(signed_mean),
    'mean k3': mean(jnp.expm1(d.log_ratio) - d.log_ratio, valid),
    'max k2': most(d.log_ratio**2 / 2, valid),
    'mean KL': mean(d.kl, valid),
    'max KL': largest,
  }
  geo = jnp.exp(signed_mean)
  kept = ((geo >= 1 - geometric) & (geo <= 1 + geometric)).astype(mass.dtype)
  accepted = (mass * kept).sum()
  share = lambda x: x / jnp.where(accepted > 0, accepted, 1)
  parts = tight.second_order(world).reshape(-1)
  whole = remaining(parts, jnp.ones_like(parts))
  whole = jnp.where(whole > 0, whole, 1)
  keeps = {'signed mean': kept}
  keeps |= {k: kept_share(x, mass, accepted) for k, x in statistic.items() if k not in keeps}
  keeps['random'] = accepted * jnp.ones_like(mass)
  return {
    'accepted': accepted,
    'accepted_by_max': (mass * (largest <= limit)).sum(),
    'beyond': share((mass * kept * (largest > limit)).sum()),
    'mean_largest_kl': share((mass * kept * largest).sum()),
    'mean_largest_kl_all': (mass * largest).sum(),
    'largest_kept': jnp.where((kept > 0) & (mass > 0), largest, 0).max(),
    'left': {k: remaining(parts, keep) / whole for k, keep in keeps.items()},
    'largest_kl': {k: (mass * keep * largest).sum() / accepted for k, keep in keeps.items()},
  }


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
  measure = jax.jit(jax.vmap(masks))
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
