"""Loss and gradient of a train step are the same on every mesh and however it is accumulated.

The policies are those of large runs in small: layers recomputed, what is kept of them split over
`model` along the sequence, attention by blocks, experts sorted and split.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.policy import attention
from trm_jax.training import judgement, update
from trm_jax.training.words import MethodWords
from trm_jax.types import Rollout

DENSE = policy.PolicyConfig(
  width=16,
  layers=2,
  heads=8,
  kv_heads=8,
  head_width=4,
  mlp_width=16,
  experts=0,
  remat=True,
)
MOE = dataclasses.replace(
  DENSE, experts=8, experts_per_token=2, normalize_gates=True, expert_compute='ragged'
)
CONFIGS = {'dense': DENSE, 'moe': MOE}
V, G, PROMPTS, P, T = 16, 2, 8, 4, 5  # positions P + T - 1 = 8 divide over every MODEL
ROWS = PROMPTS * G
BLOCKWISE = functools.partial(attention.blockwise, block=4)


def batch(config):
  keys = jax.random.split(jax.random.key(3), 4)
  # Odd rows are sharp and far from the policy, even ones near uniform: the mask bites.
  sharp = jnp.where(jnp.arange(ROWS) % 2 == 0, 0.2, 3.0)[:, None, None]
  logits = sharp * jax.random.normal(keys[0], (ROWS, T, V))
  tokens = jax.random.randint(keys[1], (ROWS, T), 0, V)
  valid = jnp.arange(T)[None] < 2 + jnp.arange(ROWS)[:, None] % (T - 1)
  logp = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
  return judgement.Batch(
    Rollout(
      prompts=jax.random.randint(keys[2], (ROWS, P), 0, V),
      start=jnp.arange(ROWS) % P,
      tokens=tokens,
      valid=valid,
      logits=logits,
      hidden=None,
      logp=jnp.where(valid, logp, 0),
      routes=jnp.zeros((ROWS, P + T - 1, config.layers, 2), jnp.int32) if config.experts else None,
      version=0 * tokens,
      engine=jnp.zeros(ROWS, jnp.int32),
      reward=(jnp.arange(ROWS) * 7 % 5 < 2).astype(jnp.float32),
    )
  )


LIMIT = 1.7


@functools.cache
def program(name, parts):
  settings = update.Settings(
    methods=(MethodWords(max_kl=LIMIT).make(),),
    policy=CONFIGS[name],
    samples=G,
    temperature=1.0,
    attention=BLOCKWISE,
    microbatches=parts,
  )

  def go(params, batch):
    limit, key = jnp.float32(LIMIT), jax.random.key(1)
    return update.gradients(params, batch, limit=limit, key=key, settings=settings)

  return jax.jit(go)


@functools.cache
def params(name):
  return jax.jit(lambda key: policy.init(key, CONFIGS[name], V))(jax.random.key(0))


def step(name, mesh=None, parts=1):
  """(loss, gradient leaves in float64, kept rows)."""
  whole, rows = params(name), batch(CONFIGS[name])  # made outside the mesh
  if mesh is None:
    loss, gradient, report = program(name, parts)(whole, rows)
  else:
    with jax.set_mesh(sharding.make_mesh(*mesh)):
      place = lambda x, spec: jax.device_put(np.asarray(x), spec)
      layout = policy.shapes(CONFIGS[name], V)
      placed = jax.tree.map(lambda x, a: place(x, a.sharding.spec), whole, layout)
      rows = jax.tree.map(lambda x: place(x, jax.P('data')), rows)
      loss, gradient, report = program(name, parts)(placed, rows)
      for p, g in zip(jax.tree.leaves(placed), jax.tree.leaves(gradient), strict=True):
        assert jax.typeof(g).sharding == jax.typeof(p).sharding
  leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradient)]
  return float(loss), leaves, np.asarray(report.keep)


whole = functools.cache(step)


def close(got, want):
  scale = max(np.abs(g).max() for g in want[1])
  assert scale > 1e-3 and 0 < want[2].sum() < ROWS
  np.testing.assert_array_equal(got[2], want[2])
  assert abs(got[0] - want[0]) <= 1e-5 * max(1, abs(want[0]))
  for a, b in zip(got[1], want[1], strict=True):
    assert np.abs(a - b).max() <= 1e-5 * scale


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, mesh, parts',
  [('moe', (2, 4), 2)]
  + [
    pytest.param(name, mesh, parts, marks=SLOW)
    for name in CONFIGS
    for mesh, parts in [
      (None, 2),
      (None, 4),
      ((1, 1), 1),
      ((8, 1), 1),
      ((4, 2), 2),
      ((2, 4), 1),
      ((2, 4), 4),
      ((1, 8), 1),
      ((1, 8), 4),
    ]
  ],
)
def test_a_step_is_the_same_on_every_mesh(name, mesh, parts):
  close(step(name, mesh, parts), whole(name))
