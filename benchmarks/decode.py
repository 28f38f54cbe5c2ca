"""Decode engines at equal batch and threads: tokens a second that a policy can use."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks import models, ours
from benchmarks.process import Failed, once, timed
from benchmarks.settings import WORKLOADS, Workload
from benchmarks.store import Case
from grpo_repro import paths
from grpo_repro.collect import collect
from grpo_repro.learner import Learner
from grpo_repro.rollout import _left_pad, decoder
from grpo_repro.uniform import TOKENS, uniform

VLLM = ".venv-vllm"
BATCHES = (64, 256, 512)  # of the tiny model
ENDS = frozenset({3, 7})  # of its 17 symbols: mean length about 8
LIMIT = 28
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(quick: bool) -> list[Case]:
    rounds = 1 if quick else 2
    made = [
        Case(
            f"decode/smollm2-t{t}",
            "decode",
            partial(once, smollm2, rounds, threads=t),
            {"rounds": rounds},
            34.0 * rounds / t + 10,
        )
        for t in (1, 2)[: 1 if quick else 2]
    ]
    for n in BATCHES[: 1 if quick else 3]:
        often = 6 if quick else 6 * 512 // n
        made.append(Case(f"decode/tiny-B{n}", "decode", partial(once, tiny, n, often), {"rounds": often}, 12.0))
    if not quick:
        made += [Case(f"decode/smollm2-vllm-t{t}", "decode", partial(vllm, t), {}, 90.0) for t in (1, 2)]
    return made


def smollm2(rounds: int) -> dict[str, Any]:
    """16 rows × 64 tokens, 2 prompts, no end token."""
    work = WORKLOADS["smollm2"]
    engines: dict[str, Callable[[int], int]] = {}
    for precision, dtype in DTYPES.items():
        made = ours.learner("smollm2", precision)
        engines[f"ours {precision}"] = partial(drawn, made)
        engines[f"generate {precision}"] = partial(generated, plain("smollm2", dtype), _rows(made), frozenset(), work.tokens)
    return alternated(engines, rounds)


def tiny(rows: int, rounds: int) -> dict[str, Any]:
    """`rows` responses that end by themselves: only tokens up to the end count."""
    made = ours.learner("tiny", "fp32", work=Workload(rows // 16, 16, LIMIT, ""))
    made.policy.end_ids = ENDS
    peer = partial(generated, plain("tiny", torch.float32), _rows(made), ENDS, LIMIT)
    engines: dict[str, Callable[[int], int]] = {"ours fp32": partial(drawn, made), "generate fp32": peer}
    alternated(engines, 1)  # not counted; SmolLM2's rounds are long enough to be
    return alternated(engines, rounds)


def plain(name: str, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(models.folder(name), dtype=dtype).eval()


def _rows(made: Learner) -> list[list[int]]:
    """The prompts' tokens, a row a response."""
    return [list(p.tokens) for p in made.task.train for _ in range(made.run.rollout.group_size)]


def drawn(made: Learner, step: int) -> int:
    """Ours: a rollout, judged; returns its tokens."""
    return int(collect(made.sampler, step)[0].length_N.sum())


def generated(model: Any, rows: list[list[int]], ends: frozenset[int], tokens: int, step: int) -> int:
    """transformers: generate, as its manual says, with sampling; returns the tokens up to each row's end."""
    P = max(map(len, rows))
    prompt_NP = torch.tensor([[0] * (P - len(row)) + row for row in rows])
    present_NP = torch.tensor([[0] * (P - len(row)) + [1] * len(row) for row in rows])
    model.generation_config = GenerationConfig()
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
        use_cache=True,
    )
    with torch.no_grad():
        out_NT = model.generate(input_ids=prompt_NP, attention_mask=present_NP, generation_config=config)[:, P:]
    ended_NT = torch.isin(out_NT, torch.tensor(sorted(ends), dtype=torch.int64)).cumsum(1)
    return int(((ended_NT == 0).sum(1) + 1).clamp(max=out_NT.shape[1]).sum())


def alternated(engines: dict[str, Callable[[int], int]], rounds: int) -> dict[str, Any]:
    """Each engine in turn: {"engines": {name: {"seconds": […], "tokens": […]}}}."""
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "tokens": []} for name in engines}
    for i in range(rounds):
        for name in list(engines) if i % 2 == 0 else list(engines)[::-1]:
            seconds, tokens = timed(partial(engines[name], i))
            found[name]["seconds"].append(seconds)
            found[name]["tokens"].append(tokens)
    return {"engines": found}


def vllm(threads: int) -> dict[str, Any]:
    """vLLM's CPU build in bf16, in its own environment; ours before and after it. Raises Failed with the reason where there is none."""
    python = paths.root() / VLLM / "bin" / "python"
    if not python.is_file():
        raise Failed(f"there is no {VLLM}: `make vllm` sets it up")
    work, rounds = WORKLOADS["smollm2"], 2
    words = ["--model", str(models.folder("smollm2")), "--rows", str(work.rows), "--tokens", str(work.tokens)]
    words += ["--threads", str(threads), "--dtype", "bfloat16", "--repeat", str(2 * rounds)]
    command = [str(python), "-m", "benchmarks.vllm_decode", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    before = once(alone, rounds, threads=threads)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=paths.root())
    except subprocess.TimeoutExpired:
        raise Failed("vLLM's benchmark took longer than ten minutes") from None
    after = once(alone, rounds, threads=threads)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Failed(f"vLLM's benchmark ended with code {done.returncode}: {reason[:300]}")
    told = json.loads(lines[-1])
    peer = {"seconds": told["seconds"], "tokens": [work.rows * work.tokens] * len(told["seconds"])}
    return {"engines": {"ours bf16": {k: before[k] + after[k] for k in before}, "vLLM bf16": peer}, "told": told}


def alone(rounds: int) -> dict[str, Any]:
    """Ours in bf16, decoding alone, as vLLM is timed with its weights loaded: seconds, tokens, and the seconds of preparing the weights."""
    made = ours.learner("smollm2", "bf16")
    policy, T, rows = made.policy, made.limit, _rows(made)
    prompt_MP, length_M = _left_pad(sorted(set(map(tuple, rows))), policy.pad_id, policy.device)
    prompt_N = torch.arange(len(prompt_MP)).repeat_interleave(len(rows) // len(prompt_MP))
    began = time.perf_counter()
    with torch.inference_mode():
        weights = decoder.Weights.of(policy.model, prompt_MP.shape[1] + T, len(rows))
    prepared = time.perf_counter() - began

    def decoded(step: int) -> int:
        u_NT = uniform(0, TOKENS, step, prompt_N[:, None], torch.arange(len(rows))[:, None], torch.arange(T))
        never_V = torch.zeros(policy.vocab, dtype=torch.bool)
        return decoder.decode(policy.model, prompt_MP, length_M, prompt_N, u_NT, never_V, 1.0, weights=weights).token_NT.numel()

    return {**alternated({"ours": decoded}, rounds)["engines"]["ours"], "prepare": [prepared]}
