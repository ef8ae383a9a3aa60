"""Attribution: effects of factorials against hand-computed games and the definition by orders."""

import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as hs
import numpy as np
import pytest

from trm_jax.measurements import attribution
from trm_jax.types import InputError


def game(sources, value):
  """(design, responses) of a function of the set of sources that are on."""
  design = attribution.full(sources)
  return design, np.array([float(value(frozenset(np.flatnonzero(on).tolist()))) for on in design])


def by_orders(design, responses):
  """Shapley by its definition: what each adds, averaged over all n! orders."""
  n = design.shape[1]
  at = {frozenset(np.flatnonzero(on).tolist()): v for on, v in zip(design, responses, strict=True)}
  orders = list(itertools.permutations(range(n)))
  shares = [0.0] * n
  for order in orders:
    for k, i in enumerate(order):
      before = frozenset(order[:k])
      shares[i] += (at[before | {i}] - at[before]) / len(orders)
  return np.array(shares)


def test_two_sources_by_hand():
  # v: nothing 1, a 3, b 2, both 10. Orders: a first 2 and 7, b first 1 and 8.
  table = {frozenset(): 1, frozenset({0}): 3, frozenset({1}): 2, frozenset({0, 1}): 10}
  found = attribution.attribute(*game(2, table.get))
  np.testing.assert_allclose(found.shapley, [(2 + 8) / 2, (1 + 7) / 2])
  np.testing.assert_allclose(found.alone, [2, 1])
  np.testing.assert_allclose(found.last, [8, 7])
  np.testing.assert_allclose(found.main, [(2 + 8) / 2, (1 + 7) / 2])
  np.testing.assert_allclose(found.pairs, [[0, 3], [3, 0]])  # (8 - 2) / 2
  np.testing.assert_allclose([found.total, found.synergy], [9, 6])
  # Coefficients 5/2, 4/2, 3/2: 9 of 50 parts of the variance.
  np.testing.assert_allclose(found.mixed, 9 / 50)


def test_three_sources_by_hand():
  # The glove game: 0 has a left glove, 1 and 2 a right one; a pair is worth 1.
  found = attribution.attribute(*game(3, lambda s: 0 in s and len(s) > 1))
  np.testing.assert_allclose(found.shapley, [2 / 3, 1 / 6, 1 / 6])
  np.testing.assert_allclose(found.main, [3 / 4, 1 / 4, 1 / 4])
  np.testing.assert_allclose(found.pairs[0], [0, 1 / 4, 1 / 4])
  np.testing.assert_allclose(found.alone, 0)
  np.testing.assert_allclose(found.last, [1, 0, 0])


@hypothesis.given(
  hs.integers(1, 5).flatmap(
    lambda n: hnp.arrays(np.float64, (2**n,), elements=hs.floats(-1e3, 1e3, width=32))
  )
)
def test_shapley_is_the_mean_over_orders_and_sums_to_the_total(responses):
  design = attribution.full(int(np.log2(len(responses))))
  found = attribution.attribute(design, responses)
  np.testing.assert_allclose(found.shapley, by_orders(design, responses), atol=1e-9)
  np.testing.assert_allclose(found.shapley.sum(), found.total, atol=1e-9)
  assert 0 <= found.mixed <= 1


@hypothesis.given(hnp.arrays(np.float64, (6,), elements=hs.floats(-100, 100)))
def test_additive_responses_have_exact_effects_and_no_interaction(effects):
  *effects, start = effects
  design = attribution.full(5)
  found = attribution.attribute(design, start + design @ np.array(effects))
  for name in ('alone', 'last', 'main', 'shapley'):
    np.testing.assert_allclose(getattr(found, name), effects, atol=1e-10, err_msg=name)
  np.testing.assert_allclose(found.pairs, 0, atol=1e-10)
  np.testing.assert_allclose([found.mixed, found.synergy], 0, atol=1e-10)


def test_axioms_on_random_games():
  rng = np.random.default_rng(0)
  design = attribution.full(4)
  values = rng.normal(size=(16, 3))
  found = attribution.attribute(design, values)
  # Linearity, and statistics are independent of each other.
  one = attribution.attribute(design, values[:, 0] + 2 * values[:, 1])
  np.testing.assert_allclose(one.shapley, found.shapley[:, 0] + 2 * found.shapley[:, 1])
  # Renaming the sources renames the shares; the order of cells does not matter.
  order, cells = [2, 0, 3, 1], rng.permutation(16)
  renamed = attribution.attribute(design[cells][:, order], values[cells])
  np.testing.assert_allclose(renamed.shapley, found.shapley[order])
  np.testing.assert_allclose(renamed.pairs, found.pairs[order][:, order])
  # A source that changes nothing has no share.
  dummy = attribution.attribute(design, values[np.arange(16) & 0b1101])
  np.testing.assert_allclose(dummy.shapley[1], 0, atol=1e-15)
  assert not np.allclose(dummy.shapley[0], 0)


