"""The command line's view of a method: words and numbers, turned into a value by `make`.

`--method.max-kl 0.2` and the like are made from the table `masks.CRITERIA`, a word for each row;
`--method.name tis` takes a row of `objectives.METHODS`. What is not in a table is reached by
`module:NAME`.
"""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from trm_jax import masks, objectives
from trm_jax.masks import Criterion
from trm_jax.objectives import Method, advantages, parts, surrogates, weights
from trm_jax.types import InputError, check_words, part

# Surrogates and advantages by word, with the settings each takes from the words.
SURROGATES = {
  'ratio': (parts.ratio, ('anchor',)),
  'clip': (parts.clip, ('anchor', 'clip_low', 'clip_high')),
  'decoupled': (parts.decoupled, ('anchor', 'clip_low', 'clip_high', 'max_ratio')),
}
ADVANTAGES = {
  'centred': advantages.centred,
  'group_relative': advantages.group_relative,
  'leave_one_out': advantages.leave_one_out,
}


def _numbers(make: Callable) -> dict[str, float]:
  """Keyword settings of a criterion, beside its limit, that are numbers."""
  arguments = inspect.signature(make).parameters.values()
  return {p.name: p.default for p in arguments if isinstance(p.default, float)}


def _criterion_words() -> list[tuple[str, Any, Any]]:
  """A field for each row of `masks.CRITERIA`, and one for each further number it takes."""
  fields = []
  for name, make in masks.CRITERIA.items():
    told = inspect.getdoc(make).splitlines()[0]
    fields.append(
      (
        name,
        Annotated[float | None, tyro.conf.arg(help=f'Limit of {told} None = not used.')],
        dataclasses.field(default=None),
      )
    )
    fields += [
      (
        f'{name}_{option}',
        Annotated[float, tyro.conf.arg(help=f'{option} of {name}.')],
        dataclasses.field(default=default),
      )
      for option, default in _numbers(make).items()
    ]
  return fields


