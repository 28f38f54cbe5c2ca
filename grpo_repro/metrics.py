"""What a step is described by. Every function is pure: tensors → numbers, and its docstring is the glossary entry of its metrics.

A mean is a sum and a count until the very end, so a metric is never a mean of means; a masked token is in neither.
A metric that could not be had is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_repro.judge import Judged
from grpo_repro.knobs import kl, ratio
from grpo_repro.objective import Parts
from grpo_repro.types import Minibatch, Rollout, Scored


@dataclass
class Totals:
    """Sums with their counts, and maxima, over the parts of a step."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(total)
        self.counts[name] = self.counts.get(name, 0.0) + float(count)

    def largest(self, name: str, value: Tensor | float) -> None:
        self.maxima[name] = max(self.maxima.get(name, -float("inf")), float(value))

    def numbers(self) -> dict[str, float]:
        means = {k: v / self.counts[k] for k, v in self.sums.items() if self.counts[k]}
        return {**means, **self.maxima}


def responses(rollout: Rollout, judged: Judged) -> dict[str, float]:
    """Of the rollout as drawn.

    reward, reward/std: mean and standard deviation over responses · reward/<part>: mean of a weighted reward's part, before its weight ·
    accuracy: share the verifier accepts · accuracy/<level>: the same a difficulty bucket · note/<what>: mean of what the task observed ·
    length, length/right, length/wrong: tokens a response, end token included · truncated: share without an end token · tokens: generated
    """
    length_N, right_N = rollout.length_N.float(), judged.correct_N > 0.5
    row: dict[str, float] = {
        "reward": float(judged.r_N.mean()),
        "reward/std": float(judged.r_N.std(correction=0)),
        "accuracy": float(judged.correct_N.mean()),
        "length": float(length_N.mean()),
        "truncated": float(rollout.cut_N.float().mean()),
        "tokens": float(length_N.sum()),
    }
    levels = [prompt.level for prompt in rollout.prompts]
    for level in sorted(set(levels)):
        of_level_N = torch.tensor([levels[g] == level for g in rollout.group_N.tolist()], device=right_N.device)
        row[f"accuracy/{level}"] = float(judged.correct_N[of_level_N].mean())
    for name, chosen_N in (("right", right_N), ("wrong", ~right_N)):
        if chosen_N.any():
            row[f"length/{name}"] = float(length_N[chosen_N].mean())
    row |= {f"reward/{name}": float(part_N.mean()) for name, part_N in judged.parts.items()}
    return row | {f"note/{name}": float(noted_N.mean()) for name, noted_N in judged.notes.items()}


def groups(b: Minibatch, scored: Scored) -> dict[str, float]:
    """Of the groups, on raw rewards.

    groups/zero_variance: share whose rewards are all equal · groups/all_right, groups/all_wrong: flat at the highest or lowest reward
    of the step (only where rewards differ at all) · groups/dropped, rows/dropped: kept out of the loss by knob ⑥ · reward/kept: mean over
    the rows that are left, where some were dropped (`reward` is of all)
    """
    ids = torch.unique(b.group_N)
    ranges = [(float(r.min()), float(r.max())) for r in (b.r_N[b.group_N == g] for g in ids)]
    low, high = float(b.r_N.min()), float(b.r_N.max())
    row = {
        "groups/zero_variance": sum(lo == hi for lo, hi in ranges) / len(ranges),
        "groups/dropped": float(scored.dropped_groups),
        "rows/dropped": float(scored.dropped_rows),
    }
    if scored.dropped_rows and len(scored.row_K):
        row["reward/kept"] = float(b.r_N[scored.row_K].float().mean())
    if low < high:
        row["groups/all_right"] = sum(lo == hi == high for lo, hi in ranges) / len(ranges)
        row["groups/all_wrong"] = sum(lo == hi == low for lo, hi in ranges) / len(ranges)
    return row


def entropy(entropy_NT: Tensor, mask_NT: Tensor, positions: Mapping[str, Tensor]) -> dict[str, float]:
    """Of the policy that drew the rollout, in nats a token.

    entropy: over all response tokens (confounded by length) · entropy/<where>: at the task's named positions, e.g. the answer's
    """
    row = {"entropy": float(entropy_NT[mask_NT].mean())} if mask_NT.any() else {}
    return row | {f"entropy/{k}": float(entropy_NT[at_NT].mean()) for k, at_NT in positions.items() if at_NT.any()}


