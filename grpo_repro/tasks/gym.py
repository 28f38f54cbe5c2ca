"""reasoning-gym tasks for real language models: extract the number, then score it with reasoning-gym's own scorer.

With the scorer on the raw text a right score is almost never reached (TESTBED.md), so both figures are kept: the verifier's word is
the extracted answer's, and the note `raw_score` is the scorer's on the whole text.

Question and scorer are reasoning-gym's; the problems are enumerated here, not drawn, so that it is known what was never trained on:
the held-out problems (3 + 4 and 4 + 3 are one problem, on one side), and the whole range of numbers above that of the training.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from grpo_repro.tasks.base import Encode, Task, place
from grpo_repro.types import Prompt

INSTRUCTION = "Reply with only the answer."
# A sign counts where no operand precedes it: 5-3 ends with 3. Thousands are grouped by three: 3,4 ends with 4.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
)
LONGEST_NUMBER = 32  # characters; a longer run of digits is no answer to these tasks

HELDOUT = 0.4  # share of the prompts: there are few, and an interval over prompts needs many
ABOVE = 10  # numbers in the new range of sums and products: the next ones above those of the training

Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]


class Problem(NamedTuple):
    written: str  # as it stands in reasoning-gym's question
    answer: str
    content: str  # equal for problems that differ in the order of their numbers alone


def chain_sum(encode: Encode, *, terms: Several = 2, digits: Count = 1, size: Count = 600, limit: Count = 32) -> Task:
    """Sums and differences of a few short numbers, e.g. `State the final answer to 4 + 3 =`: 200 problems of two one-digit terms.

    The new range is that of the ten numbers above: 10 to 19. Of each range `size` problems, where there are more.
    """

    def made(low: int, high: int) -> Iterator[Problem]:
        n = high - low + 1
        for first, *rest in _indices(size, [n, *[2 * n] * (terms - 1)]):
            numbers = [low + first, *((low + i % n) * (1 if i < n else -1) for i in rest)]
            signs = ["+" if i < n else "-" for i in rest]
            written = " ".join([str(numbers[0]), *(f"{s} {abs(x)}" for s, x in zip(signs, numbers[1:], strict=True))])
            yield Problem(written, str(sum(numbers)), " ".join(map(str, sorted(numbers))))

    low, high = _of_digits(digits)
    known, new = made(low, high), made(high + 1, high + ABOVE)
    return _task("chain_sum", encode, known, new, limit, min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits)


def products(encode: Encode, *, terms: Several = 2, digits: Count = 1, size: Count = 600, limit: Count = 32) -> Task:
    """Products of a few short numbers: 100 problems of two one-digit factors. `size` and the new range are as in chain_sum."""
    low, high = _of_digits(digits)
    known, new = (_unordered(lo, hi, terms, size, " * ", math.prod) for lo, hi in ((low, high), (high + 1, high + ABOVE)))
    return _task("products", encode, known, new, limit, min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits)


def gcd(encode: Encode, *, numbers: Several = 2, largest: Several = 20, size: Count = 600, limit: Count = 32) -> Task:
    """The greatest common divisor of a few numbers up to `largest`; the new range is as long, 21 to 40. `size` as in chain_sum.

    reasoning-gym draws numbers anew, up to twice, while they are coprime; here so many coprime problems are left out that their share is
    the one it has there (otherwise most answers would be 1): of the 400 pairs up to 20, 196 stay.
    """
    ranges = (1, largest), (largest + 1, 2 * largest)
    known, new = (_as_often(_unordered(low, high, numbers, size, ", ", lambda x: math.gcd(*x))) for low, high in ranges)
    return _task("gcd", encode, known, new, limit, min_numbers=numbers, max_numbers=numbers, max_value=largest)


def last_number(text: str) -> str | None:
    """The last number in a text, whole (`Reward: 10` is 10, `1e-1` is 0.1), without thousands separators.

    None where there is none (`nan` is none), or an absurdly long one.
    """
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").replace("−", "-") if found and len(found[-1]) <= LONGEST_NUMBER else None


def _task(name: str, encode: Encode, known: Iterable[Problem], new: Iterable[Problem], limit: int, **params: Any) -> Task:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=1, seed=0, **params)
    shown = dataset[0]
    written = shown["metadata"].get("expression") or ", ".join(map(str, shown["metadata"]["numbers"]))
    before, _, after = shown["question"].partition(written)

    def prompts(problems: Iterable[Problem]) -> Iterator[tuple[Prompt, str]]:
        for problem in problems:
            text = f"{before}{problem.written}{after} {INSTRUCTION}"
            yield Prompt(f"{name}:{text}", text, encode(text), problem.answer, level=name), problem.content

    train, heldout = _halves(list(prompts(known)))
    return Task(name, train, heldout, limit, partial(_verify, dataset), positions, new_range=tuple(p for p, _ in prompts(new)))


def _halves(prompts: Sequence[tuple[Prompt, str]]) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Train and held-out: whole contents, in the order of their hashes, until the held-out side has its share of the prompts."""
    heldout: set[str] = set()
    count = Counter(content for _, content in prompts)
    for content in sorted(count, key=place):
        if sum(count[c] for c in heldout) < HELDOUT * len(prompts):
            heldout.add(content)
    return tuple(p for p, c in prompts if c not in heldout), tuple(p for p, c in prompts if c in heldout)


