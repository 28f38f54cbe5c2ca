"""vLLM in this process: the engine a user would take on a GPU, and its CPU build. Written for vLLM 0.32.

The policy is saved to a folder that vLLM loads once; after each update its weights are handed over in memory, through vLLM's
weight-transfer interface. Log-probs are the processed ones: of the distribution drawn from, at the temperature.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from grpo_repro import policy as policies
from grpo_repro.policy import Policy
from grpo_repro.rollout import plugin
from grpo_repro.rollout.engine import Ask, Completion
from grpo_repro.types import EngineError, UserError

GIB = 2**30
# read by vLLM while it starts: in this process, threads as torch has them, no telemetry, only its errors
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # ours is one more than the tokens there are, and that may be one more than the model's
}


class InProcess:
    """An `Engine`. Open it with `opened`; `close` gives its memory back."""

    name = "vllm"

    def __init__(self, llm: Any, scratch: tempfile.TemporaryDirectory[str]) -> None:
        self._llm, self._scratch = llm, scratch
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def draw(
        self, asks: Sequence[Ask], limit: int, end_ids: Collection[int], temperature: float, top_p: float, top_k: int
    ) -> list[list[Completion]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = [
            SamplingParams(
                n=ask.n,
                seed=ask.seed,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=limit,
                stop_token_ids=sorted(end_ids),
                ignore_eos=True,  # ours are among the stop tokens
                logprobs=0,  # the drawn token's alone
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for ask in asks
        ]
        prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        try:
            with torch.random.fork_rng():  # it draws from the global generators too, and throws that away
                outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:  # vLLM raises whatever its parts raise
            raise EngineError(
                f"vLLM failed while it drew ({_short(error)}): lower machine.vllm.memory, or see its log."
            ) from error
        return [[_drawn(one) for one in sorted(request.outputs, key=lambda o: o.index)] for request in outputs]

    def sync(self, policy: Policy) -> None:
        weights = {name: p.detach() for name, p in policy.model.named_parameters()}
        try:
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": {"weights": weights}})
            self._llm.finish_weight_update()
            fresh = self._llm.reset_prefix_cache()
        except Exception as error:  # vLLM raises whatever its parts raise
            raise EngineError(
                f"vLLM did not take the policy's new weights ({_short(error)}): what it holds now is undefined."
            ) from error
        if not fresh:
            raise EngineError("vLLM did not empty its prefix cache after new weights: it would go on from keys of the old ones.")

    def close(self) -> None:
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with suppress(Exception):  # it is on its way out
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()
        self._scratch.cleanup()


def opened(policy: Policy, *, context: int, dtype: str = "float32", memory: float = 1.0, rows: int = 512) -> InProcess:
    """Start vLLM on the policy: `context` is one more than a prompt and its response have, `memory` GiB of keys and values, `rows` at once.

    Takes about 5 seconds on a CPU. Raises UserError where vLLM is not installed or cannot run the model.
    """
    try:
        with _environment():
            from vllm import LLM
    except ImportError as error:
        raise UserError(
            f"machine.engine is vllm, but vLLM cannot be imported here ({_short(error)}): run `make vllm` and use .venv-vllm, or write "
            "engine: decoder."
        ) from None
    if reason := _unsupported(policy):
        raise UserError(f"the engine vllm cannot run the model {policy.name!r}: {reason}; write engine: decoder or transformers.")
    scratch = tempfile.TemporaryDirectory(prefix="grpo-repro-vllm-")
    folder = os.path.join(scratch.name, "policy")
    try:
        policies.save(policy, folder)
        with _environment():
            plugin.register()
            llm = LLM(
                model=folder,
                dtype=dtype,
                max_model_len=context,
                max_num_seqs=rows,
                kv_cache_memory_bytes=int(memory * GIB),
                enforce_eager=policy.device.type == "cpu",  # compiling pays on GPUs only
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # no penalties from the model's own
                weight_transfer_config={"backend": plugin.BACKEND},
                disable_log_stats=True,
                seed=0,
            )
        return InProcess(llm, scratch)
    except UserError:
        scratch.cleanup()
        raise
    except Exception as error:  # vLLM raises whatever its parts raise
        scratch.cleanup()
        raise UserError(
            f"vLLM did not start on the model {policy.name!r} ({_short(error)}): give it memory with machine.vllm.memory, or write "
            "engine: decoder."
        ) from error


def _unsupported(policy: Policy) -> str | None:
    """Why vLLM would fail on it deep inside; None where it should run."""
    if policy.device.type != "cpu":
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = policy.model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    return None if size in sizes else f"its heads have {size} dimensions, and vLLM's attention on CPUs takes {sizes}"


def _drawn(one: Any) -> Completion:
    tokens = list(one.token_ids)
    chosen = [at.get(token) for token, at in zip(tokens, one.logprobs or [], strict=False)]
    return Completion(tokens, [c.logprob for c in chosen if c is not None])


@contextmanager
def _environment(changes: Mapping[str, str] = ENVIRONMENT) -> Iterator[None]:
    """vLLM's settings for its start alone; torch's threads and random numbers are afterwards what they were."""
    before, threads, setter = {k: os.environ.get(k) for k in changes}, torch.get_num_threads(), torch.set_num_threads
    os.environ.update(changes)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads = setter  # its CPU worker replaces it by a function that does nothing
        torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
