"""GSM8K and MATH, on small files made here: where the answer is, what is held out, and what each mistake is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas as pd
import pytest

from grpo_repro import tasks
from grpo_repro.tasks import maths, tables
from grpo_repro.tasks.base import Task
from grpo_repro.types import Prompt, UserError

APPLES = {"question": "Ann has 3 apples and buys 15 more. How many?", "answer": "3 + 15 = <<3+15=18>>18\n#### 18"}
WORDS = [APPLES, *({"question": f"What is {n} thousand?", "answer": f"So\n#### {n},000"} for n in range(1, 12))]
MATH = [
    {"problem": "What is a half?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {
        "problem": "Who is first?",
        "level": "Level 2",
        "type": "Algebra",
        "solution": r"First \boxed{1}, no: $\boxed{\text{Evelyn}}$.",
    },
    {"problem": "And now?", "level": "Level ?", "type": "Geometry", "solution": r"Hence $\boxed 3$."},
    *({"problem": f"n={n}?", "level": "Level 5", "type": "Algebra", "solution": rf"\boxed{{{n}}}"} for n in range(9)),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_REPRO_CACHE", str(tmp_path / "cache"))


def encode(text: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in text)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task(name: str, path: Path | str, **more: Any) -> Task:
    return tasks.bound({"name": name, "path": str(path), **more})(encode)


def prompt(of: Task, question: str) -> Prompt:
    return next(p for p in (*of.train, *of.heldout) if p.text.startswith(question))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_gsm8k_from_a_file(tmp_path: Path, suffix: str) -> None:
    made = task("gsm8k", written(tmp_path / f"words.{suffix}", WORDS), limit=50)
    every = (*made.train, *made.heldout)
    assert {p.text.splitlines()[0] for p in every} == {row["question"] for row in WORDS}
    assert not {p.id for p in made.train} & {p.id for p in made.heldout}
    apples, thousand = prompt(made, "Ann"), prompt(made, "What is 7")
    assert apples.text == f"{APPLES['question']}\n{maths.INSTRUCTION}"
    assert (apples.answer, thousand.answer, apples.level, made.limit) == ("18", "7000", "gsm8k", 50)
    right = ("18", r"so \boxed{18}", "#### 18", "The answer is 18.", r"$18.0$", r"\boxed{36/2}")
    wrong = ("", "19", r"\boxed{19}", "18 apples or 17", "1,8")
    assert [made.verify(apples, text)[0] for text in right] == [1.0] * len(right)
    assert [made.verify(apples, text)[0] for text in wrong] == [0.0] * len(wrong)
    assert [made.verify(apples, text)[1] for text in (r"so \boxed{18}", "18")] == [{"boxed": 1.0}, {"boxed": 0.0}]
    assert made.verify(thousand, r"\boxed{7,000}")[0] == 1.0


def test_math_has_its_gold_in_the_last_box_and_levels_of_difficulty(tmp_path: Path) -> None:
    made = task("math", written(tmp_path / "math.jsonl", MATH))
    half, name, bare = prompt(made, "What"), prompt(made, "Who"), prompt(made, "And")
    assert [half.answer, name.answer, bare.answer] == [r"\frac{1}{2}", r"\text{Evelyn}", "3"]
    assert [half.level, name.level, bare.level] == ["level_1", "level_2", "level_unknown"]
    assert made.verify(half, r"\boxed{0.5}")[0] == made.verify(half, r"The answer is $\dfrac12$")[0] == 1.0
    assert made.verify(half, r"\boxed{2}")[0] == 0.0
    # a name is no mathematical expression: it is compared as text too
    assert [made.verify(name, text)[0] for text in (r"\boxed{Evelyn}", r"\boxed{\text{evelyn}}", r"\boxed{Eve}", "")] == [
        1,
        1,
        0,
        0,
    ]
    assert made.positions(["1"]) == {}


def test_a_level_may_be_a_number(tmp_path: Path) -> None:
    made = task("math", written(tmp_path / "m.parquet", [{**row, "level": n % 5 + 1} for n, row in enumerate(MATH)]))
    assert {p.level for p in (*made.train, *made.heldout)} == {f"level_{n}" for n in range(1, 6)}


@pytest.mark.parametrize(
    "where", ["train.jsonl test.jsonl", "data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet"]
)
def test_a_folder_s_own_test_part_is_held_out(tmp_path: Path, where: str) -> None:
    train, test = where.split()
    written(tmp_path / "set" / train, WORDS)
    written(tmp_path / "set" / test, [APPLES, {"question": "New?", "answer": "#### 1"}])
    made = task("gsm8k", tmp_path / "set")
    assert {p.answer for p in made.heldout} == {"18", "1"}
    assert len(made.train) == len(WORDS) - 1, "a problem of the test part is not trained on"


@pytest.mark.parametrize(
    ("name", "file", "text", "sentence"),
    [
        ("gsm8k", "a.jsonl", "", r"a\.jsonl: is empty; it must hold a row a problem"),
        ("gsm8k", "a.jsonl", '{"question": "x"}\n', r"a\.jsonl: has no column 'answer', only question: rename or add it"),
        ("math", "a.jsonl", '{"problem": "x", "solution": "y"}\n', r"has no column 'level', only problem, solution"),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": "x", "answer": "5"}\n',
            r"a\.jsonl, row 1: holds no answer where gsm8k has it \(behind ####",
        ),
        ("gsm8k", "a.jsonl", '{"question": "x", "answer": "#### "}\n', r"row 1: holds no answer"),
        ("gsm8k", "a.jsonl", '{"question": "x", "answer": null}\n', r"row 1: holds no answer"),
        ("gsm8k", "a.jsonl", '{"question": " ", "answer": "#### 5"}\n', r"row 1: its question is ' ', not a text"),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": "x", "answer": "#### 5"}\n{"question": null, "answer": "#### 5"}\n',
            r"row 2: its question is None",
        ),
        (
            "math",
            "a.jsonl",
            '{"problem": "x", "solution": "5", "level": 1}\n',
            r"row 1: holds no answer where math has it \(in \\boxed",
        ),
        ("gsm8k", "a.jsonl", "not JSON\n", r"a\.jsonl: cannot be read as json \(.*\): correct the file"),
        ("gsm8k", "a.parquet", "not parquet", r"a\.parquet: cannot be read as parquet"),
        ("gsm8k", "a.csv", "question,answer\n", r"a\.csv is not one of \.jsonl, \.json, \.parquet: convert it"),
        ("gsm8k", "b/valid.jsonl", "{}\n", r"b holds no train\.jsonl and no train\.parquet, there or below"),
        (
            "gsm8k",
            "a.jsonl",
            '{"question": "x", "answer": "#### 5"}\n',
            r"1 different problems leave nothing to (train on|hold out)",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, name: str, file: str, text: str, sentence: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError, match=sentence) as error:
        task(name, path if path.parent == tmp_path else path.parent)
    assert "\n" not in str(error.value)


def test_parts_of_two_kinds_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "set" / "train.jsonl", WORDS)
    written(tmp_path / "set" / "train.parquet", WORDS)
    with pytest.raises(UserError, match=r"holds train\.jsonl and train\.parquet: keep files of one kind"):
        task("gsm8k", tmp_path / "set")


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"question": pd.Series(dtype=str), "answer": pd.Series(dtype=str)}).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"none\.parquet: holds no rows"):
        task("gsm8k", tmp_path / "none.parquet")


@pytest.mark.parametrize("path", ["./no/such", "no_such.jsonl", "/no/such/folder", "owner/set.jsonl"])
def test_a_place_that_is_not_there_is_not_asked_of_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_fetch", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="there is no file or folder"):
        task("gsm8k", path)


def test_without_a_hub_and_a_copy_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once, with a time limit; `datasets`, which asks again for half a minute, is not reached."""
    asked: list[dict[str, Any]] = []

    def offline(self: Any, name: str, **how: Any) -> None:
        asked.append(how)
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked again"))
    for name, set_ in (("gsm8k", "openai/gsm8k"), ("math", "DigitalLearningGmbH/MATH-lighteval")):
        with pytest.raises(
            UserError, match=rf"{set_}' could not be read from the Hugging Face hub \(ConnectionError: .*\), and no copy"
        ):
            tasks.bound(name)(encode)
    assert asked == [{"timeout": tables.SECONDS}] * 2


def test_what_came_from_the_hub_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = datasets.load_dataset, []

    def hub(name: str, *more: Any, **how: Any) -> Any:
        if name != "openai/gsm8k":
            return real(name, *more, **how)
        asked.append(more)
        return datasets.DatasetDict(train=datasets.Dataset.from_list(WORDS), test=datasets.Dataset.from_list([APPLES]))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    first, second = tasks.bound("gsm8k")(encode), tasks.bound("gsm8k")(encode)
    assert asked == [("main",)], "the second time it is read from the copy"
    assert [p.answer for p in first.heldout] == ["18"]
    assert (first.train, first.heldout) == (second.train, second.heldout)
