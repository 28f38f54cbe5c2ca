"""reasoning-gym's problems, enumerated: they are its problems, no held-out content and no number of the new range is trained on."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
import reasoning_gym

from grpo_repro import config, tasks
from grpo_repro.tasks import gym
from grpo_repro.tasks.base import Task
from grpo_repro.types import Prompt, UserError

MIX = {"name": "mix", "tasks": ["chain_sum", "products", "gcd"]}
GYM: dict[str, dict[str, Any]] = {  # how reasoning-gym is asked for the same problems
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "max_value": 20},
}
TOP = {"chain_sum": 9, "products": 9, "gcd": 20}


def encode(text: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in text)


TASKS: dict[str, Task] = {name: tasks.bound(name)(encode) for name in GYM}
MIXED: Task = tasks.bound(MIX)(encode)


def numbers(prompt: Prompt) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", prompt.text)]


def content(prompt: Prompt) -> tuple[str, str, tuple[int, ...]]:
    """What the problem is, read from its text: a sum is its signed terms, whatever their order; and its kind."""
    kind = next(word for word in ("arithmetic", "multiplication", "Divisor") if word in prompt.text)
    if kind == "arithmetic":
        first, sign, second = re.findall(r"(\d+) ([+-]) (\d+)", prompt.text)[0]
        return kind, "", tuple(sorted([int(first), int(sign + second)]))
    return kind, "", tuple(sorted(numbers(prompt)))


@pytest.mark.parametrize(("name", "count"), [("chain_sum", 200), ("products", 100), ("gcd", 196)])
def test_every_problem_is_reasoning_gym_s_with_its_answer(name: str, count: int) -> None:
    ours = {p.text: p.answer for p in (*TASKS[name].train, *TASKS[name].heldout)}
    assert len(ours) == count
    theirs = {e["question"]: e["answer"] for e in reasoning_gym.create_dataset(name, size=4000, seed=3, **GYM[name])}
    for question, answer in theirs.items():
        found = ours.get(f"{question} {gym.INSTRUCTION}")
        assert found == answer or (found is None and (name, answer) == ("gcd", "1"))  # coprime ones are left out in part
    assert set(ours) <= {f"{question} {gym.INSTRUCTION}" for question in theirs}


def test_the_new_range_is_reasoning_gym_s_too() -> None:
    for name, changed in (("chain_sum", {"min_digits": 2, "max_digits": 2}), ("products", {"min_digits": 2, "max_digits": 2})):
        ours = {p.text: p.answer for p in TASKS[name].new_range}
        theirs = reasoning_gym.create_dataset(
            name, size=30000 if name == "chain_sum" else 20000, seed=3, **{**GYM[name], **changed}
        )
        met = {f"{e['question']} {gym.INSTRUCTION}": e["answer"] for e in theirs}
        assert {text: met[text] for text in ours if text in met}.items() <= ours.items()
        assert sum(text in met for text in ours) > 0.7 * len(ours)


@pytest.mark.parametrize("name", [*GYM, "mix"])
def test_nothing_of_the_exam_is_ever_trained_on(name: str) -> None:
    """By id, and by content read from the text: 4 + 3 is trained on where 3 + 4 is, or neither."""
    task = {**TASKS, "mix": MIXED}[name]
    trained = {content(p) for p in task.train}
    assert not trained & {content(p) for p in task.heldout}
    assert not {p.id for p in task.train} & {p.id for p in (*task.heldout, *task.new_range)}
    assert abs(len(task.heldout) / len((*task.train, *task.heldout)) - 0.4) < 0.02


@pytest.mark.parametrize("name", GYM)
def test_no_number_of_the_new_range_is_ever_trained_on(name: str) -> None:
    seen = {n for p in (*TASKS[name].train, *TASKS[name].heldout) for n in numbers(p)}
    new = {n for p in TASKS[name].new_range for n in numbers(p)}
    assert seen == set(range(name == "gcd", TOP[name] + 1))
    assert min(new) > TOP[name]
    assert len(new) == len(range(TOP[name] + 1, max(new) + 1))
    assert max(new) == (40 if name == "gcd" else 19)


def test_what_a_run_draws_is_from_the_training_side_in_equal_shares() -> None:
    kept = {p.id for p in (*MIXED.heldout, *MIXED.new_range)}
    for seed, step in itertools.product(range(3), range(60)):
        drawn = MIXED.draw(seed, step, 9)
        assert not {p.id for p in drawn} & kept
        assert Counter(p.level for p in drawn) == dict.fromkeys(GYM, 3)
        assert all(max(numbers(p)) <= TOP[p.level] for p in drawn)


def test_the_exam_has_as_many_prompts_of_each_task_and_range() -> None:
    assert Counter(p.level for p in MIXED.exam(120)) == dict.fromkeys(GYM, 40)
    assert Counter(p.level for p in MIXED.new_exam(120)) == dict.fromkeys(GYM, 40)
    assert MIXED.exam(120)[:30] == MIXED.exam(30)
    assert len(MIXED.exam(10**6)) == len(MIXED.heldout)
    assert TASKS["gcd"].new_exam(0) == ()
    assert tasks.bound("short")(encode).new_exam(9) == ()


def test_as_many_answers_are_one_as_in_reasoning_gym() -> None:
    """It draws a coprime pair anew, up to twice. Two numbers up to 20 are coprime in 255 of 400 pairs: (255/400)³ = .259."""
    every = (*TASKS["gcd"].train, *TASKS["gcd"].heldout)
    share = sum(p.answer == "1" for p in every) / len(every)
    theirs = reasoning_gym.create_dataset("gcd", size=4000, seed=0, **GYM["gcd"])
    assert sum(math.gcd(a, b) == 1 for a, b in itertools.product(range(1, 21), repeat=2)) == 255
    assert share == pytest.approx((255 / 400) ** 3, abs=0.003)
    assert share == pytest.approx(sum(e["answer"] == "1" for e in theirs) / 4000, abs=0.03)
    assert len([p for p in every if p.answer != "1"]) == 400 - 255


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ({"name": "chain_sum", "terms": 3}, 600),
        ({"name": "chain_sum", "terms": 3, "size": 5000}, 4000),
        ({"name": "chain_sum", "digits": 9, "terms": 9, "size": 50}, 50),
        ({"name": "products", "terms": 3, "digits": 2, "size": 70}, 70),
    ],
)
def test_a_large_space_is_cut_to_its_size_always_the_same(spec: dict[str, Any], count: int) -> None:
    task, again = tasks.bound(spec)(encode), tasks.bound(spec)(encode)
    assert len((*task.train, *task.heldout)) == len({p.id for p in (*task.train, *task.heldout)}) == count
    assert (task.train, task.heldout, task.new_range) == (again.train, again.heldout, again.new_range)
    assert not {content_of_many(p) for p in task.train} & {content_of_many(p) for p in task.heldout}
    for prompt in (*task.train[:20], *task.new_range[:20]):
        assert task.verify(prompt, result(prompt))[0] == 1.0


def content_of_many(prompt: Prompt) -> tuple[int, ...]:
    return tuple(sorted(int(sign.strip() + digits) for sign, digits in re.findall(r"((?:- )?)(\d+)", prompt.text)))


def result(prompt: Prompt) -> str:
    """By the text alone."""
    if "multiplication" in prompt.text:
        return str(math.prod(numbers(prompt)))
    return str(sum(int(sign.strip() + digits) for sign, digits in re.findall(r"((?:- )?)(\d+)", prompt.text)))


def test_a_mix_asks_each_task_s_own_verifier_and_keeps_the_notes_of_all() -> None:
    sum_ = next(p for p in MIXED.train if p.level == "chain_sum" and p.answer == "7")
    divisor = next(p for p in MIXED.train if p.level == "gcd" and p.answer == "6")
    assert MIXED.verify(sum_, "It is 7.0")[0] == 1.0  # reasoning-gym compares sums as numbers
    assert MIXED.verify(divisor, "6.0")[0] == 0.0  # and divisors as text
    assert MIXED.verify(divisor, "It is 6") == (1.0, {"raw_score": pytest.approx(1 / 7), "has_number": 1.0})
    assert MIXED.limit == 32
    assert MIXED.positions(["7"]) == {"answer": [0]}
    mixed = tasks.bound({"name": "mix", "tasks": ["short", "gcd"], "limit": 9})(encode)
    digits = next(p for p in mixed.train if p.text == "+537=" or p.level == "short")
    assert mixed.verify(digits, "")[1] == {}  # none that both make
    assert mixed.steps(digits, ["$"]) == ((0, 0.0),)
    assert (mixed.positions(["7"]), mixed.limit, {p.level for p in mixed.train}) == ({}, 9, {"short", "gcd"})


def test_the_same_task_twice_has_two_names() -> None:
    mixed = tasks.bound({"name": "mix", "tasks": ["gcd", {"name": "gcd", "numbers": 3}]})(encode)
    assert {p.level for p in mixed.draw(0, 0, 4)} == {"gcd", "gcd_2"}


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (["gcd", "chian_sum"], r"task\.mix\.tasks: there is no variant 'chian_sum' \(did you mean 'chain_sum'\?\)"),
        (["mix"], r"task\.mix\.tasks: there is no variant 'mix'"),
        ([{"name": "gcd", "terms": 2}], r"task\.mix\.tasks\.gcd: unknown parameter 'terms'"),
        ([], r"task\.mix\.tasks: list should have at least 1 item"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_when_it_is_read(members: list[Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        config.parse_run({"name": "x", "task": {"name": "mix", "tasks": members}}, "x.yaml")


def test_a_mix_that_trains_on_another_s_exam_is_refused() -> None:
    """Sums of two digits hold the new range of sums of one."""
    wide = {"name": "chain_sum", "digits": 2, "size": 20000}
    with pytest.raises(UserError, match=r"task\.mix: chain_sum_2 trains on what chain_sum keeps for the exam \(e\.g\. "):
        tasks.bound({"name": "mix", "tasks": ["chain_sum", wide]})(encode)


def test_a_default_that_is_spelled_out_makes_no_other_run() -> None:
    def key(members: list[Any]) -> str:
        return config.parse_run({"name": "x", "task": {"name": "mix", "tasks": members}}, "x").key()

    assert key(["gcd", "products"]) == key([{"name": "gcd", "largest": 20}, {"name": "products", "digits": 1}])
    assert key(["gcd", "products"]) != key(["products", "gcd"])
    assert key(["gcd", "products"]) != key([{"name": "gcd", "largest": 30}, "products"])
