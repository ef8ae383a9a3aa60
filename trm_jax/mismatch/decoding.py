"""Decoding: the engine draws from a processed distribution, and may report the raw one.

Processors run in `order` on the engine's scores, as logits processors do: temperature divides,
filters set tokens to -inf. What remains is renormalised, so a kept token's log-prob rises by
-log(kept mass) while the trainer's does not: log_ratio <= log(kept mass) on every filtered token.
The mitigation is `replay_support`: the trainer renormalises over the same tokens.

The bug that everybody meets once: `reported='raw'` hands over log-probs of the scores before any
processor, temperature included, though the tokens were drawn after them.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax import policy
from trm_jax.rollouts.sampling import COLDEST
from trm_jax.types import InputError

Processor = Literal['temperature', 'top_k', 'top_p', 'min_p']
ORDER = ('temperature', 'top_k', 'top_p', 'min_p')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
  """Sampling filters of the engine, and which log-probs it hands over; the default is neither."""

  # The engine's sampling temperature where it is not the trainer's; at least .001.
  temperature: float | None = None
  # Keep the k likeliest tokens (and those that tie with the last).
  top_k: int | None = None
  # Keep the smallest set of likeliest tokens that holds this much probability, in (0, 1].
  top_p: float | None = None
  # Keep tokens of at least this share of the likeliest one's probability, in (0, 1].
  min_p: float | None = None
  # Processors in the order they run; top-p after temperature keeps other tokens than before it.
  order: tuple[Processor, Processor, Processor, Processor] = ORDER
  # processed = log-probs of the distribution drawn from; raw = the classic bug: of the scores
  # before temperature and filters.
  reported: Literal['processed', 'raw'] = 'processed'

  def __post_init__(self):
    if self.temperature is not None and not self.temperature >= COLDEST:
      raise InputError(
        f'decoding.temperature={self.temperature} must be at least {COLDEST}; for the likeliest'
        ' token alone set decoding.top_k=1.'
      )
    if self.top_k is not None and self.top_k < 1:
      raise InputError(
        f'decoding.top_k={self.top_k} must be at least 1; leave it out for no filter.'
      )
    for name in ('top_p', 'min_p'):
      value = getattr(self, name)
      if value is not None and not 0 < value <= 1:
        raise InputError(f'decoding.{name}={value} must lie in (0, 1]; leave it out for no filter.')
    if sorted(self.order) != sorted(ORDER):
      raise InputError(f'decoding.order={self.order} must name each of {", ".join(ORDER)} once.')
    if self.reported not in ('processed', 'raw'):
      raise InputError(f'decoding.reported={self.reported!r} is not processed or raw.')


def keep_top_k(scores: Float[Array, '*b V'], k: int) -> Float[Array, '*b V']:
  """Scores below the k-th largest become -inf; ties with it stay, and k >= V keeps all."""
  last = jax.lax.top_k(scores, min(k, scores.shape[-1]))[0][..., -1:]
  return jnp.where(scores >= last, scores, -jnp.inf)


def keep_top_p(scores: Float[Array, '*b V'], p: float | Float[Array, '']) -> Float[Array, '*b V']:
  """Scores outside the smallest set of likeliest tokens with mass >= p become -inf; ties stay."""
  ranked = jax.lax.top_k(scores, scores.shape[-1])[0]
  mass = jax.nn.softmax(ranked)
  before = jnp.cumsum(mass, -1) - mass
  # The likeliest token stays whatever the rounding of the sums.
  inside = (before < p) & (mass > 0) & (p < 1) | (p == 1)
  last = jnp.where(inside, ranked, ranked[..., :1]).min(-1, keepdims=True)
  return jnp.where(scores >= last, scores, -jnp.inf)


def keep_min_p(scores: Float[Array, '*b V'], p: float | Float[Array, '']) -> Float[Array, '*b V']:
  """Scores of tokens less likely than p times the likeliest become -inf."""
  floor = scores.max(-1, keepdims=True) + jnp.log(jnp.float32(p))
  return jnp.where(scores >= floor, scores, -jnp.inf)


def process(
  decoding: Decoding, scores: Float[Array, '*b V'], *, temperature: float = 1.0
) -> Float[Array, '*b V']:
  """Scores whose softmax at `temperature` is the distribution the engine draws from.

  `temperature` is the trainer's, and the engine's own unless `decoding.temperature` is set.
  """
  own = temperature if decoding.temperature is None else decoding.temperature
  filters = {'top_k': keep_top_k, 'top_p': keep_top_p, 'min_p': keep_min_p}
  seen = scores.astype(jnp.float32)
  for name in decoding.order:
    if name == 'temperature':
      seen = seen / own
    elif getattr(decoding, name) is not None:
      seen = filters[name](seen, getattr(decoding, name))
  # From the scores themselves: without a temperature of its own nothing is divided and multiplied.
  return jnp.where(seen > -jnp.inf, scores * (temperature / own), -jnp.inf)


def filter_hooks(decoding: Decoding, strength=1.0, *, temperature: float = 1.0) -> policy.Hooks:
  """Hooks that act where strength > 0 (it may be traced); `temperature` is the trainer's."""
  plain = dataclasses.replace(Decoding(), order=decoding.order, reported=decoding.reported)

  def decode(scores):
    return jnp.where(strength > 0, process(decoding, scores, temperature=temperature), scores)

  def raw(own, drawn):
    # Divided by the trainer's temperature later: their log-probs are those at temperature 1.
    return jnp.where(strength > 0, own * temperature, drawn)

  return policy.Hooks(
    decode=None if decoding == plain else decode,
    reported=raw if decoding.reported == 'raw' else None,
  )
