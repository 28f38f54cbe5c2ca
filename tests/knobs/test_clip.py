"""② by hand: 2 rows × 4 tokens, Â = +2 and −2, w = .5, 1, 1.25, 2 in both; ε_low = .2, ε_high = .3."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import clip, resolve
from grpo_repro.types import Forward, UserError

W = [0.5, 1.0, 1.25, 2.0]


def clipped(
    function: Any, w: list[float] = W, dtype: torch.dtype = F64
) -> tuple[list[list[float]], list[list[float]], list[list[bool]]]:
    """gain, ∂gain/∂log w, hit."""
    logw_NT = torch.tensor([w, w], dtype=dtype).log().requires_grad_()
    b = minibatch([0, 0], [0, 0], [[1] * len(w)] * 2, dtype=dtype, advantage=[[2.0], [-2.0]])
    gain_NT, hit_NT = function(logw_NT, Forward(logw_NT), b)
    (grad_NT,) = torch.autograd.grad(gain_NT.sum(), logw_NT)
    return gain_NT.tolist(), grad_NT.tolist(), hit_NT.tolist()


def test_none() -> None:
    gain, slope, hit = clipped(clip.none)
    assert gain[0] == pytest.approx([1, 2, 2.5, 4])
    assert gain[1] == pytest.approx([-1, -2, -2.5, -4])
    assert slope[0] == pytest.approx(gain[0])
    assert slope[1] == pytest.approx(gain[1])
    assert hit == [[False] * 4] * 2


def test_ppo() -> None:
    """Â>0: min(w, 1.3)·2 = 1, 2, 2.5, 2.6. Â<0: max(w, .8)·−2 = −1.6, −2, −2.5, −4. Gradient w·Â, or 0 where cut."""
    gain, slope, hit = clipped(partial(clip.ppo, eps_low=0.2, eps_high=0.3))
    assert gain[0] == pytest.approx([1, 2, 2.5, 2.6])
    assert gain[1] == pytest.approx([-1.6, -2, -2.5, -4])
    assert slope[0] == pytest.approx([1, 2, 2.5, 0])
    assert slope[1] == pytest.approx([0, -2, -2.5, -4])
    assert hit == [[False, False, False, True], [True, False, False, False]]


def test_the_sides_are_free() -> None:
    """Widening one leaves the other: with ε_high = 1 only the lower bound acts, with ε_low = .6 only the upper."""
    assert clipped(partial(clip.ppo, eps_low=0.2, eps_high=1.0))[2] == [[False] * 4, [True, False, False, False]]
    assert clipped(partial(clip.ppo, eps_low=0.6, eps_high=0.3))[2] == [[False, False, False, True], [False] * 4]


def test_a_side_that_is_null_has_no_bound() -> None:
    """At w = .5 and 2: only the upper, only the lower, neither (which is `none`)."""
    upper = clipped(partial(clip.ppo, eps_low=None, eps_high=0.3))
    assert upper[0] == [pytest.approx([1, 2, 2.5, 2.6]), pytest.approx([-1, -2, -2.5, -4])]
    assert upper[2] == [[False, False, False, True], [False] * 4]
    lower = clipped(partial(clip.ppo, eps_low=0.2, eps_high=None))
    assert lower[0] == [pytest.approx([1, 2, 2.5, 4]), pytest.approx([-1.6, -2, -2.5, -4])]
    assert lower[2] == [[False] * 4, [True, False, False, False]]
    assert clipped(partial(clip.ppo, eps_low=None, eps_high=None)) == clipped(clip.none)


def test_ppo_without_an_advantage_is_nothing() -> None:
    b = minibatch([0], [0], [[1, 1]], advantage=[[0.0]])
    gain_NT, hit_NT = clip.ppo(torch.tensor([[2.0, -2.0]], dtype=F64), Forward(torch.zeros(1, 2)), b)
    assert (gain_NT == 0).all()
    assert not hit_NT.any()


def test_an_advantage_a_token_is_clipped_a_token() -> None:
    """Â = +1, −1 in one row, w = 2, ½: both bounds act."""
    b = minibatch([0], [0], [[1, 1]], advantage=[[1.0, -1.0]])
    gain_NT, hit_NT = clip.ppo(
        torch.tensor([[2.0, 0.5]], dtype=F64).log(), Forward(torch.zeros(1, 2)), b, eps_low=0.25, eps_high=0.25
    )
    assert gain_NT.tolist() == [[1.25, -0.75]]
    assert hit_NT.tolist() == [[True, True]]


def test_float32_sees_the_width_of_gspo() -> None:
    """w = 1 ± 2e-4 passes and 1 ± 6e-4 is cut, at 3e-4 and 4e-4."""
    hit = clipped(partial(clip.ppo, eps_low=3e-4, eps_high=4e-4), [1 - 6e-4, 1 - 2e-4, 1 + 2e-4, 1 + 6e-4], torch.float32)[2]
    assert hit == [[False, False, False, True], [True, False, False, False]]


@pytest.mark.parametrize(
    ("params", "said"),
    [({"eps_low": 1.0}, "eps_low"), ({"eps_low": -0.1}, "eps_low"), ({"eps_high": -0.1}, "eps_high"), ({"eps": 0.2}, "eps")],
)
def test_widths_out_of_range_are_refused(params: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("clip", {"name": "ppo", **params})
