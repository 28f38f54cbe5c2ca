"""Faults that people met in other frameworks, each as a test of its class here, named after its case.

Only what the objective and its knobs decide. Elsewhere: precision, temperature, end tokens and shifts (policies), sampling order,
resume and logs (the loop and its records), readers of other frameworks' logs (the doctor).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from batches import F64, from_rewards, minibatch, on_policy, value_and_gradient

from grpo_repro import knobs
from grpo_repro.config import parse_run
from grpo_repro.knobs import advantage, aggregation, clip, correction, kl, ratio
from grpo_repro.objective import Objective, loss, score
from grpo_repro.types import Forward, NonFinite, Norm, UserError

F32 = torch.float32


def now(logp: list[list[float]], dtype: torch.dtype = F64) -> Forward:
    return Forward(torch.tensor(logp, dtype=dtype, requires_grad=True))


def a_of(function: Any, r: list[float], group: list[int] | None = None, dtype: torch.dtype = F64) -> list[float]:
    return function(minibatch(r, group or [0] * len(r), [[1]] * len(r), dtype=dtype)).flatten().tolist()


# ---- N: numerics ----


@pytest.mark.parametrize("logp", [-89.0, -100.0, -1e4])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_n01_k3_stays_finite_when_policy_and_reference_part(logp: float, dtype: torch.dtype) -> None:
    """trl#3015: e^89 is inf in float32. Bounded: e^20 − 21, and no gradient beyond."""
    forward = now([[logp]], dtype)
    value_NT = kl.k3(forward, minibatch([0], [0], [[1]], dtype=dtype, ref_NT=[[0.0]]), beta=1.0)
    assert value_NT.item() == pytest.approx(math.expm1(20) - 20, rel=1e-6)
    assert torch.autograd.grad(value_NT.sum(), forward.logp_NT)[0].item() == 0.0


@pytest.mark.parametrize(("d", "k3"), [(1.0, 0.718282), (-1.0, 0.367879), (5.0, 142.413)])
def test_n01_values_of_k3(d: float, k3: float) -> None:
    value_NT = kl.k3(now([[-d]]), minibatch([0], [0], [[1]], ref_NT=[[0.0]]), beta=1.0)
    assert value_NT.item() == pytest.approx(k3, rel=1e-5)


@pytest.mark.parametrize(("tokens", "w"), [([30.0, -10.0], math.exp(10)), ([100.0, -100.0], 1.0)])
def test_n03_the_bound_is_on_the_mean_of_a_sequence(tokens: list[float], w: float) -> None:
    """OpenRLHF#1293: bounding the tokens first gives e^5 = 148.41 for the first."""
    for function in (ratio.sequence, ratio.sequence_token):
        logw_NT = function(now([tokens]), minibatch([0], [0], [[1, 1]], old_NT=[[0.0, 0.0]]))
        assert logw_NT.exp().tolist()[0] == pytest.approx([w, w], rel=1e-12)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("a", "value"), [(1.0, -1.2), (-1.0, math.exp(20))])
def test_n04_a_ratio_out_of_range_is_finite_for_both_signs(a: float, value: float, dtype: torch.dtype) -> None:
    """trl#3248: log w = 100. Unguarded: Â=+1 has loss −1.2 and gradient NaN, Â=−1 both infinite."""
    b = minibatch([0], [0], [[1]], dtype=dtype, old_NT=[[-100.0]], advantage=[[a]])
    total, grad_NT = value_and_gradient(Objective(clip=clip.ppo), now([[0.0]], dtype), b)
    assert total.item() == pytest.approx(value, rel=1e-6)
    assert grad_NT.item() == 0.0


