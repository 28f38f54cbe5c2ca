"""Value and gradient of the whole formula, from rewards to ∂loss/∂logp, against the loops of oracle.py at 1e-12 in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import oracle
import pytest
import torch
from batches import F64, PRESETS, every_variant, from_rewards, minibatch, oracle_spec, plain, random_batch, value_and_gradient

from grpo_repro import adaptive, knobs
from grpo_repro.objective import Objective, loss, score
from grpo_repro.types import Forward, Minibatch, NonFinite, Norm, UserError

SLOTS = [slot for slot in knobs.SLOTS if slot not in ("gate", "reward", "step")]


def agree(objective: Objective, now: Forward, b: Minibatch) -> None:
    value, grad_NT = from_rewards(objective, now, b)
    expected, expected_grad = oracle.value_and_gradient(oracle_spec(objective), plain(now, b))
    expected_NT = torch.tensor(expected_grad, dtype=F64)
    assert grad_NT.dtype == value.dtype == F64
    scale = max(1.0, float(expected_NT.abs().max()))  # a weight may be e^20
    torch.testing.assert_close(value, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12 * scale)
    torch.testing.assert_close(grad_NT, expected_NT, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_the_oracle(name: str, seed: int) -> None:
    agree(PRESETS[name], *random_batch(seed, drift=0.3 if seed % 2 else 0.02))


@pytest.mark.parametrize("slot", SLOTS)
def test_every_variant_equals_the_oracle(slot: str) -> None:
    """One knob turned over a base in which nothing is idle: corrected, clipped on both sides, with KL in the loss."""
    base = Objective(
        clip=partial(knobs.clip.ppo, eps_low=0.2, eps_high=0.3),
        kl=partial(knobs.kl.k3, beta=0.1),
        correction=knobs.correction.truncate,
    )
    for spec in every_variant(slot):
        for seed in (0, 1, 2):
            agree(replace(base, **{slot: knobs.resolve(slot, spec)}), *random_batch(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", list(every_variant("gate")), ids=str)
def test_every_gate_equals_the_oracle(spec: Any, seed: int) -> None:
    """On the gain and not on the KL, and it closes somewhere but not everywhere."""
    tight = {
        **spec,
        **{"off_policy": {"delta": 0.05}, "dppo_tv": {"eps_low": 0.01, "eps_high": 0.02}, "dppo_kl": {"eps": 1e-3}}[spec["name"]],
    }
    objective = Objective(gate=(knobs.resolve("gate", tight),), kl=partial(knobs.kl.k3, beta=0.1))
    now, b = random_batch(seed)
    agree(objective, now, b)
    b = score(objective, b).b
    open_NT = objective.gate[0](now.masked(b.mask_NT), b.masked())
    assert open_NT[b.mask_NT].any()
    assert not open_NT[b.mask_NT].all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("slot", "spec", "state"),
    [
        ("clip", {"name": "kl_penalty", "beta": 1.0, "target": 0.01}, {"beta": 0.3}),
        ("advantage", {"name": "running_zscore"}, {"mean": 0.4, "square": 0.3}),
        ("advantage", {"name": "running_zscore"}, {"mean": 1.0, "square": 1.0}),  # every reward so far was 1
    ],
)
def test_a_variant_with_a_memory_equals_the_oracle(slot: str, spec: Any, state: dict[str, float], seed: int) -> None:
    now, b = random_batch(seed)
    objective = replace(Objective(kl_in_reward=partial(knobs.kl.k1, beta=0.1)), **{slot: knobs.resolve(slot, spec)})
    agree(adaptive.bound(objective, {slot: state}), now, b)


@pytest.mark.parametrize("seed", range(4))
def test_the_critic_s_target_equals_the_oracle(seed: int) -> None:
    """Â + V, not whitened; 0 at masked tokens."""
    now, b = random_batch(seed)
    chosen = partial(knobs.advantage.gae, gamma=0.9, lam=0.8)
    scored = score(Objective(advantage=chosen, kl_in_reward=partial(knobs.kl.k1, beta=0.1)), b).b
    x, spec = plain(now, b), oracle_spec(Objective(advantage=chosen))["advantage"]
    for i, row in enumerate(scored.target_NT.tolist()):
        charge = [0.1 * (x.old[i][t] - x.ref[i][t]) if x.mask[i][t] else 0.0 for t in range(len(row))]
        expected = [0.0] * len(row)
        for t, a in zip(x.tokens(i), oracle.critic(spec, x, i, x.r[i], charge), strict=True):
            expected[t] = a + x.value[i][t]
        assert row == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(250))
def test_random_combinations_equal_the_oracle(seed: int) -> None:
    """Any ① works with any ②, ③, ④, ⑤; every fifth batch drifts far enough to reach the bound of ±20."""
    chance = Random(seed)
    chosen: dict[str, Any] = {slot: one_of(slot, chance) for slot in SLOTS}
    chosen["gate"] = tuple(one_of("gate", chance) for _ in range(chance.choice([0, 0, 1, 2])))
    by_token = {"token_advantage", "token_advantage_with_kl"} & knobs.traits(chosen["advantage"])
    if by_token and "by_sign" in knobs.traits(chosen["aggregation"]):
        chosen["aggregation"] = knobs.aggregation.token_mean  # balanced asks for the sign of a whole response
    agree(Objective(**chosen), *random_batch(1000 + seed, drift=15.0 if seed % 5 == 0 else 0.3))


def one_of(slot: str, chance: Random) -> Any:
    return knobs.resolve(slot, turned(slot, chance.choice(list(every_variant(slot))), chance))


def turned(slot: str, spec: dict[str, Any], chance: Random) -> dict[str, Any]:
    """The widths and bounds of a variant, drawn instead of its defaults."""
    widths = {"eps_low": chance.choice([0.0, 0.2, 3e-4, None]), "eps_high": chance.choice([0.28, 4e-4, 1.0, None])}
    drawn: dict[tuple[str, str], dict[str, Any]] = {
        ("clip", "ppo"): widths,
        ("clip", "dual"): {**widths, "w_max": chance.choice([2.1, 3.0])},
        ("clip", "truncate"): {"w_min": chance.choice([0.0, 0.8]), "w_max": chance.choice([1.2, 5.0])},
        ("clip", "soft_sigmoid"): {"tau_pos": chance.choice([1.0, 2.0]), "tau_neg": chance.choice([1.05, 0.5])},
        ("clip", "soft_tanh"): {"tau": chance.choice([0.5, 1.0, 3.0])},
        ("gate", "off_policy"): {"delta": chance.choice([0.02, 0.5])},
        ("gate", "dppo_tv"): {"eps_low": chance.choice([0.01, 0.2]), "eps_high": chance.choice([0.02, 0.3])},
        ("gate", "dppo_kl"): {"eps": chance.choice([1e-3, 0.05])},
        ("correction", "truncate"): {"w_max": chance.choice([0.9, 1.5, 5.0])},
        ("correction", "mask"): {"w_min": 0.7, "w_max": 1.4},
        ("advantage", "group_zscore"): {"eps": chance.choice([1e-4, 1e-6, 0.0])},
        ("advantage", "pass_at_k"): {"k": chance.choice([1, 2, 3])},
        ("advantage", "gae"): {"gamma": chance.choice([1.0, 0.9]), "lam": chance.choice([1.0, 0.95, 0.0])},
        ("overlong", "soft_penalty"): {"cache": chance.choice([None, 3, 5])},
        ("transform", "sigmoid"): {"center": chance.choice([0.0, 0.5]), "scale": chance.choice([0.3, 2.0])},
    }
    return {**spec, **drawn.get((slot, spec["name"]), {})}


def test_grpo_by_hand() -> None:
    """2×4. Rewards 1, 0: mean .5, std √.5 = .70711, Â = ±.5/(.70711+1e-4) = ±.70701.
    Row 0: w = (1.1, 1.5), 2 tokens; row 1: w = (.5, 1, 1, 1.5), 4 tokens. ε = .2, β = 0.
    Row 0, Â>0: min(1.1, ·), min(1.5, 1.2) → (1.1 + 1.2)/2 = 1.15
    Row 1, Â<0: −max(.5, .8), −1, −1, −1.5 → −(.8 + 1 + 1 + 1.5)/4 = −1.075
    loss = −½ · .70701 · (1.15 − 1.075) = −.70701 · .0375
    ∂/∂logp = −½ · Â · w/|y| where it passes: row 0 (−½·.70701·1.1/2, 0); row 1 (0, +½·.70701·(1, 1, 1.5)/4).
    """
    a = 0.5 / (0.5**0.5 + 1e-4)
    w_NT = torch.tensor([[1.1, 1.5, 1.0, 1.0], [0.5, 1.0, 1.0, 1.5]], dtype=F64)
    b = minibatch(
        [1, 0], [0, 0], [[1, 1, 0, 0], [1, 1, 1, 1]], old_NT=torch.zeros(2, 4, dtype=F64), ref_NT=torch.zeros(2, 4, dtype=F64)
    )
    value, grad_NT = from_rewards(replace(PRESETS["grpo"], kl=knobs.kl.none), Forward(w_NT.log().requires_grad_()), b)
    assert value.item() == pytest.approx(-a * 0.0375, abs=1e-12)
    expected = [[-a * 1.1 / 4, 0, 0, 0], [0, a / 8, a / 8, a * 1.5 / 8]]
    torch.testing.assert_close(grad_NT, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def test_gspo_by_hand() -> None:
    """2×4, Â = ±.70701 as above. Row 0: log w = (.0002, −.0006): mean −.0002, s = .9998, inside (.9997, 1.0004).
    Row 1: log w = (.001,)×4: s = e^.001 = 1.0010005 with Â<0: passes (only w < 1−ε is cut for Â<0).
    loss = −½·(Â·.9998 − Â·1.0010005); every token's gradient is −½·Â·s/|y|.
    """
    a = 0.5 / (0.5**0.5 + 1e-4)
    logp_NT = torch.tensor([[0.0002, -0.0006, 9.0, 9.0], [0.001, 0.001, 0.001, 0.001]], dtype=F64, requires_grad=True)
    b = minibatch([1, 0], [0, 0], [[1, 1, 0, 0], [1, 1, 1, 1]], old_NT=torch.zeros(2, 4, dtype=F64))
    value, grad_NT = from_rewards(PRESETS["gspo"], Forward(logp_NT), b)
    s0, s1 = torch.tensor([-0.0002, 0.001], dtype=F64).exp().tolist()
    assert value.item() == pytest.approx(-0.5 * a * (s0 - s1), abs=1e-14)
    expected = torch.tensor([[-a * s0 / 4] * 2 + [0, 0], [a * s1 / 8] * 4], dtype=F64)
    torch.testing.assert_close(grad_NT, expected, rtol=1e-12, atol=1e-12)


def test_rloo_by_hand() -> None:
    """2×4. KL in the reward, β = .03, k1 = log π_old − log π_ref: row 0: .5 + .5 = 1 → r = 1 − .03 = .97; row 1: −1 → r = .03.
    Â = ±(.97 − .03) = ±.94. Loss = −½ Σ_i Â_i·|y_i|·1 = −½·.94·(2 − 4) = .94; ∂/∂logp = ∓½·.94 on every token.
    """
    b = minibatch(
        [1, 0],
        [0, 0],
        [[1, 1, 0, 0], [1, 1, 1, 1]],
        old_NT=[[-1.0, -1.0, 0, 0], [-2.0, -2.0, -2.0, -2.0]],
        ref_NT=[[-1.5, -1.5, 0, 0], [-1.75, -1.75, -1.75, -1.75]],
    )
    assert b.old_NT is not None
    value, grad_NT = from_rewards(PRESETS["rloo"], Forward(b.old_NT.clone().requires_grad_()), b)
    assert value.item() == pytest.approx(0.94, abs=1e-12)
    expected = torch.tensor([[-0.47, -0.47, 0, 0], [0.47] * 4], dtype=F64)
    torch.testing.assert_close(grad_NT, expected, rtol=1e-12, atol=1e-12)


def test_dr_grpo_by_hand() -> None:
    """2×4, L_max = 8, w = 1. Â = r − mean = ±.5. Loss = −½·(.5·2 − .5·4)/8 = .0625; gradient ∓½·.5/8 = ∓.03125 a token."""
    b = minibatch([1, 0], [0, 0], [[1, 1, 0, 0], [1, 1, 1, 1]], old_NT=torch.zeros(2, 4, dtype=F64))
    value, grad_NT = from_rewards(PRESETS["dr_grpo"], Forward(torch.zeros(2, 4, dtype=F64, requires_grad=True)), b)
    assert value.item() == 0.0625
    assert grad_NT.tolist() == [[-0.03125, -0.03125, 0, 0], [0.03125] * 4]


def test_a_gate_multiplies_the_gain_and_not_the_kl() -> None:
    """w = 1, Â = 1, k2 = ½·(−1 − −2)² = .5, gate (1, 0): loss −½(1·1 + 0·1) + ½(.5 + .5) = 0; gradient −½ + ½·1 = 0 and ½·1."""
    b = minibatch([0], [0], [[1, 1]], old_NT=[[-1.0, -1.0]], ref_NT=[[-2.0, -2.0]], advantage=[[1.0]])
    objective = Objective(kl=partial(knobs.kl.k2, beta=1.0), gate=(lambda now, b: torch.tensor([[True, False]]),))
    value, grad_NT = value_and_gradient(objective, Forward(torch.full((1, 2), -1.0, dtype=F64, requires_grad=True)), b)
    assert value.item() == 0.0
    assert grad_NT.tolist() == [[0.0, 0.5]]


def test_no_kl_is_charged_for_a_masked_token_whatever_the_estimator_says_there() -> None:
    b = minibatch([1, 0], [0, 0], [[1, 0], [1, 1]], old_NT=[[-1.0] * 2] * 2)
    scored = score(Objective(kl_in_reward=lambda now, b: torch.ones_like(now.logp_NT)), b).b
    assert scored.penalty_NT.tolist() == [[1.0, 0.0], [1.0, 1.0]]


def test_a_prompt_s_weight_scales_its_gain_and_its_kl_and_no_denominator() -> None:
    """Weights 2 and ½, w = 1, Â = 1 and −1, k2 = ½ in both, two rows of one token: −½·(2·(1 − ½) + ½·(−1 − ½)) = −.125."""
    b = minibatch([0, 0], [0, 1], [[1], [1]], old_NT=[[-1.0]] * 2, ref_NT=[[-2.0]] * 2, advantage=[[1.0], [-1.0]])
    b = replace(b, prompt_weight_N=torch.tensor([2.0, 0.5], dtype=F64))
    objective = Objective(kl=partial(knobs.kl.k2, beta=1.0))
    value, grad_NT = value_and_gradient(objective, Forward(torch.full((2, 1), -1.0, dtype=F64, requires_grad=True)), b)
    assert value.item() == -0.125
    assert grad_NT.tolist() == [[-0.5 * 2 * (1 - 1)], [-0.5 * 0.5 * (-1 - 1)]]  # ∂k2 = d = 1 at both


def test_parts_say_what_the_loss_used() -> None:
    """w = 1.5 and .5 with Â = 1, ε = .2: gain 1.2 (hit) and .5 (not hit); k2 of log 1.5 − 0 with β = 2 is log(1.5)²; weight ½."""
    b = minibatch([0], [0], [[1, 1, 0]], old_NT=[[0.0, 0.0, 0.0]], ref_NT=[[0.0, 0.0, 0.0]], advantage=[[1.0]])
    logp_NT = torch.tensor([[1.5, 0.5, 3.0]], dtype=F64).log().requires_grad_()
    total, parts = loss(Objective(clip=knobs.clip.ppo, kl=partial(knobs.kl.k2, beta=2.0)), Forward(logp_NT), b, Norm.of(b))
    assert not any(x.requires_grad for x in vars(parts).values())
    torch.testing.assert_close(parts.logw_NT[0, :2].exp(), torch.tensor([1.5, 0.5], dtype=F64))
    torch.testing.assert_close(parts.gain_NT[0, :2], torch.tensor([1.2, 0.5], dtype=F64))
    assert parts.hit_NT.tolist() == [[True, False, False]]
    torch.testing.assert_close(parts.kl_NT[0, :2], torch.tensor([1.5, 0.5], dtype=F64).log() ** 2)
    assert parts.weight_NT.tolist() == [[0.5, 0.5, 0.0]]
    assert total.item() == pytest.approx(float(-(parts.weight_NT * (parts.gain_NT - parts.kl_NT)).sum()), abs=1e-15)


def test_score_counts_what_it_dropped() -> None:
    b = minibatch([1, 1, 1, 0, 0, 0], [4, 4, 9, 9, 2, 2], [[1]] * 6)
    scored = score(Objective(sampling=knobs.sampling.drop_zero_variance), b)
    assert (scored.row_K.tolist(), scored.dropped_rows, scored.dropped_groups) == ([2, 3], 4, 2)
    assert scored.b.group_N.tolist() == [9, 9]
    everything = score(Objective(), b)
    assert (everything.row_K.tolist(), everything.dropped_rows, everything.dropped_groups) == (list(range(6)), 0, 0)


def test_the_advantage_sees_kept_rows_with_transformed_rewards() -> None:
    """A statistic of the batch: rewards 1, 1 (flat, dropped) and 1, 0 (doubled: 2, 0): Â = ±1, nothing of the dropped rows."""
    b = minibatch([1, 1, 1, 0], [0, 0, 1, 1], [[1]] * 4)
    objective = Objective(
        sampling=knobs.sampling.drop_zero_variance,
        transform=lambda r_N, group_N: 2 * r_N,
        advantage=lambda b: (b.r_N - b.r_N.mean()).unsqueeze(1),
    )
    advantage = score(objective, b).b.advantage
    assert advantage is not None
    assert advantage.tolist() == [[1.0], [-1.0]]


def test_score_hides_truncated_rows_from_the_loss_but_not_from_the_baseline() -> None:
    """Rewards 1, 0, 0 with the last row cut: mean ⅓ (not ½), Â = ⅔, −⅓, −⅓; the loss has two live rows."""
    b = minibatch([1, 0, 0], [0, 0, 0], [[1, 1], [1, 1], [1, 1]], cut_N=[False, False, True])
    scored = score(Objective(advantage=knobs.advantage.group_center, overlong=knobs.overlong.mask), b)
    torch.testing.assert_close(scored.b.advantage, torch.tensor([[2 / 3], [-1 / 3], [-1 / 3]], dtype=F64))
    norm = Norm.of(scored.b)
    assert (norm.rows, norm.live_rows, norm.tokens, norm.groups) == (3, 2, 4, 1)
    assert norm.sign_rows == (1, 0, 1)
    assert norm.sign_tokens == (2, 0, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_a_number_is_named(bad: float) -> None:
    with pytest.raises(NonFinite, match=r"reward \(knob ⑦\) is .* at index 1"):
        score(Objective(), minibatch([1, bad], [0, 0], [[1], [1]]))


def test_an_advantage_that_is_not_a_number_is_named() -> None:
    with pytest.raises(NonFinite, match=r"advantage \(knob ③\) is nan at index 0"):
        score(Objective(advantage=lambda b: b.r_N.unsqueeze(1) * torch.nan), minibatch([1, 0], [0, 0], [[1], [1]]))


LIVE = minibatch(
    [1, 0],
    [0, 0],
    [[1, 1], [1, 0]],
    old_NT=[[-1.0, -1.0]] * 2,
    sampler_NT=[[-1.0, -1.0]] * 2,
    ref_NT=[[-1.0, -1.0]] * 2,
    advantage=[[1.0], [-1.0]],
)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ("logp_NT", r"policy's log-prob \(π_θ, knob ①\)"),
        ("old_NT", r"old policy's log-prob \(π_old, knob ①\)"),
        ("sampler_NT", r"sampler's log-prob \(μ, knob ① correction\)"),
        ("ref_NT", r"reference's log-prob \(π_ref, knob ⑤\)"),
        ("advantage", r"advantage \(knob ③\)"),
        ("exact_kl_NT", r"exact KL \(knob ⑤\)"),
    ],
)
def test_a_live_token_that_is_not_a_number_is_named(tensor: str, said: str, bad: float) -> None:
    """Also where a bound would have made it finite (log π = ∞ has w = e^20) and where no variant of the objective would notice."""
    now = Forward(torch.full((2, 2), -1.0, dtype=F64, requires_grad=True), exact_kl_NT=torch.zeros(2, 2, dtype=F64))
    holder: Any = now if hasattr(now, tensor) else LIVE
    broken = getattr(holder, tensor).detach().clone()
    broken[1, 0] = bad
    changed = replace(holder, **{tensor: broken})
    where = 1 if tensor == "advantage" else 2
    args = (changed, LIVE) if holder is now else (now, changed)
    with pytest.raises(NonFinite, match=rf"{said} is .*{str(bad)[-3:]} at index {where}"):
        loss(Objective(clip=knobs.clip.ppo, kl=partial(knobs.kl.k3, beta=0.1)), *args, Norm.of(LIVE))


def test_numbers_that_are_only_large_are_not_refused() -> None:
    far = replace(LIVE, old_NT=torch.full((2, 2), -1e5, dtype=F64))
    total, _ = loss(Objective(clip=knobs.clip.ppo), Forward(torch.zeros(2, 2, dtype=F64, requires_grad=True)), far, Norm.of(far))
    assert torch.isfinite(total)


@pytest.mark.parametrize(
    ("now_shape", "changed", "said"),
    [
        ((2, 3), {}, r"Forward\.logp_NT has shape \(2, 3\), but the mask of the minibatch has \(2, 2\)"),
        ((1, 2), {}, r"Forward\.logp_NT has shape \(1, 2\), but the mask of the minibatch has \(2, 2\)"),
        ((2, 2), {"old_NT": torch.zeros(2, 1)}, r"Minibatch\.old_NT has shape \(2, 1\).*\(2, 2\); give one number a token"),
        ((2, 2), {"ref_NT": torch.zeros(2)}, r"Minibatch\.ref_NT has shape \(2,\)"),
    ],
)
def test_shapes_that_disagree_are_named_not_broadcast(now_shape: tuple[int, ...], changed: dict[str, Any], said: str) -> None:
    now = Forward(torch.zeros(now_shape, dtype=F64, requires_grad=True))
    with pytest.raises(UserError, match=said):
        loss(Objective(clip=knobs.clip.ppo), now, replace(LIVE, **changed), Norm.of(LIVE))


def test_needs_are_those_of_the_slots() -> None:
    """RLOO reads no old log-prob in its ratio, but the KL in its reward is that of the old policy."""
    assert {name: PRESETS[name].needs for name in ("grpo", "gspo", "dr_grpo", "rloo")} == {
        "grpo": {"old", "ref"},
        "gspo": {"old"},
        "dr_grpo": {"old"},
        "rloo": {"old", "ref"},
    }
    assert Objective(ratio=knobs.ratio.none).needs == frozenset()
    assert Objective(correction=knobs.correction.mask).needs == {"old", "sampler"}


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        # DeepSeekMath: ε .2, β .04; ddof 1 and 1e-4 are TRL's
        (
            "grpo",
            {
                "ratio": {"name": "token"},
                "clip": {"name": "ppo", "eps_low": 0.2, "eps_high": 0.2},
                "advantage": {"name": "group_zscore", "ddof": 1, "eps": 1e-4},
                "aggregation": {"name": "sequence_mean", "per": "row"},
                "kl": {"name": "k3", "beta": 0.04},
            },
        ),
        # Dr. GRPO: no std, a constant length, β 0
        ("dr_grpo", {"advantage": {"name": "group_center"}, "aggregation": {"name": "constant_length"}, "kl": {"name": "none"}}),
        # GSPO: 3e-4/4e-4, β 0
        (
            "gspo",
            {"ratio": {"name": "sequence"}, "clip": {"name": "ppo", "eps_low": 3e-4, "eps_high": 4e-4}, "kl": {"name": "none"}},
        ),
        # RLOO: no ratio, no clip, β .03 with k1 in the reward
        (
            "rloo",
            {
                "ratio": {"name": "none"},
                "clip": {"name": "none"},
                "advantage": {"name": "leave_one_out"},
                "aggregation": {"name": "sequence_sum"},
                "kl": {"name": "none"},
                "kl_in_reward": {"name": "k1", "beta": 0.03},
            },
        ),
    ],
)
def test_preset_holds_the_paper_s_choices(name: str, slots: dict[str, Any]) -> None:
    """Every other slot is at its plainest, or at GRPO's in what is written as a change of GRPO."""
    others = oracle_spec(Objective() if name in ("grpo", "rloo") else PRESETS["grpo"])
    assert oracle_spec(PRESETS[name]) == {**others, **slots}
