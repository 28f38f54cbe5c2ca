"""Memory of the log-probs: 4,096 tokens over a vocabulary of 49,152, forward and backward, every way in a fresh process.

The model is a Llama without layers (embedding, norm, tied output matrix), so that nothing but the head is measured; every way
holds the gradient of the matrix, 113 MB in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.process import Process, forget_peak, memory, timed
from benchmarks.store import Case
from grpo_repro import layers
from grpo_repro.logprobs import forward
from grpo_repro.types import Prompt, Rollout

V, D, ROWS, TOKENS, WARM, CHUNK = 49152, 576, 64, 64, 1, 512
WAYS = ("naive", "ours", "checkpointed chunks", "TRL")


def cases(quick: bool) -> list[Case]:
    repeats = 1 if quick else 2
    settings = {"vocabulary": V, "tokens": ROWS * TOKENS, "repeats": repeats}
    return [
        Case(f"memory/{precision}", "headmemory", partial(measure, precision, repeats), settings, estimate * (repeats + 0.5))
        for precision, estimate in ((("fp32", 34.0),) if quick else (("fp32", 34.0), ("bf16", 16.0)))
    ]


def measure(precision: str, repeats: int) -> dict[str, Any]:
    """{way: {"extra_mb": peak over what the model takes, "seconds", "value", "gradient_norm"}}, the ways in turn."""
    workers = {way: Process(serve, way, precision, threads=1, log="memory") for way in WAYS}
    told: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    try:
        for w in workers.values():
            w.answer()
        for i in range(repeats):
            for way in WAYS if i % 2 == 0 else WAYS[::-1]:
                told[way].append(workers[way].ask(do="step"))
        for w in workers.values():
            w.pipe.send({"do": "quit"})
    finally:
        for w in workers.values():
            w.close()
    return {
        way: {**rows[0], "extra_mb": max(r["extra_mb"] for r in rows), "seconds": [r["seconds"] for r in rows]}
        for way, rows in told.items()
    }


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=8,
        num_hidden_layers=0,
        num_attention_heads=9,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def rollout(rows: int) -> Rollout:
    token_NT = torch.randint(V, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    length_N = torch.full((rows,), TOKENS)
    return Rollout(
        prompts=(Prompt("p", "", (1,), ""),),
        group_N=torch.zeros(rows, dtype=torch.int64),
        prompt_NP=torch.ones(rows, 1, dtype=torch.int64),
        prompt_length_N=torch.ones(rows, dtype=torch.int64),
        response_NT=token_NT,
        length_N=length_N,
        mask_NT=torch.ones(rows, TOKENS, dtype=torch.bool),
        sampler_NT=torch.zeros(rows, TOKENS),
        cut_N=torch.zeros(rows, dtype=torch.bool),
    )


def serve(receive: Callable[[], dict[str, Any]], reply: Callable[[dict[str, Any]], None], way: str, precision: str) -> None:
    """ready, then a step for every message."""
    made = model()
    if own := way == "ours":  # as `policy.load` prepares a model; bf16 is then the products' own, not autocast's
        layers.swap(made, torch.bfloat16 if precision == "bf16" else torch.float32)
    run = STEPS[way](made)

    def step(data: Rollout) -> float:
        made.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16" and not own):
            logp_NT = run(data)
        weight_N1 = torch.linspace(-1.0, 1.0, len(data.length_N))[:, None]
        loss = (logp_NT * weight_N1).sum() / logp_NT.numel()
        loss.backward()
        return float(loss.detach())

    step(rollout(WARM))
    made.zero_grad(set_to_none=True)
    data = rollout(ROWS)
    before = memory("VmRSS")
    forget_peak()
    reply({})
    while receive()["do"] != "quit":
        seconds, value = timed(partial(step, data))
        norm = float(made.lm_head.weight.grad.norm())
        reply({"extra_mb": memory() - before, "seconds": seconds, "value": value, "gradient_norm": norm})


def _naive(made: LlamaForCausalLM) -> Callable[[Rollout], Tensor]:
    """All logits at once, fp32."""

    def run(data: Rollout) -> Tensor:
        hidden_MD = _hidden(made, data)
        logp_MV = torch.log_softmax(F.linear(hidden_MD, made.lm_head.weight).float(), -1)
        return logp_MV.gather(-1, data.response_NT.reshape(-1, 1)).view(_shape(data))

    return run


def _ours(made: LlamaForCausalLM) -> Callable[[Rollout], Tensor]:
    return lambda data: forward(made, data, 1.0).logp_NT


def _checkpointed(made: LlamaForCausalLM) -> Callable[[Rollout], Tensor]:
    """Chunks of tokens, recomputed by torch's checkpoint."""

    def part(hidden_KD: Tensor, token_K: Tensor) -> Tensor:
        logits_KV = F.linear(hidden_KD, made.lm_head.weight).float()
        return torch.log_softmax(logits_KV, -1).gather(-1, token_K[:, None])[:, 0]

    def run(data: Rollout) -> Tensor:
        hidden_MD, token_M = _hidden(made, data), data.response_NT.reshape(-1)
        parts = zip(hidden_MD.split(CHUNK), token_M.split(CHUNK), strict=True)
        return torch.cat([checkpoint(part, h, t, use_reentrant=False) for h, t in parts]).view(_shape(data))

    return run


def _trl(made: LlamaForCausalLM) -> Callable[[Rollout], Tensor]:
    """TRL's fused head, as its trainer calls it (with the entropy, which it always logs)."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(made, temperature=1.0, outputs=("log_probs", "entropy"))

    def run(data: Rollout) -> Tensor:
        input_NS = torch.cat([data.prompt_NP, data.response_NT], 1)
        labels_NS = input_NS.clone()
        labels_NS[:, :1] = -100
        return made(input_ids=input_NS, labels=labels_NS, fused_lm_head=True).log_probs

    return run


def _hidden(made: LlamaForCausalLM, data: Rollout) -> Tensor:
    input_NS = torch.cat([data.prompt_NP, data.response_NT[:, :-1]], 1)
    return made.base_model(input_ids=input_NS, use_cache=False).last_hidden_state.reshape(-1, D)


def _shape(data: Rollout) -> tuple[int, int]:
    n, t = data.response_NT.shape
    return n, t


STEPS = {"naive": _naive, "ours": _ours, "checkpointed chunks": _checkpointed, "TRL": _trl}
