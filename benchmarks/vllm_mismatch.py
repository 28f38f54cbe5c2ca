"""How far vLLM's log-probs are from the trainer's with the same weights, and what a sync costs: results/reports/vllm/mismatch.json.

    .venv-vllm/bin/python -m benchmarks.vllm_mismatch          (the environment of `make vllm`)

SmolLM2, responses to its own task's prompts at temperature 1; vLLM in bfloat16 and float32 against our trainer in float32, and with
products in bfloat16; then every weight is changed, and the same is measured before and after a sync.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from typing import Any

import torch

from benchmarks.vllm_decode import version
from grpo_repro import paths, record, tasks
from grpo_repro import policy as policies
from grpo_repro.knobs import kl
from grpo_repro.logprobs import forward
from grpo_repro.policy import Policy
from grpo_repro.rollout import sample, vllm
from grpo_repro.rollout.verified import Verified
from grpo_repro.types import Prompt, Rollout

CHANGE = 0.02  # of each weight, in shares of its tensor's mean size
FOLDER = "reports/vllm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    how = parser.parse_args()
    torch.set_num_threads(how.threads)
    trainers = {dtype: policies.smollm2(paths.cache(), compute=getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    task = tasks.bound("chain_sum")(trainers["float32"].encode_chat)
    prompts = task.draw(0, 0, how.prompts)
    origin = record.provenance()
    found = {dtype: measured(dtype, trainers, prompts, how) for dtype in ("bfloat16", "float32")}
    told = {"engine": version(), "model": trainers["float32"].name, "settings": vars(how), "vllm": found, "provenance": origin}
    place = paths.results() / FOLDER / "mismatch.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    paths.write(place, json.dumps(told, indent=1) + "\n")
    print(json.dumps(told))


def measured(dtype: str, trainers: dict[str, Policy], prompts: tuple[Prompt, ...], how: argparse.Namespace) -> dict[str, Any]:
    """vLLM in this dtype against each trainer, with the same weights, and after a sync of changed ones."""
    policy = trainers["float32"]
    kept = [p.detach().clone() for p in policy.model.parameters()]
    context = max(len(p.tokens) for p in prompts) + how.tokens + 1
    began = time.perf_counter()
    with closing(vllm.opened(policy, context=context, dtype=dtype, memory=0.5)) as engine:
        start = time.perf_counter() - began
        checked = Verified(engine, prompts, 1.0, dtype)

        def draws(step: int) -> tuple[Rollout, float]:
            began = time.perf_counter()
            r = sample(policy, prompts, how.group, limit=how.tokens, seed=0, step=step, engine=engine)
            return r, float(r.length_N.sum()) / (time.perf_counter() - began)

        draws(0)  # its first call compiles and warms up
        r, speed = draws(1)
        same = {f"trainer {name}": compared(trainer, r) for name, trainer in trainers.items()}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(CHANGE * p.abs().mean() * torch.randn(p.shape, generator=generator))
        unsynced = compared(policy, r)
        syncs = []
        for _ in range(3):
            checked.sync(policy)
            syncs.append(checked.seconds)
        synced = compared(policy, draws(2)[0])
        with torch.no_grad():
            for p, old in zip(policy.model.parameters(), kept, strict=True):
                p.copy_(old)
    return {
        "same weights": same,
        "changed weights, before the sync": unsynced,
        "changed weights, after the sync": synced,
        "start_seconds": start,
        "sync_and_probe_seconds": syncs,
        "tokens_per_second": speed,
    }


def compared(policy: Policy, r: Rollout) -> dict[str, float]:
    """Nats a token: mean, largest and quantiles of |Δlogp|, and k3 of KL(engine‖trainer)."""
    with torch.no_grad():
        now = torch.cat([forward(policy.model, r.rows(rows), 1.0).logp_NT for rows in torch.arange(len(r.group_N)).split(8)])
    d = (now - r.sampler_NT)[r.mask_NT].double()
    size = d.abs()
    return {
        "tokens": float(len(d)),
        "mean": float(size.mean()),
        "largest": float(size.max()),
        "p50": float(size.quantile(0.5)),
        "p99": float(size.quantile(0.99)),
        "k3": float(kl.ESTIMATES["k3"](d).mean()),
        "bias": float(d.mean()),
    }


if __name__ == "__main__":
    main()
