"""A policy on a whole rollout, without gradient: what it makes of the tokens that were drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_repro.config import Run
from grpo_repro.critic import Critic
from grpo_repro.logprobs import WHOLE_VOCABULARY, exact_kl, forward, log_distributions, micro_batches, trim
from grpo_repro.types import ABSENT, Rollout


@dataclass(frozen=True)
class Measured:
    logp_NT: Tensor
    entropy_NT: Tensor
    logq_NTV: Tensor | None  # the whole distributions, where the vocabulary is small
    value_NT: Tensor = ABSENT  # the critic's, where there is one


def measure(model: PreTrainedModel, rollout: Rollout, run: Run, vocab: int, critic: Critic | None = None) -> Measured:
    """Log-probs, entropy (nats) and values of every live token, at the run's temperature; 0 at masked positions."""
    whole = vocab <= WHOLE_VOCABULARY
    n, t = rollout.response_NT.shape
    logp_NT = torch.zeros(n, t, device=rollout.response_NT.device)
    entropy_NT = torch.zeros_like(logp_NT)
    logq_NTV = torch.zeros(n, t, vocab, device=logp_NT.device) if whole else None
    value_NT = torch.zeros_like(logp_NT) if critic is not None else ABSENT
    with torch.no_grad():
        for rows_K in micro_batches(model, rollout, run.machine.token_budget):
            part = trim(rollout.rows(rows_K))
            width = part.response_NT.shape[1]
            if logq_NTV is not None:
                logq_KTV = log_distributions(model, part, run.rollout.temperature)
                logq_NTV[rows_K, :width] = logq_KTV
                logp_KT = logq_KTV.gather(-1, part.response_NT.unsqueeze(-1)).squeeze(-1)
                entropy_KT = -(logq_KTV.exp() * logq_KTV).sum(-1)  # LOWEST, not −inf, outside a support
                logp_NT[rows_K, :width] = logp_KT.masked_fill(~part.mask_NT, 0.0)
                entropy_NT[rows_K, :width] = entropy_KT.masked_fill(~part.mask_NT, 0.0)
            if logq_NTV is None or critic is not None:
                now = forward(model, part, run.rollout.temperature, entropy=logq_NTV is None, value_head=critic)
            if logq_NTV is None:
                logp_NT[rows_K, :width] = now.logp_NT
                entropy_NT[rows_K, :width] = now.entropy_NT
            if critic is not None:
                value_NT[rows_K, :width] = now.value_NT
    return Measured(logp_NT, entropy_NT, logq_NTV, value_NT)


def divergence_from(logp_NTV: Tensor, model: PreTrainedModel, part: Rollout, temperature: float) -> Tensor:
    """Σ over the part's tokens of the exact KL(p‖π_θ), p given by its log-probs over the vocabulary; with gradient."""
    logq_NTV = log_distributions(model, part, temperature, gradient=True)
    return exact_kl(logp_NTV[:, : logq_NTV.shape[1]], logq_NTV, part.mask_NT).sum()


def kl_between(of: Measured, to: Measured, mask_NT: Tensor) -> Tensor | None:
    """Exact KL(of‖to) a token, where the distributions were kept; 0 at masked positions."""
    if of.logq_NTV is None or to.logq_NTV is None:
        return None
    return exact_kl(of.logq_NTV, to.logq_NTV, mask_NT)
