"""A policy small enough to enumerate, and the engine that serves it: the true harm of a mismatch.

The policy is the decoder of `trm_jax.policy` in its smallest size, over five tokens and responses
of four. An engine's noise is a function of the context here, drawn once for each prefix: the same
prefix always meets the same rollout policy, as an exact expectation needs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trm_jax import masks, policy
from trm_jax.exact import enumeration, oracle
from trm_jax.mismatch import fleet, heavy_tail
from trm_jax.policy import attention as attentions
from trm_jax.rollouts import groups
from trm_jax.types import InputError

VOCAB, HORIZON, PROMPTS = 5, 4, 4
# Exact ascent of J up to this level; the policy then takes as many steps as its engine is behind.
LEVEL, RATE, MOST = 0.5, 5e-4, 1000
_SCORES = 2  # stream of a context's key
TEXT = np.arange(PROMPTS, dtype=np.int32)[:, None] + np.array([[0, 1]], np.int32)


@dataclasses.dataclass(frozen=True)
class Pair:
  """Parameters now and `age` exact gradient steps ago, and the reward of every response."""

  params: policy.Params
  old: policy.Params
  reward: np.ndarray


def config_of(large: policy.PolicyConfig) -> policy.PolicyConfig:
  """The same architecture, layers and experts included, at width 16."""
  small = dict(width=16, heads=2, kv_heads=2, head_width=8, mlp_width=16, remat=False)
  return dataclasses.replace(large, **small)


def reward() -> np.ndarray:
  """1 where the tokens of a response add up to the prompt's number modulo 5; [X, S]."""
  tokens, _, _ = enumeration.sequences(vocab=VOCAB, horizon=HORIZON)
  return (tokens.sum(-1)[None] % VOCAB == np.arange(PROMPTS)[:, None]).astype(np.float64)


def _context_keys(key, rows):
  """A key for each slot of each row that only the row's tokens up to there decide."""
  keys, at = [], jnp.broadcast_to(key, rows.shape[:1])
  for slot in range(rows.shape[1]):
    at = jax.vmap(jax.random.fold_in)(at, rows[:, slot])
    keys.append(at)
  return jnp.stack(keys, 1)


def table(
  params: policy.Params,
  config: policy.PolicyConfig,
  *,
  engine: fleet.Engine | None = None,
  old: policy.Params | None = None,
  strength: fleet.Strength = 1.0,
  key: jax.Array | None = None,
) -> jax.Array:
  """Logits after every prefix, [X, C, V] float32: of the policy, or of an engine that serves it."""
  key = jax.random.key(0) if key is None else key
  hooks, attention = policy.Hooks(), attentions.plain
  if engine is not None:
    history = None
    if engine.staleness.switch is not None:
      raise InputError(
        f'staleness.switch={engine.staleness.switch} has no place here: a prefix is scored by one'
        ' version of the weights; leave it out.'
      )
    if engine.staleness.steps:
      history = jax.tree.map(lambda x: jnp.stack([x] * engine.staleness.steps), old)
    params = fleet.engine_weights(
      engine, params, config, key, first=old, history=history, strength=strength
    )
    outlier = heavy_tail.outlier_prompts(
      engine.heavy_tail, jnp.asarray(TEXT), jnp.zeros(PROMPTS, jnp.int32)
    )
    attention = fleet.served_attention(engine, attention, strength)
  # The longest prefixes hold all others: attention is causal, and noise knows its context alone.
  longest = np.indices((VOCAB,) * (HORIZON - 1), np.int32).reshape(HORIZON - 1, -1).T
  count, width = len(longest), TEXT.shape[1]
  rows = np.concatenate([np.repeat(TEXT, count, 0), np.tile(longest, (PROMPTS, 1))], 1)
  keys = _context_keys(key, jnp.asarray(rows))
  if engine is not None:
    hooks = fleet.engine_hooks(engine, strength, outlier=groups.repeat(outlier, count))
  hidden, _, _ = policy.apply(
    params,
    config,
    jnp.asarray(rows),
    start=jnp.zeros(len(rows), jnp.int32),
    noise_keys=keys if hooks.keyed else None,
    attention=attention,
    hooks=hooks,
  )
  scores = policy.logits(params, hidden[:, width - 1 :])
  if hooks.logits is not None:
    fold = jax.vmap(jax.vmap(lambda k: jax.random.fold_in(k, _SCORES)))
    scores = hooks.logits(scores, fold(keys[:, width - 1 :]))
  if hooks.decode is not None:
    scores = hooks.decode(scores)
  by_prefix = scores.reshape(PROMPTS, count, HORIZON, VOCAB)
  return jnp.concatenate(
    [by_prefix[:, :: VOCAB ** (HORIZON - 1 - t), t] for t in range(HORIZON)], 1
  )


