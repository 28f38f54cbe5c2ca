"""Identities that hold exactly, by enumeration and quadrature, through the package's own score() and loss(): no sampling.

Printed numbers are those of the sources: Schulman's note for the estimators' values, CLAIMS A2 to A13 for the rest. `errata` are what
other code does (CLAIMS Part E), written here as functions that fit the same slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from batches import F64, minibatch, on_policy, random_batch, value_and_gradient
from torch import Tensor

from grpo_repro import exact, knobs
from grpo_repro.knobs import advantage, aggregation, clip, correction, kl, ratio
from grpo_repro.objective import Objective, loss, score
from grpo_repro.types import Forward, Minibatch, Norm


def normal(x: float) -> float:
    """Φ"""
    return 0.5 * math.erfc(-x / math.sqrt(2))


# ---- A1: the values of k1, k2, k3 (Schulman, joschu.net/blog/kl-approx.html) ----


def under_normal(shift: float, estimator: Callable[..., Tensor]) -> tuple[float, float]:
    """Mean and standard deviation of an estimator of KL(N(0,1) ‖ N(shift,1)) under x ~ N(0,1), by Gauss-Hermite quadrature."""
    x, weight = np.polynomial.hermite_e.hermegauss(60)
    weight = torch.tensor(weight / weight.sum())
    logp_NT = torch.tensor(-0.5 * x**2).unsqueeze(0)
    ref_NT = torch.tensor(-0.5 * (x - shift) ** 2).unsqueeze(0)
    b = minibatch([0], [0], [[1] * len(x)], ref_NT=ref_NT)
    value_NT = estimator(Forward(logp_NT), b, beta=1.0)
    mean = (weight * value_NT).sum()
    return mean.item(), (weight * (value_NT - mean) ** 2).sum().sqrt().item()


@pytest.mark.parametrize(
    ("shift", "estimator", "printed_bias", "printed_std", "exact_bias", "exact_std"),
    [
        # relative to the true KL m = shift²/2; d = log p − log q ~ N(−m, shift²)
        (0.1, kl.k1, 0, 20, 0, 2 / 0.1),  # std(d) = shift
        (1.0, kl.k1, 0, 2, 0, 2.0),
        (0.1, kl.k2, 0.002, 1.42, 0.1**2 / 4, math.sqrt(2 + 0.1**2)),  # E d²/2 = m + m²/2; Var d² = 2·shift⁴ + 4m²·shift²
        (1.0, kl.k2, 0.25, 1.73, 0.25, math.sqrt(3)),
        (0.1, kl.k3, 0, 1.42, 0, math.sqrt(math.expm1(0.01) - 0.01) / 0.005),  # E e^d = 1, Cov(e^d, d) = shift²
        (1.0, kl.k3, 0, 1.70, 0, math.sqrt(math.e - 2) / 0.5),
    ],
)
def test_a1_values_of_the_estimators(
    shift: float, estimator: Any, printed_bias: float, printed_std: float, exact_bias: float, exact_std: float
) -> None:
    true = shift**2 / 2
    mean, std = under_normal(shift, estimator)
    assert mean / true - 1 == pytest.approx(exact_bias, abs=1e-8)
    assert std / true == pytest.approx(exact_std, rel=1e-6)
    assert mean / true - 1 == pytest.approx(printed_bias, abs=1e-3)  # the note's were sampled
    assert std / true == pytest.approx(printed_std, abs=6e-3)


# ---- A2: their gradients, on tabular softmax policies ----

V = 8


def tabular(seed: int, scale: float, *shape: int) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def expected_gradient(objective: Objective, theta_V: Tensor, ref_V: Tensor, old_V: Tensor | None = None) -> Tensor:
    """E_{y~π_old} ∇_θ loss(y) for one-token responses without reward: each of the V once, alone, weighted by its probability."""
    theta_V = theta_V.clone().requires_grad_()
    logp_V, ref_V = torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0)
    old_V = logp_V.detach() if old_V is None else torch.log_softmax(old_V, 0)
    exact_NT = (logp_V.exp() * (logp_V - ref_V)).sum().reshape(1, 1)
    total = torch.zeros((), dtype=F64)
    for v in range(V):
        logp_NT = logp_V[v].reshape(1, 1)
        b = minibatch([0.0], [0], [[1]], old_NT=old_V[v].reshape(1, 1), ref_NT=ref_V[v].reshape(1, 1))
        b = score(objective, b).b
        value, _ = loss(objective, Forward(logp_NT, exact_kl_NT=exact_NT), b, Norm.of(b))
        total = total + old_V[v].exp() * value
    return torch.autograd.grad(total, theta_V)[0]


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "KL(π‖ref)": lambda p, q: (p.exp() * (p - q)).sum(),
    "KL(ref‖π)": lambda p, q: (q.exp() * (q - p)).sum(),
    "χ²(π‖ref)": lambda p, q: (p.exp() ** 2 / q.exp()).sum() - 1,
}


def gradient_of(divergence: str, theta_V: Tensor, ref_V: Tensor) -> Tensor:
    theta_V = theta_V.clone().requires_grad_()
    value = DIVERGENCES[divergence](torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0))
    return torch.autograd.grad(value, theta_V)[0]


def inverted_k3(now: Forward, b: Minibatch) -> Tensor:
    """Erratum E1: rlhf-book's approx_kl3, with log π − log π_ref in the place of its negative."""
    d_NT = now.logp_NT - b.ref_NT
    return torch.expm1(d_NT) - d_NT


# No baseline, so that the expectation over single responses is the whole story.
PLAIN = Objective(
    ratio=ratio.token, clip=clip.none, advantage=lambda b: b.return_N.unsqueeze(1), aggregation=aggregation.sequence_sum
)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("anchor", [ratio.token, ratio.sequence, ratio.none])
def test_a2_gradients_of_the_estimators(scale: float, anchor: Any) -> None:
    theta_V, ref_V = tabular(1, scale, V), tabular(2, scale, V)
    reverse, forward, chi2 = (gradient_of(name, theta_V, ref_V) for name in DIVERGENCES)
    assert (reverse - forward).norm() > 1e-3, "the pair tells them apart"
    base = replace(PLAIN, ratio=anchor)

    def gradient(**slots: Any) -> Tensor:
        return expected_gradient(replace(base, **slots), theta_V, ref_V)

    close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    close(gradient(kl=partial(kl.k1, beta=1.0)), torch.zeros(V, dtype=F64))  # in the loss: nothing but noise
    close(gradient(kl=partial(kl.k2, beta=1.0)), reverse)
    close(gradient(kl=partial(kl.k3, beta=1.0)), forward)  # the *forward* KL(π_ref‖π_θ)
    close(gradient(kl_in_reward=partial(kl.k1, beta=1.0)), reverse)  # and descends it (CLAIMS A13)
    close(gradient(kl=partial(kl.k2, beta=0.5), kl_in_reward=partial(kl.k1, beta=0.25)), 0.75 * reverse)
    close(gradient(kl=partial(kl.k3_unbiased, beta=1.0)), reverse)  # w·k3 with a differentiable w
    close(gradient(kl=partial(kl.forward, beta=1.0)), forward)  # by its name what k3 does
    close(gradient(kl=partial(kl.full, beta=1.0)), reverse)  # of the one state there is
    close(gradient(kl=inverted_k3), chi2 / 2)


