"""What other systems can be set to, said as a `Method`: each against its own formula in float64.

Their pipelines are written down once, in NumPy: a log-ratio d against the rollout (decoupled: the
recomputed log-probs, bypass: the policy), weights of it, rows or tokens rejected by it, a clipped
surrogate, and a mean. Values and gradients agree, so a setting of theirs may be replaced by ours.
"""

import dataclasses
import functools

import catalogue_test
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import masks, objectives
from trm_jax.objectives import Method, advantages, clips, gates, parts
from trm_jax.objectives import ratio_weights as rw
from trm_jax.types import part

GROUP, REWARD = 4, np.array([1.0, 0, 0, 1, 0, 1, 0, 0])


# Their side. Every function is of float64 arrays [B, T]; `at` are the valid tokens.


def over(d, at, level):
  if level == 'token':
    return np.exp(d)
  total = np.where(at, d, 0).sum(-1, keepdims=True)
  return np.exp(total / np.maximum(at.sum(-1, keepdims=True), 1) ** (level == 'geometric')) + 0 * d


def tis(level='token', low=0.0, high=2.0):
  return lambda d, at: np.clip(over(d, at, level), low, high)


def icepop(level='token', low=0.5, high=5.0):
  return lambda d, at: (w := over(d, at, level)) * ((low <= w) & (w <= high))


def inside(level='token', low=0.5, high=2.0):
  return lambda d, at: ((low <= (w := over(d, at, level))) & (w <= high)) * 1.0


def raw(d, at):
  return np.exp(d)


def normalized(weight):
  return lambda d, at: (w := weight(d, at)) / w[at].mean()


def band(level, low, high):
  return lambda d, at: (low <= over(d, at, level)[:, 0]) & (over(d, at, level)[:, 0] <= high)


def mean_below(statistic, limit):
  mean = lambda d, at: np.where(at, statistic(d), 0).sum(-1) / np.maximum(at.sum(-1), 1)
  return lambda d, at: mean(d, at) <= limit


k3 = lambda d: np.exp(d) - 1 - d
veto = lambda d, at: (np.where(at, d, 0) >= np.log(1e-4)).all(-1)
error = lambda d: np.exp(np.abs(d))


@dataclasses.dataclass(frozen=True)
class Theirs:
  """Settings of one system. `clip` None: log p times the weights, which are then all of it."""

  against: str = 'recomputed'  # whose log-probs the surrogate's ratio is taken against
  judged: str = 'recomputed'  # whose ratio against the rollout is weighed and judged
  clip: tuple | None = (0.2, 0.2)
  dual: float | None = None  # for A < 0 the loss is at most dual |A|
  delta: float | None = None  # cap of the ratio before the minimum
  weights: tuple = ()
  rejects: tuple = ()
  gate: object = None  # tokens that count, of (logs, A)
  mean: str = 'tokens'
  ddof: int = 1

  def loss(self, logp, logs, a, at):
    """`logs` are the log-probs at which weights and masks were found, `logp` those of the loss."""
    d = logs[self.judged] - logs['rollout']
    keep = np.ones(len(at), bool)
    for reject in self.rejects:
      keep &= reject(d, at)
    w = np.ones(at.shape)
    for weight in self.weights:
      w = w * weight(d, at)
    a = a[:, None] + np.zeros(at.shape)
    r = np.exp(logp - logs[self.against]) if self.clip else None
    if not self.clip:
      value = a * logp
    else:
      low, high = self.clip
      first = np.minimum(r, self.delta) if self.delta else r
      value = np.minimum(first * a, np.clip(r, 1 - low, 1 + high) * a)
      if self.dual:
        value = np.where(a < 0, np.maximum(value, self.dual * a), value)
    if self.gate:
      value = value * self.gate(logs, a, at)
    value = np.where(at & keep[:, None], value * w, 0)
    lengths = np.maximum(at.sum(-1), 1)
    if self.mean == 'tokens':
      return -value.sum() / at.sum()
    if self.mean == 'accepted tokens':
      return -value.sum() / max((at & keep[:, None]).sum(), 1)
    if self.mean == 'rows of means':
      return -(value.sum(-1) / lengths).sum() / at.any(-1).sum()
    if self.mean == 'rows':
      return -value.sum() / at.any(-1).sum()
    raise KeyError(self.mean)


