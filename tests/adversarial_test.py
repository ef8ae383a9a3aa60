"""Rows as nobody should hand them over, through the front door: no silent keep, no stray NaN.

Missing values, infinities, huge and tiny numbers, holes, empty rows, garbage in padding, low
precision. What is right is recomputed in float64, row by row.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trm_jax as trm

T = 6
ODD = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 1e4, -1e4, 88.7, -88.7, 20.5, -20.5])
SIZES = [4096, pytest.param(10**6, marks=pytest.mark.slow)]
LIMIT = 0.05
# Rounding in float32, and in what bfloat16 holds, decides nothing this near to a limit.
NEAR = 1e-3


def spoiled(rng, x, share):
  return np.where(rng.random(x.shape) < share, rng.choice(ODD, x.shape), x)


def rows(count, seed, share=0.03):
  """(statistics, valid): a third of the rows is whole, others hold odd values anywhere."""
  rng = np.random.default_rng(seed)
  valid = rng.random((count, T)) < rng.choice([0.0, 0.5, 0.9, 1.0], (count, 1))
  scale = rng.choice([1e-4, 0.02, 0.3], (count, 1))
  fields = dict(
    kl=scale * rng.exponential(size=(count, T)),
    tv=np.minimum(scale * rng.exponential(size=(count, T)), 1),
    log_ratio=scale * rng.normal(size=(count, T)),
    chi2=scale * rng.exponential(size=(count, T)),
  )
  fields = {name: spoiled(rng, x, share) for name, x in fields.items()}
  # Padding holds anything.
  return {name: np.where(valid, x, spoiled(rng, x, 0.5)) for name, x in fields.items()}, valid


def of_rows(total, x, valid):
  x = np.where(valid, x, 0)
  with np.errstate(all='ignore'):
    return total(x)


def mean(x, valid):
  return of_rows(lambda x: x.sum(-1), x, valid) / np.maximum(valid.sum(-1), 1)


def largest(x, valid):
  return of_rows(lambda x: np.where(np.isnan(x).any(-1), np.nan, x.max(-1)), x, valid)


def k3(d):
  with np.errstate(all='ignore'):
    return np.where(d == np.inf, np.inf, np.expm1(d) - d)


def infinite(x, d):
  """A log-ratio of -inf is a violation too, though its ratio is 0."""
  return np.where(np.isinf(d), np.inf, x)


def deviation(d):
  with np.errstate(all='ignore'):
    return np.abs(np.expm1(d))


ABSOLUTE = lambda d: infinite(np.abs(d), d)
CRITERIA = {
  'max_kl': (trm.max_kl(LIMIT), lambda f, v: largest(f['kl'], v)),
  'mean_kl': (trm.mean_kl(LIMIT), lambda f, v: mean(f['kl'], v)),
  'max_tv': (trm.max_tv(LIMIT), lambda f, v: largest(f['tv'], v)),
  'max_k2': (trm.max_k2(LIMIT), lambda f, v: largest(f['log_ratio'] ** 2 / 2, v)),
  'mean_k3': (trm.mean_k3(LIMIT), lambda f, v: mean(k3(f['log_ratio']), v)),
  'mean_deviation': (trm.mean_deviation(LIMIT), lambda f, v: mean(deviation(f['log_ratio']), v)),
  'chi2_budget': (trm.chi2_budget(LIMIT), lambda f, v: mean(f['chi2'], v) * v.sum(-1)),
  'carm': (trm.masks.carm(LIMIT), lambda f, v: mean(ABSOLUTE(f['log_ratio']), v) - 0.0),
  'ratio error': (
    trm.masks.mean_ratio_error(1.05),
    lambda f, v: np.where(v.any(-1), mean(np.exp(np.minimum(ABSOLUTE(f['log_ratio']), 700)), v), 0),
  ),
}
LIMITS = {'carm': np.log1p(LIMIT), 'ratio error': 1.05}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('count', SIZES)
def test_a_row_is_kept_where_all_its_tokens_say_so(count, dtype, optimised):
  fields, valid = rows(count, seed=1)
  given = {name: jnp.asarray(x.astype(np.float32)).astype(dtype) for name, x in fields.items()}

  def judge(given, valid):
    found = trm.Divergences(**given, entropy=None)
    return {name: criterion(found, valid) for name, (criterion, _) in CRITERIA.items()}

  kept = jax.jit(judge, compiler_options=optimised)(given, valid)
  exact = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in given.items()}
  for name, (_, statistic) in CRITERIA.items():
    with np.errstate(all='ignore'):
      value, limit = statistic(exact, valid), LIMITS.get(name, LIMIT)
      sure = ~(np.abs(value / limit - 1) < NEAR)
      want = value <= limit
    wrong = sure & (np.asarray(kept[name]) != want)
    # A statistic below 0 is no divergence: whatever is said of it, it is not silently right.
    legal = ~(
      np.where(valid, np.minimum(exact['kl'], np.minimum(exact['tv'], exact['chi2'])), 0) < 0
    )
    wrong &= legal.all(-1)
    assert not wrong.any(), (name, fields, np.flatnonzero(wrong)[:5])
    assert 0.05 < want.mean() < 0.95


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('count', SIZES)
def test_what_may_not_be_used_leaves_no_trace_in_loss_and_gradient(count, dtype, optimised):
  rng = np.random.default_rng(2)
  valid = rng.random((count, T)) < rng.choice([0.0, 0.7, 1.0], (count, 1))
  policy = np.log(rng.uniform(1e-3, 1, (count, T)))
  reported = np.minimum(policy + 0.1 * rng.normal(size=(count, T)), 0)
  policy, reported = (spoiled(rng, x, 0.02) for x in (policy, reported))
  policy, reported = (jnp.asarray(x.astype(np.float32)).astype(dtype) for x in (policy, reported))
  reward = jnp.asarray(rng.integers(0, 2, count), jnp.float32)

  def loss(policy, reported, valid):
    filled, usable = trm.resolve_missing(reported, policy, valid)
    d = trm.Divergences(kl=None, tv=None, log_ratio=policy - filled, entropy=None)
    keep = usable & trm.max_k2(0.5)(d, valid)
    a = trm.centred(reward, keep, group_size=2, exists=valid.any(-1))
    return -trm.aggregate(trm.ratio_pg(policy, filled, a, valid), valid, keep).value, (keep, usable)

  run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=optimised)
  (value, (keep, usable)), slope = run(policy, reported, valid)
  p, q = (np.asarray(x.astype(jnp.float32), np.float64) for x in (policy, reported))
  with np.errstate(all='ignore'):
    d = p - q
    fine = np.isfinite(p) & np.isfinite(q) & (q <= 1e-3) & (d <= 20)
    inside = np.where(valid, d**2 / 2, 0) <= 0.5
    sure = ~(np.abs(np.where(valid, d**2 / 2, 0) / 0.5 - 1) < 0.03).any(-1)
  want = np.where(valid, fine, True).all(-1)
  np.testing.assert_array_equal(usable, want)
  np.testing.assert_array_equal(np.asarray(keep)[sure], (want & inside.all(-1))[sure])
  assert np.isfinite(value) and abs(value) < 10 and 0.1 < np.asarray(keep).mean() < 0.9
  slope = np.asarray(slope, np.float64)
  assert np.isfinite(slope).all()
  assert (slope[~np.asarray(keep)] == 0).all() and (slope[~valid] == 0).all()


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_scores_and_ids_of_any_kind(dtype, optimised):
  count, vocab = 1024, 11
  rng = np.random.default_rng(3)
  policy = spoiled(rng, rng.normal(size=(count, 4, vocab)), 0.01)
  rollout = spoiled(rng, rng.normal(size=(count, 4, vocab)), 0.01)
  tokens = rng.integers(0, vocab, (count, 4))
  tokens = np.where(
    rng.random(tokens.shape) < 0.05, rng.choice([-1, -100, 11, 2**31 - 1], tokens.shape), tokens
  )
  given = [jnp.asarray(x.astype(np.float32)).astype(dtype) for x in (policy, rollout)]
  found = jax.jit(trm.statistics, compiler_options=optimised)(
    *given, jnp.asarray(tokens, jnp.int32)
  )
  p, q = (np.asarray(x.astype(jnp.float32), np.float64) for x in given)
  with np.errstate(all='ignore'):
    whole = lambda x: ~(np.isnan(x) | (x == np.inf)).any(-1) & ~(x == -np.inf).all(-1)
    there = (0 <= tokens) & (tokens < vocab)
    log = [x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) for x in
           (p - p.max(-1, keepdims=True), q - q.max(-1, keepdims=True))]  # fmt: skip
    log = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in log]
    kl = np.where(np.exp(log[1]) > 0, np.exp(log[1]) * (log[1] - log[0]), 0).sum(-1)
    # What the policy excludes and the rollout does not, however rarely it is drawn.
    kl = np.where(((p == -np.inf) & (q > -np.inf)).any(-1), np.inf, kl)
    # 1e-39 times 1e38 is 1 where float32 has underflowed: not a token of any model.
    lost = ((p < -1e37) & (log[1] < -80) & (p > -np.inf)).any(-1)
  judged = whole(p) & whole(q) & ~lost
  cut = lambda x: np.minimum(x, 1e30)  # near the largest float32, where sums overflow
  got = np.asarray(found.kl, np.float64)
  # Missing where either side cannot be a distribution; else right, and inf where it is infinite.
  assert np.isnan(got[~(judged | lost)]).all()
  np.testing.assert_allclose(cut(got[judged]), cut(kl[judged]), rtol=2e-3, atol=1e-5)
  assert (got[judged] >= 0).all()
  logp = np.asarray(found.policy_logp)
  assert np.isnan(logp[~there]).all() and not (logp[there & whole(p)] > 1e-6).any()
