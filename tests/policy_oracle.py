"""The decoder once more, in float64 NumPy: what `trm_jax.policy.decoder` must compute."""

import numpy as np


def attend(q, k, v, slots, start):
  """Causal attention from the definition: query t at slots[t] sees start[b] <= s <= slots[t].

  q [B,T,H,C], k and v [B,S,Hkv,C]. Returns the output and which queries see any key, [B,T].
  """
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  rows, length, heads, width = q.shape
  share = heads // k.shape[2]
  out, sees = np.zeros_like(q), np.zeros((rows, length), bool)
  for b in range(rows):
    for t in range(length):
      keys = range(int(start[b]), min(int(slots[t]) + 1, k.shape[1]))
      sees[b, t] = len(keys) > 0
      for h in range(heads if len(keys) else 0):
        group = h // share
        scores = np.array([q[b, t, h] @ k[b, s, group] for s in keys]) / np.sqrt(width)
        weight = np.exp(scores - scores.max())
        out[b, t, h] = (weight / weight.sum()) @ v[b, keys[0] : keys[-1] + 1, group]
  return out, sees


def rms_norm(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x, positions, base):
  """Rotary positions on complex pairs (first half real, second half imaginary)."""
  half = x.shape[-1] // 2
  turn = np.exp(1j * positions[:, :, None, None] * base ** (-np.arange(half) / half))
  z = (x[..., :half] + 1j * x[..., half:]) * turn
  return np.concatenate([z.real, z.imag], -1)


def swish(x):
  return x / (1 + np.exp(-x))


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def experts(config, p, x):
  """Each token through its chosen experts alone. Returns (output, router scores, routes)."""
  scores = x @ p['router']['kernel']
  routes = np.argsort(-scores, -1, kind='stable')[..., : config.experts_per_token]
  gates = np.take_along_axis(softmax(scores), routes, -1)
  if config.normalize_gates:
    gates = gates / gates.sum(-1, keepdims=True)
  out = np.zeros_like(x)
  for b, t in np.ndindex(x.shape[:2]):
    for gate, e in zip(gates[b, t], routes[b, t], strict=True):
      inner = swish(x[b, t] @ p['gate'][e]) * (x[b, t] @ p['up'][e])
      out[b, t] += gate * (inner @ p['down'][e])
  return out, scores, routes


def as_float64(tree):
  if isinstance(tree, dict):
    return {name: as_float64(value) for name, value in tree.items()}
  return np.asarray(tree, np.float64)


def layer_of(tree, n):
  return {k: layer_of(v, n) if isinstance(v, dict) else v[n] for k, v in tree.items()}


def apply(params, config, tokens, start):
  """(hidden [B,T,D], logits [B,T,V], router scores [B,T,N,E], routes [B,T,N,K]) in float64."""
  params = as_float64(params)
  rows, length = tokens.shape
  x = params['embed'][tokens]
  positions = np.arange(length)[None] - np.asarray(start)[:, None]
  all_scores, all_routes = [], []
  for n in range(config.layers):
    p = layer_of(params['layers'], n)
    y, a = rms_norm(x, p['attention_scale']), p['attention']
    shape = (rows, length, -1, config.head_width)
    q, k, v = ((y @ a[name]['kernel']).reshape(shape) for name in 'qkv')
    q = rotate(rms_norm(q, a['q_scale']), positions, config.rope_base)
    k = rotate(rms_norm(k, a['k_scale']), positions, config.rope_base)
    mixed, _ = attend(q, k, v, np.arange(length), start)
    x = x + mixed.reshape(rows, length, -1) @ a['o']['kernel']
    y, m = rms_norm(x, p['mlp_scale']), p['mlp']
    if config.experts:
      out, scores, routes = experts(config, m, y)
      all_scores.append(scores)
      all_routes.append(routes)
    else:
      out = swish(y @ m['gate']['kernel']) * (y @ m['up']['kernel']) @ m['down']['kernel']
    x = x + out
  hidden = rms_norm(x, params['scale'])
  head = params['embed'] if config.tied_head else params['head']
  stack = lambda xs: np.stack(xs, 2) if xs else None
  return hidden, hidden @ head.T, stack(all_scores), stack(all_routes)
