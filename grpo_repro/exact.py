"""What needs no training: the objective's own functions on a handful of numbers, in float64.

Every expectation here is a sum over all outcomes or a quadrature; nothing is sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from grpo_repro import knobs
from grpo_repro.objective import Objective, loss, score
from grpo_repro.types import Forward, Minibatch, Norm

Clip = Callable[[Tensor, Forward, Minibatch], tuple[Tensor, Tensor]]
Advantage = Callable[[Minibatch], Tensor | tuple[Tensor, Tensor]]
F64 = torch.float64


@dataclass(frozen=True)
class Cell:
    """One token under a clip: the gain's value, its derivative by log π_θ, and the derivative without any clip, w·Â."""

    w: float
    advantage: float
    gain: float
    gradient: float
    unclipped: float

    @property
    def passes(self) -> bool:
        return self.gradient != 0.0

    def __str__(self) -> str:
        kept = "" if self.unclipped == 0 else f"\nof an unclipped {self.unclipped:+.3g}"
        return f"gain {self.gain:+.3g}\ngradient {self.gradient:+.3g}{kept}"


def cells(clip: Clip, ws: Sequence[float], advantages: Sequence[float]) -> list[list[Cell]]:
    """The seed's matrix for any clip: a row an advantage, a column a ratio w."""
    return [[_cell(clip, w, advantage) for w in ws] for advantage in advantages]


def two_by_two() -> dict[str, list[list[Cell]]]:
    """The seed's matrix, w = 5 and .1 × Â = +1 and −1, for every clip variant with its default parameters, by name."""
    return {name: cells(clip, (5.0, 0.1), (1.0, -1.0)) for name, clip in knobs.variants("clip").items()}


def multiplier(advantage: Advantage, group: int, p: float) -> float:
    """E[Â(R − p)]/Var(R) for a reward that is 1 with probability p: by how much an estimator scales the policy gradient of a prompt.

    1 for an unbiased one; its dependence on p is a difficulty bias, on `group` (G) a hidden step size (CLAIMS A3).
    """
    total = 0.0
    for right in range(group + 1):
        r_N = torch.tensor([1.0] * right + [0.0] * (group - right), dtype=F64)
        chance = math.comb(group, right) * p**right * (1 - p) ** (group - right)
        total += chance * float((_one_token(advantage, r_N, torch.zeros(group, dtype=torch.int64)) * (r_N - p)).mean())
    return total / (p * (1 - p))


@dataclass(frozen=True)
class Estimate:
    """A policy-gradient estimator on tabular softmax policies, P prompts of V one-token answers: all in units of the exact gradient."""

    mean_PV: Tensor  # E of the estimate
    exact_PV: Tensor  # ∇ of the mean expected reward
    variance: float  # E‖estimate − its mean‖²

    @property
    def scale(self) -> float:
        """The length of the mean along the exact gradient: 1 if unbiased."""
        return float((self.mean_PV * self.exact_PV).sum() / (self.exact_PV**2).sum())

    @property
    def cosine(self) -> float:
        return float((self.mean_PV * self.exact_PV).sum() / (self.mean_PV.norm() * self.exact_PV.norm()))

    @property
    def bias(self) -> float:
        """‖mean − exact‖/‖exact‖."""
        return float((self.mean_PV - self.exact_PV).norm() / self.exact_PV.norm())


def estimate(advantage: Advantage, logits_PV: Tensor, reward_PV: Tensor, group: int) -> Estimate:
    """Mean and variance of the gradient that `score` and `loss` make of one rollout, over all V^(P·G) rollouts (keep them few)."""
    prompts, answers = logits_PV.shape
    objective = Objective(advantage=advantage, ratio=knobs.ratio.none, aggregation=knobs.aggregation.sequence_sum)
    logits_PV = logits_PV.detach().to(F64).requires_grad_(True)
    logp_PV = torch.log_softmax(logits_PV, 1)
    of_N = torch.arange(prompts).repeat_interleave(group)
    chances, gradients = [], []
    for drawn in itertools.product(range(answers), repeat=prompts * group):
        answer_N = torch.tensor(drawn)
        logp_NT = logp_PV[of_N, answer_N].unsqueeze(1)
        b = score(objective, _one_token_batch(reward_PV.to(F64)[of_N, answer_N], of_N, logp_NT.detach())).b
        total, _ = loss(objective, Forward(logp_NT), b, Norm.of(b))
        gradients.append(-torch.autograd.grad(total, logits_PV, retain_graph=True)[0])
        chances.append(logp_NT.detach().sum().exp())
    chance_M, gradient_MPV = torch.stack(chances), torch.stack(gradients)
    mean_PV = (chance_M[:, None, None] * gradient_MPV).sum(0)
    variance = float((chance_M * ((gradient_MPV - mean_PV) ** 2).sum((1, 2))).sum())
    expected = (logp_PV.exp() * reward_PV.to(F64)).sum(1).mean()
    return Estimate(mean_PV, torch.autograd.grad(expected, logits_PV)[0], variance)


