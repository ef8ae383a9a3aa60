"""The oracle against a second enumeration: variable-length responses, one by one, in Python."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import masks, policy
from trm_jax.exact import enumeration, oracle
from trm_jax.objectives import surrogates
from trm_jax.rollouts import sampling
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record
from trm_jax.types import InputError

# X, V, T, eos
SHAPES = [(2, 3, 3, 0), (3, 2, 4, 1), (1, 2, 3, None), (2, 4, 1, 2)]


@pytest.fixture
def float32():
  """For tests that start outside the scope."""


@pytest.fixture(autouse=True)
def exact(request):
  if 'float32' in request.fixturenames:
    yield
  else:
    with enumeration.float64():
      yield


# The second enumeration -------------------------------------------------------------------------


def number(prefix, vocab):
  """Row of a prefix in the table: those of smaller length come first."""
  return sum(vocab**t for t in range(len(prefix))) + functools.reduce(
    lambda n, v: n * vocab + v, prefix, 0
  )


def leaf(tokens, vocab, horizon, eos):
  """Place of a response among the V**T sequences: padded by EOS."""
  tokens = tokens + (eos,) * (horizon - len(tokens))
  return number(tokens, vocab) - sum(vocab**t for t in range(horizon))


def softmax(logits):
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def walk(q_table, p_table, reward, prompts, *, vocab, horizon, eos, sequence=None, token=None):
  """Every response of every prompt, each with what its tokens are worth."""
  found = []
  for x, weight in enumerate(prompts):
    for length in range(1, horizon + 1):
      for y in itertools.product(range(vocab), repeat=length):
        if eos in y[:-1] or (length < horizon and y[-1] != eos):
          continue
        prefixes = [(x, y[:t]) for t in range(length)]
        rows = [number(y[:t], vocab) for t in range(length)]
        q = [softmax(q_table[x, c]) for c in rows]
        p = [softmax(p_table[x, c]) for c in rows]
        q_y = [a[v] for a, v in zip(q, y, strict=True)]
        p_y = [a[v] for a, v in zip(p, y, strict=True)]
        n = leaf(y, vocab, horizon, eos)
        found.append(
          types.SimpleNamespace(
            x=x, y=y, leaf=n, prefixes=prefixes, rows=rows, q=q, p=p,
            rho=[a / b if b > 0 else 1.0 for a, b in zip(q_y, p_y, strict=True)],
            q_y=q_y,
            rollout=weight * math.prod(p_y),
            policy=weight * math.prod(q_y),
            reward=reward[x, n],
            m=1.0 if sequence is None else float(sequence[x, n]),
            tokens=[1.0] * length if token is None
            else [float(token[x, c, v]) for c, v in zip(rows, y, strict=True)],
          )
        )  # fmt: skip
  return found


def future(s, t):
  return math.prod(s.rho[t + 1 :])


def brute_surrogate(found, baseline=0.0, less=1.0):
  total = 0.0
  for s in found:
    inner = sum(m * (r - less) for m, r in zip(s.tokens, s.rho, strict=True))
    b = baseline if np.ndim(baseline) == 0 else baseline[s.x]
    total += s.rollout * s.m * (s.reward - b) * inner
  return total


def brute_delta(found):
  return sum(
    s.rollout * s.m * s.reward * sum((r - 1) * (1 - future(s, t)) for t, r in enumerate(s.rho))
    for s in found
  )


def kl_of(p, q):
  with np.errstate(divide='ignore'):
    return sum(a * (np.log(a) - np.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def chi2_of(q, p):
  return sum(math.inf if b == 0 else a * a / b for a, b in zip(q, p, strict=True) if a > 0) - 1


def brute_divergences(found, horizon):
  """What `oracle.divergences` holds, by dictionaries of visits."""
  visits = [({}, {}) for _ in range(horizon)]
  at = {}
  for s in found:
    for t in range(horizon):
      # An ended response stays where it ended.
      key = s.prefixes[t] if t < len(s.y) else (s.x, s.y)
      if t < len(s.y):
        at[key] = (s.q[t], s.p[t])
      for side, mass in zip(visits[t], (s.rollout, s.policy), strict=True):
        side[key] = side.get(key, 0.0) + mass
  out = types.SimpleNamespace()
  reached = [k for level in visits for k in level[0] if level[0][k] > 0 or level[1][k] > 0]
  alive = [at[k] for k in reached if k in at]
  tv = lambda q, p: 0.5 * np.abs(q - p).sum()
  mean = lambda d: np.array(
    [sum(m * d(*at[k]) for k, m in level[0].items() if k in at and m > 0) for level in visits]
  )
  kl = lambda q, p: kl_of(p, q)
  out.max_kl = max(kl(*a) for a in alive)
  out.max_tv = max(tv(*a) for a in alive)
  out.max_chi2 = max(chi2_of(*a) for a in alive)
  out.mean_kl, out.mean_tv, out.mean_chi2 = mean(kl), mean(tv), mean(chi2_of)
  values = lambda level, i: np.array([level[i][k] for k in level[0]])
  out.visit_tv = np.array([tv(values(v, 1), values(v, 0)) for v in visits])
  out.visit_kl = np.array([kl_of(values(v, 0), values(v, 1)) for v in visits])
  ends = [np.array([s.rollout for s in found]), np.array([s.policy for s in found])]
  out.sequence_kl, out.sequence_tv = kl_of(*ends), tv(*ends)
  out.sequence_chi2 = (
    sum(math.inf if a == 0 else b * b / a for a, b in zip(*ends, strict=True) if b > 0) - 1
  )
  out.chi2_budget = max(
    sum(chi2_of(q, p) for q, p in zip(s.q, s.p, strict=True)) for s in found if s.rollout > 0
  )
  return out


# Instances --------------------------------------------------------------------------------------


def instance(seed, shape, support='full'):
  """Arrays of a random world and of masks: (policy, rollout, reward, prompts, sequence, token)."""
  count, vocab, horizon, eos = shape
  rng = np.random.default_rng(seed)
  size = (count, sum(vocab**t for t in range(horizon)), vocab)
  p = rng.normal(size=size)
  q = p + 0.5 * rng.normal(size=size)
  for name, x in (('rollout', p), ('policy', q)):
    if support == name:  # top-k: the least likely token has no mass
      np.put_along_axis(x, x.argmin(-1)[..., None], -np.inf, -1)
  reward = rng.random((count, vocab**horizon))
  prompts = rng.dirichlet(np.ones(count))
  if count == 3:
    prompts[:] = 0.25, 0.75, 0
  return q, p, reward, prompts, rng.random(reward.shape) < 0.7, rng.random(size)


def make(seed, shape, support='full'):
  q, p, reward, prompts, sequence, token = instance(seed, shape, support)
  count, vocab, horizon, eos = shape
  world = enumeration.world(q, p, horizon=horizon, reward=reward, prompts=prompts, eos=eos)
  second = functools.partial(walk, q, p, reward, prompts, vocab=vocab, horizon=horizon, eos=eos)
  return world, jnp.asarray(sequence), jnp.asarray(token), second


def middling(q, p):
  """Prefixes after which the policies differ by less than they mostly do, and the first; NumPy."""
  tv = 0.5 * np.abs(softmax(q) - softmax(p)).sum(-1)
  tv[:, 0] = 0
  return jnp.asarray(tv <= np.quantile(tv, 0.7))


@jax.jit
def everything(world, sequence, token, baseline, good):
  """What the oracle says, in one program a shape."""
  good = oracle.prefix_mask(world, good)
  inside = oracle.patched(world, good)
  return {
    'good': good,
    'prefix': oracle.surrogate(world, good),
    'inside': [f(inside) for f in (oracle.surrogate, oracle.policy_objective, oracle.delta)],
    'inside divergences': oracle.divergences(inside),
    'delta_harm': oracle.delta_harm(world, sequence),
    'policy': oracle.policy_objective(world),
    'rollout': oracle.rollout_objective(world),
    'surrogate': oracle.surrogate(world),
    'surrogate_a': oracle.surrogate_a(world),
    'surrogate_a, centred': oracle.surrogate_a(world, baseline=baseline),
    'error': oracle.error(world),
    'error_a': oracle.error_a(world, baseline=baseline),
    'delta': oracle.delta(world),
    'masked': oracle.surrogate(world, sequence),
    'masked, centred': oracle.surrogate(world, sequence, baseline=baseline),
    'masked_a': oracle.surrogate_a(world, sequence),
    'masked error': oracle.error(world, sequence),
    'masked delta': oracle.delta(world, sequence),
    'tokens': oracle.surrogate(world, token),
    'tokens_a': oracle.surrogate_a(world, token),
    'rejected': oracle.rejected(world, sequence),
    'divergences': oracle.divergences(world),
    'moments': [oracle.ratio_moments(world, order=n) for n in (1, 2, 3)],
  }


def check_prefix_forms(got, second, good):
  """The patched policy is theta up to the first bad prefix, and the rollout from there on."""
  found = second()
  for s in found:
    s.tokens = np.cumprod([float(good[s.x, row]) for row in s.rows]).tolist()
    for row, m in zip(s.rows, s.tokens, strict=True):
      assert got['good'][s.x, row, 0] == m
  close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-14)
  close(got['prefix'], brute_surrogate(found))
  close(got['inside'][0], brute_surrogate(found))
  kl = [[m * kl_of(p, q) if m else 0 for m, q, p in zip(s.tokens, s.q, s.p, strict=True)]
        for s in found]  # fmt: skip
  tv = [[m * 0.5 * np.abs(q - p).sum() for m, q, p in zip(s.tokens, s.q, s.p, strict=True)]
        for s in found]  # fmt: skip
  sides = [s.q_y for s in found], [[p[v] for p, v in zip(s.p, s.y, strict=True)] for s in found]
  mass = []
  for s, q, p in zip(found, *sides, strict=True):
    s.rho = [r if m else 1.0 for r, m in zip(s.rho, s.tokens, strict=True)]
    start = s.rollout / math.prod(p) if s.rollout else 0.0
    mass.append(start * math.prod(a if m else b for a, b, m in zip(q, p, s.tokens, strict=True)))
  if all(b > 0 for p in sides[1] for b in p):
    close(got['inside'][1], sum(m * s.reward for m, s in zip(mass, found, strict=True)))
  close(got['inside'][2], brute_delta(found))
  d = got['inside divergences']
  average = lambda x: sum(s.rollout * sum(k) for s, k in zip(found, x, strict=True) if s.rollout)
  close(d.sequence_kl, average(kl))
  close(d.mean_tv.sum(), average(tv))


def check_delta_harm(harm, found):
  """From the definition, term by term."""
  sequences, tokens = np.zeros(harm.sequences.shape), np.zeros(harm.tokens.shape)
  for s in found:
    for t, (row, v, r) in enumerate(zip(s.rows, s.y, s.rho, strict=True)):
      share = s.rollout * s.m * s.reward * (r - 1) * (1 - future(s, t))
      tokens[s.x, row, v] += share
      sequences[s.x, s.leaf] += share
  np.testing.assert_allclose(harm.sequences, sequences, rtol=1e-10, atol=1e-15)
  np.testing.assert_allclose(harm.tokens, tokens, rtol=1e-10, atol=1e-15)
  np.testing.assert_allclose(harm.tokens.sum(), brute_delta(found), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize('support', ['full', 'rollout', 'policy'])
@pytest.mark.parametrize(
  'seed, shape',
  [pytest.param(i, x, marks=[pytest.mark.slow] * (i in (1, 2))) for i, x in enumerate(SHAPES)],
)
def test_every_quantity(seed, shape, support):
  world, sequence, token, second = make(seed, shape, support)
  b = np.linspace(0.1, 0.6, shape[0])
  good = middling(world.policy, world.rollout)
  got = everything(world, sequence, token, jnp.asarray(b), good)
  found, masked, by_token = second(), second(sequence=sequence), second(token=token)
  mean = lambda side: sum(getattr(s, side) * s.reward for s in found)
  rise = mean('policy') - mean('rollout')
  expected = {
    'policy': mean('policy'),
    'rollout': mean('rollout'),
    'surrogate': brute_surrogate(found),
    'surrogate_a': brute_surrogate(found, less=0),
    'surrogate_a, centred': brute_surrogate(found, b, less=0),
    'error': rise - brute_surrogate(found),
    'error_a': rise - brute_surrogate(found, b, less=0),
    'delta': brute_delta(found),
    'masked': brute_surrogate(masked),
    'masked, centred': brute_surrogate(masked, b),
    'masked_a': brute_surrogate(masked, less=0),
    'masked error': rise - brute_surrogate(masked),
    'masked delta': brute_delta(masked),
    'tokens': brute_surrogate(by_token),
    'tokens_a': brute_surrogate(by_token, less=0),
  }
  close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-14)
  for name, value in expected.items():
    close(got[name], value, err_msg=name)
  out = [s for s in masked if s.m == 0]
  close(got['rejected'].rollout, sum(s.rollout for s in out))
  close(got['rejected'].policy, sum(s.policy for s in out))
  close(got['rejected'].reward, sum(s.rollout * s.reward for s in out))
  close(got['rejected'].gain, sum(s.rollout * s.reward * (math.prod(s.rho) - 1) for s in out))
  distances = vars(brute_divergences(found, shape[2]))
  assert set(distances) == set(got['divergences']._fields)
  for name, value in distances.items():
    close(getattr(got['divergences'], name), value, err_msg=name)
  rho = np.array([s.rho + [1.0] * (shape[2] - len(s.y)) for s in found])
  mass = np.array([s.rollout for s in found])
  for order, (per_token, whole) in enumerate(got['moments'], 1):
    close(per_token, mass @ rho**order)
    close(whole, mass @ np.prod(rho, -1) ** order)
  check_prefix_forms(got, second, good)
  check_delta_harm(got['delta_harm'], masked)


@pytest.mark.parametrize('seed, shape', list(enumerate(SHAPES[:3])))
def test_contexts_and_rows(seed, shape):
  world, _, _, second = make(seed, shape)
  _, vocab, horizon, eos = shape
  c, rows = jax.jit(lambda w: (enumeration.contexts(w), enumeration.rows(w)))(world)
  size = vocab**horizon
  for s in second():
    spent, ratio = 0.0, 1.0
    visits = [float(world.prompts[s.x])] * 2
    n = s.x * size + s.leaf
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-14)
    close(rows.rollout_mass[n], s.rollout)
    close(rows.policy_mass[n], s.policy)
    assert rows.reward[n] == s.reward
    assert rows.valid[n].tolist() == [t < len(s.y) for t in range(horizon)]
    for t, (row, q, p) in enumerate(zip(s.rows, s.q, s.p, strict=True)):
      at = lambda name, row=row, s=s: getattr(c, name)[s.x, row]
      close([at('rollout_visits'), at('policy_visits')], visits)
      visits = [visits[0] * p[s.y[t]], visits[1] * q[s.y[t]]]
      close(at('kl'), kl_of(p, q))
      close(at('reverse_kl'), kl_of(q, p))
      close(at('entropy'), -(q * np.log(q)).sum())
      spent += chi2_of(q, p)
      close(at('chi2_spent'), spent)
      close(at('prefix_ratio'), ratio)
      ratio *= s.rho[t]
      close(rows.divergences.kl[n, t], kl_of(p, q))
      close(rows.divergences.tv[n, t], 0.5 * np.abs(q - p).sum())
      close(rows.divergences.log_ratio[n, t], math.log(s.rho[t]))
      close(rows.divergences.entropy[n, t], -(q * np.log(q)).sum())
  ended = ~np.asarray(rows.valid)
  assert (np.asarray(rows.divergences.kl)[ended] == 0).all()
  assert (np.asarray(rows.divergences.log_ratio)[ended] == 0).all()
  np.testing.assert_allclose(rows.rollout_mass.sum(), 1, rtol=1e-14)


@pytest.mark.slow
def test_two_tokens_two_steps_by_hand():
  # Rollout: fair coins. Policy: .6/.4, then .7/.3 after a 0 and fair after a 1. Reward 1 for 00.
  q = np.log([[[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]]])
  world = enumeration.world(q, np.zeros((1, 3, 2)), horizon=2, reward=np.eye(4)[:1])
  all_kept, flat = jnp.ones((1, 4)), jnp.ones((1, 3), bool)
  got = everything(world, all_kept, jnp.ones((1, 3, 2)), jnp.asarray([0.25]), flat)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  close(got['policy'], 0.42)
  close(got['rollout'], 0.25)
  close(got['surrogate'], 0.25 * (0.2 + 0.4))
  close(got['surrogate_a'], 0.25 * (1.2 + 1.4))
  close(got['surrogate_a, centred'], 0.15)  # fixed length, b = J_roll: L = L'
  close(got['delta'], 0.25 * 0.2 * (1 - 1.4))
  close(got['error'], 0.02)
  close(got['error_a'], 0.02)
  d = got['divergences']
  close(d.max_tv, 0.2)
  close(d.max_kl, 0.0871767)
  close(d.mean_tv, [0.1, 0.1])
  close(d.mean_kl, [0.0204110, 0.0435883], rtol=1e-5)
  close(d.sequence_kl, 0.0639993, rtol=1e-5)
  close(d.visit_tv, [0, 0.1])
  close(d.sequence_tv, 0.17)
  close([d.max_chi2, d.sequence_chi2, d.chi2_budget], [0.16, 0.1552, 0.2])
  close(got['delta_harm'].sequences, [[-0.02, 0, 0, 0]])
  close(got['delta_harm'].tokens, [[[-0.02, 0], [0, 0], [0, 0]]], atol=1e-15)


# Gradients --------------------------------------------------------------------------------------


def quantities(table, world, sequence, token, good):
  """Everything that has a gradient."""
  world = dataclasses.replace(world, policy=table)
  inside, d = oracle.patched(world, good), oracle.divergences(world)
  return jnp.stack(
    [
      oracle.policy_objective(world),
      oracle.surrogate(world),
      oracle.surrogate(world, sequence, baseline=0.4),
      oracle.surrogate(world, token),
      oracle.surrogate_a(world, sequence),
      oracle.error(world),
      oracle.error_a(world),
      oracle.delta(world),
      oracle.delta(world, sequence),
      oracle.surrogate(inside),
      oracle.policy_objective(inside),
      oracle.delta(inside),
      d.sequence_kl,
      d.max_kl,
      oracle.rejected(world, sequence).gain,
    ]
  )


def all_but_one_branch(world):
  return oracle.prefix_mask(world, jnp.ones(world.policy.shape[:2], bool).at[:, 2].set(False))


jacobian = jax.jit(jax.jacrev(quantities))
several = jax.jit(jax.vmap(quantities, (0, None, None, None, None)))
# A rollout of two tokens without the less likely one would have a single response.
GRADIENT_SHAPES = [pytest.param(0, SHAPES[0])] + [
  pytest.param(n, shape, marks=pytest.mark.slow)
  for n, shape in enumerate([(2, 3, 3, None), (3, 4, 3, 3)], 1)
]


@pytest.mark.parametrize('support', ['full', 'rollout'])
@pytest.mark.parametrize('seed, shape', GRADIENT_SHAPES)
def test_gradients_equal_finite_differences(seed, shape, support):
  world, sequence, token, _ = make(seed, shape, support)
  good = all_but_one_branch(world)
  table, step, rest = np.asarray(world.policy), 1e-5, (world, sequence, token, good)
  exact = np.asarray(jacobian(world.policy, *rest))
  # All 15 move; the patched Delta may be 0 where few responses are left.
  assert (np.abs(exact).max((1, 2, 3)) > 1e-3).sum() >= (15 if seed == 0 else 13)
  bumps = np.eye(table.size).reshape(table.size, *table.shape) * step
  expected = (several(table[None] + bumps, *rest) - several(table[None] - bumps, *rest)) / (
    2 * step
  )
  expected = np.moveaxis(np.asarray(expected), 0, 1).reshape(exact.shape)
  np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-8)
  gradient = jax.jit(functools.partial(oracle.gradient, oracle.delta))(world)
  np.testing.assert_allclose(gradient, exact[7], rtol=1e-9, atol=1e-14)
  # The prefix form moves the policy where the prefix is good and nowhere else.
  assert (exact[9][~np.broadcast_to(good, table.shape)] == 0).all()


def test_algorithm_1_is_the_masked_surrogate_and_its_gradient():
  """Every response as a row of one batch, with its probability in the place of a count."""
  world, sequence, *_ = make(0, SHAPES[0])
  rows = enumeration.rows(world)
  advantages = rows.rollout_mass * (rows.reward - 0.4) * rows.reward.size

  def algorithm(table):
    log_ratio = enumeration.rows(dataclasses.replace(world, policy=table)).divergences.log_ratio
    per_token = surrogates.ratio_pg(log_ratio, jnp.zeros_like(log_ratio), advantages, rows.valid)
    return surrogates.aggregate(per_token, rows.valid, sequence.reshape(-1)).value

  exact = lambda w: oracle.surrogate_a(w, sequence, baseline=0.4)
  got, slope = jax.jit(jax.value_and_grad(algorithm))(world.policy)
  np.testing.assert_allclose(got, exact(world), rtol=1e-12)
  want = jax.jit(functools.partial(oracle.gradient, exact))(world)
  np.testing.assert_allclose(slope, want, rtol=0, atol=1e-12)
  assert np.abs(want).max() > 1e-3


def test_gradients_stay_finite_where_a_side_has_no_mass():
  shape = SHAPES[0]
  for support in ('rollout', 'policy'):
    world, sequence, token, _ = make(0, shape, support)
    g = np.asarray(jacobian(world.policy, world, sequence, token, all_but_one_branch(world)))[:12]
    assert np.isfinite(g).all()
    assert np.abs(g).max((1, 2, 3)).min() > 1e-3
    if support == 'policy':
      assert (g[:, np.asarray(world.policy) == -np.inf] == 0).all()


# Masks ------------------------------------------------------------------------------------------


def test_criteria_of_the_trust_region_and_prefix_masks_agree():
  world, _, _, second = make(3, SHAPES[0])
  found = second()
  kls = [[kl_of(p, q) for q, p in zip(s.q, s.p, strict=True)] for s in found]
  limit = np.median([max(kl) for kl in kls]) * 1.0001
  low = np.median([np.mean(kl) for kl in kls]) * 1.0001

  @jax.jit
  def judged(world, limit, low):
    largest = masks.max_kl(limit=limit)
    average = masks.mean_kl(limit=low)
    good = oracle.prefix_mask(world, enumeration.contexts(world).kl <= limit)
    return oracle.sequence_mask(world, largest), oracle.sequence_mask(world, average), good

  kept, mean, good = judged(world, limit, low)
  for s, kl in zip(found, kls, strict=True):
    assert kept[s.x, s.leaf] == (max(kl) <= limit)
    assert mean[s.x, s.leaf] == (sum(kl) / len(kl) <= low)
    for t, row in enumerate(s.rows):
      assert good[s.x, row, 0] == (max(kl[: t + 1]) <= limit)
  np.testing.assert_array_equal(kept, jnp.repeat(good[:, -9:, 0], 3, 1))


def test_masks_carry_no_gradient():
  world, sequence, *_ = make(0, SHAPES[0])
  weight = sequence * 0.5 + 0.2

  def both(table):
    moved = dataclasses.replace(world, policy=table)
    # A mask that equals `weight` and depends on the policy.
    soft = weight * jnp.exp(oracle.policy_objective(moved) - oracle.policy_objective(world))
    f = lambda keep: oracle.surrogate(moved, keep) + oracle.delta(moved, keep)
    return jnp.stack([f(soft), f(weight)])

  through, fixed = jax.jit(jax.jacrev(both))(world.policy)
  assert np.abs(fixed).max() > 1e-3
  np.testing.assert_allclose(through, fixed, rtol=0, atol=1e-14)


# Monte Carlo ------------------------------------------------------------------------------------


def draw(table, prompts, reward, *, vocab, horizon, eos, count, rng):
  """(prompt, row of each prefix, token, valid, reward) of `count` sampled responses."""
  cumulative = np.cumsum(softmax(table), -1)
  x = rng.choice(len(prompts), count, p=prompts)
  code, offset = np.zeros(count, int), 0
  alive, rows, tokens, valid = np.ones(count, bool), [], [], []
  for t in range(horizon):
    u = rng.random(count)
    token = (u[:, None] > cumulative[x, offset + code]).sum(-1)
    token = np.where(alive, token, eos)
    rows.append(offset + code)
    tokens.append(token)
    valid.append(alive)
    alive = alive & (token != eos)
    code, offset = code * vocab + token, offset + vocab**t
  return x, np.stack(rows, 1), np.stack(tokens, 1), np.stack(valid, 1), reward[x, code], code


def test_surrogates_equal_the_mean_of_many_samples():
  shape = SHAPES[0]
  world, sequence, token, _ = make(7, shape)
  q, p, reward, prompts, *_ = instance(7, shape)
  got = everything(world, sequence, token, jnp.asarray([0.5, 0.5]), middling(q, p))
  good = got['good']
  rng = np.random.default_rng(11)
  count = 400_000
  x, rows, tokens, valid, r, code = draw(
    p, prompts, reward, vocab=3, horizon=3, eos=0, count=count, rng=rng
  )
  log = lambda table: np.log(softmax(table))
  gap = np.where(valid, (log(q) - log(p))[x[:, None], rows, tokens], 0)
  rho = np.exp(gap)
  future = np.cumprod(rho[:, ::-1], 1)[:, ::-1] / rho
  m = np.asarray(sequence)[x, code]
  at = lambda mask: np.broadcast_to(mask, q.shape)[x[:, None], rows, tokens]
  samples = {
    'rollout': (r, got['rollout']),
    'surrogate': (r * (rho - 1).sum(1), got['surrogate']),
    'surrogate_a': (
      (r - 0.5) * np.where(valid, rho, 0).sum(1),
      got['surrogate_a, centred'],
    ),
    'masked': (m * r * (rho - 1).sum(1), got['masked']),
    'masked with baseline': (
      m * (r - 0.5) * (rho - 1).sum(1),
      got['masked, centred'],
    ),
    'tokens': (r * (at(token) * (rho - 1)).sum(1), got['tokens']),
    'prefix': (
      r * (at(good) * (rho - 1)).sum(1),
      got['inside'][0],
    ),
    'delta': (m * r * ((rho - 1) * (1 - future)).sum(1), got['masked delta']),
    'rejected': (1.0 - m, got['rejected'].rollout),
  }
  for name, (values, expected) in samples.items():
    bar = values.std() / math.sqrt(count)
    assert abs(values.mean() - expected) < 4 * bar, name
    # The samples would notice an error of 2 % of the spread.
    assert bar < 0.02 * values.std(), name


# Identities -------------------------------------------------------------------------------------


def batch(seed, shape, count, spread):
  """Random worlds of one shape, stacked; with masks of sequences."""
  prompts, vocab, horizon, eos = shape
  rng = np.random.default_rng(seed)
  size = (count, prompts, sum(vocab**t for t in range(horizon)), vocab)
  p = rng.normal(size=size) * rng.choice([0.3, 1, 3], (count, 1, 1, 1))
  q = p + rng.normal(size=size) * rng.choice(spread, (count, 1, 1, 1))
  worlds = enumeration.world(
    q, p, horizon=horizon, reward=rng.random((count, prompts, vocab**horizon)),
    prompts=rng.dirichlet(np.ones(prompts), count), eos=eos,
  )  # fmt: skip
  return worlds, jnp.asarray(rng.random((count, prompts, vocab**horizon)) < 0.7)


def identities(world, keep):
  """Pairs that must be equal, and pairs of which the first must not be larger."""
  tree, c, d = enumeration.tree(world), enumeration.contexts(world), oracle.divergences(world)
  spans = enumeration.lengths(world.policy)
  rise = oracle.policy_objective(world) - oracle.rollout_objective(world)
  lost = oracle.rejected(world, keep)
  rho, w = oracle.ratio_moments(world, order=1)
  _, w2 = oracle.ratio_moments(world, order=2)
  # Route 1: advantages under the rollout, visited by either policy.
  after = enumeration.ascend(world.reward, tree.rollout)
  advantage = after - (tree.rollout * after).sum(-1, keepdims=True)
  g = (tree.policy * advantage).sum(-1)
  by_rollout, by_policy = (c.rollout_visits * g).sum(), (c.policy_visits * g).sum()
  rows = enumeration.rows(world)
  logs = jnp.where(rows.valid, rows.divergences.log_ratio, 0)
  k3 = jnp.expm1(logs) - logs
  ended = jnp.concatenate([jnp.zeros(1), jnp.cumsum(d.mean_kl)])
  mass = lambda side: enumeration.descend(world.prompts, side)[1]
  length = (mass(tree.rollout)[..., None] * world.reward[..., None]
            * rows.valid.reshape(*world.reward.shape, -1)).sum()  # fmt: skip
  harm, whole = oracle.delta_harm(world, keep), oracle.delta(world, keep)
  equal = {
    'performance difference': (rise, by_policy),
    'surrogate by visits': (oracle.surrogate(world), by_rollout),
    'Delta': (rise, oracle.surrogate(world) - oracle.delta(world)),
    'Error': (oracle.error(world), -oracle.delta(world)),
    'masked Delta': (
      rise, oracle.surrogate(world, keep) - oracle.delta(world, keep) + lost.gain
    ),
    'mean ratio': (rho, jnp.ones_like(rho)),
    'mean of W': (w, jnp.ones_like(w)),
    'W squared': (w2 - 1, d.sequence_chi2),
    'k3': ((rows.rollout_mass[:, None] * k3).sum(0), d.mean_kl),
    'k1': (-(rows.rollout_mass * logs.sum(-1)).sum(), d.sequence_kl),
    'chain rule': (d.visit_kl, ended[:-1]),
    'baseline': (oracle.surrogate(world, baseline=0.7), oracle.surrogate(world)),
    'A-form': (oracle.surrogate_a(world), oracle.surrogate(world) + length),
    'harm of sequences': (harm.sequences.sum(), whole),
    'harm of tokens': (harm.tokens.sum(), whole),
    'visits': (
      jnp.stack([c.policy_visits[:, s].sum() for s in spans]), jnp.ones(len(spans))
    ),
  }  # fmt: skip
  less = {
    'Pinsker': (jnp.where(c.reachable, c.tv, 0), jnp.sqrt(c.kl / 2)),
    'Pinsker of sequences': (d.sequence_tv, jnp.sqrt(d.sequence_kl / 2)),
    'chi2': (c.tv, 0.5 * jnp.sqrt(c.chi2)),
    'reverse KL': (c.reverse_kl, jnp.log1p(c.chi2)),
    'data processing': (d.visit_tv, d.sequence_tv),
    'subadditive': (d.sequence_tv, d.mean_tv.sum()),
    'rise': (jnp.abs(rise), d.sequence_tv),
    'size of the surrogate': (jnp.abs(oracle.surrogate(world)), d.mean_tv.sum()),
    'size of Delta': (jnp.abs(oracle.delta(world)), 2 * d.mean_tv.sum()),
    'budget': (jnp.log1p(d.sequence_chi2), d.chi2_budget),
  }
  worst = {k: jnp.abs(a - b).max() for k, (a, b) in equal.items()}
  scale = jnp.maximum(1, w2)
  over = {k: (a - b).max() for k, (a, b) in less.items()}
  return {k: v / scale for k, v in worst.items()}, over


def check_identities(seed, shape, count):
  worlds, keep = batch(seed, shape, count, spread=[1e-6, 0.01, 0.3, 1.5])
  worst, over = jax.jit(jax.vmap(identities))(worlds, keep)
  for name, value in worst.items():
    assert value.shape == (count,)
    assert float(value.max()) < 1e-11, name
  for name, value in over.items():
    assert float(value.max()) < 1e-12, name
  return worlds


def test_identities():
  check_identities(1, (2, 3, 3, 0), 200)


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape',
  [(2, 3, 3, 0), (1, 3, 4, None), (3, 2, 6, 1), (2, 5, 3, 4), (1, 6, 4, 0), (4, 2, 2, None)],
)
def test_identities_at_length(shape):
  for seed in range(5):
    check_identities(seed, shape, 400)


def test_nearly_equal_policies_keep_their_digits():
  # rho - 1 of 1e-7: Delta is of order 1e-14 and would drown in J_theta - J_roll - L'.
  world, *_ = make(2, (1, 2, 3, None))
  rng = np.random.default_rng(3)
  direction = jnp.asarray(rng.normal(size=world.policy.shape))

  @jax.jit
  def scaled(size):
    near = dataclasses.replace(world, policy=world.rollout + size * direction)
    return oracle.delta(near) / size**2, oracle.divergences(near).sequence_kl / size**2

  (delta, kl), (large_delta, large_kl) = scaled(1e-7), scaled(1e-4)
  np.testing.assert_allclose(delta, large_delta, rtol=1e-3)
  assert abs(large_delta) > 1e-3
  np.testing.assert_allclose(kl, large_kl, rtol=1e-2)


# End of response and support --------------------------------------------------------------------


def test_nothing_behind_the_end_matters():
  shape = (2, 3, 3, 0)
  q, p, reward, prompts, sequence, _ = instance(4, shape)
  make = lambda q, p, reward: enumeration.world(
    q, p, horizon=3, reward=reward, prompts=prompts, eos=0
  )
  world = make(q, p, reward)
  tokens, valid, possible = enumeration.sequences(vocab=3, horizon=3, eos=0)
  assert possible.sum() == 1 + 2 + 4 * 3
  assert sorted(valid[possible].sum(-1).tolist()) == [1] + [2] * 2 + [3] * 12
  ended = [number(c, 3) for c in [(0,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]]
  other_q, other_p, other_reward = q.copy(), p.copy(), reward.copy()
  other_q[:, ended] += np.arange(3) * 5
  other_p[:, ended] -= np.arange(3) * 7
  other_reward[:, ~possible] = np.nan
  other = make(other_q, other_p, other_reward)

  keep = jnp.asarray(sequence & possible)
  rest = keep, jnp.ones(world.policy.shape), jnp.zeros(2), middling(q, p)
  slopes = jax.jit(lambda w: (oracle.gradient(oracle.error, w), oracle.gradient_harm(w, keep)[1]))
  for f in (lambda w: everything(w, *rest), slopes):
    for a, b in zip(jax.tree.leaves(f(world)), jax.tree.leaves(f(other)), strict=True):
      np.testing.assert_array_equal(a, b)
  # Tokens behind the end have neither gradient nor harm.
  gradient, harm = slopes(world)
  assert (gradient[:, np.array(ended)] == 0).all()
  assert (harm.tokens[:, np.array(ended)] == 0).all()


def test_reward_may_be_a_function():
  def reward(x, tokens, valid):
    assert (tokens[~valid] == 2).all()
    return (x + valid.sum(-1) * (tokens[:, 0] == 1)) / 4

  q, p, *_ = instance(0, (2, 3, 3, 2))
  world = enumeration.world(q, p, horizon=3, reward=reward, eos=2)
  at = lambda x, *y: world.reward[x, leaf(y, 3, 3, 2)]
  assert at(0, 2) == 0
  assert at(0, 1, 2) == 0.5
  assert at(1, 1, 0, 2) == 1
  assert at(1, 0, 0, 0) == 0.25
  np.testing.assert_array_equal(world.prompts, [0.5, 0.5])


@pytest.mark.slow
def test_a_rollout_without_the_tail():
  # Top-k rollout against a policy that gives the tail 1 % at each of 3 steps; reward 1 always.
  q = np.log(np.tile([0.99, 0.01], (1, 7, 1)))
  p = np.tile([0.0, -np.inf], (1, 7, 1))
  reward = np.ones((1, 8))
  kept = jnp.zeros((1, 8), bool), jnp.ones((1, 7, 2)), jnp.zeros(1), jnp.ones((1, 7), bool)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-12)
  world = enumeration.world(q, p, horizon=3, reward=reward)
  got = everything(world, *kept)
  close(got['policy'], 1)
  close(got['surrogate'], -0.03)
  close(got['error'], 0.03)
  rho, w = got['moments'][0]
  close(rho, [0.99] * 3)
  close(w, 0.99**3)
  d = got['divergences']
  close(d.mean_kl, [-math.log(0.99)] * 3)
  close(d.sequence_tv, 1 - 0.99**3)
  assert d.max_chi2 == d.sequence_chi2 == d.chi2_budget == math.inf
  # What E_roll sees still satisfies the identity; J_theta does not.
  close(w - 1, got['surrogate'] - got['delta'])
  close(got['rejected'].gain, w - 1)
  # The other way round the policy has no mass where the rollout samples.
  got = everything(enumeration.world(p, q, horizon=3, reward=reward), *kept)
  d = got['divergences']
  assert d.max_kl == d.sequence_kl == math.inf
  close(d.sequence_chi2, 0.99**-3 - 1)
  close(got['moments'][0][1], 1)
  close(got['surrogate'] - got['delta'], 0, atol=1e-14)


def test_contexts_that_nobody_reaches_do_not_count():
  # The second prefix is behind a token without mass on either side, and differs wildly.
  q = np.array([[[0, -np.inf], [0.1, 0], [9.0, -9]]])
  p = np.array([[[0, -np.inf], [0.0, 0], [-9.0, 9]]])
  kept = jnp.ones((1, 4)), jnp.ones((1, 3, 2)), jnp.ones(1), jnp.ones((1, 3), bool)
  largest = lambda: (
    everything(enumeration.world(q, p, horizon=2, reward=np.ones((1, 4))), *kept)[
      'divergences'
    ].max_tv
  )
  assert largest() < 0.03
  # One that only the policy reaches does.
  q[0, 0, 1] = 0
  assert largest() > 0.99


# Harm -------------------------------------------------------------------------------------------


def brute_harm(world, up, down, step, shape, masks, baseline):
  """Shares from differences of each sequence's own summand between two policies beside this one."""
  _, vocab, horizon, eos = shape
  rest = [np.asarray(x) for x in (world.rollout, world.reward, world.prompts)]
  again = functools.partial(walk, vocab=vocab, horizon=horizon, eos=eos, **masks)
  sides = [again(x, *rest) for x in (up, down)]
  table = (up + down) / 2
  sequences, tokens = np.zeros(world.reward.shape), np.zeros(table.shape)
  for s, up, down in zip(again(table, *rest), *sides, strict=True):
    a = s.reward - baseline
    own = lambda s, a=a: (
      a * (s.rollout * s.m * sum(m * r for m, r in zip(s.tokens, s.rho, strict=True)) - s.policy)
    )
    sequences[s.x, s.leaf] = (own(up) - own(down)) / (2 * step)
    for t, (row, v) in enumerate(zip(s.rows, s.y, strict=True)):
      h = (math.log(up.q_y[t]) - math.log(down.q_y[t])) / (2 * step)
      tokens[s.x, row, v] += a * h * (s.rollout * s.m * s.tokens[t] * s.rho[t] - s.policy)
  return sequences, tokens


