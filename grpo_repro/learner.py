"""All that a step of training depends on and changes: what a checkpoint would hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from grpo_repro import adaptive, knobs, reference
from grpo_repro.adaptive import State
from grpo_repro.config import Run
from grpo_repro.critic import Critic
from grpo_repro.logprobs import WHOLE_VOCABULARY
from grpo_repro.objective import Objective
from grpo_repro.policy import Policy
from grpo_repro.sampler import Past, Sampler, started
from grpo_repro.spec import base, nearest
from grpo_repro.tasks import Task
from grpo_repro.types import Answer, UserError


@dataclass
class Learner:
    """The config, the policy, who draws, the optimiser, the reference, the critic, and the states of adaptive variants."""

    run: Run
    policy: Policy
    task: Task
    objective: Objective
    optimizer: torch.optim.Optimizer
    reference: PreTrainedModel | None
    critic: Critic | None
    sampler: Sampler
    past: Past
    states: dict[str, State]
    updates: int = 0  # optimiser steps made
    answers: tuple[Answer, ...] = field(default=(), repr=False)  # of the last exam; no checkpoint holds them

    @classmethod
    def of(cls, run: Run, policy: Policy, task: Task) -> Learner:
        """Raises UserError for a weight of a difficulty level that no prompt has."""
        levels = sorted({prompt.level for prompt in task.train})
        if unknown := [level for level in run.rollout.weights if level not in levels]:
            hint = f"{nearest(unknown[0], levels)}; the task's levels: {', '.join(levels)}."
            raise UserError(f"rollout.weights: no prompt has the level {unknown[0]!r}{hint}")
        objective = run.built()
        _whole(objective, policy)
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
            *started(run, policy, task, objective),
            adaptive.initial(objective),
        )

    @property
    def parameters(self) -> list[Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def limit(self) -> int:
        return self.sampler.limit

    @property
    def bound(self) -> Objective:
        """The objective with the present states in its variants' hands."""
        return adaptive.bound(self.objective, self.states)

    def sync(self, step: int) -> None:
        """Before a step: who draws gets its weights."""
        self.sampler.load(*self.past.sync(step))

    def close(self) -> None:
        """Give back what the engine holds; a second call does nothing."""
        if self.sampler.engine is not None:
            self.sampler.engine.close()

    def warm(self) -> None:
        """Set the learning rates of the next optimiser step: linear warm-up, then constant."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, (self.updates + 1) / max(self.run.scale.warmup, 1))


def _whole(objective: Objective, policy: Policy) -> None:
    """Raises UserError where a variant reads whole distributions and the vocabulary is too large for them to be kept."""
    for slot in ("kl", "step"):
        variant = getattr(objective, slot)
        if "full_logits" in knobs.needs(variant) and policy.vocab > WHOLE_VOCABULARY:
            raise UserError(
                f"objective.{slot}: {base(variant).__name__} needs the whole distribution at every token, which is kept for vocabularies "
                f"of up to {WHOLE_VOCABULARY}, and the model {policy.name!r} has {policy.vocab}: use another variant, or a smaller model."
            )


def _optimizer(run: Run, model: PreTrainedModel, critic: Critic | None) -> torch.optim.Optimizer:
    scale = run.scale
    groups = [{"params": list(model.parameters()), "peak": scale.lr, "lr": scale.lr}]
    if critic is not None:
        groups.append({"params": list(critic.head.parameters()), "peak": run.critic.lr, "lr": run.critic.lr})
    if scale.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=scale.lr, weight_decay=scale.weight_decay, fused=True)
    betas = (scale.beta1, scale.beta2)
    return torch.optim.AdamW(
        groups, lr=scale.lr, betas=betas, weight_decay=scale.weight_decay, fused=True
    )  # one pass over memory
