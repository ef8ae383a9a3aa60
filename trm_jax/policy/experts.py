"""Mixture of experts: where a token is sent, what is computed there, how evenly it is shared out.

    probabilities = softmax(scores)       float32; the K largest are the token's gates
    out = sum over the K chosen of  gate * (silu(x gate_e) * (x up_e)) down_e

Two ways to compute the same sum. `dense` sends every token through every expert and weighs with 0:
best where E is small. `ragged` sorts (token, choice) pairs by expert and multiplies each expert's
run of rows with its own matrices (`jax.lax.ragged_dot`): K / E of the work on backends that have
grouped products. XLA's CPU backend has none and expands the rows E times, so there it is for tests.
XLA for TPUs has all but the gradient of the matrices; that takes the kernel that comes with JAX.
"""

import functools

import jax
import jax.numpy as jnp
from jax import P
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Bool, Float, Int

from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.policy.hooks import Hooks
from trm_jax.types import InputError

RUN = 512  # rows that the TPU kernel takes at a time


def route(
  scores: Float[Array, 'B T E'], chosen: int, *, normalize: bool, layer, noise_keys, hooks: Hooks
) -> tuple[Float[Array, 'B T E'], Int[Array, 'B T K'], Float[Array, 'B T K']]:
  """(scores after hooks, experts of each token, their gates), float32.

  `normalize` rescales the gates of a token to sum to 1. Gradients flow into the scores through the
  gates, not through the choice.
  """
  if hooks.router is not None:
    scores = hooks.router(scores, layer, noise_keys)
  probabilities = jax.nn.softmax(scores)
  gates, routes = jax.lax.top_k(probabilities, chosen)
  if hooks.routes is not None:
    routes = hooks.routes(probabilities, routes, layer, noise_keys)
    gates = jnp.where(_one_hot(routes, scores.shape[-1]), probabilities[..., None, :], 0).sum(-1)
  if normalize:
    # Routes that are replayed may be any: at padding their sum may be 0 in float32.
    gates = gates / jnp.maximum(gates.sum(-1, keepdims=True), 1e-12)
  if hooks.gates is not None:
    gates = hooks.gates(gates, routes, probabilities, layer, noise_keys)
  return scores, routes, gates


def _one_hot(routes, experts):
  return routes[..., None] == jnp.arange(experts)[None, None, None]


def dense(
  x: Float[Array, 'B T D'],
  routes: Int[Array, 'B T K'],
  gates: Float[Array, 'B T K'],
  gate: Float[Array, 'E D F'],
  up: Float[Array, 'E D F'],
  down: Float[Array, 'E F D'],
  *,
  activation=None,
) -> Float[Array, 'B T D']:
  """Every expert on every token, weighted by the gates; holds [B,T,E,F]. Any mesh.

  `activation` is applied to what enters `down`.
  """
  by_expert = sharding.spec(DATA, None, MODEL, None)
  weight = jnp.where(_one_hot(routes, gate.shape[0]), gates[..., None], 0).sum(-2).astype(x.dtype)
  expand = lambda w: jnp.einsum('btd,edf->btef', x, w, out_sharding=by_expert)
  inner = jax.nn.silu(expand(gate)) * expand(up)
  if activation is not None:
    inner = activation(inner)
  inner = inner * sharding.reshard(weight, DATA, None, MODEL)[..., None]
  return jnp.einsum('btef,efd->btd', inner, down, out_sharding=sharding.spec(DATA, None, None))


def ragged(
  x: Float[Array, 'B T D'],
  routes: Int[Array, 'B T K'],
  gates: Float[Array, 'B T K'],
  gate: Float[Array, 'E D F'],
  up: Float[Array, 'E D F'],
  down: Float[Array, 'E F D'],
  *,
  activation=None,
) -> Float[Array, 'B T D']:
  """The chosen experts alone, tokens sorted by expert; holds [B,T,K,F].

  Under a mesh rows stay on their device of `data`, each device of `model` computes with its own
  experts, and one all-reduce adds them up. Raises InputError where E does not divide over `model`.
  """
  weights = (gate, up, down)
  experts = gate.shape[0]
  if sharding.active():
    devices = jax.sharding.get_abstract_mesh().shape[MODEL]
    if experts % devices:
      raise InputError(
        f"policy.experts={experts} cannot be split over the {devices} devices of the mesh's model"
        " axis; choose a mesh that divides it or policy.expert_compute='dense'."
      )
    # An expert's matrices are needed whole: gathered over `data`, as the other layers' are.
    weights = tuple(sharding.reshard(w, MODEL, None, None) for w in weights)
  if activation is None:
    return _blocks(_all, x, routes, gates, *weights)
  # The hook may hold arrays of its own, which no shard_map body can: it stands between two.
  inner = activation(_blocks(_inner, x, routes, *weights[:2]))
  return _blocks(_outer, inner, routes, gates, weights[2])


def _blocks(fn, *args):
  """The sum over devices of `fn(rows.., matrices..)` on their rows and experts."""
  if not sharding.active():
    return fn(*args, axis_name=None)
  # Matrices have three axes [E,_,_] and come last; rows are split over `data`.
  count = {_all: 3, _inner: 2, _outer: 1}[fn]
  # Unchecked, since the library's kernel does not say over which axes its results differ. What each
  # device of `model` adds is a result of its own, so that the sum and its gradient stand outside.
  mapped = jax.shard_map(
    lambda *args: fn(*args, axis_name=MODEL)[None],
    in_specs=(P(DATA),) * (len(args) - count) + (P(MODEL),) * count,
    out_specs=P(MODEL, DATA),
    check_vma=False,
  )
  return mapped(*(sharding.reshard(a, DATA) for a in args[:-count]), *args[-count:]).sum(0)


