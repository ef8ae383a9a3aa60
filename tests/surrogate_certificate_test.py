"""Certificates by way of the surrogate: worked figures, exact inequalities on whole populations."""

import dataclasses
import functools
import inspect
import math

import certificate_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import bounds, certificates
from trm_jax.bounds import sharp
from trm_jax.certificates import confidence, patching, surrogate
from trm_jax.types import InputError

T = 4
# Compiled, one program a shape instead of one an operation; most rows are prompts of their own.
STATIC = ('samples', 'penalty', 'low', 'high', 'drop', 'alpha')
EAGER = tuple(
  functools.partial(f, samples=1)
  for f in (surrogate.first_order, surrogate.prefix, surrogate.error_bounds)
)
first_order, prefix, error_bounds = (
  functools.partial(
    jax.jit(
      f.func, static_argnames=[n for n in STATIC if n in inspect.signature(f.func).parameters]
    ),
    samples=1,
  )
  for f in EAGER
)
patch = jax.jit(patching.patch, static_argnames=('limits', 'horizon'))
LIMITS = (
  patching.Limits(max_kl=0.1),
  patching.Limits(max_tv=0.3),
  patching.Limits(max_kl=0.3, max_tv=0.25, max_chi2=0.5, budget=0.4, band=0.3),
  patching.Limits(budget=0.8),
  patching.Limits(budget=2.0, band=0.5),
  patching.Limits(max_kl=1e-9),
  patching.Limits(),
)


def example(**limits):
  """Three responses of at most 3 tokens; the second leaves at its second context."""
  ratio = jnp.array([[1.1, 0.9, 1.0], [1.2, 0.5, 1.1], [1.0, 1.3, 1.0]])
  patched = patch(
    jnp.log(ratio),
    jnp.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]], bool),
    kl=jnp.array([[0.01, 0.02, 0.001], [0.03, 0.2, 0.001], [0, 0.01, 9]]),
    tv=jnp.array([[0.05, 0.06, 0.01], [0.08, 0.2, 0.01], [0, 0.05, 9]]),
    chi2=jnp.array([[0.02, 0.04, 0.002], [0.06, 0.5, 0.002], [0, 0.02, 9]]),
    limits=patching.Limits(**limits),
  )
  return patched, jnp.array([1.0, 0.0, 1.0])


def test_worked_example():
  patched, reward = example(max_kl=0.05)
  np.testing.assert_array_equal(patched.kept, [True, False, True])
  np.testing.assert_allclose(patched.weight, [0.99, 1.2, 1.3], rtol=1e-6)
  np.testing.assert_allclose(patched.second, [4.002e-4, 0, 0], rtol=1e-4)
  np.testing.assert_allclose(patched.limits.future_tv(3), [0.223607, 0.158114, 0], atol=1e-6)
  found = error_bounds(patched, reward)
  assert float(found['b_star']) == pytest.approx(0.030974, abs=1e-6)
  assert float(found['l2']) == pytest.approx(0.005775, abs=1e-6)
  assert float(found['per_position']) == pytest.approx(0.030974, abs=1e-6)
  later = 0.1 * (0.06 + 0.01) + 0.1 * 0.01  # of the first row; the others have nothing later
  assert float(found['future_tv']) == pytest.approx(later / 3, abs=1e-7)
  first = math.sqrt((0.05 + 0.08) / 3 * 0.1 * (0.02 + 0.001) / 3)
  second = math.sqrt((0.06 + 0.05) / 3 * 0.1 * 0.001 / 3)
  assert float(found['jensen_pinsker']) == pytest.approx(first + second, abs=1e-7)
  assert float(found['smallest']) == pytest.approx(later / 3, abs=1e-7)
  plain, _ = example()
  for drop, lost in ((0.1, -1 / 3), (0.3, 0)):
    made = first_order(plain, jnp.ones(3), patching.tv_penalty, drop=drop)
    assert float(made.terms['rejected']) == pytest.approx(lost)
  made = first_order(patched, reward, patching.tv_penalty)
  assert float(made.terms['surrogate']) == pytest.approx(0.1, abs=1e-6)
  assert float(made.terms['rejected']) == 0
  assert float(made.estimate) == pytest.approx(0.1 - 0.030974, abs=1e-6)
  # The row that leaves costs its reward, and no limit means no patch.
  made = first_order(patched, jnp.ones(3), patching.tv_penalty)
  assert float(made.terms['rejected']) == pytest.approx(-1 / 3)
  made = first_order(patched, reward, patching.tv_penalty, keep=jnp.array([True, True, False]))
  assert float(made.terms['surrogate']) == 0 and float(made.terms['rejected']) == pytest.approx(
    -1 / 3
  )
  np.testing.assert_allclose(example()[0].first, [0, -0.2, 0.3], atol=1e-6)
  np.testing.assert_allclose(example()[0].weight, [0.99, 0.66, 1.3], rtol=1e-6)


