"""π_old without a pass of its own: deferred to a rollout's only update, or the engine's log-probs where they are exact enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_repro import anchor, start, train
from grpo_repro.anchor import anchored
from grpo_repro.collect import collect
from grpo_repro.config import Run, merged, parse_run
from grpo_repro.learner import Learner

BASE: dict[str, Any] = {
    "name": "t",
    "policy": {"name": "tiny", "start": "scratch"},
    "task": "short",
    "objective": {"preset": "grpo", "kl": "none"},
    "rollout": {"group_size": 4, "prompts": 3},
    "scale": {"steps": 2, "eval_prompts": 0, "monitor": False},
}


def run_of(**changes: Any) -> Run:
    return parse_run(merged(BASE, {k.replace("__", "."): v for k, v in changes.items()}), "test")


def trained(run: Run) -> tuple[list[dict[str, float]], Learner]:
    learner = Learner.of(run, *start.load(run, Path("unused")))
    return [train.one_step(learner, step) for step in range(run.scale.steps)], learner


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rollouts that are measured."""
    seen: list[int] = []
    real = anchor.measure
    monkeypatch.setattr(anchor, "measure", lambda *a, **k: (seen.append(1), real(*a, **k))[1])
    return seen


def test_one_update_needs_no_pass_and_trains_the_same_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the run that measures π_old (because it monitors): same rewards, weights equal up to rounding, w ≡ 1 in both."""
    count = passes(monkeypatch)
    rows, learner = trained(run_of())
    assert count == []
    measured, other = trained(run_of(scale__monitor=True))
    assert len(count) == 2
    for row, with_pass in zip(rows, measured, strict=True):
        assert row["ratio"] == row["ratio/max"] == 1.0
        assert row["reward"] == with_pass["reward"]
        assert row["loss"] == pytest.approx(with_pass["loss"], abs=1e-5)
        assert row["gradient_norm"] == pytest.approx(with_pass["gradient_norm"], rel=1e-4)
        assert row["entropy"] == pytest.approx(with_pass["entropy"], rel=1e-5)
        assert row["entropy/answer"] == pytest.approx(with_pass["entropy/answer"], rel=1e-5)
        assert row["sampler/difference"] < 1e-5
    for p, q in zip(learner.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.updates": 2},
        {"rollout.minibatches": 3},
        {"rollout.anchor": "sampler"},
        {"sampler.staleness": 1},
        {"sampler.weights": "bfloat16"},
        {"objective.kl": {"name": "k3", "beta": 0.1}},
        {"objective.kl_in_reward": {"name": "k1", "beta": 0.1}},
        {"objective.advantage": "gae"},
        {"objective.clip": "kl_penalty"},
    ],
)
def test_what_reads_the_old_policy_otherwise_gets_its_pass(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    count = passes(monkeypatch)
    trained(run_of(**{k.replace(".", "__"): v for k, v in changes.items()}, scale__steps=1))
    assert len(count) >= 1


def test_a_correction_reads_the_deferred_policy() -> None:
    """ρ = π_old/μ needs the trainer's log-probs: with an exact engine it is 1 and changes nothing."""
    plain, _ = trained(run_of())
    corrected, _ = trained(run_of(objective__correction={"name": "truncate", "w_max": 2.0}))
    assert corrected[1]["gradient_norm"] == pytest.approx(plain[1]["gradient_norm"], rel=1e-4)


def test_the_engine_is_reused_where_the_probe_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    count = passes(monkeypatch)
    twice = {"rollout__updates": 2}
    rows, learner = trained(run_of(**twice, rollout__reuse=1e-3))
    assert count == []
    assert [row["sampler/reused"] for row in rows] == [1.0, 1.0]
    assert 0 < rows[0]["sampler/difference"] < 1e-5
    measured, other = trained(run_of(**twice))
    assert [row["sampler/reused"] for row in measured] == [0.0, 0.0]
    for p, q in zip(learner.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-4, rtol=0)


def test_an_engine_that_is_off_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(rollout__updates=2, rollout__reuse=1e-3)
    learner = Learner.of(run, *start.load(run, Path("unused")))
    learner.sync(0)
    rollout, _, _ = collect(learner.sampler, 0)
    off = rollout.__class__(**{**vars(rollout), "sampler_NT": rollout.sampler_NT + 0.002})
    seen = anchored(learner, off)
    assert not seen.reused
    assert seen.difference == pytest.approx(0.002, rel=0.01)
    torch.testing.assert_close(seen.old_NT, rollout.sampler_NT, atol=1e-5, rtol=0)
    assert anchored(learner, rollout).reused
