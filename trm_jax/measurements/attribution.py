"""Which source of mismatch does the harm: effects, interactions and Shapley shares of a factorial.

    design = attribution.full(3)                  # cells x sources, True = on
    shares, errors = attribution.bootstrap(design, responses)   # responses [cells, repeats, *k]

A response v(S) is whatever was measured with the sources S on: KL, acceptance, a gradient's bias.

| quantity    | of source i (of i and j)                                                       |
| ----------- | ------------------------------------------------------------------------------ |
| `alone`     | v({i}) - v({}): what switching on source i alone does                          |
| `last`      | v(all) - v(all but i): what curing source i alone would bring                  |
| `main`      | mean of v with i on - mean of v with i off, over all cells                     |
| `pairs`     | half of (effect of i with j on - effect of i with j off)                       |
| `shapley`   | mean over all orders of switching on of what i adds; sums to v(all) - v({})    |
| `share`     | shapley / total; NaN where the total is 0                                      |
| `mixed`     | share of the variance over cells that main effects do not explain, in [0, 1]   |
| `synergy`   | v(all) - v({}) - sum of `alone`: what the sources do only together             |

Additive responses: `alone` = `last` = `main` = `shapley`, interactions 0. Every quantity but
`share` and `mixed` is linear in the responses. KL is not additive (only for independent small
disturbances, to second order), so read `mixed` before the shares. NumPy, float64; nothing here
knows what a source is. Shapley: Shapley 1953; effects: Box, Hunter and Hunter, chapters 5 and 6.
"""

import math
import typing

import numpy as np
from jaxtyping import Bool, Float

from trm_jax.types import InputError

# 2^n cells of a completed factorial in memory.
MOST = 16


class Attribution(typing.NamedTuple):
  """Effects on each of the statistics *k; in the unit of the responses, shares without one."""

  total: Float[np.ndarray, '*k']
  alone: Float[np.ndarray, 'n *k']
  last: Float[np.ndarray, 'n *k']
  main: Float[np.ndarray, 'n *k']
  pairs: Float[np.ndarray, 'n n *k']
  shapley: Float[np.ndarray, 'n *k']
  share: Float[np.ndarray, 'n *k']
  mixed: Float[np.ndarray, '*k']
  synergy: Float[np.ndarray, '*k']


def full(sources: int) -> Bool[np.ndarray, 'c n']:
  """All 2^n cells; source i is on in cell c iff bit i of c is set. InputError outside 1..16."""
  if not 1 <= sources <= MOST:
    raise InputError(f'sources={sources} must lie in 1..{MOST}: a factorial has 2^sources cells.')
  return (np.arange(2**sources)[:, None] >> np.arange(sources)) & 1 > 0


def half(sources: int) -> Bool[np.ndarray, 'c n']:
  """The 2^(n-1) cells with an even number of sources on: balanced for each and every pair.

  Enough for main effects and pairs if no three sources interact, from 5 sources on (resolution V;
  with fewer, pairs are aliased with each other or with main effects). Raises InputError.
  """
  if sources < 5:
    raise InputError(
      f'sources={sources} are too few for a half fraction, in which pairs of fewer than 5 cannot be'
      ' told apart: run the full factorial.'
    )
  cells = full(sources)
  return cells[cells.sum(-1) % 2 == 0]


def complete(
  design: Bool[np.ndarray, 'c n'], responses: Float[np.ndarray, 'b *k']
) -> Float[np.ndarray, 'a *k']:
  """Responses of all 2^n cells in the order of `full`, from a full factorial or a fraction.

  A full factorial is only put in order. From a fraction the cells that are missing follow by least
  squares from main effects and pairs: right if no three sources interact. Raises InputError for
  cells given twice, values that are not finite and fractions that do not determine the model.
  """
  cells, sources = design.shape
  every = full(sources)
  if responses.shape[0] != cells:
    raise InputError(
      f'responses has {responses.shape[0]} cells but design {cells}: give one for each.'
    )
  if not np.isfinite(responses).all():
    bad = np.flatnonzero(~np.isfinite(responses.reshape(cells, -1)).all(-1)).tolist()
    raise InputError(
      f'responses of cells {bad[:8]} are not finite: leave those statistics out, effects of inf or'
      ' NaN mean nothing.'
    )
  number = design @ (1 << np.arange(sources))
  if len(set(number.tolist())) < cells:
    raise InputError('design holds a cell twice: average its responses and keep one of them.')
  if cells == len(every):
    return responses[np.argsort(number)].astype(np.float64)
  terms = lambda on: np.stack(
    [np.ones(len(on))]
    + [on[:, i] * 1.0 for i in range(sources)]
    + [on[:, i] * 1.0 * on[:, j] for i in range(sources) for j in range(i)],
    -1,
  )
  known = terms(design)
  if np.linalg.matrix_rank(known) < known.shape[1]:
    raise InputError(
      f'design of {cells} cells does not determine the main effects and pairs of {sources} sources:'
      ' run `full` or `half`.'
    )
  to_every = terms(every) @ np.linalg.pinv(known)
  flat = to_every @ responses.reshape(cells, -1)
  return flat.reshape(len(every), *responses.shape[1:])


