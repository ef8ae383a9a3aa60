"""How a vocabulary is read once, whole or split over devices, on CPUs and by kernels; private to
`trm_jax.divergences`.
"""
