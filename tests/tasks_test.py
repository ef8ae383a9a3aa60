"""trm_jax.tasks: the data set, the pipeline of prompts, and the sorting task."""

import dataclasses
import hashlib
import importlib.abc
import json
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from trm_jax import tasks, types
from trm_jax.tasks import identity, sorting

TASK = sorting.TASK
SPLITS = {'train': 16384, 'validation': 512, 'test': 512}
FIRST = ['48580548372949=', '035372001761984=', '3664973699=']
DIGEST = 'f096b9518f3acf93'


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data')
  tasks.prepare(TASK, folder)
  return folder


def stream(data_dir, **changes):
  options = {'split': 'train[:50]', 'batch_size': 4, 'seed': 7}
  return tasks.prompts(TASK, data_dir=data_dir, **{**options, **changes})


def texts(batch):
  """Prompts of a batch as text, padding removed; checks the alignment on the way."""
  result = []
  for row, start in zip(batch['prompts'], batch['start'], strict=True):
    assert (row[:start] == TASK.pad).all()
    result.append(TASK.text(row[start:]))
  return result


def epoch(data_dir, split, **changes):
  options = {'batch_size': 1, 'shuffle': False, 'repeat': False, **changes}
  return [text for batch in stream(data_dir, split=split, **options) for text in texts(batch)]


def same(a, b):
  return all((a[name] == b[name]).all() for name in ('prompts', 'start'))


# The data set.


@pytest.mark.slow
def test_splits_are_complete_distinct_and_disjoint(data_dir):
  rows = {split: epoch(data_dir, split, batch_size=256) for split in SPLITS}
  assert {split: len(found) for split, found in rows.items()} == SPLITS
  everything = [row for found in rows.values() for row in found]
  assert len(set(everything)) == sum(SPLITS.values())
  lengths = np.bincount([len(row) - 1 for row in everything], minlength=16)
  expected = len(everything) / 12
  assert (lengths[:4] == 0).all() and len(lengths) == 16
  assert (abs(lengths[4:] - expected) < 5 * expected**0.5).all()
  digits = np.bincount([int(c) for row in everything for c in row[:-1]], minlength=10)
  assert (abs(digits / digits.sum() - 0.1) < 0.005).all()
  assert all(row[-1] == '=' and row[:-1].isdigit() for row in everything)


def test_content_is_pinned(data_dir):
  rows = [row for split in sorted(SPLITS) for row in epoch(data_dir, f'{split}[:64]')]
  assert rows[:3] == FIRST
  assert hashlib.sha256('\n'.join(rows).encode()).hexdigest()[:16] == DIGEST


def test_tensorflow_is_not_needed(tmp_path, monkeypatch):
  class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
      if name.split('.')[0] == 'tensorflow':
        raise ImportError('tensorflow was imported')

  monkeypatch.setattr(sys, 'meta_path', [Refusal(), *sys.meta_path])
  tasks.prepare(TASK, tmp_path)
  assert len(texts(next(stream(tmp_path)))) == 4
  assert 'tensorflow' not in sys.modules


@pytest.mark.slow
def test_prepare_is_silent_and_leaves_a_ready_data_set_alone(tmp_path, capfd):
  tasks.prepare(TASK, tmp_path)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.*')}
  tasks.prepare(TASK, tmp_path)
  assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.*')} == before
  assert tuple(capfd.readouterr()) == ('', '')


@pytest.mark.slow
def test_interrupted_prepare_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
  def stop(self, rows):
    yield 0, {'digits': np.arange(4, dtype=np.int32)}
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(sorting.Sorting, '_generate_examples', stop)
    with pytest.raises(KeyboardInterrupt):
      tasks.prepare(TASK, tmp_path)
  assert [list(path.iterdir()) for path in tmp_path.glob('*/sorting')] == [[]]
  tasks.prepare(TASK, tmp_path)
  assert len(epoch(tmp_path, 'test', batch_size=64)) == 512


