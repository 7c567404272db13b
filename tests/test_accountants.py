"""RDP curves and their conversion: golden numbers, an independent high-precision reference, and two other libraries.

The numbers of group sgm_exact were made with mpmath at 30 digits (see "how" of each case).
"""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from golden_cases import assert_close, cases
from scipy.optimize import brentq, minimize_scalar

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import (
    ORDERS,
    calibrate_noise,
    compose,
    epsilon,
    gaussian_delta_exact,
    gaussian_epsilon_exact,
    rdp,
)
from fl_lightning.privacy.sampled_gaussian import SMALLEST_MULTIPLIER, sampled_gaussian_rdp
from fl_lightning.records import Release

OPACUS_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))
INTEGER_ORDERS = tuple(map(float, range(2, 257)))


def gaussian(z: float, count: int = 1, rate: float = 1.0) -> Release:
    sampling = "full" if rate == 1 else "poisson"
    return Release("gaussian", "sample", 1.0, z, count=count, sampling=sampling, rate=rate)


def laplace(e0: float, count: int = 1) -> Release:
    return Release("laplace", "sample", e0, 1.0, count=count)


def best_epsilon(releases: list[Release], delta: float) -> float:
    """The minimum over a continuous order, which no list of orders can undercut."""

    def at(log_a: float) -> float:
        orders = (1 + math.exp(log_a),)
        return epsilon(compose(releases, orders), delta, orders)

    return float(minimize_scalar(at, bounds=(-4, 7), method="bounded", options={"xatol": 1e-9}).fun)


def named(case: dict) -> str:
    return case["id"]


@pytest.mark.parametrize("case", cases("privacy.json", "sgm_rdp", "sgm_exact"), ids=named)
def test_sampled_gaussian_golden(case: dict) -> None:
    given = case["inputs"]
    got = given.get("steps", 1) * rdp(gaussian(given["sigma"], rate=given["q"]), (float(given["order"]),))[0]
    assert_close(got, case["expected"], case["tol"])


@pytest.mark.parametrize(
    "case", [c for c in cases("privacy.json", "accountant") if "sample_rate" in c["inputs"]], ids=named
)
def test_accountant_golden(case: dict) -> None:
    given, expected = case["inputs"], case["expected"]
    run = [gaussian(given["noise_multiplier"], given["steps"], given["sample_rate"])]
    delta = given["delta"]

    def with_orders(orders: tuple[float, ...]) -> float:
        return epsilon(compose(run, orders), delta, orders)

    assert_close(with_orders(INTEGER_ORDERS), expected["own_integer_orders_2_256"], {"rel": 1e-8})
    assert_close(with_orders(OPACUS_ORDERS), expected["opacus_rdp_default_orders"], {"rel": 1e-6})
    ours = epsilon(compose(run), delta)
    assert ours <= expected["opacus_rdp_default_orders"] * (1 + 1e-6)  # a longer list can only do better
    assert_close(ours, expected["dp_accounting_rdp_default_orders"], case["tol"])
    assert ours > expected["dp_accounting_pld"]
    if "exact_gaussian" in expected:
        exact = gaussian_epsilon_exact(given["noise_multiplier"], given["steps"], delta)
        assert_close(exact, expected["exact_gaussian"], {"rel": 1e-12})


@pytest.mark.parametrize("case", cases("privacy.json", "scalar"), ids=named)
def test_laplace_golden(case: dict) -> None:
    given, expected = case["inputs"], case["expected"]
    if "/laplace_rdp/" in case["id"]:
        assert_close(rdp(laplace(given["eps0"]), (given["order"],))[0], expected, case["tol"])
    else:
        run = [laplace(given["eps0_each"], given["n_scalars"] * given["T"])]
        if "sigma" in given:
            run.append(gaussian(given["sigma"], given["T"]))
        best = best_epsilon(run, given["delta"])
        assert_close(best, expected.get("eps_rdp", expected.get("eps_joint_rdp")), case["tol"])
        assert best * (1 - 1e-12) <= epsilon(compose(run), given["delta"]) <= best * 1.002


