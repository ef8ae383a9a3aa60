"""Published weights, gates, criteria and surrogates against their formulas in float64."""

import dataclasses
import math

import catalogue_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import masks, objectives
from trm_jax.objectives import clips, gates, ratio_weights, surrogates
from trm_jax.training.words import MethodWords
from trm_jax.types import Divergences, InputError, part

B, T = 8, 6
A = np.array([1.0, -1, 0.5, -0.5, 2, -2, 0, 1])


def scored(spread=0.4, seed=0, dtype=jnp.float32):
  """Rows with a gap of a tool, of one token, without any, and padding that holds NaN."""
  rng = np.random.default_rng(seed)
  valid = np.arange(T)[None] < rng.integers(2, T + 1, B)[:, None]
  valid[0] = [True, False, False, True, True, False]
  valid[1] = [True] + [False] * (T - 1)
  valid[2] = False
  logp = -rng.uniform(0.1, 2, (B, T))
  others = [np.minimum(logp + rng.normal(0, spread, (B, T)), -1e-3) for _ in range(3)]
  arrays = [jnp.asarray(np.where(valid, x, np.nan), dtype) for x in (logp, *others)]
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  return objectives.Scored(
    **dict(zip(('logp', 'rollout_logp', 'recomputed_logp', 'version_logp'), arrays, strict=True)),
    divergences=Divergences(
      kl=f32(rng.exponential(0.1, (B, T))),
      tv=f32(rng.uniform(0, 0.3, (B, T))),
      log_ratio=arrays[0].astype(jnp.float32) - arrays[1].astype(jnp.float32),
      entropy=f32(rng.uniform(0.1, 2, (B, T))),
      square=f32(rng.uniform(0.1, 0.9, (B, T))),
    ),
    usable=jnp.ones(B, bool),
    valid=jnp.asarray(valid),
    reward=f32(rng.integers(0, 2, B)),
    engine=jnp.zeros(B, jnp.int32),
  )


CASES = {
  'random': dict(),
  'small': dict(spread=1e-3, seed=1),
  'large': dict(spread=3.0, seed=2),
  'bfloat16': dict(seed=3, dtype=jnp.bfloat16),
}
cases = pytest.mark.parametrize('case', CASES)


def doubles(s):
  arrays = (s.logp, s.rollout_logp, s.recomputed_logp)
  return *(np.asarray(x.astype(jnp.float32), np.float64) for x in arrays), np.asarray(s.valid)


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-6)


RULES = {
  'clamped': lambda w: min(max(w, 0.0), 2.0),
  'banded': lambda w: 0.0 if w < 0.5 or w > 5 else w,
  'inside': lambda w: math.nan if math.isnan(w) else float(0.5 <= w <= 2),
  'raw': lambda w: w,
}


@cases
@pytest.mark.parametrize('level', ['token', 'sequence', 'geometric'])
@pytest.mark.parametrize('name', RULES)
def test_weights(name, level, case):
  s = scored(**CASES[case])
  logp, rollout, recomputed, valid = doubles(s)
  for anchor, x in (('recomputed', recomputed), ('policy', logp)):
    got = getattr(ratio_weights, name)(s, anchor=anchor, level=level)
    close(got, oracle.weight(x - rollout, valid, level, RULES[name]))


@cases
@pytest.mark.parametrize('name', ['kpop', 'cis'])
def test_weights_by_probability(name, case):
  s = scored(**CASES[case])
  _, rollout, recomputed, valid = doubles(s)
  with np.errstate(invalid='ignore'):
    p, q = np.exp(recomputed), np.exp(rollout)
  # A sampled token has p < 1; bfloat16 may round it to 1, where the paper's logit is infinite.
  p, q = (np.minimum(x, 1 - 1e-12) for x in (p, q))
  close(getattr(ratio_weights, name)(s), getattr(oracle, name)(p, q, valid))


@cases
def test_jackpot(case):
  s = scored(**CASES[case])
  p, q, p_0, valid = doubles(s)
  tv = np.asarray(s.divergences.tv, np.float64)
  close(ratio_weights.jackpot(s), oracle.jackpot(p, q, p_0, tv, valid))


