"""The loop, read downwards: draw prompts → sample → judge → score → update μ times → measure → a row of metrics.

One path for CPU and CUDA. No files, no global state: a step depends on the config, the policy and the optimiser, and every random
number is indexed by (seed, step, …). What is *not* here: the formula (objective.py), files (record.py), many runs (grid.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_repro import metrics
from grpo_repro.config import Run
from grpo_repro.judge import judge
from grpo_repro.logprobs import forward, micro_batches, trim
from grpo_repro.measure import exam, kl_between, measure
from grpo_repro.objective import Objective, loss, score
from grpo_repro.policy import Policy
from grpo_repro.rollout import sample
from grpo_repro.tasks import Task
from grpo_repro.types import ABSENT, Minibatch, NonFinite, Norm, Rollout, Scored
from grpo_repro.uniform import ORDER, uniform

Row = dict[str, float]


@dataclass
class Clock:
    """Seconds by phase: `with clock("sample"): …`."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def row(self) -> Row:
        return {f"seconds/{phase}": spent for phase, spent in self.seconds.items()}


@dataclass
class Learner:
    """Everything a step depends on: the config, the policy, the optimiser, the reference, and how many updates were made."""

    run: Run
    policy: Policy
    task: Task
    objective: Objective
    optimizer: torch.optim.Optimizer
    reference: PreTrainedModel | None
    updates: int = 0

    @classmethod
    def of(cls, run: Run, policy: Policy, task: Task) -> Learner:
        objective = run.built()
        wanted = "ref" in objective.needs or run.scale.monitor
        reference = copy.deepcopy(policy.model).requires_grad_(False) if wanted else None
        return cls(run, policy, task, objective, _optimizer(run, policy.model), reference)


def train(run: Run, policy: Policy, task: Task) -> Iterator[Row]:
    """Train the policy in place; yields a row a step (`step` from 0), then a last row with the final exam.

    A row describes the rollout that the policy drew *before* the step's updates, and the updates made on it.
    Raises UserError for a mistake of the user's, NonFinite (with step, tensor and likely knob) when a number blows up.
    """
    learner = Learner.of(run, policy, task)
    for step in range(run.scale.steps):
        try:
            row = one_step(learner, step)
        except NonFinite as error:
            raise NonFinite(f"step {step}: {error}.") from None
        yield row
    yield Row(step=run.scale.steps) | exam(policy, task, run)


def one_step(learner: Learner, step: int) -> Row:
    """Rollout → rewards → advantages → μ passes of updates → what they did."""
    run, policy, task, objective = learner.run, learner.policy, learner.task, learner.objective
    model, reference, limit = policy.model, learner.reference, run.rollout.limit or task.limit
    clock, row = Clock(), Row(step=step)
    if step == 0 or (run.scale.eval_every and step % run.scale.eval_every == 0):
        with clock("exam"):
            row |= exam(policy, task, run)
    with clock("sample"):
        prompts = task.draw(run.seed, step, run.rollout.prompts)
        rollout = sample(
            policy,
            prompts,
            run.rollout.group_size,
            limit=limit,
            temperature=run.rollout.temperature,
            seed=run.seed,
            step=step,
            engine=run.machine.engine,
            batch_rows=run.machine.batch_rows,
        )
    with clock("reward"):
        judged = judge(objective.reward, rollout, task, policy, run.seed, step)
    with clock("old"):
        old = measure(model, rollout, run, policy.vocab)
        ref = measure(reference, rollout, run, policy.vocab) if reference is not None else None
    b = Minibatch(
        mask_NT=rollout.mask_NT,
        r_N=judged.r_N,
        group_N=rollout.group_N,
        length_N=rollout.length_N,
        cut_N=rollout.cut_N,
        limit=limit,
        old_NT=old.logp_NT,
        sampler_NT=rollout.sampler_NT,
        ref_NT=ref.logp_NT if ref is not None else ABSENT,
    )
    scored = score(objective, b)
    before = [p.detach().clone() for p in model.parameters()] if run.scale.monitor else []
    with clock("update"):
        totals, made = update(learner, rollout, scored, step)
    row |= metrics.responses(rollout, judged) | metrics.groups(b, scored)
    row |= metrics.entropy(old.entropy_NT, rollout.mask_NT, judged.positions) | metrics.finish(totals, made)
    row["sampler/difference"] = float((old.logp_NT - rollout.sampler_NT).abs()[rollout.mask_NT].mean())
    if ref is not None:
        row |= metrics.moved("ref", ref.logp_NT, old.logp_NT, rollout.mask_NT, kl_between(old, ref))
    if run.scale.monitor:
        with clock("measure"):
            new = measure(model, rollout, run, policy.vocab)
        row |= metrics.moved("old", new.logp_NT, old.logp_NT, rollout.mask_NT, kl_between(old, new))
        row["update/norm"] = metrics.distance(before, model.parameters())
    return row | clock.row()


