"""Variants with a memory (adaptive β, running statistics): their states, a dict of numbers a slot, kept in the checkpoint's JSON."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from grpo_repro.objective import Objective
from grpo_repro.spec import base

State = dict[str, float]


def initial(objective: Objective) -> dict[str, State]:
    """Slot → state, for the slots whose variant has one."""
    return {slot: base(bound).init(**_params(bound)) for slot, bound in _stateful(objective)}


def bound(objective: Objective, states: Mapping[str, State]) -> Objective:
    """The objective with every state in its variant's hands."""
    held: dict[str, Any] = {slot: functools.partial(getattr(objective, slot), state=state) for slot, state in states.items()}
    return replace(objective, **held)


def updated(objective: Objective, states: Mapping[str, State], metrics: Mapping[str, float]) -> dict[str, State]:
    """The states after a rollout, from its metrics: `kl_old/…` is measured after the rollout's last update."""
    return {
        slot: base(variant).update(states[slot], metrics, **_params(variant))
        for slot, variant in _stateful(objective)
        if slot in states
    }


def _stateful(objective: Objective) -> list[tuple[str, Any]]:
    slots = [(f.name, getattr(objective, f.name)) for f in fields(objective) if f.name != "gate"]
    return [(name, variant) for name, variant in slots if getattr(base(variant), "init", None)]


def _params(variant: Any) -> dict[str, Any]:
    """A variant's parameters, defaults included, without its state."""
    values = variant.keywords if isinstance(variant, functools.partial) else {}
    return {k: v for k, v in {**(base(variant).__kwdefaults__ or {}), **values}.items() if k != "state"}
