r"""Engine mismatch without training: what a correction ρ does to the policy gradient when μ drew the tokens and π is trained.

Every number is a sum over all outcomes or a quadrature, in float64, through the package's own `correction` variants and `loss`.
Three worlds, each with its own dependence on the length L (σ is the standard deviation of a token's log ρ, the mismatch):

    noise      log ρ of each token iid N(−σ²/2, σ²), so E ρ = 1: the weights alone, no reward (CLAIMS A7, A12)
    decisions  L independent right/wrong tokens with one shared logit; the reward rises with their number: many small decisions
    chain      tokens until the first slip, at most L; the reward is the share that came before it: one slip ruins the rest
    tree       every history its own logits, the sampler's are those plus noise: mismatch that favours nothing (L ≤ 7)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_repro import knobs
from grpo_repro.objective import Objective, loss
from grpo_repro.types import ABSENT, Forward, Minibatch, Norm

Correction = Callable[[Minibatch], Tensor]
F64 = torch.float64
SPREAD, POINTS = 16.0, 8001  # of the quadrature: ρ² of a product leans to z = 2σ√L

# The usual parameters, under the names of the arms of experiments/ablations/engine_mismatch.yaml; the last is what has no bias.
PRODUCT = "product, no bound"
PER_TOKEN: dict[str, Correction] = {
    "TIS token": partial(knobs.correction.truncate, w_max=2.0, level="token"),
    "MIS token": partial(knobs.correction.mask, w_max=2.0, level="token"),
    "IcePop": partial(knobs.correction.mask, w_min=0.5, w_max=5.0, level="token"),
}
PER_RESPONSE: dict[str, Correction] = {
    "TIS sequence": partial(knobs.correction.truncate, w_max=2.0, level="sequence"),
    "MIS sequence": partial(knobs.correction.mask, w_max=2.0, level="sequence"),
    "TIS geometric": partial(knobs.correction.truncate, w_max=2.0, level="geometric"),
    "MIS geometric": partial(knobs.correction.mask, w_max=2.0, level="geometric"),
    PRODUCT: partial(knobs.correction.truncate, w_max=math.exp(20), level="sequence"),
}
METHODS: dict[str, Correction] = {"none": knobs.correction.none, **PER_TOKEN, **PER_RESPONSE}


@dataclass(frozen=True)
class Weights:
    """A correction's weights under `noise`, of responses drawn from μ."""

    mass: float  # E ρ, 1 if nothing was removed: the factor on the step
    ess: float  # (E ρ)²/E ρ², effective sample size a response
    dropped: float  # share of responses with ρ = 0


def weights(correction: Correction, sigma: float, length: int) -> Weights:
    """Weights a *response* of `length` tokens gets, levels sequence and geometric. A token's own weight is the case length = 1."""
    z_N = torch.linspace(-SPREAD, SPREAD, POINTS, dtype=F64)
    chance_N = torch.exp(-0.5 * z_N**2)
    chance_N /= chance_N.sum()
    mean_N1 = (-0.5 * sigma**2 + sigma / math.sqrt(length) * z_N).unsqueeze(1)  # of the row's log-ratios, which are all equal
    rho_N = correction(_batch(mean_N1.expand(-1, length), torch.zeros(1, dtype=F64)))[:, 0]
    mass = (chance_N * rho_N).sum()
    return Weights(float(mass), float(mass**2 / (chance_N * rho_N**2).sum()), float(chance_N[rho_N == 0].sum()))


def product_ess(sigma: float, length: int) -> float:
    """ESS of the product of L ratios without a bound, e^{−σ²L}: .398 at σ=.03 and 3.6e-5 at σ=.1 for L=1024.

    (CLAIMS A7 prints .43 and .008: 10⁷ samples of a weight whose variance they cannot see.)
    """
    return math.exp(-(sigma**2) * length)


@dataclass(frozen=True)
class World:
    """All responses that μ can draw. Shapes: N outcomes, T tokens, D parameters."""

    chance_N: Tensor  # under the sampler
    exact_N: Tensor  # under the trainer
    r_N: Tensor
    mask_NT: Tensor
    logp_NT: Tensor  # the trainer's, with gradient to `theta`
    sampler_NT: Tensor
    theta: Tensor
    score_NT: Tensor  # ∂ log π/∂θ of a token; where it is a vector, its length
    shared: bool  # one θ for all tokens: scores add up; else a token's parameters are its own: squares of scores do


