"""⑦ by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_repro.knobs import advantage, resolve, reward
from grpo_repro.spec import unbind
from grpo_repro.types import Minibatch, Prompt, Response, UserError

PROMPT = Prompt(id="p", text="1+1=", tokens=(1, 2), answer="2")
TAGGED = r"<answer>\d+</answer>"


def response(correct: float = 0.0, u: float = 0.5, text: str = "2", **notes: float) -> Response:
    return Response(text=text, tokens=(3,), truncated=False, correct=correct, notes=notes, u=u)


def test_exact_match_is_the_verifier_s_word() -> None:
    assert [reward.exact_match(PROMPT, response(c)) for c in (0.0, 1.0)] == [0.0, 1.0]


@pytest.mark.parametrize(("p", "u", "r"), [(0.3, 0.2999, 1.0), (0.3, 0.3, 0.0), (0.0, 0.0, 0.0), (1.0, 0.999999, 1.0)])
def test_coin_is_one_with_probability_p_whatever_the_answer(p: float, u: float, r: float) -> None:
    """u < p: never at p = 0, always at p = 1."""
    assert reward.coin(PROMPT, response(0.0, u), p=p) == reward.coin(PROMPT, response(1.0, u), p=p) == r


def test_coin_raised_by_a_note() -> None:
    """p = .2 + .25·rare: .2, .45, .7 at 0, 1, 2 (TESTBED §1), and no further than 1."""
    for rare, chance in ((0, 0.2), (1, 0.45), (2, 0.7)):
        for u, r in ((chance - 1e-9, 1.0), (chance + 1e-9, 0.0)):
            assert reward.coin(PROMPT, response(u=u, rare=rare), p=0.2, note="rare", per_note=0.25) == r
    assert reward.coin(PROMPT, response(u=0.999, rare=9), p=0.2, note="rare", per_note=0.25) == 1.0
    assert reward.coin(PROMPT, response(u=0.0, rare=9), p=0.2, note="rare", per_note=-0.25) == 0.0


@pytest.mark.parametrize(
    "ask",
    [
        lambda r: reward.coin(PROMPT, r, note="rear", per_note=0.1),
        lambda r: reward.noted(PROMPT, r, note="rear"),
        lambda r: reward.scorer(PROMPT, r),
    ],
)
def test_a_note_that_is_not_there_is_named_with_those_that_are(ask: Any) -> None:
    """R18: a misspelt column is a KeyError that lists the columns, never None or 0."""
    with pytest.raises(KeyError, match=r"the task notes \['rare'\], not '(rear|raw_score)'"):
        ask(response(rare=1))


def test_the_proxy_and_the_task_s_own_score() -> None:
    assert reward.noted(PROMPT, response(first_pair=1.0), note="first_pair") == 1.0
    assert reward.scorer(PROMPT, response(correct=0.0, raw_score=0.05)) == 0.05


@pytest.mark.parametrize(
    ("text", "r"),
    [
        ("<answer>12</answer>", 1.0),
        ("<answer></answer>", 0.0),
        (" <answer>1</answer>", 0.0),
        ("<answer>1</answer>\n", 0.0),
        ("<answer>1</answer> or <answer>2</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_whole_text_must_match(text: str, r: float) -> None:
    assert reward.format_match(PROMPT, response(text=text), pattern=TAGGED) == r


def test_a_format_may_count_only_where_the_answer_is_right() -> None:
    """R16: with a group's std the size of a format reward does not matter, so its lone winner gets the full push: 4/√5 = 1.789."""

    def advantages(r: list[float]) -> list[float]:
        b = Minibatch(
            mask_NT=torch.ones(5, 1, dtype=torch.bool),
            r_N=torch.tensor(r, dtype=torch.float64),
            group_N=torch.zeros(5, dtype=torch.int64),
            length_N=torch.ones(5, dtype=torch.int64),
            cut_N=torch.zeros(5, dtype=torch.bool),
            limit=1,
        )
        return advantage.group_zscore(b, ddof=1, eps=0.0).flatten().tolist()

    a = 4 / math.sqrt(5)
    assert advantages([0, 0, 0, 0, 10]) == pytest.approx([-a / 4] * 4 + [a])
    assert advantages([0, 0, 0, 0, 0.1]) == pytest.approx([-a / 4] * 4 + [a])
    for correct, r in ((0.0, 0.0), (1.0, 1.0)):
        assert reward.format_match(PROMPT, response(correct, text="<answer>1</answer>"), pattern=TAGGED, if_right=True) == r


