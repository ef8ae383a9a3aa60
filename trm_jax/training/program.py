"""Training: one setting, one compiled step. Reads from top to bottom.

    program = training.build(config)                  # everything that is compiled, once
    params = loop.warm_start(program, directory)      # supervised, from the task's demonstrator
    metrics = loop.run(program, directory, params)    # reinforcement learning under mismatch

A step is rollout -> divergences -> trust region -> surrogate -> update, all in one jitted function:
`step` calls `act` (`roll_out`, `prepare`) and `learn` (`update`, which calls `judgement`). Each is
a function of a `Blueprint`, which holds all that is fixed.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import certificates, policy, tasks
from trm_jax.measurements import metrics, router_statistics
from trm_jax.mesh import sharding
from trm_jax.mismatch import fleet, routing, staleness
from trm_jax.policy import attention
from trm_jax.rollouts import sampling, scoring, stores
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record
from trm_jax.tasks.task import Task
from trm_jax.training import perturbation, update
from trm_jax.training.config import (
  Config,
)
from trm_jax.training.judgement import Heads
from trm_jax.training.update import Arm, Batch, TrainState
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError, Rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blueprint:
  """What a program is compiled from: settings and functions, no arrays.

  Attributes:
    config: the setting.
    task: what is to be learned.
    request, record: what rollouts draw and keep.
    settings: those of the update, its methods included.
    optimizer, warm_optimizer: of reinforcement learning, and of the supervised warm start.
  """

  config: Config
  task: Task
  request: Request
  record: Record
  settings: update.Settings
  optimizer: optax.GradientTransformation
  warm_optimizer: optax.GradientTransformation

  @property
  def keeps_first(self) -> bool:
    """Whether the parameters of RL step 0 are needed later."""
    return self.config.fleet.stuck or self.settings.methods[0].kl_coefficient > 0

  @property
  def limits(self) -> Float[Array, 'M']:
    """The first limit of each method, NaN where it has none."""
    return jnp.array([m.limit for m in self.settings.methods], jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Everything that is compiled, shared by all runs of one shape."""

  config: Config
  methods: tuple[MethodWords, ...]
  task: Task
  mesh: jax.sharding.Mesh
  init: Callable[..., policy.Params]
  start: Callable[..., TrainState]
  step: Callable[..., tuple[TrainState, dict, Array]]
  evaluate: Callable[..., dict[str, Array]]
  pretrain: Callable[..., tuple]
  pretrain_optimizer: optax.GradientTransformation
  # Pieces of `step` as programs of their own, to be timed: `timing.parts`.
  parts: dict[str, Callable]


def build(config: Config, methods: tuple[MethodWords, ...] | None = None) -> Program:
  """The program of `config`; with several methods, one program whose `Arm` chooses among them.

  Raises InputError where the task does not fit the setting.

  >>> program = trm.build(trm.Config(steps=10, warm_start=trm.training.WarmStart(steps=0)))
  >>> program.task.name
  'sorting'
  """
  task, methods = tasks.load(config.task), methods or (config.method,)
  check(config, task, methods)
  data, model = sharding.parse_mesh(config.mesh)
  sharding.simulate_devices(data * model)
  blueprint = draw_up(config, task, methods)
  of = lambda fn, **options: jax.jit(functools.partial(fn, blueprint), **options)
  return Program(
    config=config,
    methods=methods,
    task=task,
    mesh=sharding.make_mesh(data, model),
    init=of(init),
    start=of(start),
    step=of(step, donate_argnums=0),
    evaluate=of(evaluate),
    pretrain=of(pretrain, donate_argnums=(0, 1)),
    pretrain_optimizer=blueprint.warm_optimizer,
    parts={'rollout': of(act), 'statistics': of(judge), 'update': of(learn)},
  )


def check(config: Config, task: Task, methods: tuple[MethodWords, ...]) -> None:
  """Raises InputError where task, setting and methods do not fit together."""
  length = config.response_length or task.response_length
  if length < task.response_length:
    raise InputError(
      f'response_length={length} is shorter than the longest right answer of task {task.name}'
      f' ({task.response_length} tokens): some prompts could never be solved; raise it.'
    )
  config.fleet.check(config.policy, config.samples, config.store, length)
  _, model = sharding.parse_mesh(config.mesh)
  if task.vocab_size % model:
    raise InputError(
      f'mesh={config.mesh} cannot split the {task.vocab_size} tokens of task {task.name} over'
      f' {model} devices; choose a MODEL that divides them.'
    )
  if len({m.kl_coefficient for m in methods}) > 1:
    raise InputError(
      f'method.kl_coefficient={sorted({m.kl_coefficient for m in methods})} must be the same in all'
      ' methods of one program; build one program for each.'
    )
  if config.microbatches > 1 and any(m.random_mask for m in methods):
    raise InputError(
      f'method.random_mask permutes over whole minibatches; use microbatches=1, not'
      f' {config.microbatches}.'
    )
  if config.warm_start.steps and task.demonstrate is None:
    raise InputError(
      f'task {task.name} has no demonstrator for the warm start; set warm_start.steps to 0.'
    )
  for method in methods:
    stores.check_method(config.store, method.make())


