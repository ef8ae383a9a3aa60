"""`rotary`: the frequencies from their definition; transformers' own are in weights_test."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import policy, types
from trm_jax.policy import rotary

WIDTH, BASE = 64, 10_000.0
PLAIN = BASE ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
YARN = rotary.Scaling(kind='yarn', factor=4.0, context=512)


def test_no_scaling_and_linear():
  found, magnitude = rotary.frequencies(WIDTH, BASE)
  np.testing.assert_allclose(found, PLAIN, rtol=1e-6)
  assert magnitude == 1
  stretched = rotary.Scaling(kind='linear', factor=3.0)
  found, magnitude = rotary.frequencies(WIDTH, BASE, stretched)
  np.testing.assert_allclose(found, PLAIN / 3, rtol=1e-6)
  assert magnitude == 1


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
  found, magnitude = rotary.frequencies(WIDTH, BASE, YARN)
  turns = PLAIN * YARN.context / (2 * math.pi)
  ratio = np.asarray(found) / PLAIN
  # The ramp's ends are whole pairs: one pair of slack at each.
  fast = turns > 32 * BASE ** (2 / WIDTH)
  slow = turns < 1 * BASE ** (-2 / WIDTH)
  assert fast.sum() > 2 and slow.sum() > 10
  np.testing.assert_allclose(ratio[fast], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[slow], 1 / 4, rtol=1e-6)
  between = ratio[~fast & ~slow]
  assert len(between) > 5 and (np.diff(ratio) <= 1e-6).all()
  assert magnitude == pytest.approx(0.1 * math.log(4) + 1)
  given = rotary.Scaling(kind='yarn', factor=4.0, magnitude=1.5)
  assert rotary.frequencies(WIDTH, BASE, given)[1] == 1.5


def test_rotation_turns_pairs_and_scales_them():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 3, 1, WIDTH)), jnp.float32)
  positions = jnp.array([[0, 1, 7], [-2, 0, 90]])
  frequency, magnitude = rotary.frequencies(WIDTH, BASE, YARN)
  turn = np.exp(1j * np.asarray(positions)[..., None, None] * np.asarray(frequency, np.float64))
  z = (np.asarray(x[..., : WIDTH // 2]) + 1j * np.asarray(x[..., WIDTH // 2 :])) * turn * magnitude
  got = rotary.rotate(x, positions, BASE, YARN)
  np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), rtol=0, atol=2e-5)
  assert rotary.rotate(x.astype(jnp.bfloat16), positions, BASE).dtype == jnp.bfloat16


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'kind': 'linear', 'factor': 0.5}, ['rope_scaling.factor=0.5']),
    ({'kind': 'linear', 'factor': math.nan}, ['rope_scaling.factor=nan']),
    ({'factor': 2.0}, ['rope_scaling.factor=2.0', 'linear', 'yarn']),
    ({'kind': 'yarn', 'context': 0}, ['rope_scaling.context=0']),
    ({'kind': 'yarn', 'beta_fast': 1.0}, ['beta_slow=1.0', 'beta_fast=1.0']),
    ({'kind': 'yarn', 'magnitude': -1.0}, ['rope_scaling.magnitude=-1.0']),
  ],
)
def test_bad_settings(changes, words):
  with pytest.raises(types.InputError) as error:
    rotary.Scaling(**changes)
  assert all(word in str(error.value) for word in words), str(error.value)


def test_other_kinds_and_bases_are_refused():
  with pytest.raises(Exception, match='(?s)ntk.*yarn'):  # the type checker of the tests comes first
    rotary.Scaling(kind='ntk')
  with pytest.raises(types.InputError, match=r'rope_base=1\.0 must be > 1'):
    policy.PolicyConfig(rope_base=1.0, rope_scaling=YARN)
