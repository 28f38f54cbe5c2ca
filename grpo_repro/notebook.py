"""Execute a notebook through papermill, an ablation's, a run's or one of exact results, and put what it made in place only as a whole."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_repro import paths, record, report, seeds
from grpo_repro.grid import exclusive
from grpo_repro.spec import nearest
from grpo_repro.types import UserError

QUIET = ("--HistoryManager.enabled=False", "--log-level=40")
DRAWS = (
    "figures",
    "style",
    "claims",
    "stats",
    "exact",
    "report",
    "notebook",
    "record",
    "seeds",
    "runpage",
    "runfigures",
)  # modules whose change makes an executed notebook stale
COMPUTES = ("objective", "knobs/*", "presets", "types", "tour")  # and those that a notebook of exact results shows


def execute(name: str, profile: str, **changes: Any) -> tuple[Path, bool]:
    """Run notebooks/<name>.ipynb on the recorded runs of a profile; (its results folder, whether it had to run).

    Writes notebook.ipynb, notebook.html, figures/, summary.json and provenance.json. Raises UserError, before execution, for a
    parameter that the notebook does not declare or that has another type; and for a cell that fails: earlier results then stay.
    """
    source = paths.notebooks() / f"{name}.ipynb"
    wanted = {"name": name, "profile": profile, **changes}
    check(wanted | {"results_dir": ""}, parameters(source), source)
    view = report.load(name, profile)
    yaml = paths.experiments() / "ablations" / f"{name}.yaml"
    inputs = _inputs([source, yaml, *_modules(DRAWS)], [r.sha256 for r in view.records], wanted)
    told = {**report.origin(view.records), "inputs": inputs}
    return _make(source, view.folder, wanted, told, view.ablation.title, f"results/ablations/{name}/{profile}")


def execute_tour(name: str) -> tuple[Path, bool]:
    """The same of notebooks/00_<name>.ipynb, which shows exact results and reads no runs; its folder is results/<name>."""
    source = paths.notebooks() / f"00_{name}.ipynb"
    wanted = {"name": name, "profile": "exact"}
    check(wanted | {"results_dir": ""}, parameters(source), source)
    inputs = _inputs([source, *_modules(DRAWS + COMPUTES)], [], wanted)
    return _make(source, report.page(name).folder, wanted, {**record.provenance(), "inputs": inputs}, name, f"results/{name}")


def execute_run(name: str) -> tuple[Path, bool]:
    """The same of notebooks/<name>.ipynb, which shows the seeds of experiments/runs/<name>.yaml; its folder is results/reports/<name>."""
    source = paths.notebooks() / f"{name}.ipynb"
    wanted = {"name": name, "profile": "run"}
    check(wanted | {"results_dir": ""}, parameters(source), source)
    records = seeds.gather(name)
    answers = [seeds.answers_of(r.path(seeds.folder(name))) for r in records]
    inputs = _inputs([source, *_modules(DRAWS), *answers], [r.sha256 for r in records], wanted)
    told = {**report.origin(records), "inputs": inputs}
    return _make(source, seeds.folder(name), wanted, told, name, f"results/reports/{name}")


def _make(
    source: Path, target: Path, wanted: Mapping[str, Any], told: Mapping[str, Any], title: str, shown_as: str
) -> tuple[Path, bool]:
    target = paths.writable(target)
    if _made(target) == told["inputs"]:
        return target, False
    import nbformat

    with exclusive(target), tempfile.TemporaryDirectory(dir=target, prefix=".making-") as made:
        staging = Path(made)
        executed = _run(source, staging, {**wanted, "results_dir": str(staging)}, shown_as)
        for extension, text in (("ipynb", nbformat.writes(executed) + "\n"), ("html", _html(executed, title))):
            (staging / f"notebook.{extension}").write_text(text, encoding="utf-8")
        if not (staging / "summary.json").is_file():
            raise UserError(f"{paths.shown(source)} wrote no summary: end it with write_summary().")
        for part in sorted(staging.iterdir()):
            _replace(part, target / part.name)
        paths.write(target / "provenance.json", json.dumps(told, indent=1) + "\n")  # last: it says that the rest is whole
    return target, True


def parameters(source: Path) -> dict[str, Any]:
    """Name → default of what the notebook's `parameters` cell declares. Raises UserError where there is no such cell."""
    try:
        cells = json.loads(source.read_text(encoding="utf-8"))["cells"]  # nbformat would take seconds to load
        code = [c for c in cells if c["cell_type"] == "code"]
        tagged = ["".join(c["source"]) for c in code if "parameters" in c["metadata"].get("tags", [])]
    except FileNotFoundError:
        raise UserError(f"{paths.shown(source)}: there is no such notebook; `grpo-repro new ablation` writes one.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{paths.shown(source)} is not a notebook ({error.__class__.__name__}).") from None
    if len(tagged) != 1:
        raise UserError(f"{paths.shown(source)}: has {len(tagged)} cells tagged `parameters`; exactly one must declare them.")
    try:
        lines = [line for line in ast.parse(tagged[0]).body if isinstance(line, ast.Assign)]
        return {t.id: ast.literal_eval(line.value) for line in lines for t in line.targets if isinstance(t, ast.Name)}
    except (SyntaxError, ValueError):
        raise UserError(f"{paths.shown(source)}: its `parameters` cell may only assign plain values, as in a = 1.") from None


