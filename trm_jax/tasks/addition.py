"""Task: add two numbers of equally many digits, units first. '84+57=' (48 + 75) asks for '321'.

The plain answer is the sum, one digit longer than the numbers, and EOS. With a scratchpad the
columns are worked out before it: 'digit digit carry sum' for each, then '=', the sum and EOS;
'84+57=' asks for '8503' '4712' '=321'. Units first, because carries run that way: each digit
follows from what stands before it. Numbers may end in zeros, so that all prompts of a task are
equally long and a digit and its sum a constant distance apart: what small policies find hard is
otherwise the counting, not the sum.

`make(digits, scratchpad=...)` is the dial: digits + 2 tokens, or 5 * digits + 3 with a scratchpad.
This module's TASK is plain, its SCRATCHPAD works the columns out. A module of your own with
`TASK = addition.make(50, scratchpad=True)` has 253.

Token ids: 0..9 the digits, 10 '+', 11 '=', 12 EOS, 13 PAD, 14 and 15 never used; they round the
vocabulary up to a number that device counts divide.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import types
from trm_jax.tasks import task

PLUS, EQUALS, EOS, PAD = 10, 11, 12, 13
# Shares of the demonstrator's sequences that are right and of its digits that are random; SLIPS
# bounds the random digits of an answer, so that long ones are still sometimes right.
RIGHT_WAY, CORRUPTED, SLIPS = 0.4, 0.05, 0.5


class Addition(tfds.core.GeneratorBasedBuilder):
  """Distinct pairs of numbers of `digits` uniform digits each, units first."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First release.'}
  url_infos = None  # nothing is downloaded, so there are no checksums to look for
  SIZES = {'train': 16384, 'validation': 512, 'test': 512}
  digits = 3

  def _info(self) -> tfds.core.DatasetInfo:
    numbers = tfds.features.Tensor(shape=(2, self.digits), dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'numbers': numbers})
    )

  def _split_generators(self, dl_manager):
    # RandomState, because its stream is frozen for all NumPy versions (NEP 19).
    random, rows = np.random.RandomState(0), {}
    while len(rows) < sum(self.SIZES.values()):
      rows[tuple(random.randint(0, 10, 2 * self.digits))] = None
    rows = iter(rows)
    return {
      split: self._generate_examples([next(rows) for _ in range(size)])
      for split, size in self.SIZES.items()
    }

  def _generate_examples(self, rows):
    for i, row in enumerate(rows):
      yield i, {'numbers': np.array(row, np.int32).reshape(2, self.digits)}


def encode(row: dict) -> np.ndarray:
  """One number, '+', the other and '=', int32 [2 * digits + 2]."""
  one, other = row['numbers']
  return np.concatenate([one, [PLUS], other, [EQUALS]]).astype(np.int32)


def _add(prompts, start, carried, scratchpad, width):
  """Answers to the prompts [B,width], EOS behind them; their count [B].

  `carried` is what is carried into the first column, 0 or 1.
  """
  digits = ((prompts.shape[1] - start - 2) // 2)[:, None]
  column = jnp.arange(width)[None]
  real = column < digits
  pick = lambda x, at, where: jnp.take_along_axis(x, jnp.where(where, at, 0), axis=-1)
  one = jnp.where(real, pick(prompts, start[:, None] + column, real), 0)
  other = jnp.where(real, pick(prompts, start[:, None] + digits + 1 + column, real), 0)
  # A column that sums to 9 passes the carry on; any other makes its own: the last such decides.
  raw = one + other
  maker = jnp.where(raw == 9, carried, 2 * column + 2 + (raw > 9))
  carry = jnp.roll(jax.lax.cummax(maker, axis=1), 1, axis=-1) % 2
  carry = jnp.where(column == 0, carried, carry)
  total = (raw + carry) % 10
  if not scratchpad:
    count = digits + 1
    return jnp.where(column < count, total, EOS), count[:, 0]
  work, place = column // 4, column % 4
  choices = [pick(x, work, column < 4 * digits) for x in (one, other, carry, total)]
  worked = jnp.select([place == i for i in range(4)], choices)
  after = column - 4 * digits - 1
  answer = jnp.where(after < 0, EQUALS, pick(total, after, (after >= 0) & (after <= digits)))
  count = 5 * digits + 2
  answer = jnp.where(column < 4 * digits, worked, answer)
  return jnp.where(column < count, answer, EOS), count[:, 0]


def reward(
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  scratchpad: bool = False,
) -> Float[Array, 'B']:
  """1 where the valid tokens are exactly the answer and EOS, else 0; float32 [B].

  With a scratchpad its columns belong to the answer: a right sum after wrong work earns nothing.
  """
  width = tokens.shape[1]
  answer, count = _add(prompts, start, 0, scratchpad, width)
  due = jnp.arange(width)[None] <= count[:, None]
  right = (valid == due) & (~due | (tokens == answer))
  return (right.all(-1) & (count < width)).astype(jnp.float32)


def demonstrate(
  key: Key[Array, ''],
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  response_length: int,
  *,
  scratchpad: bool = False,
) -> tuple[Int[Array, 'B T'], Bool[Array, 'B T']]:
  """A demonstrator of two minds: 40 % right, 60 % begin with a carry; some digits random.

  A policy warm-started on it is able but unfocused, so that the reward has a preference to find.
  All that comes after the first digit follows from what is written, so a policy need not guess
  which mind it is in. Answers end in EOS, then PAD outside `valid`; int32 and bool [B,T].
  """
  key_way, key_where, key_what = jax.random.split(key, 3)
  carried = 1 - jax.random.bernoulli(key_way, RIGHT_WAY, (prompts.shape[0], 1))
  tokens, count = _add(prompts, start, carried, scratchpad, response_length)
  share = jnp.minimum(CORRUPTED, SLIPS / count)[:, None]
  corrupted = jax.random.bernoulli(key_where, share, tokens.shape) & (tokens < PLUS)
  noise = jax.random.randint(key_what, tokens.shape, 0, 10, tokens.dtype)
  valid = jnp.arange(response_length)[None] <= count[:, None]
  # A sum modulo 10 with a uniform digit is uniform, and is sharded as the tokens are.
  return jnp.where(valid, jnp.where(corrupted, (tokens + noise) % 10, tokens), PAD), valid


def make(digits: int, *, scratchpad: bool = False) -> task.Task:
  """The task with numbers of `digits` digits; both forms share one data set.

  Answers have digits + 2 tokens, or 5 * digits + 3 with a scratchpad. Raises InputError for
  digits < 3 (too few pairs for the data set).
  """
  if digits < 3:
    raise types.InputError(f'digits={digits}: give at least 3, so that there are enough pairs.')
  name = f'addition_{digits}'
  sized = {'name': name, 'digits': digits, '__module__': __name__}
  return task.Task(
    name=f'{name}_scratchpad' if scratchpad else name,
    builder=type(f'Addition{digits}', (Addition,), sized, skip_registration=True),
    vocabulary=(*'0123456789+=', '<eos>', '<pad>', '<14>', '<15>'),
    eos=EOS,
    pad=PAD,
    prompt_length=2 * digits + 2,
    response_length=5 * digits + 3 if scratchpad else digits + 2,
    encode=encode,
    reward=functools.partial(reward, scratchpad=scratchpad),
    demonstrate=functools.partial(demonstrate, scratchpad=scratchpad),
  )


TASK = make(3)
SCRATCHPAD = make(3, scratchpad=True)
