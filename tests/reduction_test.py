"""trm_jax.mismatch.reduction: the same function, added up in another order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import policy_oracle
import pytest

from trm_jax import policy, types
from trm_jax.mismatch import reduction
from trm_jax.policy import attention

V = 12
MOE = policy.PolicyConfig(
  width=16, layers=1, heads=4, kv_heads=2, head_width=6, mlp_width=24, experts=4
)
CONFIGS = {'moe': MOE, 'dense': dataclasses.replace(MOE, experts=0, tied_head=True)}
PERMUTE = reduction.Reduction(permute=True)


@functools.cache
def parameters(config):
  """Random numbers everywhere, in the scales of norms too: permuting them wrongly shows."""
  shapes = jax.eval_shape(lambda key: policy.init(key, config, V), jax.random.key(0))
  rng = np.random.default_rng(0)
  draw = lambda leaf: jnp.asarray((1 + rng.normal(size=leaf.shape)).astype(np.float32) / 3)
  return jax.tree.map(draw, shapes)


@pytest.mark.parametrize('name', ['moe', pytest.param('dense', marks=pytest.mark.slow)])
def test_a_permuted_policy_is_the_same_function(name):
  config, params = CONFIGS[name], parameters(CONFIGS[name])
  moved = reduction.permute(params, PERMUTE, config)
  changed = jax.tree.map(lambda a, b: bool((a != b).any()), moved, params)
  untouched = {'q_scale', 'k_scale'}  # the width of queries and keys is tied to the rotary angles
  for path, leaf in jax.tree_util.tree_leaves_with_path(changed):
    assert leaf == (path[-1].key not in untouched), path
  tokens = np.random.default_rng(0).integers(0, V, (3, 7)).astype(np.int32)
  start = np.array([0, 2, 1], np.int32)
  _, want, *_ = policy_oracle.apply(params, config, tokens, start)
  _, got, *_ = policy_oracle.apply(moved, config, tokens, start)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_off_is_off():
  params = parameters(MOE)
  assert reduction.permute(params, reduction.Reduction(), MOE) is params
  off = reduction.permute(params, PERMUTE, MOE, jnp.float32(0))
  jax.tree.map(np.testing.assert_array_equal, off, params)
  assert reduction.attention(reduction.Reduction(), attention.plain) is attention.plain


@pytest.mark.slow
def test_attention_in_blocks_of_keys():
  draw = lambda seed, heads: jax.random.normal(jax.random.key(seed), (2, 9, heads, 4))
  q, k, v = draw(0, 4), draw(1, 2), draw(2, 2)
  at = dict(slots=jnp.arange(9), start=jnp.array([0, 3], jnp.int32))
  split = reduction.Reduction(attention_block=2)
  own = np.asarray(attention.plain(q, k, v, **at))
  seen = (np.arange(9)[None] >= np.array([0, 3])[:, None])[..., None, None]
  on = np.asarray(reduction.attention(split, attention.plain)(q, k, v, **at))
  np.testing.assert_allclose(np.where(seen, on, 0), np.where(seen, own, 0), rtol=0, atol=1e-6)
  assert (np.where(seen, on, 0) != np.where(seen, own, 0)).any()
  off = reduction.attention(split, attention.plain, jnp.float32(0))(q, k, v, **at)
  np.testing.assert_array_equal(off, own)


def test_errors():
  with pytest.raises(types.InputError, match='reduction.attention_block=0 must be at least 1'):
    reduction.Reduction(attention_block=0)
