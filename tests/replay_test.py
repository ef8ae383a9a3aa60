"""What the trainer can undo of a mismatch: the engine's experts, their weights, its filters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import divergences, policy
from trm_jax.divergences import linear_head
from trm_jax.mesh import sharding
from trm_jax.mismatch import decoding, fleet, routing
from trm_jax.policy import attention
from trm_jax.rollouts import scoring, stores
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record
from trm_jax.training import judgement, update
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError, Rollout

CONFIG = policy.PolicyConfig(
  width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=16, experts=4
)
V, G, PROMPTS, P, T = 16, 2, 8, 3, 5
JITTER = fleet.Fleet(engine=fleet.Engine(routing=routing.Routing(jitter=1.0)))
ROUTES = {
  'off': lambda r: policy.Hooks(),
  'experts': lambda r: routing.replay(r.routes),
  'weights': lambda r: routing.replay(r.routes, r.gates),
}


@functools.cache
def trained():
  """{mode: (gradient of the update, report)} with each kind of replayed routes; one program."""

  def go(params, prompts, start):
    rollout = fleet.generate(
      JITTER,
      params,
      CONFIG,
      prompts,
      start,
      jax.random.key(7),
      Request(samples=G, length=T, eos=3, pad=2),
      Record(score='replay', gates=True),
      version=jnp.int32(0),
    )
    reward = (jnp.arange(PROMPTS * G) * 7 % 5 < 2).astype(jnp.float32)
    batch = judgement.Batch(dataclasses.replace(rollout, reward=reward))
    found = {}
    for name, hooks in ROUTES.items():
      settings = update.Settings(
        methods=(MethodWords().make(),),
        policy=CONFIG,
        samples=G,
        temperature=1.0,
        attention=attention.plain,
        hooks=hooks,
      )
      found[name] = update.gradients(
        params, batch, limit=jnp.float32(1), key=jax.random.key(1), settings=settings
      )[1:]
    return found

  params = jax.jit(lambda k: policy.init(k, CONFIG, V))(jax.random.key(0))
  prompts = jax.random.randint(jax.random.key(1), (PROMPTS, P), 4, V)
  return jax.jit(go)(params, prompts, jnp.arange(PROMPTS) % P)


def mean_kl(report):
  return float(report.scored.divergences.kl[report.scored.valid].mean())


@pytest.mark.slow
def test_replayed_experts_agree_and_lower_the_kl_and_weights_end_it():
  off, experts, weights = (trained()[name][1] for name in ROUTES)
  assert off.route_flips > 0.1 and experts.route_flips == weights.route_flips == 0
  assert mean_kl(off) > 1.5 * mean_kl(experts) > 1e-6 and mean_kl(weights) < 1e-9
  log_ratio = weights.scored.divergences.log_ratio[weights.scored.valid]
  np.testing.assert_allclose(log_ratio, 0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ROUTES)
def test_the_router_learns(name):
  gradient, report = trained()[name]
  assert np.abs(gradient['layers']['mlp']['router']['kernel']).max() > 1e-4 and report.finite


@pytest.mark.slow
@pytest.mark.parametrize('value', [pytest.param(np.nan, marks=pytest.mark.slow), np.inf])
def test_weights_in_padding_change_nothing(value):
  params = policy.init(jax.random.key(0), CONFIG, V)
  tokens = jax.random.randint(jax.random.key(1), (2, 5), 4, V)
  real = jnp.array([[False, True, True, True, False], [True, True, True, False, False]])
  start = jnp.array([1, 0])
  aux = policy.apply(params, CONFIG, tokens, start=start)[2]

  @jax.jit
  def run(gates):
    def loss(params):
      hooks = routing.replay(aux.routes, gates)
      hidden = policy.apply(params, CONFIG, tokens, start=start, hooks=hooks)[0]
      return jnp.where(real[..., None], hidden, 0).sum()

    return jax.value_and_grad(loss)(params)

  spoiled = jnp.where(real[:, :, None, None], aux.gates, value)
  for got, want in zip(*map(jax.tree.leaves, map(run, (spoiled, aux.gates))), strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize('chosen', [1, 2])
def test_impossible_experts_are_routed_by_the_trainer(chosen):
  config = dataclasses.replace(CONFIG, experts_per_token=chosen)
  params = jax.jit(lambda k: policy.init(k, config, V))(jax.random.key(0))
  tokens = jnp.asarray(np.random.default_rng(2).integers(0, V, (4, 6)))
  start, fed = jnp.zeros(4, jnp.int32), jnp.ones((4, 6), bool)
  apply = jax.jit(
    lambda routes, gates: policy.apply(
      params, config, tokens, start=start, hooks=routing.replay(routes, gates)
    )
  )
  hidden, _, aux = jax.jit(lambda: policy.apply(params, config, tokens, start=start))()
  spoiled = aux.routes.at[0, 1].set(-1).at[1, 2].set(config.experts).at[2, 3].set(99)
  wrong = 3
  if chosen == 2:
    spoiled, wrong = spoiled.at[3, 4].set(1), 4  # the same expert twice
  for gates in (None, 0 * aux.gates + aux.gates):
    got, _, used = apply(spoiled, gates)
    np.testing.assert_array_equal(used.routes, aux.routes)
    np.testing.assert_allclose(got, hidden, rtol=0, atol=1e-5)
  share = routing.impossible_routes(spoiled, fed, experts=config.experts)
  assert float(share) == pytest.approx(wrong / 24)
  assert routing.impossible_routes(aux.routes, fed, experts=config.experts) == 0


def test_routes_of_another_pass_are_refused():
  params = jax.jit(lambda k: policy.init(k, CONFIG, V))(jax.random.key(0))
  tokens, start = jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, jnp.int32)
  for shape in ((2, 4, 1, 1), (2, 5, 1, 2)):  # a slot short; K = 2 for a policy of K = 1
    hooks = routing.replay(jnp.zeros(shape, jnp.int32))
    with pytest.raises(InputError, match=r'routes \(.*\) must hold \(5, 1\), slots and experts'):
      policy.apply(params, CONFIG, tokens, start=start, hooks=hooks)


# Filters


@functools.cache
def filtered():
  """(hidden, head, rollout): an engine that keeps 5 tokens and is the policy otherwise."""
  rng = np.random.default_rng(0)
  draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
  rows = PROMPTS * G
  hidden, head = draw(rows, T, 6), draw(V, 6)
  logits = decoding.keep_top_k(linear_head.project(hidden, head), 5)
  tokens = jax.random.categorical(jax.random.key(1), logits / 0.9)
  valid = jnp.asarray(np.arange(T)[None] < rng.integers(1, T + 1, rows)[:, None])
  blank = jnp.zeros(rows, jnp.int32)
  rollout = Rollout(
    prompts=blank[:, None],
    start=blank,
    tokens=tokens,
    valid=valid,
    # What padding holds must not matter.
    logits=jnp.where(valid[..., None], logits, jnp.nan),
    hidden=None,
    logp=divergences.logp(logits, tokens, temperature=0.9),
    routes=None,
    version=0 * tokens,
    engine=blank,
    reward=jnp.asarray(rng.integers(0, 2, rows), jnp.float32),
  )
  return hidden, head, rollout


@functools.cache
def judge(support):
  def go(hidden, head, rollout):
    over = judgement.over_mesh(
      methods=(MethodWords(max_kl=0.2).make(),), samples=G, temperature=0.9, support=support
    )

    def loss(hidden, head):
      batch, key = judgement.Batch(rollout), jax.random.key(5)
      (surrogate, _), scored, keep, _ = over(hidden, head, batch, jnp.float32(1), key, jnp.int32(0))
      return -surrogate.value, (scored, keep)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)

  return jax.jit(go)


@pytest.mark.slow
def test_replayed_support_is_the_policy_given_the_filter():
  hidden, head, rollout = filtered()
  valid = np.asarray(rollout.valid)
  (_, (plain, plain_keep)), _ = judge(False)(*filtered())
  (_, (scored, keep)), grads = judge(True)(*filtered())
  log_ratio = plain.divergences.log_ratio[valid]
  assert log_ratio.max() < 0 and log_ratio.mean() < -0.05  # a kept token's share has grown
  np.testing.assert_allclose(scored.divergences.log_ratio[valid], 0, atol=1e-6)
  assert np.asarray(scored.divergences.kl)[valid].max() < 1e-9 and np.asarray(keep).all()
  assert np.asarray(plain.divergences.kl)[valid].max() > 0.2 and not np.asarray(plain_keep).all()
  entropy = divergences.entropy(rollout.logits, temperature=0.9)
  np.testing.assert_allclose(scored.divergences.entropy[valid], entropy[valid], rtol=1e-5)

  # A policy that has moved since: its log-probs are those within the support, by NumPy.
  moved = np.asarray(hidden) * 1.3
  (_, (scored, _)), _ = judge(True)(jnp.asarray(moved), head, rollout)
  scores = np.where(np.asarray(rollout.logits) > -np.inf, moved @ np.asarray(head).T / 0.9, -np.inf)
  with np.errstate(all='ignore'):
    logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
  want = np.take_along_axis(logp, np.asarray(rollout.tokens)[..., None], -1)[..., 0]
  np.testing.assert_allclose(scored.logp[valid], want[valid], rtol=0, atol=1e-5)
  assert all(np.isfinite(g).all() and np.abs(g).max() > 1e-3 for g in grads)


@pytest.mark.slow
def test_no_gradient_to_what_the_engine_could_not_draw():
  hidden, head, rollout = filtered()
  first = jax.tree.map(lambda x: x[:1, :1] if x.ndim > 1 else x[:1], rollout)
  given = lambda head: stores.compare(hidden[:1, :1], head, first, support=True).logp.sum()
  gradient = np.abs(jax.grad(given)(head)).max(-1)
  np.testing.assert_array_equal(gradient > 0, np.asarray(first.logits[0, 0]) > -np.inf)


@pytest.mark.slow
def test_meshes_agree():
  want = judge(True)(*filtered())
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    place = lambda tree, *axes: jax.tree.map(lambda x: jax.device_put(x, jax.P(*axes)), tree)
    hidden, head, rollout = filtered()
    got = judge(True)(place(hidden, 'data'), place(head, 'model'), place(rollout, 'data'))
  for a, b in zip((got[0][0], *got[1]), (want[0][0], *want[1]), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
  np.testing.assert_array_equal(got[0][1][1], want[0][1][1])


@pytest.mark.slow
def test_the_trainers_own_log_probs_are_of_the_same_policy():
  """`scoring.policy_logp`, which anchors of clipped objectives come from."""
  params = jax.jit(lambda k: policy.init(k, CONFIG, V))(jax.random.key(0))
  _, _, rollout = filtered()
  logits = jnp.where(rollout.valid[..., None], rollout.logits, 0)
  rollout = dataclasses.replace(rollout, logits=logits)
  logp = jax.jit(
    lambda params, rollout: (
      scoring.policy_logp(params, CONFIG, rollout, temperature=0.9, support=True),
      stores.compare(
        scoring.score(params, CONFIG, rollout)[0],
        policy.head(params),
        rollout,
        temperature=0.9,
        support=True,
      ).logp,
    )
  )
  got, want = logp(params, rollout)
  valid = np.asarray(rollout.valid)
  np.testing.assert_allclose(got[valid], want[valid], rtol=1e-5, atol=1e-6)
  assert (np.asarray(got)[~valid] == 0).all()


def test_support_needs_logits():
  hidden, head, rollout = filtered()
  bare = dataclasses.replace(rollout, logits=None)
  with pytest.raises(InputError, match="support=True reads from logits .* use store='logits'"):
    stores.compare(hidden, head, bare, support=True)