@pytest.mark.slow
@pytest.mark.parametrize(
  'masked', ['no', pytest.param('sequence', marks=pytest.mark.slow), 'token']
)
@pytest.mark.parametrize('support', ['full', 'rollout'])
def test_gradient_harm(masked, support):
  shape = SHAPES[0]
  world, sequence, token, _ = make(9, shape, support)
  keep = {'no': None, 'sequence': sequence, 'token': token}[masked]
  masks = {} if keep is None else {masked: np.asarray(keep)}
  gap = lambda w: oracle.surrogate(w, keep, baseline=0.3) - oracle.policy_objective(w)
  e = np.asarray(jax.jit(functools.partial(oracle.gradient, gap))(world))
  norm, table = np.sqrt((e**2).sum()), np.asarray(world.policy)
  up, down = table + 1e-5 * e / norm, table - 1e-5 * e / norm
  sequences, tokens = brute_harm(world, up, down, 1e-5, shape, masks, 0.3)
  got, harm = jax.jit(lambda w: oracle.gradient_harm(w, keep, baseline=0.3))(world)
  np.testing.assert_allclose(got, norm, rtol=1e-12)
  np.testing.assert_allclose(harm.sequences, sequences, rtol=0, atol=1e-8)
  np.testing.assert_allclose(harm.tokens, tokens, rtol=0, atol=1e-8)
  np.testing.assert_allclose([harm.tokens.sum(), harm.sequences.sum()], norm, rtol=1e-11)


