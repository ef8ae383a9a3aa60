"""trm_jax.masks.criteria: criteria, their composition, the random control and the moving limit."""

import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracles
import pytest
from jax import P

from trm_jax import bounds, divergences, masks
from trm_jax.masks import controls
from trm_jax.mesh import sharding
from trm_jax.objectives import surrogates
from trm_jax.types import Divergences, InputError

MESHES = [(4, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((1, 8), (8, 1)))]
SEEDS = st.integers(0, 2**20)
B, T = 16, 6

WEIGHTS = dict(epsilon=0.15, delta=0.08)
length_neutral = functools.partial(masks.length_neutral, **WEIGHTS)


def deviation(log_ratio):
  return np.abs(np.exp(oracles.f64(log_ratio)) - 1)


def future_deviation(log_ratio, valid, epsilon=0.15, delta=0.08, horizon=None):
  """W / Z token by token, T - t counted in the row's own tokens."""
  found = []
  for x, own in zip(deviation(log_ratio), valid, strict=True):
    x = x[own]
    length = horizon or len(x)
    w = [min(1, r * epsilon, (r * delta / 2) ** 0.5) for r in range(length - 1, -1, -1)]
    found.append(sum(a * b for a, b in zip(x, w, strict=False)) / (sum(w) or 1))
  return np.array(found)


# Criterion, the field it reads, its statistic per row in float64.
CRITERIA = [
  (masks.max_kl, 'kl', lambda x, v: oracles.max_over_tokens(x, v)),
  (masks.mean_kl, 'kl', lambda x, v: oracles.mean_over_tokens(x, v)),
  (masks.max_tv, 'tv', lambda x, v: oracles.max_over_tokens(x, v)),
  (masks.max_k2, 'log_ratio', lambda x, v: oracles.max_over_tokens(oracles.k2(x), v)),
  (masks.mean_k3, 'log_ratio', lambda x, v: oracles.mean_over_tokens(oracles.k3(x), v)),
  (length_neutral, 'log_ratio', future_deviation),
  (masks.mean_deviation, 'log_ratio', lambda x, v: oracles.mean_over_tokens(deviation(x), v)),
  (masks.chi2_budget, 'chi2', lambda x, v: np.where(v, oracles.f64(x), 0).sum(-1)),
]
BATTERY = pytest.mark.parametrize('criterion, field, statistic', CRITERIA)


def case(seed=0):
  """Statistics of widely differing rows, valid prefixes of every length, the last row empty."""
  keys = jax.random.split(jax.random.key(seed), 4)
  spread = jnp.exp(2 * jax.random.normal(keys[0], (B, 1)))
  kl = 0.01 * spread * jax.random.exponential(keys[1], (B, T))
  sign = jnp.sign(jax.random.normal(keys[2], (B, T)))
  lengths = jax.random.randint(keys[3], (B, 1), 1, T + 1).at[-1].set(0)
  ratio = sign * jnp.sqrt(2 * kl)
  found = Divergences(kl=kl, tv=jnp.sqrt(kl / 2), log_ratio=ratio, entropy=kl, chi2=2 * kl)
  return found, jnp.arange(T)[None] < lengths


def put(divergences, field, value):
  """All fields zero but one."""
  zero = jax.tree.map(jnp.zeros_like, divergences)
  return Divergences(**{**vars(zero), field: value})


def sampled(*ratios):
  log_ratio = jnp.log(jnp.array([ratios], jnp.float32))
  zero = jnp.zeros_like(log_ratio)
  return Divergences(zero, zero, log_ratio, zero), jnp.ones(log_ratio.shape, bool)


# Single criteria.


@BATTERY
@hypothesis.given(seed=SEEDS, quantile=st.floats(0.05, 0.95))
def test_matches_the_oracle(criterion, field, statistic, seed, quantile):
  d, valid = case(seed)
  want = statistic(getattr(d, field), np.asarray(valid))
  # Between two values, so that rounding of the statistic decides nothing.
  limit = float(np.quantile(want, quantile)) * 1.0001 + 1e-9
  hypothesis.assume(np.abs(want / limit - 1).min() > 1e-5)
  got = criterion(limit=limit)(put(d, field, getattr(d, field)), valid)
  np.testing.assert_array_equal(got, want <= limit)


