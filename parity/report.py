"""parity.json → README.md, and what is wrong with it. Needs no framework: the main test suite reads the committed files with it."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from grpo_repro import knobs, presets
from grpo_repro.objective import Objective
from grpo_repro.spec import parameters

BITES = 1e-3  # a variant that changes less than this on every batch has not been compared
GROUND = {  # slots that no framework's loss contains: why
    "reward": "the reward is the user's own function there",
}
TITLES = {
    "ratio": "① ratio",
    "correction": "① correction",
    "clip": "② clip",
    "gate": "② gate",
    "advantage": "③ advantage",
    "transform": "③ transform",
    "aggregation": "④ aggregation",
    "kl": "⑤ KL in the loss",
    "kl_in_reward": "⑤ KL in the reward",
    "sampling": "⑥ sampling",
    "overlong": "⑥ overlong",
    "reward": "⑦ reward",
}


def problems(found: dict[str, Any]) -> list[str]:
    """Everything that keeps the report from being what it says, one sentence each; empty when all is well."""
    wrong = [f"{_where(c)}: {c['problem']}" for c in found["cases"] if c["problem"]]
    wrong += [
        f"{_where(c)}: {_size(c):.1e} is over its bar {c['bar']:.0e}" for c in found["cases"] if not c["problem"] and _over(c)
    ]
    for d in found["deviations"]:
        if d["problem"]:
            wrong.append(f"{d['framework']} {d['option']} ({(d['reason'] or d['agrees'])[:60]}): {d['problem']}")
    for f in found["frameworks"]:
        if not _size(f["anchor"]) <= (1e-10 if f["dtype"] == "float64" else 1e-5):
            wrong.append(
                f"{f['name']}: the example worked by hand gives loss {f['anchor']['loss']}, not -0.05, or another gradient"
            )
        tried = {row for c in found["cases"] if c["framework"] == f["name"] for row in (*c["options"], f"preset {c['preset']}")}
        rows = [(option, cell(found, f["name"], option)) for option in options()]
        rows += [(f"preset {name}", preset(found, f["name"], name)) for name in _presets()]
        wrong += [f"{row} has no row for {f['name']}: {NEW}" for row, text in rows if not text and row not in tried]
    acts: dict[tuple[str, str], float] = defaultdict(float)
    for c in found["cases"]:
        for option in c["options"]:
            slot = option.split(".")[0]
            if slot in c["acts"]:
                acts[c["framework"], option] = max(acts[c["framework"], option], c["acts"][slot])
    for (framework, option), most in acts.items():
        if most < BITES:
            wrong.append(f"{framework}: {option} changes nothing on these batches ({most:.0e}), so its agreement says nothing")
    return wrong


NEW = (
    "a variant or preset is new; run `make parity` (an adapter in parity/peers may first have to learn it) and commit the report"
)


def label(function: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """A variant's name with the words it was given, e.g. "mask·token": each word of a Literal is a row of its own."""
    return "·".join([function.__name__, *(str(values.get(k, words[0])) for k, words in _words(function).items())])


def labels(slot: str) -> list[str]:
    """Every row of a slot."""
    rows = []
    for function in knobs.variants(slot).values():
        words = _words(function)
        rows += [label(function, dict(zip(words, chosen, strict=True))) for chosen in itertools.product(*words.values())]
    return rows


