"""The names of `trm_jax` for type checkers; nothing imports this when a program runs."""

from trm_jax import (
  bounds as bounds,
  certificates as certificates,
  checkpoints as checkpoints,
  divergences as divergences,
  exact as exact,
  extremes as extremes,
  masks as masks,
  measurements as measurements,
  mesh as mesh,
  mismatch as mismatch,
  objectives as objectives,
  planning as planning,
  policy as policy,
  rollouts as rollouts,
  runs as runs,
  tasks as tasks,
  training as training,
  types as types,
)
from trm_jax.bounds import (
  adaptive as adaptive,
  b_star as b_star,
  classical_kl as classical_kl,
  classical_tv as classical_tv,
  coupling as coupling,
  mixed_kl as mixed_kl,
  mixed_tv as mixed_tv,
  pinsker_marginal_kl as pinsker_marginal_kl,
  pinsker_marginal_tv as pinsker_marginal_tv,
)
from trm_jax.bounds.sharp import (
  b_star_tight as b_star_tight,
)
from trm_jax.certificates import (
  harm as harm,
  improvement as improvement,
  monitor as monitor,
)
from trm_jax.certificates.confidence import (
  betting as betting,
)
from trm_jax.certificates.patching import (
  Limits as Limits,
  l2_penalty as l2_penalty,
  patch as patch,
  tv_penalty as tv_penalty,
)
from trm_jax.certificates.surrogate import (
  first_order as first_order,
)
from trm_jax.divergences import (
  entropy as entropy,
  jensen_shannon as jensen_shannon,
  k1 as k1,
  k2 as k2,
  k3 as k3,
  kl as kl,
  logp as logp,
  ratio as ratio,
  renyi as renyi,
  statistics as statistics,
  total_variation as total_variation,
)
from trm_jax.divergences.brackets import (
  top_k as top_k,
)
from trm_jax.divergences.ratios import (
  effective_sample_size as effective_sample_size,
)
from trm_jax.exact.enumeration import (
  World as World,
  float64 as float64,
  world as world,
)
from trm_jax.exact.oracle import (
  error as error,
  policy_objective as policy_objective,
  surrogate as surrogate,
)
from trm_jax.masks import (
  Criterion as Criterion,
  all_of as all_of,
  chi2_budget as chi2_budget,
  combined as combined,
  length_neutral as length_neutral,
  max_k2 as max_k2,
  max_kl as max_kl,
  max_tv as max_tv,
  mean_deviation as mean_deviation,
  mean_k3 as mean_k3,
  mean_kl as mean_kl,
  permuted as permuted,
  prefix as prefix,
)
from trm_jax.masks.calibration import (
  conformal as conformal,
  max_limit as max_limit,
)
from trm_jax.objectives import (
  Method as Method,
  methods as methods,
)
from trm_jax.objectives.advantages import (
  centred as centred,
  group_relative as group_relative,
  leave_one_out as leave_one_out,
)
from trm_jax.objectives.surrogates import (
  aggregate as aggregate,
  decoupled as decoupled,
  ppo_clip as ppo_clip,
  ratio_pg as ratio_pg,
)
from trm_jax.objectives.weights import (
  resolve_missing as resolve_missing,
  truncated as truncated,
)
from trm_jax.training import (
  Config as Config,
  MethodWords as MethodWords,
  build as build,
)
from trm_jax.types import (
  Bracket as Bracket,
  Divergences as Divergences,
  InputError as InputError,
  Mean as Mean,
  Rollout as Rollout,
  Statistics as Statistics,
  TopK as TopK,
  part as part,
)

# Renamed; a checker would take `bounds as brackets` for a private name.
from trm_jax.bounds import sharp as _sharp
from trm_jax.divergences import brackets as _brackets, linear_head as _linear_head

brackets = _brackets.bounds
hidden_brackets = _linear_head.brackets
hidden_logp = _linear_head.logp
hidden_statistics = _linear_head.statistics
tabulate_bounds = _sharp.tabulate
