"""What the benchmarks share: interleaved rounds, paired ratios, peak memory, tables.

Absolute times of a shared machine move by a factor of two, so only ratios taken in one run count:
every form runs once a round, a ratio is taken in each round, and its median is shown with its
quartiles: 'x1.93 (1.90-1.98)'. Compilation and the first call are left out. Slow forms on which no
goal depends run every fifth round.

  temp      XLA's own peak of temporary buffers, without inputs and outputs
  resident  what one call adds to the resident memory of a fresh process that holds the inputs,
            has compiled and has made a tiny computation; Linux only
"""

import concurrent.futures
import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from trm_jax.runs import progress
from trm_jax.types import InputError

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What is measured. Sizes are written NxV: positions x vocabulary."""

  sizes: tuple[str, ...] = ('2048x32768', '1024x152064')
  dtypes: tuple[Literal['float32', 'bfloat16'], ...] = ('float32', 'bfloat16')
  rounds: int = 15
  resident: bool = True
  """Also measure resident memory, in one child process a form, at the last size."""
  save: pathlib.Path | None = None
  """JSON file for every figure, each round's times included."""
  markdown: bool = False
  """Print tables for a README."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One size and dtype; picklable, since a child process builds its inputs from it."""

  positions: int
  vocabulary: int
  dtype: str = 'float32'

  def __str__(self):
    return f'N={self.positions} V={self.vocabulary} {self.dtype}'


class Ready(NamedTuple):
  """A compiled form. `call` waits for its result; `temporaries` in bytes, None if unknown."""

  call: Callable[[], Any]
  temporaries: int | None = None


class Form(NamedTuple):
  """One way to compute it: prepare(inputs) -> Ready; None where its package is not installed.

  It runs in every `every`-th round: 5 spares time where a form is slow and no goal depends on it.
  """

  name: str
  prepare: Callable[[Any], Ready] | None
  every: int = 1


class Ratio(NamedTuple):
  """Quartiles of the ratios of all rounds."""

  low: float
  median: float
  high: float

  def __str__(self):
    return f'x{self.median:.2f} ({self.low:.2f}-{self.high:.2f})'


class Goal(NamedTuple):
  """Met if value <= limit; None where it was not measured. `percent` is how both are shown."""

  text: str
  value: float | None
  limit: float
  percent: bool = False

  @property
  def met(self) -> bool | None:
    return None if self.value is None else self.value <= self.limit

  def __str__(self):
    if self.value is None:
      return f'-    {self.text}: not measured'
    show = (lambda x: f'{100 * x:.2g} %') if self.percent else (lambda x: f'{x:.3g}')
    met = 'yes' if self.met else 'NO '
    return f'{met}  {self.text}: {show(self.value)}, at most {show(self.limit)}'


def check_save(path: pathlib.Path | None) -> None:
  """Raises InputError for a file that could not be saved at the end."""
  if path is not None and not path.absolute().parent.is_dir():
    raise InputError(f'save={path} lies in no folder that exists; make it first.')


