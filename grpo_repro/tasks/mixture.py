"""Several tasks in equal shares: a prompt's level is the name of its task, so whatever is reported by level is reported by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from grpo_repro.spec import base, bind, public, unbind
from grpo_repro.tasks import gym, maths, pairs
from grpo_repro.tasks.base import Encode, Task, no_positions
from grpo_repro.types import Prompt, UserError

Positions = Callable[[Sequence[str]], Mapping[str, Sequence[int]]]


def single() -> dict[str, Callable[..., Task]]:
    """The tasks that can be mixed, by their YAML names: the public functions of the task modules that return a Task."""
    functions = {**public(pairs), **public(gym), **public(maths)}
    return {name: f for name, f in functions.items() if f.__annotations__.get("return") == "Task"}


def _each(specs: list[Any]) -> list[Any]:
    """Refuse at once what cannot be bound; written briefly, so that a default that is spelled out makes no other run."""
    return [unbind(bind("task.mix.tasks", single(), spec), brief=True) for spec in specs]


def mix(
    encode: Encode,
    *,
    tasks: Annotated[list[Any], Field(min_length=1), AfterValidator(_each)],
    limit: Annotated[int, Field(ge=1)] | None = None,
) -> Task:
    """`tasks: [chain_sum, {name: gcd, largest: 20}]`: their prompts in turn, each judged by its own verifier.

    A level is the task's name (the same task again is name_2); `limit` is the longest of theirs unless said. Notes that not all
    of them make are left out. Raises UserError where one task trains on what another keeps for the exam.
    """
    times = Counter[str]()
    members: dict[str, Task] = {}
    for spec in tasks:
        build = bind("task.mix.tasks", single(), spec)
        times[name := base(build).__name__] += 1
        members[f"{name}_{times[name]}" if times[name] > 1 else name] = build(encode)
    _apart(members)
    positions: Positions = next(iter(members.values())).positions
    return Task(
        "mix",
        _joined(members, "train"),
        _joined(members, "heldout"),
        limit or max(member.limit for member in members.values()),
        partial(_verify, members, _common_notes(members)),
        positions if all(member.positions == positions for member in members.values()) else no_positions,
        partial(_steps, members),
        new_range=_joined(members, "new_range"),
    )


def _joined(members: Mapping[str, Task], part: str) -> tuple[Prompt, ...]:
    return tuple(replace(prompt, level=name) for name, task in members.items() for prompt in getattr(task, part))


def _apart(members: Mapping[str, Task]) -> None:
    for name, task in members.items():
        trained = {prompt.id for prompt in task.train}
        for other, kept in members.items():
            if shared := trained & {prompt.id for prompt in (*kept.heldout, *kept.new_range)}:
                raise UserError(
                    f"task.mix: {name} trains on what {other} keeps for the exam (e.g. {min(shared)!r}): change one of them."
                )


def _common_notes(members: Mapping[str, Task]) -> set[str]:
    """Found by asking: a verifier answers in the same words whatever the text."""
    noted = [set(task.verify(task.train[0], "")[1]) for task in members.values()]
    return set.intersection(*noted)


def _steps(members: Mapping[str, Task], prompt: Prompt, pieces: Sequence[str]) -> Sequence[tuple[int, float]]:
    return members[prompt.level].steps(prompt, pieces)


def _verify(members: Mapping[str, Task], kept: set[str], prompt: Prompt, text: str) -> tuple[float, Mapping[str, float]]:
    right, notes = members[prompt.level].verify(prompt, text)
    return right, {name: note for name, note in notes.items() if name in kept}
