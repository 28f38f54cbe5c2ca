"""Figures of a metric against a dose, by what is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from grpo_repro import doses, stats
from grpo_repro.claims import Steps
from grpo_repro.types import UserError

WINDOW = Steps(first=1, last=2)
FAMILIES = {"clip": [(1.0, "p", "1"), (16.0, "p", "16")], "none": [(1.0, "p", "1n"), (16.0, "q", "16n")]}
HEIGHT = {"1": 1.0, "16": 5.0, "1n": 2.0, "16n": -3.0}


def runs(seeds: int = 3) -> pd.DataFrame:
    """x = height of the arm + step + seed/10; y was never recorded."""
    return pd.DataFrame(
        {"panel": panel, "arm": arm, "seed": seed, "step": step, "x": HEIGHT[arm] + step + seed / 10, "y": np.nan}
        for family in FAMILIES.values()
        for _, panel, arm in family
        for seed in range(seeds)
        for step in range(4)
    )


def draw(frame: pd.DataFrame, **changes: object) -> object:
    return doses.doses(frame, FAMILIES, [("x", "X (nats)", WINDOW)], "Updates", "A caption.", **changes)  # type: ignore[arg-type]


def test_means_intervals_and_seeds_are_drawn_at_their_doses() -> None:
    (ax,) = draw(runs()).axes  # type: ignore[attr-defined]
    lines = [line for line in ax.lines if line.get_linestyle() != "None"]
    joined = [line for line in lines if line.get_marker() not in ("None", "")]
    assert [line.get_ydata().tolist() for line in joined] == [pytest.approx([2.6, 6.6]), pytest.approx([3.6, -1.4])]
    bands = [line.get_ydata() for line in lines if line.get_marker() in ("None", "")]
    right = stats.paired_t(np.array([2.5, 2.6, 2.7]))
    assert list(bands[0]) == pytest.approx([right.low, right.high])
    dots = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert sorted(dots[0].get_ydata()) == pytest.approx([2.5, 2.6, 2.7])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "16"]
    assert ax.get_ylabel() == "X (nats), steps 1–2"
    assert ax.get_xlabel() == "Updates"
    first, second = (line.get_xdata() for line in joined)
    assert first[0] < second[0] < first[1] < second[1], "families stand side by side"
    assert np.diff(first) == pytest.approx(1), "doses are at equal distances"
    (ax,) = draw(runs(), even=False).axes  # type: ignore[attr-defined]
    assert np.diff(ax.get_xticks()) == pytest.approx(15)


def test_one_seed_has_no_interval_and_a_window_without_runs_draws_nothing() -> None:
    (ax,) = draw(runs(1)).axes  # type: ignore[attr-defined]
    assert not [line for line in ax.lines if line.get_marker() in ("None", "")]
    fig = doses.doses(runs(1), FAMILIES, [("x", "X", Steps(first=7, last=9))], "Updates", "A caption.")
    assert not any(len(line.get_xdata()) for line in fig.axes[0].lines)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="no metric 'z'"):
        doses.doses(runs(), FAMILIES, [("z", "Z", WINDOW)], "Updates", "A caption.")
    with pytest.raises(UserError, match=r"no runs of the arm '2' in the panel 'p'"):
        doses.doses(runs(), {"clip": [(2.0, "p", "2")]}, [("x", "X", WINDOW)], "Updates", "A caption.")
