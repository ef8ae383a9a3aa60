"""What the compiled train step sends between devices, on simulated ones: expected collectives only.

No collective may move an array with both a token axis and a vocabulary axis, and none may gather a
parameter of all layers at once.
"""

import dataclasses
import functools

import jax
import pytest

from trm_jax import policy
from trm_jax.mesh import sharding
from trm_jax.planning import abstract_step, compiled, products

LAYERS, WIDTH, V, LENGTH, PROMPT = 5, 24, 104, 16, 6
DENSE = policy.PolicyConfig(
  width=WIDTH,
  layers=LAYERS,
  heads=4,
  kv_heads=4,
  head_width=10,
  mlp_width=56,
  experts=0,
  remat=True,
)
MOE = dataclasses.replace(DENSE, experts=8, experts_per_token=2, expert_compute='ragged')
MESH = (4, 2)
ROWS = 8
SIZES = abstract_step.Sizes(
  rows=ROWS, samples=2, sequence=LENGTH, prompt=PROMPT, vocab=V, store='hidden'
)
CONFIGS = {'dense': DENSE, 'moe': MOE}
# Response tokens, whole rows, of one device and of all; one row a device for its own.
TOKENS = {n * r for n in (LENGTH, LENGTH - PROMPT + 1) for r in (1, ROWS // MESH[0], ROWS)}
VOCABULARY = {V, V // MESH[1]}


@functools.cache
def program(name):
  """(abstract program, what its compiled text says)."""
  with jax.set_mesh(sharding.make_mesh(*MESH)):
    made = abstract_step.train(CONFIGS[name], SIZES)
    text = made.lower().compile().as_text()
  return made, compiled.Program(text, MESH)


def shapes(step):
  return [shape for _, shape in step.shapes]


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[pytest.mark.slow] * (n in ('moe',))) for n in CONFIGS]
)
def test_collectives_of_a_train_step(name):
  found = program(name)[1].collectives()
  assert not TOKENS & VOCABULARY
  for step in found:
    assert not compiled.with_axes(shapes(step), TOKENS, VOCABULARY), step
    # A stack of all layers is gathered (or summed) a layer at a time.
    assert not any(s[:1] == (LAYERS,) and len(s) > 2 for s in shapes(step)), step
  kinds = {(step.kind, step.over) for step in found}
  # Parameters over data in every layer, twice for the recomputation; rows never.
  gathers = [s for s in found if s.kind == 'all-gather' and s.over == 'data' and s.times == LAYERS]
  assert any(WIDTH in shape for s in gathers for shape in shapes(s))
  # Gradients over data (or summed and split at once), partial sums of layers over model.
  assert {('all-reduce', 'data'), ('reduce-scatter', 'data')} & kinds
  assert ('all-reduce', 'model') in kinds
  assert not any(kind == 'all-to-all' for kind, _ in kinds)
  # Statistics over the vocabulary: a few numbers a token.
  small = [s for s in found if s.kind == 'all-reduce' and s.over == 'model']
  small = [s for s in small if not any(WIDTH in shape for shape in shapes(s))]
  tokens = ROWS // MESH[0] * (LENGTH - PROMPT + 1)
  a_token = sum(s.times * compiled.size(*x) for s in small for x in s.shapes) / tokens / 4
  assert 0 < a_token <= 40


@pytest.mark.parametrize(
  'name', ['dense', *(pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS if n != 'dense')]
)
def test_products_are_those_of_the_hand_count(name):
  made, _ = program(name)
  with jax.set_mesh(sharding.make_mesh(*MESH)):
    found = products.count(made.jaxpr(), dict(zip(('data', 'model'), MESH, strict=True)))
  config, tokens = CONFIGS[name], ROWS * LENGTH
  projections = tokens * 2 * 4 * WIDTH * config.heads * config.head_width
  scores = tokens * 2 * 2 * LENGTH * config.heads * config.head_width
  # Of ragged products every device counts all rows: those of other devices' experts are there.
  mlp = tokens * 2 * 3 * WIDTH * config.mlp_width
  if config.experts:
    mlp = mlp * config.experts_per_token * MESH[1] + tokens * 2 * WIDTH * config.experts * MESH[1]
  # Forward, again for the backward pass, and twice in it; attention's blocks once more.
  layers = LAYERS * (4 * (projections + mlp) + 5 * scores) / (MESH[0] * MESH[1])
  head = ROWS * (LENGTH - PROMPT + 1) * 2 * WIDTH * V / (MESH[0] * MESH[1])
  # Policy's and rollout's scores, once more and two gradients.
  assert found.flops == pytest.approx(layers + 5 * head, rel=0.1)