@pytest.mark.parametrize("far", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("name", knobs.variants("clip"))
def test_n04_every_clip_is_finite_out_of_range(name: str, far: float) -> None:
    """In float32, for both signs of Â and with every ratio; and neither is the gradient NaN where the value is not."""
    for chosen in (ratio.token, ratio.sequence, ratio.sequence_token, ratio.prefix):
        for a in (1.0, -1.0):
            b = minibatch([0], [0], [[1, 1]], dtype=F32, old_NT=[[-far, -1.0]], advantage=[[a]])
            objective = Objective(ratio=chosen, clip=knobs.variants("clip")[name])
            total, grad_NT = value_and_gradient(objective, now([[0.0, -1.0]], F32), b)
            assert torch.isfinite(total)
            assert torch.isfinite(grad_NT).all()


@pytest.mark.parametrize("far", [89.0, -89.0, 1e4, -1e4])
@pytest.mark.parametrize("name", [n for n in knobs.variants("kl") if n not in ("none", "full")])
def test_n01_every_estimator_stays_finite(name: str, far: float) -> None:
    """`full` is the vocabulary's, see logprobs. Beyond the bound of d no estimator has a gradient but through k3_unbiased's own w."""
    forward = now([[-far]], F32)
    b = minibatch([0], [0], [[1]], dtype=F32, ref_NT=[[0.0]], old_NT=[[-far]])
    value_NT = knobs.variants("kl")[name](forward, b, beta=1.0)
    slope = torch.autograd.grad(value_NT.sum(), forward.logp_NT)[0].item()
    assert math.isfinite(value_NT.item())
    assert math.isfinite(slope)
    assert slope == 0.0 or name == "k3_unbiased"


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", [n for n, f in knobs.variants("advantage").items() if "values" not in knobs.needs(f)])
def test_n06_every_advantage_of_equal_rewards_is_exactly_zero(name: str, dtype: torch.dtype) -> None:
    """Whatever the mean rounds to, with ε = 0 where there is an ε: by group and by batch, by response and by step."""
    function = knobs.variants("advantage")[name]
    chosen = partial(function, eps=0.0) if "eps" in (function.__kwdefaults__ or {}) else function
    for r in (0.95, 0.1, 1e6 / 3, -0.7):
        for g in (1, 2, 3, 7, 8, 33):
            b = minibatch([r] * g, [0] * g, [[1, 1]] * g, dtype=dtype, step_r_NT=torch.full((g, 2), r, dtype=dtype))
            b = replace(b, step_end_NT=torch.ones(g, 2, dtype=torch.bool))
            assert (chosen(b) == 0).all()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_n06_equal_rewards_have_no_spread_whatever_rounding_says(dtype: torch.dtype) -> None:
    """NeMo-RL#4158: one-pass variance gave an advantage of −2075. Here: seven .95 and a 0, and eight .95."""
    assert a_of(advantage.leave_one_out, [0.0] + [0.95] * 7, dtype=dtype)[0] == pytest.approx(-0.95, rel=1e-6)
    # mean .83125, std = .95·√(1·7/(8·7)) = .33588: −.83125/.33598
    assert a_of(advantage.group_zscore, [0.0] + [0.95] * 7, dtype=dtype)[0] == pytest.approx(
        -0.83125 / (0.95 / math.sqrt(8) + 1e-4), rel=1e-5
    )
    for function in (advantage.group_zscore, advantage.group_center, advantage.leave_one_out):
        for r in (0.95, 0.1, 1e6 / 3):
            for g in (2, 3, 7, 8):
                assert a_of(function, [r] * g, dtype=dtype) == [0.0] * g
    large = a_of(partial(advantage.group_zscore, eps=0.0), [1e6, 1e6 + 1, 1e6, 1e6 + 1], dtype=dtype)
    assert large == pytest.approx([-math.sqrt(3) / 2, math.sqrt(3) / 2] * 2, rel=1e-6)  # two-pass: a shift of 1e6 changes nothing


def test_n08_epsilon_is_added_to_the_standard_deviation() -> None:
    """verl#6348: rewards 1, 1.00001: 5e-6/(7.071e-6 + 1e-6) = .6195 (.61960 in float32); with TRL's 1e-4, ours, ±.0467.
    Inside the root it would be ±.00501."""
    for eps in (1e-6, 1e-4):
        a = 5e-6 / (5e-6 * math.sqrt(2) + eps)
        assert a_of(partial(advantage.group_zscore, eps=eps), [1.0, 1.00001]) == pytest.approx([-a, a], rel=1e-9)
    assert a_of(partial(advantage.group_zscore, eps=1e-6), [1.0, 1.00001], dtype=F32)[1] == pytest.approx(0.61960, abs=5e-5)
    assert a_of(advantage.group_zscore, [1.0, 1.00001], dtype=F32)[1] == pytest.approx(0.04676, abs=5e-5)


# ---- M: masks ----


def test_m06_numerator_and_denominator_share_a_mask() -> None:
    """trl#6369: 100 and 300 tokens of loss 1, the second cut and hidden: 100/100, not 100/400."""
    b = minibatch(
        [1, 0], [0, 0], [[1] * 100 + [0] * 200, [1] * 300], limit=300, cut_N=[False, True], old_NT=torch.zeros(2, 300, dtype=F64)
    )
    for weighted, scale in (
        (aggregation.token_mean, 1.0),
        (aggregation.sequence_mean, 1.0),
        (aggregation.constant_length, 100 / 300),
    ):
        objective = Objective(
            advantage=lambda b: -torch.ones(2, 1, dtype=F64), aggregation=weighted, overlong=knobs.overlong.mask
        )
        total, grad_NT = from_rewards(objective, now([[0.0] * 300] * 2), b)
        assert total.item() == pytest.approx(scale, rel=1e-12)
        assert (grad_NT[0, :100] > 0).all()
        assert (grad_NT[1] == 0).all()


@pytest.mark.parametrize("weighted", [*knobs.variants("aggregation").values(), partial(aggregation.sequence_mean, per="group")])
def test_m07_a_batch_that_is_masked_altogether_is_zero(weighted: Any) -> None:
    forward, b = on_policy([1.0], [[0, 0]])
    total, grad_NT = value_and_gradient(
        Objective(aggregation=weighted, kl=partial(kl.k3, beta=1.0)), forward, replace(b, ref_NT=b.old_NT)
    )
    assert total.item() == 0.0
    assert grad_NT.tolist() == [[0.0, 0.0]]


def test_m08_tokens_of_a_tool_are_in_no_sum_and_no_count() -> None:
    """trl#4975: a a t t t a: denominator 3; the sequence ratio is the mean over three as well."""
    forward = now([[0.3, 0.3, 7.0, 7.0, 7.0, 0.3]])
    b = minibatch([0], [0], [[1, 1, 0, 0, 0, 1]], old_NT=torch.zeros(1, 6, dtype=F64), advantage=[[1.0]])
    b = replace(b, length_N=torch.tensor([6]))
    for chosen in (ratio.token, ratio.sequence):
        total, grad_NT = value_and_gradient(Objective(ratio=chosen), forward, b)
        assert total.item() == pytest.approx(-math.exp(0.3), rel=1e-12)
        third = -math.exp(0.3) / 3
        assert grad_NT.tolist()[0] == pytest.approx([third, third, 0, 0, 0, third], rel=1e-12)


# ---- A: aggregation; at w = 1 a token's loss is −Â ----


@pytest.mark.parametrize(
    ("weighted", "value"),
    [
        (aggregation.token_mean, (100 * 2.0 + 900 * 0.5) / 1000),
        (aggregation.sequence_mean, 1.25),
        (aggregation.constant_length, (100 * 2.0 + 900 * 0.5) / 2 / 1000),
        (aggregation.sequence_sum, (100 * 2.0 + 900 * 0.5) / 2),
    ],
)
def test_a01_a05_micro_batches_are_parts_of_one_step(weighted: Any, value: float) -> None:
    """trl#7206: 100 tokens of 2.0 and 900 of .5: token mean .65, not the mean of means, 1.25, nor divided again."""
    forward, b = on_policy([-2.0, -0.5], [[1] * 100 + [0] * 800, [1] * 900], limit=1000)
    objective, norm = Objective(aggregation=weighted), Norm.of(b)
    whole, grad_NT = value_and_gradient(objective, forward, b)
    assert whole.item() == pytest.approx(value, rel=1e-12)
    parts = [loss(objective, Forward(forward.logp_NT[k]), b.rows(k), norm)[0] for k in torch.arange(2).split(1)]
    assert sum(p.item() for p in parts) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), forward.logp_NT)[0], grad_NT, rtol=1e-14, atol=0)


