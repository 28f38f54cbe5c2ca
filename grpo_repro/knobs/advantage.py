"""③ The advantage: how much better a response is than its group.

    advantage(b) -> Â_N1 or Â_NT        reads b.return_N (the reward, less a KL charged to it) and the group ids

Group statistics are two-pass, in the reward's own precision. A group whose rewards are all equal has Â = 0 exactly. A group with
one response has nothing to be compared with: Â = 0 (the config refuses G = 1 with a group baseline).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_repro.types import Minibatch, NonNegative, variant


@variant(group_baseline=True)
def group_zscore(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred on the group's mean and divided by its standard deviation.

    $$\hat A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}$$

    Source: DeepSeekMath (2402.03300), Sec. 4.1.2. The paper states neither ddof nor ε: ours are TRL's (1 and 1e-4, ε added to the
    standard deviation, not inside the root).
    Fixes: the scale of the reward drops out. Costs: a prompt's weight depends on its difficulty (CLAIMS A3), more with larger G.
    """
    centred_N, size_N, index_N = _centred(b)
    std_N = (_group_sum(centred_N**2, index_N)[index_N] / (size_N - ddof).clamp(min=1)).sqrt()
    return torch.where(_mixed(b, index_N), centred_N / (std_N + eps), torch.zeros_like(centred_N)).unsqueeze(1)


@variant(group_baseline=True)
def group_center(b: Minibatch) -> Tensor:
    r"""Centred on the group's mean.

    $$\hat A_i = r_i - \mathrm{mean}(r)$$

    Source: Dr. GRPO (2503.20783). Equals (G−1)/G of `leave_one_out`.
    Fixes: difficulty bias. Costs: the reward's scale sets the step.
    """
    centred_N, _, index_N = _centred(b)
    return torch.where(_mixed(b, index_N), centred_N, torch.zeros_like(centred_N)).unsqueeze(1)


@variant(group_baseline=True)
def leave_one_out(b: Minibatch) -> Tensor:
    r"""Compared with the mean of the others.

    $$\hat A_i = r_i - \frac{1}{G-1}\sum_{j\ne i} r_j$$

    Source: RLOO (2402.14740); Kool et al. 2019.
    Fixes: the baseline does not contain the sample itself, so the estimate is unbiased. Costs: more variance at small G.
    """
    centred_N, size_N, index_N = _centred(b)
    return torch.where(_mixed(b, index_N), centred_N * size_N / (size_N - 1).clamp(min=1), torch.zeros_like(centred_N)).unsqueeze(
        1
    )


def _centred(b: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Reward less its group's mean, the group's size, and the group's index, all a row."""
    _, index_N = torch.unique(b.group_N, return_inverse=True)
    r_N = b.return_N
    size_G = _group_sum(torch.ones_like(r_N), index_N)
    return r_N - (_group_sum(r_N, index_N) / size_G)[index_N], size_G[index_N], index_N


def _group_sum(x_N: Tensor, index_N: Tensor) -> Tensor:
    groups = int(index_N.max()) + 1 if index_N.numel() else 0
    return torch.zeros(groups, dtype=x_N.dtype, device=x_N.device).index_add_(0, index_N, x_N)


def _mixed(b: Minibatch, index_N: Tensor) -> Tensor:
    """False for rows of a group whose returns are all equal: round-off must not become an advantage (NeMo-RL#4158)."""
    r_N = b.return_N
    groups = int(index_N.max()) + 1 if index_N.numel() else 0
    high_G = torch.full((groups,), -torch.inf, dtype=r_N.dtype, device=r_N.device).scatter_reduce_(0, index_N, r_N, "amax")
    low_G = torch.full((groups,), torch.inf, dtype=r_N.dtype, device=r_N.device).scatter_reduce_(0, index_N, r_N, "amin")
    return (high_G > low_G)[index_N]
