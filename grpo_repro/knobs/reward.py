"""⑦ The reward of one response.

reward(prompt, response) -> float        `response.correct` is the task verifier's word, `response.notes` what else it saw
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_repro.types import Finite, Prompt, Response

Probability = Annotated[float, Field(ge=0, le=1)]


def exact_match(prompt: Prompt, response: Response) -> float:
    r"""1 if the task's verifier accepts the response, else 0.

    $$r = \mathbb 1[y\ \text{is right}]$$

    Source: DeepSeek-R1 (2501.12948), accuracy reward. Fixes: cannot be argued with. Costs: no partial credit.
    """
    return response.correct


def coin(prompt: Prompt, response: Response, *, p: Probability = 0.5, note: str = "", per_note: Finite = 0.0) -> float:
    r"""A coin, whatever the answer: 1 with probability p, raised by what the task noted about the response.

    $$r \sim \mathrm{Bernoulli}\big(\min(1,\max(0,\ p + \lambda\, n(y)))\big)$$

    Source: spurious rewards (2506.10947); with `note` a reward that favours a rare but harmless choice (TESTBED §1).
    Fixes: nothing; isolates what the objective does by itself. Costs: teaches nothing about the task.
    """
    if note and note not in response.notes:
        raise KeyError(f"the task notes {sorted(response.notes) or 'nothing'}, not {note!r}")
    chance = p + (per_note * response.notes[note] if note else 0.0)
    return float(response.u < chance)
