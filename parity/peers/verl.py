"""verl: `core_algos` (advantage estimators, policy losses, KL, aggregation) and `rollout_corr_helper`, composed as `ppo_loss` does.

float64 throughout. ε of the z-score is 1e-6; whitening has 1e-8 inside the root. (The 1e-8 that its sequence mean adds to |y| is
lost in float32, because the mask is bool.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig, PolicyLossConfig

from grpo_repro.knobs import advantage
from grpo_repro.objective import Objective
from grpo_repro.types import Minibatch
from parity.batches import LIMIT, Batch, rollout
from parity.compare import Cannot, Expressed, Out, Peer, Run, out, parts

EPS = 1e-6  # compute_grpo_outcome_advantage's, which no setting reaches
OPEN = 1e9  # "no bound", where a number is required
AGGREGATION = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant_length": "seq-mean-token-sum-norm",
    "sequence_sum": "seq-mean-token-sum",
}
ESTIMATOR = {"group_zscore": "grpo", "group_center": "grpo", "leave_one_out": "rloo", "batch_zscore": "reinforce_plus_plus"}
OUTSIDE = {
    "sampling.drop_zero_variance": "groups are filtered in a trainer of its recipes, not in a function that can be asked",
    "sampling.dynamic": "groups are filtered and redrawn in a trainer of its recipes, not in a function that can be asked",
    "overlong.mask": "no such setting in its losses",
    "overlong.soft_penalty": "part of the reward manager, which wants a tokenizer and decoded text",
}


def config(agg: str, mode: str = "vanilla", **settings: Any) -> ActorConfig:
    """The actor's configuration; every field that is not said keeps verl's default."""
    loss = PolicyLossConfig(loss_mode=mode)
    made = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, loss_agg_mode=agg, **settings
    )
    made.global_batch_info["loss_scale_factor"] = made.loss_scale_factor
    return made


def advantages(b: Minibatch, name: str, charged: str = "", beta: float = 0.0, **settings: Any) -> Tensor:
    """verl's estimator on token-level rewards: r at the last token, less β·KL where the KL is in the reward (`apply_kl_penalty`)."""
    mask_NT = b.mask_NT.to(b.r_N.dtype)
    r_NT = torch.zeros_like(mask_NT).scatter_(1, (b.length_N - 1).unsqueeze(1), b.r_N.unsqueeze(1))
    if charged:
        r_NT = r_NT - beta * core_algos.kl_penalty(b.old_NT, b.ref_NT, charged) * mask_NT
    estimator = core_algos.get_adv_estimator_fn(name)
    if name == "gae":
        whitened = settings.pop("whitened", False)
        white_NT, return_NT = estimator(r_NT, b.value_NT * mask_NT, mask_NT, **settings)
        return white_NT if whitened else (return_NT - b.value_NT * mask_NT) * mask_NT
    index = {} if name == "reinforce_plus_plus" else {"index": np.array(b.group_N.tolist())}
    return estimator(token_level_rewards=r_NT, response_mask=mask_NT, **index, **settings)[0]


def policy(
    cfg: ActorConfig, *, coef: float = 0.0, kind: str = "k3", estimator: str = "grpo", weights: Any = None, **adv: Any
) -> Run:
    """Advantages, the registered policy loss, and the KL term, as `verl.workers.utils.losses.ppo_loss` puts them together."""

    def run(batch: Batch) -> Out:
        b, mask_NT = batch.b, batch.b.mask_NT  # bool, as ppo_loss has it
        leaves, logp_NT = batch.fresh()
        a_NT = advantages(b, estimator, **adv)
        fn = core_algos.get_policy_loss_fn(cfg.policy_loss.loss_mode)
        is_NT = None if weights is None else weights(b.old_NT - b.sampler_NT, mask_NT.to(b.r_N.dtype))
        total, _ = fn(b.old_NT, logp_NT, a_NT, mask_NT, cfg.loss_agg_mode, cfg, is_NT)
        if coef:
            kl_NT = core_algos.kl_penalty(logp_NT, b.ref_NT, kind)
            total = total + coef * core_algos.agg_loss(kl_NT, mask_NT, cfg.loss_agg_mode, **cfg.global_batch_info)
        return out(total, leaves)

    return run


