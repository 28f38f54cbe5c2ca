"""Where TRL's words give another number than ours, and what takes the difference out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer

from grpo_repro.knobs import advantage, aggregation, clip, correction, gate, kl, overlong, ratio
from grpo_repro.objective import Objective
from parity.batches import GROUPS, SIZE, Batch
from parity.cases import BASE
from parity.compare import Deviation, Out, Run, ours
from parity.peers.trl import compute, run_with, trainer, weighed


def deviations() -> list[Deviation]:
    """Where the same words give another number."""
    dapo = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "num_iterations": 2}
    k3 = replace(BASE, kl=partial(kl.k3, beta=0.1))
    seq = replace(k3, ratio=ratio.sequence, kl=partial(kl.k3_unbiased, beta=0.1))
    hidden = replace(BASE, overlong=overlong.mask, aggregation=aggregation.sequence_mean)
    opsm = replace(BASE, gate=(partial(gate.off_policy, delta=0.1),))
    cispo = replace(BASE, clip=partial(clip.truncate, w_max=1.2))
    rloo = Objective(ratio=ratio.none, clip=clip.none, advantage=advantage.leave_one_out, aggregation=aggregation.sequence_sum)
    return [
        Deviation(
            "clip.truncate",
            "CISPO's cap is epsilon_high itself, without 1+, so its default .2 replaces every weight above .2 by .2 "
            "(compared: 1+ε_high = 1.2 as elsewhere, against epsilon_high = .2; converted: our w_max = .2)",
            ours(cispo),
            run_with(GRPOTrainer, loss_type="cispo", num_iterations=2),
            ours(replace(cispo, clip=partial(clip.truncate, w_max=0.2))),
        ),
        Deviation(
            "kl.k3",
            "use_bias_correction_kl is on by default, so beta > 0 gives k3 times the ratio, not DeepSeekMath's k3 "
            "(converted: our kl.k3_unbiased)",
            ours(k3),
            run_with(GRPOTrainer, beta=0.1, **dapo),
            ours(replace(k3, kl=partial(kl.k3_unbiased, beta=0.1))),
        ),
        Deviation(
            "kl.k3_unbiased",
            "with importance_sampling_level=sequence the KL is multiplied by the response's geometric-mean ratio, which is not the "
            "token's importance weight and does not make it unbiased",
            ours(seq),
            run_with(GRPOTrainer, beta=0.1, importance_sampling_level="sequence", **dapo),
            ours(replace(seq, kl=lambda now, b: torch.exp(ratio.sequence(now, b)) * kl.k3(now, b, beta=0.1))),
        ),
        Deviation(
            "overlong.mask",
            "a mean over responses (grpo, dr_grpo, luspo) still counts the hidden responses in N, so hiding some shrinks the step "
            "(converted: our loss times live rows over N)",
            ours(hidden),
            run_with(GRPOTrainer, **dapo | {"loss_type": "grpo", "mask_truncated_completions": True}),
            ours(hidden, scale=lambda batch: float((~batch.b.cut_N).double().mean())),
        ),
        Deviation(
            "gate.off_policy",
            "with vLLM the mask measures the distance from the sampler's log-probs instead of π_old "
            "(converted: our gate given the sampler as π_old)",
            _corrected(opsm),
            run_with(GRPOTrainer, True, off_policy_mask_threshold=0.1, **dapo, **weighed(_WIDE) or {}),
            _corrected(replace(opsm, gate=(lambda now, b: gate.off_policy(now, replace(b, old_NT=b.sampler_NT), delta=0.1),))),
        ),
        Deviation(
            "advantage.leave_one_out",
            "RLOOTrainer keeps PPO's clip on the product of a response's ratios, so after the first update it is no longer "
            "REINFORCE (with one update the gradients agree)",
            ours(rloo),
            run_with(RLOOTrainer, beta=0.0),
            compared="gradient",
        ),
        Deviation(
            "aggregation.token_mean",
            "dapo divides by the mean token count of the accumulation windows that share a generation batch, so with "
            "steps_per_generation ≠ gradient_accumulation_steps the denominator is not this step's "
            "(converted: our loss times this step's tokens over that mean)",
            _half(BASE, lambda batch: 1.0),
            _accumulated(3, 6, **dapo),
            _half(BASE, lambda batch: 2 * int(batch.b.mask_NT[:_HALF].sum()) / int(batch.b.mask_NT.sum())),
        ),
        Deviation(
            "aggregation.token_mean",
            "bnpo under gradient accumulation is the mean of micro-batch token means, not a token mean of the step "
            "(converted: the mean of our losses on the micro-batches)",
            ours(BASE),
            _accumulated(6, 6, **dapo | {"loss_type": "bnpo"}),
            _mean_of_groups(BASE),
        ),
        Deviation(
            "aggregation.token_mean",
            "",
            ours(BASE),
            _accumulated(6, 6, **dapo),
            agrees="dapo over six micro-batches of unequal token counts is the token mean of the step",
        ),
        Deviation(
            "aggregation.sequence_mean·row",
            "",
            ours(replace(BASE, aggregation=aggregation.sequence_mean)),
            _accumulated(6, 6, **dapo | {"loss_type": "grpo"}),
            agrees="grpo over six micro-batches of equal row counts is the sequence mean of the step",
        ),
    ]


_HALF = GROUPS * SIZE // 2
_WIDE = replace(BASE, correction=partial(correction.truncate, w_max=1e6, level="token"))


def _corrected(o: Objective) -> Run:
    return ours(replace(o, correction=_WIDE.correction))


def _group(i: int) -> torch.Tensor:
    return torch.arange(i * SIZE, (i + 1) * SIZE)


def _accumulated(micro_batches: int, steps_per_generation: int, **settings: Any) -> Run:
    """The first micro-batches (one group each) of a generation batch, their losses added up as `backward` would."""
    counts = {"gradient_accumulation_steps": micro_batches, "steps_per_generation": steps_per_generation}

    def run(batch: Batch) -> Out:
        made = trainer(GRPOTrainer, **settings, **counts)
        return compute(made, batch, vllm=False, soft_cache=0, slices=[_group(i) for i in range(micro_batches)])

    return run


def _half(o: Objective, scale: Any) -> Run:
    """Our loss on the first half of the rollout, as one optimiser step."""
    return lambda batch: ours(o, scale=lambda _: scale(batch))(batch.rows(torch.arange(_HALF)))


def _mean_of_groups(o: Objective) -> Run:
    """The mean of our losses over micro-batches of one group, each normalised by itself."""

    def run(batch: Batch) -> Out:
        outs = [ours(o)(batch.rows(_group(i))) for i in range(GROUPS)]
        mean = [sum(getattr(x, name) for x in outs) / GROUPS for name in ("loss", "gradient", "size")]
        return Out(*mean)

    return run
