"""The supervised start of the tiny policy: a decoder from scratch taught by demonstrations of the pair task (TESTBED.md).

A seed of an ablation includes its own warm start. Starts are cached by (task, start, steps, seed, numerics version).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from grpo_repro import NUMERICS, paths, policy
from grpo_repro.policy import Policy
from grpo_repro.tasks import Task, pairs
from grpo_repro.types import UserError

ROWS = 384
LR, BETAS, WARMUP = 4e-3, (0.9, 0.98), 50
PEAK_LR, PEAK_SHARE, PEAKED, PEAK_STEPS = 1e-3, 0.95, 0.91, 400  # continue until p(default d1) ≥ .91


def start(task: Task, kind: str, steps: int, seed: int, cache: Path, device: torch.device) -> Policy:
    """The tiny policy at its start: `scratch`, `warm`, or `peaked` (warm, then taught to prefer the default digit).

    Raises UserError when the task has no demonstrations.
    """
    if kind == "scratch":
        return policy.tiny(pairs.SYMBOLS, seed=seed, device=device)
    if task.name not in ("short", "tail"):
        raise UserError(f"policy.start {kind!r} needs a task with demonstrations (short, tail), not {task.name!r}.")
    what = {"task": task.name, "kind": kind, "steps": steps, "seed": seed, "numerics": NUMERICS}
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / "starts" / f"{task.name}-{kind}-s{seed}-{key}"
    paths.writable(folder.parent, "GRPO_REPRO_CACHE")
    with FileLock(f"{folder}.lock"):  # two workers that need one start: the second waits and loads it
        if not (folder / "config.json").is_file():
            if kind == "warm":
                made = policy.tiny(pairs.SYMBOLS, seed=seed, device=device)
                _teach(made, task, seed, steps, lr=lambda i: _warm_lr(i, steps), default_share=None)
            else:
                made = start(task, "warm", steps, seed, cache, device)
                _teach(made, task, seed + 1_000_003, PEAK_STEPS, lr=lambda i: PEAK_LR, default_share=PEAK_SHARE, until=PEAKED)
            policy.save(made, folder)
    return policy.pretrained(folder, device=device)


def share_of_default(taught: Policy, task: Task) -> float:
    """Mean probability of the default digit at the choice positions, over a fixed batch of demonstrations."""
    ids_NL, mask_NL = _batch(taught, task, np.random.default_rng(0), 96, None)
    with torch.no_grad():
        probability_NL = torch.softmax(taught.model(ids_NL).logits[:, :-1].float(), -1)[..., pairs.DEFAULT_DIGIT]
    first = int(mask_NL[0].float().argmax()) - 1
    choices = list(range(first, first + 2 * len(task.train[0].answer), 2))
    return float(probability_NL[:, choices].mean())


def _teach(
    taught: Policy,
    task: Task,
    seed: int,
    steps: int,
    lr: Callable[[int], float],
    default_share: float | None,
    until: float | None = None,
) -> None:
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(taught.model.parameters(), lr=lr(0), betas=BETAS, weight_decay=0.0, fused=True)
    for i in range(steps):
        if until is not None and share_of_default(taught, task) >= until:
            return
        ids_NL, mask_NL = _batch(taught, task, rng, ROWS, default_share)
        logits = taught.model(ids_NL[:, :-1]).logits
        nll_NL = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_NL[:, 1:].flatten(), reduction="none")
        loss = (nll_NL * mask_NL[:, 1:].flatten()).sum() / mask_NL.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(taught.model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr(i)
        optimizer.step()


def _warm_lr(i: int, steps: int) -> float:
    ramp = min(1.0, (i + 1) / min(WARMUP, max(steps, 1)))
    return LR * ramp * 0.5 * (1 + math.cos(math.pi * i / max(steps, 1)))


def _batch(taught: Policy, task: Task, rng: np.random.Generator, rows: int, default_share: float | None) -> tuple[Tensor, Tensor]:
    """Right-padded prompt + response + end, and a mask of the response's tokens."""
    end = min(taught.end_ids)
    shown = pairs.demonstrations(task, rng, rows, default_share)
    sequences = [(p.tokens, (*taught.encode_chat(text), end)) for p, text in shown]
    width = max(len(p) + len(r) for p, r in sequences)
    ids_NL = torch.tensor([[*p, *r, *([taught.pad_id] * (width - len(p) - len(r)))] for p, r in sequences])
    mask_NL = torch.tensor([[0] * len(p) + [1] * len(r) + [0] * (width - len(p) - len(r)) for p, r in sequences])
    return ids_NL.to(taught.device), mask_NL.to(taught.device)
