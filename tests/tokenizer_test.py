"""`tokenizer` on tokenizers made here, and the way from text to a trained checkpoint."""

import json
import math
import pathlib
import shutil
import sys
import types as builtin_types

import jax
import numpy as np
import pytest
import tokenizers
import tyro
from tokenizers import decoders, models, pre_tokenizers

from experiments import train_policy
from trm_jax import checkpoints, tasks, types
from trm_jax.checkpoints import tokenizer
from trm_jax.tasks import reasoning
from trm_jax.training import loop

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'qwen3'
VOCAB = 40
SPECIAL = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
SIZES = {'train': 64, 'validation': 8, 'test': 8}


def write(folder, **settings):
  """A tokenizer of single bytes that merges '1' and '0', as Qwen's is written, ids 0 to 35."""
  symbols = sorted({*'0123456789+-=', 'Ġ', *'abcdefghijklmnop', 'Ã', '©'})
  model = models.BPE({x: i for i, x in enumerate([*symbols, '10'])}, [('1', '0')])
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(list(SPECIAL))
  made.save(str(folder / tokenizer.FILE))
  for name, found in settings.items():
    (folder / f'{name}.json').write_text(json.dumps(found))
  return made


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / 'checkpoint'
  shutil.copytree(GOLDEN, path)
  made = write(path)
  end, stop, start = (made.token_to_id(SPECIAL[i]) for i in (0, 2, 1))
  about = {'eos_token_id': [stop, end], 'pad_token_id': end, 'bos_token_id': start}
  (path / 'generation_config.json').write_text(json.dumps(about))
  return path


def refused(call, *words):
  """One sentence with all `words`."""
  with pytest.raises(types.InputError) as error:
    call()
  message = str(error.value)
  assert all(word in message for word in words), message
  assert message.endswith('.') and '\n' not in message


def test_text_comes_back(folder):
  found = tokenizer.load(folder)
  for text in ('1+1=', 'a é', '', '10 - 3', '<|im_start|>abc<|im_end|>'):
    assert found.decode(found.encode(text)) == text
  assert len(found.encode('10')) == 1 and len(found.encode('110')) == 2
  assert found.encode(SPECIAL[2]) == [found.eos]
  assert found.vocab_size == len(found.vocabulary) == VOCAB
  assert found.vocabulary[found.eos] == SPECIAL[2] and found.vocabulary[39] == '<39>'
  assert [found.vocabulary[i] for i in found.encode('10')] == ['10']
  refused(lambda: found.decode([0, 39]), 'id 39', 'no token')
  refused(lambda: found.decode([-1]), 'id -1')


def test_long_texts_are_whole(folder):
  made = tokenizers.Tokenizer.from_file(str(folder / tokenizer.FILE))
  made.enable_truncation(4)
  made.enable_padding(length=8)
  made.save(str(folder / tokenizer.FILE))
  assert len(tokenizer.load(folder).encode('a' * 20)) == 20
  assert len(tokenizer.load(folder).encode('a')) == 1


def test_which_ids_are_special(folder):
  id_of = {name: tokenizer.load(folder).encode(name)[0] for name in SPECIAL}
  end, start, stop = id_of.values()

  def found(**settings):
    for name in ('generation_config', 'tokenizer_config', 'config'):
      path = folder / f'{name}.json'
      path.unlink(missing_ok=True)
      if name in settings:
        path.write_text(json.dumps(settings[name]))
    it = tokenizer.load(folder)
    return it.eos, it.pad, it.bos

  # Of several files the one that generation reads; a list's first; names by their text.
  assert found(generation_config={'eos_token_id': [stop, end]}) == (stop, stop, None)
  assert found(
    generation_config={'eos_token_id': stop},
    tokenizer_config={'eos_token': SPECIAL[0], 'pad_token': {'content': SPECIAL[0]}},
    config={'eos_token_id': end, 'bos_token_id': start, 'vocab_size': VOCAB},
  ) == (stop, end, start)
  assert found(tokenizer_config={'eos_token': {'content': SPECIAL[2]}, 'bos_token': None}) == (
    *(stop, stop),
    None,
  )
  assert found(config={'eos_token_id': 0, 'pad_token_id': None})[0] == 0
  refused(lambda: found(), str(folder), 'no id that ends a response', 'eos_token_id')
  refused(lambda: found(tokenizer_config={'eos_token': 'nope'}), 'eos_token="nope"', 'fetch')
  for value in (40, -1, True, 1.5, [], 'x'):
    refused(lambda value=value: found(generation_config={'eos_token_id': value, 'e': 1}), 'eos')


def test_damage(folder):
  path = folder / tokenizer.FILE
  whole = path.read_text()
  for content, words in (
    (whole[:-100], 'JSON'),
    ('[]', 'object'),
    ('{}', 'no tokenizer'),
    (json.dumps({'version': '1.0', 'model': {'type': 'BPE', 'vocab': 3}}), 'no tokenizer'),
  ):
    path.write_text(content)
    refused(lambda: tokenizer.load(folder), str(path), words, 'fetch')
  path.write_text(whole)
  (folder / 'config.json').write_text('{"vocab_size": 30}')
  refused(lambda: tokenizer.load(folder), 'vocab_size=30', '36 ids')
  (folder / 'tokenizer_config.json').write_text('{')
  refused(lambda: tokenizer.load(folder), 'tokenizer_config.json', 'JSON')
  path.unlink()
  refused(lambda: tokenizer.load(folder), str(path), 'cannot be read')


