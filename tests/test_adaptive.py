"""Variants with a memory: where their state lives, how it moves, and that it moves the way it should."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import F64, from_rewards, minibatch

from grpo_repro import adaptive, knobs, metrics
from grpo_repro.objective import Objective, loss
from grpo_repro.spec import unbind
from grpo_repro.types import Forward, Norm

PENALTY = Objective(clip=partial(knobs.clip.kl_penalty, beta=2.0, target=0.1), aggregation=knobs.aggregation.token_mean)
RUNNING = Objective(advantage=partial(knobs.advantage.running_zscore, decay=0.75))


def test_only_variants_with_a_memory_have_a_state() -> None:
    assert adaptive.initial(Objective(clip=knobs.clip.ppo)) == {}
    assert adaptive.initial(PENALTY) == {"clip": {"beta": 2.0}}
    assert adaptive.initial(RUNNING) == {"advantage": {}}
    assert set(adaptive.initial(replace(PENALTY, advantage=knobs.advantage.running_zscore))) == {"clip", "advantage"}
    assert adaptive.initial(Objective(clip=knobs.clip.kl_penalty)) == {"clip": {"beta": 1.0}}  # the default


@pytest.mark.parametrize(
    ("realised", "beta"),
    [
        (0.0, 1.0),
        (0.1 / 1.5 - 1e-9, 1.0),  # below d_targ/1.5: half
        (0.1 / 1.5 + 1e-9, 2.0),
        (0.1, 2.0),
        (0.15 - 1e-9, 2.0),
        (0.15 + 1e-9, 4.0),  # above 1.5·d_targ: double
        (50.0, 4.0),
    ],
)
def test_beta_halves_stays_or_doubles(realised: float, beta: float) -> None:
    """PPO (1707.06347), Sec. 4, d_targ = .1."""
    states = adaptive.initial(PENALTY)
    assert adaptive.updated(PENALTY, states, {"kl_old/k3": realised}) == {"clip": {"beta": beta}}
    assert states == {"clip": {"beta": 2.0}}, "the old state is not changed"


def test_the_exact_kl_is_preferred_to_its_estimate() -> None:
    assert adaptive.updated(PENALTY, adaptive.initial(PENALTY), {"kl_old/k3": 0.1, "kl_old/exact": 9.0}) == {
        "clip": {"beta": 4.0}
    }


def test_a_rollout_without_updates_changes_nothing() -> None:
    """No KL was realised, for nothing was kept."""
    assert adaptive.updated(PENALTY, adaptive.initial(PENALTY), {"reward": 0.0}) == {"clip": {"beta": 2.0}}


def test_beta_rises_until_a_large_step_is_held_back() -> None:
    """One update a rollout (μ = 1), a step far too large: at w = 1 the penalty has no gradient, so only β's rule sees it, and must see
    the KL *after* the update: β doubles every time, as it would not if KL were measured before (0: β would halve)."""
    states = adaptive.initial(PENALTY)
    betas = []
    for _ in range(3):
        logits = torch.zeros(1, 4, dtype=F64, requires_grad=True)
        old_NT = torch.log_softmax(logits, 1).detach()[:, :1]
        b = minibatch([1.0], [0], [[1]], old_NT=old_NT, advantage=[[1.0]])
        held = adaptive.bound(PENALTY, states)
        total, _ = loss(held, Forward(torch.log_softmax(logits, 1)[:, :1]), b, Norm.of(b))
        (gradient,) = torch.autograd.grad(total, logits)
        new_NT = torch.log_softmax(logits - 10 * gradient, 1).detach()[:, :1]
        row = metrics.moved("old", new_NT, old_NT, b.mask_NT, None)
        states = adaptive.updated(PENALTY, states, row)
        betas.append(states["clip"]["beta"])
    assert betas == [4.0, 8.0, 16.0]


def test_a_larger_beta_holds_the_policy_nearer() -> None:
    """Many updates on one rollout, plain gradient steps: the distance reached falls with β, and the state is what sets it."""
    reached = []
    for beta in (0.01, 1.0, 30.0):
        logits = torch.zeros(2, dtype=F64)
        old_NT = torch.log_softmax(logits, 0).reshape(2, 1)
        b = minibatch([1.0, 0.0], [0, 0], [[1], [1]], old_NT=old_NT, advantage=[[1.0], [-1.0]])
        held = adaptive.bound(PENALTY, {"clip": {"beta": beta}})
        for _ in range(200):
            logits.requires_grad_(True)
            total, _ = loss(held, Forward(torch.log_softmax(logits, 0).reshape(2, 1)), b, Norm.of(b))
            logits = (logits - 0.05 * torch.autograd.grad(total, logits)[0]).detach()
        reached.append(metrics.moved("old", torch.log_softmax(logits, 0).reshape(2, 1), old_NT, b.mask_NT, None)["kl_old/k3"])
    assert reached[0] > 4 * reached[1] > 100 * reached[2] > 0


def test_running_statistics_start_from_the_first_rollout_and_then_lag() -> None:
    """λ = ¾. First: mean .4, E r² = .1² + .4² = .17. Then with mean .8, std 0: m = .3 + .2 = .5, s = .1275 + .16 = .2875."""
    states = adaptive.initial(RUNNING)
    states = adaptive.updated(RUNNING, states, {"reward": 0.4, "reward/std": 0.1})
    assert states["advantage"] == pytest.approx({"mean": 0.4, "square": 0.17})
    states = adaptive.updated(RUNNING, states, {"reward": 0.8, "reward/std": 0.0})
    assert states["advantage"] == pytest.approx({"mean": 0.5, "square": 0.2875})


def test_running_statistics_converge_to_those_of_the_rewards() -> None:
    """Rewards of rollouts in turn (1, 0) and (1, 1): means .5, 1, overall mean .75 and variance .1875."""
    states = adaptive.initial(RUNNING)
    seen = []
    for step in range(400):
        row = {"reward": 0.5, "reward/std": 0.5} if step % 2 else {"reward": 1.0, "reward/std": 0.0}
        states = adaptive.updated(RUNNING, states, row)
        seen.append((states["advantage"]["mean"], states["advantage"]["square"] - states["advantage"]["mean"] ** 2))
    late = seen[-2:]
    assert sum(m for m, _ in late) / 2 == pytest.approx(0.75, abs=1e-6)
    assert all(0.1 < v < 0.25 for _, v in late)


def test_a_state_survives_json_and_moves_the_next_rollout() -> None:
    b = minibatch([1.0, 0.0], [0, 0], [[1]] * 2, old_NT=[[-1.0]] * 2)
    states = json.loads(json.dumps({"advantage": {"mean": 0.25, "square": 0.0725}}))  # std √(.0725 − .0625) = .1
    held = adaptive.bound(replace(RUNNING, advantage=partial(RUNNING.advantage, eps=0.0)), states)
    now = Forward(torch.full((2, 1), -1.0, dtype=F64, requires_grad=True))
    _, grad_NT = from_rewards(held, now, b)
    assert grad_NT.flatten().tolist() == pytest.approx([-7.5 / 2, 2.5 / 2])


def test_binding_a_state_again_replaces_it_and_leaves_the_objective_alone() -> None:
    first = adaptive.bound(PENALTY, {"clip": {"beta": 3.0}})
    second = adaptive.bound(first, {"clip": {"beta": 5.0}})
    assert second.clip.keywords["state"] == {"beta": 5.0}  # type: ignore[attr-defined]
    assert "state" not in PENALTY.clip.keywords  # type: ignore[attr-defined]
    assert unbind(PENALTY.clip) == {"name": "kl_penalty", "beta": 2.0, "target": 0.1}
    assert adaptive.updated(second, {"clip": {"beta": 5.0}}, {"kl_old/k3": 9.0}) == {"clip": {"beta": 10.0}}
    assert adaptive.bound(PENALTY, {}) == PENALTY
