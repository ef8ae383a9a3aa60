"""`brackets`: bounds from a top-K record, against brute force over all fitting rollouts."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from trm_jax.divergences import brackets
from trm_jax.types import InputError

SHAPE = (8, 3, 16)
INF = np.inf

top_k = jax.jit(brackets.top_k, static_argnums=1, static_argnames='temperature')
bounds = jax.jit(brackets.bounds, static_argnames='temperature')


def case(seed=0, shape=SHAPE, scale=2.0, shift=0.5):
  """(policy logits, rollout logits)."""
  keys = jax.random.split(jax.random.key(seed))
  rollout = scale * jax.random.normal(keys[0], shape)
  return rollout + shift * jax.random.normal(keys[1], shape), rollout


def logs(*p):
  with np.errstate(divide='ignore'):
    return jnp.asarray(np.log(p), jnp.float32)


def close(got, want, tolerance=1e-5):
  np.testing.assert_allclose(got.lower, want[0], rtol=tolerance, atol=tolerance)
  np.testing.assert_allclose(got.upper, want[1], rtol=tolerance, atol=tolerance)


def holds(bracket, truth, rounding=1e-14):
  """lower <= truth <= upper but for the rounding of the float64 truth itself."""
  low, high = np.asarray(bracket.lower, np.float64), np.asarray(bracket.upper, np.float64)
  assert (low <= truth + rounding).all(), (low - truth).max()
  assert (truth <= high + rounding).all(), (truth - high).max()


def holds_both(policy, rollout, k, temperature=1.0):
  """Brackets of a record of the rollout, after checking that they hold the truth in float64."""
  found = bounds(policy, top_k(rollout, k, temperature=temperature), temperature=temperature)
  holds(found[0], oracles.kl(policy, rollout, temperature))
  holds(found[1], oracles.total_variation(policy, rollout, temperature))
  return found


# Brute force in float64, one position: of p only the stored entries and the tail are used.


def split(q, p, k):
  """Positions of the K largest p, the others, the cap and the tail."""
  order = np.argsort(-p, kind='stable')
  stored, rest = order[:k], order[k:]
  return stored, rest, p[stored].min(), p[rest].sum()


def distance(q, p, stored, rest, x):
  """(KL, TV) where the tail of the rollout is x."""
  full = np.zeros_like(p)
  full[stored], full[rest] = p[stored], x
  with np.errstate(divide='ignore'):
    return oracles.kl_of(np.log(q), np.log(full)), 0.5 * np.abs(q - full).sum()


def balanced(tail, cap, choices, n):
  """Every point whose entries but one are among `choices[i]`, the one making up the tail."""
  for free in range(n):
    others = [i for i in range(n) if i != free]
    for values in itertools.product(*(choices[i] for i in others)):
      x = np.zeros(n)
      x[others], x[free] = values, tail - sum(values)
      if -1e-12 <= x[free] <= cap * (1 + 1e-12):
        yield np.clip(x, 0, cap)


def filled(tail, cap, weight):
  """min(cap, c weight) with the c that gives the tail, by trying every set of full entries."""
  n = len(weight)
  for full in itertools.product((False, True), repeat=n):
    full, free = np.array(full), ~np.array(full)
    x = np.where(full, cap, 0.0)
    left = tail - x.sum()
    if left < -1e-12 or (left > 1e-12 and weight[free].sum() == 0):
      continue
    if free.any() and weight[free].sum() > 0:
      x[free] = left / weight[free].sum() * weight[free]
    if (x <= cap * (1 + 1e-12)).all() and abs(x.sum() - tail) < 1e-9:
      yield x


def brute_force(q, p, k):
  """((KL low, KL high), (TV low, TV high)) over all rollouts with the same record."""
  stored, rest, cap, tail = split(q, p, k)
  n = len(rest)
  vertices = list(balanced(tail, cap, [(0, cap)] * n, n))
  kinks = balanced(tail, cap, [(0, cap, min(v, cap)) for v in q[rest]], n)
  value = lambda x: distance(q, p, stored, rest, x)
  return (
    (min(value(x)[0] for x in filled(tail, cap, q[rest])), max(value(x)[0] for x in vertices)),
    (min(value(x)[1] for x in kinks), max(value(x)[1] for x in vertices)),
  )


@pytest.mark.parametrize('k', [1, 2, 4])
@pytest.mark.parametrize('scale, shift', [(1.0, 0.5), (0.3, 2.0), (2.5, 1.0), (0.02, 0.01)])
def test_extremes_of_brute_force(k, scale, shift):
  policy, rollout = case(k, (12, 7), scale, shift)
  q, p = (np.exp(oracles.log_softmax(x)) for x in (policy, rollout))
  want = np.array([brute_force(q[i], p[i], k) for i in range(len(q))])
  for i, got in enumerate(bounds(policy, top_k(rollout, k))):
    low, high = want[:, i, 0], want[:, i, 1]
    close(got, (low, high), 3e-5)
    # Every rollout that fits the record is a possible truth, the extremes among them.
    holds(got, low)
    holds(got, high)


@pytest.mark.slow
def test_hand_computed():
  # Record .5 .3 | tail .2, at most .3 each. Least: 2/3 of the policy's .2 and .1; most: all on .1.
  found = bounds(logs(0.4, 0.3, 0.2, 0.1), top_k(logs(0.5, 0.3, 0.12, 0.08), 2))
  close(found[0], 0.5 * np.log(1.25) + 0.2 * np.log([2 / 3, 2]))
  close(found[1], (0.1, 0.2))


@pytest.mark.slow
def test_hand_computed_under_the_cap():
  # Record .4 .2 | tail .4, at most .2 each. Least: .2 where the policy has .5, and twice its .06,
  # .04 on the others; most: .2 on each of the two small ones.
  found = bounds(logs(0.3, 0.1, 0.5, 0.06, 0.04), top_k(logs(0.4, 0.2, 0.15, 0.15, 0.1), 2))
  known = 0.4 * np.log(4 / 3) + 0.2 * np.log(2)
  least = 0.2 * np.log(0.2 / 0.5) + 0.2 * np.log(2)
  close(found[0], (known + least, known + 0.2 * np.log(0.2 / 0.04) + 0.2 * np.log(0.2 / 0.06)))
  close(found[1], (0.3, 0.5))


@hypothesis.given(
  seed=st.integers(0, 2**20),
  k=st.sampled_from([1, 3, 11]),
  scale=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0]),
  shift=st.sampled_from([0.0, 1e-3, 0.3, 3.0, 10.0]),
)
def test_no_rollout_with_the_record_is_outside(seed, k, scale, shift):
  policy, rollout = case(seed, (4, 12), scale, shift)
  kl, tv = holds_both(policy, rollout, k)
  q, p = (np.exp(oracles.log_softmax(x)) for x in (policy, rollout))
  draw = np.random.default_rng(seed)
  for i in range(4):
    stored, rest, cap, tail = split(q[i], p[i], k)
    for _ in range(3):
      x = draw.exponential(size=len(rest)) ** draw.choice([0.3, 1, 4])
      for _ in range(200):  # fill the ones with room left in proportion
        x = np.minimum(x * tail / x.sum(), cap)
      if abs(x.sum() - tail) < 1e-12:
        truth = distance(q[i], p[i], stored, rest, x)
        holds(jax.tree.map(lambda b, i=i: b[i], kl), truth[0])
        holds(jax.tree.map(lambda b, i=i: b[i], tv), truth[1])


@pytest.mark.parametrize(
  'k',
  [
    pytest.param(64, marks=pytest.mark.slow),
    pytest.param(512, marks=pytest.mark.slow),
    pytest.param(4096, marks=pytest.mark.slow),
  ],
)
def test_large_flat_vocabulary(k):
  for shift in (0.0, 0.1, 3.0):
    policy, rollout = case(k, (2, 32768), 3.0, shift)
    kl, tv = holds_both(policy, rollout, k)
    log_q, log_p = oracles.log_softmax(policy), oracles.log_softmax(rollout)
    for i in range(2):
      q, p = np.exp(log_q[i]), np.exp(log_p[i])
      stored, rest, cap, tail = split(q, p, k)
      known = (p[stored] * np.log(p[stored] / q[stored])).sum()
      # Without the cap: all of the tail spread like the policy, or all of it on one token.
      bucket = known + tail * np.log(tail / q[rest].sum())
      spike = known + tail * np.log(cap / q[rest].min())
      assert kl.lower[i] >= bucket * (1 - 1e-2) - 1e-6
      assert kl.upper[i] < 0.95 * spike
      assert tv.lower[i] >= 0.5 * np.abs(q - p)[stored].sum() * (1 - 1e-3) - 1e-5
      assert tv.upper[i] <= 0.5 * (np.abs(q - p)[stored].sum() + tail + q[rest].sum()) + 1e-5


def truncated(rollout, kind):
  """Logits of what a top-k or top-p sampler draws from."""
  p = jax.nn.softmax(rollout)
  order = jnp.sort(p, -1)[..., ::-1]
  if kind == 'top-k':
    floor = order[..., 3:4]
  else:
    before = jnp.cumsum(order, -1) - order
    floor = jnp.where(before < 0.9, order, 1).min(-1, keepdims=True)
  return jnp.where(p >= floor, rollout, -INF)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['top-k', 'top-p'])
def test_a_record_of_the_whole_support_is_exact(kind):
  policy, rollout = case(4)
  rollout = truncated(rollout, kind)
  record = top_k(rollout, 14)
  np.testing.assert_array_equal(record.tail, 0)
  assert (record.logp == -INF).any()
  kl, tv = bounds(policy, record)
  np.testing.assert_array_equal(kl.lower, kl.upper)
  np.testing.assert_array_equal(tv.lower, tv.upper)
  np.testing.assert_allclose(kl.lower, oracles.kl(policy, rollout), rtol=1e-5)
  np.testing.assert_allclose(tv.lower, oracles.total_variation(policy, rollout), rtol=1e-5)
  # The ids of tokens without mass say nothing: an engine may fill them with anything.
  for void in (-1, 0, 15, 2**31 - 1):
    ids = jnp.where(record.logp == -INF, void, record.ids)
    filled = brackets.TopK(ids=ids, logp=record.logp, tail=record.tail)
    np.testing.assert_array_equal(bounds(policy, filled)[0].lower, kl.lower)


@pytest.mark.slow
@pytest.mark.parametrize('k', [16, 1])
def test_all_tokens_stored(k):
  policy, rollout = case(5, (8, 3, k))
  record = top_k(rollout, k)
  np.testing.assert_array_equal(record.tail, 0)
  for got, want in zip(
    bounds(policy, record),
    (oracles.kl(policy, rollout), oracles.total_variation(policy, rollout)),
    strict=True,
  ):
    close(got, (want, want), 1e-6)
    np.testing.assert_array_equal(got.lower, got.upper)


@pytest.mark.slow
def test_tiny_divergence():
  policy, rollout = case(6, (8, 512), 1.0, 1e-3)
  truth = oracles.kl(policy, rollout)
  assert 2e-7 < truth.min() and truth.max() < 1e-6
  np.testing.assert_allclose(bounds(policy, top_k(rollout, 512))[0].lower, truth, rtol=1e-4)
  # With a tail the margin is a share of the KL, not of the probabilities.
  lower = holds_both(policy, rollout, 500)[0].lower
  assert (lower > 0.95 * truth).all()


@pytest.mark.slow
@pytest.mark.parametrize('k', [1, pytest.param(4, marks=pytest.mark.slow), 16])
def test_identical_policies_have_lower_bound_zero(k):
  _, rollout = case(7)
  for found in holds_both(rollout, rollout, k):
    np.testing.assert_array_equal(found.lower, 0)


@pytest.mark.slow
def test_flat_rollout_leaves_no_room():
  # Every unstored token must be at the cap: one rollout fits, up to rounding.
  policy, rollout = case(8)
  rollout = jnp.zeros_like(rollout)
  for found, want in zip(
    holds_both(policy, rollout, 4),
    (oracles.kl(policy, rollout), oracles.total_variation(policy, rollout)),
    strict=True,
  ):
    close(found, (want, want), 5e-5)


@pytest.mark.slow
def test_policy_without_a_stored_token():
  policy, rollout = case(9)
  policy = policy.at[..., 3].set(-INF)
  rollout = rollout.at[..., 3].set(9.0)
  kl, tv = holds_both(policy, rollout, 4)
  np.testing.assert_array_equal(kl.lower, INF)
  np.testing.assert_array_equal(kl.upper, INF)
  assert (tv.upper <= 1).all() and (tv.lower > 0.5).all()
  # Also where the stored probability underflows float32.
  found = bounds(logs(1, 0, 0, 0), top_k(jnp.array([0.0, -200.0, -INF, -INF]), 2))
  assert found[0].lower == INF and found[1].upper == 0


@pytest.mark.slow
def test_policy_without_an_unstored_token():
  # Tail .2 with cap .3: one token without the policy's mass may hold it all, or none of it.
  kl, tv = bounds(logs(0.4, 0.3, 0.3, 0), top_k(logs(0.5, 0.3, 0.12, 0.08), 2))
  close(kl, (0.5 * np.log(1.25) + 0.2 * np.log(0.2 / 0.3), INF))
  close(tv, (0.1, 0.3))
  # Tail .4 with cap .2, two of the three tokens without mass: .2 at least has nowhere to go.
  record = top_k(logs(0.4, 0.2, 0.15, 0.15, 0.1), 2)
  kl, tv = bounds(logs(0.4, 0.2, 0.4, 0, 0), record)
  assert kl.lower == kl.upper == INF
  close(tv, (0.2, 0.4))
  # One of the three: there is room for exactly all of it, so nothing is certain.
  kl, _ = bounds(logs(0.4, 0.2, 0.2, 0.2, 0), record)
  assert kl.lower < 1e-4 and kl.upper == INF
  # No tail: no violation.
  kl, _ = bounds(logs(0.4, 0.3, 0.3, 0), top_k(logs(0.5, 0.3, 0.2, 0), 3))
  assert kl.lower == kl.upper < INF


def test_a_tail_below_float32_is_not_no_tail():
  record = top_k(jnp.array([0.0, -1.0, -300.0, -400.0]), 2)
  assert record.tail > 0
  kl, _ = bounds(logs(0.7, 0.2, 0.1, 0), record)
  assert kl.lower < INF and kl.upper == INF
  np.testing.assert_array_equal(bounds(logs(0.8, 0.2, 0, 0), record)[0].lower, INF)


def test_tail_keeps_its_digits():
  rollout = jnp.array([20.0, 0.0, -1.0, -2.0])
  want = np.exp(oracles.log_softmax(rollout))[1:].sum()
  np.testing.assert_allclose(top_k(rollout, 1).tail, want, rtol=1e-5)
  np.testing.assert_array_equal(top_k(rollout, 4).tail, 0)


@pytest.mark.slow
@pytest.mark.parametrize('scale', [0.3, 3.0, 30.0, 300.0])
def test_sound_at_any_scale_and_offset(scale):
  for shift in (0.0, 1e-4, 0.1, 10.0):
    policy, rollout = case(int(scale), (16, 64), scale, shift)
    for k in (1, 8):
      holds_both(policy + 1e3, rollout - 1e3, k, temperature=0.7)


@pytest.mark.slow
def test_bfloat16_scores():
  kl, tv = holds_both(*(x.astype(jnp.bfloat16) for x in case(1)), 4)
  assert kl.lower.dtype == tv.upper.dtype == jnp.float32


def test_finite_masks_of_the_policy():
  # -1e9 instead of -inf, as many models mask: finite, enormous, and still in the right order.
  policy, rollout = case(10)
  policy = policy.at[..., 10:].set(-1e9)
  kl, tv = holds_both(policy, rollout, 4)
  assert jnp.isfinite(kl.upper).all() and (kl.upper > 1e3).all() and (tv.upper <= 1).all()


@pytest.mark.parametrize(
  'broken',
  [
    dict(logp=logs(0.5, 0.2)),
    dict(tail=jnp.float32(0.3)),
    dict(tail=jnp.float32(0.0)),
    dict(tail=jnp.float32(jnp.nan)),
    dict(logp=jnp.array([jnp.nan, 0.3])),
    dict(ids=jnp.array([1, 1])),
    dict(ids=jnp.array([0, 4])),
    dict(logp=logs(0.8, 0)),  # nothing may be left where a stored token has no mass
    dict(logp=logs(0.79, 0.01)),  # two tokens under .01 cannot hold .2
  ],
)
def test_a_record_that_is_no_distribution(broken):
  record = dict(ids=jnp.array([0, 1]), logp=logs(0.5, 0.3), tail=jnp.float32(0.2))
  policy = logs(0.4, 0.3, 0.2, 0.1)
  assert jnp.isfinite(bounds(policy, brackets.TopK(**record))[0].upper)
  for found in bounds(policy, brackets.TopK(**record | broken)):
    assert jnp.isnan(found.lower) and jnp.isnan(found.upper)


@pytest.mark.slow
@pytest.mark.parametrize('bad', [jnp.nan, INF])
@pytest.mark.parametrize('k', [2, 4])
def test_policy_that_is_no_distribution(bad, k):
  policy, record = jnp.array([0.0, 1, bad, 0]), top_k(logs(0.5, 0.3, 0.12, 0.08), k)
  for found in (*bounds(policy, record), *bounds(jnp.full(4, -INF), record)):
    assert jnp.isnan(found.lower) and jnp.isnan(found.upper)


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape', [(64, 64), pytest.param((8, 4096), marks=pytest.mark.slow)], ids=str
)
def test_broken_records_are_found_in_optimised_code(shape, optimised):
  policy, rollout = case(3, (1, *shape))
  record = brackets.top_k(rollout, 4)
  run = jax.jit(brackets.bounds, compiler_options=optimised)
  broken = [
    brackets.TopK(record.ids, record.logp, record.tail * jnp.nan),
    brackets.TopK(record.ids, record.logp.at[..., 2].set(jnp.nan), record.tail),
  ]
  cases = [(policy, r) for r in broken] + [(policy.at[..., 5].set(jnp.nan), record)]
  for logits, top in cases:
    for found in run(logits, top):
      assert jnp.isnan(found.lower).all() and jnp.isnan(found.upper).all()
    # As a user sums them up in one program.
    total = jax.jit(
      lambda *x: [x.sum() for b in brackets.bounds(*x) for x in (b.lower, b.upper)],
      compiler_options=optimised,
    )(logits, top)
    assert np.isnan(total).all()


@pytest.mark.slow
@pytest.mark.parametrize('value', [jnp.nan, 0.0, INF])
def test_padding_of_a_vocabulary_has_no_mass(value):
  policy, rollout = case(4)
  pad = lambda x, n: jnp.concatenate([x, jnp.full((*SHAPE[:2], n), value)], -1)
  for k in (3, 16):
    want = bounds(policy, top_k(rollout, k))
    record = brackets.top_k(pad(rollout, 5), k, vocab_size=16)
    jax.tree.map(np.testing.assert_array_equal, record, top_k(rollout, k))
    got = brackets.bounds(pad(policy, 8), record, vocab_size=16)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)
    # Split over 8 devices, of which the last ones hold padding alone.
    blocks = jnp.moveaxis(pad(policy, 8).reshape(*SHAPE[:2], 8, 3), 2, 0)
    split = jax.vmap(
      lambda b, t: brackets.bounds(b, t, vocab_size=16, axis_name='model'),
      (0, None),
      axis_name='model',
    )(blocks, record)
    for device in (0, 7):
      first = jax.tree.map(lambda x: x[device], split)  # noqa: B023
      jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), first, want)
  # A stored id in the padding is no token.
  wrong = brackets.TopK(record.ids.at[..., 0].set(17), record.logp, record.tail)
  for found in brackets.bounds(pad(policy, 8), wrong, vocab_size=16):
    assert jnp.isnan(found.upper).all()
  with pytest.raises(InputError, match='k=9 must be 1 to 8'):
    brackets.top_k(rollout, 9, vocab_size=8)
  with pytest.raises(InputError, match='vocab_size=17 must be 1 to 16'):
    brackets.bounds(policy, record, vocab_size=17)


@pytest.mark.slow
@pytest.mark.parametrize('k', [4, 14])
def test_decisions_agree_with_the_truth(k):
  policy, rollout = case(11, SHAPE, 3.0, 0.5)
  valid = jnp.arange(3)[None] <= (jnp.arange(8) % 3)[:, None]
  truth = oracles.max_over_tokens(oracles.kl(policy, rollout), np.asarray(valid))
  kl, _ = bounds(policy, top_k(rollout, k))
  # The largest valid token: inside by the upper bound, outside by the lower one.
  low, high = (jnp.where(valid, x, 0).max(-1) for x in (kl.lower, kl.upper))
  decided = 0
  for limit in np.quantile(truth, [0.02, 0.2, 0.5, 0.8, 0.98]):
    inside, outside = high <= limit, low > limit
    assert (truth[inside] <= limit).all()
    assert (truth[outside] > limit).all()
    decided += int((inside | outside).sum())
  assert decided > 8


def everything(policy, record, axis_name=None):
  return brackets.bounds(policy, record, temperature=0.7, axis_name=axis_name)


def edge_cases(seed):
  """Random positions with some that have no tail, no room or no mass."""
  policy, rollout = case(seed)
  policy = policy.at[0, 0, 12].set(-INF).at[1, 1].set(-INF).at[1, 1, 7].set(0)
  rollout = rollout.at[2, :, 4:].set(-INF).at[3].set(0).at[4, 0, 1:].set(-INF)
  return policy, top_k(rollout, 5, temperature=0.7)


def same(got, want):
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_vmap_and_no_gradient():
  policy, record = edge_cases(12)
  same(jax.jit(jax.vmap(everything))(policy, record), bounds(policy, record, temperature=0.7))
  loss = lambda x: bounds(x, record)[0].upper[5:].sum() + top_k(x, 4).tail.sum()
  np.testing.assert_array_equal(jax.grad(loss)(policy), 0)


@pytest.mark.slow
def test_bad_input():
  policy, rollout = case(16, (3, 8))
  record = top_k(rollout, 2)
  changed = lambda **kw: brackets.TopK(
    **dict(ids=record.ids, logp=record.logp, tail=record.tail) | kw
  )
  for match, call in {
    r'k=0 must be 1 to 8': lambda: brackets.top_k(rollout, 0),
    r'k=9 must be 1 to 8': lambda: brackets.top_k(rollout, 9),
    r'rollout_logits has dtype int32': lambda: brackets.top_k(jnp.zeros((3, 8), jnp.int32), 2),
    r'policy_logits has dtype int32': lambda: bounds(jnp.zeros((3, 8), jnp.int32), record),
    r'temperature=0': lambda: brackets.bounds(policy, record, temperature=0.0),
    r'temperature=-1': lambda: brackets.top_k(rollout, 2, temperature=-1.0),
    r'ids has shape \(3, 1\)': lambda: bounds(policy, changed(ids=record.ids[:, :1])),
    r'leading shapes: pass': lambda: bounds(policy[:2], record),
    r'tail \(2,\) differ in their': lambda: bounds(policy, changed(tail=record.tail[:2])),
    r'K=2 tokens: store 1 to 1': lambda: bounds(policy[:, :1], record),
    r'has dtype bfloat16': lambda: bounds(policy, changed(logp=record.logp.astype(jnp.bfloat16))),
    r'tail=-0.5 must lie in': lambda: brackets.bounds(policy, changed(tail=jnp.full(3, -0.5))),
    r'tail=1.5 must lie in': lambda: brackets.bounds(policy, changed(tail=jnp.full(3, 1.5))),
  }.items():
    with pytest.raises(InputError, match=match):
      call()


def test_a_wrong_tail_inside_jit_is_missing_not_accepted():
  policy, rollout = case(16, (3, 8))
  record = top_k(rollout, 2)
  wrong = brackets.TopK(ids=record.ids, logp=record.logp, tail=-record.tail)
  for found in bounds(policy, wrong):
    assert jnp.isnan(found.lower).all() and jnp.isnan(found.upper).all()
