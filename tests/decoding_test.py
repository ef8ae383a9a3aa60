"""trm_jax.mismatch.decoding: filters against NumPy, and what they do to log-ratios."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import divergences, policy, types
from trm_jax.mismatch import decoding
from trm_jax.rollouts import support

V = 9
Decoding = decoding.Decoding
# Distinct scores, and rows with ties at every rank.
SCORES = np.random.default_rng(0).normal(size=(40, V)).astype(np.float32) * 2
SCORES[20:] = np.round(SCORES[20:])
X = jnp.asarray(SCORES)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True), dtype=np.float64)
  return e / e.sum(-1, keepdims=True)


def kept(scores):
  return np.asarray(scores) > -np.inf


def smallest_set(p, mass):
  """Tokens of the smallest likeliest set that holds `mass`, with all that tie with its last."""
  order = np.argsort(-p, kind='stable')
  count = next(n for n in range(1, len(p) + 1) if p[order[:n]].sum() >= mass - 1e-9)
  return p >= p[order[count - 1]] - 1e-12


def test_filters_keep_what_numpy_keeps():
  p = softmax(SCORES)
  for k in (1, 3, V, 100):
    want = p >= np.sort(p, -1)[:, -min(k, V)][:, None]
    np.testing.assert_array_equal(kept(decoding.keep_top_k(X, k)), want)
  for mass in (1e-6, 0.3, 0.77, 0.951):
    want = np.stack([smallest_set(row, mass) for row in p])
    np.testing.assert_array_equal(kept(decoding.keep_top_p(X, mass)), want)
  assert kept(decoding.keep_top_p(X, 1.0)).all()
  for share in (0.05, 0.4, 1.0):
    want = p >= share * p.max(-1, keepdims=True) * (1 - 1e-6)
    np.testing.assert_array_equal(kept(decoding.keep_min_p(X, share)), want)


def test_kept_scores_keep_their_bits():
  setting = Decoding(top_k=4, top_p=0.8, min_p=0.01)
  for temperature in (1.0, 0.7):
    out = np.asarray(decoding.process(setting, X, temperature=temperature))
    np.testing.assert_array_equal(out[kept(out)], SCORES[kept(out)])
  np.testing.assert_array_equal(decoding.process(Decoding(), X, temperature=0.3), SCORES)


@pytest.mark.parametrize('trainer', [1.0, 0.6])
def test_temperature_is_the_engines_own(trainer):
  out = decoding.process(Decoding(temperature=1.7), X, temperature=trainer)
  np.testing.assert_allclose(softmax(np.asarray(out) / trainer), softmax(SCORES / 1.7), rtol=1e-5)


def test_order_decides_what_top_p_sees():
  """Hot scores are flat: top-p after temperature 2 keeps more than before it."""
  scores = jnp.log(jnp.array([0.64, 0.25, 0.09, 0.02]))
  late = Decoding(temperature=2.0, top_p=0.85)  # square roots: .47 .30 .18 .08
  early = Decoding(temperature=2.0, top_p=0.85, order=('top_k', 'top_p', 'min_p', 'temperature'))
  assert kept(decoding.process(late, scores)).sum() == 3
  assert kept(decoding.process(early, scores)).sum() == 2
  # Every order is a chain of the same steps.
  for order in itertools.permutations(decoding.ORDER):
    setting = Decoding(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, order=order)
    seen = SCORES
    for name in order:
      seen = {
        'temperature': lambda s: s / np.float32(0.8),
        'top_k': lambda s: np.asarray(decoding.keep_top_k(jnp.asarray(s), 5)),
        'top_p': lambda s: np.asarray(decoding.keep_top_p(jnp.asarray(s), 0.9)),
        'min_p': lambda s: np.asarray(decoding.keep_min_p(jnp.asarray(s), 0.05)),
      }[name](seen)
    out = decoding.process(setting, X)
    np.testing.assert_array_equal(kept(out), kept(seen))


@pytest.mark.slow
def test_kl_is_the_log_of_the_kept_mass_and_grows_as_filters_tighten():
  p = softmax(SCORES)
  for name, dials in (
    ('top_p', (0.99, 0.9, 0.5)),
    ('top_k', (8, 4, 1)),
    ('min_p', (0.01, 0.1, 1.0)),
  ):
    means = []
    for dial in dials:
      out = decoding.process(Decoding(**{name: dial}), X)
      mass = np.where(kept(out), p, 0).sum(-1)
      kl = np.asarray(divergences.kl(X, out))
      np.testing.assert_allclose(kl, -np.log(mass), rtol=0, atol=2e-6)
      means.append(kl.mean())
      token = out.argmax(-1)
      log_ratio = divergences.logp(X, token) - divergences.logp(out, token)
      np.testing.assert_allclose(log_ratio, np.log(mass), rtol=0, atol=2e-6)
    assert 0 < means[0] < means[1] < means[2]


def test_support_replay_removes_the_mismatch_and_leaves_a_gradient():
  out = decoding.process(Decoding(top_p=0.7), X)
  again = support.replay_support(X, out)
  assert np.asarray(divergences.kl(again, out)).max() == 0
  assert np.asarray(divergences.kl(X, out)).mean() > 0.05
  token = out.argmax(-1)
  loss = lambda z: divergences.logp(support.replay_support(z, out), token).sum()
  grad = np.asarray(jax.grad(loss)(X))
  p = softmax(np.asarray(out))
  np.testing.assert_allclose(grad, np.eye(V)[token] - p, rtol=0, atol=1e-6)
  assert (grad[~kept(out)] == 0).all() and np.abs(grad).max() > 0.1


def test_hooks():
  assert decoding.filter_hooks(Decoding()) == policy.Hooks()
  bug = decoding.filter_hooks(Decoding(top_k=2, reported='raw'), temperature=0.5)
  drawn = bug.decode(X)
  np.testing.assert_array_equal(drawn, decoding.process(Decoding(top_k=2), X, temperature=0.5))
  token = drawn.argmax(-1)
  # Raw log-probs are those of the scores at temperature 1, though drawn at .5.
  reported = divergences.logp(bug.reported(X, drawn), token, temperature=0.5)
  np.testing.assert_allclose(reported, divergences.logp(X, token), atol=1e-6)
  off = decoding.filter_hooks(Decoding(top_k=2, reported='raw'), jnp.float32(0), temperature=0.5)
  np.testing.assert_array_equal(off.decode(X), SCORES)
  np.testing.assert_array_equal(off.reported(X, drawn), drawn)
  # Raw alone is a bug only where there is something to process: a temperature.
  assert decoding.filter_hooks(Decoding(reported='raw')).decode is None


@pytest.mark.parametrize(
  'bad, match',
  [
    (dict(top_k=0), 'decoding.top_k=0 must be at least 1'),
    (dict(top_p=0.0), r'decoding.top_p=0.0 must lie in \(0, 1\]'),
    (dict(top_p=1.1), 'decoding.top_p=1.1'),
    (dict(min_p=float('nan')), 'decoding.min_p=nan'),
    (dict(temperature=0.0), 'decoding.temperature=0.0 must be at least 0.001'),
    (dict(temperature=1e-10), 'decoding.temperature=1e-10 must be at least 0.001'),
    (dict(order=('top_k',) * 4), 'must name each of temperature, top_k, top_p, min_p once'),
  ],
)
def test_errors(bad, match):
  with pytest.raises((types.InputError, TypeError), match=match):
    Decoding(**bad)
