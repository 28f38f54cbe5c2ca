r"""Word problems and competition mathematics: GSM8K and MATH, from the hub or from a local copy, judged by math-verify.

Held out is the data set's own test part; without one, a fifth of the problems, by content. A problem that is in both is not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from grpo_repro import verify
from grpo_repro.tasks import tables
from grpo_repro.tasks.base import Encode, Task, no_positions, split
from grpo_repro.types import Prompt, UserError

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s$.]+)")  # MATH has a few boxes without braces
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")

Count = Annotated[int, Field(ge=1)]
Row = Mapping[str, Any]


def gsm8k(encode: Encode, *, path: str = "openai/gsm8k", limit: Count = 400) -> Task:
    """Grade-school word problems (Cobbe et al., 2110.14168): columns question and answer; the gold is what follows `####`."""
    rows = tables.read(path, "main" if path == "openai/gsm8k" else None, ("question", "answer"))
    return _task("gsm8k", encode, rows, limit, "question", _after_hashes, lambda row: "gsm8k")


def math(encode: Encode, *, path: str = "DigitalLearningGmbH/MATH-lighteval", limit: Count = 1024) -> Task:
    r"""Competition problems (Hendrycks et al., 2103.03874): columns problem, solution with the gold in \boxed{…}, and level.

    A level is a bucket of difficulty, level_1 to level_5.
    """
    rows = tables.read(path, None, ("problem", "solution", "level"))
    return _task("math", encode, rows, limit, "problem", _boxed, _level)


def _task(
    name: str,
    encode: Encode,
    parts: Mapping[str, tables.Rows],
    limit: int,
    question: str,
    gold: Callable[[Row], str | None],
    level: Callable[[Row], str],
) -> Task:
    def prompt(where: str, row: Row) -> Prompt:
        asked, answer = row[question], gold(row)
        if not isinstance(asked, str) or not asked.strip():
            raise UserError(f"{where}: its {question} is {asked!r}, not a text: correct or remove the row.")
        if not answer:
            raise UserError(f"{where}: holds no answer where {name} has it ({gold.__doc__}): correct or remove the row.")
        text = f"{asked.strip()}\n{INSTRUCTION}"
        return Prompt(f"{name}:{asked.strip()}", text, encode(text), answer, level(row))

    prompts = {part: [prompt(where, row) for where, row in rows] for part, rows in parts.items()}
    train, heldout = split(prompts["train"])
    if "test" in prompts:
        heldout = tuple({p.id: p for p in prompts["test"]}.values())
        kept = {p.id for p in heldout}
        train = tuple({p.id: p for p in prompts["train"] if p.id not in kept}.values())
    if not train or not heldout:
        side = "train on" if not train else "hold out"
        raise UserError(
            f"task {name}: {len(train) + len(heldout)} different problems leave nothing to {side}: give more of them."
        )
    return Task(name, train, heldout, limit, _verify, no_positions)


def _after_hashes(row: Row) -> str | None:
    """behind #### in the column answer"""
    _, hashes, after = str(row["answer"]).rpartition("####")
    return after.strip().replace(",", "") if hashes else None


def _boxed(row: Row) -> str | None:
    r"""in \boxed{…} in the column solution"""
    solution = str(row["solution"])
    if boxes := verify.boxes(solution):
        return boxes[-1].strip()
    bare = BARE_BOX.findall(solution)
    return str(bare[-1]) if bare else None


def _level(row: Row) -> str:
    digits = re.search(r"[0-9]+", str(row["level"]))
    return f"level_{digits.group()}" if digits else "level_unknown"


def _verify(prompt: Prompt, text: str) -> tuple[float, Mapping[str, float]]:
    """A gold that is words (a name, `east`, `(C)`), not a mathematical expression, is also compared as text.

    Note: whether the response has a box.
    """
    agreed = verify.agrees(prompt.answer, text)
    if not agreed and (agreed is None or WORDS.fullmatch(prompt.answer)):
        agreed = _plain(verify.answer_of(text) or "") == _plain(prompt.answer)
    return float(agreed), {"boxed": float(bool(verify.boxes(text)))}


def _plain(answer: str) -> str:
    return "".join(WORDS.sub(r"\1", answer).split()).strip("()").casefold()
