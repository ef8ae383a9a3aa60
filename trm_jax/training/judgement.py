"""From hidden states to surrogate, penalty and mask: everything that looks at the vocabulary.

Runs inside one `shard_map` block, rows split over `data` and the vocabulary over `model`;
differentiation is outside it.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int, Key

from trm_jax import objectives
from trm_jax.divergences import linear_head
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.objectives import weights
from trm_jax.rollouts import stores
from trm_jax.types import Mean, Rollout


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
  """Output heads that a batch was, or would have been, scored with; no rows.

  Attributes:
    rollout: of each engine in the order of its rows, where the rollout holds hidden states.
    reference: of the policy that the KL penalty pulls to; None without one.
  """

  rollout: tuple[Float[Array, 'V D'], ...] = ()
  reference: Float[Array, 'V D'] | None = None


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A rollout with the trainer's own log-probs; None where they are the current policy's.

  `reference_hidden` are states of the policy that the KL penalty pulls to. `heads` are shared by
  all rows: `rows` are what can be split.
  """

  rollout: Rollout
  recomputed_logp: Float[Array, 'B T'] | None = None
  version_logp: Float[Array, 'B T'] | None = None
  reference_hidden: Float[Array, 'B T D'] | None = None
  heads: Heads = Heads()

  @property
  def rows(self) -> 'Batch':
    """The batch without what its rows share."""
    return dataclasses.replace(self, heads=Heads())


def judge(
  hidden: Float[Array, 'B T D'],
  head: Float[Array, 'V D'],
  batch: Batch,
  limit: Float[Array, ''],
  key: Key[Array, ''],
  chosen: Int[Array, ''],
  *,
  methods: tuple[objectives.Method, ...],
  samples: int,
  temperature: float,
  shares: tuple[int, ...] = (),
  support: bool = False,
  vocab_axis: str | None = None,
  data_axis: str | None = None,
) -> tuple[
  tuple[Mean, Mean], objectives.Scored, Bool[Array, 'B'] | Bool[Array, 'B T'], Bool[Array, 'B T']
]:
  """((surrogate, penalty) over all devices, scored rows, keep, missing) from hidden states.

  Rows are this device's (of `data_axis`), V its part of the vocabulary (of `vocab_axis`). Gradients
  flow from the two means into `hidden` and `head`, never through a mask or a divergence of the
  criterion. `shares` are the engines' rows in a group of `samples` (default: one engine). With
  `support` the policy is conditioned on the tokens that an engine could have drawn; the penalty is
  that of the whole policy.
  """
  rollout, heads = batch.rollout, batch.heads
  compared = stores.compare(
    hidden,
    head,
    rollout,
    heads=heads.rollout,
    shares=shares or (samples,),
    temperature=temperature,
    full=any(method.reads_exact for method in methods),
    support=support,
    axis_name=vocab_axis,
  )
  logp = compared.logp
  reference_kl = None
  if batch.reference_hidden is not None:
    reference_kl = linear_head.kl_from(
      hidden,
      head,
      batch.reference_hidden,
      heads.reference,
      temperature=temperature,
      axis_name=vocab_axis,
    )
  detached = jax.lax.stop_gradient(logp)
  recomputed = detached if batch.recomputed_logp is None else batch.recomputed_logp
  version = recomputed if batch.version_logp is None else batch.version_logp

  def arm(method: objectives.Method):
    rollout_logp, usable = weights.resolve_missing(
      rollout.logp, logp, rollout.valid, missing=method.missing, trainer_logp=version
    )
    seen, lower = compared.divergences, compared.lower
    if method.missing == 'neutral':
      filled = dict(log_ratio=detached - rollout_logp)
      seen = dataclasses.replace(seen, **filled)
      lower = lower and dataclasses.replace(lower, **filled)
    scored = objectives.Scored(
      logp=logp,
      rollout_logp=rollout_logp,
      recomputed_logp=recomputed,
      version_logp=version,
      divergences=seen,
      usable=usable,
      valid=rollout.valid,
      reward=rollout.reward,
      engine=rollout.engine,
      stored_logp=compared.stored_logp,
    )
    if lower is not None:
      scored = objectives.bounded(method, scored, lower, limit=limit)
    surrogate, kept, _ = objectives.objective(
      method, scored, samples=samples, limit=limit, key=key, axis_name=data_axis
    )
    penalty = Mean(jnp.zeros_like(surrogate.total), surrogate.count)
    if reference_kl is not None:
      penalty = objectives.penalty(method, reference_kl, rollout.valid, kept)
    if by_token and kept.ndim == 1:
      kept = jnp.broadcast_to(kept[:, None], rollout.valid.shape)
    return (surrogate, penalty), jax.lax.stop_gradient(scored), kept

  # The arms of one program return masks of one shape.
  by_token = any(method.scope == 'prefix' for method in methods)
  arms = [functools.partial(arm, m) for m in methods]
  terms, scored, kept = arms[0]() if len(arms) == 1 else jax.lax.switch(chosen, arms)
  terms = tuple(mean.over(data_axis) for mean in terms)
  return terms, scored, kept, jnp.isnan(rollout.logp)


def over_mesh(**settings):
  """`judge` of whole arrays: over the current mesh if there is one, gradients from outside it."""
  if not sharding.active():
    return functools.partial(judge, **settings)
  body = functools.partial(judge, **settings, vocab_axis=MODEL, data_axis=DATA)
  rows = P(DATA)

  def mapped(hidden, head, batch, limit, key, chosen):
    def laid_out(tree, scores, table):
      """`tree` with functions applied to what has a vocabulary axis: scores, and rows of a head."""
      rollout = dataclasses.replace(tree.rollout, logits=scores(tree.rollout.logits))
      heads = jax.tree.map(table, tree.heads)
      return dataclasses.replace(tree, rollout=rollout, heads=heads)

    batch = laid_out(
      batch,
      lambda x: sharding.reshard(x, DATA, None, MODEL),
      lambda x: sharding.reshard(x, MODEL),
    )
    specs = laid_out(
      jax.tree.map(lambda _: rows, batch),
      lambda x: None if x is None else P(DATA, None, MODEL),
      lambda _: P(MODEL),
    )
    return sharding.over_mesh(
      body,
      in_specs=(rows, P(MODEL), specs, P(), P(), P()),
      out_specs=((P(), P()), rows, rows, rows),
    )(hidden, sharding.reshard(head, MODEL), batch, limit, key, chosen)

  return mapped
