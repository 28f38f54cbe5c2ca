"""A tiny ablation in a folder of its own, and trainers that stand in for training: for tests of records, grid, commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from grpo_repro.config import Run

YAML = dedent("""
    title: A toy
    question: Does it work?
    seed_says: It works.
    mechanism: None.
    knob: objective.clip
    base:
      task: short
      rollout: {group_size: 2, prompts: 2}
      scale: {steps: 3}
    panels:
      main:
        title: The panel
        shows: Numbers.
        arms:
          low: {objective.clip: {name: ppo, eps_high: 0.2}}
          high: {objective.clip: {name: ppo, eps_high: 0.4}}
    profiles:
      smoke: {seeds: 1, set: {scale.steps: 2}}
      quick: {seeds: 2}
      full: {seeds: 3, decide: true}
    claims:
      - {id: toy, source: A paper, says: High is more., panel: main, arm: high, against: low, metric: reward,
         window: {first: 0, last: 2}, predict: greater, sesoi: 0.1, primary: true, scope: toy, prediction: More.}
""")
TASK_OF_TIME = 0.02  # seconds a step of the slow trainer


def checkout(folder: Path, yaml: str = YAML, name: str = "toy") -> Path:
    """An empty repository that holds one ablation."""
    path = folder / "experiments" / "ablations" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml, encoding="utf-8")
    return folder


def note(cache: Path, run: Run, event: str) -> None:
    """Leave a trace outside the worker: what was trained, and when."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "events").open("a") as file:
        file.write(f"{event} {run.seed} {width(run)}\n")


def events(cache: Path, event: str) -> list[str]:
    lines = (cache / "events").read_text().splitlines() if (cache / "events").is_file() else []
    return [line.removeprefix(event + " ") for line in lines if line.startswith(event + " ")]


def width(run: Run) -> float:
    return float(run.objective["clip"]["eps_high"])


def fake(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    """Reward = eps_high + seed / 100 + step / 1000, and a figure of the exam at the end."""
    note(cache, run, "train")
    for step in range(run.scale.steps):
        yield {"step": step, "reward": width(run) + run.seed / 100 + step / 1000}
    yield {"step": run.scale.steps, "heldout/accuracy": 0.5}


def killed_once(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    """As if the system had taken the worker's memory, in the middle of its first run."""
    first = not events(cache, "train")
    for row in fake(run, cache):
        yield row
        if first and row["step"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def interrupts_itself(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    """As a terminal does, whose Ctrl-C reaches every process of the group."""
    os.kill(os.getpid(), signal.SIGINT)
    yield from fake(run, cache)


def always_killed(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    for row in fake(run, cache):
        yield row
        if width(run) == 0.4 and row["step"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def refused(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    from grpo_repro.types import UserError

    yield from fake(run, cache)
    if run.seed == 1:
        raise UserError("step 1: the loss is nan.")


def broken(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    yield {"step": 0, "reward": 1 / width(run)}
    raise ZeroDivisionError("a fault of ours")


def patient(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    """The first run is quick; the others train until they are stopped."""
    note(cache, run, "train")
    later = len(events(cache, "train")) > 1
    yield {"step": 0, "reward": 0.0}
    while later:
        time.sleep(0.02)
        yield {"step": 1, "reward": 0.0}


def traced(run: Run, cache: Path) -> Iterator[dict[str, float]]:
    """Notes the environment of the worker and when each start begins and ends."""
    note(cache, run, "begin")
    note(cache, run, f"threads={os.environ['OMP_NUM_THREADS']}")
    time.sleep(0.3)  # the making of a start
    note(cache, run, "start-made")
    for row in fake(run, cache):
        time.sleep(TASK_OF_TIME)
        yield row
