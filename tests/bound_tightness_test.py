"""The tightness experiment: exact worst cases by brute force, no violations, honest words."""

import copy
import dataclasses
import itertools
import json
import math
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from experiments import bound_tightness as tight
from experiments.laboratory import random_worlds
from experiments.reports import tightness_report
from trm_jax.exact import enumeration as en
from trm_jax.exact import oracle
from trm_jax.training import command

SHAPES = ((2, 2, 2, 0), (1, 2, 3, None))
FEW = tight.BoundTightness(worlds=5, policies=1, steps=8)


@pytest.fixture(autouse=True)
def exact(request):
  if 'monkeypatch' in request.fixturenames:
    yield
  else:
    with en.float64():
      yield


@pytest.fixture(scope='module')
def random():
  with en.float64():
    return random_worlds.random_worlds(FEW, SHAPES, chunk=3)


def small(monkeypatch):
  """A world of policies and shapes that compiles in seconds."""
  monkeypatch.setattr(tight, 'CONFIG', dataclasses.replace(tight.CONFIG, layers=1, experts=0))
  monkeypatch.setattr(tight, 'PROMPTS', tight.PROMPTS[:1])
  monkeypatch.setattr(tight, 'HORIZON', 3)


@pytest.mark.parametrize(
  'base', [pytest.param(0.5, marks=pytest.mark.slow), pytest.param(0.2, marks=pytest.mark.slow)]
)
def test_binary_worst_case_by_brute_force(base):
  """Every response of T tokens, every reward: 2^T sums that the binomial shortcut must match."""
  T, kl = 5, 0.3
  found = tight.binary(T, kl, base)
  h = tight.shift(kl / T, base)
  p, q = (1 - base, base), (1 - base - h, base + h)
  assert sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) == pytest.approx(kl / T)
  parts, seq_tv = [], 0.0
  for y in itertools.product((0, 1), repeat=T):
    mass, rho = math.prod(p[v] for v in y), [q[v] / p[v] for v in y]
    parts.append(mass * (math.prod(rho) - 1 - sum(r - 1 for r in rho)))
    seq_tv += mass * abs(math.prod(rho) - 1) / 2
  assert found['worst'] == pytest.approx(sum(x for x in parts if x > 0), rel=1e-9)
  assert found['worst_negative'] == pytest.approx(found['worst'], rel=1e-9)
  # The oracle agrees, and no other reward does more harm.
  table = lambda side: np.broadcast_to(np.log(side), (1, en.size(vocab=2, horizon=T), 2))
  world = lambda r: en.world(table(q), table(p), horizon=T, reward=r)
  worst = world((np.array(parts) > 0).astype(float)[None])
  delta = jax.jit(oracle.delta)
  np.testing.assert_allclose(abs(delta(worst)), found['worst'], rtol=1e-9)
  rng = np.random.default_rng(0)
  for _ in range(20):
    assert abs(delta(world(rng.random((1, 2**T))))) < found['worst']
  np.testing.assert_allclose(oracle.divergences(worst).sequence_tv, seq_tv, rtol=1e-9)
  assert found['worst'] < found['budget'] and found['worst'] < found['b_star']


@pytest.mark.slow
def test_known_values():
  """B*/2 is 88 times the exact worst case at T = 4096, the L2 bound 1.47 times; 15.5 at 128."""
  r = tight.binary(4096, 0.01)
  assert [float(f'{r[k]:.3g}') for k in ('worst', 'b_star', 'budget')] == [0.00483, 0.427, 0.00709]
  assert r['b_star'] / r['worst'] == pytest.approx(88, abs=0.5)
  r = tight.binary(128, 0.01)
  assert r['b_star'] / r['worst'] == pytest.approx(15.5, abs=0.05)
  # Gaussian limit: Y = s^2 (Z^2 - 1) / 2 with s^2 = 2 KL, and E|Z^2 - 1| = 4 phi(1).
  limit = 0.02 * math.exp(-0.5) / math.sqrt(2 * math.pi)
  assert tight.binary(16384, 0.01)['worst'] == pytest.approx(limit, rel=5e-3)


