"""trm_jax.objectives.surrogates: objectives per token and their aggregation under masks."""

import functools
import inspect
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import jaxtyping
import numpy as np
import oracles
import pytest

from trm_jax import masks
from trm_jax.objectives import surrogates, weights
from trm_jax.types import Divergences, InputError

SEEDS = st.integers(0, 2**20)
B, T = 8, 5
BAD = [jnp.nan, jnp.inf, -jnp.inf, 1e4, -1e4]


def decoupled(logp, anchor, advantages, valid):
  """With a rollout that differs from the anchor by a fixed pattern."""
  rollout = anchor - 0.4 * jnp.sin(jnp.arange(T))[None]
  return surrogates.decoupled(logp, anchor, rollout, advantages, valid)


def decoupled_oracle(logp, anchor, advantages, valid):
  rollout = oracles.f64(anchor) - 0.4 * np.sin(np.arange(T))
  return oracles.decoupled(logp, anchor, rollout, advantages, valid)


SURROGATES = [
  (surrogates.ratio_pg, oracles.ratio_pg),
  (surrogates.ppo_clip, oracles.ppo_clip),
  (decoupled, decoupled_oracle),
]
BATTERY = pytest.mark.parametrize('fn', [f for f, _ in SURROGATES])
SWITCHES = pytest.mark.parametrize(
  'reduce_tokens, normalize_by',
  list(itertools.product(['sum', 'mean', 'constant'], ['total', 'accepted'])),
)
CRITERIA = {
  'max_kl': masks.max_kl(limit=0.05),
  'mean_kl': masks.mean_kl(limit=0.02),
  'max_tv': masks.max_tv(limit=0.15),
  'max_k2': masks.max_k2(limit=0.05),
  'mean_k3': masks.mean_k3(limit=0.02),
  'combined': masks.combined(max_limit=0.05, mean_limit=0.02),
  'all': masks.keep_all,
}


def case(seed=0, scale=0.3):
  """(logp, anchor, advantages, valid), every row with at least one token."""
  keys = jax.random.split(jax.random.key(seed), 4)
  anchor = -jax.random.exponential(keys[0], (B, T))
  lengths = jax.random.randint(keys[3], (B, 1), 1, T + 1)
  return (
    anchor + scale * jax.random.normal(keys[1], (B, T)),
    anchor,
    jax.random.normal(keys[2], (B,)),
    jnp.arange(T)[None] < lengths,
  )


def divergences_of(logp, anchor):
  x = logp - anchor
  kl = 0.5 * x**2
  return Divergences(kl=kl, tv=jnp.abs(x) / 2, log_ratio=x, entropy=kl)


# Objectives per token.


@pytest.mark.parametrize('fn, oracle', SURROGATES)
@hypothesis.given(seed=SEEDS, scale=st.sampled_from([0.01, 0.3, 3.0]))
def test_matches_the_oracle(fn, oracle, seed, scale):
  logp, anchor, a, valid = case(seed, scale)
  want = oracle(logp, anchor, a, np.asarray(valid))
  np.testing.assert_allclose(fn(logp, anchor, a, valid), want, rtol=2e-5, atol=1e-6)


def one_row(ratios, advantage):
  logp = jnp.log(jnp.array([ratios], jnp.float32))
  return logp, jnp.zeros_like(logp), jnp.array([advantage]), jnp.ones_like(logp, bool)


