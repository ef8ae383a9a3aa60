"""The device mesh: two axis names, one mesh constructor, one `shard_map` wrapper.

Rows are split over `data`, heads, experts and vocabulary over `model`. Axes are Explicit: shardings
are part of an array's type, so a layout mistake is an error at trace time. Without a mesh every
function here is a no-op, so the same code runs on one device, under `jax.vmap` or `jax.pmap`.
"""

import functools

import jax
from jax import P
from jax.sharding import AxisType

from trm_jax.types import InputError

DATA, MODEL = 'data', 'model'


def parse_mesh(text: str) -> tuple[int, int]:
  """(data, model) from a flag such as '8,1'. Raises InputError on anything else."""
  sizes = text.split(',')
  if len(sizes) != 2 or not all(s.strip().isdecimal() and int(s) > 0 for s in sizes):
    raise InputError(f"mesh={text!r} is not 'DATA,MODEL' with two positive integers, e.g. '8,1'.")
  return int(sizes[0]), int(sizes[1])


def simulate_devices(count: int) -> None:
  """Lets a CPU pose as `count` devices; only before the first use of jax, else no effect."""
  if count > 1 and jax.config.jax_platforms in ('cpu', None, ''):
    try:
      jax.config.update('jax_num_cpu_devices', count)
    except RuntimeError:
      pass  # The backend is up already: make_mesh reports what is missing.


def make_mesh(data: int = 1, model: int = 1) -> jax.sharding.Mesh:
  """A (data, model) mesh with Explicit axes over the first data * model devices.

  Raises InputError where there are fewer devices, or where it leaves out a whole process.
  """
  devices = jax.devices()
  if data * model > len(devices):
    raise InputError(
      f'mesh={data},{model} needs {data * model} devices, but this process sees {len(devices)}'
      f' ({devices[0].platform}); choose a smaller mesh or start more hosts.'
    )
  if len({d.process_index for d in devices[: data * model]}) < jax.process_count():
    raise InputError(
      f'mesh={data},{model} leaves out some of the {jax.process_count()} processes; choose a mesh'
      f' of all {len(devices)} devices or start fewer processes.'
    )
  return jax.make_mesh(
    (data, model), (DATA, MODEL), (AxisType.Explicit,) * 2, devices=devices[: data * model]
  )


def active() -> bool:
  """Whether a mesh with Explicit axes surrounds this code (`jax.set_mesh`)."""
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.axis_names) and all(t == AxisType.Explicit for t in mesh.axis_types)


def spec(*axes: str | None) -> P | None:
  """The partition spec under a mesh, None without one: for `out_sharding=` arguments."""
  return P(*axes) if active() else None


def divides(size: int, axis: str) -> bool:
  """Whether a dimension of `size` >= 2 can be split over a mesh axis; False without a mesh."""
  return active() and size > 1 and size % jax.sharding.get_abstract_mesh().shape[axis] == 0


def reshard(tree, *axes: str | None):
  """`tree` laid out by `axes` (trailing dimensions whole); unchanged without a mesh."""
  return jax.tree.map(lambda x: jax.reshard(x, P(*axes)), tree) if active() else tree


def layout(x) -> tuple:
  """The axes that `x` is split over, one entry a dimension; () without a mesh."""
  return tuple(jax.typeof(x).sharding.spec) if active() else ()


def gathered(x, axis: str, dtype):
  """`x` as `dtype` with no dimension split over `axis`; what was not split stays as it is.

  The gradient of `x` is split like `x` and has its dtype.

  A product with a matrix that is still split makes the TPU compiler pass it round in pieces and
  read all activations for each.
  """
  axes = layout(x)
  if axis not in axes:
    return x
  return jax.reshard(x.astype(dtype), P(*(None if name == axis else name for name in axes)))


def over_mesh(fn, *, in_specs, out_specs):
  """`fn` over the per-device blocks of the current mesh, collectives checked by type.

  Differentiate outside: inside, the gradient of a replicated argument already holds its psum.
  """
  return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def over_rows(fn):
  """`fn(*arrays)` on each device's rows, which it must treat independently; V is whole."""
  return over_mesh(fn, in_specs=P(DATA), out_specs=P(DATA)) if active() else fn


def over_vocabulary(fn):
  """`fn(logits [B,T,V], *per-token or per-row arrays, axis_name=)` with V split over `model`.

  Rows are split over `data`; every output keeps its row axis. Without a mesh it is plain `fn`.
  """
  return _split_vocabulary(fn, P(DATA, None, MODEL))


def over_head(fn):
  """`fn(head [V,D], *per-token or per-row arrays, axis_name=)`, likewise, V split over `model`."""
  return _split_vocabulary(fn, P(MODEL, None))


def _split_vocabulary(fn, first):
  if not active():
    return fn

  def split(x, *rows):
    mapped = over_mesh(
      functools.partial(fn, axis_name=MODEL),
      in_specs=(first, *(P(DATA) for _ in rows)),
      out_specs=P(DATA),
    )
    return mapped(jax.reshard(x, first), *rows)

  return split
