"""The seven knobs. One file a knob, one public function a variant, all functions of a knob with one signature.

A variant is written in YAML as its name or as `{name: ppo, eps_low: 0.2, eps_high: 0.28}`; its keyword-only parameters are the
function's own. There is no registry: the YAML word is the function's name in the knob's module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_repro.knobs import (
    advantage,
    aggregation,
    clip,
    correction,
    gate,
    kl,
    overlong,
    ratio,
    reward,
    sampling,
    step,
    transform,
)
from grpo_repro.spec import Spec, base, bind, public

# slot of the Objective → the module that holds its variants, and the seed's number of the knob
SLOTS = {
    "ratio": (ratio, "①"),
    "correction": (correction, "①"),
    "clip": (clip, "②"),
    "gate": (gate, "②"),
    "advantage": (advantage, "③"),
    "transform": (transform, "③"),
    "aggregation": (aggregation, "④"),
    "kl": (kl, "⑤"),
    "kl_in_reward": (kl, "⑤"),
    "sampling": (sampling, "⑥"),
    "overlong": (overlong, "⑥"),
    "reward": (reward, "⑦"),
    "step": (step, "②"),
}


def variants(slot: str) -> dict[str, Callable[..., Any]]:
    """Every variant that fits a slot, by its YAML name."""
    module, _ = SLOTS[slot]
    return public(module)


def resolve(slot: str, spec: Spec) -> Callable[..., Any]:
    """A slot's YAML value → the function it names, parameters bound. Raises UserError, see `spec.bind`."""
    return bind(f"objective.{slot}", variants(slot), spec)


def needs(bound: Callable[..., Any]) -> frozenset[str]:
    return getattr(base(bound), "needs", frozenset())


def traits(bound: Callable[..., Any]) -> frozenset[str]:
    return getattr(base(bound), "traits", frozenset())
