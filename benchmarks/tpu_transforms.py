"""Compiles every public transform, and whole train and decode steps, for TPUs, without one.

  python -m benchmarks.tpu_transforms [--topologies v5e:4x4 v5p:2x2x2 v6e:4x4] [--only TEXT]
                                      [--save FILE] [--markdown]

Needs the extra `tpu` (pip install -e '.[tpu]'). Nothing runs: the figures are the compiler's, of
one device, and none is a measured time. What does not compile is named, and the exit code is 1.

  arguments    MiB of inputs
  results      MiB of outputs
  temporaries  MiB of HBM beyond them
  bytes        MiB to and from memory as XLA counts them: the body of a loop once, fast memory too,
               and of a kernel what it declares
  kernels      Pallas kernels in the program
  collectives  how many of each kind run in a call, loops counted
  scores       arrays [positions, vocabulary] in HBM, where there must be none
"""

import collections
import dataclasses
import importlib.metadata
import pathlib
import sys
from typing import Any

import jax

from benchmarks import measure, transforms
from benchmarks.cases import VOCAB, Case
from trm_jax.planning import chips, compiled
from trm_jax.runs import progress
from trm_jax.training import command
from trm_jax.types import InputError

# (data, model) of each.
MESHES = {'v5e:4x4': (4, 4), 'v5p:2x2x2': (2, 4), 'v6e:4x4': (8, 2), 'cpu:8': (4, 2)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What is compiled, and for what."""

  topologies: tuple[str, ...] = ('v5e:4x4', 'v5p:2x2x2', 'v6e:4x4')
  only: str = ''
  """Only cases whose name holds this text."""
  save: pathlib.Path | None = None
  """JSON file for every figure."""
  markdown: bool = False
  """Print a table for a README."""


def report(case: Case, mesh: tuple[int, int]) -> dict[str, Any]:
  """Figures of one case, compiled for the current mesh of (data, model) devices."""
  jitted = jax.jit(case.run, donate_argnums=case.donated)
  built = jitted.lower(*case.arguments).compile()
  memory, text = built.memory_analysis(), built.as_text()
  program = compiled.Program(text, mesh)
  vocabulary = {VOCAB, VOCAB // mesh[1]}
  wide = lambda shapes: sorted(compiled.with_axes(shapes, set(case.positions), vocabulary))
  moved, kinds = [], collections.Counter()
  for step in program.collectives():
    kinds[f'{step.kind} over {step.over}'] += step.times
    moved += [shape for _, shape in step.shapes]
  mib = lambda n: n / measure.MIB
  return {
    'arguments': mib(memory.argument_size_in_bytes),
    'results': mib(memory.output_size_in_bytes - memory.alias_size_in_bytes),
    'temporaries': mib(memory.temp_size_in_bytes),
    'bytes': mib(built.cost_analysis().get('bytes accessed', 0)),
    'kernels': text.count('custom_call_target="tpu_custom_call"'),
    'collectives': dict(sorted(kinds.items())),
    'scores': wide(program.in_memory()),
    'scores moved': wide(moved),
    # Parameters of all layers in one collective.
    'stacks moved': sorted({s for s in moved if s[0:1] == (case.layers,) and len(s) > 2}),
  }


def compile_all(topology: str, only: str = '') -> list[dict[str, Any]]:
  """Figures of all cases for one topology; of one that fails, its `error`."""
  sizes = MESHES[topology]
  found = []
  with jax.set_mesh(chips.mesh(topology, *sizes)):
    some = [case for case in transforms.cases() if only in case.name]
    shown = progress.Progress(len(some), topology, stream=sys.stderr)
    for i, case in enumerate(some):
      try:
        figures = report(case, sizes)
      except Exception as error:  # whatever a compiler refuses with
        figures = {'error': f'{type(error).__name__}: {error}'}
      found.append({'topology': topology, 'mesh': list(sizes), 'case': case.name, **figures})
      shown.update(i + 1, case=case.name)
    shown.close()
  return found


def rows(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]], list[str]]:
  """(titles, cells, names of the small ones): topologies side by side, a row for each case.

  Small are cases with less than 1 MiB of traffic everywhere, no kernel and no collective.
  """
  by_case = collections.defaultdict(dict)
  for record in records:
    by_case[record['case']][record['topology']] = record
  names = list(dict.fromkeys(record['topology'] for record in records))
  size = lambda x: f'{x:.1f}' if x < 10 else f'{x:.0f}'
  cells, small = [], []
  for case, found in by_case.items():
    good = [x for x in found.values() if 'error' not in x]
    busy = lambda x: x['bytes'] >= 1 or x['kernels'] or x['collectives']
    if len(good) == len(names) and not any(map(busy, good)):
      small.append(case)
      continue
    of = lambda what, found=found: [
      size(found[n][what]) if what in found.get(n, {}) else 'no' for n in names
    ]
    kernels = '/'.join(dict.fromkeys(str(x['kernels']) for x in good))
    kinds = good[-1]['collectives'] if good else {}
    moves = ', '.join(f'{count} {kind}' for kind, count in kinds.items())
    cells.append([case, *of('temporaries'), *of('bytes'), kernels or '-', moves or '-'])
  columns = [f'{what} {name}' for what in ('temporaries', 'bytes') for name in names]
  return ['MiB of a device', *columns, 'kernels', f'collectives {names[-1]}'], cells, small


def text(records: list[dict[str, Any]], *, markdown: bool) -> str:
  """The table, and the names of what is too small for it."""
  head, cells, small = rows(records)
  parts = [measure.table(head, cells, markdown=markdown)] if cells else []
  if small:
    quote = '`{}`' if markdown else '{}'
    listed = ', '.join(quote.format(name) for name in small)
    parts.append(f'Less than 1 MiB of bytes each, no kernel, no collective: {listed}.')
  return '\n\n'.join(parts)


def main(options: Command) -> None:
  for name in options.topologies:
    if name not in MESHES:
      raise InputError(f'topologies={name!r} is not one of {", ".join(MESHES)}.')
  measure.check_save(options.save)
  try:
    library = importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    library = None
  records = []
  for topology in options.topologies:
    versions = {'jax': jax.__version__, 'libtpu': library}
    records += [{**versions, **found} for found in compile_all(topology, options.only)]
    measure.save(options.save, records)
  if not records:
    raise InputError(f'only={options.only!r} is part of no name of a case.')
  print(text(records, markdown=options.markdown))
  failed = [x for x in records if 'error' in x]
  for x in failed:
    print(f'{x["topology"]} {x["case"]}: {x["error"][:2000]}', file=sys.stderr)
  if failed:
    raise SystemExit(f'error: {len(failed)} of {len(records)} programs do not compile.')


if __name__ == '__main__':
  command.run(Command, main)