@pytest.mark.parametrize("anchor", [ratio.token, ratio.sequence, ratio.none])
def test_a2_off_policy_only_the_weighted_k3_is_the_kl_it_names(anchor: Any) -> None:
    """Drawn from π_old ≠ π_θ: w·k3 is exact whatever knob ① is; plain k2 and k3 are the gradient of nothing named here."""
    theta_V, ref_V, old_V = tabular(1, 1.0, V), tabular(2, 1.0, V), tabular(3, 1.0, V)
    base = replace(PLAIN, ratio=anchor)
    reverse, forward, _ = (gradient_of(name, theta_V, ref_V) for name in DIVERGENCES)

    def gradient(estimator: Any) -> Tensor:
        return expected_gradient(replace(base, kl=partial(estimator, beta=1.0)), theta_V, ref_V, old_V)

    torch.testing.assert_close(gradient(kl.k3_unbiased), reverse, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient(kl.full), reverse, rtol=0, atol=1e-10)
    for estimator in (kl.k2, kl.k3, kl.forward):
        assert min((gradient(estimator) - exact_V).norm() for exact_V in (reverse, forward)) > 0.05
    assert gradient(kl.k1).norm() > 0.05, "off-policy k1 in the loss is not even 0"


def test_the_value_of_the_inverted_k3_is_not_the_kl() -> None:
    """E1: χ² − KL: 1.010 KL at a mean shift of .1, 2.44 KL at 1 (x ~ N(0,1), ref N(shift,1): χ² = e^{shift²} − 1)."""
    for shift, printed in ((0.1, 1.010), (1.0, 2.44)):
        value, _ = under_normal(shift, lambda now, b, beta: inverted_k3(now, b))
        assert value == pytest.approx(math.expm1(shift**2) - shift**2 / 2, rel=1e-6)
        assert value / (shift**2 / 2) == pytest.approx(printed, abs=5e-3)


def test_a13_a_kl_with_the_wrong_sign_in_the_reward_climbs() -> None:
    """E1c: approx_kl1 = −(log π − log π_ref), charged to the reward: the update is +∇KL; ours descends at the same step sizes."""
    theta_V, ref_V = tabular(1, 1.0, V), tabular(2, 1.0, V)

    def kl_of(theta_V: Tensor) -> float:
        return float(DIVERGENCES["KL(π‖ref)"](torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0)))

    def wrong(now: Forward, b: Minibatch) -> Tensor:
        return b.ref_NT - now.logp_NT

    wrong.needs = frozenset({"ref"})  # type: ignore[attr-defined]
    up_V = -expected_gradient(replace(PLAIN, kl_in_reward=wrong), theta_V, ref_V)
    down_V = -expected_gradient(replace(PLAIN, kl_in_reward=partial(kl.k1, beta=1.0)), theta_V, ref_V)
    torch.testing.assert_close(up_V, gradient_of("KL(π‖ref)", theta_V, ref_V), rtol=0, atol=1e-10)
    torch.testing.assert_close(down_V, -up_V, rtol=0, atol=1e-10)
    climbed = [kl_of(theta_V + step * up_V) for step in (0.0, 0.1, 0.5, 1.0)]
    fallen = [kl_of(theta_V + step * down_V) for step in (0.0, 0.1, 0.5, 1.0)]
    assert climbed == sorted(climbed)
    assert climbed[-1] > 1.05 * climbed[0]
    assert fallen == sorted(fallen, reverse=True)


# ---- two tokens, V2 × V2 sequences: sums over tokens, groups, and a sampler that is not the trainer ----

V2 = 3
SEQUENCES = list(itertools.product(range(V2), repeat=2))


def sequence_logp(first_V: Tensor, second_VV: Tensor) -> Tensor:
    """log π of each sequence's two tokens, as rows."""
    first, second = torch.log_softmax(first_V, 0), torch.log_softmax(second_VV, 1)
    return torch.stack([torch.stack([first[i], second[i, j]]) for i, j in SEQUENCES])


def true_gradient(theta: tuple[Tensor, Tensor], reward: Callable[[Tensor], Tensor]) -> Tensor:
    """−∇ E_π[reward], the reward given the sequences' log-probs (in which it may be a function: KL)."""
    leaves = [x.clone().requires_grad_() for x in theta]
    logp_NT = sequence_logp(*leaves)
    value = -(logp_NT.sum(1).exp() * reward(logp_NT)).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, leaves)])


def enumerated(
    objective: Objective, theta: tuple[Tensor, Tensor], reward_N: Tensor, sampler_NT: Tensor, ref_NT: Tensor, group: int
) -> Tensor:
    """E ∇loss over every group of `group` sequences drawn from the sampler, with old = now."""
    leaves = [x.clone().requires_grad_() for x in theta]
    logp_NT = sequence_logp(*leaves)
    total = torch.zeros((), dtype=F64)
    for rows in itertools.product(range(len(SEQUENCES)), repeat=group):
        k = torch.tensor(rows)
        b = minibatch(
            reward_N[k].tolist(),
            [0] * group,
            [[1, 1]] * group,
            old_NT=logp_NT.detach()[k],
            sampler_NT=sampler_NT[k],
            ref_NT=ref_NT[k],
        )
        b = score(objective, b).b
        value, _ = loss(objective, Forward(logp_NT[k]), b, Norm.of(b))
        total = total + sampler_NT[k].sum().exp() * value
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, leaves)])


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    theta = (tabular(3, 1.0, V2), tabular(4, 1.0, V2, V2))
    ref_NT = sequence_logp(tabular(5, 1.0, V2), tabular(6, 1.0, V2, V2))
    reward_N = tabular(7, 1.0, len(SEQUENCES))
    return {"theta": theta, "ref_NT": ref_NT, "reward_N": reward_N, "now_NT": sequence_logp(*theta)}


def test_k1_in_the_reward_is_the_kl_of_whole_responses(world: dict[str, Any]) -> None:
    objective = replace(PLAIN, kl_in_reward=partial(kl.k1, beta=0.7))
    right = true_gradient(world["theta"], lambda logp_NT: world["reward_N"] - 0.7 * (logp_NT - world["ref_NT"]).sum(1))
    mine = enumerated(objective, world["theta"], world["reward_N"], world["now_NT"], world["ref_NT"], group=1)
    torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize(
    ("baseline", "scalar"), [(advantage.leave_one_out, lambda g: 1.0), (advantage.group_center, lambda g: (g - 1) / g)]
)
def test_group_baselines_give_the_policy_gradient(world: dict[str, Any], baseline: Any, scalar: Any, group: int) -> None:
    """RLOO is unbiased; the group mean, which contains the sample itself, gives (G−1)/G of it."""
    objective = replace(PLAIN, advantage=baseline)
    right = true_gradient(world["theta"], lambda _: world["reward_N"])
    mine = enumerated(objective, world["theta"], world["reward_N"], world["now_NT"], world["ref_NT"], group)
    torch.testing.assert_close(mine, scalar(group) * right, rtol=0, atol=1e-12)


