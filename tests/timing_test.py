"""Traces and timed parts of a step, and what its program takes of a device."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from trm_jax.training import command, timing
from trm_jax.types import InputError


@pytest.mark.parametrize('text', ['3', '3:', ':3', '0:2', '5:3', 'a:b', '1:2:3', '-1:2', '1.5:2'])
def test_bad_steps_are_refused_in_one_sentence(text):
  with pytest.raises(InputError, match=r'profile=.* is not START:STOP'):
    timing.steps(text)


def test_steps_are_read():
  assert timing.steps('3:5') == (3, 5)
  assert timing.steps(' 4 : 4 ') == (4, 4)


def test_steps_beyond_the_last_are_refused():
  timing.check_steps((3, 5), 5)
  timing.check_steps(None, 0)
  with pytest.raises(InputError, match='profile=3:5 lies beyond the last step, 4'):
    timing.check_steps((3, 5), 4)


def test_a_trace_covers_its_steps_and_ends_where_the_run_stops(monkeypatch):
  calls = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: calls.append(folder))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
  trace = timing.Trace((2, 3), 'there')
  for step in (1, 2, 3, 4):
    trace.before(step)
    calls.append(step)
    trace.after(step, jnp.zeros(2))
  assert calls == [1, 'there', 2, 3, 'stop', 4]
  calls.clear()
  trace = timing.Trace((2, 3), 'there')
  trace.before(2)
  trace.close()
  trace.close()
  assert calls == ['there', 'stop']
  none = timing.Trace(None, 'there')
  none.before(1)
  none.after(1, None)
  assert calls == ['there', 'stop']


def test_memory_is_that_of_the_program():
  state = jnp.zeros((16, 64))
  found = timing.memory(jax.jit(lambda x: x @ x.T @ x, donate_argnums=0).lower(state).compile())
  assert found['arguments'] == found['outputs'] == found['aliased'] == 16 * 64 * 4
  assert found['temporaries'] >= 16 * 16 * 4


def test_parts_are_timed_without_consuming_the_state():
  @jax.jit
  def rollout(state, arm, prompts, starts):
    return state['x'] + prompts, arm

  @jax.jit
  def statistics(state, batch, key, arm):
    return batch.sum()

  @jax.jit
  def learned(state, batch, key, arm):
    return state['x'] * batch

  state = {'x': jnp.ones(64)}
  programs = {'rollout': rollout, 'statistics': statistics, 'update': learned}
  found = timing.parts(programs, state, jnp.int32(0), jnp.ones(64), jnp.ones(64))
  assert set(found) == {'time/rollout', 'time/statistics', 'time/update'}
  assert float(state['x'].sum()) == 64


def test_compiled_programs_are_kept_in_the_folder(tmp_path):
  least = jax.config.jax_persistent_cache_min_compile_time_secs
  try:
    command.cache(tmp_path / 'programs')
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    compilation_cache.reset_cache()
    jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) * 3.25)(jnp.ones(7)))
    assert any('cache' in path.name for path in (tmp_path / 'programs').iterdir())
  finally:
    jax.config.update('jax_compilation_cache_dir', None)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', least)
    compilation_cache.reset_cache()


def test_a_cache_that_cannot_be_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(InputError, match='compilation_cache='):
    command.cache(tmp_path / 'file' / 'below')
