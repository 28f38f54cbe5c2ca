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
    length: list[int]
    limit: int
    exact: list[list[float]]  # KL(π_θ‖π_ref) over the vocabulary
    value: list[list[float]]  # a critic's
    step_end: list[list[bool]]
    step_r: list[list[float]]
    prompt_weight: list[float]

    def tokens(self, i: int) -> list[int]:
        return [t for t, inside in enumerate(self.mask[i]) if inside]


def bounded(x: Any) -> Any:
    """±20, with gradient only inside."""
    return BOUND if x > BOUND else -BOUND if x < -BOUND else x


def exp(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, torch.Tensor) else math.exp(x)


def number(x: Any) -> float:
    """sg[x]"""
    return float(x.detach()) if isinstance(x, torch.Tensor) else float(x)


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


# ② clip and gates, of a token's log w and Â


def gain(spec: Spec, logw: Any, a: float, logp: Any, row: list[tuple[Any, float]]) -> Any:
    """`row`: log w and Â of every token of the response."""
    name, w = spec["name"], exp(logw)
    if name == "gmpo":  # token by token: min(w^s, clip(w)^s)^s, which bounds one side only
        high, low = spec["eps_high"], -spec["eps_low"]
        bounded = [(x if x < high else high) if s > 0 else (x if x > low else low) for x, s in row]
        return exp(sum(bounded) / len(bounded)) * a
    if name == "none":
        return w * a
    if name == "ppo":
        low, high = spec["eps_low"], spec["eps_high"]  # None: that side has no bound
        if a >= 0:  # min(w, clip(w))·a: only the upper side can bind
            return (1 + high) * a if high is not None and w > 1 + high else w * a
        return (1 - low) * a if low is not None and w < 1 - low else w * a
    if name == "dual":
        return spec["w_max"] * a if a < 0 and w > spec["w_max"] else gain({**spec, "name": "ppo"}, logw, a, logp, row)
    if name == "truncate":
        return min(max(number(w), spec["w_min"]), spec["w_max"]) * a * logp
    if name == "soft_sigmoid":
        tau = spec["tau_pos"] if a > 0 else spec["tau_neg"]
        return 4 / tau / (1 + exp(-tau * (w - 1))) * a
    if name == "soft_tanh":
        tanh = 1 - 2 / (exp(2 * spec["tau"] * logw) + 1)
        return (1 + tanh / spec["tau"]) * a
    if name == "kl_penalty":
        return w * a - spec.get("state", {}).get("beta", spec["beta"]) * (w - 1 - logw)
    raise NotImplementedError(f"clip {name}")


def passes(spec: Spec, x: Batch, i: int, t: int, a: float) -> bool:
    name = spec["name"]
    if name == "off_policy":
        gone = sum(x.old[i][u] - number(x.logp[i][u]) for u in x.tokens(i)) / len(x.tokens(i))
        return not (a < 0 and gone > spec["delta"])
    p, q = math.exp(x.sampler[i][t]), math.exp(number(x.logp[i][t]))
    if name == "dppo_tv":
        return not (a > 0 and q - p > spec["eps_high"]) and not (a < 0 and p - q > spec["eps_low"])
    if name == "dppo_kl":
        far = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        return not (far > spec["eps"] and ((a > 0 and q > p) or (a < 0 and q < p)))
    raise NotImplementedError(f"gate {name}")


# ③ transforms and advantages: a number for every token of every row


def transformed(spec: Spec, r: dict[int, float], group: list[int]) -> dict[int, float]:
    if spec["name"] == "none":
        return r
    if spec["name"] == "sigmoid":
        return {i: 1 / (1 + math.exp(-(v - spec["center"]) / spec["scale"])) for i, v in r.items()}
    if spec["name"] == "rank":
        out = {}
        for i, v in r.items():
            others = [r[j] for j in r if group[j] == group[i] and j != i]
            points = sum(1.0 if o < v else 0.5 if o == v else 0.0 for o in others)
            out[i] = points / len(others) if others else 0.5
        return out
    raise NotImplementedError(f"transform {spec['name']}")


def spread(values: list[float], ddof: int) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - ddof, 1))


def whitened(values: list[float], ddof: int, eps: float) -> list[float]:
    if all(v == values[0] for v in values):
        return [0.0] * len(values)
    mean, std = sum(values) / len(values), spread(values, ddof)
    return [(v - mean) / (std + eps) for v in values]


