"""Where things are, and how files are written: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from grpo_repro.types import UserError


def root() -> Path:
    """The checkout: $GRPO_REPRO_ROOT, or the folder above the package that has a pyproject.toml, or else the current folder."""
    if told := os.environ.get("GRPO_REPRO_ROOT"):
        return Path(told).resolve()
    above = Path(__file__).resolve().parents[1]
    return above if (above / "pyproject.toml").is_file() else Path.cwd()


def cache() -> Path:
    """Warm starts, converted weights and finished runs by key: safe to delete. $GRPO_REPRO_CACHE, or .cache in the checkout."""
    return Path(os.environ.get("GRPO_REPRO_CACHE") or root() / ".cache").resolve()


def results() -> Path:
    """$GRPO_REPRO_RESULTS, or results in the checkout."""
    return Path(os.environ.get("GRPO_REPRO_RESULTS") or root() / "results").resolve()


def experiments() -> Path:
    return root() / "experiments"


def notebooks() -> Path:
    return root() / "notebooks"


def shown(path: Path) -> str:
    """A path as a person would type it here: relative to the current folder where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def writable(folder: Path, setting: str = "GRPO_REPRO_RESULTS") -> Path:
    """Make the folder and prove that a file can be written in it, before hours are spent. Raises UserError, naming the
    environment variable that moves it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): set {setting} to a folder that can.") from None


def write(path: Path, text: str) -> None:
    """Replace a file's content in one step: a reader, or a crash, sees the old text or the new, no mixture. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(part, 0o644)  # a temporary file is private
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose a folder that you may write to.") from None
