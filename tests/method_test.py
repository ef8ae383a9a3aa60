"""Methods: which surrogate, anchor, weight and mask an arm is made of, and what it refuses."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import train_policy
from trm_jax import masks, objectives
from trm_jax.masks import controls
from trm_jax.training import command
from trm_jax.training.words import MethodWords
from trm_jax.types import Divergences, InputError

G, B, T = 4, 8, 5


def scored(seed=0):
  rng = np.random.default_rng(seed)
  logp = -rng.uniform(0.1, 2, (B, T))
  rollout, recomputed, version = (logp + rng.normal(0, s, (B, T)) for s in (0.5, 0.2, 0.3))
  lengths = rng.integers(1, T + 1, B)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  return objectives.Scored(
    logp=f32(logp),
    rollout_logp=f32(rollout),
    recomputed_logp=f32(recomputed),
    version_logp=f32(version),
    divergences=Divergences(
      kl=f32(rng.exponential(0.1, (B, T))),
      tv=f32(rng.uniform(0, 0.3, (B, T))),
      log_ratio=f32(logp - rollout),
      entropy=f32(np.ones((B, T))),
      chi2=f32(rng.exponential(0.2, (B, T))),
      square=f32(rng.uniform(0.1, 0.9, (B, T))),
    ),
    usable=jnp.ones(B, bool),
    valid=jnp.asarray(np.arange(T)[None] < lengths[:, None]),
    reward=f32(rng.integers(0, 2, B)),
    engine=jnp.zeros(B, jnp.int32),
  )


def objective(method, s, limit=1.0):
  return objectives.objective(
    method.make(), s, samples=G, limit=jnp.float32(limit), key=jax.random.key(3)
  )


def expected(method, s, kept):
  """The whole objective in float64 NumPy, written out row by row."""
  d = {k: np.asarray(getattr(s, k), np.float64) for k in ('logp', 'rollout_logp', 'reward')}
  anchor = np.asarray(
    {
      'rollout': s.rollout_logp,
      'recomputed': s.recomputed_logp,
      'version': s.version_logp,
    }[method.anchor],
    np.float64,
  )
  valid, total = np.asarray(s.valid), 0.0
  for i in range(B):
    group = d['reward'][i // G * G : i // G * G + G]
    a = (d['reward'][i] - group.mean()) / (group.std() + 1e-6)
    for t in range(T):
      if not (valid[i, t] and kept[i]):
        continue
      r = np.exp(d['logp'][i, t] - anchor[i, t])
      value = r * a
      if method.surrogate != 'ratio':
        value = min(value, np.clip(r, 1 - method.clip_low, 1 + method.clip_high) * a)
      if method.surrogate == 'decoupled' or method.weight == 'tis':
        value *= min(np.exp(anchor[i, t] - d['rollout_logp'][i, t]), method.max_ratio)
      total += value
  return total


CHOICES = [
  dict(),
  dict(anchor='recomputed'),
  dict(anchor='version'),
  dict(surrogate='clip'),
  dict(surrogate='clip', anchor='recomputed', weight='tis', max_ratio=1.1),
  dict(anchor='recomputed', weight='tis', max_ratio=1.2),
  dict(surrogate='decoupled', anchor='version', clip_low=0.1, clip_high=0.3),
]
MASKS = [dict(), dict(max_kl=0.25), dict(max_kl=0.25, mean_kl=0.13), dict(max_tv=0.25, max_k2=0.4)]


@pytest.mark.parametrize('choice, mask', list(itertools.product(CHOICES, MASKS)))
def test_any_surrogate_goes_with_any_mask(choice, mask):
  s, method = scored(), MethodWords(**choice, **mask)
  mean, kept, _ = objective(method, s)
  kl, tv = np.asarray(s.divergences.kl), np.asarray(s.divergences.tv)
  valid, lr = np.asarray(s.valid), np.asarray(s.divergences.log_ratio)
  top = lambda x: np.where(valid, x, -np.inf).max(-1)
  want = np.ones(B, bool)
  if 'max_kl' in mask:
    want &= top(kl) <= 0.25
  if 'mean_kl' in mask:
    want &= np.where(valid, kl, 0).sum(-1) / valid.sum(-1) <= 0.13
  if 'max_tv' in mask:
    want &= (top(tv) <= 0.25) & (top(lr**2 / 2) <= 0.4)
  if mask:
    assert 0 < want.sum() < B  # the mask must bite, or this tests nothing
  np.testing.assert_array_equal(kept, want)
  np.testing.assert_allclose(mean.total, expected(method, s, want), rtol=2e-5, atol=2e-5)
  assert mean.count == B


def test_gradient_reaches_logp_alone_and_rejected_rows_get_none():
  s, method = scored(), MethodWords(surrogate='decoupled', anchor='version', max_kl=0.25)
  floats = ('logp', 'rollout_logp', 'recomputed_logp', 'version_logp', 'reward')

  def total(values):
    return objective(method, dataclasses.replace(s, **values))[0].total

  grads = jax.grad(total)({n: getattr(s, n) for n in floats})
  kept = np.asarray(objective(method, s)[1])
  assert (np.asarray(grads['logp'])[~kept] == 0).all()
  assert np.abs(np.asarray(grads['logp'])[kept]).max() > 0.1
  np.testing.assert_array_equal(grads['reward'], 0)
  np.testing.assert_array_equal(grads['recomputed_logp'], 0)
  np.testing.assert_array_equal(grads['rollout_logp'], 0)  # truncated engine ratio is detached


def test_random_mask_keeps_as_many_rows_as_the_trust_region():
  s = scored()
  kept = np.asarray(objective(MethodWords(max_kl=0.25), s)[1])
  for key in range(5):
    chosen = objectives.keep(
      MethodWords(max_kl=0.25, random_mask=True).make(),
      s,
      limit=jnp.float32(1),
      key=jax.random.key(key),
    )
    assert chosen.sum() == kept.sum()
  differs = [
    (
      np.asarray(
        objectives.keep(
          MethodWords(max_kl=0.25, random_mask=True).make(),
          s,
          limit=jnp.float32(1),
          key=jax.random.key(k),
        )
      )
      != kept
    ).any()
    for k in range(5)
  ]
  assert any(differs)


def test_length_matched_mask_keeps_as_many_rows_of_each_length(monkeypatch):
  monkeypatch.setattr(controls, 'SMALLEST_BLOCK', 1)  # lengths of one row each may stay alone
  s = scored()
  kept = np.asarray(objective(MethodWords(max_kl=0.25), s)[1])
  method = MethodWords(max_kl=0.25, random_mask=True, match_length=True)
  lengths = np.asarray(s.valid.sum(-1))
  for key in range(5):
    chosen = np.asarray(
      objectives.keep(method.make(), s, limit=jnp.float32(1), key=jax.random.key(key))
    )
    for n in set(lengths):
      assert chosen[lengths == n].sum() == kept[lengths == n].sum()


def test_followed_limit_replaces_the_configured_one():
  s = scored()
  method = MethodWords(max_kl=5.0, accept=0.5)
  assert objective(method, s, limit=5.0)[1].all()
  assert not objective(method, s, limit=1e-4)[1].any()


def test_unusable_rows_are_never_kept():
  s = dataclasses.replace(scored(), usable=jnp.arange(B) != 2)
  for method in (MethodWords(), MethodWords(max_kl=100.0, random_mask=True)):
    assert not objective(method, s)[1][2]


@pytest.mark.parametrize('options', [{}, {'match_length': True}])
@pytest.mark.parametrize('scope', ['sequence', 'prefix'])
def test_the_control_chooses_among_usable_rows(scope, options):
  s = dataclasses.replace(scored(), usable=jnp.asarray(np.arange(B) % 3 > 0))
  method = MethodWords(max_kl=0.25, scope=scope)
  control = dataclasses.replace(method, random_mask=True, **options)
  count = lambda kept: kept.sum() if scope == 'sequence' else kept.any(-1).sum()
  want = count(objective(method, s)[1])
  assert 0 < want < s.usable.sum()
  keys = jax.random.split(jax.random.key(0), 20)
  draw = jax.vmap(lambda key: objectives.keep(control.make(), s, limit=jnp.float32(1), key=key))
  kept = np.asarray(draw(keys))
  assert [count(k) for k in kept] == [want] * 20
  assert not kept[:, ~np.asarray(s.usable)].any() and kept[:, np.asarray(s.usable)].any(0).all()


def test_baseline_pool_sees_the_mask():
  """Rewards [1, 0, 0, 0] of a group whose only right row is rejected."""
  s = scored()
  kl = jnp.zeros((B, T)).at[0].set(9.0)
  s = dataclasses.replace(
    s,
    divergences=dataclasses.replace(s.divergences, kl=kl),
    reward=jnp.array([1.0, 0, 0, 0] * 2),
    valid=jnp.ones((B, T), bool),
  )
  centred = dict(max_kl=1.0, advantage='centred')
  every = objective(MethodWords(**centred), s)[2]
  accepted = objective(MethodWords(**centred, baseline_pool='accepted'), s)[2]
  np.testing.assert_allclose(every[:4], [0.75, -0.25, -0.25, -0.25])
  np.testing.assert_allclose(accepted[1:4], 0)


def test_penalty_scope_and_denominator():
  kl, valid = jnp.ones((4, 3)), jnp.ones((4, 3), bool)
  kept = jnp.array([True, False, False, True])
  every = objectives.penalty(MethodWords().make(), kl, valid, kept)
  only = objectives.penalty(MethodWords(kl_scope='kept').make(), kl, valid, kept)
  by_kept = objectives.penalty(
    MethodWords(kl_scope='kept', normalize_by='accepted').make(), kl, valid, kept
  )
  assert (every.total, every.count) == (12, 4)
  assert (only.total, only.count) == (6, 4)
  assert (by_kept.total, by_kept.count) == (6, 2)


@pytest.mark.parametrize(
  'name, limit', [('mean_deviation', 0.4), ('length_neutral', 0.35), ('chi2_budget', 0.6)]
)
def test_length_limits_are_those_of_the_trust_region(name, limit):
  s, weights = scored(), dict(epsilon=0.15, delta=0.08)
  options = {f'length_neutral_{k}': v for k, v in weights.items()}
  kept = objective(MethodWords(**{name: limit}, **options), s)[1]
  criterion = masks.CRITERIA[name](limit, **(weights if name == 'length_neutral' else {}))
  np.testing.assert_array_equal(kept, criterion(s.divergences, s.valid))
  assert 0 < kept.sum() < B
  # Beside another limit, both must hold; at the same rate, the control keeps as many.
  both = objective(MethodWords(**{name: limit}, **options, max_kl=0.25), s)[1]
  largest = np.where(s.valid, s.divergences.kl, 0).max(-1)
  np.testing.assert_array_equal(both, np.asarray(kept) & (largest <= 0.25))
  control = objective(MethodWords(**{name: limit}, **options, random_mask=True), s)[1]
  assert control.sum() == kept.sum()


def test_a_budget_needs_exact_chi2():
  s = scored()
  core = dataclasses.replace(s, divergences=dataclasses.replace(s.divergences, chi2=None))
  with pytest.raises(InputError, match='full=True'):
    objective(MethodWords(chi2_budget=1.0), core)
  assert objective(MethodWords(max_kl=100.0), core)[1].all()


def prefix(**setting):
  return MethodWords(scope='prefix', advantage='centred', **setting)


def test_prefix_by_hand():
  """Rewards 1, 0, 1, 0; the first row leaves at its second token, the fourth at its first."""
  kl = jnp.full((4, 3), 0.01).at[0, 1].set(0.3).at[0, 2].set(0.02).at[3, 0].set(9.0)
  kl = kl.at[2, 2].set(jnp.nan)  # padding
  s = jax.tree.map(lambda x: x[:4, :3] if x.ndim == 2 else x[:4], scored())
  s = dataclasses.replace(
    s,
    logp=jnp.zeros((4, 3)),
    rollout_logp=jnp.zeros((4, 3)),
    divergences=dataclasses.replace(s.divergences, kl=kl),
    valid=jnp.ones((4, 3), bool).at[2, 2].set(False),
    reward=jnp.array([1.0, 0, 1, 0]),
  )
  mean, kept, _ = objective(prefix(max_kl=0.2), s)
  np.testing.assert_array_equal(kept, [[1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
  assert (mean.total, mean.count) == (0.5 * (1 - 3 + 2 - 0), 4)
  mean, _, _ = objective(prefix(max_kl=0.2, normalize_by='accepted', reduce_tokens='mean'), s)
  np.testing.assert_allclose([mean.total, mean.count], [0.5 * (1 / 3 - 1 + 1), 3], rtol=1e-6)
  # Rows that keep a token shape the baseline: rewards 1, 0, 1.
  pooled = objective(prefix(max_kl=0.2, baseline_pool='accepted'), s)[2]
  np.testing.assert_allclose(pooled[:3], [1 / 3, -2 / 3, 1 / 3], rtol=1e-6)
  every, only = (
    objectives.penalty(prefix(max_kl=0.2, kl_scope=scope).make(), jnp.ones((4, 3)), s.valid, kept)
    for scope in ('all', 'kept')
  )
  assert (every.total, only.total) == (11, 6)


@pytest.mark.parametrize('limits', [dict(max_kl=0.25), dict(max_tv=0.25, chi2_budget=0.6)])
def test_prefixes_end_at_the_first_context_outside(limits):
  s, method = scored(), prefix(**limits)
  valid, spent = np.asarray(s.valid), np.zeros(B)
  kept, going = np.ones((B, T), bool), np.ones(B, bool)
  for t in range(T):
    spent += np.where(valid[:, t], s.divergences.chi2[:, t], 0)
    bad = np.asarray(s.divergences.kl[:, t]) > limits.get('max_kl', np.inf)
    bad |= np.asarray(s.divergences.tv[:, t]) > limits.get('max_tv', np.inf)
    bad |= spent > limits.get('chi2_budget', np.inf)
    going &= ~(bad & valid[:, t])
    kept[:, t] = going
  got = objective(method, s)[1]
  np.testing.assert_array_equal(got, kept)
  part = kept[valid]
  assert 0 < part.sum() < part.size and (kept.any(-1) & ~kept.all(-1)).any()
  # Rows kept whole are those of the sequence criterion.
  whole = objective(MethodWords(**limits), s)[1]
  np.testing.assert_array_equal(got.all(-1), whole)

  def total(logp, spoil=0.0):
    far = ~kept | ~valid
    here = dataclasses.replace(s, logp=jnp.where(far, logp + spoil, logp))
    return objective(method, here)[0].total

  value, grad = jax.value_and_grad(total)(s.logp)
  assert (np.asarray(grad)[~kept | ~valid] == 0).all() and np.abs(grad).max() > 0.1
  for spoil in (1e30, jnp.nan):
    other = jax.value_and_grad(total)(s.logp, spoil)
    assert other[0] == value
    np.testing.assert_array_equal(other[1], grad)


def test_a_prefix_of_identical_policies_is_everything():
  s = scored()
  same = jax.tree.map(jnp.zeros_like, s.divergences)
  s = dataclasses.replace(s, divergences=same)
  masked, free = (
    objective(prefix(max_kl=1e-30), s),
    objective(MethodWords(advantage='centred'), s),
  )
  assert masked[1].all() and masked[0].total == free[0].total
  unusable = dataclasses.replace(s, usable=jnp.arange(B) != 2)
  np.testing.assert_array_equal(
    objective(prefix(max_kl=1e-30), unusable)[1].any(-1), unusable.usable
  )


def test_the_control_of_prefixes_deals_out_their_ends():
  s = dataclasses.replace(scored(), valid=jnp.ones((B, T), bool))
  kept = np.asarray(objective(prefix(max_kl=0.25), s)[1])
  for options in (dict(), dict(match_length=True)):
    chosen = np.asarray(objective(prefix(max_kl=0.25, random_mask=True, **options), s)[1])
    np.testing.assert_array_equal(np.sort(chosen.sum(-1)), np.sort(kept.sum(-1)))
    assert (chosen != kept).any() and (np.diff(chosen * 1) <= 0).all()


@pytest.mark.parametrize(
  'setting, word',
  [
    (dict(scope='prefix'), "method.scope='prefix' .* none is set"),
    (dict(scope='prefix', max_kl=0.1, mean_kl=0.1), 'method.mean_kl=0.1 .*has no form'),
    (dict(max_kl=0.0), 'max_kl'),
    (dict(mean_kl=-1.0), 'mean_kl'),
    (dict(max_kl=float('nan')), 'max_kl'),
    (dict(accept=1.5, max_kl=0.1), 'accept'),
    (dict(accept=0.5), 'max_kl'),
    (dict(accept=0.5, max_kl=0.1, accept_rate=0.0), 'accept_rate'),
    (dict(accept_floor=-1.0), 'accept_floor'),
    (dict(random_mask=True), 'random_mask'),
    (dict(match_length=True), 'match_length'),
    (dict(weight='tis'), 'anchor'),
    (dict(surrogate='decoupled'), 'anchor'),
    (dict(surrogate='decoupled', anchor='version', weight='tis'), 'weight'),
    (dict(clip_low=1.5), 'clip_low'),
    (dict(clip_high=0.0), 'clip_high'),
    (dict(max_ratio=0.0), 'max_ratio'),
    (dict(kl_coefficient=-0.1), 'kl_coefficient'),
    (dict(length_neutral=0.0), 'length_neutral=0.0'),
    (dict(mean_deviation=-0.1), 'mean_deviation=-0.1'),
    (dict(chi2_budget=float('nan')), 'chi2_budget=nan'),
    (dict(length_neutral_delta=0.0), 'length_neutral_delta=0.0'),
    (dict(length_neutral_epsilon=-1.0), 'length_neutral_epsilon=-1.0'),
    (dict(length_neutral_epsilon=1.5), 'length_neutral_epsilon=1.5'),
  ],
)
def test_contradictions_are_named(setting, word):
  with pytest.raises(InputError, match=word):
    MethodWords(**setting)


# Parts from outside the package.


def smallest_ratio(limit):
  """A veto: no token's ratio below 1 / limit."""
  lowest = lambda d, valid: masks.max_over_tokens(-d.log_ratio, valid)
  return masks.Criterion('smallest_ratio', float(np.log(limit)), lowest)


