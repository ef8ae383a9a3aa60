"""What a compiled program does, read from its text: collectives and memory traffic, loops counted.

The compiler's own totals (`cost_analysis`) count the body of a loop once. Here every instruction
is counted as often as the loops around it turn, as the compiler notes it in `known_trip_count`.

  collectives   bytes on the wire of a device, of the algorithm that needs the fewest:
                all-gather and reduce-scatter (g-1)/g of the whole, all-reduce twice that,
                all-to-all (g-1)/g, collective-permute all, in groups of g devices
  traffic       operands and results of every instruction outside fusions, once each; of an array
                that is only sliced or updated in place, the slice. An estimate, not a count
"""

import collections
import dataclasses
import functools
import math
import re
from typing import NamedTuple

import numpy as np

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')
# Bits of a dtype are the number in its name; these have none.
_BYTES = {'pred': 1, 'token': 0, 'opaque': 0}
_FREE = (
  'parameter constant tuple get-tuple-element bitcast iota after-all partition-id replica-id'
).split()
_INNER = ('while', 'call', 'conditional', 'async-start')
_LINE = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$')
_ARRAY = re.compile(r'\b(pred|token|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program."""

  name: str
  kind: str
  result: str
  operands: tuple[str, ...]
  text: str
  root: bool


class Collective(NamedTuple):
  """A collective of a program.

  Attributes:
    kind: as in `KINDS`.
    over: the mesh axes it runs over: data, model or both; ? where the text does not say.
    shapes: of its results on a device.
    group: devices that take part.
    times: how often a call of the program runs it.
    wire: bytes a device sends for one.
  """

  kind: str
  over: str
  shapes: tuple[tuple[str, tuple[int, ...]], ...]
  group: int
  times: int
  wire: int | float


def arrays(text: str) -> list[tuple[str, tuple[int, ...], str]]:
  """(dtype, shape, layout) of the arrays named in a type."""
  return [
    (dtype, tuple(int(n) for n in sizes.split(',') if n), layout)
    for dtype, sizes, layout in _ARRAY.findall(text)
  ]


def size(dtype: str, shape: tuple[int, ...]) -> int | float:
  """Bytes of an array."""
  if dtype in _BYTES:
    return _BYTES[dtype] * math.prod(shape)
  bits = int(re.search(r'\d+', dtype)[0])
  return math.prod(shape) * bits / 8


class Program:
  """The computations of a compiled program's text, for a mesh of (data, model) devices."""

  def __init__(self, text: str, mesh: tuple[int, int]):
    self.mesh = mesh
    self.computations: dict[str, list[Instruction]] = {}
    self.entry = ''
    for line in text.splitlines():
      opened = re.match(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$', line.strip())
      if opened and not line.startswith('  '):
        current = self.computations.setdefault(opened[2], [])
        self.entry = opened[2] if opened[1] else self.entry
      elif match := _LINE.match(line):
        current.append(_instruction(*match.groups()))

  @functools.cached_property
  def times(self) -> dict[str, int]:
    """How often each computation runs; those inside fusions are left out."""
    counts = collections.Counter()

    def visit(name, times):
      counts[name] += times
      for step in self.computations[name]:
        if step.kind in _INNER:
          turns = trips(step, self.computations) if step.kind == 'while' else 1
          for inner in _called(step):
            visit(inner, times * turns)

    visit(self.entry, 1)
    return dict(counts)

  def collectives(self) -> list[Collective]:
    """Every collective, those inside fusions as well."""
    by_kind, cut = collections.defaultdict(list), set()
    for name, times in self.times.items():
      for step in self.computations[name]:
        inside, scattered, piece = [step], False, False
        if step.kind == 'fusion':
          inside = [x for c in _called(step) for x in self.computations[c]]
          piece = any(c.startswith('async_collective') for c in _called(step))
          # A sum of which each device keeps its part.
          scattered = not piece and any(x.kind == 'dynamic-slice' for x in inside)
        for x in inside:
          kind = x.kind.removesuffix('-start')
          if kind in KINDS:
            channel = re.search(r'channel_id=(\d+)', x.text)
            channel = channel[1] if channel else x.name
            by_kind[channel].append(self._collective(x, kind, times, scattered))
            cut |= {channel} if piece else set()
    # Start, pieces beside other work, and end of one collective: it runs as often as the one of
    # them that runs least.
    once = lambda some: [min(some, key=lambda c: c.times)]
    return [c for k, some in by_kind.items() for c in (once(some) if k in cut else some)]

  def _collective(self, step, kind, times, scattered):
    shapes = [(dtype, shape) for dtype, shape, _ in arrays(step.result)]
    if step.kind.endswith('-start') and kind != 'all-reduce':
      # Operands and results stand side by side, of a permute with two counters more.
      half = len(shapes) // 2 if kind == 'all-gather' else 1
      shapes = shapes[half : 2 * half]
    group, over = self._group(step.text)
    total = sum(size(*x) for x in shapes)
    part = (group - 1) / group if group else 1
    wire = {
      'all-gather': total * part,
      'reduce-scatter': total * (group - 1),
      'all-reduce': total * part * (1 if scattered else 2),
      'all-to-all': total * part,
      'collective-permute': total,
    }[kind]
    if scattered and kind == 'all-reduce':
      kind = 'reduce-scatter'
    return Collective(kind, over, tuple(shapes), group, times, wire)

  def _group(self, text) -> tuple[int, str]:
    """(devices of a group, mesh axes)."""
    members = first_group(text)
    if members is None:
      members = np.arange(math.prod(self.mesh))
    data, model = np.unravel_index(members, self.mesh)
    varying = [n for n, x in (('data', data), ('model', model)) if len(set(x.tolist())) > 1]
    return len(members), ', '.join(varying) or '-'

  def in_memory(self) -> set[tuple[int, ...]]:
    """Shapes of all results outside fusions that the compiler does not keep in fast memory."""
    return {
      shape
      for name in self.times
      for step in self.computations[name]
      for _, shape, layout in arrays(step.result)
      if 'S(1)' not in layout
    }

  def cycles(self) -> int | float:
    """The compiler's `estimated_cycles` of all instructions, loops counted; 0 where it gives none.

    Kernels have none, and collectives run beside other work.
    """
    pattern = re.compile(r'"estimated_cycles":"(\d+)"')
    return sum(
      times * sum(int(n) for x in self.computations[name] for n in pattern.findall(x.text))
      for name, times in self.times.items()
    )

  def traffic(self) -> int | float:
    """Bytes to and from main memory of one call, by device; see the head of this file."""
    total = 0.0
    for name, times in self.times.items():
      steps = {x.name: x for x in self.computations[name]}
      total += times * sum(self._moved(x, steps) for x in steps.values())
    return total

  def _moved(self, step, steps) -> int | float:
    if step.kind in _FREE or step.kind in _INNER or step.kind.endswith('-done'):
      return 0.0
    memory = lambda text: sum(size(d, s) for d, s, layout in arrays(text) if 'S(1)' not in layout)
    read = [memory(steps[x].result) if x in steps else 0.0 for x in step.operands]
    if step.kind in ('dynamic-slice', 'gather'):
      return 2 * memory(step.result)
    if step.kind == 'dynamic-update-slice':
      return 2 * read[1]
    written = memory(step.result)
    if step.kind == 'fusion':
      body = {x.name: x for x in self.computations[_called(step)[0]]}
      for x in body.values():
        if x.kind == 'parameter':
          number = int(x.text.split(')')[0])
          if number < len(read):
            read[number] = min(read[number], self._touched(x.name, body))
      written = self._written(step, body)
    if step.kind.endswith('-start'):
      written = 0.0
    return sum(read) + written

  def _touched(self, name, body) -> int | float:
    """Bytes of an operand that the instructions of a fusion look at."""
    total = 0.0
    for user in body.values():
      if name not in user.operands:
        continue
      first = user.operands[0] == name
      if user.kind in ('dynamic-slice', 'gather', 'slice') and first:
        total += _bytes(user.result)
      elif user.kind == 'dynamic-update-slice' and first:
        total += 0.0
      elif user.kind == 'bitcast':
        total += self._touched(user.name, body)
      elif user.kind == 'fusion':
        inner = {x.name: x for x in self.computations[_called(user)[0]]}
        number = f'{user.operands.index(name)})'
        same = [x for x in inner.values() if x.kind == 'parameter' and x.text.startswith(number)]
        total += self._touched(same[0].name, inner) if same else math.inf
      else:
        return math.inf
    return total

  def _written(self, step, body) -> int | float:
    """Bytes of results; of an array that is updated in place, the update."""
    root = next((x for x in body.values() if x.root), None)
    parts = arrays(step.result)
    sources = root.operands if root is not None and root.kind == 'tuple' else [root and root.name]
    total = 0.0
    for place, (dtype, shape, layout) in enumerate(parts):
      source = body.get(sources[place]) if place < len(sources) else None
      while source is not None and source.kind == 'bitcast':
        source = body.get(source.operands[0])
      if 'S(1)' in layout or (source is not None and source.kind == 'parameter'):
        continue
      if source is not None and source.kind == 'dynamic-update-slice':
        total += _bytes(body[source.operands[1]].result)
      else:
        total += size(dtype, shape)
    return total


def _bytes(text) -> int | float:
  return sum(size(dtype, shape) for dtype, shape, _ in arrays(text))


def first_group(text: str) -> np.ndarray | None:
  """Devices of the first group that an instruction works in; None where it names none."""
  if match := re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', text):
    return np.array([int(match[1]), int(match[2])])
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', text):
    return np.array([int(n) for n in match[1].split(',')])
  if match := re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', text):
    return _devices(match[2]).reshape(_numbers(match[1]))[0]
  named = r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^=]*)\))? *\{([^}]*)\}'
  if match := re.search(named, text):
    axes = [(name, int(n)) for name, n in re.findall(r"'([^']+)'=(\d+)", match[1])]
    sizes = [n for _, n in axes]
    devices = _devices(match[2] or f'[{math.prod(sizes)}]').reshape(sizes)
    chosen = {n: (p, q) for n, p, q in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[3])}
    index = []
    for name, n in axes:
      if name not in chosen:
        index.append([0])
      elif chosen[name][1]:  # a part of the axis: of (before, part, rest)
        part, rest = int(chosen[name][1]), n // int(chosen[name][0]) // int(chosen[name][1])
        index.append([i * rest for i in range(part)])
      else:
        index.append(range(n))
    return devices[np.ix_(*index)].reshape(-1)
  return None


