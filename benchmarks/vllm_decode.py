"""Decode speed of vLLM by itself, at its best here, as one line of JSON. To be run in the environment of `make vllm`.

    python -m benchmarks.vllm_decode --model FOLDER --rows 16 --tokens 64 --threads 1 --dtype bfloat16 --repeat 3

`seconds` are those of each repetition of one call: `rows` responses of exactly `tokens` tokens, with the drawn tokens' log-probs.
On a CPU vLLM asks for Intel's OpenMP and tcmalloc to be preloaded; what is found is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("libiomp5.so", "libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
PLACES = (Path(sys.prefix) / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
PRELOADED = "GRPO_REPRO_PRELOADED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a model with its tokenizer")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=2, help="different prompts; each has rows / prompts responses")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seeded", action="store_true", help="a seed a request, as a run needs to repeat")
    parser.add_argument("--compile", action="store_true", help="vLLM's compiled graphs instead of eager layers")
    how = parser.parse_args()
    if PRELOADED not in os.environ:
        again(how.threads)
    print(json.dumps(measured(how)), flush=True)


def again(threads: int) -> None:
    """This command once more, with the environment that must be there before a process starts."""
    found = [str(p / name) for name in LIBRARIES for p in PLACES if (p / name).is_file()]
    names = {Path(f).name.split(".")[0].removesuffix("_minimal"): f for f in found[::-1]}  # one of each, the first found
    environment = {
        **os.environ,
        PRELOADED: " ".join(sorted(Path(f).name for f in names.values())),
        "LD_PRELOAD": ":".join(filter(None, [*names.values(), os.environ.get("LD_PRELOAD", "")])),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.vllm_decode", *sys.argv[1:]], environment)


def measured(how: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(how.threads)
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model=how.model,
        dtype=how.dtype,
        max_model_len=how.prompt_tokens + how.tokens + 1,
        max_num_seqs=how.rows,
        kv_cache_memory_bytes=2**29,
        enforce_eager=not (how.compile or torch.cuda.is_available()),
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
    )
    start = time.perf_counter() - began
    prompts = [{"prompt_token_ids": [1000 + 7 * i + 31 * t for t in range(how.prompt_tokens)]} for i in range(how.prompts)]

    def once(i: int) -> tuple[float, float]:
        """Seconds of the clock, and of all cores."""
        params = SamplingParams(
            n=how.rows // how.prompts,
            seed=i if how.seeded else None,
            temperature=1.0,
            max_tokens=how.tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        llm.reset_prefix_cache()
        began, worked = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        drawn = [len(one.token_ids) for request in outputs for one in request.outputs]
        assert drawn == [how.tokens] * how.rows, f"vLLM drew {drawn}, not {how.rows} times {how.tokens} tokens"
        return seconds, worked

    once(0)  # its first call compiles and warms up
    seconds, worked = map(list, zip(*(once(1 + i) for i in range(how.repeat)), strict=True))
    return {
        "engine": "vllm",
        "version": version(),
        "seconds": seconds,
        "cpu_seconds": worked,
        "tokens_per_second": [how.rows * how.tokens / s for s in seconds],
        "start_seconds": start,
        "preloaded": os.environ[PRELOADED].split(),
        "cpu": platform.processor() or platform.machine(),
        **{k: v for k, v in vars(how).items() if k != "model"},
    }


def version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main()
