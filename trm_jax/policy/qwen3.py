"""The published Qwen3 models as values: dense 0.6B to 32B, mixtures 30B-A3B and 235B-A22B.

    model = qwen3.QWEN3_8B
    params = policy.init(key, model.policy, model.vocab_size)

Settings are those of each model's published config.json, in float32; for training, set `dtype`,
`remat` and `expert_compute` with `dataclasses.replace(model.policy, ...)`. `LONG` is the published
way to 131,072 tokens, as `rope_scaling`.
"""

import dataclasses

from trm_jax.policy import rotary
from trm_jax.policy.decoder import PolicyConfig

LONG = rotary.Scaling(kind='yarn', factor=4.0, context=32_768)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A published model.

  Attributes:
    name: as published.
    policy: its architecture.
    vocab_size: rows of the embedding; the tokenizer uses fewer.
    context: largest number of positions without `rope_scaling`.
    parameters: published total; a tied head counts once.
  """

  name: str
  policy: PolicyConfig
  vocab_size: int = 151_936
  context: int = 40_960
  parameters: int


def _model(name, parameters, *, width, layers, heads, mlp_width, kv_heads=8, tied=False, **experts):
  policy = PolicyConfig(
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_width=128,
    mlp_width=mlp_width,
    rope_base=1_000_000.0,
    norm_epsilon=1e-6,
    tied_head=tied,
    **({'experts': 0} | experts),
  )
  return Model(name=name, policy=policy, parameters=parameters)


_EXPERTS = dict(kv_heads=4, experts=128, experts_per_token=8, normalize_gates=True)

QWEN3_0_6B = _model(
  'Qwen3-0.6B', 596_049_920, width=1024, layers=28, heads=16, mlp_width=3072, tied=True
)
QWEN3_1_7B = _model(
  'Qwen3-1.7B', 1_720_574_976, width=2048, layers=28, heads=16, mlp_width=6144, tied=True
)
QWEN3_4B = _model(
  'Qwen3-4B', 4_022_468_096, width=2560, layers=36, heads=32, mlp_width=9728, tied=True
)
QWEN3_8B = _model('Qwen3-8B', 8_190_735_360, width=4096, layers=36, heads=32, mlp_width=12_288)
QWEN3_14B = _model('Qwen3-14B', 14_768_307_200, width=5120, layers=40, heads=40, mlp_width=17_408)
QWEN3_32B = _model('Qwen3-32B', 32_762_123_264, width=5120, layers=64, heads=64, mlp_width=25_600)
QWEN3_30B_A3B = _model(
  'Qwen3-30B-A3B', 30_532_122_624, width=2048, layers=48, heads=32, mlp_width=768, **_EXPERTS
)
QWEN3_235B_A22B = _model(
  'Qwen3-235B-A22B', 235_093_634_560, width=4096, layers=94, heads=64, mlp_width=1536, **_EXPERTS
)

MODELS = (
  QWEN3_0_6B,
  QWEN3_1_7B,
  QWEN3_4B,
  QWEN3_8B,
  QWEN3_14B,
  QWEN3_32B,
  QWEN3_30B_A3B,
  QWEN3_235B_A22B,
)
