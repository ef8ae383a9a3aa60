"""The run directory: exact round trips, damaged checkpoints, refused directories, full disks."""

import builtins
import errno
import io
import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from trm_jax import types
from trm_jax.runs import recording

ROOT = pathlib.Path(__file__).parent.parent
# Orbax leaves coroutines behind when it gives up on a damaged array.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
CONFIG = {'seed': 1, 'limit': {'max_kl': 0.05, 'mean_kl': float('inf')}}


def abstract(tree, sharding=None):
  """The tree of ShapeDtypeStructs that `restore` wants; numbers stay as they are."""

  def leaf(value):
    if not hasattr(value, 'dtype'):
      return value
    at = sharding or getattr(value, 'sharding', None)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=at)

  return jax.tree.map(leaf, tree)


def state_of(seed):
  """Every kind of leaf; `big` is over 1 MB, since orbax keeps small arrays out of data files."""
  key = jax.random.key(seed)
  params = {
    'big': jax.random.normal(key, (600, 512)),
    'half': jax.random.normal(key, (3, 5)).astype(jnp.bfloat16),
    'odd': jnp.array([jnp.nan, -0.0, jnp.inf]),
  }
  opt = optax.adam(1e-3)
  _, opt_state = opt.update(params, opt.init(params))
  return {'params': params, 'opt': opt_state, 'key': key, 'none': None, 'rows': 7, 'rate': 0.1}


