"""Who draws: how old and how exact its weights are.

At step s the weights that draw are the trainer's as they were at the start of step max(0, (s // every)·every − staleness), the
`version`, perhaps distorted on purpose (weights.py). By default they are the trainer's own, without a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_repro import config, knobs, layers
from grpo_repro.config import Run
from grpo_repro.objective import Objective
from grpo_repro.policy import Policy
from grpo_repro.rollout import Births
from grpo_repro.rollout.engine import Engine
from grpo_repro.rollout.opening import opened
from grpo_repro.rollout.verified import Verified
from grpo_repro.tasks import Task
from grpo_repro.types import Rollout

Weights = Mapping[str, Tensor]  # parameters by name, a tied one once
Layout = list[tuple[str, torch.Size, torch.dtype]]  # of the parameters in a slot
ALIGNED = 16  # bytes: where a parameter may begin in a slot


@dataclass
class Sampler:
    """The policy that draws, what it draws for, and the responses that it has not finished (partial rollouts).

    `own`: its model is its own; else it is the trainer's, or the past's, and has the right weights already.
    `engine`: vLLM, which has a copy of those weights and gets every version.
    """

    run: Run
    policy: Policy
    task: Task
    objective: Objective
    own: bool
    engine: Verified | None = None
    version: int = -1
    pending: tuple[Rollout, Births] | None = field(default=None, repr=False)

    @property
    def limit(self) -> int:
        return self.run.rollout.limit or self.task.limit

    @property
    def draws(self) -> str | Engine:
        """What `sample` is given as its engine."""
        return self.engine or self.run.machine.engine

    @torch.no_grad()
    def load(self, exact: Weights, version: int) -> None:
        """Draw from these weights from now on, distorted as the run says. Raises EngineError where the engine did not take them."""
        if self.own and version != self.version:
            distort = config.distortion(self.run.sampler)
            for number, (name, p) in enumerate(self.policy.model.named_parameters()):
                new = distort(exact[name].to(p.device), (self.run.seed, version, number))
                if (p.shape, p.dtype) != (
                    new.shape,
                    new.dtype,
                ):  # another precision, or a model that was made without its weights
                    p.data = torch.empty_like(new)
                p.copy_(new)
            for module in self.policy.model.modules():
                if isinstance(module, layers.Linear) and module.weight.dtype not in layers.FULL:
                    module.compute = module.weight.dtype  # half precision runs in half precision
        if self.engine is not None and version != self.version:
            self.engine.sync(self.policy)
        self.version = version

    def examining(self, policy: Policy) -> str | Engine:
        """What draws for an exam of this policy. An engine has its weights until the next `load`, which brings back its own."""
        if self.engine is not None:
            self.version = -1
            self.engine.sync(policy)
        return self.draws


@dataclass
class Past:
    """The trainer's weights at the syncs that are still drawn from, one slot each, and `model`, which has those of the last sync.

    A slot is one flat buffer of bytes, so that it can be shared with another process. `model` is what measures π_old: the trainer's
    numerics under the weights of the sync, whatever the sampler made of them. Without a lag it is the trainer itself.
    """

    rule: config.Sampler
    trainer: PreTrainedModel
    model: PreTrainedModel
    layout: Layout
    slots: list[Tensor] = field(repr=False)
    at: dict[int, int]  # version → slot
    loaded: int = -1

    @classmethod
    def of(cls, rule: config.Sampler, trainer: PreTrainedModel, shared: bool) -> Past:
        """`shared`: the slots are memory that another process can be given."""
        if not rule.lags:
            return cls(rule, trainer, trainer, [], [], {})
        layout = [(name, p.shape, p.dtype) for name, p in trainer.named_parameters()]
        count = 1 + (rule.staleness + rule.every - 1) // rule.every  # syncs from the version of a step up to the step
        slots = [
            torch.empty(_ends(layout)[-1], dtype=torch.uint8, device="cpu" if shared else trainer.device) for _ in range(count)
        ]
        if shared:
            slots = [slot.share_memory_() for slot in slots]
        return cls(rule, trainer, copy.deepcopy(trainer).requires_grad_(False), layout, slots, {})

    @property
    def apart(self) -> bool:
        """Whether the weights of the last sync are others than the trainer's."""
        return self.model is not self.trainer

    @torch.no_grad()
    def sync(self, step: int) -> tuple[Weights, int]:
        """Before a step: keep the trainer's weights where they will be drawn from; the weights that draw in this step, and their version.

        Raises ValueError for a learner that begins in the middle without its past.
        """
        version = self.rule.version(step)
        if not self.rule.lags:
            return dict(self.trainer.named_parameters()), version
        self.at = {v: slot for v, slot in self.at.items() if v >= version}
        if step not in self.at and (step == 0 or (step + self.rule.staleness) % self.rule.every == 0):
            self.put(step, dict(self.trainer.named_parameters()))
        if version not in self.at:
            raise ValueError(f"step {step} draws with the weights of step {version}, which are not there: load a checkpoint")
        held = views(self.slots[self.at[version]], self.layout)
        if version != self.loaded:
            for name, p in self.model.named_parameters():
                p.copy_(held[name])
            self.loaded = version
        return held, version

    @torch.no_grad()
    def put(self, version: int, given: Weights) -> None:
        """Keep weights as a version, in a slot that is free."""
        slot = next(i for i in range(len(self.slots)) if i not in self.at.values())
        for name, kept in views(self.slots[slot], self.layout).items():
            kept.copy_(given[name])
        self.at[version] = slot

    def kept(self) -> dict[int, Weights]:
        """Version → weights: what a checkpoint holds."""
        return {version: views(self.slots[slot], self.layout) for version, slot in self.at.items()}


def started(run: Run, policy: Policy, task: Task, objective: Objective) -> tuple[Sampler, Past]:
    """Who draws for a policy in training, and the past that it draws from. Raises UserError where its engine cannot be had."""
    past = Past.of(run.sampler, policy.model, run.machine.overlap)
    own = "exact" not in knobs.traits(config.distortion(run.sampler))
    model = copy.deepcopy(policy.model).requires_grad_(False) if own else past.model
    drawing = policy if model is policy.model else replace(policy, model=model)
    return Sampler(run, drawing, task, objective, own, opened(run, drawing, task, objective)), past


def views(slot: Tensor, layout: Layout) -> Weights:
    """A slot's parameters by name."""
    return {
        name: slot[end - _width(shape, dtype) :][: shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for end, (name, shape, dtype) in zip(_ends(layout), layout, strict=True)
    }


def _ends(layout: Layout) -> list[int]:
    return list(accumulate(_width(shape, dtype) for _, shape, dtype in layout))


def _width(shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of a parameter in a slot."""
    return -(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED
