"""Sampling responses: one `sample()` over several engines. Chance is indexed, so engines and batch sizes agree on the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_repro.policy import Policy
from grpo_repro.rollout import decoder, generate
from grpo_repro.types import NonFinite, Prompt, Rollout, UserError
from grpo_repro.uniform import TOKENS, uniform

ENGINES = {"decoder": decoder.decode, "transformers": generate.generate}


def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    *,
    limit: int,
    temperature: float,
    seed: int,
    step: int,
    engine: str = "decoder",
    batch_rows: int = 512,
    first: int = 0,
) -> Rollout:
    """Draw `group_size` responses of at most `limit` tokens to each prompt; the rows of a group are contiguous.

    Token t of sample g of prompts[m] is drawn with uniform(seed, TOKENS, step, first + m, g, t), whatever the batch.
    Temperature 0 is greedy. A response keeps its end token; `cut_N` marks those that found none within the limit.
    Log-probs are those of the distribution sampled from (at temperature 1 when greedy). T is the longest response drawn.

    Raises UserError for an unknown engine, a model that the decoder does not support, a prompt that is empty, has tokens the
    model lacks, or leaves no room for `limit` tokens in its context; NonFinite when the model's logits are NaN.
    """
    _check(policy, prompts, group_size, limit, temperature, engine, batch_rows)
    device = policy.device
    prompt_MP, length_M = _left_pad([p.tokens for p in prompts], policy.pad_id, device)
    group_N = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
    member_N = torch.arange(group_size, device=device).repeat(len(prompts))
    end_V = torch.zeros(policy.vocab, dtype=torch.bool, device=device)
    end_V[sorted(policy.end_ids)] = True

    parts = []
    for rows in torch.arange(len(group_N), device=device).split(batch_rows):
        low, high = int(group_N[rows[0]]), int(group_N[rows[-1]]) + 1
        P = int(length_M[low:high].max())
        token_T = torch.arange(limit, device=device)
        u_KT = uniform(seed, TOKENS, step, first + group_N[rows, None], member_N[rows, None], token_T)
        batch = prompt_MP[low:high, -P:], length_M[low:high], group_N[rows] - low
        parts.append(ENGINES[engine](policy.model, *batch, u_KT, end_V, temperature))
    token_NT, logp_NT = (torch.cat(part) for part in zip(*parts, strict=True))

    ended_NT = end_V[token_NT].cumsum(1)
    length_N = (ended_NT == 0).sum(1).add(1).clamp(max=limit)
    cut_N = ended_NT.gather(1, length_N[:, None] - 1)[:, 0] == 0
    T = int(length_N.max())
    mask_NT = torch.arange(T, device=device) < length_N[:, None]
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
        prompt_NP=prompt_MP[group_N],
        prompt_length_N=length_M[group_N],
        response_NT=token_NT[:, :T].masked_fill(~mask_NT, policy.pad_id),
        length_N=length_N,
        mask_NT=mask_NT,
        sampler_NT=sampler_NT,
        cut_N=cut_N,
    )


def _left_pad(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    padded = [[pad] * (width - len(row)) + list(row) for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)


def _check(
    policy: Policy, prompts: Sequence[Prompt], group_size: int, limit: int, temperature: float, engine: str, batch_rows: int
) -> None:
    if engine not in ENGINES:
        raise UserError(f"unknown rollout engine {engine!r}: write one of {', '.join(sorted(ENGINES))}")
    reason = decoder.supports(policy.model) if engine == "decoder" else None
    if reason:
        raise UserError(f"the engine 'decoder' cannot run the model {policy.name!r}: {reason}; write engine: transformers")
    for name, value in (("group_size", group_size), ("limit", limit), ("batch_rows", batch_rows), ("prompts", len(prompts))):
        if value < 1:
            raise UserError(f"sampling needs at least one of {name}, not {value}")
    if not 0.0 <= temperature < float("inf"):
        raise UserError(f"temperature {temperature} is not a number from 0 on: write 1.0 to sample, 0 for greedy decoding")
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
