"""Every public transform of arrays as a program of shapes, for `benchmarks.tpu_transforms`.

    with jax.set_mesh(chips.mesh('v5p:2x2x2', 2, 4)):
      for case in transforms.cases():
        jax.jit(case.run).lower(*case.arguments).compile()

Rows are split over `data`, vocabularies, heads and experts over `model`, where a run of training
does so; metrics, certificates and bounds see whole arrays on every device, as they do there.
`EXCLUDED` names the public functions that are no case, with the reason.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import abstract_step
from trm_jax import (
  advantages,
  attention,
  bounds,
  brackets,
  calibration,
  certificate,
  confidence,
  divergences,
  experts,
  importance,
  judgement,
  kernels,
  linear_head,
  method,
  metrics,
  pair,
  policy,
  prefixes,
  relay,
  rotary,
  sampling,
  sharding,
  sharp_bounds,
  stores,
  streams,
  surrogate_certificate,
  surrogates,
  trust_region,
  update,
  vocab,
)
from trm_jax.mismatch import (
  decoding,
  fleet,
  heavy_tail,
  measurements,
  metric_names,
  precision,
  reduction,
  reporting,
  router_statistics,
  routing,
  staleness,
)
from trm_jax.mismatch.hooks import Hooks
from trm_jax.sharding import DATA, MODEL
from trm_jax.tasks import addition, chain_sum, moves, sorting
from trm_jax.types import Bracket, Divergences, Rollout, TopK

# No size is a multiple or a part of another: a shape tells what its axes are.
ROWS, SAMPLES, PROMPT, RESPONSE, VOCAB, WIDTH, TOP = 32, 4, 96, 416, 40_064, 1024, 64
HORIZON = 1024  # of the bounds
RESPONSE_DRAWN = 32  # by `sampling.generate`: its loop is compiled once, however long

# Policies and sizes of the whole steps; of one layer, which compiles fast, for all other cases.
DENSE = policy.PolicyConfig(
  width=256,
  layers=5,
  heads=8,
  kv_heads=4,
  head_width=128,
  mlp_width=512,
  experts=0,
  dtype='bfloat16',
  remat=True,
)
MOE = dataclasses.replace(
  DENSE, experts=8, experts_per_token=2, expert_compute='ragged', normalize_gates=True
)
STEPS = {'dense': DENSE, 'MoE': MOE}
STEP_SEQUENCE, STEP_PROMPT = 1536, 384
SMALL = dataclasses.replace(DENSE, layers=1)
SMALL_MOE = dataclasses.replace(MOE, layers=1)

BY_ROW = P(DATA)

# Public functions that are no case, by the reason; 'module.' stands for all of a module.
EXCLUDED = {
  'files, processes, programs and their reports: on the host': (
    *('config_json.', 'digests.', 'loop.', 'processes.', 'provenance.', 'recording.'),
    *('tensor_files.', 'timing.', 'tokenizer.', 'train.', 'weights.', 'tasks.task.'),
    *('mismatch.measurements.plain', 'mismatch.presets.named'),
  ),
  'NumPy in float64, on the host': ('mismatch.attribution.',),
  'sums over all sequences of a tiny world, in float64: what the others are checked against': (
    'enumeration.',
    'oracle.',
  ),
  'rewards and answers that another library computes on the host': ('tasks.reasoning.',),
  'rows of a data set into tokens, and settings into tasks: on the host': (
    *('tasks.addition.encode', 'tasks.addition.make', 'tasks.chain_sum.encode'),
    *('tasks.chain_sum.make', 'tasks.moves.encode', 'tasks.moves.make', 'tasks.sorting.encode'),
  ),
  'checks and sizes: no arrays are computed': (
    *('bounds.horizon', 'bounds.width', 'confidence.check_alpha', 'confidence.spent'),
    *('divergences.check', 'divergences.static', 'mismatch.precision.check_format'),
    *('policy.shapes', 'policy.size', 'rotary.frequencies', 'stores.bytes_per_token'),
    *('stores.check', 'stores.describe', 'stores.fields'),
  ),
  'layouts, which every case has': ('sharding.',),
  'inside the kernels, which are cases': ('lanes.', 'tiles.'),
  'steps of divergences, linear_head and their gradients, which are cases': (
    *('blocks.', 'terms.', 'divergences.gather', 'divergences.with_gradient', 'pair.centred'),
    *('pair.divergence_gradients', 'pair.fused', 'pair.local_sums', 'pair.local_terms'),
    *('pair.log_odds', 'pair.log_probs', 'pair.mean_signs', 'pair.merge', 'pair.pick'),
    *('pair.score_gradient', 'pair.seed', 'pair.shared', 'pair.side', 'pair.sums'),
    'pair.terms_given',
  ),
  'steps of the bounds and certificates, which are cases': (
    *('bounds.after', 'bounds.before', 'bounds.paper', 'bounds.real', 'bounds.root'),
    *('bounds.smallest', 'bounds.spread', 'bounds.tv_of_kl', 'certificate.conclude'),
  ),
}


class Case(NamedTuple):
  """A program of shapes.

  Attributes:
    name: 'module.function', then after a comma which form of it.
    run, arguments: the function, and `jax.ShapeDtypeStruct`s with layouts.
    also: further public functions that the program is made of, as 'module.function'.
    donated: arguments whose memory the results may take.
    positions: sizes of axes that count positions; with `VOCAB` they tell arrays of scores. Empty
      where such arrays are arguments or results by their nature.
    layers: of the policy, where no collective may move the parameters of all of them at once.
  """

  name: str
  run: Callable
  arguments: tuple
  also: tuple[str, ...] = ()
  donated: tuple[int, ...] = ()
  positions: frozenset[int] = frozenset()
  layers: int = 0


def of(shape: tuple[int, ...], *axes: str | None, dtype: Any = jnp.float32):
  """An abstract array laid out over the current mesh."""
  layout = NamedSharding(jax.sharding.get_mesh(), P(*axes))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def split(fn: Callable, *arguments, out=BY_ROW) -> Callable:
  """`fn` on each device's part of the arguments, as `judgement` and `sampling` run it."""
  specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
  return sharding.over_mesh(fn, in_specs=specs, out_specs=out)


