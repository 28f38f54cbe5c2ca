"""Finished cases, one JSON file each below results/reports/benchmark/cases, written as soon as a case is done.

A case is done again when its settings, the package's code or the modules that measure it have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process import Failed
from grpo_repro import paths, record
from grpo_repro.types import UserError


@dataclass(frozen=True)
class Case:
    name: str  # part/which
    module: str  # of this package: what measures it
    measure: Callable[[], dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    estimate: float = 10.0  # seconds

    @property
    def path(self) -> Path:
        return folder() / f"{self.name.replace('/', '_').replace(' ', '-')}.json"


def folder() -> Path:
    return paths.results() / "reports" / "benchmark" / "cases"


def code(module: str) -> str:
    """The package's source and the measuring module's, hashed: a number of other code is no number of this one."""
    here = Path(__file__).parent
    measuring = ("settings", "models", "ours", "theirs", module)
    sources = [*sorted((here.parent / "grpo_repro").rglob("*.py")), *(here / f"{name}.py" for name in measuring)]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def all_cases() -> dict[str, dict[str, Any]]:
    """Finished cases by name."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(folder().glob("*.json"))]
    return {case["name"]: case for case in found}


def run(cases: list[Case], fresh: bool, say: Callable[[str], None] = print) -> list[str]:
    """Measure what is not measured yet; returns why cases failed, by name."""
    origin, failed = record.provenance(), []
    waiting = [(case, json.loads(json.dumps(case.settings | {"code": code(case.module)}))) for case in cases]
    if not fresh:
        waiting = [(case, settings) for case, settings in waiting if _found(case) != settings]
        if len(waiting) < len(cases):
            say(
                f"{len(cases) - len(waiting)} of {len(cases)} cases are finished with this code and these settings; --fresh does them again"
            )
    began, spent, pace = time.monotonic(), 0.0, 1.0
    for i, (case, settings) in enumerate(waiting):
        left = sum(c.estimate for c, _ in waiting[i:]) * pace
        say(f"[{i + 1} of {len(waiting)}, {time.monotonic() - began:.0f} s, about {left:.0f} s left] {case.name}")
        start, load = time.monotonic(), os.getloadavg()[0]
        try:
            result = case.measure()
        except (Failed, UserError) as error:
            say(f"  not measured: {error}")
            result = {"not_measured": str(error).replace(str(paths.root()), ".")}
            failed.append(f"{case.name}: {error}")
        seconds = time.monotonic() - start
        spent += case.estimate
        pace = (time.monotonic() - began) / spent
        head = {"name": case.name, "settings": settings, "seconds": round(seconds, 1), "load_before": round(load, 2)}
        content = head | {"result": result, "provenance": origin}
        paths.write(case.path, json.dumps(content, indent=1) + "\n")
    return failed


def _found(case: Case) -> dict[str, Any] | None:
    """Settings of the case's file, unless it was not measured."""
    try:
        content = json.loads(case.path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return None if "not_measured" in content["result"] else content["settings"]
