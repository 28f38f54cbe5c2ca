"""Every shipped experiment is a test case: it loads, its notebook runs, and its committed verdicts follow from its recorded runs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_repro import claims, record
from grpo_repro.ablation import load_ablation
from grpo_repro.config import load_yaml, parse_run

ROOT = Path(__file__).resolve().parents[1]
ABLATIONS = sorted((ROOT / "experiments" / "ablations").glob("*.yaml"))
RUNS = sorted((ROOT / "experiments" / "runs").rglob("*.yaml"))
FULL = [path for path in ABLATIONS if (ROOT / "results" / "ablations" / path.stem / "full" / "summary.json").is_file()]


def stem(path: Path) -> str:
    return path.stem


def command(*arguments: str, tmp: Path, seconds: int = 300) -> subprocess.CompletedProcess[str]:
    """The package's own command line, in a process of its own, writing below `tmp` only."""
    places = {"GRPO_REPRO_RESULTS": str(tmp / "results"), "GRPO_REPRO_CACHE": str(tmp / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "grpo_repro", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=tmp,
        env={**os.environ, **places, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("path", RUNS, ids=stem)
def test_every_run_loads(path: Path) -> None:
    parse_run(load_yaml(path), str(path))


@pytest.mark.parametrize("path", ABLATIONS, ids=stem)
def test_every_ablation_loads_in_every_profile(path: Path) -> None:
    ablation = load_ablation(path)
    assert {"smoke", "quick", "full"} <= set(ablation.profiles)
    for profile in ablation.profiles:
        runs = list(ablation.runs(profile))
        assert runs
        keys = [(panel, arm, run.seed) for panel, arm, run in runs]
        assert len(set(keys)) == len(keys)
    full, quick = ablation.profiles["full"], ablation.profiles["quick"]
    assert full.seeds >= 10
    assert full.decide
    assert not quick.decide
    seeds = [set(range(p.first_seed, p.first_seed + p.seeds)) for p in (full, quick)]
    assert not seeds[0] & seeds[1], "a preview on the seeds of the verdict is no preview"
    assert sum(claim.primary for claim in ablation.claims) == 1


@pytest.mark.parametrize("path", ABLATIONS, ids=stem)
def test_arms_of_a_panel_differ_in_the_declared_knob_alone(path: Path) -> None:
    """Compared on the runs that would be trained, not on what the YAML says of itself."""
    ablation = load_ablation(path)
    allowed = {ablation.knob, *ablation.bundle}
    panels: dict[tuple[str, int], list[dict[str, object]]] = {}
    for panel, _, run in ablation.runs("full"):
        panels.setdefault((panel, run.seed), []).append(flat(run.model_dump()))
    for arms in panels.values():
        for one, other in itertools.combinations(arms, 2):
            differ = {k for k in one.keys() | other.keys() if one.get(k) != other.get(k)}
            assert all(within(k, allowed) for k in differ), differ


def within(key: str, paths: set[str]) -> bool:
    return any(key == path or key.startswith(path + ".") for path in paths)


def flat(data: dict[str, object], before: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{before}{key}.")
        else:
            out[before + key] = value
    return out


def test_ablations_and_notebooks_correspond_and_results_have_both() -> None:
    names = {path.stem for path in ABLATIONS}
    notebooks = {p.stem for p in (ROOT / "notebooks").glob("*.ipynb") if not p.stem.startswith("00")}
    assert names == notebooks - {p.stem for p in RUNS}, "a notebook is of an ablation, of a run, or a tour (00_…)"
    kept = {p.name for p in (ROOT / "results" / "ablations").glob("*") if (p / "full").is_dir()}
    assert kept <= names


@pytest.mark.parametrize("path", FULL, ids=stem)
def test_committed_verdicts_follow_from_the_committed_runs(path: Path) -> None:
    ablation = load_ablation(path)
    folder = ROOT / "results" / "ablations" / path.stem / "full"
    records = record.index([folder / "runs"])
    runs = [(panel, arm, run) for panel, arm, run in ablation.runs("full")]
    assert {run.key() for _, _, run in runs} == set(records), "the committed runs are not those of the YAML"
    frame = record.frame([records[run.key()].under(panel, arm) for panel, arm, run in runs])
    again = claims.summary(claims.evaluate(ablation.claims, frame, decide=True))
    assert again == json.loads((folder / "summary.json").read_text())["claims"]
    commits = {r.provenance["commit"] for r in records.values()}
    assert not any(r.provenance["dirty"] for r in records.values()), "recorded from a tree with changes"
    assert len(commits) == 1
    for name in ("notebook.ipynb", "notebook.html", "provenance.json"):
        assert (folder / name).is_file()


@pytest.mark.parametrize("path", ABLATIONS, ids=stem)
def test_every_notebook_runs_through_papermill(path: Path, tmp_path: Path) -> None:
    """Profile smoke, as a user would: real (tiny) training runs, then the notebook, then the table."""
    done = command("ablate", path.stem, "--profile", "smoke", tmp=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "ablations" / path.stem / "smoke"
    summary = json.loads((folder / "summary.json").read_text())
    assert [c["claim"]["id"] for c in summary["claims"]] == [c.id for c in load_ablation(path).claims]
    assert all(c["verdict"] in ("preview", "not measured") for c in summary["claims"])
    executed = json.loads((folder / "notebook.ipynb").read_text())
    assert not [o for c in executed["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"]
    assert "<html" in (folder / "notebook.html").read_text()
    assert {p.suffix for p in (folder / "figures").iterdir()} == {".png", ".svg"}


def test_the_tour_of_the_formula_runs_through_papermill(tmp_path: Path) -> None:
    """`grpo-repro tour`: no runs, no YAML; a second time it has nothing to do."""
    done = command("tour", tmp=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "objective"
    summary = json.loads((folder / "summary.json").read_text())
    assert {p.name for p in (folder / "figures").iterdir()} == {f"{s}.{e}" for s in summary["figures"] for e in ("png", "svg")}
    executed = json.loads((folder / "notebook.ipynb").read_text())
    assert not [o for c in executed["cells"] for o in c.get("outputs", []) if o["output_type"] in ("error", "stream")]
    assert "<html" in (folder / "notebook.html").read_text()
    kept = json.loads((ROOT / "results" / "objective" / "summary.json").read_text())
    assert found_again(kept, summary), "results/objective is not what this code computes: run grpo-repro tour"
    assert "is up to date" in command("tour", tmp=tmp_path).stdout


def found_again(kept: object, made: object) -> bool:
    """Equal, numbers to 1e-9. What is made may hold more: a variant that is new."""
    if isinstance(kept, dict) and isinstance(made, dict):
        return all(k in made and found_again(kept[k], made[k]) for k in kept)
    return made == pytest.approx(kept, rel=1e-9, abs=1e-9) if isinstance(kept, float) else made == kept


def test_a_run_through_the_command_line_leaves_a_policy_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ("policy.start=scratch", "scale.steps=2", "rollout.prompts=6", "scale.eval_prompts=3", "objective.reward=coin")
    done = command("run", str(ROOT / "experiments" / "runs" / "tiny.yaml"), *arguments, tmp=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results" / "runs").glob("tiny*/seed0")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    assert model(**tokenizer("+537=", return_tensors="pt", return_token_type_ids=False)).logits.shape[-1] == 17


def test_objectives_survive_a_round_trip_through_yaml() -> None:
    from grpo_repro import presets
    from grpo_repro.config import build_objective, objective_spec
    from grpo_repro.objective import Objective

    for preset in [v for v in vars(presets).values() if isinstance(v, Objective)]:
        assert objective_spec(build_objective(objective_spec(preset))) == objective_spec(preset)