def same(a, b):
  """Bitwise equality of two trees, types of nodes and leaves included."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert isinstance(y, jax.Array) == isinstance(x, jax.Array)
    if not hasattr(x, 'dtype'):
      assert type(x) is type(y) and x == y
      continue
    assert x.dtype == y.dtype and x.shape == y.shape
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def saved(tmp_path):
  """A run with the checkpoints 2 and 4 and five lines of metrics."""
  with recording.open_run(tmp_path / 'run', CONFIG) as run:
    for step in range(1, 6):
      run.log(step, {'loss': step / 10})
      if step in (2, 4):
        run.save(step, state_of(step), {'cursor': step})
  return tmp_path / 'run'


def data_file(step_path):
  """The file that holds the bytes of `big`."""
  files = [p for p in (step_path / 'state').rglob('*') if p.is_file() and p.parent.name == 'd']
  largest = max(files, key=lambda p: p.stat().st_size)
  assert largest.stat().st_size > 1_000_000
  return largest


def test_state_and_meta_come_back_exactly(tmp_path):
  meta = {'step': 3, 'data': {'next': [1, 2, {'epoch': 0}], 'name': 'é'}, 'kl': 0.1, 'none': None}
  meta['limit'] = float('inf')
  with recording.open_run(tmp_path, CONFIG) as run:
    run.save(3, state_of(0), meta)
    run.save(3, state_of(1), {'never': 'written'})
  with recording.open_run(tmp_path, CONFIG, resume=True) as run:
    step, state, found = run.restore(abstract(state_of(5)))
  assert step == 3
  assert found == meta and repr(found) == repr(meta)
  same(state_of(0), state)


def test_a_run_that_was_never_saved_restores_none(tmp_path):
  with recording.open_run(tmp_path / 'a' / 'b', CONFIG, resume=True) as run:
    run.log(0, {'loss': 1.0})
    assert run.restore(abstract(state_of(0))) is None
    assert run.metrics() == []  # the run starts again and logs step 0 again
    run.log(0, {'loss': 2.0})
    assert run.metrics() == [{'step': 0, 'loss': 2.0}]


def test_only_the_newest_are_kept_and_older_steps_are_refused(tmp_path):
  with recording.open_run(tmp_path, CONFIG, keep=3) as run:
    for step in range(1, 6):
      run.save(step, {'x': jnp.ones(3)}, {})
    with pytest.raises(
      types.InputError, match='step=1 is older than checkpoint 5; call restore first'
    ):
      run.save(1, {'x': jnp.ones(3)}, {})
  assert sorted(os.listdir(tmp_path / 'checkpoints')) == ['3', '4', '5']


@pytest.mark.parametrize('meta', [{'a': (1, 2)}, {1: 2}, {'a': np.int32(3)}, {(1, 2): 3}])
def test_meta_that_would_change_is_refused(tmp_path, meta):
  with recording.open_run(tmp_path, CONFIG) as run:
    with pytest.raises(types.InputError, match='does not survive JSON'):
      run.save(1, {'x': jnp.ones(3)}, meta)


@pytest.mark.parametrize('leaf', [np.float32(1), jnp.zeros((0, 3))])
def test_leaves_that_orbax_cannot_store_are_refused(tmp_path, leaf):
  with recording.open_run(tmp_path, CONFIG) as run:
    with pytest.raises(types.InputError, match=r"state\['x'\]"):
      run.save(1, {'x': leaf}, {})


def test_resuming_cuts_the_metrics_back(saved):
  with open(saved / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 6, "lo')
  assert [row['step'] for row in recording.read_metrics(saved / 'metrics.jsonl')] == [1, 2, 3, 4, 5]
  with recording.open_run(saved, CONFIG, resume=True) as run:
    assert [row['step'] for row in run.metrics()] == [1, 2, 3, 4, 5]
    assert (saved / 'metrics.jsonl').read_bytes().endswith(b'}\n')
    assert run.restore(abstract(state_of(0)))[0] == 4
    run.log(5, {'loss': 9.0})
    assert [row['loss'] for row in run.metrics()] == [0.1, 0.2, 0.3, 0.4, 9.0]
  assert not list(saved.glob('.*'))


@pytest.mark.parametrize('broken', ['{"step": \n', '{"stdp": 2}\n', '{"step": "2"}\n'])
def test_a_broken_line_in_the_middle_is_named(saved, broken):
  lines = (saved / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (saved / 'metrics.jsonl').write_text(lines[0] + broken + lines[2])
  with pytest.raises(types.InputError, match='line 2 is broken'):
    recording.read_metrics(saved / 'metrics.jsonl')
  before = (saved / 'metrics.jsonl').read_bytes()
  with pytest.raises(types.InputError, match='line 2 is broken; mend or remove that line'):
    recording.open_run(saved, CONFIG, resume=True)
  assert (saved / 'metrics.jsonl').read_bytes() == before


@pytest.mark.parametrize(
  'order, words',
  [
    ([0, 1, 3, 4], 'has no row of step 2:'),
    ([1, 2, 3, 4], 'has no row of step 0:'),
    ([0, 1, 2, 2, 3, 4], 'has rows too many of step 2:'),
    ([0, 1, 2, 3, 4, 9, -1], 'has rows too many of step -1, 9:'),
    ([0, 2, 1, 3, 4], 'has rows out of order:'),
    ([], 'has no row of step 0, 1, 2, 3, 4:'),
  ],
)
def test_rows_are_there_exactly_once(tmp_path, order, words):
  with recording.open_run(tmp_path, CONFIG) as run:
    for step in order:
      run.log(step, {'loss': 1.0})
    with pytest.raises(types.InputError, match=words):
      run.check_rows(range(5))
    run.check_rows(order)


@pytest.mark.parametrize(
  'text', ['{"step": 1, "loss": "low"}', '{"step": true}', '{"a": ' + '[' * 10**5 + '}']
)
def test_lines_that_are_no_rows(tmp_path, text):
  (tmp_path / 'metrics.jsonl').write_text(f'{text}\n{{"step": 2}}\n')
  with pytest.raises(types.InputError, match='line 1 is broken'):
    recording.read_metrics(tmp_path / 'metrics.jsonl')


def test_what_a_run_reads_must_be_what_it_was(tmp_path):
  with recording.open_run(tmp_path, CONFIG) as run:
    run.check_identity({'reward': 'a1', 'weights': 'b2'})
  with recording.open_run(tmp_path, CONFIG, resume=True) as run:
    run.check_identity({'weights': 'b2', 'reward': 'a1'})
    with pytest.raises(types.InputError, match="other content .digest of reward was 'a1' and is"):
      run.check_identity({'reward': 'a2', 'weights': 'b2'})


@pytest.mark.slow
def test_a_second_process_is_told_who_writes(tmp_path):
  code = (
    'import sys; from trm_jax.runs import recording\n'
    'run = recording.open_run(sys.argv[1], {}, resume=True); print("open", flush=True)\n'
    'sys.stdin.read()'
  )
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  with subprocess.Popen([sys.executable, '-c', code, tmp_path], **pipes) as other:
    assert other.stdout.readline() == 'open\n'
    with pytest.raises(types.InputError, match=f'in use .pid {other.pid} on .*choose another'):
      recording.open_run(tmp_path, {}, resume=True)
    began = time.monotonic()
    threading.Timer(1.0, other.kill).start()
    with recording.open_run(tmp_path, {}, resume=True, wait=True):
      assert time.monotonic() - began > 0.9
  with recording.open_run(tmp_path, {}, resume=True):  # the dead hold nothing
    assert (tmp_path / 'lock').exists()
  assert not (tmp_path / 'lock').exists()


def flip_bit(step_path):
  content = bytearray(data_file(step_path).read_bytes())
  content[len(content) // 2] ^= 1
  data_file(step_path).write_bytes(content)


def truncate(step_path):
  os.truncate(data_file(step_path), data_file(step_path).stat().st_size // 2)


def remove_state(step_path):
  shutil.rmtree(step_path / 'state')


def empty(step_path):
  shutil.rmtree(step_path)
  step_path.mkdir()


def change_meta(step_path):
  path = step_path / 'meta' / 'metadata'
  assert '"cursor": 4' in path.read_text()
  path.write_text(path.read_text().replace('"cursor": 4', '"cursor": 5'))


@pytest.mark.parametrize(
  'damage',
  [
    flip_bit,
    *(
      pytest.param(d, marks=pytest.mark.slow) for d in (truncate, remove_state, empty, change_meta)
    ),
  ],
)
def test_a_damaged_checkpoint_is_passed_over(saved, damage, caplog):
  damage(saved / 'checkpoints' / '4')
  with recording.open_run(saved, CONFIG, resume=True) as run:
    step, state, meta = run.restore(abstract(state_of(0)))
    assert (step, meta) == (2, {'cursor': 2})
    same(state_of(2), state)
    assert any(
      'checkpoint 4' in r.getMessage() and r.levelname == 'WARNING' for r in caplog.records
    )
    assert [row['step'] for row in run.metrics()] == [1, 2]
    for step in (3, 4):  # neither is taken for "older" or for "already saved"
      run.save(step, state_of(10 + step), {'cursor': step})
  with recording.open_run(saved, CONFIG, resume=True) as run:
    step, state, _ = run.restore(abstract(state_of(0)))
    assert step == 4
    same(state_of(14), state)


def test_only_the_digest_finds_a_flipped_bit(tmp_path, caplog):
  state = {'bits': jax.random.bits(jax.random.key(0), (300_000,))}  # zstd stores these as they are
  with recording.open_run(tmp_path, CONFIG) as run:
    run.save(1, state, {})
    run.save(2, state, {})
  flip_bit(tmp_path / 'checkpoints' / '2')
  with ocp.StandardCheckpointer() as reader:
    read = reader.restore(tmp_path / 'checkpoints' / '2' / 'state', abstract(state))
  assert int(jnp.sum(read['bits'] != state['bits'])) == 1
  with recording.open_run(tmp_path, CONFIG, resume=True) as run:
    step, restored, _ = run.restore(abstract(state))
  assert step == 1
  same(state, restored)
  assert "state['bits'] was saved as" in caplog.text
  assert os.listdir(tmp_path / 'damaged') == ['2']


def test_an_unfinished_checkpoint_is_ignored(saved):
  os.rename(saved / 'checkpoints' / '4', saved / 'checkpoints' / '4.orbax-checkpoint-tmp')
  with recording.open_run(saved, CONFIG, resume=True) as run:
    assert run.restore(abstract(state_of(0)))[0] == 2
    run.save(5, state_of(5), {'cursor': 5})
  assert sorted(os.listdir(saved / 'checkpoints')) == ['2', '5']
  with recording.open_run(saved, CONFIG, resume=True) as run:
    assert run.restore(abstract(state_of(0)))[0] == 5


def garble(step_path):  # a flipped bit may still decompress; without zstd's magic number none does
  content = data_file(step_path).read_bytes()
  data_file(step_path).write_bytes(content.replace(bytes.fromhex('28b52ffd'), bytes(4)))


@pytest.mark.parametrize('damage', [flip_bit, garble])
def test_all_damaged_is_an_error_with_every_cause(saved, damage):
  damage(saved / 'checkpoints' / '2')
  remove_state(saved / 'checkpoints' / '4')
  before = (saved / 'metrics.jsonl').read_bytes()
  with recording.open_run(saved, CONFIG, resume=True) as run:
    with pytest.raises(RuntimeError, match=r'step 4: .*; step 2: .*big'):
      run.restore(abstract(state_of(0)))
  assert (saved / 'metrics.jsonl').read_bytes() == before
  assert sorted(os.listdir(saved / 'checkpoints')) == ['2', '4']


@pytest.mark.slow
@pytest.mark.parametrize('change', ['dtype', 'shape', 'missing', 'extra'])
def test_another_tree_is_an_error(saved, change):
  wanted = abstract(state_of(0))
  big = wanted['params']['big']
  if change == 'dtype':  # orbax casts without a word
    wanted['params']['big'] = jax.ShapeDtypeStruct(big.shape, jnp.bfloat16, sharding=big.sharding)
  elif change == 'shape':
    wanted['params']['big'] = jax.ShapeDtypeStruct((512, 600), big.dtype, sharding=big.sharding)
  elif change == 'missing':
    del wanted['params']['big']
  else:
    wanted['params']['more'] = big
  with recording.open_run(saved, CONFIG, resume=True) as run:
    with pytest.raises(RuntimeError, match='step 4: .*; step 2: '):
      run.restore(wanted)


def test_a_sharded_state_is_restored_on_another_mesh(tmp_path):
  explicit = (jax.sharding.AxisType.Explicit,) * 2
  meshes = [
    jax.make_mesh(shape, ('data', 'model'), axis_types=explicit, devices=jax.devices()[:count])
    for shape, count in (((4, 2), 8), ((2, 1), 2))
  ]
  spec = jax.sharding.PartitionSpec('data', 'model')
  at, other = (jax.NamedSharding(mesh, spec) for mesh in meshes)
  value = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
  state = {'w': jax.device_put(value, at), 'half': jax.device_put(value.astype('bfloat16'), at)}
  with recording.open_run(tmp_path, CONFIG) as run:
    run.save(1, state, {})
  with recording.open_run(tmp_path, CONFIG, resume=True) as run:
    _, restored, _ = run.restore(abstract(state, other))
  assert all(x.sharding == other for x in jax.tree.leaves(restored))
  same(state, restored)


def test_config_json_says_what_was_run(tmp_path):
  recording.open_run(tmp_path, CONFIG).close()
  about = json.loads((tmp_path / 'config.json').read_text(), parse_constant=pytest.fail)
  assert about['config'] == {'seed': 1, 'limit': {'max_kl': 0.05, 'mean_kl': 'inf'}}
  packages = {'python', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'trm_jax'}
  assert about['versions'].keys() == packages and about['versions']['jax'] == jax.__version__
  device = {'platform': 'cpu', 'kind': 'cpu', 'count': 8, 'processes': 1, 'mesh': None}
  assert about['device'] == device
  assert about['commit'] is None or len(about['commit']) == 40
  assert isinstance(about['dirty'], bool) and about['created'][:2] == '20'


def test_an_existing_run_needs_resume(saved):
  with pytest.raises(types.InputError, match='already holds a run; pass --resume'):
    recording.open_run(saved, CONFIG)


def test_a_directory_that_process_0_does_not_share_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(recording.Run, 'write_json', lambda *_: None)  # it went to another disk
  with pytest.raises(types.InputError, match='differs from host to host; choose one that all see'):
    recording.open_run(tmp_path, CONFIG)


def test_another_config_is_refused_key_by_key(saved):
  other = {'seed': 2, 'limit': {'max_kl': 0.05, 'mean_kl': 1.0}, 'new': True}
  with pytest.raises(types.InputError) as caught:
    recording.open_run(saved, other, resume=True)
  message = str(caught.value)
  assert 'seed was 1 and is 2' in message and "limit.mean_kl was 'inf' and is 1.0" in message
  assert "new was 'absent' and is True" in message and 'max_kl' not in message


def test_a_config_that_json_cannot_hold_is_refused(tmp_path):
  with pytest.raises(types.InputError, match='config cannot be written as JSON'):
    recording.open_run(tmp_path / 'run', {'criterion': len})
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
@pytest.mark.parametrize('content', ['', '{"config": ', '[]', '{"seed": 1}', '{"config": 3}'])
def test_a_damaged_config_is_refused(saved, content):
  (saved / 'config.json').write_text(content)
  with pytest.raises(types.InputError, match=r'config\.json is damaged'):
    recording.open_run(saved, CONFIG, resume=True)


def test_other_versions_and_devices_give_a_warning(saved, caplog):
  about = json.loads((saved / 'config.json').read_text())
  about['versions']['jax'], about['device']['count'] = '0.1', 256
  (saved / 'config.json').write_text(json.dumps(about))
  recording.open_run(saved, CONFIG, resume=True).close()
  said = [r for r in caplog.records if 'not promised to be bit-exact' in r.getMessage()]
  assert [r.levelno for r in said] == 2 * [logging.WARNING]
  assert f"versions.jax was '0.1' and is '{jax.__version__}'" in said[0].getMessage()
  assert 'up to the order of sums' in said[1].getMessage()
  assert 'device.count was 256 and is 8' in said[1].getMessage()


@pytest.mark.parametrize('resume', [False, True])
def test_a_directory_with_other_files_is_left_alone(tmp_path, resume):
  (tmp_path / 'thesis.tex').write_text('mine')
  with pytest.raises(types.InputError, match=r'holds other files \(thesis\.tex\)'):
    recording.open_run(tmp_path, CONFIG, resume=resume)
  assert os.listdir(tmp_path) == ['thesis.tex']


def test_what_a_killed_start_left_is_no_obstacle(tmp_path):
  (tmp_path / '.config.json.123.tmp').write_text('{"conf')
  recording.open_run(tmp_path, CONFIG).close()
  assert (tmp_path / 'config.json').exists()


def test_paths_that_cannot_hold_a_run_are_refused(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('mine')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'below', tmp_path / ('x' * 300)):
    with pytest.raises(types.InputError, match='cannot be written .* choose another directory'):
      recording.open_run(path, CONFIG)

  def refuse(*_, **__):
    raise PermissionError(errno.EACCES, 'Permission denied')

  monkeypatch.setattr(recording.tempfile, 'TemporaryFile', refuse)
  with pytest.raises(types.InputError, match='Permission denied'):
    recording.open_run(tmp_path / 'run', CONFIG)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
  run = recording.open_run(tmp_path / 'run', CONFIG)
  run.log(1, {'loss': 1.0})
  run.write_json('summary.json', {'a': 1})
  real = builtins.open

  def full(path, *args, **kwargs):
    file = real(path, *args, **kwargs)
    if str(path).startswith(str(tmp_path)) and file.writable():
      file.write('{"st' if isinstance(file, io.TextIOBase) else b'{"st')
      file.close()
      raise OSError(errno.ENOSPC, 'No space left on device')
    return file

  monkeypatch.setattr(builtins, 'open', full)
  with pytest.raises(OSError, match=r'cannot write .*metrics\.jsonl .No space') as caught:
    run.log(2, {'loss': 2.0})
  assert caught.value.errno == errno.ENOSPC
  with pytest.raises(OSError, match=r'cannot write .*summary\.json .No space'):
    run.write_json('summary.json', {'a': 2})
  monkeypatch.undo()
  assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes().endswith(b'\n{"st')
  assert run.metrics() == [{'step': 1, 'loss': 1.0}]
  assert json.loads((tmp_path / 'run' / 'summary.json').read_text()) == {'a': 1}
  assert not list((tmp_path / 'run').glob('.*'))
  run.close()
  with recording.open_run(tmp_path / 'run', CONFIG, resume=True) as run:
    run.log(2, {'loss': 3.0})
    assert run.metrics() == [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 3.0}]


FULL_DISK = """
import json, pathlib, resource, sys
import jax, jax.numpy as jnp
from trm_jax.runs import recording
run = recording.open_run(sys.argv[1], {'a': 1})
run.log(1, {'loss': 1.0})
run.save(1, {'x': jnp.ones(1000)}, {})
run._checkpoints().wait_until_finished()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
said = []
def expect(do):
  try:
    do()
  except OSError as error:
    said.append(str(error))
