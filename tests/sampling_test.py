"""`sampling`: decode against the full pass, the bookkeeping of rows, and the draws."""

import argparse
import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import policy_oracle
import pytest
import scipy.stats
from asked import asked
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from trm_jax import divergences, policy, types
from trm_jax.divergences import brackets
from trm_jax.measurements import metrics
from trm_jax.mesh import sharding
from trm_jax.mismatch import precision, routing
from trm_jax.rollouts import sampling, scoring, stores
from trm_jax.rollouts.sampling import Request

V, PAD, EOS = 12, 0, 1
PROMPTS, SAMPLES, WIDTH, LENGTH = 8, 2, 5, 6
DENSE = policy.PolicyConfig(
  width=16, layers=1, heads=4, kv_heads=2, head_width=4, mlp_width=24, experts=0
)
MOE = dataclasses.replace(DENSE, layers=2, experts=4, experts_per_token=2)
CONFIGS = {'dense': DENSE, 'moe': MOE}
START = np.array([0, 4, 2, 0, 3, 1, 4, 0], np.int32)
TEXT = np.random.default_rng(0).integers(2, V, (PROMPTS, WIDTH)).astype(np.int32)
KEY = jax.random.key(11)
NOISY = policy.Hooks(
  kv=lambda x: precision.round_to(x, 'bfloat16'),
  router=routing.router_hook(routing.Routing(jitter=0.7, rate=0.6)),
)


@functools.cache
def parameters(config, pad=1.0, eos=0.7):
  """Sharp parameters that like PAD and EOS: coordinate 0 of the stream is large and constant."""
  params = jax.jit(policy.init, static_argnums=(1, 2))(jax.random.key(0), config, V)
  bias = jnp.zeros(V).at[PAD].set(pad).at[EOS].set(eos)
  embed = params['embed'].at[:, 0].set(6.0)
  return params | {'embed': embed, 'head': (2 * params['head']).at[:, 0].set(bias)}


@functools.cache
def generator(config, **options):
  options = {'samples': SAMPLES, 'length': LENGTH, 'eos': EOS, 'pad': PAD} | options
  request, record, rest = asked(**options)
  return jax.jit(
    lambda params, prompts, start, key: sampling.generate(
      params, config, prompts, start, key, request, record, **rest
    )
  )


@functools.cache
def rolled(config):
  return generator(config)(parameters(config), TEXT, START, KEY)


@functools.cache
def scorer(config):
  def full(params, rollout):
    hidden, aux = scoring.score(params, config, rollout)
    return hidden, policy.logits(params, hidden), aux

  return jax.jit(full)


def fields(rollout):
  """A rollout's arrays by name; its class admits no other leaves."""
  return {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}


def on_host(rollout):
  return argparse.Namespace(**jax.tree.map(np.asarray, fields(rollout)))


def equal(a, b):
  if isinstance(a, types.Rollout):
    a, b = fields(a), fields(b)
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[pytest.mark.slow] * (n in ('dense',))) for n in CONFIGS]
)
def test_decode_equals_the_full_pass(name):
  config = CONFIGS[name]
  rollout = rolled(config)
  valid, tokens = np.asarray(rollout.valid), np.asarray(rollout.tokens)
  # The hard cases are there: PAD as an action with tokens after it, in left-padded rows too.
  padded = (tokens[:, :-1] == PAD) & valid[:, :-1] & valid[:, 1:]
  assert (
    padded[np.asarray(rollout.start) > 0].any() and padded[np.asarray(rollout.start) == 0].any()
  )
  _, logits, aux = scorer(config)(parameters(config), rollout)
  kl = np.asarray(divergences.kl(logits, rollout.logits))
  assert kl.shape == valid.shape and kl[valid].max() < 1e-5
  np.testing.assert_allclose(logits[valid], rollout.logits[valid], rtol=0, atol=1e-4)
  logp = divergences.logp(logits, rollout.tokens)
  np.testing.assert_allclose(logp[valid], rollout.logp[valid], rtol=0, atol=1e-5)
  if not config.experts:
    assert rollout.routes is None and aux.routes is None
    return
  assert rollout.routes.shape == (16, WIDTH + LENGTH - 1, config.layers, 2)
  response = np.asarray(rollout.routes)[:, WIDTH - 1 :]
  np.testing.assert_array_equal(response[valid], np.asarray(aux.routes)[:, WIDTH - 1 :][valid])
  real = np.arange(WIDTH)[None] >= np.asarray(rollout.start)[:, None]
  np.testing.assert_array_equal(rollout.routes[:, :WIDTH][real], aux.routes[:, :WIDTH][real])


