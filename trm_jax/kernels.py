"""TPU kernels of the exact divergences: the vocabulary is streamed through on-chip memory (VMEM).

| function       | reads                             | returns                                   |
| -------------- | --------------------------------- | ----------------------------------------- |
| `fused`        | both logits once                  | normalisers of both sides, summed terms   |
| `sums`         | one side's logits once            | its normaliser                            |
| `terms_given`  | both logits once                  | summed terms, given both normalisers      |
| `linear_sums`  | hidden and head once              | the normaliser of hidden @ head.T         |
| `linear_terms` | hidden, head, rollout once        | summed terms, given both normalisers      |

Positions are rows [N], the vocabulary [V] lies along the lanes. Everything is float32 inside. No
gradients are defined here. `interpret` runs a kernel on any backend, slowly.

How: a block of rows meets one block of the vocabulary per grid step; sixteen rows at a time walk
over chunks of lanes, and every running sum is kept per lane, so that nothing crosses lanes inside
the loop. Lanes beyond the vocabulary are read as -inf, which adds 0 to every sum. Rows beyond N and
blocks beyond V hold arbitrary values: they stay in rows that are dropped and in lanes read as -inf.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from trm_jax import terms, tiles


class Sums(NamedTuple):
  """The normaliser of one distribution, centred so that it never overflows.

  Attributes:
    top: largest logit; -inf where all are.
    total: sum exp(x) of x = (logit - top) / temperature, in [1, V]; 0 where all logits are -inf.
    weighted: sum exp(x) x <= 0, from which the entropy follows; None where not asked for.
  """

  top: Float[Array, '*s']
  total: Float[Array, '*s']
  weighted: Float[Array, '*s'] | None = None


def merge(parts: Sums, axis: int | tuple[int, ...], inverse: float | Array = 1.0) -> Sums:
  """Normaliser of a vocabulary from those of its parts, stacked along `axis`; float32.

  `inverse` is 1 / temperature.
  """
  top = parts.top.max(axis, keepdims=True)
  shift = (parts.top - terms.finite(top)) * inverse
  scale = jnp.exp(shift)
  weighted = None
  if parts.weighted is not None:
    moved = parts.weighted + terms.weighted(parts.total, shift)
    weighted = (moved * scale).sum(axis)
  return Sums(top.squeeze(axis), (parts.total * scale).sum(axis), weighted)


def fused(
  policy_logits: Float[Array, 'N V'],
  rollout_logits: Float[Array, 'N V'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  full: bool = False,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  vmem_bytes: int | None = None,
) -> tuple[Sums, Sums, terms.Terms]:
  """(policy's sums, rollout's sums without `weighted`, summed terms), [N] float32, in one read.

  A block of whole rows of both sides stays in VMEM for its two passes. Where not even eight rows
  fit (float32 and V > 450,000 on 64 MiB), two kernels read the logits twice. A row with a NaN or
  without any finite logit has NaN terms.
  """
  rows, size = policy_logits.shape
  width = tiles.up(size, tiles.LANES)
  bytes_a_row = width * (policy_logits.dtype.itemsize + rollout_logits.dtype.itemsize)
  # Every input has two buffers.
  most = (tiles.vmem_of(vmem_bytes) - tiles.SPARE_VMEM) // (2 * bytes_a_row)
  step = tiles.STEP if most >= tiles.STEP else 8
  if most < step:
    options = dict(interpret=interpret, chunk=chunk, vmem_bytes=vmem_bytes)
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
  scale, scale_spec = tiles.scale(temperature)
  found = tiles.call(
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
  columns = [found[:, k] for k in range(5 + _count(full))]
  q, p = Sums(*columns[:3]), Sums(*columns[3:5])
  return q, p, _sound(terms.Terms(*columns[5:]), jnp.log(q.total), jnp.log(p.total))[0]


def sums(
  logits: Float[Array, 'N V'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  weighted: bool = True,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] = (64, 8192),
  vmem_bytes: int | None = None,
) -> Sums:
  """Normaliser of softmax(logits / temperature), [N] float32, in one read.

  All -inf (one device's block of a vocabulary may be): top -inf, total 0, weighted 0. `block` is
  the rows and vocabulary entries of a grid step.
  """
  plan = tiles.plan([(logits,)], 2 + weighted, block, vmem_bytes)
  return _sums((logits,), plan, temperature, weighted, chunk, interpret)


def linear_sums(
  hidden: Float[Array, 'N D'],
  head: Float[Array, 'V D'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  weighted: bool = True,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] | None = None,
  vmem_bytes: int | None = None,
) -> Sums:
  """`sums` of hidden @ head.T, which exists only a block at a time in VMEM; [N] float32.

  As many rows of `hidden` stay in VMEM as fit; the head is streamed once for each such block.
  float32 products are exact to float32, bfloat16 products accumulate in float32.
  """
  plan = tiles.plan([(hidden, head)], 2 + weighted, block, vmem_bytes)
  return _sums((hidden, head), plan, temperature, weighted, chunk, interpret)


def terms_given(
  policy_logits: Float[Array, 'N V'],
  rollout_logits: Float[Array, 'N V'],
  top_q: Float[Array, 'N'],
  log_sq: Float[Array, 'N'],
  top_p: Float[Array, 'N'],
  log_sp: Float[Array, 'N'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  full: bool = False,
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
  plan = tiles.plan(sources, _count(full) + 1, block, vmem_bytes)
  given = (top_q, log_sq, top_p, log_sp)
  return _terms(sources, plan, given, temperature, full, chunk, interpret)[0]


def linear_terms(
  hidden: Float[Array, 'N D'],
  head: Float[Array, 'V D'],
  rollout: Float[Array, 'N V'] | tuple[Float[Array, 'N E'], Float[Array, 'V E']],
  top_q: Float[Array, 'N'],
  log_sq: Float[Array, 'N'],
  top_p: Float[Array, 'N'],
  log_sp: Float[Array, 'N'],
  temperature: float | Float[Array, ''] | None = None,
  *,
  full: bool = False,
  interpret: bool | pltpu.InterpretParams = False,
  chunk: int = 1024,
  block: tuple[int, int] | None = None,
  vmem_bytes: int | None = None,
) -> tuple[terms.Terms, Float[Array, 'N']]:
  """(`terms_given`, sum of p) of the policy's logits hidden @ head.T; [N] float32.

  `rollout` is the rollout's logits, or its (hidden, head). The sum of p over the whole vocabulary
  is 1 where the given rollout normaliser belongs to the rollout's logits.
  """
  sources = ((hidden, head), rollout if isinstance(rollout, tuple) else (rollout,))
  plan = tiles.plan(sources, _count(full) + 1, block, vmem_bytes)
  given = (top_q, log_sq, top_p, log_sp)
  return _terms(sources, plan, given, temperature, full, chunk, interpret)


# Kernel bodies. References carry the rows first and the lanes last.


def _lanes(width, chunk, step, state):
  """Folds step(state, first lane, lanes, valid lanes or None) over `width`, the ragged end last."""
  chunk = min(chunk, tiles.up(width, tiles.LANES))
  whole, rest = divmod(width, chunk)
  if whole:
    body = lambda i, s: step(s, pl.multiple_of(i * chunk, tiles.LANES), chunk, None)
    state = body(0, state) if whole == 1 else jax.lax.fori_loop(0, whole, body, state)
  if rest:
    state = step(
      state, whole * chunk, tiles.up(rest, tiles.LANES), rest if rest % tiles.LANES else None
    )
  return state


def _read(ref, rows, start, size, valid):
  """float32 logits as pieces [rows, 128]; -inf from lane `valid` on."""
  x = ref[rows, pl.ds(start, size)].astype(jnp.float32)
  if valid is not None:
    x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < valid, x, -jnp.inf)
  return [x[:, i : i + tiles.LANES] for i in range(0, size, tiles.LANES)]


def _nothing(rows, weighted):
  zero = jnp.zeros((rows, tiles.LANES), jnp.float32)
  return Sums(jnp.full_like(zero, -jnp.inf), zero, zero if weighted else None)


def _add_exponentials(state, pieces, inverse):
  """`state`, kept per lane, with one more chunk of logits."""
  top = functools.reduce(jnp.maximum, pieces, state.top)
  centre = terms.finite(top)
  shift = (state.top - centre) * inverse
  total, more = state.total * jnp.exp(shift), state.weighted
  if more is not None:
    more = (more + terms.weighted(state.total, shift)) * jnp.exp(shift)
  for x in pieces:
    b = (x - centre) * inverse
    v = jnp.exp(b)
    total = total + v
    if more is not None:
      more = more + terms.weighted(v, b)
  return Sums(top, total, more)


def _given(top_q, log_sq, top_p, log_sp, inverse):
  """What the terms need of both normalisers."""
  sides = terms.finite(top_q), jnp.exp(-log_sq), terms.finite(top_p), jnp.exp(-log_sp)
  return *sides, *terms.odds(top_q, log_sq, top_p, log_sp, inverse), log_sq


# Columns of the above.
_GIVEN = 8


def _add_terms(state, pieces_q, pieces_p, given, inverse, full):
  """[summed terms..., sum of p where kept], per lane, with one more chunk of logits."""
  centre_q, weight_q, centre_p, weight_p, *odds, log_sq = given
  for b, a in zip(pieces_q, pieces_p, strict=True):
    x = (b - centre_q) * inverse
    q, p = jnp.exp(x) * weight_q, jnp.exp((a - centre_p) * inverse) * weight_p
    d = terms.log_odds(b, a, *odds, inverse)
    found = terms.pointwise(d, b, a, q, p, x - log_sq if full else None)
    found = *found[: _count(full)], p
    state = [s + t for s, t in zip(state, found[: len(state)], strict=True)]
  return state


def _wide(columns, rows):
  return [jnp.broadcast_to(x, (rows, tiles.LANES)) for x in columns]


def _fused_kernel(*refs, scaled, size, chunk, step, full):
  inverse, (policy, rollout, out) = tiles.scale_of(refs, scaled)
  lane = jax.lax.broadcasted_iota(jnp.int32, (step, tiles.LANES), 1)

  def body(i, _):
    rows = pl.ds(pl.multiple_of(i * step, step), step)
    read = lambda *where: (_read(policy, rows, *where), _read(rollout, rows, *where))

    def exponentials(state, *where):
      return [_add_exponentials(s, x, inverse) for s, x in zip(state, read(*where), strict=True)]

    found = _lanes(size, chunk, exponentials, [_nothing(step, True), _nothing(step, False)])
    # Over the lanes, [rows, 1].
    q, p = (jax.tree.map(lambda x: x[:, None], merge(s, 1, inverse)) for s in found)
    given = _given(q.top, jnp.log(q.total), p.top, jnp.log(p.total), inverse)
    given = _wide(given, step)
    found = _lanes(
      size,
      chunk,
      lambda s, *where: _add_terms(s, *read(*where), given, inverse, full),
      [jnp.zeros((step, tiles.LANES), jnp.float32)] * _count(full),
    )
    columns = [*q, *p[:2], *(t.sum(1, keepdims=True) for t in found)]
    # One value a row and quantity: they share a row of lanes, so that one block is written.
    packed = jnp.zeros((step, tiles.LANES), jnp.float32)
    for k, column in enumerate(columns):
      packed = jnp.where(lane == k, column, packed)
    out[rows, :] = packed
    return _

  jax.lax.fori_loop(0, policy.shape[0] // step, body, None)


def _sums_kernel(*refs, plan, chunk, scaled):
  inverse, refs = tiles.scale_of(refs, scaled)
  (source,), (out,), buffers = plan.split(refs)
  fields = out.shape[1]

  def body(width, out_rows, views):
    ((ref, rows),) = views
    state = Sums(*(out[0, k, out_rows, :] for k in range(fields)))
    add = lambda s, *where: _add_exponentials(s, _read(ref, rows, *where), inverse)
    state = _lanes(width, chunk, add, state)
    for k in range(fields):
      out[0, k, out_rows, :] = state[k]

  @pl.when(pl.program_id(2) == 0)
  def _():
    out[...] = jnp.zeros_like(out)
    out[0, 0] = jnp.full(out.shape[2:], -jnp.inf, jnp.float32)

  plan.walk([source], buffers, body)


def _terms_kernel(*refs, plan, chunk, scaled, full):
  inverse, refs = tiles.scale_of(refs, scaled)
  sources, (given, out), buffers = plan.split(refs)
  fields = _count(full) + 1

  def body(width, out_rows, views):
    (policy, rows_q), (rollout, rows_p) = views
    columns = given[out_rows, :]
    wide = _wide((columns[:, k : k + 1] for k in range(_GIVEN)), tiles.STEP)

    def add(state, *where):
      pieces = _read(policy, rows_q, *where), _read(rollout, rows_p, *where)
      return _add_terms(state, *pieces, wide, inverse, full)

    state = _lanes(width, chunk, add, [out[0, k, out_rows, :] for k in range(fields)])
    for k in range(fields):
      out[0, k, out_rows, :] = state[k]

  @pl.when(pl.program_id(2) == 0)
  def _():
    out[...] = jnp.zeros_like(out)

  plan.walk(sources, buffers, body)


def _count(full):
  return 5 if full else 2


def _sums(source, plan, temperature, weighted, chunk, interpret):
  kernel = functools.partial(_sums_kernel, chunk=chunk)
  found = tiles.run(kernel, plan, [source], [], 2 + weighted, temperature, interpret, (12, 1))
  parts = Sums(*(found[:, k] for k in range(2 + weighted)))
  return merge(parts, (0, 2), tiles.inverse(temperature))


def _terms(sources, plan, given, temperature, full, chunk, interpret):
  kernel = functools.partial(_terms_kernel, chunk=chunk, full=full)
  columns = [jnp.stack(_given(*given, tiles.inverse(temperature)), 1)]
  fields = _count(full) + 1
  found = tiles.run(kernel, plan, sources, columns, fields, temperature, interpret, (50, 2))
  found = found.sum((0, 3))
  *summed, p = (found[k] for k in range(fields))
  return _sound(terms.Terms(*summed), given[1], given[3], p)


def _sound(found, log_sq, log_sp, *others):
  """nan in every output of a row without a distribution: a maximum may have dropped it in some."""
  sound = jnp.isfinite(log_sq) & jnp.isfinite(log_sp) & ~jnp.isnan(found.tv)
  return jax.tree.map(lambda x: jnp.where(sound, x, jnp.nan), (found, *others))
