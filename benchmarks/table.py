"""One row for each public transform of arrays: what it takes, along which axes, what it gives.

Read twice: `statistics_cases` compiles every row for TPUs at the sizes of a real batch, and
`tests/battery_test.py` runs every row at `SMALL`, in every way of running it. A row is written for
whole arrays; where rows or the vocabulary may be split over devices, `over` says which axis name
the function wants to hear.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from trm_jax import certificates, divergences, extremes, masks
from trm_jax.certificates import patching, surrogate
from trm_jax.divergences import brackets, linear_head, ratios
from trm_jax.masks import calibration
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.objectives import advantages, surrogates, weights
from trm_jax.types import Divergences, TopK


class Sizes(NamedTuple):
  """Lengths of the axes: rows B, tokens T, vocabulary V, width D, likeliest tokens K."""

  B: int
  T: int
  V: int
  D: int
  K: int


# Eight devices have two rows each, a whole group of two samples, or two tokens of the vocabulary.
SMALL = Sizes(B=16, T=5, V=16, D=6, K=4)
SAMPLES = 2


class Array(NamedTuple):
  """An argument: a letter of `Sizes` for each axis, and what it holds."""

  axes: str
  holds: str

  def shape(self, sizes: Sizes) -> tuple[int, ...]:
    return tuple(getattr(sizes, axis) for axis in self.axes)

  @property
  def spec(self) -> P:
    """Rows over `data`, vocabularies over `model`."""
    return P(*({'B': DATA, 'V': MODEL}.get(axis) for axis in self.axes))


class Row(NamedTuple):
  """A public transform.

  Attributes:
    name: 'module.function', then after a comma which form of it.
    run: the function; its settings are bound, arguments come by position.
    takes: trees of `Array`.
    gives: axes of every result: 'B' where results have rows (then whatever), '' for the batch.
    over: the axis name that `run` takes as `axis_name`, None where rows are independent.
    by: no argument beyond the first so many has any gradient.
    whole: for arrays that are not split, as certificates of a whole batch.
    grouped: rows of a prompt adjoin, so that only whole groups may change places.
    padding: what stands where `VALID` is false cannot matter.
    rejects: nor what stands in rows that `KEEP` rejects.
    overflows: where a log-ratio is 1e4 some result is 'inf', or 'nan', by its definition.
  """

  name: str
  run: Callable
  takes: tuple
  gives: str = 'B'
  over: str | None = None
  by: int = 0
  whole: bool = False
  grouped: bool = False
  padding: bool = False
  rejects: bool = False
  overflows: str = ''

  def given(self, axis_name: str | None) -> Callable:
    """`run` on a device's part, or on all if there is no axis name."""
    return functools.partial(self.run, axis_name=axis_name) if self.over else self.run

  @property
  def specs(self) -> tuple:
    spec = lambda x: P() if self.whole else x.spec
    return tuple(jax.tree.map(spec, x, is_leaf=lambda x: isinstance(x, Array)) for x in self.takes)

  @property
  def out(self) -> P:
    return P(DATA) if self.gives == 'B' and not self.whole else P()


POLICY, ROLLOUT = Array('BTV', 'logits'), Array('BTV', 'logits')
HIDDEN, HEAD = Array('BTD', 'hidden'), Array('VD', 'head')
TOKENS, VALID = Array('BT', 'token'), Array('BT', 'valid')
LOGP, LOG_RATIO = Array('BT', 'logp'), Array('BT', 'log_ratio')
SOME, REWARD, KEEP = Array('BT', 'positive'), Array('B', 'reward'), Array('B', 'keep')
TOP = TopK(Array('BTK', 'ids'), Array('BTK', 'top_logp'), Array('BT', 'tail'))
PAIR = Divergences(kl=SOME, tv=SOME, log_ratio=LOG_RATIO, entropy=SOME, chi2=SOME)


def name_of(fn: Callable) -> str:
  """'module.function' of a public function."""
  return f'{fn.__module__.removeprefix("trm_jax.")}.{fn.__name__}'


def _row(fn: Callable, *takes: Any, form: str = '', settings: dict | None = None, **more) -> Row:
  run = functools.partial(fn, **settings) if settings else fn
  return Row(name_of(fn) + (f', {form}' if form else ''), run, takes, **more)


