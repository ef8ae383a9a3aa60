"""Weights against the engine: functions of a `Scored` minibatch, detached, beside TIS of `parts`.

w_t = anchor / rollout per token, where `anchor` is 'recomputed' (decoupled), 'version', or 'policy'
(bypass: the policy of this very update). Factors without unit in [0, inf), float32, 1 outside
`valid`; a log-ratio beyond +-20 nats counts as +-20, after it is summed where it is summed. NaN
stays NaN. A weight of 0 leaves the row, and all denominators, as they are.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax import extremes
from trm_jax.divergences.ratios import raised, ratio
from trm_jax.masks import row_statistics
from trm_jax.objectives.gates import binary_kl, counted
from trm_jax.objectives.scored import Scored

WeightAnchor = Literal['policy', 'recomputed', 'version']
Level = Literal['token', 'sequence', 'geometric']


def _log_anchor(scored: Scored, anchor: WeightAnchor):
  logp = scored.logp if anchor == 'policy' else scored.anchor_logp(anchor)
  return jax.lax.stop_gradient(raised(logp))


def _weight(scored: Scored, anchor: WeightAnchor, level: Level):
  """The untruncated weight of each token, of its row's product, or of its geometric mean."""
  d = _log_anchor(scored, anchor) - jax.lax.stop_gradient(raised(scored.rollout_logp))
  if level != 'token':
    d = jnp.where(scored.valid, d, 0).sum(-1, keepdims=True)
    if level == 'geometric':
      d = d / jnp.clip(scored.valid.sum(-1, keepdims=True), 1, None)
    d = jnp.broadcast_to(d, scored.valid.shape)
  return ratio(d, scored.valid)


def clamped(
  scored: Scored,
  *,
  anchor: WeightAnchor = 'recomputed',
  level: Level = 'token',
  low: float = 0.0,
  high: float = 2.0,
) -> Float[Array, 'B T']:
  """clip(w, low, high): truncation with a lower end too.

  slime's tis_clip_low (0, 2), its mis 'clip' and OpenRLHF's tis (.5, 5). level 'sequence' takes the
  row's product (verl 2, SkyRL 5), 'geometric' its geometric mean (AReaL, cap 5).
  """
  w = jnp.clip(_weight(scored, anchor, level), low, high)
  return jnp.where(scored.valid, w, 1)


def banded(
  scored: Scored,
  *,
  anchor: WeightAnchor = 'recomputed',
  level: Level = 'token',
  low: float = 0.5,
  high: float = 5.0,
) -> Float[Array, 'B T']:
  """w where low <= w <= high, else 0: IcePop (token: .5, 5), sequence MIS (verl .5, 2; TRL 0, 3).

  verl's "lo_hi" thresholds, SkyRL's and OpenRLHF's icepop. TRL keeps the same closed band.
  """
  w = _weight(scored, anchor, level)
  inside = ((low <= w) & (w <= high)) | jnp.isnan(w)
  return jnp.where(scored.valid, jnp.where(inside, w, 0), 1)


def inside(
  scored: Scored,
  *,
  anchor: WeightAnchor = 'recomputed',
  level: Level = 'token',
  low: float = 0.5,
  high: float = 2.0,
) -> Float[Array, 'B T']:
  """1 where low <= w <= high, else 0: a band that does not weigh what it keeps.

  slime's rejection per token (mis.yaml: .5, 2), SkyRL's token mask, AReaL's action 'mask'.
  """
  w = _weight(scored, anchor, level)
  within = ((low <= w) & (w <= high)).astype(w.dtype)
  return jnp.where(scored.valid, jnp.where(jnp.isnan(w), jnp.nan, within), 1)


def raw(
  scored: Scored, *, anchor: WeightAnchor = 'recomputed', level: Level = 'token'
) -> Float[Array, 'B T']:
  """w itself, in [e^-20, e^20]; NeMo-RL's and OpenRLHF's seq-mask-tis beside a geometric band."""
  return jnp.where(scored.valid, _weight(scored, anchor, level), 1)


