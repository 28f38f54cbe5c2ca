"""The same sampling through `generate` of transformers: slower, but for every causal language model that it can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from grpo_repro.types import ABSENT, Drawn
from grpo_repro.uniform import draw, restrict


class _IndexedDraw(LogitsProcessor):
    """Turns greedy search into sampling with given uniforms: every token but the drawn one gets −inf. Records log-probs."""

    def __init__(self, prompt: int, u_NT: Tensor, vocab: int, temperature: float, top_p: float, top_k: int) -> None:
        self.prompt, self.u_NT, self.temperature, self.top_p, self.top_k = prompt, u_NT, temperature, top_p, top_k
        self.logp_NT, self.entropy_NT = torch.zeros(u_NT.shape, device=u_NT.device), torch.zeros(u_NT.shape, device=u_NT.device)
        kept = top_p < 1.0 or top_k > 0
        self.support_NTV = torch.ones(*u_NT.shape, vocab, dtype=torch.bool, device=u_NT.device) if kept else ABSENT

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        t = input_ids.shape[1] - self.prompt
        if self.support_NTV is not None:
            scores = restrict(scores, self.temperature, self.top_p, self.top_k)
            self.support_NTV[:, t] = torch.isfinite(scores)
        token_N, self.logp_NT[:, t], self.entropy_NT[:, t] = draw(scores, self.u_NT[:, t], self.temperature)
        return torch.full_like(scores, -torch.inf).scatter_(-1, token_N[:, None], 0.0)


def generate(
    model: PreTrainedModel,
    prompt_MP: Tensor,
    prompt_length_M: Tensor,
    prompt_N: Tensor,
    u_NT: Tensor,
    end_V: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Drawn:
    """Same arguments and result as `decoder.decode`."""
    (N, T), P = u_NT.shape, prompt_MP.shape[1]
    prompt_NP = prompt_MP[prompt_N]
    present_NP = torch.arange(P, device=prompt_MP.device) >= P - prompt_length_M[prompt_N, None]
    sampler = _IndexedDraw(P, u_NT, len(end_V), temperature, top_p, top_k)
    ends = torch.nonzero(end_V)[:, 0].tolist()
    config = GenerationConfig(do_sample=False, max_new_tokens=T, eos_token_id=ends, pad_token_id=ends[0] if ends else 0)
    generator: Any = model
    # generate fills what we leave open from the model's own generation config (Qwen ships a repetition penalty there)
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.no_grad():
            out_NS = generator.generate(
                input_ids=prompt_NP,
                attention_mask=present_NP.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
            )
    finally:
        model.generation_config = own
    token_NT = torch.zeros(N, T, dtype=torch.int64, device=prompt_MP.device)
    token_NT[:, : out_NS.shape[1] - P] = out_NS[:, P:]
    return Drawn(token_NT, sampler.logp_NT, sampler.entropy_NT, sampler.support_NTV)
