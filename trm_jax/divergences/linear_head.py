"""The statistics of `divergences` straight from hidden states and output heads: no [B,T,V] exists.

    statistics    policy hidden + head against rollout logits, or rollout hidden + head
    brackets      against the rollout's top-K log-probs and tail mass: lower and upper bounds
    logp          of the policy alone, where the rollout reported only sampled log-probs
    kl_from       KL(policy || reference) with its gradient: the penalty that holds a policy back

Scores exist only inside a chunk of rows (forward) or of the vocabulary (backward), or, on a TPU, in
a kernel's fast memory. Gradients flow from log-probs and entropy to `hidden` and `head`; the
divergences of the first two carry none: they build masks. Under `shard_map` with rows over one axis
and the head's rows over another, the sums over devices that the gradient needs follow from the
operands' types.

What is recomputed from hidden states is what *this* head makes of them: a mismatch inside the
engine's own head (its dtype, its kernel) shows only in logits that the engine stored.

Rows of the heads from `vocab_size` on, a static number, pad the vocabulary: they score no token,
whatever they hold, and their gradient is 0. Tokens outside the vocabulary, such as
-100, have NaN log-probs.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax.divergences import full_logits
from trm_jax.divergences.brackets import bounds as bracket_bounds
from trm_jax.divergences.passes import blocks, kernels, pair, vocabulary
from trm_jax.types import Bracket, InputError, Statistics, TopK

# Entries of one chunk of scores: 32 MiB of float32.
CHUNK = 2**23
# A given normaliser may miss by so much; rounded to float32 near 1e4, it does by half.
MASS_ERROR = 1e-3


class _Rollout(NamedTuple):
  """Scores of the rollout, or what makes them."""

  logits: Array | None = None
  hidden: Array | None = None
  head: Array | None = None
  lse: Array | None = None
  top: TopK | None = None


def project(hidden: Float[Array, '*n D'], head: Float[Array, 'V D']) -> Float[Array, '*n V']:
  """Scores hidden @ head.T in float32; two bfloat16 operands are multiplied as such."""
  low = hidden.dtype == head.dtype == jnp.bfloat16
  if not low:
    hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
  return jnp.einsum(
    '...d,vd->...v',
    hidden,
    head,
    precision=None if low else 'float32',
    preferred_element_type=jnp.float32,
  )


def _check(temperature, hidden, head, tokens, vocab_size, axis_name, side='rollout', **rollout):
  pairs = {'hidden': (hidden, 'head', head)}
  states, table = (rollout.get(f'{side}_{part}') for part in ('hidden', 'head'))
  if states is not None or table is not None:
    pairs[f'{side}_hidden'] = (states, f'{side}_head', table)
  for name, (states, head_name, table) in pairs.items():
    if states is None or table is None:
      missing = name if states is None else head_name
      raise InputError(f'{missing}=None: {name} and {head_name} belong together; give both.')
    if table.ndim != 2 or states.shape[-1:] != table.shape[1:]:
      raise InputError(
        f'{name} has shape {states.shape} and {head_name} {table.shape}: {head_name} must be [V, D]'
        f' with the D of {name}; transpose it if it is [D, V].'
      )
    for part, x in ((name, states), (head_name, table)):
      if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f'{part} has dtype {x.dtype}: pass float32 or bfloat16.')
    if states.shape[:-1] != hidden.shape[:-1]:
      raise InputError(
        f'{name} has shape {states.shape} and hidden {hidden.shape}: the positions must agree.'
      )
    if (vocab_size is None or axis_name) and table.shape[0] != head.shape[0]:
      raise InputError(
        f'{head_name} scores {table.shape[0]} tokens and head {head.shape[0]}: both must score the'
        ' same vocabulary; give vocab_size if they are padded.'
      )
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    full_logits.check_vocab_size(vocab_size, table.shape[0] * devices, head_name)
  scores = jax.ShapeDtypeStruct((*hidden.shape[:-1], head.shape[0]), jnp.float32)
  others = {k: v for k, v in rollout.items() if k == 'rollout_logits' and v is not None}
  place = dict(vocab_size=vocab_size, axis_name=axis_name)
  full_logits.check_logits(temperature, tokens, **place, **{'hidden @ head.T': scores}, **others)


def statistics(
  hidden: Float[Array, '*b D'],
  head: Float[Array, 'V D'],
  tokens: Int[Array, '*b'],
  *,
  rollout_logits: Float[Array, '*b W'] | None = None,
  rollout_hidden: Float[Array, '*b E'] | None = None,
  rollout_head: Float[Array, 'W E'] | None = None,
  rollout_lse: Float[Array, '*b'] | None = None,
  temperature: float | Float[Array, ''] = 1.0,
  full: bool = False,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Statistics:
  """`divergences.statistics` of hidden @ head.T against the rollout, in chunks; float32, nats.

  The rollout is given by its logits, or by its hidden states and head. `rollout_lse`, the logsumexp
  of its logits over the temperature, spares a TPU one pass over them (4 bytes a token at sampling
  time); a value that does not normalise them gives NaN there.

  Gradients: policy_logp and entropy to `hidden` and `head`, recomputed over blocks of the
  vocabulary. With `axis_name`, `head` and the rollout's logits or head are this device's rows or
  columns of the vocabulary. arXiv 2512.23075, eq. 4 and 5. Raises InputError for shapes that do not
  fit or where the rollout is given twice or not at all.

  >>> hidden, head = jnp.ones((3, 2)), jnp.eye(5, 2)  # three positions, five tokens
  >>> tokens = jnp.array([0, 1, 4])
  >>> engine = dict(rollout_hidden=2 * hidden, rollout_head=head)
  >>> found = trm.hidden_statistics(hidden, head, tokens, **engine)
  >>> np.asarray(found.kl).round(3)
  array([0.086, 0.086, 0.086], dtype=float32)
  """
  if (rollout_logits is None) == (rollout_hidden is None and rollout_head is None):
    raise InputError(
      'rollout_logits and rollout_hidden/rollout_head: give exactly one of the two; for sampled'
      ' log-probs alone use logp, for top-K log-probs brackets.'
    )
  _check(
    temperature,
    hidden,
    head,
    tokens,
    vocab_size,
    axis_name,
    rollout_logits=rollout_logits,
    rollout_hidden=rollout_hidden,
    rollout_head=rollout_head,
  )
  rollout = _Rollout(rollout_logits, rollout_hidden, rollout_head, rollout_lse)
  return _positions(hidden, head, tokens, rollout, temperature, full, vocab_size, axis_name)[0]


def brackets(
  hidden: Float[Array, '*b D'],
  head: Float[Array, 'V D'],
  tokens: Int[Array, '*b'],
  top: TopK,
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> tuple[Bracket, Bracket, Float[Array, '*b'], Float[Array, '*b']]:
  """(bounds of KL, bounds of TV, log-prob of each token, entropy of the policy); nats, float32.

  Against a rollout of which only the top-K log-probs and the tail mass were stored; see
  `brackets`. Gradients of log-prob and entropy to `hidden` and `head`; the bounds carry
  none. Raises InputError for shapes that do not fit.

  >>> hidden, head = jnp.ones((1, 2)), jnp.eye(5, 2)
  >>> top = trm.top_k(2 * hidden @ head.T, 2)
  >>> kl, tv, logp, entropy = trm.hidden_brackets(hidden, head, jnp.array([0]), top)
  >>> f'{kl.lower[0]:.3f} <= KL <= {kl.upper[0]:.3f}'
  '0.086 <= KL <= 0.271'
  """
  _check(temperature, hidden, head, tokens, vocab_size, axis_name)
  rollout = _Rollout(top=top)
  static = False, vocab_size, axis_name
  values, bounds = _positions(hidden, head, tokens, rollout, temperature, *static)
  return *bounds, values.policy_logp, values.entropy


def logp(
  hidden: Float[Array, '*b D'],
  head: Float[Array, 'V D'],
  tokens: Int[Array, '*b'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> tuple[Float[Array, '*b'], Float[Array, '*b']]:
  """(log-prob of each token in [-inf, 0], entropy in [0, log V]) of the policy; nats, float32.

  Gradients of both to `hidden` and `head`. With `axis_name`, 2 all-reduces of 4 floats a position.

  >>> hidden, head = jnp.ones((2, 2)), jnp.eye(5, 2)
  >>> logp, entropy = trm.hidden_logp(hidden, head, jnp.array([0, 4]))
  >>> np.asarray(logp).round(3)
  array([-1.133, -2.133], dtype=float32)
  """
  _check(temperature, hidden, head, tokens, vocab_size, axis_name)
  rollout = _Rollout()
  static = False, vocab_size, axis_name
  values, _ = _positions(hidden, head, tokens, rollout, temperature, *static)
  return values.policy_logp, values.entropy


def kl_from(
  hidden: Float[Array, '*b D'],
  head: Float[Array, 'V D'],
  reference_hidden: Float[Array, '*b E'],
  reference_head: Float[Array, 'W E'],
  *,
  temperature: float | Float[Array, ''] = 1.0,
  vocab_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, '*b']:
  """KL(policy || reference) per position in nats, in [0, inf], float32, scores in chunks only.

  Gradient to `hidden` and `head` of the policy, recomputed chunk by chunk; none to the reference.
  Raises InputError for shapes that do not fit.
  """
  reference = dict(reference_hidden=reference_hidden, reference_head=reference_head)
  _check(temperature, hidden, head, None, vocab_size, axis_name, 'reference', **reference)
  reference_hidden, reference_head = jax.lax.stop_gradient((reference_hidden, reference_head))
  if vocab_size is not None:
    # The gradient multiplies every row of the head with its slope, and 0 * NaN is NaN.
    head = _rows(head, vocabulary.real_entries(head.shape[0], vocab_size, axis_name))
  hidden, head, reference_hidden, reference_head = blocks.match_varying(
    hidden, head, reference_hidden, reference_head
  )

  @jax.checkpoint
  def chunk(hidden, reference_hidden):
    # `divergences.kl` is KL(rollout || policy): the policy stands where the rollout did.
    return full_logits.kl(
      project(reference_hidden, reference_head),
      project(hidden, head),
      temperature=temperature,
      vocab_size=vocab_size,
      axis_name=axis_name,
    )

  by_rows = functools.partial(blocks.by_rows, chunk, rows=blocks.rows_of(head.shape[0], CHUNK))
  return blocks.flat(by_rows, hidden.ndim - 1)(hidden, reference_hidden)


def _positions(hidden, head, tokens, rollout, temperature, *static):
  """(statistics, bounds) of flat positions, back in the shape of `tokens`."""
  n, shape = tokens.ndim, tokens.shape
  rows = lambda tree: jax.tree.map(lambda x: x.reshape(math.prod(shape), *x.shape[n:]), tree)
  rollout = jax.lax.stop_gradient(rows(rollout._replace(head=None))._replace(head=rollout.head))
  # Operands that differ over the same axes: their cotangents then sum over devices by themselves.
  hidden, head, *_ = blocks.match_varying(rows(hidden), head, *jax.tree.leaves(rollout))
  # -1 stands for no token, which unsigned integers lack.
  tokens, temperature = rows(tokens).astype(jnp.int32), full_logits.static(temperature)
  (values, bounds), seeds = _statistics(hidden, head, tokens, rollout, temperature, *static)
  values = full_logits.with_gradient(values, seeds, head, static[-1])
  return jax.tree.map(lambda x: x.reshape(shape), (values, bounds))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _statistics(hidden, head, tokens, rollout, temperature, *static):
  return _forward(hidden, head, tokens, rollout, temperature, *static)[0]


def _forward(hidden, head, tokens, rollout, temperature, full, vocab_size, axis_name):
  args = hidden, head, tokens, rollout, temperature
  options = dict(full=full, vocab_size=vocab_size, axis_name=axis_name)
  chunked = functools.partial(_by_chunks, **options)
  if rollout.top is not None or hidden.shape[0] * head.shape[0] < pair.SMALL:
    policy, *outputs = chunked(*args)
  else:
    kernel = functools.partial(_by_kernel, **options)
    policy, *outputs = jax.lax.platform_dependent(*args, tpu=kernel, default=chunked)
  seed = pair.seed(hidden[..., 0], head[0, 0])
  if axis_name is not None and axis_name not in blocks.varying(head):
    # `vmap` refuses outputs that are shared between devices beside operands that are not.
    outputs = jax.tree.map(lambda x: x + seed, outputs)
  return (tuple(outputs), (seed, seed)), (hidden, head, tokens, temperature, policy)


def _by_chunks(hidden, head, tokens, rollout, temperature, *, full, axis_name, vocab_size=None):
  """(policy side, statistics, bounds): scores of a chunk of rows at a time, all tokens."""

  def chunk(hidden, tokens, rollout):
    scores = project(hidden, head)
    logits = rollout.logits
    if rollout.hidden is not None:
      logits = project(rollout.hidden, rollout_head)
    if logits is not None:
      both = scores, logits, tokens, temperature, axis_name
      sides = pair.compare(*both, full=full, vocab_size=vocab_size)
      return sides[0], full_logits.gather(*sides), None
    policy = pair.one(scores, tokens, temperature, axis_name, vocab_size=vocab_size)
    bounds = None
    if rollout.top is not None:
      bounds = bracket_bounds(
        scores,
        rollout.top,
        temperature=1.0 if temperature is None else temperature,
        vocab_size=vocab_size,
        axis_name=axis_name,
      )
    return policy, Statistics(None, None, policy.entropy, policy.logp, None), bounds

  rollout_head, rollout = rollout.head, rollout._replace(head=None)
  # Bounds need several temporaries of the size of the scores.
  entries = CHUNK if rollout.top is None else CHUNK // 8
  rows = blocks.rows_of(head.shape[0], entries)
  return blocks.by_rows(chunk, hidden, tokens, rollout, rows=rows)


def _by_kernel(hidden, head, tokens, rollout, temperature, *, full, axis_name, vocab_size=None):
  """The same in passes of kernels over the vocabulary, all rows at once."""
  count = head.shape[0]
  local, here = vocabulary.place(tokens, count, axis_name)
  known = vocabulary.known(tokens, count, vocab_size, axis_name)
  picking = dict(tokens=jnp.where(here & known, local, -1), temperature=temperature)
  lse, scores = rollout.lse, rollout.logits
  if rollout.hidden is not None:
    scores = rollout.hidden, rollout.head

  def sides(*sums):
    # A token that the vocabulary lacks is missing; the kernels pick 0 for it.
    sums = [s._replace(picked=jnp.where(known, s.picked, jnp.nan)) for s in sums]
    merged = pair.merge(tuple(sums), temperature, axis_name)
    return [pair.side(s, temperature) for s in merged]

  if lse is not None and axis_name is None:
    options = dict(full=full, vocab_size=vocab_size)
    q, *totals = kernels.linear_fused(hidden, head, scores, lse, **options, **picking)
    (policy,) = sides(q)
    return policy, _against(policy, lse, temperature, known, *totals), None
  real = vocabulary.real_entries(count, vocab_size, axis_name)
  q = kernels.linear_sums(hidden, head, real=real, **picking)
  if scores is None:
    (policy,) = sides(q)
    return policy, Statistics(None, None, policy.entropy, policy.logp, None), None
  terms = functools.partial(kernels.linear_terms, hidden, head, scores, full=full, real=real)
  if lse is not None:
    (policy,) = sides(q)
    totals = terms(policy.top, policy.log_sum, None, lse, **picking)
    totals = vocabulary.add_up(totals, axis_name)
    return policy, _against(policy, lse, temperature, known, *totals), None
  kernel, source = kernels.sums, (scores,)
  if rollout.hidden is not None:
    kernel, source = kernels.linear_sums, scores
  policy, other = sides(q, kernel(*source, weighted=False, real=real, **picking))
  totals, _, _ = terms(policy.top, policy.log_sum, other.top, other.log_sum, temperature)
  return policy, full_logits.gather(policy, other, vocabulary.add_up(totals, axis_name)), None


def _against(policy, lse, temperature, known, totals, mass, token):
  """Statistics from sums over the vocabulary against a rollout of the given normaliser."""
  token = jnp.where(known, token, jnp.nan)
  logp = (token if temperature is None else token / temperature) - lse
  # The normaliser of other logits.
  wrong = ~(jnp.abs(mass - 1) <= MASS_ERROR)
  totals, logp = jax.tree.map(lambda x: jnp.where(wrong, jnp.nan, x), (totals, logp))
  return full_logits.gather(policy, pair.Side(None, lse, None, logp), totals)


def _backward(full, vocab_size, axis_name, residuals, g):
  """Blocks of the vocabulary: each block of the head's gradient is written once."""
  del full
  hidden, head, tokens, temperature, policy = residuals
  (to_values, _), (to_logp, to_entropy) = g
  to_logp, to_entropy = to_logp + to_values.policy_logp, to_entropy + to_values.entropy
  count, size = head.shape[0], min(head.shape[0], max(CHUNK // max(hidden.shape[0], 1), 128))
  local, here = vocabulary.place(tokens, count, axis_name)
  local = jnp.where(here, local, -1)
  real = vocabulary.real_entries(count, vocab_size, axis_name)
  # A row that counts for nothing adds exactly nothing, whatever its states hold.
  live = (to_logp != 0) | (to_entropy != 0)
  hidden = jnp.where(live[:, None], hidden, 0)

  def block(i, carry):
    to_hidden, to_head = carry
    # The last block overlaps the one before: the same values are written again, not added again.
    start = jnp.minimum(i * size, count - size)
    part = jax.lax.dynamic_slice_in_dim(head, start, size)
    new = start + jnp.arange(size) >= i * size
    scores = project(hidden, part)
    if vocab_size is not None:
      scores, part = vocabulary.only(scores, real - start), _rows(part, real - start)
    slope = pair.score_gradient(
      scores, local - start, temperature, policy, to_logp, to_entropy, None
    ).astype(_product(hidden, head))
    # [D, V] and then transposed: on a CPU half as fast again as the product with [V, D] as result.
    to_part = jax.lax.optimization_barrier(_contract('nv,nd->dv', slope, hidden)).T
    to_hidden += _contract('nv,vd->nd', slope, jnp.where(new[:, None], part, 0))
    to_head = jax.lax.dynamic_update_slice_in_dim(to_head, to_part.astype(head.dtype), start, 0)
    return to_hidden, to_head

  carry = blocks.zeros(hidden, jnp.float32), blocks.zeros(head, head.dtype)
  to_hidden, to_head = jax.lax.fori_loop(0, -(-count // size), block, carry)
  return to_hidden.astype(hidden.dtype), to_head, None, None, None


_statistics.defvjp(_forward, _backward)


def _rows(head, count):
  """The first `count` rows of a head; the others 0."""
  return jnp.where(jnp.arange(head.shape[0])[:, None] < count, head, 0)


def _product(hidden, head):
  """dtype in which gradients are multiplied, as the scores were."""
  return jnp.bfloat16 if hidden.dtype == head.dtype == jnp.bfloat16 else jnp.float32


def _contract(spec, slope, other):
  return jnp.einsum(
    spec,
    slope,
    other.astype(slope.dtype),
    precision=None if slope.dtype == jnp.bfloat16 else 'float32',
    preferred_element_type=jnp.float32,
  )
