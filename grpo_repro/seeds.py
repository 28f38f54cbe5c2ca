"""One run over several seeds: what it learned, on which prompts, and how sure that is.

A notebook of a run, notebooks/<name>.ipynb beside experiments/runs/<name>.yaml, reads all of it from here:

    view = seeds.load(name, results_dir)    # results_dir "": results/reports/<name>
    view.frame          tidy DataFrame: panel, arm, seed, step, then a column a metric
    view.answers        a row a response of the first and of the last exam: seed, when, part, level, prompt, gold, response, correct …
    view.gains          a row a part and level: accuracy before, after, and the gain, with intervals
    view.by_level(…)    the metrics of each level as curves that figures.curves draws
    view.window(…)      a metric's mean over some steps, a number a seed
    view.judged(…)      predictions beside what was measured
    view.examples()     the same prompts answered before and after
    view.seconds()      seconds a step, by phase
    view.save_figure(fig, stem), view.write_summary()

`gather` first copies what is small of the finished runs (metrics, answers; no weights) to results/reports/<name>/runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_repro import config, figures, paths, record, stats
from grpo_repro.claims import number
from grpo_repro.record import Record
from grpo_repro.report import Page, origin
from grpo_repro.stats import Interval
from grpo_repro.types import UserError

WHEN = ("before", "after")
PARTS = {"heldout": "held out", "new_range": "new range"}
ALL = "all"
SMOOTH = 5  # steps of the moving mean of a training curve: a step has few prompts of a level


def names() -> list[str]:
    """Runs that have a notebook of the same stem."""
    files = (paths.experiments() / "runs").rglob("*.yaml")
    return sorted(path.stem for path in files if (paths.notebooks() / f"{path.stem}.ipynb").is_file())


def folder(name: str) -> Path:
    return paths.results() / "reports" / name


def gather(name: str) -> list[Record]:
    """Copy the small files of the finished runs in results/runs/<name> to the report's folder; every record that is there then.

    Raises UserError where there is none, or where two of them differ in more than the seed.
    """
    from grpo_repro.single import RunFolder  # it can train, and loads what that needs

    for place in sorted((paths.results() / "runs" / name).glob("seed*")):
        runfolder = RunFolder(place)
        told = runfolder.provenance
        if told.get("finished"):
            run = config.parse_run(config.load_yaml(place / "config.yaml"), paths.shown(place / "config.yaml"))
            kept = Record.of(run, "runs", name, runfolder.rows(), {k: v for k, v in told.items() if k != "finished"})
            path = kept.write(folder(name))
            answers = _ends((place / "answers.jsonl").read_text(encoding="utf-8").splitlines())
            if not answers:
                raise UserError(
                    f"{paths.shown(place)}: the run made no exam, so there is nothing to report: set scale.eval_prompts."
                )
            paths.write(answers_of(path), "".join(answers))
    return recorded(name)


def recorded(name: str) -> list[Record]:
    """The records of the report's folder, by seed. Errors as `gather`."""
    found = [r for path in sorted((folder(name) / "runs").glob("[!.]*.json")) if (r := record.read(path))]
    if not found:
        raise UserError(
            f"there is no finished run of {name}: `grpo-repro run experiments/runs/{name}.yaml seed=0` makes one; give three seeds or more."
        )
    found.sort(key=lambda r: r.seed)
    first = _settings(found[0])
    for other in found[1:]:
        if changed := [key for key, value in _settings(other).items() if first.get(key) != value]:
            raise UserError(
                f"{name}: seeds {found[0].seed} and {other.seed} differ in {changed[0]} ({first.get(changed[0])!r}, "
                f"{_settings(other)[changed[0]]!r}): run both again, or remove one from {paths.shown(folder(name) / 'runs')}."
            )
    return found


def load(name: str, results_dir: str = "") -> Seeds:
    """The recorded seeds of a run. Errors as `gather`."""
    return Seeds(Path(results_dir) if results_dir else folder(name), name, recorded(name))


