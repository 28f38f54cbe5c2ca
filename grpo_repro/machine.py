"""The part of a run's configuration that says where and how fast it is computed: device, threads, engine, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_repro.types import Positive


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Vllm(Strict):
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="of its weights and products, as a server was started"
    )
    memory: Positive = Field(default=1.0, description="in process: GiB of keys and values")
    timeout: Positive = Field(default=600.0, description="server: seconds that one request may take")
    tolerance: Positive | None = Field(default=None, description="of the probe after a sync, mean |Δlogp|; null: by the dtypes")


class Machine(Strict):
    device: str = "auto"
    threads: int = Field(default=0, ge=0, description="torch threads; 0: leave as it is")
    token_budget: int = Field(default=16384, ge=1, description="padded tokens a micro-batch, prompt included")
    gradient_checkpointing: bool = Field(
        default=False, description="compute layers again in the backward pass: less memory, slower"
    )
    batch_rows: int = Field(default=512, ge=1, description="rows decoded at once")
    engine: Literal["decoder", "transformers", "vllm"] = Field(
        default="decoder", description="what draws; vllm has random numbers of its own, so it counts in the run's key"
    )
    server: str | None = Field(default=None, description="URL of a `vllm serve` on this machine; null: vLLM in this process")
    vllm: Vllm = Vllm()
    overlap: bool = Field(
        default=False,
        description="draw in another process, ahead of the trainer by sampler.staleness; threads are each process's",
    )
    checkpoint_every: int = Field(default=10, ge=0, description="steps between checkpoints of `grpo-repro run`; 0: none")
