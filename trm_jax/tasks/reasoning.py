"""Tasks of reasoning-gym: any of its generators, judged by its own verifiers, as bytes.

`make('chain_sum', max_terms=4)` is the task of `reasoning_gym.create_dataset('chain_sum', ...)`;
a module of your own with `TASK = reasoning.make(...)` needs no more. Questions repeat in no split,
fit in `prompt_length` bytes and have an answer of fewer than `response_length`; generators that
give no answer of their own, or too few such questions, are refused.

The verifiers are Python, so the reward leaves the device: `jax.pure_callback` hands each device's
rows to the host. That costs milliseconds a batch, and needs the package `reasoning-gym` on every
host while training too (the extra `reasoning`). Verifiers may give part of a point; only 1.0 counts
as right here. The data depend on the version of reasoning-gym and on nothing else.

Token ids: 0..255 the bytes of UTF-8, 256 EOS, 257 PAD, 258..263 never used; they round the
vocabulary up to a number that device counts divide.
"""

import functools
import importlib
import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import sharding, types
from trm_jax.sharding import DATA
from trm_jax.tasks import task

EOS, PAD = 256, 257
RIGHT_WAY, CORRUPTED = 0.4, 0.05  # shares of the demonstrator's sequences and bytes


@functools.cache
def _generator(name: str, prompt_length: int, response_length: int, settings: str):
  """The generator and its first distinct entries that fit, by question in bytes."""
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
  entries = {}
  for i in range(8 * wanted):
    entry = generator[i]
    question, answer = entry['question'].encode(), entry['answer']
    fits = isinstance(answer, str) and 0 < len(answer.encode()) < response_length
    if fits and len(question) <= prompt_length:
      entries.setdefault(question, entry)
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
  source: tuple[str, int, int, str]

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
      yield i, {'question': np.array(list(row), np.int32)}


def encode(row: dict) -> np.ndarray:
  """The bytes of the question, int32."""
  return row['question']


def _entry(source, prompt, start):
  entry = _generator(*source)[1].get(bytes(prompt[start:].astype(np.uint8)))
  if entry is None:
    raise types.InputError(
      f'A prompt is not among the questions of task reasoning.{source[0]}: its data set was built'
      ' with another version of reasoning-gym; give a new data_dir.'
    )
  return entry


def _score(source, prompts, start, tokens, valid):
  """What the verifier says about each row, on the host: float32 [B]."""
  prompts, start, tokens, valid = map(np.asarray, (prompts, start, tokens, valid))
  scores = np.zeros(len(start), np.float32)
  for i, row in enumerate(tokens):
    count = valid[i].sum()
    response = row[:count]
    prefix = valid[i, :count].all() and count and response[-1] == EOS
    if not prefix or (response[:-1] >= EOS).any():
      continue
    entry = _entry(source, prompts[i], start[i])
    try:
      answer = bytes(response[:-1].astype(np.uint8)).decode()
      scores[i] = _generator(*source)[0].score_answer(answer, entry) >= 1.0
    except Exception:  # an answer that a verifier stumbles over is not right
      continue
  return scores


def _answers(source, width, prompts, start):
  """The generator's own answers as bytes, EOS behind them, on the host: int32 [B,width]."""
  prompts, start = map(np.asarray, (prompts, start))
  answers = np.full((len(start), width), EOS, np.int32)
  for i in range(len(start)):
    answer = list(_entry(source, prompts[i], start[i])['answer'].encode())[:width]
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
  source: tuple[str, int, int, str],
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
) -> Float[Array, 'B']:
  """1 where the valid tokens are bytes and EOS, and the verifier gives 1.0, else 0; float32 [B]."""
  return _on_host(
    functools.partial(_score, source), None, jnp.float32, prompts, start, tokens, valid
  )


def demonstrate(
  source: tuple[str, int, int, str],
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
  name: str, *, prompt_length: int = 128, response_length: int = 16, **settings: Any
) -> task.Task:
  """The task of reasoning-gym's generator `name` with its own `settings`, all JSON values.

  Nothing is imported or generated before the data set is built or a reward is asked for; then
  InputError is raised where reasoning-gym is not installed, refuses the settings, or gives too few
  questions within the two lengths (in bytes, EOS included).
  """
  source = (name, prompt_length, response_length, json.dumps(settings, sort_keys=True))
  dataset = f'reasoning_{name}_{zlib.crc32(repr(source).encode()):08x}'
  made = {'name': dataset, 'source': source, '__module__': __name__}
  return task.Task(
    name=f'reasoning.{name}',
    builder=type(dataset, (Reasoning,), made, skip_registration=True),
    vocabulary=(
      *(chr(i) if i < 128 else f'<{i:02x}>' for i in range(256)),
      *('<eos>', '<pad>', *(f'<{i}>' for i in range(258, 264))),
    ),
    eos=EOS,
    pad=PAD,
    prompt_length=prompt_length,
    response_length=response_length,
    encode=encode,
    reward=functools.partial(reward, source),
    demonstrate=functools.partial(demonstrate, source),
  )


TASK = make('chain_sum', max_terms=4, max_digits=2)