def test_correction_undoes_a_sampler_whose_weights_changed_between_tokens(world: dict[str, Any]) -> None:
    """Token 1 drawn under one set of weights, token 2 under another: the product of π_old/μ is exact, per token it is not."""
    drawn_NT = torch.stack(
        [
            sequence_logp(world["theta"][0] + tabular(8, 0.5, V2), world["theta"][1])[:, 0],
            sequence_logp(world["theta"][0], world["theta"][1] + tabular(9, 0.5, V2, V2))[:, 1],
        ],
        dim=1,
    )
    right = true_gradient(world["theta"], lambda _: world["reward_N"])

    def error(chosen: Any) -> float:
        mine = enumerated(replace(PLAIN, correction=chosen), world["theta"], world["reward_N"], drawn_NT, world["ref_NT"], 1)
        return float((mine - right).abs().max())

    assert error(partial(correction.truncate, w_max=1e6, level="sequence")) < 1e-12
    assert error(correction.none) > 1e-2
    assert error(partial(correction.truncate, w_max=1e6, level="token")) > 1e-2


def test_a_uniformly_wrong_sampler_of_one_token_is_corrected_at_every_level(world: dict[str, Any]) -> None:
    """With |y| = 1 the three levels are one."""
    old_NT, sampler_NT = tabular(1, 1.0, 5, 1), tabular(2, 1.0, 5, 1)
    b = minibatch([0] * 5, [0] * 5, [[1]] * 5, old_NT=old_NT, sampler_NT=sampler_NT)
    for level in ("token", "sequence", "geometric"):
        torch.testing.assert_close(
            correction.truncate(b, w_max=1e6, level=level), (old_NT - sampler_NT).exp(), rtol=1e-14, atol=0
        )


# ---- A3, A4, A6: group statistics ----


def binomial_multiplier(g: int, p: float, eps: float) -> float:
    """The same for the z-score, in the reals: Σ_k P(k)·[k·Â₊(1−p) − (G−k)·Â₋·p]/G / (p(1−p)), std = √(k(G−k)/(G(G−1)))."""
    total = 0.0
    for k in range(1, g):
        std = math.sqrt(k * (g - k) / (g * (g - 1))) + eps
        high, low = (1 - k / g) / std, -(k / g) / std
        total += math.comb(g, k) * p**k * (1 - p) ** (g - k) * (k * high * (1 - p) - (g - k) * low * p) / g
    return total / (p * (1 - p))


# G: at p = .05, .2, .5, .8, as CLAIMS A3 prints them: sampled, off by up to .008 (.7071, 1.4354, 3.1622 for .70, 1.43, 3.17).
A3 = {
    2: (0.70, 0.71, 0.71, 0.71),
    4: (1.48, 1.43, 1.40, 1.43),
    8: (2.31, 1.97, 1.74, 1.97),
    16: (3.17, 2.27, 1.87, 2.27),
    64: (4.30, 2.45, 1.97, 2.45),
}


@pytest.mark.parametrize("g", A3)
def test_a3_multiplier_of_each_baseline(g: int) -> None:
    for p, printed in zip((0.05, 0.2, 0.5, 0.8), A3[g], strict=True):
        zscore = exact.multiplier(partial(advantage.group_zscore, ddof=1, eps=1e-4), g, p)
        assert zscore == pytest.approx(binomial_multiplier(g, p, 1e-4), rel=1e-12)
        assert zscore == pytest.approx(printed, abs=0.01)
        assert exact.multiplier(advantage.group_center, g, p) == pytest.approx((g - 1) / g, rel=1e-12)
        assert exact.multiplier(advantage.leave_one_out, g, p) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("p", "printed"),
    [
        (0.02, (0.961, 0.922, 0.851, 0.724, 0.274)),
        (0.1, (0.820, 0.656, 0.430, 0.185, 0.001)),
        (0.18, (0.705, 0.453, 0.204, 0.042, 0.000)),
        (0.5, (0.500, 0.125, 0.008, 0.000, 0.000)),
        (0.9, (0.820, 0.656, 0.430, 0.185, 0.001)),
    ],
)
def test_a4_share_of_dead_groups(p: float, printed: tuple[float, ...]) -> None:
    """P(k right of G), summed over the k for which the group is dropped: p^G + (1−p)^G."""
    for g, expected in zip((2, 4, 8, 16, 64), printed, strict=True):
        dead = 0.0
        for k in range(g + 1):
            kept_N = knobs.sampling.drop_zero_variance(
                torch.tensor([1.0] * k + [0.0] * (g - k)), torch.zeros(g, dtype=torch.int64)
            )
            dead += 0.0 if kept_N.any() else math.comb(g, k) * p**k * (1 - p) ** (g - k)
        assert dead == pytest.approx(p**g + (1 - p) ** g, rel=1e-12)
        assert dead == pytest.approx(expected, abs=5.1e-4)


def test_a6_ddof_at_two() -> None:
    b = minibatch([1, 0], [0, 0], [[1], [1]])
    assert advantage.group_zscore(b, ddof=1, eps=0.0).flatten().tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-15)
    assert advantage.group_zscore(b, ddof=0, eps=0.0).flatten().tolist() == [1.0, -1.0]


def leave_one_out_std(b: Minibatch) -> Tensor:
    """Erratum E11: NeMo-RL's default, mean and std (ddof 1) of the others; a std of 0 leaves the difference as it is."""
    out = []
    for i, r in enumerate(b.r_N.tolist()):
        others = [v for j, v in enumerate(b.r_N.tolist()) if j != i]
        mean = sum(others) / len(others)
        std = math.sqrt(sum((v - mean) ** 2 for v in others) / (len(others) - 1))
        out.append((r - mean) / (std if std > 1e-9 else 1.0))
    return torch.tensor(out, dtype=F64).unsqueeze(1)


@pytest.mark.parametrize(
    ("g", "right", "high", "low", "total"),
    [
        (16, 1, 1.000, -0.258, -2.87),
        (8, 1, 1.000, -0.378, -1.65),
        (16, 2, 3.615, -0.379, 1.93),
        (16, 15, 0.258, -1.0, 2.87),
        (16, 8, 1.033, -1.033, 0.0),
    ],
)
def test_a5_the_standard_deviation_of_the_others_loses_a_rare_success(
    g: int, right: int, high: float, low: float, total: float
) -> None:
    """NeMo-RL: a success among 15 failures gets 1, and Â does not sum to 0; ours: 3.75 (2.475 at G = 8), sum 0."""
    b = minibatch([1.0] * right + [0.0] * (g - right), [0] * g, [[1]] * g)
    theirs = leave_one_out_std(b).flatten().tolist()
    assert (theirs[0], theirs[-1], sum(theirs)) == pytest.approx((high, low, total), abs=6e-3)
    ours = advantage.group_zscore(b, ddof=1, eps=0.0).flatten().tolist()
    std = math.sqrt(right * (g - right) / (g * (g - 1)))
    assert (ours[0], ours[-1], sum(ours)) == pytest.approx(((1 - right / g) / std, -right / g / std, 0), abs=1e-12)
    if right == 1:
        assert ours[0] == pytest.approx({16: 3.75, 8: 2.475}[g], abs=1e-3)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("g", [2, 4, 16])
