"""Our batched decoder for Llama-style models: a static KV cache, one prefill a prompt, finished rows dropped.

It reads the module's own weights at each call, so it is never out of step with the trainer. Shapes: L layers, R rows in flight,
K key-value heads, H query heads, S cache slots (P prompt slots, then the response), d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_repro.layers import Linear, Packed, compute_dtype
from grpo_repro.types import ABSENT, Drawn
from grpo_repro.uniform import draw, restrict

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
COMPACT = 0.9  # drop finished rows once the live ones are at most this share (measured: .8 to .95 are equal, .5 and 1 slower)


def supports(model: PreTrainedModel) -> str | None:
    """Why this decoder would not compute what the model computes, or None when it does."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        return f"its architecture {config.model_type!r} is not one of {', '.join(ARCHITECTURES)}"
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windowed or (config.model_type == "mistral" and config.sliding_window is not None):
        return "it has sliding-window attention"
    if config.rope_parameters.get("rope_type", "default") in ("dynamic", "longrope"):
        return "its rotary frequencies change with the length"
    blocks = (*model.model.layers, model.lm_head)
    if any(isinstance(m, nn.Linear) and type(m) not in (nn.Linear, Linear) for block in blocks for m in block.modules()):
        return "its linear layers are quantised or wrapped"
    if any(hasattr(m, "base_layer") for block in blocks for m in block.modules()):
        return "its linear layers carry adapters"
    return None


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt_MP: Tensor,
    prompt_length_M: Tensor,
    prompt_N: Tensor,
    u_NT: Tensor,
    end_V: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    *,
    compact: float = COMPACT,
    weights: Weights | None = None,
) -> Drawn:
    """Sample a response a row.

    prompt_MP holds the M distinct prompts, left-padded; row n continues prompt_MP[prompt_N[n]] with the uniforms u_NT[n].
    end_V marks the tokens that end a response. What a row holds after its end token is undefined. `weights`: prepared before, from
    the model as it is; by default they are prepared here, so that they are never out of step.
    """
    (N, T), P, device = u_NT.shape, prompt_MP.shape[1], prompt_MP.device
    weights = weights or Weights.of(model, P + T, N)
    token_TN = torch.zeros(T, N, dtype=torch.int64, device=device)
    logp_TN, entropy_TN = torch.zeros(T, N, device=device), torch.zeros(T, N, device=device)
    u_TN = u_NT.t().contiguous()
    support_TNV = torch.ones(T, N, len(end_V), dtype=torch.bool, device=device) if top_p < 1.0 or top_k > 0 else None

    pad_M = P - prompt_length_M
    slot_P = torch.arange(P, device=device)
    cache = weights.cache(len(prompt_MP), P)
    seen_M1PP = (slot_P >= pad_M[:, None, None, None]) & (slot_P <= slot_P[:, None])
    seen_M1PP |= torch.eye(P, dtype=torch.bool, device=device)  # a padding slot sees itself: no empty softmax
    x_MPD = weights.layers_forward(prompt_MP, (slot_P - pad_M[:, None]).clamp(min=0), cache, 0, seen_M1PP)
    logits_RV = weights.logits(x_MPD[:, -1])[prompt_N]
    prompt_cache, cache = cache, weights.cache(N, P + T)
    cache.keys[..., :P] = prompt_cache.keys[:, prompt_N]
    cache.values[..., :P, :] = prompt_cache.values[:, prompt_N]

    row_R, pad_R = torch.arange(N, device=device), pad_M[prompt_N]
    done_R = torch.zeros(N, dtype=torch.bool, device=device)
    ragged = bool((pad_M > 0).any())
    bias_R11S = _bias(pad_R, P + T, x_MPD.dtype) if ragged else None
    look = 1 if device.type == "cpu" else 8  # counting the live rows makes an accelerator wait
    for t in range(T):
        if support_TNV is not None:
            logits_RV = restrict(logits_RV, temperature, top_p, top_k)
            support_TNV[t, row_R] = torch.isfinite(logits_RV)
        token_R, logp_TN[t, row_R], entropy_TN[t, row_R] = draw(logits_RV, u_TN[t, row_R], temperature)
        token_TN[t, row_R] = token_R
        done_R |= end_V[token_R]
        if t == T - 1:
            break
        if t % look == look - 1:
            live = len(done_R) - int(done_R.sum())
            if live == 0:
                break
            if live <= compact * len(done_R):
                keep_R = torch.nonzero(~done_R)[:, 0]
                for keys, values in zip(cache.keys, cache.values, strict=True):  # layer by layer, in place: no second cache
                    keys[:live, ..., : P + t] = keys[..., : P + t].index_select(0, keep_R)
                    values[:live, :, : P + t] = values[:, :, : P + t].index_select(0, keep_R)
                cache = _Cache(cache.keys[:, :live], cache.values[:, :live])
                row_R, pad_R, token_R, done_R = row_R[keep_R], pad_R[keep_R], token_R[keep_R], done_R[keep_R]
                bias_R11S = bias_R11S[keep_R] if bias_R11S is not None else None
        seen = bias_R11S[..., : P + t + 1] if bias_R11S is not None else None
        x_R1D = weights.layers_forward(token_R[:, None], (P + t - pad_R)[:, None], cache, P + t, seen)
        logits_RV = weights.logits(x_R1D[:, 0])
    support_NTV = ABSENT if support_TNV is None else support_TNV.transpose(0, 1)
    return Drawn(token_TN.t(), logp_TN.t(), entropy_TN.t(), support_NTV)


