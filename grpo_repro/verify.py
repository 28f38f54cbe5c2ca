r"""The mathematical verifier: which part of a response is its answer, and whether that equals the gold, in bounded time.

The comparison runs in a worker process, because only a process can be stopped: the time limit of math-verify itself is a signal, which
raises outside the main thread and does not interrupt a long power in C. A worker that overruns is killed and replaced; one that lost
its parent ends with its input, or at a deadline of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from grpo_repro.types import UserError

LONGEST = 400  # characters of an answer; a longer one is wrong
START = 120.0  # seconds a worker may take to import sympy
KEPT = 4096  # verdicts remembered

OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
SAID = re.compile(r"(?:####|answer\s+is|answer\s*:)\s*([^\n]*)", re.IGNORECASE)


def answer_of(text: str) -> str | None:
    r"""The final answer of a response: its last outermost `\boxed{…}`; else its last `$…$`, `\(…\)` or `\[…\]`; else what follows the
    last "####" or "answer is"; else all of it. None where that is empty or longer than 400 characters. Time is linear in the text.

    Nothing is picked from prose: "3 or 4 or 5" is no answer, whichever of them is right.
    """
    if found := boxes(text):
        answer = found[-1]
        while (inner := boxes(answer)) and OPENING.match(answer.strip()) and len(inner) == 1 and answer.strip().endswith("}"):
            answer = inner[0]
            if len(answer) > LONGEST:
                return None
    elif inside := _delimited(text):
        answer = inside
    elif said := SAID.findall(text):
        answer = said[-1]
    else:
        answer = text
    answer = answer[: LONGEST + 2].strip()
    answer = answer[:-1].strip() if answer.endswith(".") else answer
    return answer if 0 < len(answer) <= LONGEST else None


def agrees(gold: str, text: str, seconds: float = 5.0) -> bool | None:
    """Whether the response's answer equals the gold; None where the gold is not a mathematical expression.

    An answer that does not parse whole, or is not shown to be equal within `seconds`, does not agree.
    """
    answer = answer_of(text)
    return _asked(answer_of(gold) or gold, "" if answer is None else answer, seconds)


@lru_cache(maxsize=KEPT)
def _asked(gold: str, answer: str, seconds: float) -> bool | None:
    return _worker.ask(gold, answer, seconds)


class Worker:
    """One process that compares answers, one at a time; threads take turns."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def ask(self, gold: str, answer: str, seconds: float) -> bool | None:
        """True, False (also when it overran), or None for a gold that does not parse."""
        with self.lock:
            process = self.process if self.process is not None and self.process.poll() is None else self._start()
            reply = self._reply(process, json.dumps({"gold": gold, "answer": answer, "seconds": seconds}) + "\n", seconds)
        return False if reply == "" else json.loads(reply)

    def close(self) -> None:
        """Kill the process and wait for it: nothing is left behind."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _start(self) -> subprocess.Popen[str]:
        self.close()
        program = [sys.executable, "-P", str(Path(__file__).with_name("equality.py"))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        if (ready := self._reply(self.process, "", START).strip()) != '"ready"':
            raise UserError(f"the math verifier did not start ({ready or 'no answer'}): install math-verify.")
        return self.process

    def _reply(self, process: subprocess.Popen[str], line: str, seconds: float) -> str:
        """One line; "" when the process had to be killed, or died."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        finally:
            timer.cancel()
            timer.join()  # a timer that has fired kills this process now, not its successor's request
        if not reply.endswith("\n") or process.poll() is not None:
            self.close()
        return reply if reply.endswith("\n") else ""


def boxes(text: str) -> list[str]:
    """Contents of the outermost boxes, in order; a box that never closes is none. One pass over the braces."""
    found: list[str] = []
    at = 0
    while opening := OPENING.search(text, at):
        depth, end = 1, opening.end()
        for brace in BRACE.finditer(text, opening.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                end = brace.start()
                break
        if depth:
            return found
        found.append(text[opening.end() : end])
        at = end + 1
    return found


def _delimited(text: str) -> str:
    """What the last pair of math delimiters holds; "" without one."""
    last, content = -1, ""
    for opening, closing in DELIMITERS:
        end = text.rfind(closing)
        start = text.rfind(opening, 0, max(end, 0))
        if start >= 0 and end > last and (inside := text[start + len(opening) : end].strip()):
            last, content = end, inside
    return content


def _renew() -> None:
    global _worker
    _worker = Worker()  # a forked child must not talk into its parent's pipes


_worker = Worker()
atexit.register(lambda: _worker.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
