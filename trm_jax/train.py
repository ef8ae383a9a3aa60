"""Training: one setting, one compiled step. Reads from top to bottom.

    program = train.build(config)                     # everything that is compiled, once
    params = loop.warm_start(program, directory)      # supervised, from the task's demonstrator
    metrics = loop.run(program, directory, params)    # reinforcement learning under mismatch

A step is rollout -> divergences -> trust region -> surrogate -> update, all in one jitted function.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from trm_jax import attention, certificate, policy, sampling, sharding, tasks, update
from trm_jax import method as mt
from trm_jax.mismatch import fleet as fl
from trm_jax.mismatch import routing, staleness
from trm_jax.policy import PolicyConfig
from trm_jax.tasks import task as task_module
from trm_jax.types import InputError, Rollout
from trm_jax.update import Arm, Batch, TrainState


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
    for name in ('learning_rate', 'clip', 'epsilon'):
      if not getattr(self, name) > 0:
        raise InputError(f'optimizer.{name}={getattr(self, name)} must be > 0.')
    if self.warmup < 0:
      raise InputError(f'optimizer.warmup={self.warmup} must be >= 0.')
    if not 0 < self.b2 < 1:
      raise InputError(f'optimizer.b2={self.b2} must lie strictly between 0 and 1.')

  def make(self) -> optax.GradientTransformation:
    """The optax chain."""
    rate = optax.schedules.warmup_constant_schedule(0.0, self.learning_rate, max(self.warmup, 1))
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
    if self.steps < 0 or self.batch < 1:
      raise InputError(
        f'warm_start.steps={self.steps} must be >= 0 and warm_start.batch={self.batch} >= 1.'
      )
    if not self.learning_rate > 0:
      raise InputError(f'warm_start.learning_rate={self.learning_rate} must be > 0.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """One run. The defaults are the small setting of the experiments: minutes on a laptop."""

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
  score: fl.Score = 'decode'
  # Send each token of the trainer's pass to the experts the engine used; the router still learns.
  replay_routes: bool = False
  # plain holds [T,T] scores; blockwise never does.
  attention: Literal['plain', 'blockwise'] = 'plain'
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
  method: mt.Method = mt.Method()
  # Who produces the samples, and what is wrong with them.
  fleet: fl.Fleet = fl.Fleet()
  policy: PolicyConfig = PolicyConfig()
  optimizer: Optimizer = Optimizer()
  warm_start: WarmStart = WarmStart()

  def __post_init__(self):
    for name in (
      'prompts samples epochs minibatches microbatches eval_every eval_prompts save_every'
    ).split():
      if getattr(self, name) < 1:
        raise InputError(f'{name}={getattr(self, name)} must be at least 1.')
    for name in ('steps', 'seed'):
      if getattr(self, name) < 0:
        raise InputError(f'{name}={getattr(self, name)} must be >= 0.')
    if self.samples < 2:
      raise InputError(
        f'samples={self.samples}: advantages compare the samples of a prompt; use at least 2.'
      )
    if not self.temperature > 0:
      raise InputError(f'temperature={self.temperature} must be > 0.')
    data, model = sharding.parse_mesh(self.mesh)
    parts = data * self.minibatches * self.microbatches
    if self.prompts % parts:
      raise InputError(
        f'prompts={self.prompts} cannot be split into mesh data {data} x minibatches'
        f' {self.minibatches} x microbatches {self.microbatches}; use a multiple of {parts}.'
      )
    for name in ('eval_prompts', 'warm_start.batch'):
      value = functools.reduce(getattr, name.split('.'), self)
      if value % data:
        raise InputError(f'{name}={value} must be a multiple of the {data} data devices of mesh.')
    shapes = dict(
      kv_heads=self.policy.kv_heads, mlp_width=self.policy.mlp_width, experts=self.policy.experts
    )
    for name, value in shapes.items():
      if value % model:
        raise InputError(
          f'policy.{name}={value} must be a multiple of the {model} model devices of mesh.'
        )
    if self.policy.width % data:
      raise InputError(
        f'policy.width={self.policy.width} must be a multiple of the {data} data devices of mesh.'
      )
    self.fleet.check(self.policy, self.samples)
    if self.replay_routes and self.policy.experts < 2:
      raise InputError('replay_routes=True needs experts to choose from: set policy.experts.')
    if self.fleet.stuck and self.fleet.history:
      raise InputError('fleet holds a stuck and a stale engine: one run simulates one of the two.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Everything that is compiled, shared by all runs of one shape."""

  config: Config
  methods: tuple[mt.Method, ...]
  task: task_module.Task
  mesh: jax.sharding.Mesh
  init: Callable[..., policy.Params]
  start: Callable[..., TrainState]
  step: Callable[..., tuple[TrainState, dict, Array]]
  evaluate: Callable[..., dict[str, Array]]
  pretrain: Callable[..., tuple]
  pretrain_optimizer: optax.GradientTransformation


