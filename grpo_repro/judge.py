"""⑦ From responses to rewards: the task's verifier reads each response, the reward function judges it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_repro.policy import Policy
from grpo_repro.spec import base
from grpo_repro.tasks import Task
from grpo_repro.types import Prompt, Response, Rollout, UserError
from grpo_repro.uniform import REWARD, uniform


@dataclass(frozen=True)
class Judged:
    r_N: Tensor  # float32, what the objective sees
    correct_N: Tensor  # float32, the task verifier's word, whatever the reward
    notes: dict[str, Tensor]  # float32 a row: what else the task observed
    positions: dict[str, Tensor]  # bool NT: named token positions, e.g. "answer"


def judge(
    reward: Callable[[Prompt, Response], float], rollout: Rollout, task: Task, policy: Policy, seed: int, step: int
) -> Judged:
    """Every response's reward and verdict. Raises UserError when the reward function raises or returns no finite number."""
    counts: dict[int, int] = {}
    r, correct, notes, positions = [], [], [], []
    groups, lengths, cut = rollout.group_N.tolist(), rollout.length_N.tolist(), rollout.cut_N.tolist()
    samples = [counts.update({g: counts.get(g, -1) + 1}) or counts[g] for g in groups]
    u_N = uniform(seed, REWARD, step, torch.tensor(groups), torch.tensor(samples), 0).tolist()
    for n, row in enumerate(rollout.response_NT.tolist()):
        prompt, tokens = rollout.prompts[groups[n]], tuple(row[: lengths[n]])
        text = policy.decode(tokens)
        right, noted = task.verify(prompt, text)
        correct.append(right)
        notes.append(noted)
        positions.append(task.positions(policy.tokenizer.convert_ids_to_tokens(list(tokens))))
        r.append(_checked(reward, prompt, Response(text, tokens, cut[n], right, noted, u_N[n])))
    device = rollout.response_NT.device
    named = {name: torch.zeros(rollout.response_NT.shape, dtype=torch.bool) for name in (positions[0] if positions else {})}
    for n, where in enumerate(positions):
        for name, tokens_at in where.items():
            named[name][n, list(tokens_at)] = True
    return Judged(
        r_N=torch.tensor(r, dtype=torch.float32, device=device),
        correct_N=torch.tensor(correct, dtype=torch.float32, device=device),
        notes={k: torch.tensor([noted[k] for noted in notes], device=device) for k in (notes[0] if notes else {})},
        positions={k: v.to(device) & rollout.mask_NT for k, v in named.items()},
    )


def _checked(reward: Callable[[Prompt, Response], Any], prompt: Prompt, response: Response) -> float:
    name = getattr(base(reward), "__name__", repr(reward))
    about = f"prompt {prompt.id!r}, response {response.text[:80]!r}"
    try:
        value = reward(prompt, response)
    except Exception as error:
        raise UserError(f"reward {name} raised {type(error).__name__}: {error} ({about}); it must return a number.") from error
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise UserError(f"reward {name} returned {value!r} ({about}); it must return a finite number.")