@pytest.mark.parametrize("case", cases("privacy.json", "eq16", "ledger"), ids=named)
def test_gaussian_golden(case: dict) -> None:
    given, expected = case["inputs"], case["expected"]
    reach = 2.0 if given.get("adjacency") == "replace-one" else 1.0
    run = [replace(gaussian(given["sigma"], given.get("T", given.get("T_k"))), sensitivity=reach)]
    delta, ours = given["delta"], epsilon(compose(run), given["delta"])
    exact = gaussian_epsilon_exact(run[0].noise_multiplier, run[0].count, delta)
    assert_close(exact, expected.get("eps_exact_gaussian", expected.get("eps_exact")), case["tol"])
    assert exact < ours < expected["eps_eq16"]
    if "eps_rdp_improved" in expected:
        orders = (expected["order_improved"],)
        assert_close(epsilon(compose(run, orders), delta, orders), expected["eps_rdp_improved"], case["tol"])
        assert expected["eps_rdp_improved"] * (1 - 1e-9) <= ours <= expected["eps_rdp_improved"] * 1.003


@pytest.mark.parametrize("case", cases("privacy.json", "eq6"), ids=named)
def test_exact_gaussian_golden(case: dict) -> None:
    given, kind = case["inputs"], case["id"].split("/")[1]
    if kind == "actual_delta":
        assert_close(gaussian_delta_exact(given["sigma"], 1, given["eps"]), case["expected"], case["tol"])
    else:

        def excess(std: float) -> float:
            return gaussian_epsilon_exact(std / given["sensitivity"], 1, given["delta"]) - given["eps"]

        assert_close(brentq(excess, 0.1, 100.0, xtol=1e-13), case["expected"], case["tol"])


@pytest.mark.parametrize("case", cases("privacy.json", "thm32"), ids=named)
def test_secure_aggregation_golden(case: dict) -> None:
    """arXiv:2106.13673, Theorem 3.2 with the constant an accountant gives: P shares of sigma add to sqrt(P) sigma."""
    given, expected = case["inputs"], case["expected"]
    if given["N"] == given["P"]:

        def excess(z: float) -> float:
            return gaussian_epsilon_exact(z, given["T"], given["delta"]) - given["eps"]

        z = brentq(excess, 0.1, 1e4, xtol=1e-12)
    else:
        rate = given["P"] / given["N"]
        z = calibrate_noise(lambda z: [gaussian(z, given["T"], rate)], given["eps"], given["delta"])
        assert_close(z, expected["multiplier_on_sum"], case["tol"])
    sigma = z * given["c"] / math.sqrt(given["P"])
    assert_close(sigma, expected["sigma_per_client"], case["tol"])
    budget = given["P"] * given["T"] * math.log(1 / given["delta"])
    tol = {"rel": 2 * case["tol"]["rel"]}
    assert_close((sigma * given["N"] * given["eps"] / given["c"]) ** 2 / budget, expected["v_implied"], tol)


def test_exact_gaussian_ends() -> None:
    assert gaussian_epsilon_exact(1.0, 0, 1e-5) == 0
    assert gaussian_epsilon_exact(0.0, 1, 1e-5) == math.inf
    assert gaussian_epsilon_exact(1e6, 1, 1e-5) == 0  # total variation 4e-7 is below delta
    for z, count, delta in [(1e-3, 1, 1e-5), (0.01, 1000, 1e-30), (1e4, 3, 1e-6)]:
        eps = gaussian_epsilon_exact(z, count, delta)
        assert gaussian_delta_exact(z, count, eps) == pytest.approx(delta, rel=1e-8)


