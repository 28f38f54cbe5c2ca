"""The model's own linear layers and norms, computed faster: same parameters, same mathematics, on CPU and GPU.

`swap` changes the class of a loaded model's modules in place. On a GPU that is torch's own fused norm, and autocast for `compute:
bfloat16`. On a CPU (results/reports/benchmark has the figures):
  products   torch hands fp32 products to MKL, which uses half of the vector width on AMD; oneDNN uses all of it. With
             `compute: bfloat16` the operands are rounded to bf16, sums and everything between products stay in fp32, the
             master weights too.
  norms      the textbook RMSNorm is a dozen memory-bound operations with their backwards; this is four.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

FULL = (torch.float32, torch.float64)
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")  # down(silu(gate x) · up x)
NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")  # w · x / rms(x), nothing more


def swap(model: PreTrainedModel, compute: torch.dtype) -> PreTrainedModel:
    """Give every plain linear layer and RMSNorm of the model its faster class; `compute` is the dtype of the products' operands.

    Layers that are quantised, wrapped, or in half precision are left as they are: their own arithmetic is the one asked for.
    """
    for module in model.modules():
        if type(module) in (nn.Linear, Linear) and module.weight.dtype in FULL:
            module.__class__ = Linear
            module.compute = compute  # type: ignore[assignment]
        elif type(module).__name__ in NORMS and module.weight.dtype in FULL:
            module.__class__ = RMSNorm
        elif type(module).__name__ in GATED and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            module.__class__ = GatedMLP
    return model


def checkpointed(model: PreTrainedModel) -> PreTrainedModel:
    """Keep only each decoder layer's input for the backward pass and compute the rest again: less memory, a third more work."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # it checkpoints only when training; its own modules stay as they are, without dropout
    return model


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of the operands of the model's products."""
    head = model.get_output_embeddings()
    full = isinstance(head, Linear) and head.weight.dtype in FULL
    return head.compute if full else head.weight.dtype


def computing(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """What the model's forward passes run under: bf16 autocast on a GPU where its products are bf16 on fp32 weights."""
    dtype = compute_dtype(model)
    rounded = model.device.type != "cpu" and dtype != model.dtype
    return torch.autocast(model.device.type, dtype) if rounded else nullcontext()


def product(x: Tensor, w_ON: Tensor, b: Tensor | None = None) -> Tensor:
    """x wᵀ + b for x [..., N], in the operands' dtype: through oneDNN on CPU. Without gradient."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or not x.numel():
        return F.linear(x, w_ON, b)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), w_ON, b, "none", [], "")
    return y.view(*x.shape[:-1], len(w_ON))


class Packed:
    """A weight prepared for many products without gradient: cast once and, on CPU, laid out as oneDNN reads it."""

    def __init__(self, parts: Sequence[nn.Linear], dtype: torch.dtype, rows: int) -> None:
        """Of layers with one input, one after the other; `dtype` is that of the operands, `rows` the usual number of rows of x."""
        first, self.size, self.dtype = parts[0].weight, sum(p.out_features for p in parts), dtype
        w_ON, end = first.new_empty(self.size, parts[0].in_features, dtype=dtype), 0
        for p in parts:  # cast and joined in one pass
            w_ON[end : end + p.out_features] = p.weight.detach()
            end += p.out_features
        self.bias = None if parts[0].bias is None else torch.cat([p.bias.detach() for p in parts if p.bias is not None])
        self.onednn = w_ON.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(w_ON, rows) if self.onednn else w_ON

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x wᵀ + b, in `dtype` (default: that of x)."""
        low = x.reshape(-1, x.shape[-1]).to(self.dtype)
        if self.onednn:
            y = torch.ops.mkldnn._linear_pointwise(low, self.weight, None, "none", [], "")
        else:
            y = F.linear(low, self.weight)
        y = y.to(dtype or x.dtype)
        return (y if self.bias is None else y + self.bias.to(y.dtype)).view(*x.shape[:-1], self.size)


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a b, as `product` computes it. Without gradient."""
    return product(a_MK, b_KN.t()) if a_MK.dtype == torch.float32 else a_MK @ b_KN


class Linear(nn.Linear):
    compute: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return super().forward(x)
        if self.compute != torch.float32:
            return _RoundedProduct.apply(x, self.weight, self.bias, self.compute)
        return _Product.apply(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)
        return _RMSNorm.apply(x, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        parts = self.gate_proj, self.up_proj, self.down_proj
        rounded = all(isinstance(p, Linear) and p.compute == torch.bfloat16 and p.bias is None for p in parts)
        if rounded and x.dtype == torch.float32 and x.device.type == "cpu":
            return _RoundedMLP.apply(x, *(p.weight for p in parts))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Product(torch.autograd.Function):
    """x wᵀ + b in fp32. Its backward is made of itself, so it can be differentiated as often as one likes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_ON: Tensor, b_O: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w_ON)
        ctx.biased = b_O is not None
        return product(x, w_ON, b_O)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w_ON = ctx.saved_tensors
        want_x, want_w, want_b = ctx.needs_input_grad
        g_MO = g.reshape(-1, g.shape[-1])
        dx = _Product.apply(g, w_ON.t(), None) if want_x else None
        dw = _Product.apply(g_MO.t(), x.reshape(-1, x.shape[-1]).t(), None) if want_w else None
        return dx, dw, g_MO.sum(0) if want_b else None


