"""The tokenizer of a published checkpoint: text to token ids and back, and the ids that end a text.

    words = tokenizer.load('Qwen3-0.6B')         # the folder that trm_jax.checkpoints reads
    ids = words.encode('1 + 1 =')
    words.decode(ids)

Read are tokenizer.json and, where they are there, generation_config.json, tokenizer_config.json and
config.json, in this order of trust. Nothing is unpickled, executed or fetched. Needs the extra
`weights`.
"""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from trm_jax.checkpoints import config_json
from trm_jax.types import InputError

FILE = 'tokenizer.json'


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text to ids and back.

  Attributes:
    folder: where it was read.
    vocab_size: V of the model, which may have more ids than the tokenizer has tokens.
    eos: id that ends a response; of several, the first that generation_config.json names.
    pad: id that fills slots nobody reads; eos where none is named.
    bos: id that the checkpoint puts before a text, or None. `encode` adds nothing on its own.
  """

  folder: pathlib.Path
  vocab_size: int
  eos: int
  pad: int
  bos: int | None
  backend: Any = dataclasses.field(repr=False, compare=False)

  def encode(self, text: str) -> list[int]:
    """Ids of a text; special tokens that are spelled out in it become their ids."""
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable) -> str:
    """Text of ids, special tokens spelled out. Raises InputError for an id that has no token."""
    ids = [int(i) for i in ids]
    for i in ids:
      if i < 0 or self.backend.id_to_token(i) is None:
        raise InputError(f'id {i} has no token in {self.folder / FILE}, so no text; leave it out.')
    return self.backend.decode(ids, skip_special_tokens=False)

  @functools.cached_property
  def vocabulary(self) -> tuple[str, ...]:
    """The stored spelling of each of the V ids; '<i>' where the model has more ids than tokens."""
    token = self.backend.id_to_token
    return tuple(f'<{i}>' if token(i) is None else token(i) for i in range(self.vocab_size))


def load(folder: str | os.PathLike) -> Tokenizer:
  """The tokenizer in a checkpoint's folder.

  Raises InputError, naming file and remedy, for a file that is missing or damaged, where nothing
  names an id that ends a response, and for ids outside the vocabulary.
  """
  folder = pathlib.Path(folder).absolute()
  try:
    library = importlib.import_module('tokenizers')
  except ImportError as error:
    raise InputError(
      "Tokenizers need the package tokenizers: install it with pip install '.[weights]'."
    ) from error
  described = config_json.read_json(folder / FILE)
  try:
    backend = library.Tokenizer.from_str(json.dumps(described))
  except BaseException as error:  # the library panics on some inputs, past Exception
    if isinstance(error, KeyboardInterrupt | SystemExit):
      raise
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    raise InputError(
      f'{folder / FILE} describes no tokenizer ({reason}); fetch the file again.'
    ) from error
  # Texts are encoded as they are: whole, and to no fixed length.
  backend.no_truncation()
  backend.no_padding()
  names = 'generation_config.json', 'tokenizer_config.json', 'config.json'
  settings = {n: config_json.read_json(folder / n) for n in names if (folder / n).exists()}
  size = _size(folder, settings.get('config.json', {}), backend)
  of = functools.partial(_special, folder, settings, backend, size)
  eos = of('eos')
  if eos is None:
    raise InputError(
      f'{folder} names no id that ends a response; add eos_token_id to generation_config.json.'
    )
  pad = of('pad')
  return Tokenizer(folder, size, eos, eos if pad is None else pad, of('bos'), backend)


def _size(folder, config, backend):
  """V: what config.json says, at least what the tokenizer needs."""
  tokens = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
  size = config.get('vocab_size', tokens)
  if isinstance(size, bool) or not isinstance(size, int) or size < max(tokens, 1):
    raise InputError(
      f'{folder / "config.json"} has vocab_size={json.dumps(size):.80}, but {FILE} has {tokens}'
      ' ids; take both from one checkpoint.'
    )
  return size


def _special(folder, settings, backend, size, name):
  """The id of a special token from the first file that names it; None where none does."""
  for file, content in settings.items():
    for key in (f'{name}_token_id', f'{name}_token'):
      value = content.get(key)
      if key.endswith('_id') and isinstance(value, list) and value:
        value = value[0]
      if isinstance(value, dict):
        value = value.get('content')
      if value is None:
        continue
      known = backend.token_to_id(value) if isinstance(value, str) else value
      if isinstance(known, bool) or not isinstance(known, int) or not 0 <= known < size:
        raise InputError(
          f'{folder / file} has {key}={json.dumps(content[key]):.80}, which is no id or token of'
          f' {FILE}; fetch both again.'
        )
      return known
  return None
