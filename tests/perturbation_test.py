"""Learned noise in every layer: where it acts, how its scales learn, and where it must not be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import update_test

from trm_jax import policy, training
from trm_jax.mesh import sharding
from trm_jax.objectives import Method
from trm_jax.rollouts import scoring
from trm_jax.training import perturbation, update
from trm_jax.training.words import MethodWords

LAYERS = update_test.CONFIG.layers
BATCH_KEY = jax.random.key(5)


def noisy(scale):
  return perturbation.added(update_test.params(), LAYERS, scale)


def loss_of(params, **fields):
  """(loss, gradient) of an unmasked batch, by the program of the update."""
  batch = update_test.batch(**fields)
  limit = jnp.float32(jnp.nan)
  run = lambda p: update.gradients(
    p, batch, limit=limit, key=jax.random.key(1), settings=update_test.settings(Method())
  )[:2]
  return jax.jit(run)(params)


def test_noise_enters_every_layer_by_its_scale_and_the_key_of_its_row_and_slot():
  config = dataclasses.replace(update_test.CONFIG, layers=2, experts=0)
  params = jax.jit(lambda k: policy.init(k, config, update_test.V))(jax.random.key(0))
  rollout = update_test.rollout()
  keys = perturbation.keys(BATCH_KEY, rollout, update_test.G)
  assert keys.shape == (update_test.ROWS, update_test.P + update_test.T - 1)
  assert len(np.unique(jax.random.key_data(keys.ravel()), axis=0)) == keys.size

  @jax.jit
  def states(sigma):
    hooks = perturbation.perturbed(policy.Hooks(), {perturbation.SIGMA: sigma})
    return scoring.score(params, config, rollout, noise_keys=keys, hooks=hooks)[0]

  plain = jax.jit(lambda: scoring.score(params, config, rollout)[0])()
  np.testing.assert_allclose(states(jnp.zeros(2)), plain, rtol=0, atol=1e-6)
  moved = [np.abs(states(jnp.array(s)) - plain)[rollout.valid].mean() for s in
           ([1e-3, 0.0], [0.0, 1e-3], [2e-3, 0.0])]  # fmt: skip
  assert 1e-5 < moved[0] < 0.1 and 1e-5 < moved[1] < 0.1
  np.testing.assert_allclose(moved[2], 2 * moved[0], rtol=0.05)


def test_a_scale_of_zero_is_no_leaf_and_the_gradient_of_a_scale_is_its_slope():
  assert noisy(0.0) is update_test.params()
  value, grads = loss_of(update_test.params())
  still, with_scales = loss_of(noisy(1e-12))
  np.testing.assert_allclose(still, value, rtol=1e-6)
  for a, b in zip(
    jax.tree.leaves(grads), jax.tree.leaves(perturbation.removed(with_scales)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  slope = float(loss_of(noisy(0.05))[1][perturbation.SIGMA].sum())
  h = 3e-4  # so small that no token changes its expert
  up, down = (float(loss_of(noisy(0.05 + s))[0]) for s in (h, -h))
  np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=0.02)


@pytest.mark.slow
def test_meshes_agree():
  want = loss_of(noisy(0.05))
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    abstract = jax.eval_shape(
      lambda k: perturbation.added(policy.init(k, update_test.CONFIG, update_test.V), LAYERS, 0.05),
      jax.random.key(0),
    )
    params = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding.spec), noisy(0.05), abstract)
    rollout = jax.tree.map(lambda x: jax.device_put(x, jax.P('data')), update_test.rollout())
    got = loss_of(params, rollout=rollout)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_learns_the_scales_and_samples_without_them():
  config = training.Config(
    task='toy_task',
    policy=dataclasses.replace(update_test.CONFIG, layers=2, experts=0),
    prompts=4,
    samples=4,
    store='hidden',
    method=MethodWords(),
    warm_start=training.WarmStart(steps=0),
    optimizer=training.Optimizer(warmup=0),
  )
  found = {}
  for scale in (0.0, 1e-3):
    program = training.build(dataclasses.replace(config, perturbation=scale))
    with jax.set_mesh(program.mesh):
      state = program.start(program.init(jax.random.key(0)), jax.random.key(1))
      prompts = jnp.ones((4, program.task.prompt_length), jnp.int32)
      starts = jnp.zeros(4, jnp.int32)
      for _ in range(2):
        state, metrics, _ = program.step(state, update.Arm(0, 0.0), prompts, starts)
      found[scale] = state, metrics
  plain, noisy_state = (found[s][0].params for s in (0.0, 1e-3))
  assert perturbation.SIGMA not in plain
  assert 'perturbation' not in found[0.0][1]
  scales = noisy_state[perturbation.SIGMA]
  np.testing.assert_allclose(found[1e-3][1]['perturbation'], np.abs(scales).mean(), rtol=1e-6)
  moved = np.abs(scales - 1e-3)
  assert ((1e-5 < moved) & (moved < 1.1e-3)).all()  # two steps of Adam at 5e-4
  assert jax.tree.structure(perturbation.removed(noisy_state)) == jax.tree.structure(plain)
