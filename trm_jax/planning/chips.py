"""TPUs as a compiler's target, without one: published figures, named topologies, meshes of them.

    mesh = chips.mesh('v5e:16x16', 32, 8)     # needs libtpu (pip install -e '.[tpu]')
    mesh = chips.mesh('cpu:8', 4, 2)          # simulated devices; figures are a CPU's

Nothing can run on such a mesh: programs are lowered and compiled for it from shapes alone.
"""

import importlib.util
import math
import os
import re
import resource
import sys
import threading
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType

from trm_jax.mesh import sharding
from trm_jax.types import InputError

GIB = 2**30
STACK = 2**30  # bytes of address space, taken as far as used
_LOADING = threading.Lock()  # two threads that load the compiler at a time fail


class Chip(NamedTuple):
  """Published figures of one chip: FLOP/s in bfloat16, bytes of HBM, bytes/s of HBM and of ICI.

  `links` is the bandwidth of all interconnect links together, in one direction. `clock` is the peak
  over what the published matrix units do in a cycle; None where the two do not fit.
  """

  peak: int | float
  memory: int | float
  bandwidth: int | float
  links: int | float
  clock: int | float | None = None


# cloud.google.com/tpu/docs/v5e, v5p, v6e: ICI is published for both directions, halved here. Memory
# is what the compiler grants, which for v5e and v6e is less than the published 16 and 32 GiB.
CHIPS = {
  'v5e': Chip(197e12, 15.75 * GIB, 819e9, 200e9, 197e12 / (4 * 2 * 128**2)),
  'v5p': Chip(459e12, 95 * GIB, 2765e9, 600e9, 459e12 / (2 * 4 * 2 * 128**2)),
  'v6e': Chip(918e12, 31.25 * GIB, 1638e9, 400e9),
}


def installed() -> bool:
  """Whether the TPU compiler is here."""
  return importlib.util.find_spec('libtpu') is not None


def without_a_tpu() -> None:
  """Makes the TPU compiler usable where there is no TPU, and quiet; InputError without libtpu."""
  if not installed():
    raise InputError("libtpu is not installed; run pip install -e '.[tpu]'.")
  # It would ask the machine for its place in a pod, and refuse a second process.
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-8')
  os.environ.setdefault('TPU_STDERR_LOG_LEVEL', '3')
  os.environ.setdefault('TPU_MIN_LOG_LEVEL', '3')
  jax.config.update('jax_platforms', 'cpu')


def parse(topology: str) -> tuple[str, int]:
  """(chip, number of chips) of a name such as 'v5e:16x16' or 'cpu:8'; InputError otherwise."""
  match = re.fullmatch(r'(\w+):(\d+(?:x\d+)*)', topology)
  if not match or match[1] not in (*CHIPS, 'cpu') or '0' in match[2].split('x'):
    raise InputError(
      f'topology={topology!r} is not CHIP:SIZES with a chip of {", ".join(CHIPS)} or cpu, e.g.'
      ' v5e:16x16, v5p:4x4x8 or cpu:8.'
    )
  return match[1], math.prod(map(int, match[2].split('x')))


def mesh(topology: str, data: int, model: int) -> jax.sharding.Mesh:
  """A (data, model) mesh with Explicit axes over all chips of a topology.

  Raises InputError for an unknown topology, one that data x model does not fill, or a TPU's where
  libtpu is missing.
  """
  chip, count = parse(topology)
  if data * model != count:
    raise InputError(
      f'mesh={data},{model} has {data * model} devices, but topology={topology} has {count}: choose'
      ' a mesh that uses all.'
    )
  if chip == 'cpu':
    sharding.simulate_devices(count)
    return sharding.make_mesh(data, model)
  if not installed():
    raise InputError(
      f"topology={topology} needs the TPU compiler: run pip install -e '.[tpu]', or plan for"
      ' simulated devices with topology cpu:8.'
    )
  without_a_tpu()
  try:
    with _LOADING:
      devices = topologies.get_topology_desc(topology, platform='tpu').devices
  except Exception as error:  # whatever the compiler's library raises for a shape it lacks
    first = str(error).splitlines()[0]
    raise InputError(
      f'topology={topology} is unknown to the TPU compiler ({first}); choose another.'
    ) from error
  if len(devices) != count:
    raise InputError(
      f'topology={topology} has {len(devices)} devices of {chip}, not {count}: choose another.'
    )
  devices = np.array(devices).reshape(data, model)
  return jax.sharding.Mesh(devices, (sharding.DATA, sharding.MODEL), (AxisType.Explicit,) * 2)


def with_stack(module: str) -> None:
  """Starts this command again where threads would have a small stack; call it before all else.

  The TPU compiler's own threads overflow the usual 8 MiB in large programs, and a process decides
  on that size when it starts.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
  unlimited = resource.RLIM_INFINITY
  small = soft == unlimited or soft < STACK  # without a limit threads get 2 MiB
  if small and (hard == unlimited or hard >= STACK):
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, hard))
    os.execv(sys.executable, [sys.executable, '-m', module, *sys.argv[1:]])
