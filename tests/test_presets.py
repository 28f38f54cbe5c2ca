"""Each preset against its paper: the equation once more, composed from the oracle's loops, and what distinguishes it from the others."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from batches import F64, PRESETS, from_rewards, plain, random_batch
from oracle import Batch, exp

from grpo_repro import presets, start, train
from grpo_repro.config import objective_spec, parse_run
from grpo_repro.objective import Objective, loss, score
from grpo_repro.types import Forward, Norm

Number = Any  # a float, or a scalar tensor with gradient


# What the equations are written in. `live`: responses with a token in the loss (random_batch has one without).


def live(x: Batch) -> list[int]:
    return [i for i in range(len(x.r)) if x.tokens(i)]


def w(x: Batch, i: int, t: int) -> Number:
    return exp(x.logp[i][t] - x.old[i][t])


def s(x: Batch, i: int) -> Number:
    """(Π_t w_{i,t})^{1/|y_i|}"""
    return math.prod(w(x, i, t) for t in x.tokens(i)) ** (1 / len(x.tokens(i)))


def clipped(ratio: Number, a: float, low: float, high: float) -> Number:
    """min(w Â, clip(w, 1 − ε_low, 1 + ε_high) Â)"""
    return torch.minimum(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)


def k3(x: Batch, i: int, t: int) -> Number:
    ratio = exp(x.ref[i][t] - x.logp[i][t])
    return ratio - torch.log(ratio) - 1


def group(x: Batch, i: int) -> list[float]:
    return [r for r, g in zip(x.r, x.group, strict=True) if g == x.group[i]]


def centred(x: Batch, i: int) -> float:
    return x.r[i] - sum(group(x, i)) / len(group(x, i))


def zscore(x: Batch, i: int) -> float:
    r = group(x, i)
    return 0.0 if min(r) == max(r) else centred(x, i) / (oracle.spread(r, 1) + 1e-4)


def sequence_mean(x: Batch, term: Callable[[int, int], Number]) -> Number:
    """1/N Σ_i 1/|y_i| Σ_t"""
    return sum(sum(term(i, t) for t in x.tokens(i)) / len(x.tokens(i)) for i in live(x)) / len(live(x))


def token_mean(x: Batch, term: Callable[[int, int], Number]) -> Number:
    """1/Σ|y_i| Σ_i Σ_t"""
    return sum(term(i, t) for i in live(x) for t in x.tokens(i)) / sum(len(x.tokens(i)) for i in live(x))


# J of each paper, to be maximised..


def grpo(x: Batch) -> Number:  # 2402.03300, Eq. 3
    return sequence_mean(x, lambda i, t: clipped(w(x, i, t), zscore(x, i), 0.2, 0.2) - 0.04 * k3(x, i, t))


def dr_grpo(x: Batch) -> Number:  # 2503.20783: neither 1/|y| nor std
    total = sum(clipped(w(x, i, t), centred(x, i), 0.2, 0.2) for i in live(x) for t in x.tokens(i))
    return total / x.limit / len(live(x))


def gspo(x: Batch) -> Number:  # 2507.18071
    return sum(clipped(s(x, i), zscore(x, i), 3e-4, 4e-4) for i in live(x)) / len(live(x))


def gspo_token(x: Batch) -> Number:  # 2507.18071: sg[s_i] · π_θ(y_t)/sg[π_θ(y_t)]
    def ratio(i: int, t: int) -> Number:
        return s(x, i).detach() * exp(x.logp[i][t]) / exp(x.logp[i][t]).detach()

    return sequence_mean(x, lambda i, t: clipped(ratio(i, t), zscore(x, i), 3e-4, 4e-4))


def dapo(x: Batch) -> Number:  # 2503.14476; L_cache/L_max = 4096/20480
    mixed = [i for i in range(len(x.r)) if min(group(x, i)) < max(group(x, i))]
    cache = x.limit * 4096 // 20480
    soft = [min(0.0, max(-1.0, (x.limit - cache - n) / cache)) for n in x.length]
    r = [v - 1 if cut else v + p for v, p, cut in zip(x.r, soft, x.cut, strict=True)]
    x = Batch(**{**vars(x), "r": r, "mask": [[m and i in mixed for m in row] for i, row in enumerate(x.mask)]})
    return token_mean(x, lambda i, t: clipped(w(x, i, t), zscore(x, i), 0.2, 0.28))


def cispo(x: Batch) -> Number:  # 2506.13585
    return token_mean(x, lambda i, t: min(float(torch.as_tensor(w(x, i, t)).detach()), 1.28) * zscore(x, i) * x.logp[i][t])


def rloo(x: Batch) -> Number:  # 2402.14740, Sec. 3: R − β log π/π_ref of the whole response, against the others' mean
    charged = [r - 0.03 * sum(x.old[i][t] - x.ref[i][t] for t in x.tokens(i)) for i, r in enumerate(x.r)]
    x = Batch(**{**vars(x), "r": charged})

    def others(i: int) -> float:
        return (sum(group(x, i)) - x.r[i]) / (len(group(x, i)) - 1) if len(group(x, i)) > 1 else x.r[i]

    j = sum((x.r[i] - others(i)) * sum(x.logp[i][t] for t in x.tokens(i)) for i in live(x)) / len(live(x))
    value = sum((x.r[i] - others(i)) * len(x.tokens(i)) for i in live(x)) / len(live(x))  # ours says w = 1 where this says log π
    return j - float(j) + value


def tis(x: Batch) -> Number:  # Yao et al. 2025: sg[min(π_old/μ, C)] on PPO's term
    def rho(i: int, t: int) -> float:
        return min(math.exp(x.old[i][t] - x.sampler[i][t]), 2.0)

    return sequence_mean(x, lambda i, t: rho(i, t) * clipped(w(x, i, t), zscore(x, i), 0.2, 0.2))


def dual_clip(x: Batch) -> Number:  # 1912.09729; the same as INTELLECT-2's min(min(w, δ)Â, clip(w)Â)
    def two_sided(i: int, t: int) -> Number:
        a, ratio = zscore(x, i), w(x, i, t)
        return (
            clipped(ratio, a, 0.2, 0.2)
            if a >= 0
            else torch.maximum(clipped(ratio, a, 0.2, 0.2), torch.tensor(3.0 * a, dtype=F64))
        )

    return sequence_mean(x, two_sided)


def sapo(x: Batch) -> Number:  # 2511.20347
    def gate(i: int, t: int) -> Number:
        tau = 1.0 if zscore(x, i) > 0 else 1.05
        return torch.sigmoid(tau * (w(x, i, t) - 1)) * 4 / tau

    return sequence_mean(x, lambda i, t: gate(i, t) * zscore(x, i))


def ppo_penalty(x: Batch) -> Number:  # 1707.06347, Sec. 4; KL(π_old‖π_θ) at tokens of π_old, β = 1
    return token_mean(x, lambda i, t: w(x, i, t) * zscore(x, i) - 1.0 * (w(x, i, t) - 1 - torch.log(w(x, i, t))))


def reinforce_pp(x: Batch) -> Number:  # 2501.03262: A = r − β Σ_{j≥t} k1, normalised over the batch's tokens
    at = [(i, t) for i in live(x) for t in x.tokens(i)]
    raw = {(i, t): x.r[i] - 0.01 * sum(x.old[i][j] - x.ref[i][j] for j in x.tokens(i) if j >= t) for i, t in at}
    mean, std = sum(raw.values()) / len(raw), oracle.spread(list(raw.values()), 1)
    return token_mean(x, lambda i, t: clipped(w(x, i, t), (raw[i, t] - mean) / (std + 1e-4), 0.2, 0.2))


def lite_ppo(x: Batch) -> Number:  # 2508.08221
    std = oracle.spread(x.r, 1)
    return token_mean(x, lambda i, t: clipped(w(x, i, t), centred(x, i) / (std + 1e-4), 0.2, 0.2))


def trpo(x: Batch) -> Number:  # 1502.05477: the surrogate; the constraint is the step's
    return token_mean(x, lambda i, t: w(x, i, t) * zscore(x, i))


PAPERS = {f.__name__: f for f in (grpo, dr_grpo, gspo, gspo_token, dapo, cispo, rloo, tis, dual_clip, sapo)}
PAPERS |= {f.__name__: f for f in (ppo_penalty, reinforce_pp, lite_ppo, trpo)}
# Where w is near 1 nothing is clipped; where it is far every bound of every preset acts somewhere.
DRIFTS = [2e-4, 0.02, 0.3, 1.0]


def test_every_preset_has_its_equation_here() -> None:
    assert list(PAPERS) == list(PRESETS)


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("name", PAPERS)
def test_value_and_gradient_are_the_paper_s(name: str, drift: float) -> None:
    for seed in range(3):
        now, b = random_batch(seed, drift=drift)
        b = replace(b, limit=10, prompt_weight_N=torch.ones_like(b.r_N))  # so that DAPO's cache is 2; no paper weighs prompts
        x = plain(now, b)
        j = PAPERS[name](x)
        flat = [p for row in x.logp for p in row]
        grads = torch.stack(
            [torch.zeros((), dtype=F64) if g is None else g for g in torch.autograd.grad(j, flat, allow_unused=True)]
        )
        value, grad_NT = from_rewards(PRESETS[name], now, b)
        torch.testing.assert_close(value, -j.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad_NT.flatten(), -grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("rloo", "sapo", "ppo_penalty", "trpo")])
def test_its_bound_acts_in_these_batches(name: str) -> None:
    """Otherwise the test above would say nothing about the clip. (Those left out have none.)"""
    now, b = random_batch(0, drift=1.0)
    scored = score(PRESETS[name], b)
    _, parts = loss(PRESETS[name], Forward(now.logp_NT[scored.row_K]), scored.b, Norm.of(scored.b))
    assert parts.hit_NT.any()
    assert not parts.hit_NT[scored.b.mask_NT].all()


# The differences between papers are differences of slots.


def differences(one: Objective, other: Objective) -> dict[str, Any]:
    a, b = objective_spec(one), objective_spec(other)
    return {slot: b[slot] for slot in b if a[slot] != b[slot]}


@pytest.mark.parametrize(
    ("base", "name", "slots"),
    [
        ("grpo", "dr_grpo", {"advantage", "aggregation", "kl"}),
        ("grpo", "gspo", {"ratio", "clip", "kl"}),
        ("gspo", "gspo_token", {"ratio"}),
        ("grpo", "dapo", {"clip", "aggregation", "kl", "sampling", "overlong"}),
        ("grpo", "cispo", {"clip", "aggregation", "kl"}),
        ("grpo", "rloo", {"ratio", "clip", "advantage", "aggregation", "kl", "kl_in_reward"}),
        ("grpo", "tis", {"correction", "kl"}),
        ("grpo", "dual_clip", {"clip", "kl"}),
        ("grpo", "sapo", {"clip", "kl"}),
        ("grpo", "ppo_penalty", {"clip", "aggregation", "kl"}),
        ("grpo", "reinforce_pp", {"advantage", "aggregation", "kl", "kl_in_reward"}),
        ("grpo", "lite_ppo", {"advantage", "aggregation", "kl"}),
        ("grpo", "trpo", {"clip", "aggregation", "kl", "step"}),
    ],
)
def test_presets_differ_in_exactly_these_slots(base: str, name: str, slots: set[str]) -> None:
    assert set(differences(PRESETS[base], PRESETS[name])) == slots


def test_dapo_against_grpo_in_full() -> None:
    assert differences(presets.grpo, presets.dapo) == {
        "clip": {"name": "ppo", "eps_low": 0.2, "eps_high": 0.28},
        "aggregation": "token_mean",
        "kl": "none",
        "sampling": {"name": "dynamic", "max_batches": 3},
        "overlong": {"name": "soft_penalty", "cache": None},
    }


def test_no_two_presets_are_the_same() -> None:
    specs = [str(objective_spec(o)) for o in PRESETS.values()]
    assert len(set(specs)) == len(specs)


def assignments() -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(inspect.getsource(presets)).body:
        if isinstance(node, ast.Assign):
            assert isinstance(node.targets[0], ast.Name)
            yield node.targets[0].id, node.value


def test_each_preset_is_one_expression_and_says_only_what_differs() -> None:
    """A call of Objective or of replace on another preset; no keyword repeats what is there already."""
    for name, value in assignments():
        assert isinstance(value, ast.Call), name
        assert ast.unparse(value.func) in ("Objective", "replace"), name
        start_ = Objective() if not value.args else PRESETS[ast.unparse(value.args[0])]
        said = {k.arg for k in value.keywords}
        changed = set(differences(start_, PRESETS[name]))
        idle = said - changed
        assert idle <= ({"ratio", "clip", "advantage", "aggregation"} if not value.args else set()), f"{name} repeats {idle}"


@pytest.mark.parametrize("name", PRESETS)
def test_it_trains(name: str, tmp_path: Path) -> None:
    """Two steps of two updates through the loop, from random weights; every number is finite and the policy moves."""
    run = parse_run(
        {
            "name": name,
            "policy": {"name": "tiny", "start": "scratch"},
            "task": "short",
            "objective": {"preset": name, "reward": {"name": "coin", "p": 0.5}},
            "rollout": {"group_size": 4, "prompts": 4, "updates": 2, "minibatches": 1},
            "scale": {"steps": 2, "warmup": 0, "eval_prompts": 0},
        },
        "test",
    )
    made, task = start.load(run, tmp_path)
    before = [p.detach().clone() for p in made.model.parameters()]
    rows = list(train.train(run, made, task))
    assert [row["step"] for row in rows if "loss" in row] == [0, 1]
    assert all(math.isfinite(v) for row in rows for v in row.values())
    assert any(not torch.equal(p, q) for p, q in zip(before, made.model.parameters(), strict=True))