def attribute(design: Bool[np.ndarray, 'c n'], responses: Float[np.ndarray, 'b *k']) -> Attribution:
  """All effects on statistics *k measured in each cell. Raises InputError as `complete`."""
  sources = design.shape[1]
  values, on = complete(design, responses), full(sources)
  rest = values.shape[1:]
  flat = values.reshape(len(on), -1)
  signs = np.where(on, 1.0, -1.0)
  bits = 1 << np.arange(sources)
  linear = lambda weights: (weights @ flat).reshape(*weights.shape[:-1], *rest)
  main = linear(signs.T * 2 / len(on))
  pairs = linear(np.einsum('ci,cj->ijc', signs, signs) * 2 / len(on))
  pairs[np.arange(sources), np.arange(sources)] = 0
  # Of the orders of n sources, |S|! (n - |S| - 1)! put exactly S before i.
  size = on.sum(-1)
  before = np.array(
    [math.factorial(s) * math.factorial(sources - 1 - s) for s in range(sources)]
  ) / math.factorial(sources)
  weight = np.zeros((sources, len(on)))
  for i, bit in enumerate(bits):
    without = np.flatnonzero(~on[:, i])
    weight[i, without] -= before[size[without]]
    weight[i, without + bit] += before[size[without]]
  alone, shapley = values[bits] - values[:1], linear(weight)
  total = values[-1] - values[0]
  about = flat - flat.mean(0)
  spread = (about**2).sum(0)
  explained = ((signs.T @ flat) ** 2).sum(0) / len(on)
  # Rounding of equal responses is no variance.
  any_spread = spread > len(on) * (1e-14 * np.abs(flat).max(0)) ** 2
  mixed = np.where(any_spread, 1 - explained / np.where(any_spread, spread, 1), 0)
  return Attribution(
    total=total,
    alone=alone,
    last=values[-1:] - values[len(on) - 1 - bits],
    main=main,
    pairs=pairs,
    shapley=shapley,
    share=shapley / np.where(total == 0, np.nan, total),
    mixed=np.clip(mixed, 0, 1).reshape(rest),
    synergy=total - alone.sum(0),
  )


def bootstrap(
  design: Bool[np.ndarray, 'c n'],
  responses: Float[np.ndarray, 'b r *k'],
  *,
  draws: int = 1000,
  seed: int = 0,
) -> tuple[Attribution, Attribution]:
  """(effects of the mean over repeats, their standard errors); repeats are paired over cells.

  Repeats (seeds, prompts) must be independent of each other; all cells of a drawn one come along,
  so what they share cancels. Errors are those of resampling times sqrt(r / (r - 1)): for linear
  effects the usual standard error of a mean, which few repeats know only roughly (3: within a
  factor of 2). `mixed` has an upward bias of the size of the noise; `share` is of no use where the
  total is not clearly different from 0. Raises InputError for fewer than 2 repeats or draws, and as
  `attribute`.
  """
  repeats = responses.shape[1]
  for name, value in (('repeats', repeats), ('draws', draws)):
    if value < 2:
      raise InputError(f'{name}={value} give no error bar: use at least 2.')
  shares = attribute(design, responses.mean(1))
  counts = np.random.default_rng(seed).multinomial(repeats, np.full(repeats, 1 / repeats), draws)
  # Draws are statistics more: one pass gives the effects of all.
  drawn = np.moveaxis(np.tensordot(counts / repeats, responses, (1, 1)), 0, 1)
  spread = attribute(design, drawn)
  factor = math.sqrt(repeats / (repeats - 1))
  # The axis of draws stands behind those of the sources.
  behind = dict(total=0, mixed=0, synergy=0, pairs=2)
  errors = {
    name: factor * np.std(values, axis=behind.get(name, 1), ddof=1)
    for name, values in spread._asdict().items()
  }
  return shares, Attribution(**errors)
