"""Engines that draw by seeds of their own: what they are asked, what they must answer, the probe, and every way a server can fail."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from engines import StandIn, serving

from grpo_repro import checkpoint, single, start, train
from grpo_repro import policy as policies
from grpo_repro.config import Run, merged, parse_run
from grpo_repro.learner import Learner
from grpo_repro.policy import Policy
from grpo_repro.rollout import Births, Decoding, proceed, sample, server, vllm
from grpo_repro.rollout.engine import Ask, answered, asks_of, seeds
from grpo_repro.rollout.verified import Verified, agreement
from grpo_repro.tasks.pairs import SYMBOLS
from grpo_repro.types import EngineError, Prompt, Rollout, UserError


@pytest.fixture
def policy() -> Policy:
    return models.random_policy("llama")


def draws(policy: Policy, engine: Any, G: int = 3, **how: Any) -> Rollout:
    settings = {"limit": 6, "seed": 1, "step": 0, "temperature": 0.7} | how
    return sample(policy, prompts_of(3, 5, 2), G, engine=engine, **settings)


def prompts_of(*lengths: int) -> list[Prompt]:
    """Prompts that the tiny vocabulary has too."""
    return [replace(p, tokens=tuple(t % 15 for t in p.tokens)) for p in models.prompts(*lengths)]


def shifted(policy: Policy, by: float = 0.05) -> Policy:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator))
    return policy


# --- what is asked


def test_rows_of_one_prompt_with_seeds_in_a_row_are_one_ask() -> None:
    a, b = (1, 2), (3,)
    rows = [(a, 7), (a, 8), (a, 9), (b, 10), (b, 12), (b, 13), (a, 14)]
    assert asks_of(*zip(*rows, strict=True)) == [Ask(a, 7, 3), Ask(b, 10, 1), Ask(b, 12, 2), Ask(a, 14, 1)]
    assert asks_of(*zip(*rows, strict=True), alone=True) == [Ask(p, s, 1) for p, s in rows]


def test_seeds_are_the_prompts_own_plus_the_member() -> None:
    def of(seed: int, step: int, prompt: int, offset: int = 0) -> list[int]:
        member_N = torch.arange(4)
        same = torch.ones_like(member_N)
        return seeds(seed, step * same, prompt * same, member_N, offset * same)

    first = of(1, 0, 0)
    assert first == [first[0] + i for i in range(4)]
    assert of(1, 0, 0) == first, "a run repeats"
    others = [of(2, 0, 0), of(1, 1, 0), of(1, 0, 1), of(1, 0, 0, offset=5)]
    assert len({s for group in [first, *others] for s in group}) == 20
    assert all(0 <= s < 2**63 for group in [first, *others] for s in group), "or HTTP and torch refuse it"


def test_further_samples_of_a_prompt_have_seeds_of_their_own(policy: Policy) -> None:
    """Four samples at once are two, and two more later (⑥ extra)."""
    whole, parts = StandIn.of(policy), StandIn.of(policy)
    four = draws(policy, whole, 4)
    two, more = draws(policy, parts, 2), draws(policy, parts, 2, first_member=2)
    for g in range(3):
        later = torch.cat([two.sampler_NT[two.group_N == g].sum(1), more.sampler_NT[more.group_N == g].sum(1)])
        assert torch.allclose(four.sampler_NT[four.group_N == g].sum(1), later, atol=1e-6)
    assert [ask.n for ask in whole.asked] == [4, 4, 4], "one request a prompt"


def test_a_prompt_is_asked_without_its_padding(policy: Policy) -> None:
    engine = StandIn.of(policy)
    draws(policy, engine)
    assert [ask.prompt for ask in engine.asked] == [p.tokens for p in prompts_of(3, 5, 2)]


# --- what is made of the answers


def test_a_rollout_of_an_engine_is_a_rollout(policy: Policy) -> None:
    r = draws(policy, StandIn.of(policy), 4)
    assert r.group_N.tolist() == [g for g in range(3) for _ in range(4)]
    assert r.support_NTV is None
    assert len(set(r.length_N.tolist())) > 1, "or the padding is not tested"
    for n, length in enumerate(r.length_N.tolist()):
        ended = int(r.response_NT[n, length - 1]) in policy.end_ids
        assert ended or length == 6
        assert bool(r.cut_N[n]) == (not ended)
        assert (r.response_NT[n, length:] == policy.pad_id).all()
        assert (r.sampler_NT[n, length:] == 0).all()
    for got, want in zip(r.sampler_NT, models.plain_logp(policy.model, r, 0.7), strict=True):
        assert torch.allclose(got[: len(want)], want.float(), atol=1e-5)


def test_unfinished_responses_go_on_under_an_engine(policy: Policy) -> None:
    engine = StandIn.of(policy)
    begun = draws(policy, engine, limit=2)
    births = Births.of(begun.group_N, 0)
    more = proceed(policy, begun, births, chunk=2, limit=6, seed=1, how=Decoding(0.7, engine=engine))
    assert int(more.length_N.max()) == 4
    assert torch.equal(more.response_NT[:, :2][begun.mask_NT], begun.response_NT[begun.mask_NT])
    assert agreement(policy, more, 0.7).largest < 1e-5


FEWER = {
    "fewer prompts": "answered 2 of 3 prompts",
    "fewer samples": "returned 2 of the 3 samples a prompt",
    "fewer log-probs": "log-probs for a response of",
    "no log-prob": "log-probs for a response of",
    "a token too many": "more than the limit of 6",
    "stops early": "stopped after 1 of 6 tokens without an end token",
    "a foreign token": "drew the token 1000000, which the model of 23 tokens lacks",
}


@pytest.mark.parametrize(("fault", "said"), FEWER.items(), ids=FEWER)
def test_an_answer_that_is_not_what_was_asked_is_one_sentence(policy: Policy, fault: str, said: str) -> None:
    with pytest.raises(EngineError, match=said) as error:
        draws(policy, StandIn.of(policy, fault))
    assert "stand-in" in str(error.value)


def test_answers_become_rows_in_order() -> None:
    """By hand: two prompts, three responses; the end token is 9."""
    from grpo_repro.rollout.engine import Completion

    asks = [Ask((1,), 0, 2), Ask((2,), 0, 1)]
    answers = [[Completion([4, 9], [-1.0, -2.0]), Completion([5, 6, 7], [-3.0, -4.0, -5.0])], [Completion([9], [-6.0])]]
    token_NT, logp_NT = answered("x", asks, answers, 3, {9}, 10)
    assert [token_NT[0, :2].tolist(), token_NT[1].tolist(), token_NT[2, :1].tolist()] == [[4, 9], [5, 6, 7], [9]]
    assert [logp_NT[0, :2].tolist(), logp_NT[1].tolist(), logp_NT[2, :1].tolist()] == [[-1, -2], [-3, -4, -5], [-6]]


# --- the probe


def verified(policy: Policy, engine: StandIn, **settings: Any) -> Verified:
    return Verified(engine, prompts_of(3, 5, 2, 4), 0.7, "float32", **settings)


def test_after_a_sync_the_engine_draws_from_the_policy(policy: Policy) -> None:
    engine = StandIn.of(policy)
    checked = verified(policy, engine)
    shifted(policy)
    assert agreement(policy, draws(policy, engine), 0.7).mean > 0.01, "or the sync has nothing to do"
    checked.sync(policy)
    assert agreement(policy, draws(policy, engine), 0.7).largest < 1e-5
    assert checked.row()["sampler/probe"] < 1e-5
    assert checked.row()["seconds/sync"] > 0


@pytest.mark.parametrize("fault", ["keeps its weights", "keeps its head", "raw log-probs"])
def test_the_probe_refuses_an_engine_that_is_off(policy: Policy, fault: str) -> None:
    """Weights that did not arrive, a tied head whose packed copy stayed old, log-probs at temperature 1."""
    engine = StandIn.of(policy, fault)
    checked = verified(policy, engine)
    if fault == "keeps its head":
        checked.sync(policy)  # from now on its weights are what they are
    shifted(policy, 0.02)
    with pytest.raises(
        EngineError, match=r"mean \|Δlogp\| is .* \(allowed 0\.0005\) and the largest .* at token \d of a response"
    ):
        checked.sync(policy)


def test_nan_is_never_within_the_tolerance(policy: Policy) -> None:
    checked = verified(policy, StandIn.of(policy), tolerance=1e9)
    checked.sync(policy)
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(math.nan)
    with pytest.raises((EngineError, UserError, RuntimeError)):
        checked.sync(policy)


def test_the_tolerance_is_that_of_the_coarser_dtype(policy: Policy) -> None:
    """Δ of about .01: too much between float32 and float32, usual where one side is bfloat16, refused again where the user says so."""
    engine = StandIn.of(policy, "keeps its weights")
    shifted(policy, 1e-3)
    with pytest.raises(EngineError):
        verified(policy, engine).sync(policy)
    coarse = Verified(engine, prompts_of(3, 5), 0.7, "bfloat16")
    coarse.sync(policy)
    coarse.tolerance = 1e-5
    with pytest.raises(EngineError, match=r"allowed 1e-05"):
        coarse.sync(policy)


# --- the server


@pytest.fixture
def small() -> Policy:
    return policies.tiny(SYMBOLS, heads=2)


def test_a_server_draws_what_the_same_engine_draws_in_process(small: Policy) -> None:
    with serving(small) as (url, served):
        engine = server.opened(url + "/", small, context=20)
        over_http, here = draws(small, engine), draws(small, StandIn.of(small))
        assert torch.equal(over_http.response_NT, here.response_NT)
        assert torch.allclose(over_http.sampler_NT, here.sampler_NT)
        Verified(engine, prompts_of(3, 5), 0.7, "float32").sync(shifted(small))
        assert agreement(small, draws(small, engine), 0.7).largest < 1e-5
        order = [
            c
            for c in served.calls
            if c in ("start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache")
        ]
        assert order == ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
        engine.close()


REFUSED_AT_ONCE = {
    "slow": "did not answer /v1/models within 0.2 s",
    "not vLLM": "no JSON object: is it a vLLM server",
    "other tokenizer": "tokenizer spells",
    "no dev mode": "start it with VLLM_SERVER_DEV_MODE=1",
    "hangs up": "broke off /v1/models",
}


@pytest.mark.parametrize(("fault", "said"), REFUSED_AT_ONCE.items(), ids=REFUSED_AT_ONCE)
def test_a_server_that_will_not_do_is_refused_when_it_is_opened(small: Policy, fault: str, said: str) -> None:
    with serving(small, fault) as (url, _), pytest.raises(UserError, match=said):
        server.opened(url, small, context=20, timeout=0.2 if fault == "slow" else 20)


def test_a_server_whose_context_is_too_short_is_refused(small: Policy) -> None:
    with (
        serving(small, context=16) as (url, _),
        pytest.raises(UserError, match=r"holds 16 tokens, and .* up to 20: .*--max-model-len 20"),
    ):
        server.opened(url, small, context=20)


def test_a_server_that_is_down_is_one_sentence(small: Policy) -> None:
    with serving(small) as (url, _):
        pass
    with pytest.raises(UserError, match=r"cannot be reached .*: start it, or correct machine.server"):
        server.opened(url, small, context=20)
    with pytest.raises(UserError, match=r"is not a URL"):
        server.opened("localhost:8000", small, context=20)


def test_a_server_of_other_weights_that_keeps_them_is_seen_by_the_probe(small: Policy) -> None:
    """It serves another model of the same shape, and a sync does not change it."""
    with serving(shifted(policies.tiny(SYMBOLS, heads=2), 0.3)) as (url, served):
        engine = server.opened(url, small, context=20)
        served.engine.model.load_state_dict = lambda stored: None
        with pytest.raises(EngineError, match=r"does not draw from the policy"):
            Verified(engine, prompts_of(3, 5), 0.7, "float32").sync(small)
        engine.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"break_at": 1}, "arrived only in part: .*Worker failed.*start it anew"),
        ({"faults": {"cache in use"}}, "did not empty its prefix"),
    ],
)
def test_a_sync_that_fails_half_way_is_one_sentence(small: Policy, settings: dict[str, Any], said: str) -> None:
    with serving(small) as (url, served):
        engine = server.opened(url, small, context=20)
        vars(served).update(settings)
        with pytest.raises(EngineError, match=said):
            engine.sync(small)
        engine.close()


# --- in the loop


@pytest.fixture
def runs(tmp_path: Path, small: Policy) -> Callable[..., Run]:
    """Runs on a saved small policy, results in a folder of their own."""
    folder = tmp_path / "small"
    policies.save(small, folder)
    base = {
        "name": "test",
        "policy": {"name": str(folder)},
        "task": "short",
        "objective": {"preset": "grpo", "reward": {"name": "coin", "p": 0.5}},
        "rollout": {"group_size": 4, "prompts": 3},
        "scale": {"steps": 3, "eval_prompts": 6, "lr": 3e-3},
        "machine": {"engine": "vllm", "vllm": {"dtype": "float32"}, "checkpoint_every": 0},
    }
    return lambda **changes: parse_run(merged(base, {k.replace("__", "."): v for k, v in changes.items()}), "test")


def timeless(rows: list[Any]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows]


def rows_of(run: Run) -> list[dict[str, float]]:
    return timeless(list(train.train(run, *start.load(run, Path("unused")))))


def test_a_run_draws_from_each_steps_weights(runs: Callable[..., Run], small: Policy) -> None:
    """Without sync the second rollout would come from the first weights; the same run gives the same rows."""
    with serving(small) as (url, served):
        rows = rows_of(runs(machine__server=url))
        assert len(rows) == 4
        assert "heldout/accuracy" in rows[-1]
        for row in rows[:-1]:
            assert row["sampler/difference/max"] < 1e-4
            assert row["sampler/probe"] < 1e-4
            assert row["update/norm"] > 1e-2, "or there is nothing to sync"
        assert served.calls.count("update_weights") == 5, "three steps, an exam before and one after"
        assert rows_of(runs(machine__server=url)) == rows


def test_stale_weights_go_through_an_engine_too(runs: Callable[..., Run], small: Policy) -> None:
    with serving(small) as (url, _):
        rows = rows_of(runs(machine__server=url, sampler__staleness=1))
        assert [row["sampler/age"] for row in rows[:-1]] == [0, 1, 1]
        assert all(row["sampler/difference/max"] < 1e-4 for row in rows[:-1]), "against the weights of the last sync"


def test_an_engine_is_closed_with_its_run(runs: Callable[..., Run], small: Policy) -> None:
    with serving(small) as (url, _):
        run = runs(machine__server=url)
        learner = Learner.of(run, *start.load(run, Path("unused")))
        engine = learner.sampler.engine
        assert engine is not None
        written = Path(engine.engine._scratch.name)  # type: ignore[attr-defined]
        assert written.is_dir()
        learner.close()
        learner.close()
        assert not written.exists()


def test_a_sync_that_fails_leaves_a_checkpoint_and_the_run_goes_on_from_it(
    runs: Callable[..., Run], small: Policy, tmp_path: Path
) -> None:
    """The second step's sync breaks; started anew, the server gives the rest of the run that was never broken."""
    with serving(small) as (url, _):
        whole, _ = single.train_one(runs(machine__server=url, reference__refresh="ema"), tmp_path / "whole")
    out = tmp_path / "out"
    said = r"step 2: the weights arrived only in part.*goes on from step 2\."
    with serving(small, break_at=4) as (url, _), pytest.raises(UserError, match=said):
        single.train_one(runs(machine__server=url, reference__refresh="ema"), out)
    assert checkpoint.newest(out / "checkpoints")[1] == 2
    with serving(shifted(small)) as (url, _):
        folder, made = single.train_one(runs(machine__server=url, reference__refresh="ema"), out)
    assert made
    assert timeless(folder.rows()) == timeless(whole.rows())