@pytest.mark.parametrize("width", [4, 6, 8])
def test_a03_dr_grpo_divides_by_the_limit_not_by_the_padding(width: int) -> None:
    """verl#3741: lengths 2 and 4, loss 1, L_max 8: (2+4)/(2·8) = .375 at any width."""
    forward, b = on_policy([-1.0, -1.0], [[1] * n + [0] * (width - n) for n in (2, 4)], limit=8)
    total, grad_NT = value_and_gradient(Objective(aggregation=aggregation.constant_length), forward, b)
    assert total.item() == 0.375
    assert grad_NT[b.mask_NT].tolist() == [1 / 16] * 6


@pytest.mark.parametrize(
    ("weighted", "value"), [(aggregation.sequence_mean, 0.0), (aggregation.token_mean, 0.5), (aggregation.constant_length, 0.25)]
)
def test_a06_advantages_that_sum_to_zero_need_not_give_a_loss_of_zero(weighted: Any, value: float) -> None:
    """trl#2995: Â = ±1, lengths 1 and 3, L_max 4."""
    forward, b = on_policy([1.0, -1.0], [[1, 0, 0], [1, 1, 1]], limit=4)
    assert value_and_gradient(Objective(aggregation=weighted), forward, b)[0].item() == pytest.approx(value, abs=1e-15)


