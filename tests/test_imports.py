"""The shape of the package, read from its source: order of imports, sizes, one definition of each formula, no names compared."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from batches import PRESETS

import grpo_repro
from grpo_repro import knobs

PACKAGE = Path(grpo_repro.__file__).parent
MODULES = {
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): p for p in sorted(PACKAGE.rglob("*.py"))
}

# Data flows to the right; a module imports from its left only. A package counts as one; an inner module may have its own place.
ORDER = """
    types uniform clock strict_yaml paths progress spec equality verify reward_model tasks knobs weights objective adaptive presets
    machine config check catalogue exact mismatch tour reference smollm2 layers policy critic packed logprobs rollout sampler learner
    warmstart preferences start judge collect exam overlap metrics measure anchor update checkpoint distributed train record trackers
    stats claims ablation grid single style figures doses runfigures report seeds runpage notebook doctor explain scaffold cli __main__
""".split()  # noqa: SIM905


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str, inside_functions: bool = True) -> Iterator[str]:
    """Full dotted names; `from grpo_repro import knobs` is grpo_repro.knobs."""
    inner = {id(n) for f in ast.walk(tree(module)) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)}
    for node in ast.walk(tree(module)):
        if id(node) in inner and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write the whole name, not a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def ours(module: str, inside_functions: bool = True) -> set[str]:
    """Modules of the package that it imports."""
    named = {name.removeprefix("grpo_repro.") for name in imports(module, inside_functions) if name.startswith("grpo_repro.")}
    return {name for name in named if name in MODULES}


def place(module: str) -> int:
    while module and module not in ORDER:
        module = module.rpartition(".")[0]
    return ORDER.index(module) if module else -1


BODY = [m for m in MODULES if m != "__init__"]


@pytest.mark.parametrize("module", BODY)
def test_imports_point_left(module: str) -> None:
    assert place(module) >= 0, f"give {module} its place in ORDER"
    right = {name for name in ours(module) if place(name) > place(module)}
    assert not right, f"{module} imports {sorted(right)}, which come after it"


@pytest.mark.parametrize("module", ["stats", "claims", "style", "figures", "doses", "report", "seeds", "runpage", "runfigures"])
def test_what_reads_records_never_trains(module: str) -> None:
    if module not in MODULES:
        pytest.skip("not there yet")
    assert not {name.split(".")[0] for name in imports(module)} & {"torch", "transformers"}
    reached, todo = set[str](), [module]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo.extend(ours(name, inside_functions=False))
    assert not reached & {"train", "start", "policy", "rollout", "measure"}


@pytest.mark.parametrize("module", MODULES)
def test_size(module: str) -> None:
    bar = {"objective": 150, "train": 200}.get(module, 300)
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= bar


VARIANTS = {name for slot in knobs.SLOTS for name in knobs.variants(slot)}
PAPERS = set(PRESETS) | {"dapo", "cispo", "tis", "sapo", "gspo_token", "dual_clip", "ppo_penalty", "reinforce_pp", "lite_ppo"}
# `ablate all`: every ablation; the profile `full`; a rotary embedding that is `dynamic`: words that a variant has too
ORDINARY = {("cli", "all"), ("report", "full"), ("rollout.decoder", "dynamic")}


def strings(node: ast.AST) -> Iterator[str]:
    yield from (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


@pytest.mark.parametrize("module", [m for m in BODY if m != "presets"])
def test_nothing_compares_with_a_name(module: str) -> None:
    """A variant is a function that was looked up, not a string that is asked about (options of a Literal parameter may be)."""
    options = {
        s
        for n in ast.walk(tree(module))
        if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "Literal"
        for s in strings(n.slice)
    }
    asked = set[str]()
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            asked |= set(strings(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
            asked |= {s for a in node.args for s in strings(a)}
    named = {s for s in asked & (VARIANTS | PAPERS) if (module, s) not in ORDINARY}
    assert not (named - options), f"{module} compares with {sorted(named - options)}"


LOGPS = {"logp_NT": "now", "old_NT": "old", "sampler_NT": "sampler", "ref_NT": "ref"}


def test_each_log_ratio_is_formed_once() -> None:
    """θ−old in ① ratio and ref−θ in ⑤ kl, once in the whole package; old−sampler once in the knobs (① correction)."""
    found: dict[tuple[str, ...], list[str]] = {}
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                sides = sorted(LOGPS.get(ast.unparse(side).rpartition(".")[2], "") for side in (node.left, node.right))
                if all(sides) and sides[0] != sides[1] and (module.startswith("knobs") or "sampler" not in sides):
                    found.setdefault(tuple(sides), []).append(module)
    assert found == {("now", "old"): ["knobs.ratio"], ("old", "sampler"): ["knobs.correction"], ("now", "ref"): ["knobs.kl"]}


def test_k3_is_written_once() -> None:
    assert [m for m in MODULES if any(isinstance(n, ast.Attribute) and n.attr == "expm1" for n in ast.walk(tree(m)))] == [
        "knobs.kl"
    ]


def test_the_objective_names_no_variant_but_its_defaults() -> None:
    """score() and loss() are the formula, not one paper's: a knob is named only as the default of its slot."""
    functions = [n for n in tree("objective").body if isinstance(n, ast.FunctionDef)]
    assert {f.name for f in functions} >= {"score", "loss"}
    assert not [n for f in functions for n in ast.walk(f) if isinstance(n, ast.Name) and n.id == "knobs"]


@pytest.mark.parametrize("module", ["config", "machine", "ablation", "claims"])
def test_config_classes_are_small(module: str) -> None:
    """What is read from YAML; `claims.Result` is what is written."""
    classes = [n for n in tree(module).body if isinstance(n, ast.ClassDef) and n.name != "Result"]
    assert classes
    for node in classes:
        assert sum(isinstance(n, ast.AnnAssign) for n in node.body) <= 15, node.name


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_evaluated_or_unpickled(module: str) -> None:
    """No eval, exec or pickle; YAML by safe_load alone (strict_yaml subclasses its loader); no weights through torch.load."""
    called = {ast.unparse(n.func) for n in ast.walk(tree(module)) if isinstance(n, ast.Call)}
    assert not called & {"eval", "exec", "yaml.unsafe_load", "yaml.full_load", "torch.load", "pickle.load", "pickle.loads"}
    assert not {name.split(".")[0] for name in imports(module)} & {"pickle", "dill", "cloudpickle", "joblib"}
    assert not called & {"torch.manual_seed", "random.seed", "np.random.seed", "numpy.random.seed"}, (
        "random numbers are indexed, never global"
    )