def save():
  run.save(2, {'x': jax.random.normal(jax.random.key(0), (500_000,))}, {})
  run.close()
def log():
  for step in range(2, 1_000_000):
    run.log(step, {'loss': 1.0})
expect(save)
expect(log)
expect(lambda: run.write_json('summary.json', 'x' * 1_000_000))
expect(run.close)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_real_limit_on_file_size(tmp_path):
  path = tmp_path / 'run'
  done = subprocess.run(
    [sys.executable, '-c', FULL_DISK, path],
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  said = json.loads(done.stdout)
  for name, sentence in zip(['run', 'tensorboard', 'summary.json'], said[:3], strict=True):
    assert f'/{name} (File too large); what was written before is intact' in sentence, said
  assert (
    'Traceback (most recent call last):\n  File "/' not in done.stderr.split('Exception ign')[0]
  )
  rows = recording.read_metrics(path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(1, len(rows) + 1))
  assert not (path / 'summary.json').exists()
  with recording.open_run(path, {'a': 1}, resume=True) as run:
    step, state, _ = run.restore({'x': jax.ShapeDtypeStruct((1000,), jnp.float32)})
    assert step == 1 and float(state['x'].sum()) == 1000
    assert run.metrics() == [{'step': 1, 'loss': 1.0}]


TWO_PROCESSES = """
import glob, json, os, pathlib, sys
path, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 2)
jax.distributed.initialize(f'127.0.0.1:{port}', num_processes=2, process_id=process)
from jax.experimental import multihost_utils
from trm_jax.runs import recording
mesh = jax.make_mesh((4,), ('data',))
whole = np.random.default_rng(0).integers(0, 2**32, (4, 400_000), np.uint32)  # stored as it is
rows = jax.NamedSharding(mesh, jax.P('data'))
x = jax.make_array_from_process_local_data(rows, whole[2 * process : 2 * process + 2])
wanted = {'x': jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)}
with jax.set_mesh(mesh):
  with recording.open_run(path, {'a': 1}, keep=3) as run:
    for step in (1, 2, 3):
      run.log(step, {'loss': 1.0})
      run.save(step, {'x': x}, {'step': step})
  if process == 0:  # files that process 0 does not read: it must hear of the damage
    for step in (2, 3):
      files = glob.glob(f'{path}/checkpoints/{step}/state/ocdbt.process_1/d/*')
      largest = pathlib.Path(max(files, key=os.path.getsize))
      content = bytearray(largest.read_bytes())
      content[len(content) // 2] ^= 1
      largest.write_bytes(content if step == 2 else content[: len(content) // 2])
  multihost_utils.sync_global_devices('damage')
  with recording.open_run(path, {'a': 1}, resume=True) as run:
    step, state, meta = run.restore(wanted)
    run.log(2, {'loss': 2.0})
    run.save(2, state, {'step': 2})
good = all(np.array_equal(s.data, whole[s.index]) for s in state['x'].addressable_shards)
print(json.dumps([step, meta, good, sorted(os.listdir(path + '/checkpoints'))]))
"""


@pytest.mark.slow
def test_two_processes_share_one_run(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = str(free.getsockname()[1])
  command = [sys.executable, '-c', TWO_PROCESSES, tmp_path / 'run', port]
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  processes = [
    subprocess.Popen([*command, str(index)], env=environment, **pipes) for index in (0, 1)
  ]
  try:
    said = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (out, err) in zip(processes, said, strict=True):
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1]) == [1, {'step': 1}, True, ['1', '2']]
  rows = recording.read_metrics(tmp_path / 'run' / 'metrics.jsonl')
  assert rows == [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 2.0}]


