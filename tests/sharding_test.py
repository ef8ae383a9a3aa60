"""trm_jax.mesh.sharding: the mesh, and that nothing happens without one."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from trm_jax import divergences, types
from trm_jax.mesh import sharding


@pytest.mark.parametrize('text, want', [('8,1', (8, 1)), ('4, 2', (4, 2)), ('1,16', (1, 16))])
def test_parse_mesh(text, want):
  assert sharding.parse_mesh(text) == want


@pytest.mark.parametrize('text', ['', '8', '8,1,1', '0,8', '-1,8', '2.0,1', 'a,b', '8,', '8x1'])
def test_parse_mesh_names_the_flag_and_its_value(text):
  with pytest.raises(types.InputError, match='mesh=') as error:
    sharding.parse_mesh(text)
  assert repr(text) in str(error.value) and "'8,1'" in str(error.value)


@pytest.mark.parametrize('shape', [(1, 1), (8, 1), (4, 2), (1, 8), (2, 2)])
def test_make_mesh(shape):
  mesh = sharding.make_mesh(*shape)
  assert mesh.devices.shape == shape and mesh.axis_names == ('data', 'model')
  assert all(t == jax.sharding.AxisType.Explicit for t in mesh.axis_types)
  assert mesh.devices.flatten().tolist() == jax.devices()[: shape[0] * shape[1]]


def test_make_mesh_beyond_the_devices():
  with pytest.raises(types.InputError, match=r'mesh=8,2 needs 16 devices.* 8 '):
    sharding.make_mesh(8, 2)


def test_without_a_mesh_nothing_happens():
  x = {'a': jnp.ones(4)}
  assert not sharding.active()
  assert sharding.spec('data', None) is None
  assert sharding.reshard(x, 'data') is x
  fn = lambda x: x
  assert sharding.over_vocabulary(fn) is fn
  with jax.set_mesh(jax.make_mesh((8,), ('data',), (jax.sharding.AxisType.Auto,))):
    assert not sharding.active()  # specs may not name an Auto axis


def test_under_a_mesh_arrays_are_laid_out():
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    assert sharding.active()
    assert sharding.spec('data', None, 'model') == P('data', None, 'model')
    x = sharding.reshard({'a': jnp.zeros((4, 3, 2))}, 'data')['a']
    assert jax.typeof(x).sharding.spec == P('data', None, None)
    assert x.addressable_shards[0].data.shape == (1, 3, 2)


def log_likelihood(logits, tokens, valid, *, axis_name=None):
  return jnp.where(valid, divergences.logp(logits, tokens, axis_name=axis_name), 0)


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(1, 1), (8, 1), (4, 2), (1, 8)])
def test_over_vocabulary_value_and_gradient(shape):
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(8, 3, 5)).astype(np.float32)
  head = rng.normal(size=(16, 5)).astype(np.float32)
  tokens = rng.integers(0, 16, (8, 3)).astype(np.int32)
  valid = rng.random((8, 3)) < 0.7

  def loss(hidden, head):
    columns = sharding.spec('data', None, 'model')
    logits = jnp.einsum('btd,vd->btv', hidden, head, out_sharding=columns)
    place = lambda x: sharding.reshard(jnp.asarray(x), 'data')
    return sharding.over_vocabulary(log_likelihood)(logits, place(tokens), place(valid)).sum()

  fn = jax.value_and_grad(loss, argnums=(0, 1))
  want, want_grads = jax.jit(fn)(hidden, head)
  z = np.einsum('btd,vd->btv', hidden, head, dtype=np.float64)
  logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
  picked = np.take_along_axis(logp, tokens[..., None], -1)[..., 0]
  np.testing.assert_allclose(want, picked[valid].sum(), rtol=1e-6)
  with jax.set_mesh(sharding.make_mesh(*shape)):
    got, grads = jax.jit(fn)(
      sharding.reshard(jnp.asarray(hidden), 'data'), sharding.reshard(jnp.asarray(head), 'model')
    )
  np.testing.assert_allclose(got, want, rtol=1e-6)
  for g, w in zip(grads, want_grads, strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())


def test_simulated_devices():
  sharding.simulate_devices(3)  # too late: the backend is up
  assert len(jax.devices()) == 8
  code = (
    'import jax; jax.config.update("jax_platforms", "cpu"); from trm_jax.mesh import sharding;'
    ' sharding.simulate_devices(3); print(len(jax.devices()))'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == '3'


def test_gathered_is_whole_over_one_axis_and_its_gradient_is_split():
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    split = jax.device_put(jnp.arange(64.0).reshape(8, 8), P(sharding.DATA, sharding.MODEL))
    whole = jax.device_put(jnp.ones(8), P(sharding.MODEL))
    of = jax.jit(lambda x: sharding.gathered(x, sharding.DATA, jnp.bfloat16))
    assert jax.typeof(of(split)).sharding.spec == P(None, sharding.MODEL)
    assert of(split).dtype == jnp.bfloat16 and of(whole).dtype == jnp.float32
    slope = jax.jit(jax.grad(lambda x: (2 * of(x).astype(jnp.float32)).sum()))(split)
    assert jax.typeof(slope).sharding.spec == P(sharding.DATA, sharding.MODEL)
    assert slope.dtype == jnp.float32 and (slope == 2).all()
  assert sharding.gathered(whole, sharding.DATA, jnp.bfloat16) is whole  # no mesh, nothing to do
