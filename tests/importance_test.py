"""trm_jax.objectives.weights: ratios, truncation, missing log-probs, effective sample size."""

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

from trm_jax.divergences import ratios
from trm_jax.objectives import weights
from trm_jax.types import InputError

SEEDS = st.integers(0, 2**20)
B, T = 8, 5
WEIGHTS = [
  (weights.truncated, oracles.truncated),
  (weights.sequence_truncated, oracles.sequence_truncated),
]
BATTERY = pytest.mark.parametrize('fn, oracle', WEIGHTS)


def case(seed=0, scale=0.5):
  keys = jax.random.split(jax.random.key(seed))
  lengths = jax.random.randint(keys[1], (B, 1), 1, T + 1).at[-1].set(0)
  return scale * jax.random.normal(keys[0], (B, T)), jnp.arange(T)[None] < lengths


def test_unknown_words_and_other_shapes_are_refused(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  x, valid = case()
  with pytest.raises(InputError, match="missing='drop' is not"):
    weights.resolve_missing(x, x, valid, missing='drop')
  for given in ((x, valid[1:]), (x, valid, valid)):
    with pytest.raises(InputError, match=r'(valid|rows) has shape .*: give'):
      ratios.effective_sample_size(*given)


@hypothesis.given(seed=SEEDS, scale=st.sampled_from([0.01, 1.0, 8.0, 100.0]))
def test_ratio_matches_the_oracle(seed, scale):
  x, valid = case(seed, scale)
  got = ratios.ratio(x, valid)
  np.testing.assert_allclose(got, oracles.ratio(x, np.asarray(valid)), rtol=3e-6)
  assert (got > 0).all() and jnp.isfinite(got).all()


def test_ratio_by_hand():
  # ln 2 -> 2; beyond |20| the exponent is capped, e^20 = 4.85165e8; padding is 1.
  x = jnp.array([math.log(2), -math.log(4), 25.0, 1e4, jnp.inf, -25.0, -jnp.inf, jnp.nan, 3.0])
  valid = jnp.arange(9) < 8
  want = [2, 0.25, *[math.exp(20)] * 3, *[math.exp(-20)] * 2, math.nan, 1]
  np.testing.assert_allclose(ratios.ratio(x, valid), want, rtol=1e-6)


def test_ratio_gradient():
  x, valid = case()
  # check_grads hands over NumPy arrays.
  f = lambda x: ratios.ratio(jnp.asarray(x), valid)
  jax.test_util.check_grads(f, (x,), order=1, modes=('rev',), rtol=1e-2, atol=1e-2, eps=1e-2)
  np.testing.assert_allclose(
    jax.grad(lambda x: f(x).sum())(x), jnp.where(valid, f(x), 0), rtol=1e-6
  )
  bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e4, -1e4])
  gradient = jax.grad(lambda x: ratios.ratio(x, x == x).sum())(bad)
  np.testing.assert_array_equal(gradient, 0)
  gradient = jax.grad(lambda x: ratios.ratio(x, jnp.zeros(5, bool)).sum())(bad)
  np.testing.assert_array_equal(gradient, 0)


@pytest.mark.slow
@BATTERY
@hypothesis.given(seed=SEEDS, max_ratio=st.sampled_from([0.5, 1.0, 2.0, 5.0]))
def test_weights_match_the_oracle(fn, oracle, seed, max_ratio):
  x, valid = case(seed)
  got = fn(x, valid, max_ratio=max_ratio)
  np.testing.assert_allclose(got, oracle(x, np.asarray(valid), max_ratio), rtol=1e-5)
  assert (got[valid] <= max_ratio).all()
  np.testing.assert_array_equal(got[~valid], 1)