# One broken log-ratio in a row, by what it is.
BROKEN = {3: np.inf, 4: -np.inf, 5: np.nan, 6: 1e4, 7: -1e4}


def broken(s):
  """(the same with one log-ratio of each of the rows 3 to 7 broken, those log-ratios)."""
  spoil = lambda x, sign: x.at[jnp.array([*BROKEN]), 1].set(
    jnp.array([sign(v) for v in BROKEN.values()])
  )
  high = spoil(s.logp, lambda v: v if v < 0 or np.isnan(v) else -1.0)
  low = spoil(s.rollout_logp, lambda v: v if np.isnan(v) else -v if v > 0 else -1.0)
  s = dataclasses.replace(s, logp=high, recomputed_logp=high, rollout_logp=low)
  assert s.valid[jnp.array([*BROKEN]), 1].all()
  return s


@pytest.mark.parametrize('level', ['token', 'sequence', 'geometric'])
@pytest.mark.parametrize('name', RULES)
def test_weights_of_broken_log_ratios(name, level):
  s = broken(scored())
  _, rollout, recomputed, valid = doubles(s)
  got = getattr(ratio_weights, name)(s, level=level)
  close(got, oracle.weight(recomputed - rollout, valid, level, RULES[name]))
  assert np.isnan(got[5, 1]) and np.isfinite(got[np.arange(B) != 5]).all()


def test_weights_by_probability_of_broken_log_ratios():
  s = broken(scored())
  for weight, want in (
    # A probability of 0 on one side: no divergence is infinitely far, and p = 0 has the widest cap.
    (ratio_weights.kpop, [0, 0, np.nan, 0, 0]),
    (ratio_weights.cis, [1 + 2.3 * (1 - math.exp(-1)), math.exp(-20), np.nan] * 2),
    (ratio_weights.jackpot, [2 * 1.0, None, np.nan, 2 * 1.0, None]),
  ):
    got = np.asarray(weight(s))
    for row, value in zip(BROKEN, want, strict=False):
      if value is not None:
        np.testing.assert_allclose(got[row, 1], value, rtol=1e-5)
    assert np.isfinite(np.delete(got, [4, 5], 0)).all()


@cases
@pytest.mark.parametrize('level', ['token', 'sequence'])
def test_batch_normalized(level, case):
  s = scored(**CASES[case])
  _, rollout, recomputed, valid = doubles(s)
  w = oracle.weight(recomputed - rollout, valid, level, lambda w: min(w, 2.0))
  weight = part(ratio_weights.clamped, level=level)
  rows = [w[i][valid[i]].mean() for i in range(B) if valid[i].any()]
  mean = w[valid].mean() if level == 'token' else np.mean(rows)
  got = ratio_weights.batch_normalized(s, weight=weight, level=level)
  close(got, np.where(valid, w / mean, 1))


# Criterion and whether a row's d is inside; a row without tokens is kept.
BANDS = {
  'sum': (masks.sum_band(), oracle.in_band(0.5, 2, np.sum)),
  'sum_high': (masks.sum_band(low=None, high=3.0), oracle.in_band(0, 3, np.sum)),
  'geometric': (masks.geometric_band(low=0.8, high=1.2), oracle.in_band(0.8, 1.2, np.mean)),
  'geometric_default': (masks.geometric_band(), oracle.in_band(0.999, 1.001, np.mean)),
  'veto': (masks.token_veto(low=0.6), lambda d: math.exp(d.min()) >= 0.6),
  'veto_both': (
    masks.token_veto(low=0.4, high=2.0),
    lambda d: math.exp(d.min()) >= 0.4 and math.exp(d.max()) <= 2,
  ),
  'ratio_error': (masks.mean_ratio_error(), lambda d: np.exp(np.abs(d)).mean() <= 1.5),
  'carm': (masks.carm(0.35), lambda d: np.abs(d).mean() <= math.log(1.35)),
  'mean_k2': (masks.mean_k2(0.08), lambda d: (d**2 / 2).mean() <= 0.08),
  'sum_k2': (masks.sum_k2(0.3), lambda d: (d**2 / 2).sum() <= 0.3),
}


