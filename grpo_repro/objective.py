r"""GRPO and its descendants: one formula, seven knobs.

    J(θ) = E [ Σ_{i,t} weight_it · { corr_it · gate_it · gain_it − kl_it } ]

    ⑥ x, y, groups ~ sampling        r    = ⑦ reward(x, y)            Â      = ③ advantage(r)
    logw = ① ratio(π_θ, π_old)       gain = ② clip(logw, Â)           weight = ④ aggregation
    corr = ① correction(π_old, μ), detached      gate = ② 0/1, detached      kl = ⑤ β·estimate of KL(π_θ‖π_ref)

`score` runs once a rollout (⑦ ⑥ ③, and ⑤ where it is charged to the reward); `loss` runs once a micro-batch (① ② ④ ⑤).
A paper is a choice of the slots below: see presets.py. A variant is one function: see knobs/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo_repro import knobs
from grpo_repro.types import ABSENT, Forward, Minibatch, NonFinite, Norm, Prompt, Response, Scored


@dataclass(frozen=True)
class Objective:
    """The seven knobs. Each slot holds a function (a variant with its parameters bound); the default of each is the plainest."""

    ratio: Callable[[Forward, Minibatch], Tensor] = knobs.ratio.token
    clip: Callable[[Tensor, Forward, Minibatch], tuple[Tensor, Tensor]] = knobs.clip.none
    advantage: Callable[[Minibatch], Tensor | tuple[Tensor, Tensor]] = knobs.advantage.group_zscore
    aggregation: Callable[[Minibatch, Norm], Tensor] = knobs.aggregation.sequence_mean
    kl: Callable[[Forward, Minibatch], Tensor] = knobs.kl.none
    kl_in_reward: Callable[[Forward, Minibatch], Tensor] = knobs.kl.none
    sampling: Callable[[Tensor, Tensor], Tensor] = knobs.sampling.all
    reward: Callable[[Prompt, Response], float] = knobs.reward.exact_match
    correction: Callable[[Minibatch], Tensor] = knobs.correction.none
    gate: tuple[Callable[[Forward, Minibatch], Tensor], ...] = ()
    transform: Callable[[Tensor, Tensor], Tensor] = knobs.transform.none
    overlong: Callable[[Tensor, Minibatch], tuple[Tensor, Tensor]] = knobs.overlong.keep
    step: Callable[..., dict[str, float]] = knobs.step.gradient

    @property
    def needs(self) -> frozenset[str]:
        """What the loop must compute: ⊆ old, sampler, ref, values, steps, full_logits."""
        slots = [getattr(self, f.name) for f in fields(self) if f.name != "gate"]
        wanted = frozenset[str]().union(*(knobs.needs(slot) for slot in (*slots, *self.gate)))
        return wanted | ({"old"} if knobs.needs(self.kl_in_reward) else set())


@dataclass(frozen=True)
class Parts:
    """The terms of one loss, detached, a token: what metrics are made of."""

    logw_NT: Tensor
    gain_NT: Tensor
    hit_NT: Tensor
    kl_NT: Tensor
    weight_NT: Tensor


def score(objective: Objective, b: Minibatch) -> Scored:
    """Rewards → advantages, on the whole rollout: ⑥ keep, overlong, KL in the reward, ③ transform and advantage on the kept rows.

    `b.r_N` holds the raw rewards. Rows that `overlong` hides count in their group's baseline but not in the loss.
    Raises NonFinite when a reward or an advantage is not a number.
    """
    _finite("reward (knob ⑦)", b.r_N)
    kept_N = objective.sampling(b.r_N, b.group_N)
    r_N, mask_NT = objective.overlong(b.r_N, b)
    if b.old_NT is not None:
        old = Forward(logp_NT=b.old_NT).masked(b.mask_NT)
        b = replace(b, penalty_NT=objective.kl_in_reward(old, b.masked()).masked_fill(~b.mask_NT, 0.0))
    row_K = kept_N.nonzero().squeeze(1)
    b = replace(b, r_N=r_N, mask_NT=mask_NT)
    dropped = len(torch.unique(b.group_N)) - len(torch.unique(b.group_N[row_K]))
    kept = b.rows(row_K)
    kept = replace(kept, r_N=objective.transform(kept.r_N, kept.group_N))
    made = objective.advantage(kept)
    advantage, target_NT = made if isinstance(made, tuple) else (made, ABSENT)  # a critic has a target to learn
    kept = replace(kept, advantage=advantage, target_NT=target_NT)
    _finite("advantage (knob ③)", kept.advantage)
    return Scored(kept, row_K, dropped_rows=len(kept_N) - len(row_K), dropped_groups=dropped)


def loss(objective: Objective, now: Forward, b: Minibatch, norm: Norm) -> tuple[Tensor, Parts]:
    """−J of one micro-batch: a partial sum, whose sum over micro-batches and ranks is the whole minibatch's loss.

    Only `now` carries gradient. Masked tokens contribute exactly 0 to value and gradient, whatever they hold; with every token masked
    both are 0. Raises NonFinite when a token in the loss has a log-prob (or Â) that is not a number, UserError when shapes disagree.
    """
    now, b = now.masked(b.mask_NT), b.masked()
    _finite_inputs(now, b)
    logw_NT = objective.ratio(now, b)
    gain_NT, hit_NT = objective.clip(logw_NT, now, b)
    for gate in objective.gate:
        gain_NT = gain_NT * gate(now, b)
    kl_NT = objective.kl(now, b)
    weight_NT = objective.aggregation(b, norm).to(gain_NT.dtype)
    if b.prompt_weight_N is not None:
        weight_NT = weight_NT * b.prompt_weight_N.to(gain_NT.dtype).unsqueeze(1)
    per_token_NT = objective.correction(b).to(gain_NT.dtype) * gain_NT - kl_NT
    total = -(weight_NT * per_token_NT.masked_fill(~b.mask_NT, 0.0)).sum()
    parts = Parts(logw_NT.detach(), gain_NT.detach(), hit_NT, kl_NT.detach(), weight_NT)
    return total, parts


def _finite_inputs(now: Forward, b: Minibatch) -> None:
    """One number is brought to the host; only where it is not finite is each tensor looked at."""
    read = {
        "the policy's log-prob (π_θ, knob ①)": now.logp_NT,
        "the exact KL (knob ⑤)": now.exact_kl_NT,
        "the old policy's log-prob (π_old, knob ①)": b.old_NT,
        "the sampler's log-prob (μ, knob ① correction)": b.sampler_NT,
        "the reference's log-prob (π_ref, knob ⑤)": b.ref_NT,
        "advantage (knob ③)": b.advantage,
    }
    present = [x.detach().sum() for x in read.values() if x is not None]
    if not torch.isfinite(torch.stack(present).sum()):
        for what, x in read.items():
            _finite(what, x)


def _finite(what: str, x: Tensor | None) -> None:
    if x is not None and not torch.isfinite(x).all():
        where = int((~torch.isfinite(x)).flatten().nonzero()[0])
        raise NonFinite(f"{what} is {x.flatten()[where].item()} at index {where}")