def test_a08_gspo_is_not_weighted_by_length() -> None:
    """trl#3823: Â = ±1, lengths 2 and 6: 0; broadcast over tokens and averaged it would be +.5."""
    forward, b = on_policy([1.0, -1.0], [[1, 1, 0, 0, 0, 0], [1] * 6])
    total, grad_NT = value_and_gradient(Objective(ratio=ratio.sequence), forward, b)
    assert total.item() == pytest.approx(0.0, abs=1e-15)
    assert grad_NT.sum(1).tolist() == pytest.approx([-0.5, 0.5], abs=1e-15)


def test_a09_one_row_a_micro_batch_is_still_a_token_mean() -> None:
    """open-instruct#1137: lengths 1 and 9, losses 1 and 0: .1, not .5."""
    forward, b = on_policy([-1.0, 0.0], [[1] + [0] * 8, [1] * 9])
    objective, norm = Objective(aggregation=aggregation.token_mean), Norm.of(b)
    parts = [loss(objective, Forward(forward.logp_NT[k]), b.rows(k), norm)[0].item() for k in torch.arange(2).split(1)]
    assert sum(parts) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize(
    ("weighted", "value"), [(aggregation.sequence_sum, 3.0), (aggregation.sequence_mean, 1.0), (aggregation.token_mean, 1.0)]
)
def test_a12_an_aggregation_is_what_its_name_says(weighted: Any, value: float) -> None:
    """verl#1233: loss 1, lengths 2 and 4."""
    forward, b = on_policy([-1.0, -1.0], [[1, 1, 0, 0], [1] * 4])
    assert value_and_gradient(Objective(aggregation=weighted), forward, b)[0].item() == pytest.approx(value, rel=1e-12)


# ---- G: groups ----


def test_g01_groups_go_by_id_not_by_position() -> None:
    """prime-rl#600: p1 has rewards 1, 1, p2 has 0, 0, drawn p1 p2 p1 p2: nothing to learn (by position: ±.707)."""
    assert a_of(advantage.group_zscore, [1, 0, 1, 0], [0, 1, 0, 1]) == [0.0] * 4


def test_g03_a_prompt_drawn_twice_is_two_groups() -> None:
    """NeMo-RL#3882. POLICY: a group is one draw. (1, 0) and (1, 1) → ±.707 and 0, 0; merged it would be .5, −1.5, .5, .5."""
    assert a_of(advantage.group_zscore, [1, 0, 1, 1], [0, 0, 1, 1]) == pytest.approx([0.70701, -0.70701, 0, 0], abs=1e-5)


@pytest.mark.parametrize("function", knobs.variants("advantage").values())
def test_g04_a_group_of_one_teaches_nothing(function: Any) -> None:
    """ms-swift#3980: NaN, or the raw reward. POLICY: 0 (the config refuses G = 1 with such a baseline)."""
    if "group_baseline" in knobs.traits(function):
        assert a_of(function, [1.0]) == [0.0]


def test_g04_g07_the_config_refuses_a_group_of_one() -> None:
    """trl#2858: for its own reason, and with the valid values."""
    run = {"name": "x", "task": "short", "objective": {"preset": "grpo"}, "rollout": {"group_size": 1}}
    with pytest.raises(UserError, match=r"group_size is 1.*at least 2"):
        parse_run(run, "here")


@pytest.mark.parametrize("function", [f for f in knobs.variants("advantage").values() if "group_baseline" in knobs.traits(f)])
def test_g13_siblings_without_a_common_id_teach_nothing(function: Any) -> None:
    """Search-R1#88: four groups of one would be REINFORCE on raw rewards; here they are nothing, which the log shows."""
    assert a_of(function, [1.0, 0.0, 1.0, 0.0], [0, 1, 2, 3]) == [0.0] * 4


def test_g06_ragged_groups_keep_their_own_statistics() -> None:
    """AReaL#1419: (1, 0, 1) and (0, 0, 1, 1), where a stride of 4 shifts every later group."""
    a = a_of(partial(advantage.group_zscore, eps=0.0), [1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1])
    assert a == pytest.approx([0.57735, -1.15470, 0.57735, -0.86603, -0.86603, 0.86603, 0.86603], abs=1e-5)


