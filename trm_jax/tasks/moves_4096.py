"""Task: moves.py with answers of up to 4096 tokens."""

from trm_jax.tasks import moves

TASK = moves.make(moves=272, laps=15)