@pytest.mark.parametrize('name', CONFIGS)
def test_decode_equals_a_float64_decoder(name):
  config, rollout = CONFIGS[name], rolled(CONFIGS[name])
  inputs = np.concatenate([rollout.prompts, rollout.tokens], 1)[:, :-1]
  _, logits, _, routes = policy_oracle.apply(parameters(config), config, inputs, rollout.start)
  valid = np.asarray(rollout.valid)
  np.testing.assert_allclose(
    np.asarray(rollout.logits)[valid], logits[:, WIDTH - 1 :][valid], rtol=0, atol=1e-4
  )
  if config.experts:
    np.testing.assert_array_equal(
      np.asarray(rollout.routes)[:, WIDTH - 1 :][valid], routes[:, WIDTH - 1 :][valid]
    )


@pytest.mark.parametrize('name', CONFIGS)
def test_rows_end_at_their_eos(name):
  rollout = on_host(rolled(CONFIGS[name]))
  np.testing.assert_array_equal(rollout.prompts, TEXT.repeat(SAMPLES, 0))
  np.testing.assert_array_equal(rollout.start, START.repeat(SAMPLES))
  lengths = rollout.valid.sum(1)
  assert len(set(lengths)) > 2
  for row, n in enumerate(lengths):
    assert rollout.valid[row, :n].all() and n >= 1
    assert (rollout.tokens[row, : n - 1] != EOS).all()
    if n < LENGTH:
      assert rollout.tokens[row, n - 1] == EOS  # an action like any other
      assert (rollout.tokens[row, n:] == PAD).all()
      assert (rollout.logp[row, n:] == 0).all() and (rollout.logits[row, n:] == 0).all()
    assert (rollout.logp[row, :n] < 0).all()
  cut = (lengths == LENGTH) & (rollout.tokens[:, -1] != EOS)
  assert cut.any()  # rows without an EOS exist
  for leaf in (rollout.engine, rollout.reward):
    assert leaf.shape == (16,) and (leaf == 0).all()
  assert rollout.version.shape == rollout.tokens.shape and (rollout.version == 0).all()
  assert rollout.tokens.dtype == rollout.version.dtype == np.int32
  assert rollout.logits.dtype == rollout.logp.dtype == np.float32


def test_padding_of_prompts_and_slots_after_eos_are_irrelevant():
  params, rollout = parameters(MOE), rolled(MOE)
  real = np.arange(WIDTH)[None] >= START[:, None]
  junk = np.where(real, TEXT, 10**6).astype(np.int32)
  again = generator(MOE)(params, junk, START, KEY)
  equal(dataclasses.replace(again, prompts=rollout.prompts), rollout)
  valid = np.asarray(rollout.valid)
  dirty = dataclasses.replace(
    rollout, prompts=again.prompts, tokens=jnp.where(rollout.valid, rollout.tokens, -7)
  )
  equal(scorer(MOE)(params, dirty), scorer(MOE)(params, rollout))
  assert not valid.all()


