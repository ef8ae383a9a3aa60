"""What disturbs an engine and what measures it, for `benchmarks.transforms`."""

import functools

import jax
import jax.numpy as jnp

from benchmarks import cases as c
from benchmarks.cases import MOE, PROMPT, RESPONSE, ROWS, SAMPLES, SMALL, SMALL_MOE, VOCAB, Case, of
from benchmarks.policy_cases import RESPONSE_DRAWN
from trm_jax import measurements
from trm_jax.measurements import metric_names, router_statistics
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA
from trm_jax.mismatch import (
  decoding,
  fleet,
  heavy_tail,
  precision,
  reduction,
  reporting,
  routing,
  staleness,
)
from trm_jax.planning import abstract_step
from trm_jax.policy import attention
from trm_jax.rollouts import scoring, support
from trm_jax.rollouts.sampling import Request
from trm_jax.rollouts.stores import Record


def _mismatch() -> list[Case]:
  """What disturbs an engine, and what measures it."""
  scores = of((ROWS, VOCAB), DATA)
  x, valid = c.per_token(None), c.valid(ROWS, None)
  params, key, strength = c.params(SMALL), c.key(), of(())
  routes = of((ROWS, RESPONSE, SMALL.layers, 2), dtype=jnp.int32)
  fed = of((ROWS, RESPONSE), dtype=bool)
  of_rows = lambda fn, *args, **at: Case(
    c.name(fn), sharding.over_rows(functools.partial(fn, **at)), args
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
    of_rows(support.replay_support, scores, scores),
    of_rows(heavy_tail.sigma, c.per_token()),
    Case('mismatch.heavy_tail.student_t', lambda k: heavy_tail.student_t(k, 3.0, 5.0), (key,)),
    Case(
      'mismatch.heavy_tail.outlier_prompts',
      lambda prompts, start: heavy_tail.outlier_prompts(tailed, prompts, start),
      (prompts, start),
    ),
    *(c.whole(fn, x, valid) for fn in measured),
    c.whole(measurements.bins, x, edges=edges),
    c.whole(measurements.position_bins, valid, edges=edges),
    c.whole(measurements.length_bins, valid, edges=edges),
    c.whole(measurements.sign_bins, of((ROWS,)), valid),
    Case('measurements.distributions.by_group', grouped, (x, valid, numbers)),
    c.whole(measurements.log_odds_shift, x, x),
    c.whole(measurements.confidence_table, x, x, valid),
    c.whole(measurements.sequences, x, valid),
    c.whole(measurements.correlation, x, x, valid),
    Case('measurements.batch.measure', _measured, (c.divergences(None), valid, x, of((ROWS,)))),
    *(c.whole(fn, x, x, valid) for fn in named),
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
      (c.per_token(), c.valid(), c.keys(ROWS, RESPONSE), c.keys(ROWS // SAMPLES)),
    ),
    c.whole(router_statistics.fed_slots, c.rollout(config=SMALL_MOE)),
    c.whole(router_statistics.flips, routes, routes, fed),
    c.whole(router_statistics.margins, moe_scores, fed, experts_per_token=2),
    c.whole(router_statistics.load, routes, fed, experts=MOE.experts),
    c.whole(routing.flip_rate, routes, routes, fed),
    Case('mismatch.staleness.start_history', lambda p: staleness.start_history(p, 2), (params,)),
    c.whole(staleness.push, history, params),
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
  params, key, strength = c.params(SMALL), c.key(), of(())
  asked = Request(samples=SAMPLES, length=RESPONSE_DRAWN, eos=1, pad=0), Record(store='topk')

  def generate(params, history, prompts, start, key, strength, version):
    at = dict(history=history, strength=strength, version=version)
    return fleet.generate(mixed, params, SMALL, prompts, start, key, *asked, **at)

  weights = lambda params, history, key, s: fleet.engine_weights(
    broken, params, SMALL, key, history=history, strength=s
  )
  heads = lambda params, history, key, s: fleet.heads(
    mixed, params, SMALL, key, samples=SAMPLES, history=history, strength=s
  )
  version = of((), dtype=jnp.int32)
  hooks = (
    'decoding.filter_hooks',
    'heavy_tail.shift_hooks',
    'precision.rounding_hooks',
    'precision.attention',
    'routing.routing_hooks',
  )
  also = ('fleet.engine_hooks', 'fleet.served_attention', 'reduction.attention', *hooks)
  jitter = routing.Routing(jitter=0.1, flips=(0.1,), capacity=1.5, dtype='bfloat16')
  unsteady = fleet.Fleet(engine=fleet.Engine(routing=jitter))

  def routed(params, prompts, start, key, version):
    return fleet.generate(unsteady, params, SMALL_MOE, prompts, start, key, *asked, version=version)

  reported = of((ROWS, RESPONSE), DATA, dtype=jnp.int32)
  rollout = c.rollout()
  logp = lambda rollout: (
    lambda p: scoring.policy_logp(p, SMALL, rollout, attention=attention.splash)
  )
  versions = lambda reported, current, version, history, rollout: staleness.of_version(
    logp(rollout), reported, current, version=version, history=history, ages=(0, 1)
  )
  replayed = lambda params, rollout: scoring.score(
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
      (c.params(SMALL_MOE), prompts, start, key, version),
      also=('mismatch.routing.router_hook',),
    ),
    Case('mismatch.fleet.engine_weights', weights, (params, history, key, strength)),
    Case('mismatch.fleet.heads', heads, (params, history, key, strength)),
    Case(
      'mismatch.staleness.of_version',
      versions,
      (reported, c.per_token(), version, history, rollout),
      positions=c.positions(),
    ),
    Case('mismatch.routing.replay', replayed, (c.params(SMALL_MOE), c.rollout(config=SMALL_MOE))),
  ]


def cases() -> list[Case]:
  return [*_mismatch()]
