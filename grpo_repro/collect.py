"""⑥ Which prompts, and how many responses to each: the rollout of one step, judged.

Plain; with redrawn batches until enough groups are mixed (dynamic); with further samples for prompts that nobody solved (extra); or
a chunk at a time, unfinished responses going on under newer weights (partial).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from grpo_repro import knobs
from grpo_repro.judge import Judged, joined, judge
from grpo_repro.rollout import Births, Decoding, join, proceed, sample
from grpo_repro.sampler import Sampler
from grpo_repro.spec import unbind
from grpo_repro.types import ABSENT, Rollout, UserError

Row = dict[str, float]


def collect(sampler: Sampler, step: int) -> tuple[Rollout, Judged, Row]:
    """The step's rollout with its rewards, and what it cost. Raises UserError when a bounded search found nothing to learn from."""
    wanted, resampling = sampler.run.rollout, "resample" in knobs.traits(sampler.objective.sampling)
    if wanted.chunk is not None:
        rollout, births, row = _partial(sampler, step, wanted.chunk)
        judged = _judged(sampler, rollout, step, births)
    elif resampling:
        rollout, judged, row = _dynamic(sampler, step)
    elif wanted.extra:
        rollout, judged, row = _extra(sampler, _sample(sampler, step, 0, wanted.group_size), step)
    else:
        rollout, row = _sample(sampler, step, 0, wanted.group_size), {}
        judged = _judged(sampler, rollout, step)
    return (rollout if wanted.keep_support else replace(rollout, support_NTV=ABSENT)), judged, row


def decoding(sampler: Sampler) -> Decoding:
    r, m = sampler.run.rollout, sampler.run.machine
    return Decoding(r.temperature, r.top_p, r.top_k, sampler.draws, m.batch_rows)


def _sample(
    sampler: Sampler, step: int, batch: int, size: int | list[int], first_member: int = 0, prompts: int | None = None
) -> Rollout:
    """Responses to the step's batch-th batch of prompts; batches of a step hold different prompts."""
    n, how = sampler.run.rollout.prompts, decoding(sampler)
    drawn = sampler.task.draw(sampler.run.seed, step, n * (batch + 1))[n * batch :][:prompts]
    limit = sampler.run.rollout.chunk or sampler.limit
    return sample(
        sampler.policy,
        drawn,
        size,
        limit=min(limit, sampler.limit),
        seed=sampler.run.seed,
        step=step,
        first=n * batch,
        first_member=first_member,
        **vars(how),
    )


def _judged(sampler: Sampler, rollout: Rollout, step: int, births: Births | None = None) -> Judged:
    steps = "steps" in sampler.objective.needs
    return judge(sampler.objective.reward, rollout, sampler.task, sampler.policy, sampler.run.seed, step, steps, births)


def _dynamic(sampler: Sampler, step: int) -> tuple[Rollout, Judged, Row]:
    """DAPO's dynamic sampling: batches until there are as many mixed groups as prompts were asked for, at most `max_batches`."""
    wanted, spec = sampler.run.rollout.prompts, unbind(sampler.objective.sampling)
    most = int(spec["max_batches"]) if isinstance(spec, dict) else 1
    parts: list[Rollout] = []
    verdicts: list[Judged] = []
    for batch in range(most):
        parts.append(_sample(sampler, step, batch, sampler.run.rollout.group_size))
        verdicts.append(_judged(sampler, parts[-1], step, Births.of(batch * wanted + parts[-1].group_N, step)))
        rollout, judged = join(parts), joined(verdicts)
        kept_N = sampler.objective.sampling(judged.r_N, rollout.group_N)
        mixed = torch.unique(rollout.group_N[kept_N])
        if len(mixed) >= wanted:
            break
    if not len(mixed):
        high = float(judged.r_N.max())
        flat = [float(judged.r_N[rollout.group_N == g][0]) for g in torch.unique(rollout.group_N)]
        raise UserError(
            f"step {step}: {len(parts)} batches of {wanted} prompts hold no group with mixed rewards ({flat.count(high)} groups all at "
            f"{high:g}, {len(flat) - flat.count(high)} all lower): nothing can be learned; take other prompts, a larger group_size, or "
            "more max_batches."
        )
    row = {
        "groups/sampled": float(len(rollout.prompts)),
        "groups/mixed": float(len(mixed)),
        "tokens/sampled": float(rollout.length_N.sum()),
        "reward/sampled": float(judged.r_N.mean()),
        "accuracy/sampled": float(judged.correct_N.mean()),
    }
    surplus_N = torch.isin(rollout.group_N, mixed[wanted:])
    keep_K = (~surplus_N).nonzero().squeeze(1)
    return rollout.rows(keep_K), judged.rows(keep_K), row