@pytest.mark.slow
def test_generation_stops_when_every_row_has_ended():
  passes = []

  def count(x):
    jax.debug.callback(lambda: passes.append(1))
    return x

  run = generator(DENSE, hooks=policy.Hooks(kv=count))  # two calls a pass: keys and values

  def steps(eos):
    passes.clear()
    rollout = jax.block_until_ready(run(parameters(DENSE, 0.0, eos), TEXT, START, KEY))
    jax.effects_barrier()
    return rollout, len(passes) / 2

  rollout, count_all = steps(30.0)
  assert (np.asarray(rollout.valid).sum(1) == 1).all() and count_all == 1  # the prompt alone
  rollout, count_all = steps(-30.0)
  assert np.asarray(rollout.valid).all() and count_all == LENGTH
  rollout, count_all = steps(1.2)
  longest = np.asarray(rollout.valid).sum(1).max()
  assert 1 < longest and count_all == longest
  rollout = generator(MOE)(parameters(MOE, 0.0, 30.0), TEXT, START, KEY)
  assert (rollout.routes[:, WIDTH:] == 0).all() and (rollout.routes[:, :WIDTH] > 0).any()


@functools.cache
def many_drawer(n):
  def draw(key, scores, temperature):
    keys = jax.random.split(key, n)
    return sampling._draw(keys, jnp.broadcast_to(scores, (n, *scores.shape)), temperature, False)

  return jax.jit(draw)


@pytest.mark.parametrize('temperature', [0.6, 1.0, 1.3])
def test_frequencies_follow_the_tempered_softmax(temperature):
  scores = 1.5 * np.random.default_rng(3).normal(size=8).astype(np.float32)
  n = 20_000
  drawn = many_drawer(n)(jax.random.key(5), scores, temperature)
  counts = np.bincount(drawn, minlength=8)
  expected = n * policy_oracle.softmax(scores.astype(np.float64) / temperature)
  assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3
  for other in {0.6, 1.0, 1.3} - {temperature}:  # and the test can tell them apart
    wrong = n * policy_oracle.softmax(scores.astype(np.float64) / other)
    assert scipy.stats.chisquare(counts, wrong).pvalue < 1e-9


@pytest.mark.parametrize(
  'temperature',
  [pytest.param(0.6, marks=pytest.mark.slow), pytest.param(1.3, marks=pytest.mark.slow)],
)
def test_rollouts_are_drawn_at_the_temperature_they_report(temperature):
  run = generator(DENSE, samples=256, length=2, temperature=temperature)
  rollout = on_host(run(parameters(DENSE), TEXT, START, KEY))
  valid = rollout.valid
  logp = np.asarray(
    divergences.logp(
      jnp.asarray(rollout.logits), jnp.asarray(rollout.tokens), temperature=temperature
    )
  )
  np.testing.assert_allclose(rollout.logp[valid], logp[valid], rtol=0, atol=1e-6)
  z = rollout.logits.astype(np.float64) / temperature
  z = z - np.log(np.exp(z).sum(-1, keepdims=True))
  picked = np.take_along_axis(z, rollout.tokens[..., None], -1)[..., 0]
  np.testing.assert_allclose(rollout.logp[valid], picked[valid], rtol=0, atol=2e-6)
  # First tokens of one prompt are draws from one distribution; pool the prompts' statistics.
  statistic, freedom = 0, 0
  for p in range(PROMPTS):
    rows = slice(256 * p, 256 * (p + 1))
    expected = 256 * np.exp(z[256 * p, 0])
    counts = np.bincount(rollout.tokens[rows, 0], minlength=V)
    big = expected > 5
    merge = lambda x, big=big: np.append(x[big], x[~big].sum())
    statistic += (np.square(merge(counts) - merge(expected)) / merge(expected)).sum()
    freedom += big.sum()
  assert scipy.stats.chi2.sf(statistic, freedom) > 1e-3


@pytest.mark.slow
def test_tokens_of_different_slots_are_independent():
  """One key a slot: with equal scores everywhere, neighbours agree by chance only."""
  config = DENSE
  params = parameters(config) | {'head': jnp.zeros((V, config.width)).at[EOS, 0].set(-30.0)}
  run = generator(config, samples=256, length=2, temperature=0.6)
  tokens = np.asarray(run(params, TEXT, START, KEY).tokens)
  n, chance = len(tokens), 1 / (V - 1)
  near = lambda hits, size: abs(hits - size * chance) < 4 * np.sqrt(size * chance)
  assert near((tokens[:, 0] == tokens[:, 1]).sum(), n)
  grouped = tokens.reshape(PROMPTS, 256, 2)
  assert near((grouped[:, 0::2] == grouped[:, 1::2]).sum(), n)
  assert near((grouped[0::2] == grouped[1::2]).sum(), n)


