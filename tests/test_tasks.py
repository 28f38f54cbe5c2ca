"""Tasks: what is right, what is wrong, and that no problem is on both sides of the split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reasoning_gym
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_repro import tasks
from grpo_repro.knobs import advantage
from grpo_repro.tasks import gym, pairs
from grpo_repro.tasks.base import Task
from grpo_repro.types import Minibatch, Prompt, UserError


def encode(text: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in text)


@pytest.fixture(scope="module")
def short() -> Task:
    return tasks.bound("short")(encode)


@pytest.fixture(scope="module")
def tail() -> Task:
    return tasks.bound("tail")(encode)


TASKS = {name: tasks.bound(name)(encode) for name in ("short", "tail")}


def prompt_of(task: Task, text: str) -> Prompt:
    return next(p for p in (*task.train, *task.heldout) if p.text == text)


RULE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: 3 * a + b}


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("+537=", "505843"),  # 5+0, 5+8, 4+3: right
        ("+537=", "505844"),  # 4+4 ≡ 8 where 7 is due
        ("-537=", "948541"),  # 9−4, 8−5, 4−1 ≡ 3 where 7 is due
        ("-537=", "949681"),  # 9−4, 9−6, 8−1: right
        ("*537=", "121017"),
        ("*537=", "050321"),  # 0+5, 0+3, 6+1: right
    ],
)
def test_a_response_is_right_when_every_pair_is(short: Task, prompt: str, answer: str) -> None:
    pairs_ = zip(answer[::2], answer[1::2], prompt[1:4], strict=True)
    by_hand = all(RULE[prompt[0]](int(a), int(b)) % 10 == int(t) for a, b, t in pairs_)
    assert short.verify(prompt_of(short, prompt), answer)[0] == float(by_hand)


def test_each_sub_target_has_exactly_ten_right_pairs(tail: Task) -> None:
    for op in "+-*":
        prompt = prompt_of(tail, f"{op}40=")
        accepted = [a + b for a, b in itertools.product("0123456789", repeat=2) if tail.verify(prompt, f"{a}{b}" + "00")[0]]
        # second pair 00 is right for t=0 under every rule: 0+0, 0−0, 3·0+0
        assert len(accepted) == 10
        assert len({pair[0] for pair in accepted}) == 10  # d1 is free


@pytest.mark.parametrize("text", ["", "5", "50584", "5058433", "50584x", "505843.", "......"])
def test_a_short_response_must_be_exactly_its_digits(short: Task, text: str) -> None:
    assert short.verify(prompt_of(short, "+537="), text)[0] == 0.0


@pytest.mark.parametrize(("filler", "right"), [("", 1.0), ("...", 1.0), (".0.", 0.0), ("+", 0.0)])
def test_the_tail_may_hold_filler_only(tail: Task, filler: str, right: float) -> None:
    assert tail.verify(prompt_of(tail, "+40="), "4000" + filler)[0] == right


def test_rare_is_the_share_of_digits_that_are_not_the_default(short: Task) -> None:
    assert short.verify(prompt_of(short, "+537="), "055207")[1]["rare"] == pytest.approx(1 / 3)
    assert short.verify(prompt_of(short, "+537="), "not digits")[1]["rare"] == 0.0


@pytest.mark.parametrize("name", ["short", "tail"])
def test_the_split_is_by_content_and_covers_everything(name: str) -> None:
    task = tasks.bound(name)(encode)
    train, heldout = {p.id for p in task.train}, {p.id for p in task.heldout}
    assert not train & heldout
    assert len(train | heldout) == {"short": 3000, "tail": 300}[name]
    assert 0.1 < len(heldout) / len(train | heldout) < 0.3
    again = tasks.bound(name)(encode)
    assert [p.id for p in again.heldout] == [p.id for p in task.heldout]


def test_a_draw_depends_on_seed_and_step_alone_and_takes_the_levels_in_turn(short: Task) -> None:
    drawn = short.draw(3, 7, 24)
    assert drawn == short.draw(3, 7, 24)
    assert drawn != short.draw(3, 8, 24)
    assert drawn != short.draw(4, 7, 24)
    assert len({p.id for p in drawn}) == 24
    assert sorted(p.level for p in drawn) == ["easy"] * 8 + ["hard"] * 8 + ["medium"] * 8
    assert {p.id for p in drawn} <= {p.id for p in short.train}


def test_asking_for_more_prompts_than_there_are_says_so(tail: Task) -> None:
    with pytest.raises(UserError, match=r"has \d+ training prompts; rollout.prompts asks for 9999"):
        tail.draw(0, 0, 9999)


def test_demonstrations_are_right_as_often_as_promised_and_never_from_the_held_out_side(tail: Task) -> None:
    shown = pairs.demonstrations(tail, np.random.default_rng(0), 20_000, None)
    heldout = {p.id for p in tail.heldout}
    assert not any(p.id in heldout for p, _ in shown)
    for op, share in pairs.SHOWN_RIGHT.items():
        firsts = [text[1] == str(pairs.second_digit(op, int(p.answer[0]), int(text[0]))) for p, text in shown if p.text[0] == op]
        assert np.mean(firsts) == pytest.approx(share, abs=0.02)
    zero = np.mean([text[0] == "0" for _, text in shown])
    assert zero == pytest.approx(1 / sum(1 / k for k in range(1, 11)), abs=0.015)  # Zipf: 1/H₁₀
    assert max(len(text) for _, text in shown) <= tail.limit - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("The answer is -4.", "-4"),
        ("3 + 4 = 7", "7"),
        ("1,000", "1000"),
        ("2.50", "2.50"),
        ("no number", None),
        ("", None),
        ("9" * 5000, None),
        # R11: the whole number, not a prefix of it
        ("Reward: 10", "10"),
        ("Reward: 1e-1", "1e-1"),
        ("Reward: -0.5", "-0.5"),
        ("Reward: nan", None),
        ("Reward: inf", None),
        ("2.5E+3", "2.5E+3"),
        (".5", ".5"),
        ("x = −4", "-4"),
        ("10 eggs", "10"),
        ("5-3", "3"),  # a difference, not −3
        ("(-3)", "-3"),
        ("3,4", "4"),  # a list, not 34
        ("1,234,567.5", "1234567.5"),
        ("12,34", "34"),
        ("² ٣", None),  # digits of other scripts are no numbers here
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert gym.last_number(text) == number


@given(
    st.one_of(st.integers(-(10**15), 10**15), st.floats(-1e15, 1e15, allow_nan=False)),
    st.sampled_from(["", "the answer is ", "so: ", "1 and ", "2.5, "]),
    st.sampled_from(["", ".", " apples", ")", ", I think.", "\n"]),
)
def test_a_number_written_last_is_the_number_read(number: float, before: str, after: str) -> None:
    for text in {str(number), f"{number:,}"}:
        found = gym.last_number(before + text + after)
        assert found is not None
        assert float(found) == number


@given(st.text(alphabet="0123456789-−.,eE+ ()x", max_size=60))
def test_whatever_is_read_is_a_finite_part_of_the_text(text: str) -> None:
    found = gym.last_number(text)
    if found is None:
        assert not any(c in "0123456789" for c in text) or len(text) > gym.LONGEST_NUMBER
    else:
        float(found)
        assert found in text.replace(",", "").replace("−", "-")


def test_partial_credit_is_not_accuracy() -> None:
    """R13: countdown's scorer gives a wrong expression .05, and a group's std makes a full push of that (+1.4925 with ddof 1)."""
    dataset = reasoning_gym.create_dataset("countdown", size=1, seed=1)
    entry = dataset[0]
    target = str(entry["metadata"]["target"])
    raw = [dataset.score_answer(answer, entry) for answer in ("x", target, "", None)]
    assert raw == [0.01, 0.05, 0.01, 0.01]
    b = Minibatch(
        mask_NT=torch.ones(4, 1, dtype=torch.bool),
        r_N=torch.tensor(raw, dtype=torch.float64),
        group_N=torch.zeros(4, dtype=torch.int64),
        length_N=torch.ones(4, dtype=torch.int64),
        cut_N=torch.zeros(4, dtype=torch.bool),
        limit=1,
    )
    assert float(advantage.group_zscore(b, ddof=1, eps=1e-4)[1]) == pytest.approx(1.4925, abs=1e-4)
    task = tasks.bound({"name": "chain_sum", "size": 40})(encode)
    for prompt in task.train[:10]:
        for text in (f" {prompt.answer} ", f"{prompt.answer}.0", f"The answer is {prompt.answer}", "x", "", f"{prompt.answer}7"):
            right, notes = task.verify(prompt, text)
            assert right in (0.0, 1.0)
            assert 0.0 <= notes["raw_score"] <= 1.0
            found = gym.last_number(text)
            assert right == float(found is not None and float(found) == float(prompt.answer))  # whatever the scorer gives


@given(st.sampled_from(["short", "tail"]), st.sampled_from("+-*"), st.text(alphabet="0123456789.+", max_size=9), st.booleans())
def test_every_step_is_right_exactly_where_the_response_is(name: str, op: str, text: str, ended: bool) -> None:
    """Whatever the text, with and without an end token: steps cannot be collected by a response that is wrong."""
    task = TASKS[name]
    n = {"short": 3, "tail": 2}[name]
    prompt = prompt_of(task, f"{op}{'537'[:n]}=")
    for candidate in (
        text,
        "".join(f"{d}{pairs.second_digit(op, int(t), int(d))}" for t, d in zip(prompt.answer, "904", strict=False)) + text[:1],
    ):
        pieces = [*candidate, "$"] if ended else list(candidate)
        steps = task.steps(prompt, pieces)
        ends = [t for t, _ in steps]
        assert ends == sorted(set(ends))
        assert all(0 <= t < len(pieces) and score in (0.0, 1.0) for t, score in steps)
        assert bool(steps) == bool(pieces)
        assert float(bool(steps) and all(score for _, score in steps)) == task.verify(prompt, candidate)[0]


def test_a_pair_is_a_step(short: Task) -> None:
    prompt = prompt_of(short, "+537=")
    assert short.steps(prompt, [*"505843", "$"]) == ((1, 1.0), (3, 1.0), (5, 1.0))
    assert short.steps(prompt, [*"515843", "$"]) == ((1, 0.0), (3, 1.0), (5, 1.0))
    assert short.steps(prompt, [*"50", "$"]) == ((1, 1.0), (2, 0.0))
    assert short.steps(prompt, [*"5058430"]) == ((1, 1.0), (3, 1.0), (5, 1.0), (6, 0.0))
    assert short.steps(prompt, ["$"]) == ((0, 0.0),)
    assert short.steps(prompt, []) == ()


def test_the_first_pair_is_a_proxy_that_can_be_hacked(short: Task) -> None:
    prompt = prompt_of(short, "+537=")
    assert [short.verify(prompt, text)[1]["first_pair"] for text in ("505843", "50", "50x", "51", "5", "")] == [1, 1, 1, 0, 0, 0]
    assert short.verify(prompt, "50")[0] == 0.0


def test_digits_of_other_scripts_are_wrong_not_a_crash(short: Task) -> None:
    assert short.verify(prompt_of(short, "+537="), "50584²") == (0.0, {"rare": 0.0, "first_pair": 1.0})


def test_gym_tasks_have_no_steps() -> None:
    task = tasks.bound({"name": "chain_sum", "size": 40})(encode)
    assert task.steps(task.train[0], ["1", "2"]) == ()


def test_chain_sum_is_scored_by_reasoning_gym_after_extraction() -> None:
    task = tasks.bound({"name": "chain_sum", "terms": 2, "digits": 1, "size": 60})(encode)
    for prompt in task.train[:20]:
        assert task.verify(prompt, f"I think it is {prompt.answer}.")[0] == 1.0
        assert task.verify(prompt, f"{prompt.answer}1")[0] == 0.0
        assert task.verify(prompt, "I do not know")[0] == 0.0
    right, notes = task.verify(task.train[0], f"It is {task.train[0].answer}")
    assert (right, notes["has_number"]) == (1.0, 1.0)
    assert notes["raw_score"] < 1.0  # the scorer on the raw text gives no full mark: both figures are kept
    assert not {p.id for p in task.train} & {p.id for p in task.heldout}


def test_answer_positions_of_a_text_are_the_tokens_of_its_last_number() -> None:
    assert gym.positions(["The", "Ġ3", "Ġis", "Ġ-", "1", "2", "."]) == {"answer": [4, 5]}
    assert gym.positions(["no", "number"]) == {"answer": []}


def test_an_unknown_task_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        UserError, match=r"task: there is no variant 'shrot' \(did you mean 'short'\?\); valid: short, tail, chain_sum"
    ):
        tasks.bound("shrot")
