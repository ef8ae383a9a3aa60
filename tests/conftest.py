"""Settings of every test: eight simulated CPU devices, strict ranks, reproducible examples."""

import atexit
import collections
import importlib.metadata
import os
import pathlib
import shutil
import tempfile
import textwrap

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Workers share the cores: one compute thread each, and one part a program to compile.
FLAGS = ['--xla_cpu_multi_thread_eigen=false', '--xla_cpu_parallel_codegen_split_count=1']
# The newer code generator takes twice the time to compile; jaxlib 0.12 has no other.
OLD_JAXLIB = importlib.metadata.version('jaxlib').startswith('0.10.')
if OLD_JAXLIB:
  FLAGS += ['--xla_cpu_use_fusion_emitters=false']
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *FLAGS]).strip()
# Read when tensorflow_datasets is imported, which test modules do before any fixture runs.
os.environ['TFDS_DATA_DIR'] = tempfile.mkdtemp(prefix='trm_jax_tfds_')
atexit.register(shutil.rmtree, os.environ['TFDS_DATA_DIR'], ignore_errors=True)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
# Compiling takes most of the time of these tests. What must hold of optimised code as well takes
# the fixture `optimised`, and the command-line tests run programs as users do.
jax.config.update('jax_disable_most_optimizations', True)

SHARED = {
  'deadline': None,
  'derandomize': True,
  'database': None,
  'suppress_health_check': [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile('quick', max_examples=15, **SHARED)
hypothesis.settings.register_profile('thorough', max_examples=200, **SHARED)
# `--hypothesis-profile=thorough` is read later and wins.
hypothesis.settings.load_profile('quick')


# The files that take longest, longest first. `--dist loadfile` hands out files in this order, so
# that no long one starts when the others have ended.
LONGEST = (
  'battery update divergences processes mismatch kernels train linear_head bound_tightness'
  ' linear_kernel policy token_level_failure brackets oracle trust_region certificate sampling'
  ' surrogate_certificate theorems tasks experiments recording surrogates calibration bounds'
).split()


def pytest_collection_modifyitems(items):
  rank = {f'{name}_test.py': place for place, name in enumerate(LONGEST)}
  items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_terminal_summary(terminalreporter):
  """Seconds of each file that took any, and the ten slowest tests."""
  seconds = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if hasattr(report, 'duration'):
        seconds[report.nodeid] += report.duration
  files = collections.Counter()
  for test, time in seconds.items():
    files[test.split('::')[0]] += time
  if sum(files.values()) < 60:
    return
  terminalreporter.section('seconds of each file')
  told = [f'{pathlib.Path(file).stem} {time:.0f}' for file, time in files.most_common()]
  terminalreporter.write_line(textwrap.fill(', '.join(told), 100))
  terminalreporter.section('the ten slowest')
  for test, time in seconds.most_common(10):
    terminalreporter.write_line(f'{time:7.1f} {test}')


@pytest.fixture
def optimised():
  """Compiles as users do, for the functions first compiled inside the test.

  Yields the options that `jax.jit` needs for it.
  """
  jax.config.update('jax_disable_most_optimizations', False)
  jax.clear_caches()
  yield {'xla_cpu_use_fusion_emitters': True} if OLD_JAXLIB else {}
  jax.config.update('jax_disable_most_optimizations', True)
  jax.clear_caches()
