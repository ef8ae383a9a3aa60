"""What the TPU kernels do in registers: running sums over the vocabulary, one for each lane.

References to logits carry the rows first and the lanes last; nothing crosses lanes before `merge`,
`pack` or `picks`. Lanes beyond the vocabulary are read as -inf, which adds 0 to every sum.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from trm_jax.divergences.passes import terms, tiles


class Sums(NamedTuple):
  """The normaliser of one distribution, centred so that it never overflows.

  Attributes:
    top: largest logit; -inf where all are.
    total: sum exp(x) of x = (logit - top) / temperature, in [1, V]; 0 where all logits are -inf.
    weighted: sum exp(x) x <= 0, from which the entropy follows; None where not asked for.
    picked: logit of a token, 0 where these logits lack it; None where not asked for.
  """

  top: Float[Array, '*s']
  total: Float[Array, '*s']
  weighted: Float[Array, '*s'] | None = None
  picked: Float[Array, '*s'] | None = None


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
  picked = None if parts.picked is None else parts.picked.sum(axis)
  return Sums(top.squeeze(axis), (parts.total * scale).sum(axis), weighted, picked)


def fold(width, chunk, step, state):
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


def read(ref, rows, start, size, valid, left=None):
  """float32 logits as pieces [rows, 128]; -inf from lane `valid` on and from entry `left` on."""
  x = ref[rows, pl.ds(start, size)].astype(jnp.float32)
  if valid is not None:
    x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < valid, x, -jnp.inf)
  if left is not None:
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    x = jnp.where(lane + start < left, x, -jnp.inf)
  return [x[:, i : i + tiles.LANES] for i in range(0, size, tiles.LANES)]


def nothing(rows, weighted):
  """`Sums` of no logits."""
  zero = jnp.zeros((rows, tiles.LANES), jnp.float32)
  return Sums(jnp.full_like(zero, -jnp.inf), zero, zero if weighted else None)


def add_exponentials(state, pieces, inverse):
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


def add_picked(state, pieces, place):
  """`state` with the logit in lane `place` of one more chunk, in its own lane; -1 picks none."""
  lane = jax.lax.broadcasted_iota(jnp.int32, place.shape, 1)
  for i, x in enumerate(pieces):
    state = jnp.where(lane == place - i * tiles.LANES, x, state)
  return state


def over_lanes(state, inverse):
  """`Sums` of whole rows, [rows, 1], from those per lane."""
  return jax.tree.map(lambda x: x[:, None], merge(state, 1, inverse))


def term_columns(top_q, log_sq, top_p, log_sp, inverse):
  """What the terms need of both normalisers.

  Without `top_p`, `log_sp` is the logsumexp of the rollout. It is split so that both `log_s*` are
  the same: what makes the sides differ is then found as well as from their largest logits.
  """
  if top_p is None:
    top_p, log_sp = (log_sp - log_sq) / inverse, log_sq
  sides = terms.finite(top_q), jnp.exp(-log_sq), terms.finite(top_p), jnp.exp(-log_sp)
  return *sides, *terms.odds(top_q, log_sq, top_p, log_sp, inverse), log_sq


# How many these are.
TERM_COLUMNS = 8


def count(full):
  """Divergences that are summed."""
  return 5 if full else 2


def add_terms(state, pieces_q, pieces_p, columns, inverse, full):
  """[summed terms..., sum of p where kept], per lane, with one more chunk of logits."""
  centre_q, weight_q, centre_p, weight_p, *odds, log_sq = columns
  for b, a in zip(pieces_q, pieces_p, strict=True):
    x = (b - centre_q) * inverse
    q, p = jnp.exp(x) * weight_q, jnp.exp((a - centre_p) * inverse) * weight_p
    d = terms.log_odds(b, a, *odds, inverse)
    summands = terms.pointwise(d, b, a, q, p, x - log_sq if full else None)
    summands = *summands[: count(full)], p
    state = [s + t for s, t in zip(state, summands[: len(state)], strict=True)]
  return state


def wide(columns):
  """Columns [rows, 1] over all lanes."""
  return [jnp.broadcast_to(x, (x.shape[0], tiles.LANES)) for x in columns]


def pack(packed, columns, first=0):
  """Writes columns [rows, 1] into the lanes of [rows, 128] from `first` on.

  One value a row and quantity: they share a row of lanes, so that one block is written.
  """
  lane = jax.lax.broadcasted_iota(jnp.int32, packed.shape, 1)
  for k, column in enumerate(columns):
    packed = jnp.where(lane == first + k, column, packed)
  return packed


# Columns of a packed output for the picked logits of each side; others follow.
PICKS = 2

# What `tiles.Plan.walk` does with a block of logits.


def reset(state):
  """`nothing` in a reference to sums [fields, rows, 128]."""
  state[...] = jnp.zeros_like(state)
  state[0] = jnp.full(state.shape[1:], -jnp.inf, jnp.float32)


def exponentials(state, fields, chunk, inverse, left=None):
  """For `Plan.walk`: adds one side's exponentials to [fields, rows, 128]; `left` as in `read`."""

  def body(width, rows, views):
    ((ref, near),) = views
    add = lambda s, *where: add_exponentials(s, read(ref, near, *where, left), inverse)
    start = Sums(*(state[k, rows, :] for k in range(fields)))
    for k, x in enumerate(fold(width, chunk, add, start)[:fields]):
      state[k, rows, :] = x

  return body


def summands(state, given, first, chunk, inverse, full, left=None):
  """For `Plan.walk`: adds terms and p; from `first` on `given` holds `term_columns`."""

  def body(width, rows, views):
    (policy, near_q), (rollout, near_p) = views
    columns = given[rows, :]
    sides = wide(columns[:, k : k + 1] for k in range(first, first + TERM_COLUMNS))

    def add(sums, *where):
      pieces = read(policy, near_q, *where, left), read(rollout, near_p, *where, left)
      return add_terms(sums, *pieces, sides, inverse, full)

    start = [state[k, rows, :] for k in range(count(full) + 1)]
    for k, x in enumerate(fold(width, chunk, add, start)):
      state[k, rows, :] = x

  return body


def picks(out, given, first, chunk, *sides):
  """For `Plan.walk`: adds the logits of the tokens, the last column of `given`, to `out`.

  `first` is the block's first vocabulary entry.
  """

  def body(width, rows, views):
    column = given[rows, :][:, -1:].astype(jnp.int32)
    (place,) = wide([column - first])

    def add(state, start, *where):
      pieces = (read(*views[k], start, *where) for k in sides)
      return [add_picked(s, x, place - start) for s, x in zip(state, pieces, strict=True)]

    nothing = jnp.zeros(place.shape, jnp.float32)
    picked = fold(width, chunk, add, [nothing] * len(sides))
    for k, x in zip(sides, picked, strict=True):
      out[rows, :] += pack(nothing, [x.sum(1, keepdims=True)], k)

  return body
