"""trm_jax.policy.decoder against a float64 decoder, and what its callers rely on."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import policy_oracle
import pytest
from jax.sharding import PartitionSpec as P

from trm_jax import policy, types
from trm_jax.divergences import linear_head
from trm_jax.mesh import sharding
from trm_jax.policy import attention

V, ROWS, LENGTH = 12, 8, 7
DENSE = policy.PolicyConfig(
  width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=24, experts=0
)
TOP1 = dataclasses.replace(DENSE, experts=4)
TOP2 = dataclasses.replace(TOP1, experts_per_token=2)
CONFIGS = {
  'dense': DENSE,
  'dense tied': dataclasses.replace(DENSE, tied_head=True, rope_base=100.0),
  'top-1': TOP1,
  'top-2': TOP2,
  'top-2 normalised': dataclasses.replace(TOP2, normalize_gates=True, tied_head=True),
}
START = np.array([0, 0, 2, 5, 1, 3, 0, 6], np.int32)
TOKENS = np.random.default_rng(0).integers(0, V, (ROWS, LENGTH)).astype(np.int32)
REAL = np.arange(LENGTH)[None] >= START[:, None]


@functools.cache
def parameters(config):
  """Initial parameters moved off their special values (scales of 1)."""
  params = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), config, V)
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda p: p + (0.3 * p.std() + 0.2 * (p.std() == 0)) * rng.normal(size=p.shape), params
  )


def forward(params, config, tokens, start, **kwargs):
  hidden, _, aux = policy.apply(params, config, tokens, start=start, **kwargs)
  return hidden, policy.logits(params, hidden), aux


@functools.cache
def compiled(config):
  return jax.jit(lambda params, tokens, start: forward(params, config, tokens, start))


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(
      n,
      marks=[pytest.mark.slow]
      * (
        n
        in (
          'dense',
          'top-1',
          'top-2',
        )
      ),
    )
    for n in CONFIGS
  ],
)
def test_values_equal_a_float64_decoder(name):
  config = CONFIGS[name]
  params = parameters(config)
  assert set(params) == {'embed', 'layers', 'scale'} | (set() if config.tied_head else {'head'})
  hidden, logits, aux = compiled(config)(params, TOKENS, START)
  want = policy_oracle.apply(params, config, TOKENS, START)
  assert np.isfinite(hidden).all() and hidden.dtype == logits.dtype == jnp.float32
  np.testing.assert_allclose(hidden[REAL], want[0][REAL], rtol=0, atol=2e-5)
  np.testing.assert_allclose(logits[REAL], want[1][REAL], rtol=0, atol=5e-5)
  if not config.experts:
    assert aux.router_logits is None and aux.routes is None
    return
  assert aux.routes.shape == (ROWS, LENGTH, config.layers, config.experts_per_token)
  np.testing.assert_allclose(aux.router_logits[REAL], want[2][REAL], rtol=0, atol=2e-5)
  np.testing.assert_array_equal(aux.routes[REAL], want[3][REAL])


@pytest.mark.slow
def test_blockwise_attention_in_the_decoder():
  params = parameters(TOP2)
  kernel = functools.partial(attention.blockwise, block=4)
  fn = jax.jit(lambda p, t, s: forward(p, TOP2, t, s, attention=kernel)[0])
  want = compiled(TOP2)(params, TOKENS, START)[0]
  np.testing.assert_allclose(fn(params, TOKENS, START)[REAL], want[REAL], rtol=0, atol=1e-5)


@pytest.mark.parametrize('name', ['dense', pytest.param('top-2', marks=pytest.mark.slow)])
def test_the_future_does_not_reach_the_past(name):
  params, run = parameters(CONFIGS[name]), compiled(CONFIGS[name])
  hidden = np.asarray(run(params, TOKENS, START)[0])
  for cut in (1, 4, LENGTH - 1):
    other = TOKENS.copy()
    other[:, cut:] = (other[:, cut:] + 5) % V
    changed = np.asarray(run(params, other, START)[0])
    past = REAL & (np.arange(LENGTH) < cut)
    np.testing.assert_array_equal(changed[past], hidden[past])
    assert (changed[:, cut:] != hidden[:, cut:]).any(-1).all()


@pytest.mark.parametrize('name', ['dense', 'top-2'])
def test_padding_is_irrelevant(name):
  params, run = parameters(CONFIGS[name]), compiled(CONFIGS[name])
  hidden = np.asarray(run(params, TOKENS, START)[0])
  other = np.where(REAL, TOKENS, (TOKENS + 3) % V)
  np.testing.assert_array_equal(run(params, other, START)[0][REAL], hidden[REAL])
  # The same row further to the right is the same row.
  short = np.concatenate([np.zeros((ROWS, 3), np.int32), TOKENS[:, :4]], 1)
  moved = np.asarray(run(params, short, np.full(ROWS, 3, np.int32))[0])
  still = np.asarray(run(params, TOKENS, np.zeros(ROWS, np.int32))[0])
  np.testing.assert_allclose(moved[:, 3:], still[:, :4], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_cached_pieces_equal_one_pass():
  config = TOP2
  params = parameters(config)

  @jax.jit
  def pieces(params, tokens, start):
    cache, out = policy.init_cache(config, ROWS, LENGTH + 2), []
    for first, last in ((0, 4), (4, 6), (6, LENGTH)):
      hidden, cache, aux = policy.apply(
        params, config, tokens[:, first:last], start=start, slot=first, cache=cache
      )
      out.append((hidden, aux))
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *out)

  hidden, aux = pieces(params, TOKENS, START)
  want, _, want_aux = compiled(config)(params, TOKENS, START)
  np.testing.assert_allclose(hidden[REAL], want[REAL], rtol=0, atol=1e-5)
  np.testing.assert_array_equal(aux.routes[REAL], want_aux.routes[REAL])


@pytest.mark.slow
@pytest.mark.parametrize('name', CONFIGS)
def test_init_is_a_plain_dict_of_float32_and_pure(name):
  config, key = CONFIGS[name], jax.random.key(3)

  def walk(tree):
    assert type(tree) in (dict,) or isinstance(tree, jax.Array)
    for leaf in tree.values() if isinstance(tree, dict) else ():
      walk(leaf)

  params = jax.jit(policy.init, static_argnums=(1, 2))(key, config, V)
  walk(params)
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
  assert all(len(p) == config.layers for p in jax.tree.leaves(params['layers']))
  assert policy.head(params).shape == params['embed'].shape == (V, config.width)
  d, f, c, e = config.width, config.mlp_width, config.head_width, config.experts
  attended = 2 * d * c * (config.heads + config.kv_heads) + 2 * c
  mlp = 3 * d * f * max(e, 1) + d * e
  want = config.layers * (attended + mlp + 2 * d) + d + V * d * (2 - config.tied_head)
  assert policy.size(params) == want
  if name in ('dense', 'top-2'):
    eager, again = (policy.init(key, config, V) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, eager, again)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), eager, params)
    other = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(4), config, V)
    matrices = lambda p: [x for x in jax.tree.leaves(p) if (x != 1).any()]
    same = [(a == b).any() for a, b in zip(matrices(params), matrices(other), strict=True)]
    assert not any(same)
    layers = [x for x in jax.tree.leaves(params['layers']) if (x != 1).any()]
    assert not any((x[0] == x[1]).any() for x in layers)


@pytest.mark.slow
def test_default_size_and_scale():
  config = policy.PolicyConfig()
  params = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), config, 16)
  assert 93_500 <= policy.size(params) < 94_500  # what its docstring says
  kernels = params['layers']['mlp']
  for name, fan_in in (('gate', config.width), ('up', config.width), ('down', config.mlp_width)):
    np.testing.assert_allclose(kernels[name].std(), fan_in**-0.5, rtol=0.05)


@pytest.mark.slow
def test_jit_equals_eager():
  params = parameters(TOP2)
  eager = forward(params, TOP2, jnp.asarray(TOKENS), jnp.asarray(START))
  for a, b in zip(compiled(TOP2)(params, TOKENS, START)[:2], eager[:2], strict=True):
    np.testing.assert_allclose(a[REAL], b[REAL], rtol=0, atol=1e-5)


def loss(params, config, tokens, start):
  """Mean negative log-likelihood of the next token; the gradient reaches every parameter."""
  _, logits, _ = forward(params, config, tokens, start)
  target = sharding.reshard(jnp.roll(tokens, -1, 1), 'data')
  slots = jnp.arange(tokens.shape[1])
  real = (slots[None] >= start[:, None]) & (slots < tokens.shape[1] - 1)[None]
  hot = target[..., None] == jnp.arange(V)[None, None]
  logp = jnp.where(hot, jax.nn.log_softmax(logits), 0).sum(-1)
  return -jnp.where(real, logp, 0).sum() / real.sum()


def descend(config):
  return jax.jit(
    jax.value_and_grad(lambda params, tokens, start: loss(params, config, tokens, start))
  )


@functools.cache
def reference(config):
  return descend(config)(parameters(config), TOKENS, START)


def close(got, want, tolerance):
  top = max(float(np.abs(g).max()) for g in jax.tree.leaves(want[1]))
  assert abs(got[0] - want[0]) <= tolerance * max(1, abs(want[0]))
  assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * top), got[1], want[1]
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('dense', marks=pytest.mark.slow), 'top-2'])
def test_gradients_equal_differences_of_the_float64_decoder(name):
  config = CONFIGS[name]
  params, (_, grads) = parameters(config), reference(config)
  rng = np.random.default_rng(5)
  direction = jax.tree.map(lambda p: rng.normal(size=p.shape) * float(p.std()), params)

  def value(h):
    moved = jax.tree.map(lambda p, d: np.asarray(p, np.float64) + h * d, params, direction)
    logits = policy_oracle.apply(moved, config, TOKENS, START)[1]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logp = np.take_along_axis(logp, np.roll(TOKENS, -1, 1)[..., None], -1)[..., 0]
    keep = REAL.copy()
    keep[:, -1] = False
    return -logp[keep].mean()

  want = (value(1e-5) - value(-1e-5)) / 2e-5
  inner = jax.tree.map(lambda g, d: float((np.asarray(g, np.float64) * d).sum()), grads, direction)
  np.testing.assert_allclose(sum(jax.tree.leaves(inner)), want, rtol=1e-3)
  assert all((np.abs(g) > 0).any() for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_remat_changes_nothing():
  config = dataclasses.replace(TOP2, remat=True)
  fn = descend(config)
  args = parameters(TOP2), TOKENS, START
  close(fn(*args), reference(TOP2), 1e-6)
  trace = lambda c: str(
    jax.make_jaxpr(jax.grad(functools.partial(loss, config=c)))(
      args[0], tokens=jnp.asarray(TOKENS), start=jnp.asarray(START)
    )
  )
  assert 'remat' in trace(config) or 'checkpoint' in trace(config)
  assert 'remat' not in trace(TOP2) and 'checkpoint' not in trace(TOP2)


@pytest.mark.slow
def test_bfloat16_computes_low_and_keeps_float32_borders():
  config = dataclasses.replace(TOP2, dtype='bfloat16')
  params = parameters(TOP2)
  hidden, logits, aux = compiled(config)(params, TOKENS, START)
  assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
  want = compiled(TOP2)(params, TOKENS, START)
  error = np.abs(np.asarray(hidden, np.float32) - want[0])[REAL]
  assert 1e-4 < np.median(error) < 0.05
  assert aux.router_logits.dtype == jnp.float32
  cache = policy.init_cache(config, ROWS, LENGTH)
  assert cache.k.dtype == cache.v.dtype == jnp.bfloat16
  fresh = jax.eval_shape(lambda key: policy.init(key, config, V), jax.random.key(0))
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(fresh))
  grads = jax.eval_shape(
    jax.grad(functools.partial(loss, config=config)),
    params,
    tokens=jnp.asarray(TOKENS),
    start=jnp.asarray(START),
  )
  assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_bfloat16_trains_float32_parameters():
  config = dataclasses.replace(TOP2, dtype='bfloat16', tied_head=True, remat=True)
  params = {k: v for k, v in parameters(TOP2).items() if k != 'head'}
  kernel = functools.partial(attention.blockwise, block=4)

  @functools.partial(jax.jit, static_argnums=3)
  def run(params, tokens, start, dtype):
    def loss(params):
      low = dataclasses.replace(config, dtype=dtype)
      hidden, _, aux = policy.apply(params, low, tokens, start=start, attention=kernel)
      found = linear_head.statistics(
        hidden,
        policy.head(params),
        tokens,
        rollout_hidden=jax.lax.stop_gradient(hidden) + jnp.bfloat16(0.05),
        rollout_head=policy.head(params),
      )
      real = jnp.arange(LENGTH)[None] >= start[:, None]
      return -jnp.where(real, found.policy_logp, 0).mean(), (found, hidden.dtype == jnp.bfloat16)

    return jax.value_and_grad(loss, has_aux=True)(params)

  (_, (found, is_low)), grads = run(params, TOKENS, START, 'bfloat16')
  (_, (want, is_not)), want_grads = run(params, TOKENS, START, 'float32')
  assert is_low and not is_not
  for x in jax.tree.leaves((found, grads)):
    assert x.dtype == jnp.float32 and np.isfinite(x).all()
  np.testing.assert_allclose(found.policy_logp[REAL], want.policy_logp[REAL], rtol=0, atol=0.2)
  assert (found.policy_logp != want.policy_logp).any()
  flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
  near, far = flat(grads), flat(want_grads)
  assert near @ far / np.linalg.norm(near) / np.linalg.norm(far) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize('compute', [pytest.param('dense', marks=pytest.mark.slow), 'ragged'])
def test_no_array_grows_with_the_square_of_the_length(compute):
  config = dataclasses.replace(TOP2, layers=6, remat=True, expert_compute=compute)
  params = policy.shapes(config, V)

  def largest(length):
    tokens, start = jnp.zeros((1, length), jnp.int32), jnp.zeros(1, jnp.int32)
    kernel = functools.partial(attention.blockwise, block=32)

    def energy(params):
      hidden, _, _ = policy.apply(params, config, tokens, start=start, attention=kernel)
      return jnp.square(hidden).sum()

    return max(sizes(jax.make_jaxpr(jax.grad(energy))(params).jaxpr))

  assert largest(512) <= 2 * largest(256)


def sizes(jaxpr):
  for eqn in jaxpr.eqns:
    yield from (v.aval.size for v in eqn.outvars)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from sizes(inner)


@pytest.mark.slow
def test_memory_is_linear_in_length_up_to_8192(optimised):
  config = policy.PolicyConfig(
    width=64, layers=6, heads=4, kv_heads=2, head_width=16, mlp_width=128, experts=0, remat=True
  )
  params = policy.shapes(config, 32)
  array = jax.ShapeDtypeStruct

  def program(kernel):
    def energy(params, tokens, start):
      hidden, _, _ = policy.apply(params, config, tokens, start=start, attention=kernel)
      return jnp.square(hidden).sum()

    return jax.jit(jax.value_and_grad(energy), compiler_options=optimised)

  def temporaries(kernel, length):
    args = params, array((1, length), jnp.int32), array((1,), jnp.int32)
    return program(kernel).lower(*args).compile().memory_analysis().temp_size_in_bytes

  half, whole = (temporaries(attention.blockwise, n) for n in (4096, 8192))
  assert whole <= 2.05 * half
  assert whole <= 128 * 2**20
  # Of the search itself: with all scores it is quadratic.
  assert temporaries(attention.plain, 2048) > 3 * temporaries(attention.plain, 1024)
  # And the same numbers come out, gradients too.
  params = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), config, 32)
  tokens = jax.random.randint(jax.random.key(1), (2, 700), 0, 32)
  args = params, tokens, jnp.zeros(2, jnp.int32)
  want, got = (program(kernel)(*args) for kernel in (attention.plain, attention.blockwise))
  close(got, want, 1e-4)


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('top-1', marks=pytest.mark.slow),
    pytest.param('top-2 normalised', marks=pytest.mark.slow),
  ],
)
def test_the_router_learns(name):
  router = reference(CONFIGS[name])[1]['layers']['mlp']['router']['kernel']
  assert (np.abs(router).max((1, 2)) > 1e-5).all()


def test_hooks_that_are_none_are_not_traced():
  params = parameters(TOP2)
  seen = []

  def note(kind):
    return lambda x, *rest: (seen.append((kind, x.shape, [r.shape for r in rest])), x)[1]

  def equations(**kwargs):
    return str(
      jax.make_jaxpr(lambda p, t, s: forward(p, TOP2, t, s, **kwargs))(params, TOKENS, START)
    )

  bare = equations()
  assert equations(hooks=policy.Hooks()) == bare
  keys = jax.random.split(jax.random.key(0), (ROWS, LENGTH))
  assert equations(noise_keys=keys) == bare
  wide = (ROWS, LENGTH, 16)
  assert equations(hooks=policy.Hooks(activation=note('activation'))) == bare
  assert seen == [('activation', s, []) for s in (wide, wide, wide, (ROWS, LENGTH, 4, 24))]
  seen.clear()
  assert equations(hooks=policy.Hooks(kv=note('kv'))) == bare
  assert seen == [('kv', (ROWS, LENGTH, 2, 4), [])] * 2
  seen.clear()
  equations(hooks=policy.Hooks(router=note('router')), noise_keys=keys)
  assert seen == [('router', (ROWS, LENGTH, 4), [(), (ROWS, LENGTH)])]
  assert equations(hooks=policy.Hooks(kv=lambda x: x * 2)) != bare


@pytest.mark.slow
def test_hooks_act_where_they_say():
  params, tokens, start = parameters(TOP2), jnp.asarray(TOKENS), jnp.asarray(START)
  run = jax.jit(
    lambda params, scale, shift: policy.apply(
      params,
      TOP2,
      tokens,
      start=start,
      noise_keys=jax.random.split(jax.random.key(0), (ROWS, LENGTH)),
      hooks=policy.Hooks(
        activation=lambda x: x * scale[0],
        kv=lambda x: x * scale[1],
        router=lambda s, layer, _: s + jnp.where(layer == 1, shift, 0)[None, None],
      ),
    )[::2]
  )
  one, none = jnp.ones(2), jnp.zeros(4)
  hidden, aux = run(params, one, none)
  np.testing.assert_allclose(
    hidden[REAL], compiled(TOP2)(params, TOKENS, START)[0][REAL], rtol=0, atol=1e-5
  )
  # Without activations no layer adds anything to the residual stream.
  x = np.asarray(params['embed'], np.float64)[TOKENS]
  want = policy_oracle.rms_norm(x, np.asarray(params['scale'], np.float64))
  np.testing.assert_allclose(run(params, jnp.array([0.0, 1]), none)[0], want, rtol=0, atol=1e-5)
  # Without keys and values only the experts do.
  muted = dict(params, layers=dict(params['layers']))
  muted['layers']['attention'] = jax.tree.map(jnp.zeros_like, params['layers']['attention'])
  want = policy_oracle.apply(muted, TOP2, TOKENS, START)[0]
  np.testing.assert_allclose(run(params, jnp.array([1.0, 0]), none)[0], want, rtol=0, atol=2e-5)
  # A push towards experts 2 and 3 in layer 1 leaves layer 0 alone.
  pushed = run(params, one, jnp.array([0.0, 0, 1e3, 1e3]))[1].routes
  assert (np.sort(pushed[:, :, 1], -1) == [2, 3]).all()
  np.testing.assert_array_equal(pushed[:, :, 0], aux.routes[:, :, 0])


def shallow(name):
  """The first layer alone: what depth adds, compile time aside, is covered above."""
  params = parameters(CONFIGS[name])
  params = params | {'layers': jax.tree.map(lambda p: p[:1], params['layers'])}
  return dataclasses.replace(CONFIGS[name], layers=1), params


@pytest.mark.parametrize(
  'mesh', [*(pytest.param(m, marks=pytest.mark.slow) for m in ((1, 1), (8, 1))), (4, 2)]
)
@pytest.mark.parametrize('name', ['top-2', pytest.param('dense', marks=pytest.mark.slow)])
def test_meshes_agree(name, mesh):
  config, whole = shallow(name)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    fresh = jax.eval_shape(lambda key: policy.init(key, config, V), jax.random.key(0))
    params = jax.tree.map(lambda p, f: jax.device_put(np.asarray(p), f.sharding.spec), whole, fresh)
    q = params['layers']['attention']['q']['kernel']
    assert jax.typeof(q).sharding.spec == P(None, 'data', 'model')
    assert q.addressable_shards[0].data.size * mesh[0] * mesh[1] == q.size
    tokens, start = jax.device_put((TOKENS, START), P('data'))
    got = descend(config)(params, tokens, start)
    for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(got[1]), strict=True):
      assert jax.typeof(g).sharding == jax.typeof(p).sharding
  close(got, unsharded(name), 1e-5)


@functools.cache
def unsharded(name):
  config, params = shallow(name)
  return descend(config)(params, TOKENS, START)


@pytest.mark.slow
def test_init_is_the_same_under_a_mesh():
  want = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), TOP2, V)
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    got = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), TOP2, V)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'width': 0}, ['policy.width=0']),
    ({'layers': 0}, ['policy.layers=0']),
    ({'heads': -1}, ['policy.heads=-1']),
    ({'kv_heads': 0}, ['policy.kv_heads=0']),
    ({'head_width': 0}, ['policy.head_width=0']),
    ({'mlp_width': 0}, ['policy.mlp_width=0']),
    ({'heads': 4, 'kv_heads': 3}, ['policy.heads=4', 'policy.kv_heads=3']),
    ({'head_width': 5}, ['policy.head_width=5']),
    ({'experts': -1}, ['policy.experts=-1']),
    ({'experts_per_token': 0}, ['policy.experts_per_token=0', '1..4', 'policy.experts']),
    ({'experts_per_token': 5}, ['policy.experts_per_token=5', '1..4', 'policy.experts']),
    ({'normalize_gates': True}, ['policy.normalize_gates=True', 'policy.experts_per_token=1']),
    ({'rope_base': 0.0}, ['policy.rope_base=0.0']),
    ({'rope_base': float('nan')}, ['policy.rope_base=nan']),
    ({'norm_epsilon': 0.0}, ['policy.norm_epsilon=0.0']),
    ({'dtype': 'float64'}, ["policy.dtype='float64'", 'bfloat16']),
  ],
)
def test_bad_configurations(changes, words):
  with pytest.raises(types.InputError) as error:
    policy.PolicyConfig(**changes)
  assert all(word in str(error.value) for word in words), str(error.value)
  assert str(error.value).endswith('.') and '\n' not in str(error.value)


@pytest.mark.slow
def test_a_fresh_policy_with_a_tied_head_explores():
  config = policy.PolicyConfig(width=64, layers=1, experts=0, tied_head=True)
  params = policy.init(jax.random.key(0), config, 16)
  hidden, _, _ = policy.apply(params, config, jnp.arange(16)[None], start=jnp.zeros(1, jnp.int32))
  logp = jax.nn.log_softmax(policy.logits(params, hidden))
  assert 1.5 < -(jnp.exp(logp) * logp).sum(-1).mean() < jnp.log(16)
