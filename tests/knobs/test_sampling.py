"""⑥ which groups: 3 groups by hand."""

from __future__ import annotations

import pytest
import torch

from grpo_repro.knobs import resolve, sampling, traits
from grpo_repro.types import UserError

GROUP = torch.tensor([9, 4, 9, 4, 7, 4])
R = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.5])  # 9: 1, 1 (flat) · 4: 0, 0, .5 (mixed) · 7: a single row (flat)


def test_all() -> None:
    assert sampling.all(R, GROUP).tolist() == [True] * 6


def test_drop_zero_variance() -> None:
    assert sampling.drop_zero_variance(R, GROUP).tolist() == [False, True, False, True, False, True]


def test_all_right_and_all_wrong_are_both_flat() -> None:
    assert not sampling.drop_zero_variance(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).any()


def test_rewards_whose_mean_rounds_are_flat_all_the_same() -> None:
    """Three times .1: a variance computed from the rounded mean is 1e-34, not 0."""
    for r in (0.1, 0.95, 1e6 / 3):
        assert not sampling.drop_zero_variance(torch.full((3,), r, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)).any()


def test_negative_rewards_and_the_smallest_difference() -> None:
    r = torch.tensor([-2.0, -2.0, -1.0, torch.nextafter(torch.tensor(-1.0), torch.tensor(0.0)).item()])
    assert sampling.drop_zero_variance(r, torch.tensor([0, 0, 1, 1])).tolist() == [False, False, True, True]


def test_dynamic_keeps_mixed_groups_and_asks_for_more() -> None:
    """What is kept is drop_zero_variance's; that the loop redraws is a trait."""
    assert sampling.dynamic(R, GROUP).tolist() == sampling.drop_zero_variance(R, GROUP).tolist()
    assert "resample" in traits(sampling.dynamic)
    assert "resample" not in traits(sampling.drop_zero_variance)
    with pytest.raises(UserError, match="max_batches"):
        resolve("sampling", {"name": "dynamic", "max_batches": 0})
