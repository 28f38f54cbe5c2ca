"""One set of pins, three files that must agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_conda_users_get_the_same_core_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert pip == PROJECT["dependencies"]
    python = next(d for d in environment["dependencies"] if isinstance(d, str) and d.startswith("python="))
    assert python.removeprefix("python=") in PROJECT["requires-python"]


def test_every_core_dependency_is_pinned_exactly() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", d) for d in PROJECT["dependencies"])


def test_the_lock_holds_the_core_pins() -> None:
    def named(lines: list[str]) -> dict[str, str]:
        pairs = (line.split("==") for line in lines if "==" in line)
        return {name.lower().replace("_", "-"): version for name, version in pairs}

    lock = named((ROOT / "requirements.lock").read_text().splitlines())
    tools = [d for d in PROJECT["optional-dependencies"]["dev"] if "==" in d]
    for name, version in named(PROJECT["dependencies"] + tools).items():
        assert lock[name] == version, f"{name}: {version} in pyproject.toml, {lock.get(name)} in requirements.lock"


def test_the_packages_the_user_asked_for_are_there() -> None:
    asked = {"torch", "transformers", "jupyterlab", "matplotlib", "seaborn", "datasets", "papermill"}
    assert asked <= {d.split("==")[0] for d in PROJECT["dependencies"]}
    assert any(d.startswith("vllm==") for d in PROJECT["optional-dependencies"]["vllm"])
