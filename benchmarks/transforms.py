"""Every public transform of arrays as a program of shapes, for `benchmarks.tpu_transforms`.

    with jax.set_mesh(chips.mesh('v5p:2x2x2', 2, 4)):
      for case in transforms.cases():
        jax.jit(case.run).lower(*case.arguments).compile()

Rows are split over `data`, vocabularies, heads and experts over `model`, where a run of training
does so; metrics, certificates and bounds see whole arrays on every device, as they do there.
`EXCLUDED` names the public functions that are no case, with the reason.
"""

from benchmarks import mismatch_cases, policy_cases, statistics_cases, theory_cases
from benchmarks.cases import Case

# Public functions that are no case, by the reason; 'module.' stands for all of a module.
EXCLUDED = {
  'files, processes, programs and their reports: on the host': (
    *('config_json.', 'digests.', 'loop.', 'processes.', 'provenance.', 'recording.'),
    *('tensor_files.', 'timing.', 'tokenizer.', 'train.', 'weights.', 'tasks.task.'),
    *('mismatch.measurements.plain', 'mismatch.presets.named'),
  ),
  'NumPy in float64, on the host': ('mismatch.attribution.',),
  'sums over all sequences of a tiny world, in float64: what the others are checked against': (
    'enumeration.',
    'oracle.',
  ),
  'rewards and answers that another library computes on the host': ('tasks.reasoning.',),
  'rows of a data set into tokens, and settings into tasks: on the host': (
    *('tasks.addition.encode', 'tasks.addition.make', 'tasks.chain_sum.encode'),
    *('tasks.chain_sum.make', 'tasks.moves.encode', 'tasks.moves.make', 'tasks.sorting.encode'),
  ),
  'checks and sizes: no arrays are computed': (
    *('bounds.horizon', 'bounds.width', 'confidence.check_alpha', 'confidence.spent'),
    *('divergences.check', 'divergences.static', 'mismatch.precision.check_format'),
    *('policy.shapes', 'policy.size', 'rotary.frequencies', 'stores.bytes_per_token'),
    *('stores.check', 'stores.describe', 'stores.fields', 'types.check_words'),
  ),
  'layouts, which every case has': ('sharding.',),
  'inside the kernels, which are cases': ('lanes.', 'tiles.'),
  'steps of divergences, linear_head and their gradients, which are cases': (
    *('blocks.', 'terms.', 'divergences.gather', 'divergences.with_gradient', 'pair.centred'),
    *('pair.divergence_gradients', 'pair.fused', 'pair.local_sums', 'pair.local_terms'),
    *('pair.log_odds', 'pair.log_probs', 'pair.mean_signs', 'pair.merge', 'pair.pick'),
    *('pair.score_gradient', 'pair.seed', 'pair.shared', 'pair.side', 'pair.sums'),
    'pair.terms_given',
  ),
  'steps of the bounds and certificates, which are cases': (
    *('bounds.after', 'bounds.before', 'bounds.paper', 'bounds.real', 'bounds.root'),
    *('bounds.smallest', 'bounds.spread', 'bounds.tv_of_kl', 'certificate.conclude'),
  ),
}


def cases() -> list[Case]:
  """All cases, for the current mesh; a module of this folder each for a part of the package."""
  parts = statistics_cases, theory_cases, policy_cases, mismatch_cases
  return [case for part in parts for case in part.cases()]
