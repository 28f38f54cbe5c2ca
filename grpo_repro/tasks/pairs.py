"""The tiny testbed's task (TESTBED.md): digit pairs that must satisfy a rule modulo 10.

Prompt `op t1 … tN =`; the response is N pairs `d1 d2`: d1 is free, d2 then follows from it.
    +  easy     d1 + d2 ≡ t          -  medium   d1 − d2 ≡ t          *  hard   3·d1 + d2 ≡ t          (mod 10)
Ten right answers to each sub-target make diversity real, so entropy means something. (It rewards diversity by construction: a
demonstration of mechanisms, not of ability at mathematics.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from grpo_repro.tasks.base import Encode, Task, split
from grpo_repro.types import Prompt

SYMBOLS = "0123456789+-*=."  # then the end and the pad token: 17 in all
LEVELS = {"+": "easy", "-": "medium", "*": "hard"}
DEFAULT_DIGIT = 0  # the demonstrations' most frequent d1
SHOWN_RIGHT = {"+": 0.95, "-": 0.70, "*": 0.35}  # how often a demonstration's d2 is right
STOP_HAZARD = 0.2  # of the demonstrations' free tail


def short(encode: Encode) -> Task:
    """Three pairs and the end token: 7 response tokens, 3,000 prompts."""
    return _task("short", encode, pairs=3, limit=7)


def tail(encode: Encode) -> Task:
    """Two pairs, then free filler `.` and the end token, at most 28 tokens: the policy owns its length. 300 prompts."""
    return _task("tail", encode, pairs=2, limit=28)


def second_digit(op: str, t: int, d1: int) -> int:
    """The d2 that makes a pair right."""
    return {"+": t - d1, "-": d1 - t, "*": t - 3 * d1}[op] % 10


def demonstrations(task: Task, rng: np.random.Generator, rows: int, default_share: float | None) -> list[tuple[Prompt, str]]:
    """Supervised pairs (prompt, response text without its end) from the training prompts.

    d1 is Zipf-like (∝ 1/(1+k)), or the default digit with probability `default_share`; d2 is right as often as SHOWN_RIGHT says.
    """
    zipf = 1 / np.arange(1, 11)
    digits_p = zipf / zipf.sum()
    if default_share is not None:
        rest = digits_p.copy()
        rest[DEFAULT_DIGIT] = 0
        digits_p = rest / rest.sum() * (1 - default_share)
        digits_p[DEFAULT_DIGIT] = default_share
    chosen = [task.train[i] for i in rng.integers(len(task.train), size=rows)]
    n = len(chosen[0].answer)
    d1_RN = rng.choice(10, size=(rows, n), p=digits_p)
    right_RN, slip_RN = rng.random((rows, n)), rng.integers(1, 10, size=(rows, n))
    fill_R = rng.geometric(STOP_HAZARD, size=rows) - 1
    shown = []
    for prompt, d1_N, u_N, slip_N, fill in zip(chosen, d1_RN, right_RN, slip_RN, fill_R, strict=True):
        op = prompt.text[0]
        text = ""
        for t, d1, u, slip in zip(prompt.answer, d1_N, u_N, slip_N, strict=True):
            d2 = second_digit(op, int(t), int(d1))
            text += f"{d1}{d2 if u < SHOWN_RIGHT[op] else (d2 + int(slip)) % 10}"
        room = task.limit - 1 - len(text)
        shown.append((prompt, text + "." * min(int(fill), room)))
    return shown


def _task(name: str, encode: Encode, *, pairs: int, limit: int) -> Task:
    prompts = []
    for op, targets in itertools.product(LEVELS, itertools.product("0123456789", repeat=pairs)):
        text = f"{op}{''.join(targets)}="
        prompts.append(Prompt(id=text, text=text, tokens=encode(text), answer="".join(targets), level=LEVELS[op]))
    train, heldout = split(prompts)
    where = {"answer": tuple(range(2 * pairs)), "choice": tuple(range(0, 2 * pairs, 2))}
    free_tail = limit > 2 * pairs + 1
    verify, steps = partial(_verify, free_tail=free_tail), partial(_steps, free_tail=free_tail)
    return Task(name, train, heldout, limit, verify, partial(_positions, where), steps)


def _verify(prompt: Prompt, text: str, *, free_tail: bool) -> tuple[float, Mapping[str, float]]:
    """Notes: `rare`, the share of d1 that are not the default; `first_pair`, 1 if the first pair is right, whatever follows."""
    scores = _scores(prompt, text)
    n = len(scores)
    digits = len(text) >= 2 * n and _digits(text[: 2 * n])
    choices = text[0 : 2 * n : 2] if digits else ""
    rare = sum(int(d) != DEFAULT_DIGIT for d in choices) / max(len(choices), 1)
    right = all(scores) and _well_ended(text[2 * n :], free_tail)
    return float(right), {"rare": rare, "first_pair": float(scores[0])}


def _steps(prompt: Prompt, pieces: Sequence[str], *, free_tail: bool) -> Sequence[tuple[int, float]]:
    """A pair is a step, at the token of its second digit. What is missing, or should not be there, is a wrong step at the last token:
    without it a response that ends early would score better than one that tries."""
    at = [i for i, piece in enumerate(pieces) for _ in piece]
    text = "".join(pieces)
    while text and pieces[at[-1]] not in (*SYMBOLS,):  # the end token has no text
        text, at = text[: at.index(at[-1])], at[: at.index(at[-1])]
    scores = _scores(prompt, text)
    found: dict[int, float] = {}
    for i, right in enumerate(scores):
        if 2 * i + 1 < len(text):
            found[at[2 * i + 1]] = float(right)
    if pieces and (len(text) < 2 * len(scores) or not _well_ended(text[2 * len(scores) :], free_tail)):
        found[len(pieces) - 1] = 0.0
    return tuple(found.items())


def _scores(prompt: Prompt, text: str) -> list[bool]:
    """Whether each pair is there and right."""
    op, pairs = prompt.text[0], [text[2 * i : 2 * i + 2] for i in range(len(prompt.answer))]
    return [
        len(pair) == 2 and _digits(pair) and int(pair[1]) == second_digit(op, int(t), int(pair[0]))
        for t, pair in zip(prompt.answer, pairs, strict=True)
    ]


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _well_ended(rest: str, free_tail: bool) -> bool:
    return set(rest) <= {"."} if free_tail else not rest


def _positions(where: Mapping[str, Sequence[int]], pieces: Sequence[str]) -> Mapping[str, Sequence[int]]:
    return {name: [i for i in positions if i < len(pieces)] for name, positions in where.items()}
