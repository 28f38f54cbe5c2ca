"""The models as folders that every side loads: `python -m benchmarks.models` makes them (SmolLM2 from its package's weights)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.settings import SYMBOLS, WORKLOADS
from grpo_repro import paths, smollm2
from grpo_repro import policy as policies
from grpo_repro.policy import Policy
from grpo_repro.types import UserError


def folder(name: str) -> Path:
    """Raises UserError where it has not been made."""
    made = paths.cache() / "benchmark" / name
    where = made.resolve() if made.exists() else made
    if not (where / "config.json").is_file():
        raise UserError(
            f"the benchmark's model {name} is not at {made}: run `python -m benchmarks.models` in the main environment."
        )
    return where


def scratch(vocabulary: int, d: int = 64, layers: int = 2, context: int = 64) -> Policy:
    """A Llama from scratch; `vocabulary` counts the end and pad tokens."""
    symbols = SYMBOLS + "".join(chr(0x4E00 + i) for i in range(vocabulary - len(SYMBOLS) - 2))
    return policies.tiny(symbols, d=d, layers=layers, ffn=3 * d, context=context)


def make(name: str) -> Path:
    target = paths.cache() / "benchmark" / name
    if (target / "config.json").is_file():
        return target
    if name == "smollm2":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(smollm2.converted(paths.cache()))
    else:
        policies.save(scratch(17) if name == "tiny" else scratch(1024, d=128, layers=4), target)
    return target


def main() -> None:
    for name in WORKLOADS:
        print(f"{name}: {paths.shown(make(name))}")


if __name__ == "__main__":
    main()
