"""Random rollouts on which every framework can be asked: equal groups, padded rows of unequal length, flat groups, four policies.

Groups are of equal size and contiguous, masks have no holes, cut rows have exactly the limit's length: what all the peers can take.
(Only verl takes ragged groups and holes: see `kind`.)
Log-probs have a graph: for most peers they are the leaf; for Liger they come from hidden states and an output matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_repro.types import Minibatch

PAD, PROMPT, END = 0, 1, 2  # token ids; the response's other tokens are 3 and above
VOCABULARY, HIDDEN = 11, 6
GROUPS, SIZE, LIMIT = 6, 4, 12


@dataclass(frozen=True)
class Batch:
    """One rollout: its Minibatch (unscored), the tokens, and the current policy as a function of its leaves."""

    b: Minibatch
    response_NT: Tensor  # int64, padded with PAD
    leaves: tuple[Tensor, ...]
    logp: Callable[..., Tensor]  # leaves → logp_NT

    def rows(self, index_K: Tensor) -> Batch:
        """Some of the rows; the leaves stay whole, so that gradients of slices can be added up."""
        whole = self.logp
        return replace(self, b=self.b.rows(index_K), response_NT=self.response_NT[index_K], logp=lambda *x: whole(*x)[index_K])

    def fresh(self) -> tuple[list[Tensor], Tensor]:
        """New leaves with gradient, and the log-probs made of them."""
        leaves = [leaf.detach().clone().requires_grad_() for leaf in self.leaves]
        return leaves, self.logp(*leaves)


def rollout(seed: int, dtype: torch.dtype = torch.float64, kind: str = "off_policy", fused: bool = False) -> Batch:
    """`kind`: off_policy (now ≠ old ≠ sampler ≠ ref), on_policy (old = now), bypass (old = sampler), far (old and ref far away),
    far_bypass (both), singleton (the last row is a group of its own), ragged (groups of 2 to 6, shuffled; masks with holes).

    `fused`: the log-probs are those of a linear output layer, and its hidden states and weight are the leaves.
    """
    g = torch.Generator().manual_seed(seed)
    rows = GROUPS * SIZE
    r_N = (torch.rand(rows, generator=g, dtype=torch.float64) * 16).round() / 16  # exact in binary: equal means equal
    r_N[:SIZE] = 1.0  # flat groups, one all right and one all wrong
    r_N[SIZE : 2 * SIZE] = 0.0
    r_N[2 * SIZE : 3 * SIZE] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    cut_N = torch.rand(rows, generator=g) < 0.2
    length_N = torch.randint(1, LIMIT, (rows,), generator=g).masked_fill(cut_N, LIMIT)
    length_N[-1], cut_N[-1] = LIMIT, True
    mask_NT = torch.arange(LIMIT) < length_N.unsqueeze(1)
    response_NT = torch.randint(3, VOCABULARY, (rows, LIMIT), generator=g)
    response_NT[~cut_N, length_N[~cut_N] - 1] = END
    response_NT = response_NT.masked_fill(~mask_NT, PAD)

    hidden_NTD = torch.randn(rows, LIMIT, HIDDEN, generator=g, dtype=torch.float64)
    weight_VD = 0.6 * torch.randn(VOCABULARY, HIDDEN, generator=g, dtype=torch.float64)

    def linear(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).log_softmax(-1).gather(-1, response_NT.unsqueeze(-1)).squeeze(-1)

    now_NT = linear(hidden_NTD, weight_VD)

    def around(center_NT: Tensor, by: float) -> Tensor:
        noise_NT = torch.randn(rows, LIMIT, generator=g, dtype=torch.float64)
        return (center_NT + by * noise_NT).clamp(max=-1e-3).to(torch.float32).to(dtype)  # engines record float32

    far = kind.startswith("far")
    sampler_NT = around(now_NT, 1.5 if far else 0.4)
    old_NT = around(now_NT, 1.5 if far else 0.3)
    old_NT = sampler_NT if kind.endswith("bypass") else now_NT.to(dtype) if kind == "on_policy" else old_NT
    group_N = torch.arange(GROUPS).repeat_interleave(SIZE)
    if kind == "singleton":
        group_N[-1], r_N[-1] = GROUPS, 0.75
    if kind == "ragged":
        group_N = torch.repeat_interleave(torch.arange(GROUPS), torch.tensor([4, 2, 5, 3, 6, 4]))[
            torch.randperm(rows, generator=g)
        ]
        last_NT = torch.arange(LIMIT) == (length_N - 1).unsqueeze(1)
        mask_NT = mask_NT & ((torch.rand(rows, LIMIT, generator=g) < 0.8) | last_NT)
    b = Minibatch(
        mask_NT=mask_NT,
        r_N=r_N.to(dtype),
        group_N=group_N,
        length_N=length_N,
        cut_N=cut_N,
        limit=LIMIT,
        old_NT=old_NT,
        sampler_NT=sampler_NT,
        ref_NT=around(now_NT, 2.5 if far else 0.5),
        value_NT=torch.randn(rows, LIMIT, generator=g, dtype=torch.float64).to(dtype),
    )
    if fused:
        return Batch(b, response_NT, (hidden_NTD.to(dtype), weight_VD.to(dtype)), linear)
    return Batch(b, response_NT, (now_NT.to(dtype),), lambda logp_NT: logp_NT)


RATIO, HAND_LOSS, HAND_GRADIENT = (1.1, 0.9, 1.1, 0.9), -0.05, (-0.1375, 0.1125, -0.1375, 0.1125)


def anchor(dtype: torch.dtype = torch.float64, fused: bool = False) -> Batch:
    """Four answers of one token, r = 1, 0, 1, 0 and w = 1.1, .9, 1.1, .9: worked by hand, so that two equal mistakes are seen.

    Â = r − ½ = ±.5, every w inside ±.2, token mean: J = ¼·2·(1.1·.5 − .9·.5) = .05 and ∂J/∂log π = ¼·w·Â = (.1375, −.1125, …).
    """
    whole = rollout(0, dtype, fused=fused)
    row_K = torch.arange(SIZE)

    def logp(*leaves: Tensor) -> Tensor:
        return whole.logp(*leaves)[row_K, :1]

    now_NT = logp(*whole.leaves)
    b = Minibatch(
        mask_NT=torch.ones(SIZE, 1, dtype=torch.bool),
        r_N=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype),
        group_N=torch.zeros(SIZE, dtype=torch.int64),
        length_N=torch.ones(SIZE, dtype=torch.int64),
        cut_N=torch.zeros(SIZE, dtype=torch.bool),
        limit=1,
        old_NT=now_NT - torch.tensor(RATIO, dtype=dtype).log().unsqueeze(1),
        sampler_NT=now_NT,
        ref_NT=now_NT,
        value_NT=torch.zeros_like(now_NT),
    )
    return replace(whole, b=b, response_NT=whole.response_NT[row_K, :1], logp=logp)
