"""The TPU form of linear_head, its kernels interpreted, against the form in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental.pallas import tpu as pltpu

from tests import oracles
from trm_jax.divergences import linear_head
from trm_jax.divergences.passes import blocks, kernels

N, D, E, V = 24, 16, 8, 300
FUNCTIONS = ('sums', 'linear_sums', 'linear_terms', 'linear_fused')


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """Kernels on this machine, in blocks of 16 rows and 128 tokens; the names of those that ran."""
  ran = []
  options = dict(interpret=True, chunk=128, block=(16, 128))

  def wrap(name, function):
    def call(*args, **kwargs):
      ran.append(name)
      return function(*args, **(options | kwargs))

    return call

  for name in FUNCTIONS:
    monkeypatch.setattr(kernels, name, wrap(name, getattr(kernels, name)))
  # The simulator alone knows arrays that differ between devices.
  return ran, lambda: options.update(interpret=pltpu.InterpretParams())


def case(kind, lse, temperature, v=V):
  """hidden, head, tokens, rollout, with its normaliser if `lse`."""
  k = jax.random.split(jax.random.key(0), 6)
  hidden, head = jax.random.normal(k[0], (N, D)), jax.random.normal(k[1], (v, D)) * 0.5
  tokens = jax.random.randint(k[2], (N,), 0, v)
  logits = linear_head.project(hidden, head) + jax.random.normal(k[3], (N, v)) * 0.3
  other, other_head = jax.random.normal(k[4], (N, E)), jax.random.normal(k[5], (v, E))
  if kind == 'logits':
    # Identical, without some tokens, and without others in the policy's support.
    logits = logits.at[0].set(linear_head.project(hidden, head)[0]).at[1, ::3].set(-jnp.inf)
    rollout = linear_head._Rollout(logits)
  else:
    logits = linear_head.project(other, other_head)
    rollout = (
      linear_head._Rollout(hidden=other, head=other_head) if kind else linear_head._Rollout()
    )
  if lse:
    rollout = rollout._replace(lse=jax.nn.logsumexp(logits / (temperature or 1), -1))
  return hidden, head, tokens, rollout


def both(args, temperature, full=False, vocab_size=None, axis_name=None):
  """What matters of the kernels' form and of chunks: (log-normaliser of the policy, statistics)."""
  found = []
  for form in (linear_head._by_kernel, linear_head._by_chunks):
    place = dict(vocab_size=vocab_size, axis_name=axis_name)
    policy, statistics, bounds = form(*args, temperature, full=full, **place)
    assert bounds is None
    found.append(
      (policy.top / (1 if temperature is None else temperature) + policy.log_sum, statistics)
    )
  return found


def agree(found, expected):
  for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'lse', 'temperature', 'full', 'runs'),
  [
    ('logits', True, 0.7, True, ['linear_fused']),
    pytest.param(
      'logits', False, 0.7, False, ['linear_sums', 'sums', 'linear_terms'], marks=pytest.mark.slow
    ),
    pytest.param('head', True, None, False, ['linear_fused'], marks=pytest.mark.slow),
    pytest.param(
      'head',
      False,
      None,
      True,
      ['linear_sums', 'linear_sums', 'linear_terms'],
      marks=pytest.mark.slow,
    ),
    (None, False, 0.7, False, ['linear_sums']),
  ],
)
def test_values_are_those_of_chunks(interpreted, kind, lse, temperature, full, runs):
  args = case(kind, lse, temperature)
  agree(*jax.jit(lambda *a: both(a, temperature, full))(*args))
  assert interpreted[0] == runs