@functools.cache
def _trainer(config: policy.PolicyConfig):
  optimizer = optax.adam(RATE)

  def objective(params, reward):
    steps = jax.nn.softmax(table(params, config))
    mass = enumeration.descend(jnp.full(PROMPTS, 1 / PROMPTS), steps)[1]
    return (mass * reward).sum()

  @jax.jit
  def step(params, state, reward):
    value, slope = jax.value_and_grad(lambda p: -objective(p, reward))(params)
    change, state = optimizer.update(slope, state)
    return optax.apply_updates(params, change), state, -value

  return optimizer, step


def train(config: policy.PolicyConfig, seed: int, age: int) -> Pair:
  """A policy after exact ascent of J from the seed's random weights, and itself `age` steps ago."""
  optimizer, step = _trainer(config)
  values = reward()
  params = policy.init(jax.random.key(seed), config, VOCAB)
  state, level, count = optimizer.init(params), 0.0, 0
  while level < LEVEL and count < MOST:
    params, state, level = step(params, state, jnp.asarray(values, jnp.float32))
    count += 1
  old = params
  for _ in range(age):
    params, state, _ = step(params, state, jnp.asarray(values, jnp.float32))
  return Pair(params, old, values)


@jax.jit
def truth(world: enumeration.World, limit):
  """(J, error, gradients of J, L' and masked L' by logits, share kept); float64."""
  kept = oracle.sequence_mask(world, masks.max_kl(limit=limit))
  mean = jnp.broadcast_to(oracle.rollout_objective(world), PROMPTS)
  slope = lambda f: oracle.gradient(f, world)
  share = 1 - oracle.rejected(world, kept * 1.0).rollout
  return {
    'objective': oracle.policy_objective(world),
    'kl': oracle.divergences(world).sequence_kl / HORIZON,
    'error': jnp.abs(oracle.error(world)),
    'kept': share,
    'true': slope(oracle.policy_objective),
    'surrogate': slope(lambda w: oracle.surrogate(w, baseline=mean)),
    'masked': slope(lambda w: oracle.surrogate(w, kept * 1.0, baseline=mean)),
  }


@functools.cache
def tables(config: policy.PolicyConfig, engine: fleet.Engine):
  """(params, old, strength, key) -> logits of (the policy, its engine); compiled once."""

  @jax.jit
  def run(params, old, strength, key):
    served = table(params, config, engine=engine, old=old, strength=strength, key=key)
    return table(params, config), served

  return run


@functools.cache
def lengths(config: policy.PolicyConfig):
  """(params, slopes by logits) -> |slope| by the parameters, one for each; compiled once."""

  @jax.jit
  def norms(params, slopes):
    _, pull = jax.vjp(lambda p: table(p, config), params)
    square = lambda x: sum((leaf**2).sum() for leaf in jax.tree.leaves(pull(x)[0]))
    return [jnp.sqrt(square(x)) for x in slopes]

  def run(params, slopes) -> list[float]:
    return [float(x) for x in norms(params, [jnp.asarray(x, jnp.float32) for x in slopes])]

  return run


@functools.cache
def judge(config: policy.PolicyConfig, engine: fleet.Engine):
  """(pair, strength, key, limit) -> true harm of the engine; one program for all strengths.

  `kl` = mean token KL; `error` = |J_theta - J_roll - L'|; `bias` = |grad L' - grad J_theta| over
  |grad J_theta| by the parameters, and `bias_trm` the same of L' under TRM-max; both from the
  reward minus its mean, as rejected rows count nothing. `kept` = probability to be kept.
  """

  def run(pair: Pair, strength, key, limit: float) -> dict[str, float]:
    own, served = tables(config, engine)(pair.params, pair.old, strength, key)
    with enumeration.float64():
      world = enumeration.world(own, served, horizon=HORIZON, reward=pair.reward)
      found = jax.tree.map(np.asarray, truth(world, limit))
    true = found['true']
    off = [true, found['surrogate'] - true, found['masked'] - true]
    true, raw, masked = lengths(config)(pair.params, off)
    return {
      **{name: float(found[name]) for name in ('objective', 'kl', 'error', 'kept')},
      'bias': raw / true,
      'bias_trm': masked / true,
    }

  return run
