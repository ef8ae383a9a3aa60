"""The tensors of a checkpoint's folder, memory-mapped, whether it holds one file or several.

A folder comes from elsewhere, so nothing in it is trusted: headers are checked by the safetensors
library, and an index can only name files that lie in the folder itself.
"""

import contextlib
import importlib
import json
import pathlib
import re

from trm_jax.checkpoints import config_json
from trm_jax.types import InputError

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_DTYPES = ('F32', 'BF16', 'F16')


def library(name: str):
  """The module `name` of the package safetensors. Raises InputError where it is not installed."""
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise InputError(
      "Checkpoints need the package safetensors: install it with pip install '.[weights]'."
    ) from error


class Files(contextlib.ExitStack):
  """The tensors of a folder, by name, from memory-mapped files."""

  def __init__(self, folder, follow_links):
    super().__init__()
    self._safetensors = library('safetensors')
    self.folder, self.tensors, self.file_of = folder, {}, {}
    self._home = None if follow_links else folder.resolve()

  def open(self, file):
    """The file, open. Raises InputError where it lies elsewhere or is damaged."""
    path = self.folder / file
    if not path.is_file():
      raise InputError(f'{path} is not there; fetch the checkpoint again.')
    if self._home is not None and path.resolve().parent != self._home:
      raise InputError(
        f'{path} is a link out of its folder; copy the folder with cp -rL, or pass'
        ' follow_links=True to weights.load where the links are a download cache of your own.'
      )
    try:
      return self.enter_context(self._safetensors.safe_open(path, framework='numpy'))
    except (self._safetensors.SafetensorError, OSError, ValueError) as error:
      reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
      raise InputError(f'{path} is damaged ({reason}); fetch the file again.') from error

  def add(self, file, listed=None):
    """Takes in the tensors of a file: those `listed`, and no others."""
    handle = self.open(file)
    for name in handle.keys():
      if listed is not None and name not in listed:
        raise InputError(
          f'{self.folder / file} holds {name}, which {INDEX} does not list there; fetch both again.'
        )
      self.tensors[name], self.file_of[name] = handle.get_slice(name), self.folder / file
    for name in listed or ():
      if self.file_of.get(name) != self.folder / file:
        raise InputError(
          f'{self.folder / file} does not hold {name}, though {INDEX} lists it; fetch both again.'
        )

  def read(self, name, index):
    """A part of a tensor: a copy of `index`, which holds one slice an axis."""
    return self.tensors[name][index]

  def check(self, name, shape):
    """Raises InputError unless the tensor is there, of this shape and of a float dtype."""
    if name not in self.tensors:
      raise InputError(
        f'{self.folder} has no tensor {name}, which its config.json calls for; fetch the checkpoint'
        ' again.'
      )
    stored, dtype = self.tensors[name].get_shape(), self.tensors[name].get_dtype()
    if tuple(stored) != tuple(shape):
      raise InputError(
        f'{self.file_of[name]} holds {name} of shape {list(stored)}, but config.json makes it'
        f' {list(shape)}; fetch both again.'
      )
    if dtype not in _DTYPES:
      raise InputError(
        f'{self.file_of[name]} holds {name} as {dtype}; convert it to one of {", ".join(_DTYPES)}.'
      )


def open_folder(folder: pathlib.Path, *, follow_links: bool = False) -> Files:
  """The folder's tensors; a context manager. Raises InputError for damage and for links outside."""
  files = Files(folder, follow_links)
  with contextlib.ExitStack() as undo:
    undo.push(files)
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
      files.add(SINGLE)
    else:
      for file, names in _index(folder / INDEX).items():
        files.add(file, names)
    undo.pop_all()
  return files


def _index(path):
  """File -> names of its tensors, from an index. Raises InputError for files outside the folder."""
  listed = config_json.read_json(path).get('weight_map')
  if not isinstance(listed, dict) or not listed:
    raise InputError(f'{path} has no weight_map; fetch the file again.')
  files = {}
  for name, file in listed.items():
    if not isinstance(file, str) or not re.fullmatch(r'[\w][\w.\-]*\.safetensors', file, re.ASCII):
      raise InputError(
        f'{path} says that {name} is in {json.dumps(file):.200}, which is no .safetensors file of'
        ' its own folder; fetch the file again.'
      )
    files.setdefault(file, set()).add(name)
  return files
