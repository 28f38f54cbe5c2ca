"""Engine mismatch by exact sums, against closed forms of the normal distribution, Monte Carlo, and a plain enumeration."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
from scipy.stats import binom, norm

from grpo_repro import mismatch
from grpo_repro.knobs import correction
from grpo_repro.mismatch import Weights, World, chain, corrected, crossover, decisions, tree, weights

FREE = partial(correction.truncate, w_max=1e8, level="sequence")
TOKEN = partial(correction.truncate, w_max=1e8, level="token")
CAPPED = partial(correction.truncate, w_max=3.0, level="sequence")
MASKED = partial(correction.mask, w_max=3.0, level="sequence")


# ---- the weights alone: log ρ ~ N(−s²/2, s²) ----


def below(s: float, cap: float, power: int) -> float:
    """E[ρ^n; ρ ≤ cap] of that lognormal."""
    return math.exp(power * (power - 1) * s**2 / 2) * norm.cdf(math.log(cap) / s + s / 2 - power * s)


def by_formula(s: float, cap: float, keep: bool) -> Weights:
    above = norm.sf(math.log(cap) / s + s / 2)
    mass, square = (below(s, cap, n) + (cap**n * above if keep else 0.0) for n in (1, 2))
    return Weights(mass, mass**2 / square, 0.0 if keep else above)


@pytest.mark.parametrize(("sigma", "length"), [(0.03, 1000), (0.05, 1000), (0.1, 100), (0.1, 1000), (0.3, 7)])
def test_weights_of_a_product_by_the_normal_distribution_function(sigma: float, length: int) -> None:
    s = sigma * math.sqrt(length)
    for made, right in (
        (weights(CAPPED, sigma, length), by_formula(s, 3, True)),
        (weights(MASKED, sigma, length), by_formula(s, 3, False)),
    ):
        assert (made.mass, made.ess, made.dropped) == pytest.approx((right.mass, right.ess, right.dropped), abs=2e-3)


@pytest.mark.parametrize(
    ("sigma", "length", "truncated", "masked", "share"),
    [
        (0.03, 1000, 0.907, 0.753, 0.051),
        (0.05, 1000, 0.669, 0.463, 0.069),
        (0.1, 100, 0.891, 0.724, 0.056),
        (0.1, 1000, 0.189, 0.109, 0.026),
    ],
)
def test_weights_are_those_that_claims_a12_prints(
    sigma: float, length: int, truncated: float, masked: float, share: float
) -> None:
    assert weights(CAPPED, sigma, length).mass == pytest.approx(truncated, abs=1.5e-3)
    assert weights(MASKED, sigma, length).mass == pytest.approx(masked, abs=2.5e-3)
    assert weights(MASKED, sigma, length).dropped == pytest.approx(share, abs=1.5e-3)


@pytest.mark.parametrize(("sigma", "length", "printed"), [(0.03, 1024, 0.398), (0.1, 64, 0.527), (0.01, 1024, 0.903)])
def test_ess_of_a_product_without_a_bound(sigma: float, length: int, printed: float) -> None:
    made = weights(FREE, sigma, length)
    assert made.ess == pytest.approx(mismatch.product_ess(sigma, length), rel=1e-6)
    assert made.ess == pytest.approx(printed, abs=1e-3)
    assert made.mass == pytest.approx(1, abs=1e-9)


def test_a_long_product_s_ess_is_not_what_a_sample_says() -> None:
    """σ=.1, L=1024: exactly 3.6e-5; a million samples see something larger, because they miss the largest weights."""
    assert mismatch.product_ess(0.1, 1024) == pytest.approx(3.57e-5, rel=1e-3)
    w = np.exp(np.random.default_rng(0).normal(-5.12, 3.2, 1_000_000))
    assert w.mean() ** 2 / (w**2).mean() > 3 * mismatch.product_ess(0.1, 1024)


def test_weights_by_monte_carlo() -> None:
    """The three levels through responses of 64 drawn tokens each."""
    import torch
    from batches import F64, minibatch

    rng, sigma, length, rows = np.random.default_rng(1), 0.2, 16, 40_000
    drawn = rng.normal(-(sigma**2) / 2, sigma, (rows, length))
    b = minibatch(
        [0] * rows, [0] * rows, [[1] * length] * rows, old_NT=torch.tensor(drawn, dtype=F64), sampler_NT=torch.zeros(rows, length)
    )
    for level in ("sequence", "geometric", "token"):
        for method in (correction.truncate, correction.mask):
            chosen = partial(method, w_max=1.5, level=level)
            rho = chosen(b).numpy()[:, 0]
            made = weights(chosen, sigma, 1 if level == "token" else length)
            assert made.mass == pytest.approx(rho.mean(), abs=0.012)
            assert made.ess == pytest.approx(rho.mean() ** 2 / (rho**2).mean(), abs=0.012)
            assert made.dropped == pytest.approx((rho == 0).mean(), abs=0.01)


# ---- the gradient ----


def test_decisions_by_binomials() -> None:
    """∂/∂θ of E_π r, and its estimate under each correction, as sums over the number of right tokens."""
    p, sigma, n = 0.7, 0.2, 12
    world = decisions(sigma, n)
    q = math.exp(float(world.sampler_NT[world.score_NT > 0][0]))  # of a right token
    spread = (math.log(p / q) - math.log((1 - p) / (1 - q))) * math.sqrt(q * (1 - q))
    assert q < p
    assert spread == pytest.approx(sigma, rel=1e-9)
    k = np.arange(n + 1)
    r = norm.cdf((k - p * n) / math.sqrt(p * (1 - p) * n) - 0.5)
    score = k - p * n
    exact = float((binom.pmf(k, n, p) * r * score).sum())
    centred = r - (binom.pmf(k, n, q) * r).sum()
    rho = (p / q) ** k * ((1 - p) / (1 - q)) ** (n - k)
    by_hand = {
        "none": (correction.none, score),
        "token": (TOKEN, k * (p / q) * (1 - p) - (n - k) * ((1 - p) / (1 - q)) * p),
        "sequence": (partial(correction.truncate, w_max=2.0, level="sequence"), np.minimum(rho, 2) * score),
        "geometric": (
            partial(correction.mask, w_max=1.05, level="geometric"),
            np.where(rho ** (1 / n) <= 1.05, rho ** (1 / n), 0) * score,
        ),
    }
    for chosen, weighted in by_hand.values():
        made = corrected(world, chosen)
        mean = (binom.pmf(k, n, q) * centred * weighted).sum()
        base = (binom.pmf(k, n, q) * r).sum()
        second = (binom.pmf(k, n, q) * weighted**2 * (r * (1 - base) ** 2 + (1 - r) * base**2)).sum()  # the reward is a coin
        assert float(made.exact) == pytest.approx(exact, rel=1e-9)
        assert float(made.mean) == pytest.approx(mean, rel=1e-9)
        assert made.variance == pytest.approx(second - mean**2, rel=1e-9)
        assert made.error(100) == pytest.approx(
            math.hypot(abs(mean - exact), math.sqrt((second - mean**2) / 100)) / exact, rel=1e-9
        )


@pytest.mark.parametrize(
    "world", [decisions(0.2, 9), chain(0.01, 9, 0.05), tree(0.4, 3, seed=1)], ids=["decisions", "chain", "tree"]
)
def test_the_product_of_ratios_is_the_exact_gradient(world: World) -> None:
    assert float(world.chance_N.sum()) == pytest.approx(1)
    assert float(world.exact_N.sum()) == pytest.approx(1)
    assert corrected(world, FREE).bias < 1e-9
    assert corrected(world, FREE).cosine == pytest.approx(1)
    assert corrected(world, correction.none).bias > 0.01


@pytest.mark.parametrize("world", [decisions(0.0, 9), chain(0.0, 9), tree(0.0, 3, seed=1)], ids=["decisions", "chain", "tree"])
def test_without_mismatch_every_correction_is_none(world: World) -> None:
    for method, level in itertools.product((correction.truncate, correction.mask), ("token", "sequence", "geometric")):
        made, plain = corrected(world, partial(method, level=level)), corrected(world, correction.none)
        assert made.bias < 1e-9
        assert made.variance == pytest.approx(plain.variance, rel=1e-9)


def test_tree_by_plain_loops() -> None:
    """Each response by hand: its probability, its token weights, the softmax's score."""
    length, answers = 3, 3
    world = tree(0.5, length, seed=3)
    logits = world.theta.detach().numpy()
    mean, square = np.zeros_like(logits), 0.0
    responses = list(itertools.product(range(answers), repeat=length))
    r = world.r_N.numpy()
    chance = np.exp(world.sampler_NT.sum(1).numpy())
    baseline = (chance * r).sum()
    for n, response in enumerate(responses):
        gradient = np.zeros_like(logits)
        for t in range(length):
            row = sum(answers**u for u in range(t)) + int("".join(map(str, response[:t])) or "0", answers)
            p = np.exp(logits[row]) / np.exp(logits[row]).sum()
            rho = p[response[t]] / math.exp(float(world.sampler_NT[n, t]))
            gradient[row] += min(rho, 1.2) * (r[n] - baseline) * (np.eye(answers)[response[t]] - p)
        mean += chance[n] * gradient
        square += chance[n] * (gradient**2).sum()
    made = corrected(world, partial(correction.truncate, w_max=1.2, level="token"))
    np.testing.assert_allclose(made.mean.numpy(), mean.ravel(), rtol=1e-9, atol=1e-12)
    assert made.variance == pytest.approx(square - (mean**2).sum(), rel=1e-9)


def test_in_a_chain_the_token_level_s_bias_grows_with_the_square_of_the_length() -> None:
    def absolute(length: int) -> float:
        made = corrected(chain(1e-6, length, 1e-5), TOKEN)
        return made.bias * float(made.exact.norm())

    slope = math.log(absolute(256) / absolute(64)) / math.log(4)
    assert slope == pytest.approx(2, abs=0.05)


def test_where_the_crossover_is_errors_change_order() -> None:
    length = crossover(0.1, CAPPED, TOKEN, 384)
    assert length is not None

    def gap(n: int) -> float:
        return corrected(decisions(0.1, n), CAPPED).error(384) - corrected(decisions(0.1, n), TOKEN).error(384)

    assert gap(length * 2) > 0 > gap(length // 2)
    assert crossover(0.02, FREE, TOKEN, 384, longest=256) is None
