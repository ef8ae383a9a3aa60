"""trm_jax.mismatch: each source does what it says, and off means off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from asked import asked
from jax.sharding import PartitionSpec as P

from trm_jax import divergences, policy, types
from trm_jax.mesh import sharding
from trm_jax.mismatch import (
  decoding,
  fleet,
  heavy_tail,
  precision,
  reduction,
  reporting,
  routing,
  staleness,
)
from trm_jax.policy import attention
from trm_jax.rollouts import sampling, scoring
from trm_jax.rollouts.sampling import Request

V, PAD, EOS = 12, 0, 1
PROMPTS, SAMPLES, WIDTH, LENGTH, VERSION = 8, 3, 4, 3, 7
CONFIG = policy.PolicyConfig(
  width=16, layers=1, heads=4, kv_heads=2, head_width=4, mlp_width=24, experts=4
)
START = np.array([0, 2, 1, 0, 3, 1, 2, 0], np.int32)
TEXT = np.random.default_rng(0).integers(2, V, (PROMPTS, WIDTH)).astype(np.int32)
KEY = jax.random.key(11)
LOW = precision.Precision(
  weights='float8_e5m2', activations='float8_e4m3fn', kv='float8_e5m2', attention='bfloat16'
)
ENGINES = {
  'precision': fleet.Engine(precision=LOW),
  'routing': fleet.Engine(routing=routing.Routing(jitter=2.0, rate=0.7)),
  'stale': fleet.Engine(staleness=staleness.Staleness(steps=2)),
  'stuck': fleet.Engine(staleness=staleness.Staleness(stuck=True)),
  'all': fleet.Engine(
    # No grid so coarse that the order of sums on a mesh decides a token.
    precision=precision.Precision(
      weights='int8_channel', kv='bfloat16', softmax='float16', rounding='stochastic'
    ),
    reduction=reduction.Reduction(permute=True, attention_block=2),
    routing=routing.Routing(jitter=2.0, flips=(0.3,), dtype='bfloat16', capacity=1.0),
    staleness=staleness.Staleness(steps=1),
    decoding=decoding.Decoding(temperature=0.8, top_k=10, top_p=0.95),
    heavy_tail=heavy_tail.HeavyTail(scale=1.0, spikes=0.05, outliers=0.3),
    reporting=reporting.Reporting(dtype='bfloat16', missing=0.1, shift=1, scrambled=0.5),
  ),
}
SOURCES = [field.name for field in dataclasses.fields(fleet.Engine)]
TEAMS = {name: fleet.Fleet(engine=engine) for name, engine in ENGINES.items()}
TEAMS['stuck'] = fleet.Fleet(broken=ENGINES['stuck'], broken_samples=SAMPLES)
MIXED = fleet.Fleet(
  engine=dataclasses.replace(
    ENGINES['routing'],
    decoding=decoding.Decoding(top_k=10),
  ),
  broken=fleet.Engine(precision=precision.Precision(kv='float8_e5m2')),
  broken_samples=1,
)


@functools.cache
def parameters(seed=0):
  return jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(seed), CONFIG, V)


@functools.cache
def past():
  """History of two versions: one step ago seed 1, two steps ago seed 2."""
  return jax.tree.map(lambda *p: jnp.stack(p), parameters(1), parameters(2))


def roll(team, params, first, history, prompts, start, strength=1.0, **options):
  options = {'samples': SAMPLES, 'length': LENGTH, 'eos': EOS, 'pad': PAD} | options
  request, record, rest = asked(**options)
  versions = dict(version=jnp.int32(VERSION), first=first, history=history, strength=strength)
  text = prompts, start
  return fleet.generate(team, params, CONFIG, *text, KEY, request, record, **versions, **rest)


@functools.cache
def roller(team, **options):
  return jax.jit(functools.partial(roll, team, **options))


def run(team, strength=1.0, **options):
  return roller(team, **options)(
    parameters(), parameters(3), past(), TEXT, START, jnp.float32(strength)
  )


def fields(rollout):
  """A rollout's arrays by name; its class admits no other leaves."""
  return {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}


def equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


# Precision


