"""Named algorithms, one expression each. Read two of them side by side: the difference of the papers is the difference of the
expressions. A special case is written as the special case. Numbers that belong to the sampler (G, μ, temperature) are in the YAML.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from grpo_repro.knobs import advantage, aggregation, clip, kl, ratio
from grpo_repro.objective import Objective

grpo = Objective(
    ratio=ratio.token,
    clip=partial(clip.ppo, eps_low=0.2, eps_high=0.2),
    advantage=partial(advantage.group_zscore, ddof=1, eps=1e-4),
    aggregation=aggregation.sequence_mean,
    kl=partial(kl.k3, beta=0.04),
)
"""Group relative policy optimisation. DeepSeekMath (2402.03300), Eq. 3: G = 64, β = .04, one update a rollout.
Differs from the paper in: ε added to the standard deviation (1e-4; the paper has none)."""

dr_grpo = replace(grpo, advantage=advantage.group_center, aggregation=aggregation.constant_length, kl=kl.none)
"""GRPO without its two biases. Dr. GRPO (2503.20783): no std, constant denominator, β = 0.
Differs from the paper in: nothing known."""

gspo = replace(grpo, ratio=ratio.sequence, clip=partial(clip.ppo, eps_low=3e-4, eps_high=4e-4), kl=kl.none)
"""Group sequence policy optimisation. GSPO (2507.18071): sequence ratio with its own clip scale.
Differs from the paper in: nothing known; 3e-4/4e-4 belong to responses of thousands of tokens (CLAIMS A7)."""

rloo = Objective(
    ratio=ratio.none,
    clip=clip.none,
    advantage=advantage.leave_one_out,
    aggregation=aggregation.sequence_sum,
    kl_in_reward=partial(kl.k1, beta=0.03),
)
"""REINFORCE leave-one-out. RLOO (2402.14740): no ratio, no clip, β = .03 with k1 in the reward.
Differs from the paper in: nothing known; right only with one update a rollout."""
