"""trm_jax.tasks.chain_sum, all sums or the last alone, against sums one term at a time."""

import hypothesis
import numpy as np
import pytest
import task_checks
from hypothesis import strategies as st

from trm_jax import types
from trm_jax.tasks import chain_sum

TASKS = {True: chain_sum.make(6), False: chain_sum.make(6, worked=False)}
both = pytest.mark.parametrize('worked', [True, False])
CHAIN = [3, -5, -2, 1, 5, -4]


def prompt(terms):
  return [*(9 + term if term > 0 else 14 - term for term in terms), 20]


def answer(terms, worked, total=0):
  sums = []
  for term in terms:
    total += term
    sums.append(total % 10)
  return sums if worked else sums[-1:]


@st.composite
def examples(draw, worked):
  term = st.integers(-5, -1) | st.integers(1, 5)
  terms = draw(st.lists(term, min_size=3, max_size=6))
  return prompt(terms), answer(terms, worked)


def test_by_hand():
  assert TASKS[True].text(prompt([3, 5, -2, 1])) == '+3+5-2+1='
  assert TASKS[True].text(answer([3, 5, -2, 1], True)) == '3867'
  assert answer([3, 5, -2, 1], False) == [7] and answer([-1, -5], True) == [9, 4]


@pytest.mark.slow
def test_data_set(tmp_path):
  rows, digest = task_checks.data_set(chain_sum.TASK, tmp_path)
  assert rows.shape[1] == 16 and (rows[:, -1] == 20).all()
  terms = np.bincount(rows[:, :-1].ravel())[10:]
  assert len(terms) == 10 and (abs(terms / terms.sum() - 0.1) < 0.005).all()
  assert digest == '28833863c3167016'


def test_sizes():
  assert chain_sum.TASK.vocab_size == len(set(chain_sum.TASK.vocabulary)) == 24
  assert chain_sum.make(255).response_length == chain_sum.make(255).prompt_length == 256
  assert TASKS[False].response_length == 2
  assert TASKS[False].builder.name == TASKS[True].builder.name == 'chain_sum_6'  # one data set
  with pytest.raises(types.InputError, match='terms=4'):
    chain_sum.make(4)


@both
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31))
def test_reward_is_the_sums(worked, data, seed):
  judged = task_checks.judged(TASKS[worked], examples(worked))
  rows = [data.draw(judged) for _ in range(task_checks.ROWS)]
  task_checks.reward_is_exact(TASKS[worked], rows, seed)


@both
def test_one_fault_is_enough(worked):
  task_checks.one_fault_is_enough(TASKS[worked], prompt(CHAIN), answer(CHAIN, worked))


@both
def test_demonstrator_is_of_two_minds(worked):
  right, other = (answer(CHAIN, worked, total) for total in (0, -CHAIN[0]))
  task_checks.demonstrator_is_of_two_minds(TASKS[worked], prompt(CHAIN), right, other, noisy=10)


@pytest.mark.slow
def test_sharded_equals_unsharded():
  random = np.random.RandomState(0)
  chains = [random.choice([-5, -3, -1, 1, 2, 4], 3 + i % 4) for i in range(task_checks.ROWS)]
  rights = [answer(chain, True) for chain in chains]
  task_checks.sharded_equals_unsharded(TASKS[True], [prompt(c) for c in chains], rights)
