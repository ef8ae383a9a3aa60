"""Groups by id, rows that are segments of one trajectory, and statistics over all devices."""

import dataclasses
import functools

import catalogue_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from trm_jax import masks, objectives
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA
from trm_jax.objectives import Method, advantages, gates, ratio_weights, segments
from trm_jax.types import Divergences, InputError, part

KEY, LIMIT = jax.random.key(3), jnp.float32(1)


def scored(rows=16, slots=6, seed=0, spread=0.3):
  """Rows of any length, with gaps."""
  rng = np.random.default_rng(seed)
  logp = -rng.uniform(0.1, 2, (rows, slots))
  others = [np.minimum(logp + rng.normal(0, spread, (rows, slots)), -1e-3) for _ in range(3)]
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  logp, *others = f32(logp), *map(f32, others)
  numbers = lambda low, high: f32(rng.uniform(low, high, (rows, slots)))
  return objectives.Scored(
    **dict(
      zip(('logp', 'rollout_logp', 'recomputed_logp', 'version_logp'), (logp, *others), strict=True)
    ),
    divergences=Divergences(
      kl=f32(rng.exponential(0.02, (rows, slots))),
      tv=numbers(0, 0.3),
      log_ratio=logp - others[0],
      entropy=numbers(0.1, 2),
      chi2=numbers(0, 0.1),
      square=numbers(0.1, 0.9),
    ),
    usable=jnp.arange(rows) != 5,
    valid=jnp.asarray(rng.uniform(size=(rows, slots)) < 0.7),
    reward=f32(rng.normal(size=rows)),
    engine=jnp.zeros(rows, jnp.int32),
  )


def evaluated(method, s, **given):
  return objectives.objective(method, s, limit=LIMIT, key=KEY, **given)


# Groups by id: one row alone, ids far apart, sizes 1, 2, 3 and 10, in no order.
IDS = np.array([7, -3, 10**6, 7, 0, -3, 10**6, 7, *[0] * 8])


@pytest.mark.parametrize(
  'advantage', [advantages.centred, advantages.leave_one_out, advantages.group_relative]
)
def test_groups_by_id_reach_the_objective(advantage):
  s = dataclasses.replace(scored(), groups=jnp.asarray(IDS).at[2].set(99))
  ids, there = np.asarray(s.groups), np.asarray(s.valid.any(-1))
  got = np.asarray(evaluated(Method(advantage=advantage), s)[2])
  for i, reward in enumerate(np.asarray(s.reward, np.float64)):
    others = (ids == ids[i]) & there
    pool = np.asarray(s.reward, np.float64)[others & (np.arange(16) != i)]
    if advantage is not advantages.leave_one_out:
      pool = np.asarray(s.reward, np.float64)[others]
    want = reward - pool.mean() if len(pool) and there[i] else 0.0
    if advantage is advantages.group_relative:
      want /= pool.std() + 1e-6
    np.testing.assert_allclose(got[i], want, rtol=1e-4, atol=1e-5)
  assert got[2] == 0 and got[6] == 0  # alone


def test_ids_of_adjoining_rows_are_groups_of_samples():
  s = scored()
  named = dataclasses.replace(s, groups=jnp.repeat(jnp.array([5, -1, 99, 3]), 4))
  for method in (Method(), objectives.METHODS['optimal_token_baseline'].make()):
    want, _, a = evaluated(method, s, samples=4)
    got, _, b = evaluated(method, named)
    np.testing.assert_allclose(got.total, want.total, rtol=1e-6)
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize('ddof', [0, 1])
def test_deviations_of_either_kind(ddof):
  rewards = jnp.array([1.0, 3, 4, 9, 2])
  ids = jnp.array([1, 1, 1, 1, 0])
  got = advantages.group_relative(rewards, jnp.ones(5, bool), groups=ids, ddof=ddof)
  group = np.array([1.0, 3, 4, 9])
  want = (group - group.mean()) / (group.std(ddof=ddof) + 1e-6)
  np.testing.assert_allclose(got, [*want, 0], rtol=1e-5)


# Advantages per token.


def test_optimal_token_baseline():
  s = dataclasses.replace(scored(), groups=jnp.asarray(IDS))
  got = np.asarray(evaluated(Method(advantage=advantages.optimal_token_baseline()), s)[2])
  f64 = lambda x: np.asarray(x, np.float64)
  arrays = f64(s.reward), f64(s.logp), f64(s.divergences.square), np.asarray(s.valid)
  np.testing.assert_allclose(got, oracle.optimal_baseline(*arrays, IDS), rtol=1e-4, atol=1e-5)
  unsaid = dataclasses.replace(s, divergences=dataclasses.replace(s.divergences, square=None))
  with pytest.raises(InputError, match='square is None'):
    evaluated(Method(advantage=advantages.optimal_token_baseline()), unsaid)