class _RoundedProduct(torch.autograd.Function):
    """x wᵀ + b with operands rounded to `dtype`, sums and result in fp32; the rounded x is what is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_ON: Tensor, b_O: Tensor | None, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        low_MN = x.reshape(-1, x.shape[-1]).to(dtype)
        ctx.save_for_backward(low_MN, w_ON)
        ctx.shape = x.shape
        y = product(low_MN, w_ON.to(dtype)).float()
        return (y if b_O is None else y.add_(b_O)).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        low_MN, w_ON = ctx.saved_tensors
        want_x, want_w, want_b, _ = ctx.needs_input_grad
        g_MO = g.reshape(-1, g.shape[-1])
        low_MO = g_MO.to(low_MN.dtype)
        dx = matmul(low_MO, w_ON.to(low_MN.dtype)).float().view(ctx.shape) if want_x else None
        dw = matmul(low_MO.t(), low_MN).float() if want_w else None
        return dx, dw, g_MO.sum(0) if want_b else None, None


class _RoundedMLP(torch.autograd.Function):
    """(silu(x gᵀ) · x uᵀ) dᵀ in bf16 from the first product to the last: half the memory, and nothing is cast in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g_FN: Tensor, u_FN: Tensor, d_NF: Tensor) -> Tensor:  # type: ignore[override]
        low_MN = x.reshape(-1, x.shape[-1]).bfloat16()
        gate_MF, up_MF = product(low_MN, g_FN.bfloat16()), product(low_MN, u_FN.bfloat16())
        ctx.save_for_backward(low_MN, gate_MF, up_MF, g_FN, u_FN, d_NF)
        return product(F.silu(gate_MF).mul_(up_MF), d_NF.bfloat16()).float().view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        low_MN, gate_MF, up_MF, g_FN, u_FN, d_NF = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.shape[-1]).bfloat16()
        open_MF, back_MF = F.silu(gate_MF), matmul(grad_MN, d_NF.bfloat16())
        dd_NF = matmul(grad_MN.t(), open_MF * up_MF).float()
        up_back_MF = open_MF.mul_(back_MF)
        gate_back_MF = torch.ops.aten.silu_backward(back_MF.mul_(up_MF), gate_MF)
        dx = matmul(gate_back_MF, g_FN.bfloat16()).float().add_(matmul(up_back_MF, u_FN.bfloat16())).view(grad.shape)
        return dx, matmul(gate_back_MF.t(), low_MN).float(), matmul(up_back_MF.t(), low_MN).float(), dd_NF


class _RMSNorm(torch.autograd.Function):
    """w · x / √(mean x² + ε). The backward pass starts from the inputs, so that it can itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_D: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w_D)
        ctx.eps = eps
        return (x * _inverse_rms(x, eps)).mul_(w_D)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w_D = ctx.saved_tensors
        r = _inverse_rms(x, ctx.eps)
        n, gw = x * r, g * w_D
        dw = (g * n).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        along = torch.linalg.vecdot(gw, n)[..., None] / x.shape[-1]
        return torch.addcmul(gw, n, along, value=-1) * r, dw, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(torch.linalg.vecdot(x, x)[..., None] / x.shape[-1] + eps)
