"""⑤ by hand: 2 rows × 4 tokens, d = log π_ref − log π_θ = 0, 1, −1, 5 and 20, 25, −25, .5; β = ½."""

from __future__ import annotations

from functools import partial
from math import exp
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import kl, resolve, variants
from grpo_repro.objective import Objective, score
from grpo_repro.types import Forward, UserError

D = [[0.0, 1.0, -1.0, 5.0], [20.0, 25.0, -25.0, 0.5]]


def value_and_slope(function: Any, **params: Any) -> tuple[list[float], list[float]]:
    logp_NT = torch.full((2, 4), -2.0, dtype=F64, requires_grad=True)
    b = minibatch([0, 0], [0, 0], [[1] * 4] * 2, ref_NT=torch.tensor(D, dtype=F64) - 2.0)
    value_NT = function(Forward(logp_NT), b, **params)
    slope_NT = torch.autograd.grad(value_NT.sum(), logp_NT)[0] if value_NT.requires_grad else torch.zeros(2, 4)
    return value_NT.flatten().tolist(), slope_NT.flatten().tolist()


def test_none() -> None:
    assert value_and_slope(kl.none) == ([0.0] * 8, [0.0] * 8)


def test_k1() -> None:
    """−βd, bounded at ±20; slope +β inside: to lower k1 is to lower log π."""
    value, slope = value_and_slope(kl.k1, beta=0.5)
    assert value == pytest.approx([0, -0.5, 0.5, -2.5, -10, -10, 10, -0.25])
    assert slope == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 0, 0, 0.5])


def test_k2() -> None:
    """βd²/2, slope −βd."""
    value, slope = value_and_slope(kl.k2, beta=0.5)
    assert value == pytest.approx([0, 0.25, 0.25, 6.25, 100, 100, 100, 0.0625])
    assert slope == pytest.approx([0, -0.5, 0.5, -2.5, -10, 0, 0, -0.25])


def test_k3() -> None:
    """β(e^d − 1 − d), slope β(1 − e^d); never negative."""
    value, slope = value_and_slope(kl.k3, beta=0.5)
    assert value == pytest.approx([0.5 * (exp(d) - 1 - d) for d in (0, 1, -1, 5, 20, 20, -20, 0.5)], rel=1e-12, abs=1e-15)
    inside = [0.5 * (1 - exp(d)) for d in (0, 1, -1, 5, 20)]
    assert slope == pytest.approx([*inside, 0, 0, 0.5 * (1 - exp(0.5))], rel=1e-12, abs=1e-15)
    assert min(value) >= 0


def test_k3_near_zero_keeps_its_digits() -> None:
    """d = 1e-4 in float32: d²/2 + d³/6 = 5.00017e-9; e^d − 1 − d by subtraction would be off by 1e-8 or more."""
    now = Forward(torch.tensor([[0.0]]))
    b = minibatch([0], [0], [[1]], dtype=torch.float32, ref_NT=[[1e-4]])
    assert kl.k3(now, b, beta=1.0).item() == pytest.approx(5.00017e-9, rel=0.05)


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf"), "1"])
def test_beta_out_of_range_is_refused(beta: Any) -> None:
    with pytest.raises(UserError, match="beta"):
        resolve("kl", {"name": "k3", "beta": beta})


def test_beta_has_no_default() -> None:
    with pytest.raises(UserError, match="beta"):
        resolve("kl", "k3")


def test_k3_unbiased() -> None:
    """w·k3 with w = π_θ/π_old = e^{.5} here: slope = w·k3 + w·(1 − e^d) = w·(k3 − (e^d − 1)) = −w·d; 0 beyond the bound of d but for w."""
    logp_NT = torch.full((2, 4), -2.0, dtype=F64, requires_grad=True)
    b = minibatch(
        [0, 0], [0, 0], [[1] * 4] * 2, ref_NT=torch.tensor(D, dtype=F64) - 2.0, old_NT=torch.full((2, 4), -2.5, dtype=F64)
    )
    value_NT = kl.k3_unbiased(Forward(logp_NT), b, beta=0.5)
    (slope_NT,) = torch.autograd.grad(value_NT.sum(), logp_NT)
    w, k3 = exp(0.5), [exp(d) - 1 - d for d in (0, 1, -1, 5, 20, 20, -20, 0.5)]
    assert value_NT.flatten().tolist() == pytest.approx([0.5 * w * v for v in k3], rel=1e-12)
    inside = [-0.5 * w * d for d in (0, 1, -1, 5)]
    assert slope_NT.flatten().tolist()[:4] == pytest.approx(inside, rel=1e-12, abs=1e-12)
    assert slope_NT.flatten().tolist()[5:7] == pytest.approx([0.5 * w * k3[5], 0.5 * w * k3[6]], rel=1e-12)


def test_forward() -> None:
    """β·sg[e^d]·d, slope −β·e^d: always to raise log π where the reference would have gone."""
    value, slope = value_and_slope(kl.forward, beta=0.5)
    bounded = (0, 1, -1, 5, 20, 20, -20, 0.5)
    assert value == pytest.approx([0.5 * exp(d) * d for d in bounded], rel=1e-12)
    assert slope == pytest.approx([-0.5 * exp(d) for d in (0, 1, -1, 5, 20)] + [0, 0, -0.5 * exp(0.5)], rel=1e-12)


def test_full_is_the_exact_kl_it_is_given() -> None:
    exact_NT = torch.tensor([[0.3, 0.7]], dtype=F64, requires_grad=True)
    value_NT = kl.full(Forward(torch.zeros(1, 2, dtype=F64), exact_kl_NT=exact_NT), minibatch([0], [0], [[1, 1]]), beta=0.5)
    assert value_NT.tolist() == [[0.15, 0.35]]
    assert torch.autograd.grad(value_NT.sum(), exact_NT)[0].tolist() == [[0.5, 0.5]]


def test_full_in_the_reward_is_refused_with_what_to_write() -> None:
    b = minibatch([1, 0], [0, 0], [[1]] * 2, old_NT=[[0.0]] * 2, ref_NT=[[0.0]] * 2)
    with pytest.raises(UserError, match=r"kl\.full.*in the reward write k1"):
        score(Objective(kl_in_reward=partial(kl.full, beta=0.1)), b)


@pytest.mark.parametrize("name", [n for n in variants("kl") if n != "none"])
def test_a_negative_beta_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"kl\.{name}\.beta"):
        resolve("kl", {"name": name, "beta": -1e-3})
