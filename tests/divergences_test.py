"""trm_jax.divergences.full_logits: exact divergences per position and one-sample estimators."""

import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import jaxtyping
import numpy as np
import oracles
import pytest
from jax import P

from trm_jax import divergences
from trm_jax.divergences import ratios
from trm_jax.divergences.passes import blocks, pair
from trm_jax.mesh import sharding
from trm_jax.types import InputError

INF = jnp.inf
SHAPE = (8, 3, 16)
PAIRS = [
  (divergences.kl, oracles.kl),
  (divergences.total_variation, oracles.total_variation),
  (divergences.jensen_shannon, oracles.jensen_shannon),
]
for alpha in (0.5, 2.0):
  of = functools.partial
  PAIRS.append((of(divergences.renyi, alpha=alpha), of(oracles.renyi, alpha=alpha)))
BATTERY = pytest.mark.parametrize('fn', [divergences.kl, divergences.total_variation])
SEEDS = st.integers(0, 2**20)


def logits(seed=0, scale=2.0, shape=SHAPE):
  """(policy, rollout)."""
  keys = jax.random.split(jax.random.key(seed))
  return tuple(scale * jax.random.normal(k, shape) for k in keys)


def log(*probabilities):
  return jnp.log(jnp.array(probabilities, jnp.float32))


@pytest.fixture(params=['whole', 'rows'])
def form(request, monkeypatch):
  """Small arrays at once, and as large ones: blocks of 3 rows, the last one overlapping."""
  if request.param == 'rows':
    monkeypatch.setattr(pair, 'SMALL', 1)
    monkeypatch.setattr(blocks, 'BLOCK', 3 * SHAPE[-1])


def tokens_of(seed=0):
  return jax.random.randint(jax.random.key(seed), SHAPE[:2], 0, SHAPE[-1])


# Against the oracle, and by hand.


@pytest.mark.parametrize('temperature', [0.6, 1.0, 1.3])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_matches_the_oracle(dtype, temperature):
  # The oracle gets the rounded logits: rounding of the inputs is not an error of the function.
  policy, rollout = (x.astype(dtype) for x in logits())
  tokens = tokens_of()
  for fn, oracle in PAIRS:
    got = fn(policy, rollout, temperature=temperature)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle(policy, rollout, temperature), rtol=2e-6, atol=1e-7)
  got = divergences.entropy(policy, temperature=temperature)
  np.testing.assert_allclose(got, oracles.entropy(policy, temperature), rtol=2e-6)
  got = divergences.logp(policy, tokens, temperature=temperature)
  np.testing.assert_allclose(got, oracles.logp(policy, tokens, temperature), rtol=2e-6, atol=1e-6)
  for got, want in [(ratios.k1, oracles.k1), (ratios.k2, oracles.k2), (ratios.k3, oracles.k3)]:
    x = policy.astype(jnp.float32)
    np.testing.assert_allclose(got(x), want(x), rtol=1e-5)


def test_argument_order_and_direction():
  # KL(rollout || policy) = .7 ln(7/6) + .2 ln(4/5) + .1 ln(2/3)
  #                       = .1079055 - .0446287 - .0405465 = .0227303; the reverse
  # is .6 ln(6/7) + .25 ln(5/4) + .15 ln(3/2) = -.0924904 + .0557859 + .0608198 = .0241152.
  # TV = (.1 + .05 + .05) / 2 = .1
  rollout, policy = log(0.7, 0.2, 0.1), log(0.6, 0.25, 0.15)
  np.testing.assert_allclose(divergences.kl(policy, rollout), 0.0227303, atol=1e-7)
  np.testing.assert_allclose(divergences.kl(rollout, policy), 0.0241152, atol=3e-7)
  named = divergences.kl(policy_logits=policy, rollout_logits=rollout)
  np.testing.assert_allclose(named, 0.0227303, atol=1e-7)
  np.testing.assert_allclose(divergences.total_variation(policy, rollout), 0.1, atol=1e-7)


def test_hand_computed_entropy_and_logp():
  # H(1/2, 1/4, 1/4) = 3/2 ln 2
  np.testing.assert_allclose(
    divergences.entropy(log(0.5, 0.25, 0.25)), 1.5 * math.log(2), rtol=1e-6
  )
  np.testing.assert_allclose(divergences.entropy(jnp.zeros(16)), math.log(16), rtol=1e-6)
  np.testing.assert_allclose(
    divergences.logp(log(0.5, 0.25, 0.25), jnp.int32(1)), -math.log(4), rtol=1e-6
  )