def _extra(sampler: Sampler, rollout: Rollout, step: int) -> tuple[Rollout, Judged, Row]:
    """Further samples for the prompts of which no response was right: their groups are larger."""
    judged = _judged(sampler, rollout, step)
    size, extra = sampler.run.rollout.group_size, sampler.run.rollout.extra
    solved = {int(g) for g in rollout.group_N[judged.correct_N > 0.5]}
    sizes = [0 if g in solved else extra for g in range(len(rollout.prompts))]
    row = {"groups/extra": float(sum(s > 0 for s in sizes))}
    if not any(sizes):
        return rollout, judged, row
    more = _sample(sampler, step, 0, sizes, first_member=size)
    births = Births.of(more.group_N, step)
    verdict = _judged(sampler, more, step, replace(births, member_N=size + births.member_N))
    return join([rollout, more], groups=[rollout.group_N, more.group_N]), joined([judged, verdict]), row


def _partial(sampler: Sampler, step: int, chunk: int) -> tuple[Rollout, Births, Row]:
    """Responses grow by at most `chunk` tokens a step; a group is trained on in the step in which its last response has ended.

    Every token keeps the log-prob of the weights that drew it. A step in which no group is complete goes on until one is.
    """
    go_on = partial(proceed, sampler.policy, chunk=chunk, limit=sampler.limit, seed=sampler.run.seed, how=decoding(sampler))
    flight = sampler.pending
    if flight is not None:
        flight = go_on(*flight), flight[1]
    waiting = len(flight[0].prompts) if flight else 0
    if waiting < sampler.run.rollout.prompts:
        fresh = _sample(sampler, step, 0, sampler.run.rollout.group_size, prompts=sampler.run.rollout.prompts - waiting)
        births = Births.of(fresh.group_N, step)
        flight = (fresh, births) if flight is None else (join([flight[0], fresh]), _together(flight[1], births))
    assert flight is not None
    while not len(_complete(flight[0], sampler.limit)):
        flight = go_on(*flight), flight[1]
    rollout, births = flight
    done_N = torch.isin(rollout.group_N, _complete(rollout, sampler.limit))
    row = {"groups/unfinished": float(len(rollout.prompts) - len(torch.unique(rollout.group_N[done_N])))}
    done_K, rest_K = done_N.nonzero().squeeze(1), (~done_N).nonzero().squeeze(1)
    row["rows/older"] = float((births.step_N[done_K] < step).sum())
    sampler.pending = (_renumbered(rollout.rows(rest_K)), births.rows(rest_K)) if len(rest_K) else None
    return _renumbered(rollout.rows(done_K)), births.rows(done_K), row


def _complete(rollout: Rollout, limit: int) -> torch.Tensor:
    """Ids of the groups all of whose responses have ended, or are at the limit."""
    open_N = rollout.cut_N & (rollout.length_N < limit)
    ids = torch.unique(rollout.group_N)
    return ids[~torch.isin(ids, rollout.group_N[open_N])]


def _renumbered(rollout: Rollout) -> Rollout:
    ids, index_N = torch.unique(rollout.group_N, return_inverse=True)
    return replace(rollout, prompts=tuple(rollout.prompts[g] for g in ids.tolist()), group_N=index_N)


def _together(a: Births, b: Births) -> Births:
    return Births(*(torch.cat([getattr(a, n), getattr(b, n)]) for n in ("step_N", "prompt_N", "member_N")))
