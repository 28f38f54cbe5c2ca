"""Identities that hold exactly, by enumeration and quadrature, through the package's own score() and loss(): no sampling.

Printed numbers are those of the sources: Schulman's note for the estimators' values, CLAIMS A2 to A6 and A12 for the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from batches import F64, minibatch, on_policy, random_batch, value_and_gradient
from torch import Tensor

from grpo_repro import knobs
from grpo_repro.knobs import advantage, aggregation, clip, correction, kl, ratio
from grpo_repro.objective import Objective, loss, score
from grpo_repro.types import Forward, Norm

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


def expected_gradient(objective: Objective, theta_V: Tensor, ref_V: Tensor, reward_V: Tensor | None = None) -> Tensor:
    """E_{y~π} ∇_θ loss(y) for one-token responses: each of the V responses once, alone, weighted by its probability."""
    theta_V = theta_V.clone().requires_grad_()
    logp_V = torch.log_softmax(theta_V, 0)
    total = torch.zeros((), dtype=F64)
    for v in range(V):
        logp_NT = logp_V[v].reshape(1, 1)
        r = 0.0 if reward_V is None else float(reward_V[v])
        b = minibatch([r], [0], [[1]], old_NT=logp_NT.detach(), ref_NT=torch.log_softmax(ref_V, 0)[v].reshape(1, 1))
        b = score(objective, b).b
        value, _ = loss(objective, Forward(logp_NT), b, Norm.of(b))
        total = total + logp_V[v].exp().detach() * value
    return torch.autograd.grad(total, theta_V)[0]


def gradient_of_kl(theta_V: Tensor, ref_V: Tensor, forward: bool = False) -> Tensor:
    theta_V = theta_V.clone().requires_grad_()
    p, q = torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0)
    exact = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
    return torch.autograd.grad(exact, theta_V)[0]


# No baseline, so that the expectation over single responses is the whole story.
PLAIN = Objective(
    ratio=ratio.token, clip=clip.none, advantage=lambda b: b.return_N.unsqueeze(1), aggregation=aggregation.sequence_sum
)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("anchor", [ratio.token, ratio.sequence, ratio.none])
def test_a2_gradients_of_the_estimators(scale: float, anchor: Any) -> None:
    theta_V, ref_V = tabular(1, scale, V), tabular(2, scale, V)
    reverse, forward = gradient_of_kl(theta_V, ref_V), gradient_of_kl(theta_V, ref_V, forward=True)
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
    exact = true_gradient(world["theta"], lambda logp_NT: world["reward_N"] - 0.7 * (logp_NT - world["ref_NT"]).sum(1))
    mine = enumerated(objective, world["theta"], world["reward_N"], world["now_NT"], world["ref_NT"], group=1)
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize(
    ("baseline", "scalar"), [(advantage.leave_one_out, lambda g: 1.0), (advantage.group_center, lambda g: (g - 1) / g)]
)
def test_group_baselines_give_the_policy_gradient(world: dict[str, Any], baseline: Any, scalar: Any, group: int) -> None:
    """RLOO is unbiased; the group mean, which contains the sample itself, gives (G−1)/G of it."""
    objective = replace(PLAIN, advantage=baseline)
    exact = true_gradient(world["theta"], lambda _: world["reward_N"])
    mine = enumerated(objective, world["theta"], world["reward_N"], world["now_NT"], world["ref_NT"], group)
    torch.testing.assert_close(mine, scalar(group) * exact, rtol=0, atol=1e-12)


def test_correction_undoes_a_sampler_whose_weights_changed_between_tokens(world: dict[str, Any]) -> None:
    """Token 1 drawn under one set of weights, token 2 under another: the product of π_old/μ is exact, per token it is not."""
    drawn_NT = torch.stack(
        [
            sequence_logp(world["theta"][0] + tabular(8, 0.5, V2), world["theta"][1])[:, 0],
            sequence_logp(world["theta"][0], world["theta"][1] + tabular(9, 0.5, V2, V2))[:, 1],
        ],
        dim=1,
    )
    exact = true_gradient(world["theta"], lambda _: world["reward_N"])

    def error(chosen: Any) -> float:
        mine = enumerated(replace(PLAIN, correction=chosen), world["theta"], world["reward_N"], drawn_NT, world["ref_NT"], 1)
        return float((mine - exact).abs().max())

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


def multiplier(advantages: Any, g: int, p: float) -> float:
    """E[Â(R − p)] / Var(R) over all outcomes of a group of Bernoulli(p) rewards."""
    total = 0.0
    for k in range(g + 1):
        r = [1.0] * k + [0.0] * (g - k)
        a_N = advantages(minibatch(r, [0] * g, [[1]] * g)).squeeze(1)
        total += math.comb(g, k) * p**k * (1 - p) ** (g - k) * float((a_N * (torch.tensor(r, dtype=F64) - p)).mean())
    return total / (p * (1 - p))


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
        zscore = multiplier(partial(advantage.group_zscore, ddof=1, eps=1e-4), g, p)
        assert zscore == pytest.approx(binomial_multiplier(g, p, 1e-4), rel=1e-12)
        assert zscore == pytest.approx(printed, abs=0.01)
        assert multiplier(advantage.group_center, g, p) == pytest.approx((g - 1) / g, rel=1e-12)
        assert multiplier(advantage.leave_one_out, g, p) == pytest.approx(1, rel=1e-12)


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


@pytest.mark.parametrize(
    "weighted", [aggregation.sequence_mean, aggregation.token_mean, aggregation.constant_length, aggregation.sequence_sum]
)
def test_on_policy_every_ratio_and_clip_has_one_gradient(weighted: Any) -> None:
    """π_θ = π_old, Â one number a response: the scalar between any two is 1, under each aggregation, for
    Σ_t of s_i's gradient (1/|y|)·Σ_u ∇logp_u is Σ_u ∇logp_u again. The values (w = 1) agree too."""
    now, b = random_batch(20)
    b = replace(score(Objective(), b).b, old_NT=now.logp_NT.detach())
    results = [
        value_and_gradient(Objective(ratio=r, clip=c, aggregation=weighted), now, b)
        for r in (ratio.none, ratio.token, ratio.sequence, ratio.sequence_token, ratio.prefix)
        for c in (clip.none, clip.ppo, partial(clip.ppo, eps_low=3e-4, eps_high=4e-4))
    ]
    assert (results[0][1] != 0).any()
    for value, grad_NT in results[1:]:
        torch.testing.assert_close(value, results[0][0], rtol=0, atol=1e-14)
        torch.testing.assert_close(grad_NT, results[0][1], rtol=0, atol=1e-14)


