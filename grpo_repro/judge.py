"""⑦ From responses to rewards: the task's verifier reads each response, the reward function judges it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_repro.policy import Policy
from grpo_repro.rollout import Births
from grpo_repro.spec import base
from grpo_repro.tasks import Task
from grpo_repro.types import ABSENT, Prompt, Response, Rollout, UserError
from grpo_repro.uniform import REWARD, uniform

Reward = Callable[[Prompt, Response], float]


@dataclass(frozen=True)
class Judged:
    r_N: Tensor  # float32, what the objective sees
    correct_N: Tensor  # float32, the task verifier's word, whatever the reward
    notes: dict[str, Tensor]  # float32 a row: what else the task observed
    positions: dict[str, Tensor]  # bool NT: named token positions, e.g. "answer"
    parts: dict[str, Tensor] = field(default_factory=dict)  # float32 a row: each part of a weighted reward, before its weight
    step_end_NT: Tensor = ABSENT  # bool, last token of a reasoning step
    step_r_NT: Tensor = ABSENT  # float32, the step's own score at its last token, 0 elsewhere

    def rows(self, index_K: Tensor) -> Judged:
        """The judgement of some rows only."""
        picked: dict[str, Any] = {
            name: {k: x[index_K] for k, x in value.items()}
            if isinstance(value, dict)
            else None
            if value is None
            else value[index_K]
            for name, value in vars(self).items()
        }
        return Judged(**picked)


def joined(parts: Sequence[Judged]) -> Judged:
    """Judgements one after the other, as `rollout.join` puts their rows."""

    def cat(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {k: cat([v[k] for v in values]) for k in values[0]}
        if values[0] is None or values[0].dim() == 1:
            return None if values[0] is None else torch.cat(list(values))
        width = max(v.shape[1] for v in values)
        return torch.cat([torch.nn.functional.pad(v, (0, width - v.shape[1])) for v in values])

    return Judged(**{name: cat([getattr(p, name) for p in parts]) for name in vars(parts[0])})


def judge(
    reward: Reward,
    rollout: Rollout,
    task: Task,
    policy: Policy,
    seed: int,
    step: int,
    steps: bool = False,
    births: Births | None = None,
) -> Judged:
    """Every response's reward and verdict; with `steps` the score of every reasoning step too.

    Chance in a reward has the index of the response's birth (default: this step, the group's id, the place in the group).

    A step's score is the task's step verifier's, or the reward's own where it can judge a prefix (a reward model).
    Raises UserError when the reward function raises, returns no finite number, or not one a response, and when `steps` are asked of
    responses that have none.
    """
    groups, lengths, cut = rollout.group_N.tolist(), rollout.length_N.tolist(), rollout.cut_N.tolist()
    born = births or Births.of(rollout.group_N, step)
    u_N = uniform(seed, REWARD, born.step_N, born.prompt_N, born.member_N, 0).tolist()
    prompts = [rollout.prompts[g] for g in groups]
    responses, positions = [], []
    for n, row in enumerate(rollout.response_NT.tolist()):
        tokens = tuple(row[: lengths[n]])
        text = policy.decode(tokens)
        right, noted = task.verify(prompts[n], text)
        positions.append(task.positions(policy.tokenizer.convert_ids_to_tokens(list(tokens))))
        responses.append(Response(text, tokens, cut[n], right, noted, u_N[n]))
    named = {name: torch.zeros(rollout.response_NT.shape, dtype=torch.bool) for name in (positions[0] if positions else {})}
    for n, where in enumerate(positions):
        for name, tokens_at in where.items():
            named[name][n, list(tokens_at)] = True
    device, notes = rollout.response_NT.device, [r.notes for r in responses]
    r, parts = _total(reward, task.models, prompts, responses)
    judged = Judged(
        r_N=torch.tensor(r, dtype=torch.float32, device=device),
        correct_N=torch.tensor([r.correct for r in responses], dtype=torch.float32, device=device),
        notes={k: torch.tensor([noted[k] for noted in notes], device=device) for k in (notes[0] if notes else {})},
        positions={k: v.to(device) & rollout.mask_NT for k, v in named.items()},
        parts={k: torch.tensor(v, dtype=torch.float32, device=device) for k, v in parts.items()},
    )
    if not steps:
        return judged
    return replace(judged, **_steps(reward, rollout, task, policy, prompts, responses))


def _steps(
    reward: Reward,
    rollout: Rollout,
    task: Task,
    policy: Policy,
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
) -> dict[str, Any]:
    pieces = [policy.tokenizer.convert_ids_to_tokens(list(r.tokens)) for r in responses]
    index = [(n, t, score) for n, prompt in enumerate(prompts) for t, score in task.steps(prompt, pieces[n])]
    if not index:
        raise UserError(
            f"task {task.name} has no reasoning steps to score: use another task, or a ③ advantage that needs no steps."
        )
    n_K, t_K, score_K = (list(column) for column in zip(*index, strict=True))
    if getattr(base(reward), "prefixes", False):
        heads = [responses[n].tokens[: t + 1] for n, t in zip(n_K, t_K, strict=True)]
        prefixes = [replace(responses[n], text=policy.decode(head), tokens=head) for n, head in zip(n_K, heads, strict=True)]
        score_K = _total(reward, task.models, [prompts[n] for n in n_K], prefixes)[0]
    end_NT = torch.zeros(rollout.mask_NT.shape, dtype=torch.bool)
    r_NT = torch.zeros(rollout.mask_NT.shape)
    end_NT[n_K, t_K] = True
    r_NT[n_K, t_K] = torch.tensor(score_K, dtype=torch.float32)
    end_NT, r_NT = end_NT.to(rollout.mask_NT.device) & rollout.mask_NT, r_NT.to(rollout.mask_NT.device)
    return {"step_end_NT": end_NT, "step_r_NT": r_NT.masked_fill(~end_NT, 0.0)}


def _total(
    reward: Reward, models: Mapping[str, str], prompts: Sequence[Prompt], responses: Sequence[Response]
) -> tuple[list[float], dict[str, list[float]]]:
    """The reward of each response, and those of its parts where it is a sum of several."""
    keywords = dict(reward.keywords) if isinstance(reward, functools.partial) else {}
    named = getattr(base(reward), "parts", None)
    if named is None:
        return _each(reward, {**keywords, **_folders(keywords, models)}, prompts, responses), {}
    weights = {name: weight for name, (weight, _) in named(**keywords).items()}
    parts = {name: _total(part, models, prompts, responses)[0] for name, (_, part) in named(**keywords).items()}
    return [sum(weights[name] * parts[name][n] for name in parts) for n in range(len(responses))], parts


def _folders(keywords: Mapping[str, Any], models: Mapping[str, str]) -> dict[str, str]:
    """The parameters that are a word which stands for one of the task's reward models, with its folder instead."""
    return {k: models[v] for k, v in keywords.items() if isinstance(v, str) and k == "model" and v in models}


