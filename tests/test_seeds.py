"""The report of a run over its seeds: its numbers by hand, what it refuses, and that no response can be markup."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.colors
import models
import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats as scipy_stats
from test_experiments import ROOT, command

from grpo_repro import config, notebook, paths, record, runfigures, runpage, seeds, stats
from grpo_repro.types import UserError

RUN = {"name": "toy", "task": {"name": "mix", "tasks": ["gcd", "products"]}, "scale": {"steps": 3}}
NASTY = "<script>alert(1)</script> | `x` **b** $y$ ~z~ \\[a](b)\nnext"
# right (1) or wrong (0) of two prompts of each level: seed → part → level → (before, after)
MARKS: dict[int, dict[str, dict[str, tuple[list[int], list[int]]]]] = {
    0: {
        "heldout": {"gcd": ([0, 0], [1, 0]), "products": ([0, 1], [1, 1])},
        "new_range": {"gcd": ([0, 0], [0, 0]), "products": ([1, 1], [0, 1])},
    },
    1: {
        "heldout": {"gcd": ([0, 0], [1, 1]), "products": ([0, 0], [1, 0])},
        "new_range": {"gcd": ([0, 0], [0, 0]), "products": ([1, 1], [1, 1])},
    },
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one run and two finished seeds of it."""
    monkeypatch.setenv("GRPO_REPRO_ROOT", str(tmp_path))
    for name in ("GRPO_REPRO_CACHE", "GRPO_REPRO_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    yaml_file = tmp_path / "experiments" / "runs" / "toy.yaml"
    yaml_file.parent.mkdir(parents=True)
    yaml_file.write_text(yaml.safe_dump(RUN))
    for seed in MARKS:
        finish(tmp_path, seed)
    return tmp_path


def finish(root: Path, seed: int, finished: bool = True, **changes: Any) -> Path:
    folder = root / "results" / "runs" / "toy" / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    run = config.parse_run(config.merged({**RUN, "seed": seed}, changes), "toy")
    (folder / "config.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    told = {**record.provenance(), "key": run.key(), "finished": finished, "seconds": 10.0, "device": "cpu", "threads": 1}
    (folder / "provenance.json").write_text(json.dumps(told))
    rows: list[dict[str, float]] = [
        {"step": step, "accuracy": 0.1 * step + 0.2 * seed, "accuracy/gcd": float(step), "length": 9.0, "entropy": 1.0}
        for step in range(3)
    ]
    rows[0] |= {"heldout/accuracy/gcd": 0.0, "seconds/exam": 4.0}
    rows += [{"step": 3, "heldout/accuracy/gcd": 0.5}]
    for row in rows[:3]:
        row |= {"seconds/sample": 1.0 + row["step"], "groups/zero_variance": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = []
    for step, when in ((0, 0), (1, 0), (3, 1)):  # an exam between: not of interest
        for part, levels in MARKS[seed].items():
            for level, marks in levels.items():
                for i, correct in enumerate(marks[when] if step != 1 else [1, 1]):
                    answer = {
                        "part": part,
                        "level": level,
                        "prompt": f"{part} {level} {i} <i>?",
                        "gold": "6",
                        "response": f"{NASTY} {step}",
                    }
                    answers.append(
                        {"step": step, **answer, "correct": float(correct), "length": 3, "notes": {"raw_score": 0.5 * correct}}
                    )
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    return folder


@pytest.fixture
def view(checkout: Path) -> seeds.Seeds:
    seeds.gather("toy")
    return seeds.load("toy")


def t_interval(values: list[float]) -> tuple[float, float]:
    mean, error = np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))
    half = float(scipy_stats.t.ppf(0.975, len(values) - 1) * error)
    return float(mean - half), float(mean + half)


@pytest.mark.parametrize(("right", "n"), [(0, 7), (7, 7), (3, 40), (39, 40), (1, 1), (50, 120)])
def test_wilson_is_scipy_s(right: int, n: int) -> None:
    made = stats.wilson(right / n, n)
    theirs = scipy_stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert (made.estimate, made.n) == (right / n, n)
    assert (made.low, made.high) == (pytest.approx(theirs.low, abs=1e-12), pytest.approx(theirs.high, abs=1e-12))
    assert right > 0 or made.low == 0
    assert right < n or made.high == 1


@pytest.mark.parametrize(("share", "n"), [(1.1, 5), (-0.1, 5), (float("nan"), 5), (0.5, 0)])
def test_wilson_refuses_what_is_no_share(share: float, n: int) -> None:
    with pytest.raises(UserError, match="wilson: the share is"):
        stats.wilson(share, n)


def test_gains_by_hand(view: seeds.Seeds) -> None:
    found = {(row["part"], row["level"]): row for row in view.gains.to_dict("records")}
    assert list(found) == [(part, level) for part in ("heldout", "new_range") for level in ("all", "gcd", "products")]
    row = found["heldout", "all"]
    # before: 1 of 8 right; after: 3 of 4 (seed 0) and 3 of 4 (seed 1)
    assert (row["prompts"], row["seeds"], row["before"], row["after"], row["gain"]) == (4, 2, 0.125, 0.75, 0.625)
    wilson = scipy_stats.binomtest(3, 4).proportion_ci(0.95, method="wilson")  # 4 prompts, not 8 answers
    assert (row["after_low"], row["after_high"]) == (pytest.approx(wilson.low), pytest.approx(wilson.high))
    assert (row["gain_low_seeds"], row["gain_high_seeds"]) == pytest.approx(t_interval([0.5, 0.75]))
    assert (row["gain_low_prompts"], row["gain_high_prompts"]) == pytest.approx(t_interval([1, 0.5, 1, 0]))
    assert found["heldout", "gcd"]["gain"] == 0.75
    assert found["new_range", "all"]["gain"] == -0.125
    assert found["new_range", "gcd"]["gain_low_seeds"] == found["new_range", "gcd"]["gain_high_seeds"] == 0
    assert (view.gain("heldout"), view.gain("heldout", "products"), view.gain("new_range")) == (
        [0.5, 0.75],
        [0.5, 0.5],
        [-0.25, 0],
    )


def test_only_the_first_and_the_last_exam_are_kept(view: seeds.Seeds, checkout: Path) -> None:
    assert set(view.answers["step"]) == {0, 3}
    assert set(zip(view.answers["step"], view.answers["when"], strict=True)) == {(0, "before"), (3, "after")}
    kept = sorted(p.name for p in (checkout / "results/reports/toy/runs").iterdir())
    assert kept == ["toy-s0.answers.jsonl", "toy-s0.json", "toy-s1.answers.jsonl", "toy-s1.json"]


def test_windows_curves_seconds_and_raw_scores_by_hand(view: seeds.Seeds) -> None:
    assert view.window("accuracy", 1, 2) == pytest.approx([0.15, 0.35])
    assert view.window("accuracy", 30, 44) == view.window("absent", 0, 2) == []
    curves = view.by_level(smooth=["accuracy"], accuracy="accuracy/{}", heldout="heldout/accuracy/{}", none="absent/{}")
    gcd = curves[(curves.arm == "gcd") & (curves.seed == 1)]
    assert gcd["accuracy"].tolist()[:3] == [0, 0.5, 1]  # means of the steps so far
    assert math.isnan(gcd["accuracy"].tolist()[3])
    assert [x for x in gcd["heldout"] if not math.isnan(x)] == [0, 0.5]
    assert curves["none"].isna().all()
    assert view.seconds().to_dict() == {"mean": {"exam": 4, "sample": 2}, "largest": {"exam": 4, "sample": 3}}
    assert view.raw() == {"before": 0, "after": 0}


def test_a_prediction_is_judged_by_its_own_words(view: seeds.Seeds) -> None:
    told = [("a", [0.5, 0.75], 0.6, 0.7), ("b", [0.5, 0.75], 0.7, 0.9), ("c", [], 0, 1), ("d", [2.0], 1, float("inf"))]
    made = view.judged(told)
    assert made["outcome"].tolist() == ["as predicted", "not as predicted", "not measured", "as predicted"]
    assert made["measured"].tolist() == ["0.625", "0.625", "–", "2"]
    assert made["predicted"].tolist() == ["0.6 to 0.7", "0.7 to 0.9", "0 to 1", "at least 1"]
    assert made["over seeds"].tolist() == ["[−0.963, 2.21]", "[−0.963, 2.21]", "–", "–"]  # .625 ± 12.706·.125


def test_a_response_is_text_whatever_it_holds(view: seeds.Seeds) -> None:
    page = runpage.text(view, "Toy", view.judged([("a", [0.5], 0, 1)]))
    rows = [line for line in page.splitlines() if "alert" in line]
    assert len(rows) == 8  # the first two prompts of two levels of two parts
    for line in rows:
        assert "<" not in line
        assert line.replace("\\|", "").count("|") == 6, "a bar or a line end of the response made a cell"
        assert "\\`x\\` \\*\\*b\\*\\* \\$y\\$ \\~z\\~ \\\\\\[a\\]" in line
    assert sum("✓" in line for line in rows) == 5
    assert page.count("grpo-repro run experiments/runs/toy.yaml seed=1\n") == 1


def test_the_page_says_what_the_run_changed_of_its_yaml(checkout: Path) -> None:
    for seed in (0, 1):
        finish(
            checkout,
            seed,
            **{"scale.lr": 1e-3, "objective": {"preset": "grpo", "kl": {"name": "k3", "beta": 0.1}}, "machine.threads": 2},
        )
    seeds.gather("toy")
    view = seeds.load("toy")
    assert runpage.changes(view.records[0], "experiments/runs/toy.yaml") == [
        """'objective.kl={"name": "k3", "beta": 0.1}'""",
        "scale.lr=0.001",
    ]


def test_seeds_of_different_settings_are_refused_and_unfinished_ones_left_out(checkout: Path) -> None:
    finish(checkout, 1, finished=False)
    assert [r.seed for r in seeds.gather("toy")] == [0]
    finish(checkout, 1, **{"scale.lr": 1e-3})
    with pytest.raises(UserError, match=r"toy: seeds 0 and 1 differ in scale .*run both again, or remove one"):
        seeds.gather("toy")


def test_without_runs_or_exams_it_says_what_to_do(checkout: Path) -> None:
    with pytest.raises(UserError, match=r"no finished run of other: `grpo-repro run experiments/runs/other\.yaml seed=0`"):
        seeds.gather("other")
    (checkout / "results/runs/toy/seed0/answers.jsonl").write_text("")
    with pytest.raises(UserError, match=r"seed0: the run made no exam, so there is nothing to report: set scale\.eval_prompts"):
        seeds.gather("toy")


def test_one_seed_has_no_interval_over_seeds(checkout: Path) -> None:
    finish(checkout, 1, finished=False)
    seeds.gather("toy")
    view = seeds.load("toy")
    assert view.gains["gain_low_seeds"].isna().all()
    assert set(view.table()["over seeds"]) == {"–"}
    assert view.caption().startswith("1 seed, no interval")
    view.write_summary()
    assert json.loads((view.folder / "summary.json").read_text())["gains"][0]["gain_low_seeds"] is None


def test_the_figure_draws_each_share_with_its_interval(view: seeds.Seeds) -> None:
    fig = runfigures.before_after(view.gains, seeds.PARTS, view.caption(), title="Toy")
    ax = fig.axes[0]
    drawn = [line for line in ax.lines if line.get_marker() in ("o", "D")]
    assert [line.get_xdata()[0] for line in drawn] == view.gains[["before", "after"]].to_numpy().ravel().tolist()
    intervals = [tuple(line.get_xdata()) for line in ax.lines if line.get_marker() == "None" and line.get_color() == "black"]
    columns = ["before_low", "before_high", "after_low", "after_high"]
    assert intervals == [tuple(pair) for row in view.gains[columns].to_numpy() for pair in (row[:2], row[2:])]
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["held out, all", "held out, gcd"]
    open_, filled = (matplotlib.colors.to_rgb(line.get_markerfacecolor()) for line in drawn[:2])
    assert abs(sum(open_) - sum(filled)) > 1, "told apart in grey"
    with pytest.raises(UserError, match="no answers to draw"):
        runfigures.before_after(pd.DataFrame(), seeds.PARTS, "")


def test_the_shipped_report_is_made_from_three_seeds(tmp_path: Path) -> None:
    """`grpo-repro run … seed=k` three times, then `grpo-repro report smollm2`, with a tiny model that reads and writes letters."""
    model = models.letters(tmp_path / "model")
    tiny = [f"policy.name={model}", "objective.reward={name: coin}", "scale.steps=2", "scale.eval_prompts=6", "rollout.limit=4"]
    for seed in range(3):
        done = command(
            "run", str(ROOT / "experiments/runs/smollm2.yaml"), f"seed={seed}", "rollout.group_size=2", *tiny, tmp=tmp_path
        )
        assert done.returncode == 0, done.stderr
    done = command("report", "smollm2", tmp=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "reports" / "smollm2"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["seeds"], summary["figures"]) == ([0, 1, 2], ["accuracy", "process", "gains"])
    assert len(summary["gains"]) == 8
    assert len(summary["predictions"]) == 7
    executed = json.loads((folder / "notebook.ipynb").read_text())
    assert not [o for c in executed["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"]
    page = (folder / "README.md").read_text()
    assert all(
        f"![{stem}](figures/{stem}.png)" in page and (folder / "figures" / f"{stem}.png").is_file() for stem in summary["figures"]
    )
    assert not [p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin")]
    assert sum(p.stat().st_size for p in (folder / "runs").iterdir()) < 10**6
    assert "notebook is up to date" in command("report", "smollm2", tmp=tmp_path).stdout
    answers = folder / "runs" / "smollm2-s0.answers.jsonl"
    source = tmp_path / "results" / "runs" / "smollm2" / "seed0" / "answers.jsonl"
    source.write_text(source.read_text().replace('"correct": 0.0', '"correct": 1.0'))
    notebook_inputs = json.loads((folder / "provenance.json").read_text())["inputs"]
    assert "notebook executed" in command("report", "smollm2", tmp=tmp_path).stdout, "other answers, other report"
    assert '"correct": 1.0' in answers.read_text()
    assert json.loads((folder / "provenance.json").read_text())["inputs"] != notebook_inputs


def test_an_unknown_run_is_refused(tmp_path: Path) -> None:
    done = command("report", "smollm", tmp=tmp_path)
    assert (done.returncode, "there is no run 'smollm' with a notebook (did you mean 'smollm2'?)" in done.stderr) == (2, True)


def test_runs_with_a_notebook_are_found() -> None:
    assert paths.root() == ROOT
    assert seeds.names() == ["smollm2"]
    assert set(notebook.parameters(ROOT / "notebooks" / "smollm2.ipynb")) == {"name", "profile", "results_dir"}
