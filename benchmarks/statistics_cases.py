"""Divergences, masks, objectives and the judgement of a batch, for `benchmarks.transforms`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks import cases as c
from benchmarks.cases import BY_ROW, RESPONSE, ROWS, SAMPLES, TOP, VOCAB, WIDTH, Case, of, split
from trm_jax import (
  advantages,
  brackets,
  divergences,
  importance,
  judgement,
  kernels,
  linear_head,
  method,
  pair,
  sampling,
  sharding,
  surrogates,
  trust_region,
  vocab,
)
from trm_jax.sharding import DATA, MODEL
from trm_jax.types import Bracket


def _scores() -> list[Case]:
  """Of two arrays of scores, vocabulary split over `model`."""
  logits = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL, dtype=jnp.bfloat16)
  tokens, flat = c.tokens(), of((ROWS, VOCAB), DATA)
  mass = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL)
  two = logits, logits

  def over(fn, *arguments, form='', grad=True, out=BY_ROW, **settings):
    run = split(functools.partial(fn, **settings, axis_name=MODEL), *arguments, out=out)
    name = c.name(fn) + (f', {form}' if form else '')
    return c.both(name, run, *arguments) if grad else [Case(name, run, arguments)]

  in_nats = lambda fn: Case(c.name(fn), split(fn, c.per_token()), (c.per_token(),))
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
    *over(brackets.bounds, logits, c.top(), grad=False),
    c.by_rows(brackets.decide, Bracket(c.per_token(), c.per_token()), limit=0.2),
    c.by_rows(brackets.decide_rows, Bracket(c.per_token(), c.per_token()), c.valid(), limit=0.2),
    Case('sampling.token_logp', sampling.token_logp, (logits, tokens, c.valid())),
  ]


def _heads() -> list[Case]:
  """From hidden states and output heads: no array of scores is allowed in HBM."""
  hidden = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  logits = of((ROWS, RESPONSE, VOCAB), DATA, None, MODEL, dtype=jnp.bfloat16)
  tokens, free = c.tokens(), dict(positions=c.positions())
  at = dict(axis_name=MODEL)
  against = linear_head.statistics

  def over(name, fn, *rest, **more):
    arguments = hidden, head, *rest
    return c.both(f'linear_head.{name}', split(fn, *arguments), *arguments, by=2, **more)

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
    over('brackets', functools.partial(linear_head.brackets, **at), tokens, c.top(), **free)[0],
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


def _regions() -> list[Case]:
  """Criteria and masks, on each device's rows."""
  d, valid, x = c.divergences(), c.valid(), c.per_token()
  criterion = lambda name, **at: c.by_rows(getattr(trust_region, name), d, valid, **at)
  limited = (
    *('max_kl', 'mean_kl', 'max_tv', 'max_k2', 'mean_k3', 'mean_deviation', 'chi2_budget'),
    *('prefix_max_kl', 'prefix_max_tv', 'prefix_chi2_budget'),
  )
  weights = dict(epsilon=5e-3, delta=1e-4)
  both = trust_region.all_of(
    functools.partial(trust_region.max_kl, limit=0.2),
    functools.partial(trust_region.max_tv, limit=0.3),
  )
  rows, key = c.per_row(dtype=bool), c.key()
  lengths = c.per_row(dtype=jnp.int32)

  def dealt(fn, keep, form, *rest):
    run = lambda keep, key, *rest: fn(
      keep, key, axis_name=DATA, **dict(zip(('usable', 'lengths'), rest, strict=False))
    )
    arguments = keep, key, *rest
    return Case(c.name(fn) + form, split(run, *arguments), arguments)

  return [
    c.by_rows(trust_region.max_over_tokens, x, valid),
    c.by_rows(trust_region.mean_over_tokens, x, valid),
    c.by_rows(trust_region.sum_over_tokens, x, valid),
    c.by_rows(trust_region.deviation, x),
    c.by_rows(trust_region.future_deviation, x, valid, **weights),
    c.by_rows(trust_region.chi2_of, d),
    criterion('keep_all'),
    *(criterion(name, limit=0.2) for name in limited),
    criterion('length_neutral', limit=0.2, **weights),
    criterion('combined', max_limit=0.2, mean_limit=0.002),
    Case('trust_region.all_of', split(both, d, valid), (d, valid)),
    c.by_rows(trust_region.prefix, valid, valid),
    dealt(trust_region.permuted, rows, ''),
    dealt(trust_region.permuted, rows, ', by length', rows, lengths),
    dealt(trust_region.permuted_prefixes, valid, '', rows),
    c.whole(trust_region.follow, of(()), of((ROWS,)), target=0.8),
  ]


