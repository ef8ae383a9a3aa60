"""Engines with published magnitudes: a dial of `heavy_tail` set so that a measured number returns.

| preset             | published (fitted)              | measured on                              |
| ------------------ | ------------------------------- | ---------------------------------------- |
| `dense_vllm_bf16`  | mean |log-ratio| .011           | Qwen3-4B, vLLM, Megatron [1]             |
| `moe_vllm_bf16`    | spreads of log-odds shifts      | Qwen1.5-MoE-A2.7B, vLLM, HF [2]          |
| `moe_sglang_bf16`  | mean KL 1.535e-3                | Qwen3-30B-A3B, SGLang, Megatron [3]      |
| `moe_replayed`     | mean KL 7.5e-4                  | the same with replayed routes [3]        |
| `fp16`             | KL .042 of `dense_vllm_bf16`'s  | same weights, both formats [4]           |
| `fp8_rollout`      | mean |log-ratio| .0666          | DeepSeek-V4-Flash, SGLang, Megatron [5]  |
| `int8_rollout`     | mean KL 2e-3                    | int8 weights, first steps [6]            |
| `outlier_prompts`  | 15 % of prompts, factor 100     | Nemotron-3-Nano, vLLM, Megatron [7]      |

The others are mechanisms without a magnitude: `stale_1`, `stale_8`, `stale_64` (weights of k RL
steps ago), `stuck_replica`, `unknown_filters` (Qwen3's own sampling defaults [8], of which the
trainer does not know), `raw_logprob_bug` (the same, and log-probs of before the filters),
`lost_logprobs`, `shifted_logprobs`, `scrambled_rows`.

A fitted preset acts on the log-odds of the likeliest token and so carries over to any policy whose
confidence is mixed as in [2]; `experiments.calibrate_presets` fits it and prints the error. It
stands for the outcome, not for the cause: for causes set the sources themselves. Unsure tokens
(p < .5) spread .4 times as much as published, since only the likeliest token is shifted.

[1] vime#64, flat over training. [2] arXiv 2609.32444. [3] arXiv 2510.11370. [4] arXiv 2510.26788: a
sequence KL of 7.64 against .32, read as a ratio. [5] miles#2722. [6] QuRL; it grows to .025 in 1000
steps. [7] NeMo-RL#2100. [8] generation_config.json: temperature .6, top-p .95, top-k 20.
"""

import dataclasses
import typing
from typing import Literal

from trm_jax.mismatch import decoding, heavy_tail, reporting, staleness
from trm_jax.mismatch.engine import Engine
from trm_jax.types import InputError

Name = Literal[
  'dense_vllm_bf16',
  'moe_vllm_bf16',
  'moe_sglang_bf16',
  'moe_replayed',
  'fp16',
  'fp8_rollout',
  'int8_rollout',
  'outlier_prompts',
  'stale_1',
  'stale_8',
  'stale_64',
  'stuck_replica',
  'raw_logprob_bug',
  'unknown_filters',
  'lost_logprobs',
  'shifted_logprobs',
  'scrambled_rows',
]
# Sequence KL in float16 over that in bfloat16, same weights (figure 2 of arXiv 2510.26788).
FP16_SHARE = 0.32 / 7.64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
  """An engine and the published number it is set by.

  Attributes:
    engine: what to simulate.
    statistic: 'mean_abs_log_ratio', 'mean_kl' (nats) or 'spread' (robust standard deviation of the
      log-odds shift in bins of confidence, over the published one); None for a mechanism, which has
      no magnitude to fit.
    published: its value.
    error: bound on the relative error with which it is reproduced on the published mix.
  """

  engine: Engine
  statistic: Literal['mean_abs_log_ratio', 'mean_kl', 'spread'] | None = None
  published: float | None = None
  error: float | None = None


def _fitted(scale: float, statistic, published: float) -> Preset:
  engine = Engine(heavy_tail=heavy_tail.HeavyTail(scale=scale))
  return Preset(engine=engine, statistic=statistic, published=published, error=0.02)


def _stale(steps: int) -> Preset:
  return Preset(engine=Engine(staleness=staleness.Staleness(steps=steps)))


def _filters(reported: str) -> Preset:
  filters = decoding.Decoding(temperature=0.6, top_p=0.95, top_k=20, reported=reported)
  return Preset(engine=Engine(decoding=filters))


def _reported(**bug) -> Preset:
  return Preset(engine=Engine(reporting=reporting.Reporting(**bug)))


_DENSE_KL = 4.28e-4  # mean KL of dense_vllm_bf16 on the published mix
_PRESETS: dict[str, Preset] = {
  'dense_vllm_bf16': _fitted(0.408, 'mean_abs_log_ratio', 0.011),
  'moe_vllm_bf16': _fitted(1.0, 'spread', 1.0),
  'moe_sglang_bf16': _fitted(0.777, 'mean_kl', 1.535e-3),
  'moe_replayed': _fitted(0.541, 'mean_kl', 7.5e-4),
  'fp16': _fitted(0.0834, 'mean_kl', FP16_SHARE * _DENSE_KL),
  'fp8_rollout': _fitted(2.473, 'mean_abs_log_ratio', 0.0666),
  'int8_rollout': _fitted(0.888, 'mean_kl', 2e-3),
  'outlier_prompts': Preset(
    engine=Engine(heavy_tail=heavy_tail.HeavyTail(outliers=0.15, outlier_shift=4.6))
  ),
  'stale_1': _stale(1),
  'stale_8': _stale(8),
  'stale_64': _stale(64),
  'stuck_replica': Preset(engine=Engine(staleness=staleness.Staleness(stuck=True))),
  'raw_logprob_bug': _filters('raw'),
  'unknown_filters': _filters('processed'),
  'lost_logprobs': _reported(missing=0.01),
  'shifted_logprobs': _reported(shift=1),
  'scrambled_rows': _reported(scrambled=0.1),
}


def named(name: str) -> Preset:
  """The preset of this name. Raises InputError for any other name."""
  if name not in _PRESETS:
    raise InputError(f'preset={name!r} is not one of {", ".join(typing.get_args(Name))}.')
  return _PRESETS[name]
