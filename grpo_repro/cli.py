"""The command line: grpo-repro run | ablate | tour | knobs | algorithms | new | report.

A user's mistake is one sentence on stderr and exit code 2 (GRPO_REPRO_DEBUG=1 shows the traceback); Ctrl-C is one line and 130.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_repro import paths, strict_yaml
from grpo_repro.types import UserError

if TYPE_CHECKING:
    from grpo_repro.claims import Result

F = TypeVar("F", bound=Callable[..., Any])
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
new = typer.Typer(no_args_is_help=True, help="Write a new experiment from a template.")
app.add_typer(new, name="new")


def guarded(command: F) -> F:
    """Turn a UserError into a sentence and Ctrl-C into a line; nothing else is caught."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            if os.environ.get("GRPO_REPRO_DEBUG"):
                raise
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            print(f"\n{str(stop) or 'stopped'}", file=sys.stderr)
            raise typer.Exit(130) from None

    return run  # type: ignore[return-value]


@app.command()
@guarded
def run(
    file: Annotated[Path, typer.Argument(help="a YAML of experiments/runs, or your own")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. scale.steps=5 seed=1")] = None,
    force: Annotated[bool, typer.Option(help="replace what the run's folder holds")] = False,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default results/runs/<name>/seed<k>")] = None,
) -> None:
    """Train one run: config, metrics, provenance and the trained policy go to a folder."""
    from grpo_repro import config, single

    chosen = config.parse_run(config.merged(config.load_yaml(file), dict(map(_change, changes or []))), str(file))
    folder, trained = single.train_one(chosen, out, force)
    if not trained:
        print(f"already done, nothing to train (--force trains again): {paths.shown(folder.path)}")
    rows = folder.rows()
    exams = [row for row in rows if "heldout/accuracy" in row]
    steps = [row for row in rows if "reward" in row]
    print(f"run       {chosen.name}, seed {chosen.seed}, {len(steps)} steps, {folder.provenance.get('seconds')} s")
    watched = (("reward", "reward", steps), ("accuracy", "accuracy", steps), ("held-out", "heldout/accuracy", exams))
    for label, name, shown in watched:
        if shown:
            print(f"{label:<9} {shown[0][name]:.3f} → {shown[-1][name]:.3f}")
    print(f"metrics   {paths.shown(folder.path / 'metrics.jsonl')}")
    print(f"policy    {paths.shown(folder.policy)}   (AutoModelForCausalLM.from_pretrained loads it)")


@app.command()
@guarded
def ablate(
    names: Annotated[list[str] | None, typer.Argument(help="ablations, or all")] = None,
    profile: Annotated[str, typer.Option(help="smoke, quick (a preview) or full (verdicts)")] = "quick",
    processes: Annotated[int | None, typer.Option(min=1, help="worker processes; default: the cores")] = None,
    notebook: Annotated[bool, typer.Option(help="execute the notebook too")] = True,
) -> None:
    """Train what is not recorded yet, execute the notebooks, and show claims, numbers and where to look."""
    from grpo_repro import grid, report
    from grpo_repro import notebook as notebooks

    wanted = report.ablation_names() if names in (None, [], ["all"]) else list(dict.fromkeys(names or []))
    if not wanted:
        raise UserError("there is no ablation in experiments/ablations yet: `grpo-repro new ablation NAME` writes one.")
    ablations = [report.find_ablation(name) for name in wanted]  # every mistake shows before the first run
    for ablation in ablations:
        ablation.profile(profile)
    for ablation in ablations:
        recorded = grid.run_grid(ablation, profile, processes=processes)
        print(f"{ablation.name} {profile}: {len(recorded)} runs recorded")
        if notebook:
            _, ran = notebooks.execute(ablation.name, profile)
            print(f"{ablation.name} {profile}: notebook {'executed' if ran else 'is up to date'}")
    verdicts = {r.claim.id: r for _, results in report.committed().values() for r in results}
    for ablation in ablations:
        view = report.load(ablation.name, profile)
        _print_claims(f"{ablation.title} ({profile})", view.results, verdicts)
        if notebook:
            print(f"figures   {paths.shown(view.folder / 'figures')}\nnotebook  {paths.shown(view.folder / 'notebook.html')}\n")


@app.command()
@guarded
def tour() -> None:
    """The formula on an example small enough to check by hand, each knob turned once: no training, half a minute."""
    from grpo_repro import notebook as notebooks
    from grpo_repro import report

    for name in report.tours():
        folder, ran = notebooks.execute_tour(name)
        print(f"{name}: notebook {'executed' if ran else 'is up to date'}")
        print(f"figures   {paths.shown(folder / 'figures')}\nnotebook  {paths.shown(folder / 'notebook.html')}")


@app.command()
@guarded
def knobs(as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Every variant of every knob: what it is, what it fixes, what it costs."""
    from grpo_repro import catalogue

    found = catalogue.variants()
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for slot, variants in found.items():
        table = _table(f"{catalogue.symbol(slot)} {slot}", variant=19, about=None)
        for v in variants:
            values = "\n".join(f"{name} {_parameter(p)}" for name, p in v["parameters"].items())
            _add(table, v["name"], v["purpose"], v["source"], values, fixes=v["fixes"], costs=v["costs"])
        _console().print(table)


@app.command()
@guarded
def algorithms(as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """The named algorithms, each a choice of knobs."""
    from grpo_repro import catalogue, config
    from grpo_repro.objective import Objective

    found = catalogue.algorithms()
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    plain = config.objective_spec(Objective())
    table = _table("algorithms", name=14, about=None)
    for a in found:
        shown = {slot: v for slot, v in a["knobs"].items() if v != plain[slot] or slot in ("ratio", "advantage", "aggregation")}
        chosen = "\n".join(f"{slot}: {_short(v)}" for slot, v in shown.items())
        _add(table, a["name"], a["purpose"], a["source"], chosen, differs=a["differs"])
    _console().print(table)


@new.command("ablation")
@guarded
def new_ablation(name: str) -> None:
    """experiments/ablations/NAME.yaml and notebooks/NAME.ipynb."""
    from grpo_repro import scaffold

    for path in scaffold.new_ablation(name):
        print(f"wrote {paths.shown(path)}")
    print(f"next: write question, arms and claims into the YAML, then grpo-repro ablate {name} --profile smoke")


@new.command("run")
@guarded
def new_run(name: str) -> None:
    """experiments/runs/NAME.yaml."""
    from grpo_repro import scaffold

    [path] = scaffold.new_run(name)
    print(f"wrote {paths.shown(path)}\nnext: grpo-repro run {paths.shown(path)}")


@app.command()
@guarded
def report(
    name: Annotated[
        str | None, typer.Argument(help="a run with a notebook, e.g. smollm2: gather its seeds, make its report")
    ] = None,
    check: Annotated[bool, typer.Option(help="write nothing; fail if a page is stale")] = False,
) -> None:
    """Make results/README.md and the README's tables from the committed results; or, with NAME, the report of a run over its seeds."""
    if name is not None:
        _report_run(name)
        return
    from grpo_repro import report as reports

    written = reports.write_pages(check)
    print("\n".join(f"wrote {paths.shown(path)}" for path in written) or "up to date")


def main() -> None:
    app(prog_name="grpo-repro")


def _report_run(name: str) -> None:
    from grpo_repro import notebook as notebooks
    from grpo_repro import seeds
    from grpo_repro.spec import nearest

    if name not in (known := seeds.names()):
        raise UserError(
            f"there is no run {name!r} with a notebook{nearest(name, known)}; valid: {', '.join(known) or 'none yet'}."
        )
    folder, ran = notebooks.execute_run(name)
    print(f"{name}: notebook {'executed' if ran else 'is up to date'}")
    print(f"report    {paths.shown(folder / 'README.md')}\nnotebook  {paths.shown(folder / 'notebook.html')}")


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not a change: write KEY=VALUE, e.g. scale.steps=5.")
    try:
        return key.strip(), strict_yaml.parse(value)
    except yaml.YAMLError:
        raise UserError(f"{key}: {value!r} is not a YAML value.") from None


def _print_claims(title: str, results: list[Result], verdicts: dict[str, Result]) -> None:
    from grpo_repro import claims

    table = _table(title, claim=38, predicted=None, here=None, full=None)
    for r in results:
        said = f"{r.claim.id}\n[dim]{escape(r.claim.says)} ({escape(r.claim.source)})[/dim]"
        committed = verdicts.get(r.claim.id)
        full = _measured(committed) if committed else "not run yet"
        here = _measured(r)
        table.add_row(said, escape(f"{r.claim.metric}: {r.claim.comparison} {claims.RELATION[r.claim.predict]}"), here, full)
    _console().print(table)


def _measured(r: Result) -> str:
    from grpo_repro import claims

    numbers = f"{claims.number(r.estimate, signed=True)} {claims.interval_text(r)}, {r.n} seed{'s' * (r.n != 1)}"
    return f"[bold]{r.verdict}[/bold]\n{escape(r.reason if r.estimate is None else numbers)}"


def _parameter(p: dict[str, Any]) -> str:
    value = "required" if p["required"] else f"= {p['default']!r}"
    return f"{value} ({p['range']})" if p["range"] else value


def _short(spec: Any) -> str:
    if isinstance(spec, dict):
        return f"{spec['name']}({', '.join(f'{k}={v}' for k, v in spec.items() if k != 'name')})"
    return ", ".join(map(_short, spec)) or "–" if isinstance(spec, list) else str(spec)


def _add(table: Table, name: str, purpose: str, source: str, values: str, **sections: str) -> None:
    """A row: the name; purpose, source, then the values set off, then a line a section."""
    told = [escape(purpose), f"[dim]source: {escape(source)}[/dim]", escape(values)]
    told += [f"[italic]{label}:[/italic] {escape(text)}" for label, text in sections.items()]
    table.add_row(f"[bold]{name}[/bold]", "\n".join(filter(None, told)))


def _table(title: str, **columns: int | None) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    for name, width in columns.items():
        table.add_column(name, width=width, overflow="fold")
    return table


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, 100) if console.is_terminal else 100
    return console


if __name__ == "__main__":
    main()
