"""Heavy tail: the log-odds of the likeliest token shift, a little always and a lot rarely.

    logit q(top) = logit p(top) + strength * shift
    shift = scale * sigma(p) * winsorised Student-t  +  spike  -  outlier shift

Measured between engines, the shift of log-odds hardly depends on confidence, so log-probs of sure
tokens move little and those of unsure ones much (arXiv 2609.32444; sigma(p) is its table for
Qwen1.5-MoE-A2.7B, vLLM against HF, bfloat16). One bounded shift a position, and not noise on every
score: E[exp(Student-t)] is infinite, and over a large vocabulary the sum is all tail. Tokens are
drawn from the shifted scores, so E[ratio] = 1 holds by construction.
"""

import dataclasses

import jax
import jax.numpy as jnp
import scipy.stats
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import policy
from trm_jax.rollouts.streams import each
from trm_jax.types import InputError

# Robust standard deviation of the log-odds shift, by the probability of the token.
EDGES = (0.5, 0.9, 0.99, 0.999)
SIGMA = (0.156, 0.175, 0.186, 0.203, 0.237)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyTail:
  """Shifts of the likeliest token's log-odds, in nats; the default is none."""

  # Size of the constant noise in units of the published table of an MoE under vLLM: 1 = that MoE,
  # .3 = a dense model, .06 = float16 rollouts; 0 is off.
  scale: float = 0.0
  # Degrees of freedom of its Student-t: 3 fits the table, large is normal.
  dof: float = 3.0
  # Largest shift of the constant noise; larger draws are pulled in to it.
  limit: float = 5.0
  # Share of tokens that are hit by a spike, up or down by chance: rare numerical accidents.
  spikes: float = 0.0
  # Size of a spike; 3.5 is the largest |log-ratio| reported for natural routing.
  spike: float = 3.5
  # Share of prompts on which the engine is wrong from first to last token; the prompt's text
  # decides, so they are the same ones every time. Up to .2 has been seen.
  outliers: float = 0.0
  # By how much it then thinks too little of the likeliest token; 4.6 = a factor of 100.
  outlier_shift: float = 4.6

  def __post_init__(self):
    for name in ('scale', 'spike', 'outlier_shift'):
      if not 0 <= getattr(self, name) < float('inf'):
        raise InputError(f'heavy_tail.{name}={getattr(self, name)} must be >= 0 and finite.')
    for name in ('dof', 'limit'):
      if not 0 < getattr(self, name) < float('inf'):
        raise InputError(f'heavy_tail.{name}={getattr(self, name)} must be > 0 and finite.')
    for name in ('spikes', 'outliers'):
      if not 0 <= getattr(self, name) <= 1:
        raise InputError(f'heavy_tail.{name}={getattr(self, name)} must lie in [0, 1].')


def sigma(p: Float[Array, '*b']) -> Float[Array, '*b']:
  """Robust standard deviation of the log-odds shift at confidence p, nats; the published bins."""
  steps = zip(EDGES, SIGMA[:-1], SIGMA[1:], strict=True)
  return sum((jnp.where(p > edge, high - low, 0) for edge, low, high in steps), SIGMA[0])


def student_t(key: Key[Array, ''], dof: float, limit: float | Float[Array, '']) -> Float[Array, '']:
  """A Student-t draw whose robust standard deviation (1.4826 MAD) is 1, clipped to +-limit.

  Bailey's polar method (Math. Comp. 62, 1994): sqrt(dof (u^(-2/dof) - 1)) cos(2 pi v), exact.
  """
  u, v = jax.random.uniform(key, (2,), minval=jnp.finfo(jnp.float32).tiny)
  radius = jnp.sqrt(dof * jnp.expm1(-2 / dof * jnp.log(u)))
  unit = 1.4826 * scipy.stats.t.ppf(0.75, dof)
  return jnp.clip(radius * jnp.cos(2 * jnp.pi * v) / unit, -limit, limit)


def outlier_prompts(
  heavy_tail: HeavyTail, prompts: Int[Array, 'p P'], start: Int[Array, 'p']
) -> Bool[Array, 'p']:
  """Which prompts the engine gets wrong: a hash of their text, whatever their padding and place."""
  width = prompts.shape[1]
  real = jnp.arange(width)[None] >= start[:, None]
  # Powers of an odd number modulo 2^32, counted from the right end, where all prompts align.
  powers = jnp.asarray([pow(2654435769, width - i, 2**32) for i in range(width)], jnp.uint32)
  digest = jnp.where(real, (prompts.astype(jnp.uint32) + 1) * powers[None], 0).sum(-1)
  draw = lambda d: jax.random.uniform(jax.random.fold_in(jax.random.key(0), d))
  return jax.vmap(draw)(digest.astype(jnp.uint32)) < heavy_tail.outliers


def shift_hooks(
  heavy_tail: HeavyTail,
  strength=1.0,
  *,
  temperature: float = 1.0,
  outlier: Bool[Array, 'B'] | None = None,
) -> policy.Hooks:
  """The score hook of this source; shifts grow with strength, which may be traced.

  `outlier` marks the rows of outlier prompts; raises InputError where it is needed and None.
  """
  if not (heavy_tail.scale or heavy_tail.spikes or heavy_tail.outliers):
    return policy.Hooks()
  if heavy_tail.outliers and outlier is None:
    raise InputError(
      f'heavy_tail.outliers={heavy_tail.outliers} needs `outlier`, the rows of outlier prompts.'
    )

  def shift(key, confidence):
    constant, hit, side = jax.random.split(key, 3)
    total = jnp.float32(0)
    if heavy_tail.scale:
      size = heavy_tail.scale * sigma(confidence)
      # The limit holds for the shift, not for the draw.
      total += size * student_t(constant, heavy_tail.dof, heavy_tail.limit / size)
    if heavy_tail.spikes:
      sign = jnp.where(jax.random.bernoulli(side), 1, -1)
      spiked = jax.random.bernoulli(hit, heavy_tail.spikes)
      total += jnp.where(spiked, sign * heavy_tail.spike, 0)
    return total

  def disturb(scores, keys):
    confidence = jax.nn.softmax(scores / temperature).max(-1)
    shifts = each(shift, keys, confidence)
    if heavy_tail.outliers:
      shifts -= jnp.where(outlier, heavy_tail.outlier_shift, 0)[:, None]
    top = scores.argmax(-1)[..., None] == jnp.arange(scores.shape[-1])[None, None]
    moved = scores + (strength * temperature * shifts)[..., None]
    return jnp.where(top & (strength > 0), moved, scores)

  return policy.Hooks(logits=disturb)
