"""How far is each error bound from the truth?

    Error = J(policy) - J(rollout) - L',   L' = E_rollout[R sum_t (ratio_t - 1)],   |Error| <= bound

Three answers, all of them exact: on random pairs of tabular policies, every response enumerated; on
i.i.d. binary tokens up to T = 16384, where the worst reward is a binomial sum; and on a small
trained policy under the mismatch that engines make.

Claim under test: no bound is ever violated, and the growth of the paper's bounds with T^1.5 is an
artefact: the worst error over all rewards grows with the divergence of whole responses alone.
Falsified if: one violation is counted, or the exact worst case at a fixed divergence grows with T.
Honest caveat: the worlds are small and random, and i.i.d. tokens are one family; that the truth
lies below a bound there does not make the bound loose for every policy.

    python -m experiments.bound_tightness                    # 400 worlds, two minutes on one core
    python -m experiments.bound_tightness --worlds 400       # 2000 worlds
"""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
import scipy.stats

from experiments import command, report, tightness_report
from trm_jax import bounds, oracle, policy, progress, sharp_bounds
from trm_jax import enumeration as en
from trm_jax.mismatch import fleet, precision, routing, staleness
from trm_jax.types import InputError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'bound_tightness'
# Prompts, tokens, longest response, EOS: one compiled program each.
SHAPES = ((2, 3, 4, 0), (1, 4, 4, None), (1, 3, 5, 0), (1, 4, 5, 0), (1, 3, 6, 0))
# KL of whole responses, nats.
EDGES = (0.01, 0.3)
SHOWN = (10, 50, 90)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DIVERGENCES = (1e-3, 0.01, 0.1, 0.4)
DELTA = 0.01 / 4096
CONFIG = policy.PolicyConfig(
  width=16, layers=2, heads=2, kv_heads=2, head_width=8, mlp_width=24, experts=4
)
LEARNING_RATE, ENTROPY = 0.005, 0.1
VOCAB, HORIZON, EOS = 4, 4, 0
PROMPTS = np.array([(a, b) for a in (1, 2, 3) for b in (1, 2, 3)], np.int32)
WEIGHTS = lambda x: fleet.Engine(precision=precision.Precision(weights=x))
STALE = lambda k: fleet.Engine(staleness=staleness.Staleness(steps=k))
ENGINES = {
  'none': fleet.Engine(),
  'bf16 weights': WEIGHTS('bfloat16'),
  'fp8 weights': WEIGHTS('float8_e4m3fn'),
  'fp8 activations': fleet.Engine(precision=precision.Precision(activations='float8_e4m3fn')),
  'fp8 KV cache': fleet.Engine(precision=precision.Precision(kv='float8_e4m3fn')),
  'router jitter 0.1': fleet.Engine(routing=routing.Routing(jitter=0.1)),
  'router jitter 1': fleet.Engine(routing=routing.Routing(jitter=1.0)),
  'stale by 1 step': STALE(1),
  'stale by 8 steps': STALE(8),
  'stuck at step 0': fleet.Engine(staleness=staleness.Staleness(stuck=True)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundTightness:
  """Every bound against the exact error: random worlds, binary tokens up to T = 16384, a policy.

  Ends with three tables (bound / |Error| by divergence; the exact worst case against T; a trained
  policy under each mismatch), a figure and a verdict. Takes about two minutes on one core.
  """

  # Receives summary.json, table.md and figure.png.
  directory: pathlib.Path = pathlib.Path('runs/bound_tightness')
  # Write into the directory though it holds results.
  resume: bool = False
  # Random worlds of each of the five shapes (3-4 tokens, 4-6 positions).
  worlds: int = 80
  # Seed of the worlds.
  seed: int = 0
  # Trained policies: initialisations 0, 1, ...
  policies: int = 5
  # Adam steps of each on its exact objective J with an entropy bonus.
  steps: int = 60
  # Copy summary, table and figure to experiments/results/bound_tightness.
  publish: bool = False

  def __post_init__(self):
    for name in ('worlds', 'policies'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be at least 1.')
    if self.steps < 8:
      raise InputError(f'steps={self.steps} must be at least 8: one engine is 8 steps behind.')


# What is measured in one world.


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
    'l2': sharp_bounds.l2(moment),
    'l2_sd_of_reward': jnp.sqrt(variance) * sharp_bounds.l2(moment, sd=1.0),
  }


def library(world: en.World) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """(bounds as printed, with constant 4; ours for R in [0, 1]) from the exact divergences."""
  d, c, ratios = oracle.divergences(world), en.contexts(world), en.tree(world).log_ratio
  spans = en.lengths(world.policy)
  T, delta, epsilon = len(spans), d.max_kl, d.max_tv
  table = sharp_bounds.tabulate(
    T=T, delta=delta, epsilon=epsilon, d_bar=d.mean_tv, seq_kl=d.sequence_kl,
    seq_tv=d.sequence_tv, budget=d.chi2_budget,
  )  # fmt: skip
  epsilon_t, delta_t = largest(world)
  reachable = jnp.broadcast_to(c.reachable[..., None], ratios.shape)
  tau = jnp.where(reachable, jnp.abs(ratios), 0).max()
  d_limit = (jnp.cumsum(d.mean_tv) / np.arange(1, T + 1)).max()
  printed = table.paper | {
    'b_star': table.b_star,
    'pinsker_marginal_kl_closed': bounds.pinsker_marginal_kl_closed(T=T, delta=delta),
    'pinsker_marginal_tv_closed': bounds.pinsker_marginal_tv_closed(
      T=T, epsilon=epsilon, delta=delta
    ),
    'mixed_kl_closed': bounds.mixed_kl_closed(T=T, delta=delta, seq_kl=d.sequence_kl),
    'coupling_closed': bounds.coupling_closed(T=T, epsilon=epsilon),
    'position_wise': sharp_bounds.position_wise(d_bar=d.mean_tv, epsilon_t=epsilon_t),
    'product_by_position': sharp_bounds.product(
      d_bar=d.mean_tv, epsilon_t=epsilon_t, delta_t=delta_t
    ),
    'prefix_budget': sharp_bounds.prefix_budget(epsilon_t=epsilon_t, d_limit=d_limit),
  }
  ours = table.sharp | {
    'b_star_tight': table.b_star_tight,
    'budget_l2_closed': sharp_bounds.budget_l2_closed(d.chi2_budget),
    'pointwise_ratio': sharp_bounds.pointwise_ratio(T=T, tau=tau),
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


def random_worlds(args: BoundTightness, shapes=SHAPES, chunk: int = 40) -> dict:
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


# Binary tokens.


def shift(kl: float, base: float) -> float:
  """h with KL(base || base + h) = kl for a binary token, h > 0."""
  gap = lambda h: -base * math.log1p(h / base) - (1 - base) * math.log1p(-h / (1 - base)) - kl
  return scipy.optimize.brentq(gap, 0, (1 - base) * (1 - 1e-12), xtol=1e-18, rtol=1e-14)


def binary(T: int, seq_kl: float, base: float = 0.5) -> dict[str, float]:
  """The exact worst |Error| over all rewards in [0, 1] for T i.i.d. binary tokens, and bounds.

  W and sum_t (ratio_t - 1) depend on the number of ones alone, so that the worst reward, 1 where
  Y = W - 1 - sum_t (ratio_t - 1) > 0, gives a binomial sum. Same KL at every context.
  """
  h = shift(seq_kl / T, base)
  ones = np.arange(T + 1)
  log_mass = scipy.stats.binom.logpmf(ones, T, base)
  up, down = h / base, -h / (1 - base)
  # W itself may overflow where the rollout never goes.
  policy = np.exp(log_mass + ones * math.log1p(up) + (T - ones) * math.log1p(down))
  mass = np.exp(log_mass)
  Y = policy - mass * (1 + ones * up + (T - ones) * down)
  chi2 = h * h / base / (1 - base)
  table = sharp_bounds.tabulate(
    T=T, delta=seq_kl / T, epsilon=h, d_bar=jnp.full(T, h), seq_kl=seq_kl,
    seq_tv=float(np.abs(policy - mass).sum() / 2), budget=T * chi2,
  )  # fmt: skip
  without = [table.sharp[name] for name in table.sharp if name != 'budget']
  return {
    'T': T,
    'seq_kl': seq_kl,
    'base': base,
    'worst': float(np.maximum(Y, 0).sum()),
    'worst_negative': float(np.maximum(-Y, 0).sum()),
    'b_star': float(table.b_star) / 2,
    'marginal': float(table.sharp['marginal']),
    'b_star_tight': float(min(without)),
    'budget': float(table.sharp['budget']),
    'active': table.active,
  }


def slope(rows: list[dict], name: str) -> float:
  """Exponent of T in a quantity: least squares in logs."""
  return float(np.polyfit(np.log([r['T'] for r in rows]), np.log([r[name] for r in rows]), 1)[0])


def binary_tokens(lengths=LENGTHS, divergences=DIVERGENCES) -> dict:
  """The worst case at a fixed divergence of responses, at a fixed one of tokens, and by base."""
  fixed = {f'{d:g}': [binary(T, d) for T in lengths] for d in divergences}
  token = [binary(T, T * DELTA) for T in lengths]
  exponents = lambda rows: {name: slope(rows, name) for name in ('worst', *tightness_report.BINARY)}
  return {
    'fixed_sequence': fixed,
    'fixed_token': token,
    'exponents_fixed_sequence': exponents(fixed['0.01']),
    'exponents_fixed_token': exponents(token),
    'bases': [binary(4096, 0.01, base) for base in (0.5, 1e-2, 1e-4, 1e-6, 1e-8)],
  }


# A trained policy.


def sorted_reward(x: int, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """The two tokens of the prompt in order and then EOS: a third for each, up to the first slip."""
  right = (tokens[:, :3] == np.array([*sorted(PROMPTS[x]), EOS])) & valid[:, :3]
  return np.cumprod(right, -1).mean(-1)


def table_of(params, engine: fleet.Engine, noise: jax.Array) -> jax.Array:
  """All logits of a policy as an engine computes them; the same router noise at a slot always."""
  hooks = fleet.hooks(engine)

  def logits_of(tokens):
    rows, length = tokens.shape
    keys = jax.vmap(lambda n: jax.random.fold_in(noise, n))(jnp.arange(length))
    keys = jnp.broadcast_to(keys[None], (rows, length))
    start = jnp.zeros(rows, jnp.int32)
    hidden, *_ = policy.apply(params, CONFIG, tokens, start=start, noise_keys=keys, hooks=hooks)
    return policy.logits(params, hidden[:, -1:])[:, 0]

  return en.tabulate(logits_of, PROMPTS, vocab=VOCAB, horizon=HORIZON, eos=EOS)


def trained_policies(args: BoundTightness, engines=ENGINES) -> dict:
  """Error and bounds where the rollout is the same policy through a disturbed engine."""
  flat_logits = np.zeros((len(PROMPTS), en.size(vocab=VOCAB, horizon=HORIZON), VOCAB))
  base = en.world(flat_logits, flat_logits, horizon=HORIZON, reward=sorted_reward, eos=EOS)
  noise = jax.random.key(args.seed)
  optimiser = optax.adam(LEARNING_RATE)

  @jax.jit
  def step(params, state):
    def loss(params):
      world = dataclasses.replace(base, policy=table_of(params, fleet.Engine(), noise))
      c = en.contexts(world)
      # Without it the policy settles on a first token that is always right.
      entropy = (c.policy_visits * c.entropy).sum()
      return -oracle.policy_objective(world) - ENTROPY * entropy

    gradient = jax.grad(loss)(params)
    updates, state = optimiser.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  score = jax.jit(measure)
  # Engines that differ in their weights alone share a program.
  tables = {}
  bar = progress.Progress(args.policies * len(engines), 'policies')
  runs = {name: [] for name in engines}
  objectives = []
  for seed in range(args.policies):
    with jax.enable_x64(False):
      params = policy.init(jax.random.key(seed), CONFIG, VOCAB)
    history, state = [params], optimiser.init(params)
    for _ in range(args.steps):
      params, state = step(params, state)
      history.append(params)
    past = jax.tree.map(lambda *x: np.stack(x), *history[-9:-1][::-1])
    for n, (name, engine) in enumerate(engines.items()):
      weights = staleness.weights(engine.staleness, params, first=history[0], history=past)
      weights = precision.round_weights(weights, engine.precision)
      inside = dataclasses.replace(
        engine,
        staleness=staleness.Staleness(),
        precision=dataclasses.replace(engine.precision, weights=None),
      )
      run = tables.setdefault(inside, jax.jit(functools.partial(table_of, engine=inside)))
      healthy = tables.setdefault(
        fleet.Engine(), jax.jit(functools.partial(table_of, engine=fleet.Engine()))
      )
      world = dataclasses.replace(
        base, policy=healthy(params, noise=noise), rollout=run(weights, noise=noise)
      )
      runs[name].append(score(world) | {'J': oracle.policy_objective(world)})
      bar.update(seed * len(engines) + n + 1)
    objectives.append(float(runs['none'][-1]['J']))
  bar.close()
  out = {
    'J': report.mean_error(objectives),
    'training': {'steps': args.steps, 'learning_rate': LEARNING_RATE, 'entropy': ENTROPY},
    'checks': 0,
    'violations': {},
    'engines': {},
  }
  for name, found in runs.items():
    found = jax.tree.map(lambda *x: np.stack(x), *found)
    given, every = flat(found, 'given')
    worst, on_worst = flat(found, 'worst')
    for side, errors, limits in (('given', given, every), ('worst', worst, on_worst)):
      for bound, x in limits.items():
        tally(out, f'{bound}, {name}, {side} reward', errors, x)
    out['engines'][name] = {
      'seq_kl': report.mean_error(found['seq_kl'].tolist()),
      'error': report.mean_error(given.tolist()),
      'worst': report.mean_error(worst.tolist()),
      'bounds': {bound: report.mean_error(x.tolist()) for bound, x in on_worst.items()},
    }
  return out


# What is said.


def main(args: BoundTightness) -> None:
  """Computes, prints, draws."""
  command.check_directory(args)
  with en.float64():
    summary = {
      'command': 'python -m experiments.bound_tightness --publish',
      'options': {k: getattr(args, k) for k in ('worlds', 'seed', 'policies', 'steps')},
      'random': random_worlds(args),
      'binary': binary_tokens(),
      'policy': trained_policies(args),
    }
  parts = (
    tightness_report.quantiles,
    tightness_report.growth,
    tightness_report.mismatches,
    tightness_report.verdict,
  )
  to = RESULTS if args.publish else None
  report.write(
    args.directory,
    summary,
    [f(summary) for f in parts],
    tightness_report.draw_figure,
    publish_to=to,
  )


if __name__ == '__main__':
  command.run(BoundTightness, main)