# Ours.
CLIP = part(parts.clip, anchor='recomputed')
BYPASS = part(parts.clip, anchor='rollout')
DUAL = part(clips.dual_clip, anchor='recomputed')
GRPO = part(advantages.group_relative, ddof=1)
TIS, SEQ_TIS = part(rw.clamped), part(rw.clamped, level='sequence')
ICEPOP = part(rw.banded)
# verl's bands are of rollout / policy: the ends change places, inverted.
GEO = masks.geometric_band(low=1 / 1.001, high=1 / 0.999)
SUM = masks.sum_band(low=0.5, high=2.0)
K3 = masks.mean_k3(0.01)
geo = band('geometric', 1 / 1.001, 1 / 0.999)
k3_below = mean_below(k3, 0.01)

verl = functools.partial(
  Method, surrogate=DUAL, judge='anchor', normalize_by='accepted_tokens', advantage=GRPO
)
verl_ = functools.partial(Theirs, dual=3.0, mean='accepted tokens')
bypass = functools.partial(
  Method,
  surrogate=part(clips.dual_clip, anchor='rollout'),
  normalize_by='accepted_tokens',
  advantage=GRPO,
)
bypass_ = functools.partial(verl_, against='rollout', judged='policy')
pg = functools.partial(
  Method, surrogate=clips.reinforce, normalize_by='accepted_tokens', advantage=GRPO
)
pg_ = functools.partial(Theirs, clip=None, judged='policy', mean='accepted tokens')
of_policy = lambda weight: part(weight, anchor='policy')
P_TIS, P_SEQ, P_ICEPOP = (
  part(rw.clamped, anchor='policy'),
  part(rw.clamped, anchor='policy', level='sequence'),
  part(rw.banded, anchor='policy'),
)
VERL = {
  'decoupled_token_is': (verl(weights=(TIS,)), verl_(weights=(tis(),))),
  'decoupled_seq_is': (verl(weights=(SEQ_TIS,)), verl_(weights=(tis('sequence'),))),
  'decoupled_token_icepop': (verl(weights=(ICEPOP,)), verl_(weights=(icepop(),))),
  'decoupled_seq_is_rs': (
    verl(weights=(SEQ_TIS,), masks=(SUM,)),
    verl_(weights=(tis('sequence'),), rejects=(band('sequence', 0.5, 2),)),
  ),
  'decoupled_geo_rs': (verl(masks=(GEO,)), verl_(rejects=(geo,))),
  'decoupled_geo_rs_seq_tis': (
    verl(weights=(SEQ_TIS,), masks=(GEO,)),
    verl_(weights=(tis('sequence'),), rejects=(geo,)),
  ),
  'decoupled_geo_rs_token_tis': (
    verl(weights=(TIS,), masks=(GEO,)),
    verl_(weights=(tis(),), rejects=(geo,)),
  ),
  'decoupled_k3_rs': (verl(masks=(K3,)), verl_(rejects=(k3_below,))),
  'decoupled_k3_rs_seq_tis': (
    verl(weights=(SEQ_TIS,), masks=(K3,)),
    verl_(weights=(tis('sequence'),), rejects=(k3_below,)),
  ),
  'decoupled_k3_rs_token_tis': (
    verl(weights=(TIS,), masks=(K3,)),
    verl_(weights=(tis(),), rejects=(k3_below,)),
  ),
  'bypass_ppo_clip': (bypass(), bypass_()),
  'bypass_ppo_clip_geo_rs': (bypass(masks=(GEO,)), bypass_(rejects=(geo,))),
  'bypass_ppo_clip_k3_rs': (bypass(masks=(K3,)), bypass_(rejects=(k3_below,))),
  'bypass_pg_is': (pg(weights=(P_SEQ,)), pg_(weights=(tis('sequence'),))),
  'bypass_pg_token_icepop': (pg(weights=(P_ICEPOP,)), pg_(weights=(icepop(),))),
  'bypass_pg_geo_rs': (pg(masks=(GEO,)), pg_(rejects=(geo,))),
  'bypass_pg_geo_rs_seq_tis': (
    pg(weights=(P_SEQ,), masks=(GEO,)),
    pg_(weights=(tis('sequence'),), rejects=(geo,)),
  ),
  'bypass_pg_geo_rs_token_tis': (
    pg(weights=(P_TIS,), masks=(GEO,)),
    pg_(weights=(tis(),), rejects=(geo,)),
  ),
  'disabled': (verl(), verl_()),
}

