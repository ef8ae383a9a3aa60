"""trm_jax.tasks.reasoning against a stand-in for reasoning-gym with the same interface."""

import sys
import types as builtin_types

import hypothesis
import jax
import numpy as np
import pytest
import task_checks
from hypothesis import strategies as st

from trm_jax import tasks, types
from trm_jax.tasks import reasoning

SIZES = {'train': 64, 'validation': 8, 'test': 8}


class Sums:
  """Generator of sums: repeats itself, and judges as reasoning-gym does."""

  def __init__(self, seed, size, top=30):
    if top < 1:
      raise AssertionError('top must be positive')
    self.seed, self.size, self.top = seed, size, top

  def __getitem__(self, i):
    one, other = np.random.RandomState(self.seed + i // 2).randint(0, self.top, 2).tolist()
    return {'question': f'{one}+{other}=', 'answer': str(one + other), 'metadata': {}}

  def score_answer(self, answer, entry):
    """Spaces are allowed, a right number among others earns half; fails on anything else."""
    numbers = [int(word) for word in answer.split()]
    due = int(entry['answer'])
    return 1.0 if numbers == [due] else 0.5 if due in numbers else 0.0


@pytest.fixture(autouse=True)
def gym(monkeypatch):
  stub = builtin_types.ModuleType('reasoning_gym')

  def create_dataset(name, **settings):
    if name != 'sums':
      raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**settings)

  stub.create_dataset = create_dataset
  monkeypatch.setitem(sys.modules, 'reasoning_gym', stub)
  monkeypatch.setattr(reasoning.Reasoning, 'SIZES', SIZES)
  reasoning._generator.cache_clear()
  yield
  reasoning._generator.cache_clear()


TASK = reasoning.make('sums', prompt_length=8, response_length=5)


def ask(i, answer, eos=True):
  """Prompt and response of entry i of the generator."""
  return list(Sums(0, 0)[i]['question'].encode()), [*answer.encode(), *[256] * eos]


def judge(pairs):
  prompts, start = task_checks.right_align(TASK, [prompt for prompt, _ in pairs])
  tokens = np.full((len(pairs), 7), 257, np.int32)
  valid = np.zeros((len(pairs), 7), bool)
  for i, (_, response) in enumerate(pairs):
    tokens[i, : len(response)], valid[i, : len(response)] = response, True
  return task_checks.rewards(TASK, prompts, start, tokens, valid)


def test_data_set(tmp_path):
  due = list(dict.fromkeys(Sums(0, 0)[i]['question'] for i in range(640)))
  tasks.prepare(TASK, tmp_path)
  for split, size in SIZES.items():
    options = {'shuffle': False, 'repeat': False, 'batch_size': 8, 'seed': 0}
    batches = tasks.prompts(TASK, split=split, data_dir=tmp_path, **options)
    rows = [x for b in batches for x in zip(b['prompts'], b['start'], strict=True)]
    assert sorted(TASK.text(row[start:]) for row, start in rows) == sorted(due[:size])
    del due[:size]


def test_the_verifier_decides():
  due = Sums(0, 0)[0]['answer']
  garbage = ask(0, '')[0], [200, 256]  # not UTF-8
  pairs = [
    *(ask(0, due), ask(0, f' {due}'), ask(0, f'{due} 1'), ask(0, 'x'), ask(0, '')),
    *(ask(0, due, eos=False), (ask(0, '')[0], [256, *ask(0, due)[1]]), garbage),
    (ask(0, '')[0], [*due.encode(), 257, 256]),
  ]
  assert judge(pairs) == [1, 1, 0, 0, 0, 0, 0, 0, 0]


def examples():
  return st.integers(0, 60).map(lambda i: (ask(i, '')[0], list(Sums(0, 0)[i]['answer'].encode())))


@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31))
def test_reward_is_the_answer(data, seed):
  rows = [data.draw(task_checks.judged(TASK, examples())) for _ in range(task_checks.ROWS)]
  for _, response, right in rows:  # spellings that the verifier takes for the same number
    text = bytes(x for x in response if x < 128).decode()
    hypothesis.assume(response == right or text.strip('0+ \t\n\r\v\f\x1c\x1d\x1e\x1f') == text)
    hypothesis.assume('_' not in text)
  task_checks.reward_is_exact(TASK, rows, seed)


def test_demonstrator_is_of_two_minds():
  at = next(i for i in range(60) if len(set(Sums(0, 0)[i]['answer'])) == 2)
  prompt, answer = ask(at, Sums(0, 0)[at]['answer'], eos=False)
  task_checks.demonstrator_is_of_two_minds(TASK, prompt, answer, answer[::-1], noisy=256)


def test_sharded_equals_unsharded():
  pairs = [ask(i, Sums(0, 0)[i]['answer'], eos=False) for i in range(task_checks.ROWS)]
  task_checks.sharded_equals_unsharded(TASK, *zip(*pairs, strict=True))


def test_package_that_is_not_installed(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)  # import then fails as if missing
  task = tasks.load('trm_jax.tasks.reasoning')
  with pytest.raises(types.InputError, match=r"pip install '\.\[reasoning\]'"):
    tasks.prepare(task, tmp_path)
  assert not list(tmp_path.rglob('*.array_record*'))


@pytest.mark.parametrize(
  'name, settings, named',
  [
    ('nope', {}, "refuses generator 'nope'.*not registered"),
    ('sums', {'top': 0}, 'top must be positive'),
    ('sums', {'bottom': 0}, 'bottom'),
    ('sums', {'top': 3}, '9 of 80 distinct'),
    ('sums', {'prompt_length': 2}, '0 of 80.*prompt_length=2'),
    ('sums', {'response_length': 1}, '0 of 80.*response_length=1'),
  ],
)
def test_settings_that_do_not_work(tmp_path, name, settings, named):
  with pytest.raises(types.InputError, match=named):
    tasks.prepare(reasoning.make(name, **settings), tmp_path)


def test_prompt_of_another_version():
  prompts, start = task_checks.right_align(TASK, [list(b'99+99=')])
  tokens = np.array([[49, 256]], np.int32)
  with pytest.raises(Exception, match='another version of reasoning-gym'):
    jax.block_until_ready(
      TASK.reward(*map(jax.numpy.asarray, (prompts, start, tokens, tokens > 0)))
    )


def test_sizes():
  assert TASK.vocab_size == len(set(TASK.vocabulary)) == 264
  assert TASK.text(list(b'1+1=')) == '1+1='
  names = {reasoning.make('sums', top=top).builder.name for top in (3, 4)}
  assert len(names) == 2  # each setting has its own data set
