"""③ by hand: 2 groups × 4 rows: rewards 1, 0, 0, 0 and .5, .5, 0, 1."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import advantage

R = [1, 0, 0, 0, 0.5, 0.5, 0, 1]
GROUP = [5, 5, 5, 5, 1, 1, 1, 1]


def a_of(function: Any, r: list[float] = R, group: list[int] = GROUP, **more: Any) -> list[float]:
    out_N1 = function(minibatch(r, group, [[1]] * len(r), **more))
    assert out_N1.shape == (len(r), 1)
    return out_N1.squeeze(1).tolist()


def test_group_center() -> None:
    """Means .25 and .5."""
    assert a_of(advantage.group_center) == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0, -0.5, 0.5], abs=1e-15)


def test_leave_one_out() -> None:
    """Against the mean of the other three: 1 − 0, 0 − ⅓; .5 − .5, 0 − ⅔, 1 − ⅓."""
    assert a_of(advantage.leave_one_out) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, -2 / 3, 2 / 3], abs=1e-15)


def test_group_zscore() -> None:
    """Squares: .5625 + 3·.0625 = .75 and .25 + .25 = .5; ddof 1: √(.75/3) = .5 and √(.5/3); ddof 0: √(.75/4) and √(.5/4)."""
    for ddof in (0, 1):
        s1, s2 = sqrt(0.75 / (4 - ddof)) + 1e-4, sqrt(0.5 / (4 - ddof)) + 1e-4
        expected = [0.75 / s1, *[-0.25 / s1] * 3, 0, 0, -0.5 / s2, 0.5 / s2]
        assert a_of(partial(advantage.group_zscore, ddof=ddof)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("eps", "top"), [(1e-4, 1.4997), (1e-6, 1.499997), (0.0, 1.5)])
def test_group_zscore_under_each_framework_s_epsilon(eps: float, top: float) -> None:
    """[1, 0, 0, 0]: .75/(.5 + ε): TRL's 1e-4 is the default, verl's 1e-6."""
    assert a_of(partial(advantage.group_zscore, eps=eps), [1, 0, 0, 0], [0] * 4)[0] == pytest.approx(top, abs=2e-7)
    if eps == 1e-4:
        assert a_of(advantage.group_zscore, [1, 0, 0, 0], [0] * 4)[0] == pytest.approx(top, abs=2e-7)


@pytest.mark.parametrize("function", [advantage.group_center, advantage.leave_one_out, advantage.group_zscore])
def test_ragged_interleaved_groups(function: Any) -> None:
    """Rows of two groups (of 3 and of 2) in any order, with ids that are no indices: each group as if alone."""
    mixed = a_of(function, [1, 9, 0, 8, 0], [70, -3, 70, -3, 70])
    assert [mixed[0], mixed[2], mixed[4]] == pytest.approx(a_of(function, [1, 0, 0], [0] * 3), abs=1e-15)
    assert [mixed[1], mixed[3]] == pytest.approx(a_of(function, [9, 8], [0] * 2), abs=1e-15)


@pytest.mark.parametrize("function", [advantage.group_center, advantage.leave_one_out, advantage.group_zscore])
def test_a_kl_charged_to_the_reward_is_in_the_baseline(function: Any) -> None:
    """r = 1, 0 with penalties .1 + .2 and .4 + 0: the advantage is that of .7, −.4."""
    b = minibatch([1, 0], [0, 0], [[1, 1]] * 2, penalty_NT=[[0.1, 0.2], [0.4, 0.0]])
    assert function(b).squeeze(1).tolist() == pytest.approx(a_of(function, [0.7, -0.4], [0, 0]), rel=1e-12)


def test_a_flat_group_whose_penalty_differs_is_not_flat() -> None:
    """DESIGN §2.8: group_zscore × KL in the reward: a flat group gets ±.7 from the KL alone."""
    b = minibatch([1, 1], [0, 0], [[1]] * 2, penalty_NT=[[1e-2], [2e-2]])
    a = 0.005 / (0.01 / sqrt(2) + 1e-4)  # = .697
    assert advantage.group_zscore(b).squeeze(1).tolist() == pytest.approx([a, -a], rel=1e-9)


@pytest.mark.parametrize("function", [advantage.group_center, advantage.leave_one_out, advantage.group_zscore])
def test_nothing_kept_is_an_empty_advantage(function: Any) -> None:
    assert function(minibatch([0], [0], [[1]], dtype=F64).rows(torch.arange(0))).shape == (0, 1)
