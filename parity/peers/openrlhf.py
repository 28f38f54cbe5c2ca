"""OpenRLHF: `RemoteExperienceMaker.compute_advantages_and_returns`, `PolicyLoss`, `compute_approx_kl`, `aggregate_loss`.

float64 where it lets us: its KL and its whitening are float32. ε of the z-score is 1e-9.
(The 1e-8 that its sequence mean adds to |y| is lost in float32, because the mask is bool.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from grpo_repro.knobs import advantage
from grpo_repro.objective import Objective
from grpo_repro.types import Minibatch
from parity.batches import LIMIT, SIZE, Batch, rollout
from parity.compare import FP32, FP64, Cannot, Expressed, Out, Peer, Run, out, parts
from parity.stubs import stubbed

with stubbed("flash_attn", "deepspeed", "peft", "pylatexenc", "openrlhf.trainer.ray"):
    from openrlhf.models.loss import PolicyLoss, ValueLoss, aggregate_loss
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

__all__ = ["EPS", "PolicyLoss", "ValueLoss", "advantages", "peer", "policy"]  # its own names come from here: they need the stubs
EPS = 1e-9  # group_norm's
OPEN = 1e9  # "no bound", where a number is required
AGGREGATION = {"token_mean": True, "sequence_mean": False}  # token_level_loss
ESTIMATOR = {"group_zscore": "group_norm", "group_center": "dr_grpo", "leave_one_out": "rloo", "batch_zscore": "reinforce"}
OUTSIDE = {
    "sampling.drop_zero_variance": "groups are filtered by their mean reward in the Ray sampler, not in a function that can be asked",
    "sampling.dynamic": "groups are filtered by their mean reward in the Ray sampler, not in a function that can be asked",
    "overlong.mask": "no such setting",
}


def advantages(b: Minibatch, estimator: str, coef: float = 0.0, kind: str = "k1", cache: int | None = None, **gae: float) -> Any:
    """Its experience maker on one batch: penalties, baseline, KL at every token, returns, whitening."""
    algo = SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, no_std_norm=False, gamma=1.0, lambd=1.0, **{}))
    vars(algo.advantage).update(gae)
    reward = SimpleNamespace(clip_range=None, overlong_buffer_len=cache, overlong_penalty_factor=1.0)
    sizes = SimpleNamespace(n_samples_per_prompt=SIZE if len(b.r_N) % SIZE == 0 else len(b.r_N), max_new_tokens=b.limit)
    args = SimpleNamespace(algo=algo, reward=reward, rollout=sizes)
    maker = RemoteExperienceMaker(None, None, None, None, SimpleNamespace(value=coef), SimpleNamespace(args=args), None)
    mask_NT = b.mask_NT
    charged_NT = compute_approx_kl(b.old_NT, b.ref_NT, kl_estimator=kind) if coef else torch.zeros_like(b.old_NT)
    given = Experience(
        index=list(range(len(b.r_N))),
        rewards=b.r_N.clone(),
        action_mask=mask_NT,
        kl=charged_NT * mask_NT,
        values=b.value_NT,
        response_length=b.length_N,
        info={},
    )
    return maker.compute_advantages_and_returns([given])[0]


def policy(
    agg: str, *, coef: float = 0.0, kind: str = "k3", unbiased: bool = False, raw: bool = False, adv: Any = None, **s: Any
) -> Run:
    """Advantages → PolicyLoss → the KL term, as its `ppo_actor` puts them together."""
    loss = PolicyLoss(token_level_loss=AGGREGATION[agg], **{"clip_eps_low": 0.2, "clip_eps_high": 0.28, **s})

    def run(batch: Batch) -> Out:
        b = batch.b
        leaves, logp_NT = batch.fresh()
        made = advantages(b, **(adv or {"estimator": "group_norm"}))
        a_NT = (made.returns - b.value_NT * b.mask_NT) if raw else made.advantages
        total = loss(logp_NT, b.old_NT, a_NT, action_mask=b.mask_NT, rollout_log_probs=b.sampler_NT)[0]
        if coef:
            kl_NT = compute_approx_kl(logp_NT, b.ref_NT, b.old_NT, kind, unbiased)
            total = total + coef * aggregate_loss(kl_NT, b.mask_NT, token_level_loss=AGGREGATION[agg])
        return out(total, leaves)

    return run


def express(o: Objective, kind: str) -> Expressed:
    """OpenRLHF's words for an Objective, with our side in its ε. Raises Cannot."""
    for slot, neutral in {"transform": "none", "sampling": "all"}.items():
        if (name := parts(o, slot)[0]) != neutral:
            raise Cannot(f"{slot}.{name}", OUTSIDE.get(f"{slot}.{name}", "no such option"))
    a, a_set = parts(o, "aggregation")
    if a not in AGGREGATION or a_set.get("per") == "group":
        raise Cannot(f"aggregation.{a}" + ("·group" if a_set else ""), "no such loss_agg_mode")
    if o.gate:
        raise Cannot(f"gate.{parts(replace(o, clip=o.gate[0]), 'clip')[0]}", "its gates compare π_old with the sampler, not π_θ")
    adv, mine, bar, said = _advantage(o, o)
    over, over_set = parts(o, "overlong")
    if over == "mask":
        raise Cannot("overlong.mask", OUTSIDE["overlong.mask"])
    if over == "soft_penalty":
        adv["cache"] = over_set["cache"] or LIMIT // 5
    settings = _policy(o, a)
    penalty, k = parts(o, "kl")
    if penalty not in ("none", "k1", "k2", "k3", "k3_unbiased"):
        raise Cannot(f"kl.{penalty}", "estimators are k1, k2, k3, with or without unbiased_gradient")
    bar = FP32 if penalty != "none" else bar
    unbiased = penalty == "k3_unbiased"  # its value is not weighted, its gradient is
    penalty = penalty.removesuffix("_unbiased")
    run = policy(a, coef=k.get("beta", 0.0), kind=penalty, unbiased=unbiased, adv=adv, raw=adv["estimator"] == "gae", **settings)
    words = {"loss_agg_mode": "token-mean" if AGGREGATION[a] else "seq-mean-token-mean", **adv, **settings}
    words |= {"kl.estimator": penalty, "kl.init_coef": k["beta"]} if penalty != "none" else {}
    words |= {"kl.unbiased_gradient": True} if unbiased else {}
    return Expressed(run, words, bar, "gradient" if unbiased else "loss and gradient", mine, tuple(said))


