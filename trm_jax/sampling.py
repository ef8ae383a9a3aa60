"""Rollouts: autoregressive generation under jit with a KV cache, and teacher-forced scoring.

    rollout = generate(params, config, prompts, start, key, samples=G, length=T, ...)
    hidden, aux = score(params, config, rollout)

`generate` runs one engine: its parameters (or a `Relay` of them), its hooks. Every token draws from
a key of its own (the prompt's number in the batch, the sample's number, the slot), so a row's
tokens do not depend on how many prompts and samples are beside it, on what they hold or on the
device layout, and router noise can be replayed exactly. Decode and the full forward pass agree to
float32 noise; `replay` re-scores a rollout through the full pass, where the zero-mismatch twin must
be bitwise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import attention as attn
from trm_jax import divergences, linear_head, policy, relay, sharding, stores, streams
from trm_jax.mismatch import decoding
from trm_jax.sharding import DATA, MODEL
from trm_jax.stores import Store
from trm_jax.streams import row_keys, token_keys
from trm_jax.types import InputError, Rollout


def repeat(x, samples: int, axis: int = 0):
  """Each prompt's entry once per sample, in place: [.., p, ..] -> [.., p * G, ..]."""
  shape = (*x.shape[: axis + 1], samples, *x.shape[axis + 1 :])
  wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
  return wide.reshape(*x.shape[:axis], x.shape[axis] * samples, *x.shape[axis + 1 :])


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


def _engine_scores(scores, keys, first, hooks):
  """(scores [B,T,V] that tokens are drawn from, scores that log-probs are reported from)."""
  if hooks.logits is not None:
    scores = sharding.reshard(scores, DATA, None, None)
    noise = token_keys(keys, scores.shape[1], stream=2, first=first)
    scores = hooks.logits(scores, noise)
  drawn = scores
  if hooks.decode is not None:
    drawn = hooks.decode(sharding.reshard(scores, DATA, None, None))
  return drawn, drawn if hooks.reported is None else hooks.reported(scores, drawn)


