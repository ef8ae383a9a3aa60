"""Plans: bytes by hand, what fits and what does not, figures read from a program's text."""

import dataclasses
import functools
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import plan
from experiments.reports import plan_report
from trm_jax.mesh import sharding
from trm_jax.planning import abstract_step, chips, compiled, products
from trm_jax.policy import attention
from trm_jax.types import InputError

GIB = 2**30
TINY = plan.Command(
  model='qwen3-0.6b',
  topology='cpu:8',
  mesh='4,2',
  layers=2,
  seq=32,
  prompt=8,
  samples=2,
  rows=2,
  decode=False,
)


def by_hand(config, vocab, data, model):
  """Float32 bytes of a device: matrices over both axes, norms whole."""
  width, inner = config.width, config.heads * config.head_width
  matrices = 2 * width * inner + 2 * width * config.kv_heads * config.head_width
  whole = 2 * width + 2 * config.head_width
  split = matrices
  if config.experts:
    split += 3 * config.experts * width * config.mlp_width
    router = width * config.experts  # over data alone
  else:
    split += 3 * width * config.mlp_width
    router = 0
  tables = vocab * width * (1 if config.tied_head else 2)
  per_layer = split // (data * model) + router // data + whole
  return 4 * (config.layers * per_layer + tables // (data * model) + width)


@pytest.mark.parametrize(
  'name, mesh', [('qwen3-8b', '4,2'), ('qwen3-30b-a3b', '2,4'), ('qwen3-0.6b', '8,1')]
)
def test_parameter_and_optimizer_bytes_are_those_of_the_hand_count(name, mesh):
  options = dataclasses.replace(TINY, model=name, mesh=mesh, layers=None)
  model, config = plan.settings(options)
  sizes = sharding.parse_mesh(mesh)
  with jax.set_mesh(chips.mesh('cpu:8', *sizes)):
    state = abstract_step.state_of(config, model.vocab_size)
  wanted = by_hand(config, model.vocab_size, *sizes)
  assert abstract_step.bytes_per_device(state.params) == wanted
  # Two moments and two counters.
  assert abstract_step.bytes_per_device(state.opt_state) == 2 * wanted + 8
  total = sum(x.size for x in jax.tree.leaves(state.params))
  assert total == model.parameters


@pytest.mark.slow
def test_a_plan_on_simulated_devices(tmp_path, capsys):
  file = tmp_path / 'plan.json'
  plan.main(dataclasses.replace(TINY, save=file))
  printed = capsys.readouterr().out
  found = json.loads(file.read_text())
  step = found['train']
  assert step['compiled_for'] == 'CPU (simulated devices)'
  assert 'compiled for CPU (simulated devices)' in printed
  assert 'bound' not in step and 'tokens/s' not in printed  # no chip, no time
  state = found['parameter_bytes'] + found['optimizer_bytes']
  assert state < step['arguments'] < state + 2**20  # and the batch
  assert step['arguments'] < step['used'] <= step['arguments'] + 1.1 * step['temporaries']
  assert step['wire'] == pytest.approx(sum(c['bytes'] for c in step['collectives'].values()))
  assert step['flops'] > step['once']['flops'] / 2
  assert [path.name for path in tmp_path.iterdir()] == ['plan.json']


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(model='gpt-2'), "model='gpt-2'"),
    (dict(topology='v9:2x2'), "topology='v9:2x2'"),
    (dict(topology='v5e'), "topology='v5e'"),
    (dict(mesh='2,2'), 'mesh=2,2 has 4 devices, but topology=cpu:8 has 8'),
    (dict(mesh='1,16', topology='cpu:16'), 'mesh=1,16 cannot split the kv_heads=8'),
    (dict(seq=8), 'seq=8 must be larger than prompt=8'),
    (dict(rows=3), 'rows=3 must be a multiple of samples=2'),
    (dict(samples=0), 'samples=0'),
    (dict(save=plan.pathlib.Path('/nowhere/plan.json')), 'save='),
  ],
)
def test_bad_input_is_named(change, words):
  with pytest.raises(InputError, match=words):
    plan.main(dataclasses.replace(TINY, **change))


@pytest.mark.parametrize(
  'soft, hard, again',
  [(8 * 2**20, -1, True), (-1, -1, True), (8 * 2**20, 8 * 2**20, False), (chips.STACK, -1, False)],
)
def test_a_small_stack_starts_the_command_again_once(soft, hard, again, monkeypatch):
  limit, started = [(soft, hard)], []
  monkeypatch.setattr(chips.resource, 'RLIM_INFINITY', -1)
  monkeypatch.setattr(chips.resource, 'getrlimit', lambda _: limit[-1])
  monkeypatch.setattr(chips.resource, 'setrlimit', lambda _, new: limit.append(new))
  monkeypatch.setattr(chips.os, 'execv', lambda file, words: started.append(words))
  monkeypatch.setattr(chips.sys, 'argv', ['plan.py', '--seq', '64'])
  chips.with_stack('experiments.plan')
  chips.with_stack('experiments.plan')  # as the new process does
  assert [words[1:] for words in started] == [['-m', 'experiments.plan', '--seq', '64']] * again


