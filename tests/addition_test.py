"""trm_jax.tasks.addition, with and without a scratchpad, against column addition by hand."""

import hypothesis
import numpy as np
import pytest
import task_checks
from hypothesis import strategies as st

from trm_jax import types
from trm_jax.tasks import addition

TASKS = {False: addition.TASK, True: addition.SCRATCHPAD}
both = pytest.mark.parametrize('scratchpad', [False, True])
PROMPT, ONE, OTHER = [9, 4, 7, 10, 5, 5, 0, 11], [9, 4, 7], [5, 5, 0]


def answer(one, other, scratchpad, carry=0):
  """Column by column, as a pupil would: token ids without EOS, units first."""
  work, total = [], []
  for a, b in zip(one, other, strict=True):
    work += [a, b, carry, (a + b + carry) % 10]
    total.append((a + b + carry) % 10)
    carry = (a + b + carry) // 10
  return [*work, 11, *total, carry] if scratchpad else [*total, carry]


@st.composite
def examples(draw, scratchpad):
  """A prompt of 2 or 3 digits, nines often, and its answer."""
  digit, size = st.integers(0, 9) | st.just(9), draw(st.integers(2, 3))
  one, other = (draw(st.lists(digit, min_size=size, max_size=size)) for _ in range(2))
  return [*one, 10, *other, 11], answer(one, other, scratchpad)


def test_the_pupil_is_right():
  number = lambda digits: sum(d * 10**i for i, d in enumerate(digits))
  for one, other in [([9, 9, 9], [1, 0, 0]), ([8, 4], [5, 7]), ([0, 0, 0], [0, 0, 0])]:
    assert number(answer(one, other, False)) == number(one) + number(other)
  assert TASKS[False].text(answer([8, 4], [5, 7], False)) == '321'
  assert TASKS[True].text(answer([8, 4], [5, 7], True)) == '85034712=321'


@pytest.mark.slow
def test_data_set(tmp_path):
  rows, digest = task_checks.data_set(addition.TASK, tmp_path)
  assert (rows[:, 3] == 10).all() and (rows[:, 7] == 11).all()
  digits = np.bincount(rows[:, [0, 1, 2, 4, 5, 6]].ravel())
  assert len(digits) == 10 and (abs(digits / digits.sum() - 0.1) < 0.005).all()
  assert digest == '6e439b2db6170bf2'


def test_sizes():
  assert addition.TASK.vocab_size == len(set(addition.TASK.vocabulary)) == 16
  long = addition.make(50, scratchpad=True)
  assert (long.prompt_length, long.response_length) == (102, 253)
  assert addition.make(254).response_length == 256
  assert long.builder.name == addition.make(50).builder.name == 'addition_50'  # one data set
  with pytest.raises(types.InputError, match='digits=2'):
    addition.make(2)


@pytest.mark.slow
@both
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31))
def test_reward_is_the_pupil(scratchpad, data, seed):
  judged = task_checks.judged(TASKS[scratchpad], examples(scratchpad))
  rows = [data.draw(judged) for _ in range(task_checks.ROWS)]
  task_checks.reward_is_exact(TASKS[scratchpad], rows, seed)


@both
def test_one_fault_is_enough(scratchpad):
  right = answer(ONE, OTHER, scratchpad)
  task_checks.one_fault_is_enough(TASKS[scratchpad], PROMPT, right)


@pytest.mark.slow
@both
def test_demonstrator_is_of_two_minds(scratchpad):
  right, other = (answer(ONE, OTHER, scratchpad, carry) for carry in (0, 1))
  task_checks.demonstrator_is_of_two_minds(TASKS[scratchpad], PROMPT, right, other, noisy=10)


@pytest.mark.slow
def test_sharded_equals_unsharded():
  random = np.random.RandomState(0)
  pairs = [random.randint(0, 10, (2, 2 + i % 2)).tolist() for i in range(task_checks.ROWS)]
  prompts = [[*one, 10, *other, 11] for one, other in pairs]
  rights = [answer(one, other, True) for one, other in pairs]
  task_checks.sharded_equals_unsharded(TASKS[True], prompts, rights)