def _bias(pad_R: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """0 where a slot may be seen, −inf in the padding before the prompt."""
    hidden_R11S = torch.arange(slots, device=pad_R.device) < pad_R[:, None, None, None]
    return torch.zeros(hidden_R11S.shape, dtype=dtype, device=pad_R.device).masked_fill_(hidden_R11S, -torch.inf)


class _Cache(NamedTuple):
    """Keys lie as the product with a query reads them. Both are in the dtype of the products' operands: half the traffic in bf16."""

    keys: Tensor  # [L, R, K, d, S]
    values: Tensor  # [L, R, K, S, d]


@dataclass
class _Layer:
    """One decoder layer, with q, k, v and gate, up fused: fewer and larger products."""

    input_norm: Tensor
    qkv: Packed
    qk_norm: Tensor | None  # [H + K, d], Qwen3
    out: Packed
    mlp_norm: Tensor
    gate_up: Packed
    down: Packed


@dataclass
class Weights:
    """A model's weights as the decoder reads them: joined, cast, packed."""

    layers: list[_Layer]
    head: Packed
    model: PreTrainedModel
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos_S1d: Tensor
    sin_S1d: Tensor  # its first half negated, so that rotate_half is a roll

    @classmethod
    def of(cls, model: PreTrainedModel, slots: int, rows: int) -> Weights:
        """As they are now, for `slots` tokens a row (prompt and response) and `rows` decoded at once."""
        config, core, dtype = model.config, model.model, compute_dtype(model)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        position_1S = torch.arange(slots, device=model.device)[None]
        cos_1Sd, sin_1Sd = core.rotary_emb(core.embed_tokens.weight[:1], position_1S)
        d = cos_1Sd.shape[-1]
        sign_d = torch.ones(d, device=model.device, dtype=sin_1Sd.dtype)
        sign_d[: d // 2] = -1

        def packed(*parts: nn.Linear) -> Packed:
            return Packed(parts, dtype, rows)

        layers = []
        for layer in core.layers:
            a, m = layer.self_attn, layer.mlp
            norm = None
            if hasattr(a, "q_norm"):
                norm = torch.cat([a.q_norm.weight.expand(heads, d), a.k_norm.weight.expand(kv_heads, d)])
            layers.append(
                _Layer(
                    input_norm=layer.input_layernorm.weight,
                    qkv=packed(a.q_proj, a.k_proj, a.v_proj),
                    qk_norm=norm,
                    out=packed(a.o_proj),
                    mlp_norm=layer.post_attention_layernorm.weight,
                    gate_up=packed(m.gate_proj, m.up_proj),
                    down=packed(m.down_proj),
                )
            )
        turn = cos_1Sd[0, :, None], (sin_1Sd * sign_d)[0, :, None]
        return cls(layers, packed(model.lm_head), model, heads, kv_heads, d, config.rms_norm_eps, *turn)

    def cache(self, rows: int, slots: int) -> _Cache:
        """An empty one."""
        head, (L, K, d) = self.model.lm_head.weight, (len(self.layers), self.kv_heads, self.head_dim)
        keys, values = (head.new_empty(L, rows, K, *last, dtype=self.head.dtype) for last in ((d, slots), (slots, d)))
        return _Cache(keys, values)

    def logits(self, x_RD: Tensor) -> Tensor:
        return self.head(self._norm(x_RD, self.model.model.norm.weight))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def layers_forward(self, token_RQ: Tensor, position_RQ: Tensor, cache: _Cache, slot: int, seen: Tensor | None) -> Tensor:
        """Hidden states x_RQD of Q new tokens a row, written to the cache's slots from `slot` on.

        `seen` is a boolean mask [R, 1, Q, S] for a prefill (Q = P), and an additive one [R, 1, 1, S] or None for one token.
        """
        (R, Q), H, K, d = token_RQ.shape, self.heads, self.kv_heads, self.head_dim
        cos, sin = self.cos_S1d[position_RQ], self.sin_S1d[position_RQ]
        x = self.model.model.embed_tokens(token_RQ)
        act = self.model.model.layers[0].mlp.act_fn
        for w, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            qkv = w.qkv(self._norm(x, w.input_norm)).view(R, Q, H + 2 * K, d)
            qk, v = qkv[:, :, : H + K], qkv[:, :, H + K :]
            if w.qk_norm is not None:
                qk = F.rms_norm(qk, (d,), None, self.eps) * w.qk_norm
            qk = qk * cos + qk.roll(d // 2, -1) * sin
            keys[..., slot : slot + Q] = qk[:, :, H:].permute(0, 2, 3, 1)
            values[:, :, slot : slot + Q] = v.transpose(1, 2)
            if Q > 1 or slot == 0:
                q, k, v = (z.transpose(1, 2) for z in (qk[:, :, :H], qk[:, :, H:], v))
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=H != K).transpose(1, 2)
            else:  # plain products over groups of heads: on CPU faster than the fused kernel for one query
                q = qk[:, 0, :H].view(R, K, H // K, d).to(keys.dtype)
                score = (q @ keys[..., : slot + 1]).float() * d**-0.5
                y = torch.softmax(score if seen is None else score + seen, -1).to(values.dtype) @ values[:, :, : slot + 1]
                y = y.to(x.dtype)
            x = x + w.out(y.reshape(R, Q, H * d))
            gate, up = w.gate_up(self._norm(x, w.mlp_norm), w.gate_up.dtype).chunk(2, -1)
            x = x + w.down(act(gate) * up, x.dtype)
        return x
