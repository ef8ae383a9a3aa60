"""Progress: plain lines with rate and time left, and a bar on a terminal."""

import io

import jax.numpy as jnp
import pytest

from trm_jax.runs import progress


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still until `clock.now` is set."""

  class Clock:
    now = 100.0

  monkeypatch.setattr(progress.time, 'monotonic', lambda: Clock.now)
  return Clock


def test_lines_have_rate_time_left_and_values(clock):
  stream = io.StringIO()
  bar = progress.Progress(80, 'rl', stream=stream)
  for step in range(1, 81):
    clock.now += 60.0 if step == 1 else 0.25  # the first step compiles
    bar.update(step, reward=jnp.float32(0.41), kept=step, note='ok')
  bar.close()
  bar.close()
  assert stream.getvalue().splitlines() == [
    '[rl] 1/80  reward 0.41  kept 1  note ok',
    '[rl] 21/80  4 steps/s  ETA 15 s  reward 0.41  kept 21  note ok',
    '[rl] 41/80  4 steps/s  ETA 10 s  reward 0.41  kept 41  note ok',
    '[rl] 61/80  4 steps/s  ETA 5 s  reward 0.41  kept 61  note ok',
    '[rl] 80/80  4 steps/s  ETA 0 s  reward 0.41  kept 80  note ok',
  ]


def test_the_last_line_comes_even_when_interrupted_or_never_updated(clock):
  stream = io.StringIO()
  bar = progress.Progress(10_000, 'sft', start=40, interval=1e9, stream=stream)
  for step in (41, 42, 43):
    clock.now += 2.0
    bar.update(step)
  bar.close()
  progress.Progress(5, 'idle', stream=stream).close()
  assert stream.getvalue().splitlines() == [
    '[sft] 41/10000',
    '[sft] 43/10000  0.5 steps/s  ETA 5:31:54',
    '[idle] 0/5',
  ]


def test_values_stay_on_the_device_while_no_line_is_due(clock):
  class Scalar:
    fetched = 0

    def item(self):
      Scalar.fetched += 1
      return 0.5

  bar = progress.Progress(9, 'rl', stream=io.StringIO())
  for step in range(1, 10):
    bar.update(step, loss=Scalar())
  assert Scalar.fetched == 1
  bar.close()
  assert Scalar.fetched == 2


def test_a_terminal_gets_a_bar():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  stream = Terminal()
  bar = progress.Progress(4, 'rl', start=1, stream=stream)
  for step in (2, 3, 4):
    bar.update(step, reward=0.41)
  bar.close()
  last = stream.getvalue().strip().splitlines()[-1]
  assert 'rl: 100%' in last and '4/4' in last and 'reward 0.41' in last


def test_silent_is_a_display_and_says_nothing(capfd):
  display = progress.Silent()
  display.update(1, reward=0.5)
  display.close()
  assert isinstance(display, progress.Display) and capfd.readouterr() == ('', '')
