"""Published methods by name, each with the defaults of its authors.

To add one: write its function (a surrogate or weight as in `parts`, a criterion as in `masks`) and
a row of one of the three tables. `--method.name` of the command line reaches every row, and with
`module:NAME` a `Named` of your own.
"""

from trm_jax.objectives.named import Named
from trm_jax.objectives.published_regions import REGIONS
from trm_jax.objectives.published_surrogates import SURROGATES
from trm_jax.objectives.published_weights import WEIGHTS

METHODS: dict[str, Named] = {**SURROGATES, **WEIGHTS, **REGIONS}

# Corrections that are settings of rollouts and go with any method:
# (name, what it does, what it acts on, how it is said, source).
ROLLOUT_SETTINGS = (
  (
    'r3',
    "the engine's experts are replayed by the trainer, gates recomputed",
    'rollout',
    '--replay-routes experts (weights: gates too)',
    'arXiv 2510.11370',
  ),
  (
    'alp',
    'ratios and masks look at the policy with learned noise in the input of every layer',
    'trainer',
    '--perturbation 1e-4 (scales at the start, learned at 5e-4)',
    'arXiv 2603.19470 (what keeps the scales up uncertain)',
  ),
  (
    'support_replay',
    'the policy is conditioned on the tokens that the engine could have drawn',
    'rollout',
    '--replay-support, --store logits',
    'TRL, prime-rl: top-p and top-k',
  ),
)


def methods() -> str:
  """A table of `METHODS` and `ROLLOUT_SETTINGS`: name, formula, what it acts on, default, source.

  >>> trm.methods().splitlines()[0].split()
  ['name', 'formula', 'acts', 'on', 'default', 'source']
  """
  rows = [('name', 'formula', 'acts on', 'default', 'source')]
  rows += [(name, m.formula, m.acts_on, m.default, m.source) for name, m in METHODS.items()]
  rows += ROLLOUT_SETTINGS
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = ['  '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
  return '\n'.join(line.rstrip() for line in lines)
