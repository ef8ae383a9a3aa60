"""A fleet of rollout engines, each with its own mismatch.

Of the G samples of each prompt, `broken_samples` come from a second engine; the first engine may be
disturbed as well. `generate` runs the engines one after the other over the same prompts and puts
their samples side by side, healthy ones first.
"""

import collections.abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import policy
from trm_jax.mismatch import presets
from trm_jax.mismatch.decoding import filter_hooks
from trm_jax.mismatch.engine import Engine
from trm_jax.mismatch.heavy_tail import outlier_prompts, shift_hooks
from trm_jax.mismatch.precision import attention as in_few_bits
from trm_jax.mismatch.precision import round_weights, rounding_hooks
from trm_jax.mismatch.reduction import attention as in_blocks
from trm_jax.mismatch.reduction import permute
from trm_jax.mismatch.reporting import Reporting, report
from trm_jax.mismatch.routing import routing_hooks
from trm_jax.mismatch.staleness import Staleness, reported_version
from trm_jax.mismatch.staleness import weights as weights_of_age
from trm_jax.policy.attention import Attention, plain
from trm_jax.rollouts import relay, sampling, scoring, streams
from trm_jax.rollouts.groups import repeat, side_by_side
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record, Store
from trm_jax.types import InputError, Rollout

# One number for all sources (0 turns every mismatch off), or one for each source by its name; a
# source that is not named has 1. May be traced.
Strength = float | Float[Array, ''] | collections.abc.Mapping[str, Any]

# Streams of the rollout's key, beyond those of its prompts; and of a prompt's, beyond its slots'.
_WEIGHTS, _SCRAMBLE = 2**31, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
  """Who produces the G samples of a prompt."""

  # The engine of the remaining samples (all of them by default) ...
  engine: Engine = Engine()
  # ... or one of those with published magnitudes: see trm_jax.mismatch.presets.
  preset: presets.Name | None = None
  # The engine of `broken_samples`.
  broken: Engine = Engine()
  # How many of the samples of each prompt the broken engine produces.
  broken_samples: int = 0

  def __post_init__(self):
    if self.broken_samples < 0:
      raise InputError(f'fleet.broken_samples={self.broken_samples} must be >= 0.')
    if self.preset is not None:
      presets.named(self.preset)
    if self.preset is not None and self.engine != Engine():
      raise InputError(
        f'fleet.preset={self.preset!r} and fleet.engine both describe the first engine; set one.'
      )
    if self.broken != Engine() and not self.broken_samples:
      raise InputError(
        'fleet.broken describes a mismatch but fleet.broken_samples is 0: say how many samples of'
        ' each prompt it produces.'
      )

  @property
  def first(self) -> Engine:
    """The first engine: the preset where there is one."""
    return self.engine if self.preset is None else presets.named(self.preset).engine

  def shares(self, samples: int) -> list[tuple[Engine, int]]:
    """(engine, samples per prompt), in row order. Raises InputError if the parts exceed G."""
    if self.broken_samples > samples:
      raise InputError(
        f'fleet.broken_samples={self.broken_samples} exceeds samples={samples} per prompt.'
      )
    parts = [(self.first, samples - self.broken_samples), (self.broken, self.broken_samples)]
    return [(engine, count) for engine, count in parts if count]

  def _named(self, engine: Engine) -> str:
    """How a setting of the engine is written, up to the source's name."""
    if engine is self.engine:
      return 'fleet.engine.'
    return 'fleet.broken.' if engine is self.broken else f'fleet.preset={self.preset!r}: '

  def check(
    self,
    config: policy.PolicyConfig,
    samples: int,
    store: Store = 'logits',
    length: int | None = None,
  ) -> None:
    """Raises InputError where engines of this policy and so many samples a prompt cannot be so,
    where `store` cannot hold what they draw from, or responses of `length` slots are too short."""
    for engine, count in self.shares(samples):
      try:
        engine.routing.check(config)
        engine.reporting.check(count, length)
      except InputError as error:
        raise InputError(f'{self._named(engine)}{error}') from error
      if store != 'hidden':
        continue
      if engine.staleness.switch is not None:
        raise InputError(
          "store='hidden' cannot hold the heads of weights that change during a response"
          " (staleness.switch); use store='logits' or 'topk'."
        )
      if engine.reduction.permute:
        raise InputError(
          "store='hidden' would hold permuted states (reduction.permute); use store='logits'."
        )
      shift = engine.heavy_tail
      if (
        (shift.scale or shift.spikes or shift.outliers)
        or filter_hooks(engine.decoding).decode
        or rounding_hooks(engine.precision).logits
      ):
        raise InputError(
          "store='hidden' cannot hold what an engine does to its scores (decoding, heavy_tail,"
          " precision.logits or softmax); use store='logits' or 'topk'."
        )

  @property
  def stuck(self) -> bool:
    """Whether some engine needs the weights of RL step 0."""
    return self.first.staleness.stuck or self.broken.staleness.stuck

  @property
  def history(self) -> int:
    """How many past parameter versions the fleet needs."""
    return max(self.first.staleness.steps, self.broken.staleness.steps)

  def ages(self, samples: int, length: int) -> tuple[int, ...]:
    """Versions behind that draw tokens of a response of so many, each once."""
    engines = [engine for engine, _ in self.shares(samples)]
    return tuple(sorted({age for e in engines for age in e.staleness.ages(length)}))