def test_g12_advantages_are_normalised_once() -> None:
    """gem#113: (1, 0) and (1, 1): ±.707, 0, 0: no whitening over the batch couples the prompts (it would give ±1.22)."""
    b = score(Objective(), minibatch([1, 0, 1, 1], [0, 0, 1, 1], [[1]] * 4)).b
    assert b.advantage is not None
    assert b.advantage.flatten().tolist() == pytest.approx([0.70701, -0.70701, 0, 0], abs=1e-5)


# ---- K: KL ----


def test_k01_the_direction_of_k3() -> None:
    """mlx-examples#1233: log π = −1, log π_ref = −2: e^{−1} = .367879, slope 1 − e^{−1} = .632121.
    The other way round: .718282 and 1.718282."""
    forward = now([[-1.0]])
    value_NT = kl.k3(forward, minibatch([0], [0], [[1]], ref_NT=[[-2.0]]), beta=1.0)
    assert value_NT.item() == pytest.approx(0.367879, abs=1e-6)
    assert torch.autograd.grad(value_NT.sum(), forward.logp_NT)[0].item() == pytest.approx(0.632121, abs=1e-6)


def test_k03_k1_in_the_loss_says_of_itself_that_it_teaches_nothing() -> None:
    """open-instruct#534: larger β, larger KL. (That its expected gradient is 0: test_exact, A2.)"""
    assert "zero_gradient_in_loss" in knobs.traits(partial(kl.k1, beta=1.0))
    assert not any("zero_gradient_in_loss" in knobs.traits(f) for f in (kl.none, kl.k2, kl.k3))


@pytest.mark.parametrize(
    ("filtered", "value", "slope"),
    [(knobs.sampling.all, 0.04 * 0.367879, 0.04 * 0.632121 / 4), (knobs.sampling.drop_zero_variance, 0.0, 0.0)],
)
def test_k04_a_flat_group_keeps_its_kl_unless_it_is_dropped(filtered: Any, value: float, slope: float) -> None:
    """trl#5588: equal rewards, β = .04, d = −1: loss .0147152, slope .0252848 a token (over 2 rows of 2 here).
    POLICY: see knobs.sampling."""
    b = minibatch([1, 1], [0, 0], [[1, 1]] * 2, old_NT=[[-1.0] * 2] * 2, ref_NT=[[-2.0] * 2] * 2)
    total, grad_NT = from_rewards(Objective(kl=partial(kl.k3, beta=0.04), sampling=filtered), now([[-1.0] * 2] * 2), b)
    assert total.item() == pytest.approx(value, abs=1e-7)
    assert grad_NT.flatten().tolist() == pytest.approx([slope] * 4, abs=1e-7)


@pytest.mark.parametrize(("in_loss", "in_reward"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0), (0.1, 0.1)])
def test_k07_kl_is_charged_once_where_it_is_asked_for(in_loss: float, in_reward: float) -> None:
    """OpenRLHF#768. Two rows of one token, d = −1 and −2 at π = π_old, Â = r − mean: k1 = 1 and 2.
    In the loss: −(.5 − .5)/2 + .1·(1 + 2)/2 = .15. In the reward: r = (.9, −.2), Â = ±.55, loss 0, slope ∓.275.
    """
    b = minibatch([1, 0], [0, 0], [[1]] * 2, old_NT=[[-1.0]] * 2, ref_NT=[[-2.0], [-3.0]])
    objective = Objective(
        advantage=advantage.group_center,
        kl=partial(kl.k1, beta=in_loss) if in_loss else kl.none,
        kl_in_reward=partial(kl.k1, beta=in_reward) if in_reward else kl.none,
    )
    total, grad_NT = from_rewards(objective, now([[-1.0]] * 2), b)
    a = 0.55 if in_reward else 0.5
    assert total.item() == pytest.approx(1.5 * in_loss, abs=1e-15)
    assert grad_NT.flatten().tolist() == pytest.approx([-a / 2 + in_loss / 2, a / 2 + in_loss / 2], abs=1e-15)
    if not in_loss and not in_reward:
        plain = from_rewards(replace(objective, kl=kl.none), now([[-1.0]] * 2), replace(b, ref_NT=None))
        assert torch.equal(plain[0], total)
        assert torch.equal(plain[1], grad_NT)


