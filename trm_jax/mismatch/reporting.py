"""Reporting: the engine draws right and hands over wrong log-probs.

Bugs of storage and bookkeeping, each seen in practice. Tokens and logits are untouched, so exact
divergences stay 0 and only log_ratio shows them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from trm_jax.rollouts.streams import each
from trm_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reporting:
  """What happens to sampled log-probs on their way to the trainer; the default is nothing."""

  # Format they are stored in: bfloat16 errs by up to .4 %, float16 by .05 %; beyond its range
  # (-65504) a log-prob becomes -inf.
  dtype: str | None = None
  # Share of tokens without a log-prob (NaN): lost in transport or never computed.
  missing: float = 0.0
  # Off by one: slot t holds the log-prob of t - shift, and 0 where there is none.
  shift: int = 0
  # Share of prompts whose samples come back in another order (each holds its neighbour's
  # log-probs): answers gathered as they arrive.
  scrambled: float = 0.0

  def __post_init__(self):
    if self.dtype not in (None, 'bfloat16', 'float16'):
      raise InputError(f'reporting.dtype={self.dtype!r} is not bfloat16 or float16.')
    for name in ('missing', 'scrambled'):
      if not 0 <= getattr(self, name) <= 1:
        raise InputError(f'reporting.{name}={getattr(self, name)} must lie in [0, 1].')

  def check(self, samples: int, length: int | None = None) -> None:
    """Raises InputError where an engine of so many samples a prompt cannot have this bug."""
    if self.scrambled and samples < 2:
      raise InputError(
        f'reporting.scrambled={self.scrambled} needs an engine that gives 2 or more samples of a'
        f' prompt, not {samples}.'
      )
    if length is not None and abs(self.shift) >= length:
      raise InputError(
        f'reporting.shift={self.shift} must be smaller than the {length} slots of a response.'
      )


def report(
  reporting: Reporting,
  logp: Float[Array, 'B T'],
  valid: Bool[Array, 'B T'],
  *,
  token_keys: Key[Array, 'B T'],
  prompt_keys: Key[Array, 'p'],
  strength=1.0,
) -> Float[Array, 'B T']:
  """The log-probs that reach the trainer, in nats, 0 on invalid slots; NaN is missing.

  Rows are scrambled first, then shifted, cast and lost. The shares grow with strength up to 1, the
  rest acts where it is > 0; it may be traced.
  Raises InputError for bugs that need more samples or slots than there are.
  """
  samples = logp.shape[0] // prompt_keys.shape[0]
  reporting.check(samples, logp.shape[1])
  out, share = logp, jnp.clip(strength, 0, 1)
  if reporting.scrambled:
    hit = jax.vmap(lambda k: jax.random.bernoulli(k, share * reporting.scrambled))(prompt_keys)
    grouped = logp.reshape(-1, samples, logp.shape[1])
    out = jnp.where(hit[:, None, None], jnp.roll(grouped, 1, 1), grouped).reshape(logp.shape)
  if reporting.shift:
    lost = abs(reporting.shift)
    pad = jnp.zeros_like(out[:, :lost])
    moved = [pad, out[:, :-lost]] if reporting.shift > 0 else [out[:, lost:], pad]
    out = jnp.concatenate(moved, 1)
  if reporting.dtype is not None:
    out = out.astype(reporting.dtype).astype(logp.dtype)
  if reporting.missing:
    lose = lambda k: jax.random.bernoulli(k, share * reporting.missing)
    out = jnp.where(each(lose, token_keys), jnp.nan, out)
  return jnp.where(valid & (strength > 0), out, logp)
