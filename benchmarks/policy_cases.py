"""Layers, policies, rollouts, tasks and whole steps, for `benchmarks.transforms`."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks import cases as c
from benchmarks.cases import (
  DENSE,
  MOE,
  PROMPT,
  RESPONSE,
  ROWS,
  SAMPLES,
  SMALL,
  SMALL_MOE,
  TOP,
  VOCAB,
  WIDTH,
  Case,
  of,
)
from trm_jax import policy
from trm_jax.measurements import distributions, metrics
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.planning import abstract_step
from trm_jax.policy import attention, experts, rotary
from trm_jax.policy.hooks import Hooks
from trm_jax.rollouts import groups, relay, sampling, scoring, stores, streams
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record
from trm_jax.tasks import addition, chain_sum, moves, sorting
from trm_jax.training import update
from trm_jax.training.words import MethodWords

STEPS = {'dense': DENSE, 'MoE': MOE}
STEP_SEQUENCE, STEP_PROMPT = 1536, 384
RESPONSE_DRAWN = 32  # by `sampling.generate`: its loop is compiled once, however long


def _layers() -> list[Case]:
  """Attention, rotation and experts in bfloat16, heads and experts over `model`."""
  length, wide = PROMPT + RESPONSE, SMALL.head_width
  heads = lambda n: of((ROWS, length, n, wide), DATA, None, MODEL, dtype=jnp.bfloat16)
  q, k = heads(SMALL.heads), heads(SMALL.kv_heads)
  start = c.per_row(dtype=jnp.int32)

  def attend(fn):
    run = lambda q, k, v, start: fn(q, k, v, slots=jnp.arange(length), start=start)
    return c.both(c.name(fn), run, q, k, k, start, by=3)

  e, d, f, chosen = MOE.experts, WIDTH, MOE.mlp_width, MOE.experts_per_token
  scores = of((ROWS, length, e), DATA)
  x = of((ROWS, length, d), DATA, dtype=jnp.bfloat16)
  routes = of((ROWS, length, chosen), DATA, dtype=jnp.int32)
  gates = of((ROWS, length, chosen), DATA)
  matrix = lambda *shape: of(shape, MODEL, dtype=jnp.bfloat16)
  matrices = matrix(e, d, f), matrix(e, d, f), matrix(e, f, d)

  def compute(fn):
    run = lambda x, gates, gate, up, down, routes: fn(x, routes, gates, gate, up, down)
    return c.both(c.name(fn), run, x, gates, *matrices, routes, by=5)

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
    Case('policy.rotary.rotate', functools.partial(rotary.rotate, base=1e6), (q, positions)),
    *c.both('policy.experts.route', route, scores),
    *compute(experts.dense),
    *compute(experts.ragged),
    *c.both('policy.experts.load_balance', experts.load_balance, balance, choices, real),
  ]


def _policies() -> list[Case]:
  """A small policy's passes, parameters over both axes."""
  params, length = c.params(SMALL), PROMPT + RESPONSE
  tokens, start = of((ROWS, length), DATA, dtype=jnp.int32), c.per_row(dtype=jnp.int32)
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
  keys, row_keys = c.keys(ROWS), lambda key: streams.row_keys(key, ROWS // SAMPLES, SAMPLES)
  return [
    Case('policy.decoder.init', lambda key: policy.init(key, SMALL, VOCAB), (c.key(),)),
    Case('policy.decoder.init_cache', lambda: policy.init_cache(SMALL, ROWS, length), ()),
    *c.both('policy.decoder.apply', apply, params, tokens, start),
    *c.both('policy.decoder.logits', policy.logits, params, one, also=('policy.decoder.head',)),
    Case('rollouts.relay.at', relay.at, (relayed, turn)),
    Case('rollouts.relay.apply', passed, (relayed, tokens, start)),
    Case('rollouts.relay.logits', relay.logits, (relayed, some)),
    Case('rollouts.streams.row_keys', row_keys, (c.key(),), also=('rollouts.streams.fold',)),
    c.whole(streams.noise_keys, keys, first_slot=0, count=RESPONSE),
    c.whole(streams.token_keys, keys, length=RESPONSE, stream=1),
  ]


def _drawn(fn, *arguments, store='hidden', **more):
  """`sampling.generate` or that of a fleet, as one program."""
  request = Request(samples=SAMPLES, length=RESPONSE_DRAWN, eos=1, pad=0)
  asked = request, Record(store=store)
  return lambda *arrays: fn(*arguments, *arrays[:1], SMALL, *arrays[1:], *asked, **more)


def _rollouts() -> list[Case]:
  params, key = c.params(SMALL), c.key()
  prompts = of((ROWS // SAMPLES, PROMPT), DATA, dtype=jnp.int32)
  start = of((ROWS // SAMPLES,), DATA, dtype=jnp.int32)
  rollout = c.rollout()
  score = lambda params, rollout: scoring.score(params, SMALL, rollout, attention=attention.splash)[
    0
  ]
  again = dict(samples=SAMPLES, attention=attention.splash)
  logp = lambda params, rollout: scoring.policy_logp(
    params, SMALL, rollout, attention=attention.splash
  )
  free = dict(positions=c.positions())
  drawn = [
    Case(
      f'rollouts.sampling.generate, {store}',
      _drawn(sampling.generate, store=store),
      (params, prompts, start, key),
    )
    for store in stores.STORES
  ]
  moe = c.params(SMALL_MOE), prompts, start, key
  asked = Request(samples=SAMPLES, length=RESPONSE_DRAWN, eos=1, pad=0), Record(store='topk')
  of_moe = lambda params, *rest: sampling.generate(params, SMALL_MOE, *rest, *asked)
  return [
    Case('rollouts.groups.repeat', lambda x: groups.repeat(x, SAMPLES), (prompts,)),
    *drawn,
    Case('rollouts.sampling.generate, MoE', of_moe, moe),
    *c.both('rollouts.scoring.score', score, params, rollout),
    Case(
      'rollouts.scoring.rescore',
      lambda params, rollout, key: scoring.rescore(params, SMALL, rollout, key, **again)[0],
      (params, rollout, key),
    ),
    Case(
      'rollouts.scoring.replay',
      lambda params, rollout, key: scoring.replay(params, SMALL, rollout, key, **again),
      (params, c.rollout('topk'), key),
      **free,
    ),
    *c.both('rollouts.scoring.policy_logp', logp, params, rollout, **free),
  ]


def _stores() -> list[Case]:
  scores, hidden = of((ROWS, VOCAB), DATA), of((ROWS, WIDTH), DATA, dtype=jnp.bfloat16)
  states = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  sizes = dict(vocab=VOCAB, width=WIDTH, top=TOP)
  found = [
    Case('rollouts.stores.blank', lambda x: stores.blank('topk', x, **sizes), (c.tokens(),)),
    Case(
      'rollouts.stores.record',
      lambda scores, hidden: stores.record('topk', scores, hidden, temperature=1.0, top=TOP),
      (scores, hidden),
    ),
    Case(
      'rollouts.groups.side_by_side',
      lambda x: groups.side_by_side(groups.apart(x, (3, 1)), ROWS // SAMPLES),
      (c.tokens(),),
      also=('rollouts.groups.apart',),
    ),
  ]
  for store in stores.STORES:
    rollout = c.rollout(store, width=WIDTH)
    engines = (head,) if store == 'hidden' else ()
    specs = jax.tree.map(lambda x: x.sharding.spec, (states, head, rollout, engines))

    def compare(states, head, rollout, heads):
      found = stores.compare(states, head, rollout, heads=heads, shares=(SAMPLES,), axis_name=MODEL)
      return found.logp, found.divergences

    run = sharding.over_mesh(compare, in_specs=specs, out_specs=P(DATA))
    positions = frozenset() if store == 'logits' else c.positions()
    arguments = states, head, rollout, engines
    found.append(Case(f'rollouts.stores.compare, {store}', run, arguments, positions=positions))
  return found


def _reports() -> list[Case]:
  """Scalars of a step, from whole arrays."""
  valid, keep = c.valid(ROWS, None), c.per_row(None, dtype=bool)
  lengths, ids = c.per_row(None, dtype=jnp.int32), of((ROWS, RESPONSE), dtype=jnp.int32)
  rollout = c.rollout(config=SMALL_MOE)
  flips = lambda rollout: metrics.route_flips(rollout, rollout.routes)
  summarise = lambda scored, keep, missing: metrics.summarise(
    scored, keep, missing, samples=SAMPLES, fresh=ROWS
  )
  stacked = jax.tree.map(
    lambda x: of((1, *x.shape), None, *x.sharding.spec, dtype=x.dtype), c.scored()
  )
  settings = update.Settings(
    methods=(MethodWords(max_kl=0.2, accept=0.8).make(),),
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
    c.whole(metrics.by_length_quartile, keep, lengths),
    c.whole(metrics.by_position_quartile, valid, valid),
    c.whole(distributions.quantiles, c.per_token(None), valid, of((3,))),
    Case('measurements.metrics.summarise', summarise, (c.scored(None), keep, valid)),
    c.whole(metrics.ages, ids, valid, of((), dtype=jnp.int32)),
    Case('measurements.metrics.route_flips', flips, (rollout,)),
    Case('training.update.follow_limit', follow, (of(()), stacked)),
  ]


def _tasks() -> list[Case]:
  """Rewards and demonstrations, computed where the rollouts are."""
  prompts, start = of((ROWS, 16), DATA, dtype=jnp.int32), c.per_row(dtype=jnp.int32)
  tokens, valid = of((ROWS, 32), DATA, dtype=jnp.int32), of((ROWS, 32), DATA, dtype=bool)
  show = lambda task: lambda key, prompts, start: task.demonstrate(key, prompts, start, 32)
  return [
    case
    for task in (addition, chain_sum, moves, sorting)
    for case in (
      c.whole(task.reward, prompts, start, tokens, valid),
      Case(c.name(task.demonstrate), show(task), (c.key(), prompts, start)),
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
    also = tuple(f'training.update.{part}' for part in parts)
    found += [
      Case(f'train step, {name}', *train[:2], also, train.donated, positions, config.layers),
      Case(f'decode step, {name}', *decode[:2], (), decode.donated, positions, config.layers),
    ]
  return found


def cases() -> list[Case]:
  return [*_layers(), *_policies(), *_rollouts(), *_stores(), *_reports(), *_tasks(), *_steps()]
