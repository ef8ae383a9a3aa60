"""From rewards to advantages: what each sample is compared with.

`pool` says which rows shape the baseline:

| pool           | baseline of row i                                                |
| -------------- | ---------------------------------------------------------------- |
| `all`          | its whole group, rejected rows too (TRM's own: b is free of M)   |
| `accepted`     | the accepted rows of its group                                   |
| `loo`          | the other rows of its group                                      |
| `loo_accepted` | the other accepted rows of its group                             |

Where the pool is empty nothing can be compared and the advantage is 0. A row that `exists` nowhere
(no token of its own, a padding row) is in no pool and has advantage 0.

Groups are `group_size` adjoining rows, or the rows that share an id of `groups` (any integers, any
sizes, in any order); all rows of a group are on one device. A row that is alone in its group has
advantage 0 (some implementations give it its reward).

What reads more than rewards is an `OfScored`, and may give an advantage to each token.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.divergences.ratios import raised
from trm_jax.masks import row_statistics
from trm_jax.objectives.scored import Scored
from trm_jax.types import InputError, part

Pool = Literal['all', 'accepted', 'loo', 'loo_accepted']


@dataclasses.dataclass(frozen=True)
class OfScored:
  """An advantage that reads more of a minibatch than its rewards.

  Attributes:
    function: (scored, kept rows [B], *, group_size=, groups=, pool=) -> [B] or [B, T], detached.
    reads: the least a rollout must have kept for it, as with a criterion.
  """

  function: Callable
  reads: Literal['sampled', 'exact'] = 'sampled'

  def __call__(self, scored: Scored, keep: Bool[Array, 'B'], **groups):
    return self.function(scored, keep, **groups)


def _pool_statistics(rewards, keep, group_size, groups, pool, exists, ddof=0):
  """(reward - mean of the pool, variance of the pool) of each row, [B]; 0 if the pool is empty."""
  _check(rewards, keep, group_size, groups, pool, exists)
  r = jax.lax.stop_gradient(rewards.astype(jnp.float32))
  member = jnp.ones_like(r, bool) if pool in ('all', 'loo') else keep
  real = jnp.ones_like(r, bool) if exists is None else exists
  member = member & real
  if groups is None:
    split = lambda x: x.reshape(-1, group_size)
    together = jnp.ones((group_size, group_size), bool)[None]
  else:
    split = lambda x: x[None]
    together = (groups[:, None] == groups[None, :])[None]
  r, member, real = split(r), split(member), split(real)  # [group, row]
  peers = together & member[:, None, :] & real[:, :, None]  # [group, row, peer]
  if pool in ('loo', 'loo_accepted'):
    peers = peers & ~jnp.eye(r.shape[-1], dtype=bool)[None]
  size = jnp.maximum(peers.sum(-1), 1).astype(r.dtype)
  # Means of differences: equal rewards give exactly 0, which r - mean(r) does not, and a deviation
  # of one rounding error beside epsilon would make that an advantage of 0.1.
  ahead = r[:, :, None] - r[:, None, :]
  mean = jnp.where(peers, ahead, 0).sum(-1) / size
  square = jnp.where(peers, jnp.square(ahead - mean[..., None]), 0).sum(-1)
  variance = square / jnp.clip(size - ddof, 1, None)
  return mean.reshape(rewards.shape), variance.reshape(rewards.shape)


def _check(rewards, keep, group_size, groups, pool, exists) -> None:
  if pool not in ('all', 'accepted', 'loo', 'loo_accepted'):
    raise InputError(f"pool={pool!r} is not 'all', 'accepted', 'loo' or 'loo_accepted'.")
  if rewards.ndim != 1 or keep.shape != rewards.shape:
    raise InputError(
      f'rewards has shape {rewards.shape} and keep {keep.shape}: give both one value per row, [B].'
    )
  for name, x in (('groups', groups), ('exists', exists)):
    if x is not None and x.shape != rewards.shape:
      raise InputError(
        f'{name} has shape {x.shape} and rewards {rewards.shape}: give one value per row, [B].'
      )
  if (group_size is None) == (groups is None):
    raise InputError(
      f'group_size={group_size} and groups={"None" if groups is None else "ids"}: give either the'
      ' number of adjoining samples of a prompt, or the id of the prompt of each row.'
    )
  if group_size is None:
    return
  if group_size < 2:
    raise InputError(
      f'group_size={group_size} leaves nothing to compare a sample with; use at least 2 samples'
      ' per prompt.'
    )
  if rewards.shape[0] % group_size:
    raise InputError(
      f'rewards holds {rewards.shape[0]} rows that group_size={group_size} does not divide: pass'
      ' whole groups, the samples of a prompt side by side, or the ids of their prompts as groups.'
    )


def centred(
  rewards: Float[Array, 'B'],
  keep: Bool[Array, 'B'],
  *,
  group_size: int | None = None,
  groups: Int[Array, 'B'] | None = None,
  pool: Pool = 'all',
  exists: Bool[Array, 'B'] | None = None,
) -> Float[Array, 'B']:
  """reward - mean reward of the pool, same unit as the reward; no gradient.

  `pool='all'` includes the row itself and so shrinks the estimate by (G-1)/G; `loo` does not.
  Raises InputError for group_size < 2 or rows that are not whole groups.

  >>> rewards, keep = jnp.array([1., 0., 0., 1.]), jnp.ones(4, bool)
  >>> np.asarray(trm.centred(rewards, keep, group_size=2))
  array([ 0.5, -0.5, -0.5,  0.5], dtype=float32)
  >>> np.asarray(trm.centred(rewards, keep, groups=jnp.array([7, 0, 0, 7])))
  array([0., 0., 0., 0.], dtype=float32)
  """
  ahead, _ = _pool_statistics(rewards, keep, group_size, groups, pool, exists)
  return ahead


def group_relative(
  rewards: Float[Array, 'B'],
  keep: Bool[Array, 'B'],
  *,
  group_size: int | None = None,
  groups: Int[Array, 'B'] | None = None,
  pool: Pool = 'all',
  exists: Bool[Array, 'B'] | None = None,
  epsilon: float = 1e-6,
  ddof: Literal[0, 1] = 0,
) -> Float[Array, 'B']:
  """(reward - mean) / (standard deviation + epsilon) of the pool: GRPO's advantage; no gradient.

  The deviation divides by the pool's size - ddof: verl, TRL, tunix and others that call torch take
  ddof=1, a factor of sqrt(1 - 1/G). Note that dividing weights prompts unevenly, and
  that a row which differs from a `loo` pool of equal rewards is divided by epsilon alone.
  Raises InputError for group_size < 2 or rows that are not whole groups.

  >>> rewards, keep = jnp.array([1., 0., 0., 1.]), jnp.ones(4, bool)
  >>> np.asarray(trm.group_relative(rewards, keep, group_size=4)).round(3)
  array([ 1., -1., -1.,  1.], dtype=float32)
  """
  ahead, variance = _pool_statistics(rewards, keep, group_size, groups, pool, exists, ddof)
  return ahead / (jnp.sqrt(variance) + epsilon)


def leave_one_out(
  rewards: Float[Array, 'B'],
  keep: Bool[Array, 'B'],
  *,
  group_size: int | None = None,
  groups: Int[Array, 'B'] | None = None,
  pool: Pool = 'all',
  exists: Bool[Array, 'B'] | None = None,
) -> Float[Array, 'B']:
  """reward - mean reward of the *other* rows of the pool (RLOO); unbiased, no gradient.

  Raises InputError for group_size < 2 or rows that are not whole groups.

  >>> rewards, keep = jnp.array([1., 0., 0., 1.]), jnp.ones(4, bool)
  >>> np.asarray(trm.leave_one_out(rewards, keep, group_size=4)).round(3)
  array([ 0.667, -0.667, -0.667,  0.667], dtype=float32)
  """
  others = 'loo' if pool in ('all', 'loo') else 'loo_accepted'
  return centred(rewards, keep, group_size=group_size, groups=groups, pool=others, exists=exists)


def _optimal(scored, keep, *, group_size=None, groups=None, pool='all', weight=None):
  _check(scored.reward, keep, group_size, groups, pool, None)
  if groups is None:
    groups = jnp.arange(keep.shape[0]) // group_size
  valid = scored.valid
  logp = jax.lax.stop_gradient(raised(scored.logp))
  if scored.divergences.square is None:
    raise InputError(
      'divergences.square is None: a baseline per token reads the exact sum of squared'
      " probabilities, so use store='logits' or 'hidden' (full=True)."
    )
  energy = 1 - 2 * jnp.exp(logp) + row_statistics.tokens(scored.divergences.square, valid)
  if weight is not None:
    energy = energy * jnp.square(weight(scored))
  energy = jnp.where(valid, jnp.cumsum(jnp.where(valid, energy, 0), -1), 0)
  member = valid if pool in ('all', 'loo') else valid & keep[:, None]
  # What a row that cannot be judged does not know must not spread to its group.
  member = member & (scored.usable[:, None] | jnp.isfinite(energy))
  # A row's t-th token of its own at slot t, so that rows are summed at the same t.
  order = jnp.argsort(~valid, axis=-1, stable=True)
  energy, member = (jnp.take_along_axis(x, order, -1) for x in (energy, member))
  peers = groups[:, None] == groups[None, :]
  if pool in ('loo', 'loo_accepted'):
    peers = peers & ~jnp.eye(peers.shape[0], dtype=bool)
  over_peers = lambda x: jnp.matmul(peers.astype(x.dtype), x, precision=jax.lax.Precision.HIGHEST)
  reward = jax.lax.stop_gradient(raised(scored.reward))[:, None]
  known = jnp.where(member, energy, 0)
  baseline = over_peers(jnp.where(member, known * reward, 0)) / (over_peers(known) + 1e-8)
  alone = over_peers(member.astype(known.dtype)) < (1 if 'loo' in pool else 2)
  place = jnp.where(valid, jnp.cumsum(valid, -1) - 1, 0)
  baseline = jnp.take_along_axis(jnp.where(alone, 0, baseline), place, -1)
  return jnp.where(valid, reward - baseline, 0)


def optimal_token_baseline(weight: Callable | None = None) -> OfScored:
  """reward - B_t for each token, B_t = sum_i R_i W_it / sum_i W_it over the group: [B, T].

  W_t = sum_{j<=t} (1 - 2 p_j + sum_v p_v^2), the squared gradient norm with respect to the scores,
  times the square of `weight` where one is given; p is the policy of this update (verl: of the
  start of the batch). t counts a row's own tokens. B_t is 0 where fewer than two rows of the pool
  have a t-th token: a lone tail has no baseline. Reads `divergences.square`, so exact scores. arXiv
  2602.07078, verl.
  """
  return OfScored(part(_optimal, weight=weight), reads='exact')


def _charged(scored, keep, *, base, coefficient, tolerance, anchor, **groups):
  a = base(scored.reward, keep, exists=scored.valid.any(-1), **groups)[:, None]
  logp, other = (jax.lax.stop_gradient(raised(x)) for x in (scored.logp, scored.rollout_logp))
  logp = logp if anchor == 'policy' else raised(scored.anchor_logp(anchor))
  gap = jnp.abs(jnp.exp(logp) - jnp.exp(other))
  return jnp.where(scored.valid, a - jnp.where(gap <= tolerance, 0, coefficient * gap), 0)


def charged(
  coefficient: float = 0.1,
  *,
  tolerance: float = 0.0,
  anchor: Literal['policy', 'recomputed', 'version'] = 'recomputed',
  base: Callable = group_relative,
) -> OfScored:
  """A - coefficient |p - q| on tokens where |p - q| > tolerance: DC-GRPO's advantage, [B, T].

  p is the `anchor`'s probability of the sampled token, q the rollout's, `base` the advantage before
  it. arXiv 2606.08779: the coefficient starts at .1 (8B) or .05 and follows its constraint from
  batch to batch, mean |p - q| <= .0037 (.0050 for the mixture); here it is a constant. Uncertain:
  how the paper's tolerance enters; 0 charges every token.
  """
  settings = dict(coefficient=coefficient, tolerance=tolerance, anchor=anchor, base=base)
  return OfScored(part(_charged, **settings))
