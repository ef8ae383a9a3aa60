"""trm_jax.types: means that are divided once, and the records as pytrees."""

import dataclasses
import functools
import typing

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from trm_jax import types
from trm_jax.mesh import sharding
from trm_jax.types import Mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  word: typing.Literal['yes', 'no'] = 'yes'
  number: int = 1


def test_words_are_checked():
  types.check_words(Settings(word='no', number=7))
  with pytest.raises(types.InputError, match="^my.word='Yes' is not one of yes, no.$"):
    types.check_words(Settings(word='Yes'), 'my.')


MESHES = [(4, 2), (1, 8), (8, 1)]


def mean(total, count):
  return Mean(jnp.float32(total), jnp.float32(count))


def test_hand_computed():
  # Two micro-batches: 6 over 2 and 4 over 8; together 10 / 10 = 1, not (3 + .5) / 2 = 1.75.
  assert (mean(6, 2) + mean(4, 8)).value == 1
  assert mean(6, 2).value == 3


def test_counts_of_half_precision_do_not_stop():
  one = Mean(jnp.bfloat16(2), jnp.bfloat16(1))
  total = functools.reduce(lambda a, b: a + b, [one] * 301)
  assert total.count == 301 and total.total == 602 and total.value == 2


def test_nothing_to_average_is_zero_with_zero_gradient():
  value = lambda total, count: Mean(total, count).value
  assert value(jnp.float32(0), jnp.float32(0)) == 0
  gradients = jax.grad(value, (0, 1))(jnp.float32(3), jnp.float32(0))
  np.testing.assert_array_equal(gradients, 0)
  # d (t / c) = (1 / c, -t / c^2)
  gradients = jax.grad(value, (0, 1))(jnp.float32(3), jnp.float32(2))
  np.testing.assert_allclose(gradients, [0.5, -0.75])


def test_a_total_that_is_not_finite_is_not_hidden():
  assert jnp.isnan(mean(jnp.nan, 2).value) and mean(jnp.inf, 2).value == jnp.inf


@hypothesis.given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), min_size=1))
def test_any_split_gives_the_mean_of_all(parts):
  found = functools.reduce(Mean.__add__, (mean(*p) for p in parts))
  total, count = np.sum(parts, 0)
  np.testing.assert_allclose(found.value, total / count if count else 0, rtol=1e-6)


def test_over_nothing_is_itself():
  m = mean(6, 2)
  assert m.over(None) is m


@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('axes', ['data', ('data', 'model')])
def test_over_a_mesh(mesh, axes):
  # One total and one count per device, all different; count 0 on some.
  total, count = jnp.arange(8.0) ** 2 - 5, jnp.arange(8.0) % 3
  lie = P(axes)
  whole = lambda t, c: Mean(t.sum(), c.sum())
  want = whole(total, count), jax.grad(lambda t, c: whole(t, c).value, (0, 1))(total, count)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    split = jax.shard_map(
      lambda t, c: whole(t, c).over(axes), in_specs=(lie, lie), out_specs=P(), check_vma=True
    )
    total, count = jax.device_put((total, count), lie)
    found = jax.jit(split)(total, count)
    gradients = jax.jit(jax.grad(lambda t, c: split(t, c).value, (0, 1)))(total, count)
  assert found.total == want[0].total and found.count == want[0].count
  np.testing.assert_allclose(gradients, want[1], rtol=1e-6)


@pytest.mark.parametrize('mapped', [jax.pmap, jax.vmap])
def test_over_a_named_axis(mapped):
  total, count = jnp.arange(8.0) ** 2 - 5, jnp.arange(8.0) % 3
  run = mapped(lambda t, c: Mean(t, c).over('data'), axis_name='data')
  found = run(total, count)
  np.testing.assert_array_equal(found.total, [total.sum()] * 8)
  np.testing.assert_array_equal(found.count, [count.sum()] * 8)
  gradients = jax.grad(lambda t, c: run(t, c).value[0], (0, 1))(total, count)
  want = jax.grad(lambda t, c: t.sum() / c.sum(), (0, 1))(total, count)
  np.testing.assert_allclose(gradients, want, rtol=1e-6)


def test_vmap_and_jit():
  total, count = jnp.arange(4.0), jnp.array([0.0, 2, 2, 4])
  value = lambda t, c: (Mean(t, c) + Mean(t, c)).value
  for run in (value, jax.jit(value), jax.vmap(value)):
    np.testing.assert_array_equal(run(total, count), [0, 0.5, 1, 0.75])


def test_no_implicit_promotion():
  with jax.numpy_dtype_promotion('strict'):
    assert (mean(6, 2) + mean(4, 8)).value == 1


def test_records_are_frozen_pytrees():
  d = types.Divergences(*jnp.arange(24.0).reshape(4, 2, 3))
  doubled = jax.jit(lambda d: jax.tree.map(lambda x: 2 * x, d))(d)
  names = [f.name for f in dataclasses.fields(d)]
  assert names == ['kl', 'tv', 'log_ratio', 'entropy', 'chi2', 'square'] and d.square is None
  np.testing.assert_array_equal(doubled.log_ratio, 2 * d.log_ratio)
  with pytest.raises(dataclasses.FrozenInstanceError):
    d.kl = d.tv


def test_bad_input_is_a_value_error_and_a_broken_loss_an_arithmetic_one():
  assert issubclass(types.InputError, ValueError)
  assert issubclass(types.NonFiniteError, ArithmeticError)
