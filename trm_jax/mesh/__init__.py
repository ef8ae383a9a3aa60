"""The device mesh: rows over `data`, heads, experts and vocabulary over `model`.

`sharding`: the axes, the mesh, and the one wrapper of `jax.shard_map`.
"""