def _objectives() -> list[Case]:
  """Advantages, importance weights, surrogates, methods, and the whole judgement of a batch."""
  x, valid, reward, keep = c.per_token(), c.valid(), c.per_row(), c.per_row(dtype=bool)
  scored, key, limit = c.scored(), c.key(), of(())
  trm = method.Method(max_kl=0.2, mean_kl=0.01)
  cut = method.Method(max_kl=0.2, scope='prefix')
  drawn = method.Method(max_kl=0.2, random_mask=True, match_length=True)
  grouped = dict(group_size=SAMPLES)

  def of_method(name, fn, *arguments, out=BY_ROW, grad=False):
    run = split(fn, *arguments, out=out)
    name = f'method.{name}'
    return c.both(name, run, *arguments) if grad else [Case(name, run, arguments)]

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
  graded = lambda fn, *args: c.both(c.name(fn), split(fn, *args), *args)
  return [
    *(
      c.by_rows(fn, reward, keep, **grouped)
      for fn in (advantages.centred, advantages.group_relative, advantages.leave_one_out)
    ),
    c.by_rows(importance.ratio, x, valid),
    c.by_rows(importance.none, x, valid),
    c.by_rows(importance.truncated, x, valid),
    c.by_rows(importance.sequence_truncated, x, valid),
    c.by_rows(importance.resolve_missing, x, x, valid),
    c.whole(importance.effective_sample_size, c.per_token(None), c.valid(ROWS, None)),
    *graded(ratio, x, x, reward, valid),
    *graded(surrogates.ppo_clip, x, x, reward, valid),
    *graded(surrogates.decoupled, x, x, x, reward, valid),
    *c.both('surrogates.aggregate', split(aggregated, x, valid, keep, out=P()), x, valid, keep),
    *of_method('keep', kept(trm), scored, limit, key),
    *of_method('keep, prefixes', kept(cut), scored, limit, key),
    *of_method('keep, random mask', kept(drawn), scored, limit, key),
    *of_method(
      'bounded',
      lambda s, lower, limit: method.bounded(trm, s, lower, limit=limit),
      scored,
      c.divergences(),
      limit,
    ),
    *of_method('rows_kept', method.rows_kept, valid, valid),
    *of_method('per_token', token, x, scored, reward, grad=True),
    *of_method('objective', loss, x, scored, limit, key, out=(P(), P(DATA)), grad=True),
    *of_method('penalty', penalty, x, valid, keep, out=P(), grad=True),
    *_judged(),
  ]


def _judged() -> list[Case]:
  hidden = of((ROWS, RESPONSE, WIDTH), DATA, dtype=jnp.bfloat16)
  head = of((VOCAB, WIDTH), MODEL, dtype=jnp.bfloat16)
  chosen = method.Method(max_kl=0.2, kl_coefficient=0.1)
  judge = judgement.over_mesh(methods=(chosen,), samples=SAMPLES, temperature=1.0)
  batch = judgement.Batch(
    c.rollout('hidden', width=WIDTH),
    reference_hidden=hidden,
    heads=judgement.Heads((head,), head),
  )
  run = lambda *args: [mean.value for mean in judge(*args)[0]]
  arguments = hidden, head, batch, of(()), c.key(), of((), dtype=jnp.int32)
  also = ('judgement.over_mesh',)
  return c.both('judgement.judge', run, *arguments, by=2, also=also, positions=c.positions())


def cases() -> list[Case]:
  return [*_scores(), *_heads(), *_kernels(), *_regions(), *_objectives()]