def _each(reward: Reward, keywords: Mapping[str, Any], prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[float]:
    """The reward's own batch function in one call, where it has one."""
    function, many = base(reward), getattr(base(reward), "batch", None)
    name = getattr(function, "__name__", repr(reward))
    if many is None:
        return [_checked(name, _called(name, function, keywords, p, r), p, r) for p, r in zip(prompts, responses, strict=True)]
    try:
        values = list(many(prompts, responses, **keywords))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"reward {name} raised {type(error).__name__}: {error}; it must return a number a response.") from error
    if len(values) != len(responses):
        raise UserError(
            f"reward {name} returned {len(values)} for {len(responses)} responses; it must return a number a response."
        )
    return [_checked(name, value, p, r) for value, p, r in zip(values, prompts, responses, strict=True)]


def _called(name: str, function: Any, keywords: Mapping[str, Any], prompt: Prompt, response: Response) -> Any:
    try:
        return function(prompt, response, **keywords)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"reward {name} raised {type(error).__name__}: {error} ({_place(prompt, response)}); it must return a number."
        ) from error


def _checked(name: str, value: Any, prompt: Prompt, response: Response) -> float:
    """None is no reward and no 0: it would move the group's mean, or be dropped in silence (trl#3079)."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise UserError(f"reward {name} returned {value!r} ({_place(prompt, response)}); it must return a finite number.")


def _place(prompt: Prompt, response: Response) -> str:
    return f"prompt {prompt.id!r}, response {response.text[:80]!r}"