def test_k09_the_loss_of_the_first_step_is_the_kl_term() -> None:
    """trl#2703: "the loss starts at 0 and rises". Â sums to 0 and w = 1: loss = β·mean of the rows' mean k3; gradient not 0."""
    b = minibatch([1, 0], [0, 0], [[1, 1], [1, 0]], old_NT=[[-1.0, -1.0]] * 2, ref_NT=[[-2.0, -1.5], [-0.5, 0.0]])
    total, grad_NT = from_rewards(Objective(kl=partial(kl.k3, beta=0.04)), now([[-1.0, -1.0]] * 2), b)
    k3 = [math.exp(d) - 1 - d for d in (-1.0, -0.5, 0.5)]
    assert total.item() == pytest.approx(0.04 * ((k3[0] + k3[1]) / 2 + k3[2]) / 2, abs=1e-15)
    assert (grad_NT[b.mask_NT].abs() > 0.1).all()


# ---- O: ratio and clip ----


def test_o01_one_update_a_rollout_never_clips_and_still_learns() -> None:
    """trl#2769: the ratio is 1 by design; gradient −Â·∇logp."""
    forward, b = on_policy([2.0, -1.0], [[1, 1], [1, 0]])
    total, parts = loss(Objective(clip=clip.ppo), forward, b, Norm.of(b))
    assert (parts.logw_NT == 0).all()
    assert not parts.hit_NT.any()
    assert torch.autograd.grad(total, forward.logp_NT)[0].tolist() == [[-0.5, -0.5], [0.5, 0.0]]


def test_o04_a_hit_depends_on_the_side_and_on_the_sign() -> None:
    """trl#3144: losses −1.2, 1.5, −.5, .8 (mean .15); the first is clipped above, the last below. At the bound: not."""
    w, a = [1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0]
    b = minibatch([0] * 4, [0] * 4, [[1]] * 4, old_NT=[[0.0]] * 4, advantage=[[v] for v in a])
    forward = now([[math.log(v)] for v in w])
    total, parts = loss(Objective(clip=partial(clip.ppo, eps_low=0.2, eps_high=0.2)), forward, b, Norm.of(b))
    assert (-parts.gain_NT).flatten().tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8], rel=1e-14)
    assert total.item() == pytest.approx(0.15, rel=1e-14)
    assert parts.hit_NT.flatten().tolist() == [True, False, False, True]
    at_NT = torch.tensor([[1.25], [1.25], [0.75], [0.75]], dtype=F64).log()  # exact in binary
    assert not clip.ppo(at_NT, forward, b, eps_low=0.25, eps_high=0.25)[1].any()


def test_o08_the_token_ratio_is_not_the_product() -> None:
    """hands-on-modern-rl#75: Δ = .1 on 3 tokens, ε = .2: e^.1 = 1.105 passes, the product 1.350 would not."""
    b = minibatch([0], [0], [[1, 1, 1]], old_NT=[[-0.1] * 3], advantage=[[1.0]])
    forward = now([[0.0] * 3])
    for chosen, hits in ((ratio.token, [False] * 3), (ratio.sequence, [False] * 3), (ratio.prefix, [False, True, True])):
        assert loss(Objective(ratio=chosen, clip=clip.ppo), forward, b, Norm.of(b))[1].hit_NT.tolist() == [hits]


@pytest.mark.parametrize(("cap", "weight"), [(1.28, 1.28), (5.0, math.e), (0.2, 0.2)])
def test_o06_a_detached_weight_keeps_the_score_function(cap: float, weight: float) -> None:
    """open-instruct#1269: log π = −1, log π_old = −2, Â = 1: gradient −min(e, cap), not 0; value −weight·log π. A cap below 1, TRL's
    default (E2), erases the ratio and scales the step."""
    b = minibatch([0], [0], [[1]], old_NT=[[-2.0]], advantage=[[1.0]])
    total, grad_NT = value_and_gradient(Objective(clip=partial(clip.truncate, w_max=cap)), now([[-1.0]]), b)
    assert grad_NT.item() == pytest.approx(-weight, rel=1e-12)
    assert total.item() == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize("cap", [1.28, 3.0])
def test_o04_a_hit_of_a_two_sided_bound_is_where_it_acts(cap: float) -> None:
    """CISPO's bound acts on both signs above the cap and nowhere below; dual clip's on Â<0 above c as well."""
    w, a = [1.1, 1.1, 4.0, 4.0, 0.1, 0.1], [1.0, -1.0] * 3
    b = minibatch([0] * 6, [0] * 6, [[1]] * 6, old_NT=[[0.0]] * 6, advantage=[[v] for v in a])
    forward = now([[math.log(v)] for v in w])
    hits = {
        f: loss(Objective(clip=partial(f, w_max=cap)), forward, b, Norm.of(b))[1].hit_NT.flatten().tolist()
        for f in (clip.truncate, clip.dual)
    }
    assert hits[clip.truncate] == [False, False, True, True, False, False]
    assert hits[clip.dual] == [False, False, True, True, False, True]