@dataclass(frozen=True)
class Corrected:
    """The gradient of one response, Â = r − E_μ r (a large group's baseline), in units of the exact gradient ∇E_π r."""

    mean: Tensor  # [D], E over the sampler's responses
    exact: Tensor  # [D]
    variance: float  # E‖g − E g‖² of one response

    @property
    def bias(self) -> float:
        """‖mean − exact‖/‖exact‖"""
        return float((self.mean - self.exact).norm() / self.exact.norm())

    @property
    def cosine(self) -> float:
        return float((self.mean * self.exact).sum() / (self.mean.norm() * self.exact.norm()))

    def noise(self, responses: int) -> float:
        """Standard deviation of the mean of so many responses."""
        return math.sqrt(self.variance / responses) / float(self.exact.norm())

    def error(self, responses: int) -> float:
        """Root mean square error of the mean of so many responses: bias and noise."""
        return math.hypot(self.bias, self.noise(responses))


def corrected(world: World, correction: Correction) -> Corrected:
    """E and variance of the corrected policy gradient, on-policy but for the mismatch: π_old = π, one update, no clip."""
    mean, square = _gradient(world, world.chance_N, correction)
    exact, _ = _gradient(world, world.exact_N, knobs.correction.none)
    return Corrected(mean, exact, square - float((mean**2).sum()))


def decisions(sigma: float, length: int, p: float = 0.7, threshold: float = 0.5) -> World:
    """L tokens, each right with probability p under π and fewer under μ; P(r = 1) = Φ of the number of right ones, standardised.

    The sampler is worse everywhere, so errors add up coherently: its count of right tokens is σ√L standard deviations lower.
    """
    q = _shifted(p, sigma)
    right_K, mu_K, pi_K = torch.arange(length + 1, dtype=F64), _binomial(length, q), _binomial(length, p)
    seen_K = torch.stack([mu_K, pi_K, pi_K**2 / mu_K.clamp(min=1e-300)]).amax(0) > 1e-14  # of the rest not even ρ² sees anything
    right_K, mu_K, pi_K = right_K[seen_K], mu_K[seen_K], pi_K[seen_K]
    solved_K = torch.special.ndtr((right_K - p * length) / math.sqrt(p * (1 - p) * length) - threshold)
    share_N = torch.cat([solved_K, 1 - solved_K])  # a number of right tokens is two outcomes: the reward is 1, or 0
    r_N = torch.cat([torch.ones_like(solved_K), torch.zeros_like(solved_K)])
    right_NT = (torch.arange(length) < right_K.unsqueeze(1)).repeat(2, 1)
    return _coins(share_N * mu_K.repeat(2), share_N * pi_K.repeat(2), r_N, right_NT, torch.ones_like(right_NT), p, q)


def chain(gap: float, length: int, slip: float = 1e-3) -> World:
    """Tokens until the first slip, which has probability `slip` under π and `slip + gap` under μ; reward = share of L before it.

    `gap` is the total variation Δ between the two at every token. The case in which O(L²Δ), the bound on a token-level
    correction's bias (with a gradient of order L), is attained.
    """
    p, q = 1 - slip, 1 - slip - gap
    before_N = torch.arange(length + 1, dtype=F64)  # tokens before the slip; the last outcome has none
    chances = [torch.where(before_N < length, x**before_N * (1 - x), x**before_N) for x in (q, p)]
    place_T = torch.arange(length)
    right_NT, mask_NT = place_T < before_N.unsqueeze(1), place_T <= before_N.unsqueeze(1)
    return _coins(chances[0], chances[1], before_N / length, right_NT, mask_NT, p, q)


