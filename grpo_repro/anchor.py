"""Which policy a rollout's updates start from: π_old, the clip's anchor, at the cheapest that is exact.

measured   one forward pass over the rollout, under the weights that `rollout.anchor` names
deferred   a rollout of one update needs no pass of its own: π_old is π_θ, and the update's own forward sees it, so w ≡ 1 exactly
reused     the engine's log-probs stand for π_old where a probe of each rollout finds them within `rollout.reuse`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_repro import knobs
from grpo_repro.learner import Learner
from grpo_repro.logprobs import trim
from grpo_repro.measure import Measured, measure
from grpo_repro.rollout.verified import agreement
from grpo_repro.types import ABSENT, Rollout

PROBED = 4  # rows of a rollout by which its engine is judged


@dataclass(frozen=True)
class Anchor:
    now: Measured  # the trainer before the rollout's updates
    drew: Measured  # the trainer under the weights that drew; `now` itself where they are the same
    old: Measured  # whichever of them is π_old
    old_NT: Tensor  # its log-probs as the objective reads them; ABSENT where they are deferred to the update
    reused: bool = False
    difference: float | None = None  # mean |Δ log-prob| of engine and trainer that the probe found

    @classmethod
    def at(cls, policy: Measured) -> Anchor:
        """The policy that drew is the trainer as it is now, and π_old."""
        return cls(policy, policy, policy, policy.logp_NT)

    @property
    def measured(self) -> bool:
        """Whether `drew` is the trainer's own, not the engine's."""
        return not self.reused and self.old_NT is not None

    @property
    def lags(self) -> bool:
        return self.drew is not self.now


def anchored(learner: Learner, rollout: Rollout) -> Anchor:
    """What a rollout looks like to the trainer before its updates."""
    run, model, vocab = learner.run, learner.policy.model, learner.policy.vocab
    engine = Measured(rollout.sampler_NT, rollout.entropy_NT, None)
    difference = None
    if _needs_no_pass(learner, rollout):
        if run.rollout.updates * run.rollout.minibatches == 1:
            return Anchor(engine, engine, engine, ABSENT)
        if run.rollout.reuse:
            difference = _probe(learner, rollout)
            if difference <= run.rollout.reuse:
                return Anchor(engine, engine, engine, rollout.sampler_NT, reused=True, difference=difference)
    now = measure(model, rollout, run, vocab, learner.critic)
    stale = learner.past.apart and run.rollout.chunk is None  # finished responses have tokens of several weights
    drew = measure(learner.past.model, rollout, run, vocab) if stale else now
    old = now if run.rollout.anchor == "proximal" else drew
    return Anchor(now, drew, old, rollout.sampler_NT if run.rollout.anchor == "sampler" else old.logp_NT, difference=difference)


def _needs_no_pass(learner: Learner, rollout: Rollout) -> bool:
    """Whether nothing but the clip's anchor would be read from a forward pass, and the trainer itself is the anchor."""
    run, o = learner.run, learner.objective
    read = (
        run.scale.monitor
        or learner.states
        or learner.critic is not None
        or learner.reference is not None
        or knobs.needs(o.kl_in_reward)
        or "full_logits" in o.needs
    )
    other = learner.past.apart or learner.sampler.own or run.rollout.anchor == "sampler"
    return not read and not other and rollout.entropy_NT is not None


def _probe(learner: Learner, rollout: Rollout) -> float:
    """Mean |Δ log-prob| of engine and trainer over a few rows from all over the rollout."""
    rows_K = torch.linspace(0, len(rollout.length_N) - 1, PROBED, device=rollout.length_N.device).long().unique()
    return agreement(learner.policy, trim(rollout.rows(rows_K)), learner.run.rollout.temperature).mean
