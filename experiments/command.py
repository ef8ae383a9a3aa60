"""What every experiment's command line shares: parsing, clear errors, exit codes."""

import os
import pathlib
import sys
from collections.abc import Callable
from concurrent.futures import process
from typing import Any

import tyro

from trm_jax import loop
from trm_jax.types import DamagedError, InputError, NonFiniteError


def run(command: type, main: Callable[[Any], None]) -> None:
  """Parses `command` from the command line and runs `main` on it.

  Exit codes: 0 done (or stopped and saved by SIGTERM), 1 the run failed, 2 bad input, 130 Ctrl-C.
  Bad input and failures are one sentence on stderr, never a traceback.
  """
  try:
    main(tyro.cli(command))
  except InputError as error:
    sys.exit(_say(error, 2))
  except (NonFiniteError, DamagedError, OSError, process.BrokenProcessPool) as error:
    sys.exit(_say(error, 1))
  except loop.Interrupted as stop:
    sys.exit(_say(stop, 0 if stop.number == 15 else 130))
  except KeyboardInterrupt:
    sys.exit(_say('Stopped; --resume continues from the last checkpoints.', 130))


def _say(message: object, code: int) -> int:
  print(message if code in (0, 130) else f'error: {message}', file=sys.stderr)
  return code


def check_directory(directory: pathlib.Path, *, resume: bool) -> None:
  """Refuses a directory that would be overwritten or cannot be written, before any compute."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
    found = sorted(os.listdir(directory))
    probe = directory / '.writable'
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise InputError(
      f'directory={directory} cannot be written ({error.strerror}); choose another.'
    ) from error
  if found and not resume:
    raise InputError(
      f'directory={directory} already holds {found[0]!r}; pass --resume to continue it or choose'
      ' another directory.'
    )
