"""The block that looks at the vocabulary: prefixes, stores and the penalty, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.divergences import linear_head
from trm_jax.mesh import sharding
from trm_jax.rollouts import stores
from trm_jax.training import judgement
from trm_jax.training.words import MethodWords
from trm_jax.types import Rollout

PROMPTS, G, T, D, V, K = 8, 4, 5, 6, 16, 11
B, SHARES = PROMPTS * G, (3, 1)
ENDS = dict(max_kl=0.04, scope='prefix', advantage='centred', kl_coefficient=0.1)
METHODS = (
  MethodWords(**ENDS, kl_scope='kept', baseline_pool='accepted', normalize_by='accepted').make(),
  MethodWords(**ENDS, random_mask=True).make(),
  MethodWords(max_kl=0.04, kl_coefficient=0.1).make(),
)
BRACKETS = (
  MethodWords(max_kl=0.09, scope='prefix').make(),
  MethodWords(max_kl=0.09, scope='prefix', bound='lower').make(),
)


@functools.cache
def case(store):
  """(hidden, head, batch): two engines with heads of their own, rows of 1 to T tokens."""
  rng = np.random.default_rng(3)
  draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
  hidden, head = draw(B, T, D), draw(V, D)
  other, heads = hidden + 0.1 * draw(B, T, D), [head + s * draw(V, D) for s in (0.05, 0.15)]
  engine = jnp.asarray(np.arange(B) % G >= SHARES[0], jnp.int32)
  both = [linear_head.project(other, h) for h in heads]
  logits = jnp.where(engine[:, None, None] > 0, both[1], both[0])
  tokens = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
  kept = {'logits': logits, 'hidden': other, 'logp': None}
  if store == 'topk':
    kept['topk'] = stores.record('topk', logits, other, temperature=0.9, top=K)
  log_p = jax.nn.log_softmax(logits / 0.9)
  rollout = Rollout(
    prompts=jnp.zeros((B, 1), jnp.int32),
    start=jnp.zeros(B, jnp.int32),
    tokens=tokens,
    valid=jnp.asarray(np.arange(T)[None] < rng.integers(1, T + 1, B)[:, None]),
    logp=jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0],
    routes=None,
    version=jnp.zeros((B, T), jnp.int32),
    engine=engine,
    reward=jnp.asarray(rng.integers(0, 2, B), jnp.float32),
    **stores.fields(store, kept[store]),
  )
  penalised = store in ('hidden', 'logits')
  states = judgement.Heads(
    tuple(heads) if store == 'hidden' else (), draw(V, D) if penalised else None
  )
  reference = draw(B, T, D) if penalised else None
  return hidden, head, judgement.Batch(rollout, reference_hidden=reference, heads=states)


@functools.cache
def program(methods):
  def go(hidden, head, batch, chosen):
    judge = judgement.over_mesh(methods=methods, samples=G, temperature=0.9, shares=SHARES)

    def loss(hidden, head):
      limit, key = jnp.float32(1), jax.random.key(5)
      (surrogate, penalty), scored, keep, _ = judge(hidden, head, batch, limit, key, chosen)
      value = 0.1 * penalty.value - surrogate.value
      return value, (keep, scored, surrogate)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)

  return jax.jit(go)


def judged(store, methods, chosen, mesh=None, spoil=None):
  hidden, head, batch = case(store)
  if spoil is not None:
    batch = spoil(batch)
  if mesh is None:
    return jax.tree.map(np.asarray, program(methods)(hidden, head, batch, chosen))
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    place = lambda tree, *axes: jax.tree.map(lambda x: jax.device_put(x, jax.P(*axes)), tree)
    heads = place(batch.heads, 'model', None)
    batch = dataclasses.replace(place(batch.rows, 'data'), heads=heads)
    args = place(hidden, 'data'), place(head, 'model'), batch, chosen
    return jax.tree.map(np.asarray, program(methods)(*args))


@pytest.mark.slow
@pytest.mark.parametrize(
  'store, methods, chosen',
  [('hidden', METHODS, 0), ('hidden', METHODS, 1), ('topk', BRACKETS, 0), ('topk', BRACKETS, 1)],
)
@pytest.mark.parametrize('mesh', [pytest.param((8, 1), marks=pytest.mark.slow), (4, 2)])
def test_meshes_change_nothing(store, methods, chosen, mesh):
  (value, (keep, _, mean)), grads = judged(store, methods, chosen)
  (value_, (keep_, _, mean_)), grads_ = judged(store, methods, chosen, mesh)
  valid = np.asarray(case(store)[2].rollout.valid)
  assert 0 < keep[valid].sum() < valid.sum() and (keep & ~keep.all(-1)[:, None]).any()
  np.testing.assert_array_equal(keep_, keep)
  assert mean_.count == mean.count
  np.testing.assert_allclose(value_, value, rtol=1e-5)
  for got, want in zip(grads_, grads, strict=True):
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_no_gradient_beyond_a_prefix():
  (_, (keep, _, _)), grads = judged('hidden', METHODS, 0)
  inside = keep & np.asarray(case('hidden')[2].rollout.valid)
  assert (grads[0][~inside] == 0).all() and (np.abs(grads[0][inside]).max(-1) > 0).mean() > 0.9


def test_a_whole_mask_beside_prefixes_is_the_one_alone():
  keep = judged('hidden', METHODS, 2)[0][1][0]
  alone = judged('logits', METHODS[2:], 0)[0][1][0]
  assert keep.shape == (B, T) and alone.shape == (B,) and 0 < alone.sum() < B
  np.testing.assert_array_equal(keep, np.broadcast_to(alone[:, None], (B, T)))


def test_hidden_states_with_their_heads_are_as_exact_as_logits():
  (value, (_, scored, _)), grads = judged('hidden', METHODS[2:], 0)
  (value_, (_, scored_, _)), grads_ = judged('logits', METHODS[2:], 0)
  for name in ('kl', 'tv', 'log_ratio'):
    got, want = (getattr(s.divergences, name) for s in (scored, scored_))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
  assert scored.divergences.kl[3::4].mean() > 1.5 * scored.divergences.kl[::4].mean()
  np.testing.assert_allclose(value, value_, rtol=1e-5)
  np.testing.assert_allclose(grads[0], grads_[0], atol=1e-5)


def test_bounds_certify_and_enclose():
  _, (certain, upper, _) = judged('topk', BRACKETS, 0)[0]
  _, (possible, lower, _) = judged('topk', BRACKETS, 1)[0]
  exact = judged('logits', METHODS[2:], 0)[0][1][1].divergences
  for name in ('kl', 'tv'):
    truth = getattr(exact, name)
    bracket = getattr(upper.bounds, name)
    assert (bracket.lower <= truth).all() and (truth <= bracket.upper).all()
    np.testing.assert_array_equal(getattr(upper.divergences, name), bracket.upper)
    np.testing.assert_array_equal(getattr(lower.divergences, name), bracket.lower)
  valid = np.asarray(case('topk')[2].rollout.valid)
  inside = np.cumsum((exact.kl > 0.09) & valid, -1) == 0
  assert (certain <= inside).all() and (inside <= possible).all()
  assert certain[valid].sum() < possible[valid].sum()
  for scored in (upper, lower):  # both acceptances, whichever is judged on
    np.testing.assert_array_equal(scored.bounds.upper, certain.all(-1))
    np.testing.assert_array_equal(scored.bounds.lower, possible.all(-1))


def test_what_padding_holds_changes_no_bit():
  def spoil(batch):
    far = ~batch.rollout.valid
    put = lambda x: jnp.where(far.reshape(far.shape + (1,) * (x.ndim - 2)), jnp.nan, x)
    rollout = batch.rollout
    top = dataclasses.replace(rollout.top, logp=put(rollout.top.logp), tail=put(rollout.top.tail))
    return dataclasses.replace(
      batch, rollout=dataclasses.replace(rollout, top=top, logp=put(rollout.logp))
    )

  (value, (keep, _, _)), grads = judged('topk', BRACKETS, 0)
  (value_, (keep_, _, _)), grads_ = judged('topk', BRACKETS, 0, spoil=spoil)
  assert value == value_
  np.testing.assert_array_equal(keep, keep_)
  for a, b in zip(grads, grads_, strict=True):
    np.testing.assert_array_equal(a, b)
