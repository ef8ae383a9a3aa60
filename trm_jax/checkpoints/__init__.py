"""Published weights in and out (exported here), their settings (`config_json`), files
(`tensor_files`) and `tokenizer`.
"""

from trm_jax.checkpoints.parameters import (
  load,
  save,
)

__all__ = [
  'load',
  'save',
]