def test_harm_in_parameters_is_measured_by_their_gradient():
  world, sequence, *_ = make(9, SHAPES[0])
  rng = np.random.default_rng(0)
  features = jnp.asarray(rng.normal(size=(5, *world.policy.shape)))
  params = {'a': jnp.asarray(rng.normal(size=2)), 'b': jnp.asarray(rng.normal(size=3))}

  def table_of(params):
    weights = jnp.concatenate([params['a'], jnp.sin(params['b'])])
    return world.rollout + 0.2 * jnp.einsum('k,kxcv->xcv', weights, features)

  def gap(params):
    moved = dataclasses.replace(world, policy=table_of(params))
    return oracle.surrogate(moved, fixed) - oracle.policy_objective(moved)

  fixed = sequence
  e = jax.jit(jax.grad(gap))(params)
  length = math.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(e)))
  norm, harm = jax.jit(lambda p: oracle.gradient_harm(world, fixed, through=(table_of, p)))(params)
  np.testing.assert_allclose([norm, harm.tokens.sum(), harm.sequences.sum()], length, rtol=1e-10)
  # Only the direction differs: shares along the same unit vector in logits are the same.
  step = 1e-5
  unit = jax.tree.map(lambda x: x / length, e)
  along = lambda h: table_of(jax.tree.map(lambda p, u: p + h * u, params, unit))
  up, down = (np.asarray(along(h)) for h in (step, -step))
  sequences, tokens = brute_harm(world, up, down, step, SHAPES[0], {'sequence': fixed}, 0.0)
  np.testing.assert_allclose(harm.sequences, sequences, rtol=0, atol=1e-8)
  np.testing.assert_allclose(harm.tokens, tokens, rtol=0, atol=1e-8)


