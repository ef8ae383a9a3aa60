"""benchmarks.qwen3_step: a training step that learns, and in which [B,T,V] never exists."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import qwen3_step
from trm_jax import policy, types
from trm_jax.policy import qwen3

# Of the shape of Qwen3-0.6B: grouped heads, a head width of its own, a tied head.
TINY = qwen3.Model(
  name='tiny',
  policy=dataclasses.replace(
    qwen3.QWEN3_0_6B.policy, width=16, layers=5, heads=4, kv_heads=2, head_width=8, mlp_width=24
  ),
  vocab_size=50,
  parameters=0,
)
ROWS, LENGTH = 2, 12


@pytest.mark.slow
def test_two_steps(monkeypatch):
  monkeypatch.setattr(qwen3_step, 'OPTIMIZER', qwen3_step.optax.adam(1e-4))
  config = qwen3_step.configure(TINY)
  sizes = config, TINY.vocab_size, ROWS, LENGTH
  arrays = qwen3_step.draw(*sizes)
  want = qwen3_step.inputs(*sizes)
  assert jax.tree.structure(arrays) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(arrays), jax.tree.leaves(want), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  before = jax.tree.map(np.asarray, arrays[0])
  program = qwen3_step.compiled(*sizes)
  params, moments, first = program(*arrays)
  after = jax.tree.map(np.asarray, params)  # before they are donated
  _, _, second = program(params, moments, *arrays[2:])
  # The rollout is the policy's own: nothing to mask, a ratio of 1 whose sum is the advantages'.
  assert first['max_kl'].max() < 1e-6 and first['keep'].all()
  np.testing.assert_allclose(first['loss'], 0, atol=1e-4)
  assert second['max_kl'].min() > 1e-6 and second['loss'] < first['loss']
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), after, before)))


def test_the_search_for_scores():
  sizes = dict(vocab_size=50, rows=2, length=12)
  found = functools.partial(qwen3_step.scores, **sizes)
  for text in ('f32[2,12,50]{2,1,0}', 'f32[24,50]', 'bf16[50,24]', 'f32[1,2,27,50]', 's32[54,50]'):
    assert found(f'x = {text} y'), text
  for text in ('f32[16,50]', 'f32[12,50]', 'f32[2,12,16]', 'f32[]', 'f32[3,50]'):
    assert not found(f'x = {text} y'), text


def test_the_command():
  with pytest.raises(types.InputError, match=r"model='gpt' is not one of Qwen3-0\.6B"):
    qwen3_step.measure(qwen3_step.Command(model='gpt'))
  with pytest.raises(types.InputError, match='rows=0'):
    qwen3_step.measure(qwen3_step.Command(rows=0))
  with pytest.raises(types.InputError, match=r'rows=2 times length=512 equals the width'):
    qwen3_step.measure(qwen3_step.Command(rows=2))


@pytest.mark.slow
def test_a_step_of_qwen3_0_6b_fits_and_never_holds_all_scores(optimised):
  found = qwen3_step.measure(qwen3_step.Command())
  assert found['scores'] == []
  assert found['arguments_gib'] + found['temporaries_gib'] < 24
  # Of the search: with all logits at once it finds them.
  config = dataclasses.replace(qwen3_step.configure(qwen3.QWEN3_0_6B), layers=1)
  params = policy.shapes(config, 151_936)
  whole = jax.jit(
    lambda p, t, s: policy.logits(p, policy.apply(p, config, t, start=s)[0]).max(-1)
  ).lower(params, jax.ShapeDtypeStruct((1, 512), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
  assert qwen3_step.scores(whole.compile().as_text(), 151_936, 1, 512)
