"""What a rollout keeps of the distributions its tokens came from, and what can be judged from it.

| store                             | `logits` | `hidden` | `topk`  | `logp`  |
| --------------------------------- | -------- | -------- | ------- | ------- |
| bytes a token                     | 4 V      | 4 D      | 8 K + 4 | 0       |
| `max_kl`, `max_tv`, `mean_kl`     | exact    | exact    | bracket | refused |
| the first two with scope='prefix' | exact    | exact    | bracket | refused |
| `chi2_budget`                     | exact    | exact    | refused | refused |
| `max_k2`, `mean_k3`               | sampled  | sampled  | sampled | sampled |
| `length_neutral`,                 | sampled  | sampled  | sampled | sampled |
| `mean_deviation`                  |          |          |         |         |
| `accept` (a followed `max_kl`)    | exact    | exact    | bracket | refused |
| KL penalty to the reference       | exact    | exact    | exact   | exact   |

exact: of the full vocabulary. bracket: judged on a certified upper bound, so a row that is kept is
inside, whatever the engine left out (`Method.bound`; `acceptance/lower` counts the rows that may
be). sampled: read from the ratio of the drawn token; certifies nothing.

Hidden states are as exact as logits where the engine's scores are its head times them: each
engine's own head is needed beside them, and an engine that changes its scores afterwards (filters,
rounded or shifted scores) is refused. Only `logits` ever holds an array [B,T,V].
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax import divergences
from trm_jax.divergences import brackets, linear_head
from trm_jax.mesh import sharding
from trm_jax.objectives import Method
from trm_jax.rollouts.groups import apart, side_by_side
from trm_jax.rollouts.support import replay_support
from trm_jax.types import Divergences, InputError, Rollout, TopK

Store = Literal['logits', 'hidden', 'topk', 'logp']
Score = Literal['decode', 'replay']
STORES = ('logits', 'hidden', 'topk', 'logp')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """What a rollout keeps beside its tokens and their log-probs."""

  # Of the distribution each token is drawn from: see the table above.
  store: Store = 'logits'
  # Tokens that 'topk' keeps; all of a smaller vocabulary.
  top: int = 64
  # The weights of the experts as well as their numbers.
  gates: bool = False
  # Whether scores and log-probs are those of decoding, or of the engine's own full pass.
  score: Score = 'decode'


# What a criterion may read of each store's record.
_READS = {'topk': ('sampled', 'bracket'), 'logp': ('sampled',)}


def check_method(store: Store, method: Method) -> None:
  """Raises InputError where a method's masks, or its bound, cannot be judged from this store."""
  for mask in method.masks:
    if mask.reads not in _READS.get(store, ('sampled', 'bracket', 'exact')):
      remedy = f"store='hidden' or {'logits' if mask.reads == 'exact' else 'topk'!r}"
      if store == 'logp':
        remedy += ', or the sampled method.max_k2 or method.mean_k3'
      raise InputError(
        f'method.{mask.name}={mask.limit} cannot be judged from store={store!r}, which keeps too'
        f' little of each distribution; use {remedy}.'
      )
  if method.bound == 'lower' and store != 'topk':
    raise InputError(
      f"method.bound='lower' chooses between the bounds of store='topk'; store={store!r} has none."
    )


def bytes_per_token(store: Store, *, vocab: int, width: int, top: int) -> int:
  """Bytes that a store adds to a token of a rollout, beside its id, mask and log-prob."""
  kept = min(top, vocab)
  return {'logits': 4 * vocab, 'hidden': 4 * width, 'topk': 8 * kept + 4, 'logp': 0}[store]


def describe(store: Store, *, tokens: int, vocab: int, width: int, top: int) -> str:
  """One line: bytes a token and in all for `tokens` response slots, beside the other stores."""
  size = lambda name: bytes_per_token(name, vocab=vocab, width=width, top=top)
  total = f'{size(store) * tokens / 2**20:,.3f} MiB'
  others = ', '.join(f'{name} {size(name):,}' for name in STORES if name != store)
  return f'store {store}: {size(store):,} bytes a token, {total} for {tokens:,} tokens ({others})'


def blank(
  store: Store, slots: Int[Array, 'B T'], *, vocab: int, width: int, top: int
) -> Array | TopK | None:
  """Zeros for every slot of a rollout, laid out like `slots`, which are zeros."""
  real = slots.astype(jnp.float32)
  wide = lambda x, n: x[:, :, None] * jnp.zeros((1, 1, n), x.dtype)
  if store == 'topk':
    kept = min(top, vocab)
    return TopK(ids=wide(slots, kept), logp=wide(real, kept), tail=real)
  return wide(real, {'logits': vocab, 'hidden': width}[store]) if store != 'logp' else None


