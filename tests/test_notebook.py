"""Notebooks through papermill: mistakes are found before execution, failures change nothing, and outputs travel."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
import runs

from grpo_repro import grid, notebook, paths, record, scaffold
from grpo_repro.ablation import load_ablation
from grpo_repro.types import UserError

ANNOYING = """\
import sys, warnings
import grpo_repro
from tqdm import tqdm
for i in tqdm(range(1000)):
    pass
for i in range(50):
    print(i, flush=True)
print(grpo_repro.__file__, results_dir, sys.prefix)
warnings.warn("a warning names its file")"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with recorded runs, whose notebook was executed once."""
    folder = runs.checkout(tmp_path_factory.mktemp("checkout"))
    patch = pytest.MonkeyPatch()
    patch.setenv("GRPO_REPRO_ROOT", str(folder))
    patch.delenv("GRPO_REPRO_CACHE", raising=False)
    patch.delenv("GRPO_REPRO_RESULTS", raising=False)
    toy = load_ablation(folder / "experiments" / "ablations" / "toy.yaml")
    for panel, arm, run in toy.runs("quick"):
        rows = [row | {"entropy": 1.0, "accuracy": 0.5} for row in runs.fake(run, paths.cache())]
        told = {**record.provenance(), "seconds": 1.0, "device": "cpu", "threads": 1}
        record.Record.of(run, panel, arm, rows, told).write(grid.runs_folder("toy", "quick"))
    source = scaffold.notebook_source("toy")
    source.cells[-3].source = source.cells[-3].source.replace("dict(metrics)", '{"reward": "Reward"}')
    source.cells.insert(2, nbformat.v4.new_code_cell(ANNOYING, id="annoying"))
    write(folder, source)
    patch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert notebook.execute("toy", "quick") == (folder / "results" / "ablations" / "toy" / "quick", True)
    yield folder
    patch.undo()


def write(folder: Path, source: nbformat.NotebookNode) -> None:
    path = folder / "notebooks" / "toy.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(nbformat.writes(source), encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_it_leaves_notebook_page_figures_summary_and_provenance(executed: Path) -> None:
    made = {name for name in contents(executed / "results/ablations/toy/quick") if not name.startswith("runs/")}
    figures = {f"figures/{stem}.{kind}" for stem in ("curves", "claims") for kind in ("png", "svg")}
    assert made == {"notebook.ipynb", "notebook.html", "summary.json", "provenance.json", *figures}
    summary = json.loads((executed / "results/ablations/toy/quick/summary.json").read_text())
    assert summary["figures"] == ["curves", "claims"]
    assert [c["estimate"] for c in summary["claims"]] == [0.2]


def test_outputs_hold_no_path_of_this_machine(executed: Path) -> None:
    import sys

    for name in ("notebook.ipynb", "notebook.html", "summary.json", "provenance.json"):
        text = (executed / "results/ablations/toy/quick" / name).read_text(encoding="utf-8")
        for path in (str(executed), str(Path(notebook.__file__).parents[1]), sys.prefix, str(Path.home()), "/ipykernel_"):
            assert path not in text, f"{name} holds {path}"


def test_the_executed_notebook_is_quiet_and_says_what_it_ran(executed: Path) -> None:
    made = nbformat.read(executed / "results/ablations/toy/quick/notebook.ipynb", as_version=4)
    nbformat.validate(made)
    annoying = next(c for c in made.cells if c.id == "annoying")
    out = [o for o in annoying.outputs if o.output_type == "stream" and o.name == "stdout"]
    assert len(out) == 1  # coalesced
    assert out[0].text.startswith("0\n1\n2\n")
    assert "results/ablations/toy/quick" in out[0].text
    assert "1000" not in "".join(o.get("text", "") for o in annoying.outputs)  # no progress bar
    injected = next(c for c in made.cells if "injected-parameters" in c.metadata.get("tags", []))
    assert 'profile = "quick"' in injected.source
    assert "papermill" not in made.metadata


def test_the_page_stands_alone(executed: Path) -> None:
    page = (executed / "results/ablations/toy/quick/notebook.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") >= 2
    assert 'src="figures' not in page


