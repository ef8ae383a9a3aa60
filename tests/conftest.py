"""Settings of every test: eight simulated CPU devices, strict ranks, reproducible examples."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Workers share the cores: one compute thread each.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_multi_thread_eigen=false'
).strip()
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
hypothesis.settings.register_profile('quick', max_examples=25, **SHARED)
hypothesis.settings.register_profile('thorough', max_examples=10_000, **SHARED)
# `--hypothesis-profile=thorough` is read later and wins.
hypothesis.settings.load_profile('quick')


@pytest.fixture
def optimised():
  """Compiles as users do, for the functions first compiled inside the test."""
  jax.config.update('jax_disable_most_optimizations', False)
  jax.clear_caches()
  yield
  jax.config.update('jax_disable_most_optimizations', True)
  jax.clear_caches()
