"""`blocks`: rows at a time; types of arrays that differ between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from trm_jax.divergences.passes import blocks
from trm_jax.mesh import sharding


@pytest.mark.parametrize('rows', [1, 3, 4, 7, 8, 100])
def test_by_rows_is_the_function_on_all_rows(rows):
  x, y = jnp.arange(28.0).reshape(7, 4), jnp.arange(7)
  fn = lambda tree: {'sum': tree['x'].sum(-1) + tree['y'], 'wide': 2 * tree['x'], 'none': None}
  tree = {'x': x, 'y': y}
  got, want = blocks.by_rows(fn, tree, rows=rows), fn(tree)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_by_rows_never_holds_more_than_a_block():
  seen = []

  def fn(x):
    seen.append(x.shape)
    return x.sum(-1)

  jax.jit(lambda x: blocks.by_rows(fn, x, rows=3)).lower(jnp.zeros((10, 4)))
  assert set(seen) == {(3, 4)}


def test_by_rows_gradient():
  # Rows 4, 5 and 6 of 7 are in the overlap of two blocks: they count once.
  x, weights = jnp.linspace(-1, 1, 28).reshape(7, 4), jnp.arange(1.0, 8)
  fn = lambda x: jnp.exp(x).sum(-1)
  got = jax.grad(lambda x: (weights * blocks.by_rows(fn, x, rows=4)).sum())(x)
  np.testing.assert_allclose(got, weights[:, None] * jnp.exp(x), rtol=1e-6)


def test_rows_of():
  # A block has at least one row, and about `entries` numbers.
  assert blocks.rows_of(1000, 3000) == 3
  assert blocks.rows_of(1000, 3001) == 4
  assert blocks.rows_of(10**6, 100) == 1
  assert blocks.rows_of(blocks.BLOCK) == 1


@pytest.mark.parametrize('shape', [(), (6,), (2, 3), (0, 3)])
def test_flat(shape):
  x, y = jnp.ones((*shape, 5)), jnp.ones(shape)

  def fn(x, y):
    assert x.shape == (y.size, 5) and y.ndim == 1
    return {'rows': x.sum(-1) + y, 'wide': x}

  got = blocks.flat(fn, len(shape))(x, y)
  assert got['rows'].shape == shape and got['wide'].shape == (*shape, 5)
  np.testing.assert_array_equal(got['rows'], 6)


def test_types_of_arrays_that_differ_between_devices():
  x, y = jnp.ones((8, 4)), jnp.ones((4, 2))
  assert blocks.varying(x) == frozenset() and blocks.match_varying(x, None) == [x, None]

  def body(x, y):
    assert blocks.varying(x) == {'data'} and blocks.varying(y) == {'model'}
    both = blocks.match_varying(x, None, y)
    assert both[1] is None
    for z in (both[0], both[2], blocks.zeros(both[0], jnp.float32)):
      assert blocks.varying(z) == {'data', 'model'}
    return x

  with jax.set_mesh(sharding.make_mesh(4, 2)):
    args = jax.device_put(x, P('data')), jax.device_put(y, P(None, 'model'))
    jax.jit(jax.shard_map(body, in_specs=(P('data'), P(None, 'model')), out_specs=P('data'))).lower(
      *args
    )