def test_only_a_rare_token_differs():
  # A token of probability 1e-6 under the rollout and 1e-4 under the policy moves k2 by 10.6 but
  # the KL by 9.4e-5; and (.02, .98) against (1e-6, 1 - 1e-6) has KL .178, k2(.98 token) 2.0e-4.
  policy, rollout = log(1e-4, 1 - 1e-4), log(1e-6, 1 - 1e-6)
  np.testing.assert_allclose(divergences.kl(policy, rollout), 9.44e-5, rtol=2e-3)
  np.testing.assert_allclose(ratios.k2(policy - rollout)[0], 10.60, rtol=1e-3)
  policy, rollout = log(1e-6, 1 - 1e-6), log(0.02, 0.98)
  np.testing.assert_allclose(divergences.kl(policy, rollout), 0.1783, rtol=1e-3)
  np.testing.assert_allclose(ratios.k2(policy - rollout)[1], 2.04e-4, rtol=1e-2)


# Accuracy: a mask compares these numbers with limits near the rounding errors of naive forms.


@pytest.mark.slow
@pytest.mark.parametrize(
  'noise, size, error', [(1e-1, 4.7e-3, 1e-6), (1e-2, 4.7e-5, 2e-6), (1e-3, 4.7e-7, 2e-6),
                         (1e-4, 4.7e-9, 1e-4), (1e-5, 4.7e-11, 2e-3)]
)  # fmt: skip
def test_relative_accuracy_of_small_divergences(noise, size, error):
  rollout = 3 * jax.random.normal(jax.random.key(0), (4, 32768))
  policy = rollout + noise * jax.random.normal(jax.random.key(1), rollout.shape)
  want, got = oracles.kl(policy, rollout), divergences.kl(policy, rollout)
  np.testing.assert_allclose(want, size, rtol=0.2)
  np.testing.assert_allclose(got, want, rtol=error)
  tv = divergences.total_variation(policy, rollout)
  np.testing.assert_allclose(tv, oracles.total_variation(policy, rollout), rtol=1e-4, atol=2e-8)


def test_accuracy_in_bfloat16_and_on_a_shared_support():
  rollout = 3 * jax.random.normal(jax.random.key(0), (4, 4096))
  policy = rollout + 1e-3 * jax.random.normal(jax.random.key(1), rollout.shape)
  half = policy.astype(jnp.bfloat16), rollout.astype(jnp.bfloat16)
  np.testing.assert_allclose(divergences.kl(*half), oracles.kl(*half), rtol=1e-5)
  top = rollout < jax.lax.top_k(rollout, 50)[0][:, -1:]
  both = jnp.where(top, -INF, policy), jnp.where(top, -INF, rollout)
  np.testing.assert_allclose(divergences.kl(*both), oracles.kl(*both), rtol=1e-5)


@pytest.mark.parametrize('gap', [5.0, 30.0, 80.0, 88.0, 95.0, 150.0, 1e4])
def test_opposed_peaks(gap):
  # (gap, 0) against (0, gap): exp(gap) overflows and the other probability underflows.
  # KL = (p - q) gap = gap tanh(gap / 2), TV = tanh(gap / 2).
  policy, rollout = jnp.array([0.0, gap]), jnp.array([gap, 0.0])
  np.testing.assert_allclose(divergences.kl(policy, rollout), gap * math.tanh(gap / 2), rtol=1e-6)
  np.testing.assert_allclose(
    divergences.total_variation(policy, rollout), math.tanh(gap / 2), rtol=1e-6
  )
  assert jnp.isfinite(jnp.array(jax.grad(divergences.kl, (0, 1))(policy, rollout))).all()


