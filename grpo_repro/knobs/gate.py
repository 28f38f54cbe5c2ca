"""② Gates: detached 0/1 masks on the gain (a list in the objective, empty by default).

gate(now, b) -> keep_NT        bool, without gradient
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_repro.knobs import ratio
from grpo_repro.types import Forward, Minibatch, Positive, variant


@variant(needs=("sampler",))
def dppo_tv(now: Forward, b: Minibatch, *, eps_low: Positive = 0.2, eps_high: Positive = 0.2) -> Tensor:
    r"""Drops a token once its probability has moved too far in the favourable direction, whatever its ratio.

    $$\mathbb 1[\hat A\le0\ \lor\ \pi_\theta-\mu\le\varepsilon_{high}]\cdot\mathbb 1[\hat A\ge0\ \lor\ \mu-\pi_\theta\le\varepsilon_{low}]$$

    Anchored to the sampler μ, not to π_old. Source: DPPO (2602.04879), total variation of the one token seen, ±.2.
    Fixes: a ratio over-clips rare tokens and under-clips frequent ones. Costs: the token's own probability is a lower bound of the TV.
    """
    return _inside((torch.exp(now.logp_NT) - torch.exp(b.sampler_NT)).detach(), b, eps_low, eps_high)


@variant(needs=("sampler",))
def dppo_kl(now: Forward, b: Minibatch, *, eps: Positive = 0.05) -> Tensor:
    r"""Drops a token once the binary KL between its old and new probability is too large, in the favourable direction.

    $$\mathbb 1\big[\mathrm{KL}(\mathrm{Ber}(\mu)\,\|\,\mathrm{Ber}(\pi_\theta))\le\varepsilon\ \text{or}\ (\pi_\theta-\mu)\hat A\le0\big]$$

    Source: DPPO (2602.04879), binary KL, .05. Fixes: as dppo_tv, and is stricter near 0 and 1. Costs: as dppo_tv.
    """
    p_NT, q_NT = torch.exp(b.sampler_NT.double()), torch.exp(now.logp_NT.detach().double())
    kl_NT = _xlog(p_NT, q_NT) + _xlog(1 - p_NT, 1 - q_NT)
    return (kl_NT <= eps) | ((q_NT - p_NT) * b.advantage <= 0)


@variant(needs=("old",), sequence_gate=True)
def off_policy(now: Forward, b: Minibatch, *, delta: Positive = 0.5) -> Tensor:
    r"""Hides a bad response that the policy has moved away from.

    $$\mathbb 1\Big[\hat A_i\ge0\ \text{or}\ \frac{1}{|y_i|}\sum_t\log\frac{\pi_{old}(y_{i,t})}{\pi_\theta(y_{i,t})}\le\delta\Big]$$

    Source: DeepSeek-V3.2 (2512.02556); δ is not published (TRL suggests .5). Needs one Â a response.
    Fixes: learning from mistakes the policy no longer makes. Costs: a threshold that depends on the task.
    """
    gone_NT = -ratio.sequence(now, b).detach()  # the mean of log π_old − log π_θ, at every token of the response
    return (b.advantage >= 0) | (gone_NT <= delta)


def _inside(moved_NT: Tensor, b: Minibatch, eps_low: float, eps_high: float) -> Tensor:
    too_high_NT = (b.advantage > 0) & (moved_NT > eps_high)
    too_low_NT = (b.advantage < 0) & (moved_NT < -eps_low)
    return ~(too_high_NT | too_low_NT)


def _xlog(p: Tensor, q: Tensor) -> Tensor:
    """p·log(p/q) with 0·log 0 = 0."""
    tiny = torch.finfo(p.dtype).tiny
    return torch.where(p > 0, p * (p.clamp(min=tiny).log() - q.clamp(min=tiny).log()), torch.zeros_like(p))
