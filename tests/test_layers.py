"""The faster layers: values and gradients of transformers' own, at the precision asked for, once and twice differentiated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grpo_repro import layers
from tests import models


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", ["llama", "llama_biased", "mistral", "qwen2", "qwen3"])
def test_a_swapped_model_is_the_same_model(name: str) -> None:
    """Logits and every gradient, against transformers' own modules."""
    own = models.random_model(name)
    swapped = layers.swap(copy.deepcopy(own), torch.float32)
    kinds = {type(m) for m in swapped.modules()}
    assert {layers.Linear, layers.RMSNorm} <= kinds
    assert nn.Linear not in kinds
    ids = torch.arange(24).view(2, 12) % models.V
    up = normal(2, 12, models.V, dtype=torch.float32)
    outs = []
    for model in (own, swapped):
        logits = model(ids).logits
        outs.append((logits, torch.autograd.grad((up * logits).sum(), list(model.parameters()))))
    (a, grads_a), (b, grads_b) = outs
    assert not torch.equal(a, torch.zeros_like(a))
    torch.testing.assert_close(b, a, atol=3e-5, rtol=1e-5)
    for p, q in zip(grads_a, grads_b, strict=True):
        torch.testing.assert_close(q, p, atol=2e-5 * float(p.abs().max()) + 1e-6, rtol=0)


def test_what_is_in_half_precision_or_of_another_class_is_left() -> None:
    model = models.random_model("llama", dtype=torch.bfloat16)
    layers.swap(model, torch.float32)
    assert not any(isinstance(m, layers.Linear | layers.RMSNorm) for m in model.modules())
    assert layers.compute_dtype(model) == torch.bfloat16

    class Wrapped(nn.Linear): ...

    other = models.random_model("llama")
    other.model.layers[0].mlp.up_proj.__class__ = Wrapped
    layers.swap(other, torch.bfloat16)
    assert type(other.model.layers[0].mlp.up_proj) is Wrapped
    assert layers.compute_dtype(other) == torch.bfloat16
    layers.swap(other, torch.float32)  # again, with another precision
    assert layers.compute_dtype(other) == torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_product_is_differentiable_twice(bias: bool) -> None:
    x, w = normal(2, 3, 5).requires_grad_(), normal(4, 5, seed=1).requires_grad_()
    b = normal(4, seed=2).requires_grad_() if bias else None
    assert torch.autograd.gradcheck(layers._Product.apply, (x, w, b))
    assert torch.autograd.gradgradcheck(layers._Product.apply, (x, w, b))


def test_norm_is_differentiable_twice() -> None:
    x, w = normal(2, 3, 5).requires_grad_(), normal(5, seed=1).requires_grad_()
    of = lambda x, w: layers._RMSNorm.apply(x, w, 1e-5)  # noqa: E731
    torch.testing.assert_close(of(x, w), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w)
    assert torch.autograd.gradcheck(of, (x, w))
    assert torch.autograd.gradgradcheck(of, (x, w))


@pytest.mark.parametrize(("rows", "n", "m"), [(1, 7, 3), (33, 64, 192), (16, 576, 50)])
def test_fp32_products_are_fp32(rows: int, n: int, m: int) -> None:
    """Through oneDNN: the error of fp32 sums, not of rounded operands; transposed operands too."""
    x, w, b = normal(rows, n), normal(m, n, seed=1), normal(m, seed=2)
    bound = 1e-6 * n
    torch.testing.assert_close(layers.product(x.float(), w.float(), b.float()).double(), x @ w.t() + b, atol=bound, rtol=0)
    torch.testing.assert_close(layers.matmul(x.float(), w.float().t()).double(), x @ w.t(), atol=bound, rtol=0)
    torch.testing.assert_close(layers.matmul(x.float().t(), x.float()).double(), x.t() @ x, atol=bound + 1e-6 * rows, rtol=0)