@pytest.mark.parametrize('dtype', precision.FORMATS)
def test_rounding_equals_the_real_cast(dtype):
  rng = np.random.default_rng(0)
  info = ml_dtypes.finfo(dtype)
  top, tiny = float(info.max), float(info.smallest_subnormal)
  scale = 2.0 ** rng.integers(-40, 40, 20_000)
  near = np.abs(np.concatenate([top * rng.uniform(0.5, 2, 500), tiny * rng.uniform(0, 9, 500)]))
  halves = tiny * np.arange(0, 64) / 2  # ties go to the even neighbour
  values = np.concatenate([rng.normal(size=20_000) * scale, near, halves, [top, 0.0, 1e30, 3e38]])
  values = np.minimum(values, 3.4e38)
  values = np.concatenate([values, -values]).astype(np.float32)
  if dtype == 'bfloat16':  # its subnormals are float32's, which the CPU flushes
    values = values[(np.abs(values) > 1e-37) | (values == 0)]
  want = np.clip(values, -top, top).astype(dtype).astype(np.float32)
  assert np.isfinite(want).all() and (np.abs(values) > top).any()
  for fn in (precision.round_to, jax.jit(precision.round_to, static_argnums=1)):
    got = fn(jnp.asarray(values), dtype)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
  edges = jnp.array([jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
  np.testing.assert_array_equal(precision.round_to(edges, dtype), [top, -top, np.nan])


@pytest.mark.parametrize('dtype', precision.FORMATS)
def test_the_gradient_of_rounding_is_one(dtype):
  x = jnp.array([0.3, -1e-9, 1e9, 0.0, 17.123], jnp.float32)
  weight = jnp.array([1.2345678, -3.0, 1e-7, 1e7, 0.1], jnp.float32)  # not rounded on the way
  grad = jax.grad(lambda x: (weight * precision.round_to(x, dtype)).sum())(x)
  np.testing.assert_array_equal(grad, weight)


def test_rounding_keeps_the_compute_dtype():
  x = jnp.array([1.2345, -300.0], jnp.bfloat16)
  got = precision.round_to(x, 'float8_e4m3fn')
  assert got.dtype == jnp.bfloat16
  want = np.asarray(x, np.float32).astype('float8_e4m3fn').astype(np.float32)
  np.testing.assert_array_equal(got.astype(np.float32), want)
  # 65504, the top of float16, is 65536 in bfloat16: beyond it.
  assert np.isfinite(precision.round_to(jnp.full(1, 1e6, jnp.bfloat16), 'float16')).all()


@pytest.mark.slow
def test_weights_are_rounded_and_scales_are_not():
  params = jax.tree.map(lambda p: p * 1.01, parameters())
  low = precision.Precision(weights='float8_e5m2')
  rounded = jax.jit(lambda p: precision.round_weights(p, low))(params)
  kinds = {True: 0, False: 0}

  def check(path, new, old):
    scale = path[-1].key in ('scale', 'q_scale', 'k_scale', 'attention_scale', 'mlp_scale')
    kinds[scale] += 1
    want = old if scale else np.asarray(old).astype('float8_e5m2').astype(np.float32)
    np.testing.assert_array_equal(new, want)

  jax.tree_util.tree_map_with_path(check, rounded, params)
  assert kinds == {True: 5, False: 4 + 4 + 2}
  assert precision.round_weights(params, precision.Precision(kv='float8_e5m2')) is params
  off = jax.jit(lambda p, strength: precision.round_weights(p, low, strength))
  equal(off(params, jnp.float32(0)), params)


def test_precision_hooks():
  x = jnp.array([1.2345, -0.777], jnp.float32)
  hooks = precision.rounding_hooks(precision.Precision(activations='float8_e5m2'), jnp.float32(1))
  assert hooks.kv is None and hooks.router is None
  np.testing.assert_array_equal(hooks.activation(x), precision.round_to(x, 'float8_e5m2'))
  hooks = precision.rounding_hooks(precision.Precision(kv='bfloat16'), jnp.float32(0))
  assert hooks.activation is None
  np.testing.assert_array_equal(hooks.kv(x), x)


@pytest.mark.parametrize('name', ['weights', 'activations', 'kv'])
def test_bad_formats(name):
  with pytest.raises(types.InputError, match=f"precision.{name}='int4' is not one of bfloat16"):
    precision.Precision(**{name: 'int4'})


@pytest.mark.parametrize('name, same', [('e8m7', 'bfloat16'), ('e5m10', 'float16'), ('e5m2', None)])
def test_any_exponent_and_mantissa(name, same):
  same = same or 'float8_e5m2'
  info = ml_dtypes.finfo(same)
  rng = np.random.default_rng(0)
  low, high = max(info.minexp, -60), min(info.maxexp, 60)
  values = rng.uniform(-2, 2, 20_000) * 2.0 ** rng.integers(low + 1, high - 1, 20_000)
  values = values[np.abs(values) >= float(info.smallest_normal)].astype(np.float32)
  got = np.asarray(precision.round_to(jnp.asarray(values), name))
  np.testing.assert_array_equal(got, np.asarray(precision.round_to(jnp.asarray(values), same)))
  # Apart: subnormals are flushed, and beyond the range the largest number stands.
  tiny = float(info.smallest_normal)
  if same != 'bfloat16':
    np.testing.assert_array_equal(
      precision.round_to(jnp.array([tiny, 0.4 * tiny]), name), [tiny, 0]
    )
  top = float(info.max)
  np.testing.assert_array_equal(
    precision.round_to(jnp.array([3.4e38, -jnp.inf]), name), [top, -top]
  )


@pytest.mark.slow
def test_int8_has_255_levels():
  w = np.random.default_rng(0).normal(size=(3, 40, 6)).astype(np.float32)
  w[1, 2] = 0
  for name, axis in (('int8', (-2, -1)), ('int8_channel', -2)):
    scale = np.abs(w).max(axis, keepdims=True) / np.float32(127)
    levels = np.clip(np.round(w / scale), -127, 127).astype(np.int8)
    got = np.asarray(precision.round_to(jnp.asarray(w), name, axis=axis))
    np.testing.assert_allclose(got, levels.astype(np.float32) * scale, rtol=1e-6)
    assert np.abs(got - w).max() <= scale.max() * 0.5001
  assert (precision.round_to(jnp.zeros((2, 3)), 'int8') == 0).all()
  assert np.isnan(precision.round_to(jnp.array([1.0, jnp.nan]), 'int8')[1])
  # As weights: one scale a matrix (of each layer and expert), or one an output channel.
  params = {k: parameters()['layers']['mlp'][k] for k in ('gate', 'down')}
  params |= {'head': parameters()['head']}
  rounded = precision.round_weights(params, precision.Precision(weights='int8_channel'))
  for name, inputs in (('gate', -2), ('down', -2), ('head', -1)):
    want = precision.round_to(params[name], 'int8_channel', axis=inputs)
    np.testing.assert_array_equal(rounded[name], want)
  rounded = precision.round_weights(params, precision.Precision(weights='int8'))
  want = precision.round_to(params['gate'], 'int8', axis=(-2, -1))
  np.testing.assert_array_equal(rounded['gate'], want)


@pytest.mark.slow
@pytest.mark.parametrize('name', [*precision.FORMATS, 'e4m3', 'int8'])
def test_stochastic_rounding_keeps_the_mean(name):
  rng = np.random.default_rng(0)
  x = (rng.normal(size=300) * 2.0 ** rng.integers(-8, 4, 300)).astype(np.float32)
  x = jnp.asarray(np.concatenate([x, [0.0, 0.003, -1.0, 1.0, 16.0]]).astype(np.float32))
  draws = 512  # noise on a regular grid: the mean over it is x to 1 / draws of a step
  noise = jnp.asarray(((np.arange(draws) + 0.5) / draws).astype(np.float32))
  wide = jnp.broadcast_to(x[None], (draws, x.size))
  out = np.asarray(
    precision.round_to(wide, name, noise=jnp.broadcast_to(noise[:, None], wide.shape))
  )
  grid = [len(np.unique(column)) for column in out.T]
  assert max(grid) == 2
  # A step of the grid is at most a quarter of x, or the smallest number; int8 has one step for all.
  steps = np.maximum(out.max(0) - out.min(0), 0.25 * np.abs(x)) + out[out > 0].min()
  steps = steps.max() if name == 'int8' else steps
  error = np.abs(out.mean(0, dtype=np.float64) - x)
  assert (error <= steps / draws + 1e-6 * np.abs(x)).all()
  np.testing.assert_array_equal(precision.round_to(jnp.asarray(out), name), out)  # on the grid
  edges = jnp.array([jnp.inf, jnp.nan])
  far = precision.round_to(edges, name, noise=jnp.array([0.9, 0.9]))
  assert np.isnan(far[1]) and (name == 'int8' or np.isfinite(far[0]))


@pytest.mark.slow
def test_dithered_probabilities_draw_apart_from_spikes():
  keys = jax.random.split(jax.random.key(0), (1000, 1))
  scores = jnp.broadcast_to(jnp.array([0.0, 0.2]), (1000, 1, 2))
  spiky = heavy_tail.shift_hooks(heavy_tail.HeavyTail(spikes=0.5))
  spiked = np.asarray(spiky.logits(scores, keys) != scores).any((1, 2))
  low = precision.Precision(softmax='e4m1', rounding='stochastic')
  y = np.asarray(precision.rounding_hooks(low).logits(scores, keys))[:, 0]
  up = y > y.min(0)
  # Standard error .03.
  np.testing.assert_allclose(up[spiked].mean(0), up[~spiked].mean(0), atol=0.15)


@pytest.mark.slow
def test_stochastic_hooks_draw_from_their_token_and_layer():
  low = precision.Precision(activations='e8m3', kv='e8m3', logits='e8m3', rounding='stochastic')
  hooks = precision.rounding_hooks(low)
  assert hooks.keyed and hooks.activation is None and hooks.kv is None
  keys = jax.random.split(jax.random.key(0), (2, 30))
  x = jnp.broadcast_to(jnp.linspace(1, 2, 50)[None, None], (2, 30, 50))
  real = jnp.ones((2, 30), bool)
  of = lambda layer: hooks.bind(policy.Hooks(), layer, keys, real)
  first, second = of(0), of(1)
  seen = [np.asarray(h(x)) for h in (first.activation, first.kv, second.activation)]
  seen.append(np.asarray(hooks.logits(x, keys)))
  np.testing.assert_array_equal(seen[0], of(0).activation(x))
  for a, b in ((0, 1), (0, 2), (0, 3)):
    assert (seen[a] != seen[b]).mean() > 0.1
  for out in seen:
    assert (out[0, 0] != out[0, 1]).any() and abs(out.mean() - 1.5) < 0.004
  with pytest.raises(types.InputError, match='key=None'):
    precision.round_weights({}, precision.Precision(weights='int8', rounding='stochastic'))
  weights = precision.Precision(weights='e8m3', rounding='stochastic')
  tree = {'head': parameters()['head']}
  draw = lambda seed: precision.round_weights(tree, weights, key=jax.random.key(seed))
  assert (draw(0)['head'] != draw(1)['head']).any()
  equal(draw(0), draw(0))


@pytest.mark.slow
def test_scores_and_probabilities_are_rounded_apart():
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, 50, 40)).astype(np.float32) * 3)

  def kl(temperature=1.0, **formats):
    hooks = precision.rounding_hooks(precision.Precision(**formats), temperature=temperature)
    out = hooks.logits(scores, None)
    return out, float(divergences.kl(scores, out, temperature=temperature).mean())

  logits, coarse = kl(logits='bfloat16')
  np.testing.assert_array_equal(logits, precision.round_to(scores, 'bfloat16'))
  assert 0 < kl(logits='e8m10')[1] < coarse < kl(logits='e8m3')[1]
  for temperature in (1.0, 0.7):
    out, found = kl(temperature, softmax='float16')
    rounded = precision.round_to(jax.nn.softmax(scores / temperature), 'float16')
    want = rounded / rounded.sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.nn.softmax(out / temperature), want, rtol=0, atol=1e-6)
    assert 0 < found < kl(temperature, softmax='float8_e4m3fn')[1]
  assert (kl(softmax='float8_e4m3fn')[0] == -jnp.inf).any()  # small probabilities vanish
  both = precision.Precision(logits='bfloat16', softmax='float16')
  off = precision.rounding_hooks(both, jnp.float32(0)).logits(scores, None)
  np.testing.assert_array_equal(off, scores)
  # Where all would vanish, rounding is left out.
  coarse = precision.rounding_hooks(precision.Precision(softmax='e3m3'))
  flat = coarse.logits(jnp.zeros((1, 1, 4000)), None)
  assert jnp.isfinite(flat).all()


