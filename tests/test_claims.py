"""Every branch of the verdict rule on frames made by hand, what gets paired with what, and claims that are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from grpo_repro import stats
from grpo_repro.claims import Claim, LastSteps, Result, Steps, evaluate, judge, measure, summary, table
from grpo_repro.types import UserError

NOISE = (-0.02, 0.02, -0.01, 0.01, 0.0, 0.0, 0.015, -0.015, 0.005, -0.005)  # sums to 0, s = .0124


def claim(**changes: Any) -> Claim:
    plain = {
        "id": "wider-clip",
        "source": "A. Author (2025), §3",
        "says": "A wider clip keeps entropy.",
        "panel": "peaked",
        "arm": "wide",
        "against": "base",
        "metric": "entropy",
        "window": {"first": 1, "last": 2},
        "predict": "greater",
        "sesoi": 0.05,
        "scope": "tiny, peaked start",
        "prediction": "Entropy ends higher.",
    }
    return Claim.model_validate({**plain, **changes})


def runs(differences: Any, steps: int = 4, panel: str = "peaked") -> pd.DataFrame:
    """Arms base and wide, a seed a difference; base is seed + step, so pairing by the wrong key would be seen."""
    rows = [
        {"panel": panel, "arm": arm, "seed": seed, "step": step, "entropy": float(seed + step) + (d if arm == "wide" else 0.0)}
        for seed, d in enumerate(differences)
        for arm in ("base", "wide")
        for step in range(steps)
    ]
    return pd.DataFrame(rows)


def around(mean: float, spread: float = 1.0) -> list[float]:
    return [mean + spread * e for e in NOISE]


def verdict(differences: Any, decide: bool = True, **changes: Any) -> Result:
    return evaluate([claim(**changes)], runs(differences), decide=decide)[0]


# Differences: clearly above, clearly below, clearly nothing, too noisy to tell; sesoi is .05.
ABOVE, BELOW, NOTHING, NOISY = around(0.2), around(-0.2), around(0.01), around(0.02, spread=8)


@pytest.mark.parametrize(
    ("predict", "differences", "expected"),
    [
        ("greater", ABOVE, "supported"),
        ("greater", BELOW, "contradicted"),
        ("greater", NOTHING, "no difference"),
        ("greater", NOISY, "inconclusive"),
        ("less", BELOW, "supported"),
        ("less", ABOVE, "contradicted"),
        ("less", NOTHING, "no difference"),
        ("less", NOISY, "inconclusive"),
        ("equal", NOTHING, "supported"),
        ("equal", ABOVE, "contradicted"),
        ("equal", BELOW, "contradicted"),
        ("equal", NOISY, "inconclusive"),
    ],
)
def test_verdict(predict: str, differences: list[float], expected: str) -> None:
    result = verdict(differences, predict=predict)
    assert result.verdict == expected
    assert bool(result.reason) == (expected == "inconclusive")
    assert result.estimate == pytest.approx(np.mean(differences))
    assert (result.n, result.missing, result.seeds) == (10, (), tuple(range(10)))


def test_significant_but_smaller_than_of_interest_is_no_difference() -> None:
    result = verdict(around(0.02))
    assert result.low is not None
    assert result.low > 0
    assert (result.exceeds_sesoi, result.verdict) == (False, "no difference")


def test_significant_and_too_small_but_not_shown_equivalent_is_inconclusive() -> None:
    # mean .045, se .0039·2 = .0078: the interval excludes 0, TOST's t is (.05 − .045)/.0078 = .64
    result = verdict(around(0.045, spread=2))
    assert (result.verdict, result.exceeds_sesoi) == ("inconclusive", False)
    assert "smaller than sesoi" in result.reason
    assert verdict(around(-0.045, spread=2)).verdict == "inconclusive"


def test_numbers_are_those_of_the_paired_t_and_of_tost() -> None:
    result, interval = verdict(ABOVE), stats.paired_t(ABOVE)
    ours = (result.estimate, result.low, result.high, result.p, result.p_equivalence)
    assert ours == pytest.approx((interval.estimate, interval.low, interval.high, interval.p, stats.tost(ABOVE, 0.05)), rel=1e-9)
    assert result.p_holm is None
    assert result.p_equivalence_holm is None
    assert result.differences == pytest.approx(ABOVE)
    assert (result.arm_mean, result.against_mean) == (pytest.approx(6.2), pytest.approx(6.0))  # mean seed 4.5, mean step 1.5


def test_fewer_than_ten_seeds_decide_nothing() -> None:
    nine, ten = ABOVE[:9], ABOVE
    assert verdict(nine).verdict == "inconclusive"
    assert verdict(nine).reason == "9 paired seeds, a verdict needs 10"
    assert verdict([0.0] * 9, predict="equal").verdict == "inconclusive"
    assert verdict(ten).verdict == "supported"


def test_a_preview_has_numbers_and_no_verdict() -> None:
    result = verdict(ABOVE, decide=False)
    assert (result.verdict, result.n) == ("preview", 10)
    assert result.low is not None
    assert result.low > 0


def test_one_seed_previews_without_an_interval() -> None:
    result = verdict([0.25], decide=False)
    assert (result.verdict, result.estimate, result.low, result.p) == ("preview", 0.25, None, None)
    assert result.reason == "one seed: no interval"
    assert verdict([0.25]).verdict == "inconclusive"


def test_a_bit_identical_null_is_equal_without_zero_over_zero() -> None:
    result = verdict([0.0] * 10, predict="equal")
    assert (result.verdict, result.estimate, result.low, result.high) == ("supported", 0.0, 0.0, 0.0)
    assert (result.p, result.p_equivalence) == (1.0, 0.0)
    assert verdict([0.0] * 10, predict="greater").verdict == "no difference"


def test_holm_over_primaries_only() -> None:
    weak = around(0.06, spread=6)  # mean .06, se .0235: p = .031 alone, .062 as one of two
    frame = pd.concat([runs(weak), runs(weak, panel="other")])
    first, second = claim(primary=True), claim(id="second", panel="other", primary=True)
    alone = evaluate([first, second.model_copy(update={"primary": False})], frame, decide=True)
    assert [r.verdict for r in alone] == ["supported", "supported"]
    assert (alone[0].p_holm, alone[1].p_holm) == (alone[0].p, None)
    both = evaluate([first, second], frame, decide=True)
    assert [r.verdict for r in both] == ["inconclusive", "inconclusive"]
    assert both[0].p is not None
    assert both[0].p_holm == pytest.approx(2 * both[0].p)
    assert "Holm-adjusted p" in both[0].reason
    assert both == judge([*measure([first], frame), *measure([second], frame)], decide=True)  # ablations judged together


def test_holm_also_guards_equivalence_of_primaries() -> None:
    close = around(0.03, spread=2.6)  # TOST p = .043 alone
    frame = pd.concat([runs(close), runs(close, panel="other")])
    first, second = claim(primary=True, predict="equal"), claim(id="second", panel="other", primary=True, predict="equal")
    assert evaluate([first], frame, decide=True)[0].verdict == "supported"
    assert evaluate([first, second], frame, decide=True)[0].verdict == "inconclusive"


def test_judging_again_says_nothing_twice() -> None:
    frame = runs(ABOVE[:8])
    once = evaluate([claim()], frame, decide=True)
    assert judge(once, decide=True) == once
    assert judge(once, decide=False)[0].reason == ""


def test_only_seeds_of_both_arms_are_paired_and_the_others_are_named() -> None:
    frame = runs([*ABOVE, 9.0, 9.0])
    frame = frame[~((frame.arm == "base") & (frame.seed == 10)) & ~((frame.arm == "wide") & (frame.seed == 11))]
    result = evaluate([claim()], frame, decide=True)[0]
    assert (result.n, result.missing, result.verdict) == (10, (10, 11), "supported")
    assert result.estimate == pytest.approx(0.2)
    assert result.reason == "seeds that could not be paired: 10, 11"


def test_a_run_that_stopped_inside_the_window_is_left_out() -> None:
    frame = runs([*ABOVE, 9.0])
    frame = frame[~((frame.arm == "wide") & (frame.seed == 10) & (frame.step >= 2))]  # has step 1, not step 2
    result = evaluate([claim()], frame, decide=True)[0]
    assert (result.n, result.missing) == (10, (10,))
    assert evaluate([claim(window={"last_steps": 1})], frame, decide=True)[0].missing == (10,)  # not its own last step


def test_windows() -> None:
    frame = runs(ABOVE)
    frame["entropy"] = np.where(frame.arm == "wide", frame.step.astype(float) ** 2, 0.0)  # 0 1 4 9
    means = {"first": 1, "last": 2}, {"last_steps": 2}, {"first": 3, "last": 3}, {"first": 0, "last": 3}
    estimates = [evaluate([claim(window=w)], frame, decide=False)[0].estimate for w in means]
    assert estimates == [2.5, 6.5, 9.0, 3.5]


def test_last_steps_of_arms_of_different_length_are_aligned_at_their_ends() -> None:
    frame = runs(ABOVE, steps=6)
    frame["entropy"] = frame.step.astype(float)
    frame = frame[(frame.arm == "wide") | (frame.step < 4)]  # base ends at step 3, wide at 5
    assert evaluate([claim(window={"last_steps": 2})], frame, decide=False)[0].estimate == pytest.approx(2.0)


def test_steps_recorded_in_one_arm_only_are_compared_in_neither() -> None:
    frame = runs(ABOVE)
    hole = (frame.arm == "base") & (frame.seed == 0) & (frame.step == 2)
    frame.loc[hole, "entropy"] = math.nan
    result = evaluate([claim()], frame, decide=True)[0]
    assert result.differences[0] == pytest.approx(ABOVE[0])  # with step 2 of `wide` kept it would be .5 more
    assert result.reason == "recorded at 19 of 20 steps compared"
    assert result.arm_mean == pytest.approx((1.2 + sum(seed + 1.7 for seed in range(1, 10)) + ABOVE[0] - 0.2) / 10, abs=0.01)


def test_against_a_constant() -> None:
    frame = runs(ABOVE)
    result = evaluate([claim(against=None, value=5.8, arm="base", predict="greater")], frame, decide=False)[0]
    assert result.estimate == pytest.approx(0.2)  # 4.5 + 1.5 − 5.8
    assert (result.arm_mean, result.against_mean) == (pytest.approx(6.0), pytest.approx(5.8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"panel": "elsewhere"}, "no runs of the panel 'elsewhere'"),
        ({"against": "narrow"}, "no runs of the arm 'narrow' in the panel 'peaked'"),
        ({"metric": "depth"}, "the metric 'depth' was not recorded"),
        ({"metric": "empty"}, "the metric 'empty' was not recorded"),
        ({"metric": "late"}, "no seed has late (steps 1–2) in every arm compared"),
        ({"metric": "huge"}, "huge is infinite (steps 1–2)"),
        ({"window": {"first": 2, "last": 9}}, "no seed has entropy (steps 2–9) in every arm compared"),
        ({"window": {"last_steps": 9}}, "no seed has entropy (last 9 steps) in every arm compared"),
    ],
)
def test_not_measured_says_why(change: dict[str, Any], reason: str) -> None:
    frame = runs(ABOVE)
    frame["empty"] = math.nan
    frame["late"] = frame.entropy.where(frame.step == 3)
    frame["huge"] = math.inf
    for decide in (True, False):
        result = evaluate([claim(**change)], frame, decide=decide)[0]
        assert (result.verdict, result.reason, result.estimate, result.p) == ("not measured", reason, None, None)


def test_frames_and_lists_that_cannot_be_used() -> None:
    frame = runs(ABOVE)
    with pytest.raises(UserError, match="'wider-clip' is used twice"):
        evaluate([claim(), claim()], frame, decide=True)
    with pytest.raises(UserError, match="no column 'seed'"):
        evaluate([claim()], frame.drop(columns="seed"), decide=True)
    with pytest.raises(UserError, match="twice; each step"):
        evaluate([claim()], pd.concat([frame, frame.iloc[:1]]), decide=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sesio": 0.1}, "Extra inputs"),
        ({"sesoi": 0}, "greater than 0"),
        ({"sesoi": "0.05"}, "valid number"),
        ({"sesoi": math.inf}, "finite"),
        ({"id": "Wider clip"}, "match pattern"),
        ({"predict": "more"}, "'greater', 'less' or 'equal'"),
        ({"prediction": ""}, "at least 1 character"),
        ({"primary": 1}, "valid boolean"),
        ({"against": None}, "either `against`"),
        ({"value": 1.0}, "either `against`"),
        ({"against": "wide"}, "with itself"),
        ({"window": {"first": 3, "last": 2}}, "before its first step 3"),
        ({"window": {"first": 3}}, "Field required"),
        ({"window": {"last_steps": 0}}, "greater than or equal to 1"),
        ({"window": {"last_steps": 2, "first": 1}}, "Extra inputs"),
        ({"window": "last"}, "valid dictionary"),
    ],
)
def test_a_claim_that_cannot_be_meant_is_refused_once(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says) as error:
        claim(**changes)
    assert error.value.error_count() == 1


def test_windows_read_as_words() -> None:
    windows = [Steps(first=8, last=8), Steps(first=1, last=5), LastSteps(last_steps=5), LastSteps(last_steps=1)]
    assert [str(window) for window in windows] == ["step 8", "steps 1–5", "last 5 steps", "last step"]


def test_summary_is_json_and_reads_back() -> None:
    results = evaluate([claim(primary=True), claim(id="absent", metric="depth")], runs(around(1 / 3)), decide=True)
    rows = json.loads(json.dumps(summary(results), allow_nan=False))
    assert rows[0]["estimate"] == 0.333333
    assert rows[0]["claim"]["window"] == {"first": 1, "last": 2}
    assert rows[1]["estimate"] is None
    assert rows[1]["verdict"] == "not measured"
    back = [Result.model_validate(row) for row in rows]
    assert [(r.claim, r.verdict, r.n, r.seeds) for r in back] == [(r.claim, r.verdict, r.n, r.seeds) for r in results]
    assert [r.verdict for r in judge(back, decide=True)] == ["supported", "not measured"]


def test_table_is_for_people() -> None:
    results = evaluate([claim(primary=True), claim(id="absent", metric="depth")], runs(BELOW), decide=True)
    first, second = table(results).to_dict("records")
    assert first["claim"] == "wider-clip (primary)"
    assert first["verdict"] == "contradicted"
    assert (first["predicted"], first["measured"]) == ("> 0", "−0.2")
    assert first["interval"] == "[−0.209, −0.191]"  # .2 ± 2.262 · .0124/√10
    assert first["compared"] == "entropy: wide − base, peaked, steps 1–2"
    assert (second["measured"], second["interval"], second["why"]) == ("–", "–", "the metric 'depth' was not recorded")
