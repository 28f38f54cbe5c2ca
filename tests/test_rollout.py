"""The sampler: its numbers, its engines, and that neither batching nor dropping rows changes what is drawn."""

from __future__ import annotations

from functools import partial

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_repro import rollout as rollouts
from grpo_repro.policy import Policy, tiny
from grpo_repro.rollout import decoder, sample
from grpo_repro.types import NonFinite, Prompt, UserError
from grpo_repro.uniform import DATA, REWARD, TOKENS, draw, uniform

WORD = 2**64
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def splitmix64(state: int) -> int:
    """The first output of SplitMix64 from a state (Steele, Lea and Flood 2014), in Python's unbounded integers."""
    h = (state + 0x9E3779B97F4A7C15) % WORD
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) % WORD
    return h ^ (h >> 31)


def slow_uniform(*index: int) -> float:
    h = 0
    for i in index:
        h = splitmix64(h ^ (i % WORD))
    return (h >> 11) / 2**53


# --- indexed uniforms


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6))
def test_uniform_is_the_integer_hash(index):
    assert uniform(*index).item() == slow_uniform(*index)
    assert uniform(*map(torch.tensor, index)).item() == slow_uniform(*index)


def test_splitmix_matches_its_published_first_output():
    """Seeded with 1234567 it first returns 6457827717110365317 (the worked example of Rosetta Code)."""
    assert splitmix64(1234567) == 6457827717110365317


def test_uniform_broadcasts_and_separates_streams():
    u = uniform(3, TOKENS, 1, torch.arange(4)[:, None], 2, torch.arange(5))
    assert u.shape == (4, 5)
    assert u.dtype == torch.float64
    assert u[2, 3].item() == slow_uniform(3, TOKENS, 1, 2, 2, 3)
    assert len({uniform(3, stream, 1, 0, 0, 0).item() for stream in (TOKENS, REWARD, DATA)}) == 3


@pytest.mark.parametrize("axis", range(6))
def test_uniform_is_uniform_and_neighbours_are_independent(axis):
    """65,536 consecutive indices along each axis: moments, χ² over 256 cells, correlation at lags 1 to 3, low bits."""
    index = [11, 0, 5, 7, 3, 2]
    u = uniform(*[torch.arange(65536) if i == axis else value for i, value in enumerate(index)])
    assert ((u >= 0) & (u < 1)).all()
    assert abs(u.mean().item() - 0.5) < 4 * (1 / 12 / 65536) ** 0.5
    assert u.var().item() == pytest.approx(1 / 12, rel=0.02)
    assert stats.chisquare(torch.histc(u, 256, 0, 1).numpy()).pvalue > 1e-4
    low_bits = ((u * 2**53).long() % 256).bincount(minlength=256)
    assert stats.chisquare(low_bits.numpy()).pvalue > 1e-4
    for lag in (1, 2, 3):
        assert abs(torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1].item()) < 4 / 256


# --- drawing from logits


def test_draw_has_the_frequencies_of_the_softmax_at_the_temperature():
    logits = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 0.0, -3.0])
    p = torch.softmax(logits.double() / 0.7, -1)
    token, logp, _ = draw(logits.expand(20000, 6), uniform(0, TOKENS, 0, 0, torch.arange(20000), 0), 0.7)
    seen = token.bincount(minlength=6)
    assert seen[3] == 0
    live = p > 0
    assert stats.chisquare(seen[live].numpy(), 20000 * p[live].numpy()).pvalue > 1e-3
    torch.testing.assert_close(logp, p.log()[token].float())


def test_draw_by_hand():
    """softmax(ln 1, ln 2, ln 1) = ¼, ½, ¼: the distribution function steps at .25 and .75 and the step belongs to the right."""
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    token, _, _ = draw(torch.tensor([1.0, 2.0, 1.0]).log().expand(6, 3), u, 1.0)
    assert token.tolist() == [0, 0, 1, 1, 2, 2]


