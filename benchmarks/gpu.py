"""Checks and a small benchmark on a GPU: `make gpu`. Without one it says so and ends well.

The checks train, sample, score, resume and (where it is installed) sample with vLLM on the device; the benchmark gives tokens a
second and seconds a step. Writes results/reports/gpu.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, ours
from benchmarks.process import timed
from benchmarks.settings import Workload
from grpo_repro import checkpoint, paths, record
from grpo_repro.collect import collect
from grpo_repro.config import Machine
from grpo_repro.learner import Learner
from grpo_repro.logprobs import forward
from grpo_repro.rollout import sample
from grpo_repro.train import steps
from grpo_repro.types import Rollout, UserError

SMALL = Workload(4, 4, 16, "")
BENCHMARK = {"tiny": Workload(32, 16, 32, ""), "smollm2": Workload(16, 16, 128, "")}
PRECISIONS = ("fp32", "bf16")
NEAR = {"tiny": 1e-4, "smollm2": 2e-3}  # |Δ log-prob| between devices, fp32
EQUAL = 0.9  # of rows: two engines in fp32 may differ where the uniform number is within rounding of the edge of a token


class Skipped(Exception):
    """A check that cannot be made here; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: the checks alone, to try them without a GPU")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("This torch sees no CUDA device, so the GPU checks are skipped.")
        return 0
    checks = {name: told(check, device) for name, check in CHECKS.items()}
    timed_here = list(itertools.product(BENCHMARK, PRECISIONS)) if device == "cuda" else []
    speeds = {f"{model} {precision}": told(speed, device, model, precision) for model, precision in timed_here}
    found = {"checks": checks, "benchmark": speeds, "device": named(device), "provenance": record.provenance()}
    home = paths.results() / "reports" / "gpu"
    if device == "cuda":
        paths.write(home / "gpu.json", json.dumps(found, indent=1) + "\n")
        paths.write(home / "README.md", render(found))
    print(render(found))
    return int(any(row["verdict"] == "failed" for row in (*checks.values(), *speeds.values())))