def cases(command: Command, of: Callable[..., Case] = Case) -> list[Case]:
  """All combinations, smallest size first as given. Raises InputError before any compute."""
  if command.rounds < 1:
    raise InputError(f'rounds={command.rounds} must be at least 1; 15 or more give stable medians.')
  check_save(command.save)
  found = []
  for size in command.sizes:
    if not (match := re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', size)):
      raise InputError(f'sizes={size} must read NxV, positions x vocabulary, as in 2048x32768.')
    n, v = map(int, match.groups())
    found += [of(positions=n, vocabulary=v, dtype=dtype) for dtype in command.dtypes]
  return found


def compiled(function: Callable) -> Callable[[Any], Ready]:
  """`prepare` of a JAX function of the inputs, which are arrays or trees of arrays."""

  def prepare(inputs):
    program = jax.jit(function).lower(*inputs).compile()
    bytes_ = program.memory_analysis().temp_size_in_bytes
    return Ready(lambda: jax.block_until_ready(program(*inputs)), bytes_)

  return prepare


def peer(name: str, package: str, prepare: Callable[[Any], Ready], every: int = 1) -> Form:
  """A form that needs a package which may be missing; `prepare` imports it."""
  return Form(name, prepare if importlib.util.find_spec(package) else None, every)


def threads() -> int:
  """Cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """Figures of one case by form: seconds of each round (NaN where it did not run), bytes."""

  case: Case
  seconds: dict[str, np.ndarray]
  temporaries: dict[str, int | None]
  resident: dict[str, int | None]

  def ratio(self, name: str, base: str) -> Ratio | None:
    """Time of `name` over that of `base` in the same round; None where no round has both."""
    if name not in self.seconds or base not in self.seconds:
      return None
    ratios = self.seconds[name] / self.seconds[base]
    ratios = ratios[~np.isnan(ratios)]
    return Ratio(*np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()) if ratios.size else None

  def share(self, name: str, base: str) -> float | None:
    """Temporaries of `name` over those of `base`."""
    a, b = self.temporaries.get(name), self.temporaries.get(base)
    return None if a is None or not b else a / b

  def time_goal(self, text: str, name: str, base: str, limit: float) -> Goal:
    """`name` takes at most `limit` times as long as `base`."""
    ratio = self.ratio(name, base)
    return Goal(f'{text}, time', ratio and ratio.median, limit)


def interleave(
  calls: dict[str, tuple[Callable[[], Any], int]],
  rounds: int,
  tick: Callable[[str], None] = lambda name: None,
) -> dict[str, np.ndarray]:
  """Seconds of each call in each round, NaN where it did not run.

  `calls` are (call, every), warmed up by the caller; a call runs in rounds 0, every, 2 * every ...
  The order rotates, so that no form always runs after the same other.
  """
  names = list(calls)
  seconds = {name: np.full(rounds, np.nan) for name in names}
  for r in range(rounds):
    shift = r % len(names)
    for name in names[shift:] + names[:shift]:
      call, every = calls[name]
      if r % every:
        continue
      start = time.perf_counter()
      out = call()
      seconds[name][r] = time.perf_counter() - start
      del out
      tick(name)
  return seconds


def high_water(inputs: Callable, forms: Callable, case: Case, name: str) -> int | None:
  """Bytes that one call adds to the resident memory of a fresh process; None where unknown.

  `inputs` and `forms` are functions of a module, which the child imports.
  """
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
    return pool.submit(_rise, inputs, forms, case, name).result()


def _rise(inputs, forms, case, name):
  (prepare,) = (form.prepare for form in forms(case) if form.name == name)
  call = prepare(inputs(case)).call
  jax.block_until_ready(jax.numpy.ones(1 << 16) + 1)  # starts the threads
  before = _reset()
  if before is None:
    return None
  call()
  return max(_status('VmHWM') - before, 0)


def _reset() -> int | None:
  """Resets this process's high-water mark; its resident bytes now.

  ru_maxrss would not do: a child inherits that of the process that started it.
  """
  try:
    pathlib.Path('/proc/self/clear_refs').write_text('5')
    return _status('VmRSS')
  except OSError:
    return None


def _status(field: str) -> int:
  text = pathlib.Path('/proc/self/status').read_text()
  return 1024 * int(re.search(rf'{field}:\s*(\d+) kB', text)[1])


def nothing(case: Case, inputs: Any) -> Callable[[Any], None]:
  """The judge of benchmarks whose results are compared by tests alone."""
  del case, inputs
  return lambda output: None


def run(
  command: Command,
  inputs: Callable[[Case], Any],
  forms: Callable[[Case], list[Form]],
  in_child: tuple[str, ...],
  judge: Callable[[Case, Any], Callable[[Any], Any]] = nothing,
  of: Callable[..., Case] = Case,
) -> Iterator[tuple[Measured, dict[str, Any]]]:
  """Measures one case after the other, with progress on stderr.

  judge(case, inputs) is called with the first result of every form; what it says comes with the
  figures. Resident memory is measured for the forms `in_child`, at the last size.
  """
  todo = cases(command, of)
  for i, case in enumerate(todo):
    present = [form for form in forms(case) if form.prepare is not None]
    largest = command.resident and i >= len(todo) - len(command.dtypes)
    children = [form.name for form in present if form.name in in_child and largest]
    total = len(children) + sum(1 + -(-command.rounds // form.every) for form in present)
    shown = progress.Progress(total, f'{i + 1}/{len(todo)} {case}', stream=sys.stderr)
    steps = itertools.count(1)
    tick = lambda name, shown=shown, steps=steps: shown.update(next(steps), form=name)
    # Children first, while this process has not filled the memory itself.
    resident = {}
    for name in children:
      resident[name] = high_water(inputs, forms, case, name)
      tick(name)
    arguments, ready, said = inputs(case), {}, {}
    say = judge(case, arguments)
    for form in present:
      ready[form.name] = form.prepare(arguments)
      said[form.name] = say(ready[form.name].call())
      tick(form.name)
    calls = {form.name: (ready[form.name].call, form.every) for form in present}
    seconds = interleave(calls, command.rounds, tick)
    shown.close()
    temporaries = {name: form.temporaries for name, form in ready.items()}
    yield Measured(case=case, seconds=seconds, temporaries=temporaries, resident=resident), said


def row(measured: Measured, name: str, bases: tuple[str, ...], naive: str) -> list[str]:
  """Cells: name, median ms, ratio to each base, temp MiB, temp and resident against naive's."""
  if name not in measured.seconds:
    return [name, 'not installed'] + [''] * (len(bases) + 3)
  temporaries, resident = measured.temporaries[name], measured.resident.get(name)
  share = measured.share(name, naive)
  return [
    name,
    f'{1e3 * np.nanmedian(measured.seconds[name]):.0f}',
    *(str(measured.ratio(name, base) or '') for base in bases),
    '' if temporaries is None else f'{temporaries / MIB:.1f}',
    '' if share is None else f'{100 * share:.2f} %',
    '' if resident is None else f'{resident / MIB:.0f}',
  ]


def header(bases: tuple[str, ...], naive: str) -> list[str]:
  """Titles of `row`."""
  ratios = [f'/ {base}' for base in bases]
  return ['form', 'ms', *ratios, 'temp MiB', f'of {naive}', 'resident MiB']


def table(head: list[str], rows: list[list[str]], *, markdown: bool) -> str:
  """Aligned columns, or a markdown table; the first column is text, the others right-aligned."""
  widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
  pad = lambda cells: [
    cell.rjust(width) if i else cell.ljust(width)
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
  ]
  if not markdown:
    return '\n'.join('  '.join(pad(cells)).rstrip() for cells in (head, *rows))
  rule = ['-' * width if i == 0 else '-' * (width - 1) + ':' for i, width in enumerate(widths)]
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in (pad(head), rule, *map(pad, rows)))