@BATTERY
def test_keeps_all_none_or_exactly_the_violating_row(criterion, field, statistic):
  d, _ = case()
  valid = jnp.ones((B, T), bool)
  # One token of row 5 is 1 in the field: statistics 1, 1/6, 1, 1/2, (e - 2)/6, .283 (e - 1)/1.627,
  # (e - 1)/6 and 1, the others at least 1e-5.
  x = jnp.full((B, T), 0.01).at[5, 3].set(1.0)
  d = put(d, field, x)
  row = jnp.arange(B) == 5
  np.testing.assert_array_equal(criterion(limit=0.1)(d, valid), ~row)
  np.testing.assert_array_equal(criterion(limit=2.0)(d, valid), True)
  np.testing.assert_array_equal(criterion(limit=1e-6)(d, valid), False)


@BATTERY
def test_the_limit_itself_is_inside(criterion, field, statistic):
  # log_ratio = 1/2 gives k2 = 1/8 exactly; a mean over a power of two tokens is exact.
  d = put(case()[0], field, jnp.full((B, T), 0.5))
  valid = jnp.arange(T)[None] < jnp.full((B, 1), 4)
  value = {'kl': 0.5, 'tv': 0.5, 'log_ratio': 0.125, 'chi2': 2.0}[field]
  rounded = {masks.mean_k3: np.exp(0.5) - 1.5}
  rounded |= dict.fromkeys((masks.mean_deviation, length_neutral), np.exp(0.5) - 1)
  if criterion in rounded:
    value = float(np.float32(rounded[criterion]))
    assert criterion(limit=value + 2e-7)(d, valid).all()
  else:
    assert criterion(limit=value)(d, valid).all()
  assert not criterion(limit=value - 1e-6)(d, valid).any()


@BATTERY
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_broken_numbers_reject_their_row_at_any_limit(criterion, field, statistic, bad):
  d, valid = case()
  x = getattr(d, field).at[3, 0].set(bad)
  for limit in (1e9, math.inf):
    got = criterion(limit=limit)(put(d, field, x), valid)
    np.testing.assert_array_equal(got, jnp.arange(B) != 3)


@pytest.mark.parametrize('criterion', [masks.max_k2, masks.mean_k3])
@pytest.mark.parametrize('bad', [-jnp.inf, 1e4, -1e4])
def test_violent_ratios_reject(criterion, bad):
  d, valid = case()
  got = criterion(limit=100.0)(put(d, 'log_ratio', jnp.zeros((B, T)).at[3, 0].set(bad)), valid)
  np.testing.assert_array_equal(got, jnp.arange(B) != 3)


def test_mean_divides_by_the_true_length():
  # One token at .4 among 2 valid ones of 6 slots: mean .2; .4/6 = .067 would pass.
  d = put(case()[0], 'kl', jnp.zeros((B, T)).at[:, 0].set(0.4))
  valid = jnp.arange(T)[None] < jnp.full((B, 1), 2)
  assert not masks.mean_kl(limit=0.19)(d, valid).any() and masks.mean_kl(limit=0.21)(d, valid).all()
  np.testing.assert_allclose(masks.mean_over_tokens(d.kl, valid), 0.2, rtol=1e-6)


@hypothesis.given(seed=SEEDS)
def test_reductions_match_the_oracle(seed):
  d, valid = case(seed)
  for got, want in [
    (masks.max_over_tokens, oracles.max_over_tokens),
    (masks.mean_over_tokens, oracles.mean_over_tokens),
  ]:
    x = d.log_ratio
    np.testing.assert_allclose(got(x, valid), want(x, np.asarray(valid)), rtol=1e-5, atol=1e-7)
  assert jnp.isnan(masks.max_over_tokens(d.kl.at[0, 0].set(jnp.nan), valid)[0])


def test_hand_computed_sample_statistics():
  # rho = [1.1, .9, 1, 1.3, .5]: max k2 = (ln .5)^2 / 2 = .240227, mean k3 = .0481667.
  d, valid = sampled(1.1, 0.9, 1, 1.3, 0.5)
  assert masks.max_k2(limit=0.24023)(d, valid) and not masks.max_k2(limit=0.24022)(d, valid)
  assert masks.mean_k3(limit=0.048168)(d, valid) and not masks.mean_k3(limit=0.048165)(d, valid)


@pytest.mark.parametrize(
  'limit, low, high', [(0.05, 0.729, 1.372), (0.1, 0.639, 1.564), (1e-4, 0.986, 1.0142)]
)
def test_max_k2_is_a_band_of_ratios(limit, low, high):
  # |ln r| <= sqrt(2 limit)
  for ratio in (low * 1.001, high * 0.999):
    assert masks.max_k2(limit=limit)(*sampled(ratio))
  for ratio in (low * 0.999, high * 1.001):
    assert not masks.max_k2(limit=limit)(*sampled(ratio))


