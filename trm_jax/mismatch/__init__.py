"""Simulated mismatch: what separates the rollout policy from the trained policy.

| module      | source                                                        |
| ----------- | ------------------------------------------------------------- |
| `precision` | low-precision weights, activations, KV cache                  |
| `routing`   | router jitter that flips experts                              |
| `staleness` | weights of k steps ago, or a replica stuck at step 0          |
| `fleet`     | several engines: m of the G samples of a prompt are disturbed |

Each source is a small frozen dataclass and a pure function on the rollout side only. Off means off:
a source that is not configured is not traced.
"""
