"""An engine that is trusted only after a probe: log-probs of a few responses, the engine's beside the trainer's, after every sync."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from grpo_repro import layers
from grpo_repro.logprobs import forward
from grpo_repro.policy import Policy
from grpo_repro.rollout import sample
from grpo_repro.rollout.engine import Ask, Completion, Engine
from grpo_repro.types import EngineError, Prompt, Rollout

PROMPTS, TOKENS = 8, 8  # of a probe
# Mean |Δlogp| up to which numbers count as the policy's. Measured on SmolLM2 on a CPU: fp32 5e-6, bf16 .027 (a stale head: .2)
TOLERANCE = {"float32": 5e-4, "bfloat16": 0.1}
PROBE = -3  # the probe's step index: its chance is nobody else's


@dataclass(frozen=True)
class Agreement:
    """|log π_sampler − log π_θ| over the tokens of a rollout, nats."""

    mean: float
    largest: float
    tokens: int
    where: str  # prompt and place of the largest


def agreement(policy: Policy, rollout: Rollout, temperature: float) -> Agreement:
    """How far the log-probs that an engine recorded are from the policy's own, at the sampling temperature."""
    with torch.no_grad():
        now = forward(policy.model, rollout, temperature)
    difference_NT = (now.logp_NT - rollout.sampler_NT).abs().masked_fill(~rollout.mask_NT, 0.0)
    n, t = divmod(int(difference_NT.argmax()), difference_NT.shape[1])
    tokens = int(rollout.mask_NT.sum())
    where = f"token {t} of a response to {rollout.prompts[int(rollout.group_N[n])].id!r}"
    return Agreement(float(difference_NT.sum()) / tokens, float(difference_NT[n, t]), tokens, where)


@dataclass
class Verified:
    """An `Engine` around another: `sync` is followed by a probe, and numbers that are off are an error, not a warning."""

    engine: Engine
    prompts: Sequence[Prompt]
    temperature: float
    dtype: str  # what the engine computes in
    tolerance: float | None = None  # mean |Δlogp| allowed; by default that of the dtypes
    synced: int = 0  # syncs made
    last: Agreement | None = None
    seconds: float = 0.0  # of the last sync, the probe included

    @property
    def name(self) -> str:
        return self.engine.name

    def draw(
        self, asks: Sequence[Ask], limit: int, end_ids: Collection[int], temperature: float, top_p: float, top_k: int
    ) -> list[list[Completion]]:
        return self.engine.draw(asks, limit, end_ids, temperature, top_p, top_k)

    def sync(self, policy: Policy) -> None:
        """Raises EngineError where the weights did not arrive, or arrived and give other log-probs than the policy's."""
        began = time.perf_counter()
        self.engine.sync(policy)
        self.synced += 1
        self.last = self.probe(policy)
        self.seconds = time.perf_counter() - began

    def probe(self, policy: Policy) -> Agreement:
        limit = min(TOKENS, policy.context - max(len(p.tokens) for p in self.prompts))
        drawn = sample(policy, self.prompts, 1, limit=limit, seed=0, step=PROBE, temperature=self.temperature, engine=self.engine)
        found = agreement(policy, drawn, self.temperature)
        exact = self.dtype == "float32" and layers.compute_dtype(policy.model) == torch.float32
        allowed = self.tolerance or TOLERANCE["float32" if exact else "bfloat16"]
        if not found.mean <= allowed:
            raise EngineError(
                f"after sync {self.synced} the engine {self.name} does not draw from the policy: over {found.tokens} tokens the mean "
                f"|Δlogp| is {found.mean:.3g} (allowed {allowed:g}) and the largest {found.largest:.3g}, at {found.where}; its "
                "weights, temperature or log-prob mode are not the trainer's (a server: --logprobs-mode processed_logprobs)."
            )
        return found

    def row(self) -> dict[str, float]:
        """sampler/probe: mean |Δlogp| of the last probe; seconds/sync with the probe."""
        return {} if self.last is None else {"sampler/probe": self.last.mean, "seconds/sync": self.seconds}

    def close(self) -> None:
        self.engine.close()