@pytest.mark.slow
def test_greedy_takes_the_largest_score_whatever_the_key():
  run = generator(DENSE, greedy=True)
  rollout = run(parameters(DENSE), TEXT, START, KEY)
  valid = np.asarray(rollout.valid)
  np.testing.assert_array_equal(
    np.asarray(rollout.tokens)[valid], np.asarray(rollout.logits).argmax(-1)[valid]
  )
  equal(run(parameters(DENSE), TEXT, START, jax.random.key(99)), rollout)
  equal(rollout.tokens[0::2], rollout.tokens[1::2])


@functools.cache
def drawer(size):
  """`_draw` of one row with the uniform number given."""

  def draw(scores, uniform):
    real = jax.random.uniform
    jax.random.uniform = lambda key: uniform
    try:
      keys = jax.random.split(jax.random.key(0), 1)
      return sampling._draw(keys, scores[None], 1.0, False)[0]
    finally:
      jax.random.uniform = real

  cumulative = lambda scores: jnp.cumsum(jax.nn.softmax(scores))
  over = jax.jit(lambda scores, uniforms: jax.vmap(lambda u: draw(scores, u))(uniforms))
  return over, jax.jit(cumulative), size


@pytest.mark.slow
@hypothesis.given(st.data())
def test_draw_never_returns_an_impossible_token(data):
  over, cumulative, size = drawer(data.draw(st.sampled_from([3, 16, 33])))
  score = st.one_of(
    st.floats(-9, 9, width=32), st.just(-np.inf), st.just(-200.0), st.floats(-20, -14, width=32)
  )
  scores = np.array(data.draw(st.lists(score, min_size=size, max_size=size)), np.float32)
  top = data.draw(st.integers(0, size - 1))
  scores[top] = data.draw(st.floats(0, 5, width=32))
  possible = np.asarray(jax.nn.softmax(scores)) > 0
  # Uniforms at, just below and just above every step of the cumulative sum, and at both ends.
  steps = np.asarray(cumulative(scores), np.float32)
  around = [steps, steps / steps[-1], np.float32([0, 1e-45, 1e-38, 2**-24, 0.5, 1 - 2**-24])]
  around = np.concatenate(around)
  for _ in range(2):
    around = np.concatenate(
      [around, np.nextafter(around, np.float32(0)), np.nextafter(around, np.float32(2))]
    )
  uniforms = np.clip(around, 0, np.float32(1 - 2**-24)).astype(np.float32)
  uniforms = np.resize(uniforms, 9 * (2 * 33 + 6))
  tokens = np.asarray(over(scores, uniforms))
  assert ((tokens >= 0) & (tokens < size)).all()
  assert possible[tokens].all()


def test_draw_in_a_large_vocabulary():
  """Rounded cumulative sums of many terms rise at tokens that have no mass, and fall."""
  size, rng = 1000, np.random.default_rng(0)
  over, cumulative, _ = drawer(size)
  for _ in range(3):
    scores = (3 * rng.normal(size=size)).astype(np.float32)
    scores[rng.random(size) < 0.5] = -np.inf
    possible = np.asarray(jax.nn.softmax(scores)) > 0
    steps = np.asarray(cumulative(scores))
    rises = np.flatnonzero((np.diff(steps, prepend=0) > 0) & ~possible)
    assert len(rises)
    uniforms = np.concatenate([steps[rises - 1], np.nextafter(steps, np.float32(0)), steps])
    uniforms = np.resize(np.clip(uniforms, 0, np.float32(1 - 2**-24)), 3000)
    assert possible[np.asarray(over(scores, uniforms))].all()


def test_draw_inverts_the_cumulative_distribution():
  over, _, _ = drawer(3)
  scores = np.log(np.array([0.2, 0.5, 0.3], np.float32))
  uniforms = np.array([0, 0.1, 0.199, 0.201, 0.5, 0.699, 0.701, 0.9, 1 - 2**-24], np.float32)
  np.testing.assert_array_equal(over(scores, uniforms), [0, 0, 0, 1, 1, 1, 2, 2, 2])
  lone = np.array([-np.inf, 0, -np.inf], np.float32)
  np.testing.assert_array_equal(over(lone, uniforms), 1)