def scores() -> list[Row]:
  """Of two arrays of scores, vocabulary split over `model`."""
  two, split = (POLICY, ROLLOUT), dict(over=MODEL)
  d = divergences
  return [
    _row(d.statistics, *two, TOKENS, by=1, **split),
    _row(
      d.statistics,
      *two,
      TOKENS,
      form='full set',
      settings=dict(full=True),
      by=1,
      overflows='inf',
      **split,
    ),
    _row(d.kl, *two, by=2, **split),
    _row(d.total_variation, *two, by=2, **split),
    _row(d.jensen_shannon, *two, by=2, **split),
    _row(d.renyi, *two, settings=dict(alpha=2.0), by=2, **split),
    _row(d.entropy, POLICY, by=1, **split),
    _row(d.logp, POLICY, TOKENS, by=1, **split),
    _row(brackets.bounds, POLICY, TOP, **split),
  ]


def heads() -> list[Row]:
  """From hidden states and output heads, vocabulary split over `model`."""
  against = linear_head.statistics
  states, split = (HIDDEN, HEAD), dict(over=MODEL, by=2)
  name = name_of(against)

  def of_logits(h, w, tokens, p, **more):
    return against(h, w, tokens, rollout_logits=p, **more)

  def of_states(h, w, tokens, p, u, **more):
    return against(h, w, tokens, rollout_hidden=p, rollout_head=u, **more)

  return [
    Row(f'{name}, of logits', of_logits, (*states, TOKENS, ROLLOUT), **split),
    Row(f'{name}, of hidden states', of_states, (*states, TOKENS, HIDDEN, HEAD), **split),
    Row(
      f'{name}, of hidden states, full set',
      functools.partial(of_states, full=True),
      (*states, TOKENS, HIDDEN, HEAD),
      overflows='inf',
      **split,
    ),
    _row(linear_head.brackets, *states, TOKENS, TOP, **split),
    _row(linear_head.logp, *states, TOKENS, **split),
    _row(linear_head.kl_from, *states, HIDDEN, HEAD, **split),
  ]


def regions() -> list[Row]:
  """Statistics of rows, criteria, prefixes: every row by itself."""
  made = {name: make(limit=0.2) for name, make in masks.CRITERIA.items()}
  future = dict(epsilon=5e-3, delta=1e-4)
  judged = PAIR, VALID
  rows = dict(padding=True)
  criterion = lambda name, run: Row(name, run, judged, padding=True)
  both = masks.all_of(made['max_kl'], masks.max_tv(limit=0.3))
  bands = dict(
    geometric_band=masks.geometric_band(low=0.9, high=1.1),
    sum_band=masks.sum_band(),
    token_veto=masks.token_veto(low=0.5),
    mean_ratio_error=masks.mean_ratio_error(),
    carm=masks.carm(0.3),
    mean_k2=masks.mean_k2(0.05),
    sum_k2=masks.sum_k2(0.3),
  )
  return [
    _row(extremes.largest, SOME, by=1),
    _row(extremes.smallest, SOME, by=1),
    _row(extremes.at_least, SOME, LOGP, by=2),
    _row(extremes.at_most, SOME, LOGP, by=2),
    _row(masks.max_over_tokens, SOME, VALID, **rows),
    _row(masks.mean_over_tokens, SOME, VALID, **rows),
    _row(masks.sum_over_tokens, SOME, VALID, **rows),
    _row(masks.deviation, LOG_RATIO, by=1, overflows='inf'),
    _row(masks.future_deviation, LOG_RATIO, VALID, settings=future, overflows='nan', **rows),
    _row(masks.chi2_of, PAIR, by=1),
    _row(masks.keep_all, PAIR, VALID, **rows),
    _row(masks.prefix, VALID, VALID),
    _row(masks.rows_kept, VALID, VALID),
    *(criterion(name_of(masks.CRITERIA[name]), run) for name, run in made.items()),
    *(
      criterion(f'{name_of(masks.CRITERIA[name])}, prefix', run.prefix)
      for name, run in made.items()
      if run.along
    ),
    *(criterion(name_of(getattr(masks, name)), run) for name, run in bands.items()),
    criterion(name_of(masks.combined), masks.combined(max_limit=0.2, mean_limit=0.1)),
    criterion(name_of(masks.all_of), both),
    criterion(f'{name_of(masks.all_of)}, prefix', both.prefix),
  ]


