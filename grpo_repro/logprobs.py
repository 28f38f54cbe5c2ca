"""Log-probabilities of given responses under a model: teacher forcing, in fp32, at the sampling temperature.

Only hidden states that predict a live token meet the head, and over a large vocabulary they meet it in chunks, so the memory
follows the chunk and not the tokens. Masked positions are exactly 0 in value and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from grpo_repro import layers, packed
from grpo_repro.types import ABSENT, Forward, Rollout, UserError

LOWEST = -1e4  # log-prob of a token outside the support: its probability is exactly 0 in fp64 too
WHOLE_VOCABULARY = 1024  # up to this many symbols a rollout's distributions are kept whole, and KL is exact
KEPT_BYTES = 128 * 2**20  # of softmax that waits for the backward pass, over a large vocabulary
CACHED_BYTES = 4 * 2**20  # of fp32 logits that are worked on at once: what a core's caches hold
BLOCK = 4096  # rows of the head's gradient that are summed at once
SMALL_VOCABULARY = 4096  # up to here all logits are kept for the backward pass: faster, and twice differentiable
# Their logits are lm_head(hidden), nothing more. Others (soft caps, logit scales) go through their own forward.
PLAIN_HEADS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "gpt2", "olmo2", "phi3")


def forward(
    model: PreTrainedModel,
    rollout: Rollout,
    temperature: float,
    *,
    entropy: bool = False,
    exact_ref: Tensor | None = None,
    value_head: Callable[[Tensor], Tensor] | None = None,
    chunk: int = 128,
) -> Forward:
    """log π(token | prefix) of every response token, [N, T] fp32 with gradient, 0 outside the mask.

    entropy: also −Σ π log π in nats, detached. exact_ref: log π_ref [N, T, V] from `log_distributions`, for KL(π‖π_ref) summed
    over the vocabulary, with gradient. chunk: tokens whose logits exist at a time, over a large vocabulary. The temperature
    divides the logits first, as in the sampler; 0 (greedy) counts as 1. value_head: [M, D] → [M], a critic on the hidden states.
    A rollout that was drawn with top-p or top-k is scored over the same support.
    """
    r = trim(rollout)
    extra = rollout.mask_NT.shape[1] - r.mask_NT.shape[1]

    def place(x_M: Tensor) -> Tensor:
        zeros_NT = x_M.new_zeros(r.mask_NT.shape)
        return F.pad(zeros_NT.masked_scatter(r.mask_NT, x_M), (0, extra))

    token_M = r.response_NT[r.mask_NT]
    head = model.get_output_embeddings()
    plain = model.config.model_type in PLAIN_HEADS
    if value_head is not None and not plain:
        raise UserError(
            f"a critic needs a model whose hidden states are at hand, not {model.config.model_type!r}: use a Llama-style one"
        )
    hidden_MD = _hidden(model, r) if plain else ABSENT
    value_NT = ABSENT if value_head is None else place(value_head(hidden_MD))
    if plain and head.weight.shape[0] > SMALL_VOCABULARY and exact_ref is None and r.support_NTV is None:
        how = temperature or 1.0, chunk, entropy, layers.compute_dtype(model)
        logp_M, entropy_M = _ChunkedHead.apply(hidden_MD, head.weight, head.bias, token_M, *how)
        return Forward(place(logp_M), place(entropy_M) if entropy else ABSENT, value_NT=value_NT)
    logp_MV = _log_softmax(_logits(model, r, hidden_MD), r, temperature)
    logp_NT = place(logp_MV.gather(-1, token_M[:, None])[:, 0])
    kl_NT = ABSENT if exact_ref is None else place(_kl(logp_MV, exact_ref[:, : r.mask_NT.shape[1]][r.mask_NT]))
    return Forward(logp_NT, place(_entropy(logp_MV.detach())) if entropy else ABSENT, kl_NT, value_NT)


def log_distributions(model: PreTrainedModel, rollout: Rollout, temperature: float, *, gradient: bool = False) -> Tensor:
    """log π(· | prefix) over the whole vocabulary, [N, T, V] fp32, 0 outside the mask: for small vocabularies."""
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        r = trim(rollout)
        logq_MV = _log_softmax(_logits(model, r), r, temperature)
        logq_NTV = logq_MV.new_zeros(*rollout.mask_NT.shape, logq_MV.shape[-1])
        return logq_NTV.masked_scatter(rollout.mask_NT[..., None], logq_MV)


def exact_kl(logp_NTV: Tensor, logq_NTV: Tensor, mask_NT: Tensor) -> Tensor:
    """KL(p‖q) [N, T] summed over the vocabulary; 0 outside the mask in value and gradient, whatever is there."""
    hidden_NT1 = ~mask_NT[..., None]
    return _kl(logp_NTV.masked_fill(hidden_NT1, 0.0), logq_NTV.masked_fill(hidden_NT1, 0.0)).masked_fill(~mask_NT, 0.0)


def logprobs_from_logits(logits_NTV: Tensor, token_NT: Tensor, mask_NT: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the tokens, [N, T] in fp32 or better.

    Masked logits are filled *before* the softmax: NaN or infinities there reach neither the value nor the gradient.
    """
    scaled_NTV = _upcast(logits_NTV.masked_fill(~mask_NT[..., None], 0.0)) / (temperature or 1.0)
    token_NT1 = token_NT.masked_fill(~mask_NT, 0)[..., None]
    return torch.log_softmax(scaled_NTV, -1).gather(-1, token_NT1)[..., 0].masked_fill(~mask_NT, 0.0)


