"""One row without padding, prompts once: the same states and gradients as row by row, whatever is ragged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeConfig

from grpo_repro import layers, logprobs, packed
from grpo_repro.logprobs import forward
from grpo_repro.rollout import sample
from tests import models


def drawn(name: str, group_size: int | list[int] = 4, limit: int = 9):
    policy = models.random_policy(name)
    r = sample(policy, models.prompts(3, 7, 1), group_size, limit=limit, seed=3, step=0)
    return layers.swap(policy.model.double(), torch.float64), r


@pytest.mark.parametrize("name", ["llama", "llama_biased", "llama_yarn", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("size", [4, [1, 5, 3]])
def test_states_and_gradients_are_those_of_padded_rows(name: str, size: int | list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, r = drawn(name, size)
    up = torch.linspace(-1, 1, int(r.mask_NT.sum()) * 32, dtype=torch.float64).view(-1, 32)
    here = packed.hidden(model, r)
    monkeypatch.setattr(packed, "ARCHITECTURES", ())
    rows = logprobs._hidden(model, logprobs.trim(r))
    torch.testing.assert_close(here, rows, atol=1e-10, rtol=0)
    for a, b in zip(
        torch.autograd.grad((up * here).sum(), list(model.base_model.parameters())),
        torch.autograd.grad((up * rows).sum(), list(model.base_model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-9 * float(b.abs().max()) + 1e-12, rtol=0)


def test_every_token_is_computed_once() -> None:
    _, r = drawn("llama")
    lay = packed.layout(r)
    assert lay.token_1S.shape[1] == 3 + 7 + 1 + int((r.length_N - 1).sum())  # prompts once, last tokens never
    assert lay.token_1S[0, :11].tolist() == [t for p in r.prompts for t in p.tokens]
    first = lay.position_1S[0, 11 : 11 + int(r.length_N[0]) - 1].tolist()
    assert first == list(range(3, 3 + len(first)))  # a response goes on where its prompt ends


def test_rows_in_any_order_and_of_some_groups() -> None:
    model, r = drawn("llama")
    index = torch.tensor([9, 2, 7, 0, 5])
    whole = forward(model, r, 1.0).logp_NT[index]
    part = forward(model, r.rows(index), 1.0).logp_NT
    torch.testing.assert_close(part, whole[:, : part.shape[1]], atol=1e-10, rtol=0)


def test_responses_of_one_token() -> None:
    model, r = drawn("llama", limit=1)
    assert r.response_NT.shape[1] == 1
    rows = models.plain_logp(model, r, 1.0)
    torch.testing.assert_close(forward(model, r, 1.0).logp_NT, torch.stack(rows), atol=1e-10, rtol=0)


def test_a_token_of_the_environment_is_seen_but_not_predicted() -> None:
    model, r = drawn("llama", limit=9)
    n = int(r.length_N.argmax())
    masked = replace(r, mask_NT=r.mask_NT.clone())
    masked.mask_NT[n, 1] = False
    before, after = forward(model, r, 1.0).logp_NT, forward(model, masked, 1.0).logp_NT
    assert after[n, 1] == 0
    assert before[n, 1] != 0
    after[n, 1] = before[n, 1]
    torch.testing.assert_close(after, before, atol=1e-10, rtol=0)


def test_micro_batches_hold_every_row_once_within_the_budget_groups_together() -> None:
    _, r = drawn("llama", [4, 4, 4])
    for budget in (1, 13, 20, 45, 1000):
        parts = packed.batches(r, budget)
        assert sorted(n for part in parts for n in part.tolist()) == list(range(12))
        for part in parts:
            here = r.rows(part)
            prompts = sum(len(r.prompts[g].tokens) for g in torch.unique(here.group_N).tolist())
            assert len(part) == 1 or int(here.length_N.sum()) + prompts <= budget
        order = [int(r.group_N[n]) for part in parts for n in part.tolist()]
        assert order == sorted(order)
    assert len(packed.batches(r, 1000)) == 1


def test_micro_batches_add_up_to_the_whole() -> None:
    model, r = drawn("qwen3")
    whole = forward(model, r, 0.7).logp_NT
    for part in packed.batches(r, 20):
        got = forward(model, r.rows(part), 0.7).logp_NT
        torch.testing.assert_close(got, whole[part][:, : got.shape[1]], atol=1e-10, rtol=0)


def test_a_mixture_of_experts_is_packed_too() -> None:
    sizes = {**models.SIZES, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, decoder_sparse_step=1, mlp_only_layers=[])).eval()
    _, r = drawn("llama")
    assert packed.supports(model)
    rows = models.plain_logp(model, r, 1.0)
    got = forward(model, r, 1.0).logp_NT
    for n, row in enumerate(rows):
        torch.testing.assert_close(got[n, : len(row)], row, atol=1e-4, rtol=0)


def test_padded_rows_are_attended_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once attached, transformers' own calls (generate, padded batches) still run its scaled dot-product attention, bit for bit."""
    model = models.random_model("llama")
    ids = torch.arange(24).view(2, 12) % models.V
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    before = model(ids, attention_mask=mask).logits
    packed.attach(model)
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert packed.ATTENTION not in str(model.config.to_dict())  # nothing of it is saved


def test_gradient_checkpointing_sees_the_same_layout() -> None:
    """Layers that are computed again in the backward pass attend to the packed row as they did in the forward pass."""
    model, r = drawn("llama")
    plain = torch.autograd.grad(forward(model, r, 1.0).logp_NT.sum(), list(model.parameters()))
    layers.checkpointed(model)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        logp_NT = forward(model, r, 1.0).logp_NT
    few = sum(saved)
    for a, b in zip(torch.autograd.grad(logp_NT.sum(), list(model.parameters())), plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)
    for layer in model.model.layers:
        layer.training = False
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        forward(model, r, 1.0)
    assert few < 0.5 * sum(saved)


def test_sliding_windows_are_refused() -> None:
    model = models.random_model("mistral")
    assert packed.supports(model)
    model.config.sliding_window = 4
    assert not packed.supports(model)