def test_multipliers_of_the_newer_baselines(g: int, p: float) -> None:
    """max_rl: Σ_{k≥1} P(k)(1 − k/G) / (p(1−p)) = (1 − (1−p)^{G−1})/p, 1/p in the limit. pass_at_k: by k and the subsets."""
    assert exact.multiplier(partial(advantage.max_rl, eps=0.0), g, p) == pytest.approx((1 - (1 - p) ** (g - 1)) / p, rel=1e-12)
    expected = 0.0
    for right in range(1, g - 1):  # at least two wrong
        fail = math.comb(g - right, 2) / math.comb(g, 2)
        sigma = math.sqrt(fail * (1 - fail))
        if sigma:
            high, low = fail / sigma, (fail - (g - right - 1) / (g - 1)) / sigma
            chance = math.comb(g, right) * p**right * (1 - p) ** (g - right)
            expected += chance * (right * high * (1 - p) - (g - right) * low * p) / g
    assert exact.multiplier(partial(advantage.pass_at_k, k=2), g, p) == pytest.approx(expected / (p * (1 - p)), rel=1e-12)


# ---- A9: pass@k ----


@pytest.mark.parametrize(
    ("right", "k", "high", "low"),
    [
        (1, 1, 3.87, -0.258),
        (1, 4, 1.73, -0.115),
        (1, 8, 1.00, -0.067),
        (4, 1, 1.73, -0.577),
        (4, 4, 0.611, -0.204),
        (8, 4, 0.20, -0.20),
        (15, 2, 0.0, 0.0),
        (15, 4, 0.0, 0.0),
    ],
)
def test_a9_pass_at_k(right: int, k: int, high: float, low: float) -> None:
    """N = 16. Weight moves to hard prompts as k grows; it sums to 0, and k = 1 is the z-score with ddof 0."""
    b = minibatch([1.0] * right + [0.0] * (16 - right), [0] * 16, [[1]] * 16)
    a = advantage.pass_at_k(b, k=k).flatten().tolist()
    assert (a[0], a[-1]) == pytest.approx((high, low), abs=6e-3)
    assert sum(a) == pytest.approx(0, abs=1e-12)
    if k == 1:
        assert a == pytest.approx(advantage.group_zscore(b, ddof=0, eps=0.0).flatten().tolist(), rel=1e-12)


# ---- A7: the scale of a sequence ratio, log w ~ N(−σ²/2, σ²) a token ----


@pytest.mark.parametrize(
    ("sigma", "length", "std", "sequences", "tokens"),
    [
        (0.01, 64, 1.24e-3, 0.78, 0.0),
        (0.01, 1024, 3.1e-4, 0.29, 0.0),
        (0.03, 256, 1.9e-3, 0.86, 0.0),
        (0.03, 1024, 9.3e-4, 0.75, 0.0),
        (0.1, 64, 1.2e-2, 0.98, 0.0215),
        (0.1, 1024, 3.1e-3, 0.98, 0.0219),
    ],
)
def test_a7_epsilon_of_gspo_belongs_to_a_length(sigma: float, length: int, std: float, sequences: float, tokens: float) -> None:
    """The mean of L log-ratios is N(−σ²/2, σ²/L): integrate over it, one response of two unequal tokens a value;
    outside is a hit under Â = +1 or −1."""
    z = torch.linspace(-8, 8, 40001, dtype=F64)
    density = torch.exp(-0.5 * z**2)
    density /= density.sum()

    def share(spread: float, chosen: Any, bound: Any) -> float:
        mean_N = (-(sigma**2) / 2 + spread * z).unsqueeze(1)
        logp_NT = torch.cat([1.5 * mean_N, 0.5 * mean_N], 1) if chosen is ratio.sequence else torch.cat([mean_N] * 2, 1)
        b = minibatch([0] * len(z), [0] * len(z), [[1, 1]] * len(z), old_NT=torch.zeros_like(logp_NT))
        outside = 0.0
        for a in (1.0, -1.0):
            signed = replace(b, advantage=torch.full((len(z), 1), a, dtype=F64))
            hit_NT = loss(Objective(ratio=chosen, clip=bound), Forward(logp_NT), signed, Norm.of(signed))[1].hit_NT
            outside += float((density * hit_NT[:, 0]).sum())
        return outside

    narrow, wide = partial(clip.ppo, eps_low=3e-4, eps_high=4e-4), partial(clip.ppo, eps_low=0.2, eps_high=0.27)
    assert share(sigma / math.sqrt(length), ratio.sequence, narrow) == pytest.approx(sequences, abs=6e-3)
    assert share(sigma, ratio.token, wide) == pytest.approx(tokens, abs=1.1e-3)  # printed for a finite sample
    assert sigma / math.sqrt(length) == pytest.approx(std, rel=0.05)


def test_a7_effective_sample_size_of_a_product_falls_with_length() -> None:
    """(E w)²/E w² = e^{−σ²L} for the product of L ratios. The printed .43 and .008 are 1e7 samples' of a weight whose variance they
    cannot see: exactly it is .398 and 3.6e-5. Through `prefix` at the last of two tokens."""
    z = torch.linspace(-16, 16, 80001, dtype=F64)
    density = torch.exp(-0.5 * z**2)
    density /= density.sum()
    for sigma, length, printed, tolerance in (
        (0.01, 64, 0.994, 1e-3),
        (0.01, 1024, 0.905, 5e-3),
        (0.03, 1024, 0.398, 1e-3),
        (0.1, 64, 0.527, 1e-3),
    ):
        s = sigma * math.sqrt(length)
        sum_N1 = (-(s**2) / 2 + s * z).unsqueeze(1)
        logp_NT = torch.cat([0.3 * sum_N1, 0.7 * sum_N1], 1)
        b = minibatch([0] * len(z), [0] * len(z), [[1, 1]] * len(z), old_NT=torch.zeros_like(logp_NT))
        w_N = ratio.prefix(Forward(logp_NT), b)[:, 1].exp()
        ess = (density * w_N).sum() ** 2 / (density * w_N**2).sum()
        assert ess.item() == pytest.approx(math.exp(-(sigma**2) * length), rel=1e-6)
        assert ess.item() == pytest.approx(printed, abs=tolerance)


# ---- A12: a bounded product of ratios, log ρ ~ N(−σ²/2, σ²) a token ----


@pytest.mark.parametrize(
    ("sigma", "length", "truncated", "masked", "share"),
    [
        (0.03, 1000, 0.907, 0.753, 0.051),
        (0.05, 1000, 0.669, 0.463, 0.069),
        (0.1, 100, 0.891, 0.724, 0.056),
        (0.1, 1000, 0.189, 0.109, 0.026),
    ],
)
def test_a12_a_bound_on_the_product_removes_mass_with_length(
    sigma: float, length: int, truncated: float, masked: float, share: float
) -> None:
    """The sum of the log-ratios is N(−s²/2, s²) with s = σ√L: integrate over it, one row a value, spread on two tokens."""
    s = sigma * math.sqrt(length)
    z = torch.linspace(-9, 9, 20001, dtype=F64)
    density = torch.exp(-0.5 * z**2)
    density /= density.sum()
    sum_N1 = (-0.5 * s**2 + s * z).unsqueeze(1)
    old_NT = torch.cat([0.25 * sum_N1, 0.75 * sum_N1, torch.full_like(sum_N1, 9.0)], 1)
    b = minibatch([0] * len(z), [0] * len(z), [[1, 1, 0]] * len(z), old_NT=old_NT, sampler_NT=torch.zeros_like(old_NT))

    def mean(rho_NT: Tensor) -> float:
        return float((density * rho_NT[:, 0]).sum())

    assert mean(correction.truncate(b, w_max=3.0, level="sequence")) == pytest.approx(truncated, abs=1.5e-3)
    rho_NT = correction.mask(b, w_max=3.0, level="sequence")
    assert mean(rho_NT) == pytest.approx(masked, abs=2.5e-3)
    assert mean((rho_NT == 0).double()) == pytest.approx(share, abs=1.5e-3)
    assert mean(correction.truncate(b, w_max=1e8, level="sequence")) == pytest.approx(1, abs=1e-3)  # unbounded: unbiased