def test_sampled_criteria_err_on_both_sides():
  # rollout 1e-6, policy 1e-4: KL 9.4e-5 is inside .05 but the sampled token's k2 is 10.6.
  # rollout (.02, .98), policy (1e-6, 1 - 1e-6): KL .178 violates, k2 of the 98 % token is 2e-4.
  one = lambda x: jnp.full((1, 1), x, jnp.float32)
  inside = Divergences(one(9.4e-5), one(0), one(math.log(100)), one(0))
  outside = Divergences(one(0.178), one(0), one(math.log((1 - 1e-6) / 0.98)), one(0))
  valid = jnp.ones((1, 1), bool)
  assert masks.max_kl(limit=0.05)(inside, valid) and not masks.max_k2(limit=0.05)(inside, valid)
  assert not masks.max_kl(limit=0.05)(outside, valid) and masks.max_k2(limit=0.05)(outside, valid)


# Length-neutral criteria and the chi-square budget.


def test_hand_computed_length_neutral_statistics():
  # T = 5: w = [.4, .346410, .282843, .15, 0], Z = 1.179253, W = .119641, W / Z = .101455, SER .2.
  d, valid = sampled(1.1, 0.9, 1, 1.3, 0.5)
  np.testing.assert_allclose(
    bounds.future_weights(T=5, **WEIGHTS), [0.4, 0.346410, 0.282843, 0.15, 0], atol=1e-6
  )
  found = masks.future_deviation(d.log_ratio, valid, **WEIGHTS)
  np.testing.assert_allclose(found, 0.119641 / 1.179253, rtol=1e-5)
  assert length_neutral(limit=0.10146)(d, valid) and not length_neutral(limit=0.10145)(d, valid)
  assert masks.mean_deviation(limit=0.20001)(d, valid)
  assert not masks.mean_deviation(limit=0.19999)(d, valid)


@pytest.mark.slow
@hypothesis.given(seed=SEEDS, horizon=st.sampled_from([None, T, 3 * T]))
def test_future_deviation_counts_own_tokens(seed, horizon):
  # Holes in `valid` are tool tokens: no policy chose them, so they are in nobody's future.
  d, _ = case(seed)
  valid = jax.random.bernoulli(jax.random.key(seed + 1), 0.7, (B, T))
  got = masks.future_deviation(d.log_ratio, valid, **WEIGHTS, horizon=horizon)
  want = future_deviation(d.log_ratio, np.asarray(valid), horizon=horizon)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


def test_a_fixed_horizon_gives_the_last_token_weight():
  d, valid = sampled(1, 1, 5.0)
  assert length_neutral(limit=1e-9)(d, valid)
  fixed = functools.partial(length_neutral, horizon=5)
  # w = [.4, .346410, .282843, .15, 0], Z = 1.179253, W = 4 * .282843.
  assert fixed(limit=0.9595)(d, valid) and not fixed(limit=0.9593)(d, valid)


def test_rows_of_one_token_have_no_future():
  for ratio in (1e-6, 1.0, 1e6):
    assert length_neutral(limit=1e-6)(*sampled(ratio))
  for log_ratio in (jnp.nan, jnp.inf, -jnp.inf):
    assert not length_neutral(limit=1e9)(*sampled(float(jnp.exp(log_ratio))))


@pytest.mark.parametrize('criterion', [length_neutral, masks.mean_deviation])
def test_a_token_the_policy_excludes_rejects(criterion):
  # ratio 0: the deviation itself would be 1, and the engine sampled what the policy cannot.
  d, valid = case()
  zero = put(d, 'log_ratio', jnp.zeros((B, T)).at[3, 0].set(-jnp.inf))
  np.testing.assert_array_equal(criterion(limit=100.0)(zero, valid), jnp.arange(B) != 3)


@pytest.mark.parametrize(
  'bad, word',
  [
    (dict(epsilon=0, delta=0.1), 'epsilon=0'),
    (dict(epsilon=0.1, delta=-1.0), 'delta=-1.0'),
    (dict(epsilon=0.1, delta=math.nan), 'delta=nan'),
    (dict(epsilon=1.5, delta=0.1), 'epsilon=1.5'),
    (dict(epsilon=0.1, delta=0.1, horizon=5), 'horizon=5'),
    (dict(epsilon=0.1, delta=0.1, horizon=0), 'T=0'),
  ],
)
def test_weights_that_mean_nothing_are_refused(bad, word):
  with pytest.raises(InputError, match=word):
    masks.length_neutral(limit=0.1, **bad)(*case())