token_mean = functools.partial(Method, surrogate=CLIP, normalize_by='tokens', advantage=GRPO)
TRL = {
  'token_truncate': (
    token_mean(weights=(part(rw.clamped, high=3.0),)),
    Theirs(weights=(tis(high=3.0),)),
  ),
  'token_mask': (
    token_mean(weights=(part(rw.banded, low=0.0, high=3.0),)),
    Theirs(weights=(icepop(low=0.0, high=3.0),)),
  ),
  'sequence_truncate': (
    token_mean(weights=(part(rw.clamped, level='sequence', high=3.0),)),
    Theirs(weights=(tis('sequence', high=3.0),)),
  ),
  'sequence_mask, the default': (
    token_mean(weights=(part(rw.banded, level='sequence', low=0.0, high=3.0),)),
    Theirs(weights=(icepop('sequence', low=0.0, high=3.0),)),
  ),
  'delta': (
    token_mean(surrogate=part(clips.delta_clip, anchor='recomputed', delta=1.5)),
    Theirs(delta=1.5),
  ),
  'off_policy_mask_threshold': (
    token_mean(gates=(part(gates.opsm, limit=0.05),)),
    Theirs(
      gate=lambda logs, a, at: (
        (a >= 0) | mean_below(np.negative, 0.05)(logs['policy'] - logs['rollout'], at)[:, None]
      )
    ),
  ),
}
by_rows = functools.partial(Method, surrogate=CLIP, reduce_tokens='mean', advantage=GRPO)
by_rows_ = functools.partial(Theirs, mean='rows of means')
SLIME = {
  '--use-tis': (by_rows(weights=(part(rw.clamped, low=0.0),)), by_rows_(weights=(tis(),))),
  'mis: clip': (
    by_rows(weights=(part(rw.clamped, low=0.5),)),
    by_rows_(weights=(tis(low=0.5),)),
  ),
  'mis: mask, batch-normalised': (
    by_rows(weights=(part(rw.batch_normalized, weight=part(rw.banded, high=2.0)),)),
    by_rows_(weights=(normalized(icepop(high=2.0)),)),
  ),
  'mis: rejection of tokens': (by_rows(weights=(part(rw.inside),)), by_rows_(weights=(inside(),))),
  'mis: veto': (
    by_rows(masks=(masks.token_veto(low=1e-4),), judge='anchor'),
    by_rows_(rejects=(veto,)),
  ),
  'mis: geometric': (
    by_rows(weights=(part(rw.banded, level='geometric', low=0.99, high=1.01),)),
    by_rows_(weights=(icepop('geometric', low=0.99, high=1.01),)),
  ),
}
accepted = functools.partial(
  Method, surrogate=CLIP, judge='anchor', normalize_by='accepted_tokens', advantage=GRPO
)
accepted_ = functools.partial(Theirs, mean='accepted tokens')
NEMO_RL = {
  'tis': (accepted(weights=(TIS,)), accepted_(weights=(tis(),))),
  'icepop': (accepted(weights=(ICEPOP,)), accepted_(weights=(icepop(),))),
  'seq-mask-tis': (
    accepted(weights=(part(rw.raw),), masks=(masks.geometric_band(low=0.999, high=1.002),)),
    accepted_(weights=(raw,), rejects=(band('geometric', 0.999, 1.002),)),
  ),
  'seq_logprob_error_threshold': (
    accepted(masks=(masks.mean_ratio_error(1.5),)),
    accepted_(rejects=(mean_below(error, 1.5),)),
  ),
}
SKYRL = {
  'token': (token_mean(weights=(TIS,)), Theirs(weights=(tis(),))),
  'sequence': (
    token_mean(weights=(part(rw.clamped, level='sequence', high=5.0),)),
    Theirs(weights=(tis('sequence', high=5.0),)),
  ),
  'geometric sequence mask': (
    accepted(masks=(masks.geometric_band(low=0.99, high=1.01),)),
    accepted_(rejects=(band('geometric', 0.99, 1.01),)),
  ),
  'product sequence mask': (accepted(masks=(SUM,)), accepted_(rejects=(band('sequence', 0.5, 2),))),
  'token mask': (token_mean(weights=(part(rw.inside),)), Theirs(weights=(inside(),))),
}


