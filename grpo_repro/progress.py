"""Progress of one or many runs: a live bar on a terminal; elsewhere (a log, CI) at most a line every ten seconds."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from tqdm import tqdm

QUIET_SECONDS = 10.0


class Progress:
    """Counts training steps over all runs. Writes to stderr, so that a command's output can be piped."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self._at: dict[str, int] = {}  # steps by run in progress
        self._before = 0  # steps of finished runs
        self._began = self._said = time.monotonic()
        live = sys.stderr.isatty()
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self._bar: Any = tqdm(total=total, desc=title, bar_format=form, dynamic_ncols=True, file=sys.stderr) if live else None

    @property
    def done(self) -> int:
        return min(self._before + sum(self._at.values()), self.total)

    def advance(self, run: str, step: int, steps: int) -> None:
        self._at[run] = min(step + 1, steps)

    def finish(self, run: str, steps: int) -> None:
        self._at.pop(run, None)
        self._before += steps

    def drop(self, run: str) -> None:
        """The run is lost, and so are its steps."""
        self._at.pop(run, None)

    def say(self, runs: tuple[int, int, list[str]] | None = None, text: str = "") -> None:
        """Show where things are: (finished, of, running now), or any text."""
        if runs:
            done, of, now = runs
            text = f"{done} of {of} runs; " + ", ".join(f"{run} step {self._at[run]}" if run in self._at else run for run in now)
        if self._bar is not None:
            self._bar.n = self.done
            self._bar.set_postfix_str(text, refresh=True)
        elif time.monotonic() - self._said >= QUIET_SECONDS:
            self._said = time.monotonic()
            print(f"{self.title}: {text}{self._left()}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.n = self.done
            self._bar.close()

    def _left(self) -> str:
        if not self.done:
            return ""
        left = (time.monotonic() - self._began) * (self.total - self.done) / self.done
        return f"; about {int(left) // 60}:{int(left) % 60:02d} left"


def quiet_libraries() -> None:
    """Keep the bars of transformers out of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def deaf_children() -> Iterator[None]:
    """A process that is started inside never sees Ctrl-C, which a terminal sends to all: it is the parent's to handle."""
    resource_tracker.ensure_running()  # or the first start would do it, and unblock the signal behind our back
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def lock_of_threads() -> None:
    """For a process that may be ended at any time: tqdm's own lock would leak a semaphore then."""
    tqdm.set_lock(threading.RLock())
