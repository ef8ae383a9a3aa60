"""trm_jax.tasks.moves against a walker who takes one step at a time."""

import hypothesis
import numpy as np
import pytest
import task_checks
from hypothesis import strategies as st

from trm_jax import tasks, types
from trm_jax.tasks import moves

TASK = moves.TASK
STEPS = {15: (0, -1), 16: (0, 1), 17: (-1, 0), 18: (1, 0)}
LIST = [16, 18, 18, 15, 16, 16, 17, 16, 18]


def walk(first, path, laps):
  """Cells and laps left, token ids without EOS."""
  row, column, written = *divmod(first, 5), []
  for left in range(laps - 1, -1, -1):
    for move in path:
      down, right = STEPS[move]
      row, column = (row + down) % 3, (column + right) % 5
      written.append(5 * row + column)
    written.append(19 + left)
  return written


def prompt(first, path, laps):
  return [*path, first, 19 + laps]


@st.composite
def examples(draw):
  path = draw(st.lists(st.integers(15, 18), min_size=2, max_size=9))
  first, laps = draw(st.integers(0, 14)), draw(st.integers(1, 3))
  return prompt(first, path, laps), walk(first, path, laps)


def test_by_hand():
  assert TASK.text(prompt(0, [16, 16, 18], 2)) == '>>va2'
  assert TASK.text(walk(0, [16, 16, 18], 2)) == 'bch1ijo0'
  assert TASK.text(walk(0, [15, 17], 1)) == 'eo0'  # round both edges


@pytest.mark.slow
def test_data_set(tmp_path):
  rows, digest = task_checks.data_set(TASK, tmp_path)
  path, first, laps = rows[:, :-2], rows[:, -2], rows[:, -1] - 19
  share = lambda x: np.bincount(x.ravel()) / x.size
  assert (abs(share(path - 15) - 0.25) < 0.01).all() and len(share(path - 15)) == 4
  assert (abs(share(first) - 1 / 15) < 0.01).all() and (abs(share(laps)[2:] - 0.5) < 0.02).all()
  assert set(laps.tolist()) == {2, 3} and digest == '898fbbeef864c2fb'
  for row in rows[:200].tolist():  # home again after 15 laps, and no sooner
    ends = walk(row[-2], row[:-2], 15)[8::10]
    assert ends[-1] == row[-2] and len(set(ends)) == 15


@pytest.mark.slow
@pytest.mark.parametrize(
  'horizon, shape', [(64, (10, 64)), (128, (19, 127)), (512, (34, 496)), (4096, (274, 4096))]
)
def test_horizons(horizon, shape):
  task = tasks.load(f'trm_jax.tasks.moves:MOVES_{horizon}')
  assert (task.prompt_length, task.response_length) == shape
  path = np.random.RandomState(0).randint(15, 19, shape[0] - 2).tolist()
  right = walk(7, path, moves_laps(task))
  tokens = np.array([[*right, TASK.eos]] * 2, np.int32)
  tokens[1, -2 - horizon // 2] = 3  # a cell or a lap; either way wrong
  prompts, start = task_checks.right_align(task, [prompt(7, path, moves_laps(task))] * 2)
  valid = np.ones_like(tokens, bool)
  assert task_checks.rewards(task, prompts, start, tokens, valid) == [1.0, 0.0]


def moves_laps(task):
  return (task.response_length - 1) // (task.prompt_length - 1)


def test_sizes():
  assert TASK.vocab_size == len(set(TASK.vocabulary)) == 40
  assert (TASK.prompt_length, TASK.response_length) == (11, 31)
  for bad, named in [((7, 3), 'moves=7'), ((9, 2), 'laps=2'), ((9, 16), 'laps=16')]:
    with pytest.raises(types.InputError, match=named):
      moves.make(*bad)


@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31))
def test_reward_is_the_walker(data, seed):
  judged = task_checks.judged(TASK, examples())
  rows = [data.draw(judged) for _ in range(task_checks.ROWS)]
  task_checks.reward_is_exact(TASK, rows, seed)


def test_one_fault_is_enough():
  task_checks.one_fault_is_enough(TASK, prompt(4, LIST, 2), walk(4, LIST, 2))


def test_demonstrator_is_of_two_minds():
  right, other = (walk(4, LIST, laps) for laps in (3, 2))
  task_checks.demonstrator_is_of_two_minds(TASK, prompt(4, LIST, 3), right, other, noisy=15)


@pytest.mark.slow
def test_sharded_equals_unsharded():
  random = np.random.RandomState(0)
  drawn = [(i, random.randint(15, 19, 2 + i).tolist(), 1 + i % 3) for i in range(task_checks.ROWS)]
  rights = [walk(*example) for example in drawn]
  task_checks.sharded_equals_unsharded(TASK, [prompt(*example) for example in drawn], rights)
