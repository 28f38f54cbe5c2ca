"""Engines that draw by a generator of their own (vLLM): what they are asked, what they must answer, how far they may be off.

Every response is asked for with a seed derived from (seed, step, prompt, member), so a run repeats; but the tokens are not those that
our indexed uniforms give, so the engine is part of what a run's numbers depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from grpo_repro.policy import Policy
from grpo_repro.types import EngineError
from grpo_repro.uniform import TOKENS, uniform

ROOM = 2**10  # seeds of one prompt lie side by side; more members than this would share seeds with another prompt, rarely


@dataclass(frozen=True)
class Ask:
    """n responses to one prompt; response i is drawn with seed + i (that is how vLLM seeds the n of a request)."""

    prompt: tuple[int, ...]
    seed: int
    n: int


@dataclass(frozen=True)
class Completion:
    """One response: its tokens, the end token included, and the log-prob of each, of the distribution it was drawn from."""

    tokens: Sequence[int]
    logp: Sequence[float]


class Engine(Protocol):
    @property
    def name(self) -> str:
        """For messages."""

    def draw(
        self, asks: Sequence[Ask], limit: int, end_ids: Collection[int], temperature: float, top_p: float, top_k: int
    ) -> list[list[Completion]]:
        """The n responses of each ask, at most `limit` tokens each, ended by an end token or by the limit. Raises EngineError."""

    def sync(self, policy: Policy) -> None:
        """From here on draw from the policy's present weights. Raises EngineError where they did not arrive whole."""

    def close(self) -> None:
        """Give back memory, processes and files; a second call does nothing."""


def asks_of(prompts: Sequence[tuple[int, ...]], seed_N: Sequence[int], *, alone: bool = False) -> list[Ask]:
    """Rows as asks: consecutive rows of one prompt whose seeds count up by one are one ask, unless each is to stand `alone`."""
    rows = list(zip(prompts, seed_N, strict=True))
    starts = [0] + [
        i + 1 for i, (a, b) in enumerate(pairwise(rows)) if alone or (b[0], b[1]) != (a[0], a[1] + 1)
    ]  # where a new ask begins
    return [Ask(*rows[a], b - a) for a, b in pairwise([*starts, len(rows)])]


def seeds(seed: int, step_N: Tensor, prompt_N: Tensor, member_N: Tensor, offset_N: Tensor) -> list[int]:
    """A seed a row, below 2^63: the prompt's own (sample −1 of its uniforms, at the row's first token) plus the member."""
    base_N = (uniform(seed, TOKENS, step_N, prompt_N, -1, offset_N) * 2**52).long() * ROOM
    return [int(s) for s in base_N + member_N]


def answered(
    name: str, asks: Sequence[Ask], answers: Sequence[Sequence[Completion]], limit: int, end_ids: Collection[int], vocab: int
) -> tuple[Tensor, Tensor]:
    """token_NT (int64) and logp_NT (float32) of the rows that were asked for, T = limit; what follows a row's end is undefined.

    Raises EngineError where the engine returned fewer responses, tokens or log-probs than it was asked for.
    """
    if len(answers) != len(asks):
        raise EngineError(f"the engine {name} answered {len(answers)} of {len(asks)} prompts: see its log, then start it anew.")
    token_NT = torch.zeros(sum(a.n for a in asks), limit, dtype=torch.int64)
    logp_NT = torch.zeros(token_NT.shape)
    row = 0
    for ask, group in zip(asks, answers, strict=True):
        if len(group) != ask.n:
            raise EngineError(
                f"the engine {name} returned {len(group)} of the {ask.n} samples a prompt that it was asked for: see its log, then "
                "start it anew."
            )
        for drawn in group:
            token_NT[row, : len(drawn.tokens)], logp_NT[row, : len(drawn.tokens)] = _checked(name, drawn, limit, end_ids, vocab)
            row += 1
    return token_NT, logp_NT


def _checked(name: str, drawn: Completion, limit: int, end_ids: Collection[int], vocab: int) -> tuple[Tensor, Tensor]:
    tokens, n = list(drawn.tokens), len(drawn.tokens)
    if len(drawn.logp) != n or any(x is None for x in drawn.logp):
        given = sum(x is not None for x in drawn.logp)
        raise EngineError(
            f"the engine {name} returned {given} log-probs for a response of {n} tokens: π_sampler must be known at every token; "
            "let it return the drawn token's log-prob (a vLLM server: do not lower --max-logprobs)."
        )
    if n > limit:
        raise EngineError(
            f"the engine {name} returned {n} tokens, more than the limit of {limit}: see its log, then start it anew."
        )
    if n < limit and (not n or tokens[-1] not in end_ids):
        raise EngineError(
            f"the engine {name} stopped after {n} of {limit} tokens without an end token: give it a context that holds prompt "
            "and response (--max-model-len), and no stop words of its own."
        )
    if out := [t for t in tokens if not 0 <= t < vocab]:
        raise EngineError(
            f"the engine {name} drew the token {out[0]}, which the model of {vocab} tokens lacks: it serves another model; start it "
            "with the policy's."
        )
    return torch.tensor(tokens), torch.tensor([float(x) for x in drawn.logp])
