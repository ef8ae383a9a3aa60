"""Tasks of reasoning-gym: any of its generators, judged by its own verifiers, as bytes or tokens.

`make('chain_sum', max_terms=4)` is the task of `reasoning_gym.create_dataset('chain_sum', ...)`;
a module of your own with `TASK = reasoning.make(...)` needs no more. Questions repeat in no split,
fit in `prompt_length` ids and have an answer of fewer than `response_length`; generators that give
no answer of their own, or too few such questions, are refused. With `tokenizer`, a checkpoint's
folder, ids are its tokens instead of bytes: the text task of a policy from published weights.

The verifiers are Python, so the reward leaves the device: `jax.pure_callback` hands each device's
rows to the host. That costs milliseconds a batch, and needs the package `reasoning-gym` on every
host while training too (the extra `reasoning`). Verifiers may give part of a point; only 1.0 counts
as right here. The data depend on the version of reasoning-gym and on nothing else.

Token ids of bytes: 0..255 UTF-8, 256 EOS, 257 PAD, 258..263 never used; they round the vocabulary
up to a number that device counts divide.
"""

import functools
import importlib
import json
import os
import pathlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import types
from trm_jax.checkpoints import tokenizer as tk
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA
from trm_jax.tasks import task

EOS, PAD = 256, 257
RIGHT_WAY, CORRUPTED = 0.4, 0.05  # shares of the demonstrator's sequences and bytes


class Bytes:
  """UTF-8, with the interface of a `tokenizer.Tokenizer`."""

  eos, pad = EOS, PAD
  vocabulary = (
    *(chr(i) if i < 128 else f'<{i:02x}>' for i in range(256)),
    *('<eos>', '<pad>', *(f'<{i}>' for i in range(258, 264))),
  )

  def encode(self, text: str) -> list[int]:
    """The bytes of a text."""
    return list(text.encode())

  def decode(self, ids) -> str:
    """The text of bytes. Raises ValueError for other ids, or bytes that are not UTF-8."""
    return bytes(ids).decode()


@functools.cache
def _codec(folder: str | None) -> Bytes | tk.Tokenizer:
  return Bytes() if folder is None else tk.load(folder)


@functools.cache
def _generator(
  name: str,
  prompt_length: int,
  response_length: int,
  settings: str,
  tokenizer: str | None = None,
  template: str = '{question}',
):
  """The generator and its first distinct entries that fit, by the ids of their prompts."""
  try:
    gym = importlib.import_module('reasoning_gym')
  except ModuleNotFoundError as error:
    raise types.InputError(
      f"task reasoning.{name} needs the package reasoning-gym: pip install '.[reasoning]'."
    ) from error
  wanted = sum(Reasoning.SIZES.values())
  try:
    generator = gym.create_dataset(name, seed=0, size=8 * wanted, **json.loads(settings))
  except (AssertionError, TypeError, ValueError) as error:
    raise types.InputError(
      f'reasoning-gym refuses generator {name!r} with {settings} ({error}): see its documentation.'
    ) from error
  entries, encode = {}, _codec(tokenizer).encode
  for i in range(8 * wanted):
    entry = generator[i]
    prompt = tuple(encode(template.replace('{question}', entry['question'])))
    answer = entry['answer']
    fits = isinstance(answer, str) and 0 < len(encode(answer)) < response_length
    if fits and len(prompt) <= prompt_length:
      entries.setdefault(prompt, entry)
    if len(entries) == wanted:
      return generator, entries
  raise types.InputError(
    f'reasoning-gym generator {name!r} gives {len(entries)} of {wanted} distinct questions within'
    f' prompt_length={prompt_length} and response_length={response_length}: raise the lengths, or'
    ' widen its settings.'
  )


class Reasoning(tfds.core.GeneratorBasedBuilder):
  """The distinct questions of one generator: the first for train, then validation, then test."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First release.'}
  url_infos = None  # nothing is downloaded, so there are no checksums to look for
  SIZES = {'train': 4096, 'validation': 512, 'test': 512}
  source: tuple

  def _info(self) -> tfds.core.DatasetInfo:
    question = tfds.features.Tensor(shape=(None,), dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'question': question})
    )

  def _split_generators(self, dl_manager):
    rows = iter(_generator(*self.source)[1])
    return {
      split: self._generate_examples([next(rows) for _ in range(size)])
      for split, size in self.SIZES.items()
    }

  def _generate_examples(self, rows):
    for i, row in enumerate(rows):
      yield i, {'question': np.array(row, np.int32)}


def encode(row: dict) -> np.ndarray:
  """The ids of the prompt, int32."""
  return row['question']


def _entry(source, prompt, start):
  entry = _generator(*source)[1].get(tuple(prompt[start:].tolist()))
  if entry is None:
    raise types.InputError(
      f'A prompt is not among the questions of task reasoning.{source[0]}: its data set was built'
      ' with another version of reasoning-gym; give a new data_dir.'
    )
  return entry


def _score(source, prompts, start, tokens, valid):
  """What the verifier says about each row, on the host: float32 [B]."""
  prompts, start, tokens, valid = map(np.asarray, (prompts, start, tokens, valid))
  scores, codec = np.zeros(len(start), np.float32), _codec(source[4])
  for i, row in enumerate(tokens):
    count = valid[i].sum()
    response = row[:count]
    prefix = valid[i, :count].all() and count and response[-1] == codec.eos
    if not prefix or (response[:-1] == codec.eos).any():
      continue
    entry = _entry(source, prompts[i], start[i])
    try:
      answer = codec.decode(response[:-1].tolist())
      scores[i] = _generator(*source)[0].score_answer(answer, entry) >= 1.0
    except Exception:  # an answer that a verifier stumbles over is not right
      continue
  return scores


def _answers(source, width, prompts, start):
  """The generator's own answers as bytes, EOS behind them, on the host: int32 [B,width]."""
  prompts, start = map(np.asarray, (prompts, start))
  answers = np.full((len(start), width), EOS, np.int32)
  for i in range(len(start)):
    answer = Bytes().encode(_entry(source, prompts[i], start[i])['answer'])[:width]
    answers[i, : len(answer)] = answer
  return answers


