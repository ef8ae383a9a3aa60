"""The run directory: configuration, metrics and checkpoints.

    run/config.json            config, versions, commit, device, time of creation
    run/metrics.jsonl          one JSON object a line
    run/tensorboard/           the same numbers as events
    run/checkpoints/<step>/    orbax: `state` (arrays) and `meta` (JSON, with a digest per leaf)
    run/damaged/<step>/        checkpoints that failed their digest and were passed over

Strict JSON throughout: NaN is null, infinities are the strings 'inf' and '-inf'; `read_metrics`
turns them back into floats.
"""

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
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2

from trm_jax import digests, progress, provenance, types

logger = logging.getLogger(__name__)
# Orbax reports every phase of a save at INFO, and at ERROR, with pages of traceback, what it also
# raises. Only its own records are dropped, so other users of absl logging lose nothing.
logging.getLogger('absl').addFilter(
  lambda record: record.levelno == logging.WARNING or 'orbax' not in record.pathname
)
Progress = progress.Progress


def open_run(
  directory: str | os.PathLike, config: dict, *, resume: bool = False, keep: int = 2
) -> 'Run':
  """Creates a run directory with its config.json, or reopens one; `keep` >= 1 checkpoints stay.

  Called by all processes, after `jax.distributed.initialize`. `config` holds what defines the run:
  leave out what may differ on resuming (the directory, the number of steps). resume=True on an
  empty or absent directory starts afresh. Raises InputError if the directory cannot be written,
  holds other files, a run (without resume) or a run with another config; OSError on a full disk.
  """
  if keep < 1:
    raise types.InputError(f'keep={keep} must be at least 1.')
  path, config = pathlib.Path(directory).absolute(), _plain(config, 'config')
  try:
    path.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix != '.tmp')
    tempfile.TemporaryFile(dir=path, suffix='.tmp').close()  # fails where nothing can be written
    multihost_utils.sync_global_devices('trm_jax_look')  # nobody writes before everybody has looked
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
      Run(path, keep).write_json('config.json', about | provenance.found())
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
      raise
    raise types.InputError(
      f'directory={path} cannot be written ({os.strerror(error.errno)}); choose another directory.'
    ) from error
  multihost_utils.sync_global_devices('trm_jax_open')
  if not (path / 'config.json').exists():
    raise types.InputError(f'directory={path} differs from host to host; choose one that all see.')
  _cut_back(path / 'metrics.jsonl', math.inf)
  return Run(path, keep)


class Run(contextlib.AbstractContextManager):
  """One run directory, made by `open_run`; a context manager that waits for pending saves."""

  def __init__(self, path: pathlib.Path, keep: int):
    self.path = path
    self._keep = keep
    self._manager = self._events = self._restored = None

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
    line = json.dumps(_strict({'step': step, **values}), allow_nan=False)
    with _clear_errors(self.path / 'metrics.jsonl') as path, open(path, 'a') as file:
      file.write(line + '\n')
    with _clear_errors(self.path / 'tensorboard') as path:
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
    with _clear_errors(self.path / 'checkpoints'):
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
    with _clear_errors(self.path / 'checkpoints'):
      manager.wait_until_finished()
    for step in _agreed(sorted(manager.all_steps(), reverse=True)):
      found, cause = None, 'damaged on another process'
      try:
        found = self._read(step, abstract_state)
      except Exception as error:  # orbax raises a bare Exception for half an array
        cause = _cause(error)
      # What follows has collectives, so all processes take the same way.
      if np.all(multihost_utils.process_allgather(found is not None)):
        state, record = found
        if not (cause := _differing(record['leaves'], digests.records(state))):
          self._set_aside(failed)
          self._restored = step
          _cut_back(self.path / 'metrics.jsonl', step)
          return step, state, record['meta']
      failed[step] = cause
      logger.warning('checkpoint %d of %s cannot be used (%s)', step, self.path, cause)
    if failed:
      causes = '; '.join(f'step {step}: {cause}' for step, cause in failed.items())
      raise types.DamagedError(
        f'no checkpoint of {self.path} can be used: {causes}; choose another directory.'
      )
    self._restored = -1
    _cut_back(self.path / 'metrics.jsonl', -1)
    return None

  def write_json(self, name: str, obj: Any) -> pathlib.Path:
    """Writes `obj` atomically to the file `name` of the run (process 0 only); returns its path."""
    text = json.dumps(_plain(obj, name), indent=2, sort_keys=True) + '\n'
    return _write(self.path / name, text.encode())

  def metrics(self) -> list[dict]:
    """The rows logged so far."""
    return read_metrics(self.path / 'metrics.jsonl')

  def close(self) -> None:
    """Waits for pending saves and closes all files; may be called twice. Raises as `save` does."""
    with _clear_errors(self.path), contextlib.ExitStack() as stack:
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
      with _clear_errors(self.path / 'checkpoints') as path:
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
    with _clear_errors(self.path / 'damaged') as path:
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


