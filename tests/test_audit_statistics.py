"""The audit's bounds hold: against exact simulation, a linear programme, and sums written out by hand."""

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from scipy.optimize import linprog

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import ORDERS, gaussian_epsilon_exact
from fl_lightning.privacy.audit import (
    CONFIDENCE,
    SHARES,
    Pairs,
    audit,
    curve_bound,
    gaussian_estimate,
    guess,
    improbable,
    p_value,
    pairs_of,
    refuted_epsilon,
)

DELTA = 1e-5
LEVEL = (1 - CONFIDENCE) / len(SHARES)


def gaussian_curve(z: float) -> np.ndarray:
    return np.array(ORDERS) / (2 * z * z)


@pytest.mark.parametrize(
    ("m", "r", "v", "delta"), [(20, 12, 9, 0.0), (20, 12, 12, 1e-3), (50, 30, 25, 1e-2), (7, 7, 1, 0.1)]
)
def test_the_binomial_bound_is_the_theorems(m: int, r: int, v: int, delta: float) -> None:
    """The right side of the theorem in exact fractions, for p = 3/4 (epsilon = ln 3)."""
    p = Fraction(3, 4)
    mass = [math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(r + 1)]
    steepest = max(sum(mass[v - i : v]) / i for i in range(1, v + 1))
    exact = min(Fraction(1), sum(mass[v:]) + 2 * m * Fraction(delta) * steepest)
    assert p_value(m, r, v, math.log(3), delta) == pytest.approx(float(exact), rel=1e-9)


def test_no_right_guess_refutes_nothing_and_more_of_them_refute_more() -> None:
    assert p_value(10, 10, 0, 1.0, 1e-5) == 1.0
    bounds = [refuted_epsilon(100, 50, v, DELTA, 0.05) for v in range(25, 51)]
    assert bounds == sorted(bounds) and bounds[0] == 0 < bounds[-1]
    for v, bound in zip((40, 50), (bounds[15], bounds[25]), strict=True):
        assert p_value(100, 50, v, bound, DELTA) <= 0.05 < p_value(100, 50, v, bound + 0.01, DELTA)


@pytest.mark.parametrize("right", [0.001, 0.3, 0.7, 0.95, 0.999])
def test_least_is_the_inverse_of_the_trade_off(right: float) -> None:
    """On a grid of x, h(x) written out."""
    pairs = pairs_of(gaussian_curve(1.0))
    x = np.linspace(0, 1, 200_001)[:, None]
    h = np.minimum(np.exp(pairs.epsilon) * x + pairs.delta, 1 - np.exp(-pairs.epsilon) * (1 - pairs.delta - x)).min(1)
    assert pairs.least(right) == pytest.approx(float(x[np.argmax(h >= right), 0]), abs=1e-5)


def most_probable(pairs: Pairs, m: int, r: int, v: int) -> float:
    """max P[V >= v] over all distributions of V on 0..r that obey every inequality: a linear programme."""
    i = np.arange(r + 1)
    rows, limits = [], []
    for c in range(1, r + 1):
        left = np.where(i >= c, i / m, 0.0)
        right = np.where(i >= c - 1, (r - i) / m, 0.0)
        for e, d in zip(pairs.epsilon, pairs.delta, strict=True):
            rows.append(left - math.exp(e) * right)
            limits.append(d)
            rows.append(left - math.exp(-e) * right)
            limits.append(1 - math.exp(-e) * (1 - d))
    found = linprog(-(i >= v).astype(float), np.array(rows), limits, np.ones((1, r + 1)), [1.0], bounds=(0, 1))
    assert found.status == 0
    return float(-found.fun)


@pytest.mark.parametrize(("m", "r", "v"), [(24, 24, 20), (24, 24, 22), (24, 12, 12), (32, 20, 19), (16, 16, 16)])
@pytest.mark.parametrize("z", [1.0, 2.0])
def test_the_greedy_search_finds_what_a_linear_programme_finds(m: int, r: int, v: int, z: float) -> None:
    pairs = pairs_of(gaussian_curve(z))
    most = most_probable(pairs, m, r, v)
    assert 0 < most < 0.99
    assert improbable(pairs, m, r, v, most * 1.001 + 1e-9)
    assert not improbable(pairs, m, r, v, most * 0.999 - 1e-9)


@cache
def bound(m: int, r: int, v: int, z: float) -> float:
    return curve_bound(m, r, v, gaussian_curve(z), DELTA, LEVEL)


