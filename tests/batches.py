"""What several test files build: minibatches (ragged ones, or by hand), the steps from rewards to gradient, every variant."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin

import oracle
import torch
from torch import Tensor

from grpo_repro import knobs, presets
from grpo_repro.objective import Objective, loss, score
from grpo_repro.spec import parameters, unbind
from grpo_repro.types import Forward, Minibatch, Norm

F64 = torch.float64
PRESETS = {name: value for name, value in vars(presets).items() if isinstance(value, Objective)}


def minibatch(
    r: list[float], group: list[int], mask: list[list[int]], limit: int = 8, dtype: torch.dtype = F64, **more: Any
) -> Minibatch:
    """By hand; `more` holds nested lists or tensors (old, sampler, ref, advantage …) under their field names."""
    mask_NT = torch.tensor(mask, dtype=torch.bool)
    given = {k: v if isinstance(v, Tensor) or k == "cut_N" else torch.tensor(v, dtype=dtype) for k, v in more.items()}
    b = Minibatch(
        mask_NT=mask_NT,
        r_N=torch.tensor(r, dtype=dtype),
        group_N=torch.tensor(group),
        length_N=mask_NT.sum(1),
        cut_N=torch.tensor(given.pop("cut_N", [False] * len(r))),
        limit=limit,
    )
    return replace(b, **given)


def on_policy(
    advantage: list[float], mask: list[list[int]], limit: int = 8, logp: float = -1.0, **more: Any
) -> tuple[Forward, Minibatch]:
    """Rows with a given Â and w = 1: the loss is a weighted sum of −Â."""
    logp_NT = torch.full((len(mask), len(mask[0])), logp, dtype=F64, requires_grad=True)
    b = minibatch([0.0] * len(mask), [0] * len(mask), mask, limit, **more)
    old_NT = logp_NT.detach().clone()
    return Forward(logp_NT), replace(b, advantage=torch.tensor(advantage, dtype=F64).unsqueeze(1), old_NT=old_NT)


def value_and_gradient(objective: Objective, now: Forward, b: Minibatch) -> tuple[Tensor, Tensor]:
    """Loss and its gradient, for a batch that has its advantages already."""
    total, _ = loss(objective, now, b, Norm.of(b))
    return total.detach(), torch.autograd.grad(total, now.logp_NT)[0]


def from_rewards(objective: Objective, now: Forward, b: Minibatch) -> tuple[Tensor, Tensor]:
    """Rewards → score → Norm → loss: its value, and its gradient at every row of the rollout."""
    scored = score(objective, b)
    kept = Forward(**{f.name: v[scored.row_K] for f in fields(now) if (v := getattr(now, f.name)) is not None})
    total, _ = loss(objective, kept, scored.b, Norm.of(scored.b))
    return total.detach(), torch.autograd.grad(total, now.logp_NT)[0]


def random_batch(seed: int, dtype: torch.dtype = F64, drift: float = 0.3, tokens: int = 5) -> tuple[Forward, Minibatch]:
    """Ragged groups (one of one row, one flat), shuffled, unequal lengths, holes, a masked row, old ≠ sampler ≠ ref ≠ now."""
    g = torch.Generator().manual_seed(seed)
    sizes = [1, *(int(torch.randint(2, 5, (1,), generator=g)) for _ in range(4))]
    group_N = torch.repeat_interleave(torch.tensor([7, 3, 11, 5, 2]), torch.tensor(sizes))
    r_N = torch.randint(0, 4, (len(group_N),), generator=g).to(dtype) / 3
    r_N[group_N == 3] = 1.0  # flat
    order_N = torch.randperm(len(group_N), generator=g)
    group_N, r_N = group_N[order_N], r_N[order_N]
    rows = len(group_N)
    length_N = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask_NT = torch.arange(tokens) < length_N.unsqueeze(1)
    mask_NT &= torch.rand(rows, tokens, generator=g) < 0.85
    mask_NT[0] = False  # e.g. an answer that the environment wrote

    def around(center_NT: Tensor, by: float) -> Tensor:
        return center_NT + by * torch.randn(rows, tokens, generator=g, dtype=dtype)

    logp_NT = around(torch.full((rows, tokens), -2.0, dtype=dtype), 0.7).clamp(max=-1e-3)
    old_NT = around(logp_NT, drift)
    now = Forward(
        logp_NT=logp_NT.requires_grad_(),
        entropy_NT=around(torch.ones(rows, tokens, dtype=dtype), 0.1),
        exact_kl_NT=around(torch.ones(rows, tokens, dtype=dtype), 0.1),
        value_NT=around(torch.zeros(rows, tokens, dtype=dtype), 1.0),
    )
    b = Minibatch(
        mask_NT=mask_NT,
        r_N=r_N,
        group_N=group_N,
        length_N=length_N,
        cut_N=torch.rand(rows, generator=g) < 0.25,
        limit=tokens + 2,
        old_NT=old_NT.detach(),
        sampler_NT=around(old_NT, drift).detach().clamp(max=-1e-3),
        ref_NT=around(logp_NT, 2 * drift).detach(),
        value_NT=around(torch.zeros(rows, tokens, dtype=dtype), 1.0),
        target_NT=around(torch.zeros(rows, tokens, dtype=dtype), 1.0),
        step_end_NT=mask_NT & (torch.rand(rows, tokens, generator=g) < 0.4),
        step_r_NT=torch.randint(0, 3, (rows, tokens), generator=g).to(dtype) / 2,
        prompt_weight_N=1 + (group_N % 3).to(dtype) / 4,
    )
    return now, b


def plain(now: Forward, b: Minibatch) -> oracle.Batch:
    """The same batch as the oracle's lists."""

    def lists(x: Tensor | None) -> list[Any]:
        assert x is not None
        return x.detach().tolist()

    x: dict[str, Any] = {
        "logp": [[torch.tensor(v, dtype=F64, requires_grad=True) for v in row] for row in lists(now.logp_NT)],
        "exact": lists(now.exact_kl_NT),
        "step_end": lists(b.step_end_NT),
    }
    at_tokens = {"old": b.old_NT, "sampler": b.sampler_NT, "ref": b.ref_NT, "value": b.value_NT, "step_r": b.step_r_NT}
    at_rows = {"r": b.r_N, "group": b.group_N, "cut": b.cut_N, "length": b.length_N, "prompt_weight": b.prompt_weight_N}
    x |= {k: lists(v) for k, v in {**at_tokens, **at_rows, "mask": b.mask_NT}.items()}
    return oracle.Batch(**x, limit=b.limit)