def test_half_fractions_are_balanced_and_find_what_pairs_explain():
  rng = np.random.default_rng(1)
  design = attribution.half(5)
  signs = np.where(design, 1, -1)
  np.testing.assert_array_equal(signs.T @ signs, 16 * np.eye(5))
  every = attribution.full(5)
  main, pairs = rng.normal(size=5), np.triu(rng.normal(size=(5, 5)), 1)
  value = lambda on: on @ main + np.einsum('ci,ij,cj->c', on * 1.0, pairs, on * 1.0)
  whole = attribution.attribute(every, value(every))
  part = attribution.attribute(design, value(design))
  for name, found in part._asdict().items():
    np.testing.assert_allclose(found, getattr(whole, name), atol=1e-9, err_msg=name)


def planted(noise, repeats, rng, sources=4):
  """Source 2 dominates, source 1 does nothing; a shared offset of each repeat, noise of cells."""
  design = attribution.full(sources)
  effects = np.array([0.3, 0.0, 2.0, -0.4])
  shared = 5 * rng.normal(size=(1, repeats))
  values = (design @ effects)[:, None] + shared + noise * rng.normal(size=(16, repeats))
  return design, values[..., None], effects


def test_planted_source_is_found_and_zero_is_within_its_error():
  design, values, effects = planted(0.2, 6, np.random.default_rng(2))
  found, errors = attribution.bootstrap(design, values)
  assert found.shapley[:, 0].argmax() == 2
  np.testing.assert_array_less(abs(found.shapley[:, 0] - effects), 3 * errors.shapley[:, 0] + 1e-9)
  assert errors.shapley[2, 0] < 0.3  # what repeats share has cancelled


def test_errors_are_the_usual_ones_of_linear_effects():
  rng = np.random.default_rng(3)
  design, values, _ = planted(0.5, 8, rng)
  _, errors = attribution.bootstrap(design, values, draws=4000)
  each = [attribution.attribute(design, values[:, r, 0]).main for r in range(8)]
  usual = np.std(each, axis=0, ddof=1) / np.sqrt(8)
  np.testing.assert_allclose(errors.main[:, 0], usual, rtol=0.06)
  # Over many worlds the error bar covers: |estimate - truth| / error has spread about 1.
  gaps = []
  for _ in range(150):
    design, values, effects = planted(0.5, 8, rng)
    found, errors = attribution.bootstrap(design, values, draws=200)
    gaps.append((found.shapley[:, 0] - effects) / errors.shapley[:, 0])
  assert 0.9 < np.std(gaps) < 1.4  # Student-t with 7 degrees of freedom: 1.18


def test_shapes_of_errors_and_of_several_statistics():
  design, values, _ = planted(0.1, 3, np.random.default_rng(4))
  found, errors = attribution.bootstrap(design, np.concatenate([values, -3 * values], -1), draws=64)
  for x in (found, errors):
    assert [v.shape for v in x] == [
      *[(2,), (4, 2), (4, 2), (4, 2), (4, 4, 2)],
      *[(4, 2), (4, 2), (2,), (2,)],
    ]
  np.testing.assert_allclose(found.shapley[:, 1], -3 * found.shapley[:, 0])
  np.testing.assert_allclose(errors.shapley[:, 1], 3 * errors.shapley[:, 0])
  np.testing.assert_allclose(found.share.sum(0), 1)
  np.testing.assert_allclose(found.share[:, 1], found.share[:, 0])
  np.testing.assert_allclose(found.mixed[1], found.mixed[0])


def test_constant_responses_have_no_interactions():
  found = attribution.attribute(attribution.full(3), np.full(8, 0.1))
  assert found.mixed == 0 and not found.shapley.any() and np.isnan(found.share).all()


def test_bad_input_is_one_sentence():
  design = attribution.full(5)
  values = np.zeros((32, 3))
  broken = values.copy()
  broken[4, 1] = np.inf
  cases = [
    (lambda: attribution.full(0), 'sources=0'),
    (lambda: attribution.full(17), 'sources=17'),
    (lambda: attribution.half(4), 'sources=4'),
    (lambda: attribution.attribute(design, values[:31]), '31 cells'),
    (lambda: attribution.attribute(design, broken), r'cells \[4\]'),
    (lambda: attribution.attribute(design[[0, 1, 1]], values[:3]), 'twice'),
    (lambda: attribution.attribute(design[:9], values[:9]), 'determine'),
    (lambda: attribution.bootstrap(design, values[:, :1]), 'repeats=1'),
    (lambda: attribution.bootstrap(design, values, draws=1), 'draws=1'),
  ]
  for call, words in cases:
    with pytest.raises(InputError, match=words):
      call()
