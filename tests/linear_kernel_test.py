"""The TPU form of trm_jax.linear_head, its kernels interpreted, against the form in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental.pallas import tpu as pltpu

from tests import oracles
from trm_jax import blocks, kernels
from trm_jax import linear_head as lh

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
  logits = lh.project(hidden, head) + jax.random.normal(k[3], (N, v)) * 0.3
  other, other_head = jax.random.normal(k[4], (N, E)), jax.random.normal(k[5], (v, E))
  if kind == 'logits':
    # Identical, without some tokens, and without others in the policy's support.
    logits = logits.at[0].set(lh.project(hidden, head)[0]).at[1, ::3].set(-jnp.inf)
    rollout = lh._Rollout(logits)
  else:
    logits = lh.project(other, other_head)
    rollout = lh._Rollout(hidden=other, head=other_head) if kind else lh._Rollout()
  if lse:
    rollout = rollout._replace(lse=jax.nn.logsumexp(logits / (temperature or 1), -1))
  return hidden, head, tokens, rollout


def both(args, temperature, full=False, axis_name=None):
  """What matters of the kernels' form and of chunks: (log-normaliser of the policy, statistics)."""
  found = []
  for form in (lh._by_kernel, lh._by_chunks):
    policy, statistics, bounds = form(*args, temperature, full=full, axis_name=axis_name)
    assert bounds is None
    found.append(
      (policy.top / (1 if temperature is None else temperature) + policy.log_sum, statistics)
    )
  return found


def agree(found, expected):
  for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize(
  ('kind', 'lse', 'temperature', 'full', 'runs'),
  [
    ('logits', True, 0.7, True, ['linear_fused']),
    ('logits', False, 0.7, False, ['linear_sums', 'sums', 'linear_terms']),
    ('head', True, None, False, ['linear_fused']),
    ('head', False, None, True, ['linear_sums', 'linear_sums', 'linear_terms']),
    (None, False, 0.7, False, ['linear_sums']),
  ],
)
def test_values_are_those_of_chunks(interpreted, kind, lse, temperature, full, runs):
  args = case(kind, lse, temperature)
  agree(*jax.jit(lambda *a: both(a, temperature, full))(*args))
  assert interpreted[0] == runs


@pytest.mark.parametrize(('kind', 'lse'), [('logits', True), ('logits', False), ('head', True)])
def test_a_vocabulary_split_over_devices(interpreted, kind, lse):
  ran, simulate = interpreted
  simulate()
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  rows, table = P('data'), P('model')
  rollout = lh._Rollout(
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


@pytest.mark.parametrize(
  ('kind', 'lse'), [('logits', False), ('logits', True), ('head', True), (None, False)]
)
@pytest.mark.parametrize('axis_name', [None, 'model'])
def test_log_probs_of_tokens_at_every_edge(interpreted, kind, lse, axis_name):
  hidden, head, _, rollout = case(kind, lse, 0.7)
  tokens = jnp.array(EDGES + [5] * (N - len(EDGES)), jnp.int32)

  def run(*args):
    statistics = lh._by_kernel(*args, 0.7, full=False, axis_name=axis_name)[1]
    return [x for x in (statistics.policy_logp, statistics.rollout_logp) if x is not None]

  call = run
  if axis_name is not None:
    interpreted[1]()
    mesh = jax.make_mesh((2,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
    split = P('model')
    parts = lh._Rollout(
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
    # The logit of a token without a place counts as 0.
    beyond = slice(placed.stop, len(EDGES))
    top = y.max(-1)
    expected = -(top / 0.7 + np.log(np.exp((y - top[:, None]) / 0.7).sum(-1)))
    np.testing.assert_allclose(x[beyond], expected[beyond], rtol=1e-5)


@pytest.mark.parametrize(('axis_name', 'full'), [(None, True), ('model', False)])
def test_a_normaliser_of_other_logits_gives_nan(interpreted, axis_name, full):
  *args, rollout = case('logits', True, None)
  error = np.zeros(N, np.float32)
  error[3:10] = 0.002, -0.002, 5, np.inf, -np.inf, np.nan, 0.0005
  rollout = rollout._replace(lse=rollout.lse + error)

  def run(*args):
    return lh._by_kernel(*args, None, full=full, axis_name=axis_name)[1]

  if axis_name is not None:
    interpreted[1]()
    mesh = jax.make_mesh((1,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
  found = jax.jit(run)(*args, rollout)
  for name in ('kl', 'tv', 'rollout_logp', *(('reverse_kl', 'chi2', 'square') if full else ())):
    assert np.flatnonzero(np.isnan(getattr(found, name))).tolist() == [3, 4, 5, 6, 7, 8], name
  assert np.isfinite(found.entropy).all() and np.isfinite(found.policy_logp).all()


def test_gradients_are_those_of_chunks(monkeypatch, interpreted):
  hidden, head, tokens, rollout = case('logits', True, 0.7)
  weights = jnp.linspace(-1, 1, N)

  def loss(hidden, head):
    found = lh.statistics(
      hidden, head, tokens, rollout_logits=rollout.logits, rollout_lse=rollout.lse, temperature=0.7
    )
    return (weights * (found.policy_logp + 2 * found.entropy + found.kl.at[1].set(0))).sum()

  expected = jax.jit(jax.grad(loss, (0, 1)))(hidden, head)
  monkeypatch.setattr(lh, '_by_chunks', lh._by_kernel)
  found = jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(hidden, head)
  assert interpreted[0] == ['linear_fused']
  for x, y in zip(found, expected, strict=True):
    assert np.abs(y).max() > 1e-3
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
