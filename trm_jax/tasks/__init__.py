"""Verifiable tasks: prompts whose reward a program checks. `task.py` says how to add one."""

from trm_jax.tasks.task import Task, load, prepare, prompts

__all__ = ['Task', 'load', 'prepare', 'prompts']
