"""Published checkpoints: Qwen3 weights in safetensors files, read into this policy and written.

    config, params = weights.load('Qwen3-0.6B')         # a folder; under a mesh, into its layout
    weights.save('out', params, config, context=40_960)

A checkpoint is a folder with config.json and either model.safetensors or several files and
model.safetensors.index.json. Files are memory-mapped, and each device's part of each tensor is
read by itself, so no process ever holds the whole model. Nothing is unpickled, executed or fetched.
Needs the extra `weights`.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from trm_jax import policy
from trm_jax.checkpoints import config_json, tensor_files
from trm_jax.types import InputError

_TIED = 'lm_head.weight'
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


class _Place(NamedTuple):
  """Where a parameter lies in a checkpoint: a name for each layer (and expert), [out, in] there."""

  name: str
  transposed: bool = False

  def names(self, lead):
    """Every tensor of a parameter with leading axes `lead`, with its index there."""
    for index in np.ndindex(*lead):
      yield index, self.name.format(*index)


_ATTENTION = 'model.layers.{}.self_attn.'
_MLP = 'model.layers.{}.mlp.'
_EXPERT = 'model.layers.{}.mlp.experts.{}.'


def _places(config: policy.PolicyConfig) -> dict[tuple[str, ...], _Place]:
  """Path of a parameter -> its place, in the order in which a checkpoint lists them."""
  places = {('embed',): _Place('model.embed_tokens.weight')}
  for name in 'qkvo':
    places['layers', 'attention', name, 'kernel'] = _Place(f'{_ATTENTION}{name}_proj.weight', True)
  for name in 'qk':
    places['layers', 'attention', f'{name}_scale'] = _Place(f'{_ATTENTION}{name}_norm.weight')
  for name in ('gate', 'up', 'down'):
    if config.experts:
      places['layers', 'mlp', name] = _Place(f'{_EXPERT}{name}_proj.weight', True)
    else:
      places['layers', 'mlp', name, 'kernel'] = _Place(f'{_MLP}{name}_proj.weight', True)
  if config.experts:
    places['layers', 'mlp', 'router', 'kernel'] = _Place(f'{_MLP}gate.weight', True)
  places['layers', 'attention_scale'] = _Place('model.layers.{}.input_layernorm.weight')
  places['layers', 'mlp_scale'] = _Place('model.layers.{}.post_attention_layernorm.weight')
  places['scale',] = _Place('model.norm.weight')
  if not config.tied_head:
    places['head',] = _Place(_TIED)
  return places


def _lead(place, shape):
  """Leading axes of a parameter that count tensors: layers, experts."""
  return shape[: place.name.count('{}')]


def _at(tree, path):
  for name in path:
    tree = tree[name]
  return tree


def load(
  folder: str | os.PathLike, *, follow_links: bool = False
) -> tuple[policy.PolicyConfig, policy.Params]:
  """(architecture, float32 parameters) of a checkpoint, laid out over the current mesh.

  Stored are float32, bfloat16 or float16; every float32 parameter is exactly the stored number. A
  tied head that is stored as well must equal the embedding. `follow_links` allows files that are
  links out of the folder. Raises InputError, naming file, tensor, value and remedy, for missing,
  unexpected or misshapen tensors, numbers that are not finite, other dtypes, damaged files and
  architectures that this policy does not have.
  """
  folder = pathlib.Path(folder).absolute()
  config, vocab_size = config_json.read(folder / 'config.json')
  places = _places(config)
  with tensor_files.open_folder(folder, follow_links=follow_links) as files:
    shapes = _shapes(folder, config, vocab_size)
    _check(files, config, places, shapes)
    params: dict[str, Any] = {}
    for path, place in places.items():
      *above, last = path
      node = params
      for name in above:
        node = node.setdefault(name, {})
      node[last] = _array(files, place, _at(shapes, path))
  return config, params


def _shapes(folder, config, vocab_size):
  try:
    return policy.shapes(config, vocab_size)
  except (ValueError, OverflowError) as error:
    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    raise InputError(
      f'{folder} cannot be laid out over the mesh {mesh}: {str(error).splitlines()[0][:200]};'
      ' choose a mesh whose axes divide its widths.'
    ) from error


def _check(files, config, places, shapes):
  expected = set()
  for path, place in places.items():
    shape = _at(shapes, path).shape
    lead = _lead(place, shape)
    rest = shape[len(lead) :]
    for _, name in place.names(lead):  # stops at the first that is missing: `lead` may be absurd
      files.check(name, rest[::-1] if place.transposed else rest)
      expected.add(name)
  extra = set(files.tensors) - expected
  if config.tied_head and _TIED in extra:
    embed = places['embed',].name
    files.check(_TIED, files.tensors[embed].get_shape())
    rows, width = files.tensors[embed].get_shape()
    step = max(2**22 // width, 1)
    for start in range(0, rows, step):
      part = slice(start, min(start + step, rows)), slice(None)
      if not np.array_equal(files.read(_TIED, part), files.read(embed, part)):
        raise InputError(
          f'{files.file_of[_TIED]} holds an lm_head.weight other than the embedding, but'
          ' config.json has tie_word_embeddings=true; set it to false there.'
        )
    extra.remove(_TIED)
  if extra:
    name = min(extra)
    raise InputError(
      f'{files.file_of[name]} holds {name}, of which config.json knows nothing; fetch the'
      ' checkpoint again or remove the tensor.'
    )


def _array(files, place, like):
  """One parameter; every device reads its own part."""
  lead = _lead(place, like.shape)

  def part(index):
    ranges = [range(*s.indices(n)) for s, n in zip(index, like.shape, strict=True)]
    rest = tuple(slice(r.start, r.stop) for r in ranges[len(lead) :])
    out = np.empty([len(r) for r in ranges], np.float32)
    for at in np.ndindex(*out.shape[: len(lead)]):
      name = place.name.format(*(r[i] for r, i in zip(ranges, at, strict=False)))
      stored = files.read(name, rest[::-1] if place.transposed else rest)
      if not np.isfinite(stored).all():
        raise InputError(
          f'{files.file_of[name]} holds NaN or an infinity in {name}; fetch the checkpoint again,'
          ' or take one from before its training diverged.'
        )
      out[at] = stored.T if place.transposed else stored
    return out

  sharding = like.sharding
  if sharding is None or isinstance(sharding.mesh, jax.sharding.AbstractMesh):
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
      sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
      spec = jax.P() if sharding is None else sharding.spec
      sharding = jax.NamedSharding(mesh, spec)
  return jax.make_array_from_callback(like.shape, sharding, part)


def save(
  folder: str | os.PathLike,
  params: policy.Params,
  config: policy.PolicyConfig,
  *,
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  shard_bytes: int = 5 * 10**9,
  context: int | None = None,
) -> None:
  """Writes a checkpoint that `load` and transformers read: config.json and safetensors files.

  `folder` must be absent or empty; it appears at once when everything is on disk, or not at all.
  Files hold tensors of at most `shard_bytes` bytes together; one file is in memory at a time.
  `context` is the number of positions that config.json promises; by default 40,960, under yarn
  factor times the trained ones. Raises InputError before writing for parameters that do not fit
  `config`, OSError for a full disk.
  """
  folder = pathlib.Path(folder).absolute()
  if dtype not in ('float32', 'bfloat16'):
    raise InputError(f'dtype={dtype!r} is not float32 or bfloat16.')
  if shard_bytes < 1 or (context is not None and context < 1):
    raise InputError(f'shard_bytes={shard_bytes} and context={context} must be at least 1.')
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise InputError(f'folder={folder} is there already; choose one that is absent or empty.')
  write = tensor_files.library('safetensors.numpy').save_file
  shards = _shards(_tensors(params, config), 4 if dtype == 'float32' else 2, shard_bytes)
  description = config_json.describe(config, params['embed'].shape[0], dtype=dtype, context=context)
  # Outside the mesh: parts of single devices are cut up, which its context forbids.
  with _appearing(folder) as directory, jax.set_mesh(_NO_MESH):
    names = [tensor_files.SINGLE]
    if len(shards) > 1:
      names = [f'model-{i:05}-of-{len(shards):05}.safetensors' for i in range(1, len(shards) + 1)]
      total = sum(math.prod(t.shape) for shard in shards for t in shard)
      index = {
        'metadata': {'total_size': total * (4 if dtype == 'float32' else 2)},
        'weight_map': {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard},
      }
      (directory / tensor_files.INDEX).write_text(json.dumps(index, indent=2) + '\n')
    for name, shard in zip(names, shards, strict=True):
      # The header's `format` is what transformers asks for.
      write({t.name: t.read(dtype) for t in shard}, directory / name, {'format': 'pt'})
    (directory / 'config.json').write_text(json.dumps(description, indent=2) + '\n')


class _Tensor(NamedTuple):
  """A tensor to be written: entry `index` of a parameter."""

  name: str
  shape: tuple[int, ...]
  leaf: Any
  index: tuple[int, ...]
  transposed: bool

  def read(self, dtype):
    entry = _entry(self.leaf, self.index)
    return np.ascontiguousarray((entry.T if self.transposed else entry).astype(dtype))


def _entry(leaf, index):
  """leaf[index] on the host, from the devices' parts, whatever the layout."""
  if not isinstance(leaf, jax.Array):
    return np.asarray(leaf)[index]
  out = np.empty(leaf.shape[len(index) :], leaf.dtype)
  for shard in leaf.addressable_shards:
    ranges = [range(*s.indices(n)) for s, n in zip(shard.index, leaf.shape, strict=True)]
    if shard.replica_id == 0 and all(i in r for i, r in zip(index, ranges, strict=False)):
      local = tuple(r.index(i) for i, r in zip(index, ranges, strict=False))
      out[shard.index[len(index) :]] = np.asarray(shard.data[local])
  return out


