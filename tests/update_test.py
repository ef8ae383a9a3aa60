"""The update: same loss and gradient however it is split, and nothing leaks out of a mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.mismatch import fleet, routing, staleness
from trm_jax.policy import attention
from trm_jax.rollouts import scoring
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record
from trm_jax.training import judgement, update
from trm_jax.training.words import MethodWords

CONFIG = policy.PolicyConfig(
  width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=16, experts=2
)
V, G, PROMPTS, P, T = 16, 4, 8, 4, 6
ROWS = PROMPTS * G
FLEET = fleet.Fleet(
  engine=fleet.Engine(routing=routing.Routing(jitter=0.3)),
  broken=fleet.Engine(staleness=staleness.Staleness(stuck=True)),
  broken_samples=2,
)
TRM = MethodWords(max_kl=0.15).make()


def settings(*methods, config=CONFIG, **sizes):
  return update.Settings(
    methods=methods or (TRM,),
    policy=config,
    samples=G,
    temperature=0.9,
    attention=attention.plain,
    **sizes,
  )


@functools.cache
def params(seed=0, config=CONFIG):
  return jax.jit(lambda k: policy.init(k, config, V))(jax.random.key(seed))


def roller(which, config=CONFIG, score='decode', options=None):
  keys = jax.random.split(jax.random.key(7), 3)
  prompts = jax.random.randint(keys[0], (PROMPTS, P), 0, V)
  start = jax.random.randint(keys[1], (PROMPTS,), 0, P)
  reward = (jnp.arange(ROWS) * 7 % 5 < 2).astype(jnp.float32)

  def roll(p, first, strength):
    made = fleet.generate(
      which,
      p,
      config,
      prompts,
      start,
      keys[2],
      Request(samples=G, length=T, eos=3, pad=2, temperature=0.9),
      Record(score=score),
      version=jnp.int32(0),
      first=first,
      strength=strength,
    )
    return dataclasses.replace(made, reward=reward)

  return jax.jit(roll, compiler_options=options)


decoded = functools.cache(roller)


@functools.cache
def rollout(strength=1.0):
  """A rollout with mismatch (strength 0: none), lengths 1..T and rewards of both kinds."""
  return decoded(FLEET)(params(), params(1), jnp.float32(strength))


def batch(r=None, **fields):
  return update.Batch(**(dict(rollout=r or rollout()) | fields))


def program(s, options=None):
  def go(p, b, chosen):
    limit, key = jnp.float32(0.15), jax.random.key(1)
    return update.gradients(p, b, limit=limit, key=key, chosen=chosen, settings=s)

  return jax.jit(go, compiler_options=options)


# One program per setting; jax keeps one executable of it per layout.
compiled = functools.cache(program)


def gradients(b, s, p=None, mesh=None, chosen=0):
  """(loss, gradient as float64 NumPy leaves, report), optionally on a mesh."""
  p, chosen = params() if p is None else p, jnp.int32(chosen)
  if mesh is None:
    loss, grads, report = compiled(s)(p, b, chosen)
  else:
    with jax.set_mesh(sharding.make_mesh(*mesh)):
      shapes = jax.eval_shape(lambda k: policy.init(k, CONFIG, V), jax.random.key(0))
      p = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding.spec), p, shapes)
      rows = jax.tree.map(lambda x: jax.device_put(x, jax.P('data')), b.rows)
      heads = jax.tree.map(lambda x: jax.device_put(x, jax.P('model', 'data')), b.heads)
      b = dataclasses.replace(rows, heads=heads)
      loss, grads, report = compiled(s)(p, b, chosen)
  return float(loss), [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)], report


def assert_close(got, want, relative=1e-5):
  scale = max(np.abs(g).max() for g in want[1])
  assert scale > 1e-3
  assert abs(got[0] - want[0]) <= relative * max(1, abs(want[0]))
  for a, b in zip(got[1], want[1], strict=True):
    assert np.abs(a - b).max() <= relative * scale


METHODS = {
  'trm': TRM,
  'accepted, mean, penalty': MethodWords(
    max_kl=0.15,
    reduce_tokens='mean',
    normalize_by='accepted',
    kl_coefficient=0.3,
    baseline_pool='loo_accepted',
    advantage='centred',
  ).make(),
  'penalty on kept rows': MethodWords(
    mean_kl=0.05, reduce_tokens='constant', kl_coefficient=0.3, kl_scope='kept'
  ).make(),
  'clip': MethodWords(surrogate='clip', max_tv=0.3).make(),
  'random mask': MethodWords(max_kl=0.15, random_mask=True).make(),
  'recomputed anchor': MethodWords(anchor='recomputed', weight='tis').make(),
  'no limit': MethodWords().make(),
  'neutral': MethodWords(missing='neutral').make(),
  'error': MethodWords(missing='error').make(),
  'nothing kept': MethodWords(max_kl=1e-30, kl_coefficient=0.3).make(),
  'nothing kept, kept rows': MethodWords(max_kl=1e-30, kl_coefficient=0.3, kl_scope='kept').make(),
}
# Programs of several arms: one compilation for many methods.
PLAIN = ('trm', 'random mask', 'recomputed anchor', 'no limit', 'neutral', 'error')
PENALTY = (
  'accepted, mean, penalty',
  'penalty on kept rows',
  'nothing kept',
  'nothing kept, kept rows',
)


@functools.cache
def reference():
  hidden = jax.jit(lambda p, r: scoring.score(p, CONFIG, r)[0])(params(2), rollout())
  heads = judgement.Heads(reference=policy.head(params(2)))
  return dict(reference_hidden=hidden, heads=heads)


def batch_for(name):
  return batch(**(reference() if METHODS[name].kl_coefficient else {}))


def arm(name, b=None, p=None, mesh=None, **sizes):
  """`gradients` of a method in the program that holds it among others."""
  names = PENALTY if name in PENALTY else PLAIN
  arms = settings(*(METHODS[n] for n in names), **sizes)
  return gradients(b or batch_for(name), arms, p, mesh, names.index(name))


@functools.cache
def whole(name):
  """In one piece; alone in its program or as an arm of one, which is the same (below)."""
  if name in PENALTY:
    return arm(name)
  return gradients(batch_for(name), settings(METHODS[name]))


@pytest.mark.slow
def test_the_reference_case_bites():
  report = whole('trm')[2]
  assert 0 < report.keep.sum() < ROWS
  assert report.finite and report.accepted
  assert report.route_flips > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, parts',
  [('trm', 4)]
  + [pytest.param(n, p, marks=pytest.mark.slow) for n, p in [('trm', 2), ('clip', 2), ('clip', 4)]],
)
def test_micro_batches_change_nothing(name, parts):
  got = gradients(batch_for(name), settings(METHODS[name], microbatches=parts))
  assert_close(got, whole(name))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['accepted, mean, penalty', 'penalty on kept rows'])
@pytest.mark.parametrize('parts', [4, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_change_no_penalty(name, parts):
  assert_close(arm(name, microbatches=parts), whole(name))


@pytest.mark.parametrize(
  'name, mesh',
  [
    ('trm', (1, 1)),
    pytest.param('trm', (8, 1), marks=pytest.mark.slow),
    pytest.param('trm', (4, 2), marks=pytest.mark.slow),
    pytest.param('accepted, mean, penalty', (4, 2), marks=pytest.mark.slow),
  ],
)
def test_meshes_change_nothing(name, mesh):
  got = gradients(batch_for(name), settings(METHODS[name]), mesh=mesh)
  assert_close(got, whole(name))


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('trm', marks=pytest.mark.slow),
    pytest.param('random mask', marks=pytest.mark.slow),
    pytest.param('recomputed anchor', marks=pytest.mark.slow),
  ],
)
def test_meshes_change_nothing_of_any_arm(name):
  """The random mask is one permutation on every mesh."""
  assert_close(arm(name, mesh=(4, 2)), arm(name))


@pytest.mark.slow
def test_micro_batches_on_a_mesh_change_nothing():
  got = gradients(batch(), settings(TRM, microbatches=2), mesh=(4, 2))
  assert_close(got, whole('trm'))


def test_gradient_is_that_of_the_loss():
  """Against finite differences of the loss along the gradient, mask held (it is detached)."""
  _, grads, _ = arm('no limit')
  tree = jax.tree.structure(params())
  norm = np.sqrt(sum((g**2).sum() for g in grads))
  at = lambda h: jax.tree.unflatten(
    tree,
    [
      x + jnp.float32(h / norm) * jnp.asarray(g, jnp.float32)
      for x, g in zip(jax.tree.leaves(params()), grads, strict=True)
    ],
  )
  slope = (arm('no limit', p=at(1e-2))[0] - arm('no limit', p=at(-1e-2))[0]) / 2e-2
  assert abs(slope - norm) <= 2e-2 * norm


def spoil(x, where, value):
  where = where.reshape(where.shape + (1,) * (x.ndim - where.ndim))
  return jnp.where(where, jnp.asarray(value, x.dtype), x)


def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
  'value', [np.nan, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.inf, -np.inf, 1e30))]
)
def test_padding_content_changes_no_bit(value):
  r, s = rollout(), settings()
  pad = ~r.valid
  assert pad.any()
  slots = jnp.arange(P)[None] < r.start[:, None]
  spoiled = dataclasses.replace(
    r,
    logits=spoil(r.logits, pad, value),
    logp=spoil(r.logp, pad, value),
    tokens=jnp.where(pad, 10**6, r.tokens),
    prompts=jnp.where(slots, -7, r.prompts),
  )
  (loss, grads, report), (loss2, grads2, report2) = (gradients(batch(x), s) for x in (r, spoiled))
  assert loss == loss2 and bits(grads) == bits(grads2)
  one = update.summarise(jax.tree.map(lambda x: x[None], report), s)[0]
  two = update.summarise(jax.tree.map(lambda x: x[None], report2), s)[0]
  assert bits(one) == bits(two)


@pytest.mark.slow
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_rejected_rows_may_hold_anything(value):
  """Rows with a violation stay rejected with NaN or inf in them; nothing else moves by a bit."""
  r, s = rollout(), settings()
  plain = gradients(batch(r), s)
  out = ~np.asarray(plain[2].keep)
  assert out.any() and not out.all()
  rows = jnp.asarray(out)[:, None] & r.valid
  spoiled = dataclasses.replace(
    r, logits=spoil(r.logits, rows, value), logp=spoil(r.logp, rows, value)
  )
  got = gradients(batch(spoiled), s)
  np.testing.assert_array_equal(got[2].keep, plain[2].keep)
  assert got[0] == plain[0] and bits(got[1]) == bits(plain[1])
  # What speaks of kept rows is untouched; the divergences of the spoiled rows are counted instead.
  one, two = (update.summarise(jax.tree.map(lambda x: x[None], x[2]), s)[0] for x in (plain, got))
  for name in ('loss', 'grad_norm', 'acceptance', 'ess', 'ratio/max', 'reward/kept', 'entropy'):
    if name != 'entropy':
      assert np.asarray(one[name]).tobytes() == np.asarray(two[name]).tobytes(), name
  assert two['nonfinite_rows'] == out.sum()
  for name, x in one.items():  # nothing that was a number becomes NaN or inf
    if 'engine1' not in name:
      assert np.isfinite(two[name]) or not np.isfinite(x), name


def test_without_replay_the_noise_is_far_below_any_limit():
  report = arm('no limit', batch(rollout(strength=0.0)))[2]
  kl = np.asarray(report.scored.divergences.kl)[np.asarray(report.scored.valid)]
  assert 0 < kl.max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize('name', ['trm', 'recomputed anchor'])
def test_arms_of_one_program_equal_programs_of_one_arm(name):
  assert_close(arm(name), whole(name), 1e-6)


def test_random_mask_keeps_as_many_rows():
  kept, want = (np.asarray(arm(name)[2].keep) for name in ('random mask', 'trm'))
  assert kept.sum() == want.sum() and (kept != want).any()


@pytest.mark.parametrize(
  'name, kept', [('no limit', False), ('neutral', True), ('error', False), ('trm', False)]
)
def test_missing_log_probs(name, kept):
  """An error only for the arm that says so."""
  r = rollout()
  r = dataclasses.replace(r, logp=r.logp.at[5, 0].set(jnp.nan))
  report = arm(name, batch(r))[2]
  assert bool(report.keep[5]) is kept
  if name != 'trm':
    assert report.keep.sum() == ROWS - (not kept)
  assert bool(report.finite) is (name != 'error')


@pytest.mark.slow
def test_a_missing_log_prob_reads_as_that_of_the_weights_that_drew():
  r = rollout()
  r = dataclasses.replace(r, logp=r.logp.at[5, 0].set(jnp.nan))
  report = arm('neutral', batch(r, recomputed_logp=r.logp.at[5, 0].set(-2) - 0.5))[2]
  want = np.asarray(r.logp.at[5, 0].set(-2.5))
  np.testing.assert_array_equal(report.scored.rollout_logp, want)


def state(optimizer):
  p = params()
  return update.TrainState(
    step=jnp.int32(0),
    params=p,
    opt_state=optimizer.init(p),
    key=jax.random.key(0),
    limit=jnp.float32(0.15),
    first=None,
    history=None,
  )


def test_no_accepted_row_or_a_bad_gradient_moves_nothing():
  optimizer = optax.adam(1e-2)
  begin = state(optimizer)
  _, grads, report = compiled(settings())(begin.params, batch(), jnp.int32(0))
  step = jax.jit(lambda *given: update.apply_gradient(*given, optimizer))
  moved = step(begin, grads, report)
  assert bits(moved.params) != bits(begin.params)
  for field in ('accepted', 'finite'):
    held = step(moved, grads, dataclasses.replace(report, **{field: jnp.bool_(False)}))
    assert bits((held.params, held.opt_state)) == bits((moved.params, moved.opt_state))


@pytest.mark.slow
def test_minibatches_and_epochs_are_successive_steps():
  optimizer = optax.sgd(0.05)
  b = batch(recomputed_logp=rollout().logp)
  s = settings(TRM, minibatches=2, epochs=2)
  got, reports = jax.jit(
    lambda st, b: update.update(
      st, b, jax.random.key(1), update.Arm(), optimizer=optimizer, settings=s
    )
  )(state(optimizer), b)
  assert reports.loss.shape == (4,)
  # The rows of the second epoch were trained on: the certificate is of the first.
  first = jax.tree.map(lambda x: x[:2], reports)
  name = 'certificate/estimate'
  found, alone = update.summarise(reports, s)[0], update.summarise(first, settings(TRM))[0]
  np.testing.assert_allclose(found[name], alone[name], rtol=1e-6)
  assert abs(found[name] - update.summarise(reports, settings(TRM))[0][name]) > 1e-6
  step = jax.jit(lambda *given: update.apply_gradient(*given, optimizer))
  want, minis = state(optimizer), update.split(b, 2, G)
  for index in range(4):
    mini = jax.tree.map(lambda x, i=index: x[i % 2], minis)
    _, grads, report = compiled(settings())(want.params, mini, jnp.int32(0))
    want = step(want, grads, report)
  for a, w in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
    np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-6)


def test_split_keeps_groups_whole():
  parts = update.split(jnp.arange(24), 3, 2)
  assert parts.shape == (3, 8)
  np.testing.assert_array_equal(update.merge(parts, 2), jnp.arange(24))
  np.testing.assert_array_equal(parts[1], [2, 3, 8, 9, 14, 15, 20, 21])


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize('parts', [2, 4])
def test_parts_under_a_mesh_can_be_scanned_and_put_back(mesh, parts):
  rows = np.arange(4 * mesh[0] * 6).reshape(-1, 3)  # with four parts a device has one group of each
  want = rows.reshape(-1, parts, 2, 3).swapaxes(0, 1).reshape(parts, -1, 3)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    x = jax.device_put(rows, jax.P('data'))
    _, got = jax.lax.scan(lambda c, x: (c, 2 * x), 0, update.split(x, parts, 2))
    back = update.merge(got, 2)
    assert jax.typeof(back).sharding.spec[0] == 'data'
  np.testing.assert_array_equal(got, 2 * want)
  np.testing.assert_array_equal(back, 2 * rows)


@pytest.mark.slow
def test_rows_that_are_not_finite_have_their_place_in_the_rollout():
  """Of two epochs of two minibatches; the batch is that of four."""
  report = jax.tree.map(lambda x: x[None], whole('trm')[2])
  logp = report.scored.logp.at[0, 4, 0].set(jnp.nan)
  valid = report.scored.valid.at[0, 4, 0].set(True)
  scored = dataclasses.replace(report.scored, logp=logp, valid=valid)
  report = dataclasses.replace(report, scored=scored)
  stacked = jax.tree.map(lambda x: jnp.concatenate([x] * 4), report)
  _, bad = update.summarise(stacked, settings(epochs=2, minibatches=2))
  order = update.split(np.arange(2 * ROWS), 2, G)
  np.testing.assert_array_equal(np.flatnonzero(bad), sorted(np.asarray(order)[:, 4]))


def test_limit_follows_the_batch_of_the_method_that_asks_for_it():
  report = jax.tree.map(lambda x: x[None], whole('trm')[2])
  begin = state(optax.sgd(1.0))
  fixed = update.follow_limit(begin, report, update.Arm(), settings())
  follow = MethodWords(max_kl=0.15, accept=0.5).make()
  moved = update.follow_limit(begin, report, update.Arm(), settings(follow))
  assert fixed.limit == begin.limit
  largest = np.where(report.scored.valid[0], report.scored.divergences.kl[0], 0).max(-1)
  median = np.sort(largest)[(ROWS - 1) // 2]
  np.testing.assert_allclose(moved.limit, 0.15**0.9 * median**0.1, rtol=1e-5)
  # Rows that no limit could keep have no say.
  usable = jnp.arange(ROWS)[None] >= 3
  report = dataclasses.replace(report, scored=dataclasses.replace(report.scored, usable=usable))
  moved = update.follow_limit(begin, report, update.Arm(), settings(follow))
  median = np.sort(largest[3:])[(ROWS - 4) // 2]
  np.testing.assert_allclose(moved.limit, 0.15**0.9 * median**0.1, rtol=1e-5)


def test_limit_pools_all_updates_and_never_falls_to_float_noise():
  report = whole('trm')[2]
  zero = jax.tree.map(lambda x: x, report)
  noise = dataclasses.replace(
    zero.scored.divergences, kl=jnp.full_like(zero.scored.divergences.kl, 1e-13)
  )
  zero = dataclasses.replace(zero, scored=dataclasses.replace(zero.scored, divergences=noise))
  follow = settings(MethodWords(max_kl=0.15, accept=0.9).make())
  begin = state(optax.sgd(1.0))
  both = jax.tree.map(lambda a, b: jnp.stack([a, b]), zero, report)
  pooled = update.follow_limit(begin, both, update.Arm(), follow).limit
  alone = update.follow_limit(begin, jax.tree.map(lambda x: x[None], zero), update.Arm(), follow)
  np.testing.assert_allclose(alone.limit, 0.15**0.9 * update.LIMIT_FLOOR**0.1, rtol=1e-5)
  assert pooled > alone.limit
  floor = dataclasses.replace(begin, limit=jnp.float32(update.LIMIT_FLOOR))
  still = update.follow_limit(floor, jax.tree.map(lambda x: x[None], zero), update.Arm(), follow)
  np.testing.assert_allclose(still.limit, update.LIMIT_FLOOR, rtol=1e-4)
  fast = settings(MethodWords(max_kl=0.15, accept=0.9, accept_rate=0.5, accept_floor=0.05).make())
  moved = update.follow_limit(begin, jax.tree.map(lambda x: x[None], zero), update.Arm(), fast)
  np.testing.assert_allclose(moved.limit, (0.15 * 0.05) ** 0.5, rtol=1e-5)


@pytest.mark.slow
def test_penalty_acts_even_where_no_row_is_accepted():
  loss, grads, report = whole('nothing kept')
  assert report.keep.sum() == 0 and report.accepted and loss > 0
  assert max(np.abs(g).max() for g in grads) > 1e-3
  assert not whole('nothing kept, kept rows')[2].accepted


@pytest.mark.slow
@pytest.mark.parametrize('layers', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_identical_policies_are_accepted_and_the_mask_costs_no_bit(optimised, layers):
  """Compiled as users compile: optimisation must not tell the two forward passes apart."""
  config = dataclasses.replace(CONFIG, layers=layers)
  p = params(config=config)
  r = roller(fleet.Fleet(), config, 'replay', optimised)(p, None, jnp.float32(1))
  masked, free = (
    program(settings(m, config=config), optimised)(p, batch(r), jnp.int32(0))
    for m in (MethodWords(max_kl=1e-30, mean_kl=1e-30, max_tv=1e-30).make(), MethodWords().make())
  )
  np.testing.assert_array_equal(masked[2].scored.divergences.kl[r.valid], 0)
  assert masked[2].keep.all()
  assert bits(masked[:2]) == bits(free[:2])
