"""`experts`: both ways to compute against the definition, everywhere a policy uses them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import policy_oracle
import pytest
from jax.sharding import PartitionSpec as P

from trm_jax import policy, types
from trm_jax.mesh import sharding
from trm_jax.mismatch import precision, routing
from trm_jax.policy import experts
from trm_jax.rollouts import scoring

ROWS, LENGTH, D, F, E, K = 8, 5, 6, 7, 8, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, LENGTH, D)).astype(np.float32)
MATRICES = {
  'gate': RNG.normal(size=(E, D, F)).astype(np.float32),
  'up': RNG.normal(size=(E, D, F)).astype(np.float32),
  'down': RNG.normal(size=(E, F, D)).astype(np.float32),
}
# Expert 5 is never chosen.
SCORES = RNG.normal(size=(ROWS, LENGTH, E)).astype(np.float32) - 9 * (np.arange(E) == 5)
WEIGHT = RNG.normal(size=(ROWS, LENGTH, D)).astype(np.float32)
COMPUTE = {'dense': experts.dense, 'ragged': experts.ragged}
HOOKS = {'none': None, 'rounded': lambda x: precision.round_to(x, 'int8')}


def block(matrices, x, scores, compute, activation=None):
  _, routes, gates = experts.route(
    scores, K, normalize=True, layer=0, noise_keys=None, hooks=policy.Hooks()
  )
  names = 'gate', 'up', 'down'
  args = routes, gates, *(matrices[n] for n in names)
  return COMPUTE[compute](x, *args, activation=activation)


@functools.cache
def compiled(compute, hook='none'):
  """Value and gradients of a weighted sum, and the block itself."""

  def loss(matrices, x, scores, weight):
    out = block(matrices, x, scores, compute, HOOKS[hook])
    return (weight * out).sum(), out

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@functools.cache
def unsharded(compute, hook='none'):
  return compiled(compute, hook)(MATRICES, X, SCORES, WEIGHT)


def close(got, want, tolerance=2e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize('compute', COMPUTE)
def test_values_equal_the_definition(compute):
  config = policy.PolicyConfig(experts=E, experts_per_token=K, normalize_gates=True)
  # As router scores of an identity router, so that the oracle takes the same ones.
  router = np.linalg.pinv(X.reshape(-1, D).astype(np.float64)) @ SCORES.reshape(-1, E)
  scores = (X @ router).astype(np.float32)
  want, _, routes = policy_oracle.experts(config, {'router': {'kernel': router}, **MATRICES}, X)
  got = compiled(compute)(MATRICES, X, scores, WEIGHT)[0][1]
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
  assert len(np.unique(routes)) >= E - 1


@pytest.mark.slow
@pytest.mark.parametrize('hook', HOOKS)
def test_ragged_equals_dense_in_value_and_gradients(hook):
  close(unsharded('ragged', hook), unsharded('dense', hook))
  grads = unsharded('ragged', hook)[1]
  assert not np.abs(grads[0]['up'][5]).any()  # of an expert without tokens
  assert all(np.abs(np.delete(g, 5, 0)).max((1, 2)).all() for g in grads[0].values())


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize('mesh', [slow((8, 1)), (4, 2), slow((1, 8))])
@pytest.mark.parametrize('hook', HOOKS)
def test_ragged_under_a_mesh(hook, mesh):
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    wide = P('model', None, None)  # what the widths of a policy allow; here they are odd
    args = jax.device_put((MATRICES, X, SCORES, WEIGHT), (wide, P('data'), P('data'), P('data')))
    got = compiled('ragged', hook)(*args)
    assert jax.typeof(got[0][1]).sharding.spec[0] == 'data'
    assert jax.typeof(got[1][0]['up']).sharding.spec[0] == 'model'
  close(got, unsharded('dense', hook))


def test_experts_that_do_not_divide_are_refused():
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    matrices = {name: jnp.zeros((6, *m.shape[1:])) for name, m in MATRICES.items()}
    x, scores = jax.device_put((X, SCORES[..., :6]), P('data'))
    with pytest.raises(types.InputError, match=r"experts=6 .* 4 devices.*expert_compute='dense'"):
      jax.eval_shape(functools.partial(block, compute='ragged'), matrices, x, scores)


V = 12
CONFIG = policy.PolicyConfig(
  width=16,
  layers=5,  # more than are unrolled: a scan
  heads=2,
  kv_heads=2,
  head_width=4,
  mlp_width=8,
  experts=4,
  experts_per_token=2,
  remat=True,
)


def rollout():
  rng = np.random.default_rng(2)
  draw = lambda *shape: jnp.asarray(rng.integers(0, V, shape), jnp.int32)
  zeros = jnp.zeros(4, jnp.int32)
  return types.Rollout(
    prompts=draw(4, 3),
    start=jnp.array([0, 1, 2, 0]),
    tokens=draw(4, 4),
    valid=jnp.ones((4, 4), bool),
    logits=None,
    hidden=None,
    logp=jnp.zeros((4, 4)),
    routes=jnp.asarray(rng.permuted(np.tile(np.arange(4), (4, 6, 5, 1)), axis=-1)[..., :2]),
    version=jnp.zeros((4, 4), jnp.int32),
    engine=zeros,
    reward=zeros.astype(jnp.float32),
  )


@pytest.mark.slow
def test_ragged_in_the_policy_with_replayed_experts_and_rounded_activations():
  batch = rollout()
  params = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), CONFIG, V)
  weights = jax.random.uniform(jax.random.key(1), batch.routes.shape)

  def loss(params, config):
    hooks = dataclasses.replace(
      routing.replay(batch.routes, weights),
      activation=precision.rounding_hooks(precision.Precision(activations='bfloat16')).activation,
    )
    hidden, aux = scoring.score(params, config, batch, hooks=hooks)
    return jnp.square(policy.logits(params, hidden)).mean(), aux

  run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  dense = run(params, CONFIG)
  ragged = run(params, dataclasses.replace(CONFIG, expert_compute='ragged'))
  np.testing.assert_array_equal(ragged[0][1].routes, batch.routes)
  # A rounding that falls the other way moves a value by 2^-8.
  close(ragged, dense, 2e-3)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(ragged[1]))


def test_expert_compute_is_checked():
  with pytest.raises(Exception, match='(?s)sparse.*dense.*ragged'):  # the tests check types first
    policy.PolicyConfig(expert_compute='sparse')


balance = jax.jit(experts.load_balance)


def test_load_balance_equals_the_definition():
  rng = np.random.default_rng(3)
  logits = rng.normal(size=(4, 6, 3, 5)).astype(np.float32)
  routes = np.argsort(-logits, -1)[..., :2]
  real = np.arange(6)[None] >= np.array([0, 2, 5, 6])[:, None]
  p = policy_oracle.softmax(logits.astype(np.float64))
  total = probability = 0
  for b, t in zip(*np.nonzero(real), strict=True):
    for n in range(3):
      total = total + np.bincount(routes[b, t, n], minlength=5)
      probability = probability + p[b, t, n]
  count = real.sum() * 3
  want = 5 * (total / count * probability / count).sum()
  np.testing.assert_allclose(balance(logits, routes, real), want, rtol=1e-5)
  other = np.where(real[..., None, None], logits, 7.0 * np.arange(5, dtype=np.float32))
  np.testing.assert_allclose(balance(other, routes, real), want, rtol=1e-5)
  assert balance(logits, routes, np.zeros_like(real)) == 0


def test_load_balance_is_least_where_experts_are_used_evenly():
  real = np.ones((1, 8), bool)
  even = np.arange(8).reshape(1, 8, 1, 1) % 4
  flat = np.zeros((1, 8, 1, 4), np.float32)
  assert balance(flat, even, real) == pytest.approx(1)  # K
  sharp = flat + 50 * (np.arange(4) == 2)
  assert balance(sharp.astype(np.float32), 0 * even + 2, real) == pytest.approx(4)  # E
  # Following the gradient sends probability from the crowded expert to the others.
  grad = jax.grad(experts.load_balance)(*map(jnp.asarray, (flat, 0 * even + 2, real)))
  assert (grad[..., 2] > 0).all() and (np.delete(grad, 2, -1) < 0).all()


def test_the_kernel_for_gradients_of_matrices_sums_each_run():
  """Runs that start and end inside of what it takes at a time, an empty one, rows of no run."""
  sizes = np.array([3, 0, 600, 509, 1])
  rng = np.random.default_rng(1)
  rows, g = (rng.normal(size=(1200, n)) for n in (48, 40))
  rows, g = (jnp.asarray(x, jnp.bfloat16) for x in (rows, g))
  ends = sizes.cumsum()
  exact = [np.asarray(x, np.float64) for x in (rows, g)]
  want = np.stack(
    [exact[0][e - n : e].T @ exact[1][e - n : e] for e, n in zip(ends, sizes, strict=True)]
  )
  beyond = (jnp.arange(1200) >= ends[-1])[:, None]
  rows, g = (jnp.where(beyond, jnp.nan, x).astype(x.dtype) for x in (rows, g))
  got = experts._by_run(rows, g, jnp.asarray(sizes, jnp.int32), interpret=True)
  assert got.dtype == jnp.bfloat16 and (np.abs(want).max((1, 2)) > 1).sum() == 4
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


@pytest.mark.slow
def test_bfloat16_products_and_gradients_are_those_of_float32_rounded(monkeypatch):
  """With the TPU's kernel in the place it has there."""
  kernel = functools.partial(experts._by_run, interpret=True)
  on_tpu = lambda *args, tpu, default: kernel(*args)
  low = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
  args = low(MATRICES), low(X), SCORES, low(WEIGHT)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), args)
  want = compiled('ragged')(*exact)
  monkeypatch.setattr(jax.lax, 'platform_dependent', on_tpu)
  loss = lambda m, x, s, w: (w * block(m, x, s, 'ragged')).astype(jnp.float32).sum()
  got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)
  close(low(got), want[1], 0.03)


