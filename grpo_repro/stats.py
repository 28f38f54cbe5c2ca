"""Statistics of paired runs: intervals, equivalence, multiplicity. Pure functions; chance comes from an explicit Generator.

`diff` is always one number a seed, (n,): the difference of two arms trained from the same seed, in the unit of the metric. The
intervals hold for any sample of independent numbers, so the band of a learning curve uses `paired_t` on the raw values.
A difference that is the same number for every seed (an exact panel, a bit-identical null) has an interval of width 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy import stats as distributions

from grpo_repro.types import UserError

Sample: TypeAlias = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval, in the unit of the sample; n numbers; p of "the mean is 0", None where no test belongs."""

    estimate: float
    low: float
    high: float
    n: int
    p: float | None = None


def paired_t(diff: Sample, level: float = 0.95) -> Interval:
    """Student's t interval for the mean difference, with the two-sided p of "the mean difference is 0".

    d̄ ± t_{(1+level)/2, n−1} · s/√n, s with ddof 1. Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    Raises UserError for n < 2, NaN or infinity.
    """
    x_n = _sample(diff, "paired_t")
    _fraction(level, "level")
    mean, error, n = _mean(x_n), _standard_error(x_n), len(x_n)
    if error == 0:
        return Interval(mean, mean, mean, n, p=1.0 if mean == 0 else 0.0)
    half = _t_quantile(level, n) * error
    p = 2 * float(distributions.t.sf(abs(mean) / error, n - 1))
    return Interval(mean, mean - half, mean + half, n, p)


def bootstrap_t(diff: Sample, level: float, generator: np.random.Generator, resamples: int = 9999) -> Interval:
    """Studentised bootstrap interval for the mean difference; follows skewness where `paired_t` does not.

    With t* = (d̄* − d̄)/se* over resamples of the n seeds, the interval is [d̄ − q_{hi}(t*)·se, d̄ − q_{lo}(t*)·se], and p is the
    share of |t*| ≥ |d̄/se|, counted with one added to both. A resample of equal numbers has se* = 0 and counts as t* = ±∞, so a
    sample too small for the method (n ≤ 3 at 95%) gets an infinite interval instead of a wrong one.
    Source: Efron & Tibshirani, "An Introduction to the Bootstrap" (1993), §12.5 and §16.4. Errors as `paired_t`.
    """
    x_n = _sample(diff, "bootstrap_t")
    _fraction(level, "level")
    if resamples < 99:
        raise UserError(f"bootstrap_t: resamples is {resamples}, too few for a tail; write at least 99.")
    mean, error, n = _mean(x_n), _standard_error(x_n), len(x_n)
    if error == 0:
        return Interval(mean, mean, mean, n, p=1.0 if mean == 0 else 0.0)
    again_Rn = x_n[generator.integers(n, size=(resamples, n))]
    shift_R = again_Rn.mean(axis=1) - mean
    flat_R = np.ptp(again_Rn, axis=1) == 0
    error_R = np.where(flat_R, 1.0, again_Rn.std(axis=1, ddof=1) / np.sqrt(n))
    t_R = np.where(flat_R & (shift_R != 0), np.copysign(np.inf, shift_R), shift_R / error_R)
    # Order statistics, not interpolated ones: interpolation between ±inf would be NaN.
    low_t = float(np.quantile(t_R, (1 - level) / 2, method="inverted_cdf"))
    high_t = float(np.quantile(t_R, (1 + level) / 2, method="inverted_cdf"))
    p = (1 + int((np.abs(t_R) >= abs(mean) / error).sum())) / (1 + resamples)
    return Interval(mean, mean - high_t * error, mean - low_t * error, n, p)


