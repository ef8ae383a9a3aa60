"""Rollouts: autoregressive generation under jit with a KV cache.

    rollout = generate(params, config, prompts, start, key, Request(samples=G, length=T, ...))

`generate` runs one engine: its parameters (or a `Relay` of them), its hooks. Every token draws from
a key of its own (the prompt's number in the batch, the sample's number, the slot), so a row's
tokens do not depend on how many prompts and samples are beside it, on what they hold or on the
device layout, and router noise can be replayed exactly.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA
from trm_jax.policy.attention import Attention, plain
from trm_jax.rollouts import relay, scoring, stores, streams
from trm_jax.rollouts.groups import blanked, repeat
from trm_jax.rollouts.stores import Record
from trm_jax.types import InputError, Rollout

# Below this temperature float32 scores, divided by it, no longer tell tokens apart.
COLDEST = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What to draw: `samples` responses of up to `length` tokens to each prompt."""

  samples: int
  length: int
  # The token that ends a response (or several), and what fills the slots after it.
  eos: int | tuple[int, ...]
  pad: int
  # Scores are divided by it, >= `COLDEST`; `greedy` takes the likeliest token instead of drawing.
  temperature: float = 1.0
  greedy: bool = False

  def __post_init__(self):
    if not self.greedy and not self.temperature >= COLDEST:
      raise InputError(
        f'temperature={self.temperature} must be at least {COLDEST}; for argmax decoding pass'
        ' greedy=True.'
      )
    for name in ('samples', 'length'):
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be at least 1.')

  @property
  def ends(self) -> tuple[int, ...]:
    """The tokens that end a response."""
    return self.eos if isinstance(self.eos, tuple) else (self.eos,)


class _Engine(NamedTuple):
  """What stays the same from token to token."""

  params: relay.Weights
  config: policy.PolicyConfig
  request: Request
  record: Record
  hooks: policy.Hooks
  attention: Attention
  keys: Key[Array, 'B']
  start: Int[Array, 'B']
  blank: Int[Array, 'B T']  # zeros for the slots of the responses, laid out like their rows
  width: int


class _State(NamedTuple):
  """What the loop carries; `step` slots of the response are done."""

  cache: policy.Cache
  done: Bool[Array, 'B']
  hidden: Float[Array, 'B D']
  logp: Float[Array, 'B T']
  routed: dict[str, Array]
  step: Int[Array, '']
  stored: Any
  tokens: Int[Array, 'B T']
  valid: Bool[Array, 'B T']


def generate(
  params: relay.Weights,
  config: policy.PolicyConfig,
  prompts: Int[Array, 'p P'],
  start: Int[Array, 'p'],
  key: Key[Array, ''],
  request: Request,
  record: Record = Record(),  # noqa: B008 - frozen
  *,
  first_sample: int = 0,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: Attention = plain,
) -> Rollout:
  """The responses that are asked for, with what is to be kept; rows of one prompt adjoin.

  Stops as soon as every row has produced EOS. EOS is an action: it is valid and has a log-prob. A
  row cut off at `request.length` has none; one whose scores turn NaN ends there with the log-prob
  NaN, missing. `first_sample` offsets the random streams, so that several engines can share a
  prompt. Slots after EOS hold PAD, 0 and False. Rewards are 0 and versions 0 until somebody sets
  them. Raises InputError for hidden states asked of an engine whose scores are not one head times
  theirs, for gates of a dense policy, for prompts without one `start` each, and for an EOS or PAD
  outside the vocabulary.
  """
  _check(params, config, prompts, start, request, record, hooks)
  prompts, start = sharding.reshard((prompts, start), DATA)
  prompt_keys, keys = streams.row_keys(key, len(start), request.samples, first_sample)
  row_start = repeat(start, request.samples)
  engine = _Engine(
    params=params,
    config=config,
    request=request,
    record=record,
    hooks=hooks,
    attention=attention,
    keys=keys.reshape(-1),
    start=row_start,
    blank=row_start[:, None] * jnp.zeros((1, request.length), jnp.int32),
    width=prompts.shape[1],
  )
  state = _read_prompts(engine, prompts, start, prompt_keys)
  state = _emit(engine, state, relay.at(params, 0))
  state = jax.lax.while_loop(
    lambda s: (s.step < request.length) & ~s.done.all(), functools.partial(_advance, engine), state
  )
  rollout = Rollout(
    prompts=repeat(prompts, request.samples),
    start=engine.start,
    tokens=state.tokens,
    valid=state.valid,
    logp=state.logp,
    routes=state.routed.get('routes'),
    gates=state.routed.get('gates'),
    version=engine.blank,
    engine=0 * engine.start,
    reward=0.0 * engine.start,
    **stores.fields(record.store, state.stored),
  )
  if record.score == 'decode':
    return rollout
  engines = dict(first_sample=first_sample, hooks=hooks, attention=attention)
  sizes = dict(samples=request.samples, temperature=request.temperature)
  return scoring.replay(params, config, rollout, key, **sizes, **engines)


