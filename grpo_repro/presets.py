"""Named algorithms, one expression each. Read two of them side by side: the difference of the papers is the difference of the
expressions. A special case is written as the special case. Numbers that belong to the loop (G, μ, learning rate) are in the YAML;
PAPERS.md has the papers' own, part by part, and how each is known. "Not known": stated in no source that was read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from grpo_repro.knobs import advantage, aggregation, clip, correction, kl, overlong, ratio, sampling, step
from grpo_repro.objective import Objective

grpo = Objective(
    ratio=ratio.token,
    clip=partial(clip.ppo, eps_low=0.2, eps_high=0.2),
    advantage=partial(advantage.group_zscore, ddof=1, eps=1e-4),
    aggregation=aggregation.sequence_mean,
    kl=partial(kl.k3, beta=0.04),
)
"""Group relative policy optimisation. DeepSeekMath (2402.03300), Eq. 3: G = 64, β = .04, lr 1e-6, one update a rollout; ε not known.
Differs from the paper in: ε 1e-4 added to the standard deviation and ddof 1 (the paper states neither); clip .2 is TRL's."""

dr_grpo = replace(grpo, advantage=advantage.group_center, aggregation=aggregation.constant_length, kl=kl.none)
"""GRPO without its two biases, of difficulty and of length. Dr. GRPO (2503.20783): G = 8, lr 1e-6, β = 0, 8 minibatches a rollout;
clip not known.
Differs from the paper in: nothing known. (OpenRLHF's dr_grpo and rlhf-book's drop the std only.)"""

gspo = replace(grpo, ratio=ratio.sequence, clip=partial(clip.ppo, eps_low=3e-4, eps_high=4e-4), kl=kl.none)
"""Group sequence policy optimisation: reward, ratio and clip all act on the whole response. GSPO (2507.18071): ε 3e-4 and 4e-4,
4 minibatches a rollout, β = 0; G and lr not known.
Differs from the paper in: nothing known; its ε belongs to responses of thousands of tokens and scales as 1/√|y|."""

gspo_token = replace(gspo, ratio=ratio.sequence_token)
"""GSPO with room for a token-level advantage. GSPO-token (2507.18071), Eq. 14: value of the sequence ratio, gradient of each token's.
Differs from the paper in: Â is one number a response here, so it is `gspo` in value and gradient until `advantage` says otherwise."""

dapo = replace(
    grpo,
    clip=partial(clip.ppo, eps_low=0.2, eps_high=0.28),
    aggregation=aggregation.token_mean,
    kl=kl.none,
    sampling=sampling.dynamic,
    overlong=overlong.soft_penalty,
)
"""GRPO for long chains of thought: Clip-Higher, token mean, dynamic sampling, soft overlong punishment, no KL. DAPO (2503.14476):
ε .2 and .28, G = 16, 512 prompts, 16 updates a rollout, lr 1e-6, β = 0, L_max 20480 with a cache of 4096.
Differs from the paper in: the cache is a fifth of whatever limit is set; redrawing stops after 3 batches (the paper gives no bound)."""

cispo = replace(grpo, clip=partial(clip.truncate, w_min=0.0, w_max=1.28), aggregation=aggregation.token_mean, kl=kl.none)
"""The ratio is a truncated, detached weight on the score function: no token loses its gradient. CISPO, MiniMax-M1 (2506.13585):
no lower bound, β = 0; the upper bound was tuned and never published.
Differs from the paper in: w_max = 1.28, DAPO's upper side as an absolute bound (frameworks take .2 to 6, see PAPERS.md)."""

rloo = Objective(
    ratio=ratio.none,
    clip=clip.none,
    advantage=advantage.leave_one_out,
    aggregation=aggregation.sequence_sum,
    kl_in_reward=partial(kl.k1, beta=0.03),
)
"""REINFORCE, each response against the mean of the others. RLOO (2402.14740): β = .03, lr 1e-6, batch 512, G of 2 or 4.
Differs from the paper in: nothing known; right only with one update a rollout."""

tis = replace(grpo, kl=kl.none, correction=partial(correction.truncate, w_max=2.0, level="token"))
"""Truncated importance sampling against an engine with other numerics than the trainer. TIS (Yao et al. 2025,
fengyao.notion.site/off-policy-rl): C = 2 typical; ε, lr not known.
Differs from the paper in: it was shown on DAPO's recipe; here on GRPO's, and `correction: {name: truncate}` adds it to any preset."""

dual_clip = replace(grpo, clip=partial(clip.dual, eps_low=0.2, eps_high=0.2, w_max=3.0), kl=kl.none)
"""A floor under the penalty of a bad token whose probability has soared. Dual-clip PPO (1912.09729): c = 3; ε and lr not known.
Differs from the paper in: the group's baseline in place of a critic. With c = 4 it is INTELLECT-2's two-sided clip (2505.07291)."""

sapo = replace(grpo, clip=partial(clip.soft_sigmoid, tau_pos=1.0, tau_neg=1.05), kl=kl.none)
"""A smooth gate in place of the clip's edge. SAPO (2511.20347): τ 1.0 for Â > 0 and 1.05 for Â < 0; G, lr and β not known.
Differs from the paper in: nothing known; Â = 0 takes τ_neg, where the gain is 0 anyway."""

ppo_penalty = replace(grpo, clip=partial(clip.kl_penalty, beta=1.0, target=0.01), aggregation=aggregation.token_mean, kl=kl.none)
"""A penalty on KL(π_old‖π_θ) in place of the clip, with β adapted after each rollout. PPO (1707.06347), Sec. 4: β halves below d/1.5
and doubles above 1.5·d; its d and first β not known.
Differs from the paper in: the group's baseline in place of a critic (`advantage: gae` brings it back); KL is k3 at the drawn tokens."""

reinforce_pp = replace(
    grpo,
    advantage=partial(advantage.batch_zscore, ddof=1, eps=1e-4),
    aggregation=aggregation.token_mean,
    kl=kl.none,
    kl_in_reward=partial(kl.k1, beta=0.01),
)
"""PPO's loss without critic and without groups: returns to go, normalised over the whole batch. REINFORCE++ (2501.03262): k1 in the
reward, token by token; β, ε, lr not known.
Differs from the paper in: β .01 is OpenRLHF's default, clip .2 GRPO's; rewards are not clipped."""

lite_ppo = replace(grpo, advantage=partial(advantage.batch_std, ddof=1, eps=1e-4), aggregation=aggregation.token_mean, kl=kl.none)
"""Two techniques on the plain loss: group mean with batch std, and token mean. Lite PPO (2508.08221): G, lr, ε and β not known.
Differs from the paper in: nothing known; clip .2 and β = 0 are this family's plainest."""

trpo = replace(
    grpo, clip=clip.none, aggregation=aggregation.token_mean, kl=kl.none, step=partial(step.trpo, max_kl=0.01, damping=0.1)
)
"""A natural-gradient step as long as the trust region allows, in place of any clip; for small models. TRPO (1502.05477): δ = .01.
Differs from the paper in: the group's baseline in place of returns; α is halved until the step is accepted; damping .1 is ours."""
