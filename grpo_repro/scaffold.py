"""New experiments from a template: one YAML and one notebook make an ablation."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from grpo_repro import paths
from grpo_repro.types import UserError

ABLATION = """\
# One knob, one question. Arms change `knob` only; a profile changes scale only; claims are written before the run.
title: {name}
question: What changes when the clip's upper bound is raised?  # one sentence
seed_says: Write what the source of the idea says.
mechanism: Write why it should happen.
knob: objective.clip

base: {base}

panels:
  main:
    title: The question
    shows: What the panel is for, in one sentence.
    set: {{}}  # common to all arms, e.g. policy.start: peaked
    arms:
      symmetric: {{objective.clip: {{name: ppo, eps_low: 0.2, eps_high: 0.2}}}}
      higher: {{objective.clip: {{name: ppo, eps_low: 0.2, eps_high: 0.28}}}}
  null_condition:
    title: Where the arms must agree
    shows: With one update a rollout the ratio is 1, and no bound of it can act.
    null: true
    set: {{rollout.updates: 1, rollout.minibatches: 1}}
    arms:
      symmetric: {{objective.clip: {{name: ppo, eps_low: 0.2, eps_high: 0.2}}}}
      higher: {{objective.clip: {{name: ppo, eps_low: 0.2, eps_high: 0.28}}}}

profiles:
  smoke: {{seeds: 1, set: {{scale.steps: 2, rollout.prompts: 6, policy.warm_steps: 2, scale.eval_prompts: 6}}}}
  quick: {{seeds: 2, set: {{scale.steps: 8}}}}
  full: {{seeds: 10, first_seed: 100, decide: true, set: {{scale.steps: 20}}}}

claims:
  - id: {name}-main
    source: Author et al. (arXiv id), where
    says: What the source says, in one sentence.
    panel: main
    arm: higher
    against: symmetric
    metric: entropy
    window: {{last_steps: 2}}
    predict: greater
    sesoi: 0.05
    primary: true
    scope: tiny
    prediction: What you expect to see and where, in one sentence, written before the run.

not_tested: []
overturned_by: What result would change your mind.
"""

BASE = """
  task: short
  objective: {preset: grpo, aggregation: token_mean, kl: none}
  rollout: {group_size: 16, prompts: 24, updates: 4, minibatches: 4}"""

RUN = """\
# grpo-repro run {path}          (any key can be changed behind it: scale.steps=5 seed=1)
name: {name}
policy: {{name: tiny, start: warm}}  # smollm2, or any Hugging Face causal LM by path or name
task: short
objective: {{preset: grpo, kl: none}}  # grpo-repro knobs, grpo-repro algorithms
rollout: {{group_size: 16, prompts: 24, updates: 1, minibatches: 4}}
scale: {{steps: 20, lr: 0.0005, eval_prompts: 96}}
"""

PARAMETERS = """\
name = "{name}"
profile = "quick"  # smoke, quick or full
results_dir = ""  # where figures and summary.json go; empty: results/ablations/<name>/<profile>"""

CELLS = (
    """\
from IPython.display import Markdown

from grpo_repro import figures, report""",
    """\
view = report.load(name, profile, results_dir)
a = view.ablation
Markdown(f"# {a.title}\\n\\n**Question.** {a.question}\\n\\n**The source.** {a.seed_says}\\n\\n**Mechanism.** {a.mechanism}")""",
    """\
Markdown("**Predictions, written before the run.**\\n\\n" + "\\n".join(f"- `{c.id}`: {c.prediction}" for c in a.claims))""",
    """\
metrics = [("entropy", "Entropy (nats a token)"), ("accuracy", "Accuracy (share right)")]
panel = next(iter(a.panels))
fig = figures.curves(view.frame, panel, metrics, view.arms(panel), view.caption(panel), title=a.panels[panel].title)
view.save_figure(fig, "curves")
fig""",
    """\
fig = figures.effects(view.results, dict(metrics), view.caption(), title="Claims")
view.save_figure(fig, "claims")
fig""",
    """\
view.table()""",
    """\
view.write_summary()""",
)


def new_ablation(name: str) -> list[Path]:
    """Write experiments/ablations/<name>.yaml and notebooks/<name>.ipynb. Raises UserError for a bad name, or where one is."""
    _named(name, r"[a-z][a-z0-9_]*", "small letters, digits and _")
    yaml = paths.experiments() / "ablations" / f"{name}.yaml"
    notebook = paths.notebooks() / f"{name}.ipynb"
    common = paths.experiments() / "base.yaml"
    base = "{file: ../base.yaml}" if common.is_file() else BASE
    _fresh(yaml, notebook)
    paths.write(yaml, ABLATION.format(name=name, base=base))
    paths.write(notebook, nbformat.writes(notebook_source(name)) + "\n")
    return [yaml, notebook]


def new_run(name: str) -> list[Path]:
    """Write experiments/runs/<name>.yaml. Raises UserError for a bad name, or where it exists."""
    _named(name, r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, '.', '_' and '-'")
    path = paths.experiments() / "runs" / f"{name}.yaml"
    _fresh(path)
    paths.write(path, RUN.format(name=name, path=paths.shown(path)))
    return [path]


def notebook_source(name: str) -> nbformat.NotebookNode:
    """The template notebook, without outputs. Cell ids are fixed: the same name gives the same file."""
    cells = [
        new_code_cell(PARAMETERS.format(name=name), metadata={"tags": ["parameters"]}),
        new_markdown_cell(f"Figures come from recorded runs: `grpo-repro ablate {name}` trains what is missing, then runs this."),
        *(new_code_cell(source) for source in CELLS),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def _named(name: str, pattern: str, allowed: str) -> None:
    if not re.fullmatch(pattern, name):
        raise UserError(f"{name!r} cannot be a name here: use {allowed}, beginning with a letter.")


def _fresh(*files: Path) -> None:
    for path in files:
        if path.exists():
            raise UserError(f"{paths.shown(path)} exists already: edit it, or choose another name.")
