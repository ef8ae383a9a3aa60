"""trm_jax.checkpoints.config_json: published settings are read, others are refused by name."""

import dataclasses
import json

import pytest

from trm_jax import types
from trm_jax.checkpoints import config_json
from trm_jax.policy import qwen3, rotary

# As published with Qwen3-30B-A3B, less what only generation reads.
MIXTURE = dict(
  architectures=['Qwen3MoeForCausalLM'],
  attention_bias=False,
  attention_dropout=0.0,
  decoder_sparse_step=1,
  head_dim=128,
  hidden_act='silu',
  hidden_size=2048,
  intermediate_size=6144,
  max_position_embeddings=40960,
  max_window_layers=48,
  mlp_only_layers=[],
  model_type='qwen3_moe',
  moe_intermediate_size=768,
  norm_topk_prob=True,
  num_attention_heads=32,
  num_experts=128,
  num_experts_per_tok=8,
  num_hidden_layers=48,
  num_key_value_heads=4,
  rms_norm_eps=1e-06,
  rope_scaling=None,
  rope_theta=1000000.0,
  sliding_window=None,
  tie_word_embeddings=False,
  torch_dtype='bfloat16',
  use_sliding_window=False,
  vocab_size=151936,
)
DENSE = dict(
  attention_bias=False,
  head_dim=128,
  hidden_act='silu',
  hidden_size=1024,
  intermediate_size=3072,
  max_position_embeddings=40960,
  max_window_layers=28,
  model_type='qwen3',
  num_attention_heads=16,
  num_hidden_layers=28,
  num_key_value_heads=8,
  rms_norm_eps=1e-06,
  rope_scaling=None,
  rope_theta=1000000,
  sliding_window=None,
  tie_word_embeddings=True,
  use_sliding_window=False,
  vocab_size=151936,
)


def read(tmp_path, values):
  path = tmp_path / 'config.json'
  path.write_text(values if isinstance(values, str) else json.dumps(values))
  return config_json.read(path)


def test_published_files_give_the_published_models(tmp_path):
  assert read(tmp_path, MIXTURE) == (qwen3.QWEN3_30B_A3B.policy, 151936)
  assert read(tmp_path, DENSE) == (qwen3.QWEN3_0_6B.policy, 151936)


def test_every_model_comes_back(tmp_path):
  for model in qwen3.MODELS:
    text = json.dumps(config_json.describe(model.policy, model.vocab_size))
    assert read(tmp_path, text) == (model.policy, model.vocab_size)


@pytest.mark.parametrize('key', ['rope_scaling', 'rope_parameters'])
@pytest.mark.parametrize('kind', ['rope_type', 'type'])
def test_rope_in_both_notations(key, kind, tmp_path):
  rope = {kind: 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32768}
  if key == 'rope_parameters':
    rope['rope_theta'] = 5e6
  config, _ = read(tmp_path, DENSE | {key: rope})
  assert config.rope_scaling == qwen3.LONG
  assert config.rope_base == (5e6 if key == 'rope_parameters' else 1e6)
  config, _ = read(tmp_path, DENSE | {'rope_scaling': {kind: 'linear', 'factor': 2}})
  assert config.rope_scaling == rotary.Scaling(kind='linear', factor=2.0)


def test_promised_positions_agree_with_the_factor_of_yarn():
  model = qwen3.MODELS[0]
  promise = lambda config, **rest: config_json.describe(config, 8, **rest)[
    'max_position_embeddings'
  ]
  assert promise(model.policy) == 40_960
  long = dataclasses.replace(model.policy, rope_scaling=qwen3.LONG)
  assert promise(long) == 4 * 32_768
  assert promise(long, context=99) == 99


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'model_type': 'llama'}, ['model_type="llama"', 'qwen3 and qwen3_moe']),
    ({'model_type': None}, ['model_type=null']),
    ({'attention_bias': True}, ['attention_bias=true']),
    ({'use_sliding_window': True}, ['use_sliding_window=true']),
    ({'layer_types': ['sliding_attention']}, ['layer_types', 'full_attention']),
    ({'hidden_act': 'gelu'}, ['hidden_act="gelu"']),
    ({'quantization_config': {'bits': 4}}, ['quantization_config']),
    ({'rope_scaling': {'rope_type': 'llama3', 'factor': 8}}, ['rope_scaling', 'llama3']),
    ({'rope_scaling': {'rope_type': 'yarn'}}, ['no factor']),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4, 'mscale': 2}}, ['mscale', 'yarn']),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': 0.5}}, ['rope_scaling', 'factor=0.5']),
    ({'rope_theta': None}, ['no rope_theta']),
    ({'hidden_size': '1024'}, ['hidden_size="1024"', 'positive integer']),
    ({'hidden_size': True}, ['hidden_size=true']),
    ({'hidden_size': -1}, ['hidden_size=-1']),
    ({'rms_norm_eps': 1e400}, ['not valid JSON']),
    ({'head_dim': None}, ['no head_dim']),
    ({'head_dim': 7}, ['head_width=7', 'even']),
    ({'tie_word_embeddings': 'no'}, ['tie_word_embeddings="no"', 'true or false']),
    ({'num_key_value_heads': 3}, ['describes no policy', 'kv_heads=3']),
  ],
)
def test_refused(changes, words, tmp_path):
  with pytest.raises(types.InputError) as error:
    read(tmp_path, DENSE | changes)
  message = str(error.value)
  assert all(word in message for word in ['config.json', *words]), message
  assert message.endswith('.') and '\n' not in message


@pytest.mark.parametrize('changes', [{'decoder_sparse_step': 2}, {'mlp_only_layers': [0]}])
def test_mixtures_with_dense_layers_are_refused(changes, tmp_path):
  with pytest.raises(types.InputError, match=next(iter(changes))):
    read(tmp_path, MIXTURE | changes)


@pytest.mark.parametrize('text', ['', '[]', '{"a": NaN}', '{', '[' * 100_000, '\x00'])
def test_what_is_no_json_object(text, tmp_path):
  with pytest.raises(types.InputError, match=r'config\.json .*fetch'):
    read(tmp_path, text)
