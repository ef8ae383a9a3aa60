"""Teacher-forced scoring: what a policy, or the engine itself, says of a rollout's tokens.

    hidden, aux = score(params, config, rollout)                 # the trainer's full pass
    hidden, aux = rescore(params, config, rollout, key, ...)     # as the engine, with its noise
    logp = policy_logp(params, config, rollout)

Decode and the full forward pass agree to float32 noise; `replay` re-scores a rollout through the
full pass, where the zero-mismatch twin must be bitwise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import divergences, policy
from trm_jax.divergences import linear_head
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.policy.attention import Attention, plain
from trm_jax.rollouts import relay, stores, streams
from trm_jax.rollouts.groups import blanked, repeat
from trm_jax.rollouts.streams import row_keys, token_keys
from trm_jax.rollouts.support import replay_support
from trm_jax.types import Rollout


def engine_scores(scores, keys, first, hooks):
  """(scores [B,T,V] that tokens are drawn from, scores that log-probs are reported from)."""
  if hooks.logits is not None:
    scores = sharding.reshard(scores, DATA, None, None)
    noise = token_keys(keys, scores.shape[1], stream=2, first=first)
    scores = hooks.logits(scores, noise)
  drawn = scores
  if hooks.decode is not None:
    drawn = hooks.decode(sharding.reshard(scores, DATA, None, None))
  return drawn, drawn if hooks.reported is None else hooks.reported(scores, drawn)


def row_logp(temperature: float):
  """(scores [B,V], tokens [B]) -> log-probs [B], nats, at a temperature; rows over the mesh."""
  return sharding.over_rows(functools.partial(divergences.logp, temperature=temperature))


def clean_prompts(prompts, start):
  """Slots before the prompt hold token 0, whatever they held: content of padding never matters."""
  slots = jnp.arange(prompts.shape[1])
  return jnp.where(slots[None] >= start[:, None], prompts, 0)


def _fed(rollout):
  """Tokens that a pass over the rollout reads, tool text included, [B,L-1]; 0 where none is."""
  tokens = jnp.where(rollout.context, rollout.tokens, 0)
  return jnp.concatenate([clean_prompts(rollout.prompts, rollout.start), tokens[:, :-1]], 1)


def score(
  params: policy.Params,
  config: policy.PolicyConfig,
  rollout: Rollout,
  *,
  noise_keys: Key[Array, 'B Lm1'] | None = None,
  hooks: policy.Hooks = policy.Hooks(),  # noqa: B008 - frozen
  attention: Attention = plain,
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
  attention: Attention = plain,
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
  attention: Attention = plain,
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
    logits, reported = engine_scores(relay.logits(params, hidden), keys, 0, hooks)
    logp = token_logp(reported, rollout.tokens, rollout.valid, temperature=temperature)
    # One layout whatever the hooks, so that engines can be put side by side.
    kept = {'logits': sharding.reshard(blanked(~rollout.valid, logits), DATA, None, MODEL)}
  else:
    logp, top = _by_slot(params, hidden, rollout, keys, hooks, temperature)
    kept = {
      'hidden': None if rollout.hidden is None else blanked(~rollout.valid, hidden),
      'top': jax.tree.map(lambda x: blanked(~rollout.valid, x), top),
    }
  gates = None if rollout.gates is None else aux.gates
  return dataclasses.replace(rollout, logp=logp, routes=aux.routes, gates=gates, **kept)


def _by_slot(params, hidden, rollout, keys, hooks, temperature):
  """(log-probs, likeliest tokens if the rollout has them) from the scores of a slot at a time."""
  store, top = ('logp', 0) if rollout.top is None else ('topk', rollout.top.ids.shape[-1])

  of_rows = row_logp(temperature)

  def slot(xs):
    t, hidden, tokens, valid = xs
    scores = policy.logits(relay.at(params, t), hidden[:, None])
    scores, reported = (
      sharding.reshard(x[:, 0], DATA, None) for x in engine_scores(scores, keys, t, hooks)
    )
    logp = of_rows(reported, tokens)
    kept = stores.record(store, scores, hidden, temperature=temperature, top=top)
    return jnp.where(valid, logp, 0), kept

  turned = lambda x: jnp.moveaxis(x, 1, 0)
  slots = jnp.arange(rollout.tokens.shape[1])
  columns = jax.lax.map(slot, (slots, *map(turned, (hidden, rollout.tokens, rollout.valid))))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), columns)


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
  attention: Attention = plain,
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
    scores = replay_support(policy.logits(params, hidden), allowed)
    return token_logp(scores, rollout.tokens, rollout.valid, temperature=temperature)
  by_head = sharding.over_head(block)
  return by_head(policy.head(params), hidden, rollout.tokens, rollout.valid)