def test_mean_deviation_estimates_twice_the_total_variation():
  # E|ratio - 1| = 2 TV under rollout samples: one context, rollout (.7, .2, .1), TV .1.
  rollout, policy = jnp.log(jnp.array([0.7, 0.2, 0.1])), jnp.log(jnp.array([0.6, 0.25, 0.15]))
  tokens = jax.random.categorical(jax.random.key(0), rollout, shape=(40_000,))
  found = masks.deviation((policy - rollout)[tokens])
  # Standard deviation of |ratio - 1| is .12: five standard errors are .003.
  np.testing.assert_allclose(found.mean(), 0.2, atol=0.003)


def test_the_budget_reads_exact_chi2():
  logits = (
    jax.random.normal(jax.random.key(0), (2, 3, T, 7)) * jnp.array([1.0, 0.7])[:, None, None, None]
  )
  tokens, valid = jnp.zeros((3, T), int), jnp.ones((3, T), bool)
  spent = oracles.chi2(*np.asarray(logits)).sum(-1)
  found = divergences.statistics(*logits, tokens, full=True).divergences()
  for scale in (0.9999, 1.0001):  # a limit for each row
    limit = jnp.asarray(scale * spent, jnp.float32)
    np.testing.assert_array_equal(masks.chi2_budget(limit=limit)(found, valid), scale > 1)
  core = divergences.statistics(*logits, tokens).divergences()
  for criterion in (masks.chi2_budget, (lambda limit: masks.chi2_budget(limit).prefix)):
    with pytest.raises(InputError, match='full=True'):
      criterion(limit=1.0)(core, valid)


@pytest.mark.slow
def test_identical_policies_are_inside_at_any_limit():
  logits = jax.random.normal(jax.random.key(0), (B, T, 7))
  found = divergences.statistics(logits, logits, jnp.zeros((B, T), int), full=True).divergences()
  for criterion, _, _ in CRITERIA:
    assert criterion(limit=1e-9)(found, jnp.ones((B, T), bool)).all()


# Prefixes.

PREFIXES = [
  ((lambda limit: masks.max_kl(limit).prefix), masks.max_kl, 'kl', 0.05, lambda x: x),
  ((lambda limit: masks.max_tv(limit).prefix), masks.max_tv, 'tv', 0.15, lambda x: x),
  ((lambda limit: masks.chi2_budget(limit).prefix), masks.chi2_budget, 'chi2', 0.2, np.cumsum),
]
PREFIX = pytest.mark.parametrize('criterion, whole, field, limit, so_far', PREFIXES)


@pytest.mark.slow
@PREFIX
@hypothesis.given(seed=SEEDS)
def test_prefix_ends_before_the_first_token_outside(criterion, whole, field, limit, so_far, seed):
  d, _ = case(seed)
  valid = jax.random.bernoulli(jax.random.key(seed + 1), 0.7, (B, T))
  got = criterion(limit=limit)(d, valid)
  for row, x, own in zip(got, oracles.f64(getattr(d, field)), np.asarray(valid), strict=True):
    inside = so_far(x[own]) <= limit
    first = inside.argmin() if not inside.all() else len(inside)
    np.testing.assert_array_equal(row[own], np.arange(len(inside)) < first)
  assert (got[:, 1:] <= got[:, :-1]).all()
  # A row inside as a whole keeps all of its tokens, and no other does.
  np.testing.assert_array_equal((got | ~valid).all(-1), whole(limit=limit)(d, valid))


@PREFIX
def test_prefix_by_hand(criterion, whole, field, limit, so_far):
  x = jnp.array([[0.04, 0.06, 0.01], [0.04, 0.01, 0.2], [0.01, 0.01, 0.01]])
  d = Divergences(*[jnp.zeros_like(x)] * 5)
  d = Divergences(**{**vars(d), field: x})
  want = [[True, False, False], [True, True, False], [True, True, True]]
  limit = 0.0600001 if field == 'chi2' else 0.05
  np.testing.assert_array_equal(criterion(limit=limit)(d, jnp.ones((3, 3), bool)), want)


@PREFIX
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_prefix_stops_at_broken_numbers_and_skips_padding(
  criterion, whole, field, limit, so_far, bad
):
  d = put(case()[0], field, jnp.zeros((B, T)).at[:, 2].set(bad))
  every = jnp.ones((B, T), bool)
  got = criterion(limit=math.inf)(d, every)
  np.testing.assert_array_equal(got, jnp.broadcast_to(jnp.arange(T) < 2, (B, T)))
  assert criterion(limit=1e-6)(d, every.at[:, 2].set(False)).all()
  with pytest.raises(InputError, match='must be > 0'):
    criterion(limit=0)(d, every)
  weigh = lambda d: jnp.where(criterion(limit=1.0)(d, every), 2.0, 1.0).sum()
  np.testing.assert_array_equal(getattr(jax.grad(weigh)(d), field), 0)