def test_without_the_tpu_compiler_a_plan_says_so(monkeypatch):
  monkeypatch.setattr(chips, 'installed', lambda: False)
  with pytest.raises(InputError, match='topology=v5e:4x2 needs the TPU compiler'):
    plan.plan(dataclasses.replace(TINY, topology='v5e:4x2'))


def test_what_a_compiler_says_of_memory():
  newer = (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries'
    ' (22.88G) exceeds available HBM (15.75G).'
  )
  found = plan.too_large(newer, arguments=GIB)
  assert (found.needed, found.available) == (23.88 * GIB, 15.75 * GIB)
  older = 'Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm. Exceeded by 2.75G.'
  assert plan.too_large(older, arguments=GIB).needed == 18.5 * GIB
  assert plan.too_large('INTERNAL: something else', arguments=0) is None


def fake(fixed, slope, limit):
  """A compiler whose programs take `fixed` + `slope` * groups."""
  calls = []

  def attempt(groups):
    calls.append(groups)
    size = fixed + slope * groups
    if size > limit:
      return plan.TooLarge(size, limit, 'too large')
    memory = types.SimpleNamespace(
      argument_size_in_bytes=fixed,
      output_size_in_bytes=0,
      alias_size_in_bytes=0,
      temp_size_in_bytes=2 * slope * groups,
      peak_memory_in_bytes=size,
    )
    return types.SimpleNamespace(memory_analysis=lambda: memory)

  return attempt, calls


@pytest.mark.parametrize('slope, most', [(1, 90), (20, 4), (40, 2), (50, 1), (95, 0)])
def test_the_most_rows_that_fit(slope, most):
  attempt, calls = fake(10, slope, 100)
  groups, found, promised = plan.largest(attempt, 100)
  assert sorted(calls) == [1, 2]
  assert groups == min(most, 2) and promised == (most if most > 2 else None)
  assert isinstance(found, plan.TooLarge) == (most == 0)
  attempt, calls = fake(10, slope, 100)
  verified = plan.largest(attempt, 100, verify=True)
  assert verified.groups == most and verified.promised is None
  assert len(calls) == (3 if most > 2 else 2)


def test_a_line_that_promises_too_much_is_not_believed():
  attempt, _ = fake(10, 20, 75)
  assert plan.largest(attempt, 100)[::2] == (2, 4)
  groups, found, _ = plan.largest(attempt, 100, verify=True)  # the compiler needs some for itself
  assert groups == 3 and plan.used(found) == 70


def test_two_programs_are_compiled_side_by_side():
  both = threading.Barrier(2, timeout=60)  # breaks unless two threads come

  def attempt(groups):
    both.wait()
    return fake(10, 20, 100)[0](groups)

  assert plan.largest(attempt, 100).promised == 4