def test_hand_computed():
  # rho = [1.1, .9, 1, 1.3, .5], A = 2, clip .2: the large ratio is capped at 1.2, .5 is not.
  x = one_row([1.1, 0.9, 1, 1.3, 0.5], 2.0)
  np.testing.assert_allclose(surrogates.ratio_pg(*x), [[2.2, 1.8, 2, 2.6, 1]], rtol=1e-6)
  np.testing.assert_allclose(surrogates.ppo_clip(*x), [[2.2, 1.8, 2, 2.4, 1]], rtol=1e-6)
  # A = -2: now .5 is raised to .8 (-1.6 < -1) and 1.3 is not capped.
  x = one_row([1.1, 0.9, 1, 1.3, 0.5], -2.0)
  np.testing.assert_allclose(surrogates.ppo_clip(*x), [[-2.2, -1.8, -2, -2.6, -1.6]], rtol=1e-6)
  # Anchor / rollout = 3, truncated at 2, and 1/2: each times the clipped drift.
  logp, anchor, a, valid = one_row([1.3, 0.5], 2.0)
  rollout = -jnp.log(jnp.array([[3.0, 0.5]]))
  got = surrogates.decoupled(logp, anchor, rollout, a, valid)
  np.testing.assert_allclose(got, [[2 * 2.4, 0.5 * 1.0]], rtol=1e-6)
  got = surrogates.decoupled(logp, anchor, rollout, a, valid, max_ratio=5.0, clip_high=0.28)
  np.testing.assert_allclose(got, [[3 * 2.56, 0.5 * 1.0]], rtol=1e-6)


@pytest.mark.parametrize(
  'ratio, advantage, slope',
  [
    (1.5, 1.0, 0.0),  # outside above, pushed further out: clipped
    (1.5, -1.0, -1.5),  # outside above, pulled back in: not clipped
    (0.5, 1.0, 0.5),  # outside below, pulled back in
    (0.5, -1.0, 0.0),  # outside below, pushed further out: clipped
    (1.1, 1.0, 1.1),
    (0.9, -1.0, -0.9),
    (1.0, 2.0, 2.0),
    (1.5, 0.0, 0.0),
  ],
)
def test_clip_gradient_is_one_sided_and_exactly_zero(ratio, advantage, slope):
  logp, anchor, a, valid = one_row([ratio], advantage)
  gradient = jax.grad(lambda x: surrogates.ppo_clip(x, anchor, a, valid).sum())(logp)
  np.testing.assert_allclose(gradient[0, 0], slope, rtol=1e-6, atol=0)
  gradient = jax.grad(lambda x: surrogates.ratio_pg(x, anchor, a, valid).sum())(logp)
  np.testing.assert_allclose(gradient[0, 0], ratio * advantage, rtol=1e-6)


def test_asymmetric_clip():
  x = one_row([1.25, 0.75], 1.0)
  np.testing.assert_allclose(surrogates.ppo_clip(*x, clip_high=0.28), [[1.25, 0.75]], rtol=1e-6)
  x = one_row([1.25, 0.75], -1.0)
  got = surrogates.ppo_clip(*x, clip_low=0.1, clip_high=0.28)
  np.testing.assert_allclose(got, [[-1.25, -0.9]], rtol=1e-6)


@BATTERY
def test_gradients(fn):
  logp, anchor, a, valid = case(1, 0.05)  # inside the clip range: differentiable
  f = lambda x: fn(jnp.asarray(x), anchor, a, valid)
  jax.test_util.check_grads(f, (logp,), order=1, modes=('rev',), rtol=2e-2, atol=2e-2, eps=1e-2)
  # At the anchor the gradient is A on valid tokens (times the detached weight), 0 in padding.
  gradient = jax.grad(lambda x: fn(x, anchor, a, valid).sum())(anchor)
  weight = fn(anchor, anchor, jnp.ones(B), valid)
  np.testing.assert_allclose(gradient, jnp.where(valid, weight * a[:, None], 0), rtol=1e-6)


def test_decoupled_is_ppo_clip_where_engine_and_trainer_agree():
  logp, anchor, a, valid = case()
  got = jax.value_and_grad(lambda x: surrogates.decoupled(x, anchor, anchor, a, valid).sum())(logp)
  want = jax.value_and_grad(lambda x: surrogates.ppo_clip(x, anchor, a, valid).sum())(logp)
  for g, w in zip(got, want, strict=True):
    np.testing.assert_array_equal(g, w)