def micro_batches(model: PreTrainedModel, rollout: Rollout, token_budget: int) -> list[Tensor]:
    """Row indices of micro-batches of at most token_budget tokens, as the model computes them: packed, or padded."""
    return packed.batches(rollout, token_budget) if packed.supports(model) else padded_batches(rollout, token_budget)


def padded_batches(lengths: Rollout | Tensor, token_budget: int) -> list[Tensor]:
    """Row indices of micro-batches, each with rows × padded width ≤ token_budget, rows of similar length together.

    `lengths` is a Rollout (the width is then the longest prompt plus the longest response of the micro-batch) or total lengths
    [N]. A row longer than the budget gets a micro-batch of its own: nothing smaller exists. Deterministic.
    """
    if isinstance(lengths, Rollout):
        parts = torch.stack([lengths.prompt_length_N, lengths.length_N], -1).cpu()
        device = lengths.length_N.device
    else:
        parts, device = lengths[:, None].cpu(), lengths.device
    order = torch.argsort(parts.sum(-1), stable=True).tolist()
    batches: list[list[int]] = []
    width = torch.zeros_like(parts[:1]).sum(0)
    for row in order:
        wider = torch.maximum(width, parts[row])
        if batches and (len(batches[-1]) + 1) * int(wider.sum()) <= token_budget:
            batches[-1].append(row)
            width = wider
        else:
            batches.append([row])
            width = parts[row]
    return [torch.tensor(batch, device=device) for batch in batches]


def trim(rollout: Rollout) -> Rollout:
    """Without the columns that are padding in every row: prompts on the left, responses on the right."""
    if len(rollout.length_N) == 0:
        return rollout
    P, T = int(rollout.prompt_length_N.max()), int(rollout.length_N.max())
    at_tokens = ("response_NT", "mask_NT", "sampler_NT", "entropy_NT", "support_NTV")
    cut = {name: getattr(rollout, name)[:, :T] for name in at_tokens if getattr(rollout, name) is not None}
    return replace(rollout, prompt_NP=rollout.prompt_NP[:, rollout.prompt_NP.shape[1] - P :], **cut)


