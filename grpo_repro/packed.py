"""Hidden states of many responses in one row without padding: a prompt is computed once for its whole group.

The G responses of a group share their prompt, and attention is causal, so the prompt's states are the same for all of them: one row
[prompt 1 | … | prompt B | response 1 | …] holds every token once, and only attention looks at it as padded [N, T] again. Gradients add
up as they do when each response carries its own copy. The last token of a response predicts nothing and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_repro.types import Rollout

ATTENTION = "grpo_packed"
# Every position sees all before it, through the attention interface of transformers, and nothing else looks across tokens.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo2", "smollm3")


@dataclass(frozen=True)
class Layout:
    """Where the tokens of B prompts [B, P] and N responses [N, T−1] stand in the packed row of S slots; absent ones point at slot 0."""

    token_1S: Tensor
    position_1S: Tensor
    prompt_BP: Tensor  # slots
    response_NT: Tensor
    group_N: Tensor  # which prompt a response continues
    seen_B1PP: Tensor  # bool: which keys a query sees
    seen_N1TS: Tensor
    from_prompt: Tensor  # the real places of the padded [B·P] and [N·T], in the packed order
    from_response: Tensor
    predicts_M: Tensor  # slot whose state predicts the m-th live token


def supports(model: PreTrainedModel) -> bool:
    config = model.config
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    mistral_window = config.model_type == "mistral" and config.sliding_window is not None
    return config.model_type in ARCHITECTURES and not windowed and not mistral_window


def attach(model: PreTrainedModel) -> None:
    """Let the model attend through `_attend`, which for all but packed rows is transformers' own scaled dot-product attention."""
    model.config._attn_implementation = ATTENTION


def hidden(model: PreTrainedModel, r: Rollout) -> Tensor:
    """The states that predict live tokens, [M, D], in the order of `r.mask_NT`'s True entries."""
    attach(model)
    lay = layout(r)
    none = lay.token_1S.new_ones(1, 1, 1, 1)  # four dimensions: taken as it is, where None would be made into a mask of S × S
    states_1SD = model.base_model(
        input_ids=lay.token_1S, position_ids=lay.position_1S, attention_mask=none, use_cache=False, layout=lay
    ).last_hidden_state
    return states_1SD[0].index_select(0, lay.predicts_M)


def layout(r: Rollout) -> Layout:
    """How a rollout is packed. Rows of one group must share their prompt."""
    device, (N, T) = r.group_N.device, r.response_NT.shape
    ids, group_N = torch.unique(r.group_N, return_inverse=True)
    first_B = torch.full((len(ids),), N, device=device).scatter_reduce(0, group_N, torch.arange(N, device=device), "amin")
    P = r.prompt_NP.shape[1]
    slot_P, step_T = torch.arange(P, device=device), torch.arange(T - 1, device=device)
    pad_B = P - r.prompt_length_N[first_B]
    there_BP = slot_P >= pad_B[:, None]
    there_NT = step_T < r.length_N[:, None] - 1
    prompt_BP, size = _slots(there_BP, 0)
    response_NT, _ = _slots(there_NT, size)
    token = torch.cat([r.prompt_NP[first_B][there_BP], r.response_NT[:, : T - 1][there_NT]])
    position = torch.cat([(slot_P - pad_B[:, None])[there_BP], (r.prompt_length_N[:, None] + step_T)[there_NT]])
    causal_PP, causal_TT = slot_P <= slot_P[:, None], step_T <= step_T[:, None]
    own_PP = torch.eye(P, dtype=torch.bool, device=device)  # an absent query sees itself: no empty softmax
    prompt_N1TP = there_BP[group_N][:, None, None].expand(N, 1, T - 1, P)
    states_NT = torch.cat([prompt_BP[group_N, -1:], response_NT], 1)
    return Layout(
        token[None],
        position[None],
        prompt_BP,
        response_NT,
        group_N,
        (there_BP[:, None, None] & causal_PP) | own_PP,
        torch.cat([prompt_N1TP, (there_NT[:, None, None] & causal_TT)], -1),
        there_BP.flatten().nonzero().squeeze(1),
        there_NT.flatten().nonzero().squeeze(1),
        states_NT[r.mask_NT],
    )


def batches(r: Rollout, token_budget: int) -> list[Tensor]:
    """Row indices of micro-batches of at most `token_budget` packed tokens: group after group, short rows of a group first.

    A group that does not fit is cut, and its prompt computed again; a row longer than the budget is alone. Deterministic.
    """
    length_N, prompt_N, group_N = r.length_N.cpu(), r.prompt_length_N.cpu(), r.group_N.cpu()
    order = sorted(range(len(length_N)), key=lambda n: (int(group_N[n]), int(length_N[n]), n))
    made: list[list[int]] = []
    held: set[int] = set()
    used = 0
    for n in order:
        group = int(group_N[n])
        cost = int(length_N[n]) + (0 if group in held else int(prompt_N[n]))
        if not made or used + cost > token_budget:
            made.append([])
            held, used, cost = set(), 0, int(length_N[n] + prompt_N[n])
        made[-1].append(n)
        held.add(group)
        used += cost
    return [torch.tensor(rows, device=r.group_N.device) for rows in made]


def _slots(there: Tensor, start: int) -> tuple[Tensor, int]:
    """Consecutive slots for the True entries of a padded mask, 0 for the others; and the next free slot."""
    count = there.flatten().cumsum(0)
    return (count.view(there.shape) - 1 + start).masked_fill(~there, 0), start + int(count[-1]) if count.numel() else start


def _attend(
    module: Any,
    q_1HSd: Tensor,
    k_1KSd: Tensor,
    v_1KSd: Tensor,
    mask: Any,
    scaling: float,
    layout: Layout | None = None,
    dropout: float = 0.0,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row: prompts among themselves, responses over their prompt and themselves. Returns [1, S, H, d]."""
    if (lay := layout) is None:
        return sdpa_attention_forward(module, q_1HSd, k_1KSd, v_1KSd, mask, scaling=scaling, dropout=dropout, **rest)
    wide = torch.float32 if q_1HSd.device.type == "cpu" else q_1HSd.dtype  # bf16 attention is slow on CPUs, its backward very
    q, k, v = (x[0].transpose(0, 1).to(torch.promote_types(x.dtype, wide)) for x in (q_1HSd, k_1KSd, v_1KSd))
    grouped = q.shape[1] != k.shape[1]

    def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, seen, dropout, scale=scaling, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(0, 1)

    kp_BPKd, vp_BPKd = _at(k, lay.prompt_BP), _at(v, lay.prompt_BP)
    y = attention(_at(q, lay.prompt_BP), kp_BPKd, vp_BPKd, lay.seen_B1PP).index_select(0, lay.from_prompt)
    if lay.response_NT.shape[1]:
        k_NSKd = torch.cat([kp_BPKd.index_select(0, lay.group_N), _at(k, lay.response_NT)], 1)
        v_NSKd = torch.cat([vp_BPKd.index_select(0, lay.group_N), _at(v, lay.response_NT)], 1)
        continued = attention(_at(q, lay.response_NT), k_NSKd, v_NSKd, lay.seen_N1TS)
        y = torch.cat([y, continued.index_select(0, lay.from_response)])
    return y[None].to(q_1HSd.dtype), None


def _at(x_SHd: Tensor, slot: Tensor) -> Tensor:
    return x_SHd.index_select(0, slot.flatten()).view(*slot.shape, *x_SHd.shape[1:])


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
