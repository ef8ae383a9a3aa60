"""The published formulas, written out token by token in NumPy float64 from their papers.

`logp`, `rollout`, `recomputed` are [B, T], `a` [B], `valid` [B, T]. Nothing here knows the package.
"""

import math

import numpy as np


def _rows(valid):
  for i in range(valid.shape[0]):
    yield i, np.flatnonzero(valid[i])


def _exp(x):
  return math.exp(min(max(x, -20.0), 20.0)) if not math.isnan(x) else math.nan


def weight(d, valid, level, rule):
  """rule(w) of each valid token; w is its own, its row's product or geometric mean."""
  out = np.ones(valid.shape)
  for i, at in _rows(valid):
    for t in at:
      x = d[i, t] if level == 'token' else math.fsum(d[i, at])
      out[i, t] = rule(_exp(x / len(at) if level == 'geometric' else x))
  return out


def binary_kl(a, b):
  total = 0.0
  for x, y in ((a, b), (1 - a, 1 - b)):
    if x > 0:
      total += x * (math.log(x / y) if y > 0 else math.inf)
  return total


def kpop(p, q, valid, limit=0.1):
  out = np.ones(valid.shape)
  for i, at in _rows(valid):
    for t in at:
      pair = binary_kl(p[i, t], q[i, t]), binary_kl(q[i, t], p[i, t])
      out[i, t] = float(max(pair) <= limit)
  return out


def cis(p, q, valid):
  """The paper's k = p + (1 - p) e^eps, with eps the difference of the logits."""
  out = np.ones(valid.shape)
  for i, at in _rows(valid):
    for t in at:
      x, y = p[i, t], q[i, t]
      eps = math.log(x / (1 - x)) - math.log(y / (1 - y))
      out[i, t] = min(x + (1 - x) * math.exp(eps), 1 + 2.3 * max(1 - x, 5e-3))
  return out


def row(d, valid, statistic):
  return np.array([statistic(d[i, at]) if len(at) else None for i, at in _rows(valid)], object)


def in_band(low, high, of):
  return lambda d: low <= math.exp(of(d)) <= high


def surrogate(name, d, a, valid):
  """Value per token of each valid token; 0 elsewhere. Forms with sg(c) log p have the value c A.

  `a` is [B] or [B, T]. A log-ratio beyond +-20 counts as +-20 where it is exponentiated.
  """
  out = np.zeros(valid.shape)
  a = by_token(a, valid)
  for i, at in _rows(valid):
    for n, t in enumerate(at):
      r, s = _exp(d[i, t]), _exp(d[i, at].mean())
      log_w, x = float(d[i, at].sum()), a[i, t]
      if name == 'dual_clip':
        loss = max(-x * r, -x * min(max(r, 0.8), 1.2))
        out[i, t] = -(min(loss, -3 * x) if x < 0 else loss)
      elif name == 'delta_clip':
        out[i, t] = -max(-min(r, 4.0) * x, -min(max(r, 0.8), 1.2) * x)
      elif name == 'gspo':
        out[i, t] = min(s * x, min(max(s, 1 - 3e-4), 1 + 4e-4) * x)
      elif name == 'gmpo':
        terms = []
        for j in at:
          sign, v = np.sign(a[i, j]), d[i, j]
          terms.append(v if sign == 0 else sign * min(sign * v, max(min(sign * v, 0.4), -0.4)))
        out[i, t] = x * _exp(sum(terms) / len(terms))
      elif name == 'cispo':
        out[i, t] = min(r, 5.0) * x
      elif name == 'sapo':
        tau = 1.0 if x > 0 else 1.05
        out[i, t] = x * 4 / tau / (1 + math.exp(-min(tau * (r - 1), 700)))
      elif name == 'vespo':
        k, lam = (2.0, 3.0) if x > 0 else (3.0, 2.0)
        lw = min(max(log_w, math.log(1e-8)), 20.0)
        out[i, t] = x * (0.0 if lw >= 6 else math.exp(lam + k * lw - lam * math.exp(lw)))
      elif name == 'topr':
        out[i, t] = x * (1.0 if x > 0 else min(math.exp(min(log_w, 0.0)), 1.0))
      elif name == 'reinforce':
        out[i, t] = x
      elif name == 'ctpo':
        c, wide = _exp(d[i, at[: n + 1]].sum()), math.sqrt(n + 1)
        loss = max(-x * c, -x * min(max(c, math.exp(-0.025 * wide)), math.exp(0.05 * wide)))
        out[i, t] = -(min(loss, -x * math.exp(0.05 * wide)) if x < 0 else loss)
      elif name == 'minpro':
        before = d[i, at[:n]].min() if n else 0.0
        out[i, t] = x * _exp(before + d[i, t])
      else:
        raise KeyError(name)
  return out


