"""Where verl's words give another number than ours, and what takes the difference out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from grpo_repro.knobs import advantage, aggregation, clip, correction, gate, kl
from grpo_repro.objective import Objective
from grpo_repro.types import Minibatch
from parity.batches import GROUPS, Batch
from parity.cases import BASE
from parity.compare import Deviation, Out, Run, ours, out, value_loss
from parity.peers.verl import EPS, OPEN, Gamma, advantages, config, policy, whitened


def deviations() -> list[Deviation]:
    """Where the same words give another number."""
    sides = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    free = {**sides, "clip_ratio_c": OPEN}
    z = replace(BASE, advantage=partial(advantage.group_zscore, ddof=1, eps=EPS))
    sapo = replace(z, clip=clip.soft_sigmoid)
    k3 = replace(z, kl=partial(kl.k3, beta=0.1))
    unbiased = replace(z, kl=partial(kl.k3_unbiased, beta=0.1))
    rf = replace(BASE, advantage=partial(advantage.batch_zscore, ddof=1, eps=0.0))
    critic = replace(BASE, advantage=partial(advantage.gae, gamma=1.0, lam=0.95, whiten=True))
    band = replace(z, correction=partial(correction.mask, w_min=0.8, w_max=1.2, level="geometric"))
    dppo = replace(z, gate=(partial(gate.dppo_tv, eps_low=0.05, eps_high=0.05),), clip=partial(clip.truncate, w_max=20.0))
    tight = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    return [
        Deviation(
            "advantage.group_zscore",
            "ε is 1e-6, fixed (ours and TRL's: 1e-4; converted: our eps = 1e-6)",
            ours(BASE),
            policy(config("token-mean", **free)),
            ours(z),
        ),
        Deviation(
            "advantage.group_zscore",
            "a group of one response keeps its raw reward as its advantage (ours is 0: there is nothing to compare with)",
            ours(z),
            policy(config("token-mean", **free)),
            ours(replace(z, advantage=_lonely)),
            kind="singleton",
        ),
        Deviation(
            "advantage.batch_zscore",
            "1e-8 is added to the variance, inside the root, and to the token count (converted: the ε that makes it so)",
            ours(rf),
            policy(config("token-mean", **free), estimator="reinforce_plus_plus", config=Gamma()),
            ours(replace(rf, advantage=whitened)),
        ),
        Deviation(
            "advantage.batch_std",
            "reinforce_plus_plus_baseline centres by group and then whitens over tokens: it divides by the std of the centred rewards, "
            "not of the rewards, and subtracts a token mean (converted: rewards centred by group, then our batch_zscore)",
            ours(replace(BASE, advantage=partial(advantage.batch_std, ddof=1, eps=0.0))),
            policy(config("token-mean", **free), estimator="reinforce_plus_plus_baseline"),
            ours(replace(BASE, transform=_centre, advantage=whitened)),
        ),
        Deviation(
            "advantage.gae",
            "whitening has 1e-8 inside the root (converted: both without whitening)",
            ours(critic),
            policy(config("token-mean", **free), estimator="gae", gamma=1.0, lam=0.95, whitened=True),
            ours(replace(critic, advantage=partial(advantage.gae, gamma=1.0, lam=0.95, whiten=False))),
            policy(config("token-mean", **free), estimator="gae", gamma=1.0, lam=0.95),
        ),
        Deviation(
            "clip.ppo",
            "dual clip is on by default (clip_ratio_c = 3), which stops the push on Â < 0 with w > 3 (converted: our clip.dual, w_max = 3)",
            ours(z),
            policy(config("token-mean", **sides)),
            ours(replace(z, clip=partial(clip.dual, eps_low=0.2, eps_high=0.28, w_max=3.0))),
            kind="far",
        ),
        Deviation(
            "clip.truncate",
            "cispo has a lower bound by default, 1 − clip_ratio_low (converted: our w_min = .8)",
            ours(replace(z, clip=partial(clip.truncate, w_max=1.28))),
            policy(config("token-mean", "cispo", **sides)),
            ours(replace(z, clip=partial(clip.truncate, w_min=0.8, w_max=1.28))),
        ),
        Deviation(
            "clip.soft_sigmoid",
            "sapo ignores loss_agg_mode and always takes the sequence mean (compared: token mean; converted: our sequence mean)",
            ours(sapo),
            policy(config("token-mean", "sapo")),
            ours(replace(sapo, aggregation=aggregation.sequence_mean)),
        ),
        Deviation(
            "kl.k3",
            "the estimate is clamped to 10 (and d to ±20), where it has no gradient any more (converted: our k3, clamped)",
            ours(k3),
            policy(config("token-mean", **free), coef=0.1),
            ours(replace(k3, kl=lambda now, b: kl.k3(now, b, beta=0.1).clamp(max=1.0))),
            kind="far",
        ),
        Deviation(
            "kl.k3_unbiased",
            "k3+ has the value of k3 and the gradient of k2: the gradient of the KL it names on-policy, but without the importance "
            "weight (converted: our k2, gradient only)",
            ours(unbiased),
            policy(config("token-mean", **free), coef=0.1, kind="k3+"),
            ours(replace(z, kl=partial(kl.k2, beta=0.1))),
            compared="gradient",
        ),
        Deviation(
            "gate.dppo_tv",
            "the cap of the truncated weight is said to be 20 in its code but is clip_ratio_c, 3 by default (converted: our w_max = 3)",
            ours(dppo),
            policy(config("token-mean", "dppo_tv", **tight)),
            ours(replace(dppo, clip=partial(clip.truncate, w_max=3.0))),
            kind="far_bypass",
        ),
        Deviation(
            "correction.mask·geometric",
            "a geometric-mean band (rollout_rs=seq_mean_k1) only rejects: inside it the weight is 1, and a rejected response also "
            "leaves the denominator (no conversion: our weight is the geometric mean)",
            ours(band),
            _rejected(config("token-mean", **free), "0.8_1.2"),
        ),
        *_further(free, z),
    ]


def _further(free: dict[str, Any], z: Objective) -> list[Deviation]:
    """Agreements on what no Objective says: micro-batches, groups of unequal size, masks with holes."""
    loo = replace(z, advantage=advantage.leave_one_out)
    critic = replace(z, advantage=partial(advantage.gae, gamma=0.9, lam=0.9, whiten=False))
    seq = replace(z, aggregation=aggregation.sequence_mean)
    ragged, gae = "ragged groups, shuffled, with holes in the masks", {"estimator": "gae", "gamma": 0.9, "lam": 0.9}
    rows: list[tuple[str, str, Objective, Run, str]] = [
        ("advantage.group_zscore", ragged, z, policy(config("token-mean", **free)), "ragged"),
        ("advantage.leave_one_out", ragged, loo, policy(config("token-mean", **free), estimator="rloo"), "ragged"),
        ("advantage.leave_one_out", f"{ragged} (rloo_vectorized)", loo, _vectorized(config("token-mean", **free)), "ragged"),
        ("advantage.gae", "masks with holes", critic, policy(config("token-mean", **free), **gae), "ragged"),
        (
            "aggregation.token_mean",
            "micro-batches of one group, given the batch's token count",
            z,
            _micro("token-mean", free),
            "off_policy",
        ),
        (
            "aggregation.sequence_mean·row",
            "micro-batches, given the batch's size",
            seq,
            _micro("seq-mean-token-mean", free),
            "off_policy",
        ),
    ]
    critics = Deviation(
        "advantage.gae", "", value_loss(0.2), _value_loss, agrees="the critic's clipped loss (compute_value_loss)"
    )
    return [*(Deviation(option, "", ours(o), run, kind=kind, agrees=said) for option, said, o, run, kind in rows), critics]


def _value_loss(batch: Batch) -> Out:
    leaves, value_NT = batch.fresh()
    b = batch.b
    total, _ = core_algos.compute_value_loss(value_NT, b.ref_NT, b.value_NT, b.mask_NT, cliprange_value=0.2)
    return out(total, leaves)


def _vectorized(cfg: ActorConfig) -> Run:
    return policy(cfg, estimator="rloo_vectorized")


def _micro(agg: str, settings: dict[str, Any]) -> Run:
    """One micro-batch a group, their losses added up, with the totals that verl's engine puts in `global_batch_info`."""

    def run(batch: Batch) -> Out:
        cfg = config(agg, **settings)
        cfg.global_batch_info.update(batch_num_tokens=int(batch.b.mask_NT.sum()), global_batch_size=len(batch.b.r_N))
        outs = [policy(cfg)(batch.rows((batch.b.group_N == i).nonzero().squeeze(1))) for i in range(GROUPS)]
        return Out(torch.stack([x.loss for x in outs]).sum(), torch.stack([x.gradient for x in outs]).sum(0))

    return run


