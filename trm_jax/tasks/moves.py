"""Task: follow a list of moves on a small torus and write the cell after every move.

'>>v' from cell 'a', 2 laps: '>>va2' asks for 'bch1ijo0' and EOS. The list is walked lap after lap,
each from where the last one ended, and a lap ends with the number of laps left, so that EOS is due
after the '0': a walker need not count to thousands to know when to stop.

The dial is `make(moves, laps)`: a right answer has up to laps * (moves + 1) + 1 tokens. Why laps?
With one lap the whole list stands in the prompt, which doubles the sequence: 4096 tokens of answer
would cost 4096 tokens of prompt, and four times the attention. A list made up by the answer itself
(each cell naming the next move) needs no prompt, but such a walk on 15 cells repeats within 15
moves and could be copied from there. Laps keep the prompt at a fraction 1/laps of the answer, and
on 3 x 5 cells, whose sides share no factor, a lap that ends in another row and another column than
it began in leads home only after 15 laps. The data set holds only such lists: within an answer each
cell must be worked out from the one before it. One wrong cell spoils all that follow, whatever the
horizon.

Token ids: 0..14 the cells row by row, 15..18 the moves, 19..34 '0'..'15' laps left, 35 EOS, 36 PAD,
37..39 never used; they round the vocabulary up to a number that device counts divide.
"""

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import types
from trm_jax.tasks import task

ROWS, COLUMNS, MAX_LAPS = 3, 5, 15
LEFT, RIGHT, UP, DOWN, LAP, EOS, PAD = 15, 16, 17, 18, 19, 35, 36
# Shares of the demonstrator's sequences that are right and of its tokens that are random; SLIPS
# bounds the random tokens of an answer, so that long ones are still sometimes right.
RIGHT_WAY, CORRUPTED, SLIPS = 0.4, 0.05, 0.5


