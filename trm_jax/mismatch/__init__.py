"""Simulated mismatch: what separates the rollout policy from the trained policy.

| source       | stands for; what has been measured                    | dials                 |
| ------------ | ----------------------------------------------------- | --------------------- |
| `precision`  | rollouts in fewer bits: sequence KL 7.64 in bfloat16, | formats of weights,   |
|              | .32 in float16 [1]; mean |log-ratio| .041 in bfloat16 | activations, kv,      |
|              | and .067 in float8 [2]                                | attention, logits,    |
|              |                                                       | softmax               |
| `reduction`  | other kernels, split-K, batch size: ratios in         | permute,              |
|              | [.9988, 1.0329] for a dense 4B model [3]              | attention_block       |
| `routing`    | an MoE that sends tokens elsewhere: 10 % of routers   | jitter, flips, dtype, |
|              | and 94 % of tokens differ; KL 1.5e-3, and 7.5e-4 with | capacity              |
|              | replayed routes [4]                                   |                       |
| `staleness`  | weights of k steps ago, synced even during a response | steps, switch, stuck  |
|              | (partial rollouts), or a replica stuck at step 0; up  |                       |
|              | to 256 steps are in use [5]                           |                       |
| `decoding`   | filters that the trainer does not know, or log-probs  | temperature, top_k,   |
|              | reported before them [6]                              | top_p, min_p, reported|
| `heavy_tail` | log-odds shifts of spread .16 to .24 with Student-t   | scale, spikes,        |
|              | tails [7]; 15 to 20 % of sequences wrong throughout,  | outliers              |
|              | the same prompts every time [8]                       |                       |
| `reporting`  | log-probs damaged on their way: cast, lost, off by    | dtype, missing,       |
|              | one, of another row [6]                               | shift, scrambled      |
| `fleet`      | several engines: m of the G samples of a prompt are   | broken_samples        |
|              | disturbed                                             |                       |

Statistic of a source: mean KL(rollout || policy) on the engine's own samples; mean |log-ratio| for
`reporting` and `decoding.reported`, which leave the distribution as it is and report another.

Each source is a small frozen dataclass and a pure function on the rollout side only. Any subset may
act together. Off means off: a source that is not configured is not traced, and strength 0 gives the
bits of the healthy engine. The trainer can undo two of them: `routing.replay` (experts, or experts
and weights; `replay_routes` of a run) and `decoding.replay_support` (`replay_support` of a run).

| beside them         | what it is                                                          |
| ------------------- | ------------------------------------------------------------------- |
| `hooks`             | where in a forward pass an engine may differ from the trainer       |
| `engine`            | one engine: the sources that act on it together                     |
| `presets`           | engines with published magnitudes, by name                          |
| `measurements`      | distributions, tails and tables of a batch's mismatch               |
| `router_statistics` | flips by layer, tokens touched, margins, load                       |
| `attribution`       | which source does the harm: effects and Shapley shares              |
| `metric_names`      | the same numbers as other systems log them                          |

[1] arXiv 2510.26788 (offline, same weights; read from a figure). [2] miles#2722, DeepSeek-V4-Flash,
SGLang against Megatron. [3] UniRL#310, same weights, SGLang against FSDP. [4] arXiv 2510.11370,
Qwen3-30B-A3B, SGLang against Megatron. [5] arXiv 2510.01161. [6] TRL#6789, prime-rl#2601,
verl#6240, vllm#42259. [7] arXiv 2609.32444, Qwen1.5-MoE-A2.7B, vLLM against HF, bfloat16.
[8] NeMo-RL#2100.
"""