def noise_gradient(clip: Clip, sigma: float, advantage: float, beyond: float = 0.0) -> float:
    """E[∂gain/∂log π_θ] where log w ~ N(0, σ²): an unmoved policy whose ratio is read with symmetric noise; Â is right without noise.

    With min and clip it is e^{σ²/2}·Φ(ln(1+ε_high)/σ − σ)·Â for Â>0 and e^{σ²/2}·Φ(σ − ln(1−ε_low)/σ)·Â for Â<0, so an advantage of
    random sign pushes down what was sampled: their sum is below 0, except that Clip-Higher turns it where
    (1+ε_high)(1−ε_low) > e^{2σ²}. `beyond`: only tokens with w above it count.
    """
    logw_NT, weight_NT = _normal(sigma, 0.0 if beyond == 0 else math.log(beyond))
    return float((weight_NT * _slopes(clip, logw_NT, advantage)).sum())


def noise_bias(clip: Clip, sigma: float) -> float:
    """Mean of `noise_gradient` over Â = +1 and −1: what an uninformative advantage does to the log-probability of what was sampled."""
    return (noise_gradient(clip, sigma, 1.0) + noise_gradient(clip, sigma, -1.0)) / 2


def cap_removes(w_max: float, sigma: float, eps: float = 0.2) -> float:
    """Share of PPO's gradient in the open cell (Â<0, w>1+ε) that dual clip with c = w_max takes away, log w ~ N(0, σ²).

    1 at c = 1+ε, 0 as c → ∞; exactly Φ(σ − ln c/σ)/Φ(σ − ln(1+ε)/σ).
    """
    dual = partial(knobs.clip.dual, eps_low=eps, eps_high=eps, w_max=w_max)
    open_ = noise_gradient(partial(knobs.clip.ppo, eps_low=eps, eps_high=eps), sigma, -1.0, beyond=1 + eps)
    return 1 - noise_gradient(dual, sigma, -1.0, beyond=1 + eps) / open_


def uses_of_kl() -> dict[str, Objective]:
    """Each estimator of ⑤ in the loss, and each that needs one token alone in the reward; no baseline, β = 1."""
    bare = Objective(advantage=lambda b: b.return_N.unsqueeze(1), aggregation=knobs.aggregation.sequence_sum)
    bound = {name: partial(f, beta=1.0) for name, f in knobs.variants("kl").items() if knobs.needs(f)}
    in_loss = {f"{name} in the loss": replace(bare, kl=f) for name, f in bound.items()}
    alone = {name: f for name, f in bound.items() if "full_logits" not in knobs.needs(f)}
    return in_loss | {f"{name} in the reward": replace(bare, kl_in_reward=f) for name, f in alone.items()}


def expected_gradient(objective: Objective, theta_V: Tensor, ref_V: Tensor) -> Tensor:
    """E_{y~π_θ} ∇_θ loss(y) over V one-token responses without reward, of logits θ against a reference's logits, on-policy."""
    theta_V = theta_V.detach().clone().requires_grad_(True)
    logp_V, logq_V = torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0)
    exact_NT = (logp_V.exp() * (logp_V - logq_V)).sum().reshape(1, 1)
    total = torch.zeros((), dtype=F64)
    for v in range(len(theta_V)):
        old_NT = logp_V[v].detach().reshape(1, 1)
        b = _one_token_batch(torch.zeros(1, dtype=F64), torch.zeros(1, dtype=torch.int64), old_NT)
        b = score(objective, replace(b, ref_NT=logq_V[v].reshape(1, 1))).b
        value, _ = loss(objective, Forward(logp_V[v].reshape(1, 1), exact_kl_NT=exact_NT), b, Norm.of(b))
        total = total + old_NT.exp().squeeze() * value
    return torch.autograd.grad(total, theta_V)[0]


