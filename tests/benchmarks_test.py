"""The benchmarks at toy sizes: that forms agree, that figures are what their names say."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import divergences, linear_head, measure
from trm_jax.types import InputError

NAN = np.nan
TOY = dict(sizes=('6x40',), dtypes=('float32',), rounds=4, resident=False)


def measured(**seconds):
  seconds = {name: np.array(s, float) for name, s in seconds.items()}
  temporaries = {'slow': 400, 'fast': 4, 'torch': None}
  case = measure.Case(positions=2, vocabulary=3)
  return measure.Measured(case=case, seconds=seconds, temporaries=temporaries, resident={})


def test_ratios_are_paired_by_round():
  found = measured(slow=[10, 200, 30, 40, 50], fast=[1, 10, 3, 8, 25])
  # The ratio of the medians would be 5.
  assert found.ratio('slow', 'fast') == measure.Ratio(5.0, 10.0, 10.0)
  assert found.ratio('slow', 'torch') is None


def test_ratios_leave_out_rounds_in_which_one_form_did_not_run():
  found = measured(slow=[8, NAN, NAN, 6], fast=[2, 1, NAN, 1])
  assert found.ratio('slow', 'fast') == measure.Ratio(4.5, 5.0, 5.5)
  assert measured(slow=[1, NAN], fast=[NAN, 1]).ratio('slow', 'fast') is None


def test_share_of_temporaries():
  found = measured()
  assert found.share('fast', 'slow') == 0.01
  assert found.share('torch', 'slow') is None
  assert found.share('slow', 'torch') is None
  assert found.share('absent', 'slow') is None


@pytest.mark.parametrize('value, met', [(2.0, True), (2.01, False), (None, None), (NAN, False)])
def test_goal(value, met):
  goal = measure.Goal('a', value, 2.0)
  assert goal.met is met
  assert str(goal).startswith({True: 'yes', False: 'NO', None: '-'}[met])


def test_rounds_interleave_and_rotate():
  calls, ticks = [], []
  call = lambda name: functools.partial(calls.append, name)
  forms = {'a': (call('a'), 1), 'b': (call('b'), 1), 'c': (call('c'), 3)}
  seconds = measure.interleave(forms, 4, ticks.append)
  assert ''.join(calls) == 'abc' + 'ba' + 'ab' + 'abc'
  assert ticks == calls
  assert np.isnan(seconds['c']).tolist() == [False, True, True, False]
  assert all(s >= 0 for s in seconds['a'])


def test_sizes_times_dtypes():
  found = measure.cases(measure.Command(sizes=('2x3', '40x500')))
  assert [str(case) for case in found] == [
    'N=2 V=3 float32',
    'N=2 V=3 bfloat16',
    'N=40 V=500 float32',
    'N=40 V=500 bfloat16',
  ]


@pytest.mark.parametrize(
  'change, name',
  [
    (dict(sizes=('2048',)), 'sizes=2048 '),
    (dict(sizes=('0x8',)), 'sizes=0x8 '),
    (dict(sizes=('2x3x4',)), 'sizes=2x3x4 '),
    (dict(rounds=0), 'rounds=0 '),
  ],
)
def test_bad_input_is_named(change, name):
  with pytest.raises(InputError, match=name):
    measure.cases(measure.Command(**change))


def test_a_save_file_that_cannot_be_is_refused_before_any_compute(tmp_path):
  with pytest.raises(InputError, match='save='):
    measure.cases(measure.Command(save=tmp_path / 'no' / 'file.json'))


def test_table():
  found = measure.table(['form', 'ms'], [['a', '10'], ['longer', '9']], markdown=True)
  lines = ['| form   | ms |', '| ------ | -: |', '| a      | 10 |', '| longer |  9 |']
  assert found == '\n'.join(lines)
  plain = measure.table(['form', 'ms'], [['a', '10']], markdown=False)
  assert plain == 'form  ms\na     10'


def test_missing_packages_are_said():
  assert measure.peer('x', 'no_such_package', None).prepare is None
  assert measure.peer('x', 'json', divergences.prepare_torch).prepare is not None
  assert measure.row(measured(), 'fast', ('slow',), 'slow')[:3] == ['fast', 'not installed', '']


BIG = 48 * measure.MIB


def nothing_large(case):
  return (jnp.zeros(case.positions),)


def with_a_large_temporary(case):
  def prepare(inputs):
    return measure.Ready(lambda: np.ones(BIG, np.int8).sum() + inputs[0].sum())

  return [measure.Form('small', None), measure.Form('large', prepare)]


@pytest.mark.slow
def test_high_water_of_a_fresh_process():
  case = measure.Case(positions=3, vocabulary=2)
  ballast = np.ones(4 * BIG, np.int8)  # the child must not inherit what this process has seen
  found = measure.high_water(nothing_large, with_a_large_temporary, case, 'large')
  del ballast
  if not pathlib.Path('/proc/self/clear_refs').exists():
    assert found is None
  else:
    assert 0.95 * BIG < found < 1.5 * BIG


@pytest.mark.slow
def test_divergence_forms_agree():
  case = measure.Case(positions=5, vocabulary=50)
  inputs = divergences.inputs(case)
  outputs = {
    form.name: form.prepare(inputs).call()
    for form in divergences.forms(case)
    if form.prepare is not None
  }
  kl, *others = outputs[divergences.NAIVE]
  for name in (divergences.CORE, divergences.FULL):
    found = outputs[name]
    np.testing.assert_allclose(found.kl, kl, atol=1e-6)
    rest = found.tv, found.entropy, found.policy_logp, found.rollout_logp
    for x, y in zip(rest, others, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  assert outputs[divergences.FULL].chi2 is not None
  for name in (divergences.CHUNKED, divergences.TORCH):
    for x, y in zip(outputs.get(name, (kl, *others)), (kl, *others), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  for name in (*divergences.OPTAX, divergences.DISTRAX):
    np.testing.assert_allclose(outputs.get(name, kl), kl, atol=1e-6)
  assert float(kl.mean()) > 1e-3


def test_floors_touch_every_row():
  case = measure.Case(positions=9, vocabulary=50)
  policy, rollout, tokens = divergences.inputs(case)
  tops = divergences.read(policy, rollout, tokens)
  sums = divergences.exponentials(policy, rollout, tokens)
  for x, top, total in zip((policy, rollout), tops, sums, strict=True):
    np.testing.assert_array_equal(top, x.max(-1))
    np.testing.assert_allclose(total, np.exp(x).sum(-1), rtol=1e-5)


@pytest.mark.slow
def test_the_mask_drops_tokens_beyond_the_limit(monkeypatch):
  case = linear_head.Case(positions=5, vocabulary=50, width=8)
  inputs = linear_head.inputs(case)
  args = inputs.hidden, inputs.head, inputs
  gradient = lambda: jax.jit(functools.partial(linear_head.gradient, linear_head.use_stored))(*args)
  (_, (kl, _)), (to_hidden, _) = gradient()
  # At the limit as it is, all tokens count: forms with and without a mask have one gradient.
  assert 0 < float(kl.min()) <= float(kl.max()) < linear_head.LIMIT
  assert np.asarray(to_hidden).any(-1).all()
  monkeypatch.setattr(linear_head, 'LIMIT', 0.0)
  _, (to_hidden, _) = gradient()
  assert not np.asarray(to_hidden).any()


@pytest.mark.slow
def test_divergences_end_to_end(tmp_path, capsys):
  file = tmp_path / 'figures.json'
  divergences.main(measure.Command(save=file, **TOY))
  printed = capsys.readouterr()
  assert 'N=6 V=40 float32: 4 rounds, cpu' in printed.out
  assert printed.out.count(' at most ') >= 6
  assert 'ETA' in printed.err
  (record,) = json.loads(file.read_text())
  assert len(record['seconds'][divergences.CORE]) == 4
  assert len(record['seconds'][divergences.CHUNKED]) == 1
  assert record['temporaries'][divergences.NAIVE] > 0
  assert record['goals'][0]['met'] in (True, False)
  assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.slow
def test_linear_head_end_to_end(tmp_path, capsys):
  file = tmp_path / 'figures.json'
  linear_head.main(linear_head.Command(save=file, markdown=True, width=8, **TOY))
  printed = capsys.readouterr().out
  assert '### N=6 V=40 float32 D=8: 4 rounds' in printed
  assert f'| {linear_head.STORED}' in printed
  (record,) = json.loads(file.read_text())
  # Tokamax pads vocabularies below its block by logits of 0, which are no part of the others.
  assert all(x < 1e-6 for name, x in record['gradient'].items() if name != linear_head.TOKAMAX)
  assert len(record['gradient']) >= 7
  assert record['width'] == 8


def test_large_vocabularies_have_a_memory_goal():
  seconds = {name: np.ones(3) for name in (linear_head.STORED, linear_head.NAIVE)}
  temporaries = {linear_head.STORED: 6, linear_head.NAIVE: 100}
  goals = {}
  for size in (1000, 152064):
    case = linear_head.Case(positions=2, vocabulary=size)
    found = measure.Measured(case=case, seconds=seconds, temporaries=temporaries, resident={})
    goals[size] = linear_head.goals(found, {linear_head.STORED: 0.0})
  assert len(goals[152064]) == len(goals[1000]) + 1
  assert goals[152064][-1].met is False


def test_backend_is_named():
  assert jax.default_backend() in measure.title(measured(a=[1.0]), markdown=False)