def test_goodness_by_hand():
  good = lambda **limits: np.asarray(example(**limits)[0].good).astype(int).tolist()
  assert good(max_tv=0.06) == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
  assert good(max_chi2=0.05) == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
  assert good(budget=0.061) == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
  # The token's own ratio is not yet known at its context: the second row leaves one step later. The
  # third has ended when its product leaves: there is no context that could be outside.
  assert good(band=0.15) == [[1, 1, 1], [1, 0, 0], [1, 1, 1]]


def test_epsilon_and_future_by_hand():
  limits = patching.Limits(max_kl=0.08, max_tv=0.15)
  np.testing.assert_allclose(limits.future_tv(5), [0.4, 0.346410, 0.282843, 0.15, 0], atol=1e-6)
  assert patching.Limits(max_kl=0.08).epsilon == pytest.approx(0.2)
  assert patching.Limits(max_chi2=0.09).epsilon == pytest.approx(0.15)
  assert patching.Limits(budget=0.09).epsilon == pytest.approx(0.15)
  assert patching.Limits().epsilon == 1
  # KL(policy || rollout) <= log(1 + chi2), summed over what comes after.
  reverse = math.sqrt(3 * math.log(1.09) / 2)
  np.testing.assert_allclose(patching.Limits(max_chi2=0.09).future_tv(4)[0], reverse, rtol=1e-5)
  whole = math.sqrt(math.expm1(0.09)) / 2
  np.testing.assert_allclose(
    patching.Limits(budget=0.09).future_tv(4), [whole] * 2 + [0.15, 0], rtol=1e-6
  )


def population(seed, *, spread, limits):
  it = oracle.draw(seed, T=T, spread=spread)
  arrays = {k: jnp.asarray(getattr(it, k)) for k in ('log_ratio', 'valid', 'kl', 'tv', 'chi2')}
  return it, patch(**arrays, limits=limits), jnp.asarray(it.reward)


@functools.partial(jax.jit, static_argnames='limits')
def exact(log_ratio, valid, kl, tv, chi2, reward, limits):
  """Everything that is a mean over rows, and so an expectation on a population."""
  p = patch(log_ratio, valid, kl=kl, tv=tv, chi2=chi2, limits=limits)
  penalties = dict(tv=patching.tv_penalty)
  if limits.budget < math.inf:
    penalties['l2'] = patching.l2_penalty
    penalties['l2_scaled'] = functools.partial(patching.l2_penalty, scale=0.3)
  found = {}
  for name, penalty in penalties.items():
    made = first_order(p, reward, penalty, drop=0.5)
    found[f'first_order/{name}'] = made.estimate
    found[f'sub-mask/{name}'] = first_order(p, reward, penalty, keep=log_ratio[:, 0] > 0).estimate
    mean = sum(
      surrogate._surrogate(
        p,
        reward,
        penalty,
        p.kept | True,
        samples=1,
        alpha=0.1,
        low=0.0,
        high=1.0,
        drop=0.5,
      ).terms.values()
    )
    found[f'prefix/{name}'] = mean - jnp.where(p.kept, 0, p.weight).mean()
    found[f'most/{name}'] = penalty(p).most - penalty(p).rows.max()
  # Delta of any sub-mask, here the kept rows, the rows with S >= 0, and all.
  second = p.weight - 1 - p.first
  deltas = {
    'kept': (jnp.where(p.kept, reward, 0) * second).mean(),
    'sub': (jnp.where(p.kept & (p.first >= 0), reward, 0) * second).mean(),
    'prefix': (reward * second).mean(),
    'worst': jnp.maximum(second, 0).mean(),
  }
  moments = dict(
    weight=p.weight.mean(),
    square=(p.weight**2).mean(),
    second=(second**2).mean(),
    q=p.second.mean(),
    left=jnp.where(p.kept, 0, p.weight).mean(),
    r=1 - p.kept.mean(),
  )
  return found, deltas, moments, error_bounds(p, reward)


