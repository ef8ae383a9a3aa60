"""Trust Region Masking for long-horizon LLM reinforcement learning (arXiv 2512.23075), in JAX.

The idea in five lines:

  rollout -> divergences [B, T] -> trust region keep[B] -> surrogate -> update.
  Mismatch acts on the rollout side: precision, routing, staleness, decoding, noise.
  Bounds and the certificate turn the same divergences into guarantees.
  The oracle knows the truth on policies small enough to enumerate.
  Every arrow is a pure function, and every module is one noun of these lines.
"""

__version__ = '0.1.0'
