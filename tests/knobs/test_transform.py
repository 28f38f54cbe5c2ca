"""③ transforms by hand: two interleaved groups and a row alone."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch

from grpo_repro.knobs import resolve, transform
from grpo_repro.types import UserError

GROUP = torch.tensor([4, 9, 4, 9, 4, 1])
R = torch.tensor([3.0, -1.0, 1.0, 7.0, 1.0, 5.0], dtype=torch.float64)


def test_none() -> None:
    assert torch.equal(transform.none(R, GROUP), R)


def test_rank() -> None:
    """Group 4: 3, 1, 1 → 2/2, (0 + ½)/2 twice; group 9: −1, 7 → 0, 1; a row alone: ½."""
    assert transform.rank(R, GROUP).tolist() == [1.0, 0.0, 0.25, 1.0, 0.25, 0.5]


def test_rank_sees_order_only_and_a_flat_group_stays_flat() -> None:
    assert torch.equal(transform.rank(R**3, GROUP), transform.rank(R, GROUP))
    assert transform.rank(torch.full((6,), 0.1), GROUP).tolist() == [0.5] * 6


def test_sigmoid() -> None:
    """(r − 1)/2 = 1, −1, 0, 3, 0, 2."""
    expected = [1 / (1 + exp(-x)) for x in (1, -1, 0, 3, 0, 2)]
    assert transform.sigmoid(R, GROUP, center=1.0, scale=2.0).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("params", [{"scale": 0.0}, {"center": float("nan")}])
def test_parameters_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(params))):
        resolve("transform", {"name": "sigmoid", **params})
