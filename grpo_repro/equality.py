r"""Are two mathematical answers equal? Run as a process of its own by verify.py; imports nothing of the package.

math-verify compares, and a strict layer around it refuses what it lets pass: an answer must parse *whole* (its extraction silently
drops what it does not understand: `4\sqrt(2)` becomes 4), and values must agree relatively (it compares with an absolute
tolerance: 1/2^99 = 1/2^98), at a point where symbols are free. What remains: two equations are compared by math-verify alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30  # bytes of address space; where the system can limit it
ROUNDED, EXACT = 1e-5, 1e-30  # largest relative difference: with a decimal on a side, and without

SPACES = re.compile(r"\\(?:quad|qquad|,|;|:|!| )|~")
REWRITES = (
    (re.compile(r"\{,\}|(?<=\d)\\[,!](?=\d{3})"), ","),  # thousands
    (SPACES, " "),
    (re.compile(r"\\(?:left|right|displaystyle|mathrm(?=\s*\d))(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*([0-9a-z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\{[^{}]*\})\s*([0-9a-z])"), r"\1{\2}"),
    (re.compile(r"\\(?:mathrm|text|operatorname)\{\s*(e|i|\\pi)\s*\}"), r" \1 "),
    (re.compile(r"\\?\bsqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile("[−–]"), "-"),
)
JUXTAPOSED = re.compile(r"\d\s+\d")  # "1 2" would be read as the mixed number 3


@lru_cache(maxsize=1024)
def parsed(text: str) -> Any:
    """The whole text as a sympy object; None where it is not one expression."""
    from latex2sympy2_extended import latex2sympy

    text = text.strip()
    for pattern, by in REWRITES:
        text = pattern.sub(by, text)
    if not text.strip() or JUXTAPOSED.search(text):
        return None
    try:
        return latex2sympy(text.strip(), normalization_config=None)
    except Exception:  # the parser raises Exception itself
        return None


def equal(gold: Any, answer: Any) -> bool:
    """math-verify's word, and then the strict layer's."""
    from math_verify import verify

    gold, answer = _unwrapped(gold, answer)
    if answer is None or not verify([gold], [answer], timeout_seconds=None):
        return False
    return _close(gold, answer)


def _unwrapped(gold: Any, answer: Any) -> tuple[Any, Any]:
    """`x = 5` is 5 where the other side is no relation; `2 + 2 = 4` is 4; `3 = 4` and `2x = 4` are nothing."""
    from sympy.core.relational import Relational

    if isinstance(gold, Relational) == isinstance(answer, Relational):
        return gold, answer
    return _value(gold), _value(answer)


def _value(x: Any) -> Any:
    from sympy import Eq

    if not isinstance(x, Eq):
        return x
    return x.rhs if x.lhs.is_Symbol or (not x.free_symbols and _close(x.lhs, x.rhs)) else None


def _close(a: Any, b: Any) -> bool:
    """Relative agreement of values, of sets and matrices element by element. True for what has no values (relations)."""
    from sympy import Expr, FiniteSet, Float, Interval, MatrixBase, Tuple

    if isinstance(a, FiniteSet) and isinstance(b, FiniteSet):
        return len(a) == len(b) and all(any(_close(x, y) for y in b) for x in a)
    for kind, items in ((Tuple, tuple), (Interval, lambda x: (x.start, x.end)), (MatrixBase, lambda x: tuple(x))):
        if isinstance(a, kind) and isinstance(b, kind):
            return len(items(a)) == len(items(b)) and all(map(_close, items(a), items(b)))
    if not (isinstance(a, Expr) and isinstance(b, Expr)) or a == b:
        return True
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: _point(i) for i, symbol in enumerate(names)}
    a_value, b_value = (x.doit().subs(point).evalf(50) for x in (a, b))
    limit = ROUNDED if a.has(Float) or b.has(Float) else EXACT
    difference, size = abs(a_value - b_value), abs(a_value)
    if not (difference.is_number and size.is_number and difference.is_finite):
        return False
    if a.is_zero or b.is_zero:  # what evalf finds of a hidden zero is its round-off, about 1e-100
        return bool(difference < 1e-90) and not (a.is_zero is False or b.is_zero is False)
    return bool(difference <= limit * size)


def _point(i: int) -> Any:
    from sympy import Rational

    return Rational(2 * i + 7, 2 * i + 11)


def _deadline(seconds: float) -> None:
    """The system ends this process if it is still busy well after its parent should have: the parent may be gone."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 5 if seconds else 0)


def main() -> None:
    """A JSON line in, {"gold": …, "answer": …, "seconds": …}, a JSON line out: true, false, or null where the gold does not parse."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not reach the answers
    try:
        parsed("1")
        equal(parsed("1"), parsed("1"))
    except ImportError as error:
        print(json.dumps(f"{error}"), file=out, flush=True)
        return
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        _deadline(asked["seconds"])
        try:
            gold = parsed(asked["gold"])
            answer = None if gold is None else parsed(asked["answer"])
            verdict = None if gold is None else answer is not None and equal(gold, answer)
        except Exception:  # sympy raises anything on hostile input (RecursionError, MemoryError): it is not shown to be equal
            verdict = False
        _deadline(0)
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    main()