def sampler(totals: Totals, drew_NT: Tensor, b: Minibatch) -> None:
    """How the engine that drew the tokens differs from the trainer under the weights of the last sync (`drew_NT`).

    sampler/difference, sampler/difference/max: |Δ log-prob| of the drawn tokens, mean and largest · sampler/k3: KL(engine‖trainer), in
    nats a token · sampler/ess: effective sample size of π_old/π_sampler, token by token. Over the whole rollout; where π_old is
    deferred to its only update, over the tokens in that; where the engine's log-probs are reused, sampler/difference of the probe ·
    sampler/reused: 1 where they were · sampler/age: steps that the weights that drew lag behind
    """
    sampled, count = b.sampler_NT[b.mask_NT], b.mask_NT.sum()
    if not count:
        return
    d = drew_NT[b.mask_NT] - sampled
    w = torch.exp((b.old_NT[b.mask_NT] - sampled).double().clamp(-ratio.BOUND, ratio.BOUND))
    totals.mean("sampler/difference", d.abs().sum(), count)
    totals.largest("sampler/difference/max", d.abs().max())
    totals.mean("sampler/k3", kl.ESTIMATES["k3"](d.double().clamp(-kl.BOUND, kl.BOUND)).sum(), count)
    totals.mean("_rho", w.sum(), count)
    totals.mean("_rho2", (w**2).sum(), count)


def update(totals: Totals, parts: Parts, b: Minibatch, loss: Tensor) -> None:
    """Of the updates of a step, over the tokens in the loss (all updates together).

    ratio, ratio/std, ratio/max: w as the clip saw it · ess: effective sample size of w, (Σw)²/(n·Σw²) · log_ratio/bounded: share at the
    ±20 bound · clip: share of tokens on which the bound acted; clip/high_pos … clip/low_neg: the same by side of 1 and sign of Â ·
    kl_term: the KL term of the loss, β included · loss: mean over the step's updates · updates: optimiser steps made, 0 where no group was
    mixed and flat ones are dropped
    """
    mask_NT = b.mask_NT
    count = mask_NT.sum()
    logw = parts.logw_NT[mask_NT]
    w = torch.exp(logw).double()
    totals.mean("_w", w.sum(), count)
    totals.mean("_w2", (w**2).sum(), count)
    if count:
        totals.largest("ratio/max", w.max())
    totals.mean("log_ratio/bounded", (logw.abs() >= ratio.BOUND).sum(), count)
    hit = parts.hit_NT[mask_NT]
    sign = torch.sign(b.advantage).expand(mask_NT.shape)[mask_NT] if b.advantage is not None else torch.zeros_like(logw)
    totals.mean("clip", hit.sum(), count)
    for side, beyond in (("high", logw > 0), ("low", logw < 0)):
        for name, of_sign in (("pos", sign > 0), ("neg", sign < 0)):
            totals.mean(f"clip/{side}_{name}", (hit & beyond & of_sign).sum(), count)
    totals.mean("kl_term", parts.kl_NT[mask_NT].sum(), count)
    totals.mean("loss", loss.detach(), 0)


def finish(totals: Totals, updates: int) -> dict[str, float]:
    """The update metrics as numbers; see `update` and `sampler`."""
    totals.counts["loss"] = updates
    row = {"updates": float(updates), **totals.numbers()}
    rho, rho2 = row.pop("_rho", None), row.pop("_rho2", None)
    if rho is not None and rho2 is not None:
        row["sampler/ess"] = rho**2 / rho2
    mean, mean_square = row.pop("_w", None), row.pop("_w2", None)
    if mean is not None and mean_square is not None:
        row["ratio"] = mean
        row["ratio/std"] = max(mean_square - mean**2, 0.0) ** 0.5
        row["ess"] = mean**2 / mean_square
    return row


def moved(name: str, other_NT: Tensor, drawer_NT: Tensor, mask_NT: Tensor, exact_NT: Tensor | None) -> dict[str, float]:
    """How far another policy is from the one that drew the tokens: KL(drawer‖other), in nats a token.

    kl_old: KL(π_old‖π_θ) after the step's last update, the realised update · kl_ref: KL(π‖π_ref) of the policy that drew the rollout ·
    kl_lag: of the weights that drew it ‖ the trainer's before the step's first update, where they differ
    …/k1, …/k2, …/k3: Schulman's estimators from the drawn tokens · …/exact: over the whole vocabulary (small vocabularies only)
    """
    if not mask_NT.any():
        return {}
    d = (other_NT - drawer_NT)[mask_NT].double().clamp(-kl.BOUND, kl.BOUND)
    row = {f"kl_{name}/{estimate}": float(of(d).mean()) for estimate, of in kl.ESTIMATES.items()}
    return row if exact_NT is None else {**row, f"kl_{name}/exact": float(exact_NT[mask_NT].double().mean())}


def distance(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    """update/norm: ‖Δθ‖₂ over all parameters, from before the step's first update to after its last."""
    return sum(float(((new.detach() - old).double() ** 2).sum()) for old, new in zip(before, after, strict=True)) ** 0.5
