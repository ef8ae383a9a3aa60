"""Verifiable tasks: prompts whose reward a program checks. `task.py` says how to add one."""

import trm_jax

try:
  from trm_jax.tasks import identity
  from trm_jax.tasks.task import Task, check, load, prepare, prompts, resume
except ModuleNotFoundError as error:
  raise trm_jax._without(error, __name__) from error

__all__ = ['Task', 'check', 'identity', 'load', 'prepare', 'prompts', 'resume']