def _on_host(fn, width, dtype, *rows):
  """`fn` of each device's own rows; [B] if width is None, else [B,width]."""

  def block(*rows):
    shape = rows[0].shape[:1] if width is None else (rows[0].shape[0], width)
    out = jax.ShapeDtypeStruct(shape, dtype)
    return jax.pure_callback(fn, out, *rows, vmap_method='sequential')

  if not sharding.active():
    return block(*rows)
  # Every device of the model axis asks for the same rows, which is what replicates the result.
  split = sharding.over_mesh(block, in_specs=jax.P(DATA), out_specs=jax.P(DATA))
  return split(*sharding.reshard(rows, DATA))


def reward(
  source: tuple,
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
) -> Float[Array, 'B']:
  """1 where the valid tokens are text and EOS, and the verifier gives 1.0, else 0; float32 [B]."""
  return _on_host(
    functools.partial(_score, source), None, jnp.float32, prompts, start, tokens, valid
  )


def demonstrate(
  source: tuple,
  key: Key[Array, ''],
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  response_length: int,
) -> tuple[Int[Array, 'B T'], Bool[Array, 'B T']]:
  """A demonstrator of two minds: 40 % right, 60 % back to front; 5 % of the bytes random.

  The right answer is the generator's own. Answers end in EOS, then PAD outside `valid`; int32 and
  bool [B,T].
  """
  key_way, key_where, key_what = jax.random.split(key, 3)
  answers = functools.partial(_answers, source, response_length)
  tokens = _on_host(answers, response_length, jnp.int32, prompts, start)
  slot = jnp.arange(response_length)[None]
  count = (tokens != EOS).sum(-1)[:, None]
  forwards = jax.random.bernoulli(key_way, RIGHT_WAY, (prompts.shape[0], 1))
  at = jnp.where(forwards | (slot >= count), slot, count - 1 - slot)
  tokens = jnp.take_along_axis(tokens, at, axis=-1)
  corrupted = jax.random.bernoulli(key_where, CORRUPTED, tokens.shape) & (slot < count)
  noise = jax.random.randint(key_what, tokens.shape, 0, EOS, tokens.dtype)
  valid = slot <= count
  # A sum modulo 256 with a uniform byte is uniform, and is sharded as the tokens are.
  return jnp.where(valid, jnp.where(corrupted, (tokens + noise) % EOS, tokens), PAD), valid


def make(
  name: str,
  *,
  prompt_length: int = 128,
  response_length: int = 16,
  tokenizer: str | os.PathLike | None = None,
  template: str = '{question}',
  **settings: Any,
) -> task.Task:
  """The task of reasoning-gym's generator `name` with its own `settings`, all JSON values.

  `tokenizer` is the folder of a checkpoint, read at once; such a task has no demonstrator, as its
  policy comes with weights. `template` is the prompt around '{question}', special tokens spelled
  out. Nothing else is imported or generated before the data set is built or a reward is asked for;
  then InputError is raised where reasoning-gym is not installed, refuses the settings, or gives too
  few questions within the two lengths (in ids, EOS included).
  """
  if '{question}' not in template:
    raise types.InputError(f"template={template!r} has no '{{question}}': say where it goes.")
  folder = None if tokenizer is None else os.path.abspath(tokenizer)
  codec = _codec(folder)
  source = (name, prompt_length, response_length, json.dumps(settings, sort_keys=True))
  if folder is not None or template != '{question}':
    # What the ids mean belongs to the name of the data set, where the folder lies does not.
    content = None if folder is None else zlib.crc32(pathlib.Path(folder, tk.FILE).read_bytes())
    named = (*source, content, template)
  else:
    named = source
  source = (*source, folder, template)
  dataset = f'reasoning_{name}_{zlib.crc32(repr(named).encode()):08x}'
  made = {'name': dataset, 'source': source, '__module__': __name__}
  return task.Task(
    name=f'reasoning.{name}',
    builder=type(dataset, (Reasoning,), made, skip_registration=True),
    vocabulary=codec.vocabulary,
    eos=codec.eos,
    pad=codec.pad,
    prompt_length=prompt_length,
    response_length=response_length,
    encode=encode,
    reward=functools.partial(reward, source),
    demonstrate=functools.partial(demonstrate, source) if folder is None else None,
  )


TASK = make('chain_sum', max_terms=4, max_digits=2)
