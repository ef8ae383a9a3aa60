"""Training: one setting, one compiled step. Reads from top to bottom.

    program = train.build(config)                     # everything that is compiled, once
    params = loop.warm_start(program, directory)      # supervised, from the task's demonstrator
    metrics = loop.run(program, directory, params)    # reinforcement learning under mismatch

A step is rollout -> divergences -> trust region -> surrogate -> update, all in one jitted function.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from trm_jax import (
  attention,
  certificate,
  metrics,
  policy,
  sampling,
  sharding,
  stores,
  tasks,
  update,
)
from trm_jax import method as mt
from trm_jax.config import Config, Optimizer, WarmStart  # noqa: F401 - settings, as train.Config
from trm_jax.judgement import Heads
from trm_jax.mismatch import fleet as fl
from trm_jax.mismatch import routing, staleness
from trm_jax.tasks import task as task_module
from trm_jax.types import InputError, Rollout
from trm_jax.update import Arm, Batch, TrainState


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
  # Pieces of `step` as programs of their own, to be timed: `timing.parts`.
  parts: dict[str, Callable]


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
  config.fleet.check(config.policy, config.samples, config.store, length)
  data, model = sharding.parse_mesh(config.mesh)
  if task.vocab_size % model:
    raise InputError(
      f'mesh={config.mesh} cannot split the {task.vocab_size} tokens of task {task.name} over'
      f' {model} devices; choose a MODEL that divides them.'
    )
  sharding.simulate_devices(data * model)
  mesh = sharding.make_mesh(data, model)
  methods = methods or (config.method,)
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
    stores.check(config.store, method.limits, method.bound)
  attend = getattr(attention, config.attention)
  optimizer = config.optimizer.make()

  def hooks(rollout: Rollout) -> policy.Hooks:
    """How the trainer's pass over a rollout departs from the plain one."""
    replayed = config.replay_routes != 'off' and rollout.routes is not None
    return routing.replay(rollout.routes, rollout.gates) if replayed else policy.Hooks()

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
    shares=tuple(count for _, count in config.fleet.shares(config.samples)),
    support=config.replay_support,
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

  def roll_out(state: TrainState, arm: Arm, prompts, starts, key) -> tuple[Rollout, tuple]:
    """(rollout, the engines' output heads where it holds hidden states)."""
    engines = dict(
      samples=config.samples, first=state.first, history=state.history, strength=arm.strength
    )
    rollout = fl.generate(
      config.fleet,
      state.params,
      config.policy,
      prompts,
      starts,
      key,
      version=state.step,
      temperature=config.temperature,
      score=config.score,
      store=config.store,
      top=config.top,
      gates=config.replay_routes == 'weights',
      **engines,
      **common,
    )
    heads = ()
    if config.store == 'hidden':
      heads = fl.heads(config.fleet, state.params, config.policy, key, **engines)
    reward = task.reward(rollout.prompts, rollout.start, rollout.tokens, rollout.valid)
    return dataclasses.replace(rollout, reward=reward), heads

  def logp(params, rollout):
    trainer = dict(temperature=config.temperature, attention=attend, hooks=hooks(rollout))
    support = config.replay_support and rollout.logits is not None
    return sampling.policy_logp(params, config.policy, rollout, support=support, **trainer)

  def prepare(state: TrainState, rollout: Rollout, heads: tuple) -> Batch:
    """Adds the trainer's own log-probs, where they are not simply the current policy's."""
    recomputed = version = reference = head = None
    several = config.epochs * config.minibatches > 1
    if several or config.fleet.history:
      recomputed = logp(state.params, rollout)
    if config.fleet.history:
      version = staleness.of_version(
        lambda params: logp(params, rollout),
        rollout.version,
        recomputed,
        version=state.step,
        history=state.history,
        ages=config.fleet.ages(config.samples, length),
      )
    if methods[0].kl_coefficient > 0:
      trainer = dict(attention=attend, hooks=hooks(rollout))
      reference, _ = sampling.score(state.first, config.policy, rollout, **trainer)
      head = policy.head(state.first)
    return Batch(rollout, recomputed, version, reference, Heads(heads, head))

  def acted(state: TrainState, arm: Arm, prompts, starts) -> tuple[Batch, Array]:
    """(batch of this step, key of its update)."""
    key = jax.random.fold_in(state.key, state.step)
    roll_key, update_key = jax.random.split(key)
    with jax.named_scope('rollout'):
      return prepare(state, *roll_out(state, arm, prompts, starts, roll_key)), update_key

  def judged(state: TrainState, batch: Batch, key, arm: Arm):
    """Forward pass, divergences and mask of the whole batch; no gradient is asked for."""
    report = update.gradients(
      state.params, batch, limit=state.limit, key=key, chosen=arm.method, settings=settings
    )[2]
    return report.scored.divergences, report.keep

  def learned(state: TrainState, batch: Batch, key, arm: Arm):
    with jax.named_scope('update'):
      return update.update(state, batch, key, arm, optimizer=optimizer, settings=settings)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: TrainState, arm: Arm, prompts, starts):
    batch, update_key = acted(state, arm, prompts, starts)
    rollout = batch.rollout
    history = staleness.push(state.history, state.params)
    state, reports = learned(state, batch, update_key, arm)
    scalars, bad = update.summarise(reports, settings)
    if config.fleet.history:
      scalars |= metrics.ages(*sharding.reshard((rollout.version, rollout.valid)), state.step)
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
      prompts, starts, tokens, valid, None, None, 0.0 * tokens, None, 0 * tokens, blank, 0.0 * blank
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
    parts={'rollout': jax.jit(acted), 'statistics': jax.jit(judged), 'update': jax.jit(learned)},
  )