def test_decoupled_is_truncated_importance_sampling_on_the_first_step():
  logp, rollout, a, valid = case(2, 1.0)
  weight = weights.truncated(logp - rollout, valid)
  assert (weight == 2).any() and (weight < 1).any()
  tis = lambda x: (weight * surrogates.ratio_pg(x, logp, a, valid)).sum()
  both = lambda x: surrogates.decoupled(x, logp, rollout, a, valid).sum()
  for g, w in zip(jax.value_and_grad(both)(logp), jax.value_and_grad(tis)(logp), strict=True):
    np.testing.assert_array_equal(g, w)


def test_decoupled_has_no_gradient_through_the_engine_ratio():
  logp, anchor, a, valid = case()
  both = lambda rollout: surrogates.decoupled(logp, anchor, rollout, a, valid).sum()
  np.testing.assert_array_equal(jax.grad(both)(anchor - 0.1), 0)


@BATTERY
@hypothesis.given(seed=SEEDS)
def test_ratios_of_one_give_the_advantage_in_bits(fn, seed):
  _, anchor, a, valid = case(seed)
  weight = fn(anchor, anchor, jnp.ones(B), valid)
  np.testing.assert_array_equal(fn(anchor, anchor, a, valid), weight * a[:, None])


# Aggregation.


def test_switches_by_hand():
  # Rows (1, 2, 3), (10, 20, -), (5, -, -); the second is rejected.
  x = jnp.array([[1.0, 2, 3], [10, 20, 99], [5, 99, 99]])
  valid = x < 99
  keep = jnp.array([True, False, True])
  want = {
    ('sum', 'total'): (11, 3),
    ('sum', 'accepted'): (11, 2),
    ('mean', 'total'): (2 + 5, 3),
    ('mean', 'accepted'): (2 + 5, 2),
    ('constant', 'total'): (11 / 4, 3),
    ('constant', 'accepted'): (11 / 4, 2),
  }
  for (reduce_tokens, normalize_by), (total, count) in want.items():
    m = surrogates.aggregate(
      x, valid, keep, reduce_tokens=reduce_tokens, normalize_by=normalize_by, constant=4.0
    )
    np.testing.assert_allclose([m.total, m.count], [total, count], rtol=1e-6)
    np.testing.assert_allclose(m.value, total / count, rtol=1e-6)
  m = surrogates.aggregate(x, valid, keep)
  np.testing.assert_allclose([m.total, m.count], [11, 3])
  m = surrogates.aggregate(x, valid, keep, reduce_tokens='constant', constant=4)
  assert m.total == 11 / 4


def test_token_masks_by_hand():
  # Kept tokens: 1 of row 0; none of row 1, though its padding is "kept"; 5 of row 2.
  x = jnp.array([[1.0, 2, 3], [10, 20, 99], [5, 99, 99]])
  keep = jnp.array([[True, False, False], [False, False, True], [True, True, True]])
  m = surrogates.aggregate(x, x < 99, keep, normalize_by='accepted')
  np.testing.assert_array_equal([m.total, m.count], [6, 2])
  # The mean is over the valid tokens of the row, kept or not: 1/3 and 5.
  m = surrogates.aggregate(x, x < 99, keep, reduce_tokens='mean')
  np.testing.assert_allclose([m.total, m.count], [16 / 3, 3], rtol=1e-6)


@SWITCHES
@pytest.mark.parametrize('rank', [1, 2])
@hypothesis.given(seed=SEEDS)
def test_aggregate_matches_the_oracle(reduce_tokens, normalize_by, rank, seed):
  x, _, _, valid = case(seed)
  keep = jax.random.bernoulli(jax.random.key(seed), 0.5, (B, T)[:rank])
  m = surrogates.aggregate(
    x, valid, keep, reduce_tokens=reduce_tokens, normalize_by=normalize_by, constant=7.0
  )
  keep_BT = np.broadcast_to(np.asarray(keep).reshape(B, -1), (B, T))
  want = oracles.aggregate(x, valid, keep_BT, reduce_tokens, normalize_by, 7.0)
  np.testing.assert_allclose([m.total, m.count], want, rtol=1e-5, atol=1e-6)


