"""Figures of a metric against how much of something an arm had: updates a rollout, steps of staleness, σ. Companion of figures.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from grpo_repro import stats
from grpo_repro.claims import Window, windowed
from grpo_repro.style import Look, finish, looks, new_figure, style, tight
from grpo_repro.types import UserError

Dose = tuple[float, str, str]  # how much, and the panel and arm that had it


def doses(
    frame: pd.DataFrame,
    families: Mapping[str, Sequence[Dose]],
    metrics: Sequence[tuple[str, str, Window]],
    xlabel: str,
    caption: str,
    *,
    title: str = "",
    even: bool = True,
    level: float = 0.95,
) -> Figure:
    """A plot a metric: its mean over the window against the dose, a line a family, with a dot a seed and the t interval.

    `metrics` holds (column, axis label with unit, window). `even` puts the doses at equal distances, as 1, 2, 4, 8 are drawn best.
    Raises UserError where an arm of a family has no runs, or a metric was not recorded.
    """
    places = sorted({x for family in families.values() for x, _, _ in family})
    at = {x: float(i) if even else x for i, x in enumerate(places)}
    with style():
        room = 0.9 + 0.08 * max(map(len, families))  # inches, of the legend
        fig = new_figure(max(3.6 * len(metrics) + room, 6.0), 3.9, title, caption)
        axes = fig.subplots(1, len(metrics), squeeze=False).ravel()
        step = (max(at.values()) - min(at.values()) or 1.0) / max(len(places) - 1, 1)
        for ax, (column, label, window) in zip(axes, metrics, strict=True):
            drawn = {n: [(at[x], _means(frame, panel, arm, column, window)) for x, panel, arm in f] for n, f in families.items()}
            for place, (name, points) in enumerate(drawn.items()):
                aside = 0.16 * step * (place - (len(families) - 1) / 2)  # families of one dose stand side by side
                _family(ax, [(x + aside, values) for x, values in points], looks(list(families))[name], level)
            seen = [values for points in drawn.values() for _, values in points]
            tight(ax, pd.concat(seen), max(map(len, seen)))
            ax.set(xlabel=xlabel, ylabel=f"{label}, {window}")
            ax.set_xticks([at[x] for x in places], [f"{x:g}" for x in places])
        if len(families) > 1:
            handles = [_key(looks(list(families))[name], name) for name in families]
            fig.legend(handles=handles, loc="outside right upper", alignment="left", handlelength=3)
        return finish(fig)


def _means(frame: pd.DataFrame, panel: str, arm: str, column: str, window: Window) -> pd.Series:
    """One number a seed."""
    if column not in frame.columns:
        raise UserError(f"doses: the runs have no metric {column!r}; record it, or draw another.")
    if frame[(frame.panel == panel) & (frame.arm == arm)].empty:
        raise UserError(f"doses: there are no runs of the arm {arm!r} in the panel {panel!r}.")
    return windowed(frame, panel, arm, column, window).mean(axis=1).dropna()


def _family(ax: Axes, points: Sequence[tuple[float, pd.Series]], look: Look, level: float) -> None:
    drawn = [(x, values) for x, values in points if len(values)]
    for x, values in drawn:
        ax.plot([x] * len(values), values, ls="", marker=look.marker, color=look.color, ms=3.5, alpha=0.55, mew=0, zorder=4)
        if len(values) > 1:
            band = stats.paired_t(values.to_numpy(), level)
            ax.plot([x, x], [band.low, band.high], color=look.color, lw=2.2, solid_capstyle="butt", zorder=2)
    means = [values.mean() for _, values in drawn]
    ax.plot([x for x, _ in drawn], means, color=look.color, ls=look.linestyle, marker=look.marker, ms=6, lw=1.3, zorder=3)


def _key(look: Look, label: str) -> Line2D:
    return Line2D([], [], color=look.color, ls=look.linestyle, marker=look.marker, ms=6, lw=1.3, label=label)
