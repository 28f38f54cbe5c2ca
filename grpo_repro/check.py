"""Pairs of knobs that do not go together, each with its reason in one sentence. Reads traits and numbers, never names.

Any ① runs with any ②, ③, ④, ⑤; this says where the combination is not what it looks like. A warning, not an error: a study may want it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_repro import knobs
from grpo_repro.config import Rollout, Run, Sampler, distortion
from grpo_repro.objective import Objective
from grpo_repro.spec import base, unbind

WIDE, NARROW = 0.02, 0.01  # a trust region's width: above is a token's scale, below a sequence mean's
MISMATCH = 0.02  # nats a token, mean |Δ log-prob| of engine and trainer: bf16 engines lie below or just above, 4 bits well above


def check(objective: Objective, rollout: Rollout, sampler: Sampler | None = None) -> list[str]:
    """What a user should know before the run; empty where nothing is odd. Each sentence names the knobs by their YAML words."""
    return list(_warnings(objective, rollout, sampler or Sampler()))


def check_run(run: Run) -> list[str]:
    return check(run.built(), run.rollout, run.sampler)


def mismatch(run: Run, row: Mapping[str, float]) -> str | None:
    """What a user should know after a step whose engine and trainer differ, with no correction, by more than MISMATCH."""
    found = row.get("sampler/difference", 0.0)
    if found <= MISMATCH or "sampler" in knobs.needs(run.built().correction):
        return None
    why, knob = "under the same weights", "sampler.weights or machine.engine"
    if run.rollout.chunk is not None:
        why, knob = "where responses are finished under newer weights", "rollout.chunk or sampler.weights"
    return (
        f"step {row['step']:.0f}: the log-probs of the engine and of the trainer differ by {found:.3f} nats a token {why} (more than "
        f"{MISMATCH}), and nothing corrects for it: set objective.correction to {{name: truncate}}, or change {knob}."
    )


def _warnings(o: Objective, r: Rollout, s: Sampler) -> Iterator[str]:
    ratio, clip, advantage = (knobs.traits(slot) for slot in (o.ratio, o.clip, o.advantage))
    aggregation, kl = knobs.traits(o.aggregation), knobs.traits(o.kl)
    sequence = "sequence_level" in ratio and "token_level" not in ratio
    by_token = "token_advantage" in advantage or ("token_advantage_with_kl" in advantage and _beta(o.kl_in_reward) > 0)
    several = r.updates * r.minibatches > 1
    slots = ("ratio", "clip", "advantage", "aggregation", "kl", "kl_in_reward", "correction")
    name = {slot: base(getattr(o, slot)).__name__ for slot in slots}

    if sequence and "per_response" not in aggregation:
        yield (
            f"① ratio {name['ratio']} gives a response one ratio, so ④ aggregation {name['aggregation']} weighs a response by its length: "
            "use sequence_mean."
        )
    if "unit" in ratio and "bounding" in clip:
        yield f"① ratio {name['ratio']} is always 1, so ② clip {name['clip']} never acts: use clip none, or ratio token."
    late = f"the weights that draw are up to {s.staleness + s.every - 1} steps old"
    off = {
        f"a rollout is used for {r.updates * r.minibatches} updates": several,
        "responses are finished under newer weights": r.chunk is not None,
        late: s.lags,
    }
    if "unit" in ratio and any(off.values()):
        reasons = ", and ".join(reason for reason, on in off.items() if on)
        yield f"① ratio {name['ratio']} is right on-policy only, but {reasons}: use ratio token, or stay on-policy."
    if "geometric" in clip and "token_level" not in ratio:
        yield f"② clip {name['clip']} clips token ratios before their geometric mean; ① ratio {name['ratio']} has none: use token."
    if "geometric" in clip and "per_response" not in aggregation:
        yield f"② clip {name['clip']} is one number a response, so ④ {name['aggregation']} weighs it by length: use sequence_mean."
    if by_token:
        if "by_sign" in aggregation:
            yield f"③ advantage {name['advantage']} differs within a response, but ④ {name['aggregation']} sorts responses by one sign."
        if sequence:
            yield f"③ advantage {name['advantage']} differs by token, but ① ratio {name['ratio']} is one a response: use sequence_token."
        for gate in o.gate:
            if "sequence_gate" in knobs.traits(gate):
                yield f"③ advantage {name['advantage']} differs by token, but the gate {base(gate).__name__} goes by one sign."
    if "raw_reward" in advantage and _beta(o.kl_in_reward):
        yield f"③ advantage {name['advantage']} reads the reward alone, so ⑤ {name['kl_in_reward']} in the reward has no effect."
    if "zero_gradient_in_loss" in kl and _beta(o.kl):
        yield f"⑤ kl {name['kl']} in the loss has zero expected gradient, only noise: use k2 in the loss, or {name['kl']} in kl_in_reward."
    if "forward_gradient_in_loss" in kl and _beta(o.kl):
        yield (
            f"⑤ kl {name['kl']} in the loss has the gradient of the forward KL(π_ref‖π_θ), not of the KL that it estimates: "
            "k2 or k3_unbiased have that one."
        )
    if "divides_by_group_std" in advantage and _beta(o.kl_in_reward):
        yield (
            f"③ advantage {name['advantage']} divides by the group's std, so with ⑤ {name['kl_in_reward']} in the reward a group of equal "
            "rewards gets ±.7 from the KL alone: use group_center or leave_one_out."
        )
    width = _width(o.clip)
    if sequence and width is not None and width > WIDE and "bounding" in clip:
        yield (
            f"② clip {name['clip']} of width {width:g} on ① ratio {name['ratio']}, whose scale is about σ/√|y|, hardly ever acts: "
            "GSPO's is 3e-4 for thousands of tokens."
        )
    if "token_level" in ratio and "sequence_level" not in ratio and width is not None and width < NARROW and "bounding" in clip:
        yield f"② clip {name['clip']} of width {width:g} on token ratios cuts nearly every token: .2 is the usual scale."
    if r.group_size < 2 and "group_baseline" in advantage:
        yield f"⑥ group_size 1 leaves ③ advantage {name['advantage']} nothing to compare a response with: every Â is 0."
    corrects = "sampler" in knobs.needs(o.correction)
    if corrects and r.anchor == "sampler":
        yield (
            f"① correction {name['correction']} weighs π_old against the sampler, but rollout.anchor makes them one: it is always 1; "
            "anchor the clip to the trainer."
        )
    if s.lags and r.anchor == "proximal" and not corrects:
        yield (
            f"⑥ rollout.anchor proximal: ① ratio and ② clip see the step's own updates alone, {late}, and nothing weighs that: set "
            "objective.correction to truncate, as decoupled PPO does, or anchor the clip to the trainer."
        )
    if r.anchor == "sampler" and "exact" not in knobs.traits(distortion(s)):
        yield (
            f"⑥ rollout.anchor sampler with sampler.weights {base(distortion(s)).__name__}: ① ratio counts the mismatch of engine and "
            "trainer as movement of the policy, and ② clip cuts it: anchor the clip to the trainer, and set objective.correction."
        )
    unsupported = not r.keep_support and (r.top_p < 1 or r.top_k > 0)
    if unsupported and corrects:
        yield (
            f"① correction {name['correction']} with top-p or top-k: the sampler's log-probs are renormalised over what it kept and the "
            "trainer's are not, so every weight is off by the kept mass: set rollout.keep_support."
        )
    if unsupported and not corrects:
        yield (
            f"⑥ top-p or top-k without rollout.keep_support: tokens come from a part of the vocabulary, ① ratio {name['ratio']} and the "
            "gradient are over all of it, and nothing in the loss shows that: set rollout.keep_support."
        )
    if "adaptive" in clip and "per_token" not in aggregation:
        yield f"② clip {name['clip']} adapts β to nats a token, but ④ {name['aggregation']} weighs tokens unequally: use token_mean."
    if "natural" in knobs.traits(o.step) and "bounding" in clip:
        yield f"② step {base(o.step).__name__} has a trust region of its own; clip {name['clip']} cuts its surrogate: use clip none."
    if "natural" in knobs.traits(o.step) and several:
        yield (
            f"② step {base(o.step).__name__} measures its trust region from the rollout's π_old, so the first of "
            f"{r.updates * r.minibatches} updates leaves little of it to the others: use one update."
        )
    if "natural" in knobs.traits(o.step) and "values" in knobs.needs(o.advantage):
        yield (
            f"③ advantage {name['advantage']} trains a critic, but ② step {base(o.step).__name__} moves its head with the rest, "
            "so critic.lr is not used: use step gradient."
        )


def _beta(kl: Any) -> float:
    spec = unbind(kl)
    return float(spec.get("beta", 0.0)) if isinstance(spec, dict) else 0.0


def _width(clip: Any) -> float | None:
    """The narrowest side of a trust region, None where there is none."""
    spec = unbind(clip)
    sides = [float(v) for k, v in spec.items() if k.startswith("eps_") and v is not None] if isinstance(spec, dict) else []
    return min(sides, default=None)