@pytest.mark.slow
def test_the_softmax_of_attention_in_fewer_bits():
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(2, 9, n, 4)).astype(np.float32) * 2 for n in (4, 2, 2))
  start = np.array([0, 3], np.int32)
  sees = np.arange(9)[None] >= start[:, None]
  ladder = ('e8m10', 'bfloat16', 'float8_e4m3fn')

  @jax.jit
  def attended(q, k, v, off):
    def one(format=None, strength=1.0, block=None):
      engine = fleet.Engine(
        precision=precision.Precision(attention=format),
        reduction=reduction.Reduction(attention_block=block),
      )
      served = fleet.served_attention(engine, attention.plain, strength)
      return served(q, k, v, slots=jnp.arange(9), start=jnp.asarray(start))

    return one(), one(ladder[2], off, 2), [one(f) for f in ladder], one(ladder[1], block=2)

  own, off, rounded, blocks = attended(q, k, v, jnp.float32(0))
  np.testing.assert_array_equal(off, own)
  # By NumPy: exponentials are rounded before they are summed.
  scores = np.einsum('bthc,bshc->bhts', q, k.repeat(2, 2)) / 2
  hidden = np.tril(np.ones((9, 9), bool)) & sees[:, None] == 0
  scores = np.where(hidden[:, None], -np.inf, scores)
  e = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e9))
  e = e.astype(ladder[2]).astype(np.float32)
  want = np.einsum('bhts,bshc->bthc', e / np.maximum(e.sum(-1, keepdims=True), 1), v.repeat(2, 2))
  np.testing.assert_allclose(np.asarray(rounded[2])[sees], want[sees], rtol=0, atol=1e-5)
  # Error grows as bits are dropped, and stays of one size beside blocks of keys.
  errors = [np.abs(x - own)[sees].mean() for x in (*rounded, blocks)]
  assert 1e-6 < errors[0] < errors[1] < errors[2] and errors[0] < errors[3] < errors[2]
  assert precision.attention(precision.Precision(), attention.plain) is attention.plain


