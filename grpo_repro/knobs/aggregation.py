"""④ Aggregation: the weight of each token in the sum. Every denominator comes from `Norm`, never from the slice at hand.

aggregation(b, norm) -> weight_NT        float64 (a bool over an int would be float32); the loss is −Σ weight · gain
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_repro.types import Minibatch, Norm, variant


@variant(per_response=True)
def sequence_mean(b: Minibatch, norm: Norm, *, per: Literal["row", "group"] = "row") -> Tensor:
    r"""Mean over a response's tokens, then mean over responses.

    $$\frac1N\sum_i\frac1{|y_i|}\sum_t$$

    Source: DeepSeekMath (2402.03300), Eq. 3. With `per: group` the outer mean is over groups, then over a group's rows, as the paper's
    1/G: the same unless groups are ragged. |y_i| and N count what is in the loss (rows hidden by `overlong` do not count).
    Fixes: every response weighs the same. Costs: a token of a long response weighs less (length bias, Dr. GRPO).
    """
    if per == "row":
        return b.mask_NT.double() / (b.tokens_N1 * max(norm.live_rows, 1))
    rows = torch.tensor([max(norm.group_rows.get(g, 1), 1) for g in b.group_N.tolist()], device=b.mask_NT.device)
    return b.mask_NT.double() / (b.tokens_N1 * rows.unsqueeze(1) * max(norm.groups, 1))


@variant(per_token=True)
def token_mean(b: Minibatch, norm: Norm) -> Tensor:
    r"""Mean over all tokens of the batch.

    $$\frac{1}{\sum_i|y_i|}\sum_i\sum_t$$

    Source: DAPO (2503.14476), Eq. 8. The batch is the whole optimiser step, on all ranks.
    Fixes: every token weighs the same. Costs: long responses have more say; the step couples to the batch's total length.
    """
    return b.mask_NT.double() / float(max(norm.tokens, 1))


@variant()
def constant_length(b: Minibatch, norm: Norm) -> Tensor:
    r"""Sum over a response's tokens divided by a constant, then mean over responses.

    $$\frac1N\sum_i\frac1{L_{max}}\sum_t$$

    Source: Dr. GRPO (2503.20783). L_max is the response limit, whatever the padding.
    Fixes: a token's weight no longer depends on any length. Costs: the loss scales with 1/L_max.
    """
    return b.mask_NT.double() / float(max(norm.live_rows, 1) * norm.limit)


@variant()
def sequence_sum(b: Minibatch, norm: Norm) -> Tensor:
    r"""Sum over a response's tokens, then mean over responses: the log-probability of the whole response.

    $$\frac1N\sum_i\sum_t$$

    Source: RLOO (2402.14740); REINFORCE.
    Fixes: it is the unbiased policy gradient. Costs: its scale grows with length.
    """
    return b.mask_NT.double() / float(max(norm.live_rows, 1))


@variant(by_sign=True)
def balanced(b: Minibatch, norm: Norm) -> Tensor:
    r"""Token mean within the good and within the bad responses, each side weighted by its number of responses.

    $$\sum_{s\in\{+,-\}}\frac{N_s}{N_++N_-}\cdot\frac{1}{\sum_{i\in s}|y_i|}\sum_{i\in s}\sum_t$$

    Responses with Â = 0 are in neither, and their KL term is dropped with them. Needs one Â a response.
    Source: Balanced Aggregation (2605.04077).
    Fixes: token_mean couples sign and length (if bad responses are longer, they get more say). Costs: a side of one response is noisy.
    """
    (bad, _, good), (bad_tokens, _, good_tokens) = norm.sign_rows, norm.sign_tokens
    share = 1 / max(bad + good, 1)
    at_good, at_bad = good * share / max(good_tokens, 1), bad * share / max(bad_tokens, 1)
    sign_N1 = torch.sign(b.advantage)
    return b.mask_NT.double() * (at_good * (sign_N1 > 0).double() + at_bad * (sign_N1 < 0).double())
