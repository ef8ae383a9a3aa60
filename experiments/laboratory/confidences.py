"""Contexts of a large vocabulary whose confidences are as published: mostly sure, some not."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from trm_jax.mismatch import heavy_tail
from trm_jax.types import InputError

# Published shares of sampled tokens by the probability of the token: < .5, .5-.9, .9-.99, .99-.999
# and above.
SHARES = (0.23, 0.19, 0.16, 0.13, 0.29)
# Confidence at the borders of the bins; below .1 Zipf's likeliest token would no longer be it.
BORDERS = (0.1, *heavy_tail.EDGES, 1 - 1e-6)
ROWS, SLOTS = 8, 16  # contexts of one call at the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
  """`contexts` contexts (a multiple of 128) over `vocabulary` tokens.

  All tokens but the likeliest follow Zipf's law with exponent `zipf`.
  """

  vocabulary: int
  contexts: int
  zipf: float = 1.0

  def __post_init__(self):
    if self.vocabulary < 1024:
      raise InputError(f'vocabulary={self.vocabulary} must be at least 1024.')
    if self.contexts < ROWS * SLOTS or self.contexts % (ROWS * SLOTS):
      raise InputError(f'contexts={self.contexts} must be a positive multiple of {ROWS * SLOTS}.')
    if not 0 < self.zipf <= 1:
      raise InputError(f'zipf={self.zipf} must lie in (0, 1].')


def confidences(count: int) -> tuple[np.ndarray, np.ndarray]:
  """(confidence of the likeliest token, weight) on a grid of `count` points a bin, float64.

  Log-odds are uniform within a bin. A context of confidence c samples another token with
  probability 1 - c, which then falls into the lowest bin; weights make up for it.
  """
  logit = np.log(np.array(BORDERS)) - np.log1p(-np.array(BORDERS))
  place = (np.arange(count) + 0.5) / count
  c = 1 / (1 + np.exp(-(logit[:-1, None] + np.diff(logit)[:, None] * place)))
  weight = np.array(SHARES) / c.mean(1)
  weight[0] = 1 - weight[1:].sum()
  return c.ravel(), np.repeat(weight / count, count)


def contexts(mix: Mix, number: int, rng: np.random.Generator):
  """Scores [ROWS, SLOTS, V] float32 of one call's contexts; confidences stratified over all."""
  c, weight = confidences(200)
  place = (np.arange(number * ROWS * SLOTS, (number + 1) * ROWS * SLOTS) + 0.5) / mix.contexts
  # An odd step through the strata, so that each call sees every confidence.
  place = (place * (mix.contexts // 2 + 1)) % 1
  chosen = c[np.minimum(np.searchsorted(np.cumsum(weight), place), c.size - 1)]
  law = np.arange(1, mix.vocabulary) ** -mix.zipf
  rest = np.log(law / law.sum()).astype(np.float32)
  scores = np.log1p(-chosen)[:, None].astype(np.float32) + rest[None]
  top = int(rng.integers(mix.vocabulary))
  scores = np.insert(scores, top, np.log(chosen).astype(np.float32), axis=1)
  return jnp.asarray(scores.reshape(ROWS, SLOTS, mix.vocabulary))
