"""Times loss and gradient of an output head with the exact divergences taken on the way.

  python -m benchmarks.linear_head [--sizes 2048x32768] [--dtypes float32] [--width 256]
                                   [--rounds 15] [--save FILE] [--markdown] [--no-resident]

The loss is sum(coefficient * log-prob) over tokens whose divergence passes a limit; its gradients
go to hidden states and head. The divergences are results as well, so no form can leave them out.

  naive     the policy's logits as a whole, two log_softmax, autodiff
  remat     the same, recomputed in chunks of 128 rows
  ours      `linear_head`, the rollout given in four ways; log-probs alone know no mask
  CE        cross entropy of the policy alone: log-probs, no rollout, no divergences, no mask
  gradient  distance (Frobenius, relative) to naive's gradient in float32, the larger of the two

The gradients are results and no temporaries; a second copy of the head's counts as temporary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from benchmarks import divergences, measure
from trm_jax.divergences import brackets, linear_head
from trm_jax.divergences.passes import blocks
from trm_jax.training import command
from trm_jax.types import InputError

NAIVE, REMAT = 'naive', 'remat, 128-row chunks'
STORED, ALONE = 'ours, rollout logits', 'ours, log-probs alone'
HEADS, TOP = 'ours, rollout hidden + head', 'ours, rollout top-64'
TOKAMAX, CE = 'tokamax chunked_xla CE', 'XLA CE'
IN_CHILD = NAIVE, STORED, ALONE
# Every token passes, in whatever form its divergence is computed: the gradients stay comparable.
LIMIT = 1.0
# From this vocabulary on, temporaries of a fixed size no longer count.
LARGE = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(measure.Command):
  """What is measured. Sizes are written NxV: positions x vocabulary."""

  width: int = 256
  """Of the hidden states."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(measure.Case):
  """A size, a dtype and the width of the hidden states."""

  width: int = 256

  def __str__(self):
    return f'{super().__str__()} D={self.width}'


class Inputs(NamedTuple):
  """Arguments of every form."""

  hidden: Array
  head: Array
  tokens: Array
  coefficient: Array
  rollout_logits: Array
  rollout_hidden: Array
  rollout_head: Array
  top: brackets.TopK


def inputs(case: Case) -> Inputs:
  """Logits of spread 3; the rollout's hidden states are 3 % off."""
  rng = np.random.default_rng(0)
  n, v, d = case.positions, case.vocabulary, case.width
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  cast = lambda x: jnp.asarray(x.astype(case.dtype))
  hidden = draw(n, d)
  rollout_hidden = cast(hidden + np.float32(0.03) * draw(n, d))
  head = cast(np.float32(3 / d**0.5) * draw(v, d))
  tokens = jnp.asarray(rng.integers(v, size=n), jnp.int32)

  @jax.jit
  def of_rollout(hidden, head):
    def block(hidden):
      logits = linear_head.project(hidden, head).astype(case.dtype)
      return logits, brackets.top_k(logits, min(64, v))

    return blocks.by_rows(block, hidden, rows=64)

  logits, top = of_rollout(rollout_hidden, head)
  coefficient = jnp.asarray(draw(n))
  copy = jnp.array(head, copy=True)
  return Inputs(cast(hidden), head, tokens, coefficient, logits, rollout_hidden, copy, top)


def naive(hidden, head, tokens, rollout_logits):
  """(log-prob, KL, the other outputs) from the logits as a whole."""
  logits = linear_head.project(hidden, head)
  kl, tv, entropy, logp, rollout_logp = divergences.naive(logits, rollout_logits, tokens)
  return logp, kl, (tv, entropy, rollout_logp)


def _of(found):
  return found.policy_logp, found.kl, (found.tv, found.entropy, found.rollout_logp)


def use_naive(x: Inputs, hidden, head):
  return naive(hidden, head, x.tokens, x.rollout_logits)


def use_remat(x: Inputs, hidden, head):
  block = jax.checkpoint(lambda *xs: naive(xs[0], head, *xs[1:]))
  return blocks.by_rows(block, hidden, x.tokens, x.rollout_logits, rows=128)


def use_stored(x: Inputs, hidden, head):
  return _of(linear_head.statistics(hidden, head, x.tokens, rollout_logits=x.rollout_logits))


def use_heads(x: Inputs, hidden, head):
  rollout = dict(rollout_hidden=x.rollout_hidden, rollout_head=x.rollout_head)
  return _of(linear_head.statistics(hidden, head, x.tokens, **rollout))


