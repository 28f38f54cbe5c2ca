"""An ablation: one question, one knob, panels of arms over a common base, and the claims it will decide. Read from YAML.

An arm changes one knob path (or a declared bundle of paths) over its panel's base; the loader refuses more. A profile changes
scale only. Predictions stand in the YAML, so they are committed before the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from grpo_repro.claims import Claim
from grpo_repro.config import Run, Strict, load_yaml, merged, parse_run
from grpo_repro.spec import nearest, problem
from grpo_repro.types import UserError

PROFILE_PATHS = ("scale.", "machine.", "rollout.prompts", "policy.warm_steps")


class Panel(Strict):
    title: str
    shows: str = Field(description="what the panel is for, one sentence")
    set: dict[str, Any] = Field(default_factory=dict, description="dotted config paths, common to all arms")
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="arm → the knob path it changes and its value")
    null: bool = Field(default=False, description="mathematics says that the arms must agree")
    seeds: dict[str, int] = Field(default_factory=dict, description="seeds by profile, where fewer than the profile's")


class Profile(Strict):
    seeds: int = Field(ge=1)
    first_seed: int = Field(default=0, ge=0)
    decide: bool = Field(default=False, description="whether the claims get a verdict")
    set: dict[str, Any] = Field(default_factory=dict)


class Ablation(Strict):
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str
    question: str
    seed_says: str = Field(description="the seed document's statement, translated")
    mechanism: str
    knob: str = Field(description="the config path that arms change, e.g. objective.clip")
    bundle: list[str] = Field(default_factory=list, description="further paths that arms change together with it")
    bundle_why: str = ""
    base: dict[str, Any]
    panels: dict[str, Panel] = Field(min_length=1)
    profiles: dict[str, Profile]
    claims: list[Claim]
    not_tested: list[str] = Field(default_factory=list)
    overturned_by: str = ""

    def runs(self, profile: str) -> Iterator[tuple[str, str, Run]]:
        """(panel, arm, run) for every run of a profile, seeds outermost: a killed grid has whole pairs."""
        chosen = self.profile(profile)
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
            for name, panel in self.panels.items():
                if seed - chosen.first_seed >= panel.seeds.get(profile, chosen.seeds):
                    continue
                for arm, changes in panel.arms.items():
                    data = merged({**self.base, "name": self.name, "seed": seed}, {**panel.set, **chosen.set, **changes})
                    yield name, arm, parse_run(data, f"{self.name}.yaml, panel {name}, arm {arm}")

    def profile(self, name: str) -> Profile:
        if name not in self.profiles:
            raise UserError(f"{self.name}: no profile {name!r}{nearest(name, self.profiles)}; valid: {', '.join(self.profiles)}.")
        return self.profiles[name]


def load_ablation(path: Path) -> Ablation:
    """Read and check an ablation's YAML. `base: {file: …}` is read relative to the YAML. Raises UserError."""
    data = load_yaml(path)
    base = data.get("base")
    if isinstance(base, dict) and set(base) == {"file"}:
        data = {**data, "base": load_yaml(path.parent / str(base["file"]))}
    try:
        ablation = Ablation.model_validate({"name": path.stem, **data})
    except ValidationError as error:
        raise UserError(f"{path}: {problem(error)}") from None
    if ablation.name != path.stem:
        raise UserError(f"{path}: name is {ablation.name!r}; it must be the file's own, {path.stem!r}.")
    _one_knob(ablation, path)
    _known_contrasts(ablation, path)
    return ablation


def _one_knob(ablation: Ablation, path: Path) -> None:
    allowed = {ablation.knob, *ablation.bundle}
    if ablation.bundle and not ablation.bundle_why:
        raise UserError(f"{path}: arms change a bundle ({', '.join(sorted(allowed))}) but bundle_why does not say why.")
    for name, panel in ablation.panels.items():
        for arm, changes in panel.arms.items():
            if extra := [p for p in changes if not any(p == a or p.startswith(a + ".") for a in allowed)]:
                raise UserError(
                    f"{path}: panel {name}, arm {arm} changes {extra[0]!r}, but this ablation is about {ablation.knob}: "
                    "move it to the panel's `set` (all arms alike) or declare it in `bundle`."
                )
    for name, profile in ablation.profiles.items():
        if extra := [p for p in profile.set if not p.startswith(PROFILE_PATHS)]:
            raise UserError(
                f"{path}: profile {name} sets {extra[0]!r}; a profile changes scale only: {', '.join(PROFILE_PATHS)}."
            )


def _known_contrasts(ablation: Ablation, path: Path) -> None:
    for claim in ablation.claims:
        if claim.panel not in ablation.panels:
            raise UserError(f"{path}: claim {claim.id} names panel {claim.panel!r}; valid: {', '.join(ablation.panels)}.")
        arms = ablation.panels[claim.panel].arms
        for arm in filter(None, (claim.arm, claim.against)):
            if arm not in arms:
                raise UserError(f"{path}: claim {claim.id} names arm {arm!r}{nearest(arm, arms)}; valid: {', '.join(arms)}.")
