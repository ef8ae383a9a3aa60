"""Every bound beside the exact error in one small world, and its quantiles over random worlds."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reports import tightness_report
from trm_jax import bounds
from trm_jax.bounds import sharp
from trm_jax.exact import enumeration as en
from trm_jax.exact import oracle
from trm_jax.runs import progress

# Prompts, tokens, longest response, EOS: one compiled program each.
SHAPES = ((2, 3, 4, 0), (1, 4, 4, None), (1, 3, 5, 0), (1, 4, 5, 0), (1, 3, 6, 0))
# KL of whole responses, nats.
EDGES = (0.01, 0.3)
SHOWN = (10, 50, 90)


def second_order(world: en.World) -> jax.Array:
  """P(y) Y of every sequence, Y = W - 1 - sum_t (ratio_t - 1), so that Error = E[R Y]; [X, S]."""
  every = dataclasses.replace(world, reward=jnp.ones_like(world.reward))
  return -oracle.delta_harm(every).sequences


def largest(world: en.World) -> tuple[jax.Array, jax.Array]:
  """Largest TV and KL over the reachable contexts of each position, [T]."""
  c = en.contexts(world)
  most = lambda x, span: jnp.where(c.reachable, x, 0)[:, span].max()
  spans = en.lengths(world.policy)
  return tuple(jnp.stack([most(x, span) for span in spans]) for x in (c.tv, c.kl))


def sampled(world: en.World, reward: jax.Array) -> dict[str, jax.Array]:
  """Bounds that rollouts themselves can estimate: expectations under the rollout, no maxima."""
  p, _, _, excess, _ = en.tree(world)
  c = en.contexts(world)
  spans = en.lengths(p)
  # E[sum of TV (KL) over all later contexts | prefix and token].
  later = {'tv': [], 'kl': []}
  for name, found in later.items():
    ahead = jnp.zeros_like(p[:, spans[-1]])
    for n, span in reversed(list(enumerate(spans))):
      found.insert(0, ahead)
      ahead = getattr(c, name)[:, span] + (p[:, span] * ahead).sum(-1)
      ahead = ahead.reshape(p[:, spans[n - 1]].shape) if n else ahead
  move = c.rollout_visits[..., None] * p * jnp.abs(excess)
  tv = jnp.stack([(move[:, s] * x).sum() for s, x in zip(spans, later['tv'], strict=True)])
  kl = jnp.stack([(move[:, s] * x).sum() for s, x in zip(spans, later['kl'], strict=True)])
  d_bar = jnp.stack([move[:, s].sum() / 2 for s in spans])
  jensen = jnp.sqrt(d_bar * kl)
  epsilon_t, delta_t = largest(world)
  ahead = lambda x: x.sum() - jnp.cumsum(x)
  cap = jnp.minimum(1, jnp.minimum(ahead(epsilon_t), jnp.sqrt(jnp.abs(ahead(delta_t)) / 2)))
  moment = (c.rollout_visits * (c.prefix_ratio - 1) ** 2 * c.chi2).sum()
  mass = en.descend(world.prompts, p)[1]
  mean = (mass * reward).sum(-1, keepdims=True) / world.prompts[:, None]
  variance = (mass * (reward - mean) ** 2).sum()
  return {
    'sampled_future_tv': tv.sum(),
    'jensen_pinsker': jensen.sum(),
    'min_per_position': jnp.minimum(jnp.minimum(tv, jensen), 2 * d_bar * cap).sum(),
    'l2': sharp.l2(moment),
    'l2_sd_of_reward': jnp.sqrt(variance) * sharp.l2(moment, sd=1.0),
  }


def library(world: en.World) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """(bounds as printed, with constant 4; ours for R in [0, 1]) from the exact divergences."""
  d, c, ratios = oracle.divergences(world), en.contexts(world), en.tree(world).log_ratio
  spans = en.lengths(world.policy)
  T, delta, epsilon = len(spans), d.max_kl, d.max_tv
  table = sharp.tabulate(
    T=T, delta=delta, epsilon=epsilon, d_bar=d.mean_tv, seq_kl=d.sequence_kl,
    seq_tv=d.sequence_tv, budget=d.chi2_budget,
  )  # fmt: skip
  epsilon_t, delta_t = largest(world)
  reachable = jnp.broadcast_to(c.reachable[..., None], ratios.shape)
  tau = jnp.where(reachable, jnp.abs(ratios), 0).max()
  d_limit = (jnp.cumsum(d.mean_tv) / np.arange(1, T + 1)).max()
  printed = table.paper | {
    'b_star': table.b_star,
    # Printed as equal to the sums, of which they are upper bounds.
    'pinsker_marginal_kl_closed': 4 / 3 * T**1.5 * delta,
    'pinsker_marginal_tv_closed': 8 / 3 * T**1.5 * epsilon * jnp.sqrt(delta / 2),
    'mixed_kl_closed': 2.0 * T * jnp.sqrt(delta) * jnp.sqrt(d.sequence_kl),
    'coupling_closed': jnp.where(
      T * epsilon <= 1, bounds.classical_tv(T=T, epsilon=epsilon), 4.0 * T * epsilon
    ),
    'position_wise': sharp.position_wise(d_bar=d.mean_tv, epsilon_t=epsilon_t),
    'product_by_position': sharp.product(d_bar=d.mean_tv, epsilon_t=epsilon_t, delta_t=delta_t),
    'prefix_budget': sharp.prefix_budget(epsilon_t=epsilon_t, d_limit=d_limit),
  }
  spent = jnp.minimum(d.chi2_budget, 160)
  ours = table.sharp | {
    'b_star_tight': table.b_star_tight,
    'budget_l2_closed': spent / math.sqrt(8) * jnp.exp(spent / 2),
    'pointwise_ratio': sharp.pointwise_ratio(T=T, tau=tau),
  }
  return printed, ours


def measure(world: en.World) -> dict:
  """The truth for the world's reward and for its worst one, and every bound on both."""
  parts = second_order(world)
  worst = jnp.where(parts > 0, 1.0, 0.0)
  bad = dataclasses.replace(world, reward=worst)
  printed, ours = library(world)
  sides = {}
  for name, w in (('given', world), ('worst', bad)):
    sides[name] = {'error': jnp.abs(oracle.delta(w)), 'sampled': sampled(w, w.reward)}
  return {
    'seq_kl': oracle.divergences(world).sequence_kl,
    'identity': jnp.abs(oracle.error(world) + oracle.delta(world)),
    'half_mean_abs': jnp.abs(parts).sum() / 2,
    'printed': printed,
    'ours': ours,
    'sides': sides,
  }


