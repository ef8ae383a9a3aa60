"""What a task is, and the pipeline that turns any task into batches of prompts.

To add a task, write one module, in this folder or anywhere Python can import from (sorting.py is
the model), that holds
  1. the vocabulary: a tuple with the text of each token id, EOS and PAD among them;
  2. a TFDS builder: `_info`, `_split_generators` (splits `train`, on which RL draws, `validation`,
     on which it is evaluated, and `test`), `_generate_examples`, with a fixed seed, and
     `url_infos = None` where nothing is downloaded;
  3. `encode(row) -> ids`: the unpadded prompt of one row of that data set;
  4. `reward(prompts, start, tokens, valid) -> [B]`: pure jnp, each row on its own;
  5. optionally `demonstrate(key, prompts, start, response_length) -> (tokens, valid)`;
  6. `TASK = task.Task(...)`.
There is no list to add it to: `load('package.module')` finds it by its name, and other tasks of the
same module as 'package.module:NAME'.

Rewards and demonstrators run under a mesh with sharded rows: sort, gather and reduce along the last
axis only, and never across rows.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable

import grain
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from trm_jax import types
from trm_jax.tasks import identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A verifiable task.

  Attributes:
    name: what tables and figures call it.
    builder: TFDS builder of the data set; one row holds one prompt.
    vocabulary: text of each token id; its length is V.
    eos: token id that ends a response; an action like any other, so it counts as valid.
    pad: token id that fills slots nobody reads.
    prompt_length: P, slots of the longest prompt (right-aligned).
    response_length: T, slots of the longest right answer, EOS included.
    encode: row of the data set -> its prompt, 1-D int32, unpadded.
    reward: (prompts [B,P], start [B], tokens [B,T], valid [B,T]) -> float32 [B]. `valid` is a
      prefix of each row; what stands outside it, or before `start`, never counts.
    demonstrate: (key, prompts [B,P], start [B], response_length) -> (tokens [B,T], valid [B,T]),
      the demonstrator of the supervised warm start; None if the task has none.
  """

  name: str
  builder: type[tfds.core.GeneratorBasedBuilder]
  vocabulary: tuple[str, ...]
  eos: int
  pad: int
  prompt_length: int
  response_length: int
  encode: Callable
  reward: Callable
  demonstrate: Callable | None = None

  def __post_init__(self):
    for name in ('eos', 'pad'):
      if not 0 <= getattr(self, name) < self.vocab_size:
        raise types.InputError(
          f'Task {name}={getattr(self, name)} is outside the vocabulary of {self.vocab_size}: '
          'give the index of one of its entries.'
        )
    for name in ('prompt_length', 'response_length'):
      if getattr(self, name) < 1:
        raise types.InputError(f'Task {name}={getattr(self, name)}: give at least 1 slot.')

  @property
  def vocab_size(self) -> int:
    """V, the number of token ids."""
    return len(self.vocabulary)

  def text(self, token_ids: Iterable) -> str:
    """Token ids as a reader sees them: the texts of the vocabulary, joined."""
    return ''.join(self.vocabulary[i] for i in token_ids)


def load(name: str) -> Task:
  """The Task 'package.module:NAME' of an importable module; without ':NAME', its `TASK`.

  Raises InputError if there is no such module or no Task in it; an error inside the module stays.
  """
  remedy = 'give the dotted name of a module that defines TASK = task.Task(...), such as'
  remedy += ' trm_jax.tasks.sorting, or module:NAME for another task in it, such as'
  remedy += ' trm_jax.tasks.moves:MOVES_64.'
  module, colon, attribute = name.partition(':')
  attribute = attribute if colon else 'TASK'
  if not all(part.isidentifier() for part in (*module.split('.'), attribute)):
    raise types.InputError(f'task={name!r} is not a dotted name: {remedy}')
  try:
    # TFDS's list of data sets would refuse two builders of one name.
    with registered.skip_registration():
      loaded = importlib.import_module(module)
  except ModuleNotFoundError as error:
    if not f'{module}.'.startswith(f'{error.name}.'):
      raise
    raise types.InputError(f'task={name!r} cannot be imported: {remedy}') from error
  task = getattr(loaded, attribute, None)
  if not isinstance(task, Task):
    raise types.InputError(f'task={name!r} has {attribute}={task!r:.80}: {remedy}')
  return task


def prepare(task: Task, data_dir: str | os.PathLike) -> None:
  """Builds the data set of `task` under `data_dir` as ArrayRecord files, unless it is there.

  It appears under its final name only when complete, so an interrupted call can be repeated.
  Raises InputError if `data_dir` cannot be written.
  """
  builder = _builder(task, data_dir)
  tfds.display_progress_bar(False)
  try:
    with contextlib.redirect_stdout(None):  # TFDS prints; a library should not
      builder.download_and_prepare()
  except OSError as error:
    if builder.is_prepared():  # another process was faster
      return
    raise types.InputError(
      f'data_dir={os.fspath(data_dir)!r} cannot be written ({error}): give a writable folder.'
    ) from error