def test_identical_policies_do_no_harm():
  world, *_ = make(0, SHAPES[0])
  same = dataclasses.replace(world, policy=world.rollout)
  both = jax.jit(lambda w: (oracle.gradient_harm(w), oracle.delta_harm(w), oracle.divergences(w)))
  (norm, harm), delta_harm, distances = both(same)
  assert norm < 1e-15
  assert np.isfinite(harm.tokens).all()
  assert (delta_harm.tokens == 0).all()
  assert all((np.asarray(x) == 0).all() for x in distances)
  (norm, harm), *_ = both(dataclasses.replace(same, reward=jnp.zeros_like(world.reward)))
  assert norm == 0
  assert (harm.sequences == 0).all()


# Callable policies ------------------------------------------------------------------------------

CONFIG = policy.PolicyConfig(
  width=8, layers=1, heads=2, kv_heads=1, head_width=4, mlp_width=8, experts=0
)
PROMPTS = np.array([[1, 2], [3, 3]], np.int32)
VOCAB, HORIZON, EOS = 4, 3, 0


def logits_of(params, tokens):
  start = jnp.zeros(tokens.shape[0], jnp.int32)
  hidden, _, _ = policy.apply(params, CONFIG, tokens, start=start)
  return policy.logits(params, hidden[:, -1:])[:, 0]


