"""Sampling responses: one `sample()` over several engines. Chance is indexed, so engines and batch sizes agree on the tokens.

An engine is a name (it reads the policy's own module) or an object (engine.py: vLLM, which draws by seeds of its own).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_repro.policy import Policy
from grpo_repro.rollout import decoder, generate
from grpo_repro.rollout.engine import Engine, answered, asks_of, seeds
from grpo_repro.types import ABSENT, Drawn, NonFinite, Prompt, Rollout, UserError
from grpo_repro.uniform import TOKENS, uniform

ENGINES = {"decoder": decoder.decode, "transformers": generate.generate}


@dataclass(frozen=True)
class Decoding:
    """How tokens are drawn. The temperature is also the scoring temperature; 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    engine: str | Engine = "decoder"
    batch_rows: int = 512


@dataclass(frozen=True)
class Births:
    """Where a row's chance comes from: u(seed, …, step, prompt, member, token). It stays with a row that is finished later."""

    step_N: Tensor
    prompt_N: Tensor
    member_N: Tensor

    @classmethod
    def of(cls, group_N: Tensor, step: int) -> Births:
        """Of responses begun in this step: a member is its place among the rows of its group."""
        seen: Counter[int] = Counter()
        members = []
        for g in group_N.tolist():
            members.append(seen[g])
            seen[g] += 1
        return cls(torch.full_like(group_N, step), group_N, torch.tensor(members, dtype=group_N.dtype, device=group_N.device))

    def rows(self, index_K: Tensor) -> Births:
        return Births(self.step_N[index_K], self.prompt_N[index_K], self.member_N[index_K])


def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int | Sequence[int],
    *,
    limit: int,
    seed: int,
    step: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    engine: str | Engine = "decoder",
    batch_rows: int = 512,
    first: int = 0,
    first_member: int = 0,
) -> Rollout:
    """Draw `group_size` responses a prompt (a sequence: that many to each, perhaps none) of at most `limit` tokens.

    The rows of a group are contiguous.

    Token t of sample g of prompts[m] is drawn with uniform(seed, TOKENS, step, first + m, first_member + g, t), whatever the batch.
    Temperature 0 is greedy. A response keeps its end token; `cut_N` marks those that found none within the limit.
    Log-probs are those of the distribution sampled from (at temperature 1 when greedy): renormalised over the support with top-p or
    top-k. T is the longest response drawn.

    An engine object draws with seeds made of (seed, step, first + m, first_member + g) instead, and from the weights of its last sync.

    Raises UserError for an unknown engine, a model that the decoder does not support, a prompt that is empty, has tokens the
    model lacks, or leaves no room for `limit` tokens in its context; NonFinite when the model's logits are NaN.
    """
    how = Decoding(temperature, top_p, top_k, engine, batch_rows)
    sizes = [group_size] * len(prompts) if isinstance(group_size, int) else list(group_size)
    _check(policy, prompts, max(sizes, default=0), limit, how)
    device = policy.device
    prompt_MP, length_M = _left_pad([p.tokens for p in prompts], policy.pad_id, device)
    group_N = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(sizes, device=device))
    member_N = torch.cat([torch.arange(size, device=device) for size in sizes])
    births = Births(torch.full_like(group_N, step), first + group_N, first_member + member_N)
    tokens = _draw(policy, prompt_MP, length_M, group_N, births, torch.zeros_like(group_N), limit, seed, how)
    return _ended(policy, prompts, group_N, prompt_MP[group_N], length_M[group_N], tokens, limit)


def proceed(policy: Policy, begun: Rollout, births: Births, *, chunk: int, limit: int, seed: int, how: Decoding) -> Rollout:
    """At most `chunk` more tokens for every row that is cut short of `limit`: what was drawn stays, with its own log-probs.

    The new tokens are drawn from the policy as it is now. `cut_N` stays True for a row that has not ended, at the limit or before.
    Raises UserError where a prompt leaves no room for `limit` tokens in the model's context.
    """
    _check(policy, begun.prompts, 1, limit, how)
    row_K = (begun.cut_N & (begun.length_N < limit)).nonzero().squeeze(1)
    if not len(row_K):
        return begun
    part = begun.rows(row_K)
    prefixes = [
        (*prompt[len(prompt) - p :], *response[:n])
        for prompt, response, p, n in zip(
            part.prompt_NP.tolist(), part.response_NT.tolist(), part.prompt_length_N.tolist(), part.length_N.tolist(), strict=True
        )
    ]
    prompt_KP, length_K = _left_pad(prefixes, policy.pad_id, policy.device)
    room = min(chunk, limit - int(part.length_N.min()))
    own_K = torch.arange(len(row_K), device=policy.device)
    drawn = _draw(policy, prompt_KP, length_K, own_K, births.rows(row_K), part.length_N, room, seed, how)
    more = _ended(policy, begun.prompts, part.group_N, prompt_KP, length_K, drawn, room)
    return _extended(policy, begun, row_K, more, limit)


