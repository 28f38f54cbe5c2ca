"""TRL: a real GRPOTrainer (or RLOOTrainer) on a tiny model. Its own code turns rewards into advantages and inputs into a loss.

Only what the trainer gets from outside is replaced: the completions, the rewards, and the log-probs of the current, old and
reference model (so that all is float64). ε of the z-score is 1e-4 and cannot be set.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.rewards import get_soft_overlong_punishment

from grpo_repro.objective import Objective
from parity.batches import END, GROUPS, LIMIT, PAD, PROMPT, SIZE, VOCABULARY, Batch, rollout
from parity.compare import Cannot, Expressed, Out, Peer, Run, out, parts

OPEN = 1e9  # "no bound", where a number is required
LOSS = {"sequence_mean": "grpo", "token_mean": "dapo", "constant_length": "dr_grpo", "sequence_sum": "luspo"}
SCALE = {"group_zscore": "group", "group_center": "none", "batch_std": "batch"}
CONFIG = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig, GMPOTrainer: GMPOConfig}
OUTSIDE = {
    "sampling.drop_zero_variance": "it has no dynamic sampling",
    "sampling.dynamic": "it has no dynamic sampling",
}


@cache
def trainer(kind: type, **settings: Any) -> Any:
    """A trainer with these settings; every other setting keeps TRL's default."""
    words = {"<pad>": PAD, "a": PROMPT, "</s>": END} | {f"t{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    config = CONFIG[kind](
        output_dir=_model(),
        report_to="none",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        max_completion_length=LIMIT,
        **settings,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = kind(
            model=_model(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}]),
            processing_class=fast,
        )
    made.model.train()
    made._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return made


@cache
def _model() -> str:
    """A folder with a tiny model: the trainers load their reference model from where the model came from."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = tempfile.mkdtemp(prefix="parity-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=PAD, **size)).save_pretrained(folder)
    return folder


def run_with(kind: type, vllm: bool = False, soft_cache: int = 0, **settings: Any) -> Run:
    """Completions and rewards → `_generate_and_score_completions` → `_compute_loss`, of the trainer with these settings."""

    def run(batch: Batch) -> Out:
        return compute(trainer(kind, **settings), batch, vllm, soft_cache)

    return run


def compute(made: Any, batch: Batch, vllm: bool, soft_cache: int, slices: list[torch.Tensor] | None = None) -> Out:
    b = batch.b
    leaves, logp_NT = batch.fresh()
    lengths = b.length_N.tolist()
    completions = [row[:n] for row, n in zip(batch.response_NT.tolist(), lengths, strict=True)]
    drawn = [row[:n] for row, n in zip(b.sampler_NT.tolist(), lengths, strict=True)] if vllm else None
    r_N = b.r_N
    if soft_cache:  # TRL's own reward function, added to the task's
        punish = get_soft_overlong_punishment(max_completion_len=LIMIT, soft_punish_cache=soft_cache)
        r_N = r_N + torch.tensor(punish(completion_ids=completions), dtype=r_N.dtype)
    known = {id(made.model): b.old_NT, id(getattr(made, "ref_model", None)): b.ref_NT}
    entropy_NT = torch.zeros_like(logp_NT)
    made._generate = lambda prompts: _generated(kind_of(made), [[PROMPT]] * len(prompts), completions, drawn)
    made._calculate_rewards = lambda *_: r_N.unsqueeze(1)
    made._get_per_token_logps_and_entropies = lambda model, *_, **__: (known[id(model)], entropy_NT, None)
    made.use_vllm = vllm
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    inputs = _in_float64(made._generate_and_score_completions, [{"prompt": "a"}] * len(completions))
    total = torch.zeros((), dtype=logp_NT.dtype)
    for index_K in slices or [torch.arange(len(completions))]:
        given = {k: v[index_K] if v.ndim else v for k, v in inputs.items()}
        made._get_per_token_logps_and_entropies = lambda *_, at=index_K, **__: (logp_NT[at], entropy_NT[at], None)
        total = total + _in_float64(made._compute_loss, made.model, given)
    return out(total, leaves)


def _in_float64(function: Any, *args: Any) -> Any:
    """Its G/(G−1) and SAPO's temperatures are made of Python numbers, so of torch's default type."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return function(*args)
    finally:
        torch.set_default_dtype(usual)


