"""Makes the checkpoints and arrays of this folder with transformers, and checks both directions.

  python tests/golden/make_golden.py

Not run by the tests, which read what it wrote; needs torch and transformers beside trm_jax. Written
with transformers 5.24.0 and torch 2.13.0 on a CPU. It stops with an error where logits differ by
more than 1e-4 or any expert is another one: of transformers' checkpoints read here, and of ours
(float32 and bfloat16, one file and several) read by transformers.
"""

import pathlib
import shutil
import tempfile

import jax
import numpy as np
import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe

from trm_jax import checkpoints, policy
from trm_jax.policy import experts

HERE = pathlib.Path(__file__).parent
SHARED = dict(
  vocab_size=40,
  hidden_size=16,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  max_position_embeddings=64,
)
YARN = dict(rope_type='yarn', rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
DEFAULT = dict(rope_type='default', rope_theta=1e4)
MIXTURE = dict(
  intermediate_size=24,
  moe_intermediate_size=12,
  num_experts=8,
  num_experts_per_tok=2,
  norm_topk_prob=True,
  tie_word_embeddings=False,
)
MODELS = {
  'qwen3': transformers.Qwen3Config(
    **SHARED, intermediate_size=24, tie_word_embeddings=True, rope_parameters=DEFAULT
  ),
  'qwen3_long': transformers.Qwen3Config(
    **SHARED,
    intermediate_size=24,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
    rope_parameters=YARN,
  ),
  'qwen3_moe': transformers.Qwen3MoeConfig(**SHARED, **MIXTURE, rope_parameters=DEFAULT),
}
START = np.array([0, 5, 11], np.int32)
LENGTH = 24


def make(config):
  """A model whose weights are far from their initial values."""
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager')
  with torch.no_grad():
    for name, p in model.named_parameters():
      p.copy_(1 + 0.3 * torch.randn_like(p) if 'norm' in name else 0.4 * torch.randn_like(p))
  return model.eval()


def read(folder):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation='eager', dtype=torch.float32
  )
  return model.eval()


def run(model, tokens):
  """(logits, router scores, experts, load-balancing loss) of left-padded rows."""
  real = torch.tensor(np.arange(LENGTH)[None] >= START[:, None])
  positions = (real.long().cumsum(-1) - 1).clamp(min=0)
  scores, chosen = [], []

  def note(router, args, result):
    x = args[0].reshape(-1, args[0].shape[-1])
    scores.append(x @ router.weight.T)
    chosen.append(torch.topk(torch.softmax(scores[-1], -1), model.config.num_experts_per_tok)[1])

  hooks = [
    layer.mlp.gate.register_forward_hook(note)
    for layer in model.model.layers
    if hasattr(layer.mlp, 'experts')
  ]
  with torch.no_grad():
    out = model(
      input_ids=torch.tensor(tokens, dtype=torch.long),
      attention_mask=real.long(),
      position_ids=positions,
    )
    found = {'logits': out.logits.float().numpy()}
    if scores:
      shape = (len(START), LENGTH, len(scores), -1)
      stack = lambda xs: torch.stack(xs, 1).reshape(shape).numpy()
      found |= {'router_logits': stack(scores), 'routes': stack(chosen)}
      found['load_balance'] = modeling_qwen3_moe.load_balancing_loss_func(
        tuple(scores), model.config.num_experts, model.config.num_experts_per_tok, real.long()
      ).numpy()
  for hook in hooks:
    hook.remove()
  return found


def ours(folder, tokens):
  config, params = checkpoints.load(folder)
  hidden, _, aux = policy.apply(params, config, tokens, start=START)
  found = {'logits': policy.logits(params, hidden)}
  if config.experts:
    found |= {'router_logits': aux.router_logits, 'routes': aux.routes}
    real = np.arange(LENGTH)[None] >= START[:, None]
    found['load_balance'] = experts.load_balance(aux.router_logits, aux.routes, real)
  return config, params, {name: np.asarray(x) for name, x in found.items()}


def compare(got, want, what):
  real = np.arange(LENGTH)[None] >= START[:, None]
  for name in want:
    a, b = (x if name == 'load_balance' else x[real] for x in (got[name], want[name]))
    if name == 'routes':
      np.testing.assert_array_equal(np.sort(a, -1), np.sort(b, -1))
    print(f'{what}: {name} differs by {np.abs(a.astype(np.float64) - b).max():.1e}')
    np.testing.assert_allclose(a, b, rtol=0, atol=0 if name == 'routes' else 1e-4)


def main():
  transformers.logging.set_verbosity_error()
  tokens = np.random.default_rng(0).integers(0, SHARED['vocab_size'], (len(START), LENGTH))
  tokens = tokens.astype(np.int32)
  for name, config in MODELS.items():
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = make(config)
    # The long one is kept in bfloat16 and several files.
    if name == 'qwen3_long':
      model.to(torch.bfloat16).save_pretrained(folder, max_shard_size='4KB')
      model = read(folder)  # not .to(float32): the rotary frequencies would stay rounded
    else:
      model.save_pretrained(folder)
    (folder / 'generation_config.json').unlink(missing_ok=True)
    want = run(model, tokens)
    np.savez_compressed(folder / 'arrays.npz', tokens=tokens, start=START, **want)
    config, params, got = ours(folder, tokens)
    compare(got, want, f'{name}, read here')
    with tempfile.TemporaryDirectory() as directory:
      for dtype, size in (('float32', 10**9), ('float32', 4_000), ('bfloat16', 4_000)):
        out = pathlib.Path(directory) / f'{dtype}{size}'
        checkpoints.save(out, params, config, dtype=dtype, shard_bytes=size, context=64)
        again = read(out)
        _, _, got = ours(out, tokens)
        compare(got, run(again, tokens), f'{name}, written here as {out.name}')
        for key in ('rms_norm_eps', 'tie_word_embeddings', 'head_dim', 'vocab_size'):
          assert getattr(again.config, key) == getattr(model.config, key), key
        for key, value in model.config.rope_parameters.items():
          assert again.config.rope_parameters[key] == value, key
  print(
    f'transformers {transformers.__version__}, torch {torch.__version__}, jax {jax.__version__}'
  )


if __name__ == '__main__':
  main()