def _inputs(r: Rollout) -> dict[str, Any]:
    """Prompt and response with the attention mask and positions of a left- and right-padded batch."""
    P, T = r.prompt_NP.shape[1], r.response_NT.shape[1]
    slot_S = torch.arange(P + T, device=r.prompt_NP.device)
    pad_N1 = P - r.prompt_length_N[:, None]
    present_NS = (slot_S >= pad_N1) & (slot_S < P + r.length_N[:, None])
    return {
        "input_ids": torch.cat([r.prompt_NP, r.response_NT], 1),
        "attention_mask": present_NS.long(),
        "position_ids": (slot_S - pad_N1).clamp(min=0),
        "use_cache": False,
    }


def _hidden(model: PreTrainedModel, r: Rollout) -> Tensor:
    """The states that predict live tokens, [M, D]: the state at slot P − 1 + t predicts response token t."""
    P, T = r.prompt_NP.shape[1], r.response_NT.shape[1]
    with layers.computing(model):
        if packed.supports(model):
            return packed.hidden(model, r)
        states_NSD = model.base_model(**_inputs(r)).last_hidden_state
    return states_NSD[:, P - 1 : P + T - 1][r.mask_NT]


def _log_softmax(logits_MV: Tensor, r: Rollout, temperature: float) -> Tensor:
    """log π [M, V] at the temperature, over the support that the sampler had. Outside it the lowest number, never −inf: 0·∞ is NaN."""
    scaled_MV = _scaled(logits_MV, temperature or 1.0)
    if r.support_NTV is None:
        return torch.log_softmax(scaled_MV, -1)
    outside_MV = ~r.support_NTV[r.mask_NT]
    return torch.log_softmax(scaled_MV.masked_fill(outside_MV, -torch.inf), -1).masked_fill(outside_MV, LOWEST)


def _logits(model: PreTrainedModel, r: Rollout, hidden_MD: Tensor = ABSENT) -> Tensor:
    """The logits that predict live tokens, [M, V], in fp32 or better; from the hidden states where they are at hand."""
    if model.config.model_type in PLAIN_HEADS:
        return _upcast(model.get_output_embeddings()(_hidden(model, r) if hidden_MD is None else hidden_MD))
    P, T = r.prompt_NP.shape[1], r.response_NT.shape[1]
    with layers.computing(model):
        logits_NSV = model(**_inputs(r)).logits
    return _upcast(logits_NSV[:, P - 1 : P + T - 1][r.mask_NT])


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kl(logp_V: Tensor, logq_V: Tensor) -> Tensor:
    """Σ p (log p − log q) over the last dimension; a token with p = 0 contributes 0."""
    p_V = logp_V.exp()
    return (p_V * (logp_V - logq_V).masked_fill(p_V == 0, 0.0)).sum(-1)


def _entropy(logp_V: Tensor) -> Tensor:
    return -(logp_V.exp() * logp_V.clamp(min=torch.finfo(logp_V.dtype).min)).sum(-1)