@pytest.mark.slow
def test_kl_grows_as_bits_are_dropped():
  tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (8, 6)).astype(np.int32))
  ladder = ('e8m7', 'e8m2')

  def scores(params, **formats):
    hooks = precision.rounding_hooks(precision.Precision(**formats))
    start = jnp.zeros(8, jnp.int32)
    attend = precision.attention(precision.Precision(**formats), attention.plain)
    shared = dict(start=start, hooks=hooks, attention=attend)
    return policy.logits(params, policy.apply(params, CONFIG, tokens, **shared)[0])

  @jax.jit
  def inside(params, rounded):
    own = scores(params)
    kls = [
      divergences.kl(own, scores(params, **{site: f})).mean() for site in SITES for f in ladder
    ]
    return jnp.stack(kls).reshape(len(SITES), -1), divergences.kl(own, scores(rounded)).mean()

  SITES = ('activations', 'kv', 'attention')
  of = lambda f: precision.round_weights(parameters(), precision.Precision(weights=f))
  found = [inside(parameters(), of(f)) for f in (*ladder, 'int8', 'int8_channel')]
  weights = np.array([x for _, x in found])
  for kls in (*np.asarray(found[0][0]), weights[:2]):
    assert 0 < kls[0] < kls[1]
  assert 0 < weights[3] < weights[2] < weights[1]  # one scale a channel is finer than one a matrix


@pytest.mark.parametrize(
  'bad, match',
  [
    (dict(logits='int8_channel'), "precision.logits='int8_channel' is for weights"),
    (dict(weights='e1m3'), "precision.weights='e1m3' must have 2 to 8 exponent"),
    (dict(kv='e8m24'), "precision.kv='e8m24' must have .* 1 to 23 mantissa bits"),
    (dict(rounding='stochastic'), "precision.rounding='stochastic' rounds nothing"),
    (dict(attention='float8_e4m3b11fnuz'), "precision.attention='float8_e4m3b11fnuz' is not one"),
    (
      dict(attention='bfloat16', rounding='stochastic'),
      "precision.attention='bfloat16' rounds to nearest only",
    ),
  ],
)
def test_impossible_precision(bad, match):
  with pytest.raises(types.InputError, match=match):
    precision.Precision(**bad)


# Routing


def test_flip_rate_by_hand():
  routes = jnp.array([[[[0, 1], [2, 3]], [[0, 1], [0, 1]], [[1, 2], [1, 2]], [[0, 1], [0, 1]]]])
  other = jnp.array([[[[1, 0], [2, 0]], [[0, 2], [0, 3]], [[1, 2], [2, 1]], [[3, 2], [3, 2]]]])
  valid = jnp.array([[True, True, True, False]])
  # Layer 0: only token 1 differs as a set; layer 1: tokens 0 and 1. Token 3 does not count.
  np.testing.assert_allclose(routing.flip_rate(routes, other, valid), [1 / 3, 2 / 3], rtol=1e-6)
  np.testing.assert_array_equal(routing.flip_rate(routes, routes, valid), [0, 0])
  np.testing.assert_array_equal(routing.flip_rate(routes, other, ~valid | valid)[:1], [0.5])
  np.testing.assert_array_equal(routing.flip_rate(routes, other, valid & False), [0, 0])


@functools.cache
def disturber(jitter, rate):
  def run(layer, strength):
    keys = jax.random.split(jax.random.key(2), (60, 50))
    hook = routing.router_hook(routing.Routing(jitter=jitter, rate=rate), strength)
    return hook(jnp.zeros((60, 50, 4)), layer, keys)

  return jax.jit(run)


def disturbance(jitter, rate, layer=0, strength=1.0):
  return np.asarray(disturber(jitter, rate)(jnp.int32(layer), jnp.float32(strength)))


@pytest.mark.parametrize('rate', [0.05, 0.5, 1.0])
def test_rate_is_the_share_of_disturbed_tokens_and_jitter_their_deviation(rate):
  by_layer = [disturbance(0.8, rate, layer) for layer in (0, 1)]
  hits = []
  for noise in by_layer:
    hit = (noise != 0).any(-1)
    np.testing.assert_array_equal((noise != 0).all(-1), hit)  # a token is disturbed as a whole
    n = hit.size
    assert abs(hit.mean() - rate) <= 4 * np.sqrt(rate * (1 - rate) / n)
    values = noise[hit]
    assert abs(values.std() - 0.8) < 4 * 0.8 / np.sqrt(2 * values.size)
    assert abs(values.mean()) < 4 * 0.8 / np.sqrt(values.size)
    hits.append(hit)
  both = (hits[0] & hits[1]).mean()  # layers are hit independently
  assert abs(both - rate**2) <= 4 * np.sqrt(rate**2 * (1 - rate**2) / n)
  assert not (by_layer[0] == by_layer[1]).all()
  if rate == 1:
    assert abs(np.corrcoef(by_layer[0].ravel(), by_layer[1].ravel())[0, 1]) < 0.05
  assert (disturbance(0.8, rate, strength=0.0) == 0).all()
  half = disturbance(0.8, rate, strength=0.5)
  np.testing.assert_allclose(half, by_layer[0] / 2, rtol=1e-6)


@pytest.mark.slow
def test_flips_grow_with_jitter():
  tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (16, 20)).astype(np.int32))
  keys = jax.random.split(jax.random.key(2), (16, 20))

  source = routing.Routing(jitter=1.0, noise='uniform')

  @jax.jit
  def passed(strength):
    hooks = routing.routing_hooks(source, strength)
    start = jnp.zeros(16, jnp.int32)
    _, _, aux = policy.apply(
      parameters(), CONFIG, tokens, start=start, noise_keys=keys, hooks=hooks
    )
    return aux.router_logits, aux.routes

  (scores, clean), everything = passed(0.0), jnp.ones((16, 20), bool)
  rates = []
  for strength in (0, 0.05, 0.2, 1, 50):
    routes = passed(strength)[1]
    rates.append(float(routing.flip_rate(routes, clean, everything)[0]))
    # Flips exactly where the top-k of the disturbed scores says so, and at no wide margin.
    again = routing.router_hook(source, strength)(scores[:, :, 0], jnp.int32(0), keys)
    np.testing.assert_array_equal(routes[:, :, 0, 0], again.argmax(-1))
    ranked = np.sort(np.asarray(scores[:, :, 0]), -1)
    wide = ranked[..., -1] - ranked[..., -2] >= 2 * strength
    flipped = np.asarray(routes != clean)[:, :, 0, 0]
    assert not flipped[wide].any() and (strength > 0.2 or wide.any())
  assert rates[0] == 0 and all(a < b for a, b in zip(rates, rates[1:], strict=False))
  assert abs(rates[-1] - 3 / 4) < 0.1  # pure noise picks any of 4 experts


