"""What was tried: each way of doing a thing beside the other, in turn, on SmolLM2's shapes. Some pay, some do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import compare, ours
from benchmarks.process import once, timed
from benchmarks.store import Case
from grpo_repro import layers, logprobs, packed
from grpo_repro.collect import collect
from grpo_repro.logprobs import forward

ROUNDS = 7


def cases(quick: bool) -> list[Case]:
    rounds = 1 if quick else ROUNDS
    return [Case("choices/t1", "choices", partial(once, measure, rounds, threads=1), {"rounds": rounds}, 40.0)]


def measure(rounds: int) -> dict[str, Any]:
    """{what: ratio of the seconds of the way that was left over those of the way that was taken}: above 1, the choice pays."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}  # what → (taken, left)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x, w, g = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((1088, 576), (1536, 576), (1088, 1536)))
        made[f"{name} product through oneDNN, instead of torch's linear"] = (
            partial(layers.product, x, w),
            partial(F.linear, x, w),
        )
        made[f"{name} gradient of a weight likewise, instead of torch's matmul"] = (
            partial(layers.matmul, g.t(), x),
            partial(torch.matmul, g.t(), x),
        )
        few = torch.randn(16, 576, generator=generator)
        linear = torch.nn.Linear(576, 3072, bias=False, dtype=dtype)
        ready = layers.Packed([linear], dtype, 16)
        made[f"{name} weights packed for decoding 16 rows"] = (
            partial(_quiet, ready, few.to(dtype)),
            partial(layers.product, few.to(dtype), linear.weight.detach()),
        )
    made["our RMSNorm, instead of the textbook's, with gradient"] = _norms(generator)
    made["one entry a row set by its index, instead of scatter_, 1,024 × 49,152"] = _entries(generator)
    made["fused attention of 16 responses, instead of plain products, with gradient"] = _attention(generator)
    made["plain products for one query a row, instead of fused attention"] = _query(generator)
    made["keys transposed in a bf16 cache, instead of fp32 keys as they come"] = _cache(generator)
    made["a prompt once a group and no padding, SmolLM2's log-probs with gradient"] = _packed()
    made["softmax kept for the backward pass, SmolLM2's head"] = _kept(generator)
    return {what: _ratio(*ways, rounds) for what, ways in made.items()}


def _ratio(taken: Callable[[], Any], left: Callable[[], Any], rounds: int) -> dict[str, float]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):  # the first is not counted
        for kept, way in zip(seconds, (taken, left), strict=True):
            took, _ = timed(way)
            if i:
                kept.append(took)
    return compare.ratio(*seconds)


@torch.inference_mode()
def _quiet(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _backward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    wanted = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(function(*wanted).sum(), wanted)


def _norms(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x, w = torch.randn(1088, 576, generator=generator), torch.ones(576)

    def textbook(x: Tensor, w: Tensor) -> Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    return _backward(lambda x, w: layers._RMSNorm.apply(x, w, 1e-5), x, w), _backward(textbook, x, w)


def _entries(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[], Any]]:
    p_MV, row_M = torch.zeros(1024, 49152, dtype=torch.bfloat16), torch.arange(1024)
    token_M, new_M = torch.randint(49152, (1024,), generator=generator), torch.ones(1024, dtype=torch.bfloat16)
    return partial(p_MV.__setitem__, (row_M, token_M), new_M), partial(p_MV.scatter_, -1, token_M[:, None], new_M[:, None])


def _attention(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v = (torch.randn(16, heads, length, 64, generator=generator) for heads, length in ((9, 63), (3, 103), (3, 103)))
    seen = torch.ones(63, 103, dtype=torch.bool).tril(40)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = q.view(16, 3, 189, 64) @ k.transpose(2, 3) / 8
        return torch.softmax(score.masked_fill(~seen.repeat(3, 1), -torch.inf), -1) @ v

    return _backward(partial(F.scaled_dot_product_attention, attn_mask=seen, enable_gqa=True), q, k, v), _backward(plain, q, k, v)


def _query(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v = (torch.randn(16, 3, length, 64, generator=generator) for length in (3, 72, 72))
    return lambda: torch.softmax(q @ k.transpose(2, 3) / 8, -1) @ v, partial(F.scaled_dot_product_attention, q, k, v)


def _cache(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q = torch.randn(16, 3, 3, 64, generator=generator)
    values = torch.randn(30, 16, 3, 104, 64, generator=generator)
    keys, low = torch.randn(30, 16, 3, 104, 64, generator=generator), q.bfloat16()
    low_keys, low_values = keys.transpose(3, 4).contiguous().bfloat16(), values.bfloat16()

    def attended(q: Tensor, keys: Any, values: Any) -> None:
        for k, v in zip(keys, values, strict=True):
            torch.softmax((q @ k).float(), -1).to(q.dtype) @ v[:, :, :72]

    return (
        lambda: attended(low, low_keys[..., :72], low_values),
        lambda: attended(q, keys[..., :72, :].transpose(3, 4), values),
    )


def _packed() -> tuple[Callable[[], Any], Callable[[], Any]]:
    made = ours.learner("smollm2", "bf16")
    model = made.policy.model
    rollout = collect(made.sampler, 0)[0]

    def learn() -> None:
        forward(model, rollout, 1.0).logp_NT.sum().backward()
        model.zero_grad()

    def padded() -> None:
        known, packed.ARCHITECTURES = packed.ARCHITECTURES, ()
        try:
            learn()
        finally:
            packed.ARCHITECTURES = known

    return learn, padded


def _kept(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x, w = torch.randn(1024, 576, generator=generator), torch.randn(49152, 576, generator=generator) * 0.02
    token = torch.randint(49152, (1024,), generator=generator)
    keep = _backward(lambda x, w: logprobs._ChunkedHead.apply(x, w, None, token, 1.0, 256, False, torch.bfloat16)[0], x, w)

    def again() -> None:
        size, logprobs.KEPT_BYTES = logprobs.KEPT_BYTES, 0
        try:
            keep()
        finally:
            logprobs.KEPT_BYTES = size

    return keep, again
