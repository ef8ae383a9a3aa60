"""How often is each improvement certificate wrong, and how often does it say anything?

Pairs of policies small enough to enumerate, so that J(policy) - J(rollout) is known exactly. From
batches of their rollouts every certificate is computed and compared with the truth.

Claim under test: the finite-sample certificates hold with probability 1 - alpha in every scenario,
rare disasters included; the asymptotic ones do not; importance sampling fires wherever a
finite-sample certificate by way of the surrogate does.
Falsified if: a finite-sample coverage falls below 1 - alpha by more than three standard errors, or
such a surrogate certificate fires more often than importance sampling by more than that.
Honest caveat: limits, budgets and bands are read off the exact policies, so that nothing is
rejected: the kindest choice for the certificates that need them.

    python -m experiments.certificate_coverage                   # about eight minutes on two cores
    python -m experiments.certificate_coverage --repeats 100     # a first look
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.laboratory import known_pairs
from experiments.reports import coverage_report, report
from trm_jax import certificates, masks
from trm_jax.certificates import confidence, patching, surrogate
from trm_jax.runs import recording
from trm_jax.training import command
from trm_jax.types import Divergences, InputError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'certificate_coverage'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertificateCoverage:
  """Coverage and firing rate of every certificate; a table and a figure."""

  # Receives summary.json, table.md and figure.png.
  directory: pathlib.Path = pathlib.Path('runs/certificate_coverage')
  # Write into the directory though it holds results.
  resume: bool = False
  # Batches drawn per scenario and size.
  repeats: int = 1000
  # Rows of a batch.
  sizes: tuple[int, ...] = (256, 1024, 8192)
  # Chance of a wrong certificate that is allowed.
  alpha: float = 0.05
  # Only the scenarios whose name holds one of these; all by default.
  only: tuple[str, ...] = ()
  # Seeds the policies and the batches.
  seed: int = 0
  # Copy summary, table and figure to experiments/results/certificate_coverage.
  publish: bool = False

  def __post_init__(self):
    confidence.check_alpha(self.alpha)
    if self.repeats < 10:
      raise InputError(
        f'repeats={self.repeats} must be at least 10: a rate is estimated from them.'
      )
    if not self.sizes or min(self.sizes) < 32 or any(n % 16 for n in self.sizes):
      raise InputError(f'sizes={self.sizes} must be multiples of 16, at least 32.')


def limits_of(it: known_pairs.Scenario) -> tuple[patching.Limits, float]:
  """(limits that reject nothing, a limit on the mean KL that rejects a tenth), exactly."""
  seen = it.mass > 0
  rows = {k: v[seen] for k, v in it.rows.items()}
  slack = 1 + 1e-4  # float32 rows
  before = np.cumsum(rows['log_ratio'], -1) - rows['log_ratio']
  limits = patching.Limits(
    max_kl=float(rows['kl'].max() * slack),
    max_tv=min(1.0, float(rows['tv'].max() * slack)),
    max_chi2=float(rows['chi2'].max() * slack),
    budget=float(rows['chi2'].sum(-1).max() * slack),
    band=float(np.abs(np.expm1(before)).max() * slack + 1e-6),
  )
  mean = rows['kl'].sum(-1) / rows['valid'].sum(-1)
  order = np.argsort(mean)
  return limits, float(mean[order][np.searchsorted(np.cumsum(it.mass[seen][order]), 0.9)])


def judges(it: known_pairs.Scenario, alpha: float) -> dict[str, Callable]:
  """Name -> function of (rows of the rollout, as many of the policy) -> lower bound."""
  limits, mean_limit = limits_of(it)
  criterion = masks.mean_kl(limit=mean_limit)

  def region(rows):
    keys = ('log_ratio', 'valid', 'kl', 'tv', 'chi2')
    return patching.patch(**{k: rows[k] for k in keys}, limits=limits), rows['reward']

  def by_surrogate(make, penalty):
    def judge(old, _):
      patched, reward = region(old)
      return make(patched, reward, penalty, samples=1, alpha=alpha).lower

    return judge

  def rejecting(old, _):
    patched, reward = region(old)
    seen = Divergences(old['kl'], old['tv'], old['log_ratio'], 0 * old['kl'])
    keep = criterion(seen, old['valid'])
    made = surrogate.first_order(
      patched, reward, patching.tv_penalty, samples=1, alpha=alpha, keep=keep
    )
    return made.lower

  def weighted(rows):
    return rows['reward'] * jnp.expm1(certificates.log_weight(rows['log_ratio'], rows['valid']))

  def centred(old, _):
    if limits.budget > 10:  # refused: e^budget is the variance to allow for
      return jnp.float32(-jnp.inf)
    patched, reward = region(old)
    # The patched weight has mean 1, and the budget bounds its variance; alpha is shared.
    known = dict(alpha=alpha / 2, variance=0.25 * math.expm1(limits.budget))
    mean = confidence.catoni((reward - 0.5) * (patched.weight - 1), **known)
    return mean - surrogate.leaving(patched, samples=1, alpha=alpha / 2)

  def plug_in(old, _):
    patched, reward = region(old)
    x = jnp.where(patched.kept, reward * patched.first, -reward)
    least = surrogate.error_bounds(patched, reward, samples=1).values()
    return confidence.normal(x, alpha=alpha) - functools.reduce(jnp.minimum, least)

  def evaluate_both(old, new):
    both = old['reward'], new['reward']
    error = jnp.sqrt(sum(r.var(ddof=1) / r.size for r in both))
    return both[1].mean() - both[0].mean() - error * jax.scipy.stats.norm.ppf(1 - alpha)

  def backwards(_, new):
    return certificates.retrospective(
      -new['log_ratio'], new['valid'], new['reward'], samples=1, alpha=alpha
    ).lower

  return {
    'importance sampling': lambda old, _: (
      certificates.improvement(
        old['log_ratio'], old['valid'], old['reward'], samples=1, alpha=alpha
      ).lower
    ),
    'retrospective': backwards,
    'first order, TV': by_surrogate(surrogate.first_order, patching.tv_penalty),
    'first order, L2': by_surrogate(surrogate.first_order, patching.l2_penalty),
    'first order, TV, 10 % rejected': rejecting,
    'prefix, L2': by_surrogate(surrogate.prefix, patching.l2_penalty),
    'centred': centred,
    'importance sampling, CLT': lambda old, _: confidence.normal(weighted(old), alpha=alpha),
    'plug-in, CLT': plug_in,
    'evaluate both, CLT': evaluate_both,
  }


def lower_bounds(it: known_pairs.Scenario, *, size: int, repeats: int, alpha: float, key) -> dict:
  """Name -> lower bounds of `repeats` batches."""
  to = lambda v: jnp.asarray(v, jnp.float32 if v.dtype == np.float64 else v.dtype)
  rows, found = jax.tree.map(to, it.rows), judges(it, alpha)
  ends = [to(np.cumsum(m) / m.sum()) for m in (it.mass, it.new_mass)]

  @jax.jit
  def all_of(keys):
    def one(key):
      drawn = []
      for end, k in zip(ends, jax.random.split(key), strict=True):
        at = jnp.searchsorted(end, jax.random.uniform(k, (size,)), side='right')
        at = jnp.minimum(at, end.size - 1)
        drawn.append({name: values[at] for name, values in rows.items()})
      return {name: judge(*drawn) for name, judge in found.items()}

    return jax.lax.map(one, keys, batch_size=16)

  return {k: np.asarray(v) for k, v in all_of(jax.random.split(key, repeats)).items()}


def rates(lower: np.ndarray, gain: float) -> dict[str, float]:
  """Coverage of the truth, rate of firing, rate of false certificates, mean bound."""
  fired = lower > 0
  return dict(
    # Rows and bounds are float32.
    coverage=float((lower <= gain + 1e-6).mean()),
    fires=float(fired.mean()),
    false=float(fired.mean()) if gain <= 0 else 0.0,
    mean_lower=float(lower.mean()),
  )


def misuse(*, repeats: int, alpha: float, seed: int) -> dict[str, dict]:
  """Two ways to void a certificate, with a truth of no effect at all."""
  rng = np.random.default_rng(seed)
  certify = jax.jit(
    lambda log_ratio, reward, samples: (
      certificates.improvement(
        log_ratio[:, None],
        jnp.ones((log_ratio.size, 1), bool),
        reward,
        samples=samples,
        alpha=alpha,
      ).lower
      > 0
    ),
    static_argnums=2,
  )
  to = lambda x: jnp.asarray(x, jnp.float32)
  found = {'fitted on the same rows': {}, 'groups of 16 taken for 16 prompts': {}}
  for size in (1024, 8192):
    counts = {name: np.zeros(2) for name in found}
    for _ in range(repeats):
      # A bandit with 64 actions whose rewards are coin flips: nothing can be improved.
      tokens, rewards = rng.integers(0, 64, (2, size)), rng.integers(0, 2, (2, size))
      lift = np.bincount(tokens[0], rewards[0] - 0.5, 64) * 64 / size
      log_ratio = lift - np.log(np.exp(lift).mean())
      pair = [certify(to(log_ratio[tokens[i]]), to(rewards[i]), 1) for i in (0, 1)]
      counts['fitted on the same rows'] += np.array(pair, bool)
      # Prompts that gain or lose .1 alike: the mean over prompts is 0, one prompt's is not.
      effect = np.repeat(rng.choice([-1, 1], size // 16), 16)
      right = rng.random(size) < 0.5
      ratio = np.where(right, 1 + 0.2 * effect, 1 - 0.2 * effect)
      pair = [certify(to(np.log(ratio)), to(right), n) for n in (1, 16)]
      counts['groups of 16 taken for 16 prompts'] += np.array(pair, bool)
    for name, (wrong, right) in counts.items():
      found[name][str(size)] = {
        'false, misused': wrong / repeats,
        'false, used rightly': right / repeats,
      }
  return found


def summarise(args: CertificateCoverage) -> dict:
  """All rates, per scenario, size and certificate."""
  made = known_pairs.scenarios(args.seed)
  made = [it for it in made if not args.only or any(part in it.name for part in args.only)]
  if not made:
    known = ', '.join(it.name for it in known_pairs.scenarios(args.seed))
    raise InputError(f'only={args.only} is part of no name of a scenario: {known}.')
  progress = recording.Progress(len(made) * len(args.sizes), 'scenarios x sizes')
  found, key, done = {}, jax.random.key(args.seed), 0
  for number, it in enumerate(made):
    sizes = {}
    for size in args.sizes:
      lower = lower_bounds(
        it,
        size=size,
        repeats=args.repeats,
        alpha=args.alpha,
        key=jax.random.fold_in(jax.random.fold_in(key, number), size),
      )
      sizes[str(size)] = {name: rates(bound, it.gain) for name, bound in lower.items()}
      done += 1
      progress.update(done)
    found[it.name] = dict(gain=it.gain, seq_kl=it.seq_kl, correlation=it.correlation, sizes=sizes)
  progress.close()
  return dict(
    options=dict(repeats=args.repeats, alpha=args.alpha, seed=args.seed, sizes=list(args.sizes)),
    certificates=coverage_report.EXACT | coverage_report.ASYMPTOTIC,
    scenarios=found,
    misuse=misuse(repeats=max(args.repeats // 5, 10), alpha=args.alpha, seed=args.seed),
  )


def main(args: CertificateCoverage) -> None:
  """Draws batches, computes, prints, draws."""
  command.check_directory(args)
  summary = summarise(args)
  shown = coverage_report
  parts = (shown.coverage_table, shown.firing_table, shown.misuse_table, shown.verdict)
  to = RESULTS if args.publish else None
  report.write(args.directory, summary, [f(summary) for f in parts], shown.draw, publish_to=to)


if __name__ == '__main__':
  command.run(CertificateCoverage, main)
