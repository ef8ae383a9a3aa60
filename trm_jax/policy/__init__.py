"""The Flax decoder (exported here) and its parts: `attention`, `experts`, `rotary`.

`qwen3` names the published sizes; `hooks` are the places where an engine may differ from the
trainer.
"""

import trm_jax

try:
  from trm_jax.policy.decoder import (
    Aux,
    Cache,
    Params,
    PolicyConfig,
    apply,
    head,
    init,
    init_cache,
    logits,
    shapes,
    size,
  )
  from trm_jax.policy.hooks import (
    Hooks,
  )
except ModuleNotFoundError as error:
  raise trm_jax._without(error, __name__) from error

__all__ = [
  'Aux',
  'Cache',
  'Hooks',
  'Params',
  'PolicyConfig',
  'apply',
  'head',
  'init',
  'init_cache',
  'logits',
  'shapes',
  'size',
]
