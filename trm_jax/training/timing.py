"""Where the time of a step goes: a trace of some steps, and the parts of one step by themselves."""

import os
import time

import jax

from trm_jax.types import InputError


def steps(text: str) -> tuple[int, int]:
  """(first, last) step of a flag such as '3:5', both inside; raises InputError on anything else."""
  first, colon, last = text.partition(':')
  numbers = [n.strip() for n in (first, last)]
  if not colon or not all(n.isdecimal() for n in numbers) or not 1 <= int(first) <= int(last):
    raise InputError(
      f"profile={text!r} is not START:STOP with 1 <= START <= STOP, the steps to trace, e.g. '3:5'."
    )
  return int(first), int(last)


def check_steps(wanted: tuple[int, int] | None, last: int) -> None:
  """Raises InputError for steps to trace beyond the last one of a run."""
  if wanted and wanted[1] > last:
    raise InputError(
      f'profile={wanted[0]}:{wanted[1]} lies beyond the last step, {last}: trace earlier steps or'
      ' raise steps.'
    )


class Trace:
  """A profiler trace of the steps first..last of a run; `None` traces nothing."""

  def __init__(self, wanted: tuple[int, int] | None, folder: str | os.PathLike):
    self._wanted, self._folder, self._on = wanted, folder, False

  def before(self, step: int) -> None:
    """Starts with the first wanted step that is dispatched."""
    if self._wanted and not self._on and self._wanted[0] <= step <= self._wanted[1]:
      jax.profiler.start_trace(self._folder)
      self._on = True

  def after(self, step: int, outputs) -> None:
    """Ends once the last wanted step is done: waits for its outputs."""
    if self._on and step >= self._wanted[1]:
      jax.block_until_ready(outputs)
      self.close()

  def close(self) -> None:
    """Ends the trace, if one is running; also where a run stops early."""
    if self._on:
      self._on = False
      jax.profiler.stop_trace()


def memory(compiled) -> dict[str, int]:
  """Bytes of device memory that a compiled program takes on one device, as its compiler says.

  `aliased` results take the place of donated arguments; nothing where a backend does not tell.
  """
  analysis = compiled.memory_analysis()
  if analysis is None:
    return {}
  names = {'arguments': 'argument', 'temporaries': 'temp', 'outputs': 'output', 'aliased': 'alias'}
  return {name: int(getattr(analysis, f'{part}_size_in_bytes')) for name, part in names.items()}


def parts(programs: dict, state, arm, prompts, starts, *, rounds: int = 3) -> dict[str, float]:
  """Seconds of rollout, statistics and update, each compiled and run by itself: least of `rounds`.

  statistics is the trainer's forward pass, the divergences and the mask, without a gradient; update
  is everything after the rollout, so it does that work as well. `state` is not consumed.
  """
  seconds_of = {}

  def timed(name, *arguments):
    outputs = jax.block_until_ready(programs[name](*arguments))  # compiles
    seconds = []
    for _ in range(rounds):
      start = time.perf_counter()
      jax.block_until_ready(programs[name](*arguments))
      seconds.append(time.perf_counter() - start)
    seconds_of[f'time/{name}'] = min(seconds)
    return outputs

  batch, key = timed('rollout', state, arm, prompts, starts)
  timed('statistics', state, batch, key, arm)
  timed('update', state, batch, key, arm)
  return seconds_of
