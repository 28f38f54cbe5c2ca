"""The command line: what a user types, what is printed, and how every mistake ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import yaml
from typer.testing import CliRunner, Result

from grpo_repro import __main__ as entry
from grpo_repro import checkpoint, cli, grid, learner, paths, policy, record, start, train
from grpo_repro.ablation import load_ablation
from grpo_repro.types import NonFinite, UserError

CONFIG = {"name": "toy", "task": "short", "objective": {"preset": "grpo", "kl": "none"}, "scale": {"steps": 3}}
Command = Callable[..., Result]


@pytest.fixture
def grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`grpo("run", …)` in an empty checkout, which is also the current folder."""
    monkeypatch.setenv("GRPO_REPRO_ROOT", str(runs.checkout(tmp_path)))
    for name in ("GRPO_REPRO_CACHE", "GRPO_REPRO_RESULTS", "GRPO_REPRO_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(CONFIG))
    return lambda *words: CliRunner().invoke(cli.app, list(words))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Training replaced by a fake; the list grows by one run config a training."""
    done: list[Any] = []

    def loop(run: Any, model: Any, task: Any) -> Iterator[dict[str, float]]:
        done.append(run)
        for step in range(run.scale.steps):
            yield {"step": step, "reward": step / 10, "accuracy": 0.5, "entropy": 1.0, "absent": float("nan")}
        yield {"step": run.scale.steps, "heldout/accuracy": 0.25}

    def save(model: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(start, "load", lambda run, cache: (SimpleNamespace(), SimpleNamespace()))
    monkeypatch.setattr(learner.Learner, "of", lambda run, model, task: SimpleNamespace(run=run, answers=(), close=lambda: None))
    monkeypatch.setattr(train, "steps", lambda made, first: loop(made.run, None, None))
    monkeypatch.setattr(policy, "save", save)
    return done


def refused(result: Result, *said: str) -> None:
    """One sentence on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    for words in said:
        assert words in result.stderr


def test_run_writes_a_folder_and_says_where_things_are(grpo: Command, trained: list[Any], tmp_path: Path) -> None:
    result = grpo("run", "toy.yaml", "scale.steps=2", "seed=4", "scale.lr=1e-4")
    assert result.exit_code == 0, result.output
    assert (trained[0].scale.steps, trained[0].seed, trained[0].scale.lr) == (2, 4, 1e-4)
    folder = tmp_path / "results" / "runs" / "toy" / "seed4"
    assert sorted(p.name for p in folder.iterdir()) == [
        "answers.jsonl",
        "config.yaml",
        "metrics.jsonl",
        "policy",
        "provenance.json",
    ]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 0, "reward": 0, "accuracy": 0.5, "entropy": 1, "absent": None}
    assert len(lines) == 3
    assert json.loads((folder / "provenance.json").read_text())["finished"] is True
    assert len(result.stdout.splitlines()) == 6
    assert "reward    0.000 → 0.100" in result.stdout
    assert "results/runs/toy/seed4/policy" in result.stdout
    # the config that is written down is the config again, in full
    from grpo_repro import config

    assert config.parse_run(config.load_yaml(folder / "config.yaml"), "").key() == trained[0].key()


def test_a_finished_run_is_not_trained_again_unless_forced(grpo: Command, trained: list[Any]) -> None:
    assert grpo("run", "toy.yaml").exit_code == 0
    again = grpo("run", "toy.yaml")
    assert again.exit_code == 0
    assert "already done" in again.stdout
    assert len(trained) == 1
    assert grpo("run", "toy.yaml", "--force").exit_code == 0
    assert len(trained) == 2


