"""② by hand: 2 rows × 4 tokens, Â = +2 and −2, w = .5, 1, 1.25, 2 in both; ε_low = .2, ε_high = .3."""

from __future__ import annotations

from functools import partial
from math import exp, log
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import clip, resolve
from grpo_repro.types import Forward, UserError

W = [0.5, 1.0, 1.25, 2.0]


def clipped(
    function: Any, w: list[float] = W, dtype: torch.dtype = F64
) -> tuple[list[list[float]], list[list[float]], list[list[bool]]]:
    """gain, ∂gain/∂log w, hit."""
    logw_NT = torch.tensor([w, w], dtype=dtype).log().requires_grad_()
    b = minibatch([0, 0], [0, 0], [[1] * len(w)] * 2, dtype=dtype, advantage=[[2.0], [-2.0]])
    gain_NT, hit_NT = function(logw_NT, Forward(logw_NT), b)
    (grad_NT,) = torch.autograd.grad(gain_NT.sum(), logw_NT)
    return gain_NT.tolist(), grad_NT.tolist(), hit_NT.tolist()


def test_none() -> None:
    gain, slope, hit = clipped(clip.none)
    assert gain[0] == pytest.approx([1, 2, 2.5, 4])
    assert gain[1] == pytest.approx([-1, -2, -2.5, -4])
    assert slope[0] == pytest.approx(gain[0])
    assert slope[1] == pytest.approx(gain[1])
    assert hit == [[False] * 4] * 2


def test_ppo() -> None:
    """Â>0: min(w, 1.3)·2 = 1, 2, 2.5, 2.6. Â<0: max(w, .8)·−2 = −1.6, −2, −2.5, −4. Gradient w·Â, or 0 where cut."""
    gain, slope, hit = clipped(partial(clip.ppo, eps_low=0.2, eps_high=0.3))
    assert gain[0] == pytest.approx([1, 2, 2.5, 2.6])
    assert gain[1] == pytest.approx([-1.6, -2, -2.5, -4])
    assert slope[0] == pytest.approx([1, 2, 2.5, 0])
    assert slope[1] == pytest.approx([0, -2, -2.5, -4])
    assert hit == [[False, False, False, True], [True, False, False, False]]


def test_the_sides_are_free() -> None:
    """Widening one leaves the other: with ε_high = 1 only the lower bound acts, with ε_low = .6 only the upper."""
    assert clipped(partial(clip.ppo, eps_low=0.2, eps_high=1.0))[2] == [[False] * 4, [True, False, False, False]]
    assert clipped(partial(clip.ppo, eps_low=0.6, eps_high=0.3))[2] == [[False, False, False, True], [False] * 4]


def test_a_side_that_is_null_has_no_bound() -> None:
    """At w = .5 and 2: only the upper, only the lower, neither (which is `none`)."""
    upper = clipped(partial(clip.ppo, eps_low=None, eps_high=0.3))
    assert upper[0] == [pytest.approx([1, 2, 2.5, 2.6]), pytest.approx([-1, -2, -2.5, -4])]
    assert upper[2] == [[False, False, False, True], [False] * 4]
    lower = clipped(partial(clip.ppo, eps_low=0.2, eps_high=None))
    assert lower[0] == [pytest.approx([1, 2, 2.5, 4]), pytest.approx([-1.6, -2, -2.5, -4])]
    assert lower[2] == [[False] * 4, [True, False, False, False]]
    assert clipped(partial(clip.ppo, eps_low=None, eps_high=None)) == clipped(clip.none)


def test_ppo_without_an_advantage_is_nothing() -> None:
    b = minibatch([0], [0], [[1, 1]], advantage=[[0.0]])
    gain_NT, hit_NT = clip.ppo(torch.tensor([[2.0, -2.0]], dtype=F64), Forward(torch.zeros(1, 2)), b)
    assert (gain_NT == 0).all()
    assert not hit_NT.any()


def test_an_advantage_a_token_is_clipped_a_token() -> None:
    """Â = +1, −1 in one row, w = 2, ½: both bounds act."""
    b = minibatch([0], [0], [[1, 1]], advantage=[[1.0, -1.0]])
    gain_NT, hit_NT = clip.ppo(
        torch.tensor([[2.0, 0.5]], dtype=F64).log(), Forward(torch.zeros(1, 2)), b, eps_low=0.25, eps_high=0.25
    )
    assert gain_NT.tolist() == [[1.25, -0.75]]
    assert hit_NT.tolist() == [[True, True]]


