"""What every task must keep, checked against an answer that the test of the task works out."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from trm_jax import tasks

ROWS = 8  # rows of every call of a reward, so that it is compiled once
reward_of = functools.cache(lambda task: jax.jit(task.reward))
demonstrator_of = functools.cache(lambda task: jax.jit(task.demonstrate, static_argnums=3))


def right_align(task, prompts):
  """Prompts [B,P] and their first slots [B]."""
  start = np.array([task.prompt_length - len(prompt) for prompt in prompts], np.int32)
  rows = [[task.pad] * first + list(row) for first, row in zip(start, prompts, strict=True)]
  return np.array(rows, np.int32), start


def rewards(task, *rows):
  """Rewards of any number of rows, ROWS at a time."""
  count = len(rows[0])
  rows = [np.concatenate([x, np.repeat(x[:1], -count % ROWS, 0)]) for x in rows]
  judge = lambda i: np.asarray(reward_of(task)(*(jnp.asarray(x[i : i + ROWS]) for x in rows)))
  return np.concatenate([judge(i) for i in range(0, len(rows[0]), ROWS)])[:count].tolist()


def data_set(task, folder):
  """Checks splits and distinctness; all prompts in order, as token ids, and their digest."""
  tasks.prepare(task, folder)
  found = []
  for split, size in task.builder.SIZES.items():
    options = {'shuffle': False, 'repeat': False, 'batch_size': 512, 'seed': 0}
    batches = tasks.prompts(task, split=split, data_dir=folder, **options)
    rows = [tuple(r[s:]) for b in batches for r, s in zip(b['prompts'], b['start'], strict=True)]
    assert len(rows) == size
    found += rows
  assert len(set(found)) == len(found)
  return np.array(found), hashlib.sha256(np.array(found, np.int32).tobytes()).hexdigest()[:16]


@st.composite
def judged(draw, task, example):
  """A prompt, a response to it, and the only right one."""
  prompt, right = draw(example)
  right = [*right, task.eos]
  response, token = list(right), st.integers(0, task.vocab_size - 1)
  at = draw(st.integers(0, len(right) - 1))
  kind = draw(st.sampled_from(['right', 'change', 'no eos', 'insert', 'remove', 'after', 'any']))
  if kind == 'change':
    response[at] = draw(token)
  elif kind == 'no eos':
    response.pop()
  elif kind == 'insert':
    response.insert(at, draw(token))
  elif kind == 'remove':
    del response[at]
  elif kind == 'after':
    response.append(draw(token))
  elif kind == 'any':
    response = draw(st.lists(token, max_size=task.response_length))
  return prompt, response, right


def reward_is_exact(task, rows, seed):
  """ROWS of `judged`: whatever stands outside, and each row on its own."""
  random, width = np.random.default_rng(seed), task.response_length
  garbage = lambda *shape: random.integers(0, task.vocab_size, shape, np.int32)
  prompts, start = right_align(task, [prompt for prompt, _, _ in rows])
  before = np.arange(task.prompt_length) < start[:, None]
  prompts = np.where(before, garbage(*prompts.shape), prompts)
  tokens, valid = garbage(ROWS, width), np.zeros((ROWS, width), bool)
  for i, (_, response, _) in enumerate(rows):
    shown = response[:width]
    tokens[i, : len(shown)], valid[i, : len(shown)] = shown, True
  expected = [float(response[:width] == right) for _, response, right in rows]
  rows = (prompts, start, tokens, valid)
  assert rewards(task, *rows) == expected
  order = random.permutation(ROWS)
  assert rewards(task, *(x[order] for x in rows)) == [expected[i] for i in order]


def one_fault_is_enough(task, prompt, right):
  """Every other token in every slot, and every slot of `valid` flipped, spoil a right answer."""
  right, width = [*right, task.eos], task.response_length
  tokens = np.full((1, width), task.pad, np.int32)
  tokens[0, : len(right)] = right
  valid = np.arange(width)[None] < len(right)
  cases = [(tokens, valid)]
  for slot, due in enumerate(right):
    for other in set(range(task.vocab_size)) - {due}:
      cases.append((np.where(np.arange(width) == slot, other, tokens), valid))
  cases += [(tokens, valid ^ (np.arange(width) == slot)) for slot in range(width)]
  prompts, start = right_align(task, [prompt] * len(cases))
  tokens, valid = (np.concatenate(column) for column in zip(*cases, strict=True))
  found = rewards(task, prompts, start, tokens.astype(np.int32), valid)
  assert found == [1.0] + [0.0] * (len(cases) - 1)
  short = [x[:ROWS] for x in (prompts, start, tokens[:, : len(right) - 1].astype(np.int32))]
  assert rewards(task, *short, np.ones_like(short[2], bool)) == [0.0] * ROWS


def demonstrator_is_of_two_minds(task, prompt, right, other, noisy):
  """40 % right, 60 % other; of the tokens below `noisy` a share random, each on its own."""
  width = task.response_length + 2
  prompts, start = right_align(task, [prompt] * 4096)
  show = demonstrator_of(task)
  tokens, valid = map(np.asarray, show(jax.random.key(0), prompts, start, width))
  assert tokens.dtype == np.int32 and valid.dtype == bool
  minds = []
  for answer in (right, other):
    row = np.full(width, task.pad)
    row[: len(answer) + 1] = [*answer, task.eos]
    minds.append((row, np.arange(width) <= len(answer), len(answer)))
  (right, _, _), (other, _, _) = minds
  lead = (tokens == right).sum(-1) - (tokens == other).sum(-1)
  assert abs((lead > 0).mean() + (lead == 0).mean() / 2 - 0.4) < 0.04
  for chosen, (row, due, count) in zip((lead > 0, lead < 0), minds, strict=True):
    assert (valid[chosen] == due).all()
    share = min(0.05, 0.5 / count) * (1 - 1 / noisy)  # some random tokens are right by chance
    wrong = (tokens != row)[chosen].mean(0)
    assert not wrong[row >= noisy].any()
    # Where the minds agree, because a random token elsewhere may hide which it was.
    assert (abs(wrong[(right == other) & (row < noisy)] - share) < 0.02).all()
  assert (tokens != np.asarray(show(jax.random.key(1), prompts, start, width)[0])).any()


def sharded_equals_unsharded(task, prompts, rights):
  """Reward and demonstrator of ROWS prompts, every second answered right, on 4 x 2 devices."""
  prompts, start = right_align(task, prompts)
  width, key = task.response_length, jax.random.key(3)
  tokens, valid = map(np.array, demonstrator_of(task)(key, prompts, start, width))
  for i in range(0, ROWS, 2):
    answer = [*rights[i], task.eos]
    tokens[i, : len(answer)], valid[i] = answer, np.arange(width) < len(answer)
  expected = rewards(task, prompts, start, tokens, valid)
  assert sum(expected) >= ROWS / 2
  shown = demonstrator_of(task)(key, prompts, start, width)
  with jax.set_mesh(jax.make_mesh((4, 2), ('data', 'model'))):
    place = lambda x: jax.device_put(x, P('data', *[None] * (x.ndim - 1)))
    rows = [place(x) for x in (prompts, start, tokens, valid)]
    got = [*demonstrator_of(task)(key, *rows[:2], width), reward_of(task)(*rows)]
  for one, all_ in zip([*shown, np.array(expected, np.float32)], got, strict=True):
    assert all_.sharding.spec[0] == 'data'
    assert (np.asarray(one) == np.asarray(all_)).all()