@SWITCHES
def test_a_mask_is_the_subset(reduce_tokens, normalize_by):
  """Rejecting rows = leaving them out, but for the count of `total`."""
  x, _, _, valid = case()
  keep = jnp.arange(B) % 3 > 0
  run = functools.partial(
    surrogates.aggregate, reduce_tokens=reduce_tokens, normalize_by=normalize_by, constant=7.0
  )
  masked, subset = run(x, valid, keep), run(x[keep], valid[keep], keep[keep])
  np.testing.assert_allclose(masked.total, subset.total, rtol=1e-6)
  assert masked.count == (B if normalize_by == 'total' else subset.count)


@SWITCHES
@pytest.mark.parametrize('parts', [1, 2, 4])
def test_any_split_of_the_batch_gives_the_same_mean_and_gradient(
  reduce_tokens, normalize_by, parts
):
  x, _, _, valid = case()
  keep = jnp.arange(B) % 3 > 0
  run = functools.partial(
    surrogates.aggregate, reduce_tokens=reduce_tokens, normalize_by=normalize_by, constant=7.0
  )

  def split(x):
    pieces = [a.reshape(parts, -1, *a.shape[1:]) for a in (x, valid, keep)]
    means = [run(*piece) for piece in zip(*pieces, strict=True)]
    return functools.reduce(lambda a, b: a + b, means).value

  got, want = (
    jax.value_and_grad(split)(x),
    jax.value_and_grad(lambda x: run(x, valid, keep).value)(x),
  )
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-6)


@SWITCHES
@hypothesis.given(seed=SEEDS)
def test_order_of_rows_and_extra_padding(reduce_tokens, normalize_by, seed):
  x, _, _, valid = case(seed)
  keep = jax.random.bernoulli(jax.random.key(seed), 0.5, (B,))
  run = functools.partial(
    surrogates.aggregate, reduce_tokens=reduce_tokens, normalize_by=normalize_by, constant=7.0
  )
  want = run(x, valid, keep)
  order = np.random.default_rng(seed).permutation(B)
  wide = lambda a, fill: jnp.pad(a, ((0, 0), (0, 3)), constant_values=fill)
  for got in (
    run(x[order], valid[order], keep[order]),
    run(wide(x, jnp.nan), wide(valid, False), keep),
  ):
    np.testing.assert_allclose(got.total, want.total, rtol=1e-5, atol=1e-6)
    assert got.count == want.count


@SWITCHES
def test_nothing_accepted_and_all_padding(reduce_tokens, normalize_by):
  x, _, _, valid = case()
  run = functools.partial(
    surrogates.aggregate, reduce_tokens=reduce_tokens, normalize_by=normalize_by, constant=7.0
  )
  for v, keep in [(valid, jnp.zeros(B, bool)), (valid & False, jnp.ones(B, bool))]:
    value, gradient = jax.value_and_grad(lambda x, v=v, k=keep: run(x * jnp.nan, v, k).value)(x)
    assert value == 0
    m = run(x, v, keep)
    # A row without tokens is no row.
    assert m.total == 0
    assert m.count == (v.any(-1).sum() if normalize_by == 'total' else 0)
    del gradient
    np.testing.assert_array_equal(jax.grad(lambda x, v=v, k=keep: run(x, v, k).value)(x), 0)