def test_rate_of_one_and_more_is_full_batch() -> None:
    """CASES H22: n = 20 with batch 32, and q = 1; bounds: the exact Gaussian below, integer orders above."""
    batch_above_n = gaussian(1.1, 5, rate=32 / 20)
    assert 10.20 < epsilon(compose([batch_above_n]), 1e-5) <= 11.01
    assert 7.51 < epsilon(compose([gaussian(2.0, 10)]), 1e-5) <= 8.09
    for rate in (1.0, 1.6, 100.0):
        poisson = Release("gaussian", "sample", 1.0, 1.1, sampling="poisson", rate=rate)
        assert np.array_equal(rdp(poisson), rdp(gaussian(1.1)))
    almost = rdp(gaussian(1.1, rate=1 - 1e-12))
    assert np.allclose(almost, rdp(gaussian(1.1)), rtol=1e-9)


def test_zero_out_with_poisson_sampling_costs_what_add_remove_costs() -> None:
    """A zeroed unit moves the sum of a batch exactly as a missing one does (dp-accounting: REPLACE_SPECIAL)."""
    given = gaussian(0.9, rate=0.02)
    assert np.array_equal(rdp(replace(given, adjacency="zero_out")), rdp(given))


def test_orders_reach_small_epsilon() -> None:
    """The optimum for epsilon near 0.01 lies near order 1000; a list that ends at 63 is 25 times too large there."""
    assert set(OPACUS_ORDERS) <= set(ORDERS)
    assert max(ORDERS) >= 2048
    run = [gaussian(400.0)]
    assert epsilon(compose(run), 1e-5) < 1.002 * best_epsilon(run, 1e-5)
    assert epsilon(compose(run, OPACUS_ORDERS), 1e-5, OPACUS_ORDERS) > 10 * epsilon(compose(run), 1e-5)


