"""Every sequence that two small policies can write, as a tree of prefixes with exact probabilities.

A policy is one table of logits [X, C, V]: for each of X prompts the C = 1 + V + .. + V**(T-1)
prefixes y_<t, shortest first and in lexicographic order, and the scores of the next token. Number c
of length t with next token v is number c * V + v of length t + 1, and those of length T are the
S = V**T sequences. EOS is an action; after it both policies write EOS again with probability 1
(ratio 1, divergences 0), so that responses of every length are leaves of one complete tree. Other
leaves behind an EOS have probability 0 and reward 0.

Shapes depend on (X, V, T) alone: a function compiled for one world serves all of its shape, and
`jax.vmap` takes a batch of them (leading axes). Everything is float64 within `float64()`, which
leaves callers outside, and other threads, in float32. Arrays made inside stay float64, but jax
rounds what is computed from them outside: take `float(x)` or `numpy.asarray(x)` there.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from trm_jax.types import Divergences, InputError

MAX_SEQUENCES = 10_000_000  # X * V**T of one world, or of a batch together
BYTES_PER_SEQUENCE = 300  # held at once by all quantities and gradients in one program (measured)


def float64():
  """Context in which jax computes in float64, as everything exact does.

  >>> with trm.float64():
  ...   dtype = jnp.zeros(1, float).dtype
  >>> dtype
  dtype('float64')
  """
  return jax.enable_x64(True)


@typing.no_type_check  # trees of it may be stacked, abstract or specs
@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['policy', 'rollout', 'reward', 'prompts'],
  meta_fields=['eos', 'reward_range'],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
  """A pair of policies, the prompts and the reward; made by `world`, which checks them.

  Attributes:
    policy, rollout: logits after every prefix.
    reward: of every sequence; 0 where a sequence goes on after EOS.
    prompts: probability of each prompt.
    eos: the token that ends a response; None = all have length T.
    reward_range: (lowest, highest) reward there can be.

  >>> logits = np.log([[[.6, .4], [.5, .5], [.5, .5]]])  # two tokens, two positions
  >>> with trm.float64():
  ...   world = trm.world(logits, 0 * logits, horizon=2, reward=np.array([[1., 1, 0, 0]]))
  ...   print(f'{trm.policy_objective(world):.2f}')
  0.60
  """

  policy: Float[Array, 'X C V']
  rollout: Float[Array, 'X C V']
  reward: Float[Array, 'X S']
  prompts: Float[Array, 'X']
  eos: int | None
  reward_range: tuple[float, float]


class Tree(typing.NamedTuple):
  """Both policies after every prefix; float64.

  `log_ratio` = log policy - log rollout, 0 where neither has mass; `excess` = ratio - 1, and 0
  where the rollout has no mass, which E_roll never sees. `alive`: the response has not ended.
  """

  rollout: Float[Array, 'X C V']
  policy: Float[Array, 'X C V']
  log_ratio: Float[Array, 'X C V']
  excess: Float[Array, 'X C V']
  alive: Bool[Array, 'C']


class Contexts(typing.NamedTuple):
  """Statistics of every prefix; divergences are 0 after EOS.

  Attributes:
    kl, reverse_kl: KL(rollout || policy), KL(policy || rollout) in [0, inf] (eq. 5).
    tv: total variation in [0, 1] (eq. 4).
    chi2: sum policy^2 / rollout - 1 in [0, inf].
    entropy: of the policy, nats.
    rollout_visits, policy_visits: d_t(c) = P(x) prod_{s<t} pi(y_s|c_s); 1 in all at each t (eq. 1).
    prefix_ratio: prod_{s<t} ratio_s, of prefixes that the rollout can write.
    chi2_spent: sum_{s<=t} chi2(c_s), own prefix included.
  """

  kl: Float[Array, 'X C']
  reverse_kl: Float[Array, 'X C']
  tv: Float[Array, 'X C']
  chi2: Float[Array, 'X C']
  entropy: Float[Array, 'X C']
  rollout_visits: Float[Array, 'X C']
  policy_visits: Float[Array, 'X C']
  prefix_ratio: Float[Array, 'X C']
  chi2_spent: Float[Array, 'X C']

  @property
  def reachable(self) -> Bool[Array, 'X C']:
    """Prefixes that either policy can write: the maxima of eq. 6 range over them."""
    return (self.rollout_visits > 0) | (self.policy_visits > 0)


class Rows(typing.NamedTuple):
  """All N = X * V**T sequences as if they were one batch, with their probabilities.

  A criterion of `masks` takes (divergences, valid) as from any rollout, and the exact
  expectation of a statistic s under the rollout is (rollout_mass * s).sum().
  """

  rollout_mass: Float[Array, 'N']
  policy_mass: Float[Array, 'N']
  divergences: Divergences
  valid: Bool[Array, 'N T']
  reward: Float[Array, 'N']


def _check_size(prompts: int, vocab: int, horizon: int, eos: int | None, worlds: int = 1) -> None:
  for name, value in (('horizon', horizon), ('vocab', vocab), ('prompts', prompts)):
    if value < 1:
      raise InputError(f'{name}={value} must be at least 1: there is nothing to enumerate.')
  if eos is not None and not 0 <= eos < vocab:
    raise InputError(f'eos={eos} must be a token in 0..{vocab - 1}, or None for one fixed length.')
  count = worlds * prompts * vocab**horizon
  if count > MAX_SEQUENCES:
    gib = count * BYTES_PER_SEQUENCE / 2**30
    raise InputError(
      f'prompts={prompts}, vocab={vocab} and horizon={horizon} make {count:.3g} sequences, about'
      f' {gib:.3g} GiB of memory: stay within {MAX_SEQUENCES} by a smaller vocabulary, horizon or'
      ' batch.'
    )


def _require_float64() -> None:
  if not jax.config.jax_enable_x64:
    raise InputError(
      'The exact enumeration is in float64, but jax is in float32 here: call it inside `with'
      ' enumeration.float64():`.'
    )


def size(*, vocab: int, horizon: int) -> int:
  """C, the number of prefixes shorter than the horizon."""
  return sum(vocab**t for t in range(horizon))


def lengths(table: Array) -> list[slice]:
  """Where the prefixes of each length t = 0..T-1 stand in a table [X, C, V]."""
  spans, start, count = [], 0, 1
  while start < table.shape[1]:
    spans.append(slice(start, start + count))
    start, count = start + count, count * table.shape[2]
  return spans


def sequences(
  *, vocab: int, horizon: int, eos: int | None = None
) -> tuple[Int[np.ndarray, 'S T'], Bool[np.ndarray, 'S T'], Bool[np.ndarray, 'S']]:
  """(tokens [V**T, T], valid [V**T, T], possible [V**T]) of all sequences in order, NumPy.

  valid: slots up to EOS, itself included. possible: nothing but EOS follows an EOS. Raises
  InputError for an impossible size.
  """
  _check_size(1, vocab, horizon, eos)
  tokens = np.indices((vocab,) * horizon, np.int32).reshape(horizon, -1).T
  ends = np.zeros(tokens.shape, bool) if eos is None else tokens == eos
  valid = np.cumsum(ends, -1) - ends == 0
  return tokens, valid, (valid | ends).all(-1)


def tabulate(
  logits_of: Callable[[Int[Array, 'B L']], Float[Array, 'B V']],
  prompts: Int[Array, 'X P'] | Int[np.ndarray, 'X P'],
  *,
  vocab: int,
  horizon: int,
  eos: int | None = None,
) -> Float[Array, 'X C V']:
  """The table of logits, float64, of a policy given as a function.

  `logits_of` takes prompts with the response so far, [X * V**t, P + t] token ids, int32, rows of
  one prompt adjoining, and scores the next token in any float dtype; it is called once for each t.
  Prompts of shape [1, 0] stand for none. Gradients flow through it. Raises InputError for
  impossible sizes, scores of a wrong shape, and outside `float64()`.
  """
  _require_float64()
  count = prompts.shape[0]
  _check_size(count, vocab, horizon, eos)
  table = []
  for t in range(horizon):
    prefixes = np.indices((vocab,) * t, np.int32).reshape(t, vocab**t).T
    rows = jnp.concatenate(
      [
        jnp.repeat(jnp.asarray(prompts, jnp.int32), vocab**t, 0),
        jnp.tile(jnp.asarray(prefixes), (count, 1)),
      ],
      1,
    )
    scores = logits_of(rows)
    if scores.shape != (rows.shape[0], vocab):
      raise InputError(
        f'logits_of returned shape {scores.shape} for tokens {rows.shape}: it must score the next'
        f' token of each row, {(rows.shape[0], vocab)}.'
      )
    table.append(scores.astype(jnp.float64).reshape(count, vocab**t, vocab))
  return jnp.concatenate(table, 1)


def world(
  policy: Float[Array, '...'] | np.ndarray,
  rollout: Float[Array, '...'] | np.ndarray,
  *,
  horizon: int,
  reward: Float[Array, '...'] | np.ndarray | Callable,
  prompts: Float[Array, '...'] | np.ndarray | None = None,
  eos: int | None = None,
  reward_range: tuple[int | float, int | float] = (0.0, 1.0),
) -> World:
  """A checked `World`, everything as float64.

  `policy`, `rollout`: logits [X, C, V], -inf for tokens without mass. `reward`: [X, V**T] within
  `reward_range`, or a function of (prompt number, tokens [S, T], valid [S, T]) -> [S] in NumPy,
  called once a prompt with the possible sequences. `prompts`: probabilities [X], uniform by
  default. Leading axes before X, of all arrays, make a batch for `jax.vmap`. Values are checked
  unless they are traced. Raises InputError.

  >>> logits = np.log([[[.6, .4], [.5, .5], [.5, .5]]])  # two tokens, two positions
  >>> with trm.float64():
  ...   world = trm.world(logits, 0 * logits, horizon=2, reward=np.array([[1., 1, 0, 0]]))
  >>> world.policy.shape
  (1, 3, 2)
  """
  _require_float64()
  if policy.ndim < 3 or policy.shape != rollout.shape:
    raise InputError(
      f'policy has shape {policy.shape} and rollout {rollout.shape}; both must be logits [X, C, V].'
    )
  *batch, count, _, vocab = policy.shape
  _check_size(count, vocab, horizon, eos, math.prod(batch))
  if policy.shape[-2] != size(vocab=vocab, horizon=horizon):
    raise InputError(
      f'policy scores {policy.shape[-2]} prefixes, but vocab={vocab} and horizon={horizon} have'
      f' {size(vocab=vocab, horizon=horizon)}.'
    )
  tokens, valid, possible = sequences(vocab=vocab, horizon=horizon, eos=eos)
  if callable(reward):
    values = np.zeros((count, possible.size))
    for x in range(count):
      values[x, possible] = reward(x, tokens[possible], valid[possible])
    reward = np.broadcast_to(values, (*batch, *values.shape))
  if prompts is None:
    prompts = np.full((*batch, count), 1 / count)
  for name, x, shape in (
    ('reward', reward, (*batch, count, possible.size)),
    ('prompts', prompts, (*batch, count)),
  ):
    if x.shape != shape:
      raise InputError(f'{name} has shape {x.shape}; make it {shape}.')
  allowed = jnp.broadcast_to(jnp.asarray(possible), reward.shape)
  made = World(
    policy=jnp.asarray(policy, jnp.float64),
    rollout=jnp.asarray(rollout, jnp.float64),
    reward=jnp.where(allowed, jnp.asarray(reward, jnp.float64), 0),
    prompts=jnp.asarray(prompts, jnp.float64),
    eos=eos,
    reward_range=tuple(float(x) for x in reward_range),
  )
  if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(made)):
    _check_values(made, possible)
  return made


def _check_values(made: World, possible: Bool[np.ndarray, 'S']) -> None:
  for name in ('policy', 'rollout'):
    logits = getattr(made, name)
    finite = jnp.isfinite(logits)  # no maximum: on CPUs XLA's drops NaN from large arrays
    if not bool((finite | (logits == -jnp.inf)).all() & finite.any(-1).all()):
      raise InputError(
        f'{name} has a prefix whose largest logit is not finite: remove NaN and inf, and give each'
        ' prefix a token with mass.'
      )
  low, high = made.reward_range
  if not -np.inf < low < high < np.inf:
    raise InputError(f'reward_range={made.reward_range} must be two finite numbers, lowest first.')
  reward = np.asarray(made.reward)[..., possible]
  if not (reward.min() >= low and reward.max() <= high):
    raise InputError(
      f'reward spans {reward.min():.6g}..{reward.max():.6g}, outside reward_range={low}..{high}:'
      ' rescale it, remove NaN, or state its range.'
    )
  weights = np.asarray(made.prompts)
  if not ((weights >= 0).all() and np.allclose(weights.sum(-1), 1, rtol=0, atol=1e-9)):
    raise InputError(
      f'prompts has weights from {weights.min():.6g} on and sums up to {weights.sum(-1).max():.6g}:'
      ' pass probabilities >= 0 that sum to 1.'
    )


def descend(
  root: Shaped[Array, 'X'], steps: Shaped[Array, 'X C V'], op: Callable = jnp.multiply
) -> tuple[Shaped[Array, 'X C'], Shaped[Array, 'X S']]:
  """Running product (or `op`) of `steps` along every path from `root`: (prefixes, sequences)."""
  values = [root[:, None]]
  for span in lengths(steps):
    values.append(op(values[-1][..., None], steps[:, span]).reshape(root.shape[0], -1))
  return jnp.concatenate(values[:-1], 1), values[-1]


def ascend(leaves: Float[Array, 'X S'], weights: Float[Array, 'X C V']) -> Float[Array, 'X C V']:
  """E[leaf | prefix and next token] under next-token probabilities `weights`."""
  values, value = [], leaves
  for span in reversed(lengths(weights)):
    weight = weights[:, span]
    values.append(value.reshape(weight.shape))
    value = (weight * values[-1]).sum(-1)
  return jnp.concatenate(values[::-1], 1)


def tree(world: World) -> Tree:
  """Both policies' probabilities and ratios after every prefix. Gradients flow into both logits.

  Raises InputError outside `float64()`.
  """
  _require_float64()
  log_q, log_p = jax.nn.log_softmax(world.policy), jax.nn.log_softmax(world.rollout)
  alive = np.ones(world.policy.shape[1], bool)
  if world.eos is not None:
    is_eos = np.arange(world.policy.shape[2]) == world.eos
    spans = lengths(world.policy)
    for before, after in itertools.pairwise(spans):
      alive[after] = (alive[before, None] & ~is_eos).reshape(-1)
    ended = np.where(is_eos, 0.0, -np.inf)[None, None]
    log_q, log_p = (jnp.where(alive[None, :, None], x, ended) for x in (log_q, log_p))
  in_q, in_p = log_q != -jnp.inf, log_p != -jnp.inf  # NaN stays NaN
  both = in_q & in_p
  # Neither branch of a `where` may hold inf - inf, in a gradient either.
  gap = jnp.where(both, log_q, 0) - jnp.where(both, log_p, 0)
  log_ratio = jnp.where(both, gap, jnp.where(in_q, jnp.inf, jnp.where(in_p, -jnp.inf, 0)))
  excess = jnp.where(both, jnp.expm1(gap), jnp.where(in_p, -1.0, 0))
  return Tree(jnp.exp(log_p), jnp.exp(log_q), log_ratio, excess, jnp.asarray(alive))


def weighted(weight: Array, value: Array) -> Array:
  """weight * value with 0 * inf = 0."""
  return jnp.where(weight > 0, weight * jnp.where(weight > 0, value, 0), 0)


def contexts(world: World) -> Contexts:
  """Statistics of every prefix; float64, nats.

      KL = sum_v p (r - 1 - log r) + sum_{p=0} q,   r = q / p,   p the rollout, q the policy

  Gradients flow into both logits. Raises InputError outside `float64()`.
  """
  p, q, log_ratio, excess, _ = tree(world)
  off = jnp.where(p > 0, 0, q)
  # Rounding of r - 1 - log r may fall below 0 where r is 1 to the last digit; NaN stays NaN.
  positive = lambda x: jnp.where(x < 0, 0, x)
  kl = weighted(p, positive(excess - log_ratio)).sum(-1) + off.sum(-1)
  chi2 = jnp.where(off.any(-1), jnp.inf, (p * excess**2).sum(-1))
  spent, _ = descend(
    jnp.zeros_like(world.prompts), jnp.broadcast_to(chi2[..., None], p.shape), jnp.add
  )
  return Contexts(
    kl=kl,
    reverse_kl=positive(weighted(q, log_ratio).sum(-1)),
    tv=0.5 * jnp.abs(q - p).sum(-1),
    chi2=chi2,
    entropy=-weighted(q, jnp.log(jnp.where(q > 0, q, 1))).sum(-1),
    rollout_visits=descend(world.prompts, p)[0],
    policy_visits=descend(world.prompts, q)[0],
    prefix_ratio=descend(jnp.ones_like(world.prompts), 1 + excess)[0],
    chi2_spent=spent + chi2,
  )


def rows(world: World) -> Rows:
  """Every sequence as a row of one batch: V**T * T numbers a statistic, so for small worlds."""
  prefixes, stats, spans = tree(world), contexts(world), lengths(world.policy)
  leaves = world.reward.shape[1]

  def column(values: Array) -> Array:
    """[N, T] from values [X, C] of prefixes or [X, C, V] of the tokens after them."""
    at = [values[:, span].reshape(values.shape[0], -1) for span in spans]
    return jnp.stack([jnp.repeat(x, leaves // x.shape[1], 1).reshape(-1) for x in at], -1)

  divergences = Divergences(
    kl=column(stats.kl),
    tv=column(stats.tv),
    log_ratio=column(prefixes.log_ratio),
    entropy=column(stats.entropy),
    chi2=column(stats.chi2),
  )
  return Rows(
    rollout_mass=descend(world.prompts, prefixes.rollout)[1].reshape(-1),
    policy_mass=descend(world.prompts, prefixes.policy)[1].reshape(-1),
    divergences=divergences,
    valid=column(jnp.broadcast_to(prefixes.alive[None], stats.kl.shape)),
    reward=world.reward.reshape(-1),
  )
