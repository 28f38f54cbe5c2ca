"""The catalogue is complete: whoever adds a variant or a preset documents it, or this fails."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import pytest

from grpo_repro import catalogue, cli, knobs, presets
from grpo_repro.objective import Objective
from grpo_repro.types import Share, variant

VARIANTS = [(slot, v) for slot, vs in catalogue.variants().items() for v in vs]


def test_every_slot_is_there_once() -> None:
    modules = [knobs.SLOTS[slot][0] for slot in catalogue.variants()]
    assert len(set(modules)) == len(modules)
    assert set(modules) == {module for module, _ in knobs.SLOTS.values()}


def test_the_json_has_the_promised_shape() -> None:
    """{"ratio": [{"name": "token", …}, …], …} and [{"name": "grpo", …}, …]; nothing but JSON's own types inside."""
    found = json.loads(json.dumps(catalogue.variants(), allow_nan=False))
    assert list(found)[:3] == ["ratio", "correction", "clip"]
    assert set(found) >= {"ratio", "correction", "clip", "gate", "advantage", "aggregation", "kl", "sampling", "reward"}
    assert found["ratio"][0]["name"] == "token"
    assert {slot: [v["name"] for v in vs] for slot, vs in found.items()} == {s: list(knobs.variants(s)) for s in found}
    assert json.loads(json.dumps(catalogue.algorithms(), allow_nan=False))[0]["name"] == "grpo"


@pytest.mark.parametrize("command", ["knobs", "algorithms"])
def test_what_a_person_sees_is_complete_and_narrow(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(cli, command)(as_json=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    wanted = [v["name"] for _, v in VARIANTS] if command == "knobs" else [a["name"] for a in catalogue.algorithms()]
    assert not [name for name in wanted if f"│ {name} " not in shown]
    getattr(cli, command)(as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(catalogue.variants() if command == "knobs" else catalogue.algorithms())
    )


@pytest.mark.parametrize(("slot", "v"), VARIANTS, ids=[f"{s}.{v['name']}" for s, v in VARIANTS])
def test_every_variant_says_what_it_is(slot: str, v: dict) -> None:
    for part in ("purpose", "formula", "source", "fixes", "costs"):
        assert v[part], f"{slot}.{v['name']}: its docstring has no {part}"
        assert "$$" not in v[part]
    without_year = ("theorem", "practice", "REINFORCE", "definition", "seed document", "every paper")
    assert re.search(r"\d{4}", v["source"]) or any(word in v["source"] for word in without_year), v["source"]
    for name, p in v["parameters"].items():
        assert p["type"] in ("float", "int", "str", "bool", "choice", "list"), f"{slot}.{v['name']}.{name}: {p['type']}"


def test_every_preset_says_how_it_differs_from_its_paper() -> None:
    found = catalogue.algorithms()
    assert [a["name"] for a in found] == [name for name, value in vars(presets).items() if isinstance(value, Objective)]
    for a in found:
        assert a["purpose"].endswith(".")
        assert re.search(r"\d{4}\.\d{5}|\w\.(site|net|com)/", a["source"]), f"{a['name']}: no address in {a['source']!r}"
        assert set(a["knobs"]) == set(knobs.SLOTS)
        assert a["differs"], f"{a['name']}: its docstring lacks 'Differs from the paper in:'"


@variant()
def example(
    r: float,
    *,
    eps: Share = 0.25,
    level: Literal["a", "b"] = "a",
    must: int,
    top: Share | None = None,
    note: Annotated[str, "free"] = "",
) -> float:
    r"""What it is,
    in two lines.

    $$\frac{a}
    {b}$$

    where a is b. Source: A paper (2026), Eq. 1.
    Fixes: this. And that. Costs: little.
    """
    return r


def test_a_docstring_is_taken_apart() -> None:
    assert catalogue._variant(example) == {
        "name": "example",
        "purpose": "What it is, in two lines.",
        "formula": r"\frac{a} {b}",
        "note": "where a is b.",
        "source": "A paper (2026), Eq. 1.",
        "fixes": "this. And that.",
        "costs": "little.",
        "parameters": {
            "eps": {"type": "float", "default": 0.25, "required": False, "range": "≥ 0, < 1"},
            "level": {"type": "choice", "default": "a", "required": False, "range": "a | b"},
            "top": {"type": "float", "default": None, "required": False, "range": "≥ 0, < 1 or null"},
            "must": {"type": "int", "default": None, "required": True, "range": ""},
            "note": {"type": "str", "default": "", "required": False, "range": ""},
        },
    }
