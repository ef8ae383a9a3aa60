"""config.json of a published Qwen3 checkpoint, to a `PolicyConfig` and back.

Read are model_type qwen3 (dense) and qwen3_moe, as transformers 4 and 5 write them. A setting that
this policy does not have is refused by name, never passed over.
"""

import json
import pathlib
from typing import Any

from trm_jax.policy import rotary
from trm_jax.policy.decoder import PolicyConfig
from trm_jax.types import InputError

ARCHITECTURES = {'qwen3': 'Qwen3ForCausalLM', 'qwen3_moe': 'Qwen3MoeForCausalLM'}
# Settings that must be absent or have one of these values.
_ONLY = {
  'attention_bias': (False,),
  'attention_dropout': (0,),
  'decoder_sparse_step': (1,),
  'hidden_act': ('silu',),
  'mlp_only_layers': ([],),
  'partial_rotary_factor': (1,),
  'quantization_config': (),
  'use_sliding_window': (False,),
}
_YARN = {'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'attention_factor'}
_ROPE = {'default': set(), 'linear': {'factor'}, 'yarn': {'factor'} | _YARN}


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The JSON object in a file. Raises InputError for anything else."""

  def refuse(constant):
    raise ValueError(f'{constant} is no JSON')

  try:
    content = json.loads(path.read_text('utf-8'), parse_constant=refuse)
  except OSError as error:
    raise InputError(
      f'{path} cannot be read ({error.strerror or error}); name the folder of a checkpoint.'
    ) from error
  except (ValueError, RecursionError) as error:
    raise InputError(f'{path} is not valid JSON; fetch the file again.') from error
  if not isinstance(content, dict):
    raise InputError(f'{path} holds no JSON object; fetch the file again.')
  return content


class _Settings:
  """One config.json: values by key, with errors that name file and key."""

  def __init__(self, path, values):
    self.path, self.values = path, values

  def refuse(self, key, remedy):
    value = json.dumps(self.values.get(key))
    raise InputError(f'{self.path} has {key}={value:.80}; {remedy}.')

  def number(self, *keys, kind=int, default=None):
    """The first of `keys` that is there, a positive number."""
    key = next((k for k in keys if self.values.get(k) is not None), None)
    if key is None:
      if default is not None:
        return default
      raise InputError(f'{self.path} has no {keys[0]}; fetch the published file again.')
    value = self.values[key]
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < 2**31:
      self.refuse(key, 'it must be a positive ' + ('integer' if kind is int else 'number'))
    return kind(value)

  def flag(self, key, default=None):
    value = self.values.get(key, default)
    if not isinstance(value, bool):
      self.refuse(key, 'it must be true or false')
    return value


def read(path: pathlib.Path) -> tuple[PolicyConfig, int]:
  """(architecture in float32, vocabulary size) of a config.json.

  Raises InputError, naming file, key and value, for another architecture, for missing values and
  for settings that this policy does not have.
  """
  settings = _Settings(path, read_json(path))
  kind = settings.values.get('model_type')
  if not isinstance(kind, str) or kind not in ARCHITECTURES:
    settings.refuse('model_type', f'only {" and ".join(ARCHITECTURES)} can be read')
  for key, allowed in _ONLY.items():
    value = settings.values.get(key)
    if value is not None and not any(value == a for a in allowed):
      settings.refuse(key, 'this policy has no such setting')
  layers = settings.values.get('layer_types') or ['full_attention']
  if not isinstance(layers, list) or any(kind != 'full_attention' for kind in layers):
    settings.refuse('layer_types', 'only full_attention can be computed')
  base, scaling = _rope(settings)
  experts = {'experts': 0, 'mlp_width': settings.number('intermediate_size')}
  if kind == 'qwen3_moe':
    experts = {
      'experts': settings.number('num_experts', 'num_local_experts'),
      'experts_per_token': settings.number('num_experts_per_tok'),
      'mlp_width': settings.number('moe_intermediate_size'),
      'normalize_gates': settings.flag('norm_topk_prob', False),
    }
  try:
    config = PolicyConfig(
      width=settings.number('hidden_size'),
      layers=settings.number('num_hidden_layers'),
      heads=settings.number('num_attention_heads'),
      kv_heads=settings.number('num_key_value_heads'),
      head_width=settings.number('head_dim'),
      rope_base=base,
      rope_scaling=scaling,
      norm_epsilon=settings.number('rms_norm_eps', kind=float),
      tied_head=settings.flag('tie_word_embeddings', False),
      **experts,
    )
  except InputError as error:
    if str(path) in str(error):
      raise
    raise InputError(f'{path} describes no policy: {error}') from error
  return config, settings.number('vocab_size')


def _rope(settings):
  """(base, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
  key = 'rope_scaling' if settings.values.get('rope_parameters') is None else 'rope_parameters'
  given = settings.values.get(key) or {}
  if not isinstance(given, dict):
    settings.refuse(key, 'it must be an object or null')
  given = {k: v for k, v in given.items() if v is not None}
  rope = _Settings(settings.path, {'rope_theta': settings.values.get('rope_theta')} | given)
  base = rope.number('rope_theta', kind=float)
  kind = given.get('rope_type', given.get('type', 'default'))
  if not isinstance(kind, str) or kind not in _ROPE:
    settings.refuse(key, f'its type must be one of {", ".join(_ROPE)}')
  if kind == 'default':
    given.pop('factor', None)
  extra = set(given) - {'rope_theta', 'rope_type', 'type'} - _ROPE[kind]
  if extra - {'partial_rotary_factor'} or given.get('partial_rotary_factor', 1) != 1:
    settings.refuse(key, f'{min(extra)} is not supported with type {kind}')
  if kind == 'default':
    return base, rotary.Scaling()
  scaling = {'kind': kind, 'factor': rope.number('factor', kind=float)}
  if kind == 'yarn':
    trained = 'original_max_position_embeddings'
    source = rope if trained in given else settings
    scaling['context'] = source.number(trained, 'max_position_embeddings')
    scaling['beta_fast'] = rope.number('beta_fast', kind=float, default=32.0)
    scaling['beta_slow'] = rope.number('beta_slow', kind=float, default=1.0)
    if 'attention_factor' in given:
      scaling['magnitude'] = rope.number('attention_factor', kind=float)
  try:
    return base, rotary.Scaling(**scaling)
  except InputError as error:
    raise InputError(f'{settings.path} has an unusable {key}: {error}') from error


def positions(path: pathlib.Path) -> int | None:
  """Positions that the checkpoint promises to serve (`max_position_embeddings`); None: not said."""
  settings = _Settings(path, read_json(path))
  name = 'max_position_embeddings'
  return settings.number(name) if settings.values.get(name) is not None else None


def describe(
  config: PolicyConfig, vocab_size: int, *, dtype: str = 'float32', context: int | None = None
) -> dict[str, Any]:
  """What a config.json says of this policy; `context` is the number of positions it promises.

  None: factor times the trained positions under yarn, since some readers take the factor from this
  ratio, else 40,960.
  """
  if context is None:
    scaling = config.rope_scaling
    context = round(scaling.factor * scaling.context) if scaling.kind == 'yarn' else 40_960
  kind = 'qwen3_moe' if config.experts else 'qwen3'
  described = {
    'architectures': [ARCHITECTURES[kind]],
    'model_type': kind,
    'vocab_size': vocab_size,
    'hidden_size': config.width,
    'num_hidden_layers': config.layers,
    'num_attention_heads': config.heads,
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_width,
    'intermediate_size': config.mlp_width,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_epsilon,
    'rope_theta': config.rope_base,
    'rope_scaling': _scaling(config.rope_scaling),
    'max_position_embeddings': context,
    'tie_word_embeddings': config.tied_head,
    'attention_bias': False,
    'attention_dropout': 0.0,
    'use_sliding_window': False,
    'torch_dtype': dtype,
  }
  if config.experts:
    described |= {
      'num_experts': config.experts,
      'num_experts_per_tok': config.experts_per_token,
      'moe_intermediate_size': config.mlp_width,
      'norm_topk_prob': config.normalize_gates,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  return described


def _scaling(scaling):
  if scaling.kind == 'none':
    return None
  described = {'rope_type': scaling.kind, 'factor': scaling.factor}
  if scaling.kind == 'yarn':
    described |= {
      'original_max_position_embeddings': scaling.context,
      'beta_fast': scaling.beta_fast,
      'beta_slow': scaling.beta_slow,
    }
    if scaling.magnitude is not None:
      described['attention_factor'] = scaling.magnitude
  return described
