"""Each equation once more, as slowly and plainly as possible: one token at a time, numbers instead of tensors.

Imports nothing of the package, so an error there cannot hide here. Only `logp` holds torch scalars (float64): autograd
differentiates the loops, `detach` stands where the paper writes sg[·]. Sources are those of the package's docstrings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

BOUND = 20.0  # of a log-ratio, before exp
Spec = dict[str, Any]  # {"name": "ppo", "eps_low": 0.2, …}


@dataclass
class Batch:
    """Lists of rows of tokens. `mask[i][t]`: token t of response i is in the loss."""

    logp: list[list[torch.Tensor]]  # scalars with gradient
    old: list[list[float]]
    sampler: list[list[float]]
    ref: list[list[float]]
    mask: list[list[bool]]
    r: list[float]
    group: list[int]
    cut: list[bool]
    limit: int

    def tokens(self, i: int) -> list[int]:
        return [t for t, inside in enumerate(self.mask[i]) if inside]


def bounded(x: Any) -> Any:
    """±20, with gradient only inside."""
    return BOUND if x > BOUND else -BOUND if x < -BOUND else x


def exp(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, torch.Tensor) else math.exp(x)


# ① ratio: log w of token t of response i


def own(x: Batch, i: int, t: int, value: float) -> Any:
    """sg[value] with the gradient of log π_θ(y_{i,t}); none beyond the bound."""
    if abs(value) >= BOUND:
        return bounded(value)
    return value + x.logp[i][t] - x.logp[i][t].detach()


def logw(name: str, x: Batch, i: int, t: int) -> Any:
    if name == "none":
        return own(x, i, t, 0.0)
    if name == "token":
        return bounded(x.logp[i][t] - x.old[i][t])
    if name == "prefix":
        return own(x, i, t, float(sum((x.logp[i][u] - x.old[i][u]).detach() for u in x.tokens(i) if u <= t)))
    mean = sum(x.logp[i][u] - x.old[i][u] for u in x.tokens(i)) / len(x.tokens(i))
    if name == "sequence":
        return bounded(mean)
    if name == "sequence_token":
        return own(x, i, t, float(mean.detach()))
    raise NotImplementedError(f"ratio {name}")


# ① correction: ρ of token t of response i


def correction(spec: Spec, x: Batch, i: int, t: int) -> float:
    if spec["name"] == "none":
        return 1.0
    each = [x.old[i][u] - x.sampler[i][u] for u in x.tokens(i)]
    level = {"token": x.old[i][t] - x.sampler[i][t], "sequence": sum(each), "geometric": sum(each) / len(each)}
    rho = math.exp(bounded(level[spec["level"]]))
    if spec["name"] == "truncate":
        return rho if rho < spec["w_max"] else spec["w_max"]
    if spec["name"] == "mask":
        return rho if spec["w_min"] <= rho <= spec["w_max"] else 0.0
    raise NotImplementedError(f"correction {spec['name']}")


# ② clip


def gain(spec: Spec, w: Any, a: float) -> Any:
    if spec["name"] == "none":
        return w * a
    if spec["name"] == "ppo":
        low, high = spec["eps_low"], spec["eps_high"]  # None: that side has no bound
        if a >= 0:  # min(w, clip(w))·a: only the upper side can bind
            return (1 + high) * a if high is not None and w > 1 + high else w * a
        return (1 - low) * a if low is not None and w < 1 - low else w * a
    raise NotImplementedError(f"clip {spec['name']}")


# ③ advantage, of the returns of one group


def advantages(spec: Spec, r: list[float]) -> list[float]:
    g = len(r)
    if all(v == r[0] for v in r):
        return [0.0] * g
    mean = sum(r) / g
    if spec["name"] == "group_center":
        return [v - mean for v in r]
    if spec["name"] == "leave_one_out":
        return [v - sum(o for j, o in enumerate(r) if j != i) / (g - 1) for i, v in enumerate(r)]
    if spec["name"] == "group_zscore":
        std = math.sqrt(sum((v - mean) ** 2 for v in r) / (g - spec["ddof"]))
        return [(v - mean) / (std + spec["eps"]) for v in r]
    raise NotImplementedError(f"advantage {spec['name']}")


# ⑤ KL(π_θ‖π_ref) of one token, β inside


def kl(spec: Spec, logp: Any, ref: float) -> Any:
    if spec["name"] == "none":
        return 0.0
    d = bounded(ref - logp)
    if spec["name"] == "k1":
        return -spec["beta"] * d
    if spec["name"] == "k2":
        return spec["beta"] * d * d / 2
    if spec["name"] == "k3":
        return spec["beta"] * (exp(d) - 1 - d)
    raise NotImplementedError(f"kl {spec['name']}")


# ⑥ which rows are trained on, and what becomes of truncated ones


def kept(name: str, x: Batch) -> list[int]:
    if name == "all":
        return list(range(len(x.r)))
    if name == "drop_zero_variance":
        return [i for i, g in enumerate(x.group) if len({r for r, h in zip(x.r, x.group, strict=True) if h == g}) > 1]
    raise NotImplementedError(f"sampling {name}")


def hidden(name: str, x: Batch, i: int) -> bool:
    if name == "keep":
        return False
    if name == "mask":
        return x.cut[i]
    raise NotImplementedError(f"overlong {name}")


# ④ the weight of a token; `rows` are the rows in the loss


def weight(spec: Spec, x: Batch, rows: list[int], i: int) -> float:
    live = [j for j in rows if x.tokens(j)]
    if spec["name"] == "sequence_mean" and spec["per"] == "row":
        return 1 / len(live) / len(x.tokens(i))
    if spec["name"] == "sequence_mean":
        mates = [j for j in live if x.group[j] == x.group[i]]
        return 1 / len({x.group[j] for j in live}) / len(mates) / len(x.tokens(i))
    if spec["name"] == "token_mean":
        return 1 / sum(len(x.tokens(j)) for j in live)
    if spec["name"] == "constant_length":
        return 1 / len(live) / x.limit
    if spec["name"] == "sequence_sum":
        return 1 / len(live)
    raise NotImplementedError(f"aggregation {spec['name']}")


# the whole of it


def loss(spec: dict[str, Spec], x: Batch) -> Any:
    """−J of one rollout, from rewards to the number that is differentiated. `spec` names a variant for every slot."""
    if spec["transform"]["name"] != "none" or spec["gate"]:
        raise NotImplementedError("a transform or a gate")
    rows = kept(spec["sampling"]["name"], x)
    charge = [sum(float(kl(spec["kl_in_reward"], x.old[i][t], x.ref[i][t])) for t in x.tokens(i)) for i in range(len(x.r))]
    a = {}
    for g in {x.group[i] for i in rows}:
        mates = [i for i in rows if x.group[i] == g]
        a.update(zip(mates, advantages(spec["advantage"], [x.r[i] - charge[i] for i in mates]), strict=True))

    mask = [[m and not hidden(spec["overlong"]["name"], x, i) for m in row] for i, row in enumerate(x.mask)]
    x = Batch(**{**vars(x), "mask": mask})
    total = torch.zeros((), dtype=torch.float64)
    for i in rows:
        for t in x.tokens(i):
            w = exp(logw(spec["ratio"]["name"], x, i, t))
            gained = correction(spec["correction"], x, i, t) * gain(spec["clip"], w, a[i])
            total = total - weight(spec["aggregation"], x, rows, i) * (gained - kl(spec["kl"], x.logp[i][t], x.ref[i][t]))
    return total


def value_and_gradient(spec: dict[str, Spec], x: Batch) -> tuple[float, list[list[float]]]:
    """The loss and ∂loss/∂logp, 0 where logp does not enter."""
    total = loss(spec, x)
    flat = [p for row in x.logp for p in row]
    if not total.requires_grad:  # nothing in the loss
        return float(total), [[0.0] * len(row) for row in x.logp]
    grads = iter(torch.autograd.grad(total, flat, allow_unused=True))
    return float(total.detach()), [[float(g) if (g := next(grads)) is not None else 0.0 for _ in row] for row in x.logp]