def build(config: Config, methods: tuple[mt.Method, ...] | None = None) -> Program:
  """The program of `config`; with several methods, one program whose `Arm` chooses among them.

  Raises InputError where the task does not fit the setting.
  """
  task = tasks.load(config.task)
  length = config.response_length or task.response_length
  if length < task.response_length:
    raise InputError(
      f'response_length={length} is shorter than the longest right answer of task {task.name}'
      f' ({task.response_length} tokens): some prompts could never be solved; raise it.'
    )
  data, model = sharding.parse_mesh(config.mesh)
  if task.vocab_size % (data * model):
    raise InputError(
      f'mesh={config.mesh} does not divide the vocabulary of task {task.name} ({task.vocab_size}).'
    )
  sharding.simulate_devices(data * model)
  mesh = sharding.make_mesh(data, model)
  methods = methods or (config.method,)
  if len({m.kl_coefficient for m in methods}) > 1:
    raise InputError('method.kl_coefficient must be the same for all arms of one program.')
  if config.microbatches > 1 and any(m.random_mask for m in methods):
    raise InputError(
      f'method.random_mask permutes over whole minibatches; use microbatches=1, not'
      f' {config.microbatches}.'
    )
  if config.warm_start.steps and task.demonstrate is None:
    raise InputError(
      f'task {task.name} has no demonstrator for the warm start; set warm_start.steps to 0.'
    )
  attend = getattr(attention, config.attention)
  optimizer = config.optimizer.make()

  def hooks(rollout: Rollout) -> policy.Hooks:
    """How the trainer's pass over a rollout departs from the plain one."""
    replayed = config.replay_routes and rollout.routes is not None
    return routing.replay(rollout.routes) if replayed else policy.Hooks()

  settings = update.Settings(
    methods=methods,
    policy=config.policy,
    samples=config.samples,
    temperature=config.temperature,
    attention=attend,
    hooks=hooks,
    epochs=config.epochs,
    minibatches=config.minibatches,
    microbatches=config.microbatches,
  )
  keep_first = config.fleet.stuck or methods[0].kl_coefficient > 0
  common = dict(length=length, eos=task.eos, pad=task.pad, attention=attend)

  follows = jnp.array([m.accept is not None for m in methods])
  limits = jnp.array([m.max_kl or jnp.nan for m in methods], jnp.float32)

  def start(params, key, method=0):
    """State before the first RL step of the arm with this method."""
    return TrainState(
      step=jnp.int32(0),
      params=jax.tree.map(jnp.copy, params),  # steps donate their state, never the caller's
      opt_state=optimizer.init(params),
      key=key,
      limit=limits[method],
      first=jax.tree.map(jnp.copy, params) if keep_first else None,
      history=staleness.start_history(params, max(config.fleet.history, config.retrospective)),
    )

  def roll_out(state: TrainState, arm: Arm, prompts, starts, key) -> Rollout:
    rollout = fl.generate(
      config.fleet,
      state.params,
      config.policy,
      prompts,
      starts,
      key,
      samples=config.samples,
      version=state.step,
      first=state.first,
      history=state.history,
      strength=arm.strength,
      temperature=config.temperature,
      score=config.score,
      **common,
    )
    reward = task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
    return dataclasses.replace(rollout, reward=reward)

  def score(params, rollout):
    trainer = dict(attention=attend, hooks=hooks(rollout))
    return policy.logits(params, sampling.score(params, config.policy, rollout, **trainer)[0])

  def logp(params, rollout):
    trainer = dict(temperature=config.temperature, attention=attend, hooks=hooks(rollout))
    return sampling.policy_logp(params, config.policy, rollout, **trainer)

  def prepare(state: TrainState, rollout: Rollout) -> Batch:
    """Adds the trainer's own log-probs, where they are not simply the current policy's."""
    recomputed = version = reference = None
    several = config.epochs * config.minibatches > 1
    if several or config.fleet.history:
      recomputed = logp(state.params, rollout)
    if config.fleet.history:
      version = recomputed
      ages = {e.staleness.steps for e, _ in config.fleet.shares(config.samples)} - {0}
      for age in sorted(ages):
        old = logp(jax.tree.map(lambda h, a=age: h[a - 1], state.history), rollout)
        aged = rollout.version == jnp.maximum(state.step - age, 0)
        version = jnp.where((aged & (rollout.version != state.step))[:, None], old, version)
    if methods[0].kl_coefficient > 0:
      reference = jax.lax.stop_gradient(score(state.first, rollout))
    return Batch(rollout, recomputed, version, reference)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: TrainState, arm: Arm, prompts, starts):
    key = jax.random.fold_in(state.key, state.step)
    roll_key, update_key = jax.random.split(key)
    rollout = roll_out(state, arm, prompts, starts, roll_key)
    batch = prepare(state, rollout)
    history = staleness.push(state.history, state.params)
    state, reports = update.update(
      state, batch, update_key, arm, optimizer=optimizer, settings=settings
    )
    scalars, bad = update.summarise(reports, settings)
    scalars['limit'] = jnp.where(follows[arm.method], state.limit, limits[arm.method])
    if config.retrospective:
      old = logp(jax.tree.map(lambda h: h[0], state.history), rollout)
      rows = sharding.reshard((old - rollout.logp, rollout.valid, rollout.reward))
      scalars |= certificate.monitor(*rows, samples=config.samples, backwards=True)
    state = update.follow_limit(state, reports, arm, settings)
    state = dataclasses.replace(state, step=state.step + 1, history=history)
    return state, scalars, {'finite': reports.finite.all(), 'bad_rows': bad}

  @jax.jit
  def evaluate(params, prompts, starts, key):
    """Accuracy of the trainer's own policy, sampled at the training temperature and greedy."""
    found = {}
    for name, greedy in (('sampled', False), ('greedy', True)):
      rollout = sampling.generate(
        params,
        config.policy,
        prompts,
        starts,
        key,
        samples=1,
        greedy=greedy,
        temperature=config.temperature,
        store='logp',
        **common,
      )
      reward = task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
      found[f'accuracy/{name}'] = reward.mean()
    return found

  rate = optax.schedules.linear_schedule(
    config.warm_start.learning_rate, 0.0, max(config.warm_start.steps, 1)
  )
  pretrainer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def pretrain(params, opt_state, prompts, starts, key):
    """One supervised step: mean cross-entropy of the demonstrated tokens."""
    tokens, valid = task.demonstrate(key, prompts, starts, length)
    blank = jnp.zeros_like(starts)
    shown = Rollout(
      prompts, starts, tokens, valid, None, None, 0.0 * tokens, None, blank, blank, 0.0 * blank
    )

    def loss(params):
      return -logp(params, shown).sum() / valid.sum()

    value, grads = jax.value_and_grad(loss)(params)
    changes, opt_state = pretrainer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state, value

  init = jax.jit(lambda key: policy.init(key, config.policy, task.vocab_size))
  return Program(
    config=config,
    methods=methods,
    task=task,
    mesh=mesh,
    init=init,
    start=jax.jit(start),
    step=step,
    evaluate=evaluate,
    pretrain=pretrain,
    pretrain_optimizer=pretrainer,
  )
