"""What the templates write loads, checks and runs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from grpo_repro import ablation, config, notebook, scaffold
from grpo_repro.types import UserError


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_REPRO_ROOT", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("with_base", [False, True])
def test_a_new_ablation_loads(checkout: Path, with_base: bool) -> None:
    if with_base:
        base = Path(scaffold.__file__).parents[1] / "experiments" / "base.yaml"
        (checkout / "experiments").mkdir()
        (checkout / "experiments" / "base.yaml").write_text(base.read_text())
    yaml, source = scaffold.new_ablation("my_idea")
    made = ablation.load_ablation(yaml)
    assert (made.name, source) == ("my_idea", checkout / "notebooks" / "my_idea.ipynb")
    for profile in ("smoke", "quick", "full"):
        assert len(list(made.runs(profile))) == 4 * made.profile(profile).seeds
    assert made.profile("full").decide
    assert made.profile("full").seeds >= 10
    written = nbformat.read(source, as_version=4)
    nbformat.validate(written)
    assert notebook.parameters(source) == {"name": "my_idea", "profile": "quick", "results_dir": ""}
    assert all(not c.get("outputs") and not c.get("execution_count") for c in written.cells)
    assert not any("def " in c.source for c in written.cells)


def test_a_new_run_loads(checkout: Path) -> None:
    [path] = scaffold.new_run("my-run")
    assert config.parse_run(config.load_yaml(path), str(path)).name == "my-run"


def test_nothing_is_overwritten(checkout: Path) -> None:
    yaml, source = scaffold.new_ablation("mine")
    yaml.write_text("years of work")
    with pytest.raises(UserError, match="exists already"):
        scaffold.new_ablation("mine")
    assert yaml.read_text() == "years of work"
    yaml.unlink()
    text = source.read_text()
    with pytest.raises(UserError, match="exists already"):
        scaffold.new_ablation("mine")
    assert source.read_text() == text
    assert not yaml.exists()


@pytest.mark.parametrize("name", ["../up", "My Idea", "", "9lives", "a-b"])
def test_bad_names_write_nothing(checkout: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be a name"):
        scaffold.new_ablation(name)
    assert list(checkout.rglob("*.*")) == []