class _ChunkedHead(torch.autograd.Function):
    """log softmax(x Wᵀ + b)/T at given tokens, a chunk of rows at a time, the products' operands in `dtype`.

    ∂logp/∂logits = (onehot − softmax)/T. The softmax is kept for the backward pass where all of it fits in KEPT_BYTES, and computed
    again where it does not: small batches pay one pass, large ones a bounded memory. Once differentiable.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_MD: Tensor,
        W_VD: Tensor,
        b_V: Tensor | None,
        token_M: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        W, b = W_VD.to(dtype), None if b_V is None else b_V.to(dtype)
        keep = any(ctx.needs_input_grad) and len(x_MD) * len(W) * W.itemsize <= KEPT_BYTES
        softmax_MV = W.new_empty(len(x_MD), len(W)) if keep else None
        logp_M = x_MD.new_empty(len(x_MD), dtype=torch.promote_types(x_MD.dtype, torch.float32))
        entropy_M = torch.zeros_like(logp_M)
        for rows in _chunks(0, len(x_MD), chunk):
            logits_RV = layers.product(x_MD[rows].to(dtype), W, b)
            for here in _cached(logits_RV):
                part = slice(rows.start + here.start, rows.start + here.stop)
                z_RV = _scaled(logits_RV[here], temperature)
                p_RV = torch.softmax(z_RV, -1)
                total_R = z_RV.amax(-1) - p_RV.amax(-1).log()  # log Σ exp z
                logp_M[part] = z_RV.gather(-1, token_M[part, None])[:, 0] - total_R
                if entropy:
                    entropy_M[part] = total_R - torch.linalg.vecdot(p_RV, z_RV.clamp(min=torch.finfo(z_RV.dtype).min))
                if softmax_MV is not None:
                    softmax_MV[part] = p_RV
        ctx.save_for_backward(x_MD, W_VD, b_V, token_M, logp_M)
        ctx.softmax_MV = softmax_MV
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_MD, W_VD, b_V, token_M, logp_M = ctx.saved_tensors
        want_x, want_W, want_b = ctx.needs_input_grad[:3]
        W, b = W_VD.to(ctx.dtype), None if b_V is None else b_V.to(ctx.dtype)
        dx_MD = torch.zeros_like(x_MD) if want_x else None
        wide = torch.promote_types(W_VD.dtype, torch.float32)  # sums over chunks must not round to bf16
        dW_VD = None if ctx.softmax_MV is not None or not want_W else torch.zeros_like(W_VD, dtype=wide)
        db_V = torch.zeros_like(b_V, dtype=wide) if want_b else None
        scale_M = -grad_M / ctx.temperature  # of a row of softmax − onehot; it meets x and dx, not the V wide rows
        kept_MV, ctx.softmax_MV = ctx.softmax_MV, None
        for rows in _chunks(0, len(x_MD), ctx.chunk if kept_MV is None else max(len(x_MD), 1)):
            if kept_MV is not None:
                p_RV = kept_MV
            else:
                p_RV = layers.product(x_MD[rows].to(ctx.dtype), W, b)
                for here in _cached(p_RV):
                    p_RV[here] = torch.softmax(_scaled(p_RV[here], ctx.temperature), -1)
            own_R = (logp_M[rows].exp() - 1.0).to(p_RV.dtype)  # p − 1 of the drawn token, not lost where p rounds to 1
            row_R = torch.arange(len(p_RV), device=p_RV.device)
            p_RV[row_R, token_M[rows]] = own_R  # scatter_ takes 10⁴ times as long
            x_RD = (x_MD[rows] * scale_M[rows, None]).to(ctx.dtype)
            for block in _chunks(0, len(W), len(W) if kept_MV is not None else BLOCK):  # no second matrix of W's size
                if dx_MD is not None:
                    dx_MD[rows] += layers.matmul(p_RV[:, block], W[block]).to(x_MD.dtype) * scale_M[rows, None]
                if want_W and kept_MV is not None:
                    dW_VD = layers.matmul(p_RV.t(), x_RD).to(wide)
                elif dW_VD is not None:
                    dW_VD[block] += layers.matmul(p_RV[:, block].t(), x_RD)
            if db_V is not None:
                db_V += scale_M[rows].to(wide) @ p_RV.to(wide)
        if want_W and dW_VD is None:  # not one token
            dW_VD = torch.zeros_like(W_VD)
        dW = None if dW_VD is None else dW_VD.to(W_VD.dtype)
        db = None if db_V is None else db_V.to(b_V.dtype)
        return dx_MD, dW, db, None, None, None, None, None


def _chunks(first: int, end: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, end)) for i in range(first, end, size))


def _cached(logits_RV: Tensor) -> Iterator[slice]:
    """Few rows at a time, whose fp32 logits stay in a core's caches from one operation to the next."""
    return _chunks(0, len(logits_RV), max(1, CACHED_BYTES // (logits_RV.shape[-1] * 4)))


def _scaled(logits_RV: Tensor, temperature: float) -> Tensor:
    """In fp32 or better, at the temperature."""
    wide_RV = _upcast(logits_RV)
    return wide_RV if temperature == 1.0 else wide_RV / temperature
