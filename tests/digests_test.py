"""Digests see every bit and its place, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np

from trm_jax.runs import digests


def state_of(seed):
  """Leaves of several kinds; what does not depend on the seed has `same` in its name."""
  key = jax.random.key(seed)
  params = {
    'wide': jax.random.normal(key, (60, 12)),
    'half': jax.random.normal(key, (3, 5)).astype(jnp.bfloat16),
    'same': jnp.array([jnp.nan, -0.0, jnp.inf]),
  }
  return {'params': params, 'key': key, 'none': None, 'rows_same': 7, 'rate_same': 0.1}


def test_every_leaf_has_a_digest_that_sees_each_bit_and_each_place():
  first, second = (digests.records(state_of(seed)) for seed in (0, 1))
  assert first["['key']"][:2] == [[], 'key<fry>'] and first["['rows_same']"][:2] == [[], 'int']
  assert first["['params']['half']"][:2] == [[3, 5], 'bfloat16'] and len(first) == 6
  same = {name for name, about in first.items() if about == second[name]}
  assert same == {name for name in first if 'same' in name}
  for dtype in ('uint8', 'uint16', 'uint32', 'float32', 'bfloat16'):
    value = np.arange(3000).reshape(3, 40, 25) % 251
    digest = lambda value, dtype=dtype: digests.records({'x': jnp.asarray(value, dtype)})
    flipped, swapped = value.copy(), value.copy()
    flipped[1, 2, 3] ^= 64
    swapped[0, 0], swapped[2, 1] = value[2, 1], value[0, 0]
    assert digest(value) not in (digest(flipped), digest(swapped))


def test_a_digest_is_the_sum_over_words_and_places():
  words = np.random.default_rng(0).integers(0, 2**32, (7, 3, 5), dtype=np.uint32)
  total = sum(int(word) * (2 * place + 1) for place, word in enumerate(words.ravel())) % 2**64
  assert digests.records({'x': words})["['x']"][2] == f'{total:016x}'
  for shape, spec in (((2, 1), (None, None, 'b')), ((7, 1), ('a',)), ((1, 5), (None, None, 'b'))):
    mesh = jax.make_mesh(shape, ('a', 'b'), devices=jax.devices()[: shape[0] * shape[1]])
    meshed = jax.device_put(words, jax.NamedSharding(mesh, jax.P(*spec)))
    assert digests.records({'x': meshed})["['x']"][2] == f'{total:016x}'