def prompts(
  task: Task,
  *,
  split: str,
  data_dir: str | os.PathLike,
  batch_size: int,
  seed: int,
  shuffle: bool = True,
  repeat: bool = True,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.DatasetIterator:
  """Iterator over {'prompts': int32 [batch_size, P], 'start': int32 [batch_size]}.

  Prompts are right-aligned: slots start..P-1 hold the prompt, those before hold PAD. All processes
  share one stream of rows, reshuffled each epoch, and process i takes every process_count-th from
  the i-th on: the rows of a global batch do not depend on how many processes share it. Without
  `repeat`, rows that do not fill a batch on every process are left out.

  `get_state()` is JSON-serialisable; after `set_state(state)` exactly the next batch follows.

  Args:
    split: name or slice of a split, for example 'train' or 'train[:512]'.
    data_dir: folder given to `prepare`.
    batch_size: rows of a batch on this process, >= 1.
    seed: seed of the shuffle, in [0, 2**32).
    shuffle: False keeps the order of the data set.
    repeat: False ends after one epoch.
    process_index: this process, in [0, process_count).
    process_count: processes that share the rows, >= 1.

  Raises InputError for any argument out of range, an unknown split, or a missing data set.
  """
  if batch_size < 1:
    raise types.InputError(f'batch_size={batch_size}: give at least 1 row.')
  if not 0 <= seed < 2**32:
    raise types.InputError(f'seed={seed}: give an integer in [0, 2**32).')
  if not 0 <= process_index < process_count:
    raise types.InputError(
      f'process_index={process_index}: give an integer in [0, process_count={process_count}).'
    )
  source = _source(task, split, data_dir)
  rows, global_batch = len(source), batch_size * process_count
  if rows < (1 if repeat else global_batch):
    raise types.InputError(
      f'split={split!r} has {rows} rows, fewer than a batch of {batch_size} on each of '
      f'{process_count} processes: give a larger split, a smaller batch_size, or repeat=True.'
    )
  # Shuffling indices and reading rows a batch at a time takes half the time of rows one by one.
  indices = grain.MapDataset.range(rows).seed(seed)
  if shuffle:
    indices = indices.shuffle()
  # Repeating before dealing out keeps the processes on one stream across epoch boundaries.
  indices = indices.repeat() if repeat else indices[: rows // global_batch * global_batch]
  batches = indices[process_index::process_count].batch(batch_size, drop_remainder=True)
  batches = batches.map(lambda batch: _right_align(task, source.__getitems__(batch.tolist())))
  return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def resume(iterator: grain.DatasetIterator, state: object, batches: int) -> None:
  """Sets an iterator of `prompts` to the state it had after that many batches.

  Raises InputError for any other state.
  """
  due = dict.fromkeys(iterator.get_state(), batches)
  if state != due:
    raise types.InputError(
      f'data cursor={state!r:.200} of the checkpoint is not that of {batches} batches, {due!r}:'
      ' put the checkpoint back as it was, or choose another directory.'
    )
  iterator.set_state(state)


def check(
  task: Task,
  split: str,
  data_dir: str | os.PathLike,
  *,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
  """SHA-256 (16 hexadecimal digits) of all prompts of a split in their order, once all are usable.

  `progress(done, total)` is told of every 512 rows. Raises InputError that names the first row
  whose prompt is too long, empty, not made of integers or holds an id outside the vocabulary.
  """
  source, digest = _source(task, split, data_dir), hashlib.sha256()
  for first in range(0, len(source), 512):
    rows = list(range(first, min(first + 512, len(source))))
    aligned = _right_align(task, source.__getitems__(rows), f' (row {{}} of {split!r})', first)
    digest.update(aligned['start'].tobytes() + aligned['prompts'].tobytes())
    progress(rows[-1] + 1, len(source))
  return digest.hexdigest()[:16]


def _builder(task: Task, data_dir: str | os.PathLike) -> tfds.core.DatasetBuilder:
  # A folder by content: an edited builder makes its rows anew, and two of one name share none.
  folder = os.path.join(data_dir, identity.source(task.builder))
  # TFDS's default file format needs TensorFlow; this one does not.
  return task.builder(data_dir=folder, file_format='array_record')


def _source(task: Task, split: str, data_dir: str | os.PathLike):
  builder = _builder(task, data_dir)
  if not builder.is_prepared():
    raise types.InputError(
      f'data_dir={os.fspath(data_dir)!r} holds no data set of task {task.name!r}: '
      'call prepare(task, data_dir) first.'
    )
  try:
    return builder.as_data_source(split=split)
  except (AssertionError, KeyError, ValueError) as error:
    raise types.InputError(
      f'split={split!r} is not a split of task {task.name!r}: give one of '
      f'{sorted(builder.info.splits)}, or a slice of one such as "train[:512]".'
    ) from error


def _right_align(task: Task, rows: list[dict], where: str = '', first: int = 0) -> dict:
  padded = np.full((len(rows), task.prompt_length), task.pad, np.int32)
  start = np.zeros(len(rows), np.int32)
  for i, row in enumerate(rows):
    ids = np.asarray(task.encode(row))
    what = f'A prompt of task {task.name!r}{where.format(first + i)}'
    if not 1 <= ids.size <= task.prompt_length:
      raise types.InputError(
        f'{what} has {ids.size} tokens: keep it between 1 and '
        f'prompt_length={task.prompt_length}, or raise prompt_length.'
      )
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
      raise types.InputError(
        f'{what} is {ids.dtype}{list(ids.shape)}: let encode give integers of one axis.'
      )
    if ids.min() < 0 or ids.max() >= task.vocab_size:
      wrong = int(ids[(ids < 0) | (ids >= task.vocab_size)][0])
      raise types.InputError(
        f'{what} holds the id {wrong}: let encode give ids in [0, {task.vocab_size}).'
      )
    start[i] = task.prompt_length - ids.size
    padded[i, start[i] :] = ids
  return {'prompts': padded, 'start': start}
