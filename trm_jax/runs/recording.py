"""The run directory: configuration, metrics and checkpoints.

    run/config.json            config, versions, commit, device, time of creation
    run/metrics.jsonl          one JSON object a line
    run/tensorboard/           the same numbers as events
    run/checkpoints/<step>/    orbax: `state` (arrays) and `meta` (JSON, with a digest per leaf)
    run/lock                   host and pid of the process that writes, while it does
    run/damaged/<step>/        checkpoints that failed their digest and were passed over

Strict JSON throughout: NaN is null, infinities are the strings 'inf' and '-inf'; `read_metrics`
turns them back into floats.
"""

import collections
import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import trm_jax
from trm_jax import types
from trm_jax.runs import digests, files, locks, progress, provenance

try:
  import orbax.checkpoint as ocp
  from tensorboardX import event_file_writer
  from tensorboardX.proto import event_pb2
except ModuleNotFoundError as error:
  raise trm_jax._without(error, __name__) from error

logger = logging.getLogger(__name__)
# Orbax reports every phase of a save at INFO, and at ERROR, with pages of traceback, what it also
# raises. Only its own records are dropped, so other users of absl logging lose nothing.
logging.getLogger('absl').addFilter(
  lambda record: record.levelno == logging.WARNING or 'orbax' not in record.pathname
)
Progress = progress.Progress
read_metrics = files.read_metrics
LOCK = 'lock'


def open_run(
  directory: str | os.PathLike,
  config: dict,
  *,
  resume: bool = False,
  keep: int = 2,
  wait: bool = False,
) -> 'Run':
  """Creates a run directory with its config.json, or reopens one; `keep` >= 1 checkpoints stay.

  Called by all processes, after `jax.distributed.initialize`. `config` holds what defines the run:
  leave out what may differ on resuming (the directory, the number of steps). resume=True on an
  empty or absent directory starts afresh. With `wait`, a directory in which another process writes
  is opened once that has ended. Raises InputError if the directory cannot be written, holds other
  files, a run (without resume) or a run with another config, or is written by another process;
  OSError on a full disk.
  """
  if keep < 1:
    raise types.InputError(f'keep={keep} must be at least 1.')
  path, config = pathlib.Path(directory).absolute(), files.plain(config, 'config')
  with contextlib.ExitStack() as ends:
    try:
      path.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=path, suffix='.tmp').close()  # fails where nothing can be written
      ends.enter_context(locks.hold(path / LOCK, wait=wait))
      entries = (entry for entry in path.iterdir() if entry.suffix != '.tmp')
      names = sorted(entry.name for entry in entries if entry.name != LOCK)
      # Nobody writes before everybody has looked.
      multihost_utils.sync_global_devices('trm_jax_look')
      if names and 'config.json' not in names:
        raise types.InputError(
          f'directory={path} holds other files ({names[0]}); choose an empty directory.'
        )
      if names and not resume:
        raise types.InputError(
          f'directory={path} already holds a run; pass --resume to continue it or choose another'
          ' directory.'
        )
      if names:
        provenance.compare(path / 'config.json', config)
      else:
        about = {'config': config, 'created': time.strftime('%Y-%m-%dT%H:%M:%S%z')}
        Run(path, keep).write_json('config.json', about | provenance.everything())
    except OSError as error:
      if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise
      raise types.InputError(
        f'directory={path} cannot be written ({os.strerror(error.errno)}); choose another'
        ' directory.'
      ) from error
    multihost_utils.sync_global_devices('trm_jax_open')
    if not (path / 'config.json').exists():
      raise types.InputError(
        f'directory={path} differs from host to host; choose one that all see.'
      )
    files.cut_back(path / 'metrics.jsonl', math.inf)
    run = Run(path, keep)
    run.ends.push(ends.pop_all())
    return run