def test_mathematics_by_value() -> None:
    assert [reward.math_verify(PROMPT, response(text=text)) for text in (r"\boxed{4/2}", "3", "", "1 or 2")] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("text", ["4", "", "42"])
def test_a_gold_that_is_no_mathematics_names_its_prompt(text: str) -> None:
    """R06: never a reward of 1, nor a silent 0."""
    gold = Prompt(id="geometry/17", text="?", tokens=(1,), answer="")
    with pytest.raises(UserError, match="math_verify: the answer '' of prompt 'geometry/17' is not a mathematical expression"):
        reward.math_verify(gold, response(text=text))


def parts(*weighted: tuple[Any, float]) -> dict[str, Any]:
    return {"name": "weighted", "parts": [{"reward": r, "weight": w} for r, w in weighted]}


def test_weights_act_on_rewards_and_are_summed() -> None:
    """R19: weights [1, 2] on ([1, ·], [0, 1]): 1·1 + 2·0 and 1·0 + 2·1; parts are named, a second of a kind by its number."""
    made = resolve(
        "reward", parts(("exact_match", 1), ({"name": "noted", "note": "a"}, 2.0), ({"name": "noted", "note": "b"}, -0.5))
    )
    assert made(PROMPT, response(1.0, a=0.0, b=0.0)) == 1.0
    assert made(PROMPT, response(0.0, a=1.0, b=0.0)) == 2.0
    assert made(PROMPT, response(1.0, a=1.0, b=4.0)) == 1.0
    named = reward.weighted.parts(**made.keywords)  # type: ignore[attr-defined]
    assert {name: weight for name, (weight, _) in named.items()} == {"exact_match": 1.0, "noted": 2.0, "noted_2": -0.5}
    assert resolve("reward", unbind(made))(PROMPT, response(1.0, a=1.0, b=4.0)) == 1.0  # as it is written to a record


def test_the_best_answer_known_gets_the_most() -> None:
    """R20: no reward has the opposite sign."""
    best, worse = response(1.0, text="2", raw_score=1.0, first_pair=1.0), response(0.0, text="x", raw_score=0.01, first_pair=0.0)
    for spec in (
        "exact_match",
        "math_verify",
        "scorer",
        {"name": "format_match", "pattern": r"\d"},
        {"name": "noted", "note": "first_pair"},
        parts(("exact_match", 1.0), ("scorer", 0.1)),
    ):
        made = resolve("reward", spec)
        assert made(PROMPT, best) == pytest.approx(1.0, abs=0.11)
        assert made(PROMPT, best) > made(PROMPT, worse) >= 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "coin", "p": 1.5}, r"coin.p"),
        ({"name": "coin", "p": -0.1}, r"coin.p"),
        ({"name": "coin", "per_note": float("nan")}, r"coin.per_note"),
        ({"name": "coin", "note": 3}, r"coin.note"),
        ({"name": "format_match"}, r"format_match.pattern: is missing"),
        ({"name": "format_match", "pattern": "("}, r"'\(' is not a regular expression \(missing \)"),
        ({"name": "math_verify", "seconds": 0}, r"math_verify.seconds"),
        ({"name": "noted"}, r"noted.note: is missing"),
        ({"name": "learned", "model": 3}, r"learned.model"),
        (parts(), r"weighted.parts: is empty"),
        ({"name": "weighted", "parts": ["exact_match"]}, r"weighted.parts"),
        ({"name": "weighted", "parts": [{"reward": "exact_match"}]}, r"exactly the keys reward and weight"),
        (parts(("exact_match", "1")), r"a weight is a finite number, not '1'"),
        (parts(("exact_match", math.inf)), r"a weight is a finite number, not inf"),
        (parts(("exact_mach", 1.0)), r"weighted: there is no variant 'exact_mach' \(did you mean 'exact_match'\?\)"),
        (parts(({"name": "coin", "p": 2.0}, 1.0)), r"weighted.coin.p"),
    ],
)
def test_what_cannot_be_bound_is_refused_at_once(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("reward", spec)
