"""The exam: which prompts, what is reported of them, what a run's folder keeps of the answers; and steps with nothing to learn from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from grpo_repro import single, start, train
from grpo_repro.config import Run, merged, parse_run
from grpo_repro.exam import exam
from grpo_repro.learner import Learner

BASE: dict[str, Any] = {
    "name": "test",
    "task": {"name": "mix", "tasks": ["chain_sum", "products", "gcd"], "limit": 5},
    "objective": {"preset": "dr_grpo", "reward": {"name": "coin", "p": 0.5}, "sampling": "drop_zero_variance"},
    "rollout": {"group_size": 2, "prompts": 3},
    "scale": {"steps": 4, "eval_prompts": 6, "eval_every": 2, "lr": 1e-3, "monitor": False},
    "machine": {"checkpoint_every": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.letters(tmp_path_factory.mktemp("letters") / "model")


def config(model: Path, **changes: Any) -> Run:
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return parse_run(merged(BASE, {"policy.name": str(model), **changed}), "test")


def learner_of(run: Run) -> Learner:
    return Learner.of(run, *start.load(run, Path("unused")))


def test_it_reports_held_out_and_new_range_apart_and_leaves_the_answers(model: Path) -> None:
    """The verifier is replaced: right is what holds a letter of the first half of the alphabet, so the marks are not all 0."""
    learner = learner_of(config(model))
    task = learner.task
    lenient = task.__class__(
        **{**vars(task), "verify": lambda prompt, text: (float(any(c < "P" for c in text[:1])), {"seen": 0.5})}
    )
    learner.task = lenient
    row = exam(learner)
    answers = learner.answers
    assert [(a.prompt, a.gold, a.level) for a in answers] == [
        (p.text, p.answer, p.level) for p in (*task.exam(6), *task.new_exam(6))
    ]
    assert [a.part for a in answers] == ["heldout"] * 6 + ["new_range"] * 6
    assert all(a.correct == float(a.response[:1] < "P") and a.notes == {"seen": 0.5} for a in answers if a.response)
    assert 0 < sum(a.correct for a in answers) < 12
    for part in ("heldout", "new_range"):
        of_part = [a for a in answers if a.part == part]
        assert row[f"{part}/accuracy"] == pytest.approx(sum(a.correct for a in of_part) / 6)
        assert row[f"{part}/length"] == pytest.approx(sum(a.length for a in of_part) / 6)
        for level in ("chain_sum", "products", "gcd"):
            of_level = [a.correct for a in of_part if a.level == level]
            assert row[f"{part}/accuracy/{level}"] == pytest.approx(sum(of_level) / 2)
    assert len(row) == 2 * (2 + 3)


def test_the_new_range_changes_nothing_of_the_held_out_part(model: Path) -> None:
    learner = learner_of(config(model))
    both = exam(learner)
    answers = learner.answers[:6]
    learner.task = learner.task.__class__(**{**vars(learner.task), "new_range": ()})
    assert exam(learner) == {k: v for k, v in both.items() if k.startswith("heldout/")}
    assert learner.answers == answers


def test_without_prompts_there_is_no_exam(model: Path) -> None:
    learner = learner_of(config(model, scale__eval_prompts=0))
    learner.answers = ("of an earlier exam",)  # type: ignore[assignment]
    assert (exam(learner), learner.answers) == ({}, ())


def test_answers_are_those_of_the_row_s_own_exam(model: Path) -> None:
    learner = learner_of(config(model))
    had = [bool(learner.answers) == ("heldout/accuracy" in row) for row in train.steps(learner)]
    assert had == [True] * 5


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_s_folder_keeps_the_answers_of_every_exam(model: Path, tmp_path: Path) -> None:
    run = config(model)
    folder, _ = single.train_one(run, tmp_path / "run")
    kept = lines(folder.path)
    assert [line["step"] for line in kept] == [0] * 12 + [2] * 12 + [4] * 12
    asked = [[(line["part"], line["prompt"]) for line in kept if line["step"] == step] for step in (0, 2, 4)]
    assert asked[0] == asked[1] == asked[2]
    assert set(kept[0]) == {"step", "part", "level", "prompt", "gold", "response", "correct", "length", "notes"}
    assert set(kept[0]["notes"]) == {"raw_score", "has_number"}
    single.train_one(run, tmp_path / "run", force=True)
    assert lines(folder.path) == kept, "a run that replaces another leaves only its own"


def test_a_stopped_run_goes_on_with_the_same_answers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(model, scale__eval_every=1, scale__steps=5)
    whole, _ = single.train_one(run, tmp_path / "whole")
    original = train.one_step

    def dies(learner: Learner, step: int, *more: Any) -> dict[str, float]:
        if step == 3:  # the exam of step 2 is written, and the last checkpoint is that before step 2
            raise KeyboardInterrupt
        return original(learner, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(train, "one_step", dies)
        with pytest.raises(KeyboardInterrupt):
            single.train_one(run, tmp_path / "stopped")
    assert {line["step"] for line in lines(tmp_path / "stopped")} == {0, 1, 2}
    single.train_one(run, tmp_path / "stopped")
    assert lines(tmp_path / "stopped") == lines(whole.path)


@pytest.mark.parametrize("monitor", [True, False], ids=["measured", "deferred"])
def test_a_step_whose_groups_are_all_flat_makes_no_update_and_the_run_goes_on(model: Path, monitor: bool) -> None:
    """One group of two and a fair coin: about half the steps are dead. Momentum alone must not move the weights in them."""
    learner = learner_of(config(model, rollout__prompts=1, scale__steps=12, scale__eval_prompts=0, scale__monitor=monitor))
    before = [p.detach().clone() for p in learner.policy.model.parameters()]
    dead, live = 0, 0
    for row in itertools.islice(train.steps(learner), 12):
        after = [p.detach().clone() for p in learner.policy.model.parameters()]
        same = all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
        if row["groups/zero_variance"] == 1:
            assert (row["updates"], row["groups/dropped"], same, row.get("update/norm", 0)) == (0, 1, True, 0)
            assert not {"loss", "gradient_norm", "ratio", "reward/kept"} & set(row)
            assert {"reward", "accuracy", "length", "entropy"} <= set(row)
            dead += 1
        else:
            assert (row["updates"], same) == (1, False)
            live += 1
        before = after
    assert dead >= 3
    assert live >= 3


def test_dynamic_sampling_draws_on_instead(model: Path) -> None:
    dynamic = {"name": "dynamic", "max_batches": 20}
    learner = learner_of(config(model, rollout__prompts=1, scale__steps=6, scale__eval_prompts=0, objective__sampling=dynamic))
    rows = list(itertools.islice(train.steps(learner), 6))
    assert [row["updates"] for row in rows] == [1] * 6
    assert max(row["groups/sampled"] for row in rows) > 1
