"""Worlds in which token-level trust regions and averages fail, and what masks leave there."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from experiments.laboratory import random_worlds
from experiments.reports import failure_report
from trm_jax import masks
from trm_jax.bounds import sharp
from trm_jax.exact import enumeration as en
from trm_jax.exact import oracle
from trm_jax.objectives import surrogates
from trm_jax.types import Divergences

PROMPTS, VOCAB, HORIZON, EOS = 2, 3, 5, 0
CLIP = 0.2


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
  keep = masks.max_kl(limit=limit)(rows.divergences, rows.valid)
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


def every_mask(world: en.World, fractions=failure_report.FRACTIONS) -> dict:
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
  table = sharp.tabulate(
    T=HORIZON, delta=d.max_kl, epsilon=d.max_tv, d_bar=d.mean_tv, seq_kl=d.sequence_kl,
    seq_tv=d.sequence_tv,
  )  # fmt: skip
  harm = remaining(random_worlds.second_order(world), jnp.ones_like(world.reward))
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
  harm = random_worlds.second_order(world).reshape(-1)
  whole = remaining(harm, jnp.ones_like(harm))
  keeps = {
    'mean': masks.mean_kl(limit=failure_report.AVERAGE)(padded, valid),
    'max': masks.max_kl(limit=limit)(padded, valid),
  }
  return {name: remaining(harm, keep) / whole for name, keep in keeps.items()}


def cancelling(world: en.World, limit: float, geometric: float) -> dict:
  """What a signed mean accepts, and criteria at that same share of accepted responses."""
  rows = en.rows(world)
  d, valid, mass = rows.divergences, rows.valid, rows.rollout_mass
  mean, most = masks.mean_over_tokens, masks.max_over_tokens
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
  parts = random_worlds.second_order(world).reshape(-1)
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
