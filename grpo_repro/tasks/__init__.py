"""Tasks: prompts with a verifier, split into train and held-out by content. A task is chosen in YAML like a knob's variant:
`task: short` or `task: {name: chain_sum, terms: 2}`; its function takes an encoder (text → tokens) and returns a Task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_repro.spec import Spec, bind
from grpo_repro.tasks.base import Encode, Task
from grpo_repro.tasks.mixture import mix, single

__all__ = ["Encode", "Task", "bound", "known"]


def known() -> dict[str, Callable[..., Task]]:
    """Every task, by its YAML name."""
    return {**single(), "mix": mix}


def bound(spec: Spec | Any) -> Callable[[Encode], Task]:
    """A task's YAML value → its builder. Raises UserError for a task or parameter that does not exist."""
    return bind("task", known(), spec)
