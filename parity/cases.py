"""The configurations that are put to every framework: each variant of each knob, the products that interact, and the presets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from grpo_repro import presets
from grpo_repro.knobs import advantage, aggregation, clip, correction, gate, kl, overlong, ratio, sampling, transform, variants
from grpo_repro.objective import Objective
from grpo_repro.spec import parameters

BASE = Objective(
    ratio=ratio.token,
    clip=partial(clip.ppo, eps_low=0.2, eps_high=0.28),
    advantage=partial(advantage.group_zscore, ddof=1, eps=1e-4),
    aggregation=aggregation.token_mean,
)
# Settings that act on these batches; every variant that is not here is tried with its defaults (a required parameter is .1).
SETTINGS = {
    "clip.ppo": [{"eps_low": 0.2, "eps_high": 0.2}, {"eps_low": 0.2, "eps_high": 0.28}, {"eps_low": 0.03, "eps_high": 0.04}],
    "clip.dual": [{"eps_low": 0.2, "eps_high": 0.2, "w_max": 1.3}],
    "clip.truncate": [{"w_min": 0.0, "w_max": 1.2}, {"w_min": 0.8, "w_max": 1.2}],
    "advantage.group_zscore": [{"ddof": 1, "eps": 1e-4}, {"ddof": 0, "eps": 1e-4}],
    "advantage.batch_zscore": [{"ddof": 1, "eps": 1e-4}, {"ddof": 0, "eps": 0.0}],
    "advantage.gae": [{"gamma": 1.0, "lam": 0.95, "whiten": False}, {"gamma": 0.9, "lam": 0.9, "whiten": True}],
    "aggregation.sequence_mean": [{"per": "row"}, {"per": "group"}],
    "correction.truncate": [{"w_max": 1.5, "level": level} for level in ("token", "sequence", "geometric")],
    "correction.mask": [
        {"w_min": low, "w_max": 1.5, "level": level} for level in ("token", "sequence", "geometric") for low in (0.0, 0.5)
    ],
    "gate.dppo_tv": [{"eps_low": 0.05, "eps_high": 0.05}],
    "gate.dppo_kl": [{"eps": 0.005}],
    "gate.off_policy": [{"delta": 0.05}],
    "overlong.soft_penalty": [{"cache": 6}],
}
# For each slot, two variants that differ from each other: a case is swapped to one of them to see that the slot acts.
OTHERS = {
    "ratio": (ratio.token, ratio.none),
    "clip": (clip.none, partial(clip.ppo, eps_low=0.2, eps_high=0.2)),
    "advantage": (advantage.group_center, BASE.advantage),
    "aggregation": (aggregation.token_mean, aggregation.constant_length),
    "kl": (kl.none, partial(kl.k3, beta=0.1)),
    "kl_in_reward": (kl.none, partial(kl.k1, beta=0.1)),
    "correction": (correction.none, partial(correction.truncate, w_max=1.5)),
    "gate": ((), (partial(gate.off_policy, delta=0.05),)),
    "overlong": (overlong.keep, overlong.mask),
    "sampling": (sampling.all, sampling.drop_zero_variance),
    "transform": (transform.none, transform.rank),
}
# Every variant that has been looked for in the frameworks. A new one is looked for first (and taught to parity/peers), then named here.
LOOKED_FOR = {
    "ratio": "token sequence sequence_token none prefix",
    "correction": "none truncate mask",
    "clip": "none ppo dual truncate soft_sigmoid soft_tanh kl_penalty gmpo",
    "gate": "dppo_tv dppo_kl off_policy",
    "advantage": "group_zscore group_center leave_one_out batch_std batch_zscore max_rl pass_at_k running_zscore gae process_reward",
    "transform": "none rank sigmoid",
    "aggregation": "sequence_mean token_mean constant_length sequence_sum balanced",
    "kl": "none k1 k2 k3 k3_unbiased full forward",
    "sampling": "all drop_zero_variance dynamic",
    "overlong": "keep mask soft_penalty",
}


def unknown() -> list[str]:
    """Variants that nobody has looked for in the frameworks yet: "cannot express" would be a guess."""
    return [f"{slot}.{name}" for slot, known in LOOKED_FOR.items() for name in variants(slot) if name not in known.split()]


@dataclass(frozen=True)
class Case:
    about: tuple[str, ...]  # slots whose effect is checked on this case
    objective: Objective
    kind: str = "off_policy"
    preset: str = ""


def cases() -> list[Case]:
    """In a fixed order, without repetition."""
    found: dict[str, Case] = {}
    for case in _all():
        key = f"{case.objective}{case.kind}{case.preset}"
        same = found.get(key, case)
        found[key] = replace(same, about=tuple(dict.fromkeys((*same.about, *case.about))))
    return list(found.values())


def bound(slot: str) -> Iterator[partial]:
    """Every variant of a slot, in every setting that is tried."""
    for name, function in variants(slot).items():
        required = {k: 0.1 for k, p in parameters(function).items() if p.default is p.empty}
        module = "kl" if slot == "kl_in_reward" else slot
        for settings in SETTINGS.get(f"{module}.{name}", [required]):
            yield partial(function, **settings) if settings else function


def _all() -> Iterator[Case]:
    for r in bound("ratio"):
        for c in bound("clip"):
            for a in bound("aggregation"):
                yield Case(("ratio", "clip", "aggregation"), replace(BASE, ratio=r, clip=c, aggregation=a))
    for adv in bound("advantage"):
        for charged in bound("kl_in_reward"):
            yield Case(("advantage", "kl_in_reward"), replace(BASE, advantage=adv, kl_in_reward=charged))
    rloo = Objective(ratio=ratio.none, clip=clip.none, advantage=advantage.leave_one_out, aggregation=aggregation.sequence_sum)
    for charged in bound("kl_in_reward"):
        for kind in ("off_policy", "on_policy"):
            yield Case(("advantage", "kl_in_reward"), replace(rloo, kl_in_reward=charged), kind)
    for penalty in bound("kl"):
        for a in bound("aggregation"):
            for r in (ratio.token, ratio.sequence):
                yield Case(("kl", "aggregation"), replace(BASE, kl=penalty, aggregation=a, ratio=r))
    for corr in bound("correction"):
        for r in (ratio.token, ratio.sequence, ratio.sequence_token):
            for c in (BASE.clip, partial(clip.truncate, w_max=1.2)):
                yield Case(("correction",), replace(BASE, correction=corr, ratio=r, clip=c))
                yield Case(("correction",), replace(BASE, correction=corr, ratio=r, clip=c, kl=partial(kl.k3, beta=0.1)))
    for g in bound("gate"):
        for c in (BASE.clip, partial(clip.truncate, w_max=1.2)):
            for a in (aggregation.token_mean, aggregation.sequence_mean):
                for kind in ("off_policy", "bypass"):
                    yield Case(("gate",), replace(BASE, gate=(g,), clip=c, aggregation=a), kind)
    for slot in ("sampling", "overlong", "transform"):
        for v in bound(slot):
            for a in (aggregation.token_mean, aggregation.sequence_mean, aggregation.constant_length):
                yield Case((slot,), replace(BASE, aggregation=a, **{slot: v}))
    for name, value in vars(presets).items():
        if isinstance(value, Objective):
            for kind in ("off_policy", "on_policy") if value.ratio is ratio.none else ("off_policy",):
                yield Case((), value, kind, preset=name)
