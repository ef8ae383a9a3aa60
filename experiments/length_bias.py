"""How does acceptance depend on the length of a response when nothing has drifted?

Rows of 128 to 8192 tokens carry engine noise alone. Every rule gets its limit from a noise-floor
batch, for 90 % of the rows: one limit for all lengths, set at 512 tokens, or one for each length.
Beside acceptance stand what the limit proves about the error, the worst single token that slips
through, and what is kept of rows whose every token has drifted.

Claim under test: one limit on the largest KL rejects long responses by their length alone; means
favour long ones instead, and hide one bad token the better the longer they are; limits that follow
the length keep 90 % everywhere, and of these only a chi-square budget on the sum still proves
something at 8192 tokens.
Falsified if: one limit on the maximum keeps its rate, a calibrated rule is off by more than 0.1, or
the budget's bound is no smaller than the maximum's. The verdict says which.
Honest caveat: in three of the four noises the KL of a token is drawn, not computed. The sampled
log-ratio is then -KL +- sqrt(2 KL) and chi2 is 2 KL: right to second order, which is what noise of
1e-6 nats needs; the fourth noise checks it with exact divergences of softmax policies.

    python -m experiments.length_bias                        # 5 seeds, a minute or two
    python -m experiments.length_bias --target 0.7           # another share to accept
"""

import dataclasses
import itertools
import math
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.laboratory import noise_floor
from experiments.reports import figures, report
from trm_jax.bounds import sharp
from trm_jax.runs.progress import Progress
from trm_jax.training import command

