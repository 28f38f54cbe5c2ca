"""What vLLM calls when it starts, in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations

BACKEND = "grpo_repro"


def register() -> None:
    """Make our weight-transfer backend known to vLLM's factory; vLLM may call this more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "grpo_repro.rollout.vllm_weights", "FromTrainer")
