"""The data of one training step. It flows one way: Prompt → Rollout → Minibatch → Scored → Norm.

Shape suffixes, used everywhere in the package
    N  responses (rows; whole groups, which may be ragged)      T  response tokens, right-padded
    G  responses a group                                        P  prompt tokens, left-padded
    V  vocabulary        D  hidden size        1  a dimension that broadcasts        M, K  some rows or tokens of the above

Two behaviour policies, never confused: `old` is the trainer's own log-prob at the last sync (the clip's anchor), `sampler` is
what the engine recorded when it drew the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

# Ranges of knob parameters; `knobs.resolve` checks them and says which parameter is out of range.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Nucleus = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

ABSENT: Any = None  # a tensor that nobody asked for: what a variant reads, it must `need`

F = TypeVar("F", bound=Callable[..., Any])


def variant(
    needs: tuple[str, ...] = (),
    init: Callable[..., dict[str, float]] | None = None,
    update: Callable[..., dict[str, float]] | None = None,
    validate: Callable[..., str | None] | None = None,
    **traits: bool,
) -> Callable[[F], F]:
    """Mark a knob's function with what it `needs` (⊆ old, sampler, ref, values, steps, full_logits) and with its traits.

    The loop computes nothing that no variant needs; `check()` reads traits, never names. A variant with a memory takes a keyword
    `state` and has `init(**params)` → state and `update(state, metrics, **params)` → state, called once a rollout (adaptive.py).
    `validate(**params)` → a sentence where parameters, each in its range, make no sense together; `spec.bind` raises it.
    """

    def mark(function: F) -> F:
        function.needs = frozenset(needs)  # type: ignore[attr-defined]
        function.traits = frozenset(name for name, on in traits.items() if on)  # type: ignore[attr-defined]
        function.init, function.update, function.validate = init, update, validate  # type: ignore[attr-defined]
        return function

    return mark


class UserError(Exception):
    """A mistake in what the user gave us. The message is one sentence: what is wrong, where, and what to write instead."""


class EngineError(UserError):
    """An engine did not do what it was asked. It is raised before a step changes anything, so the run goes on from that step."""


class NonFinite(UserError):
    """A number of the step is NaN or infinite. The message names the tensor and the likely knob; the loop adds the step."""


@dataclass(frozen=True)
class Prompt:
    """One problem. `id` is a key of its content (the split goes by it); a group is never identified by it."""

    id: str
    text: str
    tokens: tuple[int, ...]
    answer: str
    level: str = "all"  # difficulty bucket, for metrics


@dataclass(frozen=True)
class Response:
    """What a reward function sees of one response: the text, and what the task's verifier found in it."""

    text: str
    tokens: tuple[int, ...]
    truncated: bool
    correct: float  # the task's verifier: 1 right, 0 wrong
    notes: Mapping[str, float]  # what else the task observed, e.g. {"rare": 2}
    u: float  # uniform in [0, 1), indexed by (seed, step, prompt, sample): chance in a reward stays paired between arms


class Drawn(NamedTuple):
    """What an engine drew: T tokens a row; what a row holds after its end token is undefined."""

    token_NT: Tensor  # int64
    logp_NT: Tensor  # float32, at the sampling temperature (at temperature 1 when greedy)
    entropy_NT: Tensor = ABSENT  # as in Rollout
    support_NTV: Tensor = ABSENT


@dataclass(frozen=True)
class Answer:
    """One response of the exam, as it is recorded."""

    part: str  # heldout, or new_range
    level: str
    prompt: str
    gold: str
    response: str
    correct: float
    length: int  # tokens
    notes: Mapping[str, float]


@dataclass(frozen=True)
class Rollout:
    """What the sampler produced: N responses to the prompts of one step."""

    prompts: tuple[Prompt, ...]  # one a group, in draw order: prompts[group_N[n]] belongs to row n
    group_N: Tensor  # int64
    prompt_NP: Tensor  # int64, left-padded
    prompt_length_N: Tensor  # int64
    response_NT: Tensor  # int64, right-padded
    length_N: Tensor  # int64, tokens present, the end token included
    mask_NT: Tensor  # bool, tokens the policy drew (a token inserted by the environment is present, but False here)
    sampler_NT: Tensor  # float32, log-prob recorded when drawn, at the sampling temperature
    cut_N: Tensor  # bool, no end token within the limit
    entropy_NT: Tensor = ABSENT  # float32, nats, of the distribution drawn from, where the engine tells it
    support_NTV: Tensor = ABSENT  # bool, with top-p or top-k: the tokens that could be drawn, for the trainer to renormalise over

    def rows(self, index_K: Tensor) -> Rollout:
        return replace(self, **{k: v[index_K] for k, v in _tensors(self).items()})


@dataclass(frozen=True)
class Forward:
    """The current policy on a Minibatch: the only thing with gradient. All at the sampling temperature."""

    logp_NT: Tensor
    entropy_NT: Tensor = ABSENT  # nats, detached
    exact_kl_NT: Tensor = ABSENT  # KL(π_θ‖π_ref) over the whole vocabulary
    value_NT: Tensor = ABSENT

    def masked(self, mask_NT: Tensor) -> Forward:
        """Exactly 0, in value and gradient, wherever the mask is False."""
        _fit(self, mask_NT)
        return Forward(**{k: v.masked_fill(~mask_NT, 0.0) for k, v in _tensors(self).items()})


