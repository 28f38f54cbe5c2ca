"""Who draws: how old its weights are, how exact, what the clip is anchored to, and the same numbers from another process."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from grpo_repro import checkpoint, config, layers, metrics, overlap, single, start, train, weights
from grpo_repro.check import mismatch
from grpo_repro.config import Run, merged, parse_run
from grpo_repro.learner import Learner
from grpo_repro.objective import score
from grpo_repro.sampler import Past, views
from grpo_repro.types import Minibatch, NonFinite, Rollout, UserError

BASE: dict[str, Any] = {
    "name": "test",
    "policy": {"name": "tiny", "start": "scratch"},
    "task": "tail",
    "objective": {"preset": "grpo", "reward": {"name": "coin", "p": 0.5}, "kl": "none"},
    "rollout": {"group_size": 4, "prompts": 4, "limit": 6},
    "scale": {"steps": 5, "eval_prompts": 0, "lr": 5e-3},
}
Numbers = list[dict[str, float]]


def config_of(changes: dict[str, Any]) -> Run:
    return parse_run(merged(BASE, changes), "test")


def learner_of(changes: dict[str, Any]) -> Learner:
    run = config_of(changes)
    return Learner.of(run, *start.load(run, Path("unused")))


def numbers(rows: Numbers, *without: str) -> Numbers:
    """The rows, without the seconds, and without other metrics."""
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", *without))} for row in rows]


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


# --- how old


@pytest.mark.parametrize(
    ("staleness", "every", "versions"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, 1, [0, 0, 1, 2, 3, 4, 5, 6]),
        (3, 1, [0, 0, 0, 0, 1, 2, 3, 4]),
        (0, 3, [0, 0, 0, 3, 3, 3, 6, 6]),
        (1, 3, [0, 0, 0, 2, 2, 2, 5, 5]),
        (3, 2, [0, 0, 0, 0, 1, 1, 3, 3]),
    ],
)
def test_the_version_of_a_step_by_hand(staleness: int, every: int, versions: list[int]) -> None:
    rule = config.Sampler(staleness=staleness, every=every)
    assert [rule.version(step) for step in range(8)] == versions


def test_by_default_the_trainer_draws_and_nothing_is_copied_or_recorded() -> None:
    learner = learner_of({})
    assert learner.sampler.policy is learner.policy
    assert learner.past.model is learner.policy.model
    assert not learner.past.slots
    written = parse_run(merged(BASE, {"sampler": {"weights": "exact", "staleness": 0, "every": 1}}), "test")
    assert written.key() == config_of({}).key()
    assert config_of({"machine.overlap": True, "sampler.staleness": 1}).key() == config_of({"sampler.staleness": 1}).key()
    assert config_of({"sampler.weights": "quantised"}).key() == config_of({"sampler.weights": {"name": "quantised"}}).key()
    keys = [{}, {"sampler.staleness": 1}, {"sampler.every": 2}, {"sampler.weights": "bfloat16"}, {"rollout.anchor": "proximal"}]
    assert len({config_of(changes).key() for changes in keys}) == 5


@pytest.mark.parametrize(("staleness", "every"), [(1, 1), (2, 1), (0, 3), (1, 3), (3, 2)])
def test_the_weights_that_draw_are_those_of_the_rule(staleness: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plain list of every step's weights; and the recorded log-probs are those of a forward under them, row by row."""
    learner = learner_of({"sampler.staleness": staleness, "sampler.every": every, "scale.steps": 8})
    history: list[dict[str, torch.Tensor]] = []
    oracle = learner_of({}).policy.model
    for step in range(8):
        history.append({k: v.clone() for k, v in learner.policy.model.state_dict().items()})
        oracle.load_state_dict(history[max(0, step // every * every - staleness)])
        drawn: list[Rollout] = []
        original = train.collect

        def collect(sampler: Any, step: int, drawn: list[Rollout] = drawn, original: Any = original) -> Any:
            found = original(sampler, step)
            drawn.append(found[0])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(train, "collect", collect)
            row = train.one_step(learner, step)
        assert torch.equal(parameters(learner.sampler.policy.model), parameters(oracle))
        assert row["sampler/age"] == step - max(0, step // every * every - staleness)
        assert row["sampler/difference"] < 1e-5
        assert torch.allclose(drawn[0].sampler_NT, plain(oracle, drawn[0]), atol=1e-5)
    assert float((parameters(oracle) - parameters(learner.policy.model)).abs().max()) > 1e-3


def test_old_weights_are_fresh_ones_where_nothing_is_learned() -> None:
    """lr 5e-324 moves no weight: any staleness is the plain run."""
    still = {"scale.lr": 5e-324}
    plain = list(train.steps(learner_of(still)))
    stale = list(train.steps(learner_of({**still, "sampler.staleness": 2, "sampler.every": 2})))
    assert numbers(stale, "sampler/age", "kl_lag") == numbers(plain, "sampler/age")
    assert [row["kl_lag/exact"] for row in stale[:-1]] == [0.0] * 5
    assert [row["sampler/age"] for row in stale[:-1]] == [0.0, 1.0, 2.0, 3.0, 2.0]


def test_a_learner_that_begins_in_the_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="step 3 draws with the weights of step 2, which are not there: load a checkpoint"):
        next(train.steps(learner_of({"sampler.staleness": 1}), 3))


def test_a_slot_holds_parameters_of_any_shape_and_dtype() -> None:
    model = models.random_model("qwen2")
    for number, p in enumerate(model.parameters()):
        p.data = p.data.to([torch.float32, torch.bfloat16][number % 2])
    past = Past.of(config.Sampler(staleness=2), model, shared=False)
    past.put(4, dict(model.named_parameters()))
    held = past.kept()[4]
    for name, p in model.named_parameters():
        assert held[name].dtype == p.dtype
        assert torch.equal(held[name], p)
    assert held.keys() == views(past.slots[0], past.layout).keys()


# --- how exact


def test_quantised_by_hand() -> None:
    """3 bits: levels −3 … 3 of max/3 a row. (.7, −.3, .12): of .2333 they are 3, −1.29, .51 → 3, −1, 1. 2 bits: levels −1, 0, 1."""
    weight = torch.tensor([[0.7, -0.3, 0.12], [0.0, 0.0, 0.0], [3.0, -2.0, -3.0]])
    three = torch.tensor([[0.7, -0.7 / 3, 0.7 / 3], [0.0, 0.0, 0.0], [3.0, -2.0, -3.0]])
    two = torch.tensor([[0.7, 0.0, 0.0], [0.0, 0.0, 0.0], [3.0, -3.0, -3.0]])
    assert torch.allclose(weights.quantised(weight, (0, 0, 0), bits=3), three)
    assert torch.allclose(weights.quantised(weight, (0, 0, 0), bits=2), two)
    assert torch.equal(weights.quantised(weight[0], (0, 0, 0), bits=2), weight[0]), "a norm or a bias stays exact"
    assert weights.quantised(weight.bfloat16(), (0, 0, 0)).dtype == torch.bfloat16


def test_noise_is_relative_and_indexed() -> None:
    weight = torch.full((400, 300), -2.0)
    noisy = weights.noise(weight, (1, 2, 3), sigma=0.05)
    relative = noisy / weight - 1
    assert float(relative.std()) == pytest.approx(0.05, rel=0.01)
    assert abs(float(relative.mean())) < 1e-3
    assert torch.equal(noisy, weights.noise(weight, (1, 2, 3), sigma=0.05))
    for other in [(0, 2, 3), (1, 0, 3), (1, 2, 0)]:
        assert not torch.equal(noisy, weights.noise(weight, other, sigma=0.05))
    assert torch.equal(weights.noise(weight, (1, 2, 3), sigma=0.0), weight)
    assert torch.equal(weights.noise(weight[0], (1, 2, 3)), weight[0])


@pytest.mark.parametrize(
    ("exactness", "least", "most"),
    [("bfloat16", 1e-4, 0.02), ({"name": "quantised", "bits": 3}, 0.05, 1.0), ({"name": "noise", "sigma": 0.1}, 0.02, 1.0)],
)
def test_only_the_copy_that_draws_is_distorted(exactness: Any, least: float, most: float) -> None:
    learner, plain = learner_of({"sampler.weights": exactness}), learner_of({})
    learner.sync(0)
    assert torch.equal(parameters(learner.policy.model), parameters(plain.policy.model))
    row = train.one_step(learner, 0)
    assert least < row["sampler/difference"] < most
    assert row["sampler/difference"] < row["sampler/difference/max"]
    assert row["sampler/k3"] > 0
    assert row["sampler/ess"] < 1
    assert learner.past.model is learner.policy.model, "without a lag the anchor is the trainer itself"
    distort = config.distortion(learner.run.sampler)
    learner.sync(1)
    for number, ((name, p), q) in enumerate(
        zip(learner.policy.model.named_parameters(), learner.sampler.policy.model.parameters(), strict=True)
    ):
        assert torch.equal(q, distort(p.detach(), (0, 1, number))), name
        assert q.dtype == (torch.bfloat16 if exactness == "bfloat16" else torch.float32)
        assert not q.requires_grad
    assert layers.compute_dtype(learner.sampler.policy.model) == q.dtype
    assert layers.compute_dtype(learner.policy.model) == torch.float32


def test_bad_settings_are_one_sentence() -> None:
    for changes, says in [
        ({"sampler.weights": "bf16"}, r"test: sampler.weights: there is no variant 'bf16' \(did you mean 'bfloat16'"),
        (
            {"sampler.weights": {"name": "quantised", "bits": 1}},
            r"test: sampler.weights.quantised.bits: .* greater than or equal to 2",
        ),
        ({"sampler.staleness": -1}, "test: sampler.staleness: .* greater than or equal to 0"),
        ({"machine.overlap": True}, "test: machine.overlap draws ahead .* sampler.staleness is 0: give at least 1"),
        ({"machine.overlap": True, "sampler.every": 4}, "sampler.staleness is 0: give at least 1"),
    ]:
        with pytest.raises(UserError, match=says):
            config_of(changes)


# --- whose log-probs are π_old


def batches(learner: Learner, steps: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Minibatch, dict[str, float]]]:
    """(the minibatch, the metrics) of each step."""
    for step in range(steps):
        seen: list[Minibatch] = []

        def spied(objective: Any, b: Minibatch, seen: list[Minibatch] = seen) -> Any:
            seen.append(b)
            return score(objective, b)

        with monkeypatch.context() as patch:
            patch.setattr(train, "score", spied)
            row = train.one_step(learner, step)
        yield seen[0], row


UNFINISHED = {"rollout.chunk": 2, "rollout.group_size": 2, "rollout.prompts": 8, "rollout.limit": 10, "scale.lr": 1e-2}
LATE = {"sampler.staleness": 1, "sampler.weights": {"name": "quantised", "bits": 3}}


@pytest.mark.parametrize(("anchor", "whose"), [("trainer", "then"), ("proximal", "now"), ("sampler", "engine")])
def test_the_anchor_by_forwards_under_the_weights_it_names(anchor: str, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With old and distorted weights the three differ: the trainer's numerics under the old weights, under its own, and the engine's."""
    learner = learner_of({**LATE, "rollout.anchor": anchor})
    then, now = learner_of({}).policy.model, learner_of({}).policy.model
    drawn: list[Rollout] = []
    original = train.collect
    monkeypatch.setattr(train, "collect", lambda *a: (drawn.append((found := original(*a))[0]), found)[1])
    spied = batches(learner, 3, monkeypatch)
    for step in range(3):
        then.load_state_dict(now.state_dict())
        now.load_state_dict(learner.policy.model.state_dict())
        b, row = next(spied)
        found = {"engine": b.sampler_NT, "then": plain(then, drawn[-1]), "now": plain(now, drawn[-1])}
        assert torch.allclose(b.old_NT, found[whose], atol=1e-5)
        for one, other in [("engine", "then"), *([("then", "now"), ("engine", "now")] if step else [])]:
            assert float((found[one] - found[other]).abs().max()) > 0.05
        moved = (found["now"] - found[whose])[b.mask_NT].exp()
        assert row["ratio/std"] == pytest.approx(float(moved.std(correction=0)), abs=1e-4), "μ = 1: the ratio is what lagged"
        difference = (found["engine"] - found["then"])[b.mask_NT].abs()
        assert row["sampler/difference"] == pytest.approx(float(difference.mean()), abs=1e-5), "both under the old weights"
        assert (row["kl_lag/exact"] > 1e-3) == (step > 0)


def plain(model: Any, rollout: Rollout) -> torch.Tensor:
    """Log-probs by a forward of each row alone, 0 where there is no token."""
    logp_NT = torch.zeros(rollout.response_NT.shape)
    for n, logp in enumerate(models.plain_logp(model, rollout, 1.0)):
        logp_NT[n, : len(logp)] = logp.detach()
    return logp_NT


def test_a_natural_step_trusts_the_region_around_the_weights_that_it_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(π_now‖π_θ) ≤ δ, however far the sampler lags: the distributions handed to the updates are those before the first of them."""
    learner = learner_of({"sampler.staleness": 2, "objective.step": {"name": "trpo", "max_kl": 0.005}, "objective.clip": "none"})
    handed: list[Any] = []
    original = train.update
    monkeypatch.setattr(train, "update", lambda *a: (handed.append(a), original(*a))[1])
    for step in range(3):
        before = copy.deepcopy(learner.policy.model)
        row = train.one_step(learner, step)
        rollout, old = handed[-1][2], handed[-1][4]
        assert torch.allclose(old.logp_NT, plain(before, rollout), atol=1e-5)
        assert row["trpo/kl"] <= 0.005
    assert row["kl_lag/exact"] > 0.001


def test_the_clip_sees_the_lag_and_a_correction_weighs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = [row["clip"] for row in train.steps(learner_of({"sampler.staleness": 2})) if "clip" in row]
    assert clipped[0] == 0.0
    assert min(clipped[1:]) > 0.0
    proximal = {"sampler.staleness": 2, "rollout.anchor": "proximal", "objective.correction": "truncate"}
    rows = [row for _, row in batches(learner_of(proximal), 4, monkeypatch)]
    assert [row["clip"] for row in rows] == [0.0] * 4
    assert all(row["sampler/ess"] < 0.95 for row in rows[1:])


def test_partial_rollouts_compose_with_staleness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a finished response have several weights, so π_old is the trainer's as it is now."""
    learner = learner_of({**UNFINISHED, "sampler.staleness": 1})
    rows = []
    for b, row in batches(learner, 6, monkeypatch):
        rows.append(row)
        assert row["ratio/std"] < 1e-4
        assert b.old_NT.shape == b.sampler_NT.shape
    assert any(row["rows/older"] > 0 for row in rows)
    assert max(row["sampler/difference"] for row in rows) > 0.01


def test_a_critic_values_with_its_present_weights() -> None:
    rows = list(train.steps(learner_of({"sampler.staleness": 1, "objective.advantage": "gae"})))
    assert all("critic/explained_variance" in row for row in rows[:-1])


# --- what is told of it


def test_the_metrics_by_hand() -> None:
    """Engine p = .5, .4; trainer .5·e^.2, .4·e^−.1; a third token is masked. k3 = e^d − 1 − d. π_old twice and once the engine's p."""
    mask = torch.tensor([[True, True, False]])
    p = torch.tensor([[0.5, 0.4, 0.1]]).log()
    drew = p + torch.tensor([[0.2, -0.1, float("nan")]])
    rest = {"r_N": torch.zeros(1), "group_N": torch.zeros(1, dtype=torch.int64), "length_N": torch.tensor([2])}
    old = p + torch.tensor([[2.0, 1.0, 7.0]]).log()
    b = Minibatch(mask_NT=mask, cut_N=torch.tensor([False]), limit=3, old_NT=old, sampler_NT=p, **rest)
    totals = metrics.Totals()
    metrics.sampler(totals, drew, b)
    assert metrics.finish(totals, 1) == {
        "updates": 1.0,
        "sampler/difference": pytest.approx(0.15),
        "sampler/difference/max": pytest.approx(0.2),
        "sampler/k3": pytest.approx((0.0214027582 + 0.0048374180) / 2, rel=1e-4),
        "sampler/ess": pytest.approx(9 / (2 * 5)),
    }
    empty = metrics.Totals()
    metrics.sampler(empty, drew, replace(b, mask_NT=torch.zeros(1, 3, dtype=torch.bool)))
    assert metrics.finish(empty, 1) == {"updates": 1.0}


def test_a_mismatch_is_told_once_and_names_the_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_REPRO_CACHE", str(tmp_path / "cache"))
    single.train_one(config_of({"sampler.weights": {"name": "quantised", "bits": 3}, "scale.steps": 3}), tmp_path / "run")
    told = capsys.readouterr().err
    assert told.count("nothing corrects for it: set objective.correction to {name: truncate}") == 1
    assert "step 0: the log-probs of the engine and of the trainer differ by" in told
    row = {"step": 3.0, "sampler/difference": 0.021}
    assert mismatch(config_of({"objective.correction": "mask"}), row) is None
    assert mismatch(config_of({}), {**row, "sampler/difference": 0.019}) is None
    assert mismatch(config_of({}), {"step": 3.0}) is None
    assert "finished under newer weights (more than 0.02)" in (mismatch(config_of({"rollout.chunk": 2}), row) or "")


# --- in another process


def children() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.is_alive()]


@pytest.mark.parametrize(
    "how",
    [
        {"sampler.staleness": 1},
        {
            "sampler.staleness": 3,
            "sampler.every": 2,
            "sampler.weights": {"name": "quantised", "bits": 3},
            "rollout.top_k": 5,
            **UNFINISHED,
        },
    ],
    ids=["plain", "unfinished, seldom, quantised, top-k"],
)
def test_overlapped_stopped_and_resumed_it_is_the_run_without_overlap_bit_for_bit(how: dict[str, Any], tmp_path: Path) -> None:
    plain = learner_of({**how, "scale.steps": 6})
    rows = numbers(list(train.steps(plain)))
    ahead = {**how, "scale.steps": 6, "machine.overlap": True}
    stopped = learner_of(ahead)
    with closing(train.steps(stopped)) as steps:
        first = list(islice(steps, 3))
        assert (stopped.sampler.pending is not None) == ("rollout.chunk" in how)
        checkpoint.save(stopped, 3, tmp_path)
        first.append(next(steps))
        assert len(children()) == 1
    assert not children(), "what draws ends with the run"
    assert numbers(first) == rows[:4]
    alone, again = learner_of({**how, "scale.steps": 6}), learner_of(ahead)
    for resumed in (alone, again):
        assert checkpoint.load(resumed, tmp_path) == 3
        assert numbers(list(train.steps(resumed, 3))) == rows[3:]
        assert torch.equal(parameters(resumed.policy.model), parameters(plain.policy.model))
    assert not children()


def test_a_dead_process_is_one_sentence_and_an_interrupt_leaves_none_behind() -> None:
    learner = learner_of({"sampler.staleness": 1, "machine.overlap": True, "scale.steps": 50})
    steps = train.steps(learner)
    next(steps)
    (child,) = children()
    os.kill(child.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches every process; the trainer handles it
    assert [row["step"] for row in islice(steps, 2)] == [1, 2]
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"step \d: the process that draws has died \(exit code -9; out of memory\?\): the same"):
        list(steps)
    assert not children()


def test_what_goes_wrong_there_is_said_here() -> None:
    """A mistake of the user's; then a number that blew up; then an interrupt."""
    stuck = {"objective.sampling": {"name": "dynamic", "max_batches": 2}, "objective.reward": {"name": "coin", "p": 0.0}}
    learner = learner_of({"sampler.staleness": 1, "sampler.every": 2, "machine.overlap": True, **stuck})
    with pytest.raises(KeyboardInterrupt), overlap.drawing(learner) as draw:  # noqa: PT012
        learner.sync(0)
        with pytest.raises(UserError, match="step 0: 2 batches of 4 prompts hold no group with mixed rewards"):
            draw(0)
        with pytest.raises(UserError, match="step 1: 2 batches of 4 prompts hold no group with mixed rewards"):
            draw(1)
        with torch.no_grad():
            learner.policy.model.lm_head.weight[0, 0] = float("nan")
        learner.sync(1)
        learner.sync(2)
        with pytest.raises(NonFinite, match="sampling: the model's logits are NaN or infinite"):
            draw(2)
        raise KeyboardInterrupt
    assert not children()
