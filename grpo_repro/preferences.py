"""A reward model taught in the repository: preferences between responses that the warm-start policy gave to the same prompt.

The task's verifier says which of two is preferred; ties are dropped. The loss is Bradley and Terry's, −log σ(r(y⁺) − r(y⁻)), as in
InstructGPT (2203.02155, Eq. 1). Models are cached by (task, warm start, sizes, seed, numerics version).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from grpo_repro import NUMERICS, paths, reward_model, tasks, warmstart
from grpo_repro import policy as policies
from grpo_repro.policy import Policy
from grpo_repro.reward_model import RewardModel
from grpo_repro.rollout import sample
from grpo_repro.tasks import Task, pairs
from grpo_repro.types import Prompt, UserError

TASKS = ("short", "tail")  # with a warm start
WORD = "preferences"  # what `model:` says in YAML
TRAIN, HELDOUT = -2, -3  # step indices of the sampling, no training step's
DEEPER = 2  # layers above the policy's own
LR, BETAS, WARMUP, CLIP = 3e-3, (0.9, 0.98), 20, 1.0


@dataclass(frozen=True)
class Sizes:
    warm_steps: int = 350  # of the policy that is sampled
    prompts: int = 1200
    group: int = 16  # responses a prompt
    steps: int = 500
    batch: int = 16  # prompts a step


@dataclass(frozen=True)
class Compared:
    """Different responses to one prompt. Verdicts of the same `what` are compared: the whole response (-1), or its k-th prefix."""

    prompt: Prompt
    texts: tuple[str, ...]
    right: tuple[bool, ...]  # the task verifier's word
    verdicts: tuple[tuple[int, int, int, bool], ...]  # (what, text, last token of it, right)


def prepare(task: str, seed: int, cache: Path, sizes: Sizes | None = None) -> Path:
    """The folder of the reward model of a tiny task, trained the first time. Its preferences.json has the held-out accuracy.

    Raises UserError for a task without a warm start.
    """
    if task not in TASKS:
        raise UserError(
            f"reward model {WORD!r} is taught on a tiny task ({', '.join(TASKS)}), not {task!r}; give learned a folder."
        )
    sizes = sizes or Sizes()
    what = {"task": task, "seed": seed, "numerics": NUMERICS, **asdict(sizes)}
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / "rewards" / f"{task}-s{seed}-{key}"
    paths.writable(folder.parent, "GRPO_REPRO_CACHE")
    with FileLock(f"{folder}.lock"):
        if not (folder / "preferences.json").is_file():
            built = tasks.bound(task)(policies.tiny(pairs.SYMBOLS).encode_chat)
            start = warmstart.start(built, "warm", sizes.warm_steps, seed, cache, torch.device("cpu"))
            drawn = built.draw(seed, TRAIN, min(sizes.prompts, len(built.train)))
            shown = collect(start, built, drawn, seed, TRAIN, sizes.group)
            asked = collect(start, built, built.exam(sizes.prompts), seed, HELDOUT, sizes.group)
            scorer = train_preferences(start, shown, seed, sizes)
            report = {"prompts_compared": len(shown), "heldout_accuracy": accuracy(scorer, asked), **what}
            policies.save(Policy(scorer.model, scorer.tokenizer, start.end_ids, scorer.name), folder)
            paths.write(folder / "preferences.json", json.dumps(report, indent=1) + "\n")
    return folder


def collect(policy: Policy, task: Task, prompts: Sequence[Prompt], seed: int, step: int, group: int) -> tuple[Compared, ...]:
    """Responses of the policy to each prompt, compared; a prompt all of whose verdicts are ties is dropped.

    A prefix that ends a step is right where that step is; the last token belongs to the whole response alone. (From whole responses
    alone this small model learns next to nothing: accuracy .52 after 400 steps, .74 with the steps.) Raises UserError when nothing is
    left.
    """
    rollout = sample(policy, prompts, group, limit=task.limit, temperature=1.0, seed=seed, step=step)
    found = []
    for g, prompt in enumerate(prompts):
        rows = (rollout.group_N == g).nonzero()[:, 0].tolist()
        drawn = dict.fromkeys(policy.decode(rollout.response_NT[n, : int(rollout.length_N[n])].tolist()) for n in rows)
        texts = tuple(text for text in drawn if text)
        right = tuple(task.verify(prompt, text)[0] == 1.0 for text in texts)
        verdicts = [(-1, i, len(text) - 1, right[i]) for i, text in enumerate(texts)]
        for i, text in enumerate(texts):
            steps = enumerate(task.steps(prompt, list(text)))
            verdicts += [(k, i, end, score == 1.0) for k, (end, score) in steps if end < len(text) - 1]
        mixed = {what for what in {v[0] for v in verdicts} if len({v[3] for v in verdicts if v[0] == what}) == 2}
        if mixed:
            found.append(Compared(prompt, texts, right, tuple(v for v in verdicts if v[0] in mixed)))
    if not found:
        raise UserError(f"no prompt of task {task.name} got a right and a wrong response: there is no preference to learn from.")
    return tuple(found)


def train_preferences(start: Policy, shown: Sequence[Compared], seed: int, sizes: Sizes) -> RewardModel:
    """A reward model that starts as the policy's backbone and is taught for `sizes.steps` steps of AdamW; depends on the seed alone.

    All comparisons of a prompt are in one batch (InstructGPT, Sec. 3.5).
    """
    scorer = RewardModel(_untaught(start, seed), start.tokenizer, WORD)
    model = scorer.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    rng = np.random.default_rng(seed)
    for i in range(sizes.steps):
        loss = _loss(scorer, [shown[k] for k in rng.integers(len(shown), size=sizes.batch)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (i + 1) / WARMUP) * (1 - i / sizes.steps)
        optimizer.step()
    return RewardModel(model.requires_grad_(False), start.tokenizer, WORD)


def bradley_terry(r_K: Tensor, right_K: Tensor, pool_K: Tensor) -> Tensor:
    """−mean log σ(r⁺ − r⁻) over every right and wrong entry of the same pool: log 2 where scores are equal."""
    preferred_KK = right_K[:, None] & ~right_K[None, :] & (pool_K[:, None] == pool_K[None, :])
    return -F.logsigmoid(r_K[:, None] - r_K[None, :])[preferred_KK].mean()


def accuracy(scorer: RewardModel, asked: Sequence[Compared]) -> float:
    """Share of the pairs of a right and a wrong response to one prompt where the right one scores higher; a draw is half."""
    won, pairs_ = 0.0, 0
    for one in asked:
        r = np.array(reward_model.score(scorer, [one.prompt] * len(one.texts), one.texts))
        right = np.array(one.right)
        gap = r[right][:, None] - r[~right][None, :]
        won, pairs_ = won + float(((gap > 0) + 0.5 * (gap == 0)).sum()), pairs_ + gap.size
    if not pairs_:
        raise UserError("no prompt got a right and a wrong response: there is nothing to measure the reward model's accuracy on.")
    return won / pairs_


def wanted(spec: Any) -> bool:
    """Whether a reward's YAML value names this model anywhere."""
    if isinstance(spec, Mapping):
        return spec.get("model") == WORD or any(wanted(value) for value in spec.values())
    return isinstance(spec, list | tuple) and any(map(wanted, spec))


