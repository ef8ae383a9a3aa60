"""The training loop: `config` -> `program` (compiled once) -> `update` on a `judgement` -> `loop`.

`words` are the command line's view of a method, `command` what programs share, `timing` traces a
step. Exported here: what a caller needs. Needs the extra `train`.
"""

import trm_jax

try:
  from trm_jax.training.config import (
    Config,
    Optimizer,
    WarmStart,
  )
  from trm_jax.training.program import (
    Program,
    build,
  )
  from trm_jax.training.update import (
    Arm,
    Batch,
    TrainState,
  )
  from trm_jax.training.words import MethodWords
except ModuleNotFoundError as error:
  raise trm_jax._without(error, __name__) from error

__all__ = [
  'Arm',
  'Batch',
  'Config',
  'MethodWords',
  'Optimizer',
  'Program',
  'TrainState',
  'WarmStart',
  'build',
]