_CriterionWords = dataclasses.make_dataclass(
  '_CriterionWords',
  _criterion_words(),
  frozen=True,
  kw_only=True,
  namespace={'__module__': __name__},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodWords(_CriterionWords):
  """What the gradient is made of. The default is the paper's surrogate without any mask.

  Limits that are set are AND-ed: a row, or with scope prefix a token, is kept if it meets them all.

  >>> words = trm.MethodWords(max_kl=.2, surrogate='clip')
  >>> words.make().masks[0].name
  'max_kl'
  """

  # A method of the catalogue (`trm_jax.methods()` prints it) or module:NAME of your own; limits and
  # the switches below are added to it.
  name: Annotated[str | None, tyro.conf.arg(aliases=('--method',))] = None
  # Criteria that are not in the table, as module:function=LIMIT.
  criteria: tuple[str, ...] = ()
  # Objective per token: ratio (unclipped), clip (PPO), or decoupled (clip on drift x engine ratio).
  surrogate: Literal['ratio', 'clip', 'decoupled'] = 'ratio'
  # Denominator of the ratio: what the engine reports (rollout), the trainer's own log-probs at the
  # start of the batch (recomputed: ignores the mismatch), or its log-probs under the weights the
  # engine says it used (version).
  anchor: Literal['rollout', 'recomputed', 'version'] = 'rollout'
  # Weight against what the engine reports: none, or tis = min(anchor / rollout, max_ratio).
  weight: Literal['none', 'tis'] = 'none'
  # Truncation of the engine ratio (tis and decoupled).
  max_ratio: float = 2.0
  # PPO's clip range: 1 - clip_low .. 1 + clip_high (clip and decoupled).
  clip_low: float = 0.2
  clip_high: float = 0.2
  # Judge whole sequences, or keep each one up to its first context outside (max_kl, max_tv and
  # chi2_budget only).
  scope: Literal['sequence', 'prefix'] = 'sequence'
  # Which end of a certified bracket limits judge where the rollout stored its likeliest tokens
  # (store='topk'): upper = what is kept is inside; lower = what is rejected is outside.
  bound: Literal['upper', 'lower'] = 'upper'
  # Let the max_kl limit follow past batches so that about this share is accepted (0..1); max_kl is
  # then its first value. None = fixed.
  accept: float | None = None
  # How much of the way (of log limit) it goes with each batch: more where divergences change fast.
  accept_rate: float = 0.1
  # ... and it never falls below this many nats, e.g. while weights hardly move.
  accept_floor: float = 0.0
  # Control: keep as many sequences as the trust region would, chosen at random.
  random_mask: bool = False
  # The control keeps as many rows of each length, too: chosen among rows of (nearly) equal length.
  match_length: bool = False
  # Reward minus the group's mean (centred), divided by its deviation too (group_relative), or minus
  # the mean of the others (leave_one_out).
  advantage: Literal['centred', 'group_relative', 'leave_one_out'] = 'group_relative'
  # Which rows shape the baseline: all, or only accepted ones (with or without the row itself;
  # leave_one_out is always without).
  baseline_pool: Literal['all', 'accepted', 'loo_accepted'] = 'all'
  # Tokens of a row: sum (TRM), mean, or sum divided by the response length T (constant).
  reduce_tokens: surrogates.ReduceTokens = 'sum'
  # Divide by all sequences (total, TRM: unbiased), the accepted ones, or all or accepted tokens.
  normalize_by: surrogates.NormalizeBy = 'total'
  # Weight of KL(policy || policy at RL step 0), exact, added to the loss. 0 = off, not computed.
  kl_coefficient: float = 0.0
  # Whether that penalty covers all rows or only the kept ones.
  kl_scope: Literal['all', 'kept'] = 'all'
  # A log-prob the engine did not report (NaN): reject the row, read it as agreement, or stop.
  missing: weights.Missing = 'reject'

  def __post_init__(self):
    check_words(self, 'method.')
    if self.accept is not None:
      if not 0 < self.accept < 1:
        raise InputError(f'method.accept={self.accept} must lie strictly between 0 and 1.')
      if self.max_kl is None:
        raise InputError(
          f'method.accept={self.accept} needs method.max_kl as the first value of the limit: set'
          ' it, e.g. to 0.05.'
        )
    if not 0 < self.accept_rate <= 1:
      raise InputError(f'method.accept_rate={self.accept_rate} must lie in (0, 1].')
    if not self.accept_floor >= 0:
      raise InputError(f'method.accept_floor={self.accept_floor} must be >= 0.')
    if self.match_length and not self.random_mask:
      raise InputError('method.match_length says how method.random_mask chooses: set that as well.')
    if self.weight == 'tis' and (self.anchor == 'rollout' or self.surrogate == 'decoupled'):
      raise InputError(
        f"method.weight='tis' weights anchor / rollout, which method.anchor={self.anchor!r} with"
        f' method.surrogate={self.surrogate!r} already holds; use it with anchor recomputed or'
        ' version and surrogate ratio or clip.'
      )
    if self.surrogate == 'decoupled' and self.anchor == 'rollout':
      raise InputError(
        "method.surrogate='decoupled' splits the ratio at the trainer's own log-probs; set"
        " method.anchor to 'version' or 'recomputed'."
      )
    options = [f'{n}_{o}' for n, make in masks.CRITERIA.items() for o in _numbers(make)]
    for name in ('max_ratio', 'clip_high', *(o for o in options if hasattr(self, o))):
      if not getattr(self, name) > 0:
        raise InputError(f'method.{name}={getattr(self, name)} must be > 0.')
    if self.length_neutral_epsilon > 1:
      raise InputError(
        f'method.length_neutral_epsilon={self.length_neutral_epsilon} is a total variation: at most'
        ' 1.'
      )
    if not 0 <= self.clip_low <= 1:
      raise InputError(f'method.clip_low={self.clip_low} must lie in 0..1.')
    if self.name is not None:
      for name in ('surrogate', 'anchor', 'weight', 'max_ratio', 'clip_low', 'clip_high'):
        value = getattr(self, name)
        if value != _DEFAULTS[name]:
          raise InputError(
            f'method.{name}={value!r} and method.name={self.name!r} both say what the objective is:'
            ' leave one of the two out.'
          )
    self.make()  # what cannot be together is refused here, before any compute

  @property
  def limits(self) -> dict[str, float]:
    """The limits that are set by words of the table."""
    limits_of = {name: getattr(self, name, None) for name in masks.CRITERIA}
    return {name: limit for name, limit in limits_of.items() if limit is not None}

  def make(self) -> Method:
    """The method as a value."""
    criteria = tuple(
      masks.CRITERIA[name](
        limit, **{o: getattr(self, f'{name}_{o}') for o in _numbers(masks.CRITERIA[name])}
      )
      for name, limit in self.limits.items()
    )
    criteria += tuple(_outside(word) for word in self.criteria)
    switches = dict(
      scope=self.scope,
      bound=self.bound,
      control='none',
      advantage=ADVANTAGES[self.advantage],
      baseline_pool=self.baseline_pool,
      reduce_tokens=self.reduce_tokens,
      normalize_by=self.normalize_by,
      kl_coefficient=self.kl_coefficient,
      kl_scope=self.kl_scope,
      missing=self.missing,
    )
    if self.random_mask:
      switches['control'] = 'length_matched' if self.match_length else 'random'
    if self.accept is not None:
      switches['follow'] = objectives.Follow(
        target=self.accept, rate=self.accept_rate, floor=self.accept_floor
      )
    if self.name is not None:
      # Words that were left alone do not change what the catalogue says.
      base, plain = named(self.name).make(), Method()
      said = {k: v for k, v in switches.items() if v != getattr(plain, k)}
      return dataclasses.replace(base, masks=base.masks + criteria, **said)
    function, settings = SURROGATES[self.surrogate]
    surrogate = part(function, **{s: getattr(self, s) for s in settings})
    weighing = ()
    if self.weight == 'tis':
      weighing = (part(parts.tis, anchor=self.anchor, max_ratio=self.max_ratio),)
    return Method(surrogate=surrogate, weights=weighing, masks=criteria, **switches)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MethodWords)}


