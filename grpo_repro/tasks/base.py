"""What every task is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from grpo_repro.types import Prompt, UserError
from grpo_repro.uniform import DATA, uniform

Encode = Callable[[str], tuple[int, ...]]


def no_steps(prompt: Prompt, pieces: Sequence[str]) -> Sequence[tuple[int, float]]:
    """A task whose responses have no steps that can be verified."""
    return ()


def no_positions(pieces: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """A task whose responses have no tokens of note."""
    return {}


@dataclass(frozen=True)
class Task:
    """Prompts, a limit, and a verifier.

    verify(prompt, text) → (1 right or 0 wrong, notes: what else was seen, logged as means)
    positions(pieces)    → named token positions of a response, e.g. {"answer": [0, 1]}: where entropy is worth reading;
                           `pieces` are the response's tokens as the tokenizer spells them
    steps(prompt, pieces)  → (last token, 1 right or 0 wrong) of each reasoning step, in order; every step is right exactly where
                           the response is. Empty where the task has no steps
    models                 folders of reward models that a word in YAML stands for, e.g. {"preferences": …}
    new_range              further prompts that are never drawn, of a range that training never saw (numbers above all of its numbers)
    """

    name: str
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    limit: int  # response tokens, the end token included
    verify: Callable[[Prompt, str], tuple[float, Mapping[str, float]]]
    positions: Callable[[Sequence[str]], Mapping[str, Sequence[int]]]
    steps: Callable[[Prompt, Sequence[str]], Sequence[tuple[int, float]]] = no_steps
    models: Mapping[str, str] = field(default_factory=dict)
    new_range: tuple[Prompt, ...] = ()

    def draw(self, seed: int, step: int, n: int) -> tuple[Prompt, ...]:
        """n different training prompts, the levels in turn. Depends on (seed, step) alone, so a resumed run draws the same."""
        return _stratified(self.train, seed, step, n, f"task {self.name}")

    def exam(self, n: int) -> tuple[Prompt, ...]:
        """n held-out prompts, always the same ones, the levels in turn."""
        return _stratified(self.heldout, 0, -1, min(n, len(self.heldout)), f"task {self.name}")

    def new_exam(self, n: int) -> tuple[Prompt, ...]:
        """n prompts of the new range, as `exam`."""
        return _stratified(self.new_range, 0, -1, min(n, len(self.new_range)), f"task {self.name}")


def split(prompts: Sequence[Prompt], heldout: float = 0.2) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Train and held-out, by a hash of each prompt's content: the same problem is never on both sides, whatever the seed."""
    unique = list({p.id: p for p in prompts}.values())
    return tuple(p for p in unique if place(p.id) >= heldout), tuple(p for p in unique if place(p.id) < heldout)


def place(content: str) -> float:
    """Where in [0, 1) a content lies by its hash: the same on every machine, in every run."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest()) / 2**64


def _stratified(prompts: Sequence[Prompt], seed: int, step: int, n: int, what: str) -> tuple[Prompt, ...]:
    if n > len(prompts):
        raise UserError(f"{what} has {len(prompts)} training prompts; rollout.prompts asks for {n} different ones a step.")
    order = torch.argsort(uniform(seed, DATA, step, torch.arange(len(prompts)), 0, 0)).tolist()
    levels: dict[str, list[Prompt]] = {level: [] for level in sorted({p.level for p in prompts})}
    for i in order:
        levels[prompts[i].level].append(prompts[i])
    drawn: list[Prompt] = []
    while len(drawn) < n:
        for queue in levels.values():
            if queue and len(drawn) < n:
                drawn.append(queue.pop(0))
    return tuple(drawn)