# ---- the 2×2 of the clip: w = 5 / 0.1 × sign of Â ----


@pytest.mark.parametrize(
    ("bound", "w", "a", "gain", "slope", "hit"),
    [
        (clip.none, 5.0, +1.0, 5.0, 5.0, False),
        (clip.none, 5.0, -1.0, -5.0, -5.0, False),
        (clip.none, 0.1, +1.0, 0.1, 0.1, False),
        (clip.none, 0.1, -1.0, -0.1, -0.1, False),
        (clip.ppo, 5.0, +1.0, 1.2, 0.0, True),  # cut: already raised enough
        (clip.ppo, 5.0, -1.0, -5.0, -5.0, False),  # passes, five-fold
        (clip.ppo, 0.1, +1.0, 0.1, 0.1, False),  # passes, a tenth
        (clip.ppo, 0.1, -1.0, -0.8, 0.0, True),  # cut: already lowered enough
    ],
)
def test_the_two_by_two_of_the_clip(bound: Any, w: float, a: float, gain: float, slope: float, hit: bool) -> None:
    """∂gain/∂logp = w·Â where it passes, 0 where it is cut; the loss is its negative."""
    b = minibatch([0], [0], [[1]], old_NT=[[0.0]], advantage=[[a]])
    logp_NT = torch.tensor([[w]], dtype=F64).log().requires_grad_()
    objective = Objective(clip=bound)
    value, grad_NT = value_and_gradient(objective, Forward(logp_NT), b)
    assert value.item() == pytest.approx(-gain, rel=1e-14)
    assert grad_NT.item() == pytest.approx(-slope, rel=1e-14)
    assert loss(objective, Forward(logp_NT), b, Norm.of(b))[1].hit_NT.item() is hit


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
