"""Arms x seeds: the same training, one thing changed, several seeds, one compiled program.

All arms of a seed share its warm start, its prompts and its random streams, so differences between
arms can be paired by seed. On a CPU the runs are spread over worker processes of one core each.
Every run has its own directory and checkpoints: an interrupted experiment continues where it was.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax

from experiments.reports.report import Metrics
from trm_jax import tasks, training
from trm_jax.runs import recording
from trm_jax.training import loop, update
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One line of the experiment: a method, and how strong the simulated mismatch is (0 = none)."""

  name: str
  method: MethodWords
  strength: float = 1.0

  @property
  def folder(self) -> str:
    """The name as a directory."""
    return self.name.lower().replace(' ', '_')


def default_workers() -> int:
  """One worker per core on a CPU; one in all where an accelerator does the work."""
  allowed = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  return allowed or 1 if jax.default_backend() == 'cpu' else 1


def _cores(workers: int) -> list[int | None]:
  """A core for each worker; None = do not pin (one worker may use all, or the system cannot).

  Unpinned, the thread pools of several workers compete: 1.7 times the CPU time for a step.
  """
  if workers == 1 or not hasattr(os, 'sched_setaffinity'):
    return [None] * workers
  cores = sorted(os.sched_getaffinity(0))
  return [cores[i % len(cores)] for i in range(workers)]


_PROGRAMS: dict[tuple, training.Program] = {}
_REPORT: Callable[[tuple, int], None]


class _Remote:
  """Passes each step of a run on to whoever shows the progress of all."""

  def __init__(self, job: tuple):
    self.job = job

  def update(self, step: int, **shown: Any) -> None:
    _REPORT(self.job, step)

  def close(self) -> None:
    pass


def _start_worker(report, cores) -> None:
  global _REPORT
  _REPORT = lambda job, step: report.put((job, step))
  core = cores.get()
  if core is not None:
    os.sched_setaffinity(0, {core})  # XLA sizes its thread pool by the cores it may use
  parent = multiprocessing.parent_process()

  def follow():
    """A worker must not outlive its parent, however that died."""
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)

  threading.Thread(target=follow, daemon=True).start()


def _program(config: training.Config, arms: tuple[Arm, ...]) -> training.Program:
  """This process's program; the compiled functions are shared between seeds."""
  shape = (dataclasses.replace(config, seed=0), arms)
  if shape not in _PROGRAMS:
    _PROGRAMS[shape] = training.build(config, tuple(arm.method for arm in arms))
  return dataclasses.replace(_PROGRAMS[shape], config=config)


def _warm(config: training.Config, arms: tuple[Arm, ...], warm: pathlib.Path) -> None:
  loop.warm_start(_program(config, arms), warm, progress=_Remote((config.seed, None)))


def _run(
  config: training.Config,
  arms: tuple[Arm, ...],
  index: int,
  directory: pathlib.Path,
  warm: pathlib.Path,
) -> list[dict[str, Any]]:
  program, arm = _program(config, arms), arms[index]
  # Finished before: this only reads the parameters back.
  params = loop.warm_start(program, warm, progress=_Remote((config.seed, None)))
  return loop.run(
    program,
    directory / arm.folder,
    params,
    arm=update.Arm(index, arm.strength),
    label=arm.name,
    resume=True,
    progress=_Remote((config.seed, index)),
  )


