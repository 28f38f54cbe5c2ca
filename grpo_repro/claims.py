"""Published claims, written down before the run, and the verdicts that recorded runs give on them.

Runs arrive as one tidy frame: columns `panel`, `arm`, `seed`, `step` (0-based, one a rollout) and a column a metric, NaN where it
was not recorded. `measure` makes numbers, `judge` makes verdicts from numbers (also over several ablations together, so that Holm
sees every primary), `evaluate` is both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from grpo_repro import stats
from grpo_repro.types import Finite, Positive, UserError

MIN_SEEDS = 10
KEYS = ["panel", "arm", "seed", "step"]
RELATION = {"greater": "> 0", "less": "< 0", "equal": "= 0"}

Text = Annotated[str, Field(min_length=1)]
Step = Annotated[int, Field(ge=0)]
Verdict = Literal["supported", "contradicted", "no difference", "inconclusive", "preview", "not measured"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Steps(_Strict):
    """The steps `first` to `last`, both included, 0-based."""

    first: Step
    last: Step

    @model_validator(mode="after")
    def _ordered(self) -> Steps:
        if self.last < self.first:
            raise ValueError(f"the window ends at step {self.last}, before its first step {self.first}")
        return self

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}–{self.last}"


class LastSteps(_Strict):
    """The last `last_steps` steps of an arm's longest run (arms of matched token budgets differ in length)."""

    last_steps: Annotated[int, Field(ge=1)]

    def __str__(self) -> str:
        return "last step" if self.last_steps == 1 else f"last {self.last_steps} steps"


def _shape(window: Any) -> str:
    return "last_steps" if isinstance(window, LastSteps) or (isinstance(window, dict) and "last_steps" in window) else "steps"


# The key that is present chooses the shape, so that a mistake is reported once, not once a shape.
Window = Annotated[Annotated[Steps, Tag("steps")] | Annotated[LastSteps, Tag("last_steps")], Discriminator(_shape)]


class Claim(_Strict):
    """What a source says, and the comparison that decides it: the mean of `metric` over `window`, `arm` less `against`."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+([_-][a-z0-9]+)*$")]
    source: Text  # citation
    says: Text  # what the source says, in one sentence
    panel: Text
    arm: Text
    against: Text | None = None  # another arm of the panel; without it the arm is compared with `value`
    value: Finite | None = None  # unit of the metric
    metric: Text
    window: Window
    predict: Literal["greater", "less", "equal"]
    sesoi: Positive  # smallest effect size of interest, unit of the metric
    primary: bool = False
    scope: Text  # where it was measured, e.g. "tiny, peaked start"
    prediction: Text  # one sentence, written before the run
    note: str = ""

    @model_validator(mode="after")
    def _one_comparison(self) -> Claim:
        if (self.against is None) == (self.value is None):
            raise ValueError(f"claim {self.id!r} needs either `against` (an arm) or `value` (a constant), and not both")
        if self.against == self.arm:
            raise ValueError(f"claim {self.id!r} compares the arm {self.arm!r} with itself; name another arm in `against`")
        return self

    @property
    def comparison(self) -> str:
        return f"{self.arm} − {self.value if self.against is None else self.against}"


class Result(BaseModel):
    """A claim with what was measured, in the unit of the metric. None is a number that could not be had; `reason` says why."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    claim: Claim
    estimate: float | None = None  # mean difference over seeds
    level: float = 0.95
    low: float | None = None  # paired t interval at `level`, not adjusted for multiplicity
    high: float | None = None
    n: int = 0  # paired seeds
    p: float | None = None  # two-sided, "no difference"
    p_holm: float | None = None  # p over the primaries; None where the claim is not primary
    p_equivalence: float | None = None  # TOST, "at least sesoi apart"
    p_equivalence_holm: float | None = None
    exceeds_sesoi: bool | None = None  # |estimate| ≥ sesoi
    arm_mean: float | None = None
    against_mean: float | None = None
    seeds: tuple[int, ...] = ()
    differences: tuple[float, ...] = ()  # one a seed
    missing: tuple[int, ...] = ()  # seeds of either arm that could not be paired
    remark: str = ""  # what `measure` noticed
    verdict: Verdict = "not measured"
    reason: str = ""  # why this verdict, remark included


def evaluate(claims: Sequence[Claim], frame: pd.DataFrame, *, decide: bool, level: float = 0.95) -> list[Result]:
    """Numbers and verdicts of `claims` on the recorded runs, in order; `decide=False` (profile quick) gives previews.

    Raises UserError where two claims share an id, or the frame lacks a key column or holds a step of a run twice.
    """
    return judge(measure(claims, frame, level=level), decide=decide, level=level)


