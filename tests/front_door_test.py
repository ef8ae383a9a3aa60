"""`import trm_jax as trm`: names, what an import costs, examples, and the snippets of the pages."""

import dataclasses
import doctest
import inspect
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trm_jax as trm

ROOT = pathlib.Path(__file__).parents[1]
NAMES = tuple(trm._NAMES)
# What a base install lacks.
EXTRAS = ('flax', 'optax', 'orbax', 'tyro', 'grain', 'tensorflow_datasets', 'tensorboardX', 'tqdm')
EXTRAS += ('matplotlib', 'array_record', 'importlib_resources')
GIVEN = dict(trm=trm, jax=jax, jnp=jnp, np=np, dataclasses=dataclasses)


def python(code):
  run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr
  return run.stdout


def test_a_bare_import_imports_nothing():
  loaded = json.loads(python('import json, sys, trm_jax; print(json.dumps(list(sys.modules)))'))
  foreign = {'jax', 'jaxlib', 'numpy', 'flax', 'jaxtyping', 'chex', 'matplotlib'}
  assert not foreign & set(loaded)
  assert [name for name in loaded if name.startswith('trm_jax')] == ['trm_jax']


def test_every_name_is_listed_and_found():
  assert set(NAMES) | {'masks', 'bounds', '__version__'} <= set(dir(trm))
  for name in dir(trm):
    assert getattr(trm, name) is not None
  assert trm.max_kl is trm.masks.max_kl and trm.b_star is trm.bounds.b_star


def test_a_wrong_name_gives_near_ones():
  with pytest.raises(AttributeError, match="trm_jax has no 'max_k': did you mean max_k"):
    trm.max_k
  with pytest.raises(AttributeError, match='dir'):
    trm.zzzzzz


def test_type_checkers_see_the_names():
  assert (ROOT / 'trm_jax' / 'py.typed').exists()
  stub = (ROOT / 'trm_jax' / '_names.pyi').read_text()
  given = {}
  for module, names in re.findall(r'from trm_jax\.([\w.]+) import \(\n(.*?)\)', stub, re.S):
    given |= dict.fromkeys(re.findall(r'(\w+) as \1,', names), module)
  folders = {'_sharp': 'bounds', '_brackets': 'divergences', '_linear_head': 'divergences'}
  for name, module, inside in re.findall(r'^(\w+) = (\w+)\.(\w+)$', stub, re.M):
    given[name] = f'{folders[module]}.{module[1:]}:{inside}'
  assert given == trm._NAMES
  rooms = re.search(r'from trm_jax import \((.*?)\)', stub, re.S)[1]
  assert set(re.findall(r'(\w+) as \1', rooms)) == set(trm._BASE + trm._TRAIN)
  folders = {path.name.removesuffix('.py') for path in (ROOT / 'trm_jax').glob('[a-z]*')}
  assert folders - {'py.typed'} == set(trm._BASE + trm._TRAIN)


@pytest.mark.parametrize('name', NAMES)
def test_example(name):
  """The `>>>` lines of the docstring give what they show."""
  found = getattr(trm, name)
  text = inspect.getdoc(inspect.unwrap(found))
  examples = doctest.DocTestParser().get_doctest(text, dict(GIVEN), name, None, 0)
  assert 1 <= len(examples.examples) <= 8, f'{name} shows no example of at most eight lines'
  assert any(example.want for example in examples.examples)
  said = []
  runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
  runner.run(examples, out=said.append)
  assert runner.summarize(verbose=False).failed == 0, ''.join(said)


def snippets(page):
  text = (ROOT / page).read_text()
  assert '```py\n' not in text, 'a snippet would not be run'
  return re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)


@pytest.mark.parametrize('page', ['README.md', 'CLAIMS.md'])
def test_snippets_run(page, tmp_path, monkeypatch):
  """Each continues the ones before it on the page."""
  monkeypatch.chdir(tmp_path)
  found, names = snippets(page), {}
  assert found or page != 'README.md'
  for number, text in enumerate(found):
    exec(compile(text, f'{page}, snippet {number + 1}', 'exec'), names)


