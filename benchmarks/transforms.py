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
    *('checkpoints.', 'planning.', 'runs.', 'tasks.identity.', 'training.command.'),
    *('training.loop.', 'training.program.', 'training.timing.', 'measurements.batch.plain'),
    *('mismatch.presets.named', 'objectives.catalogue.methods', 'training.words.named'),
  ),
  'NumPy in float64, on the host': ('measurements.attribution.',),
  'sums over all sequences of a tiny world, in float64: what the others are checked against': (
    'exact.',
  ),
  'rewards and answers that another library computes on the host': ('tasks.reasoning.',),
  'rows of a data set into tokens, and settings into tasks: on the host': (
    *('tasks.addition.encode', 'tasks.addition.make', 'tasks.chain_sum.encode', 'tasks.task.'),
    *('tasks.chain_sum.make', 'tasks.moves.encode', 'tasks.moves.make', 'tasks.sorting.encode'),
  ),
  'checks and sizes: no arrays are computed': (
    *('bounds.paper.horizon', 'bounds.paper.width', 'certificates.confidence.check_alpha'),
    *('certificates.confidence.spent', 'divergences.full_logits.check_logits', 'types.'),
    *('divergences.full_logits.check_vocab_size', 'divergences.full_logits.static'),
    *('mismatch.precision.check_format', 'mismatch.routing.impossible_routes'),
    *('policy.decoder.shapes', 'policy.decoder.size', 'policy.rotary.frequencies'),
    *('rollouts.relay.vocabulary', 'rollouts.scoring.clean_prompts', 'rollouts.stores.fields'),
    *('rollouts.stores.bytes_per_token', 'rollouts.stores.check_method'),
    'rollouts.stores.describe',
  ),
  'layouts, which every case has': ('mesh.sharding.',),
  'inside the kernels, which are cases': ('divergences.passes.lanes.', 'divergences.passes.tiles.'),
  'steps of divergences and their gradients, which are cases': (
    *('divergences.full_logits.gather', 'divergences.full_logits.with_gradient'),
    *('divergences.passes.blocks.', 'divergences.passes.terms.'),
    *('divergences.ratios.over_trajectories', 'divergences.ratios.raised'),
    'divergences.ratios.share_of',
    *(
      f'divergences.passes.pair.{step}'
      for step in (
        *('below_top', 'divergence_gradients', 'fused', 'local_sums', 'local_terms', 'log_odds'),
        *('log_probs', 'mean_signs', 'merge', 'pick', 'score_gradient', 'seed', 'shared', 'side'),
        *('sums', 'terms_given'),
      )
    ),
    *(
      f'divergences.passes.vocabulary.{step}'
      for step in ('add_up', 'known', 'only', 'real_entries', 'without_padding')
    ),
  ),
  'steps of criteria, which are cases': (
    *('masks.criteria.within', 'masks.prefixes.chi2_spent', 'masks.prefixes.spent'),
    'masks.row_statistics.tokens',
  ),
  'parts of the published methods, which are cases': (
    *('objectives.clips.', 'objectives.gates.', 'objectives.parts.', 'objectives.ratio_weights.'),
    *('objectives.advantages.charged', 'objectives.advantages.optimal_token_baseline'),
    *('objectives.surrogates.by_token', 'objectives.surrogates.weighed'),
  ),
  'steps of the bounds and certificates, which are cases': (
    *(
      f'bounds.paper.{step}'
      for step in (
        *('after', 'before', 'least', 'printed', 'real', 'root', 'smallest', 'spread', 'tv_of_kl'),
      )
    ),
    'certificates.importance.conclude',
  ),
  'learned noise of the trainer, a few operations a layer': ('training.perturbation.',),
  'steps of rollouts, which are cases': (
    *('measurements.distributions.over', 'rollouts.groups.blanked', 'rollouts.streams.each'),
    *('rollouts.scoring.engine_scores', 'rollouts.scoring.row_logp'),
  ),
}


def cases() -> list[Case]:
  """All cases, for the current mesh; a module of this folder each for a part of the package."""
  parts = statistics_cases, theory_cases, policy_cases, mismatch_cases
  return [case for part in parts for case in part.cases()]