def express(o: Objective, kind: str) -> Expressed:
    """verl's words for an Objective, with our side in verl's ε. Raises Cannot."""
    for slot, allowed in {"transform": ("none",), "sampling": ("all",), "overlong": ("keep",)}.items():
        name, _ = parts(o, slot)
        if name not in allowed:
            raise Cannot(f"{slot}.{name}", OUTSIDE.get(f"{slot}.{name}", "no such option"))
    compared, mine = "loss and gradient", o
    a, a_set = parts(o, "aggregation")
    if a not in AGGREGATION or a_set.get("per") == "group":
        raise Cannot(f"aggregation.{a}" + ("·group" if a_set else ""), "no such loss_agg_mode")
    settings: dict[str, Any] = {"loss_scale_factor": LIMIT} if a == "constant_length" else {}
    adv, adv_settings, mine, said = _advantage(o, mine)
    mode, more, gradient_only = _policy(o, kind)
    settings |= more
    if gradient_only:
        compared = "gradient"
    penalty, k = parts(o, "kl")
    if penalty not in ("none", "k1", "k2", "k3"):
        raise Cannot(f"kl.{penalty}", "kl_loss_type is k1, abs, k2, k3 or their k2-gradient forms")
    agg = AGGREGATION[a]
    run = policy(
        config(agg, mode, **settings),
        coef=k.get("beta", 0.0),
        kind=penalty,
        estimator=adv,
        weights=_weights(o),
        **adv_settings,
    )
    words = {"loss_mode": mode, "loss_agg_mode": agg, "adv_estimator": adv, **settings}
    if penalty != "none":
        words |= {"kl_loss_type": penalty, "kl_loss_coef": k["beta"]}
    words |= {k: v for k, v in adv_settings.items() if k != "config"}
    return Expressed(run, words, compared=compared, ours=mine, converted=tuple(said))


def _advantage(o: Objective, mine: Objective) -> tuple[str, dict[str, Any], Objective, list[str]]:
    name, p = parts(o, "advantage")
    charged, k = parts(o, "kl_in_reward")
    if charged not in ("none", "k1", "k2", "k3"):
        raise Cannot(f"kl_in_reward.{charged}", "kl_penalty is k1, abs, k2 or k3")
    settings: dict[str, Any] = {"charged": charged, "beta": k["beta"]} if charged != "none" else {}
    if name == "gae":
        if p["whiten"]:
            raise Cannot("advantage.gae whitened", "its 1e-8 is inside the root: see the deviations")
        return "gae", {"gamma": p["gamma"], "lam": p["lam"], **settings}, mine, []
    if name not in ESTIMATOR:
        raise Cannot(f"advantage.{name}", NO_ADVANTAGE.get(name, "no such estimator"))
    said: list[str] = []
    if name in ("group_zscore", "batch_zscore") and p["ddof"] == 0:
        raise Cannot(f"advantage.{name} ddof=0", "the standard deviation has ddof = 1")
    if name == "group_zscore":
        mine, said = replace(mine, advantage=partial(advantage.group_zscore, ddof=1, eps=EPS)), ["ε = 1e-6"]
    if name == "batch_zscore":
        mine, said = replace(mine, advantage=whitened), ["1e-8 inside the root"]
        settings["config"] = Gamma()
    if name in ("group_zscore", "group_center"):
        settings["norm_adv_by_std_in_grpo"] = name == "group_zscore"
    return ESTIMATOR[name], settings, mine, said


class Gamma:
    gamma = 1.0


NO_ADVANTAGE = {
    "pass_at_k": "its grpo_passk is another paper (2503.19595): best minus second best, k = G",
    "batch_std": "reinforce_plus_plus_baseline whitens the centred rewards over tokens instead",
}


