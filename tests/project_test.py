"""The project's own rules: pins, imports, sizes and the files that build and check it."""

import ast
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import hypothesis
import jax
import jax.numpy as jnp
import packaging.requirements
import packaging.utils
import pytest

import trm_jax
from trm_jax.objectives import surrogates

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted((ROOT / 'trm_jax').rglob('*.py'))
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
PYTHONS = ('3.11', '3.12', '3.13', '3.14')


def name(path):
  return path.relative_to(ROOT).as_posix()


def imports_of(path):
  """Top-level names that a file imports, at any depth of the code, relative imports aside."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name.split('.')[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      found.add(node.module.split('.')[0])
  return found


def pins(python):
  """Package name -> pinned version for a Python version, read from constraints.txt."""
  found = {}
  for line in (ROOT / 'constraints.txt').read_text().splitlines():
    pin = packaging.requirements.Requirement(line)
    environment = {'python_full_version': python + '.0', 'python_version': python}
    if pin.marker is None or pin.marker.evaluate(environment):
      found[packaging.utils.canonicalize_name(pin.name)] = str(pin.specifier)
  return found


def test_constraints_hold_pins_only():
  for line in (ROOT / 'constraints.txt').read_text().splitlines():
    assert not re.search(r'://|--|\.(whl|gz)\b|@', line), line
    assert re.match(r'[\w.\-]+==[\w.+]+( ;|$)', line), line


@pytest.mark.parametrize('python', PYTHONS)
def test_every_dependency_is_pinned(python):
  pinned = pins(python)
  for line in PROJECT['dependencies'] + sum(PROJECT['optional-dependencies'].values(), []):
    need = packaging.requirements.Requirement(line)
    if need.name == PROJECT['name']:  # an extra of ours within another one
      continue
    if need.marker is None or need.marker.evaluate({'python_version': python}):
      pin = pinned.get(packaging.utils.canonicalize_name(need.name))
      assert pin is not None, f'{need.name} has no pin for Python {python}: resolve again'
      assert need.specifier.contains(pin.removeprefix('==')), f'{line} against {pin}'


def test_dependencies_have_lower_bounds_only():
  for line in PROJECT['dependencies'] + sum(PROJECT['optional-dependencies'].values(), []):
    for bound in packaging.requirements.Requirement(line).specifier:
      assert bound.operator == '>=', line


@pytest.mark.slow
def test_imports_are_declared():
  declared = {
    packaging.requirements.Requirement(line).name.replace('-', '_').lower()
    for line in PROJECT['dependencies'] + PROJECT['optional-dependencies']['train']
  }
  # orbax-checkpoint is imported as orbax.checkpoint; jax brings scipy, jaxlib and ml_dtypes.
  declared |= {'orbax', 'scipy', 'jaxlib', 'ml_dtypes', 'trm_jax', 'experiments'}
  for path in SOURCES + sorted((ROOT / 'experiments').rglob('*.py')):
    foreign = {found for found in imports_of(path) if found not in sys.stdlib_module_names}
    assert {found.lower() for found in foreign} <= declared, name(path)


@pytest.mark.slow
def test_importing_everything_leaves_tensorflow_alone(tmp_path):
  # A stand-in that can be imported: a guarded `try: import tensorflow` would find it.
  (tmp_path / 'tensorflow.py').write_text('')
  modules = [name(path)[:-3].removesuffix('/__init__').replace('/', '.') for path in SOURCES]
  code = 'import importlib, sys\n'
  code += f'for module in {modules!r}: importlib.import_module(module)\n'
  code += 'assert "tensorflow" not in sys.modules, "tensorflow was imported"\n'
  path = os.pathsep.join([str(ROOT), str(tmp_path)])
  run = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'PYTHONPATH': path},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    cwd=tmp_path,
  )
  assert run.returncode == 0, run.stderr


def test_importing_the_package_imports_nothing_else():
  code = 'import sys, trm_jax; assert not {"jax", "flax", "numpy"} & set(sys.modules)'
  run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr


def test_only_the_policy_knows_flax():
  for path in SOURCES:
    assert 'flax' not in imports_of(path) or path.parent.name == 'policy', name(path)


def test_modules_stay_readable():
  for path in SOURCES:
    text = re.sub(r'\n *>>> .*?(?=""")', '', path.read_text(), flags=re.S)  # without examples
    assert len(text.splitlines()) <= 400, name(path)


