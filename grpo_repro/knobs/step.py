"""The optimiser step of one minibatch.

    step(surrogate, divergence, parameters, optimizer) -> metrics

The parameters hold the gradient of −J, clipped. surrogate() evaluates −J again, without gradient; divergence() yields parts, one a
micro-batch, that add up to the exact KL(π_old‖π_θ), a mean over the minibatch's tokens, differentiable twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from grpo_repro.types import Positive, variant

Surrogate = Callable[[], float]
Divergence = Callable[[], Iterator[Tensor]]
Count = Annotated[int, Field(ge=1)]


def gradient(
    surrogate: Surrogate, divergence: Divergence, parameters: Sequence[Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    r"""One step of the optimiser along the gradient.

    $$\theta\leftarrow\theta-\eta\,\mathrm{Adam}(\nabla(-J))$$

    Source: every paper of the family. Fixes: nothing. Costs: the distance that a step moves the policy is whatever it is.
    """
    optimizer.step()
    return {}


@variant(needs=("full_logits",), natural=True)
def trpo(
    surrogate: Surrogate,
    divergence: Divergence,
    parameters: Sequence[Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    max_kl: Positive = 0.01,
    damping: Positive = 0.1,
    cg_iterations: Count = 10,
    backtracks: Count = 10,
) -> dict[str, float]:
    r"""A natural-gradient step of exactly the size that the trust region allows, on small models.

    $$\theta\leftarrow\theta+\alpha\sqrt{\frac{2\delta}{x^\top F x}}\;x,\quad x\approx F^{-1}\nabla J,\quad \mathrm{KL}\le\delta$$

    x by conjugate gradient on Fisher-vector products (the Hessian of the exact KL at π_old, damped); α = 1, ½, ¼ … until −J falls and
    the exact KL is within δ, else the parameters stay. Goes with clip none.
    Source: TRPO (1502.05477), Appendix C. Fixes: the size of an update is set where it matters. Costs: about twenty backward passes a step,
    double backward (so math attention and a small vocabulary).
    """
    g = -_flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
    before = surrogate()

    def fisher(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for part in divergence():
            first = torch.autograd.grad(part, parameters, create_graph=True, allow_unused=True)
            product = sum(
                ((d * piece).sum() for d, piece in zip(first, _unflat(v, parameters), strict=True) if d is not None),
                torch.zeros(()),
            )
            second = torch.autograd.grad(product, parameters, allow_unused=True)
            total += _flat([h if h is not None else torch.zeros_like(p) for h, p in zip(second, parameters, strict=True)])
        return total + damping * v

    x = _conjugate_gradient(fisher, g, cg_iterations)
    curvature = float(x @ fisher(x))
    if curvature <= 0 or not torch.isfinite(x).all():
        return {"trpo/accepted": 0.0, "trpo/kl": 0.0}
    full = (2 * max_kl / curvature) ** 0.5 * x
    start = _flat([p.detach().clone() for p in parameters])
    for halvings in range(backtracks):
        _assign(parameters, start + 0.5**halvings * full)
        with torch.no_grad():
            kl = sum(float(part.detach()) for part in divergence())
        if kl <= max_kl and surrogate() < before:
            return {"trpo/accepted": 1.0, "trpo/kl": kl, "trpo/halvings": float(halvings)}
    _assign(parameters, start)
    return {"trpo/accepted": 0.0, "trpo/kl": 0.0, "trpo/halvings": float(backtracks)}


def _conjugate_gradient(product: Callable[[Tensor], Tensor], g: Tensor, iterations: int) -> Tensor:
    """x with F x ≈ g, for a symmetric positive F given by its products. Stops early at a residual of 1e-10."""
    x, residual = torch.zeros_like(g), g.clone()
    direction, size = residual.clone(), residual @ residual
    for _ in range(iterations):
        if float(size) < 1e-10:
            break
        image = product(direction)
        alpha = size / (direction @ image)
        x += alpha * direction
        residual -= alpha * image
        direction = residual + (residual @ residual) / size * direction
        size = residual @ residual
    return x


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _unflat(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [piece.view_as(p) for piece, p in zip(v.split([p.numel() for p in like]), like, strict=True)]


def _assign(parameters: Sequence[Parameter], values: Tensor) -> None:
    with torch.no_grad():
        for p, value in zip(parameters, _unflat(values, parameters), strict=True):
            p.copy_(value)
