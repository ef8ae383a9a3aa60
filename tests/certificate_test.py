"""Certificates: exact on whole populations, worst cases of bad rows, plain verdicts."""

import dataclasses
import functools
import math

import certificate_oracle as oracle
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from trm_jax import certificates
from trm_jax.certificates import confidence
from trm_jax.types import InputError

# Compiled: one program a shape instead of one an operation.
EAGER = (certificates.improvement, certificates.harm, certificates.retrospective)
STATIC = dict(static_argnames=('samples', 'low', 'high', 'cap'))
improvement, harm, retrospective = (
  functools.partial(jax.jit(f, **STATIC), samples=1) for f in EAGER
)
monitor = jax.jit(certificates.monitor, static_argnames=('samples', 'backwards'))
IS = [improvement, harm]
CAPPED = [jax.jit(functools.partial(f, cap=c)) for c in (100.0, 0.1) for f in IS]


def values(found):
  return np.asarray([found.estimate, found.lower, found.log_evalue])


@pytest.mark.slow
def test_worked_example():
  ratio = jnp.array([[1.1, 0.9, 1.0], [1.2, 0.5, 1.1], [1.0, 1.3, 1.0]])
  valid = jnp.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]], bool)
  weight = jnp.exp(certificates.log_weight(jnp.log(ratio), valid))
  np.testing.assert_allclose(weight, [0.99, 0.66, 1.3], rtol=1e-6)
  found = IS[0](jnp.log(ratio), valid, jnp.array([1.0, 0.0, 1.0]))
  assert float(found.estimate) == pytest.approx(0.096667, abs=1e-6)
  assert float(found.terms['gained']) == pytest.approx(0.3 / 3, abs=1e-6)
  assert float(found.terms['lost']) == pytest.approx(-0.01 / 3, abs=1e-6)
  alarm = IS[1](jnp.log(ratio), valid, jnp.array([1.0, 0.0, 1.0]))
  assert float(alarm.estimate) == pytest.approx(-0.34 / 3, abs=1e-6)


@pytest.mark.parametrize('support', [True, False])
def test_the_mean_is_below_the_gain(support):
  """Exactly, on populations: equal with the policy's support, below without it and when capped."""
  with jax.enable_x64(True):
    for seed in range(40):
      it = oracle.draw(seed, T=4, spread=0.2 + seed / 20, support=support)
      rows = it.log_ratio, it.valid, it.reward
      rows = [jnp.asarray(x) for x in rows]
      up, down, capped, _ = (float(f(*rows).estimate) for f in CAPPED)
      assert capped <= up + 1e-12
      assert down <= -it.gain + 1e-12 and up <= it.gain + 1e-12
      if support:
        assert up == pytest.approx(it.gain, abs=1e-12)
        assert down == pytest.approx(-it.gain, abs=1e-12)
    assert capped < up - 1e-3  # the cap was reached


def test_the_retrospective_mean_is_below_the_gain():
  one = lambda *row: retrospective(*(x[None] for x in row)).estimate
  each = jax.jit(jax.vmap(one))
  with jax.enable_x64(True):
    for seed in range(20):
      it = oracle.draw(seed, T=3, spread=0.5, support=seed % 2 > 0)
      mass, *rows = oracle.swapped(it, 3, seed)
      mean = float((jnp.asarray(mass) * each(*map(jnp.asarray, rows))).sum())
      assert mean <= it.gain + 1e-12
      if seed % 2:
        assert mean == pytest.approx(it.gain, abs=1e-12)
  assert retrospective(*map(jnp.asarray, rows)).claim == 'J(new) > J(old)'