def test_prefix_masks_tokens_of_the_loss():
  d, valid = case()
  keep = masks.max_kl(limit=0.05).prefix(d, valid) & masks.chi2_budget(limit=0.3).prefix(d, valid)
  value = jnp.where(d.kl > 0.05, jnp.nan, d.log_ratio)
  assert 0 < (keep & valid).sum() < valid.sum()
  got = surrogates.aggregate(value, valid, keep)
  np.testing.assert_allclose(got.total, np.asarray(d.log_ratio)[keep & valid].sum(), rtol=1e-5)
  assert got.count == valid.any(-1).sum()


@BATTERY
@pytest.mark.parametrize('limit', [0, 0.0, -0.1, -1, math.nan])
def test_limits_that_accept_nothing_are_refused(criterion, field, statistic, limit):
  with pytest.raises(InputError, match=f'limit={limit} must be > 0'):
    criterion(limit=limit)(*case())


def test_other_shapes_and_missing_statistics_are_refused(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  d, valid = case()
  for wrong in (valid[0], valid[:, :-1]):
    prefixes = [entry[0] for entry in PREFIXES[:2]]
    for criterion in (masks.max_kl, *prefixes):
      with pytest.raises(InputError, match='valid has shape .* one flag for each token'):
        criterion(limit=1.0)(d, wrong)
    with pytest.raises(InputError, match='valid has shape .* one flag for each token'):
      masks.prefix(d.kl < 1, wrong)
  key, keep = jax.random.key(0), valid[:, 0]
  for name in ('usable', 'lengths'):
    with pytest.raises(InputError, match=f'{name} has shape .* one value per row'):
      masks.permuted(keep, key, **{name: keep[1:]})
  with pytest.raises(InputError, match='sampled log-probs alone: use max_k2'):
    masks.mean_kl(limit=1.0)(dataclasses.replace(d, kl=None), valid)
  with pytest.raises(InputError, match='sampled log-probs alone: use max_k2'):
    masks.max_kl(limit=1.0).prefix(dataclasses.replace(d, kl=None), valid)


@pytest.mark.parametrize('shape', [(64, 64), pytest.param((8, 4096), marks=pytest.mark.slow)])
def test_nan_rejects_in_large_batches_too(shape, optimised):
  """XLA's maximum on CPUs drops NaN from arrays of 4096 elements on."""
  rows, slots = shape
  x = jnp.full(shape, 1e-3).at[jnp.arange(rows), jnp.arange(rows) % slots].set(jnp.nan)
  cases = [
    (make(limit=100.0), put(Divergences(x, x, x, x, x), field, x.at[0].set(1e-3)))
    for make, field, _ in CRITERIA
  ]
  valid = jnp.ones(shape, bool)
  judge = lambda given, valid: [run(d, valid) for (run, _), d in zip(cases, given, strict=True)]
  given = [d for _, d in cases]
  for run in (judge, jax.jit(judge, compiler_options=optimised)):
    for keep in run(given, valid):
      np.testing.assert_array_equal(keep, jnp.arange(rows) == 0)


def test_criteria_are_values():
  assert masks.max_kl(0.2) == masks.max_kl(0.2) and hash(masks.max_kl(0.2))
  assert masks.max_kl(0.2) != masks.max_kl(0.3) != masks.mean_kl(0.3)
  assert masks.length_neutral(0.1, delta=0.2) == masks.length_neutral(0.1, delta=0.2)
  assert masks.length_neutral(0.1, delta=0.2) != masks.length_neutral(0.1, delta=0.3)
  with pytest.raises(InputError, match='mean_kl=0.1 speaks of whole sequences'):
    masks.mean_kl(0.1).prefix(*case())


# Composition.


def all_criteria():
  return [c(limit=limit) for c, limit in zip(
    [c for c, _, _ in CRITERIA], [0.05, 0.02, 0.15, 0.03, 0.01, 0.2, 0.2, 0.3], strict=True
  )]  # fmt: skip


@pytest.mark.slow
@hypothesis.given(seed=SEEDS, order=st.permutations(range(len(CRITERIA))))
def test_intersection_commutes_and_is_idempotent(seed, order):
  d, valid = case(seed)
  parts = all_criteria()
  want = np.logical_and.reduce([p(d, valid) for p in parts])
  np.testing.assert_array_equal(masks.all_of(*(parts[i] for i in order))(d, valid), want)
  nested = masks.all_of(masks.all_of(*parts[:2]), masks.all_of(*parts[1:]), masks.keep_all)
  np.testing.assert_array_equal(nested(d, valid), want)


def test_no_criterion_keeps_every_row():
  d, valid = case()
  broken = jax.tree.map(lambda x: x * jnp.nan, d)
  for keep in (masks.all_of()(broken, valid), masks.keep_all(broken, valid)):
    np.testing.assert_array_equal(keep, jnp.ones(B, bool))


@hypothesis.given(seed=SEEDS)
def test_combined_is_max_and_mean(seed):
  d, valid = case(seed)
  want = masks.max_kl(limit=0.1)(d, valid) & masks.mean_kl(limit=0.02)(d, valid)
  got = masks.combined(max_limit=0.1, mean_limit=0.02)(d, valid)
  np.testing.assert_array_equal(got, want)


def test_combined_uses_each_limit_for_its_own_statistic():
  d, valid = case()
  peak = put(d, 'kl', jnp.zeros((B, T)).at[0, 0].set(0.5).at[1].set(0.05))
  valid = jnp.ones_like(valid)
  # Row 0: max .5, mean .083; row 1: max .05, mean .05.
  got = masks.combined(max_limit=0.4, mean_limit=0.1)(peak, valid)
  np.testing.assert_array_equal(got[:3], [False, True, True])
  got = masks.combined(max_limit=0.6, mean_limit=0.06)(peak, valid)
  np.testing.assert_array_equal(got[:3], [False, True, True])
  assert masks.combined(max_limit=0.6, mean_limit=0.1)(peak, valid).all()


@BATTERY
def test_smaller_limits_accept_less(criterion, field, statistic):
  d, valid = case()
  kept = [criterion(limit=limit)(d, valid) for limit in (1e-3, 1e-2, 1e-1, 1.0)]
  for tight, loose in zip(kept, kept[1:], strict=False):
    assert (tight <= loose).all()
  assert kept[0].sum() < kept[-1].sum()


@pytest.mark.parametrize('criterion, field', [(masks.max_kl, 'kl'), (masks.max_tv, 'tv')])
def test_one_limit_for_every_length_accepts_fewer_of_the_longer_rows(criterion, field):
  # Theorem 4.2 (2). A token is outside with probability p, of its own: (1 - p)^T of the rows stay.
  p, rows = 0.1, 4000
  x = jnp.where(jax.random.bernoulli(jax.random.key(0), p, (rows, 16)), 1.0, 0.01)
  d = Divergences(**{**dict.fromkeys(('kl', 'tv', 'log_ratio', 'entropy'), 0 * x), field: x})
  kept = {}
  for length in (1, 4, 16):
    slots = jnp.arange(16)[None] < jnp.full((rows, 1), length)
    kept[length] = criterion(limit=0.5)(d, slots)
    np.testing.assert_array_equal(kept[length], (x[:, :length] <= 0.5).all(-1))
    # Standard error below .008.
    np.testing.assert_allclose(kept[length].mean(), bounds.acceptance(T=length, p=p), atol=0.03)
  assert (kept[16] <= kept[4]).all() and (kept[4] <= kept[1]).all()


# Transformations.


def test_masks_carry_no_gradient():
  d, valid = case()
  for criterion in all_criteria():
    weigh = lambda d, c=criterion: jnp.where(c(d, valid), 2.0, 1.0).sum()
    for leaf in jax.tree.leaves(jax.grad(weigh)(d)):
      np.testing.assert_array_equal(leaf, 0)
  future = functools.partial(masks.future_deviation, **WEIGHTS)
  for reduce in (masks.max_over_tokens, masks.mean_over_tokens, masks.sum_over_tokens, future):
    np.testing.assert_array_equal(jax.grad(lambda x, f=reduce: f(x, valid).sum())(d.kl), 0)


def whole_mask(d, valid, key, axis_name=None):
  keep = masks.all_of(*all_criteria()[:2], *all_criteria()[5:])(d, valid)
  control = masks.permuted(keep, key, axis_name=axis_name)
  matched = masks.permuted(keep, key, lengths=valid.sum(-1), axis_name=axis_name)
  return keep, control, matched


def weighed(fn, d, valid, key, x):
  """A loss with all masks in it: its gradient is wrong where a mask lost its device axis."""
  keep, *controls = fn(d, valid, key)
  return jnp.where(keep, x**2, 0).sum() + sum(jnp.where(c, jnp.sin(x), 0).sum() for c in controls)


@pytest.mark.parametrize('mesh', MESHES)
def test_rows_split_over_a_mesh(mesh):
  d, valid = case()
  key, x = jax.random.key(3), jnp.arange(B) / 7
  want = whole_mask(d, valid, key)
  want_grad = jax.grad(functools.partial(weighed, whole_mask, d, valid, key))(x)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    rows = P('data')
    split = jax.shard_map(
      functools.partial(whole_mask, axis_name='data'),
      in_specs=(rows, rows, P()),
      out_specs=rows,
      check_vma=True,
    )
    d, valid, x = jax.device_put((d, valid, x), rows)
    got = jax.jit(split)(d, valid, key)
    gradient = jax.jit(jax.grad(functools.partial(weighed, split, d, valid, key)))(x)
    # The masks inside the body, multiplied with an operand that is the same on every device.
    inner = jax.shard_map(
      lambda d, valid, key, w: jax.lax.psum(
        sum(
          jnp.where(mask, w * d.kl[:, 0], 0).sum() for mask in whole_mask(d, valid, key, 'data')[1:]
        ),
        'data',
      ),
      in_specs=(rows, rows, P(), P()),
      out_specs=P(),
      check_vma=True,
    )
    slope = jax.jit(jax.grad(inner, 3))(d, valid, key, jnp.float32(2))
  for g, w in zip(got, want, strict=True):
    np.testing.assert_array_equal(g, w)
  np.testing.assert_allclose(gradient, want_grad, rtol=1e-6)
  first = case()[0].kl[:, 0]
  want_slope = sum(jnp.where(mask, first, 0).sum() for mask in want[1:])
  np.testing.assert_allclose(slope, want_slope, rtol=1e-5)


@pytest.mark.parametrize('mapped', [jax.pmap, pytest.param(jax.vmap, marks=pytest.mark.slow)])
def test_rows_split_over_a_named_axis(mapped):
  d, valid = case()
  key = jax.random.key(3)
  blocks = jnp.stack([d.kl, d.tv, d.log_ratio, d.entropy, d.chi2, valid * 1.0])
  blocks = blocks.reshape(6, 8, B // 8, T)
  run = mapped(
    lambda x: whole_mask(Divergences(*x[:5]), x[5] > 0, key, 'data'), axis_name='data', in_axes=1
  )
  for g, w in zip(run(blocks), whole_mask(d, valid, key), strict=True):
    np.testing.assert_array_equal(g.reshape(B), w)


# The random control.


@hypothesis.given(seed=SEEDS, kept=st.integers(0, B))
def test_control_keeps_exactly_as_many_rows(seed, kept):
  keep = jnp.arange(B) < kept
  assert masks.permuted(keep, jax.random.key(seed)).sum() == kept


@pytest.mark.slow
def test_control_is_uniform_and_moves():
  keep = jnp.arange(8) < 3
  drawn = jax.vmap(lambda k: masks.permuted(keep, k))(jax.random.split(jax.random.key(0), 4000))
  # Every row is kept 3/8 of the time: standard error .0077, five of them .038.
  np.testing.assert_allclose(drawn.mean(0), 3 / 8, atol=0.038)
  # All 56 subsets occur; expected 71 each.
  assert len(np.unique(drawn, axis=0)) == 56
  # Rows 0 and 1 both kept: 3/8 * 2/7.
  np.testing.assert_allclose((drawn[:, 0] & drawn[:, 1]).mean(), 6 / 56, atol=0.025)


def test_length_matched_control_by_hand():
  """Blocks: lengths 1 (8 rows) and 2 (9 rows); 3, 4 and 5, which begin in one block of eight."""
  lengths = jnp.array([1] * 8 + [2] * 9 + [3, 4, 5])
  order = jax.random.permutation(jax.random.key(9), lengths.size)
  lengths = lengths[order]
  keep = jnp.isin(order, jnp.array([0, 1, 2, 8, 17]))  # 3 of length 1, 1 of 2, 1 of the others
  draw = jax.jit(jax.vmap(lambda k: masks.permuted(keep, k, lengths=lengths)))
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 3000)))
  rows = np.asarray(lengths)
  for block, kept in (([1], 3), ([2], 1), ([3, 4, 5], 1)):
    inside = np.isin(rows, block)
    assert (drawn[:, inside].sum(-1) == kept).all()
    # Each row of a block alike: standard error below .009.
    np.testing.assert_allclose(drawn[:, inside].mean(0), kept / inside.sum(), atol=0.045)


