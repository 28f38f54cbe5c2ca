"""The catalogue is complete: whoever adds a variant or a preset documents it, or this fails."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pytest

from grpo_repro import catalogue, knobs, presets
from grpo_repro.objective import Objective
from grpo_repro.types import Share, variant

VARIANTS = [(slot, v) for slot, vs in catalogue.variants().items() for v in vs]


def test_every_slot_is_there_once() -> None:
    modules = [knobs.SLOTS[slot][0] for slot in catalogue.variants()]
    assert len(set(modules)) == len(modules)
    assert set(modules) == {module for module, _ in knobs.SLOTS.values()}


@pytest.mark.parametrize(("slot", "v"), VARIANTS, ids=[f"{s}.{v['name']}" for s, v in VARIANTS])
def test_every_variant_says_what_it_is(slot: str, v: dict) -> None:
    for part in ("purpose", "formula", "source", "fixes", "costs"):
        assert v[part], f"{slot}.{v['name']}: its docstring has no {part}"
        assert "$$" not in v[part]
    assert re.search(r"\d{4}", v["source"]) or "theorem" in v["source"] or "practice" in v["source"] or "REINFORCE" in v["source"]
    for name, p in v["parameters"].items():
        assert p["type"] in ("float", "int", "str", "bool", "choice"), f"{slot}.{v['name']}.{name}: {p['type']}"


def test_every_preset_says_how_it_differs_from_its_paper() -> None:
    found = catalogue.algorithms()
    assert [a["name"] for a in found] == [name for name, value in vars(presets).items() if isinstance(value, Objective)]
    for a in found:
        assert a["purpose"].endswith(".")
        assert re.search(r"\d{4}\.\d{5}", a["source"]), f"{a['name']}: no arXiv id in {a['source']!r}"
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
