"""What needs no training: the objective's own functions on a handful of numbers, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_repro.knobs import ratio
from grpo_repro.types import Forward, Minibatch

Clip = Callable[[Tensor, Forward, Minibatch], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cell:
    """One token under a clip: the gain's value, its derivative by log π_θ, and the derivative without any clip, w·Â."""

    w: float
    advantage: float
    gain: float
    gradient: float
    unclipped: float

    @property
    def passes(self) -> bool:
        return self.gradient != 0.0

    def __str__(self) -> str:
        kept = "" if self.unclipped == 0 else f"\nof an unclipped {self.unclipped:+.3g}"
        return f"gain {self.gain:+.3g}\ngradient {self.gradient:+.3g}{kept}"


def cells(clip: Clip, ws: Sequence[float], advantages: Sequence[float]) -> list[list[Cell]]:
    """The seed's matrix for any clip: a row an advantage, a column a ratio w."""
    return [[_cell(clip, w, advantage) for w in ws] for advantage in advantages]


def _cell(clip: Clip, w: float, advantage: float) -> Cell:
    logp_NT = torch.full((1, 1), w, dtype=torch.float64).log().requires_grad_(True)
    one = torch.ones(1, dtype=torch.int64)
    b = Minibatch(
        mask_NT=torch.ones(1, 1, dtype=torch.bool),
        r_N=torch.zeros(1, dtype=torch.float64),
        group_N=one,
        length_N=one,
        cut_N=torch.zeros(1, dtype=torch.bool),
        limit=1,
        old_NT=torch.zeros(1, 1, dtype=torch.float64),
        advantage=torch.full((1, 1), advantage, dtype=torch.float64),
    )
    now = Forward(logp_NT)
    gain_NT, _ = clip(ratio.token(now, b), now, b)
    (gradient_NT,) = torch.autograd.grad(gain_NT.sum(), logp_NT)
    return Cell(w, advantage, float(gain_NT.detach()), float(gradient_NT), w * advantage)
