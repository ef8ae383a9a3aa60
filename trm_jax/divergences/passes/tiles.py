"""How TPU kernels cut their arrays into blocks of on-chip memory (VMEM), and how they are called.

A source of logits is (logits,) or (hidden, head), whose product exists one block at a time. The
grid is (share of the vocabulary, block of rows, sweep, block of the share). Each share has its own
output, so that two cores between them read every block of a head once. A second sweep runs
backwards, so that the block where the first one ended is not read again, and only in it are the
sources after the first needed. Blocks move when their index changes; all else follows from that.
Sums per lane stay in scratch; what is written is one row of lanes for each row and share.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import layout
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

LANES = 128
# Rows worked on together: they fill one register of bfloat16, two of float32.
STEP = 16
MIB = 2**20
# Left to the compiler for spilled registers and its own buffers.
SPARE_VMEM = 6 * MIB
# Of every generation from v5 on; the device says it where there is one.
_LEAST_VMEM = 64 * MIB
# Rows and vocabulary entries of one matrix product.
_PRODUCT = 512


class Plan(NamedTuple):
  """Blocks of one kernel call.

  Attributes:
    rows, size: positions and vocabulary entries.
    block_rows, block_size: those of a grid step.
    product_rows: rows whose logits are computed at a time; STEP where no source is a product.
    shares: parts of the vocabulary that different cores may take.
    sweeps: times that a block of rows meets the vocabulary, 1 or 2; with 2, there is one share.
    linear: which sources are products.
    vmem: bytes the kernel may take.
  """

  rows: int
  size: int
  block_rows: int
  block_size: int
  product_rows: int
  shares: int
  sweeps: int
  linear: tuple[bool, ...]
  vmem: int

  @property
  def blocks(self) -> int:
    return pl.cdiv(self.size, self.block_size)

  @property
  def grid(self) -> tuple[int, int, int, int]:
    rows = pl.cdiv(self.rows, self.block_rows)
    return self.shares, rows, self.sweeps, pl.cdiv(self.blocks, self.shares)

  def block(self, s, t, j):
    """Block of the vocabulary at a place of the grid; one too many where a share lacks one."""
    return s * self.grid[3] + j + t * (self.grid[3] - 1 - 2 * j)

  def specs(self, sources):
    # A share that is one block short repeats its last one, which costs no read.
    repeat = lambda block: jnp.minimum(block, self.blocks - 1)
    # Before the second sweep, sources after the first wait at its first block.
    wait = lambda s, t, j: repeat(self.block(s, 1, t * j))
    go = lambda s, t, j: repeat(self.block(s, t, j))
    for k, source in enumerate(sources):
      entry = wait if k > 0 and self.sweeps == 2 else go
      if len(source) == 1:
        yield pl.BlockSpec(
          (self.block_rows, self.block_size), lambda s, i, t, j, at=entry: (i, at(s, t, j))
        )
        continue
      width = source[0].shape[1]
      # Changes so rarely that a second buffer would only halve the rows that fit.
      once = pl.Buffered(1)
      yield pl.BlockSpec((self.block_rows, width), lambda s, i, t, j: (i, 0), pipeline_mode=once)
      yield pl.BlockSpec((self.block_size, width), lambda s, i, t, j, at=entry: (at(s, t, j), 0))

  def read(self, sources) -> int:
    """Bytes of the sources that are read."""
    shares, rows, sweeps, _ = self.grid
    total = 0
    for k, source in enumerate(sources):
      times = [1]
      if len(source) == 2:
        times = [shares if rows > 1 else 1, rows * (sweeps if k == 0 else 1)]
      total += sum(n * x.size * x.dtype.itemsize for x, n in zip(source, times, strict=True))
    return total

  def scratch(self):
    return [pltpu.VMEM((self.product_rows, self.block_size), jnp.float32)] * sum(self.linear)

  def split(self, refs):
    """(references of each source, those between, one logits buffer or None a source)."""
    refs = list(refs)
    buffers = [refs.pop() if is_linear else None for is_linear in self.linear]
    sources = [[refs.pop(0) for _ in range(1 + is_linear)] for is_linear in self.linear]
    return sources, refs, buffers

  def walk(self, block, sources, buffers, *bodies):
    """Each body(valid lanes, output rows, [(reference of logits, its rows)]), STEP rows a time."""

    def group(width, g):
      first = g * self.product_rows
      for source, buffer in zip(sources, buffers, strict=True):
        if buffer is not None:
          hidden = source[0][pl.ds(pl.multiple_of(first, STEP), self.product_rows), :]
          buffer[...] = _product(hidden, source[1][...])

      def step(k, _):
        near = pl.ds(pl.multiple_of(k * STEP, STEP), STEP)
        rows = pl.ds(pl.multiple_of(first + k * STEP, STEP), STEP)
        pairs = zip(sources, buffers, strict=True)
        views = [(s[0], rows) if b is None else (b, near) for s, b in pairs]
        for body in bodies:
          body(width, rows, views)

      jax.lax.fori_loop(0, self.product_rows // STEP, step, None)

    def groups(width):
      count = self.block_rows // self.product_rows
      jax.lax.fori_loop(0, count, lambda g, _: group(width, g), None)

    last = self.size - (self.blocks - 1) * self.block_size
    pl.when(block < self.blocks - (last < self.block_size))(lambda: groups(self.block_size))
    if last < self.block_size:
      pl.when(block == self.blocks - 1)(lambda: groups(last))


def plan(
  sources,
  fields: int,
  block: tuple[int, int] | None,
  vmem_bytes: int | None,
  *,
  real: int | Array | None = None,
  sweeps: int = 1,
  cores: int = 1,
) -> Plan:
  """Blocks for `sources` and `fields` sums a row: of `block` = (rows, entries), or what fits.

  Of the vocabulary only the first `real` entries are read, where that is a known number.

  Of two sweeps each of the `cores` takes other rows.
  """
  linear = tuple(len(source) == 2 for source in sources)
  rows, size = sources[0][0].shape[0], sources[0][-1].shape[0 if linear[0] else 1]
  size = min(size, real) if isinstance(real, int) else size
  vmem = vmem_of(vmem_bytes)
  # The output and what is given of each row have two buffers, the sums one.
  block_rows, block_size = block or _fit(sources, fields + 4, rows, vmem - SPARE_VMEM, cores)
  block_size = min(up(block_size, LANES), up(size, LANES))
  product_rows = STEP
  if any(linear):
    product_rows = up(min(_PRODUCT, block_rows, rows), STEP)
  block_rows = up(min(block_rows, rows), product_rows)
  shares = 2 if any(linear) and size > block_size and sweeps == 1 else 1
  return Plan(rows, size, block_rows, block_size, product_rows, shares, sweeps, linear, vmem)


def _fit(sources, columns, rows, most, cores):
  """(rows, entries) of a block of a head: so that the head is read as few times as possible."""
  linear = [s for s in sources if len(s) == 2]
  width = lambda x: up(x.shape[1], LANES) * x.dtype.itemsize
  # Blocks of logits have two buffers, as those of a head.
  an_entry = sum(2 * width(head) + 4 * _PRODUCT for _, head in linear)
  a_pair = sum(2 * s[0].dtype.itemsize for s in sources if len(s) == 1)
  a_row = sum(width(hidden) for hidden, _ in linear) + 4 * LANES * columns

  def passes(size):
    fitting = (most - size * an_entry) // (a_row + size * a_pair) // _PRODUCT * _PRODUCT
    return up(pl.cdiv(rows, max(fitting, LANES)), cores)

  size = min((_PRODUCT, _PRODUCT // 2, LANES), key=passes)
  return pl.cdiv(rows, passes(size)), size


def _product(hidden, head):
  """hidden @ head.T in float32: exact for float32 operands, one pass for bfloat16."""
  exact = jnp.float32 in (hidden.dtype, head.dtype)
  if exact:
    hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
  return jax.lax.dot_general(
    hidden,
    head,
    (((1,), (1,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )


def by_step(rows: int, when):
  """Runs the decorated function of each STEP of a kernel's `rows` if `when`."""

  def run(body):
    step = lambda i, _: body(pl.ds(pl.multiple_of(i * STEP, STEP), STEP))
    pl.when(when)(lambda: jax.lax.fori_loop(0, rows // STEP, step, None))

  return run


def up(n: int, multiple: int) -> int:
  """n, rounded up."""
  return -(-n // multiple) * multiple


def vmem_of(vmem_bytes: int | None) -> int:
  """Bytes of VMEM of a core: as given, of the device traced for, or what every recent TPU has."""
  if vmem_bytes is not None:
    return vmem_bytes
  try:
    return pltpu.get_tpu_info().vmem_capacity_bytes
  except ValueError:  # traced where there is no TPU
    return _LEAST_VMEM


def cores_of(cores: int | None) -> int:
  """Cores that work on one kernel: as given, of the device traced for, or 1."""
  if cores is not None:
    return cores
  try:
    return pltpu.get_tpu_info().num_cores
  except ValueError:
    return 1


def inverse(temperature):
  """1 / temperature, a plain 1.0 where it is 1 or None: multiplying by that costs nothing."""
  if temperature is None or (isinstance(temperature, int | float) and temperature == 1):
    return 1.0
  return 1 / jnp.asarray(temperature, jnp.float32)


def scalars(temperature, real=None):
  """Operands and specifications of the inverse of the temperature and of `real`.

  None of an inverse that is plainly 1 and of a `real` that is not an array.
  """
  known = [x for x in (inverse(temperature), real) if isinstance(x, Array)]
  spec = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
  return [x.reshape(1, 1) for x in known], [spec] * len(known)


def scalars_of(refs, scaled, limited):
  """(inverse of the temperature, `real` or None, the other references)."""
  inverse = refs[0][0, 0] if scaled else 1.0
  real = refs[scaled][0, 0] if limited else None
  return inverse, real, refs[scaled + limited :]


def run(kernel, plan, sources, given, fields, columns, temperature, real, interpret, work):
  """[columns, shares, N]: what a kernel packs from its `fields` sums per lane. `work`: see `cost`.

  `given` is [columns of each row of N], or empty.
  """
  numbers, number_specs = scalars(temperature, real)
  scaled = not isinstance(inverse(temperature), float)
  given = [jnp.stack([x.astype(jnp.float32) for x in given], 1)] if given else []
  given_spec = [pl.BlockSpec((plan.block_rows, x.shape[1]), lambda s, i, *_: (i, 0)) for x in given]
  sums = fields, plan.block_rows, LANES
  out = plan.shares, plan.rows, LANES
  products = [s for s in sources if len(s) == 2]
  depth = sum(s[0].shape[1] for s in [*products, *products[: plan.sweeps - 1]])
  packed = call(
    functools.partial(kernel, plan=plan, scaled=scaled, limited=len(numbers) > scaled),
    [*numbers, *(x for s in sources for x in s), *given],
    grid=plan.grid,
    in_specs=[*number_specs, *plan.specs(sources), *given_spec],
    out_specs=pl.BlockSpec((None, *sums[1:]), lambda s, i, t, j: (s, i, 0)),
    out=out,
    scratch_shapes=[pltpu.VMEM(sums, jnp.float32), *plan.scratch()],
    semantics=('parallel', 'parallel', 'arbitrary', 'arbitrary'),
    vmem_bytes=plan.vmem,
    cost=cost(
      plan.rows * plan.size,
      (work[0] + 2 * depth, work[1]),
      plan.read(sources) + 4 * math.prod(out),
    ),
    interpret=interpret,
  )
  return columns_of(packed, columns)


def columns_of(packed, count: int):
  """[count, ...] of [..., N, 128]: the first `count` lanes, each as an array of its own.

  The layout has them all copied in one read; slices would each read 512 bytes a row.
  """
  columns = jnp.moveaxis(packed[..., :count], -1, 0)
  rows_last = layout.Layout(major_to_minor=tuple(range(columns.ndim)))
  return layout.with_layout_constraint(columns, rows_last)


def cost(entries, work, moved):
  """What the compiler is told of a kernel; `work` is (operations, exponentials) per entry."""
  return pl.CostEstimate(
    flops=entries * work[0], bytes_accessed=moved, transcendentals=entries * work[1]
  )


def call(kernel, operands, *, out, semantics, vmem_bytes, cost, interpret, **layout):
  """`pallas_call` whose float32 output varies over every mesh axis that an operand varies over."""
  axes = (jax.typeof(x).manual_axis_type.varying for x in operands)
  kind = jax.sharding.ManualAxisType(varying=frozenset().union(*axes))
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(out, jnp.float32, manual_axis_type=kind),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=semantics, vmem_limit_bytes=vmem_bytes
    ),
    cost_estimate=cost,
    interpret=interpret,
    **layout,
  )(*operands)
