"""What is compiled for TPUs is all there is; the command itself, on simulated devices."""

import functools
import importlib
import inspect
import json
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import trm_jax
from benchmarks import cases as c
from benchmarks import measure, tpu_transforms, transforms
from trm_jax.mesh import sharding
from trm_jax.mesh.sharding import DATA, MODEL
from trm_jax.types import InputError

MESH = (4, 2)


@functools.cache
def cases():
  with jax.set_mesh(sharding.make_mesh(*MESH)):
    return transforms.cases()


def public():
  """'module.function' of every public function of the package."""
  found = set()
  for module in pkgutil.walk_packages(trm_jax.__path__, 'trm_jax.'):
    for name, value in vars(importlib.import_module(module.name)).items():
      here = getattr(value, '__module__', None) == module.name
      if here and callable(value) and not inspect.isclass(value) and not name.startswith('_'):
        found.add(f'{module.name}.{name}'.removeprefix('trm_jax.'))
  return found


def test_every_public_transform_is_compiled_or_excluded_for_a_reason():
  functions = public()
  assert len(functions) > 300 and 'divergences.linear_head.kl_from' in functions
  compiled = {
    name
    for case in cases()
    for name in (*case.name.split(',')[:1], *case.also)
    if ' step' not in name
  }
  assert compiled <= functions, compiled - functions
  excluded = [name for names in transforms.EXCLUDED.values() for name in names]
  left_out = set()
  for name in excluded:
    those = {f for f in functions if f == name or (name[-1] == '.' and f.startswith(name))}
    assert those, f'{name} is excluded, but there is none'
    assert not those & compiled, f'{name} is excluded and compiled'
    assert not those & left_out, f'{name} is excluded twice'
    left_out |= those
  missing = functions - compiled - left_out
  assert not missing, f'neither in transforms.cases nor in transforms.EXCLUDED: {sorted(missing)}'


def test_cases_are_laid_out_and_named_once():
  names = [case.name for case in cases()]
  assert len(set(names)) == len(names)
  for case in cases():
    for leaf in jax.tree.leaves(case.arguments):
      assert dict(leaf.sharding.mesh.shape) == dict(zip((DATA, MODEL), MESH, strict=True))
  # A shape tells positions from the vocabulary, and both from widths.
  sizes = {c.VOCAB, c.VOCAB // MESH[1], c.WIDTH, c.TOP}
  for case in cases():
    assert not sizes & case.positions, case.name
  # Everything from an output head, but what reads or gives scores, is held to hold none.
  free = {case.name for case in cases() if case.positions}
  for name in names:
    of_head = name.startswith('divergences.linear_head.')
    if of_head and 'logits' not in name and 'project' not in name:
      assert name in free
  assert 'training.judgement.judge, gradient' in free and 'train step, MoE' in free


def run(monkeypatch, some, **options):
  monkeypatch.setattr(transforms, 'cases', lambda: some)
  tpu_transforms.main(tpu_transforms.Command(topologies=('cpu:8',), **options))


def test_figures_of_a_program(monkeypatch, tmp_path, capsys):
  with jax.set_mesh(sharding.make_mesh(*MESH)):
    rows = c.of((8, 1024), DATA)
    table = c.of((2, c.VOCAB), None, MODEL)
  over = functools.partial(c.split, out=jax.P(DATA, MODEL))
  product = over(lambda x, w: jnp.sin(x[:, :2]) @ jnp.sin(w), rows, table)
  total = c.split(lambda x: jax.lax.psum(x.sum(), DATA), rows, out=jax.P())
  some = [
    c.Case('tiny', jnp.sin, (jnp.zeros(3),)),
    c.Case('sum', total, (rows,)),
    # A device has two of the eight rows.
    c.Case('scores', product, (rows, table), positions=frozenset({2})),
  ]
  file = tmp_path / 'figures.json'
  run(monkeypatch, some, save=file, markdown=True)
  _, one, two = json.loads(file.read_text())
  assert one['case'] == 'sum' and one['topology'] == 'cpu:8' and one['mesh'] == list(MESH)
  assert one['arguments'] == 8 * 1024 * 4 / MESH[0] / measure.MIB
  assert one['collectives'] == {'all-reduce over data': 1}
  assert one['scores'] == [] and one['bytes'] > 0 and one['jax'] == jax.__version__
  assert [2, c.VOCAB // MESH[1]] in two['scores']
  printed = capsys.readouterr().out
  assert '| sum ' in printed and '1 all-reduce over data' in printed
  assert 'no collective: `tiny`, `scores`.' in printed and '| tiny ' not in printed


def test_what_does_not_compile_is_named(monkeypatch, tmp_path, capsys):
  def refused():
    raise NotImplementedError('no such instruction')

  good = c.Case('good', lambda: jnp.zeros(3), ())
  file = tmp_path / 'figures.json'
  with pytest.raises(SystemExit, match='1 of 2 programs'):
    run(monkeypatch, [c.Case('bad', refused, ()), good], save=file)
  bad, good = json.loads(file.read_text())
  assert bad['error'] == 'NotImplementedError: no such instruction' and 'error' not in good
  assert 'cpu:8 bad: NotImplementedError' in capsys.readouterr().err


def test_bad_options():
  with pytest.raises(InputError, match='v9'):
    tpu_transforms.main(tpu_transforms.Command(topologies=('v9:2x2',)))
  with pytest.raises(InputError, match='no name'):
    tpu_transforms.main(tpu_transforms.Command(topologies=('cpu:8',), only='no such case'))