def test_weights_by_hand():
  # Ratios 4, 1/2, 3/2; cap 2. Per token 2, 1/2, 3/2; the product is 3, so 2 on each token.
  x = jnp.log(jnp.array([[4.0, 0.5, 1.5, 9.0]]))
  valid = jnp.array([[True, True, True, False]])
  np.testing.assert_allclose(weights.truncated(x, valid), [[2, 0.5, 1.5, 1]], rtol=1e-6)
  np.testing.assert_allclose(weights.sequence_truncated(x, valid), [[2, 2, 2, 1]], rtol=1e-6)
  got = weights.sequence_truncated(x, valid, max_ratio=10.0)
  np.testing.assert_allclose(got, [[3, 3, 3, 1]], rtol=1e-6)


@BATTERY
def test_weights_of_identical_policies_are_exactly_one(fn, oracle):
  np.testing.assert_array_equal(fn(jnp.zeros((B, T)), case()[1]), 1)


@BATTERY
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf, -jnp.inf, 1e4, -1e4])
def test_weights_ignore_padding_and_stay_finite(fn, oracle, bad):
  x, valid = case()
  want = fn(x, valid)
  np.testing.assert_array_equal(fn(jnp.where(valid, x, bad), valid), want)
  got = fn(x.at[0, 0].set(bad), valid)
  # A missing log-prob stays missing: of its token, or of the whole row's product.
  assert jnp.isnan(got[0, 0]) if math.isnan(bad) else jnp.isfinite(got).all()
  np.testing.assert_array_equal(got[1:], want[1:])


@pytest.mark.slow
@BATTERY
@pytest.mark.parametrize('shape', [(64, 64), (8, 4096)])
def test_missing_stays_missing_in_large_batches(fn, oracle, shape, optimised):
  x = jnp.zeros(shape).at[:, 3].set(jnp.nan).at[0].set(0)
  valid = jnp.ones(shape, bool)
  total = jax.jit(lambda x: fn(x, valid).sum(-1), compiler_options=optimised)
  np.testing.assert_array_equal(jnp.isnan(total(x)), jnp.arange(shape[0]) > 0)


@pytest.mark.slow
def test_many_ratios_do_not_overflow():
  # log of the product is 300 * 50 = 15000.
  x, valid = jnp.full((2, 300), 50.0), jnp.ones((2, 300), bool)
  np.testing.assert_array_equal(weights.sequence_truncated(x, valid), 2)
  np.testing.assert_allclose(weights.sequence_truncated(-x, valid), math.exp(-20), rtol=1e-6)


@pytest.mark.slow
@BATTERY
def test_weights_carry_no_gradient(fn, oracle):
  x, valid = case()
  np.testing.assert_array_equal(jax.grad(lambda x: fn(x, valid).sum())(x), 0)
  weigh = lambda x: (fn(x, valid) * x).sum()
  np.testing.assert_array_equal(jax.grad(weigh)(x), fn(x, valid))


# Missing log-probs.


def reported(value):
  """Policy and rollout log-probs; the rollout's [2, 1] is `value`, and so is a padding slot."""
  policy = jnp.full((4, 3), -1.0)
  valid = jnp.ones((4, 3), bool).at[3, 2].set(False)
  return (policy - 0.5).at[2, 1].set(value).at[3, 2].set(value), policy, valid


@pytest.mark.parametrize('missing, row', [('reject', False), ('error', False), ('neutral', True)])
def test_a_missing_log_prob(missing, row):
  rollout, policy, valid = reported(jnp.nan)
  filled, usable = weights.resolve_missing(rollout, policy, valid, missing=missing)
  np.testing.assert_array_equal(usable, [True, True, row, True])
  assert not jnp.isnan(filled).any()
  # Read as agreement: the ratio is exactly 1 there and untouched elsewhere.
  ratio = ratios.ratio(policy - filled, valid)
  assert ratio[2, 1] == 1
  np.testing.assert_allclose(ratio[:2], math.exp(0.5), rtol=1e-6)
  np.testing.assert_array_equal(filled[:2], rollout[:2])


