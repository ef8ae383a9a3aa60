"""Values for the rows of `benchmarks.table`, and every way of running them.

All rows of a room run as one program for each way, so that compiling stays cheap:

    {name: (results, gradients)}   with the gradients of sum(cotangent * result) by every float

The cotangents differ for every entry of every result: a result that lands in the wrong place, or
counts twice, shows in the gradients.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from benchmarks import table
from benchmarks.table import SMALL, Array, Row
from trm_jax.divergences import brackets
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.types import TopK

DEVICES = 8
# As users compile, where the tests' settings say otherwise to save time.
OPTIMISED = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}
if jaxlib.__version__.startswith('0.10.'):
  OPTIMISED['xla_cpu_use_fusion_emitters'] = True
MESHES = ((8, 1), (4, 2), (1, 8))
is_array = lambda x: isinstance(x, Array)
is_argument = lambda x: isinstance(x, Array | TopK)


def once(fn):
  """`functools.cache` that remembers an error as well: what fails to compile is tried once."""

  @functools.cache
  def outcome(*args):
    try:
      return fn(*args), None
    except Exception as error:
      return None, error

  @functools.wraps(fn)
  def found(*args):
    value, error = outcome(*args)
    if error is not None:
      raise error
    return value

  return found


def rows_of(room: str) -> list[Row]:
  return table.ROOMS[room]()


def everything() -> list[Row]:
  return [row for make in table.ROOMS.values() for row in make()]


# Values.


def drawn(array: Array, key: jax.Array) -> jax.Array:
  """What an argument may hold, small enough for differences and large enough for criteria."""
  shape = array.shape(SMALL)
  normal = lambda: jax.random.normal(key, shape)
  if array.holds == 'token':
    return jax.random.randint(key, shape, 0, SMALL.V)
  if array.holds == 'valid':
    # A whole row, one token, none, and a hole.
    lengths = jax.random.randint(key, (SMALL.B, 1), 1, SMALL.T + 1)
    lengths = lengths.at[:3, 0].set(jnp.array([SMALL.T, 1, 0]))
    valid = jnp.arange(SMALL.T)[None] < lengths
    return valid.at[0, 2].set(False)
  if array.holds == 'keep':
    return (normal() > -0.5).at[:2].set(jnp.array([True, False]))
  if array.holds == 'reward':
    return jax.random.uniform(key, shape)
  if array.holds == 'positive':
    return jnp.square(0.3 * normal())
  if array.holds == 'logp':
    return -1 - 0.3 * jnp.abs(normal())
  scale = {'logits': 1.0, 'hidden': 1.0, 'head': 0.5, 'log_ratio': 0.3}[array.holds]
  return scale * normal()


def arguments(row: Row, seed: int = 0) -> tuple:
  """Concrete arguments of a row; two seeds share shapes and nothing else."""
  leaves, treedef = jax.tree.flatten(row.takes, is_leaf=is_argument)
  keys = jax.random.split(jax.random.key(seed), len(leaves))

  def value(leaf, key):
    if isinstance(leaf, TopK):
      return brackets.top_k(drawn(Array('BTV', 'logits'), key), SMALL.K)
    return drawn(leaf, key)

  return jax.tree.unflatten(treedef, [value(*x) for x in zip(leaves, keys, strict=True)])


def changed(row: Row, values: tuple, change) -> tuple:
  """`values` with change(Array, value) for every argument."""
  flat, treedef = jax.tree.flatten(row.takes, is_leaf=is_array)
  given = jax.tree.leaves(values)
  return jax.tree.unflatten(treedef, [change(*x) for x in zip(flat, given, strict=True)])


# Ways of running.


def is_float(x) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def cotangents(results: list) -> list:
  """Different for every result and entry, laid out like the results."""
  return [
    0 * jnp.where(jnp.isfinite(x), x, 0)
    + np.sin(7 * i + np.arange(x.size)).reshape(x.shape).astype(x.dtype)
    for i, x in enumerate(results, 1)
  ]


def value_and_gradients(rows: list[Row], results_of, values: dict) -> dict:
  """{name: (results, gradients by every float argument, in order)} of `results_of(values)`."""
  leaves = {row.name: jax.tree.leaves(values[row.name]) for row in rows}
  treedefs = {row.name: jax.tree.structure(values[row.name]) for row in rows}
  # Nobody differentiates what is said of a whole batch.
  moving = {row.name: not row.whole for row in rows}
  floats = {name: [x for x in leaves[name] if is_float(x) and moving[name]] for name in leaves}

  def of_floats(floats):
    filled = {}
    for name, given in leaves.items():
      some = iter(floats[name])
      given = [next(some) if is_float(x) and moving[name] else x for x in given]
      filled[name] = jax.tree.unflatten(treedefs[name], given)
    out = results_of(filled)
    return {name: [x for x in jax.tree.leaves(out[name]) if is_float(x)] for name in out}, out

  found, back, out = jax.vjp(of_floats, floats, has_aux=True)
  (gradients,) = back({name: cotangents(some) for name, some in found.items()})
  return {name: (out[name], tuple(gradients[name])) for name in out}


def gradients_of(row: Row, gradients: tuple) -> tuple[tuple, tuple]:
  """(gradients of the arguments that have one, of the others)."""
  floats = lambda part: sum(
    x.holds not in ('token', 'valid', 'keep', 'ids')
    for x in jax.tree.leaves(part, is_leaf=is_array)
  )
  some = floats(row.takes[: row.by])
  return gradients[:some], gradients[some:]


def each(rows: list[Row], of_row) -> dict:
  """{name: of_row(row)}; an error says at which row."""
  found = {}
  for row in rows:
    try:
      found[row.name] = of_row(row)
    except Exception as error:
      error.add_note(f'in {row.name}')
      raise
  return found


def plain(rows: list[Row], values: dict) -> dict:
  """All rows of a room on one device."""
  run = lambda values: each(rows, lambda row: row.given(None)(*values[row.name]))
  return value_and_gradients(rows, run, values)


def on_the_mesh(rows: list[Row], values: dict) -> dict:
  """All rows of a room over the current mesh; whole arrays stay whole."""

  def of_row(row, values):
    if row.whole:
      return row.run(*values)
    split = sharding.over_mesh(row.given(row.over), in_specs=row.specs, out_specs=row.out)
    return split(*values)

  run = lambda values: each(rows, lambda row: of_row(row, values[row.name]))
  return value_and_gradients(rows, run, values)


def placed(row: Row, values: tuple) -> tuple:
  """Arguments as they lie on the current mesh."""
  return jax.tree.map(jax.device_put, values, row.specs)


def over_devices(rows: list[Row], values: dict) -> dict:
  """All rows of a room by one `jax.pmap`, a device for each part of the vocabulary or of the rows.

  What every device gives alike is weighed once, or gradients would count eight times.
  """
  (axis,) = {row.over or DATA for row in rows}
  letter = {DATA: 'B', MODEL: 'V'}[axis]
  takes = {row.name: row.takes for row in rows}
  places = [x.axes.find(letter) for x in jax.tree.leaves(takes, is_leaf=is_array)]
  treedef = jax.tree.structure(values)

  def part(x, place):
    if place < 0:
      return x
    x = x.reshape(*x.shape[:place], DEVICES, -1, *x.shape[place + 1 :])
    return jnp.moveaxis(x, place, 0)

  def on_one(*leaves):
    values = jax.tree.unflatten(treedef, leaves)
    return each(rows, lambda row: row.given(axis)(*values[row.name]))

  mapped = jax.pmap(on_one, axis_name=axis, in_axes=tuple(0 if p >= 0 else None for p in places))

  def run(values):
    found = mapped(*map(part, jax.tree.leaves(values), places))
    whole = lambda row, x: (
      x.reshape(-1, *x.shape[2:]) if axis == DATA and row.gives == 'B' else x[0]
    )
    return {row.name: jax.tree.map(functools.partial(whole, row), found[row.name]) for row in rows}

  return value_and_gradients(rows, run, values)


# Comparisons.


def same(got, want, *, rtol=2e-5, atol=1e-5, exact=False) -> None:
  """Floats close, everything else equal; structures, shapes and dtypes equal."""
  chex.assert_trees_all_equal_structs(got, want)
  chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    one, other = np.asarray(one), np.asarray(other)
    if exact or not is_float(one):
      chex.assert_trees_all_equal(one, other)
    else:
      # Gradients are sums: what rounding leaves is measured by their largest entry.
      scale = max(1.0, np.abs(other[np.isfinite(other)]).max(initial=0))
      chex.assert_trees_all_close(one, other, rtol=rtol, atol=atol * scale)