def table_of(params):
  return enumeration.tabulate(
    functools.partial(logits_of, params), PROMPTS, vocab=VOCAB, horizon=HORIZON, eos=EOS
  )


def fresh(seed):
  """Parameters as a training loop has them: float32, from outside the scope."""
  with jax.enable_x64(False):
    params = policy.init(jax.random.key(seed), CONFIG, VOCAB)
  # A head that makes the policy far from uniform.
  return params | {'head': 3 * params['head']}


def reward_of(x, tokens, valid):
  return (np.where(valid, tokens, 0).sum(-1) + x) / 10


@pytest.mark.slow
def test_a_flax_policy():
  params = fresh(0)
  flat = np.zeros((2, enumeration.size(vocab=VOCAB, horizon=HORIZON), VOCAB))
  world = enumeration.world(flat, flat, horizon=HORIZON, reward=reward_of, eos=EOS)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def enumerated(params):
    table = table_of(params)
    return oracle.policy_objective(dataclasses.replace(world, policy=table)), table

  # The same from every response as a batch of teacher-forced rows.
  tokens, valid, possible = enumeration.sequences(vocab=VOCAB, horizon=HORIZON, eos=EOS)
  tokens, valid = tokens[possible], valid[possible]
  reward = np.concatenate([reward_of(x, tokens, valid) for x in range(2)])
  rows = [np.concatenate([np.tile(p, (len(tokens), 1)), tokens], 1) for p in PROMPTS]
  rows, valid = np.concatenate(rows), np.concatenate([valid, valid])

  @jax.jit
  @jax.value_and_grad
  def forced(params):
    start = jnp.zeros(len(rows), jnp.int32)
    hidden, _, _ = policy.apply(params, CONFIG, jnp.asarray(rows[:, :-1]), start=start)
    logp = jax.nn.log_softmax(policy.logits(params, hidden[:, 1:]).astype(jnp.float64))
    chosen = jnp.take_along_axis(logp, jnp.asarray(rows[:, 2:, None]), -1)[..., 0]
    return (jnp.exp(jnp.where(valid, chosen, 0).sum(-1)) * reward).sum() / 2

  (found, table), gradient = enumerated(params)
  expected, slope = forced(params)
  assert table.dtype == jnp.float64
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(slope))
  assert largest > 1e-3
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * largest)

  with jax.enable_x64(False):
    request = Request(samples=10_000, length=HORIZON, eos=EOS, pad=EOS)
    arguments = dict(config=CONFIG, request=request, record=Record(store='logp'))
    sample = jax.jit(functools.partial(sampling.generate, **arguments))
    start, key = jnp.zeros(2, jnp.int32), jax.random.key(5)
    drawn = sample(params, prompts=jnp.asarray(PROMPTS), start=start, key=key)
  drawn_tokens, drawn_valid = np.asarray(drawn.tokens), np.asarray(drawn.valid)
  parts = enumerate((slice(10_000), slice(10_000, None)))
  values = np.stack([reward_of(x, drawn_tokens[r], drawn_valid[r]) for x, r in parts])
  bar = math.sqrt((values.var(1) / values.shape[1]).sum()) / 2
  assert abs(values.mean() - found) < 4 * bar
  # The uniform policy is further away than the samples could hide.
  assert abs(oracle.policy_objective(world) - found) > 20 * bar


