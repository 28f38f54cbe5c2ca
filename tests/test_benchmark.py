"""The pure parts of the benchmark: ratios and their intervals, the check of equal work, floors, resuming, and the page."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import compare, endtoend, report, settings, store  # noqa: E402
from benchmarks.process import Failed  # noqa: E402

ORIGIN = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "started": "2026-01-01T00:00:00+00:00",
    "versions": {"torch": "2", "transformers": "5"},
    "machine": {"cpu": "a cpu", "cores": 2, "ram_gb": 8.0},
}


def test_a_ratio_is_of_medians_and_its_interval_follows_the_pairs():
    found = compare.ratio([1.0, 2.0, 10.0], [6.0, 6.0, 6.0])
    assert found["ratio"] == 3.0
    assert found["pairs"] == 3
    assert found["low"] < 3.0 < found["high"]
    # a slow minute that meets both sides of a pair does not widen the interval: every pair says 2
    paired = compare.ratio([1.0, 1.0, 3.0], [2.0, 2.0, 6.0])
    assert (paired["low"], paired["ratio"], paired["high"]) == (2.0, 2.0, 2.0)
    assert compare.ratio([2.0], [3.0]) == {"ratio": 1.5, "low": 1.5, "high": 1.5, "pairs": 1}


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_a_ratio_of_nothing_or_of_uneven_sides_is_refused(ours: list[float], theirs: list[float]):
    with pytest.raises(ValueError, match="as many seconds"):
        compare.ratio(ours, theirs)


def side(**changes: Any) -> dict[str, Any]:
    times = {"seconds": 1.0, "cpu_seconds": 1.0, "phases": {"sample": 0.5, "update": 0.5}}
    step: dict[str, Any] = {**times, "generated": 64.0, "trained": 64.0, "updates": 1, "peak_mb": 100.0}
    probe = {"loss": 0.0, "gradient_norm": 2.0, "entropy": 1.0, "reward": 0.5}
    step |= {k: v for k, v in changes.items() if k in step}
    probe |= {k: v for k, v in changes.items() if k in probe}
    return {"steps": [step, dict(step)], "probe": probe, "loaded_mb": 50.0}


def test_equal_work_is_equal():
    assert compare.unequal(side(), side(seconds=3.0), "fp32") == []
    assert compare.unequal(side(gradient_norm=2.0), side(gradient_norm=2.003), "fp32") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generated", 63.0),
        ("trained", 32.0),
        ("trained", float("nan")),
        ("updates", 2),
        ("gradient_norm", 2.1),
        ("gradient_norm", float("nan")),
        ("entropy", 1.1),
        ("reward", 0.6),
        ("loss", 0.1),
    ],
)
def test_unequal_work_is_named(name: str, value: float):
    wrong = compare.unequal(side(**{name: value}), side(), "fp32")
    assert len(wrong) == 1
    assert wrong[0].startswith(name)


def test_a_step_that_did_less_than_the_others_is_seen():
    lazy = side()
    lazy["steps"][1]["generated"] = 10.0
    assert compare.unequal(lazy, side(), "fp32") == ["generated a step: [10.0, 64.0] and [64.0]"]


def test_bf16_allows_what_rounding_does_and_no_more():
    assert compare.unequal(side(gradient_norm=2.08), side(), "bf16") == []
    assert compare.unequal(side(gradient_norm=2.2), side(), "bf16") != []


def test_a_slope_is_the_exponent():
    assert compare.slope([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)


def test_a_floor_counted_by_hand():
    """d=2, ffn=3, kv=1, one layer: 2(4+2)+18 = 30 weights of which 2·6 + 3·6 = 30; V=5: 10 in the head; 40 together."""
    shape = {"d": 2, "ffn": 3, "kv": 1, "layers": 1, "vocabulary": 5, "prompts": 1, "rows": 4, "tokens": 6, "prompt_tokens": 7}
    slow_memory = compare.floor(shape, gflops=1e9, gb_s=1e-9, weight_bytes=2)  # 1 byte a second; products take no time
    assert slow_memory["sample"] == pytest.approx(6 * 40 * 2)
    assert slow_memory["optimiser"] == pytest.approx(28 * 40)
    slow_products = compare.floor(shape, gflops=1e-9, gb_s=1e9, weight_bytes=2)  # 1 operation a second
    assert slow_products["sample"] == pytest.approx(2 * 7 * 30 + 6 * 2 * 4 * 40)
    assert slow_products["update"] == pytest.approx(3 * 2 * ((7 + 4 * 6) * 30 + 4 * 6 * 10))  # the prompt once


def case(name: str, result: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "settings": {}, "seconds": 60.0, "load_before": 0.5, "result": result, "provenance": ORIGIN}


def ended(**changes: Any) -> dict[str, Any]:
    return endtoend.concluded({"ours fp32": side(seconds=1.0), "TRL fp32": side(seconds=2.5, **changes)}, "fp32")


def page(**cases: Any) -> str:
    return report.render({name: case(name, result) for name, result in cases.items()})


def test_the_page_says_what_was_measured():
    text = page(**{"endtoend/tiny_1m-fp32-mu1-t1": ended()})
    assert "| a step over TRL fp32, 1M-parameter Llama, V=1,024 | ≥ 2.0 | 2.50× [2.50, 2.50] | met |" in text
    assert "| 2.50× [2.50, 2.50] | 1.00× | 2 | 1 / 2.5 | 64 / 26 | 100 / 100 | equal |" in text
    assert "Decode engines" not in text  # nothing was measured there


def test_an_invalid_case_is_marked_and_does_not_meet_its_bar():
    text = page(**{"endtoend/tiny_1m-fp32-mu1-t1": ended(generated=63.0)})
    assert "**invalid**: generated a step: [64.0] and [63.0]" in text
    assert "| met |" not in text


def test_what_could_not_be_measured_is_said():
    text = page(**{"decode/smollm2-vllm-t1": {"not_measured": "there is no environment"}})
    assert "- decode/smollm2-vllm-t1: there is no environment" in text


def test_choices_are_listed_the_largest_gain_first():
    told = {"small": {"ratio": 1.1, "low": 1.0, "high": 1.2}, "large": {"ratio": 3.0, "low": 2.0, "high": 4.0}}
    page = report.render({"choices/t1": case("choices/t1", told)})
    assert page.index("| large | 3.00× [2.00, 4.00] |") < page.index("| small | 1.10× [1.00, 1.20] |")


def test_the_committed_page_is_what_its_cases_generate():
    home = ROOT / "results" / "reports" / "benchmark"
    if not (home / "README.md").is_file():
        pytest.skip("not measured yet")
    found = json.loads((home / "benchmark.json").read_text("utf-8"))
    assert (home / "README.md").read_text("utf-8") == report.render(found), "run `make bench` and commit the report"


def test_every_workload_and_precision_is_covered():
    named = {(p.model, p.precision, p.updates, p.threads) for p in settings.pairs(quick=False)}
    everything = {(m, p, u, t) for m in settings.WORKLOADS for p in settings.SIDES for u in (1, 2) for t in (1, 2)}
    assert everything - named == {("smollm2", "fp32", 2, t) for t in (1, 2)}
    assert named <= everything


def test_the_reward_depends_on_the_text():
    assert [settings.reward(text) for text in ("a", "b", "c")] == [0, 1 / 97, 2 / 97]


class Counted:
    """A measurement that counts its calls and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self.error = 0, error

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        if self.error:
            raise self.error
        return {"seconds": [1.0]}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_REPRO_RESULTS", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("results")
