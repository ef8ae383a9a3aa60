"""The sweeps: what they refuse, what resuming repeats, what they say of planted numbers."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from experiments import decoding_filters as df
from experiments import estimators as es
from experiments import precision_ladder as pl
from experiments import routing_flips as rf
from experiments import staleness_sweep as st
from experiments.laboratory import sweep
from experiments.reports import estimators_report as er
from experiments.reports import filters_report, precision_report, routing_report
from trm_jax import divergences, measurements, policy, training
from trm_jax.exact import enumeration, oracle
from trm_jax.mismatch import decoding, fleet, precision
from trm_jax.training import loop
from trm_jax.types import InputError

BROKEN = training.Config(fleet=fleet.Fleet(broken_samples=1))
WARM = training.Config(temperature=0.5)
REPORTS = {df: filters_report, es: er, pl: precision_report, rf: routing_report}


@pytest.mark.parametrize(
  'kind, bad, words',
  [
    (st.StalenessSweep, dict(seeds=1), 'seeds=1'),
    (st.StalenessSweep, dict(config=BROKEN), 'fleet has no effect'),
    (st.StalenessSweep, dict(ages=(1, 2, 4)), 'must rise from 0'),
    (st.StalenessSweep, dict(ages=(0, 1, 1000)), 'steps=72'),
    (st.StalenessSweep, dict(limits=(0.2, 0.1)), 'limits'),
    (st.StalenessSweep, dict(config=training.Config(minibatches=2)), 'minibatches'),
    (rf.RoutingFlips, dict(shapes=('4:4',)), '4:4'),
    (rf.RoutingFlips, dict(shapes=('8:2', '8:2')), 'each once'),
    (rf.RoutingFlips, dict(sizes=(0.0, 0.1, 1.0)), 'sizes'),
    (rf.RoutingFlips, dict(alone=0.0), 'alone=0'),
    (pl.PrecisionLadder, dict(bits=(0, 3, 5)), '1..22'),
    (pl.PrecisionLadder, dict(bits=(5, 3, 1)), 'rise'),
    (pl.PrecisionLadder, dict(moves=(0, 5)), 'moves'),
    (df.DecodingFilters, dict(top_p=(1.5,)), 'top_p=1.5'),
    (df.DecodingFilters, dict(temperatures=(1.0,)), 'no filter'),
    (df.DecodingFilters, dict(top_k=(), top_p=(), min_p=()), 'all empty'),
    (df.DecodingFilters, dict(config=WARM), 'must be 1 here'),
    (es.Estimators, dict(names=('stuck_replica',)), 'mechanism'),
    (es.Estimators, dict(contexts=100), 'multiple of 128'),
    (es.Estimators, dict(lengths=(8, 4)), 'lengths'),
    (es.Estimators, dict(target=1.0), 'target=1.0'),
  ],
)
def test_settings_that_mean_nothing_are_refused(kind, bad, words):
  with pytest.raises(InputError, match=words):
    kind(**bad)


# Cells.


def test_resuming_repeats_no_finished_cell_and_another_sweep_is_refused(monkeypatch, tmp_path):
  monkeypatch.setattr(loop, 'Silent', types.SimpleNamespace)
  args, asked = sweep.Cells(directory=tmp_path, seeds=2), []

  def prepare(seed):
    asked.append(('seed', seed))

    def one(name):
      asked.append((seed, name))
      if len(asked) == 4:
        raise KeyboardInterrupt
      return {'x': seed + 0.5, 'y': [math.inf, math.nan], 'name': name}

    return one

  run = lambda args=args: sweep.measure(args, ('a', 'b', 'c'), range(3, 5), prepare)
  with pytest.raises(KeyboardInterrupt):
    run()
  kept = sorted(p.name for p in (tmp_path / 'cells').glob('seed*'))
  assert kept == ['seed3_a.json', 'seed3_b.json'] and not list(tmp_path.rglob('*.tmp'))
  found = run()
  assert asked[4:] == [('seed', 3), (3, 'c'), ('seed', 4), (4, 'a'), (4, 'b'), (4, 'c')]
  assert set(found) == {(s, n) for s in (3, 4) for n in 'abc'}
  assert found[4, 'b']['x'] == 4.5 and found[4, 'b']['name'] == 'b'
  assert found[3, 'a']['y'][0] == math.inf and math.isnan(found[3, 'a']['y'][1])
  run()
  assert len(asked) == 10
  with pytest.raises(InputError, match=r'has another config: .* and \d+ more; pass the same'):
    run(rf.RoutingFlips(directory=tmp_path))


def test_a_line_has_the_slope_of_the_points_that_are_there():
  assert sweep.line([0, 1, 2, 3], [1, 3, math.nan, 7]) == pytest.approx(2)
  assert math.isnan(sweep.line([0, 1], [1, math.inf]))
  assert sweep.known([1.0, math.nan, 3.0]) == {'mean': 2.0, 'se': pytest.approx(1.0)}
  assert math.isnan(sweep.known([math.nan, math.inf])['mean'])


# What the dials do.


def number(tree):
  return jax.tree.map(jnp.float32, tree)


@pytest.mark.slow
def test_traced_formats_are_those_of_the_simulator():
  draw = np.random.default_rng(0)
  x = jnp.asarray(draw.normal(size=(4, 300)) * 2.0 ** np.linspace(-20, 20, 300), jnp.float32)
  run = jax.jit(pl.rounded)
  for name, bits in pl.NAMED.items():
    np.testing.assert_array_equal(run(x, number(pl.grid(bits))), precision.round_to(x, name))
  np.testing.assert_array_equal(run(x, number(pl.OFF)), x)
  moved = run(x, number(pl.grid('e5m10', move=6)))
  np.testing.assert_array_equal(moved * 64, precision.round_to(x * 64, 'float16'))
  noise = jnp.asarray((np.arange(4000) + 0.5) / 4000, jnp.float32)
  many = pl.rounded(jnp.full(4000, 1.3), number(pl.grid('e8m2', dither=True)), noise=noise)
  assert set(np.unique(many)) == {1.25, 1.5}
  np.testing.assert_allclose(many.mean(), 1.3, rtol=1e-3)


@pytest.mark.parametrize(
  'by, settings',
  [
    (df.Filter(k=3.0), dict(top_k=3)),
    (df.Filter(p=0.8), dict(top_p=0.8)),
    (df.Filter(min_p=0.2), dict(min_p=0.2)),
    (df.Filter(temperature=1.5), dict(temperature=1.5)),
    (df.Filter(temperature=1.5, p=0.8), dict(temperature=1.5, top_p=0.8)),
    (
      df.Filter(temperature=1.5, p=0.8, late=1.0),
      dict(temperature=1.5, top_p=0.8, order=('top_k', 'top_p', 'min_p', 'temperature')),
    ),
  ],
)
def test_traced_filters_are_those_of_the_simulator(by, settings):
  scores = jnp.asarray(2 * np.random.default_rng(1).normal(size=(20, 7)), jnp.float32)
  expected = decoding.process(decoding.Decoding(**settings), scores)
  found = FILTERED(scores, number(by))
  np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
  kept = np.isfinite(expected)
  np.testing.assert_allclose(np.asarray(found)[kept], np.asarray(expected)[kept], rtol=1e-6)


FILTERED = jax.jit(df.filtered)


@pytest.mark.slow
def test_two_outcomes_are_exact_where_the_others_keep_their_proportions():
  draw = np.random.default_rng(2)
  p = jnp.asarray(2 * draw.normal(size=(50, 6)), jnp.float32)
  tokens = jnp.asarray(draw.integers(6, size=50), jnp.int32)
  moved = p + 0.7 * (tokens[:, None] == jnp.arange(6)[None])
  found = divergences.statistics(p, moved, tokens)
  two = es.two_outcomes(found.policy_logp, found.rollout_logp)
  np.testing.assert_allclose(two, found.kl, rtol=2e-4, atol=1e-7)
  other = divergences.statistics(p, jnp.asarray(moved[::-1]), tokens)
  two = es.two_outcomes(other.policy_logp, other.rollout_logp)
  assert (two <= other.kl + 1e-6).all() and two.mean() < 0.8 * other.kl.mean()


@pytest.mark.slow
def test_a_raw_surrogate_has_the_true_gradient_on_policy_and_no_ratios_elsewhere():
  draw = np.random.default_rng(3)
  with enumeration.float64():
    size = enumeration.size(vocab=3, horizon=2)
    logits, reward = draw.normal(size=(2, size, 3)), draw.uniform(size=(2, 9))
    on = enumeration.world(jnp.asarray(logits), jnp.asarray(logits), horizon=2, reward=reward)
    true = oracle.gradient(oracle.policy_objective, on)
    np.testing.assert_allclose(df._raw_slope(on), true, rtol=1e-9, atol=1e-12)
    other = jnp.asarray(draw.normal(size=logits.shape))
    off = enumeration.world(jnp.asarray(logits), other, horizon=2, reward=reward)
    p, q = (np.asarray(jax.nn.softmax(x)) for x in (jnp.asarray(logits), other))
    # By hand: mass of the rollout, score function of the policy.
    want = np.zeros_like(logits)
    mass = [0.5 * q[:, 0, i] * q[:, 1 + i, j] for i in range(3) for j in range(3)]
    mass = np.stack(mass, 1)
    advantage = mass * (reward - (mass * reward).sum())
    for s, (i, j) in enumerate((i, j) for i in range(3) for j in range(3)):
      for context, token in ((0, i), (1 + i, j)):
        want[:, context] += advantage[:, s, None] * (np.eye(3)[token] - p[:, context])
    np.testing.assert_allclose(df._raw_slope(off), want, rtol=1e-9, atol=1e-12)


# What they say.


def said(module, args, cells, tmp_path=None):
  """The verdict, once tables (and the figure, given a place) are made of the same summary."""
  summary = {'seeds': args.seeds} | module.summarise(args, cells)
  said = REPORTS.get(module, module)
  for part in said.PARTS:
    assert 'nan' not in part(summary)
  if tmp_path:
    path = said.draw(summary, tmp_path / 'figure.png')
    assert matplotlib.image.imread(path).std() > 0.05
  return said.verdict(summary)


def seeded(names, of, seeds=3):
  """Cells of planted numbers, 1 % apart between seeds."""
  return {(s, name): of(name, 1 + 0.01 * s) for s in range(seeds) for name in names}


def drift(power, gap):
  def of(name, jitter):
    k, kl = int(name), 1e-4 * max(int(name), 1e-4) ** power * jitter
    kept = [max(0.0, 1 - 0.01 * k)] * 4
    return {
      'kl': {'mean': kl, 'largest': 9 * kl, 'quantiles': [kl] * len(measurements.QUANTILES)},
      'tv': {'mean': kl**0.5},
      'abs_log_ratio': {'mean': kl**0.5},
      'chi2': {'mean': 2 * kl},
      'sequences': {'ess': 1 / (1 + k)},
      'reward': 0.5,
      'kept': kept,
      'kept_short': kept,
      'kept_long': [x - gap * jitter * (k > 0) for x in kept],
      'rejected_long': [math.nan if k == 0 else 0.4] * 4,
    }

  return of


def test_staleness_tells_drift_that_adds_up_from_a_random_walk(tmp_path):
  args = st.StalenessSweep(seeds=3)
  names = [str(age) for age in args.ages]
  text = said(st, args, seeded(names, drift(2, 0.1)), tmp_path)
  assert 'grows like k to the 2 ' in text and 'Claim that it adds up: yes' in text
  assert 'go first: yes' in text and 'keeps 10.1 ± 0.1 points less' in text
  text = said(st, args, seeded(names, drift(1, 0.0)))
  assert 'Claim that it adds up: NO' in text and 'go first: NO' in text


def routed(power, left, first):
  def of(name, jitter):
    dial = name.split('_')[1]
    layers = 6
    if dial.startswith('layer'):
      n = int(dial.removeprefix('layer'))
      rates = [0.05 if i == n else 0.01 * (i > n) for i in range(layers)]
      kl = (first if n == 0 else 1.0) * 1e-3 * jitter
    else:
      rates = [min(0.9, 0.3 * float(dial.removeprefix('all')) ** power * jitter)] * layers
      kl = 0.1 * rates[0]
    side = lambda kl: {
      'kl': {'mean': kl, 'largest': 9 * kl, 'quantiles': [kl] * len(measurements.QUANTILES)},
      'tail': {'index': 1.5},
      'log_ratio': kl**0.5,
      'kept': 0.5,
    }
    return {
      'own': side(kl),
      'experts': side(left * kl),
      'weights': side(1e-12),
      'flips': {'by_layer': rates, 'any_layer': 0.5},
      'margins': {'exceed': [[0.9, 0.8, 0.7, 0.5, 0.2, 0.0]] * layers},
      'kl_flipped': 5e-3,
      'kl_others': 1e-3,
    }

  return of


@pytest.mark.slow
def test_routing_says_what_was_planted(tmp_path):
  args = rf.RoutingFlips(seeds=3)
  names = [f'{s.replace(":", "k")}_{d}' for s in args.shapes for d in args.dials(s)]
  assert len(names) == 4 * 6 + 6
  text = said(rf, args, seeded(names, routed(1, 0.1, 3.0)), tmp_path)
  assert 'near-ties: yes' in text and 'make the mismatch: yes' in text
  assert '3.00 times' in text and 'first harms more: yes' in text
  text = said(rf, args, seeded(names, routed(0.5, 0.7, 0.5)))
  assert 'near-ties: NO for 8:2, 8:1' in text and 'make the mismatch: NO for 8:2' in text
  assert 'first harms more: NO, the last' in text


def rounding(slope, half, dither):
  def of(name, jitter):
    kl = 1e-12
    if '_m' in name and name.split('_m')[0] in (*pl.COMPONENTS, 'dithered'):
      kl = 0.05 * 2.0 ** (slope * int(name.split('_m')[1]))
      kl *= dither if name.startswith('dithered') else 1
    elif name.startswith('float16'):
      kl = 1.0 if '_move-' in name else 1e-4 / half
    elif name != 'off':
      kl = 1e-4
    kl *= jitter
    return {
      'kl': {'mean': kl, 'largest': 9 * kl},
      'kl_same': kl,
      'flipped': 0.1,
      'tail': {'index': 1.5},
      'tv': kl,
      'log_ratio': kl**0.5,
      'kept': 0.5,
    }

  return of


def test_precision_says_what_was_planted(tmp_path):
  args = pl.PrecisionLadder(seeds=3)
  text = said(pl, args, seeded(args.dials(), rounding(-2, 64, 2)), tmp_path)
  assert 'Claim of -2: yes' in text and '64 times the KL of float16' in text
  assert 'Claim of 64 = 4^3: yes' in text and 'Claim of 2: yes' in text
  assert '2^0 to 2^16, and loses at 2^-24, 2^-16, 2^-8' in text
  text = said(pl, args, seeded(args.dials(), rounding(-1, 8, 1)))
  for claim in ('Claim of -2: NO for weights', 'Claim of 64 = 4^3: NO', 'Claim of 2: NO'):
    assert claim in text


def cut(raw, replayed, late):
  def of(name, jitter):
    kl = 0.0 if name == 'none' else 0.1 * jitter
    kl *= late if name.endswith('late') else 1
    side = lambda kl, ratio: {
      'kl': {'mean': kl},
      'tv': kl,
      'abs_log_ratio': ratio,
      'kept': 1 - kl,
      'kept_k2': 1 - kl,
      'ess': 0.5,
    }
    return {
      'processed': side(kl, kl),
      'raw': side(kl, raw),
      'replay': side(1e-9, 1e-6),
      'chi2_infinite': 0.5,
      'true': {'processed': kl, 'raw': kl, 'replay': replayed * kl, 'trm': 2 * kl, 'kl': kl},
    }

  return of


@pytest.mark.slow
def test_filters_say_what_was_planted(tmp_path):
  args = df.DecodingFilters(seeds=3)
  text = said(df, args, seeded(args.dials(), cut(1e-7, 0.3, 1.5)), tmp_path)
  assert 'hide every filter: yes' in text and 'order matters: yes' in text
  assert 'for 12 of 12 of them. Claim that it mends them: yes' in text
  assert 'under top k 2, top k 3' in text
  text = said(df, args, seeded(args.dials(), cut(0.1, 0.9, 1.0)))
  assert 'hide every filter: NO' in text and 'order matters: NO' in text
  assert 'Claim that it mends them: NO' in text


def test_estimators_say_what_was_planted(tmp_path):
  args = es.Estimators(seeds=2, rows=400, lengths=(4, 16), limit=0.1, target=0.6)

  def cell(seed, noise):
    """Exact KL lognormal; sampled estimators lower by `noise` in the logarithm, ± as much."""
    draw = np.random.default_rng(seed)
    log = -6 + 1.5 * draw.normal(size=4000)
    values = {'exact': np.exp(log)}
    values |= {name: np.exp(log + noise * (draw.normal(size=4000) - 1)) for name in er.SAMPLED}
    for k in er.KEEP:
      values |= {f'lower K={k}': np.exp(log - 1e-5), f'upper K={k}': np.exp(log + 1e-5)}
    return es.judge(args, values, seed)

  names = [es._file(noise) for noise in args.noises]
  cells = lambda noise: {(s, n): c for s in range(2) for c in [cell(s, noise)] for n in names}
  text = said(es, args, cells(3.0), tmp_path)
  assert text.count('Claim of more than a fifth: yes') == 2
  assert 'Bounds from 64 tokens decide at least 100.0 % of the rows, and none wrongly' in text
  assert 'Claim of 99 %: yes' in text
  text = said(es, args, cells(1e-4))
  assert text.count('Claim of more than a fifth: NO') == 2
  found = cells(1e-4)[0, names[0]]['rows']['16']
  assert found['calibrated']['k2']['kept'] == pytest.approx(0.6, abs=0.1)
  assert found['nominal']['exact']['false_accept'] == 0


def test_the_largest_of_a_row_grows_with_it_and_rates_are_by_the_exact_decision():
  values = np.arange(10.0)[None]
  found = es.largest(values, np.random.default_rng(0), 50, (1, 5, 400))
  assert (np.diff(found[:, 0], axis=0) >= 0).all() and (found[2] == 9).all()
  assert found[0].mean() < 7
  found = es.rates(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool))
  assert found == {'kept': 0.5, 'false_accept': 1 / 3, 'false_reject': 0.0}


# Whole runs.


@pytest.mark.slow
def test_a_whole_run_of_estimators_and_its_bounds_hold(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(er, 'KEEP', (1, 64))  # half of the compilation
  few = tuple(n for n in er.ESTIMATORS if not n.endswith(('=4', '=16')))
  monkeypatch.setattr(er, 'ESTIMATORS', few)
  args = es.Estimators(
    directory=tmp_path,
    names=(),
    vocabulary=1024,
    contexts=128,
    rows=20,
    lengths=(4, 32),
    limit=5e-3,
    seeds=2,
  )
  es.main(args)
  assert 'Claim of 99 %' in capsys.readouterr().out
  for name in ('summary.json', 'table.md', 'figure.png'):
    assert (tmp_path / name).stat().st_size > 100
  values = es.bank(args, es.EVERY, 0)
  for k in er.KEEP:
    assert (values[f'lower K={k}'] <= values['exact'] + 1e-7).all()
    assert (values['exact'] <= values[f'upper K={k}'] + 1e-7).all()
  # Normal noise of standard deviation s on every score: KL about s^2 / 2.
  assert 1e-4 < values['exact'].mean() < 5e-3
  assert (values['binary'] <= values['exact'] * 1.01 + 1e-6).all()


TINY = training.Config(
  task='toy_task',
  steps=3,
  prompts=2,
  samples=2,
  policy=policy.PolicyConfig(
    width=8, layers=1, heads=2, kv_heads=2, head_width=4, mlp_width=8, experts=3
  ),
  optimizer=training.Optimizer(learning_rate=1e-2, warmup=0),
  warm_start=training.WarmStart(steps=1, batch=4),
)


@pytest.mark.slow
@pytest.mark.parametrize(
  'module, make, off, on',
  [
    (st, functools.partial(st.StalenessSweep, ages=(0, 1, 3)), '0', '3'),
    (rf, functools.partial(rf.RoutingFlips, shapes=('3:1',)), '3k1_all0.003', '3k1_all1'),
    (pl, pl.PrecisionLadder, 'off', 'float8_e5m2'),
    (df, df.DecodingFilters, 'none', 'top_k_2'),
  ],
)
def test_a_whole_run_measures_what_its_dial_does(module, make, off, on, tmp_path):
  config = dataclasses.replace(TINY, data_dir=str(tmp_path / 'data'))
  args = make(directory=tmp_path / 'run', seeds=2, config=config)
  module.main(args)
  cell = lambda name: sweep.read(args.directory / 'cells' / f'seed0_{name}.json')
  kl = lambda c: (
    next(c[k]['kl'] for k in ('own', 'processed') if k in c) if 'kl' not in c else c['kl']
  )
  assert kl(cell(off))['mean'] < 1e-5 < kl(cell(on))['mean']
  assert (args.directory / 'figure.png').exists()