def _of(strength: Strength, source: str):
  """Strength of one source. Raises InputError for a name that is no source."""
  if not isinstance(strength, collections.abc.Mapping):
    return strength
  known = [field.name for field in dataclasses.fields(Engine)]
  for name in strength:
    if name not in known:
      raise InputError(f'strength names {name!r}, which is not one of {", ".join(known)}.')
  return strength.get(source, 1.0)


def engine_hooks(
  engine: Engine,
  strength: Strength = 1.0,
  *,
  temperature: float = 1.0,
  outlier: Bool[Array, 'B'] | None = None,
) -> policy.Hooks:
  """The engine's hooks; every field None for a healthy engine.

  `temperature` is the trainer's, `outlier` marks the rows of outlier prompts. Scores are shifted
  before they are rounded.
  """
  of = lambda source: _of(strength, source)
  at = {'temperature': temperature}
  shift = shift_hooks(engine.heavy_tail, of('heavy_tail'), outlier=outlier, **at)
  rounding = rounding_hooks(engine.precision, of('precision'), **at)
  route = routing_hooks(engine.routing, of('routing'))
  decode = filter_hooks(engine.decoding, of('decoding'), **at)
  logits = shift.logits or rounding.logits
  if shift.logits and rounding.logits:
    logits = lambda scores, keys: rounding.logits(shift.logits(scores, keys), keys)
  bind = rounding.bind or route.bind
  if rounding.bind and route.bind:
    bind = lambda hooks, *at: route.bind(rounding.bind(hooks, *at), *at)
  return dataclasses.replace(
    rounding,
    logits=logits,
    bind=bind,
    router=route.router,
    routes=route.routes,
    decode=decode.decode,
    reported=decode.reported,
  )


def served_attention(engine: Engine, own: Attention, strength: Strength) -> Attention:
  """The engine's attention: `own`, in its order of sums and its precision."""
  ordered = in_blocks(engine.reduction, own, _of(strength, 'reduction'))
  return in_few_bits(engine.precision, ordered, _of(strength, 'precision'))


def engine_weights(
  engine: Engine,
  current: policy.Params,
  config: policy.PolicyConfig,
  key: Key[Array, ''],
  *,
  first: policy.Params | None = None,
  history: policy.Params | None = None,
  strength: Strength = 1.0,
) -> policy.Params:
  """The weights the engine computes with: stale, then permuted, then rounded."""
  of = lambda source: _of(strength, source)
  held = weights_of_age(
    engine.staleness, current, first=first, history=history, strength=of('staleness')
  )
  held = permute(held, engine.reduction, config, of('reduction'))
  stochastic = engine.precision.rounding == 'stochastic'
  draw = jax.random.fold_in(key, _WEIGHTS) if stochastic else None
  return round_weights(held, engine.precision, of('precision'), draw)


def _all_weights(engine, current, config, key, length, **held) -> relay.Weights:
  """What the engine computes a response of so many tokens with: its weights, or a relay of them."""
  if engine.staleness.switch is None:
    return engine_weights(engine, current, config, key, **held)
  versions = [
    engine_weights(
      dataclasses.replace(engine, staleness=Staleness(steps=age)), current, config, key, **held
    )
    for age in engine.staleness.ages(length)
  ]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *versions)
  return relay.Relay(stacked, engine.staleness.switch)


