"""Figures: drawn from recorded numbers alone, never from a live run."""

import pathlib

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

COLOURS = ['#4c566a', '#bf616a', '#d08770', '#b48ead', '#2e7d32', '#5e81ac', '#8f8f8f']


def save(figure, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure whole or not at all, and closes it."""
  figure.tight_layout()
  partial = path.with_suffix('.partial.png')
  figure.savefig(partial, dpi=130)
  plt.close(figure)
  partial.replace(path)
  return path


def band(axis, curve, colour, label=None, floor=None):
  """A curve of means over seeds with a band of one standard error."""
  mean = curve['mean']
  axis.plot(curve['step'], mean, color=colour, label=label, linewidth=1.6)
  if all(e is not None and e == e for e in curve['se']):
    low = [m - e for m, e in zip(mean, curve['se'], strict=True)]
    high = [m + e for m, e in zip(mean, curve['se'], strict=True)]
    if floor is not None:
      low = [max(x, floor) for x in low]
    axis.fill_between(curve['step'], low, high, color=colour, alpha=0.15, linewidth=0)


def run(metrics: list[dict[str, float]], path: pathlib.Path, *, title: str) -> pathlib.Path:
  """One run: accuracy, divergence of the rollouts (or bounds of it), acceptance."""
  figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))

  def line(axis, name, label, **style):
    points = [(r['step'], r[name]) for r in metrics if name in r and r[name] == r[name]]
    if points:
      axis.plot(*zip(*points, strict=True), label=label, linewidth=1.4, **style)

  line(axes[0], 'accuracy/sampled', 'sampled')
  line(axes[0], 'accuracy/greedy', 'greedy')
  line(axes[0], 'reward', 'training reward')
  axes[0].set(title='Accuracy without mismatch', xlabel='RL step', ylim=(0, 1))
  for colour, name in zip(COLOURS[1:], ('median', 'mean', 'p90', 'max'), strict=False):
    line(axes[1], f'kl/{name}', name, color=colour)
    line(axes[1], f'kl/upper/{name}', f'{name}, at most', color=colour)
    line(axes[1], f'kl/lower/{name}', f'{name}, at least', color=colour, linestyle='--')
  if not axes[1].lines:
    where = dict(ha='center', va='center', transform=axes[1].transAxes, fontsize=8)
    axes[1].text(0.5, 0.5, 'unknown: only sampled log-probs were kept (--store logp)', **where)
  axes[1].set(title='Token KL(rollout || policy), nats', xlabel='RL step')
  axes[1].set_yscale('symlog', linthresh=1e-6)
  line(axes[2], 'acceptance', 'all')
  line(axes[2], 'acceptance/lower', 'judged by the lower bound', linestyle=':')
  line(axes[2], 'acceptance/upper', 'judged by the upper bound', linestyle=':')
  for i in range(1, 5):
    line(axes[2], f'acceptance/length_q{i}', f'length quartile {i}')
  axes[2].set(title='Share of sequences kept', xlabel='RL step', ylim=(-0.02, 1.02))
  for axis in axes:
    if axis.lines:
      axis.legend(fontsize=7)
    axis.grid(alpha=0.2)
  figure.suptitle(title, fontsize=9)
  return save(figure, path)


def stuck_replica(summary: dict, path: pathlib.Path) -> pathlib.Path:
  """Accuracy of each arm, what the broken engine's rows look like, what TRM keeps."""
  figure, axes = plt.subplots(1, 3, figsize=(13, 3.9))
  for colour, (name, arm) in zip(COLOURS, summary['arms'].items(), strict=False):
    band(axes[0], arm['curves']['accuracy/sampled'], colour, name)
    if arm['curves']['kl/engine1']['step'] and arm['strength'] > 0:
      band(axes[1], arm['curves']['kl/engine1'], colour, name, floor=1e-4)
  axes[0].set(
    title='Accuracy of the trained policy',
    xlabel='RL step',
    ylabel='sampled, held-out',
    ylim=(0, 1),
  )
  axes[0].legend(fontsize=7, ncol=2, loc='upper left')
  axes[1].set(
    title='KL(rollout || policy) of the stuck replica', xlabel='RL step', ylabel='nats a token'
  )
  if any(y > 0 for line in axes[1].lines for y in line.get_ydata()):
    axes[1].set_yscale('log')
  axes[1].legend(fontsize=7)
  lengths = summary['trm_acceptance_by_length']
  axes[2].bar(
    range(1, 5),
    [x['mean'] for x in lengths],
    yerr=[x['se'] or 0 for x in lengths],
    color=COLOURS[4],
    width=0.6,
  )
  share = summary['clean_share']
  axes[2].axhline(share, color='black', linestyle='--', linewidth=1, label=f'healthy share {share}')
  axes[2].set(
    title='TRM-max: share kept, last third',
    xlabel='quartile of response length',
    xticks=range(1, 5),
    ylim=(0, 1),
  )
  axes[2].legend(fontsize=7)
  for axis in axes:
    axis.grid(alpha=0.2)
  return save(figure, path)
