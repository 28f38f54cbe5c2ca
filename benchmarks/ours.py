"""Our side: the package's own loop on a benchmark's workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import models
from benchmarks.process import memory
from benchmarks.settings import WORKLOADS, Workload, prompts, reward
from grpo_repro import paths, start
from grpo_repro.config import Policy as PolicyConfig
from grpo_repro.config import Run, parse_run
from grpo_repro.learner import Learner
from grpo_repro.policy import Policy
from grpo_repro.tasks import Task
from grpo_repro.train import steps
from grpo_repro.types import Prompt

PHASES = ("sample", "old", "update")


def arithmetic(precision: str) -> dict[str, str]:
    """policy.* of a precision: bf16 is bf16 products on fp32 master weights."""
    if precision == "fp32":
        return {}
    return {"compute": "bfloat16"} if "compute" in PolicyConfig.model_fields else {"dtype": "bfloat16"}


def configured(name: str, work: Workload, precision: str, updates: int = 1, **machine: Any) -> Run:
    """GRPO as TRL computes it: group z-score, ε .2, sequence mean, no KL, nothing measured beyond a step's own metrics."""
    reuse = {"reuse": 1e-3} if precision == "fp32" else {}  # the engine's log-probs are π_old where they are this exact
    return parse_run(
        {
            "name": f"benchmark-{precision}",
            "policy": {"name": name, **arithmetic(precision)},
            "task": "short",
            "objective": {"preset": "grpo", "kl": "none", "reward": "exact_match"},
            "rollout": {"group_size": work.group, "prompts": work.prompts, "updates": updates, "limit": work.tokens, **reuse},
            "scale": {"steps": 10**9, "lr": 1e-6, "warmup": 0, "eval_prompts": 0, "monitor": False},
            "machine": machine,
        },
        "benchmark",
    )


def task_of(plain: Task, policy: Policy, texts: list[str], tokens: int) -> Task:
    """The workload as a task: these prompts, and a verifier that gives the rule's number."""
    given = tuple(Prompt(t, t, tuple(policy.tokenizer.encode(t, add_special_tokens=False)), "") for t in texts)
    return replace(
        plain, train=given, heldout=(), limit=tokens, verify=lambda prompt, text: (reward(text), {}), positions=lambda pieces: {}
    )


def learner(model: str, precision: str, updates: int = 1, work: Workload | None = None, **machine: Any) -> Learner:
    """Ready to step, on the model's own workload or another; no token ends a response, so that all have the full length."""
    work = work or WORKLOADS[model]
    run = configured(str(models.folder(model)), work, precision, updates, **machine)
    policy, plain = start.load(run, paths.cache())
    policy = replace(policy, end_ids=frozenset())
    return Learner.of(run, policy, task_of(plain, policy, prompts(model, work.prompts), work.tokens))


def serve(
    receive: Callable[[], dict[str, Any]], reply: Callable[[dict[str, Any]], None], model: str, precision: str, updates: int
) -> None:
    """ready, then for each message: probe (a step of which everything is told), step (seconds and counts), quit."""
    made = learner(model, precision, updates)
    reply({"loaded_mb": memory("VmRSS")})
    rows = steps(made)
    while (message := receive())["do"] != "quit":
        if message["do"] == "probe":
            reply(probe(made))
            continue
        if limit := message.get("tokens"):  # a short step, to warm up
            run = made.run.model_copy(update={"rollout": made.run.rollout.model_copy(update={"limit": limit})})
            reply(step(Learner.of(run, made.policy, made.task)))
        else:
            reply(step(made, rows))


def step(made: Learner, rows: Iterator[dict[str, float]] | None = None) -> dict[str, Any]:
    """The next step of the loop (`rows`, or a new one): seconds by phase and what was done in them."""
    before, began, worked = made.updates, time.perf_counter(), time.process_time()
    row = next(rows or steps(made))
    seconds, done = time.perf_counter() - began, made.updates - before
    phases = {name: row.get(f"seconds/{name}", 0.0) for name in PHASES}
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - worked,
        "phases": phases | {"rest": seconds - sum(phases.values())},
        "generated": row["tokens"],
        "trained": row["tokens"] * done if not row["rows/dropped"] else float("nan"),
        "updates": done,
        "peak_mb": memory(),
    }


@dataclass
class Noting(Policy):
    """Keeps the responses that are decoded for the judge, in their order."""

    drawn: list[list[int]] = field(default_factory=list)

    def decode(self, tokens: Sequence[int]) -> str:
        self.drawn.append(list(tokens))
        return super().decode(tokens)


def probe(made: Learner) -> dict[str, Any]:
    """One step with one update: its responses as tokens, in the order of the prompts, and loss, gradient norm, entropy, reward."""
    run = made.run.model_copy(update={"rollout": made.run.rollout.model_copy(update={"updates": 1})})
    policy = Noting(**vars(made.policy))
    spare = Learner.of(run, policy, made.task)
    kept = [p.detach().clone() for p in made.policy.model.parameters()]
    row = next(steps(spare))
    with torch.no_grad():
        for p, old in zip(made.policy.model.parameters(), kept, strict=True):
            p.copy_(old)
    order = made.task.draw(run.seed, 0, run.rollout.prompts)
    return {
        "prompts": [p.text for p in order for _ in range(run.rollout.group_size)],
        "responses": policy.drawn,
        "loss": row["loss"],
        "gradient_norm": row["gradient_norm"],
        "reward": row["reward"],
        **({"entropy": row["entropy"]} if "entropy" in row else {}),
    }
