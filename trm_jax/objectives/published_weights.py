"""Published weights against the engine. Rows of `METHODS`."""

from trm_jax.objectives import parts, ratio_weights
from trm_jax.objectives.method import Method
from trm_jax.objectives.named import VERL, Named
from trm_jax.types import part

_DRIFT = part(parts.ratio, anchor='recomputed')


def _weighted(weight) -> Method:
  return Method(surrogate=_DRIFT, weights=(weight,))


WEIGHTS: dict[str, Named] = {
  'ignored': Named(
    lambda: Method(surrogate=_DRIFT), 'r A with r = policy / recomputed', 'token', 'no correction'
  ),
  'tis': Named(
    lambda: Method(surrogate=_DRIFT, weights=(parts.tis,)),
    'min(w, 2) r A',
    'token',
    'Yao et al. 2025, truncated importance sampling',
  ),
  'sequence_tis': Named(
    lambda: Method(surrogate=_DRIFT, weights=(parts.sequence_tis,)),
    'min(prod_t w, 2) r A',
    'sequence',
    'Liu et al. 2025, sequence-level truncated importance sampling',
  ),
  'tis_lower': Named(
    lambda: _weighted(part(ratio_weights.clamped, low=0.5, high=5.0)),
    'clip(w, .5, 5) r A',
    'token',
    'OpenRLHF; slime mis (.5, 2)',
  ),
  'icepop': Named(
    lambda: _weighted(ratio_weights.banded), 'w 1[.5 <= w <= 5] r A', 'token', 'Ant 2025, IcePop'
  ),
  'kpop': Named(
    lambda: _weighted(ratio_weights.kpop),
    'r A where KL(q||p), KL(p||q) <= .1, binary',
    'token',
    'Ant 2026, KPop (weight uncertain)',
  ),
  'cis': Named(
    lambda: _weighted(ratio_weights.cis),
    'min(w, 1 + 2.3 max(1 - p, .005)) r A',
    'token',
    'arXiv 2609.32444',
  ),
  'normalized_tis': Named(
    lambda: _weighted(part(ratio_weights.batch_normalized, weight=parts.tis)),
    'min(w, 2) / batch mean * r A',
    'token',
    VERL + '; slime',
  ),
  'sequence_mis': Named(
    lambda: _weighted(part(ratio_weights.banded, level='sequence', high=2.0)),
    'W 1[.5 <= W <= 2] r A, W = prod_t w',
    'sequence',
    'Liu et al. 2025; TRL (0, 3)',
  ),
  'jackpot': Named(
    lambda: Method(
      surrogate=part(parts.clip, anchor='recomputed'), weights=(ratio_weights.jackpot,)
    ),
    'min((1 - TV) max(1, p / q), 2) min(p_0 / p, 2) min(r A, clip(r) A)',
    'token',
    'arXiv 2602.06107, OBRS (caps: ours)',
    'lambda 1, r = p / p_0',
  ),
}