TEXT = """
HloModule step

%body (p: (s32[], f32[4,8], f32[5,4,8])) -> (s32[], f32[4,8], f32[5,4,8]) {
  %p = (s32[], f32[4,8]{1,0}, f32[5,4,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[5,4,8]{2,1,0} get-tuple-element(%p), index=2
  %sum = f32[4,8]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  %one = f32[1,4,8]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,4,8}
  %all = f32[16,8]{1,0} all-gather(%sum), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0)
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[5,4,8]{2,1,0}) tuple(%i, %sum, %w)
}

%condition (p: (s32[], f32[4,8], f32[5,4,8])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}, f32[5,4,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[4,8], b: f32[5,4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[5,4,8]{2,1,0} parameter(1)
  %n = s32[] constant(0)
  %t = (s32[], f32[4,8]{1,0}, f32[5,4,8]{2,1,0}) tuple(%n, %a, %b)
  %loop = (s32[], f32[4,8], /*index=2*/f32[5,4,8]) while(%t), condition=%condition, body=%body
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_products_of_a_kernel_that_says_nothing_are_those_of_its_grid():
  x = jax.ShapeDtypeStruct((3, 256, 1, 128), jnp.bfloat16)
  at = dict(slots=jnp.arange(256), start=jnp.zeros(3, jnp.int32), block=128, interpret=True)
  program = jax.make_jaxpr(functools.partial(attention.splash, **at))(x, x, x)
  # Scores and mixture of every pair of a block of queries and one of keys.
  wanted = 3 * 2 * 2 * 256 * 256 * 128
  assert products.count(program.jaxpr, {}) == (wanted, wanted)


def test_collectives_and_traffic_of_a_loop():
  program = compiled.Program(TEXT, (4, 2))
  reduced, gathered = sorted(program.collectives(), key=lambda c: c.kind, reverse=True)
  assert (reduced.kind, reduced.over, reduced.group, reduced.times) == ('all-reduce', 'model', 2, 5)
  assert reduced.wire == 4 * 8 * 4  # 2 (g-1)/g of the array
  assert (gathered.kind, gathered.over, gathered.group) == ('all-gather', 'data', 4)
  assert gathered.wire == 16 * 8 * 4 * 3 / 4
  # Reads and writes of the two collectives, and a slice of the stack, five times.
  assert program.traffic() == 5 * 4 * (2 * 32 + 32 + 128 + 2 * 32)
  noted = TEXT.replace('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
  assert {c.times for c in compiled.Program(noted, (4, 2)).collectives()} == {7}


def test_groups_of_devices_in_every_notation():
  groups = {
    '{{0,1},{2,3},{4,5},{6,7}}': [0, 1],
    '[2,4]<=[4,2]T(1,0)': [0, 2, 4, 6],
    "mesh['a'=4,'b'=2] {'a'}": [0, 2, 4, 6],
    "mesh['a'=4,'b'=2] {'b'}": [0, 1],
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}": [0, 2, 4, 6],
    "mesh['a'=8] {'a':(2)2}": [0, 2],
    "mesh['a'=8] {'a':(1)4}": [0, 2, 4, 6],
  }
  for text, wanted in groups.items():
    found = compiled.first_group(f'replica_groups={text}, use_global_device_ids=true')
    np.testing.assert_array_equal(found, wanted, err_msg=text)
  np.testing.assert_array_equal(compiled.first_group('source_target_pairs={{0,4},{4,0}}'), [0, 4])


def test_pieces_of_one_collective_count_once():
  groups = 'channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0)'
  start = f'  %s = f32[16,8]{{1,0}} all-gather-start(%a), {groups}\n'
  piece = (
    '%async_collective_fusion.1 (q: f32[4,8]) -> f32[16,8] {\n'
    '  %q = f32[4,8]{1,0} parameter(0)\n'
    f'  ROOT %g = f32[16,8]{{1,0}} all-gather(%q), {groups}\n'
    '}\n\n%condition'
  )
  text = TEXT.replace('  ROOT %out', start + '  ROOT %out')
  text = text.replace(
    f'all-gather(%sum), {groups}',
    'fusion(%sum), kind=kOutput, calls=%async_collective_fusion.1',
  ).replace('%condition', piece, 1)
  gathers = [c for c in compiled.Program(text, (4, 2)).collectives() if c.kind == 'all-gather']
  assert [c.times for c in gathers] == [1]


def test_the_table_says_what_does_not_fit():
  refused = {'needed': 30 * GIB, 'available': 15.75 * GIB, 'why': 'x'}
  about = {'model': 'A', 'topology': 'v5e:2x4', 'mesh': '4,2', 'rows': 8}
  step = {'used': 8 * GIB, 'wire_bytes_a_token': 1234.5, 'seconds': 2.0, 'tokens_a_second': 5e4}
  table = plan_report.markdown([about | {'refused': refused}, about | {'train': step}])
  assert 'does not fit: 30.0 of 15.8' in table
  assert '| 8.0 | 1,234 | 2.00 | - | 50,000 |' in table
  assert len({line.count('|') for line in table.splitlines()}) == 1


def test_a_combined_gather_counts_all_its_arrays():
  arrays = '(bf16[8192]{0}, bf16[8192]{0})'
  line = 'all-gather(%a, %b), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}'
  text = (
    'HloModule m\nENTRY %main (a: bf16[1024], b: bf16[1024]) -> (bf16[8192], bf16[8192]) {\n'
    '  %a = bf16[1024]{0} parameter(0)\n  %b = bf16[1024]{0} parameter(1)\n'
    f'  ROOT %s = {arrays} {line}\n}}\n'
  )
  both = f'((bf16[1024]{{0}}, bf16[1024]{{0}}), {arrays}) all-gather-start'
  started = text.replace(f'{arrays} all-gather', both)
  (plain,), (async_,) = (compiled.Program(t, (8, 1)).collectives() for t in (text, started))
  assert plain.wire == async_.wire == 2 * 8192 * 2 * 7 / 8
