"""The train step and the decode step of a policy as programs of shapes: nothing is allocated.

    train     forward, divergences from what the rollout kept, TRM mask, gradient, Adam
    decode    one token of every row: forward with the KV cache, scores, choice, log-prob

The same functions that a run calls (`update.update`, `policy.apply`); only where the prompts come
from and the reward are left out. Use under `jax.set_mesh(mesh)`.
"""

import dataclasses
import math
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from trm_jax import divergences, policy
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA
from trm_jax.policy import attention
from trm_jax.rollouts import stores
from trm_jax.training import config, judgement
from trm_jax.training import update as up
from trm_jax.training.words import MethodWords
from trm_jax.types import Rollout

OPTIMIZER = config.Optimizer().make()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What a program is compiled for, beside the policy.

  Attributes:
    rows: sequences of a step, of all devices together.
    samples: rows of one prompt.
    sequence: positions of a forward pass, prompt + response - 1; of decoding, cached slots.
    prompt: slots of it that are prompt.
    store: what the rollout keeps of its distributions; `top` tokens of top-K.
    microbatches: pieces of a step.
  """

  rows: int
  samples: int
  sequence: int
  prompt: int
  vocab: int
  store: stores.Store = 'topk'
  top: int = 64
  microbatches: int = 1


# Plans compile programs side by side, but trace one after the other: JAX's Pallas kernels cannot be
# traced by two threads at a time.
_TRACING = threading.Lock()


class Program(NamedTuple):
  """A function to compile, its abstract arguments, and which of them are donated."""

  run: Any
  arguments: tuple
  donated: tuple[int, ...]

  def lower(self):
    """Lowered for the current mesh."""
    with _TRACING:
      return jax.jit(self.run, donate_argnums=self.donated).lower(*self.arguments)

  def jaxpr(self):
    """What is computed, before any compiler."""
    with _TRACING:
      return jax.make_jaxpr(self.run)(*self.arguments).jaxpr


def laid_out(tree):
  """The tree with a layout over the current mesh for every leaf, replicated where it names none."""
  mesh = jax.sharding.get_mesh()

  def one(x):
    spec = getattr(x.sharding, 'spec', None) or jax.P()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(one, tree)


def bytes_per_device(tree) -> int:
  """Bytes that one device holds of a tree of laid-out shapes."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if jnp.issubdtype(x.dtype, jnp.number)
  )


def state_of(configuration: policy.PolicyConfig, vocab: int) -> up.TrainState:
  """Float32 parameters with Adam's moments, laid out."""

  def make():
    params = policy.init(jax.random.key(0), dataclasses.replace(configuration, layers=1), vocab)
    return up.TrainState(
      step=jnp.int32(0),
      params=params,
      opt_state=OPTIMIZER.init(params),
      key=jax.random.key(0),
      limit=jnp.float32(0.2),
      first=None,
      history=None,
    )

  # Layers are alike: one is traced, and every stack of one is made as deep as the model.
  deep = lambda path, x: (
    x.update(shape=(configuration.layers, *x.shape[1:]))
    if any(getattr(k, 'key', None) == 'layers' for k in path)
    else x
  )
  return laid_out(jax.tree_util.tree_map_with_path(deep, jax.eval_shape(make)))


def train(
  configuration: policy.PolicyConfig, sizes: Sizes, chosen: MethodWords | None = None
) -> Program:
  """One optimizer step from a rollout: (state, batch) -> (state, scalars); the state is donated."""
  state = state_of(configuration, sizes.vocab)
  length = sizes.sequence - sizes.prompt + 1

  def make():
    blank = jnp.zeros((sizes.rows, length), jnp.int32, out_sharding=sharding.spec(DATA, None))
    row, real = blank[:, 0], blank.astype(jnp.float32)
    kept = stores.blank(
      sizes.store, blank, vocab=sizes.vocab, width=configuration.width, top=sizes.top
    )
    slots = jnp.zeros((1, sizes.prompt), jnp.int32)
    routes = None
    if configuration.experts:
      layers = jnp.zeros((1, sizes.sequence, configuration.layers, 1), jnp.int32)
      chosen = jnp.zeros((1, 1, 1, configuration.experts_per_token), jnp.int32)
      routes = row[:, None, None, None] + layers + chosen
    return Rollout(
      prompts=row[:, None] + slots,
      start=row,
      tokens=blank,
      valid=blank > 0,
      logp=real,
      routes=routes,
      version=blank,
      engine=row,
      reward=real[:, 0],
      **stores.fields(sizes.store, kept),
    )

  rollout = laid_out(jax.eval_shape(make))
  heads = ()
  if sizes.store == 'hidden':
    heads = (laid_out(jax.eval_shape(policy.head, state.params)),)
  batch = judgement.Batch(rollout, heads=judgement.Heads(heads))
  settings = up.Settings(
    methods=((chosen or MethodWords(max_kl=0.2)).make(),),
    policy=configuration,
    samples=sizes.samples,
    temperature=1.0,
    attention=attention.splash,
    microbatches=sizes.microbatches,
  )

  def step(state, batch):
    state, reports = up.update(
      state, batch, state.key, up.Arm(), optimizer=OPTIMIZER, settings=settings
    )
    return dataclasses.replace(state, step=state.step + 1), up.summarise(reports, settings)[0]

  return Program(step, (state, batch), (0,))


def decode(configuration: policy.PolicyConfig, sizes: Sizes) -> Program:
  """One token of every row: (params, cache, tokens, start, slot) -> (cache, tokens, log-probs)."""
  make = lambda: policy.init_cache(configuration, sizes.rows, sizes.sequence)
  row = lambda: jnp.zeros(sizes.rows, jnp.int32, out_sharding=sharding.spec(DATA))
  cache, rows = laid_out((jax.eval_shape(make), jax.eval_shape(row)))
  slot = laid_out(jax.eval_shape(lambda: jnp.int32(0)))

  def step(params, cache, tokens, start, slot):
    hidden, cache, _ = policy.apply(
      params, configuration, tokens[:, None], start=start, slot=slot, cache=cache
    )
    scores = sharding.reshard(policy.logits(params, hidden)[:, 0], DATA, None)
    tokens = scores.argmax(-1)
    return cache, tokens, sharding.over_rows(divergences.logp)(scores, tokens)

  params = state_of(configuration, sizes.vocab).params
  return Program(step, (params, cache, rows, rows, slot), (1,))