@pytest.mark.parametrize(
  'limits',
  [pytest.param(x, marks=[pytest.mark.slow] * (i % 2)) for i, x in enumerate(LIMITS)],
  ids=str,
)
def test_every_inequality_holds_exactly(limits):
  tight = []
  with jax.enable_x64(True):
    for seed in range(60):
      it = oracle.draw(seed, T=T, spread=0.05 + 0.02 * seed)
      arrays = (it.log_ratio, it.valid, it.kl, it.tv, it.chi2, it.reward)
      found, deltas, moments, limit = jax.device_get(exact(*map(jnp.asarray, arrays), limits))
      for name, value in found.items():
        if name.startswith('most/'):
          assert value >= -1e-12, name
        else:
          assert value <= it.gain + 1e-12, (name, seed)
      # Bounds with the reward's own deviation are for that reward, the others for the worst too.
      for name, value in limit.items():
        assert value >= max(map(abs, deltas.values())) - 1e-12, (name, seed)
      assert moments['weight'] == pytest.approx(1, abs=1e-12)
      assert moments['q'] == pytest.approx(moments['second'], abs=1e-12)
      assert moments['square'] <= math.exp(min(limits.budget, 600)) + 1e-12
      if limits.budget < math.inf:
        x = limits.budget
        assert moments['second'] <= math.expm1(x) - x + 1e-12
        assert moments['left'] <= moments['r'] + math.sqrt(moments['r'] * math.expm1(x)) + 1e-12
      worst = abs(deltas['worst'])
      tight.append(min(limit.values()) / worst if worst > 1e-9 else math.inf)
  if max(map(float, tight)) < math.inf:
    assert min(tight) < 4  # bounds that were merely huge would pass all of the above


@pytest.mark.slow
def test_l2_with_the_rewards_own_deviation():
  it, p, reward = population(5, spread=0.4, limits=patching.Limits(budget=1.0))
  found = error_bounds(p, reward, samples=4)
  kept = np.where(p.kept, it.reward, 0).reshape(-1, 4)
  sd = min(0.5, math.sqrt(kept.var(-1, ddof=1).mean()))
  assert float(found['l2']) == pytest.approx(sd * math.sqrt(float(p.second.mean())), rel=1e-5)
  np.testing.assert_allclose(found['l2_budget'], sharp.budget_l2(1.0), rtol=1e-6)
  # A missing reward may have been anything: the largest deviation there is.
  found = error_bounds(p, reward.at[0].set(math.nan), samples=4)
  assert float(found['l2']) == pytest.approx(0.5 * math.sqrt(float(p.second.mean())), rel=1e-5)


def test_the_first_order_form_needs_no_support():
  """With rollouts that leave tokens of the policy out: one-sided, by the TV penalty."""
  limits = patching.Limits(max_kl=0.3, max_tv=0.4)

  @jax.jit
  def estimate(log_ratio, valid, kl, tv, reward):
    patched = patch(log_ratio, valid, kl=kl, tv=tv, limits=limits)
    return first_order(patched, reward, patching.tv_penalty).estimate, patched.kept.mean()

  with jax.enable_x64(True):
    kept = []
    for seed in range(40):
      it = oracle.draw(seed, T=T, spread=0.05 + 0.01 * seed, support=False)
      arrays = (it.log_ratio, it.valid, it.kl, it.tv, it.reward)
      found, share = estimate(*map(jnp.asarray, arrays))
      assert found <= it.gain + 1e-12, seed
      kept.append(float(share))
    assert max(kept) > 0.3


