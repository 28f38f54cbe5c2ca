"""③ Transforms of the reward that run before the advantage.

transform(r_N, group_N) -> r_N
"""

from __future__ import annotations

from torch import Tensor


def none(r_N: Tensor, group_N: Tensor) -> Tensor:
    r"""The reward as it is.

    $$r_i \mapsto r_i$$

    Source: DeepSeekMath (2402.03300). Fixes: nothing. Costs: nothing.
    """
    return r_N