# The noise whose prices are shown.
MAIN = noise_floor.NOISES[0]
RESULTS = pathlib.Path(__file__).parent / 'results' / 'length_bias'
# Label, colour and line of each rule.
LOOKS = {
  'max': ('largest KL, one limit', 1, '-'),
  'mean': ('mean KL, one limit', 0, '-'),
  'LN-TRM': ('LN-TRM, one limit', 3, '-'),
  'SER': ('SER: mean |ratio - 1|, one limit', 2, '-.'),
  'budget': ('chi2 budget, one limit', 4, '-'),
  'max, (1-p)^T': ('largest KL, (1-p)^T limit', 1, '--'),
  'max, conformal': ('largest KL, conformal limit', 1, ':'),
  'budget by length': ('chi2 budget by length', 4, '--'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthBias(noise_floor.Setting):
  """Acceptance by length under noise alone, for eight rules and four noises.

  Noises: token KL lognormal; Pareto; lognormal with half of its spread common to a row; exact
  divergences of softmax policies whose logits carry Gaussian noise. Ends with tables, a figure and
  a verdict.
  """

  # Receives summary.json, table.md and figure.png.
  directory: pathlib.Path = pathlib.Path('runs/length_bias')
  # Write into the directory though it holds results.
  resume: bool = False
  # Copy summary, table and figure to experiments/results/length_bias.
  publish: bool = False


def slips_through(shares) -> float | None:
  """The KL up to which a bad token passes in half of the rows: log-linear on the grid BAD.

  `shares` are shares of rows still kept, one for each of `noise_floor.BAD`, whose last value stands
  for all above it; None where no row is kept anyway.
  """
  if np.isnan(shares).any():
    return None
  for (low, above), (high, below) in itertools.pairwise(zip(noise_floor.BAD, shares, strict=True)):
    if above >= 0.5 > below:
      return low * (high / low) ** float((above - 0.5) / (above - below))
  return noise_floor.BAD[-1] if shares[-1] >= 0.5 else noise_floor.BAD[0]


def summarise(args: LengthBias) -> dict:
  """All numbers of the tables and the figure."""
  noises = {}
  bar = Progress(len(noise_floor.NOISES) * args.seeds, 'length bias')
  whole, few = (
    {T: noise_floor.program(args, rows, T) for T in args.lengths}
    for rows in (args.rows, min(args.rows, noise_floor.FEW))
  )
  for count, noise in enumerate(noise_floor.NOISES):
    runs = []
    for seed in range(args.seeds):
      runs.append(noise_floor.measure(noise, args, seed, whole, few))
      bar.update(count * args.seeds + seed + 1, noise=noise)
    rules = {}
    for name in noise_floor.RULES:
      seen = [run['rules'][name] for run in runs]
      rules[name] = {
        key: [report.mean_error(x) for x in zip(*(s[key] for s in seen), strict=True)]
        for key in seen[0]
        if key != 'bad'
      }
      if 'bad' in seen[0]:
        shares = np.mean([s['bad'] for s in seen], 0)
        rules[name]['slips_through'] = [slips_through(x) for x in shares.T]
    check = {k: report.mean_error([run['check'][k] for run in runs]) for k in runs[0]['check']}
    noises[noise] = dict(rules=rules, check=check)
  bar.close()
  options = {k: v for k, v in vars(args).items() if k not in ('directory', 'resume', 'publish')}
  return {
    'command': 'python -m experiments.length_bias --publish',
    'options': options | dict(lengths=list(args.lengths)),
    'drift': noise_floor.DRIFT,
    'noises': noises,
  }


# Tables, verdict, figure.


def shown(x: float | None) -> str:
  """Two digits; what is not there as a dash."""
  return '-' if x is None else f'{x:.2g}' if x < 99.5 else f'{x:.0f}'


def shown_token(x: float | None) -> str:
  """The same for `slips_through`, whose last value stands for all above it."""
  return f'> {noise_floor.BAD[-1]:g}' if x == noise_floor.BAD[-1] else shown(x)


def table_of_acceptance(summary: dict) -> str:
  """Share kept at each length, with standard errors over seeds."""
  rows = [
    [noise, name, *(report.shown(x) for x in rule['kept'])]
    for noise, found in summary['noises'].items()
    for name, rule in found['rules'].items()
  ]
  kept = [f'kept at T = {T}' for T in summary['options']['lengths']]
  return report.table(['noise', 'rule', *kept], rows)


def table_of_prices(summary: dict) -> str:
  """At each length: what the limit proves, what slips through, what is kept of drifted rows."""
  joined = lambda values: ' / '.join(shown(x['mean']) for x in values)
  rows = []
  for name, rule in summary['noises'][MAIN]['rules'].items():
    tokens = ' / '.join(shown_token(x) for x in rule['slips_through'])
    proves = joined(rule['proves']) if 'proves' in rule else 'nothing'
    rows.append([name, joined(rule['limit']), proves, tokens, joined(rule['drift'])])
  at = ' / '.join(f'{T}' for T in summary['options']['lengths'])
  header = [
    f'{MAIN} noise, T = {at}',
    'limit',
    'error at most',
    'one bad token passes up to, nats',
  ]
  return report.table([*header, f'kept where every KL is times {summary["drift"]:g}'], rows)


def verdict(summary: dict) -> str:
  """What the numbers say."""
  options, noises, times = summary['options'], summary['noises'], f'{summary["drift"]:g} times'
  target, first, last = options['target'], options['lengths'][0], options['lengths'][-1]
  main, independent, budget = (
    noises[MAIN]['rules'],
    noise_floor.CALIBRATED[0],
    noise_floor.CALIBRATED[2],
  )
  end = lambda name, key: main[name][key][-1]['mean']
  kept = lambda name, noise: [x['mean'] for x in noises[noise]['rules'][name]['kept']]
  ends = lambda name, n=MAIN: f'{kept(name, n)[0]:.2f} to {kept(name, n)[-1]:.2f}'
  off = {
    name: max(abs(x - target) for n in noises for x in kept(name, n)) for name in noise_floor.RULES
  }
  limits = {n: [x['mean'] for x in noises[n]['rules'][independent]['limit']] for n in noises}
  slips = {n: (rule['slips_through'][0], rule['slips_through'][-1]) for n, rule in main.items()}
  hidden = [name for name, (x, y) in slips.items() if x and y and y > 2 * x]
  blind = [name for name in main if end(name, 'drift') > end(name, 'kept') / 2]
  of_mean = float(sharp.budget_l2(2 * last * end('mean', 'limit')))
  check = list(noises['softmax']['check'].items())
  biased = all(kept('max', n)[-1] < target - 0.1 for n in noises)
  even = max(off[x] for x in noise_floor.CALIBRATED) <= 0.1
  claims = {
    'one limit on the maximum loses more than 0.1': biased,
    'limits that follow the length stay within 0.1': even,
    'the budget proves more': end(budget, 'proves') < end(independent, 'proves'),
  }
  delta = noise_floor.WEIGHTS['delta']
  listed = lambda parts: ', '.join(parts) or 'none'
  lines = [
    'Claim: ' + '; '.join(f'{x}: {"yes" if found else "NO"}' for x, found in claims.items()),
    f'Noise alone, one limit set for {target:g} at T = {options["anchor"]}: from T = {first} to'
    f' {last} the largest KL keeps ' + listed(f'{ends("max", n)} ({n})' for n in noises),
    f'A chi-square budget that does not grow keeps {ends("budget")}',
    f'Means lean the other way: mean KL {ends("mean")}, LN-TRM {ends("LN-TRM")}, SER'
    f' {ends("SER")}; where a row shares its noise, mean KL {ends("mean", "row-correlated")}',
    f'Farthest from {target:g} at any length in any noise: '
    + listed(f'{name} {off[name]:.2f}' for name in sorted(off, key=off.get)),
    f'The price of an even maximum is a limit that grows from T = {first} to {last}: '
    + listed(f'{x[-1] / x[0]:.2g} times ({n})' for n, x in limits.items()),
    f'At T = {last} and the same rate, |Error| is at most {shown(end(independent, "proves"))} by'
    f' the limit on the maximum and {shown(end(budget, "proves"))} by the budget; rewards span 1',
    f'SER proves {shown(end("SER", "proves"))} and LN-TRM {shown(end("LN-TRM", "proves"))}, the'
    f' latter if no context exceeds {delta:g} nats (noise alone reaches'
    f' {shown(limits[MAIN][-1])})',
    'The mean of KL proves nothing; one limit on the mean of chi2 would be a budget of T times it:'
    f' {shown(of_mean)}',
    f'One bad token passes in half of the rows up to (nats, T = {first} and {last}): '
    + listed(f'{n} {shown_token(x)} and {shown_token(y)}' for n, (x, y) in slips.items()),
    f'It hides better in long rows from: {listed(hidden)}',
    f'Where every KL is {times} as large, more than half of what is kept without drift is kept at'
    f' T = {last} by: {listed(blind)}',
    'Exact softmax statistics against the drawn noises, 1 is agreement: '
    + listed(f'{k} {x["mean"]:.3f}' for k, x in check[:2])
    + f'; their largest KL is {check[2][1]["mean"]:.2g} medians',
  ]
  return '\n'.join(f'- {line}.' for line in lines)


def draw_figure(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Acceptance by length for each noise; then what each rule proves and lets through."""
  options, rules = summary['options'], summary['noises'][MAIN]['rules']
  lengths, target = options['lengths'], options['target']
  figure, axes = plt.subplots(2, 4, figsize=(15, 7.6))

  def line(axis, values, name, errors=None):
    label, colour, kind = LOOKS[name]
    style = dict(color=figures.COLOURS[colour], linestyle=kind, label=label)
    axis.errorbar(lengths, values, errors, marker='o', markersize=3, **style)

  for axis, (noise, found) in zip(axes[0], summary['noises'].items(), strict=True):
    for name, rule in found['rules'].items():
      line(
        axis,
        [x['mean'] for x in rule['kept']],
        name,
        np.nan_to_num([x['se'] or 0 for x in rule['kept']]),
      )
    axis.axhline(target, color='black', linewidth=0.8)
    axis.set(title=f'No drift, {noise} noise', ylim=(-0.03, 1.03))
  for name, rule in rules.items():
    # What hardly keeps a row proves little of use.
    usable = [x['mean'] > target / 2 for x in rule['kept']]
    only = lambda values, usable=usable: np.where(usable, np.array(values, float), math.nan)
    if 'proves' in rule:
      line(axes[1, 0], only([x['mean'] for x in rule['proves']]), name)
    line(axes[1, 1], only(rule['slips_through']), name)
    line(axes[1, 2], only([x['mean'] for x in rule['drift']]), name)
  axes[0, 0].set_ylabel(f'share of rows kept; aim: {target:g}')
  axes[1, 0].axhline(1, color='black', linestyle=':', linewidth=1)
  axes[1, 0].text(lengths[-1], 0.85, 'range of the reward', fontsize=7, ha='right', va='top')
  axes[1, 0].set(title='What the limit proves', ylabel='|Error| at most; aim: low', yscale='log')
  axes[1, 1].set(title='One bad token in a row passes', yscale='log')
  axes[1, 1].set_ylabel('up to a KL of, nats (the top: any); aim: low')
  axes[1, 2].set(title=f'Drift: every KL times {summary["drift"]:g}', ylim=(-0.03, 1.03))
  axes[1, 2].set_ylabel('share of rows kept; aim: low')
  for axis in (*axes[0], *axes[1, :3]):
    axis.set(xlabel='response length T, tokens', xscale='log')
    axis.set_xticks(lengths, [f'{T}' for T in lengths])
    axis.minorticks_off()
    axis.grid(alpha=0.2)
  axes[1, 3].axis('off')
  axes[1, 3].legend(
    *axes[0, 0].get_legend_handles_labels(), loc='upper left', fontsize=9, frameon=False
  )
  note = f'One limit: set at T = {options["anchor"]}.\nLower row: {MAIN} noise; rules'
  note += f'\nthat keep more than {target / 2:g} without drift.'
  axes[1, 3].text(0.03, 0.12, note, fontsize=9, transform=axes[1, 3].transAxes)
  return figures.save(figure, path)


def main(args: LengthBias) -> None:
  """Measures, prints, draws."""
  command.check_directory(args)
  summary = summarise(args)
  parts = (table_of_acceptance, table_of_prices, verdict)
  to = RESULTS if args.publish else None
  report.write(args.directory, summary, [f(summary) for f in parts], draw_figure, publish_to=to)


if __name__ == '__main__':
  command.run(LengthBias, main)
