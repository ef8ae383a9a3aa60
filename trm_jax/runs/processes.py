"""The processes of one run: they start alike, fail together and stop at one agreed step.

Every host runs the same program. `join` connects them before any other use of jax and refuses a
process that differs; from then on an error on one of them ends all with its sentence, instead of
leaving the others in a collective that nobody answers. A process alone needs none of it.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

# The key-value store of the coordination service has no public name; it alone works where the
# processes do not even agree on how many they are, which any collective of devices would hang on.
from jax._src import distributed as _jax_distributed
from jax.experimental import multihost_utils

from trm_jax.runs import provenance
from trm_jax.types import InputError

_ABOUT, _FAILED = 'trm_jax/about', 'trm_jax/failed'
_caught: list[int] | None = None  # signals, once `join` has installed the handlers for good
_over = threading.Event()  # this process ends by itself: its watch has nothing more to say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
  """How a process finds the others; environment variables stand in for what is not given."""

  # Run as one of several processes; start the same command on each. On TPU pods, GKE and Slurm
  # nothing else is needed; elsewhere the three settings below, or their variables.
  distributed: bool = False
  # HOST:PORT of process 0 (JAX_COORDINATOR_ADDRESS).
  coordinator: str | None = None
  # Number of processes (JAX_NUM_PROCESSES).
  processes: int | None = None
  # Which of them this is, from 0 on (JAX_PROCESS_ID).
  process_id: int | None = None
  # Seconds to wait for all to come.
  patience: int = 300

  def __post_init__(self):
    if self.patience < 1:
      raise InputError(f'patience={self.patience} must be at least 1 second.')
    if self.processes is not None and self.processes < 1:
      raise InputError(f'processes={self.processes} must be at least 1.')
    if None not in (self.processes, self.process_id):
      if not 0 <= self.process_id < self.processes:
        raise InputError(
          f'process_id={self.process_id} must lie in 0..{self.processes - 1}, as there are'
          f' processes={self.processes}.'
        )


def from_environment(hosts: Hosts) -> Hosts:
  """`hosts`, completed from the environment; distributed where JAX_NUM_PROCESSES is set.

  Raises InputError for variables that are not numbers or out of range.
  """
  names = {'processes': 'JAX_NUM_PROCESSES', 'process_id': 'JAX_PROCESS_ID'}
  values = {'coordinator': hosts.coordinator or os.environ.get('JAX_COORDINATOR_ADDRESS')}
  for field, name in names.items():
    value, text = getattr(hosts, field), os.environ.get(name)
    if value is None and text is not None and not text.isdecimal():
      raise InputError(
        f'The environment variable {name}={text!r} must be an integer >= 0; set it so or unset it.'
      )
    values[field] = int(text) if value is None and text is not None else value
  several = hosts.distributed or 'JAX_NUM_PROCESSES' in os.environ
  return dataclasses.replace(hosts, distributed=several, **values)


def joined() -> bool:
  """Whether this process has joined others."""
  return jax.distributed.is_initialized()


def join(hosts: Hosts, about: dict[str, Any], *, devices: int = 1) -> None:
  """Connects this process with the others, before any other use of jax; alone it does nothing.

  `about` is what must be the same on all (JSON-able), beside the commit, the versions and the
  number of processes. `devices` is the size of the mesh: CPU processes simulate their share of it.
  From here on SIGINT and SIGTERM only ask for a stop (`stops`). Raises InputError where the
  processes differ or cannot be found, TimeoutError where one does not come within the patience.
  """
  global _caught
  typed, hosts = hosts, from_environment(hosts)
  if not hosts.distributed:
    for name in ('coordinator', 'processes', 'process_id'):
      if getattr(typed, name) is not None:
        raise InputError(
          f'{name}={getattr(typed, name)} has no effect on a process that runs alone: pass'
          ' --distributed as well.'
        )
    return
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # Two programs in flight would share one connection and mix their messages.
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from `stops`
  where = f' at {hosts.coordinator}' if hosts.coordinator else ''
  late = (
    f'waited {hosts.patience} s for {hosts.processes or "all"} processes{where}, and not all came;'
    ' start the same command on every host, or raise --patience.'
  )
  with _bounded(hosts.patience, late):
    try:
      jax.distributed.initialize(
        hosts.coordinator,
        hosts.processes,
        hosts.process_id,
        initialization_timeout=hosts.patience + 60,  # its own way to give up is to abort
      )
    except ValueError as error:
      raise InputError(
        f'--distributed finds no cluster ({error}): pass --coordinator HOST:PORT, --processes N and'
        ' --process-id I, or use experiments.launch.local.'
      ) from error
  state = _jax_distributed.global_state
  _caught = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: _caught.append(n))
  watch = threading.Thread(target=_watch, args=(state.client,), daemon=True)
  watch.start()
  atexit.register(lambda: (_over.set(), watch.join()))  # before jax disconnects
  _compare(state, about, hosts.patience)
  with contextlib.suppress(RuntimeError):  # not needed where devices exist already
    jax.config.update('jax_num_cpu_devices', max(1, devices // state.num_processes))
  with _bounded(hosts.patience, late):
    jax.devices()


def _compare(state, about: dict[str, Any], patience: int) -> None:
  """Refuses this process if it differs from process 0, and waits for the others to have agreed."""
  mine = {'config': about, 'processes': state.num_processes, 'source': provenance.source()}
  mine |= provenance.program()
  mine = json.loads(json.dumps(mine, default=str))
  if state.process_id == 0:
    state.client.key_value_set(_ABOUT, json.dumps(mine))
  try:
    first = json.loads(state.client.blocking_key_value_get(_ABOUT, patience * 1000))
    if first['source'] == mine['source']:  # the same files, whatever git calls them
      first |= {name: mine[name] for name in ('commit', 'dirty')}
    if differing := provenance.differences(first, mine, 'is {} on process 0 and {} here'):
      raise InputError(
        f'process {state.process_id} differs from process 0: {differing}; start the same command of'
        ' the same version on every host.'
      )
    state.client.wait_at_barrier('trm_jax_alike', patience * 1000)
  except jax.errors.JaxRuntimeError as error:
    raise TimeoutError(
      f'a process connected and then did not answer within {patience} s; see its own output.'
    ) from error


@contextlib.contextmanager
def _bounded(seconds: float, sentence: str) -> Iterator[None]:
  """Ends the process with `sentence` and exit code 1 if the body takes longer."""

  def give_up():
    sys.stderr.write(f'error: {sentence}\n')
    _leave(1)

  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _watch(client) -> None:
  """Ends this process when another one has failed: a collective it waits in would never end."""
  while not _over.wait(0.3):
    try:
      failed = json.loads(client.key_value_try_get(_FAILED))
    except jax.errors.JaxRuntimeError:  # nothing there, or the service is gone
      continue
    if not _over.is_set():
      _over.set()
      sys.stderr.write(f'error: process {failed["process"]}: {failed["sentence"]}\n')
      _leave(failed['code'])


def _leave(code: int) -> NoReturn:
  sys.stdout.flush()
  sys.stderr.flush()
  if _jax_distributed.global_state.service:
    time.sleep(1)  # it holds the store of keys: the others must have read why
  os._exit(code)  # at a normal exit jax would wait for processes that do not come


def fail(sentence: str, code: int) -> NoReturn:
  """Ends this process with exit code `code`, and all others with the same sentence."""
  if not joined():
    sys.exit(code)
  _over.set()
  state = _jax_distributed.global_state
  failed = {'process': state.process_id, 'sentence': sentence, 'code': code}
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was faster, or process 0 died
    state.client.key_value_set(_FAILED, json.dumps(failed))
  _leave(code)


def lost(error: Exception) -> NoReturn:
  """Ends all processes for an unforeseen error; collectives fail so where a process is gone."""
  if _over.wait(1):  # another one failed first: its sentence is ending this one
    time.sleep(60)
  own = str(error).startswith(('RESOURCE_EXHAUSTED', 'INVALID_ARGUMENT', 'UNIMPLEMENTED'))
  if 'Gloo' in str(error) or (isinstance(error, jax.errors.JaxRuntimeError) and not own):
    sentence = f'another process is gone, or does not answer ({str(error).splitlines()[0][:200]})'
  else:
    traceback.print_exception(error)
    sentence = f'{type(error).__name__}: {error}'
  sys.stderr.write(f'error: {sentence}\n')
  fail(sentence, 1)


def sync(name: str) -> None:
  """Waits until all processes are here; `name` is the same on all."""
  multihost_utils.sync_global_devices(f'trm_jax_{name}')


def in_turn(work: Callable[[], None], name: str) -> None:
  """Does `work` on process 0 and then on the others, who find what is shared already there."""
  for first in (True, False):
    if first == (jax.process_index() == 0):
      work()
    sync(name)


@contextlib.contextmanager
def stops() -> Iterator[Callable[[], int]]:
  """Collects SIGINT and SIGTERM instead of dying of them; yields `look() -> signal number or 0`.

  Under the mesh of the run, `look` is called once a step by all processes and says the same on all;
  with several it speaks of the step before, so that nobody waits for it.
  """
  caught, before = _caught, {}
  if caught is None:
    caught = []
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs it handles signals
      for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda n, _: caught.append(n))
  asked = None

  def look() -> int:
    nonlocal asked
    mine = caught[0] if caught else 0
    if jax.process_count() == 1:
      return mine
    earlier, asked = asked, _largest(mine)
    return 0 if earlier is None else int(earlier)

  try:
    yield look
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _largest(mine: int) -> jax.Array:
  """The largest of the numbers that the processes bring."""
  mesh = jax.sharding.get_mesh()
  place = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
  one = np.full(1, mine, np.int32)
  return _max(jax.make_array_from_callback((mesh.size,), place, lambda _: one))


_max = jax.jit(jnp.max)
