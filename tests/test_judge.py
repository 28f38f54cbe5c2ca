"""⑦ in the loop: a reward function's mistakes are the user's sentence, and chance in a reward is paired between arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from grpo_repro import policy, tasks
from grpo_repro.judge import judge
from grpo_repro.knobs import resolve, reward
from grpo_repro.policy import Policy
from grpo_repro.tasks import Task, pairs
from grpo_repro.types import Prompt, Response, Rollout, UserError


@pytest.fixture(scope="module")
def made() -> Policy:
    return policy.tiny(pairs.SYMBOLS)


@pytest.fixture(scope="module")
def task(made: Policy) -> Task:
    return tasks.bound("short")(made.encode_chat)


def rollout_of(made: Policy, task: Task, texts: list[str], groups: list[int]) -> Rollout:
    """Responses with the end token, one prompt a group."""
    (end,) = made.end_ids
    rows = [[*made.encode_chat(text), end] for text in texts]
    width = max(map(len, rows))
    length_N = torch.tensor([len(row) for row in rows])
    prompts = task.train[: max(groups) + 1]
    return Rollout(
        prompts=prompts,
        group_N=torch.tensor(groups),
        prompt_NP=torch.tensor([prompts[g].tokens for g in groups]),
        prompt_length_N=torch.full((len(rows),), 5),
        response_NT=torch.tensor([row + [made.pad_id] * (width - len(row)) for row in rows]),
        length_N=length_N,
        mask_NT=torch.arange(width) < length_N[:, None],
        sampler_NT=torch.zeros(len(rows), width),
        cut_N=torch.zeros(len(rows), dtype=torch.bool),
    )


def right_answer(prompt: Prompt) -> str:
    return "".join(f"0{pairs.second_digit(prompt.text[0], int(t), 0)}" for t in prompt.answer)


def test_rewards_verdicts_notes_and_positions(made: Policy, task: Task) -> None:
    texts = [right_answer(task.train[0]), "12", ""]
    judged = judge(reward.exact_match, rollout_of(made, task, texts, [0, 0, 0]), task, made, seed=0, step=0)
    assert judged.r_N.tolist() == judged.correct_N.tolist() == [1.0, 0.0, 0.0]
    assert judged.notes["rare"].tolist() == [0.0, 0.0, 0.0]
    assert judged.notes["first_pair"].tolist() == [1.0, 0.0, 0.0]
    assert judged.parts == {}
    assert judged.step_end_NT is None
    assert judged.step_r_NT is None
    # positions exist only where the response has tokens: "12" + end has three, the empty response its end token alone
    assert judged.positions["answer"].tolist() == [[True] * 6 + [False], [True] * 3 + [False] * 4, [True] + [False] * 6]
    assert judged.positions["choice"].sum().item() == 3 + 2 + 1


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "None"), ("1", "'1'"), (float("nan"), "nan"), (float("inf"), "inf"), ([1.0], r"\[1.0\]")]
)
def test_a_reward_that_is_no_number_is_refused_with_its_place(made: Policy, task: Task, value: Any, shown: str) -> None:
    def favourite(prompt: Prompt, response: Response) -> Any:
        return value

    rollout = rollout_of(made, task, ["50"], [0])
    with pytest.raises(
        UserError, match=rf"reward favourite returned {shown} \(prompt '.*', response '50'\); it must return a finite"
    ):
        judge(favourite, rollout, task, made, 0, 0)


def test_a_reward_that_raises_is_named_with_its_place(made: Policy, task: Task) -> None:
    def broken(prompt: Prompt, response: Response) -> float:
        return {"ground_truth": 1.0}["ground_truths"]

    with pytest.raises(UserError, match=r"reward broken raised KeyError: 'ground_truths' \(prompt"):
        judge(broken, rollout_of(made, task, ["50"], [0]), task, made, 0, 0)


def test_chance_in_a_reward_is_indexed_by_prompt_and_sample_not_by_row(made: Policy, task: Task) -> None:
    """Dropping or reordering rows of other groups must not change a response's coin."""

    def record(prompt: Prompt, response: Response) -> float:
        return response.u

    whole = judge(record, rollout_of(made, task, ["1"] * 6, [0, 0, 0, 1, 1, 1]), task, made, seed=5, step=2)
    part = judge(record, rollout_of(made, task, ["1"] * 3, [1, 1, 1]), task, made, seed=5, step=2)
    assert part.r_N.tolist() == whole.r_N.tolist()[3:]
    assert len(set(whole.r_N.tolist())) == 6
    other = judge(record, rollout_of(made, task, ["1"] * 3, [1, 1, 1]), task, made, seed=5, step=3)
    assert other.r_N.tolist() != part.r_N.tolist()


