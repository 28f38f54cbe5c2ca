"""② The clip: how much of a sample's gain passes, by how far w has moved and by the sign of Â.

    clip(logw_NT, now, b) -> gain_NT, hit_NT      hit = the bound acted on that token

`eps_*` is the width of a trust region around 1; `w_min`, `w_max` are absolute bounds of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from grpo_repro.knobs import kl
from grpo_repro.types import Forward, Minibatch, NonNegative, Positive, Share, variant


def none(logw_NT: Tensor, now: Forward, b: Minibatch) -> tuple[Tensor, Tensor]:
    r"""No clip.

    $$w_{i,t}\,\hat A_{i,t}$$

    Source: the policy gradient theorem with importance weights.
    Fixes: nothing is thrown away. Costs: nothing bounds an update.
    """
    return torch.exp(logw_NT) * b.advantage, torch.zeros_like(b.mask_NT)


@variant(bounding=True)
def ppo(
    logw_NT: Tensor, now: Forward, b: Minibatch, *, eps_low: Share | None = 0.2, eps_high: NonNegative | None = 0.2
) -> tuple[Tensor, Tensor]:
    r"""The pessimistic bound of PPO, with its two sides free.

    $$\min\big(w\hat A,\ \mathrm{clip}(w,\,1-\varepsilon_{low},\,1+\varepsilon_{high})\,\hat A\big)$$

    A side that is null has no bound.
    Source: PPO (1707.06347), Eq. 7; Clip-Higher is .2/.28 (DAPO, 2503.14476); GSPO takes 3e-4/4e-4 (2507.18071).
    Fixes: no reward for moving further in a favourable direction (Â>0, w↑ and Â<0, w↓ have no gradient).
    Costs: the other two cells are open by design: Â<0 with w≫1 passes at w times its size, Â>0 with w≪1 at w times.
    """
    w_NT = torch.exp(logw_NT)
    free_NT = w_NT * b.advantage
    lowest = 0.0 if eps_low is None else 1 - eps_low
    highest = float("inf") if eps_high is None else 1 + eps_high
    bounded_NT = w_NT.clamp(lowest, highest) * b.advantage
    return torch.minimum(free_NT, bounded_NT), (bounded_NT < free_NT) & b.mask_NT


def _beyond_the_region(*, eps_low: float | None, eps_high: float | None, w_max: float) -> str | None:
    edge = 1 + (eps_high or 0.0)
    return (
        None if w_max > edge else f"w_max (c) is {w_max}, inside the clip's own region; it must exceed 1 + eps_high = {edge:.6g}"
    )


@variant(bounding=True, validate=_beyond_the_region)
def dual(
    logw_NT: Tensor,
    now: Forward,
    b: Minibatch,
    *,
    eps_low: Share | None = 0.2,
    eps_high: NonNegative | None = 0.2,
    w_max: Positive = 3.0,
) -> tuple[Tensor, Tensor]:
    r"""PPO's clip with a floor under the penalty of a bad answer.

    $$\hat A<0:\ \max\big(\min(w\hat A,\mathrm{clip}(w)\hat A),\ c\hat A\big)$$

    with c = w_max > 1+ε_high. The same function as INTELLECT-2's two-sided clip min(w, δ) with δ = c (2505.07291).
    Source: Dual-clip PPO (1912.09729), c = 3.
    Fixes: the open cell Â<0, w≫1, where the penalty has no bound. Costs: beyond c the gradient is 0, so the policy is no longer pushed
    down on a token it has just raised.
    """
    gain_NT, hit_NT = ppo(logw_NT, now, b, eps_low=eps_low, eps_high=eps_high)
    floor_NT = w_max * b.advantage
    floored_NT = (b.advantage < 0) & (floor_NT > gain_NT)  # at w = c the slope is still that of w
    return torch.where(floored_NT, floor_NT.expand_as(gain_NT), gain_NT), hit_NT | (floored_NT & b.mask_NT)


def _ordered(*, w_min: float, w_max: float) -> str | None:
    return None if w_min <= w_max else f"w_min is {w_min} and w_max is {w_max}; w_min must not exceed w_max"


@variant(bounding=True, validate=_ordered)
def truncate(
    logw_NT: Tensor, now: Forward, b: Minibatch, *, w_min: NonNegative = 0.0, w_max: Positive = 1.28
) -> tuple[Tensor, Tensor]:
    r"""The ratio as a truncated, detached weight on the score function: no token's gradient is ever dropped.

    $$sg\big[\mathrm{clip}(w,\ w_{min},\ w_{max})\big]\,\hat A\,\log\pi_\theta$$

    Source: CISPO, MiniMax-M1 (2506.13585); the cap was never published and frameworks disagree on it, so it is an absolute bound here.
    Fixes: rare tokens that PPO's clip drops after the first update keep their gradient. Costs: nothing stops a policy that has moved far.
    """
    w_NT = torch.exp(logw_NT).detach()
    weight_NT = w_NT.clamp(w_min, w_max)
    return weight_NT * b.advantage * now.logp_NT, (weight_NT != w_NT) & b.mask_NT


def soft_sigmoid(
    logw_NT: Tensor, now: Forward, b: Minibatch, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> tuple[Tensor, Tensor]:
    r"""A sigmoid gate instead of an edge.

    $$f(w)\,\hat A,\quad f(w)=\frac4\tau\,\sigma\big(\tau(w-1)\big),\quad \tau=\tau_{pos}\ \text{if}\ \hat A>0\ \text{else}\ \tau_{neg}$$

    Its weight on ∇log π is w·sech²(τ(w−1)/2): 1 at w = 1, more than the on-policy weight for 1 < w < 3.47 (τ = 1), then falling to 0.
    Source: SAPO (2511.20347). Fixes: the jump of a hard clip's gradient to 0. Costs: amplifies where it should hold.
    """
    negative = torch.full_like(b.advantage, tau_neg)  # two Python numbers would meet in float32
    tau_NT = torch.where(b.advantage > 0, torch.full_like(b.advantage, tau_pos), negative).to(logw_NT.dtype)
    gate_NT = 4 / tau_NT * torch.sigmoid(tau_NT * (torch.exp(logw_NT) - 1))
    return gate_NT * b.advantage, torch.zeros_like(b.mask_NT)


def soft_tanh(logw_NT: Tensor, now: Forward, b: Minibatch, *, tau: Positive = 1.0) -> tuple[Tensor, Tensor]:
    r"""A tanh on the log-ratio.

    $$\Big(1+\frac1\tau\tanh(\tau\log w)\Big)\hat A$$

    Its weight on ∇log π is sech²(τ·log w): 1 at w = 1 and falling on both sides alike. (A tanh on w itself is `soft_sigmoid` again.)
    Source: the seed document, knob ②; 2602.19345 compares such gates. Fixes: the jump of a hard clip, and symmetric in w and 1/w.
    Costs: no side is open, so the way back is not either.
    """
    return (1 + torch.tanh(tau * logw_NT) / tau) * b.advantage, torch.zeros_like(b.mask_NT)


@variant(bounding=True, geometric=True)
def gmpo(
    logw_NT: Tensor, now: Forward, b: Minibatch, *, eps_low: Positive = 0.4, eps_high: Positive = 0.4
) -> tuple[Tensor, Tensor]:
    r"""The clip on each token's log-ratio, before the response's geometric mean.

    $$\Big\{\prod_t\min\big(w_t^{s},\ \mathrm{clip}(w_t, e^{-\varepsilon_{low}}, e^{\varepsilon_{high}})^{s}\big)\Big\}^{s/|y|}\hat A,
      \quad s=\mathrm{sign}(\hat A)$$

    One number a response, so it goes with token ratios and sequence_mean; needs one Â a response. Widths are in log w.
    Source: GMPO (2507.20673), Eq. 4: .4 on both sides. Fixes: an outlying token moves the mean, not the gradient of the others.
    Costs: one-sided by the sign of Â, as PPO's clip is.
    """
    near_NT = logw_NT.clamp(-eps_low, eps_high)
    kept_NT = torch.where(b.advantage > 0, torch.minimum(logw_NT, near_NT), torch.maximum(logw_NT, near_NT))
    mean_N1 = (kept_NT * b.mask_NT).sum(1, keepdim=True) / b.tokens_N1
    return (torch.exp(mean_N1) * b.advantage).expand_as(logw_NT), (kept_NT != logw_NT) & b.mask_NT


def _init_beta(*, beta: float, target: float) -> dict[str, float]:
    return {"beta": beta}


def _adapt_beta(state: dict[str, float], metrics: Mapping[str, float], *, beta: float, target: float) -> dict[str, float]:
    """PPO's rule on the KL(π_old‖π_θ) that the whole rollout's updates realised."""
    realised = metrics.get("kl_old/exact", metrics.get("kl_old/k3"))
    if realised is None:
        return state
    factor = 0.5 if realised < target / 1.5 else 2.0 if realised > target * 1.5 else 1.0
    return {"beta": state["beta"] * factor}


@variant(needs=("old",), init=_init_beta, update=_adapt_beta, adaptive=True)
def kl_penalty(
    logw_NT: Tensor,
    now: Forward,
    b: Minibatch,
    *,
    beta: Positive = 1.0,
    target: Positive = 0.01,
    state: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Tensor, Tensor]:
    r"""A penalty on the distance to π_old instead of a clip; β adapts so that a rollout's updates move the policy by `target` nats a token.

    $$w\hat A - \beta_{old}\,(w - 1 - \log w)$$

    w − 1 − log w estimates KL(π_old‖π_θ) from π_old's tokens, unbiased in value and gradient. With d that KL after the rollout's last
    update, β halves where d < d_targ/1.5 and doubles where d > 1.5·d_targ. Needs token_mean, so that β means the same at every length.
    Source: PPO (1707.06347), Sec. 4 (adaptive KL penalty). Fixes: both open cells; no edge. Costs: β lags by one rollout.
    """
    penalty_NT = kl.ESTIMATES["k3"](logw_NT)  # π_old drew: log other − log drawer is log w
    gain_NT = torch.exp(logw_NT) * b.advantage - state.get("beta", beta) * penalty_NT
    return gain_NT, torch.zeros_like(b.mask_NT)