# ---- S: the sampler ----


def test_s10_log_probs_shifted_by_one_are_no_small_correction() -> None:
    """python-sdk#457: [−.1, −2, −.3, −1.5] against itself shifted by one: mean |Δ| 1.6 over the three they share; unshifted ρ is 1."""
    right = [-0.1, -2.0, -0.3, -1.5]
    same = minibatch([0], [0], [[1] * 4], old_NT=[right], sampler_NT=[right])
    assert (correction.truncate(same) == 1).all()
    shifted = minibatch([0], [0], [[1] * 3], old_NT=[right[1:]], sampler_NT=[right[:-1]])
    rho_NT = correction.truncate(shifted, w_max=1e9)
    assert rho_NT.log().abs().mean().item() == pytest.approx(1.6)
    assert correction.mask(shifted, w_min=0.5, w_max=5.0).count_nonzero().item() == 0, "IcePop hides every token"


def test_a_correction_multiplies_what_the_clip_left_and_never_moves_the_clip() -> None:
    """The clip's anchor is `old`: w = 1 everywhere, π_old/μ = e: TIS at 2 doubles gain and gradient; nothing is clipped."""
    b = minibatch([0], [0], [[1, 1]], old_NT=[[-1.0, -1.0]], sampler_NT=[[-2.0, -2.0]], ref_NT=[[-2.0, -2.0]], advantage=[[1.0]])
    forward = now([[-1.0, -1.0]])
    objective = Objective(clip=clip.ppo, correction=partial(correction.truncate, w_max=2.0), kl=partial(kl.k2, beta=0.1))
    total, parts = loss(objective, forward, b, Norm.of(b))
    assert (parts.logw_NT == 0).all()
    assert not parts.hit_NT.any()
    assert total.item() == pytest.approx(-2.0 + 0.05, abs=1e-15)  # the KL (k2 = ½) is never corrected
    assert torch.autograd.grad(total, forward.logp_NT)[0].tolist()[0] == pytest.approx([-1.0 + 0.05] * 2, abs=1e-15)


# ---- R: rewards, D: which groups ----


def test_r07_a_reward_that_is_missing_is_not_a_zero() -> None:
    """trl#3079: NaN for None. Here it stops the step and names the row; it is never summed as 0."""
    with pytest.raises(NonFinite, match=r"reward.*nan at index 2"):
        score(Objective(), minibatch([1, 0, math.nan, 1], [0] * 4, [[1]] * 4))


def test_r13_partial_credit_is_an_advantage() -> None:
    """reasoning-gym#265: a wrong answer worth .05 among .01s gets +1.4925: the z-score knows order, not worth."""
    assert a_of(advantage.group_zscore, [0.01, 0.05, 0.01, 0.01])[1] == pytest.approx(0.03 / (0.02 + 1e-4), rel=1e-9)
    assert pytest.approx(1.4925, abs=1e-4) == 0.03 / (0.02 + 1e-4)


def test_r16_the_zscore_forgets_the_scale_of_the_reward() -> None:
    """open-instruct#659: [0,0,0,0,10] and [0,0,0,0,1] both give 1.789 / −.447."""
    for top in (10.0, 1.0):
        a = a_of(partial(advantage.group_zscore, eps=0.0), [0, 0, 0, 0, top])
        assert a == pytest.approx([-0.44721] * 4 + [1.78885], abs=1e-5)


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("filtered", [knobs.sampling.drop_zero_variance, knobs.sampling.dynamic])
def test_d01_d03_a_rollout_of_flat_groups_is_empty_and_harmless(filtered: Any, right: float) -> None:
    """DAPO#22, prime-rl#2277: all 0 or all 1: nothing is kept, the loss is 0 and its gradient 0, no 0/0. (How often the loop redraws and
    what it says: test_train.)"""
    b = minibatch([right] * 4, [0, 0, 1, 1], [[1, 1]] * 4, old_NT=[[-1.0] * 2] * 4, ref_NT=[[-2.0] * 2] * 4)
    for name, baseline in knobs.variants("advantage").items():
        if knobs.needs(baseline) or name == "running_zscore":
            continue
        objective = Objective(sampling=filtered, advantage=baseline, kl=partial(kl.k3, beta=0.1), clip=clip.ppo)
        scored = score(objective, b)
        assert (len(scored.row_K), scored.dropped_rows, scored.dropped_groups) == (0, 4, 2)
        total, grad_NT = from_rewards(objective, now([[-1.0] * 2] * 4), b)
        assert total.item() == 0.0
        assert (grad_NT == 0).all()


