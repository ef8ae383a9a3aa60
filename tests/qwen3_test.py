"""trm_jax.policy.qwen3: sizes of the published models, nothing allocated."""

import dataclasses
import math

import jax
import pytest

from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.policy import qwen3

# As published: layers, width, query heads, key/value heads, inner width, experts, tied.
PUBLISHED = {
  'Qwen3-0.6B': (28, 1024, 16, 8, 3072, 0, True),
  'Qwen3-1.7B': (28, 2048, 16, 8, 6144, 0, True),
  'Qwen3-4B': (36, 2560, 32, 8, 9728, 0, True),
  'Qwen3-8B': (36, 4096, 32, 8, 12288, 0, False),
  'Qwen3-14B': (40, 5120, 40, 8, 17408, 0, False),
  'Qwen3-32B': (64, 5120, 64, 8, 25600, 0, False),
  'Qwen3-30B-A3B': (48, 2048, 32, 4, 768, 128, False),
  'Qwen3-235B-A22B': (94, 4096, 64, 4, 1536, 128, False),
}


def count(params):
  return sum(math.prod(p.shape) for p in jax.tree.leaves(params))


@pytest.mark.parametrize('model', qwen3.MODELS, ids=lambda model: model.name)
def test_published_sizes(model):
  c = model.policy
  found = c.layers, c.width, c.heads, c.kv_heads, c.mlp_width, c.experts, c.tied_head
  assert found == PUBLISHED[model.name]
  assert c.head_width == 128 and c.rope_base == 1e6 and c.norm_epsilon == 1e-6
  assert c.rope_scaling.kind == 'none' and model.vocab_size == 151_936
  if c.experts:
    assert c.experts_per_token == 8 and c.normalize_gates
  assert count(policy.shapes(c, model.vocab_size)) == model.parameters


def test_totals_are_the_published_ones():
  total = {model.name: model.parameters for model in qwen3.MODELS}
  assert set(total) == set(PUBLISHED)
  assert total['Qwen3-0.6B'] == 596_049_920
  assert total['Qwen3-8B'] == 8_190_735_360
  assert total['Qwen3-30B-A3B'] == 30_532_122_624
  for model in qwen3.MODELS:  # 'about', as their names have it
    named = float(model.name.split('-')[1].removesuffix('B'))
    assert named == pytest.approx(model.parameters / 1e9, rel=0.06)


def test_active_parameters():
  """A3B and A22B: of a token's path, without the embedding it is looked up in."""
  for model, active in ((qwen3.QWEN3_30B_A3B, 3e9), (qwen3.QWEN3_235B_A22B, 22e9)):
    one_path = dataclasses.replace(model.policy, experts=8)
    params = policy.shapes(one_path, model.vocab_size)
    del params['embed']
    assert count(params) == pytest.approx(active, rel=0.05)


def test_shapes_are_those_of_init():
  small = dataclasses.replace(
    qwen3.QWEN3_30B_A3B.policy, width=16, layers=3, heads=4, kv_heads=2, head_width=4, mlp_width=8
  )
  for mesh in (None, (4, 2)):
    with jax.set_mesh(sharding.make_mesh(*mesh)) if mesh else jax.numpy_rank_promotion('raise'):
      want = jax.eval_shape(lambda key: policy.init(key, small, 24), jax.random.key(0))
      got = policy.shapes(small, 24)
      assert jax.tree.structure(got) == jax.tree.structure(want)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
