"""Published trust regions: rows, or prefixes of rows, that count or do not. Rows of `METHODS`."""

from trm_jax import masks
from trm_jax.objectives import parts
from trm_jax.objectives.method import Method
from trm_jax.objectives.named import VERL, Named
from trm_jax.types import part


def _trm(*criteria, **switches) -> Method:
  return Method(masks=criteria, **switches)


def _judged(criterion) -> Method:
  drift = part(parts.ratio, anchor='recomputed')
  return Method(surrogate=drift, masks=(criterion,), judge='anchor')


REGIONS: dict[str, Named] = {
  'trm_max': Named(
    lambda: _trm(masks.max_kl(0.05)),
    'r A where max_t KL <= .05',
    'sequence',
    'arXiv 2512.23075, Algorithm 1',
  ),
  'trm_avg': Named(
    lambda: _trm(masks.mean_kl(0.001)),
    'r A where mean_t KL <= .001',
    'sequence',
    'arXiv 2512.23075, section 5',
  ),
  'trm_combined': Named(
    lambda: _trm(masks.max_kl(0.05), masks.mean_kl(0.001)),
    'r A where max_t KL <= .05 and mean_t KL <= .001',
    'sequence',
    'arXiv 2512.23075, section 5',
  ),
  'trm_prefix': Named(
    lambda: _trm(masks.max_kl(0.05), scope='prefix'),
    'r A up to the first token with KL > .05',
    'prefix',
    'ours: `masks.prefix`',
  ),
  'length_neutral': Named(
    lambda: _trm(masks.length_neutral(0.05)),
    'r A where sum_t |r - 1| w_t / sum_t w_t <= .05',
    'sequence',
    'arXiv 2512.23075, length-bias appendix',
  ),
  'ser': Named(
    lambda: _trm(masks.mean_deviation(0.05)),
    'r A where mean_t |r - 1| <= .05',
    'sequence',
    'arXiv 2512.23075, length-bias appendix',
  ),
  'geometric_band': Named(
    lambda: _judged(masks.geometric_band()),
    'r A where .999 <= exp(mean_t log w) <= 1.001',
    'sequence',
    VERL,
  ),
  'sum_band': Named(
    lambda: _judged(masks.sum_band()), 'r A where .5 <= prod_t w <= 2', 'sequence', VERL
  ),
  'token_veto': Named(
    lambda: _judged(masks.token_veto()), 'r A where min_t w >= 1e-4', 'sequence', 'slime mis'
  ),
  'ratio_error': Named(
    lambda: _judged(masks.mean_ratio_error()),
    'r A where mean_t e^|d| <= 1.5',
    'sequence',
    'NeMo-RL',
  ),
  'carm': Named(
    lambda: _judged(masks.carm()),
    'r A where mean_t |d| <= log(1.001)',
    'sequence',
    'arXiv 2610.02039 (limit uncertain)',
  ),
}
