"""Measuring in processes of their own: forked from a server that has the libraries loaded, one a case, so that a start is cheap,
threads are the case's and peak memory is its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from grpo_repro import paths

PRELOAD = ["torch", "transformers.models.llama.modeling_llama", "transformers.generation", "grpo_repro.train", "grpo_repro.start"]
Result = TypeVar("Result")
WAIT = 1800.0  # seconds after which a silent process counts as hung


class Failed(Exception):
    """A process could not do what was asked; the message is its own last line."""


class Process:
    """A function in a process of its own, spoken to by messages: function(receive, reply, *arguments)."""

    def __init__(self, function: Callable[..., None], *arguments: Any, threads: int, log: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.pipe, far = context.Pipe()
        said = paths.cache() / "benchmark" / "logs" / f"{log.replace(' ', '-')}.log"  # what the libraries print
        said.parent.mkdir(parents=True, exist_ok=True)
        self.process = context.Process(target=_body, args=(far, function, arguments, threads, str(said)))
        self.process.start()
        far.close()

    def ask(self, **message: Any) -> dict[str, Any]:
        self.pipe.send(message)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Raises Failed where the process fell, said that it failed, or is silent for too long."""
        try:
            if not self.pipe.poll(WAIT):
                raise Failed(f"no answer for {WAIT:.0f} s")
            reply: dict[str, Any] = self.pipe.recv()
        except EOFError:
            self.process.join(5)
            raise Failed(f"the process ended with code {self.process.exitcode}") from None
        if "failed" in reply:
            raise Failed(reply["failed"])
        return reply

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def once(function: Callable[..., dict[str, Any]], *arguments: Any, threads: int = 1) -> dict[str, Any]:
    """function(*arguments) in a process of its own. Raises Failed."""
    worker = Process(_single, function, arguments, threads=threads, log=function.__module__)
    try:
        return worker.answer()
    finally:
        worker.close()


def memory(field: str = "VmHWM") -> float:
    """MB of this process: VmHWM (peak) or VmRSS (now). Not a number where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), float("nan"))


def forget_peak() -> None:
    """From here on VmHWM counts anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"the peak of memory could not be reset ({error}): it is that of the whole process", file=sys.stderr)


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds, and what the function returned."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def _single(receive: Any, reply: Any, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    reply(function(*arguments))


def _body(pipe: Connection, function: Callable[..., None], arguments: tuple[Any, ...], threads: int, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    try:
        function(pipe.recv, pipe.send, *arguments)
    except EOFError:
        return  # the other end is gone
    except Exception as error:
        traceback.print_exc()
        pipe.send({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"})