def outside(limit, signed):
  """prime-rl's tokens that count: p of the policy and q of the rollout are near."""

  def gate(logs, a, at):
    gap = np.exp(logs['policy']) - np.exp(logs['rollout'])
    far = ((a > 0) & (gap > limit)) | ((a < 0) & (gap < -limit))
    return ~far if signed else np.abs(gap) <= limit

  return gate


prime = functools.partial(Theirs, against='rollout', clip=(np.inf, np.inf))
PRIME_RL = {
  'default, without its penalty': (
    Method(gates=(part(gates.dppo_tv, limit=0.2),), normalize_by='tokens', advantage=GRPO),
    prime(gate=outside(0.2, True)),
  ),
  'ipo, without its penalty': (
    Method(gates=(gates.probability_gap,), normalize_by='tokens', advantage=GRPO),
    prime(gate=outside(0.1, False)),
  ),
}
OPENRLHF = {
  'tis': (
    token_mean(weights=(part(rw.clamped, low=0.5, high=5.0),)),
    Theirs(weights=(tis(low=0.5, high=5.0),)),
  ),
  'icepop': (token_mean(weights=(ICEPOP,)), Theirs(weights=(icepop(),))),
  'seq-mask-tis': (
    token_mean(
      weights=(part(rw.raw),), masks=(masks.geometric_band(low=0.5, high=5.0),), judge='anchor'
    ),
    Theirs(weights=(raw,), rejects=(band('geometric', 0.5, 5.0),)),
  ),
}
AREAL = {
  'decoupled, cap 5': (
    token_mean(weights=(part(rw.clamped, high=5.0),)),
    Theirs(weights=(tis(high=5.0),)),
  ),
  'ratio of sequences (their geometric mean)': (
    token_mean(weights=(part(rw.clamped, level='geometric', high=5.0),)),
    Theirs(weights=(tis('geometric', high=5.0),)),
  ),
  'mask on k2': (
    token_mean(masks=(masks.mean_k2(0.05),), judge='anchor'),
    Theirs(rejects=(mean_below(lambda d: d**2 / 2, 0.05),)),
  ),
}
TUNIX = {
  'use_rollout_logps': (by_rows(surrogate=BYPASS), by_rows_(against='rollout')),
  "sampler_is='token'": (by_rows(weights=(TIS,)), by_rows_(weights=(tis(),))),
  'DAPO': (
    token_mean(surrogate=part(parts.clip, anchor='recomputed', clip_high=0.28)),
    Theirs(clip=(0.2, 0.28)),
  ),
}
PAPERS = {
  'GRPO': (objectives.METHODS['grpo'].make(), by_rows_(against='rollout', ddof=0)),
  'PPO': (objectives.METHODS['ppo_clip'].make(), Theirs(against='rollout', ddof=0, mean='rows')),
  'clip-higher (DAPO)': (
    objectives.METHODS['clip_higher'].make(),
    Theirs(against='rollout', ddof=0, clip=(0.2, 0.28)),
  ),
}
FRAMEWORKS = dict(
  papers=PAPERS,
  verl=VERL, trl=TRL, slime=SLIME, nemo_rl=NEMO_RL, skyrl=SKYRL, prime_rl=PRIME_RL,
  openrlhf=OPENRLHF, areal=AREAL, tunix=TUNIX,
)  # fmt: skip
ALL = {(system, name): pair for system, found in FRAMEWORKS.items() for name, pair in found.items()}


