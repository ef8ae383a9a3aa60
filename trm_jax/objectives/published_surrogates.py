"""Published surrogates, gates and advantages. Rows of `METHODS`."""

from trm_jax.objectives import advantages, clips, gates, parts, ratio_weights
from trm_jax.objectives.method import Method
from trm_jax.objectives.named import VERL, Named
from trm_jax.types import part

# verl's script: min(r, 1e4), detached.
_DPPO = part(clips.cispo, high=1e4)
_PRIME = part(clips.penalized, gate=part(gates.dppo_tv, limit=0.2))
_IPO = part(clips.penalized, gate=gates.probability_gap)

SURROGATES: dict[str, Named] = {
  'ratio': Named(Method, 'r A with r = policy / rollout', 'token', 'arXiv 2512.23075, eq. 2'),
  'ppo_clip': Named(
    lambda: Method(surrogate=parts.clip),
    'min(r A, clip(r, .8, 1.2) A)',
    'token',
    'arXiv 1707.06347, eq. 7',
  ),
  'decoupled': Named(
    lambda: Method(surrogate=parts.decoupled),
    'min(w, 2) min(r A, clip(r) A) with r = policy / version',
    'token',
    'arXiv 2505.24298, decoupled PPO',
  ),
  'clip_higher': Named(
    lambda: Method(surrogate=part(parts.clip, clip_high=0.28), normalize_by='tokens'),
    'min(r A, clip(r, .8, 1.28) A)',
    'token',
    'arXiv 2503.14476, DAPO',
    'mean over tokens',
  ),
  'dual_clip': Named(
    lambda: Method(surrogate=clips.dual_clip),
    'max(clip(r), 3 A) for A < 0',
    'token',
    'arXiv 1912.09729',
  ),
  'delta_clip': Named(
    lambda: Method(surrogate=clips.delta_clip),
    'min(min(r, 4) A, clip(r) A)',
    'token',
    'TRL delta (4: ours)',
  ),
  'gspo': Named(
    lambda: Method(surrogate=clips.gspo, reduce_tokens='mean'),
    'min(s A, clip(s) A), s = exp(mean_t log r)',
    'sequence',
    'arXiv 2507.18071',
    '3e-4, 4e-4, mean over tokens of a row',
  ),
  'gmpo': Named(
    lambda: Method(surrogate=clips.gmpo, reduce_tokens='mean'),
    'exp(mean_t clip(log r, -.4, .4)) A, outward only',
    'sequence',
    'arXiv 2507.20673',
    'mean over tokens of a row',
  ),
  'cispo': Named(
    lambda: Method(surrogate=clips.cispo),
    'sg(min(r, 5)) A log p',
    'token',
    'arXiv 2506.13585 (5 uncertain)',
  ),
  'sapo': Named(
    lambda: Method(surrogate=clips.sapo),
    '4/tau sigmoid(tau (r - 1)) A',
    'token',
    'arXiv 2511.20347',
    'tau 1 (A > 0), 1.05',
  ),
  'vespo': Named(
    lambda: Method(surrogate=clips.vespo),
    'sg(exp(lam + k log W - lam W)) A log p, W = prod r',
    'sequence',
    'TRL',
    'k, lam: 2, 3 (A > 0); 3, 2',
  ),
  'topr': Named(
    lambda: Method(surrogate=clips.topr),
    'A log p (A > 0), sg(min(W, 1)) A log p',
    'sequence',
    'arXiv 2503.14286',
  ),
  'reinforce_is': Named(
    lambda: Method(
      surrogate=clips.reinforce, weights=(part(ratio_weights.clamped, anchor='policy'),)
    ),
    'sg(min(r, 2)) A log p',
    'token',
    VERL + ', bypass_pg_is',
  ),
  'opsm': Named(
    lambda: Method(gates=(gates.opsm,)),
    'r A unless A < 0 and mean_t -log r > 1e-4',
    'sequence',
    'DeepSeek-V3.2; TRL, slime',
  ),
  'prime_rl': Named(
    lambda: Method(surrogate=_PRIME, normalize_by='tokens'),
    'r A - .001 (log r)^2; r A only unless A moves p further than .2 from q',
    'token',
    'prime-rl, default loss',
    'mean over tokens',
  ),
  'prime_rl_ipo': Named(
    lambda: Method(surrogate=_IPO, normalize_by='tokens'),
    'r A 1[|p - q| <= .1] - .001 (log r)^2',
    'token',
    'prime-rl, ipo loss',
    'mean over tokens',
  ),
  'm2po': Named(
    lambda: Method(surrogate=parts.ratio, gates=(gates.m2po,)),
    'r A, largest d^2 dropped until their mean is <= .04',
    'token',
    'arXiv 2510.01161',
  ),
  'dppo_tv': Named(
    lambda: Method(surrogate=_DPPO, gates=(gates.dppo_tv,)),
    'sg(r) A log p unless A moves p further than .15 from q',
    'token',
    'arXiv 2602.04879',
  ),
  'dppo_kl': Named(
    lambda: Method(surrogate=_DPPO, gates=(gates.dppo_kl,)),
    'sg(r) A log p unless binary KL > .05 and A widens it',
    'token',
    'arXiv 2602.04879',
  ),
  'dppo_exact': Named(
    lambda: Method(surrogate=_DPPO, gates=(gates.dppo_exact,)),
    'sg(r) A log p unless TV > .15 and A widens it',
    'token',
    'arXiv 2602.04879, exact or top-K',
  ),
  'drpo': Named(
    lambda: Method(surrogate=clips.drpo),
    'r A - |A| (p - q)^2 / (.3 q)',
    'token',
    'arXiv 2606.09821 (form uncertain)',
  ),
  'cppo': Named(
    lambda: Method(gates=(gates.cppo,)),
    'r A unless w_t D_t > .15 or S_t > .15 + .015 W_{t-1}',
    'prefix',
    'arXiv 2606.10968',
  ),
  'grpo': Named(
    lambda: Method(surrogate=parts.clip, reduce_tokens='mean'),
    'min(r A, clip(r) A), A = (R - mean) / deviation',
    'token',
    'arXiv 2402.03300, without its KL term',
    'mean over the tokens of a row, then over rows',
  ),
  'rloo': Named(
    lambda: Method(advantage=advantages.leave_one_out),
    'r (R - mean of the others)',
    'token',
    'arXiv 2402.14740',
  ),
  'dr_grpo': Named(
    lambda: Method(surrogate=parts.clip, advantage=advantages.centred, reduce_tokens='constant'),
    'min(r A, clip(r) A), A = R - mean',
    'token',
    'arXiv 2503.20783',
    'divided by a constant length',
  ),
  'ctpo': Named(
    lambda: Method(surrogate=clips.ctpo, normalize_by='tokens'),
    'min(C A, clip(C) A), C = prod_{j<=t} r, clip in e^(-.025 sqrt t) .. e^(.05 sqrt t)',
    'prefix',
    'arXiv 2605.07331',
    'dual clip e^(.05 sqrt t), mean over tokens',
  ),
  'minpro': Named(
    lambda: Method(surrogate=clips.minpro),
    'sg(r_t min_{j<t} r_j) A log p',
    'prefix',
    'arXiv 2601.22718 (clip uncertain)',
  ),
  'sis': Named(
    lambda: Method(surrogate=clips.sis),
    'A log p with probability min(1, r), else sg(r) A log p',
    'token',
    'arXiv 2607.04728 (constant of the test uncertain)',
  ),
  'minirl': Named(
    lambda: Method(surrogate=part(clips.cispo, high=5.0), gates=(gates.clip_band,)),
    'sg(min(r, 5)) A log p where policy / recomputed is inside .8, 1.28 on the side of A',
    'token',
    'arXiv 2512.01374 (numbers uncertain)',
  ),
  'vaco': Named(
    lambda: Method(gates=(gates.vaco,)),
    'r A unless mean_t |r - 1| / 2 > .05 and A moves r outward',
    'sequence',
    'arXiv 2603.01365 (limit: ours)',
  ),
  'mu_grpo': Named(
    lambda: Method(
      surrogate=part(parts.clip, clip_low=0.8, clip_high=4.0), gates=(gates.negative_suffix,)
    ),
    'min(r A, clip(r, .2, 5) A), for A < 0 up to the first token with r outside .2 .. 5',
    'prefix',
    'arXiv 2605.17570 (numbers: ours)',
  ),
  'estr': Named(
    lambda: Method(surrogate=parts.clip, gates=(gates.estr,)),
    'min(r A, clip(r) A) where (log r)^2 <= 1 (H + .001)',
    'token',
    'arXiv 2607.22186 (limit: ours)',
  ),
  'clip_cov': Named(
    lambda: Method(
      surrogate=part(parts.clip, anchor='recomputed'),
      gates=(part(gates.clip_cov, anchor='recomputed'),),
      normalize_by='tokens',
    ),
    'min(r A, clip(r) A), 2e-4 of the tokens with covariance of A and log p in 1 .. 5 dropped',
    'token',
    'arXiv 2505.22617; verl',
    'mean over tokens',
  ),
  'kl_cov': Named(
    lambda: Method(
      surrogate=part(clips.kl_cov, anchor='recomputed'),
      normalize_by='tokens',
    ),
    'r A, less |log r| on the 2e-4 of the tokens with the largest covariance of A and log p',
    'token',
    'arXiv 2505.22617; verl',
    'mean over tokens',
  ),
  'optimal_token_baseline': Named(
    lambda: Method(advantage=advantages.optimal_token_baseline()),
    'r (R - B_t), B_t = sum_i R_i W_it / sum_i W_it, W_t = sum_{j<=t} (1 - 2 p + sum_v p_v^2)',
    'token',
    'arXiv 2602.07078; verl',
  ),
  'dc_grpo': Named(
    lambda: Method(surrogate=parts.clip, advantage=advantages.charged()),
    'min(r A, clip(r) A), A = group_relative - .1 |p - q|',
    'token',
    'arXiv 2606.08779 (tolerance uncertain)',
    'coefficient fixed at its start',
  ),
}
