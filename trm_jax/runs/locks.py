"""One process at a time: a file that names who holds a directory, and dies with its holder."""

import contextlib
import fcntl
import logging
import os
import pathlib
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from trm_jax import types

logger = logging.getLogger(__name__)


def hold(path: pathlib.Path, *, wait: bool = False) -> contextlib.ExitStack:
  """Holds the file for this process until closed or dead; InputError that says who holds it.

  Process 0 asks, and asks again with `wait`; all hear the answer. A second run of the same process
  is let in: it knows.
  """
  stack, held, me = contextlib.ExitStack(), '', f'pid {os.getpid()} on {socket.gethostname()}'
  if jax.process_index() == 0:
    try:
      while held := _taken(path, stack, me):
        if not wait or held == me:
          break
        time.sleep(0.2)
    except OSError:  # a file system without locks
      logger.warning('%s cannot be locked: see to it that no other process writes there', path)
  if multihost_utils.broadcast_one_to_all(np.int32(held not in ('', me))):
    stack.close()
    raise types.InputError(
      f'directory={path.parent} is in use ({held or "see its file lock"}); wait until that process'
      ' ends, stop it, or choose another directory.'
    )
  return stack


def _taken(path: pathlib.Path, stack: contextlib.ExitStack, me: str) -> str:
  """'' where the file is now locked for `stack`, else who holds it."""
  with contextlib.ExitStack() as mine:
    file = mine.enter_context(open(path, 'a+'))
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      return file.read().strip() or 'another process'
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
      return 'a process that ends'  # it has deleted this file since it was opened
    file.truncate(0)
    file.write(f'{me}\n')
    file.flush()
    mine.callback(path.unlink, missing_ok=True)
    stack.push(mine.pop_all())
  return ''
