"""One run in a folder of its own: config, provenance, metrics as they come, and the trained policy.

results/runs/<name>/seed<k>/     config.yaml · provenance.json · metrics.jsonl (a line a step, flushed) · answers.jsonl (a line a
                                 response of an exam) · policy/ (at the end)
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_repro import checkpoint, paths, record, trackers
from grpo_repro.check import check_run, mismatch
from grpo_repro.config import Run
from grpo_repro.grid import exclusive
from grpo_repro.progress import Progress, quiet_libraries
from grpo_repro.record import Row
from grpo_repro.types import Answer, EngineError, UserError

if TYPE_CHECKING:
    from grpo_repro.learner import Learner

LINES = ("metrics.jsonl", "answers.jsonl")  # every line has its `step`
MOSTLY_FLAT = 0.9  # share of groups without signal from which on the user is told, once


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def of(cls, run: Run, out: Path | None = None) -> RunFolder:
        return cls(out.resolve() if out else paths.results() / "runs" / run.name / f"seed{run.seed}")

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def provenance(self) -> dict[str, Any]:
        """What the folder says of itself; empty where it holds no run. Raises UserError where it holds something else."""
        try:
            return dict(json.loads((self.path / "provenance.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            if self.path.is_dir() and any(self.path.iterdir()):
                raise UserError(f"{paths.shown(self.path)} is not a run's folder: give another with --out.") from None
            return {}
        except (OSError, ValueError):
            raise UserError(f"{paths.shown(self.path)}: provenance.json cannot be read: give another --out.") from None

    def finished(self, run: Run, force: bool) -> bool:
        """Whether this very run is already here. Raises UserError where another run is, unless forced to replace it."""
        if not (old := self.provenance) or force:
            return False
        if old["key"] != run.key():
            raise UserError(
                f"{paths.shown(self.path)} holds another run (key {old['key']}, this one has {run.key()}): give this one another "
                "name, or a folder with --out, or replace the old one with --force."
            )
        return bool(old.get("finished"))

    def clear(self) -> None:
        for name in (*LINES, "config.yaml", "provenance.json"):
            (self.path / name).unlink(missing_ok=True)
        for place in (self.policy, self.checkpoints, self.path / "tensorboard"):
            shutil.rmtree(place, ignore_errors=True)

    def rewind(self) -> None:
        """Forget the lines after the last checkpoint: a run that was stopped goes on from there."""
        for name in LINES:
            if (path := self.path / name).is_file():
                paths.write(path, "".join(line + "\n" for line in self.before(checkpoint.newest(self.checkpoints)[1], name)))

    def before(self, step: int, name: str = "metrics.jsonl") -> list[str]:
        """The lines of a file that precede a step."""
        path = self.path / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return [line for line in lines if _step_of(line) < step]

    def rows(self) -> list[dict[str, float]]:
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{k: float("nan") if v is None else v for k, v in json.loads(line).items()} for line in lines]


def train_one(run: Run, out: Path | None = None, force: bool = False) -> tuple[RunFolder, bool]:
    """Train one run into its folder; (folder, False) where it was already there.

    Raises UserError, and leaves the folder as it is, where it holds another run or where this one fails before its first step is made,
    even when forced. A stopped run leaves its metrics and its last checkpoint, and the same command goes on from there.
    """
    folder = RunFolder.of(run, out)
    paths.writable(folder.path.parent)
    if folder.finished(run, force):
        return folder, False
    with ExitStack() as stack:
        stack.enter_context(exclusive(paths.writable(folder.path)))
        stack.callback(_drop_empty, folder.path)
        told = {"key": run.key(), "finished": False, **record.provenance()}
        fresh = force or not folder.provenance
        wanted, began = trackers.opened(run, folder.path), time.perf_counter()
        rows = stack.enter_context(closing(_rows(run, folder, fresh)))
        first = next(rows)  # most mistakes show here, while what the folder held is still untouched
        if fresh:
            folder.clear()
        folder.rewind()
        listeners = [stack.enter_context(t) for t in wanted]
        paths.write(folder.path / "config.yaml", yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))
        paths.write(folder.path / "provenance.json", json.dumps(told, indent=1))
        metrics, answered = (stack.enter_context((folder.path / name).open("a", encoding="utf-8")) for name in LINES)
        try:
            for row, answers in itertools.chain([first], rows):
                metrics.write(json.dumps({k: record.kept(v) for k, v in row.items()}) + "\n")
                answered.writelines(json.dumps({"step": int(row["step"]), **vars(answer)}) + "\n" for answer in answers)
                metrics.flush()
                answered.flush()
                for listener in listeners:
                    listener.log(row, int(row["step"]))
        except KeyboardInterrupt:
            same = "the same command without --force" if force else "the same command"
            raise KeyboardInterrupt(f"stopped; {same} goes on from step {checkpoint.newest(folder.checkpoints)[1]}") from None
        seconds = round(time.perf_counter() - began, 2)
        told |= {"finished": True, "seconds": seconds, "device": record.device(run.machine.device), "threads": _threads()}
        paths.write(folder.path / "provenance.json", json.dumps(told, indent=1))
    return folder, True


def _rows(run: Run, folder: RunFolder, fresh: bool) -> Generator[tuple[Row, tuple[Answer, ...]], None, None]:
    """The rows of the loop, each with the answers of its exam, if it had one."""
    from grpo_repro import policy as policies
    from grpo_repro import start, train
    from grpo_repro.learner import Learner

    quiet_libraries()
    bar = Progress(run.name, run.scale.steps)
    with ExitStack() as stack:
        stack.callback(bar.close)
        for sentence in check_run(run):
            bar.note(sentence)
        bar.say(text="loading the policy and its task")
        policy, task = start.load(run, paths.cache())
        learner = stack.enter_context(closing(Learner.of(run, policy, task)))
        first = 0 if fresh else checkpoint.load(learner, folder.checkpoints)
        if first:
            bar.note(f"{run.name}: goes on at step {first}, from its last checkpoint.")
            bar.advance(run.name, first - 1, run.scale.steps)
        dead = sum(json.loads(line).get("groups/zero_variance") == 1.0 for line in folder.before(first))
        told = warned = False
        for row in stack.enter_context(closing(_kept(train.steps(learner, first), learner, first, folder))):
            bar.advance(run.name, int(row["step"]), run.scale.steps)
            bar.say(text=headline(row))
            flat = row.get("groups/zero_variance", 0.0)
            dead += flat == 1.0
            if flat >= MOSTLY_FLAT and not told:
                told = True
                share = "every group" if flat == 1.0 else f"{flat:.0%} of the groups"
                bar.note(f"step {row['step']:.0f}: in {share} all rewards are equal, so there is nothing to learn from them.")
            if not warned and (warning := mismatch(run, row)):
                warned = True
                bar.note(warning)
            yield row, learner.answers
            done, every = int(row["step"]) + 1, run.machine.checkpoint_every
            if every and done % every == 0 and done < run.scale.steps:
                checkpoint.save(learner, done, folder.checkpoints)
        if dead == run.scale.steps:
            raise UserError(
                f"{run.name}: in none of the {dead} steps did a group hold different rewards, so nothing was learned and no policy is "
                "saved: take an easier or harder task, a larger rollout.group_size, or another reward."
            )
        policies.save(policy, folder.policy)
        shutil.rmtree(folder.checkpoints, ignore_errors=True)


def _kept(rows: Generator[Row, None, None], learner: Learner, done: int, folder: RunFolder) -> Generator[Row, None, None]:
    """The rows; where the engine fails, the steps made until then are kept in a checkpoint, `done` of them before the first row."""
    first = done
    try:
        with closing(rows):
            for row in rows:
                yield row
                done = int(row["step"]) + 1
    except EngineError as error:
        if done > first:
            checkpoint.save(learner, done, folder.checkpoints)
        raise EngineError(f"{error} The same command (without --force) goes on from step {done}.") from None


def _drop_empty(path: Path) -> None:
    with suppress(OSError):  # it holds something
        path.rmdir()


def _step_of(line: str) -> int:
    """The step of a metrics line; a line that was cut short is later than any."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 10**9


def headline(row: Row) -> str:
    """The few numbers that one watches."""
    watched = {"reward": "reward", "accuracy": "accuracy", "heldout/accuracy": "held-out", "entropy": "entropy"}
    numbers = [f"{label} {row[name]:.3f}" for name, label in watched.items() if name in row]
    return ", ".join([f"step {int(row['step'])}", *numbers])


def _threads() -> int:
    import torch

    return torch.get_num_threads()
