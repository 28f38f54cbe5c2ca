"""Top-p, top-k, ragged groups, responses finished later, and rollouts put together."""

from __future__ import annotations

import math

import models
import pytest
import torch

from grpo_repro.logprobs import forward
from grpo_repro.policy import tiny
from grpo_repro.rollout import Births, Decoding, join, proceed, sample
from grpo_repro.types import Prompt, UserError
from grpo_repro.uniform import restrict


def logits(*p: float) -> torch.Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [1, 1, 1, 1]),
        (0.8, 0, [1, 1, 0, 0]),  # .5 + .3 reaches .8
        (0.79, 0, [1, 1, 0, 0]),
        (0.81, 0, [1, 1, 1, 0]),
        (0.01, 0, [1, 0, 0, 0]),  # never empty
        (1.0, 1, [1, 0, 0, 0]),
        (1.0, 3, [1, 1, 1, 0]),
        (1.0, 99, [1, 1, 1, 1]),
        (0.6, 2, [1, 0, 0, 0]),  # after top k: .625, .375, and .625 reaches .6
    ],
)
def test_the_support_by_hand(top_p: float, top_k: int, kept: list[int]) -> None:
    assert torch.isfinite(restrict(logits(0.5, 0.3, 0.15, 0.05), 1.0, top_p, top_k)).int().tolist() == [kept]


def test_the_nucleus_is_taken_at_the_temperature() -> None:
    """p ∝ (.5, .3, .15, .05)^(1/T): at T = .5 the squares .25, .09, .0225, .0025 sum to .365, and .25/.365 = .685 reaches .6."""
    assert torch.isfinite(restrict(logits(0.5, 0.3, 0.15, 0.05), 0.5, 0.6, 0)).int().tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