def test_rows_without_tokens_are_not_counted():
  # Five rows, the last of padding alone, the first rejected: four rows exist.
  valid = jnp.ones((5, 3), bool).at[4].set(False)
  keep = jnp.ones(5, bool).at[0].set(False)
  every, accepted = (
    surrogates.aggregate(jnp.ones((5, 3)), valid, keep, normalize_by=by)
    for by in ('total', 'accepted')
  )
  assert (every.total, every.count) == (9, 4)
  assert (accepted.total, accepted.count) == (9, 3)


def test_low_precision_is_raised_at_the_border():
  # bfloat16 counts to 256 and no further.
  valid, keep = jnp.ones((301, 1), bool), jnp.ones(301, bool)
  mean = surrogates.aggregate(jnp.ones((301, 1), jnp.bfloat16), valid, keep)
  assert (mean.total, mean.count) == (301, 301) and mean.count.dtype == jnp.float32
  logp, anchor, a, valid = case()
  low = lambda x: x.astype(jnp.bfloat16)
  for fn in (surrogates.ratio_pg, surrogates.ppo_clip):
    stored = fn(low(logp).astype(jnp.float32), low(anchor).astype(jnp.float32), a, valid)
    np.testing.assert_array_equal(fn(low(logp), low(anchor), a, valid), stored)


def test_a_missing_log_prob_shows_and_a_mask_removes_it():
  logp, anchor, a, valid = case()
  anchor, keep = anchor.at[0, 0].set(jnp.nan), jnp.ones(B, bool)

  def loss(logp, keep, fn):
    return surrogates.aggregate(fn(logp, anchor, a, valid), valid, keep).total

  engine = lambda logp, anchor, a, valid: surrogates.decoupled(logp, logp, anchor, a, valid)
  for fn in (surrogates.ratio_pg, surrogates.ppo_clip, engine):
    assert jnp.isnan(loss(logp, keep, fn))
    value, gradient = jax.value_and_grad(loss)(logp, keep.at[0].set(False), fn)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all() and (gradient[0] == 0).all()


@pytest.mark.parametrize('constant', [None, 0, -3.0, math.nan])
def test_constant_must_be_positive(constant):
  x, _, _, valid = case()
  with pytest.raises(InputError, match=f'constant={constant} must be > 0'):
    surrogates.aggregate(x, valid, jnp.ones(B, bool), reduce_tokens='constant', constant=constant)