def _tensors(params, config):
  """All tensors of a checkpoint in its order. Raises InputError where a parameter does not fit."""
  if not isinstance(params, dict) or not hasattr(params.get('embed'), 'shape'):
    raise InputError("params has no array 'embed'; pass the params of policy.init or weights.load.")
  shapes = policy.shapes(config, params['embed'].shape[0])
  if jax.tree.structure(params) != jax.tree.structure(shapes):
    raise InputError(
      'params has other names than this config makes; pass the config of policy.init or'
      ' weights.load.'
    )
  tensors = []
  for path, place in _places(config).items():
    leaf, want = _at(params, path), _at(shapes, path).shape
    if leaf.shape != want:
      raise InputError(
        f'params[{"/".join(path)}] has shape {leaf.shape}, but this config makes it {want}; pass'
        ' the config of policy.init or weights.load.'
      )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      raise InputError(
        f'params[{"/".join(path)}] lies on several hosts; save from a single-host mesh.'
      )
    lead = _lead(place, want)
    shape = want[len(lead) :]
    shape = shape[::-1] if place.transposed else shape
    for index, name in place.names(lead):
      tensors.append(_Tensor(name, shape, leaf, index, place.transposed))
  return tensors


def _shards(tensors, item, limit):
  """Consecutive tensors of at most `limit` bytes together."""
  shards, room = [], 0
  for tensor in tensors:
    size = math.prod(tensor.shape) * item
    if size > room:
      shards.append([])
      room = limit
    shards[-1].append(tensor)
    room -= size
  return shards


@contextlib.contextmanager
def _appearing(folder):
  """A new folder beside `folder` that takes its place on success and vanishes otherwise."""
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f'.{folder.name}-', dir=folder.parent))
  except OSError as error:
    raise InputError(
      f'folder={folder} cannot be written ({error.strerror or error}); choose another.'
    ) from error
  try:
    yield directory
    directory.chmod(0o755)
    for path in directory.iterdir():
      path.chmod(0o644)
      _sync(path)
    _sync(directory)
    os.replace(directory, folder)
    _sync(folder.parent)
  finally:
    shutil.rmtree(directory, ignore_errors=True)


def _sync(path):
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
