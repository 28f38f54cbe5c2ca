"""⑦ The reward of one response.

reward(prompt, response) -> float        `response.correct` is the task verifier's word, `response.notes` what else it saw

A reward is a plain function of one response. Attributes say what `judge` may do with it: `batch` judges many responses in one call,
`parts` opens a sum so that each part is logged, `prefixes` means that it can judge an unfinished response: a reasoning step.
None or NaN from a reward is an error that names the prompt and the response: nothing is skipped, nothing counts as 0.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from grpo_repro import verify
from grpo_repro.spec import base, bind, public
from grpo_repro.types import Finite, Positive, Prompt, Response, UserError

Reward = Callable[[Prompt, Response], float]
Probability = Annotated[float, Field(ge=0, le=1)]


def _can(**attributes: Any) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        vars(function).update(attributes)
        return function

    return mark


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"objective.reward: {pattern!r} is not a regular expression ({error}); see Python's module re.") from None


def _pattern(text: str) -> str:
    return _compiled(text).pattern


def _parts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuse at once what cannot be bound."""
    if not parts:
        raise UserError("objective.reward.weighted.parts: is empty; give a list of {reward: …, weight: …}.")
    for part in parts:
        if set(part) != {"reward", "weight"}:
            raise UserError(f"objective.reward.weighted.parts: {part!r} must have exactly the keys reward and weight.")
        weight = part["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) < float("inf"):
            raise UserError(f"objective.reward.weighted.parts: a weight is a finite number, not {weight!r}.")
    _weights_and_rewards(parts)
    return parts


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
    chance = p + (per_note * _note(response, note) if note else 0.0)
    return float(response.u < chance)


def format_match(
    prompt: Prompt, response: Response, *, pattern: Annotated[str, AfterValidator(_pattern)], if_right: bool = False
) -> float:
    r"""1 if the whole text matches a regular expression, else 0; with `if_right` only where the answer is right too.

    $$r = \mathbb 1[y \in \mathcal L(\mathrm{pattern})]$$

    `re.fullmatch`: a dot does not match a newline unless the pattern starts with (?s). Source: DeepSeek-R1 (2501.12948), format reward.
    Fixes: an answer that can be found. Costs: in a group of wrong answers the well-formed one gets the full push, whatever the weight,
    as group_zscore removes the scale (open-instruct#659): `if_right` gates that. A pattern that backtracks takes exponential time.
    """
    return float(_compiled(pattern).fullmatch(response.text) is not None and (response.correct == 1.0 or not if_right))


def math_verify(prompt: Prompt, response: Response, *, seconds: Positive = 5.0) -> float:
    r"""1 if the response's final answer equals the prompt's answer as mathematics, else 0.

    $$r = \mathbb 1[\mathrm{parse}(\mathrm{answer}(y)) \equiv \mathrm{parse}(a)]$$

    The answer is the last `\boxed{…}`, or `$…$`, or what follows "answer is", or the whole text: see `verify.answer_of`; it must parse
    whole, so units and lists are wrong, and 5% is .05. Not shown to be equal within `seconds` is 0. A gold answer that does not parse
    raises UserError. Source: Math-Verify (Kydlíček 2025), with a strict layer (`equality`). Fixes: 1/2 is 0.5. Costs: milliseconds each;
    two equations are compared by Math-Verify alone, whose mistakes are then ours.
    """
    agreed = verify.agrees(prompt.answer, response.text, seconds)
    if agreed is None:
        raise UserError(
            f"reward math_verify: the answer {prompt.answer!r} of prompt {prompt.id!r} is not a mathematical expression; correct it, "
            "drop the prompt, or use exact_match."
        )
    return float(agreed)


def scorer(prompt: Prompt, response: Response) -> float:
    r"""The task's own score of the whole text, with its partial credit (reasoning-gym tasks note it as `raw_score`).

    $$r = \mathrm{score}(y, a) \in [0, 1]$$

    Source: reasoning-gym (2505.24760). Fixes: a signal before the first right answer. Costs: a wrong answer earns something
    (reasoning-gym#265), which a group baseline turns into a full push: accuracy stays the verifier's word.
    """
    return _note(response, "raw_score")


def noted(prompt: Prompt, response: Response, *, note: str) -> float:
    r"""What the task noted about the response: a proxy that can be hacked, beside the true score.

    $$r = n(y)$$

    On the pair tasks `first_pair` is 1 where the first pair is right, whatever follows.
    Source: Goodhart's law as in Gao et al. (2210.10760). Fixes: nothing; shows reward up and ability flat. Costs: the task.
    """
    return _note(response, note)


@_can(parts=lambda *, parts: _named(parts))
def weighted(prompt: Prompt, response: Response, *, parts: Annotated[list[dict[str, Any]], AfterValidator(_parts)]) -> float:
    r"""Several rewards, each with its weight, summed; the mean of each part (before its weight) is logged.

    $$r = \sum_k \lambda_k\, r_k$$

    `parts: [{reward: exact_match, weight: 1}, {reward: {name: format_match, pattern: …}, weight: .1}]`. The weights act on rewards, so
    before any normalisation (trl#2676). A part that is None or NaN is an error, not a 0. Source: DeepSeek-R1 (2501.12948), Sec. 2.2.2.
    Fixes: one number for several wishes. Costs: the parts trade against each other, and a group's std hides the exchange rate.
    """
    return sum(weight * reward(prompt, response) for weight, reward in _named(parts).values())


def _learned_batch(prompts: Sequence[Prompt], responses: Sequence[Response], *, model: str) -> list[float]:
    from grpo_repro import reward_model  # brings transformers: seconds that a command without a model need not wait

    return reward_model.score(reward_model.load(model), prompts, [r.text for r in responses])


@_can(batch=_learned_batch, prefixes=True)
def learned(prompt: Prompt, response: Response, *, model: str) -> float:
    r"""The score of a reward model: a folder that AutoModelForSequenceClassification loads with one label.

    $$r = r_\phi(x, y)$$

    `model: preferences` is one that is trained here, on preferences from the tiny task (see preferences.py), and cached. With
    process_reward it also scores every prefix that ends a step. Source: InstructGPT (2203.02155), Sec. 3.5; Bradley and Terry 1952.
    Fixes: no verifier needed. Costs: a forward pass a response, and the policy finds what it overrates (2210.10760).
    """
    return _learned_batch([prompt], [response], model=model)[0]


def _note(response: Response, note: str) -> float:
    if note not in response.notes:
        raise KeyError(f"the task notes {sorted(response.notes) or 'nothing'}, not {note!r}")
    return response.notes[note]


def _named(parts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, Reward]]:
    """Name → (weight, reward); a variant that occurs again is name_2."""
    return _once(json.dumps(parts))


@functools.lru_cache(maxsize=64)
def _once(parts: str) -> dict[str, tuple[float, Reward]]:
    return _weights_and_rewards(json.loads(parts))


def _weights_and_rewards(parts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, Reward]]:
    known, found, times = public(sys.modules[__name__]), dict[str, tuple[float, Reward]](), Counter[str]()
    for part in parts:
        reward = bind("objective.reward.weighted", known, part["reward"])
        name = str(base(reward).__name__)
        times[name] += 1
        found[name if times[name] == 1 else f"{name}_{times[name]}"] = (float(part["weight"]), reward)
    return found
