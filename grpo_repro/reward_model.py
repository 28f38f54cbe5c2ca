"""A learned reward: a decoder with a scalar head, loaded from a folder, that scores texts in batches.

The score of a response is the head's output at its last token. Text goes in, not tokens: the reward model has a tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_repro.types import Prompt, UserError

ROWS = 256  # scored at once
LOADED = 2  # reward models kept in memory


@dataclass(frozen=True)
class RewardModel:
    model: PreTrainedModel  # a causal backbone with a linear head `score` of one output
    tokenizer: PreTrainedTokenizerBase
    name: str

    def encode(self, prompt: str, response: str) -> list[int]:
        """Tokens of a user's turn and the answer to it; the plain texts joined where the tokenizer has no chat template."""
        text = prompt + response
        if self.tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(
                f"reward model {self.name!r} cannot read {text[:80]!r}: it has no token for a character of it."
            ) from error


@lru_cache(maxsize=LOADED)
def load(folder: str) -> RewardModel:
    """The reward model in a folder, in fp32, without gradients. Raises UserError when it is not one."""
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"reward model {folder!r}: there is no such folder with a config.json; train one or give another path.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"reward model {folder!r} could not be loaded ({type(error).__name__}: {reason}).") from error
    model, loading = loaded
    if loading["missing_keys"]:  # transformers would only warn, and draw a head at random
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(f"reward model {folder!r} lacks the weights {missing}: it was not trained as a reward model.")
    if getattr(getattr(model, "score", None), "out_features", 0) != 1:
        raise UserError(
            f"reward model {folder!r} has no head `score` with one output: its architecture is not a causal decoder's."
        )
    return RewardModel(model.eval().requires_grad_(False), tokenizer, Path(folder).name)


def values(scorer: RewardModel, tokens: Sequence[Sequence[int]]) -> Tensor:
    """r_NL, fp32, with gradient where the model has it: the head at each token of each row; what is beyond a row's end is padding."""
    length_N = torch.tensor([len(row) for row in tokens])
    if not length_N.all():
        raise UserError(f"reward model {scorer.name!r} was given an empty text: there is no token to score.")
    width, context = int(length_N.max()), int(scorer.model.config.get_text_config().max_position_embeddings)
    if width > context:
        raise UserError(f"reward model {scorer.name!r} reads at most {context} tokens, and prompt and response have {width}.")
    device = scorer.model.device
    ids_NL = torch.tensor([[*row, *([0] * (width - len(row)))] for row in tokens], device=device)
    mask_NL = (torch.arange(width) < length_N[:, None]).long().to(device)
    state_NLD = scorer.model.base_model(input_ids=ids_NL, attention_mask=mask_NL).last_hidden_state
    head: Any = scorer.model.score
    return head(state_NLD)[..., 0].float()


@torch.no_grad()
def score(scorer: RewardModel, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """One number a response, in order. Raises UserError for a text that the model cannot read."""
    tokens = [scorer.encode(prompt.text, text) for prompt, text in zip(prompts, responses, strict=True)]
    scores: list[float] = []
    for part in (tokens[i : i + ROWS] for i in range(0, len(tokens), ROWS)):
        scores += [row[len(own) - 1] for row, own in zip(values(scorer, part).tolist(), part, strict=True)]
    return scores


def step_scores(scorer: RewardModel, prompts: Sequence[Prompt], prefixes: Sequence[Sequence[str]]) -> list[list[float]]:
    """The score of each prefix that ends a reasoning step: prefixes[n] are those of a response to prompts[n], in order."""
    repeated = [prompt for prompt, own in zip(prompts, prefixes, strict=True) for _ in own]
    flat = iter(score(scorer, repeated, [text for own in prefixes for text in own]))
    return [[next(flat) for _ in own] for own in prefixes]
