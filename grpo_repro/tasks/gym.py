"""reasoning-gym tasks for real language models: extract the number, then score it with reasoning-gym's own scorer.

With the scorer on the raw text a right score is almost never reached (TESTBED.md), so both figures are kept: the verifier's word is
the extracted answer's, and the note `raw_score` is the scorer's on the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from grpo_repro.tasks.base import Encode, Task, split
from grpo_repro.types import Prompt

INSTRUCTION = "Reply with only the answer."
# A sign counts where no operand precedes it: 5-3 ends with 3. Thousands are grouped by three: 3,4 ends with 4.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
)
LONGEST_NUMBER = 32  # characters; a longer run of digits is no answer to these tasks

Count = Annotated[int, Field(ge=1)]


def chain_sum(encode: Encode, *, terms: Count = 2, digits: Count = 1, size: Count = 600, limit: Count = 32) -> Task:
    """Sums and differences of a few short numbers, e.g. `State the final answer to 4 + 3 =`."""
    return _task("chain_sum", encode, size, limit, min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits)


def last_number(text: str) -> str | None:
    """The last number in a text, whole (`Reward: 10` is 10, `1e-1` is 0.1), without thousands separators.

    None where there is none (`nan` is none), or an absurdly long one.
    """
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").replace("−", "-") if found and len(found[-1]) <= LONGEST_NUMBER else None


def _task(name: str, encode: Encode, size: int, limit: int, **params: Any) -> Task:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=size, seed=0, **params)
    entries: dict[str, Any] = {}
    prompts = []
    for entry in dataset:
        text = f"{entry['question']} {INSTRUCTION}"
        entries[text] = entry
        prompts.append(Prompt(id=f"{name}:{text}", text=text, tokens=encode(text), answer=str(entry["answer"]), level=name))
    train, heldout = split(prompts)
    return Task(name, train, heldout, limit, partial(_verify, dataset, entries), _positions)


def _verify(dataset: Any, entries: Mapping[str, Any], prompt: Prompt, text: str) -> tuple[float, Mapping[str, float]]:
    entry = entries[prompt.text]
    answer = last_number(text)
    right = 0.0 if answer is None else float(dataset.score_answer(answer, entry) == 1.0)
    return right, {"raw_score": float(dataset.score_answer(text.strip()[:1000], entry)), "has_number": float(answer is not None)}


def _positions(pieces: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """The tokens of the last number."""
    digit = [any(c.isdigit() for c in piece) for piece in pieces]
    if True not in digit:
        return {"answer": []}
    last = len(digit) - 1 - digit[::-1].index(True)
    first = last
    while first > 0 and digit[first - 1]:
        first -= 1
    return {"answer": list(range(first, last + 1))}