def draw_up(config: Config, task: Task, methods: tuple[MethodWords, ...]) -> Blueprint:
  """The blueprint of a setting that was checked."""
  optimizer = config.optimizer.make()
  if config.perturbation:
    optimizer = perturbation.optimizer(optimizer, config.perturbation_rate)
  return Blueprint(
    config=config,
    task=task,
    request=Request(
      samples=config.samples,
      length=config.response_length or task.response_length,
      eos=task.eos,
      pad=task.pad,
      temperature=config.temperature,
    ),
    record=Record(
      store=config.store,
      top=config.top,
      gates=config.replay_routes == 'weights',
      score=config.score,
    ),
    settings=update.Settings(
      methods=tuple(method.make() for method in methods),
      policy=config.policy,
      samples=config.samples,
      temperature=config.temperature,
      attention=getattr(attention, config.attention),
      hooks=functools.partial(trainer_hooks, config),
      epochs=config.epochs,
      minibatches=config.minibatches,
      microbatches=config.microbatches,
      shares=tuple(count for _, count in config.fleet.shares(config.samples)),
      support=config.replay_support,
    ),
    optimizer=optimizer,
    warm_optimizer=config.warm_start.make(),
  )


def trainer_hooks(config: Config, rollout: Rollout) -> policy.Hooks:
  """How the trainer's pass over a rollout departs from the plain one: replayed routes."""
  replayed = config.replay_routes != 'off' and rollout.routes is not None
  return routing.replay(rollout.routes, rollout.gates) if replayed else policy.Hooks()


def init(blueprint: Blueprint, key: Key[Array, '']) -> policy.Params:
  """Fresh parameters of the task's policy."""
  return policy.init(key, blueprint.config.policy, blueprint.task.vocab_size)


def start(
  blueprint: Blueprint, params: policy.Params, key: Key[Array, ''], method: Int[Array, ''] | int = 0
) -> TrainState:
  """State before the first RL step of the arm with this method."""
  config = blueprint.config
  params = perturbation.added(params, config.policy.layers, config.perturbation)
  copied = lambda: jax.tree.map(jnp.copy, params)  # steps donate their state, never the caller's
  return TrainState(
    step=jnp.int32(0),
    params=copied(),
    opt_state=blueprint.optimizer.init(params),
    key=key,
    limit=blueprint.limits[method],
    first=copied() if blueprint.keeps_first else None,
    history=staleness.start_history(params, max(config.fleet.history, config.retrospective)),
  )


def step(
  blueprint: Blueprint, state: TrainState, arm: Arm, prompts, starts
) -> tuple[TrainState, dict[str, Float[Array, '']], dict[str, Array]]:
  """One RL step: (state after it, its metrics, whether all was finite and which rows were not)."""
  config, settings, limits = blueprint.config, blueprint.settings, blueprint.limits
  batch, update_key = act(blueprint, state, arm, prompts, starts)
  rollout = batch.rollout
  history = staleness.push(state.history, state.params)
  state, reports = learn(blueprint, state, batch, update_key, arm)
  scalars, bad = update.summarise(reports, settings)
  if config.fleet.history:
    scalars |= metrics.ages(*sharding.reshard((rollout.version, rollout.valid)), state.step)
  if config.replay_routes != 'off':
    routes, fed = sharding.reshard((rollout.routes, router_statistics.fed_slots(rollout)))
    scalars['impossible_routes'] = routing.impossible_routes(
      routes, fed, experts=config.policy.experts
    )
  if config.perturbation:
    scalars['perturbation'] = jnp.abs(state.params[perturbation.SIGMA]).mean()
  follows = jnp.array([m.follow is not None for m in settings.methods])
  scalars['limit'] = jnp.where(follows[arm.method], state.limit, limits[arm.method])
  if config.retrospective:
    old = policy_logp(blueprint, jax.tree.map(lambda h: h[0], state.history), rollout)
    rows = sharding.reshard((old - rollout.logp, rollout.valid, rollout.reward))
    scalars |= certificates.monitor(*rows, samples=config.samples, backwards=True)
  state = update.follow_limit(state, reports, arm, settings)
  state = dataclasses.replace(state, step=state.step + 1, history=history)
  return state, scalars, {'finite': reports.finite.all(), 'bad_rows': bad}


def act(
  blueprint: Blueprint, state: TrainState, arm: Arm, prompts, starts
) -> tuple[Batch, Key[Array, '']]:
  """(batch of this step, key of its update)."""
  key = jax.random.fold_in(state.key, state.step)
  roll_key, update_key = jax.random.split(key)
  with jax.named_scope('rollout'):
    rollout, heads = roll_out(blueprint, state, arm, prompts, starts, roll_key)
    return prepare(blueprint, state, rollout, heads), update_key


