"""`python -m parity`: put every configuration to every framework, write results/reports/parity, fail if an agreement is lost."""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from grpo_repro import paths
from grpo_repro.knobs import advantage, clip, sampling
from grpo_repro.objective import Objective
from parity import batches, report
from parity.cases import BASE, OTHERS, Case, cases, unknown
from parity.compare import SEEDS, Cannot, Deviation, Peer, difference, names, ours, out, parts, specs, swap, worst

PEERS = ("trl", "verl", "openrlhf", "liger")


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    started = time.time()
    if new := unknown():
        print(
            f"parity: {new[0]} is new: teach parity/peers how each framework says it, then name it in LOOKED_FOR of parity/cases.py."
        )
        return 2
    found: dict[str, Any] = {"frameworks": [], "cases": [], "cannot": [], "deviations": []}
    for module in PEERS:
        try:
            peer: Peer = importlib.import_module(f"parity.peers.{module}").peer
            deviations: list[Deviation] = importlib.import_module(f"parity.deviations.{module}").deviations()
        except ImportError as error:
            print(f"parity: {module} cannot be imported here ({error}): run `make parity`, which builds .venv-parity first.")
            return 2
        found["frameworks"].append(_ask(peer, deviations, found))
    found["seeds"] = list(SEEDS)
    found["batch"] = {"rows": batches.GROUPS * batches.SIZE, "group": batches.SIZE, "limit": batches.LIMIT}
    problems = report.problems(found)
    folder = paths.results() / "reports" / "parity"
    paths.write(folder / "parity.json", _lines(found))
    paths.write(folder / "provenance.json", json.dumps(_provenance(time.time() - started), indent=1, ensure_ascii=False) + "\n")
    paths.write(folder / "README.md", report.render(found, json.loads((folder / "provenance.json").read_text("utf-8"))))
    for problem in problems:
        print(f"parity: {problem}")
    agreed = sum(not case["problem"] for case in found["cases"])
    print(
        f"{agreed} of {len(found['cases'])} configurations agree, {time.time() - started:.0f} s: {paths.shown(folder / 'README.md')}"
    )
    return 1 if problems else 0


def _ask(peer: Peer, deviations: list[Deviation], found: dict[str, Any]) -> dict[str, Any]:
    started, every, refused = time.time(), cases(), Counter[tuple[str, str, str]]()
    rollouts = {kind: [peer.rollout(seed, kind=kind) for seed in SEEDS] for kind in KINDS}
    for i, case in enumerate(every):
        _progress(peer.name, i, len(every))
        asked, asked_on = _given(case, rollouts[case.kind])
        try:
            said = peer.express(asked, case.kind)
        except Cannot as no:
            refused[no.option, no.why, case.preset] += 1
            continue
        mine = said.ours or asked
        try:
            measured, first = worst(ours(mine), said.run, asked_on, said.compared)
            problem = ""
        except ValueError as error:
            measured, first, problem = {}, {}, str(error)
        worst_of = max(measured.values(), default=float("nan"))
        if not problem and not worst_of <= said.bar:
            problem = f"differs by {worst_of:.1e}, more than {said.bar:.0e}"
        row = {
            "framework": peer.name,
            "preset": case.preset,
            "given": "" if asked is case.objective else "the kept groups",
            "knobs": specs(case.objective),
            "options": names(asked),
            "theirs": _plain(said.options),
            "converted": list(said.converted),
            "kind": case.kind,
            "compared": said.compared,
            "difference": measured,
            "bar": said.bar,
            "first_batch": first,
            "acts": {slot: _acts(case, slot, rollouts[case.kind][0]) for slot in case.about},
            "problem": problem,
        }
        found["cases"].append(row)
    for (option, why, preset), n in refused.items():
        found["cannot"].append({"framework": peer.name, "option": option, "reason": why, "preset": preset, "configurations": n})
    for deviation in deviations:
        found["deviations"].append({"framework": peer.name, **_deviation(deviation, rollouts[deviation.kind])})
    _progress(peer.name, len(every), len(every))
    return {
        "name": peer.name,
        "package": peer.package,
        "version": version(peer.package),
        "dtype": str(rollouts["off_policy"][0].b.r_N.dtype).removeprefix("torch."),
        "anchor": _anchor(peer),
        "seconds": round(time.time() - started, 1),
    }


KINDS = ("off_policy", "bypass", "on_policy", "far", "far_bypass", "singleton", "ragged")


