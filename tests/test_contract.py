"""What every variant of every knob promises, found through `grpo_repro.knobs`: a new variant is under contract by existing."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from batches import F64, PRESETS, every_variant, from_rewards, name_of, oracle_spec, random_batch, value_and_gradient
from torch import Tensor

from grpo_repro import adaptive, knobs
from grpo_repro.objective import Objective, loss, score
from grpo_repro.spec import base
from grpo_repro.types import Forward, Minibatch, Norm, Prompt, Response

F32 = torch.float32
BASE = Objective(
    clip=partial(knobs.clip.ppo, eps_low=0.2, eps_high=0.3),
    kl=partial(knobs.kl.k3, beta=0.1),
    correction=partial(knobs.correction.truncate, w_max=1.5),
)
ALL = [(slot, spec) for slot in knobs.SLOTS for spec in every_variant(slot)]


def of(*slots: str) -> Any:
    """Parametrises a test with every variant of the slots."""
    chosen = [(slot, spec) for slot, spec in ALL if slot in slots]
    return pytest.mark.parametrize(("slot", "spec"), chosen, ids=[f"{s}-{name_of(v)}" for s, v in chosen])


def with_variant(slot: str, spec: Any) -> Objective:
    bound = knobs.resolve(slot, spec)
    return replace(BASE, **{slot: (bound,) if slot == "gate" else bound})


# Every preset, and the base with each variant in turn: what the whole formula is put through below.
OBJECTIVES = dict(PRESETS.items())
OBJECTIVES |= {f"{slot}-{name_of(spec)}": with_variant(slot, spec) for slot, spec in ALL if slot not in ("reward", "step")}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def scored_batch(seed: int, dtype: torch.dtype = F64, drift: float = 0.3) -> tuple[Forward, Minibatch, Norm]:
    """With Â and a penalty, ready for the loss."""
    now, b = random_batch(seed, dtype, drift)
    b = score(Objective(kl_in_reward=partial(knobs.kl.k1, beta=0.1)), b).b
    return now, b, Norm.of(b)


def test_every_slot_of_the_objective_is_a_knob() -> None:
    assert {f.name for f in fields(Objective)} == set(knobs.SLOTS)
    assert all(knobs.variants(slot) for slot in knobs.SLOTS if slot != "gate")


@pytest.mark.parametrize(("slot", "name"), [(s, n) for s in knobs.SLOTS for n in knobs.variants(s)])
def test_docstring_carries_formula_source_and_price(slot: str, name: str) -> None:
    doc = knobs.variants(slot)[name].__doc__ or ""
    assert doc.split("\n\n")[0].strip().endswith("."), "first a line that says what it is"
    assert doc.count("$$") == 2, "one displayed formula"
    assert all(word in doc for word in ("Source:", "Fixes:", "Costs:"))


@pytest.mark.parametrize(("slot", "name"), [(s, n) for s in knobs.SLOTS for n in knobs.variants(s)])
def test_needs_are_words_the_loop_knows(slot: str, name: str) -> None:
    assert knobs.needs(knobs.variants(slot)[name]) <= {"old", "sampler", "ref", "values", "steps", "full_logits"}


NEEDED = {
    "old_NT": "old",
    "sampler_NT": "sampler",
    "ref_NT": "ref",
    "value_NT": "values",
    "step_end_NT": "steps",
    "step_r_NT": "steps",
}


@every_objective
def test_needs_are_enough(name: str) -> None:
    """With nothing but what it declares, an objective computes the same value and gradient."""
    now, b = random_batch(3)
    objective = OBJECTIVES[name]
    bare = replace(b, target_NT=None, **{k: None for k, need in NEEDED.items() if need not in objective.needs})
    exact = "full_logits" in objective.needs
    alone = Forward(
        now.logp_NT,
        exact_kl_NT=now.exact_kl_NT if exact else None,
        value_NT=now.value_NT if "values" in objective.needs else None,
    )
    same(from_rewards(objective, alone, bare), from_rewards(objective, now, b))


@pytest.mark.parametrize(
    ("slot", "spec"),
    [(s, v) for s, v in ALL if s in ("ratio", "correction", "clip", "gate", "advantage", "kl", "aggregation")],
    ids=str,
)
def test_a_variant_reads_no_tensor_that_it_does_not_need(slot: str, spec: Any) -> None:
    """Alone, for in an objective another slot may have asked for it."""
    now, b, norm = scored_batch(3)
    function = knobs.resolve(slot, spec)
    bare = replace(b, target_NT=None, **{k: None for k, need in NEEDED.items() if need not in knobs.needs(function)})
    alone = replace(
        now,
        exact_kl_NT=now.exact_kl_NT if "full_logits" in knobs.needs(function) else None,
        value_NT=now.value_NT if "values" in knobs.needs(function) else None,
    )

    def made(now: Forward, b: Minibatch) -> tuple[Tensor, ...]:
        if slot == "clip":
            return tuple_of(function(0.1 * now.logp_NT, now, b))
        return tuple_of(function(*{"correction": (b,), "aggregation": (b, norm), "advantage": (b,)}.get(slot, (now, b))))

    for mine, whole in zip(made(alone, bare), made(now, b), strict=True):
        assert torch.equal(mine, whole)


# One variant at a time: shape, dtype, finite, where gradient flows.


@pytest.mark.parametrize("dtype", [F32, F64])
@of("ratio", "kl", "clip", "gate", "correction", "aggregation")
def test_token_variant(slot: str, spec: Any, dtype: torch.dtype) -> None:
    now, b, norm = scored_batch(0, dtype, drift=1.0)
    now, b = now.masked(b.mask_NT), b.masked()
    function = knobs.resolve(slot, spec)
    if slot == "clip":
        logw_NT = knobs.ratio.sequence(now, b)  # not 0 at masked tokens
        out_NT, hit_NT = function(logw_NT, now, b)
        assert hit_NT.dtype == torch.bool
        assert hit_NT.shape == b.mask_NT.shape
        assert not (hit_NT & ~b.mask_NT).any(), "a masked token is never counted as clipped"
    else:
        out_NT = function(*{"correction": (b,), "aggregation": (b, norm)}.get(slot, (now, b)))
    assert torch.broadcast_shapes(out_NT.shape, b.mask_NT.shape) == b.mask_NT.shape
    assert torch.isfinite(out_NT).all()
    if slot == "gate":
        assert out_NT.dtype == torch.bool
        assert not out_NT.requires_grad
    elif slot == "aggregation":
        assert out_NT.dtype == F64, "a share is exact in float64; the loss brings it to the gain's type"
        assert out_NT.shape == b.mask_NT.shape
        assert (out_NT[~b.mask_NT] == 0).all()
        counted_NT = b.mask_NT & (b.advantage != 0) if "by_sign" in knobs.traits(function) else b.mask_NT
        assert (out_NT[counted_NT] > 0).all()
    elif slot == "correction":
        assert not out_NT.requires_grad
        assert (out_NT >= 0).all()
        assert spec["name"] == "none" or out_NT.dtype == dtype
    else:
        assert out_NT.dtype == dtype
    if slot in ("ratio", "clip"):
        assert (torch.autograd.grad(out_NT.sum(), now.logp_NT)[0][b.mask_NT] != 0).any()


@pytest.mark.parametrize("dtype", [F32, F64])
@of("advantage")
def test_advantage_variant(slot: str, spec: Any, dtype: torch.dtype) -> None:
    _, b = random_batch(1, dtype)
    chosen = knobs.resolve(slot, spec)
    targets = isinstance(chosen(b), tuple)

    def function(b: Minibatch) -> Tensor:
        return chosen(b)[0] if targets else chosen(b)

    a = function(b)
    assert a.shape in {(len(b.r_N), 1), tuple(b.mask_NT.shape)}
    assert a.dtype == dtype
    assert torch.isfinite(a).all()
    order_N = torch.randperm(len(b.r_N), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(function(b.rows(order_N)), a[order_N])
    renamed = replace(b, group_N=1000 - 3 * b.group_N)
    torch.testing.assert_close(function(renamed), a)
    assert ("token_advantage" in knobs.traits(chosen)) <= (a.shape == b.mask_NT.shape)
    if a.shape == b.mask_NT.shape:
        assert (a[~b.mask_NT] == 0).all()
    if targets:
        target_NT = chosen(b)[1]
        assert target_NT.dtype == dtype
        assert target_NT.shape == b.mask_NT.shape
        assert (target_NT[~b.mask_NT] == 0).all()
        assert "values" in knobs.needs(chosen), "a target without a critic to learn it"
    nothing = function(b.rows(torch.arange(0)))
    assert nothing.numel() == 0
    assert nothing.dtype == dtype
    if "group_baseline" in knobs.traits(chosen) and "batch_statistics" in knobs.traits(chosen):
        for g in b.group_N.unique():
            assert a[b.group_N == g].sum().item() == pytest.approx(0, abs=1e-5)
            if len(b.r_N[b.group_N == g].unique()) == 1:
                assert (a[b.group_N == g] == 0).all()
    elif "group_baseline" in knobs.traits(chosen):
        for g in b.group_N.unique():
            mine = (b.group_N == g).nonzero().squeeze(1)
            torch.testing.assert_close(function(b.rows(mine)), a[mine])
            assert a[mine].sum().item() == pytest.approx(0, abs=1e-5)
            if len(b.r_N[mine].unique()) == 1:
                assert (a[mine] == 0).all(), "a flat group, or one of a single row, has no advantage"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@of("advantage")
def test_advantage_reads_no_masked_token(slot: str, spec: Any, bad: float) -> None:
    """Bit for bit, Â and target, with a KL charged to the reward (`score` clears that where the mask is False)."""
    _, b = random_batch(1)
    function = knobs.resolve(slot, spec)
    b = replace(b, penalty_NT=(0.1 * b.old_NT).masked_fill(~b.mask_NT, 0.0))
    dirty = replace(planted(b, b.mask_NT, bad), penalty_NT=b.penalty_NT)
    assert not torch.equal(dirty.value_NT, b.value_NT)
    assert not torch.equal(dirty.step_r_NT, b.step_r_NT)
    dirty = replace(dirty, step_end_NT=b.step_end_NT | ~b.mask_NT)
    for mine, clean in zip(tuple_of(function(dirty)), tuple_of(function(b)), strict=True):
        assert torch.equal(mine, clean)


def tuple_of(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


@of("sampling", "transform", "overlong")
def test_row_variant(slot: str, spec: Any) -> None:
    _, b = random_batch(2, F32)
    function = knobs.resolve(slot, spec)
    order_N = torch.randperm(len(b.r_N), generator=torch.Generator().manual_seed(0))
    if slot == "overlong":
        r_N, mask_NT = function(b.r_N, b)
        assert mask_NT.dtype == torch.bool
        assert not (mask_NT & ~b.mask_NT).any(), "it may hide tokens, never show them"
        torch.testing.assert_close(function(b.r_N[order_N], b.rows(order_N)), (r_N[order_N], mask_NT[order_N]))
    else:
        r_N = function(b.r_N, b.group_N)
        torch.testing.assert_close(function(b.r_N[order_N], b.group_N[order_N]), r_N[order_N])
    assert r_N.shape == b.r_N.shape
    assert torch.isfinite(r_N).all()
    assert r_N.dtype == (torch.bool if slot == "sampling" else F32)
    if slot == "transform":
        for rows in range(1, 70):  # equal rewards stay equal, whatever vector instructions do: flat must stay flat
            assert len(function(torch.full((rows,), 0.3), torch.zeros(rows, dtype=torch.int64)).unique()) == 1
    if slot == "sampling":
        assert all(len(r_N[b.group_N == g].unique()) == 1 for g in b.group_N.unique()), "whole groups"
        assert function(b.r_N[:0], b.group_N[:0]).shape == (0,)


@of("reward")
def test_reward_variant(slot: str, spec: Any) -> None:
    prompt = Prompt(id="p", text="1+1=", tokens=(1, 2), answer="2")
    for right in (0.0, 1.0):
        r = knobs.resolve(slot, spec)(
            prompt, Response("2", (3,), truncated=False, correct=right, notes={"rare": 1.0, "raw_score": 0.5}, u=0.3)
        )
        assert isinstance(r, float)
        assert math.isfinite(r)


# The whole formula, with each preset and each variant.


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    """Bit for bit."""
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


def planted(data: Any, mask_NT: Tensor, bad: float) -> Any:
    """A copy with `bad` in every floating tensor of the mask's shape, wherever the mask is False."""
    at = {f.name: v for f in fields(data) if isinstance(v := getattr(data, f.name), Tensor) and v.shape == mask_NT.shape}
    changed = {
        k: v.detach().masked_fill(~mask_NT, bad).requires_grad_(v.requires_grad) for k, v in at.items() if v.is_floating_point()
    }
    assert len(changed) >= 2
    assert all(not torch.equal(changed[k], at[k]) for k in changed)
    return replace(data, **changed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every_objective
def test_masked_tokens_may_hold_anything(name: str, bad: float) -> None:
    """From the rewards on, and once more in the loss alone (with rows hidden as too long, and a penalty)."""
    now, b = random_batch(4)
    clean = from_rewards(OBJECTIVES[name], now, b)
    assert torch.isfinite(clean[0])
    assert torch.isfinite(clean[1]).all()
    assert (clean[1] != 0).any()
    same(from_rewards(OBJECTIVES[name], planted(now, b.mask_NT, bad), planted(b, b.mask_NT, bad)), clean)

    b = score(replace(OBJECTIVES[name], sampling=knobs.sampling.all), replace(b, penalty_NT=b.old_NT)).b
    clean = value_and_gradient(OBJECTIVES[name], now, b)
    assert (clean[1][b.mask_NT] != 0).any()
    assert (clean[1][~b.mask_NT] == 0).all()
    same(value_and_gradient(OBJECTIVES[name], planted(now, b.mask_NT, bad), planted(b, b.mask_NT, bad)), clean)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_norm_does_not_read_a_masked_advantage(bad: float) -> None:
    _, b, _ = scored_batch(4)
    assert b.advantage is not None
    b = replace(b, advantage=b.advantage.expand(b.mask_NT.shape).clone())
    assert Norm.of(planted(b, b.mask_NT, bad)) == Norm.of(b)


@every_objective
def test_gradient_reaches_now_and_nothing_else(name: str) -> None:
    """Even when a caller forgot to detach: b is data."""
    now, b, norm = scored_batch(5)
    frozen = {f.name: getattr(b, f.name) for f in fields(b)}
    frozen = {k: v.clone().requires_grad_() for k, v in frozen.items() if isinstance(v, Tensor) and v.is_floating_point()}
    total, _ = loss(OBJECTIVES[name], now, replace(b, **frozen), norm)
    total.backward()
    assert now.logp_NT.grad is not None
    assert (now.logp_NT.grad[b.mask_NT] != 0).any()
    reached = {k for k, v in frozen.items() if v.grad is not None and (v.grad != 0).any()}
    assert not reached
    assert now.entropy_NT is not None
    assert not now.entropy_NT.requires_grad


@pytest.mark.parametrize(("slot", "spec"), [(s, v) for s, v in ALL if getattr(base(knobs.resolve(s, v)), "init", None)], ids=str)
def test_state_is_numbers_and_changes_only_its_own_variant(slot: str, spec: Any) -> None:
    """init and update take exactly the variant's parameters, give JSON numbers, leave their argument alone and repeat themselves."""
    objective = with_variant(slot, spec)
    metrics = {"reward": 0.5, "reward/std": 0.2, "kl_old/k3": 3.0, "kl_old/exact": 3.0}
    states = adaptive.initial(objective)
    assert set(states) == {slot}
    before = json.dumps(states)
    after = adaptive.updated(objective, states, metrics)
    assert json.dumps(states) == before
    assert after != states
    assert adaptive.updated(objective, states, metrics) == after
    assert json.loads(json.dumps(after)) == after
    assert all(math.isfinite(v) for v in after[slot].values())
    now, b = random_batch(3)
    held = adaptive.bound(objective, after)
    assert knobs.needs(getattr(held, slot)) == knobs.needs(getattr(objective, slot))
    assert oracle_spec(held) | {slot: None} == oracle_spec(objective) | {slot: None}
    assert not torch.equal(from_rewards(held, now, b)[1], from_rewards(objective, now, b)[1])


@every_objective
def test_order_of_rows_does_not_matter(name: str) -> None:
    now, b = random_batch(6)
    value, grad_NT = from_rewards(OBJECTIVES[name], now, b)
    order_N = torch.randperm(len(b.r_N), generator=torch.Generator().manual_seed(1))
    shuffled = Forward(**{f.name: getattr(now, f.name).detach()[order_N] for f in fields(now)})
    shuffled.logp_NT.requires_grad_()
    value2, grad2_NT = from_rewards(OBJECTIVES[name], shuffled, b.rows(order_N))
    torch.testing.assert_close(value2, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad2_NT, grad_NT[order_N], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 7])
