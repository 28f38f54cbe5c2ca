"""The loop, read downwards: draw prompts → sample → judge → score → update μ times → measure → a row of metrics.

One path for CPU and CUDA. No files, no global state: a step depends on the Learner alone, and every random number is indexed by
(seed, step, …). What is *not* here: the formula (objective.py), which prompts and how many responses (collect.py), files (record.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

import torch

from grpo_repro import adaptive, metrics
from grpo_repro.anchor import Anchor, anchored
from grpo_repro.clock import Clock
from grpo_repro.collect import collect
from grpo_repro.config import Run
from grpo_repro.critic import explained_variance
from grpo_repro.exam import exam
from grpo_repro.judge import Judged
from grpo_repro.learner import Learner
from grpo_repro.measure import Measured, kl_between, measure
from grpo_repro.objective import score
from grpo_repro.overlap import Draw, drawing
from grpo_repro.policy import Policy
from grpo_repro.reference import refresh
from grpo_repro.tasks import Task
from grpo_repro.types import ABSENT, EngineError, Minibatch, NonFinite, Rollout
from grpo_repro.update import update

Row = dict[str, float]


def train(run: Run, policy: Policy, task: Task) -> Iterator[Row]:
    """Train the policy in place; yields a row a step (`step` from 0), then a last row with the final exam.

    A row describes the rollout that the policy drew *before* the step's updates, and the updates made on it.
    Raises UserError for a mistake of the user's, NonFinite (with step, tensor and likely knob) when a number blows up.
    """
    with closing(Learner.of(run, policy, task)) as learner:
        yield from steps(learner)


def steps(learner: Learner, first: int = 0) -> Generator[Row, None, None]:
    """The steps from `first` on; see `train`. Between two rows the learner is what a checkpoint holds."""
    run = learner.run
    with drawing(learner) as draw:
        for step in range(first, run.scale.steps):
            try:
                row = one_step(learner, step, draw)
            except (NonFinite, EngineError) as error:
                raise type(error)(f"step {step}: {str(error).rstrip('.')}.") from None
            yield row
    yield Row(step=run.scale.steps) | exam(learner)


def one_step(learner: Learner, step: int, draw: Draw | None = None) -> Row:
    """Rollout → rewards → advantages → μ passes of updates → what they did. `draw`: whence the rollout; drawn here by default."""
    run, policy, model = learner.run, learner.policy, learner.policy.model
    clock, row, objective = Clock(), Row(step=step), learner.bound
    learner.answers = ()
    if step == 0 or (run.scale.eval_every and step % run.scale.eval_every == 0):
        with clock("exam"):
            row |= exam(learner)
    with clock("sample"):
        learner.sync(step)
        rollout, judged, found = draw(step) if draw is not None else collect(learner.sampler, step)
    if learner.reference is not None:  # the first change of the step: an engine that failed before leaves a checkpoint's learner
        refresh(learner.reference, model, run.reference, step, learner.optimizer)
    with clock("old"):
        a = anchored(learner, rollout)
        ref = measure(learner.reference, rollout, run, policy.vocab) if learner.reference is not None else None
    b = assembled(learner, rollout, judged, a, ref)
    scored = score(objective, b)
    before = [p.detach().clone() for p in model.parameters()] if run.scale.monitor else []
    with clock("update"):
        totals, made = update(learner, objective, rollout, scored, a.now, ref, step)
    row |= metrics.responses(rollout, judged) | metrics.groups(b, scored) | found
    if a.measured:
        metrics.sampler(totals, a.drew.logp_NT, b)
    row |= metrics.entropy(a.drew.entropy_NT, rollout.mask_NT, judged.positions) | metrics.finish(totals, made)
    row |= {"sampler/age": float(step - learner.sampler.version), "sampler/reused": float(a.reused)}
    row |= learner.sampler.engine.row() if learner.sampler.engine is not None else {}
    if a.difference is not None:
        row["sampler/difference"] = a.difference
    if a.lags:
        row |= metrics.moved("lag", a.now.logp_NT, a.drew.logp_NT, rollout.mask_NT, kl_between(a.drew, a.now, rollout.mask_NT))
    if ref is not None:
        row |= metrics.moved("ref", ref.logp_NT, a.drew.logp_NT, rollout.mask_NT, kl_between(a.drew, ref, rollout.mask_NT))
    if learner.critic is not None:
        row |= explained_variance(scored.b.value_NT, scored.b.target_NT, scored.b.mask_NT)
    if run.scale.monitor or learner.states:
        with clock("measure"):
            new = measure(model, rollout, run, policy.vocab)
        row |= metrics.moved("old", new.logp_NT, a.old.logp_NT, rollout.mask_NT, kl_between(a.old, new, rollout.mask_NT))
        row |= {"update/norm": metrics.distance(before, model.parameters())} if before else {}
    learner.states = adaptive.updated(learner.objective, learner.states, row)
    row |= {f"state/{slot}/{name}": value for slot, state in learner.states.items() for name, value in state.items()}
    return row | clock.row()


def assembled(learner: Learner, rollout: Rollout, judged: Judged, a: Anchor, ref: Measured | None) -> Minibatch:
    """What the objective may read of a rollout."""
    weights = learner.run.rollout.weights
    weight_G = torch.tensor([weights.get(prompt.level, 1.0) for prompt in rollout.prompts], device=rollout.group_N.device)
    return Minibatch(
        mask_NT=rollout.mask_NT,
        r_N=judged.r_N,
        group_N=rollout.group_N,
        length_N=rollout.length_N,
        cut_N=rollout.cut_N,
        limit=learner.limit,
        old_NT=a.old_NT,
        sampler_NT=rollout.sampler_NT,
        ref_NT=ref.logp_NT if ref is not None else ABSENT,
        value_NT=a.now.value_NT,
        step_end_NT=judged.step_end_NT,
        step_r_NT=judged.step_r_NT,
        prompt_weight_N=weight_G[rollout.group_N] if weights else ABSENT,
    )
