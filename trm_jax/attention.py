"""Causal attention over left-padded rows, behind one signature.

    attention(q [B,T,H,C], k [B,S,Hkv,C], v, slots=[T], start=[B]) -> [B,T,H,C]

Query t sits at slot slots[t] and sees key slots start[b] <= s <= slots[t]. A query before its row's
start sees nothing; its output is finite and meaningless. `exponentials`, if given, is applied to
exp(score - largest) wherever the softmax sums them up: a kernel of fewer bits.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Attention = Callable[..., Float[Array, 'B T H C']]

_MASKED = -1e30  # finite: a row without any visible key must not become NaN


def _visible(key_slots, slots, start):
  causal = key_slots[None, None] <= slots[None, :, None]
  return causal & (key_slots[None, None] >= start[:, None, None])


def plain(
  q: Float[Array, 'B T H C'],
  k: Float[Array, 'B S Hkv C'],
  v: Float[Array, 'B S Hkv C'],
  *,
  slots: Int[Array, 'T'],
  start: Int[Array, 'B'],
  exponentials: Callable[[Array], Array] | None = None,
) -> Float[Array, 'B T H C']:
  """Softmax attention that holds the scores [B,H,T,S]; right for short rows and for decoding."""
  if exponentials is not None:
    at = dict(slots=slots, start=start, block=k.shape[1])  # all keys in one block
    return blockwise(q, k, v, exponentials=exponentials, **at)
  visible = _visible(jnp.arange(k.shape[1]), slots, start)
  return jax.nn.dot_product_attention(
    q, k.astype(q.dtype), v.astype(q.dtype), mask=visible[:, None]
  )


def blockwise(
  q: Float[Array, 'B T H C'],
  k: Float[Array, 'B S Hkv C'],
  v: Float[Array, 'B S Hkv C'],
  *,
  slots: Int[Array, 'T'],
  start: Int[Array, 'B'],
  block: int = 128,
  exponentials: Callable[[Array], Array] | None = None,
) -> Float[Array, 'B T H C']:
  """The same values with an online softmax over blocks of keys: no scores beyond [B,H,b,b].

  The backward pass recomputes one block of queries at a time (`jax.checkpoint`) and holds its
  scores, [B,H,b,S]: memory is linear in T there too.
  """
  batch, length, heads, width = q.shape
  kv_heads, share, dtype = k.shape[2], heads // k.shape[2], q.dtype
  block_q, block_k = min(block, length), min(block, k.shape[1])

  def blocks(x, size, axis):
    """Pads `axis` to whole blocks and moves the block index to the front."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad)
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  # Bfloat16 operands are multiplied as such, into float32: a sixth of the passes of float32.
  low = q.dtype == k.dtype == v.dtype == jnp.bfloat16
  operand = jnp.bfloat16 if low else jnp.float32
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  q = q.astype(operand).reshape(batch, length, kv_heads, share, width)
  q_blocks, slot_blocks = blocks(q, block_q, 1), blocks(slots, block_q, 0)
  k_blocks, v_blocks = (blocks(x.astype(operand), block_k, 1) for x in (k, v))
  # Padded keys lie beyond every query's slot, so the causal mask hides them.
  key_slots = jnp.arange(k_blocks.shape[0] * block_k).reshape(-1, block_k)

  # Round the whole row of blocks: round single pairs it would keep a state [b,C] for each pair.
  @jax.checkpoint
  def one_query_block(xs):
    q_b, slots_b = xs

    def one_key_block(carry, xs):
      top, weight, mixed = carry
      k_b, v_b, key_slots_b = xs
      scores = product('bthgc,bshc->bthgs', q_b, k_b) * width**-0.5
      visible = _visible(key_slots_b, slots_b, start)[:, :, None, None]
      scores = jnp.where(visible, scores, _MASKED)
      new_top = jnp.maximum(top, scores.max(-1))
      p = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0)
      p = p if exponentials is None else exponentials(p)
      old = jnp.exp(top - new_top)
      mixed = mixed * old[..., None] + product('bthgs,bshc->bthgc', p.astype(operand), v_b)
      return (new_top, weight * old + p.sum(-1), mixed), None

    top = jnp.full_like(q_b[..., 0], _MASKED, jnp.float32)
    carry = (top, jnp.zeros_like(top), jnp.zeros_like(q_b, jnp.float32))
    (_, weight, mixed), _ = jax.lax.scan(one_key_block, carry, (k_blocks, v_blocks, key_slots))
    return mixed / jnp.where(weight > 0, weight, 1)[..., None]

  _, out = jax.lax.scan(lambda c, xs: (c, one_query_block(xs)), None, (q_blocks, slot_blocks))
  out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, kv_heads, share, width)[:, :length]
  return out.reshape(batch, length, heads, width).astype(dtype)