@pytest.mark.parametrize('name', BANDS)
def test_criteria(name):
  criterion, inside = BANDS[name]
  seen = set()
  for case in CASES.values():
    s = scored(**case)
    d = np.asarray(s.divergences.log_ratio, np.float64)
    want = oracle.row(d, np.asarray(s.valid), inside)
    got = np.asarray(criterion(s.divergences, s.valid))
    np.testing.assert_array_equal(got, [w is None or w for w in want])
    seen |= {bool(w) for w in want if w is not None}
  assert seen == {True, False}  # it must bite, and not always


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', BANDS)
def test_criteria_reject_what_is_missing_or_infinite(name, bad):
  criterion, valid = BANDS[name][0], jnp.ones((2, 3), bool)
  d = jnp.zeros((2, 3)).at[0, 1].set(bad)
  found = Divergences(kl=None, tv=None, log_ratio=d, entropy=d)
  np.testing.assert_array_equal(criterion(found, valid), [False, True])
  np.testing.assert_array_equal(criterion(found, valid.at[0, 1].set(False)), [True, True])


@pytest.mark.parametrize('setting', [dict(low=0.0), dict(high=1.0), dict(low=None, high=None)])
@pytest.mark.parametrize('make', [masks.sum_band, masks.geometric_band, masks.token_veto])
def test_bands_that_are_none_are_refused(make, setting):
  with pytest.raises(InputError, match='low|high'):
    make(**setting)


SURROGATES = 'dual_clip delta_clip gspo gmpo cispo sapo vespo topr reinforce ctpo minpro'.split()
# Those whose value at a token depends on that token alone.
BY_TOKEN = 'dual_clip delta_clip cispo sapo reinforce'.split()


@cases
@pytest.mark.parametrize('name', SURROGATES)
def test_surrogates(name, case):
  s = scored(**CASES[case])
  logp, rollout, recomputed, valid = doubles(s)
  function = getattr(clips, name)
  a = jnp.asarray(A, jnp.float32)
  for anchor, x in (('rollout', rollout), ('recomputed', recomputed)):
    settings = {} if name == 'reinforce' else dict(anchor=anchor)
    got = np.asarray(function(s, a, **settings))
    np.testing.assert_allclose(
      got[valid], oracle.surrogate(name, logp - x, A, valid)[valid], rtol=2e-4, atol=3e-6
    )


# Weight c with gradient c A of each token's own logp: the published forms with a detached factor.
@pytest.mark.parametrize('name', ['cispo', 'vespo', 'topr', 'reinforce', 'minpro'])
def test_score_forms_have_the_gradient_of_log_p(name):
  s, a = scored(), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  total = lambda x: jnp.where(
    s.valid, getattr(clips, name)(dataclasses.replace(s, logp=x), a), 0
  ).sum()
  close(jax.grad(total)(s.logp), oracle.surrogate(name, logp - rollout, A, valid))


@pytest.mark.parametrize('name', SURROGATES)
def test_surrogates_of_broken_log_ratios(name):
  s, a = broken(scored()), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  function = getattr(clips, name)
  got = np.asarray(function(s, a))
  with np.errstate(invalid='ignore'):
    want = oracle.surrogate(name, logp - rollout, A, valid)
  whole = np.arange(B) != 5
  np.testing.assert_allclose(got[whole][valid[whole]], want[whole][valid[whole]], rtol=2e-4)
  # A missing log-prob shows in its token, or in all that the formula makes of it.
  shown = np.isnan(got[5][valid[5]])
  if name == 'reinforce':
    assert not shown.any()  # the value of a detached weight of 1
  else:
    assert shown[1] and (name not in BY_TOKEN or shown.sum() == 1)
  for other in (s, dataclasses.replace(s, logp=s.logp.at[5, 1].set(-1.0))):
    value = lambda x, other=other: function(dataclasses.replace(other, logp=x), a)
    total = lambda x, value=value: jnp.where(s.valid, value(x), 0)[whole].sum()
    assert np.isfinite(jax.grad(total)(other.logp)).all()


