"""Every public transform, run in every way: eager, jit, vmap, pmap, and over three meshes.

The cases are the rows of `benchmarks.table`; `battery` draws their arguments. What the other ways
are compared with, and what padding, rejected rows and extremes are tried on, is compiled as users
compile.
"""

import functools

import battery
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from benchmarks import table
from trm_jax.mesh import sharding
from trm_jax.types import Statistics

ROWS = battery.everything()
ROW = {row.name: row for row in ROWS}
ROOM = {row.name: room for room, make in table.ROOMS.items() for row in make()}
BY_ROOM = pytest.mark.parametrize('room', table.ROOMS)


def by_row(which=lambda row: True, *, slow=()):
  """Over the rows of the table; those of the rooms in `slow` are left to `make test-all`."""
  some = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (ROOM[row.name] in slow))
    for row in ROWS
    if which(row)
  ]
  return pytest.mark.parametrize('row', some)


@battery.once
def values(room, seed=0):
  return {row.name: battery.arguments(row, seed) for row in battery.rows_of(room)}


@battery.once
def compiled(room):
  """One program for all rows of a room; tracing it twice, or promoting a dtype, is an error."""

  def traced(values):
    return battery.plain(battery.rows_of(room), values)

  traced.__name__ = room  # by which chex counts
  return jax.jit(chex.assert_max_traces(traced, n=1), compiler_options=battery.OPTIMISED)


def run(room, arguments):
  with jax.numpy_dtype_promotion('strict'):
    return compiled(room)(arguments)


@battery.once
def jitted(room, seed=0):
  return run(room, values(room, seed))


def rerun(row, change):
  """A row's results where change(array, value) was done to its arguments."""
  room = ROOM[row.name]
  dirty = values(room) | {row.name: battery.changed(row, values(room)[row.name], change)}
  return run(room, dirty)[row.name]


# The ways agree.


@battery.once
def eager(room):
  return battery.plain(battery.rows_of(room), values(room))


@by_row(slow=('scores', 'heads', 'batches'))
def test_eager(row):
  battery.same(eager(ROOM[row.name])[row.name], jitted(ROOM[row.name])[row.name])


@battery.once
def mapped(room):
  both = jax.tree.map(lambda *x: jnp.stack(x), values(room), values(room, 1))
  return jax.jit(jax.vmap(functools.partial(battery.plain, battery.rows_of(room))))(both)


@by_row()
def test_vmap(row):
  room = ROOM[row.name]
  for seed in (0, 1):
    got = jax.tree.map(lambda x, seed=seed: x[seed], mapped(room)[row.name])
    battery.same(got, jitted(room, seed)[row.name])


@battery.once
def parallel(room):
  return battery.over_devices(battery.rows_of(room), values(room))


@by_row(lambda row: not row.whole, slow=('heads',))
def test_pmap(row):
  room = ROOM[row.name]
  battery.same(parallel(room)[row.name], jitted(room)[row.name])


@battery.once
def on_mesh(room, mesh):
  given = values(room)  # drawn without a mesh, which would become part of their types
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    rows = battery.rows_of(room)
    placed = {row.name: battery.placed(row, given[row.name]) for row in rows}
    found = jax.jit(functools.partial(battery.on_the_mesh, rows))(placed)
  return jax.device_get(found)


MESHES = [
  pytest.param(mesh, id=f'{mesh[0]}x{mesh[1]}', marks=[pytest.mark.slow] * (mesh != (4, 2)))
  for mesh in battery.MESHES
]


@pytest.mark.parametrize('mesh', MESHES)
@by_row()
def test_mesh(row, mesh):
  room = ROOM[row.name]
  battery.same(on_mesh(room, mesh)[row.name], jax.device_get(jitted(room)[row.name]))


@BY_ROOM
def test_no_retrace_for_new_values(room):
  jitted(room), jitted(room, 1)
  # The program is wrapped in `chex.assert_max_traces`: other shapes are another program.
  shorter = jax.tree.map(lambda x: x, values(room))
  name = next(iter(shorter))
  shorter[name] = jax.tree.map(lambda x: jnp.concatenate([x, x]), shorter[name])
  with pytest.raises(AssertionError, match='traced > 1 times'):
    run(room, shorter)


# What comes out.


