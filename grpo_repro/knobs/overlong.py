"""⑥ What becomes of truncated responses.

overlong(r_N, b) -> r_N, mask_NT        reward and loss mask; a hidden row still counts in the group's baseline
"""

from __future__ import annotations

from torch import Tensor

from grpo_repro.types import Minibatch


def keep(r_N: Tensor, b: Minibatch) -> tuple[Tensor, Tensor]:
    r"""A truncated response is trained on like any other.

    $$r_i,\ m_{i,t}$$

    Source: DeepSeekMath (2402.03300). Fixes: nothing. Costs: a good answer that was cut is taught as wrong.
    """
    return r_N, b.mask_NT


def mask(r_N: Tensor, b: Minibatch) -> tuple[Tensor, Tensor]:
    r"""A truncated response is hidden from the loss.

    $$r_i,\ m_{i,t}\,\mathbb 1[i\ \text{ended}]$$

    Source: DAPO (2503.14476), Overlong Filtering. It still counts in its group's baseline, and in no denominator of the loss.
    Fixes: no lesson from answers that were cut. Costs: nothing pushes against length.
    """
    return r_N, b.mask_NT & ~b.cut_N.unsqueeze(1)
