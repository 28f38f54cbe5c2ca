"""Figures by their content: what is drawn, where, under which label; and files that are the same bytes twice."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from grpo_repro import figures, stats
from grpo_repro.claims import Claim, Result, Steps, evaluate
from grpo_repro.style import COLOURS, LINES, MARKERS
from grpo_repro.types import UserError

ARMS = ["base", "wide", "widest"]
LAST = Steps(first=5, last=5)
CAPTION = "3 seeds, 95% t interval over seeds. Commit abcdef0123."
METRICS = [("entropy", "Entropy (nats)"), ("held_out", "Held-out accuracy (share)")]


def runs(seeds: int = 3, steps: int = 6) -> pd.DataFrame:
    """entropy = 10·(place of the arm) + step + seed/10; held-out accuracy every third step."""
    return pd.DataFrame(
        {
            "panel": "peaked",
            "arm": arm,
            "seed": seed,
            "step": step,
            "entropy": 10 * i + step + seed / 10,
            "held_out": 0.5 if step % 3 == 0 else np.nan,
        }
        for i, arm in enumerate(ARMS)
        for seed in range(seeds)
        for step in range(steps)
    )


def results(**changes: object) -> list[Result]:
    plain = {
        "source": "A (2025)",
        "says": "x",
        "panel": "peaked",
        "against": "base",
        "metric": "entropy",
        "window": {"last_steps": 1},
        "predict": "greater",
        "sesoi": 2.0,
        "scope": "tiny",
        "prediction": "x",
    }
    claims = [
        Claim.model_validate({**plain, "id": "one", "arm": "wide", "primary": True}),
        Claim.model_validate({**plain, "id": "two", "arm": "widest"}),
        Claim.model_validate({**plain, "id": "three", "arm": "wide", "metric": "held_out", "window": {"first": 3, "last": 3}}),
        Claim.model_validate({**plain, "id": "four", "arm": "wide", "metric": "held_out", "window": {"first": 1, "last": 1}}),
    ]
    return evaluate(claims, runs(), decide=False)


LONG = "a caption that is far longer than the figure is wide " * 6
EXACT = {"none": ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]), "a longer name": ([1.0, 2.0, 4.0], [1.0, 0.5, 0.0])}
DRAW = {
    "curves": lambda: figures.curves(runs(), "peaked", METRICS, ARMS, CAPTION, title="Curves", per_seed=True),
    "curves of four": lambda: figures.curves(runs(), "peaked", METRICS * 2, ARMS, LONG, title="A wide title " * 12),
    "effects": lambda: figures.effects(results(), dict(METRICS), CAPTION, title="Effects"),
    "dots": lambda: figures.dots(runs(), "peaked", METRICS[0], Steps(first=1, last=2), ARMS, LONG, title="Dots"),
    "matrix": lambda: figures.matrix([[False, True]], ["w = 5"], ["Â > 0", "Â < 0"], [["gain 1", "a\nb"]], CAPTION, title="M"),
    "lines": lambda: figures.lines([("w", "weight", EXACT), ("p", "share", EXACT)], CAPTION, title="Lines", level=1.0),
    "one of lines": lambda: figures.lines([("w", "weight", EXACT)], LONG, title="A wide title " * 12, legend="Clip", log=("x",)),
}


def test_curves_draw_the_mean_of_each_arm_with_its_band() -> None:
    fig = figures.curves(runs(), "peaked", METRICS, ARMS, CAPTION, title="Curves")
    entropy, held_out = fig.axes
    assert [line.get_label() for line in entropy.lines] == ARMS
    for i, line in enumerate(entropy.lines):
        np.testing.assert_allclose(line.get_xydata(), [(step, 10 * i + step + 0.1) for step in range(6)])
    band = stats.paired_t([10.0, 10.1, 10.2])
    corners = entropy.collections[1].get_paths()[0].vertices
    np.testing.assert_allclose(sorted({round(y, 9) for x, y in corners if x == 0}), [band.low, band.high])
    assert [list(line.get_xdata()) for line in held_out.lines] == [[0, 3]] * 3  # only where it was recorded
    assert [ax.get_ylabel() for ax in fig.axes] == ["Entropy (nats)", "Held-out accuracy (share)"]
    assert {ax.get_xlabel() for ax in fig.axes} == {"Step (rollouts)"}
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ARMS
    assert (fig.get_suptitle(), fig.get_supxlabel()) == ("Curves", CAPTION)


def test_curves_of_one_seed_have_no_band_and_thin_lines_come_on_request() -> None:
    one = figures.curves(runs(seeds=1), "peaked", METRICS[:1], ARMS, CAPTION).axes[0]
    assert all(np.isnan(c.get_paths()[0].vertices).any() if c.get_paths() else True for c in one.collections)
    thin = figures.curves(runs(), "peaked", METRICS[:1], ARMS, CAPTION, per_seed=True).axes[0]
    assert len(thin.lines) == 3 + 9


def test_an_arm_looks_the_same_whoever_else_is_drawn_and_no_two_look_alike() -> None:
    frame = runs()
    fig = figures.curves(frame[frame.arm != "base"], "peaked", METRICS[:1], ARMS, CAPTION)
    assert [line.get_color() for line in fig.axes[0].lines] == list(COLOURS[1:3])
    assert [line.get_marker() for line in fig.axes[0].lines] == list(MARKERS[1:3])
    many = figures.looks([str(i) for i in range(35)])
    assert len({(look.color, look.linestyle) for look in many.values()}) == 35
    assert (many["0"].color, many["0"].linestyle) == ("#000000", "-")
    assert len(LINES) == 5


def test_effects_draw_interval_seeds_and_band() -> None:
    found = results()
    fig = figures.effects(found, dict(METRICS), CAPTION, title="Effects")
    first, second, key = fig.axes
    assert first.get_xlabel() == "Difference in Entropy (nats)"
    assert second.get_xlabel() == "Difference in Held-out accuracy (share)"
    assert [label.get_text().split("\n")[0] for label in first.get_yticklabels()] == ["wide − base (primary)", "widest − base"]
    assert [p.get_x() for p in first.patches] == [-2.0, -2.0]
    assert [p.get_width() for p in first.patches] == [4.0, 4.0]
    seeds, interval, mean = first.lines[:3]
    np.testing.assert_allclose(seeds.get_xdata(), found[0].differences)
    np.testing.assert_allclose(interval.get_xdata(), [found[0].low, found[0].high])
    np.testing.assert_allclose(np.ravel(mean.get_xdata()), 10.0)
    assert first.get_xlim()[0] < -2
    assert first.get_xlim()[1] > 20
    assert first.get_ylim() == (1.5, -0.5)
    words = [text.get_text() for text in first.texts + second.texts]
    assert words[:2] == ["preview", "+10 [+10, +10], n = 3"]
    assert words[-2:] == ["not measured", "no seed has held_out (step 1) in every arm compared"]
    assert key.get_legend().get_texts()[0].get_text() == "mean, 95% paired t interval"


def test_dots_join_the_same_seed() -> None:
    frame = runs()
    ax = figures.dots(frame, "peaked", METRICS[0], Steps(first=1, last=2), ARMS, CAPTION).axes[0]
    joined = [line.get_ydata() for line in ax.lines[:3]]
    np.testing.assert_allclose(joined, [[1.5 + seed / 10 + 10 * i for i in range(3)] for seed in range(3)])
    assert [t.get_text() for t in ax.get_xticklabels()] == ARMS
    assert ax.get_ylabel() == "Entropy (nats), steps 1–2"
    means = [np.ravel(container[0].get_ydata())[0] for container in ax.containers]
    np.testing.assert_allclose(means, [1.6, 11.6, 21.6])


def test_matrix_says_passes_or_cut_in_word_colour_and_hatch() -> None:
    values, words = [[False, True], [True, False]], [["a", "b"], ["c", "d"]]
    ax = figures.matrix(values, ["w = 5", "w = 0.1"], ["Â > 0", "Â < 0"], words, CAPTION).axes[0]
    cells = [p for p in ax.patches if isinstance(p, Rectangle)]
    assert [p.get_hatch() for p in cells] == ["//", None, None, "//"]
    assert len({p.get_facecolor() for p in cells}) == 2
    assert [t.get_text() for t in ax.texts] == ["a", "cut", "b", "passes", "c", "passes", "d", "cut"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["w = 5", "w = 0.1"]
    assert ax.get_ylim() == (2, 0)


def test_matrix_knows_four_states() -> None:
    ax = figures.matrix([[0, 1, 2, 3]], ["r"], list("abcd"), [["t"] * 4], CAPTION).axes[0]
    cells = [p for p in ax.patches if isinstance(p, Rectangle)]
    assert len({p.get_facecolor() for p in cells}) == len({p.get_hatch() for p in cells}) == 4
    assert [t.get_text() for t in ax.texts][1::2] == ["cut", "passes", "damped", "pulled back"]


def test_lines_draw_each_name_alike_in_every_panel() -> None:
    fig = DRAW["lines"]()
    drawn = [[line for line in ax.get_lines() if len(line.get_xdata()) == 3] for ax in fig.axes]
    assert [line.get_color() for line in drawn[0]] == [line.get_color() for line in drawn[1]]
    assert list(drawn[0][1].get_ydata()) == [1.0, 0.5, 0.0]
    assert [ax.get_xlabel() for ax in fig.axes] == ["w", "p"]
    assert [t.get_text() for t in fig.legends[0].get_texts()] == list(EXACT)


@pytest.mark.parametrize("name", DRAW)
def test_nothing_is_small_clipped_or_overlapping(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fig, shown = DRAW[name](), []
    draw = Text.draw

    def record(text: Text, renderer: Any) -> None:
        draw(text, renderer)
        if text.get_visible() and text.get_text().strip():
            shown.append((text.get_text(), text.get_fontsize(), text.get_window_extent(renderer)))

    monkeypatch.setattr(Text, "draw", record)
    fig.draw_without_rendering()
    assert len(shown) >= 6
    page = fig.bbox.padded(1)
    for i, (text, size, box) in enumerate(shown):
        assert size >= 9, text
        assert page.x0 <= box.x0 < box.x1 <= page.x1, text
        assert page.y0 <= box.y0 < box.y1 <= page.y1, text
        for other, _, its in shown[i + 1 :]:
            assert not box.padded(-2).overlaps(its.padded(-2)), (text, other)


@pytest.mark.parametrize("name", ["curves", "effects", "matrix"])
def test_the_same_figure_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    first = [path.read_bytes() for path in figures.save(DRAW[name](), tmp_path / "new folder" / "a")]
    fig = DRAW[name]()
    assert [[path.read_bytes() for path in figures.save(fig, tmp_path / "new folder" / "a")] for _ in range(2)] == [first, first]
    assert b"matplotlib" not in first[0]
    assert b"<dc:date>" not in first[1]
    assert sorted(p.name for p in (tmp_path / "new folder").iterdir()) == ["a.png", "a.svg"]


def test_save_writes_at_150_dpi_and_an_arm_with_a_dot_keeps_its_name(tmp_path: Path) -> None:
    fig = figures.matrix([[True]], ["r"], ["c"], [["x"]], CAPTION)
    png, svg = figures.save(fig, tmp_path / "eps_0.28")
    assert (png.name, svg.name) == ("eps_0.28.png", "eps_0.28.svg")
    width = int.from_bytes(png.read_bytes()[16:20], "big")
    assert width == int(fig.get_figwidth() * 150)


def test_a_failed_save_leaves_the_old_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fig = figures.matrix([[True]], ["r"], ["c"], [["x"]], CAPTION)
    before = [path.read_bytes() for path in figures.save(fig, tmp_path / "a")]

    def full(path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fig, "savefig", full)
    with pytest.raises(UserError, match="No space left"):
        figures.save(fig, tmp_path / "a")
    assert [(tmp_path / n).read_bytes() for n in ("a.png", "a.svg")] == before
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        figures.save(figures.matrix([[True]], ["r"], ["c"], [["x"]], CAPTION), tmp_path / "file" / "a")


def test_settings_of_matplotlib_are_left_alone() -> None:
    before = dict(mpl.rcParams)
    DRAW["curves"]()
    assert dict(mpl.rcParams) == before
    with figures.style():
        assert mpl.rcParams["svg.hashsalt"] == "grpo_repro"
    assert dict(mpl.rcParams) == before


def test_a_figure_shows_itself_in_a_notebook() -> None:
    picture = figures.matrix([[True]], ["r"], ["c"], [["x"]], CAPTION)._repr_png_()
    assert mpl.image.imread(io.BytesIO(picture)).shape[1] == 600  # 4 inches


def test_captions_are_generated() -> None:
    provenance = {"commit": "0123456789abcdef", "dirty": False, "profile": "full"}
    assert figures.caption(provenance, 10) == "10 seeds, 95% t interval over seeds. Profile full. Commit 0123456789."
    assert figures.caption({**provenance, "dirty": True}, 1) == (
        "1 seed, no interval. Profile full. Commit 0123456789 with uncommitted changes."
    )
    assert figures.caption({"commit": None}, 3, "range") == "3 seeds, range. Commit unknown (not a git checkout)."
    with pytest.raises(UserError, match="no `commit`"):
        figures.caption({}, 3)
    with pytest.raises(UserError, match="0 seeds"):
        figures.caption(provenance, 0)


def test_what_cannot_be_drawn_is_one_sentence() -> None:
    frame = runs()
    with pytest.raises(UserError, match=r"no runs of the panel 'flat'; the panels are \['peaked'\]"):
        figures.curves(frame, "flat", METRICS, ARMS, CAPTION)
    with pytest.raises(UserError, match="no metric 'depth'"):
        figures.curves(frame, "peaked", [("depth", "Depth (m)")], ARMS, CAPTION)
    with pytest.raises(UserError, match="none of the arms"):
        figures.dots(frame, "peaked", METRICS[0], Steps(first=0, last=1), ["bas"], CAPTION)
    with pytest.raises(UserError, match="no results"):
        figures.effects([], {}, CAPTION)
    with pytest.raises(UserError, match="'held_out' has no axis label"):
        figures.effects(results(), {"entropy": "entropy (nats)"}, CAPTION)
    with pytest.raises(UserError, match="`annotations` must be 1 rows of 2 cells"):
        figures.matrix([[True, False]], ["r"], ["a", "b"], [["x"]], CAPTION)


def test_with_two_seeds_the_axis_holds_what_was_seen_not_the_intervals() -> None:
    """With three it holds the intervals too."""
    for seeds in (2, 3):
        frame, metrics = runs(seeds), [("entropy", "Entropy (nats)")]
        drawn = (
            figures.curves(frame, "peaked", metrics, ARMS, CAPTION),
            figures.dots(frame, "peaked", metrics[0], LAST, ARMS, CAPTION),
        )
        for fig, low, high in zip(drawn, (0, 5), (25.1, 25.1), strict=True):
            bottom, top = fig.axes[0].get_ylim()
            assert (bottom, top) == pytest.approx((low - 0.1 * (high - low), high + 0.1 * (high - low)), abs=0.05) or seeds == 3
            assert bottom < low < high < top
    wide = runs(2).assign(entropy=lambda f: f.entropy + 3 * f.seed)
    assert figures.dots(wide, "peaked", metrics[0], LAST, ARMS, CAPTION).axes[0].get_ylim()[1] < 32
