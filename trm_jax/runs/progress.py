"""Progress of a long loop on the terminal, with rate and time left."""

import datetime
import sys
import time
from typing import Any, Protocol, runtime_checkable

import trm_jax

try:
  import tqdm
except ModuleNotFoundError as error:
  raise trm_jax._without(error, __name__) from error


@runtime_checkable
class Display(Protocol):
  """Where a loop reports its steps: a `Progress`, or something that passes them on."""

  def update(self, step: int, **shown: Any) -> None:
    """Reports that `step` is done, with values worth showing."""

  def close(self) -> None:
    """Nothing more will come."""


class Silent:
  """A display that shows nothing: for the processes beside process 0."""

  def update(self, step: int, **shown: Any) -> None:
    """Says nothing."""

  def close(self) -> None:
    """Says nothing."""


class Progress:
  """Progress with rate and ETA: a tqdm bar on a terminal, plain lines elsewhere.

  Lines come at most every `interval` seconds, and a last one always. The rate counts from the first
  update on, which leaves compilation out.
  """

  def __init__(
    self, total: int, label: str, *, start: int = 0, interval: int | float = 5, stream=sys.stderr
  ):
    self._total, self._label, self._interval, self._stream = total, label, interval, stream
    self._step, self._values, self._closed = start, {}, False
    self._since = self._written = None
    self._bar = None
    if stream.isatty():
      self._bar = tqdm.tqdm(total=total, desc=label, initial=start, file=stream, unit='step')

  def update(self, step: int, **shown: Any) -> None:
    """Says that `step` of `total` are done: '[rl] 40/80  6.1 steps/s  ETA 7 s  reward 0.41'.

    `shown` are scalars or strings; plain lines fetch them from the device only when written.
    """
    now = time.monotonic()
    self._since = self._since or (step, now)
    self._step, self._values = step, shown
    if self._bar is not None:
      self._bar.set_postfix_str('  '.join(self._shown()), refresh=False)
      self._bar.update(step - self._bar.n)
    elif self._written is None or now - self._written >= self._interval:
      self._write(now)

  def close(self) -> None:
    """Writes the last line; may be called twice."""
    if not self._closed:
      self._bar.close() if self._bar is not None else self._write(time.monotonic())
    self._closed = True

  def _write(self, now: float) -> None:
    first, since = self._since or (self._step, now)
    parts = [f'[{self._label}] {self._step}/{self._total}']
    if self._step > first and now > since:
      rate = (self._step - first) / (now - since)
      seconds = round((self._total - self._step) / rate)
      left = f'{seconds} s' if seconds < 100 else str(datetime.timedelta(seconds=seconds))
      parts += [f'{rate:.3g} steps/s', f'ETA {left}']
    self._stream.write('  '.join(parts + self._shown()) + '\n')
    self._stream.flush()
    self._written = now

  def _shown(self) -> list[str]:
    values = {k: v.item() if hasattr(v, 'item') else v for k, v in self._values.items()}
    return [f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}' for k, v in values.items()]
