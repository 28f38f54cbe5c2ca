"""The loop: reproducible, invariant to how it is cut, honest about dead batches and blow-ups, and it learns."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_repro import NUMERICS, policy, start, train, update
from grpo_repro.config import Run, merged, parse_run
from grpo_repro.judge import judge
from grpo_repro.learner import Learner
from grpo_repro.logprobs import forward
from grpo_repro.measure import Measured
from grpo_repro.objective import score
from grpo_repro.policy import Policy
from grpo_repro.rollout import sample
from grpo_repro.types import Minibatch, NonFinite, Rollout, UserError

GOLDEN = Path(__file__).parent / "golden" / "tiny_10_steps.json"
BASE: dict[str, Any] = {
    "name": "test",
    "policy": {"name": "tiny", "start": "scratch"},
    "task": "short",
    "objective": {"preset": "grpo", "reward": {"name": "coin", "p": 0.5}},
    "rollout": {"group_size": 4, "prompts": 6, "updates": 2, "minibatches": 2},
    "scale": {"steps": 2, "eval_prompts": 6},
}


def config(**changes: Any) -> Run:
    return parse_run(merged(BASE, {k.replace("__", "."): v for k, v in changes.items()}), "test")


def rows_of(run: Run, cache: Path = Path("unused")) -> tuple[list[dict[str, float]], Policy]:
    made, task = start.load(run, cache)
    return list(train.train(run, made, task)), made


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows]


def largest_difference(a: Policy, b: Policy) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


def test_same_seed_same_trajectory_bit_for_bit_and_another_seed_another() -> None:
    (first, one), (again, two) = rows_of(config()), rows_of(config())
    assert timeless(first) == timeless(again)
    assert largest_difference(one, two) == 0.0
    other, _ = rows_of(config(seed=1))
    assert timeless(first) != timeless(other)


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, _ = rows_of(config())
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert timeless(rows_of(config())[0]) == timeless(first)


def test_rows_are_numbered_and_end_with_an_exam() -> None:
    rows, _ = rows_of(config(scale__steps=3, scale__eval_every=2))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["heldout/accuracy" in row for row in rows] == [True, False, True, True]
    assert set(rows[-1]) == {"step", *(k for k in rows[-1] if k.startswith("heldout/"))}


@pytest.fixture
def rolled() -> tuple[Learner, Rollout, Minibatch]:
    """A learner after one rollout of unequal lengths, before any update."""
    run = config(task="tail", rollout__updates=1, rollout__minibatches=1, rollout__limit=12)
    made, task = start.load(run, Path("unused"))
    with torch.no_grad():
        made.model.lm_head.weight[next(iter(made.end_ids))] *= 1.5  # ends come early and unevenly
    rollout = sample(made, task.draw(0, 0, 6), 4, limit=12, temperature=1.0, seed=0, step=0)
    assert len(set(rollout.length_N.tolist())) > 3
    learner = Learner.of(run, made, task)
    judged = judge(learner.objective.reward, rollout, task, made, 0, 0)
    old_NT = forward(made.model, rollout, 1.0).logp_NT.detach()
    ref_NT = old_NT + 0.1 * rollout.mask_NT
    b = Minibatch(
        mask_NT=rollout.mask_NT,
        r_N=judged.r_N,
        group_N=rollout.group_N,
        length_N=rollout.length_N,
        cut_N=rollout.cut_N,
        limit=12,
        old_NT=old_NT,
        sampler_NT=rollout.sampler_NT,
        ref_NT=ref_NT,
    )
    return learner, rollout, b


def gradients(learner: Learner, rollout: Rollout, b: Minibatch, **machine: Any) -> torch.Tensor:
    """The gradient of one update, by plain SGD with lr 1 and no clipping: θ_before − θ_after."""
    learner = copy.deepcopy(learner)
    changes = {"scale.optimizer": "sgd", "scale.lr": 1.0, "scale.grad_clip": 1e9, "scale.warmup": 0}
    data = merged(learner.run.model_dump(), changes | {f"machine.{k}": v for k, v in machine.items()})
    learner = Learner.of(parse_run(data, "test"), learner.policy, learner.task)
    before = [p.detach().clone() for p in learner.policy.model.parameters()]
    measured = Measured(b.old_NT, b.old_NT, None)
    update.update(learner, learner.objective, rollout, score(learner.objective, b), measured, None, 0)
    return torch.cat([(p - q.detach()).flatten() for p, q in zip(before, learner.policy.model.parameters(), strict=True)])


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant_length", "sequence_sum"])
def test_one_batch_equals_row_by_row_equals_left_padded(rolled: tuple[Learner, Rollout, Minibatch], aggregation: str) -> None:
    """{micro-batches of all rows} ≡ {one row each} ≡ {three more columns of padding on the left}: TRL#7206, verl#3741."""
    learner, rollout, b = rolled
    data = merged(learner.run.model_dump(), {"objective.aggregation": aggregation})
    learner = Learner.of(parse_run(data, "test"), learner.policy, learner.task)
    whole = gradients(learner, rollout, b)
    rows = gradients(learner, rollout, b, token_budget=1)
    wider = replace(rollout, prompt_NP=torch.nn.functional.pad(rollout.prompt_NP, (3, 0), value=16))
    padded = gradients(learner, wider, b)
    assert float(whole.norm()) > 1e-3  # 0 == 0 would pass vacuously
    for other in (rows, padded):
        assert float((whole - other).norm() / whole.norm()) < 1e-5


