"""③ Transforms of the reward that run before the advantage.

transform(r_N, group_N) -> r_N
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_repro.types import Finite, Positive


def none(r_N: Tensor, group_N: Tensor) -> Tensor:
    r"""The reward as it is.

    $$r_i \mapsto r_i$$

    Source: DeepSeekMath (2402.03300). Fixes: nothing. Costs: nothing.
    """
    return r_N


def rank(r_N: Tensor, group_N: Tensor) -> Tensor:
    r"""The reward's rank in its group, from 0 to 1; equal rewards share their mean rank.

    $$r_i \mapsto \frac{\#\{j: r_j<r_i\} + \frac12\#\{j\ne i: r_j=r_i\}}{G-1}$$

    A group of one has rank ½. Source: the seed document, knob ③; RLRR (2601.23058) uses relative ranks.
    Fixes: outliers among the rewards. Costs: how much better no longer counts.
    """
    same_NN = group_N[:, None] == group_N[None, :]
    below_N = (same_NN & (r_N[None, :] < r_N[:, None])).sum(1).to(r_N.dtype)
    equal_N = (same_NN & (r_N[None, :] == r_N[:, None])).sum(1).to(r_N.dtype) - 1
    others_N = same_NN.sum(1).to(r_N.dtype) - 1
    return torch.where(others_N > 0, (below_N + equal_N / 2) / others_N.clamp(min=1), torch.full_like(r_N, 0.5))


def sigmoid(r_N: Tensor, group_N: Tensor, *, center: Finite = 0.0, scale: Positive = 1.0) -> Tensor:
    r"""A squashed reward.

    $$r_i \mapsto \sigma\Big(\frac{r_i-c}{s}\Big)$$

    Source: the seed document, knob ③. Fixes: unbounded rewards (a reward model's). Costs: two numbers that belong to the reward.
    """
    return torch.sigmoid((r_N - center) / scale)