def test_an_engine_that_fails_before_the_first_step_leaves_nothing(
    runs: Callable[..., Run], small: Policy, tmp_path: Path
) -> None:
    with serving(small, break_at=1) as (url, _), pytest.raises(UserError, match=r"arrived only in part"):
        single.train_one(runs(machine__server=url), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what is refused before anything starts


TOP_P = {"rollout__top_p": 0.9}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a server without vllm": (
        {"machine__engine": "decoder", "machine__server": "http://x"},
        "machine.server is given, but machine.engine is decoder",
    ),
    "overlap": (
        {"machine__overlap": True, "sampler__staleness": 1},
        "machine.overlap goes with the engines decoder and transformers",
    ),
    "top-p with a correction": (
        TOP_P | {"objective__correction": "truncate"},
        "correction truncate with top-p or top-k and machine.engine vllm",
    ),
    "top-k with a correction, no support": (
        {"rollout__top_k": 5, "rollout__keep_support": False, "objective__correction": "mask"},
        "correction mask with top-p or top-k and machine.engine vllm",
    ),
    "top-p": (TOP_P, "rollout.keep_support with machine.engine vllm"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_vllm_cannot_give_is_refused(runs: Callable[..., Run], changes: dict[str, Any], said: str) -> None:
    run = runs(**changes)
    with pytest.raises(UserError, match=said):
        Learner.of(run, *start.load(run, Path("unused")))


def test_without_vllm_the_sentence_names_the_target(small: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'")
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match=r"No module named 'vllm'.*make vllm.*engine: decoder"):
        vllm.opened(small, context=20)


def test_the_engine_is_part_of_a_runs_key_only_where_it_has_chance_of_its_own(runs: Callable[..., Run]) -> None:
    keys = {runs(machine__engine=name).key() for name in ("decoder", "transformers")}
    assert len(keys) == 1
    keys |= {runs().key(), runs(machine__vllm={"dtype": "bfloat16"}).key(), runs(machine__server="http://x").key()}
    assert len(keys) == 4
    assert runs(machine__vllm={"dtype": "float32", "memory": 2.0}).key() in keys, "memory changes no number"


def test_the_plugin_that_vllm_loads_is_declared_and_the_docs_name_its_backend() -> None:
    from importlib.metadata import entry_points

    from grpo_repro.rollout import plugin

    root = Path(__file__).parents[1]
    assert 'grpo_repro = "grpo_repro.rollout.plugin:register"' in (root / "pyproject.toml").read_text()
    assert json.dumps({"backend": plugin.BACKEND}) in str(server.__doc__)
    for found in entry_points(group="vllm.general_plugins", name="grpo_repro"):
        assert found.load() is plugin.register