@pytest.mark.slow
def test_a_row_depends_on_its_prompt_number_and_sample_number_alone():
  params, rollout = parameters(DENSE), rolled(DENSE)
  by_prompt = lambda x: x.reshape(PROMPTS, -1, *x.shape[1:])
  tokens, logp = by_prompt(rollout.tokens), by_prompt(rollout.logp)
  one = generator(DENSE, samples=1, first_sample=1)(params, TEXT, START, KEY)
  np.testing.assert_array_equal(one.tokens, tokens[:, 1])
  np.testing.assert_allclose(one.logp, logp[:, 1], rtol=0, atol=1e-5)
  # Fewer prompts and more samples beside it.
  other = generator(DENSE, samples=3)(params, TEXT[:3], START[:3], KEY)
  np.testing.assert_array_equal(other.tokens.reshape(3, 3, -1)[:, :2], tokens[:3])
  # Other content in the rows beside it.
  other = np.where(np.arange(PROMPTS)[:, None] == 4, TEXT, (TEXT + 3) % V).astype(np.int32)
  changed = by_prompt(generator(DENSE)(params, other, START, KEY).tokens)
  np.testing.assert_array_equal(changed[4], tokens[4])
  assert (changed != tokens).any()
  # Equal prompts at different places draw differently.
  same = generator(DENSE)(params, TEXT[:1].repeat(8, 0), START[:1].repeat(8), KEY)
  assert len({row.tobytes() for row in np.asarray(same.tokens)}) > 8


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [pytest.param((8, 1), marks=pytest.mark.slow), (4, 2)])
def test_meshes_agree(mesh):
  want = rolled(MOE)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    fresh = jax.eval_shape(lambda key: policy.init(key, MOE, V), jax.random.key(0))
    params = jax.tree.map(
      lambda p, f: jax.device_put(np.asarray(p), f.sharding.spec), parameters(MOE), fresh
    )
    place = lambda x: jax.device_put(x, P('data'))
    got = generator(MOE)(params, place(TEXT), place(START), KEY)
    assert got.tokens.sharding.spec[0] == 'data'

    @jax.jit
    def rescored(p, r):
      return scoring.token_logp(policy.logits(p, scoring.score(p, MOE, r)[0]), r.tokens, r.valid)

    logp = rescored(params, got)
  for name in ('tokens', 'valid', 'routes', 'prompts', 'start'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=1e-4)
  np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-5)
  np.testing.assert_allclose(logp, want.logp, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_store_keeps_what_it_says():
  params, full = parameters(DENSE), rolled(DENSE)
  hidden = generator(DENSE, store='hidden')(params, TEXT, START, KEY)
  brief = generator(DENSE, store='logp')(params, TEXT, START, KEY)
  assert full.hidden is None and hidden.logits is None
  assert brief.logits is None and brief.hidden is None
  for other in (hidden, brief):
    np.testing.assert_array_equal(other.tokens, full.tokens)
    np.testing.assert_array_equal(other.valid, full.valid)
    np.testing.assert_allclose(other.logp, full.logp, rtol=0, atol=1e-6)
  np.testing.assert_allclose(policy.logits(params, hidden.hidden), full.logits, rtol=0, atol=1e-5)
  assert (np.asarray(hidden.hidden)[~np.asarray(full.valid)] == 0).all()


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_scores():
  params, full = parameters(DENSE), rolled(DENSE)
  kept = generator(DENSE, store='topk', top=5)(params, TEXT, START, KEY)
  assert kept.logits is None and kept.hidden is None
  valid = np.asarray(full.valid)
  np.testing.assert_array_equal(kept.tokens, full.tokens)
  want = brackets.top_k(full.logits, 5)
  np.testing.assert_array_equal(kept.top.ids[valid], want.ids[valid])
  for name in ('logp', 'tail'):
    got = np.asarray(getattr(kept.top, name))
    np.testing.assert_allclose(got[valid], getattr(want, name)[valid], rtol=1e-5)
    assert (got[~valid] == 0).all()

  # Re-scored one slot at a time or all at once: the same noise on the same scores.
  def shaken(scores, keys):
    return scores + jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (V,))))(keys)

  hooks = policy.Hooks(logits=shaken)

  @jax.jit
  def scored(params, kept, full):
    own = lambda rollout, hooks: scoring.replay(
      params, DENSE, rollout, KEY, samples=SAMPLES, temperature=1.3, hooks=hooks
    )
    states = dataclasses.replace(kept, top=None, hidden=jnp.zeros((*full.valid.shape, 16)))
    hidden, _ = scoring.score(params, DENSE, full)
    head = policy.head(params)
    healthy = [
      stores.compare(
        hidden, head, own(r, policy.Hooks()), heads=(head,), shares=(SAMPLES,), temperature=1.3
      )
      for r in (states, kept)
    ]
    return own(kept, hooks), own(full, hooks), healthy

  by_slot, whole, (exact, bounds) = scored(params, kept, full)
  np.testing.assert_allclose(by_slot.logp, whole.logp, rtol=1e-5, atol=1e-6)
  want = brackets.top_k(whole.logits, 5, temperature=1.3)
  np.testing.assert_array_equal(by_slot.top.ids[valid], want.ids[valid])
  np.testing.assert_allclose(by_slot.top.tail[valid], want.tail[valid], rtol=1e-4)
  assert (by_slot.top.ids[valid] != kept.top.ids[valid]).any()
  # Without mismatch: KL is 0 to the last bit, and between the bounds.
  np.testing.assert_array_equal(exact.divergences.kl[valid], 0)
  np.testing.assert_array_equal(bounds.lower.kl[valid], 0)
  assert (bounds.divergences.kl[valid] > 0).all()
  np.testing.assert_allclose(exact.divergences.log_ratio[valid], 0, atol=1e-5)


