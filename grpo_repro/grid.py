"""Arms × seeds in parallel processes, one torch thread each. A finished run is written at once, so a killed grid resumes.

The parent hands out runs and watches; a worker trains one run at a time and writes its record itself. Runs of one seed share a
supervised start: while one worker makes it, the others are given runs of other seeds.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_repro import paths, record
from grpo_repro.check import check_run
from grpo_repro.config import Run
from grpo_repro.progress import Progress, deaf_children, lock_of_threads
from grpo_repro.record import Record, Row
from grpo_repro.types import UserError

if TYPE_CHECKING:
    from grpo_repro.ablation import Ablation  # it brings statistics, which workers do without

Trainer = Callable[[Run, Path], Iterator[Row]]
WORKER_ENV = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
ATTEMPTS = 2


def rows_of(run: Run, cache: Path) -> Iterator[Row]:
    """Train one run from its start; a row a step, see `train.train`."""
    from grpo_repro import start, train  # torch and transformers: workers only

    policy, task = start.load(run, cache)
    yield from train.train(run, policy, task)


@dataclass
class Job:
    """One distinct run and the places of the design, (panel, arm), that it fills."""

    run: Run
    places: list[tuple[str, str]]
    attempts: int = 0

    @property
    def start(self) -> str:
        """Runs of equal `start` begin with the same policy."""
        return json.dumps([self.run.seed, self.run.policy.model_dump(), self.run.task], sort_keys=True)

    def __str__(self) -> str:
        panel, arm = self.places[0]
        return f"{panel}/{arm} seed {self.run.seed}"


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    trains: bool = False  # its run has passed the start


@dataclass
class Grid:
    """What is to do, what is being done, and what has been done, by key."""

    todo: list[Job]
    workers: list[Worker] = field(default_factory=list)
    done: dict[str, Record] = field(default_factory=dict)
    lost: list[Job] = field(default_factory=list)
    started: set[str] = field(default_factory=set)

    def next_job(self) -> Job | None:
        """The first job whose start exists, or whose seed no worker is making a start for."""
        making = {w.job.run.seed for w in self.workers if w.job and not w.trains and w.job.start not in self.started}
        for job in self.todo:
            if job.start in self.started or job.run.seed not in making:
                self.todo.remove(job)
                return job
        return None


def run_grid(
    ablation: Ablation,
    profile: str,
    *,
    processes: int | None = None,
    only_panel: str | None = None,
    trainer: Trainer | None = None,
) -> list[Record]:
    """Every run of a profile, in the design's order: reused where recorded, else trained on `processes` workers (default: cores).

    Raises UserError where the results cannot be written, another grid is at work on them, a run refuses its input, or runs are
    missing at the end; KeyboardInterrupt with a sentence for the user when stopped. Finished runs stay in every case.
    """
    design = [(p, a, run) for p, a, run in ablation.runs(profile) if only_panel in (None, p)]
    if not design:
        raise UserError(f"{ablation.name}: no panel {only_panel!r}; valid: {', '.join(ablation.panels)}.")
    folder = runs_folder(ablation.name, profile)
    with exclusive(paths.writable(folder)):
        for part in folder.rglob(".*.part"):  # of a write that was killed
            part.unlink(missing_ok=True)
        grid = Grid(todo=[])
        jobs: dict[str, Job] = {}
        known = record.index([folder, runs_folder(ablation.name, "full"), paths.cache() / "runs"])
        for panel, arm, run in design:
            if old := known.get(run.key()):
                grid.done[old.key] = old
                _keep(old, folder, [(panel, arm)])
            else:
                jobs.setdefault(run.key(), Job(run, [])).places.append((panel, arm))
        grid.todo = list(jobs.values())
        if grid.todo:
            _train(grid, folder, f"{ablation.name} {profile}", processes or record.cores(), trainer or rows_of)
    if grid.lost:
        raise UserError(
            f"{ablation.name} {profile}: {len(grid.lost)} of {len(grid.lost) + len(grid.done)} runs are missing, their worker "
            f"was killed twice (out of memory?): {', '.join(map(str, grid.lost))}; the same command, perhaps with --processes 1, "
            "tries them again."
        )
    return [grid.done[run.key()].under(panel, arm) for panel, arm, run in design]


def runs_folder(name: str, profile: str) -> Path:
    return paths.results() / "ablations" / name / profile / "runs"


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two processes never fill it at once; it goes with the process. Raises UserError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another grpo-repro process is at work on {paths.shown(folder)}: wait for it, or stop it.") from None
        yield
    finally:
        os.close(descriptor)


def _keep(finished: Record, folder: Path, places: list[tuple[str, str]]) -> None:
    """Write a record wherever it belongs and is not yet."""
    for panel, arm in places:
        here = finished.under(panel, arm)
        present = record.read(here.path(folder)) if here.path(folder).is_file() else None
        if present is None or present.key != here.key:
            here.write(folder)


def _train(grid: Grid, folder: Path, title: str, processes: int, trainer: Trainer) -> None:
    jobs = list(grid.todo)
    before = len(grid.done)
    origin = record.provenance()
    bar = Progress(title, total=sum(job.run.scale.steps for job in jobs))
    for sentence in dict.fromkeys(sentence for job in jobs for sentence in check_run(job.run)):
        bar.note(sentence)
    try:
        while grid.todo or any(w.job for w in grid.workers):
            while len(grid.workers) < min(processes, len(jobs)):
                grid.workers.append(_spawn(folder, origin, trainer))
            for worker in grid.workers:
                if worker.job is None and (job := grid.next_job()):
                    worker.job, worker.trains = job, False
                    job.attempts += 1
                    with suppress(BrokenPipeError):  # it died idle: _listen finds out
                        worker.pipe.send((job.run, job.places))
            wait([w.pipe for w in grid.workers], timeout=1.0)
            for worker in list(grid.workers):
                _listen(grid, worker, bar)
            bar.say(_now(grid, before, before + len(jobs)))
    except KeyboardInterrupt:
        finished = len(grid.done)
        raise KeyboardInterrupt(f"stopped: {finished} of {before + len(jobs)} runs recorded; the same command resumes") from None
    finally:
        bar.close()
        for worker in grid.workers:
            worker.pipe.close()  # an idle worker ends by itself
            if worker.job:
                worker.process.terminate()
        for worker in grid.workers:
            worker.process.join()


def _listen(grid: Grid, worker: Worker, bar: Progress) -> None:
    """Take what a worker has said: a step, a finished run, a mistake of the user's, a fault of ours, or silence for ever."""
    try:
        while worker.pipe.poll():
            kind, content = worker.pipe.recv()
            job = worker.job
            assert job is not None
            if kind == "step":
                worker.trains = True
                grid.started.add(job.start)
                bar.advance(str(job), content, job.run.scale.steps)
            elif kind == "done":
                bar.finish(str(job), job.run.scale.steps)
                grid.done[content.key] = content
                worker.job = None
            elif kind == "user error":
                raise UserError(f"{job}: {content}")
            else:
                raise RuntimeError(f"{job} failed in its worker:\n{content}")
    except (EOFError, ConnectionResetError):
        grid.workers.remove(worker)
        worker.process.join()
        if (job := worker.job) is None:
            return
        bar.drop(str(job))
        again = job.attempts < ATTEMPTS
        (grid.todo if again else grid.lost).append(job)
        bar.note(f"{job}: its worker died (exit code {worker.process.exitcode}); {'once more' if again else 'given up'}.")


