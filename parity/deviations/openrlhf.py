"""Where OpenRLHF's words give another number than ours, and what takes the difference out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from grpo_repro.knobs import advantage, aggregation, correction, kl, ratio
from grpo_repro.types import Forward, Minibatch
from parity.batches import GROUPS, Batch
from parity.cases import BASE
from parity.compare import FP32, Deviation, Out, ours, out, value_loss
from parity.peers.openrlhf import EPS, PolicyLoss, ValueLoss, advantages, policy


def deviations() -> list[Deviation]:
    """Where the same words give another number."""
    z = replace(BASE, advantage=partial(advantage.group_zscore, ddof=1, eps=EPS))
    seq = replace(z, aggregation=aggregation.sequence_mean)
    dr = replace(BASE, advantage=advantage.group_center, aggregation=aggregation.constant_length)
    center = {"estimator": "dr_grpo"}
    charged = replace(BASE, advantage=advantage.group_center, kl_in_reward=partial(kl.k1, beta=0.1))
    rf = replace(BASE, advantage=partial(advantage.batch_zscore, ddof=1, eps=1e-4))
    critic = replace(BASE, advantage=partial(advantage.gae, gamma=1.0, lam=0.95, whiten=True))
    geometric = partial(correction.mask, w_min=0.8, w_max=1.2, level="geometric")
    gspo = replace(seq, ratio=ratio.sequence, correction=partial(correction.truncate, w_max=2.0, level="token"))
    k3 = replace(z, kl=partial(kl.k3, beta=0.1))
    unbiased = replace(z, kl=partial(kl.k3_unbiased, beta=0.1))
    gae = {"estimator": "gae", "gamma": 1.0, "lambd": 0.95}
    return [
        Deviation(
            "advantage.group_zscore", "ε is 1e-9, fixed (converted: our eps = 1e-9)", ours(BASE), policy("token_mean"), ours(z)
        ),
        Deviation(
            "aggregation.constant_length",
            "dr_grpo only removes the std: no loss_agg_mode divides by a constant, the default stays the token mean "
            "(converted: our token mean)",
            ours(dr),
            policy("token_mean", adv=center),
            ours(replace(dr, aggregation=aggregation.token_mean)),
        ),
        Deviation(
            "advantage.batch_zscore",
            "reinforce whitens with ddof = 0 and no ε (ours by default: 1 and 1e-4; converted: our ddof = 0, eps = 0)",
            ours(rf),
            policy("token_mean", adv={"estimator": "reinforce"}),
            ours(replace(rf, advantage=partial(advantage.batch_zscore, ddof=0, eps=0.0))),
            bar=FP32,
        ),
        Deviation(
            "advantage.gae",
            "whitening has ddof = 0 (ours and verl's: 1; converted: both without whitening)",
            ours(critic),
            policy("token_mean", adv=gae),
            ours(replace(critic, advantage=partial(advantage.gae, gamma=1.0, lam=0.95, whiten=False))),
            policy("token_mean", adv=gae, raw=True),
        ),
        Deviation(
            "kl_in_reward.k1",
            "with a group baseline the KL is charged after the baseline and to the tokens before it, so the baseline holds no KL "
            "(converted: our centred reward less β·KL from each token on)",
            ours(charged),
            policy("token_mean", adv={**center, "coef": 0.1, "kind": "k1"}),
            ours(replace(charged, advantage=_charged_after)),
            bar=FP32,
        ),
        Deviation(
            "correction.mask·geometric",
            "a response-level band (is_correction_level=seq) keeps each token's own weight inside an accepted response, where ours is the "
            "geometric mean (converted: the token weight under our geometric band)",
            ours(replace(z, correction=geometric)),
            policy("token_mean", is_correction_level="seq", is_correction_mode="mask", is_correction_threshold=[0.8, 1.2]),
            ours(replace(z, correction=_band)),
        ),
        Deviation(
            "ratio.sequence",
            "gspo with a correction takes the ratio to the sampler in place of π_old and applies no weight "
            "(converted: our ratio to the sampler, no correction)",
            ours(gspo),
            policy(
                "sequence_mean",
                policy_loss_type="gspo",
                is_correction_level="token",
                is_correction_mode="clip",
                is_correction_threshold=[0, 2],
            ),
            ours(
                replace(
                    seq,
                    ratio=lambda now, b: ratio.sequence(now, replace(b, old_NT=b.sampler_NT)),
                )
            ),
        ),
        Deviation(
            "kl.k3",
            "the estimate is clamped to 10, where it has no gradient any more (converted: our k3, clamped)",
            ours(k3),
            policy("token_mean", coef=0.1),
            ours(replace(k3, kl=lambda now, b: kl.k3(now, b, beta=0.1).clamp(max=1.0))),
            bar=FP32,
            kind="far",
        ),
        Deviation(
            "kl.k3_unbiased",
            "unbiased_gradient clamps the importance weight at 10 (and reports the KL without the weight; converted: our k2 with that "
            "detached weight, gradient only)",
            ours(unbiased),
            policy("token_mean", coef=0.1, unbiased=True),
            ours(replace(z, kl=_weighted_k2)),
            bar=FP32,
            kind="far",
            compared="gradient",
        ),
        Deviation("advantage.gae", "", value_loss(0.2), _value_loss, agrees="the critic's clipped loss (ValueLoss)"),
        Deviation(
            "aggregation.token_mean", "", ours(z), _micro, agrees="micro-batches of one group, given the batch's token count"
        ),
    ]


def _value_loss(batch: Batch) -> Out:
    leaves, value_NT = batch.fresh()
    b = batch.b
    return out(ValueLoss(clip_eps=0.2)(value_NT, b.value_NT, b.ref_NT, action_mask=b.mask_NT), leaves)


def _micro(batch: Batch) -> Out:
    """One micro-batch a group, their losses added up, each with the whole batch's token count."""
    leaves, logp_NT = batch.fresh()
    made, loss = advantages(batch.b, "group_norm").advantages, PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28)
    total = torch.zeros((), dtype=logp_NT.dtype)
    for i in range(GROUPS):
        at, b = (batch.b.group_N == i).nonzero().squeeze(1), batch.b
        given = {"action_mask": b.mask_NT[at], "batch_num_tokens": int(b.mask_NT.sum())}
        total = total + loss(logp_NT[at], b.old_NT[at], made[at], **given)[0]
    return out(total, leaves)


def _charged_after(b: Minibatch) -> Tensor:
    centred_N1 = advantage.group_center(replace(b, penalty_NT=None))
    return (centred_N1 - b.penalty_NT.flip(1).cumsum(1).flip(1)).masked_fill(~b.mask_NT, 0.0)


def _weighted_k2(now: Forward, b: Minibatch) -> Tensor:
    return torch.exp(now.logp_NT - b.old_NT).clamp(max=10).detach() * kl.k2(now, b, beta=0.1)


def _band(b: Minibatch) -> Tensor:
    inside_NT = correction.mask(b, w_min=0.8, w_max=1.2, level="geometric") > 0
    return correction.truncate(b, w_max=1e9, level="token") * inside_NT