def test_another_run_does_not_overwrite_it(grpo: Command, trained: list[Any], tmp_path: Path) -> None:
    grpo("run", "toy.yaml")
    metrics = (tmp_path / "results/runs/toy/seed0/metrics.jsonl").read_text()
    key = trained[0].key()
    refused(grpo("run", "toy.yaml", "scale.steps=1"), "holds another run", key, "--force")
    assert (tmp_path / "results/runs/toy/seed0/metrics.jsonl").read_text() == metrics
    assert grpo("run", "toy.yaml", "scale.steps=1", "--out", "elsewhere").exit_code == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused(grpo("run", "toy.yaml", "--out", "mine", "--force"), "is not a run's folder")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_run_that_blows_up_keeps_its_metrics_and_is_not_finished(
    grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loop(made: Any, first: int) -> Iterator[dict[str, float]]:
        yield {"step": 0, "reward": 1.0}
        raise NonFinite("step 1: the loss is nan; look at ① ratio.")

    monkeypatch.setattr(train, "steps", loop)
    refused(grpo("run", "toy.yaml"), "step 1: the loss is nan")
    folder = tmp_path / "results" / "runs" / "toy" / "seed0"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (folder / "policy").exists()
    assert json.loads((folder / "provenance.json").read_text())["finished"] is False


def test_ctrl_c_in_a_run_is_one_line(grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(made: Any, first: int) -> Iterator[dict[str, float]]:
        yield {"step": 0, "reward": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "steps", loop)
    result = grpo("run", "toy.yaml")
    assert result.exit_code == 130
    assert result.stderr.strip() == "stopped; the same command goes on from step 0"


@pytest.mark.parametrize(
    "words", [["policy.name=/no/such"], ["machine.device=gpuu"], ["machine.device=meta"], ["report_to=[trackio]"]]
)
def test_a_run_that_cannot_start_touches_nothing_even_forced(
    grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "results/runs/toy/seed0"
    assert grpo("run", "toy.yaml").exit_code == 0
    monkeypatch.undo()  # the real loader
    monkeypatch.setenv("GRPO_REPRO_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    before = {p: p.read_text() for p in folder.rglob("*") if p.is_file()}
    refused(grpo("run", "toy.yaml", "--force", *words))
    assert {p: p.read_text() for p in folder.rglob("*") if p.is_file()} == before
    refused(grpo("run", "toy.yaml", "seed=1", *words))
    assert not folder.with_name("seed1").exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(grpo: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("GRPO_REPRO_CACHE", str(tmp_path / "taken"))
    refused(grpo("run", "toy.yaml"), "cannot be written", "set GRPO_REPRO_CACHE")


def test_ctrl_c_while_the_libraries_load_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "grpo_repro.cli")
    monkeypatch.setattr("builtins.__import__", interrupted)
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert stop.value.code == 130
    assert capsys.readouterr().err.strip() == "stopped"


def test_an_error_in_the_first_step_keeps_what_force_would_replace(
    grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loop(made: Any, first: int) -> Iterator[dict[str, float]]:
        raise NonFinite("step 0: the loss is nan; look at ① ratio.")
        yield {}

    assert grpo("run", "toy.yaml").exit_code == 0
    metrics = (tmp_path / "results/runs/toy/seed0/metrics.jsonl").read_text()
    monkeypatch.setattr(train, "steps", loop)
    refused(grpo("run", "toy.yaml", "--force"), "step 0: the loss is nan")
    assert (tmp_path / "results/runs/toy/seed0/metrics.jsonl").read_text() == metrics
    assert "already done" in grpo("run", "toy.yaml").stdout


def test_a_dead_run_stays_dead_when_it_is_resumed(
    grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its last checkpoint is younger than its first steps, so the second attempt sees only the last of them."""
    monkeypatch.setattr(checkpoint, "save", lambda made, step, folder: None)
    monkeypatch.setattr(checkpoint, "load", lambda made, folder: 2 if trained else 0)
    monkeypatch.setattr(checkpoint, "newest", lambda folder: (None, 2 if trained else 0))

    def loop(made: Any, first: int) -> Iterator[dict[str, float]]:
        yield from ({"step": step, "groups/zero_variance": 1.0} for step in range(first, 3))
        yield {"step": 3}

    monkeypatch.setattr(train, "steps", loop)
    assert "in none of the 3 steps" in grpo("run", "toy.yaml").stderr
    trained.append("a first attempt")
    assert "in none of the 3 steps" in grpo("run", "toy.yaml").stderr
    assert not (tmp_path / "results/runs/toy/seed0/policy").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.yaml"], ["nope.yaml", "cannot be read"]),
        (["toy.yaml", "scale.step=3"], ["scale.step", "did you mean 'steps'"]),
        (["toy.yaml", "steps"], ["KEY=VALUE"]),
        (["toy.yaml", "scale.steps=many"], ["scale.steps", "integer", "'many'"]),
        (["toy.yaml", "scale.steps=[1"], ["scale.steps", "not a YAML value"]),
        (["toy.yaml", "objective.preset=grppo"], ["'grppo'", "did you mean 'grpo'"]),
        (["toy.yaml", "objective.clip=pop"], ["objective.clip", "did you mean 'ppo'"]),
        (["toy.yaml", "objective.clip={name: ppo, eps_hi: 0.3}"], ["clip.ppo", "did you mean 'eps_high'"]),
        (["toy.yaml", "objective.clip={name: ppo, eps_low: 1.5}"], ["clip.ppo.eps_low", "less than 1", "1.5"]),
        (["toy.yaml", "task=sort"], ["task", "'sort'", "valid:"]),
        (["toy.yaml", "rollout.group_size=1"], ["group_size is 1", "at least 2"]),
        (["toy.yaml", "rollout.minibatches=99"], ["minibatches (99)"]),
        (["toy.yaml", "name=../up"], ["name"]),
        (["toy.yaml", "report_to=[wandbb]"], ["report_to"]),
        (["toy.yaml", "report_to=wandb"], ["report_to: is a list […], not 'wandb'"]),
        (["toy.yaml", "policy=tiny"], ["policy: is a mapping {key: value, …}, not 'tiny'"]),
        (["toy.yaml", f"seed={2**62}"], ["seed", "less than"]),
    ],
)
def test_a_mistake_in_a_config_is_one_sentence(grpo: Command, trained: list[Any], words: list[str], said: list[str]) -> None:
    refused(grpo("run", *words), *said)
    assert trained == []
    assert not paths.results().exists()


def test_debug_shows_the_traceback(grpo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_REPRO_DEBUG", "1")
    assert isinstance(grpo("run", "nope.yaml").exception, UserError)


def test_a_tracker_that_is_not_installed_is_said_before_training(
    grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    refused(grpo("run", "toy.yaml", "report_to=[trackio]"), "pip install trackio")
    assert trained == []


def test_trackers_get_what_was_recorded(
    grpo: Command, trained: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []
    fake = SimpleNamespace(
        init=lambda **about: told.append(about["name"]),
        log=lambda row, step: told.append((step, row)),
        finish=lambda: told.append("end"),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert grpo("run", "toy.yaml", "scale.steps=1", "report_to=[wandb, tensorboard]").exit_code == 0
    assert told == ["toy-seed0", (0, {"reward": 0.0, "accuracy": 0.5, "entropy": 1.0}), (1, {"heldout/accuracy": 0.25}), "end"]
    assert list((tmp_path / "results/runs/toy/seed0/tensorboard").glob("events*"))


def recorded(profile: str, name: str = "toy") -> None:
    """Runs on disk without training."""
    toy = load_ablation(paths.experiments() / "ablations" / f"{name}.yaml")
    for panel, arm, run in toy.runs(profile):
        told = {**record.provenance(), "seconds": 6.0, "device": "cpu", "threads": 1}
        record.Record.of(run, panel, arm, list(runs.fake(run, paths.cache())), told).write(grid.runs_folder(name, profile))


def test_ablate_shows_claims_with_the_numbers_of_the_profile(grpo: Command) -> None:
    recorded("quick")
    result = grpo("ablate", "toy", "--no-notebook")
    assert result.exit_code == 0, result.output
    assert "toy quick: 4 runs recorded" in result.stdout
    # high − low is .2 for every seed
    for words in ("reward: high − low", "preview", "+0.2", "2 seeds", "not run yet"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert grpo("ablate", "--no-notebook").stdout == grpo("ablate", "all", "--no-notebook").stdout == result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tyo"], ["no ablation 'tyo'", "did you mean 'toy'"]),
        (["toy", "--profile", "ful"], ["no profile 'ful'", "did you mean 'full'"]),
        (["toy", "tyo"], ["no ablation 'tyo'"]),
    ],
)
def test_ablate_checks_everything_before_the_first_run(grpo: Command, words: list[str], said: list[str]) -> None:
    refused(grpo("ablate", *words), *said)
    assert not paths.results().exists()


def test_an_empty_repository_has_no_ablation(grpo: Command, tmp_path: Path) -> None:
    (tmp_path / "experiments" / "ablations" / "toy.yaml").unlink()
    refused(grpo("ablate"), "grpo-repro new ablation")


def test_knobs_and_algorithms_are_readable_and_machine_readable(grpo: Command) -> None:
    for command in ("knobs", "algorithms"):
        shown = grpo(command)
        assert shown.exit_code == 0, shown.output
        assert max(map(len, shown.stdout.splitlines())) <= 100
        assert json.loads(grpo(command, "--json").stdout)
    assert "eps_high" in grpo("knobs").stdout
    assert "dr_grpo" in grpo("algorithms").stdout


PAGE = "# Ours\n\n<!-- claims:begin -->\n<!-- claims:end -->\nkept\n<!-- cost:begin -->\nold\n<!-- cost:end -->\n"


def test_report_fills_the_readme_between_its_markers(grpo: Command, tmp_path: Path) -> None:
    from grpo_repro import report

    refused(grpo("report"), "<!-- claims:begin -->")
    readme = tmp_path / "README.md"
    readme.write_text(PAGE)
    assert grpo("report").exit_code == 0
    assert "| `toy` | not run yet |" in readme.read_text()
    assert grpo("report", "--check").exit_code == 0

    recorded("full")
    view = report.load("toy", "full")
    view.saved.append("curves")
    view.write_summary()
    paths.write(view.folder / "provenance.json", json.dumps(report.origin(view.records)))
    before = readme.read_text()
    refused(grpo("report", "--check"), "README.md", "run `grpo-repro report`")
    assert readme.read_text() == before
    assert grpo("report").exit_code == 0
    text = readme.read_text()
    # three seeds are too few for a verdict; 6 runs of 6 s are .6 minutes of one core
    assert "| High is more. (A paper) · primary | **inconclusive** | reward: high − low = +0.2 [+0.2, +0.2] | 3 | toy |" in text
    assert "(results/ablations/toy/full/figures/curves.png)" in text
    assert "| `toy` | full | 6 | 0.6 | 0.3 |" in text
    assert "kept" in text
    assert "old" not in text
    assert "a verdict needs 10" in (tmp_path / "results" / "README.md").read_text()
    assert grpo("report").stdout == "up to date\n"
    assert grpo("report", "--check").exit_code == 0


def test_verdicts_of_the_committed_runs_stand_beside_the_preview(grpo: Command) -> None:
    from grpo_repro import report

    recorded("full")
    report.load("toy", "full").write_summary()
    recorded("quick")
    assert "inconclusive" in grpo("ablate", "toy", "--no-notebook").stdout


def test_the_module_is_the_command(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "grpo_repro", "--help"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("run", "ablate", "knobs", "algorithms", "new", "report"):
        assert command in done.stdout


def test_a_run_in_which_every_group_is_dead_says_so_and_saves_no_policy(tmp_path: Path) -> None:
    """A real run: the reward is 0 whatever is answered."""
    path = tmp_path / "dead.yaml"
    path.write_text(
        "name: dead\npolicy: {start: scratch}\ntask: short\nobjective: {reward: {name: coin, p: 0.0}, sampling: drop_zero_variance}\n"
        "rollout: {group_size: 2, prompts: 3}\nscale: {steps: 2, eval_prompts: 0}\n"
    )
    env = {**os.environ, "GRPO_REPRO_RESULTS": str(tmp_path / "results"), "GRPO_REPRO_CACHE": str(tmp_path / "cache")}
    root = Path(__file__).resolve().parents[1]
    words = [sys.executable, "-m", "grpo_repro", "run", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**env, "PYTHONPATH": str(root)})
    assert done.returncode == 2
    assert "step 0: in every group all rewards are equal" in done.stderr
    assert "error: dead: in none of the 2 steps did a group hold different rewards" in done.stderr
    assert not list((tmp_path / "results").rglob("policy"))
    assert "Traceback" not in done.stderr