def objectives() -> list[Row]:
  """Ratios, advantages, weights and surrogates; `aggregate` sums over all rows."""
  groups = dict(settings=dict(group_size=SAMPLES), grouped=True)
  shared = (REWARD, VALID)
  mean = dict(gives='', over=DATA, by=1, padding=True, rejects=True)
  per_token = dict(
    ratio_pg=surrogates.ratio_pg,
    ppo_clip=surrogates.ppo_clip,
    decoupled=lambda logp, anchor, a, valid: surrogates.decoupled(logp, anchor, anchor, a, valid),
  )

  def mean_of(name, fn):
    def run(logp, anchor, reward, valid, keep, *, axis_name=None):
      of_tokens = fn(logp, anchor, reward, valid)
      return surrogates.aggregate(of_tokens, valid, keep, axis_name=axis_name)

    takes = LOGP, LOGP, REWARD, VALID, KEEP
    by = 3  # log-probs, anchor and advantages
    return Row(f'{name_of(surrogates.aggregate)}, of {name}', run, takes, **mean | dict(by=by))

  return [
    _row(ratios.k1, LOG_RATIO, by=1),
    _row(ratios.k2, LOG_RATIO, by=1),
    _row(ratios.k3, LOG_RATIO, by=1, overflows='inf'),
    _row(ratios.ratio, LOG_RATIO, VALID, by=1, padding=True),
    *(
      _row(fn, REWARD, KEEP, **groups)
      for fn in (advantages.centred, advantages.group_relative, advantages.leave_one_out)
    ),
    _row(weights.truncated, LOG_RATIO, VALID, padding=True),
    _row(weights.sequence_truncated, LOG_RATIO, VALID, padding=True),
    _row(weights.resolve_missing, LOGP, LOGP, VALID, by=1),
    _row(surrogates.ratio_pg, LOGP, LOGP, *shared, by=3),
    _row(surrogates.ppo_clip, LOGP, LOGP, *shared, by=3),
    _row(surrogates.decoupled, LOGP, LOGP, LOGP, *shared, by=4),
    *(mean_of(name, fn) for name, fn in per_token.items()),
    _row(surrogates.aggregate, SOME, VALID, KEEP, **mean),
    _row(
      surrogates.aggregate,
      SOME,
      VALID,
      KEEP,
      form='mean of the accepted',
      settings=dict(reduce_tokens='mean', normalize_by='accepted'),
      **mean,
    ),
  ]


def batches() -> list[Row]:
  """Of a whole batch, which every device holds: certificates, patched policies, calibration."""
  rows = LOG_RATIO, VALID, REWARD
  batch = dict(gives='', whole=True, padding=True)
  samples = dict(settings=dict(samples=SAMPLES))
  limits = patching.Limits(max_kl=0.5, max_tv=0.4, budget=2.0, band=1.0)
  patch = lambda ratio, valid, x: patching.patch(ratio, valid, kl=x, tv=x, chi2=x, limits=limits)

  def penalised(fn):
    def run(ratio, valid, x, reward):
      found = fn(patch(ratio, valid, x), reward, patching.tv_penalty, samples=SAMPLES)
      return found.estimate, found.lower, found.log_evalue, found.terms

    return run

  errors = lambda ratio, valid, x, reward: surrogate.error_bounds(
    patch(ratio, valid, x), reward, samples=SAMPLES
  )
  patched = LOG_RATIO, VALID, SOME
  four = (
    certificates.improvement,
    certificates.harm,
    certificates.retrospective,
    certificates.retrospective_harm,
  )
  limit = lambda x, valid: calibration.max_limit(calibration.tail(x, valid), T=64, target=0.8)
  return [
    _row(ratios.effective_sample_size, LOG_RATIO, VALID, **batch),
    _row(certificates.log_weight, LOG_RATIO, VALID, whole=True, padding=True),
    *(_row(fn, *rows, **samples, **batch, grouped=True) for fn in four),
    _row(certificates.monitor, *rows, **samples, **batch, grouped=True),
    Row(name_of(patching.patch), patch, patched, whole=True),
    *(
      Row(
        name_of(fn), penalised(fn), (*patched, REWARD), **batch, grouped=True, overflows=overflows
      )
      for fn, overflows in ((surrogate.first_order, ''), (surrogate.prefix, 'nan'))
    ),
    Row(name_of(surrogate.error_bounds), errors, (*patched, REWARD), **batch, grouped=True),
    Row(name_of(calibration.max_limit), limit, (SOME, VALID), **batch),
  ]


ROOMS = dict(scores=scores, heads=heads, regions=regions, objectives=objectives, batches=batches)