def check(given: Mapping[str, Any], declared: Mapping[str, Any], source: Path) -> None:
    """Papermill would inject anything. Raises UserError for an undeclared name, and for a value of another type than declared."""
    for name, value in given.items():
        if name not in declared:
            hint = f"{nearest(name, declared)}; it declares: {', '.join(declared)}."
            raise UserError(f"{paths.shown(source)}: declares no parameter {name!r}{hint}")
        default = declared[name]
        widened = isinstance(default, float) and type(value) is int
        if default is not None and type(value) is not type(default) and not widened:
            kinds = f"{type(default).__name__}, not {type(value).__name__} {value!r}"
            raise UserError(f"{paths.shown(source)}: parameter {name!r} is a {kinds}.")


def _run(source: Path, staging: Path, given: Mapping[str, Any], shown_as: str) -> Any:
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    raw = staging / ".raw.ipynb"
    try:
        with _this_kernel():
            papermill.execute_notebook(
                str(source),
                str(raw),
                dict(given),
                kernel_name="python3",
                language="python",
                progress_bar=False,
                cwd=str(source.parent),
            )
    except papermill.PapermillExecutionError as error:
        code = "\n".join(f"    {line}" for line in error.source.strip().splitlines()[:6])
        raise UserError(
            f"{paths.shown(source)}: cell [{error.exec_count}] failed, earlier results are untouched:\n"
            f"{code}\n  {error.ename}: {error.evalue}"
        ) from None
    except (DeadKernelError, CellTimeoutError, RuntimeError) as error:
        raise UserError(f"{paths.shown(source)}: its kernel died ({error}); is there memory enough?") from None
    text = raw.read_text(encoding="utf-8")
    raw.unlink()
    executed = nbformat.reads(_scrubbed(text, staging, shown_as), as_version=4)
    executed.metadata.pop("papermill", None)
    for cell in executed.cells:
        for machine_made in ("papermill", "execution"):
            cell.metadata.pop(machine_made, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"  # papermill's is random: the same inputs should make the same file
    executed, _ = CoalesceStreamsPreprocessor().preprocess(executed, {})
    return executed


def _scrubbed(text: str, staging: Path, shown_as: str) -> str:
    """The notebook's JSON without paths of this machine: they would differ on every other, and tell who ran it."""
    for path, name in (
        (staging, shown_as),
        (paths.root(), "."),
        (Path(__file__).resolve().parents[1], "."),
        (Path(sys.prefix), "<python>"),
        (Path(sys.base_prefix), "<python>"),
        (Path(tempfile.gettempdir()), "<tmp>"),
        (Path.home(), "~"),
    ):
        if len(str(path)) > 1:
            text = text.replace(json.dumps(str(path))[1:-1], name)
    return re.sub(r"<tmp>/ipykernel_\d+/\d+\.py", "<cell>", text)


@contextmanager
def _this_kernel() -> Iterator[None]:
    """`python3` means this interpreter, with this package, wherever we are called from and whatever kernels the user has."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", *QUIET],
            "display_name": "Python 3",
            "language": "python",
        }
        kernel = Path(folder) / "kernels" / "python3" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        kernel.write_text(json.dumps(spec), encoding="utf-8")
        package = str(Path(__file__).resolve().parents[1])
        changes = {
            "JUPYTER_PATH": os.pathsep.join(filter(None, [folder, os.environ.get("JUPYTER_PATH")])),
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            "JUPYTER_PLATFORM_DIRS": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "TQDM_DISABLE": "1",
            "PYTHONWARNINGS": "ignore:IProgress",  # widgets that a page could not show
            "GRPO_REPRO_ROOT": str(paths.root()),
            "GRPO_REPRO_RESULTS": str(paths.results()),
            "GRPO_REPRO_CACHE": str(paths.cache()),
        }
        saved = {key: os.environ.get(key) for key in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for key, value in saved.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def _html(notebook: Any, title: str) -> str:
    """One file, images inside, outputs cleaned of scripts. Only formulas need the network (MathJax); else they show as TeX."""
    from nbconvert import HTMLExporter

    unused = dict.fromkeys(("require_js_url", "jquery_url", "mermaid_js_url", "mermaid_layout_elk_js_url"), "")
    exporter = HTMLExporter(embed_images=True, sanitize_html=True, **unused)
    exporter.register_filter("clean_html", _clean)  # nbconvert's own knows no headings, paragraphs or table heads
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    return str(body)


def _clean(element: str | bytes) -> str:
    """HTML with the tags of text, tables and code only; any other tag is shown as text, so a script in an output cannot run."""
    import bleach

    text = element.decode() if isinstance(element, bytes) else str(element)
    text = re.sub(r"<style\b.*?</style>", "", text, flags=re.DOTALL | re.IGNORECASE)  # pandas puts one before every table
    tags = {*bleach.ALLOWED_TAGS, "h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "div", "span", "pre", "img", "sup", "sub"}
    tags |= {"table", "thead", "tbody", "tfoot", "tr", "th", "td", "caption"}
    allowed = {**bleach.ALLOWED_ATTRIBUTES, "*": ["class", "id"], "th": ["colspan", "rowspan"], "img": ["src", "alt"]}
    return str(bleach.clean(text, tags=tags, attributes=allowed))


def _modules(names: Iterable[str]) -> list[Path]:
    here = Path(__file__).parent
    return [path for name in names for path in sorted(here.glob(f"{name}.py"))]


def _inputs(files: Iterable[Path], records: Iterable[str], given: Mapping[str, Any]) -> str:
    """A hash of everything that the executed notebook depends on."""
    parts = [*(hashlib.sha256(f.read_bytes()).hexdigest() for f in files), *records, json.dumps(given)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _made(target: Path) -> str | None:
    """The inputs of what the folder holds; None unless all of it is there."""
    whole = all((target / name).is_file() for name in ("notebook.ipynb", "notebook.html", "summary.json", "provenance.json"))
    try:
        return str(json.loads((target / "provenance.json").read_text(encoding="utf-8"))["inputs"]) if whole else None
    except (ValueError, KeyError):
        return None


def _replace(part: Path, target: Path) -> None:
    if target.is_dir():  # a folder cannot be replaced in one step: move the old one aside first
        old = part.with_name(f".old-{part.name}")
        target.rename(old)
        part.rename(target)
        shutil.rmtree(old)
    else:
        os.replace(part, target)