@functools.cache
def noisy(first_sample):
  options = {
    'samples': SAMPLES,
    'first_sample': first_sample,
    'temperature': 1.3,
    'hooks': NOISY,
  }
  run = generator(MOE, **options)
  again = jax.jit(lambda params, rollout, key: scoring.replay(params, MOE, rollout, key, **options))
  return run(parameters(MOE), TEXT, START, KEY), again


@pytest.mark.parametrize(
  'first_sample', [pytest.param(3, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)]
)
def test_replay_repeats_the_noise_of_the_engine(first_sample):
  rollout, again = noisy(first_sample)
  replayed = again(parameters(MOE), rollout, KEY)
  valid = np.asarray(rollout.valid)
  np.testing.assert_allclose(
    np.asarray(replayed.logits)[valid], np.asarray(rollout.logits)[valid], rtol=0, atol=2e-5
  )
  np.testing.assert_allclose(replayed.logp, rollout.logp, rtol=0, atol=1e-5)
  shifted = lambda r: np.asarray(r.routes)[:, WIDTH - 1 :][valid]
  np.testing.assert_array_equal(shifted(replayed), shifted(rollout))
  for name in ('prompts', 'start', 'tokens', 'valid', 'version', 'engine', 'reward'):
    np.testing.assert_array_equal(getattr(replayed, name), getattr(rollout, name))
  assert (np.asarray(replayed.logits)[~valid] == 0).all()
  assert (np.asarray(replayed.logp)[~valid] == 0).all()
  equal(again(parameters(MOE), rollout, KEY), replayed)  # twice the same bits
  # The noise is real and its key matters: the bare trainer and another key score differently.
  bare = scorer(MOE)(parameters(MOE), rollout)[1]
  other = again(parameters(MOE), rollout, jax.random.key(1)).logits
  for wrong in (bare, other):
    assert np.asarray(divergences.kl(wrong, rollout.logits))[valid].max() > 0.01