@pytest.mark.parametrize('missing', ['reject', 'error', 'neutral'])
@pytest.mark.parametrize('value', [jnp.inf, -jnp.inf])
def test_an_infinite_ratio_is_a_violation_not_missing(missing, value):
  rollout, policy, valid = reported(value)
  filled, usable = weights.resolve_missing(rollout, policy, valid, missing=missing)
  np.testing.assert_array_equal(usable, [True, True, False, True])
  assert filled[2, 1] == value
  rollout, policy, valid = reported(-1.0)
  policy = policy.at[1, 0].set(value).at[3, 2].set(jnp.nan)
  _, usable = weights.resolve_missing(rollout, policy, valid, missing=missing)
  np.testing.assert_array_equal(usable, [True, False, True, True])


@pytest.mark.parametrize('value, kept', [(0.0, True), (1e-4, True), (0.5, False), (4.0, False)])
def test_a_positive_log_prob_is_a_violation(value, kept):
  """The sign was turned, or it is no log-prob; rounding above 0 is not."""
  rollout, policy, valid = reported(value)
  _, usable = weights.resolve_missing(rollout, policy, valid)
  np.testing.assert_array_equal(usable, [True, True, kept, True])


def test_a_ratio_beyond_the_cap_is_a_violation():
  rollout, policy, valid = reported(-60.0)  # a log-ratio of 59: capped, without gradient
  _, usable = weights.resolve_missing(rollout, policy, valid)
  np.testing.assert_array_equal(usable, [True, True, False, True])
  _, usable = weights.resolve_missing(*reported(-20.5))  # 19.5
  assert usable.all()
  # A token that the policy has dropped has ratio 0 but for 2e-9.
  _, usable = weights.resolve_missing(jnp.full((4, 3), -1.0), policy - 60, valid)
  assert usable.all()


@pytest.mark.parametrize('missing', ['reject', 'error', 'neutral'])
def test_a_missing_policy_log_prob_is_never_agreement(missing):
  rollout, policy, valid = reported(jnp.nan)
  _, usable = weights.resolve_missing(rollout, policy * jnp.nan, valid, missing=missing)
  assert not usable.any()


def test_a_missing_log_prob_is_the_trainers_at_the_weights_that_drew_it():
  # In a later update the policy has moved: the ratio there is policy / trainer, as everywhere else.
  rollout, policy, valid = reported(jnp.nan)
  given = dict(missing='neutral', trainer_logp=policy - 0.25)
  filled, usable = weights.resolve_missing(rollout, policy, valid, **given)
  assert usable.all()
  np.testing.assert_array_equal(filled, rollout.at[2, 1].set(-1.25).at[3, 2].set(-1.25))


def test_filled_values_carry_no_gradient():
  rollout, policy, valid = reported(jnp.nan)
  fill = lambda p: weights.resolve_missing(rollout, p, valid, missing='neutral')[0]
  np.testing.assert_array_equal(jax.grad(lambda p: fill(p).sum())(policy), 0)
  # d exp(p - filled) / dp = ratio, also where it was filled in.
  gradient = jax.grad(lambda p: ratios.ratio(p - fill(p), valid).sum())(policy)
  want = jnp.where(valid, math.exp(0.5), 0).at[2, 1].set(1)
  np.testing.assert_allclose(gradient, want, rtol=1e-6)


def test_default_is_reject():
  rollout, policy, valid = reported(jnp.nan)
  assert not weights.resolve_missing(rollout, policy, valid)[1][2]


# Effective sample size.


@hypothesis.given(seed=SEEDS)
def test_effective_sample_size_matches_the_oracle(seed):
  x, valid = case(seed)
  got = ratios.effective_sample_size(x, valid)
  np.testing.assert_allclose(got, oracles.effective_sample_size(x, np.asarray(valid)), rtol=1e-5)
  assert 0 < got <= 1


