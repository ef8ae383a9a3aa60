"""Floating-point operations of a program's matrix products on one device, from its jaxpr.

Loops are counted as often as they turn and recomputed layers twice, unlike in a compiler's own
total. A product of m n k is 2 m n k; under a mesh it is divided over the axes that split its result
or both operands' contraction. Everything else (softmax, norms, masks) is left out, causal attention
is counted whole. `passes` weighs a product by the bfloat16 passes of the matrix units: float32
operands take 6 at the highest precision, 3 at high and 1 by default.
"""

import math
from typing import NamedTuple

import jax
import numpy as np


class Products(NamedTuple):
  """Operations of one device: as they are, and weighed by passes."""

  flops: int | float
  passes: int | float

  def times(self, n) -> 'Products':
    return Products(self.flops * n, self.passes * n)

  def plus(self, other: 'Products') -> 'Products':
    return Products(self.flops + other.flops, self.passes + other.passes)


def count(jaxpr, sizes: dict[str, int]) -> Products:
  """Of a jaxpr (that of `jax.make_jaxpr`), on a mesh with axes of these sizes."""
  total = Products(0.0, 0.0)
  for step in jaxpr.eqns:
    name = step.primitive.name
    if name == 'dot_general':
      total = total.plus(_dot(step, sizes))
    elif name.startswith('ragged_dot'):
      total = total.plus(_ragged(step))
    elif name == 'pallas_call':
      total = total.plus(_kernel(step, sizes))
    else:
      inner_counts = [count(inner, sizes) for inner in _inner(step)]
      if name == 'cond':  # one branch runs: the dearest
        inner_counts = [max(inner_counts, key=lambda x: x.passes)] if inner_counts else []
      turns = step.params['length'] if name == 'scan' else 1
      for x in inner_counts:
        total = total.plus(x.times(turns))
  return total


def _kernel(step, sizes) -> Products:
  """What a kernel says of itself; else its body on every cell of its grid, masked ones too."""
  said = step.params['cost_estimate']
  if said is not None:
    return Products(float(said.flops), float(said.flops))
  cells = math.prod(step.params['grid_mapping'].grid)
  return count(step.params['jaxpr'], sizes).times(cells)


def _inner(step):
  leaves = jax.tree.leaves(step.params, is_leaf=lambda x: hasattr(x, 'eqns'))
  leaves = [getattr(x, 'jaxpr', x) for x in leaves]
  return [x for x in leaves if hasattr(x, 'eqns')]


def _passes(step):
  operands = [x.aval.dtype for x in step.invars[:2]]
  if any(x != np.float32 for x in operands):
    return 1
  chosen = step.params.get('precision')
  chosen = chosen[0] if isinstance(chosen, tuple) else chosen
  return {jax.lax.Precision.HIGHEST: 6, jax.lax.Precision.HIGH: 3}.get(chosen, 1)


def _axes(aval, dims) -> set[str]:
  """Mesh axes that split these dimensions."""
  spec = tuple(getattr(aval.sharding, 'spec', ()) or ())
  axes = [spec[d] for d in dims if d < len(spec) and spec[d] is not None]
  return {name for entry in axes for name in (entry if isinstance(entry, tuple) else (entry,))}


def _dot(step, sizes) -> Products:
  left, right = (x.aval for x in step.invars[:2])
  out = step.outvars[0].aval
  (left_dims, right_dims), _ = step.params['dimension_numbers']
  flops = 2.0 * math.prod(out.shape) * math.prod(left.shape[d] for d in left_dims)
  split = _axes(out, range(out.ndim)) | (_axes(left, left_dims) & _axes(right, right_dims))
  flops /= math.prod(sizes[name] for name in split if name in sizes)
  return Products(flops, flops * _passes(step))


def _ragged(step) -> Products:
  """Each row meets the matrix of one group, or, in a gradient, of the group that it belongs to."""
  left, right = (x.aval for x in step.invars[:2])
  # [m,k] x [g,k,n] -> [m,n], or [k,m] x [k,n] -> [g,m,n]: the groups share the m (or k) rows.
  numbers = step.params.get('ragged_dot_dimension_numbers')
  sides = math.prod(left.shape) * right.shape[-1]
  if numbers is not None and not numbers.rhs_group_dimensions:
    sides = math.prod(left.shape) * right.shape[-1]
  elif numbers is not None:
    (_, right_dims), _ = numbers.dot_dimension_numbers
    free = set(range(right.ndim)) - set(right_dims) - set(numbers.rhs_group_dimensions)
    sides = math.prod(left.shape) * math.prod(right.shape[d] for d in free)
  flops = 2.0 * sides
  return Products(flops, flops * _passes(step))
