"""The side of vLLM's weight-transfer interface that runs in vLLM's worker: new weights from memory, or from a safetensors file.

vLLM finds it as a plugin (entry point `vllm.general_plugins` of this package), in process and in a server that was started with
`--weight-transfer-config '{"backend": "grpo_repro"}'`. Written for vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """All weights by their Hugging Face names: `weights` in process, `file` (safetensors) for a server on the same machine."""

    weights: Mapping[str, Tensor] | None = None
    file: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self.weights is not None:
            yield from self.weights.items()
        else:
            with safe_open(str(self.file), framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # it is no mapping
                    yield name, stored.get_tensor(name)


class FromTrainer(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No connection to open."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(iter(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def repack_tied_heads(model: torch.nn.Module) -> None:
    """A head that shares the embedding's weight receives none of its own, so vLLM leaves its packed copy (CPU) as it was: pack anew."""
    shared = {
        id(m.weight) for m in model.modules() if getattr(m, "weight", None) is not None and not isinstance(m, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in shared:
            module.quant_method.process_weights_after_loading(module)
