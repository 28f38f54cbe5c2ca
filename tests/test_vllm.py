"""vLLM itself, where it is installed (`make vllm`): in process and as a server, on a small random Llama and on SmolLM2.

The small model has two heads: vLLM's attention on CPUs takes heads of 32 dimensions and more, and the tiny policy's have 16.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_repro import paths, start, train
from grpo_repro import policy as policies
from grpo_repro.config import merged, parse_run
from grpo_repro.logprobs import forward
from grpo_repro.policy import Policy
from grpo_repro.rollout import Births, Decoding, plugin, proceed, sample, server, vllm
from grpo_repro.rollout.verified import Verified, agreement
from grpo_repro.tasks.pairs import SYMBOLS
from grpo_repro.types import EngineError, Prompt, Rollout, UserError

pytest.importorskip("vllm.sampling_params", reason="vLLM is not installed: make vllm runs these")

TEXTS = {
    "small": ["12+34=", "5*7=", "81-9=", "44+1="],
    "smollm2": ["What is 3 + 4? Reply with only the answer.", "Write a poem.", "What is the gcd of 12 and 18?", "Name a sea."],
}
EXACT = 1e-4  # |Δlogp|, float32 against float32


def model_of(name: str) -> Policy:
    return policies.tiny(SYMBOLS, heads=2, init=0.3) if name == "small" else policies.smollm2(paths.cache())


def prompts_of(policy: Policy, name: str) -> list[Prompt]:
    return [Prompt(text, text, policy.encode_chat(text), "") for text in TEXTS[name]]


class Case:
    """A policy, prompts for it, and vLLM on it in float32."""

    def __init__(self, name: str) -> None:
        self.policy = model_of(name)
        self.prompts = prompts_of(self.policy, name)
        context = max(len(p.tokens) for p in self.prompts) + 25
        self.engine = vllm.opened(self.policy, context=context, dtype="float32", memory=0.25)
        self.checked = Verified(self.engine, self.prompts, 0.7, "float32")

    def draws(self, G: int = 4, **how: Any) -> Rollout:
        settings = {"limit": 24, "seed": 1, "step": 0, "temperature": 0.7} | how
        return sample(self.policy, self.prompts, G, engine=self.engine, **settings)


@pytest.fixture(scope="module", params=["small", "smollm2"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    with closing(made.engine):
        yield made


@pytest.fixture(autouse=True)
def same_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to the policy, the next finds it and the engine as they were."""
    if "case" not in request.fixturenames:
        yield
        return
    case: Case = request.getfixturevalue("case")
    kept = [p.detach().clone() for p in case.policy.model.parameters()]
    yield
    with torch.no_grad():
        for p, old in zip(case.policy.model.parameters(), kept, strict=True):
            p.copy_(old)
    case.engine.sync(case.policy)


