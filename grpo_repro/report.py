"""What a notebook reads and writes, and the tables made from what notebooks have written.

The whole of a notebook's interface:

    view = report.load(name, profile, results_dir)    # results_dir "": results/ablations/<name>/<profile>
    view.ablation          the YAML: title, question, seed_says, mechanism, panels[…].title, .shows, .arms, claims, not_tested …
    view.arms(panel)       names of a panel's arms in the YAML's order, the baseline first (what figures.* takes as `arms`)
    view.frame             tidy DataFrame: panel, arm, seed, step, then a column a metric
    view.results           the claims evaluated on it (claims.Result), with verdicts where the profile decides, else previews
    view.table()           claims.table of the results, a DataFrame for people
    view.caption(panel)    the generated sentence under a figure: seeds, interval, profile, commit; without a panel: of all runs
    view.save_figure(fig, stem)     figures/<stem>.png and .svg; tables link to `effects`, else to the first
    view.write_summary()   summary.json; call it last

A notebook that shows exact results has neither a YAML nor runs: `page = report.page(name, results_dir)` has save_figure and
write_summary(…) alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo_repro import claims, figures, paths, record
from grpo_repro.ablation import Ablation, load_ablation
from grpo_repro.claims import Result
from grpo_repro.grid import runs_folder
from grpo_repro.record import Record
from grpo_repro.types import UserError

log = logging.getLogger(__name__)


@dataclass
class Page:
    """The place for what a notebook makes."""

    folder: Path
    saved: list[str] = field(default_factory=list, kw_only=True)

    def save_figure(self, fig: Figure, stem: str) -> None:
        if record.slug(stem) != stem:
            raise UserError(f"save_figure: {stem!r} is not a file's stem; use letters, digits, '-' and '_'.")
        figures.save(fig, self.folder / "figures" / stem)
        self.saved.append(stem)

    def write_summary(self, **content: Any) -> None:
        text = json.dumps({"figures": self.saved, **content}, indent=1, ensure_ascii=False, allow_nan=False)
        paths.write(self.folder / "summary.json", text + "\n")


@dataclass
class View(Page):
    """An ablation's recorded runs of one profile, and the place for what is made of them."""

    ablation: Ablation
    profile: str
    records: list[Record]

    @cached_property
    def frame(self) -> pd.DataFrame:
        return record.frame(self.records)

    @cached_property
    def results(self) -> list[Result]:
        return claims.evaluate(self.ablation.claims, self.frame, decide=self.ablation.profile(self.profile).decide)

    def arms(self, panel: str) -> list[str]:
        return list(self.ablation.panels[panel].arms)

    def table(self) -> pd.DataFrame:
        return claims.table(self.results)

    def caption(self, panel: str | None = None) -> str:
        drawn = [r for r in self.records if panel in (None, r.panel)]
        if not drawn:
            raise UserError(f"caption: no panel {panel!r}; valid: {', '.join(self.ablation.panels)}.")
        told = origin(drawn)
        first = {"commit": told["commits"][0], "dirty": told["dirty"], "profile": self.profile}
        others = f" Some runs are from {len(told['commits']) - 1} other commits." if len(told["commits"]) > 1 else ""
        return figures.caption(first, n_seeds=len({r.seed for r in drawn})) + others

    def write_summary(self, **content: Any) -> None:
        told = origin(self.records)
        judged = {
            "ablation": self.ablation.name,
            "title": self.ablation.title,
            "profile": self.profile,
            "decided": self.ablation.profile(self.profile).decide,
            "seeds": sorted({r.seed for r in self.records}),
            "commits": told["commits"],
            "dirty": told["dirty"],
            "claims": claims.summary(self.results),
        }
        super().write_summary(**judged, **content)


def load(name: str, profile: str, results_dir: str = "") -> View:
    """The recorded runs of an ablation's profile. Raises UserError where runs are missing, with the command that makes them."""
    ablation = find_ablation(name)
    folder = Path(results_dir) if results_dir else runs_folder(name, profile).parent
    records, missing = recorded(ablation, profile)
    if missing:
        raise UserError(
            f"{len(missing)} of {len(missing) + len(records)} runs of {name} {profile} are not recorded under the present "
            f"settings (first: {missing[0]}): run `grpo-repro ablate {name} --profile {profile}`."
        )
    return View(folder, ablation, profile, records)