@pytest.mark.slow
def test_a_table_is_a_callable_policy_too():
  q, *_ = instance(0, (2, 3, 3, None))

  def logits_of(tokens):
    return jnp.stack([q[x, number(tuple(y), 3)] for x, *y in np.asarray(tokens).tolist()])

  table = enumeration.tabulate(logits_of, np.array([[0], [1]]), vocab=3, horizon=3)
  np.testing.assert_array_equal(table, q)
  alone = enumeration.tabulate(
    lambda tokens: jnp.zeros((tokens.shape[0], 2)) + tokens.shape[1],
    np.zeros((1, 0), np.int32), vocab=2, horizon=3,
  )  # fmt: skip
  np.testing.assert_array_equal(alone[0, :, 0], [0, 1, 1, 2, 2, 2, 2])


# Scope, shapes and input ------------------------------------------------------------------------


def test_float64_ends_with_the_scope(float32):
  assert jnp.ones(1).dtype == jnp.float32
  with enumeration.float64():
    world, *_ = make(0, SHAPES[0])
    value = oracle.surrogate(world)
    assert value.dtype == jnp.float64
  assert jnp.ones(1).dtype == jnp.float32
  assert (jnp.ones(1) * 2.5).dtype == jnp.float32
  assert jax.jit(lambda x: x * 2)(np.ones(1)).dtype == jnp.float32
  assert isinstance(float(value), float)
  for call in (
    lambda: oracle.surrogate(world),
    lambda: oracle.divergences(world),
    lambda: enumeration.rows(world),
    lambda: enumeration.world(world.policy, world.rollout, horizon=3, reward=world.reward),
    lambda: enumeration.tabulate(lambda x: x, np.zeros((1, 0), np.int32), vocab=2, horizon=1),
  ):
    with pytest.raises(InputError, match='float64'):
      call()
  with pytest.raises(ZeroDivisionError), enumeration.float64():
    raise ZeroDivisionError
  assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.slow