@pytest.mark.parametrize("how", [{"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.9, "top_k": 5}])
def test_the_trainer_renormalises_over_the_sampler_s_support(engine: str, how: dict[str, float]) -> None:
    """CASES S02: with p = [.5, .3, .15, .05] and top_p .8 the ratio of unrestricted log-probs is .8 on-policy; ours is 1."""
    policy = models.random_policy("llama")
    r = sample(policy, models.prompts(2, 3), 6, limit=5, seed=0, step=0, temperature=0.8, engine=engine, **how)
    now = forward(policy.model, r, 0.8, entropy=True)
    assert torch.allclose(now.logp_NT.detach(), r.sampler_NT, atol=2e-5)
    assert torch.isfinite(now.entropy_NT).all()
    plain = r.__class__(**{**vars(r), "support_NTV": None})
    unrestricted = forward(policy.model, plain, 0.8).logp_NT.detach()
    assert float((r.sampler_NT - unrestricted)[r.mask_NT].min()) > 0.01  # the kept mass was well below 1
    drawn = r.support_NTV.gather(-1, r.response_NT.clamp(max=r.support_NTV.shape[-1] - 1)[..., None])[..., 0]
    assert bool(drawn[r.mask_NT].all())


def test_gradient_over_the_support_is_that_of_a_smaller_softmax() -> None:
    policy = models.random_policy("llama")
    r = sample(policy, models.prompts(2), 4, limit=4, seed=0, step=0, top_k=3)
    forward(policy.model, r, 1.0).logp_NT.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("bad", [{"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_a_support_that_makes_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="top_p is above 0 and at most 1, top_k is 0"):
        sample(models.random_policy("llama"), models.prompts(2), 1, limit=2, seed=0, step=0, **bad)


def test_ragged_groups_draw_the_same_members() -> None:
    policy = models.random_policy("llama")
    prompts = models.prompts(2, 3)
    even = sample(policy, prompts, 4, limit=6, seed=3, step=1)
    ragged = sample(policy, prompts, [2, 4], limit=6, seed=3, step=1)
    assert ragged.group_N.tolist() == [0, 0, 1, 1, 1, 1]
    same = even.rows(torch.tensor([0, 1, 4, 5, 6, 7]))
    assert ragged.length_N.tolist() == same.length_N.tolist()
    T = ragged.response_NT.shape[1]
    assert torch.equal(ragged.response_NT, same.response_NT[:, :T])


def test_extra_members_continue_the_count() -> None:
    policy = models.random_policy("llama")
    prompts = models.prompts(2)
    eight = sample(policy, prompts, 8, limit=6, seed=3, step=1)
    late = sample(policy, prompts, 3, limit=6, seed=3, step=1, first_member=5)
    assert late.length_N.tolist() == eight.length_N.tolist()[5:]


def births_of(r: object, step: int) -> Births:
    group_N = r.group_N  # type: ignore[attr-defined]
    member_N = torch.cat([torch.arange(int((group_N == g).sum())) for g in group_N.unique()])
    return Births(torch.full_like(group_N, step), group_N, member_N)


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_a_response_finished_later_under_the_same_weights_is_the_same_response(chunk: int) -> None:
    policy = tiny(seed=1)
    prompts = [Prompt("a", "+1=", policy.encode_chat("+1="), ""), Prompt("b", "-12=", policy.encode_chat("-12="), "")]
    whole = sample(policy, prompts, 5, limit=20, seed=0, step=4)
    begun = sample(policy, prompts, 5, limit=4, seed=0, step=4)
    while bool((begun.cut_N & (begun.length_N < 20)).any()):
        begun = proceed(policy, begun, births_of(begun, 4), chunk=chunk, limit=20, seed=0, how=Decoding())
    assert begun.length_N.tolist() == whole.length_N.tolist()
    assert begun.cut_N.tolist() == whole.cut_N.tolist()
    assert torch.equal(begun.response_NT.masked_fill(~begun.mask_NT, 0), whole.response_NT.masked_fill(~whole.mask_NT, 0))
    assert torch.allclose(begun.sampler_NT, whole.sampler_NT, atol=1e-5)


def test_each_token_keeps_the_log_prob_of_the_weights_that_drew_it() -> None:
    """Two tokens, drawn under two policies: the first log-prob is the first policy's, the second the second's (DESIGN §2)."""
    policy = tiny(seed=1)
    prompts = [Prompt("a", "+1=", policy.encode_chat("+1="), "")]
    begun = sample(policy, prompts, 8, limit=1, seed=0, step=0)
    first = forward(policy.model, begun, 1.0).logp_NT.detach()
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.3)
    done = proceed(policy, begun, births_of(begun, 0), chunk=1, limit=2, seed=0, how=Decoding())
    now = forward(policy.model, done, 1.0).logp_NT.detach()
    assert torch.allclose(done.sampler_NT[:, 0], first[:, 0], atol=1e-6)
    assert not torch.allclose(done.sampler_NT[:, 0], now[:, 0], atol=1e-3)
    two = done.length_N == 2
    assert int(two.sum()) > 3
    assert torch.allclose(done.sampler_NT[two, 1], now[two, 1], atol=1e-5)


def test_joining_keeps_rows_and_renumbers_groups() -> None:
    policy = models.random_policy("llama")
    a = sample(policy, models.prompts(2), 2, limit=3, seed=0, step=0)
    b = sample(policy, models.prompts(3, 4), 2, limit=6, seed=0, step=1)
    both = join([a, b])
    assert both.group_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert len(both.prompts) == 3
    assert both.prompts[both.group_N[4]] == b.prompts[1]
    assert both.mask_NT.sum(1).tolist() == [*a.length_N.tolist(), *b.length_N.tolist()]
    alone = forward(policy.model, b, 1.0).logp_NT.detach()
    together = forward(policy.model, both, 1.0).logp_NT.detach()[2:, : alone.shape[1]]
    assert torch.allclose(alone, together, atol=1e-5)
    more = join([a, a], groups=[a.group_N, a.group_N])
    assert more.group_N.tolist() == [0, 0, 0, 0]
    assert len(more.prompts) == 1


def test_support_survives_joining_and_proceeding() -> None:
    policy = tiny(seed=1)
    prompts = [Prompt("a", "+1=", policy.encode_chat("+1="), "")]
    begun = sample(policy, prompts, 6, limit=2, seed=0, step=0, top_k=4)
    done = proceed(policy, begun, births_of(begun, 0), chunk=3, limit=6, seed=0, how=Decoding(top_k=4))
    both = join([done, begun])
    now = forward(policy.model, both, 1.0).logp_NT.detach()
    assert torch.allclose(now, both.sampler_NT, atol=1e-5)
    assert math.isclose(float(done.support_NTV[done.mask_NT].sum(-1).float().mean()), 4.0)