def _devices(text: str) -> np.ndarray:
  """Device numbers as in '[4,2]T(1,0)': counted in the first shape, axes then permuted."""
  shape, _, order = text.partition('T')
  shape = _numbers(shape)
  devices = np.arange(math.prod(shape)).reshape(shape)
  return devices.transpose(_numbers(order)) if order else devices


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]


def _instruction(root, name, result, kind, rest) -> Instruction:
  depth, end = 1, len(rest)
  for i, letter in enumerate(rest):
    depth += {'(': 1, ')': -1}.get(letter, 0)
    if not depth:
      end = i
      break
  return Instruction(
    name, kind, result, tuple(re.findall(r'%([\w.\-]+)', rest[:end])), rest, bool(root)
  )


def _called(step) -> list[str]:
  """Names of the computations that an instruction runs."""
  if step.kind == 'while':
    return re.findall(r'body=%?([\w.\-]+)', step.text)
  if step.kind == 'conditional':
    many = re.findall(r'branch_computations=\{([^}]*)\}', step.text)
    names = re.findall(r'%?([\w.\-]+)', many[0]) if many else []
    return names + re.findall(r'(?:true|false)_computation=%?([\w.\-]+)', step.text)
  return re.findall(r'(?:calls|to_apply)=%?([\w.\-]+)', step.text)


def trips(step: Instruction, computations: dict[str, list[Instruction]]) -> int:
  """Turns of a loop: as noted by the compiler, or the bound in its condition; 1 if unknown."""
  if match := re.search(r'known_trip_count\D*(\d+)', step.text):
    return int(match[1])
  (condition,) = re.findall(r'condition=%?([\w.\-]+)', step.text)
  bounds = [
    int(re.match(r'-?\d+', x.text)[0])
    for x in computations[condition]
    if x.kind == 'constant' and re.match(r'-?\d+\)', x.text)
  ]
  return max(bounds) if len(bounds) == 1 else 1


def with_axes(shapes, tokens: set[int], vocabulary: set[int]) -> list[tuple[int, ...]]:
  """Those shapes that have both a token axis and a vocabulary axis, by the sizes of the two."""
  return [s for s in shapes if tokens & set(s) and vocabulary & set(s)]