@every_objective
def test_micro_batches_sum_to_the_batch(name: str, rows: int) -> None:
    """Slices cut through groups; the Norm is that of the whole."""
    now, b = random_batch(7)
    objective = OBJECTIVES[name]
    scored = score(objective, b)
    norm = Norm.of(scored.b)

    def part(index_K: Tensor) -> tuple[Tensor, Tensor]:
        mine = scored.row_K[index_K]
        sliced = Forward(**{f.name: getattr(now, f.name)[mine] for f in fields(now)})
        total, _ = loss(objective, sliced, scored.b.rows(index_K), norm)
        return total.detach(), torch.autograd.grad(total, now.logp_NT)[0]

    everything = torch.arange(len(scored.row_K))
    value, grad_NT = part(everything)
    parts = [part(index_K) for index_K in everything.split(rows)]
    torch.testing.assert_close(torch.stack([v for v, _ in parts]).sum(), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([g for _, g in parts]).sum(0), grad_NT, rtol=1e-12, atol=1e-12)


@every_objective
def test_wider_padding_changes_nothing(name: str) -> None:
    now, b = random_batch(8)
    value, grad_NT = from_rewards(OBJECTIVES[name], now, b)

    def wide(data: Any, fill: float) -> Any:
        at = {f.name: v for f in fields(data) if isinstance(v := getattr(data, f.name), Tensor) and v.shape == b.mask_NT.shape}
        pad = {k: torch.full((len(v), 3), 0 if v.dtype == torch.bool else fill, dtype=v.dtype) for k, v in at.items()}
        return replace(data, **{k: torch.cat([v.detach(), pad[k]], 1).requires_grad_(v.requires_grad) for k, v in at.items()})

    value2, grad2_NT = from_rewards(OBJECTIVES[name], wide(now, 3.0), wide(b, -5.0))
    torch.testing.assert_close(value2, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad2_NT[:, :-3], grad_NT, rtol=1e-12, atol=1e-12)
    assert (grad2_NT[:, -3:] == 0).all()


