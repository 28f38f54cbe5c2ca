"""Metrics are sums over counts of what they claim; expected values are worked by hand in the comments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_repro import metrics
from grpo_repro.judge import Judged
from grpo_repro.objective import Parts
from grpo_repro.types import Minibatch, Prompt, Rollout, Scored


def minibatch(
    mask: list[list[int]], advantage: list[float], r: list[float] | None = None, groups: list[int] | None = None
) -> Minibatch:
    n = len(mask)
    return Minibatch(
        mask_NT=torch.tensor(mask, dtype=torch.bool),
        r_N=torch.tensor(r or [0.0] * n),
        group_N=torch.tensor(groups or [0] * n),
        length_N=torch.tensor([sum(row) for row in mask]),
        cut_N=torch.zeros(n, dtype=torch.bool),
        limit=4,
        advantage=torch.tensor(advantage)[:, None],
    )


def parts(w: list[list[float]], hit: list[list[int]], kl: float = 0.0) -> Parts:
    w_NT = torch.tensor(w)
    return Parts(w_NT.log(), w_NT, torch.tensor(hit, dtype=torch.bool), torch.full_like(w_NT, kl), torch.ones_like(w_NT))


def test_ratio_and_effective_sample_size_over_micro_batches_of_unequal_size() -> None:
    totals = metrics.Totals()
    metrics.update(totals, parts([[1.0, 3.0]], [[0, 0]]), minibatch([[1, 1]], [1.0]), torch.tensor(0.25))
    metrics.update(totals, parts([[2.0, 99.0]], [[0, 1]]), minibatch([[1, 0]], [1.0]), torch.tensor(0.5))  # 99 is masked
    row = metrics.finish(totals, updates=1)
    assert row["ratio"] == pytest.approx((1 + 3 + 2) / 3)  # three tokens; a mean of means would say 2.0 as well as …
    assert row["ratio/std"] == pytest.approx(math.sqrt((1 + 9 + 4) / 3 - 2**2))
    assert row["ratio/max"] == pytest.approx(3.0)
    assert row["ess"] == pytest.approx(36 / (3 * 14))  # (Σw)² / (n Σw²)
    assert row["loss"] == pytest.approx(0.75)  # two micro-batches of one update add up
    assert row["clip"] == 0.0  # the only hit is on a masked token


def test_means_weigh_tokens_not_micro_batches() -> None:
    """TRL#7047: windows of 3 tokens (value 1) and 1 token (value 5): 2.0, where a mean of means says 3.0."""
    totals = metrics.Totals()
    metrics.update(totals, parts([[1.0, 1.0, 1.0]], [[0, 0, 0]], kl=1.0), minibatch([[1, 1, 1]], [1.0]), torch.tensor(0.0))
    metrics.update(totals, parts([[1.0]], [[0]], kl=5.0), minibatch([[1]], [1.0]), torch.tensor(0.0))
    assert metrics.finish(totals, 1)["kl_term"] == pytest.approx(2.0)


def test_clip_by_side_and_sign() -> None:
    """The seed's cells: hits above 1 with Â > 0 and below 1 with Â < 0, of 4 tokens (TRL#3144)."""
    totals = metrics.Totals()
    b = minibatch([[1, 1], [1, 1]], [1.0, -1.0])
    metrics.update(totals, parts([[1.5, 0.5], [1.5, 0.5]], [[1, 0], [0, 1]]), b, torch.tensor(0.0))
    row = metrics.finish(totals, 1)
    assert (row["clip"], row["clip/high_pos"], row["clip/low_neg"]) == (0.5, 0.25, 0.25)
    assert row["clip/high_neg"] == row["clip/low_pos"] == 0.0


def test_a_step_without_updates_has_no_update_metrics_and_no_nan() -> None:
    assert metrics.finish(metrics.Totals(), 0) == {"updates": 0.0}
    totals = metrics.Totals()
    metrics.update(totals, parts([[1.0]], [[0]]), minibatch([[0]], [1.0]), torch.tensor(0.0))  # everything hidden
    row = metrics.finish(totals, 1)
    assert all(math.isfinite(v) for v in row.values())
    assert "ratio" not in row