# What a base install can do.

USE = """
import pydoc
import jax.numpy as jnp, numpy as np
import trm_jax as trm

policy, rollout = jnp.zeros((2, 3, 5)), jnp.ones((2, 3, 5)).at[0, 0, 0].set(4.0)
tokens, valid = jnp.zeros((2, 3), int), jnp.ones((2, 3), bool)
found = trm.statistics(policy, rollout, tokens)
hidden, head = jnp.ones((2, 3, 4)), jnp.eye(5, 4)
trm.hidden_statistics(hidden, head, tokens, rollout_logits=rollout)
keep = trm.max_kl(0.2)(found.divergences(), valid)
assert keep.tolist() == [False, True]
advantages = trm.centred(jnp.array([1.0, 0.0]), keep, group_size=2)
value = trm.ratio_pg(found.policy_logp, found.rollout_logp, advantages, valid)
assert jnp.isfinite(trm.aggregate(value, valid, keep).value)
assert trm.classical_kl(T=10, delta=1e-3) > 0
log_ratio = found.policy_logp - found.rollout_logp
print(trm.improvement(log_ratio, valid, jnp.ones(2), samples=2).verdict)
with trm.float64():
  logits = np.zeros((1, 3, 2))
  world = trm.world(logits, logits, horizon=2, reward=np.ones((1, 4)))
  assert abs(trm.error(world)) < 1e-12
assert 'trm_max' in trm.methods() and trm.Method().masks == ()
for name in ('Config', 'training', 'policy'):
  assert name not in dir(trm)
  try:
    getattr(trm, name)
  except ModuleNotFoundError as error:
    assert "pip install 'trm_jax[train]'" in str(error), error
  else:
    raise AssertionError(f'{name} works without its extra')
assert 'pinsker_marginal_kl' in pydoc.render_doc(trm)  # help(trm)
"""


def test_the_base_needs_no_extra():
  blocked = f'import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))'
  python(blocked + USE)


@pytest.mark.slow
def test_what_needs_the_extra_says_so_however_it_is_imported():
  """One sentence with the remedy from every module of every room, not only through `trm.`."""
  code = f"""
import importlib, pathlib, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
need = set()
for path in sorted(pathlib.Path('trm_jax').rglob('*.py')):
  name = '.'.join(path.with_suffix('').parts).removesuffix('.__init__')
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as error:
    assert str(error).endswith("is not installed: pip install 'trm_jax[train]'."), (name, error)
    need.add(name.split('.')[1])
print(*sorted(need))
"""
  need = set(python(code).split())
  assert {'policy', 'tasks', 'training', 'runs'} <= need <= set(trm._TRAIN)


@pytest.mark.slow
def test_a_fresh_environment_with_the_base_alone(tmp_path):
  """What pip installs for `trm_jax`, without any extra, is enough."""
  subprocess.run([sys.executable, '-m', 'venv', tmp_path / 'env'], check=True)
  python = tmp_path / 'env' / 'bin' / 'python'
  install = [python, '-m', 'pip', 'install', '-q', '-c', ROOT / 'constraints.txt', ROOT]
  subprocess.run(install, check=True, cwd=tmp_path)
  site = subprocess.check_output(
    [python, '-c', 'import sysconfig; print(sysconfig.get_paths()["purelib"])'], text=True
  )
  there = {path.name for path in pathlib.Path(site.strip()).iterdir()}
  assert 'trm_jax' in there and not {'experiments', 'benchmarks', 'flax', 'optax'} & there
  run = subprocess.run([python, '-c', USE], cwd=tmp_path, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr


def test_readme_points_to_what_is_there():
  """Every relative link leads to a file or folder, and every room is on the map."""
  text = (ROOT / 'README.md').read_text()
  links = [link for link in re.findall(r'\]\(([^)#]+)', text) if '://' not in link]
  assert links and [link for link in links if not (ROOT / link).exists()] == []
  rooms = set(re.findall(r'\[`(\w+)`\]\(trm_jax/', text))
  assert rooms >= set(trm._BASE + trm._TRAIN)