def test_no_noise_is_infinite_and_nothing_is_free() -> None:
    assert np.isinf(rdp(gaussian(0.0))).all()
    assert np.isinf(rdp(gaussian(0.0, rate=0.1))).all()
    assert epsilon(compose([gaussian(1.0), gaussian(0.0)]), 1e-5) == math.inf
    assert epsilon(compose([gaussian(0.0, count=0)]), 1e-5) == 0
    assert epsilon(compose([]), 1e-5) == 0
    assert epsilon(compose([]), 1e-200) == 0
    assert epsilon(rdp(gaussian(1e7)), 1e-5) == 0  # R(1.1) = 5.5e-15 < delta^2: total variation is below delta
    assert epsilon(rdp(gaussian(1e4)), 1e-5) > 0
    unbounded = Release("gaussian", "client", math.inf, 1.0, adjacency="replace_one")
    assert epsilon(rdp(unbounded), 1e-5) == math.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sampling": "poisson", "rate": 0.1, "adjacency": "replace_one"},
            "sampling=poisson with adjacency=replace_one has no proof here: .*without_replacement or full",
        ),
        (
            {"sampling": "without_replacement", "rate": 0.1},
            "sampling=without_replacement with adjacency=add_remove has no proof here: use adjacency=replace_one",
        ),
        (
            {"sampling": "without_replacement", "rate": 0.1, "adjacency": "zero_out"},
            "sampling=without_replacement with adjacency=zero_out has no proof",
        ),
        (
            {"sampling": "without_replacement", "rate": 0.1, "adjacency": "replace_one", "mechanism": "laplace"},
            "sampling=without_replacement with mechanism=laplace has no proof",
        ),
        ({"sampling": "poisson", "rate": 0.1, "mechanism": "laplace"}, "mechanism=laplace has no proof"),
        ({"sampling": "shuffled"}, "sampling='shuffled'"),
        ({"mechanism": "uniform"}, "mechanism='uniform'"),
        ({"adjacency": "swap"}, "adjacency='swap'"),
        ({"rate": 0.5}, "rate=0.5 with sampling=full"),
        ({"sampling": "poisson", "rate": 0.0}, "rate=0.0"),
        ({"sampling": "poisson", "rate": math.nan}, "rate=nan"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"noise": math.nan}, "noise=nan"),
        ({"noise": math.inf}, "noise=inf"),
        ({"sensitivity": -1.0}, "sensitivity=-1.0"),
        ({"sensitivity": 0.0}, "sensitivity=0.0"),
        ({"sensitivity": math.nan}, "sensitivity=nan"),
        ({"count": -1}, "count=-1"),
        ({"count": 1.5}, "count=1.5"),
        ({"count": math.nan}, "count=nan"),
    ],
)
def test_release_without_accountant_is_refused(change: dict, words: str) -> None:
    with pytest.raises(PrivacyError, match=words) as caught:
        rdp(replace(gaussian(1.0), **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_delta_is_a_probability(delta: float) -> None:
    with pytest.raises(PrivacyError, match=r"privacy\.delta"):
        epsilon(rdp(gaussian(1.0)), delta)
    with pytest.raises(PrivacyError, match=r"privacy\.delta"):
        gaussian_epsilon_exact(1.0, 1, delta)


@pytest.mark.parametrize("z", [0.02, 0.25, 0.7, 3.0, 50.0])
@pytest.mark.parametrize("rate", [1e-4, 0.03, 0.6])
def test_curve_has_the_shape_of_renyi_divergence(z: float, rate: float) -> None:
    """R rises with the order, (a - 1) R(a) is convex in a, and R lies between 0 and the unsampled curve."""
    curve, a = rdp(gaussian(z, rate=rate)), np.array(ORDERS)
    assert (curve > 0).all()
    assert (np.diff(curve) > -1e-11 * curve[1:]).all()
    assert (curve <= rdp(gaussian(z))).all()
    slopes = np.diff((a - 1) * curve) / np.diff(a)
    assert (np.diff(slopes) > -1e-9 * slopes[1:]).all()


def test_tiny_noise_bound_is_safe_and_close() -> None:
    """Below SMALLEST_MULTIPLIER a convexity bound takes over: never under the exact value, 0.4 % above it at most."""
    for rate in (1e-3, 0.3):
        for order in (1.1, 1.7, 2.0, 10.9, 4096.0):
            exact = sampled_gaussian_rdp(rate, SMALLEST_MULTIPLIER, (order,))[0]
            bound = sampled_gaussian_rdp(rate, SMALLEST_MULTIPLIER * (1 - 1e-9), (order,))[0]
            assert exact * (1 - 1e-12) <= bound <= exact * (1 + 4e-3)
    assert np.isfinite(sampled_gaussian_rdp(0.1, 1e-100, ORDERS)).all()
    assert 0 <= rdp(gaussian(1e300, rate=0.1)).max() < 1e-10


def _dp_accounting_epsilon(run: list[Release], delta: float, orders: tuple[float, ...]) -> float:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders)
    for release in run:
        if release.mechanism == "laplace":
            event = dp_accounting.LaplaceDpEvent(release.noise_multiplier)
        else:
            event = dp_accounting.GaussianDpEvent(release.noise_multiplier)
            if release.sampling == "poisson":
                event = dp_accounting.PoissonSampledDpEvent(release.rate, event)
        accountant.compose(event, release.count)
    return float(accountant.get_epsilon(delta))


def test_never_above_dp_accounting_on_its_own_orders() -> None:
    """dp-accounting's fractional orders are upper bounds or dropped; ours are exact, so ours is never the larger."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    for z, count, rate in [(1.1, 1000, 0.01), (0.6, 145, 0.0356), (3.0, 2000, 0.1)]:
        run = [gaussian(z, count, rate)]
        theirs = _dp_accounting_epsilon(run, 1e-5, tuple(DEFAULT_RDP_ORDERS))
        assert theirs * 0.99 < epsilon(compose(run), 1e-5) <= theirs * (1 + 1e-9)


@pytest.mark.parametrize(("z", "rate"), [(0.6, 0.0356), (1.0, 0.01), (2.0, 0.2), (5.0, 0.05)])
def test_agrees_with_opacus(z: float, rate: float) -> None:
    """Opacus sums the same series with its signs: fractional orders too."""
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = (*(1.5 + x / 2 for x in range(20)), 20.0, 63.0)
    theirs = compute_rdp(q=rate, noise_multiplier=z, steps=1, orders=list(orders))
    assert np.allclose(rdp(gaussian(z, rate=rate), orders), theirs, rtol=1e-6, atol=1e-12)
