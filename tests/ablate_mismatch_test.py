"""The ablation: what it refuses, what resuming repeats, what it says of planted numbers."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from experiments import ablate_mismatch
from experiments.laboratory import small_world, sweep
from experiments.reports import ablation_report
from trm_jax import policy, training
from trm_jax.exact import enumeration, oracle
from trm_jax.measurements import attribution
from trm_jax.mismatch import decoding, fleet, heavy_tail, routing, staleness
from trm_jax.runs import recording
from trm_jax.training import command, loop
from trm_jax.types import InputError

Args = ablate_mismatch.AblateMismatch
TINY = policy.PolicyConfig(
  width=8, layers=1, heads=2, kv_heads=2, head_width=4, mlp_width=8, experts=2
)


BROKEN = fleet.Fleet(broken_samples=1)
MORE = training.Config(steps=4)


@pytest.mark.parametrize(
  'bad, words',
  [
    (dict(sources=('precision', 'gravity')), 'gravity'),
    (dict(sources=('precision', 'reporting')), 'engine.reporting is healthy'),
    (dict(sources=('precision',)), 'two or more'),
    (dict(sources=('precision', 'precision')), 'each once'),
    (dict(seeds=1), 'seeds=1'),
    (dict(limit=0.0), 'limit=0'),
    (dict(config=MORE), 'steps=4'),
    (dict(config=dataclasses.replace(MORE, steps=8, fleet=BROKEN)), '--engine'),
    (dict(half=True, sources=('precision', 'routing')), 'leave out --half'),
    (dict(engine=fleet.Engine(), sources=('routing', 'decoding')), 'engine.routing is healthy'),
    (
      dict(
        engine=dataclasses.replace(ablate_mismatch.ENGINE, routing=routing.Routing(capacity=1.0))
      ),
      'capacity=1.0',
    ),
  ],
)
def test_settings_that_mean_nothing_are_refused(bad, words):
  with pytest.raises(InputError, match=words):
    Args(**bad)


def test_the_command_line_refuses_before_any_compute(monkeypatch, capsys, tmp_path):
  directory = tmp_path / 'run'
  line = ['ablate_mismatch', '--directory', str(directory), '--policy.experts', '0']
  monkeypatch.setattr(sys, 'argv', line)
  with pytest.raises(SystemExit) as stop:
    command.run(Args, lambda args: pytest.fail('started'))
  out = capsys.readouterr()
  text = ' '.join((out.err + out.out).replace('│', ' ').split())
  assert stop.value.code == 2 and 'policy.experts=0 is a dense model' in text
  assert 'Traceback' not in text and not directory.exists()


def test_a_dense_policy_can_do_without_routing():
  dense = training.Config(steps=8, policy=dataclasses.replace(TINY, experts=0))
  args = Args(sources=('precision', 'staleness'), config=dense)
  assert args.served.routing == routing.Routing() and len(args.design) == 4
  assert args.age == 8
  with pytest.raises(InputError, match='experts=0'):
    Args(config=dense)


# The enumerated policy.

SMALL = small_world.config_of(TINY)
ALL = fleet.Engine(
  routing=routing.Routing(jitter=2.0),
  staleness=staleness.Staleness(steps=2),
  decoding=decoding.Decoding(top_k=3),
  heavy_tail=heavy_tail.HeavyTail(scale=1.0),
)
NAMES = ('routing', 'staleness', 'decoding', 'heavy_tail')


def strengths(*on):
  return {n: jnp.float32(n in on) for n in NAMES}


@functools.cache
def trained():
  """A pair two steps of exact ascent apart."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(small_world, 'LEVEL', 0.3)
    patch.setattr(small_world, 'RATE', 1e-2)
    small_world._trainer.cache_clear()
    pair = small_world.train(SMALL, 0, 2)
  small_world._trainer.cache_clear()
  return pair


