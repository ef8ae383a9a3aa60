"""Rotary positions: the angle of each pair of a head's entries, and how contexts are stretched.

frequency_i = base^(-i / half)             i = 0 .. half - 1, pairs (x_i, x_{i + half})
linear      frequency_i / factor
yarn        slow pairs as linear, fast pairs as they are, a ramp between (arXiv 2309.00071);
            queries and keys are scaled by 0.1 log(factor) + 1
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """How positions beyond the trained context are mapped; off by default.

  The published Qwen3 setting for 131,072 tokens is yarn, factor 4 of a context of 32,768.
  """

  kind: Literal['none', 'linear', 'yarn'] = 'none'
  # Stretch of the context, at least 1.
  factor: float = 1.0
  # Tokens of the context that the weights were trained on; yarn only.
  context: int = 32_768
  # yarn: pairs that turn more often than this in the trained context stay, ...
  beta_fast: float = 32.0
  # ... those that turn less often than this are stretched.
  beta_slow: float = 1.0
  # yarn: scale of queries and keys; None = 0.1 log(factor) + 1.
  magnitude: float | None = None

  def __post_init__(self):
    if self.kind not in ('none', 'linear', 'yarn'):
      raise InputError(f'rope_scaling.kind={self.kind!r} is not none, linear or yarn.')
    if not 1 <= self.factor < math.inf:
      raise InputError(f'rope_scaling.factor={self.factor} must be at least 1 and finite.')
    if self.kind == 'none' and self.factor != 1:
      raise InputError(
        f"rope_scaling.factor={self.factor} does nothing with rope_scaling.kind='none'; choose"
        ' linear or yarn.'
      )
    if self.context < 1:
      raise InputError(f'rope_scaling.context={self.context} must be at least 1.')
    if not 0 < self.beta_slow < self.beta_fast < math.inf:
      raise InputError(
        f'rope_scaling.beta_slow={self.beta_slow} and rope_scaling.beta_fast={self.beta_fast} must'
        ' satisfy 0 < beta_slow < beta_fast.'
      )
    if self.magnitude is not None and not 0 < self.magnitude < math.inf:
      raise InputError(f'rope_scaling.magnitude={self.magnitude} must be > 0 or left out.')


def frequencies(
  width: int,
  base: float,
  scaling: Scaling = Scaling(),
) -> tuple[Float[Array, 'half'], float]:
  """(radians a position of each pair, scale of queries and keys), as transformers computes them."""
  half = width // 2
  plain = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling.kind == 'none':
    return plain, 1.0
  if scaling.kind == 'linear':
    return plain / scaling.factor, 1.0

  def pair_of(turns):
    """Index of the pair that turns so often in the trained context."""
    return half * math.log(scaling.context / (turns * 2 * math.pi)) / math.log(base)

  low = max(math.floor(pair_of(scaling.beta_fast)), 0)
  high = min(math.ceil(pair_of(scaling.beta_slow)), width - 1)
  ramp = np.clip((np.arange(half) - low) / ((high - low) or 0.001), 0, 1).astype(np.float32)
  magnitude = scaling.magnitude
  if magnitude is None:
    magnitude = 0.1 * math.log(scaling.factor) + 1
  return plain * (1 - ramp) + plain / scaling.factor * ramp, magnitude


def rotate(
  x: Float[Array, 'B T H C'],
  positions: Int[Array, 'B T'],
  base: float,
  scaling: Scaling = Scaling(),
) -> Float[Array, 'B T H C']:
  """x with pair (i, i + C/2) turned by position * frequency_i; computed in float32, x's dtype."""
  frequency, magnitude = frequencies(x.shape[-1], base, scaling)
  angle = positions[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  if magnitude != 1:
    cos, sin = magnitude * cos, magnitude * sin
  half = x.shape[-1] // 2
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
