"""Whole train and decode steps through the TPU compiler, without a TPU; skipped without libtpu.

Compiled for several topologies in a process of its own each, since the compiler wants another
platform than the other tests.
"""

import json
import subprocess
import sys

import pytest

from experiments import chips

pytestmark = [
  pytest.mark.tpu_compile,
  pytest.mark.slow,
  pytest.mark.skipif(
    not chips.installed(), reason="libtpu is not installed: pip install -e '.[tpu]'"
  ),
]

CODE = """
import json, sys
import dataclasses, jax
from experiments import abstract_step, chips, compiled
from trm_jax import policy

topology, name, data, model = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
config = policy.PolicyConfig(
  width=256, layers=5, heads=8, kv_heads=4, head_width=128, mlp_width=512, experts=0,
  dtype='bfloat16', remat=True,
)
if name == 'moe':
  config = dataclasses.replace(
    config, experts=8, experts_per_token=2, expert_compute='ragged', normalize_gates=True
  )
sizes = abstract_step.Sizes(
  rows=2 * data, samples=2, sequence=1536, prompt=384, vocab=40_064, store='hidden'
)
found = {}
with jax.set_mesh(chips.mesh(topology, data, model)):
  for what in ('train', 'decode'):
    built = getattr(abstract_step, what)(config, sizes).lower().compile()
    program = compiled.Program(built.as_text(), (data, model))
    found[what] = {
      'arrays': sorted(program.in_memory()),
      'collectives': [[c.kind, c.over, c.times, [s for _, s in c.shapes]]
                      for c in program.collectives()],
      'kernels': built.as_text().count('tpu_custom_call'),
      'temporaries': built.memory_analysis().temp_size_in_bytes,
    }
print('FOUND', json.dumps(found))
"""
V, LENGTH, PROMPT, LAYERS = 40_064, 1536, 384, 5


@pytest.mark.parametrize('name', ['dense', 'moe'])
@pytest.mark.parametrize(
  'topology, mesh', [('v5e:4x4', (4, 4)), ('v5p:2x2x2', (2, 4)), ('v6e:4x4', (8, 2))]
)
def test_whole_steps_compile_for_a_tpu(topology, mesh, name):
  run = subprocess.run(
    [sys.executable, '-c', CODE, topology, name, *map(str, mesh)], capture_output=True, text=True
  )
  assert run.returncode == 0, run.stderr[-3000:]
  line = next(x for x in run.stdout.splitlines() if x.startswith('FOUND'))
  found = json.loads(line.removeprefix('FOUND'))
  train, decode = found['train'], found['decode']
  data, model = mesh
  # Of a row, of its response, and of a device's two rows, flat; V whole or of one device.
  positions = {LENGTH, LENGTH - PROMPT + 1}
  tokens = positions | {2 * n for n in positions} | {2 * data * n for n in positions}
  vocabulary = {V, V // model}
  for shape in train['arrays']:
    assert not (tokens & set(shape) and vocabulary & set(shape)), shape
  for kind, over, _, shapes in train['collectives'] + decode['collectives']:
    for shape in shapes:
      assert not (tokens & set(shape) and vocabulary & set(shape)), (kind, shape)
      assert not (shape[:1] == [LAYERS] and len(shape) > 2), (kind, over, shape)
  kinds = {(kind, over) for kind, over, *_ in train['collectives']}
  assert ('all-gather', 'data') in kinds or ('collective-permute', 'data') in kinds
  assert kinds & {('all-reduce', 'model'), ('reduce-scatter', 'model')}
  assert not any(kind == 'all-to-all' for kind, _ in kinds)
  assert train['kernels'] > 0  # the statistics are those of the kernels
  assert decode['collectives']
