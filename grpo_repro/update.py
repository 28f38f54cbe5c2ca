"""μ passes of optimiser steps over one scored rollout. A minibatch holds whole groups; a micro-batch is only a slice of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_repro import knobs, metrics
from grpo_repro.config import Run
from grpo_repro.learner import Learner
from grpo_repro.logprobs import forward, micro_batches, trim
from grpo_repro.measure import Measured, divergence_from
from grpo_repro.objective import Objective, Parts, loss
from grpo_repro.types import ABSENT, Forward, Minibatch, NonFinite, Norm, Rollout, Scored
from grpo_repro.uniform import ORDER, uniform


@dataclass(frozen=True)
class Work:
    """One minibatch: −J of it, and its distance from π_old, a micro-batch at a time. Denominators are the minibatch's (`norm`)."""

    learner: Learner
    objective: Objective
    rollout: Rollout
    b: Minibatch
    norm: Norm
    old_NTV: Tensor  # log π_old and log π_ref over the vocabulary, where a variant needs them
    ref_NTV: Tensor

    def slices(self) -> Iterator[tuple[Tensor, Rollout, Minibatch]]:
        for rows_K in micro_batches(self.learner.policy.model, self.rollout, self.learner.run.machine.token_budget):
            part = trim(self.rollout.rows(rows_K))
            yield rows_K, part, narrowed(self.b.rows(rows_K), part.response_NT.shape[1])

    def losses(self) -> Iterator[tuple[Tensor, Parts, Forward, Minibatch]]:
        """(partial sum of −J, its terms, the policy's forward, the slice) a micro-batch; the sums add up to the minibatch's."""
        learner = self.learner
        for rows_K, part, micro in self.slices():
            exact_ref = self.ref_NTV[rows_K] if self.ref_NTV is not None else None
            temperature = learner.run.rollout.temperature
            now = forward(learner.policy.model, part, temperature, exact_ref=exact_ref, value_head=learner.critic)
            if micro.old_NT is None:  # deferred: the policy before the rollout's only update
                micro = replace(micro, old_NT=now.logp_NT.detach())
            value, parts = loss(self.objective, now, micro, self.norm)
            yield value, parts, now, micro

    @torch.no_grad()
    def surrogate(self) -> float:
        """−J of the minibatch under the present parameters."""
        return sum(float(value) for value, *_ in self.losses())

    def divergence(self) -> Iterator[Tensor]:
        """Parts that add up to the exact KL(π_old‖π_θ), a mean over the minibatch's tokens; with gradient, twice."""
        for rows_K, part, _ in self.slices():
            total = divergence_from(self.old_NTV[rows_K], self.learner.policy.model, part, self.learner.run.rollout.temperature)
            yield total / max(self.norm.tokens, 1)


def update(
    learner: Learner, objective: Objective, rollout: Rollout, scored: Scored, old: Measured, ref: Measured | None, step: int
) -> tuple[metrics.Totals, int]:
    """μ passes over the kept rows; returns the totals and how many optimiser steps were made.

    A rollout of which nothing was kept makes no update, nor does a minibatch whose rows are all hidden by `overlong`.
    Raises NonFinite for a loss or gradient that is not a number.
    """
    totals, made = metrics.Totals(), 0
    whole = "full_logits" in objective.needs
    for epoch in range(learner.run.rollout.updates):
        for rows_M in minibatches(scored.b, learner.run, step, epoch):
            kept_M, b = scored.row_K[rows_M], scored.b.rows(rows_M)
            norm = Norm.of(b)
            if not norm.tokens:  # every row is hidden; a step on a gradient of 0 would still move the weights, by its momentum
                continue
            old_NTV = old.logq_NTV[kept_M] if whole and old.logq_NTV is not None else ABSENT
            ref_NTV = ref.logq_NTV[kept_M] if whole and ref is not None and ref.logq_NTV is not None else ABSENT
            take(Work(learner, objective, rollout.rows(kept_M), b, norm, old_NTV, ref_NTV), totals)
            made += 1
    return totals, made


def take(work: Work, totals: metrics.Totals) -> None:
    """One optimiser step: gradient over the micro-batches, clipped, then the objective's step."""
    learner, critic = work.learner, work.learner.critic
    natural = "natural" in knobs.traits(work.objective.step)
    learner.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    with sdpa_kernel(SDPBackend.MATH) if natural else nullcontext():  # its Fisher-vector products differentiate twice
        for value, parts, now, micro in work.losses():
            if critic is not None:
                value = value + critic.loss(now.value_NT, micro, work.norm)
            value.backward()
            total += float(value.detach())
            metrics.update(totals, parts, micro, value)
            if work.b.old_NT is None:
                metrics.sampler(totals, micro.old_NT, micro)
        size = torch.nn.utils.clip_grad_norm_(learner.parameters, learner.run.scale.grad_clip)
        if not torch.isfinite(size + total):
            raise NonFinite(
                f"the loss is {total} and the gradient norm {float(size)}; look at ① ratio and ② clip "
                f"(largest w {totals.maxima.get('ratio/max')}), then at scale.lr"
            )
        learner.warm()
        told = work.objective.step(work.surrogate, work.divergence, learner.parameters, learner.optimizer)
    learner.updates += 1
    totals.mean("gradient_norm", size, 1)
    totals.largest("gradient_norm/max", size)
    for name, number in told.items():
        totals.mean(name, number, 1)


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