def tree(sigma: float, length: int, seed: int, answers: int = 3) -> World:
    """All V^L responses of a policy with logits for every history, drawn N(0, 1), as is the reward; μ's logits are σ·N(0, 1) off.

    σ here is that of a logit: a token's log ρ spreads a little less.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64)

    drawn_NT = torch.tensor(list(itertools.product(range(answers), repeat=length)))
    sizes = [answers**t for t in range(length)]
    theta_HV = normal(sum(sizes), answers).requires_grad_(True)
    mu_HV = theta_HV.detach() + sigma * normal(sum(sizes), answers)
    r_N = normal(len(drawn_NT))
    history_NT = torch.zeros_like(drawn_NT)
    for t in range(1, length):
        before_N = history_NT[:, t - 1] - sum(sizes[: t - 1])
        history_NT[:, t] = sum(sizes[:t]) + before_N * answers + drawn_NT[:, t - 1]
    logp_NT, sampler_NT = (torch.log_softmax(x, 1)[history_NT, drawn_NT] for x in (theta_HV, mu_HV))
    mask_NT = torch.ones_like(drawn_NT, dtype=torch.bool)
    chance_N, exact_N = sampler_NT.sum(1).exp(), logp_NT.detach().sum(1).exp()
    p_NTV = torch.softmax(theta_HV.detach(), 1)[history_NT]
    score_NT = (1 - 2 * logp_NT.detach().exp() + (p_NTV**2).sum(2)).sqrt()  # ‖onehot − π‖
    return World(chance_N, exact_N, r_N, mask_NT, logp_NT, sampler_NT, theta_HV, score_NT, shared=False)


def crossover(sigma: float, one: Correction, other: Correction, responses: int, longest: int = 4096) -> int | None:
    """The length from which `other` has the smaller error in `decisions`, by 2%, from `responses` responses; None if not up to `longest`.

    Doubling, then bisection to about 2%: below that length `one` is taken to be better throughout.
    """

    def better(length: int) -> bool:
        world = decisions(sigma, length)
        return corrected(world, other).error(responses) < 0.98 * corrected(world, one).error(responses)

    high = 2
    while not better(high):
        high *= 2
        if high > longest:
            return None
    low = high // 2
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if better(middle) else (middle, high)
    return high


def _gradient(world: World, chance_N: Tensor, correction: Correction) -> tuple[Tensor, float]:
    """E g [D] and E‖g‖² of one response's gradient, the package's `loss` differentiated by each token's log-prob."""
    advantage_N1 = (world.r_N - (chance_N * world.r_N).sum()).unsqueeze(1)
    logp_NT = world.logp_NT.detach().requires_grad_(True)
    b = _batch(world.logp_NT.detach(), world.sampler_NT, world.mask_NT, advantage_N1)
    objective = Objective(correction=correction, aggregation=knobs.aggregation.sequence_sum)
    total, _ = loss(objective, Forward(logp_NT), b, Norm.of(b))
    slope_NT = -torch.autograd.grad(total, logp_NT)[0] * len(chance_N)  # `sequence_sum` is a mean over rows
    (mean,) = torch.autograd.grad((chance_N.unsqueeze(1) * slope_NT * world.logp_NT).sum(), world.theta, retain_graph=True)
    score_NT = slope_NT * world.score_NT
    square_N = score_NT.sum(1) ** 2 if world.shared else (score_NT**2).sum(1)
    return mean.flatten(), float((chance_N * square_N).sum())


def _coins(chance_N: Tensor, exact_N: Tensor, r_N: Tensor, right_NT: Tensor, mask_NT: Tensor, p: float, q: float) -> World:
    """Tokens that are right or wrong, with probability p = sigmoid(θ) under π and q under μ."""
    theta = torch.logit(torch.tensor(p, dtype=F64)).requires_grad_(True)
    logp_NT = torch.where(right_NT, torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta))
    under_q = torch.tensor([math.log(q), math.log1p(-q)], dtype=F64)  # as floats, `where` would make float32 of them
    sampler_NT = torch.where(right_NT, under_q[0], under_q[1])
    score_NT = (right_NT.to(F64) - p) * mask_NT
    return World(chance_N, exact_N, r_N, mask_NT, logp_NT, sampler_NT, theta, score_NT, shared=True)


def _binomial(n: int, p: float) -> Tensor:
    k = torch.arange(n + 1, dtype=F64)
    ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return torch.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))


def _shifted(p: float, sigma: float) -> float:
    """q < p such that log ρ has standard deviation σ under μ: (log p/q − log (1−p)/(1−q))·√(q(1−q)) = σ, by bisection."""
    low, high = p / 1000, p
    for _ in range(100):
        q = (low + high) / 2
        spread = (math.log(p / q) - math.log1p(-p) + math.log1p(-q)) * math.sqrt(q * (1 - q))
        low, high = (q, high) if spread > sigma else (low, q)
    return (low + high) / 2


def _batch(old_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor | None = None, advantage_N1: Tensor = ABSENT) -> Minibatch:
    """Each row its own group; without a mask every token counts, and a sampler's log-prob broadcasts."""
    mask_NT = torch.ones(old_NT.shape, dtype=torch.bool) if mask_NT is None else mask_NT
    rows = len(old_NT)
    return Minibatch(
        mask_NT=mask_NT,
        r_N=torch.zeros(rows, dtype=F64),
        group_N=torch.arange(rows),
        length_N=mask_NT.sum(1),
        cut_N=torch.zeros(rows, dtype=torch.bool),
        limit=old_NT.shape[1],
        old_NT=old_NT,
        sampler_NT=sampler_NT.expand(old_NT.shape),
        advantage=advantage_N1,
    )