def test_a_second_time_it_has_nothing_to_do_until_an_input_changes(executed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(executed)
    assert notebook.execute("toy", "quick")[1] is False
    assert contents(executed) == before
    ran = []
    monkeypatch.setattr(notebook, "_run", lambda *a: ran.append(a) or pytest.skip("it ran"))
    page = executed / "results/ablations/toy/quick/notebook.html"
    page.rename(page.with_suffix(".away"))
    try:
        with pytest.raises(pytest.skip.Exception):
            notebook.execute("toy", "quick")
    finally:
        page.with_suffix(".away").rename(page)
    yaml = executed / "experiments/ablations/toy.yaml"
    text = yaml.read_text()
    yaml.write_text(text.replace("It works.", "It does."))
    try:
        with pytest.raises(pytest.skip.Exception):
            notebook.execute("toy", "quick")
    finally:
        yaml.write_text(text)
    assert len(ran) == 2
    assert contents(executed) == before


def test_a_failing_cell_is_shown_and_earlier_results_stay(executed: Path) -> None:
    path = executed / "notebooks" / "toy.ipynb"
    good = path.read_text()
    source = nbformat.reads(good, as_version=4)
    source.cells[-1].source = "answer = 1\nanswer / 0"
    write(executed, source)
    before = contents(executed)
    try:
        with pytest.raises(UserError, match=r"toy.ipynb: cell \[\d+\] failed") as caught:
            notebook.execute("toy", "quick")
        assert "ZeroDivisionError: division by zero" in str(caught.value)
        assert "    answer / 0" in str(caught.value)
        assert len(str(caught.value).splitlines()) < 10
        assert contents(executed) == before
    finally:
        path.write_text(good)


def parameters_cell(text: str, tags: tuple[str, ...] = ("parameters",)) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell(text, metadata={"tags": list(tags)}, id="p")
    return nbformat.v4.new_notebook(cells=[cell])


DECLARED = 'name = "toy"\nprofile = "quick"\nresults_dir = ""\nseeds = 3\nlr = 0.1\nnothing = None'


@pytest.mark.parametrize(
    ("source", "changes", "said"),
    [
        (parameters_cell(DECLARED), {"sedes": 1}, "declares no parameter 'sedes' (did you mean 'seeds'?)"),
        (parameters_cell(DECLARED), {"seeds": "3"}, "parameter 'seeds' is a int, not str '3'"),
        (parameters_cell(DECLARED), {"seeds": True}, "parameter 'seeds' is a int, not bool True"),
        (parameters_cell(DECLARED), {"seeds": 0.5}, "parameter 'seeds' is a int, not float 0.5"),
        (parameters_cell(DECLARED, tags=()), {}, "has 0 cells tagged `parameters`"),
        (parameters_cell('name = "toy"'), {}, "declares no parameter 'profile'"),
        (parameters_cell("name = input()"), {}, "may only assign plain values"),
        (None, {}, "there is no such notebook"),
    ],
)
def test_parameters_are_checked_before_execution(
    executed: Path, monkeypatch: pytest.MonkeyPatch, source: nbformat.NotebookNode | None, changes: dict, said: str
) -> None:
    monkeypatch.setattr(notebook, "_run", lambda *a: pytest.fail("it was executed"))
    path = executed / "notebooks" / "toy.ipynb"
    good = path.read_text()
    try:
        path.unlink()
        if source:
            write(executed, source)
        with pytest.raises(UserError) as caught:
            notebook.execute("toy", "quick", **changes)
        assert said in str(caught.value)
    finally:
        path.write_text(good)


def test_a_whole_number_serves_as_a_float_and_none_takes_anything() -> None:
    notebook.check({"lr": 1, "nothing": [1]}, {"lr": 0.1, "nothing": None}, Path("n.ipynb"))


def test_runs_that_are_missing_are_named_before_execution(executed: Path) -> None:
    with pytest.raises(UserError, match=r"6 of 6 runs of toy full.*grpo-repro ablate toy --profile full"):
        notebook.execute("toy", "full")
    assert not (executed / "results/ablations/toy/full").exists()


def test_the_kernel_is_this_interpreter_whatever_the_user_has_installed(
    executed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from jupyter_client.kernelspec import KernelSpecManager

    theirs = tmp_path / "kernels" / "python3" / "kernel.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(json.dumps({"argv": ["/no/such/python"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with notebook._this_kernel():
        assert KernelSpecManager().get_kernel_spec("python3").argv[0] == sys.executable
    assert KernelSpecManager().get_kernel_spec("python3").argv[0] == "/no/such/python"