@pytest.mark.slow
def test_forced_flips_hit_their_rate():
  probabilities = jax.nn.softmax(jax.random.normal(jax.random.key(0), (50, 60, 6)))
  probabilities = probabilities.at[0].set(1 / 6)  # ties
  keys = jax.random.split(jax.random.key(2), (50, 60))
  ranked = np.asarray(jax.lax.top_k(probabilities, 3)[1])
  own = jnp.asarray(ranked[..., :2])

  def flips(rates, layer, strength=1.0):
    hook = routing.routing_hooks(routing.Routing(flips=rates), strength).routes
    found = np.asarray(hook(probabilities, own, jnp.int32(layer), keys))
    hit = (found != own).any(-1)
    np.testing.assert_array_equal(found[hit], ranked[hit][:, [0, 2]])  # the runner-up comes in
    return hit

  for rates, layer, strength, want in (
    ((0.1,), 0, 1.0, 0.1),
    ((0.1,), 3, 1.0, 0.1),
    ((0.0, 0.7), 1, 1.0, 0.7),
    ((0.7, 0.0), 1, 1.0, 0.0),
    ((0.7,), 0, 0.5, 0.35),
    ((0.7,), 0, 0.0, 0.0),
    ((1.0,), 0, 9.0, 1.0),
  ):
    hit = flips(rates, layer, strength)
    assert abs(hit.mean() - want) <= 4 * np.sqrt(want * (1 - want) / hit.size)
  both = flips((0.5,), 0) & flips((0.5,), 1)
  assert abs(both.mean() - 0.25) < 4 * np.sqrt(0.19 / both.size)  # layers flip independently


def test_low_precision_router():
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32))
  hook = routing.router_hook(routing.Routing(dtype='bfloat16'), jnp.float32(1))
  np.testing.assert_array_equal(hook(scores, 0, None), precision.round_to(scores, 'bfloat16'))
  off = routing.router_hook(routing.Routing(dtype='bfloat16'), jnp.float32(0))
  np.testing.assert_array_equal(off(scores, 0, None), scores)


@pytest.mark.slow
def test_capacity_drops_the_surplus():
  rows, length, experts = 60, 50, 4
  keys = jax.random.split(jax.random.key(2), (rows, length))
  real = jnp.arange(rows)[:, None] >= jnp.where(jnp.arange(length) < 5, 20, 0)[None]
  probabilities = jnp.ones((rows, length, experts)) / experts

  def kept(routes, capacity, strength=1.0):
    source = routing.routing_hooks(routing.Routing(capacity=capacity), strength)
    assert source.keyed and source.gates is None
    hooks = source.bind(policy.Hooks(), 0, keys, real)
    weights = jnp.full(routes.shape, 0.5)
    out = np.asarray(hooks.gates(weights, routes, probabilities, 0, keys))
    assert set(np.unique(out)) <= {0, 0.5}
    return out[..., 0] > 0

  even = jnp.broadcast_to((jnp.arange(rows) % experts)[:, None, None], (rows, length, 1))
  assert kept(even, 1.0).all() and kept(even, 2.0).all()
  near = lambda hit, want: abs(hit.mean() - want) < 4 * np.sqrt(want * (1 - want) / hit.size)
  assert near(kept(even, 0.6), 0.6)
  one = jnp.zeros((rows, length, 1), jnp.int32)  # all want expert 0, which takes a quarter
  assert near(kept(one, 1.0), 0.25) and near(kept(one, 1.25), 0.3125)
  assert kept(one, 1.0, jnp.float32(0)).all()
  # Padding is no load: among the first five slots a third of the rows is padding.
  half = jnp.where(real, jnp.arange(rows)[:, None] % 2, 0)[..., None]
  assert near(kept(half, 1.0)[20:, :5], 0.5)


@pytest.mark.slow
def test_replayed_routes_undo_the_mismatch_and_the_router_learns():
  rng = np.random.default_rng(0)
  draw = lambda width: jnp.asarray(rng.integers(2, V, (8, width)).astype(np.int32))
  blank, valid = jnp.zeros(8, jnp.int32), jnp.ones((8, 5), bool)
  zero = 0.0 * valid
  text = types.Rollout(
    draw(3), blank, draw(5), valid, None, None, zero, None, 0 * valid, blank, zero[:, 0]
  )
  engine = routing.routing_hooks(routing.Routing(jitter=0.3, flips=(0.3,)))

  def trainer(params, hooks):
    hidden, aux = scoring.score(params, CONFIG, text, hooks=hooks)
    logits = policy.logits(params, hidden)
    return divergences.logp(logits, text.tokens).sum(), (logits, aux)

  @jax.jit
  def compare(params):
    hidden, rolled = scoring.rescore(params, CONFIG, text, KEY, samples=2, hooks=engine)
    rollout_logits = policy.logits(params, hidden)
    learns = jax.grad(trainer, has_aux=True)
    ids, both = (
      learns(params, routing.replay(rolled.routes, gates)) for gates in (None, rolled.gates)
    )
    found = []
    for grads, (logits, aux) in ((params, trainer(params, policy.Hooks())[1]), ids, both):
      agree = 1 - routing.flip_rate(aux.routes, rolled.routes, jnp.ones((8, 7), bool))
      router = jnp.abs(grads['layers']['mlp']['router']['kernel']).max()
      kl = divergences.kl(logits, rollout_logits).mean()
      found.append((agree[0], kl, router, jnp.abs(aux.gates - rolled.gates).max()))
    return found

  plain, ids, both = compare(parameters())
  assert plain[0] < 0.9 and ids[0] == 1 and both[0] == 1
  assert plain[1] > 2 * ids[1] > 0 and both[1] < 1e-9 < ids[1]
  assert ids[3] > 0.01 and both[3] == 0
  assert ids[2] > 1e-3 and both[2] > 1e-3
  # Each layer is handed its own experts.
  routes = jnp.arange(12).reshape(1, 2, 3, 2)
  scores, own = jnp.zeros((1, 2, 12)), jnp.zeros((1, 2, 2), int)
  for layer in range(3):
    chosen = routing.replay(routes).routes(scores, own, jnp.int32(layer), None)
    np.testing.assert_array_equal(chosen, routes[:, :, layer])


