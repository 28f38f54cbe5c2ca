"""How the cost of our step grows with the batch, the length, the vocabulary, G and the number of runs: small sweeps on a tiny model."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import models, ours
from benchmarks.process import Process, memory, once
from benchmarks.settings import Workload
from benchmarks.store import Case
from grpo_repro import record
from grpo_repro.learner import Learner
from grpo_repro.train import steps

BASE = {"prompts": 8, "group": 8, "tokens": 32, "vocabulary": 256}
SWEEPS = {
    "prompts": (4, 8, 16, 32, 64),
    "group": (4, 8, 16, 32, 64),
    "tokens": (16, 32, 64, 128),
    "vocabulary": (64, 256, 1024, 4096, 16384),
}
RUNS = (1, 2, 4, 8)
STEPS = 4  # counted, a point


def cases(quick: bool) -> list[Case]:
    sweeps = {k: v[:2] for k, v in SWEEPS.items()} if quick else SWEEPS
    settings = {"base": BASE, "steps": STEPS}
    made = [
        Case(f"scaling/{name}", "scaling", partial(once, sweep, name, points), {**settings, "points": points}, 14.0)
        for name, points in sweeps.items()
    ]
    runs = RUNS[:2] if quick else RUNS
    return [*made, Case("scaling/runs", "scaling", partial(many, runs), {**settings, "points": runs}, 25.0)]


def sweep(name: str, points: tuple[int, ...]) -> dict[str, Any]:
    """{"x": points, "seconds": median of a step, "phases": seconds by phase, "peak_mb"}; one thread."""
    rows = []
    for x in points:
        made = learner(**{**BASE, name: x})
        walk = steps(made)
        ours.step(made, walk)
        told = [ours.step(made, walk) for _ in range(STEPS)]
        rows.append(
            {"x": x, "seconds": statistics.median(t["seconds"] for t in told), "phases": told[-1]["phases"], "peak_mb": memory()}
        )
    return {key: [row[key] for row in rows] for key in rows[0]}


def learner(prompts: int, group: int, tokens: int, vocabulary: int) -> Learner:
    made = ours.learner("tiny", "fp32", work=Workload(prompts, group, tokens, ""))
    policy = replace(models.scratch(vocabulary, context=160), end_ids=frozenset())
    return Learner.of(made.run, policy, made.task)


def serve(receive: Any, reply: Any) -> None:
    made = learner(**BASE)
    walk = steps(made)
    ours.step(made, walk)
    reply({})
    while receive()["do"] != "quit":
        for _ in range(4 * STEPS):
            ours.step(made, walk)
        reply({})


def many(points: tuple[int, ...]) -> dict[str, Any]:
    """x runs, a process and a thread each, as many at once as there are cores: seconds until all have made their steps."""
    seconds, together = [], record.cores()
    workers = [Process(serve, threads=1, log="scaling") for _ in range(min(together, max(points)))]
    try:
        for w in workers:
            w.answer()
        for x in points:
            began, waiting = time.perf_counter(), x
            while waiting:
                busy = workers[: min(waiting, len(workers))]
                for w in busy:
                    w.pipe.send({"do": "steps"})
                for w in busy:
                    w.answer()
                waiting -= len(busy)
            seconds.append(time.perf_counter() - began)
    finally:
        for w in workers:
            w.close()
    return {"x": list(points), "seconds": seconds, "at_once": len(workers)}
