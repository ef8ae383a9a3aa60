"""Every transform, and whole train and decode steps, through the TPU compiler, without a TPU.

Skipped without libtpu. Each topology is compiled in a process of its own, since the compiler wants
another platform than the other tests.
"""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from benchmarks import cases, measure, tpu_transforms
from trm_jax.planning import chips

pytestmark = [
  pytest.mark.tpu_compile,
  pytest.mark.slow,
  pytest.mark.skipif(
    not chips.installed(), reason="libtpu is not installed: pip install -e '.[tpu]'"
  ),
]


@pytest.mark.parametrize('topology', tpu_transforms.Command.topologies)
def test_every_transform_compiles_for_a_tpu(topology, tmp_path):
  file = tmp_path / 'figures.json'
  run = subprocess.run(
    [sys.executable, '-m', 'benchmarks.tpu_transforms']
    + ['--topologies', topology, '--save', str(file)],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parent.parent,
  )
  assert run.returncode == 0, run.stderr[-3000:]
  check({record['case']: record for record in json.loads(file.read_text())})


def check(found):
  """What the figures of one topology, by case, must say."""
  for name, record in found.items():
    # Where hidden states and a head are all that goes in, scores stay in fast memory.
    assert not record['scores'], (name, record['scores'])
    assert not record['scores moved'], (name, record['scores moved'])
    assert not record['stacks moved'], (name, record['stacks moved'])
  # Stored logits, bfloat16, are read where they lie: nothing of their size is written beside them.
  # The gradient holds those of states and head in float32.
  record = found['linear_head.statistics, of logits']
  logits = cases.ROWS * cases.RESPONSE * cases.VOCAB * 2 / math.prod(record['mesh']) / measure.MIB
  assert record['temporaries'] < logits / 4, record
  assert found['linear_head.statistics, of logits, gradient']['temporaries'] < logits / 2
  for name in ('linear_head.logp', 'linear_head.kl_from', 'attention.splash', 'train step, MoE'):
    assert found[name]['kernels'], name
  for name in ('dense', 'MoE'):
    kinds = set(found[f'train step, {name}']['collectives'])
    assert kinds & {'all-gather over data', 'collective-permute over data'}
    assert kinds & {'all-reduce over model', 'reduce-scatter over model'}
    assert not any(kind.startswith('all-to-all') for kind in kinds)
    assert found[f'decode step, {name}']['collectives']
