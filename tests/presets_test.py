"""trm_jax.mismatch.presets: published numbers return, and every name is an engine."""

import typing

import pytest

from experiments import calibrate_presets
from trm_jax import policy
from trm_jax.mismatch import engine, fleet, presets
from trm_jax.types import InputError

NAMES = typing.get_args(presets.Name)
FITTED = [name for name in NAMES if presets.named(name).statistic]


@pytest.mark.parametrize('name', FITTED)
def test_a_fitted_preset_returns_its_published_number(name):
  preset = presets.named(name)
  found = calibrate_presets.closed_form(preset.engine.heavy_tail)[preset.statistic]
  assert found == pytest.approx(preset.published, rel=preset.error)


def test_fp16_is_fitted_to_the_published_share_of_the_dense_engine():
  of = lambda name: calibrate_presets.closed_form(presets.named(name).engine.heavy_tail)['mean_kl']
  assert of('fp16') / of('dense_vllm_bf16') == pytest.approx(0.32 / 7.64, rel=0.03)


def test_every_name_is_an_engine_that_a_fleet_runs():
  dense = policy.PolicyConfig(experts=0)
  engines = set()
  for name in NAMES:
    found = fleet.Fleet(preset=name)
    found.check(dense, samples=4)
    assert found.shares(4) == [(presets.named(name).engine, 4)]
    engines.add(found.first)
  assert len(engines) == len(NAMES) and engine.Engine() not in engines
  assert fleet.Fleet(preset='stale_8').history == 8
  assert fleet.Fleet(preset='stuck_replica').stuck


def test_a_preset_beside_an_engine_or_of_no_name_is_refused():
  with pytest.raises(InputError, match="preset='gpt' is not one of dense_vllm_bf16, "):
    presets.named('gpt')
  noisy = presets.named('fp16').engine
  with pytest.raises(InputError, match="preset='fp16' and fleet.engine both describe"):
    fleet.Fleet(preset='fp16', engine=noisy)
  # Beside a broken engine it is the one of the remaining samples.
  mixed = fleet.Fleet(preset='fp16', broken=presets.named('stuck_replica').engine, broken_samples=1)
  assert [count for _, count in mixed.shares(4)] == [3, 1] and mixed.first == noisy