@pytest.mark.slow
def test_terms_sum_to_the_estimate_in_units_of_the_reward():
  it = oracle.draw(3, T=4, spread=0.3)
  log_ratio, valid, reward = (jnp.asarray(x) for x in (it.log_ratio, it.valid, it.reward))
  for make in IS:
    one = make(log_ratio, valid, reward, samples=4)
    assert float(sum(one.terms.values())) == pytest.approx(float(one.estimate), abs=1e-6)
    other = make(log_ratio, valid, 4 * reward - 1, samples=4, low=-1.0, high=3.0)
    np.testing.assert_allclose(values(other)[:2], 4 * values(one)[:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other.log_evalue, one.log_evalue, rtol=1e-4, atol=1e-5)


def test_the_unit_is_the_prompt():
  """Rows of a prompt share its fate: their mean counts once."""
  rng = np.random.default_rng(0)
  log_ratio = jnp.asarray(rng.normal(0, 0.3, (12, 1)), jnp.float32)
  valid, reward = jnp.ones((12, 1), bool), jnp.asarray(rng.random(12), jnp.float32)
  found = improvement(log_ratio, valid, reward, samples=3)
  x = (reward * jnp.expm1(log_ratio[:, 0])).reshape(4, 3).mean(-1)
  assert float(found.lower) == pytest.approx(float(confidence.betting(x, alpha=0.05)), abs=1e-6)
  assert float(found.log_evalue) == pytest.approx(float(confidence.log_evalue(x)), abs=1e-5)
  copies = IS[0](*(jnp.repeat(a, 5, 0) for a in (log_ratio, valid, reward)))
  group = improvement(*(jnp.repeat(a, 5, 0) for a in (log_ratio, valid, reward)), samples=5)
  alone = IS[0](log_ratio, valid, reward)
  np.testing.assert_allclose(values(group), values(alone), rtol=1e-5, atol=1e-6)
  assert float(copies.lower) > float(alone.lower)


@pytest.mark.slow
@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_rows_that_cannot_be_judged_count_as_the_worst(bad):
  log_ratio, valid = jnp.full((6, 2), 0.1), jnp.ones((6, 2), bool)
  reward = jnp.array([1.0, 0, 1, 0, 1, 1])
  for make in IS:
    found = make(log_ratio.at[4, 1].set(bad), valid, reward)
    zero = make(log_ratio.at[4].set(jnp.array([0.1, -1e4])), valid, reward)
    np.testing.assert_array_equal(values(found), values(zero))
    assert values(found)[0] <= values(make(log_ratio, valid, reward))[0]
  # A missing reward may have been 0 or 1.
  for make in IS:
    found = make(log_ratio, valid, reward.at[4].set(math.nan))
    assert float(found.terms['missing']) == pytest.approx(-1 / 6)
    assert np.isfinite(values(found)).all()


@pytest.mark.parametrize('samples', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_without_tokens_do_not_exist(samples):
  """Neither as rows of weight 1 nor as units: a batch says what it says without them."""
  it = oracle.draw(5, T=4, spread=0.3)
  rows = [jnp.asarray(x)[:12] for x in (it.log_ratio, it.valid, it.reward)]
  # Two prompts of nothing, and every row of those left beside one of nothing where samples = 2.
  at = np.concatenate([np.arange(12), np.full(4, -1)])
  if samples == 2:
    at = np.stack([np.arange(12), np.full(12, -1)], 1).ravel()
  there = jnp.asarray(at >= 0)
  padded = [x[jnp.maximum(at, 0)] for x in rows]
  for content in (0.0, 7.0, math.nan):
    dirty = (
      jnp.where(there[:, None], padded[0], content),
      padded[1] & there[:, None],
      jnp.where(there, padded[2], content),
    )
    for make in IS:
      got, want = make(*dirty, samples=samples), make(*rows)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    got, want = monitor(*dirty, samples=samples), monitor(*rows, samples=1)
    for name, value in want.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
  nothing = IS[0](rows[0], jnp.zeros_like(rows[1]), rows[2])
  assert float(nothing.estimate) == float(nothing.log_evalue) == 0 and float(nothing.lower) == -1
  assert nothing.verdict.startswith('vacuous')
  # Concrete rewards outside the range raise; beside nothing there is none.
  certificates.improvement(*rows[:1], rows[1].at[3].set(False), rows[2].at[3].set(9.0), samples=1)


@pytest.mark.slow
def test_identical_policies_are_never_certified():
  zeros, valid = jnp.zeros((4096, 3)), jnp.ones((4096, 3), bool)
  for make in IS:
    found = make(zeros, valid, jnp.ones(4096) * 0.5)
    assert float(found.estimate) == float(found.log_evalue) == 0 > float(found.lower)
    assert found.verdict.startswith('vacuous')


def verdicts(ratio, rows, reward):
  """Half of the rows have this ratio and reward, the others the ratio that makes the mean 1."""
  up = np.arange(rows) % 2 == 0
  log_ratio = jnp.log(jnp.where(up, ratio, 2 - ratio))[:, None]
  args = log_ratio, jnp.ones((rows, 1), bool), jnp.where(up, reward, 1 - reward).astype(jnp.float32)
  return [make(*args).verdict for make in IS]


@pytest.mark.slow
def test_verdicts_say_no_more_than_was_proven():
  up, down = verdicts(1.3, 200, 1.0)
  assert up.startswith('certified (95 %): J(policy) > J(rollout) by at least 0.')
  assert down == 'not certified: J(policy) < J(rollout)'
  up, down = verdicts(1.3, 200, 0.0)
  assert down.startswith('certified (95 %): J(policy) < J(rollout) by at least 0.')
  up, down = verdicts(1.3, 10, 1.0)  # ten rows prove nothing, whatever the reward
  assert up.startswith('vacuous: no reward could certify J(policy) > J(rollout)')
  assert down.startswith('vacuous')
  found = IS[0](jnp.full((9, 1), 0.1), jnp.ones((9, 1), bool), jnp.ones(9))
  found = dataclasses.replace(found, lower=jnp.float32(0.012468))
  assert found.verdict.endswith('by at least 0.0124')  # rounded down, not to the nearest


@pytest.mark.slow
@pytest.mark.parametrize(
  'alpha, level',
  [(0.05, '95'), (0.1, '90'), (0.0123, '98.77'), (0.12345, '87.6'), (1e-7, '99.99999')]
  + [(confidence.spent(0.05, k), level) for k, level in [(25, '99.99513'), (100, '99.999696')]],
)
def test_no_verdict_is_certain(alpha, level):
  """The level is rounded down: at most what was proven, and never 100 %."""
  ratio, valid = jnp.full((4000, 1), 0.2), jnp.ones((4000, 1), bool)
  ratio = ratio.at[::2].set(math.log(0.7))
  reward = jnp.arange(4000) % 2 > 0
  found = IS[0](ratio, valid, reward.astype(jnp.float32), alpha=alpha)
  assert found.verdict.startswith(f'certified ({level} %): J(policy) > J(rollout) by')


@pytest.mark.slow
def test_what_is_certified_was_possible():
  """With every row at its kindest reward the two bounds are one; no rounding may part them."""
  for rows in range(58, 66):
    found = IS[0](jnp.full((rows, 1), math.log(1.1)), jnp.ones((rows, 1), bool), jnp.ones(rows))
    assert bool(found.possible) == bool(found.lower > 0)


def test_wrong_log_probs_are_void():
  """Identical policies, log-probs with an error that has mean 0: both directions seem certain."""
  rng = np.random.default_rng(0)
  log_ratio = jnp.asarray(rng.normal(0, 0.01, (512, 4096)), jnp.float32)
  args = log_ratio, jnp.ones(log_ratio.shape, bool), jnp.asarray(rng.integers(0, 2, 512) * 1.0)
  found = [make(*args) for make in IS]
  assert all(f.lower > 0 and f.void for f in found)
  assert all(f.verdict.startswith('void: the mean weight is above 1') for f in found)
  assert monitor(*args, samples=1)['certificate/void'] == 1
  drawn = IS[0](log_ratio - 4096 * 0.01**2 / 2 / 4096, *args[1:])  # lognormal weights of mean 1
  assert not drawn.void and monitor(*args, samples=1)['certificate/void'] == 1


def test_over_steps():
  rng = np.random.default_rng(0)
  ratio = 1 + 0.2 * rng.choice([-1, 1], (50, 256, 1))
  args = jnp.asarray(np.log(ratio)), jnp.ones(ratio.shape, bool)
  reward = jnp.asarray(rng.random((50, 256)) < 0.3 + 0.1 * (ratio[..., 0] > 1), jnp.float32)
  found = jax.vmap(lambda *a: monitor(*a, samples=1))(*args, reward)
  single = np.asarray(found['certificate/lower'])
  whole = certificates.over_steps(
    found['certificate/estimate'], found['certificate/square'], prompts=256, low=0.0, high=1.0
  )
  assert (single < 0).mean() > 0.9 and 0 < float(whole) < 0.01  # the gain is .01
  x = np.asarray(reward) * (ratio[..., 0] - 1)
  want = confidence.cumulative(x.sum(), (x**2).sum(), alpha=0.05) / x.size
  assert float(whole) == pytest.approx(float(want), rel=1e-3)
  # Certificates in other units of the reward say the same in those units.
  made = jax.vmap(lambda *a: improvement(*a, samples=1, low=-5.0, high=5.0))(*args, 10 * reward - 5)
  wide = functools.partial(certificates.over_steps, made.estimate, made.square, prompts=256)
  assert float(wide(low=-5.0, high=5.0)) == pytest.approx(10 * float(whole), rel=1e-3)
  with pytest.raises(TypeError, match='low'):
    wide()


def test_a_fitted_policy_is_certified_on_its_own_rows_and_not_on_fresh_ones():
  """The misuse that the head of the module warns of, at zero effect: rewards are coin flips."""
  rng = np.random.default_rng(0)

  def false_rate(fresh):
    wrong = 0
    for _ in range(40):
      tokens, other = rng.integers(0, 64, (2, 2048))
      rewards = rng.integers(0, 2, (2, 2048))
      lift = np.bincount(tokens, rewards[0] - 0.5, 64) / 8
      log_p = lift - np.log(np.exp(lift).mean())  # up where a reward was seen
      at, reward = (other, rewards[1]) if fresh else (tokens, rewards[0])
      found = certify(jnp.asarray(log_p[at][:, None]), jnp.asarray(reward, jnp.float32))
      wrong += float(found) > 0
    return wrong / 40

  @jax.jit
  def certify(log_ratio, reward):
    return improvement(log_ratio, jnp.ones_like(log_ratio, bool), reward, samples=1).lower

  assert false_rate(fresh=False) > 0.9 and false_rate(fresh=True) <= 0.05


@pytest.mark.slow
def test_jit_and_precision():
  it = oracle.draw(1, T=4, spread=0.4)
  rows = it.log_ratio, it.valid, it.reward
  with jax.enable_x64(True):
    double = certificates.improvement(*map(jnp.asarray, rows), samples=4)
    assert double.lower.dtype == jnp.float64
  single = [jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else bool) for x in rows]
  eager = certificates.improvement(*single, samples=4)
  jitted = improvement(*single, samples=4)
  assert jitted.claim == eager.claim and jitted.lower.dtype == jnp.float32
  np.testing.assert_allclose(values(jitted), values(eager), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(values(eager), values(double), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_monitor():
  it = oracle.draw(2, T=4, spread=0.4)
  rows = [jnp.asarray(x) for x in (it.log_ratio, it.valid, it.reward)]
  found = monitor(*rows, samples=4)
  up, down = (make(*rows, samples=4) for make in IS)
  named = ('estimate', 'lower', 'log_evalue')
  np.testing.assert_allclose([found[f'certificate/{n}'] for n in named], values(up), rtol=1e-5)
  got = [found['certificate/harm_lower'], found['certificate/harm_log_evalue']]
  np.testing.assert_allclose(got, values(down)[1:], rtol=1e-5)
  w = np.exp((it.log_ratio * it.valid).sum(-1))
  want = np.corrcoef(it.reward, w)[0, 1]
  assert float(found['certificate/correlation']) == pytest.approx(want, abs=1e-4)
  x = (it.reward * (w - 1)).reshape(-1, 4).mean(-1)
  assert float(found['certificate/square']) == pytest.approx((x**2).mean(), rel=1e-4)
  back = monitor(*rows, samples=4, backwards=True)
  want = [f(*rows, samples=4) for f in (retrospective, certificates.retrospective_harm)]
  assert want[1].claim == 'J(new) < J(old)'
  got = [back[f'retrospective/{n}'] for n in ('estimate', 'lower', 'harm_lower')]
  np.testing.assert_allclose(got, [*values(want[0])[:2], want[1].lower], rtol=1e-5)
  x = ((1 - it.reward) * (w - 1)).reshape(-1, 4).mean(-1)
  assert float(back['retrospective/square']) == pytest.approx((x**2).mean(), rel=1e-4)
  flat = monitor(0 * rows[0], *rows[1:], samples=4)
  assert float(flat['certificate/correlation']) == 0
  assert float(found['certificate/void']) == 0
  # A reward outside the range counts as the worst, as a missing one does, and poisons nothing.
  for bad in (2.0, -1.0, math.nan):
    odd = monitor(*rows[:2], rows[2].at[5].set(bad), samples=4)
    assert all(np.isfinite(v) for v in odd.values())
    assert odd['certificate/estimate'] < found['certificate/estimate']
    np.testing.assert_allclose(
      odd['certificate/lower'],
      improvement(*rows[:2], rows[2].at[5].set(math.nan), samples=4).lower,
    )


def test_a_traced_reward_outside_counts_as_missing():
  it = oracle.draw(2, T=4, spread=0.4)
  rows = [jnp.asarray(x) for x in (it.log_ratio, it.valid, it.reward)]
  found = improvement(*rows[:2], rows[2].at[3].set(200.0))
  want = IS[0](*rows[:2], rows[2].at[3].set(math.nan))
  np.testing.assert_allclose(values(found), values(want), rtol=1e-5)


@pytest.mark.parametrize(
  'change, word',
  [
    (dict(reward=jnp.array([0.5, 1.2])), r'reward=1.2.* lies outside \[0.0, 1.0\]'),
    (dict(reward=jnp.array([0.5, -0.5])), 'reward=-0.5 lies outside'),
    (dict(reward=jnp.array([0.0, 1.0]), low=1.0), 'must be finite with low < high'),
    (dict(samples=3), 'samples=3 does not divide the 2 rows'),
    (dict(samples=0), 'samples=0'),
    (dict(alpha=0.0), 'alpha=0.0'),
    (dict(reward=jnp.zeros(3)), r'reward \(3,\): make them'),
    (dict(valid=jnp.ones(3, bool)), r'valid \(3,\)'),
  ],
)
@pytest.mark.parametrize('make', [functools.partial(f, samples=1) for f in EAGER])
def test_bad_input(make, change, word, monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  good = dict(
    log_ratio=jnp.zeros((2, 3)), valid=jnp.ones((2, 3), bool), reward=jnp.array([0.0, 1.0])
  )
  with pytest.raises(InputError, match=word):
    make(**(good | change))
