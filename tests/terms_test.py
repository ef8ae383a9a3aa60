"""trm_jax.divergences.passes.terms: the summands, against float64 at single entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.divergences.passes import terms

# log q/p from far below to far above the switch between series and closed form.
GAPS = np.concatenate([
  sign * np.array([1e-6, 1e-4, 1e-2, 0.1, 0.3499, 0.3501, 1, 5, 20, 60]) for sign in (-1, 1)
])  # fmt: skip


def summands(gap, log_p):
  """(float32 terms, float64 truth) of one entry with p = exp(log_p), q = p exp(gap)."""
  # Both are probabilities: q <= e^log_p where it is the larger.
  gap, log_p = np.float32(gap), np.float32(log_p - max(gap, 0))
  d, p = np.float64(gap), np.exp(np.float64(log_p))
  q, log_q = p * np.exp(d), np.float64(log_p) + d
  found = terms.pointwise(
    jnp.float32(d),
    jnp.float32(log_q),
    jnp.float32(log_p),
    jnp.float32(q),
    jnp.float32(p),
    jnp.float32(log_q),
  )
  truth = {
    'kl': p * (np.expm1(d) - d),
    'tv': p * np.abs(np.expm1(d)),
    'reverse_kl': q * (np.expm1(-d) + d),
    'chi2': p * np.expm1(d) ** 2,
    'square': q * q,
  }
  return found, truth


@pytest.mark.parametrize('log_p', [-1.0, -30.0])
def test_against_float64(log_p):
  found, truth = jax.tree.map(lambda *x: np.array(x), *(summands(g, log_p) for g in GAPS))
  for name, want in truth.items():
    got = getattr(found, name)
    assert (got >= 0).all()
    # e^d - 1 - d of tiny d: q = p e^d itself is only known to 1e-7 beyond the series.
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-37, err_msg=name)


def test_zero_probabilities():
  # Only the rollout, only the policy, neither.
  inf = np.inf
  d = jnp.array([-inf, inf, jnp.nan])
  b, a = jnp.array([-inf, 0, -inf]), jnp.array([0, -inf, -inf])
  q, p = jnp.array([0, 0.25, 0]), jnp.array([0.5, 0, 0])
  found = terms.pointwise(d, b, a, q, p, jnp.log(q))
  np.testing.assert_array_equal(found.kl, [inf, 0.25, 0])
  np.testing.assert_array_equal(found.tv, [0.5, 0.25, 0])
  np.testing.assert_array_equal(found.reverse_kl, [0.5, inf, 0])
  np.testing.assert_array_equal(found.chi2, [0.5, inf, 0])
  np.testing.assert_array_equal(found.square, [0, 0.0625, 0])


def test_underflow_is_not_a_zero():
  # p and q below float32's range are no violation, however far apart; a -inf logit is.
  d = jnp.array([-200.0, 200.0, 3e30, -3e30])
  finite, zero = jnp.zeros(4), jnp.zeros(4)
  found = terms.pointwise(d, finite, finite, zero, zero, jnp.full(4, -1e31))
  for x in found:
    np.testing.assert_array_equal(x, 0)
  found = terms.pointwise(*map(jnp.float32, (-jnp.inf, -jnp.inf, 0.0, 0.0, 0.0)))
  assert found.kl == jnp.inf and found.tv == 0


def test_nan_stays_nan():
  for name, x in terms.pointwise(*[jnp.float32(jnp.nan)] * 6)._asdict().items():
    assert jnp.isnan(x), name


def test_weighted():
  np.testing.assert_array_equal(
    terms.weighted(jnp.array([0.0, 0.5]), jnp.array([-jnp.inf, -2.0])), [0, -1]
  )