@dataclass
class Seeds(Page):
    """The recorded seeds of one run, and the place for what is made of them."""

    name: str
    records: list[Record]

    @cached_property
    def frame(self) -> pd.DataFrame:
        return record.frame(self.records)

    @cached_property
    def answers(self) -> pd.DataFrame:
        tables = []
        for r in self.records:
            lines = answers_of(r.path(folder(self.name))).read_text(encoding="utf-8").splitlines()
            table = pd.json_normalize([json.loads(line) for line in lines])
            table.insert(0, "seed", r.seed)
            table.insert(1, "when", np.where(table["step"] == table["step"].min(), *WHEN))
            tables.append(table.rename(columns=lambda column: column.removeprefix("notes.")))
        return pd.concat(tables, ignore_index=True)

    @property
    def levels(self) -> list[str]:
        return sorted(set(self.answers["level"]))

    @cached_property
    def gains(self) -> pd.DataFrame:
        """A row a part and level (and all levels of a part together).

        prompts, seeds: how many · before, after: share right, with Wilson's interval for that share of so many prompts (as if one seed
        had been run: the seeds answer the same prompts) · gain: after − before; …_prompts: t interval over prompts, each the mean of
        its seeds · …_seeds: t interval over seeds, each the mean of its prompts. NaN: no interval from one.
        """
        rows = []
        for part in PARTS:
            of_part = self.answers[self.answers["part"] == part]
            for level in [ALL, *sorted(set(of_part["level"]))] if len(of_part) else []:
                chosen = of_part if level == ALL else of_part[of_part["level"] == level]
                rows.append({"part": part, "level": level, **_gain(chosen)})
        return pd.DataFrame(rows)

    def gain(self, part: str, level: str = ALL) -> list[float]:
        """After − before, a number a seed."""
        chosen = self.answers[
            (self.answers["part"] == part) & (self.answers["level"].isin(self.levels if level == ALL else [level]))
        ]
        return [float(x) for x in _difference(chosen, "seed")]

    def window(self, column: str, first: int, last: int) -> list[float]:
        """The mean of a metric over steps first to last, a number a seed; empty where a seed did not record it there."""
        here = self.frame[self.frame["step"].between(first, last)]
        means = here.groupby("seed")[column].mean() if column in here else pd.Series(dtype=float)
        return [float(x) for x in means] if len(means) == len(self.records) and means.notna().all() else []

    def by_level(self, smooth: Sequence[str] = (), **columns: str) -> pd.DataFrame:
        """`accuracy="accuracy/{}"` → column accuracy of an arm a level; those in `smooth` as the mean of the last SMOOTH steps."""
        tables = []
        for level in self.levels:
            table = self.frame[["panel", "seed", "step"]].assign(arm=level)
            for name, pattern in columns.items():
                values = self.frame.get(pattern.format(level), pd.Series(np.nan, index=self.frame.index))
                if name in smooth:
                    means = values.groupby(self.frame["seed"]).transform(lambda x: x.rolling(SMOOTH, min_periods=1).mean())
                    values = means.where(values.notna())
                table[name] = values
            tables.append(table)
        return pd.concat(tables, ignore_index=True)

    def judged(self, predictions: Iterable[tuple[str, Sequence[float], float, float]]) -> pd.DataFrame:
        """(quantity, its numbers a seed, lowest, highest expected) → a row each, with the mean, its interval and what came of it."""
        rows = []
        for quantity, values, low, high in predictions:
            mean = float(np.mean(values)) if len(values) else None
            outcome = "not measured" if mean is None else "as predicted" if low <= mean <= high else "not as predicted"
            interval = _text(_over(values)) if len(values) else "–"
            expected = f"{number(low)} to {number(high)}" if np.isfinite(high) else f"at least {number(low)}"
            rows.append(
                {
                    "quantity": quantity,
                    "predicted": expected,
                    "measured": number(mean),
                    "over seeds": interval,
                    "outcome": outcome,
                }
            )
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """`gains`, for people."""
        told = {
            "prompts": lambda r: f"{PARTS[r.part]}, {r.level}",
            "n": lambda r: str(r.prompts),
            "before": lambda r: f"{number(r.before)} {_text((r.before_low, r.before_high))}",
            "after": lambda r: f"{number(r.after)} {_text((r.after_low, r.after_high))}",
            "gain": lambda r: number(r.gain, signed=True),
            "over prompts": lambda r: _text((r.gain_low_prompts, r.gain_high_prompts)),
            "over seeds": lambda r: _text((r.gain_low_seeds, r.gain_high_seeds)),
        }
        return pd.DataFrame([{column: text(r) for column, text in told.items()} for r in self.gains.itertuples()])

    def examples(self, each: int = 2) -> pd.DataFrame:
        """The first prompts of every part and level, not chosen by their answers, as the first seed answered them."""
        one = self.answers[self.answers["seed"] == self.records[0].seed]
        asked = one[one["when"] == WHEN[0]].groupby(["part", "level"], sort=False).head(each)
        wide = one.pivot_table(index="prompt", columns="when", values="response", aggfunc="first")
        right = one.pivot_table(index="prompt", columns="when", values="correct", aggfunc="first")
        marked = {
            when: [f"{wide[when][p]} {'✓' if right[when][p] else '✗'}" for p in asked["prompt"]] for when in WHEN if when in wide
        }
        return pd.DataFrame({"prompts": asked["part"].map(PARTS), "prompt": asked["prompt"], "gold": asked["gold"], **marked})

    def raw(self) -> dict[str, float]:
        """Share of responses whose whole text gets the full score, before and after: without extraction hardly any does."""
        if "raw_score" not in self.answers:
            return {}
        full = (self.answers["raw_score"] == 1.0).groupby(self.answers["when"]).mean()
        return {when: float(full[when]) for when in WHEN if when in full}

    def seconds(self) -> pd.DataFrame:
        """Seconds a step by phase, mean and largest over steps and seeds; an exam only where there was one."""
        phases = [column for column in map(str, self.frame) if column.startswith("seconds/")]
        table = pd.DataFrame({"mean": self.frame[phases].mean(), "largest": self.frame[phases].max()})
        table.index = [phase.removeprefix("seconds/") for phase in phases]
        return table.sort_values("mean", ascending=False).round(2)

    def caption(self, interval: str = "95% t interval over seeds") -> str:
        told = origin(self.records)
        return figures.caption({"commit": told["commits"][0], "dirty": told["dirty"]}, len(self.records), interval)

    def write_summary(self, **content: Any) -> None:
        gains = json.loads(self.gains.to_json(orient="records", double_precision=6))
        kept = {"name": self.name, "seeds": [r.seed for r in self.records], "gains": gains, "full_raw_score": self.raw()}
        super().write_summary(**kept, **content)