def test_optimal_token_baseline_of_accepted_rows_ignores_what_is_rejected():
  s = dataclasses.replace(scored(), groups=jnp.asarray(IDS))
  method = Method(advantage=advantages.optimal_token_baseline(), baseline_pool='accepted')
  want = np.asarray(evaluated(method, s)[2])
  spoilt = dataclasses.replace(s, reward=s.reward.at[5].set(1e30))  # row 5 is not usable
  got = np.asarray(evaluated(method, spoilt)[2])
  np.testing.assert_array_equal(np.delete(got, 5, 0), np.delete(want, 5, 0))
  assert (got[1] == np.where(s.valid[1], s.reward[1], 0)).all()  # its only peer is rejected


def test_charged_advantages():
  s = scored()
  method = Method(advantage=advantages.charged(0.3, tolerance=0.02))
  got = np.asarray(evaluated(method, s, samples=4)[2])
  base = np.asarray(evaluated(Method(), s, samples=4)[2])
  gap = np.abs(np.exp(s.recomputed_logp) - np.exp(s.rollout_logp))
  want = np.where(s.valid, base[:, None] - np.where(gap > 0.02, 0.3 * gap, 0), 0)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
  assert 0 < (gap <= 0.02).sum() < gap.size


# Segments.
ROWS, SLOTS, PARTS = 6, 6, 3
NAMED = (
  'ppo_clip gspo gmpo topr vespo ctpo minpro cppo opsm vaco m2po normalized_tis sequence_tis'
  ' sequence_mis jackpot geometric_band token_veto trm_max trm_prefix length_neutral dr_grpo'
  ' clip_higher optimal_token_baseline dc_grpo prime_rl kl_cov'
).split()
SEGMENTED = {name: objectives.METHODS[name].make() for name in NAMED} | {
  'control': Method(masks=(masks.max_kl(0.05),), control='random'),
  'accepted': Method(masks=(masks.mean_k2(0.04),), normalize_by='accepted', reduce_tokens='mean'),
}