def reinforce(s, advantages):
  """log p * A, without any ratio."""
  return s.logp * advantages[:, None]


REINFORCE = objectives.Named(
  lambda: objectives.Method(surrogate=reinforce), 'log p A', 'token', 'Williams 1992'
)


def test_a_criterion_from_outside_is_one_function():
  s = scored()
  method = MethodWords(criteria=('method_test:smallest_ratio=1.5',))
  kept = objective(method, s)[1]
  worst = np.where(s.valid, -np.asarray(s.divergences.log_ratio), -np.inf).max(-1)
  np.testing.assert_array_equal(kept, worst <= np.log(1.5))
  assert 0 < kept.sum() < B


def test_a_method_from_outside_is_one_function_and_one_row():
  s, words = scored(), MethodWords(name='method_test:REINFORCE', max_kl=0.25, advantage='centred')
  mean, kept, advantages = objective(words, s)
  want = np.where(kept[:, None] & s.valid, s.logp * advantages[:, None], 0).sum()
  np.testing.assert_allclose(mean.total, want, rtol=1e-5)
  np.testing.assert_array_equal(kept, masks.max_kl(0.25)(s.divergences, s.valid))


def test_a_method_is_one_word_of_the_command_line(monkeypatch):
  found = []
  for word in ('cppo', 'method_test:REINFORCE'):
    monkeypatch.setattr('sys.argv', ['train_policy', '--directory', 'nowhere', '--method', word])
    command.run(train_policy.TrainPolicy, lambda args: found.append(args.config.method))
  assert [words.name for words in found] == ['cppo', 'method_test:REINFORCE']
  assert found[0].make() == objectives.METHODS['cppo'].make()