def _rejected(cfg: ActorConfig, limits: str) -> Run:
    def run(batch: Batch) -> Out:
        mask_NT = batch.b.mask_NT.double()
        rho_NT = batch.b.old_NT - batch.b.sampler_NT
        kept_NT, _ = compute_rollout_rejection_mask(rho_NT, mask_NT, "seq_mean_k1", limits)
        leaves, logp_NT = batch.fresh()
        fn = core_algos.get_policy_loss_fn("vanilla")
        total, _ = fn(batch.b.old_NT, logp_NT, advantages(batch.b, "grpo"), kept_NT, cfg.loss_agg_mode, cfg, None)
        return out(total, leaves)

    return run


def _centre(r_N: Tensor, group_N: Tensor) -> Tensor:
    same_NN = (group_N[:, None] == group_N[None, :]).to(r_N.dtype)
    return r_N - (same_NN @ r_N) / same_NN.sum(1)


def _lonely(b: Minibatch) -> Tensor:
    """Our z-score, but a group of one keeps r/(1 + ε)."""
    alone_N = (b.group_N[:, None] == b.group_N[None, :]).sum(1) == 1
    one = float(torch.tensor(1.0) + EPS)  # a float32 one, as there
    return torch.where(alone_N, b.r_N / one, advantage.group_zscore(b, ddof=1, eps=EPS).squeeze(1)).unsqueeze(1)