def use_top(x: Inputs, hidden, head):
  kl, tv, logp, entropy = linear_head.brackets(hidden, head, x.tokens, x.top)
  return logp, kl.lower, (kl.upper, tv, entropy)


def use_alone(x: Inputs, hidden, head):
  logp, entropy = linear_head.logp(hidden, head, x.tokens)
  return logp, None, (entropy,)


def use_cross_entropy(x: Inputs, hidden, head):
  logits = linear_head.project(hidden, head)
  return -optax.losses.softmax_cross_entropy_with_integer_labels(logits, x.tokens), None, ()


def gradient(use, hidden, head, x: Inputs):
  """((loss, divergences), gradients to hidden and head) of one form."""

  def loss(hidden, head):
    logp, kl, others = use(x, hidden, head)
    weight = x.coefficient
    if kl is not None:
      kl = jax.lax.stop_gradient(kl)
      weight = jnp.where(kl <= LIMIT, weight, 0)
    return (weight * logp).sum(), jax.lax.stop_gradient((kl, others))

  return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)


def _prepare(use, inputs):
  return measure.compiled(functools.partial(gradient, use))((inputs.hidden, inputs.head, inputs))


def prepare_tokamax(inputs):
  """Its head is [D, V]: it gets one in that layout."""
  import tokamax

  def use(x, hidden, head):
    loss = tokamax.linear_softmax_cross_entropy_loss(
      hidden, x.tokens, head, reduction='none', implementation='chunked_xla'
    )
    return -loss, None, ()

  run = functools.partial(gradient, use)
  return measure.compiled(run)((inputs.hidden, jnp.array(inputs.head.T), inputs))


def forms(case: Case) -> list[measure.Form]:
  """Every form, the policy's own cross entropies last."""
  del case
  form = lambda name, use, **more: measure.Form(name, functools.partial(_prepare, use), **more)
  return [
    form(NAIVE, use_naive),
    form(REMAT, use_remat, every=5),
    form(STORED, use_stored),
    form(HEADS, use_heads, every=5),
    form(TOP, use_top, every=5),
    form(ALONE, use_alone),
    form(CE, use_cross_entropy, every=5),
    measure.peer(TOKAMAX, 'tokamax', prepare_tokamax),
  ]


def judge(case: Case, inputs: Inputs):
  """The distance of a form's gradients from those of the naive form in float32."""
  del case
  wide = jax.tree.map(
    lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs
  )
  reference = [np.asarray(x) for x in _prepare(use_naive, wide).call()[1]]

  def distance(output) -> float:
    to_hidden, to_head = (np.asarray(x, np.float32) for x in output[1])
    if to_head.shape != reference[1].shape:
      to_head = to_head.T
    pairs = zip((to_hidden, to_head), reference, strict=True)
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)

  return distance


def goals(measured: measure.Measured, distance: dict[str, float]) -> list[measure.Goal]:
  """Of the form with stored rollout logits."""
  time = measured.time_goal
  # bfloat16 products round what they multiply.
  limit = 1e-6 if measured.case.dtype == 'float32' else 2**-8
  found = [
    time('ours against naive', STORED, NAIVE, 1.0),
    time('ours against itself without divergences', STORED, ALONE, 1.2),
    time('ours against tokamax, which has no divergences', STORED, TOKAMAX, 1.2),
    measure.Goal("distance to naive's float32 gradient", distance[STORED], limit),
  ]
  if measured.case.vocabulary >= LARGE:
    share = measured.share(STORED, NAIVE)
    found.append(measure.Goal("ours against naive's temporaries", share, 0.05, True))
  return found


def main(options: Command) -> None:
  """Prints a table and the goals of every case."""
  if options.width < 1:
    raise InputError(f'width={options.width} must be at least 1.')
  records, bases = [], (NAIVE, ALONE)
  case_of = functools.partial(Case, width=options.width)
  for measured, distance in measure.run(options, inputs, forms, IN_CHILD, judge, case_of):
    found, rows = goals(measured, distance), []
    for form in forms(measured.case):
      error = f'{distance[form.name]:.1e}' if form.name in distance else ''
      rows.append([*measure.row(measured, form.name, bases, NAIVE), error])
    head = [*measure.header(bases, NAIVE), 'gradient']
    measure.show(measured, rows, head, found, options.markdown)
    records.append(measure.record(measured, found, gradient=distance))
    measure.save(options.save, records)


if __name__ == '__main__':
  command.run(Command, main)
