"""④ by hand: 2 groups, rows of 2, 4 | 1 tokens in 4 columns and one row that is masked; L_max = 8."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import aggregation
from grpo_repro.types import Norm

B = minibatch([0] * 4, [0, 0, 1, 1], [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], limit=8)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (aggregation.sequence_mean, [1 / 3 / 2, 1 / 3 / 4, 1 / 3]),  # three live rows
        (
            partial(aggregation.sequence_mean, per="group"),
            [1 / 2 / 2 / 2, 1 / 2 / 2 / 4, 1 / 2],
        ),  # two groups, of two live rows and of one
        (aggregation.token_mean, [1 / 7] * 3),
        (aggregation.constant_length, [1 / 3 / 8] * 3),
        (aggregation.sequence_sum, [1 / 3] * 3),
    ],
)
def test_weights(function: Any, rows: list[float]) -> None:
    weight_NT = function(B, Norm.of(B))
    assert weight_NT.dtype == F64
    expected_NT = torch.tensor([*rows, 0.0], dtype=F64).unsqueeze(1) * B.mask_NT
    torch.testing.assert_close(weight_NT, expected_NT, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "function", [aggregation.sequence_mean, partial(aggregation.sequence_mean, per="group"), aggregation.token_mean]
)
def test_means_sum_to_one(function: Any) -> None:
    assert function(B, Norm.of(B)).sum().item() == pytest.approx(1, abs=1e-15)


def test_denominators_come_from_the_norm() -> None:
    """The same rows as a slice of a batch ten times the size."""
    norm = Norm(rows=40, live_rows=30, tokens=70, groups=20, limit=8, group_rows={0: 20, 1: 10})
    first = [
        function(B, norm)[0, 0].item()
        for function in (aggregation.sequence_mean, aggregation.token_mean, aggregation.constant_length, aggregation.sequence_sum)
    ]
    assert first == pytest.approx([1 / 30 / 2, 1 / 70, 1 / 30 / 8, 1 / 30], rel=1e-15)
    assert aggregation.sequence_mean(B, norm, per="group")[0, 0].item() == pytest.approx(1 / 20 / 20 / 2, rel=1e-15)


def test_norm_counts_what_is_in_the_loss() -> None:
    norm = Norm.of(B)
    assert (norm.rows, norm.live_rows, norm.tokens, norm.groups, norm.limit) == (4, 3, 7, 2, 8)
    assert norm.group_rows == {0: 2, 1: 1}


def test_balanced() -> None:
    """Good: rows of 2 and 4 tokens; bad: a row of 1; Â = 0: a row of 3; hidden: a bad row.
    The sides weigh ⅔ and ⅓, a token 1/6 of ⅔ and 1/1 of ⅓."""
    mask = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    b = minibatch([0] * 5, [0] * 5, mask, advantage=[[2.0], [0.1], [-3.0], [0.0], [-1.0]])
    norm = Norm.of(b)
    assert (norm.sign_rows, norm.sign_tokens) == ((1, 1, 2), (1, 3, 6))
    weight_NT = aggregation.balanced(b, norm)
    assert weight_NT.dtype == F64
    expected_NT = torch.tensor([1 / 9, 1 / 9, 1 / 3, 0.0, 0.0], dtype=F64).unsqueeze(1) * b.mask_NT
    torch.testing.assert_close(weight_NT, expected_NT, rtol=1e-15, atol=0)
    assert weight_NT.sum().item() == pytest.approx(1, abs=1e-15)


def test_balanced_is_token_mean_where_both_sides_are_equally_long() -> None:
    """Two good rows of 3, one bad row of 3: 1/9 a token, as in the token mean."""
    b = minibatch([0] * 3, [0] * 3, [[1, 1, 1]] * 3, advantage=[[1.0], [0.5], [-2.0]])
    torch.testing.assert_close(aggregation.balanced(b, Norm.of(b)), aggregation.token_mean(b, Norm.of(b)), rtol=1e-15, atol=0)


def test_balanced_with_one_side_or_none() -> None:
    b = minibatch([0] * 2, [0] * 2, [[1, 1], [1, 0]], advantage=[[1.0], [1.0]])
    assert aggregation.balanced(b, Norm.of(b)).sum().item() == pytest.approx(1)
    b = minibatch([0] * 2, [0] * 2, [[1, 1], [1, 0]], advantage=[[0.0], [0.0]])
    assert aggregation.balanced(b, Norm.of(b)).sum().item() == 0.0
