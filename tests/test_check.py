"""Every pair of DESIGN's list is warned about, in a sentence that names both knobs; sound objectives are not."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_repro.check import check
from grpo_repro.config import Rollout, Sampler, build_objective
from grpo_repro.types import UserError

SEVERAL = {"updates": 2}


def checked(objective: dict[str, Any], rollout: dict[str, Any]) -> list[str]:
    """Of an objective with a rollout and, under its key, a sampler."""
    sampler = Sampler(**rollout.get("sampler", {}))
    return check(build_objective(objective), Rollout(**{k: v for k, v in rollout.items() if k != "sampler"}), sampler)


@pytest.mark.parametrize(
    ("objective", "rollout", "says"),
    [
        (
            {"preset": "gspo", "aggregation": "token_mean"},
            {},
            r"① ratio sequence gives a response one ratio, so ④ aggregation token_mean",
        ),
        ({"preset": "gspo", "aggregation": "constant_length"}, {}, r"① ratio sequence .* constant_length"),
        ({"ratio": "none", "clip": "ppo"}, {}, r"① ratio none is always 1, so ② clip ppo never acts"),
        ({"ratio": "none"}, SEVERAL, r"① ratio none is right on-policy only, but a rollout is used for 2 updates"),
        ({"ratio": "none"}, {"minibatches": 4}, r"used for 4 updates"),
        ({"ratio": "none"}, {"chunk": 8}, r"① ratio none .* but responses are finished under newer weights: use"),
        (
            {"ratio": "none"},
            {"sampler": {"staleness": 2}},
            r"① ratio none .* but the weights that draw are up to 2 steps old: use",
        ),
        (
            {"ratio": "none"},
            {"sampler": {"every": 4}, **SEVERAL},
            r"for 2 updates, and the weights that draw are up to 3 steps old",
        ),
        ({}, {"anchor": "proximal", "sampler": {"staleness": 1}}, r"anchor proximal: .* 1 steps old, and nothing weighs that"),
        (
            {},
            {"anchor": "sampler", "sampler": {"weights": {"name": "quantised", "bits": 3}}},
            r"anchor sampler with sampler.weights quantised: ① ratio counts the mismatch",
        ),
        ({"advantage": "gae", "aggregation": "balanced"}, {}, r"③ advantage gae differs within a response, but ④ balanced"),
        (
            {"advantage": "gae", "ratio": "sequence"},
            {},
            r"③ advantage gae differs by token, but ① ratio sequence .* use sequence_token",
        ),
        ({"advantage": "process_reward", "gate": ["off_policy"]}, {}, r"③ advantage process_reward .* the gate off_policy"),
        ({"kl": {"name": "k1", "beta": 0.1}}, {}, r"⑤ kl k1 in the loss has zero expected gradient"),
        ({"preset": "grpo"}, {}, r"⑤ kl k3 in the loss has the gradient of the forward KL"),
        ({"kl_in_reward": {"name": "k1", "beta": 0.1}}, {}, r"③ advantage group_zscore .* with ⑤ k1 in the reward .* ±.7"),
        (
            {"advantage": "pass_at_k", "kl_in_reward": {"name": "k1", "beta": 0.1}},
            {},
            r"③ advantage pass_at_k reads the reward alone, so ⑤ k1 in the reward has no effect",
        ),
        ({"preset": "gspo", "clip": {"name": "ppo", "eps_low": 0.2, "eps_high": 0.2}}, {}, r"width 0.2 on ① ratio sequence"),
        (
            {"clip": {"name": "ppo", "eps_low": 3e-4, "eps_high": 4e-4}},
            {},
            r"width 0.0003 on token ratios cuts nearly every token",
        ),
        ({}, {"group_size": 1}, r"group_size 1 leaves ③ advantage group_zscore nothing to compare"),
        ({"correction": "truncate"}, {"anchor": "sampler"}, r"① correction truncate .* rollout.anchor makes them one"),
        ({"correction": "mask"}, {"top_p": 0.9, "keep_support": False}, r"① correction mask with top-p or top-k"),
        ({}, {"top_p": 0.9, "keep_support": False}, r"⑥ top-p or top-k without rollout.keep_support: .* ① ratio token"),
        (
            {"advantage": "batch_zscore", "ratio": "sequence", "kl_in_reward": {"name": "k1", "beta": 0.1}},
            {},
            r"③ advantage batch_zscore differs by token, but ① ratio sequence",
        ),
        ({"step": "trpo"}, SEVERAL, r"② step trpo .* the first of 2 updates leaves little"),
        ({"step": "trpo", "advantage": "gae"}, {}, r"③ advantage gae trains a critic, but ② step trpo .* critic.lr is not used"),
        ({"clip": "kl_penalty"}, {}, r"② clip kl_penalty adapts β to nats a token, but ④ sequence_mean"),
        ({"step": "trpo", "clip": "ppo"}, {}, r"② step trpo has a trust region of its own"),
    ],
)
def test_a_pair_that_is_not_what_it_looks_like(objective: dict[str, Any], rollout: dict[str, Any], says: str) -> None:
    import re

    told = checked(objective, rollout)
    assert any(re.search(says, sentence) for sentence in told), told
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in told)


@pytest.mark.parametrize(
    ("objective", "rollout"),
    [
        ({"preset": "grpo", "kl": "none"}, SEVERAL),
        ({"preset": "dr_grpo"}, SEVERAL),
        ({"preset": "gspo"}, SEVERAL),
        ({"preset": "rloo"}, {}),
        ({"preset": "grpo", "kl": {"name": "k2", "beta": 0.04}}, {}),
        ({"kl": {"name": "k3", "beta": 0.0}}, {}),
        ({"correction": "truncate"}, {"top_p": 0.9}),
        ({"correction": "truncate"}, {"anchor": "proximal", "sampler": {"staleness": 2}}),
        ({}, {"sampler": {"staleness": 2, "weights": "quantised"}}),
        ({}, {"anchor": "proximal"}),
        ({"clip": "kl_penalty", "aggregation": "token_mean"}, SEVERAL),
        ({"step": "trpo"}, {}),
        ({"advantage": "batch_zscore", "ratio": "sequence", "clip": "none"}, {}),
        ({"advantage": "gae", "ratio": "sequence_token", "aggregation": "sequence_mean"}, {}),
    ],
)
def test_a_sound_objective_is_not_warned_about(objective: dict[str, Any], rollout: dict[str, Any]) -> None:
    assert checked(objective, rollout) == []


@pytest.mark.parametrize(
    ("rollout", "objective", "pair"),
    [
        ({"chunk": 4, "extra": 2}, {}, "rollout.chunk does not go together with extra"),
        ({"chunk": 4}, {"sampling": "dynamic"}, "rollout.chunk does not go together with dynamic sampling"),
        ({"extra": 4}, {"sampling": "dynamic"}, "rollout.extra does not go together with dynamic sampling"),
    ],
)
def test_ways_of_sampling_that_exclude_each_other(rollout: dict[str, Any], objective: dict[str, Any], pair: str) -> None:
    from grpo_repro.config import parse_run

    with pytest.raises(UserError, match=pair):
        parse_run({"name": "x", "task": "short", "rollout": rollout, "objective": objective}, "x.yaml")
