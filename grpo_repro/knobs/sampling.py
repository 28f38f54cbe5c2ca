"""⑥ Which groups are trained on. (How many are drawn, μ, temperature and the like are numbers of the config.)

sampling(r_N, group_N) -> keep_N        bool, on the raw rewards
"""

from __future__ import annotations

import torch
from torch import Tensor


def all(r_N: Tensor, group_N: Tensor) -> Tensor:
    r"""Every group.

    $$\{1,\dots,N\}$$

    Source: DeepSeekMath (2402.03300). A flat group has Â = 0 but still counts in every denominator, and its KL term stays.
    Fixes: nothing. Costs: flat groups dilute the step.
    """
    return torch.ones_like(group_N, dtype=torch.bool)


def drop_zero_variance(r_N: Tensor, group_N: Tensor) -> Tensor:
    r"""Only groups whose rewards differ.

    $$\{i : \max_{j\in g(i)} r_j > \min_{j\in g(i)} r_j\}$$

    Source: DAPO (2503.14476) without its resampling. A dropped group is in no denominator and its KL term is dropped too.
    Fixes: flat groups no longer dilute the step. Costs: fewer rows; the effective step depends on how many groups are mixed.
    """
    _, index_N = torch.unique(group_N, return_inverse=True)
    groups = int(index_N.max()) + 1 if index_N.numel() else 0
    high_G = torch.full((groups,), -torch.inf, dtype=r_N.dtype, device=r_N.device).scatter_reduce_(0, index_N, r_N, "amax")
    low_G = torch.full((groups,), torch.inf, dtype=r_N.dtype, device=r_N.device).scatter_reduce_(0, index_N, r_N, "amin")
    return (high_G > low_G)[index_N]
