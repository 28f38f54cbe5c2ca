"""⑤ The KL penalty to the reference policy. β is inside.

    kl(now, b) -> kl_NT        β · estimate a token; in the loss it is subtracted from the gain, in the reward from r

With d = log π_ref − log π_θ: k1 = −d, k2 = d²/2, k3 = e^d − d − 1 (Schulman, joschu.net/blog/kl-approx.html). All three estimate
KL(π_θ‖π_ref) in *value*; as a loss their *gradients* differ (CLAIMS A2). d is bounded by ±20 before exp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_repro.knobs import ratio
from grpo_repro.types import Forward, Minibatch, NonNegative, UserError, variant

BOUND = 20.0

# Schulman's estimators of KL(drawer‖other) from d = log other − log drawer, at tokens of the drawer.
ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d**2,
    "k3": lambda d: torch.expm1(d) - d,  # expm1: e^d − 1 cancels near 0
}


def none(now: Forward, b: Minibatch) -> Tensor:
    r"""No KL: β = 0.

    $$0$$

    Source: DAPO (2503.14476), GSPO practice. Fixes: the policy may go far. Costs: nothing holds it.
    """
    return torch.zeros_like(now.logp_NT)


@variant(needs=("ref",), zero_gradient_in_loss=True)
def k1(now: Forward, b: Minibatch, *, beta: NonNegative) -> Tensor:
    r"""The log-ratio itself.

    $$\beta\,\big(\log\pi_\theta - \log\pi_{ref}\big)$$

    Source: RLHF practice, in the reward. In the reward its gradient is ∇KL(π_θ‖π_ref) exactly; in the loss its expected gradient is 0.
    Fixes: unbiased value. Costs: negative at times, the largest variance.
    """
    return beta * ESTIMATES["k1"](_d(now, b))


@variant(needs=("ref",))
def k2(now: Forward, b: Minibatch, *, beta: NonNegative) -> Tensor:
    r"""Half the squared log-ratio.

    $$\frac\beta2\,\big(\log\pi_\theta - \log\pi_{ref}\big)^2$$

    Source: Schulman 2020. In the loss its gradient is ∇KL(π_θ‖π_ref) exactly (2510.01555).
    Fixes: the right gradient in the loss. Costs: biased value.
    """
    return beta * ESTIMATES["k2"](_d(now, b))


@variant(needs=("ref",), forward_gradient_in_loss=True)
def k3(now: Forward, b: Minibatch, *, beta: NonNegative) -> Tensor:
    r"""GRPO's estimator: never negative, unbiased in value.

    $$\beta\,\Big(\frac{\pi_{ref}}{\pi_\theta} - 1 - \log\frac{\pi_{ref}}{\pi_\theta}\Big)$$

    Source: DeepSeekMath (2402.03300), Eq. 4. In the loss its expected gradient is that of the *forward* KL(π_ref‖π_θ).
    Fixes: low variance, never negative. Costs: another gradient than the KL it names; unbounded where π_θ ≪ π_ref.
    """
    return beta * ESTIMATES["k3"](_d(now, b))


@variant(needs=("ref", "old"))
def k3_unbiased(now: Forward, b: Minibatch, *, beta: NonNegative) -> Tensor:
    r"""k3 with its importance weight: the gradient of the KL it names, also off-policy.

    $$\beta\,\frac{\pi_\theta}{\pi_{old}}\Big(\frac{\pi_{ref}}{\pi_\theta} - 1 - \log\frac{\pi_{ref}}{\pi_\theta}\Big)$$

    The weight is the token's own ratio and carries gradient, whatever knob ① is. Source: DeepSeek-V3.2 (2512.02556), Eq. 7.
    Fixes: its expected gradient is ∇KL(π_θ‖π_ref) exactly. Costs: the ratio's variance off-policy.
    """
    return torch.exp(ratio.token(now, b)) * k3(now, b, beta=beta)


@variant(needs=("ref", "full_logits"))
def full(now: Forward, b: Minibatch, *, beta: NonNegative) -> Tensor:
    r"""The KL itself, summed over the vocabulary: no estimate.

    $$\beta\sum_v \pi_\theta(v)\,\log\frac{\pi_\theta(v)}{\pi_{ref}(v)}$$

    The state is still sampled: the gradient through which prefixes are reached is not in it. In the loss only. Source: definition.
    Fixes: no variance from the drawn token. Costs: both policies' whole distributions in memory.
    """
    if now.exact_kl_NT is None:
        raise UserError("kl.full: the exact KL is only had of the policy in the loss; in the reward write k1, k2 or k3.")
    return beta * now.exact_kl_NT


@variant(needs=("ref",))
def forward(now: Forward, b: Minibatch, *, beta: NonNegative) -> Tensor:
    r"""The forward KL by name: what k3 in the loss really descends.

    $$\beta\,sg\Big[\frac{\pi_{ref}}{\pi_\theta}\Big]\,\big(\log\pi_{ref} - \log\pi_\theta\big)$$

    Estimates KL(π_ref‖π_θ) with tokens drawn from π_θ; its expected gradient is ∇KL(π_ref‖π_θ). Source: definition.
    Fixes: says which divergence is penalised. Costs: mass-covering; unbounded weight where π_θ ≪ π_ref.
    """
    d_NT = _d(now, b)
    return beta * torch.exp(d_NT).detach() * d_NT


def _d(now: Forward, b: Minibatch) -> Tensor:
    return (b.ref_NT - now.logp_NT).clamp(-BOUND, BOUND)
