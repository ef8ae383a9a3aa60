"""Where a run comes from: the commit of the checkout, another version, a damaged config."""

import json
import logging
import subprocess

import jax
import pytest

import trm_jax
from trm_jax import types
from trm_jax.runs import provenance


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
  def git(*command):
    who = ['-c', 'user.name=a', '-c', 'user.email=a@b']
    return subprocess.check_output(['git', *who, *command], cwd=tmp_path, text=True).strip()

  (tmp_path / 'trm_jax').mkdir()
  source = tmp_path / 'trm_jax' / '__init__.py'
  source.write_text('')
  monkeypatch.setattr(trm_jax, '__file__', str(source))
  assert provenance.commit() == {'commit': None, 'dirty': False}
  git('init', '-q')
  assert provenance.commit() == {'commit': None, 'dirty': False}
  git('add', '.')
  git('commit', '-qm', 'one')
  git('tag', '-a', 'v1', '-m', 'v1')
  assert provenance.commit() == {'commit': git('rev-parse', 'HEAD'), 'dirty': False}
  source.write_text('changed')
  assert provenance.commit() == {'commit': git('rev-parse', 'HEAD'), 'dirty': True}
  inside = tmp_path / 'site' / 'trm_jax' / '__init__.py'
  monkeypatch.setattr(trm_jax, '__file__', str(inside))
  (tmp_path / 'site').mkdir()  # installed below somebody else's checkout
  assert provenance.commit() == {'commit': None, 'dirty': False}
  monkeypatch.setattr(trm_jax, '__file__', str(source))
  monkeypatch.setenv('PATH', '')
  assert provenance.commit() == {'commit': None, 'dirty': False}


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'config': {'a': {'b': 1}}} | provenance.everything()))
  return path


def test_the_same_config_is_silent(path, caplog):
  provenance.compare(path, {'a': {'b': 1}})
  assert not caplog.records


@pytest.mark.parametrize('config', [{'a': {'b': 2}}, {'a': {}}, {'a': 1}, {}])
def test_another_config_is_refused(path, config):
  with pytest.raises(types.InputError, match='has another config: .*pass the same'):
    provenance.compare(path, config)


def test_of_many_differences_the_first_are_named():
  now = {f'k{i}': i for i in range(30)}
  found = provenance.differences({}, now)
  assert 'k0 was' in found and found.endswith('and 22 more')
  assert 'more' not in provenance.differences({}, {'k': 1})


def test_another_version_is_a_warning(path, caplog):
  path.write_text(path.read_text().replace('"python": "3', '"python": "2'))
  with caplog.at_level(logging.WARNING):
    provenance.compare(path, {'a': {'b': 1}})
  assert 'versions.python was ' in caplog.text and 'not promised to be bit-exact' in caplog.text


@pytest.mark.parametrize('text', ['', '{', '[]', '{"config": 3}', '{"config": {}}', 'null'])
def test_a_damaged_file_is_named(path, text):
  path.write_text(text)
  with pytest.raises(
    types.InputError, match=r'config.json is damaged (?s:.*)choose another directory'
  ):
    provenance.compare(path, {})


def test_another_mesh_is_a_warning_of_its_own(path, caplog):
  mesh = jax.make_mesh((4, 2), ('data', 'model'))
  with caplog.at_level(logging.WARNING), jax.set_mesh(mesh):
    provenance.compare(path, {'a': {'b': 1}})
  assert "device.mesh was None and is '4,2'" in caplog.text
  assert 'equal up to the order of sums' in caplog.text


def test_the_source_digest_follows_names_and_contents(tmp_path, monkeypatch):
  monkeypatch.setattr(trm_jax, '__file__', str(tmp_path / '__init__.py'))
  found = set()
  for name, text in (('a.py', 'x'), ('a.py', 'y'), ('b.py', ''), ('c.txt', 'z')):
    (tmp_path / name).write_text(text)
    found.add(provenance.source())
  assert len(found) == 3  # a text file is no source


def test_differences_are_worded_by_the_caller():
  found = provenance.differences(
    {'a': {'b': 1}, 'c': 2}, {'a': {'b': 3}, 'c': 2}, '{} there {} here'
  )
  assert found == 'a.b 1 there 3 here'
