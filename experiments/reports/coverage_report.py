"""Tables, verdict and figure of `certificate_coverage`, from its summary alone."""

import math
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.reports import figures, report

EXACT = {
  'importance sampling': 'betting on R (W - 1)',
  'retrospective': 'betting on (1 - R)(1/W - 1), rows of the new policy',
  'first order, TV': 'betting, L_M less the TV penalty',
  'first order, L2': 'betting, L_M less the chi2 penalty',
  'first order, TV, 10 % rejected': 'the same, and a limit on the mean KL that a tenth exceed',
  'prefix, L2': 'betting, prefix form',
  'centred': "Catoni's bound under a chi2 budget",
}
ASYMPTOTIC = {
  'importance sampling, CLT': 'central limit theorem on R (W - 1)',
  'plug-in, CLT': 'L_M less the smallest sampled bound, central limit theorem',
  'evaluate both, CLT': 'difference of two means, as many fresh rows again under the new policy',
}
SURROGATE = [name for name in EXACT if name.startswith(('first', 'prefix', 'centred'))]


def worst(summary: dict, name: str) -> tuple[float, str, int]:
  """(lowest coverage, scenario, size) of a certificate."""
  return min(
    (rate[name]['coverage'], scenario, int(size))
    for scenario, it in summary['scenarios'].items()
    for size, rate in it['sizes'].items()
  )


def coverage_table(summary: dict) -> str:
  """The lowest coverage of each certificate, and where."""
  lines = []
  for name, meaning in summary['certificates'].items():
    coverage, scenario, size = worst(summary, name)
    kind = 'finite-sample' if name in EXACT else 'asymptotic'
    lines.append([name, kind, meaning, f'{coverage:.3f}', f'{scenario}, N = {size}'])
  header = ['certificate', 'guarantee', 'how', 'lowest coverage', 'where']
  return report.table(header, lines)


def firing_table(summary: dict) -> str:
  """How often each says 'improved', in percent, over sizes."""
  sizes = summary['options']['sizes']
  lines = []
  for scenario, it in summary['scenarios'].items():
    about = f'{scenario}: gain {it["gain"]:+.2g}, KL {it["seq_kl"]:.1g}, c {it["correlation"]:.2f}'
    cells = [
      ' / '.join(f'{100 * it["sizes"][str(n)][name]["fires"]:.0f}' for n in sizes)
      for name in summary['certificates']
    ]
    lines.append([about, *cells])
  header = [f'fires, %, N = {" / ".join(map(str, sizes))}', *summary['certificates']]
  return report.table(header, lines)


def misuse_table(summary: dict) -> str:
  """False certificates at zero effect."""
  lines = [
    [name, str(size), f'{rate["false, misused"]:.2f}', f'{rate["false, used rightly"]:.2f}']
    for name, sizes in summary['misuse'].items()
    for size, rate in sizes.items()
  ]
  return report.table(['misuse, at zero effect', 'N', 'false, misused', 'false, done right'], lines)


def verdict(summary: dict) -> str:
  """What held and what did not, computed from the rates."""
  alpha, repeats = summary['options']['alpha'], summary['options']['repeats']
  error = math.sqrt(alpha * (1 - alpha) / repeats)
  need = 1 - alpha - 3 * error
  failed = [n for n in summary['certificates'] if worst(summary, n)[0] < need]
  exact = [name for name in failed if name in EXACT]
  lines = [
    f'Finite-sample certificates: {"all hold" if not exact else "BROKEN: " + ", ".join(exact)}'
    f' (coverage >= {need:.3f} = 1 - alpha - 3 standard errors, every scenario and size).'
  ]
  for name in ASYMPTOTIC:
    coverage, scenario, size = worst(summary, name)
    held = 'held here' if name not in failed else 'fails'
    lines.append(f'{name} {held}: lowest coverage {coverage:.3f} ({scenario}, N = {size}).')
  ahead = []
  for scenario, it in summary['scenarios'].items():
    for size, rate in it['sizes'].items():
      base = rate['importance sampling']['fires']
      for name in SURROGATE:
        more = rate[name]['fires'] - base
        if more > 3 * math.sqrt(0.5 / repeats):
          ahead.append(f'{name} ({scenario}, N = {size}: +{100 * more:.0f} %)')
  lines.append(
    'No certificate by way of the surrogate fires more often than importance sampling.'
    if not ahead
    else f'Fires more often than importance sampling: {"; ".join(ahead)}.'
  )
  silent = [
    f'{scenario}, N = {size}'
    for scenario, it in summary['scenarios'].items()
    if it['gain'] > 0
    for size, rate in it['sizes'].items()
    if max(rate[name]['fires'] for name in EXACT) < 0.5
  ]
  if silent:
    lines.append(
      f'No proof in more than half of the batches, though there is a gain: {"; ".join(silent)}.'
    )
  return '\n'.join(f'- {line}' for line in lines)


def draw(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Coverage of the worst scenario, and firing, of the certificates worth telling apart."""
  shown = ['importance sampling', 'retrospective', 'first order, TV', 'centred']
  shown += list(ASYMPTOTIC)
  sizes, names = summary['options']['sizes'], list(summary['scenarios'])
  figure, axes = plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(1, 1.5))
  for colour, name in zip(figures.COLOURS, shown, strict=True):
    lowest = [
      min(it['sizes'][str(n)][name]['coverage'] for it in summary['scenarios'].values())
      for n in sizes
    ]
    dashed = ':' if name in ASYMPTOTIC else '-'
    axes[0].plot(sizes, lowest, dashed, marker='o', markersize=4, color=colour, label=name)
  axes[0].axhline(1 - summary['options']['alpha'], color='black', linewidth=1)
  axes[0].set(
    title='Lowest coverage over all scenarios', xlabel='rows N', xscale='log', ylim=(-0.03, 1.03)
  )
  axes[0].set_xticks(sizes, [str(n) for n in sizes])
  axes[0].minorticks_off()
  axes[0].legend(fontsize=7, loc='lower right', title='dotted: asymptotic', title_fontsize=7)
  size = sizes[len(sizes) // 2]
  height = 0.8 / len(shown)
  for i, (colour, name) in enumerate(zip(figures.COLOURS, shown, strict=True)):
    fires = [summary['scenarios'][s]['sizes'][str(size)][name]['fires'] for s in names]
    axes[1].barh(np.arange(len(names)) + i * height, fires, height, color=colour, label=name)
  labels = [f'{s}\ngain {summary["scenarios"][s]["gain"]:+.2g}' for s in names]
  axes[1].set_yticks(np.arange(len(names)) + 0.4 - height / 2, labels, fontsize=7)
  axes[1].invert_yaxis()
  axes[1].set(title=f"Share of batches that say 'improved', N = {size}", xlim=(0, 1.02))
  losing = [i for i, s in enumerate(names) if summary['scenarios'][s]['gain'] <= 0]
  if losing:
    axes[1].axhspan(min(losing) - 0.1, max(losing) + 0.9, color='#bf616a', alpha=0.12)
    axes[1].text(
      1.0, min(losing) + 0.05, 'no gain: every bar here is a false claim', ha='right', fontsize=7
    )
  for axis in axes:
    axis.grid(alpha=0.2)
  return figures.save(figure, path)