def _check(params, config, prompts, start, request, record, hooks):
  """Raises InputError where what is to be kept does not exist, or tokens and shapes do not fit."""
  vocab = relay.vocabulary(params)
  for name, ids in (('eos', request.ends), ('pad', (request.pad,))):
    if not all(0 <= token < vocab for token in ids):
      raise InputError(
        f'{name}={getattr(request, name)} must lie in 0..{vocab - 1}, the vocabulary of the policy:'
        ' a token outside is never drawn.'
      )
  if record.store == 'hidden' and (hooks.logits is not None or hooks.decode is not None):
    raise InputError(
      "store='hidden' cannot hold what this engine does to its logits; use store='logits'."
    )
  if record.store == 'hidden' and isinstance(params, relay.Relay):
    raise InputError(
      "store='hidden' cannot hold the heads of weights that change during a response; use"
      " store='logits' or 'topk'."
    )
  if record.gates and not config.experts:
    raise InputError('gates=True needs experts, but policy.experts=0 is a dense model.')
  if prompts.ndim != 2 or start.shape != prompts.shape[:1]:
    raise InputError(f'prompts {prompts.shape} and start {start.shape} must be [p, P] and [p].')


def _read_prompts(engine: _Engine, prompts, start, prompt_keys) -> _State:
  """One pass over each prompt, whose cache its samples share; no token is drawn yet."""
  config, request, record = engine.config, engine.request, engine.record
  total = engine.width + request.length
  cache, weights = policy.init_cache(config, len(start), total), relay.at(engine.params, 0)
  noise_keys = None
  if engine.hooks.keyed:
    noise_keys = streams.noise_keys(prompt_keys, 0, engine.width)
  hidden, cache, aux = policy.apply(
    weights,
    config,
    scoring.clean_prompts(prompts, start),
    start=start,
    cache=cache,
    noise_keys=noise_keys,
    attention=engine.attention,
    hooks=engine.hooks,
  )
  blank = engine.blank
  vocab = weights['embed'].shape[0]
  return _State(
    step=jnp.int32(0),
    done=engine.start < 0,
    hidden=repeat(hidden[:, -1], request.samples),
    cache=jax.tree.map(lambda x: repeat(x, request.samples, axis=1), cache),
    tokens=blank + request.pad,
    valid=blank > 0,
    logp=blank.astype(jnp.float32),
    stored=stores.blank(record.store, blank, vocab=vocab, width=config.width, top=record.top),
    routed=_room_for_routes(engine, aux),
  )


