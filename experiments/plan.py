"""What a train step and a decode step of a published model need on a TPU pod, without one.

    python -m experiments.plan --model qwen3-8b --topology v5e:16x16 --mesh 32,8 --seq 8192
    python -m experiments.plan --topology cpu:8 --mesh 4,2 --layers 2 --rows 2 ...    # no libtpu
    python -m experiments.plan --table --seq 4096 --samples 4 --save benchmarks/plan.json

Compiles the step itself (`trm_jax/planning/abstract_step.py`) for the named topology from shapes
alone; needs the extra `tpu` (pip install -e '.[tpu]'), else only `--topology cpu:N`. Where every
figure comes from is printed beside it:

  compiler   memory, and what does not fit: the compiler's own report or error
  text       collectives and traffic: the compiled program's text, loops counted as often as they
             turn (`trm_jax/planning/compiled.py`); traffic is an estimate
  cycles     the compiler's estimate of every instruction, loops counted, over the chip's clock;
             without kernels, collectives hidden behind other work
  jaxpr      operations of matrix products, loops counted (`trm_jax/planning/products.py`)
  once       the compiler's own totals, which count the body of a loop once: too small
  published  bandwidths and peak of a chip (`trm_jax/planning/chips.py`)

The bound is the largest of products / peak, traffic / HBM bandwidth and wire bytes / all links of a
chip: what a perfect overlap would reach. Nothing here is a measured time.
"""

import collections
import concurrent.futures
import dataclasses
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax

from experiments.reports import plan_report, report
from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.planning import abstract_step, chips, compiled, products
from trm_jax.policy import qwen3
from trm_jax.rollouts import stores
from trm_jax.training import command
from trm_jax.types import InputError