@pytest.mark.slow
def test_bounds_of_identical_policies_are_zero_and_units_scale():
  it, _, reward = population(1, spread=0.3, limits=patching.Limits())
  zero = jnp.zeros_like(jnp.asarray(it.kl))
  p = patch(
    zero, jnp.asarray(it.valid), kl=zero, tv=zero, chi2=zero, limits=patching.Limits(max_kl=1.0)
  )
  assert all(float(x) == 0 for x in error_bounds(p, reward).values())
  _, p, reward = population(1, spread=0.3, limits=patching.Limits(max_kl=0.2, budget=1.0, band=1.0))
  one = error_bounds(p, reward)
  other = error_bounds(p, 4 * reward - 1, low=-1.0, high=3.0)
  for name in one:
    np.testing.assert_allclose(other[name], 4 * one[name], rtol=1e-5)
  penalty = patching.l2_penalty
  for make in (first_order, prefix):
    one, other = make(p, reward, penalty), make(p, 4 * reward - 1, penalty, low=-1.0, high=3.0)
    np.testing.assert_allclose(other.lower, 4 * one.lower, rtol=1e-4)
    np.testing.assert_allclose(sum(other.terms.values()), other.estimate, atol=1e-5)


def test_penalties_by_hand():
  patched, _ = example(max_kl=0.05, budget=0.2, band=0.5)
  w = patched.limits.future_tv(3)
  found = patching.tv_penalty(patched)
  want = [2 * (0.05 * w[0] + 0.06 * w[1]), 2 * 0.08 * w[0], 2 * 0.05 * w[1]]
  np.testing.assert_allclose(found.rows, want, rtol=1e-5)
  assert float(found.most) == pytest.approx(float(2 * patched.limits.epsilon * w.sum()), rel=1e-5)
  scaled = patching.l2_penalty(patched, scale=0.4)
  np.testing.assert_allclose(scaled.rows, patched.second / 0.8 + 0.05, rtol=1e-6)
  assert float(scaled.most) == pytest.approx(0.25 * 0.2 / 0.8 + 0.05)
  # The default scale turns the largest possible mean of Q into the closed bound.
  whole = float(sharp.budget_l2(0.2))
  free = patching.l2_penalty(patched)
  q = math.expm1(0.2) - 0.2
  np.testing.assert_allclose(free.rows, patched.second / (8 * whole) + whole / 2, rtol=1e-5)
  assert q / (8 * whole) + whole / 2 == pytest.approx(whole, rel=1e-5)
  closed = patching.l2_penalty(example(budget=0.2)[0])
  np.testing.assert_allclose(closed.rows, [whole] * 3, rtol=1e-6)


def rows(count, drift, kl=1e-4):
  """Many rows of two tokens on which the policy moves towards the reward."""
  rng = np.random.default_rng(0)
  step = np.log1p(np.where(rng.random((count, 2)) < 0.5, drift, -drift))
  valid = jnp.ones((count, 2), bool)
  level = jnp.full((count, 2), kl)
  patched = patch(
    jnp.asarray(step, jnp.float32),
    valid,
    kl=level,
    tv=jnp.sqrt(level / 2),
    chi2=2 * level,
    limits=patching.Limits(max_kl=2 * kl, budget=8 * kl, band=1.0),
  )
  return patched, jnp.asarray(step.sum(-1) > 0, jnp.float32)


@pytest.mark.slow
def test_verdicts():
  patched, reward = rows(20_000, 0.1)
  for make in (
    first_order(patched, reward, patching.tv_penalty),
    first_order(patched, reward, patching.l2_penalty),
    prefix(patched, reward, patching.l2_penalty),
  ):
    assert make.verdict.startswith('certified (95 %): J(policy) > J(rollout) by at least'), make
    assert float(make.alpha) == pytest.approx(0.05)
    assert np.isnan(make.square)  # nothing for `over_steps`, which needs rows >= -1
  lost = dataclasses.replace(patched, missing=patched.missing.at[0].set(True))
  assert first_order(lost, reward, patching.tv_penalty).verdict.startswith('certified')
  patched, reward = rows(20_000, 0.1, kl=0.05)  # the penalty is above anything S can show
  made = first_order(patched, reward, patching.tv_penalty)
  assert made.verdict.startswith('vacuous')
  better = certificates.improvement(
    jnp.log1p(patched.excess), jnp.ones_like(patched.good), reward, samples=4
  )
  assert better.verdict.startswith('certified')


