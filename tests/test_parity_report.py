"""The committed comparison with the frameworks is whole, says what its JSON says, and covers every variant. Needs no framework."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_repro import knobs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from parity import report  # noqa: E402

FOLDER = ROOT / "results" / "reports" / "parity"
FOUND: dict[str, Any] = json.loads((FOLDER / "parity.json").read_text("utf-8"))
FRAMEWORKS = ["TRL", "verl", "OpenRLHF", "Liger"]


def changed(change: Callable[[dict[str, Any]], Any]) -> list[str]:
    """What is wrong with the findings after a change."""
    found = copy.deepcopy(FOUND)
    change(found)
    return report.problems(found)


def test_the_readme_is_what_the_json_generates():
    provenance = json.loads((FOLDER / "provenance.json").read_text("utf-8"))
    assert (FOLDER / "README.md").read_text("utf-8") == report.render(FOUND, provenance), (
        "run `make parity` and commit the report"
    )


def test_nothing_is_wrong_and_no_variant_or_preset_lacks_a_row():
    assert report.problems(FOUND) == []


def test_every_agreement_meets_its_bar_and_the_bars_are_the_promised_ones():
    assert len(FOUND["cases"]) > 300
    for case in FOUND["cases"]:
        assert case["bar"] in (1e-10, 1e-5)
        assert 0 <= max(case["difference"].values()) <= case["bar"]
        assert "gradient" in case["difference"]
        assert case["first_batch"]["gradient_norm"] > 1e-6
    assert sum(case["bar"] == 1e-10 for case in FOUND["cases"]) > 250


def test_every_deviation_has_a_size_and_most_are_converted_away():
    deviations = [d for d in FOUND["deviations"] if d["reason"]]
    for d in deviations:
        assert max(d["difference"].values()) > d["bar"]
        assert d["converted"] is None or max(d["converted"].values()) <= d["bar"]
    assert sum(d["converted"] is not None for d in deviations) > 0.8 * len(deviations)


def test_every_framework_gives_the_result_worked_by_hand():
    assert [f["name"] for f in FOUND["frameworks"]] == FRAMEWORKS
    for f in FOUND["frameworks"]:
        assert f["anchor"]["loss"] == pytest.approx(-0.05, rel=1e-5)


def test_a_new_variant_without_a_row_fails_with_a_sentence(monkeypatch: pytest.MonkeyPatch):
    def brand_new(logw_NT, now, b):
        """Not in the report."""

    known = knobs.variants
    monkeypatch.setattr(knobs, "variants", lambda slot: known(slot) | ({"brand_new": brand_new} if slot == "clip" else {}))
    wrong = [said for said in report.problems(FOUND) if "brand_new" in said]
    assert len(wrong) == len(FRAMEWORKS)
    assert any("clip.brand_new has no row for TRL: a variant or preset is new; run `make parity`" in said for said in wrong)


def test_a_lost_agreement_an_outdated_reason_and_an_idle_variant_are_seen():
    def lose(found):
        found["cases"][0]["difference"]["gradient"] = 1e-3

    def idle(found):
        for case in found["cases"]:
            case["acts"] = dict.fromkeys(case["acts"], 0.0)

    def said(change, words):
        return any(words in sentence for sentence in changed(change))

    assert said(lose, "1.0e-03 is over its bar")
    assert said(idle, "changes nothing on these batches")
    assert said(lambda found: found["deviations"][0].update(problem="no longer deviates"), "no longer deviates")
    assert said(lambda found: found["frameworks"][0]["anchor"].update(difference={"loss": 0.1}), "worked by hand")
    assert changed(lambda found: found["cases"][0]["difference"].update(gradient=float("nan")))


def test_digits_are_those_of_the_largest_difference():
    assert [report.digits(x) for x in (0.0, 9e-16, 1.1e-15, 3e-8, 0.2)] == [16, 15, 14, 7, 0]


def test_a_cell_says_what_holds():
    assert report.cell(FOUND, "TRL", "clip.soft_tanh").startswith("cannot express: ")
    assert re.match(r"agrees to 1\d digits \(\d+ configurations\)", report.cell(FOUND, "verl", "ratio.sequence"))
    cispo = report.cell(FOUND, "TRL", "clip.truncate")
    assert "deviates: CISPO's cap is epsilon_high itself, without 1+" in cispo
    assert "converted: 1" in cispo
    assert report.cell(FOUND, "TRL", "clip.brand_new") == ""


def test_every_pin_is_exact_and_is_what_was_measured():
    pins = {}
    for name in ("requirements.txt", "requirements-peers.txt"):
        for line in (ROOT / "parity" / name).read_text("utf-8").splitlines():
            if line and not line.startswith("#"):
                package, exact, version = line.partition("==")
                assert exact, line
                assert version, line
                pins[package] = version
    for f in FOUND["frameworks"]:
        assert pins[f["package"]] == f["version"]
    installed = json.loads((FOLDER / "provenance.json").read_text("utf-8"))["packages"]
    assert installed["torch"].partition("+")[0] == pins["torch"]
    assert f'"torch=={pins["torch"]}"' in (ROOT / "pyproject.toml").read_text("utf-8"), (
        "the frameworks run on the package's torch"
    )