OUTSIDE = '''
import jax.numpy as jnp
from trm_jax import objectives
from trm_jax.objectives import clips
from trm_jax.types import part


def halved(scored, advantages, *, share):
  """Half of the clip at log-ratio 0, and less of it away from there."""
  d = jnp.where(scored.valid, scored.logp - scored.anchor_logp('rollout'), 0)
  return share * jnp.exp(-jnp.square(d)) * clips.reinforce(scored, advantages)


MINE = objectives.Named(
  lambda: objectives.Method(surrogate=part(halved, share=0.5)), 'A log p / 2', 'token', 'nobody'
)
'''


@pytest.mark.slow
def test_a_method_from_outside_is_trained_from_the_command_line(tmp_path):
  (tmp_path / 'outside.py').write_text(OUTSIDE)
  words = (
    '--method.name outside:MINE --method.max-kl 0.5 --steps 2 --prompts 4 --samples 2'
    ' --eval-prompts 8 --warm-start.steps 2 --warm-start.batch 8 --policy.width 16'
    ' --policy.layers 1 --policy.mlp-width 16 --policy.heads 2 --policy.kv-heads 2'
    ' --policy.experts 0'
  ).split()
  root = pathlib.Path(__file__).parent.parent
  run = subprocess.run(
    [sys.executable, '-m', 'experiments.train_policy', '--directory', str(tmp_path / 'run')]
    + ['--data-dir', str(tmp_path / 'data'), *words],
    cwd=root,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0, run.stderr[-2000:]
  rows = (tmp_path / 'run' / 'rl' / 'metrics.jsonl').read_text().splitlines()
  seen = [json.loads(row) for row in rows]
  assert [math.isfinite(x['loss']) for x in seen if 'loss' in x] == [True] * 2


@pytest.mark.parametrize('name', objectives.METHODS)
def test_every_named_method_runs_and_is_the_plain_loss_for_equal_policies(name):
  s = scored()
  logp = s.rollout_logp
  zero = jax.tree.map(jnp.zeros_like, s.divergences)
  same = dict(logp=logp, recomputed_logp=logp, version_logp=logp, divergences=zero)
  s = dataclasses.replace(s, **same)
  mean, kept, _ = objective(MethodWords(name=name), s)
  method = MethodWords(name=name).make()
  switches = ('advantage', 'reduce_tokens', 'normalize_by')
  plain = objectives.Method(**{field: getattr(method, field) for field in switches})
  value = lambda method, logp: objectives.objective(
    method,
    dataclasses.replace(s, logp=logp),
    samples=G,
    limit=jnp.float32(1),
    key=jax.random.key(3),
  )[0]
  want = value(plain, s.logp)
  assert name in objectives.methods()
  assert kept.all() and mean.count == want.count
  if name == 'clip_cov':  # drops tokens for the sake of entropy, whatever the policies are
    method = dataclasses.replace(method, gates=())
    mean = value(method, s.logp)
  if name != 'sapo':  # 2 A / tau: equal in its gradient alone
    assert mean.total == want.total
  slope, plain_slope = (
    jax.grad(lambda logp, m=m: value(m, logp).total)(s.logp) for m in (method, plain)
  )
  np.testing.assert_allclose(slope.sum(-1), plain_slope.sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'setting, word',
  [
    (dict(name='nothing'), "method.name='nothing' is no method of the catalogue; the nearest are"),
    (dict(name='method_test:NOTHING'), 'cannot be found'),
    (dict(name='method_test:B'), 'is a int'),
    (dict(name='tis', surrogate='clip'), 'both say what the objective is'),
    (dict(criteria=('method_test:smallest_ratio',)), 'not of the form module:function=LIMIT'),
    (dict(criteria=('method_test:smallest_ratio=x',)), 'not of the form module:function=LIMIT'),
    (dict(criteria=('method_test:nothing=1',)), 'cannot be found'),
  ],
)
def test_words_that_mean_nothing_are_refused(setting, word):
  with pytest.raises(InputError, match=word):
    MethodWords(**setting)
