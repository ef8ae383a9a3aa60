"""A run on disk and over hosts: `recording` (metrics, checkpoints), `digests`, `provenance`,
`processes` (several hosts), `locks` and `progress`.
"""
