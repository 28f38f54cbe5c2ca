"""Measure: `python -m benchmarks` (in the environment of `make parity`), then `python -m benchmarks.report` draws and writes."""

from __future__ import annotations

import argparse
import sys

from benchmarks import choices, decode, endtoend, floors, headmemory, scaling, store

PARTS = {
    "floors": floors.cases,
    "decode": decode.cases,
    "endtoend": endtoend.cases,
    "memory": headmemory.cases,
    "scaling": scaling.cases,
    "profile": floors.profiles,
    "choices": choices.cases,
}
ON_REQUEST = {"options": endtoend.options}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="cases whose name contains one of these words, e.g. smollm2-bf16 decode"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: one repeat of few cases")
    parser.add_argument("--fresh", action="store_true", help="measure again what is measured")
    parser.add_argument("--list", action="store_true", help="name the cases and the seconds they take, about")
    given = parser.parse_args()
    parts = PARTS | (ON_REQUEST if given.only else {})
    cases = [case for part in parts.values() for case in part(given.quick)]
    if given.only:
        cases = [case for case in cases if any(word in case.name for word in given.only)]
    if not cases:
        print(f"No case is called {' or '.join(given.only)}: --list names them.")
        return 2
    if given.list:
        print("\n".join(f"{case.estimate:5.0f} s  {case.name}" for case in cases))
        print(f"{sum(case.estimate for case in cases):5.0f} s  together")
        return 0
    failed = store.run(cases, given.fresh, lambda text: print(text, flush=True))
    for reason in failed:
        print(f"not measured: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
