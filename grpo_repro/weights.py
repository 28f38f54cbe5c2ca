"""How the weights that draw may differ from the trainer's: the variants of `sampler.weights`, a controlled engine mismatch.

    variant(weight, index) -> weight      one parameter of the model; index = (seed, version of the weights, number of the parameter)

The copy that draws runs in the dtype that the variant returns. Matrices only are quantised or disturbed; norms and biases stay exact.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from grpo_repro.types import NonNegative, variant
from grpo_repro.uniform import NOISE, uniform

Bits = Annotated[int, Field(ge=2, le=16)]
Index = tuple[int, int, int]


@variant(exact=True)
def exact(weight: Tensor, index: Index) -> Tensor:
    """The trainer's weights themselves."""
    return weight


def bfloat16(weight: Tensor, index: Index) -> Tensor:
    """Rounded to bfloat16, and run in it, as most engines do."""
    return weight.to(torch.bfloat16)


def quantised(weight: Tensor, index: Index, *, bits: Bits = 4) -> Tensor:
    r"""Every row of a matrix on its own grid of 2^bits − 1 levels, symmetric about 0, rounded to the nearest.

    $$W' = s\,\mathrm{round}(W/s),\qquad s = \max|W_{row}| / (2^{bits-1}-1)$$
    """
    if weight.dim() < 2:
        return weight
    rows = weight.detach().float().flatten(1)
    step = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((rows / step.masked_fill(step == 0, 1.0)).round() * step).view_as(weight).to(weight.dtype)


def noise(weight: Tensor, index: Index, *, sigma: NonNegative = 0.01) -> Tensor:
    r"""Relative noise of standard deviation σ, indexed by the run's seed and the version of the weights: other noise after each sync.

    $$W' = W\,(1 + \sigma n),\qquad n \sim \mathcal N(0, 1)$$
    """
    if weight.dim() < 2:
        return weight
    seed, version, number = index
    generator = torch.Generator().manual_seed(int(uniform(seed, NOISE, version, number, 0, 0) * 2**53))
    n = torch.randn(weight.shape, generator=generator).to(weight.device)
    return (weight.float() * (1 + sigma * n)).to(weight.dtype)
