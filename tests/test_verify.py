r"""The mathematical verifier: equal means equal (CASES R03), in threads (R01), in bounded time (R02), and the whole answer counts (R15)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_repro import verify
from grpo_repro.types import UserError
from grpo_repro.verify import Worker, agrees, answer_of


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        # R03, which math-verify 0.9.0 itself accepts
        ("4", r"4\sqrt(2)"),
        ("1/2004!", "1/2006!"),
        ("1/2^99", "1/2^98"),
        (r"1-1/\mathrm{e}", r"1+1/\mathrm{e}"),
        ("3*x-1*y+13=0", "3x + 4y + 14=0"),
        # and their kind: absolute tolerance, in sets and with symbols too
        ("0", "0.0000001"),
        ("0.0000001", "0"),
        ("x/2^{99}", "x/2^{98}"),
        (r"\{1/2^{99}\}", r"\{1/2^{98}\}"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"),
        ("10^{20}", "10^{20}+1"),
        # and partial parses
        ("3", "$1 2$"),
        ("12", r"5 \quad 7"),
        ("7", r"5\foo 7"),
        ("5", "4 = 5"),
        ("5", "2x = 5"),
        ("5", r"5\%"),
        ("5", "5x"),
        # R15: nothing, and several answers
        ("A", ""),
        ("A", "A or B or C"),
        ("3", "3 or 4 or 5"),
        ("5", "3 or 4 or 5"),
        ("3", r"\boxed{3, 4, 5}"),
        ("5", r"\boxed{}"),
    ],
)
def test_wrong_answers_are_wrong(gold: str, answer: str) -> None:
    assert agrees(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/2004!", "1/2004!"),
        ("1/2^99", "2^{-99}"),
        (r"1-1/\mathrm{e}", r"1-\frac1e"),
        ("3*x-1*y+13=0", "3x-y+13=0"),
        (r"4\sqrt{2}", r"4\sqrt(2)"),
        (r"4\sqrt{2}", r"\sqrt{32}"),
        ("1/3", "0.333333"),
        (r"\pi", "3.141593"),
        ("0.5", r"\dfrac{1}{2}"),
        ("0", r"\sqrt{2}\sqrt{2}-2"),
        ("0", r"\sin(\pi)"),
        (r"$4$", "4"),
        ("1,234", r"$1{,}234$"),
        ("5", "x = 5"),
        ("x = 5", "5"),
        ("5", "2+3=5"),
        (r"5\%", "0.05"),
        ("-4", "−4"),
        ("8", "2**3"),
        (r"1\frac12", "3/2"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sin^2(x)+\cos^2(x)", "1"),
        ("[1,2)", "[1,2)"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ],
)
def test_right_answers_are_right(gold: str, answer: str) -> None:
    assert agrees(gold, answer) is True


@pytest.mark.parametrize("gold", ["", "  ", r"\frac{", "see the figure!?"])
def test_a_gold_that_does_not_parse_is_neither_right_nor_wrong(gold: str) -> None:
    """R06: None, whatever the answer, the empty one and the gold itself included."""
    assert [agrees(gold, text) for text in ("4", "", gold)] == [None, None, None]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("7.", "7"),
        (r"so \boxed{3}, no: \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x + \boxed{5}}", r"x + \boxed{5}"),
        (r"\boxed{5", r"\boxed{5"),
        ("it costs $5$ or $6$", "6"),
        ("$$x$$", "x"),
        (r"\(a\) and \[b\]", "b"),
        ("The answer is 5.", "5"),
        ("1+1\n#### 2\n", "2"),
        ("", None),
        (" . ", None),
        ("1" * 401, None),
    ],
)
def test_which_part_of_a_response_is_its_answer(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@given(st.text(alphabet=r"\boxed{}$()[]5 .#", max_size=200))
def test_any_text_has_one_answer_or_none(text: str) -> None:
    answer = answer_of(text)
    assert answer is None or 0 < len(answer) <= verify.LONGEST


@pytest.mark.parametrize(
    "text",
    ["9" * 1_000_000, r"\boxed{" * 100_000 + "5" + "}" * 100_000, r"\boxed{5}" * 100_000, r"\(" * 500_000, "$" * 1_000_001],
    ids=["digits", "nested", "many", "open", "dollars"],
)
def test_a_megabyte_never_reaches_the_worker(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(verify, "_asked", lambda gold, answer, seconds: seen.append(answer) or False)
    assert agrees("7", text) is False
    assert len(seen[0]) <= verify.LONGEST


def test_in_a_thread_it_says_the_same() -> None:
    """R01: math-verify's own limit is a signal, which threads cannot have; here four threads share one worker."""
    found: dict[int, bool | None] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: agrees(f"{i}", f"{i + i % 2}")})) for i in range(100, 108)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: i % 2 == 0 for i in range(100, 108)}


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "9**9**9", "((((9!)!)!)!)"])
def test_an_answer_that_hangs_is_stopped_and_leaves_nothing_behind(answer: str) -> None:
    """R02: False within the limit, its process gone, and the next question answered by another."""
    worker = Worker()
    try:
        assert worker.ask("7", "7", 30.0) is True
        first = worker.process
        assert first is not None
        assert worker.ask("7", answer, 0.3) is False
        if first.poll() is None:  # it was quick to say no: then it may go on
            assert worker.process is first
        assert worker.ask("7", "7", 30.0) is True
        assert worker.process is not None
    finally:
        worker.close()
    assert first.poll() is not None
    assert worker.process is None
    if answer.startswith("9^") and hasattr(signal, "SIGKILL"):
        assert first.returncode == -signal.SIGKILL  # by its parent at the limit, not by its own later deadline


def test_a_worker_that_was_killed_is_replaced() -> None:
    worker = Worker()
    try:
        assert worker.ask("1/2", "0.5", 30.0) is True
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()
        assert worker.ask("1/2", "0.5", 30.0) is True
    finally:
        worker.close()


def test_a_worker_ends_with_its_input_and_has_a_deadline_of_its_own() -> None:
    """What happens to it when its parent is killed: idle, it reads the end of its input; busy, the system's alarm ends it."""
    program = [sys.executable, "-P", str(Path(verify.__file__).with_name("equality.py"))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as idle:
        assert idle.stdout is not None
        assert idle.stdout.readline() == '"ready"\n'
        assert idle.communicate()[0] == ""
    assert idle.returncode == 0
    if hasattr(signal, "setitimer"):
        hang = json.dumps({"gold": "7", "answer": "9^{9^{9^{9}}}", "seconds": -2.0}) + "\n"  # 2 · −2 + 5: one second
        busy = subprocess.run(program, input=hang, capture_output=True, text=True, check=False)
        assert busy.returncode == -signal.SIGALRM


@pytest.mark.skipif(not Path("/bin/false").exists(), reason="needs a program that answers nothing")
def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"did not start .* install math-verify"):
        Worker().ask("1", "1", 1.0)
