"""trm_jax.policy.attention against the definition in float64, and the memory it promises."""

import functools
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import policy_oracle
import pytest
from jax.sharding import PartitionSpec as P

from trm_jax.mesh import sharding
from trm_jax.policy import attention

START = np.array([0, 3, 0, 7, 12, 1, 5, 2], np.int32)
LENGTH = 13  # no multiple of any block below
KERNELS = {
  'plain': attention.plain,
  'block 5': functools.partial(attention.blockwise, block=5),
  'one block': attention.blockwise,
}


def inputs(heads=4, kv_heads=2, queries=LENGTH, keys=LENGTH, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return (
    draw(8, queries, heads, 6) * 2,
    draw(8, keys, kv_heads, 6),
    draw(8, keys, kv_heads, 6),
  )


@functools.cache
def compiled(name):
  return jax.jit(lambda q, k, v, slots, start: KERNELS[name](q, k, v, slots=slots, start=start))


def check(name, qkv, slots):
  slots = np.asarray(slots, np.int32)
  got = compiled(name)(*qkv, slots, START)
  want, sees = policy_oracle.attend(*qkv, slots, START)
  assert got.shape == want.shape and got.dtype == jnp.float32
  assert np.isfinite(got).all()
  np.testing.assert_allclose(np.asarray(got)[sees], want[sees], rtol=0, atol=3e-6)
  return sees


@pytest.mark.slow
@pytest.mark.parametrize('kv_heads', [4, 2, 1])
@pytest.mark.parametrize('name', KERNELS)
def test_values_equal_the_definition(name, kv_heads):
  sees = check(name, inputs(kv_heads=kv_heads), range(LENGTH))
  assert not sees.all()  # queries before their row's start were among them


@pytest.mark.slow
@pytest.mark.parametrize('name', ['plain', 'block 5'])
def test_decoding_slots(name):
  check(name, inputs(queries=1), [7])
  check(name, inputs(queries=1), [LENGTH - 1])
  check(name, inputs(queries=3), [5, 6, 7])
  check(name, inputs(queries=3), [0, 9, 4])


@pytest.mark.parametrize('name', ['plain', 'block 5'])
def test_large_scores_stay_finite(name):
  q, k, v = inputs()
  check(name, (q * 1e3, k, v), range(LENGTH))


@functools.cache
def gradients(name):
  """d/d(q,k,v) of a weighted sum over *all* queries, those that see nothing included."""

  def loss(qkv, weight, slots, start):
    return (weight * KERNELS[name](*qkv, slots=slots, start=start)).sum()

  return jax.jit(jax.grad(loss))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['plain', 'block 5'])
def test_gradients_equal_differences_of_the_definition(name):
  qkv, slots = inputs(), np.arange(LENGTH)
  rng = np.random.default_rng(1)
  sees = slots[None] >= START[:, None]
  weight = rng.normal(size=qkv[0].shape) * sees[:, :, None, None]
  grads = gradients(name)(qkv, weight.astype(np.float32), slots, START)
  for i in range(3):
    direction = rng.normal(size=qkv[i].shape)
    move = lambda h, i=i, d=direction: [x + h * d if i == j else x for j, x in enumerate(qkv)]
    value = lambda h, move=move: (weight * policy_oracle.attend(*move(h), slots, START)[0]).sum()
    want = (value(1e-5) - value(-1e-5)) / 2e-5
    np.testing.assert_allclose((np.asarray(grads[i]) * direction).sum(), want, rtol=1e-4)


@pytest.mark.parametrize('name', ['plain', 'block 5'])
def test_gradients_are_finite_and_agree_and_skip_padding(name):
  qkv, slots = inputs(), np.arange(LENGTH)
  sees = (slots[None] >= START[:, None])[:, :, None, None]
  grads = gradients(name)(qkv, np.ones_like(qkv[0]), slots, START)
  assert all(np.isfinite(g).all() for g in grads)
  weight = np.broadcast_to(sees, qkv[0].shape).astype(np.float32)
  grads = gradients(name)(qkv, weight, slots, START)
  for got, want in zip(grads, gradients('plain')(qkv, weight, slots, START), strict=True):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  for g in grads[1:]:
    np.testing.assert_array_equal(np.where(sees, 0, g), 0)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['plain', 'block 5'])
