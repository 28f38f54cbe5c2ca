"""The look of every figure: colours of arms, the style, room for title and caption, the generated caption, and files.

Arms look the same in every figure of the repository: the place of an arm in `arms` (the ablation's order, the baseline first)
fixes colour, line style and marker, so that a figure is still read in grey.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from grpo_repro.types import UserError

# Okabe & Ito's colour-blind safe colours, the dark and the light ones in turn.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
LINES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DPI = 150
PNG_METADATA: dict[str, Any] = {"Software": None}  # no version of matplotlib in the bytes
SVG_METADATA: dict[str, Any] = {"Date": None, "Creator": None}
SIZE = 10.0  # points; nothing is smaller than 9


class Look(NamedTuple):
    color: str
    linestyle: Any
    marker: str
    place: int


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """Colour, line style and marker by arm; they repeat only together, after 280 arms."""
    return {arm: Look(COLOURS[i % 7], LINES[i % 5], MARKERS[i % 8], i) for i, arm in enumerate(arms)}


@contextmanager
def style() -> Iterator[None]:
    """The repository's look, inside a `with` only: importing this module changes no setting of matplotlib."""
    settings = sns.axes_style("ticks") | {
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same letters on every machine
        "font.size": SIZE,
        "axes.titlesize": SIZE + 1,
        "axes.titlelocation": "left",
        "axes.labelsize": SIZE,
        "xtick.labelsize": SIZE - 0.5,
        "ytick.labelsize": SIZE - 0.5,
        "legend.fontsize": SIZE,
        "legend.frameon": False,
        "axes.grid": True,
        "grid.color": "#E6E6E6",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "grpo_repro",  # otherwise the ids in an SVG are random
        "svg.fonttype": "path",
    }
    with mpl.rc_context(settings):
        yield


class Plot(Figure):
    """A figure without pyplot, which would keep it and show it twice; as the last value of a notebook's cell it shows itself."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        with style():
            self.savefig(picture, format="png", metadata=PNG_METADATA)
        return picture.getvalue()


def new_figure(width: float, height: float, title: str, caption: str) -> Figure:
    """An empty figure, in inches, with its title and its caption; the constrained layout keeps room for both."""
    fig = Plot(figsize=(width, height), layout="constrained")
    if title:
        lines = textwrap.fill(title, int(width * 72 / (12 * 0.66)))  # how many letters fit at 12 points, bold
        fig.suptitle(lines, x=0.01, ha="left", fontsize=12, weight="bold")
    lines = textwrap.fill(caption, int(width * 72 / (9 * 0.56)))
    fig.supxlabel(lines, x=0.01, ha="left", fontsize=9, color="#444444")
    return fig


def tight(ax: Axes, seen: ArrayLike, seeds: int) -> None:
    """With two seeds a t interval reaches 6 times their distance to either side: the axis then holds what was seen, no more."""
    values = np.asarray(seen, dtype=float)
    if seeds == 2 and np.isfinite(values).any():
        low, high = np.nanmin(values), np.nanmax(values)
        ax.set_ylim(low - 0.1 * (high - low or 1.0), high + 0.1 * (high - low or 1.0))


def finish(fig: Figure) -> Figure:
    """Lay out once, inside the style: drawing again, elsewhere or at another size, then changes nothing."""
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    return fig


def caption(provenance: Mapping[str, Any], n_seeds: int, interval: str = "95% t interval over seeds") -> str:
    """The sentence under a figure: seeds, kind of interval, commit (and whether the tree had changes), profile where recorded.

    A commit of None (not a git checkout) is said to be unknown. Raises UserError where the provenance has no such key.
    """
    if "commit" not in provenance:
        raise UserError("caption: the provenance has no `commit`; record the runs again with grpo-repro, which writes it.")
    if n_seeds < 1:
        raise UserError(f"caption: a figure of {n_seeds} seeds shows no run; give the number of seeds drawn.")
    seeds = "1 seed, no interval" if n_seeds == 1 else f"{n_seeds} seeds, {interval}"
    profile = f"Profile {provenance['profile']}. " if provenance.get("profile") else ""
    dirty = " with uncommitted changes" if provenance.get("dirty") else ""
    commit = f"Commit {provenance['commit'][:10]}{dirty}" if provenance["commit"] else "Commit unknown (not a git checkout)"
    return f"{seeds}. {profile}{commit}."


def save(fig: Figure, path: Path | str) -> tuple[Path, Path]:
    """Write `path`.png (150 dpi) and `path`.svg: the same bytes for the same figure, each in full or not at all.

    Raises UserError where the folder cannot be written.
    """
    written = []
    for suffix, metadata in ((".png", PNG_METADATA), (".svg", SVG_METADATA)):
        target = Path(f"{path}{suffix}")
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with style():
                fig.savefig(part, format=suffix[1:], metadata=metadata)
            os.replace(part, target)
        except OSError as error:
            raise UserError(f"figures: cannot write {target} ({error.strerror}); choose a folder you may write to.") from error
        finally:
            if part.exists():  # also after Ctrl-C
                part.unlink()
        written.append(target)
    return written[0], written[1]
