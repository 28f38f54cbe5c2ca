"""Figures from numbers: frames, results and curves in, matplotlib Figures out. Nothing here trains or reads a file.

The plots; their common look, captions and files are in `style.py` and are called from here too (`figures.save(…)`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from grpo_repro import stats
from grpo_repro.claims import Result, Window, interval_text, number, windowed
from grpo_repro.style import SIZE, Look, caption, finish, looks, new_figure, save, style, tight
from grpo_repro.types import UserError

__all__ = ["caption", "curves", "dots", "effects", "lines", "looks", "matrix", "save", "style"]

FILLS: tuple[dict[str, Any], ...] = (  # of a matrix's cells: cut, passes, damped, pulled back
    {"facecolor": "#F6D5BF", "edgecolor": "#E3B697", "hatch": "//"},
    {"facecolor": "#CFE6F5", "edgecolor": "#CFE6F5", "hatch": None},
    {"facecolor": "#F3EFD9", "edgecolor": "#DDD6B0", "hatch": ".."},
    {"facecolor": "#D8E8D6", "edgecolor": "#B7CFB4", "hatch": "\\\\"},
)


def curves(
    frame: pd.DataFrame,
    panel: str,
    metrics: Sequence[tuple[str, str]],
    arms: Sequence[str],
    caption: str,
    *,
    title: str = "",
    per_seed: bool = False,
    level: float = 0.95,
    legend: str = "Arm",
) -> Figure:
    """Learning curves, a plot a metric: mean over seeds with its t band; `per_seed` adds a thin line a seed.

    `metrics` pairs a column with its axis label, unit included. Raises UserError where the panel or a column is not in the frame.
    """
    here, shown = _panel(frame, panel, [column for column, _ in metrics], arms)
    columns = min(len(metrics), 3)
    rows = -(-len(metrics) // columns)
    with style():
        room = 0.9 + 0.08 * max(len(arm) for arm in shown)  # inches, of the legend
        fig = new_figure(max(3.4 * columns + room, 5.5), 2.7 * rows + 1.1, title, caption)
        axes = fig.subplots(rows, columns, squeeze=False).ravel()
        for ax, (column, label) in zip(axes, metrics, strict=False):
            for arm in shown:
                _curve(ax, here[here.arm == arm], column, looks(arms)[arm], arm, per_seed, level)
            tight(ax, here[column][here.arm.isin(shown)], here.seed.nunique())
            ax.set(xlabel="Step (rollouts)", ylabel=label)
            ax.xaxis.get_major_locator().set_params(integer=True)
        for ax in axes[len(metrics) :]:
            ax.remove()
        handles = [_handle(looks(arms)[arm], arm) for arm in shown]
        fig.legend(handles=handles, loc="outside right upper", title=legend, alignment="left", handlelength=3)
        return finish(fig)


def _curve(ax: Axes, rows: pd.DataFrame, column: str, look: Look, arm: str, per_seed: bool, level: float) -> None:
    recorded = rows.dropna(subset=[column])
    if recorded.empty:
        return
    steps = sorted(recorded["step"].unique())
    by_step = {step: recorded[column][recorded["step"] == step].to_numpy(float) for step in steps}
    bands = [stats.paired_t(by_step[s], level) if len(by_step[s]) > 1 else None for s in steps]
    mean = [float(by_step[s].mean()) for s in steps]
    low = [band.low if band else np.nan for band in bands]
    high = [band.high if band else np.nan for band in bands]
    if per_seed:
        for _, run in recorded.groupby("seed"):
            ax.plot(run.step, run[column], color=look.color, lw=0.5, alpha=0.35, zorder=1)
    ax.fill_between(steps, low, high, color=look.color, alpha=0.15, lw=0, zorder=1)
    every = max(1, len(steps) // 6)
    marked = (look.place % every, every)  # arms that coincide are still told apart by their markers
    ax.plot(steps, mean, color=look.color, ls=look.linestyle, marker=look.marker, markevery=marked, ms=4.5, lw=1.7, label=arm)


def effects(results: Sequence[Result], labels: Mapping[str, str], caption: str, *, title: str = "") -> Figure:
    """Forest plot: a row a claim with its interval, a dot a seed, 0 and the ±sesoi band; numbers and verdict at the right.

    Claims on the same metric share an axis, labelled by `labels[metric]` (unit included). A claim that was not measured keeps its
    row, with the reason. Raises UserError without results or where a metric has no label.
    """
    if not results:
        raise UserError("effects: there are no results to draw; give at least one claim.")
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.claim.metric, []).append(result)
    if bare := [metric for metric in groups if metric not in labels]:
        raise UserError(f"effects: the metric {bare[0]!r} has no axis label; add it, with its unit, to `labels`.")
    heights = [len(group) for group in groups.values()]
    with style():
        fig = new_figure(10.5, 0.55 * sum(heights) + 0.7 * len(groups) + 1.3, title, caption)
        grid = fig.add_gridspec(len(groups) + 1, 1, height_ratios=[*heights, 0.3])
        for row, (metric, group) in enumerate(groups.items()):
            ax = fig.add_subplot(grid[row])
            for y, result in enumerate(group):
                _effect(ax, y, result)
            ax.axvline(0, color="black", lw=1, zorder=1)
            ax.set(ylim=(len(group) - 0.5, -0.5), xlabel=f"Difference in {labels[metric]}")
            ax.set_yticks(range(len(group)), [_row_label(result) for result in group])
            ax.tick_params(axis="y", length=0)
            ax.grid(False, axis="y")
            ax.autoscale_view(scaley=False)
        below = fig.add_subplot(grid[-1])
        below.axis("off")
        below.legend(handles=_effect_key(results[0].level), loc="center", ncols=3, handletextpad=0.5)
        return finish(fig)


def _row_label(result: Result) -> str:
    claim = result.claim
    return f"{claim.comparison}{' (primary)' if claim.primary else ''}\n{claim.panel}, {claim.window}, predicted {claim.predict}"


def _effect(ax: Axes, y: int, result: Result) -> None:
    sesoi = result.claim.sesoi
    ax.add_patch(Rectangle((-sesoi, y - 0.4), 2 * sesoi, 0.8, color="#DDDDDD", lw=0, zorder=0))
    ax.update_datalim([(-sesoi, y), (sesoi, y)])
    text = result.reason
    if result.estimate is not None:
        spread_n = np.linspace(-0.18, 0.18, result.n) if result.n > 1 else np.zeros(1)
        ax.plot(result.differences, y + spread_n, ls="", marker="o", ms=3.5, color="#0072B2", alpha=0.55, mew=0, zorder=2)
        if result.low is not None and result.high is not None:
            ax.plot([result.low, result.high], [y, y], color="black", lw=2.2, solid_capstyle="butt", zorder=3)
        ax.plot(result.estimate, y, marker="D", ms=6.5, color="white", mec="black", mew=1.4, zorder=4)
        text = f"{number(result.estimate, signed=True)} {interval_text(result)}, n = {result.n}"
    at: dict[str, Any] = {"xy": (1.02, y), "xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
    ax.annotate(result.verdict, xytext=(0, 7), weight="bold", **at)
    ax.annotate(textwrap.shorten(text, 54, placeholder=" …"), xytext=(0, -7), size=SIZE - 0.5, **at)


def _effect_key(level: float) -> list[Any]:
    return [
        Line2D(
            [], [], marker="D", ms=6.5, color="black", mfc="white", mew=1.4, lw=2.2, label=f"mean, {level:.0%} paired t interval"
        ),
        Line2D([], [], ls="", marker="o", ms=3.5, color="#0072B2", alpha=0.55, label="one seed"),
        Patch(color="#DDDDDD", label="smaller than the smallest effect of interest"),
    ]


def dots(
    frame: pd.DataFrame,
    panel: str,
    metric: tuple[str, str],
    window: Window,
    arms: Sequence[str],
    caption: str,
    *,
    title: str = "",
    level: float = 0.95,
) -> Figure:
    """A dot a seed by arm, the mean of the metric over the window; grey lines join the same seed, a bar is the mean's t interval.

    `metric` pairs a column with its axis label, unit included. Errors as `curves`.
    """
    column, label = metric
    _, shown = _panel(frame, panel, [column], arms)
    means = pd.DataFrame({arm: windowed(frame, panel, arm, column, window).mean(axis=1) for arm in shown})
    with style():
        letters = max(14, *(len(word) for arm in shown for word in arm.split()))  # of a line of a tick label: no word is broken
        fig = new_figure(max(0.09 * letters * len(shown) + 1.0, 5.0), 4.2, title, caption)
        ax = fig.add_subplot()
        for _, run in means.iterrows():
            ax.plot(range(len(shown)), run, color="#BBBBBB", lw=0.8, zorder=1)
        for x, arm in enumerate(shown):
            look, values = looks(arms)[arm], means[arm].dropna()
            ax.plot([x] * len(values), values, ls="", marker=look.marker, color=look.color, ms=5, alpha=0.7, mew=0, zorder=2)
            if len(values) > 1:
                band = stats.paired_t(values.to_numpy(), level)
                error = [[band.estimate - band.low], [band.high - band.estimate]]
                ax.errorbar(
                    x + 0.18, band.estimate, error, color=look.color, marker="_", ms=11, mew=2, capsize=4, lw=1.8, zorder=3
                )
        tight(ax, means, len(means))
        ax.set(ylabel=f"{label}, {window}", xlim=(-0.5, len(shown) - 0.5))
        ax.set_xticks(range(len(shown)), [textwrap.fill(arm, letters) for arm in shown])
        ax.grid(False, axis="x")
        return finish(fig)


def matrix(
    values: Sequence[Sequence[int]],
    rows: Sequence[str],
    columns: Sequence[str],
    annotations: Sequence[Sequence[str]],
    caption: str,
    *,
    title: str = "",
    words: Sequence[str] = ("cut", "passes", "damped", "pulled back"),
) -> Figure:
    """A table of cells: `values` says what becomes of the gradient (colour and bold word), `annotations` is the cell's text.

    0 or False: cut, 1 or True: passes, 2: damped, 3: pulled back. All are R rows of C cells; all but those that pass are hatched
    too, so that grey print tells them apart. Raises UserError where a shape differs.
    """
    shape = (len(rows), len(columns))
    for name, cells in (("values", values), ("annotations", annotations)):
        if len(cells) != shape[0] or any(len(row) != shape[1] for row in cells):
            raise UserError(f"matrix: `{name}` must be {shape[0]} rows of {shape[1]} cells, as the labels are.")
    lines = max(text.count("\n") + 1 for row in annotations for text in row)
    with style():
        fig = new_figure(2.5 * shape[1] + 1.5, (0.24 * lines + 0.6) * shape[0] + 1.1, title, caption)
        ax = fig.add_subplot()
        for r in range(shape[0]):
            for c in range(shape[1]):
                state = int(values[r][c])
                fill: dict[str, Any] = {**FILLS[state], "lw": 0}
                ax.add_patch(Rectangle((c + 0.02, r + 0.03), 0.96, 0.94, **fill))
                box = {"facecolor": fill["facecolor"], "edgecolor": "none", "pad": 2}
                half = 0.68 * SIZE * (annotations[r][c].count("\n") + 2)  # of the height of all lines, in points
                at: dict[str, Any] = {
                    "xy": (c + 0.5, r + 0.5),
                    "textcoords": "offset points",
                    "ha": "center",
                    "linespacing": 1.35,
                }
                ax.annotate(annotations[r][c], xytext=(0, -half), va="bottom", bbox=box, **at)
                ax.annotate(words[state], xytext=(0, half), va="top", weight="bold", bbox=box, **at)
        ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0))
        ax.set_xticks(np.arange(shape[1]) + 0.5, columns)
        ax.set_yticks(np.arange(shape[0]) + 0.5, rows)
        ax.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=SIZE)
        ax.grid(False)
        sns.despine(ax=ax, left=True, bottom=True)
        return finish(fig)


def lines(
    panels: Sequence[tuple[str, str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]],
    caption: str,
    *,
    title: str = "",
    log: tuple[str, ...] = (),
    level: float | None = None,
    legend: str = "",
) -> Figure:
    """Exact curves, a plot a panel (x label, y label, name → (x, y)); a name looks alike in all of them.

    `log` names the axes that are logarithmic, "x" or "y"; `level` draws a thin grey line at that height.
    """
    names = list(dict.fromkeys(name for *_, drawn in panels for name in drawn))
    with style():
        room = 0.9 + 0.08 * max(map(len, [*names, legend]))  # inches, of the legend
        fig = new_figure(max(4.0 * len(panels) + room, 6.5), 4.0, title, caption)
        axes = fig.subplots(1, len(panels), squeeze=False).ravel()
        for ax, (xlabel, ylabel, drawn) in zip(axes, panels, strict=True):
            for name, (x, y) in drawn.items():
                look, every = looks(names)[name], max(1, len(x) // 6)
                marked = (look.place % every, every)
                ax.plot(x, y, color=look.color, ls=look.linestyle, marker=look.marker, markevery=marked, ms=4.5, lw=1.7)
            if level is not None:
                ax.axhline(level, color="#888888", lw=0.8, zorder=0)
            ax.set(xlabel=xlabel, ylabel=ylabel, **{f"{axis}scale": "log" for axis in log})
        handles = [_handle(looks(names)[name], name) for name in names]
        fig.legend(handles=handles, loc="outside right center", title=legend or None, alignment="left", handlelength=3)
        return finish(fig)


def _handle(look: Look, label: str) -> Line2D:
    return Line2D([], [], color=look.color, ls=look.linestyle, marker=look.marker, ms=4.5, lw=1.7, label=label)


def _panel(frame: pd.DataFrame, panel: str, columns: Sequence[str], arms: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the panel, and those of `arms` that ran in it, in their order."""
    here = frame[frame.panel == panel]
    if here.empty:
        raise UserError(f"figures: there are no runs of the panel {panel!r}; the panels are {sorted(set(frame.panel))}.")
    if absent := [column for column in columns if column not in frame.columns]:
        raise UserError(f"figures: the runs have no metric {absent[0]!r}; record it, or draw another.")
    shown = [arm for arm in arms if arm in set(here.arm)]
    if not shown:
        raise UserError(
            f"figures: none of the arms {list(arms)} ran in the panel {panel!r}; its arms are {sorted(set(here.arm))}."
        )
    return here, shown
