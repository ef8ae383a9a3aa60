"""TPU kernels of the exact divergences: the vocabulary is streamed through on-chip memory (VMEM).

| function       | reads                             | returns                                   |
| -------------- | --------------------------------- | ----------------------------------------- |
| `fused`        | both logits once                  | normalisers of both sides, summed terms   |
| `sums`         | one side's logits once            | its normaliser                            |
| `terms_given`  | both logits once                  | summed terms, given both normalisers      |
| `linear_sums`  | hidden and head once              | the normaliser of hidden @ head.T         |
| `linear_terms` | hidden, head, rollout once        | summed terms, given both normalisers      |
| `linear_fused` | hidden, rollout once, head twice  | the policy's normaliser and the same      |

Positions are rows [N], the vocabulary [V] lies along the lanes. Everything is float32 inside. No
gradients are defined here. `interpret` runs a kernel on any backend, slowly. `tokens` are indices
into [V] below 2^24, -1 for none: their logits are picked on the way, 0 for none. Only the first
`real` entries of the vocabulary are tokens, the others are padding: a number that is known costs
nothing, that of a device's block, which is not, one comparison of each entry.

How: a block of rows meets one block of the vocabulary per grid step (`tiles`); sixteen rows at a
time walk over chunks of lanes (`lanes`). Rows beyond N and blocks beyond V hold arbitrary values:
they stay in rows that are dropped and in lanes read as -inf.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from trm_jax.divergences.passes import lanes, terms, tiles


def fused(
  policy_logits: Float[Array, 'N V'],
  rollout_logits: Float[Array, 'N W'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  full: bool = False,
  vocab_size: int | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  vmem_bytes: int | None = None,
) -> tuple[lanes.Sums, lanes.Sums, terms.Terms]:
  """(policy's sums, rollout's sums without `weighted`, summed terms), [N] float32, in one read.

  A block of whole rows of both sides stays in VMEM for its two passes. Where not even eight rows
  fit (float32 and V > 450,000 on 64 MiB), two kernels read the logits twice. A row with a NaN or
  without any finite logit has NaN terms.
  """
  rows, size = policy_logits.shape
  size = size if vocab_size is None else vocab_size
  width = tiles.up(size, tiles.LANES)
  bytes_a_row = width * (policy_logits.dtype.itemsize + rollout_logits.dtype.itemsize)
  # Every input has two buffers.
  most = (tiles.vmem_of(vmem_bytes) - tiles.SPARE_VMEM) // (2 * bytes_a_row)
  step = tiles.STEP if most >= tiles.STEP else 8
  if most < step:
    options = dict(real=size, interpret=interpret, chunk=chunk, vmem_bytes=vmem_bytes)
    q = sums(policy_logits, temperature, **options)
    p = sums(rollout_logits, temperature, weighted=False, **options)
    given = (q.top, jnp.log(q.total), p.top, jnp.log(p.total))
    return (
      q,
      p,
      terms_given(policy_logits, rollout_logits, *given, temperature, full=full, **options),
    )
  # Larger blocks than this would only delay the first step.
  block = max(6 * tiles.MIB // bytes_a_row // step, 1) * step
  block = min(block, most // step * step, 256, tiles.up(rows, step))
  whole = pl.BlockSpec((block, width), lambda i: (i, 0))
  scale, scale_spec = tiles.scalars(temperature)
  packed = tiles.call(
    functools.partial(
      _fused_kernel, scaled=len(scale), size=size, chunk=chunk, step=step, full=full
    ),
    [*scale, policy_logits, rollout_logits],
    grid=(pl.cdiv(rows, block),),
    in_specs=[*scale_spec, whole, whole],
    out_specs=pl.BlockSpec((block, tiles.LANES), lambda i: (i, 0)),
    out=(rows, tiles.LANES),
    semantics=('parallel',),
    vmem_bytes=2 * block * (bytes_a_row + 4 * tiles.LANES) + tiles.SPARE_VMEM,
    cost=tiles.cost(rows * size, (70, 4), rows * (bytes_a_row + 4 * tiles.LANES)),
    interpret=interpret,
  )
  columns = tiles.columns_of(packed, 5 + lanes.count(full))
  q, p = lanes.Sums(*columns[:3]), lanes.Sums(*columns[3:5])
  return q, p, terms.sound(terms.Terms(*columns[5:]), jnp.log(q.total), jnp.log(p.total))


def sums(
  logits: Float[Array, 'N V'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  tokens: Int[Array, 'N'] | None = None,
  weighted: bool = True,
  real: int | Int[Array, ''] | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] = (64, 8192),
  vmem_bytes: int | None = None,
) -> lanes.Sums:
  """Normaliser of softmax(logits / temperature), [N] float32, in one read.

  All -inf (one device's block of a vocabulary may be): top -inf, total 0, weighted 0. `block` is
  the rows and vocabulary entries of a grid step.
  """
  plan = tiles.plan([(logits,)], 2 + weighted, block, vmem_bytes, real=real)
  return _sums((logits,), plan, temperature, tokens, weighted, real, chunk, interpret)


def linear_sums(
  hidden: Float[Array, 'N D'],
  head: Float[Array, 'V D'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  tokens: Int[Array, 'N'] | None = None,
  weighted: bool = True,
  real: int | Int[Array, ''] | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] | None = None,
  vmem_bytes: int | None = None,
) -> lanes.Sums:
  """`sums` of hidden @ head.T, which exists only a block at a time in VMEM; [N] float32.

  As many rows of `hidden` stay in VMEM as fit; the head is streamed once for each such block.
  float32 products are exact to float32, bfloat16 products accumulate in float32.
  """
  plan = tiles.plan([(hidden, head)], 2 + weighted, block, vmem_bytes, real=real)
  return _sums((hidden, head), plan, temperature, tokens, weighted, real, chunk, interpret)


def terms_given(
  policy_logits: Float[Array, 'N V'],
  rollout_logits: Float[Array, 'N W'],
  top_q: Float[Array, 'N'],
  log_sq: Float[Array, 'N'],
  top_p: Float[Array, 'N'],
  log_sp: Float[Array, 'N'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  full: bool = False,
  real: int | Int[Array, ''] | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] = (64, 8192),
  vmem_bytes: int | None = None,
) -> terms.Terms:
  """Sums of `terms.pointwise` over these entries, [N] float32, in one read of both logits.

  `top_*` is the largest logit and `log_s*` the log of the sum of exp((logit - top) / temperature),
  both of the whole vocabulary. Rows where a `log_s*` is not finite are NaN.
  """
  sources = ((policy_logits,), (rollout_logits,))
  plan = tiles.plan(sources, lanes.count(full) + 1, block, vmem_bytes, real=real)
  given = (top_q, log_sq, top_p, log_sp)
  return _terms(sources, plan, given, temperature, None, full, real, chunk, interpret)[0]


def linear_terms(
  hidden: Float[Array, 'N D'],
  head: Float[Array, 'V D'],
  rollout: Float[Array, 'N W'] | tuple[Float[Array, 'N E'], Float[Array, 'W E']],
  top_q: Float[Array, 'N'],
  log_sq: Float[Array, 'N'],
  top_p: Float[Array, 'N'] | None,
  log_sp: Float[Array, 'N'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  tokens: Int[Array, 'N'] | None = None,
  full: bool = False,
  real: int | Int[Array, ''] | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] | None = None,
  vmem_bytes: int | None = None,
) -> tuple[terms.Terms, Float[Array, 'N'], Float[Array, 'N'] | None]:
  """(`terms_given`, sum of p, rollout's picked logits) of logits hidden @ head.T; [N] float32.

  `rollout` is the rollout's logits, or its (hidden, head). Without `top_p`, `log_sp` is the
  logsumexp of its logits over the temperature. The sum of p over the whole vocabulary is 1 where
  the given normaliser belongs to these logits.
  """
  sources = _sources(hidden, head, rollout)
  plan = tiles.plan(sources, lanes.count(full) + 1, block, vmem_bytes, real=real)
  given = (top_q, log_sq, top_p, log_sp)
  return _terms(sources, plan, given, temperature, tokens, full, real, chunk, interpret)


def linear_fused(
  hidden: Float[Array, 'N D'],
  head: Float[Array, 'V D'],
  rollout: Float[Array, 'N W'] | tuple[Float[Array, 'N E'], Float[Array, 'W E']],
  rollout_lse: Float[Array, 'N'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  tokens: Int[Array, 'N'] | None = None,
  full: bool = False,
  vocab_size: int | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] | None = None,
  vmem_bytes: int | None = None,
  cores: int | None = None,
) -> tuple[lanes.Sums, terms.Terms, Float[Array, 'N'], Float[Array, 'N'] | None]:
  """(policy's sums, *`linear_terms`), [N] float32, of logits hidden @ head.T.

  `rollout_lse` is the logsumexp of the rollout's logits over the temperature; rows where it is not
  finite have NaN terms. One kernel sweeps the vocabulary twice while `hidden` stays in VMEM. Where
  `linear_sums` and `linear_terms` read less, they run instead: two cores would each read the head
  twice.
  """
  sources, fields = _sources(hidden, head, rollout), lanes.count(full) + 1
  cores = tiles.cores_of(cores)
  plan = tiles.plan(
    sources, max(fields, 3), block, vmem_bytes, real=vocab_size, sweeps=2, cores=cores
  )
  others = (sources[:1], 3), (sources, fields)
  if plan.read(sources) > sum(
    tiles.plan(s, f, block, vmem_bytes, real=vocab_size).read(s) for s, f in others
  ):
    options = dict(
      tokens=tokens,
      real=vocab_size,
      interpret=interpret,
      chunk=chunk,
      block=block,
      vmem_bytes=vmem_bytes,
    )
    q = linear_sums(hidden, head, temperature, **options)
    given = q.top, jnp.log(q.total), None, rollout_lse
    return q, *linear_terms(hidden, head, rollout, *given, temperature, full=full, **options)
  picking = tokens is not None
  kernel = functools.partial(_linear_fused_kernel, chunk=chunk, full=full, tokens=picking)
  given = [rollout_lse, *_given(tokens)]
  options = max(fields, 3), lanes.PICKS + 3 + fields, temperature, None, interpret, (62, 3)
  columns = tiles.run(kernel, plan, sources, given, *options)[:, 0]
  picked = columns[: lanes.PICKS] if picking else [None, None]
  q = lanes.Sums(*columns[lanes.PICKS : lanes.PICKS + 3], picked[0])
  summed = columns[lanes.PICKS + 3 :]
  totals, p = _sound(terms.Terms(*summed[:-1]), jnp.log(q.total), rollout_lse, summed[-1])
  return q, totals, p, picked[1]


# Kernel bodies.


def _fused_kernel(*refs, scaled, size, chunk, step, full):
  inverse, _, (policy, rollout, out) = tiles.scalars_of(refs, scaled, False)

  def body(i, _):
    rows = pl.ds(pl.multiple_of(i * step, step), step)
    read = lambda *where: (lanes.read(policy, rows, *where), lanes.read(rollout, rows, *where))

    def exponentials(state, *where):
      pairs = zip(state, read(*where), strict=True)
      return [lanes.add_exponentials(s, x, inverse) for s, x in pairs]

    start = [lanes.nothing(step, True), lanes.nothing(step, False)]
    sums = lanes.fold(size, chunk, exponentials, start)
    q, p = (lanes.over_lanes(s, inverse) for s in sums)
    given = lanes.term_columns(q.top, jnp.log(q.total), p.top, jnp.log(p.total), inverse)
    given = lanes.wide(given)
    nothing = jnp.zeros((step, tiles.LANES), jnp.float32)
    totals = lanes.fold(
      size,
      chunk,
      lambda s, *where: lanes.add_terms(s, *read(*where), given, inverse, full),
      [nothing] * lanes.count(full),
    )
    columns = [*q[:3], *p[:2], *(t.sum(1, keepdims=True) for t in totals)]
    out[rows, :] = lanes.pack(nothing, columns)
    return _

  jax.lax.fori_loop(0, policy.shape[0] // step, body, None)


def _sums_kernel(*refs, plan, chunk, scaled, limited, weighted, tokens):
  inverse, real, refs = tiles.scalars_of(refs, scaled, limited)
  sources, (*given, out, state), buffers = plan.split(refs)
  s, t, j = (pl.program_id(k) for k in (0, 2, 3))
  block, fields = plan.block(s, t, j), 2 + weighted

  @pl.when(j == 0)
  def _():
    lanes.reset(state)
    out[...] = jnp.zeros_like(out)

  picks = [lanes.picks(out, *given, block * plan.block_size, chunk, 0)] if tokens else []
  left = None if real is None else real - block * plan.block_size
  exponentials = lanes.exponentials(state, fields, chunk, inverse, left)
  plan.walk(block, sources, buffers, exponentials, *picks)

  @tiles.by_step(plan.block_rows, j == plan.grid[3] - 1)
  def _(rows):
    q = lanes.over_lanes(lanes.Sums(*(state[k, rows, :] for k in range(fields))), inverse)
    out[rows, :] = lanes.pack(out[rows, :], q[:fields], lanes.PICKS)


def _terms_kernel(*refs, plan, chunk, scaled, limited, full, tokens):
  inverse, real, refs = tiles.scalars_of(refs, scaled, limited)
  sources, (given, out, state), buffers = plan.split(refs)
  s, t, j = (pl.program_id(k) for k in (0, 2, 3))
  block = plan.block(s, t, j)

  @pl.when(j == 0)
  def _():
    state[...] = jnp.zeros_like(state)
    out[...] = jnp.zeros_like(out)

  picks = [lanes.picks(out, given, block * plan.block_size, chunk, 1)] if tokens else []
  left = None if real is None else real - block * plan.block_size
  summands = lanes.summands(state, given, 0, chunk, inverse, full, left)
  plan.walk(block, sources, buffers, summands, *picks)

  @tiles.by_step(plan.block_rows, j == plan.grid[3] - 1)
  def _(rows):
    columns = [state[k, rows, :].sum(1, keepdims=True) for k in range(lanes.count(full) + 1)]
    out[rows, :] = lanes.pack(out[rows, :], columns, lanes.PICKS)


def _linear_fused_kernel(*refs, plan, chunk, scaled, limited, full, tokens):
  inverse, _, refs = tiles.scalars_of(refs, scaled, limited)
  # Between the sweeps, `out` holds the policy's sums and `lanes.term_columns` of both sides.
  sources, (given, out, state), buffers = plan.split(refs)
  s, t, j = (pl.program_id(k) for k in (0, 2, 3))
  block, last = plan.block(s, t, j), plan.grid[3] - 1
  pl.when((t == 0) & (j == 0))(lambda: lanes.reset(state))

  @pl.when(t == 0)
  def _():
    plan.walk(block, sources[:1], buffers[:1], lanes.exponentials(state, 3, chunk, inverse))

  @tiles.by_step(plan.block_rows, (t == 0) & (j == last))
  def _(rows):
    q = lanes.over_lanes(lanes.Sums(*(state[k, rows, :] for k in range(3))), inverse)
    sides = lanes.term_columns(q.top, jnp.log(q.total), None, given[rows, :1], inverse)
    nothing = jnp.zeros((tiles.STEP, tiles.LANES), jnp.float32)
    out[rows, :] = lanes.pack(nothing, [*q[:3], *sides], lanes.PICKS)
    for k in range(state.shape[0]):
      state[k, rows, :] = nothing

  picks = [lanes.picks(out, given, block * plan.block_size, chunk, 0, 1)] if tokens else []
  summands = lanes.summands(state, out, lanes.PICKS + 3, chunk, inverse, full)
  pl.when(t == 1)(lambda: plan.walk(block, sources, buffers, summands, *picks))

  @tiles.by_step(plan.block_rows, (t == 1) & (j == last))
  def _(rows):
    columns = [state[k, rows, :].sum(1, keepdims=True) for k in range(lanes.count(full) + 1)]
    out[rows, :] = lanes.pack(out[rows, :], columns, lanes.PICKS + 3)


def _sources(hidden, head, rollout):
  return (hidden, head), rollout if isinstance(rollout, tuple) else (rollout,)


def _sums(source, plan, temperature, tokens, weighted, real, chunk, interpret):
  picking, fields = tokens is not None, 2 + weighted
  kernel = functools.partial(_sums_kernel, chunk=chunk, weighted=weighted, tokens=picking)
  options = fields, lanes.PICKS + fields, temperature, real, interpret, (12, 1)
  columns = tiles.run(kernel, plan, [source], _given(tokens), *options)
  picked = columns[0] if picking else None
  sums = [*columns[lanes.PICKS :], None][:3]
  return lanes.merge(lanes.Sums(*sums, picked), 0, tiles.inverse(temperature))


def _terms(sources, plan, given, temperature, tokens, full, real, chunk, interpret):
  kernel = functools.partial(_terms_kernel, chunk=chunk, full=full, tokens=tokens is not None)
  columns = [*lanes.term_columns(*given, tiles.inverse(temperature)), *_given(tokens)]
  fields = lanes.count(full) + 1
  options = fields, lanes.PICKS + fields, temperature, real, interpret, (50, 2)
  totals = tiles.run(kernel, plan, sources, columns, *options).sum(1)
  summed, p = _sound(terms.Terms(*totals[lanes.PICKS : -1]), given[1], given[3], totals[-1])
  return summed, p, None if tokens is None else totals[1]


def _given(tokens):
  return [] if tokens is None else [tokens]


def _sound(totals, log_sq, log_sp, mass):
  """`terms.sound` of the summed terms and of the sum of p."""
  totals = terms.sound(totals, log_sq, log_sp)
  return totals, jnp.where(jnp.isnan(totals.tv), jnp.nan, mass)
