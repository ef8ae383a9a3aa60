"""The data that travels between the arrows of trm_jax, and the legend of dimension letters.

| letter | meaning                                     |
| ------ | ------------------------------------------- |
| B      | sequences (rows); rows of one prompt adjoin |
| G      | samples per prompt, B = prompts * G         |
| P      | prompt slots, right-aligned                 |
| T      | response slots                              |
| L      | P + T                                       |
| V      | vocabulary                                  |
| D      | width of the residual stream                |
| H, C   | attention heads, head width                 |
| N      | layers                                      |
| E, K   | experts, experts per token                  |

Alignment, everywhere: `logits[:, t]` scores `tokens[:, t]`. Log-probabilities are natural logs.
Non-finite values: NaN means "missing", inf is a real violation of the trust region.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class InputError(ValueError):
  """Bad input: one sentence with the argument, the value and the remedy (exit code 2).

  >>> try:
  ...   trm.Method(masks=(trm.max_kl(-1.),))
  ... except trm.InputError as error:
  ...   print(str(error)[:33])
  method.max_kl=-1.0 must be > 0: a
  """


class NonFiniteError(FloatingPointError):
  """A loss or gradient was not finite; names the step and the rows (exit code 1)."""


class DamagedError(RuntimeError):
  """Every checkpoint of a run is damaged; names the causes (exit code 1)."""


def check_words(settings, where: str = '') -> None:
  """Raises InputError for a field of settings that is none of the words its Literal type allows."""
  for name, hint in typing.get_type_hints(type(settings)).items():
    words, value = typing.get_args(hint), getattr(settings, name)
    if typing.get_origin(hint) is typing.Literal and value not in words:
      raise InputError(f'{where}{name}={value!r} is not one of {", ".join(words)}.')


@dataclasses.dataclass(frozen=True)
class Part:
  """A function with its settings: a `functools.partial` that equals another one made alike.

  So a value that holds it can be compared, hashed and given to `jax.jit` as static.
  """

  function: Callable
  settings: tuple[tuple[str, Any], ...] = ()

  def __call__(self, *arrays, **more):
    return self.function(*arrays, **dict(self.settings), **more)


def part(function: Callable, **settings) -> Part:
  """`function` with these keyword settings.

  >>> double = trm.part(jnp.multiply) == trm.part(jnp.multiply)
  >>> double
  True
  """
  return Part(function, tuple(sorted(settings.items())))


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A mean that has not been divided yet, so that it adds up over micro-batches and devices.

  >>> (trm.Mean(jnp.array(3.), jnp.array(2.)) + trm.Mean(jnp.array(1.), jnp.array(2.))).value
  Array(1., dtype=float32)
  """

  total: Float[Array, '*s']
  count: Float[Array, '*s']

  def __add__(self, other: 'Mean') -> 'Mean':
    # In half precision a count stops at 256.
    raised = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return Mean(raised(self.total) + raised(other.total), raised(self.count) + raised(other.count))

  @property
  def value(self) -> Float[Array, '*s']:
    """total / count, and 0 where count is 0 (nothing was accepted: no step, not NaN)."""
    return jnp.where(self.count > 0, self.total / jnp.where(self.count > 0, self.count, 1), 0)

  def over(self, axis_name: str | tuple[str, ...] | None) -> 'Mean':
    """The same mean over all devices of `axis_name` (all-reduce of two scalars)."""
    return self if axis_name is None else jax.lax.psum(self, axis_name)


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
  """What an engine stores of a next-token distribution, after temperature.

  Attributes:
    ids: the K likeliest tokens, in any order, none twice.
    logp: their log-probs in nats, float32; -inf where fewer than K have any mass (void id).
    tail: mass of all other tokens, >= 0, float32. Add it up: 1 - sum loses the digits of a small
      one. Exactly 0 where the stored tokens are the whole support.

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> trm.top_k(rollout, 2).ids
  Array([0, 1], dtype=int32)
  """

  ids: Int[Array, '*b K']
  logp: Float[Array, '*b K']
  tail: Float[Array, '*b']


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bracket:
  """lower <= truth <= upper per token; NaN in both where the record is no distribution.

  >>> trm.Bracket(lower=jnp.zeros(1), upper=jnp.ones(1)).upper
  Array([1.], dtype=float32)
  """

  lower: Float[Array, '*b']
  upper: Float[Array, '*b']


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
  """What the rollout side hands to the trainer; one row per sequence.

  Attributes:
    prompts: token ids, right-aligned in P slots.
    start: first real slot of the prompt. Attention masks by slot, never by token id, because a
      policy may well sample PAD before EOS.
    tokens: sampled token ids.
    valid: the policy's own tokens, EOS included; prompt, tool and padding slots are not.
    real: slots that hold a token at all, whoever wrote it: the policy's own and tool text between
      them. What is not real is padding, read as token 0. None: the policy wrote all there is.
    logits: full-vocabulary scores the tokens were drawn from, before temperature; None if not
      stored.
    hidden: final hidden states instead of logits (D numbers a token, not V); None if not stored.
    logp: log-probability of `tokens` as the engine reports it, after temperature. NaN = missing.
    routes: expert ids at every input slot 0..L-2 and layer; `routes[:, P-1+t]` is the route of the
      forward pass that scored `tokens[:, t]`. None for a dense policy.
    version: RL step of the weights that drew each token, as the engine *says*; padding slots hold
      that of a token there. A stuck replica is wrong.
    engine: index of the engine in the fleet, 0 = the first.
    reward: verified reward of the row.
    top: the likeliest tokens instead of logits, with the mass of the others; None if not stored.
    gates: weights of the experts in `routes`; None if not stored.

  >>> [field.name for field in dataclasses.fields(trm.Rollout)][:5]
  ['prompts', 'start', 'tokens', 'valid', 'logits']
  """

  prompts: Int[Array, 'B P']
  start: Int[Array, 'B']
  tokens: Int[Array, 'B T']
  valid: Bool[Array, 'B T']
  logits: Float[Array, 'B T V'] | None
  hidden: Float[Array, 'B T D'] | None
  logp: Float[Array, 'B T']
  routes: Int[Array, 'B Lm1 N K'] | None
  version: Int[Array, 'B T']
  engine: Int[Array, 'B']
  reward: Float[Array, 'B']
  top: TopK | None = None
  gates: Float[Array, 'B Lm1 N K'] | None = None
  real: Bool[Array, 'B T'] | None = None

  @property
  def context(self) -> Bool[Array, 'B T']:
    """Slots that later tokens were drawn after: `valid` ones and tool text."""
    return self.valid if self.real is None else self.real | self.valid


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Divergences:
  """Per-token statistics of the pair (policy, rollout); every criterion reads from here.

  Attributes:
    kl: KL(rollout || policy) in nats, >= 0, exact over the vocabulary, or a bound where the rollout
      stored its likeliest tokens alone; None where it stored sampled log-probs alone.
    tv: total variation in [0, 1], likewise.
    log_ratio: logp_policy - logp_rollout of the sampled token; NaN = missing.
    entropy: entropy of the policy in nats.
    chi2: sum policy^2 / rollout - 1 in [0, inf], exact; None unless statistics were taken `full`.
    square: sum policy^2 in [1 / V, 1], likewise; a baseline per token reads it.

  >>> kl = jnp.array([[.01, .02], [.01, .90]])
  >>> found = trm.Divergences(kl=kl, tv=kl / 2, log_ratio=kl, entropy=kl, chi2=kl)
  >>> found.kl.shape
  (2, 2)
  """

  kl: Float[Array, 'B T'] | None
  tv: Float[Array, 'B T'] | None
  log_ratio: Float[Array, 'B T']
  entropy: Float[Array, 'B T']
  chi2: Float[Array, 'B T'] | None = None
  square: Float[Array, 'B T'] | None = None


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
  """Everything exact about the pair (policy, rollout) at each position; float32, nats.

  Attributes:
    kl: KL(rollout || policy) in [0, inf].
    tv: total variation in [0, 1].
    entropy: entropy of the policy in [0, log V].
    policy_logp, rollout_logp: log-probs of the sampled token on both sides, in [-inf, 0].
    reverse_kl: KL(policy || rollout) in [0, inf]; None in the core set, as the rest.
    chi2: sum policy^2 / rollout - 1 in [0, inf].
    square: sum policy^2 in [1 / V, 1].

  >>> policy, rollout = jnp.log(jnp.array([.6, .25, .15])), jnp.log(jnp.array([.7, .2, .1]))
  >>> found = trm.statistics(policy, rollout, jnp.array(0))
  >>> f'{found.policy_logp:.4f} {found.rollout_logp:.4f}'
  '-0.5108 -0.3567'
  """

  kl: Float[Array, '*b']
  tv: Float[Array, '*b']
  entropy: Float[Array, '*b']
  policy_logp: Float[Array, '*b']
  rollout_logp: Float[Array, '*b']
  reverse_kl: Float[Array, '*b'] | None = None
  chi2: Float[Array, '*b'] | None = None
  square: Float[Array, '*b'] | None = None

  def divergences(self, rollout_logp: Float[Array, '*b'] | None = None) -> Divergences:
    """What criteria read, without gradient; log_ratio against `rollout_logp` where it is given.

    Give the engine's own report: a wrong report then shows in log_ratio beside an exact KL of 0.
    """
    reported = self.rollout_logp if rollout_logp is None else rollout_logp
    log_ratio = self.policy_logp - reported
    values = Divergences(self.kl, self.tv, log_ratio, self.entropy, self.chi2, self.square)
    return jax.lax.stop_gradient(values)
