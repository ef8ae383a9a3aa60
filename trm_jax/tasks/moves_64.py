"""Task: moves.py with answers of up to 64 tokens, from prompts as short as those of its 31."""

from trm_jax.tasks import moves

TASK = moves.make(moves=8, laps=7)