def test_one_program_serves_all_worlds_of_a_shape():
  f = jax.jit(lambda w: (oracle.divergences(w), oracle.gradient(oracle.surrogate, w)))
  alone = [make(seed, SHAPES[0])[0] for seed in range(4)]
  results = [f(w) for w in alone]
  assert f._cache_size() == 1
  together = jax.jit(jax.vmap(f))(jax.tree.map(lambda *x: jnp.stack(x), *alone))
  for n, result in enumerate(results):
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(together), strict=True):
      np.testing.assert_allclose(a, b[n], rtol=1e-12, atol=1e-15)


def bad(**changes):
  q, p, reward, prompts, *_ = instance(0, (2, 3, 3, 0))
  args = dict(policy=q, rollout=p, horizon=3, reward=reward, prompts=prompts, eos=0) | changes
  return enumeration.world(**args)


def spoiled(index, value, name='policy'):
  arrays = dict(zip(('policy', 'rollout', 'reward'), instance(0, (2, 3, 3, 0)), strict=False))
  arrays[name][index] = value
  return {name: arrays[name]}


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda: bad(horizon=0), 'horizon=0 must be at least 1'),
    (lambda: bad(horizon=2), 'scores 13 prefixes, but vocab=3 and horizon=2 have 4'),
    (lambda: bad(eos=3), 'eos=3 must be a token in 0..2'),
    (lambda: bad(policy=np.zeros((13, 3))), 'must be logits'),
    (lambda: bad(policy=np.zeros((2, 13, 4))), 'policy has shape .* and rollout'),
    (lambda: bad(reward=np.zeros((2, 26))), r'reward has shape \(2, 26\); make it \(2, 27\)'),
    (lambda: bad(prompts=np.ones(3) / 3), r'prompts has shape \(3,\)'),
    (lambda: bad(prompts=np.array([0.5, 0.6])), 'sum to 1'),
    (lambda: bad(prompts=np.array([-0.5, 1.5])), '>= 0'),
    (lambda: bad(**spoiled((1, 5), np.nan)), 'policy has a prefix'),
    (lambda: bad(**spoiled((0, 0, 1), np.inf, 'rollout')), 'rollout has a prefix'),
    (lambda: bad(**spoiled((0, 0), -np.inf)), 'token with mass'),
    (lambda: bad(**spoiled((0, 26), 1.5, 'reward')), r'spans .*\.\.1.5, outside reward_range=0'),
    (lambda: bad(**spoiled((0, 26), -0.1, 'reward')), 'spans -0.1'),
    (lambda: bad(**spoiled((0, 26), np.nan, 'reward')), 'remove NaN'),
    (lambda: bad(reward=lambda x, y, v: 2.0 * v.sum(-1)), 'outside reward_range'),
    (lambda: bad(reward_range=(1.0, 0.0)), 'lowest first'),
    (lambda: bad(reward_range=(0.0, math.inf)), 'finite'),
    (lambda: enumeration.sequences(vocab=10, horizon=9), r'1e\+09 sequences, about .* GiB'),
    (lambda: enumeration.sequences(vocab=0, horizon=2), 'vocab=0'),
    (
      lambda: enumeration.tabulate(lambda x: x, PROMPTS, vocab=8, horizon=8),
      r'3.36e\+07 sequences, about .* GiB of memory',
    ),
    (
      lambda: enumeration.tabulate(lambda x: jnp.zeros((2, 5)), PROMPTS, vocab=4, horizon=1),
      r'logits_of returned shape \(2, 5\)',
    ),
    (lambda: oracle.surrogate(bad(), jnp.ones((2, 26))), 'keep has shape'),
    (lambda: oracle.delta(bad(), jnp.ones((2, 13, 3))), 'for prefixes see patched'),
    (lambda: oracle.rejected(bad(), jnp.ones((2, 13, 1))), 'for prefixes see patched'),
  ],
)
def test_bad_input(call, message):
  with pytest.raises(InputError, match=message):
    call()