MOE2 = dataclasses.replace(CONFIG, experts_per_token=2)
DENSE = dataclasses.replace(CONFIG, experts=0)
ALL4 = dataclasses.replace(CONFIG, experts_per_token=4)


@pytest.mark.parametrize(
  'dials, config, match',
  [
    (dict(flips=(1.5,)), MOE2, r'routing.flips=\(1.5,\) must hold shares'),
    (dict(capacity=0.0), MOE2, 'routing.capacity=0.0 must be > 0'),
    (dict(dtype='int8'), MOE2, "routing.dtype='int8' has no fixed grid"),
    (dict(dtype='int4'), MOE2, "routing.dtype='int4' is not one of"),
    (dict(jitter=0.5), DENSE, 'routing.jitter=0.5 needs experts, but policy.experts=0 is a dense'),
    (dict(flips=(0.5,)), DENSE, r'routing.flips=\(0.5,\) needs experts'),
    (dict(flips=(0.5,)), ALL4, 'no expert to flip to: policy.experts_per_token=4'),
    (
      dict(flips=(0.5, 0.1)),
      MOE2,
      'routing.flips holds 2 shares, but policy.layers=1: give 1, or one',
    ),
  ],
)
def test_impossible_routing(dials, config, match):
  with pytest.raises(types.InputError, match=match):
    fleet.Fleet(engine=fleet.Engine(routing=routing.Routing(**dials))).check(config, 4)


def test_no_jitter_no_hook():
  assert routing.router_hook(routing.Routing(), jnp.float32(1)) is None
  for bad in (-1.0, float('nan')):
    with pytest.raises(types.InputError, match=f'routing.jitter={bad}'):
      routing.Routing(jitter=bad)
  for bad in (0.0, 1.5, float('nan')):
    with pytest.raises(types.InputError, match=f'routing.rate={bad}.*jitter=0'):
      routing.Routing(jitter=1.0, rate=bad)


# Staleness


def version_of(step):
  return {'a': jnp.full(2, step, jnp.float32), 'b': {'c': jnp.full((1, 3), step, jnp.float32)}}


@pytest.mark.parametrize('k', [1, 3])
def test_history_holds_exactly_the_past_versions(k):
  history = staleness.start_history(version_of(0), 3)
  for step in range(7):
    current = version_of(step)
    old = staleness.weights(
      staleness.Staleness(steps=k), current, first=None, history=history, strength=1.0
    )
    equal(old, version_of(max(step - k, 0)))
    reported = staleness.reported_version(staleness.Staleness(steps=k), jnp.int32(step), 2)
    np.testing.assert_array_equal(reported, [max(step - k, 0)] * 2)
    assert reported.dtype == jnp.int32
    fresh = staleness.weights(
      staleness.Staleness(steps=k), current, first=None, history=history, strength=jnp.float32(0)
    )
    equal(fresh, current)
    off = staleness.reported_version(staleness.Staleness(steps=k), jnp.int32(step), 2, 0.0)
    np.testing.assert_array_equal(off, [step] * 2)
    history = staleness.push(history, current)
  assert jax.tree.leaves(history)[0].shape == (3, 2)


def test_no_history_and_stuck():
  current, first = version_of(5), version_of(0)
  assert staleness.start_history(current, 0) is None
  assert staleness.push(None, current) is None
  fresh = staleness.Staleness()
  assert staleness.weights(fresh, current, first=first, history=None) is current
  stuck = staleness.Staleness(stuck=True)
  equal(staleness.weights(stuck, current, first=first, history=None), first)
  equal(staleness.weights(stuck, current, first=first, history=None, strength=0.0), current)
  reported = staleness.reported_version(stuck, jnp.int32(5), 2)
  np.testing.assert_array_equal(reported, [5, 5])  # and that is the lie


def test_staleness_errors():
  with pytest.raises(types.InputError, match='staleness.steps=-1'):
    staleness.Staleness(steps=-1)
  with pytest.raises(types.InputError, match='staleness.steps=2 contradicts staleness.stuck'):
    staleness.Staleness(steps=2, stuck=True)
  with pytest.raises(types.InputError, match='first=None.*stuck'):
    staleness.weights(staleness.Staleness(stuck=True), version_of(1), first=None, history=None)
  for history, held in ((None, 0), (staleness.start_history(version_of(0), 2), 2)):
    with pytest.raises(types.InputError, match=f'history holds {held} .*staleness.steps=3'):
      staleness.weights(staleness.Staleness(steps=3), version_of(1), first=None, history=history)


# Fleet


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=[pytest.mark.slow] * (n in ('all', 'precision', 'routing')))
    for n in ENGINES
  ],
)
def test_strength_zero_is_bit_identical_to_no_mismatch(name):
  healthy = run(fleet.Fleet())
  off, on = run(TEAMS[name], 0.0), run(TEAMS[name], 1.0)
  assert (off.engine == (name == 'stuck')).all()  # a fleet that is all broken says so
  equal(fields(off) | {'engine': healthy.engine}, fields(healthy))
  assert (np.asarray(on.logits) != healthy.logits).any()
  late = {'stale': 2, 'all': 1}.get(name, 0)
  assert (on.version == VERSION - late).all() and (healthy.version == VERSION).all()


def trace(fn):
  args = parameters(), jnp.asarray(TEXT), jnp.asarray(START)
  return jax.make_jaxpr(lambda *xs: fields(fn(*xs)))(*args)


def test_an_engine_without_mismatch_is_the_bare_sampler():
  def bare(params, text, start):
    request = Request(samples=SAMPLES, length=LENGTH, eos=EOS, pad=PAD)
    part = sampling.generate(params, CONFIG, text, start, KEY, request)
    version = staleness.reported_version(staleness.Staleness(), jnp.int32(VERSION), LENGTH, 1.0)
    return dataclasses.replace(part, version=part.version + version[None], engine=part.engine + 0)

  wrapped = lambda params, text, start: roll(fleet.Fleet(), params, None, None, text, start)
  assert str(trace(wrapped)) == str(trace(bare))
  assert fleet.engine_hooks(fleet.Engine(), 1.0) == policy.Hooks()


