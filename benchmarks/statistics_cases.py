"""Divergences, masks, objectives and the judgement of a batch, for `benchmarks.transforms`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks import cases as c
from benchmarks import table
from benchmarks.cases import BY_ROW, RESPONSE, ROWS, SAMPLES, TOP, VOCAB, WIDTH, Case, of, split
from trm_jax import masks, objectives
from trm_jax.divergences import brackets, linear_head
from trm_jax.divergences.passes import kernels, pair, vocabulary
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.rollouts import scoring
from trm_jax.training import judgement
from trm_jax.training.words import MethodWords


def _scores() -> list[Case]:
  """Steps of what the table compares, vocabulary split over `model`."""
  logits = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL, dtype=jnp.bfloat16)
  tokens, flat = c.tokens(), of((ROWS, VOCAB), DATA)
  mass = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL)

  def over(fn, *arguments, out=BY_ROW, **settings):
    run = split(functools.partial(fn, **settings, axis_name=MODEL), *arguments, out=out)
    return Case(c.name(fn), run, arguments)

  top_k = sharding.over_rows(lambda x: brackets.top_k(x, TOP))
  return [
    over(pair.compare, logits, logits, tokens, temperature=None),
    over(pair.one, logits, tokens, temperature=None),
    over(vocabulary.maximum, mass),
    over(vocabulary.total, mass),
    over(vocabulary.pick, logits, tokens),
    over(vocabulary.held, logits, tokens, out=P(DATA, MODEL)),
    over(vocabulary.place, tokens, size=VOCAB // 2, out=P(DATA, MODEL)),
    over(vocabulary.log_probs, mass, out=P(DATA, None, MODEL)),
    Case(c.name(brackets.top_k), top_k, (flat,)),
    Case(c.name(scoring.token_logp), scoring.token_logp, (logits, tokens, c.valid())),
  ]


def _heads() -> list[Case]:
  """From hidden states and output heads: no array of scores is allowed in HBM."""
  hidden = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  project = split(linear_head.project, hidden, head, out=P(DATA, None, MODEL))
  found = [Case(c.name(linear_head.project), project, (hidden, head))]
  for row in table.heads():
    given = table.ROLLOUT in row.takes
    found += c.of_table(row, positions=frozenset() if given else c.positions())
  return found


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
    c.name(fn),
    jax.shard_map(
      fn, in_specs=jax.tree.map(lambda x: x.sharding.spec, arguments), out_specs=P(DATA)
    ),
    arguments,
  )
  free = lambda case: case._replace(positions=c.positions())
  return [
    local(kernels.sums, logits),
    local(kernels.fused, logits, logits),
    local(kernels.terms_given, logits, logits, *given),
    free(local(kernels.linear_sums, hidden, head)),
    free(local(kernels.linear_terms, hidden, head, (hidden, head), *given)),
    free(local(kernels.linear_fused, hidden, head, (hidden, head), x)),
  ]


def _controls() -> list[Case]:
  """Random masks of the same size, and a limit that follows a share."""
  rows, key = c.per_row(dtype=bool), c.key()
  lengths = c.per_row(dtype=jnp.int32)

  def dealt(fn, keep, form, *rest):
    run = lambda keep, key, *rest: fn(
      keep, key, axis_name=DATA, **dict(zip(('usable', 'lengths'), rest, strict=False))
    )
    arguments = keep, key, *rest
    return Case(c.name(fn) + form, split(run, *arguments), arguments)

  return [
    dealt(masks.permuted, rows, ''),
    dealt(masks.permuted, rows, ', by length', rows, lengths),
    dealt(masks.permuted_prefixes, c.valid(), '', rows),
    c.whole(masks.follow, of(()), of((ROWS,)), target=0.8),
  ]


def _objectives() -> list[Case]:
  """Methods, and the whole judgement of a batch."""
  x, valid, reward, keep = c.per_token(), c.valid(), c.per_row(), c.per_row(dtype=bool)
  scored, key, limit = c.scored(), c.key(), of(())
  trm = MethodWords(max_kl=0.2, mean_kl=0.01).make()
  cut = MethodWords(max_kl=0.2, scope='prefix').make()
  drawn = MethodWords(max_kl=0.2, random_mask=True, match_length=True).make()

  def of_method(of, fn, *arguments, form='', out=BY_ROW, grad=False, also=()):
    run = split(fn, *arguments, out=out)
    name = c.name(of) + (f', {form}' if form else '')
    return c.both(name, run, *arguments, also=also) if grad else [Case(name, run, arguments)]

  kept = lambda settings: (
    lambda s, limit, key: objectives.keep(settings, s, limit=limit, key=key, axis_name=DATA)
  )

  def loss(method):
    def run(logp, s, limit, key):
      s = dataclasses.replace(s, logp=logp)
      mean, kept, _ = objectives.objective(
        method, s, samples=SAMPLES, limit=limit, key=key, axis_name=DATA
      )
      return mean.over(DATA).value, kept

    return run

  def published(name):
    run, at = loss(objectives.METHODS[name].make()), (x, scored, limit, key)
    return of_method(objectives.objective, run, *at, form=name, out=(P(), P(DATA)), grad=True)

  def of_segments(logp, s, limit, key, ids):
    return loss(trm)(logp, dataclasses.replace(s, groups=ids, trajectory=ids), limit, key)

  ids, of_segment = c.per_row(dtype=jnp.int32), ('first_rows', 'together', 'valid_together')
  also = tuple(f'objectives.segments.{step}' for step in (*of_segment, 'joined', 'apart'))
  token = lambda logp, s, a: objectives.per_token(trm, dataclasses.replace(s, logp=logp), a)
  penalty = lambda *args: objectives.penalty(trm, *args).over(DATA).value
  return [
    *of_method(objectives.keep, kept(trm), scored, limit, key),
    *of_method(objectives.keep, kept(cut), scored, limit, key, form='prefixes'),
    *of_method(objectives.keep, kept(drawn), scored, limit, key, form='random mask'),
    *of_method(
      objectives.bounded,
      lambda s, lower, limit: objectives.bounded(trm, s, lower, limit=limit),
      scored,
      c.divergences(),
      limit,
    ),
    *of_method(objectives.per_token, token, x, scored, reward, grad=True),
    *of_method(
      objectives.objective, loss(trm), x, scored, limit, key, out=(P(), P(DATA)), grad=True
    ),
    *of_method(
      objectives.objective,
      of_segments,
      *(x, scored, limit, key, ids),
      form='segments',
      out=(P(), P(DATA)),
      grad=True,
      also=also,
    ),
    *(case for name in objectives.METHODS for case in published(name)),
    *of_method(objectives.penalty, penalty, x, valid, keep, out=P(), grad=True),
    *_judged(),
  ]


def _judged() -> list[Case]:
  hidden = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  chosen = MethodWords(max_kl=0.2, kl_coefficient=0.1).make()
  judge = judgement.over_mesh(methods=(chosen,), samples=SAMPLES, temperature=1.0)
  batch = judgement.Batch(
    c.rollout('hidden', width=WIDTH),
    reference_hidden=hidden,
    heads=judgement.Heads((head,), head),
  )
  run = lambda *args: [mean.value for mean in judge(*args)[0]]
  arguments = hidden, head, batch, of(()), c.key(), of((), dtype=jnp.int32)
  also = (c.name(judgement.over_mesh),)
  return c.both(c.name(judgement.judge), run, *arguments, by=2, also=also, positions=c.positions())


def cases() -> list[Case]:
  rows = [*table.scores(), *table.regions(), *table.objectives()]
  of_table = [case for row in rows for case in c.of_table(row)]
  return [*of_table, *_scores(), *_heads(), *_kernels(), *_controls(), *_objectives()]