def test_rounded_products_round_the_operands_and_nothing_else() -> None:
    """Value and gradients against fp64 products of bf16-rounded operands; what is left is one rounding of the result to bf16."""
    low = lambda z: z.bfloat16().double()  # noqa: E731
    x, w, b, g = normal(20, 64), normal(48, 64, seed=1), normal(48, seed=2), normal(20, 48, seed=3)
    args = [z.float().requires_grad_() for z in (x, w, b)]
    y = layers._RoundedProduct.apply(*args, torch.bfloat16)
    assert y.dtype == torch.float32
    dx, dw, db = torch.autograd.grad(y, args, g.float())
    for got, expected in (
        (y, low(x) @ low(w).t() + b),
        (dx, low(g) @ low(w)),
        (dw, low(g).t() @ low(x)),
        (db, g.sum(0)),
    ):
        torch.testing.assert_close(got.double(), expected, atol=2**-8 * float(expected.abs().max()), rtol=0)
    rounded = (y.double() - (x @ w.t() + b)).abs().max()
    assert rounded > 1e-3  # the operands were rounded
    assert dw.dtype == torch.float32


def test_rounded_products_refuse_a_second_derivative() -> None:
    x, w = normal(3, 4).float().requires_grad_(), normal(2, 4, seed=1).float().requires_grad_()
    (dx,) = torch.autograd.grad(layers._RoundedProduct.apply(x, w, None, torch.bfloat16).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 16])
def test_packed_layers_give_the_same_products(dtype: torch.dtype, bias: bool, rows: int) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [nn.Linear(64, m, bias=bias, dtype=wide) for m in (48, 16)]
    x = normal(5, rows, 64, seed=2, dtype=wide)
    both = layers.Packed(parts, dtype, rows)
    got = both(x)
    assert got.dtype == wide
    assert got.shape == (5, rows, 64)
    expected = torch.cat([F.linear(x.to(dtype), p.weight.to(dtype)).to(wide) + (p.bias if bias else 0.0) for p in parts], -1)
    torch.testing.assert_close(got, expected, atol=1e-5 if dtype != torch.bfloat16 else 0.02, rtol=0)
    assert both(x, torch.bfloat16).dtype == torch.bfloat16


def test_the_bf16_mlp_is_the_mlp() -> None:
    """Value and gradients against fp64, within the rounding of bf16; other models and biased layers take the plain way."""
    own = models.random_model("llama").model.layers[0].mlp
    swapped = layers.swap(models.random_model("llama"), torch.bfloat16).model.layers[0].mlp
    assert type(swapped) is layers.GatedMLP
    x, up = normal(2, 9, 32, dtype=torch.float32), normal(2, 9, 32, seed=1, dtype=torch.float32)
    results = []
    for mlp, dtype in ((own.double(), torch.float64), (swapped, torch.float32)):
        inputs = [x.to(dtype).requires_grad_(), *mlp.parameters()]
        y = mlp(inputs[0])
        results.append([y, *torch.autograd.grad((up.to(dtype) * y).sum(), inputs)])
    for exact, rounded in zip(*results, strict=True):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded.double(), exact, atol=0.02 * float(exact.detach().abs().max()), rtol=0)
    assert not torch.equal(results[0][0].float(), results[1][0])
    biased = layers.swap(models.random_model("llama_biased"), torch.bfloat16).model.layers[0].mlp
    expected = models.random_model("llama_biased").model.layers[0].mlp(x).detach()
    torch.testing.assert_close(biased(x).detach(), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


def test_bf16_compute_follows_fp32_and_trains_fp32_weights() -> None:
    """The loss of a swapped model in bf16 is near the fp32 one, its gradients point the same way, its weights stay fp32."""
    model = models.random_model("llama")
    ids = torch.arange(36).view(3, 12) % models.V
    grads = []
    for compute in (torch.float32, torch.bfloat16):
        layers.swap(model, compute)
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert not torch.equal(*grads)
    assert torch.cosine_similarity(*grads, dim=0) > 0.99
    assert {p.dtype for p in model.parameters()} == {torch.float32}
