"""trm_jax.divergences.passes.pair: blocks of a vocabulary add up; large and small arrays agree."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from trm_jax.divergences.passes import blocks, pair

INF = jnp.inf


def logits(seed=0, shape=(6, 40)):
  keys = jax.random.split(jax.random.key(seed))
  return tuple(3 * jax.random.normal(k, shape) for k in keys)


def test_sums_by_hand():
  # logits log(1, 2, 5): top log 5, sum 8/5, weighted .2 ln .2 + .4 ln .4 = -.321888 - .366516
  found = pair.sums(jnp.log(jnp.array([1.0, 2.0, 5.0])), None)
  np.testing.assert_allclose(found.top, np.log(5), rtol=1e-6)
  np.testing.assert_allclose(found.total, 1.6, rtol=1e-6)
  np.testing.assert_allclose(found.weighted, -0.688404, rtol=1e-5)
  side = pair.side(found._replace(picked=jnp.log(2.0)), None)
  np.testing.assert_allclose(side.logp, np.log(0.25), rtol=1e-6)
  np.testing.assert_allclose(side.entropy, oracles.entropy(np.log([1, 2, 5])), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [pytest.param(None, marks=pytest.mark.slow), 0.7])
def test_merged_blocks_are_the_whole(temperature):
  x, _ = logits()
  # The third block of the first row has no mass, nor has any block of the last row.
  x = x.at[0, 20:30].set(-INF).at[5].set(-INF).at[1, 3].set(1e4)
  parts = jnp.moveaxis(x.reshape(6, 4, 10), 1, 0)
  merge = jax.vmap(
    lambda part: pair.merge((pair.sums(part, temperature),), temperature, 'model')[0],
    axis_name='model',
  )
  got, want = merge(parts), pair.sums(x, temperature)
  for name in ('top', 'total', 'weighted'):
    for device in range(4):
      np.testing.assert_allclose(
        getattr(got, name)[device], getattr(want, name), rtol=1e-5, atol=1e-6, err_msg=name
      )
  assert got.total[0, 5] == 0 and got.weighted[0, 5] == 0 and got.top[0, 5] == -INF


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [None, 1.5])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_stored_intermediates_change_nothing(temperature, dtype):
  policy, rollout = (x.astype(dtype) for x in logits(1))
  args = policy, rollout, temperature
  plain, kept = (pair.fused(*args, full=True, store=store) for store in (False, True))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), kept, plain)
  sides = [pair.side(s, temperature) for s in plain[:2]]
  for store in (False, True):
    given = pair.terms_given(policy, rollout, *sides, temperature, full=True, store=store)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), given, plain[2])


def test_differences_of_close_logits_are_exact():
  # 1e-3 apart: centring first would round each side to 2e-7 and leave 1e-4 of the difference.
  rollout, noise = logits(2, (4, 4096))
  policy = rollout + 1e-3 * noise
  sides = [pair.side(pair.sums(x, None), None) for x in (policy, rollout)]
  got = pair.log_odds(policy, rollout, *sides, None)
  want = oracles.log_softmax(policy) - oracles.log_softmax(rollout)
  spread = lambda x: x - x.mean(-1, keepdims=True)
  np.testing.assert_allclose(spread(oracles.f64(got)), spread(want), atol=1e-9)
  # A shift of one side by more than its spread costs nothing either.
  shifted = policy + 4096.0
  sides[0] = pair.side(pair.sums(shifted, None), None)
  got = pair.log_odds(shifted, rollout, *sides, None)
  want = oracles.log_softmax(shifted) - oracles.log_softmax(rollout)
  np.testing.assert_allclose(got, want, atol=3e-6)


def test_large_arrays_take_the_blocks(monkeypatch):
  policy, rollout = logits(3)
  tokens = jnp.arange(6)
  want = pair.compare(policy, rollout, tokens, None, None, full=True)
  text = lambda: str(
    jax.make_jaxpr(lambda p, r: pair.compare(p, r, tokens, None, None))(policy, rollout)
  )
  assert 'platform_index' not in text()
  monkeypatch.setattr(pair, 'SMALL', 1)
  monkeypatch.setattr(blocks, 'BLOCK', 80)
  assert 'platform_index' in text()
  got = pair.compare(policy, rollout, tokens, None, None, full=True)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