class Run(contextlib.AbstractContextManager):
  """One run directory, made by `open_run`; a context manager that waits for pending saves."""

  def __init__(self, path: pathlib.Path, keep: int):
    self.path = path
    self._keep = keep
    self._manager = self._events = self._restored = None
    self.ends = contextlib.ExitStack()  # what `close` lets go of last

  def log(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Appends {"step": step, **metrics} to metrics.jsonl and TensorBoard, on process 0 only.

    Values are real scalars (Python, NumPy, jax). Raises InputError for anything else and for a
    metric named step, OSError naming the file on a full disk.
    """
    if jax.process_index() != 0:
      return
    values = {k: np.asarray(v).item() if np.size(v) == 1 else v for k, v in metrics.items()}
    for name, value in values.items():
      if name == 'step' or not isinstance(value, (int, float)):
        raise types.InputError(
          f'metric {name}={value!r:.200} must be a real scalar with a name other than step.'
        )
    line = json.dumps(files.strict({'step': step, **values}), allow_nan=False)
    with files.clear_errors(self.path / 'metrics.jsonl') as path, open(path, 'a') as file:
      file.write(line + '\n')
    with files.clear_errors(self.path / 'tensorboard') as path:
      self._log_events(path, step, values)

  def save(self, step: int, state: Any, meta: dict) -> None:
    """Saves the pytree `state` and the JSON `meta` as checkpoint `step`, in the background.

    Leaves are arrays (sharded, bfloat16, typed PRNG keys ...) or Python numbers; `meta` comes back
    exactly. A step already saved is skipped. Called by all processes. Raises InputError for what
    cannot be stored and for a step older than the newest one, OSError on a full disk (the write is
    in the background, so possibly from the next save or from `close`).
    """
    leaves, manager = digests.leaves(state), self._checkpoints()
    if step in manager.all_steps():
      return
    for name, leaf in leaves.items():
      if isinstance(leaf, np.generic) or np.size(leaf) == 0:  # orbax cannot read / write these
        raise types.InputError(f'state{name}={leaf!r} cannot be saved; use a non-empty jax array.')
    record = {'meta': meta, 'leaves': digests.records(state)}
    if json.loads(json.dumps(record, default=repr, skipkeys=True)) != record:
      raise types.InputError(
        f'meta={meta!r:.200} does not survive JSON; use str keys, lists, Python numbers and no NaN.'
      )
    items = {'state': ocp.args.StandardSave(state)}
    items['meta'] = ocp.args.JsonSave(record | {'digest': _digest_json(record)})
    with files.clear_errors(self.path / 'checkpoints'):
      saved = manager.save(step, args=ocp.args.Composite(**items))
    if not saved:
      newest = manager.latest_step()
      raise types.InputError(f'step={step} is older than checkpoint {newest}; call restore first.')

  def restore(self, abstract_state: Any) -> tuple[int, Any, dict] | None:
    """(step, state, meta) of the newest good checkpoint, None where there is none.

    `abstract_state` is the tree of the saved state with jax.ShapeDtypeStruct leaves that carry the
    wanted shardings (Python numbers stand for themselves). Names, shapes, dtypes and digests of all
    leaves are compared; a checkpoint that fails is passed over with a warning, moved to damaged/.
    metrics.jsonl is cut back to the lines up to the restored step (none without a checkpoint).
    Raises DamagedError with all causes if every checkpoint fails.
    """
    manager, failed = self._checkpoints(), {}
    with files.clear_errors(self.path / 'checkpoints'):
      manager.wait_until_finished()
    for step in _agreed(sorted(manager.all_steps(), reverse=True)):
      restored, cause = None, 'damaged on another process'
      try:
        restored = self._read(step, abstract_state)
      except Exception as error:  # orbax raises a bare Exception for half an array
        cause = _cause(error)
      # What follows has collectives, so all processes take the same way.
      if np.all(multihost_utils.process_allgather(restored is not None)):
        state, record = restored
        if not (cause := _differing(record['leaves'], digests.records(state))):
          self._set_aside(failed)
          self._restored = step
          files.cut_back(self.path / 'metrics.jsonl', step)
          return step, state, record['meta']
      failed[step] = cause
      logger.warning('checkpoint %d of %s cannot be used (%s)', step, self.path, cause)
    if failed:
      causes = '; '.join(f'step {step}: {cause}' for step, cause in failed.items())
      raise types.DamagedError(
        f'no checkpoint of {self.path} can be used: {causes}; choose another directory.'
      )
    self._restored = -1
    files.cut_back(self.path / 'metrics.jsonl', -1)
    return None

  def write_json(self, name: str, obj: Any) -> pathlib.Path:
    """Writes `obj` atomically to the file `name` of the run (process 0 only); returns its path."""
    text = json.dumps(files.plain(obj, name), indent=2, sort_keys=True) + '\n'
    return files.write(self.path / name, text.encode())

  def check_rows(self, steps: Iterable[int]) -> None:
    """Raises InputError unless metrics.jsonl has one row for each of `steps`, in order.

    For use after `restore`: a file that lost or gained lines would end as another than it should.
    """
    multihost_utils.sync_global_devices('trm_jax_rows')  # process 0 has cut the file back
    logged, due = [row['step'] for row in self.metrics()], list(steps)
    if logged == due:
      return
    count = collections.Counter(logged)
    lost = [step for step in due if step not in count]
    extra = [step for step in sorted(count) if count[step] > 1 or step not in set(due)]
    wrong = [f'has no row of step {_first(lost)}'] if lost else []
    wrong += [f'has rows too many of step {_first(extra)}'] if extra else []
    raise types.InputError(
      f'{self.path / "metrics.jsonl"} {" and ".join(wrong) or "has rows out of order"}: put back a'
      ' copy of the file as it was, or start again in another directory.'
    )

  def check_identity(self, identity: dict) -> None:
    """Raises InputError naming what differs from the identity.json of this run, if it has one.

    Without one it is written: digests of all that a run must find unchanged when it goes on.
    """
    path = self.path / 'identity.json'
    if path.exists():
      provenance.compare_identity(path, identity)
    multihost_utils.sync_global_devices('trm_jax_identity')
    self.write_json(path.name, identity)

  def metrics(self) -> list[dict]:
    """The rows logged so far."""
    return files.read_metrics(self.path / 'metrics.jsonl')

  def close(self) -> None:
    """Waits for pending saves and closes all files; may be called twice. Raises as `save` does."""
    with files.clear_errors(self.path), contextlib.ExitStack() as stack:
      stack.push(self.ends.pop_all())
      for part in filter(None, (self._events, self._manager)):
        stack.callback(part.close)
      self._events = self._manager = None

  def __exit__(self, kind, *_) -> None:
    if kind is None or jax.process_count() == 1:  # else the others may not be there to wait with
      self.close()

  def _checkpoints(self) -> ocp.CheckpointManager:
    if self._manager is None:
      options = ocp.CheckpointManagerOptions(
        max_to_keep=self._keep,
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(barrier_sync_fn=_meet),
      )
      with files.clear_errors(self.path / 'checkpoints') as path:
        self._manager = ocp.CheckpointManager(path, options=options)
    return self._manager

  def _read(self, step: int, abstract_state: Any) -> tuple[Any, dict]:
    """(state, {'meta', 'leaves'}), read without the other processes: they may fail where we do not.

    Orbax's manager waits for all after a restore, which a process with a damaged file never joins.
    """
    me = jax.process_index()
    alone = {'primary_host': me, 'active_processes': {me}, 'barrier_sync_key_prefix': f'read{me}'}
    alone = {'multiprocessing_options': ocp.options.MultiprocessingOptions(**alone)}
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(**alone))
    with ocp.Checkpointer(handler, **alone) as reader:

      def load(**items):
        return reader.restore(self.path / 'checkpoints' / str(step), ocp.args.Composite(**items))

      record = load(meta=ocp.args.JsonRestore())['meta']
      if record.pop('digest') != _digest_json(record):
        raise ValueError('the digest of meta differs')
      if differing := record['leaves'].keys() ^ digests.leaves(abstract_state).keys():
        raise ValueError(f'the trees differ in {sorted(differing)}')
      return load(state=ocp.args.StandardRestore(abstract_state))['state'], record

  def _set_aside(self, steps: Mapping[int, str]) -> None:
    """Moves damaged steps away: orbax silently saves no step below the newest one."""
    with files.clear_errors(self.path / 'damaged') as path:
      for name in map(str, steps if jax.process_index() == 0 else ()):
        path.mkdir(exist_ok=True)
        shutil.rmtree(path / name, ignore_errors=True)
        os.replace(self.path / 'checkpoints' / name, path / name)
    multihost_utils.sync_global_devices('trm_jax_set_aside')
    self._checkpoints().reload()

  def _log_events(self, path: pathlib.Path, step: int, values: dict) -> None:
    now = time.time()
    if self._events is None:
      # Written directly: SummaryWriter's background thread dies on a full disk and then blocks us.
      path.mkdir(exist_ok=True)
      suffix = f'.{os.getpid()}.{self._restored}'
      self._events = event_file_writer.EventsWriter(str(path / 'events'), suffix)
      if self._restored is not None:  # TensorBoard then drops the earlier events from this step on
        start = {'status': event_pb2.SessionLog.START}
        event = event_pb2.Event(step=self._restored + 1, wall_time=now, session_log=start)
        self._events.write_event(event)
    summary = {'value': [{'tag': k, 'simple_value': v} for k, v in values.items()]}
    self._events.write_event(event_pb2.Event(step=step, wall_time=now, summary=summary))


def _first(steps: list[int]) -> str:
  return ', '.join(map(str, steps[:8])) + (f' and {len(steps) - 8} more' if len(steps) > 8 else '')


def _agreed(steps: list[int]) -> list[int]:
  """The list of process 0."""
  count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
  mine = np.resize(np.array(steps or [0], np.int32), count)
  return np.asarray(multihost_utils.broadcast_one_to_all(mine)).tolist() if count else []


def _differing(saved: dict[str, list], read: dict[str, list]) -> str | None:
  """Orbax reads flipped bits and casts dtypes without a word."""
  for name, about in read.items():
    if saved[name] != about:
      return f'state{name} was saved as {saved[name]} and is read as {about}'
  return None


def _digest_json(record: dict) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _meet(*, key: str, timeout_ms: int) -> None:
  """Where orbax's threads wait for the other processes during a save.

  It would meet them even while an error of this process is on its way up; but they wait elsewhere,
  for a write that does not come, so the error would be heard of 20 minutes later.
  """
  if error := sys.exc_info()[1]:
    raise error
  ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _cause(error: Exception) -> str:
  """One short line; of a TensorStore specification, which fills a page, only the leaf's name."""
  text, _, details = ' '.join(str(error).split()).partition(' See full TensorStore details')
  leaf = re.findall(r"'path': '([^/'][^']*)/'", details)[-1:]
  return f'{type(error).__name__}: {text[:300]}' + ''.join(f' ({name})' for name in leaf)
