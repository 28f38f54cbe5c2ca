"""What needs more than a loss term, in the loop: ⑥ who is sampled, ⑤ the reference, ③ a critic, ② adaptive β and the natural step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_repro import start, train
from grpo_repro.config import Reference, Run, merged, parse_run
from grpo_repro.critic import Critic, explained_variance
from grpo_repro.knobs.step import trpo
from grpo_repro.learner import Learner
from grpo_repro.reference import refresh
from grpo_repro.types import Minibatch, Norm, UserError

BASE: dict[str, Any] = {
    "name": "test",
    "policy": {"name": "tiny", "start": "scratch"},
    "task": "tail",
    "objective": {"preset": "dr_grpo", "reward": {"name": "coin", "p": 0.5}},
    "rollout": {"group_size": 4, "prompts": 6, "limit": 8},
    "scale": {"steps": 3, "eval_prompts": 0, "lr": 1e-3},
}


def config(changes: dict[str, Any]) -> Run:
    return parse_run(merged(BASE, changes), "test")


def rows_of(changes: dict[str, Any]) -> list[dict[str, float]]:
    run = config(changes)
    made, task = start.load(run, Path("unused"))
    return list(train.train(run, made, task))[:-1]


def learner_of(changes: dict[str, Any]) -> Learner:
    run = config(changes)
    return Learner.of(run, *start.load(run, Path("unused")))


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.policy.model.parameters()])


# --- ⑥


def test_dynamic_sampling_fills_the_batch_with_mixed_groups_and_counts_what_it_cost() -> None:
    """With G = 2 and a fair coin half the groups are flat: one batch is not enough, and what is trained on is mixed (D04, D06)."""
    changes = {"objective.sampling": {"name": "dynamic", "max_batches": 8}, "rollout.group_size": 2}
    for row in rows_of(changes):
        assert row["groups/mixed"] >= 6
        assert row["groups/sampled"] > 6
        trained = row["groups/sampled"] - row["groups/dropped"] - max(row["groups/mixed"] - 6, 0)
        assert trained == 6
        assert row["tokens/sampled"] >= row["tokens"]
    assert "reward/sampled" in row


def test_dynamic_sampling_gives_up_with_a_sentence() -> None:
    """DAPO#22: a constant reward must not sample for ever."""
    changes = {"objective.sampling": {"name": "dynamic", "max_batches": 3}, "objective.reward": {"name": "coin", "p": 0.0}}
    with pytest.raises(
        UserError, match=r"step 0: 3 batches of 6 .* no group with mixed rewards \(18 groups all at 0, 0 all lower\)"
    ):
        rows_of(changes)


def test_dynamic_sampling_draws_other_prompts_in_every_batch() -> None:
    learner = learner_of({"objective.sampling": {"name": "dynamic", "max_batches": 8}, "rollout.group_size": 2})
    from grpo_repro.collect import collect

    rollout, _, row = collect(learner.sampler, 0)
    ids = [p.id for p in rollout.prompts]
    assert len(set(ids)) == len(ids) == row["groups/sampled"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "objective.sampling": {"name": "dynamic", "max_batches": 8},
            "rollout.group_size": 2,
            "objective.advantage": "process_reward",
        },
        {"rollout.extra": 3, "objective.reward": {"name": "coin", "p": 0.3}},
    ],
    ids=["dynamic", "extra"],
)
def test_batches_judged_one_by_one_are_judged_as_together(changes: dict[str, Any]) -> None:
    """Chance in a reward, positions and steps are those of one judgement over all rows; no batch is judged twice."""
    from grpo_repro.collect import collect
    from grpo_repro.judge import judge

    learner = learner_of({**changes, "seed": 1})
    rollout, judged, row = collect(learner.sampler, 2)
    assert row.get("groups/extra", 0) > 0 or row["groups/sampled"] > 6
    steps = "steps" in learner.objective.needs
    whole = judge(learner.objective.reward, rollout, learner.task, learner.policy, 1, 2, steps)
    for name, value in vars(whole).items():
        for key, tensor in value.items() if isinstance(value, dict) else {"": value}.items():
            other = getattr(judged, name)[key] if key else getattr(judged, name)
            assert other is tensor is None or torch.equal(other, tensor), (name, key)


def test_prompts_that_nobody_solved_get_further_samples() -> None:
    from grpo_repro.collect import collect

    plain, _, _ = collect(learner_of({"objective.reward": "exact_match"}).sampler, 0)
    rollout, judged, row = collect(learner_of({"objective.reward": "exact_match", "rollout.extra": 3}).sampler, 0)
    for g in range(6):
        solved = bool((judged.correct_N[rollout.group_N == g][:4] > 0.5).any())
        assert int((rollout.group_N == g).sum()) == (4 if solved else 7)
    assert row["groups/extra"] == 6.0  # a policy from scratch solves nothing here
    first = rollout.rows(torch.arange(24))
    assert torch.equal(first.length_N, plain.length_N), "the first samples are those of a run without extra ones"
    rows_of({"objective.reward": "exact_match", "rollout.extra": 3, "objective.kl": {"name": "k3", "beta": 0.1}})


def test_weights_of_levels_scale_their_prompts_loss() -> None:
    """Twice the weight on every level is twice the gradient; weight 0 on all is none."""
    sgd = {"scale.optimizer": "sgd", "scale.grad_clip": 1e9, "scale.warmup": 0, "scale.lr": 0.1}
    moved = []
    for weights in ({}, {"easy": 2.0, "medium": 2.0, "hard": 2.0}, {"easy": 0.0, "medium": 0.0, "hard": 0.0}):
        learner = learner_of({**sgd, "rollout.weights": weights})
        before = parameters(learner)
        train.one_step(learner, 0)
        moved.append(parameters(learner) - before)
    assert float(moved[0].norm()) > 1e-4
    assert float((moved[1] - 2 * moved[0]).norm() / moved[0].norm()) < 1e-4
    assert float(moved[2].norm()) == 0.0


def test_partial_rollouts_finish_under_newer_weights_and_lose_nothing() -> None:
    learner = learner_of({"rollout.chunk": 2, "scale.lr": 1e-2})
    rows = [train.one_step(learner, step) for step in range(6)]
    assert any(row["groups/unfinished"] > 0 for row in rows)
    assert any(row["rows/older"] > 0 for row in rows)
    late = [row for row in rows if row["rows/older"] > 0]
    assert max(row["sampler/difference"] for row in late) > 1e-3, "old tokens have the log-probs of old weights"
    if learner.sampler.pending is not None:
        rollout, births = learner.sampler.pending
        assert len(births.step_N) == len(rollout.group_N)
        assert bool((rollout.length_N <= 8).all())
    again = learner_of({"rollout.chunk": 2, "scale.lr": 1e-2})
    repeated = [train.one_step(again, step) for step in range(6)]
    assert [r["loss"] for r in rows] == [r["loss"] for r in repeated]


def test_a_chunk_as_long_as_the_limit_is_a_plain_rollout() -> None:
    def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{k: v for k, v in r.items() if not k.startswith(("seconds/", "groups/unf", "rows/old"))} for r in rows]

    assert timeless(rows_of({"rollout.chunk": 8})) == timeless(rows_of({}))


