"""⑥ truncated responses: 3 rows × 4 tokens, the second cut at the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import minibatch

from grpo_repro.knobs import overlong, resolve
from grpo_repro.types import UserError

B = minibatch([1, 0.5, 0], [0, 0, 0], [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]], limit=4, cut_N=[False, True, False])


def test_keep() -> None:
    r_N, mask_NT = overlong.keep(B.r_N, B)
    assert r_N.tolist() == [1, 0.5, 0]
    assert torch.equal(mask_NT, B.mask_NT)


def test_mask() -> None:
    """The row leaves the loss; its reward stays, for the baseline."""
    r_N, mask_NT = overlong.mask(B.r_N, B)
    assert r_N.tolist() == [1, 0.5, 0]
    assert mask_NT.tolist() == [[True, True, False, False], [False] * 4, [True, False, True, False]]


def test_soft_penalty() -> None:
    """L_max 8, cache 4: nothing up to 4, then a quarter a token, −1 at 8; a row that was cut is −1 at any length; no mask changes."""
    length = [3, 4, 5, 7, 8, 8, 2]
    b = minibatch([1.0] * 7, [0] * 7, [[1] * n + [0] * (8 - n) for n in length], limit=8, cut_N=[False] * 5 + [True, True])
    r_N, mask_NT = overlong.soft_penalty(b.r_N, b, cache=4)
    assert r_N.tolist() == [1, 1, 0.75, 0.25, 0, 0, 0]
    assert torch.equal(mask_NT, b.mask_NT)


def test_soft_penalty_counts_tokens_present_not_tokens_in_the_loss() -> None:
    b = replace(minibatch([1.0], [0], [[1, 0, 0, 0, 0, 0, 1, 0]], limit=8), length_N=torch.tensor([7]))
    assert overlong.soft_penalty(b.r_N, b, cache=4)[0].tolist() == [0.25]


def test_a_cache_beyond_the_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"cache is 5.*at most 4 tokens"):
        overlong.soft_penalty(B.r_N, B, cache=5)
    with pytest.raises(UserError, match="cache"):
        resolve("overlong", {"name": "soft_penalty", "cache": 0})


def test_the_cache_is_a_fifth_of_the_limit_unless_said() -> None:
    """As DAPO's 4096 of 20480: here 2 of 10, and at least 1."""
    rows = [[1] * n + [0] * (10 - n) for n in (8, 9, 10)]
    b = minibatch([1.0] * 3, [0] * 3, rows, limit=10)
    assert overlong.soft_penalty(b.r_N, b)[0].tolist() == [1, 0.5, 0]
    assert overlong.soft_penalty(B.r_N, replace(B, limit=3))[0].tolist() == [1, -0.5, 0]
