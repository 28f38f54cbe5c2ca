"""A learner on disk, whole or not at all: weights, optimiser, reference, critic, adaptive states, unfinished responses, counters.

    <folder>/step-000012/     state.json · model, optimizer, reference, critic, past (weights still drawn from), pending .safetensors

Data order and chance are indexed by (seed, step, …), so nothing of them is stored: a resumed run is the uninterrupted one, bit for bit
on the same machine. The last two are kept; one that was cut short has no state.json and is not seen.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_repro import paths
from grpo_repro.learner import Learner
from grpo_repro.rollout import Births
from grpo_repro.sampler import Past
from grpo_repro.types import Prompt, Rollout, UserError

KEPT = 2


def save(learner: Learner, next_step: int, folder: Path) -> Path:
    """Write the learner as it is before step `next_step`. Raises UserError where the folder cannot be written."""
    target = folder / f"step-{next_step:06d}"
    state: dict[str, Any] = {
        "key": learner.run.key(),
        "next_step": next_step,
        "updates": learner.updates,
        "states": learner.states,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as scratch:
            part = Path(scratch) / target.name
            part.mkdir()
            _write(part / "model.safetensors", _weights(learner.policy.model))
            optimizer = {
                f"{i}.{k}": v for i, s in learner.optimizer.state_dict()["state"].items() for k, v in s.items() if v is not None
            }
            _write(part / "optimizer.safetensors", optimizer)
            if learner.reference is not None:
                _write(part / "reference.safetensors", _weights(learner.reference))
            if learner.critic is not None:
                _write(part / "critic.safetensors", dict(learner.critic.head.state_dict()))
            if past := learner.past.kept():
                _write(part / "past.safetensors", {f"{v}.{name}": w for v, held in past.items() for name, w in held.items()})
            if learner.sampler.pending is not None:
                rollout, births = learner.sampler.pending
                tensors = {k: v for k, v in vars(rollout).items() if isinstance(v, Tensor)}
                _write(part / "pending.safetensors", tensors | {f"birth.{k}": v for k, v in vars(births).items()})
                state["pending"] = [vars(p) for p in rollout.prompts]
            paths.write(part / "state.json", json.dumps(state, indent=1))  # last: it says that the rest is whole
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
    except OSError as error:
        raise UserError(
            f"the checkpoint {paths.shown(target)} cannot be written ({error.strerror}): make room, or choose another folder."
        ) from None
    for old in _all(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(learner: Learner, folder: Path) -> int:
    """Bring the learner to the newest whole checkpoint below `folder`; the step to go on with, 0 where there is none.

    Raises UserError where the checkpoint is another run's.
    """
    place, next_step = newest(folder)
    if place is not None:
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        if state["key"] != learner.run.key():
            raise UserError(
                f"{paths.shown(place)} is of another run (key {state['key']}, this one has {learner.run.key()}): use --force."
            )
        device = str(learner.policy.device)
        _read(learner.policy.model, place / "model.safetensors")
        optimizer: dict[int, dict[str, Tensor]] = {}
        for name, tensor in load_file(place / "optimizer.safetensors", device=device).items():
            index, _, key = name.partition(".")
            optimizer.setdefault(int(index), {})[key] = tensor.cpu() if key == "step" else tensor
        learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), "state": optimizer})
        if learner.reference is not None:
            _read(learner.reference, place / "reference.safetensors")
        if learner.critic is not None:
            learner.critic.head.load_state_dict(load_file(place / "critic.safetensors", device=device))
        if learner.run.sampler.lags:
            _recall(learner.past, place / "past.safetensors")
        learner.sampler.pending = _pending(place, state["pending"], device) if "pending" in state else None
        learner.updates, learner.states = state["updates"], state["states"]
    return next_step


def newest(folder: Path) -> tuple[Path | None, int]:
    """The newest whole checkpoint below the folder and the step to go on with; (None, 0) where there is none."""
    whole = _all(folder)
    return (whole[-1], int(whole[-1].name.removeprefix("step-"))) if whole else (None, 0)


def _all(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.glob("step-*/state.json"))


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name; a tied one once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def _read(model: torch.nn.Module, path: Path) -> None:
    stored = load_file(path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(stored[name])


def _recall(past: Past, path: Path) -> None:
    held: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(path).items():
        step, _, name = key.partition(".")
        held.setdefault(int(step), {})[name] = tensor
    past.at.clear()
    for version, weights in held.items():
        past.put(version, weights)


def _pending(place: Path, prompts: list[dict[str, Any]], device: str) -> tuple[Rollout, Births]:
    tensors = load_file(place / "pending.safetensors", device=device)
    births = Births(**{k.removeprefix("birth."): v for k, v in tensors.items() if k.startswith("birth.")})
    kept = tuple(Prompt(**{**p, "tokens": tuple(p["tokens"])}) for p in prompts)
    return Rollout(prompts=kept, **{k: v for k, v in tensors.items() if not k.startswith("birth.")}), births


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path)