@pytest.mark.parametrize("how", [{"rollout.top_p": 0.6}, {"rollout.top_k": 3}])
def test_with_a_restricted_support_the_ratio_on_policy_is_still_one(how: dict[str, float]) -> None:
    row = rows_of({**how, "objective.preset": "grpo", "objective.kl": "none"})[0]
    assert row["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert row["sampler/difference"] < 1e-4
    assert 0 < row["entropy"] < 2.0  # over three tokens at most log 3


# --- ⑤ the reference


def test_a_reset_brings_the_distance_to_zero_and_may_restart_the_optimiser() -> None:
    changes = {"objective.kl": {"name": "k2", "beta": 0.01}, "scale.steps": 5, "scale.lr": 1e-2}
    fixed = [row["kl_ref/exact"] for row in rows_of(changes)]
    reset = [row["kl_ref/exact"] for row in rows_of({**changes, "reference.refresh": "reset", "reference.every": 2})]
    assert fixed[0] == reset[0] == 0.0
    assert min(fixed[1:]) > 1e-4
    assert [r == pytest.approx(0.0, abs=1e-9) for r in reset] == [True, False, True, False, True]

    learner = learner_of({**changes, "reference.refresh": "reset", "reference.every": 1, "reference.reset_optimizer": True})
    train.one_step(learner, 0)
    assert learner.optimizer.state
    assert learner.reference is not None
    assert refresh(learner.reference, learner.policy.model, learner.run.reference, 1, learner.optimizer)
    assert not learner.optimizer.state


def test_a_moving_average_by_hand() -> None:
    learner = learner_of({"reference.refresh": "ema"})
    assert learner.reference is not None
    with torch.no_grad():
        for p, q in zip(learner.reference.parameters(), learner.policy.model.parameters(), strict=True):
            p.fill_(1.0)
            q.fill_(5.0)
    rule = Reference(refresh="ema", decay=0.75)
    refresh(learner.reference, learner.policy.model, rule, 0, learner.optimizer)
    assert float(next(learner.reference.parameters()).flatten()[0]) == 1.0  # nothing was trained before step 0
    refresh(learner.reference, learner.policy.model, rule, 1, learner.optimizer)
    assert float(next(learner.reference.parameters()).flatten()[0]) == pytest.approx(0.75 * 1 + 0.25 * 5)


def test_the_exact_kl_is_what_its_estimators_estimate_and_it_pulls() -> None:
    free = rows_of({"scale.steps": 6, "scale.lr": 1e-2})[-1]
    held = rows_of({"scale.steps": 6, "scale.lr": 1e-2, "objective.kl": {"name": "full", "beta": 1.0}})[-1]
    assert held["kl_ref/exact"] < 0.5 * free["kl_ref/exact"]


# --- ③ a critic


def critic_batch(values: list[float], old: list[float], targets: list[float]) -> tuple[torch.Tensor, Minibatch, Norm]:
    n = len(values)
    one_row = {"mask_NT": torch.ones(1, n, dtype=torch.bool), "r_N": torch.zeros(1), "group_N": torch.zeros(1, dtype=torch.int64)}
    rest = {"length_N": torch.tensor([n]), "cut_N": torch.zeros(1, dtype=torch.bool), "limit": n}
    b = Minibatch(**one_row, **rest, value_NT=torch.tensor([old]), target_NT=torch.tensor([targets]))
    return torch.tensor([values], requires_grad=True), b, Norm.of(b)


def test_the_value_loss_by_hand() -> None:
    """V = (1, 3), targets (0, 0): ½·mean(1, 9)·coef = 2.5·coef; gradient coef·V/2."""
    value_NT, b, norm = critic_batch([1.0, 3.0], [0.0, 0.0], [0.0, 0.0])
    total = Critic(torch.nn.Linear(1, 1), None, 0.5, False).loss(value_NT, b, norm)
    total.backward()
    assert float(total.detach()) == pytest.approx(1.25)
    assert value_NT.grad is not None
    assert value_NT.grad.tolist() == [[0.25, 0.75]]


def test_value_clipping_takes_the_larger_error_and_stops_the_gradient_beyond_it() -> None:
    """Old V 0, target 1, ε .2. V = .9: clipped to .2, error .64 > .01, no gradient. V = −.5: clipped to −.2, error 2.25 counts."""
    value_NT, b, norm = critic_batch([0.9, -0.5], [0.0, 0.0], [1.0, 1.0])
    total = Critic(torch.nn.Linear(1, 1), 0.2, 1.0, False).loss(value_NT, b, norm)
    total.backward()
    assert float(total.detach()) == pytest.approx(0.5 * (0.64 + 2.25) / 2)
    assert value_NT.grad is not None
    assert value_NT.grad.tolist() == [[0.0, pytest.approx(-0.75)]]


def test_a_critic_learns_what_it_is_given() -> None:
    """The reward is whether the first symbol is a digit; the values of later tokens learn to tell."""
    changes = {
        "objective": {"preset": "dr_grpo", "advantage": {"name": "gae", "lam": 1.0}, "reward": {"name": "coin", "p": 1.0}},
        "critic": {"lr": 0.05, "coef": 0.5, "eps_clip": None},
        "scale.steps": 12,
        "rollout.updates": 2,
    }
    learner = learner_of(changes)
    assert learner.critic is not None
    assert float(learner.critic.head.weight.detach().abs().sum()) == 0.0
    rows = [train.one_step(learner, step) for step in range(12)]
    assert float(learner.critic.head.bias.detach()) > 0.3 or float(learner.critic.head.weight.detach().abs().sum()) > 0.1
    assert all(torch.isfinite(torch.tensor(list(r.values()))).all() for r in rows)


def test_explained_variance_by_hand() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert explained_variance(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 2.0]]), mask) == {
        "critic/explained_variance": pytest.approx(1 - 0.5 / 2)  # Var(0, 1) = .5, Var(0, 2) = 2
    }
    assert explained_variance(torch.zeros(1, 2), torch.ones(1, 2), mask) == {}