def named(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def told(check: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a check found, with its verdict: passed, failed or skipped. A check that falls is a failed one."""
    print(f"  {check.__name__} {' '.join(map(str, arguments))}", file=sys.stderr, flush=True)
    try:
        return {"verdict": "passed", **check(*arguments)}
    except Skipped as reason:
        return {"verdict": "skipped", "said": str(reason)}
    except Exception as error:
        return {"verdict": "failed", "said": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def learner(device: str, model: str, precision: str, work: Workload = SMALL, **machine: Any) -> Learner:
    try:
        models.make(model)
    except UserError as error:
        raise Skipped(str(error)) from None
    return ours.learner(model, precision, work=work, device=device, **machine)


def trains(device: str) -> dict[str, Any]:
    """Two steps of both models in both precisions: every number finite, and the weights move."""
    norms, left = {}, []
    for model, precision in itertools.product(("tiny", "smollm2"), PRECISIONS):
        try:
            made = learner(device, model, precision)
        except Skipped as reason:
            left.append(str(reason))
            continue
        before = [p.detach().clone() for p in made.policy.model.parameters()]
        rows = list(itertools.islice(steps(made), 2))
        norms[f"{model} {precision}"] = [round(row["gradient_norm"], 4) for row in rows]
        moved = any(not torch.equal(p, q) for p, q in zip(before, made.policy.model.parameters(), strict=True))
        where = {str(p.device.type) for p in made.policy.model.parameters()}
        if not moved or where != {device} or not all(row["gradient_norm"] > 0 for row in rows):
            raise AssertionError(f"{model} {precision}: weights moved {moved}, on {where}, gradient norms {norms}")
    return {"said": f"gradient norms {norms}" + "".join(f"; left out: {reason}" for reason in left[:1])}


def engines_agree(device: str) -> dict[str, Any]:
    """The decoder draws the tokens that transformers' generate draws from the same uniform numbers."""
    shares = {}
    for model in ("tiny", "smollm2"):
        try:
            made = learner(device, model, "fp32")
        except Skipped:
            continue
        how = {"limit": SMALL.tokens, "seed": 0, "step": 0}
        a, b = (sample(made.policy, made.task.train, SMALL.group, engine=engine, **how) for engine in ("decoder", "transformers"))
        same_N = (a.response_NT == b.response_NT).all(1)
        shares[model] = float(same_N.float().mean())
        apart = float((a.sampler_NT - b.sampler_NT)[same_N].abs().max()) if same_N.any() else float("nan")
        if shares[model] < EQUAL or not apart <= NEAR[model]:
            raise AssertionError(f"{model}: share of equal rows {shares[model]:.2f}, |Δ log-prob| in them {apart:.1e}")
    return {"said": f"share of equal rows {shares}"}


def logprobs_agree(device: str) -> dict[str, Any]:
    """Log-probs of one rollout are those of the CPU."""
    largest = {}
    for model, bar in NEAR.items():
        try:
            made, there = learner(device, model, "fp32"), learner("cpu", model, "fp32")
        except Skipped:
            continue
        rollout = collect(there.sampler, 0)[0]
        with torch.no_grad():
            far = forward(made.policy.model, on(rollout, device), 1.0).logp_NT.cpu()
            largest[model] = float((far - forward(there.policy.model, rollout, 1.0).logp_NT).abs().max())
        if not largest[model] <= bar:
            raise AssertionError(f"{model}: |Δ log-prob| {largest[model]:.1e}, bar {bar:.0e}")
    return {"said": f"largest |Δ log-prob| {largest}"}


def on(rollout: Rollout, device: str) -> Rollout:
    moved: dict[str, Any] = {k: v.to(device) for k, v in vars(rollout).items() if isinstance(v, torch.Tensor)}
    return replace(rollout, **moved)


def resumes(device: str) -> dict[str, Any]:
    """A run that was stopped after two steps and resumed makes the third step of the whole run."""
    whole, stopped, resumed = (learner(device, "tiny", "fp32") for _ in range(3))
    third = list(itertools.islice(steps(whole), 3))[2]
    list(itertools.islice(steps(stopped), 2))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(stopped, 2, Path(folder))
        again = next(steps(resumed, checkpoint.load(resumed, Path(folder))))
    apart = {k: (third[k], again[k]) for k in third if not k.startswith("seconds/") and third[k] != again[k]}
    if any(abs(a - b) > 1e-5 * max(1.0, abs(a)) for a, b in apart.values()):
        raise AssertionError(f"the third step differs: {apart}")
    return {"said": f"{'bit for bit' if not apart else f'within 1e-5: {sorted(apart)} (GPU sums have no fixed order)'}"}


def vllm(device: str) -> dict[str, Any]:
    """A step with vLLM as the engine, in this process."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed here (`pip install 'grpo_repro[vllm]'`)")
    if "vllm" not in Machine.model_json_schema()["properties"]["engine"].get("enum", []):
        raise Skipped("this version has no vLLM engine")
    made = learner(device, "smollm2", "bf16", engine="vllm")
    row = next(steps(made))
    return {
        "said": f"{row['tokens']:.0f} tokens, mean |Δ log-prob| sampler to trainer {row.get('sampler/difference', float('nan')):.2g}"
    }


def speed(device: str, model: str, precision: str) -> dict[str, Any]:
    """Tokens a second of sampling and seconds a step, medians after a first step."""
    made = learner(device, model, precision, BENCHMARK[model])
    walk = steps(made)
    next(walk)
    told = [timed(partial(next, walk)) for _ in range(5)]
    seconds, rows = [t for t, _ in told], [row for _, row in told]
    spent = [row["seconds/sample"] for row in rows]
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        "tokens_s": statistics.median(row["tokens"] / s for row, s in zip(rows, spent, strict=True)),
        "step_s": statistics.median(seconds),
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else float("nan"),
    }


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "trains": trains,
    "decoder = generate": engines_agree,
    "log-probs = CPU's": logprobs_agree,
    "resumes": resumes,
    "vLLM in process": vllm,
}


def render(found: dict[str, Any]) -> str:
    """README.md."""
    origin = found["provenance"]
    lines = [
        "# GPU: checks and a small benchmark",
        "",
        f"Generated by `make gpu` from `gpu.json`; do not edit. {found['device']}; torch {origin['versions']['torch']}; "
        f"commit {str(origin['commit'])[:10]}; {origin['started']}.",
        "",
        "| check | verdict | |",
        "|---|---|---|",
        *(f"| {name} | {row['verdict']} | {row.get('said', '')} |" for name, row in found["checks"].items()),
        "",
        "| model | prompts × G × tokens | tokens/s | s a step | peak MB |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["benchmark"].items():
        work = BENCHMARK[name.split(" ")[0]]
        size = f"{work.prompts} × {work.group} × {work.tokens}"
        numbers = (
            f"{row['tokens_s']:,.0f} | {row['step_s']:.3g} | {row['peak_mb']:,.0f}"
            if "step_s" in row
            else f"{row['verdict']} | {row['said']} | "
        )
        lines.append(f"| {name} | {size} | {numbers} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