def _gain(chosen: pd.DataFrame) -> dict[str, float]:
    prompts, by_seed = _difference(chosen, "prompt"), _difference(chosen, "seed")
    found: dict[str, float] = {"prompts": len(prompts), "seeds": len(by_seed)}
    for when in WHEN:
        share = stats.wilson(float(chosen[chosen["when"] == when]["correct"].mean()), len(prompts))
        found |= {when: share.estimate, f"{when}_low": share.low, f"{when}_high": share.high}
    found["gain"] = float(by_seed.mean())
    for over, values in (("prompts", prompts), ("seeds", by_seed)):
        found[f"gain_low_{over}"], found[f"gain_high_{over}"] = _over(values)
    return found


def _difference(chosen: pd.DataFrame, by: str) -> np.ndarray:
    """After − before of the share right, a number a prompt or seed."""
    means = chosen.groupby([by, "when"])["correct"].mean().unstack("when")
    return (means[WHEN[1]] - means[WHEN[0]]).to_numpy(float)


def _over(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    if len(values) < 2:
        return np.nan, np.nan
    interval: Interval = stats.paired_t(np.asarray(values))
    return interval.low, interval.high


def _text(interval: tuple[float, float]) -> str:
    return "–" if np.isnan(interval[0]) else f"[{number(interval[0])}, {number(interval[1])}]"


def _settings(r: Record) -> dict[str, Any]:
    """What must be the same in all seeds."""
    return {key: value for key, value in r.run.items() if key not in ("seed", "machine", "report_to")}


def answers_of(path: Path) -> Path:
    """The file of the answers beside a record's."""
    return path.with_suffix(".answers.jsonl")


def _ends(lines: Sequence[str]) -> list[str]:
    """The lines of the first and of the last exam."""
    steps = [json.loads(line)["step"] for line in lines]
    return [f"{line}\n" for line, step in zip(lines, steps, strict=True) if step in (min(steps), max(steps))]