def test_float32_sees_the_width_of_gspo() -> None:
    """w = 1 ± 2e-4 passes and 1 ± 6e-4 is cut, at 3e-4 and 4e-4."""
    hit = clipped(partial(clip.ppo, eps_low=3e-4, eps_high=4e-4), [1 - 6e-4, 1 - 2e-4, 1 + 2e-4, 1 + 6e-4], torch.float32)[2]
    assert hit == [[False, False, False, True], [True, False, False, False]]


@pytest.mark.parametrize(
    ("params", "said"),
    [({"eps_low": 1.0}, "eps_low"), ({"eps_low": -0.1}, "eps_low"), ({"eps_high": -0.1}, "eps_high"), ({"eps": 0.2}, "eps")],
)
def test_widths_out_of_range_are_refused(params: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("clip", {"name": "ppo", **params})


def test_dual() -> None:
    """c = 1.5: Â<0 at w = 2 is floored at 1.5·(−2) = −3; everything else is `ppo`'s. Beyond c there is no gradient."""
    gain, slope, hit = clipped(partial(clip.dual, eps_low=0.2, eps_high=0.3, w_max=1.5))
    assert gain[0] == pytest.approx([1, 2, 2.5, 2.6])
    assert gain[1] == pytest.approx([-1.6, -2, -2.5, -3])
    assert slope[0] == pytest.approx([1, 2, 2.5, 0])
    assert slope[1] == pytest.approx([0, -2, -2.5, 0])
    assert hit == [[False, False, False, True], [True, False, False, True]]


def test_truncate() -> None:
    """sg[clip(w, .8, 1.25)]·Â·log π with log π = log w here: weights .8, 1, 1.25, 1.25 of either sign, and never no gradient."""
    gain, slope, hit = clipped(partial(clip.truncate, w_min=0.8, w_max=1.25))
    assert slope[0] == pytest.approx([1.6, 2, 2.5, 2.5])
    assert slope[1] == pytest.approx([-1.6, -2, -2.5, -2.5])
    assert gain[0] == pytest.approx([1.6 * log(0.5), 0, 2.5 * log(1.25), 2.5 * log(2)])
    assert hit[0] == hit[1]
    assert (hit[0][0], hit[0][1], hit[0][3]) == (True, False, True)  # w = 1.25 is at the bound, up to rounding


def test_gmpo() -> None:
    """Two responses of three tokens, log w = (.1, 1, −1), ε = .4. Â = +2: (.1, .4, −1), mean −1/6; Â = −1: (.1, 1, −.4), mean .7/3.
    Gain e^mean·Â at every token. Its slope under sequence_mean (Σ_t/3 of the row's gain): e^mean·Â/3 for each token that is not bounded."""
    logw_NT = torch.tensor([[0.1, 1.0, -1.0]] * 2, dtype=torch.float64, requires_grad=True)
    b = minibatch([0, 0], [0, 0], [[1, 1, 1]] * 2, advantage=torch.tensor([[2.0], [-1.0]], dtype=torch.float64))
    gain_NT, hit_NT = clip.gmpo(logw_NT, Forward(logw_NT), b)
    up, down = 2 * exp(-1 / 6), -exp(0.7 / 3)
    assert gain_NT.tolist() == [pytest.approx([up] * 3), pytest.approx([down] * 3)]
    assert hit_NT.tolist() == [[False, True, False], [False, False, True]]
    (gain_NT / 3).sum().backward()
    assert logw_NT.grad is not None
    assert logw_NT.grad.tolist() == [pytest.approx([up / 3, 0, up / 3]), pytest.approx([down / 3, down / 3, 0])]


def test_soft_sigmoid() -> None:
    """(4/τ)·σ(τ(w−1))·Â, τ = 1 for Â>0, 2 for Â<0: σ(−½) = .37754, σ(¼) = .56218, σ(1) = .73106 | σ(−1) = .26894, σ(½) = .62246,
    σ(2) = .88080. Slope 4·w·σ(1−σ)·Â: the on-policy 2 at w = 1."""
    gain, slope, hit = clipped(partial(clip.soft_sigmoid, tau_pos=1.0, tau_neg=2.0))
    assert gain[0] == pytest.approx([8 * 0.377541, 4, 8 * 0.562177, 8 * 0.731059], abs=1e-5)
    assert gain[1] == pytest.approx([-4 * 0.268941, -2, -4 * 0.622459, -4 * 0.880797], abs=1e-5)
    assert slope[0] == pytest.approx([8 * 0.5 * 0.235004, 2, 8 * 1.25 * 0.246134, 8 * 2 * 0.196612], abs=1e-5)
    assert slope[1] == pytest.approx([-8 * 0.5 * 0.196612, -2, -8 * 1.25 * 0.235004, -8 * 2 * 0.104994], abs=1e-5)
    assert hit == [[False] * 4] * 2


def test_soft_tanh() -> None:
    """τ = 2: tanh(2 ln w) = (w²−w⁻²)/(w²+w⁻²): −15/17, 0, .41884, 15/17; gain (1 + tanh/2)Â, slope (1 − tanh²)Â: alike in w and 1/w."""
    gain, slope, hit = clipped(partial(clip.soft_tanh, tau=2.0))
    t = [-15 / 17, 0, (1.5625 - 0.64) / (1.5625 + 0.64), 15 / 17]
    assert gain[0] == pytest.approx([2 + v for v in t])
    assert gain[1] == pytest.approx([-2 - v for v in t])
    assert slope[0] == pytest.approx([2 * (1 - v * v) for v in t])
    assert slope[1] == pytest.approx([-2 * (1 - v * v) for v in t])
    assert slope[0][0] == pytest.approx(2 * 64 / 289)
    assert hit == [[False] * 4] * 2


def test_kl_penalty() -> None:
    """β = ½: w·Â − ½(w − 1 − ln w), slope w·Â − ½(w − 1): it pulls back to w = 1 from either side, whatever Â."""
    gain, slope, hit = clipped(partial(clip.kl_penalty, beta=0.5, target=0.01))
    paid = [0.5 * (w - 1 - log(w)) for w in W]
    assert gain[0] == pytest.approx([1 - paid[0], 2, 2.5 - paid[2], 4 - paid[3]])
    assert gain[1] == pytest.approx([-1 - paid[0], -2, -2.5 - paid[2], -4 - paid[3]])
    assert slope[0] == pytest.approx([1.25, 2, 2.5 - 0.125, 3.5])
    assert slope[1] == pytest.approx([-0.75, -2, -2.5 - 0.125, -4.5])
    assert hit == [[False] * 4] * 2


def test_kl_penalty_reads_its_state() -> None:
    gain, _, _ = clipped(partial(clip.kl_penalty, beta=0.5, target=0.01, state={"beta": 2.0}))
    assert gain[0][3] == pytest.approx(4 - 2 * (1 - log(2)))


def test_kl_penalty_near_one_keeps_its_digits() -> None:
    """w − 1 − ln w at ln w = 1e-4 in float32 is 5.00017e-9; by subtraction it would be off by 1e-8."""
    logw_NT = torch.tensor([[1e-4]])
    b = minibatch([0], [0], [[1]], dtype=torch.float32, advantage=[[0.0]])
    gain_NT, _ = clip.kl_penalty(logw_NT, Forward(logw_NT), b, beta=1.0)
    assert -gain_NT.item() == pytest.approx(5.00017e-9, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "dual", "w_max": 1.2}, r"dual: w_max \(c\) is 1\.2.*exceed 1 \+ eps_high = 1\.2"),
        ({"name": "dual", "eps_high": 3.0, "w_max": 3.0}, r"exceed 1 \+ eps_high = 4"),
        ({"name": "dual", "eps_high": None, "w_max": 1.0}, r"exceed 1 \+ eps_high = 1"),
        ({"name": "truncate", "w_min": 2.0, "w_max": 1.5}, r"w_min is 2\.0 and w_max is 1\.5; w_min must not exceed w_max"),
        ({"name": "truncate", "w_min": -0.1}, "w_min"),
        ({"name": "soft_sigmoid", "tau_neg": 0.0}, "tau_neg"),
        ({"name": "soft_tanh", "tau": -1.0}, "tau"),
        ({"name": "kl_penalty", "beta": 0.0}, "beta"),
        ({"name": "kl_penalty", "target": 0.0}, "target"),
        ({"name": "kl_penalty", "state": {"beta": 1.0}}, "unknown parameter 'state'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("clip", spec)


def test_dual_just_outside_the_region_is_allowed() -> None:
    resolve("clip", {"name": "dual", "eps_high": 0.28, "w_max": 1.3})
    resolve("clip", {"name": "truncate", "w_min": 1.0, "w_max": 1.0})