def read_metrics(path: str | os.PathLike) -> list[dict]:
  """The rows of a metrics.jsonl, without a half-written last one; InputError if it is damaged."""
  rows = [row for _, row in _parse(pathlib.Path(path))]
  if rows and rows[-1] is None:
    rows.pop()
  if None in rows:
    raise types.InputError(f'{path}: line {rows.index(None) + 1} is broken; remove that line.')
  special = {None: math.nan, 'inf': math.inf, '-inf': -math.inf}
  return [{name: special.get(value, value) for name, value in row.items()} for row in rows]


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


def _strict(value: Any) -> Any:
  """`value` as strict JSON can hold it; see the head of this file."""
  if isinstance(value, Mapping):
    return {str(key): _strict(entry) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [_strict(entry) for entry in value]
  if hasattr(value, 'tolist'):
    return _strict(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None if math.isnan(value) else str(value)
  return os.fspath(value) if isinstance(value, os.PathLike) else value


def _plain(value: Any, name: str) -> Any:
  try:
    return json.loads(json.dumps(_strict(value), allow_nan=False))
  except TypeError as error:
    raise types.InputError(
      f'{name} cannot be written as JSON ({error}); use str keys, lists, numbers and texts.'
    ) from error


def _parse(path: pathlib.Path) -> list[tuple[bytes, dict | None]]:
  """(line, row) of a metrics.jsonl; the row is None where the line is not whole or has no step."""
  parsed = []
  for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
    row = None
    with contextlib.suppress(ValueError):
      row = json.loads(line) if line.endswith(b'}\n') else None
    if row is not None and not isinstance(row.get('step'), int):  # a damaged name or number
      row = None
    parsed.append((line, row))
  return parsed


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


def _cut_back(path: pathlib.Path, step: int | float) -> None:
  """Keeps the whole lines of metrics.jsonl up to `step`."""
  parsed = _parse(path)
  kept = [line for line, row in parsed if row is not None and row['step'] <= step]
  if len(kept) < len(parsed):
    _write(path, b''.join(kept))


def _write(path: pathlib.Path, content: bytes) -> pathlib.Path:
  """Replaces a file atomically, on process 0 only."""
  if jax.process_index() == 0:
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    with _clear_errors(path), contextlib.ExitStack() as stack:
      stack.callback(temporary.unlink, missing_ok=True)
      with open(temporary, 'wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
  return path


@contextlib.contextmanager
def _clear_errors(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Turns what the file system refuses into an OSError that names the file, in one sentence."""
  try:
    yield path
  except Exception as error:
    # tensorstore raises ValueErrors that quote the error number of the system call
    quoted = re.search(r"os_error_code='(\d+)'", str(error))
    if not (quoted or isinstance(error, OSError)):
      raise
    code = int(quoted[1]) if quoted else error.errno
    reason = os.strerror(code) if code else str(error)
    message = f'cannot write {path} ({reason}); what was written before is intact'
    raise OSError(code, message) from error
