"""The policy: a Qwen3-shaped decoder (RMSNorm, RoPE, GQA, QK-norm, SwiGLU; dense or MoE).

Flax NNX describes the modules; at the border everything is functional: `init` gives a plain nested
dict, `apply` is pure. This is the only file that imports flax, so another module library would be a
change of one file.

    params = init(key, config)
    hidden, cache, aux = apply(params, config, tokens, start=start)
    scores = logits(params, hidden)            # float32 [B, T, V]

Rows are left-padded: `start[b]` is the first real slot, and attention masks by slot, never by token
id. With a cache the same function decodes. `Hooks` lets the mismatch module disturb activations,
the KV cache and the router; a hook that is None is not traced at all. Float32 matmuls are float32
on every backend: the bf16 passes that accelerators take by default would be a mismatch of their
own.
"""

import dataclasses
import functools
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.policy import experts, rotary
from trm_jax.policy.attention import Attention, plain
from trm_jax.policy.hooks import Hooks
from trm_jax.types import InputError

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """Architecture; by default the toy model of the experiments, 94k parameters at V = 16."""

  # Residual width D.
  width: int = 48
  # Decoder layers N.
  layers: int = 2
  # Query heads, and the key/value heads they share (grouped-query attention).
  heads: int = 4
  kv_heads: int = 4
  # Width of one head.
  head_width: int = 12
  # Inner width of the SwiGLU block, or of one expert.
  mlp_width: int = 64
  # Experts per layer; 0 = a dense model.
  experts: int = 4
  # Experts a token is sent to (top-k of the router's softmax).
  experts_per_token: int = 1
  # Rescale the chosen experts' gates to sum to 1. With one expert that would cut the router's
  # gradient, so it needs experts_per_token >= 2.
  normalize_gates: bool = False
  # Every expert on every token, or tokens sorted by expert (many experts; TPU or GPU).
  expert_compute: Literal['dense', 'ragged'] = 'dense'
  # Base wavelength of the rotary positions, and how they reach beyond the trained context.
  rope_base: float = 10_000.0
  rope_scaling: rotary.Scaling = rotary.Scaling()
  # Added to the mean square in every norm.
  norm_epsilon: float = 1e-6
  # Share the embedding with the output head.
  tied_head: bool = False
  # Compute dtype of matmuls; parameters are float32 always.
  dtype: str = 'float32'
  # Recompute each layer in the backward pass instead of storing its activations.
  remat: bool = False

  def __post_init__(self):
    for name in ('width', 'layers', 'heads', 'kv_heads', 'head_width', 'mlp_width'):
      if getattr(self, name) < 1:
        raise InputError(f'policy.{name}={getattr(self, name)} must be at least 1.')
    if self.heads % self.kv_heads:
      raise InputError(
        f'policy.heads={self.heads} is not a multiple of policy.kv_heads={self.kv_heads}.'
      )
    if self.head_width % 2:
      raise InputError(f'policy.head_width={self.head_width} must be even (rotary pairs).')
    if self.experts < 0:
      raise InputError(f'policy.experts={self.experts} must be >= 0; 0 is a dense model.')
    if self.experts and not 1 <= self.experts_per_token <= self.experts:
      raise InputError(
        f'policy.experts_per_token={self.experts_per_token} must lie in 1..{self.experts}'
        ' (policy.experts).'
      )
    if self.experts and self.normalize_gates and self.experts_per_token == 1:
      raise InputError(
        'policy.normalize_gates=True with policy.experts_per_token=1 makes every gate 1 and leaves'
        ' the router without a gradient; set normalize_gates to False.'
      )
    if self.expert_compute not in ('dense', 'ragged'):
      raise InputError(f'policy.expert_compute={self.expert_compute!r} is not dense or ragged.')
    if not self.rope_base > 0:
      raise InputError(f'policy.rope_base={self.rope_base} must be > 0.')
    if self.rope_scaling.kind == 'yarn' and not self.rope_base > 1:
      raise InputError(f'policy.rope_base={self.rope_base} must be > 1 for yarn.')
    if not 0 < self.norm_epsilon < 1:
      raise InputError(f'policy.norm_epsilon={self.norm_epsilon} must lie in (0, 1).')
    if self.dtype not in ('float32', 'bfloat16', 'float16'):
      raise InputError(f'policy.dtype={self.dtype!r} is not float32, bfloat16 or float16.')


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of every layer, [N, B, L, kv_heads, C] each."""

  k: Float[Array, 'N B L H C']
  v: Float[Array, 'N B L H C']


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
  """Router scores after hooks [B,T,N,E], chosen experts and their weights; None if dense."""

  router_logits: Float[Array, 'B T N E'] | None
  routes: Int[Array, 'B T N K'] | None
  gates: Float[Array, 'B T N K'] | None


def _rms_norm(x, scale, epsilon):
  x32 = x.astype(jnp.float32)
  unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + epsilon)
  shape = (1,) * (x.ndim - 1) + scale.shape
  return (unit * scale.reshape(shape)).astype(x.dtype)


def _through(hook, x):
  return x if hook is None else hook(x)


def _laid_out(name, *axes):
  """Module metadata that lays a parameter out over the mesh; nothing without one."""
  return {name: {'out_sharding': axes}} if sharding.active() else {}


class _Attention(nnx.Module):
  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.config = config
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
    columns = _laid_out('kernel_metadata', DATA, MODEL)
    rows = _laid_out('kernel_metadata', MODEL, DATA)
    d, c = config.width, config.head_width
    self.q = linear(d, config.heads * c, **columns)
    self.k = linear(d, config.kv_heads * c, **columns)
    self.v = linear(d, config.kv_heads * c, **columns)
    self.o = linear(config.heads * c, d, **rows)
    self.q_scale = nnx.Param(jnp.ones(c))
    self.k_scale = nnx.Param(jnp.ones(c))

  def __call__(self, x, *, start, slot, layer, cache, attention, hooks):
    config, (batch, length, _) = self.config, x.shape
    x = _through(hooks.activation, x)
    split = lambda y: y.reshape(batch, length, -1, config.head_width)
    columns = sharding.spec(DATA, None, MODEL)
    q, k, v = (split(project(x, out_sharding=columns)) for project in (self.q, self.k, self.v))
    slots = slot + jnp.arange(length)
    at = slots[None] - start[:, None], config.rope_base, config.rope_scaling
    placed = lambda x, scale: rotary.rotate(_rms_norm(x, scale[...], config.norm_epsilon), *at)
    q, k = placed(q, self.q_scale), placed(k, self.k_scale)
    k, v = _through(hooks.kv, k), _through(hooks.kv, v)
    if cache is not None:
      put = lambda store, new: jax.lax.dynamic_update_slice(
        store, new[None].astype(store.dtype), (layer, 0, slot, 0, 0)
      )
      cache = Cache(put(cache.k, k), put(cache.v, v))
      k, v = cache.k[layer], cache.v[layer]
    mixed = attention(q, k, v, slots=slots, start=start)
    mixed = _through(hooks.activation, mixed.reshape(batch, length, -1))
    return self.o(mixed, out_sharding=sharding.spec(DATA, None, None)), cache


class _Mlp(nnx.Module):
  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
    columns = _laid_out('kernel_metadata', DATA, MODEL)
    self.gate = linear(config.width, config.mlp_width, **columns)
    self.up = linear(config.width, config.mlp_width, **columns)
    self.down = linear(config.mlp_width, config.width, **_laid_out('kernel_metadata', MODEL, DATA))

  def __call__(self, x, *, layer, noise_keys, hooks):
    del layer, noise_keys
    x = _through(hooks.activation, x)
    columns = sharding.spec(DATA, None, MODEL)
    inner = jax.nn.silu(self.gate(x, out_sharding=columns)) * self.up(x, out_sharding=columns)
    inner = _through(hooks.activation, inner)
    return self.down(inner, out_sharding=sharding.spec(DATA, None, None)), None


class _Experts(nnx.Module):
  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.config = config
    e, d, f = config.experts, config.width, config.mlp_width
    # Fan-in is the middle axis: one matrix per expert.
    scaled = jax.nn.initializers.variance_scaling(
      1.0, 'fan_in', 'truncated_normal', in_axis=1, out_axis=2, batch_axis=0
    )
    layout = lambda *axes: {'out_sharding': (MODEL, *axes)} if sharding.active() else {}
    self.router = nnx.Linear(
      d, e, use_bias=False, rngs=rngs, **_laid_out('kernel_metadata', DATA, None)
    )
    self.gate = nnx.Param(scaled(rngs.params(), (e, d, f)), **layout(DATA, None))
    self.up = nnx.Param(scaled(rngs.params(), (e, d, f)), **layout(DATA, None))
    self.down = nnx.Param(scaled(rngs.params(), (e, f, d)), **layout(None, DATA))

  def __call__(self, x, *, layer, noise_keys, hooks):
    config = self.config
    x = _through(hooks.activation, x)
    # The router works in float32: near-ties decide which expert computes.
    scores = self.router(x.astype(jnp.float32), out_sharding=sharding.spec(DATA, None, None))
    scores, routes, gates = experts.route(
      scores,
      config.experts_per_token,
      normalize=config.normalize_gates,
      layer=layer,
      noise_keys=noise_keys,
      hooks=hooks,
    )
    compute = experts.ragged if config.expert_compute == 'ragged' else experts.dense
    matrices = (p[...].astype(config.dtype) for p in (self.gate, self.up, self.down))
    out = compute(x, routes, gates, *matrices, activation=hooks.activation)
    return out, (scores, routes, gates)


class _Layer(nnx.Module):
  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.epsilon = config.norm_epsilon
    self.attention = _Attention(config, rngs)
    self.mlp = _Experts(config, rngs) if config.experts else _Mlp(config, rngs)
    self.attention_scale = nnx.Param(jnp.ones(config.width))
    self.mlp_scale = nnx.Param(jnp.ones(config.width))

  def __call__(self, x, *, start, slot, layer, cache, noise_keys, attention, hooks):
    mixed, cache = self.attention(
      _rms_norm(x, self.attention_scale[...], self.epsilon),
      start=start,
      slot=slot,
      layer=layer,
      cache=cache,
      attention=attention,
      hooks=hooks,
    )
    x = x + mixed
    y = _rms_norm(x, self.mlp_scale[...], self.epsilon)
    out, routing = self.mlp(y, layer=layer, noise_keys=noise_keys, hooks=hooks)
    return x + out, cache, routing


@functools.cache
def _graph(config: PolicyConfig, meshed: bool):
  """Static structure of one layer. `meshed` is part of the key: metadata differs under a mesh."""
  del meshed
  return nnx.split(nnx.eval_shape(lambda: _Layer(config, nnx.Rngs(0))), nnx.Param)[0]


def init(key: Key[Array, ''], config: PolicyConfig, vocab_size: int) -> Params:
  """Fresh float32 parameters as a plain nested dict; layers stacked on a leading axis N.

  Under a mesh the parameters come out sharded (matrices over data and model).
  """
  keys = jax.random.split(key, config.layers + 2)
  single = [
    nnx.to_pure_dict(nnx.split(_Layer(config, nnx.Rngs(params=k)), nnx.Param)[1]) for k in keys[2:]
  ]
  shape, apart = (vocab_size, config.width), sharding.spec(MODEL, DATA)  # never whole anywhere
  table = lambda k, scale: scale * jax.random.normal(k, shape, out_sharding=apart)
  params = {
    'embed': table(keys[0], config.width**-0.5 if config.tied_head else 1.0),
    'layers': jax.tree.map(lambda *a: jnp.stack(a), *single),
    'scale': jnp.ones(config.width),
  }
  if not config.tied_head:
    params['head'] = table(keys[1], config.width**-0.5)
  return params


def shapes(config: PolicyConfig, vocab_size: int) -> Params:
  """What `init` would give, as `jax.ShapeDtypeStruct` with shardings: nothing is allocated."""
  one = dataclasses.replace(config, layers=1)  # layers are alike: traced once
  one_layer = jax.eval_shape(lambda: init(jax.random.key(0), one, vocab_size))
  all_layers = lambda x: x.update(shape=(config.layers, *x.shape[1:]))
  return one_layer | {'layers': jax.tree.map(all_layers, one_layer['layers'])}


def init_cache(config: PolicyConfig, rows: int, length: int) -> Cache:
  """Empty cache for `rows` sequences of up to `length` slots."""
  shape = (config.layers, rows, length, config.kv_heads, config.head_width)
  empty = lambda: jnp.zeros(
    shape, config.dtype, out_sharding=sharding.spec(None, DATA, None, MODEL, None)
  )
  return Cache(empty(), empty())


def apply(
  params: Params,
  config: PolicyConfig,
  tokens: Int[Array, 'B T'],
  *,
  start: Int[Array, 'B'],
  slot: int | Int[Array, ''] = 0,
  cache: Cache | None = None,
  noise_keys: Key[Array, 'B T'] | None = None,
  attention: Attention = plain,
  hooks: Hooks = Hooks(),  # noqa: B008 - frozen
) -> tuple[Float[Array, 'B T D'], Cache | None, Aux]:
  """Final hidden states of `tokens`, which occupy slots slot..slot+T-1.

  Without a cache the tokens see each other (slot must be 0); with one they see everything cached
  before them as well, and the updated cache is returned. Slots before `start` are seen by nobody;
  their content is irrelevant. A real token outside the vocabulary (-1, -100, V) has no embedding:
  the states of its row are NaN, missing. Gradients flow into `params`. Returns (hidden, cache,
  aux).
  """
  rows = sharding.spec(DATA, None, None)
  table = sharding.reshard(params['embed'], MODEL, None)  # one gather, not one per backward
  if sharding.active():
    x = table.at[tokens].get(out_sharding=rows)
  else:
    x = table[tokens]
  unknown = (tokens < 0) | (tokens >= table.shape[0])
  unknown = unknown & (slot + jnp.arange(tokens.shape[1])[None] >= start[:, None])
  x = jnp.where(unknown[..., None], jnp.nan, x).astype(config.dtype)
  graph = _graph(config, sharding.active())
  # What is kept of each layer for the backward pass is split over `model` along the sequence.
  apart = config.remat and sharding.divides(tokens.shape[1], MODEL)
  between = lambda x: sharding.reshard(x, DATA, MODEL if apart else None, None)

  # Whole over `data` in the dtype that they are multiplied in.
  dtype = lambda path: jnp.float32 if 'router' in jax.tree_util.keystr(path) else config.dtype
  gathered = lambda path, w: sharding.gathered(w, DATA, dtype(path))

  def layer(carry, xs):
    x, cache = carry
    weights, index = xs
    weights = jax.tree_util.tree_map_with_path(gathered, weights)
    x = sharding.reshard(x, DATA, None, None)
    here = hooks
    if hooks.bind is not None:
      real = slot + jnp.arange(tokens.shape[1])[None] >= start[:, None]
      here = hooks.bind(hooks, index, noise_keys, real)
    if here.hidden is not None:
      x = here.hidden(x, index, noise_keys)
    x, cache, routing = nnx.merge(graph, weights)(
      x,
      start=start,
      slot=slot,
      layer=index,
      cache=cache,
      noise_keys=noise_keys,
      attention=attention,
      hooks=here,
    )
    return (between(x), cache), routing

  if config.remat:
    layer = jax.checkpoint(layer)
  with jax.default_matmul_precision('float32'):
    (x, cache), routing = jax.lax.scan(
      layer,
      (between(x), cache),
      (params['layers'], jnp.arange(config.layers)),
      # Small stacks are unrolled: the loop would copy each layer's cache in and out.
      unroll=config.layers <= 4,
    )
  aux = Aux(None, None, None)
  if routing is not None:
    aux = Aux(*(jnp.moveaxis(r, 0, 2) for r in routing))
  x = sharding.reshard(x, DATA, None, None)
  return _rms_norm(x, params['scale'], config.norm_epsilon), cache, aux


def head(params: Params) -> Float[Array, 'V D']:
  """The output head; the embedding where the two are tied."""
  return params.get('head', params['embed'])


def logits(params: Params, hidden: Float[Array, 'B T D']) -> Float[Array, 'B T V']:
  """Scores over the vocabulary, float32; V split over `model` under a mesh."""
  with jax.default_matmul_precision('float32'):
    return jnp.einsum(
      'btd,vd->btv',
      hidden.astype(jnp.float32),
      head(params),
      out_sharding=sharding.spec(DATA, None, MODEL),
    )


def size(params: Params) -> int:
  """Number of parameters."""
  return sum(p.size for p in jax.tree.leaves(params))
