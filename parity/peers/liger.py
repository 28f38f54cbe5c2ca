"""Liger: the fused GRPO loss on hidden states and an output matrix, `compiled=False`, float32. It takes advantages as an input.

Ours: log-probs of the same hidden states and matrix by plain torch; the gradients compared are those of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

from grpo_repro.objective import Objective, score
from parity.batches import LIMIT, Batch, rollout
from parity.cases import BASE
from parity.compare import FP32, Cannot, Expressed, Out, Peer, Run, out, parts

OPEN = 1e9  # "no bound", where a number is required
LOSS = {"sequence_mean": "grpo", "token_mean": "dapo", "constant_length": "dr_grpo", "sequence_sum": "luspo"}


def run_with(advantage: Callable[..., Any], **settings: Any) -> Run:
    """Our advantages into Liger's module."""

    def run(batch: Batch) -> Out:
        b = batch.b
        made = score(replace(BASE, advantage=advantage), b).b.advantage.squeeze(1)
        module = LigerFusedLinearGRPOLoss(
            compiled=False, use_ref_model=settings.get("beta", 0.0) > 0, **{"beta": 0.0, **settings}
        )
        hidden, weight = (leaf.detach().clone().requires_grad_() for leaf in batch.leaves)
        ref = b.ref_NT if settings.get("beta") else None
        states = hidden[: len(b.r_N), : b.mask_NT.shape[1]]
        total, _ = module(states, weight, batch.response_NT, b.mask_NT.float(), made, None, ref, b.old_NT)
        return out(total, [hidden, weight])

    return run


def express(o: Objective, kind: str) -> Expressed:
    """Liger's words for an Objective. Raises Cannot."""
    for slot, neutral in {"transform": "none", "sampling": "all", "overlong": "keep", "kl_in_reward": "none"}.items():
        if (name := parts(o, slot)[0]) != neutral:
            raise Cannot(f"{slot}.{name}", "it is a loss: what happens before it is not its part")
    name, p = parts(o, "advantage")
    if (name, p) != parts(BASE, "advantage") and not _is_preset_like(o):
        raise Cannot(f"advantage.{name}", "advantages are its input")
    if parts(o, "correction")[0] != "none":
        fix, c = parts(o, "correction")
        raise Cannot(f"correction.{fix}" + (f"·{c['level']}" if c else ""), "the finished weight is its input (vllm_is_ratio)")
    if o.gate:
        raise Cannot(f"gate.{parts(replace(o, clip=o.gate[0]), 'clip')[0]}", "no such mask")
    a, a_set = parts(o, "aggregation")
    if a not in LOSS or a_set.get("per") == "group":
        raise Cannot(f"aggregation.{a}" + ("·group" if a_set else ""), "no such loss_type")
    w = parts(o, "ratio")[0]
    if w in ("prefix", "none"):
        raise Cannot(f"ratio.{w}", "levels are token and sequence" if w == "prefix" else "π_old is an input")
    settings: dict[str, Any] = {"loss_type": LOSS[a], "importance_sampling_level": "token" if w == "token" else "sequence"}
    settings |= _clip(o, a, w) | _kl(o, w)
    if a == "constant_length":
        settings["max_completion_length"] = LIMIT
    if a == "sequence_sum" and (w == "token" or "beta" in settings):
        raise Cannot(
            "aggregation.sequence_sum with a token term", "its luspo is right only at the sequence level: see the deviations"
        )
    return Expressed(run_with(o.advantage, **settings), settings, FP32)


def _is_preset_like(o: Objective) -> bool:
    return parts(o, "advantage")[0] in ("group_center", "group_zscore") and parts(o, "kl_in_reward")[0] == "none"


def _clip(o: Objective, a: str, w: str) -> dict[str, Any]:
    name, p = parts(o, "clip")
    if name in ("truncate", "soft_sigmoid") and w != "token":
        raise Cannot(f"clip.{name} with a sequence ratio", "it refuses the combination")
    if name == "truncate":
        if a != "token_mean" or p["w_min"] > 0:
            raise Cannot(
                "clip.truncate with a lower bound or another aggregation", "its cispo caps above only, and is a token mean"
            )
        return {"loss_type": "cispo", "epsilon_high": p["w_max"]}
    if name == "soft_sigmoid":
        if a != "sequence_mean":
            raise Cannot("clip.soft_sigmoid with another aggregation", "its sapo is a sequence mean")
        return {"loss_type": "sapo", "sapo_temperature_pos": p["tau_pos"], "sapo_temperature_neg": p["tau_neg"]}
    if name not in ("none", "ppo", "dual"):
        raise Cannot(f"clip.{name}", "no such loss_type")
    low = 1.0 if name == "none" or p["eps_low"] is None else p["eps_low"]
    high = OPEN if name == "none" or p["eps_high"] is None else p["eps_high"]
    return {"epsilon_low": low, "epsilon_high": high} | ({"delta": p["w_max"]} if name == "dual" else {})


def _kl(o: Objective, w: str) -> dict[str, Any]:
    name, p = parts(o, "kl")
    if name == "none":
        return {}
    if name not in ("k3", "k3_unbiased"):
        raise Cannot(f"kl.{name}", "its loss has k3, plain or weighted")
    if name == "k3_unbiased" and w != "token":
        raise Cannot("kl.k3_unbiased with a sequence ratio", "it multiplies by the sequence's ratio: see the deviations")
    return {"beta": p["beta"], "use_bias_correction_kl": name == "k3_unbiased"}


peer = Peer("Liger", "liger-kernel", express, partial(rollout, dtype=torch.float32, fused=True))