@pytest.mark.slow
def test_rates():
  found = tight.binary_tokens(lengths=(64, 256, 1024), divergences=(0.01,))
  token, whole = found['exponents_fixed_token'], found['exponents_fixed_sequence']
  assert token['worst'] == pytest.approx(1, abs=0.02)
  assert token['b_star'] == pytest.approx(1.5, abs=0.03)
  assert whole['worst'] == pytest.approx(0, abs=0.01)
  assert whole['b_star'] == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_worst_reward_is_the_worst_of_all_of_them():
  rng = np.random.default_rng(1)
  batch = random_worlds.draw(rng, (1, 2, 2, None), 3)
  found = jax.jit(jax.vmap(random_worlds.measure))(batch)
  every = np.array(list(itertools.product((0.0, 1.0), repeat=4)))[:, None]
  for n in range(3):
    world = jax.tree.map(lambda x, n=n: x[n], batch)
    delta = jax.vmap(lambda r, w=world: oracle.delta(dataclasses.replace(w, reward=r)))
    np.testing.assert_allclose(
      found['sides']['worst']['error'][n], np.abs(delta(jnp.asarray(every))).max(), rtol=1e-12
    )


@pytest.mark.slow
def test_sampled_bounds_by_rows():
  """Expectations over responses, one by one."""
  batch = random_worlds.draw(np.random.default_rng(2), (2, 2, 3, 0), 8)
  far = int(jax.vmap(oracle.divergences)(batch).sequence_kl.argmax())
  world = jax.tree.map(lambda x: x[far], batch)
  got = jax.jit(random_worlds.sampled)(world, world.reward)
  rows = en.rows(world)
  mass = np.asarray(rows.rollout_mass)
  rho, tv, kl = (np.asarray(getattr(rows.divergences, k)) for k in ('log_ratio', 'tv', 'kl'))
  rho = np.exp(np.where(mass[:, None] > 0, rho, 0))
  future = jensen = 0.0
  for t in range(3):
    move = mass * np.abs(rho[:, t] - 1)
    future += (move * tv[:, t + 1 :].sum(-1)).sum()
    jensen += math.sqrt(move.sum() / 2 * (move * kl[:, t + 1 :].sum(-1)).sum())
  moment = (mass * (rho.prod(-1) - 1 - (rho - 1).sum(-1)) ** 2).sum()
  assert min(future, jensen, moment) > 1e-3
  np.testing.assert_allclose(got['sampled_future_tv'], future, rtol=1e-10)
  np.testing.assert_allclose(got['jensen_pinsker'], jensen, rtol=1e-10)
  np.testing.assert_allclose(got['l2'], math.sqrt(moment) / 2, rtol=1e-7)
  reward = np.asarray(rows.reward).reshape(2, -1)
  weight = mass.reshape(2, -1) / np.asarray(world.prompts)[:, None]
  variance = (weight * reward**2).sum(-1) - (weight * reward).sum(-1) ** 2
  sd = math.sqrt((np.asarray(world.prompts) * variance).sum())
  np.testing.assert_allclose(got['l2_sd_of_reward'], sd * math.sqrt(moment), rtol=1e-7)


@pytest.mark.slow
def test_no_bound_is_violated(random):
  assert random['violations'] == {} and random['worlds'] == 10
  assert random['checks'] == 2 * 10 * len(random['largest_share']) > 500
  assert random['identity_off_by'] < 1e-14 and random['worst_is_half_mean_abs_off_by'] < 1e-14
  assert sum(random['count'].values()) == 10
  for name in ('b_star', 'b_star_tight', 'budget', 'pointwise_ratio', 'prefix_budget', 'l2'):
    assert 0 < random['largest_share'][name] <= 1 + 1e-9
  for q in random['sides']['worst']['b_star']:
    assert q is None or (1 <= q[0] <= q[1] <= q[2])


