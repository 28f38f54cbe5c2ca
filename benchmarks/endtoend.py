"""Our loop and TRL's on the same workload, a step each in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import compare, ours, theirs
from benchmarks.process import Failed, Process
from benchmarks.settings import SIDES, Pair, pairs
from benchmarks.store import Case

SECONDS = {"tiny": (8.0, 1.2), "tiny_1m": (8.0, 2.5), "smollm2": (30.0, 55.0)}  # of a start, of a round of all sides, about
WARM = 4  # tokens of the step that is not counted


def cases(quick: bool) -> list[Case]:
    return [Case(f"endtoend/{p.name}", "endtoend", partial(measure, p), p.settings, estimate(p)) for p in pairs(quick)]


def estimate(p: Pair) -> float:
    start, rounds = SECONDS[p.model]
    return start + rounds * p.repeats * (1.5 if p.updates == 2 else 1.0) / (1.6 if p.threads == 2 else 1.0)


def measure(p: Pair) -> dict[str, Any]:
    """{"sides": {side: {"steps", "probe", "loaded_mb", "peak_mb"}}, "ratios": {side: …}, "invalid": {side: reasons}}; ours comes first."""
    names = SIDES[p.precision]
    with contextlib.ExitStack() as stack:
        workers = {name: worker(stack, name, p.model, p.updates, p.threads) for name in names}
        sides: dict[str, dict[str, Any]] = {name: {**w.answer(), "steps": []} for name, w in workers.items()}
        first, *others = names
        rollout = workers[first].ask(do="probe")
        sides[first]["probe"] = told(rollout)
        for name in others:
            sides[name]["probe"] = told(workers[name].ask(do="probe", prompts=rollout["prompts"], responses=rollout["responses"]))
        for w in workers.values():
            w.ask(do="step", tokens=WARM)
        for i in range(p.repeats):
            for name in names if i % 2 == 0 else names[::-1]:
                sides[name]["steps"].append(workers[name].ask(do="step"))
        for w in workers.values():
            w.pipe.send({"do": "quit"})
    return concluded(sides, p.precision)


def worker(stack: contextlib.ExitStack, side: str, model: str, updates: int, threads: int, option: str | None = None) -> Process:
    who, precision = side.split(" ", 1)
    function: Callable[..., None] = ours.serve if who == "ours" else theirs.serve
    arguments = (model, precision, updates, *([option] if option else []))
    made = Process(function, *arguments, threads=threads, log=side)
    stack.callback(made.close)
    return made


def told(probe: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in probe.items() if isinstance(value, float)}


def concluded(sides: dict[str, dict[str, Any]], precision: str) -> dict[str, Any]:
    first, *others = sides
    seconds = {name: [step["seconds"] for step in side["steps"]] for name, side in sides.items()}
    for side in sides.values():
        side["peak_mb"] = max(step["peak_mb"] for step in side["steps"])
    cpu = {name: [step["cpu_seconds"] for step in side["steps"]] for name, side in sides.items()}
    return {
        "sides": sides,
        "ratios": {name: compare.ratio(seconds[first], seconds[name]) for name in others},
        "cpu_ratios": {name: compare.ratio(cpu[first], cpu[name]) for name in others},
        "invalid": {name: wrong for name in others if (wrong := compare.unequal(sides[first], sides[name], precision))},
    }


def options(quick: bool) -> list[Case]:
    """TRL's own options against its configuration here, to see that this is its fastest."""
    chosen = {"tiny_1m": ("fp32", "bf16 autocast"), "smollm2": ("bf16 autocast", "bf16 weights")}
    return [
        Case(
            f"options/{model} {precision}",
            "theirs",
            partial(compared, model, precision, 1 if quick else rounds),
            {"rounds": rounds},
            seconds,
        )
        for (model, precisions), rounds, seconds in zip(chosen.items(), (5, 1), (100.0, 400.0), strict=True)
        for precision in precisions
    ]


def compared(model: str, precision: str, rounds: int) -> dict[str, Any]:
    """{option: ratio of the CPU seconds with it over those without, a step each in turn}; one that does not run has its reason instead."""
    found: dict[str, Any] = {}
    for option in theirs.OPTIONS:
        if option == theirs.CHOSEN or set(theirs.OPTIONS[option][1].items()) & set(theirs.PRECISIONS[precision][1].items()):
            continue
        with contextlib.ExitStack() as stack:
            try:
                sides = [worker(stack, f"TRL {precision}", model, 1, 1, which) for which in (theirs.CHOSEN, option)]
                for w in sides:
                    w.answer()
                    w.ask(do="step", tokens=WARM)
                told = [[w.ask(do="step")["cpu_seconds"] for w in sides] for _ in range(rounds)]
                for w in sides:
                    w.pipe.send({"do": "quit"})
                found[option] = compare.ratio([a for a, _ in told], [b for _, b in told])
            except Failed as error:
                found[option] = {"failed": str(error)}
    return found