# ---- the null condition: one update a rollout ----

# Every clip at w = 1: the scalar on the plain policy gradient. Values differ (CISPO's is Â·log π, SAPO's 2Â/τ).
AT_ONE: dict[str, list[tuple[Any, float]]] = {
    "none": [(clip.none, 1.0)],
    "ppo": [
        (clip.ppo, 1.0),
        (partial(clip.ppo, eps_low=3e-4, eps_high=4e-4), 1.0),
        (partial(clip.ppo, eps_low=0.0, eps_high=0.0), 1.0),
    ],
    "dual": [(clip.dual, 1.0), (partial(clip.dual, w_max=10.0), 1.0)],
    "truncate": [
        (clip.truncate, 1.0),
        (partial(clip.truncate, w_max=5.0), 1.0),
        (partial(clip.truncate, w_max=0.2), 0.2),
    ],  # E2: TRL
    "soft_sigmoid": [(clip.soft_sigmoid, 1.0), (partial(clip.soft_sigmoid, tau_pos=3.0, tau_neg=0.3), 1.0)],
    "soft_tanh": [(clip.soft_tanh, 1.0), (partial(clip.soft_tanh, tau=5.0), 1.0)],
    "kl_penalty": [(clip.kl_penalty, 1.0), (partial(clip.kl_penalty, beta=50.0), 1.0)],
    "gmpo": [(clip.gmpo, 1.0)],
}


def test_the_null_condition_covers_every_clip() -> None:
    assert set(AT_ONE) == set(knobs.variants("clip")) == set(TWO_BY_TWO)


@pytest.mark.parametrize(
    "weighted",
    [
        aggregation.sequence_mean,
        aggregation.token_mean,
        aggregation.constant_length,
        aggregation.sequence_sum,
        aggregation.balanced,
    ],
)
@pytest.mark.parametrize("name", AT_ONE)
def test_on_policy_every_ratio_and_clip_has_one_gradient(name: str, weighted: Any) -> None:
    """π_θ = π_old, Â one number a response: the gradient is `scalar` times the policy gradient under each ratio and aggregation, for
    Σ_t of s_i's gradient (1/|y|)·Σ_u ∇logp_u is Σ_u ∇logp_u again."""
    now, b = random_batch(20)
    b = replace(score(Objective(), b).b, old_NT=now.logp_NT.detach())
    value, plain_NT = value_and_gradient(Objective(ratio=ratio.none, clip=clip.none, aggregation=weighted), now, b)
    assert (plain_NT != 0).any()
    for bound, scalar in AT_ONE[name]:
        for chosen in (ratio.none, ratio.token, ratio.sequence, ratio.sequence_token, ratio.prefix):
            mine, grad_NT = value_and_gradient(Objective(ratio=chosen, clip=bound, aggregation=weighted), now, b)
            torch.testing.assert_close(grad_NT, scalar * plain_NT, rtol=0, atol=1e-14)
            if name not in ("truncate", "soft_sigmoid"):
                torch.testing.assert_close(mine, value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", knobs.variants("gate"))
def test_on_policy_no_gate_closes(name: str) -> None:
    """π_θ = π_old = μ: bit for bit the ungated step."""
    now, b = random_batch(20)
    b = replace(score(Objective(), b).b, old_NT=now.logp_NT.detach(), sampler_NT=now.logp_NT.detach())
    free, gated = Objective(), Objective(gate=(knobs.resolve("gate", name),))
    for mine, plain in zip(value_and_gradient(gated, now, b), value_and_gradient(free, now, b), strict=True):
        assert torch.equal(mine, plain)


# ---- A8, A10: single tokens under a clip ----


def slope(bound: Any, w: float, a: float) -> float:
    """∂gain/∂log π, through the loss."""
    b = minibatch([0], [0], [[1]], old_NT=[[0.0]], advantage=[[a]])
    return -float(value_and_gradient(Objective(clip=bound), Forward(torch.tensor([[w]], dtype=F64).log().requires_grad_()), b)[1])


def test_a8_the_weight_of_sapo_and_its_peak() -> None:
    """w·sech²(τ(w−1)/2): more than on-policy up to w = 3.47 (CLAIMS says 3.3), its peak where w·tanh((w−1)/2) = 1: w = 2.06."""
    for w, printed in ((0.5, 0.47), (1, 1), (1.2, 1.19), (1.5, 1.41), (2, 1.57), (3, 1.26), (5, 0.35), (10, 0.005)):
        weight = slope(clip.soft_sigmoid, w, 1.0)
        assert weight == pytest.approx(w / math.cosh((w - 1) / 2) ** 2, rel=1e-12)
        assert weight == pytest.approx(printed, abs=6e-3)
    grid = [1 + i / 100 for i in range(300)]
    peak = max(grid, key=lambda w: slope(clip.soft_sigmoid, w, 1.0))
    assert peak == pytest.approx(2.06, abs=0.011)
    assert peak * math.tanh((peak - 1) / 2) == pytest.approx(1, abs=0.01)
    above = [w for w in grid if slope(clip.soft_sigmoid, w, 1.0) > 1]
    assert (above[0], above[-1]) == pytest.approx((1.01, 3.46), abs=1e-9)
    assert 3.46 / math.cosh(1.23) ** 2 > 1 > 3.47 / math.cosh(1.235) ** 2
    asymmetry = -slope(clip.soft_sigmoid, 2, -1.0) / slope(clip.soft_sigmoid, 2, 1.0)
    assert 0.97 < asymmetry < 1, "τ_neg = 1.05 changes the weight by less than 3% at w = 2"


def test_the_weight_of_the_tanh_gate_is_alike_in_w_and_its_inverse() -> None:
    for tau in (0.5, 1.0, 3.0):
        for w in (1.0, 1.3, 2.0, 7.0):
            for a in (1.0, -1.0):
                mine = slope(partial(clip.soft_tanh, tau=tau), w, a)
                assert mine == pytest.approx(a / math.cosh(tau * math.log(w)) ** 2, rel=1e-10)
                assert mine == pytest.approx(slope(partial(clip.soft_tanh, tau=tau), 1 / w, a), rel=1e-10)


def two_sided(logw_NT: Tensor, now: Forward, b: Minibatch, delta: float) -> tuple[Tensor, Tensor]:
    """INTELLECT-2 (2505.07291): min(min(w, δ)Â, clip(w, .8, 1.2)Â)."""
    w_NT = torch.exp(logw_NT)
    gain_NT = torch.minimum(w_NT.clamp(max=delta) * b.advantage, w_NT.clamp(0.8, 1.2) * b.advantage)
    return gain_NT, torch.zeros_like(b.mask_NT)


@pytest.mark.parametrize("c", [1.3, 3.0, 4.0])
def test_a10_dual_clip_is_the_two_sided_clip(c: float) -> None:
    """One function of (w, Â), in value and gradient, over w in [e⁻⁴, e⁴] (off its corners) and six Â."""
    w = torch.linspace(-4, 4, 4001, dtype=F64)[:-1] + 1e-4
    for a in (-2.0, -1.0, -0.1, 0.1, 1.0, 3.0):
        logp_NT = w.unsqueeze(0).clone().requires_grad_()
        b = minibatch([0], [0], [[1] * len(w)], old_NT=torch.zeros_like(logp_NT.detach()), advantage=[[a]])
        mine = value_and_gradient(Objective(clip=partial(clip.dual, w_max=c)), Forward(logp_NT), b)
        theirs = value_and_gradient(Objective(clip=partial(two_sided, delta=c)), Forward(logp_NT), b)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


# ---- the 2×2 of the clip: w = 5 / 0.1 × sign of Â ----

# (w, Â) → gain, ∂gain/∂log π, hit; default parameters, log π = log w (π_old = 1), which is in CISPO's value.
CELLS = [(5.0, 1.0), (5.0, -1.0), (0.1, 1.0), (0.1, -1.0)]
TWO_BY_TWO: dict[str, list[tuple[float, float, bool]]] = {
    "gmpo": [(1.491825, 0, True), (-5, -5, False), (0.1, 0.1, False), (-0.670320, 0, True)],  # e^±.4, the closed cells of ppo
    "none": [(5, 5, False), (-5, -5, False), (0.1, 0.1, False), (-0.1, -0.1, False)],
    # cut: raised enough · passes five-fold · passes at a tenth · cut: lowered enough
    "ppo": [(1.2, 0, True), (-5, -5, False), (0.1, 0.1, False), (-0.8, 0, True)],
    "dual": [(1.2, 0, True), (-3, 0, True), (0.1, 0.1, False), (-0.8, 0, True)],  # the open cell ends at c = 3
    # weight min(w, 1.28) of either sign; gain = weight·Â·ln w: 1.28·1.609438, .1·(−2.302585)
    "truncate": [(2.060081, 1.28, True), (-2.060081, -1.28, True), (-0.2302585, 0.1, False), (0.2302585, -0.1, False)],
    # 4σ(4), 5·sech²(2) | (4/1.05)σ(4.2), 5·sech²(2.1) | 4σ(−.9), .1·sech²(.45) | (4/1.05)σ(−.945), .1·sech²(.4725)
    "soft_sigmoid": [
        (3.928055, 0.353254, False),
        (-3.753242, -0.291115, False),
        (1.156202, 0.082200, False),
        (-1.066253, -0.080621, False),
    ],
    # tanh(ln 5) = 24/26, tanh(ln .1) = −.99/1.01; slope 1 − tanh²
    "soft_tanh": [
        (50 / 26, 25 / 169, False),
        (-50 / 26, -25 / 169, False),
        (0.02 / 1.01, 0.039212, False),
        (-0.02 / 1.01, -0.039212, False),
    ],
    # β = 1: wÂ − (w − 1 − ln w): 5 − 2.390562; slope wÂ − (w − 1): 5 − 4, −5 − 4, .1 + .9, −.1 + .9: the way back is open, doubled
    "kl_penalty": [(2.609438, 1, False), (-7.390562, -9, False), (-1.302585, 1, False), (-1.502585, 0.8, False)],
}


@pytest.mark.parametrize(("cell", "w", "a"), [(i, *c) for i, c in enumerate(CELLS)])
@pytest.mark.parametrize("name", TWO_BY_TWO)
def test_the_two_by_two_of_every_clip(name: str, cell: int, w: float, a: float) -> None:
    """∂gain/∂logp = w·Â where it passes, 0 where it is cut; the loss is its negative. And as `exact.two_by_two` tables it."""
    gain, gradient, hit = TWO_BY_TWO[name][cell]
    b = minibatch([0], [0], [[1]], old_NT=[[0.0]], advantage=[[a]])
    logp_NT = torch.tensor([[w]], dtype=F64).log().requires_grad_()
    objective = Objective(clip=knobs.variants("clip")[name])
    value, grad_NT = value_and_gradient(objective, Forward(logp_NT), b)
    assert value.item() == pytest.approx(-gain, rel=2e-6)
    assert grad_NT.item() == pytest.approx(-gradient, rel=1e-5)
    assert loss(objective, Forward(logp_NT), b, Norm.of(b))[1].hit_NT.item() is hit
    tabled = exact.two_by_two()[name][0 if a > 0 else 1][0 if w > 1 else 1]
    assert (tabled.w, tabled.advantage, tabled.unclipped) == (w, a, w * a)
    assert (tabled.gain, tabled.gradient) == pytest.approx((gain, gradient), rel=1e-5)
    assert tabled.passes is (gradient != 0)


# ---- the seed's two statements on clipping ----

NOISE = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]


