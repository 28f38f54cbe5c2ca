"""① The correction for a sampler that is not the trainer's old policy (engine mismatch, stale weights).

correction(b) -> corr_NT        detached; multiplies the gain after the clip and never enters log w
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_repro.types import Minibatch, NonNegative, Positive, variant

Level = Literal["token", "sequence", "geometric"]


def none(b: Minibatch) -> Tensor:
    r"""No correction: ρ ≡ 1.

    $$\rho_{i,t} = 1$$

    Source: DeepSeekMath (2402.03300). Fixes: nothing. Costs: biased when sampler and trainer disagree.
    """
    return torch.ones_like(b.mask_NT, dtype=torch.get_default_dtype())


@variant(needs=("old", "sampler"))
def truncate(b: Minibatch, *, w_max: Positive = 2.0, level: Level = "token") -> Tensor:
    r"""Truncated importance sampling (TIS).

    $$\rho_{i,t} = sg\Big[\min\Big(\frac{\pi_{old}(y_{i,t})}{\mu(y_{i,t})},\ C\Big)\Big]$$

    at level token; the product over the response at level sequence; its geometric mean at level geometric.
    Source: Yao et al. 2025 (fengyao.notion.site/off-policy-rl), C = 2 typical.
    Fixes: bias from a sampler with other numerics. Costs: biased above C; sequence products have length-dependent variance.
    """
    return torch.exp(_log_rho(b, level)).clamp(max=w_max)


def _ordered(*, w_min: float, w_max: float, level: Level) -> str | None:
    return None if w_min <= w_max else f"w_min is {w_min} and w_max is {w_max}; w_min must not exceed w_max"


@variant(needs=("old", "sampler"), validate=_ordered)
def mask(b: Minibatch, *, w_min: NonNegative = 0.0, w_max: Positive = 2.0, level: Level = "token") -> Tensor:
    r"""Importance weight inside a band, 0 outside it (MIS; IcePop with .5 and 5 at level token).

    $$\rho_{i,t}\,\mathbb 1[w_{min}\le\rho_{i,t}\le w_{max}]$$

    Source: IcePop (ringtech 2025), MIS ("When speed kills stability" 2025).
    Fixes: outliers no longer count at all. Costs: removes mass, more of it for longer responses at level sequence.
    """
    rho_NT = torch.exp(_log_rho(b, level))
    return torch.where((rho_NT >= w_min) & (rho_NT <= w_max), rho_NT, torch.zeros_like(rho_NT))


def _log_rho(b: Minibatch, level: Level) -> Tensor:
    rho_NT = ((b.old_NT - b.sampler_NT) * b.mask_NT).detach()
    if level != "token":
        total_N1 = rho_NT.sum(1, keepdim=True)
        rho_NT = (total_N1 / b.tokens_N1 if level == "geometric" else total_N1).expand_as(rho_NT)
    return rho_NT.clamp(-20.0, 20.0)
