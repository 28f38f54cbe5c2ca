"""Drawing in another process, ahead of the trainer: the rollout of step s is made while the trainer updates on those before it.

The weights of step s are known `sampler.staleness` steps earlier, and the numbers are those of the run without overlap, bit for bit:
a rollout depends on its weights and on (seed, step), on nothing else. Weights go through shared memory, one slot a version
(sampler.Past); requests and rollouts through a pipe between parent and child.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor, nn

from grpo_repro.collect import Row, collect
from grpo_repro.judge import Judged
from grpo_repro.learner import Learner
from grpo_repro.progress import deaf_children, lock_of_threads, quiet_libraries
from grpo_repro.sampler import Layout, Sampler, views
from grpo_repro.types import NonFinite, Rollout, UserError

Draw = Callable[[int], tuple[Rollout, Judged, Row]]


@contextmanager
def drawing(learner: Learner) -> Iterator[Draw]:
    """How a step's rollout is had, after `learner.sync(step)`: drawn here, or taken from a process that ends with the block."""
    if not learner.run.machine.overlap:
        yield partial(collect, learner.sampler)
        return
    ahead = Ahead(learner)
    try:
        yield ahead.take
    finally:
        ahead.close()


class Ahead:
    """The process that draws, seen from the trainer. It is asked for every step whose weights are there, the next steps first."""

    def __init__(self, learner: Learner, device: str | None = None) -> None:
        """`device`: where it draws; the policy's own by default."""
        self.learner, self.asked = learner, 0
        sampler, past = learner.sampler, learner.past
        # the model without its weights, which come through the slots
        empty = {id(p): nn.Parameter(torch.empty(0, dtype=p.dtype), requires_grad=False) for p in past.trainer.parameters()}
        bare = replace(sampler.policy, model=copy.deepcopy(past.trainer, empty).cpu())
        begun = replace(sampler, policy=bare, own=True, version=-1, pending=_mapped(sampler.pending, Tensor, _numpy))
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        place, threads = device or str(sampler.policy.device), torch.get_num_threads()
        arguments = theirs, begun, past.layout, past.slots, place, threads
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        with deaf_children():
            self.process.start()
        theirs.close()  # or its end would not be seen

    def take(self, step: int) -> tuple[Rollout, Judged, Row]:
        """The rollout of a step, judged; the unfinished responses are the learner's from then on, for its checkpoints.

        Raises what drawing it raised; UserError where the process has died.
        """
        rule, at = self.learner.run.sampler, self.learner.past.at
        try:
            self.asked = max(self.asked, step)
            while self.asked < self.learner.run.scale.steps and rule.version(self.asked) in at:
                version = rule.version(self.asked)
                self.pipe.send((self.asked, version, at[version]))
                self.asked += 1
            kind, content = self.pipe.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.process.join()
            raise UserError(
                f"step {step}: the process that draws has died (exit code {self.process.exitcode}; out of memory?): the same command "
                "goes on from the last checkpoint, and machine.overlap: false needs less memory."
            ) from None
        if kind == "fault":
            raise RuntimeError(f"the process that draws failed:\n{content}")
        if kind != "rollout":
            raise (NonFinite if kind == "not finite" else UserError)(content)
        here = partial(_tensor, device=self.learner.policy.device)
        rollout, judged, row, self.learner.sampler.pending = _mapped(content, np.ndarray, here)
        return rollout, judged, row

    def close(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _work(pipe: Connection, sampler: Sampler, layout: Layout, slots: list[Tensor], device: str, threads: int) -> None:
    """The other process's life: draw what is asked for, one step after the other; end when the trainer is gone."""
    torch.set_num_threads(threads)
    quiet_libraries()
    lock_of_threads()
    sampler.policy.model.to(device)  # type: ignore[arg-type]  # its decorator hides the signature
    sampler.pending = _mapped(sampler.pending, np.ndarray, partial(_tensor, device=torch.device(device)))
    done: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_post, args=(pipe, done), daemon=True).start()
    while True:
        try:
            step, version, slot = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            sampler.load(views(slots[slot], layout), version)
            done.put(("rollout", _mapped((*collect(sampler, step), sampler.pending), Tensor, _numpy)))
        except NonFinite as error:
            done.put(("not finite", str(error)))
        except UserError as error:
            done.put(("user error", str(error)))
        except Exception:
            done.put(("fault", traceback.format_exc()))


def _post(pipe: Connection, done: queue.Queue[Any]) -> None:
    """Send in the background: a rollout waits in the pipe until the trainer takes it, and the next must not wait for that."""
    try:
        while True:
            pipe.send(done.get())
    except (BrokenPipeError, ConnectionResetError):  # the trainer is gone
        os._exit(0)


def _mapped(x: Any, kind: type, to: Callable[[Any], Any]) -> Any:
    """A copy of nested data with every leaf of a kind replaced."""
    if isinstance(x, kind):
        return to(x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: _mapped(getattr(x, f.name), kind, to) for f in fields(x)})
    if isinstance(x, dict):
        return {k: _mapped(v, kind, to) for k, v in x.items()}
    return tuple(_mapped(v, kind, to) for v in x) if isinstance(x, tuple) else x


def _numpy(x: Tensor) -> Any:
    """By value: a tensor would be sent as shared memory, and be gone with the process that made it."""
    return x.cpu().numpy()


def _tensor(x: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(x).to(device)
