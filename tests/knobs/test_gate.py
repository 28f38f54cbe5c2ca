"""② gates by hand: probabilities under the sampler and now, and the sign of Â."""

from __future__ import annotations

from functools import partial
from math import log
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import gate, resolve
from grpo_repro.types import Forward, UserError

#          raised .3  lowered .3  rare, raised 5-fold  still   rare, raised 60-fold
SAMPLER = [0.5, 0.5, 0.01, 0.5, 0.001]
NOW = [0.8, 0.2, 0.05, 0.5, 0.06]


def opened(function: Any, **more: Any) -> list[list[bool]]:
    """Row 0 with Â = 1, row 1 with Â = −1, row 2 with Â = 0."""
    p = torch.tensor([NOW] * 3, dtype=F64).log().requires_grad_()
    b = minibatch(
        [0] * 3, [0] * 3, [[1] * 5] * 3, advantage=[[1.0], [-1.0], [0.0]], sampler_NT=torch.tensor([SAMPLER] * 3).log(), **more
    )
    out = function(Forward(p), b)
    assert not out.requires_grad
    return out.tolist()


def test_dppo_tv() -> None:
    """|π − μ| ≤ .2 in the favourable direction: the first closes for Â>0, the second for Â<0; a rare token may move 60-fold."""
    up, down, none = opened(gate.dppo_tv)
    assert up == [False, True, True, True, True]
    assert down == [True, False, True, True, True]
    assert none == [True] * 5


def test_dppo_tv_has_two_sides() -> None:
    up, down, _ = opened(partial(gate.dppo_tv, eps_low=0.2, eps_high=0.31))
    assert (up[0], down[1]) == (True, False)
    up, down, _ = opened(partial(gate.dppo_tv, eps_low=0.31, eps_high=0.2))
    assert (up[0], down[1]) == (False, True)


def test_dppo_kl() -> None:
    """KL(Ber(μ)‖Ber(π)): ½ ln(.5/.8) + ½ ln(.5/.2) = .2231 (twice, by symmetry); .01 ln .2 + .99 ln(.99/.95) = .0247; 0;
    .001 ln(1/60) + .999 ln(.999/.94) = .0567: with .05 the last closes, where total variation (.059) is far from .2."""
    up, down, none = opened(gate.dppo_kl)
    assert up == [False, True, True, True, False]
    assert down == [True, False, True, True, True]
    assert none == [True] * 5


@pytest.mark.parametrize(
    ("eps", "last", "third"), [(0.0566, False, True), (0.0568, True, True), (0.0248, False, True), (0.0246, False, False)]
)
def test_dppo_kl_threshold(eps: float, last: bool, third: bool) -> None:
    up = opened(partial(gate.dppo_kl, eps=eps))[0]
    assert (up[4], up[2]) == (last, third)


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (1e-300, 0.5), (0.5, 1e-300)])
def test_dppo_kl_at_the_ends_is_a_decision(p: float, q: float) -> None:
    """0·log 0 = 0; what was impossible and became certain is closed."""
    b = minibatch([0], [0], [[1]], advantage=[[1.0]], sampler_NT=[[log(p)]])
    assert gate.dppo_kl(Forward(torch.tensor([[log(q)]], dtype=F64)), b).item() is (q <= p)


def test_off_policy() -> None:
    """Mean of log π_old − log π_θ: (.9 + .3)/2 = .6, (.9 + −.1)/2 = .4 (the masked token in between does not count), δ = .5."""
    gone = [[0.9, 9.0, 0.3], [0.9, 9.0, -0.1]] * 2
    b = minibatch([0] * 4, [0] * 4, [[1, 0, 1]] * 4, old_NT=gone, advantage=[[-1.0], [-1.0], [1.0], [0.0]])
    now = Forward(torch.zeros(4, 3, dtype=F64, requires_grad=True)).masked(b.mask_NT)
    out = gate.off_policy(now, b.masked(), delta=0.5)
    assert not out.requires_grad
    assert out.all(1).tolist() == [False, True, True, True]
    assert not out[0].any(), "the whole response"
    assert gate.off_policy(now, b.masked(), delta=0.61).all()


@pytest.mark.parametrize(
    "spec", [{"name": "dppo_tv", "eps_low": 0.0}, {"name": "dppo_kl", "eps": -1.0}, {"name": "off_policy", "delta": 0.0}]
)
def test_thresholds_out_of_range_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=list(spec)[1]):
        resolve("gate", spec)
