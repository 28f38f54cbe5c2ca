"""Statistics against scipy, against examples worked by hand, and against the coverage they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as peer

from grpo_repro import stats
from grpo_repro.types import UserError

DIFF = [0.3, -0.1, 0.4, 0.2, 0.25, 0.05, 0.5, -0.2, 0.35, 0.15]


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_paired_t_is_scipys(level: float) -> None:
    ours, theirs = stats.paired_t(DIFF, level), peer.ttest_1samp(DIFF, 0)
    bounds = theirs.confidence_interval(level)
    assert (ours.low, ours.high, ours.p) == pytest.approx((bounds.low, bounds.high, theirs.pvalue), rel=1e-12)
    assert (ours.estimate, ours.n) == (pytest.approx(0.19), 10)


def test_paired_t_by_hand() -> None:
    # 1, 2, 3: mean 2, s = 1, se = 1/√3; t_{.975, 2} = 4.30265 (table)
    interval = stats.paired_t([1.0, 2.0, 3.0])
    assert interval.low == pytest.approx(2 - 4.30265 / 3**0.5, abs=1e-4)
    assert interval.high == pytest.approx(2 + 4.30265 / 3**0.5, abs=1e-4)


@pytest.mark.parametrize("make", [stats.paired_t, lambda d: stats.bootstrap_t(d, 0.95, np.random.default_rng(0))])
@pytest.mark.parametrize(("value", "p"), [(0.0, 1.0), (0.1, 0.0), (-0.1, 0.0)])
def test_a_constant_difference_has_no_width(make, value: float, p: float) -> None:
    interval = make([value] * 7)
    assert (interval.estimate, interval.low, interval.high, interval.p) == (value, value, value, p)


def test_prediction_interval_is_wider_by_root_two() -> None:
    mean, next_mean = stats.paired_t(DIFF), stats.prediction_interval(DIFF)
    assert next_mean.high - next_mean.estimate == pytest.approx(2**0.5 * (mean.high - mean.estimate), rel=1e-12)
    assert next_mean.p is None


def test_prediction_interval_holds_the_next_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(1).normal(0.3, 1, size=(1500, 2, 8))
    inside = [(i := stats.prediction_interval(first)).low <= second.mean() <= i.high for first, second in draws]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_bootstrap_t_covers_a_skewed_mean() -> None:
    generator = np.random.default_rng(2)
    samples = generator.exponential(1.0, size=(400, 15))  # true mean 1
    intervals = [stats.bootstrap_t(sample, 0.95, generator, resamples=499) for sample in samples]
    covered = np.mean([i.low <= 1 <= i.high for i in intervals])
    assert 0.92 <= covered <= 0.98  # the t interval covers about .90 here
    assert np.mean([(i.high - i.estimate) > (i.estimate - i.low) for i in intervals]) > 0.9  # longer on the side of the tail


def test_bootstrap_t_is_the_textbook_loop() -> None:
    x = [0.1, 0.5, -0.2, 0.9, 0.3, 0.4, 1.2]
    mean, error = np.mean(x), peer.sem(x)
    again = np.random.default_rng(6).integers(7, size=(199, 7))
    t = sorted((np.mean(s) - mean) / peer.sem(s) for s in np.array(x)[again])
    interval = stats.bootstrap_t(x, 0.90, np.random.default_rng(6), resamples=199)
    # 199 sorted numbers: the 5% point is the 10th, the 95% point the 190th
    assert (interval.low, interval.high) == pytest.approx((mean - t[189] * error, mean - t[9] * error), rel=1e-12)
    assert interval.p == pytest.approx((1 + sum(abs(v) >= mean / error for v in t)) / 200)


def test_bootstrap_t_agrees_with_t_on_normal_numbers_and_uses_only_its_generator() -> None:
    sample = np.random.default_rng(3).normal(0.2, 1, size=60)
    one, two = (stats.bootstrap_t(sample, 0.95, np.random.default_rng(4)) for _ in range(2))
    t = stats.paired_t(sample)
    assert one == two
    assert (one.low, one.high, one.p) == pytest.approx((t.low, t.high, t.p), abs=0.05)


def test_bootstrap_t_of_three_seeds_is_infinite_rather_than_wrong() -> None:
    interval = stats.bootstrap_t([0.1, 0.2, 0.4], 0.95, np.random.default_rng(0))
    assert (interval.low, interval.high) == (-np.inf, np.inf)


def test_tost_by_hand() -> None:
    # −1, 0, 1, 0: mean 0, s² = 2/3, se = √(1/6) = .408; margin 1: t = 2.449 on 3 degrees of freedom, one-sided p = .0459
    assert stats.tost([-1.0, 0.0, 1.0, 0.0], 1.0) == pytest.approx(0.04590, abs=5e-5)
    assert stats.tost([0.1] * 4, 0.2) == 0.0
    assert stats.tost([0.2] * 4, 0.2) == 1.0


def test_tost_is_the_larger_of_scipys_two_one_sided_tests() -> None:
    above, below = (peer.ttest_1samp(DIFF, bound, alternative=side).pvalue for bound, side in ((-0.3, "greater"), (0.3, "less")))
    assert stats.tost(DIFF, 0.3) == pytest.approx(max(above, below), rel=1e-12)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=12), st.floats(0.01, 1))
def test_tost_passes_exactly_when_the_90_percent_interval_is_inside(diff: list[float], margin: float) -> None:
    interval = stats.paired_t(diff, 0.90)
    slack = min(abs(interval.low + margin), abs(interval.high - margin))
    if slack > 1e-9:
        assert (stats.tost(diff, margin) < 0.05) == (-margin < interval.low and interval.high < margin)


def test_holm_by_hand() -> None:
    # sorted .005 .01 .03 .04 times 4 3 2 1: .02 .03 .06 .04, made increasing: .02 .03 .06 .06
    adjusted = stats.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert stats.holm({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0}
    assert stats.holm({"only": 0.04}) == {"only": 0.04}
    assert stats.holm({}) == {}


def test_iqm_and_probability_of_improvement_by_hand() -> None:
    assert stats.iqm([100.0, 1.0, 2.0, 3.0, 4.0, -50.0, 5.0, 16.0]) == pytest.approx(3.5)  # −50, 1 and 16, 100 are cut
    # (2, 5) against (1, 2, 9): 2>1, 2=2, 2<9, 5>1, 5>2, 5<9: 3 wins and a half of 6
    assert stats.probability_of_improvement([2.0, 5.0], [1.0, 2.0, 9.0]) == pytest.approx(3.5 / 6)
    x, y = np.random.default_rng(5).normal(size=(2, 20))
    u = peer.mannwhitneyu(x, y).statistic
    assert stats.probability_of_improvement(x, y) == pytest.approx(u / 400)


CALLS = {
    "paired_t": stats.paired_t,
    "bootstrap_t": lambda d: stats.bootstrap_t(d, 0.95, np.random.default_rng(0)),
    "prediction_interval": stats.prediction_interval,
    "tost": lambda d: stats.tost(d, 0.1),
    "iqm": stats.iqm,
    "probability_of_improvement": lambda d: stats.probability_of_improvement(d, [1.0, 2.0]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ([1.0], "at least 2"),
        ([], "at least 2"),
        ([1.0, float("nan")], "1 of 2"),
        ([1.0, float("inf"), 2.0], "1 of 3"),
        ([[1.0, 2.0]], "at least 2"),
    ],
)
def test_a_sample_that_cannot_be_used_is_one_sentence(name: str, sample: list, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        CALLS[name](sample)
    assert str(error.value).startswith(name)


def test_parameters_out_of_range() -> None:
    with pytest.raises(UserError, match="level is 95"):
        stats.paired_t(DIFF, 95)
    with pytest.raises(UserError, match="margin is 0"):
        stats.tost(DIFF, 0)
    with pytest.raises(UserError, match="'b' is nan"):
        stats.holm({"a": 0.1, "b": float("nan")})
    with pytest.raises(UserError, match="resamples is 10"):
        stats.bootstrap_t(DIFF, 0.95, np.random.default_rng(0), resamples=10)