def test_a_finished_case_is_not_measured_again_unless_its_settings_change():
    measured = Counted()
    cases = [store.Case("part/which", "compare", measured, {"repeats": 3, "points": (1, 2)})]
    for _ in range(2):
        assert store.run(cases, fresh=False, say=lambda text: None) == []
    assert measured.calls == 1
    changed = [store.Case("part/which", "compare", measured, {"repeats": 4, "points": (1, 2)})]
    store.run(changed, fresh=False, say=lambda text: None)
    assert measured.calls == 2
    store.run(changed, fresh=True, say=lambda text: None)
    assert measured.calls == 3
    assert store.all_cases()["part/which"]["result"] == {"seconds": [1.0]}


@pytest.mark.usefixtures("results")
def test_a_case_that_fails_does_not_stop_the_others_and_is_tried_again():
    broken, whole = Counted(Failed("no such environment")), Counted()
    cases = [store.Case("a/broken", "compare", broken), store.Case("a/whole", "compare", whole)]
    assert store.run(cases, fresh=False, say=lambda text: None) == ["a/broken: no such environment"]
    assert store.all_cases()["a/broken"]["result"] == {"not_measured": "no such environment"}
    store.run(cases, fresh=False, say=lambda text: None)
    assert (broken.calls, whole.calls) == (2, 1)


def test_a_result_is_of_its_code():
    """Another measuring module, another code."""
    assert store.code("compare") != store.code("endtoend")


def test_sides_are_compared_with_the_first():
    three = {"ours bf16": side(), "TRL bf16 autocast": side(seconds=3.0), "TRL bf16 weights": side(seconds=2.0, updates=2)}
    found = endtoend.concluded(copy.deepcopy(three), "bf16")
    assert {name: r["ratio"] for name, r in found["ratios"].items()} == {"TRL bf16 autocast": 3.0, "TRL bf16 weights": 2.0}
    assert list(found["invalid"]) == ["TRL bf16 weights"]
