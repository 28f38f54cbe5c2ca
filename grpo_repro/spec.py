"""From what YAML says to a function with its parameters bound, and back. One mechanism for knobs, tasks and policies."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from grpo_repro.types import UserError

Spec = str | dict[str, Any]
MAPPING, LIST = "a mapping {key: value, …}", "a list […]"
KINDS = {"model_type": MAPPING, "dict_type": MAPPING, "list_type": LIST, "tuple_type": LIST}  # pydantic's words → YAML's


def public(module: Any) -> dict[str, Callable[..., Any]]:
    """Every public function defined in a module, by name, in the order of the file."""
    own = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    return {name: f for name, f in own.items() if not name.startswith("_")}


def bind(what: str, known: Mapping[str, Callable[..., Any]], spec: Spec | Mapping[str, Any]) -> Callable[..., Any]:
    """`ppo` or `{name: ppo, eps_low: .2}` → the function of that name with its keyword-only parameters bound and checked.

    Raises UserError for an unknown name, an unknown parameter, a value out of range or values that exclude each other (the
    variant's `validate`), and says what is allowed.
    """
    params = dict(spec) if isinstance(spec, Mapping) else {}
    name = params.pop("name", None) if isinstance(spec, Mapping) else spec
    if not isinstance(name, str) or name not in known:
        raise UserError(f"{what}: there is no variant {name!r}{nearest(str(name), known)}; valid: {', '.join(known)}.")
    function = known[name]
    accepted = parameters(function)
    if unknown := [p for p in params if p not in accepted]:
        takes = ", ".join(accepted) or "none"
        raise UserError(f"{what}.{name}: unknown parameter {unknown[0]!r}{nearest(unknown[0], accepted)}; it takes: {takes}.")
    fields = {p: (a.annotation, ... if a.default is inspect.Parameter.empty else a.default) for p, a in accepted.items()}
    model = create_model(name, __config__=ConfigDict(strict=True, extra="forbid"), **fields)  # type: ignore[call-overload]
    try:
        values = model(**params).model_dump()
    except ValidationError as error:
        raise UserError(f"{what}.{name}.{problem(error)}") from None
    if (validate := getattr(function, "validate", None)) and (wrong := validate(**values)):
        raise UserError(f"{what}.{name}: {wrong}.")
    return functools.partial(function, **values) if values else function


def unbind(bound: Callable[..., Any], *, brief: bool = False) -> Spec:
    """The inverse of `bind`, with every parameter written out; `brief`: only those that differ from their default."""
    function = base(bound)
    values = bound.keywords if isinstance(bound, functools.partial) else {}
    defaults = {k: p.default for k, p in parameters(function).items() if p.default is not inspect.Parameter.empty}
    params = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]} if brief else {**defaults, **values}
    return {"name": function.__name__, **params} if params else str(function.__name__)


def base(bound: Callable[..., Any]) -> Any:
    """The function itself, under any bound parameters."""
    return bound.func if isinstance(bound, functools.partial) else bound


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters: what YAML may set (`state` is the loop's). Annotations are evaluated."""
    signature = inspect.signature(function, eval_str=True)
    return {k: p for k, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and k != "state"}


def problem(error: ValidationError) -> str:
    """The first thing pydantic found, as `where: what, not value.`"""
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"]) or "value"
    if first["type"] == "missing":
        return f"{where}: is missing and has no default; give it a value."
    if first["type"] in KINDS:
        return f"{where}: is {KINDS[first['type']]}, not {first['input']!r}."
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}."


def nearest(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