def page(name: str, results_dir: str = "") -> Page:
    """The place of a notebook without runs: results/<name> unless said."""
    return Page(Path(results_dir) if results_dir else paths.results() / name)


def recorded(ablation: Ablation, profile: str) -> tuple[list[Record], list[str]]:
    """(records in the design's order, names of the runs that are missing)."""
    records, missing = [], []
    for panel, arm, run in ablation.runs(profile):
        path = Record(run.key(), panel, arm, {"seed": run.seed}, {}, {}).path(runs_folder(ablation.name, profile))
        found = record.read(path)
        if found and found.key == run.key():
            records.append(found)
        else:
            missing.append(f"{panel}/{arm} seed {run.seed}")
    return records, missing


def find_ablation(name: str) -> Ablation:
    """The ablation of that name. Raises UserError with the names that exist."""
    from grpo_repro.spec import nearest

    names = ablation_names()
    if name not in names:
        raise UserError(f"there is no ablation {name!r}{nearest(name, names)}; valid: {', '.join(names) or 'none yet'}.")
    return load_ablation(paths.experiments() / "ablations" / f"{name}.yaml")


def ablation_names() -> list[str]:
    return sorted(path.stem for path in (paths.experiments() / "ablations").glob("*.yaml"))


def tours() -> list[str]:
    """Notebooks of exact results: notebooks/00_<name>.ipynb."""
    return sorted(path.stem.removeprefix("00_") for path in paths.notebooks().glob("00_*.ipynb"))


def origin(records: Iterable[Record]) -> dict[str, Any]:
    """Provenance of a set of runs: distinct commits (newest first) and machines, seconds of one core in all."""
    told = sorted((r.provenance for r in {r.key: r for r in records}.values()), key=lambda p: str(p["started"]), reverse=True)
    machines = {json.dumps(p["machine"], sort_keys=True): p["machine"] for p in told}
    versions = {json.dumps(p["versions"], sort_keys=True): p["versions"] for p in told}
    return {
        "commits": list(dict.fromkeys(str(p["commit"]) for p in told)),
        "dirty": None if any(p["dirty"] is None for p in told) else any(p["dirty"] for p in told),
        "versions": list(versions.values()),
        "machines": list(machines.values()),
        "runs": len(told),
        "core_seconds": round(sum(p["seconds"] for p in told), 1),
    }


# ---------------------------------------------------------------- tables, from files that are committed


def committed() -> dict[str, tuple[dict[str, Any], list[Result]]]:
    """Ablation → (its `full` summary, its results), judged together so that Holm sees every primary claim of the repository."""
    found = {}
    for name in ablation_names():
        path = paths.results() / "ablations" / name / "full" / "summary.json"
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                found[name] = (content, [Result.model_validate_json(json.dumps(row)) for row in content["claims"]])
            except (ValueError, KeyError) as error:
                raise UserError(f"{paths.shown(path)} cannot be read ({error.__class__.__name__}): make it again with "
                                f"`grpo-repro ablate {name} --profile full`.") from None  # fmt: skip
    together = claims.judge([r for _, results in found.values() for r in results], decide=True)
    judged = iter(together)
    return {name: (content, [next(judged) for _ in results]) for name, (content, results) in found.items()}