def flat(found: dict, side: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """(|Error|, bounds by name) of many worlds, the printed ones halved for R in [0, 1]."""
  numbers = jax.tree.map(np.asarray, found)
  halved = {name: x / 2 for name, x in numbers['printed'].items()}
  every = halved | numbers['ours'] | numbers['sides'][side]['sampled']
  names = [k for k in every if k != 'b_star'] + ['b_star']
  every = {name: every[name] for name in names}
  every['min_of_all'] = np.min(list(every.values()), 0)
  return numbers['sides'][side]['error'], every


def tally(out: dict, name: str, errors: np.ndarray, bound: np.ndarray) -> None:
  """Counts where a bound is below the error by more than rounding."""
  out['checks'] += len(errors)
  broken = int((bound < errors * (1 - 1e-9) - 1e-14).sum())
  if broken:
    out['violations'][name] = broken


# Random worlds.


def draw(rng: np.random.Generator, shape: tuple, count: int) -> en.World:
  """A batch of worlds: log-uniform strength; dense, sparse or late differences; two rewards."""
  prompts, vocab, horizon, eos = shape
  size = (count, prompts, en.size(vocab=vocab, horizon=horizon), vocab)
  rollout = rng.normal(size=size)
  depth = np.concatenate([np.full(vocab**t, t) for t in range(horizon)])
  where = np.stack([np.ones(size[2]), np.ones(size[2]), depth >= horizon // 2])
  where = where[rng.integers(3, size=count)][:, None, :, None]
  sparse = rng.random(size[:3])[..., None] < rng.choice([0.3, 1.0], size=(count, 1, 1, 1))
  strength = 10 ** rng.uniform(-2.2, 0.6, size=(count, 1, 1, 1))
  reward = rng.random((count, prompts, vocab**horizon))
  binary = rng.random((count, 1, 1)) < 0.5
  return en.world(
    rollout + strength * where * sparse * rng.normal(size=size),
    rollout,
    horizon=horizon,
    reward=np.where(binary, reward < 0.3, reward),
    prompts=rng.dirichlet(np.ones(prompts), size=count),
    eos=eos,
  )


def random_worlds(args: Any, shapes=SHAPES, chunk: int = 40) -> dict:
  """Quantiles of bound / |Error| by divergence, and every violation."""
  rng = np.random.default_rng(args.seed)
  run = jax.jit(jax.vmap(measure))
  bar = progress.Progress(args.worlds * len(shapes), 'random worlds')
  found, done = [], 0
  for shape in shapes:
    for start in range(0, args.worlds, chunk):
      # One size of batch for all: nothing compiles twice.
      batch = draw(rng, shape, min(chunk, args.worlds))
      kept = min(chunk, args.worlds - start)
      found.append(jax.tree.map(lambda x, n=kept: np.asarray(x)[:n], run(batch)))
      done += kept
      bar.update(done)
  bar.close()
  found = jax.tree.map(lambda *x: np.concatenate(x), *found)
  band = np.digitize(found['seq_kl'], EDGES)
  out = {
    'worlds': done,
    'count': dict(
      zip(tightness_report.BANDS, np.bincount(band, minlength=3).tolist(), strict=True)
    ),
    'identity_off_by': float(found['identity'].max()),
    'worst_is_half_mean_abs_off_by': float(
      np.abs(found['half_mean_abs'] - found['sides']['worst']['error']).max()
    ),
    'checks': 0,
    'violations': {},
    'largest_share': {},
    'sides': {},
    'points': {},
  }
  for side in ('given', 'worst'):
    errors, every = flat(found, side)
    for name, x in every.items():
      tally(out, f'{name}, {side} reward', errors, x)
      share = float((errors / np.where(x > 0, x, np.inf)).max())
      out['largest_share'][name] = max(out['largest_share'].get(name, 0), share)
    known = errors > 1e-13  # a late difference of one token has no second order at all
    out['sides'][side] = {
      name: [
        np.percentile(x[known & (band == n)] / errors[known & (band == n)], SHOWN).tolist()
        if (known & (band == n)).any()
        else None
        for n in range(3)
      ]
      for name, x in every.items()
    }
    out['points'][side] = {'error': errors.tolist(), 'seq_kl': found['seq_kl'].tolist()} | {
      name: every[name].tolist() for name in ('b_star', 'b_star_tight', 'min_of_all')
    }
  return out