def group_advantages(spec: Spec, r: list[float], raw: list[float], batch: list[float]) -> list[float]:
    """Of one group, from its returns `r`; `raw` are the rewards without a KL, `batch` the returns of the whole rollout."""
    name, g = spec["name"], len(r)
    if name == "pass_at_k":
        k = spec["k"]
        right = [v == max(raw) and v > 0 for v in raw]
        wrong = right.count(False)
        if k > g:
            return [0.0] * g
        fail = math.comb(wrong, k) / math.comb(g, k)
        sigma = math.sqrt(fail * (1 - fail))
        if sigma == 0:
            return [0.0] * g
        low = fail - math.comb(wrong - 1, k - 1) / math.comb(g - 1, k - 1) if wrong else 0.0
        return [(fail if good else low) / sigma for good in right]
    if all(v == r[0] for v in r):
        return [0.0] * g
    mean = sum(r) / g
    if name == "group_center":
        return [v - mean for v in r]
    if name == "leave_one_out":
        return [v - sum(o for j, o in enumerate(r) if j != i) / (g - 1) for i, v in enumerate(r)]
    if name == "group_zscore":
        return whitened(r, spec["ddof"], spec["eps"])
    if name == "batch_std":
        return [(v - mean) / (spread(batch, spec["ddof"]) + spec["eps"]) for v in r]
    if name == "max_rl":
        return [(v - mean) / (mean + spec["eps"]) for v in r]
    raise NotImplementedError(f"advantage {name}")


def critic(spec: Spec, x: Batch, i: int, r: float, charge: list[float]) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l} of each token in the loss, as a double sum."""
    tokens = x.tokens(i)
    v = [x.value[i][t] for t in tokens] + [0.0]
    paid = [-charge[t] for t in tokens]
    if tokens:
        paid[-1] += r
    delta = [paid[n] + spec["gamma"] * v[n + 1] - v[n] for n in range(len(tokens))]
    discount = spec["gamma"] * spec["lam"]
    return [sum(discount ** (m - n) * delta[m] for m in range(n, len(tokens))) for n in range(len(tokens))]


def advantages(spec: Spec, x: Batch, r: dict[int, float], charge: list[list[float]]) -> dict[tuple[int, int], float]:
    """Â of every token in the loss; r: the kept rows' rewards; charge[i][t]: β·KL charged to the reward at a token."""
    name, at = spec["name"], [(i, t) for i in r for t in x.tokens(i)]
    returns = {i: v - sum(charge[i]) for i, v in r.items()}
    if name == "batch_zscore":
        raw = [r[i] - sum(charge[i][t:]) for i, t in at]
        return dict(zip(at, whitened(raw, spec["ddof"], spec["eps"]), strict=True))
    if name == "running_zscore":
        if state := spec.get("state"):
            std = math.sqrt(max(state["square"] - state["mean"] ** 2, 0.0))
            row = {i: (v - state["mean"]) / (std + spec["eps"]) for i, v in returns.items()}
        else:
            row = dict(zip(returns, whitened(list(returns.values()), 0, spec["eps"]), strict=True)) if returns else {}
        return {(i, t): row[i] for i, t in at}
    if name == "gae":
        flat = [a for i in r for a in critic(spec, x, i, r[i], charge[i])]
        return dict(zip(at, whitened(flat, 1, 1e-8) if spec["whiten"] else flat, strict=True))
    if name == "process_reward":
        out = {}
        for i, t in at:
            ends = [(j, u) for j in r if x.group[j] == x.group[i] for u in x.tokens(j) if x.step_end[j][u]]
            scores = whitened([x.step_r[j][u] for j, u in ends], spec["ddof"], spec["eps"])
            out[i, t] = sum(s for (j, u), s in zip(ends, scores, strict=True) if j == i and u >= t)
        return out
    row = {}
    for g in {x.group[i] for i in r}:
        mates = [i for i in r if x.group[i] == g]
        made = group_advantages(spec, [returns[i] for i in mates], [r[i] for i in mates], list(returns.values()))
        row.update(zip(mates, made, strict=True))
    return {(i, t): row[i] for i, t in at}


# ⑤ KL(π_θ‖π_ref) of one token, β inside


