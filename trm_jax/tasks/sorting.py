"""Task: sort 4 to 15 digits. '3071=' asks for '0137' and EOS.

Token ids: 0..9 the digits, 10 '=', 11 EOS, 12 PAD, 13..15 never used; they round the vocabulary up
to a number that device counts divide.
"""

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax.tasks import task

EQUALS, EOS, PAD = 10, 11, 12
ASCENDING, CORRUPTED = 0.4, 0.05  # shares of the demonstrator's sequences and digits


class Sorting(tfds.core.GeneratorBasedBuilder):
  """Distinct digit strings, their length uniform in 4..15 and their digits uniform."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First release.'}
  url_infos = None  # nothing is downloaded, so there are no checksums to look for
  SIZES = {'train': 16384, 'validation': 512, 'test': 512}

  def _info(self) -> tfds.core.DatasetInfo:
    digits = tfds.features.Tensor(shape=(None,), dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'digits': digits})
    )

  def _split_generators(self, dl_manager):
    # RandomState, because its stream is frozen for all NumPy versions (NEP 19).
    random, rows = np.random.RandomState(0), {}
    for length in random.randint(4, 16, sum(self.SIZES.values())):
      row = tuple(random.randint(0, 10, length))
      while row in rows:
        row = tuple(random.randint(0, 10, length))
      rows[row] = None
    rows = iter(rows)
    return {
      split: self._generate_examples([next(rows) for _ in range(size)])
      for split, size in self.SIZES.items()
    }

  def _generate_examples(self, rows):
    for i, row in enumerate(rows):
      yield i, {'digits': np.array(row, np.int32)}


def encode(row: dict) -> np.ndarray:
  """The row's digits and '=', int32 [5..16]."""
  return np.append(row['digits'], np.int32(EQUALS))


def _sort(prompts, start, sign, width):
  """Digits of each prompt in the order of sign * digit, EOS behind them [B,width]; their count."""
  real = (jnp.arange(prompts.shape[1])[None] >= start[:, None]) & (prompts < EQUALS)
  ordered = jnp.abs(jnp.sort(jnp.where(real, sign * prompts, EOS), axis=-1))
  padding = ((0, 0), (0, max(width - prompts.shape[1], 0)))
  return jnp.pad(ordered, padding, constant_values=EOS)[:, :width], real.sum(-1)


def reward(
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
) -> Float[Array, 'B']:
  """1 where the valid tokens are exactly the ascending digits and EOS, else 0; float32 [B]."""
  width = tokens.shape[1]
  answer, count = _sort(prompts, start, 1, width)
  due = jnp.arange(width)[None] <= count[:, None]
  right = (valid == due) & (~due | (tokens == answer))
  return (right.all(-1) & (count < width)).astype(jnp.float32)


def demonstrate(
  key: Key[Array, ''], prompts: Int[Array, 'B P'], start: Int[Array, 'B'], response_length: int
) -> tuple[Int[Array, 'B T'], Bool[Array, 'B T']]:
  """A demonstrator of two minds: 40 % ascending, 60 % descending, 5 % of the digits random.

  A policy warm-started on it is able but unfocused, so that the reward has a preference to find.
  Answers end in EOS, then PAD outside `valid`; int32 and bool [B,T].
  """
  key_order, key_where, key_what = jax.random.split(key, 3)
  ascending = jax.random.bernoulli(key_order, ASCENDING, (prompts.shape[0], 1))
  tokens, count = _sort(prompts, start, jnp.where(ascending, 1, -1), response_length)
  slot = jnp.arange(response_length)[None]
  corrupted = jax.random.bernoulli(key_where, CORRUPTED, tokens.shape) & (slot < count[:, None])
  noise = jax.random.randint(key_what, tokens.shape, 0, EQUALS, tokens.dtype)
  valid = slot <= count[:, None]
  # A sum modulo 10 with a uniform digit is uniform, and is sharded as the tokens are.
  return jnp.where(valid, jnp.where(corrupted, (tokens + noise) % 10, tokens), PAD), valid


TASK = task.Task(
  name='sorting',
  builder=Sorting,
  vocabulary=(*'0123456789=', '<eos>', '<pad>', '<13>', '<14>', '<15>'),
  eos=EOS,
  pad=PAD,
  prompt_length=16,
  response_length=16,
  encode=encode,
  reward=reward,
  demonstrate=demonstrate,
)
