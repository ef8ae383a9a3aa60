"""From rewards to advantages: what each sample is compared with.

Rows of one prompt adjoin: [g0 g0 g0 g1 g1 g1 ...]. `pool` says which rows shape the baseline:

| pool           | baseline of row i                                                |
| -------------- | ---------------------------------------------------------------- |
| `all`          | its whole group, rejected rows too (TRM's own: b is free of M)   |
| `accepted`     | the accepted rows of its group                                   |
| `loo`          | the other rows of its group                                      |
| `loo_accepted` | the other accepted rows of its group                             |

Where the pool is empty nothing can be compared and the advantage is 0.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.types import InputError

Pool = Literal['all', 'accepted', 'loo', 'loo_accepted']


def _pool_statistics(rewards, keep, group_size, pool):
  """(reward - mean of the pool, variance of the pool) per row, [group, row]; 0 if it is empty."""
  if pool not in ('all', 'accepted', 'loo', 'loo_accepted'):
    raise InputError(f"pool={pool!r} is not 'all', 'accepted', 'loo' or 'loo_accepted'.")
  if group_size < 2:
    raise InputError(
      f'group_size={group_size} leaves nothing to compare a sample with; use at least 2 samples'
      ' per prompt.'
    )
  if rewards.ndim != 1 or keep.shape != rewards.shape:
    raise InputError(
      f'rewards has shape {rewards.shape} and keep {keep.shape}: give both one value per row, [B].'
    )
  if rewards.shape[0] % group_size:
    raise InputError(
      f'rewards holds {rewards.shape[0]} rows that group_size={group_size} does not divide: pass'
      ' whole groups, the samples of a prompt side by side.'
    )
  r = jax.lax.stop_gradient(rewards.astype(jnp.float32)).reshape(-1, group_size)
  member = jnp.ones_like(r, bool) if pool in ('all', 'loo') else keep.reshape(r.shape)
  peers = jnp.broadcast_to(member[:, None, :], (*r.shape, group_size))  # [group, row, peer]
  if pool in ('loo', 'loo_accepted'):
    peers = peers & ~jnp.eye(group_size, dtype=bool)[None]
  size = jnp.maximum(peers.sum(-1), 1).astype(r.dtype)
  # Means of differences: equal rewards give exactly 0, which r - mean(r) does not, and a deviation
  # of one rounding error beside epsilon would make that an advantage of 0.1.
  ahead = r[:, :, None] - r[:, None, :]
  mean = jnp.where(peers, ahead, 0).sum(-1) / size
  variance = jnp.where(peers, jnp.square(ahead - mean[..., None]), 0).sum(-1) / size
  return mean, variance


def centred(
  rewards: Float[Array, 'B'], keep: Bool[Array, 'B'], *, group_size: int, pool: Pool = 'all'
) -> Float[Array, 'B']:
  """reward - mean reward of the pool, same unit as the reward; no gradient.

  `pool='all'` includes the row itself and so shrinks the estimate by (G-1)/G; `loo` does not.
  Raises InputError for group_size < 2 or rows that are not whole groups.
  """
  ahead, _ = _pool_statistics(rewards, keep, group_size, pool)
  return ahead.reshape(rewards.shape)


def group_relative(
  rewards: Float[Array, 'B'],
  keep: Bool[Array, 'B'],
  *,
  group_size: int,
  pool: Pool = 'all',
  epsilon: float = 1e-6,
) -> Float[Array, 'B']:
  """(reward - mean) / (standard deviation + epsilon) of the pool: GRPO's advantage; no gradient.

  The population deviation of the pool's rewards. Note that dividing weights prompts unevenly, and
  that a row which differs from a `loo` pool of equal rewards is divided by epsilon alone.
  Raises InputError for group_size < 2 or rows that are not whole groups.
  """
  ahead, variance = _pool_statistics(rewards, keep, group_size, pool)
  return (ahead / (jnp.sqrt(variance) + epsilon)).reshape(rewards.shape)


def leave_one_out(
  rewards: Float[Array, 'B'], keep: Bool[Array, 'B'], *, group_size: int, pool: Pool = 'all'
) -> Float[Array, 'B']:
  """reward - mean reward of the *other* rows of the pool (RLOO); unbiased, no gradient.

  Raises InputError for group_size < 2 or rows that are not whole groups.
  """
  others = 'loo' if pool in ('all', 'loo') else 'loo_accepted'
  return centred(rewards, keep, group_size=group_size, pool=others)