def drpo(logp, q_logp, a, valid, limit=0.15):
  """(value, its slope with respect to logp) of each token."""
  p, q, a = np.exp(logp), np.exp(q_logp), by_token(a, valid)
  slope = p / q * (a - np.abs(a) * (p - q) / limit)
  return p / q * a - np.abs(a) * (p - q) ** 2 / (2 * limit * q), slope


def by_token(a, valid):
  return np.broadcast_to(a[:, None] if a.ndim == 1 else a, valid.shape)


def gate(name, logp, q_logp, a, valid, tv, entropy):
  """1 where the token counts. `a` is [B] or [B, T]."""
  out = np.ones(valid.shape, bool)
  a = by_token(a, valid)
  p, q, d = np.exp(logp), np.exp(q_logp), logp - q_logp
  if name == 'm2po':
    alive = [(d[i, t] ** 2, i, t) for i, at in _rows(valid) for t in at]
    while alive and sum(x for x, _, _ in alive) / len(alive) > 0.04:
      _, i, t = worst = max(alive)
      alive.remove(worst)
      out[i, t] = False
    return out
  for i, at in _rows(valid):
    spent = weights = 0.0
    for n, t in enumerate(at):
      x = a[i, t]
      gap, widens = p[i, t] - q[i, t], x * d[i, t] > 0
      if name == 'dppo_tv':
        out[i, t] = not ((x > 0 and gap > 0.15) or (x < 0 and gap < -0.15))
      elif name == 'dppo_kl':
        out[i, t] = not (widens and binary_kl(q[i, t], p[i, t]) > 0.05)
      elif name == 'dppo_exact':
        out[i, t] = not (widens and tv[i, t] > 0.15)
      elif name == 'probability_gap':
        out[i, t] = abs(gap) <= 0.1
      elif name == 'opsm':
        out[i, t] = not (x < 0 and -d[i, at].mean() > 1e-4)
      elif name == 'clip_band':
        r = _exp(d[i, t])
        out[i, t] = not ((x > 0 and r > 1.28) or (x < 0 and r < 0.8))
      elif name == 'estr':
        out[i, t] = d[i, t] ** 2 / (entropy[i, t] + 1e-3) <= 1
      elif name == 'vaco':
        out[i, t] = not (widens and np.abs(np.expm1(d[i, at])).mean() / 2 > 0.05)
      elif name == 'negative_suffix':
        out[i, t] = x >= 0 or all(math.log(0.2) <= d[i, j] <= math.log(5) for j in at[: n + 1])
      elif name == 'cppo':
        w = 1 - 0.2 * n / (len(at) - 1) if len(at) > 1 else 1.0
        spent += w * abs(gap)
        out[i, t] = not widens or (w * abs(gap) <= 0.15 and spent <= 0.15 + 0.015 * weights)
        weights += w
      else:
        raise KeyError(name)
  return out


def covariance(logp, a, valid):
  """Product of deviations from the means over all tokens."""
  a = by_token(a, valid)
  return (a - a[valid].mean()) * (logp - logp[valid].mean())


def jackpot(p, q, p_0, tv, valid):
  """Algorithm 1 with lambda = 1 and both caps 2, from log-probs."""
  out = np.ones(valid.shape)
  for i, at in _rows(valid):
    for t in at:
      w = (1 - tv[i, t]) * max(1.0, _exp(p[i, t] - q[i, t]))
      out[i, t] = min(w, 2.0) * min(_exp(p_0[i, t] - p[i, t]), 2.0)
  return out


def optimal_baseline(reward, logp, square, valid, groups):
  """R - B_t, t counting each row's own tokens, row by row."""
  out = np.zeros(valid.shape)
  energy = [
    np.cumsum([1 - 2 * math.exp(logp[i, t]) + square[i, t] for t in at]) for i, at in _rows(valid)
  ]
  for i, at in _rows(valid):
    for n, t in enumerate(at):
      peers = [j for j in range(len(reward)) if groups[j] == groups[i] and len(energy[j]) > n]
      top = sum(reward[j] * energy[j][n] for j in peers)
      base = top / sum(energy[j][n] for j in peers) if len(peers) > 1 else 0.0
      out[i, t] = reward[i] - base
  return out
