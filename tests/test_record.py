"""Records: what is written is what is read, and nothing half-written or edited counts."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from runs import fake

from grpo_repro import config, paths, record
from grpo_repro.record import Record
from grpo_repro.types import UserError

RUN = config.parse_run({"name": "toy", "task": "short", "objective": {"clip": "ppo"}, "scale": {"steps": 2}, "seed": 3}, "test")
TOLD = {"commit": "abc", "started": "2026-01-01T00:00:00+00:00", "seconds": 1.5}


def made(rows: list[dict[str, float]], arm: str = "low", panel: str = "main") -> Record:
    return Record.of(RUN, panel, arm, rows, TOLD)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [{"step": 0, "a": 1 / 3, "b": math.nan}, {"step": 1, "a": 1234567.0, "c": math.inf, "d": -1.5e-9}]
    written = made(rows)
    path = written.write(tmp_path)
    assert path == tmp_path / "main" / "low-s3.json"
    assert record.read(path) == written
    # by hand: six significant digits, and null where NaN or absent
    assert written.columns == {
        "step": [0, 1],
        "a": [0.333333, 1234570],
        "b": [None, None],
        "c": [None, math.inf],
        "d": [None, -1.5e-9],
    }
    assert written.key == RUN.key()


def test_one_metric_a_line(tmp_path: Path) -> None:
    lines = made([{"step": 0, "a": 0.5}, {"step": 1, "a": 0.25}]).write(tmp_path).read_text().splitlines()
    assert '  "a": [0.5, 0.25]' in lines
    json.loads("\n".join(lines), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


@pytest.mark.parametrize("spoil", [lambda t: t[: len(t) // 2], lambda t: t.replace("0.5", "0.6"), lambda t: "", lambda t: "[1]"])
def test_a_damaged_record_counts_as_absent(tmp_path: Path, spoil, caplog: pytest.LogCaptureFixture) -> None:
    path = made([{"step": 0, "a": 0.5}]).write(tmp_path)
    path.write_text(spoil(path.read_text()))
    assert record.read(path) is None
    assert "damaged" in caplog.text
    assert record.find(RUN, [tmp_path]) is None


def test_provenance_is_under_the_checksum(tmp_path: Path) -> None:
    path = made([{"step": 0, "a": 0.5}]).write(tmp_path)
    path.write_text(path.read_text().replace('"commit": "abc"', '"commit": "def"'))
    assert record.read(path) is None


def test_a_failed_write_leaves_the_old_text_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    paths.write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        paths.write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("arm", ["../../etc/passwd", "a/b", ".hidden", "", "ε=.2/.28", "<script>"])
def test_no_arm_leaves_its_folder(tmp_path: Path, arm: str) -> None:
    path = made([{"step": 0}], arm=arm).path(tmp_path)
    assert path.resolve().parent == (tmp_path / "main").resolve()
    assert not path.name.startswith(".")
    assert path.name.isascii()


def test_arms_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a b", "a/b", "a_b", "a:b"]
    assert len({made([{"step": 0}], arm=arm).path(tmp_path) for arm in names}) == len(names)


def test_find_goes_by_key_wherever_the_file_is(tmp_path: Path) -> None:
    written = made([{"step": 0, "a": 1.0}], panel="elsewhere", arm="other")
    written.write(tmp_path / "deep")
    other = RUN.model_copy(update={"seed": 4})
    assert record.find(RUN, [tmp_path / "absent", tmp_path]) == written
    assert record.find(other, [tmp_path]) is None


def test_the_key_says_what_numbers_depend_on() -> None:
    def same(**changes: object) -> bool:
        return RUN.model_copy(update=changes).key() == RUN.key()

    assert same(name="another")
    assert same(machine=config.Machine(threads=1))
    assert same(report_to=("wandb",))
    assert not same(seed=4)
    assert not same(scale=config.Scale(steps=3))
    assert not same(objective=config.parse_run({"name": "a", "task": "short", "objective": {"clip": "none"}}, "").objective)


def test_the_frame_is_tidy(tmp_path: Path) -> None:
    rows = list(fake(RUN, tmp_path))
    frame = record.frame([made(rows), made([{"step": 0, "other": 1.0}], arm="high")])
    assert list(frame.columns) == ["panel", "arm", "seed", "step", "reward", "heldout/accuracy", "other"]
    assert frame.step.tolist() == [0, 1, 2, 0]
    assert frame.seed.unique().tolist() == [3]
    assert frame["heldout/accuracy"].isna().tolist() == [True, True, False, True]
    assert frame.other.dtype == float
    assert list(record.frame([]).columns) == ["panel", "arm", "seed", "step"]


def repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout whose package holds a copy of record.py, which is then asked about its own commit."""
    package = folder / "grpo_repro"
    package.mkdir(parents=True)
    here = package / "record.py"
    here.write_text("# tracked\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    monkeypatch.setattr(record, "__file__", str(here))
    return folder


def test_provenance_names_the_commit_and_ignores_changes_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = repository(tmp_path, monkeypatch)
    head = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert record.provenance()["commit"] == head
    assert record.provenance()["dirty"] is False
    (folder / "results").mkdir()
    (folder / "results" / "new.json").write_text("{}")
    assert record.provenance()["dirty"] is False
    (folder / "new.py").write_text("")
    assert record.provenance()["dirty"] is True


def test_provenance_without_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = repository(tmp_path / "a", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    told = record.provenance()
    assert told["commit"] == "unknown"
    assert told["dirty"] is None
    assert "git" in told["commit_unknown_because"]
    assert str(folder) not in json.dumps(told)


def test_an_installed_copy_does_not_take_the_commit_of_the_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path, monkeypatch)
    copy = folder / ".venv" / "record.py"
    copy.parent.mkdir()
    copy.write_text("")
    monkeypatch.setattr(record, "__file__", str(copy))
    assert record.provenance()["commit"] == "unknown"


def test_provenance_holds_versions_and_machine() -> None:
    told = record.provenance()
    assert {"python", "torch", "transformers", "numpy", "grpo_repro", "numerics"} <= told["versions"].keys()
    assert told["machine"]["cores"] >= 1