def test_replay_without_hooks_is_the_trainer():
  params = parameters(DENSE)
  rollout = generator(DENSE, store='hidden')(params, TEXT, START, KEY)

  @jax.jit
  def both(params, rollout):
    again = scoring.replay(params, DENSE, rollout, KEY, samples=SAMPLES)
    return again, scoring.score(params, DENSE, rollout)[0]

  again, hidden = both(params, rollout)
  assert again.logits is None and again.routes is None
  valid = np.asarray(rollout.valid)
  np.testing.assert_array_equal(np.asarray(again.hidden)[valid], np.asarray(hidden)[valid])
  assert (np.asarray(again.hidden)[~valid] == 0).all()


@pytest.mark.slow
def test_vmap_over_keys():
  alone, _ = noisy(3)
  request = Request(samples=SAMPLES, length=LENGTH, eos=EOS, pad=PAD, temperature=1.3)
  text = jnp.asarray(TEXT), jnp.asarray(START)
  run = lambda key: sampling.generate(
    parameters(MOE), MOE, *text, key, request, first_sample=3, hooks=NOISY
  )
  together = jax.jit(jax.vmap(lambda key: fields(run(key))))(jnp.stack([jax.random.key(4), KEY]))
  for name in ('tokens', 'valid', 'start', 'prompts'):
    np.testing.assert_array_equal(together[name][1], getattr(alone, name))
  np.testing.assert_allclose(together['logits'][1], alone.logits, rtol=0, atol=1e-4)
  np.testing.assert_allclose(together['logp'][1], alone.logp, rtol=0, atol=1e-5)
  assert (together['tokens'][0] != together['tokens'][1]).any()