def _imported(word: str, where: str) -> Any:
  """The object `module:NAME`; InputError where there is none."""
  module, _, name = word.partition(':')
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise InputError(f'{where}={word!r} cannot be found ({error}); give module:NAME.') from error


def named(word: str) -> objectives.Named:
  """The row of the catalogue that a word means, or the `Named` at module:NAME."""
  if word in objectives.METHODS:
    return objectives.METHODS[word]
  if ':' not in word:
    near = ', '.join(difflib.get_close_matches(word, objectives.METHODS, n=3, cutoff=0))
    raise InputError(
      f'method.name={word!r} is no method of the catalogue; the nearest are {near}.'
      ' trm_jax.methods() prints all of them, and module:NAME takes one of your own.'
    )
  row = _imported(word, 'method.name')
  if not isinstance(row, objectives.Named):
    raise InputError(f'method.name={word!r} is a {type(row).__name__}; give a trm_jax Named.')
  return row


def _outside(word: str) -> Criterion:
  """The criterion module:function=LIMIT."""
  name, equals, limit = word.rpartition('=')
  try:
    value = float(limit)
  except ValueError:
    equals = ''
  if not equals:
    raise InputError(f'method.criteria={word!r} is not of the form module:function=LIMIT.')
  criterion = _imported(name, 'method.criteria')(value)
  if not isinstance(criterion, Criterion):
    raise InputError(
      f'method.criteria={word!r} makes a {type(criterion).__name__}, not a Criterion.'
    )
  return criterion