def test_halves_of_alpha():
  patched, reward = rows(500, 0.1)
  r = -confidence.betting(0 * reward, alpha=0.025)
  want = r + jnp.sqrt(r * math.expm1(8e-4))
  found = prefix(patched, reward, patching.tv_penalty)
  assert float(found.terms['less']) == pytest.approx(-float(want), rel=1e-4)
  penalty = patching.tv_penalty(patched)
  x = reward * patched.first - penalty.rows
  low = confidence.betting(x, alpha=0.025, low=-1 - penalty.most) - want
  assert float(found.lower) == pytest.approx(float(low), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [pytest.param('log_ratio', marks=pytest.mark.slow), 'kl', 'tv', 'chi2']
)
def test_rows_that_cannot_be_judged(name):
  it = oracle.draw(4, T=T, spread=0.2)
  arrays = {k: jnp.asarray(getattr(it, k)) for k in ('log_ratio', 'valid', 'kl', 'tv', 'chi2')}
  limits = patching.Limits(max_kl=1.0, budget=2.0, band=2.0)
  clean = patch(**arrays, limits=limits)
  arrays[name] = arrays[name].at[7, 0].set(jnp.nan)
  p, reward = patch(**arrays, limits=limits), jnp.asarray(it.reward)
  assert np.flatnonzero(p.missing).tolist() == [7]
  for make in (first_order, prefix):
    found, plain = (make(x, reward, patching.tv_penalty) for x in (p, clean))
    assert np.isfinite(found.lower) and found.lower < plain.lower
    floor = -1 - float(patching.tv_penalty(p).most)
    assert float(found.terms['missing']) == pytest.approx(floor / reward.size, rel=1e-5)
  # Behind the end of a response anything may stand.
  arrays = {k: jnp.asarray(getattr(it, k)) for k in ('log_ratio', 'valid', 'kl', 'tv', 'chi2')}
  for content in (jnp.nan, jnp.inf):
    arrays[name] = jnp.where(arrays['valid'], arrays[name], content)
    dirty = patch(**arrays, limits=limits)
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'call, word',
  [
    (lambda p, r: patching.Limits(max_kl=0.0), 'max_kl=0.0 must be > 0'),
    (lambda p, r: patching.Limits(budget=math.nan), 'budget=nan must be > 0'),
    (lambda p, r: patching.l2_penalty(p), 'limits.budget=inf'),
    (lambda p, r: EAGER[1](p, r, patching.tv_penalty), 'limits.budget=inf'),
    (lambda p, r: EAGER[2](p, r, samples=2), 'samples=2 does not divide the 3 rows'),
    (
      lambda p, r: patching.patch(
        p.excess, p.good, kl=p.kl, tv=p.tv, limits=patching.Limits(), horizon=2
      ),
      'horizon=2 is shorter than the 3 slots',
    ),
    (lambda p, r: patching.l2_penalty(example(budget=1.0, band=1.0)[0], scale=0.0), 'scale=0.0'),
    (lambda p, r: EAGER[0](p, r, patching.tv_penalty, samples=2), 'samples=2 does not divide'),
    (lambda p, r: EAGER[1](p, 2 * r, patching.tv_penalty), 'limits.budget=inf'),
    (lambda p, r: EAGER[0](p, 2 * r, patching.tv_penalty), r'reward=2.0 lies outside'),
    (lambda p, r: EAGER[2](p, r - 1), r'reward=-1.0 lies outside'),
    (lambda p, r: EAGER[0](p, r, patching.tv_penalty, alpha=1.0), 'alpha=1.0'),
    (
      lambda p, r: patching.patch(
        p.excess, p.good, kl=p.kl, tv=p.tv, limits=patching.Limits(max_chi2=1.0)
      ),
      'chi2=None',
    ),
  ],
)
def test_bad_input(call, word):
  with pytest.raises(InputError, match=word):
    call(*example(max_kl=0.05))


