"""Task: moves.py with answers of up to 512 tokens."""

from trm_jax.tasks import moves

TASK = moves.make(moves=32, laps=15)
