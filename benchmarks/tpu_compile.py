"""Compiles every form of the divergences for TPUs, without one, and says what the compiler says.

  python -m benchmarks.tpu_compile [--chips v5e v5p v6e] [--positions N] [--vocabulary V]
                                   [--save FILE] [--markdown]

Needs the extra `tpu` (pip install -e '.[tpu]'). Nothing runs: the figures come from the compiled
program and the compiler's cost model, and none is a measured time.

  reads        bytes to and from HBM over the bytes of the inputs; XLA counts its own (arrays that
               it keeps in VMEM, too, and all of what a SparseCore gathers from), and those of a
               kernel follow from its grid and index maps: a block moves when its index changes
  kernels      the same of the kernels alone
  estimate     XLA's optimal_seconds over the floor: input bytes over bandwidth, or the matrix
               products (each once) over the peak if that is more; it knows no vector arithmetic,
               and gives nonsense, shown as -, beside some gathers
  temporaries  MiB of HBM beyond inputs and outputs
  calls        kernels in the compiled program
  collectives  with the type of their result on each device
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import measure
from trm_jax import divergences
from trm_jax.divergences import linear_head
from trm_jax.divergences.passes import kernels, pair, tiles
from trm_jax.planning import chips
from trm_jax.training import command
from trm_jax.types import InputError


class Chip(NamedTuple):
  """A topology of eight chips, and the published figures of one."""

  topology: str
  bandwidth: float
  peak: float


CHIPS = {
  'v5e': Chip('v5e:2x4', 819e9, 197e12),
  'v5p': Chip('v5p:2x2x2', 2765e9, 459e12),
  'v6e': Chip('v6e:2x4', 1638e9, 918e12),
}
AXES = ('data', 'model')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """Sizes of the compiled programs; bfloat16 logits, hidden states and heads."""

  chips: tuple[str, ...] = tuple(CHIPS)
  positions: int = 4096
  vocabulary: int = 152064
  width: int = 4096
  save: pathlib.Path | None = None
  """JSON file for every figure."""
  markdown: bool = False
  """Print tables for a README."""


class Input(NamedTuple):
  """An abstract array, and how several devices share it."""

  shape: tuple[int, ...]
  spec: P
  dtype: Any = jnp.bfloat16


class Form(NamedTuple):
  """A function of `inputs` that needs `products` matrix products of N V D."""

  name: str
  run: Callable
  inputs: tuple[Input, ...]
  products: int = 0


def naive(policy, rollout, tokens):
  """What is written first."""
  log_q, log_p = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (policy, rollout))
  q, p = jnp.exp(log_q), jnp.exp(log_p)
  picked = [jnp.take_along_axis(x, tokens[:, None], -1) for x in (log_q, log_p)]
  return (p * (log_p - log_q)).sum(-1), jnp.abs(q - p).sum(-1), -(q * log_q).sum(-1), picked


def two_reads(policy, rollout):
  q, p = kernels.sums(policy), kernels.sums(rollout, weighted=False)
  return q, kernels.terms_given(policy, rollout, *_given(q), *_given(p))


def _given(s):
  return s.top, jnp.log(s.total)


def two_kernels(hidden, head, rollout, tokens, lse):
  q = kernels.linear_sums(hidden, head, tokens=tokens)
  return q, kernels.linear_terms(hidden, head, rollout, *_given(q), None, lse, tokens=tokens)


def one_kernel(hidden, head, rollout, tokens, lse, full=False):
  return kernels.linear_fused(hidden, head, rollout, lse, tokens=tokens, full=full)


def from_logits(policy, rollout, tokens, axis_name=None):
  return divergences.statistics(policy, rollout, tokens, axis_name=axis_name)


def from_head(hidden, head, tokens, rollout, lse=None, axis_name=None, full=False):
  return linear_head.statistics(
    hidden, head, tokens, rollout_logits=rollout, rollout_lse=lse, axis_name=axis_name, full=full
  )


def from_heads(hidden, head, tokens, other, other_head, lse=None, axis_name=None, full=False):
  return linear_head.statistics(
    hidden,
    head,
    tokens,
    rollout_hidden=other,
    rollout_head=other_head,
    rollout_lse=lse,
    axis_name=axis_name,
    full=full,
  )


def forms(sizes: Command) -> tuple[list[Form], list[Form]]:
  """(forms for one chip, forms for a mesh)."""
  n, v, d = sizes.positions, sizes.vocabulary, sizes.width
  logits = Input((n, v), P(*AXES))
  hidden, head = Input((n, d), P('data')), Input((v, d), P('model'))
  tokens, lse = Input((n,), P('data'), jnp.int32), Input((n,), P('data'), jnp.float32)
  pair_of = logits, logits
  heads = lambda run: lambda h, w, g, u, *rest: run(h, w, (g, u), *rest)
  full = lambda run: functools.partial(run, full=True)
  kernel = hidden, head, logits, tokens, lse
  public = [
    Form('divergences.statistics', from_logits, (*pair_of, tokens)),
    Form('linear_head.statistics', from_head, (hidden, head, tokens, logits), 1),
    Form('linear_head.statistics, lse', from_head, (hidden, head, tokens, logits, lse), 1),
    Form(
      'linear_head.statistics, lse, full set',
      full(from_head),
      (hidden, head, tokens, logits, lse),
      1,
    ),
    Form('linear_head.statistics, two heads', from_heads, (hidden, head, tokens, hidden, head), 2),
    Form(
      'linear_head.statistics, two heads, lse',
      from_heads,
      (hidden, head, tokens, hidden, head, lse),
      2,
    ),
    Form(
      'linear_head.statistics, two heads, lse, full set',
      full(from_heads),
      (hidden, head, tokens, hidden, head, lse),
      2,
    ),
  ]
  two_heads = (hidden, head) * 2 + (tokens, lse)
  return [
    Form('naive, two log_softmax', naive, (*pair_of, tokens)),
    Form('terms in plain XLA', lambda b, a: pair.fused(b, a, None), pair_of),
    Form('fused', kernels.fused, pair_of),
    Form('fused, full set', full(kernels.fused), pair_of),
    Form('sums, terms_given', two_reads, pair_of),
    Form('linear_sums, linear_terms, lse', two_kernels, kernel, 1),
    Form('linear_fused, lse', one_kernel, kernel, 1),
    Form('linear_fused, lse, full set', full(one_kernel), kernel, 1),
    Form('linear_sums, linear_terms, two heads, lse', heads(two_kernels), two_heads, 2),
    Form('linear_fused, two heads, lse', heads(one_kernel), two_heads, 2),
    *public,
  ], public


def kernel_bytes(jaxpr) -> np.ndarray:
  """(counted, declared) bytes of every Pallas kernel of a program."""
  found = np.zeros(2, np.int64)
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'pallas_call':
      grid = eqn.params['grid_mapping']
      counted = sum(_moved(mapping, grid.grid) for mapping in grid.block_mappings)
      found += counted, eqn.params['cost_estimate'].bytes_accessed
      continue
    inner = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns'))
    inner = [getattr(x, 'jaxpr', x) for x in inner]
    inner = [kernel_bytes(x) for x in inner if hasattr(x, 'eqns')]
    # Of the branches for each platform one is compiled: that with the larger kernels.
    found += (max(inner, key=tuple) if eqn.primitive.name == 'cond' else sum(inner)) if inner else 0
  return found


def _moved(mapping, grid) -> int:
  """Bytes of one operand: blocks in grid order, each moved when its index changes."""
  steps = np.indices(grid).reshape(len(grid), -1)
  index = jax.vmap(jax.extend.core.jaxpr_as_fun(mapping.index_map_jaxpr))(*map(jnp.asarray, steps))
  index = np.stack(index, 1)
  fresh = np.concatenate([[True], (index[1:] != index[:-1]).any(1)])
  array = mapping.array_aval
  block = np.array([getattr(b, 'block_size', 1) for b in mapping.block_shape])
  size = np.minimum(block, np.array(array.shape) - index[fresh] * block)
  return int(size.prod(1).sum()) * array.dtype.itemsize


def collectives(hlo: str) -> str:
  """Types of all collectives of a compiled program."""
  names = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute'
  found = re.findall(rf'= \(?(\w+\[[\d,]*\])\S* ({names})(?:-start)?\(', hlo)
  return ', '.join(f'{name} {kind}' for kind, name in found) or '-'


def report(form: Form, chip: Chip, sizes: Command, mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """One line of the table; on several devices, figures of each."""
  place = lambda x: NamedSharding(mesh, x.spec if mesh.size > 1 else P())
  arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)) for x in form.inputs]
  run = form.run
  if mesh.size > 1:
    specs = dict(in_specs=tuple(x.spec for x in form.inputs), out_specs=P('data'))
    run = jax.shard_map(functools.partial(run, axis_name='model'), mesh=mesh, **specs)
  # The kernels ask what chip they are traced for.
  with jax.set_mesh(mesh):
    traced = jax.jit(run).trace(*arguments)
    compiled = traced.lower().compile()
  costs, hlo = compiled.cost_analysis(), compiled.as_text()
  if ' while(' in hlo:
    raise RuntimeError(f'{form.name} has a loop, whose body the cost model counts only once')
  counted, declared = map(int, kernel_bytes(traced.jaxpr.jaxpr))
  shards = (x.sharding.shard_shape(x.shape) for x in arguments)
  inputs = sum(int(np.prod(s)) * x.dtype.itemsize for s, x in zip(shards, arguments, strict=True))
  flops = 2 * form.products * sizes.positions * sizes.vocabulary * sizes.width / mesh.size
  seconds = costs['optimal_seconds']
  return {
    'form': form.name,
    'chips': mesh.size,
    'reads': (costs['bytes accessed'] - declared + counted) / inputs,
    'kernels': counted / inputs,
    'estimate': seconds / max(inputs / chip.bandwidth, flops / chip.peak) if seconds > 0 else None,
    'temporaries': compiled.memory_analysis().temp_size_in_bytes / tiles.MIB,
    'calls': hlo.count('custom_call_target="tpu_custom_call"'),
    'collectives': collectives(hlo),
  }


def line(found: dict[str, Any]) -> list[str]:
  """Cells of the table."""
  name = found['form'] + (f', {found["chips"]} chips' if found['chips'] > 1 else '')
  ratios = [found[key] for key in ('reads', 'kernels', 'estimate')]
  ratios = ['-' if x is None else f'{x:.3f}' for x in ratios]
  return [name, *ratios, f'{found["temporaries"]:.0f}', str(found['calls']), found['collectives']]


def main(sizes: Command) -> None:
  for name in sizes.chips:
    if name not in CHIPS:
      raise InputError(f'chips={name!r} is not one of {", ".join(CHIPS)}.')
  measure.check_save(sizes.save)
  chips.without_a_tpu()
  records = []
  for name in sizes.chips:
    chip, rows = CHIPS[name], []
    devices = np.array(topologies.get_topology_desc(chip.topology, platform='tpu').devices)
    auto = (jax.sharding.AxisType.Auto,) * 2
    for shape, some in zip(((1, 1), (2, 4)), forms(sizes), strict=True):
      used = devices[: shape[0] * shape[1]].reshape(shape)
      mesh = jax.sharding.Mesh(used, AXES, axis_types=auto)
      for form in some:
        found = report(form, chip, sizes, mesh)
        records.append({'chip': name, 'jax': jax.__version__, **found})
        rows.append(line(found))
    n, v, d = sizes.positions, sizes.vocabulary, sizes.width
    title = f'{name}: N={n} V={v} D={d} bfloat16, jax {jax.__version__}'
    print(f'### {title}\n' if sizes.markdown else title)
    head = ['form', 'reads', 'kernels', 'estimate', 'temporaries', 'calls', 'collectives']
    print(measure.table(head, rows, markdown=sizes.markdown), end='\n\n', flush=True)
    measure.save(sizes.save, records)


if __name__ == '__main__':
  command.run(Command, main)
