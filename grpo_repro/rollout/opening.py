"""The engine that a run's config asks for, opened, or one sentence why it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_repro import knobs
from grpo_repro.config import Run
from grpo_repro.objective import Objective
from grpo_repro.policy import Policy
from grpo_repro.rollout import server, vllm
from grpo_repro.rollout.engine import Engine
from grpo_repro.rollout.verified import PROMPTS, Verified
from grpo_repro.spec import base
from grpo_repro.tasks import Task
from grpo_repro.types import UserError


def opened(run: Run, policy: Policy, task: Task, objective: Objective) -> Verified | None:
    """vLLM with the policy in it, where `machine.engine` asks for it; None for an engine that reads the policy's own module.

    Close it when the run ends. Raises UserError where the run asks for what vLLM cannot give, or vLLM cannot be had.
    """
    for sentence in _refusals(run, objective):
        raise UserError(sentence)
    machine = run.machine
    if machine.engine != "vllm":
        return None
    limit = run.rollout.limit or task.limit
    longest = max(len(p.tokens) for p in (*task.train, *task.heldout, *task.new_range))
    context = longest + limit + 1  # vLLM stops one token before its end
    engine: Engine
    if machine.server is not None:
        engine = server.opened(machine.server, policy, context=context, timeout=machine.vllm.timeout)
    else:
        own = machine.vllm
        engine = vllm.opened(policy, context=context, dtype=own.dtype, memory=own.memory, rows=machine.batch_rows)
    prompts = task.draw(0, -1, min(PROMPTS, len(task.train)))
    return Verified(engine, prompts, run.rollout.temperature, machine.vllm.dtype, machine.vllm.tolerance)


def _refusals(run: Run, objective: Objective) -> Iterator[str]:
    machine, wanted = run.machine, run.rollout
    if machine.server is not None and machine.engine != "vllm":
        yield f"machine.server is given, but machine.engine is {machine.engine}: write engine: vllm, or server: null."
    if machine.engine != "vllm":
        return
    if machine.overlap:
        yield "machine.overlap goes with the engines decoder and transformers, not with vllm: write overlap: false, or engine: decoder."
    if wanted.top_p < 1.0 or wanted.top_k > 0:
        lacks = "vLLM does not say which tokens top-p or top-k left, so the trainer cannot renormalise over them"
        if "sampler" in knobs.needs(objective.correction):
            yield (
                f"① correction {base(objective.correction).__name__} with top-p or top-k and machine.engine vllm: {lacks}, and every "
                "weight would be off by the kept mass: write top_p: 1 and top_k: 0, correction: none, or engine: decoder."
            )
        if wanted.keep_support:
            yield (
                f"rollout.keep_support with machine.engine vllm: {lacks}: write top_p: 1 and top_k: 0, keep_support: false, or "
                "engine: decoder."
            )
