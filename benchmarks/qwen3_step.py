"""One training step of a published Qwen3 model: what it holds in memory, and how long it takes.

  python -m benchmarks.qwen3_step [--model Qwen3-0.6B] [--rows 1] [--length 512] [--run]

The step is score -> exact divergences from the rollout's hidden states and head -> trust region ->
surrogate -> gradient -> Adam, with random weights: layers are scanned and recomputed, attention
goes by blocks, and scores over the vocabulary exist in chunks only. Without --run it is compiled
for abstract arrays, so a model larger than this machine can be asked about. `arguments` are
parameters, Adam's moments and the batch; they are donated, so results take their place.
"""

import dataclasses
import functools
import json
import pathlib
import re
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trm_jax import masks, policy
from trm_jax.divergences import linear_head
from trm_jax.objectives import surrogates
from trm_jax.policy import attention, qwen3
from trm_jax.rollouts import scoring
from trm_jax.training import command
from trm_jax.types import InputError, Rollout

GIB = 2**30
OPTIMIZER = optax.adam(1e-6)
PROMPT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What is compiled, and whether it runs."""

  model: str = 'Qwen3-0.6B'
  """A name of `trm_jax.policy.qwen3`."""
  rows: int = 1
  length: int = 512
  """Response tokens of a row; its prompt has 16."""
  dtype: str = 'float32'
  """Compute dtype of the layers; parameters, moments and statistics are float32."""
  run: bool = False
  """Also allocate the model and take two steps."""
  save: pathlib.Path | None = None
  """JSON file for the figures."""


def configure(model: qwen3.Model, dtype: str = 'float32') -> policy.PolicyConfig:
  """The model's architecture with what its training needs."""
  return dataclasses.replace(model.policy, dtype=dtype, remat=True)


