"""Several processes on this machine, connected as the hosts of a pod are.

    python -m experiments.launch.local -n 4 -- python -m experiments.train_policy --mesh 4,1 ...

Shows the output of process 0, and the end of another's where that one fails. SIGTERM and SIGINT are
passed on. Exit code: that of the first process that fails, after which the others are ended, or 0.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time

GRACE = 10.0  # seconds in which processes may end by themselves after one has failed
TAIL = 2000  # bytes of a failed process's output


def variables(count: int, index: int, port: int) -> dict[str, str]:
  """The environment variables that tell process `index` of `count` how to find the others."""
  return {
    'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
    'JAX_NUM_PROCESSES': str(count),
    'JAX_PROCESS_ID': str(index),
    'PYTHONUNBUFFERED': '1',
  }


def free_port() -> int:
  """A TCP port that was free a moment ago."""
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    return found.getsockname()[1]


def launch(command: list[str], count: int, *, grace: float = GRACE) -> int:
  """Runs `count` processes of `command` to their end; returns the exit code."""
  port, received = free_port(), []
  logs = [None, *(tempfile.TemporaryFile() for _ in range(count - 1))]
  started: list[subprocess.Popen] = []
  before = {
    number: signal.signal(number, lambda n, _: received.append(n))
    for number in (signal.SIGTERM, signal.SIGINT)
  }
  try:
    for index, log in enumerate(logs):
      environment = os.environ | variables(count, index, port)
      started.append(
        subprocess.Popen(command, env=environment, stdout=log, stderr=log and subprocess.STDOUT)
      )
    code = _wait(started, received, grace)
    for index, process in enumerate(started):
      if process.returncode and logs[index]:
        _show(index, process.returncode, logs[index])
    return code
  finally:
    for process in started:
      process.kill()
      process.wait()
    for number, handler in before.items():
      signal.signal(number, handler)


def _wait(started: list[subprocess.Popen], received: list[int], grace: float) -> int:
  """The exit code of the first process that fails, else 0; passes signals on meanwhile."""
  code, deadline = 0, None
  while None in [process.poll() for process in started]:
    while received:
      number = received.pop(0)
      for process in started:
        process.send_signal(number)  # does nothing where the process has ended
    failed = [process.returncode for process in started if process.returncode]
    if failed and deadline is None:
      code, deadline = failed[0], time.monotonic() + grace
    if deadline is not None and time.monotonic() > deadline:
      break
    time.sleep(0.05)
  code = code or next((process.returncode for process in started if process.returncode), 0)
  return 128 - code if code < 0 else code


def _show(index: int, code: int, log) -> None:
  log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
  text = log.read().decode(errors='replace').strip()
  print(f'--- process {index} ended with {code}:\n{text}', file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
  """The command line."""
  head = __doc__.partition('\n')[0]
  parser = argparse.ArgumentParser(prog='python -m experiments.launch.local', description=head)
  parser.add_argument('-n', type=int, required=True, help='number of processes')
  parser.add_argument('--dry-run', action='store_true', help='print the commands only')
  parser.add_argument('command', nargs='+', help='after --: the command of each process')
  args = parser.parse_args(arguments)
  if args.n < 1:
    parser.error(f'-n {args.n} must be at least 1')
  if args.dry_run:
    port = free_port()
    for index in range(args.n):
      settings = ' '.join(f'{k}={v}' for k, v in variables(args.n, index, port).items())
      print(settings, shlex.join(args.command))
    return 0
  try:
    return launch(args.command, args.n)
  except OSError as error:
    print(f'error: {args.command[0]} cannot be started ({error.strerror})', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
