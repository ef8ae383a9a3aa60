"""Several real processes: one result for any number of them, one stop, one refusal, one end."""

import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
import toy_task

from experiments.launch import local
from trm_jax import policy, tasks, training
from trm_jax.runs import processes, recording
from trm_jax.training import loop
from trm_jax.types import InputError

ROOT = pathlib.Path(__file__).parents[1]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
TINY = policy.PolicyConfig(
  width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=16, experts=0
)
CONFIG = training.Config(
  task=toy_task.__name__,
  steps=5,
  prompts=4,
  samples=2,
  eval_prompts=8,
  eval_every=2,
  save_every=2,
  mesh='2,1',
  policy=TINY,
  warm_start=training.WarmStart(steps=0, batch=8),
  optimizer=training.Optimizer(warmup=1, learning_rate=3e-2),
  data_dir=os.path.join(os.environ['TFDS_DATA_DIR'], 'processes_test'),
)


class Watch:
  """Stands for the progress display; process `of` asks for a stop after a step."""

  def __init__(self, stop_at=None, of=1):
    self.stop_at, self.of = stop_at, of

  def update(self, step, **_):
    if step == self.stop_at and jax.process_index() == self.of:
      os.kill(os.getpid(), signal.SIGTERM)

  def close(self):
    pass


def digests(path):
  """The leaves of the newest checkpoint under `path`, each with its digest."""
  newest = max((path / 'checkpoints').iterdir(), key=lambda entry: int(entry.name))
  record = json.loads((newest / 'meta' / 'metadata').read_text())
  return newest.name, record['leaves'], record['meta']


def timeless(metrics):
  clocked = ('seconds', 'tokens_per_second')
  return [{k: v for k, v in row.items() if k not in clocked} for row in metrics]


def train_stop_and_resume(root):
  """A whole run, and one that SIGTERM to process 1 stops and that is then resumed."""
  program = training.build(CONFIG)
  processes.in_turn(lambda: tasks.prepare(program.task, CONFIG.data_dir), 'data')
  params = loop.warm_start(program, root / 'warm', progress=Watch())
  whole = loop.run(program, root / 'whole', params, progress=Watch())
  try:
    loop.run(program, root / 'stopped', params, progress=Watch(stop_at=1))
    stopped = None
  except loop.Interrupted as stop:
    stopped = [stop.step, stop.number]
  if jax.process_index() == 0:
    shutil.copytree(root / 'stopped', root / 'moved')
  processes.sync('copied')
  resumed = loop.run(program, root / 'stopped', params, resume=True, progress=Watch())
  return {'whole': timeless(whole), 'stopped': stopped, 'resumed': timeless(resumed)}


