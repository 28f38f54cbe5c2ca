"""The examples of notebooks/00_objective.ipynb, by hand, and what its prose says of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_repro import exact, presets, tour
from grpo_repro.knobs import advantage, aggregation, clip, correction, gate, kl, overlong, ratio, sampling, transform

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "00_objective.ipynb"
TOKENS = tour.tokens()
GRPO = replace(presets.grpo, advantage=partial(advantage.group_zscore, ddof=0, eps=0.0), kl=kl.none)


def test_the_example_by_hand() -> None:
    made = tour.table(GRPO, TOKENS)
    assert made["w"].tolist() == pytest.approx([1, 1.5, 0.5, 1.1, 5, 0.6])
    assert made["gain"].tolist() == pytest.approx([1, 1.2, 0.5, 1.1, -5, -0.8])
    assert made["weight"].tolist() == pytest.approx([1 / 8] * 4 + [1 / 4] * 2)
    assert made["∂J/∂log π"].tolist() == pytest.approx([1 / 8, 0, 0.5 / 8, 1.1 / 8, -5 / 4, 0])
    assert made.attrs["J"] == pytest.approx((1 + 1.2 + 0.5 + 1.1) / 8 + (-5 - 0.8) / 4)


@pytest.mark.parametrize(
    ("slots", "column", "values", "j"),
    [
        ({"ratio": ratio.sequence}, "w", [0.825**0.25] * 4 + [3**0.5] * 2, (0.825**0.25 - 3**0.5) / 2),
        ({"correction": correction.truncate}, "ρ", [1, 2, 1, 1, 2, 1], (1 + 2.4 + 0.5 + 1.1) / 8 - 10.8 / 4),
        ({"clip": clip.dual}, "gain", [1, 1.2, 0.5, 1.1, -3, -0.8], 3.8 / 8 - 3.8 / 4),
        (
            {"clip": clip.none, "gate": (partial(gate.dppo_tv, eps_low=0.15, eps_high=0.15),)},
            "gate",
            [1, 1, 1, 1, 1, 0],
            (1 + 1.5 + 0.5 + 1.1) / 8 - 5 / 4,
        ),
        ({"advantage": advantage.group_center}, "Â", [0.5] * 4 + [-0.5] * 2, -0.975 / 2),
        ({"advantage": partial(advantage.gae, lam=1.0, whiten=False)}, "Â", [0.5, 0.5, 0.75, 0.25, -0.5, -0.25], None),
        ({"aggregation": aggregation.token_mean}, "weight", [1 / 6] * 6, (3.8 - 5.8) / 6),
        ({"kl": partial(kl.k2, beta=2.0)}, "KL", None, None),
    ],
)
def test_each_knob_by_hand(slots: dict[str, Any], column: str, values: list[float] | None, j: float | None) -> None:
    made = tour.table(replace(GRPO, **slots), TOKENS)
    if values is not None:
        assert made[column].tolist() == pytest.approx(values)
    if j is not None:
        assert made.attrs["J"] == pytest.approx(j)
    assert (tour.turn(GRPO, replace(GRPO, **slots), TOKENS)[column].iloc[:-1].str.contains("→")).any()


def test_rows_that_are_dropped_or_hidden_say_so() -> None:
    solved = tour.responses({"hard": (1, 0, 0, 0), "solved": (1, 1, 1, 1)})
    turned = tour.turn(GRPO, replace(GRPO, sampling=sampling.drop_zero_variance), solved)
    assert turned["weight"].tolist() == ["0.125 → 0.25"] * 4 + ["0.125 → dropped"] * 4 + [""]
    assert turned["r"].tolist() == ["1", "0", "0", "0", "1", "1", "1", "1", ""]
    cut = tour.responses({"hard": (1, 0, 0, 0), "easy": (1, 1, 1, 0)}, cut=["easy 4"])
    turned = tour.turn(GRPO, replace(GRPO, overlong=overlong.mask), cut)
    assert turned["weight"].tolist() == ["0.125 → 0.143"] * 7 + ["0.125 → dropped", ""]
    assert "→" not in "".join(turned["Â"]), "hidden rows stay in the baseline"


def test_the_rank_takes_the_outlier_s_scale_away() -> None:
    example = tour.responses({"outlier": (10, 1, 0, 0)})
    plain, ranked = tour.table(GRPO, example)["Â"], tour.table(replace(GRPO, transform=transform.rank), example)["Â"]
    assert plain.iloc[1] < 0 < ranked.iloc[1]


def test_advantages_by_hand() -> None:
    made = tour.advantages({"hard": (1, 0, 0, 0), "easy": (1, 1, 1, 0)}, pass_at_k=partial(advantage.pass_at_k, k=2))
    assert made.loc["group_center"].tolist() == ["0.75", *["−0.25"] * 3, *["0.25"] * 3, "−0.75"]
    assert made.loc["leave_one_out"].tolist() == ["1", *["−0.333"] * 3, *["0.333"] * 3, "−1"]
    assert made.loc["pass_at_k"].tolist()[4:] == ["0"] * 4


def test_every_clip_has_its_four_cells() -> None:
    states, names, columns, texts = tour.two_by_two_cells()
    assert columns == ["Â = 1\nw = 5", "Â = 1\nw = 0.1", "Â = −1\nw = 5", "Â = −1\nw = 0.1"]
    cut, passes, damped, pulled = range(4)
    told = dict(zip(names, states, strict=True))
    assert told["none"] == [passes] * 4
    assert told["ppo"] == [cut, passes, passes, cut]
    assert told["dual"] == [cut, passes, cut, cut]
    assert told["truncate"] == [damped, passes, damped, passes]
    assert told["kl_penalty"] == [damped, pulled, pulled, pulled]  # w·Â − (w − 1): 5 − 4, .1 + .9, −5 − 4, −.1 + .9
    assert dict(zip(names, texts, strict=True))["kl_penalty"] == ["1 of 5", "1 of 0.1", "−9 of −5", "0.8 of −0.1"]


def test_which_divergence_each_use_descends() -> None:
    """CLAIMS A2, for another pair of policies than the notebook's."""
    for seed, scale in ((1, 1.0), (7, 0.3)):
        told = tour.kl_gradients(seed=seed, scale=scale)["so it descends"].to_dict()
        reverse = {"k2 in the loss", "k3_unbiased in the loss", "full in the loss", "k1 in the reward"}
        assert {use for use, name in told.items() if name == "KL(π_θ‖π_ref)"} == reverse
        assert {use for use, name in told.items() if name == "KL(π_ref‖π_θ)"} == {"k3 in the loss", "forward in the loss"}
        assert {use for use, name in told.items() if name == "nothing"} == {"k1 in the loss"}


