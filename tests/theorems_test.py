"""The paper's theorems and ours against the exact truth, and what is wrong in print."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import bounds, masks
from trm_jax.bounds import sharp
from trm_jax.divergences import ratios
from trm_jax.exact import enumeration, oracle
from trm_jax.objectives import surrogates


@pytest.fixture(autouse=True)
def exact():
  with enumeration.float64():
    yield


def batch(seed, shape, count, spread=(1e-3, 0.03, 0.3, 1.5)):
  """Random worlds of one shape, stacked: prompts, EOS, rollouts from flat to nearly certain."""
  prompts, vocab, horizon, eos = shape
  rng = np.random.default_rng(seed)
  size = (count, prompts, enumeration.size(vocab=vocab, horizon=horizon), vocab)
  p = rng.normal(size=size) * rng.choice([0.3, 1, 3], (count, 1, 1, 1))
  q = p + rng.normal(size=size) * rng.choice(spread, (count, 1, 1, 1))
  reward = rng.random((count, prompts, vocab**horizon))
  reward = np.where(rng.random((count, 1, 1)) < 0.5, reward, reward < 0.4).astype(float)
  return enumeration.world(
    q, p, horizon=horizon, reward=reward, prompts=rng.dirichlet(np.ones(prompts), count), eos=eos
  )


def worst_reward(world, sign):
  """The world with the rewards in {0, 1} that make Delta largest (sign 1) or smallest (-1)."""
  ones = dataclasses.replace(world, reward=jnp.ones_like(world.reward))
  share = sign * oracle.delta_harm(ones).sequences
  return dataclasses.replace(world, reward=jnp.where(share > 0, 1.0, 0.0))


def known(d, T):
  return dict(
    T=T,
    epsilon=d.max_tv,
    delta=d.max_kl,
    d_bar=d.mean_tv,
    seq_kl=d.sequence_kl,
    seq_tv=d.sequence_tv,
  )


def by_position(world, values, reachable):
  spans = enumeration.lengths(world.policy)
  return jnp.stack([jnp.where(reachable, values, 0)[:, s].max() for s in spans])


def all_bounds(world):
  """Name -> bound of |Error| for R in [0, 1], each with the smallest constant claimed for it."""
  d, c = oracle.divergences(world), enumeration.contexts(world)
  T = len(enumeration.lengths(world.policy))
  args = known(d, T)
  found = {f'half {k}': v / 2 for k, v in bounds.printed(**args).items()}
  found |= sharp._sharp(*args.values(), d.chi2_budget)
  epsilon_t = by_position(world, c.tv, c.reachable)
  delta_t = by_position(world, c.kl, c.reachable)
  found['half position_wise'] = sharp.position_wise(d_bar=d.mean_tv, epsilon_t=epsilon_t) / 2
  found['half product'] = sharp.product(d_bar=d.mean_tv, epsilon_t=epsilon_t, delta_t=delta_t) / 2
  limit = (jnp.cumsum(d.mean_tv) / (1 + jnp.arange(T))).max()
  found['half prefix_budget'] = sharp.prefix_budget(epsilon_t=epsilon_t, d_limit=limit) / 2
  found['half linear'] = bounds.linear(d_bar=d.mean_tv) / 2
  ones = dataclasses.replace(world, reward=jnp.ones_like(world.reward))
  second = oracle.delta_harm(ones).sequences  # -P (W - 1 - S)
  mass = oracle._mass(world, enumeration.tree(world).rollout)
  moment = jnp.where(mass > 0, second**2 / jnp.where(mass > 0, mass, 1), 0).sum()
  found['l2'] = sharp.l2(moment)
  found['b_star_tight'] = sharp.b_star_tight(**args, budget=d.chi2_budget)
  return found


def check(world, key):
  """(slack of every inequality, facts that need a look); an inequality holds where slack >= 0."""
  found = all_bounds(world)
  rise = oracle.policy_objective(world) - oracle.rollout_objective(world)
  d, c = oracle.divergences(world), enumeration.contexts(world)
  T = len(enumeration.lengths(world.policy))
  errors = [jnp.abs(oracle.error(world))]
  errors += [jnp.abs(oracle.error(worst_reward(world, sign))) for sign in (1, -1)]
  # Any mask: Delta_M is Delta for the reward M R.
  shape = world.reward.shape
  mask = jax.random.uniform(key, shape) < 0.6
  errors.append(jnp.abs(oracle.delta(world, mask)))
  slack = {name: value - jnp.stack(errors).max() for name, value in found.items()}
  # Theorem 2 with the deviation of M R within a prompt in place of its largest, 1/2.
  within = oracle._mass(world, enumeration.tree(world).rollout) / world.prompts[:, None]
  mean_of = lambda x: (within * x).sum(-1)
  kept = mask * world.reward
  sd = jnp.sqrt((world.prompts * jnp.maximum(mean_of(kept**2) - mean_of(kept) ** 2, 0)).sum())
  slack['l2, own deviation'] = 2 * sd * found['l2'] - errors[-1]

  # The masked guarantee with the global precondition.
  lost = oracle.rejected(world, mask)
  b = bounds.b_star(**known(d, T)) / 2
  wide = dataclasses.replace(world, reward=2 * world.reward - 1)
  printed = bounds.to_range(2 * b, low=-1.0, high=1.0)
  slack['printed, R in [-1, 1]'] = printed - jnp.abs(oracle.error(wide))
  lower = oracle.surrogate(world, mask) - b
  slack['masked, -r'] = rise - (lower - lost.rollout)
  slack['masked, -E(1-M)R'] = rise - (lower - lost.reward)
  slack['rejected, two-sided'] = jnp.maximum(lost.rollout, lost.policy) - jnp.abs(lost.gain)
  slack['rejected, r + TV'] = lost.rollout + d.sequence_tv - jnp.abs(lost.gain)
  for baseline in (0.3, 1.0):
    centred = oracle.surrogate(world, mask, baseline=baseline) - b
    name = f'A-form, b = {baseline}'
    slack[name] = rise - (centred - lost.rollout - baseline * d.sequence_tv)

  # Pointwise mask max |log ratio| <= tau, no precondition.
  tree = enumeration.tree(world)
  for tau in (0.02, 0.2, 1.0):
    largest = enumeration.descend(
      jnp.zeros_like(world.prompts), jnp.abs(tree.log_ratio), jnp.maximum
    )[1]
    kept = oracle.delta(world, largest <= tau)
    slack[f'pointwise ratio {tau}'] = sharp.pointwise_ratio(T=T, tau=tau) - jnp.abs(kept)

  # The exact mask without any precondition: bounds of the patched policy, from thresholds.
  for share in (0.3, 0.9):
    limit = share * d.max_kl
    good = oracle.prefix_mask(world, c.kl <= limit)
    patched = oracle.patched(world, good)
    p = oracle.divergences(patched)
    accepted = jnp.repeat(
      good[:, -(world.policy.shape[2] ** (T - 1)) :, 0], world.policy.shape[2], 1
    )
    args = known(p, T) | dict(epsilon=bounds.pinsker(limit), delta=limit)
    args['seq_tv'] = bounds.sequence_tv(d_bar=p.mean_tv, seq_kl=p.sequence_kl)
    b = bounds.b_star(**args) / 2
    lost = oracle.rejected(world, accepted)
    masked = oracle.surrogate(world, accepted)
    slack[f'patched, max mask, {share}'] = b - jnp.abs(oracle.delta(world, accepted))
    slack[f'patched, sub-mask, {share}'] = b - jnp.abs(oracle.delta(world, accepted & mask))
    slack[f'certificate, {share}'] = rise - (masked - b - lost.reward)
    left = lost.policy
    prefix = oracle.surrogate(world, good)
    slack[f'prefix form, {share}'] = rise - (prefix - b - left)
    slack[f'leaving, {share}'] = 1e-12 - jnp.abs(
      left - (1 - (oracle._mass(world, enumeration.tree(patched).policy) * accepted).sum())
    )
    # Remark 4.3: B* at the threshold says nothing of the whole, precondition failing.
    whole = 2 * b - jnp.abs(rise - masked)
    slack[f'remark 4.3, {share}'] = jnp.where(whole < 0, jnp.nan, 0.0)

  # Lemmas 3.1 and 3.2.
  after = enumeration.ascend(world.reward, tree.rollout)
  advantage = after - (tree.rollout * after).sum(-1, keepdims=True)
  g = jnp.where(c.reachable, jnp.abs((tree.policy * advantage).sum(-1)), 0).max()
  slack['Lemma 3.1'] = bounds.advantage_limit(epsilon=d.max_tv, delta=d.max_kl) / 2 - g
  visits = bounds.visitation_tv(
    T=T, epsilon=d.max_tv, delta=d.max_kl, seq_tv=d.sequence_tv, seq_kl=d.sequence_kl
  )
  slack['Lemma 3.2'] = (visits - d.visit_tv).min()

  # Futures after every prefix of s tokens, of which T - s are to come.
  w = bounds.future_weights(T=T, epsilon=d.max_tv, delta=d.max_kl)
  for s, span in list(enumerate(enumeration.lengths(world.policy)))[1:]:
    ends = []
    for side, visits in ((tree.policy, c.policy_visits), (tree.rollout, c.rollout_visits)):
      whole = oracle._mass(world, side).reshape(*visits[:, span].shape, -1)
      start = visits[:, span][..., None]
      ends.append(jnp.where(start > 0, whole / jnp.where(start > 0, start, 1), 0))
    slack[f'future TV, {s}'] = w[s - 1] - 0.5 * jnp.abs(ends[0] - ends[1]).sum(-1).max()

  # LN-TRM and SER as expectations.
  rows = enumeration.rows(world)
  lengths = rows.valid.sum(-1)
  step = jnp.where(rows.valid, jnp.abs(jnp.expm1(rows.divergences.log_ratio)), 0)
  mean = lambda x: (rows.rollout_mass * x).sum()
  slack['LN-TRM, T_max'] = 2 * mean((step * w[None]).sum(-1)) - jnp.abs(oracle.error(world))
  slack['LN-TRM is Adaptive'] = 1e-12 - jnp.abs(
    2 * mean((step * w[None]).sum(-1))
    - bounds.adaptive(d_bar=d.mean_tv, epsilon=d.max_tv, delta=d.max_kl)
  )
  remaining = jnp.maximum(lengths[:, None] - 1 - jnp.arange(T)[None], 0)
  realised = jnp.minimum(remaining * d.max_tv, jnp.minimum(1, jnp.sqrt(remaining * d.max_kl / 2)))
  # Erratum 7: a weight of the realised length is not known at the token, and the printed constant
  # fails for R in [-1, 1]; it is twice what R in [0, 1] needs elsewhere, and has held there.
  slack['LN-TRM, realised length'] = 2 * mean((step * realised).sum(-1)) - jnp.abs(
    oracle.error(world)
  )
  linear = bounds.linear(d_bar=d.mean_tv)
  slack['linear, SER'] = 1e-12 - jnp.abs(2 * mean(step.sum(-1)) - linear)
  slack['linear, SER of the true length'] = (
    2 * T * mean(step.sum(-1) / lengths.astype(step.dtype)) - linear + 1e-12
  )
  tightest = jnp.abs(jnp.stack(errors[:3])).max() / jnp.maximum(found['b_star_tight'], 1e-300)
  return slack, tightest


def battery(seed, shape, count):
  worlds = batch(seed, shape, count)
  keys = jax.random.split(jax.random.key(seed), count)
  slack, tightest = jax.device_get(jax.jit(jax.vmap(check))(worlds, keys))
  remark = [slack.pop(name) for name in list(slack) if name.startswith('remark')]
  for name, values in slack.items():
    assert values.shape == (count,)
    assert values.min() >= -1e-11, (name, float(values.min()), int(values.argmin()))
  assert tightest.max() <= 1 + 1e-9
  return np.isnan(remark).any(0).sum(), tightest


def test_no_bound_is_violated():
  failing, tightest = battery(1, (2, 3, 3, 0), 100)
  assert failing > 5  # Remark 4.3 has teeth: the precondition cannot be dropped
  assert np.quantile(tightest, 0.9) > 0.2  # and bounds that are merely huge would not pass


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape',
  [
    (2, 3, 3, 0),
    (1, 3, 5, 2),
    (3, 2, 6, None),
    (2, 5, 3, 4),
    (1, 4, 4, 0),
    (4, 2, 4, 1),
    (1, 2, 8, 0),
  ],
)
def test_no_bound_is_violated_on_thousands(shape):
  """2800 instances: with and without EOS, several prompts, masks, the worst rewards."""
  for seed in range(4):
    battery(100 + seed, shape, 100)


def test_half_of_the_constants_is_sharp_at_two_tokens():
  """Fair coins against .51, and the worst rewards: no smaller constant would do."""
  table = lambda *row: np.log(np.tile(row, (1, 3, 1)))
  world = enumeration.world(table(0.51, 0.49), table(0.5, 0.5), horizon=2, reward=np.zeros((1, 4)))
  error = float(jnp.abs(oracle.error(worst_reward(world, 1))))
  assert error == pytest.approx(2 * 0.01**2)
  found = {name: float(value) for name, value in all_bounds(world).items()}
  for name in (
    'classical_tv', 'coupling', 'adaptive_tv', 'adaptive', 'position_wise', 'product',
    'prefix_budget',
  ):  # fmt: skip
    assert found[f'half {name}'] == pytest.approx(error, rel=1e-9), name
  for name in ('marginal', 'product', 'b_star_tight', 'l2'):
    assert found[name] == pytest.approx(error, rel=1e-9), name
  # Pinsker's inequality is an equality to first order.
  for name in ('classical_kl', 'pinsker_marginal_kl', 'pinsker_marginal_tv', 'adaptive_kl'):
    assert error < found[f'half {name}'] < error * 1.001, name
  tau = -math.log(0.98)
  assert error < float(sharp.pointwise_ratio(T=2, tau=tau)) < 2.1 * error


# What is wrong, or loose, in print.


def test_erratum_1_the_ratio_of_900_is_upside_down():
  policy, rollout = jnp.log(jnp.array([[0.001, 0.9]])), jnp.log(jnp.array([[0.9, 0.001]]))
  valid = jnp.ones((1, 2), bool)
  found = ratios.ratio(policy - rollout, valid)
  np.testing.assert_allclose(found, [[0.001 / 0.9, 900]], rtol=1e-6)
  # Nor is the clipped objective unbounded below ratio 1 - eps for a positive advantage.
  clipped = surrogates.ppo_clip(policy, rollout, jnp.ones(1), valid)
  np.testing.assert_allclose(clipped, [[0.001 / 0.9, 1.2]], rtol=1e-6)
  # It is above 1 + eps for a negative one.
  clipped = surrogates.ppo_clip(policy, rollout, -jnp.ones(1), valid)
  np.testing.assert_allclose(clipped, [[-0.8, -900]], rtol=1e-6)


def lopsided(p=0.01):
  """Two steps; after the rare first token 1 the policies part, elsewhere they agree."""
  rollout = jnp.log(jnp.array([[[1 - p, p], [0.5, 0.5], [0.5, 0.5]]]))
  policy = rollout.at[0, 2].set(jnp.log(jnp.array([0.999, 0.001])))
  reward = jnp.array([[0.5, 0.5, 0.0, 1.0]])
  return enumeration.world(policy, rollout, horizon=2, reward=reward)


def test_proposition_3_10_no_bound_from_the_sequence_kl():
  found = [oracle.divergences(lopsided(p)) for p in (1e-2, 1e-4, 1e-6)]
  largest = [float(d.max_kl) for d in found]
  assert max(largest) == pytest.approx(min(largest)) and min(largest) > 1
  assert [float(d.sequence_kl) / p for d, p in zip(found, (1e-2, 1e-4, 1e-6), strict=True)] == (
    pytest.approx(largest)
  )


def test_erratum_2_sequence_masking_leaves_the_largest_divergence_as_it_is():
  """Proposition 4.1 is true of every mask: only visited contexts are ever judged."""
  world = lopsided()
  criterion = masks.max_kl(limit=0.1)
  keep = oracle.sequence_mask(world, criterion)
  np.testing.assert_array_equal(keep, [[True, True, False, False]])
  # Accepted rows obey the limit; the policy that the masked surrogate speaks of does not.
  d = oracle.divergences(world)
  assert float(d.max_kl) > 10 * 0.1
  assert float(oracle.rejected(world, keep).rollout) == pytest.approx(0.01)
  # Patching does what masking is said to do.
  good = oracle.prefix_mask(world, enumeration.contexts(world).kl <= 0.1)
  assert float(oracle.divergences(oracle.patched(world, good)).max_kl) == 0


def test_remark_4_3_the_threshold_does_not_bound_the_whole_error():
  world = lopsided()
  keep = oracle.sequence_mask(world, masks.max_kl(limit=1e-4))
  rise = oracle.policy_objective(world) - oracle.rollout_objective(world)
  left = jnp.abs(rise - oracle.surrogate(world, keep))
  b = bounds.b_star(
    T=2, epsilon=bounds.pinsker(1e-4), delta=1e-4, d_bar=bounds.worst_d_bar(
      T=2, epsilon=bounds.pinsker(1e-4), delta=1e-4), seq_kl=2e-4, seq_tv=0.01
  )  # fmt: skip
  assert float(left) > 10 * float(b)
  # What rejection leaves out is what is missing.
  lost = oracle.rejected(world, keep)
  assert float(left) == pytest.approx(abs(float(lost.gain)), rel=1e-9)


def test_erratum_3_every_lambda_is_unbiased():
  world = jax.tree.map(lambda x: x[0], batch(3, (2, 3, 3, 0), 1))
  rows, d = jax.jit(enumeration.rows)(world), jax.jit(oracle.divergences)(world)
  log_ratio = jnp.where(rows.valid, rows.divergences.log_ratio, 0)
  spread = []
  for weight in (-1.0, 0.0, 0.5, 1.0, 3.0):
    estimate = -log_ratio + weight * jnp.expm1(log_ratio)
    mean = (rows.rollout_mass[:, None] * estimate).sum(0)
    np.testing.assert_allclose(mean, d.mean_kl, atol=1e-12)
    spread.append((rows.rollout_mass * (estimate.sum(-1) - d.sequence_kl) ** 2).sum())
  np.testing.assert_allclose(ratios.k1(log_ratio), -log_ratio)
  np.testing.assert_allclose(ratios.k3(log_ratio), -log_ratio + jnp.expm1(log_ratio), atol=1e-12)
  assert max(spread) > 2 * min(spread)  # unbiased alike, not alike


def test_k3_misses_the_mass_that_the_rollout_never_samples():
  rollout, policy = np.array([0.5, 0.5]), np.array([0.4, 0.4])  # .2 on a third token
  log_ratio = jnp.log(policy / rollout)
  kl = math.log(1.25)
  assert float((rollout * ratios.k1(log_ratio)).sum()) == pytest.approx(kl)
  assert float((rollout * ratios.k3(log_ratio)).sum()) == pytest.approx(kl - 0.2)


def test_truncated_rollouts_break_the_bounds():
  """The policy keeps 1 % of tail that the rollout never samples; R = 1."""
  table = lambda *row: np.tile(np.array(row), (1, 15, 1))
  world = enumeration.world(
    table(math.log(0.99), math.log(0.01)), table(0.0, -math.inf), horizon=4, reward=np.ones((1, 16))
  )
  error = float(oracle.error(world))
  assert error == pytest.approx(0.04)
  d = oracle.divergences(world)
  found = bounds.printed(**known(d, 4))
  broken = {name for name, value in found.items() if value < error}
  assert broken == {
    'classical_tv',
    'coupling',
    'pinsker_marginal_tv',
    'mixed_tv',
    'adaptive_kl',
    'adaptive_tv',
    'adaptive',
  }
  assert 10 * float(bounds.b_star(**known(d, 4))) < error


def test_erratum_4_the_variance_of_the_mean_falls_as_one_over_t():
  """Of i.i.d. tokens; the paper prints the rate of the standard deviation for the variance."""
  variances = []
  for horizon in (1, 2, 4):
    count = enumeration.size(vocab=2, horizon=horizon)
    tile = lambda row, n=count: jnp.tile(jnp.log(jnp.array(row)), (1, n, 1))
    world = enumeration.world(
      tile([0.7, 0.3]), tile([0.5, 0.5]), horizon=horizon, reward=jnp.zeros((1, 2**horizon))
    )
    rows = jax.jit(enumeration.rows)(world)
    mean = jnp.abs(jnp.expm1(rows.divergences.log_ratio) + 0.1).mean(-1)  # .5 or .3: it varies
    centre = (rows.rollout_mass * mean).sum()
    variances.append(float((rows.rollout_mass * (mean - centre) ** 2).sum()))
  assert variances[0] == pytest.approx(0.01)
  np.testing.assert_allclose([v / variances[0] for v in variances], [1, 1 / 2, 1 / 4])


def test_erratum_7_weights_of_the_realised_length_know_the_future():
  """One context, two values of the weight: not a function of the context, as the proof has it."""
  early = bounds.future_weights(T=2, epsilon=0.1, delta=math.inf)[0]
  late = bounds.future_weights(T=5, epsilon=0.1, delta=math.inf)[0]
  assert float(early) == pytest.approx(0.1) and float(late) == pytest.approx(0.4)
  # And 2 E[W] is no bound. Token 0 ends; the chances to go on after 0, 1 and 2 tokens differ.
  epsilon = math.sqrt(3) - 1

  def table(*go):
    rows = [[1 - g, g] for t, g in enumerate(go) for _ in range(2**t)]
    with np.errstate(divide='ignore'):
      return np.log(np.array([rows]))

  world = enumeration.world(
    table(epsilon, 1.0, 0.0), table(1e-6, 1 - epsilon, epsilon), horizon=3,
    reward=np.zeros((1, 8)), eos=0,
  )  # fmt: skip
  assert float(oracle.divergences(world).max_tv) == pytest.approx(epsilon)
  unit = abs(float(oracle.error(worst_reward(world, 1))))
  wide = dataclasses.replace(worst_reward(world, 1), reward=2 * worst_reward(world, 1).reward - 1)
  rows = enumeration.rows(world)
  step = jnp.where(rows.valid, jnp.abs(jnp.expm1(rows.divergences.log_ratio)), 0)
  by_length = [
    jnp.pad(bounds.future_weights(T=n, epsilon=epsilon, delta=math.inf), (0, 3 - n))
    for n in (1, 2, 3)
  ]
  realised = jnp.stack(by_length)[rows.valid.sum(-1) - 1]
  mean = lambda weights: float((rows.rollout_mass * (step * weights).sum(-1)).sum())
  assert abs(float(oracle.error(wide))) == pytest.approx(2 * unit)
  assert 2 * unit == pytest.approx(1.359, abs=5e-4)
  assert 2 * mean(realised) == pytest.approx(1.177, abs=5e-4)
  # With the weights of the longest response it holds.
  assert 2 * mean(by_length[2][None]) > 2 * unit


def test_erratum_9_a_constant_baseline_shifts_the_printed_error():
  world = jax.tree.map(lambda x: x[0], batch(5, (2, 2, 3, None), 1))
  start = oracle.rollout_objective(world)
  for b in (0.0, 0.4, 1.0):
    shift = oracle.error_a(world, baseline=b) - oracle.error(world)
    assert float(shift) == pytest.approx(float(-3 * (start - b)), abs=1e-12)
  identical = dataclasses.replace(world, policy=world.rollout)
  assert float(oracle.error_a(identical)) == pytest.approx(float(-3 * start)) != 0
  # Their L is T J, above B* = 0, and nothing has improved; L' is 0.
  assert float(oracle.surrogate_a(identical)) == pytest.approx(float(3 * start)) != 0
  assert float(bounds.b_star(**known(oracle.divergences(identical), 3))) == 0
  assert float(oracle.surrogate(identical)) == 0
  # With responses of different lengths even b = J_roll leaves Cov(R, length).
  world = jax.tree.map(lambda x: x[0], batch(6, (1, 3, 3, 0), 1))
  rows, start = jax.jit(enumeration.rows)(world), oracle.rollout_objective(world)
  covariance = (rows.rollout_mass * (rows.reward - start) * rows.valid.sum(-1)).sum()
  shift = oracle.error_a(world, baseline=float(start)) - oracle.error(world)
  assert float(shift) == pytest.approx(float(-covariance), abs=1e-12) and abs(covariance) > 1e-3


def test_erratum_10_under_its_precondition_the_mask_does_nothing():
  worlds = batch(7, (1, 3, 3, 0), 5)
  for i in range(5):
    world = jax.tree.map(lambda x, i=i: x[i], worlds)
    limit = float(oracle.divergences(world).max_kl)
    keep = oracle.sequence_mask(world, masks.max_kl(limit=limit))
    mass = enumeration.rows(world).rollout_mass
    assert bool((keep.reshape(-1) | (mass == 0)).all())


def test_baselines_do_not_cancel_under_a_mask():
  world = jax.tree.map(lambda x: x[0], batch(8, (1, 3, 3, 0), 1, spread=(0.5,)))
  log_ratio = jnp.where(
    enumeration.rows(world).valid, enumeration.rows(world).divergences.log_ratio, 0
  )
  middle = float(jnp.median(ratios.k2(log_ratio).max(-1)))
  keep = oracle.sequence_mask(world, masks.max_k2(limit=middle))
  assert 0 < float(oracle.rejected(world, keep).rollout) < 1
  plain, shifted = (oracle.surrogate(world, keep, baseline=b) for b in (0.0, 1.0))
  assert abs(float(plain - shifted)) > 1e-4
  np.testing.assert_allclose(
    oracle.surrogate(world), oracle.surrogate(world, baseline=1.0), atol=1e-12
  )