def test_an_update_on_policy_has_ratio_one_no_clipping_and_the_plain_gradient() -> None:
    """TRL#2769: at μ = 1 that the ratio is 1 and nothing is clipped is expected; the gradient is not 0."""
    rows, _ = rows_of(config(rollout__updates=1, rollout__minibatches=1))
    for row in rows[:-1]:
        assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-4)
        assert row["clip"] == 0.0
        assert row["gradient_norm"] > 1e-3
        assert row["sampler/difference"] < 1e-5


def test_several_updates_move_the_ratio_and_are_measured() -> None:
    rows, _ = rows_of(config(rollout__updates=4, scale__lr=5e-3))
    assert rows[1]["ratio/std"] > 0.01
    assert rows[1]["clip"] > 0
    assert 0 < rows[1]["ess"] < 1
    assert rows[1]["kl_old/exact"] > 0
    assert rows[1]["update/norm"] > 0
    sides = sum(rows[1][f"clip/{side}_{sign}"] for side in ("high", "low") for sign in ("pos", "neg"))
    assert rows[1]["clip"] == pytest.approx(sides, abs=1e-12)
    assert rows[1]["clip/high_neg"] == rows[1]["clip/low_pos"] == 0.0  # the seed's two open cells


@pytest.mark.parametrize("filter_", ["all", "drop_zero_variance"])
def test_a_batch_of_dead_groups_makes_no_signal_and_no_crash(filter_: str) -> None:
    dead = {"preset": "dr_grpo", "reward": {"name": "coin", "p": 0.0}, "sampling": filter_}
    run = config(objective=dead)
    untrained, _ = start.load(run, Path("unused"))
    rows, trained = rows_of(run)
    assert rows[0]["groups/zero_variance"] == 1.0
    assert largest_difference(untrained, trained) == 0.0
    assert rows[0]["groups/dropped"] == (6.0 if filter_ == "drop_zero_variance" else 0.0)
    assert all(value == value for row in rows for value in row.values()), "a metric is NaN"


def test_a_blow_up_stops_the_run_and_names_step_tensor_and_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        now = forward(*args, **kwargs)
        return replace(now, logp_NT=now.logp_NT * float("nan"))

    run = config()
    made, task = start.load(run, Path("unused"))
    run_steps = train.train(run, made, task)
    next(run_steps)
    monkeypatch.setattr(update, "forward", poisoned)
    with pytest.raises(NonFinite, match=r"step 1: the policy's log-prob \(π_θ, knob ①\) is nan"):
        next(run_steps)


def test_a_gradient_that_blows_up_under_a_finite_loss_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL#3248: min() hides the infinity of the loss, not that of the gradient."""

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        now = forward(*args, **kwargs)
        if now.logp_NT.requires_grad:
            now.logp_NT.register_hook(lambda g: g * float("inf"))
        return now

    run = config()
    made, task = start.load(run, Path("unused"))
    monkeypatch.setattr(update, "forward", poisoned)
    with pytest.raises(NonFinite, match=r"step 0: the loss is .* and the gradient norm (nan|inf); look at ① ratio and ② clip"):
        next(train.train(run, made, task))


def test_nan_weights_are_seen_when_sampling() -> None:
    run = config()
    made, task = start.load(run, Path("unused"))
    with torch.no_grad():
        made.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NonFinite):
        next(train.train(run, made, task))


