"""The truth about a pair of policies small enough to enumerate: objectives, errors, divergences.

| function                                  | quantity                                            |
| ----------------------------------------- | --------------------------------------------------- |
| `policy_objective`, `rollout_objective`   | J(pi_theta), J(pi_roll)                             |
| `surrogate_a`, `surrogate`                | L (A-form, eq. 2), L' (R-form); masked L'_M         |
| `error_a`, `error`                        | J_theta - J_roll - L (eq. 3), - L'_M                |
| `delta`, `rejected`                       | Delta_M; what rejection costs                       |
| `divergences`                             | every divergence of a theorem, eq. 4-8              |
| `ratio_moments`                           | E_roll[rho_t^k], E_roll[W^k]                        |
| `sequence_mask`, `prefix_mask`, `patched` | masks from criteria; the policy of the prefix form  |
| `gradient`                                | of any of these with respect to the policy's logits |
| `delta_harm`, `gradient_harm`             | share of each token and sequence in Delta, |error|  |

All take an `enumeration.World`, run inside `enumeration.float64()`, and are pure: `jit`, `vmap` and
differentiate them. E_roll averages over prompts too. W = prod_t rho_t. Identities that hold
for full support fail as they should where the rollout gives 0 to a token of the policy: E_roll
never sees such a token, J_theta and the divergences do.
arXiv 2512.23075.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.exact import enumeration as en
from trm_jax.exact.enumeration import World
from trm_jax.types import InputError

# None keeps all; [X, V**T] weighs sequences; [X, C, V] or [X, C, 1] weighs tokens.
Mask = Array | None
Scalar = Float[Array, '']


class Rejected(typing.NamedTuple):
  """What a mask M leaves out; scalars.

  Attributes:
    rollout, policy: probability to be rejected, E_roll[1 - M] and E_theta[1 - M].
    reward: E_roll[(1 - M) R].
    gain: E_roll[(1 - M) R (W - 1)], the part of J_theta - J_roll that no kept sequence shows.
  """

  rollout: Scalar
  policy: Scalar
  reward: Scalar
  gain: Scalar


class Distances(typing.NamedTuple):
  """Divergences of the pair; [T] per position, else scalars; nats.

  Attributes:
    max_kl, max_tv, max_chi2: over all contexts that either policy reaches (delta, epsilon; eq. 6).
    mean_kl, mean_tv, mean_chi2: E_{d_t^roll}[.], finished responses counting 0 (D-bar_t, eq. 8).
    visit_kl, visit_tv: KL(d_t^roll || d_t^theta) and TV between the visitations of position t.
    sequence_kl: sum_t mean_kl = KL(P^roll || P^theta), the prompt averaged (eq. 7).
    sequence_tv: TV(P^roll, P^theta), the prompt averaged (eq. 7).
    sequence_chi2: E_theta[W] - 1, which is E_roll[W^2] - 1; inf without support.
    chi2_budget: largest sum_t chi2(c_t) along a path that the rollout can take.
  """

  max_kl: Scalar
  max_tv: Scalar
  max_chi2: Scalar
  mean_kl: Float[Array, 'T']
  mean_tv: Float[Array, 'T']
  mean_chi2: Float[Array, 'T']
  visit_kl: Float[Array, 'T']
  visit_tv: Float[Array, 'T']
  sequence_kl: Scalar
  sequence_tv: Scalar
  sequence_chi2: Scalar
  chi2_budget: Scalar


class Harm(typing.NamedTuple):
  """Signed shares that sum to the whole: of tokens after prefixes, and of sequences.

  A token's share is summed over all that may follow it.
  """

  tokens: Float[Array, 'X C V']
  sequences: Float[Array, 'X S']


def _split(world: World, keep: Mask) -> tuple[Array | float, Array | float]:
  """(weight of each sequence, weight of each token), without gradient."""
  if keep is None:
    return 1.0, 1.0
  weight = jax.lax.stop_gradient(jnp.asarray(keep, jnp.float64))
  if weight.shape == world.reward.shape:
    return weight, 1.0
  if weight.shape in (world.policy.shape, (*world.policy.shape[:2], 1)):
    return 1.0, weight
  raise InputError(
    f'keep has shape {weight.shape}; make it {world.reward.shape} for sequences or'
    f' {world.policy.shape} for tokens.'
  )


def _of_sequences(world: World, keep: Mask) -> Array | float:
  if keep is not None and keep.shape != world.reward.shape:
    raise InputError(
      f'keep has shape {keep.shape}; this is defined for masks of sequences,'
      f' {world.reward.shape}; for prefixes see patched.'
    )
  return _split(world, keep)[0]


def _advantage(world: World, baseline: int | float | Float[Array, 'X']) -> Float[Array, 'X S']:
  baseline = jnp.broadcast_to(jnp.asarray(baseline, jnp.float64), world.prompts.shape)
  return world.reward - baseline[:, None]


def _mass(world: World, side: Float[Array, 'X C V']) -> Float[Array, 'X S']:
  """P(x) P(y|x) of every sequence."""
  return en.descend(world.prompts, side)[1]


def _sum(world: World, steps: Float[Array, 'X C V']) -> Float[Array, 'X S']:
  """sum_t step_t along each path."""
  return en.descend(jnp.zeros_like(world.prompts), steps, jnp.add)[1]


def _second_order(world: World, excess: Float[Array, 'X C V']) -> Float[Array, 'X S']:
  """W - 1 - sum_t (rho_t - 1) along each path, as sum_t (prod_{s<t} rho_s - 1) (rho_t - 1).

  Each term is a product of small numbers: nothing cancels where the policies nearly agree.
  """
  grow = lambda above, step: above + (1 + above) * step
  above, _ = en.descend(jnp.zeros_like(world.prompts), excess, grow)
  return _sum(world, above[..., None] * excess)


def policy_objective(world: World) -> Scalar:
  """J(pi_theta) = E_{x, y ~ pi_theta}[R], in reward_range. Gradient to the policy.

  >>> logits = np.log([[[.6, .4], [.5, .5], [.5, .5]]])  # two tokens, two positions
  >>> with trm.float64():
  ...   world = trm.world(logits, 0 * logits, horizon=2, reward=np.array([[1., 1, 0, 0]]))
  ...   value = trm.policy_objective(world)
  >>> f'{value:.4f}'
  '0.6000'
  """
  return (_mass(world, en.tree(world).policy) * world.reward).sum()


def rollout_objective(world: World) -> Scalar:
  """J(pi_roll) = E_{x, y ~ pi_roll}[R], in reward_range."""
  return (_mass(world, en.tree(world).rollout) * world.reward).sum()


def surrogate(
  world: World, keep: Mask = None, *, baseline: int | float | Float[Array, 'X'] = 0.0
) -> Scalar:
  """L'_M = E_roll[M (R - b) sum_t m_t (rho_t - 1)], the R-form that every bound is about.

  `keep` holds M of sequences [X, V**T] or m_t of tokens [X, C, V], in [0, 1], detached. A baseline
  changes nothing unless something is masked or the rollout lacks support. With nothing masked
  |L'| <= range * sum_t D-bar_t. With a prefix mask it is the prefix form, which is also
  `surrogate(patched(world, good))`. Gradient to the policy. Section 2 and eq. 22-23 with rho - 1.
  Raises InputError for a mask that does not fit.

  >>> logits = np.log([[[.6, .4], [.5, .5], [.5, .5]]])  # two tokens, two positions
  >>> with trm.float64():
  ...   world = trm.world(logits, 0 * logits, horizon=2, reward=np.array([[1., 1, 0, 0]]))
  ...   value = trm.surrogate(world)
  >>> f'{value:.4f}'
  '0.1000'
  """
  sequence, token = _split(world, keep)
  p, _, _, excess, _ = en.tree(world)
  weight = _mass(world, p) * sequence * _advantage(world, baseline)
  return (weight * _sum(world, excess * token)).sum()


def surrogate_a(
  world: World, keep: Mask = None, *, baseline: int | float | Float[Array, 'X'] = 0.0
) -> Scalar:
  """L_M = E_roll[M (R - b) sum_t m_t rho_t] over a response's own tokens, as printed (eq. 2, 22).

  Unmasked it is L' + E_roll[(R - b) T(y)], so that its size says nothing about improvement; the
  gradient is that of `surrogate`. Arguments, gradient and errors as there.
  """
  sequence, token = _split(world, keep)
  p, _, _, excess, alive = en.tree(world)
  weight = _mass(world, p) * sequence * _advantage(world, baseline)
  return (weight * _sum(world, (1 + excess) * alive[None, :, None] * token)).sum()


def error(world: World, keep: Mask = None) -> Scalar:
  """J_theta - J_roll - L'_M. With nothing masked the error of all bounds, and -Delta.

  >>> logits = np.log([[[.6, .4], [.5, .5], [.5, .5]]])  # two tokens, two positions
  >>> with trm.float64():
  ...   world = trm.world(logits, 0 * logits, horizon=2, reward=np.array([[1., 1, 0, 0]]))
  ...   value = trm.error(world)
  >>> f'{value:.4f}'
  '0.0000'
  """
  return policy_objective(world) - rollout_objective(world) - surrogate(world, keep)


def error_a(world: World, *, baseline: int | float | Float[Array, 'X'] = 0.0) -> Scalar:
  """Error = J_theta - J_roll - L as printed (eq. 3): `error` - E_roll[(R - b) T(y)]."""
  rise = policy_objective(world) - rollout_objective(world)
  return rise - surrogate_a(world, baseline=baseline)


def delta(world: World, keep: Mask = None) -> Scalar:
  """Delta_M = E_roll[M R sum_t (rho_t - 1)(1 - prod_{j>t} rho_j)]; Lemma D.1, exact identity:

      J_theta - J_roll = L'_M - Delta_M + E_roll[(1 - M) R (W - 1)]

  where the rollout has the policy's support (else E_roll[R (W - 1)] stands on the left). `keep`
  [X, V**T] is detached; for prefixes take `delta(patched(world, good))`. Gradient to the policy.
  Raises InputError for a mask that does not fit.
  """
  sequence = _of_sequences(world, keep)
  p, _, _, excess, _ = en.tree(world)
  return -(_mass(world, p) * sequence * world.reward * _second_order(world, excess)).sum()


def rejected(world: World, keep: Array) -> Rejected:
  """Probability and reward of what `keep` [X, V**T] leaves out. Section 5 and the masked guarantee.

  Raises InputError for a mask that does not fit.
  """
  left = 1 - _of_sequences(world, keep)
  p, q, _, excess, _ = en.tree(world)
  mass = _mass(world, p)
  growth = _second_order(world, excess) + _sum(world, excess)
  return Rejected(
    rollout=(mass * left).sum(),
    policy=(_mass(world, q) * left).sum(),
    reward=(mass * left * world.reward).sum(),
    gain=(mass * left * world.reward * growth).sum(),
  )


def _by_position(world: World, values: Float[Array, 'X C']) -> Float[Array, 'T']:
  return jnp.stack([values[:, span].sum() for span in en.lengths(world.policy)])


def _kl_terms(p: Array, q: Array) -> Array:
  """p log(p / q) - p + q of each outcome: >= 0, with the sum of KL(p || q)."""
  ratio = jnp.where(p > 0, q / jnp.where(p > 0, p, 1), 1)
  return jnp.where(p > 0, en.weighted(p, ratio - 1 - jnp.log(ratio)), q)


def _largest(x: Array) -> Scalar:
  """Its maximum; NaN where one is, which XLA's maximum on CPUs drops from large arrays."""
  return jnp.where(jnp.isnan(x).any(), jnp.nan, x.max())