def _advantage(o: Objective, mine: Objective) -> tuple[dict[str, Any], Objective, float, list[str]]:
    name, p = parts(o, "advantage")
    charged, k = parts(o, "kl_in_reward")
    settings: dict[str, Any] = {} if charged == "none" else {"coef": k["beta"], "kind": charged}
    if charged not in ("none", "k1", "k2", "k3"):
        raise Cannot(f"kl_in_reward.{charged}", "estimators are k1, k2, k3")
    if name == "gae":
        if p["whiten"]:
            raise Cannot("advantage.gae whitened", "its whitening has ddof = 0: see the deviations")
        adv = {"estimator": "gae", "gamma": p["gamma"], "lambd": p["lam"], **settings}
        return adv, mine, FP32 if settings else FP64, ["without whitening"]
    if name not in ESTIMATOR:
        raise Cannot(f"advantage.{name}", "no such estimator")
    if settings and name != "batch_zscore":
        raise Cannot(f"kl_in_reward.{charged} with a group baseline", "the KL is charged after the baseline: see the deviations")
    if name == "group_zscore" and p["ddof"] == 0:
        raise Cannot("advantage.group_zscore ddof=0", "the standard deviation has ddof = 1")
    if name == "batch_zscore" and p["ddof"] == 1:
        raise Cannot("advantage.batch_zscore ddof=1", "its whitening has ddof = 0")
    said = []
    if name == "group_zscore":
        mine, said = replace(mine, advantage=partial(advantage.group_zscore, ddof=1, eps=EPS)), ["ε = 1e-9"]
    if name == "batch_zscore":
        mine = replace(mine, advantage=partial(advantage.batch_zscore, ddof=0, eps=0.0))
    return {"estimator": ESTIMATOR[name], **settings}, mine, FP32 if name == "batch_zscore" else FP64, said


def _policy(o: Objective, a: str) -> dict[str, Any]:
    w, (name, p) = parts(o, "ratio")[0], parts(o, "clip")
    if name not in ("none", "ppo", "dual"):
        raise Cannot(f"clip.{name}", "policy_loss_type is ppo or gspo")
    low = 1.0 if name == "none" or p["eps_low"] is None else p["eps_low"]
    high = OPEN if name == "none" or p["eps_high"] is None else p["eps_high"]
    settings: dict[str, Any] = {"clip_eps_low": low, "clip_eps_high": high, "dual_clip": p.get("w_max")}
    if w in ("none", "prefix"):
        raise Cannot(f"ratio.{w}", "its losses keep the ratio to π_old" if w == "none" else "policy_loss_type is ppo or gspo")
    fix, c = parts(o, "correction")
    if fix != "none":
        if w != "token":
            raise Cannot(
                f"correction.{fix} with a sequence ratio", "its gspo puts the sampler in π_old's place: see the deviations"
            )
        if c["level"] != "token":
            raise Cannot(f"correction.{fix}·{c['level']}", "a response-level band keeps token weights: see the deviations")
        settings |= {"is_correction_level": "token", "is_correction_mode": "clip" if fix == "truncate" else "mask"}
        settings["is_correction_threshold"] = [c.get("w_min", 0.0), c["w_max"]]
    if w != "token":
        if a != "sequence_mean":
            raise Cannot("ratio.sequence with another aggregation", "its gspo is always a sequence mean")
        settings["policy_loss_type"] = "gspo"
    return settings


peer = Peer("OpenRLHF", "openrlhf", express, rollout)
