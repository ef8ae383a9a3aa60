"""Maxima and minima keep NaN at every size, in optimised code as well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import extremes

SHAPES = (8, 5), (64, 64), (8, 4096), (4096, 8)


def table(shape):
  """.01 everywhere, but NaN at one place of every second row."""
  x = np.full(shape, 0.01, np.float32)
  x[::2, 3] = np.nan
  return jnp.asarray(x)


FUNCTIONS = {
  'largest': extremes.largest,
  'smallest': extremes.smallest,
  'largest of some': lambda x: extremes.largest(
    x, where=jnp.ones_like(x, bool).at[:, 4].set(False)
  ),
  'at least, summed': lambda x: extremes.at_least(x, 0.0).sum(-1),
  'at most, summed': lambda x: extremes.at_most(x, 1.0).sum(-1),
  'a missing bound': lambda x: extremes.at_most(jnp.zeros_like(x), x).sum(-1),
}


@pytest.mark.parametrize(
  'shape',
  [s if s == (64, 64) else pytest.param(s, marks=pytest.mark.slow) for s in SHAPES],
  ids=str,
)
def test_nan_is_never_lost(shape, optimised):
  x = table(shape)
  for name, f in FUNCTIONS.items():
    for found in (f(x), jax.jit(f, compiler_options=optimised)(x)):
      np.testing.assert_array_equal(np.isnan(found), np.arange(shape[0]) % 2 == 0, name)
  assert jnp.isnan(extremes.largest(x, None))


def test_values_without_nan_are_those_of_numpy():
  x = jax.random.normal(jax.random.key(0), (6, 7))
  where = x > 0
  np.testing.assert_array_equal(extremes.largest(x, 0), x.max(0))
  np.testing.assert_array_equal(extremes.smallest(x, (0, 1)), x.min())
  found = extremes.smallest(x, where=where)
  np.testing.assert_array_equal(found, np.where(where, x, np.inf).min(-1))
  np.testing.assert_array_equal(extremes.at_least(x, 0.1), jnp.maximum(x, 0.1))
  np.testing.assert_array_equal(extremes.at_most(x, x[::-1]), jnp.minimum(x, x[::-1]))


def test_nothing_has_no_extreme():
  assert extremes.largest(jnp.zeros((0,))) == -jnp.inf
  assert extremes.smallest(jnp.zeros((3,)), where=jnp.zeros((3,), bool)) == jnp.inf


def test_gradient_of_a_bound_goes_to_the_value():
  for f in (extremes.at_least, extremes.at_most):
    assert jax.grad(f)(1.0, 1.0) == 1
