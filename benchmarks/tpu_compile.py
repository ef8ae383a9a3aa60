"""Compiles every form of the divergences for TPUs, without one, and says what the compiler says.

  python -m benchmarks.tpu_compile [--chips v5e v5p v6e] [--positions N] [--vocabulary V]

Needs the extra `tpu` (pip install -e '.[tpu]'). Nothing runs: the figures come from the compiled
program and the compiler's cost model, and none is a measured time.

  reads        bytes to and from HBM over the bytes of the inputs; XLA counts its own, and those of
               a kernel follow from its grid and index maps: a block moves when its index changes
  XLA's reads  the same with each kernel's own `cost_estimate`, which is all that XLA knows of it
  estimate     XLA's optimal_seconds over the floor: input bytes over bandwidth, or the matrix
               products (each once) over the peak if that is more; it knows no vector arithmetic
  temporaries  MiB of HBM beyond inputs and outputs
  collectives  with the type of their result on each device
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import command
from trm_jax import kernels, pair, tiles
from trm_jax.types import InputError


class Chip(NamedTuple):
  """Published figures of one chip; VMEM is that of one core."""

  topology: str
  bandwidth: float
  peak: float
  vmem: int


CHIPS = {
  'v5e': Chip('v5e:2x4', 819e9, 197e12, 128 * tiles.MIB),
  'v5p': Chip('v5p:2x2x1', 2765e9, 459e12, 64 * tiles.MIB),
  'v6e': Chip('v6e:2x4', 1638e9, 918e12, 128 * tiles.MIB),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """Sizes of the compiled programs; bfloat16 logits, hidden states and heads."""

  chips: tuple[str, ...] = tuple(CHIPS)
  positions: int = 4096
  vocabulary: int = 152064
  width: int = 4096


class Form(NamedTuple):
  """A function of abstract arrays that needs `products` matrix products of N V D."""

  name: str
  run: Callable
  shapes: list[tuple[int, ...]]
  products: int = 0


def naive(policy, rollout, tokens):
  """What is written first."""
  log_q, log_p = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (policy, rollout))
  q, p = jnp.exp(log_q), jnp.exp(log_p)
  picked = [jnp.take_along_axis(x, tokens[:, None], -1) for x in (log_q, log_p)]
  return (p * (log_p - log_q)).sum(-1), jnp.abs(q - p).sum(-1), -(q * log_q).sum(-1), picked


def two_reads(policy, rollout, vmem):
  q = kernels.sums(policy, vmem_bytes=vmem)
  p = kernels.sums(rollout, weighted=False, vmem_bytes=vmem)
  given = _given(q) + _given(p)
  return q, kernels.terms_given(policy, rollout, *given, vmem_bytes=vmem)


def _given(s):
  return s.top, jnp.log(s.total)


def head(hidden, weights, rollout, *given, vmem):
  """The policy from its head; the rollout's normaliser is `given`, or taken from its logits."""
  q = kernels.linear_sums(hidden, weights, vmem_bytes=vmem)
  given = given or _given(kernels.sums(rollout, weighted=False, vmem_bytes=vmem))
  return q, kernels.linear_terms(hidden, weights, rollout, *_given(q), *given, vmem_bytes=vmem)


def two_heads(hidden, weights, other, other_weights, vmem):
  p = kernels.linear_sums(other, other_weights, weighted=False, vmem_bytes=vmem)
  return head(hidden, weights, (other, other_weights), *_given(p), vmem=vmem)


def split(policy, rollout, vmem):
  """One device's share: 2 all-reduces for the normalisers, 1 for the sums."""
  sides = [kernels.sums(x, vmem_bytes=vmem) for x in (policy, rollout)]
  top = jax.lax.pmax(jnp.stack([s.top for s in sides]), 'model')
  scale = [jnp.exp(s.top - t) for s, t in zip(sides, top, strict=True)]
  moved = sides[0].weighted + sides[0].total * (sides[0].top - top[0])
  parts = [sides[0].total * scale[0], sides[1].total * scale[1], moved * scale[0]]
  total_q, total_p, weighted = jax.lax.psum(jnp.stack(parts), 'model')
  given = top[0], jnp.log(total_q), top[1], jnp.log(total_p)
  found = kernels.terms_given(policy, rollout, *given, vmem_bytes=vmem)
  return weighted, jax.lax.psum(jnp.stack(found[:2]), 'model')


def forms(sizes: Command, vmem: int) -> list[Form]:
  n, v, d = sizes.positions, sizes.vocabulary, sizes.width
  logits, policy = [(n, v)] * 2, [(n, d), (v, d)]
  with_memory = lambda f, **more: functools.partial(f, vmem=vmem, **more)
  fused = functools.partial(kernels.fused, vmem_bytes=vmem)
  return [
    Form('naive, two log_softmax', naive, [*logits, (n,)]),
    Form('terms in plain XLA', lambda b, a: pair.fused(b, a, None), logits),
    Form('kernel, fused', fused, logits),
    Form('kernel, fused, full set', functools.partial(fused, full=True), logits),
    Form('kernels, sums then terms', with_memory(two_reads), logits),
    Form('head, rollout logits + normaliser', with_memory(head), [*policy, (n, v), (n,), (n,)], 1),
    Form('head, rollout logits', with_memory(head), [*policy, (n, v)], 1),
    Form('head, rollout head', with_memory(two_heads), policy * 2, 2),
  ]


