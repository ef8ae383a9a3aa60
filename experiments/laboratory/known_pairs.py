"""Pairs of policies whose gain is known exactly, from an easy one to a hidden loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trm_jax.exact import enumeration, oracle

VOCAB, HORIZON, EOS = 4, 5, 0
BRANCH = 3  # the first token of the branch that breaks in a rare disaster


@dataclasses.dataclass(frozen=True)
class Scenario:
  """All responses of a pair of policies, as rows with their probabilities; NumPy, float64."""

  name: str
  rows: dict[str, np.ndarray]
  mass: np.ndarray
  new_mass: np.ndarray
  gain: float
  seq_kl: float
  correlation: float


def observe(name: str, world: enumeration.World) -> Scenario:
  """Every response with what a trainer would see of it. Runs in float64."""
  found = enumeration.rows(world)
  d = found.divergences
  rows = dict(
    log_ratio=d.log_ratio,
    valid=found.valid,
    kl=d.kl,
    tv=d.tv,
    chi2=d.chi2,
    reward=found.reward,
  )
  rows = {k: np.asarray(v) for k, v in rows.items()}
  mass, new_mass = np.asarray(found.rollout_mass), np.asarray(found.policy_mass)
  weight = np.where(mass > 0, new_mass / np.where(mass > 0, mass, 1), 0)
  mean, spread = (mass * rows['reward']).sum(), np.sqrt((mass * (weight - 1) ** 2).sum())
  sd = np.sqrt((mass * (rows['reward'] - mean) ** 2).sum())
  gain = float(oracle.policy_objective(world) - oracle.rollout_objective(world))
  return Scenario(
    name=name,
    rows=rows,
    mass=mass,
    new_mass=new_mass,
    gain=gain,
    seq_kl=float(oracle.divergences(world).sequence_kl),
    correlation=gain / (sd * spread) if sd * spread > 0 else 0.0,
  )


def _reward(rng, share: float) -> np.ndarray:
  """0 or 1 for every response; what follows EOS earns nothing."""
  _, _, possible = enumeration.sequences(vocab=VOCAB, horizon=HORIZON, eos=EOS)
  return np.where(possible, rng.random(possible.size) < share, 0.0)[None]


def _world(policy, rollout, reward) -> enumeration.World:
  return enumeration.world(policy, rollout, horizon=HORIZON, reward=reward, eos=EOS)


@jax.jit
def _kl_after(step, world, direction):
  moved = dataclasses.replace(world, policy=world.rollout + step * direction)
  return oracle.divergences(moved).sequence_kl


@jax.jit
def _directions(world, random):
  """(E[R | c, v] - E[R | c], a random direction without any of it), of one size."""
  tree = enumeration.tree(world)
  value = enumeration.ascend(world.reward, tree.rollout)
  towards = value - (tree.rollout * value).sum(-1, keepdims=True)
  # Under the visits and probabilities, along which KL measures distance.
  weight = enumeration.contexts(world).rollout_visits[..., None] * tree.rollout
  inner = lambda a, b: (weight * a * b).sum()
  random = random - (tree.rollout * random).sum(-1, keepdims=True)
  random = random - towards * inner(random, towards) / inner(towards, towards)
  return towards, random * jnp.sqrt(inner(towards, towards) / inner(random, random))


def smooth(name: str, rng, *, seq_kl: float, noise: float, sign: float = 1.0) -> Scenario:
  """The policy steps along the natural gradient and `noise` times as far beside it, to a KL."""
  shape = (1, enumeration.size(vocab=VOCAB, horizon=HORIZON), VOCAB)
  rollout, reward = jnp.asarray(rng.normal(0, 0.7, shape)), _reward(rng, 0.4)
  still = _world(rollout, rollout, reward)
  towards, beside = _directions(still, jnp.asarray(rng.standard_normal(shape)))
  direction = sign * towards + noise * beside
  low, high = 0.0, 60.0
  for _ in range(40):
    middle = 0.5 * (low + high)
    too_far = float(_kl_after(middle, still, direction)) > seq_kl
    low, high = (low, middle) if too_far else (middle, high)
  return observe(name, _world(rollout + middle * direction, rollout, reward))


def no_effect(rng) -> Scenario:
  """The policies differ, the reward is a coin that hears nothing of it: two rows a response."""
  base = smooth('no effect', rng, seq_kl=0.02, noise=1.0)
  rows = {k: np.concatenate([v, v]) for k, v in base.rows.items()}
  rows['reward'] = np.repeat([0.0, 1.0], base.mass.size)
  twice = lambda x: np.concatenate([x, x]) / 2
  return dataclasses.replace(
    base, rows=rows, mass=twice(base.mass), new_mass=twice(base.new_mass), gain=0.0, correlation=0.0
  )


def rare_disaster(rng, *, share: float) -> Scenario:
  """A branch of probability `share` breaks; elsewhere the policy gains a little less than that."""
  count = enumeration.size(vocab=VOCAB, horizon=HORIZON)
  rollout = rng.normal(0, 0.3, (1, count, VOCAB))
  first = np.log(np.array([1, 1, 1, 3 * share / (1 - share)]))
  rollout[0, 0] = first
  rollout[0, 1 + BRANCH] = [
    -4,
    4,
    -4,
    -4,
  ]  # the branch's second token is nearly always the right one
  tokens, _, possible = enumeration.sequences(vocab=VOCAB, horizon=HORIZON, eos=EOS)
  inside = tokens[:, 0] == BRANCH
  reward = np.where(inside, tokens[:, 1] == 1, tokens[:, 0] == 1) * possible
  # 1 of the three other first tokens is right; moving `shift` of log-odds to it gains about 2/9.
  shift = 0.85 * share * 9 / 2
  policy = rollout.copy()
  policy[0, 0, 1] += shift
  policy[0, 1 + BRANCH] = [4, -4, -4, -4]
  world = _world(jnp.asarray(policy), jnp.asarray(rollout), reward[None].astype(float))
  return observe(f'rare disaster, {share:g}', world)


def scenarios(seed: int) -> list[Scenario]:
  """From an easy gain to a hidden loss."""
  rng = np.random.default_rng(seed)
  with enumeration.float64():
    return [
      smooth('small clean step', rng, seq_kl=1e-4, noise=0.0),
      smooth('clean step', rng, seq_kl=0.01, noise=0.0),
      smooth('large clean step', rng, seq_kl=0.9, noise=0.0),
      smooth('small noisy step', rng, seq_kl=1e-3, noise=4.0),
      smooth('noisy step', rng, seq_kl=0.01, noise=4.0),
      smooth('large noisy step', rng, seq_kl=0.12, noise=4.0),
      no_effect(rng),
      smooth('step backwards', rng, seq_kl=0.01, noise=1.0, sign=-1.0),
      rare_disaster(rng, share=3e-3),
      rare_disaster(rng, share=3e-4),
    ]
