"""① correction by hand: 2 rows × 4 tokens, log ρ = log π_old − log μ. Row 0: ln 2, −ln 4; row 1: ln 3, 0, 0, ln 1.5."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import correction, resolve
from grpo_repro.types import UserError

LOG_RHO = [[log(2), -log(4), 7.0, 7.0], [log(3), 0.0, 0.0, log(1.5)]]


def rho(function: Any, **params: Any) -> list[list[float]]:
    old_NT = torch.tensor(LOG_RHO, dtype=F64)
    b = minibatch([0, 0], [0, 0], [[1, 1, 0, 0], [1, 1, 1, 1]], old_NT=old_NT, sampler_NT=torch.zeros_like(old_NT))
    out = function(b, **params)
    assert not out.requires_grad
    out = out.expand(2, 4).tolist()
    return [out[0][:2], out[1]]


def test_none() -> None:
    assert rho(correction.none) == [[1, 1], [1, 1, 1, 1]]


def test_truncate() -> None:
    """Token: min(2, C), .25 | min(3, C), 1, 1, 1.5. Sequence: 2·¼ | 3·1.5 = 4.5 → C. Geometric: √.5 = .70711 | 4.5^¼ = 1.4565."""
    first, second = rho(correction.truncate, w_max=1.8, level="token")
    assert first == pytest.approx([1.8, 0.25])
    assert second == pytest.approx([1.8, 1, 1, 1.5])
    first, second = rho(correction.truncate, w_max=2.0, level="sequence")
    assert first == pytest.approx([0.5] * 2)
    assert second == pytest.approx([2.0] * 4)
    first, second = rho(correction.truncate, w_max=2.0, level="geometric")
    assert first == pytest.approx([0.70711] * 2, abs=1e-5)
    assert second == pytest.approx([1.45648] * 4, abs=1e-5)


def test_mask() -> None:
    """The same weights, kept within the band and 0 outside it; its ends are in it."""
    first, second = rho(correction.mask, w_min=0.5, w_max=1.8, level="token")
    assert first == pytest.approx([0, 0])
    assert second == pytest.approx([0, 1, 1, 1.5])
    first, second = rho(correction.mask, w_min=0.0, w_max=2.0, level="sequence")
    assert first == pytest.approx([0.5] * 2)
    assert second == pytest.approx([0] * 4)
    first, second = rho(correction.mask, w_min=0.8, w_max=2.0, level="geometric")
    assert first == pytest.approx([0] * 2)
    assert second == pytest.approx([1.45648] * 4, abs=1e-5)
    first, second = rho(correction.mask, w_min=0.0, w_max=1.0, level="token")
    assert second[1:3] == [1, 1]


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"objective\.correction\.truncate\.level"):
        resolve("correction", {"name": "truncate", "level": "row"})


def test_default_is_that_of_tis() -> None:
    assert rho(correction.truncate) == rho(correction.truncate, w_max=2.0, level="token")


@pytest.mark.parametrize(
    ("params", "said"),
    [({"w_min": 3.0}, r"w_min is 3\.0 and w_max is 2\.0; w_min must not exceed w_max"), ({"w_min": -1.0}, "w_min")],
)
def test_a_band_that_holds_nothing_is_refused(params: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("correction", {"name": "mask", **params})
