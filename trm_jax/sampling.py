"""Rollouts: autoregressive generation under jit with a KV cache, and teacher-forced scoring.

    rollout = generate(params, config, prompts, start, key, samples=G, length=T, ...)
    hidden, aux = score(params, config, rollout)

`generate` runs one engine: its parameters, its hooks. Every token draws from a key of its own (the
prompt's number in the batch, the sample's number, the slot), so a row's tokens do not depend on how
many prompts and samples are beside it, on what they hold or on the device layout, and router noise
can be replayed exactly. Decode and the full forward pass agree to float32 noise; `replay`
re-scores a rollout through the full pass, where the zero-mismatch twin must be bitwise.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import attention as attn
from trm_jax import divergences, linear_head, policy, sharding
from trm_jax.sharding import DATA
from trm_jax.types import InputError, Rollout

Store = Literal['logits', 'hidden', 'logp']


def _fold(keys, data):
  """fold_in over arrays of keys and integers of one shape."""
  fold = jax.random.fold_in
  for _ in range(keys.ndim):
    fold = jax.vmap(fold)
  return fold(keys, data)


def _counter(shape, axis):
  return sharding.reshard(jax.lax.broadcasted_iota(jnp.int32, shape, axis), DATA)


def row_keys(
  key: Key[Array, ''], prompts: int, samples: int, first_sample: int = 0
) -> tuple[Key[Array, 'p'], Key[Array, 'p G']]:
  """One key for each prompt (its number in the batch), and one for each of its samples."""
  per_prompt = _fold(jnp.broadcast_to(key, (prompts,)), jnp.arange(prompts))
  per_prompt = sharding.reshard(per_prompt, DATA)
  shape = (prompts, samples)
  wide = jnp.broadcast_to(per_prompt[:, None], shape)
  return _fold(per_prompt, _counter((prompts,), 0) * 0), _fold(
    wide, 1 + first_sample + _counter(shape, 1)
  )


def _noise_keys(keys, first_slot, count):
  """Noise keys [B, count] of slots first_slot.. of each row."""
  shape = (*keys.shape, count)
  return _fold(jnp.broadcast_to(keys[:, None], shape), first_slot + _counter(shape, 1))


def token_keys(
  keys: Key[Array, 'B'], length: int, *, stream: int, first: int | Int[Array, ''] = 0
) -> Key[Array, 'B T']:
  """A key for each of `length` response slots from `first` on, from the rows' own keys.

  Streams in use: 0 the forward pass, 1 the draws, 2 the scores, 3 what is reported.
  """
  return _noise_keys(_fold(keys, stream + _counter(keys.shape, 0) * 0), first, length)


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
  params: policy.Params,
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
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: attn.Attention = attn.plain,
) -> Rollout:
  """`samples` responses of up to `length` tokens to each prompt; rows of one prompt adjoin.

  Stops as soon as every row has produced EOS. EOS is an action: it is valid and has a log-prob. A
  row cut off at `length` has none. `store` chooses what is kept of the distribution: full logits
  [B,T,V], hidden states [B,T,D], or only the sampled log-probs. `first_sample` offsets the random
  streams, so that several engines can share a prompt. Slots after EOS hold PAD, 0 and False.
  Rewards are 0 and versions 0 until somebody sets them. Raises InputError for temperature <= 0,
  samples < 1, length < 1, or hidden states asked of an engine whose scores are not theirs.
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
  prompts, start = sharding.reshard((prompts, start), DATA)
  count, width = prompts.shape
  rows, total = count * samples, width + length
  prompt_keys, keys = row_keys(key, count, samples, first_sample)
  keys = keys.reshape(rows)
  noisy = hooks.keyed
  shared = {'attention': attention, 'hooks': hooks}

  cache = policy.init_cache(config, count, total)
  hidden, cache, aux = policy.apply(
    params,
    config,
    _clean_prompts(prompts, start),
    start=start,
    cache=cache,
    noise_keys=_noise_keys(prompt_keys, 0, width) if noisy else None,
    **shared,
  )
  cache = jax.tree.map(lambda x: repeat(x, samples, axis=1), cache)
  row_start = repeat(start, samples)
  blank = row_start[:, None] * jnp.zeros((1, length), jnp.int32)  # laid out like the rows
  real = blank.astype(jnp.float32)
  depth = {'logits': params['embed'].shape[0], 'hidden': config.width, 'logp': 0}[store]
  state = {
    'step': jnp.int32(0),
    'done': row_start < 0,
    'hidden': repeat(hidden[:, -1], samples),
    'cache': cache,
    'tokens': blank + pad,
    'valid': blank > 0,
    'logp': real,
    'stored': real[:, :, None] * jnp.zeros((1, 1, depth)),
    'routes': None,
  }
  if aux.routes is not None:
    n, k = aux.routes.shape[2:]
    room = blank[:, : length - 1, None, None] * jnp.zeros((1, 1, n, k), jnp.int32)
    state['routes'] = jnp.concatenate([repeat(aux.routes, samples), room], 1)

  def emit(s):
    """Samples the token of slot `step` from the current hidden state."""
    t, done = s['step'], s['done']
    scores = sharding.reshard(policy.logits(params, s['hidden'][:, None])[:, 0], DATA, None)
    draw_keys = _fold(_fold(keys, 0 * row_start + 1), 0 * row_start + t)
    scores, reported = (x[:, 0] for x in _engine_scores(scores[:, None], keys, t, hooks))
    token = jnp.where(done, pad, _draw(draw_keys, scores, temperature, greedy))
    logp = divergences.logp(reported, token, temperature=temperature)
    kept = {'logits': scores, 'hidden': s['hidden'], 'logp': scores[:, :0]}[store]
    put = lambda store, new: jax.lax.dynamic_update_slice_in_dim(store, new[:, None], t, 1)
    return s | {
      'step': t + 1,
      'done': done | (token == eos),
      'tokens': put(s['tokens'], token),
      'valid': put(s['valid'], ~done),
      'logp': put(s['logp'], jnp.where(done, 0, logp)),
      'stored': put(s['stored'], jnp.where(done[:, None], 0, kept).astype(jnp.float32)),
    }

  def advance(s):
    """Feeds the last token, then samples the next."""
    t = s['step']
    slot = width + t - 1
    token = jax.lax.dynamic_slice_in_dim(s['tokens'], t - 1, 1, 1)
    if hooks.bind is not None:  # experts' load counts finished rows: the same ones as in `score`
      token = jnp.where(jax.lax.dynamic_slice_in_dim(s['valid'], t - 1, 1, 1), token, 0)
    hidden, cache, aux = policy.apply(
      params,
      config,
      token,
      start=row_start,
      slot=slot,
      cache=s['cache'],
      noise_keys=_noise_keys(_fold(keys, 0 * row_start), slot, 1) if noisy else None,
      **shared,
    )
    s = s | {'hidden': hidden[:, 0], 'cache': cache}
    if aux.routes is not None:
      s['routes'] = jax.lax.dynamic_update_slice_in_dim(s['routes'], aux.routes, slot, 1)
    return emit(s)

  state = emit(state)
  state = jax.lax.while_loop(lambda s: (s['step'] < length) & ~s['done'].all(), advance, state)
  return Rollout(
    prompts=repeat(prompts, samples),
    start=row_start,
    tokens=state['tokens'],
    valid=state['valid'],
    logits=state['stored'] if store == 'logits' else None,
    hidden=state['stored'] if store == 'hidden' else None,
    logp=state['logp'],
    routes=state['routes'],
    version=0 * row_start,
    engine=0 * row_start,
    reward=0.0 * row_start,
  )


