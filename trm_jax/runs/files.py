"""Files of a run: replaced whole or not at all, strict JSON, and rows of metrics read back.

NaN is null and infinities are the strings 'inf' and '-inf'; `read_metrics` turns them back.
"""

import contextlib
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from trm_jax import types

# What stands in a row for a number that JSON has not.
_SPECIAL = {None: math.nan, 'inf': math.inf, '-inf': -math.inf}


def read_metrics(path: str | os.PathLike) -> list[dict]:
  """The rows of a metrics.jsonl, without a half-written last one; InputError if it is damaged."""
  rows = [row for _, row in parse(pathlib.Path(path))]
  if rows and rows[-1] is None:
    rows.pop()
  if None in rows:
    raise types.InputError(f'{path}: line {rows.index(None) + 1} is broken; remove that line.')
  return [{name: _SPECIAL.get(value, value) for name, value in row.items()} for row in rows]


def strict(value: Any) -> Any:
  """`value` as strict JSON can hold it; NaN is null, infinities are 'inf' and '-inf'."""
  if isinstance(value, Mapping):
    return {str(key): strict(entry) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [strict(entry) for entry in value]
  if hasattr(value, 'tolist'):
    return strict(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None if math.isnan(value) else str(value)
  return os.fspath(value) if isinstance(value, os.PathLike) else value


def plain(value: Any, name: str) -> Any:
  """`value` as it comes back from JSON; InputError, which calls it `name`, where it cannot."""
  try:
    return json.loads(json.dumps(strict(value), allow_nan=False))
  except TypeError as error:
    raise types.InputError(
      f'{name} cannot be written as JSON ({error}); use str keys, lists, numbers and texts.'
    ) from error


def parse(path: pathlib.Path) -> list[tuple[bytes, dict | None]]:
  """(line, row) of a metrics.jsonl; the row is None where the line is not whole or has no step."""
  parsed = []
  for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
    row = None
    with contextlib.suppress(ValueError, RecursionError):
      row = json.loads(line) if line.endswith(b'}\n') else None
    values = row.values() if row is not None else ()
    sound = all(type(v) in (int, float, bool) or v in tuple(_SPECIAL) for v in values)
    if row is not None and (type(row.get('step')) is not int or not sound):
      row = None  # a damaged name or number
    parsed.append((line, row))
  return parsed


def cut_back(path: pathlib.Path, step: int | float) -> None:
  """Keeps the lines of metrics.jsonl up to `step`, without a half-written last one.

  InputError for a broken line before the last: what is lost is not passed over.
  """
  parsed = parse(path)
  half = bool(parsed) and parsed[-1][1] is None
  parsed = parsed[: len(parsed) - half]
  broken = [i for i, (_, row) in enumerate(parsed, 1) if row is None]
  if broken:
    raise types.InputError(f'{path}: line {broken[0]} is broken; mend or remove that line.')
  lines = [line for line, row in parsed if row['step'] <= step]
  if half or len(lines) < len(parsed):
    write(path, b''.join(lines))


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
  """Replaces a file atomically, on process 0 only."""
  if jax.process_index() == 0:
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    with clear_errors(path), contextlib.ExitStack() as stack:
      stack.callback(temporary.unlink, missing_ok=True)
      with open(temporary, 'wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
  return path


@contextlib.contextmanager
def clear_errors(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Turns what the file system refuses into an OSError that names the file, in one sentence."""
  try:
    yield path
  except Exception as error:
    # tensorstore raises ValueErrors that quote the error number of the system call
    quoted = re.search(r"os_error_code='(\d+)'", str(error))
    if not (quoted or isinstance(error, OSError)):
      raise
    code = int(quoted[1]) if quoted else error.errno
    reason = os.strerror(code) if code else str(error)
    message = f'cannot write {path} ({reason}); what was written before is intact'
    raise OSError(code, message) from error
