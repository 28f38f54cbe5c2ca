"""① by hand: 2 rows × 4 tokens. Δ = log π_θ − log π_old; the last two tokens of row 0 are masked and hold nonsense."""

from __future__ import annotations

import pytest
import torch
from batches import F64, minibatch
from torch import Tensor

from grpo_repro.knobs import ratio
from grpo_repro.types import Forward, Minibatch

DELTA = [[0.2, -0.4, 5.0, 5.0], [0.1, 0.1, 0.3, -0.1]]


def case(delta: list[list[float]] = DELTA, dtype: torch.dtype = F64) -> tuple[Forward, Minibatch]:
    b = minibatch([0, 0], [0, 0], [[1, 1, 0, 0], [1, 1, 1, 1]], dtype=dtype, old_NT=[[-1.0] * 4] * 2)
    logp_NT = (torch.tensor(delta, dtype=dtype) - 1).requires_grad_()
    return Forward(logp_NT).masked(b.mask_NT), b.masked()


def rows(x_NT: Tensor) -> tuple[list[float], list[float]]:
    """The unmasked tokens of the two rows."""
    return x_NT[0, :2].tolist(), x_NT[1].tolist()


def jacobian(function: object, token: tuple[int, int]) -> list[list[float]]:
    now, b = case()
    return torch.autograd.grad(function(now, b)[token], now.logp_NT)[0].tolist()  # type: ignore[operator]


def test_token() -> None:
    first, second = rows(ratio.token(*case()))
    assert first == pytest.approx([0.2, -0.4])
    assert second == pytest.approx([0.1, 0.1, 0.3, -0.1])
    assert jacobian(ratio.token, (1, 2)) == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_sequence() -> None:
    """(.2 − .4)/2 = −.1 over the two tokens that count; (.1 + .1 + .3 − .1)/4 = .1. Each token has 1/|y| of every gradient."""
    first, second = rows(ratio.sequence(*case()))
    assert first == pytest.approx([-0.1] * 2)
    assert second == pytest.approx([0.1] * 4)
    assert jacobian(ratio.sequence, (0, 1)) == [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]
    assert jacobian(ratio.sequence, (1, 0)) == [[0, 0, 0, 0], [0.25] * 4]


def test_sequence_token() -> None:
    """The values of `sequence`, the gradient of `token`."""
    first, second = rows(ratio.sequence_token(*case()))
    assert first == pytest.approx([-0.1] * 2)
    assert second == pytest.approx([0.1] * 4)
    assert jacobian(ratio.sequence_token, (1, 2)) == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_none() -> None:
    now, b = case()
    assert (ratio.none(now, b) == 0).all()
    assert jacobian(ratio.none, (0, 1)) == [[0, 1, 0, 0], [0, 0, 0, 0]]


def test_prefix() -> None:
    """Running sums: .2, −.2 and .1, .2, .5, .4; gradient of the token's own log π only."""
    first, second = rows(ratio.prefix(*case()))
    assert first == pytest.approx([0.2, -0.2])
    assert second == pytest.approx([0.1, 0.2, 0.5, 0.4])
    assert jacobian(ratio.prefix, (1, 3)) == [[0, 0, 0, 0], [0, 0, 0, 1]]


def test_prefix_jumps_over_a_hole() -> None:
    b = minibatch([0], [0], [[1, 0, 1]], old_NT=[[0.0, 0.0, 0.0]])
    now = Forward(torch.tensor([[0.1, 9.0, 0.2]], dtype=F64)).masked(b.mask_NT)
    assert ratio.prefix(now, b.masked())[0, 2].item() == pytest.approx(0.3)


@pytest.mark.parametrize("function", [ratio.token, ratio.sequence, ratio.sequence_token, ratio.prefix])
@pytest.mark.parametrize(("delta", "bound"), [(19.0, 19.0), (25.0, 20.0), (-25.0, -20.0)])
def test_bound(function: object, delta: float, bound: float) -> None:
    """Beyond ±20 the value stays there and the gradient is 0; inside neither is touched. One token, so all four are one."""
    b = minibatch([0], [0], [[1]], old_NT=[[0.0]])
    logp_NT = torch.tensor([[delta]], dtype=F64, requires_grad=True)
    logw_NT = function(Forward(logp_NT), b)  # type: ignore[operator]
    assert logw_NT.item() == bound
    assert torch.autograd.grad(logw_NT.sum(), logp_NT)[0].item() == (1.0 if abs(delta) < 20 else 0.0)


def test_nothing_is_rounded_away_in_float32() -> None:
    """Δ = 2⁻¹⁵ on one of three tokens at log π = −300 (one ulp there): s = 1.02e-5.
    Written s + log π − sg[log π] it would be 0."""
    b = minibatch([0], [0], [[1, 1, 1]], dtype=torch.float32, old_NT=[[-300.0] * 3])
    now = Forward(torch.tensor([[-300.0 + 2**-15, -300.0, -300.0]]))
    whole_NT = ratio.sequence(now, b)
    assert whole_NT[0].tolist() == pytest.approx([2**-15 / 3] * 3, rel=1e-6)
    assert torch.equal(ratio.sequence_token(now, b), whole_NT)
    assert ratio.prefix(now, b)[0].tolist() == [2**-15] * 3
