"""Stores of a rollout: what each refuses and costs, and that only logits hold a [B,T,V]."""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import policy, tasks, training
from trm_jax.divergences import linear_head
from trm_jax.divergences.passes import blocks, pair
from trm_jax.mismatch import decoding, fleet, precision, staleness
from trm_jax.rollouts import groups, stores
from trm_jax.training import update
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError, Rollout

CONFIG = training.Config(
  task='toy_task',
  prompts=8,
  samples=4,
  eval_prompts=8,
  score='replay',
  top=5,
  policy=policy.PolicyConfig(
    width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=16, experts=2
  ),
  warm_start=training.WarmStart(steps=0),
  fleet=fleet.Fleet(
    broken=fleet.Engine(
      staleness=staleness.Staleness(stuck=True),
      precision=precision.Precision(weights='float8_e5m2'),
    ),
    broken_samples=2,
  ),
  data_dir=os.path.join(os.environ['TFDS_DATA_DIR'], 'stores_test'),
)
LIMITS = {
  'logits': dict(max_kl=0.1),
  'hidden': dict(max_kl=0.1, scope='prefix'),
  'topk': dict(max_kl=0.1),
  'logp': dict(max_k2=0.1, mean_k3=0.1),
}
V, ROWS = 331, 16  # the rows of one engine


@pytest.mark.parametrize(
  'store, limits, word',
  [
    ('topk', dict(chi2_budget=1.0), "method.chi2_budget=1.0 .*store='topk'.* use store='hidden'"),
    ('logp', dict(chi2_budget=1.0), 'method.chi2_budget'),
    ('logp', dict(max_kl=0.1), "method.max_kl=0.1 .*use store='hidden' or 'topk', or the sampled"),
    ('logp', dict(mean_kl=0.1), 'method.mean_kl'),
    ('logp', dict(max_tv=0.1), 'method.max_tv'),
    ('hidden', dict(max_kl=0.1, bound='lower'), "method.bound='lower'"),
  ],
)
def test_what_a_store_cannot_tell_is_refused(store, limits, word):
  with pytest.raises(InputError, match=word):
    dataclasses.replace(CONFIG, store=store, method=MethodWords(**limits))
  with pytest.raises(InputError, match=word):
    stores.check_method(store, MethodWords(**limits).make())


@pytest.mark.parametrize(
  'engine',
  [
    fleet.Engine(decoding=decoding.Decoding(top_k=3)),
    fleet.Engine(precision=precision.Precision(logits='bfloat16')),
  ],
)
def test_engines_whose_scores_are_not_their_heads_are_refused_before_compute(engine):
  team = fleet.Fleet(engine=engine)
  for store in ('logits', 'topk', 'logp'):
    dataclasses.replace(CONFIG, store=store, fleet=team)
  with pytest.raises(InputError, match="store='hidden' cannot hold .*use store='logits' or 'topk'"):
    dataclasses.replace(CONFIG, store='hidden', fleet=team)


def test_bytes():
  size = functools.partial(stores.bytes_per_token, vocab=1000, width=48, top=64)
  assert [size(s) for s in stores.STORES] == [4000, 192, 516, 0]
  assert stores.bytes_per_token('topk', vocab=16, width=48, top=64) == 132
  text = stores.describe('hidden', tokens=2**20, vocab=1000, width=48, top=64)
  assert 'hidden: 192 bytes a token, 192.000 MiB for 1,048,576 tokens' in text
  assert 'logits 4,000, topk 516, logp 0' in text


@pytest.mark.parametrize('rooms', [(3,), (2, 1)])
def test_apart_is_the_inverse_of_side_by_side(rooms):
  rows = jnp.arange(12.0)
  parts = groups.apart(rows, rooms)
  assert [len(p) for p in parts] == [4 * n for n in rooms]
  np.testing.assert_array_equal(groups.side_by_side(parts, 4), rows)
  np.testing.assert_array_equal(parts[-1][: rooms[-1]], rows[3 - rooms[-1] : 3])


def test_hidden_states_need_the_heads_of_their_engines():
  x, head = jnp.zeros((4, 3, 2)), jnp.zeros((5, 2))
  rollout = judged_rollout(x)
  with pytest.raises(InputError, match='heads holds 0 output heads for 1 engines'):
    stores.compare(x, head, rollout, shares=(2,))


def judged_rollout(hidden):
  rows, slots = hidden.shape[:2]
  whole, row = jnp.zeros((rows, slots), jnp.int32), jnp.zeros(rows, jnp.int32)
  return Rollout(
    row[:, None], row, whole, whole == 0, None, hidden, 0.0 * whole, None, whole, row, 0.0 * row
  )


def lowered(monkeypatch, store):
  """The whole training step on a vocabulary of V, chunks of a few rows, both engines re-scored."""
  monkeypatch.setattr(linear_head, 'CHUNK', 8 * 4 * V)
  monkeypatch.setattr(pair, 'SMALL', 1)
  monkeypatch.setattr(blocks, 'BLOCK', 4 * V)
  load = tasks.load
  monkeypatch.setattr(
    tasks, 'load', lambda name: dataclasses.replace(load(name), vocabulary=('x',) * V)
  )
  chosen = MethodWords(kl_coefficient=0.1, **LIMITS[store])
  built = training.build(dataclasses.replace(CONFIG, store=store, method=chosen))
  with jax.set_mesh(built.mesh):
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(built.start, jax.eval_shape(built.init, key), key)
    row = lambda *s: jax.ShapeDtypeStruct(
      s, jnp.int32, sharding=jax.NamedSharding(built.mesh, jax.P('data'))
    )
    arm = update.Arm(jnp.int32(0), jnp.float32(1))
    return built.step.lower(state, arm, row(8, built.task.prompt_length), row(8)), built


def scores_of_all_tokens(text, slots):
  """Arrays of a program that hold V numbers for each slot of each row, or for so many."""
  shapes = re.findall(r'tensor<([\dx]+)x[a-z]', text) + re.findall(r'[fsu]\d+\[([\d,]+)\]', text)
  found = set()
  for shape in shapes:
    sizes = [int(n) for n in re.split('[x,]', shape)]
    if V in sizes and np.prod(sizes, dtype=np.int64) >= ROWS * slots * V:
      found.add(shape)
  return found


@pytest.mark.parametrize(
  'store',
  [
    *(pytest.param(s, marks=pytest.mark.slow) for s in ('hidden', 'topk', 'logits', 'logp')),
  ],
)
def test_only_logits_hold_the_scores_of_all_tokens(monkeypatch, store):
  program, built = lowered(monkeypatch, store)
  found = scores_of_all_tokens(program.as_text(), built.task.response_length)
  assert bool(found) is (store == 'logits'), found


@pytest.mark.slow
@pytest.mark.parametrize('store', stores.STORES)
def test_nor_does_the_compiled_step(monkeypatch, optimised, store):
  program, built = lowered(monkeypatch, store)
  found = scores_of_all_tokens(program.compile().as_text(), built.task.response_length)
  assert bool(found) is (store == 'logits'), found
