"""Times the exact divergences of two stored logit arrays against floors, naive forms and peers.

  python -m benchmarks.divergences [--sizes 2048x32768] [--dtypes float32] [--rounds 15]
                                   [--save FILE] [--markdown] [--no-resident]

  READ   largest logit of each row of both arrays: one read of the inputs
  EXP    sum of exponentials of both arrays, 4 rows at a time: two exponentials a pair of logits
         are the least that any exact method needs, and a CPU takes longer for them than to read
  naive  two log_softmax, then all that `statistics` returns; jitted as a whole

Peers that are installed are timed as well: optax, distrax and torch, on logits as they are stored.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import measure
from trm_jax import divergences
from trm_jax.divergences.passes import blocks
from trm_jax.training import command

READ, EXP, CORE, FULL, NAIVE = 'READ', 'EXP', 'ours', 'ours, full set', 'naive'
CHUNKED = 'naive, 8-row chunks'
OPTAX = 'optax log-target KL', 'optax KL'
DISTRAX, TORCH = 'distrax KL', 'torch naive'
# Forms whose resident memory is measured as well.
IN_CHILD = CORE, FULL, NAIVE, OPTAX[0]
# Rows drawn anew; they repeat, since drawing all of them takes longer than to measure.
DRAWN = 64


def inputs(case: measure.Case) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(policy logits, rollout logits, tokens): spread 3, apart by 0.1."""
  rng = np.random.default_rng(0)
  shape = min(DRAWN, case.positions), case.vocabulary
  rollout = 3 * rng.standard_normal(shape, np.float32)
  policy = rollout + np.float32(0.1) * rng.standard_normal(shape, np.float32)
  repeats = -(-case.positions // shape[0])
  whole = lambda x: np.tile(x.astype(case.dtype), (repeats, 1))[: case.positions]
  tokens = rng.integers(case.vocabulary, size=case.positions)
  return jnp.asarray(whole(policy)), jnp.asarray(whole(rollout)), jnp.asarray(tokens, jnp.int32)


def read(policy, rollout, tokens):
  del tokens
  top = lambda *xs: tuple(x.max(-1) for x in xs)
  return blocks.by_rows(top, policy, rollout, rows=blocks.rows_of(policy.shape[-1]))


def exponentials(policy, rollout, tokens):
  del tokens
  total = lambda *xs: tuple(jnp.exp(x.astype(jnp.float32)).sum(-1) for x in xs)
  return blocks.by_rows(total, policy, rollout, rows=4)


def naive(policy, rollout, tokens):
  """(KL, TV, entropy, both log-probs) as one writes them first."""
  log_q, log_p = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (policy, rollout))
  q, p = jnp.exp(log_q), jnp.exp(log_p)
  pick = lambda x: jnp.take_along_axis(x, tokens[:, None], -1)[:, 0]
  kl, tv = (p * (log_p - log_q)).sum(-1), 0.5 * jnp.abs(q - p).sum(-1)
  return kl, tv, -(q * log_q).sum(-1), pick(log_q), pick(log_p)


def chunked(policy, rollout, tokens):
  """`naive`, 8 rows at a time."""
  return blocks.by_rows(naive, policy, rollout, tokens, rows=8)


def _log_softmax(*logits):
  return [jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits]


def optax_log_targets(policy, rollout, tokens):
  del tokens
  return optax.losses.kl_divergence_with_log_targets(*_log_softmax(policy, rollout))


def optax_targets(policy, rollout, tokens):
  del tokens
  (log_q,) = _log_softmax(policy)
  return optax.losses.kl_divergence(log_q, jax.nn.softmax(rollout.astype(jnp.float32)))


def prepare_distrax(inputs):
  import distrax

  def kl(policy, rollout, tokens):
    del tokens
    q, p = (distrax.Categorical(logits=x.astype(jnp.float32)) for x in (policy, rollout))
    return p.kl_divergence(q)

  return measure.compiled(kl)(inputs)


def prepare_torch(inputs):
  """`naive` in torch, on the same memory and with as many threads."""
  import torch

  torch.set_num_threads(measure.threads())

  def tensor(x):
    x = np.asarray(x)
    if x.dtype == jnp.bfloat16:
      return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)

  policy, rollout, tokens = map(tensor, inputs)
  tokens = tokens.long()

  def call():
    with torch.inference_mode():
      log_q, log_p = (torch.log_softmax(x.float(), -1) for x in (policy, rollout))
      q, p = log_q.exp(), log_p.exp()
      kl, tv = (p * (log_p - log_q)).sum(-1), 0.5 * (q - p).abs().sum(-1)
      pick = lambda x: x.gather(-1, tokens[:, None])[:, 0]
      return kl, tv, -(q * log_q).sum(-1), pick(log_q), pick(log_p)

  return measure.Ready(call)


def forms(case: measure.Case) -> list[measure.Form]:
  """Every form, floors first."""
  del case
  jitted = {
    READ: read,
    EXP: exponentials,
    CORE: divergences.statistics,
    FULL: lambda *xs: divergences.statistics(*xs, full=True),
    NAIVE: naive,
    OPTAX[0]: optax_log_targets,
    OPTAX[1]: optax_targets,
  }
  return [
    *(measure.Form(name, measure.compiled(f)) for name, f in jitted.items()),
    measure.peer(DISTRAX, 'distrax', prepare_distrax),
    measure.Form(CHUNKED, measure.compiled(chunked), every=5),
    measure.peer(TORCH, 'torch', prepare_torch, every=5),
  ]


def goals(measured: measure.Measured) -> list[measure.Goal]:
  time = measured.time_goal
  return [
    time('ours against EXP', CORE, EXP, 2.0),
    time('the full set against EXP', FULL, EXP, 2.6),
    time('ours against naive', CORE, NAIVE, 1 / 3),
    *(time(f'ours against {peer} alone', CORE, peer, 1.0) for peer in (*OPTAX, DISTRAX)),
    measure.Goal("ours against naive's temporaries", measured.share(CORE, NAIVE), 0.01, True),
  ]


def main(options: measure.Command) -> None:
  """Prints a table and the goals of every case."""
  records, bases = [], (EXP, NAIVE)
  for measured, _ in measure.run(options, inputs, forms, IN_CHILD):
    found = goals(measured)
    rows = [measure.row(measured, form.name, bases, NAIVE) for form in forms(measured.case)]
    measure.show(measured, rows, measure.header(bases, NAIVE), found, options.markdown)
    records.append(measure.record(measured, found))
    measure.save(options.save, records)


if __name__ == '__main__':
  command.run(measure.Command, main)