def moved(policy: Policy, by: float = 0.02) -> None:
    """An update: every weight by a share of its tensor's size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(by * p.abs().mean() * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(case: Case, temperature: float) -> None:
    r = case.draws(temperature=temperature)
    found = agreement(case.policy, r, temperature)
    assert found.tokens > 100
    assert found.largest < EXACT
    with torch.no_grad():  # the plain way, one row by itself
        logits_TV = case.policy.model(torch.tensor([[*case.prompts[0].tokens, *r.response_NT[0].tolist()]])).logits[0].float()
    n, length = len(case.prompts[0].tokens), int(r.length_N[0])
    logp_TV = torch.log_softmax(logits_TV[n - 1 : n - 1 + length] / temperature, -1)
    plain_T = logp_TV.gather(-1, r.response_NT[0, :length, None])[:, 0]
    assert torch.allclose(plain_T, r.sampler_NT[0, :length], atol=EXACT)


def test_greedy_is_the_most_likely_token(case: Case) -> None:
    ours = sample(case.policy, case.prompts, 2, limit=8, seed=0, step=0, temperature=0.0)
    assert torch.equal(case.draws(2, limit=8, temperature=0.0).response_NT, ours.response_NT)


def test_the_same_seed_draws_the_same_and_another_does_not(case: Case) -> None:
    first = case.draws()
    assert torch.equal(case.draws().response_NT, first.response_NT)
    for other in ({"seed": 2}, {"step": 1}, {"first": 7}):
        r = case.draws(**other)
        T = min(r.response_NT.shape[1], first.response_NT.shape[1])
        assert not torch.equal(r.response_NT[:, :T], first.response_NT[:, :T])


def test_g_samples_a_prompt_are_different_and_do_not_depend_on_g(case: Case) -> None:
    four, two, more = case.draws(4), case.draws(2), case.draws(2, first_member=2)
    assert four.group_N.tolist() == [g for g in range(4) for _ in range(4)]
    assert len({tuple(row) for row in four.response_NT.tolist()}) == 16

    def rows(r: Rollout, g: int) -> list[list[int]]:
        part = r.rows((r.group_N == g).nonzero()[:, 0])
        return [tokens[:n] for tokens, n in zip(part.response_NT.tolist(), part.length_N.tolist(), strict=True)]

    for g in range(4):
        assert rows(four, g) == rows(two, g) + rows(more, g)


def test_top_p_and_top_k_leave_renormalised_log_probs(case: Case) -> None:
    r = case.draws(top_k=2)
    assert agreement(case.policy, r, 0.7).largest > 0.01, "the trainer is over the whole vocabulary"
    best_T = r.sampler_NT[r.mask_NT]
    assert float(best_T.min()) > -20
    narrow = case.draws(top_p=1e-6)
    assert float(narrow.sampler_NT.abs().max()) < 1e-6, "one token is left, so its log-prob is 0"


def test_after_an_update_and_a_sync_it_draws_from_the_new_policy(case: Case) -> None:
    before = case.draws()
    moved(case.policy)
    stale = agreement(case.policy, before, 0.7).mean
    assert stale > 5e-3, "or there is nothing to sync"
    case.checked.sync(case.policy)
    assert agreement(case.policy, case.draws(), 0.7).largest < EXACT
    assert case.checked.row()["sampler/probe"] < EXACT


def test_unfinished_responses_go_on_under_new_weights(case: Case) -> None:
    begun = case.draws(2, limit=4)
    moved(case.policy)
    case.checked.sync(case.policy)
    how = Decoding(0.7, engine=case.engine)
    more = proceed(case.policy, begun, Births.of(begun.group_N, 0), chunk=4, limit=24, seed=1, how=how)
    new_NT = more.mask_NT.clone()
    new_NT[:, : begun.mask_NT.shape[1]] &= ~begun.mask_NT
    assert new_NT.any()
    with torch.no_grad():
        now_NT = forward(case.policy.model, more, 0.7).logp_NT
    assert float((now_NT - more.sampler_NT).abs()[new_NT].max()) < EXACT


def test_the_probe_catches_a_tied_head_that_kept_its_old_pack(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build multiplies by a packed copy of the head's weight; with tied embeddings nothing packs it anew but our backend."""
    from grpo_repro.rollout import vllm_weights

    assert case.policy.model.config.tie_word_embeddings
    monkeypatch.setattr(vllm_weights, "repack_tied_heads", lambda model: None)
    moved(case.policy)
    with pytest.raises(EngineError, match=r"after sync \d+ the engine vllm does not draw from the policy: .* mean \|Δlogp\|"):
        case.checked.sync(case.policy)
    monkeypatch.undo()
    case.checked.sync(case.policy)


def test_keys_of_the_old_weights_are_thrown_away(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineError, match="did not empty its prefix cache"):
        case.engine.sync(case.policy)


def test_weights_of_another_shape_are_refused(case: Case) -> None:
    other = policies.tiny(SYMBOLS, heads=2, ffn=96)
    if len(case.prompts[0].tokens) > 20:
        pytest.skip("once is enough, and it leaves the engine broken")
    with pytest.raises(EngineError, match="did not take the policy's new weights"):
        case.engine.sync(other)
    case.engine.close()
    case.engine = vllm.opened(case.policy, context=64, dtype="float32", memory=0.25)
    case.checked = Verified(case.engine, case.prompts, 0.7, "float32")


def test_heads_that_vllm_does_not_take_are_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("a limit of the CPU build")
    with pytest.raises(UserError, match=r"heads have 16 dimensions.*write engine: decoder"):
        vllm.opened(policies.tiny(SYMBOLS), context=20)


def test_the_process_is_left_as_it_was(case: Case) -> None:
    """vLLM's start sets threads, seeds and its environment; ours are afterwards what they were."""
    threads, random = torch.get_num_threads(), torch.random.get_rng_state()
    environment = dict(os.environ)
    case.draws(1, limit=2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), random)
    assert {k for k in environment if k in vllm.ENVIRONMENT} == {k for k in os.environ if k in vllm.ENVIRONMENT}
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