def claims_table(links: str, full: bool) -> str:
    """Markdown, a row a claim; `links` is the way from the page to results/. `full` adds the measured columns."""
    verdicts = committed()
    head = ["claim", "verdict", "measured", "seeds", "scope", "where"]
    if full:
        head = ["ablation", "claim", "predicted", "measured", "95% interval", "of interest", "seeds", "scope", "verdict", "where"]
    rows = []
    for name in ablation_names():
        if name not in verdicts:
            rows.append([f"`{name}`", "not run yet", *[""] * (len(head) - 2)])
            continue
        content, results = verdicts[name]
        place = f"{links}ablations/{name}/full/"
        figure = f"[figure]({place}figures/{_shown(content['figures'])}.png), " if content["figures"] else ""
        where = f"{figure}[notebook]({place}notebook.ipynb)"
        for r in results:
            c, verdict = r.claim, f"**{r.verdict}**"
            says = f"{c.says} ({c.source}){' · primary' if c.primary else ''}"
            estimate, compared = claims.number(r.estimate, signed=True), f"{c.metric}: {c.comparison}"
            predicted = f"{compared} {claims.RELATION[c.predict]}"
            if full:
                numbers = [estimate, claims.interval_text(r), claims.number(c.sesoi), r.n]
                cells = [f"`{name}`", says, predicted, *numbers, c.scope, f"{verdict} {r.reason}".strip(), where]
            else:
                cells = [says, verdict, f"{compared} = {estimate} {claims.interval_text(r)}", r.n, c.scope, where]
            rows.append([str(cell) for cell in cells])
    return markdown(head, rows)


def _shown(figures: list[str]) -> str:
    """The figure that a table links to: the one of the effects, else the first."""
    return next((stem for stem in figures if stem.startswith("effects")), figures[0])


def cost_table(costs: dict[str, dict[str, Any]]) -> str:
    rows = []
    for place, cost in sorted(costs.items()):
        name, profile = place.split("/")
        minutes = cost["core_seconds"] / 60
        rows.append([f"`{name}`", profile, str(cost["runs"]), f"{minutes:.1f}", f"{minutes / 2:.1f}", cost["cpu"]])
    return markdown(["ablation", "profile", "runs", "minutes of one core", "minutes on two cores", "measured on"], rows)


def pages(*, here: bool = True) -> dict[Path, str]:
    """Every generated page with its text, as it should be now. Raises UserError where the README lacks the markers."""
    costs = _costs(here)
    readme = paths.root() / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    text = _between(text, "claims", claims_table("results/", full=False), readme)
    text = _between(text, "cost", cost_table(costs), readme)
    index = (
        "# Results\n\nGenerated by `grpo-repro report` from the committed runs of profile `full`: a row a claim.\nVerdicts are "
        "adjusted (Holm) over the primary claims of all ablations together; the rule is in `grpo_repro/claims.py`.\n\n"
    )
    return {
        paths.results() / "README.md": index + claims_table("", full=True) + "\n",
        paths.results() / "cost.json": json.dumps(costs, indent=1, sort_keys=True) + "\n",
        readme: text,
    }


def write_pages(check: bool = False) -> list[Path]:
    """Write the pages that changed and return them. With `check`, write nothing and raise UserError where one is stale."""
    stale = [(p, text) for p, text in pages(here=not check).items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    if check and stale:
        raise UserError(f"{', '.join(paths.shown(p) for p, _ in stale)}: not up to date; run `grpo-repro report`.")
    for path, text in stale:
        paths.write(path, text)
    return [path for path, _ in stale]


def _costs(here: bool) -> dict[str, dict[str, Any]]:
    """Measured cost by "ablation/profile": what results/cost.json holds, and the profiles that ran here and are not in it.

    Profiles other than `full` are not committed themselves, so a fresh clone knows their cost from this file alone.
    """
    path = paths.results() / "cost.json"
    costs = _json(path) if path.is_file() else {}
    names = ablation_names()
    for file in sorted((paths.results() / "ablations").glob("*/*/provenance.json")):
        told = _json(file)
        place = f"{file.parts[-3]}/{file.parts[-2]}"
        if file.parts[-2] == "full" or (here and place not in costs):
            costs[place] = {"runs": told["runs"], "core_seconds": told["core_seconds"], "cpu": told["machines"][0]["cpu"]}
    return {place: cost for place, cost in costs.items() if place.split("/")[0] in names}


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{paths.shown(path)} cannot be read: delete it, and the command that wrote it makes it again.") from None


def _between(text: str, name: str, content: str, where: Path) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f"{paths.shown(where)}: needs one line {begin} and one line {end}, for the generated table.")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table; a cell may hold any text of one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)