@pytest.mark.parametrize("sigma", NOISE)
def test_noise_on_log_w_biases_the_clipped_gradient(sigma: float) -> None:
    """Quadrature against the log-normal's partial means, E[w·1(w<b)] = e^{σ²/2}Φ(ln b/σ − σ), to 1e-4. Without a clip both signs are
    scaled alike by e^{σ²/2}: no bias. With min and clip the good sign loses its upper tail, the bad one its lower."""
    scale = math.exp(sigma**2 / 2)
    for a in (1.0, -1.0):
        assert exact.noise_gradient(clip.none, sigma, a) == pytest.approx(a * scale, rel=1e-6)
    assert exact.noise_bias(clip.none, sigma) == pytest.approx(0, abs=1e-9)
    good, bad = scale * normal(math.log(1.2) / sigma - sigma), -scale * normal(sigma - math.log(0.8) / sigma)
    assert exact.noise_gradient(clip.ppo, sigma, 1.0) == pytest.approx(good, abs=1e-4)
    assert exact.noise_gradient(clip.ppo, sigma, -1.0) == pytest.approx(bad, abs=1e-4)
    assert exact.noise_gradient(clip.ppo, sigma, 3.0) == pytest.approx(3 * good, abs=3e-4)
    assert exact.noise_bias(clip.ppo, sigma) == pytest.approx((good + bad) / 2, abs=1e-4)


def test_the_bias_of_symmetric_clipping_is_downwards_and_grows_with_the_noise() -> None:
    """At ε = .2: −.016 of a unit advantage at σ = .1, −.074 at .2, −.216 at .5, −.563 at 1: what was sampled is pushed down."""
    bias = [exact.noise_bias(clip.ppo, sigma) for sigma in NOISE]
    assert all(b <= 1e-12 for b in bias)
    assert bias == sorted(bias, reverse=True)
    assert bias[2:4] + bias[5:] == pytest.approx([-0.0163, -0.0736, -0.2163, -0.5627], abs=2e-4)
    good = [exact.noise_gradient(clip.ppo, sigma, 1.0) for sigma in NOISE[2:]]
    assert good == sorted(good, reverse=True), "a good answer is paid less and less"


def test_clip_higher_turns_the_bias_at_small_noise() -> None:
    """ε = .2/.28: (1+ε_high)(1−ε_low) = 1.024 > e^{2σ²} up to σ = .1089: upwards below, downwards above; always above symmetric."""
    higher = partial(clip.ppo, eps_low=0.2, eps_high=0.28)
    turn = math.sqrt(math.log(1.28 * 0.8) / 2)
    assert turn == pytest.approx(0.1089, abs=1e-4)
    assert exact.noise_bias(higher, 0.95 * turn) > 0 > exact.noise_bias(higher, 1.05 * turn)
    for sigma in NOISE[2:]:
        assert exact.noise_bias(higher, sigma) > exact.noise_bias(clip.ppo, sigma)