def _given(case: Case, rollouts: list[batches.Batch]) -> tuple[Objective, list[batches.Batch]]:
    """A preset that drops groups is compared on the groups it keeps: dropping is a loop's work in every framework."""
    if not case.preset or parts(case.objective, "sampling")[0] == "all":
        return case.objective, rollouts
    kept = [b.rows(case.objective.sampling(b.b.r_N, b.b.group_N).nonzero().squeeze(1)) for b in rollouts]
    return replace(case.objective, sampling=sampling.all), kept


def _acts(case: Case, slot: str, batch: batches.Batch) -> float:
    """How much the loss or gradient changes when the slot's variant is swapped for another: 0 would make an agreement empty."""
    a = ours(case.objective)(batch)
    return max(difference(a, ours(swap(case.objective, slot, others=OTHERS))(batch)).values())


def _deviation(d: Deviation, rollouts: list[batches.Batch]) -> dict[str, Any]:
    as_is, first = worst(d.ours, d.peer, rollouts, d.compared)
    row = {
        "option": d.option,
        "reason": d.reason,
        "agrees": d.agrees,
        "kind": d.kind,
        "compared": d.compared,
        "bar": d.bar,
        "first_batch": first,
    }
    row |= {"difference": as_is, "converted": None, "problem": ""}
    if not d.reason and not max(as_is.values()) <= d.bar:
        row["problem"] = f"differs by {max(as_is.values()):.1e}, more than {d.bar:.0e}"
    if d.reason and not max(as_is.values()) > d.bar:
        row["problem"] = f"no longer deviates ({max(as_is.values()):.1e}): its reason is out of date"
    if d.converted:
        row["converted"], _ = worst(d.converted, d.converted_peer or d.peer, rollouts, d.compared)
        if not max(row["converted"].values()) <= d.bar:
            row["problem"] = f"converted, it still differs by {max(row['converted'].values()):.1e}, more than {d.bar:.0e}"
    return row


def _anchor(peer: Peer) -> dict[str, Any]:
    """The example worked in `batches.anchor`, on the peer: what it says, and how far from the hand's result it is."""
    o = replace(BASE, advantage=advantage.group_center, clip=partial(clip.ppo, eps_low=0.2, eps_high=0.2))
    batch = batches.anchor(peer.rollout(0).b.r_N.dtype, fused=peer.rollout is not batches.rollout)
    found = peer.express(o, "off_policy").run(batch)
    leaves, logp_NT = batch.fresh()
    hand = out((logp_NT * torch.tensor(batches.HAND_GRADIENT, dtype=logp_NT.dtype).unsqueeze(1)).sum(), leaves)
    hand = replace(hand, loss=torch.tensor(batches.HAND_LOSS, dtype=torch.float64), size=0.5)
    return {"loss": float(found.loss), "gradient_norm": float(found.gradient.norm()), "difference": difference(hand, found)}


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, (str, int, float, bool, list, type(None))) else str(v) for k, v in options.items()}


def _lines(found: dict[str, Any]) -> str:
    """JSON with one record a line, so that a change of one is a change of one line."""
    shown = []
    for key, value in found.items():
        rows = [json.dumps(row, ensure_ascii=False) for row in value] if isinstance(value, list) else None
        shown.append(f"{json.dumps(key)}: " + ("[\n" + ",\n".join(rows) + "\n]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(shown) + "\n}\n"


def _progress(name: str, done: int, of: int) -> None:
    if sys.stderr.isatty() or done == of:
        print(f"\r  {name:<10}{done:>4}/{of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


def _provenance(seconds: float) -> dict[str, Any]:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=paths.root(), capture_output=True, text=True, check=False)
        return done.stdout.strip()

    packages = (
        "torch",
        "numpy",
        "transformers",
        "accelerate",
        "datasets",
        "tensordict",
        "ray",
        "trl",
        "verl",
        "openrlhf",
        "liger-kernel",
    )
    return {
        "command": "make parity",
        "commit": git("rev-parse", "HEAD") or "unknown",
        "dirty": bool(git("status", "--porcelain", "--", "grpo_repro", "parity")),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "threads": torch.get_num_threads(),
        "environment_seconds": _seconds(),
        "comparison_seconds": round(seconds, 1),
    }


def _seconds() -> float | None:
    """How long `make parity` took to build the environment; it leaves the number in the environment's stamp."""
    stamp = paths.root() / ".venv-parity" / ".ready"
    try:
        return float(stamp.read_text("utf-8"))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
