"""⑤ The reference policy: fixed, reset to the current policy now and then, or an exponential moving average of it."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from grpo_repro.config import Reference


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False)


def refresh(
    reference: PreTrainedModel, model: PreTrainedModel, rule: Reference, step: int, optimizer: torch.optim.Optimizer
) -> bool:
    """Move the reference as the rule says, before step `step` (from 0). Returns whether it was reset.

    reset: every `every` steps π_ref ← π_θ, with `reset_optimizer` the optimiser's moments start anew (ProRL, 2505.24864).
    ema: after every step π_ref ← decay·π_ref + (1 − decay)·π_θ.
    """
    if rule.refresh == "ema" and step > 0:
        with torch.no_grad():
            for old, new in zip(reference.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 1 - rule.decay)
    if rule.refresh != "reset" or step == 0 or step % rule.every:
        return False
    with torch.no_grad():
        for old, new in zip(reference.parameters(), model.parameters(), strict=True):
            old.copy_(new)
    if rule.reset_optimizer:
        optimizer.state.clear()
    return True