@pytest.mark.parametrize("bound", [clip.truncate, clip.soft_tanh])
def test_clips_that_ask_no_sign_have_no_such_bias(bound: Any) -> None:
    """CISPO and the tanh gate treat both signs of Â alike: an uninformative advantage cancels at any noise."""
    for sigma in NOISE:
        assert exact.noise_bias(bound, sigma) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 1.0])
def test_capping_the_penalty_removes_gradient_mass_from_all_to_none(sigma: float) -> None:
    """c from 1+ε to ∞: the share of E|∂| on Â<0, w>1+ε that dual clip takes away, Φ(σ − ln c/σ)/Φ(σ − ln 1.2/σ), falls from 1 to 0."""
    cs = [1.2 + 1e-9, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0, 1e4]
    removed = [exact.cap_removes(c, sigma) for c in cs]
    expected = [normal(sigma - math.log(c) / sigma) / normal(sigma - math.log(1.2) / sigma) for c in cs]
    assert removed == pytest.approx(expected, abs=3e-4)
    assert removed == sorted(removed, reverse=True)
    assert removed[0] == pytest.approx(1, abs=3e-4)
    assert removed[-1] == pytest.approx(0, abs=1e-6)
    for c in cs:  # what is left is bounded by c
        assert abs(slope(partial(clip.dual, w_max=c), c * 1.001, -1.0)) == 0.0
        assert slope(partial(clip.dual, w_max=c), max(c * 0.999, 1.0), -1.0) == pytest.approx(-max(c * 0.999, 1.0))


def test_the_cap_touches_nothing_but_the_open_cell() -> None:
    """At σ = .5 and c = 3 the expected gradient of Â<0 shrinks by .08 of the open cell's; that of Â>0 is bit for bit PPO's."""
    dual = clip.dual
    assert exact.cap_removes(3.0, 0.5) == pytest.approx(0.0809, abs=3e-4)
    assert exact.noise_gradient(dual, 0.5, 1.0) == exact.noise_gradient(clip.ppo, 0.5, 1.0)
    for w in (0.1, 0.9, 1.0, 1.5, 2.9):
        assert slope(dual, w, -1.0) == slope(clip.ppo, w, -1.0)


# ---- bias and variance of every advantage, against the exact gradient of a tabular policy ----


def enumerate_gradient(spec: dict[str, Any], p: list[list[float]], reward: list[list[float]], g: int) -> tuple[np.ndarray, float]:
    """Mean and total variance of (1/N)Σ Â_i ∇log π(y_i), with the oracle's Â, over every rollout: loops and numpy, nothing of ours."""
    prompts, answers = len(p), len(p[0])
    n, group = prompts * g, [i for i in range(prompts) for _ in range(g)]
    made: list[tuple[float, np.ndarray]] = []
    for drawn in itertools.product(range(answers), repeat=n):
        r = {i: reward[group[i]][drawn[i]] for i in range(n)}
        x = oracle.Batch(
            logp=[],
            old=[],
            sampler=[],
            ref=[],
            mask=[[True]] * n,
            r=list(r.values()),
            group=group,
            cut=[False] * n,
            length=[1] * n,
            limit=1,
            exact=[],
            value=[[0.0]] * n,
            step_end=[[True]] * n,
            step_r=[[v] for v in r.values()],
            prompt_weight=[1.0] * n,
        )
        a = oracle.advantages(spec, x, r, [[0.0]] * n)
        grad = np.zeros((prompts, answers))
        for i in range(n):
            grad[group[i]] += a[i, 0] / n * (np.eye(answers)[drawn[i]] - np.array(p[group[i]]))
        made.append((math.prod(p[group[i]][drawn[i]] for i in range(n)), grad))
    mean = sum(w * grad for w, grad in made)
    return mean, float(sum(w * ((grad - mean) ** 2).sum() for w, grad in made))


BINARY = torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
GRADED = torch.tensor([[1.0, 0.3, 0.0]], dtype=F64)
LOGITS = torch.tensor([[-1.0, 0.4, 0.1]], dtype=F64)
P_RIGHT = float(torch.softmax(LOGITS, 1)[0, 0])
ESTIMATORS: dict[str, dict[str, Any]] = {
    "leave_one_out": {},
    "group_center": {},
    "group_zscore": {"ddof": 1, "eps": 1e-4},
    "batch_std": {"ddof": 1, "eps": 1e-4},
    "batch_zscore": {"ddof": 1, "eps": 1e-4},
    "max_rl": {"eps": 1e-4},
    "pass_at_k": {"k": 2},
    "running_zscore": {"decay": 0.9, "eps": 1e-4, "state": {"mean": 0.3, "square": 0.25}},
    "gae": {"gamma": 1.0, "lam": 0.95, "whiten": False},
    "process_reward": {"ddof": 1, "eps": 1e-4},
}


def estimate_of(name: str, logits: Tensor, reward: Tensor, g: int) -> exact.Estimate:
    return exact.estimate(partial(knobs.variants("advantage")[name], **ESTIMATORS[name]), logits, reward, g)


def test_every_advantage_is_measured() -> None:
    assert set(ESTIMATORS) == set(knobs.variants("advantage"))


