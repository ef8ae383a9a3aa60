"""A public transform as a program of shapes, and the shapes that most of them take."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import table
from trm_jax import objectives, policy
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.planning import abstract_step
from trm_jax.rollouts import stores
from trm_jax.types import Divergences, Rollout, TopK

# No size is a multiple or a part of another: a shape tells what its axes are.
ROWS, SAMPLES, PROMPT, RESPONSE, VOCAB, WIDTH, TOP = 32, 4, 96, 416, 40_064, 1024, 64
BY_ROW = P(DATA)
FULL = table.Sizes(B=ROWS, T=RESPONSE, V=VOCAB, D=WIDTH, K=TOP)

# Policies of the whole steps; of one layer, which compiles fast, for all other cases.
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
SMALL = dataclasses.replace(DENSE, layers=1)
SMALL_MOE = dataclasses.replace(MOE, layers=1)


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


def both(name, run, *arguments, by=1, **more) -> list[Case]:
  """A function and its gradient."""
  return [
    Case(name, run, arguments, **more),
    Case(f'{name}, gradient', gradient(run, by), arguments, **more),
  ]


def of_table(row: table.Row, **more) -> list[Case]:
  """A row of the table at full size, and its gradient where it has one."""
  dtypes = dict(logits=jnp.bfloat16, hidden=jnp.bfloat16, head=jnp.bfloat16)
  dtypes |= dict(token=jnp.int32, ids=jnp.int32, valid=bool, keep=bool)

  def argument(array, spec):
    return of(array.shape(FULL), *spec, dtype=dtypes.get(array.holds, jnp.float32))

  is_array = lambda x: isinstance(x, table.Array)
  arguments = jax.tree.map(argument, row.takes, row.specs, is_leaf=is_array)
  run = row.run if row.whole else split(row.given(row.over), *arguments, out=row.out)
  if row.by:
    return both(row.name, run, *arguments, by=row.by, **more)
  return [Case(row.name, run, arguments, **more)]


name = table.name_of


def by_rows(fn, *arguments, out=BY_ROW, **settings) -> Case:
  run = functools.partial(fn, **settings) if settings else fn
  return Case(name(fn), split(run, *arguments, out=out), arguments)


def whole(fn, *arguments, **settings) -> Case:
  return Case(name(fn), functools.partial(fn, **settings) if settings else fn, arguments)


def positions() -> frozenset[int]:
  """Sizes of a response, of a device's rows of it, flat, and of all."""
  local = ROWS // jax.sharding.get_mesh().shape[DATA]
  return frozenset(RESPONSE * n for n in (1, local, ROWS))


def tokens():
  return of((ROWS, RESPONSE), DATA, dtype=jnp.int32)


def valid(rows=ROWS, *axes):
  return of((rows, RESPONSE), *(axes or (DATA,)), dtype=bool)


def per_token(*axes):
  return of((ROWS, RESPONSE), *(axes or (DATA,)))


def per_row(*axes, dtype=jnp.float32):
  return of((ROWS,), *(axes or (DATA,)), dtype=dtype)


def key():
  return abstract_step.laid_out(jax.eval_shape(lambda: jax.random.key(0)))


def keys(*shape):
  key = jax.eval_shape(lambda: jax.random.key(0))
  return of(shape, DATA, dtype=key.dtype)


def divergences(*axes):
  x = per_token(*axes)
  return Divergences(kl=x, tv=x, log_ratio=x, entropy=x, chi2=x, square=x)


def top():
  shape = (ROWS, RESPONSE, TOP)
  return TopK(of(shape, DATA, dtype=jnp.int32), of(shape, DATA), per_token())


def rollout(store: stores.Store = 'hidden', config=SMALL, width=None, response=RESPONSE) -> Rollout:
  """What a fleet of engines hands over, abstract."""
  shape = ROWS, response
  ids, real = of(shape, DATA, dtype=jnp.int32), of(shape, DATA)
  row = per_row(dtype=jnp.int32)
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
    reward=per_row(),
    **kept,
  )


def params(config):
  return abstract_step.state_of(config, VOCAB).params


def scored(*axes):
  x, row = per_token(*axes), functools.partial(per_row, *axes)
  return objectives.Scored(
    logp=x,
    rollout_logp=x,
    recomputed_logp=x,
    version_logp=x,
    divergences=divergences(*axes),
    usable=row(dtype=bool),
    valid=valid(ROWS, *axes),
    reward=row(),
    engine=row(dtype=jnp.int32),
  )
