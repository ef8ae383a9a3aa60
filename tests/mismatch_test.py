"""trm_jax.mismatch: each source does what it says, and off means off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from trm_jax import divergences, policy, sampling, sharding, types
from trm_jax.mismatch import fleet, precision, routing, staleness

V, PAD, EOS = 12, 0, 1
PROMPTS, SAMPLES, WIDTH, LENGTH, VERSION = 8, 3, 4, 3, 7
CONFIG = policy.PolicyConfig(
  width=16, layers=1, heads=4, kv_heads=2, head_width=4, mlp_width=24, experts=4
)
START = np.array([0, 2, 1, 0, 3, 1, 2, 0], np.int32)
TEXT = np.random.default_rng(0).integers(2, V, (PROMPTS, WIDTH)).astype(np.int32)
KEY = jax.random.key(11)
LOW = precision.Precision(weights='float8_e5m2', activations='float8_e4m3fn', kv='float8_e5m2')
ENGINES = {
  'precision': fleet.Engine(precision=LOW),
  'routing': fleet.Engine(routing=routing.Routing(jitter=2.0, rate=0.7)),
  'stale': fleet.Engine(staleness=staleness.Staleness(steps=2)),
  'stuck': fleet.Engine(staleness=staleness.Staleness(stuck=True)),
  'all': fleet.Engine(
    precision=LOW,
    routing=routing.Routing(jitter=2.0),
    staleness=staleness.Staleness(steps=1),
  ),
}
TEAMS = {name: fleet.Fleet(engine=engine) for name, engine in ENGINES.items()}
TEAMS['stuck'] = fleet.Fleet(broken=ENGINES['stuck'], broken_samples=SAMPLES)
MIXED = fleet.Fleet(
  engine=ENGINES['routing'],
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
  return fleet.generate(
    team,
    params,
    CONFIG,
    prompts,
    start,
    KEY,
    version=jnp.int32(VERSION),
    first=first,
    history=history,
    strength=strength,
    **options,
  )


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
  hooks = precision.hooks(precision.Precision(activations='float8_e5m2'), jnp.float32(1))
  assert hooks.kv is None and hooks.router is None
  np.testing.assert_array_equal(hooks.activation(x), precision.round_to(x, 'float8_e5m2'))
  hooks = precision.hooks(precision.Precision(kv='bfloat16'), jnp.float32(0))
  assert hooks.activation is None
  np.testing.assert_array_equal(hooks.kv(x), x)


@pytest.mark.parametrize('name', ['weights', 'activations', 'kv'])
def test_bad_formats(name):
  with pytest.raises(types.InputError, match=f"precision.{name}='int4' is not one of bfloat16"):
    precision.Precision(**{name: 'int4'})


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
    hook = routing.hook(routing.Routing(jitter=jitter, rate=rate), strength)
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


def test_flips_grow_with_jitter():
  tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (16, 20)).astype(np.int32))
  keys = jax.random.split(jax.random.key(2), (16, 20))

  @jax.jit
  def routes(strength):
    hooks = policy.Hooks(router=routing.hook(routing.Routing(jitter=1.0), strength))
    start = jnp.zeros(16, jnp.int32)
    _, _, aux = policy.apply(
      parameters(), CONFIG, tokens, start=start, noise_keys=keys, hooks=hooks
    )
    return aux.routes

  clean, everything = routes(0.0), jnp.ones((16, 20), bool)
  rates = [float(routing.flip_rate(routes(s), clean, everything)[0]) for s in (0, 0.1, 0.5, 2, 50)]
  assert rates[0] == 0 and all(a < b for a, b in zip(rates, rates[1:], strict=False))
  assert abs(rates[-1] - 3 / 4) < 0.1  # pure noise picks any of 4 experts


def test_no_jitter_no_hook():
  assert routing.hook(routing.Routing(), jnp.float32(1)) is None
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
    reported = staleness.reported_version(staleness.Staleness(steps=k), jnp.int32(step))
    assert int(reported) == max(step - k, 0) and reported.dtype == jnp.int32
    fresh = staleness.weights(
      staleness.Staleness(steps=k), current, first=None, history=history, strength=jnp.float32(0)
    )
    equal(fresh, current)
    assert (
      int(staleness.reported_version(staleness.Staleness(steps=k), jnp.int32(step), 0.0)) == step
    )
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
  assert int(staleness.reported_version(stuck, jnp.int32(5))) == 5  # and that is the lie


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


@pytest.mark.parametrize('name', ENGINES)
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
    part = sampling.generate(
      params,
      CONFIG,
      text,
      start,
      KEY,
      samples=SAMPLES,
      length=LENGTH,
      eos=EOS,
      pad=PAD,
      first_sample=0,
      temperature=1.0,
    )
    version = staleness.reported_version(staleness.Staleness(), jnp.int32(VERSION), 1.0)
    return dataclasses.replace(part, version=part.version + version, engine=part.engine + 0)

  wrapped = lambda params, text, start: roll(fleet.Fleet(), params, None, None, text, start)
  assert str(trace(wrapped)) == str(trace(bare))
  assert fleet.hooks(fleet.Engine(), 1.0) == policy.Hooks()


@pytest.mark.parametrize('name', ['precision', 'routing', 'stale'])
def test_only_what_is_configured_is_traced(name):
  team = fleet.Fleet(engine=ENGINES[name])
  history = jax.tree.map(lambda p: jnp.stack([p] * 2), parameters())
  text = str(trace(lambda p, t, s: roll(team, p, None, history, t, s)))
  assert ('f8_e5m2' in text) == (name == 'precision')
  assert ('erf_inv' in text) == (name == 'routing')  # normal noise
  hooks = fleet.hooks(ENGINES[name])
  on = [field for field, value in vars(hooks).items() if value is not None]
  assert on == {'precision': ['activation', 'kv'], 'routing': ['router'], 'stale': []}[name]


def test_engines_act_as_their_parts():
  """Each source equals the bare sampler run with the disturbed weights or hooks."""
  bare = jax.jit(
    lambda params: sampling.generate(
      params,
      CONFIG,
      jnp.asarray(TEXT),
      jnp.asarray(START),
      KEY,
      samples=SAMPLES,
      length=LENGTH,
      eos=EOS,
      pad=PAD,
    )
  )
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


TEAM = fleet.Fleet(broken=ENGINES['stuck'], broken_samples=1)


@functools.cache
def trainer():
  def full(params, **rollout):
    hidden, _ = sampling.score(params, CONFIG, types.Rollout(**rollout))
    return policy.logits(params, hidden)

  return jax.jit(full)


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


def test_samples_of_both_engines_draw_from_streams_of_their_own():
  """Two engines with the same settings give together what one engine gives alone."""
  engine = ENGINES['routing']
  one = fields(run(TEAMS['routing']))
  two = fields(run(fleet.Fleet(engine=engine, broken=engine, broken_samples=2)))
  np.testing.assert_array_equal(two.pop('engine'), [0, 1, 1] * PROMPTS)
  one.pop('engine')
  for name, leaf in one.items():
    if name == 'hidden':
      assert leaf is None and two[name] is None
    else:
      np.testing.assert_allclose(two[name], leaf, rtol=0, atol=2e-5)


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
  'mesh, score', [((4, 2), 'decode'), pytest.param((8, 1), 'replay', marks=pytest.mark.slow)]
)
def test_meshes_agree(mesh, score):
  args = parameters(), parameters(3), past()
  want = run(MIXED, temperature=1.3, score=score)
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
    got = jax.jit(functools.partial(roll, MIXED, temperature=1.3, score=score))(
      *map(place, args), rows(TEXT), rows(START), jnp.float32(1)
    )
  for name in ('tokens', 'valid', 'engine', 'version', 'prompts', 'start'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=1e-3)
  np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-3)
