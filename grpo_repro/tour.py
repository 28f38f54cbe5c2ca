"""The formula on examples small enough to check by hand: what notebooks/00_objective.ipynb shows, as tables.

Every number comes from `score` and `loss` themselves; nothing here computes an objective of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor

from grpo_repro import catalogue, exact, knobs
from grpo_repro.objective import Objective, loss, score
from grpo_repro.spec import Spec
from grpo_repro.types import Forward, Minibatch, Norm, Prompt, Response

F64 = torch.float64
SLOPE = "∂J/∂log π"
Clip = exact.Clip
Curve = tuple[list[float], list[float]]

# Two responses to one prompt, of 4 and of 2 tokens; the first is right. Probabilities of each drawn token under the four policies:
# ratios w of 1, 1.5 (a rare token), .5, 1.1 and 5, .6; against the engine's sampler ρ is 1 but for a 2 and a 4.
LENGTHS = (4, 2)
PROBABILITY = {
    "now": ((0.20, 0.03, 0.20, 0.55), (0.50, 0.30)),
    "old": ((0.20, 0.02, 0.40, 0.50), (0.10, 0.50)),
    "ref": ((0.25, 0.02, 0.40, 0.50), (0.20, 0.40)),
    "sampler": ((0.20, 0.01, 0.40, 0.50), (0.025, 0.50)),
}
VALUE = ((0.50, 0.50, 0.25, 0.75), (0.50, 0.25))  # a critic's guess before each token
STEPS = ((0, 1, 0, 1), (0, 1))  # where a reasoning step ends
STEP_SCORES = ((0, 1, 0, 1), (0, 0))


@dataclass(frozen=True)
class Example:
    """A batch with a name for every token."""

    now: Forward
    b: Minibatch
    names: tuple[tuple[str, ...], ...]  # of each row's tokens


def tokens() -> Example:
    """The 2 × 4 tokens above."""
    at_tokens = {name: _padded(rows).log() for name, rows in PROBABILITY.items()}
    mask_NT = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)
    b = replace(
        _batch([1.0, 0.0], [0, 0], mask_NT, [False, False]),
        old_NT=at_tokens["old"],
        ref_NT=at_tokens["ref"],
        sampler_NT=at_tokens["sampler"],
        value_NT=_padded(VALUE),
        step_end_NT=_padded(STEPS) > 0,
        step_r_NT=_padded(STEP_SCORES),
    )
    names = tuple(tuple(f"response {i + 1}, token {t + 1}" for t in range(n)) for i, n in enumerate(LENGTHS))
    return Example(Forward(at_tokens["now"].requires_grad_()), b, names)


def responses(rewards: Mapping[str, Sequence[float]], cut: Iterable[str] = ()) -> Example:
    """One-token responses, a group a prompt, in which the policy has not moved. `cut` names rows that hit the limit, as "easy 4"."""
    rows = [(f"{prompt} {i + 1}", g, float(r)) for g, (prompt, rs) in enumerate(rewards.items()) for i, r in enumerate(rs)]
    logp_NT = torch.full((len(rows), 1), 0.5, dtype=F64).log()
    b = _batch(
        [r for *_, r in rows], [g for _, g, _ in rows], torch.ones(len(rows), 1, dtype=torch.bool), [n in cut for n, *_ in rows]
    )
    b = replace(b, old_NT=logp_NT, ref_NT=logp_NT, sampler_NT=logp_NT)
    return Example(Forward(logp_NT.clone().requires_grad_()), b, tuple((name,) for name, *_ in rows))


def table(objective: Objective, example: Example) -> pd.DataFrame:
    """A row a token, a column a part of the formula; the last column is ∂J/∂log π_θ. Dropped and hidden tokens are NaN.

    `attrs["J"]` is the objective's value.
    """
    scored = score(objective, example.b)
    now = Forward(example.now.logp_NT[scored.row_K])
    total, parts = loss(objective, now, scored.b, Norm.of(scored.b))
    (slope_NT,) = torch.autograd.grad(-total, now.logp_NT)
    inside, b = now.masked(scored.b.mask_NT), scored.b.masked()
    open_NT = torch.ones_like(b.mask_NT)
    for gate in objective.gate:
        open_NT = open_NT & gate(inside, b)
    columns = {
        "r": b.r_N.unsqueeze(1),
        "Â": b.advantage,
        "w": parts.logw_NT.exp(),
        "clipped": parts.hit_NT,
        "gain": parts.gain_NT,
        "ρ": objective.correction(b),
        "gate": open_NT,
        "KL": parts.kl_NT,
        "weight": parts.weight_NT,
        SLOPE: slope_NT,
    }
    wide = {k: x.expand(b.mask_NT.shape).to(F64).masked_fill(~b.mask_NT, math.nan) for k, x in columns.items()}
    row_of = {int(row): k for k, row in enumerate(scored.row_K)}
    lines = {
        name: {k: float(x[row_of[i], t]) if i in row_of else math.nan for k, x in wide.items()}
        for i, names in enumerate(example.names)
        for t, name in enumerate(names)
    }
    made = pd.DataFrame.from_dict(lines, orient="index")
    made.attrs["J"] = -float(total.detach())
    return made


def turn(before: Objective, after: Objective, example: Example) -> pd.DataFrame:
    """What changes in the table when a knob is turned: "before → after" where they differ; columns that stay are left out.

    The reward, Â and w stay in view; the last row is J.
    """
    one, two = table(before, example), table(after, example)
    for c in one:
        if c not in ("weight", SLOPE):  # where a row is dropped these say so; the rest stays as it was
            two[c] = two[c].where(two[c].notna(), one[c])
    cells = {c: [_change(a, b) for a, b in zip(one[c], two[c], strict=True)] for c in one}
    shown = [c for c, texts in cells.items() if c in ("r", "Â", "w", SLOPE) or any("→" in text for text in texts)]
    return _with_value({str(c): cells[c] for c in shown}, one.index, _change(one.attrs["J"], two.attrs["J"]))


def formula(objective: Objective, example: Example) -> pd.DataFrame:
    """The table of one objective, as text."""
    made = table(objective, example)
    return _with_value({str(c): [_number(x) for x in made[c]] for c in made}, made.index, _number(made.attrs["J"]))


def advantages(rewards: Mapping[str, Sequence[float]], **bound: exact.Advantage) -> pd.DataFrame:
    """Â of every variant of ③ that needs nothing but rewards: a row a variant (`bound`: with other parameters), a column a response."""
    example = responses(rewards)
    plain = {k: bound.get(k, f) for k, f in knobs.variants("advantage").items() if not knobs.needs(f)}
    columns = [f"{name}: r = {r:g}" for (name,), r in zip(example.names, example.b.r_N.tolist(), strict=True)]
    made = {name: table(Objective(advantage=f), example)["Â"].map(_number).tolist() for name, f in plain.items()}
    return pd.DataFrame.from_dict(made, orient="index", columns=columns)


RESPONSES = {"5": 1.0, "answer: 5": 1.0, "answer: 6": 0.0, "six": 0.0}  # to "2 + 3 =", with the verifier's word


def rewarded(rewards: Mapping[str, Callable[[Prompt, Response], float]], texts: Mapping[str, float] = RESPONSES) -> pd.DataFrame:
    """r and Â (GRPO's) of four responses to one prompt, under each reward."""
    prompt = Prompt("sum", "2 + 3 =", (), "5")
    made = pd.DataFrame(index=pd.Index(texts, name="response to 2 + 3 ="))
    for name, reward in rewards.items():
        r = [reward(prompt, Response(text, (), False, right, {}, 0.5)) for text, right in texts.items()]
        made[f"r: {name}"] = [_number(v) for v in r]
        made[f"Â: {name}"] = [_number(v) for v in table(Objective(), responses({"sum": r}))["Â"]]
    return made


def presets_against(base: str) -> pd.DataFrame:
    """A row a preset, a column a slot in which any differs; a cell says what the preset has there if that is not the base's."""
    specs = {a["name"]: a["knobs"] for a in catalogue.algorithms()}
    differs = {name: {s: v for s, v in knobs_.items() if v != specs[base][s]} for name, knobs_ in specs.items()}
    slots = [s for s in specs[base] if any(s in d for d in differs.values())]
    cells = {name: [_spec(d[s]) if s in d else "" for s in slots] for name, d in differs.items()}
    return pd.DataFrame.from_dict(cells, orient="index", columns=slots)


def _spec(spec: Spec) -> str:
    if isinstance(spec, str):
        return spec
    return f"{spec['name']} {', '.join(f'{k} {v}' for k, v in spec.items() if k != 'name' and v is not None)}".strip()


# ---------------------------------------------------------------- results that need no training


def two_by_two() -> pd.DataFrame:
    """The seed's matrix for every clip: ∂gain/∂log π_θ in each cell, of w·Â without a clip."""
    grids = exact.two_by_two()
    heads = [_cell_name(cell) for row in next(iter(grids.values())) for cell in row]
    return pd.DataFrame.from_dict(
        {k: [c.gradient for row in g for c in row] for k, g in grids.items()}, orient="index", columns=heads
    )


def two_by_two_cells() -> tuple[list[list[int]], list[str], list[str], list[list[str]]]:
    """What `figures.matrix` draws of it: 0 cut, 1 passes as without a clip, 2 damped, 3 pulled back; rows; columns; texts."""
    grids = {name: [c for row in grid for c in row] for name, grid in exact.two_by_two().items()}
    shares = [[c.gradient / c.unclipped for c in row] for row in grids.values()]
    state = [[0 if s == 0 else 2 if 0 < s < 0.99 else 1 if 0.99 <= s <= 1.01 else 3 for s in row] for row in shares]
    texts = [[f"{_number(c.gradient)} of {_number(c.unclipped)}" for c in row] for row in grids.values()]
    return state, list(grids), [_cell_name(c).replace(", ", "\n", 1) for c in next(iter(grids.values()))], texts


def shapes(clips: Mapping[str, Clip], advantage: float) -> dict[str, Curve]:
    """By clip: w from .1 to 5, and the weight it leaves on ∇log π_θ, in units of Â."""
    ws = [10 ** (k / 60) for k in range(-60, 43)]
    grids = {name: exact.cells(clip, ws, [advantage])[0] for name, clip in clips.items()}
    return {name: (ws, [cell.gradient / advantage for cell in row]) for name, row in grids.items()}


def multipliers(named: Mapping[str, exact.Advantage], groups: Sequence[int], ps: Sequence[float]) -> pd.DataFrame:
    """`exact.multiplier` by estimator and G (rows) and by the prompt's success rate p (columns)."""
    rows = {(name, g): [exact.multiplier(f, g, p) for p in ps] for name, f in named.items() for g in groups}
    return pd.DataFrame.from_dict(
        {f"{name}, G = {g}": v for (name, g), v in rows.items()}, orient="index", columns=pd.Index(ps, name="p")
    )


def dead_groups(groups: Sequence[int], ps: Sequence[float]) -> pd.DataFrame:
    """The share of groups that knob ⑥'s filter drops, by G and p: over all outcomes, by their binomial chances."""

    def share(g: int, p: float) -> float:
        total = 0.0
        for right in range(g + 1):
            r_N = torch.tensor([1.0] * right + [0.0] * (g - right), dtype=F64)
            dropped = not knobs.sampling.drop_zero_variance(r_N, torch.zeros(g, dtype=torch.int64)).any()
            total += dropped * math.comb(g, right) * p**right * (1 - p) ** (g - right)
        return total

    return pd.DataFrame.from_dict(
        {f"G = {g}": [share(g, p) for p in ps] for g in groups}, orient="index", columns=pd.Index(ps, name="p")
    )


def curves(frame: pd.DataFrame) -> dict[str, Curve]:
    """A curve a row, over the columns."""
    return {str(name): (list(map(float, frame.columns)), list(map(float, row))) for name, row in frame.iterrows()}


def kl_gradients(seed: int = 1, vocabulary: int = 8, scale: float = 1.0) -> pd.DataFrame:
    """Expected gradient of each use of ⑤ on a tabular softmax policy, on-policy: its length, and how far from two true gradients.

    Distances are relative to the length of ∇KL(π_θ‖π_ref) and of ∇KL(π_ref‖π_θ): 0 is an identity.
    """
    generator = torch.Generator().manual_seed(seed)
    theta_V, ref_V = (scale * torch.randn(vocabulary, dtype=F64, generator=generator) for _ in range(2))
    reverse_V, forward_V = exact.gradients_of_kl(theta_V, ref_V)
    rows = {}
    for use, objective in exact.uses_of_kl().items():
        found_V = exact.expected_gradient(objective, theta_V, ref_V)
        away = [float((found_V - true_V).norm() / true_V.norm()) for true_V in (reverse_V, forward_V)]
        rows[use] = [float(found_V.norm()), *away, _identity(float(found_V.norm()), *away)]
    return pd.DataFrame.from_dict(
        rows, orient="index", columns=["‖gradient‖", "from ∇KL(π_θ‖π_ref)", "from ∇KL(π_ref‖π_θ)", "so it descends"]
    )


def _identity(length: float, from_reverse: float, from_forward: float) -> str:
    exactly = {"nothing": length, "KL(π_θ‖π_ref)": from_reverse, "KL(π_ref‖π_θ)": from_forward}
    return next((name for name, distance in exactly.items() if distance < 1e-10), "neither")


def _batch(r: Sequence[float], group: Sequence[int], mask_NT: Tensor, cut: Sequence[bool]) -> Minibatch:
    return Minibatch(
        mask_NT=mask_NT,
        r_N=torch.tensor(r, dtype=F64),
        group_N=torch.tensor(group),
        length_N=mask_NT.sum(1),
        cut_N=torch.tensor(cut),
        limit=mask_NT.shape[1],
    )


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """(N, 4), padded with 1: a probability whose log is 0."""
    return torch.tensor([[*row, *[1.0] * (4 - len(row))] for row in rows], dtype=F64)


def _cell_name(cell: exact.Cell) -> str:
    return f"Â = {_number(cell.advantage)}, w = {cell.w:g}"


def _with_value(cells: Mapping[str, list[str]], index: pd.Index, value: str) -> pd.DataFrame:
    """A last row, J, whose number stands in the last column."""
    made = pd.DataFrame(cells, index=index)
    made.loc["J"] = [*[""] * (len(made.columns) - 1), value]
    return made


def _number(x: float) -> str:
    if math.isnan(x):
        return "dropped"
    text = f"{x:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def _change(before: float, after: float) -> str:
    same = before == after or (math.isnan(before) and math.isnan(after)) or abs(before - after) < 1e-12
    return _number(before) if same else f"{_number(before)} → {_number(after)}"