def generate(
  fleet: Fleet,
  params: policy.Params,
  config: policy.PolicyConfig,
  prompts: Int[Array, 'p P'],
  start: Int[Array, 'p'],
  key: Key[Array, ''],
  request: Request,
  record: Record = Record(),  # noqa: B008 - frozen
  *,
  version: Int[Array, ''],
  first: policy.Params | None = None,
  history: policy.Params | None = None,
  strength: Strength = 1.0,
  attention: Attention = plain,
) -> Rollout:
  """Rollout of the whole fleet; rows of one prompt adjoin, the broken engine's last.

  `first` are the weights of RL step 0 (needed by a stuck engine), `history` past versions (needed
  by a stale one), `version` the current RL step. `strength` 0 turns every mismatch off without
  recompiling, `{'routing': 0.}` that source alone; with no mismatch configured nothing of it is
  traced. `engine` of a row is 1 for the broken engine, even where it produces all samples. Raises
  InputError where the fleet needs weights, samples, experts or logits that are not there.
  """
  healthy = request.samples - fleet.broken_samples
  shares = fleet.shares(request.samples)
  fleet.check(config, request.samples, record.store)
  versions = dict(first=first, history=history, strength=strength)
  held = [
    _all_weights(engine, params, config, key, request.length, **versions) for engine, _ in shares
  ]
  parts = []
  done = 0
  for (engine, count), weights in zip(shares, held, strict=True):
    own = dataclasses.replace(request, samples=count)
    at = dict(first_sample=done, attention=attention, strength=strength)
    part = _drawn(engine, weights, config, prompts, start, key, own, record, **at)
    if engine.reporting != Reporting():
      part = _reported(engine, part, key, first_sample=done, samples=count, strength=strength)
    of_token = reported_version(
      engine.staleness, version, request.length, _of(strength, 'staleness')
    )
    part = dataclasses.replace(
      part, version=part.version + of_token[None], engine=part.engine + (done >= healthy)
    )
    parts.append(part)
    done += count
  return side_by_side(parts, prompts.shape[0])


def _drawn(
  engine,
  weights,
  config,
  prompts,
  start,
  key,
  request,
  record,
  *,
  first_sample,
  attention,
  strength,
) -> Rollout:
  """The responses of one engine with its hooks, before its reporting."""
  outlier = None
  if engine.heavy_tail.outliers:
    outlier = repeat(outlier_prompts(engine.heavy_tail, prompts, start), request.samples)
  hooks = engine_hooks(engine, strength, temperature=request.temperature, outlier=outlier)
  served = served_attention(engine, attention, strength)
  acting = dict(first_sample=first_sample, hooks=hooks, attention=served)
  drawn = sampling.generate(weights, config, prompts, start, key, request, record, **acting)
  if record.score == 'decode' or not isinstance(weights, relay.Relay):
    return drawn
  # A relay whose staleness is off is scored as fresh weights are, bit for bit, in one pass.
  sizes = dict(samples=request.samples, temperature=request.temperature)
  whole = scoring.replay(weights.at(0), config, drawn, key, **sizes, **acting)
  stale = _of(strength, 'staleness') > 0
  return jax.tree.map(lambda a, b: jnp.where(stale, a, b), drawn, whole)


def _reported(engine, part: Rollout, key, *, first_sample, samples, strength) -> Rollout:
  """The rollout with the log-probs that reach the trainer."""
  prompts, length = len(part.start) // samples, part.tokens.shape[1]
  prompt_keys, keys = streams.row_keys(key, prompts, samples, first_sample)
  logp = report(
    engine.reporting,
    part.logp,
    part.valid,
    token_keys=streams.token_keys(keys.reshape(-1), length, stream=3),
    prompt_keys=jax.vmap(lambda k: jax.random.fold_in(k, _SCRAMBLE))(prompt_keys),
    strength=_of(strength, 'reporting'),
  )
  return dataclasses.replace(part, logp=logp)


def heads(
  fleet: Fleet,
  params: policy.Params,
  config: policy.PolicyConfig,
  key: Key[Array, ''],
  *,
  samples: int,
  first: policy.Params | None = None,
  history: policy.Params | None = None,
  strength: Strength = 1.0,
) -> tuple[Float[Array, 'V D'], ...]:
  """The output head of each engine, in the order of `shares`; arguments as given to `generate`.

  Beside them hidden states (store='hidden') say all that the engines' scores did.
  """
  held = dict(first=first, history=history, strength=strength)
  return tuple(
    policy.head(engine_weights(engine, params, config, key, **held))
    for engine, _ in fleet.shares(samples)
  )