def test_what_a_product_leaves_after_the_last_run_reaches_nothing(monkeypatch):
  """Rows of other devices' experts: a kernel may write anything there, or nothing."""

  def dirty(rows, matrices, sizes, dtype):
    beyond = (jnp.arange(rows.shape[0]) >= sizes.sum())[:, None]
    return clean(rows, matrices, sizes, dtype) + jnp.where(beyond, jnp.nan, 0)

  clean = experts._ragged_dot
  monkeypatch.setattr(experts, '_ragged_dot', dirty)
  loss = lambda m, x, s, w: (w * block(m, x, s, 'ragged')).sum()
  with jax.set_mesh(sharding.make_mesh(1, 2)):
    wide = P('model', None, None)
    args = jax.device_put((MATRICES, X, SCORES, WEIGHT), (wide, P('data'), P('data'), P('data')))
    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
  close(got[1], unsharded('dense')[1])


@pytest.mark.slow
def test_gates_of_impossible_routes_have_a_gradient():
  """Padding may replay routes whose probability is 0 in float32."""
  hooks = policy.Hooks(routes=lambda probabilities, routes, layer, keys: jnp.zeros_like(routes))
  at = dict(normalize=True, layer=0, noise_keys=None, hooks=hooks)
  gates = lambda scores: experts.route(scores, 2, **at)[2]
  far = jnp.array([[[-110.0, 0.0, 0.0, 0.0]]])
  assert jnp.isfinite(jax.grad(lambda s: (gates(s) * 0).sum())(far)).all()
  np.testing.assert_array_equal(gates(jnp.zeros((1, 1, 4))), 0.5)


def test_the_width_of_an_expert_need_not_divide_over_data():
  config = dataclasses.replace(CONFIG, mlp_width=9)
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    params = jax.eval_shape(lambda k: policy.init(k, config, V), jax.random.key(0))
    down = params['layers']['mlp']['down']
  assert down.shape == (5, 4, 9, 16) and down.sharding.spec[1:] == ('model', None, 'data')