@dataclass(frozen=True)
class Minibatch:
    """Everything the objective may read, without gradient. Rows are whole groups until micro-batching, which only slices."""

    mask_NT: Tensor  # bool, tokens in the loss
    r_N: Tensor  # reward
    group_N: Tensor  # int64 group ids; a group is one draw of a prompt
    length_N: Tensor  # int64 response tokens present
    cut_N: Tensor  # bool, truncated at the limit
    limit: int  # L_max, the longest response allowed, in tokens
    old_NT: Tensor = ABSENT
    sampler_NT: Tensor = ABSENT
    ref_NT: Tensor = ABSENT
    advantage: Tensor = ABSENT  # Â_N1 or Â_NT
    penalty_NT: Tensor = ABSENT  # β·KL where KL is in the reward
    value_NT: Tensor = ABSENT  # the critic when the rollout was made
    target_NT: Tensor = ABSENT  # what the critic is trained towards
    step_end_NT: Tensor = ABSENT  # bool, last token of a reasoning step
    step_r_NT: Tensor = ABSENT  # a step's own score, at its last token
    prompt_weight_N: Tensor = ABSENT

    def rows(self, index_K: Tensor) -> Minibatch:
        return replace(self, **{k: v[index_K] for k, v in _tensors(self).items()})

    def masked(self) -> Minibatch:
        """Detached, and 0 wherever the mask is False, whatever was there (NaN and infinities included)."""
        _fit(self, self.mask_NT)
        frozen = {k: v.detach() for k, v in _tensors(self).items()}
        at_tokens = {k: v for k, v in frozen.items() if v.shape == self.mask_NT.shape and v.is_floating_point()}
        return replace(self, **{**frozen, **{k: v.masked_fill(~self.mask_NT, 0.0) for k, v in at_tokens.items()}})

    @property
    def tokens_N1(self) -> Tensor:
        """|y_i| as the loss sees it: unmasked tokens a row, at least 1 so that a hidden row divides 0 by 1."""
        return self.mask_NT.sum(1, keepdim=True).clamp(min=1)

    @property
    def return_N(self) -> Tensor:
        """r, less the KL that is charged to the reward."""
        return self.r_N if self.penalty_NT is None else self.r_N - self.penalty_NT.sum(1)


@dataclass(frozen=True)
class Scored:
    """What `score` made of a rollout: the kept rows with their advantages, and the count of what was dropped."""

    b: Minibatch
    row_K: Tensor  # which rows of the rollout they are
    dropped_rows: int
    dropped_groups: int


@dataclass(frozen=True)
class Norm:
    """Denominators of one optimiser step, counted over the whole minibatch (and all ranks), never over a micro-batch.

    Dropped rows are not counted. `live_rows` have at least one unmasked token; a row hidden by `overlong` is not live.
    """

    rows: int
    live_rows: int
    tokens: int
    groups: int  # with a live row
    limit: int
    group_rows: Mapping[int, int] = field(default_factory=dict)  # live rows by group id
    sign_rows: tuple[int, int, int] = (0, 0, 0)  # live rows with Â < 0, = 0, > 0
    sign_tokens: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, b: Minibatch) -> Norm:
        live_N = b.mask_NT.any(1)
        ids, counts = torch.unique(b.group_N[live_N], return_counts=True)
        signs_rows = signs_tokens = (0, 0, 0)
        if b.advantage is not None:
            a_NT = b.advantage.expand(b.mask_NT.shape).masked_fill(~b.mask_NT, 0.0)
            signs_tokens = tuple(int(((a_NT.sign() == s) & b.mask_NT).sum()) for s in (-1, 0, 1))  # type: ignore[assignment]
            signs_rows = tuple(int(((a_NT.sum(1).sign() == s) & live_N).sum()) for s in (-1, 0, 1))  # type: ignore[assignment]
        return cls(
            rows=len(live_N),
            live_rows=int(live_N.sum()),
            tokens=int(b.mask_NT.sum()),
            groups=len(ids),
            limit=b.limit,
            group_rows=dict(zip(ids.tolist(), counts.tolist(), strict=True)),
            sign_rows=signs_rows,
            sign_tokens=signs_tokens,
        )


def _fit(data: Forward | Minibatch, mask_NT: Tensor) -> None:
    """Raises UserError where a tensor has not one number a token of the mask: broadcasting would hide it."""
    for name, x in _tensors(data).items():
        if name.endswith("_NT") and x.shape != mask_NT.shape:
            kind, shape, tokens = type(data).__name__, tuple(x.shape), tuple(mask_NT.shape)
            raise UserError(
                f"{kind}.{name} has shape {shape}, but the mask of the minibatch has {tokens}; give one number a token."
            )


def _tensors(data: Any) -> dict[str, Any]:
    return {f.name: v for f in fields(data) if isinstance(v := getattr(data, f.name), Tensor)}