def test_one_start_a_prompt(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  with pytest.raises(types.InputError, match='prompts .* start .* must be'):
    sampling.generate(
      parameters(DENSE),
      DENSE,
      jnp.asarray(TEXT),
      jnp.asarray(START)[:-1],
      KEY,
      Request(samples=2, length=3, eos=EOS, pad=PAD),
    )


@pytest.mark.parametrize('temperature', [0.0, -1.0, float('nan'), 1e-10])
def test_bad_temperature(temperature):
  with pytest.raises(
    types.InputError, match=f'temperature={temperature} must be at least 0.001.*greedy'
  ):
    Request(samples=2, length=3, eos=EOS, pad=PAD, temperature=temperature)


@pytest.mark.parametrize('name', ['samples', 'length'])
def test_bad_counts(name):
  counts = {'samples': 2, 'length': 3} | {name: 0}
  with pytest.raises(types.InputError, match=f'{name}=0 must be at least 1'):
    Request(eos=EOS, pad=PAD, **counts)


@pytest.mark.slow
def test_nothing_is_drawn_from_scores_that_are_nan():
  """The row ends with a missing log-prob; token 0 was drawn, again and again, before."""
  spoil = lambda scores, keys: jnp.where(jnp.arange(8)[:, None, None] % 2 == 0, jnp.nan, scores)
  params, hooks = parameters(DENSE, 0.0, -9.0), policy.Hooks(logits=spoil)
  for options in ({}, {'greedy': True}):
    run = generator(DENSE, samples=1, hooks=hooks, **options)
    rollout = on_host(run(params, TEXT, START, KEY))
    assert rollout.valid[::2].sum(-1).tolist() == [1] * 4
    assert np.isnan(rollout.logp[::2, 0]).all() and (rollout.tokens[::2] == PAD).all()
    assert np.isfinite(rollout.logp[1::2]).all() and (rollout.valid[1::2].sum(-1) > 1).all()


@pytest.mark.slow
def test_any_of_several_tokens_ends_a_row():
  params = parameters(DENSE)
  one = generator(DENSE, samples=64)(params, TEXT, START, KEY)
  two = on_host(generator(DENSE, samples=64, eos=(EOS, 7))(params, TEXT, START, KEY))
  ends = np.isin(two.tokens, (EOS, 7)) & two.valid
  assert (two.tokens[ends] == 7).any() and (two.tokens[ends] == EOS).any()
  np.testing.assert_array_equal(ends.sum(-1), (ends | ~two.valid).any(-1))
  last = two.valid & ~np.pad(two.valid, ((0, 0), (0, 1)))[:, 1:]
  assert (last[ends]).all()  # nothing comes after
  np.testing.assert_array_equal(two.tokens[two.valid], np.asarray(one.tokens)[two.valid])


@pytest.mark.parametrize('name, token', [('eos', V), ('eos', (EOS, 151_645)), ('pad', -1)])
def test_tokens_outside_the_vocabulary_end_and_fill_nothing(name, token):
  tokens = {'eos': EOS, 'pad': PAD} | {name: token}
  text = jnp.asarray(TEXT), jnp.asarray(START)
  with pytest.raises(types.InputError, match=f'{name}=.* must lie in 0..{V - 1}'):
    sampling.generate(parameters(DENSE), DENSE, *text, KEY, Request(samples=1, length=2, **tokens))


def test_unknown_tokens_are_missing_and_padding_is_nobodys():
  params, start = parameters(DENSE), jnp.array([2, 0], jnp.int32)
  tokens = jnp.array([[-1, V, 3, 4], [3, -100, 4, 5]])
  hidden = np.asarray(jax.jit(lambda p: policy.apply(p, DENSE, tokens, start=start)[0])(params))
  assert np.isfinite(hidden[0, 2:]).all()
  assert np.isnan(hidden[1]).all()  # those of the last token's embedding, before


@pytest.mark.slow
def test_tool_text_is_read_and_not_owned():
  """Slots 2 and 3 of a response hold what a tool wrote: later tokens are drawn after it."""
  params = parameters(MOE)
  rng = np.random.default_rng(5)
  tokens = jnp.asarray(rng.integers(2, V, (8, LENGTH)), jnp.int32)
  real = jnp.arange(LENGTH)[None] < jnp.asarray(rng.integers(5, LENGTH + 1, 8))[:, None]
  tool = (jnp.arange(LENGTH) // 2 == 1)[None]
  valid = real & ~tool
  blank = jnp.zeros(8, jnp.int32)
  text = jnp.where(jnp.arange(WIDTH)[None] >= START[:, None], TEXT, 0)

  @jax.jit
  def engine(params):
    """What an engine says that has read everything."""
    whole = jnp.concatenate([text, jnp.where(real, tokens, 0)[:, :-1]], 1)
    hidden, _, aux = policy.apply(params, MOE, whole, start=jnp.asarray(START))
    return policy.logits(params, hidden[:, WIDTH - 1 :]), aux.routes

  logits, routes = engine(params)
  rollout = types.Rollout(
    prompts=text,
    start=jnp.asarray(START),
    tokens=tokens,
    valid=valid,
    logits=logits,
    hidden=None,
    logp=jnp.where(valid, divergences.logp(logits, tokens), 0),
    routes=routes,
    version=0 * tokens,
    engine=blank,
    reward=0.0 * blank,
    real=real,
  )

  @jax.jit
  def judged(params, rollout):
    hidden, aux = scoring.score(params, MOE, rollout)
    kl = divergences.kl(policy.logits(params, hidden), rollout.logits)
    again = scoring.replay(params, MOE, rollout, KEY, samples=1)
    logp = scoring.policy_logp(params, MOE, rollout)
    return kl, logp, again.logp, metrics.route_flips(rollout, aux.routes)

  kl, logp, again, flips = judged(params, rollout)
  own = np.asarray(valid)
  assert np.asarray(kl)[own].max() < 1e-9 and flips == 0
  np.testing.assert_allclose(logp, rollout.logp, rtol=0, atol=1e-5)
  np.testing.assert_allclose(again, rollout.logp, rtol=0, atol=1e-5)
  # Read as padding, the tool's text would move every later token.
  wrong, *_ = judged(params, dataclasses.replace(rollout, real=None))
  late = own & (np.arange(LENGTH)[None] > 3)
  assert (np.asarray(wrong)[late] > 1e-3).mean() > 0.5
  # Flips after the gap count.
  moved = rollout.routes.at[:, WIDTH + 3].add(1)
  some = metrics.route_flips(dataclasses.replace(rollout, routes=moved % MOE.experts), routes)
  assert some > 0
