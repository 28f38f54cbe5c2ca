"""⑥ Which groups are trained on. (How many are drawn, μ, temperature and the like are numbers of the config.)

sampling(r_N, group_N) -> keep_N        bool, on the raw rewards
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from grpo_repro.types import variant


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


@variant(resample=True)
def dynamic(r_N: Tensor, group_N: Tensor, *, max_batches: Annotated[int, Field(ge=1)] = 3) -> Tensor:
    r"""Only groups whose rewards differ, and new prompts until there are as many as asked for.

    $$\{i : 0 < |\{j\in g(i): r_j = r_{max}\}| < |g(i)|\},\ \text{redrawn up to}\ n_{batches}\ \text{times}$$

    The loop stops with a sentence when `max_batches` batches hold no mixed group at all. Source: DAPO (2503.14476), Dynamic Sampling.
    Fixes: a full batch of signal at every step. Costs: generated tokens; compare at matched tokens.
    """
    return drop_zero_variance(r_N, group_N)
