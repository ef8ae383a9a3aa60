"""Trust Region Masking for long-horizon LLM reinforcement learning (arXiv 2512.23075), in JAX.

    import trm_jax as trm

    rollout -> divergences [B, T] -> trust region keep[B] -> surrogate -> update.
    Mismatch acts on the rollout side: precision, routing, staleness, decoding, noise.
    Bounds and certificates turn the same divergences into guarantees.
    The exact oracle knows the truth on policies small enough to enumerate.

    masks         trm.max_kl(.2)(divergences, valid) -> keep[B]
    a new mask    trm.Criterion(name, limit, statistic); the packaged ones: trm.masks.criteria
    a bound at T  trm.tabulate_bounds(T=4096, delta=1e-4)
    certificate   trm.improvement(log_ratio, valid, reward, samples=8).verdict
    a method      trm.methods() is a table of them; trm.Method(...) composes one

`dir(trm)` lists what is here; `help(trm.max_kl)`, and so on, shows an example that assumes
`import jax.numpy as jnp`, `import numpy as np` and the line above. Nothing is imported
before it is used. The rooms, as in trm.masks, top to bottom: planning, training, tasks,
measurements, mismatch, rollouts, checkpoints, policy, certificates, exact, objectives, masks,
bounds, divergences, runs, mesh, types. The first eight and `runs` need
`pip install 'trm_jax[train]'`; without it, `dir(trm)` leaves out what cannot be used.

Names by the room they come from:

"""

import difflib
import importlib
import importlib.util
import textwrap
from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'

_BASE = 'bounds certificates divergences exact extremes masks mesh objectives types'.split()
# Rooms that need the extra `train`.
_TRAIN = 'checkpoints measurements mismatch planning policy rollouts runs tasks training'.split()

# Public name -> the module it is in; where it has another name there, module:NAME.
_NAMES = {
  # What travels between the parts.
  'Bracket': 'types',
  'Divergences': 'types',
  'InputError': 'types',
  'Mean': 'types',
  'Rollout': 'types',
  'Statistics': 'types',
  'TopK': 'types',
  'part': 'types',
  # Divergences per token, from two arrays of logits ...
  'statistics': 'divergences',
  'kl': 'divergences',
  'total_variation': 'divergences',
  'jensen_shannon': 'divergences',
  'renyi': 'divergences',
  'entropy': 'divergences',
  'logp': 'divergences',
  # ... from hidden states and output heads, without [B, T, V] ...
  'hidden_statistics': 'divergences.linear_head:statistics',
  'hidden_logp': 'divergences.linear_head:logp',
  # ... from the likeliest tokens that an engine stored ...
  'hidden_brackets': 'divergences.linear_head:brackets',
  'brackets': 'divergences.brackets:bounds',
  'top_k': 'divergences.brackets',
  # ... and from the log-prob of the sampled token.
  'ratio': 'divergences',
  'k1': 'divergences',
  'k2': 'divergences',
  'k3': 'divergences',
  # The trust region.
  'Criterion': 'masks',
  'max_kl': 'masks',
  'mean_kl': 'masks',
  'max_tv': 'masks',
  'max_k2': 'masks',
  'mean_k3': 'masks',
  'length_neutral': 'masks',
  'mean_deviation': 'masks',
  'chi2_budget': 'masks',
  'combined': 'masks',
  'all_of': 'masks',
  'permuted': 'masks',
  'prefix': 'masks',
  'conformal': 'masks.calibration',
  'max_limit': 'masks.calibration',
  # What the gradient is made of.
  'Method': 'objectives',
  'methods': 'objectives',
  'ratio_pg': 'objectives.surrogates',
  'ppo_clip': 'objectives.surrogates',
  'decoupled': 'objectives.surrogates',
  'aggregate': 'objectives.surrogates',
  'truncated': 'objectives.weights',
  'resolve_missing': 'objectives.weights',
  'effective_sample_size': 'divergences.ratios',
  'centred': 'objectives.advantages',
  'group_relative': 'objectives.advantages',
  'leave_one_out': 'objectives.advantages',
  # Bounds of the surrogate's error.
  'b_star': 'bounds',
  'b_star_tight': 'bounds.sharp',
  'tabulate_bounds': 'bounds.sharp:tabulate',
  'classical_kl': 'bounds',
  'classical_tv': 'bounds',
  'pinsker_marginal_kl': 'bounds',
  'pinsker_marginal_tv': 'bounds',
  'mixed_kl': 'bounds',
  'mixed_tv': 'bounds',
  'coupling': 'bounds',
  'adaptive': 'bounds',
  # Proofs from samples.
  'improvement': 'certificates',
  'harm': 'certificates',
  'monitor': 'certificates',
  'Limits': 'certificates.patching',
  'patch': 'certificates.patching',
  'tv_penalty': 'certificates.patching',
  'l2_penalty': 'certificates.patching',
  'first_order': 'certificates.surrogate',
  'betting': 'certificates.confidence',
  # The truth on small policies, in float64.
  'float64': 'exact.enumeration',
  'world': 'exact.enumeration',
  'World': 'exact.enumeration',
  'policy_objective': 'exact.oracle',
  'surrogate': 'exact.oracle',
  'error': 'exact.oracle',
  # Training; needs the extra `train`.
  'Config': 'training',
  'MethodWords': 'training',
  'build': 'training',
}


for _room in [*_BASE, *_TRAIN]:
  if _inside := [name for name, module in _NAMES.items() if module.split('.')[0] == _room]:
    _line = f'{_room:13} {", ".join(_inside)}'
    __doc__ += textwrap.fill(_line, 96, initial_indent=' ' * 4, subsequent_indent=' ' * 18) + '\n'


def _find(name: str) -> Any:
  module, inside = name, ''
  if name in _NAMES:
    module, _, inside = _NAMES[name].partition(':')
    inside = inside or name
  elif name not in _BASE + _TRAIN:
    near = difflib.get_close_matches(name, [*_NAMES, *_BASE, *_TRAIN], n=3)
    remedy = f'did you mean {" or ".join(near)}?' if near else 'dir(trm_jax) lists what there is.'
    raise AttributeError(f'trm_jax has no {name!r}: {remedy}')
  try:
    target = importlib.import_module(f'trm_jax.{module}')
  except ModuleNotFoundError as error:
    raise _without(error, f'trm_jax.{name}') from error
  globals()[name] = target = getattr(target, inside) if inside else target
  return target


def _without(error: ModuleNotFoundError, name: str) -> ModuleNotFoundError:
  if error.name is None or error.name.split('.')[0] == 'trm_jax':
    return error
  return ModuleNotFoundError(
    f"{name} needs {error.name}, which is not installed: pip install 'trm_jax[train]'.",
    name=error.name,
  )


def __dir__() -> list[str]:
  rooms = _BASE
  if all(importlib.util.find_spec(name) for name in ('flax', 'optax', 'grain')):
    rooms = _BASE + _TRAIN
  names = [name for name, module in _NAMES.items() if module.split('.')[0] in rooms]
  return sorted([*names, *rooms, '__version__'])


if TYPE_CHECKING:
  # Not __getattr__ as well: checkers would take every wrong name for a right one.
  from trm_jax._names import *  # noqa: F403
else:
  __getattr__ = _find
