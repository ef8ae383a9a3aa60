"""Sorting with a reward that random weights often earn, so that tiny policies do move."""

import dataclasses

import jax.numpy as jnp

from trm_jax.tasks import sorting


def reward(prompts, start, tokens, valid):
  """1 where the first token is even."""
  del prompts, start
  return jnp.where(valid[:, 0] & (tokens[:, 0] % 2 == 0), 1.0, 0.0)


TASK = dataclasses.replace(sorting.TASK, name='toy', reward=reward)
