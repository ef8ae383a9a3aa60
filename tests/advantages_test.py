"""trm_jax.objectives.advantages: baselines by pool, centred and scaled."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracles
import pytest

from trm_jax.objectives import advantages
from trm_jax.types import InputError

POOLS = ['all', 'accepted', 'loo', 'loo_accepted']
EVERY = [advantages.centred, advantages.group_relative, advantages.leave_one_out]
BATTERY = pytest.mark.parametrize('fn', EVERY)
BY_POOL = pytest.mark.parametrize('pool', POOLS)
# Each function with one pool, and each pool with one function; the others in `make test-all`.
PAIRS = pytest.mark.parametrize(
  'fn, pool',
  [
    pytest.param(fn, pool, marks=[pytest.mark.slow] * (fn is not EVERY[1] and pool != POOLS[0]))
    for fn in EVERY
    for pool in POOLS
  ],
)
SEEDS = st.integers(0, 2**20)
G = 4


def case(seed=0, groups=6):
  keys = jax.random.split(jax.random.key(seed))
  rewards = jax.random.normal(keys[0], (groups * G,))
  return rewards, jax.random.bernoulli(keys[1], 0.6, rewards.shape)


def oracle(fn, rewards, keep, pool, group_size=G):
  if fn is advantages.leave_one_out:
    pool = {'all': 'loo', 'accepted': 'loo_accepted'}.get(pool, pool)
  epsilon = 1e-6 if fn is advantages.group_relative else None
  return oracles.advantages(rewards, np.asarray(keep), group_size, pool, epsilon)


@BATTERY
@BY_POOL
@hypothesis.given(seed=SEEDS)
def test_matches_the_oracle(fn, pool, seed):
  rewards, keep = case(seed)
  want = oracle(fn, rewards, keep, pool)
  got = fn(rewards, keep, group_size=G, pool=pool)
  assert got.dtype == jnp.float32
  # A pool of one has no deviation: the difference is divided by epsilon, hence the scale.
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'pool, want',
  [
    # Accepted rewards 1, 2, 3 and a rejected sibling of 100. all: mean 26.5.
    ('all', [-25.5, -24.5, -23.5, 73.5]),
    # Mean of 1, 2, 3 is 2.
    ('accepted', [-1.0, 0.0, 1.0, 98.0]),
    # Means of the other three: 35, 104/3, 103/3... and 2.
    ('loo', [1 - 35, 2 - 104 / 3, 3 - 103 / 3, 98.0]),
    # Means of the other accepted ones: 2.5, 2, 1.5 and 2.
    ('loo_accepted', [-1.5, 0.0, 1.5, 98.0]),
  ],
)
def test_pools_by_hand(pool, want):
  rewards, keep = jnp.array([1.0, 2, 3, 100]), jnp.array([True, True, True, False])
  got = advantages.centred(rewards, keep, group_size=4, pool=pool)
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
  'pool, want', [('all', -49.5), ('accepted', 0.0), ('loo', -99.0), ('loo_accepted', 0.0)]
)
def test_a_rejected_sibling_with_a_huge_reward(pool, want):
  # Accepted reward 1 beside a rejected 100: 1 - 101/2 = -49.5 where all rows form the baseline; the
  # accepted row is alone in its pool and has nothing to be compared with.
  rewards, keep = jnp.array([1.0, 100.0]), jnp.array([True, False])
  assert advantages.centred(rewards, keep, group_size=2, pool=pool)[0] == want


def test_a_rejected_sibling_beside_an_accepted_zero():
  # The same vector with an accepted 0: 1 - (1 + 0)/2 = .5 and 1 - 0 = 1 without the sibling.
  rewards, keep = jnp.array([1.0, 0.0, 100.0]), jnp.array([True, True, False])
  found = {p: advantages.centred(rewards, keep, group_size=3, pool=p)[0] for p in POOLS}
  np.testing.assert_allclose(found['all'], 1 - 101 / 3, rtol=1e-6)
  assert found['accepted'] == 0.5 and found['loo'] == -49 and found['loo_accepted'] == 1


def test_group_relative_by_hand():
  # Rewards 0, 0, 1, 1: mean 1/2, population deviation 1/2.
  rewards = jnp.array([0.0, 0, 1, 1])
  got = advantages.group_relative(rewards, rewards < 2, group_size=4)
  np.testing.assert_allclose(got, [-1, -1, 1, 1], rtol=1e-5)
  # 1e-6 is relative to nothing: epsilon .5 halves it.
  got = advantages.group_relative(rewards, rewards < 2, group_size=4, epsilon=0.5)
  np.testing.assert_allclose(got, [-0.5, -0.5, 0.5, 0.5], rtol=1e-6)


def test_leave_one_out_is_centred_times_g_over_g_minus_one():
  rewards, keep = case()
  got = advantages.leave_one_out(rewards, keep, group_size=G)
  np.testing.assert_allclose(
    got, advantages.centred(rewards, keep, group_size=G) * G / (G - 1), rtol=1e-4, atol=1e-6
  )


@PAIRS
@hypothesis.given(
  reward=st.floats(-1e4, 1e4, width=32), size=st.sampled_from([2, 3, 7, 16]), share=st.floats(0, 1)
)
def test_equal_rewards_are_exactly_zero(fn, pool, reward, size, share):
  # A mean of equal numbers is off by a rounding error, which epsilon = 1e-6 would make .1.
  rewards = jnp.full((2 * size,), reward, jnp.float32)
  keep = jnp.arange(2 * size) < share * 2 * size
  np.testing.assert_array_equal(fn(rewards, keep, group_size=size, pool=pool), 0)


@BATTERY
@pytest.mark.parametrize('pool', ['accepted', 'loo_accepted'])
def test_an_empty_pool_is_zero(fn, pool):
  rewards, keep = case()
  keep = keep.at[:G].set(False)
  got = fn(rewards, keep, group_size=G, pool=pool)
  np.testing.assert_array_equal(got[:G], 0)
  # With one accepted row only, that row has no *other* accepted row.
  got = advantages.leave_one_out(rewards, keep.at[1].set(True), group_size=G, pool=pool)
  assert got[1] == 0 and (got[jnp.array([0, 2, 3])] != 0).all()


@BATTERY
@pytest.mark.parametrize('pool', ['all', 'loo'])
def test_whole_pools_ignore_the_mask(fn, pool):
  # The baseline must not depend on the mask, or the masked gradient gains a bias.
  rewards, keep = case()
  want = fn(rewards, jnp.ones_like(keep), group_size=G, pool=pool)
  np.testing.assert_array_equal(fn(rewards, keep, group_size=G, pool=pool), want)


@BATTERY
@pytest.mark.parametrize('pool', ['accepted', 'loo_accepted'])
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf, 1e30])
def test_accepted_pools_ignore_rejected_rewards(fn, pool, bad):
  rewards, keep = case()
  want = fn(rewards, keep, group_size=G, pool=pool)
  got = fn(jnp.where(keep, rewards, bad), keep, group_size=G, pool=pool)
  np.testing.assert_array_equal(jnp.where(keep, got, 0), jnp.where(keep, want, 0))


@PAIRS
@hypothesis.given(seed=SEEDS, shift=st.integers(-100, 100))
def test_shift_order_and_other_groups(fn, pool, seed, shift):
  rewards, keep = case(seed, 3)
  rewards = jnp.round(rewards * 64) / 64
  run = functools.partial(fn, group_size=G, pool=pool)
  want = run(rewards, keep)
  np.testing.assert_array_equal(run(rewards + shift, keep), want)
  order = np.concatenate([np.random.default_rng(seed).permutation(G) + G * g for g in (2, 0, 1)])
  np.testing.assert_allclose(run(rewards[order], keep[order]), want[order], rtol=2e-5, atol=1e-5)
  np.testing.assert_array_equal(run(rewards[:G], keep[:G]), want[:G])


@hypothesis.given(seed=SEEDS)
def test_group_relative_has_mean_zero_and_deviation_one(seed):
  rewards, keep = case(seed)
  got = advantages.group_relative(rewards, keep, group_size=G).reshape(-1, G)
  np.testing.assert_allclose(got.mean(-1), 0, atol=1e-5)
  np.testing.assert_allclose(got.std(-1), 1, atol=1e-3)
  np.testing.assert_allclose(
    advantages.group_relative(3 * rewards, keep, group_size=G).reshape(-1, G), got, atol=1e-3
  )


@BATTERY
def test_too_small_and_broken_groups_are_refused(fn, monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  rewards, keep = case()
  for size in (1, 0, -4):
    with pytest.raises(InputError, match=f'group_size={size} .*at least 2'):
      fn(rewards, keep, group_size=size)
  with pytest.raises(InputError, match='24 rows .*group_size=5'):
    fn(rewards, keep, group_size=5)
  for wrong in ((rewards, keep[:-1]), (rewards[:, None], keep), (rewards[:, None], keep[:, None])):
    with pytest.raises(InputError, match='rewards has shape .* keep .* one value per row'):
      fn(*wrong, group_size=G)


@PAIRS
def test_no_gradient_jit_vmap_and_strict_promotion(fn, pool):
  rewards, keep = case()
  run = functools.partial(fn, group_size=G, pool=pool)
  want = run(rewards, keep)
  np.testing.assert_array_equal(jax.grad(lambda r: run(r, keep).sum())(rewards), 0)
  np.testing.assert_allclose(jax.jit(run)(rewards, keep), want, rtol=1e-5, atol=1e-6)
  by_group = jax.vmap(run)(rewards.reshape(-1, G), keep.reshape(-1, G))
  np.testing.assert_allclose(by_group.reshape(-1), want, rtol=1e-5, atol=1e-6)
  with jax.numpy_dtype_promotion('strict'):
    np.testing.assert_array_equal(run(rewards, keep), want)
  assert run(rewards.astype(jnp.bfloat16), keep).dtype == jnp.float32


def test_unknown_pool_is_an_error(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  with pytest.raises(InputError, match="pool='al'"):
    advantages.centred(jnp.zeros(4), jnp.ones(4, bool), group_size=2, pool='al')


def test_a_padding_row_is_in_no_group():
  rewards, exists = jnp.array([1.0, 1, 1, 0]), jnp.array([True, True, True, False])
  keep = jnp.ones(4, bool)
  for fn in EVERY:
    got = fn(rewards, keep, group_size=4, exists=exists)
    np.testing.assert_array_equal(got, 0)
  # Without it the padding row's reward of 0 would be a sample's.
  assert (advantages.centred(rewards, keep, group_size=4) != 0).all()


@PAIRS
@hypothesis.given(seed=SEEDS)
def test_groups_by_id_in_any_order_are_adjoining_groups(fn, pool, seed):
  rewards, keep = case(seed)
  want = fn(rewards, keep, group_size=G, pool=pool)
  ids = jnp.repeat(jnp.array([7, 0, -3, 100, 41, 12]), G)
  order = jax.random.permutation(jax.random.key(seed), rewards.size)
  got = fn(rewards[order], keep[order], groups=ids[order], pool=pool)
  np.testing.assert_allclose(got, want[order], rtol=1e-5, atol=1e-6)


def test_groups_of_other_sizes_by_hand():
  # Prompts A, B, A, A and C: A has rewards 1, 0, 2, the others are alone.
  rewards, ids = jnp.array([1.0, 5, 0, 2, 9]), jnp.array([3, 8, 3, 3, 0])
  got = advantages.centred(rewards, jnp.ones(5, bool), groups=ids)
  np.testing.assert_allclose(got, [0, 0, -1, 1, 0], atol=1e-7)


def test_ids_and_adjacency_are_not_mixed(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  rewards, keep = case()
  for given in (dict(), dict(group_size=2, groups=jnp.zeros(rewards.size, int))):
    with pytest.raises(InputError, match='give either the number of adjoining samples'):
      advantages.centred(rewards, keep, **given)
  with pytest.raises(InputError, match='groups has shape'):
    advantages.centred(rewards, keep, groups=jnp.zeros(3, int))