def update(learner: Learner, rollout: Rollout, scored: Scored, step: int) -> tuple[metrics.Totals, int]:
    """μ passes over the kept rows in minibatches of whole groups; returns the totals and how many optimiser steps were made.

    A rollout of which nothing was kept makes no update. Micro-batches only slice: their losses add up to the minibatch's.
    """
    run, model, optimizer = learner.run, learner.policy.model, learner.optimizer
    totals, made = metrics.Totals(), 0
    for epoch in range(run.rollout.updates):
        for rows_M in minibatches(scored.b, run, step, epoch):
            b = scored.b.rows(rows_M)
            norm = Norm.of(b)
            mini = rollout.rows(scored.row_K[rows_M])
            optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=b.r_N.device)
            for rows_K in micro_batches(mini, run.machine.token_budget):
                part = trim(mini.rows(rows_K))
                micro = narrowed(b.rows(rows_K), part.response_NT.shape[1])
                value, parts = loss(learner.objective, forward(model, part, run.rollout.temperature), micro, norm)
                value.backward()
                total = total + value.detach()
                metrics.update(totals, parts, micro, value)
            norm_of_gradient = torch.nn.utils.clip_grad_norm_(model.parameters(), run.scale.grad_clip)
            if not torch.isfinite(norm_of_gradient + total):
                raise NonFinite(
                    f"the loss is {float(total)} and the gradient norm {float(norm_of_gradient)}; look at ① ratio and ② clip "
                    f"(largest w {totals.maxima.get('ratio/max')}), then at scale.lr"
                )
            for group in optimizer.param_groups:
                group["lr"] = run.scale.lr * min(1.0, (learner.updates + 1) / max(run.scale.warmup, 1))
            optimizer.step()
            learner.updates += 1
            made += 1
            totals.mean("gradient_norm", norm_of_gradient, 1)
            totals.largest("gradient_norm/max", norm_of_gradient)
    return totals, made


def minibatches(b: Minibatch, run: Run, step: int, epoch: int) -> list[Tensor]:
    """Row indices of each minibatch: whole groups, shuffled by (seed, step, epoch), as even as they divide."""
    ids = torch.unique(b.group_N.cpu())
    order = ids[torch.argsort(uniform(run.seed, ORDER, step, ids, epoch, 0))]
    chunks = [chunk for chunk in torch.tensor_split(order, run.rollout.minibatches) if len(chunk)]
    return [torch.isin(b.group_N, chunk.to(b.group_N.device)).nonzero().squeeze(1) for chunk in chunks]


def narrowed(b: Minibatch, width: int) -> Minibatch:
    """The minibatch without the response columns beyond `width`, which hold only padding."""
    at_tokens: dict[str, Any] = {
        k: v[:, :width] for k, v in vars(b).items() if isinstance(v, Tensor) and v.shape == b.mask_NT.shape
    }
    return replace(b, **at_tokens)


def _optimizer(run: Run, model: torch.nn.Module) -> torch.optim.Optimizer:
    scale = run.scale
    if scale.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=scale.lr, weight_decay=scale.weight_decay)
    betas = (scale.beta1, scale.beta2)
    return torch.optim.AdamW(model.parameters(), lr=scale.lr, betas=betas, weight_decay=scale.weight_decay)
