"""A resumed run is the uninterrupted one, bit for bit, whatever the learner carries; what was cut short is not seen."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_repro import checkpoint, overlap, single, start, train
from grpo_repro.config import Run, merged, parse_run
from grpo_repro.learner import Learner
from grpo_repro.types import UserError

BASE: dict[str, Any] = {
    "name": "test",
    "policy": {"name": "tiny", "start": "scratch"},
    "task": "tail",
    "objective": {"preset": "grpo", "reward": {"name": "coin", "p": 0.5}},
    "rollout": {"group_size": 4, "prompts": 4, "limit": 8, "updates": 2, "minibatches": 2},
    "scale": {"steps": 6, "eval_prompts": 0, "lr": 3e-3},
}
CARRIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"objective.clip": "kl_penalty", "objective.kl": "none"},
    "running": {"objective.advantage": "running_zscore"},
    "critic": {"objective.advantage": "gae"},
    "partial": {"rollout.chunk": 2},
    "moving reference": {"reference.refresh": "ema", "reference.decay": 0.5},
    "reset reference": {"reference.refresh": "reset", "reference.every": 2, "reference.reset_optimizer": True},
    "sgd": {"scale.optimizer": "sgd"},
    "stale": {"sampler.staleness": 2},
    "stale, seldom, quantised": {"sampler.staleness": 1, "sampler.every": 2, "sampler.weights": {"name": "quantised", "bits": 3}},
    "noisy": {"sampler.weights": {"name": "noise", "sigma": 0.1}, "objective.correction": "truncate"},
    "stale, unfinished": {"sampler.staleness": 1, "rollout.chunk": 2, "rollout.group_size": 2, "rollout.prompts": 8},
    "top-p, unfinished": {"rollout.chunk": 2, "rollout.top_p": 0.8},
}


def learner_of(changes: dict[str, Any]) -> Learner:
    run = parse_run(merged(BASE, changes), "test")
    return Learner.of(run, *start.load(run, Path("unused")))


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows]


@pytest.mark.parametrize("carried", CARRIED.values(), ids=CARRIED)
def test_stopped_and_resumed_is_the_same_run(carried: dict[str, Any], tmp_path: Path) -> None:
    whole = learner_of(carried)
    rows = list(train.steps(whole))
    stopped = learner_of(carried)
    list(itertools.islice(train.steps(stopped), 3))
    assert (stopped.sampler.pending is not None) == ("rollout.chunk" in carried), "or nothing unfinished is tested"
    checkpoint.save(stopped, 3, tmp_path)
    resumed = learner_of(carried)
    assert checkpoint.load(resumed, tmp_path) == 3
    assert timeless(list(train.steps(resumed, 3))) == timeless(rows[3:])
    for p, q in zip(whole.policy.model.parameters(), resumed.policy.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint.load(learner_of({}), tmp_path / "nothing") == 0


def test_the_newest_whole_one_counts_and_two_are_kept(tmp_path: Path) -> None:
    learner = learner_of({})
    for step in (1, 2, 3):
        checkpoint.save(learner, step, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    (tmp_path / "step-000009").mkdir()  # killed while writing
    (tmp_path / "step-000009" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.load(learner, tmp_path) == 3


def test_another_run_s_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save(learner_of({}), 1, tmp_path)
    with pytest.raises(UserError, match="is of another run"):
        checkpoint.load(learner_of({"scale.lr": 1e-4}), tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        checkpoint.save(learner_of({}), 1, tmp_path / "taken")


def stopped_at_step_5(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted in its sixth step."""
    original = train.one_step

    def dies(learner: Learner, step: int, draw: overlap.Draw) -> dict[str, float]:
        if step == 5:
            raise KeyboardInterrupt
        return original(learner, step, draw)

    with monkeypatch.context() as patch:
        patch.setattr(train, "one_step", dies)
        with pytest.raises(KeyboardInterrupt):
            single.train_one(run, out)


def test_a_run_stopped_between_checkpoints_goes_on_from_the_last_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_REPRO_CACHE", str(tmp_path / "cache"))
    run = parse_run(merged(BASE, {"machine.checkpoint_every": 2}), "test")
    whole, _ = single.train_one(run, tmp_path / "whole")
    stopped_at_step_5(run, tmp_path / "stopped", monkeypatch)
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "rew')  # a line that was cut short
    resumed, trained = single.train_one(run, tmp_path / "stopped")
    assert trained
    assert timeless(resumed.rows()) == timeless(whole.rows())
    assert not resumed.checkpoints.exists()
    assert json.loads((resumed.path / "provenance.json").read_text())["finished"]


def test_a_resumed_run_that_never_learned_anything_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six dead steps are six dead steps, also where the last two were made after a restart."""
    monkeypatch.setenv("GRPO_REPRO_CACHE", str(tmp_path / "cache"))
    dead = {"machine.checkpoint_every": 2, "objective.reward": {"name": "coin", "p": 0.0}}
    run = parse_run(merged(BASE, dead), "test")
    stopped_at_step_5(run, tmp_path / "run", monkeypatch)
    with pytest.raises(UserError, match="in none of the 6 steps did a group hold different rewards"):
        single.train_one(run, tmp_path / "run")