def step(params, moments, batch: Rollout, rollout_head, advantages, *, config, limit=0.2):
  """(new parameters, new moments, what the step saw) from one rollout with stored hidden states."""

  def loss(params):
    hidden, _ = scoring.score(params, config, batch, attention=attention.blockwise)
    statistics = linear_head.statistics(
      hidden,
      policy.head(params),
      batch.tokens,
      rollout_hidden=batch.hidden,
      rollout_head=rollout_head,
    )
    found = statistics.divergences(batch.logp)
    keep = masks.max_kl(limit=limit)(found, batch.valid)
    per_token = surrogates.ratio_pg(statistics.policy_logp, batch.logp, advantages, batch.valid)
    value = -surrogates.aggregate(per_token, batch.valid, keep).value
    return value, {'max_kl': masks.max_over_tokens(found.kl, batch.valid), 'keep': keep}

  (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(params)
  updates, moments = OPTIMIZER.update(gradient, moments, params)
  seen |= {'loss': value, 'grad_norm': optax.global_norm(gradient)}
  return optax.apply_updates(params, updates), moments, seen


def inputs(config: policy.PolicyConfig, vocab_size: int, rows: int, length: int) -> tuple[Any, ...]:
  """Shapes of everything that `step` takes."""
  array = jax.ShapeDtypeStruct
  params = policy.shapes(config, vocab_size)
  of = lambda dtype, *shape: array((rows, *shape), dtype)
  batch = Rollout(
    prompts=of(jnp.int32, PROMPT),
    start=of(jnp.int32),
    tokens=of(jnp.int32, length),
    valid=of(bool, length),
    logits=None,
    hidden=of(jnp.float32, length, config.width),
    logp=of(jnp.float32, length),
    routes=None,
    version=of(jnp.int32, length),
    engine=of(jnp.int32),
    reward=of(jnp.float32),
  )
  head = array((vocab_size, config.width), jnp.float32)
  return params, jax.eval_shape(OPTIMIZER.init, params), batch, head, of(jnp.float32)


def compiled(config: policy.PolicyConfig, vocab_size: int, rows: int, length: int):
  """The step's program, for abstract arrays: nothing is allocated."""
  fn = jax.jit(functools.partial(step, config=config), donate_argnums=(0, 1))
  return fn.lower(*inputs(config, vocab_size, rows, length)).compile()


def scores(text: str, vocab_size: int, rows: int, length: int) -> set[str]:
  """Arrays in a program's text that hold a score of every token at every position."""
  positions = length, length + PROMPT - 1  # of the response, of the whole row
  whole = [[rows, n, vocab_size] for n in positions] + [[rows * n, vocab_size] for n in positions]
  whole = [sorted(s for s in shape if s > 1) for shape in whole]
  shapes = set(re.findall(r'\w+\[([\d,]+)\]', text))
  return {s for s in shapes if sorted(n for n in map(int, s.split(',')) if n > 1) in whole}


def draw(config: policy.PolicyConfig, vocab_size: int, rows: int, length: int) -> tuple[Any, ...]:
  """Arrays for `step`: a policy near its rollout, every token valid."""
  params = jax.jit(lambda key: policy.init(key, config, vocab_size))(jax.random.key(0))
  if config.tied_head:  # scores of the size that trained weights give
    params['embed'] *= config.width**-0.5
  key = jax.random.key(1)
  batch = Rollout(
    prompts=jax.random.randint(key, (rows, PROMPT), 0, vocab_size),
    start=jnp.zeros(rows, jnp.int32),
    tokens=jax.random.randint(jax.random.key(2), (rows, length), 0, vocab_size),
    valid=jnp.ones((rows, length), bool),
    logits=None,
    hidden=jnp.zeros((rows, length, config.width)),
    logp=jnp.zeros((rows, length)),
    routes=None,
    version=jnp.zeros((rows, length), jnp.int32),
    engine=jnp.zeros(rows, jnp.int32),
    reward=jnp.zeros(rows),
  )
  score = lambda p: scoring.score(p, config, batch, attention=attention.blockwise)[0]
  hidden = jax.jit(score)(params)
  head = policy.head(params) + 0  # a copy: the parameters are donated
  logp = jax.jit(linear_head.logp)(hidden, head, batch.tokens)[0]
  batch = dataclasses.replace(batch, hidden=hidden, logp=logp)
  advantages = jnp.where(jnp.arange(rows) % 2 == 0, 1.0, -1.0)
  return params, jax.jit(OPTIMIZER.init)(params), batch, head, advantages


def measure(options: Command) -> dict[str, Any]:
  """Figures of the step. Raises InputError for an unknown model or sizes that hide the answer."""
  models = {model.name: model for model in qwen3.MODELS}
  if options.model not in models:
    raise InputError(f'model={options.model!r} is not one of {", ".join(models)}.')
  for name, least in (('rows', 1), ('length', 2)):
    if getattr(options, name) < least:
      raise InputError(f'{name}={getattr(options, name)} must be at least {least}.')
  if options.save is not None and not options.save.absolute().parent.is_dir():
    raise InputError(f'save={options.save} lies in no folder that exists; make it first.')
  model = models[options.model]
  config = configure(model, options.dtype)
  sizes = (model.vocab_size, options.rows, options.length)
  if config.width in [options.rows * n for n in (options.length, options.length + PROMPT - 1)]:
    raise InputError(
      f'rows={options.rows} times length={options.length} equals the width of {model.name}, so that'
      ' scores could not be told from the head; choose another length.'
    )
  start = time.perf_counter()
  program = compiled(config, *sizes)
  memory = program.memory_analysis()
  found = {
    'model': model.name,
    'rows': options.rows,
    'length': options.length,
    'dtype': options.dtype,
    'parameters': model.parameters,
    'arguments_gib': memory.argument_size_in_bytes / GIB,
    'temporaries_gib': memory.temp_size_in_bytes / GIB,
    'scores': sorted(scores(program.as_text(), *sizes)),
    'scores_would_take_gib': 4 * options.rows * options.length * model.vocab_size / GIB,
    'compile_s': time.perf_counter() - start,
  }
  if options.run:
    found |= _timed(program, draw(config, *sizes))
  return found


def _timed(program, arrays):
  params, moments, *rest = arrays
  seconds, seen = [], []
  for _ in range(2):
    start = time.perf_counter()
    params, moments, now = jax.block_until_ready(program(params, moments, *rest))
    seconds.append(time.perf_counter() - start)
    seen.append({k: jax.device_get(v).tolist() for k, v in now.items()})
  # Kilobytes on Linux.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return {'step_s': seconds, 'seen': seen, 'resident_gib': peak}


def main(options: Command) -> None:
  """Prints the figures, and saves them where asked."""
  found = measure(options)
  for name, value in found.items():
    print(f'{name:22} {value:.2f}' if isinstance(value, float) else f'{name:22} {value}')
  if options.save is not None:
    options.save.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  command.run(Command, main)