@pytest.mark.slow
def test_the_paper_is_the_special_case():
  """With limits that nothing violates the bound is half of B* at them, and nothing is rejected."""
  it, p, reward = population(3, spread=0.05, limits=patching.Limits(max_kl=0.2, max_tv=0.25))
  assert bool(p.kept.all())
  d_bar, seq_kl = p.tv.mean(0), p.kl.sum(-1).mean()
  want = bounds.b_star(
    T=T,
    epsilon=0.25,
    delta=0.2,
    d_bar=d_bar,
    seq_kl=seq_kl,
    seq_tv=bounds.sequence_tv(d_bar=d_bar, seq_kl=seq_kl),
  )
  np.testing.assert_allclose(error_bounds(p, reward)['b_star'], want / 2, rtol=1e-6)
  made = first_order(p, reward, patching.tv_penalty)
  assert float(made.terms['rejected']) == 0 and made.estimate <= it.gain


@pytest.mark.slow
def test_a_trimmed_batch_keeps_its_horizon():
  it = oracle.draw(6, T=T, spread=0.3)
  names, limits = (
    ('log_ratio', 'valid', 'kl', 'tv', 'chi2'),
    patching.Limits(max_kl=0.3, budget=1.0),
  )
  arrays = {k: jnp.asarray(getattr(it, k)) for k in names}
  long = {k: jnp.pad(v, ((0, 0), (0, 3))) for k, v in arrays.items()}
  reward = jnp.asarray(it.reward)
  want, got = (patch(**a, limits=limits, horizon=T + 3) for a in (long, arrays))
  for name, value in error_bounds(want, reward).items():
    np.testing.assert_allclose(error_bounds(got, reward)[name], value, rtol=1e-5, err_msg=name)
  np.testing.assert_allclose(
    patching.tv_penalty(got).rows, patching.tv_penalty(want).rows, rtol=1e-5
  )
  short = patch(**arrays, limits=limits)
  assert float(patching.tv_penalty(short).most) < float(patching.tv_penalty(want).most)


def test_wrong_log_probs_are_void():
  patched, reward = rows(20_000, 0.1)
  wrong = dataclasses.replace(patched, weight=patched.weight * 1.02)
  for made in (
    first_order(wrong, reward, patching.tv_penalty),
    prefix(wrong, reward, patching.l2_penalty),
  ):
    assert made.verdict.startswith('void: the mean weight is above 1')


def of(it):
  return {k: jnp.asarray(getattr(it, k)) for k in ('log_ratio', 'valid', 'kl', 'tv', 'chi2')}


@pytest.mark.slow
def test_a_rollout_without_support_has_no_bound_by_chi2():
  """chi2 of inf, as top-p gives, under limits on KL: "no bound" where it enters, and no NaN."""
  it = oracle.draw(2, T=T, spread=0.2)
  arrays, reward = of(it), jnp.asarray(it.reward)
  limits = patching.Limits(max_kl=10.0)
  clean = error_bounds(patch(**arrays, limits=limits), reward)
  for place in (0, 1):
    arrays['chi2'] = arrays['chi2'].at[7, place].set(math.inf)
    p = patch(**arrays, limits=limits)
    for samples in (1, 4):
      for r in (reward, jnp.ones_like(reward)):  # of no deviation at all
        for run in (EAGER[2], error_bounds):
          found = run(p, r, samples=samples)
          assert float(found['l2']) == math.inf and not np.isnan(list(found.values())).any()
    found = error_bounds(p, reward)
    np.testing.assert_array_equal(
      [found[k] for k in clean if k != 'l2'], [clean[k] for k in clean if k != 'l2']
    )
    made = first_order(p, reward, patching.tv_penalty)
    assert np.isfinite([made.lower, made.estimate]).all() and float(made.terms['missing']) == 0
  # A KL of inf leaves the bounds by TV, and those of what comes after it.
  arrays['kl'] = arrays['kl'].at[7, 0].set(math.inf)
  found = EAGER[2](patch(**arrays, limits=patching.Limits(max_tv=0.9)), reward)
  assert not np.isnan(list(found.values())).any() and np.isfinite(found['future_tv'])