def test_package_that_is_not_installed(folder, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  refused(lambda: tokenizer.load(folder), "'.[weights]'")


# Text tasks.


class Sums:
  """Generator of sums with the interface of reasoning-gym."""

  def __init__(self, seed, size):
    self.seed = seed

  def __getitem__(self, i):
    one, other = np.random.RandomState(self.seed + i).randint(0, 30, 2).tolist()
    return {'question': f'{one}+{other}=', 'answer': str(one + other), 'metadata': {}}

  def score_answer(self, answer, entry):
    return float(entry['answer'] in answer)


TASK = """from trm_jax.tasks import reasoning
TEMPLATE = '<|im_start|>{{question}}'
TASK = reasoning.make(
  'sums', prompt_length=8, response_length=5, tokenizer={folder!r}, template=TEMPLATE)
"""


@pytest.fixture
def text_task(folder, tmp_path, monkeypatch):
  stub = builtin_types.ModuleType('reasoning_gym')
  stub.create_dataset = lambda name, **settings: Sums(**settings)
  monkeypatch.setitem(sys.modules, 'reasoning_gym', stub)
  monkeypatch.setattr(reasoning.Reasoning, 'SIZES', SIZES)
  reasoning._generator.cache_clear()
  reasoning._codec.cache_clear()
  (tmp_path / 'sums_as_text.py').write_text(TASK.format(folder=str(folder)))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'sums_as_text', raising=False)
  yield tasks.load('sums_as_text')
  reasoning._generator.cache_clear()
  reasoning._codec.cache_clear()


def test_text_task(text_task, folder, tmp_path):
  task, text = text_task, tokenizer.load(folder)
  assert (task.vocab_size, task.eos, task.pad) == (VOCAB, text.eos, text.pad)
  assert task.demonstrate is None
  tasks.prepare(task, tmp_path / 'data')
  options = dict(shuffle=False, repeat=False, batch_size=8, seed=0)
  batch = next(iter(tasks.prompts(task, split='test', data_dir=tmp_path / 'data', **options)))
  asked = [text.decode(r[s:]) for r, s in zip(batch['prompts'], batch['start'], strict=True)]
  assert all(x.startswith('<|im_start|>') and x.endswith('=') for x in asked)
  due = [eval(x.removeprefix('<|im_start|>')[:-1]) for x in asked]
  assert any('10' in x for x in asked) or len(set(asked)) == 8

  def judge(answers):
    tokens, valid = np.full((8, 5), task.pad, np.int32), np.zeros((8, 5), bool)
    for i, ids in enumerate(answers):
      tokens[i, : len(ids)], valid[i, : len(ids)] = ids, True
    rows = map(jax.numpy.asarray, (batch['prompts'], batch['start'], tokens, valid))
    return task.reward(*rows).tolist()

  right = [[*text.encode(f'{x}'), task.eos] for x in due]
  assert judge(right) == [1] * 8
  assert judge([x[:-1] for x in right]) == [0] * 8  # no end
  # Ids without a text, and an end before the end, are no part of a right answer.
  assert judge([[39, *x] for x in right]) == [0] * 8
  assert judge([[task.eos, *x] for x in right]) == [0] * 8
  assert judge([[*text.encode('a'), task.eos]] * 8) == [0] * 8


def test_settings_of_text_tasks(folder, tmp_path):
  refused(lambda: reasoning.make('sums', template='{}'), 'template', 'question')
  refused(lambda: reasoning.make('sums', tokenizer=tmp_path / 'absent'), 'absent')
  names = {
    reasoning.make('sums', **x).builder.name
    for x in ({}, {'tokenizer': folder}, {'template': 'Q: {question}'}, {'tokenizer': folder})
  }
  assert len(names) == 3


def command(folder, tmp_path, *more):
  line = f'--weights {folder} --task sums_as_text --steps 2 --prompts 4 --samples 2'
  line += f' --eval-prompts 8 --data-dir {tmp_path / "data"} --directory {tmp_path / "run"}'
  return tyro.cli(train_policy.TrainPolicy, args=[*line.split(), *more])


@pytest.mark.slow
def test_a_checkpoint_is_trained_on_text(text_task, folder, tmp_path, capsys, monkeypatch):
  seen, run = [], loop.run
  note = lambda program, directory, params, **k: (
    seen.append((program, params)) or run(program, directory, params, **k)
  )
  monkeypatch.setattr(loop, 'run', note)
  train_policy.main(command(folder, tmp_path))
  assert '2 steps' in capsys.readouterr().out
  [(program, params)] = seen
  config, published = checkpoints.load(folder)
  assert program.config.policy == config and program.task is text_task
  jax.tree.map(np.testing.assert_array_equal, params, published)
  rows = (tmp_path / 'run' / 'rl' / 'metrics.jsonl').read_text().splitlines()
  assert len(rows) == 3 and math.isfinite(json.loads(rows[2])['grad_norm'])
  assert not (tmp_path / 'run' / 'warm_start').exists()


@pytest.mark.parametrize(
  'more, words',
  [
    (['--policy.layers', '1'], ['leave out --policy']),
    (['--task', 'trm_jax.tasks.sorting'], ['vocabulary of 40', 'sorting', '16']),
  ],
)
def test_what_does_not_go_with_weights(text_task, folder, tmp_path, more, words):
  refused(lambda: train_policy.main(command(folder, tmp_path, *more)), str(folder), *words)
  assert not (tmp_path / 'run').exists()
