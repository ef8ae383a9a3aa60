"""A fleet of rollout engines, each with its own mismatch.

Of the G samples of each prompt, `broken_samples` come from a second engine; the first engine may be
disturbed as well. `generate` runs the engines one after the other over the same prompts and puts
their samples side by side, healthy ones first.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from trm_jax import attention as attn
from trm_jax import policy, sampling
from trm_jax.mismatch import precision as pr
from trm_jax.mismatch import routing as rt
from trm_jax.mismatch import staleness as st
from trm_jax.types import InputError, Rollout

Score = Literal['decode', 'replay']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Sources of mismatch of one engine; any subset. The default is none at all."""

  precision: pr.Precision = pr.Precision()
  routing: rt.Routing = rt.Routing()
  staleness: st.Staleness = st.Staleness()


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

  @property
  def stuck(self) -> bool:
    """Whether some engine needs the weights of RL step 0."""
    return self.engine.staleness.stuck or self.broken.staleness.stuck

  @property
  def history(self) -> int:
    """How many past parameter versions the fleet needs."""
    return max(self.engine.staleness.steps, self.broken.staleness.steps)


def hooks(engine: Engine, strength=1.0) -> policy.Hooks:
  """The engine's hooks into the policy; every field None for a healthy engine."""
  rounding = pr.hooks(engine.precision, strength)
  return dataclasses.replace(rounding, router=rt.hook(engine.routing, strength))


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
  strength: float | Float[Array, ''] = 1.0,
  temperature: float = 1.0,
  score: Score = 'decode',
  store: sampling.Store = 'logits',
  attention: attn.Attention = attn.plain,
) -> Rollout:
  """Rollout of the whole fleet; rows of one prompt adjoin, the broken engine's last.

  `first` are the weights of RL step 0 (needed by a stuck engine), `history` past versions (needed
  by a stale one), `version` the current RL step. `strength` 0 turns every mismatch off
  without recompiling; with no mismatch configured nothing of it is traced. `engine` of a row is 1
  for the broken engine, even where it produces all samples. Raises InputError where the fleet needs
  weights or samples that were not given.
  """
  healthy = samples - fleet.broken_samples
  shares = fleet.shares(samples)
  held = [
    st.weights(engine.staleness, params, first=first, history=history, strength=strength)
    for engine, _ in shares
  ]
  parts = []
  done = 0
  for (engine, count), weights in zip(shares, held, strict=True):
    weights = pr.round_weights(weights, engine.precision, strength)
    shared = {
      'samples': count,
      'first_sample': done,
      'temperature': temperature,
      'hooks': hooks(engine, strength),
      'attention': attention,
    }
    part = sampling.generate(
      weights, config, prompts, start, key, length=length, eos=eos, pad=pad, store=store, **shared
    )
    if score == 'replay':
      part = sampling.replay(weights, config, part, key, **shared)
    reported = st.reported_version(engine.staleness, version, strength)
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
