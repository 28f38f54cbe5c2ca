"""The grid: nothing is trained twice, nothing finished is lost, and whatever goes wrong is said in a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from grpo_repro import grid, paths, record, report
from grpo_repro.ablation import Ablation, load_ablation
from grpo_repro.types import UserError


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ablation:
    monkeypatch.setenv("GRPO_REPRO_ROOT", str(runs.checkout(tmp_path)))
    for name in ("GRPO_REPRO_CACHE", "GRPO_REPRO_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    return load_ablation(tmp_path / "experiments" / "ablations" / "toy.yaml")


def trained() -> list[str]:
    return runs.events(paths.cache(), "train")


def test_every_run_is_recorded_once_and_the_next_grid_trains_nothing(toy: Ablation, capfd: pytest.CaptureFixture[str]) -> None:
    first = grid.run_grid(toy, "quick", processes=2, trainer=runs.traced)
    assert sorted(trained()) == ["0 0.2", "0 0.4", "1 0.2", "1 0.4"]
    assert [(r.panel, r.arm, r.seed) for r in first] == [("main", a, s) for s in (0, 1) for a in ("low", "high")]
    assert [r.columns["reward"][1] for r in first] == [0.201, 0.401, 0.211, 0.411]  # eps_high + seed/100 + step/1000
    assert {"device", "threads", "seconds", "commit"} <= first[0].provenance.keys()
    assert len(runs.events(paths.cache(), "threads=1")) == 4
    assert "OMP_NUM_THREADS" not in os.environ or os.environ["OMP_NUM_THREADS"] == "1"

    # A seed's start is made by one worker: no second run of the seed begins before the first has its start.
    lines = [line.split()[:2] for line in (paths.cache() / "events").read_text().splitlines()]
    for seed in ("0", "1"):
        of_seed = [event for event, s in lines if s == seed]
        assert of_seed.index("start-made") < [i for i, e in enumerate(of_seed) if e == "begin"][1]

    def nothing(run, cache):
        raise AssertionError

    assert grid.run_grid(toy, "quick", trainer=nothing) == first

    # A record that was lost is copied back from the cache; one that was edited too.
    folder = grid.runs_folder("toy", "quick")
    [lost, edited] = [r.path(folder) for r in first[:2]]
    lost.unlink()
    edited.write_text(edited.read_text().replace("0.401", "0.999"))
    assert grid.run_grid(toy, "quick", trainer=nothing) == first
    assert [record.read(p) for p in (lost, edited)] == first[:2]
    assert capfd.readouterr().out == ""  # progress goes to stderr
    frame = report.load("toy", "quick").frame
    assert frame.groupby("arm").reward.mean().round(4).to_dict() == {"high": 0.406, "low": 0.206}


def test_committed_full_runs_serve_the_preview(toy: Ablation) -> None:
    for panel, arm, run in toy.runs("full"):
        record.Record.of(run, panel, arm, list(runs.fake(run, paths.cache())), record.provenance()).write(
            grid.runs_folder("toy", "full")
        )
    before = trained()
    assert len(grid.run_grid(toy, "quick", trainer=runs.fake)) == 4
    assert trained() == before


def test_arms_of_two_panels_that_are_one_run_are_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = runs.YAML.replace(
        "profiles:",
        "  again:\n    title: t\n    shows: s\n    arms: {same: {objective.clip: {name: ppo, eps_high: 0.2}}}\nprofiles:",
    )
    monkeypatch.setenv("GRPO_REPRO_ROOT", str(runs.checkout(tmp_path, again)))
    toy = load_ablation(tmp_path / "experiments" / "ablations" / "toy.yaml")
    records = grid.run_grid(toy, "smoke", processes=1, trainer=runs.fake)
    assert len(trained()) == 2
    assert [(r.panel, r.arm) for r in records] == [("main", "low"), ("main", "high"), ("again", "same")]
    assert records[0].columns == records[2].columns
    assert all(r.path(grid.runs_folder("toy", "smoke")).is_file() for r in records)


def test_a_killed_worker_is_replaced_and_its_run_made_again(toy: Ablation, capfd: pytest.CaptureFixture[str]) -> None:
    records = grid.run_grid(toy, "quick", processes=1, trainer=runs.killed_once)
    assert len(records) == 4
    assert len(trained()) == 5
    assert "its worker died (exit code -9); once more" in capfd.readouterr().err


def test_ctrl_c_is_the_parents_to_handle(toy: Ablation) -> None:
    assert len(grid.run_grid(toy, "smoke", processes=1, trainer=runs.interrupts_itself)) == 2


def test_runs_that_cannot_be_made_are_named_at_the_end_and_the_others_stay(toy: Ablation) -> None:
    with pytest.raises(UserError, match=r"1 of 2 runs are missing.*main/high seed 0"):
        grid.run_grid(toy, "smoke", processes=1, trainer=runs.always_killed)
    assert len(trained()) == 3  # low once, high twice
    assert len(record.index([grid.runs_folder("toy", "smoke")])) == 1
    with pytest.raises(UserError, match="1 of 2 runs of toy smoke are not recorded"):
        report.load("toy", "smoke")


def test_a_mistake_of_the_users_stops_the_grid_with_its_sentence(toy: Ablation) -> None:
    with pytest.raises(UserError, match="main/low seed 1: step 1: the loss is nan"):
        grid.run_grid(toy, "full", processes=1, trainer=runs.refused)
    assert len(record.index([grid.runs_folder("toy", "full")])) == 2  # seed 0
    assert not any(run.startswith("2") for run in trained())


def test_a_fault_of_ours_shows_its_traceback(toy: Ablation) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a fault of ours"):
        grid.run_grid(toy, "smoke", processes=1, trainer=runs.broken)


def test_two_grids_do_not_fill_one_folder(toy: Ablation) -> None:
    folder = paths.writable(grid.runs_folder("toy", "smoke"))
    with grid.exclusive(folder), pytest.raises(UserError, match="another grpo-repro process"):
        grid.run_grid(toy, "smoke", trainer=runs.fake)
    assert trained() == []
    with grid.exclusive(folder):
        pass  # the lock was let go


def test_a_folder_that_cannot_be_written_is_found_out_before_training(toy: Ablation) -> None:
    paths.results().write_text("a file in the folder's place")
    with pytest.raises(UserError, match="cannot be written"):
        grid.run_grid(toy, "smoke", trainer=runs.fake)
    assert trained() == []


def test_an_unknown_panel_or_profile(toy: Ablation) -> None:
    with pytest.raises(UserError, match="no panel 'mian'; valid: main"):
        grid.run_grid(toy, "smoke", only_panel="mian", trainer=runs.fake)
    with pytest.raises(UserError, match="did you mean 'quick'"):
        grid.run_grid(toy, "quikc", trainer=runs.fake)


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import runs
from grpo_repro import cli, grid
if __name__ == "__main__":
    grid.rows_of = runs.patient
    sys.argv = ["grpo-repro", "ablate", "toy", "--profile", "quick", "--processes", "1", "--no-notebook"]
    cli.main()
"""


def test_ctrl_c_stops_cleanly_and_the_same_command_resumes(toy: Ablation, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(tests=str(Path(__file__).parent)))
    env = os.environ | {"PYTHONPATH": str(Path(grid.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell has its children ignore Ctrl-C
    ) as process:
        while len(trained()) < 2 and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the parent and to its workers
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.strip().splitlines()[-1] == "stopped: 1 of 4 runs recorded; the same command resumes"
    assert "Traceback" not in said
    assert len(record.index([grid.runs_folder("toy", "quick")])) == 1
    assert list(tmp_path.rglob("*.part")) == []

    stopped = trained()
    assert len(grid.run_grid(toy, "quick", processes=1, trainer=runs.fake)) == 4
    assert len(trained()) == len(stopped) + 3  # the finished run was not made again
