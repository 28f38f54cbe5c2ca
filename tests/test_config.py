"""Configs are strict: what is not understood is refused with a hint, and what is understood is written out in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from grpo_repro import ablation, config, knobs, presets, spec, strict_yaml
from grpo_repro.types import UserError

RUN: dict[str, Any] = {"name": "toy", "task": "short"}
EXPERIMENTS = Path(config.__file__).parents[1] / "experiments"


def parsed(**changes: Any) -> config.Run:
    return config.parse_run(config.merged(RUN, changes), "here.yaml")


# ---------------------------------------------------------------- YAML


def test_yaml_has_no_surprises() -> None:
    text = "{lr: 1e-4, tiny: -2E5, half: .5, off: 1, null: 2, 0.28: 3, 7: 4, text: 1e, flag: true, none: null, when: 1_0}"
    assert strict_yaml.parse(text) == {
        "lr": 1e-4,
        "tiny": -2e5,
        "half": 0.5,
        "off": 1,
        "null": 2,
        "0.28": 3,
        "7": 4,
        "text": "1e",
        "flag": True,
        "none": None,
        "when": 10,
    }
    assert strict_yaml.parse("a: &x {b: 1}\nc: {<<: *x, d: 2}") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "{? [a] : 1}", "!!python/object/apply:os.system [echo]", "{a: 1"])
def test_yaml_that_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        strict_yaml.parse(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [1", "is not YAML at line"),
        ("a: 1\na: 2", "the key 'a' is here twice"),
        ("- a", "holds a list; give a mapping"),
        ("", "is empty; give a mapping"),
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str | bytes | None, said: str) -> None:
    path = tmp_path / "a.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"a\.yaml") as caught:
        config.load_yaml(path)
    assert said in str(caught.value)


# ---------------------------------------------------------------- runs


def test_every_slot_is_written_out_so_two_spellings_are_one_run() -> None:
    short = parsed(objective={"preset": "grpo", "kl": "none"})
    objective = short.objective
    assert set(objective) == set(knobs.SLOTS)
    assert objective["clip"] == {"name": "ppo", "eps_low": 0.2, "eps_high": 0.2}
    long = parsed(objective={"clip": {"name": "ppo", "eps_high": 0.2}, "advantage": {"name": "group_zscore", "eps": 1e-4}})
    assert long.key() == short.key()
    assert config.parse_run(short.model_dump(mode="json"), "again").key() == short.key()


def test_a_preset_is_the_objective_it_names() -> None:
    assert config.objective_spec(config.build_objective({"preset": "dr_grpo"})) == config.objective_spec(presets.dr_grpo)
    changed = config.build_objective({"preset": "dr_grpo", "advantage": "leave_one_out"})
    assert changed.advantage is knobs.advantage.leave_one_out
    assert changed.aggregation is knobs.aggregation.constant_length


def test_a_preset_is_changed_in_one_parameter() -> None:
    clip = parsed(objective={"preset": "gspo", "clip": {"eps_high": 0.01}}).objective["clip"]
    assert clip == {"name": "ppo", "eps_low": 3e-4, "eps_high": 0.01}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sede": 1}, ["unknown key 'sede'", "did you mean 'seed'"]),
        ({"rollout.temprature": 1}, ["'rollout.temprature'", "did you mean 'temperature'"]),
        ({"rollout.temperature": 0}, ["rollout.temperature", "greater than 0"]),
        ({"rollout.temperature": float("inf")}, ["rollout.temperature", "finite"]),
        ({"scale.steps": "20"}, ["scale.steps", "integer"]),
        ({"scale.steps": 2.5}, ["scale.steps", "integer"]),
        ({"scale.lr": float("nan")}, ["scale.lr"]),
        ({"seed": -1}, ["seed", "greater than or equal to 0"]),
        ({"seed": True}, ["seed", "integer"]),
        ({"name": "a/b"}, ["name"]),
        ({"policy.start": "hot"}, ["policy.start", "'warm'"]),
        ({"report_to": ["tensorbord"]}, ["report_to", "'tensorboard'"]),
        ({"objective": {"ration": "token"}}, ["unknown slot 'ration'", "did you mean 'ratio'"]),
        ({"objective": {"preset": "grppo"}}, ["no preset 'grppo'", "did you mean 'grpo'"]),
        ({"objective": {"ratio": "tokens"}}, ["objective.ratio", "'tokens'", "did you mean 'token'"]),
        ({"objective": {"preset": ["grpo"]}}, ["no preset ['grpo']"]),
        ({"objective": {"gate": "none"}}, ["objective.gate: is a list"]),
        ({"objective": {"ratio": {"eps": 1}}}, ["objective.ratio.token", "'eps'", "it takes: none"]),
        ({"objective": 3}, ["objective", "is a mapping"]),
        ({"objective": {"clip": {"name": "ppo", "epsilon": 0.2}}}, ["'epsilon'", "it takes: eps_low, eps_high"]),
        ({"objective": {"kl": "k3"}}, ["objective.kl.k3.beta", "is missing"]),
        ({"objective": {"kl": {"name": "k3", "beta": -1}}}, ["beta", "greater than or equal to 0"]),
        ({"objective": {"aggregation": {"name": "sequence_mean", "per": "rows"}}}, ["per", "'row' or 'group'"]),
        ({"objective": {"ratio": ["token"]}}, ["objective.ratio"]),
        ({"task": {"name": "short", "digits": 3}}, ["task.short", "'digits'", "it takes: none"]),
        ({"task": "shrt"}, ["task", "did you mean 'short'"]),
        ({"rollout.group_size": 1}, ["rollout.group_size is 1", "group_zscore", "at least 2"]),
        ({"rollout.prompts": 3, "rollout.minibatches": 4}, ["minibatches (4)", "prompts (3)", "at most 3"]),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence_with_a_hint(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parsed(**changes)
    message = str(caught.value)
    assert message.startswith("here.yaml: ")
    assert "\n" not in message
    for words in said:
        assert words in message


def test_a_group_of_one_is_fine_without_a_group_baseline() -> None:
    with pytest.raises(UserError):
        parsed(**{"rollout.group_size": 1, "objective": {"preset": "rloo"}})
    plain = {s: f for s in ("advantage",) for f in knobs.variants(s).values() if "group_baseline" not in knobs.traits(f)}
    for function in plain.values():
        assert parsed(**{"rollout.group_size": 1, "objective": {"advantage": function.__name__}}).rollout.group_size == 1


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parsed().seed = 3  # type: ignore[misc]


def test_dotted_paths_are_set_in_a_copy() -> None:
    data = {"a": {"b": 1, "c": 2}}
    assert config.merged(data, {"a.b": 3, "d.e": 4}) == {"a": {"b": 3, "c": 2}, "d": {"e": 4}}
    assert data == {"a": {"b": 1, "c": 2}}


def test_a_parameter_of_a_variant_that_was_named_by_its_word() -> None:
    data = {"objective": {"clip": "ppo"}}
    assert config.merged(data, {"objective.clip.eps_high": 0.28}) == {"objective": {"clip": {"name": "ppo", "eps_high": 0.28}}}


# ---------------------------------------------------------------- specs


def example(b: object, *, must: int, eps: float = 0.5) -> float:
    return eps


def test_bind_and_unbind_are_inverse() -> None:
    bound = spec.bind("x", {"example": example}, {"name": "example", "must": 1})
    assert spec.unbind(bound) == {"name": "example", "must": 1, "eps": 0.5}
    assert spec.bind("x", {"example": example}, spec.unbind(bound))(None) == 0.5
    assert spec.base(bound) is example


@pytest.mark.parametrize("slot", knobs.SLOTS)
def test_every_variant_survives_the_way_to_yaml_and_back(slot: str) -> None:
    for name, function in knobs.variants(slot).items():
        given = {"pattern": "x", "note": "rare", "model": "preferences", "parts": [{"reward": "exact_match", "weight": 1.0}]}
        must = {p: given.get(p, 0.5) for p, a in spec.parameters(function).items() if a.default is a.empty}
        bound = knobs.resolve(slot, {"name": name, **must})
        again = knobs.resolve(slot, strict_yaml.parse(yaml.safe_dump(spec.unbind(bound))))
        assert spec.unbind(again) == spec.unbind(bound)
        assert spec.base(again) is function


# ---------------------------------------------------------------- ablations


def loaded(tmp_path: Path, *changes: tuple[str, str]) -> ablation.Ablation:
    text = runs.YAML
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "toy.yaml"
    path.write_text(text)
    return ablation.load_ablation(path)


def test_an_ablation_is_paired_by_seed_and_seeds_are_outermost(tmp_path: Path) -> None:
    toy = loaded(tmp_path, ("quick: {seeds: 2}", "quick: {seeds: 2, first_seed: 7}"))
    assert [(p, a, r.seed) for p, a, r in toy.runs("quick")] == [("main", a, s) for s in (7, 8) for a in ("low", "high")]
    assert [r.scale.steps for _, _, r in toy.runs("smoke")] == [2, 2]
    assert [r.scale.steps for _, _, r in toy.runs("quick")] == [3] * 4


def test_arms_differ_in_the_knob_and_in_nothing_else(tmp_path: Path) -> None:
    low, high = (run.model_dump() for _, _, run in loaded(tmp_path).runs("smoke"))
    low["objective"]["clip"] = high["objective"]["clip"]
    assert low == high


def test_a_panel_may_have_fewer_seeds(tmp_path: Path) -> None:
    toy = loaded(tmp_path, ("shows: Numbers.", "shows: Numbers.\n    seeds: {full: 1}"))
    assert [len(list(toy.runs(p))) for p in ("quick", "full")] == [4, 2]


def test_a_base_can_be_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("{task: short, rollout: {group_size: 4}}")
    base = runs.YAML[runs.YAML.index("base:") : runs.YAML.index("panels:")]
    toy = loaded(tmp_path, (base, "base: {file: base.yaml}\n"))
    assert next(toy.runs("smoke"))[2].rollout.group_size == 4


CLIP = "low: {objective.clip: {name: ppo, eps_high: 0.2}}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((CLIP, "low: {objective.kl: none}"), "arm low changes 'objective.kl', but this ablation is about objective.clip"),
        ((CLIP, "low: {objective.clip: none, scale.lr: 0.1}"), "changes 'scale.lr'"),
        ((CLIP, "low: {objective.clipped: none}"), "changes 'objective.clipped'"),
        (("knob: objective.clip", "knob: objective.clip\nbundle: [objective.ratio]"), "bundle_why does not say why"),
        (
            ("set: {scale.steps: 2}", "set: {objective.kl: none}"),
            "profile smoke sets 'objective.kl'; a profile changes scale only",
        ),
        (("against: low", "against: lwo"), "names arm 'lwo' (did you mean 'low'?)"),
        (("panel: main", "panel: mian"), "names panel 'mian'; valid: main"),
        (("knob:", "knbo:"), "knob: is missing"),
        (("title: A toy", "title: A toy\nname: other"), "name is 'other'; it must be the file's own"),
        (("seeds: 1", "seeds: 0"), "profiles.smoke.seeds"),
        (("predict: greater", "predict: more"), "predict"),
        (("window: {first: 0, last: 2}", "window: {first: 2, last: 0}"), "window"),
    ],
    ids=str,
)
def test_ablations_that_are_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(UserError, match=r"toy\.yaml") as caught:
        loaded(tmp_path, change)
    assert said in str(caught.value)


def test_a_declared_bundle_may_move_together(tmp_path: Path) -> None:
    toy = loaded(
        tmp_path,
        ("knob: objective.clip", "knob: objective.clip\nbundle: [objective.ratio]\nbundle_why: GSPO is both."),
        (CLIP, "low: {objective.clip: none, objective.ratio: sequence}"),
    )
    assert next(toy.runs("smoke"))[2].objective["ratio"] == "sequence"


def test_an_arm_that_does_not_exist_in_code_is_named_with_its_panel(tmp_path: Path) -> None:
    toy = loaded(tmp_path, (CLIP, "low: {objective.clip: pop}"))
    with pytest.raises(UserError, match=r"toy.yaml, panel main, arm low: .*did you mean 'ppo'"):
        list(toy.runs("smoke"))


# ---------------------------------------------------------------- what the repository ships


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "runs").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_run_yaml_loads(path: Path) -> None:
    config.parse_run(config.load_yaml(path), path.name)


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "ablations").glob("*.yaml")), ids=lambda p: p.name)
def test_every_ablation_loads_in_every_profile_and_has_one_primary_claim(path: Path) -> None:
    loaded = ablation.load_ablation(path)
    assert {"smoke", "quick", "full"} <= loaded.profiles.keys()
    for profile in loaded.profiles:
        assert list(loaded.runs(profile))
    assert loaded.profile("full").decide
    assert loaded.profile("full").seeds >= 10
    assert not loaded.profile("quick").decide
    assert sum(claim.primary for claim in loaded.claims) == 1


def test_a_new_setting_off_by_default_leaves_recorded_runs_valid() -> None:
    """The key counts what differs from a default; spelling a default out, or naming the run otherwise, is the same run."""
    short = {"name": "a", "task": "short", "objective": {"preset": "grpo"}}
    spelled = {
        "name": "b",
        "task": {"name": "short"},
        "objective": {"preset": "grpo", "advantage": {"name": "group_zscore", "ddof": 1, "eps": 1e-4}, "transform": "none"},
        "scale": {"lr": 5e-4, "grad_clip": 1.0},
        "machine": {"token_budget": 77},
    }
    assert config.parse_run(short, "a").key() == config.parse_run(spelled, "b").key()
    for path, value in (
        ("seed", 1),
        ("scale.lr", 1e-3),
        ("objective.kl", {"name": "k3", "beta": 0.1}),
        ("objective.advantage.ddof", 0),
    ):
        changed = {**short, "objective": {"preset": "grpo", "advantage": {"name": "group_zscore", "ddof": 1}}}
        assert config.parse_run(config.merged(changed, {path: value}), "c").key() != config.parse_run(short, "a").key(), path
