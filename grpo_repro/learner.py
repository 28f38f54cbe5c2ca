"""All that a step of training depends on and changes: what a checkpoint would hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from grpo_repro import adaptive, reference
from grpo_repro.adaptive import State
from grpo_repro.config import Run
from grpo_repro.critic import Critic
from grpo_repro.objective import Objective
from grpo_repro.policy import Policy
from grpo_repro.rollout import Births
from grpo_repro.tasks import Task
from grpo_repro.types import Rollout


@dataclass
class Learner:
    """The config, the policy, the optimiser, the reference, the critic, the states of adaptive variants, and unfinished responses."""

    run: Run
    policy: Policy
    task: Task
    objective: Objective
    optimizer: torch.optim.Optimizer
    reference: PreTrainedModel | None
    critic: Critic | None
    states: dict[str, State]
    updates: int = 0  # optimiser steps made
    pending: tuple[Rollout, Births] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, run: Run, policy: Policy, task: Task) -> Learner:
        objective = run.built()
        watched = "ref" in objective.needs or run.scale.monitor
        wanted = "values" in objective.needs
        critic = Critic.of(policy, run.critic.eps_clip, run.critic.coef, run.critic.detach) if wanted else None
        return cls(
            run,
            policy,
            task,
            objective,
            _optimizer(run, policy.model, critic),
            reference.frozen(policy.model) if watched else None,
            critic,
            adaptive.initial(objective),
        )

    @property
    def parameters(self) -> list[Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def limit(self) -> int:
        return self.run.rollout.limit or self.task.limit

    @property
    def bound(self) -> Objective:
        """The objective with the present states in its variants' hands."""
        return adaptive.bound(self.objective, self.states)

    def warm(self) -> None:
        """Set the learning rates of the next optimiser step: linear warm-up, then constant."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, (self.updates + 1) / max(self.run.scale.warmup, 1))


def _optimizer(run: Run, model: PreTrainedModel, critic: Critic | None) -> torch.optim.Optimizer:
    scale = run.scale
    groups = [{"params": list(model.parameters()), "peak": scale.lr, "lr": scale.lr}]
    if critic is not None:
        groups.append({"params": list(critic.head.parameters()), "peak": run.critic.lr, "lr": run.critic.lr})
    if scale.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=scale.lr, weight_decay=scale.weight_decay)
    return torch.optim.AdamW(groups, lr=scale.lr, betas=(scale.beta1, scale.beta2), weight_decay=scale.weight_decay)