@pytest.mark.slow
def test_prepare_accepts_that_another_process_was_faster(tmp_path, monkeypatch):
  original = sorting.Sorting._split_generators

  def overtaken(self, dl_manager):
    monkeypatch.undo()
    tasks.prepare(TASK, tmp_path)
    return original(self, dl_manager)

  monkeypatch.setattr(sorting.Sorting, '_split_generators', overtaken)
  tasks.prepare(TASK, tmp_path)
  assert [path.name for path in tmp_path.glob('*/sorting/*')] == ['1.0.0']
  assert len(epoch(tmp_path, 'test', batch_size=64)) == 512


# The pipeline.


def test_batches_are_right_aligned_int32(data_dir):
  batch = next(stream(data_dir, batch_size=8))
  assert batch['prompts'].shape == (8, 16) and batch['start'].shape == (8,)
  assert batch['prompts'].dtype == batch['start'].dtype == np.int32
  assert all(5 <= len(text) <= 16 for text in texts(batch))


@pytest.mark.slow
@hypothesis.settings(max_examples=25)
@hypothesis.given(
  position=st.integers(0, 40),
  ahead=st.integers(0, 9),
  shuffle=st.booleans(),
  shards=st.integers(1, 3),
)
@hypothesis.example(position=12, ahead=0, shuffle=True, shards=1)  # the batch across the epochs
@hypothesis.example(position=0, ahead=5, shuffle=True, shards=1)
def test_resume_is_exact(data_dir, position, ahead, shuffle, shards):
  options = {'shuffle': shuffle, 'process_index': shards - 1, 'process_count': shards}
  reference = stream(data_dir, **options)
  for _ in range(position):
    next(reference)
  state = json.loads(json.dumps(reference.get_state()))
  resumed = stream(data_dir, **options)
  for _ in range(ahead):
    next(resumed)
  resumed.set_state(state)
  for _ in range(14):  # more than one epoch of 50 rows
    assert same(next(reference), next(resumed))


def test_epochs_are_reshuffled_permutations(data_dir):
  iterator = stream(data_dir, batch_size=10)
  first, second = ([t for _ in range(5) for t in texts(next(iterator))] for _ in range(2))
  assert sorted(first) == sorted(second) == sorted(epoch(data_dir, 'train[:50]'))
  assert first != second


def test_seed_fixes_the_order_and_seeds_do_not_share_epochs(data_dir):
  def epochs(seed):
    iterator = stream(data_dir, batch_size=50, seed=seed)
    return [tuple(texts(next(iterator))) for _ in range(3)]

  assert epochs(0) == epochs(0)
  assert len({order for seed in range(4) for order in epochs(seed)}) == 12


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('count', [2, 3])
def test_processes_share_one_stream(data_dir, shuffle, count):
  whole = stream(data_dir, batch_size=4 * count, shuffle=shuffle)
  shards = [
    stream(data_dir, shuffle=shuffle, process_index=i, process_count=count) for i in range(count)
  ]
  for _ in range(20):  # several epochs; 50 rows are not a multiple of the global batch
    expected = texts(next(whole))
    parts = [texts(next(shard)) for shard in shards]
    assert [parts[i % count][i // count] for i in range(4 * count)] == expected


def test_processes_are_disjoint_covering_and_equally_long(data_dir):
  parts = [
    epoch(data_dir, 'train[:50]', shuffle=True, batch_size=5, process_index=i, process_count=5)
    for i in range(5)
  ]
  assert [len(part) for part in parts] == [10] * 5
  assert sorted(sum(parts, [])) == sorted(epoch(data_dir, 'train[:50]'))
  uneven = [epoch(data_dir, 'train[:50]', process_index=i, process_count=3) for i in range(3)]
  assert [len(part) for part in uneven] == [16] * 3 and len(set(sum(uneven, []))) == 48


def test_slices_of_a_split(data_dir):
  low, high = epoch(data_dir, 'test[:12]'), epoch(data_dir, 'test[12:32]')
  assert len(low) == 12 and low + high == epoch(data_dir, 'test[:32]')


@pytest.mark.parametrize(
  'changes, named',
  [
    ({'split': 'nope'}, "split='nope'.*validation"),
    ({'split': 'train[:'}, 'split='),
    ({'split': 'train[:0]'}, 'split='),
    ({'batch_size': 51, 'repeat': False}, 'split=.*50 rows.*batch of 51'),
    ({'batch_size': 26, 'repeat': False, 'process_count': 2}, 'split=.*2 processes'),
    ({'batch_size': 0}, 'batch_size=0'),
    ({'seed': -1}, 'seed=-1'),
    ({'seed': 2**32}, 'seed='),
    ({'process_index': 2, 'process_count': 2}, 'process_index=2'),
    ({'process_index': -1}, 'process_index=-1'),
    ({'process_count': 0}, 'process_count=0'),
  ],
)
def test_bad_arguments_of_prompts(data_dir, changes, named):
  with pytest.raises(types.InputError, match=named):
    stream(data_dir, **changes)


def test_batch_may_exceed_a_repeated_split(data_dir):
  assert len(set(texts(next(stream(data_dir, split='test[:3]', batch_size=12))))) == 3


def test_data_set_that_is_not_there(tmp_path):
  with pytest.raises(types.InputError, match='data_dir=.*prepare'):
    stream(tmp_path)


def test_folder_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('not a folder')
  with pytest.raises(types.InputError, match='data_dir=.*file.*writable folder'):
    tasks.prepare(TASK, tmp_path / 'file' / 'data')
  assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize(
  'state', [{'next_index': i} for i in (-1, 'x', 1, 3, 10**9, 2**70)] + [{}, None]
)
def test_a_cursor_that_cannot_be_is_refused(data_dir, state):
  iterator = stream(data_dir)
  next(iterator), next(iterator)
  due = iterator.get_state()
  with pytest.raises(types.InputError, match='data cursor=.*2 batches.*put the checkpoint back'):
    tasks.resume(stream(data_dir), state, 2)
  again = stream(data_dir)
  tasks.resume(again, due, 2)
  assert texts(next(again)) == texts(next(iterator))


@pytest.mark.parametrize(
  'bad, words',
  [
    (np.arange(20), '20 tokens'),
    (np.array([3, 99]), 'the id 99'),
    (np.array([-100]), 'the id -100'),
    (np.array([1.5]), 'integers'),
  ],
)
def test_all_prompts_are_checked_and_the_row_is_named(data_dir, bad, words):
  rows, seen = [], []
  whole = tasks.check(TASK, 'test', data_dir, progress=lambda *done: seen.append(done))
  assert whole == tasks.check(TASK, 'test', data_dir) != tasks.check(TASK, 'validation', data_dir)
  assert seen == [(512, 512)]

  def encode(row):
    rows.append(row)
    return bad if len(rows) == 301 else TASK.encode(row)

  with pytest.raises(types.InputError, match=rf"'sorting' \(row 300 of 'test'\).*{words}"):
    tasks.check(dataclasses.replace(TASK, encode=encode), 'test', data_dir)


def test_prompt_longer_than_its_slots(data_dir):
  short = dataclasses.replace(TASK, prompt_length=6)
  iterator = tasks.prompts(short, split='train', data_dir=data_dir, batch_size=64, seed=0)
  with pytest.raises(types.InputError, match='prompt_length=6'):
    next(iterator)


# Tasks and how they are found.

NEW_TASK = """
import numpy as np
import tensorflow_datasets as tfds
from trm_jax.tasks import task

class Letters{name}(tfds.core.GeneratorBasedBuilder):
  VERSION = tfds.core.Version('1.0.0')
  url_infos = None

  def _info(self):
    text = tfds.features.FeaturesDict({{'text': tfds.features.Text()}})
    return tfds.core.DatasetInfo(builder=self, features=text)

  def _split_generators(self, dl_manager):
    return {{'train': self._generate_examples()}}

  def _generate_examples(self):
    yield from ((i, {{'text': 'ab'}}) for i in range(3))

TASK = task.Task(
  name='letters', builder=Letters{name}, vocabulary=('a', 'b', '.', '_'), eos=2, pad=3,
  prompt_length=4, response_length=2, encode=lambda row: np.array([c - 97 for c in row['text']]),
  reward=lambda prompts, start, tokens, valid: 1.0 * (tokens[:, 0] == 2),
)
"""


@pytest.mark.parametrize('module', ['letters_alone', 'letters_folder.inside'])
def test_a_new_task_is_one_file_anywhere(tmp_path, monkeypatch, module):
  path = tmp_path.joinpath(*module.split('.')).with_suffix('.py')
  path.parent.mkdir(exist_ok=True)
  path.write_text(NEW_TASK.format(name=len(module)))
  monkeypatch.syspath_prepend(tmp_path)
  new = tasks.load(module)
  tasks.prepare(new, tmp_path)
  batch = next(tasks.prompts(new, split='train', data_dir=tmp_path, batch_size=2, seed=0))
  assert batch['prompts'].tolist() == [[3, 3, 0, 1]] * 2 and batch['start'].tolist() == [2, 2]
  assert new.demonstrate is None and new.text([1, 0, 2]) == 'ba.'


def test_load_finds_the_task():
  assert tasks.load('trm_jax.tasks.sorting') is TASK
  assert tasks.load('trm_jax.tasks.sorting:TASK') is TASK
  assert tasks.load('trm_jax.tasks.moves:MOVES_64').response_length == 64


def other_task(path, monkeypatch, name, *, last=1, comment='', prompt='ab', code=97):
  """A module of its own with a data set that many call Letters."""
  text = NEW_TASK.format(name='').replace("'text': 'ab'", f"'text': '{prompt}'")
  text = text.replace('c - 97', f'c - {code}')
  path.mkdir(exist_ok=True)
  (path / f'{name}.py').write_text(f'# {comment}\n{text}\nLAST = {last}\n')
  monkeypatch.syspath_prepend(path)
  importlib.invalidate_caches()
  sys.modules.pop(name, None)
  return tasks.load(name)


def test_two_modules_of_one_name_and_an_edited_builder_share_no_rows(tmp_path, monkeypatch):
  def first(task):
    tasks.prepare(task, tmp_path / 'data')
    batches = tasks.prompts(
      task, split='train', data_dir=tmp_path / 'data', batch_size=1, seed=0, shuffle=False
    )
    return next(batches)['prompts'].tolist()

  one = first(other_task(tmp_path / 'x', monkeypatch, 'of_one_name_x'))
  two = first(other_task(tmp_path / 'x', monkeypatch, 'of_one_name_y', prompt='ba'))
  edited = first(other_task(tmp_path / 'x', monkeypatch, 'of_one_name_x', prompt='bb'))
  assert [one[0][-2:], two[0][-2:], edited[0][-2:]] == [[0, 1], [1, 0], [1, 1]]


def test_identity_is_content(tmp_path, monkeypatch):
  parts = lambda *a, **k: identity.parts(other_task(tmp_path, monkeypatch, *a, **k))
  before = parts('same_content_x')
  assert parts('same_content_y') == before
  assert parts('same_content_x', comment='what this is for', last=2) == before
  encoded = parts('same_content_z', code=96)
  assert [name for name in before if encoded[name] != before[name]] == ['encode']
  made = parts('same_content_w', prompt='ba')
  assert [name for name in before if made[name] != before[name]] == ['builder']
  assert identity.source(tasks.load('trm_jax.tasks.addition').reward) != identity.source(
    tasks.load('trm_jax.tasks.addition:SCRATCHPAD').reward
  )


@pytest.mark.parametrize(
  'module', ['nope', 'trm_jax.tasks.nope', 'trm_jax.types', '', '.sorting', 'a b']
)
def test_load_names_the_remedy(module):
  with pytest.raises(types.InputError, match=r'dotted name.*TASK'):
    tasks.load(module)


@pytest.mark.parametrize(
  'line, error', [('import no_such_thing', ImportError), ('1/0', ArithmeticError)]
)
def test_load_keeps_errors_inside_the_module(tmp_path, monkeypatch, line, error):
  name = f'broken_{error.__name__}'
  (tmp_path / f'{name}.py').write_text(line)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(error, match='no_such_thing|division'):
    tasks.load(name)


@pytest.mark.parametrize(
  'changes', [{'eos': 16}, {'pad': -1}, {'prompt_length': 0}, {'response_length': 0}]
)
def test_task_that_contradicts_itself(changes):
  with pytest.raises(types.InputError, match=next(iter(changes))):
    dataclasses.replace(TASK, **changes)


# Sorting.


def test_vocabulary():
  assert TASK.vocab_size == len(set(TASK.vocabulary)) == 16
  assert TASK.text([3, 0, 10, 11, 12]) == '30=<eos><pad>'
  encoded = TASK.encode({'digits': np.array([3, 0, 7, 1], np.int32)})
  assert encoded.tolist() == [3, 0, 7, 1, 10] and encoded.dtype == np.int32


def prompt_arrays(rows, fill=12):
  prompts = np.full((len(rows), 16), fill, np.int32)
  start = np.array([15 - len(digits) for digits in rows], np.int32)
  for row, digits, first in zip(prompts, rows, start, strict=True):
    row[first:] = [*digits, 10]
  return jnp.asarray(prompts), jnp.asarray(start)


def test_reward_by_hand():
  answers = {
    '0137.': 1,
    '0137': 0,  # no EOS
    '013.': 0,  # a digit too few
    '01377.': 0,  # a digit too many
    '7310.': 0,  # descending
    '0137..': 0,  # goes on after EOS
    '0137_.': 0,  # PAD inside
    '.': 0,
    '': 0,
  }
  tokens, valid = np.full((9, 16), 12, np.int32), np.zeros((9, 16), bool)
  for i, text in enumerate(answers):
    tokens[i, : len(text)] = ['0123456789=._'.index(c) for c in text]
    valid[i, : len(text)] = True
  prompts, start = prompt_arrays([[3, 0, 7, 1]] * 9)
  reward = TASK.reward(prompts, start, jnp.asarray(tokens), jnp.asarray(valid))
  assert reward.dtype == jnp.float32 and reward.tolist() == list(answers.values())


def oracle(digits, response):
  """Written from the sentence: exactly the ascending digits, then EOS."""
  return float(response == sorted(digits) + [11])


@st.composite
def answered(draw):
  digits = draw(st.lists(st.integers(0, 9), min_size=4, max_size=15))
  response = sorted(digits) + [11]
  kind = draw(st.sampled_from(['right', 'order', 'no eos', 'extra', 'pad', 'change', 'any']))
  at = draw(st.integers(0, len(response) - 1))
  if kind == 'order':
    response = draw(st.permutations(response[:-1])) + [11]
  elif kind == 'no eos':
    response = response[:-1]
  elif kind == 'extra':
    response = response + [draw(st.integers(0, 15))]
  elif kind == 'pad':
    response = response[:at] + [12] + response[at:]
  elif kind == 'change':
    response = response[:at] + [draw(st.integers(0, 15))] + response[at + 1 :]
  elif kind == 'any':
    response = draw(st.lists(st.integers(0, 15), max_size=16))
  return digits, response


jitted_reward = jax.jit(TASK.reward)
jitted_demonstrate = jax.jit(TASK.demonstrate, static_argnums=3)


@hypothesis.given(
  rows=st.lists(answered(), min_size=8, max_size=8),
  width=st.sampled_from([8, 16, 20]),
  seed=st.integers(0, 2**31),
)
def test_reward_is_the_oracle_whatever_stands_outside(rows, width, seed):
  random = np.random.default_rng(seed)
  prompts, start = prompt_arrays([digits for digits, _ in rows])
  before = np.arange(16)[None] < np.asarray(start)[:, None]
  prompts = jnp.where(before, random.integers(0, 16, (8, 16), np.int32), prompts)
  tokens = random.integers(0, 16, (8, width), np.int32)  # garbage beyond `valid`
  valid = np.zeros((8, width), bool)
  expected = []
  for i, (digits, response) in enumerate(rows):
    response = response[:width]
    tokens[i, : len(response)], valid[i, : len(response)] = response, True
    expected.append(oracle(digits, response))
  reward = jitted_reward(prompts, start, jnp.asarray(tokens), jnp.asarray(valid))
  assert reward.tolist() == expected


def demonstrated(rows, seed=0, width=16):
  prompts, start = prompt_arrays(rows)
  tokens, valid = jitted_demonstrate(jax.random.key(seed), prompts, start, width)
  return np.asarray(tokens), np.asarray(valid)


@pytest.mark.slow
def test_demonstrator_ends_in_eos_and_pads():
  rows = [list(np.random.RandomState(i).randint(0, 10, 4 + i % 12)) for i in range(240)]
  for width in (16, 20):
    tokens, valid = demonstrated(rows, width=width)
    assert tokens.shape == valid.shape == (240, width)
    assert tokens.dtype == np.int32 and valid.dtype == bool
    for digits, answer, mask in zip(rows, tokens, valid, strict=True):
      assert mask.tolist() == [i <= len(digits) for i in range(width)]
      assert (answer[: len(digits)] < 10).all() and answer[len(digits)] == 11
      assert (answer[len(digits) + 1 :] == 12).all()
  cut, valid = demonstrated([[5, 3, 8, 1, 9, 9]], width=4)
  assert cut.shape == (1, 4) and valid.all()


def test_demonstrator_statistics():
  # Ten distinct digits: ascending and descending disagree in every slot.
  tokens, _ = demonstrated([[3, 1, 4, 0, 5, 9, 2, 6, 8, 7]] * 4096)
  digits = tokens[:, :10]
  up, down = digits == np.arange(10), digits == np.arange(10)[::-1]
  ascending = up.sum(-1) > down.sum(-1)
  assert abs(ascending.mean() - 0.4) < 0.03  # 4 standard deviations
  wrong = ~np.where(ascending[:, None], up, down)
  assert abs(wrong.mean() - 0.045) < 0.005  # a tenth of the random digits is right by chance
  assert (abs(wrong.mean(0) - 0.045) < 0.015).all()  # in every slot alike
  assert abs(wrong.any(-1).mean() - (1 - 0.955**10)) < 0.03  # each digit on its own
  assert (abs(np.bincount(digits[wrong], minlength=10) / wrong.sum() - 0.1) < 0.03).all()
  assert (
    demonstrated([[3, 1, 4, 0]] * 64, seed=1)[0] != demonstrated([[3, 1, 4, 0]] * 64)[0]
  ).any()


@pytest.mark.slow
def test_sharded_equals_unsharded():
  rows = [list(np.random.RandomState(i).randint(0, 10, 4 + i % 12)) for i in range(64)]
  prompts, start = prompt_arrays(rows)
  key = jax.random.key(3)
  tokens, valid = TASK.demonstrate(key, prompts, start, 16)
  right = jnp.sort(jnp.where(prompts < 10, prompts, 11), -1)  # so that some rewards are 1
  tokens = tokens.at[::4].set(right[::4])
  reward = TASK.reward(prompts, start, tokens, valid)
  assert 16 <= reward.sum() < 64
  mesh = jax.make_mesh((4, 2), ('data', 'model'))
  with jax.set_mesh(mesh):

    def place(x):
      return jax.device_put(x, P('data', *[None] * (x.ndim - 1)))

    got_tokens, got_valid = jitted_demonstrate(key, place(prompts), place(start), 16)
    got = jitted_reward(place(prompts), place(start), place(tokens), place(valid))
    eager = TASK.reward(place(prompts), place(start), place(tokens), place(valid))
  for result in (got_tokens, got_valid, got, eager):
    assert result.sharding.spec[0] == 'data'
  expected_tokens, expected_valid = TASK.demonstrate(key, prompts, start, 16)
  assert (np.asarray(got_tokens) == np.asarray(expected_tokens)).all()
  assert (np.asarray(got_valid) == np.asarray(expected_valid)).all()
  assert (np.asarray(got) == np.asarray(reward)).all()
  assert (np.asarray(eager) == np.asarray(reward)).all()
