"""What is measured: the relative difference of loss and gradient between our formula and a peer's own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from grpo_repro.critic import Critic
from grpo_repro.objective import Objective, loss, score
from grpo_repro.spec import base, unbind
from grpo_repro.types import Forward, Norm
from parity.batches import Batch
from parity.report import label

FP64, FP32 = 1e-10, 1e-5  # agreement: the relative norm of the difference that is allowed
SEEDS = (0, 1, 2)
ALIVE = 1e-6  # less than this, in loss terms or in gradient, and two zeros would agree


class Cannot(Exception):
    """The framework has no such option: (option of ours, why)."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option}: {why}")
        self.option, self.why = option, why


@dataclass(frozen=True)
class Out:
    """Loss, gradient (of all leaves, flat), and the sum of the absolute values of the loss's terms: what its error is relative to."""

    loss: Tensor
    gradient: Tensor
    size: float = float("nan")


Run = Callable[[Batch], Out]


@dataclass(frozen=True)
class Expressed:
    """An Objective in a framework's own words."""

    run: Run
    options: dict[str, Any]  # the framework's settings, as a person would write them
    bar: float = FP64
    compared: str = "loss and gradient"  # or "gradient", where the surrogates differ by a constant
    ours: Objective | None = None  # our side, where an ε had to be converted
    converted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deviation:
    """The same words, another number. `ours` and `peer` have the settings a person would call the same.

    With `agrees` in place of `reason` it is a further agreement, of something that no Objective says (micro-batches, ragged groups).
    """

    option: str
    reason: str  # one sentence
    ours: Run
    peer: Run
    converted: Run | None = None  # our side (or theirs, `converted_peer`) once the difference is taken out
    converted_peer: Run | None = None
    bar: float = FP64
    kind: str = "off_policy"
    compared: str = "loss and gradient"
    agrees: str = ""


@dataclass(frozen=True)
class Peer:
    """A framework: what it can express, and the rollouts it takes."""

    name: str
    package: str
    express: Callable[[Objective, str], Expressed]  # (objective, kind of batch); raises Cannot
    rollout: Callable[..., Batch]


def out(total: Tensor, leaves: list[Tensor], size: float = float("nan")) -> Out:
    gradients = torch.autograd.grad(total, leaves)
    return Out(total.detach().double(), torch.cat([g.double().flatten() for g in gradients]), size)


def ours(objective: Objective, *, scale: Callable[[Batch], float] = lambda batch: 1.0) -> Run:
    """Our own `score` and `loss`, from raw rewards to the gradient of the leaves."""

    def run(batch: Batch) -> Out:
        leaves, logp_NT = batch.fresh()
        scored = score(objective, batch.b)
        total, parts = loss(objective, Forward(logp_NT=logp_NT[scored.row_K]), scored.b, Norm.of(scored.b))
        terms_NT = parts.weight_NT * (parts.gain_NT.abs() + parts.kl_NT.abs()).masked_fill(~scored.b.mask_NT, 0.0)
        return out(scale(batch) * total, leaves, scale(batch) * float(terms_NT.sum()))

    return run


def value_loss(eps_clip: float) -> Run:
    """Our critic's loss. The leaf stands for the values, the reference's log-probs for their targets: any numbers do."""

    def run(batch: Batch) -> Out:
        leaves, value_NT = batch.fresh()
        b = replace(batch.b, target_NT=batch.b.ref_NT)
        total = Critic(torch.nn.Linear(1, 1), eps_clip, coef=1.0, detach=True).loss(value_NT, b, Norm.of(b))
        return out(total, leaves, float(total))

    return run


def difference(a: Out, b: Out, compared: str = "loss and gradient") -> dict[str, float]:
    """Relative differences; `a` is ours and sets the scale."""
    gradient = float((a.gradient - b.gradient).norm() / a.gradient.norm())
    value = float((a.loss - b.loss).abs()) / a.size
    return {"gradient": gradient} | ({"loss": value} if compared != "gradient" else {})


def worst(run_a: Run, run_b: Run, batches: list[Batch], compared: str) -> tuple[dict[str, float], dict[str, float]]:
    """The largest differences over the batches, and the first batch's own numbers. Raises ValueError where 0 would equal 0."""
    pairs = [(run_a(batch), run_b(batch)) for batch in batches]
    for a, b in pairs:
        if not (a.size > ALIVE and a.gradient.norm() > ALIVE and b.gradient.norm() > ALIVE):
            raise ValueError("nothing to compare: the loss's terms or a gradient are zero")
    found = [difference(a, b, compared) for a, b in pairs]
    first = {"loss": float(pairs[0][0].loss), "gradient_norm": float(pairs[0][0].gradient.norm())}
    return {k: max(d[k] for d in found) if all(d[k] == d[k] for d in found) else float("nan") for k in found[0]}, first


def names(objective: Objective) -> list[str]:
    """Every option of an Objective, e.g. "clip.ppo" or "correction.mask·token"; gates are listed one by one."""
    found = []
    for f in fields(objective):
        value = getattr(objective, f.name)
        for bound in value if isinstance(value, tuple) else (value,):
            spec = unbind(bound)
            found.append(f"{f.name}.{label(base(bound), spec if isinstance(spec, dict) else {})}")
    return found


def specs(objective: Objective) -> dict[str, Any]:
    """The slots that differ from the plainest Objective, as YAML would say them."""

    def said(value: Any) -> Any:
        return [unbind(v) for v in value] if isinstance(value, tuple) else unbind(value)

    plain = Objective()
    every = {f.name: (said(getattr(objective, f.name)), said(getattr(plain, f.name))) for f in fields(objective)}
    shown = ("ratio", "clip", "advantage", "aggregation")
    return {slot: spec for slot, (spec, default) in every.items() if spec != default or slot in shown}


def parts(objective: Objective, slot: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a slot's variant."""
    bound = getattr(objective, slot)
    spec = unbind(bound)
    return (spec, {}) if isinstance(spec, str) else (base(bound).__name__, {k: v for k, v in spec.items() if k != "name"})


def swap(objective: Objective, slot: str, *, others: dict[str, tuple[Any, Any]]) -> Objective:
    """The same Objective with another variant in one slot: to see that the slot matters on these batches."""
    first, second = others[slot]
    current = getattr(objective, slot)
    same = current == () if slot == "gate" else first != () and base(current) is base(first)
    return replace(objective, **{slot: second if same else first})
