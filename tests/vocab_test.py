"""`vocabulary`: reductions over a vocabulary, whole or split over devices."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import oracles
import pytest
from jax import P

from trm_jax.divergences.passes import vocabulary
from trm_jax.mesh import sharding

MESHES = [(4, 2), (1, 8), (8, 1)]
SHAPE = (8, 3, 16)


def case(seed=0, scale=3.0):
  keys = jax.random.split(jax.random.key(seed))
  return scale * jax.random.normal(keys[0], SHAPE), jax.random.randint(keys[1], SHAPE[:2], 0, 16)


def everything(x, tokens, axis_name=None):
  """All reductions."""
  log_p = vocabulary.log_probs(x, axis_name=axis_name)
  return {
    'maximum': vocabulary.maximum(x, axis_name),
    'total': vocabulary.total(x, axis_name),
    'pick': vocabulary.pick(x, tokens, axis_name),
    'logp': vocabulary.pick(log_p, tokens, axis_name),
    'entropy': -vocabulary.total(jnp.exp(log_p) * log_p, axis_name),
  }


def cotangent(values):
  """Different for every output and position."""
  return {
    name: value * 0 + jnp.sin(7.0 * i + jnp.arange(value.size)).reshape(value.shape)
    for i, (name, value) in enumerate(sorted(values.items()))
  }


def value_and_gradient(fn, x, tokens):
  values, back = jax.vjp(lambda x: fn(x, tokens), x)
  return values, back(cotangent(values))[0]


def close(got, want):
  for name in want:
    np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_matches_the_oracle():
  x, tokens = case()
  found = everything(x, tokens)
  np.testing.assert_array_equal(found['maximum'], np.asarray(x).max(-1))
  np.testing.assert_allclose(found['total'], oracles.f64(x).sum(-1), rtol=1e-5, atol=1e-5)
  picked = np.take_along_axis(np.asarray(x), np.asarray(tokens)[..., None], -1)[..., 0]
  np.testing.assert_array_equal(found['pick'], picked)
  np.testing.assert_allclose(found['logp'], oracles.logp(x, tokens), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found['entropy'], oracles.entropy(x), rtol=1e-5, atol=1e-6)


def test_hand_computed():
  # logits log(1, 2, 5): probabilities 1/8, 2/8, 5/8; at temperature 1/2 their squares, 1, 4, 25.
  x = jnp.log(jnp.array([1.0, 2.0, 5.0]))
  np.testing.assert_allclose(vocabulary.log_probs(x), np.log([1 / 8, 1 / 4, 5 / 8]), rtol=1e-6)
  cold = vocabulary.log_probs(x, 0.5)
  np.testing.assert_allclose(cold, np.log([1 / 30, 4 / 30, 25 / 30]), rtol=1e-6)
  np.testing.assert_allclose(vocabulary.total(jnp.exp(x)), 8.0, rtol=1e-6)


@hypothesis.given(seed=st.integers(0, 2**20), shift=st.integers(-10_000, 10_000))
def test_log_probs_ignore_an_exact_shift(seed, shift):
  # Multiples of 1/64 up to 1e4 are exact in float32, so the shift costs no digit at all.
  x = jnp.round(case(seed)[0] * 64) / 64
  np.testing.assert_array_equal(vocabulary.log_probs(x + shift), vocabulary.log_probs(x))


def test_log_probs_are_float32():
  assert vocabulary.log_probs(case()[0].astype(jnp.bfloat16)).dtype == jnp.float32


OUTSIDE = jnp.array([-100, -1, 0, 3, 4, 2**31 - 1, -(2**31)])


def test_tokens_outside_are_missing():
  x = jnp.full((7, 4), 7.0)
  nan = jnp.nan
  np.testing.assert_array_equal(vocabulary.pick(x, OUTSIDE), [nan, nan, 7, 7, nan, nan, nan])
  # Of four entries three are tokens.
  found = vocabulary.pick(x, OUTSIDE, vocab_size=3)
  np.testing.assert_array_equal(found, [nan, nan, 7, nan, nan, nan, nan])


@pytest.mark.parametrize('vocab_size, last', [(None, 7), (3, jnp.nan)])
def test_tokens_outside_are_missing_where_no_device_holds_them(vocab_size, last):
  x = jnp.full((2, 7, 2), 7.0)
  pick = lambda x: vocabulary.pick(x, OUTSIDE, 'model', vocab_size=vocab_size)
  for found in jax.vmap(pick, axis_name='model')(x):
    np.testing.assert_array_equal(found, [jnp.nan, jnp.nan, 7, last, *[jnp.nan] * 3])


@pytest.mark.parametrize('vocab_size', [1, 5, 8, 9, 16])
def test_padding_has_no_mass(vocab_size):
  x = case()[0].at[..., vocab_size:].set(jnp.nan)
  want = x[..., :vocab_size]
  np.testing.assert_array_equal(vocabulary.without_padding(x, vocab_size), want)
  blocks = jnp.moveaxis(x.reshape(*SHAPE[:2], 2, 8), 2, 0)
  cut = lambda x: vocabulary.without_padding(x, vocab_size, 'model')
  found = jax.vmap(cut, axis_name='model')(blocks)
  found = np.asarray(jnp.moveaxis(found, 0, 2).reshape(SHAPE))
  np.testing.assert_array_equal(found[..., :vocab_size], want)
  assert (found[..., vocab_size:] == -np.inf).all()


def test_minus_infinity_and_nan():
  x = jnp.array([[0.0, -jnp.inf, 0.0], [-jnp.inf] * 3, [jnp.nan, 0.0, 0.0]])
  found = vocabulary.log_probs(x)
  np.testing.assert_allclose(found[0], [-np.log(2), -np.inf, -np.log(2)], rtol=1e-6)
  assert jnp.isnan(found[1:]).all()


def test_gradients():
  x, tokens = case(1, scale=1.0)
  for name in ('total', 'pick', 'logp', 'entropy'):
    f = lambda x, name=name: everything(jnp.asarray(x), tokens)[name][:2]
    jax.test_util.check_grads(f, (x,), order=1, modes=('rev',), rtol=2e-2, atol=2e-2, eps=1e-2)
  # The maximum only centres.
  np.testing.assert_array_equal(jax.grad(lambda x: everything(x, tokens)['maximum'].sum())(x), 0)


def test_gradient_is_finite_and_zero_where_a_logit_is_minus_infinity():
  x = case()[0].at[:, :, 5].set(-jnp.inf)
  tokens = jnp.zeros(SHAPE[:2], jnp.int32)
  gradient = jax.grad(lambda x: everything(x, tokens)['logp'].sum())(x)
  assert jnp.isfinite(gradient).all() and (gradient[:, :, 5] == 0).all()


def test_jit_and_vmap():
  x, tokens = case()
  close(jax.jit(everything)(x, tokens), everything(x, tokens))
  close(jax.vmap(everything)(x, tokens), everything(x, tokens))


def test_no_implicit_promotion():
  x, tokens = case()
  with jax.numpy_dtype_promotion('strict'):
    assert jnp.isfinite(everything(x, tokens)['logp']).all()


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_split_over_a_mesh(mesh):
  x, tokens = case(2)
  want = value_and_gradient(everything, x, tokens)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    split = jax.shard_map(
      functools.partial(everything, axis_name='model'),
      in_specs=(P('data', None, 'model'), P('data')),
      out_specs=P('data'),
      check_vma=True,
    )
    x, tokens = jax.device_put(x, P('data', None, 'model')), jax.device_put(tokens, P('data'))
    got = jax.jit(functools.partial(value_and_gradient, split))(x, tokens)
  close(got[0], want[0])
  np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('mapped', [jax.pmap, pytest.param(jax.vmap, marks=pytest.mark.slow)])
def test_split_over_a_named_axis(mapped):
  x, tokens = case(3)
  want = value_and_gradient(everything, x, tokens)
  blocks = jnp.moveaxis(x.reshape(*SHAPE[:2], 8, 2), 2, 0)
  run = mapped(
    functools.partial(everything, axis_name='model'), axis_name='model', in_axes=(0, None)
  )
  # Every device returns the same; only the first one's output is weighed, or a gradient would
  # count 8 times.
  values, back = jax.vjp(lambda b: run(b, tokens), blocks)
  first = lambda x: jnp.zeros((8, *x.shape)).at[0].set(x)
  gradient = back(jax.tree.map(first, cotangent(want[0])))[0]
  for device in range(8):
    close(jax.tree.map(lambda y, d=device: y[d], values), want[0])
  gradient = jnp.moveaxis(gradient, 0, 2).reshape(SHAPE)
  np.testing.assert_allclose(gradient, want[1], rtol=2e-5, atol=2e-5)