def gradients_of_kl(theta_V: Tensor, ref_V: Tensor) -> tuple[Tensor, Tensor]:
    """∇_θ of KL(π_θ‖π_ref) and of KL(π_ref‖π_θ), by their definitions."""
    theta_V = theta_V.detach().clone().requires_grad_(True)
    logp_V, logq_V = torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0)
    (reverse_V,) = torch.autograd.grad((logp_V.exp() * (logp_V - logq_V)).sum(), theta_V, retain_graph=True)
    (forward_V,) = torch.autograd.grad((logq_V.exp() * (logq_V - logp_V)).sum(), theta_V)
    return reverse_V, forward_V


def _normal(sigma: float, above: float) -> tuple[Tensor, Tensor]:
    """Midpoints of log w ~ N(0, σ²) within ±12σ, and their weights; with `above` ≠ 0 only log w > above."""
    low = max(-12 * sigma, above) if above else -12 * sigma
    edges = torch.linspace(low, max(12 * sigma, low + 12 * sigma), 200_001, dtype=F64)
    middle = (edges[1:] + edges[:-1]) / 2
    density = torch.exp(-0.5 * (middle / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    return middle.unsqueeze(0), (density * (edges[1:] - edges[:-1])).unsqueeze(0)


def _slopes(clip: Clip, logw_NT: Tensor, advantage: float) -> Tensor:
    """∂gain/∂log π_θ of tokens with the given log w under one Â."""
    logp_NT = logw_NT.clone().requires_grad_(True)
    b = _tokens(logp_NT, advantage)
    gain_NT, _ = clip(knobs.ratio.token(Forward(logp_NT), b), Forward(logp_NT), b)
    return torch.autograd.grad(gain_NT.sum(), logp_NT)[0]


def _cell(clip: Clip, w: float, advantage: float) -> Cell:
    logp_NT = torch.full((1, 1), w, dtype=F64).log().requires_grad_(True)
    b = _tokens(logp_NT, advantage)
    gain_NT, _ = clip(knobs.ratio.token(Forward(logp_NT), b), Forward(logp_NT), b)
    (gradient_NT,) = torch.autograd.grad(gain_NT.sum(), logp_NT)
    return Cell(w, advantage, float(gain_NT.detach()), float(gradient_NT), w * advantage)


def _tokens(logp_NT: Tensor, advantage: float) -> Minibatch:
    """One response whose every token has log π_old = 0 and the given Â."""
    one = torch.ones(1, dtype=torch.int64)
    return Minibatch(
        mask_NT=torch.ones(logp_NT.shape, dtype=torch.bool),
        r_N=torch.zeros(1, dtype=F64),
        group_N=one,
        length_N=one * logp_NT.shape[1],
        cut_N=torch.zeros(1, dtype=torch.bool),
        limit=logp_NT.shape[1],
        old_NT=torch.zeros_like(logp_NT).detach(),
        advantage=torch.full((1, 1), advantage, dtype=F64),
    )


def _one_token_batch(r_N: Tensor, group_N: Tensor, old_NT: Tensor) -> Minibatch:
    """Responses of one token, which is also their only step; a critic that says 0."""
    rows, here_NT = len(r_N), torch.ones(len(r_N), 1, dtype=torch.bool)
    return Minibatch(
        mask_NT=here_NT,
        r_N=r_N,
        group_N=group_N,
        length_N=torch.ones(rows, dtype=torch.int64),
        cut_N=torch.zeros(rows, dtype=torch.bool),
        limit=1,
        old_NT=old_NT,
        ref_NT=old_NT,
        value_NT=torch.zeros(rows, 1, dtype=F64),
        step_end_NT=here_NT,
        step_r_NT=r_N.unsqueeze(1),
    )


def _one_token(advantage: Advantage, r_N: Tensor, group_N: Tensor) -> Tensor:
    made = advantage(_one_token_batch(r_N, group_N, torch.zeros(len(r_N), 1, dtype=F64)))
    return (made[0] if isinstance(made, tuple) else made).squeeze(1)