def _now(grid: Grid, before: int, total: int) -> tuple[int, int, list[str]]:
    return len(grid.done), total, [str(w.job) if w.trains else f"{w.job} (start)" for w in grid.workers if w.job]


def _spawn(folder: Path, origin: Mapping[str, Any], trainer: Trainer) -> Worker:
    """A fresh process. Its environment must be set before its libraries load."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, folder, paths.cache(), dict(origin), trainer), daemon=True)
    saved = {name: os.environ.get(name) for name in WORKER_ENV}
    os.environ.update(WORKER_ENV)
    try:
        with deaf_children():
            process.start()
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    theirs.close()  # or the parent would not see the worker's end
    return Worker(process, ours)


def _work(pipe: Connection, folder: Path, cache: Path, origin: dict[str, Any], trainer: Trainer) -> None:
    """A worker's life: train what the pipe hands in, write the record, say so; end when the parent is gone."""
    import torch

    torch.set_num_threads(1)
    lock_of_threads()
    try:
        while True:
            run, places = pipe.recv()
            try:
                pipe.send(("done", _trained(pipe, run, places, folder, cache, origin, trainer)))
            except UserError as error:
                pipe.send(("user error", str(error)))
            except (BrokenPipeError, EOFError):
                raise
            except Exception:
                pipe.send(("fault", traceback.format_exc()))
    except (BrokenPipeError, EOFError, ConnectionResetError):
        return


def _trained(
    pipe: Connection, run: Run, places: list[tuple[str, str]], folder: Path, cache: Path, origin: dict[str, Any], trainer: Trainer
) -> Record:
    began, clock = record.now(), time.perf_counter()
    machine = run.machine.model_copy(update={"threads": 1, "overlap": False})  # the cores have other runs to do
    alone = run.model_copy(update={"machine": machine})
    rows = []
    for row in trainer(alone, cache):
        rows.append(row)
        pipe.send(("step", int(row["step"])))
    seconds = round(time.perf_counter() - clock, 2)
    device = record.device(run.machine.device)
    told = {**origin, "device": device, "threads": 1, "started": began, "seconds": seconds}
    finished = Record.of(alone, *places[0], rows, told)
    for panel, arm in places:
        finished.under(panel, arm).write(folder)
    paths.write(cache / "runs" / f"{finished.key}.json", finished.text())
    return finished