def judge(results: Sequence[Result], *, decide: bool, level: float = 0.95) -> list[Result]:
    """The verdict rule, stated once. α = 1 − level; d is the paired difference of window means, one a seed.

    1. Fewer than 10 paired seeds: inconclusive. Without `decide`: preview.
    2. *Equivalent*: TOST within ±sesoi has p < α. Then "no difference", or "supported" where `equal` was predicted.
    3. *Different*: the t interval excludes 0 and |mean d| ≥ sesoi. Then "supported" on the predicted side; else "contradicted".
    4. Otherwise inconclusive. (2 and 3 exclude each other: TOST cannot pass when |mean d| ≥ sesoi.)

    For a primary claim, 2 and 3 also need their Holm-adjusted p < α, adjusted over all primaries in `results`.
    """
    primaries = {str(i): r for i, r in enumerate(results) if r.claim.primary}
    holm_p = stats.holm({i: r.p for i, r in primaries.items() if r.p is not None})
    holm_equal = stats.holm({i: r.p_equivalence for i, r in primaries.items() if r.p_equivalence is not None})
    judged = []
    for i, result in enumerate(results):
        adjusted = result.model_copy(update={"p_holm": holm_p.get(str(i)), "p_equivalence_holm": holm_equal.get(str(i))})
        verdict, why = _verdict(adjusted, decide, 1 - level)
        reason = "; ".join(filter(None, (why, result.remark)))
        judged.append(adjusted.model_copy(update={"verdict": verdict, "reason": reason}))
    return judged


def _verdict(r: Result, decide: bool, alpha: float) -> tuple[Verdict, str]:
    if r.estimate is None:
        return "not measured", ""
    if not decide:
        return "preview", ""
    if r.n < MIN_SEEDS or r.low is None or r.high is None or r.p is None or r.p_equivalence is None:
        return "inconclusive", f"{r.n} paired seeds, a verdict needs {MIN_SEEDS}"
    p = r.p if r.p_holm is None else r.p_holm
    excludes_zero = r.low > 0 or r.high < 0
    if (r.p_equivalence if r.p_equivalence_holm is None else r.p_equivalence_holm) < alpha:
        return ("supported" if r.claim.predict == "equal" else "no difference"), ""
    if excludes_zero and p < alpha and r.exceeds_sesoi:
        return ("supported" if r.claim.predict == ("greater" if r.estimate > 0 else "less") else "contradicted"), ""
    if not excludes_zero:
        return "inconclusive", "the interval holds 0, and equivalence within ±sesoi is not shown"
    if not r.exceeds_sesoi:
        return "inconclusive", "the interval excludes 0, but the effect is smaller than sesoi and equivalence is not shown"
    return "inconclusive", f"the interval excludes 0, but the Holm-adjusted p is {p:.2g}"


def measure(claims: Sequence[Claim], frame: pd.DataFrame, *, level: float = 0.95) -> list[Result]:
    """Paired differences, interval and tests of each claim, not yet judged. Errors as `evaluate`."""
    ids = [claim.id for claim in claims]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise UserError(f"claims: the id {twice[0]!r} is used twice; give every claim its own id.")
    if absent := [key for key in KEYS if key not in frame.columns]:
        raise UserError(f"claims: the table of runs has no column {absent[0]!r}; it needs {', '.join(KEYS)} and one a metric.")
    if repeated := frame[frame.duplicated(KEYS)][KEYS].to_dict("records"):
        raise UserError(f"claims: the table of runs holds {repeated[0]} twice; each step of a run may appear once.")
    return [_measure(claim, frame, level) for claim in claims]