def oracle_spec(objective: Objective) -> dict[str, Any]:
    """Every slot as {"name": …, parameters}."""

    def named(bound: Callable[..., Any]) -> dict[str, Any]:
        spec = unbind(bound)
        return {"name": spec} if isinstance(spec, str) else spec

    slots = {f.name: getattr(objective, f.name) for f in fields(objective)}
    return {k: [named(g) for g in v] if isinstance(v, tuple) else named(v) for k, v in slots.items()}


ELSEWHERE = {
    ("kl_in_reward", "full"),
    ("reward", "learned"),
}  # refused: only the policy in the loss has it; needs a model in a folder
EXAMPLES = {"pattern": r"\d+", "note": "rare", "parts": [{"reward": "exact_match", "weight": 2.0}]}


def every_variant(slot: str) -> Iterator[Any]:
    """Each variant of a slot, in each combination of its words and switches; a number without default is .1, or 3 where it counts."""
    for name, function in knobs.variants(slot).items():
        if (slot, name) in ELSEWHERE:
            continue
        options: dict[str, tuple[Any, ...]] = {}
        for key, p in parameters(function).items():
            if get_origin(p.annotation) is Literal:
                options[key] = get_args(p.annotation)
            elif p.annotation is bool:
                options[key] = (True, False)
            elif key in EXAMPLES and p.default is inspect.Parameter.empty:
                options[key] = (EXAMPLES[key],)
            elif p.default is inspect.Parameter.empty:
                options[key] = (3 if get_args(p.annotation)[:1] == (int,) else 0.1,)
        for values in itertools.product(*options.values()):
            yield {"name": name, **dict(zip(options, values, strict=True))}


def name_of(spec: Any) -> str:
    return "-".join(str(v) for v in spec.values()) if isinstance(spec, dict) else str(spec)