# --- ② adaptive β, and the natural step


def test_beta_rises_when_the_updates_of_a_rollout_went_too_far_even_with_one_update() -> None:
    """The KL is measured after the rollout's last update: at μ = 1 the ratio of the update itself is 1 and says nothing."""
    penalty = {"name": "kl_penalty", "beta": 1.0, "target": 1e-5}
    rows = rows_of({"objective.clip": penalty, "objective.aggregation": "token_mean", "scale.lr": 1e-2})
    assert [row["state/clip/beta"] for row in rows] == [2.0, 4.0, 8.0]
    penalty = {"name": "kl_penalty", "beta": 1.0, "target": 10.0}
    rows = rows_of({"objective.clip": penalty, "objective.aggregation": "token_mean", "scale.lr": 1e-4})
    assert [row["state/clip/beta"] for row in rows] == [0.5, 0.25, 0.125]


def test_a_state_reaches_the_next_rollout() -> None:
    """The penalty with β = 1000 holds what the penalty with β = 0.001 does not."""
    common = {"objective.aggregation": "token_mean", "rollout.updates": 4, "scale.steps": 1, "scale.lr": 3e-3}
    penalties = [{"name": "kl_penalty", "beta": beta, "target": 0.05} for beta in (1e-3, 1e3)]
    far = [rows_of({**common, "objective.clip": penalty})[0]["kl_old/exact"] for penalty in penalties]
    assert far[1] < 0.5 * far[0]


def test_running_statistics_are_kept() -> None:
    rows = rows_of({"objective.advantage": {"name": "running_zscore", "decay": 0.5}})
    means = [row["reward"] for row in rows]
    by_hand = means[0]
    assert rows[0]["state/advantage/mean"] == pytest.approx(by_hand)
    for row, mean in zip(rows[1:], means[1:], strict=True):
        by_hand = 0.5 * by_hand + 0.5 * mean
        assert row["state/advantage/mean"] == pytest.approx(by_hand)


def test_the_natural_step_on_a_softmax_is_the_exact_one() -> None:
    """Three actions, F = diag(p) − ppᵀ: x = (F + λI)⁻¹g by a dense solve, scaled to ½ xᵀ(F+λI)x = δ (TRPO, App. C)."""
    theta = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64))
    p = torch.softmax(theta.detach(), 0)
    reward = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)

    def minus_j() -> torch.Tensor:
        return -(torch.softmax(theta, 0) * reward).sum()

    def divergence() -> Any:
        yield (p * (p.log() - torch.log_softmax(theta, 0))).sum()

    theta.grad = torch.autograd.grad(minus_j(), theta)[0]
    g, start_ = -theta.grad.clone(), theta.detach().clone()
    damping, delta = 0.1, 1e-4
    damped = torch.diag(p) - torch.outer(p, p) + damping * torch.eye(3, dtype=torch.float64)
    x = torch.linalg.solve(damped, g)
    expected = (2 * delta / (x @ damped @ x)) ** 0.5 * x
    told = trpo(
        lambda: float(minus_j().detach()), divergence, [theta], torch.optim.SGD([theta], lr=1.0), max_kl=delta, damping=damping
    )
    assert told["trpo/accepted"] == 1.0
    assert told["trpo/halvings"] == 0.0
    assert torch.allclose(theta.detach() - start_, expected, atol=1e-9)
    assert told["trpo/kl"] <= delta


def test_the_natural_step_in_the_loop_stays_inside_the_trust_region_and_improves() -> None:
    changes = {"objective.step": {"name": "trpo", "max_kl": 0.005}, "objective.clip": "none", "rollout.prompts": 12}
    rows = rows_of(changes)
    assert sum(row["trpo/accepted"] for row in rows) >= 2
    for row in rows:
        assert row["trpo/kl"] <= 0.005
        assert row["kl_old/exact"] <= 0.005 * 1.01  # every token was kept: the measured KL is the constrained one


def test_a_natural_step_that_cannot_improve_leaves_the_parameters() -> None:
    theta = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    theta.grad = torch.tensor([1.0, -1.0], dtype=torch.float64)
    told = trpo(lambda: 0.0, lambda: iter([(theta**2).sum()]), [theta], torch.optim.SGD([theta], lr=1.0), backtracks=3)
    assert told["trpo/accepted"] == 0.0
    assert theta.tolist() == [0.0, 0.0]
