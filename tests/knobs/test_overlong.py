"""⑥ truncated responses: 3 rows × 4 tokens, the second cut at the limit."""

from __future__ import annotations

import torch
from batches import minibatch

from grpo_repro.knobs import overlong

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