@by_row()
def test_shapes_and_types(row):
  results, gradients = jitted(ROOM[row.name])[row.name]
  for x in jax.tree.leaves(results):
    if row.gives == 'B':
      chex.assert_axis_dimension(x, 0, table.SMALL.B)
    else:
      chex.assert_shape(x, ())
    if battery.is_float(x):
      chex.assert_type(x, jnp.float32)
  some, none = battery.gradients_of(row, gradients)
  for x in none:
    chex.assert_trees_all_equal(x, np.zeros_like(x))
  assert not row.by or any(np.abs(x).max() > 0 for x in some)


def differentiable(row, found):
  """What of a result has a slope: from hidden states, log-prob and entropy alone."""
  if isinstance(found, Statistics) and '.linear_head.' in row.name:
    return found.policy_logp, found.entropy
  return found[2:] if row.name.endswith('linear_head.brackets') else found


@by_row(lambda row: row.by and all(map(battery.is_array, row.takes[: row.by])))
def test_gradients_are_slopes(row):
  arguments = values(ROOM[row.name])[row.name]
  function = row.given(None)

  @jax.jit
  def of_floats(*some):
    found = jax.tree.leaves(differentiable(row, function(*some, *arguments[row.by :])))
    return [x for x in found if battery.is_float(x)]

  chex.assert_numerical_grads(
    of_floats, arguments[: row.by], order=1, modes=('rev',), eps=1e-2, atol=2e-2, rtol=2e-2
  )


# What cannot matter.


@by_row(lambda row: row.padding)
@pytest.mark.parametrize('content', [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_padding(row, content):
  at = [i for i, x in enumerate(row.takes) if x == table.VALID][-1]
  valid = values(ROOM[row.name])[row.name][at]

  def fill(array, x):
    per_token = array.axes == 'BT' and battery.is_float(x)
    return jnp.where(valid, x, content) if per_token else x

  battery.same(rerun(row, fill), jitted(ROOM[row.name])[row.name], exact=True)


@by_row(lambda row: row.rejects)
@pytest.mark.parametrize('content', [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_rejected_rows(row, content):
  keep = values(ROOM[row.name])[row.name][row.takes.index(table.KEEP)]

  def fill(array, x):
    return (
      jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, content) if battery.is_float(x) else x
    )

  battery.same(rerun(row, fill), jitted(ROOM[row.name])[row.name], exact=True)


@by_row()
def test_order_of_rows(row):
  prompts = np.random.default_rng(0).permutation(table.SMALL.B // table.SAMPLES)
  order = (prompts[:, None] * table.SAMPLES + np.arange(table.SAMPLES)).ravel()
  move = lambda array, x: x[order] if array.axes[0] == 'B' else x
  results, _ = rerun(row, move)
  want, _ = jitted(ROOM[row.name])[row.name]
  want = jax.tree.map(lambda x: x[order], want) if row.gives == 'B' else want
  battery.same(results, want)


@by_row()
@pytest.mark.parametrize('sign', [1, -1])
def test_log_ratios_of_1e4(row, sign):
  """No NaN anywhere, and finite wherever the definition does not say inf."""
  scale = {'logits': 1e4, 'log_ratio': 1e4, 'logp': 1e4}

  def stretch(array, x):
    if array.holds not in scale:
      return x
    signs = jnp.where(jnp.arange(x.size).reshape(x.shape) % 3 == 0, -sign, sign)
    return x - 1e4 * (signs > 0) if array.holds == 'logp' else 1e4 * signs + x

  results, gradients = rerun(row, stretch)
  for x in jax.tree.leaves((results, gradients)):
    assert row.overflows == 'nan' or not battery.is_float(x) or not jnp.isnan(x).any()
  if not row.overflows:
    chex.assert_tree_all_finite((results, gradients))


class Variants(parameterized.TestCase):
  """chex's own: compiled or not, arguments on the device, and copied over devices."""

  # Without a device chex hands over NumPy arrays, which the transforms do not take.
  @chex.variants(with_jit=True, without_jit=True, with_device=True, with_pmap=True)
  @parameterized.named_parameters(*((room, room) for room in table.ROOMS))
  def test_variants(self, room):
    row = battery.rows_of(room)[-1]
    want, _ = jitted(room)[row.name]
    got = self.variant(row.given(None))(*values(room)[row.name])
    battery.same(jax.tree.map(jnp.asarray, got), want)