def gradient(fn: Callable, count: int = 1) -> Callable:
  """The gradient of the sum of all float results, by the first `count` arguments."""

  def total(*args):
    found = [x for x in jax.tree.leaves(fn(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(x.astype(jnp.float32).sum() for x in found)

  return jax.grad(total, argnums=tuple(range(count)))


def _both(name, run, *arguments, by=1, **more) -> list[Case]:
  """A function and its gradient."""
  return [
    Case(name, run, arguments, **more),
    Case(f'{name}, gradient', gradient(run, by), arguments, **more),
  ]


def _name(fn) -> str:
  return f'{fn.__module__.removeprefix("trm_jax.")}.{fn.__name__}'


def _by_rows(fn, *arguments, out=BY_ROW, **settings) -> Case:
  run = functools.partial(fn, **settings) if settings else fn
  return Case(_name(fn), split(run, *arguments, out=out), arguments)


def _whole(fn, *arguments, **settings) -> Case:
  return Case(_name(fn), functools.partial(fn, **settings) if settings else fn, arguments)


def cases() -> list[Case]:
  """All cases, for the current mesh."""
  parts = (
    _scores(),
    _heads(),
    _kernels(),
    _regions(),
    _objectives(),
    _certificates(),
    _theory(),
    _layers(),
    _policies(),
    _rollouts(),
    _stores(),
    _reports(),
    _mismatch(),
    _tasks(),
    _steps(),
  )
  return [case for part in parts for case in part]


def _positions() -> frozenset[int]:
  """Sizes of a response, of a device's rows of it, flat, and of all."""
  local = ROWS // jax.sharding.get_mesh().shape[DATA]
  return frozenset(RESPONSE * n for n in (1, local, ROWS))


def _tokens():
  return of((ROWS, RESPONSE), DATA, dtype=jnp.int32)


def _valid(rows=ROWS, *axes):
  return of((rows, RESPONSE), *(axes or (DATA,)), dtype=bool)


def _per_token(*axes):
  return of((ROWS, RESPONSE), *(axes or (DATA,)))


def _per_row(*axes, dtype=jnp.float32):
  return of((ROWS,), *(axes or (DATA,)), dtype=dtype)


def _key():
  return abstract_step.laid_out(jax.eval_shape(lambda: jax.random.key(0)))


def _keys(*shape):
  key = jax.eval_shape(lambda: jax.random.key(0))
  return of(shape, DATA, dtype=key.dtype)


def _divergences(*axes):
  x = _per_token(*axes)
  return Divergences(kl=x, tv=x, log_ratio=x, entropy=x, chi2=x)


def _top():
  shape = (ROWS, RESPONSE, TOP)
  return TopK(of(shape, DATA, dtype=jnp.int32), of(shape, DATA), _per_token())


def _scores() -> list[Case]:
  """Of two arrays of scores, vocabulary split over `model`."""
  logits = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL, dtype=jnp.bfloat16)
  tokens, flat = _tokens(), of((ROWS, VOCAB), DATA)
  mass = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL)
  two = logits, logits

  def over(fn, *arguments, form='', grad=True, out=BY_ROW, **settings):
    run = split(functools.partial(fn, **settings, axis_name=MODEL), *arguments, out=out)
    name = _name(fn) + (f', {form}' if form else '')
    return _both(name, run, *arguments) if grad else [Case(name, run, arguments)]

  in_nats = lambda fn: Case(_name(fn), split(fn, _per_token()), (_per_token(),))
  return [
    *over(divergences.statistics, *two, tokens),
    *over(divergences.statistics, *two, tokens, form='full set', full=True, grad=False),
    *over(divergences.kl, *two),
    *over(divergences.total_variation, *two),
    *over(divergences.jensen_shannon, *two),
    *over(divergences.renyi, *two, alpha=2.0),
    *over(divergences.entropy, logits),
    *over(divergences.logp, logits, tokens),
    *map(in_nats, (divergences.k1, divergences.k2, divergences.k3)),
    *over(pair.compare, *two, tokens, temperature=None, grad=False),
    *over(pair.one, logits, tokens, temperature=None, grad=False),
    *over(vocab.maximum, mass, grad=False),
    *over(vocab.total, mass, grad=False),
    *over(vocab.pick, logits, tokens, grad=False),
    *over(vocab.held, logits, tokens, grad=False, out=P(DATA, MODEL)),
    *over(vocab.place, tokens, size=VOCAB // 2, grad=False, out=P(DATA, MODEL)),
    *over(vocab.centred, mass, grad=False, out=(P(DATA, None, MODEL), P(DATA))),
    Case('brackets.top_k', sharding.over_rows(lambda x: brackets.top_k(x, TOP)), (flat,)),
    *over(brackets.bounds, logits, _top(), grad=False),
    _by_rows(brackets.decide, Bracket(_per_token(), _per_token()), limit=0.2),
    _by_rows(brackets.decide_rows, Bracket(_per_token(), _per_token()), _valid(), limit=0.2),
    Case('sampling.token_logp', sampling.token_logp, (logits, tokens, _valid())),
  ]


def _heads() -> list[Case]:
  """From hidden states and output heads: no array of scores is allowed in HBM."""
  hidden = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  logits = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL, dtype=jnp.bfloat16)
  tokens, free = _tokens(), dict(positions=_positions())
  at = dict(axis_name=MODEL)
  against = linear_head.statistics

  def over(name, fn, *rest, **more):
    arguments = hidden, head, *rest
    return _both(f'linear_head.{name}', split(fn, *arguments), *arguments, by=2, **more)

  of_logits = lambda h, w, g, p, **more: against(h, w, g, rollout_logits=p, **at, **more)
  of_states = lambda h, w, g, p, u, **more: against(
    h, w, g, rollout_hidden=p, rollout_head=u, **at, **more
  )
  projected = Case(
    'linear_head.project',
    split(linear_head.project, hidden, head, out=P(DATA, None, MODEL)),
    (hidden, head),
  )
  return [
    projected,
    *over('statistics, of logits', of_logits, tokens, logits),
    *over('statistics, of hidden states', of_states, tokens, hidden, head, **free),
    *over(
      'statistics, of hidden states, full set',
      functools.partial(of_states, full=True),
      tokens,
      hidden,
      head,
      **free,
    )[:1],
    # Its gradient is that of `logp`.
    over('brackets', functools.partial(linear_head.brackets, **at), tokens, _top(), **free)[0],
    *over('logp', functools.partial(linear_head.logp, **at), tokens, **free),
    *over('kl_from', functools.partial(linear_head.kl_from, **at), hidden, head, **free),
  ]


def _kernels() -> list[Case]:
  """The kernels by themselves, on a device's rows and all of the vocabulary."""
  count = ROWS * RESPONSE
  logits = of((count, VOCAB), DATA, dtype=jnp.bfloat16)
  hidden = of((count, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), dtype=jnp.bfloat16)
  x = of((count,), DATA)
  given = (x,) * 4
  # A kernel's results do not say over which axes they differ.
  local = lambda fn, *arguments: Case(
    _name(fn),
    jax.shard_map(
      fn, in_specs=jax.tree.map(lambda x: x.sharding.spec, arguments), out_specs=P(DATA)
    ),
    arguments,
  )
  free = lambda case: case._replace(positions=_positions())
  return [
    local(kernels.sums, logits),
    local(kernels.fused, logits, logits),
    local(kernels.terms_given, logits, logits, *given),
    free(local(kernels.linear_sums, hidden, head)),
    free(local(kernels.linear_terms, hidden, head, (hidden, head), *given)),
    free(local(kernels.linear_fused, hidden, head, (hidden, head), x)),
  ]


def _regions() -> list[Case]:
  """Criteria and masks, on each device's rows."""
  d, valid, x = _divergences(), _valid(), _per_token()
  criterion = lambda name, **at: _by_rows(getattr(trust_region, name), d, valid, **at)
  limited = (
    *('max_kl', 'mean_kl', 'max_tv', 'max_k2', 'mean_k3', 'mean_deviation', 'chi2_budget'),
    *('prefix_max_kl', 'prefix_max_tv', 'prefix_chi2_budget'),
  )
  weights = dict(epsilon=5e-3, delta=1e-4)
  both = trust_region.all_of(
    functools.partial(trust_region.max_kl, limit=0.2),
    functools.partial(trust_region.max_tv, limit=0.3),
  )
  rows, key = _per_row(dtype=bool), _key()
  lengths = _per_row(dtype=jnp.int32)

  def dealt(fn, keep, form, *rest):
    run = lambda keep, key, *rest: fn(
      keep, key, axis_name=DATA, **dict(zip(('usable', 'lengths'), rest, strict=False))
    )
    arguments = keep, key, *rest
    return Case(_name(fn) + form, split(run, *arguments), arguments)

  return [
    _by_rows(trust_region.max_over_tokens, x, valid),
    _by_rows(trust_region.mean_over_tokens, x, valid),
    _by_rows(trust_region.sum_over_tokens, x, valid),
    _by_rows(trust_region.deviation, x),
    _by_rows(trust_region.future_deviation, x, valid, **weights),
    _by_rows(trust_region.chi2_of, d),
    criterion('keep_all'),
    *(criterion(name, limit=0.2) for name in limited),
    criterion('length_neutral', limit=0.2, **weights),
    criterion('combined', max_limit=0.2, mean_limit=0.002),
    Case('trust_region.all_of', split(both, d, valid), (d, valid)),
    _by_rows(trust_region.prefix, valid, valid),
    dealt(trust_region.permuted, rows, ''),
    dealt(trust_region.permuted, rows, ', by length', rows, lengths),
    dealt(trust_region.permuted_prefixes, valid, '', rows),
    _whole(trust_region.follow, of(()), of((ROWS,)), target=0.8),
  ]


def _scored(*axes):
  x, row = _per_token(*axes), functools.partial(_per_row, *axes)
  return method.Scored(
    logp=x,
    rollout_logp=x,
    recomputed_logp=x,
    version_logp=x,
    divergences=_divergences(*axes),
    usable=row(dtype=bool),
    valid=_valid(ROWS, *axes),
    reward=row(),
    engine=row(dtype=jnp.int32),
  )


def _objectives() -> list[Case]:
  """Advantages, importance weights, surrogates, methods, and the whole judgement of a batch."""
  x, valid, reward, keep = _per_token(), _valid(), _per_row(), _per_row(dtype=bool)
  scored, key, limit = _scored(), _key(), of(())
  trm = method.Method(max_kl=0.2, mean_kl=0.01)
  cut = method.Method(max_kl=0.2, scope='prefix')
  drawn = method.Method(max_kl=0.2, random_mask=True, match_length=True)
  grouped = dict(group_size=SAMPLES)

  def of_method(name, fn, *arguments, out=BY_ROW, grad=False):
    run = split(fn, *arguments, out=out)
    name = f'method.{name}'
    return _both(name, run, *arguments) if grad else [Case(name, run, arguments)]

  kept = lambda settings: (
    lambda s, limit, key: method.keep(settings, s, limit=limit, key=key, axis_name=DATA)
  )

  def loss(logp, s, limit, key):
    s = dataclasses.replace(s, logp=logp)
    mean, kept, _ = method.objective(trm, s, samples=SAMPLES, limit=limit, key=key, axis_name=DATA)
    return mean.over(DATA).value, kept

  token = lambda logp, s, a: method.per_token(trm, dataclasses.replace(s, logp=logp), a)
  mean_over = lambda fn: lambda *args: fn(*args).over(DATA).value
  aggregated = mean_over(surrogates.aggregate)
  penalty = mean_over(functools.partial(method.penalty, trm))
  ratio = surrogates.ratio_pg
  graded = lambda fn, *args: _both(_name(fn), split(fn, *args), *args)
  return [
    *(
      _by_rows(fn, reward, keep, **grouped)
      for fn in (advantages.centred, advantages.group_relative, advantages.leave_one_out)
    ),
    _by_rows(importance.ratio, x, valid),
    _by_rows(importance.none, x, valid),
    _by_rows(importance.truncated, x, valid),
    _by_rows(importance.sequence_truncated, x, valid),
    _by_rows(importance.resolve_missing, x, x, valid),
    _whole(importance.effective_sample_size, _per_token(None), _valid(ROWS, None)),
    *graded(ratio, x, x, reward, valid),
    *graded(surrogates.ppo_clip, x, x, reward, valid),
    *graded(surrogates.decoupled, x, x, x, reward, valid),
    *_both('surrogates.aggregate', split(aggregated, x, valid, keep, out=P()), x, valid, keep),
    *of_method('keep', kept(trm), scored, limit, key),
    *of_method('keep, prefixes', kept(cut), scored, limit, key),
    *of_method('keep, random mask', kept(drawn), scored, limit, key),
    *of_method(
      'bounded',
      lambda s, lower, limit: method.bounded(trm, s, lower, limit=limit),
      scored,
      _divergences(),
      limit,
    ),
    *of_method('rows_kept', method.rows_kept, valid, valid),
    *of_method('per_token', token, x, scored, reward, grad=True),
    *of_method('objective', loss, x, scored, limit, key, out=(P(), P(DATA)), grad=True),
    *of_method('penalty', penalty, x, valid, keep, out=P(), grad=True),
    *_judged(),
  ]


def _rollout(
  store: stores.Store = 'hidden', config=SMALL, width=None, response=RESPONSE
) -> Rollout:
  """What a fleet of engines hands over, abstract."""
  shape = ROWS, response
  ids, real = of(shape, DATA, dtype=jnp.int32), of(shape, DATA)
  row = _per_row(dtype=jnp.int32)
  wide = lambda n, *axes, dtype=jnp.float32: of((*shape, n), DATA, *axes, dtype=dtype)
  kept = dict.fromkeys(('logits', 'hidden', 'top'))
  if store == 'topk':
    kept['top'] = TopK(wide(TOP, dtype=jnp.int32), wide(TOP), real)
  elif store == 'logits':
    kept['logits'] = wide(VOCAB, None, MODEL)
  elif store == 'hidden':
    kept['hidden'] = wide(width or config.width)
  routes = None
  if config.experts:
    slots = PROMPT + response - 1
    routes = of((ROWS, slots, config.layers, config.experts_per_token), DATA, dtype=jnp.int32)
  return Rollout(
    prompts=of((ROWS, PROMPT), DATA, dtype=jnp.int32),
    start=row,
    tokens=ids,
    valid=of(shape, DATA, dtype=bool),
    logp=real,
    routes=routes,
    version=ids,
    engine=row,
    reward=_per_row(),
    **kept,
  )


def _judged() -> list[Case]:
  hidden = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  chosen = method.Method(max_kl=0.2, kl_coefficient=0.1)
  judge = judgement.over_mesh(methods=(chosen,), samples=SAMPLES, temperature=1.0)
  batch = judgement.Batch(
    _rollout('hidden', width=WIDTH),
    reference_hidden=hidden,
    heads=judgement.Heads((head,), head),
  )
  run = lambda *args: [mean.value for mean in judge(*args)[0]]
  arguments = hidden, head, batch, of(()), _key(), of((), dtype=jnp.int32)
  also = ('judgement.over_mesh',)
  return _both('judgement.judge', run, *arguments, by=2, also=also, positions=_positions())


def _certificates() -> list[Case]:
  """Of whole batches, replicated, as `metrics.summarise` reads them."""
  x, valid, reward = _per_token(None), _valid(ROWS, None), _per_row(None)
  unit, row = of((ROWS,)), of((ROWS,))
  limits = prefixes.Limits(max_kl=0.5, max_tv=0.4, budget=2.0, band=1.0)
  patch = lambda r, v: prefixes.patch(r, v, kl=r, tv=r, chi2=r, limits=limits)
  patched = lambda fn: lambda r, v, *rest: fn(patch(r, v), *rest)
  samples = dict(samples=SAMPLES)
  penalised = lambda fn: lambda p, reward: fn(p, reward, prefixes.tv_penalty, **samples)
  from_patch = lambda name, fn, *rest: Case(name, patched(fn), (x, valid, *rest))
  by_surrogate = lambda fn, run: from_patch(_name(fn), run, reward)
  four = (
    certificate.improvement,
    certificate.harm,
    certificate.retrospective,
    certificate.retrospective_harm,
  )
  of_rows = lambda fn: lambda p, reward: fn(p, reward, **samples)
  s = surrogate_certificate
  return [
    _whole(certificate.unit_reward, reward),
    _whole(certificate.by_prompt, reward, **samples),
    _whole(certificate.log_weight, x, valid),
    *(_whole(fn, x, valid, reward, **samples) for fn in four),
    _whole(certificate.over_steps, of((100,)), of((100,)), prompts=ROWS // SAMPLES),
    _whole(certificate.monitor, x, valid, reward, **samples),
    _whole(confidence.log_evalue, unit),
    _whole(confidence.betting, unit, alpha=0.05),
    _whole(confidence.empirical_bernstein, unit, alpha=0.05, low=-1.0, high=1.0),
    _whole(confidence.catoni, unit, alpha=0.05, variance=1.0),
    _whole(confidence.cumulative, row, row, alpha=0.05),
    _whole(confidence.normal, unit, alpha=0.05),
    Case('prefixes.patch', patch, (x, valid)),
    from_patch('prefixes.tv_penalty', prefixes.tv_penalty),
    from_patch('prefixes.l2_penalty', prefixes.l2_penalty),
    by_surrogate(s.first_order, penalised(s.first_order)),
    by_surrogate(s.prefix, penalised(s.prefix)),
    by_surrogate(s.centred, of_rows(s.centred)),
    by_surrogate(s.error_bounds, of_rows(s.error_bounds)),
    by_surrogate(s.plug_in, of_rows(s.plug_in)),
  ]


def _theory() -> list[Case]:
  """Bounds of a horizon from scalars and position-wise divergences; calibration of limits."""
  static = dict(T=HORIZON, low=-1.0, high=2.0)
  lengths = ('d_bar', 'epsilon_t', 'delta_t')

  def of_settings(fn):
    names = list(inspect.signature(fn).parameters)
    fixed = {n: static[n] for n in names if n in static}
    traced = [n for n in names if n not in static and n not in ('sd', 'clip', 'scale')]
    arguments = tuple(of((HORIZON,) if n in lengths else ()) for n in traced)
    return Case(_name(fn), lambda *a: fn(**fixed, **dict(zip(traced, a, strict=True))), arguments)

  blocks = (
    *('pinsker', 'advantage_limit', 'visitation_tv', 'future_weights', 'sequence_tv'),
    *('worst_d_bar', 'to_range', 'classical_tv', 'classical_kl', 'coupling'),
    *('pinsker_marginal_kl', 'pinsker_marginal_tv', 'mixed_kl', 'mixed_tv', 'adaptive_kl'),
    *('adaptive_tv', 'adaptive', 'linear', 'b_star', 'pinsker_marginal_kl_closed'),
    *('pinsker_marginal_tv_closed', 'mixed_kl_closed', 'coupling_closed', 'crossover'),
    *('last_uncapped', 'mixed_from', 'acceptance'),
  )
  sharp = (
    *('position_wise', 'product', 'prefix_budget', 'pointwise_ratio', 'l2', 'budget_l2'),
    *('budget_l2_closed', 'chi2_limit', 'trivial', 'marginal', 'b_star_tight', 'tabulate'),
  )
  x, valid, row = _per_token(None), _valid(ROWS, None), of((ROWS,))
  tail, whole = calibration.tail, of((ROWS,), dtype=jnp.int32)
  limit = lambda x, valid: calibration.max_limit(tail(x, valid), T=HORIZON, target=0.8)
  conformal = lambda x, valid, largest, lengths: calibration.conformal_max_limit(
    tail(x, valid), largest, lengths, T=HORIZON, target=0.8
  )
  return [
    *(of_settings(getattr(bounds, name)) for name in blocks),
    *(of_settings(getattr(sharp_bounds, name)) for name in sharp),
    _whole(calibration.conformal, row, target=0.8),
    _whole(tail, x, valid),
    Case('calibration.max_limit', limit, (x, valid)),
    Case('calibration.conformal_max_limit', conformal, (x, valid, row, whole)),
  ]


def _layers() -> list[Case]:
  """Attention, rotation and experts in bfloat16, heads and experts over `model`."""
  length, c = PROMPT + RESPONSE, SMALL.head_width
  heads = lambda n: of((ROWS, length, n, c), DATA, None, MODEL, dtype=jnp.bfloat16)
  q, k = heads(SMALL.heads), heads(SMALL.kv_heads)
  start = _per_row(dtype=jnp.int32)

  def attend(fn):
    run = lambda q, k, v, start: fn(q, k, v, slots=jnp.arange(length), start=start)
    return _both(_name(fn), run, q, k, k, start, by=3)

  e, d, f, chosen = MOE.experts, WIDTH, MOE.mlp_width, MOE.experts_per_token
  scores = of((ROWS, length, e), DATA)
  x = of((ROWS, length, d), DATA, dtype=jnp.bfloat16)
  routes = of((ROWS, length, chosen), DATA, dtype=jnp.int32)
  gates = of((ROWS, length, chosen), DATA)
  matrix = lambda *shape: of(shape, MODEL, dtype=jnp.bfloat16)
  matrices = matrix(e, d, f), matrix(e, d, f), matrix(e, f, d)

  def compute(fn):
    run = lambda x, gates, gate, up, down, routes: fn(x, routes, gates, gate, up, down)
    return _both(_name(fn), run, x, gates, *matrices, routes, by=5)

  route = lambda scores: experts.route(
    scores, chosen, normalize=True, layer=0, noise_keys=None, hooks=Hooks()
  )
  balance = of((ROWS, length, SMALL.layers, e), DATA)
  choices = of((ROWS, length, SMALL.layers, chosen), DATA, dtype=jnp.int32)
  real = of((ROWS, length), DATA, dtype=bool)
  positions = of((ROWS, length), DATA, dtype=jnp.int32)
  return [
    *attend(attention.plain),
    *attend(attention.blockwise),
    *attend(attention.splash),
    Case('rotary.rotate', functools.partial(rotary.rotate, base=1e6), (q, positions)),
    *_both('experts.route', route, scores),
    *compute(experts.dense),
    *compute(experts.ragged),
    *_both('experts.load_balance', experts.load_balance, balance, choices, real),
  ]


def _params(config):
  return abstract_step.state_of(config, VOCAB).params


def _policies() -> list[Case]:
  """A small policy's passes, parameters over both axes."""
  params, length = _params(SMALL), PROMPT + RESPONSE
  tokens, start = of((ROWS, length), DATA, dtype=jnp.int32), _per_row(dtype=jnp.int32)
  apply = lambda params, tokens, start: policy.apply(
    params, SMALL, tokens, start=start, attention=attention.splash
  )[0]
  one = of((ROWS, 1, SMALL.width), DATA, dtype=jnp.bfloat16)
  relayed = abstract_step.laid_out(
    jax.eval_shape(lambda p: relay.Relay(jax.tree.map(lambda x: jnp.stack([x] * 2), p), 64), params)
  )
  passed = lambda weights, tokens, start: relay.apply(
    weights, SMALL, tokens, width=PROMPT, start=start
  )[0]
  turn = of((), dtype=jnp.int32)
  some = of((ROWS, 96, SMALL.width), DATA, dtype=jnp.bfloat16)
  keys, row_keys = _keys(ROWS), lambda key: streams.row_keys(key, ROWS // SAMPLES, SAMPLES)
  return [
    Case('policy.init', lambda key: policy.init(key, SMALL, VOCAB), (_key(),)),
    Case('policy.init_cache', lambda: policy.init_cache(SMALL, ROWS, length), ()),
    *_both('policy.apply', apply, params, tokens, start),
    *_both('policy.logits', policy.logits, params, one, also=('policy.head',)),
    Case('relay.at', relay.at, (relayed, turn)),
    Case('relay.apply', passed, (relayed, tokens, start)),
    Case('relay.logits', relay.logits, (relayed, some)),
    Case('streams.row_keys', row_keys, (_key(),), also=('streams.fold',)),
    _whole(streams.noise_keys, keys, first_slot=0, count=RESPONSE),
    _whole(streams.token_keys, keys, length=RESPONSE, stream=1),
  ]


def _drawn(fn, *arguments, store='hidden', **more):
  """`sampling.generate` or that of a fleet, as one program."""
  sizes = dict(samples=SAMPLES, length=RESPONSE_DRAWN, eos=1, pad=0, store=store)
  return lambda *arrays: fn(*arguments, *arrays[:1], SMALL, *arrays[1:], **sizes, **more)


def _rollouts() -> list[Case]:
  params, key = _params(SMALL), _key()
  prompts = of((ROWS // SAMPLES, PROMPT), DATA, dtype=jnp.int32)
  start = of((ROWS // SAMPLES,), DATA, dtype=jnp.int32)
  rollout = _rollout()
  score = lambda params, rollout: sampling.score(
    params, SMALL, rollout, attention=attention.splash
  )[0]
  again = dict(samples=SAMPLES, attention=attention.splash)
  logp = lambda params, rollout: sampling.policy_logp(
    params, SMALL, rollout, attention=attention.splash
  )
  free = dict(positions=_positions())
  drawn = [
    Case(
      f'sampling.generate, {store}',
      _drawn(sampling.generate, store=store),
      (params, prompts, start, key),
    )
    for store in stores.STORES
  ]
  moe = _params(SMALL_MOE), prompts, start, key
  of_moe = lambda params, *rest: sampling.generate(
    params, SMALL_MOE, *rest, samples=SAMPLES, length=RESPONSE_DRAWN, eos=1, pad=0, store='topk'
  )
  return [
    Case('sampling.repeat', lambda x: sampling.repeat(x, SAMPLES), (prompts,)),
    *drawn,
    Case('sampling.generate, MoE', of_moe, moe),
    *_both('sampling.score', score, params, rollout),
    Case(
      'sampling.rescore',
      lambda params, rollout, key: sampling.rescore(params, SMALL, rollout, key, **again)[0],
      (params, rollout, key),
    ),
    Case(
      'sampling.replay',
      lambda params, rollout, key: sampling.replay(params, SMALL, rollout, key, **again),
      (params, _rollout('topk'), key),
      **free,
    ),
    *_both('sampling.policy_logp', logp, params, rollout, **free),
  ]


def _stores() -> list[Case]:
  scores, hidden = of((ROWS, VOCAB), DATA), of((ROWS, WIDTH), DATA, dtype=jnp.bfloat16)
  states = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  sizes = dict(vocab=VOCAB, width=WIDTH, top=TOP)
  found = [
    Case('stores.blank', lambda x: stores.blank('topk', x, **sizes), (_tokens(),)),
    Case(
      'stores.record',
      lambda scores, hidden: stores.record('topk', scores, hidden, temperature=1.0, top=TOP),
      (scores, hidden),
    ),
    Case(
      'stores.side_by_side',
      lambda x: stores.side_by_side(stores.apart(x, (3, 1)), ROWS // SAMPLES),
      (_tokens(),),
      also=('stores.apart',),
    ),
  ]
  for store in stores.STORES:
    rollout = _rollout(store, width=WIDTH)
    engines = (head,) if store == 'hidden' else ()
    specs = jax.tree.map(lambda x: x.sharding.spec, (states, head, rollout, engines))

    def compare(states, head, rollout, heads):
      found = stores.compare(states, head, rollout, heads=heads, shares=(SAMPLES,), axis_name=MODEL)
      return found.logp, found.divergences

    run = sharding.over_mesh(compare, in_specs=specs, out_specs=P(DATA))
    positions = frozenset() if store == 'logits' else _positions()
    arguments = states, head, rollout, engines
    found.append(Case(f'stores.compare, {store}', run, arguments, positions=positions))
  return found


def _reports() -> list[Case]:
  """Scalars of a step, from whole arrays."""
  valid, keep = _valid(ROWS, None), _per_row(None, dtype=bool)
  lengths, ids = _per_row(None, dtype=jnp.int32), of((ROWS, RESPONSE), dtype=jnp.int32)
  rollout = _rollout(config=SMALL_MOE)
  flips = lambda rollout: metrics.route_flips(rollout, rollout.routes)
  summarise = lambda scored, keep, missing: metrics.summarise(
    scored, keep, missing, samples=SAMPLES, fresh=ROWS
  )
  stacked = jax.tree.map(
    lambda x: of((1, *x.shape), None, *x.sharding.spec, dtype=x.dtype), _scored()
  )
  settings = update.Settings(
    methods=(method.Method(max_kl=0.2, accept=0.8),),
    policy=SMALL,
    samples=SAMPLES,
    temperature=1.0,
    attention=attention.splash,
  )

  def follow(limit, scored):
    state = update.TrainState(0, {}, None, None, limit, None, None)
    report = update.Report(scored, *[None] * 7)
    return update.follow_limit(state, report, update.Arm(), settings).limit

  return [
    _whole(metrics.by_length_quartile, keep, lengths),
    _whole(metrics.by_position_quartile, valid, valid),
    _whole(metrics.quantiles, _per_token(None), valid, of((3,))),
    Case('metrics.summarise', summarise, (_scored(None), keep, valid)),
    _whole(metrics.ages, ids, valid, of((), dtype=jnp.int32)),
    Case('metrics.route_flips', flips, (rollout,)),
    Case('update.follow_limit', follow, (of(()), stacked)),
  ]


def _mismatch() -> list[Case]:
  """What disturbs an engine, and what measures it."""
  scores = of((ROWS, VOCAB), DATA)
  x, valid = _per_token(None), _valid(ROWS, None)
  params, key, strength = _params(SMALL), _key(), of(())
  routes = of((ROWS, RESPONSE, SMALL.layers, 2), dtype=jnp.int32)
  fed = of((ROWS, RESPONSE), dtype=bool)
  of_rows = lambda fn, *args, **at: Case(
    _name(fn), sharding.over_rows(functools.partial(fn, **at)), args
  )
  rounded = precision.Precision(weights='float8_e4m3fn', rounding='stochastic')
  reversed_ = reduction.Reduction(permute=True)
  old = staleness.Staleness(steps=2)
  history = abstract_step.laid_out(jax.eval_shape(lambda p: staleness.start_history(p, 2), params))
  measured = (measurements.distribution, measurements.tail)
  named = (metric_names.verl, metric_names.trl, metric_names.tunix)
  edges = (16.0, 64.0)
  lost = reporting.Reporting(dtype='bfloat16', missing=0.1, shift=1, scrambled=0.1)
  report = lambda logp, valid, tokens, prompts: reporting.report(
    lost, logp, valid, token_keys=tokens, prompt_keys=prompts
  )
  kept = decoding.Decoding(top_k=50, top_p=0.9, min_p=0.01)
  tailed = heavy_tail.HeavyTail(scale=1.0, spikes=0.01, outliers=0.1)
  prompts = of((ROWS // SAMPLES, PROMPT), DATA, dtype=jnp.int32)
  start = of((ROWS // SAMPLES,), DATA, dtype=jnp.int32)
  grouped = lambda x, where, group: measurements.by_group(
    lambda here: measurements.distribution(x, here), where, group, 4
  )
  numbers = of((ROWS, RESPONSE), dtype=jnp.int32)
  moe_scores = of((ROWS, RESPONSE, SMALL.layers, MOE.experts))
  return [
    of_rows(decoding.keep_top_k, scores, k=50),
    of_rows(decoding.keep_top_p, scores, p=0.9),
    of_rows(decoding.keep_min_p, scores, p=0.01),
    Case(
      'mismatch.decoding.process',
      sharding.over_rows(functools.partial(decoding.process, kept)),
      (scores,),
    ),
    of_rows(decoding.replay_support, scores, scores),
    of_rows(heavy_tail.sigma, _per_token()),
    Case('mismatch.heavy_tail.student_t', lambda k: heavy_tail.student_t(k, 3.0, 5.0), (key,)),
    Case(
      'mismatch.heavy_tail.outlier_prompts',
      lambda prompts, start: heavy_tail.outlier_prompts(tailed, prompts, start),
      (prompts, start),
    ),
    *(_whole(fn, x, valid) for fn in measured),
    _whole(measurements.bins, x, edges=edges),
    _whole(measurements.position_bins, valid, edges=edges),
    _whole(measurements.length_bins, valid, edges=edges),
    _whole(measurements.sign_bins, of((ROWS,)), valid),
    Case('mismatch.measurements.by_group', grouped, (x, valid, numbers)),
    _whole(measurements.log_odds_shift, x, x),
    _whole(measurements.confidence_table, x, x, valid),
    _whole(measurements.sequences, x, valid),
    _whole(measurements.correlation, x, x, valid),
    Case('mismatch.measurements.measure', _measured, (_divergences(None), valid, x, of((ROWS,)))),
    *(_whole(fn, x, x, valid) for fn in named),
    *(
      Case(
        f'mismatch.precision.round_to, {name}',
        functools.partial(precision.round_to, dtype=name),
        (scores,),
      )
      for name in (*precision.FORMATS, 'e5m7', 'int8')
    ),
    Case(
      'mismatch.precision.round_weights',
      lambda params, s, key: precision.round_weights(params, rounded, s, key),
      (params, strength, key),
    ),
    Case(
      'mismatch.reduction.permute',
      lambda params, s: reduction.permute(params, reversed_, SMALL, s),
      (params, strength),
    ),
    Case(
      'mismatch.reporting.report',
      report,
      (_per_token(), _valid(), _keys(ROWS, RESPONSE), _keys(ROWS // SAMPLES)),
    ),
    _whole(router_statistics.fed_slots, _rollout(config=SMALL_MOE)),
    _whole(router_statistics.flips, routes, routes, fed),
    _whole(router_statistics.margins, moe_scores, fed, experts_per_token=2),
    _whole(router_statistics.load, routes, fed, experts=MOE.experts),
    _whole(routing.flip_rate, routes, routes, fed),
    Case('mismatch.staleness.start_history', lambda p: staleness.start_history(p, 2), (params,)),
    _whole(staleness.push, history, params),
    Case(
      'mismatch.staleness.weights',
      lambda p, h, s: staleness.weights(old, p, first=None, history=h, strength=s),
      (params, history, strength),
    ),
    Case(
      'mismatch.staleness.reported_version',
      lambda v, s: staleness.reported_version(old, v, RESPONSE, s),
      (of((), dtype=jnp.int32), strength),
    ),
    *_fleets(history),
  ]


def _measured(divergences, valid, logp, advantage):
  return measurements.measure(
    divergences, valid, policy_logp=logp, advantage=advantage, positions=(64.0,), lengths=(64.0,)
  )


def _fleets(history) -> list[Case]:
  """A fleet whose second engine has every mismatch at once."""
  broken = fleet.Engine(
    precision=precision.Precision(
      weights='bfloat16', activations='bfloat16', kv='float8_e4m3fn', logits='bfloat16'
    ),
    reduction=reduction.Reduction(permute=True, attention_block=64),
    staleness=staleness.Staleness(steps=1),
    decoding=decoding.Decoding(top_k=50, top_p=0.9, reported='raw'),
    heavy_tail=heavy_tail.HeavyTail(scale=1.0, spikes=0.01, outliers=0.1),
    reporting=reporting.Reporting(dtype='bfloat16', missing=0.01),
  )
  mixed = fleet.Fleet(broken=broken, broken_samples=2)
  prompts = of((ROWS // SAMPLES, PROMPT), DATA, dtype=jnp.int32)
  start = of((ROWS // SAMPLES,), DATA, dtype=jnp.int32)
  params, key, strength = _params(SMALL), _key(), of(())
  sizes = dict(samples=SAMPLES, length=RESPONSE_DRAWN, eos=1, pad=0, store='topk')

  def generate(params, history, prompts, start, key, strength, version):
    at = dict(history=history, strength=strength, version=version)
    return fleet.generate(mixed, params, SMALL, prompts, start, key, **sizes, **at)

  weights = lambda params, history, key, s: fleet.engine_weights(
    broken, params, SMALL, key, history=history, strength=s
  )
  heads = lambda params, history, key, s: fleet.heads(
    mixed, params, SMALL, key, samples=SAMPLES, history=history, strength=s
  )
  version = of((), dtype=jnp.int32)
  hooks = ('decoding.hooks', 'heavy_tail.hooks', 'precision.hooks', 'precision.attention')
  also = ('fleet.hooks', 'fleet.served_attention', 'reduction.attention', 'routing.hooks', *hooks)
  jitter = routing.Routing(jitter=0.1, flips=(0.1,), capacity=1.5, dtype='bfloat16')
  unsteady = fleet.Fleet(engine=fleet.Engine(routing=jitter))

  def routed(params, prompts, start, key, version):
    return fleet.generate(
      unsteady, params, SMALL_MOE, prompts, start, key, version=version, **sizes
    )

  reported = of((ROWS, RESPONSE), DATA, dtype=jnp.int32)
  rollout = _rollout()
  logp = lambda rollout: (
    lambda p: sampling.policy_logp(p, SMALL, rollout, attention=attention.splash)
  )
  versions = lambda reported, current, version, history, rollout: staleness.of_version(
    logp(rollout), reported, current, version=version, history=history, ages=(0, 1)
  )
  replayed = lambda params, rollout: sampling.score(
    params, SMALL_MOE, rollout, hooks=routing.replay(rollout.routes), attention=attention.splash
  )[0]
  return [
    Case(
      'mismatch.fleet.generate',
      generate,
      (params, history, prompts, start, key, strength, version),
      also=tuple(f'mismatch.{name}' for name in also),
    ),
    Case(
      'mismatch.fleet.generate, MoE',
      routed,
      (_params(SMALL_MOE), prompts, start, key, version),
      also=('mismatch.routing.hook',),
    ),
    Case('mismatch.fleet.engine_weights', weights, (params, history, key, strength)),
    Case('mismatch.fleet.heads', heads, (params, history, key, strength)),
    Case(
      'mismatch.staleness.of_version',
      versions,
      (reported, _per_token(), version, history, rollout),
      positions=_positions(),
    ),
    Case('mismatch.routing.replay', replayed, (_params(SMALL_MOE), _rollout(config=SMALL_MOE))),
  ]


def _tasks() -> list[Case]:
  """Rewards and demonstrations, computed where the rollouts are."""
  prompts, start = of((ROWS, 16), DATA, dtype=jnp.int32), _per_row(dtype=jnp.int32)
  tokens, valid = of((ROWS, 32), DATA, dtype=jnp.int32), of((ROWS, 32), DATA, dtype=bool)
  show = lambda task: lambda key, prompts, start: task.demonstrate(key, prompts, start, 32)
  return [
    case
    for task in (addition, chain_sum, moves, sorting)
    for case in (
      _whole(task.reward, prompts, start, tokens, valid),
      Case(_name(task.demonstrate), show(task), (_key(), prompts, start)),
    )
  ]


def step_sizes() -> abstract_step.Sizes:
  """Of the whole steps: two rows a device of `data`."""
  return abstract_step.Sizes(
    rows=2 * jax.sharding.get_mesh().shape[DATA],
    samples=2,
    sequence=STEP_SEQUENCE,
    prompt=STEP_PROMPT,
    vocab=VOCAB,
    store='hidden',
  )


def _steps() -> list[Case]:
  """Whole train and decode steps."""
  sizes, found = step_sizes(), []
  lengths = (STEP_SEQUENCE, STEP_SEQUENCE - STEP_PROMPT + 1)
  positions = frozenset(n * rows for n in lengths for rows in (1, 2, sizes.rows))
  parts = ('update', 'gradients', 'apply_gradient', 'summarise', 'split', 'merge')
  for name, config in STEPS.items():
    train, decode = abstract_step.train(config, sizes), abstract_step.decode(config, sizes)
    also = tuple(f'update.{part}' for part in parts)
    found += [
      Case(f'train step, {name}', *train[:2], also, train.donated, positions, config.layers),
      Case(f'decode step, {name}', *decode[:2], (), decode.donated, positions, config.layers),
    ]
  return found