def kind_of(made: Any) -> type:
    return type(made)


def _generated(kind: type, prompts: list[Any], completions: list[Any], drawn: Any) -> tuple[Any, ...]:
    if kind is RLOOTrainer:
        return prompts, completions, [""] * len(prompts)
    return prompts, completions, None, [""] * len(prompts), drawn, {}, None, None


def express(o: Objective, kind: str) -> Expressed:
    """TRL's words for an Objective. Raises Cannot."""
    for slot in ("transform", "sampling"):
        name, _ = parts(o, slot)
        if name not in ("none", "all"):
            raise Cannot(f"{slot}.{name}", OUTSIDE.get(f"{slot}.{name}", "no such option"))
    a, a_set = parts(o, "aggregation")
    if a not in LOSS or a_set.get("per") == "group":
        raise Cannot(f"aggregation.{a}" + ("·group" if a_set else ""), "no such loss_type")
    if parts(o, "advantage")[0] == "leave_one_out":
        return _rloo(o, kind)
    settings = {"loss_type": LOSS[a], **_advantage(o), **_ratio(o), **_clip(o, a), **_kl(o), **_gate(o)}
    over, over_set = parts(o, "overlong")
    if over == "mask":
        if a in ("sequence_mean", "constant_length", "sequence_sum"):
            raise Cannot("overlong.mask with a mean over rows", "hidden rows count in N: see the deviations")
        settings["mask_truncated_completions"] = True
    soft_cache = (over_set["cache"] or LIMIT // 5) if over == "soft_penalty" else 0
    vllm = weighed(o)
    kind_of_trainer = GMPOTrainer if parts(o, "clip")[0] == "gmpo" else GRPOTrainer
    run = run_with(kind_of_trainer, vllm is not None, soft_cache, **settings, **(vllm or {}))
    words = settings | ({"use_vllm": True, **vllm} if vllm else {})
    return Expressed(run, words | ({"reward": "get_soft_overlong_punishment"} if soft_cache else {}))


def _advantage(o: Objective) -> dict[str, Any]:
    name, p = parts(o, "advantage")
    if parts(o, "kl_in_reward")[0] != "none":
        raise Cannot(f"kl_in_reward.{parts(o, 'kl_in_reward')[0]}", "only its RLOOTrainer charges a KL (k1) to the reward")
    if name not in SCALE:
        raise Cannot(f"advantage.{name}", "scale_rewards is group, batch or none")
    if p.get("ddof", 1) != 1 or p.get("eps", 1e-4) != 1e-4:
        raise Cannot(f"advantage.{name} with other ddof or ε", "they are 1 and 1e-4")
    return {"scale_rewards": SCALE[name]}


def _ratio(o: Objective) -> dict[str, Any]:
    name, _ = parts(o, "ratio")
    if name == "prefix":
        raise Cannot("ratio.prefix", "no such importance_sampling_level")
    if name == "sequence_token" and (parts(o, "correction")[1].get("level") == "token" or parts(o, "kl")[0] == "k3_unbiased"):
        raise Cannot("ratio.sequence_token with a token weight", "its core trainer has GSPO, not GSPO-token")
    level = "sequence" if name.startswith("sequence") else "token"
    once = {"num_iterations": 1} if name == "none" else {"num_iterations": 2}  # with one update it takes π_old = sg π_θ
    return {"importance_sampling_level": level, **once}


def _clip(o: Objective, a: str) -> dict[str, Any]:
    name, p = parts(o, "clip")
    if name == "truncate":
        if a != "token_mean" or p["w_min"] > 0:
            raise Cannot(
                "clip.truncate with a lower bound or another aggregation", "its cispo caps above only, and is a token mean"
            )
        if parts(o, "ratio")[0] == "sequence_token":
            raise Cannot("clip.truncate with sequence_token", "its core trainer has GSPO, not GSPO-token")
        return {"loss_type": "cispo", "epsilon_high": p["w_max"]}
    if name == "soft_sigmoid":
        if a != "sequence_mean":
            raise Cannot("clip.soft_sigmoid with another aggregation", "its sapo is a sequence mean")
        return {"loss_type": "sapo", "sapo_temperature_pos": p["tau_pos"], "sapo_temperature_neg": p["tau_neg"]}
    if name == "gmpo":
        if a != "sequence_mean" or parts(o, "ratio")[0] not in ("token", "none") or parts(o, "correction")[0] != "none" or o.gate:
            raise Cannot("clip.gmpo with another ratio, weight or aggregation", "its GMPOTrainer has one form")
        if parts(o, "kl")[0] == "k3_unbiased":
            raise Cannot("clip.gmpo with k3_unbiased", "its GMPOTrainer has k3 without the weight")
        return {"epsilon": p["eps_low"], "epsilon_high": p["eps_high"]}
    if name not in ("none", "ppo", "dual"):
        raise Cannot(f"clip.{name}", "no such loss_type")
    low = 1.0 if name == "none" or p["eps_low"] is None else p["eps_low"]
    high = OPEN if name == "none" or p["eps_high"] is None else p["eps_high"]
    return {"epsilon": low, "epsilon_high": high} | ({"delta": p["w_max"]} if name == "dual" else {})


def _kl(o: Objective) -> dict[str, Any]:
    name, p = parts(o, "kl")
    if name == "none":
        return {"beta": 0.0}
    if name not in ("k3", "k3_unbiased"):
        raise Cannot(f"kl.{name}", "its loss has k3, plain or weighted")
    if name == "k3_unbiased" and parts(o, "ratio")[0] != "token":
        raise Cannot("kl.k3_unbiased with a sequence ratio", "it multiplies by the sequence's ratio: see the deviations")
    return {"beta": p["beta"], "use_bias_correction_kl": name == "k3_unbiased"}


def _gate(o: Objective) -> dict[str, Any]:
    if not o.gate:
        return {}
    name, p = parts(replace(o, clip=o.gate[0]), "clip")
    if name != "off_policy" or len(o.gate) > 1:
        raise Cannot(f"gate.{name}", "no such mask")
    return {"off_policy_mask_threshold": p["delta"]}


def weighed(o: Objective) -> dict[str, Any] | None:
    name, p = parts(o, "correction")
    if name == "none":
        return None
    if p["level"] == "geometric":
        raise Cannot(f"correction.{name}·geometric", "levels are token and sequence (the product)")
    if o.gate:
        raise Cannot("gate.off_policy with a correction", "it then measures from the sampler: see the deviations")
    clip_min = {"vllm_importance_sampling_clip_min": p["w_min"]} if p.get("w_min") else {}
    return {"vllm_importance_sampling_mode": f"{p['level']}_{name}", "vllm_importance_sampling_clip_max": p["w_max"], **clip_min}


def _rloo(o: Objective, kind: str) -> Expressed:
    """RLOOTrainer: a clipped product of ratios; with one update it is REINFORCE with the leave-one-out baseline."""
    plain = ("ratio.none", "clip.none", "correction.none", "kl.none", "overlong.keep", "aggregation.sequence_sum")
    if kind != "on_policy" or o.gate or any(parts(o, p.split(".")[0])[0] != p.split(".")[1] for p in plain):
        raise Cannot(
            "advantage.leave_one_out elsewhere", "only its RLOOTrainer has it: one update, sum over tokens, no other knob"
        )
    name, p = parts(o, "kl_in_reward")
    if name not in ("none", "k1"):
        raise Cannot(f"kl_in_reward.{name}", "its RLOOTrainer charges k1")
    settings = {"beta": p.get("beta", 0.0), "normalize_advantages": False}
    return Expressed(run_with(RLOOTrainer, **settings), {"trainer": "RLOOTrainer", **settings}, compared="gradient")


peer = Peer("TRL", "trl", express, rollout)