def lower(m: int, z: float, rng: np.random.Generator, actual: float | None = None) -> float:
    """epsilon_lower of one simulated run: m canaries in one Gaussian release each, of noise `actual` (z if None)."""
    coins = rng.random(m) < 0.5
    scores = coins + (z if actual is None else actual) * rng.standard_normal(m)
    counts = [max(1, round(share * m)) for share in SHARES]
    return max(bound(m, r, guess(scores, coins, r), z) for r in counts)


@pytest.mark.parametrize("z", [1.0, 3.0])
def test_a_true_mechanism_is_bounded_from_below_in_95_of_100_runs(z: float) -> None:
    truth = gaussian_epsilon_exact(z, 1, DELTA)
    rng = np.random.default_rng(int(z))
    found = [lower(64, z, rng) for _ in range(400)]
    assert sum(value <= truth for value in found) >= 0.95 * 400


def test_the_bound_is_positive_and_grows_with_the_canaries() -> None:
    rng = np.random.default_rng(5)
    means = [float(np.mean([lower(m, 1.0, rng) for _ in range(40)])) for m in (24, 72, 216)]
    assert 0 < means[0] < means[1] < means[2] < gaussian_epsilon_exact(1.0, 1, DELTA)


def test_noise_of_a_tenth_is_refuted_and_the_right_one_is_not() -> None:
    rng = np.random.default_rng(6)
    claimed = pairs_of(gaussian_curve(2.0))
    for actual, wanted in ((0.2, 20), (2.0, 0)):
        refuted = 0
        for _ in range(20):
            coins = rng.random(128) < 0.5
            scores = coins + actual * rng.standard_normal(128)
            refuted += any(improbable(claimed, 128, r, guess(scores, coins, r), LEVEL) for r in (128, 64, 32))
        assert refuted == wanted


def test_a_claim_is_refuted_exactly_when_the_bound_is_above_it() -> None:
    rng = np.random.default_rng(7)
    for actual in (0.1, 0.5, 1.0):
        coins = rng.random(128) < 0.5
        found = audit(coins + actual * rng.standard_normal(128), coins, gaussian_curve(2.0), DELTA)
        assert found.refuted == (found.epsilon_lower > found.epsilon_claimed)
        assert found.epsilon_lower_any <= found.epsilon_lower <= found.epsilon_ceiling


def test_what_an_audit_says() -> None:
    coins = np.arange(64) % 2 == 0
    found = audit(np.where(coins, 1.0, 0.0), coins, gaussian_curve(3.0), DELTA)
    assert found.refuted and found.canaries == 64 and found.included == 32 and found.correct == found.guessed
    assert found.epsilon_lower == found.epsilon_ceiling
    with pytest.raises(
        PrivacyError, match=f"at least {found.epsilon_lower:.4g} .*and {found.epsilon_claimed:.4g} is claimed"
    ):
        found.check()
    assert found.to_dict()["epsilon_lower"] == found.epsilon_lower and found.note is None
    weak = audit(np.where(coins, 1.0, 0.0), coins, gaussian_curve(0.3), DELTA)
    weak.check()
    assert not weak.refuted and "cannot fail" in str(weak.note)
    bare = audit(np.where(coins, 1.0, 0.0), coins, np.full(len(ORDERS), np.inf), DELTA)
    assert bare.to_dict()["epsilon_claimed"] is None and not bare.refuted
    with pytest.raises(PrivacyError, match="one score per canary"):
        audit([1.0], [True, False], gaussian_curve(1.0), DELTA)


def test_scores_that_are_no_numbers_and_ties_tell_nothing() -> None:
    coins = np.arange(200) % 2 == 0
    assert audit(np.full(200, np.nan), coins, gaussian_curve(1.0), DELTA).epsilon_lower == 0
    assert guess(np.zeros(200), coins, 200) == 100


def test_the_estimate_is_near_the_truth() -> None:
    rng = np.random.default_rng(8)
    inside, outside = 1 + rng.standard_normal(4000), rng.standard_normal(4000)
    assert gaussian_estimate(inside, outside, DELTA) == pytest.approx(gaussian_epsilon_exact(1.0, 1, DELTA), rel=0.06)
    assert gaussian_estimate(outside, inside, DELTA) == 0.0
    assert gaussian_estimate([1.0], [0.0, 0.0], DELTA) is None
