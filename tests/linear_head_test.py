"""`linear_head`: statistics from hidden states, without scores over the vocabulary."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jax.test_util
import jaxtyping
import numpy as np
import oracles
import pytest
from jax import P

from trm_jax import divergences
from trm_jax.divergences import brackets, linear_head
from trm_jax.divergences.passes import blocks, pair
from trm_jax.mesh import sharding
from trm_jax.types import InputError

N, D, E, V = 16, 6, 5, 1024
MESHES = [(1, 8), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((4, 2), (8, 1)))]
BOTH = pytest.mark.parametrize('rollout', ['logits', 'hidden'])


@dataclasses.dataclass
class Case:
  hidden: jax.Array
  head: jax.Array
  tokens: jax.Array
  logits: jax.Array
  rollout_hidden: jax.Array
  rollout_head: jax.Array

  def rollout(self, kind):
    if kind == 'logits':
      return {'rollout_logits': self.logits}
    return {'rollout_hidden': self.rollout_hidden, 'rollout_head': self.rollout_head}

  def scores(self, kind):
    """Policy and rollout logits in float64."""
    policy = oracles.f64(self.hidden) @ oracles.f64(self.head).T
    other = oracles.f64(self.rollout_hidden) @ oracles.f64(self.rollout_head).T
    return policy, oracles.f64(self.logits) if kind == 'logits' else other


def case(seed=0, n=N, v=V, dtype=jnp.float32):
  k = jax.random.split(jax.random.key(seed), 6)
  normal = lambda key, *shape: jax.random.normal(key, shape)
  hidden, head = normal(k[0], n, D).astype(dtype), normal(k[1], v, D).astype(dtype)
  exact = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T
  return Case(
    hidden,
    head,
    jax.random.randint(k[2], (n,), 0, v),
    exact + 0.1 * normal(k[3], n, v),
    normal(k[4], n, E),
    normal(k[5], v, E),
  )


@pytest.fixture(params=['whole', 'chunks'])
def form(request, monkeypatch):
  """All scores at once, or chunks of 3 rows, blocks of 2, and blocks of 128 tokens backwards."""
  if request.param == 'chunks':
    monkeypatch.setattr(pair, 'SMALL', 1)
    monkeypatch.setattr(linear_head, 'CHUNK', 3 * V)
    monkeypatch.setattr(blocks, 'BLOCK', 2 * V)


@BOTH
def test_matches_the_oracle(form, rollout):
  c = case()
  found = linear_head.statistics(
    c.hidden, c.head, c.tokens, temperature=0.8, full=True, **c.rollout(rollout)
  )
  policy, other = c.scores(rollout)
  want = {
    'kl': oracles.kl(policy, other, 0.8),
    'tv': oracles.total_variation(policy, other, 0.8),
    'entropy': oracles.entropy(policy, 0.8),
    'policy_logp': oracles.logp(policy, c.tokens, 0.8),
    'rollout_logp': oracles.logp(other, c.tokens, 0.8),
    'reverse_kl': oracles.kl(other, policy, 0.8),
    'chi2': oracles.chi2(policy, other, 0.8),
    'square': oracles.square(policy, 0.8),
  }
  for name, value in want.items():
    got = getattr(found, name)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, value, rtol=2e-5, atol=5e-6, err_msg=name)


@pytest.mark.slow
def test_rows_and_vocabulary_need_not_fit_the_blocks(monkeypatch):
  # 7 rows in chunks of 3 and 1000 tokens in blocks of 128: both ends overlap.
  monkeypatch.setattr(pair, 'SMALL', 1)
  monkeypatch.setattr(linear_head, 'CHUNK', 3 * 1000)
  c = case(1, 7, 1000)
  weights = jnp.sin(jnp.arange(7.0))

  def loss(fn):
    return lambda hidden, head: (weights * fn(hidden, head)).sum()

  chunked = loss(lambda h, w: sum(linear_head.logp(h, w, c.tokens)))
  plain = loss(lambda h, w: divergences.logp(h @ w.T, c.tokens) + divergences.entropy(h @ w.T))
  for got, want in zip(
    jax.grad(chunked, (0, 1))(c.hidden, c.head), jax.grad(plain, (0, 1))(c.hidden, c.head),
    strict=True,
  ):  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'value',
  [pytest.param(np.nan, marks=pytest.mark.slow), 0.0, pytest.param(np.inf, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize('rollout', [pytest.param('logits', marks=pytest.mark.slow), 'hidden'])
def test_padding_of_a_vocabulary_has_no_mass(form, rollout, value):
  c = case(3)
  tokens = c.tokens.at[0].set(V).at[1].set(-100)
  pad = lambda x, n, axis: np.concatenate(
    [x, np.full([n if i == axis else m for i, m in enumerate(x.shape)], value, x.dtype)], axis
  )
  given = c.rollout(rollout)
  more = {k: jnp.asarray(pad(x, 7, 1)) for k, x in given.items() if k == 'rollout_logits'}
  more |= {k: jnp.asarray(pad(x, 7, 0)) for k, x in given.items() if k == 'rollout_head'}

  def loss(hidden, head, given, vocab_size):
    options = dict(temperature=0.8, vocab_size=vocab_size)
    found = linear_head.statistics(hidden, head, tokens, full=True, **given, **options)
    logp, entropy = linear_head.logp(hidden, head, tokens, **options)
    values = dataclasses.asdict(found) | {'logp alone': logp, 'entropy alone': entropy}
    values['kl_from'] = (
      linear_head.kl_from(
        hidden, head, c.rollout_hidden, given.get('rollout_head', c.rollout_head), **options
      )
      if rollout == 'hidden'
      else entropy
    )
    total = sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0)).sum() for x in values.values())
    return total, values

  run = jax.value_and_grad(loss, (0, 1), has_aux=True)
  (_, want), slopes = run(c.hidden, c.head, given, None)
  (_, got), padded = run(c.hidden, jnp.asarray(pad(c.head, 5, 0)), given | more, V)
  for name, x in want.items():
    np.testing.assert_allclose(got[name], x, rtol=2e-5, atol=5e-6, err_msg=name)
    assert jnp.isnan(x[:2]).all() == ('logp' in name), name
  np.testing.assert_allclose(padded[0], slopes[0], rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(padded[1][:V], slopes[1], rtol=2e-5, atol=2e-5)
  assert (padded[1][V:] == 0).all()


@pytest.mark.slow
def test_gradient_against_float64(form):
  # d logp = 1[v = token] - q and d H = -q (log q + H) on the scores, times hidden and head.
  c = case(2)
  g = np.random.default_rng(0).normal(size=(2, N)).astype(np.float32)

  def loss(hidden, head):
    s = linear_head.statistics(hidden, head, c.tokens, rollout_logits=c.logits, temperature=0.7)
    return (g[0] * s.policy_logp + g[1] * s.entropy + s.kl + s.tv + s.rollout_logp).sum()

  got = jax.jit(jax.grad(loss, (0, 1)))(c.hidden, c.head)
  policy, _ = c.scores('logits')
  log_q = oracles.log_softmax(policy, 0.7)
  q, entropy = np.exp(log_q), oracles.entropy(policy, 0.7)
  slope = g[0][:, None] * (np.arange(V) == np.asarray(c.tokens)[:, None]) - g[0][:, None] * q
  slope = (slope - g[1][:, None] * q * (log_q + entropy[:, None])) / 0.7
  want = slope @ oracles.f64(c.head), slope.T @ oracles.f64(c.hidden)
  for got_one, want_one in zip(got, want, strict=True):
    error = np.linalg.norm(got_one - want_one) / np.linalg.norm(want_one)
    assert error < 1e-6


@pytest.mark.slow
def test_check_grads(form):
  c = case(3, 3, 130)
  f = lambda h, w: linear_head.logp(jnp.asarray(h), jnp.asarray(w), c.tokens, temperature=1.5)
  jax.test_util.check_grads(
    f, (c.hidden, c.head), order=1, modes=('rev',), rtol=2e-2, atol=2e-2, eps=1e-2
  )


@pytest.mark.slow
@BOTH
def test_identical_heads_are_at_no_distance(form, rollout):
  # Two products of the same matrices may differ in the last bit, so exactly 0 is too much to ask.
  c = case(4)
  same = {'rollout_hidden': c.hidden, 'rollout_head': c.head}
  if rollout == 'logits':
    same = {'rollout_logits': linear_head.project(c.hidden, c.head)}
  found = jax.jit(lambda h, w: linear_head.statistics(h, w, c.tokens, full=True, **same))(
    c.hidden, c.head
  )
  np.testing.assert_allclose(found.policy_logp, found.rollout_logp, atol=2e-6)
  for x in (found.kl, found.reverse_kl, found.chi2):
    assert (x >= 0).all() and x.max() < 1e-11


@pytest.mark.slow
def test_bfloat16(form):
  c = case(5, dtype=jnp.bfloat16)
  found = linear_head.statistics(c.hidden, c.head, c.tokens, rollout_logits=c.logits)
  policy, other = c.scores('logits')
  np.testing.assert_allclose(found.kl, oracles.kl(policy, other), rtol=1e-4)
  np.testing.assert_allclose(found.policy_logp, oracles.logp(policy, c.tokens), rtol=1e-4)
  gradients = jax.grad(lambda h, w: linear_head.logp(h, w, c.tokens)[0].sum(), (0, 1))(
    c.hidden, c.head
  )
  wide = [x.astype(jnp.float32) for x in (c.hidden, c.head)]
  exact = jax.grad(lambda h, w: linear_head.logp(h, w, c.tokens)[0].sum(), (0, 1))(*wide)
  for got, want in zip(gradients, exact, strict=True):
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(oracles.f64(got) - oracles.f64(want)) / np.linalg.norm(oracles.f64(want))
    assert error < 1e-2


def test_only_sampled_log_probs(form):
  c = case(6)
  logp, entropy = linear_head.logp(c.hidden, c.head, c.tokens, temperature=0.9)
  policy, _ = c.scores('logits')
  np.testing.assert_allclose(logp, oracles.logp(policy, c.tokens, 0.9), rtol=1e-5)
  np.testing.assert_allclose(entropy, oracles.entropy(policy, 0.9), rtol=1e-5)


@pytest.mark.slow
def test_top_k(form):
  c = case(7)
  top = brackets.top_k(c.logits, 32, temperature=0.9)
  kl, tv, logp, entropy = linear_head.brackets(c.hidden, c.head, c.tokens, top, temperature=0.9)
  policy, other = c.scores('logits')
  for bracket, truth in [
    (kl, oracles.kl(policy, other, 0.9)),
    (tv, oracles.total_variation(policy, other, 0.9)),
  ]:
    assert (bracket.lower <= truth).all() and (truth <= bracket.upper).all()
  want = brackets.bounds(linear_head.project(c.hidden, c.head), top, temperature=0.9)
  jax.tree.map(
    lambda got, w: np.testing.assert_allclose(got, w, rtol=1e-5, atol=1e-6), (kl, tv), want
  )
  alone = linear_head.logp(c.hidden, c.head, c.tokens, temperature=0.9)
  np.testing.assert_allclose(logp, alone[0], rtol=1e-6)
  np.testing.assert_allclose(entropy, alone[1], rtol=1e-6)
  # Log-prob and entropy carry gradients, the bounds none.
  total = lambda h: sum(x.sum() for x in jax.tree.leaves(kl_of(h)[:2]))
  kl_of = lambda h: linear_head.brackets(h, c.head, c.tokens, top)
  np.testing.assert_array_equal(jax.grad(total)(c.hidden), 0)
  assert jnp.abs(jax.grad(lambda h: kl_of(h)[2].sum())(c.hidden)).max() > 0.1


@pytest.mark.slow
def test_a_row_without_weight_has_no_gradient_whatever_it_holds(form):
  c = case(8)
  bad = c.hidden.at[3].set(jnp.nan).at[4].set(1e30).at[5].set(jnp.inf)
  kept = jnp.ones(N, bool).at[jnp.array([3, 4, 5])].set(False)

  def loss(hidden, head):
    logp, entropy = linear_head.logp(hidden, head, c.tokens)
    return jnp.where(kept, logp + entropy, 0).sum()

  got, want = (jax.grad(loss, (0, 1))(h, c.head) for h in (bad, c.hidden))
  for x, clean in zip(got, want, strict=True):
    np.testing.assert_allclose(x, clean, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(got[0][~kept], 0)
  assert jnp.isnan(linear_head.logp(bad, c.head, c.tokens)[0][3])


@pytest.mark.slow
def test_penalty_and_its_gradient_are_those_of_the_scores(monkeypatch):
  """KL(policy || reference) by chunks of 3 rows, the last one shorter, against float64."""
  monkeypatch.setattr(linear_head, 'CHUNK', 3 * V)
  rng = np.random.default_rng(8)
  n, t = 7, 0.7
  hidden, head, states, table = (
    jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((n, D), (V, D), (n, E), (V, E))
  )
  weights = rng.uniform(size=n)

  def loss(hidden, head, states, table):
    found = linear_head.kl_from(hidden, head, states, table, temperature=t)
    return (found * jnp.asarray(weights, jnp.float32)).sum(), found

  grads, found = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(hidden, head, states, table)
  h, w, s, r = (np.asarray(x, np.float64) for x in (hidden, head, states, table))
  log_q, log_p = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (h @ w.T / t, s @ r.T / t))
  q, d = np.exp(log_q), log_q - log_p
  kl = (q * d).sum(-1)
  np.testing.assert_allclose(found, kl, rtol=1e-5)
  slope = weights[:, None] * q * (d - kl[:, None]) / t
  np.testing.assert_allclose(grads[0], slope @ w, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(grads[1], slope.T @ h, rtol=1e-4, atol=1e-5)
  assert (grads[2] == 0).all() and (grads[3] == 0).all()


def test_leading_axes():
  c = case(9)
  wide = lambda x: x.reshape(4, 4, *x.shape[1:])
  got = linear_head.statistics(
    wide(c.hidden), c.head, wide(c.tokens), rollout_logits=wide(c.logits)
  )
  want = linear_head.statistics(c.hidden, c.head, c.tokens, rollout_logits=c.logits)
  np.testing.assert_allclose(got.kl, wide(want.kl), rtol=1e-5)
  assert got.policy_logp.shape == (4, 4)


def test_no_buffer_has_the_size_of_the_scores(optimised, monkeypatch):
  # 512 x 4096 scores; the largest temporary allowed is a chunk or a gradient of the head.
  monkeypatch.setattr(pair, 'SMALL', 1)
  monkeypatch.setattr(linear_head, 'CHUNK', 2**16)
  monkeypatch.setattr(blocks, 'BLOCK', 2**14)
  n, v = 512, 4096
  hidden, head = jnp.zeros((n, D)), jnp.zeros((v, D))
  tokens, other = jnp.zeros(n, jnp.int32), (jnp.zeros((n, E)), jnp.zeros((v, E)))

  def loss(hidden, head):
    s = linear_head.statistics(hidden, head, tokens, rollout_hidden=other[0], rollout_head=other[1])
    return (s.policy_logp + s.entropy).sum() + jax.lax.stop_gradient(s.kl).sum()

  compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).compile()
  text = compiled.as_text()
  assert f'{n},{v}]' not in text and f'{n * v}]' not in text
  assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * 4 * n * v


def test_no_row_of_a_head_is_gathered_on_a_tpu():
  shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
  n, v = 256, 8192

  def run(hidden, head, tokens, logits, lse):
    return linear_head.statistics(hidden, head, tokens, rollout_logits=logits, rollout_lse=lse)

  args = shape(n, 256), shape(v, 256), shape(n, dtype=jnp.int32), shape(n, v)
  traced = jax.jit(run).trace(*args, shape(n, dtype=jnp.float32))
  text = traced.lower(lowering_platforms=('tpu',)).as_text()
  assert 'tpu_custom_call' in text
  assert 'stablehlo.gather' not in text and 'stablehlo.dynamic_gather' not in text


# Devices.


def everything(hidden, head, logits, other_hidden, other_head, tokens, axis_name=None):
  stored = linear_head.statistics(
    hidden, head, tokens, rollout_logits=logits, temperature=0.9, full=True, axis_name=axis_name
  )
  again = linear_head.statistics(
    hidden, head, tokens, rollout_hidden=other_hidden, rollout_head=other_head, axis_name=axis_name
  )
  logp, entropy = linear_head.logp(hidden, head, tokens, axis_name=axis_name)
  named = {f'stored.{k}': x for k, x in dataclasses.asdict(stored).items()}
  named |= {f'again.{k}': x for k, x in dataclasses.asdict(again).items() if x is not None}
  return named | {'logp': logp, 'entropy': entropy}


def cotangent(values):
  """Different for every output and position."""
  return {
    name: 0 * value + jnp.sin(7.0 * i + jnp.arange(value.size))
    for i, (name, value) in enumerate(sorted(values.items()))
  }


def value_and_gradients(fn, hidden, head, *rest):
  values, back = jax.vjp(lambda h, w: fn(h, w, *rest), hidden, head)
  return values, back(cotangent(values))


def close(got, want):
  for name, value in want[0].items():
    np.testing.assert_allclose(got[0][name], value, rtol=2e-5, atol=5e-6, err_msg=name)
  for g, w in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=2e-5 * np.abs(w).max())


@functools.cache
def unsharded():
  c = case(10)
  args = c.hidden, c.head, c.logits, c.rollout_hidden, c.rollout_head, c.tokens
  return args, jax.jit(functools.partial(value_and_gradients, everything))(*args)


@pytest.mark.parametrize('mesh', MESHES)
def test_split_over_a_mesh(mesh, form):
  args, want = unsharded()
  rows, columns, scores = P('data'), P('model'), P('data', 'model')
  specs = (rows, columns, scores, rows, columns, rows)
  with jax.set_mesh(sharding.make_mesh(*mesh)):
    split = jax.shard_map(
      functools.partial(everything, axis_name='model'),
      in_specs=specs,
      out_specs=rows,
      check_vma=True,
    )
    placed = [jax.device_put(x, s) for x, s in zip(args, specs, strict=True)]
    fn = jax.jit(functools.partial(value_and_gradients, split))
    got = fn(*placed)
    assert 'all-gather' not in fn.lower(*placed).compile().as_text()
  close(got, want)


@pytest.mark.slow
def test_one_exchange_of_normalisers_and_one_of_terms():
  c = case(11)
  rows, columns, scores = P('data'), P('model'), P('data', 'model')
  fn = lambda h, w, a, t: linear_head.statistics(h, w, t, rollout_logits=a, axis_name='model')
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    split = jax.shard_map(fn, in_specs=(rows, columns, scores, rows), out_specs=rows)
    args = [
      jax.device_put(x, s)
      for x, s in zip(
        (c.hidden, c.head, c.logits, c.tokens), (rows, columns, scores, rows), strict=True
      )
    ]
    text = jax.jit(split).lower(*args).compile().as_text()
  # Four local positions: 2 maxima, 5 sums, 2 divergences.
  reduced = sorted(
    line.split(' = ')[1].split('{')[0] for line in text.splitlines() if ' all-reduce(' in line
  )
  assert reduced == ['f32[2,4]', 'f32[2,4]', 'f32[5,4]'], reduced


# Bad input.


@pytest.fixture
def unchecked():
  """As users call the functions: without the type checks of the tests."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(head=jnp.zeros((D, V))), r'head must be \[V, D\]'),
    (dict(hidden=jnp.zeros((N, D), int)), 'hidden has dtype int32'),
    (dict(tokens=jnp.zeros(3, int)), r'tokens has shape \(3,\)'),
    (dict(rollout_logits=jnp.zeros((N, 9))), 'rollout_logits scores 9 tokens'),
    (dict(rollout_logits=None), 'give exactly one'),
    (dict(rollout_hidden=jnp.zeros((N, E)), rollout_head=jnp.zeros((V, E))), 'give exactly one'),
    (dict(rollout_logits=None, rollout_hidden=jnp.zeros((N, E))), 'belong together'),
    (
      dict(rollout_logits=None, rollout_hidden=jnp.zeros((N, E)), rollout_head=jnp.zeros((9, E))),
      'rollout_head scores 9 tokens and head 1024',
    ),
    (
      dict(rollout_logits=None, rollout_hidden=jnp.zeros((3, E)), rollout_head=jnp.zeros((V, E))),
      'the positions must agree',
    ),
    (dict(temperature=-1.0), 'temperature=-1.0 must be > 0'),
    (dict(temperature=math.nan), 'temperature=nan must be > 0'),
  ],
)
def test_bad_input_is_named(unchecked, changes, message):
  c = case()
  args = dict(hidden=c.hidden, head=c.head, tokens=c.tokens, rollout_logits=c.logits) | changes
  with pytest.raises(InputError, match=message):
    linear_head.statistics(**args)
