"""⑦ by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_repro.knobs import resolve, reward
from grpo_repro.types import Prompt, Response, UserError

PROMPT = Prompt(id="p", text="1+1=", tokens=(1, 2), answer="2")


def response(correct: float = 0.0, u: float = 0.5, **notes: float) -> Response:
    return Response(text="2", tokens=(3,), truncated=False, correct=correct, notes=notes, u=u)


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


def test_coin_names_the_notes_there_are() -> None:
    with pytest.raises((KeyError, UserError), match=r"rare.*not 'rear'"):
        reward.coin(PROMPT, response(rare=1), note="rear", per_note=0.1)


@pytest.mark.parametrize("params", [{"p": 1.5}, {"p": -0.1}, {"per_note": float("nan")}, {"note": 3}])
def test_parameters_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(params))):
        resolve("reward", {"name": "coin", **params})