def test_the_result_has_the_dtype_of_the_query(name):
  q, k, v = (jnp.asarray(x) for x in inputs())
  call = functools.partial(KERNELS[name], slots=jnp.arange(LENGTH), start=jnp.asarray(START))
  want = call(q, k, v)
  low = call(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
  assert low.dtype == jnp.bfloat16
  np.testing.assert_allclose(low.astype(np.float32), want, rtol=0, atol=0.1)
  mixed = call(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))
  assert mixed.dtype == jnp.float32


def splash_case(kv_heads=1, rows=2):
  """Two blocks of queries and of keys, the last cut; (q, k, v), slots, start, weight of queries."""
  rng = np.random.default_rng(3)
  draw = lambda heads: jnp.asarray(rng.normal(size=(rows, 131, heads, 128)), jnp.float32)
  q, k, v = draw(2 * kv_heads), draw(kv_heads), draw(kv_heads)
  slots, start = jnp.arange(131), jnp.asarray([0, 37, 130, 5])[:rows]
  sees = slots[None, :, None, None] >= start[:, None, None, None]
  return (q, k, v), slots, start, draw(2 * kv_heads) * sees


def splash_loss(kernel):
  def loss(qkv, weight, slots, start):
    return (weight * kernel(*qkv, slots=slots, start=start)).sum()

  return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