def _tv(total: Array) -> Array:
  """Half of sum |q - p|, at most 1 in spite of rounding."""
  return jnp.where(total > 2, 1, 0.5 * total)


def divergences(world: World) -> Distances:
  """Every divergence of the paper's theorems, exactly; see `Distances`."""
  p, q, *_ = en.tree(world)
  c = en.contexts(world)
  ends = _mass(world, p), _mass(world, q)
  most = lambda x: _largest(jnp.where(c.reachable, x, 0))
  mean = lambda x: _by_position(world, en.weighted(c.rollout_visits, x))
  ratio = jnp.where(ends[0] > 0, ends[1] / jnp.where(ends[0] > 0, ends[0], 1), jnp.inf)
  last = jnp.where(c.rollout_visits > 0, c.chi2_spent, 0)[:, en.lengths(p)[-1]]
  mean_kl = mean(c.kl)
  return Distances(
    max_kl=most(c.kl),
    max_tv=most(c.tv),
    max_chi2=most(c.chi2),
    mean_kl=mean_kl,
    mean_tv=mean(c.tv),
    mean_chi2=mean(c.chi2),
    visit_kl=_by_position(world, _kl_terms(c.rollout_visits, c.policy_visits)),
    visit_tv=_tv(_by_position(world, jnp.abs(c.rollout_visits - c.policy_visits))),
    sequence_kl=mean_kl.sum(),
    sequence_tv=_tv(jnp.abs(ends[1] - ends[0]).sum()),
    sequence_chi2=en.weighted(jnp.abs(ends[1] - ends[0]), jnp.abs(ratio - 1)).sum(),
    chi2_budget=_largest(last),
  )


