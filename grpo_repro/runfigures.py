"""The figure of a run's report that no ablation has: shares before and after, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from grpo_repro.style import finish, new_figure, style
from grpo_repro.types import UserError

LOOKS = {"before": ("o", "white", -0.14), "after": ("D", "#0072B2", 0.14)}  # marker, fill, place in the row


def before_after(gains: pd.DataFrame, parts: Mapping[str, str], caption: str, *, title: str = "") -> Figure:
    """A row a part and level of `seeds.Seeds.gains`, in its order: an open circle before, a filled diamond after, each with its interval.

    `parts` has the words for the parts; the axis is a share in [0, 1]. Raises UserError without rows.
    """
    if gains.empty:
        raise UserError("before_after: there are no answers to draw; the run must make an exam before and after.")
    with style():
        fig = new_figure(7.5, 0.42 * len(gains) + 1.9, title, caption)
        ax = fig.add_subplot()
        for y, row in enumerate(gains.to_dict("records")):
            for when, (marker, fill, shift) in LOOKS.items():
                ax.plot([row[f"{when}_low"], row[f"{when}_high"]], [y + shift] * 2, color="black", lw=1.4, zorder=2)
                ax.plot(row[when], y + shift, ls="", marker=marker, ms=6.5, color=fill, mec="black", mew=1.2, zorder=3)
            ax.plot([row[when] for when in LOOKS], [y + shift for *_, shift in LOOKS.values()], color="#888888", lw=1, zorder=1)
        ax.set_yticks(range(len(gains)), [f"{parts[r['part']]}, {r['level']}" for r in gains.to_dict("records")])
        ax.set(xlim=(-0.02, 1.02), ylim=(len(gains) - 0.4, -0.6), xlabel="Answered right (share of prompts, mean of seeds)")
        for y in (gains["part"] != gains["part"].shift()).to_numpy().nonzero()[0][1:]:
            ax.axhline(y - 0.5, color="#888888", lw=0.8)
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", length=0)
        handles = [
            Line2D([], [], marker=marker, ms=6.5, color="black", mfc=fill, mec="black", mew=1.2, lw=1.4, label=f"{when} training")
            for when, (marker, fill, _) in LOOKS.items()
        ]
        fig.legend(handles=handles, loc="outside right upper", title="95% Wilson", alignment="left")
        return finish(fig)