def test_groups_flat_high_flat_low_and_mixed() -> None:
    b = minibatch([[1]] * 6, [0.0] * 6, r=[1, 1, 0, 0, 0, 1], groups=[3, 3, 5, 5, 8, 8])
    row = metrics.groups(b, Scored(b, torch.arange(2), dropped_rows=4, dropped_groups=2))
    assert row == {
        "groups/zero_variance": pytest.approx(2 / 3),
        "groups/all_right": pytest.approx(1 / 3),
        "groups/all_wrong": pytest.approx(1 / 3),
        "groups/dropped": 2.0,
        "rows/dropped": 4.0,
        "reward/kept": 1.0,  # of rows 0 and 1
    }
    flat = replace(b, r_N=torch.ones(6))  # nobody can tell whether all ones are all right
    assert set(metrics.groups(flat, Scored(flat, torch.arange(0), 6, 3))) == {
        "groups/zero_variance",
        "groups/dropped",
        "rows/dropped",
    }


def test_responses_by_level_and_by_verdict() -> None:
    prompts = (Prompt("a", "a", (1,), "", "easy"), Prompt("b", "b", (1,), "", "hard"))
    rollout = Rollout(
        prompts=prompts,
        group_N=torch.tensor([0, 0, 1, 1]),
        prompt_NP=torch.ones(4, 1, dtype=torch.int64),
        prompt_length_N=torch.ones(4, dtype=torch.int64),
        response_NT=torch.ones(4, 5, dtype=torch.int64),
        length_N=torch.tensor([1, 2, 3, 5]),
        mask_NT=torch.arange(5) < torch.tensor([1, 2, 3, 5])[:, None],
        sampler_NT=torch.zeros(4, 5),
        cut_N=torch.tensor([False, False, False, True]),
    )
    noted = {"rare": torch.tensor([0.0, 1.0, 0.5, 0.5])}
    judged = Judged(torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]), noted, {})
    row = metrics.responses(rollout, judged)
    assert row == {
        "reward": 0.5,
        "reward/std": pytest.approx(math.sqrt(0.75)),  # of [2, 0, 0, 0]
        "accuracy": 0.5,
        "accuracy/easy": 1.0,
        "accuracy/hard": 0.0,
        "length": 2.75,
        "length/right": 1.5,
        "length/wrong": 4.0,
        "truncated": 0.25,
        "tokens": 11.0,
        "note/rare": 0.5,
    }


def test_entropy_is_a_mean_over_live_tokens_whatever_the_padding_holds() -> None:
    entropy_NT = torch.tensor([[0.5, 1.5, 77.0], [1.0, 77.0, 77.0]])
    mask_NT = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    at = {"answer": torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.bool), "nowhere": torch.zeros(2, 3, dtype=torch.bool)}
    assert metrics.entropy(entropy_NT, mask_NT, at) == {"entropy": 1.0, "entropy/answer": 1.5}


def test_estimators_of_the_distance_between_two_policies() -> None:
    """Tokens drawn from p, d = log q − log p. One token with d = −1: k1 = 1, k2 = 1/2, k3 = e⁻¹ (CASES N01: k3(−1) = .367879)."""
    one = torch.ones(1, 1, dtype=torch.bool)
    row = metrics.moved("old", torch.tensor([[-3.0]]), torch.tensor([[-2.0]]), one, torch.tensor([[0.25]]))
    assert row["kl_old/k1"] == pytest.approx(1.0)
    assert row["kl_old/k2"] == pytest.approx(0.5)
    assert row["kl_old/k3"] == pytest.approx(0.367879, abs=1e-6)
    assert row["kl_old/exact"] == 0.25
    assert metrics.moved("old", torch.zeros(1, 1), torch.zeros(1, 1), ~one, None) == {}


def test_distance_is_the_euclidean_norm_over_all_parameters() -> None:
    before = [torch.zeros(2), torch.zeros(1, 1)]
    assert metrics.distance(before, [torch.tensor([2.0, 3.0]), torch.tensor([[6.0]])]) == pytest.approx(7.0)  # √(4+9+36)