def test_a_coin_that_asks_for_a_note_the_task_does_not_take(made: Policy, task: Task) -> None:
    def asks(prompt: Prompt, response: Response) -> float:
        return reward.coin(prompt, response, note="rares", per_note=1.0)

    with pytest.raises(UserError, match=r"the task notes \['first_pair', 'rare'\], not 'rares'"):
        judge(asks, rollout_of(made, task, ["50"], [0]), task, made, 0, 0)


def test_one_reward_of_a_group_that_is_none_stops_the_run(made: Policy, task: Task) -> None:
    """R07, POLICY: [1, 0, None, 1] is an error. As 0 it would move the group's mean, as a gap the baseline would be of three."""
    answers = iter([1.0, 0.0, None, 1.0])

    def patchy(prompt: Prompt, response: Response) -> Any:
        return next(answers)

    with pytest.raises(
        UserError, match=r"reward patchy returned None \(prompt '.*', response '3'\); it must return a finite number"
    ):
        judge(patchy, rollout_of(made, task, ["1", "2", "3", "4"], [0] * 4), task, made, 0, 0)


def batched(returns: Any) -> Any:
    """A reward with a batch function that returns this."""

    def together(prompt: Prompt, response: Response) -> float:
        raise AssertionError("a reward that can judge a batch is asked once")

    def many(prompts: Sequence[Prompt], responses: Sequence[Response]) -> Any:
        return returns(prompts, responses) if callable(returns) else returns

    together.batch = many  # type: ignore[attr-defined]
    return together


def test_a_batch_is_judged_in_one_call_and_in_order(made: Policy, task: Task) -> None:
    ask = batched(
        lambda prompts, responses: [100.0 * int(p.answer) + len(r.text) for p, r in zip(prompts, responses, strict=True)]
    )
    judged = judge(ask, rollout_of(made, task, ["1", "12", "123"], [0, 1, 1]), task, made, 0, 0)
    first, second = (100.0 * int(task.train[g].answer) for g in (0, 1))
    assert judged.r_N.tolist() == [first + 1, second + 2, second + 3]


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ([1.0], "returned 1 for 4 responses; it must return a number a response"),  # R09: never broadcast
        ([1.0] * 5, "returned 5 for 4 responses"),
        (torch.ones(1), "returned 1 for 4 responses"),
        (None, "raised TypeError"),
        ([1.0, None, 1.0, 1.0], r"returned None \(prompt '.*', response '2'\)"),
        ([1.0, 1.0, float("nan"), 1.0], r"returned nan \(prompt '.*', response '3'\)"),
        (["1"] * 4, r"returned '1' \(prompt '.*', response '1'\)"),
    ],
    ids=["one", "five", "tensor", "none", "a_none", "a_nan", "text"],
)
def test_a_batch_that_is_not_a_number_a_response_is_refused(made: Policy, task: Task, returns: Any, said: str) -> None:
    with pytest.raises(UserError, match="reward together " + said):
        judge(batched(returns), rollout_of(made, task, ["1", "2", "3", "4"], [0] * 4), task, made, 0, 0)


def test_a_user_s_mistake_in_a_reward_is_told_as_it_is(made: Policy, task: Task) -> None:
    def asks(prompt: Prompt, response: Response) -> float:
        raise UserError(f"the gold of {prompt.id} is empty.")

    with pytest.raises(UserError, match=r"^the gold of \+000= is empty\.$"):
        judge(asks, rollout_of(made, task, ["50"], [0]), task, made, 0, 0)