def _measure(claim: Claim, frame: pd.DataFrame, level: float) -> Result:
    arms = [arm for arm in (claim.arm, claim.against) if arm is not None]
    if why := _unmeasurable(claim, arms, frame):
        return Result(claim=claim, remark=why)
    windows = [windowed(frame, claim.panel, arm, claim.metric, claim.window) for arm in arms]
    arm_SK, against_SK = windows if claim.against else (windows[0], windows[0].mask(windows[0].notna(), claim.value))
    ran = sorted(frame.seed[(frame.panel == claim.panel) & frame.arm.isin(arms)].unique())
    # Both arms are averaged over the same steps: those at which both recorded the metric.
    gap_SK = arm_SK - against_SK
    gap_S = gap_SK.mean(axis=1).dropna()
    missing = tuple(int(seed) for seed in ran if seed not in gap_S.index)
    remarks = [f"seeds that could not be paired: {', '.join(map(str, missing))}"] if missing else []
    if np.isinf(arm_SK).any(axis=None) or np.isinf(against_SK).any(axis=None):
        return Result(claim=claim, missing=missing, remark=f"{claim.metric} is infinite ({claim.window})")
    if gap_S.empty:
        why = f"no seed has {claim.metric} ({claim.window}) in every arm compared"
        return Result(claim=claim, missing=missing, remark=why)
    kept_SK = gap_SK.loc[gap_S.index].notna()
    if not kept_SK.all(axis=None):
        remarks.append(f"recorded at {int(kept_SK.values.sum())} of {kept_SK.size} steps compared")
    d = gap_S.to_numpy()
    tests: dict[str, Any] = {}
    estimate = float(d[0])
    if len(d) > 1:
        interval = stats.paired_t(d, level)
        estimate = interval.estimate
        tests = {"low": interval.low, "high": interval.high, "p": interval.p, "p_equivalence": stats.tost(d, claim.sesoi)}
    else:
        remarks.append("one seed: no interval")
    return Result(
        claim=claim,
        estimate=estimate,
        level=level,
        n=len(d),
        exceeds_sesoi=abs(estimate) >= claim.sesoi,
        arm_mean=float(arm_SK.loc[gap_S.index].where(kept_SK).mean(axis=1).mean()),
        against_mean=float(against_SK.loc[gap_S.index].where(kept_SK).mean(axis=1).mean()),
        seeds=tuple(int(seed) for seed in gap_S.index),
        differences=tuple(float(x) for x in d),
        missing=missing,
        remark="; ".join(remarks),
        **tests,
    )


def _unmeasurable(claim: Claim, arms: list[str], frame: pd.DataFrame) -> str:
    here = frame[frame.panel == claim.panel]
    if here.empty:
        return f"no runs of the panel {claim.panel!r}"
    if absent := [arm for arm in arms if arm not in set(here.arm)]:
        return f"no runs of the arm {absent[0]!r} in the panel {claim.panel!r}"
    if claim.metric not in frame.columns or here[here.arm.isin(arms)][claim.metric].isna().all():
        return f"the metric {claim.metric!r} was not recorded"
    return ""


def windowed(frame: pd.DataFrame, panel: str, arm: str, metric: str, window: Window) -> pd.DataFrame:
    """`metric` of one arm: a row a seed, a column a place in the window (0-based); NaN where the metric was not recorded.

    Only seeds whose run reached every step of the window; a run that stopped earlier is left out, never averaged short.
    """
    rows = frame[(frame.panel == panel) & (frame.arm == arm)]
    end = int(rows.step.max())
    first, last = (window.first, window.last) if isinstance(window, Steps) else (end - window.last_steps + 1, end)
    wanted = range(first, last + 1)
    complete_S = pd.crosstab(rows.seed, rows.step).reindex(columns=wanted, fill_value=0).all(axis=1)
    values_SK = rows.pivot(index="seed", columns="step", values=metric).reindex(columns=wanted).astype(float)
    return values_SK.loc[complete_S].set_axis(range(len(wanted)), axis=1)


def table(results: Iterable[Result]) -> pd.DataFrame:
    """The results as words, a row a claim, for people; absent numbers are "–"."""
    return pd.DataFrame(
        {
            "claim": r.claim.id + (" (primary)" if r.claim.primary else ""),
            "source says": f"{r.claim.says} ({r.claim.source})",
            "compared": f"{r.claim.metric}: {r.claim.comparison}, {r.claim.panel}, {r.claim.window}",
            "predicted": RELATION[r.claim.predict],
            "measured": number(r.estimate, signed=True),
            "interval": interval_text(r),
            "smallest of interest": number(r.claim.sesoi),
            "seeds": r.n,
            "p": number(r.p),
            "p (Holm)": number(r.p_holm),
            "scope": r.claim.scope,
            "verdict": r.verdict,
            "why": r.reason,
        }
        for r in results
    )


def number(x: float | None, *, signed: bool = False) -> str:
    """Three significant digits with a true minus sign; "–" where there is no number."""
    return "–" if x is None else f"{x:{'+' if signed and x else ''}.3g}".replace("-", "−")


def interval_text(r: Result) -> str:
    return "–" if r.low is None else f"[{number(r.low, signed=True)}, {number(r.high, signed=True)}]"


def summary(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The results as JSON: floats at 6 significant digits, absent numbers null. `Result.model_validate` reads a row back."""
    return [_rounded(r.model_dump(mode="python")) for r in results]


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_rounded(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x