@pytest.mark.slow
@hypothesis.given(seed=SEEDS, data=st.data())
def test_length_matched_control_keeps_the_rate_and_all_of_a_kind(seed, data):
  lengths = jnp.array(data.draw(st.lists(st.integers(0, 5), min_size=24, max_size=24)))
  keep = jnp.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24)))
  mask = masks.permuted(keep, jax.random.key(seed), lengths=lengths)
  assert mask.sum() == keep.sum() and mask.dtype == bool
  # Lengths of eight rows or more that begin a block of their own keep their share exactly.
  counts = np.bincount(lengths, minlength=6)
  first = np.cumsum(counts) - counts
  for n in np.flatnonzero(counts):
    block = first // controls.SMALLEST_BLOCK
    if (block[counts > 0] == block[n]).sum() == 1:
      assert mask[lengths == n].sum() == keep[lengths == n].sum()


# The moving limit.


def test_follow_by_hand():
  # Quantile 1/2 of 1..5 is 3; log limit' = .9 log 1 + .1 log 3.
  x = jnp.arange(1.0, 6.0)
  np.testing.assert_allclose(masks.follow(jnp.float32(1), x, target=0.5), 3**0.1, rtol=1e-6)
  np.testing.assert_allclose(masks.follow(jnp.float32(1), x, target=0.5, rate=1.0), 3, rtol=1e-6)
  # rate 1/2 is the geometric mean of 1/3 and 3.
  got = masks.follow(jnp.float32(1 / 3), x, target=0.5, rate=0.5)
  np.testing.assert_allclose(got, 1, rtol=1e-6)