def _words(function: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Parameters that are a choice of words, the default first."""
    found = {}
    for name, p in parameters(function).items():
        words = get_args(p.annotation)
        if get_origin(p.annotation) is Literal and all(isinstance(word, str) for word in words):
            found[name] = tuple(sorted(words, key=lambda word, default=p.default: word != default))
    return found


def options() -> list[str]:
    """Every row of every slot."""
    return [f"{slot}.{row}" for slot in TITLES for row in labels(slot)]


def cell(found: dict[str, Any], framework: str, option: str) -> str:
    """One cell of the matrix: agrees, cannot express, deviates, or what holds of these; "" when nothing is known."""
    slot = option.split(".")[0]
    if slot in GROUND:
        return f"cannot express: {GROUND[slot]}"
    ours = [c for c in found["cases"] if c["framework"] == framework and option in c["options"] and slot in c["acts"]]
    agreeing = [c for c in ours if not c["problem"] and not _over(c)]
    said = [_agrees(agreeing)] if agreeing else []
    said += [_deviates(d) for d in found["deviations"] if d["framework"] == framework and d["option"] == option and d["reason"]]
    if not said:
        reasons = _reasons(found, framework, option)
        said = [f"cannot express: {reasons[0]}"] if reasons else []
    return "<br>".join(said)


def preset(found: dict[str, Any], framework: str, name: str) -> str:
    """A preset's cell."""
    agreeing = [c for c in found["cases"] if c["framework"] == framework and c["preset"] == name and not c["problem"]]
    if agreeing:
        given = next((f", given {c['given']}" for c in agreeing if c["given"]), "")
        return _agrees(agreeing).partition(" (")[0] + given
    reasons = [f"{n['option']}: {n['reason']}" for n in found["cannot"] if n["framework"] == framework and n["preset"] == name]
    return f"cannot express: {reasons[0]}" if reasons else ""


def render(found: dict[str, Any], provenance: dict[str, Any]) -> str:
    """The whole README.md."""
    frameworks = [f["name"] for f in found["frameworks"]]
    agreed, total = sum(not c["problem"] for c in found["cases"]), len(found["cases"])
    refused: dict[tuple[str, str, str], int] = defaultdict(int)
    for no in found["cannot"]:
        refused[no["framework"], no["option"], no["reason"]] += no["configurations"]
    lines = [
        "# Parity: this formula beside TRL, verl, OpenRLHF and Liger",
        "",
        "Generated by `make parity` from `parity.json`; do not edit. " + _summary(found, provenance, agreed, total),
        "",
        "Each framework's own functions run on the same random rollouts as `grpo_repro.objective.score` and `loss`: rewards in, loss and "
        "gradient out (of the log-probs; for Liger of the hidden states and the output matrix). "
        f"{found['batch']['rows']} responses in groups of {found['batch']['group']}, 1 to {found['batch']['limit']} tokens, padded; "
        "two flat groups; some responses cut at the limit; now ≠ old ≠ sampler ≠ reference; seeds "
        f"{', '.join(map(str, found['seeds']))}.",
        "",
        "- **agrees to N digits**: the largest relative difference over seeds and configurations is below 10⁻ᴺ. Bar: 10 digits in float64, "
        "5 where the framework computes in float32. Gradient: norm of the difference over the norm. Loss: difference over the sum of its "
        "terms' absolute values.",
        "- **deviates**: the same words give another number. First the difference as a person would meet it, then what is left after the "
        "conversion that the sentence names.",
        "- **cannot express**: the framework has no such option, or none that can be asked without a cluster.",
        "- An agreement counts only if the variant acts: swapping it changes loss or gradient by more than 10⁻³ on these rollouts.",
        "",
        "| framework | version | computes in | example by hand (loss −.05) differs by | seconds |",
        "|---|---|---|---|---|",
        *(
            f"| {f['name']} | {f['package']} {f['version']} | {f['dtype']} | {_size(f['anchor']):.0e} | {f['seconds']} |"
            for f in found["frameworks"]
        ),
        "",
        "## Presets",
        "",
        "As objectives: from rewards to loss and gradient. A preset's step, sampling loop and schedule are not compared.",
        "",
        *_table("preset", frameworks, [(f"`{name}`", [preset(found, f, name) for f in frameworks]) for name in _presets()]),
        "",
    ]
    for slot, title in TITLES.items():
        rows = [(f"`{row}`", [cell(found, f, f"{slot}.{row}") for f in frameworks]) for row in labels(slot)]
        lines += [f"## {title}", "", *_table("variant", frameworks, rows), ""]
    lines += [
        "## Further agreements",
        "",
        *(
            f"- {d['framework']}, `{d['option'].partition('.')[2]}`: {d['agrees']}: {digits(_size(d))} digits"
            for d in found["deviations"]
            if d["agrees"]
        ),
        "",
        "## Reported of earlier versions, not found in these",
        "",
        *(f"- {said} (agreements: {n})" for said, n in _mended(found) if n),
        "",
        "## What each framework ties together",
        "",
        "Products of variants that we can write and it cannot (number of configurations tried).",
        "",
        *(f"- {f}: {option}: {why} ({n})" for (f, option, why), n in sorted(refused.items()) if " " in option),
        "",
        "## Conversions",
        "",
        "Where a framework fixes a number that we leave free, our side takes its number; the deviation without that is in the tables.",
        "",
        *(f"- {f}: {said} ({n} configurations)" for (f, said), n in sorted(_conversions(found).items())),
        "",
        "Compared by gradient only, because the surrogates have other values: "
        + "; ".join(f"{f}: {words}" for f, words in sorted(_gradient_only(found).items()))
        + ".",
        "",
    ]
    return "\n".join(lines)


def _summary(found: dict[str, Any], provenance: dict[str, Any], agreed: int, total: int) -> str:
    deviating = sum(bool(d["reason"]) for d in found["deviations"])
    built = provenance["environment_seconds"]
    built_said = f"; the environment took {built:.0f} s to build" if built else ""
    machine = provenance["machine"]
    return (
        f"{agreed} of {total} configurations that both sides can express agree; {deviating} deviations are explained. "
        f"Commit {provenance['commit'][:9]}, {provenance['date'][:10]}, {machine['system']}, {machine['cores']} cores, "
        f"torch {provenance['packages']['torch']}: {provenance['comparison_seconds']:.0f} s{built_said}."
    )


def _table(head: str, frameworks: list[str], rows: list[tuple[str, list[str]]]) -> list[str]:
    return [
        f"| {head} | {' | '.join(frameworks)} |",
        "|---" * (len(frameworks) + 1) + "|",
        *(f"| {name} | {' | '.join(c.replace('|y|', '∣y∣') for c in cells)} |" for name, cells in rows),
    ]


def _agrees(cases: list[dict[str, Any]]) -> str:
    gradient_only = all(c["compared"] == "gradient" for c in cases)
    what = "gradient agrees" if gradient_only else "agrees"
    count = f"{len(cases)} configuration{'s' if len(cases) > 1 else ''}"
    return f"{what} to {digits(max(map(_size, cases)))} digits ({count})"


def _deviates(d: dict[str, Any]) -> str:
    after = f"; converted: {digits(_size({'difference': d['converted']}))} digits" if d["converted"] else ""
    return f"deviates: {d['reason']}; size {_size(d):.1e}{after}"


def digits(difference: float) -> int:
    """10⁻ᴺ is just above the difference; 16 when there is none at all."""
    return 16 if difference == 0 else min(16, math.floor(-math.log10(difference)))


def _size(row: dict[str, Any]) -> float:
    return max(row["difference"].values()) if row["difference"] else float("nan")


def _over(case: dict[str, Any]) -> bool:
    return not _size(case) <= case["bar"]


def _where(case: dict[str, Any]) -> str:
    return f"{case['framework']} {case['preset'] or case['knobs']} on {case['kind']} batches"


def _reasons(found: dict[str, Any], framework: str, option: str) -> list[str]:
    exact = [n["reason"] for n in found["cannot"] if n["framework"] == framework and n["option"] == option]
    qualified = [n for n in found["cannot"] if n["framework"] == framework and n["option"].split(" ")[0] == option]
    return exact or [f"{n['option'].partition(' ')[2]}: {n['reason']}" for n in qualified]


def _presets() -> list[str]:
    return [name for name, value in vars(presets).items() if isinstance(value, Objective)]


def _mended(found: dict[str, Any]) -> list[tuple[str, int]]:
    """Deviations that were reported and are gone: each with the agreements that show it."""

    def count(framework: str, *wanted: str) -> int:
        return sum(c["framework"] == framework and set(wanted) <= set(c["options"]) and not c["problem"] for c in found["cases"])

    gspo, micro = "ratio.sequence", [d for d in found["deviations"] if d["agrees"] and not d["problem"]]
    rows = [
        ("verl's gspo ignored loss_agg_mode; it takes all four now", count("verl", gspo, "aggregation.token_mean")),
        ("OpenRLHF had no choice of aggregation with ppo; it has the sequence mean now", count("OpenRLHF", "ratio.token", ROW)),
        (
            "OpenRLHF had no off-policy-corrected KL in the loss; it has unbiased_gradient now",
            count("OpenRLHF", "kl.k3_unbiased"),
        ),
    ]
    dapo = sum(d["framework"] == "TRL" and d["option"] == "aggregation.token_mean" for d in micro)
    return [
        *rows,
        ("TRL's dapo under gradient accumulation was a mean of micro-batch means; it is the token mean of the step now", dapo),
    ]


ROW = "aggregation.sequence_mean·row"


def _conversions(found: dict[str, Any]) -> dict[tuple[str, str], int]:
    counted: dict[tuple[str, str], int] = defaultdict(int)
    for c in found["cases"]:
        for said in c["converted"]:
            counted[c["framework"], said] += 1
    return counted


def _gradient_only(found: dict[str, Any]) -> dict[str, str]:
    seen: dict[str, set[str]] = defaultdict(set)
    for c in found["cases"]:
        if c["compared"] == "gradient":
            words = [f"{k} = {v}" for k, v in c["theirs"].items() if k in ("loss_mode", "trainer", "kl.unbiased_gradient")]
            seen[c["framework"]].add(", ".join(words))
    return {f: " and ".join(sorted(words)) for f, words in seen.items()}
