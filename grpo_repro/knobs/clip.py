"""② The clip: how much of a sample's gain passes, by how far w has moved and by the sign of Â.

    clip(logw_NT, now, b) -> gain_NT, hit_NT      hit = the bound acted on that token

`eps_*` is the width of a trust region around 1; `w_min`, `w_max` are absolute bounds of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_repro.types import Forward, Minibatch, NonNegative, Share, variant


def none(logw_NT: Tensor, now: Forward, b: Minibatch) -> tuple[Tensor, Tensor]:
    r"""No clip.

    $$w_{i,t}\,\hat A_{i,t}$$

    Source: the policy gradient theorem with importance weights.
    Fixes: nothing is thrown away. Costs: nothing bounds an update.
    """
    return torch.exp(logw_NT) * b.advantage, torch.zeros_like(b.mask_NT)


@variant(bounding=True)
def ppo(
    logw_NT: Tensor, now: Forward, b: Minibatch, *, eps_low: Share | None = 0.2, eps_high: NonNegative | None = 0.2
) -> tuple[Tensor, Tensor]:
    r"""The pessimistic bound of PPO, with its two sides free.

    $$\min\big(w\hat A,\ \mathrm{clip}(w,\,1-\varepsilon_{low},\,1+\varepsilon_{high})\,\hat A\big)$$

    A side that is null has no bound.
    Source: PPO (1707.06347), Eq. 7; Clip-Higher is .2/.28 (DAPO, 2503.14476); GSPO takes 3e-4/4e-4 (2507.18071).
    Fixes: no reward for moving further in a favourable direction (Â>0, w↑ and Â<0, w↓ have no gradient).
    Costs: the other two cells are open by design: Â<0 with w≫1 passes at w times its size, Â>0 with w≪1 at w times.
    """
    w_NT = torch.exp(logw_NT)
    free_NT = w_NT * b.advantage
    lowest = 0.0 if eps_low is None else 1 - eps_low
    highest = float("inf") if eps_high is None else 1 + eps_high
    bounded_NT = w_NT.clamp(lowest, highest) * b.advantage
    return torch.minimum(free_NT, bounded_NT), (bounded_NT < free_NT) & b.mask_NT