def ratio_moments(world: World, *, order: int | float) -> tuple[Float[Array, 'T'], Scalar]:
  """(E_roll[rho_t^order] per position [T], E_roll[W^order]); ended responses have ratio 1.

  Order 1 gives 1 with full support, and the policy's mass on the rollout's support without.
  """
  p, _, _, excess, _ = en.tree(world)
  power = (1 + excess) ** order
  visits, mass = en.descend(world.prompts, p)
  _, whole = en.descend(jnp.ones_like(world.prompts), power)
  return _by_position(world, visits * (p * power).sum(-1)), (mass * whole).sum()


def sequence_mask(world: World, criterion: Callable) -> Bool[Array, 'X S']:
  """Which sequences a criterion of `masks` keeps; detached. For small worlds, as `rows`."""
  rows = en.rows(world)
  return criterion(rows.divergences, rows.valid).reshape(world.reward.shape)


def prefix_mask(world: World, good: Bool[Array, 'X C']) -> Bool[Array, 'X C 1']:
  """G_t: every prefix of c_t is good, c_t itself included, e.g. good = contexts(world).kl <= 0.1.

  Prefixes of ended responses have divergence 0, so that a sequence is good throughout iff its last
  context is: `jnp.repeat(mask[:, -V ** (T - 1):, 0], V, 1)` is the mask of sequences.
  """
  steps = jnp.broadcast_to(good[..., None], world.policy.shape)
  before, _ = en.descend(jnp.ones_like(world.prompts, bool), steps, jnp.logical_and)
  return (before & good)[..., None]


