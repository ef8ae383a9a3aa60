"""From a rollout to new parameters: forward, judge, differentiate, step.

    micro-batch -> hidden -> (surrogate, penalty) totals -> gradients   summed over micro-batches
    minibatch   -> gradient / global count -> optax -> parameters       repeated over epochs

Totals and counts are divided once a minibatch, globally, so neither the micro-batch split nor the
number of devices changes anything but float32 rounding. The vocabulary statistics, the mask and the
loss run inside one `shard_map` block; differentiation is outside it.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import extremes, masks, objectives, policy
from trm_jax.measurements import metrics
from trm_jax.mesh import sharding
from trm_jax.policy.attention import Attention
from trm_jax.rollouts import scoring
from trm_jax.training import judgement, perturbation
from trm_jax.training.judgement import Batch
from trm_jax.types import Mean, Rollout

# Followed limits stay above this many nats: float32 noise of identical policies is about 1e-12.
LIMIT_FLOOR = 1e-6


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arm:
  """Traced choice among the methods of one compiled program, and the strength of the mismatch."""

  method: Int[Array, ''] | int = 0
  strength: Float[Array, ''] | float = 1.0


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that a run carries from step to step; a checkpoint is this and the data cursor.

  Attributes:
    step: RL steps done.
    params, opt_state: the policy and its optimizer.
    key: base key of the run; step k draws from fold_in(key, k).
    limit: the max-KL limit where it follows past batches.
    first: parameters of RL step 0, where a stuck engine or a KL penalty needs them.
    history: past parameters, newest first, where a stale engine needs them.
  """

  step: Int[Array, '']
  params: policy.Params
  opt_state: Any
  key: Key[Array, '']
  limit: Float[Array, '']
  first: policy.Params | None
  history: policy.Params | None


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
  """What one optimizer step saw; rows as in the minibatch."""

  scored: objectives.Scored
  keep: Bool[Array, 'B'] | Bool[Array, 'B T']
  missing: Bool[Array, 'B T']
  route_flips: Float[Array, ''] | None
  loss: Float[Array, '']
  grad_norm: Float[Array, '']
  finite: Bool[Array, '']
  accepted: Bool[Array, '']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Static settings of the update; functions and sizes, no arrays."""

  methods: tuple[objectives.Method, ...]
  policy: policy.PolicyConfig
  samples: int
  temperature: float
  attention: Attention
  hooks: Callable[[Rollout], policy.Hooks] = lambda rollout: policy.Hooks()
  epochs: int = 1
  minibatches: int = 1
  # Rows of each engine in a group of `samples`, in order; one engine by default.
  shares: tuple[int, ...] = ()
  microbatches: int = 1
  # Condition the policy on the tokens that the engine could have drawn.
  support: bool = False


def split(tree, parts: int, group: int):
  """Leaves [B, ...] -> [parts, B / parts, ...], groups of `group` rows whole, rows kept local.

  Part i takes every parts-th group, so that each device's rows stay on it.
  """

  def one(x):
    rows, *axes = sharding.layout(x) or (None,)
    # Of a single group the rows are an axis of 1, which loses its place in the layout.
    x = sharding.reshard(x.reshape(-1, parts, group, *x.shape[1:]), rows, None, None, *axes)
    x = jnp.moveaxis(x, 1, 0)
    return sharding.reshard(x.reshape(parts, -1, *x.shape[3:]), None, rows, *axes)

  return jax.tree.map(one, tree)


def merge(tree, group: int):
  """The inverse of `split`: [parts, b, ...] -> [parts * b, ...] in the original row order."""

  def one(x):
    parts = x.shape[0]
    _, rows, *axes = sharding.layout(x) or (None, None)
    x = sharding.reshard(x.reshape(parts, -1, group, *x.shape[2:]), None, rows, None, *axes)
    x = jnp.moveaxis(x, 0, 1)
    x = x.reshape(parts * x.shape[0] * group, *x.shape[3:])
    return sharding.reshard(x, rows, *axes)

  return jax.tree.map(one, tree)


def _each(body, carry, xs, count: int):
  """lax.scan, without the loop where there is a single pass (its results stay stacked)."""
  if count > 1:
    return jax.lax.scan(body, carry, xs)
  carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
  return carry, jax.tree.map(lambda x: x[None], out)


def gradients(
  params: policy.Params,
  batch: Batch,
  *,
  limit: Float[Array, ''],
  key: Key[Array, ''],
  chosen: Int[Array, ''] | int = 0,
  settings: Settings,
) -> tuple[Float[Array, ''], policy.Params, Report]:
  """(loss to be minimised, its gradient, report) of one minibatch, over its micro-batches.

      loss = - surrogate total / count + coefficient * penalty total / count

  Each of the two terms keeps its own gradient until the counts of all micro-batches are known.
  """
  coefficient = settings.methods[0].kl_coefficient
  over_mesh = judgement.over_mesh(
    methods=settings.methods,
    samples=settings.samples,
    temperature=settings.temperature,
    shares=settings.shares,
    support=settings.support,
  )
  chosen = jnp.asarray(chosen, jnp.int32)

  def terms(params, micro, micro_key):
    micro = dataclasses.replace(micro, heads=batch.heads)
    hooks, noise_keys = settings.hooks(micro.rollout), None
    if perturbation.SIGMA in params:
      noise_keys = perturbation.keys(
        jax.random.fold_in(micro_key, 2), micro.rollout, settings.samples
      )
      hooks = perturbation.perturbed(hooks, params)
    hidden, aux = scoring.score(
      params,
      settings.policy,
      micro.rollout,
      noise_keys=noise_keys,
      attention=settings.attention,
      hooks=hooks,
    )
    with jax.named_scope('statistics'):
      means, *rows = over_mesh(hidden, policy.head(params), micro, limit, micro_key, chosen)
    return tuple(m.total for m in means), (means, *rows, aux.routes)

  def body(carry, xs):
    grads, means = carry
    micro, index = xs
    totals, pull, aux = jax.vjp(
      lambda p: terms(p, micro, jax.random.fold_in(key, index)), params, has_aux=True
    )
    one, zero = jnp.ones_like(totals[0]), jnp.zeros_like(totals[0])
    new = [pull((one, zero))[0]]
    if coefficient:  # a second backward pass only where there is a penalty
      new.append(pull((zero, one))[0])
    return jax.tree.map(jnp.add, (grads, means), (new, aux[0])), aux[1:]

  zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2 if coefficient else 1)]
  empty = Mean(jnp.float32(0), jnp.float32(0))
  (grads, means), rows = _each(
    body,
    (zeros, (empty, empty)),
    (split(batch.rows, settings.microbatches, settings.samples), jnp.arange(settings.microbatches)),
    settings.microbatches,
  )
  surrogate, penalty = means
  loss = -surrogate.value + coefficient * penalty.value
  inverse = lambda mean: Mean(jnp.float32(1), mean.count).value  # 0 where nothing was counted
  scale = (-inverse(surrogate), coefficient * inverse(penalty))
  gradient = jax.tree.map(lambda *g: sum(s * x for s, x in zip(scale, g, strict=False)), *grads)

  scored, kept, missing, routes = merge(rows, settings.samples)
  norm = optax.global_norm(gradient)
  finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  strict = jnp.array([m.missing == 'error' for m in settings.methods])[chosen]
  finite = finite & ~(strict & (missing & scored.valid).any())
  report = Report(
    scored=scored,
    keep=kept,
    missing=missing,
    route_flips=metrics.route_flips(batch.rollout, routes),
    loss=loss,
    grad_norm=norm,
    finite=finite,
    # A penalty on all rows may still pull back a policy that has left the region with every row.
    accepted=(masks.rows_kept(kept, scored.valid).sum() > 0)
    | ((coefficient > 0) & (penalty.total != 0)),
  )
  return loss, gradient, report


def apply_gradient(state: TrainState, gradient, report: Report, optimizer) -> TrainState:
  """One optimizer step; parameters and optimizer stay as they are if the gradient is not finite or
  no row was accepted (momentum alone must not move a policy that no sample supports)."""
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  good = report.finite & report.accepted
  hold = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
  return dataclasses.replace(
    state, params=hold(params, state.params), opt_state=hold(opt_state, state.opt_state)
  )


def update(
  state: TrainState, batch: Batch, key: Key[Array, ''], arm: Arm, *, optimizer, settings: Settings
) -> tuple[TrainState, Report]:
  """All optimizer steps of one rollout: epochs x minibatches; reports stacked on a leading axis.

  The mask is judged afresh at every step, since the policy moves while the rollout stays.
  """

  def minibatch(state, xs):
    mini, index = dataclasses.replace(xs[0], heads=batch.heads), xs[1]
    _, gradient, report = gradients(
      state.params,
      mini,
      limit=state.limit,
      key=jax.random.fold_in(key, index),
      chosen=arm.method,
      settings=settings,
    )
    return apply_gradient(state, gradient, report, optimizer), report

  minis = split(batch.rows, settings.minibatches, settings.samples)

  def epoch(state, number):
    index = number * settings.minibatches + jnp.arange(settings.minibatches)
    return _each(minibatch, state, (minis, index), settings.minibatches)

  state, reports = _each(epoch, state, jnp.arange(settings.epochs), settings.epochs)
  return state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), reports)


def _rows(x: Array) -> Array:  # of all updates as one batch, on every device
  return sharding.reshard(x).reshape(-1, *x.shape[2:])


def follow_limit(state: TrainState, reports: Report, arm: Arm, settings: Settings) -> TrainState:
  """The limit of the first mask after this batch, for methods that let it follow."""
  if all(method.follow is None for method in settings.methods):
    return state
  scored = reports.scored
  divergences, valid, usable = jax.tree.map(
    _rows, (scored.divergences, scored.valid, scored.usable)
  )

  def one(method):
    if method.follow is None:
      return lambda: state.limit
    # A floor above float32 noise: a healthy batch must not pull the limit to where nothing passes.
    floor = max(LIMIT_FLOOR, method.follow.floor)
    statistic = extremes.at_least(method.masks[0].statistic(divergences, valid), floor)
    return lambda: masks.follow(
      state.limit,
      statistic,
      target=method.follow.target,
      rate=method.follow.rate,
      usable=usable & valid.any(-1),
    )

  branches = [one(m) for m in settings.methods]
  limit = branches[0]() if len(branches) == 1 else jax.lax.switch(arm.method, branches)
  return dataclasses.replace(state, limit=limit)


def summarise(
  reports: Report, settings: Settings
) -> tuple[dict[str, Float[Array, '']], Bool[Array, 'R']]:
  """(scalars of the step, rows whose policy log-probs are not finite) from stacked reports."""
  scored, keep, missing = jax.tree.map(_rows, (reports.scored, reports.keep, reports.missing))
  groups = dict(samples=settings.samples, fresh=keep.shape[0] // settings.epochs)
  scalars = metrics.summarise(scored, keep, missing, **groups)
  scalars |= {
    'loss': reports.loss.mean(),
    'grad_norm': reports.grad_norm.mean(),
    'skipped_updates': (~reports.accepted).sum().astype(jnp.float32),
  }
  if reports.route_flips is not None:
    scalars['route_flips'] = reports.route_flips.mean()
  bad = ~jnp.isfinite(jnp.where(scored.valid, scored.logp, 0)).all(-1)
  bad = bad.reshape(settings.epochs, settings.minibatches, -1).any(0)
  return scalars, merge(bad, settings.samples)  # by their place in the rollout