def test_a_wrong_bound_is_counted():
  out = {'checks': 0, 'violations': {}}
  errors = np.array([0.0, 1.0, 2.0])
  random_worlds.tally(out, 'right', errors, errors)
  random_worlds.tally(out, 'wrong', errors, np.array([0.0, 1.0, 1.9]))
  assert out == {'checks': 6, 'violations': {'wrong': 1}}


@pytest.mark.slow
def test_a_trained_policy(monkeypatch):
  small(monkeypatch)
  engines = {k: tight.ENGINES[k] for k in ('none', 'bf16 weights', 'stale by 8 steps')}
  with en.float64():
    found = tight.trained_policies(FEW, engines)
  assert found['violations'] == {} and found['checks'] > 100
  none, old = found['engines']['none'], found['engines']['stale by 8 steps']
  assert none['worst']['mean'] == none['bounds']['b_star']['mean'] == 0
  assert 0 < found['engines']['bf16 weights']['worst']['mean'] < old['worst']['mean']
  assert old['error']['mean'] <= old['worst']['mean'] <= old['bounds']['min_of_all']['mean']


def test_verdict_follows_the_numbers():
  summary = json.loads((tight.RESULTS / 'summary.json').read_text())
  text = tightness_report.verdict(summary)
  assert 'Violations: 0 of' in text and 'no bound was ever wrong' in text
  assert 'is an artefact of the proof' in text
  other = copy.deepcopy(summary)
  other['random']['violations'] = {'coupling, worst reward': 3}
  other['binary']['fixed_sequence']['0.01'][-1]['worst'] *= 10
  text = tightness_report.verdict(other)
  assert 'Violations: 3 of' in text and 'A BOUND IS WRONG' in text
  assert 'NOT shown to be an artefact' in text


def test_published_table_is_that_of_the_published_summary():
  summary = json.loads((tight.RESULTS / 'summary.json').read_text())
  assert summary['random']['worlds'] >= 400 and summary['policy']['checks'] > 1000
  table = (tight.RESULTS / 'table.md').read_text()
  for part in (
    tightness_report.quantiles,
    tightness_report.growth,
    tightness_report.mismatches,
    tightness_report.verdict,
  ):
    assert part(summary) in table


def run(monkeypatch, *arguments):
  monkeypatch.setattr(sys, 'argv', ['bound_tightness', *arguments])
  command.run(tight.BoundTightness, tight.main)


@pytest.mark.slow
def test_the_whole_experiment_small(monkeypatch, tmp_path, capsys):
  published = json.loads((tight.RESULTS / 'summary.json').read_text())
  monkeypatch.setattr(tight, 'trained_policies', lambda args: published['policy'])
  monkeypatch.setattr(random_worlds.random_worlds, '__defaults__', (SHAPES[:1], 3))
  monkeypatch.setattr(tight.binary_tokens, '__defaults__', ((16, 64), (0.01,)))
  run(monkeypatch, *f'--directory {tmp_path} --worlds 3'.split())
  assert 'Violations: 0 of' in capsys.readouterr().out
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert set(summary) == {'command', 'options', 'random', 'binary', 'policy'}
  assert matplotlib.image.imread(tmp_path / 'figure.png').std() > 0.05
  assert not jax.config.jax_enable_x64


@pytest.mark.parametrize(
  'arguments, word', [('--worlds 0', 'worlds=0'), ('--steps 3', 'steps=3'), ('--seed x', 'x')]
)
def test_bad_input(monkeypatch, capsys, tmp_path, arguments, word):
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, '--directory', str(tmp_path / 'new'), *arguments.split())
  out = capsys.readouterr()
  assert stop.value.code == 2 and word in out.err + out.out
  assert not (tmp_path / 'new').exists()


def test_help_teaches(monkeypatch, capsys):
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, '--help')
  text = ' '.join(capsys.readouterr().out.replace('│', ' ').split())
  assert stop.value.code == 0
  for words in ('exact worst case against T', 'Random worlds of each', 'Adam steps'):
    assert words in text