@pytest.mark.parametrize("dtype", [F32, F64])
@every_objective
def test_loss_keeps_the_type_of_logp(name: str, dtype: torch.dtype) -> None:
    value, grad_NT = from_rewards(OBJECTIVES[name], *random_batch(9, dtype))
    assert value.dtype == grad_NT.dtype == dtype


@pytest.mark.parametrize("far", ["old", "ref", "sampler"])
@every_objective
def test_log_ratios_of_a_hundred_stay_finite(name: str, far: str) -> None:
    """±100 in float32 on tokens of either sign of Â, at every token of a row or at one."""
    now, b, norm = scored_batch(10, F32)
    signs_NT = torch.randint(-1, 2, b.mask_NT.shape, generator=torch.Generator().manual_seed(2)).float()
    signs_NT[:4] = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    origin = b.old_NT if far == "sampler" else now.logp_NT.detach()
    b = replace(b, **{f"{far}_NT": origin + 100 * signs_NT})
    for a in (b.advantage, torch.ones_like(b.r_N).unsqueeze(1), -torch.ones_like(b.r_N).unsqueeze(1)):
        total, _ = loss(OBJECTIVES[name], now, replace(b, advantage=a), norm)
        (grad_NT,) = torch.autograd.grad(total, now.logp_NT)
        assert torch.isfinite(total)
        assert torch.isfinite(grad_NT).all()


