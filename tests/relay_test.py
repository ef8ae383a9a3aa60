"""`relay`: weights that change during a response, and the staleness within one trajectory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import asked

from trm_jax import divergences, policy, types
from trm_jax.measurements import metrics
from trm_jax.mesh import sharding
from trm_jax.mismatch import decoding, fleet, precision, routing, staleness
from trm_jax.rollouts import sampling, scoring
from trm_jax.rollouts.relay import Relay
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record

V, PAD, EOS = 12, 0, 1
PROMPTS, SAMPLES, WIDTH, LENGTH, VERSION = 8, 2, 4, 7, 9
CONFIG = policy.PolicyConfig(
  width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=16, experts=4
)
START = np.array([0, 2, 1, 0, 3, 1, 2, 0], np.int32)
TEXT = np.random.default_rng(0).integers(2, V, (PROMPTS, WIDTH)).astype(np.int32)
KEY = jax.random.key(11)
AGES = [2, 2, 1, 1, 0, 0, 0]  # of each token


def team(**dials):
  return fleet.Fleet(engine=fleet.Engine(staleness=staleness.Staleness(**dials)))


SWITCHED = team(steps=2, switch=2)


@functools.cache
def parameters(seed=0):
  return jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(seed), CONFIG, V)


@functools.cache
def past():
  """History of two versions: one step ago seed 1, two steps ago seed 2."""
  return jax.tree.map(lambda *p: jnp.stack(p), parameters(1), parameters(2))


def generate(which, score, params, history, prompts, start, strength, **options):
  options = dict(samples=SAMPLES, length=LENGTH, eos=EOS, pad=PAD, gates=True) | options
  request, record, rest = asked(score=score, **options)
  shared = dict(version=jnp.int32(VERSION), history=history, strength=strength)
  text = prompts, start
  return fleet.generate(which, params, CONFIG, *text, KEY, request, record, **shared, **rest)


@functools.cache
def program(which, score):
  return jax.jit(functools.partial(generate, which, score))


@functools.cache
def roll(which=SWITCHED, score='decode', strength=1.0):
  return program(which, score)(parameters(), past(), TEXT, START, jnp.float32(strength))


def equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


@functools.cache
def by_hand():
  """(logits, experts, their weights) of the rollout's tokens: one pass a token, by a plain loop."""
  rollout = roll()
  rows, start = rollout.tokens.shape[0], jnp.asarray(rollout.start)
  step = jax.jit(
    lambda params, tokens, slot, cache: policy.apply(
      params, CONFIG, tokens, start=start, slot=slot, cache=cache
    )
  )
  cache = policy.init_cache(CONFIG, rows, WIDTH + LENGTH)
  fed = jnp.asarray(rollout.prompts)
  found = []
  for t, age in enumerate(AGES):
    params = parameters(age)
    slot = 0 if t == 0 else WIDTH + t - 1
    hidden, cache, aux = step(params, fed, jnp.int32(slot), cache)
    found.append((policy.logits(params, hidden[:, -1:]), aux.routes[:, -1:], aux.gates[:, -1:]))
    fed = jnp.asarray(rollout.tokens[:, t : t + 1])
  return [np.concatenate(parts, 1) for parts in zip(*found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize('score', ['decode', pytest.param('replay', marks=pytest.mark.slow)])
def test_tokens_come_from_the_weights_of_their_turn_over_the_cache_of_those_before(score):
  rollout, (logits, routes, gates) = roll(score=score), by_hand()
  valid = np.asarray(rollout.valid)
  assert valid[:, -1].any() and not valid.all()
  np.testing.assert_allclose(np.asarray(rollout.logits)[valid], logits[valid], rtol=0, atol=2e-5)
  logp = np.asarray(divergences.logp(jnp.asarray(logits), rollout.tokens))
  np.testing.assert_allclose(np.asarray(rollout.logp)[valid], logp[valid], rtol=0, atol=2e-5)
  shifted = lambda x: np.asarray(x)[:, WIDTH - 1 :][valid]
  np.testing.assert_array_equal(shifted(rollout.routes), routes[valid])
  np.testing.assert_allclose(shifted(rollout.gates), gates[valid], rtol=0, atol=1e-5)
  np.testing.assert_array_equal(rollout.version, [[VERSION - age for age in AGES]] * len(valid))
  for name in ('tokens', 'valid'):
    np.testing.assert_array_equal(getattr(rollout, name), getattr(roll(), name))


@pytest.mark.slow
def test_each_version_shows_and_so_does_the_old_cache():
  """Against one pass with the same weights throughout, which has a cache of their own."""
  rollout = roll()
  valid = np.asarray(rollout.valid)
  for age in range(3):
    logits = scorer()(parameters(age), rollout)
    kl = np.asarray(divergences.kl(logits, rollout.logits))
    own = valid & (np.array(AGES) == age)[None]
    if age == 2:  # the oldest has seen nothing but its own cache
      assert kl[own].max() < 1e-9
    else:
      assert 1e-4 < kl[own].mean() < kl[valid & ~own].mean() and kl[own].min() > 1e-7


@functools.cache
def scorer():
  def full(params, rollout):
    hidden, _ = scoring.score(params, CONFIG, rollout)
    return policy.logits(params, hidden)

  return jax.jit(full)


@pytest.mark.parametrize(
  'score',
  [pytest.param('decode', marks=pytest.mark.slow), pytest.param('replay', marks=pytest.mark.slow)],
)
def test_strength_zero_and_a_switch_after_the_end_change_no_bit(score):
  equal(roll(SWITCHED, score, 0.0), roll(fleet.Fleet(), score))
  if score == 'decode':
    equal(roll(team(steps=2, switch=LENGTH)), roll(team(steps=2)))


@pytest.mark.slow
def test_the_same_key_gives_the_same_tokens_on_8_devices():
  want = roll()
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    fresh = policy.shapes(CONFIG, V)
    place = lambda x, f, *lead: jax.device_put(np.asarray(x), jax.P(*lead, *f.sharding.spec))
    params = jax.tree.map(place, parameters(), fresh)
    history = jax.tree.map(lambda x, f: place(x, f, None), past(), fresh)
    rows = lambda x: jax.device_put(x, jax.P('data'))
    again = jax.jit(functools.partial(generate, SWITCHED, 'replay'))
    got = again(params, history, rows(TEXT), rows(START), jnp.float32(1))
  for name in ('tokens', 'valid', 'version'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  valid = np.asarray(want.valid)
  shifted = lambda r: np.asarray(r.routes)[:, WIDTH - 1 :][valid]
  np.testing.assert_array_equal(shifted(got), shifted(want))
  for name in ('logits', 'logp'):
    np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=0, atol=1e-4)


def test_turns_of_a_relay():
  relay = Relay({'a': jnp.arange(3)[:, None]}, 2)
  turns = [(int(p['a'][0]), first, end) for p, first, end in relay.turns(7)]
  assert turns == [(0, 0, 2), (1, 2, 4), (2, 4, 7)]
  assert [(first, end) for _, first, end in relay.turns(3)] == [(0, 2), (2, 3)]
  assert [int(relay.at(jnp.int32(t))['a'][0]) for t in range(7)] == [0, 0, 1, 1, 2, 2, 2]


def test_ages_of_a_response():
  Staleness = staleness.Staleness
  assert Staleness(steps=3, switch=4).ages(10) == (3, 2, 1)
  assert Staleness(steps=1, switch=4).ages(10) == (1, 0)
  assert Staleness(steps=5, switch=9).ages(9) == (5,)
  assert Staleness(steps=3).ages(10) == (3,) and Staleness().ages(10) == (0,)
  mixed = dataclasses.replace(team(steps=1), broken=SWITCHED.engine, broken_samples=1)
  assert mixed.ages(2, LENGTH) == (0, 1, 2) and mixed.history == 2
  # At the start of a run all versions are that of step 0.
  reported = staleness.reported_version(Staleness(steps=2, switch=1), jnp.int32(1), 4)
  np.testing.assert_array_equal(reported, [0, 0, 1, 1])


def test_log_probs_of_the_version_that_drew_each_token():
  """A stand-in for the trainer's log-prob: the number of the version, as the token says it."""
  version = jnp.int32(VERSION)
  numbered = lambda v: {'a': jnp.full((1,), v, jnp.float32)}
  history = jax.tree.map(lambda *x: jnp.stack(x), *(numbered(VERSION - 1 - i) for i in range(2)))
  reported = jnp.array([[9, 8, 7, 9], [7, 7, 9, 8]])
  fn = lambda params: params['a'][0] + jnp.zeros(reported.shape)
  at = dict(version=version, history=history, ages=(0, 1, 2))
  got = staleness.of_version(fn, reported, fn(numbered(VERSION)), **at)
  np.testing.assert_array_equal(got, reported)
  # What the engine says counts: versions nobody holds are taken for the current one.
  strange = staleness.of_version(fn, reported - 5, fn(numbered(VERSION)), **at)
  np.testing.assert_array_equal(strange, jnp.full(reported.shape, VERSION))


def test_ages_are_measured_on_valid_tokens():
  version = jnp.array([[7, 8, 9], [9, 9, 0]])
  valid = jnp.array([[True, True, True], [True, True, False]])
  found = metrics.ages(version, valid, jnp.int32(9))
  assert float(found['age/mean']) == pytest.approx(3 / 5) and float(found['age/max']) == 2
  assert found['age/min'] == found['age/impossible'] == 0


def test_a_version_that_cannot_be_is_counted_and_has_no_age():
  version = jnp.array([[9, 5, 4], [-1, 2, 0]])
  valid = jnp.array([[True, True, True], [True, False, False]])
  found = metrics.ages(version, valid, jnp.int32(6))
  assert found['age/impossible'] == 0.5  # 9 at step 6, and -1
  assert (found['age/mean'], found['age/min'], found['age/max']) == (1.5, 1, 2)


@pytest.mark.parametrize(
  'dials, match',
  [
    (dict(steps=2, switch=0), 'staleness.switch=0 must be at least 1 token'),
    (dict(switch=2), 'staleness.switch=2 needs staleness.steps >= 1'),
    (dict(stuck=True, switch=2), 'staleness.switch=2 needs'),
  ],
)
def test_errors(dials, match):
  with pytest.raises(types.InputError, match=match):
    staleness.Staleness(**dials)


def test_what_hidden_states_and_a_dense_policy_cannot_hold():
  with pytest.raises(types.InputError, match="store='hidden' .*staleness.switch.*use store="):
    SWITCHED.check(CONFIG, SAMPLES, 'hidden')
  weights = Relay(past(), 2)
  request = Request(samples=1, length=3, eos=EOS, pad=PAD)
  text = jnp.asarray(TEXT), jnp.asarray(START)
  with pytest.raises(types.InputError, match="store='hidden' cannot hold the heads of weights"):
    sampling.generate(weights, CONFIG, *text, KEY, request, Record(store='hidden'))
  dense = dataclasses.replace(CONFIG, experts=0)
  with pytest.raises(types.InputError, match='gates=True needs experts'):
    sampling.generate(parameters(), dense, *text, KEY, request, Record(gates=True))


@pytest.mark.slow
def test_every_source_acts_on_every_version():
  """Noise, rounded weights and two engines beside the switch: replay repeats what decode did."""
  engine = fleet.Engine(
    staleness=SWITCHED.engine.staleness,
    precision=precision.Precision(weights='bfloat16', attention='bfloat16'),
    routing=routing.Routing(jitter=1.0, capacity=1.0),
  )
  which = fleet.Fleet(engine=engine, broken=SWITCHED.engine, broken_samples=1)
  decoded, replayed = (roll(which, score) for score in ('decode', 'replay'))
  valid = np.asarray(decoded.valid)
  shifted = lambda x: np.asarray(x)[:, WIDTH - 1 :][valid]
  np.testing.assert_array_equal(shifted(replayed.routes), shifted(decoded.routes))
  for a, b in ((replayed.logits, decoded.logits), (replayed.logp, decoded.logp)):
    np.testing.assert_allclose(np.asarray(a)[valid], np.asarray(b)[valid], rtol=0, atol=5e-3)


@pytest.mark.slow
def test_engines_of_any_hooks_stand_side_by_side_on_a_mesh():
  """Traced alone: the scores of both have one layout, whatever was done to them."""
  filters = fleet.Engine(decoding=decoding.Decoding(top_k=5))
  which = dataclasses.replace(SWITCHED, broken=filters, broken_samples=1)
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    fresh = policy.shapes(CONFIG, V)
    place = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(
      shape, dtype, sharding=jax.NamedSharding(jax.sharding.get_mesh(), jax.P(*axes))
    )
    history = jax.tree.map(lambda x: place((2, *x.shape), x.dtype, None, *x.sharding.spec), fresh)
    rows = (place(x.shape, x.dtype, 'data') for x in (TEXT, START))
    run = functools.partial(generate, which, 'replay')
    found = jax.eval_shape(run, fresh, history, *rows, jnp.float32(1))
  assert found.logits.shape == (PROMPTS * SAMPLES, LENGTH, V)
  assert found.logits.sharding.spec == jax.P('data', None, 'model')