def test_a_token_that_the_policy_dropped_is_no_missing_one():
  """log-ratio -inf: a ratio of 0, so that the row's weight is 0 and S falls by 1."""
  log_ratio = jnp.log(jnp.array([[1.1, 1.2, 0.9], [0.0, 1.5, 1.1], [1.1, 1.0, 0.0]]))
  valid, level = jnp.ones((3, 3), bool), jnp.full((3, 3), 0.01)
  p = patch(log_ratio, valid, kl=level, tv=level, chi2=level, limits=patching.Limits(max_kl=0.1))
  assert not p.missing.any() and p.kept.all()
  np.testing.assert_allclose(p.weight, [1.188, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(p.first, [0.2, -0.4, -0.9], atol=1e-6)
  # Products before each token: 1, 0, 0 in the second row.
  np.testing.assert_allclose(p.second[1], 0.02, rtol=1e-5)
  p = patch(log_ratio, valid, kl=level, tv=level, limits=patching.Limits(band=0.5))
  np.testing.assert_array_equal(p.good[1:], [[True, False, False], [True, True, True]])
  # Such a context has an infinite KL, and is good where none is asked for.
  p = patch(log_ratio, valid, kl=-jnp.minimum(log_ratio, 0), tv=level, limits=patching.Limits())
  assert not p.missing.any() and p.kept.all()
  # +inf is a token that the rollout cannot have drawn.
  p = patch(-log_ratio, valid, kl=level, tv=level, limits=patching.Limits())
  assert p.missing.tolist() == [False, True, True]


def test_the_band_judges_contexts_not_padding():
  """A slot behind the end rejects nothing: padded and trimmed rows are kept alike."""
  log_ratio, valid, level = jnp.full((2, 3), 0.1), jnp.ones((2, 3), bool), jnp.full((2, 3), 0.01)
  limits = patching.Limits(band=0.25)
  wide = lambda x: jnp.pad(x, ((0, 0), (0, 2)))
  short = patch(log_ratio, valid, kl=level, tv=level, limits=limits)
  padded = patch(wide(log_ratio), wide(valid), kl=wide(level), tv=wide(level), limits=limits)
  assert short.kept.all() and padded.kept.all()


@pytest.mark.slow
def test_rows_without_tokens_do_not_exist():
  it = oracle.draw(4, T=T, spread=0.3)
  arrays = {k: v[:24] for k, v in of(it).items()}
  reward, limits = jnp.asarray(it.reward)[:24], patching.Limits(max_kl=0.4, budget=1.0, band=0.6)
  # A row of nothing behind every two, and two prompts of nothing.
  at = np.array([*np.c_[np.arange(24).reshape(-1, 2), np.full(12, -1)].ravel(), *[-1] * 6])
  there = jnp.asarray(at >= 0)
  more = {k: v[jnp.maximum(at, 0)] for k, v in arrays.items()}
  more['valid'] = more['valid'] & there[:, None]
  padded = jnp.where(there, reward[jnp.maximum(at, 0)], 5.0)
  want, got = patch(**arrays, limits=limits), patch(**more, limits=limits)
  for make in (first_order, prefix):
    for penalty in (patching.tv_penalty, patching.l2_penalty):
      a, b = make(want, reward, penalty, samples=2), make(got, padded, penalty, samples=3)
      for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  a, b = error_bounds(want, reward, samples=2), error_bounds(got, padded, samples=3)
  for name, value in a.items():
    np.testing.assert_allclose(b[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_a_ratio_that_overflows_is_no_evidence():
  # Good context, first token: exp(1e4) would make the estimate and the e-value infinite.
  log_ratio, valid = jnp.zeros((4, 2)).at[1, 0].set(1e4), jnp.ones((4, 2), bool).at[1, 1].set(False)
  small = jnp.full((4, 2), 1e-3)
  limits = patching.Limits(max_kl=0.5, max_tv=0.4, budget=2.0, band=1.0)
  patched = patching.patch(log_ratio, valid, kl=small, tv=small, chi2=small, limits=limits)
  assert patched.missing.tolist() == [False, True, False, False]
  assert all(jnp.isfinite(x).all() for x in (patched.excess, patched.first, patched.second))