@pytest.mark.slow
@hypothesis.given(
  seed=SEEDS, target=st.floats(0.1, 0.9), limit=st.floats(1e-4, 10), rate=st.floats(0.05, 0.95)
)
def test_follow_moves_towards_the_quantile_and_accepts_the_target(seed, target, limit, rate):
  x = jax.random.permutation(jax.random.key(seed), jnp.exp(jnp.linspace(-6, 0, 41)))
  limit = jnp.float32(limit)
  quantile = np.quantile(np.asarray(x), target, method='lower')
  hypothesis.assume(abs(target * 40 - round(target * 40)) > 1e-3)
  moved = masks.follow(limit, x, target=target, rate=rate)
  low, high = sorted((float(limit), float(quantile)))
  assert low * 0.9999 <= moved <= high * 1.0001
  np.testing.assert_allclose(
    math.log(moved / limit), rate * math.log(quantile / limit), rtol=1e-3, atol=1e-5
  )
  for _ in range(3):
    limit = masks.follow(limit, x, target=target, rate=1.0)
  assert abs((x <= limit).mean() - target) <= 1 / 40


def test_follow_ignores_the_rest_of_the_distribution():
  # Only the quantile counts: the values above it may be anything, missing ones included.
  x = jnp.arange(1.0, 9.0)
  want = masks.follow(jnp.float32(1), x, target=0.5)
  for bad in (jnp.nan, jnp.inf, 1e30):
    np.testing.assert_array_equal(masks.follow(jnp.float32(1), x.at[5:].set(bad), target=0.5), want)


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_follow_stays_where_the_quantile_cannot_be_judged(bad):
  limit = jnp.float32(0.25)
  assert masks.follow(limit, jnp.full(8, bad), target=0.5) == limit
  assert masks.follow(limit, jnp.arange(1.0, 9.0).at[2:].set(bad), target=0.5) == limit