def generate(
  params: relay.Weights,
  config: policy.PolicyConfig,
  prompts: Int[Array, 'p P'],
  start: Int[Array, 'p'],
  key: Key[Array, ''],
  *,
  samples: int,
  length: int,
  eos: int,
  pad: int,
  first_sample: int = 0,
  temperature: float = 1.0,
  greedy: bool = False,
  store: Store = 'logits',
  top: int = 64,
  gates: bool = False,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: attn.Attention = attn.plain,
) -> Rollout:
  """`samples` responses of up to `length` tokens to each prompt; rows of one prompt adjoin.

  Stops as soon as every row has produced EOS. EOS is an action: it is valid and has a log-prob. A
  row cut off at `length` has none. `store` chooses what is kept of the distribution, see
  `trm_jax.stores`: full logits [B,T,V], hidden states [B,T,D], the `top` likeliest tokens (all of a
  smaller vocabulary), or only the sampled log-probs; `gates` adds the experts' weights.
  `first_sample` offsets the random streams, so that several engines can share a prompt. Slots after
  EOS hold PAD, 0 and False.
  Rewards are 0 and versions 0 until somebody sets them. Raises InputError for temperature <= 0,
  samples < 1, length < 1, hidden states asked of an engine whose scores are not one head times
  theirs, or gates of a dense policy.
  """
  if not greedy and not temperature > 0:
    raise InputError(
      f'temperature={temperature} must be > 0; for argmax decoding pass greedy=True.'
    )
  for name, value in (('samples', samples), ('length', length)):
    if value < 1:
      raise InputError(f'{name}={value} must be at least 1.')
  if store == 'hidden' and (hooks.logits is not None or hooks.decode is not None):
    raise InputError(
      "store='hidden' cannot hold what this engine does to its logits; use store='logits'."
    )
  if store == 'hidden' and isinstance(params, relay.Relay):
    raise InputError(
      "store='hidden' cannot hold the heads of weights that change during a response; use"
      " store='logits' or 'topk'."
    )
  if gates and not config.experts:
    raise InputError('gates=True needs experts, but policy.experts=0 is a dense model.')
  if prompts.ndim != 2 or start.shape != prompts.shape[:1]:
    raise InputError(f'prompts {prompts.shape} and start {start.shape} must be [p, P] and [p].')
  prompts, start = sharding.reshard((prompts, start), DATA)
  count, width = prompts.shape
  rows, total = count * samples, width + length
  prompt_keys, keys = row_keys(key, count, samples, first_sample)
  keys = keys.reshape(rows)
  noisy = hooks.keyed
  shared = {'attention': attention, 'hooks': hooks}

  cache, weights = policy.init_cache(config, count, total), relay.at(params, 0)
  hidden, cache, aux = policy.apply(
    weights,
    config,
    _clean_prompts(prompts, start),
    start=start,
    cache=cache,
    noise_keys=streams.noise_keys(prompt_keys, 0, width) if noisy else None,
    **shared,
  )
  cache = jax.tree.map(lambda x: repeat(x, samples, axis=1), cache)
  row_start = repeat(start, samples)
  blank = row_start[:, None] * jnp.zeros((1, length), jnp.int32)  # laid out like the rows
  real = blank.astype(jnp.float32)
  vocab = weights['embed'].shape[0]
  state = {
    'step': jnp.int32(0),
    'done': row_start < 0,
    'hidden': repeat(hidden[:, -1], samples),
    'cache': cache,
    'tokens': blank + pad,
    'valid': blank > 0,
    'logp': real,
    'stored': stores.blank(store, blank, vocab=vocab, width=config.width, top=top),
    'routed': {},
  }
  if aux.routes is not None:
    n, k = aux.routes.shape[2:]
    room = blank[:, : length - 1, None, None] * jnp.zeros((1, 1, n, k), jnp.int32)
    kept = {'routes': aux.routes} | ({'gates': aux.gates} if gates else {})
    wide = lambda x: jnp.concatenate([repeat(x, samples), room.astype(x.dtype)], 1)
    state['routed'] = {name: wide(x) for name, x in kept.items()}

  of_rows = sharding.over_rows(functools.partial(divergences.logp, temperature=temperature))

  def emit(s, weights):
    """Samples the token of slot `step` from the current hidden state."""
    t, done = s['step'], s['done']
    scores = sharding.reshard(policy.logits(weights, s['hidden'][:, None])[:, 0], DATA, None)
    draw_keys = streams.fold(streams.fold(keys, 0 * row_start + 1), 0 * row_start + t)
    scores, reported = (x[:, 0] for x in _engine_scores(scores[:, None], keys, t, hooks))
    token = jnp.where(done, pad, _draw(draw_keys, scores, temperature, greedy))
    logp = of_rows(reported, token)
    kept = stores.record(store, scores, s['hidden'], temperature=temperature, top=top)
    put = lambda store, new: jax.lax.dynamic_update_slice_in_dim(store, new[:, None], t, 1)
    return s | {
      'step': t + 1,
      'done': done | (token == eos),
      'tokens': put(s['tokens'], token),
      'valid': put(s['valid'], ~done),
      'logp': put(s['logp'], jnp.where(done, 0, logp)),
      'stored': jax.tree.map(
        lambda room, new: put(room, _blank(done, new).astype(room.dtype)), s['stored'], kept
      ),
    }

  def advance(s):
    """Feeds the last token, then samples the next."""
    t = s['step']
    slot, weights = width + t - 1, relay.at(params, t)
    token = jax.lax.dynamic_slice_in_dim(s['tokens'], t - 1, 1, 1)
    if hooks.bind is not None:  # experts' load counts finished rows: the same ones as in `score`
      token = jnp.where(jax.lax.dynamic_slice_in_dim(s['valid'], t - 1, 1, 1), token, 0)
    hidden, cache, aux = policy.apply(
      weights,
      config,
      token,
      start=row_start,
      slot=slot,
      cache=s['cache'],
      noise_keys=streams.noise_keys(streams.fold(keys, 0 * row_start), slot, 1) if noisy else None,
      **shared,
    )
    put = lambda name, room: jax.lax.dynamic_update_slice_in_dim(room, getattr(aux, name), slot, 1)
    routed = {name: put(name, room) for name, room in s['routed'].items()}
    return emit(s | {'hidden': hidden[:, 0], 'cache': cache, 'routed': routed}, weights)

  state = emit(state, weights)
  state = jax.lax.while_loop(lambda s: (s['step'] < length) & ~s['done'].all(), advance, state)
  return Rollout(
    prompts=repeat(prompts, samples),
    start=row_start,
    tokens=state['tokens'],
    valid=state['valid'],
    logp=state['logp'],
    routes=state['routed'].get('routes'),
    gates=state['routed'].get('gates'),
    version=blank,
    engine=0 * row_start,
    reward=0.0 * row_start,
    **stores.fields(store, state['stored']),
  )


