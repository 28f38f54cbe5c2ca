"""Ratios with their intervals, and whether two sides did equal work. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2}  # relative, of gradient norm and entropy on the same rollout
LEVEL = 0.95


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0, resamples: int = 10_000) -> dict[str, float]:
    """median(theirs) / median(ours) with a percentile bootstrap interval over the interleaved pairs (resampled together).

    With one pair the interval is the point itself.
    """
    a_N, b_N = np.asarray(ours, float), np.asarray(theirs, float)
    if len(a_N) != len(b_N) or not len(a_N) or not (a_N > 0).all() or not (b_N > 0).all():
        raise ValueError(f"a ratio needs as many seconds on both sides, all positive, not {list(ours)} and {list(theirs)}")
    index_RN = np.random.default_rng(seed).integers(len(a_N), size=(resamples, len(a_N)))
    ratio_R = np.median(b_N[index_RN], 1) / np.median(a_N[index_RN], 1)
    low, high = np.quantile(ratio_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"ratio": float(np.median(b_N) / np.median(a_N)), "low": float(low), "high": float(high), "pairs": len(a_N)}


def unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any], precision: str) -> list[str]:
    """Why two sides' work was not equal: counts a step exactly, and on the same rollout loss, gradient norm, entropy and reward.

    Each side is {"steps": [{"generated", "trained", "updates"}], "probe": {"loss", "gradient_norm", "entropy", "reward"}}.
    The loss is near 0 (Â has mean 0), so it is compared against the size of its terms, 1; entropy only where both have it.
    """
    wrong = []
    for name in ("generated", "trained", "updates"):
        counts = [sorted({step[name] for step in side["steps"]}) for side in (ours, theirs)]
        if counts[0] != counts[1] or len(counts[0]) != 1:
            wrong.append(f"{name} a step: {counts[0]} and {counts[1]}")
    a, b, bar = ours["probe"], theirs["probe"], TOLERANCE[precision]
    for name in ("gradient_norm", "entropy", "reward"):
        if name in a and name in b and not abs(a[name] - b[name]) <= bar * abs(b[name]):
            wrong.append(f"{name} on the same rollout: {a[name]:.6g} and {b[name]:.6g}")
    if not abs(a["loss"] - b["loss"]) <= bar:
        wrong.append(f"loss on the same rollout: {a['loss']:.3g} and {b['loss']:.3g}")
    return wrong


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent b of y ∝ xᵇ: least squares in logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def floor(shape: Mapping[str, float], gflops: float, gb_s: float, weight_bytes: int) -> dict[str, float]:
    """Seconds below which a step cannot be on a machine of these rates, by phase: {"sample", "update", "optimiser"}.

    Products: 2 · (d(2d + 2kv) + 3·d·ffn) · layers a token, 2·d·V a token that is predicted; backward twice the forward; attention
    not counted, and a prompt once for its whole group. Sampling: prompts once, then at every token either all weights are read once, or
    the products take longer.
    AdamW in fp32 reads parameter, gradient and two moments and writes all but the gradient: 28 bytes a parameter.
    """
    d, body = shape["d"], shape["layers"] * (shape["d"] * (2 * shape["d"] + 2 * shape["kv"]) + 3 * shape["d"] * shape["ffn"])
    head = d * shape["vocabulary"]
    rows, tokens = shape["rows"], shape["tokens"]
    rate, bandwidth = gflops * 1e9, gb_s * 1e9
    token = max((body + head) * weight_bytes / bandwidth, 2 * rows * (body + head) / rate)
    packed = shape["prompts"] * shape["prompt_tokens"] + rows * tokens
    forward = 2 * (packed * body + rows * tokens * head) / rate
    return {
        "sample": 2 * shape["prompts"] * shape["prompt_tokens"] * body / rate + tokens * token,
        "update": 3 * forward,
        "optimiser": 28 * (body + head) / bandwidth,
    }