def kpop(
  scored: Scored, *, anchor: WeightAnchor = 'recomputed', limit: float = 0.1
) -> Float[Array, 'B T']:
  """1 where the binary KL of the sampled token is <= limit nats in both directions, else 0.

  KPop (Ant, 2026), limit .1; verl's binary_kl, which keeps probabilities 1e-6 away from 0 and 1.
  Uncertain: whether the paper's kept tokens carry w too, as IcePop's do; here, as in verl, they do
  not (multiply by `raw`).
  """
  p, q = _log_anchor(scored, anchor), jax.lax.stop_gradient(raised(scored.rollout_logp))
  forward, backward = binary_kl(q, p), binary_kl(p, q)
  inside = ((forward <= limit) & (backward <= limit)).astype(p.dtype)
  missing = jnp.isnan(forward) | jnp.isnan(backward)
  return jnp.where(scored.valid, jnp.where(missing, jnp.nan, inside), 1)


def cis(
  scored: Scored,
  *,
  anchor: WeightAnchor = 'recomputed',
  slope: float = 2.3,
  floor: float = 5e-3,
) -> Float[Array, 'B T']:
  """min(w, 1 + slope max(1 - p, floor)), p = anchor's probability: CIS. arXiv 2609.32444.

  Their k = p + (1 - p) e^eps with eps = logit p - logit q is w = p / q itself. Authors' settings:
  lambda 2.3, kappa .005: confident tokens are truncated hardest.
  """
  p = jnp.exp(_log_anchor(scored, anchor))
  cap = 1 + slope * jnp.where(1 - p < floor, floor, 1 - p)
  w = _weight(scored, anchor, 'token')
  return jnp.where(scored.valid, jnp.where(w > cap, cap, w), 1)


def batch_normalized(
  scored: Scored,
  *,
  weight: Callable[[Scored], Float[Array, 'B T']],
  level: Literal['token', 'sequence'] = 'token',
) -> Float[Array, 'B T']:
  """weight / its mean over valid tokens (or over rows that have some): verl, slime; after clipping.

  Skipped where the mean is <= 1e-8, as in verl. The mean is over the usable rows of all devices, as
  in verl; slime's is over a rank's. A NaN weight of a usable row makes all of them NaN.
  """
  w, there = weight(scored), counted(scored)
  if level == 'token':
    mean = scored.mean(w, there)
  else:
    count = jnp.clip(there.sum(-1), 1, None)
    mean = scored.mean(jnp.where(there, w, 0).sum(-1) / count, there.any(-1))
  return jnp.where(scored.valid, jnp.where(mean <= 1e-8, w, w / mean), 1)


def jackpot(scored: Scored, *, high: float = 2.0, drift_high: float = 2.0) -> Float[Array, 'B T']:
  """min(Z max(1, p / q), high) min(p_0 / p, drift_high), Z = sum_v min(p, q) = 1 - TV: Jackpot.

  p is the policy, q the rollout, p_0 the recomputed policy that the clip beside it is against: what
  is left after optimal budgeted rejection sampling at lambda = 1, so that Z is exact where `tv` is;
  the authors sum the likeliest tokens and correct the bias. arXiv 2602.06107, Algorithm 1; its
  equation 5 also masks rejected tokens at random, which the algorithm does not. The two caps and
  the authors' lambda are not in the paper: uncertain. Needs `divergences.tv`.
  """
  p, q = _log_anchor(scored, 'policy'), jax.lax.stop_gradient(raised(scored.rollout_logp))
  tv = row_statistics.tokens(scored.divergences.tv, scored.valid)
  w = ratio(p - q, scored.valid)
  w = extremes.at_most((1 - tv) * extremes.at_least(w, 1), high)
  drift = ratio(_log_anchor(scored, 'recomputed') - p, scored.valid)
  return jnp.where(scored.valid, w * extremes.at_most(drift, drift_high), 1)