def kernel_bytes(jaxpr) -> tuple[int, int]:
  """(counted, declared) bytes of every Pallas kernel of a program."""
  counted = declared = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'pallas_call':
      grid = eqn.params['grid_mapping']
      counted += sum(_moved(mapping, grid.grid) for mapping in grid.block_mappings)
      declared += eqn.params['cost_estimate'].bytes_accessed
      continue
    for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        more = kernel_bytes(inner)
        counted, declared = counted + more[0], declared + more[1]
  return counted, declared


def _moved(mapping, grid) -> int:
  """Bytes of one operand: blocks in grid order, each moved when its index changes."""
  steps = np.indices(grid).reshape(len(grid), -1)
  index = jax.vmap(jax.extend.core.jaxpr_as_fun(mapping.index_map_jaxpr))(*map(jnp.asarray, steps))
  index = np.stack(index, 1)
  fresh = np.concatenate([[True], (index[1:] != index[:-1]).any(1)])
  array = mapping.array_aval
  block = np.array([getattr(b, 'block_size', b) for b in mapping.block_shape])
  size = np.minimum(block, np.array(array.shape) - index[fresh] * block)
  return int(size.prod(1).sum()) * array.dtype.itemsize


def collectives(hlo: str) -> str:
  """Types of all collectives of a compiled program."""
  names = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute'
  found = re.findall(rf'= \(?(\w+\[[\d,]*\])\S* ({names})(?:-start)?\(', hlo)
  return ', '.join(f'{name} {kind}' for kind, name in found) or '-'


def report(form: Form, chip: Chip, run, arguments, width: int, devices: int = 1) -> str:
  """One line of the table."""
  traced = jax.jit(run).trace(*arguments)
  compiled = traced.lower().compile()
  costs, hlo = compiled.cost_analysis(), compiled.as_text()
  if ' while(' in hlo:
    raise RuntimeError(f'{form.name} has a loop, whose body the cost model counts only once')
  counted, declared = kernel_bytes(traced.jaxpr.jaxpr)
  inputs = sum(x.size * x.dtype.itemsize for x in arguments) / devices
  xla = costs['bytes accessed']
  flops = 2 * form.products * math.prod(form.shapes[0][:1]) * form.shapes[1][0] * width
  floor = max(inputs / chip.bandwidth, flops / chip.peak / devices)
  temporaries = compiled.memory_analysis().temp_size_in_bytes / tiles.MIB
  return (
    f'| {form.name:38} | {(xla - declared + counted) / inputs:5.2f} | {xla / inputs:5.2f} '
    f'| {costs["optimal_seconds"] / floor:5.2f} | {temporaries:6.0f} | {collectives(hlo)} |'
  )


def _dtype(shape, form):
  if len(shape) > 1:
    return jnp.bfloat16
  return jnp.int32 if form.run is naive else jnp.float32


def _without_a_tpu() -> None:
  """Makes the TPU compiler usable where there is no TPU, and quiet."""
  try:
    import libtpu  # noqa: F401
  except ImportError:
    raise InputError("libtpu is not installed; run pip install -e '.[tpu]'.") from None
  # It would ask the machine for its place in a pod.
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-8')
  os.environ.setdefault('TPU_STDERR_LOG_LEVEL', '3')
  os.environ.setdefault('TPU_MIN_LOG_LEVEL', '3')
  jax.config.update('jax_platforms', 'cpu')


def main(sizes: Command) -> None:
  for name in sizes.chips:
    if name not in CHIPS:
      raise InputError(f'chips={name} is not known; choose from {", ".join(CHIPS)}.')
  _without_a_tpu()
  print(__doc__.split('\n\n', 3)[3])
  for name in sizes.chips:
    chip = CHIPS[name]
    devices = topologies.get_topology_desc(chip.topology, platform='tpu').devices
    print(f"\n{name}\n| form | reads | XLA's reads | estimate | temporaries | collectives |")
    print('| --- | --- | --- | --- | --- | --- |')
    one = jax.sharding.SingleDeviceSharding(devices[0])
    for form in forms(sizes, chip.vmem):
      arguments = [jax.ShapeDtypeStruct(s, _dtype(s, form), sharding=one) for s in form.shapes]
      print(report(form, chip, form.run, arguments, sizes.width), flush=True)
    if len(devices) < 8:
      continue
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ('data', 'model'))
    specs = dict(in_specs=P('data', 'model'), out_specs=(P('data'), P(None, 'data')))
    run = jax.shard_map(functools.partial(split, vmem=chip.vmem), mesh=mesh, **specs)
    shape = sizes.positions, sizes.vocabulary
    argument = jax.ShapeDtypeStruct(
      shape, jnp.bfloat16, sharding=NamedSharding(mesh, P('data', 'model'))
    )
    form = Form('kernels on 2 x 4 chips, each', run, [shape] * 2)
    print(report(form, chip, run, [argument] * 2, sizes.width, 8), flush=True)


if __name__ == '__main__':
  command.run(Command, main)