def test_the_library_does_not_print():
  for path in SOURCES:
    if path.name == 'command.py':  # what programs of the command line share
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        assert node.func.id != 'print', f'{name(path)}:{node.lineno}'


def test_every_folder_of_modules_is_a_package():
  # A folder without __init__.py would silently be missing from an install.
  for top in ('trm_jax', 'experiments'):
    for path in (ROOT / top).rglob('*.py'):
      assert (path.parent / '__init__.py').exists(), name(path.parent)


@pytest.mark.parametrize('file', ['Makefile', '.ci/run', 'pyproject.toml', 'constraints.txt'])
def test_build_files_know_no_machine(file):
  text = (ROOT / file).read_text()
  assert not re.search(r'(?<![\w.])/(home|root|Users|tmp|work|opt|usr/local|mnt)\b', text)


def test_ci_can_be_executed():
  assert os.access(ROOT / '.ci' / 'run', os.X_OK)


def test_version_has_three_numbers():
  assert re.fullmatch(r'\d+\.\d+\.\d+', trm_jax.__version__)


def test_eight_devices_and_strict_ranks():
  assert jax.device_count() == 8
  assert jax.default_backend() == 'cpu'
  with pytest.raises(ValueError, match='rank'):
    jnp.ones((2, 3)) + jnp.ones(3)


def test_examples_are_reproducible():
  settings = hypothesis.settings()
  assert settings.derandomize
  assert settings.deadline is None
  assert settings.max_examples in (15, 200)


def test_annotations_are_checked():
  with pytest.raises(Exception, match='(?i)type'):
    surrogates.aggregate('three', jnp.ones((1, 1), bool), jnp.ones(1, bool))


def slow_tests(path):
  """Names of the tests of a file that `make test` leaves out whole."""
  is_slow = lambda node: ast.unparse(node) == 'pytest.mark.slow'
  found = set()
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.FunctionDef) and any(map(is_slow, node.decorator_list)):
      found.add(node.name)
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'pytestmark':
      assert 'slow' not in ast.unparse(node.value), path
  return found


@pytest.mark.slow
def test_claims_without_a_dagger_are_checked_by_make_test():
  tests = re.findall(r'`(?:tests/)?(\w+_test\.py)::(\w+)`( †)?', (ROOT / 'CLAIMS.md').read_text())
  slow = {file: slow_tests(ROOT / 'tests' / file) for file, _, _ in tests}
  for file, test, dagger in tests:
    assert (test in slow[file]) == bool(dagger), (file, test, 'CLAIMS.md says otherwise')


def test_every_claim_names_code_and_tests_that_exist():
  text = (ROOT / 'CLAIMS.md').read_text()
  tests = re.findall(r'`(?:tests/)?(\w+_test\.py)::(\w+)`', text)
  assert len(tests) > 60
  for file, test in tests:
    assert f'\ndef {test}(' in (ROOT / 'tests' / file).read_text(), (file, test)
  functions = re.findall(r'`((?:\w+\.)+)(\w+)`', text)
  assert len(functions) > 60
  for module, function in functions:
    if function != 'md':
      module = importlib.import_module(f'trm_jax.{module[:-1]}')
      assert hasattr(module, function), (module, function)
  for path in re.findall(r'`((?:tests|trm_jax|experiments)/[\w/]+\.py)`', text):
    assert (ROOT / path).exists(), path
