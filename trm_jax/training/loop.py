"""The host's side of training: data in, steps dispatched, metrics out, checkpoints, resume.

The metrics of step k are fetched while step k+1 runs. A checkpoint holds the whole `TrainState` and
the data cursor, so a run that was interrupted anywhere continues bit for bit on the same mesh and
processes, and up to the order of sums on others. All processes call these functions alike.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trm_jax import policy, tasks
from trm_jax.mesh.sharding import DATA
from trm_jax.runs import digests, processes, recording
from trm_jax.runs.progress import Display, Progress, Silent
from trm_jax.training import timing, update
from trm_jax.training.program import Program
from trm_jax.types import InputError, NonFiniteError

# Settings that may differ when a run is continued.
_FREE = ('steps', 'save_every', 'data_dir', 'mesh')


class Interrupted(Exception):
  """SIGINT or SIGTERM arrived; everything up to the named step is saved."""

  def __init__(self, step: int, number: int):
    super().__init__(step, number)
    self.step, self.number = step, number

  def __str__(self) -> str:
    name = signal.Signals(self.number).name
    return f'{name}: stopped after step {self.step}, saved; --resume continues from here.'


def rows(batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
  """A batch of prompts as global arrays, rows split over `data`; each process places its own."""
  place = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(DATA))
  return tuple(
    jax.make_array_from_process_local_data(place, batch[name], batch[name].shape)
    for name in ('prompts', 'start')
  )


def prompts(program: Program, split: str, count: int, *, seed: int, shuffle: bool = True):
  """Endless iterator over a split of the program's task, `count` prompts a batch.

  Every process reads the whole stream, prompts being small, and `rows` keeps its part: a row's
  place in the batch and the cursor depend on neither mesh nor number of processes.
  """
  data_dir = program.config.data_dir
  return iter(
    tasks.prompts(
      program.task, split=split, data_dir=data_dir, batch_size=count, seed=seed, shuffle=shuffle
    )
  )


def _held_out(program: Program):
  count = program.config.eval_prompts
  return rows(next(prompts(program, 'validation', count, seed=0, shuffle=False)))


def abstract(tree):
  """Shapes, dtypes and layouts of a tree: what a checkpoint is restored into."""
  mesh = jax.sharding.get_mesh()

  def one(a):
    spec = a.sharding.spec if isinstance(a.sharding, jax.NamedSharding) else jax.P()
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec))

  return jax.tree.map(one, tree)


def _display(total: int, label: str, start: int) -> Display:
  return Progress(total, label, start=start) if jax.process_index() == 0 else Silent()


def settings(program: Program, **extra: Any) -> dict[str, Any]:
  """What defines a run, as JSON-able values; a resumed run must agree on it."""
  described = dataclasses.asdict(program.config)
  return {k: v for k, v in described.items() if k not in _FREE} | extra


@functools.lru_cache(maxsize=8)
def _rows_digest(task: tasks.Task, split: str, data_dir: str | os.PathLike) -> str:
  """Checks all prompts of a split, once a process, and says what they are."""
  shown = None

  def show(done: int, total: int) -> None:
    nonlocal shown
    if total > 50_000:  # fewer take a second
      shown = shown or _display(total, f'checking the prompts of {split}', 0)
      shown.update(done)
      if done == total:
        shown.close()

  return tasks.check(task, split, data_dir, progress=show)


def identity(program: Program) -> dict[str, str]:
  """Digests of what a run reads that has no setting: the task's source, and its rows.

  Raises InputError that names the first prompt that cannot be used, before anything is run.
  """
  task, data_dir = program.task, program.config.data_dir
  rows = {split: _rows_digest(task, split, data_dir) for split in ('train', 'validation')}
  return tasks.identity.parts(task) | {f'{split} rows': digest for split, digest in rows.items()}


def warm_start(
  program: Program, directory: str | os.PathLike, *, progress: Display | None = None
) -> policy.Params:
  """Parameters after the supervised warm start, computed once per directory and then reused.

  Continues where it stopped, and waits for another process that is computing or reading it. Raises
  InputError if the directory holds another warm start.
  """
  config, chosen = program.config, program.config.warm_start
  about = {
    k: dataclasses.asdict(config)[k]
    for k in ('task response_length policy warm_start temperature attention seed').split()
  }
  with (
    jax.set_mesh(program.mesh),
    recording.open_run(directory, about, resume=True, keep=1, wait=True) as record,
    processes.stops() as look,
  ):
    record.check_identity(identity(program))
    key = jax.random.key(config.seed)
    params = program.init(jax.random.fold_in(key, 0))
    state = (params, jax.jit(program.pretrain_optimizer.init)(params))
    data = prompts(program, 'train', chosen.batch, seed=config.seed)
    start, restored = 0, record.restore(abstract(state))
    if restored:
      start, state, meta = restored
      tasks.resume(data, meta['data'], start)
    if start >= chosen.steps:
      return state[0]
    progress = progress or _display(chosen.steps, 'warm start', start)
    loss = None
    for step in range(start + 1, chosen.steps + 1):
      step_key = jax.random.fold_in(jax.random.fold_in(key, 1), step)
      *state, loss = program.pretrain(*state, *rows(next(data)), step_key)
      last, stop = step == chosen.steps, look()
      if last or step % 50 == 0 or stop:
        if last or step % 50 == 0:  # a stop leaves no row: the file is that of a run without it
          record.log(step, {'loss': float(loss)})
        if not np.isfinite(loss):
          record.close()
          raise NonFiniteError(
            f'warm start, step {step}: the loss is {float(loss)}; start again in another directory'
            f' with warm_start.learning_rate below {chosen.learning_rate}.'
          )
        progress.update(step, loss=float(loss))
      if last or step % 250 == 0 or stop:
        record.save(step, tuple(state), {'data': data.get_state()})
      if stop and not last:
        record.close()  # all processes are here: the save can end
        raise Interrupted(step, stop)
    progress.close()
    return state[0]


@dataclasses.dataclass
class _Pending:
  """A step that was dispatched and not yet fetched."""

  step: int
  scalars: dict[str, jax.Array]
  flags: dict[str, jax.Array]
  evaluation: dict[str, jax.Array]


def run(
  program: Program,
  directory: str | os.PathLike,
  params: policy.Params,
  *,
  arm: update.Arm | None = None,
  label: str = 'rl',
  resume: bool = False,
  progress: Display | None = None,
  profile: tuple[int, int] | None = None,
  time_parts: bool = False,
) -> list[dict[str, Any]]:
  """Reinforcement learning from `params`; returns the recorded metrics, one dict a step.

  Row k holds the metrics of RL step k (counted from 1) and, where it was evaluated, the accuracy of
  the policy after it; row 0 is the start. memory.json says what the step's program takes of a
  device. `profile` traces the steps from its first to its last into the folder profile;
  `time_parts` adds the seconds of a step's parts to its first row (`timing.parts`). Raises
  InputError for a directory that does not fit or steps to trace that are not run, NonFiniteError
  (parameters and the last checkpoint stay good), Interrupted on a signal.
  """
  config = program.config
  timing.check_steps(profile, config.steps)
  arm = arm or update.Arm()
  arm = update.Arm(jnp.int32(arm.method), jnp.float32(arm.strength))
  method = dataclasses.asdict(program.methods[int(arm.method)])
  about = settings(program, label=label, strength=float(arm.strength), method=method)
  with (
    jax.set_mesh(program.mesh),
    recording.open_run(directory, about, resume=resume) as record,
    processes.stops() as look,
    contextlib.ExitStack() as ends,
  ):
    record.check_identity(identity(program) | {'weights': digests.digest(params)})
    key = jax.random.key(config.seed)
    state = program.start(params, jax.random.fold_in(key, 2), arm.method)
    data = prompts(program, 'train', config.prompts, seed=config.seed + 1)
    held_out, eval_key = _held_out(program), jax.random.fold_in(key, 3)
    # Restored before anything is dispatched, so that a damaged checkpoint costs no compile.
    start, restored = 0, record.restore(abstract(state))
    if restored:
      start, state, meta = restored
      tasks.resume(data, meta['data'], start)
      record.check_rows(range(start + 1))
    if start > config.steps:
      raise InputError(
        f'steps={config.steps}, but the run in {record.path} has done {start}; ask for at least'
        ' that many or choose another directory.'
      )
    if profile and profile[0] <= start:
      raise InputError(
        f'profile={profile[0]}:{profile[1]} begins before step {start + 1}, with which the run in'
        f' {record.path} goes on; trace from there.'
      )
    progress = progress or _display(config.steps, label, start)
    trace = timing.Trace(profile, record.path / 'profile')
    ends.callback(trace.close)
    clock, extra = time.perf_counter(), {}

    def fetch(pending: _Pending | None):
      """Waits for a dispatched step, checks it and writes it down."""
      nonlocal clock, extra
      if pending is None:
        return
      scalars, flags, evaluation = jax.device_get(
        (pending.scalars, pending.flags, pending.evaluation)
      )
      if flags and not flags['finite']:
        record.close()  # all processes see this
        raise NonFiniteError(_why_not_finite(pending.step, scalars, flags, record.path))
      now = time.perf_counter()
      seconds, clock = now - clock, now
      rate = {}
      if 'length' in scalars:  # mean response tokens of a row
        tokens = scalars['length'] * config.prompts * config.samples
        rate = {'tokens_per_second': tokens / seconds} | extra
        extra = {}
      record.log(pending.step, scalars | evaluation | {'seconds': seconds} | rate)
      shown = {'reward': scalars.get('reward'), 'accepted': scalars.get('acceptance')}
      shown |= {'accuracy': evaluation.get('accuracy/sampled')}
      progress.update(pending.step, **{k: float(v) for k, v in shown.items() if v is not None})

    pending = None
    if start == 0:
      evaluation = program.evaluate(state.params, *held_out, eval_key)
      pending = _Pending(0, {}, {}, evaluation)
    for step in range(start + 1, config.steps + 1):
      batch = rows(next(data))
      if step == start + 1:
        # The call below runs this very executable: nothing is compiled twice.
        compiled = program.step.lower(state, arm, *batch).compile()
        record.write_json('memory.json', timing.memory(compiled))
        if time_parts:
          extra = timing.parts(program.parts, state, arm, *batch)
      trace.before(step)
      state, scalars, flags = program.step(state, arm, *batch)
      trace.after(step, scalars)
      last = step == config.steps
      evaluation = {}
      if last or step % config.eval_every == 0:
        evaluation = program.evaluate(state.params, *held_out, eval_key)
      fetch(pending)
      pending = _Pending(step, scalars, flags, evaluation)
      stop = look()
      if last or step % config.save_every == 0 or stop:
        fetch(pending)  # what a checkpoint covers must be written before it
        pending = None
        record.save(step, state, {'data': data.get_state()})
        if stop and not last:
          record.close()  # all processes are here: the save can end
          raise Interrupted(step, stop)
    fetch(pending)
    progress.close()
    processes.sync('logged')  # process 0 has written what all return
    return record.metrics()


def _why_not_finite(step, scalars, flags, path) -> str:
  if np.isfinite(scalars['loss']) and np.isfinite(scalars['grad_norm']):
    return (
      f'step {step}: the engine reported no log-prob for {int(scalars["missing_tokens"])} tokens'
      " and method.missing is 'error'; mend the engine or choose 'reject' or 'neutral'."
    )
  bad = np.flatnonzero(flags['bad_rows']).tolist()
  where = f'in rows {bad[:16]}' if bad else 'in the gradient only'
  return (
    f'step {step}: loss or gradient is not finite ({where}; loss {float(scalars["loss"])}). That'
    f' update was not applied, and nothing of it was saved: checkpoints in {path} are good. Start'
    ' again in another directory, with a lower optimizer.learning_rate for example.'
  )