def test_the_kernel_for_whole_rows_equals_the_definition():
  kernel = functools.partial(attention.splash, interpret=True)
  qkv, slots, start, weight = splash_case()
  got, slopes = splash_loss(kernel)(qkv, weight, slots, start)
  want, sees = policy_oracle.attend(*map(np.asarray, qkv), np.asarray(slots), np.asarray(start))
  np.testing.assert_allclose(got, (want * weight)[sees].sum(), rtol=1e-5)
  _, wanted = splash_loss(attention.plain)(qkv, weight, slots, start)
  for x, y in zip(slopes, wanted, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_kernel_is_the_same_on_a_mesh():
  kernel = functools.partial(attention.splash, interpret=True)
  qkv, slots, start, weight = splash_case(kv_heads=2, rows=4)
  want, wanted = splash_loss(kernel)(qkv, weight, slots, start)
  with jax.set_mesh(sharding.make_mesh(2, 2)):
    place = lambda x: jax.device_put(x, P(sharding.DATA, None, sharding.MODEL))
    placed, rows = tuple(map(place, qkv)), jax.device_put(start, P(sharding.DATA))
    got, slopes = splash_loss(kernel)(placed, place(weight), slots, rows)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for x, y in zip(slopes, wanted, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_what_the_kernel_cannot_do_goes_blockwise():
  slots = np.arange(LENGTH, dtype=np.int32)
  call = functools.partial(attention.splash, interpret=True)  # the kernel itself would refuse
  for qkv, at in ((inputs(), slots), (inputs(queries=1), slots[:1] + 7)):
    want = attention.blockwise(
      *map(jnp.asarray, qkv), slots=jnp.asarray(at), start=jnp.asarray(START)
    )
    got = call(*map(jnp.asarray, qkv), slots=jnp.asarray(at), start=jnp.asarray(START))
    np.testing.assert_array_equal(got, want)


def precisions(jaxpr, inside=False):
  """Precisions that the matrix products of kernels ask for."""
  for eqn in jaxpr.eqns:
    if inside and eqn.primitive.name == 'dot_general':
      yield eqn.params['precision']
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from precisions(inner, inside or eqn.primitive.name == 'pallas_call')


def test_the_kernel_never_asks_for_float32_products_of_bfloat16():
  qkv, slots, start, _ = splash_case()
  qkv = tuple(x.astype(jnp.bfloat16) for x in qkv)

  def loss(qkv):
    with jax.default_matmul_precision('float32'):  # as the policy does
      return attention.splash(*qkv, slots=slots, start=start).astype(jnp.float32).sum()

  found = list(precisions(jax.make_jaxpr(jax.grad(loss))(qkv).jaxpr))
  assert len(found) == 9  # two forward, seven backward
  assert set(found) == {(jax.lax.Precision.DEFAULT,) * 2}


def products(jaxpr):
  """dtypes of the operands of every matrix product in a jaxpr and the jaxprs inside it."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield tuple(v.aval.dtype.name for v in eqn.invars)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from products(inner)


def test_bfloat16_is_multiplied_as_such_into_float32():
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs())
  got = compiled('block 5')(q, k, v, np.arange(LENGTH), START)
  exact = [np.asarray(x, np.float64) for x in (q, k, v)]
  want, sees = policy_oracle.attend(*exact, np.arange(LENGTH), START)
  # Half a unit in the last place of weights and of the result, both at most 1 part in 256.
  np.testing.assert_allclose(np.asarray(got, np.float32)[sees], want[sees], rtol=8e-3, atol=8e-3)
  at = dict(slots=jnp.arange(LENGTH), start=jnp.asarray(START))
  call = functools.partial(KERNELS['block 5'], **at)
  assert set(products(jax.make_jaxpr(call)(q, k, v).jaxpr)) == {('bfloat16', 'bfloat16')}
  mixed = jax.make_jaxpr(call)(q.astype(jnp.float32), k, v).jaxpr
  assert set(products(mixed)) == {('float32', 'float32')}


def arrays(jaxpr):
  """Shapes of every value in a jaxpr and the jaxprs inside it."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from arrays(inner)


def value_and_gradient(kernel, length, block=None):
  kernel = kernel if block is None else functools.partial(kernel, block=block)
  start, slots = jnp.zeros(1, jnp.int32), jnp.arange(length)
  loss = lambda qkv: jnp.square(kernel(*qkv, slots=slots, start=start)).sum()
  x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
  return jax.value_and_grad(loss), [x, x, x]


def square(shapes, length):
  return [s for s in shapes if sum(size >= length for size in s) >= 2]


@pytest.mark.slow
def test_blockwise_holds_no_square_array():
  length = 512
  fn, args = value_and_gradient(attention.blockwise, length, 64)
  assert not square(arrays(jax.make_jaxpr(fn)(args).jaxpr), length)
  text = jax.jit(fn).lower(args).compile().as_text()
  shapes = [tuple(map(int, s.split(','))) for s in re.findall(r'\w\[([\d,]+)\]', text)]
  assert len(shapes) > 100 and not square(shapes, length)
  fn, args = value_and_gradient(attention.plain, length)  # the search does find them
  assert square(arrays(jax.make_jaxpr(fn)(args).jaxpr), length)


def test_blockwise_memory_is_linear_in_length_backward_too():
  def largest(length):
    fn, args = value_and_gradient(attention.blockwise, length, 64)
    return max(int(np.prod(s)) for s in arrays(jax.make_jaxpr(fn)(args).jaxpr))

  assert largest(2048) <= 2 * largest(1024)


@functools.cache
def weighed(name):
  """(value and gradient, compiled; its arguments; what it returns without a mesh)."""
  qkv, slots = inputs(), jnp.arange(LENGTH)
  weight = np.random.default_rng(2).normal(size=qkv[0].shape).astype(np.float32)
  weight *= (np.arange(LENGTH)[None] >= START[:, None])[:, :, None, None]

  def loss(qkv, weight, start):
    out = KERNELS[name](*qkv, slots=slots, start=start)
    return (weight * out).sum(), out

  fn, args = jax.jit(jax.value_and_grad(loss, has_aux=True)), (qkv, weight, START)
  return fn, args, fn(*args)


@pytest.mark.parametrize('mesh', [(8, 1), pytest.param((4, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', ['plain', pytest.param('block 5', marks=pytest.mark.slow)])
def test_sharded_equals_unsharded(name, mesh):
  fn, (qkv, weight, start), ((_, want), want_grads) = weighed(name)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    rows, heads = P('data'), P('data', None, 'model')
    args = jax.device_put((qkv, weight, start), (heads, heads, rows))
    (_, got), grads = fn(*args)
    assert jax.typeof(got).sharding.spec == P('data', None, 'model', None)
  np.testing.assert_allclose(got * (weight != 0), want * (weight != 0), rtol=0, atol=1e-5)
  for g, w in zip(grads, want_grads, strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())
