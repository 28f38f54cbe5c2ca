"""Where a run starts: its device, its task, its policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import transformers

from grpo_repro import layers, preferences, tasks, warmstart
from grpo_repro import policy as policies
from grpo_repro.config import Run
from grpo_repro.policy import Policy
from grpo_repro.spec import unbind
from grpo_repro.tasks import Task, pairs
from grpo_repro.types import UserError


def load(run: Run, cache: Path) -> tuple[Policy, Task]:
    """The policy and the task of a run; warm starts, reward models and converted weights are kept under `cache`."""
    policy, task = _policy_and_task(run, cache)
    if run.machine.gradient_checkpointing:
        layers.checkpointed(policy.model)
    if preferences.wanted(unbind(run.built().reward)):
        task = replace(task, models={preferences.WORD: str(preferences.prepare(task.name, run.seed, cache))})
    return policy, task


def _policy_and_task(run: Run, cache: Path) -> tuple[Policy, Task]:
    transformers.utils.logging.disable_progress_bar()  # the run has a bar of its own
    if run.machine.threads:
        torch.set_num_threads(run.machine.threads)
    device = _device(run.machine.device)
    build = tasks.bound(run.task)
    chosen = run.policy
    dtype, compute = getattr(torch, chosen.dtype), getattr(torch, chosen.compute)
    if chosen.name == "tiny":
        task = build(policies.tiny(pairs.SYMBOLS).encode_chat)
        policy = warmstart.start(task, chosen.start, chosen.warm_steps, run.seed, cache, device)
        layers.swap(policy.model, compute)
        return policy, task
    if chosen.name == "smollm2":
        policy = policies.smollm2(cache, device, dtype, compute)
    else:
        policy = policies.pretrained(chosen.name, device, dtype, trust_remote_code=chosen.trust_remote_code, compute=compute)
    return policy, build(policy.encode_chat)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"machine.device: {name!r} is not a device; valid: auto, cpu, cuda, cuda:0 …") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"machine.device: {name!r} is not supported; valid: auto, cpu, cuda, cuda:0 …")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"machine.device: {name!r} was asked for, but this machine has no CUDA device: use auto or cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"machine.device: {name!r} was asked for, but this machine has {torch.cuda.device_count()}: count from cuda:0."
        )
    return device