def join(parts: Sequence[Rollout], groups: Sequence[Tensor] | None = None) -> Rollout:
    """Rollouts one after the other; `groups[i]` are the new group ids of part i's rows (default: shifted, each part its own groups).

    Prompts must be those of the new ids: with `groups`, the first part's.
    """
    if groups is None:
        shifts = torch.tensor([0, *[len(p.prompts) for p in parts]]).cumsum(0).tolist()
        groups = [p.group_N + shift for p, shift in zip(parts, shifts[:-1], strict=True)]
        prompts = tuple(prompt for p in parts for prompt in p.prompts)
    else:
        prompts = parts[0].prompts
    width_P, width_T = max(p.prompt_NP.shape[1] for p in parts), max(p.response_NT.shape[1] for p in parts)
    wide = [_widened(p, width_P, width_T) for p in parts]
    names = [n for n, v in vars(wide[0]).items() if isinstance(v, Tensor) and n != "group_N"]
    return Rollout(
        prompts=prompts, group_N=torch.cat(list(groups)), **{n: torch.cat([getattr(p, n) for p in wide]) for n in names}
    )


def _draw(
    policy: Policy,
    prompt_MP: Tensor,
    length_M: Tensor,
    prompt_N: Tensor,
    births: Births,
    offset_N: Tensor,
    limit: int,
    seed: int,
    how: Decoding,
) -> Drawn:
    """In batches of rows; a row's first token has the index offset_N."""
    device = policy.device
    if not isinstance(how.engine, str):
        prompts = [tuple(row[len(row) - n :]) for row, n in zip(prompt_MP.tolist(), length_M.tolist(), strict=True)]
        seed_N = seeds(seed, births.step_N, births.prompt_N, births.member_N, offset_N)
        asks = asks_of([prompts[m] for m in prompt_N.tolist()], seed_N, alone=how.temperature == 0.0)
        answers = how.engine.draw(asks, limit, policy.end_ids, how.temperature, how.top_p, how.top_k)
        token_NT, logp_NT = answered(how.engine.name, asks, answers, limit, policy.end_ids, policy.vocab)
        return Drawn(token_NT.to(device), logp_NT.to(device))
    end_V = torch.zeros(policy.vocab, dtype=torch.bool, device=device)
    end_V[sorted(policy.end_ids)] = True
    token_T = torch.arange(limit, device=device)
    parts = []
    for rows in torch.arange(len(prompt_N), device=device).split(how.batch_rows):
        low, high = int(prompt_N[rows].min()), int(prompt_N[rows].max()) + 1
        P = int(length_M[low:high].max())
        b = births.rows(rows)
        index_KT = offset_N[rows, None] + token_T
        u_KT = uniform(seed, TOKENS, b.step_N[:, None], b.prompt_N[:, None], b.member_N[:, None], index_KT)
        batch = prompt_MP[low:high, -P:], length_M[low:high], prompt_N[rows] - low
        parts.append(ENGINES[how.engine](policy.model, *batch, u_KT, end_V, how.temperature, how.top_p, how.top_k))
    return Drawn(*(ABSENT if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _ended(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_N: Tensor,
    prompt_NP: Tensor,
    prompt_length_N: Tensor,
    drawn: Drawn,
    limit: int,
) -> Rollout:
    """Drawn tokens as a Rollout: cut at each row's end token, masked, checked."""
    token_NT, logp_NT, entropy_NT, support_NTV = drawn
    end_V = torch.zeros(policy.vocab, dtype=torch.bool, device=policy.device)
    end_V[sorted(policy.end_ids)] = True
    ended_NT = end_V[token_NT].cumsum(1)
    length_N = (ended_NT == 0).sum(1).add(1).clamp(max=limit)
    cut_N = ended_NT.gather(1, length_N[:, None] - 1)[:, 0] == 0
    T = int(length_N.max())
    mask_NT = torch.arange(T, device=policy.device) < length_N[:, None]
    sampler_NT = logp_NT[:, :T].masked_fill(~mask_NT, 0.0)
    if not bool(torch.isfinite(sampler_NT).all()):
        row = int(torch.nonzero(~torch.isfinite(sampler_NT).all(1))[0])
        raise NonFinite(
            f"sampling: the model's logits are NaN or infinite (prompt {prompts[int(group_N[row])].id!r}); "
            "the weights have diverged: lower the learning rate, or the number of updates a rollout"
        )
    return Rollout(
        prompts=tuple(prompts),
        group_N=group_N,
        prompt_NP=prompt_NP,
        prompt_length_N=prompt_length_N,
        response_NT=token_NT[:, :T].masked_fill(~mask_NT, policy.pad_id),
        length_N=length_N,
        mask_NT=mask_NT,
        sampler_NT=sampler_NT,
        cut_N=cut_N,
        entropy_NT=entropy_NT[:, :T].masked_fill(~mask_NT, 0.0) if entropy_NT is not None else ABSENT,
        support_NTV=support_NTV[:, :T] if support_NTV is not None else ABSENT,
    )


def _extended(policy: Policy, begun: Rollout, row_K: Tensor, more: Rollout, limit: int) -> Rollout:
    """`begun` with the tokens of `more` appended to its rows row_K, no row beyond the limit."""
    length_K = begun.length_N[row_K]
    total_K = (length_K + more.length_N).clamp(max=limit)
    length_N, cut_N = begun.length_N.clone(), begun.cut_N.clone()
    length_N[row_K] = total_K
    cut_N[row_K] = more.cut_N | (length_K + more.length_N > limit)
    T = int(length_N.max())
    wide = _widened(begun, begun.prompt_NP.shape[1], max(T, begun.response_NT.shape[1]))
    copies: dict[str, Any] = {
        n: v.clone() for n, v in vars(wide).items() if isinstance(v, Tensor) and v.dim() > 1 and n != "prompt_NP"
    }
    for t in range(more.response_NT.shape[1]):
        live_J = ((t < more.length_N) & (length_K + t < limit)).nonzero().squeeze(1)
        for name, tensor in copies.items():
            tensor[row_K[live_J], length_K[live_J] + t] = getattr(more, name)[live_J, t]
    return replace(wide, **{n: v[:, :T] for n, v in copies.items()}, length_N=length_N, cut_N=cut_N)


def _widened(r: Rollout, width_P: int, width_T: int) -> Rollout:
    """With prompts padded on the left and responses on the right."""
    left, right = width_P - r.prompt_NP.shape[1], width_T - r.response_NT.shape[1]
    grown: dict[str, Any] = {
        n: torch.nn.functional.pad(getattr(r, n), (0, right))
        for n in ("response_NT", "mask_NT", "sampler_NT", "entropy_NT")
        if getattr(r, n) is not None
    }
    if r.support_NTV is not None:
        grown["support_NTV"] = torch.nn.functional.pad(r.support_NTV, (0, 0, 0, right), value=True)
    return replace(r, prompt_NP=torch.nn.functional.pad(r.prompt_NP, (left, 0)), **grown)


def _left_pad(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    padded = [[pad] * (width - len(row)) + list(row) for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)


def _check(policy: Policy, prompts: Sequence[Prompt], largest: int, limit: int, how: Decoding) -> None:
    if isinstance(how.engine, str) and how.engine not in ENGINES:
        raise UserError(
            f"unknown rollout engine {how.engine!r}: write one of {', '.join(sorted(ENGINES))}, or give an open engine"
        )
    reason = decoder.supports(policy.model) if how.engine == "decoder" else None
    if reason:
        raise UserError(f"the engine 'decoder' cannot run the model {policy.name!r}: {reason}; write engine: transformers")
    for name, value in (("prompts", len(prompts)), ("group_size", largest), ("limit", limit), ("batch_rows", how.batch_rows)):
        if value < 1:
            raise UserError(f"sampling needs at least one of {name}, not {value}")
    if not 0.0 <= how.temperature < float("inf"):
        raise UserError(f"temperature {how.temperature} is not a number from 0 on: write 1.0 to sample, 0 for greedy decoding")
    if not 0.0 < how.top_p <= 1.0 or how.top_k < 0:
        raise UserError(
            f"top_p {how.top_p} and top_k {how.top_k}: top_p is above 0 and at most 1, top_k is 0 (off) or a number of tokens"
        )
    for prompt in prompts:
        if not prompt.tokens:
            raise UserError(f"prompt {prompt.id!r} is empty: it needs at least one token to continue from")
        if max(prompt.tokens) >= policy.vocab or min(prompt.tokens) < 0:
            raise UserError(f"prompt {prompt.id!r} has token ids outside the {policy.vocab} of the model {policy.name!r}")
        if len(prompt.tokens) + limit > policy.context:
            raise UserError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens, which with a limit of {limit} exceed the context of "
                f"{policy.context} of the model {policy.name!r}: shorten the prompt or lower the limit"
            )
