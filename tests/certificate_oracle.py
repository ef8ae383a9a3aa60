"""Whole populations as batches: rollouts whose probabilities are multiples of 1/4.

Every response of T tokens then has a probability k / 4^T, so that a batch of 4^T rows holds each
exactly k times, and means over its rows are expectations. NumPy, float64, loops.
"""

import dataclasses
import itertools

import numpy as np

EOS = 0
SPLITS = np.array(sorted(set(itertools.permutations([2, 1, 1])) | {(3, 1, 0), (0, 2, 2)})) / 4


@dataclasses.dataclass
class Population:
  """Rows [4^T, ...] of the rollout, and the truth."""

  log_ratio: np.ndarray
  valid: np.ndarray
  kl: np.ndarray
  tv: np.ndarray
  chi2: np.ndarray
  reward: np.ndarray
  gain: float
  policy: dict
  rollout: dict
  rewards: dict


def draw(seed: int, *, T: int, spread: float, support: bool = True) -> Population:
  """A random pair of policies over 3 tokens with EOS, and rewards, half of them adversarial."""
  rng = np.random.default_rng(seed)
  splits = SPLITS[(SPLITS > 0).all(-1)] if support else SPLITS
  rollout, policy, rewards = {}, {}, {}
  for t in range(T):
    for prefix in itertools.product(range(3), repeat=t):
      p = splits[rng.integers(len(splits))]
      scores = np.log(np.maximum(p, 0.05)) + spread * rng.standard_normal(3)
      if support:
        scores = np.where(p > 0, scores, -np.inf)
      rollout[prefix], policy[prefix] = p, np.exp(scores) / np.exp(scores).sum()
  adversarial = rng.random() < 0.5
  rows, gain = [], 0.0
  for tokens in itertools.product(range(3), repeat=T):
    length = tokens.index(EOS) + 1 if EOS in tokens else T
    if any(token != EOS for token in tokens[length:]):
      continue
    steps = [(rollout[tokens[:t]], policy[tokens[:t]], tokens[t]) for t in range(length)]
    mass = np.prod([p[v] for p, _, v in steps])
    target = np.prod([q[v] for _, q, v in steps])
    ratio = target / mass if mass else np.inf
    reward = float(rng.integers(2)) if rng.random() < 0.5 else rng.random()
    if adversarial:
      reward = float(ratio < 1)
    rewards[tokens[:length]] = reward
    gain += (target - mass) * reward
    count = mass * 4**T
    assert count == round(count)
    row = np.zeros((5, T))
    row[0, :length] = 1
    with np.errstate(divide='ignore', invalid='ignore'):
      for t, (p, q, v) in enumerate(steps):
        row[1, t] = np.log(q[v]) - np.log(p[v]) if p[v] else 0
        row[2, t] = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a)
        row[3, t] = 0.5 * np.abs(p - q).sum()
        row[4, t] = sum(b * b / a - b for a, b in zip(p, q, strict=True) if b)
    rows += [(row, reward)] * round(count)
  stacked = np.stack([row for row, _ in rows])
  return Population(
    valid=stacked[:, 0] > 0,
    log_ratio=stacked[:, 1],
    kl=stacked[:, 2],
    tv=stacked[:, 3],
    chi2=stacked[:, 4],
    reward=np.array([r for _, r in rows]),
    gain=gain,
    policy=policy,
    rollout=rollout,
    rewards=rewards,
  )


def swapped(found: Population, T: int, seed: int) -> tuple[np.ndarray, ...]:
  """(rows of the policy [N, T] as (log old / new, valid, reward)) drawn from the policy itself."""
  rng = np.random.default_rng(seed)
  rows = []
  for tokens, reward in found.rewards.items():
    steps = [(found.rollout[tokens[:t]], found.policy[tokens[:t]], v) for t, v in enumerate(tokens)]
    with np.errstate(divide='ignore'):
      ratios = [np.log(p[v]) - np.log(q[v]) if q[v] else 0 for p, q, v in steps]
    rows.append((np.prod([q[v] for _, q, v in steps]), ratios, reward))
  mass = np.array([m for m, *_ in rows])
  order = rng.permutation(len(rows))
  log_ratio, valid = np.zeros((len(rows), T)), np.zeros((len(rows), T), bool)
  for i, j in enumerate(order):
    log_ratio[i, : len(rows[j][1])], valid[i, : len(rows[j][1])] = rows[j][1], True
  return mass[order], log_ratio, valid, np.array([rows[j][2] for j in order])
