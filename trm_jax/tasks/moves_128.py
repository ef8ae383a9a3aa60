"""Task: moves.py with answers of up to 128 tokens."""

from trm_jax.tasks import moves

TASK = moves.make(moves=17, laps=7)
