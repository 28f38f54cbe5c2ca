"""The catalogue of variants and algorithms, read from the code itself: docstrings and signatures are the only source."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at

from grpo_repro import config, knobs, presets
from grpo_repro.objective import Objective
from grpo_repro.spec import parameters

ORDER = "ratio correction clip gate step advantage transform aggregation kl sampling overlong reward".split()  # noqa: SIM905
SECTION = re.compile(r"\b(Source|Fixes|Costs):\s")
FORMULA = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)


def variants() -> dict[str, list[dict[str, Any]]]:
    """Slot → its variants: name, purpose, formula (LaTeX), note, source, fixes, costs, parameters with type, default, range."""
    return {slot: [_variant(f) for f in knobs.variants(slot).values()] for slot in ORDER}


def algorithms() -> list[dict[str, Any]]:
    """The presets: name, purpose, source, differs (from the paper), knobs (every slot written out)."""
    told = _preset_docstrings()
    found = {name: value for name, value in vars(presets).items() if isinstance(value, Objective)}
    return [{"name": name, **_preset(told.get(name, "")), "knobs": config.objective_spec(o)} for name, o in found.items()]


def symbol(slot: str) -> str:
    """The knob's number in the seed document, ① to ⑦."""
    return knobs.SLOTS[slot][1]


def _variant(function: Callable[..., Any]) -> dict[str, Any]:
    purpose, formula, rest = _split(inspect.getdoc(function) or "")
    note, *named = SECTION.split(rest)
    sections = dict(zip(named[::2], map(_line, named[1::2]), strict=True))
    return {
        "name": function.__name__,
        "purpose": purpose,
        "formula": formula,
        "note": _line(note),
        **{key.lower(): sections.get(key, "") for key in ("Source", "Fixes", "Costs")},
        "parameters": {name: _parameter(p) for name, p in parameters(function).items()},
    }


def _split(text: str) -> tuple[str, str, str]:
    """Purpose (before the formula), the formula, and what follows."""
    if found := FORMULA.search(text):
        return _line(text[: found.start()]), _line(found.group(1)), text[found.end() :]
    head, _, rest = text.partition("\n\n")
    return _line(head), "", rest


def _parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    required = parameter.default is inspect.Parameter.empty
    kind, bounds = _kind(parameter.annotation)
    return {"type": kind, "default": None if required else parameter.default, "required": required, "range": bounds}


def _kind(annotation: Any) -> tuple[str, str]:
    """(type, range) of an annotation, e.g. ("float", "≥ 0, < 1")."""
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        kind, bounds = _kind(inner)
        details = [item for extra in extras for item in getattr(extra, "metadata", [extra])]
        said = [f"{sign} {getattr(item, name):g}" for item in details for of, name, sign in SIGNS if isinstance(item, of)]
        return kind, ", ".join(filter(None, [bounds, *said]))
    if get_origin(annotation) in (UnionType, Union):
        kinds = [_kind(part) for part in get_args(annotation) if part is not NoneType]
        return " | ".join(kind for kind, _ in kinds), ", ".join(bounds for _, bounds in kinds if bounds) + " or null"
    if get_origin(annotation) is Literal:
        return "choice", " | ".join(map(str, get_args(annotation)))
    return getattr(get_origin(annotation) or annotation, "__name__", str(annotation)), ""


SIGNS = ((at.Gt, "gt", ">"), (at.Ge, "ge", "≥"), (at.Lt, "lt", "<"), (at.Le, "le", "≤"))


def _preset(text: str) -> dict[str, str]:
    head, _, differs = text.partition("Differs from the paper in:")
    purpose, _, source = _line(head).partition(". ")
    return {"purpose": purpose.rstrip(".") + ".", "source": source, "differs": _line(differs)}


def _preset_docstrings() -> dict[str, str]:
    """The string literal that follows each assignment; Python itself does not keep it."""
    body = ast.parse(inspect.getsource(presets)).body
    told = {}
    for here, after in itertools.pairwise(body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        if isinstance(here, ast.Assign) and isinstance(here.targets[0], ast.Name) and is_text:
            told[here.targets[0].id] = inspect.cleandoc(after.value.value)  # type: ignore[attr-defined]
    return told


def _line(text: str) -> str:
    return " ".join(text.split())