def test_over_a_large_vocabulary_the_search_in_two_levels_finds_the_same_token() -> None:
    """Against one fp64 sum over 20,000 tokens: a spread distribution, blocks without any mass, and the ends of [0, 1)."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2000, 20000, generator=generator)
    logits[::2, 300:9000] = -torch.inf
    u = torch.rand(2000, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2.0**-53
    p = torch.softmax(logits, -1)
    cdf = p.double().cumsum(-1)
    expected = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]
    token, _, _ = draw(logits, u, 1.0)
    assert torch.equal(token, expected)
    assert bool((p.gather(-1, token[:, None]) > 0).all())
    assert (token > 9000).any()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_draw_never_returns_a_token_of_zero_probability(u):
    """Also where the fp32 probabilities sum to less than u."""
    logits = torch.full((200, 50), -torch.inf)
    logits[:, [7, 19, 30]] = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    assert (torch.softmax(logits, -1).double().sum(-1) < 1 - 1e-8).any()
    token, logp, _ = draw(logits, torch.full((200,), u, dtype=torch.float64), 1.0)
    assert set(token.tolist()) <= {7, 19, 30}
    assert torch.isfinite(logp).all()


def test_draw_reaches_tokens_rarer_than_fp32_can_add():
    """p = 7.6e-10 for the second token: 1 + p = 1 in fp32."""
    u = torch.tensor([1 - 1e-9, 1 - 1e-10], dtype=torch.float64)
    assert draw(torch.tensor([[0.0, -21.0]] * 2), u, 1.0)[0].tolist() == [0, 1]


def test_temperature_scales_the_recorded_log_prob_case_N11():
    """Logits [2, 1, 0], T = ½: log-prob of token 0 is −0.142932, not −0.407606."""
    _, logp, _ = draw(torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, dtype=torch.float64), 0.5)
    assert logp.item() == pytest.approx(-0.142932, abs=1e-6)


def test_temperature_zero_is_argmax_case_N13():
    token, logp, _ = draw(torch.tensor([[1.0, -torch.inf], [0.0, 3.0]]), torch.full((2,), 0.99, dtype=torch.float64), 0.0)
    assert token.tolist() == [0, 1]
    torch.testing.assert_close(logp, torch.tensor([0.0, -0.0485873]))


# --- engines


def same(a, b) -> None:
    assert torch.equal(a.response_NT, b.response_NT)
    assert torch.equal(a.length_N, b.length_N)
    assert torch.equal(a.cut_N, b.cut_N)
    torch.testing.assert_close(a.sampler_NT, b.sampler_NT, atol=2e-5, rtol=0)


def draws(policy: Policy, prompts, G=6, **changes):
    return sample(policy, prompts, G, **{"limit": 12, "temperature": 1.0, "seed": 3, "step": 2} | changes)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("engine", ["decoder", "transformers"])
@pytest.mark.parametrize("name", models.CONFIGS)
def test_recorded_log_probs_are_the_models_own(name, engine, temperature):
    policy = models.random_policy(name)
    r = draws(policy, models.prompts(3, 7, 1, 7), temperature=temperature, engine=engine)
    assert len(set(r.length_N.tolist())) > 2  # ragged, or nothing is tested
    with torch.no_grad():
        expected = models.plain_logp(policy.model, r, temperature)
    for n, logp in enumerate(expected):
        torch.testing.assert_close(r.sampler_NT[n, : len(logp)], logp, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_engines_draw_the_same_tokens(name):
    policy = models.random_policy(name)
    prompts = models.prompts(3, 7, 1)
    same(draws(policy, prompts), draws(policy, prompts, engine="transformers"))


def test_transformers_engine_ignores_the_models_generation_config():
    policy = models.random_policy("qwen2")
    before = draws(policy, models.prompts(4), engine="transformers")
    shipped = GenerationConfig(repetition_penalty=3.0, no_repeat_ngram_size=1, suppress_tokens=[1, 2], eos_token_id=5)
    policy.model.generation_config = shipped
    same(draws(policy, models.prompts(4), engine="transformers"), before)
    assert policy.model.generation_config is shipped


def test_a_prompt_draws_the_same_alone_and_in_any_batch():
    policy = models.random_policy("qwen3")
    prompts = models.prompts(3, 8, 5)
    together = draws(policy, prompts)
    for rows in (1, 4, 7):
        same(draws(policy, prompts, batch_rows=rows), together)
    alone = draws(policy, prompts[1:2], first=1)
    T = alone.response_NT.shape[1]
    assert torch.equal(alone.length_N, together.length_N[6:12])
    assert torch.equal(alone.response_NT, together.response_NT[6:12, :T])
    assert not torch.equal(draws(policy, prompts[1:2]).response_NT, alone.response_NT)  # another index, other chance


def test_dropping_finished_rows_changes_nothing(monkeypatch):
    policy = models.random_policy("llama")
    prompts = models.prompts(3, 8, 5)
    dropped = draws(policy, prompts, G=16)
    assert (dropped.length_N < 12).sum() > 10
    monkeypatch.setitem(rollouts.ENGINES, "decoder", partial(decoder.decode, compact=0.0))
    same(draws(policy, prompts, G=16), dropped)


def test_same_seed_gives_the_same_bits_and_another_seed_or_step_does_not():
    policy = models.random_policy("llama")
    one, two = draws(policy, models.prompts(3, 6)), draws(policy, models.prompts(3, 6))
    assert torch.equal(one.response_NT, two.response_NT)
    assert torch.equal(one.sampler_NT, two.sampler_NT)
    for change in ({"seed": 4}, {"step": 3}):
        assert not torch.equal(draws(policy, models.prompts(3, 6), **change).response_NT, one.response_NT)


def test_sampling_leaves_the_global_generator_and_the_gradient_mode_alone():
    state = torch.get_rng_state()
    policy = models.random_policy("llama")
    r = draws(policy, models.prompts(3))
    assert torch.equal(torch.get_rng_state(), state)
    weight = torch.ones(1, requires_grad=True)
    (weight * r.sampler_NT).sum().backward()  # not an inference tensor: it can be saved for a backward pass


def test_weights_are_read_at_each_call():
    policy = models.random_policy("llama")
    before = draws(policy, models.prompts(3))
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight.mul_(-2)
    after = draws(policy, models.prompts(3))
    with torch.no_grad():
        expected = models.plain_logp(policy.model, after, 1.0)
    torch.testing.assert_close(after.sampler_NT[0, : len(expected[0])], expected[0], atol=2e-5, rtol=0)
    assert not torch.equal(before.response_NT, after.response_NT)


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_greedy_repeats_the_argmax(engine):
    policy = models.random_policy("qwen2")
    r = draws(policy, models.prompts(4, 2), G=2, temperature=0.0, engine=engine)
    assert torch.equal(r.response_NT[0], r.response_NT[1])
    tokens = list(r.prompts[0].tokens)
    with torch.no_grad():
        for _ in range(int(r.length_N[0])):
            tokens.append(int(policy.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert r.response_NT[0, : r.length_N[0]].tolist() == tokens[4:]


def test_first_token_frequencies_are_the_models_probabilities():
    policy = models.random_policy("qwen3", seed=5)
    r = draws(policy, models.prompts(5), G=4000, limit=1, temperature=1.3)
    with torch.no_grad():
        p = torch.softmax(policy.model(torch.tensor([r.prompts[0].tokens])).logits[0, -1].double() / 1.3, -1)
    seen, expected = r.response_NT[:, 0].bincount(minlength=models.V).double(), 4000 * p
    often = expected >= 5
    assert often.sum() > 8
    statistic = ((seen - expected) ** 2 / expected)[often].sum().item()
    assert stats.chi2.sf(statistic, int(often.sum())) > 1e-3


# --- the shape of a rollout


def scripted(*rows: list[int]):
    """An engine that returns these tokens, whatever the model says."""

    def engine(model, prompt_MP, prompt_length_M, prompt_N, u_NT, end_V, temperature, top_p, top_k):
        return torch.tensor(rows), torch.full((len(rows), len(rows[0])), -1.0), None

    return engine


@pytest.mark.parametrize(
    ("ends", "row", "length", "cut"),
    [
        ({2, 3}, [5, 3, 0, 0], 2, False),  # case M03: the second end token counts
        ({2}, [5, 3, 0, 0], 4, True),
        ({2}, [5, 6, 2, 2], 3, False),  # case M01: the first end token is kept, though pad = end
        ({2}, [2, 7, 7, 7], 1, False),  # an empty completion
        ({2}, [5, 6, 7, 2], 4, False),  # ends exactly at the limit
        (set(), [5, 6, 7, 2], 4, True),
    ],
)
def test_length_mask_and_cut(monkeypatch, ends, row, length, cut):
    base = models.random_policy("llama")
    policy = Policy(base.model, base.tokenizer, frozenset(ends), "scripted")
    monkeypatch.setitem(rollouts.ENGINES, "scripted", scripted(row))
    r = draws(policy, models.prompts(2), G=1, limit=4, engine="scripted")
    assert r.length_N.tolist() == [length]
    assert r.cut_N.tolist() == [cut]
    assert r.mask_NT.tolist() == [[True] * length]
    assert r.response_NT.tolist() == [row[:length]]


def test_rows_padding_and_groups(monkeypatch):
    policy = models.random_policy("llama")
    monkeypatch.setitem(rollouts.ENGINES, "scripted", scripted([1, 21, 9], [21, 9, 9], [1, 2, 4], [4, 5, 21]))
    r = draws(policy, models.prompts(2, 3), G=2, limit=3, engine="scripted")
    assert r.group_N.tolist() == [0, 0, 1, 1]
    assert r.prompt_NP.tolist() == [[22, 1, 4], [22, 1, 4], [6, 9, 12], [6, 9, 12]]
    assert r.prompt_length_N.tolist() == [2, 2, 3, 3]
    assert r.response_NT.tolist() == [[1, 21, 22], [21, 22, 22], [1, 2, 4], [4, 5, 21]]
    assert r.sampler_NT.tolist() == [[-1, -1, 0], [-1, 0, 0], [-1, -1, -1], [-1, -1, -1]]
    assert r.cut_N.tolist() == [False, False, True, False]


# --- what cannot be done is said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "vlm"}, "decoder, transformers"),
        ({"limit": 60}, "'p0' has 5 tokens.*limit of 60.*context of 64"),
        ({"limit": 0}, "limit"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
    ],
)
def test_bad_arguments_are_named(change, words):
    with pytest.raises(UserError, match=words):
        draws(models.random_policy("llama"), models.prompts(5), **change)


def test_bad_prompts_are_named():
    policy = models.random_policy("llama")
    for tokens, words in (((), "'x' is empty"), ((1, 23), "'x' has token ids outside the 23")):
        with pytest.raises(UserError, match=words):
            draws(policy, [Prompt("x", "", tokens, "")])


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_logits_stop_the_run(engine, bad):
    policy = tiny()
    with torch.no_grad():
        policy.model.model.norm.weight[0] = bad
    with pytest.raises(NonFinite, match="prompt 'p0'"):
        draws(policy, models.prompts(3), engine=engine)


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_a_token_ruled_out_by_minus_infinity_is_fine(engine):
    policy = models.random_policy("llama_biased")
    policy.model.lm_head = torch.nn.Linear(32, models.V)
    with torch.no_grad():
        policy.model.lm_head.bias.zero_()[4] = -torch.inf
    r = draws(policy, models.prompts(3), engine=engine)
    assert not (r.response_NT == 4).any()
    assert torch.isfinite(r.sampler_NT).all()


@pytest.mark.parametrize(
    ("model_class", "config", "words"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**models.SIZES, use_sliding_window=True, max_window_layers=1), "sliding-window"),
        (MistralForCausalLM, MistralConfig(**models.SIZES, sliding_window=4), "sliding-window"),
        (LlamaForCausalLM, LlamaConfig(**models.SIZES, rope_parameters=DYNAMIC), "rotary"),
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**models.SIZES, num_experts=2, moe_intermediate_size=8), "qwen3_moe"),
    ],
)
def test_models_the_decoder_would_get_wrong_are_refused(model_class, config, words):
    base = models.random_policy("llama")
    other = Policy(model_class(config), base.tokenizer, base.end_ids, "other")
    with pytest.raises(UserError, match=f"{words}.*engine: transformers"):
        draws(other, models.prompts(3))


def test_wrapped_layers_are_refused():
    model = models.random_model("qwen2")
    assert decoder.supports(model) is None

    class Quantised(torch.nn.Linear):
        pass

    model.model.layers[2].mlp.down_proj = Quantised(48, 32, bias=False)
    assert "quantised" in decoder.supports(model)