def test_files_are_strict_json(tmp_path):
  nan, inf = float('nan'), float('inf')
  with recording.open_run(tmp_path, CONFIG) as run:
    run.log(1, {'a': jnp.float32(nan), 'b': np.float64(inf), 'c': -inf, 'd': 3, 'e': True})
    path = run.write_json('s.json', {'b': [nan, np.ones(2)], 'a': {1: pathlib.Path('x'), 'y': inf}})
    (row,) = run.metrics()
  line = (tmp_path / 'metrics.jsonl').read_text()
  assert json.loads(line, parse_constant=pytest.fail) == {
    **{'step': 1, 'a': None, 'b': 'inf', 'c': '-inf', 'd': 3, 'e': True}
  }
  assert row.pop('a') != row.get('a')
  assert row == {'step': 1, 'b': inf, 'c': -inf, 'd': 3, 'e': True}
  assert path == tmp_path / 's.json'
  expected = {'a': {'1': 'x', 'y': 'inf'}, 'b': [None, [1.0, 1.0]]}
  assert path.read_text() == json.dumps(expected, indent=2, sort_keys=True) + '\n'


@pytest.mark.parametrize('metrics', [{'step': 1}, {'a': jnp.ones(2)}, {'a': 'x'}, {'a': 1j}])
def test_metrics_that_are_not_scalars_are_refused(tmp_path, metrics):
  with recording.open_run(tmp_path, CONFIG) as run:
    with pytest.raises(types.InputError, match='must be a real scalar'):
      run.log(1, metrics)
    assert run.metrics() == []