def _order(routes, experts, axis_name):
  """(pairs (token, choice) sorted by expert, rows of each expert).

  Pairs of other devices' experts come last and belong to no run.
  """
  routes = routes.reshape(-1)
  if axis_name is not None:
    routes = routes - jax.lax.axis_index(axis_name) * experts
  routes = jnp.where((routes >= 0) & (routes < experts), routes, experts)
  order = jnp.argsort(routes)
  sizes = (routes[:, None] == jnp.arange(experts)[None]).sum(0, dtype=jnp.int32)
  return order, sizes


def _expand(x, order, sizes, gate, up, choices):
  rows = x.reshape(-1, x.shape[-1])[order // choices]
  return jax.nn.silu(_grouped(rows, gate, sizes)) * _grouped(rows, up, sizes)


def _grouped(rows, matrices, sizes, dtype=None):
  """Each expert's run of rows with its own matrix, [rows, _] in `dtype` (default: that of rows)."""
  return _products(rows, matrices, sizes, dtype or rows.dtype)


def _ragged_dot(rows, matrices, sizes, dtype):
  # A TPU's kernel refuses bfloat16 operands at the precision that float32 ones are given here.
  precision = jax.lax.Precision.DEFAULT if _low(rows, matrices) else None
  return jax.lax.ragged_dot(
    rows, matrices, sizes, precision=precision, preferred_element_type=dtype
  )


def _low(*arrays):
  return all(x.dtype == jnp.bfloat16 for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(rows, matrices, sizes, dtype):
  return _in_runs(_ragged_dot(rows, matrices, sizes, dtype), sizes)


def _in_runs(x, sizes):
  # What stands after the last run is nobody's: a kernel need not write it, 0 * NaN is NaN.
  return jnp.where((jnp.arange(x.shape[0]) < sizes.sum())[:, None], x, 0)


def _products_forward(rows, matrices, sizes, dtype):
  return _products(rows, matrices, sizes, dtype), (rows, matrices, sizes)


def _products_backward(dtype, saved, g):
  rows, matrices, sizes = saved
  (of_rows,) = jax.linear_transpose(lambda x: _ragged_dot(x, matrices, sizes, dtype), rows)(g)
  of_rows = _in_runs(of_rows, sizes)

  def plainly(rows, g, sizes):
    return jax.linear_transpose(lambda w: _ragged_dot(rows, w, sizes, dtype), matrices)(g)[0]

  if not _low(rows, matrices):
    return of_rows, plainly(rows, g, sizes), None
  # XLA for TPUs multiplies all rows with all runs here, E times the work.
  of_matrices = jax.lax.platform_dependent(rows, g, sizes, tpu=_by_run, default=plainly)
  return of_rows, of_matrices, None


_products.defvjp(_products_forward, _products_backward)


def _by_run(rows, g, sizes, *, interpret=False):
  """rows^T g of each run, [E,D,F], by JAX's TPU kernel."""
  rows, g = (jnp.pad(x, ((0, -x.shape[0] % RUN), (0, 0))) for x in (rows, g.astype(rows.dtype)))
  tile = lambda m, k, n: (RUN, min(k, 512), min(n, 1024))
  # Around it the policy asks for float32 products, which the TPU compiler refuses for bfloat16.
  with jax.default_matmul_precision('default'):
    return tgmm(rows.T, g, sizes, rows.dtype, tile, interpret=interpret)


def _contract(inner, order, sizes, gates, down):
  """Sum over choices of gate * inner down_e, back in the order of the tokens."""
  inner = inner * gates.reshape(-1)[order].astype(inner.dtype)[:, None]
  out = _grouped(inner, down, sizes, jnp.float32)
  back = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
  return back.reshape(*gates.shape, -1).sum(-2).astype(inner.dtype)


def _all(x, routes, gates, gate, up, down, *, axis_name):
  order, sizes = _order(routes, gate.shape[0], axis_name)
  inner = _expand(x, order, sizes, gate, up, routes.shape[-1])
  return _contract(inner, order, sizes, gates, down)


def _inner(x, routes, gate, up, *, axis_name):
  order, sizes = _order(routes, gate.shape[0], axis_name)
  inner = _expand(x, order, sizes, gate, up, routes.shape[-1])
  back = jnp.zeros_like(inner).at[order].set(inner, unique_indices=True)
  return back.reshape(*routes.shape, -1)


def _outer(inner, routes, gates, down, *, axis_name):
  order, sizes = _order(routes, down.shape[0], axis_name)
  rows = inner.reshape(-1, inner.shape[-1])[order]
  return _contract(rows, order, sizes, gates, down)


def load_balance(
  router_logits: Float[Array, 'B T N E'],
  routes: Int[Array, 'B T N K'],
  real: Bool[Array, 'B T'],
) -> Float[Array, '']:
  """Load-balancing loss E * sum_e f_e P_e: K where experts are used evenly, up to E.

  f_e is the number of choices of expert e a token, P_e its mean probability, both over the `real`
  tokens of all layers together, as transformers computes it for Qwen3-MoE (Switch Transformer, eq.
  4-6). 0 where no token is real. The gradient flows through P alone. It is no mean over tokens, so
  micro-batches do not add up to it.
  """
  experts = router_logits.shape[-1]
  probability = jax.nn.softmax(router_logits.astype(jnp.float32))
  hits = (routes[..., None] == jnp.arange(experts)[None, None, None, None]).sum(-2)
  mask = real[:, :, None, None]
  count = jnp.maximum(real.sum() * router_logits.shape[2], 1)
  mean = lambda x: jnp.where(mask, x, 0).sum((0, 1, 2)) / count
  return experts * (mean(hits) * mean(probability)).sum()
