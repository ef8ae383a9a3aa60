"""The TPU kernels, run by the Pallas interpreter, against the formulas in float64.

Small blocks and chunks, so that every sum crosses several of them and every edge is ragged. Blocks
that reach beyond an array hold NaN there: nothing of it may enter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from tests import oracles
from trm_jax.divergences.passes import kernels, lanes, tiles

# Simulates a TPU's memory, and knows arrays that vary over a mesh; the plain one does neither.
SIMULATED = pltpu.InterpretParams(uninitialized_memory='nan')
SMALL = dict(interpret=True, chunk=128, block=(16, 256))
FIELDS = ('kl', 'tv', 'reverse_kl', 'chi2', 'square')


@np.errstate(invalid='ignore')
def expected(policy, rollout, temperature=1.0):
  """{field: [N]} in float64; rows with NaN or without a finite logit are NaN."""
  log_q, log_p = (oracles.log_softmax(x, temperature) for x in (policy, rollout))
  q, p = np.exp(log_q), np.exp(log_p)
  with np.errstate(invalid='ignore', divide='ignore', over='ignore'):
    chi2 = np.where(q == 0, 0, np.exp(2 * log_q - log_p)).sum(-1) - 1
  found = dict(
    kl=oracles.kl_of(log_q, log_p),
    tv=np.abs(q - p).sum(-1),
    reverse_kl=oracles.kl_of(log_p, log_q),
    chi2=chi2,
    square=(q * q).sum(-1),
  )
  missing = np.isnan(q).any(-1) | np.isnan(p).any(-1)
  return {name: np.where(missing, np.nan, x) for name, x in found.items()}


def check(found, policy, rollout, temperature=1.0, *, full=True, rtol=1e-5):
  wanted = expected(policy, rollout, temperature)
  for name in FIELDS:
    x = getattr(found, name)
    if not full and name not in ('kl', 'tv'):
      assert x is None
      continue
    assert x.dtype == jnp.float32
    # KL of 5e-7 within 1e-5 of itself; the others in units of the float32 spacing of 1.
    atol = 1e-12 if name == 'kl' else 1e-6
    np.testing.assert_allclose(x, wanted[name], rtol=rtol, atol=atol, err_msg=name)
    assert not np.any(np.asarray(x) < 0), name


def check_sums(found, logits, temperature=1.0, rtol=1e-6):
  x = oracles.f64(logits) / temperature
  np.testing.assert_allclose(found.top, oracles.f64(logits).max(-1), rtol=rtol)
  total = np.exp(x - x.max(-1, keepdims=True)).sum(-1)
  np.testing.assert_allclose(found.total, total, rtol=rtol)
  if found.weighted is not None:
    entropy = np.log(found.total) - found.weighted / found.total
    np.testing.assert_allclose(entropy, oracles.entropy(logits, temperature), rtol=2e-6, atol=1e-6)


def edge_rows(size, dtype, seed=0):
  """21 pairs of rows (not a multiple of a block), one edge case each."""
  rng = np.random.default_rng(seed)
  b = rng.normal(0, 2, (21, size))
  a = b + rng.normal(0, 0.3, b.shape)
  a[1] = b[1]  # identical
  a[2] = b[2] + 1e-3 * rng.normal(size=size)  # KL 5e-7
  b[3, ::3] = -np.inf  # the policy lacks tokens: KL inf
  a[4, ::3] = -np.inf  # the rollout lacks tokens
  a[5, ::2], b[5, ::2] = -np.inf, -np.inf
  b[6, :-1] = -np.inf  # one token left, the last
  a[6, :-1] = -np.inf
  a[7, :1], b[7, 1:] = -np.inf, -np.inf  # nothing in common
  b[8], a[8] = np.round(b[8]) + 1e4, np.round(a[8]) + 1e4
  b[9], a[9] = np.round(b[9]) - 1e4, np.round(a[9]) + 1e4  # far apart
  b[10], a[10] = b[10] * 100, a[10] * 100  # almost all tokens underflow
  b[12, 0], a[13, -1] = np.nan, np.nan
  b[14], a[15] = -np.inf, -np.inf  # no distribution
  return jnp.asarray(b, dtype), jnp.asarray(a, dtype)


def two_reads(policy, rollout, temperature=None, *, full=False, **options):
  """Both normalisers, then the terms, as for a vocabulary split over devices."""
  q, p = (kernels.sums(x, temperature, **options) for x in (policy, rollout))
  given = (q.top, jnp.log(q.total), p.top, jnp.log(p.total))
  return q, p, kernels.terms_given(policy, rollout, *given, temperature, full=full, **options)


def one_read(*args, block=None, **options):
  return kernels.fused(*args, **options)


FORMS = pytest.mark.parametrize('form', [one_read, two_reads])


@FORMS
@pytest.mark.parametrize(
  ('dtype', 'full', 'temperature'),
  [(jnp.float32, True, 0.5), pytest.param(jnp.bfloat16, False, None, marks=pytest.mark.slow)],
)
def test_every_edge_case_matches_the_formulas_in_float64(form, dtype, full, temperature):
  policy, rollout = edge_rows(600, dtype)
  q, p, found = form(policy, rollout, temperature, full=full, **SMALL)
  check(found, policy, rollout, temperature or 1.0, full=full)
  assert found.kl[1] == 0 and found.tv[1] == 0
  assert found.kl[3] == jnp.inf and jnp.isfinite(found.kl[4])
  missing = [12, 13, 14, 15]
  for x in found:
    assert x is None or np.flatnonzero(np.isnan(x)).tolist() == missing
  sound = [i for i in range(21) if i not in missing]
  for side, logits in ((q, policy), (p, rollout)):
    check_sums(
      jax.tree.map(lambda x: x[np.array(sound)], side), logits[np.array(sound)], temperature or 1.0
    )


@FORMS
@pytest.mark.parametrize(
  'shape',
  [
    (3, 1),
    pytest.param((1, 127), marks=pytest.mark.slow),
    pytest.param((17, 129), marks=pytest.mark.slow),
  ],
)
def test_any_number_of_rows_and_tokens(form, shape):
  rng = np.random.default_rng(1)
  policy, rollout = jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
  _, _, found = form(policy, rollout, 0.7, full=True, **SMALL)
  check(found, policy, rollout, 0.7)


# A row of 300 float32 entries a side takes 3 KiB, twice.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('rows', 'kernels_run'), [(16, 1), (8, 1), pytest.param(7, 3, marks=pytest.mark.slow)]
)
def test_logits_are_read_twice_only_where_eight_rows_do_not_fit(rows, kernels_run):
  policy, rollout = edge_rows(300, jnp.float32)
  memory = tiles.SPARE_VMEM + rows * 6 * 1024
  call = functools.partial(kernels.fused, full=True, interpret=True, chunk=128, vmem_bytes=memory)
  assert str(jax.make_jaxpr(call)(policy, rollout)).count('pallas_call[') == kernels_run
  check(call(policy, rollout)[2], policy, rollout)


def test_a_block_without_mass_adds_nothing():
  x, _ = edge_rows(300, jnp.float32)
  x = x.at[0].set(-jnp.inf)
  found = kernels.sums(x, 0.5, **SMALL)
  assert (found.top[0], found.total[0], found.weighted[0]) == (-jnp.inf, 0, 0)
  rest = jax.tree.map(lambda a: a[:3], found)
  whole = lanes.merge(jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), rest), 0, 2.0)
  both = np.concatenate([x[:3], x[:3][::-1]], 1)
  check_sums(whole, both, 0.5)


def head_case(dtype, rows=21, size=600, width=40):
  rng = np.random.default_rng(2)
  hidden = jnp.asarray(rng.normal(size=(rows, width)), dtype)
  head = jnp.asarray(rng.normal(size=(size, width)) * 0.3, dtype)
  return hidden, head, np.einsum('nd,vd->nv', oracles.f64(hidden), oracles.f64(head))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('dtype', 'full', 'temperature'),
  [(jnp.float32, True, 0.7), pytest.param(jnp.bfloat16, False, None, marks=pytest.mark.slow)],
)
def test_products_with_a_head_match_their_logits(dtype, full, temperature):
  hidden, head, logits = head_case(dtype)
  hidden = hidden.at[2].set(jnp.nan)
  found = kernels.linear_sums(hidden, head, temperature, **SMALL)
  sound = np.arange(21) != 2
  # Products are rounded to float32, which no formula can undo.
  check_sums(jax.tree.map(lambda x: x[sound], found), logits[sound], temperature or 1.0, 1e-5)
  logits[2] = np.nan

  _, rollout = edge_rows(600, dtype)
  # Differences of 1 and 1e4 are rounded, too.
  rollout = rollout.at[8:10].set(rollout[16:18])
  p = kernels.sums(rollout, temperature, **SMALL)
  given = (found.top, jnp.log(found.total), p.top, jnp.log(p.total))
  given_terms, mass, _ = kernels.linear_terms(
    hidden, head, rollout, *given, temperature, full=full, **SMALL
  )
  check(given_terms, logits, rollout, temperature or 1.0, full=full, rtol=3e-5)
  np.testing.assert_allclose(mass, np.where(np.isnan(given_terms.tv), np.nan, 1), rtol=1e-6)

  _, lying, _ = kernels.linear_terms(
    hidden, head, rollout, *given[:3], given[3] + 0.1, temperature, **SMALL
  )
  np.testing.assert_allclose(lying[0], np.exp(-0.1), rtol=1e-6)


@pytest.mark.slow
def test_two_products_and_identical_ones(monkeypatch):
  # Several products a block of rows, and the interpreter that refuses to read beyond an array.
  monkeypatch.setattr(tiles, '_PRODUCT', 32)
  options = dict(chunk=128, block=(64, 128), interpret=SIMULATED)
  hidden, head, logits = head_case(jnp.bfloat16, 70, 300)
  other, other_head, rollout = head_case(jnp.bfloat16, 70, 300, width=72)
  q = kernels.linear_sums(hidden, head, **options)
  p = kernels.linear_sums(other, other_head, weighted=False, **options)
  assert p.weighted is None
  q, p = ((s.top, jnp.log(s.total)) for s in (q, p))
  call = functools.partial(kernels.linear_terms, hidden, head, full=True, **options)
  found, mass, _ = call((other, other_head), *q, *p)
  check(found, logits, rollout)
  np.testing.assert_allclose(mass, 1, rtol=1e-6)
  same, *_ = call((hidden, head), *q, *q)
  assert not any(np.any(getattr(same, name)) for name in FIELDS[:4])

  tokens = np.arange(70) * 4 + 23  # up to the last
  call = functools.partial(
    kernels.linear_fused, hidden, head, full=True, tokens=jnp.asarray(tokens), **options
  )
  once, found, mass, picked = call((other, other_head), lse_of(rollout))
  for x, y in ((once.picked, logits), (picked, rollout)):
    np.testing.assert_allclose(x, y[np.arange(70), tokens], rtol=1e-5, atol=1e-5)
  check(found, logits, rollout)
  np.testing.assert_allclose(mass, 1, rtol=3e-6)
  for x, y in zip((once.top, jnp.log(once.total)), q, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)
  _, same, *_ = call((hidden, head), q[0] + q[1])
  assert max(same.kl) < 1e-12 and max(same.tv) < 1e-6


def lse_of(logits, temperature=1.0):
  x = oracles.f64(logits) / temperature
  with np.errstate(invalid='ignore', divide='ignore'):
    top = np.where(np.isneginf(x.max(-1)), 0, x.max(-1))
    return jnp.asarray(top + np.log(np.exp(x - top[:, None]).sum(-1)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('dtype', 'full', 'temperature', 'kernels_run'),
  [(jnp.float32, True, 0.7, 1), pytest.param(jnp.bfloat16, False, None, 2, marks=pytest.mark.slow)],
)
def test_one_kernel_for_a_head_and_a_normalised_rollout(dtype, full, temperature, kernels_run):
  hidden, head, logits = head_case(dtype)
  hidden = hidden.at[2].set(jnp.nan)
  logits[2] = np.nan
  _, rollout = edge_rows(600, dtype)
  # Logits of 1e4 and their normalisers are rounded.
  rollout = rollout.at[8:11].set(rollout[16:19])
  lies = np.array([0.1, -5, jnp.inf, -jnp.inf, jnp.nan], np.float32)
  lse = lse_of(rollout, temperature or 1.0).at[16:].add(lies)
  # Two cores that each read the head twice would read more than two kernels.
  options = SMALL if kernels_run == 1 else SMALL | dict(block=None, cores=2)
  call = jax.jit(functools.partial(kernels.linear_fused, full=full, **options))
  args = hidden, head, rollout, lse, temperature
  assert str(jax.make_jaxpr(call)(*args)).count('pallas_call[') == kernels_run
  q, found, mass, _ = call(*args)
  sound = np.arange(21) != 2
  check_sums(jax.tree.map(lambda x: x[sound], q), logits[sound], temperature or 1.0, 1e-5)
  rows = slice(0, 16)
  honest = jax.tree.map(lambda x: x[rows], found)
  check(honest, logits[rows], rollout[rows], temperature or 1.0, full=full, rtol=3e-5)
  np.testing.assert_allclose(mass[rows], np.where(np.isnan(honest.tv), np.nan, 1), rtol=3e-6)
  np.testing.assert_allclose(mass[16:18], np.exp(-lies[:2]), rtol=3e-6)
  assert np.isnan(mass[18:]).all()
  assert all(np.isnan(x[18:]).all() for x in found if x is not None)


@pytest.mark.slow
def test_picked_logits_are_those_of_the_tokens():
  # Blocks of 256 entries in chunks of 128, two shares for products, a ragged end at 600.
  edges = [0, 1, 126, 127, 128, 129, 254, 255, 256, 257, 383, 384, 510, 511, 512, 513, 598, 599]
  tokens = np.array([*edges, -1, 300, 599])
  hidden, head, logits = head_case(jnp.float32)
  rollout = jnp.asarray(np.random.default_rng(3).normal(size=(21, 600)), jnp.float32)
  # One missing at its token, one broken elsewhere.
  rollout = rollout.at[4, tokens[4]].set(-jnp.inf).at[19, 299].set(jnp.nan)
  here = tokens >= 0
  of_policy, of_rollout = (
    np.where(here, oracles.f64(x)[np.arange(21), tokens], 0) for x in (logits, rollout)
  )
  lse, q = lse_of(rollout), (jnp.zeros(21), lse_of(logits))
  options = SMALL | dict(tokens=jnp.asarray(tokens))
  same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  same(kernels.linear_sums(hidden, head, 0.7, **options).picked, of_policy)
  same(kernels.sums(rollout, 0.7, weighted=False, **options).picked, of_rollout)
  same(kernels.linear_terms(hidden, head, rollout, *q, None, lse, **options)[2], of_rollout)
  found = kernels.linear_fused(hidden, head, rollout, lse, **options)
  same(found[0].picked, of_policy)
  same(found[3], of_rollout)


@pytest.mark.slow
def test_vmap_and_a_traced_temperature():
  policy, rollout = edge_rows(200, jnp.float32)
  temperatures = jnp.array([0.5, 1.0, 2.0])
  call = functools.partial(kernels.fused, full=True, interpret=True, chunk=128)
  stack = lambda x: jnp.stack([x[:5], x[5:10], x[16:]])
  _, _, found = jax.jit(jax.vmap(call))(stack(policy), stack(rollout), temperatures)
  for i, t in enumerate((0.5, 1.0, 2.0)):
    one = jax.tree.map(lambda x: x[i], found)  # noqa: B023
    check(one, stack(policy)[i], stack(rollout)[i], t)

  hidden, head, _ = head_case(jnp.float32, 15, 200)
  logits = np.asarray(jnp.einsum('nd,vd->nv', hidden, head, precision='float32')).reshape(3, 5, 200)
  hidden, rollout = hidden.reshape(3, 5, -1), stack(rollout)
  lse = jnp.stack([lse_of(x, t) for x, t in zip(rollout, temperatures, strict=True)])
  call = functools.partial(
    kernels.linear_fused, full=True, interpret=True, chunk=128, block=(8, 128)
  )
  axes = 0, None, 0, 0, 0
  _, found, *_ = jax.jit(jax.vmap(call, axes))(hidden, head, rollout, lse, temperatures)
  for i, t in ((0, 0.5), (2, 2.0)):
    check(jax.tree.map(lambda x: x[i], found), logits[i], rollout[i], t, rtol=3e-5)  # noqa: B023


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_no_type_is_promoted_by_accident(dtype):
  hidden, head, logits = head_case(dtype)
  logits = jnp.asarray(logits, dtype)
  with jax.numpy_dtype_promotion('strict'):
    jax.make_jaxpr(functools.partial(kernels.fused, full=True))(logits, logits, 0.5)
    q = jax.eval_shape(kernels.linear_sums, hidden, head, 0.5)
    given = [jnp.zeros(x.shape) for x in (q.top, q.total, q.top, q.total)]
    found, *_ = jax.eval_shape(
      functools.partial(kernels.linear_terms, full=True), hidden, head, logits, *given
    )
  assert {x.dtype for x in jax.tree.leaves((q, found))} == {jnp.dtype('float32')}


@pytest.mark.slow
def test_a_vocabulary_split_over_devices():
  options = dict(chunk=128, block=(16, 128), interpret=SIMULATED)
  mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  policy, rollout = (x[:8] for x in edge_rows(4 * 150, jnp.float32))

  def device(b, a):
    sides = []
    for x in (b, a):
      local = kernels.sums(x, 0.5, weighted=False, **options)
      top = jax.lax.pmax(local.top, 'model')
      gap = jnp.where(local.top == -jnp.inf, -jnp.inf, local.top - top) / 0.5
      sides += [top, jnp.log(jax.lax.psum(local.total * jnp.exp(gap), 'model'))]
    found = kernels.terms_given(b, a, *sides, 0.5, full=True, **options)
    return jax.tree.map(lambda x: jax.lax.psum(x, 'model'), found)

  specs = dict(in_specs=P('data', 'model'), out_specs=P('data'))
  call = jax.jit(jax.shard_map(device, mesh=mesh, check_vma=True, **specs))
  check(call(policy, rollout), policy, rollout, 0.5)


@pytest.mark.parametrize(
  ('mib', 'rollout_width', 'rows'),
  [(128, 0, 4096), (128, 4096, 4096), (64, 0, 4096), (64, 4096, 2048)],
)
def test_a_head_is_read_once_where_memory_allows(mib, rollout_width, rows):
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  n, v, d = 4096, 152064, 4096
  rollout = (shape(n, v),)
  if rollout_width:
    rollout = shape(n, rollout_width), shape(v, rollout_width)
  plan = tiles.plan([(shape(n, d), shape(v, d)), rollout], 3, None, mib * tiles.MIB)
  assert plan.block_rows == rows


@pytest.mark.slow
@pytest.mark.parametrize(('mib', 'cores', 'kernels_run'), [(128, 1, 1), (64, 1, 1), (64, 2, 2)])
def test_hidden_and_rollout_are_read_once_and_the_head_twice(mib, cores, kernels_run):
  shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
  n, v, d = 4096, 152064, 4096
  sources = (shape(n, d), shape(v, d)), (shape(n, v),)
  plan = tiles.plan(sources, 3, None, mib * tiles.MIB, sweeps=2, cores=cores)
  assert plan.read(sources) == 2 * (n * d + 2 * cores * v * d + n * v)
  call = functools.partial(kernels.linear_fused, vmem_bytes=mib * tiles.MIB, cores=cores)
  args = *sources[0], *sources[1], shape(n, dtype=jnp.float32)
  assert str(jax.make_jaxpr(call)(*args)).count('pallas_call[') == kernels_run