def _of_digits(digits: int) -> tuple[int, int]:
    """The smallest and the largest number of so many digits, as reasoning-gym has them: 0 is one."""
    return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1


def _unordered(
    low: int, high: int, terms: int, size: int, between: str, result: Callable[[Sequence[int]], int]
) -> Iterator[Problem]:
    """Problems whose result does not depend on the order of the numbers."""
    for index in _indices(size, [high - low + 1] * terms):
        numbers = [low + i for i in index]
        yield Problem(between.join(map(str, numbers)), str(result(numbers)), " ".join(map(str, sorted(numbers))))


def _indices(size: int, lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index into a table of these lengths; `size` of them, always the same ones, where there are more."""
    total = math.prod(lengths)
    chosen = set(range(total)) if total <= size else set()
    rng = random.Random(0)
    while len(chosen) < min(size, total):
        chosen.add(rng.randrange(total))
    for number in sorted(chosen):
        index = []
        for length in reversed(lengths):
            number, i = divmod(number, length)
            index.append(i)
        yield tuple(reversed(index))


def _as_often(problems: Iterable[Problem]) -> Iterator[Problem]:
    """With as many coprime problems as three draws leave: p³ of all, where p is their share in one draw."""
    every = list(problems)
    coprime = sorted((q for q in every if q.answer == "1"), key=lambda q: place(q.written))
    others = len(every) - len(coprime)
    p = (len(coprime) / len(every)) ** 3
    kept = {q.written for q in coprime[: round(others * p / (1 - p)) if others else None]}
    return (q for q in every if q.answer != "1" or q.written in kept)


def _verify(dataset: Any, prompt: Prompt, text: str) -> tuple[float, Mapping[str, float]]:
    entry = {"answer": prompt.answer}  # what the scorers read
    answer = last_number(text)
    right = 0.0 if answer is None else float(dataset.score_answer(answer, entry) == 1.0)
    return right, {"raw_score": float(dataset.score_answer(text.strip()[:1000], entry)), "has_number": float(answer is not None)}


def positions(pieces: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """The tokens of the last number."""
    digit = [any(c.isdigit() for c in piece) for piece in pieces]
    if True not in digit:
        return {"answer": []}
    last = len(digit) - 1 - digit[::-1].index(True)
    first = last
    while first > 0 and digit[first - 1]:
        first -= 1
    return {"answer": list(range(first, last + 1))}
