"""How the policy does on prompts that it is never trained on, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_repro.judge import Judged, judge
from grpo_repro.learner import Learner
from grpo_repro.policy import Policy
from grpo_repro.rollout import sample
from grpo_repro.types import Answer, Prompt, Rollout

EXAM = -1  # the exam's step index: it always sees the same random numbers, so two exams differ by the policy alone


def exam(learner: Learner) -> dict[str, float]:
    """heldout/accuracy: share of held-out prompts answered right, one response each at the sampling temperature;
    heldout/accuracy/<level> the same a bucket; heldout/length in tokens. new_range/…: the same of the task's new range, if it has one.

    Always the same prompts and random numbers; `scale.eval_prompts` of each part. The responses are left in `learner.answers`.
    """
    run, task, policy = learner.run, learner.task, learner.policy
    parts = {"heldout": task.exam(run.scale.eval_prompts), "new_range": task.new_exam(run.scale.eval_prompts)}
    prompts = tuple(prompt for part in parts.values() for prompt in part)
    learner.answers = ()
    if not prompts:
        return {}
    rollout = sample(
        policy,
        prompts,
        1,
        limit=run.rollout.limit or task.limit,
        temperature=run.rollout.temperature,
        top_p=run.rollout.top_p,
        top_k=run.rollout.top_k,
        seed=run.seed,
        step=EXAM,
        engine=learner.sampler.examining(policy),
        batch_rows=run.machine.batch_rows,
    )
    judged = judge(lambda prompt, response: response.correct, rollout, task, policy, run.seed, EXAM)
    names = [name for name, part in parts.items() for _ in part]
    learner.answers = _answers(policy, rollout, judged, names)
    row: dict[str, float] = {}
    for name, part in parts.items():
        if part:
            of_part_N = torch.tensor([n == name for n in names], device=judged.correct_N.device)
            row |= _marks(name, part, judged.correct_N[of_part_N], rollout.length_N[of_part_N])
    return row


def _marks(name: str, prompts: Sequence[Prompt], correct_N: Tensor, length_N: Tensor) -> dict[str, float]:
    row = {f"{name}/accuracy": float(correct_N.mean()), f"{name}/length": float(length_N.float().mean())}
    for level in sorted({p.level for p in prompts}):
        of_level_N = torch.tensor([p.level == level for p in prompts], device=correct_N.device)
        row[f"{name}/accuracy/{level}"] = float(correct_N[of_level_N].mean())
    return row


def _answers(policy: Policy, rollout: Rollout, judged: Judged, names: Sequence[str]) -> tuple[Answer, ...]:
    """In the order of the prompts: the exam has one response each."""
    lengths, correct, notes = (
        rollout.length_N.tolist(),
        judged.correct_N.tolist(),
        {k: x.tolist() for k, x in judged.notes.items()},
    )
    return tuple(
        Answer(
            part=names[n],
            level=rollout.prompts[n].level,
            prompt=rollout.prompts[n].text,
            gold=rollout.prompts[n].answer,
            response=policy.decode(tuple(tokens[: lengths[n]])),
            correct=correct[n],
            length=lengths[n],
            notes={name: noted[n] for name, noted in notes.items()},
        )
        for n, tokens in enumerate(rollout.response_NT.tolist())
    )