@pytest.mark.parametrize('name', ['precision', 'routing', 'stale'])
def test_only_what_is_configured_is_traced(name):
  team = fleet.Fleet(engine=ENGINES[name])
  history = jax.tree.map(lambda p: jnp.stack([p] * 2), parameters())
  text = str(trace(lambda p, t, s: roll(team, p, None, history, t, s)))
  assert ('f8_e5m2' in text) == (name == 'precision')
  assert ('erf_inv' in text) == (name == 'routing')  # normal noise
  hooks = fleet.engine_hooks(ENGINES[name])
  on = [field for field, value in vars(hooks).items() if value is not None]
  assert on == {'precision': ['activation', 'kv'], 'routing': ['router'], 'stale': []}[name]


@pytest.mark.slow
def test_engines_act_as_their_parts():
  """Each source equals the bare sampler run with the disturbed weights or hooks."""
  text = jnp.asarray(TEXT), jnp.asarray(START)
  request = Request(samples=SAMPLES, length=LENGTH, eos=EOS, pad=PAD)
  bare = jax.jit(lambda params: sampling.generate(params, CONFIG, *text, KEY, request))
  for name, params in (('stale', parameters(2)), ('stuck', parameters(3))):
    got, want = run(TEAMS[name]), bare(params)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.logits, want.logits)
  weights = fleet.Engine(precision=precision.Precision(weights='float8_e5m2'))
  rounded = jax.tree_util.tree_map_with_path(
    lambda path, p: p if 'scale' in path[-1].key else p.astype('float8_e5m2').astype(p.dtype),
    parameters(),
  )
  np.testing.assert_array_equal(run(fleet.Fleet(engine=weights)).logits, bare(rounded).logits)


@functools.cache
def battery():
  """All sources in one program: (rollout, the trainer's KL and log-probs) for given strengths."""

  def measure(params, first, history, text, start, strengths):
    rollout = roll(
      TEAMS['all'], params, first, history, text, start, strength=strengths, score='replay'
    )
    hidden, _ = scoring.score(params, CONFIG, rollout)
    logits = policy.logits(params, hidden)
    kl = divergences.kl(logits, rollout.logits)
    return fields(rollout), kl, scoring.token_logp(logits, rollout.tokens, rollout.valid)

  return jax.jit(measure)


def measured(history=None, **strengths):
  """(rollout, mean KL, mean |log_ratio|), the sources at these strengths and the others off."""
  strengths = {name: jnp.float32(strengths.get(name, 0)) for name in SOURCES}
  held = parameters(), parameters(3), history or past()
  rollout, kl, logp = battery()(*held, TEXT, START, strengths)
  valid = np.asarray(rollout['valid'])
  kl, log_ratio = (np.asarray(x)[valid] for x in (kl, logp - rollout['logp']))
  return rollout, kl.mean(), np.abs(np.nan_to_num(log_ratio, nan=9.0)).mean()


@pytest.mark.slow
def test_all_sources_off_is_the_healthy_engine():
  rollout, kl, log_ratio = measured()
  assert kl == 0 and log_ratio == 0
  equal(rollout, fields(run(fleet.Fleet(), score='replay')))


@pytest.mark.slow
@pytest.mark.parametrize('source', SOURCES)
def test_each_source_acts_alone_and_again_the_same(source):
  rollout, kl, log_ratio = measured(**{source: 1})
  if source == 'reporting':
    assert kl == 0 and log_ratio > 0.3
    off, *_ = measured()
    equal(rollout | {'logp': off['logp']}, off)
  elif source == 'reduction':
    assert 0 < kl < 1e-6
  else:
    assert kl > 1e-4 and log_ratio > 1e-3
  equal(measured(**{source: 1})[0], rollout)


@pytest.mark.slow
def test_sources_compose_and_grow():
  for source, place in (('routing', 1), ('heavy_tail', 1), ('reporting', 2)):
    found = [measured(**{source: s})[place] for s in (0.1, 0.4, 1.0)]
    assert 0 < found[0] < found[1] < found[2], source
  # Staleness has no strength but age: weights ever further from the current ones.
  away = lambda share: jax.tree.map(
    lambda p, h: p[None] + share * (h - p[None]), parameters(), past()
  )
  found = [measured(away(share), staleness=1)[1] for share in (0.1, 0.4, 1.0)]
  assert 0 < found[0] < found[1] < found[2]
  alone = {source: measured(**{source: 1})[1] for source in SOURCES}
  *_, log_ratio = measured(**dict.fromkeys(SOURCES, 1))
  pair, kl, _ = measured(decoding=1, heavy_tail=1)
  assert kl > alone['heavy_tail'] and log_ratio > 0.3
  assert (np.asarray(pair['logits']) == -np.inf).any()
  with pytest.raises(types.InputError, match="strength names 'roting', which is not one of"):
    fleet.engine_hooks(ENGINES['routing'], {'roting': 0.0})


@pytest.mark.slow
def test_the_trainer_is_untouched():
  """Its forward pass and gradient are the same program before and after any engine has run."""

  def loss(params, rollout):
    return scoring.policy_logp(params, CONFIG, types.Rollout(**rollout)).sum()

  rollout = fields(run(fleet.Fleet()))
  before = str(jax.make_jaxpr(jax.grad(loss))(parameters(), rollout))
  measured(**dict.fromkeys(SOURCES, 1))
  assert str(jax.make_jaxpr(jax.grad(loss))(parameters(), rollout)) == before


def test_what_hidden_states_cannot_hold():
  for engine in (
    fleet.Engine(decoding=decoding.Decoding(top_k=3)),
    fleet.Engine(heavy_tail=heavy_tail.HeavyTail(scale=1.0)),
    fleet.Engine(reduction=reduction.Reduction(permute=True)),
  ):
    with pytest.raises(types.InputError, match="store='hidden' .*use store='logits'"):
      team = fleet.Fleet(engine=engine)
      roll(team, parameters(), None, None, jnp.asarray(TEXT), jnp.asarray(START), store='hidden')
  team = fleet.Fleet(engine=fleet.Engine(reporting=reporting.Reporting(scrambled=0.5)))
  with pytest.raises(types.InputError, match='scrambled=0.5 needs'):
    team.check(CONFIG, 1)


