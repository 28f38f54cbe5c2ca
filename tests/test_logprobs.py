"""Teacher-forced log-probs: value and gradient against plain autograd, and that padding and masks change nothing."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Gemma2Config, Gemma2ForCausalLM

from grpo_repro import layers, logprobs
from grpo_repro.logprobs import exact_kl, forward, log_distributions, logprobs_from_logits, padded_batches, trim
from grpo_repro.policy import tiny
from grpo_repro.rollout import sample
from grpo_repro.types import Rollout

ARCHITECTURES = ("llama", "llama_biased", "qwen2", "qwen3")


def ragged(name: str, dtype=torch.float32, temperature=0.8, seed=0) -> tuple[torch.nn.Module, Rollout]:
    policy = models.random_policy(name)
    r = sample(policy, models.prompts(3, 7, 1), 4, limit=9, temperature=temperature, seed=seed, step=0)
    assert temperature == 0 or len(set(r.length_N.tolist())) > 2  # ragged, or little is tested
    return layers.swap(policy.model.to(dtype), dtype), r  # in fp64 transformers' own norms round to fp32


def weights_of(r: Rollout) -> torch.Tensor:
    """An upstream gradient, different at each token."""
    return torch.randn(r.mask_NT.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model, scalar):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(scalar, list(model.parameters())), strict=True))


def assert_same_gradients(got, expected, tolerance):
    scale = max(g.abs().max().item() for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name] / scale, gradient / scale, atol=tolerance, rtol=0, msg=name)


@pytest.fixture(params=["small", "chunked"])
def head(request, monkeypatch):
    """Both ways through the head, whatever the vocabulary."""
    if request.param == "chunked":
        monkeypatch.setattr(logprobs, "SMALL_VOCABULARY", 2)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_value_and_gradient_equal_plain_autograd_row_by_row(head, name, dtype, tolerance):
    model, r = ragged(name, dtype)
    up = weights_of(r).to(dtype)
    now = forward(model, r, 0.8, chunk=5)
    assert now.logp_NT.dtype == dtype
    rows = models.plain_logp(model, r, 0.8)
    plain = sum((up[n, : len(row)] * row).sum() for n, row in enumerate(rows))
    for n, row in enumerate(rows):
        torch.testing.assert_close(now.logp_NT[n, : len(row)], row, atol=tolerance, rtol=0)
    assert_same_gradients(gradients(model, (up * now.logp_NT).sum()), gradients(model, plain), tolerance)


def test_a_bias_in_the_head_has_its_gradient(head):
    model, r = ragged("llama_biased", torch.float64)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, models.V, dtype=torch.float64))
    up = weights_of(r)
    plain = sum((up[n, : len(row)] * row).sum() for n, row in enumerate(models.plain_logp(model, r, 0.8)))
    expected = gradients(model, plain)
    assert expected["lm_head.bias"].abs().max() > 0.1
    assert_same_gradients(gradients(model, (up * forward(model, r, 0.8, chunk=5).logp_NT).sum()), expected, 1e-11)


def test_entropy_is_that_of_the_distribution_at_the_temperature(head):
    model, r = ragged("qwen2", torch.float64)
    entropy_NT = forward(model, r, 0.8, entropy=True, chunk=7).entropy_NT
    p_NTV = log_distributions(model, r, 0.8).exp()
    expected = torch.distributions.Categorical(probs=p_NTV / p_NTV.sum(-1, keepdim=True)).entropy()
    torch.testing.assert_close(entropy_NT, expected.masked_fill(~r.mask_NT, 0.0), atol=1e-12, rtol=0)
    assert not entropy_NT.requires_grad
    assert forward(model, r, 0.8).entropy_NT is None


def test_log_probs_are_those_the_sampler_recorded(head):
    model, r = ragged("llama")
    torch.testing.assert_close(forward(model, r, 0.8).logp_NT, r.sampler_NT, atol=2e-5, rtol=0)
    assert (forward(model, r, 1.0).logp_NT - r.sampler_NT).abs().max() > 0.05  # the temperature matters


def test_greedy_rollouts_are_scored_at_temperature_one(head):
    model, r = ragged("llama", temperature=0.0)
    torch.testing.assert_close(forward(model, r, 0.0).logp_NT, r.sampler_NT, atol=2e-5, rtol=0)


def test_masked_positions_are_exactly_zero_in_value_and_gradient(head):
    """A token in the middle that the environment inserted: it is seen as context but not scored."""
    model, r = ragged("qwen3", torch.float64)
    inserted = replace(r, mask_NT=r.mask_NT & (torch.arange(r.mask_NT.shape[1]) != 1))
    now = forward(model, inserted, 0.8, entropy=True)
    assert (now.logp_NT[~inserted.mask_NT] == 0).all()
    assert (now.entropy_NT[~inserted.mask_NT] == 0).all()
    torch.testing.assert_close(now.logp_NT, forward(model, r, 0.8).logp_NT.masked_fill(~inserted.mask_NT, 0.0))
    up = weights_of(r)
    poisoned = up.masked_fill(~inserted.mask_NT, 1e30)
    clean = gradients(model, (up * forward(model, inserted, 0.8).logp_NT).sum())
    dirty = gradients(model, (poisoned * forward(model, inserted, 0.8).logp_NT).sum())
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_a_rollout_without_live_tokens_gives_zeros_and_zero_gradient(head):
    model, r = ragged("llama")
    dead = replace(r, mask_NT=torch.zeros_like(r.mask_NT))
    now = forward(model, dead, 1.0, entropy=True)
    assert now.logp_NT.shape == r.mask_NT.shape
    assert (now.logp_NT == 0).all()
    assert all((g == 0).all() for g in gradients(model, now.logp_NT.sum()).values())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_padding_and_batch_mates_change_nothing_case_M04(head, name):
    model, r = ragged(name, torch.float64)
    whole = forward(model, r, 0.8).logp_NT
    for n in range(len(r.length_N)):
        torch.testing.assert_close(forward(model, r.rows(torch.tensor([n])), 0.8).logp_NT[0], whole[n], atol=1e-12, rtol=0)
    pad = torch.nn.functional.pad
    wide = replace(
        r,
        prompt_NP=pad(r.prompt_NP, (3, 0), value=4),
        **{name: pad(getattr(r, name), (0, 2)) for name in ("response_NT", "mask_NT", "sampler_NT")},
    )
    torch.testing.assert_close(forward(model, wide, 0.8).logp_NT, pad(whole, (0, 2)), atol=1e-12, rtol=0)


def test_the_end_token_learns_where_it_is_also_the_padding():
    """As in SmolLM2, pad = eos: transformers would zero the gradient of that embedding row."""
    policy = tiny()
    end = min(policy.end_ids)
    policy.model.config.tie_word_embeddings = False
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().clone())  # or the head hides it
    r = sample(policy, models.prompts(4), 2, limit=4, temperature=1.0, seed=0, step=0)
    response_NT = r.response_NT.clone()
    response_NT[:, 0] = end  # the end token as an input, as in a chat's earlier turns
    r = replace(r, response_NT=response_NT, length_N=torch.full((2,), 4), mask_NT=torch.ones(2, 4, dtype=torch.bool))
    gradient = gradients(policy.model, forward(policy.model, r, 1.0).logp_NT.sum())["model.embed_tokens.weight"]
    assert gradient[end].abs().max() > 1e-4


def test_small_vocabularies_are_twice_differentiable():
    """A Fisher-vector product (TRPO): ∇(v·∇f) against a central difference of ∇f along v."""
    model, r = ragged("llama", torch.float64)
    weight = model.model.layers[1].mlp.down_proj.weight
    v = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def slope(graph: bool) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.grad(forward(model, r, 1.0).logp_NT.sum(), weight, create_graph=graph)[0]

    product = torch.autograd.grad((slope(True) * v).sum(), weight)[0]
    with torch.no_grad():
        weight += 1e-3 * v
    up = slope(False)
    with torch.no_grad():
        weight -= 2e-3 * v
    difference = (up - slope(False)) / 2e-3  # the model's norms round to fp32: about 1e-3 of noise here
    torch.testing.assert_close(product, difference, atol=0.01 * difference.abs().max().item(), rtol=0)


def test_under_autocast_the_chunked_head_agrees_with_the_small_one(monkeypatch):
    model, r = ragged("llama_biased")
    exact = forward(model, r, 1.0).logp_NT
    with torch.autocast("cpu", dtype=torch.bfloat16):
        small = forward(model, r, 1.0).logp_NT
        monkeypatch.setattr(logprobs, "SMALL_VOCABULARY", 2)
        chunked = forward(model, r, 1.0, chunk=5).logp_NT
    assert chunked.dtype == torch.float32
    assert (chunked - exact).abs().max() > 0  # autocast was on
    torch.testing.assert_close(chunked, small)
    assert_same_gradients(gradients(model, chunked.sum()), gradients(model, small.sum()), 0.02)


def test_heads_that_change_the_logits_are_honoured():
    """Gemma 2 caps its logits with a tanh: its own forward is used."""
    config = Gemma2Config(**models.SIZES, head_dim=16, final_logit_softcapping=0.5, sliding_window=64)
    with torch.random.fork_rng(devices=[]):
        model = Gemma2ForCausalLM(config).eval()
    r = ragged("llama")[1]
    now = forward(model, r, 0.8).logp_NT
    for n, row in enumerate(models.plain_logp(model, r, 0.8)):
        torch.testing.assert_close(now[n, : len(row)], row, atol=2e-5, rtol=0)


# --- exact KL


def test_exact_kl_and_its_gradient_equal_plain_autograd():
    model, r = ragged("qwen2", torch.float64)
    other = models.random_model("qwen2", seed=9, dtype=torch.float64)
    logq = log_distributions(other, r, 0.8)
    assert not logq.requires_grad
    now = forward(model, r, 0.8, exact_ref=logq)
    expected = torch.zeros_like(now.logp_NT)
    total = 0.0
    for n, length in enumerate(r.length_N.tolist()):
        prompt = torch.tensor(r.prompts[int(r.group_N[n])].tokens)
        tokens = torch.cat([prompt, r.response_NT[n, :length]])[None]
        p, q = (torch.log_softmax(m(tokens).logits[0, len(prompt) - 1 : -1] / 0.8, -1) for m in (model, other))
        row = torch.nn.functional.kl_div(q.detach(), p, log_target=True, reduction="none").sum(-1)
        expected[n, :length] = row.detach()
        total = total + row.sum()
    torch.testing.assert_close(now.exact_kl_NT, expected, atol=1e-11, rtol=0)
    assert expected.max() > 0.1
    assert_same_gradients(gradients(model, now.exact_kl_NT.sum()), gradients(model, total), 1e-11)
    logp = log_distributions(model, r, 0.8)
    torch.testing.assert_close(exact_kl(logp, logq, r.mask_NT), expected, atol=1e-11, rtol=0)


def test_exact_kl_by_hand():
    """KL((½, ½, 0)‖(¼, ½, ¼)) = ½ ln 2; a token of zero probability contributes nothing; masked NaN stays out."""
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2], dtype=torch.float64).log()
    q = torch.tensor([[[0.25, 0.5, 0.25]] * 2], dtype=torch.float64).log()
    p[0, 1], q[0, 1] = torch.nan, torch.inf
    p.requires_grad_()
    kl = exact_kl(p, q, torch.tensor([[True, False]]))
    torch.testing.assert_close(kl, torch.tensor([[0.34657359027997264, 0.0]], dtype=torch.float64))
    kl.sum().backward()
    assert torch.isfinite(p.grad).all()
    assert (p.grad[0, 1] == 0).all()


# --- from logits


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_masked_logits_touch_neither_value_nor_gradient(poison):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    token, mask = torch.tensor([[1, 2, -100], [4, -100, -100]]), torch.tensor([[True, True, False], [True, False, False]])
    clean = logits.clone().requires_grad_()
    dirty = logits.masked_fill(~mask[..., None], poison).requires_grad_()
    values = [logprobs_from_logits(x, token, mask, 0.7) for x in (clean, dirty)]
    assert torch.equal(*values)
    (values[0].sum() + values[1].sum()).backward()
    assert torch.equal(clean.grad, dirty.grad)
    assert (dirty.grad[~mask] == 0).all()
    assert dirty.grad[mask].abs().max() > 0.1


def test_temperature_in_value_and_gradient_case_N11():
    """Logits [2, 1, 0], token 0, T = ½: −0.142932 with gradient [0.2664, −0.2346, −0.0318]."""
    logits = torch.tensor([[[2.0, 1.0, 0.0]]], requires_grad=True)
    value = logprobs_from_logits(logits, torch.tensor([[0]]), torch.tensor([[True]]), 0.5)
    value.sum().backward()
    torch.testing.assert_close(value.item(), -0.142932, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([0.2664, -0.2346, -0.0318]), atol=1e-4, rtol=0)


def test_bf16_logits_are_upcast_before_the_softmax_case_N09():
    logits = (3 * torch.randn(1, 64, 32000, generator=torch.Generator().manual_seed(0))).bfloat16()
    token, mask = torch.zeros(1, 64, dtype=torch.int64), torch.ones(1, 64, dtype=torch.bool)
    value = logprobs_from_logits(logits, token, mask, 1.0)
    exact = torch.log_softmax(logits.double(), -1)[..., 0]
    assert (value.double() - exact).abs().max() < 2e-5


# --- micro-batches


@given(st.lists(st.integers(1, 40), min_size=0, max_size=30), st.integers(1, 200))
def test_padded_batches_cover_every_row_once_within_the_budget(lengths, budget):
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    batches = padded_batches(lengths_N, budget)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * int(lengths_N[batch].max()) <= budget or len(batch) == 1
    again = padded_batches(lengths_N, budget)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_padded_batches_by_hand():
    assert [b.tolist() for b in padded_batches(torch.tensor([5, 2, 9, 2, 5]), 10)] == [[1, 3], [0, 4], [2]]


def test_padded_batches_of_a_rollout_count_the_trimmed_width():
    r = ragged("llama")[1]
    for budget in (16, 40, 1000):
        batches = padded_batches(r, budget)
        assert sorted(torch.cat(batches).tolist()) == list(range(12))
        for batch in batches:
            part = trim(r.rows(batch))
            assert len(batch) * (part.prompt_NP.shape[1] + part.response_NT.shape[1]) <= budget or len(batch) == 1
    assert len(padded_batches(r, 1000)) == 1


def test_trim_removes_only_padding():
    r = ragged("llama")[1]
    part = trim(r.rows(torch.nonzero(r.group_N == 2)[:, 0]))
    assert part.prompt_NP.tolist() == [list(r.prompts[2].tokens)] * 4
    assert part.response_NT.shape == part.mask_NT.shape == part.sampler_NT.shape == (4, int(part.length_N.max()))
    for row, n in enumerate(torch.nonzero(r.group_N == 2)[:, 0].tolist()):
        length = int(r.length_N[n])
        assert part.response_NT[row, :length].tolist() == r.response_NT[n, :length].tolist()
