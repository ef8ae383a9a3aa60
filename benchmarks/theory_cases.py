"""Certificates, bounds and calibration, for `benchmarks.transforms`."""

import inspect

import jax.numpy as jnp

from benchmarks import cases as c
from benchmarks import table
from benchmarks.cases import ROWS, SAMPLES, Case, of
from trm_jax import bounds, certificates
from trm_jax.bounds import sharp
from trm_jax.certificates import confidence, patching, surrogate
from trm_jax.masks import calibration

HORIZON = 1024  # of the bounds


def _certificates() -> list[Case]:
  """Of whole batches, replicated, as `metrics.summarise` reads them."""
  x, valid, reward = c.per_token(None), c.valid(ROWS, None), c.per_row(None)
  unit, row = of((ROWS,)), of((ROWS,))
  limits = patching.Limits(max_kl=0.5, max_tv=0.4, budget=2.0, band=1.0)
  patch = lambda r, v: patching.patch(r, v, kl=r, tv=r, chi2=r, limits=limits)
  patched = lambda fn: lambda r, v, *rest: fn(patch(r, v), *rest)
  samples, steps = dict(samples=SAMPLES), dict(prompts=ROWS // SAMPLES, low=0.0, high=1.0)
  from_patch = lambda name, fn, *rest: Case(name, patched(fn), (x, valid, *rest))
  s = surrogate
  return [
    c.whole(certificates.unit_reward, reward),
    c.whole(certificates.by_prompt, reward, **samples),
    c.whole(certificates.over_steps, of((100,)), of((100,)), **steps),
    c.whole(confidence.log_evalue, unit),
    c.whole(confidence.betting, unit, alpha=0.05),
    c.whole(confidence.empirical_bernstein, unit, alpha=0.05, low=-1.0, high=1.0),
    c.whole(confidence.catoni, unit, alpha=0.05, variance=1.0),
    c.whole(confidence.cumulative, row, row, alpha=0.05),
    c.whole(confidence.normal, unit, alpha=0.05),
    from_patch(c.name(patching.tv_penalty), patching.tv_penalty),
    from_patch(c.name(patching.l2_penalty), patching.l2_penalty),
    from_patch(c.name(s.leaving), lambda p: s.leaving(p, **samples, alpha=0.05)),
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
    *('adaptive_tv', 'adaptive', 'linear', 'b_star', 'crossover', 'last_uncapped', 'acceptance'),
  )
  sharper = (
    *('position_wise', 'product', 'prefix_budget', 'pointwise_ratio', 'l2', 'budget_l2'),
    *('chi2_limit', 'trivial', 'marginal', 'b_star_tight', 'tabulate'),
  )
  x, valid, row = c.per_token(None), c.valid(ROWS, None), of((ROWS,))
  tail, whole = calibration.tail, of((ROWS,), dtype=jnp.int32)
  conformal = lambda x, valid, largest, lengths: calibration.conformal_max_limit(
    tail(x, valid), largest, lengths, T=HORIZON, target=0.8
  )
  return [
    *(of_settings(getattr(bounds, name)) for name in blocks),
    *(of_settings(getattr(sharp, name)) for name in sharper),
    c.whole(calibration.conformal, row, target=0.8),
    c.whole(tail, x, valid),
    Case(c.name(calibration.conformal_max_limit), conformal, (x, valid, row, whole)),
  ]


def cases() -> list[Case]:
  of_table = [case for row in table.batches() for case in c.of_table(row)]
  return [*of_table, *_certificates(), *_theory()]
