"""③ by hand: 2 groups × 4 rows: rewards 1, 0, 0, 0 and .5, .5, 0, 1."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
from batches import F64, minibatch

from grpo_repro.knobs import advantage, resolve
from grpo_repro.types import UserError

R = [1, 0, 0, 0, 0.5, 0.5, 0, 1]
GROUP = [5, 5, 5, 5, 1, 1, 1, 1]


def a_of(function: Any, r: list[float] = R, group: list[int] = GROUP, **more: Any) -> list[float]:
    out_N1 = function(minibatch(r, group, [[1]] * len(r), **more))
    assert out_N1.shape == (len(r), 1)
    return out_N1.squeeze(1).tolist()


def test_group_center() -> None:
    """Means .25 and .5."""
    assert a_of(advantage.group_center) == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0, -0.5, 0.5], abs=1e-15)


def test_leave_one_out() -> None:
    """Against the mean of the other three: 1 − 0, 0 − ⅓; .5 − .5, 0 − ⅔, 1 − ⅓."""
    assert a_of(advantage.leave_one_out) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, -2 / 3, 2 / 3], abs=1e-15)


def test_group_zscore() -> None:
    """Squares: .5625 + 3·.0625 = .75 and .25 + .25 = .5; ddof 1: √(.75/3) = .5 and √(.5/3); ddof 0: √(.75/4) and √(.5/4)."""
    for ddof in (0, 1):
        s1, s2 = sqrt(0.75 / (4 - ddof)) + 1e-4, sqrt(0.5 / (4 - ddof)) + 1e-4
        expected = [0.75 / s1, *[-0.25 / s1] * 3, 0, 0, -0.5 / s2, 0.5 / s2]
        assert a_of(partial(advantage.group_zscore, ddof=ddof)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("eps", "top"), [(1e-4, 1.4997), (1e-6, 1.499997), (0.0, 1.5)])
def test_group_zscore_under_each_framework_s_epsilon(eps: float, top: float) -> None:
    """[1, 0, 0, 0]: .75/(.5 + ε): TRL's 1e-4 is the default, verl's 1e-6."""
    assert a_of(partial(advantage.group_zscore, eps=eps), [1, 0, 0, 0], [0] * 4)[0] == pytest.approx(top, abs=2e-7)
    if eps == 1e-4:
        assert a_of(advantage.group_zscore, [1, 0, 0, 0], [0] * 4)[0] == pytest.approx(top, abs=2e-7)


@pytest.mark.parametrize("function", [advantage.group_center, advantage.leave_one_out, advantage.group_zscore])
def test_ragged_interleaved_groups(function: Any) -> None:
    """Rows of two groups (of 3 and of 2) in any order, with ids that are no indices: each group as if alone."""
    mixed = a_of(function, [1, 9, 0, 8, 0], [70, -3, 70, -3, 70])
    assert [mixed[0], mixed[2], mixed[4]] == pytest.approx(a_of(function, [1, 0, 0], [0] * 3), abs=1e-15)
    assert [mixed[1], mixed[3]] == pytest.approx(a_of(function, [9, 8], [0] * 2), abs=1e-15)


@pytest.mark.parametrize("function", [advantage.group_center, advantage.leave_one_out, advantage.group_zscore])
def test_a_kl_charged_to_the_reward_is_in_the_baseline(function: Any) -> None:
    """r = 1, 0 with penalties .1 + .2 and .4 + 0: the advantage is that of .7, −.4."""
    b = minibatch([1, 0], [0, 0], [[1, 1]] * 2, penalty_NT=[[0.1, 0.2], [0.4, 0.0]])
    assert function(b).squeeze(1).tolist() == pytest.approx(a_of(function, [0.7, -0.4], [0, 0]), rel=1e-12)


def test_a_flat_group_whose_penalty_differs_is_not_flat() -> None:
    """DESIGN §2.8: group_zscore × KL in the reward: a flat group gets ±.7 from the KL alone."""
    b = minibatch([1, 1], [0, 0], [[1]] * 2, penalty_NT=[[1e-2], [2e-2]])
    a = 0.005 / (0.01 / sqrt(2) + 1e-4)  # = .697
    assert advantage.group_zscore(b).squeeze(1).tolist() == pytest.approx([a, -a], rel=1e-9)


@pytest.mark.parametrize("function", [advantage.group_center, advantage.leave_one_out, advantage.group_zscore])
def test_nothing_kept_is_an_empty_advantage(function: Any) -> None:
    assert function(minibatch([0], [0], [[1]], dtype=F64).rows(torch.arange(0))).shape == (0, 1)


def test_batch_std() -> None:
    """Centred by group; the eight rewards have mean 3/8 and Σ(r − 3/8)² = 2.5 − 8·9/64 = 1.375."""
    for ddof in (0, 1):
        s = sqrt(1.375 / (8 - ddof)) + 1e-4
        expected = [v / s for v in (0.75, -0.25, -0.25, -0.25, 0, 0, -0.5, 0.5)]
        assert a_of(partial(advantage.batch_std, ddof=ddof)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_batch_std_leaves_a_flat_group_flat() -> None:
    assert a_of(advantage.batch_std, [0.1, 0.1, 0.1, 1, 0], [0, 0, 0, 1, 1])[:3] == [0.0] * 3


def test_batch_zscore() -> None:
    """A row of two tokens with r = 1 and one of one token with r = 0: values 1, 1, 0, mean ⅔, Σ² = ⅔: ddof 1 std √⅓."""
    b = minibatch([1, 0], [0, 1], [[1, 1], [1, 0]])
    a_NT = advantage.batch_zscore(b, ddof=1, eps=0.0)
    assert a_NT.flatten().tolist() == pytest.approx([sqrt(1 / 3), sqrt(1 / 3), -2 * sqrt(1 / 3), 0])
    a_NT = advantage.batch_zscore(b, ddof=0, eps=0.1)
    assert a_NT[0, 0].item() == pytest.approx((1 / 3) / (sqrt(2) / 3 + 0.1))


def test_batch_zscore_charges_a_kl_to_the_tokens_that_lead_to_it() -> None:
    """r = 1, penalties .1, .2 | r = 0, penalty .3: A = 1 − .3, 1 − .2 | −.3: mean .4, centred .3, .4, −.7, Σ² = .74."""
    b = minibatch([1, 0], [0, 1], [[1, 1], [1, 0]], penalty_NT=[[0.1, 0.2], [0.3, 0.0]])
    s = sqrt(0.74 / 2)
    assert advantage.batch_zscore(b, eps=0.0).flatten().tolist() == pytest.approx([0.3 / s, 0.4 / s, -0.7 / s, 0])


def test_max_rl() -> None:
    """Means .25 and .5: .75/.25 = 3, −1 | 0, 0, −1, 1."""
    assert a_of(partial(advantage.max_rl, eps=0.0)) == pytest.approx([3, -1, -1, -1, 0, 0, -1, 1])
    assert a_of(advantage.max_rl)[0] == pytest.approx(0.75 / 0.2501)


def test_pass_at_k_by_enumerating_the_subsets() -> None:
    """Right if any of k is. N = 5, two right, k = 2: of the 10 pairs 3 have no right one: R̄ = .7, σ = √.21.
    A right response is in pairs that are always right: (1 − .7)/σ. A wrong one is in 4 pairs, of which 2 are right: (.5 − .7)/σ."""
    a = a_of(partial(advantage.pass_at_k, k=2), [0, 1, 0, 1, 0], [0] * 5)
    assert a == pytest.approx([v / sqrt(0.21) for v in (-0.2, 0.3, -0.2, 0.3, -0.2)])
    pairs = [(i, j) for i in range(5) for j in range(i)]
    right = {p: float(1 in p or 3 in p) for p in pairs}
    for i in range(5):
        mine = [right[p] for p in pairs if i in p]
        assert a[i] == pytest.approx((sum(mine) / len(mine) - sum(right.values()) / 10) / sqrt(0.21))


def test_pass_at_k_takes_the_group_s_best_as_right_and_not_the_kl() -> None:
    """.5 and 1: only 1 is right; −1 and 0: nothing is; a KL in the reward does not make a wrong answer right."""
    assert a_of(partial(advantage.pass_at_k, k=1), [0.5, 1.0], [0, 0]) == pytest.approx([-1, 1])
    assert a_of(partial(advantage.pass_at_k, k=1), [-1.0, 0.0], [0, 0]) == [0.0, 0.0]
    b = minibatch([1, 0], [0, 0], [[1]] * 2, penalty_NT=[[0.0], [-0.1]])
    assert advantage.pass_at_k(b, k=1).flatten().tolist() == pytest.approx([1, -1])


def test_pass_at_k_vanishes_with_fewer_than_k_wrong_or_in_all() -> None:
    assert a_of(partial(advantage.pass_at_k, k=2), [1, 1, 0], [0] * 3) == [0.0] * 3
    assert a_of(partial(advantage.pass_at_k, k=4), [1, 0, 0], [0] * 3) == [0.0] * 3
    with pytest.raises(UserError, match="k"):
        resolve("advantage", {"name": "pass_at_k", "k": 0})


def test_running_zscore() -> None:
    """First rollout: its own mean .375, std √(1.375/8). Later: m = .2, s = .08: std √(.08 − .04) = .2."""
    own = a_of(partial(advantage.running_zscore, eps=0.0))
    assert own[0] == pytest.approx(0.625 / sqrt(1.375 / 8))
    held = partial(advantage.running_zscore, eps=0.0, state={"mean": 0.2, "square": 0.08})
    assert a_of(held) == pytest.approx([(r - 0.2) / 0.2 for r in R])
    assert a_of(partial(held, eps=0.3))[0] == pytest.approx(0.8 / 0.5)


def test_running_zscore_of_rewards_that_never_differed() -> None:
    """std 0: with ε the distance over ε, without it nothing (not 0/0); a first rollout that is flat is 0, not round-off over ε."""
    never = {"mean": 1.0, "square": 1.0}
    assert a_of(partial(advantage.running_zscore, eps=0.5, state=never), [1, 0], [0, 0]) == [0.0, -2.0]
    assert a_of(partial(advantage.running_zscore, eps=0.0, state=never), [1, 0], [0, 0]) == [0.0, 0.0]
    assert a_of(partial(advantage.running_zscore, eps=0.0), [0.1] * 3, [0] * 3) == [0.0] * 3


def test_gae() -> None:
    """γ = λ = ½, V = 1, 2, (a hole), 3, r = 4: δ = ½·2 − 1 = 0, ½·3 − 2 = −½, 4 − 3 = 1; Â₃ = 1, Â₂ = −½ + ¼ = −¼, Â₁ = −1/16."""
    b = minibatch([4], [0], [[1, 1, 0, 1, 0]], value_NT=[[1.0, 2.0, 77.0, 3.0, 77.0]])
    a_NT, target_NT = advantage.gae(b, gamma=0.5, lam=0.5, whiten=False)
    assert a_NT.tolist() == [[-0.0625, -0.25, 0.0, 1.0, 0.0]]
    assert target_NT.tolist() == [[0.9375, 1.75, 0.0, 4.0, 0.0]]


def test_gae_at_its_ends() -> None:
    """γ = λ = 1 and V = 0: the return everywhere, a KL where it was paid. λ = 0: the one-step error."""
    b = minibatch([4], [0], [[1, 1, 1]], value_NT=[[0.0] * 3], penalty_NT=[[0.5, 0.0, 1.0]])
    assert advantage.gae(b, gamma=1.0, lam=1.0, whiten=False)[0].tolist() == [[2.5, 3.0, 3.0]]
    b = minibatch([4], [0], [[1, 1, 1]], value_NT=[[1.0, 5.0, 2.0]])
    a_NT, target_NT = advantage.gae(b, gamma=1.0, lam=0.0, whiten=False)
    assert a_NT.tolist() == [[4.0, -3.0, 2.0]]
    assert target_NT.tolist() == [[5.0, 2.0, 4.0]]


def test_gae_whitens_the_advantage_and_not_the_target() -> None:
    """Two responses of one token, r = 4, 0, V = 1, 1: Â = 3, −1 → ±2/√8; equal ones → 0."""
    b = minibatch([4, 0], [0, 0], [[1, 0]] * 2, value_NT=[[1.0, 9.0]] * 2)
    a_NT, target_NT = advantage.gae(b)
    assert a_NT.flatten().tolist() == pytest.approx([sqrt(0.5), 0, -sqrt(0.5), 0])
    assert target_NT.flatten().tolist() == [4.0, 0.0, 0.0, 0.0]
    flat = minibatch([0.1] * 3, [0] * 3, [[1]] * 3, dtype=torch.float32, value_NT=[[0.0]] * 3)
    assert advantage.gae(flat)[0].flatten().tolist() == [0.0] * 3


def test_process_reward() -> None:
    """Steps score 1 and 0 | 0: mean ⅓, Σ² = ⅔, ddof 1 std √⅓ = .57735: 1.1547, −.57735 | −.57735. A token has the steps still to end:
    .57735, .57735, −.57735, −.57735 | −.57735, −.57735, then nothing."""
    b = minibatch(
        [9, 9],
        [3, 3],
        [[1, 1, 1, 1], [1, 1, 1, 0]],
        step_end_NT=torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1]]).bool(),
        step_r_NT=[[7.0, 1.0, 7.0, 0.0], [7.0, 0.0, 7.0, 5.0]],
    )
    x = sqrt(1 / 3)
    expected = [x, x, -x, -x, -x, -x, 0, 0]
    assert advantage.process_reward(b, eps=0.0).flatten().tolist() == pytest.approx(expected, abs=1e-15)
    assert advantage.process_reward(b, ddof=0, eps=0.0)[1, 0].item() == pytest.approx(-sqrt(0.5))


def test_process_reward_is_nothing_where_steps_do_not_differ() -> None:
    """All steps of a group .1; a group without steps; another group has its own statistics."""
    b = minibatch(
        [0] * 4,
        [0, 1, 2, 2],
        [[1, 1, 1]] * 4,
        step_end_NT=torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 1], [0, 0, 1]]).bool(),
        step_r_NT=[[0.1] * 3, [5.0] * 3, [0, 0, 1.0], [0, 0, 0.0]],
    )
    a_NT = advantage.process_reward(b, eps=0.0)
    assert a_NT[:2].abs().max().item() == 0.0
    assert a_NT[2:].tolist() == [pytest.approx([sqrt(0.5)] * 3), pytest.approx([-sqrt(0.5)] * 3)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "gae", "gamma": 1.1}, "gamma"),
        ({"name": "gae", "lam": -0.1}, "lam"),
        ({"name": "running_zscore", "decay": 1.0}, "decay"),
        ({"name": "group_zscore", "ddof": 2}, "ddof"),
        ({"name": "max_rl", "eps": -1.0}, "eps"),
    ],
)
def test_parameters_out_of_range_are_refused(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("advantage", spec)