@pytest.mark.slow
def test_no_world_is_large_enough_to_hide_a_nan(optimised):
  """From 4096 elements on XLA's maximum on CPUs drops NaN."""
  logits = np.random.default_rng(0).normal(size=(1, 65, 64))
  make = functools.partial(enumeration.world, horizon=2, reward=np.full((1, 4096), 0.5))
  clean = make(logits, logits + 0.1)
  for place in (0, 40):
    spoiled = logits.copy()
    spoiled[0, place, 7] = np.nan
    for arrays in ((spoiled, logits), (logits, spoiled)):
      with pytest.raises(InputError, match='largest logit is not finite'):
        make(*arrays)
    # Nor is it in the maxima of a world that was not checked.
    table = jnp.asarray(spoiled)
    found = jax.jit(
      lambda table: oracle.divergences(dataclasses.replace(clean, policy=table)),
      compiler_options=optimised,
    )(table)
    assert np.isnan([found.max_kl, found.max_tv, found.max_chi2, found.chi2_budget]).all()


def test_rewards_may_be_negative_where_the_range_says_so():
  world = bad(**spoiled((0, 26), -0.1, 'reward'), reward_range=(-1, 1))
  assert world.reward_range == (-1.0, 1.0)
  assert world.reward.min() == -0.1


@pytest.mark.slow
def test_two_million_sequences():
  q, p, reward, *_ = instance(0, (1, 8, 7, None))
  world = enumeration.world(q, p, horizon=7, reward=reward, eos=0)
  found = jax.jit(lambda w: (oracle.error(w), oracle.delta(w), oracle.divergences(w)))(world)
  np.testing.assert_allclose(found[0], -found[1], rtol=1e-9)
  np.testing.assert_allclose(found[2].sequence_kl, found[2].mean_kl.sum(), rtol=1e-12)
  gradient = jax.jit(functools.partial(oracle.gradient, oracle.error))(world)
  top = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
  at = lambda h: oracle.error(dataclasses.replace(world, policy=world.policy.at[top].add(h)))
  np.testing.assert_allclose(gradient[top], (at(1e-5) - at(-1e-5)) / 2e-5, rtol=0, atol=1e-7)
