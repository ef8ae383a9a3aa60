"""Whatever comes in: one clear sentence or the right thing, never a traceback, never a wrong read.

`make test` tries a few inputs of each kind, `make test-all` ten thousand in all.
"""

import contextlib
import dataclasses
import io
import logging
import math
import pathlib
import re
import shutil
import sys
import tempfile
import types
import typing
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments import train_policy
from trm_jax import tasks, training
from trm_jax import types as trm_types
from trm_jax.runs import recording
from trm_jax.training import command
from trm_jax.types import InputError

# Four tests, 2500 inputs each where every test is thorough.
EXAMPLES = 2500 if hypothesis.settings().max_examples > 25 else 25
MANY = hypothesis.settings(max_examples=EXAMPLES)

NUMBERS = st.one_of(
  st.integers(-3, 40),
  st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan, 2**40]),
  st.floats(-2, 3),
)
WORDS = st.one_of(
  st.sampled_from(['', 'bfloat16', 'int8', 'int8_channel', 'e5m2', 'e99m99', '8,1', '1,1', '0,1']),
  st.sampled_from(['trm_jax.tasks.moves', 'os', 'no.such', '../x', '-1', 'nan', '日本']),
  st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\0'), max_size=8),
)


def values(kind):
  """Values of a field's type, sensible and not."""
  if dataclasses.is_dataclass(kind):
    return settings_of(kind)
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return st.one_of(*map(values, arguments))
  if origin is typing.Literal:
    return st.sampled_from(arguments)
  if origin is tuple and arguments[1:] == (...,):
    return st.lists(values(arguments[0]), max_size=3).map(tuple)
  if origin is tuple:
    return st.tuples(*map(values, arguments))
  return {
    bool: st.booleans(),
    int: NUMBERS.filter(lambda x: math.isfinite(x)).map(int),
    float: NUMBERS.map(float),
    str: WORDS,
    type(None): st.none(),
  }[kind]


def settings_of(kind):
  """Instances of a settings dataclass that differ from the default in up to four fields.

  A refused one comes as its InputError.
  """
  hints = typing.get_type_hints(kind)
  names = [field.name for field in dataclasses.fields(kind) if field.init]
  chosen = st.lists(st.sampled_from(names), unique=True, max_size=4)

  @st.composite
  def build(draw):
    arguments = {name: draw(values(hints[name])) for name in draw(chosen)}
    for value in arguments.values():
      if isinstance(value, InputError):
        return value
    try:
      return kind(**arguments)
    except InputError as error:
      return error

  return build()


def check_sentence(error):
  """One sentence that names something and says what to do."""
  text = str(error)
  assert 10 < len(text) < 600 and '\n' not in text and 'Traceback' not in text
  # The argument with its value, and then the remedy.
  assert re.search(r'\w=|\w has |\w holds |\w is |\w: ', text) and text.endswith('.'), text


# The run-time type checker draws random names while a strategy runs.
@pytest.mark.filterwarnings('ignore::hypothesis.errors.HypothesisDeprecationWarning')
@MANY
@hypothesis.given(settings_of(training.Config))
def test_any_settings_make_a_program_or_one_sentence(config):
  if not isinstance(config, InputError):
    try:
      training.build(config)
      return
    except InputError as error:
      config = error
  check_sentence(config)


def flags(kind, before=''):
  """(flag, type) of every leaf of nested settings."""
  for name, hint in typing.get_type_hints(kind).items():
    flag = f'{before}{name}'.replace('_', '-')
    if dataclasses.is_dataclass(hint):
      yield from flags(hint, f'{flag}.')
    else:
      yield flag, hint


FLAGS = sorted(flag for flag, _ in flags(training.Config))
ARGUMENTS = st.lists(
  st.one_of(
    st.tuples(st.sampled_from(FLAGS).map('--{}'.format), NUMBERS.map(str) | WORDS),
    st.tuples(st.sampled_from(FLAGS).map('--{}'.format)),
    st.tuples(WORDS),
  ),
  max_size=3,
).map(lambda parts: [word for part in parts for word in part])