def test_all_of_verls_presets_are_here():
  assert len(VERL) == 19


def batch():
  """Rows of noises from hardly any to large: tokens and products of rows beyond every limit."""
  s = catalogue_test.scored(spread=0.1, seed=4)
  # Rows without tokens are counted differently from system to system: here is none.
  valid = s.valid.at[2].set(True)
  rng = np.random.default_rng(1932)
  logp = -rng.uniform(0.1, 2, valid.shape)
  scale = np.array([3e-4, 0.3, 0.1, 1e-3, 1.2, 0.8, 0.05, 1.5])[:, None]
  near = lambda: np.minimum(logp + scale * rng.normal(size=valid.shape), -1e-3)
  rollout, recomputed = near(), near()
  put = lambda x: jnp.asarray(np.where(valid, x, np.nan), jnp.float32)
  fields = dict(logp=put(logp), rollout_logp=put(rollout), recomputed_logp=put(recomputed))
  d = dataclasses.replace(s.divergences, log_ratio=fields['logp'] - fields['rollout_logp'])
  reward = jnp.asarray(REWARD, jnp.float32)
  return dataclasses.replace(s, **fields, valid=valid, divergences=d, reward=reward)


@functools.cache
def evaluated(method):
  def total(logp, s):
    s = dataclasses.replace(s, logp=logp)
    mean, kept, a = objectives.objective(
      method, s, samples=GROUP, limit=jnp.float32(method.limit), key=jax.random.key(0)
    )
    return -mean.value, (kept, a)

  s = batch()
  return jax.value_and_grad(total, has_aux=True)(s.logp, s)


@pytest.mark.parametrize('system, name', ALL)
def test_a_setting_of_another_system_is_a_method(system, name):
  method, theirs = ALL[system, name]
  s = batch()
  at = np.asarray(s.valid)
  whole = lambda x: np.where(at, np.asarray(x, np.float64), -1.0)
  logs = dict(
    policy=whole(s.logp), rollout=whole(s.rollout_logp), recomputed=whole(s.recomputed_logp)
  )
  rows = REWARD.reshape(-1, GROUP)
  a = (rows - rows.mean(-1, keepdims=True)) / (rows.std(-1, ddof=theirs.ddof, keepdims=True) + 1e-6)
  loss = lambda logp: theirs.loss(logp, logs, a.ravel(), at)
  (value, (kept, found)), slope = evaluated(method)
  np.testing.assert_allclose(found, a.ravel(), rtol=1e-5)
  if theirs.clip:  # a detached factor of log p has a gradient of its own, and not that value
    np.testing.assert_allclose(value, loss(logs['policy']), rtol=2e-5)
  steps = 1e-6 * np.eye(at.size).reshape(-1, *at.shape)
  want = [(loss(logs['policy'] + h) - loss(logs['policy'] - h)) / 2e-6 for h in steps]
  np.testing.assert_allclose(slope[at], np.reshape(want, at.shape)[at], rtol=2e-4, atol=2e-6)
  plain = dataclasses.replace(theirs, weights=(), rejects=(), gate=None, delta=None)
  if plain != theirs and theirs.rejects != (veto,):
    assert abs(plain.loss(logs['policy'], logs, a.ravel(), at) - loss(logs['policy'])) > 1e-4
  if theirs.rejects and theirs.rejects != (veto,):
    assert 0 < kept.sum() < len(kept)  # it must bite