def test_the_parts_of_a_sum_are_reported_before_their_weights(made: Policy, task: Task) -> None:
    parts = [
        {"reward": "exact_match", "weight": 1.0},
        {"reward": {"name": "noted", "note": "first_pair"}, "weight": 0.25},
        {"reward": {"name": "format_match", "pattern": "[0-9]*"}, "weight": -2.0},
    ]
    ask = resolve("reward", {"name": "weighted", "parts": parts})
    right = right_answer(task.train[0])
    rollout = rollout_of(made, task, [right, right[:2] + "11" * 2, "+"], [0, 0, 0])
    judged = judge(ask, rollout, task, made, 0, 0)
    assert {name: r_N.tolist() for name, r_N in judged.parts.items()} == {
        "exact_match": [1.0, 0.0, 0.0],
        "noted": [1.0, 1.0, 0.0],
        "format_match": [1.0, 1.0, 0.0],
    }
    assert judged.r_N.tolist() == [1.0 + 0.25 - 2.0, 0.25 - 2.0, 0.0]
    alone = [ask(rollout.prompts[0], as_response(made, task, rollout, n)) for n in range(3)]
    assert judged.r_N.tolist() == alone


def as_response(made: Policy, task: Task, rollout: Rollout, n: int) -> Response:
    tokens = tuple(rollout.response_NT[n, : int(rollout.length_N[n])].tolist())
    text = made.decode(tokens)
    return Response(text, tokens, False, *task.verify(rollout.prompts[int(rollout.group_N[n])], text), 0.0)


def test_step_scores_are_the_step_verifier_s_at_the_last_token_of_each_pair(made: Policy, task: Task) -> None:
    right = right_answer(task.train[0])
    wrong = right[:2] + "01" + right[4:]  # targets are 000: 0+1 is not 0
    rollout = rollout_of(made, task, [right, wrong, right[:2], ""], [0] * 4)
    judged = judge(reward.exact_match, rollout, task, made, 0, 0, steps=True)
    assert judged.step_end_NT.dtype == torch.bool
    assert judged.step_r_NT.dtype == torch.float32
    assert [row.nonzero()[:, 0].tolist() for row in judged.step_end_NT] == [[1, 3, 5], [1, 3, 5], [1, 2], [0]]
    assert judged.step_r_NT[0].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert judged.step_r_NT[1].tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert judged.step_r_NT[2].tolist() == [0, 1, 0, 0, 0, 0, 0]  # the pairs that are missing: wrong, at the end token
    assert not judged.step_r_NT[3].any()


def test_a_step_that_ends_at_a_masked_token_is_none(made: Policy, task: Task) -> None:
    rollout = rollout_of(made, task, [right_answer(task.train[0])], [0])
    mask_NT = rollout.mask_NT.clone()
    mask_NT[0, 3] = False
    judged = judge(reward.exact_match, replace(rollout, mask_NT=mask_NT), task, made, 0, 0, steps=True)
    assert judged.step_end_NT[0].nonzero()[:, 0].tolist() == [1, 5]
    assert judged.step_r_NT[0].tolist() == [0, 1, 0, 0, 0, 1, 0]


def test_a_reward_that_can_judge_a_prefix_scores_the_steps(made: Policy, task: Task) -> None:
    """Each step's score is the reward of the text up to it: here its length."""
    ask = batched(lambda prompts, responses: [float(len(r.text)) for r in responses])
    ask.prefixes = True
    right = right_answer(task.train[0])
    judged = judge(ask, rollout_of(made, task, [right, right[:2]], [0, 0]), task, made, 0, 0, steps=True)
    assert judged.r_N.tolist() == [6.0, 2.0]
    assert judged.step_r_NT.tolist() == [[0, 2, 0, 4, 0, 6, 0], [0, 2, 2, 0, 0, 0, 0]]


def test_steps_of_a_task_without_steps_are_refused(made: Policy, task: Task) -> None:
    bare = Task(task.name, task.train, task.heldout, task.limit, task.verify, task.positions)
    with pytest.raises(UserError, match="task short has no reasoning steps to score"):
        judge(reward.exact_match, rollout_of(made, task, ["12"], [0]), bare, made, 0, 0, steps=True)


def test_a_word_stands_for_the_task_s_reward_model(made: Policy, task: Task) -> None:
    """Also inside a sum; the config keeps the word."""
    seen: list[str] = []

    def ask(prompt: Prompt, response: Response, *, model: str) -> float:
        seen.append(model)
        return 0.0

    told = replace(task, models={"preferences": "/a/folder"})
    for model, folder in (("preferences", "/a/folder"), ("elsewhere", "elsewhere")):
        judge(partial(ask, model=model), rollout_of(made, task, ["1"], [0]), told, made, 0, 0)
        assert seen.pop() == folder