@MANY
@hypothesis.given(ARGUMENTS)
def test_any_command_line_is_understood_or_refused_with_code_2(words):
  seen = []
  out = io.StringIO()
  line = ['train_policy', '--directory', '/nowhere/run', *words]
  with (
    mock.patch.object(sys, 'argv', line),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(out),
  ):
    try:
      command.run(train_policy.TrainPolicy, seen.append)
    except SystemExit as stop:
      assert stop.code in (0, 2) if {'-h', '--help'} & set(words) else stop.code == 2
      assert out.getvalue().strip() and 'Traceback' not in out.getvalue()
      return
  assert isinstance(seen[0].config, training.Config)


STATE = {'w': jnp.arange(12.0).reshape(3, 4), 'key': jax.random.key(1), 'count': jnp.int32(3)}
CONFIG = {'seed': 1, 'limit': 0.2}


def state_at(step):
  return STATE | {'count': jnp.int32(step)}


@pytest.fixture(scope='module')
def saved():
  """A run with checkpoints 1 and 2."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'run'
    with recording.open_run(path, CONFIG) as run:
      for step in (1, 2):
        run.log(step, {'loss': step / 2})
        run.save(step, state_at(step), {'data': step})
    yield path


DAMAGE = st.tuples(
  st.integers(0, 10**6),  # which file
  st.sampled_from(['cut', 'flip', 'empty', 'remove', 'replace', 'grow']),
  st.integers(0, 10**6),  # where
  st.binary(min_size=1, max_size=20),
)


def damage(path, which, how, where, content):
  """Does something to one file of a run."""
  files = sorted(p for p in path.rglob('*') if p.is_file())
  file = files[which % len(files)]
  held = file.read_bytes()
  at = where % max(len(held), 1)
  if how == 'remove':
    file.unlink()
    return
  flipped = held[:at] + bytes([held[at] ^ (1 << where % 8)]) + held[at + 1 :] if held else b'x'
  file.write_bytes(
    {
      'cut': held[:at],
      'flip': flipped,
      'empty': b'',
      'replace': content,
      'grow': held[:at] + content + held[at:],
    }[how]
  )


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@MANY
@hypothesis.given(st.lists(DAMAGE, min_size=1, max_size=2))
def test_a_damaged_run_gives_what_was_saved_or_one_sentence(saved, damages):
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
  )
  logging.disable(logging.WARNING)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'run'
    shutil.copytree(saved, path)
    for one in damages:
      damage(path, *one)
    try:
      with recording.open_run(path, CONFIG, resume=True) as run:
        found = run.restore(abstract)
        rows = run.metrics()
    except (InputError, trm_types.DamagedError, OSError) as error:
      assert len(str(error).splitlines()) == 1 and str(error)
    else:
      if found is not None:
        step, state, meta = found
        assert meta == {'data': step}
        for name, leaf in state_at(step).items():
          raw = jax.random.key_data if name == 'key' else np.asarray
          np.testing.assert_array_equal(raw(state[name]), raw(leaf))
      assert all(set(row) >= {'step'} for row in rows)
    finally:
      logging.disable(logging.NOTSET)


NAMES = ('sorting', 'addition', 'addition:SCRATCHPAD', 'chain_sum', 'moves')
ROWS = 16


@pytest.fixture(scope='module')
def judges():
  """Each task's reward, compiled once."""
  found = [tasks.load(f'trm_jax.tasks.{name}') for name in NAMES]
  return [(task, jax.jit(task.reward)) for task in found]


@MANY
@hypothesis.given(st.integers(0, len(NAMES) - 1), st.integers(0, 2**32 - 1), st.booleans())
def test_any_tokens_earn_a_reward_of_0_or_1(judges, which, seed, wild):
  task, reward = judges[which]
  rng = np.random.default_rng(seed)
  low, high = (-(2**31), 2**31 - 1) if wild else (0, task.vocab_size)
  prompts = rng.integers(low, high, (ROWS, task.prompt_length), np.int32)
  start = rng.integers(0, task.prompt_length, ROWS, np.int32)
  tokens = rng.integers(low, high, (ROWS, task.response_length), np.int32)
  valid = np.arange(task.response_length) < rng.integers(0, task.response_length + 1, (ROWS, 1))
  found = np.asarray(reward(prompts, start, tokens, valid))
  assert found.shape == (ROWS,) and np.isin(found, (0.0, 1.0)).all()
  # What stands outside of the response never counts.
  other = np.where(valid, tokens, rng.integers(0, task.vocab_size, tokens.shape, np.int32))
  np.testing.assert_array_equal(np.asarray(reward(prompts, start, other, valid)), found)
