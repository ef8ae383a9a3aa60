"""Causal attention over left-padded rows, behind one signature.

    attention(q [B,T,H,C], k [B,S,Hkv,C], v, slots=[T], start=[B]) -> [B,T,H,C]

Query t sits at slot slots[t] and sees key slots start[b] <= s <= slots[t]. A query before its row's
start sees nothing; its output is finite and meaningless. `exponentials`, if given, is applied to
exp(score - largest) wherever the softmax sums them up: a kernel of fewer bits.

    plain       holds all scores; short rows and decoding
    blockwise   an online softmax over blocks, in XLA; anywhere
    splash      the kernel that comes with JAX, on a TPU; whole rows alone
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from trm_jax.mesh import sharding

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


LANES = 128  # of a TPU: the kernel wants heads and blocks of whole multiples


def splash(
  q: Float[Array, 'B T H C'],
  k: Float[Array, 'B S Hkv C'],
  v: Float[Array, 'B S Hkv C'],
  *,
  slots: Int[Array, 'T'],
  start: Int[Array, 'B'],
  exponentials: Callable[[Array], Array] | None = None,
  block: int = 512,
  interpret: bool = False,
) -> Float[Array, 'B T H C']:
  """The same by JAX's TPU kernel, which skips what the mask hides; elsewhere `blockwise`.

  The kernel is for whole rows, slots 0..T-1, in bfloat16 (it would give float32 few passes). Other
  numbers of queries than of keys (decoding), heads whose width is no multiple of 128 and a
  disturbed softmax go to `blockwise` on a TPU too. Queries before `start` see each other; what they
  hold is meaningless. The query is scaled in its own dtype. `interpret` runs the kernel on any
  backend and in any dtype, slowly.
  """
  rest = functools.partial(blockwise, exponentials=exponentials)
  plainly = lambda q, k, v, slots, start: rest(q, k, v, slots=slots, start=start)
  low = q.dtype == k.dtype == v.dtype == jnp.bfloat16
  fits = q.shape[1] == k.shape[1] and q.shape[-1] % LANES == 0 and (low or interpret)
  if exponentials is not None or not fits:
    return plainly(q, k, v, slots, start)
  kernel = functools.partial(_splash, block=block, interpret=interpret)
  if sharding.active():
    heads = P(sharding.DATA, None, sharding.MODEL)
    rows = P(sharding.DATA)
    # Unchecked, since the library's kernel does not say over which axes its results differ. Nothing
    # is lost: whatever has a gradient is split over both axes, so no sum over devices is due.
    kernel = jax.shard_map(
      kernel, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
    )
  of_kernel = lambda q, k, v, slots, start: kernel(q, k, v, start)
  if interpret:
    return of_kernel(q, k, v, slots, start)
  return jax.lax.platform_dependent(q, k, v, slots, start, tpu=of_kernel, default=plainly)


def _splash(q, k, v, start, *, block, interpret):
  """One device's rows and heads."""
  batch, length, heads, width = q.shape
  kv_heads = k.shape[2]
  block = min(block, length + -length % LANES)
  padded = length + -length % block
  tiles = kernels.BlockSizes(
    block_q=block,
    block_kv=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  causal = masks.MultiHeadMask([masks.CausalMask((padded, padded))] * (heads // kv_heads))
  # The kernel does not scale; heads first, queries of one key head together.
  q = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)
  whole = lambda x: jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
  q = whole(q).reshape(batch, padded, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
  k, v = (whole(x.astype(q.dtype)).transpose(0, 2, 1, 3) for x in (k, v))
  # Two segments: what lies before a row's start, and the row.
  segments = (jnp.arange(padded)[None] >= start[:, None]).astype(jnp.int32)

  def of_rows(q, k, v, segments):
    # Made here, since it holds arrays of the trace that it is made in.
    kernel = kernels.make_splash_mqa(
      causal, block_sizes=tiles, head_shards=1, q_seq_shards=1, interpret=interpret
    )
    of_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    return jax.vmap(lambda q, k, v, ids: of_heads(q, k, v, kernels.SegmentIds(ids, ids)))(
      q, k, v, segments
    )

  out = _plain_products(of_rows)(q, k, v, segments)
  return out.transpose(0, 3, 1, 2, 4)[:, :length].reshape(batch, length, heads, width)


def _plain_products(fn):
  """`fn(*arrays, ids)` with matrix products as its own code asks for them, gradients included.

  Around it the policy asks for float32 products, which the TPU compiler refuses for bfloat16.
  """
  plain = functools.partial(jax.default_matmul_precision, 'default')

  @jax.custom_vjp
  def wrapped(*args):
    with plain():
      return fn(*args)

  def forward(*args):
    with plain():
      return jax.vjp(lambda *x: fn(*x, args[-1]), *args[:-1])

  def backward(pull, g):
    with plain():
      return *pull(g), None

  wrapped.defvjp(forward, backward)
  return wrapped