@pytest.mark.parametrize('case', ['random', 'large'])
@pytest.mark.parametrize('name', SURROGATES)
def test_surrogates_of_advantages_per_token(name, case):
  s = scored(**CASES[case])
  logp, rollout, _, valid = doubles(s)
  function = getattr(clips, name)
  rows = jnp.asarray(A, jnp.float32)
  spread = jnp.broadcast_to(rows[:, None], (B, T))
  np.testing.assert_array_equal(function(s, spread)[valid], function(s, rows)[valid])
  tokens = np.random.default_rng(5).normal(size=(B, T))
  got = np.asarray(function(s, jnp.asarray(tokens, jnp.float32)))
  want = oracle.surrogate(name, logp - rollout, tokens, valid)
  np.testing.assert_allclose(got[valid], want[valid], rtol=2e-4, atol=3e-6)


def test_ctpo_has_the_gradient_of_the_cumulative_ratio_at_its_own_token():
  s, a = scored(spread=0.02), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  value = lambda x: clips.ctpo(dataclasses.replace(s, logp=x), a)
  got = np.asarray(jax.grad(lambda x: jnp.where(s.valid, value(x), 0).sum())(s.logp))
  want, d = np.zeros((B, T)), logp - rollout
  for i in range(B):
    for n, t in enumerate(np.flatnonzero(valid[i])):
      log_c, wide = d[i, np.flatnonzero(valid[i])[: n + 1]].sum(), math.sqrt(n + 1)
      if -0.025 * wide <= log_c <= 0.05 * wide or A[i] * log_c < 0 and A[i] > 0:
        want[i, t] = A[i] * math.exp(log_c)
      elif A[i] < 0 and log_c > 0:
        want[i, t] = 0.0  # beyond the dual clip, which here has the same range
  close(got, want)
  assert 0 < (want[valid] != 0).sum() < valid.sum()


def test_sis_draws_a_test_for_each_token():
  key = jax.random.key(7)
  s, a = dataclasses.replace(scored(spread=1.0), key=key), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  r, u = np.exp(logp - rollout), np.asarray(jax.random.uniform(key, (B, T)), np.float64)
  c = np.where(u < np.minimum(1, r), 1, r)
  close(clips.sis(s, a)[valid], (c * A[:, None])[valid])
  total = lambda x: jnp.where(s.valid, clips.sis(dataclasses.replace(s, logp=x), a), 0).sum()
  close(jax.grad(total)(s.logp)[valid], (c * A[:, None])[valid])
  assert 0 < (c[valid] == 1).sum() < valid.sum()
  with pytest.raises(InputError, match='scored.key is None'):
    clips.sis(scored(), a)


@cases
def test_kl_cov(case):
  s, a = scored(**CASES[case]), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  d, cov = logp - rollout, oracle.covariance(logp, A, valid)
  for share, count in ((2e-4, 1), (0.3, int(valid.sum() * 0.3))):
    chosen = valid & (cov >= np.sort(cov[valid])[-count])
    want = np.exp(np.clip(d, -20, 20)) * A[:, None] - np.where(chosen, 0.7 * np.abs(d), 0)
    got = np.asarray(clips.kl_cov(s, a, share=share, penalty=0.7))
    np.testing.assert_allclose(got[valid], want[valid], rtol=2e-4, atol=1e-5)


@cases
def test_clip_cov(case):
  s = dataclasses.replace(scored(**CASES[case]), key=jax.random.key(1))
  a = jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  r, cov = np.exp(np.clip(logp - rollout, -20, 20)), oracle.covariance(logp, A, valid)
  clipped = ((A[:, None] > 0) & (r > 1.2)) | ((A[:, None] < 0) & (r < 0.8))
  candidates = valid & ~clipped & (cov > 0.1) & (cov < 0.8)
  assert candidates.sum() > 2
  for share, count in ((2e-4, 1), (2.5 / valid.sum(), 2), (1.0, candidates.sum())):
    closed = ~np.asarray(gates.clip_cov(s, a, share=share, low=0.1, high=0.8)) & valid
    assert closed.sum() == count and not (closed & ~candidates).any()
  others = [dataclasses.replace(s, key=jax.random.key(k)) for k in range(8)]
  drawn = {np.asarray(gates.clip_cov(o, a, low=0.1, high=0.8)).tobytes() for o in others}
  assert len(drawn) > 1