@pytest.mark.parametrize(
  ('kind', 'lse'),
  [
    pytest.param('head', True, marks=pytest.mark.slow),
    (None, False),
    pytest.param('head', False, marks=pytest.mark.slow),
    pytest.param('logits', True, marks=pytest.mark.slow),
    pytest.param('logits', False, marks=pytest.mark.slow),
  ],
)
def test_padding_of_the_vocabulary_and_tokens_outside(interpreted, kind, lse):
  hidden, head, tokens, rollout = case(kind, lse, 0.7, 250)
  tokens = tokens.at[:4].set(jnp.array([250, 299, -1, -100]))
  want = both((hidden, head, tokens, rollout), 0.7, full=True)[1]
  pad = lambda x, axis: jnp.concatenate(
    [x, jnp.full([50 if i == axis else n for i, n in enumerate(x.shape)], jnp.nan)], axis
  )
  if rollout.logits is not None:
    rollout = rollout._replace(logits=pad(rollout.logits, 1))
  if rollout.head is not None:
    rollout = rollout._replace(head=pad(rollout.head, 0))
  args = hidden, pad(head, 0), tokens, rollout
  found = jax.jit(lambda *a: both(a, 0.7, full=True, vocab_size=250))(*args)
  for form in found:
    agree(form, want)
    assert np.flatnonzero(np.isnan(form[1].policy_logp)).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'lse'), [('logits', False), ('head', True)])
@pytest.mark.parametrize('vocab_size', [100, 170])
def test_padding_of_a_vocabulary_split_over_devices(interpreted, kind, lse, vocab_size):
  ran, simulate = interpreted
  simulate()
  hidden, head, tokens, rollout = case(kind, lse, 0.7, 300)
  tokens = (tokens % vocab_size).at[0].set(vocab_size)
  table = rollout.logits if kind == 'logits' else rollout.head
  spoil = lambda x, axis: jnp.where(
    jnp.arange(300).reshape([-1 if i == axis else 1 for i in range(2)]) < vocab_size, x, jnp.nan
  )
  head = spoil(head, 0)
  if kind == 'logits':
    rollout = rollout._replace(logits=spoil(table, 1))
  else:
    scores = linear_head.project(rollout.hidden, table)[:, :vocab_size]
    rollout = rollout._replace(
      head=spoil(table, 0), lse=jax.nn.logsumexp(scores / 0.7, -1) if lse else None
    )
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  specs = linear_head._Rollout(
    P('data', 'model') if kind == 'logits' else None,
    P('data') if kind == 'head' else None,
    P('model') if kind == 'head' else None,
    P('data') if lse else None,
  )

  def device(hidden, head, tokens, rollout, temperature):
    hidden, head, *_ = blocks.match_varying(hidden, head, *jax.tree.leaves(rollout))
    args = hidden, head, tokens, rollout
    return both(args, temperature, vocab_size=vocab_size, axis_name='model')

  in_specs = P('data'), P('model'), P('data'), specs, P()
  run = jax.shard_map(device, mesh=mesh, in_specs=in_specs, out_specs=P('data'))
  found = jax.jit(run)(hidden, head, tokens, rollout, 0.7)
  agree(*found)
  want = both((hidden, head, tokens, rollout), 0.7, vocab_size=vocab_size)[1]
  agree(found[0], want)
  assert jnp.isnan(found[0][1].policy_logp[0]) and jnp.isfinite(found[0][1].kl[2:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'lse'),
  [
    pytest.param('logits', True, marks=pytest.mark.slow),
    ('logits', False),
    pytest.param('head', True, marks=pytest.mark.slow),
  ],
)
def test_a_vocabulary_split_over_devices(interpreted, kind, lse):
  ran, simulate = interpreted
  simulate()
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  rows, table = P('data'), P('model')
  rollout = linear_head._Rollout(
    P('data', 'model') if kind == 'logits' else None,
    rows if kind == 'head' else None,
    table if kind == 'head' else None,
    rows if lse else None,
  )

  def device(hidden, head, tokens, rollout, temperature):
    hidden, head, *_ = blocks.match_varying(hidden, head, *jax.tree.leaves(rollout))
    args = hidden, head, tokens, rollout
    return both(args, temperature, axis_name='model')

  run = jax.shard_map(device, mesh=mesh, in_specs=(rows, table, rows, rollout, P()), out_specs=rows)
  agree(*jax.jit(run)(*case(kind, lse, 0.7, 2 * 150), 0.7))
  other = ['sums' if kind == 'logits' else 'linear_sums'] * (not lse)
  assert ran == ['linear_sums', *other, 'linear_terms']


