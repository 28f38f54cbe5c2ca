"""⑦ in the loop: a reward function's mistakes are the user's sentence, and chance in a reward is paired between arms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_repro import policy, tasks
from grpo_repro.judge import judge
from grpo_repro.knobs import reward
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

    with pytest.raises(UserError, match=r"the task notes \['rare'\], not 'rares'"):
        judge(asks, rollout_of(made, task, ["50"], [0]), task, made, 0, 0)