@cases
@pytest.mark.parametrize('gate', [part(gates.dppo_tv, limit=0.2), gates.probability_gap])
def test_penalized(gate, case):
  s, a = scored(**CASES[case]), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  gap, d = np.exp(logp) - np.exp(rollout), logp - rollout
  keep = np.abs(gap) <= 0.1
  if gate is not gates.probability_gap:
    keep = np.where(A[:, None] > 0, gap <= 0.2, gap >= -0.2) | (A[:, None] == 0)
  got = np.asarray(clips.penalized(s, a, gate=gate))
  want = np.where(keep, np.exp(d) * A[:, None], 0) - 1e-3 * d**2
  np.testing.assert_allclose(got[valid], want[valid], rtol=2e-4, atol=1e-5)
  slope = jax.grad(
    lambda x: jnp.where(
      s.valid, clips.penalized(dataclasses.replace(s, logp=x), a, gate=gate), 0
    ).sum()
  )(s.logp)
  want = np.where(keep, np.exp(d) * A[:, None], 0) - 2e-3 * d
  rtol = 1e-2 if case == 'bfloat16' else 2e-4
  np.testing.assert_allclose(np.asarray(slope, np.float64)[valid], want[valid], rtol, 1e-5)


@pytest.mark.parametrize('name', ['dual_clip', 'delta_clip', 'gmpo', 'sapo'])
def test_gradients_are_those_of_the_formula(name):
  """Against central differences of the oracle."""
  s, a = scored(), jnp.asarray(A, jnp.float32)
  logp, rollout, _, valid = doubles(s)
  total = lambda x: jnp.where(
    s.valid, getattr(clips, name)(dataclasses.replace(s, logp=x), a), 0
  ).sum()
  got, h = np.asarray(jax.grad(total)(s.logp)), 1e-6
  for i, t in zip(*np.nonzero(valid), strict=True):
    step = np.zeros((B, T))
    step[i, t] = h
    ends = [
      oracle.surrogate(name, logp - rollout + sign * step, A, valid).sum() for sign in (1, -1)
    ]
    np.testing.assert_allclose(got[i, t], (ends[0] - ends[1]) / (2 * h), rtol=1e-3, atol=1e-4)


@cases
def test_drpo(case):
  s = scored(**CASES[case])
  logp, rollout, _, valid = doubles(s)

  def total(x, a):
    value = clips.drpo(dataclasses.replace(s, logp=x), jnp.asarray(a, jnp.float32))
    return jnp.where(s.valid, value, 0).sum(), value

  for a in (A, np.random.default_rng(5).normal(size=(B, T))):
    got, value = jax.grad(total, has_aux=True)(s.logp.astype(jnp.float32), a)
    want, slope = oracle.drpo(logp, rollout, a, valid)
    np.testing.assert_allclose(value[valid], want[valid], rtol=2e-4, atol=3e-6)
    np.testing.assert_allclose(got[valid], slope[valid], rtol=2e-4, atol=3e-6)


GATES = {
  name: getattr(gates, name)
  for name in (
    'dppo_tv dppo_kl dppo_exact probability_gap opsm m2po cppo estr vaco negative_suffix'
  ).split()
} | {'clip_band': part(gates.clip_band, anchor='rollout')}


@cases
@pytest.mark.parametrize('name', GATES)
def test_gates(name, case):
  s = scored(**CASES[case])
  logp, rollout, _, valid = doubles(s)
  stats = [np.asarray(x, np.float64) for x in (s.divergences.tv, s.divergences.entropy)]
  tokens = np.random.default_rng(5).normal(size=(B, T))
  for a in (A, tokens):
    got = np.asarray(GATES[name](s, jnp.asarray(a, jnp.float32)))
    with np.errstate(invalid='ignore'):
      want = oracle.gate(name, logp, rollout, a, valid, *stats)
    np.testing.assert_array_equal(got[valid], want[valid])
  if case == ('random' if name in ('m2po', 'opsm') else 'large'):
    assert 0 < want[valid].sum() < valid.sum()  # it must bite


