"""What the machine can do at best, and where the time of the SmolLM2 step goes.

A floor is a lower bound by arithmetic: products at the highest rate measured here, weights and optimiser states streamed once at
the highest bandwidth measured here, nothing else.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import ours
from benchmarks.process import once
from benchmarks.settings import WORKLOADS
from benchmarks.store import Case
from grpo_repro.learner import Learner
from grpo_repro.train import steps

SECONDS = 0.4  # measured a rate, after a warm-up
SHAPES = {  # rows × inner × outer
    "decode layer, 16×576×1536": (16, 576, 1536),
    "update layer, 1536×576×1536": (1536, 576, 1536),
    "head, 1024×576×49152": (1024, 576, 49152),
    "square, 2048": (2048, 2048, 2048),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(quick: bool) -> list[Case]:
    return [
        Case(f"floors/t{t}", "floors", partial(once, rates, threads=t), {"seconds": SECONDS}, 16.0)
        for t in ((1,) if quick else (1, 2))
    ]


def profiles(quick: bool) -> list[Case]:
    return [
        Case(f"profile/smollm2-{precision}", "floors", partial(once, profiled, precision), {}, 30.0)
        for precision in (("bf16",) if quick else ("bf16", "fp32"))
    ]


def rates() -> dict[str, Any]:
    """{"gflops": {shape: {"fp32 F.linear": GFLOP/s, …}}, "gb_s": {how: GB/s}} with this process's threads; the best of several tries."""
    gflops: dict[str, dict[str, float]] = {}
    for shape, (m, k, n) in SHAPES.items():
        gflops[shape] = {}
        for precision, dtype in DTYPES.items():
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            for how, product in _products(x, w).items():
                gflops[shape][f"{precision} {how}"] = 2e-9 * m * k * n / _best(product)
    big = torch.zeros(2**29 // 4, dtype=torch.float32).normal_()  # 512 MB, beyond every cache
    target = torch.empty_like(big)
    v = torch.randn(1, 8192).bfloat16()
    table = torch.randn(8192, 8192).bfloat16()
    return {
        "gflops": gflops,
        "gb_s": {
            "read, sum in fp32": big.nbytes * 1e-9 / _best(big.sum),
            "copy (read and write)": 2e-9 * big.nbytes / _best(lambda: target.copy_(big)),
            "vector × bf16 matrix": table.nbytes * 1e-9 / _best(lambda: F.linear(v, table)),
        },
        "threads": torch.get_num_threads(),
    }


def _products(x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
    """F.linear (MKL in fp32), and oneDNN with weights packed once where this build has it."""
    ways: dict[str, Any] = {"F.linear": lambda: F.linear(x, w)}
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(w, len(x)) if hasattr(torch.ops.mkldnn, "_reorder_linear_weight") else w
        ways["oneDNN packed"] = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return ways


@torch.no_grad()
def _best(function: Any) -> float:
    """Seconds of a call: the least over tries of at least three calls."""
    function()
    best, began = float("inf"), time.perf_counter()
    tries = 0
    while tries < 3 or time.perf_counter() - began < SECONDS:
        start = time.perf_counter()
        function()
        best, tries = min(best, time.perf_counter() - start), tries + 1
    return best


def profiled(precision: str) -> dict[str, Any]:
    """The dearest operators of one SmolLM2 step, seconds by themselves (children not counted), one thread."""
    made = ours.learner("smollm2", precision)
    walk = steps(made)
    ours.step(made, walk)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        told = ours.step(made, walk)
    rows = sorted(seen.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in rows)
    top = [
        {"name": e.key, "seconds": e.self_cpu_time_total * 1e-6, "calls": e.count, "share": e.self_cpu_time_total / total}
        for e in rows[:12]
    ]
    return {"top": top, "seconds": told["seconds"], "phases": told["phases"], "shape": shape_of(made)}


def shape_of(made: Learner) -> dict[str, float]:
    """What `compare.floor` counts with."""
    config, work = made.policy.model.config, WORKLOADS["smollm2"]
    return {
        "d": config.hidden_size,
        "ffn": config.intermediate_size,
        "kv": config.num_key_value_heads * config.hidden_size // config.num_attention_heads,
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "prompts": work.prompts,
        "rows": work.rows,
        "tokens": work.tokens,
        "prompt_tokens": sum(len(p.tokens) for p in made.task.train) / work.prompts,
    }
