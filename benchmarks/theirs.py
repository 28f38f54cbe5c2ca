"""TRL's side: its GRPOTrainer, driven a step at a time by a callback, in the fastest CPU configuration that was found.

Needs the environment of `make parity`. What was tried is in `OPTIONS`; `python -m benchmarks --only options` measures it again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks import models
from benchmarks.process import memory
from benchmarks.settings import WORKLOADS, prompts, reward

NO_END = 10**6  # an end token outside every vocabulary: responses have the full length

# TrainingArguments and model arguments by precision. Attention is what is faster at these lengths: in bf16 the backward of torch's fused
# kernel is slow on CPUs.
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({"bf16": False}, {"dtype": "float32", "attn_implementation": "sdpa"}),
    "bf16 autocast": ({"bf16": True}, {"dtype": "float32", "attn_implementation": "eager"}),
    "bf16 weights": ({"bf16": False}, {"dtype": "bfloat16", "attn_implementation": "eager"}),
}
CHOSEN = "as measured"
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what might be faster, one at a time
    CHOSEN: ({}, {}),
    "attention sdpa": ({}, {"attn_implementation": "sdpa"}),
    "attention eager": ({}, {"attn_implementation": "eager"}),
    "optim adamw_torch": ({"optim": "adamw_torch"}, {}),
    "static cache": ({"cache_implementation": "static"}, {}),
    "gradient checkpointing (its default)": ({"gradient_checkpointing": True}, {}),
}


def trainer(model: str, precision: str, updates: int, option: str = CHOSEN) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    work = WORKLOADS[model]
    arguments, loading = PRECISIONS[precision]
    more, more_loading = OPTIONS[option]
    settings = {
        "output_dir": "unused",
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "shuffle_dataset": False,
        "max_steps": 10**9,
        "per_device_train_batch_size": work.rows,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": updates,
        "num_generations": work.group,
        "max_completion_length": work.tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "model_init_kwargs": {**loading, **more_loading},
    }
    made = GRPOTrainer(
        model=str(models.folder(model)),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=GRPOConfig(**{**settings, **arguments, **more}),
        train_dataset=Dataset.from_dict({"prompt": prompts(model, work.prompts) * 50}),
    )
    made.eos_token_ids = [NO_END]
    made.generation_config.eos_token_id = [NO_END]
    made.generation_kwargs["eos_token_id"] = [NO_END]
    made.model.generation_config.eos_token_id = None
    return made


def serve(
    receive: Callable[[], dict[str, Any]],
    reply: Callable[[dict[str, Any]], None],
    model: str,
    precision: str,
    updates: int,
    option: str = CHOSEN,
) -> None:
    """The messages of `ours.serve`; a probe is given the rollout that it is to use, and comes before the first step."""
    from transformers import TrainerCallback

    made = trainer(model, precision, updates, option)
    reply({"loaded_mb": memory("VmRSS")})
    while (message := receive())["do"] == "probe":
        reply(probe(made, message["prompts"], message["responses"]))
    if message["do"] == "quit":
        return
    clock, counts = _Clock(made), _Counts(made)

    def begin(message: dict[str, Any]) -> None:
        limit = message.get("tokens")
        made.generation_config.max_new_tokens = limit or WORKLOADS[model].tokens
        clock.begin()
        counts.begin()

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counts.updates += 1
            if counts.updates < updates:
                return
            reply({**clock.end(), **counts.end(), "peak_mb": memory()})
            message = receive()
            if message["do"] == "quit":
                control.should_training_stop = True
            else:
                begin(message)

    made.add_callback(Steps())
    begin(message)
    made.train()


class _Clock:
    """Seconds by phase, by wrapping the trainer's own methods: sample, old (log-probs without gradient), update and the rest."""

    def __init__(self, made: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.began = self.worked = 0.0
        self._wrap(made, "_generate", lambda: "sample")
        import torch

        self._wrap(made, "_get_per_token_logps_and_entropies", lambda: "" if torch.is_grad_enabled() else "old")

    def _wrap(self, made: Any, name: str, phase: Callable[[], str]) -> None:
        inner = getattr(made, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began, now = time.perf_counter(), phase()
            out = inner(*args, **kwargs)
            if now:
                self.seconds[now] += time.perf_counter() - began
            return out

        setattr(made, name, wrapped)

    def begin(self) -> None:
        self.seconds.clear()
        self.began, self.worked = time.perf_counter(), time.process_time()

    def end(self) -> dict[str, Any]:
        total, worked = time.perf_counter() - self.began, time.process_time() - self.worked
        known = {name: self.seconds.get(name, 0.0) for name in ("sample", "old")}
        return {
            "seconds": total,
            "cpu_seconds": worked,
            "phases": known | {"update": total - sum(known.values())},
        }  # reward and loop are in it: milliseconds


class _Counts:
    """Tokens generated, tokens in the loss, optimiser steps."""

    def __init__(self, made: Any) -> None:
        self.generated = self.trained = self.updates = 0
        generate, loss = made._generate, made._compute_loss

        def generated(*args: Any, **kwargs: Any) -> Any:
            out = generate(*args, **kwargs)
            self.generated += sum(map(len, out[1]))
            return out

        def trained(model: Any, inputs: dict[str, Any]) -> Any:
            self.trained += int(inputs["completion_mask"].sum())
            return loss(model, inputs)

        made._generate, made._compute_loss = generated, trained

    def begin(self) -> None:
        self.generated = self.trained = self.updates = 0

    def end(self) -> dict[str, Any]:
        return {"generated": float(self.generated), "trained": float(self.trained), "updates": self.updates}


def probe(made: Any, texts: list[str], responses: list[list[int]]) -> dict[str, Any]:
    """Loss, gradient norm, entropy and reward of TRL's own functions on a given rollout; the weights stay as they are."""
    import torch

    tokenizer, seen = made.processing_class, []
    known = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    decoded = tokenizer.batch_decode(responses, skip_special_tokens=True)
    made._generate = lambda prompts: (known, responses, None, decoded, None, {}, None, None)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    inner = made._calculate_rewards

    def rewards(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        seen.append(float(out.mean()))
        return out

    made._calculate_rewards = rewards
    try:
        inputs = made._generate_and_score_completions([{"prompt": text} for text in texts])
        loss = made._compute_loss(made.model, inputs)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in made.model.parameters() if p.grad is not None])
        made.model.zero_grad(set_to_none=True)
        entropy = made._metrics["train"]["entropy"][-1]
    finally:
        del made._generate, made._calculate_rewards
    return {"loss": float(loss.detach()), "gradient_norm": float(norm), "entropy": float(entropy), "reward": seen[0]}
