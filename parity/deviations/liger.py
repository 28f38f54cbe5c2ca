"""Where Liger's words give another number than ours, and what takes the difference out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from grpo_repro.knobs import aggregation, clip, kl, ratio
from parity.cases import BASE
from parity.compare import FP32, Deviation, ours
from parity.peers.liger import run_with


def deviations() -> list[Deviation]:
    """Where the same words give another number."""
    cispo = replace(BASE, clip=partial(clip.truncate, w_max=1.2))
    seq = replace(BASE, ratio=ratio.sequence, kl=partial(kl.k3_unbiased, beta=0.1))
    luspo = replace(BASE, aggregation=aggregation.sequence_sum)
    ppo = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    return [
        Deviation(
            "clip.truncate",
            "CISPO's cap is epsilon_high itself, without 1+, as in TRL (compared: 1+ε_high = 1.2, against the default "
            "epsilon_high = .2; converted: our w_max = .2)",
            ours(cispo),
            run_with(BASE.advantage, loss_type="cispo"),
            ours(replace(cispo, clip=partial(clip.truncate, w_max=0.2))),
            bar=FP32,
        ),
        Deviation(
            "kl.k3_unbiased",
            "with importance_sampling_level=sequence the KL is multiplied by the response's geometric-mean ratio, as in TRL",
            ours(seq),
            run_with(BASE.advantage, beta=0.1, use_bias_correction_kl=True, importance_sampling_level="sequence", **ppo),
            ours(replace(seq, kl=lambda now, b: torch.exp(ratio.sequence(now, b)) * kl.k3(now, b, beta=0.1))),
            bar=FP32,
        ),
        Deviation(
            "aggregation.sequence_sum",
            "luspo at the token level multiplies by |y| and averages over all positions, padding included, where TRL's sums the masked "
            "tokens",
            ours(luspo),
            run_with(BASE.advantage, loss_type="luspo", **ppo),
            bar=FP32,
        ),
        Deviation(
            "aggregation.token_mean",
            "",
            ours(BASE),
            run_with(BASE.advantage, loss_type="dapo", chunk_size=5, **ppo),
            bar=FP32,
            agrees="chunks of 5 responses have the whole batch's denominator",
        ),
    ]