def _loss(scorer: RewardModel, batch: Sequence[Compared]) -> Tensor:
    tokens: list[list[int]] = []
    entries: list[tuple[int, int, bool, int]] = []  # row, position, right, pool
    for b, one in enumerate(batch):
        prompt = len(scorer.encode(one.prompt.text, ""))
        entries += [(len(tokens) + i, prompt + end, right, 1000 * b + what) for what, i, end, right in one.verdicts]
        tokens += [scorer.encode(one.prompt.text, text) for text in one.texts]
    row_K, at_K, right_K, pool_K = (torch.tensor(column) for column in zip(*entries, strict=True))
    return bradley_terry(reward_model.values(scorer, tokens)[row_K, at_K], right_K, pool_K)


def _untaught(start: Policy, seed: int) -> PreTrainedModel:
    """The policy's layers, DEEPER ones above them that begin as the identity, and a head from 0.

    The policy's last layer knows which digit is due; only a layer above it can compare that with the digit that came.
    """
    own = start.model.config
    shape = {k: v for k, v in own.to_dict().items() if k not in ("id2label", "label2id")}
    config = LlamaConfig(**{**shape, "num_hidden_layers": own.num_hidden_layers + DEEPER, "num_labels": 1})
    with torch.random.fork_rng(devices=[]):  # the constructor draws from the global generator
        model = LlamaForSequenceClassification(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            silent = name.endswith(("o_proj.weight", "down_proj.weight", "score.weight"))
            if weight.dim() > 1:
                weight.normal_(0.0, 0.0 if silent else own.hidden_size**-0.5, generator=generator)
    model.model.load_state_dict(start.model.base_model.state_dict(), strict=False)
    return model.eval().requires_grad_(True)