@every_objective
def test_nothing_to_learn_from_is_zero(name: str) -> None:
    """Every token masked, and a rollout of which nothing was kept: 0, not 0/0."""
    now, b, _ = scored_batch(11)
    for batch in (replace(b, mask_NT=torch.zeros_like(b.mask_NT)), b.rows(torch.arange(0))):
        here = Forward(
            now.logp_NT[: len(batch.r_N)], exact_kl_NT=now.exact_kl_NT[: len(batch.r_N)], value_NT=now.value_NT[: len(batch.r_N)]
        )
        total, _ = loss(OBJECTIVES[name], here, batch, Norm.of(batch))
        assert total.item() == 0.0
        assert (torch.autograd.grad(total, now.logp_NT)[0] == 0).all()


@of("kl", "kl_in_reward")
def test_kl_of_equal_policies_is_zero(slot: str, spec: Any) -> None:
    now, b, _ = scored_batch(12)
    now = replace(now, exact_kl_NT=torch.zeros_like(now.logp_NT))  # what the loop would have computed
    assert (knobs.resolve(slot, spec)(now, replace(b, ref_NT=now.logp_NT.detach())) == 0).all()


@of("correction")
def test_equal_sampler_needs_no_correction(slot: str, spec: Any) -> None:
    _, b, _ = scored_batch(13)
    assert (knobs.resolve(slot, spec)(replace(b, sampler_NT=b.old_NT)) == 1).all()


@of("ratio")
def test_unmoved_policy_has_ratio_one(slot: str, spec: Any) -> None:
    now, b, _ = scored_batch(14)
    assert (knobs.resolve(slot, spec)(now, replace(b, old_NT=now.logp_NT.detach())) == 0).all()
