"""The four demonstrations: exact expectations against loops over responses, honest words."""

import copy
import dataclasses
import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from experiments import token_level_failure as failure
from experiments.laboratory import token_failures
from experiments.reports import failure_report
from trm_jax.exact import enumeration as en
from trm_jax.exact import oracle
from trm_jax.training import command
from trm_jax.types import InputError

LIMIT = 0.05


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
  """Responses of three tokens, in float64."""
  monkeypatch.setattr(token_failures, 'HORIZON', 3)
  if 'float32' in request.keywords:
    yield
  else:
    with en.float64():
      yield


def one(batch):
  return jax.tree.map(lambda x: x[0], batch)


def responses(world):
  """(mass, policy mass, reward, prompt, path) of each response; path: (row, token, ratio, score).

  score: gradient of log pi(token | row) in the logits of the row.
  """
  rows, found = jax.tree.map(np.asarray, jax.jit(lambda w: (en.rows(w), en.tree(w)))(world))
  starts = [s.start for s in en.lengths(world.policy)]
  V, T, S = token_failures.VOCAB, token_failures.HORIZON, world.reward.shape[1]
  for n in np.flatnonzero(rows.rollout_mass > 0):
    x, leaf = divmod(int(n), S)
    path = []
    for t in np.flatnonzero(rows.valid[n]):
      prefix, v = divmod(leaf // V ** (T - int(t) - 1), V)
      row = starts[t] + prefix
      q = found.policy[x, row]
      path.append((row, v, q[v] / found.rollout[x, row, v], np.eye(V)[v] - q))
    yield rows.rollout_mass[n], rows.policy_mass[n], rows.reward[n], x, path


def gradient_of(world, weight):
  """sum over responses and tokens of mass * weight(ratio, A) * score."""
  g, b = np.zeros(world.policy.shape), np.asarray(token_failures.baseline(world))
  for mass, _, reward, x, path in responses(world):
    for row, _, ratio, score in path:
      g[x, row] += mass * weight(ratio, reward - b[x]) * score
  return g


@pytest.fixture
def world():
  return one(token_failures.moved(np.random.default_rng(0), 1, 'dense', 0.7))


@pytest.mark.slow
def test_the_leak_of_ppo_clip(world):
  got = jax.jit(lambda w: token_failures.clipping(w, LIMIT))(world)

  def clip(ratio, a):
    return ratio * a if (ratio <= 1.2 if a > 0 else ratio >= 0.8) else 0.0

  inside = lambda ratio, a: clip(ratio, a) if 0.8 <= ratio <= 1.2 else 0.0
  truth = np.zeros(world.policy.shape)
  b = np.asarray(token_failures.baseline(world))
  for _, mass, reward, x, path in responses(world):
    for row, _, _, score in path:
      truth[x, row] += mass * (reward - b[x]) * score
  np.testing.assert_allclose(oracle.gradient(oracle.policy_objective, world), truth, atol=1e-12)
  plain = gradient_of(world, lambda ratio, a: ratio * a)
  surrogate = functools.partial(oracle.surrogate, baseline=jnp.asarray(b))
  np.testing.assert_allclose(plain, oracle.gradient(surrogate, world), atol=1e-12)
  for name, weight in (('PPO-clip', clip), ('no leak', inside)):
    bias = np.sqrt(((gradient_of(world, weight) - truth) ** 2).sum())
    np.testing.assert_allclose(got['methods'][name]['bias'], bias, rtol=1e-9)
  bias = np.sqrt(((plain - truth) ** 2).sum())
  np.testing.assert_allclose(got['methods']['no clip']['bias'], bias, rtol=1e-9)
  weights = [
    (mass * abs(clip(ratio, reward - b[x])), ratio)
    for mass, _, reward, x, path in responses(world)
    for _, _, ratio, _ in path
  ]
  total = sum(w for w, _ in weights)
  leak = sum(w for w, ratio in weights if not 0.8 <= ratio <= 1.2) / total
  high = sum(w for w, ratio in weights if ratio > 1.2) / total
  np.testing.assert_allclose([got['leak'], got['leak_high']], [leak, high], rtol=1e-9)
  assert leak > high > 0 and got['leaks'] == 1
  most = max(ratio for w, ratio in weights if w > 0)
  np.testing.assert_allclose(got['largest_ratio'], most, rtol=1e-9)


@pytest.mark.slow
def test_without_mismatch_nothing_leaks():
  world = one(token_failures.moved(np.random.default_rng(0), 1, 'dense', 0.0))
  got = jax.jit(lambda w: token_failures.clipping(w, LIMIT))(world)
  assert got['leak'] == 0 and got['accepted'] == pytest.approx(1)
  assert all(m['bias'] < 1e-14 for m in got['methods'].values())


@pytest.mark.slow
def test_kept_share_is_exact():
  rng = np.random.default_rng(0)
  statistic = np.round(rng.random(40), 1)  # with ties
  mass = rng.random(40)
  for share in (0.0, 0.25, 0.7, 1.0):
    keep = np.asarray(token_failures.kept_share(jnp.asarray(statistic), jnp.asarray(mass), share))
    np.testing.assert_allclose((keep * mass).sum(), share * mass.sum(), rtol=1e-12)
    order = np.argsort(statistic, kind='stable')
    assert (np.diff(keep[order]) <= 1e-12).all()
    assert all(np.ptp(keep[statistic == s]) == 0 for s in statistic)
  rounding = jnp.asarray([1e-17, 0.0, 3e-16])
  np.testing.assert_allclose(token_failures.kept_share(rounding, jnp.ones(3), 0.5), 0.5)


@pytest.mark.parametrize(
  'whole', [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_mask_is_judged_by_single_rollouts(world, whole):
  rng = np.random.default_rng(1)
  shape = world.reward.shape if whole else (*world.policy.shape[:2], 1)
  keep = (rng.random(shape) < 0.6).astype(float)
  got = jax.jit(token_failures.judge)(world, jnp.asarray(keep))
  b = np.asarray(token_failures.baseline(world))
  norm, _ = oracle.gradient_harm(world, jnp.asarray(keep), baseline=jnp.asarray(b))
  np.testing.assert_allclose(got['bias'], norm, rtol=1e-9)
  np.testing.assert_allclose(got['error'], abs(oracle.error(world, jnp.asarray(keep))), rtol=1e-9)
  V, T = token_failures.VOCAB, token_failures.HORIZON
  square, mean = 0.0, np.zeros(world.policy.shape)
  for mass, _, reward, x, path in responses(world):
    leaf = path[-1][0] - sum(V**t for t in range(len(path) - 1))
    leaf = (leaf * V + path[-1][1]) * V ** (T - len(path))  # EOS is token 0
    g = np.zeros(world.policy.shape)
    for row, _, ratio, score in path:
      m = keep[x, leaf] if whole else keep[x, row, 0]
      g[x, row] += m * ratio * (reward - b[x]) * score
    square, mean = square + mass * (g**2).sum(), mean + mass * g
  np.testing.assert_allclose(got['variance'], square - (mean**2).sum(), rtol=1e-9)


@pytest.mark.slow
def test_masks_without_mismatch_drop_at_random():
  world = one(token_failures.moved(np.random.default_rng(0), 1, 'dense', 0.0))
  got = jax.jit(functools.partial(token_failures.every_mask, fractions=(0.4,)))(world)
  relative = got['bias'][:, 0] / got['truth'][:, 0]
  expected = [0.0 if name == 'none' else 0.6 for name in failure_report.MASKS]
  np.testing.assert_allclose(relative, expected, atol=1e-12)


@pytest.mark.slow
def test_masks_keep_the_same_share_and_leave_the_worst_token_alone(world):
  found = jax.jit(token_failures.statistics)(world)
  for name, (statistic, mass) in found.items():
    keep = token_failures.kept_share(statistic, mass, 0.5)
    total = found['token'][1].sum()
    np.testing.assert_allclose(mass.sum(), total, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose((keep * mass).sum(), 0.5 * total, rtol=1e-12)
  kl = np.asarray(en.contexts(world).kl)
  for _, _, _, x, path in responses(world):
    rows = [row for row, *_ in path]
    for t, row in enumerate(rows):
      most = kl[x, rows[: t + 1]].max()
      np.testing.assert_allclose(found['prefix'][0][x, row], most, rtol=1e-12)
  # Proposition 4.1, and its twin: neither mask pulls on a token that it rejects.
  got = jax.jit(functools.partial(token_failures.every_mask, fractions=(0.3,)))(world)
  pull = dict(zip(failure_report.MASKS, got['pull'][:, 0], strict=True))
  assert pull['none'] > 1e-5 and pull['token'] == pull['prefix'] == pull['sequence'] == 0


@pytest.mark.slow
@pytest.mark.parametrize('share', [0.5, 1e-4])
def test_the_rare_prefix(share):
  world = one(token_failures.rare(np.random.default_rng(3), 1, share))
  got = jax.jit(token_failures.averages)(world)
  np.testing.assert_allclose(got['max_kl'], 1, rtol=1e-9)
  np.testing.assert_allclose(got['sequence_kl'], share * (token_failures.HORIZON - 1), rtol=1e-9)
  other = jax.jit(token_failures.averages)(
    one(token_failures.rare(np.random.default_rng(3), 1, 0.01))
  )
  np.testing.assert_allclose(got['harm_of_visit'], other['harm_of_visit'], rtol=1e-9)
  assert got['harm_of_visit'] > 0.1 and got['harm'] < got['b_star']


@pytest.mark.slow
def test_dilution():
  world = one(token_failures.rare(np.random.default_rng(3), 1, 0.1))
  short, long = (token_failures.diluted(world, total, LIMIT) for total in (3, 2001))
  assert [float(short[k]) for k in ('mean', 'max')] == [0, 0]
  assert [float(long[k]) for k in ('mean', 'max')] == [1, 0]


@pytest.mark.slow
def test_signed_means_cancel():
  world = one(token_failures.signed(np.random.default_rng(0), 1, 'cancelling'))
  c = en.contexts(world)
  values = sorted({round(float(x), 9) for x in c.kl[0]})
  np.testing.assert_allclose(values, [0, 0.1 * math.tanh(0.05), 2 * math.tanh(1)], atol=1e-8)
  got = jax.jit(lambda w: token_failures.cancelling(w, LIMIT, 0.05))(world)
  # Three of six up: the mean log-ratio is 0 though every token is far beyond the limit.
  p = 1 / (1 + math.exp(2))
  beyond = 0.5 * 20 * p**3 * (1 - p) ** 3
  np.testing.assert_allclose(got['beyond'] * got['accepted'], beyond, rtol=1e-9)
  np.testing.assert_allclose(got['accepted_by_max'], 0.5, rtol=1e-9)
  assert got['left']['signed mean'] > 10 * got['left']['max KL'] > 0
  np.testing.assert_allclose(got['left']['random'], got['accepted'], rtol=1e-9)
  none = one(token_failures.signed(np.random.default_rng(0), 1, 'no mismatch'))
  got = jax.jit(lambda w: token_failures.cancelling(w, LIMIT, 0.05))(none)
  assert got['accepted'] == pytest.approx(1) and got['beyond'] == 0


def published():
  return json.loads((failure.RESULTS / 'summary.json').read_text())


def test_verdict_follows_the_numbers():
  summary = published()
  text = failure_report.verdict(summary)
  assert 'PPO-clip leaks' in text and 'Removing the leak' not in text
  assert 'In expectation no mask beats none' in text and 'fades with it' in text
  assert 'NOT worse' not in text
  assert failure_report.sides({'mean': -0.1, 'se': 0.06}) == 'no different from'
  assert failure_report.sides({'mean': -0.1, 'se': None}) == 'no different from'
  assert failure_report.sides({'mean': -0.1, 'se': 0.04}) == 'less than'
  other = copy.deepcopy(summary)
  strong = other['clip']['3']
  strong['leak']['mean'], strong['no leak']['bias']['mean'] = 0.0, 0.1
  other['masks']['dense']['masks']['prefix']['0.7']['bias']['mean'] = 0.01
  other['masks']['dense']['sequence_minus_token'] = {'mean': 0.2, 'se': 0.01}
  other['averages']['by_share']['1e-06']['harm']['mean'] = 0.5
  other['signed']['strong']['left']['signed mean']['mean'] = 0.0
  text = failure_report.verdict(other)
  assert 'does NOT leak' in text and 'Removing the leak makes the bias smaller' in text
  assert 'Some mask lowers the bias' in text and 'leaves MORE than the token mask' in text
  assert 'does NOT fade' in text and 'NOT worse than max KL' in text


def test_published_table_is_that_of_the_published_summary():
  summary = published()
  assert summary['options']['seeds'] >= 5 and summary['options']['worlds'] >= 60
  table = (failure.RESULTS / 'table.md').read_text()
  parts = (
    failure_report.clip_table,
    failure_report.mask_table,
    failure_report.average_table,
    failure_report.signed_table,
  )
  for part in (*parts, failure_report.verdict):
    assert part(summary) in table


def run(monkeypatch, *arguments):
  monkeypatch.setattr(sys, 'argv', ['token_level_failure', *arguments])
  command.run(failure.TokenLevelFailure, failure.main)


@pytest.mark.slow
def test_the_whole_experiment_small(monkeypatch, tmp_path, capsys):
  small = (
    ('STRENGTHS', (0.0, 1.0)),
    ('RARE', (0.5, 1e-3)),
    ('TOTALS', (3000,)),
    ('SIGNED', failure_report.SIGNED[:2]),
  )
  for name, value in small:
    monkeypatch.setattr(failure if hasattr(failure, name) else failure_report, name, value)
  monkeypatch.setattr(failure_report, 'FRACTIONS', (0.7,))
  monkeypatch.setattr(token_failures.every_mask, '__defaults__', ((0.7,),))
  run(monkeypatch, *f'--directory {tmp_path} --seeds 2 --worlds 3'.split())
  assert 'PPO-clip leaks' in capsys.readouterr().out
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert set(summary) == {'command', 'options', 'clip', 'masks', 'averages', 'signed'}
  assert summary['clip']['1']['leak']['mean'] > 0 == summary['clip']['0']['leak']['mean']
  assert matplotlib.image.imread(tmp_path / 'figure.png').std() > 0.05


@pytest.mark.parametrize(
  'options, word', [(dict(seeds=0), 'seeds=0'), (dict(geometric=1.5), 'geometric=1.5')]
)
def test_bad_input(options, word):
  with pytest.raises(InputError, match=word):
    dataclasses.replace(failure.TokenLevelFailure(), **options)


def test_help_teaches(monkeypatch, capsys):
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, '--help')
  text = ' '.join(capsys.readouterr().out.replace('│', ' ').split())
  assert stop.value.code == 0
  for words in ("PPO-clip's leak", 'Limit of TRM-Max', 'standard errors over them'):
    assert words in text
