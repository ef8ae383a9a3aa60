"""`parameters` against checkpoints and arrays of transformers (golden/), and against damage."""

import functools
import json
import os
import pathlib
import shutil
import struct
import sys
import tempfile

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as tensors

from trm_jax import checkpoints, policy, types
from trm_jax.checkpoints import config_json
from trm_jax.mesh import sharding
from trm_jax.policy import experts

GOLDEN = pathlib.Path(__file__).parent / 'golden'
MODELS = 'qwen3', 'qwen3_long', 'qwen3_moe'  # tied; bfloat16, yarn and several files; mixture
SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'


@functools.cache
def loaded(name):
  return checkpoints.load(GOLDEN / name)


def same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def refused(call, *words):
  """The message of the InputError: one sentence with all `words`."""
  with pytest.raises(types.InputError) as error:
    call()
  message = str(error.value)
  assert all(word in message for word in words), message
  assert message.endswith('.') and '\n' not in message and len(message) < 900
  return message


@pytest.mark.parametrize(
  'name', [n if n == 'qwen3' else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_logits_and_routes_equal_those_of_transformers(name):
  config, params = loaded(name)
  golden = np.load(GOLDEN / name / 'arrays.npz', allow_pickle=False)
  tokens, start = golden['tokens'], golden['start']
  real = np.arange(tokens.shape[1])[None] >= start[:, None]

  @jax.jit
  def run(params, tokens, start):
    hidden, _, aux = policy.apply(params, config, tokens, start=start)
    return policy.logits(params, hidden), aux

  logits, aux = run(params, tokens, start)
  np.testing.assert_allclose(logits[real], golden['logits'][real], rtol=0, atol=1e-4)
  assert golden['logits'][real].std() > 1
  if config.experts:
    scores = golden['router_logits'][real]
    np.testing.assert_allclose(aux.router_logits[real], scores, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(aux.routes[real], golden['routes'][real])
    loss = experts.load_balance(aux.router_logits, aux.routes, jnp.asarray(real))
    np.testing.assert_allclose(loss, golden['load_balance'], rtol=1e-5)


def test_what_the_golden_checkpoints_are():
  tied, long, mixture = (loaded(name)[0] for name in MODELS)
  assert tied.tied_head and not long.tied_head and not mixture.tied_head
  assert long.rope_scaling.kind == 'yarn' and long.rope_scaling.factor == 4
  assert long.norm_epsilon == 1e-5 and long.rope_base == 1e6
  assert (mixture.experts, mixture.experts_per_token, mixture.mlp_width) == (8, 2, 12)
  assert mixture.normalize_gates and not tied.experts
  assert all(p.dtype == jnp.float32 for name in MODELS for p in jax.tree.leaves(loaded(name)[1]))
  assert sum(f.stat().st_size for f in GOLDEN.rglob('*') if f.is_file()) < 300_000


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('limit', [10**9, 5_000])
def test_what_is_saved_is_loaded(name, limit, tmp_path):
  config, params = loaded(name)
  checkpoints.save(tmp_path / 'out', params, config, shard_bytes=limit)
  assert checkpoints.load(tmp_path / 'out')[0] == config
  same(checkpoints.load(tmp_path / 'out')[1], params)
  assert (tmp_path / 'out' / INDEX).exists() == (limit < 10**9)
  assert [p.name for p in tmp_path.iterdir()] == ['out']
  for path in (tmp_path / 'out').glob('*.safetensors'):
    parts = tensors.load_file(path)
    assert len(parts) == 1 or sum(t.nbytes for t in parts.values()) <= limit


def test_bfloat16_is_rounded_once_and_half_the_size(tmp_path):
  config, params = loaded('qwen3')
  checkpoints.save(tmp_path / 'low', params, config, dtype='bfloat16')
  want = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
  same(checkpoints.load(tmp_path / 'low')[1], want)
  # What bfloat16 holds exactly comes back exactly.
  config, params = loaded('qwen3_long')
  checkpoints.save(tmp_path / 'again', params, config, dtype='bfloat16')
  same(checkpoints.load(tmp_path / 'again')[1], params)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['qwen3_long', 'qwen3_moe'])
def test_meshes(name, tmp_path):
  config, params = loaded(name)
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    _, spread = checkpoints.load(GOLDEN / name)
    fresh = policy.shapes(config, params['embed'].shape[0])
    for got, like in zip(jax.tree.leaves(spread), jax.tree.leaves(fresh), strict=True):
      assert got.sharding.spec == like.sharding.spec
    q = spread['layers']['attention']['q']['kernel']
    assert q.addressable_shards[0].data.size * 8 == q.size
    checkpoints.save(tmp_path / 'inside', spread, config)
  same(spread, params)
  checkpoints.save(tmp_path / 'outside', spread, config)
  for place in ('inside', 'outside'):
    same(checkpoints.load(tmp_path / place)[1], params)
  with jax.set_mesh(sharding.make_mesh(3, 1)):
    refused(lambda: checkpoints.load(GOLDEN / name), "'data': 3", 'choose a mesh')


@pytest.fixture
def copy(tmp_path):
  def of(name):
    return pathlib.Path(shutil.copytree(GOLDEN / name, tmp_path / name))

  return of


def rewrite(folder, change, file=SINGLE):
  """Changes the tensors of a file."""
  found = tensors.load_file(folder / file)
  change(found)
  tensors.save_file(found, folder / file, {'format': 'pt'})


NORM = 'model.norm.weight'


@pytest.mark.parametrize(
  'change, words',
  [
    (lambda t: t.pop(NORM), [NORM, 'has no tensor', 'fetch']),
    (lambda t: t.update(extra=np.zeros(2)), ['holds extra', 'remove']),
    (lambda t: t.update({NORM: np.ones(3, np.float32)}), [NORM, '[3]', '[16]']),
    (lambda t: t.update({NORM: np.ones(16, np.int32)}), [NORM, 'I32', 'F32']),
    (lambda t: t.update({NORM: np.ones(16, np.float64)}), [NORM, 'F64', 'BF16']),
    (
      lambda t: t.update({'model.layers.0.self_attn.q_proj.weight': np.ones((16, 32), 'f4')}),
      ['q_proj', '[16, 32]', '[32, 16]'],
    ),
    (lambda t: t.update({'lm_head.weight': np.ones((40, 16), 'f4')}), ['lm_head', 'tie_word']),
    (lambda t: t.update({NORM: np.full(16, np.nan, 'f4')}), [NORM, 'NaN', 'fetch']),
    (lambda t: t[NORM].__setitem__(3, np.inf), [NORM, 'infinity', 'fetch']),
  ],
)
def test_other_tensors_are_refused(change, words, copy):
  folder = copy('qwen3')
  rewrite(folder, change)
  refused(lambda: checkpoints.load(folder), str(folder), *words)


def test_a_tied_head_may_be_stored_twice(copy):
  folder = copy('qwen3')
  rewrite(folder, lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight']}))
  same(checkpoints.load(folder)[1], loaded('qwen3')[1])


@pytest.mark.parametrize('length', [0, 7, 8, 100, -1, -1000])
def test_truncated_files(length, copy):
  path = copy('qwen3') / SINGLE
  path.write_bytes(path.read_bytes()[:length])
  refused(lambda: checkpoints.load(path.parent), str(path), 'damaged', 'fetch')


def change_index(folder, change):
  index = json.loads((folder / INDEX).read_text())
  change(index)
  (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
  'place',
  ['../outside.safetensors', '{tmp}/outside.safetensors', 'a/b.safetensors', '..', '', 3, None],
)
def test_an_index_cannot_point_elsewhere(place, copy, tmp_path):
  folder = copy('qwen3_long')
  shutil.copy(folder / 'model-00001-of-00004.safetensors', tmp_path / 'outside.safetensors')
  place = place.format(tmp=tmp_path) if isinstance(place, str) else place
  change_index(folder, lambda index: index['weight_map'].update({NORM: place}))
  refused(lambda: checkpoints.load(folder), INDEX, NORM, json.dumps(place), 'own folder')


def test_links_out_of_the_folder(copy, tmp_path):
  folder = copy('qwen3')
  os.rename(folder / SINGLE, tmp_path / 'blob')
  (folder / SINGLE).symlink_to(tmp_path / 'blob')
  refused(lambda: checkpoints.load(folder), str(folder / SINGLE), 'link', 'follow_links=True')
  same(checkpoints.load(folder, follow_links=True)[1], loaded('qwen3')[1])


def test_an_index_must_tell_the_truth(copy):
  first, second = 'model-00001-of-00004.safetensors', 'model-00002-of-00004.safetensors'
  folder = copy('qwen3_long')
  in_first = next(iter(tensors.load_file(folder / first)))
  change_index(folder, lambda index: index['weight_map'].update({in_first: second}))
  refused(lambda: checkpoints.load(folder), in_first, 'list')
  change_index(folder, lambda index: index['weight_map'].pop(in_first))
  refused(lambda: checkpoints.load(folder), in_first, first, 'does not list')
  told = {in_first: first, 'more': 'gone.safetensors'}
  change_index(folder, lambda index: index['weight_map'].update(told))
  refused(lambda: checkpoints.load(folder), 'is not there')
  (folder / INDEX).write_text('{"weight_map": []}')
  refused(lambda: checkpoints.load(folder), INDEX, 'weight_map')
  (folder / INDEX).unlink()
  refused(lambda: checkpoints.load(folder), SINGLE, 'is not there')


def test_where_nothing_is(tmp_path):
  refused(lambda: checkpoints.load(tmp_path / 'absent'), 'absent', 'config.json', 'folder')


def test_without_the_library(monkeypatch, tmp_path):
  for name in ('safetensors', 'safetensors.numpy'):
    monkeypatch.setitem(sys.modules, name, None)
  config, params = loaded('qwen3')
  refused(lambda: checkpoints.load(GOLDEN / 'qwen3'), 'safetensors', "'.[weights]'")
  refused(lambda: checkpoints.save(tmp_path / 'out', params, config), "'.[weights]'")
  assert not list(tmp_path.iterdir())


def test_saving_is_all_or_nothing(monkeypatch, tmp_path):
  config, params = loaded('qwen3_long')
  write, written = tensors.save_file, []

  def fails(*args):
    if written:
      raise OSError('no space')
    written.append(write(*args))

  monkeypatch.setattr(tensors, 'save_file', fails)
  with pytest.raises(OSError, match='no space'):
    checkpoints.save(tmp_path / 'out', params, config, shard_bytes=5_000)
  assert written and not list(tmp_path.iterdir())
  monkeypatch.undo()
  checkpoints.save(tmp_path / 'out', params, config)
  refused(lambda: checkpoints.save(tmp_path / 'out', params, config), 'there already', 'out')
  (tmp_path / 'file').write_text('')
  refused(lambda: checkpoints.save(tmp_path / 'file' / 'out', params, config), 'cannot be written')


def test_only_what_fits_is_saved(tmp_path):
  config, params = loaded('qwen3')
  save = functools.partial(checkpoints.save, tmp_path / 'out')
  refused(lambda: save(params | {'scale': jnp.ones(3)}, config), 'params[scale]', '(3,)', '(16,)')
  refused(lambda: save(params | {'more': jnp.ones(3)}, config), 'other names')
  refused(lambda: save(params, config, shard_bytes=0), 'shard_bytes=0')
  assert not list(tmp_path.iterdir())


# Damage at random: what loads is right, and all else is an InputError.


@functools.cache
def scratch(name):
  """A folder of this process's own to be damaged, and the bytes of its files."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='trm_jax_weights_')) / name
  shutil.copytree(GOLDEN / name, folder)
  return folder, {p.name: p.read_bytes() for p in folder.iterdir()}


def right_or_refused(name, file, content):
  folder, originals = scratch(name)
  try:
    (folder / file).write_bytes(content)
    _, params = checkpoints.load(folder)
  except types.InputError as error:
    assert str(folder) in str(error) and '\n' not in str(error)
  else:
    same(params, loaded(name)[1])
  finally:
    (folder / file).write_bytes(originals[file])


@hypothesis.given(st.integers(0, 30_000))
def test_any_truncation(length):
  whole = scratch('qwen3')[1][SINGLE]
  right_or_refused('qwen3', SINGLE, whole[:length])


@hypothesis.given(st.lists(st.integers(1, 255), min_size=1, max_size=3), st.data())
def test_any_change_of_the_header(flips, data):
  whole = bytearray(scratch('qwen3')[1][SINGLE])
  end = 8 + struct.unpack('<Q', whole[:8])[0]
  for mask in flips:
    whole[data.draw(st.integers(0, end - 1))] ^= mask
  right_or_refused('qwen3', SINGLE, bytes(whole))


ANY_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
  lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
  max_leaves=3,
)


@pytest.mark.slow
@hypothesis.given(st.data())
def test_any_change_of_the_index_or_the_configuration(data):
  file = data.draw(st.sampled_from([INDEX, 'config.json']))
  found = json.loads(scratch('qwen3_long')[1][file])
  part = found['weight_map'] if file == INDEX else found
  key = data.draw(st.sampled_from(sorted(part)))
  files = st.sampled_from(sorted(scratch('qwen3_long')[1]))
  part[key] = data.draw(ANY_JSON | files)
  folder, originals = scratch('qwen3_long')
  try:
    (folder / file).write_text(json.dumps(found))
    config, params = checkpoints.load(folder)
  except types.InputError as error:
    assert str(folder) in str(error)
  else:  # a setting that changes no shape: the weights are those of the file
    assert config.width == 16
    same(params, loaded('qwen3_long')[1])
  finally:
    (folder / file).write_bytes(originals[file])


def test_configurations_come_back(tmp_path):
  for name in MODELS:
    config = loaded(name)[0]
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(config_json.describe(config, 40)))
    assert config_json.read(path) == (config, 40)