def cut(s):
  """(rows in segments of SLOTS / PARTS slots, their order): shuffled, with sparse ids."""
  rng = np.random.default_rng(1)
  # Segments of a trajectory keep their order, among those of the others.
  order = np.argsort(rng.permutation(np.repeat(np.arange(ROWS), PARTS)), kind='stable')
  place = np.empty(ROWS * PARTS, int)
  place[order] = np.arange(ROWS * PARTS)  # row -> trajectory * PARTS + number
  split = lambda x: x.reshape(ROWS * PARTS, SLOTS // PARTS)[place]
  repeat = lambda x: jnp.repeat(x, PARTS)[place]
  tokens = ('logp', 'rollout_logp', 'recomputed_logp', 'version_logp', 'valid')
  rows = ('reward', 'engine', 'groups')
  # A trajectory that is not usable has one segment that is not.
  usable = jnp.repeat(s.usable, PARTS).at[jnp.arange(0, ROWS * PARTS, PARTS)].set(True)[place]
  return dataclasses.replace(
    s,
    **{n: split(getattr(s, n)) for n in tokens},
    **{n: repeat(getattr(s, n)) for n in rows},
    divergences=jax.tree.map(split, s.divergences),
    usable=usable,
    trajectory=repeat(jnp.array([11, -5, 0, 10**6, 4, 7])),
  ), place


@functools.cache
def whole():
  s = dataclasses.replace(scored(ROWS, SLOTS, spread=0.15), groups=jnp.array([3, 8, 3, 3, 8, 8]))
  # The first segment of the second trajectory is empty, so is all of the last but one.
  valid = s.valid.at[1, :2].set(False).at[4].set(False)
  return dataclasses.replace(s, valid=valid)


# What each part of a method does with segments, in `make test`; every method in `make test-all`.
QUICK = 'ppo_clip cppo normalized_tis trm_prefix control accepted'.split()


@pytest.mark.parametrize(
  'name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SEGMENTED]
)
def test_segments_of_a_trajectory_are_one_row(name):
  method, s = SEGMENTED[name], whole()
  rows, place = cut(s)

  def total(logp, s):
    mean, kept, found = evaluated(method, dataclasses.replace(s, logp=logp))
    return mean.total, (mean.count, kept, found)

  (want, (count, kept, a)), slope = jax.value_and_grad(total, has_aux=True)(s.logp, s)
  (got, (count_, kept_, a_)), slope_ = jax.value_and_grad(total, has_aux=True)(rows.logp, rows)
  split = lambda x: np.asarray(x).reshape(ROWS * PARTS, SLOTS // PARTS)[place]
  there = np.asarray(rows.valid)
  assert count_ == count
  if name == 'control':  # which rows are kept is drawn anew, how many is not
    of = np.asarray(rows.trajectory)
    each = [set(np.asarray(kept_)[of == i].tolist()) for i in set(of)]
    assert all(len(k) <= 1 for k in each)
    assert sum(k == {True} for k in each) == kept.sum() and 0 < kept.sum() < ROWS
    return
  # A constant length is the slots of a row.
  scale = PARTS if name == 'dr_grpo' else 1
  np.testing.assert_allclose(got, want * scale, rtol=2e-5, atol=1e-5)
  np.testing.assert_allclose(slope_[there], split(slope * scale)[there], rtol=2e-5, atol=1e-6)
  by_row = lambda x: split(x) if x.ndim == 2 else np.repeat(np.asarray(x), PARTS)[place]
  filled = np.repeat(np.asarray(s.valid.any(-1) & s.usable), PARTS)[place]
  got, want = np.asarray(kept_), by_row(kept)
  at = there if got.ndim == 2 else filled
  np.testing.assert_array_equal(got[at], want[at])
  got, want = np.asarray(a_), by_row(a)
  at = there if got.ndim == 2 else filled
  np.testing.assert_allclose(got[at], want[at], rtol=2e-5, atol=1e-6)


def test_a_penalty_counts_trajectories():
  s = whole()
  rows, place = cut(s)
  kl = s.divergences.kl
  for method in (Method(), Method(reduce_tokens='mean', kl_scope='kept', normalize_by='accepted')):
    kept = jnp.array([True, False, True, True, True, True])
    want = objectives.penalty(method, kl, s.valid, kept)
    spread = jnp.repeat(kept, PARTS)[place]
    got = objectives.penalty(method, rows.divergences.kl, rows.valid, spread, rows.trajectory)
    np.testing.assert_allclose(got.total, want.total, rtol=1e-5)
    assert got.count == want.count


def test_segments_need_groups():
  rows = dataclasses.replace(cut(whole())[0], groups=None)
  with pytest.raises(InputError, match='without scored.groups'):
    evaluated(Method(), rows, samples=2)


def test_rows_that_are_trajectories_change_nothing():
  s = dataclasses.replace(whole(), trajectory=jnp.array([4, 0, 2, 9, 1, 7]))
  joined = segments.joined(s)
  np.testing.assert_array_equal(joined.valid.sum(-1), s.valid.sum(-1))
  for name in ('gspo', 'trm_prefix'):
    method = objectives.METHODS[name].make()
    got, want = evaluated(method, s), evaluated(method, whole())
    np.testing.assert_allclose(got[0].total, want[0].total, rtol=1e-6)
    np.testing.assert_array_equal(
      got[1][whole().valid.any(-1)], want[1][np.asarray(whole().valid.any(-1))]
    )


# Statistics of the whole batch.
BATCH_WIDE = {name: objectives.METHODS[name].make() for name in ('m2po', 'sis', 'kl_cov')} | {
  'normalized_tis': objectives.METHODS['normalized_tis'].make(),
  'normalized rows': Method(
    weights=(
      part(
        ratio_weights.batch_normalized,
        weight=part(ratio_weights.clamped, level='sequence'),
        level='sequence',
      ),
    )
  ),
  'clip_cov': Method(gates=(part(gates.clip_cov, low=0.1, share=0.2),)),
}


@pytest.mark.slow
def test_eight_devices_are_one():
  s, methods = scored(), BATCH_WIDE
  fields = {f.name: getattr(s, f.name) for f in dataclasses.fields(s)}

  def run(logp, axis_name=None, **rest):
    of = dataclasses.replace(s, **rest, logp=logp)
    found = {}
    for name, method in methods.items():
      mean, _, a = evaluated(method, of, samples=2, axis_name=axis_name)
      found[name] = (
        mean.over(axis_name).value,
        objectives.per_token(method, dataclasses.replace(of, key=KEY, axis_name=axis_name), a),
      )
    return found

  given = {n: x for n, x in fields.items() if n != 'logp' and x is not None}
  names = list(given)

  def sharded(logp):
    body = lambda logp, *xs: run(logp, DATA, **dict(zip(names, xs, strict=True)))
    return sharding.over_mesh(
      body,
      in_specs=(P(DATA),) * (1 + len(names)),
      out_specs={n: (P(), P(DATA)) for n in methods},
    )(*sharding.reshard((logp, *given.values()), DATA))

  total = lambda f: lambda logp: (sum(v for v, _ in f(logp).values()), f(logp))
  (_, want), slope = jax.value_and_grad(total(run), has_aux=True)(s.logp)
  with jax.set_mesh(sharding.make_mesh(8, 1)):
    (_, got), slope_ = jax.jit(jax.value_and_grad(total(sharded), has_aux=True))(s.logp)
  for name in methods:
    for a, b in zip(got[name], want[name], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
  np.testing.assert_allclose(slope_, slope, rtol=1e-5, atol=1e-6)
  # A device alone would have found other numbers: the tests above can fail.
  alone = jax.tree.map(lambda x: x[:2], s)
  for name, method in methods.items():
    a = evaluated(method, alone, samples=2)[2]
    mine = objectives.per_token(method, dataclasses.replace(alone, key=KEY), a)
    assert name == 'sis' or not np.allclose(mine, want[name][1][:2]), name