# --- in the loop, and over HTTP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policy") / "small"
    policies.save(model_of("small"), made)
    return made


def rows_of(folder: Path, changes: dict[str, Any]) -> list[dict[str, float]]:
    base = {
        "name": "test",
        "policy": {"name": str(folder)},
        "task": "short",
        "objective": {"preset": "grpo", "reward": {"name": "coin", "p": 0.5}},
        "rollout": {"group_size": 4, "prompts": 3},
        "scale": {"steps": 2, "eval_prompts": 6, "lr": 3e-3, "warmup": 0},
        "machine": {"engine": "vllm", "vllm": {"dtype": "float32", "memory": 0.25}},
    }
    run = parse_run(merged(base, changes), "test")
    return list(train.train(run, *start.load(run, paths.cache())))


def trained_well(rows: list[dict[str, float]], bound: float) -> None:
    assert len(rows) == 3
    assert "heldout/accuracy" in rows[-1]
    for row in rows[:-1]:
        assert row["sampler/probe"] < bound
        assert row["sampler/difference"] < bound, "the second step's too: the weights are the updated ones"
        assert row["update/norm"] > 0


def test_two_steps_of_training_and_the_same_again(folder: Path) -> None:
    rows = rows_of(folder, {})
    trained_well(rows, EXACT)
    again = rows_of(folder, {})
    assert [row.get("reward") for row in again] == [row.get("reward") for row in rows]
    assert [row.get("length") for row in again] == [row.get("length") for row in rows]


def test_two_steps_of_training_smollm2() -> None:
    """In bfloat16, the engine's usual dtype: the mismatch is measured, not hidden."""
    changes = {
        "policy": {"name": "smollm2"},
        "task": "chain_sum",
        "rollout": {"group_size": 4, "prompts": 2, "limit": 12},
        "scale.eval_prompts": 2,
        "scale.lr": 1e-5,
        "machine.vllm": {"dtype": "bfloat16", "memory": 0.25},
    }
    rows = rows_of(Path("unused"), changes)
    trained_well(rows, 0.1)
    assert rows[0]["sampler/difference"] > 1e-4


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of vLLM as server.py says it is started (`vllm serve` needs a name that the CPU build's package lacks)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    words = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "64"]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--kv-cache-memory-bytes", str(2**27)]
    words += ["--weight-transfer-config", json.dumps({"backend": plugin.BACKEND}), "--enforce-eager"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        started = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=os.environ | environment,
            stdout=out,
            stderr=out,
        )
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(300):
            assert started.poll() is None, log.read_text()[-3000:]
            try:
                direct.open(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        started.terminate()
        started.wait(60)


def test_a_server_draws_syncs_and_is_checked(url: str, folder: Path) -> None:
    policy = policies.pretrained(folder)
    prompts = prompts_of(policy, "small")
    with closing(server.opened(url, policy, context=40)) as engine:
        first = sample(policy, prompts, 4, limit=16, seed=1, step=0, temperature=0.7, engine=engine)
        assert agreement(policy, first, 0.7).largest < EXACT
        again = sample(policy, prompts, 4, limit=16, seed=1, step=0, temperature=0.7, engine=engine)
        assert torch.equal(again.response_NT, first.response_NT)
        moved(policy, 0.2)
        checked = Verified(engine, prompts, 0.7, "float32")
        checked.sync(policy)
        after = sample(policy, prompts, 4, limit=16, seed=1, step=0, temperature=0.7, engine=engine)
        assert agreement(policy, after, 0.7).largest < EXACT
        assert agreement(policy, first, 0.7).mean > 1e-3
        with pytest.raises(UserError, match="whose tokenizer spells"):
            server.opened(url, policies.tiny("+0123456789-*=.", heads=2), context=40)
        with pytest.raises(UserError, match="holds 64 tokens"):
            server.opened(url, policy, context=65)


def test_two_steps_of_training_against_a_server(url: str, folder: Path) -> None:
    trained_well(rows_of(folder, {"machine.server": url}), EXACT)


def test_a_server_that_got_other_weights_half_way_is_refused(url: str, folder: Path) -> None:
    """The last test of the server: what it holds afterwards is undefined."""
    policy = policies.pretrained(folder)
    with closing(server.opened(url, policy, context=40)) as engine, pytest.raises(EngineError, match="arrived only in part"):
        engine.sync(policies.tiny(SYMBOLS, heads=2, ffn=96))
