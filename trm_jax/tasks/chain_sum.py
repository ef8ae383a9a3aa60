"""Task: running sums of small signed numbers, modulo 10. '+3+5-2+1=' asks for '3867' and EOS.

Each digit follows from the one before it and one term, so an error spoils the rest: the same chain
at every length. `make(terms)` is the dial; `make(terms, worked=False)` asks for the last sum alone,
'7' and EOS, which leaves the whole chain to one forward pass. All chains of a task are equally long
and each term is one token, so that term and sum are a constant distance apart: what small policies
find hard is otherwise the counting, not the sum.

Token ids: 0..9 the digits, 10..14 '+1'..'+5', 15..19 '-1'..'-5', 20 '=', 21 EOS, 22 PAD, 23 never
used; it rounds the vocabulary up to a number that device counts divide.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import types
from trm_jax.tasks import task

PLUS, MINUS, EQUALS, EOS, PAD = 10, 15, 20, 21, 22
# Shares of the demonstrator's sequences that are right and of its digits that are random; SLIPS
# bounds the random digits of an answer, so that long ones are still sometimes right.
RIGHT_WAY, CORRUPTED, SLIPS = 0.4, 0.05, 0.5


class ChainSum(tfds.core.GeneratorBasedBuilder):
  """Distinct lists of `terms` signed numbers, each uniform in -5..-1 and 1..5."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First release.'}
  url_infos = None  # nothing is downloaded, so there are no checksums to look for
  SIZES = {'train': 16384, 'validation': 512, 'test': 512}
  terms = 15

  def _info(self) -> tfds.core.DatasetInfo:
    terms = tfds.features.Tensor(shape=(self.terms,), dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'terms': terms})
    )

  def _split_generators(self, dl_manager):
    # RandomState, because its stream is frozen for all NumPy versions (NEP 19).
    random, rows = np.random.RandomState(0), {}
    while len(rows) < sum(self.SIZES.values()):
      rows[tuple(random.randint(PLUS, EQUALS, self.terms))] = None
    rows = iter(rows)
    return {
      split: self._generate_examples([next(rows) for _ in range(size)])
      for split, size in self.SIZES.items()
    }

  def _generate_examples(self, rows):
    for i, row in enumerate(rows):
      yield i, {'terms': np.array(row, np.int32)}


def encode(row: dict) -> np.ndarray:
  """The row's terms and '=', int32 [terms + 1]."""
  return np.append(row['terms'], np.int32(EQUALS))


def _sums(prompts, start, late, worked, width):
  """Running sums (or the last one) of each prompt [B,width], EOS behind them; their count [B].

  Where `late` is 1, the first term is left out.
  """
  slot = jnp.arange(prompts.shape[1])[None]
  real = (slot >= start[:, None] + late) & (slot < prompts.shape[1] - 1)
  value = jnp.where(prompts < MINUS, prompts - PLUS + 1, MINUS - 1 - prompts)
  sums = jnp.cumsum(jnp.where(real, value, 0), axis=-1) % 10
  terms = prompts.shape[1] - 1 - start
  count = terms if worked else jnp.minimum(terms, 1)
  slot = jnp.arange(width)[None]
  due = slot < count[:, None]
  at = jnp.where(due, prompts.shape[1] - 1 - count[:, None] + slot, 0)
  return jnp.where(due, jnp.take_along_axis(sums, at, axis=-1), EOS), count


def reward(
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  worked: bool = True,
) -> Float[Array, 'B']:
  """1 where the valid tokens are exactly the running sums and EOS, else 0; float32 [B].

  With worked=False the last sum alone is right.
  """
  width = tokens.shape[1]
  answer, count = _sums(prompts, start, 0, worked, width)
  due = jnp.arange(width)[None] <= count[:, None]
  right = (valid == due) & (~due | (tokens == answer))
  return (right.all(-1) & (count < width)).astype(jnp.float32)


def demonstrate(
  key: Key[Array, ''],
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  response_length: int,
  *,
  worked: bool = True,
) -> tuple[Int[Array, 'B T'], Bool[Array, 'B T']]:
  """A demonstrator of two minds: 40 % right, 60 % forget the first term; some digits random.

  A policy warm-started on it is able but unfocused, so that the reward has a preference to find.
  All that comes after the first digit follows from what is written, so a policy need not guess
  which mind it is in. Answers end in EOS, then PAD outside `valid`; int32 and bool [B,T].
  """
  key_way, key_where, key_what = jax.random.split(key, 3)
  late = 1 - jax.random.bernoulli(key_way, RIGHT_WAY, (prompts.shape[0], 1))
  tokens, count = _sums(prompts, start, late, worked, response_length)
  slot = jnp.arange(response_length)[None]
  share = jnp.minimum(CORRUPTED, SLIPS / count)[:, None]
  corrupted = jax.random.bernoulli(key_where, share, tokens.shape) & (slot < count[:, None])
  noise = jax.random.randint(key_what, tokens.shape, 0, 10, tokens.dtype)
  valid = slot <= count[:, None]
  # A sum modulo 10 with a uniform digit is uniform, and is sharded as the tokens are.
  return jnp.where(valid, jnp.where(corrupted, (tokens + noise) % 10, tokens), PAD), valid


def make(terms: int, *, worked: bool = True) -> task.Task:
  """The task with `terms` terms: answers of terms + 1 tokens, or of 2 where worked is False.

  Raises InputError for terms < 5 (too few lists for the data set).
  """
  if terms < 5:
    raise types.InputError(f'terms={terms}: give at least 5, so that there are enough lists.')
  name = f'chain_sum_{terms}'
  sized = {'name': name, 'terms': terms, '__module__': __name__}
  return task.Task(
    name=name if worked else f'{name}_unworked',
    builder=type(f'ChainSum{terms}', (ChainSum,), sized, skip_registration=True),
    vocabulary=(
      *'0123456789',
      *(f'{sign}{size}' for sign in '+-' for size in range(1, 6)),
      *('=', '<eos>', '<pad>', '<23>'),
    ),
    eos=EOS,
    pad=PAD,
    prompt_length=terms + 1,
    response_length=terms + 1 if worked else 2,
    encode=encode,
    reward=functools.partial(reward, worked=worked),
    demonstrate=functools.partial(demonstrate, worked=worked),
  )


TASK = make(15)