def _room_for_routes(engine: _Engine, aux: policy.Aux) -> dict[str, Array]:
  """Routes (and gates) of the prompts with room for the responses; nothing for a dense policy."""
  if aux.routes is None:
    return {}
  kept = {'routes': aux.routes} | ({'gates': aux.gates} if engine.record.gates else {})
  room = engine.blank[:, :-1, None, None] * jnp.zeros((1, 1, *aux.routes.shape[2:]), jnp.int32)
  widen = lambda x: jnp.concatenate([repeat(x, engine.request.samples), room.astype(x.dtype)], 1)
  return {name: widen(x) for name, x in kept.items()}


def _emit(engine: _Engine, s: _State, weights: policy.Params) -> _State:
  """Samples the token of slot `step` from the current hidden state."""
  request, record, keys = engine.request, engine.record, engine.keys
  t, done = s.step, s.done
  scores = sharding.reshard(policy.logits(weights, s.hidden[:, None])[:, 0], DATA, None)
  draw_keys = streams.fold(streams.fold(keys, 0 * engine.start + 1), 0 * engine.start + t)
  scores, reported = (
    x[:, 0] for x in scoring.engine_scores(scores[:, None], keys, t, engine.hooks)
  )
  drawn = _draw(draw_keys, scores, request.temperature, request.greedy)
  # Scores that are NaN say nothing of any token: the log-prob is missing and the row ends.
  broken = jnp.isnan(scores).any(-1)
  token = jnp.where(done | broken, request.pad, drawn)
  logp = scoring.row_logp(request.temperature)(reported, token)
  kept = stores.record(
    record.store, scores, s.hidden, temperature=request.temperature, top=record.top
  )
  put = lambda room, new: jax.lax.dynamic_update_slice_in_dim(room, new[:, None], t, 1)
  return s._replace(
    step=t + 1,
    done=functools.reduce(lambda over, end: over | (token == end), request.ends, done | broken),
    tokens=put(s.tokens, token),
    valid=put(s.valid, ~done),
    logp=put(s.logp, jnp.where(done, 0, jnp.where(broken, jnp.nan, logp))),
    stored=jax.tree.map(
      lambda room, new: put(room, blanked(done, new).astype(room.dtype)), s.stored, kept
    ),
  )


def _advance(engine: _Engine, s: _State) -> _State:
  """Feeds the last token, then samples the next."""
  t, hooks = s.step, engine.hooks
  slot, weights = engine.width + t - 1, relay.at(engine.params, t)
  token = jax.lax.dynamic_slice_in_dim(s.tokens, t - 1, 1, 1)
  if hooks.bind is not None:  # experts' load counts finished rows: the same ones as in `score`
    token = jnp.where(jax.lax.dynamic_slice_in_dim(s.valid, t - 1, 1, 1), token, 0)
  noise_keys = None
  if hooks.keyed:
    noise_keys = streams.noise_keys(streams.fold(engine.keys, 0 * engine.start), slot, 1)
  hidden, cache, aux = policy.apply(
    weights,
    engine.config,
    token,
    start=engine.start,
    slot=slot,
    cache=s.cache,
    noise_keys=noise_keys,
    attention=engine.attention,
    hooks=hooks,
  )
  put = lambda name, room: jax.lax.dynamic_update_slice_in_dim(room, getattr(aux, name), slot, 1)
  routed = {name: put(name, room) for name, room in s.routed.items()}
  return _emit(engine, s._replace(hidden=hidden[:, 0], cache=cache, routed=routed), weights)


def _draw(keys, scores, temperature, greedy):
  """One token a row by inverting the cumulative distribution: one uniform, not V of them."""
  if greedy:
    return scores.argmax(-1)
  p = jax.nn.softmax(scores / temperature)
  # Rounded sums need not be monotone: only tokens that have mass may be hit or set the total.
  cumulative = jnp.where(p > 0, jnp.cumsum(p, -1), 0)
  total = cumulative.max(-1)
  uniform = jax.vmap(jax.random.uniform)(keys)
  # Strictly below the total, so that some entry lies above it.
  point = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
  return (cumulative > point[:, None]).argmax(-1)
