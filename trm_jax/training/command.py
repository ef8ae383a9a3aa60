"""What every experiment's command line shares: parsing, clear errors, exit codes."""

import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import process
from typing import Any

import jax
import tyro

from trm_jax.runs import processes
from trm_jax.training import loop
from trm_jax.types import DamagedError, InputError, NonFiniteError

# The file in a directory that names the experiment whose results it holds.
OWNER = 'experiment.txt'


def run(command: type, main: Callable[[Any], None]) -> None:
  """Parses `command` from the command line and runs `main` on it.

  Exit codes: 0 done (or stopped and saved by SIGTERM), 1 the run failed, 2 bad input, 130 Ctrl-C.
  Bad input and failures are one sentence on stderr, never a traceback.
  """
  try:
    main(tyro.cli(command))
  except InputError as error:
    processes.fail(_say(error), 2)
  except (NonFiniteError, DamagedError, OSError, process.BrokenProcessPool) as error:
    processes.fail(_say(error), 1)
  except loop.Interrupted as stop:  # on all processes at the same step
    print(stop, file=sys.stderr)
    sys.exit(0 if stop.number == 15 else 130)
  except KeyboardInterrupt:
    print('Stopped; --resume continues from the last checkpoints.', file=sys.stderr)
    sys.exit(130)
  except Exception as error:
    if not processes.joined():
      raise
    processes.lost(error)


def _say(error: Exception) -> str:
  print(f'error: {error}', file=sys.stderr)
  return str(error)


def check_directory(args) -> None:
  """Takes args.directory for this experiment, before any compute.

  Refuses one that cannot be written, that holds something and is not to be resumed (args.resume),
  and another experiment's.
  """
  directory, name = args.directory, type(args).__name__
  owner = directory / OWNER
  try:
    directory.mkdir(parents=True, exist_ok=True)
    entries = sorted(n for n in os.listdir(directory) if not n.endswith('.tmp') and n != OWNER)
    tempfile.TemporaryFile(dir=directory, suffix='.tmp').close()
    held = owner.read_text().strip() if owner.exists() else name
  except OSError as error:
    raise InputError(
      f'directory={directory} cannot be written ({error.strerror}); choose another.'
    ) from error
  if entries and not args.resume:
    raise InputError(
      f'directory={directory} already holds {entries[0]!r}; choose another directory, or pass'
      ' --resume if it is a run of this command that you want to continue.'
    )
  if held != name:
    raise InputError(
      f'directory={directory} belongs to the experiment {held!r} and would be overwritten by'
      f' {name}; choose another.'
    )
  if processes.joined():  # alone, jax stays untouched: devices may yet have to be simulated
    processes.sync('looked')  # nobody writes before everybody has looked
  if not processes.joined() or jax.process_index() == 0:
    written = owner.with_name(f'.{OWNER}.{os.getpid()}.tmp')
    try:
      written.write_text(f'{name}\n')
      os.replace(written, owner)  # whole or not there, whatever happens
    finally:
      written.unlink(missing_ok=True)


def cache(directory: pathlib.Path) -> None:
  """Keeps compiled programs in a folder, on this and later starts; before anything is compiled."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory, suffix='.tmp').close()
  except OSError as error:
    raise InputError(
      f'compilation_cache={directory} cannot be written ({error.strerror}); choose another folder.'
    ) from error
  jax.config.update('jax_compilation_cache_dir', str(directory.absolute()))