def _policy(o: Objective, kind: str) -> tuple[str, dict[str, Any], bool]:
    """(loss_mode, its settings, whether only gradients compare)."""
    w, c = parts(o, "ratio")[0], parts(o, "clip")
    name, p = c
    gates = [parts(replace(o, clip=g), "clip") for g in o.gate]
    if gates:
        return _dppo(o, gates, w, c, kind)
    if w == "none" and name == "none":
        return "gpg", {}, True
    if w == "none":
        raise Cannot("ratio.none with a clip", "only its gpg loss has no ratio, and it has no clip")
    if w == "prefix":
        raise Cannot("ratio.prefix", "no such loss_mode")
    if name in ("none", "ppo", "dual"):
        low = 1.0 if name == "none" or p["eps_low"] is None else p["eps_low"]
        high = OPEN if name == "none" or p["eps_high"] is None else p["eps_high"]
        sides = {"clip_ratio_low": low, "clip_ratio_high": high}
        if w == "token":
            return "vanilla", {**sides, "clip_ratio_c": p.get("w_max", OPEN)}, False
        if name == "dual":
            raise Cannot("clip.dual with a sequence ratio", "its gspo has no clip_ratio_c")
        if w == "sequence" and parts(o, "correction")[1].get("level") == "token":
            raise Cannot("ratio.sequence with a token correction", "its gspo is GSPO-token: see ratio.sequence_token")
        return "gspo", sides, False
    if w != "token":
        raise Cannot(f"clip.{name} with a sequence ratio", f"its {name} has a token ratio")
    if name == "gmpo":
        if parts(o, "aggregation")[0] != "sequence_mean":
            raise Cannot(
                "clip.gmpo with another aggregation", "its geo_mean ignores loss_agg_mode and takes the mean over responses"
            )
        return "geo_mean", {"clip_ratio_low": p["eps_low"], "clip_ratio_high": p["eps_high"]}, False
    if name == "truncate":
        return "cispo", {"clip_ratio_low": 1 - p["w_min"], "clip_ratio_high": p["w_max"] - 1}, False
    if name == "soft_sigmoid":
        if parts(o, "aggregation")[0] != "sequence_mean":
            raise Cannot(
                "clip.soft_sigmoid with another aggregation", "its sapo ignores loss_agg_mode and takes the sequence mean"
            )
        return "sapo", {"tau_pos": p["tau_pos"], "tau_neg": p["tau_neg"]}, False
    raise Cannot(f"clip.{name}", "no such loss_mode")


def _dppo(o: Objective, gates: list[Any], w: str, c: Any, kind: str) -> tuple[str, dict[str, Any], bool]:
    (name, p), *rest = gates
    if rest or name not in ("dppo_tv", "dppo_kl"):
        raise Cannot(f"gate.{name}", "its rejection (rollout_rs) does not look at the advantage's sign")
    if kind != "bypass" or w != "token" or c[0] != "truncate" or c[1]["w_min"]:
        raise Cannot(f"gate.{name} elsewhere", "its DPPO has one anchor (π_old = μ) and a truncated token weight")
    low, high = (p["eps_low"], p["eps_high"]) if name == "dppo_tv" else (p["eps"], p["eps"])
    return name, {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c[1]["w_max"]}, False


def _weights(o: Objective) -> Any:
    name, p = parts(o, "correction")
    if name == "none":
        return None
    if p["level"] == "geometric":
        raise Cannot(f"correction.{name}·geometric", "geometric means only reject (rollout_rs), they do not weigh")
    if name == "mask" and p["w_min"] == 0:
        limits: Any = f"1e-12_{p['w_max']}"
    else:
        limits = p["w_max"] if name == "truncate" else f"{p['w_min']}_{p['w_max']}"
    return lambda rho_NT, mask_NT: compute_rollout_correction_weights(rho_NT, mask_NT, p["level"], limits)[0]


def whitened(b: Minibatch) -> Tensor:
    """Our batch z-score with the ε that makes std + ε = √(var + 1e-8)."""
    raw_NT = advantage.batch_zscore(b, ddof=1, eps=1.0)  # (A − mean)/(std + 1): its own std s' gives std = s'/(1 − s')
    spread = raw_NT[b.mask_NT].std()
    std = float(spread / (1 - spread))
    return advantage.batch_zscore(b, ddof=1, eps=(std**2 + 1e-8) ** 0.5 - std)


peer = Peer("verl", "verl", express, rollout)