def test_effective_sample_size_by_hand():
  # W = 2 and 1 (a product of 4 and 1/2; an empty row does not exist): 9 / (2 * 5).
  x = jnp.log(jnp.array([[4.0, 0.5], [1.0, 7.0], [9.0, 9.0]]))
  valid = jnp.array([[True, True], [True, False], [False, False]])
  np.testing.assert_allclose(ratios.effective_sample_size(x, valid), 0.9, rtol=1e-6)
  rows = jnp.array([True, True, False])
  np.testing.assert_allclose(ratios.effective_sample_size(x, valid, rows), 0.9, rtol=1e-6)
  broken = x.at[2].set(jnp.nan)
  got = ratios.effective_sample_size(broken, jnp.ones_like(valid).at[1, 1].set(False), rows)
  np.testing.assert_allclose(got, 0.9, rtol=1e-6)
  assert jnp.isnan(ratios.effective_sample_size(x, valid, rows & False))
  assert ratios.effective_sample_size(jnp.zeros((5, 2)), jnp.ones((5, 2), bool)) == 1


@pytest.mark.slow
def test_effective_sample_size_is_at_most_one(optimised):
  run = jax.jit(jax.vmap(ratios.effective_sample_size, (0, None)), compiler_options=optimised)
  x = 1e-4 * jax.random.normal(jax.random.key(0), (6400, 7, 3))
  found = run(x, jnp.ones((7, 3), bool))
  assert (found <= 1).all() and (found > 0.999).all()


@pytest.mark.slow
def test_effective_sample_size_of_segments_infinite_and_missing_ratios():
  # Two segments of one trajectory, 2 and 1/2, beside a trajectory of weight 1.
  x, ids = jnp.log(jnp.array([[2.0], [0.5], [1.0]])), jnp.array([4, 4, -9])
  every = jnp.ones((3, 1), bool)
  assert ratios.effective_sample_size(x, every, trajectory=ids) == 1
  assert ratios.effective_sample_size(x, every) < 1
  # A segment that is left out takes its factor with it: 1/2 and 1.
  rows = jnp.array([False, True, True])
  np.testing.assert_allclose(ratios.effective_sample_size(x, every, rows, ids), 0.9, rtol=1e-6)
  infinite = x.at[1].set(jnp.inf)
  np.testing.assert_allclose(ratios.effective_sample_size(infinite, every), 1 / 3, rtol=1e-6)
  assert ratios.effective_sample_size(infinite, every, trajectory=ids) == 0.5
  for shape in ((3, 1), (64, 64), (8, 4096)):
    lost = jnp.zeros(shape).at[1, -1].set(jnp.nan)
    assert jnp.isnan(ratios.effective_sample_size(lost, jnp.ones(shape, bool)))
  assert jnp.isnan(ratios.effective_sample_size(x - jnp.inf, every))


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_low_precision_is_raised(dtype):
  x, valid = jnp.full((2, 301), 1.0, dtype), jnp.ones((2, 301), bool)
  sums, there = ratios.over_trajectories(x, valid)
  np.testing.assert_array_equal(sums, 301)
  assert there.all() and sums.dtype == jnp.float32
  twelve = jnp.array([12.0, -12.0], dtype)
  for k in (ratios.k1, ratios.k2, ratios.k3):
    np.testing.assert_array_equal(k(twelve), k(twelve.astype(jnp.float32)))
    assert k(twelve).dtype == jnp.float32


@pytest.mark.parametrize('level', [1e4, -1e4, 100.0])
def test_effective_sample_size_neither_overflows_nor_loses_digits(level):
  # log W = level + (0, 1): (1 + e)^2 / (2 (1 + e^2)), the level cancels.
  x = jnp.array([[level], [level + 1]])
  want = (1 + math.e) ** 2 / (2 * (1 + math.e**2))
  np.testing.assert_allclose(
    ratios.effective_sample_size(x, jnp.ones((2, 1), bool)), want, rtol=1e-6
  )
  one = ratios.effective_sample_size(jnp.full((8, 1), level), jnp.ones((8, 1), bool))
  assert one == 1
  # One row has all the weight: 1/8.
  lone = ratios.effective_sample_size(
    jnp.zeros((8, 1)).at[3].set(abs(level)), jnp.ones((8, 1), bool)
  )
  np.testing.assert_allclose(lone, 1 / 8, rtol=1e-6)
