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
    return Task(name, train, heldout, limit, partial(_verify, free_tail=limit > 2 * pairs + 1), partial(_positions, where))


def _verify(prompt: Prompt, text: str, *, free_tail: bool) -> tuple[float, Mapping[str, float]]:
    n = 2 * len(prompt.answer)
    head, rest = text[:n], text[n:]
    digits = len(head) == n and head.isdigit()
    choices = head[0::2] if digits else ""
    notes = {"rare": sum(int(d) != DEFAULT_DIGIT for d in choices) / max(len(choices), 1)}
    well_formed = digits and (set(rest) <= {"."} if free_tail else not rest)
    if not well_formed:
        return 0.0, notes
    op = prompt.text[0]
    right = all(int(head[2 * i + 1]) == second_digit(op, int(t), int(head[2 * i])) for i, t in enumerate(prompt.answer))
    return float(right), notes


def _positions(where: Mapping[str, Sequence[int]], pieces: Sequence[str]) -> Mapping[str, Sequence[int]]:
    return {name: [i for i in positions if i < len(pieces)] for name, positions in where.items()}