GIB = chips.GIB
# Both models have key/value heads for a MODEL of 4.
TABLE = {'v5p:2x2x2': '2,4', 'v5p:4x4x4': '16,4', 'v5p:4x8x8': '64,4'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What is planned; sizes are those of one optimizer step."""

  # A published model, e.g. qwen3-8b or qwen3-30b-a3b.
  model: str = 'qwen3-8b'
  # CHIP:SIZES, e.g. v5e:16x16, v5p:4x8x8, v6e:4x4; cpu:N for simulated devices.
  topology: str = 'v5e:16x16'
  # Devices as DATA,MODEL.
  mesh: str = '32,8'
  # Positions of a row, prompt + response - 1; split over MODEL between layers where it divides.
  seq: int = 8192
  # Positions of it that are prompt.
  prompt: int = 1024
  # Samples of a prompt: its rows stay on one device of DATA, in one micro-batch.
  samples: int = 8
  # Rows of one micro-batch on a device of DATA; None = how many fit, from two programs.
  rows: int | None = None
  # Also compile the most rows that the line through two programs promises.
  verify: bool = False
  # Micro-batches of a step.
  microbatches: int = 1
  # What the rollout keeps of each distribution; see trm_jax/rollouts/stores.py.
  store: stores.Store = 'topk'
  top: int = 64
  # Fewer layers than the model has, to try things out.
  layers: int | None = None
  # Also plan one token of decoding.
  decode: bool = True
  # Both models of the README on 8 to 256 chips instead.
  table: bool = False
  # JSON file for every figure.
  save: pathlib.Path | None = None


class TooLarge(NamedTuple):
  """A program that the compiler refused for want of memory; bytes of a device."""

  needed: float
  available: float
  why: str


def settings(options: Command) -> tuple[qwen3.Model, policy.PolicyConfig]:
  """(model, its policy as it is trained). Raises InputError for an unknown name or bad sizes."""
  models = {model.name.lower(): model for model in qwen3.MODELS}
  if options.model.lower() not in models:
    raise InputError(f'model={options.model!r} is not one of {", ".join(models)}.')
  for name in ('samples', 'microbatches', 'top', 'prompt', 'layers'):
    value = getattr(options, name)
    if value is not None and value < 1:
      raise InputError(f'{name}={value} must be at least 1.')
  if options.seq <= options.prompt:
    raise InputError(f'seq={options.seq} must be larger than prompt={options.prompt}.')
  if options.rows is not None and (options.rows < 1 or options.rows % options.samples):
    raise InputError(
      f'rows={options.rows} must be a multiple of samples={options.samples}: the rows of a prompt'
      ' stay on one device.'
    )
  model = models[options.model.lower()]
  data, parts = sharding.parse_mesh(options.mesh)
  found = model.policy
  found = dataclasses.replace(
    found,
    dtype='bfloat16',
    remat=True,
    layers=options.layers or found.layers,
    expert_compute='ragged' if found.experts else 'dense',
  )
  sizes = dict(vocabulary=model.vocab_size, kv_heads=found.kv_heads, mlp_width=found.mlp_width) | (
    {'experts': found.experts} if found.experts else {}
  )
  for name, size in sizes.items():
    if size % parts:
      raise InputError(
        f'mesh={options.mesh} cannot split the {name}={size} of {model.name} over {parts} devices;'
        ' choose a MODEL that divides it.'
      )
  if found.width % data:
    raise InputError(
      f'mesh={options.mesh} cannot split the width={found.width} of {model.name} over {data}'
      ' devices; choose a DATA that divides it.'
    )
  return model, found


def sizes_of(options: Command, vocab: int, rows: int) -> abstract_step.Sizes:
  """Sizes of a step with `rows` rows on a device of DATA in a micro-batch."""
  data, _ = sharding.parse_mesh(options.mesh)
  return abstract_step.Sizes(
    rows=rows * data * options.microbatches,
    samples=options.samples,
    sequence=options.seq,
    prompt=options.prompt,
    vocab=vocab,
    store=options.store,
    top=options.top,
    microbatches=options.microbatches,
  )


_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
_NUMBER = r'([\d.]+)([KMGT]?)'


def too_large(error: str, arguments: float) -> TooLarge | None:
  """What a compiler's error says about memory; None if it is about something else."""
  plain = re.search(rf'Used {_NUMBER}i?B? of {_NUMBER}i?B? hbm', error)
  temporaries = re.search(rf'temporaries \({_NUMBER}\) exceeds available HBM \({_NUMBER}\)', error)
  found = plain or temporaries
  if found is None:
    return None
  needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
  # The second form speaks of temporaries alone.
  return TooLarge(needed + (0 if plain else arguments), available, found[0])


def build(program: abstract_step.Program) -> Any:
  """The compiled program, or what the compiler says that it lacks."""
  arguments = sum(map(abstract_step.bytes_per_device, program.arguments))
  try:
    return program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    found = too_large(str(error), arguments)
    if found is None:
      raise
    return found


def used(found) -> float:
  """Bytes of a device's memory that a program needs at its peak, arguments and results included.

  The compiler's peak: arguments and temporaries can add up to more than a chip has in a program
  that it accepts.
  """
  return (
    found.needed if isinstance(found, TooLarge) else found.memory_analysis().peak_memory_in_bytes
  )


def side_by_side(fn, items):
  """fn of each item in turn, two at a time; `fn` compiles, which Python does not wait for."""
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    yield from pool.map(fn, items)


class Largest(NamedTuple):
  """The most groups of rows that were compiled and fit, with their program.

  `groups` 0: not even one fits, and `found` says why. `promised` groups fit on the line through
  two programs, None where the line says no more than was compiled.
  """

  groups: int
  found: Any
  promised: int | None = None


def largest(attempt, limit: float, verify: bool = False) -> Largest:
  """How many groups of rows fit; `attempt(groups)` compiles so many, two of them side by side.

  Memory is taken to be linear in the rows: two programs give the line. With `verify` what it
  promises is compiled too, and less where that does not fit.
  """
  one, two = side_by_side(attempt, (1, 2))
  if isinstance(one, TooLarge):
    return Largest(0, one)
  if isinstance(two, TooLarge):
    return Largest(1, one)
  slope = max(used(two) - used(one), 1.0)
  guess = int((limit - used(one)) / slope) + 1
  while verify and guess > 2:
    found = attempt(guess)
    if not isinstance(found, TooLarge):
      return Largest(guess, found)
    guess = min(guess - 1, max(int(guess * limit / found.needed), 2))
  return Largest(2, two, guess if guess > 2 else None)


def figures(found, program: abstract_step.Program, options: Command, tokens: int) -> dict:
  """Everything that is said about a compiled program; bytes, operations and seconds of a device."""
  chip, count = chips.parse(options.topology)
  mesh = sharding.parse_mesh(options.mesh)
  memory = found.memory_analysis()
  cost = found.cost_analysis() or {}
  text = compiled.Program(found.as_text(), mesh)
  work = products.count(program.jaxpr(), {sharding.DATA: mesh[0], sharding.MODEL: mesh[1]})
  grouped = collections.defaultdict(lambda: [0, 0.0])
  for step in text.collectives():
    entry = grouped[f'{step.kind} over {step.over}']
    entry[0] += step.times
    entry[1] += step.times * step.wire
  wire = sum(sent for _, sent in grouped.values())
  result = {
    'compiled_for': options.topology if chip != 'cpu' else 'CPU (simulated devices)',
    'arguments': memory.argument_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'results_beyond_arguments': memory.output_size_in_bytes - memory.alias_size_in_bytes,
    'used': used(found),
    'flops': work.flops,
    'flops_by_passes': work.passes,
    'traffic': text.traffic(),
    'cycles': text.cycles(),
    'wire': wire,
    'collectives': {k: {'count': n, 'bytes': b} for k, (n, b) in sorted(grouped.items())},
    'once': {k: cost.get(k) for k in ('flops', 'bytes accessed', 'optimal_seconds') if k in cost},
    'tokens': tokens,
    'wire_bytes_a_token': wire * count / tokens,
  }
  if chip in chips.CHIPS:
    about = chips.CHIPS[chip]
    bound = {
      'compute': work.passes / about.peak,
      'memory': result['traffic'] / about.bandwidth,
      'links': wire / about.links,
    }
    seconds = max(bound.values())
    if about.clock and result['cycles']:
      result['estimate'] = result['cycles'] / about.clock
    result |= {
      'available': about.memory,
      'bound': bound,
      'seconds': seconds,
      'tokens_a_second': tokens / seconds,
    }
  return result


def remedies(options: Command, model: qwen3.Model, refused: TooLarge, attempt) -> str:
  """What would fit: a shorter sequence, verified by one program where the line promises one."""
  data, parts = sharding.parse_mesh(options.mesh)
  always = (
    f'Otherwise: a MODEL above {parts}, more chips, a chip with more memory, fewer samples than'
    f' {options.samples} (a prompt\'s rows stay together), or store="logp".'
  )
  if refused.available <= 0:
    return always
  seq = options.seq
  while seq // 2 > 2 * options.prompt and refused.needed * seq / options.seq > refused.available:
    seq //= 2
  if seq == options.seq:
    return always
  short = dataclasses.replace(options, seq=seq)
  found = attempt(short)
  if isinstance(found, TooLarge):
    return f'--seq {seq} does not fit either ({found.needed / GIB:.2f} GiB). {always}'
  return f'--seq {seq} fits ({used(found) / GIB:.2f} GiB; compiled). {always}'


def plan(options: Command, say=lambda text: None) -> dict[str, Any]:
  """The plan as JSON-able values; `say` hears what is going on. Raises InputError."""
  model, configuration = settings(options)
  data, parts = sharding.parse_mesh(options.mesh)
  mesh = chips.mesh(options.topology, data, parts)
  chip, count = chips.parse(options.topology)
  start = time.perf_counter()

  def train(options, groups):
    rows = groups * options.samples
    say(f'compiling the train step: {rows} rows of {options.seq} a device of DATA ...')
    begun = time.perf_counter()
    with jax.set_mesh(mesh):  # of this thread
      found = build(abstract_step.train(configuration, sizes_of(options, model.vocab_size, rows)))
    verb = 'would need' if isinstance(found, TooLarge) else 'needs'
    say(
      f'  {rows} rows: {time.perf_counter() - begun:.0f} s, {verb} {used(found) / GIB:.2f} GiB'
      ' a device'
    )
    return found

  with jax.set_mesh(mesh):
    state = abstract_step.state_of(configuration, model.vocab_size)
    result = {
      'model': model.name,
      'topology': options.topology,
      'chips': count,
      'mesh': options.mesh,
      'seq': options.seq,
      'prompt': options.prompt,
      'samples': options.samples,
      'microbatches': options.microbatches,
      'store': options.store,
      'layers': configuration.layers,
      'jax': jax.__version__,
      'parameter_bytes': abstract_step.bytes_per_device(state.params),
      'optimizer_bytes': abstract_step.bytes_per_device(state.opt_state),
    }
    memory = chips.CHIPS[chip].memory if chip in chips.CHIPS else None
    if options.rows is not None or memory is None:
      groups = (options.rows or options.samples) // options.samples
      found = train(options, groups)
    else:
      groups, found, promised = largest(lambda n: train(options, n), memory, options.verify)
      if promised:
        result['promised_rows'] = promised * options.samples
    result['rows'] = max(groups, 1) * options.samples
    sizes = sizes_of(options, model.vocab_size, result['rows'])
    if isinstance(found, TooLarge):
      result['refused'] = found._asdict()
      result['remedy'] = remedies(options, model, found, lambda o: train(o, max(groups, 1)))
    else:
      program = abstract_step.train(configuration, sizes)
      tokens = sizes.rows * (options.seq - options.prompt + 1)
      result['train'] = figures(found, program, options, tokens)
    if options.decode:
      one = dataclasses.replace(options, microbatches=1)
      sizes = sizes_of(one, model.vocab_size, result['rows'])
      program = abstract_step.decode(configuration, sizes)
      say(f'compiling the decode step: {sizes.rows} rows, {sizes.sequence} cached slots ...')
      found = build(program)
      if isinstance(found, TooLarge):
        result['decode_refused'] = found._asdict()
      else:
        result['decode'] = figures(found, program, options, sizes.rows)
    result['seconds_to_plan'] = time.perf_counter() - start
  return result


def main(options: Command) -> None:
  """Plans, prints, saves."""
  if options.save is not None and not options.save.parent.is_dir():
    raise InputError(f'save={options.save} lies in no folder that exists; make it first.')
  say = lambda text: print(text, flush=True)
  if not options.table:
    found = plan(options, say)
    print('\n'.join(plan_report.lines(found)))
    if options.save is not None:
      report.write_json(options.save, found)
    return
  each = [
    dataclasses.replace(
      options, model=model, topology=topology, mesh=mesh, rows=options.samples, decode=False
    )
    for model in ('qwen3-8b', 'qwen3-30b-a3b')
    for topology, mesh in TABLE.items()
  ]
  plans = []
  for found in side_by_side(lambda one: plan(one, say), each):
    plans.append(found)
    if options.save is not None:
      report.write_json(options.save, plans)
  print(plan_report.markdown(plans))


if __name__ == '__main__':
  chips.with_stack('experiments.plan')
  command.run(Command, main)