def record(
  store: Store,
  scores: Float[Array, '*b V'],
  hidden: Float[Array, '*b D'],
  *,
  temperature: float,
  top: int,
) -> Array | TopK | None:
  """What is kept of a slot, given the scores its token is drawn from, before temperature."""
  if store != 'topk':
    return {'logits': scores, 'hidden': hidden, 'logp': None}[store]

  def likeliest(scores):
    return brackets.top_k(scores, min(top, scores.shape[-1]), temperature=temperature)

  return sharding.over_rows(likeliest)(scores)


def fields(store: Store, kept: Array | TopK | None) -> dict:
  """The fields of a `Rollout` that hold it."""
  holders = dict.fromkeys(('logits', 'hidden', 'top'))
  return holders | ({} if store == 'logp' else {'top' if store == 'topk' else store: kept})


class Compared(NamedTuple):
  """Policy against rollout, from whatever was stored.

  Attributes:
    logp: the policy's log-prob of each token; carries the gradient.
    divergences: what criteria read, detached: exact, upper bounds (top-K), or without KL and TV.
    lower: the same with lower bounds, for a top-K record alone.
    stored_logp: the rollout's log-prob of each token as what was stored has it, detached; None
      where the engine's report is all there is.
  """

  logp: Float[Array, 'B T']
  divergences: Divergences
  lower: Divergences | None = None
  stored_logp: Float[Array, 'B T'] | None = None


def compare(
  hidden: Float[Array, 'B T D'],
  head: Float[Array, 'V D'],
  rollout: Rollout,
  *,
  heads: tuple[Float[Array, 'V E'], ...] = (),
  shares: tuple[int, ...] = (),
  temperature: float = 1.0,
  full: bool = False,
  support: bool = False,
  axis_name: str | None = None,
) -> Compared:
  """The policy `hidden` @ `head` against what the rollout stored; scores exist in chunks only.

  For stored hidden states `heads` are the engines' own output heads, in the order in which their
  rows stand in the group of a prompt, and `shares` how many rows each has there. `full` adds chi2.
  With `support` the policy is conditioned on the tokens that stored logits allow (-inf: not), and
  scores exist whole. Gradient from `logp` to `hidden` and `head`. Raises InputError where heads are
  missing, or logits for `support`.
  """
  shared = dict(temperature=temperature, axis_name=axis_name)
  of = lambda logp, entropy, kl=None, tv=None: jax.lax.stop_gradient(
    Divergences(kl, tv, logp - rollout.logp, entropy)
  )
  exact = lambda pair: Compared(
    pair.policy_logp,
    pair.divergences(rollout.logp),
    stored_logp=jax.lax.stop_gradient(pair.rollout_logp),
  )
  if support:
    if rollout.logits is None:
      raise InputError(
        "support=True reads from logits which tokens were possible; use store='logits'."
      )
    scores = replay_support(linear_head.project(hidden, head), rollout.logits)
    pair = divergences.statistics(scores, rollout.logits, rollout.tokens, full=full, **shared)
    return exact(pair)
  if rollout.logits is not None:
    pair = linear_head.statistics(
      hidden, head, rollout.tokens, rollout_logits=rollout.logits, full=full, **shared
    )
    return exact(pair)
  if rollout.hidden is not None:
    if not heads or len(heads) != len(shares):
      raise InputError(
        f'heads holds {len(heads)} output heads for {len(shares)} engines: hidden states say'
        ' nothing without the head of the engine they come from; pass one for each.'
      )
    rows = apart((hidden, rollout.tokens, rollout.hidden), shares)
    parts = [
      linear_head.statistics(
        mine, head, tokens, rollout_hidden=other, rollout_head=its, full=full, **shared
      )
      for (mine, tokens, other), its in zip(rows, heads, strict=True)
    ]
    pair = side_by_side(parts, hidden.shape[0] // sum(shares))
    return exact(pair)
  if rollout.top is not None:
    kl, tv, logp, entropy = linear_head.brackets(
      hidden, head, rollout.tokens, rollout.top, **shared
    )
    return Compared(
      logp, of(logp, entropy, kl.upper, tv.upper), of(logp, entropy, kl.lower, tv.lower)
    )
  logp, entropy = linear_head.logp(hidden, head, rollout.tokens, **shared)
  return Compared(logp, of(logp, entropy))