def patched(world: World, good: Bool[Array, 'X C 1']) -> World:
  """The world of pi'' = the policy where the prefix is good, the rollout where it is not.

  With good from `prefix_mask`, its surrogate, delta, error and divergences are the prefix forms:
  L'_prefix = E_roll[R sum_t G_t (rho_t - 1)], and Delta, D-bar'' and so on of pi''. Gradient to the
  policy after good prefixes.
  """
  return dataclasses.replace(world, policy=jnp.where(good, world.policy, world.rollout))


def gradient(quantity: Callable[[World], Scalar], world: World) -> Float[Array, 'X C V']:
  """d quantity / d policy logits, exact.

  For a parametric policy put `enumeration.tabulate` inside the differentiated function.
  """
  return jax.grad(lambda policy: quantity(dataclasses.replace(world, policy=policy)))(world.policy)


def delta_harm(world: World, keep: Mask = None) -> Harm:
  """Signed shares in Delta_M; both kinds sum to `delta(world, keep)`.

      sequence y:      P_roll(y) M R sum_t (rho_t - 1)(1 - prod_{j>t} rho_j)
      token (c_t, v):  d_t^roll(c_t) (pi_theta - pi_roll)(v|c_t) (f_roll(c_t v) - f_theta(c_t v))

  with f_pi(c) = E_pi[M R|c], and tokens off the rollout's support left out everywhere. `keep`
  [X, V**T] is detached. Raises InputError for a mask that does not fit.
  """
  kept = _of_sequences(world, keep) * world.reward
  p, _, _, excess, _ = en.tree(world)
  visits, mass = en.descend(world.prompts, p)
  gap = en.ascend(kept, p) - en.ascend(kept, p * (1 + excess))
  return Harm(visits[..., None] * p * excess * gap, -mass * kept * _second_order(world, excess))


def gradient_harm(
  world: World,
  keep: Mask = None,
  *,
  baseline: int | float | Float[Array, 'X'] = 0.0,
  through: tuple[Callable, typing.Any] | None = None,
) -> tuple[Scalar, Harm]:
  """(|e|, signed shares in it) for e = grad L'_M - grad J_theta; both kinds sum to |e|.

      h_t = <grad log pi_theta(y_t|c_t), e / |e|>,   A = R - b
      sequence y:      P_roll(y) M A sum_t m_t rho_t h_t - P_theta(y) A sum_t h_t
      token (c_t, v):  pi_theta(v|c_t) h (d_t^roll m E_roll[M A|c_t v] - d_t^theta E_theta[A|c_t v])

  where the first parts leave out tokens off the rollout's support. A share > 0 lengthens the error.
  Gradients are with respect to logits; with `through` = (function params -> table, params), which
  then give the policy in place of `world.policy`, with respect to the parameters. e = 0 gives
  zeros. Raises InputError for a mask that does not fit.
  """
  function, at = (lambda x: x, world.policy) if through is None else through
  policy, pull = jax.vjp(function, at)
  world = dataclasses.replace(world, policy=policy)
  sequence, token = _split(world, keep)
  difference = lambda w: surrogate(w, keep, baseline=baseline) - policy_objective(w)
  (e,) = pull(gradient(difference, world))
  norm = jnp.sqrt(sum((x.astype(jnp.float64) ** 2).sum() for x in jax.tree.leaves(e)))
  scale = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
  unit = jax.tree.map(lambda x: (x * scale).astype(x.dtype), e)
  _, slope = jax.jvp(function, (at,), (unit,))

  p, q, _, excess, alive = en.tree(world)
  h = jnp.where(alive[None, :, None], slope - (q * slope).sum(-1, keepdims=True), 0)
  a = _advantage(world, baseline)
  (at_rollout, rollout), (at_policy, policy) = (en.descend(world.prompts, x) for x in (p, q))
  # rho pi_roll is the policy on the rollout's support.
  near = at_rollout[..., None] * token * p * (1 + excess) * en.ascend(sequence * a, p)
  far = at_policy[..., None] * q * en.ascend(a, q)
  first, second = _sum(world, token * (1 + excess) * h), _sum(world, h)
  return norm, Harm(h * (near - far), a * (rollout * sequence * first - policy * second))
