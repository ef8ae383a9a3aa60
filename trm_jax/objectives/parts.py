"""The parts a method is composed of: surrogates and weights as functions of a `Scored` minibatch.

Each reads the log-probs it needs and calls the function on arrays of the same name. Bind settings
with `types.part`, so that methods can be compared: part(clip, anchor='recomputed', clip_high=0.3).
"""

from jaxtyping import Array, Float

from trm_jax.objectives import surrogates, weights
from trm_jax.objectives.scored import Advantages, Anchor, Scored


def ratio(
  scored: Scored, advantages: Advantages, *, anchor: Anchor = 'rollout'
) -> Float[Array, 'B T']:
  """ratio * A, unclipped: `surrogates.ratio_pg`."""
  anchor_logp = scored.anchor_logp(anchor)
  return surrogates.ratio_pg(scored.logp, anchor_logp, advantages, scored.valid)


def clip(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'rollout',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Float[Array, 'B T']:
  """PPO's clip: `surrogates.ppo_clip`."""
  return surrogates.ppo_clip(
    scored.logp,
    scored.anchor_logp(anchor),
    advantages,
    scored.valid,
    clip_low=clip_low,
    clip_high=clip_high,
  )


def decoupled(
  scored: Scored,
  advantages: Advantages,
  *,
  anchor: Anchor = 'version',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  max_ratio: float = 2.0,
) -> Float[Array, 'B T']:
  """Clip on the drift times a truncated ratio of the engine: `surrogates.decoupled`."""
  return surrogates.decoupled(
    scored.logp,
    scored.anchor_logp(anchor),
    scored.rollout_logp,
    advantages,
    scored.valid,
    clip_low=clip_low,
    clip_high=clip_high,
    max_ratio=max_ratio,
  )


def tis(
  scored: Scored, *, anchor: Anchor = 'recomputed', max_ratio: float = 2.0
) -> Float[Array, 'B T']:
  """min(anchor / rollout, max_ratio) per token: `weights.truncated`."""
  log_ratio = scored.anchor_logp(anchor) - scored.rollout_logp
  return weights.truncated(log_ratio, scored.valid, max_ratio=max_ratio)


def sequence_tis(
  scored: Scored, *, anchor: Anchor = 'recomputed', max_ratio: float = 2.0
) -> Float[Array, 'B T']:
  """min(product over the row of anchor / rollout, max_ratio): `weights.sequence_truncated`."""
  log_ratio = scored.anchor_logp(anchor) - scored.rollout_logp
  return weights.sequence_truncated(log_ratio, scored.valid, max_ratio=max_ratio)