@pytest.mark.parametrize('fn', [surrogates.ratio_pg, surrogates.ppo_clip])
def test_other_shapes_are_refused(fn, monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  x, valid, row = jnp.zeros((B, T)), jnp.ones((B, T), bool), jnp.zeros(B)
  with pytest.raises(InputError, match='advantages has shape .* one for each row'):
    fn(x, x, row[:, None], valid)
  with pytest.raises(InputError, match='anchor_logp has shape'):
    fn(x, x[:1], row, valid)
  with pytest.raises(InputError, match='valid has shape'):
    fn(x, x, row, valid[:1])


def test_masks_in_another_order_are_refused(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  x, valid, keep = jnp.zeros((B, T)), jnp.ones((B, T), bool), jnp.ones(B, bool)
  for wrong in ((keep, valid), (valid, keep[:-1]), (valid, valid[:1])):
    with pytest.raises(InputError, match='per_token has shape .* valid .* keep'):
      surrogates.aggregate(x, *wrong)


# Masks and surrogates together.


def loss(fn, keep, logp, anchor, advantages, valid):
  return surrogates.aggregate(fn(logp, anchor, advantages, valid), valid, keep).value


@functools.cache
def slope_of(fn):
  """(loss, gradient to logp), compiled."""
  run = lambda logp, keep, *rest: loss(fn, keep, logp, *rest)
  return jax.jit(jax.value_and_grad(run))


@BATTERY
@pytest.mark.parametrize('criterion', CRITERIA)
def test_every_surrogate_goes_with_every_criterion(fn, criterion):
  logp, anchor, a, valid = case(4)
  keep = CRITERIA[criterion](divergences_of(logp, anchor), valid)
  if criterion != 'all':
    assert 0 < keep.sum() < B
  value, gradient = slope_of(fn)(logp, keep, anchor, a, valid)
  # Subset, then no mask at all; both are divided by the whole batch.
  rows = np.flatnonzero(keep)
  sub = [np.asarray(x)[rows] for x in (logp, anchor, a, valid)]
  want, slope = slope_of(fn)(sub[0], np.ones(len(rows), bool), *sub[1:])
  share = len(rows) / B
  np.testing.assert_allclose(value, want * share, rtol=1e-5)
  gradient, slope = np.asarray(gradient), np.asarray(slope)
  np.testing.assert_allclose(gradient[rows], slope * share, rtol=1e-5)
  np.testing.assert_array_equal(gradient[~np.asarray(keep)], 0)


@BATTERY
@pytest.mark.parametrize('criterion', CRITERIA)
@pytest.mark.parametrize('seed', [0, 1])
def test_identical_policies_are_all_accepted_and_change_no_bit(fn, criterion, seed):
  _, anchor, a, valid = case(seed)
  keep = CRITERIA[criterion](divergences_of(anchor, anchor), valid)
  assert keep.all()
  got = jax.value_and_grad(functools.partial(loss, fn, keep))(anchor, anchor, a, valid)
  plain = lambda logp: jnp.where(valid, fn(logp, anchor, a, valid), 0).sum(-1).sum() / B
  for g, w in zip(got, jax.value_and_grad(plain)(anchor), strict=True):
    np.testing.assert_array_equal(g, w)


@BATTERY
@pytest.mark.parametrize('bad', BAD)
@pytest.mark.parametrize('where', ['logp', 'anchor', 'advantages'])
@pytest.mark.parametrize('rank', [1, 2])
def test_rejected_entries_add_exactly_nothing(fn, bad, where, rank):
  x = dict(zip(('logp', 'anchor', 'advantages', 'valid'), case(), strict=True))
  keep = jnp.arange(B) != 3
  keep = keep if rank == 1 else jnp.broadcast_to(keep[:, None], (B, T))
  # Not compiled: XLA may turn a product with a mask into a selection, which hides the mistake.
  run = jax.value_and_grad(lambda logp, x: loss(fn, keep, **{**x, 'logp': logp}))
  want = run(x['logp'], x)
  x[where] = x[where].at[3].set(bad)
  value, gradient = run(x['logp'], x)
  np.testing.assert_array_equal(value, want[0])
  np.testing.assert_array_equal(gradient, want[1])
  np.testing.assert_array_equal(gradient[3], 0)


@BATTERY
@pytest.mark.parametrize('bad', BAD)
def test_accepted_extremes_have_a_finite_gradient(fn, bad):
  # Whatever a mask let through: the ratio is capped, so no gradient is NaN or inf.
  logp, anchor, a, valid = case()
  keep = jnp.ones(B, bool)
  gradient = jax.grad(functools.partial(loss, fn, keep))(logp.at[3, 0].set(bad), anchor, a, valid)
  assert jnp.isfinite(gradient).all() and gradient[3, 0] == 0


@BATTERY
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf, -jnp.inf])
def test_an_accepted_advantage_that_is_not_finite_is_not_hidden(fn, bad):
  logp, anchor, a, valid = case()
  value = loss(fn, jnp.ones(B, bool), logp, anchor, a.at[3].set(bad), valid)
  assert not jnp.isfinite(value)


@pytest.mark.parametrize('switch', [dict(reduce_tokens='avg'), dict(normalize_by='kept')])
def test_unknown_switch_is_an_error(switch):
  # The type hook of the tests would object first; users do not have it.
  unchecked = inspect.unwrap(surrogates.aggregate)
  with pytest.raises(InputError, match=next(iter(switch))):
    unchecked(jnp.zeros((2, 2)), jnp.ones((2, 2), bool), jnp.ones(2, bool), **switch)