def _clean_prompts(prompts, start):
  """Slots before the prompt hold token 0, whatever they held: content of padding never matters."""
  slots = jnp.arange(prompts.shape[1])
  return jnp.where(slots[None] >= start[:, None], prompts, 0)


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
  tokens = jnp.where(rollout.valid, rollout.tokens, 0)
  tokens = jnp.concatenate([_clean_prompts(rollout.prompts, rollout.start), tokens[:, :-1]], 1)
  hidden, _, aux = policy.apply(
    params,
    config,
    tokens,
    start=rollout.start,
    noise_keys=noise_keys,
    attention=attention,
    hooks=hooks,
  )
  return hidden[:, width - 1 :], aux


def rescore(
  params: policy.Params,
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

  `aux.gates` are the weights the engine gave to its experts, which a rollout does not hold.
  """
  noise_keys = None
  width, length = rollout.prompts.shape[1], rollout.tokens.shape[1]
  if hooks.keyed:
    prompt_keys, keys = row_keys(key, rollout.start.shape[0] // samples, samples, first_sample)
    keys = keys.reshape(-1)
    noise_keys = jnp.concatenate(
      [
        repeat(_noise_keys(prompt_keys, 0, width), samples),
        token_keys(keys, length - 1, stream=0, first=width),
      ],
      1,
    )
  return score(params, config, rollout, noise_keys=noise_keys, hooks=hooks, attention=attention)


def replay(
  params: policy.Params,
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

  Same tokens; logits (or hidden states) and log-probs are those of `score` with the engine's own
  parameters, hooks and noise (`key` and `first_sample` as given to `generate`). Slots after EOS
  hold 0, as in `generate`.
  """
  shared = {'samples': samples, 'first_sample': first_sample}
  hidden, aux = rescore(params, config, rollout, key, hooks=hooks, attention=attention, **shared)
  keys = None
  if hooks.logits is not None:
    keys = row_keys(key, rollout.start.shape[0] // samples, **shared)[1].reshape(-1)
  logits, reported = _engine_scores(policy.logits(params, hidden), keys, 0, hooks)
  logp = token_logp(reported, rollout.tokens, rollout.valid, temperature=temperature)
  blank = lambda x: jnp.where(rollout.valid[..., None], x, 0)
  return dataclasses.replace(
    rollout,
    logits=None if rollout.logits is None else blank(logits),
    hidden=None if rollout.hidden is None else blank(hidden),
    logp=logp,
    routes=aux.routes,
  )


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
  attention: attn.Attention = attn.plain,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
) -> Float[Array, 'B T']:
  """Log-probs of the rollout's tokens under `params` in nats, 0 on invalid slots.

  One full forward pass; scores over the vocabulary never exist all at once. Gradients flow into
  `params`.
  """

  def block(head, hidden, tokens, valid, *, axis_name=None):
    logp, _ = linear_head.logp(hidden, head, tokens, temperature=temperature, axis_name=axis_name)
    return jnp.where(valid, logp, 0)

  hidden, _ = score(params, config, rollout, attention=attention, hooks=hooks)
  by_head = sharding.over_head(block)
  return by_head(policy.head(params), hidden, rollout.tokens, rollout.valid)