@pytest.mark.slow
@hypothesis.given(seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
def test_matches_the_oracle_at_any_scale(seed, scale):
  # Covers both forms of the KL's terms, |log ratio| from 0 to hundreds.
  policy, rollout = logits(seed, scale)
  for fn, oracle in PAIRS:
    want = oracle(policy, rollout)
    np.testing.assert_allclose(fn(policy, rollout), want, rtol=5e-5, atol=2e-7)


# Properties.


@pytest.mark.slow
@BATTERY
@hypothesis.given(seed=SEEDS, scale=st.sampled_from([1e-3, 1.0, 50.0, 1e4]))
def test_nonnegative_zero_on_itself_and_bounded(fn, seed, scale):
  policy, rollout = logits(seed, scale)
  near = rollout + jnp.float32(1e-5) * policy / scale
  np.testing.assert_array_equal(fn(rollout, rollout), 0)
  for other in (policy, near):
    found = fn(other, rollout)
    assert (found >= 0).all() and jnp.isfinite(found).all()
    if fn is divergences.total_variation:
      assert (found <= 1).all()
  entropy = divergences.entropy(policy)
  assert (entropy >= 0).all() and (entropy <= math.log(SHAPE[-1]) + 1e-6).all()


@pytest.mark.slow
@BATTERY
@hypothesis.given(seed=SEEDS, shift=st.integers(-10_000, 10_000))
def test_a_shift_of_either_side_changes_nothing(fn, seed, shift):
  # Multiples of 1/64 up to 1e4 are exact in float32, so the shift itself costs no digit. The policy
  # is close to the rollout: what is compared are numbers near 1e-3.
  rollout, noise = (jnp.round(x * 64) / 64 for x in logits(seed))
  policy = rollout + jnp.round(noise) / 64
  want = fn(policy, rollout)
  for other in [
    (policy + shift, rollout),
    (policy, rollout - shift),
    (policy + shift, rollout + 7),
  ]:
    atol = (
      1e-10 if fn is divergences.kl else 1e-7
    )  # errors of the normalisers enter squared, or not
    np.testing.assert_allclose(fn(*other), want, rtol=2e-5, atol=atol)


@hypothesis.given(seed=SEEDS)
def test_pinsker_and_symmetry(seed):
  policy, rollout = logits(seed)
  tv = divergences.total_variation(policy, rollout)
  assert (tv <= jnp.sqrt(divergences.kl(policy, rollout) / 2) + 1e-6).all()
  np.testing.assert_allclose(tv, divergences.total_variation(rollout, policy), rtol=1e-5)


@BATTERY
def test_temperature_divides_both_sides(fn):
  policy, rollout = logits()
  got = fn(policy, rollout, temperature=0.5)
  np.testing.assert_allclose(got, fn(2 * policy, 2 * rollout), rtol=2e-6)
  np.testing.assert_array_equal(fn(policy, policy, temperature=0.6), 0)


@pytest.mark.slow
@BATTERY
def test_one_token_vocabulary_and_single_position(fn):
  one = jnp.array([[[3.0]]])
  np.testing.assert_array_equal(fn(one, -one), [[0.0]])
  np.testing.assert_array_equal(divergences.entropy(one), [[0.0]])
  np.testing.assert_array_equal(divergences.logp(one, jnp.array([[0]])), [[0.0]])
  policy, rollout = logits(shape=(1, 1, 16))
  np.testing.assert_array_equal(fn(policy, rollout)[0, 0], fn(policy[0, 0], rollout[0, 0]))


# Zero probabilities and broken numbers.


def test_policy_without_mass_where_the_rollout_has_some():
  policy, rollout = log(0.0, 0.5, 0.5), log(0.2, 0.4, 0.4)
  assert divergences.kl(policy, rollout) == INF
  np.testing.assert_allclose(divergences.total_variation(policy, rollout), 0.2, rtol=1e-6)


def test_rollout_without_mass_where_the_policy_has_some():
  # KL = 1/2 ln(.5/.4) * 2 = ln 1.25; TV = .2
  policy, rollout = log(0.2, 0.4, 0.4), log(0.0, 0.5, 0.5)
  np.testing.assert_allclose(divergences.kl(policy, rollout), math.log(1.25), rtol=1e-6)
  np.testing.assert_allclose(divergences.total_variation(policy, rollout), 0.2, rtol=1e-6)
  # A truncated rollout of a policy: KL = -ln(mass of the support under the policy).
  policy = logits()[0]
  support = policy >= jax.lax.top_k(policy, 4)[0][..., -1:]
  mass = jnp.where(support, jax.nn.softmax(policy), 0).sum(-1)
  got = divergences.kl(policy, jnp.where(support, policy, -INF))
  np.testing.assert_allclose(got, -jnp.log(mass), rtol=1e-5)


def test_both_without_mass():
  # The third token does not exist on either side: as the example of two tokens.
  policy, rollout = log(0.5, 0.5, 0.0), log(0.8, 0.2, 0.0)
  # .8 ln 1.6 + .2 ln .4 = .3760029 - .1832581
  np.testing.assert_allclose(divergences.kl(policy, rollout), 0.1927448, rtol=1e-5)
  np.testing.assert_allclose(divergences.total_variation(policy, rollout), 0.3, rtol=1e-6)
  np.testing.assert_allclose(divergences.entropy(policy), math.log(2), rtol=1e-6)


def test_gradients_at_zero_probabilities_are_finite():
  cases = [(log(0.0, 0.5, 0.5), log(0.2, 0.4, 0.4)), (log(0.2, 0.4, 0.4), log(0.0, 0.5, 0.5))]
  for policy, rollout in [*cases, (log(0.0, 0.5, 0.5), log(0.0, 0.2, 0.8))]:
    for fn in (divergences.kl, divergences.total_variation):
      for gradient in jax.grad(fn, (0, 1))(policy, rollout):
        assert jnp.isfinite(gradient).all()
    assert jnp.isfinite(jax.grad(divergences.entropy)(policy)).all()


@BATTERY
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
@pytest.mark.parametrize('side', [0, 1])
def test_broken_logits_give_nan_at_their_position_alone(fn, bad, side):
  pair = list(logits())
  want = fn(*pair)
  pair[side] = pair[side].at[2, 1, 5].set(bad)
  got = fn(*pair)
  assert jnp.isnan(got[2, 1])
  np.testing.assert_array_equal(got.at[2, 1].set(0), want.at[2, 1].set(0))


@BATTERY
def test_a_position_of_minus_infinity_alone_has_no_distribution(fn):
  policy, rollout = logits()
  assert jnp.isnan(fn(policy.at[0, 0].set(-INF), rollout)[0, 0])
  assert jnp.isnan(fn(policy, rollout.at[0, 0].set(-INF))[0, 0])


EVERY = {
  'kl': divergences.kl,
  'tv': divergences.total_variation,
  'js': divergences.jensen_shannon,
  'renyi': functools.partial(divergences.renyi, alpha=0.5),
  'renyi above 1': functools.partial(divergences.renyi, alpha=2.0),
}


@pytest.mark.parametrize(
  'shape',
  [
    pytest.param((8, 5), marks=pytest.mark.slow),
    (64, 64),
    pytest.param((8, 4096), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_nan_of_every_row_is_found_in_optimised_code(shape, optimised):
  clean, other = logits(shape=shape)
  tokens = jnp.ones(shape[:1], jnp.int32)
  everything = lambda policy, rollout: {
    **{name: fn(policy, rollout) for name, fn in EVERY.items()},
    **dataclasses.asdict(divergences.statistics(policy, rollout, tokens, full=True)),
  }
  run = jax.jit(everything, compiler_options=optimised)
  bad = clean.at[:, 3].set(jnp.nan)
  for side, found in enumerate((run(bad, other), run(other, bad))):
    for name, x in found.items():
      # What one side alone says of itself stays.
      if name in {'rollout_logp'} if side == 0 else name in {'policy_logp', 'entropy', 'square'}:
        continue
      assert jnp.isnan(x).all(), (side, name)


# Tokens and entries that are none.


@pytest.mark.slow
def test_tokens_outside_the_vocabulary_have_no_log_prob(form):
  low = jnp.full(SHAPE, -50.0)
  tokens = tokens_of().at[0, 0].set(SHAPE[-1]).at[1, 1].set(-100).at[2, 2].set(-1)
  outside = (tokens < 0) | (tokens >= SHAPE[-1])
  found = divergences.statistics(low, low, tokens)
  for logp in (divergences.logp(low, tokens), found.policy_logp, found.rollout_logp):
    np.testing.assert_allclose(logp, np.where(outside, np.nan, -np.log(SHAPE[-1])), rtol=1e-6)
  assert (found.kl == 0).all() and jnp.isnan(found.divergences().log_ratio[0, 0])
  # In use: such tokens are left out, and no gradient is lost or made.
  loss = lambda x, t: jnp.where(outside, 0, divergences.logp(x, t)).sum()
  slope = jax.grad(loss)(logits()[0], tokens)
  assert jnp.isfinite(slope).all() and (slope[outside] == 0).all()


PADDINGS = [
  ('nan', jnp.nan),
  *(
    pytest.param(*x, marks=pytest.mark.slow)
    for x in [('inf', jnp.inf), ('zero', 0.0), ('low', -INF)]
  ),
]


def padded(policy, rollout, tokens, vocab_size, axis_name=None):
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  found = dataclasses.asdict(
    divergences.statistics(policy, rollout, tokens, temperature=0.9, full=True, **place)
  )
  for name, fn in EVERY.items():
    found[name + ' alone'] = fn(policy, rollout, **place)
  found['logp alone'] = divergences.logp(policy, tokens, **place)
  found['entropy alone'] = divergences.entropy(policy, **place)
  return found


def with_slopes(fn, policy, rollout):
  def loss(policy, rollout):
    values = fn(policy, rollout)
    weights = cotangent(values)
    return sum((weights[name] * x).sum() for name, x in values.items()), values

  return jax.value_and_grad(loss, (0, 1), has_aux=True)(policy, rollout)


@pytest.mark.parametrize('kind, value', PADDINGS)
def test_padding_of_a_vocabulary_has_no_mass(form, kind, value):
  policy, rollout = logits()
  tokens = tokens_of()
  (_, want), slopes = with_slopes(lambda *x: padded(*x, tokens, None), policy, rollout)
  # Both sides pad to sizes of their own.
  pad = lambda x, n: jnp.concatenate([x, jnp.full((*SHAPE[:2], n), value)], -1)
  run = lambda *x: padded(*x, tokens, SHAPE[-1])
  (_, got), padded_slopes = with_slopes(run, pad(policy, 3), pad(rollout, 5))
  for name in want:
    np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-7, err_msg=name)
  for g, w in zip(padded_slopes, slopes, strict=True):
    np.testing.assert_allclose(g[..., : SHAPE[-1]], w, rtol=1e-5, atol=1e-6)
    assert (g[..., SHAPE[-1] :] == 0).all()
  outside = jnp.full(SHAPE[:2], SHAPE[-1])
  assert jnp.isnan(divergences.logp(pad(policy, 3), outside, vocab_size=SHAPE[-1])).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh, vocab_size', [((4, 2), 13), pytest.param((1, 8), 5, marks=pytest.mark.slow)]
)
def test_padding_of_a_vocabulary_that_is_split(mesh, vocab_size):
  policy, rollout = (x.at[..., vocab_size:].set(jnp.nan) for x in logits())
  tokens = tokens_of() % vocab_size
  tokens = tokens.at[0, 0].set(vocab_size).at[1, 0].set(-100)
  want = with_slopes(lambda *x: padded(*x, tokens, vocab_size), policy, rollout)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    split = jax.shard_map(
      functools.partial(padded, vocab_size=vocab_size, axis_name='model'),
      in_specs=(P('data', None, 'model'), P('data', None, 'model'), P('data')),
      out_specs=P('data'),
      check_vma=True,
    )
    sides = jax.device_put((policy, rollout), P('data', None, 'model'))
    placed = jax.device_put(tokens, P('data'))
    got = jax.jit(lambda *x: with_slopes(lambda *y: split(*y, placed), *x))(*sides)
  for name, x in want[0][1].items():
    np.testing.assert_allclose(got[0][1][name], x, rtol=2e-5, atol=2e-5, err_msg=name)
  for g, w in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
    assert (np.asarray(g)[..., vocab_size:] == 0).all()


def test_a_vocabulary_size_out_of_range_is_refused():
  policy, rollout = logits()
  for size in (0, SHAPE[-1] + 1):
    with pytest.raises(InputError, match=f'vocab_size={size} must be 1 to {SHAPE[-1]}'):
      divergences.kl(policy, rollout, vocab_size=size)


# One-sample estimators.


@pytest.mark.parametrize(
  'ratio, k1, k3', [(0.5, 0.69, 0.19), (1, 0, 0), (2, -0.69, 0.31), (10, -2.30, 6.70),
                    (100, -4.605, 94.395), (0.01, 4.605, 3.615)]
)  # fmt: skip
def test_estimators_by_hand(ratio, k1, k3):
  # k1 = -ln r, k2 = (ln r)^2 / 2, k3 = r - 1 - ln r
  x = jnp.log(jnp.float32(ratio))
  np.testing.assert_allclose(ratios.k1(x), k1, atol=6e-3)
  np.testing.assert_allclose(ratios.k2(x), k1**2 / 2, atol=2e-2)
  np.testing.assert_allclose(ratios.k3(x), k3, atol=6e-3)


@pytest.mark.parametrize('x', [1e-6, -1e-6, 1e-4, 1e-2, 0.3499, 0.3501, -0.3499, -0.3501, 3.0])
def test_k3_has_no_cancellation(x):
  # x^2/2 + x^3/6 + ..., 5e-13 at 1e-6; exp(x) - 1 - x in float32 gives 0 or 1e-7 there.
  want = sum(np.float64(np.float32(x)) ** n / math.factorial(n) for n in range(2, 30))
  np.testing.assert_allclose(ratios.k3(jnp.float32(x)), want, rtol=1e-5)


def test_k3_of_broken_numbers():
  got = ratios.k3(jnp.array([INF, -INF, 1e4, -1e4, jnp.nan, 0.0]))
  np.testing.assert_array_equal(got, [INF, INF, INF, 9999, jnp.nan, 0])
  gradient = jax.vmap(jax.grad(ratios.k3))(jnp.array([0.0, 1e-6, -1e4, INF]))
  np.testing.assert_allclose(gradient, [0, 1e-6, -1, 0], rtol=1e-5)


@hypothesis.given(seed=SEEDS)
def test_k1_and_k3_are_unbiased_under_the_rollout(seed):
  # By enumeration: E_rollout[k1] = E_rollout[k3] = KL(rollout || policy); k2 is biased.
  policy, rollout = logits(seed, 1.0)
  p = np.exp(oracles.log_softmax(rollout))
  x = (jax.nn.log_softmax(policy) - jax.nn.log_softmax(rollout)).astype(jnp.float32)
  kl = oracles.kl(policy, rollout)
  for estimator in (ratios.k1, ratios.k3):
    np.testing.assert_allclose((p * oracles.f64(estimator(x))).sum(-1), kl, rtol=1e-4, atol=1e-6)
  assert np.abs((p * oracles.f64(ratios.k2(x))).sum(-1) - kl).max() > 1e-2


# All in one pass.


def test_statistics_match_the_oracle(form):
  policy, rollout, tokens = *logits(), tokens_of()
  found = divergences.statistics(policy, rollout, tokens, temperature=0.7, full=True)
  want = {
    'kl': oracles.kl(policy, rollout, 0.7),
    'tv': oracles.total_variation(policy, rollout, 0.7),
    'entropy': oracles.entropy(policy, 0.7),
    'policy_logp': oracles.logp(policy, tokens, 0.7),
    'rollout_logp': oracles.logp(rollout, tokens, 0.7),
    'reverse_kl': oracles.kl(rollout, policy, 0.7),
    'chi2': oracles.chi2(policy, rollout, 0.7),
    'square': oracles.square(policy, 0.7),
  }
  for name, value in want.items():
    got = getattr(found, name)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, value, rtol=3e-6, atol=1e-6, err_msg=name)
  core = divergences.statistics(policy, rollout, tokens, temperature=0.7)
  assert core.reverse_kl is core.chi2 is core.square is None
  np.testing.assert_array_equal(core.kl, found.kl)


@pytest.mark.slow
def test_the_full_set_by_hand():
  # policy (.6, .4), rollout (.5, .5): chi^2 = .1^2/.5 * 2 = .04; sum policy^2 = .52;
  # KL(policy || rollout) = .6 ln 1.2 + .4 ln .8 = .1093929 - .0892574
  found = divergences.statistics(log(0.6, 0.4), log(0.5, 0.5), jnp.int32(0), full=True)
  np.testing.assert_allclose(found.chi2, 0.04, rtol=1e-5)
  np.testing.assert_allclose(found.square, 0.52, rtol=1e-6)
  np.testing.assert_allclose(found.reverse_kl, 0.0201355, rtol=1e-5)
  # Swapped supports: the policy has mass where the rollout has none, and the other way round.
  found = divergences.statistics(log(0.2, 0.8), log(0.0, 1.0), jnp.int32(0), full=True)
  np.testing.assert_allclose(found.kl, -math.log(0.8), rtol=1e-6)
  assert found.reverse_kl == found.chi2 == INF and found.rollout_logp == -INF
  found = divergences.statistics(log(0.0, 1.0), log(0.2, 0.8), jnp.int32(0), full=True)
  assert found.kl == INF and found.policy_logp == -INF
  np.testing.assert_allclose(found.reverse_kl, -math.log(0.8), rtol=1e-6)
  np.testing.assert_allclose(found.chi2, 0.25, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('gap', [10.0, 60.0, 100.0, 170.0])
def test_chi2_where_probabilities_underflow(gap, form):
  # rollout ~ (1, e^-2gap), policy ~ (1, e^-gap): q^2/p = 1 at the second token, chi^2 = 1 - 2e^-gap
  policy, rollout = jnp.array([[0.0, -gap]]), jnp.array([[0.0, -2 * gap]])
  found = divergences.statistics(policy, rollout, jnp.array([0]), full=True)
  np.testing.assert_allclose(found.chi2, oracles.chi2(policy, rollout), rtol=1e-5)
  assert found.chi2 > 0.9


def test_a_wrong_report_shows_beside_an_exact_zero(form):
  policy, tokens = logits()[0], tokens_of()
  reported = (
    divergences.logp(policy, tokens).at[0, 0].add(-0.5).at[1, 0].set(jnp.nan).at[2, 0].set(-INF)
  )
  statistics = divergences.statistics(policy, policy, tokens)
  found = statistics.divergences(reported)
  np.testing.assert_array_equal(found.kl, 0)
  np.testing.assert_allclose(found.log_ratio[0, 0], 0.5, rtol=1e-6)
  assert jnp.isnan(found.log_ratio[1, 0]) and found.log_ratio[2, 0] == INF
  np.testing.assert_array_equal(found.log_ratio[3:], 0)
  assert jnp.isfinite(statistics.policy_logp).all()
  np.testing.assert_array_equal(statistics.divergences().log_ratio, 0)


def test_criteria_carry_no_gradient():
  policy, rollout, tokens = *logits(), tokens_of()

  def total(policy, rollout):
    statistics = divergences.statistics(policy, rollout, tokens, full=True)
    judged = sum(x.sum() for x in jax.tree.leaves(statistics.divergences()))
    return judged + statistics.kl.sum() + statistics.tv.sum() + statistics.chi2.sum()

  for gradient in jax.grad(total, (0, 1))(policy, rollout):
    np.testing.assert_array_equal(gradient, 0)


# What an adversary may hand over.

ENTRIES = st.one_of(
  st.floats(-8, 8, width=32),
  st.floats(-100, 100, width=32),
  st.sampled_from([-math.inf, 0.0, 1e4, -1e4, 9999.0, 1e-30, 88.0, -104.0, 3e30, -3e30]),
)
NUDGES = st.sampled_from([0.0, 1e-6, -1e-4, 1e-2, 0.3, 1.0])


@functools.cache
def compiled(rows):
  """The statistics of [2, 6] logits, plain or by blocks of rows."""
  pair.SMALL, kept = (1 if rows else pair.SMALL), pair.SMALL
  blocks.BLOCK, block = (6 if rows else blocks.BLOCK), blocks.BLOCK
  example = jnp.zeros((2, 6)), jnp.zeros((2, 6)), jnp.zeros(2, jnp.int32)
  fn = jax.jit(functools.partial(divergences.statistics, full=True)).lower(*example).compile()
  pair.SMALL, blocks.BLOCK = kept, block
  return fn


@hypothesis.given(
  rollout=st.lists(ENTRIES, min_size=12, max_size=12),
  other=st.lists(st.one_of(ENTRIES, st.none()), min_size=12, max_size=12),
  nudges=st.lists(NUDGES, min_size=12, max_size=12),
  shift=st.sampled_from([0.0, 5.0, -1e4]),
  rows=st.booleans(),
)
def test_adversarial_logits(rollout, other, nudges, shift, rows):
  near = [a + n if o is None else o for a, o, n in zip(rollout, other, nudges, strict=True)]
  rollout, policy = (np.float32(x).reshape(2, 6) for x in (rollout, near))
  policy = policy + np.float32(shift)
  # Position 1 is identical on both sides.
  policy[1] = rollout[1]
  rollout[:, 0], policy[:, 0] = np.maximum(rollout[:, 0], -50), np.maximum(policy[:, 0], -50)
  policy[1, 0] = rollout[1, 0]
  found = jax.tree.map(np.asarray, compiled(rows)(policy, rollout, np.zeros(2, np.int32)))
  for name in ('kl', 'tv', 'entropy', 'reverse_kl', 'chi2', 'square'):
    value = getattr(found, name)
    assert not np.isnan(value).any() and (value >= (-1e-6 if name == 'entropy' else 0)).all(), name
  for name in ('kl', 'tv', 'reverse_kl', 'chi2'):
    assert getattr(found, name)[1] == 0, name
  with np.errstate(invalid='ignore', over='ignore'):
    want = {
      'kl': oracles.kl(policy, rollout),
      'reverse_kl': oracles.kl(rollout, policy),
      'chi2': oracles.chi2(policy, rollout),
    }
  gaps = ((policy == -np.inf) & (rollout > -np.inf)).any(-1)
  excess = ((rollout == -np.inf) & (policy > -np.inf)).any(-1)
  for name, value in want.items():
    value = np.where(gaps if name == 'kl' else excess, np.inf, value)
    # Near the end of float32's range inf is as good.
    value, got = np.minimum(value, 1e38), np.minimum(getattr(found, name), 1e38)
    # A probability below float32's range is 0, even times a log ratio of 1e30.
    finite = [np.where(np.isfinite(x), oracles.f64(x), 0) for x in (policy, rollout)]
    apart = np.abs(finite[0] - finite[1]).max()
    atol = 1e-9 + 2e-38 * apart
    # chi^2 is the exponential of a sum of two such numbers.
    rtol = 3e-5 + (3e-7 * min(apart, 1e6) if name == 'chi2' else 0)
    np.testing.assert_allclose(got, value, rtol=rtol, atol=atol, err_msg=name)
  assert (found.tv <= 1).all()
  np.testing.assert_allclose(found.tv, oracles.total_variation(policy, rollout), atol=2e-7)
  np.testing.assert_allclose(found.entropy, oracles.entropy(policy), atol=2e-6)


# Bad input.


@pytest.fixture
def unchecked():
  """As users call the functions: without the type checks of the tests."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)


def test_bad_input_is_named(unchecked):
  policy, rollout, tokens = *logits(), tokens_of()
  cases = [
    ((policy.astype(jnp.int32), rollout, tokens), {}, 'policy_logits has dtype int32'),
    ((policy, rollout[..., :9], tokens), {}, 'rollout_logits scores 9 tokens and policy_logits 16'),
    ((policy, rollout[:2], tokens), {}, r'rollout_logits has shape \(2, 3, 16\)'),
    ((policy, rollout, tokens[:, :2]), {}, r'tokens has shape \(8, 2\)'),
    ((policy, rollout, tokens * 1.0), {}, 'tokens has dtype float32'),
    ((policy, rollout, tokens), {'temperature': 0.0}, 'temperature=0.0 must be > 0'),
    ((policy, rollout, tokens), {'temperature': jnp.ones(8)}, r'temperature has shape \(8,\)'),
    ((policy, None, tokens), {}, 'rollout_logits has type NoneType'),
    ((policy[..., :0], rollout[..., :0], tokens), {}, 'vocabulary of >= 1'),
  ]
  for args, settings, message in cases:
    with pytest.raises(InputError, match=message):
      divergences.statistics(*args, **settings)
  for fn in (divergences.kl, divergences.total_variation, divergences.jensen_shannon):
    with pytest.raises(InputError, match='rollout_logits scores 9'):
      fn(policy, rollout[..., :9])
  with pytest.raises(InputError, match='logits has dtype int32'):
    divergences.logp(policy.astype(jnp.int32), tokens)
  for alpha in (0.0, -1.0, 1.0, math.nan):
    with pytest.raises(InputError, match='alpha='):
      divergences.renyi(policy, rollout, alpha=alpha)


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(0, 3, 16), (2, 0, 16)])
def test_no_positions(shape):
  found = divergences.statistics(
    jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape[:2], jnp.int32)
  )
  assert found.kl.shape == found.policy_logp.shape == shape[:2]


# Transformations.


@pytest.mark.slow
def test_gradients(form):
  policy, rollout = logits(1, 1.0, (2, 2, 5))
  tokens = jnp.array([[0, 3], [4, 1]])
  asarrays = lambda f: lambda *xs: f(*map(jnp.asarray, xs))
  check = functools.partial(
    jax.test_util.check_grads, order=1, modes=('rev',), rtol=2e-2, atol=2e-2, eps=1e-2
  )
  check(asarrays(functools.partial(divergences.kl, temperature=0.8)), (policy, rollout))
  check(asarrays(divergences.total_variation), (policy, rollout))
  check(asarrays(divergences.entropy), (policy,))
  check(asarrays(lambda x: divergences.logp(x, tokens)), (policy,))
  check(
    asarrays(lambda x: divergences.statistics(x, rollout, tokens, temperature=0.7).policy_logp),
    (policy,),
  )
  check(
    asarrays(lambda x: divergences.statistics(x, rollout, tokens, temperature=0.7).entropy),
    (policy,),
  )
  check(asarrays(divergences.jensen_shannon), (policy, rollout))
  for alpha in (0.5, 2.0):
    check(asarrays(functools.partial(divergences.renyi, alpha=alpha)), (policy, rollout))
  for k in (ratios.k1, ratios.k2, ratios.k3):
    check(asarrays(k), (policy,))


def test_gradient_of_kl_is_the_difference_of_probabilities():
  # d KL(p || q) / d policy logits = q - p; both terms exact, so this pins sign and scale. With
  # respect to the rollout logits it is p (log p/q - KL).
  policy, rollout = logits()
  to_policy, to_rollout = jax.grad(lambda a, b: divergences.kl(a, b).sum(), (0, 1))(policy, rollout)
  log_q, log_p = oracles.log_softmax(policy), oracles.log_softmax(rollout)
  np.testing.assert_allclose(to_policy, np.exp(log_q) - np.exp(log_p), atol=2e-6)
  gap = log_p - log_q - oracles.kl(policy, rollout)[..., None]
  np.testing.assert_allclose(to_rollout, np.exp(log_p) * gap, atol=5e-6)
  np.testing.assert_array_equal(jax.grad(lambda a: divergences.kl(a, rollout).sum())(rollout), 0)


@pytest.mark.slow
def test_a_position_without_weight_has_no_gradient_whatever_it_holds(form):
  policy, rollout, tokens = *logits(), tokens_of()
  kept = jnp.ones(SHAPE[:2], bool).at[1, 2].set(False)
  bad = policy.at[1, 2].set(jnp.nan)

  def loss(policy, rollout):
    found = divergences.statistics(policy, rollout, tokens)
    values = [found.policy_logp, found.entropy, divergences.kl(policy, rollout)]
    values += [
      divergences.total_variation(policy, rollout),
      divergences.logp(policy, tokens),
      divergences.entropy(policy),
    ]
    return sum(jnp.where(kept, x, 0).sum() for x in values)

  got, want = (jax.grad(loss, (0, 1))(x, rollout) for x in (bad, policy))
  for x, clean in zip(got, want, strict=True):
    np.testing.assert_array_equal(x[1, 2], 0)
    np.testing.assert_allclose(x, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_curvature_is_the_fisher_information():
  # The Hessian of KL(rollout || policy) in the policy's logits is diag(q) - q q^T, anywhere.
  policy, rollout = (x[0, 0, :6] for x in logits())
  q = jax.nn.softmax(policy)
  got = jax.jacrev(jax.jacrev(lambda b: divergences.kl(b, rollout)))(policy)
  np.testing.assert_allclose(got, jnp.diag(q) - jnp.outer(q, q), atol=1e-6)
  got = jax.jacrev(jax.jacrev(lambda b: divergences.logp(b, jnp.int32(2))))(policy)
  np.testing.assert_allclose(-got, jnp.diag(q) - jnp.outer(q, q), atol=1e-6)


def test_large_split_arrays_must_be_local(monkeypatch):
  monkeypatch.setattr(pair, 'SMALL', 1)
  policy, rollout = logits()
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    split = jax.device_put((policy, rollout), P('data', None, 'model'))
    with pytest.raises(InputError, match='split over devices'):
      jax.jit(divergences.kl)(*split)


def everything(policy, rollout, tokens, axis_name=None):
  found = divergences.statistics(
    policy, rollout, tokens, temperature=0.9, full=True, axis_name=axis_name
  )
  single = {
    'kl': divergences.kl(policy, rollout, axis_name=axis_name),
    'tv': divergences.total_variation(policy, rollout, axis_name=axis_name),
    'entropy': divergences.entropy(policy, axis_name=axis_name),
    'logp': divergences.logp(policy, tokens, axis_name=axis_name),
  }
  single |= {
    'js': divergences.jensen_shannon(policy, rollout, axis_name=axis_name),
    'renyi': divergences.renyi(policy, rollout, alpha=0.5, axis_name=axis_name),
  }
  return single | {f'all.{name}': x for name, x in dataclasses.asdict(found).items()}


def cotangent(values):
  """Different for every output and position."""
  return {
    name: 0 * jnp.where(jnp.isfinite(value), value, 0)
    + jnp.sin(7.0 * i + jnp.arange(value.size)).reshape(value.shape)
    for i, (name, value) in enumerate(sorted(values.items()))
  }


def close(got, want):
  for name, value in want[0].items():
    np.testing.assert_allclose(got[0][name], value, rtol=1e-5, atol=2e-6, err_msg=name)
  for g, w in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