TEAM = fleet.Fleet(broken=ENGINES['stuck'], broken_samples=1)


@functools.cache
def trainer():
  def full(params, **rollout):
    hidden, _ = scoring.score(params, CONFIG, types.Rollout(**rollout))
    return policy.logits(params, hidden)

  return jax.jit(full)


@pytest.mark.slow
def test_broken_rows_sit_last_in_each_prompt_and_healthy_rows_are_exact():
  rollout = run(TEAM, score='replay')
  np.testing.assert_array_equal(rollout.prompts, TEXT.repeat(SAMPLES, 0))
  np.testing.assert_array_equal(rollout.start, START.repeat(SAMPLES))
  np.testing.assert_array_equal(rollout.engine, [0, 0, 1] * PROMPTS)
  assert (rollout.version == VERSION).all()  # the stuck replica says so too
  whole = run(fleet.Fleet())
  broken = np.asarray(rollout.engine) == 1
  np.testing.assert_array_equal(rollout.tokens[~broken], np.asarray(whole.tokens)[~broken])
  valid = np.asarray(rollout.valid)
  kl = np.asarray(divergences.kl(trainer()(parameters(), **fields(rollout)), rollout.logits))
  assert kl[~broken][valid[~broken]].max() < 1e-9
  assert (kl[broken] * valid[broken]).max(1).min() > 1e-4  # every broken row shows
  # In one batch shape and one program the healthy rows are the trainer's bit for bit.
  half = {k: None if v is None else v[~broken] for k, v in fields(rollout).items()}
  logits = trainer()(parameters(), **half)
  same = divergences.kl(logits, half['logits'])
  assert np.asarray(same)[valid[~broken]].max() == 0
  # The broken rows are the first weights' own.
  kl = np.asarray(divergences.kl(trainer()(parameters(3), **fields(rollout)), rollout.logits))
  assert kl[broken][valid[broken]].max() < 1e-9


@pytest.mark.slow
def test_samples_of_both_engines_draw_from_streams_of_their_own():
  """Two engines with the same settings give together what one engine gives alone."""
  engine = ENGINES['routing']
  one = fields(run(TEAMS['routing']))
  two = fields(run(fleet.Fleet(engine=engine, broken=engine, broken_samples=2)))
  np.testing.assert_array_equal(two.pop('engine'), [0, 1, 1] * PROMPTS)
  one.pop('engine')
  for name, leaf in one.items():
    if leaf is None:
      assert two[name] is None
    else:
      np.testing.assert_allclose(two[name], leaf, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_replay_and_decode_tell_the_same_story():
  decoded = run(MIXED, temperature=1.3, score='decode')
  replayed = run(MIXED, temperature=1.3, score='replay')
  for name in ('tokens', 'valid', 'engine', 'version', 'start'):
    np.testing.assert_array_equal(getattr(replayed, name), getattr(decoded, name))
  valid = np.asarray(decoded.valid)
  np.testing.assert_allclose(replayed.logp, decoded.logp, rtol=0, atol=2e-5)
  np.testing.assert_allclose(
    np.asarray(replayed.logits)[valid], np.asarray(decoded.logits)[valid], rtol=0, atol=5e-5
  )
  logp = divergences.logp(replayed.logits, replayed.tokens, temperature=1.3)
  np.testing.assert_allclose(replayed.logp[valid], logp[valid], rtol=0, atol=1e-6)


def test_fleet_questions():
  assert fleet.Fleet().shares(4) == [(fleet.Engine(), 4)]
  assert TEAMS['stuck'].shares(SAMPLES) == [(ENGINES['stuck'], SAMPLES)]
  assert TEAM.shares(4) == [(fleet.Engine(), 3), (ENGINES['stuck'], 1)]
  assert TEAM.stuck and not fleet.Fleet().stuck and fleet.Fleet(engine=ENGINES['stuck']).stuck
  assert TEAM.history == fleet.Fleet().history == 0
  mixed = fleet.Fleet(engine=ENGINES['all'], broken=ENGINES['stale'], broken_samples=1)
  assert mixed.history == 2 and not mixed.stuck


def test_fleet_errors():
  with pytest.raises(types.InputError, match='fleet.broken_samples=-1'):
    fleet.Fleet(broken_samples=-1)
  with pytest.raises(types.InputError, match='fleet.broken_samples is 0'):
    fleet.Fleet(broken=ENGINES['stuck'])
  with pytest.raises(types.InputError, match='fleet.broken_samples=5 exceeds samples=4'):
    fleet.Fleet(broken_samples=5).shares(4)
  with pytest.raises(types.InputError, match='first=None'):
    roll(TEAM, parameters(), None, None, jnp.asarray(TEXT), jnp.asarray(START))
  with pytest.raises(types.InputError, match='temperature=0'):
    roll(
      fleet.Fleet(),
      parameters(),
      None,
      None,
      jnp.asarray(TEXT),
      jnp.asarray(START),
      temperature=0.0,
    )


@pytest.mark.parametrize(
  'team, mesh, score',
  [
    pytest.param('mixed', (4, 2), 'decode', marks=pytest.mark.slow),
    pytest.param('all', (4, 2), 'decode', marks=pytest.mark.slow),
    pytest.param('all', (8, 1), 'replay', marks=pytest.mark.slow),
  ],
)
def test_meshes_agree(team, mesh, score):
  args = parameters(), parameters(3), past()
  team = MIXED if team == 'mixed' else TEAMS[team]
  options = {} if score == 'decode' else {'score': score}
  want = run(team, **options)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    fresh = jax.eval_shape(lambda key: policy.init(key, CONFIG, V), jax.random.key(0))
    place = lambda tree: jax.tree.map(
      lambda p, f: jax.device_put(
        np.asarray(p), f.sharding.spec if p.ndim == f.ndim else P(None, *f.sharding.spec)
      ),
      tree,
      fresh,
    )
    rows = lambda x: jax.device_put(x, P('data'))
    got = jax.jit(functools.partial(roll, team, **options))(
      *map(place, args), rows(TEXT), rows(START), jnp.float32(1)
    )
  for name in ('tokens', 'valid', 'engine', 'version', 'prompts', 'start'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=1e-3)
  np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-3)