def _blank(where, x):
  """x with 0 in the rows (or slots) of `where`."""
  return jnp.where(jnp.expand_dims(where, tuple(range(where.ndim, x.ndim))), 0, x)


def _clean_prompts(prompts, start):
  """Slots before the prompt hold token 0, whatever they held: content of padding never matters."""
  slots = jnp.arange(prompts.shape[1])
  return jnp.where(slots[None] >= start[:, None], prompts, 0)


def _fed(rollout):
  """Tokens that a pass over the rollout reads, [B,L-1], 0 wherever there is none."""
  tokens = jnp.where(rollout.valid, rollout.tokens, 0)
  return jnp.concatenate([_clean_prompts(rollout.prompts, rollout.start), tokens[:, :-1]], 1)


def score(
  params: policy.Params,
  config: policy.PolicyConfig,
  rollout: Rollout,
  *,
  noise_keys: Key[Array, 'B Lm1'] | None = None,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: attn.Attention = attn.plain,
) -> tuple[Float[Array, 'B T D'], policy.Aux]:
  """Hidden states that predict each response token: the trainer's full forward pass.

  `policy.logits(params, hidden)[:, t]` scores `rollout.tokens[:, t]`. What padding holds is
  replaced before the pass. Gradients flow into `params`.
  """
  width = rollout.prompts.shape[1]
  hidden, _, aux = policy.apply(
    params,
    config,
    _fed(rollout),
    start=rollout.start,
    noise_keys=noise_keys,
    attention=attention,
    hooks=hooks,
  )
  return hidden[:, width - 1 :], aux