def test_d08_how_many_groups_are_flat_at_two() -> None:
    """CoursIA#10603, p = .1819: .702 of groups at G = 2, .449 at 4, .201 at 8, .040 at 16, by counting what the filter drops."""
    for g, printed in ((2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)):
        flat = 0.0
        for k in range(g + 1):
            r_N = torch.tensor([1.0] * k + [0.0] * (g - k))
            if not knobs.sampling.dynamic(r_N, torch.zeros(g, dtype=torch.int64)).any():
                flat += math.comb(g, k) * 0.1819**k * (1 - 0.1819) ** (g - k)
        assert flat == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize("weighted", [aggregation.token_mean, aggregation.sequence_mean, aggregation.constant_length])
def test_flat_groups_dilute_the_step_unless_they_are_dropped(weighted: Any) -> None:
    """trl#6365, CLAIMS E13: three flat groups beside one mixed: a quarter of the step; dropped, or under `balanced`, the whole of it."""
    r, group = [1.0, 0.0, *[1.0] * 6], [0, 0, 1, 1, 2, 2, 3, 3]
    b = minibatch(r, group, [[1, 1]] * 8, old_NT=[[-1.0] * 2] * 8)
    alone = b.rows(torch.arange(2))

    def step(chosen: Any, filtered: Any, batch: Any) -> Any:
        objective = Objective(aggregation=chosen, sampling=filtered, clip=clip.ppo)
        return from_rewards(objective, now([[-1.0] * 2] * len(batch.r_N)), batch)[1][:2]

    whole_NT = step(weighted, knobs.sampling.all, alone)
    torch.testing.assert_close(step(weighted, knobs.sampling.all, b), whole_NT / 4)
    torch.testing.assert_close(step(weighted, knobs.sampling.dynamic, b), whole_NT)
    torch.testing.assert_close(
        step(aggregation.balanced, knobs.sampling.all, b), step(aggregation.balanced, knobs.sampling.all, alone)
    )


def test_the_paper_of_pass_at_k_is_not_best_minus_second_best() -> None:
    """CLAIMS E6: verl's grpo_passk pays only a group with exactly one right answer; two right of four at k = 2 are worth something here."""
    a = a_of(partial(advantage.pass_at_k, k=2), [1.0, 1.0, 0.0, 0.0])
    assert a[0] == a[1] > 0 > a[2] == a[3]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (advantage, ("one response has nothing to be compared with", "all equal has Â = 0 exactly")),  # G04, N06
        (advantage.group_zscore, ("added to the\n    standard deviation",)),  # N08
        (knobs.sampling.all, ("KL term stays",)),  # K04
        (knobs.sampling.drop_zero_variance, ("KL term is dropped too",)),
        (aggregation.balanced, ("KL term is dropped with them",)),
        (knobs.overlong.mask, ("still counts in its group's baseline", "in no denominator")),  # M06
        (ratio.sequence, ("bound applies to the mean, not to the tokens",)),  # N03
        (Norm, ("Dropped rows are not counted",)),  # D04
        (loss, ("with every token masked\n    both are 0",)),  # M07
        (advantage.pass_at_k, ("highest and above 0", "a KL charged to the\n    reward is not seen")),
    ],
)
def test_where_frameworks_differ_the_docstring_says_our_choice(function: Any, words: tuple[str, ...]) -> None:
    assert all(said in (function.__doc__ or "") for said in words)


def test_d04_rows_and_groups_that_were_dropped_are_two_numbers() -> None:
    """open-instruct#1185: 10 prompts, 4 of them flat: 6 groups kept, 10 sampled, no denominator counts the rest."""
    r = [v for g in range(10) for v in ((1, 1, 1) if g < 4 else (1, 0, 0))]
    group = [g for g in range(10) for _ in range(3)]
    scored = score(Objective(sampling=knobs.sampling.drop_zero_variance), minibatch(r, group, [[1, 1]] * 30))
    assert (scored.dropped_groups, scored.dropped_rows, len(scored.row_K)) == (4, 12, 18)
    norm = Norm.of(scored.b)
    assert (norm.groups, norm.rows, norm.tokens) == (6, 18, 36)