@pytest.mark.slow
def test_the_small_engine_is_the_policy_where_all_is_off_and_noisy_where_it_is_on():
  pair, key = trained(), jax.random.key(3)
  assert (SMALL.layers, SMALL.experts, SMALL.width) == (1, 2, 16)
  tables = small_world.tables(SMALL, ALL)
  own, off = tables(pair.params, pair.old, strengths(), key)
  np.testing.assert_allclose(off, own, atol=2e-6)
  _, stale = tables(pair.params, pair.old, strengths('staleness'), key)
  np.testing.assert_allclose(stale, tables(pair.old, pair.old, strengths(), key)[0], atol=2e-6)
  served = np.asarray(tables(pair.params, pair.old, strengths(*NAMES), key)[1])
  assert (np.isinf(served).sum(-1) == 2).all()  # top-3 of five tokens
  # Noise is one function of the context, and another one under another key.
  again = tables(pair.params, pair.old, strengths(*NAMES), key)[1]
  other = tables(pair.params, pair.old, strengths('routing'), jax.random.key(4))[1]
  np.testing.assert_array_equal(again, served)
  assert (np.asarray(other) != np.asarray(own)).any(-1).mean() > 0.2
  # Against one pass over a whole response: prompt 1 is (1, 2), its response 0 3 4.
  tokens = jnp.array([[1, 2, 0, 3, 4]], jnp.int32)
  scores = jax.jit(
    lambda p: policy.logits(p, policy.apply(p, SMALL, tokens, start=jnp.zeros(1, jnp.int32))[0])
  )(pair.params)
  v = small_world.VOCAB
  places = [0, 1 + 0, 1 + v + 3, 1 + v + v * v + 3 * v + 4]
  np.testing.assert_allclose(own[1, jnp.array(places)], scores[0, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_training_climbs_and_the_truth_agrees_with_the_oracle():
  pair, key = trained(), jax.random.key(0)
  judge = small_world.judge(SMALL, ALL)
  off, on = (judge(pair, strengths(*x), key, 0.05) for x in ((), ('staleness',)))
  assert off['objective'] > 0.3 and off['kept'] == 1
  assert max(off['error'], off['bias'], off['kl']) < 1e-5 < on['error']
  assert on['bias'] > 0.01
  own, stale = small_world.tables(SMALL, ALL)(pair.params, pair.old, strengths('staleness'), key)
  with enumeration.float64():
    world = enumeration.world(own, stale, horizon=small_world.HORIZON, reward=pair.reward)
    rise = float(oracle.policy_objective(world) - oracle.rollout_objective(world))
    kl = float(oracle.divergences(world).sequence_kl) / small_world.HORIZON
    np.testing.assert_allclose(on['error'], abs(rise - float(oracle.surrogate(world))), rtol=1e-6)
    np.testing.assert_allclose(on['kl'], kl, rtol=1e-9)
    np.testing.assert_allclose(on['objective'], float(oracle.policy_objective(world)), rtol=1e-9)


# A whole run, interrupted.

CONFIG = training.Config(
  task='toy_task',
  steps=1,
  prompts=2,
  samples=2,
  policy=TINY,
  warm_start=training.WarmStart(steps=1, batch=4),
)
ENGINE = fleet.Engine(
  staleness=staleness.Staleness(steps=1), heavy_tail=heavy_tail.HeavyTail(scale=2.0)
)


def interrupted(monkeypatch, tmp_path):
  """A run of 2 sources x 2 seeds that was cut off in its fourth cell; (args, cells judged)."""
  config = dataclasses.replace(CONFIG, data_dir=str(tmp_path / 'data'))
  sources = ('staleness', 'heavy_tail')
  args = Args(directory=tmp_path / 'run', seeds=2, sources=sources, engine=ENGINE, config=config)
  judged = []

  def judge(*_):
    def run(pair, strength, key, limit):
      judged.append({k: int(v) for k, v in strength.items()})
      if len(judged) == 4:
        raise KeyboardInterrupt
      harm = float(strength['staleness'])
      return dict(objective=0.5, kl=harm, error=harm, kept=1.0, bias=harm, bias_trm=2 * harm)

    return run

  # The truth has its own test.
  monkeypatch.setattr(small_world, 'judge', judge)
  monkeypatch.setattr(small_world, 'train', lambda *_: None)
  with pytest.raises(KeyboardInterrupt):
    ablate_mismatch.main(args)
  return args, judged


def files(args):
  cells = args.directory / 'cells'
  assert not list(cells.glob('*.tmp'))
  return {p.name: p.stat().st_mtime_ns for p in cells.glob('seed*.json')}


@pytest.mark.slow
def test_a_resumed_run_repeats_no_finished_cell(monkeypatch, tmp_path):
  """Stops after three cells; the second start measures the other five and reads the three."""
  measured, shown = [], []

  class Display:
    def __init__(self, total, label, start):
      shown.append((total, label, start))

    def update(self, step, **values):
      shown.append(step)

    def close(self):
      pass

  def cell(params, old, strength, prompts, starts, key):
    measured.append(strength)
    names = ('kl', 'log_kl', 'max_kl', 'tv', 'log_ratio', 'rejected', 'reward')
    return dict.fromkeys(names, strength['heavy_tail'] + len(measured) * 1e-3), PROFILE

  monkeypatch.setattr(recording, 'Progress', Display)
  monkeypatch.setattr(ablate_mismatch, 'cell_program', lambda *_: cell)
  monkeypatch.setattr(sweep, 'snapshots', lambda *_: (None, None))
  monkeypatch.setattr(loop, 'warm_start', lambda *_: None)
  args, judged = interrupted(monkeypatch, tmp_path)
  before = files(args)
  assert set(before) == {'seed0_00.json', 'seed0_10.json', 'seed0_01.json'}
  with pytest.raises(InputError, match='--resume'):
    ablate_mismatch.main(args)
  with pytest.raises(InputError, match='limit'):
    ablate_mismatch.main(dataclasses.replace(args, resume=True, limit=0.1))
  ablate_mismatch.main(dataclasses.replace(args, resume=True))
  assert len(judged) == len(measured) == 4 + 5
  assert judged[3] == judged[4]  # only the one that was cut off
  after = files(args)
  assert len(after) == 8 and {k: after[k] for k in before} == before
  label = '4 cells x 2 seeds'
  assert shown == [(8, label, 0), 1, 2, 3, (8, label, 3), 4, 5, 6, 7, 8]
  ablate_mismatch.main(dataclasses.replace(args, resume=True))
  assert len(measured) == 9 and files(args) == after
  summary = json.loads((args.directory / 'summary.json').read_text())
  truth = summary['responses']['true_bias']
  assert truth['ranking']['first'] == 'staleness'
  assert truth['sources']['staleness']['shapley']['mean'] == 1
  assert matplotlib.image.imread(args.directory / 'figure.png').std() > 0.05


@pytest.mark.slow
def test_a_whole_run_measures_what_its_engine_does(monkeypatch, tmp_path):
  args, _ = interrupted(monkeypatch, tmp_path)
  ablate_mismatch.main(dataclasses.replace(args, resume=True))
  cell = lambda name: sweep.read(args.directory / 'cells' / name)['responses']
  healthy, stale, noisy = (cell(f'seed1_{on}.json') for on in ('00', '10', '01'))
  assert healthy['kl'] < 1e-10 and healthy['rejected'] == 0 and healthy['log_kl'] == -6
  assert noisy['kl'] > 1e-4 and noisy['log_ratio'] > 1e-2
  assert stale['kl'] < noisy['kl']  # the first RL step has a learning rate of 0


# What it says.


def planted(kl, bias, sources=('precision', 'routing', 'decoding'), seeds=3):
  """Cells whose responses are additive with these effects, up to noise and a factor a seed."""
  design, rng = attribution.full(3), np.random.default_rng(0)
  cells = {}
  for s in range(seeds):
    for c, on in enumerate(design):
      at = lambda effects, on=on: float(on @ np.array(effects) * (1 + 0.01 * rng.normal()))
      values = dict.fromkeys(ablation_report.RESPONSES, 0.0)
      values |= dict(kl=at(kl), true_kl=at(kl), true_bias=at(bias), true_bias_trm=2 * at(bias))
      values |= dict(log_kl=np.log10(max(at(kl), 1e-6)), true_objective=0.5, max_kl=np.inf)
      cells[s, c] = {'responses': values, 'measured': PROFILE}
  return sources, design, cells


PROFILE = {
  'tail': {'kl': {'index': 2.0}},
  'sequences': {'ess': 0.5, 'cancellation': {'mean': 0.2}},
  'correlation': 0.9,
  'shift': {'sigma': [0.1] * 5},
}


def test_the_verdict_names_what_was_planted():
  summary = ablation_report.summarise(*planted((0.01, 0.05, 0.02), (0.01, 0.0, 0.3)))
  summary['options'] = {'limit': 0.05}
  found = summary['responses']
  assert found['true_bias']['ranking']['first'] == 'decoding'
  assert found['kl']['ranking']['first'] == 'routing'
  np.testing.assert_allclose(found['kl']['sources']['routing']['share']['mean'], 5 / 8, rtol=0.05)
  zero = found['true_bias']['sources']['routing']['shapley']
  assert abs(zero['mean']) < 4 * zero['se'] + 1e-3
  assert found['kl']['mixed']['mean'] < 0.01 < 0.2 < found['log_kl']['mixed']['mean']
  text = ablation_report.verdict(summary)
  for words in (
    'Most harmful, by the true gradient bias: decoding with 97',
    'Claim that KL finds the culprit: NO',
    'separated',
    'Not finite in some cell, left out: max_kl',
    'Where TRM loses',
  ):
    assert words in text, words
  agreeing = ablation_report.summarise(*planted((0.01, 0.05, 0.02), (0.0, 0.1, 0.0)))
  agreeing['options'] = {'limit': 0.05}
  assert 'culprit: yes' in ablation_report.verdict(agreeing)
  for part in ablation_report.PARTS:
    assert 'nan' not in part(summary)
