"""One run's configuration: strict, frozen, and complete enough to repeat the run. An unknown key is an error.

policy     the model and where it starts          objective  knobs ① to ⑤, ⑦ and the group filter of ⑥
sampler    how old and exact the weights that draw are
task       prompts and their verifier             rollout    the numbers of ⑥: G, prompts a step, μ, minibatches, temperature
scale      steps, optimiser, evaluation           machine    device, threads, engine: changes speed, not the question (vllm: its chance)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from grpo_repro import NUMERICS, knobs, presets, strict_yaml, tasks, weights
from grpo_repro.machine import Machine, Strict
from grpo_repro.objective import Objective
from grpo_repro.spec import Spec, bind, nearest, problem, public, unbind
from grpo_repro.types import NonNegative, Nucleus, Positive, Share, UserError


class Policy(Strict):
    name: str = Field(default="tiny", description="tiny, smollm2, or any Hugging Face causal LM by path or hub name")
    start: Literal["warm", "peaked", "scratch"] = Field(default="warm", description="tiny only: which supervised start")
    warm_steps: int = Field(default=350, ge=0, description="tiny only: optimiser steps of the supervised warm start")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of the weights")
    compute: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of the operands of matrix products on fp32 weights; bfloat16 pays where the hardware has it",
    )
    trust_remote_code: bool = Field(default=False, description="run code that a model's repository ships: only if you trust it")


class Rollout(Strict):
    group_size: int = Field(default=16, ge=1, description="G, responses a prompt")
    prompts: int = Field(default=24, ge=1, description="prompts (groups) a step")
    updates: int = Field(default=1, ge=1, description="μ, passes over one rollout")
    minibatches: int = Field(default=1, ge=1, description="optimiser steps a pass; each takes whole groups")
    top_p: Nucleus = Field(default=1.0, description="nucleus; the trainer renormalises over the same support")
    top_k: int = Field(default=0, ge=0, description="0: all tokens")
    keep_support: bool = Field(
        default=True, description="false: the trainer scores over the whole vocabulary, as most frameworks do"
    )
    anchor: Literal["trainer", "proximal", "sampler"] = Field(
        default="trainer",
        description="whose log-probs are π_old, the clip's anchor: the trainer's under the weights of the last sync (with partial "
        "rollouts, as proximal), the trainer's at the start of the step (decoupled PPO, 2110.00641), what the engine recorded",
    )
    reuse: NonNegative = Field(
        default=0.0,
        description="mean |Δ log-prob| of engine and trainer up to which (probed in each rollout) the engine's stand for π_old; 0: never",
    )
    extra: int = Field(default=0, ge=0, description="further samples for a prompt of which no response was right (ragged groups)")
    weights: dict[str, NonNegative] = Field(
        default_factory=dict,
        description="difficulty level → weight of its prompts in the loss (the denominators stay); 1 unless said",
    )
    chunk: int | None = Field(
        default=None,
        ge=1,
        description="partial rollouts: tokens a response may grow in a step; it is finished under newer weights",
    )
    temperature: Positive = Field(default=1.0, description="of sampling and of scoring: they are one number")
    limit: int | None = Field(default=None, ge=1, description="L_max, response tokens; default: the task's own")


class Sampler(Strict):
    weights: Any = Field(default="exact", description="exact, bfloat16, {name: quantised, bits: 4} or {name: noise, sigma: .01}")
    staleness: int = Field(default=0, ge=0, description="steps that the weights that draw lag behind the trainer's")
    every: int = Field(default=1, ge=1, description="steps between syncs")

    @property
    def lags(self) -> bool:
        return self.staleness > 0 or self.every > 1

    def version(self, step: int) -> int:
        """The step at whose start the weights that draw in step `step` were the trainer's."""
        return max(0, step // self.every * self.every - self.staleness)


class Scale(Strict):
    steps: int = Field(default=20, ge=1, description="rollouts")
    lr: Positive = 5e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: NonNegative = 0.0
    warmup: int = Field(default=3, ge=0, description="optimiser steps of linear warm-up")
    grad_clip: Positive = 1.0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    eval_every: int = Field(default=0, ge=0, description="held-out accuracy every so many steps; 0: at the start and the end")
    eval_prompts: int = Field(default=96, ge=0)
    monitor: bool = Field(default=True, description="measure the realised update and the distance to the start")


class Reference(Strict):
    refresh: Literal["fixed", "reset", "ema"] = "fixed"
    every: int = Field(default=10, ge=1, description="steps between resets")
    reset_optimizer: bool = Field(default=False, description="at a reset, start the optimiser's moments anew")
    decay: Share = Field(default=0.99, description="of the moving average, a step")


class Critic(Strict):
    lr: Positive = 1e-3
    eps_clip: Positive | None = Field(
        default=0.2, description="how far a value may move in one rollout's updates; null: no bound"
    )
    coef: Positive = Field(default=0.5, description="of the value loss")
    detach: bool = Field(default=False, description="train the head alone, not the trunk")


class Run(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    seed: int = Field(default=0, ge=0, lt=2**62)  # what torch's generators take, with room for offsets
    policy: Policy = Policy()
    task: Any
    objective: dict[str, Any] = Field(default_factory=lambda: {"preset": "grpo"})
    rollout: Rollout = Rollout()
    sampler: Sampler = Sampler()
    scale: Scale = Scale()
    reference: Reference = Reference()
    critic: Critic = Critic()
    machine: Machine = Machine()
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("report_to"), list):
            return {**data, "report_to": tuple(data["report_to"])}
        return data

    def built(self) -> Objective:
        return build_objective(self.objective)

    def key(self) -> str:
        """What the run's numbers depend on, hashed: the config without its name, machine and trackers, plus the numerics version.

        Only what differs from a default counts, so a new setting or knob, off by default, leaves recorded runs valid.
        """
        data = self.model_dump(mode="json", exclude={"name", "machine", "report_to", "objective", "task"}, exclude_defaults=True)
        plain = objective_spec(Objective(), brief=True)
        data["objective"] = {k: v for k, v in objective_spec(self.built(), brief=True).items() if v != plain[k]}
        data["task"] = unbind(tasks.bound(self.task), brief=True)
        if "weights" in data.get("sampler", {}):
            data["sampler"]["weights"] = unbind(distortion(self.sampler), brief=True)
        if self.machine.engine == "vllm":
            data["engine"] = ["vllm", self.machine.vllm.dtype, "server" if self.machine.server else "in process"]
        text = json.dumps({"numerics": NUMERICS, **data}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def distortion(sampler: Sampler) -> Callable[..., Any]:
    """`sampler.weights` as YAML has it → its variant. Raises UserError."""
    return bind("sampler.weights", public(weights), sampler.weights)


def build_objective(spec: Mapping[str, Any]) -> Objective:
    """`{preset: grpo, clip: {eps_high: .28}, kl: none}` → the preset with those slots changed (without one: the plainest).

    A slot's mapping without a name changes parameters of the variant that is there. Raises UserError.
    """
    spec = dict(spec)
    preset = spec.pop("preset", None)
    named = {k: v for k, v in vars(presets).items() if isinstance(v, Objective)}
    if preset is not None and str(preset) not in named:
        hint = f"{nearest(str(preset), named)}; valid: {', '.join(named)}."
        raise UserError(f"objective.preset: there is no preset {preset!r}{hint}")
    if unknown := [k for k in spec if k not in knobs.SLOTS]:
        valid = ", ".join(("preset", *knobs.SLOTS))
        raise UserError(f"objective: unknown slot {unknown[0]!r}{nearest(unknown[0], knobs.SLOTS)}; valid: {valid}.")
    start = named[preset] if preset else Objective()
    chosen: dict[str, Any] = {}
    for slot, value in spec.items():
        if slot == "gate":
            if not isinstance(value, list | tuple):
                raise UserError(f"objective.gate: is a list of gates, not {value!r}; write [] for none.")
            chosen[slot] = tuple(knobs.resolve(slot, v) for v in value)
        elif isinstance(value, Mapping) and "name" not in value:
            there = unbind(getattr(start, slot))
            chosen[slot] = knobs.resolve(slot, {**(there if isinstance(there, dict) else {"name": there}), **value})
        else:
            chosen[slot] = knobs.resolve(slot, value)
    return replace(start, **chosen)


def objective_spec(objective: Objective, *, brief: bool = False) -> dict[str, Spec | list[Spec]]:
    """Every slot written out, for the record; `brief`: parameters at their default left out."""
    slots = {f.name: getattr(objective, f.name) for f in fields(objective)}
    return {k: [unbind(g, brief=brief) for g in v] if isinstance(v, tuple) else unbind(v, brief=brief) for k, v in slots.items()}


def parse_run(data: Mapping[str, Any], where: str) -> Run:
    """A mapping → a checked Run with every objective slot written out. `where` names the source in error messages."""
    try:
        run = Run.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error, Run)}") from None
    try:
        tasks.bound(run.task)
        objective = build_objective(run.objective)
        exactness = unbind(distortion(run.sampler))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if run.rollout.group_size < 2 and "group_baseline" in knobs.traits(objective.advantage):
        name = knobs.base(objective.advantage).__name__
        raise UserError(
            f"{where}: rollout.group_size is 1, but advantage {name} compares a response with its group: give at least 2."
        )
    resamples = "resample" in knobs.traits(objective.sampling)
    modes = [m for m, on in (("chunk", run.rollout.chunk), ("extra", run.rollout.extra), ("dynamic sampling", resamples)) if on]
    if len(modes) > 1:
        raise UserError(f"{where}: rollout.{modes[0]} does not go together with {modes[1]}: choose one of them.")
    if "natural" in knobs.traits(objective.step) and run.policy.compute != "float32":
        name = knobs.base(objective.step).__name__
        raise UserError(f"{where}: objective.step {name} differentiates twice, in fp32: set policy.compute to float32.")
    if run.rollout.minibatches > run.rollout.prompts:
        raise UserError(
            f"{where}: rollout.minibatches ({run.rollout.minibatches}) is more than rollout.prompts ({run.rollout.prompts}), "
            f"and a minibatch takes whole groups: give at most {run.rollout.prompts}."
        )
    if run.machine.overlap and not run.sampler.staleness:
        raise UserError(
            f"{where}: machine.overlap draws ahead of the trainer, with the weights of earlier steps, but sampler.staleness is 0: "
            "give at least 1."
        )
    sampler = run.sampler.model_copy(update={"weights": exactness})
    written = {"objective": objective_spec(objective), "task": unbind(tasks.bound(run.task)), "sampler": sampler}
    return run.model_copy(update=written)


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file. Raises UserError where there is no file, no YAML, or no mapping."""
    try:
        data = strict_yaml.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error.__class__.__name__}): give the path of a YAML file.") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = f" at line {line + 1}" if line is not None else ""
        raise UserError(f"{path}: is not YAML{at}: {getattr(error, 'problem', 'it cannot be parsed')}.") from None
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise UserError(f"{path}: {found}; give a mapping of settings, e.g. `task: short`.")
    return data


def with_path(data: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of nested mappings with `a.b.c` set to a value."""
    head, _, rest = path.partition(".")
    inner = data.get(head)
    if rest:
        named = {"name": inner} if isinstance(inner, str) else {}  # a variant that was written as its word
        value = with_path(inner if isinstance(inner, Mapping) else named, rest, value)
    return {**data, head: value}


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with dotted paths set, in order."""
    out = dict(data)
    for path, value in changes.items():
        out = with_path(out, path, value)
    return out


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Pydantic's first complaint; for an unknown key, with the nearest valid one."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return problem(error)
    for part in first["loc"][:-1]:
        annotation = model.model_fields[str(part)].annotation
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else model
    key, valid = str(first["loc"][-1]), list(model.model_fields)
    where = ".".join(str(p) for p in first["loc"])
    return f"unknown key {where!r}{nearest(key, valid)}; valid here: {', '.join(valid)}."