def test_follow_looks_at_usable_rows_alone():
  # Quantile 1/2 of 1..5, whatever the rows hold that no limit could keep.
  x = jnp.array([0.0, 1, 9, 2, 3, jnp.nan, 4, 5])
  usable = jnp.array([0, 1, 0, 1, 1, 0, 1, 1], bool)
  limit = jnp.float32(0.25)
  np.testing.assert_allclose(
    masks.follow(limit, x, target=0.5, rate=1.0, usable=usable), 3, rtol=1e-6
  )
  assert masks.follow(limit, x, target=0.5, usable=jnp.zeros(8, bool)) == limit


def test_follow_is_positive_where_nothing_differs():
  moved = masks.follow(jnp.float32(0.25), jnp.zeros(8), target=0.5)
  assert 0 < moved < 0.25 and moved.dtype == jnp.float32


def test_a_row_never_sets_its_own_limit():
  # The limit of a batch is an argument: the batch changes only what `follow` returns for the next.
  d, valid = case()
  limit = jnp.float32(0.02)
  keep = lambda d: masks.max_kl(limit=limit)(d, valid)
  louder = put(d, 'kl', d.kl.at[2].set(1.0))
  others = jnp.arange(B) != 2
  np.testing.assert_array_equal(keep(d)[others], keep(louder)[others])
  assert keep(d).sum() > 1 and keep(d)[2] and not keep(louder)[2]
  gradient = jax.grad(lambda x: masks.follow(limit, x, target=0.5))(d.kl[:, 0])
  np.testing.assert_array_equal(gradient, 0)