def test_the_policy_learns_what_is_rewarded(tmp_path: Path) -> None:
    """From a short warm start, a reward for rare digits makes them common within a dozen steps (chance alone: no change)."""
    run = config(
        policy={"name": "tiny", "start": "warm", "warm_steps": 40},
        objective={"preset": "dr_grpo", "reward": {"name": "coin", "p": 0.0, "note": "rare", "per_note": 1.0}},
        rollout={"group_size": 16, "prompts": 12, "updates": 2},
        scale={"steps": 12, "lr": 1e-3, "eval_prompts": 0},
    )
    rows, _ = rows_of(run, tmp_path)
    assert rows[11]["reward"] > rows[0]["reward"] + 0.15


def test_minibatches_are_whole_groups_and_cover_every_row_once() -> None:
    run = config(rollout__minibatches=3)
    b = Minibatch(
        mask_NT=torch.ones(9, 1, dtype=torch.bool),
        r_N=torch.zeros(9),
        group_N=torch.tensor([4, 4, 0, 0, 0, 7, 7, 9, 9]),
        length_N=torch.ones(9),
        cut_N=torch.zeros(9, dtype=torch.bool),
        limit=1,
    )
    parts = update.minibatches(b, run, step=0, epoch=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(9))
    owner = [{int(g) for g in b.group_N[part]} for part in parts]
    assert sum(len(groups) for groups in owner) == len(set.union(*owner)) == 4
    orders = {str([p.tolist() for p in update.minibatches(b, run, 0, epoch)]) for epoch in range(6)}
    assert len(orders) > 1, "every pass takes the groups in the same order"


def test_any_causal_model_by_path_runs_through_the_same_loop(tmp_path: Path) -> None:
    """A saved model with a vocabulary of letters, on reasoning-gym's sums: no template, no cache of ours."""
    letters = "".join(chr(c) for c in range(32, 127) if chr(c) not in "~`")
    policy.save(policy.tiny(letters, end="~", pad="`", d=16, layers=1, heads=2, ffn=16, context=160), tmp_path / "model")
    run = config(
        policy={"name": str(tmp_path / "model")},
        task={"name": "chain_sum", "size": 60, "limit": 4},
        rollout={"group_size": 2, "prompts": 3},
        scale={"steps": 1, "eval_prompts": 2},
    )
    rows, trained = rows_of(run)
    assert trained.name == "model"
    assert rows[0]["tokens"] > 0
    assert rows[0]["update/norm"] > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": "chain_sum"}, "cannot be written in the vocabulary of 'tiny': choose another model or another task"),
        ({"policy": {"name": "no/such/folder"}}, "no/such/folder"),
        ({"machine": {"device": "warp"}}, "machine.device: 'warp' is not a device"),
        ({"machine": {"device": "meta"}}, "machine.device: 'meta' is not supported; valid: auto, cpu"),
        ({"rollout__limit": 100}, "context"),
        ({"rollout__weights": {"hrad": 2.0}}, "no prompt has the level 'hrad' .did you mean 'hard'"),
    ],
)
def test_what_cannot_start_says_why(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        rows_of(config(**changes))


def test_golden_trajectory() -> None:
    """Ten steps, written down. Exact on the machine type that wrote the file, the first two steps to 1e-3 elsewhere.

    When this goes red on purpose: raise NUMERICS, regenerate with `python tests/test_train.py`, and say why in the commit.
    """
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics"] == NUMERICS
    rows = golden_rows()
    if golden["machine"] == machine():
        assert rows == golden["rows"]
    for row, written in list(zip(rows, golden["rows"], strict=True))[:2]:
        assert row == {k: pytest.approx(v, rel=1e-3, abs=1e-5) for k, v in written.items()}


def golden_rows() -> list[dict[str, float]]:
    kept = ("loss", "gradient_norm", "reward", "entropy", "kl_old/exact", "kl_ref/exact", "clip")
    rows, _ = rows_of(config(scale__steps=10, scale__eval_prompts=0, objective__kl={"name": "k3", "beta": 0.04}))
    return [{k: float(f"{row[k]:.6g}") for k in kept} for row in rows[:-1]]


def machine() -> dict[str, str]:
    """What bit-equality may depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.is_file() else []
    cpu = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    return {
        "torch": torch.__version__,
        "cpu": " ".join(cpu.get(k, "?") for k in ("model name", "cpu family", "model", "stepping")),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps({"numerics": NUMERICS, "machine": machine(), "rows": golden_rows()}, indent=1) + "\n")
