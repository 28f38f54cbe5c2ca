"""Random numbers that are indexed, not drawn: u(seed, stream, step, prompt, sample, token).

A number depends on nothing but its index, so two arms of an ablation see the same chance at the same place whatever was dropped,
batched or sampled before, and a resumed run needs no generator state. The hash chains SplitMix64's finaliser over the index.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a number is for. Two purposes never share a stream.
TOKENS, REWARD, DATA, SAMPLING, NOISE, ORDER = range(6)

BLOCK = 128  # tokens whose probabilities are summed first, over a large vocabulary
UNDER_ONE = 1.0 - 2.0**-53

GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

Index = int | Tensor


def uniform(seed: Index, stream: Index, step: Index, prompt: Index, sample: Index, token: Index) -> Tensor:
    """Uniform numbers in [0, 1), float64, a multiple of 2^-53; the indices are ints or int64 tensors and broadcast.

    Source: Steele, Lea and Flood 2014 (SplitMix64), absorbing one index a round: h ← mix((h ⊕ index) + γ).
    Equal on CPU and CUDA, as it is integer arithmetic.
    """
    h = _int64(0)
    for index in (seed, stream, step, prompt, sample, token):
        h = _mix((h ^ _int64(index)) + _signed(GAMMA))
    return _shift(h, 11).double() * 2.0**-53


def restrict(logits_NV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Logits with −inf outside the top k and outside the nucleus; top_p 1 and top_k 0 leave them as they are.

    The nucleus is the smallest set of most likely tokens whose probability (at the temperature, after top k) reaches top_p, at least one;
    tokens as likely as its last are in it too, so the set does not depend on the order of equals. What is left is renormalised by `draw`,
    and by the trainer over the same set: that is what makes the ratio 1 on-policy (TRL#6789).
    """
    if top_k > 0:
        kth_N1 = logits_NV.topk(min(top_k, logits_NV.shape[-1]), -1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
    if top_p < 1.0:
        p_NV = torch.softmax(logits_NV.double() / (temperature or 1.0), -1)
        sorted_NV = p_NV.sort(-1, descending=True).values
        before_NV = sorted_NV.cumsum(-1) - sorted_NV  # probability of the more likely tokens; 1e-9 below is round-off
        least_N1 = sorted_NV.masked_fill(before_NV >= top_p - 1e-9, torch.inf).amin(-1, keepdim=True)
        logits_NV = logits_NV.masked_fill(p_NV < least_N1, -torch.inf)
    return logits_NV


def draw(logits_NV: Tensor, u_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token a row by inverting the distribution function at u: token_N (int64), its log-prob_N and the entropy_N (float32).

    Both are of softmax(logits / temperature), in fp32 at least; the entropy, in nats, of the whole distribution. Temperature 0 is argmax,
    without a division; its numbers are recorded at temperature 1. A row with a NaN or +inf logit yields NaN, for the caller to refuse.
    """
    scaled_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if temperature not in (0.0, 1.0):
        scaled_NV = scaled_NV / temperature
    p_NV = torch.softmax(scaled_NV, -1)
    token_N = p_NV.argmax(-1) if temperature == 0.0 else _inverted(p_NV, u_N)
    total_N = scaled_NV.amax(-1) - p_NV.amax(-1).log()  # log Σ exp
    logp_N = scaled_NV.gather(-1, token_N[:, None])[:, 0] - total_N
    lowest = torch.finfo(scaled_NV.dtype).min  # a token outside a support has logit −inf, and 0·∞ is NaN
    entropy_N = total_N - torch.linalg.vecdot(p_NV, scaled_NV.clamp(min=lowest))
    return token_N, logp_N.float(), entropy_N.float()


def _inverted(p_NV: Tensor, u_N: Tensor) -> Tensor:
    """The first token at which the distribution function exceeds u: first the block of tokens, then the token, where they are many.

    Sums are in fp64: a fp32 sum loses every token rarer than 6e-8. u < 1, so u·sum < sum and the search ends at a token of
    positive probability.
    """
    if p_NV.shape[-1] <= BLOCK * BLOCK:
        return _search(p_NV, u_N[:, None])[0]
    blocks_NBC = torch.nn.functional.pad(p_NV, (0, -p_NV.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    mass_NB = blocks_NBC.sum(-1, dtype=torch.float64)
    block_N, before_N1, total_N1 = _search(mass_NB, u_N[:, None])
    row_N = torch.arange(len(p_NV), device=p_NV.device)
    inside_NC = blocks_NBC[row_N, block_N]
    share_N1 = (u_N[:, None] * total_N1 - before_N1) / inside_NC.sum(-1, keepdim=True, dtype=torch.float64)
    return block_N * BLOCK + _search(inside_NC, share_N1.clamp(0.0, UNDER_ONE))[0]


def _search(mass_NV: Tensor, u_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entry in which u·(sum of the row) falls, the sum before it [N, 1], and the sum of the row [N, 1]."""
    cdf_NV = mass_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    at_N1 = torch.searchsorted(cdf_NV, u_N1 * total_N1, right=True).clamp(max=mass_NV.shape[-1] - 1)  # clamp: NaN rows
    return at_N1[:, 0], cdf_NV.gather(-1, at_N1) - mass_NV.gather(-1, at_N1), total_N1


def _int64(index: Index) -> Tensor:
    return index if isinstance(index, Tensor) else torch.tensor(_signed(index & (2**64 - 1)))


def _signed(word: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def _shift(h: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _mix(h: Tensor) -> Tensor:
    for bits, factor in MIX:
        h = (h ^ _shift(h, bits)) * _signed(factor)
    return h ^ _shift(h, 31)