def rescore(
  params: relay.Weights,
  config: policy.PolicyConfig,
  rollout: Rollout,
  key: Key[Array, ''],
  *,
  samples: int,
  first_sample: int = 0,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: attn.Attention = attn.plain,
) -> tuple[Float[Array, 'B T D'], policy.Aux]:
  """`score` as the engine that produced the rollout: its hooks and, from its `key`, its noise.

  A relay passes over the runs of slots of its versions in turn, each reading the cache of those
  before. `aux.gates` are the weights the engine gave to its experts.
  """
  noise_keys = None
  width, length = rollout.prompts.shape[1], rollout.tokens.shape[1]
  if hooks.keyed:
    prompt_keys, keys = row_keys(key, rollout.start.shape[0] // samples, samples, first_sample)
    keys = keys.reshape(-1)
    noise_keys = jnp.concatenate(
      [
        repeat(streams.noise_keys(prompt_keys, 0, width), samples),
        token_keys(keys, length - 1, stream=0, first=width),
      ],
      1,
    )
  shared = dict(noise_keys=noise_keys, hooks=hooks, attention=attention)
  if isinstance(params, relay.Relay):
    tokens, start = _fed(rollout), rollout.start
    hidden, aux = relay.apply(params, config, tokens, width=width, start=start, **shared)
    return hidden[:, width - 1 :], aux
  return score(params, config, rollout, **shared)


def replay(
  params: relay.Weights,
  config: policy.PolicyConfig,
  rollout: Rollout,
  key: Key[Array, ''],
  *,
  samples: int,
  first_sample: int = 0,
  temperature: float = 1.0,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: attn.Attention = attn.plain,
) -> Rollout:
  """The rollout re-scored teacher-forced through the full pass of the engine that produced it.

  Same tokens; what was stored and the log-probs are those of `score` with the engine's own
  parameters, hooks and noise (`key` and `first_sample` as given to `generate`). Slots after EOS
  hold 0, as in `generate`. Without stored logits the scores are made one slot at a time.
  """
  shared = {'samples': samples, 'first_sample': first_sample}
  hidden, aux = rescore(params, config, rollout, key, hooks=hooks, attention=attention, **shared)
  noisy = hooks.logits is not None
  keys = row_keys(key, len(rollout.start) // samples, **shared)[1].reshape(-1) if noisy else None
  if rollout.logits is not None:
    logits, reported = _engine_scores(relay.logits(params, hidden), keys, 0, hooks)
    logp = token_logp(reported, rollout.tokens, rollout.valid, temperature=temperature)
    # One layout whatever the hooks, so that engines can be put side by side.
    kept = {'logits': sharding.reshard(_blank(~rollout.valid, logits), DATA, None, MODEL)}
  else:
    logp, top = _by_slot(params, hidden, rollout, keys, hooks, temperature)
    kept = {
      'hidden': None if rollout.hidden is None else _blank(~rollout.valid, hidden),
      'top': jax.tree.map(lambda x: _blank(~rollout.valid, x), top),
    }
  gates = None if rollout.gates is None else aux.gates
  return dataclasses.replace(rollout, logp=logp, routes=aux.routes, gates=gates, **kept)


def _by_slot(params, hidden, rollout, keys, hooks, temperature):
  """(log-probs, likeliest tokens if the rollout has them) from the scores of a slot at a time."""
  store, top = ('logp', 0) if rollout.top is None else ('topk', rollout.top.ids.shape[-1])

  of_rows = sharding.over_rows(functools.partial(divergences.logp, temperature=temperature))

  def slot(xs):
    t, hidden, tokens, valid = xs
    scores = policy.logits(relay.at(params, t), hidden[:, None])
    scores, reported = (
      sharding.reshard(x[:, 0], DATA, None) for x in _engine_scores(scores, keys, t, hooks)
    )
    logp = of_rows(reported, tokens)
    kept = stores.record(store, scores, hidden, temperature=temperature, top=top)
    return jnp.where(valid, logp, 0), kept

  turned = lambda x: jnp.moveaxis(x, 1, 0)
  slots = jnp.arange(rollout.tokens.shape[1])
  found = jax.lax.map(slot, (slots, *map(turned, (hidden, rollout.tokens, rollout.valid))))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)


def token_logp(
  logits: Float[Array, 'B T V'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  temperature: float = 1.0,
) -> Float[Array, 'B T']:
  """Log-probs of the sampled tokens in nats, 0 on invalid slots; V may be split over `model`."""

  def block(logits, tokens, valid, *, axis_name=None):
    logp = divergences.logp(logits, tokens, temperature=temperature, axis_name=axis_name)
    return jnp.where(valid, logp, 0)

  return sharding.over_vocabulary(block)(logits, tokens, valid)


def policy_logp(
  params: policy.Params,
  config: policy.PolicyConfig,
  rollout: Rollout,
  *,
  temperature: float = 1.0,
  support: bool = False,
  attention: attn.Attention = attn.plain,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
) -> Float[Array, 'B T']:
  """Log-probs of the rollout's tokens under `params` in nats, 0 on invalid slots.

  One full forward pass; scores over the vocabulary never exist all at once, but for `support`:
  then the policy is conditioned on the tokens that the rollout's logits allow. Gradients flow into
  `params`.
  """

  def block(head, hidden, tokens, valid, *, axis_name=None):
    logp, _ = linear_head.logp(hidden, head, tokens, temperature=temperature, axis_name=axis_name)
    return jnp.where(valid, logp, 0)

  hidden, _ = score(params, config, rollout, attention=attention, hooks=hooks)
  if support:
    allowed = sharding.reshard(rollout.logits, DATA, None, MODEL)
    scores = decoding.replay_support(policy.logits(params, hidden), allowed)
    return token_logp(scores, rollout.tokens, rollout.valid, temperature=temperature)
  by_head = sharding.over_head(block)
  return by_head(policy.head(params), hidden, rollout.tokens, rollout.valid)
