"""The settings of a run: frozen dataclasses that refuse what cannot work, before any compute."""

import dataclasses
import functools
import math
from typing import Literal

import optax

from trm_jax.mesh import sharding
from trm_jax.mismatch.fleet import Fleet
from trm_jax.policy.decoder import PolicyConfig
from trm_jax.rollouts import stores
from trm_jax.rollouts.sampling import COLDEST
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError, check_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """Adam behind a global-norm clip. Without warm-up the first unit steps destroy a warm start."""

  # Peak learning rate, reached after the warm-up.
  learning_rate: float = 3e-4
  # Linear warm-up in optimizer steps.
  warmup: int = 15
  # Global-norm clip of the gradient.
  clip: float = 1.0
  # Adam's second-moment decay and epsilon; a large epsilon tames directions hardly ever seen.
  b2: float = 0.99
  epsilon: float = 1e-6

  def __post_init__(self):
    for name in ('learning_rate', 'epsilon'):
      if not 0 < getattr(self, name) < math.inf:
        raise InputError(f'optimizer.{name}={getattr(self, name)} must be > 0 and finite.')
    if not self.clip > 0:
      raise InputError(f'optimizer.clip={self.clip} must be > 0; inf = no clipping.')
    if self.warmup < 0:
      raise InputError(f'optimizer.warmup={self.warmup} must be >= 0.')
    if not 0 < self.b2 < 1:
      raise InputError(f'optimizer.b2={self.b2} must lie strictly between 0 and 1.')

  def make(self) -> optax.GradientTransformation:
    """The optax chain."""
    rate = optax.schedules.constant_schedule(self.learning_rate)
    if self.warmup:
      rate = optax.schedules.warmup_constant_schedule(0.0, self.learning_rate, self.warmup)
    adam = optax.adam(rate, b2=self.b2, eps=self.epsilon)
    return optax.chain(optax.clip_by_global_norm(self.clip), adam)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
  """Supervised steps on the task's demonstrator before RL; 0 steps = random weights."""

  steps: int = 500
  # Demonstrations per step.
  batch: int = 128
  # Peak learning rate, decaying linearly to 0.
  learning_rate: float = 4e-3

  def __post_init__(self):
    if self.steps < 0:
      raise InputError(f'warm_start.steps={self.steps} must be >= 0; 0 = no warm start.')
    if self.batch < 1:
      raise InputError(f'warm_start.batch={self.batch} must be at least 1.')
    if not 0 < self.learning_rate < math.inf:
      raise InputError(f'warm_start.learning_rate={self.learning_rate} must be > 0 and finite.')

  def make(self) -> optax.GradientTransformation:
    """Adam whose rate decays linearly to 0."""
    steps = max(self.steps, 1)
    rate = optax.schedules.linear_schedule(self.learning_rate, 0.0, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """One run. The defaults are the small setting of the experiments: minutes on a laptop.

  >>> config = trm.Config(steps=10, method=trm.MethodWords(max_kl=.2))
  >>> config.method.make().masks[0].limit
  0.2
  """

  # Python module that defines TASK: one of trm_jax.tasks, or your own.
  task: str = 'trm_jax.tasks.sorting'
  # RL steps (one rollout each).
  steps: int = 80
  # Prompts per step.
  prompts: int = 24
  # Samples per prompt G; advantages compare the samples of a prompt.
  samples: int = 8
  # Response slots T; None = the task's longest right answer.
  response_length: int | None = None
  # Sampling temperature, the same in rollout and trainer.
  temperature: float = 1.0
  # Passes over each rollout.
  epochs: int = 1
  # Optimizer steps per pass.
  minibatches: int = 1
  # Pieces a minibatch is computed in; changes memory and rounding, nothing else.
  microbatches: int = 1
  # Whether stored rollout logits are those of decoding, or re-scored by the trainer's own forward
  # pass (then a healthy fleet of one engine has KL exactly 0 in a whole, unsplit batch).
  score: stores.Score = 'decode'
  # What is kept of each token's distribution: logits, hidden (states and the engines' heads: as
  # exact), topk (the likeliest tokens: certified bounds of KL and TV), or logp (of the sampled
  # tokens alone: sampled criteria). Only logits hold [B,T,V]; see trm_jax/rollouts/stores.py.
  store: stores.Store = 'logits'
  # Tokens that topk keeps; all of a smaller vocabulary.
  top: int = 64
  # Send each token of the trainer's pass to the experts the engine used, with the trainer's own
  # weights (experts) or with the engine's (weights); the router learns either way.
  replay_routes: Literal['off', 'experts', 'weights'] = 'off'
  # Renormalise the trainer's policy over the tokens that the engine's filters let pass; surrogate
  # and trust region then speak of that policy. Needs store logits.
  replay_support: bool = False
  # Scale of learned noise in the input of every layer of the policy that ratios and masks look at,
  # at the start (ALP: 1e-6 to 1e-4); 0 = none. The rate at which the scales learn.
  perturbation: float = 0.0
  perturbation_rate: float = 5e-4
  # plain holds [T,T] scores; blockwise never does; splash is a TPU's kernel for bfloat16 and heads
  # of a multiple of 128, and blockwise elsewhere.
  attention: Literal['plain', 'blockwise', 'splash'] = 'plain'
  # Devices as DATA,MODEL: rows over data, heads, experts and vocabulary over model.
  mesh: str = '1,1'
  # Seeds weights, data order and sampling.
  seed: int = 0
  # Evaluate the trainer's policy (no mismatch) every so many steps, and at both ends.
  eval_every: int = 20
  # Judge each step by the next rollout (metrics retrospective/*): J(engines now) against J(policy
  # before the last step). One more scoring pass a step, and memory for the last weights.
  retrospective: bool = False
  # Held-out prompts of an evaluation.
  eval_prompts: int = 512
  # Checkpoint every so many steps, and at the end.
  save_every: int = 20
  # Folder of the task's data set; built on first use.
  data_dir: str = 'runs/data'
  # What the gradient is made of.
  method: MethodWords = MethodWords()
  # Who produces the samples, and what is wrong with them.
  fleet: Fleet = Fleet()
  policy: PolicyConfig = PolicyConfig()
  optimizer: Optimizer = Optimizer()
  warm_start: WarmStart = WarmStart()

  def __post_init__(self):
    check_words(self)
    for name in (
      'prompts samples epochs minibatches microbatches eval_every eval_prompts save_every top'
    ).split():
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be at least 1.')
    if self.steps < 0:
      raise InputError(f'steps={self.steps} must be >= 0.')
    if not 0 <= self.perturbation < math.inf:
      raise InputError(f'perturbation={self.perturbation} must be >= 0 and finite; 0 = no noise.')
    if not 0 < self.perturbation_rate < math.inf:
      raise InputError(f'perturbation_rate={self.perturbation_rate} must be > 0 and finite.')
    if not 0 <= self.seed < 2**32 - 1:  # the order of the data has the next one
      raise InputError(f'seed={self.seed} must lie in 0..{2**32 - 2}.')
    if self.response_length is not None and self.response_length < 1:
      raise InputError(
        f'response_length={self.response_length} must be at least 1; leave it out for the longest'
        ' right answer of the task.'
      )
    if self.samples < 2:
      raise InputError(
        f'samples={self.samples}: advantages compare the samples of a prompt; use at least 2.'
      )
    if not COLDEST <= self.temperature < math.inf:
      raise InputError(
        f'temperature={self.temperature} must be at least {COLDEST} and finite: below, float32'
        ' scores no longer tell tokens apart.'
      )
    data, model = sharding.parse_mesh(self.mesh)
    parts = data * self.minibatches * self.microbatches
    if self.prompts % parts:
      raise InputError(
        f'prompts={self.prompts} cannot be split into mesh data {data} x minibatches'
        f' {self.minibatches} x microbatches {self.microbatches}; use a multiple of {parts}.'
      )
    for name in ('prompts', 'eval_prompts', 'warm_start.batch'):
      value = functools.reduce(getattr, name.split('.'), self)
      if value == 1:  # an axis of 1 loses its place in the layout
        raise InputError(f'{name}=1 cannot be laid out over a mesh; use 2 or more.')
      if value % data:
        raise InputError(
          f'{name}={value} must be a multiple of {data}, the DATA of mesh={self.mesh}.'
        )
    shapes = dict(
      kv_heads=self.policy.kv_heads, mlp_width=self.policy.mlp_width, experts=self.policy.experts
    )
    for name, value in shapes.items():
      if value % model:
        raise InputError(
          f'policy.{name}={value} must be a multiple of {model}, the MODEL of mesh={self.mesh}.'
        )
    if self.policy.kv_heads == 1:  # an axis of 1 loses its place in the layout
      raise InputError('policy.kv_heads=1 cannot be laid out over a mesh; use 2 or more.')
    if self.policy.width % data:
      raise InputError(
        f'policy.width={self.policy.width} must be a multiple of {data}, the DATA of'
        f' mesh={self.mesh}.'
      )
    self.fleet.check(self.policy, self.samples, self.store)
    stores.check_method(self.store, self.method.make())
    if self.replay_routes != 'off' and self.policy.experts < 2:
      raise InputError(
        f'replay_routes={self.replay_routes!r} needs experts to choose from, but policy.experts is'
        f' {self.policy.experts}: set it to 2 or more.'
      )
    if self.replay_support and self.store != 'logits':
      raise InputError(
        f'replay_support=True reads from logits which tokens were possible, and'
        f" store={self.store!r} holds none; use store='logits'."
      )
    if self.fleet.stuck and self.fleet.history:
      raise InputError(
        f'fleet holds a stuck engine and one that is staleness.steps={self.fleet.history} behind:'
        ' one run simulates one of the two; leave one out.'
      )
