"""What a run was made by: versions, device and commit, and how two configurations differ."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import pathlib
import platform
import subprocess

import jax

import trm_jax
from trm_jax import types

logger = logging.getLogger(__name__)
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_SHOWN = 8  # differences that an error lists


def everything() -> dict:
  """{'commit', 'dirty', 'versions', 'device'} of this process, as plain JSON values."""
  return program() | {'device': _device()}


def program() -> dict:
  """{'commit', 'dirty', 'versions'}: what can be known before any device is touched."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  versions |= {'python': platform.python_version(), 'trm_jax': trm_jax.__version__}
  return commit() | {'versions': versions}


def source() -> str:
  """SHA-256 of the Python files of this package: of two checkouts that are dirty, too."""
  digest = hashlib.sha256()
  root = pathlib.Path(trm_jax.__file__).resolve().parent
  for path in sorted(root.rglob('*.py')):
    digest.update(f'{path.relative_to(root)} '.encode() + path.read_bytes())
  return digest.hexdigest()[:16]


def commit() -> dict:
  """The git commit of the checkout this file is in; null where it is in none."""
  root = pathlib.Path(trm_jax.__file__).resolve().parents[1]
  describe = ['git', '-C', root, 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    if (root / '.git').exists():  # not just below another repository
      text = subprocess.check_output(describe, stderr=subprocess.DEVNULL, text=True, timeout=20)
      return {'commit': text.strip().removesuffix('-dirty'), 'dirty': '-dirty' in text}
  return {'commit': None, 'dirty': False}


def compare(path: pathlib.Path, config: dict) -> None:
  """Raises InputError unless the config.json at `path` holds `config`.

  Another version, device or mesh is only a warning: the run can go on, but not bit for bit.
  """
  try:
    saved = json.loads(path.read_text())
    differing = differences(saved['config'], config)
    versions = differences({'versions': saved['versions']}, {'versions': program()['versions']})
    device = differences({'device': saved['device']}, {'device': _device()})
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise types.InputError(f'{path} is damaged ({error}); choose another directory.') from error
  if differing:
    raise types.InputError(
      f'{path} has another config: {differing}; pass the same or choose another directory.'
    )
  if versions:
    logger.warning('the resumed run is not promised to be bit-exact: %s', versions)
  if device:
    logger.warning(
      'the resumed run is equal up to the order of sums, not promised to be bit-exact: %s', device
    )


def compare_identity(path: pathlib.Path, identity: dict) -> None:
  """Raises InputError unless the identity.json at `path` holds `identity`: {part: digests}."""
  try:
    saved = json.loads(path.read_text())
    differing = differences(saved, identity)
  except (ValueError, TypeError, AttributeError) as error:
    raise types.InputError(f'{path} is damaged ({error}); choose another directory.') from error
  if differing:
    raise types.InputError(
      f'{path.parent} was made with other content (digest of {differing}); put that back as it was'
      ' or choose another directory.'
    )


def _device() -> dict:
  device = {'platform': jax.devices()[0].platform, 'kind': jax.devices()[0].device_kind}
  mesh = jax.sharding.get_abstract_mesh()
  shape = ','.join(str(mesh.shape[name]) for name in mesh.axis_names)
  return device | {
    'count': jax.device_count(),
    'processes': jax.process_count(),
    'mesh': shape or None,
  }


def differences(then: dict, now: dict, words: str = 'was {} and is {}') -> str:
  """'a.b was 1 and is 2, ...' for the entries of two nested dicts that are not the same in both;
  of many the first few, and how many more."""
  then, now = _flat(then), _flat(now)
  lines = [
    f'{key} ' + words.format(repr(then.get(key, 'absent')), repr(now.get(key, 'absent')))
    for key in sorted(then.keys() | now.keys())
    if then.get(key, then) != now.get(key, now)
  ]
  more = [f'and {len(lines) - _SHOWN} more'] if len(lines) > _SHOWN else []
  return ', '.join(lines[:_SHOWN] + more)


def _flat(tree: dict, prefix: str = '') -> dict:
  """{'a.b': value} of nested dicts; an empty dict is a value."""
  flat = {}
  for key, value in tree.items():
    nested = isinstance(value, dict) and value
    flat |= _flat(value, f'{prefix}{key}.') if nested else {f'{prefix}{key}': value}
  return flat
