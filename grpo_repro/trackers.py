"""Live trackers, when asked for with `report_to`: TensorBoard, W&B, trackio. Each is imported only then."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from grpo_repro.config import Run
from grpo_repro.record import Row
from grpo_repro.types import UserError


class Tracker(Protocol):
    def log(self, row: Row, step: int) -> None: ...


def opened(run: Run, folder: Path) -> list[AbstractContextManager[Tracker]]:
    """The trackers that a run asks for, to be entered. Raises UserError where a package is missing, before anything starts."""
    return [KINDS[name](_module(name), run, folder) for name in run.report_to]


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def log(self, row: Row, step: int) -> None:
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class _Hosted:
    """W&B, and trackio, which has its interface."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def log(self, row: Row, step: int) -> None:
        self.module.log(_numbers(row), step=step)


@contextmanager
def _tensorboard(module: Any, run: Run, folder: Path) -> Iterator[Tracker]:
    writer = module.SummaryWriter(str(folder / "tensorboard"))
    try:
        yield _TensorBoard(writer)
    finally:
        writer.close()


@contextmanager
def _hosted(module: Any, run: Run, folder: Path) -> Iterator[Tracker]:
    module.init(project="grpo_repro", name=f"{run.name}-seed{run.seed}", config=run.model_dump(mode="json"))
    try:
        yield _Hosted(module)
    finally:
        module.finish()


KINDS = {"tensorboard": _tensorboard, "wandb": _hosted, "trackio": _hosted}
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError:
        raise UserError(f"report_to: {name} is not installed: run `pip install {name}`, or leave it out of report_to.") from None


def _numbers(row: Row) -> dict[str, float]:
    """What was recorded at this step; NaN means that it was not."""
    return {k: v for k, v in row.items() if k != "step" and not math.isnan(v)}
