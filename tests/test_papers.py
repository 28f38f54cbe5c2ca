"""PAPERS.md says what the code does: every preset, function and number of ours in it is looked up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from batches import PRESETS

from grpo_repro import knobs, strict_yaml
from grpo_repro.config import Rollout, Scale, objective_spec
from grpo_repro.objective import Objective

TEXT = (Path(__file__).resolve().parents[1] / "PAPERS.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", TEXT, flags=re.MULTILINE | re.DOTALL))
FUNCTION = re.compile(r"`grpo_repro/knobs/(\w+)\.py:(\w+)`")
OURS = re.compile(r"`([\w.]+) = ([^`]+)`")
LOOP: dict[str, Any] = {"rollout": Rollout(), "scale": Scale()}
PLAIN = objective_spec(Objective())


def rows(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| part")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_preset_has_its_section_in_the_order_of_the_code() -> None:
    assert list(SECTIONS) == list(PRESETS)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_is_whole(name: str) -> None:
    assert SECTIONS[name].count("$$") == 2, "the paper's equation"
    assert re.search(r"\d{4}\.\d{5}|\.site/", SECTIONS[name]), "where it is from"
    for row in rows(SECTIONS[name]):
        assert len(row) == 6, row
        assert all(row), f"an empty cell: {row}"
        known = row[3]
        assert set(known.split(", ")) <= {"equation", "seen", "code", "2nd", "–"}, known
        assert known != "–" or "not known" in row[2] or "it is added to" in row[2], row


@pytest.mark.parametrize("name", SECTIONS)
def test_every_part_is_the_preset_s_own(name: str) -> None:
    """A row's function is what the preset has in that slot; what differs from the plain objective has a row."""
    spec = objective_spec(PRESETS[name])
    told = {row[0].split()[-1]: row for row in rows(SECTIONS[name]) if row[1] != "YAML"}
    for slot, row in told.items():
        assert row[0].startswith(knobs.SLOTS[slot][1])
        has = spec[slot]
        ((module, function),) = FUNCTION.findall(row[1])
        assert module == knobs.SLOTS[slot][0].__name__.rpartition(".")[2]
        assert function == (has["name"] if isinstance(has, dict) else has)
        values = {k: v for k, v in has.items() if k != "name"} if isinstance(has, dict) else {}
        assert {k: strict_yaml.parse(v) for k, v in OURS.findall(row[4])} == values
    assert {slot for slot in spec if spec[slot] != PLAIN[slot]} <= set(told)


@pytest.mark.parametrize("name", SECTIONS)
def test_numbers_of_the_loop_are_the_defaults(name: str) -> None:
    for row in rows(SECTIONS[name]):
        if row[1] == "YAML":
            ((path, value),) = OURS.findall(row[4])
            part, _, field = path.partition(".")
            assert getattr(LOOP[part], field) == strict_yaml.parse(value), row


def test_every_function_named_exists() -> None:
    exist = {(module.__name__.rpartition(".")[2], f) for slot, (module, _) in knobs.SLOTS.items() for f in knobs.variants(slot)}
    assert set(FUNCTION.findall(TEXT)) <= exist


def test_no_row_of_the_last_table_is_in_a_preset() -> None:
    last = TEXT.partition("## Variants without a preset")[2]
    used = {pair for section in SECTIONS.values() for pair in FUNCTION.findall(section)}
    assert not set(FUNCTION.findall(last)) & used
