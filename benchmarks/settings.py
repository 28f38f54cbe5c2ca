"""What is measured: models, sizes and cases. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SYMBOLS = "0123456789+-*=."  # of the tiny tasks; larger vocabularies go on with Chinese characters, one token each


@dataclass(frozen=True)
class Workload:
    """One rollout: prompts × group responses of exactly `tokens` tokens (no end token, so both sides do equal work)."""

    prompts: int
    group: int
    tokens: int
    title: str

    @property
    def rows(self) -> int:
        return self.prompts * self.group


WORKLOADS = {
    "tiny": Workload(24, 16, 28, "tiny testbed, 108k parameters, V=17"),
    "tiny_1m": Workload(16, 8, 32, "1M-parameter Llama, V=1,024"),
    "smollm2": Workload(2, 8, 64, "SmolLM2-135M, V=49,152"),
}
SIDES = {  # who runs, and in what arithmetic
    "fp32": ("ours fp32", "TRL fp32"),
    "bf16": ("ours bf16", "TRL bf16 autocast", "TRL bf16 weights"),
}


@dataclass(frozen=True)
class Pair:
    """One end-to-end case: the sides of a precision take a step each, in turn, `repeats` times."""

    model: str
    precision: str
    updates: int  # μ
    threads: int
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.precision}-mu{self.updates}-t{self.threads}"

    @property
    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "workload": asdict(WORKLOADS[self.model]), "sides": SIDES[self.precision]}


def pairs(quick: bool) -> list[Pair]:
    """Every end-to-end case. A SmolLM2 step of TRL takes half a minute: few repeats, one where μ=2, which is not run in fp32."""
    if quick:
        return [Pair(model, precision, 1, 1, 1) for model in WORKLOADS for precision in SIDES]
    tiny = [Pair(m, p, u, t, 5) for m in ("tiny", "tiny_1m") for u in (1, 2) for t in (1, 2) for p in SIDES]
    once = [Pair("smollm2", p, 1, t, {1: 3, 2: 2}[t]) for t in (1, 2) for p in SIDES]
    return [*tiny, *once, *(Pair("smollm2", "bf16", 2, t, 1) for t in (1, 2))]


def prompts(model: str, n: int) -> list[str]:
    """n different prompts: the same words on every side."""
    if model != "smollm2":
        return [f"{(7919 * i + 1234567) % 10**9:09d}+-=" for i in range(n)]
    names = ("Alice", "Bob", "Carla", "David")
    return [
        f"{names[i % 4]} has {3 + i} boxes with {5 + 2 * i} apples each and gives {2 + i} apples away. How many apples are left? "
        f"Reply with only the number. The number is"
        for i in range(n)
    ]


def reward(text: str) -> float:
    """A rule that is cheap, depends on the whole response, and is hardly ever equal within a group: both sides use it."""
    return sum(map(ord, text)) % 97 / 97