@pytest.mark.parametrize('name', GATES)
def test_gates_close_what_is_missing_and_pass_no_gradient(name):
  s, a, gate = scored(), jnp.ones(B), GATES[name]
  missing = dataclasses.replace(
    s,
    rollout_logp=s.rollout_logp.at[1, 0].set(jnp.nan),
    divergences=dataclasses.replace(s.divergences, tv=s.divergences.tv.at[1, 0].set(jnp.nan)),
  )
  assert not gate(missing, a)[1, 0]
  method = objectives.Method(gates=(gate,))

  def total(logp):
    value = objectives.per_token(method, dataclasses.replace(s, logp=logp), a)
    return jnp.where(s.valid, value, 0).sum()

  closed = ~np.asarray(gate(s, a)) & np.asarray(s.valid)
  assert (np.asarray(jax.grad(total)(s.logp))[closed] == 0).all()


def evaluated(method, s):
  return objectives.objective(method, s, samples=4, limit=jnp.float32(1), key=jax.random.key(0))


@pytest.mark.parametrize('name', objectives.METHODS)
def test_gradient_goes_to_logp_alone_and_not_to_rejected_rows(name):
  method, s = MethodWords(name=name).make(), scored(spread=0.05)
  s = dataclasses.replace(s, usable=jnp.arange(B) != 4)
  s = dataclasses.replace(s, logp=s.logp.at[4].add(50.0))

  def total(logs):
    return evaluated(method, dataclasses.replace(s, **logs))[0].total

  names = ('logp', 'rollout_logp', 'recomputed_logp', 'version_logp')
  value, slopes = jax.value_and_grad(total)({n: getattr(s, n) for n in names})
  kept = np.asarray(evaluated(method, s)[1])
  kept = kept if kept.ndim == 2 else kept[:, None] & np.ones((1, T), bool)
  assert np.isfinite(value) and np.isfinite(slopes['logp']).all()
  assert (np.asarray(slopes['logp'])[~kept | ~np.asarray(s.valid)] == 0).all()
  for other in names[1:]:
    assert (np.asarray(slopes[other]) == 0).all(), other


@pytest.mark.parametrize('name', ['kl_cov', 'optimal_token_baseline'])
@pytest.mark.parametrize('field', ['logp', 'recomputed_logp'])
def test_a_row_that_cannot_be_judged_spoils_no_other(name, field):
  method, s = objectives.METHODS[name].make(), scored(spread=0.05)
  s = dataclasses.replace(s, usable=jnp.arange(B) != 4)
  s = dataclasses.replace(s, **{field: getattr(s, field).at[4].set(jnp.nan)})
  total = lambda x: evaluated(method, dataclasses.replace(s, logp=x))[0].total
  value, slope = jax.value_and_grad(total)(s.logp)
  assert np.isfinite(value) and np.isfinite(slope[s.valid]).all() and (slope[4] == 0).all()


def test_masks_may_judge_the_anchor():
  s = scored()
  _, rollout, recomputed, valid = doubles(s)
  inside = oracle.row(recomputed - rollout, valid, BANDS['sum'][1])
  kept = evaluated(objectives.Method(masks=(masks.sum_band(),), judge='anchor'), s)[1]
  np.testing.assert_array_equal(kept, [w is None or w for w in inside])
  assert (kept != masks.sum_band()(s.divergences, s.valid)).any()
  with pytest.raises(InputError, match="judge='anchor'"):
    objectives.Method(masks=(masks.max_kl(0.1),), judge='anchor')


@pytest.mark.parametrize('by, count', [('tokens', 5), ('accepted_tokens', 2)])
def test_means_over_tokens(by, count):
  valid = jnp.array([[True, True, True], [True, True, False]])
  keep = jnp.array([False, True])
  value = jnp.array([[9.0, 9, 9], [1, 2, 9]])
  mean = surrogates.aggregate(value, valid, keep, normalize_by=by)
  assert (mean.total, mean.count) == (3, count)
  whole = objectives.penalty(objectives.Method(normalize_by=by), value, valid, keep)
  assert (whole.total, whole.count) == (30, 5)
