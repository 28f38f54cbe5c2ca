"""Random small models of the architectures we decode, and prompts for them: nothing here is trained or downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from grpo_repro import policy as policies
from grpo_repro.policy import Policy
from grpo_repro.types import Prompt, Rollout

V, END, PAD = 23, 21, 22
ENDS = frozenset({END, 3, 8, 14})  # several, so that responses of random models end at different lengths
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_yarn": LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def random_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Every parameter is random, norms and biases too, and the logits are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_((1.0 if "norm" in key else 0.0) + 0.3 * torch.randn(weight.shape, generator=generator))
    return model.to(dtype).eval()


def random_policy(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Policy:
    tokenizer = policies.tiny("0123456789abcdefghijk", end="$", pad="_").tokenizer
    return Policy(random_model(name, seed, dtype), tokenizer, ENDS, name)


def prompts(*lengths: int) -> list[Prompt]:
    """Prompts of these lengths, different from each other."""
    return [Prompt(f"p{i}", "", tuple((5 * i + 3 * j + 1) % 20 for j in range(n)), "") for i, n in enumerate(lengths)]


def plain_logp(model: PreTrainedModel, rollout: Rollout, temperature: float) -> list[torch.Tensor]:
    """log softmax(logits / T) of each response by itself: one row, no padding, no mask, the module's own forward."""
    rows = []
    for n, length in enumerate(rollout.length_N.tolist()):
        prompt = torch.tensor(rollout.prompts[int(rollout.group_N[n])].tokens)
        tokens = torch.cat([prompt, rollout.response_NT[n, :length]])
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits / temperature, -1)[torch.arange(length), tokens[len(prompt) :]])
    return rows


def letters(folder: Path) -> Path:
    """A tiny random model that can read and write any English problem, a letter a token, saved as a folder."""
    symbols = "".join(chr(c) for c in range(32, 127) if chr(c) not in "~`")
    policies.save(policies.tiny(symbols, end="~", pad="`", d=16, layers=1, heads=2, ffn=16, context=200), folder)
    return folder