class Moves(tfds.core.GeneratorBasedBuilder):
  """Distinct lists of `moves` random moves, a random cell to start from, laps/2..laps laps."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First release.'}
  url_infos = None  # nothing is downloaded, so there are no checksums to look for
  SIZES = {'train': 16384, 'validation': 512, 'test': 512}
  moves, laps = 9, 3

  def _info(self) -> tfds.core.DatasetInfo:
    prompt = tfds.features.Tensor(shape=(self.moves + 2,), dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'prompt': prompt})
    )

  def _split_generators(self, dl_manager):
    # RandomState, because its stream is frozen for all NumPy versions (NEP 19).
    random, rows = np.random.RandomState(0), {}
    while len(rows) < sum(self.SIZES.values()):
      laps = random.randint((self.laps + 1) // 2, self.laps + 1)
      first = random.randint(0, ROWS * COLUMNS)
      moves = random.randint(LEFT, LAP, self.moves)
      left, right, up, down = np.bincount(moves - LEFT, minlength=4)
      if (down - up) % ROWS and (right - left) % COLUMNS:
        rows[(*moves, first, LAP + laps)] = None
    rows = iter(rows)
    return {
      split: self._generate_examples([next(rows) for _ in range(size)])
      for split, size in self.SIZES.items()
    }

  def _generate_examples(self, rows):
    for i, row in enumerate(rows):
      yield i, {'prompt': np.array(row, np.int32)}


def encode(row: dict) -> np.ndarray:
  """The moves, the first cell and the number of laps, int32 [moves + 2]."""
  return row['prompt']


def _walk(prompts, start, short, width):
  """Cells and laps left of each prompt [B,width], EOS behind them; their count [B].

  `short` is the number of laps left out, 0 or 1.
  """
  lap = prompts.shape[1] - start - 1  # tokens of one lap: the moves and the number of laps left
  lap, start = lap[:, None], start[:, None]
  slot = jnp.arange(width)[None]
  done, phase = slot // lap, slot % lap
  pick = lambda at: jnp.take_along_axis(prompts, at, axis=-1)
  move = jnp.where(phase < lap - 1, pick(start + phase), PAD)
  row = jnp.where(move == DOWN, 1, 0) - jnp.where(move == UP, 1, 0)
  column = jnp.where(move == RIGHT, 1, 0) - jnp.where(move == LEFT, 1, 0)
  first, laps = pick(start + lap - 1), pick(start + lap) - LAP - short
  row = (first // COLUMNS + jnp.cumsum(row, axis=-1)) % ROWS
  column = (first % COLUMNS + jnp.cumsum(column, axis=-1)) % COLUMNS
  cells = jnp.where(phase < lap - 1, row * COLUMNS + column, LAP + laps - 1 - done)
  count = laps * lap
  return jnp.where(slot < count, cells, EOS), count[:, 0]


def reward(
  prompts: Int[Array, 'B P'],
  start: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
) -> Float[Array, 'B']:
  """1 where the valid tokens are exactly the cells, the laps left and EOS, else 0; float32 [B]."""
  width = tokens.shape[1]
  answer, count = _walk(prompts, start, 0, width)
  due = jnp.arange(width)[None] <= count[:, None]
  right = (valid == due) & (~due | (tokens == answer))
  return (right.all(-1) & (count < width)).astype(jnp.float32)


def demonstrate(
  key: Key[Array, ''], prompts: Int[Array, 'B P'], start: Int[Array, 'B'], response_length: int
) -> tuple[Int[Array, 'B T'], Bool[Array, 'B T']]:
  """A demonstrator of two minds: 40 % right, 60 % walk a lap too few; some cells random.

  A policy warm-started on it is able but unfocused, so that the reward has a preference to find.
  All that comes after the first number follows from what is written, so a policy need not guess
  which mind it is in. Answers end in EOS, then PAD outside `valid`; int32 and bool [B,T].
  """
  key_way, key_where, key_what = jax.random.split(key, 3)
  short = 1 - jax.random.bernoulli(key_way, RIGHT_WAY, (prompts.shape[0], 1))
  tokens, count = _walk(prompts, start, short, response_length)
  slot = jnp.arange(response_length)[None]
  share = jnp.minimum(CORRUPTED, SLIPS / count)[:, None]
  corrupted = jax.random.bernoulli(key_where, share, tokens.shape) & (tokens < LEFT)
  noise = jax.random.randint(key_what, tokens.shape, 0, LEFT, tokens.dtype)
  valid = slot <= count[:, None]
  # A sum modulo 15 with a uniform cell is uniform, and is sharded as the tokens are.
  return jnp.where(valid, jnp.where(corrupted, (tokens + noise) % LEFT, tokens), PAD), valid


def make(moves: int, laps: int) -> task.Task:
  """The task with lists of `moves` moves, walked up to `laps` times; its data set is its own.

  Answers have up to laps * (moves + 1) + 1 tokens: 31 of (9, 3), 127 of (17, 7), 496 of (32, 15)
  and 4096 of (272, 15). Raises InputError for moves < 8 (too few lists for the data set) and for
  laps outside 3..15 (a demonstrator who walks a lap too few needs two).
  """
  if moves < 8:
    raise types.InputError(f'moves={moves}: give at least 8, so that there are enough lists.')
  if not 3 <= laps <= MAX_LAPS:
    raise types.InputError(f'laps={laps}: give 3..{MAX_LAPS}; longer answers need more moves.')
  name = f'moves_{moves}_{laps}'
  sized = {'name': name, 'moves': moves, 'laps': laps, '__module__': __name__}
  return task.Task(
    name=name,
    builder=type(f'Moves{moves}x{laps}', (Moves,), sized, skip_registration=True),
    vocabulary=(
      *'abcdefghijklmno<>^v',
      *map(str, range(MAX_LAPS + 1)),
      *('<eos>', '<pad>', '<37>', '<38>', '<39>'),
    ),
    eos=EOS,
    pad=PAD,
    prompt_length=moves + 2,
    response_length=laps * (moves + 1) + 1,
    encode=encode,
    reward=reward,
    demonstrate=demonstrate,
  )


TASK = make(moves=9, laps=3)
# Answers of up to 64, 127, 496 and 4096 tokens; load them by 'trm_jax.tasks.moves:MOVES_64' etc.
MOVES_64 = make(moves=8, laps=7)
MOVES_128 = make(moves=17, laps=7)
MOVES_512 = make(moves=32, laps=15)
MOVES_4096 = make(moves=272, laps=15)
