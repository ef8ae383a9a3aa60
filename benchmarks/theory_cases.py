"""Certificates, bounds and calibration, for `benchmarks.transforms`."""

import inspect

import jax.numpy as jnp

from benchmarks import cases as c
from benchmarks.cases import ROWS, SAMPLES, Case, of
from trm_jax import (
  bounds,
  calibration,
  certificate,
  confidence,
  prefixes,
  sharp_bounds,
  surrogate_certificate,
)

HORIZON = 1024  # of the bounds


def _certificates() -> list[Case]:
  """Of whole batches, replicated, as `metrics.summarise` reads them."""
  x, valid, reward = c.per_token(None), c.valid(ROWS, None), c.per_row(None)
  unit, row = of((ROWS,)), of((ROWS,))
  limits = prefixes.Limits(max_kl=0.5, max_tv=0.4, budget=2.0, band=1.0)
  patch = lambda r, v: prefixes.patch(r, v, kl=r, tv=r, chi2=r, limits=limits)
  patched = lambda fn: lambda r, v, *rest: fn(patch(r, v), *rest)
  samples = dict(samples=SAMPLES)
  penalised = lambda fn: lambda p, reward: fn(p, reward, prefixes.tv_penalty, **samples)
  from_patch = lambda name, fn, *rest: Case(name, patched(fn), (x, valid, *rest))
  by_surrogate = lambda fn, run: from_patch(c.name(fn), run, reward)
  four = (
    certificate.improvement,
    certificate.harm,
    certificate.retrospective,
    certificate.retrospective_harm,
  )
  of_rows = lambda fn: lambda p, reward: fn(p, reward, **samples)
  s = surrogate_certificate
  return [
    c.whole(certificate.unit_reward, reward),
    c.whole(certificate.by_prompt, reward, **samples),
    c.whole(certificate.log_weight, x, valid),
    *(c.whole(fn, x, valid, reward, **samples) for fn in four),
    c.whole(certificate.over_steps, of((100,)), of((100,)), prompts=ROWS // SAMPLES),
    c.whole(certificate.monitor, x, valid, reward, **samples),
    c.whole(confidence.log_evalue, unit),
    c.whole(confidence.betting, unit, alpha=0.05),
    c.whole(confidence.empirical_bernstein, unit, alpha=0.05, low=-1.0, high=1.0),
    c.whole(confidence.catoni, unit, alpha=0.05, variance=1.0),
    c.whole(confidence.cumulative, row, row, alpha=0.05),
    c.whole(confidence.normal, unit, alpha=0.05),
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
    return Case(c.name(fn), lambda *a: fn(**fixed, **dict(zip(traced, a, strict=True))), arguments)

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
  x, valid, row = c.per_token(None), c.valid(ROWS, None), of((ROWS,))
  tail, whole = calibration.tail, of((ROWS,), dtype=jnp.int32)
  limit = lambda x, valid: calibration.max_limit(tail(x, valid), T=HORIZON, target=0.8)
  conformal = lambda x, valid, largest, lengths: calibration.conformal_max_limit(
    tail(x, valid), largest, lengths, T=HORIZON, target=0.8
  )
  return [
    *(of_settings(getattr(bounds, name)) for name in blocks),
    *(of_settings(getattr(sharp_bounds, name)) for name in sharp),
    c.whole(calibration.conformal, row, target=0.8),
    c.whole(tail, x, valid),
    Case('calibration.max_limit', limit, (x, valid)),
    Case('calibration.conformal_max_limit', conformal, (x, valid, row, whole)),
  ]


def cases() -> list[Case]:
  return [*_certificates(), *_theory()]