@pytest.mark.parametrize("case", ["one prompt, G 2", "one prompt, G 3", "two prompts, G 2"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_bias_and_variance_of_every_advantage(name: str, case: str) -> None:
    """Through score() and loss(), against the loops, to 1e-12; then what the mathematics says of each."""
    g = 3 if "3" in case else 2
    logits, reward = (LOGITS, GRADED) if "one" in case else (torch.cat([LOGITS, -LOGITS]), torch.cat([GRADED, BINARY]))
    mine = estimate_of(name, logits, reward, g)
    mean, variance = enumerate_gradient({"name": name, **ESTIMATORS[name]}, torch.softmax(logits, 1).tolist(), reward.tolist(), g)
    np.testing.assert_allclose(mine.mean_PV.numpy(), mean, rtol=1e-12, atol=1e-13)
    assert mine.variance == pytest.approx(variance, rel=1e-12)
    if name in ("leave_one_out", "gae"):  # gae: a critic that says 0, no whitening: REINFORCE
        assert mine.bias < 1e-12
    elif name == "group_center":
        assert (mine.scale, mine.cosine) == pytest.approx(((g - 1) / g, 1), rel=1e-12)
    elif name == "running_zscore":  # a fixed centre is no bias; the fixed scale is 1/(.4 + 1e-4)
        assert (mine.scale, mine.cosine) == pytest.approx((1 / (math.sqrt(0.25 - 0.09) + 1e-4), 1), rel=1e-12)
    else:
        assert mine.bias > 0.01, "normalising by what was drawn is biased"


@pytest.mark.parametrize("g", [2, 3])
def test_with_a_binary_reward_a_bias_is_only_a_scale(g: int) -> None:
    """One prompt: E[Â | r] takes two values, so every mean is parallel to the exact gradient; its length is `exact.multiplier`."""
    for name in ESTIMATORS:
        mine = estimate_of(name, LOGITS, BINARY, g)
        if name == "pass_at_k" and g == 2:
            assert mine.scale == 0.0, "fewer than k wrong, or none right"
            continue
        assert mine.cosine == pytest.approx(1, abs=1e-12)
        bound = partial(knobs.variants("advantage")[name], **ESTIMATORS[name])
        assert mine.scale == pytest.approx(exact.multiplier(bound, g, P_RIGHT), rel=1e-10)


@pytest.mark.parametrize("g", [2, 3])
def test_baselines_in_order_of_variance(g: int) -> None:
    """At equal scale (variance over scale²): leave-one-out and the group mean are one estimator; with no baseline at all rewards that are
    far from 0 cost more than ten times as much."""
    shifted = GRADED + 2
    measured = {n: estimate_of(n, LOGITS, shifted, g) for n in ("leave_one_out", "group_center", "gae")}
    relative = {n: e.variance / e.scale**2 for n, e in measured.items()}
    assert relative["leave_one_out"] == pytest.approx(relative["group_center"], rel=1e-10)
    assert relative["gae"] > 10 * relative["leave_one_out"]


def test_a_batch_s_standard_deviation_weighs_prompts_alike_where_a_group_s_does_not() -> None:
    """Two prompts, p = .12 and .5, binary: the ratio of their multipliers is 1.00 for leave-one-out, away from 1 for group_zscore at
    G = 3 (A3's difficulty bias), and nearer to 1 for batch_std."""
    logits = torch.tensor([[-2.0, 0.0], [0.0, 0.0]], dtype=F64)
    reward = torch.tensor([[1.0, 0.0]] * 2, dtype=F64)

    def tilt(name: str, g: int) -> float:
        e = estimate_of(name, logits, reward, g)
        hard, easy = ((e.mean_PV[i] * e.exact_PV[i]).sum() / (e.exact_PV[i] ** 2).sum() for i in (0, 1))
        return float(hard / easy)

    assert tilt("leave_one_out", 3) == pytest.approx(1, rel=1e-12)
    assert tilt("group_zscore", 2) == pytest.approx(1, rel=1e-10)  # none at G = 2
    assert tilt("group_zscore", 3) == pytest.approx(
        exact.multiplier(advantage.group_zscore, 3, 1 / (1 + math.e**2)) / exact.multiplier(advantage.group_zscore, 3, 0.5),
        rel=1e-10,
    )
    assert tilt("max_rl", 3) > tilt("group_zscore", 3) >= 1


# ---- reductions ----


def test_equal_lengths_make_the_aggregations_agree_up_to_a_constant() -> None:
    """N = 4 rows of T = 3, L_max = 8: mean = token mean = 8/3 · constant length = 1/3 · sum."""
    b = minibatch([0] * 4, [0, 0, 1, 1], [[1, 1, 1]] * 4, limit=8)
    norm = Norm.of(b)
    mean_NT = aggregation.sequence_mean(b, norm)
    torch.testing.assert_close(aggregation.sequence_mean(b, norm, per="group"), mean_NT)
    torch.testing.assert_close(aggregation.token_mean(b, norm), mean_NT)
    torch.testing.assert_close(aggregation.constant_length(b, norm) * 8 / 3, mean_NT)
    torch.testing.assert_close(aggregation.sequence_sum(b, norm) / 3, mean_NT)


def test_one_token_makes_every_ratio_the_token_ratio() -> None:
    now, b = random_batch(21, tokens=1)
    b = replace(score(Objective(), b).b)
    token = value_and_gradient(Objective(clip=clip.ppo), now, b)
    for other in (ratio.sequence, ratio.sequence_token, ratio.prefix):
        torch.testing.assert_close(value_and_gradient(Objective(ratio=other, clip=clip.ppo), now, b), token, rtol=0, atol=1e-15)


def test_sequence_token_is_sequence_when_the_advantage_is_one_number_a_response() -> None:
    """In value bit for bit, in float32 at the clip's own scale (GSPO: 3e-4); in gradient to round-off; beyond the bound too."""
    for dtype, drift, tolerance in ((F64, 0.001, 1e-15), (torch.float32, 0.001, 1e-6), (F64, 40.0, 1e-6)):
        now, b = random_batch(22, dtype, drift)
        b = score(Objective(), b).b
        narrow = partial(clip.ppo, eps_low=3e-4, eps_high=4e-4)
        whole = value_and_gradient(Objective(ratio=ratio.sequence, clip=narrow), now, b)
        each = value_and_gradient(Objective(ratio=ratio.sequence_token, clip=narrow), now, b)
        assert torch.equal(each[0], whole[0])
        torch.testing.assert_close(each[1], whole[1], rtol=tolerance, atol=tolerance)


def test_leave_one_out_is_a_multiple_of_the_centred_reward() -> None:
    """G/(G−1) in ragged groups; at G = 2: r_i − r_j = 2(r_i − mean)."""
    _, b = random_batch(23)
    size_N = torch.tensor([float((b.group_N == g).sum()) for g in b.group_N.tolist()], dtype=F64)
    factor_N1 = (size_N / (size_N - 1).clamp(min=1)).unsqueeze(1)
    torch.testing.assert_close(advantage.leave_one_out(b), advantage.group_center(b) * factor_N1, rtol=1e-14, atol=1e-15)
    two = minibatch([0.9, 0.2], [0, 0], [[1], [1]])
    assert advantage.leave_one_out(two).flatten().tolist() == pytest.approx([0.7, -0.7], abs=1e-15)
    torch.testing.assert_close(advantage.leave_one_out(two), 2 * advantage.group_center(two))


def test_at_two_the_zscore_is_the_sign() -> None:
    """G = 2, ε = 0: std = |r₁ − r₂|/√2, so Â = ±1/√2 whatever the rewards."""
    for r in ([1.0, 0.0], [0.3, 0.7], [5.0, -5.0]):
        a_N1 = advantage.group_zscore(minibatch(r, [0, 0], [[1], [1]]), ddof=1, eps=0.0)
        assert a_N1.abs().flatten().tolist() == pytest.approx([0.5**0.5] * 2, rel=1e-14)


def test_beta_zero_is_no_kl() -> None:
    now, b = random_batch(24)
    b = score(Objective(), b).b
    without = value_and_gradient(Objective(), now, b)
    for estimator in (kl.k1, kl.k2, kl.k3):
        torch.testing.assert_close(
            value_and_gradient(Objective(kl=partial(estimator, beta=0.0)), now, b), without, rtol=0, atol=0
        )


def test_infinite_widths_are_no_clip() -> None:
    now, b = random_batch(25, drift=1.0)
    b = score(Objective(), b).b
    without = value_and_gradient(Objective(clip=clip.none), now, b)
    wide = value_and_gradient(Objective(clip=partial(clip.ppo, eps_low=1 - 1e-12, eps_high=1e12)), now, b)
    torch.testing.assert_close(wide, without, rtol=0, atol=1e-15)


def test_on_policy_loss_is_minus_the_mean_advantage() -> None:
    """w = 1: value −mean Â, and it says nothing about the gradient (K09)."""
    now, b = on_policy([1.0, -1.0], [[1, 1, 1], [1, 0, 0]])
    value, grad_NT = value_and_gradient(Objective(), now, b)
    assert value.item() == 0.0
    assert grad_NT.tolist() == [[-1 / 6] * 3, [0.5, 0, 0]]