# Ends of tiles of 128 tokens, of two devices' 150 tokens and of the vocabulary; two have no place.
EDGES = [0, 1, 127, 128, 129, 149, 150, 151, 255, 256, 277, 278, 279, 298, 299, 148, -1, 300]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'lse'), [('logits', False), ('logits', True), ('head', True), (None, False)]
)
@pytest.mark.parametrize('axis_name', [None, pytest.param('model', marks=pytest.mark.slow)])
def test_log_probs_of_tokens_at_every_edge(interpreted, kind, lse, axis_name):
  hidden, head, _, rollout = case(kind, lse, 0.7)
  tokens = jnp.array(EDGES + [5] * (N - len(EDGES)), jnp.int32)

  def run(*args):
    statistics = linear_head._by_kernel(*args, 0.7, full=False, axis_name=axis_name)[1]
    return [x for x in (statistics.policy_logp, statistics.rollout_logp) if x is not None]

  call = run
  if axis_name is not None:
    interpreted[1]()
    mesh = jax.make_mesh((2,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
    split = P('model')
    parts = linear_head._Rollout(
      P(None, 'model') if kind == 'logits' else None,
      P() if kind == 'head' else None,
      split if kind == 'head' else None,
      P() if lse else None,
    )
    specs = dict(in_specs=(P(), split, P(), parts), out_specs=P())
    call = jax.shard_map(run, mesh=mesh, **specs)
  found = jax.jit(call)(hidden, head, tokens, rollout)
  logits = [oracles.f64(hidden) @ oracles.f64(head).T]
  if kind == 'logits':
    logits.append(oracles.f64(rollout.logits))
  elif kind == 'head':
    logits.append(oracles.f64(rollout.hidden) @ oracles.f64(rollout.head).T)
  placed = slice(0, EDGES.index(-1))
  for x, y in zip(found, logits, strict=True):
    expected = oracles.logp(y, np.clip(tokens, 0, V - 1), 0.7)
    np.testing.assert_allclose(x[placed], expected[placed], rtol=1e-5, atol=1e-5)
    assert jnp.isnan(x[placed.stop : len(EDGES)]).all()  # no place in the vocabulary


@pytest.mark.parametrize(
  ('axis_name', 'full'),
  [
    pytest.param(None, True, marks=pytest.mark.slow),
    pytest.param('model', False, marks=pytest.mark.slow),
  ],
)
def test_a_normaliser_of_other_logits_gives_nan(interpreted, axis_name, full):
  *args, rollout = case('logits', True, None)
  error = np.zeros(N, np.float32)
  error[3:10] = 0.002, -0.002, 5, np.inf, -np.inf, np.nan, 0.0005
  rollout = rollout._replace(lse=rollout.lse + error)

  def run(*args):
    return linear_head._by_kernel(*args, None, full=full, axis_name=axis_name)[1]

  if axis_name is not None:
    interpreted[1]()
    mesh = jax.make_mesh((1,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
  found = jax.jit(run)(*args, rollout)
  for name in ('kl', 'tv', 'rollout_logp', *(('reverse_kl', 'chi2', 'square') if full else ())):
    assert np.flatnonzero(np.isnan(getattr(found, name))).tolist() == [3, 4, 5, 6, 7, 8], name
  assert np.isfinite(found.entropy).all() and np.isfinite(found.policy_logp).all()


@pytest.mark.slow
def test_gradients_are_those_of_chunks(monkeypatch, interpreted):
  hidden, head, tokens, rollout = case('logits', True, 0.7)
  weights = jnp.linspace(-1, 1, N)

  def loss(hidden, head):
    found = linear_head.statistics(
      hidden, head, tokens, rollout_logits=rollout.logits, rollout_lse=rollout.lse, temperature=0.7
    )
    return (weights * (found.policy_logp + 2 * found.entropy + found.kl.at[1].set(0))).sum()

  expected = jax.jit(jax.grad(loss, (0, 1)))(hidden, head)
  monkeypatch.setattr(linear_head, '_by_chunks', linear_head._by_kernel)
  found = jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(hidden, head)
  assert interpreted[0] == ['linear_fused']
  for x, y in zip(found, expected, strict=True):
    assert np.abs(y).max() > 1e-3
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