def start(count, *command, other=(), others=2):
  """`count` processes of Python with the variables of the launcher for two.

  The last one may differ: in more arguments and in the number of processes it believes in.
  """
  port, pipes = local.free_port(), {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
  shared = os.environ | {'PYTHONPATH': PATHS, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
  return [
    subprocess.Popen(
      [sys.executable, *command, *(other if index else ())],
      env=shared | local.variables(others if index else 2, index, port),
      cwd=ROOT,
      text=True,
      **pipes,
    )
    for index in range(count)
  ]


def finish(started, timeout=300):
  """[(exit code, stdout, stderr)] of the processes."""
  try:
    said = [process.communicate(timeout=timeout) for process in started]
  finally:
    for process in started:
      process.kill()
  return [(p.returncode, out, err) for p, (out, err) in zip(started, said, strict=True)]


TWO = """
import json, pathlib, sys
from trm_jax.runs import processes
processes.join(processes.Hosts(patience=120), {'a': 1}, devices=2)
import processes_test
found = processes_test.train_stop_and_resume(pathlib.Path(sys.argv[1]))
print(json.dumps(found), flush=True)
if processes.jax.process_index() == 1:
  processes.fail('disk full', 3)
try:
  processes.sync('never')
except Exception as error:
  processes.lost(error)
"""


@pytest.fixture(scope='module')
def two(tmp_path_factory):
  """What two processes with a device each did, and where."""
  root = tmp_path_factory.mktemp('two')
  return root, finish(start(2, '-c', TWO, str(root)))


def read(two):
  root, ended = two
  return root, [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


@pytest.mark.slow
def test_both_processes_report_the_same(two):
  _, (first, second) = read(two)
  assert first == second


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_and_the_resumed_run_is_the_whole_one(two):
  root, (found, _) = read(two)
  assert found['stopped'] == [3, signal.SIGTERM]
  assert digests(root / 'moved')[0] == '3'
  assert found['resumed'] == found['whole']
  assert [row['step'] for row in found['whole']] == list(range(6))
  assert digests(root / 'stopped') == digests(root / 'whole')
  rows = recording.read_metrics(root / 'stopped' / 'metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(6))


@pytest.mark.slow
def test_a_failure_of_one_process_ends_the_other_with_its_sentence(two):
  _, ((code, _, err), (other, _, _)) = two
  assert (code, other) == (3, 3)
  assert err.splitlines()[-1] == 'error: process 1: disk full'


@pytest.mark.slow
def test_one_process_with_two_devices_does_the_same(two, tmp_path, caplog):
  root, (found, _) = read(two)
  assert jax.device_count() == 8  # before `build`, which would make them two for other tests, too
  program = training.build(CONFIG)
  tasks.prepare(program.task, CONFIG.data_dir)
  params = loop.warm_start(program, tmp_path / 'warm', progress=Watch())
  metrics = loop.run(program, tmp_path / 'whole', params, progress=Watch())
  close = [
    {k: pytest.approx(v, rel=1e-5, abs=1e-6, nan_ok=True) for k, v in row.items()}
    for row in timeless(metrics)
  ]
  assert found['whole'] == close
  # What two processes left behind is taken up by one, which says that it is not the same place.
  moved = loop.run(program, root / 'moved', params, resume=True, progress=Watch())
  assert timeless(moved) == close
  (said,) = [r.getMessage() for r in caplog.records if 'bit-exact' in r.getMessage()]
  assert 'up to the order of sums' in said and 'device.processes was 2 and is 1' in said


FULL = """
import dataclasses, pathlib, resource
from trm_jax.training import command
from trm_jax import tasks, training
from trm_jax.runs import processes
from trm_jax.training import loop
import processes_test as shared

@dataclasses.dataclass
class Args:
  root: pathlib.Path
  of: int

class Fill(shared.Watch):
  def update(self, step, **_):
    if step == self.stop_at and shared.jax.process_index() == self.of:
      resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))

def main(args):
  processes.join(processes.Hosts(), {}, devices=2)
  program = training.build(shared.CONFIG)
  params = loop.warm_start(program, args.root / f'warm{args.of}', progress=shared.Watch())
  progress = Fill(stop_at=2, of=args.of)
  loop.run(program, args.root / 'full', params, resume=True, progress=progress)

command.run(Args, main)
"""


@pytest.mark.slow
def test_a_full_disk_on_one_process_ends_both_and_loses_nothing(two):
  """After step 2 no file may be longer than 2000 bytes; without the limit it goes on."""
  root, (found, _) = read(two)
  line = ['-c', FULL, '--root', str(root), '--of']
  for of in '10':
    for code, _, err in finish(start(2, *line, of)):
      assert code == 1, err
      last = err.splitlines()[-1]  # orbax's threads say more, before it
      assert last.startswith('error: ') and 'cannot write' in last
      assert last.endswith('(File too large); what was written before is intact')
  for code, _, err in finish(start(2, *line, '-1')):
    assert code == 0, err
  rows = timeless(recording.read_metrics(root / 'full' / 'metrics.jsonl'))
  assert rows == [pytest.approx(row, rel=0, abs=0, nan_ok=True) for row in found['whole']]
  assert digests(root / 'full') == digests(root / 'whole')


TRAIN = ('-m', 'experiments.train_policy', '--patience', '60', '--directory')


@pytest.mark.slow
def test_a_process_that_differs_stops_all_before_anything_is_written(tmp_path):
  started = start(2, *TRAIN, str(tmp_path / 'run'), other=['--samples', '3'], others=3)
  for code, _, err in finish(started, timeout=120):
    assert code == 2, err
    assert 'process 1 differs from process 0: config.config.samples is 8 on process 0 and 3' in err
    assert 'processes is 2 on process 0 and 3 here; start the same command' in err
    assert 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_process_that_never_comes_is_waited_for_and_named():
  code = 'from trm_jax.runs import processes; processes.join(processes.Hosts(patience=2), {})'
  ((code, out, err),) = finish(start(1, '-c', code), timeout=90)
  assert (code, out) == (1, '')
  assert err.splitlines()[-1].startswith('error: waited 2 s for 2 processes at 127.0.0.1:')
  assert 'Traceback' not in err


def test_hosts_are_completed_from_the_environment(monkeypatch):
  for name in ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'):
    monkeypatch.delenv(name, raising=False)
  assert not processes.from_environment(processes.Hosts()).distributed
  processes.join(processes.Hosts(), {})  # alone: nothing happens
  assert not processes.joined()
  for name, value in local.variables(4, 3, 1234).items():
    monkeypatch.setenv(name, value)
  found = processes.from_environment(processes.Hosts(coordinator='there:1'))
  assert found == processes.Hosts(
    distributed=True, coordinator='there:1', processes=4, process_id=3
  )
  monkeypatch.setenv('JAX_PROCESS_ID', '4')
  with pytest.raises(InputError, match='process_id=4 must lie in'):
    processes.from_environment(processes.Hosts())
  monkeypatch.setenv('JAX_PROCESS_ID', 'x')
  with pytest.raises(InputError, match="JAX_PROCESS_ID='x'"):
    processes.from_environment(processes.Hosts())
  with pytest.raises(InputError, match='patience=0'):
    processes.Hosts(patience=0)
  monkeypatch.undo()
  with pytest.raises(InputError, match='coordinator=there:1 has no effect.*--distributed'):
    processes.join(processes.Hosts(coordinator='there:1'), {})
  with pytest.raises(InputError, match='processes=-1'):
    dataclasses.replace(processes.Hosts(), processes=-1, process_id=0)


def test_work_in_turn_is_done_once_by_one_process():
  done = []
  processes.in_turn(lambda: done.append(1), 'once')
  assert done == [1]


def start_four(directory, data_dir, cache):
  """Four processes of the real program under the local launcher, in one process group."""
  words = (
    '--task toy_task --steps 12 --prompts 4 --samples 2 --eval-prompts 8 --eval-every 6'
    ' --save-every 2 --mesh 2,2 --warm-start.steps 4 --warm-start.batch 8 --policy.width 16'
    ' --policy.layers 1 --policy.mlp-width 16 --policy.heads 2 --policy.kv-heads 2'
    ' --policy.experts 0 --optimizer.learning-rate 0.03 --optimizer.warmup 1 --resume'
  ).split()
  line = [sys.executable, '-m', 'experiments.launch.local', '-n', '4', '--', sys.executable]
  line += [*TRAIN, str(directory), '--data-dir', str(data_dir), *words]
  changes = {
    'PYTHONPATH': PATHS,
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'JAX_COMPILATION_CACHE_DIR': str(cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE, 'text': True}
  environment = os.environ | changes
  return subprocess.Popen(line, env=environment, cwd=ROOT, start_new_session=True, **pipes)


def to_the_end(process):
  """Seconds until it has ended well."""
  begun = time.monotonic()
  _, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  return time.monotonic() - begun


@pytest.mark.slow
def test_four_processes_killed_at_random_moments_end_where_the_whole_run_does(tmp_path):
  """SIGKILL to all, KILLS times; a run that gets to its end is compared and another begun."""
  kills, seed = int(os.environ.get('KILLS', '20')), int(os.environ.get('KILL_SEED', '7'))
  print(f'KILLS={kills} KILL_SEED={seed}')
  random_ = random.Random(seed)
  begin = lambda name: start_four(tmp_path / name, tmp_path / 'data', tmp_path / 'cache')
  to_the_end(begin('whole'))
  usual = to_the_end(begin('again'))  # nothing left to compile
  whole = [digests(tmp_path / 'whole' / part) for part in ('rl', 'warm_start')]
  rows = timeless(recording.read_metrics(tmp_path / 'whole' / 'rl' / 'metrics.jsonl'))
  assert [row['step'] for row in rows] == list(range(13))

  def check(name):
    assert [digests(tmp_path / name / part) for part in ('rl', 'warm_start')] == whole
    assert timeless(recording.read_metrics(tmp_path / name / 'rl' / 'metrics.jsonl')) == rows

  check('again')
  done = runs = 0
  while done < kills:
    name, running = f'run{runs}', True
    while running and done < kills:
      process, moment = begin(name), random_.uniform(0.3, 1.0) * usual
      try:
        process.wait(moment)
        running = False
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        done += 1
      print(f'{name} {moment:.2f} s of {usual:.2f} s, killed {done}', flush=True)
      process.communicate()
    to_the_end(begin(name))
    check(name)
    runs += 1


@pytest.mark.slow
@pytest.mark.parametrize(
  'text, said',
  [
    ('RESOURCE_EXHAUSTED: Out of memory', 'JaxRuntimeError: RESOURCE_EXHAUSTED'),
    ('UNAVAILABLE: heartbeat', 'another process is gone'),
  ],
)
def test_memory_that_runs_out_is_not_a_lost_process(monkeypatch, text, said):

  def fail(sentence, code):
    raise SystemExit(f'{code} {sentence}')

  monkeypatch.setattr(processes, 'fail', fail)
  with pytest.raises(SystemExit, match=f'^1 {said}'):
    processes.lost(jax.errors.JaxRuntimeError(text))