def test_dead_groups_are_p_to_the_g_and_its_mirror() -> None:
    made = tour.dead_groups((2, 8), (0.18, 0.5))
    for g in (2, 8):
        assert made.loc[f"G = {g}"].tolist() == pytest.approx([0.18**g + 0.82**g, 2 * 0.5**g])


def test_numbers_in_the_notebook_s_prose() -> None:
    """1.33 between p = .05 and .5 at G = 8; 2.65 from G = 2 to 16 at p = .5; the sign of Clip-Higher's bias."""
    text = "".join("".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "markdown")
    told = tour.multipliers({"z": advantage.group_zscore}, (2, 8, 16), (0.05, 0.5))
    assert told.loc["z, G = 2"].nunique() == 1 or told.loc["z, G = 2", 0.05] == pytest.approx(told.loc["z, G = 2", 0.5])
    for number, value in (
        ("1.33", told.loc["z, G = 8", 0.05] / told.loc["z, G = 8", 0.5]),
        ("2.65", told.loc["z, G = 16", 0.5] / told.loc["z, G = 2", 0.5]),
    ):
        assert re.search(rf"\b{re.escape(number)}\b", text)
        assert f"{value:.2f}" == number
    higher = partial(clip.ppo, eps_low=0.2, eps_high=0.28)
    assert exact.noise_bias(higher, 0.08) > 0 > exact.noise_bias(higher, 0.3)
    assert exact.noise_bias(clip.truncate, 0.5) == pytest.approx(0, abs=1e-12)


def test_presets_are_shown_by_their_differences() -> None:
    made = tour.presets_against("grpo")
    assert (made.loc["grpo"] == "").all()
    assert made.loc["gspo_token", "ratio"] == "sequence_token"
    assert made.loc["dapo", "clip"] == "ppo eps_low 0.2, eps_high 0.28"


def test_the_notebook_computes_nothing_itself() -> None:
    """No function, no tensor, no outputs; one cell of parameters; it ends by writing its summary."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert not [c for c in cells if c.get("outputs")]
    assert not [text for text in code if re.search(r"\bdef \b|\blambda\b|import (torch|numpy)", text)]
    assert "write_summary(" in code[-1]
