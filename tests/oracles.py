"""The formulas in float64 NumPy, written down without any care for range, speed or devices.

Nothing here imports the package. Rows are looped over where a loop is plainer than an index.
"""

import numpy as np


def f64(x):
  return np.asarray(x, np.float64)


# Distributions, from logits [..., V] to [...].


def log_softmax(logits, temperature=1.0):
  x = f64(logits) / temperature
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_of(policy, rollout):
  """sum rollout log(rollout / policy) of two log-prob arrays, 0 log 0 = 0."""
  with np.errstate(invalid='ignore'):
    terms = np.exp(rollout) * (rollout - policy)
  return np.where(rollout == -np.inf, 0, terms).sum(-1)


def kl(policy_logits, rollout_logits, temperature=1.0):
  return kl_of(log_softmax(policy_logits, temperature), log_softmax(rollout_logits, temperature))


def total_variation(policy_logits, rollout_logits, temperature=1.0):
  q, p = log_softmax(policy_logits, temperature), log_softmax(rollout_logits, temperature)
  return 0.5 * np.abs(np.exp(q) - np.exp(p)).sum(-1)


def chi2(policy_logits, rollout_logits, temperature=1.0):
  """sum policy^2 / rollout - 1; 0^2 / 0 = 0."""
  q, p = log_softmax(policy_logits, temperature), log_softmax(rollout_logits, temperature)
  with np.errstate(invalid='ignore', over='ignore'):
    near = (np.exp(q) - np.exp(p)) * np.expm1(q - p)
    terms = np.where(np.abs(q - p) < 1, near, np.exp(2 * q - p) - 2 * np.exp(q) + np.exp(p))
  return np.where((q == -np.inf) & (p == -np.inf), 0, terms).sum(-1)


def square(logits, temperature=1.0):
  return (np.exp(log_softmax(logits, temperature)) ** 2).sum(-1)


def jensen_shannon(policy_logits, rollout_logits, temperature=1.0):
  q, p = log_softmax(policy_logits, temperature), log_softmax(rollout_logits, temperature)
  middle = np.logaddexp(q, p) - np.log(2)
  return (kl_of(middle, p) + kl_of(middle, q)) / 2


def renyi(policy_logits, rollout_logits, temperature=1.0, *, alpha):
  q, p = log_softmax(policy_logits, temperature), log_softmax(rollout_logits, temperature)
  with np.errstate(invalid='ignore', over='ignore', divide='ignore'):
    terms = np.where(p == -np.inf, 0, np.exp(alpha * p + (1 - alpha) * q))
    return np.log(terms.sum(-1)) / (alpha - 1)


def entropy(logits, temperature=1.0):
  log_q = log_softmax(logits, temperature)
  with np.errstate(invalid='ignore'):
    return -np.where(log_q == -np.inf, 0, np.exp(log_q) * log_q).sum(-1)


def logp(logits, tokens, temperature=1.0):
  return np.take_along_axis(log_softmax(logits, temperature), np.asarray(tokens)[..., None], -1)[
    ..., 0
  ]


def k1(log_ratio):
  return -f64(log_ratio)


def k2(log_ratio):
  return f64(log_ratio) ** 2 / 2


def k3(log_ratio):
  return np.expm1(f64(log_ratio)) - f64(log_ratio)


# Rows of valid tokens, [B, T] to [B].


def max_over_tokens(x, valid):
  return np.array([row[v].max() if v.any() else 0 for row, v in zip(f64(x), valid, strict=True)])


def mean_over_tokens(x, valid):
  return np.array([row[v].mean() if v.any() else 0 for row, v in zip(f64(x), valid, strict=True)])


# Advantages, [B] to [B].


def baseline_pool(row, keep, group_size, pool):
  """Indices of the rows that `row` is compared with."""
  first = row - row % group_size
  others_only, accepted_only = pool.startswith('loo'), pool.endswith('accepted')
  return [
    j
    for j in range(first, first + group_size)
    if not (others_only and j == row) and not (accepted_only and not keep[j])
  ]


def advantages(rewards, keep, group_size, pool, epsilon=None):
  """Centred rewards; divided by (population deviation + epsilon) where epsilon is given."""
  rewards, found = f64(rewards), []
  for row in range(len(rewards)):
    peers = rewards[baseline_pool(row, keep, group_size, pool)]
    a = rewards[row] - peers.mean() if len(peers) else 0.0
    found.append(a / (peers.std() + epsilon) if len(peers) and epsilon is not None else a)
  return np.array(found)


# Ratios and objectives, [B, T].


def ratio(log_ratio, valid):
  return np.where(valid, np.exp(np.clip(f64(log_ratio), -20, 20)), 1)


def truncated(log_ratio, valid, max_ratio):
  return np.where(valid, np.minimum(ratio(log_ratio, valid), max_ratio), 1)


def sequence_truncated(log_ratio, valid, max_ratio):
  product = np.exp(np.where(valid, f64(log_ratio), 0).sum(-1, keepdims=True))
  return np.where(valid, np.minimum(product, max_ratio), 1)


def effective_sample_size(log_ratio, valid):
  w = np.exp(np.where(valid, f64(log_ratio), 0).sum(-1))[np.asarray(valid).any(-1)]
  return w.sum() ** 2 / (len(w) * (w**2).sum())


def ratio_pg(logp, anchor, advantages, valid):
  return ratio(f64(logp) - f64(anchor), valid) * f64(advantages)[:, None]


def ppo_clip(logp, anchor, advantages, valid, low=0.2, high=0.2):
  r = ratio(f64(logp) - f64(anchor), valid)
  a = np.broadcast_to(f64(advantages)[:, None], r.shape)
  # Outside the band on the side that A pushes towards, the value is that of the border.
  return np.where(a >= 0, np.minimum(r, 1 + high), np.maximum(r, 1 - low)) * a


def decoupled(logp, anchor, rollout, advantages, valid, low=0.2, high=0.2, max_ratio=2.0):
  weight = truncated(f64(anchor) - f64(rollout), valid, max_ratio)
  return weight * ppo_clip(logp, anchor, advantages, valid, low, high)


def aggregate(per_token, valid, keep, reduce_tokens, normalize_by, constant=None):
  """(total, count) by picking the kept tokens out of each row, no mask arithmetic."""
  total, count = 0.0, 0
  for row, v, k in zip(f64(per_token), np.asarray(valid), np.asarray(keep), strict=True):
    chosen = row[v & k]
    count += 1 if normalize_by == 'total' or len(chosen) else 0
    if len(chosen):
      total += chosen.sum() / {'sum': 1, 'mean': v.sum(), 'constant': constant}[reduce_tokens]
  return total, count