def test_tensorboard_holds_the_same_numbers(saved):
  with recording.open_run(saved, CONFIG, resume=True) as run:
    run.restore(abstract(state_of(0)))
    run.log(5, {'loss': 7.0})
  files = sorted((saved / 'tensorboard').iterdir())
  assert len(files) == 2
  events = [list(events_of(file)) for file in files]
  first, second = sorted(events, key=len, reverse=True)
  found = [(e.step, round(e.summary.value[0].simple_value, 6)) for e in first if e.summary.value]
  assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]
  assert [e.step for e in second if e.session_log.status] == [5]
  assert [e.summary.value[0].tag for e in second if e.summary.value] == ['loss']


def events_of(path):
  """The events of a file: length (8 bytes), checksum (4), event, checksum (4)."""
  content = path.read_bytes()
  while content:
    size = int.from_bytes(content[:8], 'little')
    yield recording.event_pb2.Event.FromString(content[12 : 12 + size])
    content = content[16 + size :]


@pytest.mark.slow
def test_orbax_is_quiet_and_other_logging_is_not(tmp_path):
  code = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import absl.logging, jax.numpy as jnp
from trm_jax.runs import recording
with recording.open_run(sys.argv[1], {}) as run:
  run.save(1, {'x': jnp.ones(3)}, {})
absl.logging.info('mine')
"""
  done = subprocess.run(
    [sys.executable, '-c', code, tmp_path],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert 'mine' in done.stdout and 'orbax' not in (done.stdout + done.stderr).lower()
  assert 'heckpoint' not in done.stdout + done.stderr