def run_all(
  config: training.Config,
  arms: tuple[Arm, ...],
  *,
  seeds: int,
  directory: pathlib.Path,
  workers: int | None = None,
  warm_starts: pathlib.Path | None = None,
) -> Metrics:
  """Metrics of every (arm name, seed); seeds count up from `config.seed`.

  Warm starts lie beside the runs of their seed, or in `warm_starts`/seedN, where several
  experiments may share them.

  Raises InputError for fewer than one seed or worker; whatever a run raises is raised here.
  """
  for name, value in (('seeds', seeds), ('workers', workers)):
    if value is not None and value < 1:
      raise InputError(f'{name}={value} must be at least 1.')
  plain = dataclasses.asdict(MethodWords())
  for name, value in dataclasses.asdict(config.method).items():
    if value != plain[name]:
      raise InputError(
        f'method.{name}={value} has no effect here, as every arm brings its own method; leave out'
        ' --method.*.'
      )
  training.build(
    config, tuple(arm.method for arm in arms)
  )  # bad input is found here, not in workers
  workers = default_workers() if workers is None else workers
  tasks.prepare(tasks.load(config.task), config.data_dir)

  configs = [dataclasses.replace(config, seed=config.seed + i) for i in range(seeds)]
  folders = [directory / f'seed{c.seed}' for c in configs]
  warm = [f / 'warm_start' if warm_starts is None else warm_starts / f.name for f in folders]
  total = seeds * (config.warm_start.steps + len(arms) * config.steps)
  progress = recording.Progress(total, directory.name)
  spread = _in_turn if workers == 1 else _over_processes
  found = spread(configs, arms, folders, warm, workers, progress)
  progress.close()
  return found


def _in_turn(configs, arms, folders, warm, workers, progress) -> Metrics:
  """One run after the other in this process: an accelerator belongs to one process."""
  del workers
  global _REPORT
  done: dict[tuple, int] = {}
  found: Metrics = {}

  def report(job, step):
    done[job] = step
    progress.update(sum(done.values()), runs=f'{len(found)} of {len(configs) * len(arms)}')

  _REPORT = report
  for config, folder, start in zip(configs, folders, warm, strict=True):
    for index, arm in enumerate(arms):
      found[arm.name, config.seed] = _run(config, arms, index, folder, start)
      done[config.seed, None], done[config.seed, index] = config.warm_start.steps, config.steps
  return found


def _over_processes(configs, arms, folders, warm, workers, progress) -> Metrics:
  """Runs spread over worker processes; a warm start is shared by all arms of its seed."""
  done: dict[tuple, int] = {}
  found: Metrics = {}

  def stop(number, _):
    raise loop.Interrupted(sum(done.values()), number)

  context, before = multiprocessing.get_context('spawn'), signal.getsignal(signal.SIGTERM)
  with context.Manager() as manager, _worker_environment():
    report, cores = manager.Queue(), manager.Queue()
    for core in _cores(workers):
      cores.put(core)
    others = multiprocessing.active_children()
    signal.signal(signal.SIGTERM, stop)
    pool = concurrent.futures.ProcessPoolExecutor(
      workers, context, initializer=_start_worker, initargs=(report, cores)
    )
    try:
      waiting = {
        pool.submit(_warm, c, arms, w): ('warm', i)
        for i, (c, w) in enumerate(zip(configs, warm, strict=True))
      }
      while waiting:
        finished, _ = concurrent.futures.wait(waiting, 0.5, concurrent.futures.FIRST_COMPLETED)
        _drain(report, done)
        for future in finished:
          kind, i = waiting.pop(future)
          result, config = future.result(), configs[i]
          if kind == 'warm':
            done[config.seed, None] = config.warm_start.steps
            for index in range(len(arms)):
              job = pool.submit(_run, config, arms, index, folders[i], warm[i])
              waiting[job] = (index, i)
          else:
            done[config.seed, kind] = config.steps
            found[arms[kind].name, config.seed] = result
        progress.update(sum(done.values()), runs=f'{len(found)} of {len(configs) * len(arms)}')
    except BaseException:
      # SIGTERM makes a run save and stop after its current step.
      for child in multiprocessing.active_children():
        if child not in others:
          child.terminate()
      pool.shutdown(wait=True, cancel_futures=True)
      raise
    finally:
      signal.signal(signal.SIGTERM, before)
    pool.shutdown()
  return found


def _drain(report, done: dict[tuple, int]) -> None:
  """Takes in what the workers have reported so far."""
  while True:
    try:
      job, step = report.get_nowait()
    except queue.Empty:
      return
    done[job] = max(step, done.get(job, 0))


@contextlib.contextmanager
def _worker_environment():
  """What workers inherit: huge pages for large temporaries.

  Page faults of freshly mapped temporaries were 40 % of a training step where this was measured.
  """
  before = dict(os.environ)
  os.environ.setdefault('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1')
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)
