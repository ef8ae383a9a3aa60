"""A fleet of rollout engines, each with its own mismatch.

Of the G samples of each prompt, `broken_samples` come from a second engine; the first engine may be
disturbed as well. `generate` runs the engines one after the other over the same prompts and puts
their samples side by side, healthy ones first.
"""

import collections.abc
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import attention as attn
from trm_jax import policy, sampling
from trm_jax.mismatch import decoding as dc
from trm_jax.mismatch import heavy_tail as ht
from trm_jax.mismatch import precision as pr
from trm_jax.mismatch import reduction as rd
from trm_jax.mismatch import reporting as rp
from trm_jax.mismatch import routing as rt
from trm_jax.mismatch import staleness as st
from trm_jax.types import InputError, Rollout

Score = Literal['decode', 'replay']
# One number for all sources (0 turns every mismatch off), or one for each source by its name; a
# source that is not named has 1. May be traced.
Strength = float | Float[Array, ''] | collections.abc.Mapping[str, Any]

# Streams of the rollout's key, beyond those of its prompts; and of a prompt's, beyond its slots'.
_WEIGHTS, _SCRAMBLE = 2**31, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Sources of mismatch of one engine; any subset. The default is none at all."""

  precision: pr.Precision = pr.Precision()
  reduction: rd.Reduction = rd.Reduction()
  routing: rt.Routing = rt.Routing()
  staleness: st.Staleness = st.Staleness()
  decoding: dc.Decoding = dc.Decoding()
  heavy_tail: ht.HeavyTail = ht.HeavyTail()
  reporting: rp.Reporting = rp.Reporting()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
  """Who produces the G samples of a prompt."""

  # The engine of the remaining samples (all of them by default).
  engine: Engine = Engine()
  # The engine of `broken_samples`.
  broken: Engine = Engine()
  # How many of the samples of each prompt the broken engine produces.
  broken_samples: int = 0

  def __post_init__(self):
    if self.broken_samples < 0:
      raise InputError(f'fleet.broken_samples={self.broken_samples} must be >= 0.')
    if self.broken != Engine() and not self.broken_samples:
      raise InputError(
        'fleet.broken describes a mismatch but fleet.broken_samples is 0: say how many samples of'
        ' each prompt it produces.'
      )

  def shares(self, samples: int) -> list[tuple[Engine, int]]:
    """(engine, samples per prompt), in row order. Raises InputError if the parts exceed G."""
    if self.broken_samples > samples:
      raise InputError(
        f'fleet.broken_samples={self.broken_samples} exceeds samples={samples} per prompt.'
      )
    parts = [(self.engine, samples - self.broken_samples), (self.broken, self.broken_samples)]
    return [(engine, count) for engine, count in parts if count]

  def check(self, config: policy.PolicyConfig, samples: int) -> None:
    """Raises InputError where engines of this policy and so many samples a prompt cannot be so."""
    for engine, count in self.shares(samples):
      engine.routing.check(config)
      engine.reporting.check(count)

  @property
  def stuck(self) -> bool:
    """Whether some engine needs the weights of RL step 0."""
    return self.engine.staleness.stuck or self.broken.staleness.stuck

  @property
  def history(self) -> int:
    """How many past parameter versions the fleet needs."""
    return max(self.engine.staleness.steps, self.broken.staleness.steps)


def _of(strength: Strength, source: str):
  """Strength of one source. Raises InputError for a name that is no source."""
  if not isinstance(strength, collections.abc.Mapping):
    return strength
  known = [field.name for field in dataclasses.fields(Engine)]
  for name in strength:
    if name not in known:
      raise InputError(f'strength names {name!r}, which is not one of {", ".join(known)}.')
  return strength.get(source, 1.0)


def hooks(
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
  shift = ht.hooks(engine.heavy_tail, of('heavy_tail'), outlier=outlier, **at)
  rounding = pr.hooks(engine.precision, of('precision'), **at)
  route = rt.hooks(engine.routing, of('routing'))
  decode = dc.hooks(engine.decoding, of('decoding'), **at)
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
  held = st.weights(
    engine.staleness, current, first=first, history=history, strength=of('staleness')
  )
  held = rd.permute(held, engine.reduction, config, of('reduction'))
  stochastic = engine.precision.rounding == 'stochastic'
  draw = jax.random.fold_in(key, _WEIGHTS) if stochastic else None
  return pr.round_weights(held, engine.precision, of('precision'), draw)


def generate(
  fleet: Fleet,
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
  version: Int[Array, ''],
  first: policy.Params | None = None,
  history: policy.Params | None = None,
  strength: Strength = 1.0,
  temperature: float = 1.0,
  score: Score = 'decode',
  store: sampling.Store = 'logits',
  attention: attn.Attention = attn.plain,
) -> Rollout:
  """Rollout of the whole fleet; rows of one prompt adjoin, the broken engine's last.

  `first` are the weights of RL step 0 (needed by a stuck engine), `history` past versions (needed
  by a stale one), `version` the current RL step. `strength` 0 turns every mismatch off without
  recompiling, `{'routing': 0.}` that source alone; with no mismatch configured nothing of it is
  traced. `engine` of a row is 1 for the broken engine, even where it produces all samples. Raises
  InputError where the fleet needs weights, samples, experts or logits that are not there.
  """
  healthy = samples - fleet.broken_samples
  shares = fleet.shares(samples)
  fleet.check(config, samples)
  for engine, _ in shares:
    if engine.reduction.permute and store == 'hidden':
      raise InputError(
        "store='hidden' would hold permuted states (reduction.permute); use store='logits'."
      )
  held = [
    engine_weights(engine, params, config, key, first=first, history=history, strength=strength)
    for engine, _ in shares
  ]
  parts = []
  done = 0
  for (engine, count), weights in zip(shares, held, strict=True):
    outlier = None
    if engine.heavy_tail.outliers:
      outlier = sampling.repeat(ht.outlier_prompts(engine.heavy_tail, prompts, start), count)
    shared = {
      'samples': count,
      'first_sample': done,
      'temperature': temperature,
      'hooks': hooks(engine, strength, temperature=temperature, outlier=outlier),
      'attention': rd.attention(engine.reduction, attention, _of(strength, 'reduction')),
    }
    part = sampling.generate(
      weights, config, prompts, start, key, length=length, eos=eos, pad=pad, store=store, **shared
    )
    if score == 'replay':
      part = sampling.replay(weights, config, part, key, **shared)
    if engine.reporting != rp.Reporting():
      prompt_keys, keys = sampling.row_keys(key, prompts.shape[0], count, done)
      logp = rp.report(
        engine.reporting,
        part.logp,
        part.valid,
        token_keys=sampling.token_keys(keys.reshape(-1), length, stream=3),
        prompt_keys=jax.vmap(lambda k: jax.random.fold_in(k, _SCRAMBLE))(prompt_keys),
        strength=_of(strength, 'reporting'),
      )
      part = dataclasses.replace(part, logp=logp)
    reported = st.reported_version(engine.staleness, version, _of(strength, 'staleness'))
    parts.append(
      dataclasses.replace(
        part, version=part.version + reported, engine=part.engine + (done >= healthy)
      )
    )
    done += count
  return side_by_side(parts, prompts.shape[0])


def side_by_side(parts: list[Rollout], prompts: int) -> Rollout:
  """Joins rollouts of the same prompts so that all samples of a prompt adjoin."""

  def join(*leaves):
    grouped = [x.reshape(prompts, -1, *x.shape[1:]) for x in leaves]
    joined = jnp.concatenate(grouped, 1)
    return joined.reshape(-1, *joined.shape[2:])

  return parts[0] if len(parts) == 1 else jax.tree.map(join, *parts)