def roll_out(
  blueprint: Blueprint, state: TrainState, arm: Arm, prompts, starts, key: Key[Array, '']
) -> tuple[Rollout, tuple[Float[Array, 'V D'], ...]]:
  """(rollout with rewards, the engines' output heads where it holds hidden states)."""
  config, task = blueprint.config, blueprint.task
  versions = dict(first=state.first, history=state.history, strength=arm.strength)
  rollout = fleet.generate(
    config.fleet,
    state.params,
    config.policy,
    prompts,
    starts,
    key,
    blueprint.request,
    blueprint.record,
    version=state.step,
    attention=blueprint.settings.attention,
    **versions,
  )
  heads = ()
  if config.store == 'hidden':
    engines = config.fleet, state.params, config.policy, key
    heads = fleet.heads(*engines, samples=config.samples, **versions)
  reward = task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
  return dataclasses.replace(rollout, reward=reward), heads


def prepare(
  blueprint: Blueprint, state: TrainState, rollout: Rollout, heads: tuple[Float[Array, 'V D'], ...]
) -> Batch:
  """Adds the trainer's own log-probs, where they are not simply the current policy's."""
  config, settings = blueprint.config, blueprint.settings
  recomputed = version = reference = head = None
  several = config.epochs * config.minibatches > 1
  if several or config.fleet.history:
    recomputed = policy_logp(blueprint, state.params, rollout)
  if config.fleet.history:
    version = staleness.of_version(
      lambda params: policy_logp(blueprint, params, rollout),
      rollout.version,
      recomputed,
      version=state.step,
      history=state.history,
      ages=config.fleet.ages(config.samples, blueprint.request.length),
    )
  if settings.methods[0].kl_coefficient > 0:
    trainer = dict(attention=settings.attention, hooks=settings.hooks(rollout))
    reference, _ = scoring.score(state.first, config.policy, rollout, **trainer)
    head = policy.head(state.first)
  return Batch(rollout, recomputed, version, reference, Heads(heads, head))


def policy_logp(
  blueprint: Blueprint, params: policy.Params, rollout: Rollout
) -> Float[Array, 'B T']:
  """The trainer's log-probs of a rollout's tokens under `params`, nats, 0 on invalid slots."""
  config, settings = blueprint.config, blueprint.settings
  return scoring.policy_logp(
    params,
    config.policy,
    rollout,
    support=config.replay_support and rollout.logits is not None,
    temperature=config.temperature,
    attention=settings.attention,
    hooks=settings.hooks(rollout),
  )


def judge(blueprint: Blueprint, state: TrainState, batch: Batch, key: Key[Array, ''], arm: Arm):
  """(divergences, mask) of the whole batch: the forward pass alone, no gradient is asked for."""
  at = dict(limit=state.limit, key=key, chosen=arm.method, settings=blueprint.settings)
  report = update.gradients(state.params, batch, **at)[2]
  return report.scored.divergences, report.keep


def learn(
  blueprint: Blueprint, state: TrainState, batch: Batch, key: Key[Array, ''], arm: Arm
) -> tuple[TrainState, update.Report]:
  """(state after all optimizer steps of the batch, their reports stacked)."""
  with jax.named_scope('update'):
    how = dict(optimizer=blueprint.optimizer, settings=blueprint.settings)
    return update.update(state, batch, key, arm, **how)


def evaluate(
  blueprint: Blueprint, params: policy.Params, prompts, starts, key: Key[Array, '']
) -> dict[str, Float[Array, '']]:
  """Accuracy of the trainer's own policy, sampled at the training temperature and greedy."""
  task, accuracies = blueprint.task, {}
  for name, greedy in (('sampled', False), ('greedy', True)):
    rollout = sampling.generate(
      params,
      blueprint.config.policy,
      prompts,
      starts,
      key,
      dataclasses.replace(blueprint.request, samples=1, greedy=greedy),
      Record(store='logp'),
      attention=blueprint.settings.attention,
    )
    reward = task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
    accuracies[f'accuracy/{name}'] = reward.mean()
  return accuracies


def pretrain(
  blueprint: Blueprint, params: policy.Params, opt_state, prompts, starts, key: Key[Array, '']
) -> tuple[policy.Params, optax.OptState, Float[Array, '']]:
  """One supervised step: mean cross-entropy of the demonstrated tokens."""
  length = blueprint.request.length
  tokens, valid = blueprint.task.demonstrate(key, prompts, starts, length)
  shown = demonstrated(prompts, starts, tokens, valid)

  def loss(params):
    return -policy_logp(blueprint, params, shown).sum() / valid.sum()

  value, grads = jax.value_and_grad(loss)(params)
  changes, opt_state = blueprint.warm_optimizer.update(grads, opt_state, params)
  return optax.apply_updates(params, changes), opt_state, value


def demonstrated(
  prompts: Int[Array, 'B P'],
  starts: Int[Array, 'B'],
  tokens: Int[Array, 'B T'],
  valid: Bool[Array, 'B T'],
) -> Rollout:
  """Responses that nobody drew, as a rollout to be scored: no engine, no reward."""
  blank = jnp.zeros_like(starts)
  return Rollout(
    prompts=prompts,
    start=starts,
    tokens=tokens,
    valid=valid,
    logits=None,
    hidden=None,
    logp=0.0 * tokens,
    routes=None,
    version=0 * tokens,
    engine=blank,
    reward=0.0 * blank,
  )