def kl(spec: Spec, logp: Any, old: float, ref: float, exact: float) -> Any:
    name, d = spec["name"], bounded(ref - logp)
    if name == "none":
        return 0.0
    if name == "k1":
        return -spec["beta"] * d
    if name == "k2":
        return spec["beta"] * d * d / 2
    if name == "k3":
        return spec["beta"] * (exp(d) - 1 - d)
    if name == "k3_unbiased":
        return spec["beta"] * exp(bounded(logp - old)) * (exp(d) - 1 - d)
    if name == "full":
        return spec["beta"] * exact
    if name == "forward":
        return spec["beta"] * math.exp(number(d)) * d
    raise NotImplementedError(f"kl {name}")


# ⑥ which rows are trained on, and what becomes of truncated ones


def kept(name: str, x: Batch) -> list[int]:
    if name == "all":
        return list(range(len(x.r)))
    if name in ("drop_zero_variance", "dynamic"):  # what is redrawn is the loop's
        return [i for i, g in enumerate(x.group) if len({r for r, h in zip(x.r, x.group, strict=True) if h == g}) > 1]
    raise NotImplementedError(f"sampling {name}")


def overlong(spec: Spec, x: Batch, i: int) -> tuple[float, bool]:
    """The row's reward, and whether it is hidden from the loss."""
    if spec["name"] == "keep":
        return x.r[i], False
    if spec["name"] == "mask":
        return x.r[i], x.cut[i]
    if spec["name"] == "soft_penalty":
        cache = spec["cache"] or max(x.limit // 5, 1)  # null: a fifth, as 4096 of 20480
        soft = x.limit - cache
        if x.cut[i] or x.length[i] > x.limit:
            return x.r[i] - 1, False
        return x.r[i] - (x.length[i] - soft) / cache if x.length[i] > soft else x.r[i], False
    raise NotImplementedError(f"overlong {spec['name']}")


# ④ the weight of a token; `rows` are the rows in the loss


def weight(spec: Spec, x: Batch, rows: list[int], i: int, a: dict[int, float]) -> float:
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
    if spec["name"] == "balanced":  # a[j]: the response's Â
        side = [j for j in live if a[j] * a[i] > 0]
        both = [j for j in live if a[j] != 0]
        return len(side) / len(both) / sum(len(x.tokens(j)) for j in side) if side else 0.0
    raise NotImplementedError(f"aggregation {spec['name']}")


# the whole of it


def loss(spec: dict[str, Any], x: Batch) -> Any:
    """−J of one rollout, from rewards to the number that is differentiated. `spec` names a variant for every slot."""

    def charged(i: int, t: int) -> float:
        return number(kl(spec["kl_in_reward"], x.old[i][t], x.old[i][t], x.ref[i][t], math.nan)) if x.mask[i][t] else 0.0

    rows = kept(spec["sampling"]["name"], x)
    charge = [[charged(i, t) for t in range(len(x.mask[i]))] for i in range(len(x.r))]
    late = {i: overlong(spec["overlong"], x, i) for i in rows}
    r = transformed(spec["transform"], {i: late[i][0] for i in rows}, x.group)
    mask = [[m and not (i in late and late[i][1]) for m in row] for i, row in enumerate(x.mask)]
    x = Batch(**{**vars(x), "mask": mask})
    a = advantages(spec["advantage"], x, r, charge)
    of_row = {i: a[i, x.tokens(i)[0]] for i in rows if x.tokens(i)}

    total = torch.zeros((), dtype=torch.float64)
    for i, t in a:
        row = [(logw(spec["ratio"]["name"], x, i, u), a[i, u]) for u in x.tokens(i)]
        mine = logw(spec["ratio"]["name"], x, i, t)
        gained = correction(spec["correction"], x, i, t) * gain(spec["clip"], mine, a[i, t], x.logp[i][t], row)
        open_ = all(passes(gate, x, i, t, a[i, t]) for gate in spec["gate"])
        paid = kl(spec["kl"], x.logp[i][t], x.old[i][t], x.ref[i][t], x.exact[i][t])
        share = weight(spec["aggregation"], x, rows, i, of_row) * x.prompt_weight[i]
        total = total - share * (gained * open_ - paid)
    return total


def value_and_gradient(spec: dict[str, Spec], x: Batch) -> tuple[float, list[list[float]]]:
    """The loss and ∂loss/∂logp, 0 where logp does not enter."""
    total = loss(spec, x)
    flat = [p for row in x.logp for p in row]
    if not total.requires_grad:  # nothing in the loss
        return float(total), [[0.0] * len(row) for row in x.logp]
    grads = iter(torch.autograd.grad(total, flat, allow_unused=True))
    return float(total.detach()), [[float(g) if (g := next(grads)) is not None else 0.0 for _ in row] for row in x.logp]
