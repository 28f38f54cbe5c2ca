"""⑥ What becomes of truncated responses.

overlong(r_N, b) -> r_N, mask_NT        reward and loss mask; a hidden row still counts in the group's baseline
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from grpo_repro.types import Minibatch, UserError


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


def soft_penalty(r_N: Tensor, b: Minibatch, *, cache: Annotated[int, Field(ge=1)] | None = None) -> tuple[Tensor, Tensor]:
    r"""A penalty that grows over the last `cache` tokens before the limit; null: over the last fifth, the paper's 4096 of 20480.

    $$r_i - \min\Big(1,\ \max\Big(0,\ \frac{|y_i|-(L_{max}-L_{cache})}{L_{cache}}\Big)\Big),\quad r_i - 1\ \text{if cut}$$

    Source: DAPO (2503.14476), Soft Overlong Punishment: L_max 20480, L_cache 4096. A response that was cut counts as longer than L_max.
    Fixes: a gradient against length before the wall. Costs: an opinion on length in the reward.
    """
    cache = max(b.limit // 5, 1) if cache is None else cache
    if cache > b.limit:
        raise UserError(
            f"objective.overlong.soft_penalty.cache is {cache}, but a response has at most {b.limit} tokens; write less."
        )
    over_N = (b.length_N - (b.limit - cache)).clamp(min=0, max=cache).to(r_N.dtype) / cache
    return r_N - over_N.masked_fill(b.cut_N, 1.0), b.mask_NT
