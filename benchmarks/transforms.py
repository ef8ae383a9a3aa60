"""Every public transform of arrays as a program of shapes: what `benchmarks.tpu_transforms` compiles.

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

# Policies and sizes of the whole steps, and of the cases with a small policy.
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
SMALL = dataclasses.replace(DENSE, layers=2)
SMALL_MOE = dataclasses.replace(MOE, layers=2)


class Case(NamedTuple):
  """A program of shapes.

  Attributes:
    name: 'module.function', then after a comma which form of it.
    run, arguments: the function, and `jax.ShapeDtypeStruct`s with layouts.
    also: further public functions that the program is made of, as 'module.function'.
    donated: arguments whose memory the results may take.
    positions: sizes of axes that count positions; with `VOCAB` they tell arrays of scores. Empty
      where such arrays are arguments or results by their nature.
  """

  name: str
  run: Callable
  arguments: tuple
  also: tuple[str, ...] = ()
  donated: tuple[int, ...] = ()
  positions: frozenset[int] = frozenset()


def of(shape: tuple[int, ...], *axes: str | None, dtype: Any = jnp.float32):
  """An abstract array laid out over the current mesh."""
  layout = NamedSharding(jax.sharding.get_mesh(), P(*axes))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def split(fn: Callable, *arguments, out=P(DATA)) -> Callable:
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


def _by_rows(fn, *arguments, out=P(DATA), **settings) -> Case:
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

  def over(fn, *arguments, form='', grad=True, out=P(DATA), **settings):
    run = split(
      functools.partial(fn, **settings, axis_name=MODEL),
      *arguments,
      out=out,
    )
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
    *over(lambda_named(pair.compare, temperature=None), *two, tokens, grad=False),
    *over(lambda_named(pair.one, temperature=None), logits, tokens, grad=False),
    *over(vocab.maximum, mass, grad=False),
    *over(vocab.total, mass, grad=False),
    *over(vocab.pick, logits, tokens, grad=False),
    *over(vocab.held, logits, tokens, grad=False, out=P(DATA, MODEL)),
    *over(vocab.centred, mass, grad=False, out=(P(DATA, None, MODEL), P(DATA))),
    Case('brackets.top_k', sharding.over_rows(lambda x: brackets.top_k(x, TOP)), (flat,)),
    *over(brackets.bounds, logits, _top(), grad=False),
    _by_rows(brackets.decide, Bracket(_per_token(), _per_token()), limit=0.2),
    _by_rows(brackets.decide_rows, Bracket(_per_token(), _per_token()), _valid(), limit=0.2),
    Case('sampling.token_logp', sampling.token_logp, (logits, tokens, _valid())),
  ]


def lambda_named(fn, **settings):
  """`functools.partial` with the name of the function."""
  return functools.update_wrapper(functools.partial(fn, **settings), fn)