def title(measured: Measured, *, markdown: bool) -> str:
  """The case and where it ran."""
  rounds = len(next(iter(measured.seconds.values())))
  where = f'{jax.default_backend()}, {threads()} threads, jax {jax.__version__}'
  return f'{"### " if markdown else ""}{measured.case}: {rounds} rounds, {where}'


def show(measured: Measured, rows: list[list[str]], head: list[str], goals: list[Goal], markdown):
  """Prints one case."""
  print(title(measured, markdown=markdown), end='\n\n' if markdown else '\n')
  print(table(head, rows, markdown=markdown), end='\n\n')
  print('\n'.join(f'    {goal}' if markdown else str(goal) for goal in goals), flush=True)
  print()


def record(measured: Measured, goals: list[Goal], **more) -> dict[str, Any]:
  """Everything as JSON-able values."""
  return {
    **dataclasses.asdict(measured.case),
    'jax': jax.__version__,
    'backend': jax.default_backend(),
    'threads': threads(),
    'seconds': {k: s[~np.isnan(s)].tolist() for k, s in measured.seconds.items()},
    'temporaries': measured.temporaries,
    'resident': measured.resident,
    'goals': [{**goal._asdict(), 'met': goal.met} for goal in goals],
    **more,
  }


def save(path: pathlib.Path | None, records: list[dict[str, Any]]) -> None:
  """Replaces a JSON file as a whole; does nothing for None."""
  if path is None:
    return
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'w') as file:
      json.dump(records, file, indent=1)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
