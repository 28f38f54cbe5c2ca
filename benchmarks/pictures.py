"""Figures of the benchmark, from recorded cases only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.settings import WORKLOADS
from grpo_repro import style

PHASES = ("sample", "old", "update", "rest")


def drawn(cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures that finished cases give, by name: each with its part's results."""
    parts: dict[str, dict[str, Any]] = {"endtoend": {}, "memory": {}, "scaling": {}}
    for name, case in cases.items():
        part, _, which = name.partition("/")
        if part in parts:
            parts[part][which] = case["result"]
    return {name: part for name, part in parts.items() if part}


def draw(cases: Mapping[str, Any], home: Path) -> None:
    """Each figure whose cases are there."""
    done = {name: case for name, case in cases.items() if "not_measured" not in case["result"]}
    figures = {"endtoend": _endtoend, "memory": _memory, "scaling": _scaling}
    for name, part in drawn(done).items():
        with style.style():
            shown = {case: told for case, told in done.items() if case.startswith(name)}
            style.save(style.finish(figures[name](part, _caption(shown))), home / name)


def _caption(cases: Mapping[str, Any]) -> str:
    first = next(iter(cases.values()))["provenance"]
    commits = ", ".join(sorted({str(case["provenance"]["commit"])[:10] for case in cases.values()}))
    return f"{first['machine']['cpu']}, {first['machine']['cores']} cores. Commit {commits}."


def _endtoend(part: Mapping[str, Any], caption: str) -> Any:
    """Seconds of a step by phase, both sides, one thread and μ=1; one panel a model."""
    models = list(dict.fromkeys(name.split("-")[0] for name in part))
    figure = style.new_figure(10, 4.6, "A training step by phase, ours and TRL's", f"μ=1, one thread; medians. {caption}")
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for ax, model in zip(axes, models, strict=True):
        bars = {
            side: {p: statistics.median(s["phases"].get(p, 0.0) for s in told["steps"]) for p in PHASES}
            for name, found in part.items()
            if name.startswith(f"{model}-") and name.endswith("mu1-t1")
            for side, told in found["sides"].items()
        }
        left = [0.0] * len(bars)
        for phase, colour in zip(PHASES, style.COLOURS[1:], strict=False):
            wide = [phases[phase] for phases in bars.values()]
            ax.barh(list(bars), wide, left=left, color=colour, label={"old": "log-probs of π_old"}.get(phase, phase))
            left = [a + b for a, b in zip(left, wide, strict=True)]
        ax.invert_yaxis()
        ax.set_title(WORKLOADS[model].title.partition(",")[0])
        ax.set_xlabel("seconds a step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure


def _memory(part: Mapping[str, Any], caption: str) -> Any:
    figure = style.new_figure(
        7, 4.4, "Memory and time of the log-probs", f"4,096 tokens, V=49,152, forward and backward, one thread. {caption}"
    )
    ax = figure.subplots()
    points = {f"{way}, {precision}": told for precision, ways in part.items() for way, told in ways.items()}
    looks = style.looks(list(points))
    for name, told in points.items():
        look = looks[name]
        ax.plot(
            statistics.median(told["seconds"]),
            told["extra_mb"],
            look.marker,
            color=look.color,
            label=name,
            linestyle="none",
            markersize=9,
        )
    ax.set(xlabel="seconds", ylabel="extra memory, MB", ylim=(0, None), xlim=(0, None))
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return figure


def _scaling(part: Mapping[str, Any], caption: str) -> Any:
    figure = style.new_figure(
        9, 4.4, "How the cost of a step grows", f"Our step on a 2-layer model, one thread (runs: all cores). {caption}"
    )
    ax = figure.subplots()
    looks = style.looks(list(part))
    for name, told in part.items():
        look = looks[name]
        x = [value / told["x"][0] for value in told["x"]]
        y = [value / told["seconds"][0] for value in told["seconds"]]
        ax.loglog(x, y, color=look.color, marker=look.marker, linestyle=look.linestyle, label=name, base=2)
    ends = [1.0, max(told["x"][-1] / told["x"][0] for told in part.values())]
    ax.loglog(ends, ends, color="#999999", linewidth=1, label="proportional", base=2)
    ax.set(xlabel="times the smallest", ylabel="times the seconds at the smallest")
    ax.legend()
    return figure