def wilson(share: float, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval for a proportion: `share` of n answers right. Never leaves [0, 1], and never has width 0.

    (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n). Source: Wilson, J. Am. Stat. Assoc. 22 (1927).
    Raises UserError for a share outside [0, 1] or n < 1.
    """
    if not (0 <= share <= 1 and n >= 1):
        raise UserError(f"wilson: the share is {share} of {n}; give a number in [0, 1] of at least one.")
    _fraction(level, "level")
    z = float(distributions.norm.ppf((1 + level) / 2))
    middle = share + z**2 / (2 * n)
    half = z * float(np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)))
    scale = 1 + z**2 / n
    low, high = (middle - half) / scale, (middle + half) / scale
    return Interval(share, low if share > 0 else 0.0, high if share < 1 else 1.0, n)  # exact where rounding would not be


def prediction_interval(diff: Sample, level: float = 0.95) -> Interval:
    """Where the mean of a replication with the same number of fresh seeds is expected: d̄ ± t_{n−1} · s·√(1/n + 1/n).

    Source: Spence & Stanley, "Prediction interval: what to expect when you're expecting … a replication", PLoS ONE 11 (2016).
    Errors as `paired_t`; no p, since it tests nothing.
    """
    x_n = _sample(diff, "prediction_interval")
    _fraction(level, "level")
    mean = _mean(x_n)
    half = _t_quantile(level, len(x_n)) * _standard_error(x_n) * np.sqrt(2)
    return Interval(mean, mean - float(half), mean + float(half), len(x_n))


def tost(diff: Sample, margin: float) -> float:
    """p of "the mean difference is at least `margin` away from 0": small p shows equivalence within ±margin (> 0, in the unit).

    The larger of the two one-sided t tests against −margin and +margin; p < α exactly when the (1 − 2α) t interval lies inside
    ±margin. Source: Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987). Errors as `paired_t`.
    """
    x_n = _sample(diff, "tost")
    if not (np.isfinite(margin) and margin > 0):
        raise UserError(f"tost: the margin is {margin}; write a positive number in the unit of the metric.")
    mean, error, n = _mean(x_n), _standard_error(x_n), len(x_n)
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return float(distributions.t.sf((margin - abs(mean)) / error, n - 1))  # the nearer bound has the larger p


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjusted p-values, by name: p̃_(k) = max_{j≤k} min(1, (m − j + 1)·p_(j)); an empty family stays empty.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6 (1979).
    Raises UserError where a p is not in [0, 1].
    """
    for name, p in p_values.items():
        if not 0 <= p <= 1:
            raise UserError(f"holm: the p-value of {name!r} is {p}; it must be a number in [0, 1].")
    adjusted: dict[str, float] = {}
    floor = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = floor
    return {name: adjusted[name] for name in p_values}


def iqm(x: Sample) -> float:
    """Interquartile mean: the mean after ⌊n/4⌋ numbers are cut from either end, in the unit of x.

    Source: Agarwal et al., "Deep RL at the edge of the statistical precipice", NeurIPS 2021. Errors as `paired_t`.
    """
    return float(distributions.trim_mean(_sample(x, "iqm"), 0.25))


def probability_of_improvement(x: Sample, y: Sample) -> float:
    """P(X > Y) + ½P(X = Y) over all pairs of a run of x and a run of y, unpaired, in [0, 1]; the Mann-Whitney U over n·m.

    Source: Agarwal et al., NeurIPS 2021, §4.3. Errors as `paired_t`.
    """
    x_n, y_m = _sample(x, "probability_of_improvement"), _sample(y, "probability_of_improvement")
    return float((np.sign(x_n[:, None] - y_m[None, :]).mean() + 1) / 2)


def _sample(x: Sample, where: str) -> np.ndarray:
    x_n = np.asarray(x, dtype=np.float64)
    if x_n.ndim != 1 or len(x_n) < 2:
        raise UserError(f"{where}: needs at least 2 numbers in one row, one a seed, but got shape {x_n.shape}.")
    if not np.isfinite(x_n).all():
        raise UserError(
            f"{where}: {int((~np.isfinite(x_n)).sum())} of {len(x_n)} numbers are NaN or infinite; leave those seeds out."
        )
    return x_n


def _fraction(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise UserError(f"the {name} is {value}; write a share between 0 and 1, such as 0.95.")


def _mean(x_n: np.ndarray) -> float:
    """Exact where all numbers are equal, so that a constant sample has no error of rounding."""
    return float(x_n[0] if np.ptp(x_n) == 0 else x_n.mean())


def _standard_error(x_n: np.ndarray) -> float:
    return 0.0 if np.ptp(x_n) == 0 else float(x_n.std(ddof=1) / np.sqrt(len(x_n)))


def _t_quantile(level: float, n: int) -> float:
    return float(distributions.t.ppf((1 + level) / 2, n - 1))
